"""The block API end to end: a daemon process, a gateway, clients over TCP and a Unix socket."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.client import RawNames
from kvstore.errors import (
    ClientForked,
    ConfigError,
    InvalidRequest,
    NamespaceConflict,
    NamespaceUnknown,
    PeerGone,
)
from kvstore.gateway.process import Gateway
from kvstore.gateway.servicer import SERVICE_NAME
from kvstore.layout import BlockLayout
from kvstore.remote_client import AsyncRemoteClient, RemoteClient
from kvstore.rpc import blocks_pb2 as pb
from kvstore.types import BlockStatus, NamespaceKind, Tier
from tests.conftest import DaemonProcess
from tests.e2e.gateway_kit import LARGE, SMALL, Blocks, RawBlocks, address, each, serving
from tests.e2e.kit import SECONDS_MAX, assert_books, eventually, running

CHAINED, FLAT = NamespaceKind.CHAINED, NamespaceKind.FLAT


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def gateway(daemon: DaemonProcess) -> Iterator[Gateway]:
    with serving(daemon) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[RemoteClient]:
    with RemoteClient(address(gateway), deadline_seconds=SECONDS_MAX) as client:
        yield client


# ---------------------------------------------------------------------- put and get


@pytest.mark.parametrize("kind", [CHAINED, FLAT])
@pytest.mark.parametrize("layout", [SMALL, LARGE])
def test_what_was_put_comes_back(client, layout, kind):
    blocks = Blocks(client, layout, kind)
    names = blocks.put(1, 5)
    assert blocks.got(names) == [True] * 5
    assert blocks.got(names, start=3) == [True] * 2
    found = blocks.remote.exists(names)
    assert found.prefix_blocks == 5
    assert all(mask & 1 << Tier.HOST for mask in found.tiers.tolist())


def test_a_chain_ends_at_its_first_miss_and_keys_stand_alone(client):
    chained, flat = Blocks(client), Blocks(client, kind=FLAT)
    names = chained.put(1, 4)
    chained.remote.delete(RawNames(chained.space, each(names)[2]))
    assert chained.got(names) == [True, True, False, False]
    keys = flat.put(1, 4)
    flat.remote.delete(RawNames(flat.space, each(keys)[2]))
    assert flat.got(keys) == [True, True, False, True]
    assert flat.remote.exists(keys).prefix_blocks == 2


def test_putting_again_succeeds_and_keeps_the_first_bytes(client):
    blocks = Blocks(client)
    names = blocks.put(1, 3)
    other = np.zeros((3, blocks.layout.block_bytes), np.uint8)
    result = blocks.remote.put(names, other)
    assert result.statuses == (BlockStatus.PRESENT,) * 3
    assert blocks.got(names) == [True] * 3


def test_a_put_goes_on_where_another_ended(client):
    blocks = Blocks(client)
    blocks.put(1, 2)
    names = blocks.names(1, 5)
    later = RawNames(blocks.space, names.joined[64:], parent=each(names)[1])
    assert blocks.remote.put(later, blocks.rows(names)[2:]).all_stored
    assert blocks.got(blocks.names(1, 5)) == [True] * 5


def test_blocks_without_a_way_to_them_are_not_stored(client):
    blocks = Blocks(client)
    names = blocks.names(1, 3)
    lost = RawNames(blocks.space, names.joined[32:], parent=each(names)[0])
    result = blocks.remote.put(lost, blocks.rows(names)[1:])
    assert result.statuses == (BlockStatus.NO_PARENT,) * 2
    assert result.reason


def test_blocks_that_are_not_sent_are_told_apart(client, gateway):
    blocks = Blocks(client)
    names = blocks.put(1, 2)
    longer = blocks.names(1, 3)
    with RawBlocks(address(gateway)) as raw:
        header = pb.PutHeader(namespace=blocks.space, fingerprints=longer.joined)
        reply = raw.put([pb.Chunk(header=header).SerializeToString()])
    assert list(reply.statuses) == [pb.PRESENT, pb.PRESENT, pb.NOT_SENT]
    assert blocks.got(names) == [True] * 2


def test_other_languages_need_no_hand_made_frames(client, gateway):
    """Messages as protobuf makes them, in and out."""
    blocks = Blocks(client, LARGE)
    names = blocks.names(1, 2)
    chunks = [pb.Chunk()]
    chunks[0].header.namespace = blocks.space
    chunks[0].header.fingerprints = names.joined
    chunks[0].header.declare.CopyFrom(blocks.declared.message())
    import xxhash

    for block, row in enumerate(blocks.rows(names)):
        data = row.tobytes()
        half = 1 << 20
        checksum = xxhash.xxh3_64_intdigest(data)
        chunks.append(pb.Chunk(block=block, data=data[:half]))
        chunks.append(
            pb.Chunk(block=block, offset=half, data=data[half:], last=True, xxh3=checksum)
        )
    with RawBlocks(address(gateway)) as raw:
        assert set(raw.stub.Put(iter(chunks), timeout=SECONDS_MAX).statuses) == {pb.STORED}
        request = {"namespace": blocks.space, "fingerprints": names.joined, "first_block": 1}
        came = list(raw.call("Get", **request))
    assert [(chunk.block, chunk.offset, chunk.last) for chunk in came] == [
        (1, 0, False),
        (1, 1 << 20, True),
    ]
    assert b"".join(chunk.data for chunk in came) == blocks.rows(names)[1].tobytes()


# ---------------------------------------------------------------------- the other verbs


def test_describe_tells_layout_and_limits(client):
    blocks = Blocks(client)
    with pytest.raises(NamespaceUnknown):
        client.namespace(blocks.space)
    blocks.put(1, 1)
    found = client.namespace(blocks.space)
    assert found.declared == blocks.declared
    everything, limits = client.describe()
    assert blocks.declared in everything
    assert limits.keys_per_call_max > 0


def test_another_layout_under_the_same_id_is_refused(client):
    blocks = Blocks(client)
    blocks.put(1, 1)
    other = Blocks(client, LARGE, space=blocks.space)
    with pytest.raises(NamespaceConflict):
        other.put(1, 1)


def test_clear_forgets_everything(client):
    blocks = Blocks(client)
    names = blocks.put(1, 3)
    blocks.remote.clear()
    assert blocks.remote.exists(names).prefix_blocks == 0
    assert blocks.got(names) == [False] * 3


def test_pins_and_scores(client):
    blocks = Blocks(client)
    names = blocks.put(1, 4)
    longer = blocks.names(1, 6)
    pinned = blocks.remote.pin(longer, 60.0, hard=True)
    assert (pinned.blocks, pinned.reason) == (4, "absent")
    assert blocks.remote.unpin(longer) == 4
    assert blocks.remote.score(longer).tokens_by_tier[Tier.HOST] == 4 * SMALL.block_tokens
    assert blocks.got(names) == [True] * 4


def test_long_lists_go_in_pages(client, monkeypatch):
    """Any number of names in one call of the client."""
    from kvstore.remote_client import verbs

    monkeypatch.setattr(verbs, "KEYS_PER_CALL", 3)
    monkeypatch.setattr(verbs, "PINS_PER_CALL", 3)
    blocks = Blocks(client, kind=FLAT)
    keys = blocks.put(1, 8)
    assert blocks.remote.exists(keys).prefix_blocks == 8
    assert blocks.got(keys) == [True] * 8
    assert blocks.got(keys, start=2) == [True] * 6
    assert blocks.remote.pin(keys, 60.0).blocks == 8
    assert blocks.remote.unpin(keys) == 8
    listed = b"".join(page.names for page in blocks.remote.list_all())
    assert sorted(each(RawNames(blocks.space, listed))) == sorted(each(keys))
    assert blocks.remote.list(blocks_max=3).cursor
    assert blocks.remote.delete(keys) == 8


def test_the_async_client_has_the_same_verbs(gateway):
    async def work() -> None:
        async with AsyncRemoteClient(address(gateway), deadline_seconds=SECONDS_MAX) as client:
            with RemoteClient(address(gateway)) as blocking:
                blocks = Blocks(blocking, LARGE)
            remote = await client.namespace(blocks.declared)
            names = blocks.names(1, 4)
            rows = blocks.rows(names)
            assert (await remote.put(names, rows)).all_stored
            into = np.zeros_like(rows)
            assert (await remote.get(names, into)).blocks == 4
            assert np.array_equal(into, rows)
            assert (await remote.exists(names)).prefix_blocks == 4
            assert (await remote.pin(names, 10.0)).blocks == 4
            assert await remote.unpin(names) == 4
            assert (await remote.score(names)).tokens_by_tier[Tier.HOST] == 16
            assert sum([len(page.tiers) async for page in remote.list_all()]) == 4
            assert await remote.delete(RawNames(blocks.space, each(names)[2])) == 2
            await remote.clear()
            assert (await remote.exists(names)).prefix_blocks == 0
            assert (await client.namespace(blocks.space)).layout == LARGE

    asyncio.run(work())


def test_a_forked_child_is_told_at_once(client, monkeypatch):
    """RPC-4: the channel did not come along."""
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ClientForked, match="open a new one"):
        client.describe()


def test_an_async_client_belongs_to_its_loop(gateway):
    async def make() -> AsyncRemoteClient:
        return AsyncRemoteClient(address(gateway))

    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(make())
    with pytest.raises(InvalidRequest, match="loop"):
        asyncio.run(client.describe())
    loop.run_until_complete(client.close())
    loop.close()


# ---------------------------------------------------------------------- beside the engine's blocks


def test_reading_cold_blocks_pushes_nothing_out(make_daemon):
    """A scan of more than fits into RAM passes through a few slots."""
    daemon = make_daemon({"host.bytes": "8MiB", "host.region_bytes": "8MiB"}).start()
    with serving(daemon) as gateway, RemoteClient(address(gateway)) as client:
        blocks = Blocks(client, BlockLayout(4, 1, 65536))
        cold = [blocks.put(number, 16) for number in range(10)]
        remote = gateway.servicer.client.known_namespace(blocks.space)
        for names in cold:
            assert remote.flush(names, deadline_seconds=SECONDS_MAX).all()
        hot = cold[-1]
        assert blocks.got(hot) == [True] * 16
        for names in cold[:-1]:
            assert blocks.got(names) == [True] * 16
        # What was still in RAM was read there; the rest came and went again.
        assert daemon.counters()["dropped_blocks:staged"] >= 16
        assert all(mask & 1 << Tier.HOST for mask in blocks.remote.exists(hot).tiers.tolist())
    assert_books(daemon)


def test_a_slow_reader_blocks_only_itself(client, gateway):
    blocks = Blocks(client, LARGE, FLAT)
    keys = blocks.put(1, 3)
    many = keys.joined * 20  # more than any buffer on the way holds
    with RawBlocks(address(gateway)) as raw:
        slow = raw.call("Get", namespace=blocks.space, fingerprints=many)
        next(slow)
        for _ in range(5):
            assert blocks.got(keys) == [True] * 3
        assert len(list(slow)) == 2 * 60 - 1


def test_a_new_daemon_life_is_taken_up(make_daemon):
    daemon = make_daemon().start()
    with serving(daemon) as gateway, RemoteClient(address(gateway)) as client:
        blocks = Blocks(client)
        names = blocks.put(1, 3)
        assert gateway.servicer.client.known_namespace(blocks.space).flush(names).all()
        daemon.kill()
        with pytest.raises(PeerGone):
            blocks.remote.exists(names)
        health = health_pb2_grpc.HealthStub(grpc.insecure_channel(address(gateway)))
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)

        def status() -> int:
            return health.Check(request, timeout=SECONDS_MAX).status

        serves = health_pb2.HealthCheckResponse.SERVING
        eventually(lambda: status() != serves, "health tells that the daemon is away")
        assert health.Check(health_pb2.HealthCheckRequest()).status == serves
        daemon.start()
        eventually(lambda: status() == serves, "health tells that it is back")
        assert blocks.got(names) == [True] * 3


# ---------------------------------------------------------------------- the process


def test_reflection_names_the_service(gateway):
    with grpc.insecure_channel(address(gateway)) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (reply,) = stub.ServerReflectionInfo(iter([ask]))
    assert SERVICE_NAME in {found.name for found in reply.list_services_response.service}


def test_the_socket_is_its_owners_alone(gateway):
    mode = os.stat(gateway.socket).st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    with RemoteClient(f"unix:{gateway.socket}") as client:
        names = Blocks(client).put(1, 1)
        assert len(names) == 1


def test_several_gateways_serve_one_daemon(daemon, client, tmp_path):
    blocks = Blocks(client)
    names = blocks.put(1, 2)
    with (
        serving(daemon, socket=str(tmp_path / "g")) as second,
        RemoteClient(address(second)) as other,
    ):
        assert Blocks(other, space=blocks.space).got(names) == [True] * 2


def test_a_place_that_is_taken_is_refused_and_left_alone(daemon, gateway, client):
    for settings in ({"address": "off"}, {"address": address(gateway), "socket": "off"}):
        with pytest.raises(ConfigError, match=r"gateway\."), serving(daemon, **settings):
            pass
    Blocks(client).put(1, 1)
    assert gateway.socket.exists()


def test_cold_keys_from_the_middle_of_a_list_are_those_keys(make_daemon):
    """Through the client itself: keys stand alone, wherever in a list a load begins."""
    daemon = make_daemon().start()
    with serving(daemon) as gateway, RemoteClient(address(gateway)) as client:
        blocks = Blocks(client, kind=FLAT)
        keys = blocks.put(1, 6)
        handle = gateway.servicer.client.known_namespace(blocks.space)
        assert handle.flush(keys, deadline_seconds=SECONDS_MAX).all()
        boot_id = gateway.servicer.client.boot_id
        daemon.kill()
        daemon.start()
        eventually(
            lambda: gateway.servicer.client.boot_id not in (0, boot_id), "the gateway is back"
        )
        into = np.zeros((3, SMALL.block_bytes), np.uint8)
        result = handle.load(keys, into, start=2, deadline_seconds=SECONDS_MAX)
        assert result.blocks == 3
        for name, row in zip(each(keys)[2:5], into, strict=True):
            assert blocks.painter.is_painted(name, row)
