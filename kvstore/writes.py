"""Writes: slots granted, filled by engines, checksummed, published.

Primitives of `WritePath`:
  `reserve`            named slots: a FILLING fingerprint counts as present to other reservers
  `reserve_anonymous`  slots without names yet; named at `commit`
  `commit`             verifies the whole request before it changes anything, then checksums on
                       worker threads
  `abort`, `expire`, `client_gone`   slots come back, or go into quarantine while a late writer may
                                     still copy

A committed block is matchable only when its bytes are whole, its checksum is known and its parent
is READY.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import xxhash

from kvstore.arrays import distinct
from kvstore.catalog import ABSENT_ROW
from kvstore.columns import split_names
from kvstore.errors import InvalidRequest, Overloaded
from kvstore.lease import Reservation
from kvstore.namespaces import Namespace
from kvstore.reservation_ends import ReservationEnds
from kvstore.room import Room
from kvstore.store import COMMITTED, Store
from kvstore.types import (
    FINGERPRINT_BYTES,
    PARTS_MAX,
    BlockStatus,
    ByteArray,
    ClientId,
    IntArray,
    ReplicaState,
    ReservationId,
    UIntArray,
)

CHECKSUM_BATCH_BYTES = 32 << 20
"""Bytes one worker task hashes; keeps a large commit from occupying a worker for long."""


@dataclass(frozen=True)
class Grant:
    """Answer to a reservation: a status a block, and the slot where one was granted (else -1)."""

    reservation: ReservationId | None
    statuses: ByteArray
    slots: IntArray


class WritePath:
    """Everything that makes blocks READY in the host tier on behalf of engines."""

    def __init__(
        self,
        store: Store,
        room: Room,
        workers: Executor,
        ends: ReservationEnds,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._room = room
        self._workers = workers
        self._now = clock
        self._ends = ends

    # ------------------------------------------------------------------ reserve

    def reserve(
        self,
        client: ClientId,
        engine: str,
        namespace: Namespace,
        parent: bytes,
        names: bytes,
        reservation: int = 0,
    ) -> Grant:
        """Slots for the blocks of `names` (consecutive, after `parent`) that nobody holds or fills
        yet. `reservation`: its id, if the caller has one.

        What fits now: after the first block without room all later ones are NO_ROOM.
        """
        store, columns, now = self._store, self._store.catalog, self._now()
        self._admit_writer(client, reservation)
        rows = self._rows_to_store(namespace, names)
        statuses = np.full(len(rows), BlockStatus.NO_ROOM, np.uint8)
        slots = np.full(len(rows), -1, np.int64)
        parent_row = self._parent_row(namespace, parent)
        if parent_row is None:
            statuses[:] = BlockStatus.NO_PARENT
            return self._counted(Grant(None, statuses, slots))
        held = store.is_held(rows)
        statuses[held] = BlockStatus.PRESENT
        stale = rows[~held & (rows != ABSENT_ROW)]
        if len(stale):
            store.forget(stale, "cleared", now)
            rows = columns.rows(names)
            statuses[~held & (rows != ABSENT_ROW)] = BlockStatus.REFUSED
        wanted = np.flatnonzero(rows == ABSENT_ROW)
        if namespace.is_prefix_closed and (statuses == BlockStatus.REFUSED).any():
            wanted = wanted[wanted < int(np.argmax(statuses == BlockStatus.REFUSED))]
        if not len(wanted):
            return self._counted(Grant(None, statuses, slots))
        # What the new blocks will hang on may not make room for them.
        kept = distinct(np.append(rows[held], parent_row if parent_row >= 0 else rows[held][:1]))
        columns.pins[kept] += 1
        granted = self._room.host_slots(namespace.slot_bytes, len(wanted), now)
        columns.pins[kept] -= 1
        wanted = wanted[: len(granted)]
        if not len(wanted):
            return self._counted(Grant(None, statuses, slots))
        slots[wanted] = granted
        statuses[wanted] = BlockStatus.GRANTED
        new_rows = self._add_rows(namespace, parent_row, names, rows, wanted, slots[wanted])
        granted_as = store.reservations.grant(
            client,
            engine,
            namespace.index,
            slots[wanted],
            new_rows,
            now + store.config.lease.write_seconds,
            slot_bytes=namespace.slot_bytes,
            reservation=reservation,
        )
        return self._counted(Grant(granted_as.id, statuses, slots))

    def reserve_anonymous(
        self, client: ClientId, engine: str, namespace: Namespace, count: int, reservation: int = 0
    ) -> Grant:
        """Up to `count` slots whose blocks are named at commit; bounded by
        host.write_pool_bytes_per_client_max.
        """
        store, now = self._store, self._now()
        self._admit_writer(client, reservation)
        most = max(store.config.host.write_pool_bytes_per_client_max, namespace.slot_bytes)
        left = max(0, most - store.reservations.anonymous_bytes(client)) // namespace.slot_bytes
        # Nobody said what they will follow: not the block that leaves for them.
        slots = self._room.host_slots(namespace.slot_bytes, min(count, left), now, keeps_ends=True)
        if not slots:
            return Grant(None, np.full(count, BlockStatus.NO_ROOM, np.uint8), np.full(count, -1))
        found = np.array(slots, np.int64)
        granted_as = store.reservations.grant(
            client,
            engine,
            namespace.index,
            found,
            np.full(len(slots), ABSENT_ROW, np.int64),
            now + store.config.lease.write_seconds,
            slot_bytes=namespace.slot_bytes,
            reservation=reservation,
        )
        return Grant(granted_as.id, np.zeros(len(slots), np.uint8), found)

    def _admit_writer(self, client: ClientId, reservation: int) -> None:
        if self._store.reservations.is_known(reservation):
            raise InvalidRequest(f"reservation {reservation} exists already; ask with another id")
        if self._store.reservations.is_over_quarantine(client):
            raise Overloaded(
                "this client's expired reservations hold "
                "lease.quarantine_bytes_per_client_max bytes; commit or abort them first"
            )

    def _parent_row(self, namespace: Namespace, parent: bytes) -> int | None:
        """Row of `parent`, -1 at the root or where parents do not matter, None when it is
        nowhere.
        """
        if not namespace.is_prefix_closed or parent == namespace.id:
            return -1
        if len(parent) != FINGERPRINT_BYTES:
            raise InvalidRequest(
                f"parent has {len(parent)} bytes, must be {FINGERPRINT_BYTES} "
                "(the namespace at the root)"
            )
        row = self._store.rows_of(namespace, parent)
        return int(row[0]) if self._store.is_held(row)[0] else None

    def _rows_to_store(self, namespace: Namespace, names: bytes) -> IntArray:
        """Rows of blocks somebody wants to store. Raises InvalidRequest for a name given twice, or
        one of another namespace's block (I8).
        """
        if len(set(split_names(names))) * FINGERPRINT_BYTES != len(names):
            raise InvalidRequest("fingerprints: one block is named twice")
        rows = self._store.catalog.rows(names)
        known = rows != ABSENT_ROW
        if (self._store.catalog.namespace[rows[known]] != namespace.index).any():
            raise InvalidRequest("fingerprints: one names a block of another namespace")
        return rows

    def _add_rows(
        self,
        namespace: Namespace,
        parent_row: int,
        names: bytes,
        rows: IntArray,
        wanted: IntArray,
        slots: IntArray,
    ) -> IntArray:
        """Catalog rows for the `wanted` positions of a chain, linked to the block before each."""
        columns = self._store.catalog
        all_rows = rows.copy()
        for run in np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1):
            first, stop = int(run[0]), int(run[-1]) + 1
            before = int(all_rows[first - 1]) if first else parent_row
            all_rows[run] = columns.add_chain(
                names[first * FINGERPRINT_BYTES : stop * FINGERPRINT_BYTES],
                parent=before,
                is_linked=namespace.is_prefix_closed,
                namespace=namespace.index,
                clear_count=namespace.clear_count,
                depth=int(columns.depth[before]) + 1 if before >= 0 else 0,
                length=namespace.layout.block_bytes,
            )
        new_rows = all_rows[wanted]
        columns.set_host(new_rows, ReplicaState.FILLING, slots)
        return new_rows

    def _counted(self, grant: Grant) -> Grant:
        counters = self._store.counters
        for status, outcome in (
            (BlockStatus.PRESENT, "present"),
            (BlockStatus.NO_ROOM, "no_room"),
            (BlockStatus.NO_PARENT, "no_parent"),
            (BlockStatus.REFUSED, "refused"),
        ):
            counters.add(f"store_blocks:{outcome}", int(np.count_nonzero(grant.statuses == status)))
        return grant

    # ------------------------------------------------------------------ commit

    async def commit(
        self,
        client: ClientId,
        found: Reservation,
        parent: bytes,
        names: bytes,
        slots: IntArray,
        ranks: range,
        end: bool,
    ) -> ByteArray:
        """Publish the blocks of `names`, each in its slot; return a BlockStatus a block.

        Raises InvalidRequest; then nothing was changed. GRANTED in the answer: other ranks have yet
        to report. WAITING: whole, READY with its parent.
        """
        store = self._store
        namespace = store.namespaces.at(found.namespace)
        if len(set(slots.tolist())) != len(slots):
            raise InvalidRequest("commit: one slot is named twice")
        if found.is_anonymous:
            if ranks != range(namespace.layout.ranks):
                raise InvalidRequest(
                    "an anonymous reservation is committed whole: set all_ranks, or reserve by name"
                )
            rows = self._name_rows(found, namespace, parent, names, slots)
        else:
            rows = self._reserved_rows(found, names, slots)
        statuses = np.full(len(rows), BlockStatus.GRANTED, np.uint8)
        statuses[rows == ABSENT_ROW] = BlockStatus.PRESENT
        statuses[rows == NO_PARENT_ROW] = BlockStatus.NO_PARENT
        whole = [
            index
            for index, (slot, row) in enumerate(zip(slots.tolist(), rows.tolist(), strict=True))
            if row >= 0 and found.fill(slot, ranks, namespace.layout.ranks)
        ]
        if whole:
            done = rows[whole]
            found.give_up(slots[whole])
            store.catalog.set_host(done, ReplicaState.COMMITTED)
            store.catalog.pins[done] += 1
        if end or not found.slots_left:
            self._ends.end(found, client)
        if whole:
            await self._finish(namespace, done)
            statuses[whole] = self._outcomes(done, names, whole)
        for status, outcome in (
            (BlockStatus.STORED, "stored"),
            (BlockStatus.WAITING, "stored"),
            (BlockStatus.PRESENT, "present"),
            (BlockStatus.NO_PARENT, "no_parent"),
            (BlockStatus.DROPPED, "dropped"),
        ):
            store.counters.add(f"store_blocks:{outcome}", int(np.count_nonzero(statuses == status)))
        return statuses

    def _reserved_rows(self, found: Reservation, names: bytes, slots: IntArray) -> IntArray:
        """Rows named by a commit; every one must be this reservation's, in its slot, not committed
        before.
        """
        rows = self._store.catalog.rows(names)
        granted = np.array([found.row_of(slot) for slot in slots.tolist()], np.int64)
        wrong = (granted != rows) | (rows == ABSENT_ROW)
        if wrong.any():
            raise InvalidRequest(
                f"commit: block {int(wrong.argmax())} was not granted this slot by reservation "
                f"{found.id}, or was committed before"
            )
        return rows

    def _name_rows(
        self,
        found: Reservation,
        namespace: Namespace,
        parent: bytes,
        names: bytes,
        slots: IntArray,
    ) -> IntArray:
        """Bind names to the slots of an anonymous reservation; ABSENT_ROW where the block is held
        already.

        Slots of blocks that need not or cannot be stored are freed.
        """
        store, columns = self._store, self._store.catalog
        if not all(found.holds(slot) for slot in slots.tolist()):
            raise InvalidRequest(f"commit: reservation {found.id} holds not all of these slots")
        rows = self._rows_to_store(namespace, names)
        parent_row = self._parent_row(namespace, parent)
        held = store.is_held(rows)
        stale = rows[~held & (rows != ABSENT_ROW)]
        if len(stale):
            store.forget(stale, "cleared", self._now())
            rows = columns.rows(names)
        wanted = np.flatnonzero(rows == ABSENT_ROW)
        if parent_row is None:
            wanted = wanted[:0]
        elif namespace.is_prefix_closed and (~held & (rows != ABSENT_ROW)).any():
            wanted = wanted[wanted < int(np.argmax(~held & (rows != ABSENT_ROW)))]
        result = np.where(held, ABSENT_ROW, NO_PARENT_ROW)
        if len(wanted):
            new_rows = self._add_rows(
                namespace,
                -1 if parent_row is None else parent_row,
                names,
                rows,
                wanted,
                slots[wanted],
            )
            result[wanted] = new_rows
            found.name(slots[wanted], new_rows)
        unused = slots[result < 0]
        found.give_up(unused)
        store.host_tier.free(unused)
        return result

    async def _finish(self, namespace: Namespace, rows: IntArray) -> None:
        """Checksums on worker threads, then visibility; the pins taken by the caller end here."""
        store, columns = self._store, self._store.catalog
        views = store.host_tier.views(columns.host_slot[rows], namespace.layout.block_bytes)
        per_task = max(1, CHECKSUM_BATCH_BYTES // namespace.slot_bytes)
        loop = asyncio.get_running_loop()
        tasks = [
            loop.run_in_executor(
                self._workers, checksums_of, namespace, views[start : start + per_task]
            )
            for start in range(0, len(views), per_task)
        ]
        try:
            columns.checksums[rows] = np.concatenate(await asyncio.gather(*tasks))
        finally:
            columns.pins[rows] -= 1
        now = self._now()
        if namespace.is_prefix_closed:
            self._room.ends.grew(rows, now)
        store.make_ready(rows, now)

    def _outcomes(self, rows: IntArray, names: bytes, positions: Sequence[int]) -> ByteArray:
        """STORED, WAITING or DROPPED of rows that were just finished (a dropped row's number may
        be reused).
        """
        columns = self._store.catalog
        joined = b"".join(
            names[at * FINGERPRINT_BYTES : (at + 1) * FINGERPRINT_BYTES] for at in positions
        )
        still = columns.rows(joined)
        ready = self._store.is_readable(still)
        waiting = (still != ABSENT_ROW) & (columns.host_state[still] == COMMITTED)
        result = np.where(
            ready, BlockStatus.STORED, np.where(waiting, BlockStatus.WAITING, BlockStatus.DROPPED)
        )
        return result.astype(np.uint8)


NO_PARENT_ROW = -2
"""In a commit's rows: the block cannot be stored because its parent is nowhere."""


def checksums_of(namespace: Namespace, views: Sequence[ByteArray]) -> UIntArray:
    """xxh3 of every part of every block: uint64 [n, PARTS_MAX]. Runs on a worker thread, drops the
    GIL.
    """
    parts = namespace.layout.parts
    sums = np.zeros((len(views), PARTS_MAX), np.uint64)
    for index, view in enumerate(views):
        for part in parts:
            payload = view[part.offset : part.offset + part.length]
            digest = xxhash.xxh3_64_intdigest(payload)  # type: ignore[arg-type]  # a buffer
            sums[index, part.index] = digest
    return sums
