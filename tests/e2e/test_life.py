"""The life of blocks across daemons: stored, matched, loaded, made durable, killed, found again.

Field cases KEY-1 to KEY-4 and KEY-9, IDX-7, HOST-5, RPC-9 and LIFE-1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from bench.workload import Painter, identity_of, prompt
from kvstore.client import NamespaceHandle
from kvstore.client.reasons import AWAY
from kvstore.errors import KVStoreError
from kvstore.fingerprint import Chain, KVIdentity, namespace_of
from kvstore.layout import BlockLayout
from kvstore.types import BlockStatus, NamespaceKind
from tests.conftest import DaemonProcess
from tests.e2e.kit import (
    DONE,
    LAYOUT,
    SECONDS_MAX,
    Engine,
    Script,
    assert_books,
    eventually,
)

MEMORY_BYTES = 32 << 20
STAGING_SLOTS = 16
MakeDaemon = Callable[..., DaemonProcess]


@pytest.fixture
def engine(daemon: DaemonProcess) -> Iterator[Engine]:
    with Engine(daemon) as engine:
        yield engine


def killed_and_back(daemon: DaemonProcess, *engines: Engine) -> None:
    """SIGKILL, the next life, everybody attached to it."""
    lives = [engine.client.boot_id for engine in engines]
    daemon.kill()
    daemon.start()
    for engine, boot_id in zip(engines, lives, strict=True):
        engine.wait_new_life(boot_id)


# ---------------------------------------------------------------------- the walk


def test_blocks_outlive_the_daemon(daemon: DaemonProcess, engine: Engine) -> None:
    chain = engine.chain(1, 20)
    assert engine.handle.match(chain) == 0
    assert engine.load(chain).blocks == 0
    assert set(engine.store(chain)) == {BlockStatus.STORED}
    assert engine.handle.match(chain) == 20
    assert engine.loads_whole(chain).from_host == 20
    assert engine.handle.flush(chain, deadline_seconds=SECONDS_MAX).all()
    first_life = engine.client.boot_id

    daemon.kill()
    eventually(lambda: not engine.client.connected, "the client notices")
    assert engine.handle.match(chain) == 0
    assert engine.load(chain).reason == AWAY
    assert set(engine.store(chain)) == {BlockStatus.REFUSED}
    assert engine.client.statistics().away_calls == 3

    daemon.start()
    engine.wait_new_life(first_life)
    assert engine.handle.match(chain) == 0, "nothing is left in shared memory"
    assert engine.loads_whole(chain).from_nvme == 20
    assert engine.handle.match(chain) == 20
    assert engine.loads_whole(chain).from_host == 20
    longer = engine.chain(1, 20)
    longer.extend(prompt(2, 5 * 16))
    assert engine.load(longer).blocks == 20
    assert set(engine.store(longer)) == {BlockStatus.PRESENT, BlockStatus.STORED}
    assert_books(daemon)


def test_a_clean_stop_writes_what_waits(daemon: DaemonProcess, engine: Engine) -> None:
    """IDX-7: acknowledged, not flushed; the drain makes it durable."""
    chains = [engine.stored(number, 25) for number in range(10)]
    boot_id = engine.client.boot_id
    assert daemon.stop() == 0
    daemon.start()
    engine.wait_new_life(boot_id)
    for chain in chains:
        assert engine.loads_whole(chain).from_nvme == 25
    assert_books(daemon)


def test_more_than_the_arena_holds(daemon: DaemonProcess, engine: Engine) -> None:
    """Eviction under way: 45 MiB through 32 MiB of shared memory, every block right or a miss."""
    chains = [engine.durable(number, 16) for number in range(45)]
    loads = [engine.loads_whole(chain) for chain in chains]
    assert sum(load.from_nvme for load in loads) > 0
    assert daemon.counters()["dropped_blocks:evicted"] > 0
    killed_and_back(daemon, engine)
    for chain in reversed(chains):
        engine.loads_whole(chain)
    assert_books(daemon)


def test_room_for_a_chains_end_is_not_made_of_its_beginning(make_daemon: MakeDaemon) -> None:
    """The least recently used leaf is the very block that the new ones follow: it must stay."""
    daemon = make_daemon({"nvme.enabled": "false"}).start()
    with Engine(daemon) as engine:
        _fill_in_place(engine, engine.chain(0, 8))
        slots = MEMORY_BYTES // LAYOUT.slot_bytes - STAGING_SLOTS
        _fill_in_place(engine, engine.chain(1, slots - 8))
        assert daemon.counters()["dropped_blocks:evicted"] == 0, "full to the last slot"
        longer = engine.chain(0, 8)
        longer.extend(prompt(9, 16 * 16))
        statuses = _fill_in_place(engine, longer)
        assert statuses == (*[BlockStatus.PRESENT] * 8, *[BlockStatus.STORED] * 16)
        assert engine.loads_whole(longer).from_host == 24
    assert_books(daemon)


def _fill_in_place(engine: Engine, chain: Chain) -> tuple[BlockStatus, ...]:
    with engine.handle.reserve(chain) as reservation:
        for block in reservation.granted:
            engine.painter.paint(chain[block], reservation.view(block))
        return reservation.commit()


# ---------------------------------------------------------------------- leaving on purpose


def test_what_was_cleared_stays_cleared(daemon: DaemonProcess, engine: Engine) -> None:
    with Engine(daemon, model="another") as other:
        chain, theirs = engine.durable(1, 10), other.durable(1, 10)
        later = engine.stored(2, 10)
        engine.handle.clear()
        for gone in (chain, later):
            assert engine.handle.match(gone) == 0
            assert engine.load(gone).blocks == 0
            assert engine.handle.exists(gone).prefix_blocks == 0
        assert other.loads_whole(theirs).from_host == 10
        killed_and_back(daemon, engine, other)
        assert engine.load(chain).blocks == 0
        assert engine.load(later).blocks == 0
        assert other.loads_whole(theirs).from_nvme == 10
        assert engine.durable(1, 10).joined == chain.joined
        engine.loads_whole(chain)
        killed_and_back(daemon, engine, other)
        assert engine.loads_whole(chain).from_nvme == 10
        assert_books(daemon)


def test_a_clear_is_durable_when_it_answers(daemon: DaemonProcess, engine: Engine) -> None:
    """Killed at once, long before the cleared blocks are reclaimed."""
    chains = [engine.durable(number, 40) for number in range(6)]
    engine.handle.clear()
    killed_and_back(daemon, engine)
    assert [engine.load(chain).blocks for chain in chains] == [0] * 6
    assert_books(daemon)


def test_what_was_deleted_stays_deleted(daemon: DaemonProcess, engine: Engine) -> None:
    """A block goes with all that follows it; a branch before it stays."""
    chain, branch = engine.durable(1, 12, shared=6), engine.durable(2, 12, shared=6)
    assert engine.handle.delete(chain, 8) == 4
    assert engine.handle.match(chain) == 8
    assert engine.load(chain).blocks == 8
    killed_and_back(daemon, engine)
    assert engine.load(chain).blocks == 8
    engine.loads_whole(branch)
    assert engine.handle.delete(branch, 0) == 14
    killed_and_back(daemon, engine)
    assert engine.load(chain).blocks == engine.load(branch).blocks == 0
    assert assert_books(daemon)["blocks"] == 0


def test_a_delete_in_mid_write_is_durable(daemon: DaemonProcess, engine: Engine) -> None:
    """Blocks on their way to NVMe when they are deleted do not come back with the next life."""

    def flush(chain: Chain) -> None:
        with contextlib.suppress(KVStoreError):  # the daemon may be killed meanwhile
            engine.handle.flush(chain, deadline_seconds=SECONDS_MAX)

    chains = [engine.stored(number, 6) for number in range(20)]
    for chain in chains:
        threading.Thread(target=flush, args=(chain,), daemon=True).start()
        engine.handle.delete(chain, 0)
    killed_and_back(daemon, engine)
    assert [engine.load(chain).blocks for chain in chains] == [0] * 20


# ---------------------------------------------------------------------- groups and kinds


def test_groups_of_a_hybrid_model_are_matched_together(
    daemon: DaemonProcess, engine: Engine
) -> None:
    """Full attention in blocks of 16 tokens, a sliding window of 64 in blocks of 32."""
    small = BlockLayout(block_tokens=32, layers=2, layer_bytes=8192)
    with Engine(daemon, model="sliding", layout=small, window_tokens=64) as sliding:
        client = sliding.client
        full = client.namespace(identity_of(LAYOUT), LAYOUT)
        tokens = prompt(1, 12 * 16)
        whole, window = full.chain(tokens), sliding.handle.chain(tokens)
        with client.match_groups([whole, window]) as lease:
            assert lease.boundary_tokens == 0
        engine.stored(1, 12)

        def store_window(first: int, count: int) -> None:
            blocks = sliding.painted([window[at] for at in range(first, first + count)])
            ticket = sliding.handle.store(window, blocks, start=first)
            assert set(ticket.result(SECONDS_MAX)) <= DONE

        store_window(2, 2)
        with client.match_groups([whole, window]) as lease:
            assert lease.boundary_tokens == 128, "blocks 2 and 3 are the window before token 128"
        store_window(4, 2)
        with client.match_groups([whole, window], prompt_tokens=170) as lease:
            assert lease.boundary_tokens == 160
        for names, handle in ((whole, full), (window, sliding.handle)):
            handle.flush(names, deadline_seconds=SECONDS_MAX)
        killed_and_back(daemon, engine, sliding)
        with client.match_groups([whole, window]) as lease:
            assert lease.boundary_tokens == 192
            assert [group.first for group in lease.groups] == [0, 4]
            for _ in lease.load(deadline_seconds=SECONDS_MAX):
                pass
            for block in range(12):
                assert engine.painter.is_painted(whole[block], lease.view(block))
            for block in (4, 5):
                assert sliding.painter.is_painted(window[block], lease.view(block, group=1))
            assert lease.valid()
    assert_books(daemon)


def test_opaque_keys_need_no_order(daemon: DaemonProcess) -> None:
    with Engine(daemon, model="flat", kind=NamespaceKind.FLAT) as flat:
        names = flat.handle.keys([b"", b"a", b"a" * 1000, b"\0", "ключ".encode()])
        joined = names.joined
        each = [joined[at : at + 32] for at in range(0, len(joined), 32)]
        ticket = flat.handle.store(names, flat.painted(each))
        assert set(ticket.result(SECONDS_MAX)) == {BlockStatus.STORED}
        assert flat.handle.flush(names, deadline_seconds=SECONDS_MAX).all()
        killed_and_back(daemon, flat)
        for key, name in ((b"a" * 1000, each[2]), (b"", each[0])):
            into = np.zeros((1, LAYOUT.block_bytes), np.uint8)
            assert flat.handle.load(flat.handle.keys([key]), into).blocks == 1
            assert flat.painter.is_painted(name, into[0])
        assert flat.handle.delete(names, 1) == 1, "nothing follows a key"
        assert flat.handle.exists(names).tiers.astype(bool).tolist() == [True, False, *[True] * 3]


# ---------------------------------------------------------------------- ranks and engines

RANKED = BlockLayout(block_tokens=16, layers=2, layer_bytes=5000, ranks=2)
"""A rank's bytes end in mid-page."""


