"""A client's tie to its daemon: absent, dying, new, hung, refusing; forks; closing."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_kit import LAYOUT, SECONDS, SPACE, chain_of, coloured, eventually, fill, open_space

from kvstore.cli_options import Where
from kvstore.client import KVClient
from kvstore.client.life import Life
from kvstore.errors import (
    ClientForked,
    InvalidRequest,
    NamespaceConflict,
    NamespaceUnknown,
    PeerGone,
    VersionMismatch,
)
from kvstore.layout import BlockLayout
from kvstore.rpc import control_pb2 as pb
from kvstore.types import BlockStatus, NamespaceId

Make = Callable[..., Any]
HANG_SECONDS = 4.0
"""Less than what the fake hangs, more than any machine needs for what should take a tenth of it."""


def test_opening_without_a_daemon_makes_everything_a_miss(make_client: Make) -> None:
    client = make_client(wait=False)
    space = open_space(client)
    chain, blocks = chain_of(space, 2), coloured(2)
    assert not client.wait_connected(0.05)
    assert space.match(chain) == 0
    assert not space.match_each(chain).any()
    assert space.load(chain, np.zeros_like(blocks)).reason == "away"
    ticket = space.store(chain, blocks)
    assert ticket.result(0) == (BlockStatus.REFUSED,) * 2
    assert ticket.reason == "away"
    with space.reserve(chain) as reservation:
        assert (reservation.granted, reservation.reason) == ((), "away")
    with pytest.raises(PeerGone):
        client.stat()
    assert client.away_reason
    assert client.statistics().away_calls >= 5


@pytest.mark.parametrize(
    ("variables", "socket"),
    [
        ({}, "/run/user/7/kvstore/default.sock"),
        ({"KVSTORE_DAEMON__NAME": "blue"}, "/run/user/7/kvstore/blue.sock"),
        ({"KVSTORE_DAEMON__NAME": "blue", "KVSTORE_DAEMON__SOCKET": "/run/s"}, "/run/s"),
    ],
)
def test_it_looks_where_the_tools_look(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], socket: str
) -> None:
    for name, text in {"XDG_RUNTIME_DIR": "/run/user/7", **variables}.items():
        monkeypatch.setenv(name, text)
    assert Where().load({})[0].daemon.socket == socket
    monkeypatch.setenv("KVSTORE_HOST__GROUP", "a group that only the daemon's machine has")
    assert KVClient(attach=False)._session.socket == socket
    assert KVClient("/given", attach=False)._session.socket == "/given"


def test_it_attaches_when_the_daemon_comes_and_declares(make_fake: Make, make_client: Make) -> None:
    client = make_client(wait=False, engine="vllm")
    space = open_space(client, label="a model")
    fake = make_fake()
    assert client.wait_connected(SECONDS)
    assert (client.connected, client.away_reason) == (True, "")
    assert client.boot_id == fake.boot_id
    assert client.directory_reads == (True, "")
    (declared,) = fake.called("Declare")
    assert (declared.namespace, declared.label, declared.layout.layers) == (SPACE, "a model", 2)
    assert space.match(chain_of(space, 1)) == 0


def test_background_threads_survive_bugs_of_ours(
    make_fake: Make, make_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attaching is tried again, and the housekeeper goes on with its other work."""
    fake = make_fake()
    struck: list[str] = []

    def breaks_once(place: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*arguments: Any) -> Any:
            if place not in struck:
                struck.append(place)
                raise ZeroDivisionError(place)
            return real(*arguments)

        return broken

    monkeypatch.setattr(Life, "open", breaks_once("attach", Life.open))
    client = make_client()
    space = open_space(client)
    monkeypatch.setattr(type(space.spare), "attend", breaks_once("keep", type(space.spare).attend))
    eventually(lambda: "keep" in struck)
    space.store(chain_of(space, 1), coloured(1)).result(SECONDS)
    eventually(lambda: client.statistics().spare_slots)
    space.lease(chain_of(space, 1)).release()
    eventually(lambda: fake.called("Release"))
    assert struck == ["attach", "keep"]


def test_the_hello_names_engine_process_and_a_held_lock(make_fake: Make, make_client: Make) -> None:
    fake, _ = make_fake(), make_client(engine="vllm")
    hello = fake.hellos[-1]
    assert (hello.engine, hello.pid) == ("vllm", os.getpid())
    assert (hello.protocol_major, hello.protocol_minor) == (1, 0)
    assert Path(fake.arena_dir, "clients", hello.lock_file).exists()
    assert not fake.arena.client_gone(hello.lock_file)


