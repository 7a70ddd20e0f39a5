"""How likely blocks are to be used again, by class and by time since their last use.

Primitives:
  `Hazard`     learns from intervals between uses; tells the index and the chance of a use
  `Intervals`  intervals by class and age, as counts

An interval is *closed* by the next use, or *open* (nobody has used the block since): open ones
count as exposure only, which is what keeps rare re-use from looking certain. Pure numpy; the caller
numbers classes.

Classes come in groups. The index is that of a class's group, which needs little data: the highest
rate of re-use over any horizon, P(used within it) ÷ expected waiting time (the Gittins index of a
bandit that ends at re-use); before any data it is 1 ÷ age. The chance is the class's own.
"""

from __future__ import annotations

import numpy as np

from kvstore.types import FloatArray, IntArray

BUCKETS = 48
"""Ages from 1/16 s to 12 days, two buckets an octave."""
_OCTAVE_BUCKETS = 2
_AGE_MIN = 1.0 / 16.0
_FIRST = -4 * _OCTAVE_BUCKETS
_PRIOR_INTERVALS = 50.0
"""Intervals that the prior curve counts for: pooled data for a class, 1 ÷ age for the pool."""
_RATE_MIN = 1e-12
_CLOSED_MAX = 1 << 20
"""Past so many closed intervals their weight is halved, so that a new workload shows in time."""

_EDGES: FloatArray = np.concatenate(
    ([0.0], 2.0 ** ((np.arange(1, BUCKETS + 1) + _FIRST) / _OCTAVE_BUCKETS))
)
_LOW, _WIDTHS = _EDGES[:-1], np.diff(_EDGES)
_AHEAD = np.triu(np.ones((BUCKETS, BUCKETS), np.bool_))
_MIDDLES = np.sqrt(np.maximum(_LOW, _AGE_MIN / 2) * _EDGES[1:])


def steps_of(ages: FloatArray) -> FloatArray:
    """Where among the buckets each of `ages` (seconds) lies, float64[n]: whole at their starts."""
    steps: FloatArray = np.log2(np.maximum(ages, _AGE_MIN)) * _OCTAVE_BUCKETS - _FIRST
    return np.minimum(steps, float(BUCKETS - 1))


def buckets_of(ages: FloatArray) -> IntArray:
    """The age bucket of each of `ages` (seconds), int64[n]."""
    buckets: IntArray = steps_of(ages).astype(np.int64)
    return buckets


class Intervals:
    """Per class and bucket: how many intervals ended there, and how far into it, in seconds."""

    def __init__(self, classes: int) -> None:
        self.ends: FloatArray = np.zeros((classes, BUCKETS))
        self.rests: FloatArray = np.zeros((classes, BUCKETS))

    def add(
        self, classes: IntArray, ages: FloatArray, counts: FloatArray | float = 1.0
    ) -> FloatArray:
        """Intervals that ended, or have lasted until now; how many in each class and bucket.

        `counts`: how many each entry stands for.
        """
        buckets = buckets_of(ages)
        flat = classes * BUCKETS + buckets
        rests = np.clip(ages - _LOW[buckets], 0.0, _WIDTHS[buckets]) * counts
        shape, size = self.ends.shape, self.ends.size
        weights = None if isinstance(counts, float) else counts
        added = np.bincount(flat, weights, size).reshape(shape).astype(np.float64)
        self.ends += added
        self.rests += np.bincount(flat, rests, size).reshape(shape)
        return added

    def grow(self, classes: int) -> None:
        """More classes, without intervals."""
        more = np.zeros((classes - len(self.ends), BUCKETS))
        self.ends = np.concatenate((self.ends, more))
        self.rests = np.concatenate((self.rests, more))

    def fade(self) -> None:
        """Half the weight."""
        self.ends *= 0.5
        self.rests *= 0.5

    @property
    def nbytes(self) -> int:
        return self.ends.nbytes + self.rests.nbytes