def colour_of(name: bytes, rank: int) -> bytes:
    return hashlib.blake2b(name, digest_size=32, salt=bytes([rank])).digest()


def test_ranks_read_back_their_own_bytes(daemon: DaemonProcess) -> None:
    """KEY-4: tensor-parallel ranks share a slot, pipeline stages a prompt; rounds in any order."""
    random = np.random.default_rng(4)
    painter = Painter(RANKED.rank_payload_bytes)
    stages = [
        dataclasses.replace(identity_of(RANKED, "ranked"), pp_size=2, pp_stage=stage)
        for stage in range(2)
    ]
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Engine(daemon, "ranked", model="unused")) for _ in range(2)]
        handles = [
            [engine.client.namespace(identity, RANKED) for identity in stages] for engine in ranks
        ]
        for round_ in range(25):
            for stage in range(2):
                _store_by_ranks(handles, stage, round_, painter, random)
        for handle in (handles[0][0], handles[0][1]):
            for round_ in range(25):
                chain = handle.chain(prompt(round_, 3 * 16))
                assert handle.flush(chain, deadline_seconds=SECONDS_MAX).all()
        _assert_ranks_see_their_own(handles, painter)
        killed_and_back(daemon, *ranks)
        _assert_ranks_see_their_own(handles, painter)
    assert_books(daemon)


