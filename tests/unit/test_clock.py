"""The clock that tests move."""

from __future__ import annotations

import pytest

from kvstore.clock import Clock, SystemClock
from kvstore.errors import InvariantViolated
from kvstore.testing import VirtualClock


def test_virtual_time_moves_only_when_told() -> None:
    clock = VirtualClock(monotonic=5.0, wall=100.0)
    assert (clock.monotonic(), clock.wall()) == (5.0, 100.0)
    assert clock.advance(2.5) == 7.5
    assert (clock.monotonic(), clock.wall()) == (7.5, 102.5)


def test_the_wall_clock_may_jump_alone() -> None:
    clock = VirtualClock(monotonic=5.0, wall=100.0)
    clock.set_wall(50.0)
    assert (clock.monotonic(), clock.wall()) == (5.0, 50.0)


def test_the_monotonic_clock_never_goes_back() -> None:
    with pytest.raises(InvariantViolated):
        VirtualClock().advance(-1.0)


def test_the_machine_clock_is_one_too() -> None:
    clock: Clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.wall() > 1_600_000_000
