"""What is remembered of blocks that left: last use, uses and shape, by the start of their name.

Primitive: `Ghosts`, a hash table in numpy columns, eight entries to a set; in a full set the entry
used longest ago makes way. For judgement only: names are cut to 8 bytes, so it is never identity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


class Ghosts:
    """18 bytes an entry."""

    def __init__(self) -> None:
        self._allocate(_SETS_MIN)

    def _allocate(self, sets: int) -> None:
        self._keys: NDArray[np.uint64] = np.zeros((sets, WAYS), np.uint64)
        # Unused entries are the oldest of all.
        self._last_use: FloatArray = np.full((sets, WAYS), -np.inf)
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
        window = slice(start, stop)
        used = self._last_use.reshape(-1)[window] > -np.inf
        return Remembered(
            self._last_use.reshape(-1)[window][used],
            self._uses.reshape(-1)[window][used].astype(np.int64),
            self._shapes.reshape(-1)[window][used].astype(np.int64),
        )

    def take(self, keys: NDArray[np.uint64]) -> tuple[IntArray, Remembered]:
        """Positions in `keys` of those remembered, and what is; they are forgotten."""
        sets = (keys % np.uint64(len(self._keys))).astype(np.int64)
        same = (self._keys[sets] == keys[:, None]) & (self._last_use[sets] > -np.inf)
        found, ways = same.nonzero()
        at = (sets[found], ways)
        known = Remembered(
            self._last_use[at], self._uses[at].astype(np.int64), self._shapes[at].astype(np.int64)
        )
        self._last_use[at] = -np.inf
        return found, known

    def put(self, keys: NDArray[np.uint64], new: Remembered) -> Remembered:
        """Remember blocks that are not yet; returns what made way."""
        sets = (keys % np.uint64(len(self._keys))).astype(np.int64)
        lost: list[Remembered] = []
        left = np.arange(len(keys))
        while left.size:
            # One a set and round, so that each sees what the one before made of it.
            order = sets[left].argsort(kind="stable")
            is_first = np.ones(order.size, np.bool_)
            np.not_equal(sets[left[order[1:]]], sets[left[order[:-1]]], out=is_first[1:])
            now = left[order[is_first]]
            at = (sets[now], self._last_use[sets[now]].argmin(axis=1))
            old = self._last_use[at] > -np.inf
            if np.count_nonzero(old):
                gone = (at[0][old], at[1][old])
                lost.append(
                    Remembered(
                        self._last_use[gone],
                        self._uses[gone].astype(np.int64),
                        self._shapes[gone].astype(np.int64),
                    )
                )
            self._keys[at] = keys[now]
            self._last_use[at] = new.last_use[now]
            self._uses[at] = np.minimum(new.uses[now], USES_MAX)
            self._shapes[at] = new.shapes[now]
            left = left[order[~is_first]]
        return joined(lost)

    def grow(self, slots: int) -> Remembered:
        """Room for at least `slots` entries; returns what did not fit."""
        used = self._last_use > -np.inf
        keys = self._keys[used]
        kept = Remembered(
            self._last_use[used],
            self._uses[used].astype(np.int64),
            self._shapes[used].astype(np.int64),
        )
        self._allocate(-(-slots // WAYS))
        return self.put(keys, kept)


def joined(pieces: list[Remembered]) -> Remembered:
    """One after the other."""
    if not pieces:
        return Remembered(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))
    return Remembered(
        np.concatenate([piece.last_use for piece in pieces]),
        np.concatenate([piece.uses for piece in pieces]),
        np.concatenate([piece.shapes for piece in pieces]),
    )
