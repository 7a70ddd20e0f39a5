"""Whoever is late: readers whose lease ran out, writers that were stopped in mid-copy, the dead.

Field cases HOST-9, HOST-11 to HOST-13, HOST-20 and LIFE-4.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvstore.client import KVClient
from kvstore.client.reasons import ABSENT, AWAY
from kvstore.fingerprint import Chain
from kvstore.rpc import control_pb2 as pb
from kvstore.types import BlockStatus
from tests.conftest import DaemonProcess
from tests.e2e.kit import (
    DONE,
    LAYOUT,
    SECONDS_MAX,
    Engine,
    RawClient,
    Script,
    assert_books,
    eventually,
)

MakeDaemon = Callable[..., DaemonProcess]
TINY = {"host.bytes": "2MiB", "host.region_bytes": "2MiB", "host.staging_slots_min": "4"}
"""32 slots of 64 KiB, 4 of them only for loads."""
SLOTS = 32
READ_SECONDS = 0.4
WRITE_SECONDS = 2.0
LEASES = {"lease.read_seconds": f"{READ_SECONDS}s", "lease.write_seconds": f"{WRITE_SECONDS}s"}

OPEN = """
    from types import SimpleNamespace
    engine = Engine(SimpleNamespace(socket=Path(sys.argv[1])), "late")
