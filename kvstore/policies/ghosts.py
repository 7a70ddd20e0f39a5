"""What is remembered of blocks that left: last use and a mark, by the start of their name.

Primitives: `Ghosts`, a hash table in numpy columns, eight entries to a set; in a full set the entry
used longest ago makes way. `keys_of`, the names it takes. For judgement only: names are cut to 4
bytes, so it is never identity. What a mark says is its owner's affair.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.arrays import is_unique
from kvstore.catalog import Catalog
from kvstore.types import FloatArray, IntArray

WAYS = 8
_SETS_MIN = 64
_UNUSED = -np.inf


class Remembered(NamedTuple):
    """Entries: time of last use float64[n], mark uint16[n]."""

    last_use: FloatArray
    marks: NDArray[np.uint16]


NOTHING = Remembered(np.empty(0), np.empty(0, np.uint16))


def keys_of(catalog: Catalog, rows: IntArray) -> NDArray[np.uint32]:
    """The first 4 bytes of each name."""
    keys: NDArray[np.uint32] = catalog.fingerprints.view(np.uint32)[:, 0][rows]
    return keys


class Ghosts:
    """10 bytes an entry. Times are kept to 24 bits from the first one on: to 1 s in half a year."""

    def __init__(self) -> None:
        self._from: float | None = None
        """Time that `_last_use` counts from."""
        self._allocate(_SETS_MIN)

    def _allocate(self, sets: int) -> None:
        self._keys: NDArray[np.uint32] = np.zeros((sets, WAYS), np.uint32)
        # Unused entries are the oldest of all.
        self._last_use: NDArray[np.float32] = np.full((sets, WAYS), _UNUSED, np.float32)
        self._marks: NDArray[np.uint16] = np.zeros((sets, WAYS), np.uint16)

    @property
    def slots(self) -> int:
        """Entries there is room for."""
        return self._keys.size

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._last_use.nbytes + self._marks.nbytes

    def entries(self, start: int, stop: int) -> Remembered:
        """Those in use among slots [start, stop)."""
        last_use = self._last_use.reshape(-1)[start:stop]
        used = last_use > _UNUSED
        return self._known(last_use[used], self._marks.reshape(-1)[start:stop][used])

    def take(self, keys: NDArray[np.uint32]) -> tuple[IntArray, Remembered]:
        """Positions in `keys` of those remembered, and what is; they are forgotten."""
        sets = self._sets_of(keys)
        at = (self._keys[sets] == keys[:, None]).reshape(-1).nonzero()[0]
        if not at.size:
            return at, NOTHING
        found = at // WAYS
        places = sets[found] * WAYS + at % WAYS
        last_use = self._last_use.take(places)
        if np.count_nonzero(last_use == _UNUSED):
            in_use = last_use > _UNUSED
            found, places, last_use = found[in_use], places[in_use], last_use[in_use]
        known = self._known(last_use, self._marks.take(places))
        self._last_use.put(places, _UNUSED)
        return found, known

    def put(self, keys: NDArray[np.uint32], new: Remembered) -> Remembered:
        """Remember blocks that are not yet; returns what made way."""
        if self._from is None:
            self._from = float(new.last_use.min(initial=0.0))
        sets = self._sets_of(keys)
        last_use = (new.last_use - self._from).astype(np.float32)
        if is_unique(sets):
            return self._replace(sets, keys, last_use, new.marks)
        lost, left = [], np.arange(len(keys))
        while left.size:
            now, left = _one_a_set(left, sets)
            lost.append(self._replace(sets[now], keys[now], last_use[now], new.marks[now]))
        return Remembered(*map(np.concatenate, zip(*lost, strict=True)))

    def grow(self, slots: int) -> Remembered:
        """Room for at least `slots` entries; returns what did not fit."""
        used = self._last_use > _UNUSED
        keys, kept = self._keys[used], self._known(self._last_use[used], self._marks[used])
        self._allocate(-(-slots // WAYS))
        return self.put(keys, kept) if keys.size else kept

    def _sets_of(self, keys: NDArray[np.uint32]) -> IntArray:
        sets: IntArray = (keys % np.uint32(len(self._keys))).astype(np.int64)
        return sets

    def _replace(
        self,
        sets: IntArray,
        keys: NDArray[np.uint32],
        last_use: NDArray[np.float32],
        marks: NDArray[np.uint16],
    ) -> Remembered:
        """The entry used longest ago, in each of `sets`; returns what it was."""
        places = sets * WAYS + self._last_use[sets].argmin(axis=1)
        old, old_marks = self._last_use.take(places), self._marks.take(places)
        self._keys.put(places, keys)
        self._last_use.put(places, last_use)
        self._marks.put(places, marks)
        used = old > _UNUSED
        return self._known(old[used], old_marks[used])

    def _known(self, last_use: NDArray[np.float32], marks: NDArray[np.uint16]) -> Remembered:
        return Remembered(last_use.astype(np.float64) + (self._from or 0.0), marks)


def _one_a_set(left: IntArray, sets: IntArray) -> tuple[IntArray, IntArray]:
    """Positions whose sets differ, and the rest: each is to see what the one before made of it."""
    order = sets[left].argsort(kind="stable")
    ranked = sets[left[order]]
    is_first = np.append(True, ranked[1:] != ranked[:-1])
    return left[order[is_first]], left[order[~is_first]]
