"""Rows, names, replicas and families by example."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.catalog import ABSENT_ROW, Catalog
from kvstore.errors import InvalidRequest, InvariantViolated
from kvstore.types import ReplicaState, Tier

READY, ABSENT = ReplicaState.READY, ReplicaState.ABSENT
FILLING, DRAINING = ReplicaState.FILLING, ReplicaState.DRAINING


def name(number: int) -> bytes:
    return number.to_bytes(2, "big") + bytes(30)


def names(*numbers: int) -> bytes:
    return b"".join(name(number) for number in numbers)


@pytest.fixture
def catalog():
    catalog = Catalog(host_slots=256, nvme_slots=4096)
    yield catalog
    for _ in catalog.check_integrity():
        pass


def chain(catalog: Catalog, *numbers: int, parent: int = ABSENT_ROW) -> np.ndarray:
    return catalog.add_chain(
        names(*numbers), parent=parent, namespace=3, clear_count=1, depth=0, length=100
    )


def test_names_lead_to_rows_and_unknown_ones_to_none(catalog):
    rows = chain(catalog, 1, 2, 3)
    assert catalog.rows(names(3, 9, 1)).tolist() == [rows[2], ABSENT_ROW, rows[0]]
    assert catalog.prefix_rows(names(1, 2, 9, 3)).tolist() == rows[:2].tolist()
    assert catalog.rows(b"").tolist() == []
    as_array = np.frombuffer(names(2, 3), np.uint8).reshape(2, 32)
    assert catalog.rows(as_array).tolist() == rows[1:].tolist()
    with pytest.raises(InvalidRequest, match="33 bytes"):
        catalog.rows(bytes(33))


def test_a_chain_carries_its_columns(catalog):
    root = chain(catalog, 1)[0]
    rows = catalog.add_chain(
        names(2, 3), parent=root, namespace=3, clear_count=7, depth=1, length=100
    )
    assert catalog.parent[rows].tolist() == [root, rows[0]]
    assert catalog.depth[rows].tolist() == [1, 2]
    assert catalog.clear_count[rows].tolist() == [7, 7]
    assert catalog.fingerprints[rows].tobytes() == names(2, 3)
    assert catalog.host_slot[rows].tolist() == [-1, -1]
    assert catalog.subtree(root).tolist() == [root, *rows]


def test_a_name_has_one_row():
    catalog = Catalog(host_slots=1, nvme_slots=1)
    chain(catalog, 1)
    with pytest.raises(InvariantViolated, match="one row"):
        chain(catalog, 1)


def test_replicas_keep_slots_and_children_in_step(catalog):
    rows = chain(catalog, 1, 2, 3)
    catalog.set_host(rows, FILLING, np.array([10, 11, 12]))
    catalog.checksums[rows] = 1
    catalog.set_nvme(rows[:2], READY, np.array([700, 64]), np.array([5, 6], np.uint64))
    assert catalog.host_rows_of(np.array([12, 13, 10])).tolist() == [rows[2], ABSENT_ROW, rows[0]]
    assert catalog.nvme_rows_of(np.array([64, 700])).tolist() == [rows[1], rows[0]]
    assert catalog.host_children[rows].tolist() == [1, 1, 0]
    assert catalog.nvme_children[rows].tolist() == [1, 0, 0]
    assert catalog.nvme_generation[rows[:2]].tolist() == [5, 6]
    catalog.set_host(rows, READY)
    catalog.set_host(int(rows[2]), ABSENT)
    assert catalog.host_children[rows].tolist() == [1, 0, 0]
    assert catalog.host_rows_of(np.array([12])).tolist() == [ABSENT_ROW]
    assert catalog.replicas(Tier.HOST).count == 2


def test_a_replica_may_move_to_another_slot(catalog):
    rows = chain(catalog, 1, 2)
    catalog.set_host(rows, READY, np.array([1, 2]))
    catalog.set_host(rows, READY, np.array([2, 1]))
    assert catalog.host_rows_of(np.array([1, 2])).tolist() == [rows[1], rows[0]]
    assert catalog.host_children[rows].tolist() == [1, 0]


@pytest.mark.parametrize("slots", [[5, 5], [5, 0], None])
def test_a_slot_holds_one_block(catalog, slots):
    rows = chain(catalog, 1, 2, 3)
    catalog.set_host(int(rows[0]), READY, 0)
    with pytest.raises(InvariantViolated, match="slot"):
        catalog.set_host(rows[1:], READY, None if slots is None else np.array(slots))


def test_rows_of_one_change_are_unique(catalog):
    rows = chain(catalog, 1, 2)
    catalog.set_host(rows, READY, np.array([1, 2]))
    with pytest.raises(InvariantViolated, match="unique"):
        catalog.set_host(np.array([rows[1], rows[1]]), ABSENT)


def test_a_bare_name_stays_until_its_last_child_went(catalog):
    rows = chain(catalog, 1, 2, 3)
    catalog.set_host(rows, READY, np.array([1, 2, 3]))
    catalog.set_host(rows[:2], ABSENT)
    assert catalog.remove_if_bare(rows) == 0
    assert catalog.rows(names(1, 2)).tolist() == rows[:2].tolist()
    catalog.set_host(rows[2:], ABSENT)
    assert catalog.remove_if_bare(int(rows[2])) == 3
    assert len(catalog) == 0
    assert catalog.rows(names(1, 2, 3)).tolist() == [ABSENT_ROW] * 3


@pytest.mark.parametrize("keeper", ["leases", "pins"])
def test_a_leased_or_pinned_row_stays(catalog, keeper):
    rows = chain(catalog, 1)
    getattr(catalog, keeper)[rows] += 1
    assert catalog.remove_if_bare(rows) == 0
    getattr(catalog, keeper)[rows] -= 1
    assert catalog.remove_if_bare(np.array([rows[0], rows[0]])) == 1


def test_rows_are_used_again_without_traces(catalog):
    rows = chain(catalog, 1, 2)
    catalog.uses[rows] = 9
    catalog.last_use[rows] = 9.0
    catalog.remove_if_bare(rows)
    again = chain(catalog, 3, 4, 5)
    assert sorted(again[:2]) == sorted(rows)
    assert catalog.uses[again].tolist() == [0, 0, 0]
    assert catalog.last_use[again].tolist() == [0, 0, 0]
    assert catalog.children[again].tolist() == [1, 1, 0]


def test_many_rows_at_once_with_parents_in_any_order(catalog):
    chain(catalog, 8, 9)
    rows = catalog.add_many(
        np.frombuffer(names(1, 2, 3, 4, 5), np.uint8).reshape(5, 32),
        parents=np.array([3, 3, 0, -1, 3]),
        namespaces=2,
        clear_counts=np.arange(5),
        depths=np.array([1, 1, 2, 0, 1]),
        lengths=10,
    )
    assert sorted(catalog.children_of(int(rows[3]))) == sorted(rows[[0, 1, 4]])
    assert catalog.children[rows].tolist() == [1, 0, 0, 3, 0]
    assert sorted(catalog.subtree(int(rows[3]))) == sorted(rows)
    assert catalog.remove_if_bare(rows) == 5


def test_columns_grow_and_keep_what_they_held():
    catalog = Catalog(host_slots=4096)
    first = chain(catalog, *range(1000))
    catalog.set_host(first, READY, np.arange(1000))
    more = chain(catalog, *range(1000, 3000), parent=int(first[-1]))
    assert catalog.rows(names(*range(3000))).tolist() == [*first, *more]
    assert catalog.host_slot[first].tolist() == list(range(1000))
    assert catalog.host_slot[more].max() == -1
    assert len(catalog.parent) >= 3000
    assert all(step is None for step in catalog.check_integrity())


def run(laws) -> bool:
    while True:
        try:
            next(laws)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize(
    ("damage", "law"),
    [
        (lambda c, r: c.fingerprints.__setitem__((r[0], 0), 9), "found by its name"),
        (lambda c, r: c.host_slot.__setitem__(r[0], 50), "I2 I6"),
        (lambda c, r: c.host_state.__setitem__(r[3], 3), "I2 I6"),
        (lambda c, r: c.host_state.__setitem__(r[0], 0), "no slot"),
        (lambda c, r: c.checksums.__setitem__(r[0], 0), "I3"),
        (lambda c, r: (c.leases.__setitem__(r[2], 1), c.set_host(r[2:3], DRAINING)), "I4"),
        (lambda c, r: c.pins.__setitem__(r[0], -1), "negative"),
        (lambda c, r: c.set_nvme(r[:1], ABSENT), "I5"),
        (lambda c, r: (c.set_nvme(r[1:], ABSENT), c.set_host(r[1:2], ABSENT)), "I5"),
        (lambda c, r: c.parent.__setitem__(r[1], r[2]), "."),
        (lambda c, r: c.host_children.__setitem__(r[0], 3), "children counters"),
        (lambda c, r: c.children.__setitem__(r[0], 0), "children"),
    ],
)
def test_broken_laws_are_noticed(damage, law):
    catalog = Catalog(host_slots=64, nvme_slots=64)
    rows = chain(catalog, 1, 2, 3, 4)
    catalog.checksums[rows] = 1
    catalog.set_host(rows[:3], READY, np.array([1, 2, 3]))
    catalog.set_nvme(rows[:2], READY, np.array([1, 2]), np.array([1, 1], np.uint64))

    def everything_is_current(some: np.ndarray) -> np.ndarray:
        return np.ones(some.size, np.bool_)

    assert run(catalog.check_integrity(everything_is_current))
    damage(catalog, rows)
    with pytest.raises(InvariantViolated, match=law):
        run(catalog.check_integrity(everything_is_current))


def test_a_copy_of_a_leased_block_may_leave(catalog):
    """I4 holds while the replica in the other tier stays."""
    (row,) = chain(catalog, 1)
    catalog.checksums[row] = 1
    catalog.set_host(row, READY, 1)
    catalog.set_nvme(row, READY, 1, 1)
    catalog.leases[row] = 1
    catalog.set_nvme(row, DRAINING)
    assert run(catalog.check_integrity(lambda some: np.ones(some.size, np.bool_)))


def test_rows_about_to_be_dropped_need_no_way_to_them(catalog):
    rows = chain(catalog, 1, 2)
    catalog.set_host(rows[1:], READY, np.array([1]))
    assert run(catalog.check_integrity(lambda some: some == rows[0]))


def test_a_catalog_that_changes_under_the_check_is_not_judged(catalog):
    chain(catalog, 1, 2)
    laws = catalog.check_integrity()
    next(laws)
    next(laws)
    chain(catalog, 3)
    assert run(laws) is False


def test_a_parent_must_live(catalog):
    rows = chain(catalog, 1)
    catalog.remove_if_bare(rows)
    with pytest.raises(InvariantViolated, match="parent lives"):
        chain(catalog, 2, parent=int(rows[0]))
    with pytest.raises(InvariantViolated, match="live row"):
        catalog.set_host(rows, READY, np.array([1]))
