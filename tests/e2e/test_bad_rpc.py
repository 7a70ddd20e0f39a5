"""What broken, foreign and hostile callers are told; nobody else notices.

Field cases RPC-10, RPC-12 and HOST-11, and the table of bad calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore import logs
from kvstore.config_load import load
from kvstore.daemon import Daemon
from kvstore.errors import InvalidRequest
from kvstore.fingerprint import Chain
from kvstore.layout import BlockLayout
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc.wire import NO_OFFSET, pack_u64
from kvstore.types import BlockStatus, NamespaceKind
from tests.conftest import SMALL, DaemonProcess
from tests.e2e.kit import (
    LAYOUT,
    SECONDS_MAX,
    Engine,
    RawClient,
    assert_books,
    attempt,
    eventually,
    refusal,
    running,
)

SPACE = b"raw namespace".ljust(32, b".")
RANKED_SPACE = b"two ranks".ljust(32, b".")
NOWHERE = b"never declared".ljust(32, b".")
TWO_RANKS = BlockLayout(block_tokens=16, layers=2, layer_bytes=16384, ranks=2)
ALL_VERBS = tuple(method.name for method in pb.DESCRIPTOR.services_by_name["Control"].methods)


@dataclass
class Scene:
    """A daemon with a bystander whose blocks must stay what they are, and a raw caller."""

    daemon: DaemonProcess
    bystander: Engine
    chain: Chain
    raw: RawClient
    boot_id: int

    def assert_unharmed(self) -> None:
        assert self.bystander.client.boot_id == self.boot_id, self.daemon.log()
        self.bystander.loads_whole(self.chain)
        assert self.bystander.handle.exists(self.chain).prefix_blocks == len(self.chain)

    def names(self, number: int, blocks: int) -> bytes:
        chain = Chain(SPACE, LAYOUT.block_tokens)  # type: ignore[arg-type]
        chain.extend(np.arange(blocks * LAYOUT.block_tokens, dtype=np.uint32) + 1000 * number)
        return chain.joined

    def reserve(self, number: int, blocks: int, raw: RawClient | None = None) -> tuple[Any, bytes]:
        names = self.names(number, blocks)
        reply = (raw or self.raw).call("Reserve", namespace=SPACE, parent=SPACE, fingerprints=names)
        assert set(reply.statuses) == {BlockStatus.GRANTED}, list(reply.statuses)
        return reply, names


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    settings = {"limits.clients_max": "8", "limits.namespaces_max": "12"}
    with running(settings) as daemon, Engine(daemon, "bystander") as bystander:
        chain = bystander.durable(1, 8)
        with RawClient(daemon.socket) as raw:
            raw.declare(SPACE)
            raw.declare(RANKED_SPACE, TWO_RANKS)
            yield Scene(daemon, bystander, chain, raw, bystander.client.boot_id)
        assert_books(daemon)
        assert daemon.stop() == 0, daemon.log()


@pytest.fixture(autouse=True)
def nobody_else_notices(scene: Scene) -> Iterator[None]:
    yield
    scene.assert_unharmed()


NAMES = b"n" * 32
MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("Match", {}, "InvalidRequest"),
    ("Match", {"client": 1, "groups": [pb.Group(namespace=SPACE)]}, "PeerGone"),
    ("Match", {"groups": [pb.Group(namespace=NOWHERE)]}, "NamespaceUnknown"),
    ("Match", {"groups": [pb.Group(namespace=b"short")]}, "InvalidRequest"),
    ("Match", {"groups": [pb.Group(namespace=SPACE, fingerprints=b"odd")]}, "InvalidRequest"),
    (
        "Match",
        {"groups": [pb.Group(namespace=SPACE, fingerprints=bytes(32 * 65537))]},
        "InvalidRequest",
    ),
    ("Match", {"groups": [pb.Group(namespace=SPACE)] * 10_000}, "InvalidRequest"),
    ("Load", {"lease": 7}, "LeaseUnknown"),
    ("Load", {"client": 1, "lease": 7}, "PeerGone"),
    ("Renew", {"lease": 7}, "LeaseUnknown"),
    ("Renew", {"reservation": 7}, "ReservationUnknown"),
    ("Renew", {}, "ReservationUnknown"),
    ("Report", {"used": [pb.Group(namespace=NOWHERE)]}, "NamespaceUnknown"),
    ("Report", {"used": [pb.Group(namespace=SPACE, fingerprints=b"odd")]}, "InvalidRequest"),
    ("Exists", {"namespace": NOWHERE}, "NamespaceUnknown"),
    ("Exists", {"namespace": SPACE, "fingerprints": b"odd"}, "InvalidRequest"),
    ("Reserve", {"namespace": NOWHERE, "count": 1}, "NamespaceUnknown"),
    ("Reserve", {"namespace": SPACE, "count": 1, "fingerprints": NAMES}, "InvalidRequest"),
    ("Reserve", {"namespace": SPACE, "fingerprints": NAMES, "parent": b"p"}, "InvalidRequest"),
    ("Reserve", {"namespace": SPACE, "fingerprints": b"odd", "parent": SPACE}, "InvalidRequest"),
    ("Reserve", {"namespace": SPACE, "fingerprints": 2 * NAMES, "parent": SPACE}, "InvalidRequest"),
    ("Commit", {"reservation": 7, "all_ranks": True}, "ReservationUnknown"),
    ("Commit", {"reservation": 7, "fingerprints": NAMES, "offsets": b""}, "InvalidRequest"),
    ("Commit", {"reservation": 7, "fingerprints": NAMES, "offsets": b"odd"}, "InvalidRequest"),
    ("Abort", {"reservation": 7}, "ReservationUnknown"),
    ("Flush", {"namespace": NOWHERE}, "NamespaceUnknown"),
    ("Flush", {"namespace": SPACE, "fingerprints": b"odd"}, "InvalidRequest"),
    ("Delete", {"namespace": NOWHERE, "fingerprint": NAMES}, "NamespaceUnknown"),
    ("Delete", {"namespace": SPACE, "fingerprint": b"short"}, "InvalidRequest"),
    ("Clear", {}, "InvalidRequest"),
    ("Clear", {"namespace": SPACE, "all": True}, "InvalidRequest"),
    ("Clear", {"namespace": NOWHERE}, "NamespaceUnknown"),
    ("Describe", {"namespace": NOWHERE}, "NamespaceUnknown"),
    ("Prefetch", {"groups": [pb.Group(namespace=NOWHERE)]}, "NamespaceUnknown"),
    ("Pin", {"namespace": NOWHERE, "seconds": 1.0}, "NamespaceUnknown"),
    ("Unpin", {"namespace": NOWHERE}, "NamespaceUnknown"),
    ("Score", {"namespace": NOWHERE}, "NamespaceUnknown"),
]


@pytest.mark.parametrize(
    ("method", "fields", "kind"),
    MALFORMED,
    ids=[f"{method}-{kind}-{at}" for at, (method, _, kind) in enumerate(MALFORMED)],
)
def test_a_malformed_call_is_told_what_is_wrong(
    scene: Scene, method: str, fields: dict[str, Any], kind: str
) -> None:
    found = refusal(lambda: scene.raw.call(method, **fields))
    assert found.kind == kind, found
    assert found.code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
    assert len(found.message) > 10, "says what and where"


def layout(**sizes: int) -> pb.Layout:
    return pb.Layout(**{"block_tokens": 1, "layers": 1, **sizes})


@pytest.mark.parametrize(
    ("space", "fields", "kind"),
    [
        (b"short", {}, "InvalidRequest"),
        (NOWHERE, {"kind": "ring"}, "InvalidRequest"),
        (NOWHERE, {"layout": pb.Layout()}, "InvalidRequest"),
        (NOWHERE, {"layout": layout(layers=4096, layer_bytes=1 << 60)}, "InvalidRequest"),
        (NOWHERE, {"layout": layout(layer_bytes=20 << 20)}, "InvalidRequest"),
        (SPACE, {"kind": "flat"}, "NamespaceConflict"),
        (SPACE, {"window_tokens": 64}, "NamespaceConflict"),
        (SPACE, {"client": 3}, "PeerGone"),
    ],
)
def test_a_namespace_that_cannot_be_is_refused(
    scene: Scene, space: bytes, fields: dict[str, Any], kind: str
) -> None:
    found = refusal(lambda: scene.raw.declare(space, **fields))
    assert found.kind == kind, found


def test_namespaces_are_bounded(scene: Scene) -> None:
    spaces = [bytes([number]) * 32 for number in range(16)]
    outcomes = [attempt(lambda space=space: scene.raw.declare(space)) for space in spaces]
    refused = [found for found in outcomes if found is not None]
    assert refused
    for found in refused:
        assert (found.kind, found.code) == ("Overloaded", grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert "limits.namespaces_max" in found.message


# ---------------------------------------------------------------------- attaching


def test_versions_are_compared_first(scene: Scene) -> None:
    found = refusal(lambda: RawClient(scene.daemon.socket, protocol_major=9))
    assert found.kind == "VersionMismatch"
    assert "9.0" in found.message
    assert "1.0" in found.message
    for minor in (1, 77):
        with RawClient(scene.daemon.socket, protocol_minor=minor) as newer:
            assert newer.call("Exists", namespace=SPACE).prefix_blocks == 0


@pytest.mark.parametrize(
    "lock_file", ["../../etc/passwd", "1-0.lock", "a" * 300, "\0", f"1-{'0' * 16}.lock"]
)
def test_a_lock_file_that_is_none_is_refused(scene: Scene, lock_file: str) -> None:
    found = refusal(lambda: RawClient(scene.daemon.socket, lock_file=lock_file))
    assert found.kind == "InvalidRequest", found


def test_an_attachment_begins_with_a_hello(scene: Scene) -> None:
    unmapped = pb.AttachRequest(unmapped=pb.Unmapped(slab=1))
    for first in ([unmapped], [pb.AttachRequest()], []):
        stream = scene.raw.stub.Attach(iter(first), timeout=SECONDS_MAX)
        assert refusal(lambda stream=stream: next(stream)).kind == "InvalidRequest"


def test_clients_are_bounded(scene: Scene) -> None:
    with contextlib.ExitStack() as attached:

        def attach() -> None:
            attached.enter_context(RawClient(scene.daemon.socket))

        for _ in range(6):
            attach()
        found = refusal(attach)
        assert (found.kind, found.code) == ("Overloaded", grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert "limits.clients_max" in found.message
    eventually(lambda: scene.daemon.stat()["clients"]["attached"] == 2, "the others left")


# ---------------------------------------------------------------------- names of others


def test_a_name_counts_only_in_its_own_namespace(scene: Scene) -> None:
    """I8: no verb reaches another namespace's block, although its name is known."""
    theirs, raw = scene.chain.joined, scene.raw
    group = pb.Group(namespace=SPACE, fingerprints=theirs)
    reply = raw.call("Match", groups=[group], want_lease=True)
    assert (reply.boundary_tokens, reply.lease) == (0, 0)
    assert raw.call("Exists", namespace=SPACE, fingerprints=theirs).prefix_blocks == 0
    durable = raw.call("Flush", namespace=SPACE, fingerprints=theirs, deadline_ms=1).durable
    assert durable == bytes(len(scene.chain))
    gone = raw.call("Delete", namespace=SPACE, fingerprint=theirs[:32])
    assert gone.deleted_blocks == 0
    below = raw.call("Reserve", namespace=SPACE, parent=theirs[:32], fingerprints=NAMES)
    assert list(below.statuses) == [BlockStatus.NO_PARENT]
    reserve = {"namespace": SPACE, "parent": SPACE, "fingerprints": theirs}
    assert refusal(lambda: raw.call("Reserve", **reserve)).kind == "InvalidRequest"
    raw.call("Report", used=[group])


