"""How fast this engine computes and copies, from what was seen lately.

Primitives:
  `Speeds`    predictions are 0 until something was seen
  `Prefill`   a forward pass that computed one request's tokens and hardly any other
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from engine_adapter.vllm_requests import Tracked

SMOOTHING = 0.3
"""Weight of the newest observation."""
PREFILL_TOKENS_MIN = 64
"""Smaller steps tell little about prefill."""
OTHERS_SHARE_MAX = 1 / 16
"""Of a pass' tokens those of other requests, where it counts as one request's."""
PREFILL_EVERY_SECONDS = 0.5
"""A daemon learns from the last few dozen."""
COPY_BYTES_PER_SECOND = 2e9
"""Assumed until loads were measured."""
STEPS_MAX = 8
"""Under way at the same time, at most; what is older never ends."""


class Prefill(NamedTuple):
    """Tokens [start, stop) of a prompt were computed in one pass."""

    start: int
    stop: int
    seconds: float


class Speeds:
    """One thread's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prefill_tokens_per_second = 0.0
        self._copy_bytes_per_second = COPY_BYTES_PER_SECOND
        self.has_copied = False
        self._steps: dict[int, tuple[int, float, tuple[int, int] | None]] = {}
        """Those that compute, by number: tokens, begin, the one request's tokens."""
        self._last_end = 0.0
        self._prefill_from = 0.0
        """The next prefill is looked for then."""

    def step_begins(
        self,
        number: int,
        scheduled: Mapping[str, int],
        tokens: int,
        requests: Mapping[str, Tracked],
    ) -> None:
        """`number`: counts steps; `scheduled`: tokens by request, `tokens` in all; `requests`: the
        running ones by id."""
        if not tokens:
            return
        now, prefill = self._clock(), None
        if tokens - len(scheduled) >= PREFILL_TOKENS_MIN and now >= self._prefill_from:
            prefill = _single(scheduled, tokens, requests)
        self._steps[number] = (tokens, now, prefill)
        if len(self._steps) > STEPS_MAX:
            del self._steps[min(self._steps)]

    def step_ends(self, number: int) -> Prefill | None:
        """Steps may overlap: one takes from the end of the one before. Nothing for a step that
        computed nothing, or of which nobody knows."""
        if number not in self._steps:
            return None
        tokens, began, prefill = self._steps.pop(number)
        now = self._clock()
        seconds = now - max(began, self._last_end)
        self._last_end = now
        if tokens < PREFILL_TOKENS_MIN or seconds <= 0:
            return None
        seen = tokens / seconds
        known = self._prefill_tokens_per_second
        self._prefill_tokens_per_second = known + SMOOTHING * (seen - known) if known else seen
        if prefill is None:
            return None
        self._prefill_from = now + PREFILL_EVERY_SECONDS
        return Prefill(*prefill, seconds)

    def copied(self, bytes_per_second: float) -> None:
        known = self._copy_bytes_per_second if self.has_copied else bytes_per_second
        self._copy_bytes_per_second = known + SMOOTHING * (bytes_per_second - known)
        self.has_copied = True

    def doubt_copies(self) -> None:
        """They may have become faster unseen."""
        self._copy_bytes_per_second *= 1 + SMOOTHING

    def copy_seconds(self, size_bytes: float) -> float:
        return size_bytes / self._copy_bytes_per_second

    def prefill_seconds(self, tokens: int) -> float:
        """0: not known yet."""
        rate = self._prefill_tokens_per_second
        return tokens / rate if rate else 0.0


def _single(
    scheduled: Mapping[str, int], tokens: int, requests: Mapping[str, Tracked]
) -> tuple[int, int] | None:
    name = max(scheduled, key=scheduled.__getitem__)
    count, tracked = scheduled[name], requests.get(name)
    if tracked is None or tokens - count > tokens * OTHERS_SHARE_MAX:
        return None
    start: int = tracked.request.num_computed_tokens
    return start, start + count
