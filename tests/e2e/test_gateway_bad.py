"""Bad input on the gateway: a typed status, nothing stored, nothing leaked, others undisturbed."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from bench.gateways import Certificates
from kvstore.config_load import load
from kvstore.errors import (
    AccessDenied,
    ConfigError,
    NamespaceUnknown,
    Overloaded,
    PeerGone,
    Unauthenticated,
)
from kvstore.gateway import access
from kvstore.gateway.process import Gateway
from kvstore.remote_client import RemoteClient, Tls
from kvstore.rpc import blocks_pb2 as pb
from kvstore.rpc.chunks import CHUNK_BYTES, split_data
from kvstore.types import NamespaceKind
from tests.conftest import DaemonProcess
from tests.e2e.gateway_kit import (
    LARGE,
    Blocks,
    RawBlocks,
    address,
    changed,
    put_messages,
    serving,
)
from tests.e2e.kit import SECONDS_MAX, assert_books, eventually, refusal, running

MIB = 1 << 20
INVALID, LOST = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running() as daemon:
        yield daemon
        assert_books(daemon)


@pytest.fixture(scope="module")
def gateway(daemon: DaemonProcess) -> Iterator[Gateway]:
    with serving(daemon, idle_seconds_max="1s") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[RemoteClient]:
    with RemoteClient(address(gateway), deadline_seconds=SECONDS_MAX) as client:
        yield client


@pytest.fixture
def raw(gateway: Gateway) -> Iterator[RawBlocks]:
    with RawBlocks(address(gateway)) as raw:
        yield raw


@pytest.fixture(autouse=True)
def _others_are_undisturbed(client, gateway) -> Iterator[None]:
    """Whatever the test did: no stream stays open, another caller's put and get go well."""
    yield
    eventually(lambda: not len(gateway.servicer.streams), "no stream stays open")
    blocks = Blocks(client)
    assert blocks.got(blocks.put(1, 2)) == [True, True]


# ---------------------------------------------------------------------- uploads


def damaged(messages: list[bytes]) -> None:
    data = bytearray(split_data(messages[1]).data)
    data[77] ^= 4
    messages[1] = changed(messages[1], bytes(data))


def swapped(messages: list[bytes]) -> None:
    messages[1], messages[2] = messages[2], messages[1]


def gone(messages: list[bytes]) -> None:
    del messages[1]


def repeated(messages: list[bytes]) -> None:
    messages.insert(2, messages[1])


def backwards(messages: list[bytes]) -> None:
    """Block 1 before block 0."""
    messages[1:3], messages[3:5] = messages[3:5], messages[1:3]


def too_short(messages: list[bytes]) -> None:
    messages[2] = changed(messages[2], b"x" * 100)


def too_long(messages: list[bytes]) -> None:
    messages[2] = changed(messages[2], bytes(split_data(messages[2]).data) + b"x")


def unfinished(messages: list[bytes]) -> None:
    del messages[2:]


def empty(messages: list[bytes]) -> None:
    messages[1] = changed(messages[1], b"")


def huge_chunk(messages: list[bytes]) -> None:
    messages[1] = changed(messages[1], bytes(CHUNK_BYTES + 1))


def early_trailer(messages: list[bytes]) -> None:
    messages[1] = changed(messages[1], last=True)


def no_trailer(messages: list[bytes]) -> None:
    messages[2] = changed(messages[2], last=False)


def unnamed(messages: list[bytes]) -> None:
    messages[1] = changed(messages[1], block=99)


def headless(messages: list[bytes]) -> None:
    del messages[0]


def two_headed(messages: list[bytes]) -> None:
    messages.insert(1, messages[0])


def nothing(messages: list[bytes]) -> None:
    messages.clear()


def garbage(messages: list[bytes]) -> None:
    messages[1] = b"\xff" * 1000


WRONG = [
    (damaged, LOST),
    (swapped, INVALID),
    (gone, INVALID),
    (repeated, INVALID),
    (backwards, INVALID),
    (too_short, INVALID),
    (too_long, INVALID),
    (unfinished, INVALID),
    (empty, INVALID),
    (huge_chunk, INVALID),
    (early_trailer, INVALID),
    (no_trailer, INVALID),
    (unnamed, INVALID),
    (headless, INVALID),
    (two_headed, INVALID),
    (nothing, INVALID),
    (garbage, INVALID),
]


