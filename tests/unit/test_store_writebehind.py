"""Copies to NVMe: ancestors first, within bounds, durable when said, whatever the disk does."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from store_kit import (
    LARGE,
    LAYOUT,
    STORED,
    counters,
    drop_from_host,
    on_nvme_only,
    rows_of,
    tokens,
)

from kvstore import writebehind
from kvstore.errors import Overloaded, TierFull, TierIO
from kvstore.nvme_room import WriteBudget
from kvstore.store import ABSENT, READY
from kvstore.testing.faults import Fail, never
from kvstore.types import NamespaceKind

BROKEN, FULL = Fail(TierIO("broken on purpose")), Fail(TierFull("full on purpose"))
TINY_DISK = {"nvme.bytes_max": 768 << 10}


@pytest.fixture
def space(harness):
    return harness.declare("a", LAYOUT)


@pytest.fixture
def engine(harness):
    return harness.engine()


def on_nvme(harness, chain):
    rows = rows_of(harness, chain)
    return [row >= 0 and int(harness.store.catalog.nvme_state[row]) == READY for row in rows]


def restarted(harness, label="a", layout=LAYOUT):
    harness.crash()
    harness.start()
    return harness.declare(label, layout), harness.engine()


# ------------------------------------------------------------------ what durable means


def test_what_flush_calls_durable_is_there_after_a_kill(harness, space, engine):
    chain = harness.chain(space, tokens(20))
    harness.wait(engine.store(space, chain))
    assert harness.wait(engine.flush(space, chain)) == [True] * 20
    space, engine = restarted(harness)
    assert harness.recovered.kept == 20
    assert harness.wait(engine.load([(space, chain)])) == [20]


def test_what_was_not_flushed_may_be_lost_but_never_half(make_harness):
    harness = make_harness(commit_seconds=lambda random: 5.0)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(20))
    harness.wait(engine.store(space, chain))
    harness.sleep(1)
    assert harness.wait(engine.flush(space, chain, 0.5)) == [False] * 20
    space, engine = restarted(harness)
    assert harness.recovered.kept == 0
    assert harness.wait(engine.load([(space, chain)])) == [0]


def test_without_a_disk_nothing_is_durable(make_harness):
    harness = make_harness({"nvme.enabled": False})
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(2))
    harness.wait(engine.store(space, chain))
    assert harness.wait(engine.flush(space, chain)) == [False, False]


def test_flush_takes_the_ancestors_along_and_says_no_for_strangers(harness, space, engine):
    chain = harness.chain(space, tokens(6))
    other = harness.declare("b", LAYOUT)
    harness.wait(engine.store(space, chain))
    tail = harness.chain(space, tokens(6))
    tail._joined[:] = tail.part(4, 6) + b"x" * 32
    assert harness.wait(engine.flush(space, tail)) == [True, True, False]
    assert on_nvme(harness, chain) == [True] * 6
    assert harness.wait(engine.flush(other, chain)) == [False] * 6


# ------------------------------------------------------------------ ancestors first


@pytest.mark.parametrize("fails", [False, True])
def test_a_long_ancestry_is_written_in_batches(make_harness, monkeypatch, fails):
    """Of a chain whose blocks found the queue full, one is flushed; what fails takes the rest."""
    harness = make_harness({"nvme.queue_blocks_max": 1})
    monkeypatch.setattr(writebehind, "BATCH_BLOCKS_MAX", 4)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(18))
    harness.wait(engine.store(space, chain))
    harness.settle()
    batches = []
    write = harness.service.write_behind._write

    async def noted(rows):
        batches.append(len(rows))
        if fails and len(batches) == 2:
            harness.decide = lambda operation: BROKEN if operation.kind == "write" else None
        await write(rows)
        harness.decide = never

    monkeypatch.setattr(harness.service.write_behind, "_write", noted)
    last = harness.chain(space, tokens(18))
    last._joined[:] = last[17]
    assert harness.wait(engine.flush(space, last)) == [not fails]
    assert max(batches) == 4
    assert sum(on_nvme(harness, chain)) == (5 if fails else 18)


def test_at_no_moment_is_a_block_on_nvme_without_its_parent(make_harness):
    harness = make_harness({"host.bytes": 2 << 20, "host.region_bytes": 2 << 20})
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chains = [harness.chain(space, [*tokens(5), *tokens(6, seed=seed)]) for seed in (1, 2, 3)]

    async def watch():
        for chain in chains:
            await engine.store(space, chain)
        while harness.service.write_behind.queued_blocks:
            await asyncio.sleep(0.001)
            for chain in chains:
                durable = on_nvme(harness, chain)
                assert durable == sorted(durable, reverse=True)

    harness.wait(watch())
    assert all(all(on_nvme(harness, chain)) for chain in chains)


def test_a_parent_makes_no_room_for_its_child(make_harness):
    """The parent is the only leaf there is on a full NVMe tier: the child is not written then,
    rather than recorded behind a parent that is gone.
    """
    harness = make_harness(TINY_DISK)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    nvme = harness.store.nvme
    size = nvme.slot_bytes_for(LAYOUT.block_bytes)
    chain = harness.chain(space, tokens(nvme.room(size)))
    for stop in range(8, len(chain) + 8, 8):
        harness.wait(engine.store(space, chain, max(0, stop - 8), min(stop, len(chain))))
    assert all(harness.wait(engine.flush(space, chain)))
    assert nvme.room(size) == 0
    longer = harness.chain(space, tokens(len(chain) + 1))
    harness.wait(engine.store(space, longer))
    durable = harness.wait(engine.flush(space, longer))
    assert durable == sorted(durable, reverse=True)
    harness.check()
    space, engine = restarted(harness)
    assert harness.recovered.orphaned == 0
    assert harness.recovered.kept == sum(durable)


def test_what_lost_its_parent_is_not_written(harness, space, engine):
    chain = harness.chain(space, tokens(3))

    async def delete_on_the_way():
        await engine.store(space, chain)
        await asyncio.sleep(0)
        await harness.service.delete(space, bytes(chain[1]))

    harness.wait(delete_on_the_way())
    harness.settle()
    harness.sleep(1)
    space, engine = restarted(harness)
    assert harness.wait(engine.load([(space, chain)])) == [1]


# ------------------------------------------------------------------ bounds


def test_the_queue_has_a_bound(make_harness):
    """I9. Past it blocks stay in memory only, and that is counted."""
    harness = make_harness({"nvme.queue_blocks_max": 8}, tasks=False)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(40))
    harness.wait(engine.store(space, chain))
    assert harness.service.write_behind.queued_blocks == 8
    assert counters(harness, "write_skipped_blocks:queue_full") == [32]


def test_flushing_again_and_again_queues_nothing_twice(make_harness):
    """I9: a client that asks in a loop while nothing is written."""
    harness = make_harness(tasks=False)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(10))
    harness.wait(engine.store(space, chain))
    for _ in range(20):
        assert harness.wait(engine.flush(space, chain, 0.01)) == [False] * 10
    assert harness.service.write_behind.queued_blocks == 10


def test_a_write_budget_sheds_and_comes_back(make_harness):
    daily = 24 * 60 * 4 * LAYOUT.block_bytes  # four blocks a minute
    harness = make_harness({"nvme.write_bytes_per_day": daily, "policy.name": "lru"})
    space, engine = harness.declare("f", LAYOUT, kind=NamespaceKind.FLAT), harness.engine()
    chain = harness.chain(space, tokens(10))
    harness.wait(engine.store(space, chain))
    harness.settle()
    assert sum(on_nvme(harness, chain)) == 4
    assert counters(harness, "write_skipped_blocks:write_budget") == [6]
    harness.sleep(60)
    harness.wait(engine.flush(space, chain))
    assert sum(on_nvme(harness, chain)) == 8


class Counted(np.ndarray):
    """A column that counts how often one of its rows is read."""

    reads = 0

    def __getitem__(self, at):
        Counted.reads += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("why", ["write_budget", "no_parent", "gone"])
def test_what_cannot_be_written_costs_a_step_a_block(make_harness, monkeypatch, why):
    """However long the chain: the loop has others to serve."""
    blocks, look = 100, 25
    monkeypatch.setattr(writebehind, "LOOK_ROWS_MAX", look)
    daily = 24 * 60 * 4 * LAYOUT.block_bytes if why == "write_budget" else 0
    harness = make_harness({"nvme.write_bytes_per_day": daily, "policy.name": "lru"}, tasks=False)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(blocks))
    harness.wait(engine.store(space, chain))
    columns, behind = harness.store.catalog, harness.service.write_behind
    if why == "no_parent":
        columns.host_state[rows_of(harness, chain)[0]] = ABSENT
    elif why == "gone":
        harness.wait(harness.service.clear(space))
    assert behind.queued_blocks == blocks
    behind._budget.take(4 * LAYOUT.block_bytes, harness.service.now())
    monkeypatch.setattr(Counted, "reads", 0)
    monkeypatch.setattr(columns, "parent", columns.parent.view(Counted))
    steps = 0
    while behind._has_work:
        assert behind._next_batch() == []
        steps += 1
    assert steps == blocks // look
    assert Counted.reads <= 3 * blocks
    assert counters(harness, f"write_skipped_blocks:{why}")[0] >= blocks - 1
    columns.host_state[rows_of(harness, chain)[0]] = READY


def test_a_budget_is_spent_and_refilled():
    budget = WriteBudget(1.0, now=0.0)  # a minute's worth at once
    assert budget.take(60, 0.0)
    assert not budget.take(1, 0.5)
    assert budget.take(30, 30.0)
    assert not budget.take(31, 60.0)
    assert not budget.take(3601, 1e6), "an hour's worth is spared"
    assert budget.take(3600, 1e6)
    assert WriteBudget(0, 0.0).take(1 << 60, 0.0), "0: unlimited"


# ------------------------------------------------------------------ the disk says no


def test_a_failed_write_is_a_block_in_memory_only(harness, space, engine):
    chain = harness.chain(space, tokens(5))
    struck = []

    def third_write_fails(operation):
        if operation.kind == "write":
            struck.append(operation)
            return BROKEN if len(struck) == 3 else None
        return None

    harness.decide = third_write_fails
    harness.wait(engine.store(space, chain))
    harness.settle()
    durable = on_nvme(harness, chain)
    assert durable == sorted(durable, reverse=True)
    assert durable.count(True) in range(5)
    assert counters(harness, "write_skipped_blocks:io")[0] >= 1
    assert "broken on purpose" in " ".join(harness.service.health()), "OPS-4: it says so"
    assert harness.wait(engine.load([(space, chain)])) == [5]
    assert harness.wait(engine.flush(space, chain)) == [True] * 5
    assert "broken" not in " ".join(harness.service.health())


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_what_is_listed_in_a_tier_is_there_although_demotions_fail(make_harness, kind):
    """POL-5: every second one fails, while both tiers are too small for what comes."""
    harness = make_harness({**TINY_DISK, "host.staging_slots_min": 1})
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    struck = []

    def every_second_fails(operation):
        if operation.kind != kind:
            return None
        struck.append(operation)
        return BROKEN if len(struck) % 2 else None

    harness.decide = every_second_fails
    chains = [harness.chain(space, tokens(4, seed=seed)) for seed in range(60)]
    for chain in chains:
        harness.wait(engine.store(space, chain))
        harness.sleep(0.1)
    harness.settle()
    assert counters(harness, "write_skipped_blocks:io")[0] > 0
    harness.check()

    def listed_and_loaded(chain):
        """Leading blocks; a load compares every byte."""
        listed = harness.wait(engine.exists(space, chain))[0]
        assert harness.wait(engine.load([(space, chain)])) == [listed]
        return listed

    assert {0, 4} <= {listed_and_loaded(chain) for chain in chains}, "some left, some stay"
    for chain in chains:
        drop_from_host(harness, chain)
        listed_and_loaded(chain)


@pytest.mark.parametrize("kind", ["write", "sync", "open"])
@pytest.mark.parametrize("fault", [BROKEN, FULL], ids=["broken", "full"])
def test_a_disk_that_fails_for_a_while_heals(harness, space, engine, kind, fault):
    """NVME-10: stores go on in memory, and copies are made again afterwards."""
    chain = harness.chain(space, tokens(5))
    harness.decide = lambda operation: fault if operation.kind == kind else None
    assert harness.wait(engine.store(space, chain)) == [STORED] * 5
    harness.settle()
    assert on_nvme(harness, chain) == [False] * 5
    harness.decide = lambda operation: None
    harness.sleep(60)
    assert harness.wait(engine.flush(space, chain)) == [True] * 5


@pytest.mark.parametrize("error", [TierFull("full"), TierIO("broken")])
def test_an_index_that_refuses_records_ends_nothing(harness, space, engine, error):
    chain = harness.chain(space, tokens(5))

    def refuse():
        raise error

    harness.commits.fail = refuse
    harness.wait(engine.store(space, chain))
    harness.settle()
    assert on_nvme(harness, chain) == [False] * 5
    harness.commits.fail = lambda: None
    assert harness.wait(engine.flush(space, chain)) == [True] * 5
    assert harness.wait(engine.load([(space, chain)])) == [5]


def test_an_overloaded_index_ends_nothing(harness, space, engine, monkeypatch):
    chain = harness.chain(space, tokens(3))
    real = harness.store.nvme.record

    def overloaded(frames, slots):
        future = real([], [])
        future.result()
        refused = type(future)(lambda: None)
        refused.set_exception(Overloaded("too many"))
        return refused

    monkeypatch.setattr(harness.store.nvme, "record", overloaded)
    harness.wait(engine.store(space, chain))
    harness.settle()
    assert on_nvme(harness, chain) == [False] * 3
    monkeypatch.undo()
    assert harness.wait(engine.flush(space, chain)) == [True] * 3


def test_records_that_cannot_be_deleted_are_tried_again(harness, space, engine):
    """Their slots stay held meanwhile: a record never points to another block's bytes."""
    chain = harness.chain(space, tokens(4))
    on_nvme_only(harness, space, chain, engine)

    def refuse():
        raise TierFull("no room even for deletes")

    harness.commits.fail = refuse
    rows = rows_of(harness, chain)
    harness.call(harness.store.forget, rows[3:], "deleted", 0.0)
    harness.sleep(3)
    assert harness.store.nvme.pool.statistics().classes[0].ready == 4
    harness.commits.fail = lambda: None
    harness.sleep(3)
    assert harness.store.nvme.pool.statistics().classes[0].ready == 3


