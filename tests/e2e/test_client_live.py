"""The client library against a real daemon: its late words, its slots in reserve.

Field case LIFE-4. What other processes may do to each other is told in test_late.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.errors import KVStoreError
from tests.conftest import DaemonProcess
from tests.e2e.kit import Engine, assert_books, eventually, running

WRITE_SECONDS = 2.0


@pytest.fixture
def quick_leases() -> Iterator[DaemonProcess]:
    """A daemon whose reservations run out soon."""
    with running({"lease.write_seconds": f"{WRITE_SECONDS}s"}) as daemon:
        yield daemon


def slots(daemon: DaemonProcess, state: str) -> int:
    """Host slots in that state."""
    tree: Any = daemon.stat()
    return sum(size[state] for size in tree["host"]["slabs"]["classes"])


# ---------------------------------------------------------------------- writers


@pytest.mark.parametrize("last_word", ["commit", "abort"])
def test_a_writer_that_overstays_is_waited_for(quick_leases: DaemonProcess, last_word: str) -> None:
    with Engine(quick_leases) as engine:
        chain = engine.chain(1, 8)
        with engine.handle.reserve(chain) as reservation:
            view = reservation.view(3)
            eventually(lambda: slots(quick_leases, "quarantined") == 8, "it expired")
            view[:] = 7
            if last_word == "commit":
                with pytest.raises(KVStoreError, match="expired"):
                    reservation.commit()
        eventually(lambda: not slots(quick_leases, "quarantined"), "the writer said so")
        assert engine.handle.match(chain) == 0
        engine.stored(1, 8)
        assert engine.loads_whole(chain)
    assert_books(quick_leases)


def test_slots_in_reserve_outlive_their_lease_time(quick_leases: DaemonProcess) -> None:
    with Engine(quick_leases) as engine:
        engine.stored(1, 8)
        eventually(lambda: engine.client.statistics().spare_slots >= 8, "slots are in reserve")
        before = engine.client.statistics().spare_stores
        end = time.monotonic() + 1.5 * WRITE_SECONDS
        while time.monotonic() < end:
            assert not slots(quick_leases, "quarantined")
            time.sleep(0.05)
        engine.stored(2, 8)
        assert engine.client.statistics().spare_stores == before + 1
    eventually(lambda: not slots(quick_leases, "filling"), "closing gave them back")
    assert_books(quick_leases)
