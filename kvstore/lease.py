"""Promises with an end: read leases on rows, write reservations on slots, and what outlives them.

Primitives:
  `LeaseTable`        a lease keeps the replicas of its rows where they are; it alone changes the
                      catalog's `leases` column
  `ReservationTable`  slots that are one engine's to fill; after an end without its word they are
                      *held* (quarantined) until every possible writer is done or gone

Life of a read lease:   granted .. deadline  readable and protected
                        .. one lease time more  expired, still protected: a late reader may be at it
Life of a reservation:  granted .. commit or abort, or the deadline -> held -> acknowledged

Pure and synchronous: times (monotonic seconds) and ids come as arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.catalog import ABSENT_ROW, Catalog
from kvstore.errors import LeaseExpired, LeaseTooLarge, LeaseUnknown, ReservationUnknown, check
from kvstore.types import ClientId, IntArray, LeaseId, ReservationId

_CHECK_ROWS = 16384
_NO_SLOTS: IntArray = np.empty(0, np.int64)


@dataclass(slots=True)
class _Lease:
    client: ClientId
    rows: IntArray
    seconds: float
    deadline: float
    ends: float = 0.0
    """When an expired lease stops protecting."""
    is_expired: bool = False

    @property
    def due(self) -> float:
        return self.ends if self.is_expired else self.deadline


class LeaseTable:
    """Read leases. A row may be in many leases; named twice in one, it counts once."""

    def __init__(
        self,
        catalog: Catalog,
        ids: Callable[[], int],
        *,
        blocks_max: int,
        leases_per_client_max: int,
    ) -> None:
        self._catalog = catalog
        self._ids = ids
        self._blocks_max = blocks_max
        self._leases_per_client_max = leases_per_client_max
        self._leases: dict[LeaseId, _Lease] = {}
        self._of_client: dict[ClientId, set[LeaseId]] = {}
        self._due: list[tuple[float, LeaseId]] = []
        self._changes = 0
        self._counts = {"granted": 0, "released": 0, "expired": 0, "late_releases": 0}

    def grant(self, client: ClientId, rows: IntArray, now: float, seconds: float) -> LeaseId:
        """Protect `rows` for `seconds`. Raises LeaseTooLarge past a limit; then nothing changed."""
        held = len(self._of_client.get(client, ()))
        if rows.size > self._blocks_max:
            raise LeaseTooLarge(
                f"a lease of {rows.size} blocks exceeds lease.blocks_max={self._blocks_max}; "
                "ask for a shorter prefix"
            )
        if held >= self._leases_per_client_max:
            raise LeaseTooLarge(
                f"this client holds {held} leases, lease.leases_per_client_max="
                f"{self._leases_per_client_max}; release some first"
            )
        lease = LeaseId(self._ids())
        self._leases[lease] = _Lease(client, rows.copy(), seconds, now + seconds)
        self._of_client.setdefault(client, set()).add(lease)
        heapq.heappush(self._due, (now + seconds, lease))
        # A row named twice counts once here, at the end and in check_integrity: always the same.
        self._catalog.leases[rows] += 1
        self._changes += 1
        self._counts["granted"] += 1
        return lease

    def release(self, client: ClientId, lease: LeaseId, now: float) -> bool:
        """End a lease; its rows are unprotected at once.

        False, and counted: released before, expired, foreign, never granted. Then nothing changes.
        """
        found = self._leases.get(lease)
        if found is None or found.client != client or now >= found.due or found.is_expired:
            self._counts["late_releases"] += 1
            return False
        self._counts["released"] += 1
        self._end(lease)
        return True

    def renew(self, client: ClientId, lease: LeaseId, now: float, seconds: float) -> float:
        """Prolong to `seconds` from now, never shorten; the new deadline.

        Raises LeaseExpired, LeaseUnknown.
        """
        found = self._find(client, lease, now)
        found.seconds = seconds
        found.deadline = max(found.deadline, now + seconds)
        return found.deadline

    def rows_of(self, client: ClientId, lease: LeaseId, now: float) -> IntArray:
        """Rows in the order they were granted. Raises LeaseExpired, LeaseUnknown."""
        return self._find(client, lease, now).rows

    def expire(self, now: float) -> None:
        """Let deadlines that have passed take effect."""
        while self._due and self._due[0][0] <= now:
            _, lease = heapq.heappop(self._due)
            found = self._leases.get(lease)
            if found is None:
                continue
            if found.due <= now and found.is_expired:
                self._end(lease)
                continue
            if found.due <= now:
                self._mark_expired(found, found.deadline)
            heapq.heappush(self._due, (found.due, lease))

    def drop_client(self, client: ClientId, now: float) -> None:
        """The client left: its leases expire now; one lease time more they protect late readers."""
        for lease in self._of_client.get(client, ()):
            found = self._leases[lease]
            if not found.is_expired:
                self._mark_expired(found, now)
                heapq.heappush(self._due, (found.due, lease))

    def statistics(self) -> dict[str, int]:
        """What protects now, and counters since the start."""
        expired = sum(found.is_expired for found in self._leases.values())
        return {
            "active": len(self._leases) - expired,
            "protecting_late_readers": expired,
            "blocks": sum(found.rows.size for found in self._leases.values()),
            **self._counts,
        }

    def check_integrity(self, catalog: Catalog) -> Generator[None, None, bool]:
        """The catalog's lease counts are the sums over all leases; in steps of at most 2 ms.

        Returns False when a lease changed meanwhile: run it again. Raises InvariantViolated.
        """
        changes, end = self._changes, catalog.rows_end
        sums = np.zeros(end, np.int32)
        size = 0
        for found in list(self._leases.values()):
            sums[found.rows] += 1
            size += found.rows.size
            if size >= _CHECK_ROWS:
                size = 0
                yield
                if self._changes != changes:
                    return False
        for start in range(0, end, _CHECK_ROWS):
            stop = min(start + _CHECK_ROWS, end)
            same = catalog.leases[start:stop] == sums[start:stop]
            check(same.all(), "I4 lease counts", rows=(start + np.flatnonzero(~same))[:8].tolist())
            yield
            if self._changes != changes:
                return False
        return True

    def _find(self, client: ClientId, lease: LeaseId, now: float) -> _Lease:
        found = self._leases.get(lease)
        if found is None or found.client != client:
            raise LeaseUnknown(f"lease {lease} was released or never granted; match again")
        if found.is_expired or now >= found.deadline:
            raise LeaseExpired(f"lease {lease} ran out; match again")
        return found

    def _mark_expired(self, found: _Lease, at: float) -> None:
        found.is_expired = True
        found.ends = at + found.seconds
        self._counts["expired"] += 1

    def _end(self, lease: LeaseId) -> None:
        found = self._leases.pop(lease)
        _discard(self._of_client, found.client, lease)
        self._catalog.leases[found.rows] -= 1
        self._changes += 1
        self._catalog.remove_if_bare(found.rows)


@dataclass(slots=True, eq=False)
class Reservation:
    """Slots one engine may fill until `deadline`, with the row each is for."""

    id: ReservationId
    client: ClientId
    engine: str
    namespace: int
    deadline: float
    slot_bytes: int
    is_anonymous: bool
    """Slots were granted before the blocks were named."""
    _row_of: dict[int, int]
    _ranks_of: dict[int, int] = field(default_factory=dict)
    """Slot to bit mask of the ranks that filled their part."""

    @property
    def slots(self) -> IntArray:
        """Slots that are still this reservation's, int64[slots_left]."""
        return np.array(list(self._row_of), np.int64)

    @property
    def rows(self) -> IntArray:
        """The row each is for, int64[slots_left]; ABSENT_ROW while it is unnamed."""
        return np.array(list(self._row_of.values()), np.int64)

    @property
    def slots_left(self) -> int:
        """How many there are."""
        return len(self._row_of)

    def holds(self, slot: int) -> bool:
        """Whether `slot` is still this reservation's."""
        return slot in self._row_of

    def row_of(self, slot: int) -> int:
        """Row the slot is for; ABSENT_ROW while it is unnamed, and for slots not held."""
        return self._row_of.get(slot, ABSENT_ROW)

    def name(self, slots: IntArray, rows: IntArray) -> None:
        """Say which rows held slots are for."""
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            check(slot in self._row_of, "a named slot is held", slot=slot)
            self._row_of[slot] = row

    def fill(self, slot: int, ranks: range, ranks_total: int) -> bool:
        """`ranks` have filled their parts of a held slot; True once all `ranks_total` have."""
        check(slot in self._row_of, "a filled slot is held", slot=slot)
        done = self._ranks_of.get(slot, 0)
        for rank in ranks:
            done |= 1 << rank
        self._ranks_of[slot] = done
        return bool(done == (1 << ranks_total) - 1)

    def give_up(self, slots: IntArray) -> None:
        """These slots are somebody else's now (published, or freed)."""
        for slot in slots.tolist():
            del self._row_of[slot]
            self._ranks_of.pop(slot, None)