def test_a_daemon_that_dies_and_its_next_life(make_fake: Make, make_client: Make) -> None:
    first, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 3), coloured(3)
    fill(first, space, chain, blocks, 3)
    first.kill()
    eventually(lambda: not client.connected)
    assert space.match(chain) == 0
    assert space.load(chain, np.zeros_like(blocks)).reason == "away"
    second = make_fake()
    assert client.wait_connected(SECONDS)
    assert client.boot_id == second.boot_id != first.boot_id
    assert second.called("Declare")
    assert space.match(chain) == 0
    assert set(space.store(chain, blocks).result(SECONDS)) == {BlockStatus.STORED}
    into = np.zeros_like(blocks)
    assert space.load(chain, into).blocks == 3
    assert (into == blocks).all()
    assert client.statistics().attaches == 2


def test_the_old_lives_lock_ends_with_its_last_writer(make_fake: Make, make_client: Make) -> None:
    first, client = make_fake(), make_client()
    space = open_space(client)
    reservation = space.reserve(chain_of(space, 1))
    view = reservation.view(0)
    lock = Path(first.arena_dir, "clients", first.hellos[-1].lock_file)
    first.kill()
    eventually(lambda: not client.connected)
    make_fake()
    assert client.wait_connected(SECONDS)
    view[:] = 1
    assert lock.exists(), "a copy may still be under way"
    with pytest.raises(PeerGone):
        reservation.view(0)
    reservation.abort()
    assert not lock.exists()


