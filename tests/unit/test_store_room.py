"""Room in the host tier: leaf first, never what is held, fair between block sizes."""

from __future__ import annotations

import numpy as np
import pytest
from store_kit import (
    LARGE,
    LAYOUT,
    NO_ROOM,
    PRESENT,
    STORED,
    counters,
    host_slots,
    on_nvme_only,
    rows_of,
    tokens,
)

from kvstore.layout import BlockLayout
from kvstore.store import READY
from kvstore.types import NamespaceKind

HOST_ONLY = {"nvme.enabled": False}


@pytest.fixture
def full(make_harness):
    """(harness, namespace, engine, chains): thirty chains of 4 blocks fill the host tier."""
    harness = make_harness(HOST_ONLY)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    room = harness.store.host_tier.room(LAYOUT.slot_bytes)
    chains = [harness.chain(space, tokens(4, seed=seed)) for seed in range(30)]
    for chain in chains:
        assert harness.wait(engine.store(space, chain)) == [STORED] * 4
        harness.sleep(0.1)
    rest = harness.chain(space, tokens(room - 120, seed=99))
    assert set(harness.wait(engine.store(space, rest))) == {STORED}
    assert harness.store.host_tier.room(LAYOUT.slot_bytes) == 0
    harness.sleep(1)
    return harness, space, engine, chains


def lengths(harness, space, chains):
    """Blocks of each chain that the directory still finds."""
    engine = harness.engine("looks")
    return [harness.wait(engine.read_directory(space, chain)) for chain in chains]


def test_the_least_recently_used_leaves_go_first(full):
    harness, space, engine, chains = full
    new = harness.chain(space, tokens(8, seed=50))
    assert harness.wait(engine.store(space, new)) == [STORED] * 8
    left = lengths(harness, space, chains)
    assert sum(left) < 120
    assert left == sorted(left), "older chains lost more"
    assert left[-1] == 4
    states = harness.store.catalog.host_state
    for chain in chains:  # of each chain a prefix is left: what went, went from its end
        found = states[rows_of(harness, chain)] == READY
        assert not (np.diff(found.astype(int)) > 0).any()


def test_misses_evict_nothing_and_take_no_slots(full):
    """POL-6, whether nothing or a prefix is stored."""
    harness, space, engine, _ = full
    before = (
        host_slots(harness),
        counters(harness, "dropped_blocks:evicted"),
        len(harness.store.catalog),
    )
    for seed in range(100):
        assert harness.wait(
            engine.load([(space, harness.chain(space, tokens(6, seed=200 + seed)))])
        ) == [0]
    longer = harness.chain(space, tokens(9, seed=3))
    assert harness.wait(engine.load([(space, longer)])) == [4]
    assert before == (
        host_slots(harness),
        counters(harness, "dropped_blocks:evicted"),
        len(harness.store.catalog),
    )


def test_what_is_used_stays(full):
    harness, space, engine, chains = full
    assert harness.wait(engine.load([(space, chains[0])])) == [4]
    for seed in range(50, 56):
        harness.wait(engine.store(space, harness.chain(space, tokens(4, seed=seed))))
    left = lengths(harness, space, chains)
    assert left[0] == 4
    assert left[1] < 4


def test_leased_blocks_stay_whatever_it_costs(full):
    harness, space, engine, chains = full
    for chain in chains:
        harness.wait(engine.match([(space, chain)]))
    statuses = harness.wait(engine.store(space, harness.chain(space, tokens(40, seed=50))))
    assert STORED in statuses
    assert NO_ROOM in statuses
    assert lengths(harness, space, chains) == [4] * 30


def test_pinned_blocks_and_their_ancestors_stay(full):
    harness, space, engine, chains = full
    (row,) = rows_of(harness, chains[0])[2:3]
    harness.store.catalog.pins[row] += 1
    for seed in range(50, 60):
        harness.wait(engine.store(space, harness.chain(space, tokens(12, seed=seed))))
    assert lengths(harness, space, chains)[0] >= 3
    harness.store.catalog.pins[row] -= 1


def test_parents_of_blocks_being_filled_stay(full):
    harness, space, engine, _ = full
    longer = harness.chain(space, tokens(6))
    held = harness.wait(engine.reserve(space, longer))
    for seed in range(50, 60):
        harness.wait(engine.store(space, harness.chain(space, tokens(12, seed=seed))))
    engine.fill(space, held)
    assert harness.wait(engine.commit(held)) == [STORED] * 2
    assert harness.wait(engine.read_directory(space, longer)) == 6


