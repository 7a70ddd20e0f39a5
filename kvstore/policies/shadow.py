"""What the least-recently-used order would have saved, from metadata alone, and who decides.

Primitive: `Shadow`. A cache under LRU holds the blocks used last, as many as it has room for; so
whether it would hold a block follows from the block's last use and from the *frontier*: the time
since which just so many different blocks were used. Blocks used since are counted by epochs of
1/64 of the room; nothing is kept a block.

State: the value order decides, until LRU would have saved more by 5 % over a whole window (as many
touches as four times the room, at least 2,048): a guard against workloads it reads wrongly, not a
referee of small differences, since a change of order costs something too. Then LRU's order decides
for 1, 2, 4 … 64 windows before the value order is tried again; a window it wins halves that number.
So what it can lose to LRU is one window, and then ever rarer ones.
"""

from __future__ import annotations

import numpy as np

from kvstore.types import BoolArray, FloatArray

_EPOCHS = 64
_EPOCHS_MAX = 2 * _EPOCHS
_MARGIN = 0.05
_WINDOW_ROOMS = 4
_WINDOW_MIN = 2048
_PENALTY_MAX = 64


class Shadow:
    """Counts a cache of `room` blocks under LRU."""

    def __init__(self) -> None:
        self.room = np.inf
        """Blocks the real cache holds; infinite while nothing had to leave."""
        self.is_leading = False
        """LRU's order decides."""
        self._starts: FloatArray = np.zeros(1)
        self._counts: FloatArray = np.zeros(1)
        self._penalty = 1
        self._serving = 0
        self._seen = 0
        self._ahead = 0.0
        """Seconds the real cache saved in this window beyond what LRU would have."""
        self._saved = 0.0

    def holds(self, last_use: FloatArray) -> BoolArray:
        """Whether LRU would still hold blocks used last at these times, bool[n]."""
        held: BoolArray = last_use >= self._starts[0]
        return held

    def moved(self, last_use: FloatArray, new: int, now: float) -> None:
        """Blocks last used at `last_use` were used now, and `new` others for the first time."""
        at = self._starts.searchsorted(last_use, side="right") - 1
        at = at[at >= 0]
        if at.size:
            self._counts -= np.bincount(at, minlength=self._counts.size)
        self._counts[-1] += len(last_use) + new
        self._seen += len(last_use) + new
        self._advance(now)

    def _advance(self, now: float) -> None:
        room = min(self.room, 8.0 * self._counts.sum())
        most = max(8.0, room / _EPOCHS)
        if self._counts[-1] >= most and now > self._starts[-1]:
            # What comes at a later time than now belongs to the next one.
            self._starts = np.append(self._starts, np.nextafter(now, np.inf))
            self._counts = np.append(self._counts, 0.0)
        total = self._counts.sum()
        drop = 0
        while drop < self._counts.size - 1 and total - self._counts[drop] / 2 >= room:
            total -= self._counts[drop]
            drop += 1
        if drop:
            self._starts, self._counts = self._starts[drop:], self._counts[drop:]
        if self._counts.size > _EPOCHS_MAX:
            self._merge()

    def _merge(self) -> None:
        """Older epochs, many of whose blocks were used since, two and two together."""
        half = self._counts.size // 4 * 2
        pairs = self._counts[:half].reshape(-1, 2).sum(axis=1)
        self._starts = np.concatenate((self._starts[:half:2], self._starts[half:]))
        self._counts = np.concatenate((pairs, self._counts[half:]))

    def judge(self, ours: float, theirs: float, both: float) -> None:
        """Seconds saved by blocks only we held, only LRU would have held, and both."""
        self._ahead += ours - theirs
        self._saved += theirs + both
        if self._seen < max(_WINDOW_MIN, _WINDOW_ROOMS * min(self.room, 1 << 40)):
            return
        lost = self._ahead < -_MARGIN * self._saved
        if self.is_leading:
            self._serving -= 1
            self.is_leading = self._serving > 0
        elif lost:
            self.is_leading, self._serving = True, self._penalty
            self._penalty = min(_PENALTY_MAX, 2 * self._penalty)
        else:
            self._penalty = max(1, self._penalty // 2)
        self._seen, self._ahead, self._saved = 0, 0.0, 0.0
