"""The slabs of one slot size: which of their slots are free, and what is kept back for staging.

Primitives: `SizeClass.pop` and `push` (free slots), `add` and `take_empty` (slabs).
The inner half of `slab.py`, which alone uses it: it sees slot numbers, never bytes or slot states.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

from kvstore.errors import check
from kvstore.types import IntArray


@dataclass(slots=True)
class Slab:
    """An assigned slab. Its free slots: `freed`, then all numbers from `fresh` up to its end."""

    fresh: int
    held: int = 0
    freed: list[int] = field(default_factory=list)
    is_closed: bool = False
    """Hands out nothing more; leaves as soon as it is empty."""


class SizeClass:
    """All slabs of one slot size."""

    def __init__(
        self,
        slot_bytes: int,
        slab_bytes: int,
        slots_per_slab_max: int,
        staging_share: float,
        staging_slots_min: int,
    ) -> None:
        self.slot_bytes = slot_bytes
        self.per_slab = max(1, slab_bytes // slot_bytes)
        self.run = -(-slot_bytes // slab_bytes)
        """Slabs that one member takes: 1, or more when a slot is larger than a slab."""
        self.slabs: dict[int, Slab] = {}
        self.free = 0
        """Free slots of the slabs that are not closed."""
        self.staging_held = 0
        self._open_slabs = 0
        self._stride = slots_per_slab_max
        self._staging_share = staging_share
        self._staging_slots_min = staging_slots_min
        self._empty: set[int] = set()
        self._heap: list[int] = []
        self._queued: set[int] = set()
        """What `_heap` holds: every open slab with a free slot, and some that have none left."""
        self._numbers: IntArray | None = None

    @property
    def slots(self) -> int:
        """Slots of all its slabs, closed ones included."""
        return len(self.slabs) * self.per_slab

    @property
    def numbers(self) -> IntArray:
        """Every slot number of its slabs, int64[slots], read-only.

        The same array until a slab comes or goes.
        """
        if self._numbers is None:
            first = np.array(sorted(self.slabs), np.int64)[:, np.newaxis] * self._stride
            self._numbers = (first + np.arange(self.per_slab)).reshape(-1)
            self._numbers.setflags(write=False)
        return self._numbers

    def kept_back(self, more: int = 0) -> int:
        """Free slots that only staging may take, if the class had `more` slots.

        The reserve is a share of the slabs that are not closed; at most a quarter, so that tiny
        classes still work.
        """
        slots = self._open_slabs * self.per_slab + more
        wanted = max(math.ceil(slots * self._staging_share), self._staging_slots_min)
        return max(0, min(wanted, slots // 4) - self.staging_held)

    def pop(self, count: int) -> list[int]:
        """`count` <= `free` slots, now held; the lowest slabs first, so that high ones empty."""
        taken: list[int] = []
        while len(taken) < count:
            slab = self._heap[0]
            member = self.slabs.get(slab)
            left = 0 if member is None or member.is_closed else self.per_slab - member.held
            step = min(left, count - len(taken))
            if member is not None and step:
                taken += _pop_from(member, step)
                self.free -= step
                self._empty.discard(slab)
            if step == left:
                heapq.heappop(self._heap)
                self._queued.discard(slab)
        return taken

    def push(self, numbers: IntArray) -> None:
        """Held slots are free again."""
        for slot in numbers.tolist():
            slab = slot // self._stride
            member = self.slabs[slab]
            member.freed.append(slot)
            member.held -= 1
            if not member.held:
                self._empty.add(slab)
            if not member.is_closed:
                self.free += 1
                self._queue(slab)

    def add(self, slab: int) -> None:
        """The class owns one more slab (the first of a run), all free."""
        self.slabs[slab] = Slab(fresh=slab * self._stride)
        self._open_slabs += 1
        self.free += self.per_slab
        self._empty.add(slab)
        self._numbers = None
        self._queue(slab)

    def take_empty(self) -> list[int]:
        """Slabs given up: those that are empty and not needed for the staging reserve."""
        given: list[int] = []
        for slab in sorted(self._empty, reverse=True):
            if not self.slabs[slab].is_closed:
                if self.free - self.per_slab < self.kept_back(-self.per_slab):
                    continue
                self._open_slabs -= 1
                self.free -= self.per_slab
            del self.slabs[slab]
            self._empty.discard(slab)
            self._numbers = None
            given.append(slab)
        return given

    def adopt(self, slab: int, held: IntArray) -> None:
        """Recovery: these (ascending) and no other slots of `slab` are held."""
        member = self.slabs[slab]
        self.free -= held.size - member.held
        member.held = held.size
        member.fresh = int(held[-1]) + 1
        first = slab * self._stride
        is_free = np.ones(member.fresh - first, np.bool_)
        is_free[held - first] = False
        member.freed = (first + np.flatnonzero(is_free)).tolist()
        self._empty.discard(slab)

    def close(self, slab: int) -> None:
        """Hand out no more slots of a slab."""
        member = self.slabs[slab]
        if not member.is_closed:
            member.is_closed = True
            self._open_slabs -= 1
            self.free -= self.per_slab - member.held

    def reopen(self, slab: int) -> None:
        """Undo close."""
        member = self.slabs[slab]
        if member.is_closed:
            member.is_closed = False
            self._open_slabs += 1
            self.free += self.per_slab - member.held
            self._queue(slab)

    def check_slab(self, slab: int, held: IntArray) -> None:
        """I1 for one slab whose held slots, ascending, are `held`."""
        member = self.slabs[slab]
        end = slab * self._stride + self.per_slab
        freed = set(member.freed)
        free = len(freed) + end - member.fresh
        check(
            held.size == member.held, "I1 held slots", slab=slab, held=held.size, said=member.held
        )
        check(free + held.size == self.per_slab, "I1 free + held = total", slab=slab, free=free)
        check(len(freed) == len(member.freed), "free slot listed twice", slab=slab)
        check(freed.isdisjoint(held.tolist()), "held slot on the free list", slab=slab)
        check(not held.size or held[-1] < member.fresh <= end, "slot never handed out", slab=slab)
        check((slab in self._empty) == (not held.size), "empty slabs", slab=slab)

    def check_sums(self, held: int) -> None:
        """I1 over all slabs; `held` slots are in some state but FREE."""
        members = self.slabs.values()
        free = sum(self.per_slab - member.held for member in members if not member.is_closed)
        said = sum(member.held for member in members)
        check(
            said == held, "I1 states of a class", slot_bytes=self.slot_bytes, held=held, said=said
        )
        check(self.free == free, "I1 free slots of a class", slot_bytes=self.slot_bytes)
        check(0 <= self.staging_held <= held, "I1 staging slots", staging=self.staging_held)

    def _queue(self, slab: int) -> None:
        if slab not in self._queued:
            self._queued.add(slab)
            heapq.heappush(self._heap, slab)


def _pop_from(member: Slab, count: int) -> list[int]:
    kept = max(0, len(member.freed) - count)
    taken = member.freed[kept:]
    del member.freed[kept:]
    fresh = count - len(taken)
    taken += range(member.fresh, member.fresh + fresh)
    member.fresh += fresh
    member.held += count
    return taken