def test_a_daemon_that_forgot_the_client_is_attached_anew(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    fake.forget_clients()
    assert space.lease(chain_of(space, 1)).reason
    eventually(lambda: len(fake.hellos) >= 3 and client.connected)
    assert space.lease(chain_of(space, 1)).reason == ""


def test_another_protocol_is_one_clear_reason_and_misses(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(), make_client(wait=False)
    fake.fail_with["Attach"] = VersionMismatch("client speaks 1.0, this daemon speaks 2.0")
    fake.drop_streams()
    eventually(lambda: "VersionMismatch" in client.away_reason)
    assert "this daemon speaks 2.0" in client.away_reason
    assert client.directory_reads.reason == client.away_reason
    assert open_space(client).match(chain_of(open_space(client), 1)) == 0


def test_a_hung_daemon_costs_a_load_its_deadline_and_no_more(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 3), coloured(3)
    fill(fake, space, chain, blocks, 1)
    fake.hold["Match"] = threading.Event()
    began = time.monotonic()
    into = np.zeros_like(blocks)
    result = space.load(chain, into, deadline_seconds=0.1)
    assert time.monotonic() - began < HANG_SECONDS
    assert result.blocks == 1
    assert "DEADLINE_EXCEEDED" in result.reason
    assert (into[0] == blocks[0]).all()
    assert client.connected


def test_a_hung_daemon_costs_stores_one_deadline_and_then_nothing(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(), make_client(deadline_seconds=0.2)
    space = open_space(client)
    for verb in ("Commit", "Reserve", "Declare"):
        fake.hold[verb] = threading.Event()
    assert "DEADLINE" in space.store(chain_of(space, 1), coloured(1)).reason
    fake.hold["Reserve"].set()
    space.store(chain_of(space, 1, 1), coloured(1))
    assert "not committed yet" in space.store(chain_of(space, 40, 2), coloured(40)).reason
    eventually(lambda: space.store(chain_of(space, 1, 9), coloured(1)).reason == "busy")
    fresh = client.namespace(NamespaceId(b"h" * 32), LAYOUT)
    for _ in range(20):
        assert fresh.match(chain_of(fresh, 1)) == 0
    asked = [call for call in fake.called("Declare") if call.namespace == fresh.id]
    assert len(asked) < 5, "it does not wait for the same answer each time"


def test_the_memory_of_a_daemon_that_left_is_let_go(make_fake: Make, make_client: Make) -> None:
    def mapped() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum("region-0000" in line and str(fake.socket)[:-6] in line for line in lines)

    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 2), coloured(2)
    space.store(chain, blocks).result(SECONDS)
    eventually(lambda: client.statistics().spare_slots)
    view = space.lease(chain).view(0)
    fake.stop()
    eventually(lambda: not client.connected)
    eventually(lambda: mapped() == 1)
    assert (view == blocks[0]).all()
    del view
    eventually(lambda: mapped() == 0)


def test_draining_refuses_stores_and_still_loads(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 2), coloured(2)
    fill(fake, space, chain, blocks[:1], 1)
    fake.news.append(pb.AttachReply())
    fake.news.append(pb.AttachReply(draining=pb.Draining(seconds=5)))
    seeds = itertools.count(1)
    eventually(
        lambda: space.store(chain_of(space, 1, next(seeds)), blocks[:1]).reason == "draining"
    )
    ticket = space.store(chain, blocks)
    assert ticket.result(0) == (BlockStatus.PRESENT, BlockStatus.REFUSED)
    into = np.zeros_like(blocks[:1])
    assert space.load(chain, into).blocks == 1


def test_namespaces_conflict_here_and_there(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    assert open_space(client) is space
    with pytest.raises(NamespaceConflict, match="in this client"):
        open_space(client, BlockLayout(16, 1, 4096))
    fake.fail_with["Declare"] = NamespaceConflict("known with another layout")
    other = make_client()
    with pytest.raises(NamespaceConflict, match="another layout"):
        open_space(other)
    with pytest.raises(InvalidRequest, match="32"):
        client.namespace(b"short", LAYOUT)


def test_a_refusal_found_at_attaching_is_the_reason_of_every_miss(
    make_fake: Make, make_client: Make
) -> None:
    client = make_client(wait=False)
    space = open_space(client)
    fake = make_fake()
    fake.fail_with["Declare"] = NamespaceConflict("known with another layout")
    assert client.wait_connected(SECONDS)
    declared = len(fake.called("Declare"))
    result = space.load(chain_of(space, 1), np.zeros((1, LAYOUT.block_bytes), np.uint8))
    assert result.reason == "NamespaceConflict: known with another layout"
    assert space.store(chain_of(space, 1), coloured(1)).reason == result.reason
    assert len(fake.called("Declare")) == declared, "it is not asked again in this life"


def test_a_forked_child_is_refused_at_once_and_holds_no_lock(
    make_fake: Make, make_client: Make
) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain = chain_of(space, 1)
    lock = fake.hellos[-1].lock_file
    ready, write = os.pipe()
    child = os.fork()
    if child == 0:
        refused = 0
        for verb in (space.match, space.lease, space.reserve, space.exists):
            try:
                verb(chain)
            except ClientForked:
                refused += 1
        client.close()
        os.write(write, bytes([refused]))
        signal.pause()
    try:
        assert os.read(ready, 1) == bytes([4])
        assert space.match(chain) == 0
        assert space.exists(chain).prefix_blocks == 0, "the parent's channel still works"
        held = [os.readlink(entry) for entry in Path(f"/proc/{child}/fd").iterdir()]
        assert not [target for target in held if lock in target], "the child does not hold it"
        assert not fake.arena.client_gone(lock), "the parent still does"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(write)


def test_after_close_data_verbs_miss_and_others_refuse(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 1), coloured(1)
    fill(fake, space, chain, blocks, 1)
    client.close()
    client.close()
    assert space.match(chain) == 0
    assert space.load(chain, np.zeros_like(blocks)).reason == "closed"
    assert space.store(chain, blocks).reason == "closed"
    assert space.lease(chain).reason == "closed"
    assert client.match_groups([chain]).reason == "closed"
    for refused in (lambda: space.exists(chain), lambda: open_space(client), client.stat):
        with pytest.raises(InvalidRequest, match="closed"):
            refused()


def test_close_takes_less_than_a_second_whatever_hangs(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    for verb in ("Commit", "Release", "Abort", "Report"):
        fake.hold[verb] = threading.Event()
    ticket = space.store(chain_of(space, 1), coloured(1))
    space.load(chain_of(space, 1), np.zeros((1, LAYOUT.block_bytes), np.uint8))
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < HANG_SECONDS
    assert ticket.result(SECONDS) == (BlockStatus.DROPPED,)
    names = {thread.name for thread in threading.enumerate()}
    fake.hold["Commit"].set()
    assert "kvstore-attach" not in names


def test_a_tools_client_attaches_nowhere(make_fake: Make, tmp_path: Path) -> None:
    fake = make_fake()
    before = threading.active_count()
    with KVClient(str(tmp_path / "s.sock"), attach=False) as client:
        assert threading.active_count() == before
        assert client.stat() == {"blocks": 3}
        assert client.clear_all() == 1
        space = open_space(client)
        assert space.exists(chain_of(space, 2)).tiers.tolist() == [0, 0]
        assert space.match(chain_of(space, 2)) == 0
        assert "without attaching" in client.away_reason
    assert not fake.hellos


def test_control_verbs(make_fake: Make, make_client: Make) -> None:
    fake, client = make_fake(), make_client()
    space = open_space(client)
    chain, blocks = chain_of(space, 4), coloured(4)
    fill(fake, space, chain, blocks, 2)
    found = space.exists(chain)
    assert (found.prefix_blocks, found.tiers.tolist()) == (4, [2, 2, 4, 4])
    assert space.flush(chain, deadline_seconds=1).tolist() == [False, False, True, True]
    assert space.prefetch(chain) == 4
    assert space.delete(chain, 1) == 1
    assert fake.called("Delete")[0].fingerprint == chain[1]
    space.clear()
    assert fake.called("Clear")[0].namespace == SPACE
    fake.fail_with["Exists"] = NamespaceUnknown("never declared here")
    with pytest.raises(NamespaceUnknown, match="never declared"):
        space.exists(chain)
