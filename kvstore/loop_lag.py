"""How late the loop wakes up: the measure of "no step holds the loop".

Primitives of `LoopLag`: `sleep` (a plain sleep that notes how late it returned), `statistics`.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np

SAMPLES = 4096


class LoopLag:
    """A ring of the last delays in seconds."""

    def __init__(self) -> None:
        self._delays = np.zeros(SAMPLES)
        self._count = 0

    async def sleep(self, seconds: float) -> None:
        """Sleep; the time beyond `seconds` is the loop's lag."""
        start = time.perf_counter()
        await asyncio.sleep(seconds)
        self._delays[self._count % SAMPLES] = time.perf_counter() - start - seconds
        self._count += 1

    def statistics(self) -> dict[str, float]:
        """Milliseconds over the samples kept: p50, p99, max. The loop's timer itself adds about 1
        ms.
        """
        kept = self._delays[: min(self._count, SAMPLES)]
        if not len(kept):
            return {"p50_ms": 0.0, "p99_ms": 0.0, "max_ms": 0.0}
        ranked = np.sort(kept)
        p50, p99 = ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100]
        return {
            "p50_ms": round(float(p50) * 1e3, 3),
            "p99_ms": round(float(p99) * 1e3, 3),
            "max_ms": round(float(kept.max()) * 1e3, 3),
        }
