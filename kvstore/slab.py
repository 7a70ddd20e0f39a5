"""Slabs and slots: who may use which bytes of a region. Pure bookkeeping, no I/O, one thread.

A region is cut into equal slabs; a slab serves one slot size (its *class*); a slot holds one block.

Primitives: `SlabPool.take` (FREE -> FILLING), `publish` (-> READY), `drain` (-> DRAINING),
`quarantine` (-> QUARANTINED), `free` (any held state -> FREE), `adopt` (recovery: FREE -> READY).

Slot numbers are `slab * slots_per_slab_max + index`. A slot larger than a slab takes a run of
contiguous slabs inside one region and is number 0 of the run's first slab.

Who owns what:
  pool      slabs of no class; any class may take them, lowest number first (runs: highest)
  class     the free slots of its slabs; the last `reserve` of them are only for staging
  caller    the slots it took, until it frees them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.arrays import distinct
from kvstore.errors import InvariantViolated, check
from kvstore.sizeclass import SizeClass
from kvstore.types import BoolArray, ByteArray, IntArray, UIntArray

Slots: TypeAlias = Sequence[int] | IntArray

_STAGING = 0x80
_STATE = 0x7F
_SLAB_ASSIGNED, _SLAB_FREE, _SLAB_RETIRED = 0, 1, 2
_CHECK_SLABS = 64


class SlotState(IntEnum):
    """State of one slot. The bytes of a slot that is not FREE have exactly one owner."""

    FREE = 0
    FILLING = 1
    READY = 2
    DRAINING = 3
    QUARANTINED = 4


@dataclass(frozen=True)
class ClassStatistics:
    """Slots of one slot size; `free` includes what the staging reserve keeps back."""

    slot_bytes: int
    slabs: int
    slots: int
    free: int
    filling: int
    ready: int
    draining: int
    quarantined: int
    staging_reserve: int
    staging_held: int


@dataclass(frozen=True)
class SlabStatistics:
    """The whole pool. `frees_refused` counts attempts to free a free slot."""

    bytes_total: int
    slabs: int
    slabs_free: int
    slabs_retired: int
    frees_refused: int
    classes: tuple[ClassStatistics, ...]


class SlabPool:
    """One region's slabs. Slots in another state than a call needs raise InvariantViolated."""

    def __init__(
        self,
        slabs: int,
        slab_bytes: int,
        slot_bytes_min: int,
        *,
        slabs_per_region: int | None = None,
        staging_share: float = 0.0,
        staging_slots_min: int = 0,
    ) -> None:
        check(slabs >= 0 and 0 < slot_bytes_min <= slab_bytes, "slab geometry", slabs=slabs)
        self.slabs = slabs
        self.slab_bytes = slab_bytes
        self.slot_bytes_min = slot_bytes_min
        self.slots_per_slab_max = slab_bytes // slot_bytes_min
        self.slots_max = slabs * self.slots_per_slab_max
        self.slabs_per_region = slabs_per_region or max(slabs, 1)
        self._staging_share = staging_share
        self._staging_slots_min = staging_slots_min
        self._state: ByteArray = np.zeros(self.slots_max, np.uint8)
        self._slab_state = bytearray([_SLAB_FREE]) * slabs
        self._slot_bytes_of_slab: IntArray = np.zeros(slabs, np.int64)
        self._classes: dict[int, SizeClass] = {}
        self._counts: dict[int, list[int]] = {}
        self._frees_refused = 0

    # ------------------------------------------------------------ taking and giving back

    def take(self, slot_bytes: int, count: int, *, staging: bool = False) -> list[int]:
        """Up to `count` slots, now FILLING and the caller's; fewer means no room.

        Only `staging=True` may use the last `reserve` slots of a class. Such slots count against
        the reserve until they are freed, whatever becomes of them meanwhile.
        """
        group = self._class(slot_bytes)
        taken: list[int] = []
        while len(taken) < count:
            usable = group.free if staging else group.free - group.kept_back()
            if usable > 0:
                taken += group.pop(min(usable, count - len(taken)))
            elif not self._grow(group):
                break
        if taken:
            self._state[taken] = int(SlotState.FILLING) | (_STAGING if staging else 0)
            self._counts[slot_bytes][SlotState.FILLING] += len(taken)
            group.staging_held += len(taken) if staging else 0
        return taken

    def free(self, slots: Slots) -> None:
        """Held slots -> FREE, in any state; a slab that empties returns to the pool.

        A slot that is free already, or named twice, is refused: nothing changes, it is counted, and
        InvariantViolated is raised.
        """
        numbers = _numbers(slots)
        marks = self._state[numbers]
        if np.count_nonzero(marks) < marks.size or _has_double(numbers):
            self._frees_refused += 1
            raise InvariantViolated(f"freeing a free slot (slots={numbers[:8].tolist()})")
        self._state[numbers] = int(SlotState.FREE)
        for group, ours in self._by_class(numbers):
            was = marks[ours]
            self._count_out(group, was & _STATE)
            group.staging_held -= int(np.count_nonzero(was & _STAGING))
            group.push(numbers[ours])
            self._give_back(group)

    def publish(self, slots: Slots) -> None:
        """FILLING -> READY."""
        self._move(slots, (SlotState.FILLING,), SlotState.READY)

    def drain(self, slots: Slots) -> None:
        """READY -> DRAINING: being dropped, no new reader."""
        self._move(slots, (SlotState.READY,), SlotState.DRAINING)

    def quarantine(self, slots: Slots) -> None:
        """FILLING or DRAINING -> QUARANTINED: a writer may still be at it; no re-use yet."""
        self._move(slots, (SlotState.FILLING, SlotState.DRAINING), SlotState.QUARANTINED)

    def adopt(self, slot_bytes: int, slots: IntArray) -> BoolArray:
        """Recovery: slots that hold whole blocks, FREE -> READY; assigns their slabs to the class.

        Returns which were adopted, bool[n]. False: no such slot in this class, its slab serves
        another class or is retired, or it is held already (the first of two claims wins). The
        records of those must be dropped.
        """
        group = self._class(slot_bytes)
        numbers = np.asarray(slots, dtype=np.int64)
        adopted = (numbers >= 0) & (numbers < self.slots_max)
        adopted[adopted] &= numbers[adopted] % self.slots_per_slab_max < group.per_slab
        first = np.zeros(numbers.size, np.bool_)
        first[np.unique(numbers, return_index=True)[1]] = True
        adopted &= first
        slabs = numbers // self.slots_per_slab_max
        ours = np.zeros(self.slabs, np.bool_)
        for slab in np.flatnonzero(np.bincount(slabs[adopted])).tolist():
            ours[slab] = slab in group.slabs or self._assign(group, slab)
        adopted[adopted] &= ours[slabs[adopted]]
        adopted[adopted] &= self._state[numbers[adopted]] == SlotState.FREE
        numbers = numbers[adopted]
        self._state[numbers] = SlotState.READY
        self._counts[slot_bytes][SlotState.READY] += numbers.size
        for slab in np.flatnonzero(np.bincount(slabs[adopted])).tolist():
            group.adopt(slab, self.slots_in_slab(slab))
        return adopted

    # ------------------------------------------------------------ looking

    def offset_of(self, slot: int) -> int:
        """Byte offset of a slot in the whole region."""
        slab, index = divmod(slot, self.slots_per_slab_max)
        return slab * self.slab_bytes + index * self.slot_bytes_of(slot)

    def offsets_of(self, slots: Slots) -> UIntArray:
        """Byte offsets, u64[n], of slots whose slabs serve a class."""
        slabs, indexes = np.divmod(_numbers(slots), self.slots_per_slab_max)
        return (slabs * self.slab_bytes + indexes * self._slot_bytes_of_slab[slabs]).astype(
            np.uint64
        )

    def slot_bytes_of(self, slot: int) -> int:
        """Slot size of the class that the slot's slab serves now."""
        slot_bytes = int(self._slot_bytes_of_slab[slot // self.slots_per_slab_max])
        check(slot_bytes > 0, "slot of a slab that serves no class", slot=slot)
        return slot_bytes

    def room(self, slot_bytes: int) -> int:
        """Slots that `take` would give now, without staging and without evicting anything."""
        group = self._class(slot_bytes)
        more = self._growths_left(group) * group.per_slab
        return max(0, group.free + more - group.kept_back(more))

    def classes(self) -> list[int]:
        """Slot sizes that own at least one slab."""
        return sorted(size for size, group in self._classes.items() if group.slabs)

    def slabs_of_class(self, slot_bytes: int) -> IntArray:
        """First slab of every member of a class, int64[n]."""
        return np.array(sorted(self._class(slot_bytes).slabs), np.int64)

    def slots_of_class(self, slot_bytes: int) -> IntArray:
        """Every slot number of a class's slabs, *free ones included*, for sampling.

        int64[n], read-only; the same array until the class gains or loses a slab.
        """
        return self._class(slot_bytes).numbers

    def slots_in_slab(self, slab: int) -> IntArray:
        """Held slots of one slab, int64[n]."""
        first = slab * self.slots_per_slab_max
        return first + np.flatnonzero(self._state[first : first + self.slots_per_slab_max])

    def states_of(self, slots: Slots) -> ByteArray:
        """SlotState of each, u8[n]."""
        states: ByteArray = self._state[_numbers(slots)] & np.uint8(_STATE)
        return states

    # ------------------------------------------------------------ slabs

    def close_slab(self, slab: int) -> None:
        """Hand out no more slots of an assigned slab; it returns to the pool once it is empty."""
        group = self._group_of(slab)
        group.close(slab)
        self._give_back(group)

    def reopen_slab(self, slab: int) -> None:
        """Undo close_slab on a slab that is still assigned."""
        self._group_of(slab).reopen(slab)

    def retire_slab(self, slab: int) -> None:
        """Take a slab of no class out of service (shrunk away, or still mapped by a stranger)."""
        check(self._slab_state[slab] == _SLAB_FREE, "retiring a slab that is not free", slab=slab)
        self._slab_state[slab] = _SLAB_RETIRED

    def free_slab(self) -> int:
        """The last slab of no class; -1 if there is none."""
        return self._slab_state.rfind(_SLAB_FREE)

    def restore_slab(self, slab: int) -> None:
        """Bring a retired slab back into the pool."""
        check(self._slab_state[slab] == _SLAB_RETIRED, "restoring a slab in service", slab=slab)
        self._slab_state[slab] = _SLAB_FREE

    def statistics(self) -> SlabStatistics:
        """Counters as they are now; O(classes)."""
        return SlabStatistics(
            bytes_total=self.slabs * self.slab_bytes,
            slabs=self.slabs,
            slabs_free=self._slab_state.count(_SLAB_FREE),
            slabs_retired=self._slab_state.count(_SLAB_RETIRED),
            frees_refused=self._frees_refused,
            classes=tuple(self._statistics_of(self._classes[size]) for size in self.classes()),
        )

    def check_integrity(self) -> None:
        """I1 for every slab, in one go; raises InvariantViolated."""
        for _ in self.integrity_slices():
            pass

    def integrity_slices(self) -> Iterator[None]:
        """The same in steps of a few slabs; changes between two steps are allowed."""
        for group in list(self._classes.values()):
            members = list(group.slabs)
            for start in range(0, len(members), _CHECK_SLABS):
                for slab in members[start : start + _CHECK_SLABS]:
                    if slab in group.slabs:
                        group.check_slab(slab, self.slots_in_slab(slab))
                yield
            group.check_sums(sum(self._counts[group.slot_bytes]))
        for slab in range(self.slabs):
            if self._slab_state[slab] != _SLAB_ASSIGNED:
                check(not self.slots_in_slab(slab).size, "I1 held slot in a free slab", slab=slab)
            if slab % _CHECK_SLABS == 0:
                yield

    # ------------------------------------------------------------ inside

    def _class(self, slot_bytes: int) -> SizeClass:
        group = self._classes.get(slot_bytes)
        if group is None:
            check(
                slot_bytes >= self.slot_bytes_min, "slot below the minimum", slot_bytes=slot_bytes
            )
            group = SizeClass(
                slot_bytes,
                self.slab_bytes,
                self.slots_per_slab_max,
                self._staging_share,
                self._staging_slots_min,
            )
            self._classes[slot_bytes] = group
            self._counts[slot_bytes] = [0] * len(SlotState)
        return group

    def _group_of(self, slab: int) -> SizeClass:
        group = self._classes.get(int(self._slot_bytes_of_slab[slab]))
        if group is None or slab not in group.slabs:
            raise InvariantViolated(f"slab serves no class (slab={slab})")
        return group

    def _give_back(self, group: SizeClass) -> None:
        for slab in group.take_empty():
            self._set_slabs(slab, group.run, _SLAB_FREE, 0)

    def _grow(self, group: SizeClass) -> bool:
        """Give the class one more slab or run; False if the pool has none."""
        if group.run == 1:
            slab = self._slab_state.find(_SLAB_FREE)
            return slab >= 0 and self._assign(group, slab)
        run = bytes([_SLAB_FREE]) * group.run
        for start, stop in reversed(self._regions()):
            slab = self._slab_state.rfind(run, start, stop)
            if slab >= 0:
                return self._assign(group, slab)
        return False

    def _growths_left(self, group: SizeClass) -> int:
        """How often `_grow` would succeed now."""
        run = bytes([_SLAB_FREE]) * group.run
        return sum(self._slab_state.count(run, start, stop) for start, stop in self._regions())

    def _regions(self) -> list[tuple[int, int]]:
        step = self.slabs_per_region
        return [(at, min(at + step, self.slabs)) for at in range(0, self.slabs, step)]

    def _assign(self, group: SizeClass, slab: int) -> bool:
        """Make `slab` and the rest of its run the class's; False if it cannot be."""
        last = slab + group.run - 1
        if last >= self.slabs or slab // self.slabs_per_region != last // self.slabs_per_region:
            return False
        if self._slab_state.count(_SLAB_FREE, slab, last + 1) != group.run:
            return False
        self._set_slabs(slab, group.run, _SLAB_ASSIGNED, group.slot_bytes)
        group.add(slab)
        return True

    def _set_slabs(self, first: int, run: int, state: int, slot_bytes: int) -> None:
        self._slab_state[first : first + run] = bytes([state]) * run
        self._slot_bytes_of_slab[first : first + run] = slot_bytes

    def _move(self, slots: Slots, sources: tuple[SlotState, ...], target: SlotState) -> None:
        numbers = _numbers(slots)
        marks = self._state[numbers]
        states = marks & _STATE
        # Plain integers: numpy takes ten times as long over an IntEnum.
        found = sum(int(np.count_nonzero(states == int(source))) for source in sources)
        if found != numbers.size or _has_double(numbers):
            names = " or ".join(state.name for state in sources)
            raise InvariantViolated(
                f"slots must be {names} to become {target.name} "
                f"(slots={numbers[:8].tolist()}, states={states[:8].tolist()})"
            )
        self._state[numbers] = (marks & _STAGING) | int(target)
        for group, ours in self._by_class(numbers):
            was = states[ours]
            self._count_out(group, was)
            self._counts[group.slot_bytes][target] += was.size

    def _count_out(self, group: SizeClass, states: NDArray[np.integer]) -> None:
        counts = self._counts[group.slot_bytes]
        for state, number in enumerate(np.bincount(states).tolist()):
            counts[state] -= number

    def _by_class(self, numbers: IntArray) -> Iterator[tuple[SizeClass, slice | BoolArray]]:
        """Each class among `numbers`, with what selects its slots."""
        sizes = self._slot_bytes_of_slab[numbers // self.slots_per_slab_max]
        if sizes.size and np.count_nonzero(sizes == sizes[0]) == sizes.size:
            yield self._classes[int(sizes[0])], slice(None)
            return
        for size in distinct(sizes).tolist():
            yield self._classes[size], sizes == size

    def _statistics_of(self, group: SizeClass) -> ClassStatistics:
        filling, ready, draining, quarantined = self._counts[group.slot_bytes][1:]
        return ClassStatistics(
            slot_bytes=group.slot_bytes,
            slabs=len(group.slabs) * group.run,
            slots=group.slots,
            free=group.slots - filling - ready - draining - quarantined,
            filling=filling,
            ready=ready,
            draining=draining,
            quarantined=quarantined,
            staging_reserve=group.kept_back() + group.staging_held,
            staging_held=group.staging_held,
        )


def _numbers(slots: Slots) -> IntArray:
    numbers = np.asarray(slots, dtype=np.int64)
    if numbers.size and numbers.min() < 0:
        raise InvariantViolated(f"negative slot number (slots={numbers[:8].tolist()})")
    return numbers


def _has_double(numbers: IntArray) -> bool:
    if numbers.size < 2:
        return False
    ordered = np.sort(numbers)
    return bool(np.count_nonzero(ordered[1:] == ordered[:-1]))