@pytest.mark.parametrize(("spoil", "code"), WRONG, ids=lambda value: getattr(value, "__name__", ""))
def test_an_upload_gone_wrong_stores_nothing(client, raw, spoil: Callable, code):
    blocks = Blocks(client, LARGE)
    Blocks(client, LARGE, space=blocks.space).put(9, 1)  # the namespace is known
    names = blocks.names(1, 2)
    messages = put_messages(blocks, names, blocks.rows(names))
    spoil(messages)
    found = refusal(lambda: raw.put(messages))
    assert found.code == code, found
    assert found.kind in ("InvalidRequest", "ChecksumMismatch")
    assert blocks.remote.exists(names).prefix_blocks == 0
    assert blocks.put(1, 2).joined == names.joined
    assert blocks.got(names) == [True, True]


def test_what_came_before_the_damage_stays(client, raw):
    """A block is whole or not there; blocks do not fall with their neighbours."""
    blocks = Blocks(client, LARGE)
    names = blocks.names(1, 10)
    messages = put_messages(blocks, names, blocks.rows(names))
    messages[20] = changed(messages[20], xxh3=5)
    assert refusal(lambda: raw.put(messages)).code == LOST
    found = blocks.remote.exists(names).prefix_blocks
    assert found in (0, 7, 8, 9)
    assert blocks.got(names) == [True] * found + [False] * (10 - found)


def test_an_abandoned_upload_leaves_nothing(client, gateway, daemon):
    """The caller goes in the middle of a block."""
    blocks = Blocks(client, LARGE)
    blocks.put(9, 1)
    names = blocks.names(1, 2)
    messages = put_messages(blocks, names, blocks.rows(names))
    filling = daemon.stat()["reservations"]["slots"]
    with RawBlocks(address(gateway)) as raw:
        call = raw.channel.stream_unary("/kvstore.blocks.v1.Blocks/Put").future(
            _then_wait(messages[:2])
        )
        eventually(lambda: len(gateway.servicer.streams), "the upload is under way")
        call.cancel()
    eventually(lambda: not len(gateway.servicer.streams), "it is over")
    assert blocks.remote.exists(names).prefix_blocks == 0
    assert daemon.stat()["reservations"]["slots"] == filling


def test_an_idle_stream_is_cancelled(client, gateway):
    """Nothing came for longer than gateway.idle_seconds_max."""
    blocks = Blocks(client, LARGE)
    names = blocks.names(1, 2)
    messages = put_messages(blocks, names, blocks.rows(names))
    with RawBlocks(address(gateway)) as raw:
        found = refusal(lambda: raw.put(_then_wait(messages[:2])))
    assert found.code == grpc.StatusCode.CANCELLED
    assert blocks.put(1, 2)


def _then_wait(messages: list[bytes]) -> Iterator[bytes]:
    yield from messages
    time.sleep(SECONDS_MAX)


def test_too_many_streams_are_refused(daemon, client, tmp_path):
    with (
        serving(daemon, socket=str(tmp_path / "g"), streams_max="1") as small,
        RemoteClient(address(small), deadline_seconds=SECONDS_MAX) as other,
        RawBlocks(address(small)) as raw,
    ):
        blocks = Blocks(client, LARGE, NamespaceKind.FLAT)
        keys = blocks.put(1, 1)
        many = keys.joined * 100  # more than any buffer on the way holds
        slow = raw.call("Get", namespace=blocks.space, fingerprints=many)
        next(slow)
        same = Blocks(other, LARGE, NamespaceKind.FLAT, blocks.space)
        with pytest.raises(Overloaded, match="streams_max"):
            same.got(keys)
        slow.cancel()
        eventually(lambda: not len(small.servicer.streams), "the stream is over")
        assert same.got(keys) == [True]


# ---------------------------------------------------------------------- requests


def test_unknown_namespaces_are_not_found(client, raw):
    space = secrets.token_bytes(32)
    key = secrets.token_bytes(32)
    for method in ("Exists", "Get", "List", "Delete", "Clear", "Score", "Pin", "Unpin", "Describe"):
        fields = {"fingerprints": key} if method not in ("List", "Clear", "Describe") else {}
        found = refusal(lambda m=method, f=fields: raw.call(m, namespace=space, **f))
        assert found.code == grpc.StatusCode.NOT_FOUND, method
        assert found.kind == "NamespaceUnknown"
    header = pb.Chunk(header=pb.PutHeader(namespace=space, fingerprints=key))
    found = refusal(lambda: raw.put([header.SerializeToString()]))
    assert found.kind == "NamespaceUnknown"
    with pytest.raises(NamespaceUnknown):
        client.namespace(space)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"namespace": b"short", "fingerprints": b""}, "namespace"),
        ({"namespace": b"", "fingerprints": b""}, "namespace"),
        ({"fingerprints": b"x" * 33}, "fingerprints"),
        ({"fingerprints": bytes(32 * 65537)}, "65536"),
    ],
)
def test_malformed_names_are_the_callers_mistake(client, raw, fields, says):
    blocks = Blocks(client)
    blocks.put(1, 1)
    for method in ("Exists", "Get", "Delete", "Score"):
        request = {"namespace": blocks.space, **fields}
        found = refusal(lambda m=method, r=request: raw.call(m, **r))
        assert found.code == INVALID
        assert says in found.message