def _store_by_ranks(
    handles: list[list[NamespaceHandle]],
    stage: int,
    round_: int,
    painter: Painter,
    random: np.random.Generator,
) -> None:
    order = random.permutation(2)
    chain = handles[0][stage].chain(prompt(round_, 3 * 16))
    with handles[order[0]][stage].reserve(chain) as first:
        assert first.granted == (0, 1, 2), first.reason
        with handles[order[1]][stage].join(first.share()) as second:
            opened = {int(order[0]): first, int(order[1]): second}
            for rank in random.permutation(2).tolist():
                reservation = opened[rank]
                for block in reservation.granted:
                    painter.paint(colour_of(chain[block], rank), reservation.rank_view(block, rank))
                last = reservation.commit(rank)
    assert set(last) == {BlockStatus.STORED}


def _assert_ranks_see_their_own(handles: list[list[NamespaceHandle]], painter: Painter) -> None:
    for rank in range(2):
        for stage in range(2):
            for round_ in range(25):
                handle = handles[rank][stage]
                chain = handle.chain(prompt(round_, 3 * 16))
                into = np.zeros((3, RANKED.rank_payload_bytes), np.uint8)
                assert handle.load(chain, into, rank=rank).blocks == 3
                for block in range(3):
                    assert painter.is_painted(colour_of(chain[block], rank), into[block])


