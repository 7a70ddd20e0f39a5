"""Catalog, leases and the search for victims against naive models."""

from __future__ import annotations

import random
from collections.abc import Generator
from itertools import count

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.catalog import ABSENT_ROW, Catalog
from kvstore.lease import LeaseTable
from kvstore.policy import LruLeaf, VictimPicker
from kvstore.slab import SlabPool
from kvstore.types import ReplicaState, Tier

ABSENT, READY = ReplicaState.ABSENT, ReplicaState.READY
PRESENT = [ReplicaState.FILLING, ReplicaState.COMMITTED, READY, ReplicaState.DRAINING]
SLOTS = 400
LEASE_SECONDS = 10.0


def whole(laws: Generator[None, None, bool]) -> bool:
    """Take every step; whether the check came to its end."""
    while True:
        try:
            next(laws)
        except StopIteration as end:
            return bool(end.value)


class Block:
    """What the model knows of a row."""

    def __init__(self, name: bytes, parent: bytes | None) -> None:
        self.name = name
        self.parent = parent
        self.replica: dict[Tier, tuple[ReplicaState, int]] = {}
        self.pins = 0


class CatalogMachine(RuleBasedStateMachine):
    """The model is a dict from name to Block, and a dict of leases."""

    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog(host_slots=SLOTS, nvme_slots=SLOTS)
        self.leases = LeaseTable(
            self.catalog, count(1).__next__, blocks_max=100, leases_per_client_max=100
        )
        self.now = 0.0
        self.blocks: dict[bytes, Block] = {}
        self.leased: dict[int, tuple[list[bytes], float]] = {}
        self.fresh = count()
        self.late = 0

    # ---------------------------------------------------------------- rules

    @rule(data=st.data(), length=st.integers(1, 5))
    def add_chain(self, data: st.DataObject, length: int) -> None:
        parent = data.draw(st.sampled_from([None, *self.blocks]))
        names = [next(self.fresh).to_bytes(32, "big") for _ in range(length)]
        row = ABSENT_ROW if parent is None else self.row(parent)
        columns = {"namespace": 1, "clear_count": 2, "depth": 3, "length": 4}
        rows = self.catalog.add_chain(b"".join(names), parent=row, **columns)
        assert self.catalog.depth[rows[-1]] == 3 + length - 1
        for name in names:
            self.blocks[name] = Block(name, parent)
            parent = name

    @rule(data=st.data(), width=st.integers(1, 6))
    def add_many(self, data: st.DataObject, width: int) -> None:
        names = [next(self.fresh).to_bytes(32, "big") for _ in range(width)]
        order = data.draw(st.permutations(range(width)))
        parents = [data.draw(st.integers(-1, place - 1)) for place in range(width)]
        at = {place: order.index(place) for place in range(width)}
        positions = np.array([at.get(parents[place], -1) for place in order])
        self.catalog.add_many(
            np.frombuffer(b"".join(names[place] for place in order), np.uint8).reshape(-1, 32),
            parents=positions,
            namespaces=1,
            clear_counts=2,
            depths=np.zeros(width, int),
            lengths=4,
        )
        for place, name in enumerate(names):
            parent = names[parents[place]] if parents[place] >= 0 else None
            self.blocks[name] = Block(name, parent)

    @precondition(lambda self: self.blocks)
    @rule(
        data=st.data(),
        tier=st.sampled_from([Tier.HOST, Tier.NVME]),
        state=st.sampled_from([ABSENT, *PRESENT]),
        moves=st.booleans(),
    )
    def set_replicas(
        self, data: st.DataObject, tier: Tier, state: ReplicaState, moves: bool
    ) -> None:
        names = self.some_names(data)
        if state == ReplicaState.DRAINING:
            names = [name for name in names if not self.leases_on(name)]
        change = self.catalog.set_host if tier == Tier.HOST else self.catalog.set_nvme
        rows = np.array([self.row(name) for name in names], np.int64)
        self.catalog.checksums[rows] = 1
        if state == ABSENT:
            change(rows, state)
            for name in names:
                self.blocks[name].replica.pop(tier, None)
            return
        held = [name for name in names if tier in self.blocks[name].replica]
        if len(held) == len(names) and not moves:
            change(rows, state)
            slots = [self.blocks[name].replica[tier][1] for name in names]
        else:
            slots = self.free_slots(tier, len(names))
            change(rows, state, np.array(slots, np.int64))
        for name, slot in zip(names, slots, strict=True):
            self.blocks[name].replica[tier] = (state, slot)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        names = [
            name
            for name in self.some_names(data)
            if ReplicaState.DRAINING
            not in {state for state, _ in self.blocks[name].replica.values()}
        ]
        rows = np.array([self.row(name) for name in names], np.int64)
        lease = self.leases.grant(1, rows, self.now, LEASE_SECONDS)
        self.leased[lease] = (names, self.now + LEASE_SECONDS)

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leased)))
        names, deadline = self.leased[lease]
        in_time = self.now < deadline
        assert self.leases.release(1, lease, self.now) == in_time
        if in_time:
            del self.leased[lease]
            self.drop_bare(names)
        assert not self.leases.release(1, lease, self.now)
        self.late += 1 if in_time else 2

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.leases.expire(self.now)
        for lease, (names, deadline) in list(self.leased.items()):
            if self.now >= deadline + LEASE_SECONDS:
                del self.leased[lease]
                self.drop_bare(names)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), up=st.booleans())
    def pin(self, data: st.DataObject, up: bool) -> None:
        for name in self.some_names(data):
            if up or self.blocks[name].pins:
                self.blocks[name].pins += 1 if up else -1
                self.catalog.pins[self.row(name)] += 1 if up else -1

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def remove_if_bare(self, data: st.DataObject) -> None:
        names = self.some_names(data)
        rows = np.array([self.row(name) for name in names], np.int64)
        assert self.catalog.remove_if_bare(rows) == self.drop_bare(names)

    # ---------------------------------------------------------------- invariants

    @invariant()
    def names_replicas_and_families_agree(self) -> None:
        assert len(self.catalog) == len(self.blocks)
        assert self.catalog.rows((10**9).to_bytes(32, "big")).tolist() == [ABSENT_ROW]
        tiers = {
            Tier.HOST: (self.catalog.host_rows_of, self.catalog.host_children),
            Tier.NVME: (self.catalog.nvme_rows_of, self.catalog.nvme_children),
        }
        for name, block in self.blocks.items():
            row = self.row(name)
            parent = ABSENT_ROW if block.parent is None else self.row(block.parent)
            assert self.catalog.parent[row] == parent
            children = [child for child in self.blocks.values() if child.parent == name]
            found = self.catalog.children_of(row).tolist()
            assert sorted(found) == sorted(self.row(child.name) for child in children)
            assert self.catalog.children[row] == len(children)
            assert self.catalog.pins[row] == block.pins
            assert self.catalog.leases[row] == self.leases_on(name)
            for tier, (rows_of, counts) in tiers.items():
                replicas = self.catalog.replicas(tier)
                state, slot = block.replica.get(tier, (ABSENT, -1))
                assert (replicas.state[row], replicas.slot[row]) == (state, slot)
                assert state == ABSENT or rows_of(np.array([slot])).tolist() == [row]
                assert counts[row] == sum(tier in child.replica for child in children)

    @invariant()
    def subtrees_are_whole_and_in_order(self) -> None:
        for name in list(self.blocks)[:3]:
            found = self.catalog.subtree(self.row(name)).tolist()
            below = {name}
            for block in self.blocks.values():
                if block.parent in below:
                    below.add(block.name)
            assert sorted(found) == sorted(self.row(one) for one in below)
            for row in found[1:]:
                assert found.index(int(self.catalog.parent[row])) < found.index(row)

    @invariant()
    def the_laws_hold(self) -> None:
        for laws in (self.catalog.check_integrity(), self.leases.check_integrity(self.catalog)):
            assert whole(laws)
        assert self.leases.statistics()["late_releases"] == self.late

    # ---------------------------------------------------------------- helpers

    def row(self, name: bytes) -> int:
        return int(self.catalog.rows(name)[0])

    def some_names(self, data: st.DataObject) -> list[bytes]:
        return data.draw(
            st.lists(st.sampled_from(sorted(self.blocks)), unique=True, min_size=1, max_size=6)
        )

    def leases_on(self, name: bytes) -> int:
        return sum(name in names for names, _ in self.leased.values())

    def free_slots(self, tier: Tier, number: int) -> list[int]:
        taken = {b.replica[tier][1] for b in self.blocks.values() if tier in b.replica}
        return [slot for slot in range(SLOTS - 1, -1, -3) if slot not in taken][:number]

    def drop_bare(self, names: list[bytes]) -> int:
        dropped = 0
        for name in names:
            at: bytes | None = name
            while at is not None and at in self.blocks:
                block = self.blocks[at]
                has_child = any(child.parent == at for child in self.blocks.values())
                if block.replica or block.pins or self.leases_on(at) or has_child:
                    break
                del self.blocks[at]
                dropped += 1
                at = block.parent
        return dropped