@pytest.mark.parametrize(
    "declared",
    [
        {"kind": "round", "layout": {"block_tokens": 1, "layers": 1, "layer_bytes": 4096}},
        {"kind": "flat"},
        {"kind": "flat", "layout": {"block_tokens": 1, "layers": 1, "layer_bytes": 1 << 40}},
        {"kind": "flat", "layout": {"block_tokens": 1, "layers": 1, "layer_bytes": 64 * MIB}},
    ],
)
def test_namespaces_that_cannot_be_are_refused(raw, declared):
    space = secrets.token_bytes(32)
    header = pb.PutHeader(namespace=space, fingerprints=bytes(32))
    header.declare.kind = declared["kind"]
    for name, value in declared.get("layout", {}).items():
        setattr(header.declare.layout, name, value)
    message = pb.Chunk(header=header).SerializeToString()
    assert refusal(lambda: raw.put([message])).code == INVALID
    assert refusal(lambda: raw.call("Describe", namespace=space)).kind == "NamespaceUnknown"


def test_messages_beyond_the_limit_are_refused(client, raw):
    blocks = Blocks(client)
    blocks.put(1, 1)
    found = refusal(
        lambda: raw.call("Exists", namespace=blocks.space, fingerprints=bytes(64 * MIB))
    )
    assert found.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    names = blocks.names(2, 1)
    messages = put_messages(blocks, names, blocks.rows(names))
    messages[1] = changed(messages[1], bytes(64 * MIB))
    # gRPC itself ends the stream; which of the two the caller sees depends on who is faster.
    ends = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
    assert refusal(lambda: raw.put(messages)).code in ends
    assert blocks.remote.exists(names).prefix_blocks == 0


def test_bytes_that_are_no_message_are_told(raw):
    for method in ("Exists", "Get", "Describe", "Clear", "Pin"):
        found = refusal(lambda m=method: raw.bytes_to(m, b"\xff\xff\xff\xff"))
        assert (found.code, found.kind) == (INVALID, "InvalidRequest")


def test_a_verb_that_does_not_exist_is_unimplemented(raw):
    assert refusal(lambda: raw.bytes_to("Nonsense", b"")).code == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", bytes(4096), secrets.token_bytes(9000)]
)
def test_garbage_on_the_port_is_hung_up_on(gateway, data):
    with (
        socket.create_connection(("127.0.0.1", gateway.port), SECONDS_MAX) as caller,
        contextlib.suppress(ConnectionError),
    ):
        caller.sendall(data)
        while caller.recv(65536):
            pass


# ---------------------------------------------------------------------- who may


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def attempt_describe(target: str, **how: object) -> Callable[[], object]:
    def work() -> object:
        with RemoteClient(target, deadline_seconds=SECONDS_MAX, **how) as client:
            return client.describe()

    return work


