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
        self._sets = sets
        # Set after set. Unused entries are the oldest of all.
        self._keys: NDArray[np.uint32] = np.zeros(sets * WAYS, np.uint32)
        self._last_use: NDArray[np.float32] = np.full(sets * WAYS, _UNUSED, np.float32)
        self._marks: NDArray[np.uint16] = np.zeros(sets * WAYS, np.uint16)

    @property
    def slots(self) -> int:
        """Entries there is room for."""
        return self._sets * WAYS

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._last_use.nbytes + self._marks.nbytes

    def entries(self, start: int, stop: int) -> Remembered:
        """Those in use among slots [start, stop)."""
        return self._in_use(self._last_use[start:stop], self._marks[start:stop])

    def take(self, keys: NDArray[np.uint32]) -> tuple[IntArray, Remembered]:
        """Positions in `keys` of those remembered, and what is; they are forgotten."""
        firsts = self._firsts_of(keys)
        at = (
            (self._keys.reshape(-1, WAYS)[firsts // WAYS] == keys[:, None]).reshape(-1).nonzero()[0]
        )
        if not at.size:
            return at, NOTHING
        found = at // WAYS
        places = firsts[found] + at % WAYS
        used = self._last_use[places] > _UNUSED
        found, places = found[used], places[used]
        known = self._in_use(self._last_use[places], self._marks[places])
        self._last_use[places] = _UNUSED
        return found, known

    def put(self, keys: NDArray[np.uint32], new: Remembered) -> Remembered:
        """Remember blocks that are not yet; returns what made way."""
        if self._from is None:
            self._from = float(new.last_use.min(initial=0.0))
        firsts = self._firsts_of(keys)
        last_use = (new.last_use - self._from).astype(np.float32)
        if is_unique(firsts):
            return self._replace(firsts, keys, last_use, new.marks)
        lost, left = [], np.arange(len(keys))
        while left.size:
            now, left = _one_a_set(left, firsts)
            lost.append(self._replace(firsts[now], keys[now], last_use[now], new.marks[now]))
        return Remembered(*map(np.concatenate, zip(*lost, strict=True)))

    def grow(self, slots: int) -> Remembered:
        """Room for at least `slots` entries; returns what did not fit."""
        keys, kept = self._keys[self._last_use > _UNUSED], self.entries(0, self.slots)
        self._allocate(-(-slots // WAYS))
        return self.put(keys, kept) if keys.size else kept

    def _firsts_of(self, keys: NDArray[np.uint32]) -> IntArray:
        """Where each key's set begins."""
        firsts: IntArray = (keys % np.uint32(self._sets)).astype(np.int64)
        firsts *= WAYS
        return firsts

    def _replace(
        self,
        firsts: IntArray,
        keys: NDArray[np.uint32],
        last_use: NDArray[np.float32],
        marks: NDArray[np.uint16],
    ) -> Remembered:
        """The entry used longest ago, in each of these sets; returns what it was."""
        places = firsts + self._last_use.reshape(-1, WAYS)[firsts // WAYS].argmin(axis=1)
        old = self._in_use(self._last_use[places], self._marks[places])
        self._keys[places], self._last_use[places], self._marks[places] = keys, last_use, marks
        return old

    def _in_use(self, last_use: NDArray[np.float32], marks: NDArray[np.uint16]) -> Remembered:
        used = last_use > _UNUSED
        if np.count_nonzero(used) < used.size:
            last_use, marks = last_use[used], marks[used]
        return Remembered(last_use + np.float64(self._from or 0.0), marks)


def _one_a_set(left: IntArray, sets: IntArray) -> tuple[IntArray, IntArray]:
    """Positions whose sets differ, and the rest: each is to see what the one before made of it."""
    order = sets[left].argsort(kind="stable")
    ranked = sets[left[order]]
    is_first = np.append(True, ranked[1:] != ranked[:-1])
    return left[order[is_first]], left[order[~is_first]]