class Hazard:
    """The curves. `closed` and `cut` add to what is known; `fit` makes it count."""

    def __init__(self, groups: IntArray) -> None:
        """`groups` int64[classes]: number of each class's group, from 0."""
        self._uses: FloatArray = np.zeros((0, BUCKETS))
        self._ended = Intervals(0)
        """Those that ended with a use, and those left unobserved."""
        self._groups: IntArray
        self._rates: FloatArray
        self._index: FloatArray
        """At each bucket's start; `_rise` to the next one's."""
        self._rise: FloatArray
        self._reached: FloatArray
        """Hazard summed up to each bucket's start."""
        self.grow(groups)

    @property
    def classes(self) -> int:
        return len(self._uses)

    def grow(self, groups: IntArray) -> None:
        """More classes; they begin as the others taken together."""
        self._groups = groups
        self._uses = np.concatenate((self._uses, np.zeros((groups.size - self.classes, BUCKETS))))
        self._ended.grow(groups.size)
        self.fit(Intervals(groups.size))

    def closed(self, classes: IntArray, ages: FloatArray, counts: FloatArray | float = 1.0) -> None:
        """Intervals that a use ended."""
        self._uses += self._ended.add(classes, ages, counts)

    def cut(self, classes: IntArray, ages: FloatArray) -> None:
        """Intervals of which nothing more will be known."""
        self._ended.add(classes, ages)

    @property
    def nbytes(self) -> int:
        tables = (self._uses, self._rates, self._index, self._rise, self._reached)
        return self._ended.nbytes + sum(table.nbytes for table in tables)

    def index(self, classes: IntArray, ages: FloatArray) -> FloatArray:
        """Uses a second to expect at best, float64[n]."""
        steps = steps_of(ages)
        buckets = steps.astype(np.int64)
        at = self._groups[classes] * BUCKETS + buckets
        return self._index.take(at) + self._rise.take(at) * (steps - buckets)

    def chance(self, classes: IntArray, ages: FloatArray, seconds: float) -> FloatArray:
        """Probability of a use within `seconds` from now, float64[n]."""
        summed = self._summed(classes, ages + seconds) - self._summed(classes, ages)
        return -np.expm1(-summed)

    def fit(self, still_open: Intervals) -> None:
        """New curves, from what was added and the intervals that are open now."""
        events = self._uses
        ends = self._ended.ends + still_open.ends
        longer = ends.sum(axis=1, keepdims=True) - ends.cumsum(axis=1)
        exposure = longer * _WIDTHS + self._ended.rests + still_open.rests
        pooled = _continued(events.sum(axis=0), exposure.sum(axis=0))
        groups = self._by_group(events), self._by_group(exposure)
        group_rates = _smoothed(*groups, pooled)
        self._index = _best_rates(group_rates)
        self._rise = np.diff(self._index, append=self._index[:, -1:])
        self._rates = _smoothed(events, exposure, group_rates[self._groups])
        steps = self._rates * _WIDTHS
        self._reached = steps.cumsum(axis=1) - steps
        if events.sum() > _CLOSED_MAX:
            self._uses *= 0.5
            self._ended.fade()

    def _by_group(self, numbers: FloatArray) -> FloatArray:
        summed = np.zeros((int(self._groups.max()) + 1, BUCKETS))
        np.add.at(summed, self._groups, numbers)
        return summed

    def _summed(self, classes: IntArray, ages: FloatArray) -> FloatArray:
        buckets = buckets_of(ages)
        inside = self._rates[classes, buckets] * (ages - _LOW[buckets])
        return self._reached[classes, buckets] + inside


def _smoothed(events: FloatArray, exposure: FloatArray, prior: FloatArray) -> FloatArray:
    """Uses a second in each bucket; `prior` counts for _PRIOR_INTERVALS."""
    weight = _PRIOR_INTERVALS * _WIDTHS
    rates: FloatArray = (events + prior * weight) / (exposure + weight)
    return rates


def _continued(events: FloatArray, exposure: FloatArray) -> FloatArray:
    """The pooled curve: where little was seen it goes on from the age before, falling as 1 ÷ age.

    Expecting 1 ÷ age itself there would make what nobody has waited for yet look promising.
    """
    rates = np.empty(BUCKETS)
    prior = 1.0 / _MIDDLES[0]
    weights = _PRIOR_INTERVALS * _WIDTHS
    for bucket in range(BUCKETS):
        seen, weight = exposure[bucket], weights[bucket]
        rates[bucket] = (events[bucket] + prior * weight) / (seen + weight)
        if bucket + 1 < BUCKETS:
            prior = rates[bucket] * _MIDDLES[bucket] / _MIDDLES[bucket + 1]
    return np.maximum(rates, _RATE_MIN)


def _best_rates(rates: FloatArray) -> FloatArray:
    """Index at each bucket's start: P(use by k) ÷ E(time until then), the best over all k."""
    steps = rates * _WIDTHS
    reached = steps.cumsum(axis=1)
    waits = -np.expm1(-steps) / rates
    # [class, from, to]: what is summed up between the start of one bucket and that of another.
    before = np.maximum((reached - steps)[:, None, :] - (reached - steps)[:, :, None], 0.0)
    seconds = np.where(_AHEAD, np.exp(-before) * waits[:, None, :], 0.0).cumsum(axis=2)
    chance = -np.expm1(-np.maximum(reached[:, None, :] - (reached - steps)[:, :, None], 0.0))
    best: FloatArray = np.where(_AHEAD, chance / np.maximum(seconds, 1e-300), 0.0).max(axis=2)
    return best