"""


@pytest.fixture
def tiny(make_daemon: MakeDaemon) -> DaemonProcess:
    return make_daemon({**TINY, **LEASES}).start()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def churn(engine: Engine, first: int, blocks: int = 2 * SLOTS) -> None:
    """Store so much that every slot that may be re-used is."""
    for number in range(first, first + blocks // 4):
        engine.store(engine.chain(number, 4))


def host(daemon: DaemonProcess) -> dict[str, int]:
    """Slots of the tiny arena by state."""
    tree: Any = daemon.stat()
    classes = tree["host"]["slabs"]["classes"]
    states = ("free", "filling", "ready", "draining", "quarantined")
    return {state: sum(size[state] for size in classes) for state in states}


# ---------------------------------------------------------------------- readers


def test_lookups_without_a_load_protect_nothing_for_long(tiny: DaemonProcess) -> None:
    """HOST-9"""
    with Engine(tiny) as engine, RawClient(tiny.socket) as raw:
        chain = engine.stored(1, 8)
        group = pb.Group(namespace=chain.namespace, fingerprints=chain.joined)
        for _ in range(300):
            assert raw.call("Match", groups=[group], want_lease=True).lease

        def nothing_is_held() -> bool:
            leases: Any = tiny.stat()["leases"]
            return leases["active"] == leases["protecting_late_readers"] == leases["blocks"] == 0

        eventually(nothing_is_held, "leases end by themselves")
        churn(engine, 200)
        assert engine.handle.match(chain) == 0, "re-used"
    assert_books(tiny)


def test_a_release_too_many_takes_nothing_from_others(make_daemon: MakeDaemon) -> None:
    """HOST-11"""
    tiny = make_daemon(TINY).start()
    with Engine(tiny) as engine, Engine(tiny, "other") as other, RawClient(tiny.socket) as raw:
        chain = engine.stored(1, 6)
        group = pb.Group(namespace=chain.namespace, fingerprints=chain.joined)
        mine = raw.call("Match", groups=[group], want_lease=True).lease
        with other.handle.lease(chain) as lease:
            for _ in range(3):
                raw.call("Release", leases=[mine])
            for number in range(100, 112):
                engine.store(engine.chain(number, 4))
            for block in range(6):
                assert other.painter.is_painted(chain[block], lease.view(block))
            assert lease.valid()
    assert_books(tiny)


def has_stored(engine: Engine, chain: Chain) -> bool:
    return set(engine.store(chain)) <= DONE


def test_a_late_reader_is_told(tiny: DaemonProcess) -> None:
    """HOST-20: bytes copied after the protection ended count only if nothing moved."""
    random = np.random.default_rng(20)
    told = {True: 0, False: 0}
    with Engine(tiny) as engine, Engine(tiny, "reader") as reader:
        for round_ in range(8):
            chain = engine.chain(round_, 6)
            # The last round's lease ends when the daemon hears of it.
            eventually(partial(has_stored, engine, chain), "room")
            copy = np.empty((6, LAYOUT.block_bytes), np.uint8)
            with reader.handle.lease(chain) as lease:
                assert lease.blocks == 6
                views = [lease.view(block) for block in range(6)]
                half = int(random.integers(1, LAYOUT.block_bytes))
                for block in range(6):
                    copy[block, :half] = views[block][:half]
                is_late = round_ % 4 != 0
                time.sleep(2.5 * READ_SECONDS if is_late else 0)
                churn(engine, 1000 + 100 * round_)
                for block in range(6):
                    copy[block, half:] = views[block][half:]
                is_valid = lease.valid()
            right = [reader.painter.is_painted(chain[block], copy[block]) for block in range(6)]
            assert all(right) or not is_valid, f"round {round_}: other bytes were called valid"
            told[is_valid] += 1
    assert told[False] >= 4, "the slots were re-used under late readers"
    assert_books(tiny)


def test_readers_without_a_lease_see_right_bytes_or_a_miss(tiny: DaemonProcess) -> None:
    """Loads through the directory while every slot is re-used as fast as it can be."""
    with Engine(tiny) as engine, Engine(tiny, "reader") as reader:
        stopping = threading.Event()
        number = [0]

        def store() -> None:
            while not stopping.is_set():
                engine.store(engine.chain(number[0], 4))
                number[0] += 1

        thread = threading.Thread(target=store, daemon=True)
        thread.start()
        deadline = time.monotonic() + 2.0
        loaded = 0
        while time.monotonic() < deadline or not loaded:
            newest = number[0]
            for back in range(8):
                chain = reader.chain(max(0, newest - back), 4)
                if reader.handle.match(chain):
                    loaded += reader.load(chain, 0.5).blocks
        stopping.set()
        thread.join(SECONDS_MAX)
    assert_books(tiny)


# ---------------------------------------------------------------------- writers


def test_a_writer_stopped_in_mid_copy_hurts_nobody(tiny: DaemonProcess) -> None:
    """LIFE-4: its slots stay out of use until it says that its last copy ended."""
    source = (
        OPEN
        + """
    from kvstore.errors import KVStoreError
    chain = engine.chain(1, 4)
    with engine.handle.reserve(chain) as reservation:
        assert reservation.granted == (0, 1, 2, 3)
        views = [reservation.view(block) for block in range(4)]
        say("copying")
        for _ in range(3000):
            for block in range(4):
                views[block][:] = 0xEE
        try:
            say([int(status) for status in reservation.commit()])
        except KVStoreError as error:
            say(type(error).__name__)
    sys.stdin.readline()
    say([int(status) for status in engine.store(chain)])
    """
    )
    with Engine(tiny, "other") as engine, Script(source, str(tiny.socket)) as late:
        assert late.read() == "copying"
        with stopped(late.pid):
            eventually(lambda: host(tiny)["quarantined"] == 4, "its slots are in quarantine")
            chain = engine.stored(1, 4)
            churn(engine, 100)
            kept = [engine.chain(number, 4) for number in range(100, 116)]
            assert host(tiny)["quarantined"] == 4, "whatever is stored meanwhile"
        assert late.read() in ("LeaseError", "LeaseExpired", "ReservationUnknown")
        eventually(lambda: host(tiny)["quarantined"] == 0, "its word frees them")
        for mine in (chain, *kept):
            engine.load(mine)
        late.tell()
        assert set(late.read()) <= {int(status) for status in DONE}
        churn(engine, 200)
    assert tiny.counters()["expired_reservations"] >= 1
    assert tiny.counters()["late_commits"] >= 1
    assert_books(tiny)


def test_a_store_stopped_before_its_commit_is_dropped(tiny: DaemonProcess) -> None:
    """The library's own slots: copied, stopped past their time, continued; all is well again."""
    source = (
        OPEN
        + """
    engine.stored(1, 4)
    for number in range(10, 100000):
        statuses = engine.store(engine.chain(number, 4))
        say([number, sorted({int(status) for status in statuses})])
    """
    )
    with Engine(tiny, "other") as engine, Script(source, str(tiny.socket)) as late:
        late.read()
        for _ in range(3):
            with stopped(late.pid):
                time.sleep(1.5 * WRITE_SECONDS)
                churn(engine, 5000)
            number, statuses = late.read()
            deadline = time.monotonic() + SECONDS_MAX
            while BlockStatus.STORED not in statuses:
                assert time.monotonic() < deadline, "never stores again"
                number, statuses = late.read()
            engine.load(engine.chain(number, 4))
    eventually(lambda: host(tiny)["quarantined"] == 0, "the dead client's slots came back")
    assert_books(tiny)


