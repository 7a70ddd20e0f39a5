"""How long calls take inside the daemon, as histograms.

Primitives of `Latencies`: `observe`, `statistics`. A bucket holds what took at most its bound.
"""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_SECONDS = (
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)


class Latencies:
    """One histogram for each of `names`, all there from the start."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._counts = {name: [0] * (len(BOUNDS_SECONDS) + 1) for name in names}
        self._seconds = dict.fromkeys(names, 0.0)

    def observe(self, name: str, seconds: float) -> None:
        """One call; an unknown name is our bug (KeyError)."""
        self._counts[name][bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self._seconds[name] += seconds

    def statistics(self) -> dict[str, dict[str, object]]:
        """name -> {"buckets": {bound in seconds: calls up to it}, "seconds": total}."""
        bounds = [*map(str, BOUNDS_SECONDS), "+Inf"]
        found: dict[str, dict[str, object]] = {}
        for name, counts in self._counts.items():
            total = 0
            buckets = {}
            for bound, count in zip(bounds, counts, strict=True):
                total += count
                buckets[bound] = total
            found[name] = {"buckets": buckets, "seconds": round(self._seconds[name], 6)}
        return found
