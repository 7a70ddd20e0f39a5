"""What a written byte costs, so that a budget of bytes lasts.

Primitives: `bytes_per_second` (the budget), `WearPrice` (seconds of saved prefill that a byte has
to bring). The price is the one at which, of what was offered lately, just as much is worth it as
the budget allows; what was overspent is taken off, what was spared may be spent later. Pure;
without a budget the price is 0.
"""

from __future__ import annotations

import numpy as np

from kvstore.config import NvmeConfig
from kvstore.types import FloatArray

DAY_SECONDS = 86400.0
_STEPS = 96
_STEP_LOG2 = 0.25
_FLOOR_LOG2 = -52.0
"""Prices from 2^-52 s a byte, by quarters of an octave: 64 MiB for 15 ns, up to 0.25 s."""
_HALF_LIFE_BLOCKS = 4096.0
BURST_SECONDS = 60.0
"""So much of the budget is there at once."""
SPARED_SECONDS = 3600.0
"""What is not spent may be spent later, an hour's worth at most."""


def bytes_per_second(nvme: NvmeConfig) -> float:
    """What the budget comes to; 0: there is none."""
    budgets = (nvme.drive_writes_per_day * nvme.bytes_max, float(nvme.write_bytes_per_day))
    return min((budget for budget in budgets if budget), default=0.0) / DAY_SECONDS


class WearPrice:
    """`rate` in bytes a second; 0: no budget."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.price = 0.0
        self._offered: FloatArray = np.zeros(_STEPS)
        """Bytes offered lately, by what they would bring."""
        self._seconds = 0.0
        """Time in which they were."""
        self._credit = rate * BURST_SECONDS
        self._last = -np.inf

    def offer(self, seconds_a_byte: FloatArray, sizes: FloatArray, now: float) -> None:
        """Blocks that may be written and what a byte of each would bring; sets the price."""
        if not self._rate or not len(sizes):
            return
        passed = max(0.0, now - self._last) if np.isfinite(self._last) else 0.0
        self._last = now
        fade = 0.5 ** (len(sizes) / _HALF_LIFE_BLOCKS)
        self._offered *= fade
        self._seconds = self._seconds * fade + passed
        logs = np.log2(np.maximum(seconds_a_byte, 2.0**_FLOOR_LOG2)) - _FLOOR_LOG2
        steps = np.minimum(logs / _STEP_LOG2, _STEPS - 1).astype(np.int64)
        self._offered += np.bincount(steps, weights=sizes, minlength=_STEPS)
        most = self._rate * SPARED_SECONDS
        self._credit = min(most, self._credit + passed * self._rate)
        self._set_price()

    def spend(self, count_bytes: float) -> None:
        """So much was let through."""
        if self._rate:
            self._credit -= count_bytes

    def _set_price(self) -> None:
        allowed = self._rate * self._seconds + self._credit
        dearer = self._offered[::-1].cumsum()[::-1]
        over = dearer > allowed
        if not over.any():
            self.price = 0.0
            return
        step = int(np.flatnonzero(over)[-1])
        # Within the step, as if its bytes were spread evenly over it.
        rest = allowed - (dearer[step] - self._offered[step])
        share = min(1.0, max(0.0, 1.0 - rest / max(self._offered[step], 1.0)))
        self.price = float(2.0 ** (_FLOOR_LOG2 + (step + share) * _STEP_LOG2))
