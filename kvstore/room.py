"""Making room in the host tier: which replicas leave so that others may come.

Primitives of `Room`:
  `host_slots`     slots to fill, evicting the least valuable idle leaves when none is free
  `take_slab_from` a starving block size gets the slab that is worth least to another one
Synchronous, on the daemon's loop. Never evicts what a lease or a job holds; "no room" is a short
list.
"""

from __future__ import annotations

import numpy as np

from kvstore.policy import VictimPicker
from kvstore.store import READY, Store
from kvstore.types import IntArray, Tier

EVICT_BATCH_MIN = 16
"""Victims a pass: one pass costs a sampling, whatever it finds."""


class Room:
    """Eviction in the host tier, on behalf of writers and promotions."""

    def __init__(self, store: Store, picker: VictimPicker) -> None:
        self._store = store
        self._picker = picker

    def host_slots(
        self, slot_bytes: int, count: int, now: float, *, staging: bool = False
    ) -> list[int]:
        """Up to `count` slots of one size, FILLING. `staging` may dip into the share kept for
        promotions.
        """
        host = self._store.host
        if host is None or count <= 0:
            return []
        slot_bytes = host.slot_bytes_for(slot_bytes)
        slots = host.take(slot_bytes, count)
        while len(slots) < count:
            missing = count - len(slots)
            if not self.evict(slot_bytes, max(missing, EVICT_BATCH_MIN), now) and not (
                self.take_slab_from(slot_bytes, now)
            ):
                break
            got = host.take(slot_bytes, missing)
            if not got:
                break
            slots += got
        if staging and len(slots) < count:
            slots += host.take(slot_bytes, count - len(slots), staging=True)
        return slots

    def evict(self, slot_bytes: int, count: int, now: float) -> int:
        """Drop up to `count` idle leaves of one block size; return how many went."""
        store = self._store
        host = store.host_tier
        held = host.pool.slots_of_class(slot_bytes)
        if not len(held):
            return 0
        victims = self._picker.pick(held, Tier.HOST, count, now)
        store.drop_host(victims, "evicted", now)
        return len(victims)

    def take_slab_from(self, slot_bytes: int, now: float) -> bool:
        """Empty the idle slab of another block size that is worth least per byte; whether one came
        free.

        Only a size that holds less than its share (bytes ÷ sizes in use) may take, so that two
        sizes never
        steal from each other in turn.
        """
        store, pool = self._store, self._store.host_tier.pool
        sizes = pool.classes()
        others = [size for size in sizes if size != slot_bytes]
        if not others:
            return False
        fair_slabs = len(pool.slabs_of_class(slot_bytes)) * (len(others) + 1)
        total = sum(len(pool.slabs_of_class(size)) for size in {*sizes, slot_bytes})
        if fair_slabs >= total:
            return False
        best: IntArray | None = None
        best_value = np.inf
        for size in others:
            for slab in pool.slabs_of_class(size):
                rows = store.catalog.host_rows_of(pool.slots_in_slab(int(slab)))
                value = self._value_of(rows, now)
                if value < best_value:
                    best, best_value = rows, value
        if best is None:
            return False
        self._empty(best, now)
        return True

    def _value_of(self, rows: IntArray, now: float) -> float:
        """Mean score of a slab's blocks; infinite when one of them may not leave now."""
        store = self._store
        if (rows < 0).any() or not store.is_idle(rows).all():
            return np.inf
        if (store.catalog.host_state[rows] != READY).any():
            return np.inf
        return float(store.policy.scores(rows, Tier.HOST, now).mean()) if len(rows) else -np.inf

    def _empty(self, rows: IntArray, now: float) -> None:
        """Drop `rows` and the idle descendants that would have no ancestor left."""
        store, columns = self._store, self._store.catalog
        doomed: set[int] = set()
        for row in rows:
            if columns.nvme_state[row] != READY and int(row) not in doomed:
                doomed.update(int(item) for item in columns.subtree(int(row)))
        doomed.update(int(row) for row in rows)
        leaving = np.array(sorted(doomed), np.int64)
        leaving = leaving[(columns.host_state[leaving] == READY) & store.is_idle(leaving)]
        store.drop_host(leaving, "evicted", now)
