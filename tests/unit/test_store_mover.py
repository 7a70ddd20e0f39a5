"""Promotion from NVMe: shared, verified, bounded, and never into a slot that is somebody else's."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from store_kit import (
    LARGE,
    LAYOUT,
    STORED,
    counters,
    drop_from_host,
    dropped,
    held_slots,
    host_slots,
    on_nvme_only,
    rows_of,
    tokens,
)

from kvstore.errors import LeaseUnknown, TierIO, Unavailable
from kvstore.layout import BlockLayout
from kvstore.matching import GroupMatch
from kvstore.mover import Mover
from kvstore.promotion import LAYERS
from kvstore.slab import SlotState
from kvstore.testing.faults import Fail
from kvstore.tier.parts import runs_of
from kvstore.types import NamespaceKind

BROKEN = Fail(TierIO("broken on purpose"))


class Reads:
    """Sees every read of the disk; `fail` names the ones that break, counted from 1."""

    def __init__(self, harness):
        self.offsets = []
        self.fail = set()
        harness.decide = self

    def __call__(self, operation):
        if operation.kind != "read":
            return None
        self.offsets.append(operation.offset)
        return BROKEN if len(self.offsets) in self.fail else None


@pytest.fixture
def space(harness):
    return harness.declare("a", LAYOUT)


@pytest.fixture
def engine(harness):
    return harness.engine()


def damage(harness, chain, block):
    """Change one payload byte of a stored block on the disk."""
    (row,) = rows_of(harness, chain)[block : block + 1]
    segments = harness.store.nvme._segments
    slot = int(harness.store.catalog.nvme_slot[row])
    path = segments._table[segments.geometry.segment_of(slot)].path
    with path.open("r+b") as file:
        file.seek(segments.geometry.offset_of(slot, 3 * 4096) + 4096 + 5000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


# ------------------------------------------------------------------ shared


def test_a_block_is_read_once_whoever_waits(harness, space, engine):
    chain, other = harness.chain(space, tokens(6)), harness.engine("other")
    on_nvme_only(harness, space, chain, engine)
    reads = Reads(harness)

    async def all_at_once():
        return await asyncio.gather(
            engine.load([(space, chain)]),
            other.load([(space, chain)], layer_order=True),
            other.load([(space, harness.chain(space, tokens(3)))]),
        )

    assert harness.wait(all_at_once()) == [[6], [6], [3]]
    assert len(reads.offsets) == 6
    assert counters(harness, "bytes_promoted") == [6 * LAYOUT.block_bytes]
    assert harness.wait(engine.read_directory(space, chain)) == 6


def test_who_comes_late_gets_what_is_there_and_waits_for_the_rest(make_harness):
    harness = make_harness(job_seconds=lambda random: 0.01)
    space, engine, other = harness.declare("a", LARGE), harness.engine(), harness.engine("b")
    chain = harness.chain(space, tokens(4))
    on_nvme_only(harness, space, chain, engine)
    reads = Reads(harness)

    async def one_after_the_other():
        first = harness.loop.create_task(engine.load([(space, chain)], layer_order=True))
        await asyncio.sleep(0.035)
        second = await other.load([(space, chain)])
        return await first, second

    assert harness.wait(one_after_the_other()) == ([4], [4])
    assert len(reads.offsets) == 4 * 8


def test_the_copy_below_stays(harness, space, engine):
    chain = harness.chain(space, tokens(3))
    on_nvme_only(harness, space, chain, engine)
    assert harness.wait(engine.load([(space, chain)])) == [3]
    drop_from_host(harness, chain)
    assert harness.wait(engine.load([(space, chain)])) == [3]


# ------------------------------------------------------------------ failures


def test_damage_ends_the_prefix_there_and_leaves(harness, space, engine):
    """I10, NVME-7: a miss for that block and what follows it, nothing for the others."""
    chain = harness.chain(space, tokens(5))
    on_nvme_only(harness, space, chain, engine)
    damage(harness, chain, 2)
    assert harness.wait(engine.load([(space, chain)])) == [2]
    harness.sleep(1)
    assert dropped(harness) == {"checksum": 3, "evicted": 5}
    assert harness.wait(engine.load([(space, chain)])) == [2]
    assert harness.wait(engine.exists(space, chain))[1].astype(bool).tolist() == [1, 1, 0, 0, 0]
    assert harness.wait(engine.store(space, chain, 2)) == [STORED] * 3


@pytest.mark.parametrize("layer_order", [False, True])
@pytest.mark.parametrize("failing", [1, 3, 5])
def test_a_failed_read_is_a_miss_and_the_rest_arrives(harness, engine, layer_order, failing):
    space = harness.declare("f", LAYOUT, kind=NamespaceKind.FLAT)
    chain = harness.chain(space, tokens(5))
    on_nvme_only(harness, space, chain, engine)
    reads = Reads(harness)
    reads.fail = {failing}
    lease = harness.wait(engine.match([(space, chain)]))
    assert harness.wait(engine.bring_up(lease, layer_order=layer_order)) == "failed"
    whole = [parts == lease.groups[0].layout.all_parts for parts in lease.groups[0].parts]
    assert whole.count(False) == 1
    assert not harness.service.mover.is_busy
    harness.wait(engine.release(lease))
    harness.sleep(1)
    assert held_slots(harness) == 4
    assert harness.wait(engine.exists(space, chain))[1].astype(bool).tolist() == whole


def test_a_slot_is_not_reused_while_reads_into_it_are_running(harness, engine):
    """One read of a block fails while another one is in the middle of its copy, on real threads:
    until that ends the slot is nobody's, for it would overwrite whoever got it.
    """
    space = harness.declare("a", LARGE)
    chain = harness.chain(space, tokens(1))
    on_nvme_only(harness, space, chain, engine)
    harness.wait(engine.match([(space, chain)]))
    store, pool = harness.store, harness.store.host_tier.pool
    is_held, may_end = threading.Event(), threading.Event()

    def second_waits_first_fails(operation):
        if operation.kind == "read" and operation.number == first + 2:
            is_held.set()
            assert may_end.wait(20)
        elif operation.kind == "read" and operation.number == first + 1:
            assert is_held.wait(20)
            return BROKEN
        return None

    async def load():
        mover = Mover(store, harness.service.writes._room, workers, 2, harness.clock.monotonic)
        groups = [GroupMatch(space, 0, rows_of(harness, chain))]
        stream = await mover.open_load(groups, order=LAYERS, deadline=1e9)
        slot = int(store.catalog.host_slot[rows_of(harness, chain)[0]])
        while not stream.failed:
            await asyncio.sleep(0.001)
        assert pool.states_of([slot]).tolist() == [SlotState.FILLING]
        assert slot not in store.host_tier.take(LARGE.slot_bytes, 999, staging=True)
        may_end.set()
        while mover.is_busy:
            await asyncio.sleep(0.001)
        return pool.states_of([slot]).tolist()

    first = harness.io.counts["read"]
    harness.decide = second_waits_first_fails
    with ThreadPoolExecutor(2) as workers:
        assert asyncio.run(load()) == [SlotState.FREE]
    taken = pool.slots_of_class(LARGE.slot_bytes)
    store.host_tier.free(taken[pool.states_of(taken) == SlotState.FILLING])


def test_the_last_read_may_be_the_one_that_fails(harness, space, engine):
    """The blocks before it were whole; nobody waits for them to the deadline."""
    chain = harness.chain(space, tokens(4))
    on_nvme_only(harness, space, chain, engine)
    reads = Reads(harness)
    reads.fail = {4}
    before = harness.service.now()
    assert harness.wait(engine.load([(space, chain)], deadline_seconds=20)) == [3]
    assert harness.service.now() - before < 1
    assert not harness.service.mover.is_busy
    assert "loads from NVMe" in " ".join(harness.service.health())
    harness.sleep(61)
    assert "loads from NVMe" not in " ".join(harness.service.health())


def test_a_shutting_down_pool_makes_misses(harness, space, engine):
    chain = harness.chain(space, tokens(40))
    on_nvme_only(harness, space, chain, engine)

    async def shut_down():
        load = harness.loop.create_task(engine.load([(space, chain)]))
        await asyncio.sleep(0)
        harness.service.mover._workers.shutdown()
        return await load

    blocks = harness.wait(shut_down())[0]
    assert blocks < 40
    harness.service.mover.close()
    with pytest.raises(Unavailable):
        harness.wait(engine.load([(space, chain)]))


# ------------------------------------------------------------------ who gives up


def test_a_load_given_up_ends_for_the_others_all_the_same(harness, space, engine):
    chain, other = harness.chain(space, tokens(6)), harness.engine("other")
    on_nvme_only(harness, space, chain, engine)

    async def give_up():
        load = harness.loop.create_task(engine.load([(space, chain)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        return await other.load([(space, chain)])

    assert harness.wait(give_up()) == [6]
    harness.sleep(1)
    assert not harness.service.mover.is_busy
    assert not harness.store.catalog.pins.any()
    assert host_slots(harness)["filling"] == 0


def test_a_load_given_up_while_it_waits_for_room_keeps_nothing(harness, engine):
    """Two groups: the first one's promotions exist, the second one waits; then the caller dies."""
    small, large = harness.declare("a", LAYOUT), harness.declare("b", LARGE)
    a, b = harness.chain(small, tokens(2)), harness.chain(large, tokens(2))
    on_nvme_only(harness, small, a, engine)
    on_nvme_only(harness, large, b, engine)
    kept = harness.chain(small, tokens(1, seed=1))
    harness.wait(engine.store(small, kept))
    harness.wait(engine.match([(small, kept)]))
    taken = []
    while slots := harness.store.host_tier.take(LARGE.slot_bytes, 1, staging=True):
        taken += slots
    lease = harness.wait(engine.match([(small, a), (large, b)]))
    assert lease.boundary_tokens == 8

    async def give_up():
        # In layer order nothing is read before every group has its slots.
        load = harness.loop.create_task(engine.bring_up(lease, layer_order=True))
        await asyncio.sleep(0.1)
        assert harness.service.mover.is_busy
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        await asyncio.sleep(0.1)

    harness.wait(give_up())
    assert not harness.service.mover.is_busy
    assert not harness.store.catalog.pins.any()
    assert harness.wait(engine.read_directory(small, a)) == 2
    harness.store.host_tier.free(taken)