def test_a_tier_full_of_leases_says_no_room_and_heals(full):
    """HOST-14."""
    harness, space, engine, _ = full
    everything = harness.store.catalog.rows_end
    lease = harness.store.leases.grant(1, np.arange(everything), harness.service.now(), 5.0)
    new = harness.chain(space, tokens(4, seed=50))
    assert harness.wait(engine.store(space, new)) == [NO_ROOM] * 4
    assert harness.wait(engine.reserve_anonymous(space, 2)).reservation == 0
    harness.store.leases.release(1, lease, harness.service.now())
    assert harness.wait(engine.store(space, new)) == [STORED] * 4


def test_dropping_what_was_not_written_is_counted(make_harness):
    harness = make_harness({"nvme.write_bytes_per_day": 24})
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    room = harness.store.host_tier.room(LAYOUT.slot_bytes)
    harness.wait(engine.store(space, harness.chain(space, tokens(room))))
    harness.wait(engine.store(space, harness.chain(space, tokens(16, seed=1))))
    evicted, unwritten = counters(
        harness, "dropped_blocks:evicted", "dropped_blocks:dropped_before_write"
    )
    assert (evicted, unwritten) == (0, 16), "each once"


# ------------------------------------------------------------------ sizes


def test_a_starving_size_gets_its_share_and_no_more(make_harness):
    """HOST-14, mixed sizes: 8 slabs; each of two sizes ends with at least three of them."""
    harness = make_harness(HOST_ONLY)
    small, large = harness.declare("a", LAYOUT), harness.declare("b", LARGE)
    engine, pool = harness.engine(), harness.store.host_tier.pool

    def slabs():
        return [len(pool.slabs_of_class(size)) for size in (LAYOUT.slot_bytes, LARGE.slot_bytes)]

    for seed in range(16):
        harness.wait(engine.store(small, harness.chain(small, tokens(8, seed=seed))))
        harness.sleep(0.1)
    assert slabs() == [8, 0]
    for seed in range(30):
        chain = harness.chain(large, tokens(2, seed=seed))
        assert set(harness.wait(engine.store(large, chain))) <= {STORED}
        harness.sleep(0.1)
    assert slabs() == [4, 4]
    for seed in range(100, 130):
        chain = harness.chain(small, tokens(8, seed=seed))
        assert set(harness.wait(engine.store(small, chain))) == {STORED}
        harness.sleep(0.1)
    assert slabs() == [4, 4]


def test_the_slab_worth_least_is_taken(make_harness):
    harness = make_harness(HOST_ONLY)
    small, large = harness.declare("a", LAYOUT), harness.declare("b", LARGE)
    engine = harness.engine()
    chains = [harness.chain(small, tokens(16, seed=seed)) for seed in range(7)]
    for chain in chains:
        harness.wait(engine.store(small, chain))
        harness.sleep(1)
    harness.wait(engine.store(small, harness.chain(small, tokens(12, seed=90))))
    harness.sleep(1)
    for used in (0, 1, 3, 4, 5, 6):
        assert harness.wait(engine.load([(small, chains[used])])) == [16]
    harness.wait(engine.store(large, harness.chain(large, tokens(2))))
    left = lengths(harness, small, chains)
    assert left[2] < 16
    assert sum(left) - left[2] >= 6 * 16 - 1


@pytest.mark.parametrize("hold", ["leased", "being filled", "pinned"])
def test_a_slab_that_holds_something_held_is_not_taken(make_harness, hold):
    harness = make_harness(HOST_ONLY)
    small, large = harness.declare("a", LAYOUT), harness.declare("b", LARGE)
    engine = harness.engine()
    room = harness.store.host_tier.room(LAYOUT.slot_bytes)
    chain = harness.chain(small, tokens(room))
    if hold == "being filled":
        harness.wait(engine.reserve(small, chain))
    else:
        harness.wait(engine.store(small, chain))
    if hold == "leased":
        harness.wait(engine.match([(small, chain)]))
    if hold == "pinned":
        harness.store.catalog.pins[rows_of(harness, chain)] += 1
    assert harness.wait(engine.store(large, harness.chain(large, tokens(2)))) == [NO_ROOM] * 2
    if hold == "pinned":
        harness.store.catalog.pins[rows_of(harness, chain)] -= 1
        harness.sleep(0.1)
        assert harness.wait(engine.store(large, harness.chain(large, tokens(2)))) == [STORED] * 2