def test_a_commit_under_another_namespaces_name_stores_nothing(scene: Scene) -> None:
    grant = scene.raw.call("Reserve", namespace=SPACE, count=1)
    commit = {
        "reservation": grant.reservation,
        "all_ranks": True,
        "parent": SPACE,
        "fingerprints": scene.chain[0],
        "offsets": grant.offsets,
    }
    assert refusal(lambda: scene.raw.call("Commit", **commit)).kind == "InvalidRequest"
    scene.raw.call("Abort", reservation=grant.reservation)


# ---------------------------------------------------------------------- reservations


def test_a_commit_names_what_was_granted(scene: Scene) -> None:
    grant, names = scene.reserve(1, 2)
    first, second = np.frombuffer(grant.offsets, np.uint64).tolist()

    def commit(fingerprints: bytes, offsets: list[int], **fields: Any) -> str:
        values = {"all_ranks": True, **fields}
        return refusal(
            lambda: scene.raw.call(
                "Commit",
                reservation=grant.reservation,
                fingerprints=fingerprints,
                offsets=pack_u64(offsets),
                **values,
            )
        ).kind

    assert commit(names[:32], [second]) == "InvalidRequest", "another block's slot"
    assert commit(names[:32], [first + 4096]) == "InvalidRequest", "no slot begins there"
    assert commit(names[:32], [NO_OFFSET]) == "InvalidRequest"
    assert commit(NAMES, [first]) == "InvalidRequest", "a name that was not reserved"
    assert commit(2 * names[:32], [first, first]) == "InvalidRequest", "one block twice"
    assert commit(names[:32], [first], all_ranks=False, rank=1) == "InvalidRequest"
    good = scene.raw.call(
        "Commit",
        reservation=grant.reservation,
        fingerprints=names[:32],
        offsets=pack_u64([first]),
        all_ranks=True,
    )
    assert list(good.statuses) == [BlockStatus.STORED], "what was refused changed nothing"
    assert commit(names[:32], [first]) == "InvalidRequest", "committed before"
    assert scene.raw.call("Abort", reservation=grant.reservation).freed == 1
    assert commit(names[32:], [second]) == "ReservationUnknown", "ended"


