"""What the least-recently-used order would have saved, from metadata alone, and who decides.

Primitive: `Shadow`. A cache under LRU holds the blocks used last, as many as it has room for; so
whether it would hold a block follows from the block's last use and from the *frontier*: the time
since which just so many different blocks were used. Blocks used since are counted by epochs of
1/64 of the room; nothing is kept a block.

A *window* is twice as many touches as the room has blocks (at least 4,096): with one room's worth
LRU changes all it holds, with another what the value order kept instead has time to come back. The
value order decides until it has lost to LRU what LRU saves in a window; what it won earlier makes
up for losses, up to as much again. So no constant says what is a loss worth minding: one window is
what it may cost. Then LRU's order decides for 1, 2, 4 … 64 windows before the value order is tried
again; a window that this wins halves the number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from math import inf

_EPOCHS = 64
_EPOCHS_MAX = 2 * _EPOCHS
_WINDOW_ROOMS = 2
_WINDOW_MIN = 4096
_WINDOWS_REMEMBERED = 8
"""What LRU saves in a window is a mean over about so many."""
_PENALTY_MAX = 64


class Shadow:
    """Counts a cache of `room` blocks under LRU."""

    def __init__(self) -> None:
        self.room = inf
        """Blocks the real cache holds; infinite while nothing had to leave."""
        self.is_leading = False
        """LRU's order decides."""
        self._starts = [-inf, 0.0]
        """When each epoch began; the first stands for what LRU would have dropped."""
        self._counts = [0.0, 0.0]
        self._now = 0.0
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

    @property
    def window(self) -> float:
        """Touches after which the two orders are compared."""
        return max(_WINDOW_MIN, _WINDOW_ROOMS * self.room)

    def used(self, runs: Iterable[tuple[int, float, float]], now: float, *, held: bool) -> None:
        """Blocks were used now: runs of so many, all last used then (minus infinity: never), which
        saved so many seconds of prefill, or would have: whether the real cache `held` them.
        """
        if now > self._now:
            self._now = now
            self._advance()
        starts, counts, used, saved, dropped = self._starts, self._counts, 0, 0.0, 0.0
        for blocks, last_use, seconds in runs:
            epoch = bisect_right(starts, last_use) - 1
            counts[epoch] -= blocks
            used += blocks
            if epoch:
                saved += seconds
            else:
                dropped += seconds
        counts[-1] += used
        self._seen += used
        self._judge(dropped if held else -saved, saved)

    def _advance(self) -> None:
        """A new epoch begins, if the last one has its part."""
        starts, counts = self._starts, self._counts
        if counts[-1] < max(8.0, self.room / _EPOCHS):
            return
        starts.append(self._now)
        counts.append(0.0)
        total, drop = sum(counts) - counts[0], 0
        while total - counts[drop + 1] / 2 >= self.room:
            drop += 1
            total -= counts[drop]
        del starts[1 : drop + 1], counts[1 : drop + 1]
        if len(counts) > _EPOCHS_MAX:
            self._merge()

    def _merge(self) -> None:
        """Older epochs, many of whose blocks were used since, two and two together."""
        end = 1 + len(self._counts) // 4 * 2
        older = self._counts[1:end]
        pairs = [first + second for first, second in zip(older[::2], older[1::2], strict=True)]
        self._counts[1:end] = pairs
        self._starts[1:end] = self._starts[1:end:2]

    def _judge(self, won: float, by_lru: float) -> None:
        """Seconds saved beyond what LRU would have, and what that is."""
        self._ahead += won
        self._saved += by_lru
        limit = self._window_saves
        if not self.is_leading and limit is not None:
            self._balance = min(self._balance + won, limit)
            if self._balance < -limit:
                self.is_leading, self._serving = True, self._penalty
                self._penalty = min(_PENALTY_MAX, 2 * self._penalty)
                self._balance = 0.0
                self._begin_window()
        if self._seen >= self.window:
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
