"""How fast this engine computes and copies, from what was seen lately.

Primitive: `Speeds`. Predictions are 0 until something was seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SMOOTHING = 0.3
"""Weight of the newest observation."""
PREFILL_TOKENS_MIN = 64
"""Smaller steps tell little about prefill."""
COPY_BYTES_PER_SECOND = 2e9
"""Assumed until loads were measured."""


class Speeds:
    """One thread's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prefill_tokens_per_second = 0.0
        self._copy_bytes_per_second = COPY_BYTES_PER_SECOND
        self._step_tokens = 0
        self._step_began = 0.0

    def step_begins(self, tokens: int) -> None:
        self._step_tokens, self._step_began = tokens, self._clock()

    def step_ends(self) -> None:
        seconds = self._clock() - self._step_began
        if self._step_tokens >= PREFILL_TOKENS_MIN and seconds > 0:
            seen = self._step_tokens / seconds
            known = self._prefill_tokens_per_second
            self._prefill_tokens_per_second = known + SMOOTHING * (seen - known) if known else seen
        self._step_tokens = 0

    def copied(self, bytes_per_second: float) -> None:
        known = self._copy_bytes_per_second
        self._copy_bytes_per_second = known + SMOOTHING * (bytes_per_second - known)

    def copy_seconds(self, size_bytes: float) -> float:
        return size_bytes / self._copy_bytes_per_second

    def prefill_seconds(self, tokens: int) -> float:
        """0: not known yet."""
        rate = self._prefill_tokens_per_second
        return tokens / rate if rate else 0.0
