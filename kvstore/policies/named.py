"""Well-known policies, for comparison and as an operator's choice: LFU, ARC, S3-FIFO.

Primitives: `Lfu`, `Arc`, `S3Fifo`, each a Policy. Their queues are expressed as scores over catalog
rows, so that leaf first, leases and tiers hold for them as for any other: the picker's samples
stand for the ends of their queues. They know no costs, and admit and promote everything.
"""

from __future__ import annotations

import numpy as np

from kvstore.catalog import Catalog
from kvstore.policies.ghosts import Ghosts, Remembered, keys_of
from kvstore.policy import UNKNOWN_REQUEST, LruLeaf, RequestShape, lru_order
from kvstore.types import ByteArray, FloatArray, IntArray, ReplicaState, Tier

_ABSENT = int(ReplicaState.ABSENT)
_APART = 1e10
"""Seconds between queues: more than any clock shows."""


class Lfu(LruLeaf):
    """The least often used leaf goes first, of those the least recently used one."""

    name = "lfu"

    def scores(self, rows: IntArray, tier: Tier, now: float) -> FloatArray:
        """Uses, then time."""
        return self._catalog.uses[rows] * _APART + lru_order(self._catalog, rows)


class _WithGhosts(LruLeaf):
    """Common ground: a queue number a row, and ghosts that remember it."""

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(catalog)
        self._ghosts = Ghosts()
        self._queue: ByteArray = np.zeros(len(catalog.parent), np.uint8)

    def _follow_catalog(self) -> None:
        if len(self._queue) < len(self._catalog.parent):
            grown = np.zeros(len(self._catalog.parent), np.uint8)
            grown[: len(self._queue)] = self._queue
            self._queue = grown

    def _new(self, rows: IntArray) -> IntArray:
        """Those that were in no tier before."""
        self._follow_catalog()
        new: IntArray = rows[self._catalog.last_use[rows] == 0.0]
        return new

    def _gone(self, rows: IntArray, tier: Tier) -> IntArray:
        """Those whose last replica leaves; remembered."""
        catalog = self._catalog
        other = catalog.replicas(Tier.NVME if tier == Tier.HOST else Tier.HOST)
        rows = rows[(other.state[rows] == _ABSENT) & (catalog.last_use[rows] > 0.0)]
        if self._ghosts.slots < len(catalog):
            self._ghosts.grow(2 * len(catalog))
        queues = self._queue[rows].astype(np.uint16)
        self._ghosts.put(keys_of(catalog, rows), Remembered(catalog.last_use[rows], queues))
        return rows


class Arc(_WithGhosts):
    """Two LRU queues, of blocks used once and more often; ghost hits move the border (ARC)."""

    name = "arc"

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(catalog)
        self._once_wanted = 0.0
        self._held: FloatArray = np.zeros(2)
        """Blocks in each queue, and of its ghosts since their last shrinking."""
        self._lost: FloatArray = np.ones(2)

    def inserted(self, rows: IntArray, now: float, request: RequestShape = UNKNOWN_REQUEST) -> None:
        """New blocks are used once; what a ghost remembers more often."""
        rows = self._new(rows)
        found, known = self._ghosts.take(keys_of(self._catalog, rows))
        self._queue[rows] = 0
        self._queue[rows[found]] = 1
        for queue in (0, 1):
            hits = int(np.count_nonzero(known.marks == queue))
            step = max(1.0, self._lost[1 - queue] / max(1.0, self._lost[queue]))
            self._once_wanted += hits * step * (1 - 2 * queue)
            self._lost[queue] = max(1.0, self._lost[queue] - hits)
        self._once_wanted = min(max(0.0, self._once_wanted), float(len(self._catalog)))
        self._held += (rows.size - found.size, found.size)
        super().inserted(rows, now, request)

    def touched(self, rows: IntArray, now: float, request: RequestShape = UNKNOWN_REQUEST) -> None:
        """Used again."""
        self._follow_catalog()
        moved = int(np.count_nonzero(self._queue[rows] == 0))
        self._held += (-moved, moved)
        self._queue[rows] = 1
        super().touched(rows, now, request)

    def evicted(self, rows: IntArray, tier: Tier, now: float) -> None:
        """Ghosts of either queue, as many as there are blocks."""
        rows = self._gone(rows, tier)
        counts = np.bincount(self._queue[rows], minlength=2)
        self._held = np.maximum(self._held - counts, 0.0)
        self._lost += counts
        self._lost *= min(1.0, len(self._catalog) / self._lost.sum())

    def scores(self, rows: IntArray, tier: Tier, now: float) -> FloatArray:
        """The queue that has more than its part goes first."""
        first = 0 if self._held[0] > self._once_wanted else 1
        apart: FloatArray = np.where(self._queue[rows] == first, 0.0, _APART)
        return lru_order(self._catalog, rows) + apart


