"""Time as an argument: the one place that reads the machine's clocks.

Everything that needs time takes a `Clock` or a `now` in seconds; tests pass
`kvstore.testing.VirtualClock`.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings, both in seconds."""

    def monotonic(self) -> float:
        """Seconds that never go back; leases, deadlines, latencies."""

    def wall(self) -> float:
        """Seconds since 1970; only for what is kept across a restart or shown to people."""


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