def test_damaged_memory_never_reaches_the_disk(harness, space, engine):
    """The bytes changed after commit: found before the write, condemned with what follows."""
    chain = harness.chain(space, tokens(3))

    async def scribble():
        await engine.store(space, chain)
        (row,) = rows_of(harness, chain)[1:2]
        harness.store.host_tier.view(int(harness.store.catalog.host_slot[row]), 1)[:] ^= 1
        await asyncio.sleep(2)

    harness.wait(scribble())
    assert harness.wait(engine.match([(space, chain)])).boundary_tokens == 4
    assert counters(harness, "dropped_blocks:checksum") == [2]


# ------------------------------------------------------------------ rows that change on the way


def test_rows_recycled_while_they_wait_are_other_blocks(make_harness):
    """The queue holds numbers of rows; what is written is what they are when their turn comes."""
    harness = make_harness(tasks=False)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    first, second = harness.chain(space, tokens(6)), harness.chain(space, tokens(6, seed=1))
    harness.wait(engine.store(space, first))
    numbers = set(rows_of(harness, first).tolist())
    drop_from_host(harness, first)
    harness.wait(engine.store(space, second))
    assert set(rows_of(harness, second).tolist()) == numbers
    harness.call(harness._start_tasks)
    assert harness.wait(engine.flush(space, second)) == [True] * 6
    space, engine = restarted(harness)
    assert harness.wait(engine.load([(space, second)])) == [6]
    assert harness.wait(engine.load([(space, first)])) == [0]


