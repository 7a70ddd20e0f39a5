"""The slab pool against a naive model: a dict of held slots."""

from __future__ import annotations

import random
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.errors import InvariantViolated
from kvstore.slab import SlabPool, SlotState

PAGE = 4096
SLAB = 16 * PAGE
SLABS, REGION = 9, 3
SIZES = [PAGE, 3 * PAGE, 16 * PAGE, 17 * PAGE, 40 * PAGE]
MOVES = {
    "publish": ({SlotState.FILLING}, SlotState.READY),
    "drain": ({SlotState.READY}, SlotState.DRAINING),
    "quarantine": ({SlotState.FILLING, SlotState.DRAINING}, SlotState.QUARANTINED),
}


class SlabMachine(RuleBasedStateMachine):
    """Takes, moves and frees; the model knows each held slot's state, size and staging mark."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlabPool(
            SLABS, SLAB, PAGE, slabs_per_region=REGION, staging_share=0.1, staging_slots_min=2
        )
        self.state: dict[int, SlotState] = {}
        self.size: dict[int, int] = {}
        self.staging: set[int] = set()
        self.closed: set[int] = set()
        self.retired: set[int] = set()

    # ---------------------------------------------------------------- rules

    @rule(size=st.sampled_from(SIZES), count=st.integers(0, 60), staging=st.booleans())
    def take(self, size: int, count: int, staging: bool) -> None:
        before, room = self.taken_bytes(), self.pool.room(size)
        slots = self.pool.take(size, count, staging=staging)
        assert len(slots) <= count
        assert not set(slots) & set(self.state)
        if not staging:
            assert len(slots) == min(count, room)
        else:
            assert len(slots) >= min(count, room)
        for slot in slots:
            self.state[slot] = SlotState.FILLING
            self.size[slot] = size
        self.staging |= set(slots) if staging else set()
        assert self.taken_bytes() == before + size * len(slots)

    @precondition(lambda self: self.state)
    @rule(data=st.data(), move=st.sampled_from(sorted(MOVES)))
    def move(self, data: st.DataObject, move: str) -> None:
        slots = self.some_slots(data)
        sources, target = MOVES[move]
        if {self.state[slot] for slot in slots} <= sources:
            getattr(self.pool, move)(slots)
            self.state.update(dict.fromkeys(slots, target))
        else:
            with pytest.raises(InvariantViolated):
                getattr(self.pool, move)(slots)

    @precondition(lambda self: self.state)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slots = self.some_slots(data)
        self.pool.free(slots)
        for slot in slots:
            del self.state[slot], self.size[slot]
        self.staging -= set(slots)
        with pytest.raises(InvariantViolated, match="freeing a free slot"):
            self.pool.free(slots[:1])

    @precondition(lambda self: self.state)
    @rule(data=st.data(), reopen=st.booleans())
    def close(self, data: st.DataObject, reopen: bool) -> None:
        slab = data.draw(st.sampled_from(sorted(self.state))) // self.pool.slots_per_slab_max
        if reopen:
            self.pool.reopen_slab(slab)
            self.closed.discard(slab)
        else:
            self.pool.close_slab(slab)
            self.closed.add(slab)

    @rule(slab=st.integers(0, SLABS - 1))
    def retire_or_restore(self, slab: int) -> None:
        if slab in self.retired:
            self.pool.restore_slab(slab)
            self.retired.discard(slab)
            return
        assigned = self.assigned_slabs()
        if slab in assigned:
            with pytest.raises(InvariantViolated):
                self.pool.retire_slab(slab)
        else:
            self.pool.retire_slab(slab)
            self.retired.add(slab)

    # ---------------------------------------------------------------- invariants

    @invariant()
    def the_books_balance(self) -> None:
        self.pool.check_integrity()
        statistics = self.pool.statistics()
        held = list(self.state.values())
        for state, name in (
            (SlotState.FILLING, "filling"),
            (SlotState.READY, "ready"),
            (SlotState.DRAINING, "draining"),
            (SlotState.QUARANTINED, "quarantined"),
        ):
            assert sum(getattr(one, name) for one in statistics.classes) == held.count(state)
        assert sum(one.staging_held for one in statistics.classes) == len(self.staging)
        for one in statistics.classes:
            states = one.free, one.filling, one.ready, one.draining, one.quarantined
            assert sum(states) == one.slots
        assert statistics.slabs_retired == len(self.retired)
        assigned = sum(one.slabs for one in statistics.classes)
        assert assigned + statistics.slabs_free + statistics.slabs_retired == SLABS

    @invariant()
    def slots_never_overlap(self) -> None:
        slots = sorted(self.state)
        offsets = self.pool.offsets_of(slots).tolist()
        ranges = sorted((at, at + self.size[slot]) for at, slot in zip(offsets, slots, strict=True))
        for start, end in ranges:
            assert end <= SLABS * SLAB
            assert start // (REGION * SLAB) == (end - 1) // (REGION * SLAB)
        assert all(left[1] <= right[0] for left, right in pairwise(ranges))
        assert not {at // SLAB for at in offsets} & self.retired

    @invariant()
    def sampling_sees_every_held_slot(self) -> None:
        for size in SIZES:
            numbers = self.pool.slots_of_class(size)
            ours = {slot for slot, its in self.size.items() if its == size}
            assert ours <= set(numbers.tolist())
            in_slabs = [self.pool.slots_in_slab(int(s)) for s in self.pool.slabs_of_class(size)]
            assert sorted(ours) == sorted(np.concatenate([np.empty(0, int), *in_slabs]).tolist())

    def teardown(self) -> None:
        self.pool.free(sorted(self.state))
        self.pool.check_integrity()
        assert self.pool.classes() == []

    # ---------------------------------------------------------------- helpers

    def some_slots(self, data: st.DataObject) -> list[int]:
        return data.draw(
            st.lists(st.sampled_from(sorted(self.state)), unique=True, min_size=1, max_size=8)
        )

    def taken_bytes(self) -> int:
        return sum(self.size.values())

    def assigned_slabs(self) -> set[int]:
        runs = [
            (slab, -(-size // SLAB))
            for size in self.pool.classes()
            for slab in self.pool.slabs_of_class(size).tolist()
        ]
        return {slab + index for slab, run in runs for index in range(run)}


TestSlabs = SlabMachine.TestCase
TestSlabs.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_after_a_burst_of_two_sizes_every_allocation_succeeds_again() -> None:
    """Two block sizes, 3 : 1, alternate at twice the tier; then quiet."""
    pool = SlabPool(16, SLAB, PAGE)
    rng = random.Random(7)
    sizes, held = (3 * PAGE, PAGE), []
    refused = 0
    for step in range(50_000):
        size = sizes[step % 2]
        got = pool.take(size, 1)
        held += got
        refused += not got
        if not got or len(held) > 2 * 16 * 16:
            index = rng.randrange(len(held))
            held[index], held[-1] = held[-1], held[index]
            pool.free([held.pop()])
    assert refused > 1000
    pool.check_integrity()
    pool.free(held)
    for size, whole in zip(sizes, (16 * 5, 16 * 16), strict=True):
        slots = pool.take(size, 1000)
        assert len(slots) == whole
        pool.free(slots)
    for step in range(1000):
        slots = pool.take(sizes[step % 2], 1)
        assert len(slots) == 1
        if step % 40:
            pool.free(slots)
    pool.check_integrity()


def test_a_long_life_leaves_nothing_behind() -> None:
    """Slabs that come and go do not pile up in the class's own books."""
    pool = SlabPool(4, SLAB, PAGE)
    for _ in range(2000):
        pool.free(pool.take(PAGE, 1))
    group = pool._classes[PAGE]
    assert len(group._heap) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_recovery_adopts_what_it_can_and_says_what_it_cannot(seed: int) -> None:
    rng = random.Random(seed)
    first = SlabPool(8, SLAB, PAGE, slabs_per_region=4)
    claims = {size: np.array(first.take(size, 12)) for size in (PAGE, 3 * PAGE, 17 * PAGE)}
    pool = SlabPool(8, SLAB, PAGE, slabs_per_region=4)
    for size, slots in claims.items():
        rng.shuffle(slots)
        assert pool.adopt(size, slots).all()
        assert set(pool.states_of(slots).tolist()) <= {SlotState.READY}
        assert not pool.adopt(size, slots).any()
        wrong = np.array([-1, pool.slots_max, slots[0]])
        other = PAGE if size != PAGE else 3 * PAGE
        assert not pool.adopt(other, wrong).any()
    pool.check_integrity()
    assert pool.statistics().slabs_free == first.statistics().slabs_free
    assert [pool.room(size) for size in SIZES] == [first.room(size) for size in SIZES]
    for slots in claims.values():
        pool.free(slots)
    pool.check_integrity()
    assert pool.classes() == []


def test_the_first_of_two_claims_on_a_slot_wins() -> None:
    pool = SlabPool(2, SLAB, PAGE)
    assert pool.adopt(PAGE, np.array([3, 5, 3])).tolist() == [True, True, False]
    pool.retire_slab(1)
    assert pool.adopt(PAGE, np.array([16])).tolist() == [False]
    assert pool.adopt(3 * PAGE, np.array([5])).tolist() == [False]
    taken = pool.take(PAGE, 16)
    assert sorted([*taken, 3, 5]) == list(range(16))


def test_a_run_that_leaves_its_region_is_not_adopted() -> None:
    pool = SlabPool(4, SLAB, PAGE, slabs_per_region=2)
    assert pool.adopt(17 * PAGE, np.array([16, 48, 32, 33])).tolist() == [False, False, True, False]
    pool.check_integrity()
