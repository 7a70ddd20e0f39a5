"""Slots reserved beforehand, so that a store copies at once and asks nobody.

Primitives of `SpareSlots` (one a namespace that is stored to):
  `take(life, count)`   all `count` slots, or none; `want(count)` after a store of that size
  `settle(taken, ...)`  taken slots are about to be committed; is it the reservation's last commit
  `give_up(taken)`      taken slots that will not be committed
  `attend(life, now)`   the keeper's turn: refill, renew, give back what is idle

How many are kept follows what stores took lately, within SPARE_SLOTS_MAX, SPARE_BYTES_MAX and a
share of the arena. May not copy bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from kvstore.client.life import Declared, Life
from kvstore.client.session import Session
from kvstore.errors import LeaseError, ReservationUnknown
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc.wire import NO_OFFSET, unpack_u64

SPARE_SLOTS_MAX = 32
SPARE_BYTES_MAX = 256 << 20
SPARE_ARENA_SHARE = 8
"""At most an eighth of the arena lies reserved for one namespace of one client."""
IDLE_SECONDS = 30.0
"""Slots nobody stored into for so long go back."""
NO_ROOM_SECONDS = 0.5
"""Pause before asking again a daemon that granted less than was asked."""
_USABLE_SHARE = 0.25
"""A reservation this near its end is not taken from: the copy and the commit must fit in the
rest."""


@dataclass(eq=False)
class Reserved:
    """One anonymous reservation. `busy` slots were taken and are not committed yet."""

    id: int
    life: Life
    deadline: float
    seconds: float
    free: deque[int] = field(default_factory=deque)
    busy: int = 0
    is_retired: bool = False
    """No slot may be taken any more; it ends with the last busy one."""


@dataclass(frozen=True)
class Spare:
    """One slot that is the taker's: byte offset in the arena."""

    reserved: Reserved
    offset: int