def test_an_anonymous_slot_is_named_once(scene: Scene) -> None:
    grant = scene.raw.call("Reserve", namespace=SPACE, count=3)
    offsets = np.frombuffer(grant.offsets, np.uint64).tolist()
    names = scene.names(2, 3)

    def commit(fingerprints: bytes, at: list[int], **fields: Any) -> Any:
        values = {"all_ranks": True, "parent": SPACE, **fields}
        return scene.raw.call(
            "Commit",
            reservation=grant.reservation,
            fingerprints=fingerprints,
            offsets=pack_u64(at),
            **values,
        )

    assert refusal(lambda: commit(names[:64], [offsets[0]] * 2)).kind == "InvalidRequest"
    assert refusal(lambda: commit(2 * names[:32], offsets[:2])).kind == "InvalidRequest"
    assert refusal(lambda: commit(names[:32], offsets[:1], parent=b"")).kind == "InvalidRequest"
    assert refusal(lambda: commit(names[:32], offsets[:1], all_ranks=False, rank=1)).kind == (
        "InvalidRequest"
    )
    lost = commit(names[:32], offsets[:1], parent=b"x" * 32)
    assert list(lost.statuses) == [BlockStatus.NO_PARENT]
    assert list(commit(names[:32], offsets[1:2]).statuses) == [BlockStatus.STORED]
    again = commit(names[:32], offsets[2:])
    assert list(again.statuses) == [BlockStatus.PRESENT]
    assert refusal(lambda: commit(names[32:64], offsets[2:])).kind == "ReservationUnknown"


