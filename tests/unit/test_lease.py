"""Read leases and write reservations by example; times are plain numbers."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from kvstore.catalog import ABSENT_ROW, Catalog
from kvstore.errors import (
    InvariantViolated,
    LeaseExpired,
    LeaseTooLarge,
    LeaseUnknown,
    ReservationUnknown,
)
from kvstore.lease import LeaseTable, ReservationTable
from kvstore.types import ReplicaState

ALICE, BOB = 1, 2


@pytest.fixture
def catalog():
    catalog = Catalog(host_slots=64)
    names = b"".join(bytes([number]) * 32 for number in range(8))
    rows = catalog.add_chain(names, parent=-1, namespace=0, clear_count=0, depth=0, length=10)
    catalog.set_host(rows, ReplicaState.READY, np.arange(8))
    return catalog


@pytest.fixture
def table(catalog):
    table = LeaseTable(catalog, count(100).__next__, blocks_max=8, leases_per_client_max=3)
    yield table
    for _ in table.check_integrity(catalog):
        pass


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_a_lease_protects_until_it_is_released(catalog, table):
    lease = table.grant(ALICE, rows(2, 1, 2), 0.0, 10.0)
    assert catalog.leases[:4].tolist() == [0, 1, 1, 0]
    assert table.rows_of(ALICE, lease, 9.9).tolist() == [2, 1, 2]
    assert table.release(ALICE, lease, 9.9)
    assert not catalog.leases.any()
    with pytest.raises(LeaseUnknown):
        table.rows_of(ALICE, lease, 9.9)


def test_releasing_twice_lowers_nobody_elses_protection(catalog, table):
    first = table.grant(ALICE, rows(0, 1), 0.0, 10.0)
    table.grant(BOB, rows(1), 0.0, 10.0)
    assert not table.release(BOB, first, 1.0)
    assert catalog.leases[:3].tolist() == [1, 2, 0]
    assert table.release(ALICE, first, 1.0)
    assert not table.release(ALICE, first, 1.0)
    assert not table.release(ALICE, 12345, 1.0)
    assert catalog.leases[:3].tolist() == [0, 1, 0]
    assert table.statistics()["late_releases"] == 3


def test_an_expired_lease_protects_one_lease_time_more(catalog, table):
    lease = table.grant(ALICE, rows(0), 0.0, 10.0)
    with pytest.raises(LeaseExpired):
        table.rows_of(ALICE, lease, 10.0)
    assert not table.release(ALICE, lease, 10.0)
    table.expire(19.9)
    assert table.statistics()["protecting_late_readers"] == 1
    assert not table.release(ALICE, lease, 19.9)
    assert catalog.leases[0] == 1
    with pytest.raises(LeaseExpired):
        table.renew(ALICE, lease, 19.9, 10.0)
    table.expire(20.0)
    assert catalog.leases[0] == 0
    with pytest.raises(LeaseUnknown):
        table.renew(ALICE, lease, 20.0, 10.0)


def test_expiry_noticed_late_counts_from_the_deadline(catalog, table):
    table.grant(ALICE, rows(0), 0.0, 10.0)
    table.expire(25.0)
    assert catalog.leases[0] == 0


def test_a_renewed_lease_lives_on(catalog, table):
    lease = table.grant(ALICE, rows(0), 0.0, 10.0)
    assert table.renew(ALICE, lease, 8.0, 10.0) == 18.0
    assert table.renew(ALICE, lease, 9.0, 1.0) == 18.0
    table.expire(17.0)
    assert table.rows_of(ALICE, lease, 17.0).tolist() == [0]
    table.expire(18.5)
    with pytest.raises(LeaseExpired):
        table.rows_of(ALICE, lease, 18.5)
    with pytest.raises(LeaseUnknown):
        table.rows_of(BOB, lease, 1.0)


def test_a_client_that_left_protects_one_lease_time_from_then(catalog, table):
    kept = table.grant(BOB, rows(0), 0.0, 10.0)
    lost = table.grant(ALICE, rows(0, 1), 0.0, 10.0)
    table.drop_client(ALICE, 3.0)
    with pytest.raises(LeaseExpired):
        table.rows_of(ALICE, lost, 3.0)
    table.expire(12.9)
    assert catalog.leases[:2].tolist() == [2, 1]
    table.expire(13.0)
    assert catalog.leases[:2].tolist() == [1, 0]
    table.drop_client(ALICE, 14.0)
    assert table.statistics()["active"] + table.statistics()["protecting_late_readers"] == 1
    assert kept != lost


def test_limits_refuse_before_anything_changes(catalog, table):
    with pytest.raises(LeaseTooLarge, match="blocks_max=8"):
        table.grant(ALICE, np.zeros(9, np.int64), 0.0, 10.0)
    leases = [table.grant(ALICE, rows(0), 0.0, 10.0) for _ in range(3)]
    with pytest.raises(LeaseTooLarge, match="leases_per_client_max=3"):
        table.grant(ALICE, rows(1), 0.0, 10.0)
    assert catalog.leases[:2].tolist() == [3, 0]
    table.release(ALICE, leases[0], 1.0)
    table.grant(ALICE, rows(1), 1.0, 10.0)


def test_a_row_without_replicas_goes_with_its_last_lease(catalog, table):
    lease = table.grant(ALICE, rows(7), 0.0, 10.0)
    catalog.set_host(7, ReplicaState.ABSENT)
    assert catalog.remove_if_bare(rows(7)) == 0
    table.release(ALICE, lease, 1.0)
    assert len(catalog) == 7


# ---------------------------------------------------------------- reservations


@pytest.fixture
def reservations():
    return ReservationTable(count(500).__next__, quarantine_bytes_max=1000)


def reserve(reservations, client=ALICE, slots=(4, 5, 6), named=True, deadline=30.0):
    numbers = np.array(slots, np.int64)
    rows = numbers + 100 if named else np.full(len(slots), ABSENT_ROW)
    return reservations.grant(client, "engine", 2, numbers, rows, deadline, slot_bytes=100)


def test_every_rank_of_a_slot_must_report(reservations):
    found = reserve(reservations)
    assert not found.fill(4, range(0, 1), 2)
    assert not found.fill(4, range(0, 1), 2)
    assert not found.fill(5, range(1, 2), 2)
    assert found.fill(4, range(1, 2), 2)
    assert found.fill(6, range(2), 2)
    found.give_up(np.array([4, 6]))
    assert found.slots.tolist() == [5]
    assert found.row_of(4) == ABSENT_ROW
    with pytest.raises(InvariantViolated):
        found.fill(4, range(2), 2)


def test_anonymous_bytes_are_counted_and_named_later(reservations):
    found = reserve(reservations, named=False)
    reserve(reservations, slots=(9,))
    assert found.is_anonymous
    assert reservations.anonymous_bytes(ALICE) == 300
    found.name(np.array([5]), np.array([77]))
    assert (found.row_of(5), found.row_of(4)) == (77, ABSENT_ROW)
    found.give_up(np.array([5]))
    assert reservations.anonymous_bytes(ALICE) == 200
    with pytest.raises(InvariantViolated):
        found.name(np.array([5]), np.array([77]))


def test_a_reservation_belongs_to_its_engine(reservations):
    found = reserve(reservations)
    assert reservations.find("engine", found.id) is found
    with pytest.raises(ReservationUnknown):
        reservations.find("other", found.id)
    reservations.end(found)
    with pytest.raises(ReservationUnknown):
        reservations.find("engine", found.id)


def test_renewing_moves_the_deadline(reservations):
    found = reserve(reservations)
    reservations.renew(found, 50.0)
    reservations.renew(found, 40.0)
    assert reservations.expire(49.0) == []
    assert reservations.expire(50.0) == [found]


def test_held_slots_are_free_when_the_last_writer_was_heard(reservations):
    found = reserve(reservations)
    reservations.hold(found, found.slots, {ALICE, BOB})
    assert reservations.expire(99.0) == []
    assert reservations.acknowledge(3, found.id) is None
    assert reservations.acknowledge(ALICE, 1) is None
    assert reservations.acknowledge(ALICE, found.id).tolist() == []
    assert reservations.acknowledge(ALICE, found.id).tolist() == []
    assert reservations.quarantined_bytes(ALICE) == 0
    assert reservations.quarantined_bytes(BOB) == 300
    assert reservations.acknowledge(BOB, found.id).tolist() == [4, 5, 6]
    assert reservations.acknowledge(BOB, found.id) is None
    assert reservations.statistics()["quarantined_slots"] == 0


def test_a_process_that_is_gone_frees_what_waited_only_for_it(reservations):
    alone, shared = reserve(reservations), reserve(reservations, slots=(7, 8))
    reservations.hold(alone, alone.slots, {ALICE})
    reservations.hold(shared, shared.slots, {ALICE, BOB})
    assert reservations.of_client(ALICE) == []
    assert reservations.client_gone(ALICE).tolist() == [4, 5, 6]
    assert reservations.client_gone(ALICE).tolist() == []
    assert reservations.client_gone(BOB).tolist() == [7, 8]


def test_quarantined_bytes_of_a_client_are_bounded(reservations):
    assert not reservations.is_over_quarantine(ALICE)
    found = reserve(reservations, slots=range(10))
    reservations.hold(found, found.slots, {ALICE})
    assert reservations.is_over_quarantine(ALICE)
    assert not reservations.is_over_quarantine(BOB)
    reservations.acknowledge(ALICE, found.id)
    assert not reservations.is_over_quarantine(ALICE)


def test_holding_nothing_ends_the_reservation(reservations):
    found = reserve(reservations)
    found.give_up(found.slots)
    reservations.hold(found, found.slots, {ALICE})
    assert reservations.acknowledge(ALICE, found.id) is None
    assert reservations.statistics()["active"] == 0


def test_lease_counts_that_do_not_add_up_are_noticed(catalog):
    table = LeaseTable(catalog, count(100).__next__, blocks_max=8, leases_per_client_max=3)
    table.grant(ALICE, rows(0, 1), 0.0, 10.0)
    catalog.leases[1] -= 1
    with pytest.raises(InvariantViolated, match="I4 lease counts"):
        for _ in table.check_integrity(catalog):
            pass