def test_a_lease_that_ends_while_its_load_waits_brings_up_no_other_block(make_harness):
    """Rows of the wait are held: they cannot become other blocks' rows."""
    harness = make_harness({"lease.read_seconds": 1.0, "nvme.queue_blocks_max": 1})
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    other = harness.engine("other")
    chain = harness.chain(space, tokens(3))
    on_nvme_only(harness, space, chain, engine)
    everything = []
    while slots := harness.store.host_tier.take(LAYOUT.slot_bytes, 64, staging=True):
        everything += slots

    async def late_room():
        lease = await engine.match([(space, chain)])
        load = harness.loop.create_task(engine.bring_up(lease, deadline_seconds=30))
        await asyncio.sleep(5)
        await harness.service.delete(space, bytes(chain[0]))
        await asyncio.sleep(1)
        harness.store.host_tier.free(everything)
        await other.store(space, harness.chain(space, tokens(20, seed=9)))
        await load
        return lease

    lease = harness.wait(late_room())
    assert lease.groups[0].whole == 0
    harness.sleep(1)
    assert rows_of(harness, chain).tolist() == [-1] * 3


def test_a_lease_of_another_client_loads_nothing(harness, space, engine):
    chain, other = harness.chain(space, tokens(2)), harness.engine("other")
    on_nvme_only(harness, space, chain, engine)
    lease = harness.wait(engine.match([(space, chain)]))
    with pytest.raises(LeaseUnknown):
        harness.wait(other.bring_up(lease))


