"""Slabs and slots by example: states, classes, runs, the staging reserve, recovery."""

from __future__ import annotations

import numpy as np
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
    assert all(left[1] <= right[0] for left, right in zip(ranges, ranges[1:], strict=False))
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