class S3Fifo(_WithGhosts):
    """A small queue (10 %) filters what is used once; in the main one uses buy turns (S3-FIFO).

    Entered the main queue: used twice since it came, or remembered. A use counts there as one turn
    of the queue, three at most, which is what putting it back at the end comes to.
    """

    name = "s3fifo"
    _SMALL_SHARE = 0.1
    _USES_MAX = 3

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(catalog)
        self._entered: FloatArray = np.zeros(len(catalog.parent))
        self._uses: ByteArray = np.zeros(len(catalog.parent), np.uint8)
        self._small = 0
        self._turn_seconds = 0.0

    def _follow_catalog(self) -> None:
        super()._follow_catalog()
        more = len(self._queue) - len(self._entered)
        if more:
            self._entered = np.concatenate((self._entered, np.zeros(more)))
            self._uses = np.concatenate((self._uses, np.zeros(more, np.uint8)))

    def inserted(self, rows: IntArray, now: float, request: RequestShape = UNKNOWN_REQUEST) -> None:
        """New blocks go to the small queue, remembered ones to the main one."""
        rows = self._new(rows)
        found, _ = self._ghosts.take(keys_of(self._catalog, rows))
        self._queue[rows] = 0
        self._queue[rows[found]] = 1
        self._small += rows.size - found.size
        self._entered[rows], self._uses[rows] = now, 0
        super().inserted(rows, now, request)

    def touched(self, rows: IntArray, now: float, request: RequestShape = UNKNOWN_REQUEST) -> None:
        """Counts uses; the second moves a block over."""
        self._follow_catalog()
        self._uses[rows] = np.minimum(self._uses[rows] + 1, self._USES_MAX)
        over = rows[(self._uses[rows] >= 2) & (self._queue[rows] == 0)]
        self._queue[over], self._entered[over], self._uses[over] = 1, now, 0
        self._small -= over.size
        super().touched(rows, now, request)

    def evicted(self, rows: IntArray, tier: Tier, now: float) -> None:
        """Of the small queue ghosts stay."""
        rows = self._gone(rows, tier)
        is_main = self._queue[rows] == 1
        self._small = max(0, self._small - int(np.count_nonzero(~is_main)))
        self._ghosts.take(keys_of(self._catalog, rows[is_main]))
        if np.count_nonzero(is_main):
            turn = float((now - self._entered[rows[is_main]]).mean())
            self._turn_seconds += (turn - self._turn_seconds) / 16

    def scores(self, rows: IntArray, tier: Tier, now: float) -> FloatArray:
        """By time of entry; the small queue first while it has more than its part."""
        main = self._queue[rows] == 1
        turns = np.where(main, self._uses[rows], 0) * self._turn_seconds
        small_first = self._small > self._SMALL_SHARE * len(self._catalog)
        order = self._entered[rows] + turns - self._catalog.depth[rows] * 1e-9
        result: FloatArray = order + np.where(main == small_first, _APART, 0.0)
        return result
