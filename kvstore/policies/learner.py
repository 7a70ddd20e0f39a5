"""What the value policy learns from: uses, noted one by one and digested in batches.

Primitive: `Learner`: `used`, `came`, `left` tell what happened; `hazard` and `shadow` are what was
learnt. A note costs a few array operations; curves and shadow see some hundred of them at once.
Every few thousand touches the curves are fitted anew to all that is known, in slices of under a
millisecond.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.catalog import Catalog
from kvstore.policies.ghosts import Ghosts, Remembered
from kvstore.policies.hazard import Hazard, Intervals
from kvstore.policies.shadow import Shadow
from kvstore.types import FloatArray, IntArray

USE_CLASSES = 4
_USE_CLASS = np.array([0, 1, 2, 2, 3])
"""Class by uses after the first: used once, twice, 3 or 4 times, more often."""
_BATCH = 512
_BATCHES_A_ROOM = 128
_SWEEP = 16384
"""Entries looked at in one go."""
_FIT_TOUCHES_MIN = 1024
_FIT_SHARE = 8
"""A fit looks at everything known; it is due after a touch for each so many of that."""
_GHOSTS_A_ROW = 1.5


_Uses: TypeAlias = tuple[FloatArray, IntArray, FloatArray, float]
"""Times of the uses before, classes, prefill seconds; the time of these uses."""


def use_class(uses: NDArray[np.integer]) -> IntArray:
    """Class of blocks by their uses after the first, int64[n]."""
    found: IntArray = _USE_CLASS[np.minimum(uses, 4)]
    return found


def keys_of(catalog: Catalog, rows: IntArray) -> NDArray[np.uint64]:
    """The first 8 bytes of each name."""
    keys: NDArray[np.uint64] = catalog.fingerprints[rows, :8].copy().view(np.uint64)[:, 0]
    return keys


def _renamed(classes: NDArray[np.uint16], uses: NDArray[np.integer]) -> IntArray:
    """The same shapes with other uses."""
    renamed: IntArray = classes.astype(np.int64) // USE_CLASSES * USE_CLASSES + use_class(uses)
    return renamed


def _joined(uses: list[_Uses]) -> tuple[FloatArray, IntArray, FloatArray, FloatArray]:
    """Last uses, classes, seconds and times of all, one entry a block."""
    if not uses:
        return np.empty(0), np.empty(0, np.int64), np.empty(0), np.empty(0)
    last_use, classes, seconds, times = zip(*uses, strict=True)
    counts = [each.size for each in last_use]
    return (
        np.concatenate(last_use),
        np.concatenate(classes),
        np.concatenate(seconds),
        np.repeat(times, counts),
    )


class Learner:
    """`classes` u16[rows] and `density` f32[rows] (prefill seconds a byte) are the policy's, kept
    as long as the catalog's columns.
    """

    def __init__(self, catalog: Catalog, groups: IntArray) -> None:
        self._catalog = catalog
        self.hazard = Hazard(groups)
        self.ghosts = Ghosts()
        self.shadow = Shadow()
        self.classes: NDArray[np.uint16] = np.zeros(0, np.uint16)
        self.density: NDArray[np.float32] = np.zeros(0, np.float32)
        self._hits: list[_Uses] = []
        self._returns: list[_Uses] = []
        self._new = 0
        self._noted = 0
        self._touches_until_fit = _FIT_TOUCHES_MIN
        self._sweep_at = -1
        self._still_open = Intervals(0)
        self.fits = 0
        self.follow_catalog()

    @property
    def nbytes(self) -> int:
        tables = self.hazard.nbytes + self.ghosts.nbytes + self._still_open.nbytes
        return tables + self.classes.nbytes + self.density.nbytes

    def follow_catalog(self) -> None:
        """Columns as long as the catalog's."""
        capacity = len(self._catalog.parent)
        if len(self.classes) < capacity:
            classes, density = self.classes, self.density
            self.classes = np.zeros(capacity, np.uint16)
            self.density = np.zeros(capacity, np.float32)
            self.classes[: len(classes)] = classes
            self.density[: len(density)] = density

    def grow(self, groups: IntArray) -> None:
        """More classes."""
        self.hazard.grow(groups)
        self._sweep_at = -1

    # ------------------------------------------------------------ told

    def used(
        self, last_use: FloatArray, classes: IntArray, seconds: FloatArray, now: float
    ) -> None:
        """Held blocks were used: when before, their class then, the prefill seconds saved."""
        self._hits.append((last_use, classes, seconds, now))
        self._note(last_use.size, now)

    def came(self, rows: IntArray, now: float) -> None:
        """New rows; what a ghost remembers has been used once more, which its class shows."""
        catalog = self._catalog
        found, known = self.ghosts.take(keys_of(catalog, rows))
        self._new += rows.size - found.size
        if found.size:
            again = rows[found]
            catalog.uses[again] = np.maximum(catalog.uses[again], known.uses + 1)
            self.classes[again] = _renamed(self.classes[again], catalog.uses[again])
            seconds = self.density[again].astype(np.float64) * catalog.length[again]
            classes: IntArray = use_class(known.uses) + USE_CLASSES * known.shapes
            self._returns.append((known.last_use, classes, seconds, now))
        self._note(rows.size, now)

    def left(self, rows: IntArray, now: float) -> None:
        """The last replicas of rows leave; what is known of them stays a while."""
        catalog = self._catalog
        self._make_room_for_ghosts(now)
        shapes = self.classes[rows].astype(np.int64) // USE_CLASSES
        known = Remembered(catalog.last_use[rows], catalog.uses[rows].astype(np.int64), shapes)
        self._forget(self.ghosts.put(keys_of(catalog, rows), known), now)

    def _note(self, touches: int, now: float) -> None:
        self._noted += touches
        self._touches_until_fit -= touches
        # The shadow's frontier stands still within a batch: that must be little of its room.
        if self._noted >= min(_BATCH, self.shadow.room / _BATCHES_A_ROOM):
            self._noted = 0
            self._digest(now)

    # ------------------------------------------------------------ digested

    def _digest(self, now: float) -> None:
        """Learn from the uses noted since the last time."""
        hits, returns = _joined(self._hits), _joined(self._returns)
        held, was_held = self.shadow.holds(hits[0]), self.shadow.holds(returns[0])
        both = float(hits[2][held].sum())
        self.shadow.judge(float(hits[2].sum()) - both, float(returns[2][was_held].sum()), both)
        for last_use, classes, _, times in (hits, returns):
            self.hazard.closed.add(classes, times - last_use)
        self.shadow.moved(np.concatenate((hits[0], returns[0])), self._new, now)
        self._hits, self._returns, self._new = [], [], 0
        if self._touches_until_fit <= 0:
            self._work(now)

    def _forget(self, lost: Remembered, now: float) -> None:
        """Ghosts that made way: their intervals were seen up to now, without a use."""
        if lost.uses.size:
            classes = use_class(lost.uses) + USE_CLASSES * lost.shapes
            self.hazard.cut.add(classes, now - lost.last_use)

    def _make_room_for_ghosts(self, now: float) -> None:
        wanted = _GHOSTS_A_ROW * len(self._catalog)
        if self.ghosts.slots < wanted:
            self._sweep_at = -1
            self._forget(self.ghosts.grow(int(wanted * 1.5)), now)

    # ------------------------------------------------------------ fitting, in slices

    def _work(self, now: float) -> None:
        """A slice of the fit that is due."""
        if self._sweep_at < 0:
            self._still_open = Intervals(self.hazard.classes)
            self._sweep_at = 0
        self._sweep(now)
        if self._sweep_at < self._catalog.rows_end + self.ghosts.slots:
            return
        self.hazard.fit(self._still_open)
        self._touches_until_fit = max(_FIT_TOUCHES_MIN, self._sweep_at // _FIT_SHARE)
        self._sweep_at = -1
        self.fits += 1

    def _sweep(self, now: float) -> None:
        """The open intervals of the next entries: rows first, then ghosts."""
        catalog, end = self._catalog, self._catalog.rows_end
        start, stop = self._sweep_at, self._sweep_at + _SWEEP
        self._sweep_at = stop
        if start < end:
            rows = np.arange(start, min(stop, end))
            rows = rows[(catalog.last_use[rows] > 0.0) & (catalog.parent[rows] >= -1)]
            classes = self.classes[rows].astype(np.int64)
            self._still_open.add(classes, now - catalog.last_use[rows])
        if stop > end:
            found = self.ghosts.entries(max(0, start - end), stop - end)
            classes = use_class(found.uses) + USE_CLASSES * found.shapes
            self._still_open.add(classes, now - found.last_use)
