"""What is remembered of blocks that left: last use, uses and shape, by the start of their name.

Primitives: `Ghosts`, a hash table in numpy columns, eight entries to a set; in a full set the entry
used longest ago makes way. `keys_of`, the names it takes. For judgement only: names are cut to 4
bytes, so it is never identity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.catalog import Catalog
from kvstore.types import ByteArray, FloatArray, IntArray

WAYS = 8
_SETS_MIN = 64
USES_MAX = 255


@dataclass(frozen=True, eq=False)
class Remembered:
    """Entries: time of last use float64[n], uses int64[n] (at most 255), shape int64[n]."""

    last_use: FloatArray
    uses: IntArray
    shapes: IntArray


NOTHING = Remembered(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))


def keys_of(catalog: Catalog, rows: IntArray) -> NDArray[np.uint32]:
    """The first 4 bytes of each name."""
    keys: NDArray[np.uint32] = catalog.fingerprints[rows, :4].copy().view(np.uint32)[:, 0]
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
        self._last_use: NDArray[np.float32] = np.full((sets, WAYS), -np.inf, np.float32)
        self._uses: ByteArray = np.zeros((sets, WAYS), np.uint8)
        self._shapes: ByteArray = np.zeros((sets, WAYS), np.uint8)

    @property
    def slots(self) -> int:
        """Entries there is room for."""
        return self._keys.size

    @property
    def nbytes(self) -> int:
        columns = (self._keys, self._last_use, self._uses, self._shapes)
        return sum(column.nbytes for column in columns)

    def entries(self, start: int, stop: int) -> Remembered:
        """Those in use among slots [start, stop)."""
        window = np.arange(start, min(stop, self.slots))
        at = (window // WAYS, window % WAYS)
        used = self._last_use[at] > -np.inf
        return self._read((at[0][used], at[1][used]))

    def take(self, keys: NDArray[np.uint32]) -> tuple[IntArray, Remembered]:
        """Positions in `keys` of those remembered, and what is; they are forgotten."""
        sets = self._sets_of(keys)
        found, ways = (self._keys[sets] == keys[:, None]).nonzero()
        if not found.size:
            return found, NOTHING
        in_use = self._last_use[sets[found], ways] > -np.inf
        found, ways = found[in_use], ways[in_use]
        at = (sets[found], ways)
        known = self._read(at)
        self._last_use[at] = -np.inf
        return found, known

    def put(self, keys: NDArray[np.uint32], new: Remembered) -> Remembered:
        """Remember blocks that are not yet; returns what made way."""
        if self._from is None:
            self._from = float(new.last_use.min(initial=0.0))
        sets = self._sets_of(keys)
        lost: list[Remembered] = []
        left = np.arange(len(keys))
        while left.size:
            now, left = _one_a_set(left, sets)
            at = (sets[now], self._last_use[sets[now]].argmin(axis=1))
            old = self._last_use[at] > -np.inf
            if np.count_nonzero(old):
                lost.append(self._read((at[0][old], at[1][old])))
            self._keys[at] = keys[now]
            self._last_use[at] = new.last_use[now] - self._from
            self._uses[at] = np.minimum(new.uses[now], USES_MAX)
            self._shapes[at] = new.shapes[now]
        return joined(lost)

    def grow(self, slots: int) -> Remembered:
        """Room for at least `slots` entries; returns what did not fit."""
        sets, ways = (self._last_use > -np.inf).nonzero()
        keys, kept = self._keys[sets, ways], self._read((sets, ways))
        self._allocate(-(-slots // WAYS))
        return self.put(keys, kept)

    def _sets_of(self, keys: NDArray[np.uint32]) -> IntArray:
        sets: IntArray = keys.astype(np.int64) % len(self._keys)
        return sets

    def _read(self, at: tuple[IntArray, IntArray]) -> Remembered:
        last_use = self._last_use[at].astype(np.float64)
        if self._from is not None:
            last_use += self._from
        return Remembered(
            last_use, self._uses[at].astype(np.int64), self._shapes[at].astype(np.int64)
        )


def _one_a_set(left: IntArray, sets: IntArray) -> tuple[IntArray, IntArray]:
    """Positions whose sets differ, and the rest: each is to see what the one before made of it."""
    order = sets[left].argsort(kind="stable")
    ranked = sets[left[order]]
    is_same = ranked[1:] == ranked[:-1]
    if not np.count_nonzero(is_same):
        return left, left[:0]
    is_first = np.append(True, ~is_same)
    return left[order[is_first]], left[order[~is_first]]


def joined(pieces: list[Remembered]) -> Remembered:
    """One after the other."""
    if len(pieces) == 1:
        return pieces[0]
    if not pieces:
        return NOTHING
    return Remembered(
        np.concatenate([piece.last_use for piece in pieces]),
        np.concatenate([piece.uses for piece in pieces]),
        np.concatenate([piece.shapes for piece in pieces]),
    )
