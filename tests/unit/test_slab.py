"""Slabs and slots by example: states, classes, runs, the staging reserve, recovery."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvstore.errors import InvariantViolated
from kvstore.slab import SlabPool, SlotState

SLAB = 1 << 20
SMALL = 64 << 10
LARGE = 192 << 10


@pytest.fixture
def pool():
    pool = SlabPool(4, SLAB, SMALL)
    yield pool
    pool.check_integrity()


def test_a_slot_goes_through_its_states_and_is_free_again(pool):
    slots = pool.take(SMALL, 3)
    assert pool.states_of(slots).tolist() == [SlotState.FILLING] * 3
    pool.publish(slots)
    pool.drain(slots[:2])
    pool.quarantine(slots[:1])
    (only,) = pool.statistics().classes
    assert (only.filling, only.ready, only.draining, only.quarantined) == (0, 1, 1, 1)
    pool.free(slots)
    assert pool.classes() == []
    assert pool.statistics().slabs_free == 4


def test_freeing_a_free_slot_is_refused_and_counted(pool):
    first, second = pool.take(SMALL, 2)
    pool.free([first])
    with pytest.raises(InvariantViolated, match="freeing a free slot"):
        pool.free([second, first])
    with pytest.raises(InvariantViolated, match="freeing a free slot"):
        pool.free([second, second])
    assert pool.states_of([second]).tolist() == [SlotState.FILLING]
    assert pool.statistics().frees_refused == 2
    pool.free([second])
    slots = [slot for _ in range(64) for slot in pool.take(SMALL, 1)]
    assert len(set(slots)) == 64


@pytest.mark.parametrize(
    ("call", "state"),
    [("publish", "ready"), ("drain", "filling"), ("quarantine", "ready")],
)
def test_a_move_from_the_wrong_state_is_our_bug(pool, call, state):
    slots = pool.take(SMALL, 2)
    if state == "ready":
        pool.publish(slots)
    with pytest.raises(InvariantViolated, match="slots must be"):
        getattr(pool, call)(slots)
    with pytest.raises(InvariantViolated, match="negative"):
        pool.free([-1])


def test_offsets_of_two_classes_never_overlap(pool):
    small, large = pool.take(SMALL, 20), pool.take(LARGE, 6)
    ranges = sorted(
        [(pool.offset_of(slot), pool.offset_of(slot) + pool.slot_bytes_of(slot)) for slot in small]
        + [
            (pool.offset_of(slot), pool.offset_of(slot) + pool.slot_bytes_of(slot))
            for slot in large
        ]
    )
    assert all(left[1] <= right[0] for left, right in pairwise(ranges))
    assert ranges[-1][1] <= 4 * SLAB
    both = small + large
    assert pool.offsets_of(both).tolist() == [pool.offset_of(slot) for slot in both]
    assert pool.classes() == [SMALL, LARGE]


def test_slots_larger_than_a_slab_take_contiguous_slabs_of_one_region():
    pool = SlabPool(7, SLAB, SMALL, slabs_per_region=4)
    size = 2 * SLAB + SMALL
    assert pool.room(size) == 2
    slots = pool.take(size, 5)
    assert len(slots) == 2
    offsets = sorted(pool.offsets_of(slots).tolist())
    assert offsets[1] - offsets[0] >= size
    assert all(at // (4 * SLAB) == (at + size - 1) // (4 * SLAB) for at in offsets)
    assert pool.take(SMALL, 100) == list(range(16))
    pool.publish(slots)
    pool.free(slots)
    pool.check_integrity()
    assert pool.room(SMALL) == 6 * 16


def test_the_staging_reserve_is_for_staging_alone():
    pool = SlabPool(2, SLAB, SMALL, staging_share=0.1, staging_slots_min=3)
    assert pool.room(SMALL) == 32 - 4
    assert len(pool.take(SMALL, 100)) == 28
    assert (pool.room(SMALL), pool.take(SMALL, 1)) == (0, [])
    staged = pool.take(SMALL, 3, staging=True)
    assert len(staged) == 3
    (only,) = pool.statistics().classes
    assert (only.staging_reserve, only.staging_held, only.free) == (4, 3, 1)
    pool.publish(staged)
    assert pool.take(SMALL, 1) == []
    pool.free(staged)
    assert len(pool.take(SMALL, 9, staging=True)) == 4
    pool.check_integrity()


def test_tiny_classes_have_no_reserve():
    pool = SlabPool(3, SLAB, SMALL, staging_share=0.5, staging_slots_min=16)
    assert len(pool.take(SLAB, 9)) == 3


def test_a_closed_slab_hands_out_nothing_and_leaves_when_empty(pool):
    slots = pool.take(SMALL, 20)
    pool.free(slots[:1])
    pool.close_slab(0)
    assert pool.room(SMALL) == 12 + 2 * 16
    assert min(pool.take(SMALL, 1)) >= 16
    pool.reopen_slab(0)
    assert pool.take(SMALL, 1) == slots[:1]
    pool.close_slab(0)
    pool.free(pool.slots_in_slab(0))
    assert pool.slabs_of_class(SMALL).tolist() == [1]
    with pytest.raises(InvariantViolated, match="serves no class"):
        pool.close_slab(0)


def test_low_slabs_fill_first_so_that_high_ones_empty(pool):
    slots = pool.take(SMALL, 40)
    pool.free([slots[3], slots[35], slots[20]])
    assert pool.take(SMALL, 3) == [slots[3], slots[20], slots[35]]


def test_slabs_out_of_service_are_not_used(pool):
    pool.retire_slab(0)
    assert min(pool.take(SMALL, 1)) == 16
    assert pool.room(SMALL) == 47
    with pytest.raises(InvariantViolated, match="retiring"):
        pool.retire_slab(1)
    pool.restore_slab(0)
    with pytest.raises(InvariantViolated, match="restoring"):
        pool.restore_slab(0)
    assert pool.statistics().slabs_retired == 0


def test_what_a_class_holds_is_listed_and_kept(pool):
    slots = pool.take(LARGE, 7)
    numbers = pool.slots_of_class(LARGE)
    assert numbers.tolist() == [0, 1, 2, 3, 4, 16, 17, 18, 19, 20]
    assert pool.slots_of_class(LARGE) is numbers
    assert pool.slots_in_slab(0).tolist() == [0, 1, 2, 3, 4]
    pool.free(slots[5:])
    assert pool.slots_of_class(LARGE).tolist() == [0, 1, 2, 3, 4]
    assert pool.slots_of_class(SMALL).tolist() == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool, group: pool._state.__setitem__(0, 0),
        lambda pool, group: pool._state.__setitem__(9, 2),
        lambda pool, group: pool._state.__setitem__(40, 1),
        lambda pool, group: pool._counts[SMALL].__setitem__(1, 2),
        lambda pool, group: setattr(group, "free", 1),
        lambda pool, group: group.slabs[0].freed.append(1),
        lambda pool, group: setattr(group.slabs[0], "held", 1),
    ],
)
def test_broken_books_are_noticed(damage):
    pool = SlabPool(4, SLAB, SMALL)
    pool.take(SMALL, 3)
    pool.check_integrity()
    damage(pool, pool._classes[SMALL])
    with pytest.raises(InvariantViolated):
        pool.check_integrity()
