"""How reservations end: by their client's word, by their deadline, by its death.

Primitives of `ReservationEnds`: `end`, `abort`, `expire`, `client_lost`, `client_gone`.
Slots come back at once when nobody can still copy into them; else they are quarantined until every
client that might has said that its last copy ended, or its process is proved gone.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.catalog import ABSENT_ROW
from kvstore.lease import Reservation
from kvstore.store import FILLING, Store
from kvstore.types import ClientId, IntArray, ReplicaState, ReservationId


class ReservationEnds:
    """`engine_clients` names the clients of an engine whose processes may touch the arena."""

    def __init__(self, store: Store, engine_clients: Callable[[str], set[ClientId]]) -> None:
        self._store = store
        self._engine_clients = engine_clients

    def abort(self, client: ClientId, engine: str, reservation: ReservationId) -> int:
        """End a reservation; also this client's word that its last copy into it has ended. Slots
        freed now.
        """
        store = self._store
        freed = store.reservations.acknowledge(client, reservation)
        if freed is not None:
            store.host_tier.free(freed)
            return len(freed)
        found = store.reservations.find(engine, reservation)
        return self.end(found, client)

    def expire(self, now: float) -> None:
        """Reservations past their deadline: names are dropped, slots quarantined until their
        writers are done.
        """
        for found in self._store.reservations.expire(now):
            self._store.counters.add("expired_reservations")
            self._quarantine(found, self._writers(found))

    def client_lost(self, client: ClientId) -> None:
        """A client's Attach stream ended: its reservations end; slots wait until its process is
        known to be gone.
        """
        for found in self._store.reservations.of_client(client):
            self._quarantine(found, self._writers(found))

    def client_gone(self, client: ClientId) -> None:
        """The client's process is proved gone: what was quarantined for it alone is free."""
        freed = self._store.reservations.client_gone(client)
        if len(freed):
            self._store.host_tier.free(freed)

    def end(self, found: Reservation, client: ClientId) -> int:
        """The owner is done: unfilled slots are free, unless another rank's process may still
        copy.
        """
        others = self._engine_clients(found.engine) - {client}
        layout = self._store.namespaces.at(found.namespace).layout
        if found.slots_left and layout.ranks > 1 and others and not found.is_anonymous:
            self._quarantine(found, others)
            return 0
        slots = self._drop_names(found)
        self._store.reservations.end(found)
        self._store.host_tier.free(slots)
        return len(slots)

    def _writers(self, found: Reservation) -> set[ClientId]:
        """Whose processes may still copy into its slots. A named one may have been joined by any
        process of its engine; of slots without names only its owner knows.
        """
        owner = {found.client}
        return owner if found.is_anonymous else owner | self._engine_clients(found.engine)

    def _quarantine(self, found: Reservation, writers: set[ClientId]) -> None:
        slots = self._drop_names(found)
        self._store.host_tier.quarantine(slots)
        self._store.reservations.hold(found, slots, writers)

    def _drop_names(self, found: Reservation) -> IntArray:
        """Forget the FILLING rows of a reservation but keep its slots; committed children are
        dropped.
        """
        store, columns = self._store, self._store.catalog
        slots = found.slots
        rows = found.rows
        rows = rows[rows != ABSENT_ROW]
        rows = rows[columns.host_state[rows] == FILLING]
        columns.set_host(rows, ReplicaState.ABSENT)
        for row in rows.tolist():
            for child in store.waiting.pop(row, ()):
                store.drop_unready(child, "parent_lost")
        store.counters.add("store_blocks:dropped", len(rows))
        columns.remove_if_bare(rows)
        return slots
