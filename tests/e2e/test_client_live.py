"""The client library against a real daemon where they could harm each other: re-use, late writers,
a frozen daemon.

Field cases HOST-9, HOST-20, HOST-21, LIFE-4; a daemon that is alive but does not answer.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.errors import KVStoreError
from kvstore.fingerprint import Chain
from kvstore.types import BlockStatus
from tests.conftest import DaemonProcess
from tests.e2e.kit import SECONDS_MAX, Engine, Script, assert_books, eventually, new_daemon

MakeDaemon = Callable[..., DaemonProcess]
RACE_SECONDS = 2.0


@pytest.fixture
def quick_leases() -> Iterator[DaemonProcess]:
    """A daemon whose leases and reservations run out in half a second."""
    daemon = new_daemon({"lease.read_seconds": "500ms", "lease.write_seconds": "500ms"})
    try:
        yield daemon.start()
    finally:
        daemon.clean()


def slots(daemon: DaemonProcess, state: str) -> int:
    """Host slots in that state."""
    tree: Any = daemon.stat()
    return sum(size[state] for size in tree["host"]["slabs"]["classes"])


def leased_blocks(daemon: DaemonProcess) -> int:
    """Blocks that some lease protects."""
    tree: Any = daemon.stat()
    blocks: int = tree["leases"]["blocks"]
    return blocks


# ---------------------------------------------------------------------- readers and re-use


def by_load(engine: Engine, chain: Chain) -> int:
    return engine.load(chain).blocks


def by_load_of_single_blocks(engine: Engine, chain: Chain) -> int:
    into = np.zeros((1, engine.handle.layout.block_bytes), np.uint8)
    loaded = 0
    for at in range(len(chain)):
        if engine.handle.load(chain, into, start=at).blocks:
            assert engine.painter.is_painted(chain[at], into[0])
            loaded += 1
    return loaded


def by_lease(engine: Engine, chain: Chain) -> int:
    """Copies from the views, counts only what `valid` confirms."""
    with engine.handle.lease(chain) as lease:
        copies: dict[int, Any] = {}
        try:
            for ready in lease.load():
                for block in range(ready.first, ready.first + ready.count):
                    copies[block] = lease.view(block).copy()
        except KVStoreError:
            return 0
        if not lease.valid():
            return 0
    assert all(engine.painter.is_painted(chain[at], copy) for at, copy in copies.items())
    return len(copies)


@pytest.mark.parametrize("read", [by_load, by_load_of_single_blocks, by_lease])
def test_reads_are_right_or_misses_while_slots_change_hands(
    make_daemon: MakeDaemon, read: Callable[[Engine, Chain], int]
) -> None:
    daemon = make_daemon({"nvme.enabled": "false"}).start()
    writer = """
        from types import SimpleNamespace
        with Engine(SimpleNamespace(socket=Path(sys.argv[1])), "writer") as engine:
            for number in range(10**9):
                engine.store(engine.chain(number, 16))
                say(number)
        """
    with Engine(daemon, "reader") as engine, Script(writer, str(daemon.socket)) as storing:
        end = time.monotonic() + RACE_SECONDS
        newest, loaded = storing.read(), 0
        while time.monotonic() < end or not loaded:
            newest = storing.read()
            for back in (0, 3, 20, 31):
                loaded += read(engine, engine.chain(max(0, newest - back), 16))
        assert loaded


def test_lookups_without_a_load_protect_nothing_for_long(quick_leases: DaemonProcess) -> None:
    with Engine(quick_leases) as engine:
        for number in range(8):
            chain = engine.stored(number, 16)
            for _ in range(10):
                assert engine.handle.lease(chain).blocks == 16
        eventually(lambda: not leased_blocks(quick_leases), "all of them ran out")
        for number in range(100, 160):
            engine.stored(number, 16)
    assert_books(quick_leases)


# ---------------------------------------------------------------------- writers


def test_a_writer_that_overstays_is_waited_for(quick_leases: DaemonProcess) -> None:
    with Engine(quick_leases) as engine:
        chain = engine.chain(1, 8)
        with engine.handle.reserve(chain) as reservation:
            view = reservation.view(3)
            eventually(lambda: slots(quick_leases, "quarantined") == 8, "it expired")
            view[:] = 7
            with pytest.raises(KVStoreError, match="expired"):
                reservation.commit()
        eventually(lambda: not slots(quick_leases, "quarantined"), "the commit was its last word")
        assert engine.handle.match(chain) == 0
        engine.stored(1, 8)
        assert engine.loads_whole(chain)
    assert_books(quick_leases)


def test_a_writer_that_dies_gives_its_slots_back(daemon: DaemonProcess) -> None:
    source = """
        from types import SimpleNamespace
        engine = Engine(SimpleNamespace(socket=Path(sys.argv[1])), "doomed")
        reservation = engine.handle.reserve(engine.chain(1, 8))
        reservation.view(0)[:] = 1
        engine.stored(2, 4)
        say(len(reservation.granted))
        sys.stdin.readline()
        """
    with Script(source, str(daemon.socket)) as doomed:
        assert doomed.read() == 8
        assert slots(daemon, "filling") >= 8
    eventually(
        lambda: not slots(daemon, "filling") and not slots(daemon, "quarantined"), "all are free"
    )
    with Engine(daemon) as engine:
        assert engine.handle.match(engine.chain(1, 8)) == 0
        assert engine.loads_whole(engine.chain(2, 4))
    assert_books(daemon)


def test_slots_in_reserve_outlive_their_lease_time(quick_leases: DaemonProcess) -> None:
    with Engine(quick_leases) as engine:
        engine.stored(1, 8)
        eventually(lambda: engine.client.statistics().spare_slots >= 8, "slots are in reserve")
        before = engine.client.statistics().spare_stores
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert not slots(quick_leases, "quarantined")
            time.sleep(0.05)
        engine.stored(2, 8)
        assert engine.client.statistics().spare_stores == before + 1
    eventually(lambda: not slots(quick_leases, "filling"), "closing gave them back")
    assert_books(quick_leases)


# ---------------------------------------------------------------------- a daemon that hangs


def test_a_frozen_daemon_costs_its_deadline_and_comes_back(daemon: DaemonProcess) -> None:
    with Engine(daemon) as engine:
        held = engine.durable(1, 8)
        other = engine.chain(2, 8)
        assert daemon.process is not None
        os.kill(daemon.process.pid, signal.SIGSTOP)
        try:
            into = np.zeros((8, engine.handle.layout.block_bytes), np.uint8)
            assert engine.handle.load(held, into).blocks == 8, "the directory needs nobody"
            began = time.monotonic()
            result = engine.handle.load(other, into, deadline_seconds=0.3)
            assert (result.blocks, "DEADLINE" in result.reason) == (0, True)
            assert time.monotonic() - began < SECONDS_MAX / 2
            ticket = engine.handle.store(other, engine.painted([other[at] for at in range(8)]))
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
        assert set(ticket.result(SECONDS_MAX)) == {BlockStatus.STORED}
        assert engine.loads_whole(other)