def test_reservations_of_others_are_out_of_reach(scene: Scene) -> None:
    grant, names = scene.reserve(3, 2)
    with RawClient(scene.daemon.socket, engine="stranger") as stranger:
        for method in ("Commit", "Abort", "Renew"):
            fields: dict[str, Any] = {"reservation": grant.reservation}
            if method == "Commit":
                fields |= {"fingerprints": names, "offsets": grant.offsets, "all_ranks": True}
            found = refusal(lambda m=method, f=fields: stranger.call(m, **f)).kind
            assert found == "ReservationUnknown", method
        present = stranger.call("Reserve", namespace=SPACE, parent=SPACE, fingerprints=names)
        assert set(present.statuses) == {BlockStatus.PRESENT}, "being filled counts as present"
    assert scene.raw.call("Abort", reservation=grant.reservation).freed == 2
    assert refusal(lambda: scene.raw.call("Abort", reservation=grant.reservation)).kind == (
        "ReservationUnknown"
    )


def test_ranks_that_do_not_exist_fill_nothing(scene: Scene) -> None:
    name = b"r" * 32
    grant = scene.raw.call(
        "Reserve", namespace=RANKED_SPACE, parent=RANKED_SPACE, fingerprints=name
    )

    def commit(rank: int) -> Any:
        return scene.raw.call(
            "Commit",
            reservation=grant.reservation,
            fingerprints=name,
            offsets=grant.offsets,
            rank=rank,
        )

    assert refusal(lambda: commit(2)).kind == "InvalidRequest"
    assert refusal(lambda: commit(2**32 - 1)).kind == "InvalidRequest"
    assert list(commit(0).statuses) == [BlockStatus.GRANTED]
    assert list(commit(0).statuses) == [BlockStatus.GRANTED], "the same rank again changes nothing"
    assert list(commit(1).statuses) == [BlockStatus.STORED]
    assert refusal(lambda: commit(1)).kind == "ReservationUnknown"