# ------------------------------------------------------------------ room and deadlines


def test_a_load_larger_than_the_room_is_cut(make_harness):
    """HOST-13: what is promised fits; the rest is said to be for want of capacity."""
    harness = make_harness({"host.bytes": 256 << 10, "host.region_bytes": 256 << 10})
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(60))
    for start in range(0, 60, 20):
        assert set(harness.wait(engine.store(space, chain, start, start + 20))) == {STORED}
        assert all(harness.wait(engine.flush(space, harness.chain(space, tokens(start + 20)))))
    drop_from_host(harness, chain)
    lease = harness.wait(engine.match([(space, chain)]))
    assert harness.wait(engine.bring_up(lease)) == "capacity"
    assert lease.groups[0].whole == 32
    harness.wait(engine.release(lease))
    assert harness.wait(engine.load([(space, harness.chain(space, tokens(30)))])) == [30]


@pytest.mark.parametrize("hold", ["lease", "idle"])
def test_loads_progress_through_a_full_host_tier(make_harness, hold):
    """HOST-13: full of idle blocks, or of leased ones (then through the staging share)."""
    harness = make_harness({"host.staging_slots_min": 4})
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(3))
    on_nvme_only(harness, space, chain, engine)
    rest = harness.chain(space, tokens(harness.store.host_tier.room(8192), seed=1))
    assert set(harness.wait(engine.store(space, rest))) == {STORED}
    if hold == "lease":
        harness.wait(engine.match([(space, rest)]))
    assert harness.store.host_tier.room(8192) == 0
    assert harness.wait(engine.load([(space, chain)])) == [3]


