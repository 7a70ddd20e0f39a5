"""Time that moves only when a test says so.

Primitive: `VirtualClock`, a `kvstore.clock.Clock`.
"""

from __future__ import annotations

from kvstore.errors import check

WALL_START_SECONDS = 1_700_000_000.0
"""A fixed date, so that what is kept across a restart reads alike in every run."""


class VirtualClock:
    """Both readings advance together, by `advance` only. Not thread-safe."""

    def __init__(self, monotonic: float = 1000.0, wall: float = WALL_START_SECONDS) -> None:
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return self._monotonic

    def wall(self) -> float:
        """Seconds since 1970."""
        return self._wall

    def advance(self, seconds: float) -> float:
        """Let `seconds` pass; return the new monotonic reading."""
        check(seconds >= 0, "the monotonic clock never goes back", seconds=seconds)
        self._monotonic += seconds
        self._wall += seconds
        return self._monotonic

    def set_wall(self, wall: float) -> None:
        """Jump the wall clock (an operator or NTP set it), leaving the monotonic one alone."""
        self._wall = wall
