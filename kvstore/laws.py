"""What must hold between the catalog and the tiers, looked at piece by piece while the store lives.

Primitives: `check_slices(store)`, a bounded step each; changes between two steps are welcome.
`check_integrity(store)`, all of it at once.
Reads, raises InvariantViolated, changes nothing. The laws inside one structure are that
structure's own: slab pools (I1), catalog (I2 to I5), leases (I4), the directory's table.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.errors import check
from kvstore.slab import SlabPool, SlotState
from kvstore.store import ABSENT, CONDEMNED, READY, Store
from kvstore.types import BoolArray, ByteArray, IntArray, ReplicaState, Tier

_ROWS = 4096
_DIRECTORY_ROWS = 256
_SLOT_STATES = np.zeros(len(ReplicaState), np.uint8)
"""State of the slot behind a replica; a leaving replica's slot stays READY until it is free."""
_SLOT_STATES[ReplicaState.FILLING] = SlotState.FILLING
_SLOT_STATES[ReplicaState.COMMITTED] = SlotState.FILLING
_SLOT_STATES[ReplicaState.READY] = SlotState.READY
_SLOT_STATES[ReplicaState.DRAINING] = SlotState.READY


def check_slices(store: Store) -> Iterator[None]:
    """Everything once; a step takes under 2 ms. Raises InvariantViolated."""
    for tier in (store.host, store.nvme):
        if tier is not None:
            yield from tier.integrity_slices()
    yield from store.catalog.check_integrity(store.is_current)
    yield from store.leases.check_integrity(store.catalog)
    yield from _slots_and_rows(store)
    yield from _directory(store)
    check_books(store)
    yield


def check_integrity(store: Store) -> None:
    """The same in one go; tests call it at their end."""
    for _ in check_slices(store):
        pass


def _slots_and_rows(store: Store) -> Iterator[None]:
    """I6: the slot behind every replica is held, in the state the replica says."""
    for tier, pool in _pools(store):
        start = 0
        while start < store.catalog.rows_end:
            replicas = store.catalog.replicas(tier)
            window = slice(start, start + _ROWS)
            held = np.flatnonzero(replicas.state[window]) + start
            found = pool.states_of(replicas.slot[held])
            wrong = found != _SLOT_STATES[replicas.state[held]]
            check(
                not wrong.any(),
                "I6 a replica's slot is held as it says",
                tier=tier.name,
                rows=held[wrong][:8].tolist(),
            )
            start += _ROWS
            yield


def _directory(store: Store) -> Iterator[None]:
    """What clients find is what is READY, under its name; what lies on NVMe is not denied."""
    if store.host is None:
        return
    directory, catalog = store.host.directory, store.catalog
    yield from directory.check_table()
    start = 0
    while start < catalog.rows_end:
        window = slice(start, min(start + _DIRECTORY_ROWS, catalog.rows_end))
        rows = np.flatnonzero(_is_published(store, window)) + start
        directory.check_integrity(catalog.host_slot[rows], catalog.fingerprints[rows])
        directory.check_below(catalog.fingerprints[window][catalog.nvme_state[window] != ABSENT])
        start += _DIRECTORY_ROWS
        if len(rows):
            yield


def check_books(store: Store) -> None:
    """I1, I2 over everything: each held slot has one owner, each READY block one entry."""
    catalog = store.catalog
    every = slice(0, catalog.rows_end)
    if store.host is not None:
        slots, rows = _slot_counts(store.host.pool), _row_counts(catalog.host_state[every])
        reservations = store.reservations
        check(
            slots[SlotState.READY] == rows[ReplicaState.READY], "I1 READY blocks are in the books"
        )
        filling = rows[ReplicaState.FILLING] + rows[ReplicaState.COMMITTED]
        check(
            slots[SlotState.FILLING] == filling + reservations.unnamed_slots,
            "I1 filling slots are in the books",
            slots=int(slots[SlotState.FILLING]),
            rows=int(filling),
            unnamed=reservations.unnamed_slots,
        )
        held = reservations.quarantined_slots
        check(slots[SlotState.QUARANTINED] == held, "I1 quarantined slots are in the books")
        published = int(np.count_nonzero(_is_published(store, every)))
        check(store.host.directory.published == published, "I2 a READY block is published once")
    if store.nvme is not None:
        slots, rows = _slot_counts(store.nvme.pool), _row_counts(catalog.nvme_state[every])
        ready = rows[ReplicaState.READY] + rows[ReplicaState.DRAINING]
        check(slots[SlotState.READY] == ready, "I1 NVMe blocks are in the books")
        # A batch being put together holds slots that no row has yet.
        check(slots[SlotState.FILLING] >= rows[ReplicaState.FILLING], "I1 NVMe slots being written")


def _is_published(store: Store, rows: slice) -> BoolArray:
    """READY and not condemned: clients find it. (After a clear they find it and know better.)"""
    catalog = store.catalog
    result: BoolArray = catalog.host_state[rows] == READY
    result &= catalog.clear_count[rows] != CONDEMNED
    return result


def _pools(store: Store) -> list[tuple[Tier, SlabPool]]:
    found = [(Tier.HOST, store.host), (Tier.NVME, store.nvme)]
    return [(tier, owner.pool) for tier, owner in found if owner is not None]


def _slot_counts(pool: SlabPool) -> IntArray:
    """Held slots of all sizes by SlotState; FREE is left 0."""
    counts = np.zeros(len(SlotState), np.int64)
    for item in pool.statistics().classes:
        counts += [0, item.filling, item.ready, item.draining, item.quarantined]
    return counts


def _row_counts(states: ByteArray) -> IntArray:
    """Rows by ReplicaState."""
    return np.array([np.count_nonzero(states == state) for state in ReplicaState], np.int64)
