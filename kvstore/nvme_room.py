"""Making room on NVMe, and how much may be written there.

Primitives:
  `NvmeRoom.make_room`  the least valuable idle leaves leave
  `NvmeRoom.lost`       replicas that must go; `delete_records` and `reap` are its two halves
  `WriteBudget`         bytes that may be written by now

A record leaves the index durably before its slot may be overwritten; a slot that a job still reads
waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from kvstore.errors import TierError
from kvstore.logs import get_logger
from kvstore.policies.wear import BURST_SECONDS, SPARED_SECONDS
from kvstore.policy import VictimPicker
from kvstore.store import ABSENT, NO_ROWS, Store
from kvstore.tier.nvme import NvmeTier
from kvstore.types import IntArray, ReplicaState, Tier

RETRY_SECONDS = 1.0


class WriteBudget:
    """So many bytes a second (0: unlimited). What is not used may be used later, an hour's worth at
    most; a minute's is there at once.
    """

    def __init__(self, bytes_per_second: float, now: float) -> None:
        self._rate = bytes_per_second
        self._tokens = bytes_per_second * BURST_SECONDS
        self._last = now

    def take(self, count: int, now: float) -> bool:
        """Whether `count` bytes may be written now; charges them when so."""
        if not self._rate:
            return True
        most = self._rate * SPARED_SECONDS
        self._tokens = min(most, self._tokens + (now - self._last) * self._rate)
        self._last = now
        if count > self._tokens:
            return False
        self._tokens -= count
        return True


class NvmeRoom:
    """Replicas leaving NVMe. Runs on the loop; deletes are committed by the index's own thread."""

    def __init__(
        self, store: Store, nvme: NvmeTier, picker: VictimPicker, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._nvme = nvme
        self._picker = picker
        self._now = clock
        self._deleting: set[asyncio.Task[None]] = set()
        self._still_read: IntArray = NO_ROWS
        """Rows whose record is gone and whose slot waits for the last read to end."""
        self._undeleted: IntArray = NO_ROWS
        """Rows whose record the disk would not let go (it is full, or fails): tried again."""
        self._retry_at = 0.0
        self._log = get_logger("nvme")
        self.on_freed: Callable[[], None] = lambda: None
        store.on_nvme_lost = self.lost

    def lost(self, rows: IntArray) -> None:
        """Rows whose NVMe replica is DRAINING: delete their records, then free their slots."""
        task = asyncio.get_running_loop().create_task(self._delete(rows))
        self._deleting.add(task)
        task.add_done_callback(self._deleting.discard)

    async def delete_records(self, rows: IntArray) -> None:
        """Their records leave the index, durably when this returns; replicas and slots stay."""
        columns = self._store.catalog
        held = rows[columns.nvme_state[rows] != ABSENT]
        names = [columns.fingerprints[row].tobytes() for row in held]
        generations = columns.nvme_generation[held].tolist()
        await asyncio.wrap_future(self._nvme.forget(list(zip(names, generations, strict=True))))

    async def _delete(self, rows: IntArray) -> None:
        try:
            await self.delete_records(rows)
        except TierError as error:
            self._undeleted = np.concatenate([self._undeleted, rows])
            self._retry_at = self._now() + RETRY_SECONDS
            self._log.warning("records cannot be deleted", blocks=len(rows), error=str(error))
            return
        self._still_read = np.concatenate([self._still_read, rows])
        self.reap()

    def reap(self) -> None:
        """Free the slots of deleted replicas that no job reads any more; called periodically."""
        if len(self._undeleted) and self._now() >= self._retry_at:
            again, self._undeleted = self._undeleted, NO_ROWS
            self.lost(again)
        columns, rows = self._store.catalog, self._still_read
        if not len(rows):
            return
        done = rows[columns.pins[rows] == 0]
        self._still_read = rows[columns.pins[rows] != 0]
        slots = columns.nvme_slot[done].copy()
        columns.set_nvme(done, ReplicaState.ABSENT)
        self._nvme.free(slots)
        columns.remove_if_bare(done)
        self.on_freed()

    async def make_room(self, slot_bytes: int, count: int) -> int:
        """Evict idle leaves of one size from NVMe; their slots are free when this returns.

        0, and nothing is evicted, while the disk does not let go of earlier ones.
        """
        held = self._nvme.slots_of_class(slot_bytes)
        if not len(held) or len(self._undeleted):
            return 0
        now = self._now()
        victims = self._picker.choose(held, Tier.NVME, count, now)
        if len(victims):
            self._store.count_dropped(victims, "evicted")
            self._store.catalog.set_nvme(victims, ReplicaState.DRAINING)
            self._store.policy.evicted(victims, Tier.NVME, now)
            await self._delete(victims)
        return len(victims)