def test_two_engines_share_what_both_store(daemon: DaemonProcess) -> None:
    with Engine(daemon, "a") as a, Engine(daemon, "b") as b:
        assert b.loads_whole(a.stored(1, 10)).from_host == 10
        outcomes: dict[str, list[tuple[BlockStatus, ...]]] = {"a": [], "b": []}

        def store(name: str, engine: Engine) -> None:
            outcomes[name] += [engine.store(engine.chain(n, 12, shared=4)) for n in range(2, 22)]

        threads = [threading.Thread(target=store, args=pair) for pair in (("a", a), ("b", b))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS_MAX)
        assert len(outcomes["a"]) == len(outcomes["b"]) == 20
        for number in range(2, 22):
            for engine in (a, b):
                engine.loads_whole(engine.chain(number, 12, shared=4))
    assert_books(daemon)


# ---------------------------------------------------------------------- identity


def changed(identity: KVIdentity) -> Iterator[tuple[str, KVIdentity]]:
    """The identity with one field after another changed."""
    for field in dataclasses.fields(identity):
        value = getattr(identity, field.name)
        if isinstance(value, NamespaceKind):
            other: object = NamespaceKind.FLAT
        elif isinstance(value, int):
            other = value + 1
        elif isinstance(value, tuple):
            other = (("codec", "zstd"),)
        else:
            other = f"{value}'"
        yield field.name, dataclasses.replace(identity, **{field.name: other})


