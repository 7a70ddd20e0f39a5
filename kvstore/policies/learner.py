"""What the value policy learns from: uses and departures, noted one by one, digested in batches.

Primitive: `Learner`: `used`, `came`, `left` note what happened; `hazard` and `shadow` are what was
learnt. A note costs a few array writes; ghosts, curves and the shadow see a batch of them at once,
which is a tenth of the work. Every few thousand touches the curves are fitted anew to all that is
known, in slices of under a millisecond.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.catalog import Catalog
from kvstore.policies.ghosts import Ghosts, Remembered, joined
from kvstore.policies.hazard import Hazard, Intervals
from kvstore.policies.shadow import Shadow
from kvstore.types import FloatArray, IntArray

USE_CLASSES = 4
_USE_CLASS = np.array([0, 1, 2, 2, 3])
"""Class by uses after the first: used once, twice, 3 or 4 times, more often."""
_BATCH = 512
_SWEEP = 16384
"""Entries looked at in one go."""
_FIT_TOUCHES_MIN = 1024
_FIT_SHARE = 8
"""A fit looks at everything known; it is due after a touch for each so many of that."""
_GHOSTS_A_ROW = 1.5


def use_class(uses: NDArray[np.integer]) -> IntArray:
    """Class of blocks by their uses after the first, int64[n]."""
    found: IntArray = _USE_CLASS[np.minimum(uses, 4)]
    return found


def keys_of(catalog: Catalog, rows: IntArray) -> NDArray[np.uint64]:
    """The first 8 bytes of each name."""
    keys: NDArray[np.uint64] = catalog.fingerprints[rows, :8].copy().view(np.uint64)[:, 0]
    return keys


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
        self._uses: list[tuple[FloatArray, IntArray, FloatArray, float]] = []
        self._arrivals: list[tuple[IntArray, NDArray[np.uint64], float]] = []
        self._departures: list[tuple[NDArray[np.uint64], Remembered]] = []
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

    # ------------------------------------------------------------ noted

    def used(
        self, last_use: FloatArray, classes: IntArray, seconds: FloatArray, now: float
    ) -> None:
        """Held blocks were used: when before, their class then, the prefill seconds saved."""
        self._uses.append((last_use, classes, seconds, now))
        self._note(last_use.size, now)

    def came(self, rows: IntArray, now: float) -> None:
        """Rows are new; whether they were here before turns out later."""
        self._arrivals.append((rows, keys_of(self._catalog, rows), now))
        self._note(rows.size, now)

    def left(self, rows: IntArray, now: float) -> None:
        """The last replicas of rows leave."""
        catalog = self._catalog
        known = Remembered(
            catalog.last_use[rows],
            catalog.uses[rows].astype(np.int64),
            self.classes[rows].astype(np.int64) // USE_CLASSES,
        )
        self._departures.append((keys_of(catalog, rows), known))
        self._note(0, now)

    def _note(self, touches: int, now: float) -> None:
        self._noted += 1 + touches
        self._touches_until_fit -= touches
        if self._noted >= _BATCH:
            self.digest(now)

    # ------------------------------------------------------------ digested

    def digest(self, now: float) -> None:
        """Learn from what was noted; departures first, as a block may have come back since."""
        self._noted = 0
        departures, self._departures = self._departures, []
        if departures:
            self._make_room_for_ghosts(now)
            keys = np.concatenate([keys for keys, _ in departures])
            known = joined([known for _, known in departures])
            self._forget(self.ghosts.put(keys, known), now)
        self._digest_uses()
        self._digest_arrivals()
        if self._touches_until_fit <= 0:
            self._work(now)

    def _digest_uses(self) -> None:
        uses, self._uses = self._uses, []
        if not uses:
            return
        last_use, classes, seconds = (
            np.concatenate([noted[column] for noted in uses]) for column in range(3)
        )
        now = np.repeat([noted[3] for noted in uses], [noted[0].size for noted in uses])
        self.hazard.closed.add(classes, now - last_use)
        held = self.shadow.holds(last_use)
        total, both = float(seconds.sum()), float(seconds[held].sum())
        self.shadow.judge(total - both, 0.0, both)
        self.shadow.moved(last_use, 0, uses[-1][3])

    def _digest_arrivals(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        if not arrivals:
            return
        catalog = self._catalog
        rows = np.concatenate([noted[0] for noted in arrivals])
        keys = np.concatenate([noted[1] for noted in arrivals])
        now = np.repeat([noted[2] for noted in arrivals], [noted[0].size for noted in arrivals])
        stays = keys_of(catalog, rows) == keys
        found, known = self.ghosts.take(keys)
        self.shadow.moved(known.last_use, rows.size - found.size, arrivals[-1][2])
        classes = use_class(known.uses) + USE_CLASSES * known.shapes
        self.hazard.closed.add(classes, now[found] - known.last_use)
        again, uses = rows[found][stays[found]], known.uses[stays[found]] + 1
        catalog.uses[again] = np.maximum(catalog.uses[again], uses)
        shapes = self.classes[again] // USE_CLASSES
        self.classes[again] = use_class(catalog.uses[again]) + USE_CLASSES * shapes
        was_held = self.shadow.holds(known.last_use)
        lost = self.density[rows[found]] * catalog.length[rows[found]].astype(np.float64)
        self.shadow.judge(0.0, float(lost[was_held].sum()), 0.0)

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
