"""Write-behind: admitted host blocks get an NVMe copy with idle bandwidth, ancestors first.

Primitives of `WriteBehind`:
  `enqueue`   READY host rows that may be worth a copy; past a bound they are skipped and counted
  `run`       the task: batches of frames → fdatasync → index record; only then is a replica READY
  `flush`     moves the asked rows to the front and tells which are durable by the deadline

Durable means: frame written, fdatasync, LMDB transaction committed with sync on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

import numpy as np

from kvstore.arrays import distinct
from kvstore.catalog import ABSENT_ROW
from kvstore.errors import DataError, Overloaded, TierError, check
from kvstore.layout import Part
from kvstore.logs import get_logger
from kvstore.namespaces import Namespace
from kvstore.nvme_room import NvmeRoom, WriteBudget
from kvstore.policies.wear import bytes_per_second
from kvstore.segment import FrameFields
from kvstore.store import ABSENT, COMMITTED, DRAINING, NO_ROWS, READY, Store
from kvstore.tier.nvme import NvmeTier
from kvstore.types import BoolArray, ByteArray, IntArray, ReplicaState, Tier

_T = TypeVar("_T")
BATCH_BYTES = 32 << 20
BATCH_BLOCKS_MAX = 256
"""A batch shares one fdatasync a segment and one index transaction (which takes 256 records)."""
LOOK_ROWS_MAX = 4096  # queued rows looked at in one step of the loop
LUMP_BYTES = 4 << 20
YIELD_TO_LOADS_SECONDS = 0.05
"""Longest wait for running loads before a batch goes out all the same."""
FLUSH_POLL_SECONDS = 0.25


@dataclass(frozen=True, eq=False)
class _Job:
    """One frame to write; `payload` is the host slot, pinned until its outcome is known."""

    slot: int
    frame: FrameFields
    parts: tuple[Part, ...]
    payload: ByteArray


class WriteBehind:
    """The NVMe tier's only writer. All methods run on the loop; frames are written by worker
    threads.
    """

    def __init__(
        self,
        store: Store,
        nvme: NvmeTier,
        room: NvmeRoom,
        workers: Executor,
        clock: Callable[[], float],
        is_loading: Callable[[], bool],
    ) -> None:
        self._store = store
        self._nvme = nvme
        self._room = room
        self._workers = workers
        self._now = clock
        self._is_loading = is_loading
        self._queue: deque[int] = deque()
        self._queued: set[int] = set()
        self._first: dict[int, None] = {}
        """Rows somebody flushes: written before the queue, where they may stand as well."""
        self._flushes = 0
        self._work = asyncio.Event()
        self._progress = asyncio.Event()
        self._writing: IntArray = NO_ROWS
        """Rows of the batch under way."""
        self.failure = ""
        """Why blocks of the last batch did not become durable; "" when they did."""
        self._is_draining = False
        self._drained = asyncio.Event()
        self._budget = WriteBudget(bytes_per_second(store.config.nvme), clock())
        self._log = get_logger("writebehind")
        store.on_ready = self.enqueue
        store.on_used.append(self.enqueue)
        room.on_freed = self._tell

    @property
    def queued_blocks(self) -> int:
        return len(self._queued) + len(self._writing)

    @property
    def _has_work(self) -> bool:
        return bool(self._queue or self._first)

    # ------------------------------------------------------------------ what to write

    def enqueue(self, rows: IntArray) -> None:
        """Rows READY in host, or used; those with a copy, or not worth one, are left out."""
        store, columns = self._store, self._store.catalog
        rows = rows[(columns.nvme_state[rows] == ABSENT) & (columns.host_state[rows] == READY)]
        rows = rows[[row not in self._queued for row in rows.tolist()]]
        if not len(rows):
            return
        before = store.policy.wear_refusals
        admitted = store.policy.admit(rows, Tier.NVME, self._now())
        worn = store.policy.wear_refusals - before
        self._skip("wear", worn)
        self._skip("policy", int(np.count_nonzero(~admitted)) - worn)
        most = store.config.nvme.queue_blocks_max
        for row in rows[admitted].tolist():
            if len(self._queue) >= most:
                self._skip("queue_full")
                continue
            self._queue.append(row)
            self._queued.add(row)
        check(len(self._queue) <= most, "I9: the write-behind queue has a bound", most=most)
        self._work.set()

    def _skip(self, reason: str, count: int = 1) -> None:
        self._store.counters.add(f"write_skipped_blocks:{reason}", count)

    def _ancestry(self, row: int, chosen: Container[int], lost: set[int]) -> list[int] | None:
        """`row` with its ancestors that lack an NVMe copy and are not in `chosen`, root first; None
        when one of them is lost: `lost` has the rows that hang on one.
        """
        columns = self._store.catalog
        if self._store.namespaces.leaf_exempt[columns.namespace[row]]:
            return [row]
        path: list[int] = []
        while row >= 0 and row not in chosen and (state := columns.nvme_state[row]) != READY:
            is_gone = state == DRAINING or (state == ABSENT and columns.host_state[row] != READY)
            if is_gone or row in lost:
                lost.update(path)
                return None
            if state == ABSENT:
                path.append(row)
            row = int(columns.parent[row])
        return path[::-1]

    def _next_batch(self) -> list[int]:
        """Rows to write now: each after its ancestors, within the bounds and the write budget."""
        columns, now = self._store.catalog, self._now()
        clear_counts = self._store.namespaces.clear_counts
        batch: dict[int, None] = {}
        lost: set[int] = set()
        size, is_spent = 0, False
        for _ in range(LOOK_ROWS_MAX):
            if not self._has_work or len(batch) >= BATCH_BLOCKS_MAX or size >= BATCH_BYTES:
                break
            row = next(iter(self._first)) if self._first else self._queue.popleft()
            self._first.pop(row, None)
            if row not in self._queued:
                continue
            self._queued.discard(row)
            is_cleared = columns.clear_count[row] != clear_counts[columns.namespace[row]]
            if is_cleared or columns.host_state[row] != READY or columns.nvme_state[row] != ABSENT:
                self._skip("gone", int(columns.nvme_state[row] == ABSENT))
                continue
            path = None if is_spent else self._ancestry(row, batch, lost)
            if path is None:
                self._skip("write_budget" if is_spent else "no_parent")
                continue
            for item in path:
                length = int(columns.length[item])
                if is_spent := not self._budget.take(length, now):
                    self._skip("write_budget")
                    break
                batch[item] = None
                self._queued.discard(item)
                size += length
        return list(batch)

    # ------------------------------------------------------------------ the task

    async def run(self) -> None:
        """Write until `drain` emptied the queue; the daemon cancels it after its drain time."""
        while True:
            if not self._has_work:
                self._tell()
                if self._is_draining:
                    self._drained.set()
                    return
                self._work.clear()
                await self._work.wait()
                continue
            if not self._flushes and not self._is_draining:
                await self._yield_to_loads()
            await self._write_all(np.array(self._next_batch(), np.int64))
            self._tell()
            await asyncio.sleep(0)  # a batch may have been empty

    async def _write_all(self, rows: IntArray) -> None:
        """In batches: the ancestors of one row may be thousands."""
        columns = self._store.catalog
        self._writing = rows
        columns.pins[rows] += 1
        lengths = columns.length[rows].tolist()
        try:
            for batch in _cut(rows.tolist(), lengths, BATCH_BYTES, BATCH_BLOCKS_MAX):
                await self._write(np.array(batch, np.int64))
        finally:
            columns.pins[rows] -= 1
            self._writing = NO_ROWS

    async def _yield_to_loads(self) -> None:
        waited = 0.0
        while self._is_loading() and waited < YIELD_TO_LOADS_SECONDS:
            await asyncio.sleep(0.005)
            waited += 0.005

    def _tell(self) -> None:
        """Wake everyone who waits for progress."""
        self._progress.set()
        self._progress = asyncio.Event()

    async def _write(self, rows: IntArray) -> None:
        """One batch: slots, frames, fdatasync, index records, READY in chain order."""
        columns = self._store.catalog
        # Room for the batch must not be made of what it hangs on.
        ways = distinct(columns.parent[rows][columns.parent[rows] >= 0])
        columns.pins[ways] += 1
        try:
            slots = await self._slots(rows)
            if len(slots) < len(rows):
                self._skip("no_room", len(rows) - len(slots))
                rows = rows[: len(slots)]
            if not len(rows):
                return
            frames, written = await self._write_frames(rows, slots)
            await self._record(rows, slots, frames, written)
        finally:
            columns.pins[ways] -= 1

    async def _slots(self, rows: IntArray) -> IntArray:
        """NVMe slots for `rows` in order, evicting for them; fewer when there is no room."""
        lengths = self._store.catalog.length[rows].tolist()
        sizes = [self._nvme.slot_bytes_for(length) for length in lengths]
        slots: list[int] = []
        while len(slots) < len(sizes):
            size = sizes[len(slots)]
            alike = len(list(takewhile(size.__eq__, sizes[len(slots) :])))
            if not (got := self._nvme.take(size, alike)):
                await self._room.make_room(size, alike)
                got = self._nvme.take(size, alike)
            if not got:
                break
            slots += got
        return np.array(slots, np.int64)

    async def _write_frames(
        self, rows: IntArray, slots: IntArray
    ) -> tuple[list[FrameFields], BoolArray]:
        """Every row's frame, and which of them are on the medium."""
        store, columns = self._store, self._store.catalog
        generations = self._nvme.next_generations(len(rows))
        columns.set_nvme(rows, ReplicaState.FILLING, slots, generations)
        jobs = [
            self._job(row, slot, generation)
            for row, slot, generation in zip(
                rows.tolist(), slots.tolist(), generations.tolist(), strict=True
            )
        ]
        loop = asyncio.get_running_loop()
        # Large frames one by one for a worker, small ones by the handful.
        most = max(1, -(-len(jobs) // (2 * self._store.config.nvme.writers)))
        lumps = await asyncio.gather(
            *(
                loop.run_in_executor(self._workers, self._write_lump, lump)
                for lump in _cut(jobs, [job.frame.length for job in jobs], LUMP_BYTES, most)
            )
        )
        outcomes = [outcome for lump in lumps for outcome in lump]
        written = np.array([outcome is None for outcome in outcomes], np.bool_)
        for row, outcome in zip(rows.tolist(), outcomes, strict=True):
            if isinstance(outcome, DataError):
                store.condemn_damaged(row, "checksum")
        failed = [outcome for outcome in outcomes if outcome is not None]
        if failed:
            self._failed("writing to NVMe failed", len(failed), failed[0])
        if written.any():
            try:
                await loop.run_in_executor(self._workers, self._nvme.sync, slots[written])
            except TierError as error:
                self._failed("what was written to NVMe is not safe", int(written.sum()), error)
                written[:] = False
        return [job.frame for job in jobs], written

    def _job(self, row: int, slot: int, generation: int) -> _Job:
        store, columns = self._store, self._store.catalog
        namespace = store.namespaces.at(int(columns.namespace[row]))
        view = store.host_tier.view(int(columns.host_slot[row]), namespace.layout.block_bytes)
        return _Job(slot, self._frame(row, namespace, generation), namespace.layout.parts, view)

    def _write_lump(self, jobs: Sequence[_Job]) -> list[DataError | TierError | None]:
        """Worker thread: an outcome a frame."""
        outcomes: list[DataError | TierError | None] = []
        for job in jobs:
            try:
                self._nvme.write(job.slot, job.frame, job.parts, job.payload)
                outcomes.append(None)
            except (DataError, TierError) as error:
                outcomes.append(error)
        return outcomes

    def _failed(self, event: str, blocks: int, error: BaseException) -> None:
        self.failure = f"{event}: {error}"
        self._skip("io", blocks)
        self._log.warning(event, blocks=blocks, error=str(error))

    def _frame(self, row: int, namespace: Namespace, generation: int) -> FrameFields:
        columns = self._store.catalog
        parent = int(columns.parent[row])
        return FrameFields(
            generation=generation,
            namespace=namespace.id,
            fingerprint=columns.fingerprints[row].tobytes(),
            parent=columns.fingerprints[parent].tobytes() if parent >= 0 else namespace.id,
            namespace_index=namespace.index,
            clear_count=int(columns.clear_count[row]),
            depth=int(columns.depth[row]),
            length=int(columns.length[row]),
            checksums=columns.checksums[row].copy(),
            uses=int(columns.uses[row]),
        )

    async def _record(
        self, rows: IntArray, slots: IntArray, frames: list[FrameFields], written: BoolArray
    ) -> None:
        """Commit records of the written frames whose parent made it; others free their slot."""
        store, columns = self._store, self._store.catalog
        exempt = store.namespaces.leaf_exempt
        # What was deleted or cleared meanwhile would come back with the next life.
        failed = set(rows[~written | ~store.is_current(rows)].tolist())
        keep: list[int] = []
        for index, row in enumerate(rows.tolist()):
            parent = int(columns.parent[row])
            is_lost = parent in failed or (parent >= 0 and columns.nvme_state[parent] == ABSENT)
            if row not in failed and is_lost and not exempt[columns.namespace[row]]:
                failed.add(row)
                self._skip("no_parent")
            if row not in failed:
                keep.append(index)
        try:
            if keep:
                kept = [frames[index] for index in keep]
                await asyncio.wrap_future(self._nvme.record(kept, slots[keep]))
        except (TierError, Overloaded) as error:
            self._failed("the NVMe index took no records", len(keep), error)
            keep = []
        good = np.zeros(len(rows), np.bool_)
        good[keep] = True
        columns.set_nvme(rows[~good], ReplicaState.ABSENT)
        self._nvme.free(slots[~good])
        if good.all():
            self.failure = ""
        columns.set_nvme(rows[good], ReplicaState.READY)
        self._nvme.publish(slots[good])
        store.counters.add("blocks_written_behind", int(good.sum()))
        store.counters.add("bytes_written_behind", int(columns.length[rows[good]].sum()))

    # ------------------------------------------------------------------ flush and drain

    async def flush(self, namespace: Namespace, names: bytes, deadline: float) -> BoolArray:
        """Write the asked blocks first; True where a block is durable by `deadline` (monotonic
        seconds).
        """
        store, columns = self._store, self._store.catalog
        asked = store.rows_of(namespace, names)
        for row in reversed(asked[asked != ABSENT_ROW].tolist()):
            if columns.nvme_state[row] == ABSENT and columns.host_state[row] == READY:
                self._first[row] = None
                self._queued.add(row)
        self._flushes += 1
        self._work.set()
        try:
            while True:
                rows = store.rows_of(namespace, names)
                known = rows[rows != ABSENT_ROW]
                coming = columns.host_state[known] == COMMITTED
                coming |= np.isin(known, [*self._queued, *self._writing.tolist()])
                left = deadline - self._now()
                if not coming.any() or left <= 0:
                    result: BoolArray = store.is_current(rows) & (columns.nvme_state[rows] == READY)
                    return result
                progress = self._progress
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(progress.wait(), min(left, FLUSH_POLL_SECONDS))
        finally:
            self._flushes -= 1

    def drain(self) -> None:
        """Finish what is queued, then let `run` return."""
        self._is_draining = True
        self._work.set()

    async def drained(self) -> None:
        """Returns when everything queued before `drain` is durable or skipped."""
        await self._drained.wait()


def _cut(
    items: Sequence[_T], lengths: Iterable[int], bytes_max: int, most: int
) -> Iterator[Sequence[_T]]:
    """Neighbours, together until they have `bytes_max` bytes or are `most`."""
    start, size = 0, 0
    for stop, length in enumerate(lengths, 1):
        size += length
        if size >= bytes_max or stop - start == most or stop == len(items):
            yield items[start:stop]
            start, size = stop, 0
