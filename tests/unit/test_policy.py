"""The plain policy and the search for victims, by example."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.catalog import ABSENT_ROW, Catalog
from kvstore.policy import LruLeaf, VictimPicker
from kvstore.types import ReplicaState, Tier

READY, ABSENT = ReplicaState.READY, ReplicaState.ABSENT
FLAT = 1
"""Index of the namespace without leaf-first."""


class Host:
    """A catalog whose slots are all of one size, with chains in its host tier."""

    def __init__(self, slots: int = 64) -> None:
        self.catalog = Catalog(host_slots=slots, nvme_slots=slots)
        self.policy = LruLeaf(self.catalog)
        exempt = np.array([False, True])
        self.picker = VictimPicker(self.catalog, self.policy, exempt, np.random.default_rng(1))
        self.held = np.arange(slots)
        self.used = 0

    def chain(self, blocks: int, now: float, namespace: int = 0) -> np.ndarray:
        names = np.random.default_rng(self.used).bytes(32 * blocks)
        rows = self.catalog.add_chain(
            names, parent=ABSENT_ROW, namespace=namespace, clear_count=0, depth=0, length=10
        )
        self.catalog.set_host(rows, READY, np.arange(self.used, self.used + blocks))
        self.used += blocks
        self.policy.inserted(rows, now)
        return rows

    def pick(self, count: int, tier: Tier = Tier.HOST, now: float = 100.0) -> list[int]:
        return self.picker.pick(self.held, tier, count, now).tolist()

    def evict(self, rows: list[int]) -> None:
        self.catalog.set_host(np.array(rows, np.int64), ABSENT)
        self.catalog.remove_if_bare(np.array(rows, np.int64))


@pytest.fixture
def host():
    return Host()


def test_the_least_recently_used_leaf_goes_first(host):
    old, new = host.chain(3, 1.0), host.chain(2, 2.0)
    assert host.pick(5) == [old[2], new[1]]
    host.evict([old[2]])
    assert host.pick(1) == [old[1]]
    host.policy.touched(old, 3.0)
    assert host.pick(1) == [new[1]]


def test_what_is_asked_for_is_what_goes(host):
    for number in range(40):
        host.chain(1, float(number))
    assert host.pick(0) == []
    first = host.pick(3)
    host.evict(first)
    second = host.pick(4)
    assert host.catalog.last_use[first].tolist() == [0, 1, 2]
    assert host.catalog.last_use[second].tolist() == [3, 4, 5, 6]


def test_leased_pinned_and_unready_replicas_stay(host):
    rows = np.concatenate([host.chain(1, float(number)) for number in range(5)])
    host.catalog.leases[rows[0]] += 1
    host.catalog.pins[rows[1]] += 1
    host.catalog.set_host(int(rows[2]), ReplicaState.DRAINING)
    assert host.pick(5) == rows[3:].tolist()
    host.catalog.leases[rows[0]] -= 1
    assert host.pick(5) == rows[[0, 3, 4]].tolist()


def test_a_queued_victim_that_was_used_or_leased_meanwhile_stays(host):
    rows = np.concatenate([host.chain(1, float(number)) for number in range(20)])
    assert host.pick(1) == [rows[0]]
    host.evict([rows[0]])
    host.policy.touched(rows[1:2], 99.0)
    host.catalog.leases[rows[2]] += 1
    assert host.pick(1) == [rows[3]]


def test_each_tier_has_its_own_leaves(host):
    rows = host.chain(3, 1.0)
    host.catalog.set_nvme(rows[:2], READY, np.array([5, 6]), np.array([1, 1], np.uint64))
    assert host.pick(3, Tier.HOST) == [rows[2], rows[1], rows[0]]  # a copy below is way enough
    assert host.pick(3, Tier.NVME) == [rows[1]]


def test_the_only_replica_of_a_block_with_a_child_in_the_host_tier_stays(host):
    rows = host.chain(2, 1.0)
    host.catalog.set_nvme(rows[:1], READY, np.array([5]), np.array([1], np.uint64))
    assert host.pick(1, Tier.NVME) == [rows[0]]
    host.catalog.set_host(rows[:1], ABSENT)
    assert host.pick(1, Tier.NVME) == []
    host.catalog.set_host(rows[1:], ABSENT)
    assert host.pick(1, Tier.NVME) == [rows[0]]


def test_exempt_namespaces_need_no_leaf_first(host):
    rows = host.chain(3, 1.0, namespace=FLAT)
    assert sorted(host.pick(3)) == rows.tolist()


def test_one_request_counts_as_one_use(host):
    twice, once = host.chain(2, 0.0), host.chain(2, 0.0)
    host.policy.touched(once, 1.0)
    host.policy.touched(np.concatenate([twice, twice]), 2.0)
    host.policy.touched(twice, 3.0)
    assert host.catalog.uses[twice].tolist() == [2, 2]
    assert host.catalog.uses[once].tolist() == [1, 1]
    assert host.pick(1) == [once[1]]


def test_of_blocks_used_together_the_deepest_goes_first(host):
    rows = host.chain(4, 5.0, namespace=FLAT)
    assert host.pick(4) == rows[::-1].tolist()


def test_a_long_chain_is_evicted_from_its_end_with_few_scans(monkeypatch):
    host = Host(40_000)
    rows = host.chain(40_000, 1.0)
    scans = []
    scan = VictimPicker._leaves_in
    monkeypatch.setattr(VictimPicker, "_leaves_in", lambda *args: scans.append(args) or scan(*args))
    gone = []
    for _ in range(640):
        picked = host.pick(16)
        gone += picked
        host.evict(picked)
    assert gone == rows[::-1][:640].tolist()
    assert len(scans) < 64


def test_a_scan_gives_only_blocks_of_the_asked_size():
    host = Host(2000)
    ours = host.chain(1000, 9.0)
    host.catalog.leases[ours[-1]] += 1
    others = np.concatenate([host.chain(1, 1.0) for _ in range(1000)])
    host.held = np.arange(1000)
    assert host.pick(16) == []
    host.held = np.arange(1000, 2000)
    assert set(host.pick(16)) <= set(others.tolist())


def test_rare_leaves_in_a_large_tier_are_found():
    host = Host(40_000)
    rows = host.chain(39_999, 9.0)
    host.catalog.leases[rows] += 1
    alone = host.chain(1, 1.0)
    found = {row for _ in range(4) for row in host.pick(1)}
    assert found == set(alone.tolist())


def test_a_fruitless_scan_is_not_repeated_at_once():
    host = Host(100_000)
    rows = host.chain(100_000, 1.0)
    host.catalog.leases[rows] += 1
    assert host.pick(1, now=1.0) == []
    host.catalog.leases[rows[-1]] -= 1
    assert [host.pick(1, now=1.0) for _ in range(5)].count([]) >= 4
    assert host.pick(1, now=1.1) == [rows[-1]]


def test_slabs_that_come_and_go_are_noticed(host):
    first, second = host.chain(1, 1.0), host.chain(1, 2.0)
    assert host.pick(2) == [first[0], second[0]]
    host.held = np.array([0])
    assert host.pick(2) == [first[0]]
    host.held = np.array([1])
    assert host.pick(2) == [second[0]]
    host.held = np.array([], np.int64)
    assert host.pick(2) == []