def test_a_call_given_up_by_its_caller_is_finished(scene: Scene) -> None:
    """A deadline that passes in mid-commit leaves no block half stored and no slot behind."""
    for number in range(100, 130):
        grant, names = scene.reserve(number, 8)
        request = pb.CommitRequest(
            client=scene.raw.client,
            reservation=grant.reservation,
            fingerprints=names,
            offsets=grant.offsets,
            all_ranks=True,
        )
        patience = 0.0005 + 0.0001 * (number - 100)
        attempt(lambda r=request, p=patience: scene.raw.stub.Commit(r, timeout=p))
        given_up = attempt(lambda g=grant: scene.raw.call("Abort", reservation=g.reservation))
        assert given_up is None or given_up.kind == "ReservationUnknown"
        eventually(lambda n=names: _is_settled(scene, n), f"prompt {number} is stored or absent")


def _is_settled(scene: Scene, names: bytes) -> bool:
    """Every block matches, or can be reserved anew: none hangs in between."""
    prefix = scene.raw.call("Exists", namespace=SPACE, fingerprints=names).prefix_blocks
    if prefix * 32 == len(names):
        return True
    parent = names[(prefix - 1) * 32 : prefix * 32] if prefix else SPACE
    grant = scene.raw.call(
        "Reserve", namespace=SPACE, parent=parent, fingerprints=names[prefix * 32 :]
    )
    if grant.reservation:
        scene.raw.call("Abort", reservation=grant.reservation)
    return set(grant.statuses) == {BlockStatus.GRANTED}


# ---------------------------------------------------------------------- leases