class SpareSlots:
    """Thread-safe. `abort` queues an Abort."""

    def __init__(
        self,
        session: Session,
        namespace: bytes,
        declared: Callable[[Life], Declared],
        abort: Callable[[Life, int], None],
        clock: Callable[[], float],
    ) -> None:
        self._session = session
        self._namespace = namespace
        self._declared = declared
        self._abort = abort
        self._now = clock
        self._lock = Lock()
        self._all: list[Reserved] = []
        self._largest = 0
        self._last_taken = 0.0
        self._is_withdrawn = False
        self._refill_from = 0.0
        """The daemon had no room lately: ask again at this time."""

    @property
    def free(self) -> int:
        """Slots at hand."""
        with self._lock:
            return sum(len(reserved.free) for reserved in self._all)

    def take(self, life: Life, count: int) -> list[Spare]:
        """`count` slots, or an empty list."""
        now = self._now()
        taken: list[Spare] = []
        with self._lock:
            usable = [
                reserved
                for reserved in self._all
                if reserved.life is life
                and not reserved.is_retired
                and reserved.deadline - now > reserved.seconds * _USABLE_SHARE
            ]
            # One reservation for the whole store if possible: one commit publishes it.
            usable.sort(key=lambda reserved: len(reserved.free) < count)
            if sum(len(reserved.free) for reserved in usable) >= count:
                for reserved in usable:
                    while reserved.free and len(taken) < count:
                        taken.append(Spare(reserved, reserved.free.popleft()))
                        reserved.busy += 1
        return taken

    def want(self, count: int) -> None:
        """A store of `count` blocks was made: keep enough for others like it.

        Not before its own slots are taken, or the refill would compete with it for the last ones.
        """
        with self._lock:
            self._last_taken = self._now()
            self._largest = max(self._largest, count)

    def settle(self, reserved: Reserved, count: int) -> bool:
        """`count` busy slots are about to be named in a commit. True: it is the last one."""
        with self._lock:
            reserved.busy -= count
            is_last = not reserved.busy and (reserved.is_retired or not reserved.free)
            if is_last:
                self._forget(reserved)
            return is_last

    def give_up(self, taken: Sequence[Spare]) -> None:
        """The copy did not happen, or has ended in vain: the daemon gets the slots back in time."""
        with self._lock:
            for spare in taken:
                spare.reserved.busy -= 1
                spare.reserved.is_retired = True
                self._end_if_done(spare.reserved)

    def failed(self, reserved: Reserved) -> None:
        """A commit after `settle` did not get through: the reservation ends."""
        with self._lock:
            if reserved in self._all:
                self._retire(reserved)
            else:
                self._abort(reserved.life, reserved.id)

    def withdraw(self) -> None:
        """Give back everything that nobody is copying into; for close."""
        with self._lock:
            self._is_withdrawn = True
            for reserved in list(self._all):
                self._retire(reserved)

    # ------------------------------------------------------------------ the keeper's turn

    def attend(self, life: Life, now: float) -> None:
        """Refill, renew, retire. Raises KVStoreError from the calls it makes."""
        with self._lock:
            is_idle = now - self._last_taken > IDLE_SECONDS
            for reserved in list(self._all):
                if reserved.life is not life or reserved.deadline <= now or is_idle:
                    self._retire(reserved)
            if is_idle:
                self._largest = 0
            wanted = 2 * self._largest
            due = [r for r in self._all if r.deadline - now < r.seconds / 2]
        if not wanted or life.is_draining or self._is_withdrawn:
            return
        for reserved in due:
            self._renew(life, reserved)
        self._refill(life, min(wanted, self._most(life)))

    def forget(self) -> None:
        """Of a life that is over nothing can be used, nor given back."""
        with self._lock:
            self._all = [reserved for reserved in self._all if not reserved.life.is_over]

    def _most(self, life: Life) -> int:
        most_bytes = min(SPARE_BYTES_MAX, life.arena_bytes // SPARE_ARENA_SHARE)
        return min(SPARE_SLOTS_MAX, most_bytes // self._declared(life).slot_bytes)

    def _renew(self, life: Life, reserved: Reserved) -> None:
        request = pb.RenewRequest(client=life.client, reservation=reserved.id)
        sent = self._now()
        try:
            reply = self._session.call_until_closed("Renew", request)
        except (ReservationUnknown, LeaseError):
            with self._lock:
                self._retire(reserved)
            return
        reserved.seconds = reply.lease_seconds
        reserved.deadline = sent + reply.lease_seconds

    def _refill(self, life: Life, target: int) -> None:
        missing, sent = target - self.free, self._now()
        if missing <= 0 or sent < self._refill_from:
            return
        request = pb.ReserveRequest(namespace=self._namespace, count=missing)
        reply = self._session.reserve(life, request, self._abort)
        offsets = unpack_u64(reply.offsets, "offsets").tolist()
        slots = sorted(offset for offset in offsets if offset != NO_OFFSET)
        if len(slots) < missing:
            self._refill_from = self._now() + NO_ROOM_SECONDS
        if not reply.reservation:
            return
        reserved = Reserved(
            reply.reservation, life, sent + reply.lease_seconds, reply.lease_seconds, deque(slots)
        )
        with self._lock:
            self._all.append(reserved)
            if self._is_withdrawn:
                self._retire(reserved)

    def _retire(self, reserved: Reserved) -> None:
        reserved.is_retired = True
        self._end_if_done(reserved)

    def _end_if_done(self, reserved: Reserved) -> None:
        """A retired reservation with no copy under way is aborted: that frees its slots."""
        if reserved.is_retired and not reserved.busy and reserved in self._all:
            self._forget(reserved)
            self._abort(reserved.life, reserved.id)

    def _forget(self, reserved: Reserved) -> None:
        """It may be gone already: `forget` lets go of a whole life at any time."""
        if reserved in self._all:
            self._all.remove(reserved)