def test_any_other_identity_misses(daemon: DaemonProcess, engine: Engine) -> None:
    """KEY-1, KEY-2, KEY-3, KEY-9: in shared memory, and on NVMe after a restart."""
    base = identity_of(LAYOUT)
    tokens = prompt(1, 8 * 16)
    chain = engine.durable(1, 8)
    others = {
        name: engine.client.namespace(namespace_of(identity), LAYOUT, label=name)
        for name, identity in changed(base)
    }
    assert len({handle.id for handle in others.values()} | {engine.handle.id}) == len(others) + 1

    def assert_only_the_same_hits(from_nvme: int) -> None:
        for name, handle in others.items():
            names = handle.chain(tokens)
            assert handle.match(names) == 0, name
            with handle.lease(names) as lease:
                assert lease.blocks == 0, name
            assert handle.load(names, np.zeros((8, LAYOUT.block_bytes), np.uint8)).blocks == 0
        assert engine.loads_whole(chain).from_nvme == from_nvme

    assert_only_the_same_hits(from_nvme=0)
    killed_and_back(daemon, engine)
    assert_only_the_same_hits(from_nvme=8)
    assert assert_books(daemon)["nvme"]["checksum_failures"] == 0, "not taken for corruption"


# ---------------------------------------------------------------------- clients come and go


def test_clients_end_in_any_way_and_the_arena_stays(daemon: DaemonProcess, engine: Engine) -> None:
    """HOST-5: by return, by exception, by exit without clean-up, by a signal."""
    chain = engine.stored(1, 10)
    source = """
        from types import SimpleNamespace
        from pathlib import Path
        engine = Engine(SimpleNamespace(socket=Path(sys.argv[1])), "child")
        say(engine.loads_whole(engine.chain(1, 10)).from_host)
        engine.store(engine.chain(int(sys.argv[3]), 4))
        say("stored")
        sys.stdin.readline()
        {"return": lambda: None, "raise": lambda: 1 / 0, "exit": lambda: os._exit(3),
         "kill": lambda: os.kill(os.getpid(), 9)}[sys.argv[2]]()
    """
    ways = ("return", "raise", "exit", "kill")
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(Script(source, str(daemon.socket), way, str(number)))
            for number, way in enumerate(ways, 10)
        ]
        for child in children:
            assert child.read() == 10
            assert child.read() == "stored"
            child.tell()
            child.process.wait(SECONDS_MAX)
            engine.loads_whole(chain)
            with Engine(daemon, "fresh") as fresh:
                fresh.loads_whole(chain)
    for number in range(10, 14):
        engine.loads_whole(engine.chain(number, 4))
    attached = lambda: daemon.stat()["clients"]["attached"]  # type: ignore[index]  # noqa: E731
    eventually(lambda: attached() == 1, "all are gone")
    assert not [*(daemon.arena / "clients").glob("*.lock")][1:], "only our own lock file is left"
    assert_books(daemon)


def test_traffic_goes_on_through_restarts(daemon: DaemonProcess) -> None:
    """RPC-9, LIFE-1: no exception reaches the engine; after each restart it stores and hits again.

    Kills and clean stops in turn; a clean stop takes the arena's directory away.
    """
    with Engine(daemon) as engine:
        known = [engine.durable(number, 6) for number in range(4)]
        stopping, failures = threading.Event(), []
        hits, stores = [0], [0]

        def traffic() -> None:
            number = 100
            while not stopping.is_set():
                try:
                    hits[0] += engine.load(known[number % 4], 1.0).blocks
                    stored = engine.store(engine.chain(number, 2))
                    stores[0] += stored.count(BlockStatus.STORED)
                except Exception as error:  # noqa: BLE001
                    failures.append(error)
                    return
                number += 1
                time.sleep(0.002)

        thread = threading.Thread(target=traffic, daemon=True)
        thread.start()
        lives = [engine.client.boot_id]
        try:
            for turn in range(4):
                (daemon.kill if turn % 2 else daemon.stop)()
                daemon.start()
                engine.wait_new_life(lives[-1])
                lives.append(engine.client.boot_id)
                before = hits[0], stores[0]
                eventually(
                    lambda b=before: (hits[0] > b[0] and stores[0] > b[1]) or failures,
                    "hits and stores move again",
                    10,
                )
        finally:
            stopping.set()
            thread.join(SECONDS_MAX)
        assert failures == []
        assert len(set(lives)) == 5
        statistics = engine.client.statistics()
        assert statistics.attaches == 5
        assert statistics.away_calls > 0, "what failed meanwhile was counted"
    assert_books(daemon)