def test_a_lease_is_its_clients_and_ends_once(scene: Scene) -> None:
    group = pb.Group(namespace=scene.chain.namespace, fingerprints=scene.chain.joined)
    lease = scene.raw.call("Match", groups=[group], want_lease=True).lease
    assert lease
    with RawClient(scene.daemon.socket, engine="stranger") as stranger:
        assert refusal(lambda: stranger.call("Load", lease=lease)).kind == "LeaseUnknown"
        assert refusal(lambda: stranger.call("Renew", lease=lease)).kind == "LeaseUnknown"
        assert stranger.call("Release", leases=[lease]).released == 0
    before = scene.daemon.stat()["leases"]
    assert scene.raw.call("Release", leases=[lease]).released == 1
    assert scene.raw.call("Release", leases=[lease, lease, 5]).released == 0
    after = scene.daemon.stat()["leases"]
    assert after["late_releases"] == before["late_releases"] + 3, "counted"
    assert refusal(lambda: scene.raw.call("Load", lease=lease)).kind == "LeaseUnknown"


# ---------------------------------------------------------------------- the library's side


def test_the_library_refuses_wrong_sizes_before_it_copies(scene: Scene) -> None:
    engine, chain = scene.bystander, scene.chain
    wrong = [
        np.zeros((8, LAYOUT.block_bytes - 1), np.uint8),
        np.zeros((8, LAYOUT.block_bytes), np.int8),
        np.zeros((9, LAYOUT.block_bytes), np.uint8),
        np.zeros(LAYOUT.block_bytes, np.uint8),
    ]
    for blocks in wrong:
        with pytest.raises(InvalidRequest):
            engine.handle.store(chain, blocks)
        with pytest.raises(InvalidRequest):
            engine.handle.load(chain, blocks)
    other = Engine(scene.daemon, "bystander", model="another", kind=NamespaceKind.FLAT)
    with other, pytest.raises(InvalidRequest, match="belong to namespace"):
        other.handle.load(chain, np.zeros((8, LAYOUT.block_bytes), np.uint8))


# ---------------------------------------------------------------------- bytes


def test_a_message_beyond_the_limit_is_refused(scene: Scene) -> None:
    huge = pb.Group(namespace=SPACE, fingerprints=bytes(5 << 20))
    found = refusal(lambda: scene.raw.call("Match", groups=[huge]))
    assert found.code == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_verb_of_another_version_is_refused(scene: Scene) -> None:
    call = scene.raw.channel.unary_unary("/kvstore.v1.Control/Teleport")
    assert refusal(lambda: call(b"", timeout=SECONDS_MAX)).code == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("verb", ALL_VERBS)
def test_random_messages_do_no_harm(scene: Scene, verb: str) -> None:
    """Bytes that are no message, and messages whose fields hold anything (RPC-12)."""
    random = np.random.default_rng(sum(verb.encode()))
    call = scene.raw.channel.unary_stream(f"/kvstore.v1.Control/{verb}")
    request_type = pb.DESCRIPTOR.services_by_name["Control"].methods_by_name[verb].input_type
    for round_ in range(40):
        if round_ % 4 == 0:
            data = random.integers(0, 256, int(random.integers(0, 300)), np.uint8).tobytes()
        else:
            data = _random_message(request_type, random, scene).SerializeToString()
        if verb in ("Clear", "Delete"):
            data = data.replace(scene.chain.namespace, SPACE)
        found = attempt(lambda d=data: list(zip(range(3), call(d, timeout=0.25), strict=False)))
        if found is not None and found.code == grpc.StatusCode.UNAVAILABLE:
            assert found.kind == "PeerGone", found