def test_the_dead_give_back_what_they_held(tiny: DaemonProcess) -> None:
    """Leases and reservations; slots without names although another client of its engine lives.

    Named slots may have been joined by the other one: they wait for its end too.
    """
    source = (
        OPEN
        + """
    chain = engine.stored(1, 4)
    lease = engine.handle.lease(chain)
    while not engine.client.statistics().spare_slots:
        time.sleep(0.01)
    reservation = engine.handle.reserve(engine.chain(2, 8))
    say(len(reservation.granted))
    sys.stdin.readline()
    """
    )
    with Engine(tiny, "other") as other:
        with Engine(tiny, "late") as same:
            with Script(source, str(tiny.socket)) as late:
                assert late.read() == 8
                assert host(tiny)["filling"] > 8
                late.process.kill()
            eventually(lambda: host(tiny)["filling"] == 0, "it is noticed")
            eventually(lambda: host(tiny)["quarantined"] == 8, "its spare slots came back")
            assert set(other.store(other.chain(2, 8))) == {BlockStatus.STORED}, "names are free"
            same.loads_whole(same.chain(1, 4))
        eventually(lambda: host(tiny)["quarantined"] == 0, "its other slots came back")

        def no_lease_is_left() -> bool:
            leases: Any = tiny.stat()["leases"]
            return bool(leases["blocks"] == 0)

        eventually(no_lease_is_left, "its leases ended")
    assert_books(tiny)


@pytest.mark.parametrize("end", ["killed", "continued"])
def test_a_stopped_client_of_the_last_life_holds_the_arena(tiny: DaemonProcess, end: str) -> None:
    """It may still write to the old regions: the next daemon hands none of them out before."""
    source = (
        OPEN
        + """
    with engine.handle.reserve(engine.chain(2, 4)) as reservation:
        view = reservation.view(0)
        say("holding")
        sys.stdin.readline()
        view[:] = 0xEE
    say("ended")
    """
    )
    with Engine(tiny, "other") as engine, Script(source, str(tiny.socket)) as late:
        chain = engine.durable(1, 4)
        assert late.read() == "holding"
        with stopped(late.pid):
            boot_id = engine.client.boot_id
            tiny.kill()
            tiny.start()
            engine.wait_new_life(boot_id)
            health: Any = tiny.stat()["health"]
            assert "clients of the last daemon" in health[0]
            assert set(engine.store(engine.chain(3, 2))) == {BlockStatus.NO_ROOM}
            started = time.monotonic()
            assert engine.load(chain, 0.5).blocks == 0
            assert time.monotonic() - started < SECONDS_MAX / 2, "a miss within its deadline"
            if end == "killed":
                late.process.kill()
        if end == "continued":
            late.tell()
            assert late.read() == "ended"
        eventually(lambda: tiny.stat()["health"] == ["ok"], "the arena is handed out")
        engine.loads_whole(chain)
        engine.stored(3, 2)
    assert_books(tiny)


# ---------------------------------------------------------------------- no room, no answer


def test_a_pinned_arena_still_serves_loads(tiny: DaemonProcess) -> None:
    """HOST-12, HOST-13: a few slots are kept for loads; beyond them a miss, in time."""
    with Engine(tiny) as engine, Engine(tiny, "holder") as holder:
        below = engine.durable(1, 4)
        churn(engine, 100)
        assert engine.handle.match(below) == 0
        held = [holder.chain(number, 4) for number in range(100, 116)]
        with contextlib.ExitStack() as stack:
            for chain in held:
                if holder.handle.match(chain):
                    stack.enter_context(holder.handle.lease(chain))
            started = time.monotonic()
            found = engine.load(below, 0.5)
            assert time.monotonic() - started < SECONDS_MAX / 2
            assert found.blocks in range(5)
        engine.loads_whole(below)
    assert_books(tiny)


def test_a_stopped_daemon_costs_a_deadline(make_daemon: MakeDaemon) -> None:
    """Nothing waits for ever: shared memory is read on, the rest is a miss; then all goes on."""
    tiny = make_daemon({**TINY, "host.bytes": "4MiB"}).start()
    with Engine(tiny) as engine:
        below = engine.durable(1, 4)
        churn(engine, 100, 4 * SLOTS)
        here = engine.stored(2, 4)
        with KVClient(str(tiny.socket), engine="hasty", deadline_seconds=0.5) as client:
            assert client.wait_connected(SECONDS_MAX)
            handle = client.namespace(engine.handle.id, LAYOUT)
            assert tiny.process is not None
            with stopped(tiny.process.pid):
                later = engine.chain(3, 4)
                started = time.monotonic()
                into = np.zeros((4, LAYOUT.block_bytes), np.uint8)
                assert handle.match(here) == 4
                assert handle.load(here, into).blocks == 4
                missed = handle.load(below, into)
                assert missed.blocks == 0
                assert missed.reason not in ("", ABSENT), missed
                ticket = handle.store(later, engine.painted([later[at] for at in range(4)]))
                assert time.monotonic() - started < SECONDS_MAX / 2
                refused = ticket.result(SECONDS_MAX)
                assert set(refused) <= {BlockStatus.REFUSED, BlockStatus.DROPPED}, ticket.reason
            eventually(lambda: handle.load(below, into).blocks == 4, "it answers again")
            assert missed.reason != AWAY
        engine.stored(3, 4)
    assert_books(tiny)
