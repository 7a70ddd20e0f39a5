"""The GPU tier in the store: second copies of the host blocks that are worth most.

Primitives of `GpuCopies`:
  `turn`            a bounded step: a lot of copies, memory to give back
  `drop`            copies leave; the host replica stays
  `resize`, `press` how much device memory the tier may hold; what engines ask back of it
  `has`             which rows have a copy

A block here has a READY replica in the host tier as well: promoted blocks stay there, demotion is
letting go, and nothing is lost with a slab or a device. What the host tier drops leaves here first.
Blocks that were used come up, in lots, where the policy finds them worth more than what is here.
All on the loop, but for staging: a worker copies a lot to pinned memory and verifies it there.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import numpy as np

from kvstore.arrays import distinct
from kvstore.catalog import ABSENT_ROW
from kvstore.errors import DeviceError, check
from kvstore.logs import get_logger
from kvstore.namespaces import Namespace
from kvstore.store import NO_ROWS, READY, Store
from kvstore.tier.gpu import GpuTier
from kvstore.types import BoolArray, ByteArray, ClientId, IntArray, Tier, UIntArray
from kvstore.writes import checksums_of

LOT_BYTES = 16 << 20
"""Copied in one go, at least one block."""
CANDIDATES_MAX = 1024
"""Requests whose blocks wait to be looked at; the oldest are forgotten."""
LOOK_ROWS = 256
NO_SLOT = -1
RANKED_MAX = 4096
"""Copies that a lot is held against; of more, an even sample."""


@dataclass(eq=False)
class _Lot:
    """Blocks of one namespace on their way up; their rows are pinned."""

    namespace: Namespace
    rows: IntArray
    slots: IntArray
    views: list[ByteArray]
    checksums: UIntArray
    staging: ByteArray
    good: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    work: Future[None] | None = None
    event: int = 0

    @property
    def lengths(self) -> UIntArray:
        return np.full(len(self.rows), self.namespace.layout.block_bytes, np.uint64)

    def stage(self) -> None:
        """Worker thread: into pinned memory, and verified there."""
        size = self.namespace.layout.block_bytes
        staged = [self.staging[at * size : (at + 1) * size] for at in range(len(self.views))]
        for to, view in zip(staged, self.views, strict=True):
            np.copyto(to, view)
        self.good = (checksums_of(self.namespace, staged) == self.checksums).all(axis=1)

    def sources(self) -> UIntArray:
        """Where each block lies in pinned memory."""
        at = np.arange(len(self.rows), dtype=np.uint64) * self.lengths
        return at + np.uint64(self.staging.ctypes.data)


class GpuCopies:
    """Owns the books over `store.gpu`; a device that failed once leaves them empty for good."""

    def __init__(self, store: Store, tier: GpuTier, workers: Executor) -> None:
        self._store = store
        self._tier = tier
        self._workers = workers
        self._rows: IntArray = np.full(tier.pool.slots_max, ABSENT_ROW, np.int64)
        """Row of each slot whose copy is READY."""
        self._slot_of: IntArray = np.empty(0, np.int64)
        """The same by row, NO_SLOT without a copy; grows with the catalog."""
        self._count = 0
        self._candidates: deque[IntArray] = deque(maxlen=CANDIDATES_MAX)
        self._lot: _Lot | None = None
        self._limit_bytes = tier.bytes_max
        self._pressure: dict[ClientId, int] = {}
        self.failure = ""
        """Why the tier is given up; "" while it serves."""
        self._log = get_logger("gpu")
        store.on_used.append(self._candidates.append)
        store.on_host_leaves = self.drop
        store.in_gpu = self.has

    # ------------------------------------------------------------------ what is here

    def __len__(self) -> int:
        return self._count

    def has(self, rows: IntArray) -> BoolArray:
        """Rows with a READY copy, bool[n]."""
        result: BoolArray = self._slots(rows) != NO_SLOT
        return result

    def _slots(self, rows: IntArray) -> IntArray:
        missing = len(self._store.catalog.parent) - len(self._slot_of)
        if missing:
            more = np.full(missing, NO_SLOT, np.int64)
            self._slot_of = np.concatenate((self._slot_of, more))
        return self._slot_of[rows]

    def drop(self, rows: IntArray) -> None:
        """Their copies leave, those that there are; unreadable first."""
        rows = rows[self.has(rows)]
        if len(rows):
            slots = self._slots(rows)
            self._tier.directory.retract(slots)
            self._rows[slots], self._slot_of[rows] = ABSENT_ROW, NO_SLOT
            self._tier.free(slots)
            self._count -= len(rows)
            self._store.counters.add("gpu_blocks:left", len(rows))

    # ------------------------------------------------------------------ how much

    def resize(self, bytes_max: int) -> None:
        """So much device memory at most from now on, whole slabs, up to what it was at first."""
        self._limit_bytes = bytes_max
        self._resize()

    def press(self, client: ClientId, device_bytes: int) -> None:
        """This engine needs so much of it, in all, until it says otherwise; 0: none."""
        if device_bytes == self._pressure.get(client, 0):
            return
        self._pressure[client] = device_bytes
        self._resize()

    def _resize(self) -> None:
        asked = sum(self._pressure.values())
        self._tier.resize(max(self._limit_bytes - asked, 0))
        self._log.info("gpu tier resized", bytes=self._tier.bytes_max, asked_back=asked)

    # ------------------------------------------------------------------ the periodic step

    def turn(self, now: float) -> None:
        """A bounded step, which never waits for the device."""
        if self.failure:
            return
        try:
            self.drop(self._leaving())
            if self._lot is None:
                self._begin(now)
            elif self._has_come(self._lot):
                self._finish(self._lot)
        except DeviceError as error:
            self.give_up(str(error))

    def give_up(self, reason: str) -> None:
        """The device failed: what is here is read no more. Memory and slots stay as they are, for
        nobody knows what still runs."""
        self.failure = reason
        self._log.error("gpu tier given up", reason=reason)
        held = np.flatnonzero(self._rows != ABSENT_ROW)
        self._tier.directory.retract(held)
        self._rows[:], self._slot_of[:], self._count = ABSENT_ROW, NO_SLOT, 0
        self._candidates.clear()
        if self._lot is not None:
            self._store.catalog.pins[self._lot.rows] -= 1
            self._lot = None

    def _leaving(self) -> IntArray:
        """Rows in slabs that are given back; also leased ones, whose host replica stays."""
        rows = self._rows[self._tier.leaving()]
        leaving: IntArray = rows[rows != ABSENT_ROW]
        return leaving

    # ------------------------------------------------------------------ promotion

    def _begin(self, now: float) -> None:
        rows = self._next_rows(now)
        if not len(rows):
            return
        store, columns, tier = self._store, self._store.catalog, self._tier
        size = tier.slot_bytes_for(int(columns.length[rows[0]]))
        slots = tier.take(size, len(rows))
        if len(slots) < len(rows):
            self.drop(self._worth_less(size, rows[len(slots) :], now))
            slots += tier.take(size, len(rows) - len(slots))
        rows = rows[: len(slots)]
        if not len(rows):
            return
        namespace = store.namespaces.at(int(columns.namespace[rows[0]]))
        length = namespace.layout.block_bytes
        host = store.host_tier
        lot = _Lot(
            namespace,
            rows,
            np.array(slots, np.int64),
            [host.view(slot, length) for slot in columns.host_slot[rows].tolist()],
            columns.checksums[rows].copy(),
            tier.staging(length * len(rows)),
        )
        columns.pins[rows] += 1
        self._lot = lot
        lot.work = self._workers.submit(lot.stage)

    def _next_rows(self, now: float) -> IntArray:
        """Used rows of one namespace that have no copy here, the most valuable first."""
        store, columns = self._store, self._store.catalog
        found: list[IntArray] = [NO_ROWS]
        while self._candidates and sum(map(len, found)) < LOOK_ROWS:
            found.append(self._candidates.popleft())
        rows: IntArray = distinct(np.concatenate(found))
        rows = rows[store.is_current(rows) & (columns.host_state[rows] == READY)]
        rows = rows[~self.has(rows)]
        if not len(rows):
            return rows
        same = columns.namespace[rows] == columns.namespace[rows[0]]
        if not same.all():
            self._candidates.append(rows[~same])
        rows = rows[same]
        rows = rows[np.argsort(-store.policy.scores(rows, Tier.GPU, now), kind="stable")]
        most = max(1, LOT_BYTES // int(columns.length[rows[0]]))
        if len(rows) > most:
            self._candidates.append(rows[most:])
        return rows[:most]

    def _worth_less(self, size: int, rows: IntArray, now: float) -> IntArray:
        """Copies in slots of this size that leave for `rows`, which are the best ones first."""
        scores = self._store.policy.scores
        held: IntArray = self._rows[self._tier.pool.slots_of_class(size)]
        held = held[held != ABSENT_ROW]
        held = held[self._store.catalog.leases[held] == 0][:: len(held) // RANKED_MAX + 1]
        old = scores(held, Tier.GPU, now)
        order = np.argsort(old, kind="stable")[: len(rows)]
        is_better = scores(rows[: len(order)], Tier.GPU, now) > old[order]
        return held[order][is_better]

    def _has_come(self, lot: _Lot) -> bool:
        """Whether the copies of a lot have ended; they are started once it is staged."""
        if lot.work is None:
            return self._tier.has_ended(lot.event)
        if lot.work.done():
            lot.work.result()
            lot.work = None
            lot.event = self._tier.copy_in(lot.slots, lot.sources(), lot.lengths)
        return False

    def _finish(self, lot: _Lot) -> None:
        """Readable from here on, unless it is damaged or was cleared or condemned meanwhile."""
        store, columns, namespace = self._store, self._store.catalog, lot.namespace
        self._lot = None
        columns.pins[lot.rows] -= 1
        for row in lot.rows[~lot.good].tolist():
            store.condemn_damaged(row, "checksum")
        kept = lot.good & store.is_current(lot.rows) & (columns.host_state[lot.rows] == READY)
        self._tier.free(lot.slots[~kept])
        rows, slots = lot.rows[kept], lot.slots[kept]
        self._tier.publish(slots)
        self._tier.directory.publish(
            slots,
            columns.fingerprints[rows],
            offsets=self._tier.pool.offsets_of(slots),
            lengths=columns.length[rows],
            namespace=namespace.index,
            clear_count=namespace.clear_count,
        )
        self._rows[slots], self._slot_of[rows] = rows, slots
        self._count += len(rows)
        store.counters.add("gpu_blocks:came", len(rows))

    # ------------------------------------------------------------------ looking

    def describe(self) -> dict[str, object]:
        """For people."""
        if self.failure:
            return {"failure": self.failure}
        return {
            "blocks": len(self),
            "asked_back_bytes": sum(self._pressure.values()),
            **self._tier.describe(),
        }

    def health(self) -> list[str]:
        """Why the tier serves nothing; empty when all is well."""
        if self.failure:
            return [f"gpu: given up: {self.failure}; restart the daemon to use it again"]
        return []

    def remarks(self) -> list[str]:
        """What is less than it could be."""
        return [] if self.failure else self._tier.remarks()

    def check_integrity(self) -> None:
        """I1, I7: every copy has its slot, its entry, and a READY replica in the host tier."""
        if self.failure:
            return
        self._tier.check_integrity()
        slots = np.flatnonzero(self._rows != ABSENT_ROW)
        rows = self._rows[slots]
        check((self._slots(rows) == slots).all() and len(rows) == self._count, "I2 one copy a row")
        in_host = self._store.catalog.host_state[rows] == READY
        check(in_host.all(), "I7 a copy on the GPU has one in the host tier", rows=rows[~in_host])
        names = self._store.catalog.fingerprints[rows]
        self._tier.directory.check_integrity(slots, names)
        check(self._tier.directory.published == len(slots), "I2 a copy is published once")
