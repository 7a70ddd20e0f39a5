"""What the least-recently-used order would have saved, from metadata alone, and who decides.

Primitive: `Shadow`. A cache under LRU holds the blocks used last, as many as it has room for; so
whether it would hold a block follows from the block's last use and from the *frontier*: the time
since which just so many different blocks were used. Blocks used since are counted by epochs of
1/64 of the room; nothing is kept a block.

A *window* is as many touches as the room has blocks (at least 2,048): in less LRU cannot have
changed all it holds. The value order decides until it has lost to LRU what LRU saves in a window;
what it won earlier makes up for losses, up to as much again. So no constant says what is a loss
worth minding: one window is what it may cost. Then LRU's order decides for 1, 2, 4 … 64 windows
before the value order is tried again; a window that this wins halves the number.
"""

from __future__ import annotations

import numpy as np

from kvstore.types import FloatArray

_EPOCHS = 64
_EPOCHS_MAX = 2 * _EPOCHS
_WINDOW_MIN = 2048
_WINDOWS_REMEMBERED = 8
"""What LRU saves in a window is a mean over about so many."""
_PENALTY_MAX = 64


class Shadow:
    """Counts a cache of `room` blocks under LRU."""

    def __init__(self) -> None:
        self.room = np.inf
        """Blocks the real cache holds; infinite while nothing had to leave."""
        self.is_leading = False
        """LRU's order decides."""
        self._starts: FloatArray = np.array([-np.inf, 0.0])
        """When each epoch began; the first stands for what LRU would have dropped."""
        self._counts: FloatArray = np.zeros(2)
        self._penalty = 1
        self._serving = 0
        self._seen = 0
        self._ahead = 0.0
        """Seconds the real cache saved in this window beyond what LRU would have."""
        self._saved = 0.0
        """Seconds LRU would have saved in this window."""
        self._balance = 0.0
        """Seconds won by the value order, or lost; at most a window's worth."""
        self._window_saves: float | None = None

    def used(self, last_use: FloatArray, seconds: FloatArray, now: float, *, held: bool) -> None:
        """Blocks last used at `last_use` were used now, which saved so many seconds of prefill, or
        would have: whether the real cache `held` them.
        """
        at = self._starts.searchsorted(last_use, side="right") - 1
        epochs = self._counts.size
        self._counts -= np.bincount(at, minlength=epochs)
        self._counts[-1] += at.size
        saved = float(seconds.sum())
        dropped = float(np.bincount(at, seconds, epochs)[0])
        ours, theirs = (dropped, 0.0) if held else (0.0, saved - dropped)
        self._seen += at.size
        self._judge(ours, theirs, saved - dropped)
        self._advance(now)

    def came(self, new: int, now: float) -> None:
        """So many blocks were used for the first time."""
        self._counts[-1] += new
        self._seen += new
        self._advance(now)

    def _advance(self, now: float) -> None:
        if self._counts[-1] < max(8.0, self.room / _EPOCHS) or now <= self._starts[-1]:
            return
        # What comes at a later time than now belongs to the next one.
        self._starts = np.append(self._starts, np.nextafter(now, np.inf))
        self._counts = np.append(self._counts, 0.0)
        total = float(self._counts[1:].sum())
        drop = 0
        while total - self._counts[drop + 1] / 2 >= self.room:
            drop += 1
            total -= float(self._counts[drop])
        if drop:
            self._starts = np.concatenate((self._starts[:1], self._starts[drop + 1 :]))
            self._counts = np.concatenate((self._counts[:1], self._counts[drop + 1 :]))
        if self._counts.size > _EPOCHS_MAX:
            self._merge()

    def _merge(self) -> None:
        """Older epochs, many of whose blocks were used since, two and two together."""
        first, end = self._counts[:1], 1 + self._counts.size // 4 * 2
        pairs = self._counts[1:end].reshape(-1, 2).sum(axis=1)
        self._starts = np.concatenate((self._starts[:1], self._starts[1:end:2], self._starts[end:]))
        self._counts = np.concatenate((first, pairs, self._counts[end:]))

    def _judge(self, ours: float, theirs: float, by_lru: float) -> None:
        """Seconds saved by blocks only we held, only LRU would have, and all that it would have."""
        self._ahead += ours - theirs
        self._saved += by_lru
        limit = self._window_saves
        if not self.is_leading and limit is not None:
            self._balance = min(self._balance + ours - theirs, limit)
            if self._balance < -limit:
                self.is_leading, self._serving = True, self._penalty
                self._penalty = min(_PENALTY_MAX, 2 * self._penalty)
                self._balance = 0.0
                self._begin_window()
        if self._seen >= max(_WINDOW_MIN, self.room):
            self._end_window()

    def _end_window(self) -> None:
        before = self._saved if self._window_saves is None else self._window_saves
        self._window_saves = before + (self._saved - before) / _WINDOWS_REMEMBERED
        if self.is_leading:
            self._serving -= 1
            self.is_leading = self._serving > 0
        elif self._ahead > 0.0:
            self._penalty = max(1, self._penalty // 2)
        self._begin_window()

    def _begin_window(self) -> None:
        self._seen, self._ahead, self._saved = 0, 0.0, 0.0
