"""What the value policy learns from: uses, noted one by one and digested in batches.

Primitive: `Learner`: `used`, `came`, `left` tell what happened; `hazard` and `shadow` are what was
learnt. The shadow is told at once, the curves of many uses together; every few thousand touches
they are fitted anew to all that is known, at costs as believed by then, in slices of under a
millisecond.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.catalog import Catalog
from kvstore.policies.costs import BlockCosts
from kvstore.policies.ghosts import Ghosts, Remembered, keys_of
from kvstore.policies.hazard import Hazard, Intervals
from kvstore.policies.shadow import Shadow
from kvstore.types import FloatArray, IntArray

USE_CLASSES = 4
_USE_CLASS = np.array([0, 1, 2, 2, 3])
"""Class by uses after the first: used once, twice, 3 or 4 times, more often."""
_BATCH = 2048
"""Uses that the curves see at once."""
_SWEEP = 16384
"""Entries looked at in one go."""
_FIRST_FIT_TOUCHES = 1024
_FIT_TOUCHES = 8192
_FIT_SHARE = 4
"""A fit looks at everything known; it is due after a touch for each so many of that."""
_GHOSTS_A_ROW = 4
_GHOSTS_MORE = 1.25
"""Room for so many more when there is too little."""


def use_class(uses: NDArray[np.integer]) -> IntArray:
    """Class of blocks by their uses after the first, int64[n]."""
    found: IntArray = _USE_CLASS[np.minimum(uses, 4)]
    return found


def _renamed(classes: NDArray[np.uint16], uses: NDArray[np.integer]) -> IntArray:
    """The same shapes with other uses."""
    renamed: IntArray = classes.astype(np.int64) // USE_CLASSES * USE_CLASSES + use_class(uses)
    return renamed


class Learner:
    """`classes` u16[rows], the policy's, and `density` f32[rows] (prefill seconds a byte) are kept
    as long as the catalog's columns.
    """

    def __init__(self, catalog: Catalog, costs: BlockCosts, groups: IntArray) -> None:
        self._catalog = catalog
        self._costs = costs
        self._is_repricing = False
        self.hazard = Hazard(groups)
        self.ghosts = Ghosts()
        self.shadow = Shadow()
        self.classes: NDArray[np.uint16] = np.zeros(0, np.uint16)
        self.density: NDArray[np.float32] = np.zeros(0, np.float32)
        self._unlearnt: list[tuple[IntArray, FloatArray]] = []
        """Classes and ages of blocks that were used."""
        self._lost: list[tuple[IntArray, FloatArray]] = []
        """The same of blocks that are forgotten."""
        self._waiting = 0
        self._touches = 0
        self._fit_at = _FIRST_FIT_TOUCHES
        self._sweep_at = -1
        self._still_open: Intervals | None = None
        self.follow_catalog()

    @property
    def nbytes(self) -> int:
        open_now = 0 if self._still_open is None else self._still_open.nbytes
        tables = self.hazard.nbytes + self.ghosts.nbytes + open_now
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

    def price(self, rows: IntArray) -> None:
        """Their `density`, as costs are believed now."""
        self.density[rows] = self._costs.recompute_seconds(rows) / self._costs.bytes(rows)

    def grow(self, groups: IntArray) -> None:
        """More classes."""
        self.hazard.grow(groups)
        self._sweep_at = -1

    # ------------------------------------------------------------ told

    def used(
        self, last_use: FloatArray, classes: IntArray, seconds: FloatArray, now: float
    ) -> None:
        """Held blocks were used: when before, their class then, the prefill seconds saved."""
        self.shadow.used(last_use, seconds, now, held=True)
        self._note(self._unlearnt, classes, now - last_use)
        self._went_on(last_use.size, now)

    def came(self, rows: IntArray, now: float) -> None:
        """New rows; what a ghost remembers has been used once more, which its class shows."""
        catalog = self._catalog
        found, known = self.ghosts.take(keys_of(catalog, rows))
        self.shadow.came(rows.size - found.size, now)
        if found.size:
            again = rows[found]
            catalog.uses[again] = np.maximum(catalog.uses[again], known.uses + 1)
            self.classes[again] = _renamed(self.classes[again], catalog.uses[again])
            seconds = self.density[again].astype(np.float64) * catalog.length[again]
            self.shadow.used(known.last_use, seconds, now, held=False)
            classes: IntArray = use_class(known.uses) + USE_CLASSES * known.shapes
            self._note(self._unlearnt, classes, now - known.last_use)
        self._went_on(rows.size, now)

    def left(self, rows: IntArray, now: float) -> None:
        """The last replicas of rows leave; what is known of them stays a while."""
        catalog = self._catalog
        self._make_room_for_ghosts(now)
        shapes = self.classes[rows].astype(np.int64) // USE_CLASSES
        known = Remembered(catalog.last_use[rows], catalog.uses[rows].astype(np.int64), shapes)
        self._forget(self.ghosts.put(keys_of(catalog, rows), known), now)

    def _note(
        self, notes: list[tuple[IntArray, FloatArray]], classes: IntArray, ages: FloatArray
    ) -> None:
        notes.append((classes, ages))
        self._waiting += ages.size
        if self._waiting >= _BATCH:
            self._learn()

    def _went_on(self, touches: int, now: float) -> None:
        self._touches += touches
        if self._touches >= self._fit_at:
            self._work(now)

    def _learn(self) -> None:
        for notes, learn in ((self._unlearnt, self.hazard.closed), (self._lost, self.hazard.cut)):
            if notes:
                classes, ages = map(np.concatenate, zip(*notes, strict=True))
                learn(classes, ages)
                notes.clear()
        self._waiting = 0

    def _forget(self, lost: Remembered, now: float) -> None:
        """Ghosts that made way: their intervals were seen up to now, without a use."""
        if lost.uses.size:
            classes = use_class(lost.uses) + USE_CLASSES * lost.shapes
            self._note(self._lost, classes, now - lost.last_use)

    def _make_room_for_ghosts(self, now: float) -> None:
        wanted = _GHOSTS_A_ROW * len(self._catalog)
        if self.ghosts.slots < wanted:
            self._sweep_at = -1
            self._forget(self.ghosts.grow(int(wanted * _GHOSTS_MORE)), now)

    # ------------------------------------------------------------ fitting, in slices

    def _work(self, now: float) -> None:
        """A slice of the fit that is due."""
        if self._still_open is None or self._sweep_at < 0:
            self._still_open = Intervals(self.hazard.classes)
            self._sweep_at = 0
            self._is_repricing = self._costs.refresh()
        self._sweep(self._still_open, now)
        if self._sweep_at < self._catalog.rows_end + self.ghosts.slots:
            return
        self._learn()
        self.hazard.fit(self._still_open)
        # Soon again in the beginning.
        self._fit_at += min(self._touches, max(_FIT_TOUCHES, self._sweep_at // _FIT_SHARE))
        self._sweep_at, self._still_open = -1, None

    def _sweep(self, still_open: Intervals, now: float) -> None:
        """The open intervals of the next entries: rows first, then ghosts."""
        catalog, end = self._catalog, self._catalog.rows_end
        start, stop = self._sweep_at, self._sweep_at + _SWEEP
        self._sweep_at = stop
        if start < end:
            rows = np.arange(start, min(stop, end))
            rows = rows[catalog.parent[rows] >= -1]
            if self._is_repricing:
                self.price(rows)
            rows = rows[catalog.last_use[rows] > 0.0]
            classes = self.classes[rows].astype(np.int64)
            still_open.add(classes, now - catalog.last_use[rows])
        if stop > end:
            found = self.ghosts.entries(max(0, start - end), stop - end)
            classes = use_class(found.uses) + USE_CLASSES * found.shapes
            still_open.add(classes, now - found.last_use)
