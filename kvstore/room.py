"""Making room in the host tier: which replicas leave so that others may come.

Primitives of `Room`:
  `host_slots`     slots to fill, evicting the least valuable idle leaves when none is free
  `take_slab_for`  a block size below its share gets a slab that is worth less to another one
`OpenEnds`: last blocks of chains that still grow, not to be given for their own next block.
Synchronous, on the daemon's loop, in bounded steps. Never evicts what a lease or a job holds, nor
what others need to be reached (I5); "no room" is a short list.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from kvstore.catalog import ABSENT_ROW
from kvstore.policy import VictimPicker
from kvstore.store import NO_ROWS, READY, Store
from kvstore.types import IntArray, Tier

EMPTY_ROWS_MAX = 128
"""Blocks of a given-up slab that leave in one step."""
LOOK_ROWS_MAX = 8192
"""Blocks one search for a slab looks at; the next one goes on behind them."""
SHED_LOOK_SLABS = 16
"""Slabs compared before one is given up for good."""
LOOK_PAUSE_SECONDS = 0.02
"""Pause after a search that found no slab worth less."""
ENDS_MAX = 256
ENDS_SHARES = 8, 64
"""Parts of a size's slots that the ends of growing chains may keep from leaving: an eighth of them
while anything else can leave, the latest ones after that."""


class Room:
    """Eviction in the host tier, on behalf of writers and promotions."""

    def __init__(self, store: Store, picker: VictimPicker) -> None:
        self._store = store
        self._picker = picker
        self.ends = OpenEnds(store)
        self._emptying: int | None = None
        """Slab that is being given up: closed, its blocks leave step by step."""
        self._look_from = 0
        self._look_after = -np.inf

    def host_slots(
        self,
        slot_bytes: int,
        count: int,
        now: float,
        *,
        staging: bool = False,
        keeps_ends: bool = False,
    ) -> list[int]:
        """Up to `count` slots of one size, FILLING. `staging` may dip into the share kept for
        promotions. The ends of chains that grow leave last; with `keeps_ends` the latest never do.
        """
        host = self._store.host_tier
        if count <= 0:
            return []
        slot_bytes = host.slot_bytes_for(slot_bytes)
        slots = host.take(slot_bytes, count)
        while len(slots) < count:
            missing = count - len(slots)
            if not self.take_slab_for(slot_bytes, now) and not (
                self._evict(slot_bytes, missing, now, keeps_ends)
            ):
                break
            slots += host.take(slot_bytes, missing)
        if staging and len(slots) < count:
            slots += host.take(slot_bytes, count - len(slots), staging=True)
        return slots

    def _evict(self, slot_bytes: int, count: int, now: float, keeps_ends: bool) -> bool:
        """Drop up to `count` idle leaves of one block size; whether any went."""
        store, pins = self._store, self._store.catalog.pins
        held = store.host_tier.pool.slots_of_class(slot_bytes)
        if not len(held):
            return False
        kept = self.ends.sets(len(held), now)
        for rows in kept if keeps_ends and kept else (*kept, NO_ROWS):
            pins[rows] += 1
            victims = self._picker.choose(held, Tier.HOST, count, now)
            pins[rows] -= 1
            if len(victims):
                store.drop_host(victims, "evicted", now)
                return True
        return False

    # ------------------------------------------------------------------ between block sizes

    def take_slab_for(self, slot_bytes: int, now: float) -> bool:
        """Go on emptying a slab of another size, if one is worth less; whether one came free.

        Only a size with less than its share (bytes ÷ sizes in use) takes, and only from one with
        more, so that two sizes never steal from each other in turn.
        """
        if self._emptying is None and not self._choose(slot_bytes, now):
            return False
        return self._empty_some(now)

    def _choose(self, slot_bytes: int, now: float) -> bool:
        if now < self._look_after:
            return False
        donors = self._donors(slot_bytes)
        best, best_value = -1, self._own_value(slot_bytes, now) if donors else -np.inf
        seen, looked_at = 0, 0
        while donors and looked_at < len(donors) and seen < LOOK_ROWS_MAX:
            slab = donors[(self._look_from + looked_at) % len(donors)]
            looked_at += 1
            rows = self._leaving(slab)
            if rows is None:
                continue
            seen += len(rows)
            value = self._value_of(rows, now)
            if value < best_value:
                best, best_value = slab, value
        self._look_from += looked_at
        if best < 0:
            self._look_after = now + LOOK_PAUSE_SECONDS
            return False
        self._store.host_tier.pool.close_slab(best)
        self._emptying = best
        return True

    def shed_slab(self, now: float) -> bool:
        """Go on emptying the slab of least value among all; False when none can be emptied now."""
        pool = self._store.host_tier.pool
        if self._emptying is None:
            slabs = [int(slab) for size in pool.classes() for slab in pool.slabs_of_class(size)]
            start = self._look_from % max(len(slabs), 1)
            values = {
                slab: self._value_of(rows, now)
                for slab in (slabs[start:] + slabs[:start])[:SHED_LOOK_SLABS]
                if (rows := self._leaving(slab)) is not None
            }
            self._look_from += SHED_LOOK_SLABS
            if not values:
                return False
            self._emptying = min(values, key=lambda slab: values[slab])
            pool.close_slab(self._emptying)
        before = self._emptying
        return self._empty_some(now) or self._emptying == before

    def _donors(self, slot_bytes: int) -> list[int]:
        """Slabs of the sizes that have more than their share, if `slot_bytes` has less."""
        pool = self._store.host_tier.pool
        slabs = {size: pool.slabs_of_class(size) for size in {*pool.classes(), slot_bytes}}
        weight = {size: len(found) * -(-size // pool.slab_bytes) for size, found in slabs.items()}
        share = sum(weight.values()) / len(slabs)
        if weight[slot_bytes] >= share:
            return []
        return [int(slab) for size in slabs if weight[size] > share for slab in slabs[size]]

    def _own_value(self, slot_bytes: int, now: float) -> float:
        """Score of the block that would leave otherwise; infinite when none can."""
        held = self._store.host_tier.pool.slots_of_class(slot_bytes)
        rows = self._picker.pick(held, Tier.HOST, 1, now)
        return self._value_of(rows, now) if len(rows) else np.inf

    def _value_of(self, rows: IntArray, now: float) -> float:
        """Mean score; nothing is worth less than everything."""
        if not len(rows):
            return -np.inf
        return float(self._store.policy.scores(rows, Tier.HOST, now).mean())

    def _leaving(self, slab: int) -> IntArray | None:
        """Rows of a slab that may leave all together; None when something holds one of them, or a
        block elsewhere would be left without a way to it.
        """
        store, columns = self._store, self._store.catalog
        rows = columns.host_rows_of(store.host_tier.pool.slots_in_slab(slab))
        if (rows < 0).any() or (columns.host_state[rows] != READY).any():
            return None
        if not store.is_idle(rows).all():
            return None
        ranked = np.sort(rows)
        parents = columns.parent[rows]
        at = np.minimum(ranked.searchsorted(parents), max(len(ranked) - 1, 0))
        here = at[ranked[at] == parents] if len(ranked) else at
        children_here = np.bincount(here, minlength=len(ranked))
        elsewhere = columns.host_children[ranked] > children_here
        needed = elsewhere & (columns.nvme_state[ranked] != READY)
        return None if needed.any() else rows

    def _empty_some(self, now: float) -> bool:
        """The deepest blocks first; when one came to be held meanwhile, the slab stays."""
        store, slab = self._store, self._emptying
        assert slab is not None
        rows = self._leaving(slab)
        if rows is None:
            store.host_tier.pool.reopen_slab(slab)
            self._emptying = None
            return False
        deepest = np.argsort(store.catalog.depth[rows].astype(np.int64))[::-1]
        leaving = rows[deepest][:EMPTY_ROWS_MAX]
        store.drop_host(leaving, "evicted", now)
        if len(leaving) < len(rows):
            return False
        self._emptying = None
        return True


class OpenEnds:
    """Last blocks of the chains stored to within a reservation's life, by name.

    Slots may be granted before anybody says what will hang on what; were they made of a chain's
    end, its next block could not be stored.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ends: OrderedDict[bytes, float] = OrderedDict()
        """Name -> when it was stored; the latest last."""

    def grew(self, rows: IntArray, now: float) -> None:
        """`rows` were stored, each after its parent."""
        columns = self._store.catalog
        for row, parent in zip(rows.tolist(), columns.parent[rows].tolist(), strict=True):
            name = columns.fingerprints[row].tobytes()
            self._ends.pop(name, None)
            self._ends[name] = now
            if parent >= 0:
                self._ends.pop(columns.fingerprints[parent].tobytes(), None)
        while len(self._ends) > ENDS_MAX:
            self._ends.popitem(last=False)

    def sets(self, slots: int, now: float) -> list[IntArray]:
        """Rows that stay in a size of so many slots, and the latest of them, which stay longer."""
        oldest = now - self._store.config.lease.write_seconds
        while self._ends and next(iter(self._ends.values())) < oldest:
            self._ends.popitem(last=False)
        names = list(self._ends)
        found: list[IntArray] = []
        for share in ENDS_SHARES:
            most = min(max(1, slots // share), slots - 1)
            rows = self._store.catalog.rows(b"".join(names[-most:] if most else ()))
            found.append(rows[rows != ABSENT_ROW])
        return [rows for rows in found if len(rows)]
