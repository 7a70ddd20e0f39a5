"""What the value policy learns from: uses, noted one by one and digested in batches.

Primitive: `Learner`: `used`, `came`, `left` tell what happened; `hazard` and `shadow` are what was
learnt. The shadow is told at once, the curves of many uses together; every few thousand touches
they are fitted anew to all that is known, at costs as believed by then, in slices of under a
millisecond.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.catalog import Catalog
from kvstore.columns import grown
from kvstore.policies.costs import BlockCosts
from kvstore.policies.ghosts import Ghosts, Remembered, keys_of
from kvstore.policies.hazard import Hazard, Intervals
from kvstore.policies.shadow import Shadow
from kvstore.types import FloatArray, IntArray

USE_CLASSES = 4
_USE_CLASS: IntArray = np.array([0, 1, 2, 2, 3, 3, 3, 3])
"""Class by uses after the first: used once, twice, 3 or 4 times, more often."""
_USES = len(_USE_CLASS)
_ONE_MORE = np.array([1, 2, 3, 4, 5, 6, 7, 7], np.uint16)
SHAPES_MAX = 256
_CLASSES: IntArray = (np.arange(SHAPES_MAX)[:, None] * USE_CLASSES + _USE_CLASS).reshape(-1)
_BATCHES = 8
_BATCH_MAX = 2048
"""Uses are learnt from so many times in a window of the shadow, and this many at once at most."""
_SWEEP = 16384
"""Entries looked at in one go."""
_FIRST_FIT_TOUCHES = 1024
_FIT_TOUCHES = 8192
_FIT_SHARE = 4
"""A fit looks at everything known; it is due after a touch for each so many of that."""
_GHOSTS_A_ROW = 4
_GHOSTS_MORE = 1.25
"""Room for so many more when there is too little."""


def mark(uses: NDArray[np.integer], shape: int) -> NDArray[np.uint16]:
    """What is kept of blocks: uses after the first, up to 7, and the shape of their request."""
    marks: NDArray[np.uint16] = np.minimum(uses, _USES - 1).astype(np.uint16)
    return marks + np.uint16(shape * _USES)


def used_again(marks: NDArray[np.uint16], shape: int) -> NDArray[np.uint16]:
    """Marks after one more use, by a request of this shape."""
    return _ONE_MORE.take(marks & (_USES - 1)) + np.uint16(shape * _USES)


def classes_of(marks: NDArray[np.uint16]) -> IntArray:
    """Class numbers int64[n]: of the uses, USE_CLASSES of them for each shape."""
    return _CLASSES[marks]


class _Note(NamedTuple):
    """Blocks used by one request, as they were before: columns of n."""

    now: float
    held: bool
    marks: NDArray[np.uint16]
    last_use: FloatArray
    """Minus infinity: never."""
    density: NDArray[np.float32]
    length: NDArray[np.uint32]


class Learner:
    """`marks` u16[rows] and `density` f32[rows] (prefill seconds a byte) are kept as long as the
    catalog's columns.
    """

    def __init__(self, catalog: Catalog, costs: BlockCosts, groups: IntArray) -> None:
        self._catalog = catalog
        self._costs = costs
        self._is_repricing = False
        self.hazard = Hazard(groups)
        self.ghosts = Ghosts()
        self.shadow = Shadow()
        self.marks: NDArray[np.uint16] = np.zeros(0, np.uint16)
        self.density: NDArray[np.float32] = np.zeros(0, np.float32)
        self._notes: list[_Note] = []
        self._lost: list[tuple[NDArray[np.uint16], FloatArray]] = []
        """Marks and ages of blocks that are forgotten."""
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
        return tables + self.marks.nbytes + self.density.nbytes

    def follow_catalog(self) -> None:
        """Columns as long as the catalog's."""
        capacity = len(self._catalog.parent)
        if len(self.marks) < capacity:
            end = len(self.marks)
            self.marks = grown(self.marks, capacity, end)
            self.density = grown(self.density, capacity, end)

    def price(self, rows: IntArray) -> None:
        """Their `density`, as costs are believed now."""
        self.density[rows] = self._costs.recompute_seconds(rows) / self._catalog.length[rows]

    def grow(self, groups: IntArray) -> None:
        """More classes."""
        self.hazard.grow(groups)
        self._sweep_at = -1

    # ------------------------------------------------------------ told

    def used(self, rows: IntArray, marks: NDArray[np.uint16], now: float) -> None:
        """Held blocks are used; their `last_use` still tells when they were before."""
        self._note(rows, marks, self._catalog.last_use[rows], now, held=True)

    def came(self, rows: IntArray, marks: NDArray[np.uint16], now: float) -> None:
        """New rows; what a ghost remembers has been used once more, which its mark shows."""
        catalog = self._catalog
        last_use = np.full(rows.size, -np.inf)
        found, known = self.ghosts.take(keys_of(catalog, rows))
        if found.size:
            again = rows[found]
            last_use[found], marks[found] = known.last_use, known.marks
            uses = np.maximum(catalog.uses[again], (known.marks & (_USES - 1)) + 1)
            catalog.uses[again] = uses
            self.marks[again] = self.marks[again] // _USES * _USES + np.minimum(uses, _USES - 1)
        self._note(rows, marks, last_use, now, held=False)

    def left(self, rows: IntArray, now: float) -> None:
        """The last replicas of rows leave; what is known of them stays a while."""
        self._make_room_for_ghosts(now)
        known = Remembered(self._catalog.last_use[rows], self.marks[rows])
        self._forget(self.ghosts.put(keys_of(self._catalog, rows), known), now)

    def _note(
        self,
        rows: IntArray,
        marks: NDArray[np.uint16],
        last_use: FloatArray,
        now: float,
        *,
        held: bool,
    ) -> None:
        density, length = self.density[rows], self._catalog.length[rows]
        self._notes.append(_Note(now, held, marks, last_use, density, length))
        self._waiting += rows.size
        self._touches += rows.size
        if self._waiting >= min(self.shadow.window // _BATCHES, _BATCH_MAX):
            self._learn()
        if self._touches >= self._fit_at:
            self._work(now)

    def _learn(self) -> None:
        if self._notes:
            self._learn_uses(self._notes)
        if self._lost:
            lost, ages = map(np.concatenate, zip(*self._lost, strict=True))
            self.hazard.cut(classes_of(lost), ages)
        self._notes, self._lost, self._waiting = [], [], 0

    def _learn_uses(self, notes: list[_Note]) -> None:
        """By runs: neighbours in a chain are mostly alike, so that a request comes to a few."""
        _, _, *columns = zip(*notes, strict=True)
        marks, last_use, density, length = map(np.concatenate, columns)
        begins = np.cumsum([0, *(note.marks.size for note in notes)])
        is_start = np.ones(marks.size + 1, np.bool_)
        is_start[1:-1] = (last_use[1:] != last_use[:-1]) | (marks[1:] != marks[:-1])
        is_start[begins] = True
        bounds = is_start.nonzero()[0]
        starts, blocks = bounds[:-1], bounds[1:] - bounds[:-1]
        if not starts.size:
            return
        marks, last_use = marks[starts], last_use[starts]
        seconds = np.add.reduceat(density * length.astype(np.float64), starts)
        runs = list(zip(blocks.tolist(), last_use.tolist(), seconds.tolist(), strict=True))
        ends = starts.searchsorted(begins).tolist()
        for note, first, end in zip(notes, ends, ends[1:], strict=False):
            self.shadow.used(runs[first:end], note.now, held=note.held)
        now = np.repeat([note.now for note in notes], np.diff(ends))
        again = last_use > -np.inf
        weights = blocks[again].astype(np.float64)
        self.hazard.closed(classes_of(marks[again]), (now - last_use)[again], weights)

    def _forget(self, lost: Remembered, now: float) -> None:
        """Ghosts that made way: their intervals were seen up to now, without a use."""
        if lost.marks.size:
            self._lost.append((lost.marks, now - lost.last_use))
            self._waiting += lost.marks.size

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
            still_open.add(
                classes_of(self.marks[rows]).astype(np.int64), now - catalog.last_use[rows]
            )
        if stop > end:
            found = self.ghosts.entries(max(0, start - end), stop - end)
            still_open.add(classes_of(found.marks), now - found.last_use)