@dataclass(slots=True)
class _Hold:
    """Slots of an ended reservation. `waiting` is the part of `writers` not heard of yet."""

    slots: IntArray
    bytes: int
    writers: frozenset[ClientId]
    waiting: set[ClientId] = field(default_factory=set)


class ReservationTable:
    """Write reservations, and slots held back because a writer may still be at them."""

    def __init__(self, ids: Callable[[], int], *, quarantine_bytes_max: int) -> None:
        """`quarantine_bytes_max`: past it a client is to get no reservations."""
        self._ids = ids
        self._quarantine_bytes_max = quarantine_bytes_max
        self._reservations: dict[ReservationId, Reservation] = {}
        self._of_client: dict[ClientId, set[ReservationId]] = {}
        self._holds: dict[ReservationId, _Hold] = {}
        self._held_for: dict[ClientId, set[ReservationId]] = {}
        self._counts = {"granted": 0, "held": 0, "acknowledged": 0}

    def grant(
        self,
        client: ClientId,
        engine: str,
        namespace: int,
        slots: IntArray,
        rows: IntArray,
        deadline: float,
        *,
        slot_bytes: int,
        reservation: int = 0,
    ) -> Reservation:
        """`slots` (int64[n], FILLING) are `engine`'s to fill, each for its row.

        All rows ABSENT_ROW: an anonymous reservation, named at commit.
        """
        found = Reservation(
            id=ReservationId(reservation or self._ids()),
            client=client,
            engine=engine,
            namespace=namespace,
            deadline=deadline,
            slot_bytes=slot_bytes,
            is_anonymous=bool((rows == ABSENT_ROW).all()),
            _row_of=dict(zip(slots.tolist(), rows.tolist(), strict=True)),
        )
        self._reservations[found.id] = found
        self._of_client.setdefault(client, set()).add(found.id)
        self._counts["granted"] += 1
        return found

    def is_known(self, reservation: int) -> bool:
        """Whether it lives, or its slots are held."""
        return reservation in self._reservations or reservation in self._holds

    def find(self, engine: str, reservation: ReservationId) -> Reservation:
        """A live reservation of this engine. Raises ReservationUnknown."""
        found = self._reservations.get(reservation)
        if found is None or found.engine != engine:
            where = "ended, belongs to another engine or never existed; reserve again"
            raise ReservationUnknown(f"reservation {reservation} {where}")
        return found

    def renew(self, found: Reservation, deadline: float) -> None:
        """Move the deadline, never to an earlier time."""
        found.deadline = max(found.deadline, deadline)

    def expire(self, now: float) -> list[Reservation]:
        """Reservations whose deadline has passed; the caller ends or holds each."""
        return [found for found in self._reservations.values() if found.deadline <= now]

    def of_client(self, client: ClientId) -> list[Reservation]:
        """Live reservations granted to `client`."""
        return [self._reservations[found] for found in self._of_client.get(client, ())]

    def anonymous_bytes(self, client: ClientId) -> int:
        """Bytes of the slots in the anonymous reservations of `client`, whatever their size."""
        anonymous = [found for found in self.of_client(client) if found.is_anonymous]
        return sum(found.slots_left * found.slot_bytes for found in anonymous)

    def end(self, found: Reservation) -> None:
        """The reservation is over; its slots are the caller's."""
        del self._reservations[found.id]
        _discard(self._of_client, found.client, found.id)

    def hold(self, found: Reservation, slots: IntArray, writers: set[ClientId]) -> None:
        """End a reservation, keeping `slots` until each of `writers` is done or gone."""
        self.end(found)
        if not slots.size:
            return
        check(writers, "somebody can still write", reservation=found.id)
        size = slots.size * found.slot_bytes
        self._holds[found.id] = _Hold(slots, size, frozenset(writers), set(writers))
        for writer in writers:
            self._held_for.setdefault(writer, set()).add(found.id)
        self._counts["held"] += 1

    def acknowledge(
        self, client: ClientId, reservation: ReservationId, *, is_last: bool = True
    ) -> IntArray | None:
        """A copy of `client` into an ended reservation has ended; `is_last`: and no other goes on.

        Slots nobody can write any more, to be freed now; None: nothing is held for it there.
        """
        hold = self._holds.get(reservation)
        if hold is None or client not in hold.writers:
            return None
        self._counts["acknowledged"] += is_last
        return self._heard(client, reservation) if is_last else _NO_SLOTS

    def client_gone(self, client: ClientId) -> IntArray:
        """The process is proved gone: slots that were held only for it, to be freed now."""
        held = list(self._held_for.get(client, ()))
        freed = [self._heard(client, reservation) for reservation in held]
        return np.concatenate(freed) if freed else _NO_SLOTS

    def quarantined_bytes(self, client: ClientId) -> int:
        """Bytes of slots that wait for a word of `client`."""
        return sum(self._holds[held].bytes for held in self._held_for.get(client, ()))

    def is_over_quarantine(self, client: ClientId) -> bool:
        """Whether `client` is to get no reservation until it acknowledges earlier ones."""
        return self.quarantined_bytes(client) >= self._quarantine_bytes_max

    @property
    def unnamed_slots(self) -> int:
        """Slots of all anonymous reservations: granted, and no row's yet."""
        every = self._reservations.values()
        return sum(found.slots_left for found in every if found.is_anonymous)

    @property
    def quarantined_slots(self) -> int:
        """Slots held back because a writer may still be at them."""
        return sum(hold.slots.size for hold in self._holds.values())

    def statistics(self) -> dict[str, int]:
        """What is reserved and held now, and counters since the start."""
        return {
            "active": len(self._reservations),
            "slots": sum(found.slots_left for found in self._reservations.values()),
            "quarantined_slots": self.quarantined_slots,
            "quarantined_bytes": sum(hold.bytes for hold in self._holds.values()),
            **self._counts,
        }

    def _heard(self, client: ClientId, reservation: ReservationId) -> IntArray:
        hold = self._holds[reservation]
        hold.waiting.discard(client)
        _discard(self._held_for, client, reservation)
        return _NO_SLOTS if hold.waiting else self._holds.pop(reservation).slots


def _discard(table: dict[ClientId, set[Any]], client: ClientId, item: int) -> None:
    mine = table.get(client, set())
    mine.discard(item)
    if not mine:
        table.pop(client, None)