def test_a_load_without_room_ends_at_its_deadline(make_harness):
    """HOST-12."""
    harness = make_harness()
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(3))
    on_nvme_only(harness, space, chain, engine)
    taken = []
    while slots := harness.store.host_tier.take(LAYOUT.slot_bytes, 64, staging=True):
        taken += slots
    before = harness.service.now()
    lease = harness.wait(engine.match([(space, chain)]))
    assert harness.wait(engine.bring_up(lease, deadline_seconds=1.5)) == "capacity"
    assert 1.4 < harness.service.now() - before < 2
    assert lease.groups[0].whole == 0

    async def room_comes():
        load = harness.loop.create_task(engine.bring_up(lease, deadline_seconds=5))
        await asyncio.sleep(1)
        harness.store.host_tier.free(taken)
        await load

    harness.wait(room_comes())
    assert lease.groups[0].whole == 3


def test_a_frozen_disk_ends_the_wait_not_the_block(make_harness):
    slow = {"now": 0.001}
    harness = make_harness(job_seconds=lambda random: slow["now"])
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(3))
    on_nvme_only(harness, space, chain, engine)
    slow["now"] = 20.0
    lease = harness.wait(engine.match([(space, chain)]))
    assert harness.wait(engine.bring_up(lease, deadline_seconds=1.0)) == "deadline"
    slow["now"] = 0.001
    harness.sleep(60)
    assert harness.wait(engine.read_directory(space, chain)) == 3


def test_blocks_on_their_way_have_a_bound(make_harness):
    """I9: limits.jobs_inflight_max; a load past it is shortened, and later ones are not."""
    harness = make_harness({"limits.jobs_inflight_max": 4})
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(10))
    on_nvme_only(harness, space, chain, engine)
    assert [harness.wait(engine.load([(space, chain)])) for _ in range(3)] == [[4], [8], [10]]


# ------------------------------------------------------------------ order


def test_layer_order_reads_the_first_layers_of_all_blocks_first(make_harness):
    harness = make_harness({"nvme.readers": 1})
    space, engine = harness.declare("a", LARGE), harness.engine()
    chain = harness.chain(space, tokens(3))
    on_nvme_only(harness, space, chain, engine)
    reads = Reads(harness)
    assert harness.wait(engine.load([(space, chain)], layer_order=True)) == [3]
    slot_bytes = LARGE.block_bytes + 4096
    layers = [(offset % slot_bytes) // 4096 - 1 for offset in reads.offsets]
    assert layers == [layer for layer in range(8) for _ in range(3)]


def test_block_order_reads_whole_blocks_from_the_root(make_harness):
    harness = make_harness({"nvme.readers": 1})
    space, engine = harness.declare("a", LARGE), harness.engine()
    chain = harness.chain(space, tokens(4))
    on_nvme_only(harness, space, chain, engine)
    reads = Reads(harness)
    lease = harness.wait(engine.match([(space, chain)]))
    harness.wait(engine.bring_up(lease))
    rows = rows_of(harness, chain)
    slot_bytes = LARGE.block_bytes + 4096
    segments = harness.store.nvme._segments.geometry
    wanted = [
        segments.offset_of(int(slot), slot_bytes) + 4096
        for slot in harness.store.catalog.nvme_slot[rows]
    ]
    assert reads.offsets == wanted


def test_parts_are_read_together_up_to_a_size():
    assert [len(run) for run in runs_of(LARGE.parts)] == [8]
    large = BlockLayout(16, 8, 1 << 20)
    assert [len(run) for run in runs_of(large.parts)] == [2, 2, 2, 2]
    ragged = BlockLayout(16, 1, 5000, ranks=3)
    assert [len(run) for run in runs_of(ragged.parts)] == [3]


def test_a_clear_on_the_way_publishes_nothing(make_harness):
    slow = {"now": 0.001}
    harness = make_harness(job_seconds=lambda random: slow["now"])
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(3))
    on_nvme_only(harness, space, chain, engine)

    async def clear():
        slow["now"] = 0.1
        lease = await engine.match([(space, chain)])
        load = harness.loop.create_task(engine.bring_up(lease))
        await asyncio.sleep(0.01)
        slow["now"] = 0.001
        await harness.service.clear(space)
        reason = await load
        await engine.release(lease)
        return reason

    assert harness.wait(clear()) == "failed"
    harness.sleep(1)
    assert held_slots(harness) == 0
    assert len(harness.store.catalog) == 0