def test_taking_a_slab_leaves_nobody_without_a_way(make_harness):
    """I5: descendants elsewhere of the blocks in it go along, unless something holds them: then
    the slab stays.
    """
    harness = make_harness(HOST_ONLY)
    small, large = harness.declare("a", LAYOUT), harness.declare("b", LARGE)
    engine = harness.engine()
    trunk = harness.chain(small, tokens(16))
    harness.wait(engine.store(small, trunk))  # one slab
    branches = [harness.chain(small, [*tokens(16), *tokens(4, seed=seed)]) for seed in range(1, 28)]
    for branch in branches:
        harness.wait(engine.store(small, branch))
    harness.sleep(10)
    leased = branches[20]
    lease = harness.wait(engine.match([(small, leased)]))
    rows = rows_of(harness, leased)[:16]
    harness.store.catalog.leases[rows] -= 1  # only the branch itself is held
    for seed in range(6):
        harness.wait(engine.store(large, harness.chain(large, tokens(2, seed=seed))))
        harness.check_bytes()
    assert harness.wait(engine.read_directory(small, leased)) == 20
    harness.store.catalog.leases[rows] += 1
    harness.wait(engine.release(lease))


def test_flat_blocks_make_room_alone(make_harness):
    harness = make_harness(HOST_ONLY)
    space, engine = harness.declare("f", LAYOUT, kind=NamespaceKind.FLAT), harness.engine()
    for seed in range(20):
        chain = harness.chain(space, tokens(12, seed=seed))
        assert harness.wait(engine.store(space, chain)) == [STORED] * 12
        harness.sleep(0.1)
    assert host_slots(harness)["ready"] > 110


def test_staging_is_kept_from_stores(make_harness):
    harness = make_harness({"host.staging_slots_min": 8})
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(8))
    on_nvme_only(harness, space, chain, engine)
    room = harness.store.host_tier.room(LAYOUT.slot_bytes)
    rest = harness.chain(space, tokens(room, seed=1))
    assert harness.wait(engine.store(space, rest)) == [STORED] * room
    assert room == 120
    harness.wait(engine.match([(space, rest)]))
    assert harness.wait(engine.store(space, harness.chain(space, tokens(1, seed=2)))) == [NO_ROOM]
    assert harness.wait(engine.load([(space, chain)])) == [8]
    assert harness.wait(engine.store(space, chain)) == [PRESENT] * 8


# ------------------------------------------------------------------ chains that grow


def test_a_growing_chain_does_not_lose_its_end_to_its_own_next_block(full):
    """Slots are granted before they are named: nobody says what the next block will hang on."""
    harness, space, engine, chains = full
    growing = harness.chain(space, tokens(12, seed=60))
    held = harness.wait(engine.reserve_anonymous(space, 1))
    for block in range(12):
        held.names = [bytes(growing[block])]
        engine.fill(space, held)
        parent = growing.parent_of(block)
        assert harness.wait(engine.commit(held, parent=parent, end=True)) == [STORED], block
        for chain in chains:  # all others are used since
            harness.wait(engine.load([(space, chain)]))
        harness.sleep(0.1)
        held = harness.wait(engine.reserve_anonymous(space, 1))
        assert held.reservation
    assert harness.wait(engine.read_directory(space, growing)) == 12


@pytest.mark.parametrize("anonymous", [False, True])
def test_growing_chains_do_not_lose_their_ends_to_each_other(full, anonymous):
    harness, space, engine, chains = full
    growing = [harness.chain(space, tokens(8, seed=60 + number)) for number in range(3)]
    for block in range(8):
        for grown in growing:
            stored = engine.store(space, grown, block, block + 1, anonymous=anonymous)
            assert harness.wait(stored) == [STORED], block
            for chain in chains:
                harness.wait(engine.load([(space, chain)]))
            harness.sleep(0.1)
    assert lengths(harness, space, growing) == [8] * 3


def test_a_chain_that_fills_all_room_is_whole_and_then_makes_room_for_others(make_harness):
    harness = make_harness(HOST_ONLY)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    room = harness.store.host_tier.room(LAYOUT.slot_bytes)
    longest = harness.chain(space, tokens(room + 2))
    assert harness.wait(engine.store(space, longest, 0, room, anonymous=True)) == [STORED] * room
    assert harness.wait(engine.reserve_anonymous(space, 1)).reservation == 0
    assert harness.wait(engine.store(space, longest, room, room + 1)) == [NO_ROOM]
    assert harness.wait(engine.read_directory(space, longest)) == room
    other = harness.chain(space, tokens(3, seed=1))
    assert harness.wait(engine.store(space, other)) == [STORED] * 3
    assert harness.wait(engine.read_directory(space, longest)) == room - 3


def test_blocks_below_the_smallest_slot_are_stored_like_all(make_harness):
    harness = make_harness(HOST_ONLY)
    layout = BlockLayout(4, 1, 1000)
    assert layout.slot_bytes < harness.config.host.slot_bytes_min
    space, engine = harness.declare("small", layout), harness.engine()
    chain = harness.chain(space, tokens(3))
    assert harness.wait(engine.store(space, chain, anonymous=True)) == [STORED] * 3
    assert harness.wait(engine.read_directory(space, chain)) == 3