def test_a_flush_outlives_everything_being_cleared(make_harness):
    harness = make_harness(job_seconds=lambda random: 0.05)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chain = harness.chain(space, tokens(6))

    async def clear_under_it():
        await engine.store(space, chain)
        flush = harness.loop.create_task(engine.flush(space, chain, 10))
        await asyncio.sleep(0.07)
        await harness.service.clear(space)
        return await flush

    assert harness.wait(clear_under_it()) == [False] * 6
    harness.sleep(2)
    assert len(harness.store.catalog) == 0
    space, engine = restarted(harness)
    assert harness.wait(engine.load([(space, chain)])) == [0]


def test_a_flush_given_up_leaves_the_rest_going(harness, space, engine):
    chain = harness.chain(space, tokens(6))

    async def give_up():
        await engine.store(space, chain)
        flush = harness.loop.create_task(engine.flush(space, chain))
        await asyncio.sleep(0)
        flush.cancel()
        await asyncio.gather(flush, return_exceptions=True)

    harness.wait(give_up())
    assert harness.service.write_behind._flushes == 0
    harness.settle()
    assert on_nvme(harness, chain) == [True] * 6


def test_a_full_tier_gives_its_oldest_leaves(make_harness):
    harness = make_harness(TINY_DISK)
    space, engine = harness.declare("a", LAYOUT), harness.engine()
    chains = [harness.chain(space, tokens(4, seed=seed)) for seed in range(40)]
    for chain in chains:
        harness.wait(engine.store(space, chain))
        assert all(harness.wait(engine.flush(space, chain)))
        harness.sleep(0.1)
    assert counters(harness, "dropped_blocks:evicted")[0] > 0
    assert all(on_nvme(harness, chains[-1]))
    assert not all(on_nvme(harness, chains[0]))
    for chain in chains:
        durable = on_nvme(harness, chain)
        assert durable == sorted(durable, reverse=True)


def test_two_sizes_share_the_disk(harness, engine):
    small, large = harness.declare("s", LAYOUT), harness.declare("l", LARGE)
    a, b = harness.chain(small, tokens(8)), harness.chain(large, tokens(8))
    for at in range(8):
        harness.wait(engine.store(small, a, at, at + 1))
        harness.wait(engine.store(large, b, at, at + 1))
    assert harness.wait(engine.flush(small, a)) == [True] * 8
    assert harness.wait(engine.flush(large, b)) == [True] * 8
    assert (harness.store.catalog.nvme_state[rows_of(harness, a)] != ABSENT).all()


def test_draining_writes_what_waits(harness, space, engine):
    chain = harness.chain(space, tokens(30))
    harness.wait(engine.store(space, chain))
    harness.stop()
    harness.start()
    assert harness.recovered.kept == 30
    assert np.all(rows_of(harness, chain) >= 0)