def test_tokens_decide_what_a_caller_may(daemon, client, tmp_path, monkeypatch):
    monkeypatch.setattr(access, "LOOK_AGAIN_SECONDS", 0.0)
    mine, other = Blocks(client), Blocks(client)
    mine.put(1, 1)
    other.put(1, 1)
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        f'[tenant.all]\nsha256 = ["{digest("alpha")}"]\n'
        f'[tenant.one]\nsha256 = ["{digest("beta")}"]\nnamespaces = ["{mine.space.hex()}"]\n'
    )
    with serving(daemon, socket=str(tmp_path / "g"), tokens=str(tokens)) as guarded:
        target = address(guarded)
        for wrong in (None, "gamma", ""):
            with pytest.raises(Unauthenticated):
                attempt_describe(target, token=wrong)()
        with RemoteClient(target, token="beta", deadline_seconds=SECONDS_MAX) as one:
            assert [found.id for found in one.describe()[0]] == [mine.space]
            assert Blocks(one, space=mine.space).got(mine.names(1, 1)) == [True]
            for attempt in (
                lambda: one.namespace(other.space),
                lambda: Blocks(one, space=other.space).put(2, 1),
                lambda: Blocks(one, space=other.space).got(other.names(1, 1)),
                lambda: Blocks(one).put(1, 1),
            ):
                with pytest.raises(AccessDenied, match="tenant one"):
                    attempt()
        assert len(attempt_describe(target, token="alpha")()[0]) >= 2
        assert attempt_describe(f"unix:{guarded.socket}")()  # its owner needs none

        tokens.write_text(f'[tenant.one]\nsha256 = ["{digest("delta")}"]\n')
        with pytest.raises(Unauthenticated):
            attempt_describe(target, token="alpha")()
        attempt_describe(target, token="delta")()
        tokens.write_text("no = [toml")
        attempt_describe(target, token="delta")()  # the last good one counts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = 1",
        '[tenant.a]\nsha256 = "short"',
        "[tenant.a]\nnamespaces = ['zz']",
        "[tenant.a]\nsecret = 'x'",
        f"[tenant.a]\nsha256 = ['{'0' * 64}']\n[tenant.b]\nsha256 = ['{'0' * 64}']",
    ],
)
def test_a_tokens_file_that_makes_no_sense_is_refused_at_start(tmp_path, text):
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"gateway\.tokens"):
        access.Access(path)


def test_mutual_tls_lets_in_who_has_a_certificate(daemon, client, tmp_path):
    blocks = Blocks(client)
    names = blocks.put(1, 2)
    certificates = Certificates(tmp_path)
    settings = {key.removeprefix("gateway."): text for key, text in certificates.settings.items()}
    with serving(daemon, socket="off", **settings) as safe:
        target = address(safe)
        with RemoteClient(target, tls=certificates.client, deadline_seconds=SECONDS_MAX) as known:
            assert Blocks(known, space=blocks.space).got(names) == [True, True]
        stranger = tmp_path / "stranger"
        stranger.mkdir()
        foreign = Certificates(stranger).client
        half = Tls(certificates.authority, server_name="localhost")
        mixed = Tls(certificates.authority, foreign.certificate, foreign.key, "localhost")
        for tls in (None, foreign, half, mixed):
            with pytest.raises((PeerGone, Overloaded)):
                attempt_describe(target, tls=tls)()


def test_certificates_are_tenants_too(tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text("[tenant.bench]\nnamespaces = []\n")

    class Call:
        def __init__(self, name: bytes) -> None:
            self._name = name

        def peer(self) -> str:
            return "ipv4:10.0.0.1:1"

        def auth_context(self) -> dict[str, list[bytes]]:
            return {"x509_common_name": [self._name]}

        def invocation_metadata(self) -> list[tuple[str, str]]:
            return []

    known = access.Access(path)
    assert known.tenant_of(Call(b"bench")).namespaces == frozenset()
    with pytest.raises(AccessDenied):
        known.tenant_of(Call(b"stranger"))
    assert access.Access(None).tenant_of(Call(b"anyone")).name == "anyone"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"address": "0.0.0.0:7420"}, "TLS"),
        ({"address": "10.1.2.3:7420", "tls_certificate": "c", "tls_key": "k"}, "nobody checks"),
        ({"address": "host.example:7420", "tokens": "t"}, "TLS"),
        ({"address": "[::]:7420"}, "TLS"),
        ({"address": "nonsense"}, "host:port"),
        ({"address": "127.0.0.1:99999"}, "host:port"),
        ({"tls_certificate": "c"}, "together"),
        ({"tls_client_ca": "c"}, "certificate"),
        ({"address": "off", "socket": "off"}, "off"),
    ],
)
def test_addresses_that_are_not_safe_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        load(None, {}, {f"gateway.{name}": text for name, text in settings.items()})


@pytest.mark.parametrize(
    "settings",
    [
        {"address": "0.0.0.0:7420", "insecure": "true"},
        {"address": "[::1]:7420"},
        {"address": "localhost:7420"},
        {"address": "0.0.0.0:1", "tls_certificate": "c", "tls_key": "k", "tokens": "t"},
        {"address": "0.0.0.0:1", "tls_certificate": "c", "tls_key": "k", "tls_client_ca": "a"},
    ],
)
def test_addresses_that_are_safe_or_said_to_be(settings):
    load(None, {}, {f"gateway.{name}": text for name, text in settings.items()})


def test_missing_files_are_named(daemon):
    with (
        pytest.raises(ConfigError, match="tls_key"),
        serving(daemon, socket="off", tls_certificate="/nowhere/c", tls_key="/nowhere/k"),
    ):
        pass