def _random_message(descriptor: Any, random: np.random.Generator, scene: Scene) -> Any:
    """A message of that type; half of its values are such as a caller could know."""
    message = getattr(pb, descriptor.name)()
    for field in descriptor.fields:
        if random.random() < 0.2 or (descriptor.name == "ClearRequest" and field.name == "all"):
            continue
        for _ in range(int(random.integers(1, 4)) if field.is_repeated else 1):
            value = _random_value(field, random, scene)
            if field.is_repeated:
                holder = getattr(message, field.name)
                if field.message_type is None:
                    holder.append(value)
                else:
                    holder.add().CopyFrom(value)
            elif field.message_type is None:
                setattr(message, field.name, value)
            else:
                getattr(message, field.name).CopyFrom(value)
    return message


def _random_value(field: Any, random: np.random.Generator, scene: Scene) -> Any:
    if field.message_type is not None:
        return _random_message(field.message_type, random, scene)
    kind = field.cpp_type
    if kind == field.CPPTYPE_BOOL:
        return bool(random.integers(2))
    if kind == field.CPPTYPE_STRING:
        if field.type == field.TYPE_STRING:
            return str(random.choice(["chained", "flat", "", "é" * 40, "x" * 5000, "7-0.lock"]))
        known = [SPACE, scene.chain.joined, scene.names(50, 4), b"", bytes(32), bytes(8), NAMES]
        return known[int(random.integers(len(known)))]
    if kind == field.CPPTYPE_DOUBLE:
        return float(random.choice([0.0, -1.0, 1e300, float("nan")]))
    if field.name == "client" and random.random() < 0.8:
        return scene.raw.client
    wide = kind in (field.CPPTYPE_UINT64, field.CPPTYPE_INT64)
    return int(random.choice([0, 1, 2, 255, 2**31 - 1] + ([2**62] if wide else [])))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) + b"\xff" * 512,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\xff\xff\x00\x00\x00\x00\x00\x01",
        os.urandom(4096),
        bytes(65536),
    ],
    ids=["nothing", "http1", "frames-of-ones", "short-frame", "random", "zeroes"],
)
def test_bytes_that_are_no_protocol_do_no_harm(scene: Scene, data: bytes) -> None:
    held: list[socket.socket] = []
    for _ in range(16):
        wire = socket.socket(socket.AF_UNIX)
        wire.settimeout(SECONDS_MAX)
        wire.connect(str(scene.daemon.socket))
        held.append(wire)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            wire.sendall(data)
    scene.assert_unharmed()
    for wire in held:
        wire.close()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_group_is_let_in(tmp_path: Path, caplog: pytest.LogCaptureFixture, is_new: bool) -> None:
    """To arena, socket, and a directory that was made for it; another that bars it is named."""
    ours = set(os.getgroups()) - {os.getegid()}
    group = next(
        (g for g in grp.getgrall() if g.gr_gid in ours or (not os.geteuid() and g.gr_gid)), None
    )
    if group is None:
        pytest.skip("no group but our own to let in")
    logs.reset()
    path = tmp_path / "run" / "s"
    if not is_new:
        path.parent.mkdir(mode=0o700)
    told = {"host.group": group.gr_name, "daemon.socket": str(path), "nvme.enabled": "false"}
    config = load(None, {}, {**SMALL, "daemon.name": f"test-{uuid.uuid4().hex[:12]}", **told})

    async def access() -> list[tuple[int, int]]:
        daemon = Daemon(config)
        await daemon.start()
        found = [where.stat() for where in (path.parent, path, config.arena_directory)]
        await daemon.stop()
        return [(each.st_mode & 0o7777, each.st_gid) for each in found]

    shared = (0o750, group.gr_gid)
    parent = shared if is_new else (0o700, os.getegid())
    assert asyncio.run(access()) == [parent, (0o660, group.gr_gid), shared]
    assert (f"'{path.parent}'" in caplog.text) == (not is_new)


def test_the_socket_is_its_owners_alone(scene: Scene) -> None:
    assert Path(scene.daemon.socket).stat().st_mode & 0o777 == 0o600
    assert scene.daemon.arena.stat().st_mode & 0o777 == 0o700
    for path in scene.daemon.arena.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path