TestCatalog = CatalogMachine.TestCase
TestCatalog.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("seed", range(8))
def test_pages_without_holders_are_free_exactly_once(seed: int) -> None:
    """Lease, release (also twice), pin, unpin, store, evict on 4 slots in any order."""
    rng = random.Random(seed)
    for _ in range(12):
        tier = FourSlots(rng)
        for _ in range(50):
            rng.choice((tier.store, tier.evict, tier.lease, tier.release, tier.pin, tier.unpin))()
            (only,) = tier.pool.statistics().classes or [None]
            held = only.ready if only else 0
            assert held == len(tier.catalog) == tier.catalog.replicas(Tier.HOST).count
        tier.end()


class FourSlots:
    """A host tier of 4 slots; no client obeys any order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pool = SlabPool(1, 4, 1)
        self.catalog = Catalog(host_slots=4)
        self.table = LeaseTable(
            self.catalog, count(1).__next__, blocks_max=4, leases_per_client_max=99
        )
        policy = LruLeaf(self.catalog)
        exempt = np.zeros(1, np.bool_)
        self.picker = VictimPicker(self.catalog, policy, exempt, np.random.default_rng(1))
        self.leases: list[int] = []
        self.pinned: list[int] = []
        self.names = count()

    def rows(self) -> list[int]:
        rows = self.catalog.host_rows_of(self.pool.slots_of_class(1))
        return rows[rows >= 0].tolist()

    def store(self) -> None:
        parent = self.rng.choice([ABSENT_ROW, *self.rows()])
        for slot in self.pool.take(1, 1):
            name = next(self.names).to_bytes(32, "big")
            (row,) = self.catalog.add_chain(
                name, parent=parent, namespace=0, clear_count=0, depth=0, length=1
            )
            self.catalog.set_host(row, ReplicaState.FILLING, slot)
            self.pool.publish([slot])
            self.catalog.set_host(row, READY)

    def evict(self) -> None:
        slots = self.pool.slots_of_class(1)
        victims = self.picker.pick(slots, Tier.HOST, self.rng.randint(1, 3), 0.0)
        assert not self.catalog.leases[victims].any()
        assert not self.catalog.pins[victims].any()
        freed = self.catalog.host_slot[victims].copy()
        self.catalog.set_host(victims, ABSENT)
        self.pool.free(freed)
        self.catalog.remove_if_bare(victims)

    def lease(self) -> None:
        rows = self.rows()
        chosen = np.array(self.rng.sample(rows, self.rng.randint(0, len(rows))), np.int64)
        self.leases.append(self.table.grant(1, chosen, 0.0, 1.0))

    def release(self) -> None:
        if self.leases:
            self.table.release(1, self.rng.choice(self.leases), 0.0)

    def pin(self) -> None:
        for row in self.rows()[:1]:
            self.catalog.pins[row] += 1
            self.pinned.append(row)

    def unpin(self) -> None:
        if self.pinned:
            self.catalog.pins[self.pinned.pop()] -= 1

    def end(self) -> None:
        while self.pinned:
            self.unpin()
        for lease in self.leases:
            self.table.release(1, lease, 0.0)
        while self.rows():
            self.evict()
        assert len(self.catalog) == 0
        assert sorted(self.pool.take(1, 9)) == [0, 1, 2, 3]
        self.pool.check_integrity()
        assert whole(self.catalog.check_integrity())


# ---------------------------------------------------------------- victims


class Forest:
    """Random trees in one tier, some of them leased; slots of one size, shuffled."""

    def __init__(self, blocks: int, branch: float, leased: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.catalog = Catalog(host_slots=blocks)
        parents = np.arange(blocks) - 1
        jumps = rng.random(blocks) < branch
        parents[jumps] = [
            int(rng.integers(-1, place)) if place else -1 for place in np.flatnonzero(jumps)
        ]
        self.rows = self.catalog.add_many(
            np.frombuffer(rng.bytes(32 * blocks), np.uint8).reshape(-1, 32),
            parents=parents,
            namespaces=0,
            clear_counts=0,
            depths=np.zeros(blocks, int),
            lengths=1,
        )
        self.catalog.set_host(self.rows, READY, rng.permutation(blocks))
        self.catalog.last_use[self.rows] = rng.random(blocks)
        self.catalog.leases[self.rows] = rng.random(blocks) < leased
        exempt = np.zeros(1, np.bool_)
        self.picker = VictimPicker(self.catalog, LruLeaf(self.catalog), exempt, rng)
        self.held = np.arange(blocks)

    def eligible(self) -> np.ndarray:
        columns = self.catalog
        rows = self.rows[columns.host_state[self.rows] == READY]
        free = (columns.leases[rows] == 0) & (columns.host_children[rows] == 0)
        return rows[free]

    def pick(self, number: int) -> np.ndarray:
        return self.picker.pick(self.held, Tier.HOST, number, 1.0)

    def evict(self, rows: np.ndarray) -> None:
        self.catalog.set_host(rows, ABSENT)


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(1, 300),
    branch=st.floats(0, 1),
    leased=st.sampled_from([0.0, 0.1, 0.5, 0.95]),
    seed=st.integers(0, 2**32),
    number=st.integers(1, 40),
)
def test_a_small_tier_gives_the_lowest_leaves_until_none_is_left(
    blocks: int, branch: float, leased: float, seed: int, number: int
) -> None:
    forest = Forest(blocks, branch, leased, seed)
    first = forest.pick(number)
    uses = np.sort(forest.catalog.last_use[forest.eligible()])[:number]
    assert forest.catalog.last_use[first].tolist() == uses.tolist()
    while (eligible := forest.eligible()).size:
        found = forest.pick(number)
        assert found.size == min(number, eligible.size)
        assert np.unique(found).size == found.size
        assert np.isin(found, eligible).all()
        forest.evict(found)
    assert forest.pick(number).size == 0


@pytest.mark.parametrize("branch", [0.001, 0.05, 1.0])
@pytest.mark.parametrize("leased", [0.0, 0.5, 0.999])
def test_a_large_tier_is_drained_by_sample_and_scan(branch: float, leased: float) -> None:
    forest = Forest(3000, branch, leased, 5)
    gone = 0
    while (eligible := forest.eligible()).size:
        found = forest.pick(64)
        assert 0 < found.size <= 64
        assert np.unique(found).size == found.size
        assert np.isin(found, eligible).all()
        forest.evict(found)
        gone += found.size
    assert forest.pick(64).size == 0
    assert gone == 3000 - forest.catalog.replicas(Tier.HOST).count


def test_samples_find_low_scores() -> None:
    forest = Forest(6000, 1.0, 0.5, 9)
    uses = np.sort(forest.catalog.last_use[forest.eligible()])
    picked = [forest.pick(16) for _ in range(20) if forest.evict(forest.pick(16)) is None]
    found = forest.catalog.last_use[np.concatenate(picked)]
    assert np.median(found) < uses[uses.size // 4]


def test_room_for_n_bytes_costs_no_more_than_one_largest_block_more() -> None:
    """Random sizes; nothing is evicted while enough is free."""
    rng = random.Random(3)
    sizes = [1, 3, 7]
    pool = SlabPool(12, 21, 1)
    catalog = Catalog(host_slots=pool.slots_max)
    policy = LruLeaf(catalog)
    exempt = np.zeros(1, np.bool_)
    picker = VictimPicker(catalog, policy, exempt, np.random.default_rng(2))
    names = np.random.default_rng(4)
    for step in range(1000):
        size = rng.choice(sizes)
        wanted = rng.randint(1, 30)
        blocks = -(-wanted // size)
        missing = blocks - pool.room(size)
        held = pool.slots_of_class(size)
        victims = picker.pick(held, Tier.HOST, missing, float(step))
        freed = victims.size * size
        if missing <= 0:
            assert freed == 0
        elif held.size >= missing + pool.room(size):
            assert missing * size <= freed < missing * size + max(sizes)
        slots = catalog.host_slot[victims].copy()
        catalog.set_host(victims, ABSENT)
        catalog.remove_if_bare(victims)
        pool.free(slots)
        slots = np.array(pool.take(size, blocks), np.int64)
        rows = catalog.add_many(
            np.frombuffer(names.bytes(32 * slots.size), np.uint8).reshape(-1, 32),
            parents=np.full(slots.size, ABSENT_ROW),
            namespaces=0,
            clear_counts=0,
            depths=np.zeros(slots.size, int),
            lengths=size,
        )
        catalog.set_host(rows, READY, slots)
        pool.publish(slots)
        policy.inserted(rows, float(step))
    pool.check_integrity()
