"""Promotion: NVMe replicas read straight into arena slots, verified part by part, shared between
waiters.

Primitives of `Mover`:
  `open_load`   starts what a lease needs; a `LoadStream` tells which parts became readable, or
                failed
  `close`       no new reads; running ones end

A block is promoted once, whoever waits. Reads run on a bounded pool of threads that drop the GIL;
a worker takes a few pieces, then queues behind other loads, so that a long load cannot starve a
short one. A failed check on data drops the replica and ends the prefix there: a miss, never other
bytes. The machinery of reading is promotion.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

import numpy as np

from kvstore.arrays import distinct, is_unique
from kvstore.errors import DataError, Unavailable, check
from kvstore.matching import GroupMatch
from kvstore.namespaces import Namespace
from kvstore.promotion import (
    BACK,
    BLOCKS,
    LAYERS,
    LoadOrder,
    LoadStream,
    Piece,
    Promotion,
    ReadBatch,
    read_runs,
)
from kvstore.room import Room
from kvstore.store import ABSENT, NO_ROWS, READY, Store
from kvstore.types import IntArray, ReplicaState, Tier, UIntArray

HEAD_BLOCKS = 8
PORTION_BLOCKS = 32
"""Blocks promised in one step, about 2 ms; between two steps others have the loop."""
PUBLISH_BLOCKS = 16
MEASURED_BYTES_MAX = 256 << 20
ROOM_POLL_SECONDS = 0.005
FAILURE_SECONDS = 60.0


class Mover:
    """All promotions of one daemon life."""

    def __init__(
        self,
        store: Store,
        room: Room,
        workers: Executor,
        threads: int,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._room = room
        self._workers = workers
        self._threads = threads
        self._now = clock
        self._running: dict[int, Promotion] = {}
        self._busy_since = 0.0
        self._busy_bytes = 0
        """Read since then, without a pause."""
        self._whole: list[Promotion] = []
        """Read and announced, not READY yet: published together, which costs a tenth a block."""
        self.bytes_inflight = 0
        self._failed = ("", -np.inf)
        """Why a read failed last, damaged bytes aside, and when."""
        self.is_closing = False

    @property
    def failure(self) -> str:
        """Why reads failed in the last minute; "" when none did."""
        text, when = self._failed
        return text if self._now() - when < FAILURE_SECONDS else ""

    @property
    def is_busy(self) -> bool:
        """Loads are running: idle-bandwidth work should wait."""
        return bool(self._running)

    async def open_load(
        self, groups: list[GroupMatch], *, order: LoadOrder, deadline: float, first: int = 0
    ) -> LoadStream:
        """Start promotions for every row of `groups` that is not READY in host, but for the `first`
        rows of the first group.

        `short_reason` of the result is "capacity" when slots ran out: groups are cut to what is
        promised. Waits (to `deadline`) only when there is no slot at all. The caller holds a lease
        over the rows.
        """
        if self.is_closing:
            raise Unavailable("the daemon is shutting down")
        stream = LoadStream([GroupMatch(g.namespace, g.first, g.rows) for g in groups])
        stream.is_piecemeal = order == BACK
        started: list[Promotion] = []
        # The lease may run out while we wait for slots: its rows must stay the blocks they are.
        held = distinct(np.concatenate([NO_ROWS, *(group.rows for group in groups)]))
        self._store.catalog.pins[held] += 1
        try:
            for number, group in enumerate(stream.groups):
                skipped = promised = 0 if number else min(first, len(group.rows))
                for rows in _portions(group.rows[skipped:], order):
                    wait_until = 0.0 if promised > skipped else deadline
                    got = await self._promise(stream, number, promised, rows, started, wait_until)
                    promised += got
                    if got < len(rows):
                        stream.short_reason = stream.short_reason or "capacity"
                        break
                    if order == BLOCKS:
                        self._start(started, order)
                        started.clear()
                        await asyncio.sleep(0)
                group.rows = group.rows[:promised]
        finally:
            self._store.catalog.pins[held] -= 1
            # Also when the caller gave up: what was created is others' to join.
            self._start(started, order)
        if stream.blocks_missing and not stream.blocks_unread:
            self._finish()
        return stream

    async def _promise(
        self,
        stream: LoadStream,
        number: int,
        first: int,
        rows: IntArray,
        started: list[Promotion],
        deadline: float,
    ) -> int:
        """Create or join the promotion of each of `rows`, which are blocks `first` and on of group
        `number`; return how many of them are promised.
        """
        columns, namespace = self._store.catalog, stream.groups[number].namespace
        missing = int(np.count_nonzero(columns.host_state[rows] == ABSENT))
        slots = await self._slots(namespace, missing, deadline)
        readable = self._store.is_readable(rows)
        rows = rows if readable.all() else rows[: int(readable.argmin())]
        started += self._create(namespace, rows, slots)
        for block, row in enumerate(rows.tolist(), first):
            promotion = self._running.get(row)
            if promotion is None and columns.host_state[row] == READY:
                continue
            if promotion is None or promotion.failure is not None:
                return block - first
            promotion.listeners.append((stream, number, block))
            stream.blocks_missing += 1
            stream.blocks_unread += bool(promotion.parts_missing)
            if promotion.parts_ready:
                stream.ready.append((number, promotion.parts_ready, block))
        return len(rows)

    def _give_back(self, slots: Iterable[int]) -> None:
        left = list(slots)
        if left:
            self._store.host_tier.free(left)

    async def _slots(self, namespace: Namespace, count: int, deadline: float) -> list[int]:
        while True:
            now = self._now()
            most = min(count, self._allowance(namespace.layout.block_bytes))
            slots = self._room.host_slots(namespace.slot_bytes, most, now, staging=True)
            if slots or not count or now >= deadline or self.is_closing:
                return slots
            await asyncio.sleep(ROOM_POLL_SECONDS)

    def _allowance(self, block_bytes: int) -> int:
        """Blocks that may start within limits.jobs_inflight_max and limits.bytes_inflight_max."""
        limits = self._store.config.limits
        jobs = limits.jobs_inflight_max - len(self._running)
        room = limits.bytes_inflight_max - self.bytes_inflight
        return max(0, min(jobs, room // block_bytes)) or int(not self._running)

    def _create(self, namespace: Namespace, rows: IntArray, slots: list[int]) -> list[Promotion]:
        """Promotions for as many absent rows as there are slots; slots left over are given back."""
        columns = self._store.catalog
        rows = rows[(columns.host_state[rows] == ABSENT) & (columns.nvme_state[rows] == READY)]
        if not is_unique(rows):  # flat names may repeat
            rows = rows[np.sort(np.unique(rows, return_index=True)[1])]
        rows = rows[: len(slots)]
        self._give_back(slots[len(rows) :])
        if not len(rows):
            return []
        columns.set_host(rows, ReplicaState.FILLING, np.array(slots[: len(rows)], np.int64))
        columns.pins[rows] += 1
        made = [
            Promotion(row, namespace, slot, namespace.layout.all_parts)
            for row, slot in zip(rows.tolist(), slots, strict=False)
        ]
        if not self._running:
            self._busy_since, self._busy_bytes = self._now(), 0
        self._running.update((promotion.row, promotion) for promotion in made)
        self.bytes_inflight += len(made) * namespace.layout.block_bytes
        return made

    def _start(self, promotions: Sequence[Promotion], order: LoadOrder) -> None:
        nvme = self._store.nvme
        if not promotions or nvme is None:
            return
        rows = np.array([promotion.row for promotion in promotions], np.int64)
        places = self._store.catalog.nvme_slot[rows].tolist()
        pieces = [
            piece
            for promotion, place, checksums in zip(
                promotions, places, self._store.catalog.checksums[rows], strict=True
            )
            for piece in self._pieces_of(promotion, place, checksums, order)
        ]
        if order == LAYERS:
            pieces.sort(key=lambda piece: piece.parts[0].layer_first)
        elif order == BACK:
            pieces.reverse()
        loop = asyncio.get_running_loop()
        ReadBatch(pieces, nvme, self._workers, loop, self._settle).start(self._threads)

    def _pieces_of(
        self, promotion: Promotion, nvme_slot: int, checksums: UIntArray, order: LoadOrder
    ) -> list[Piece]:
        layout = promotion.namespace.layout
        into = self._store.host_tier.view(promotion.host_slot, layout.slot_bytes)
        runs = read_runs(layout, order == LAYERS)
        promotion.pieces_left = len(runs)
        return [Piece(promotion, nvme_slot, run, mask, into, checksums) for run, mask in runs]

    # ------------------------------------------------------------------ completions (on the loop)

    def _settle(self, done: Iterable[tuple[Piece, Exception | None]]) -> None:
        """Announce what was read, then publish whole blocks together when somebody waits for it."""
        told: set[LoadStream] = set()
        for piece, failure in done:
            promotion = piece.promotion
            promotion.pieces_left -= 1
            if failure is not None and promotion.failure is None:
                promotion.failure = failure
                self._tell_failed(promotion)
            elif promotion.failure is None:
                promotion.parts_missing &= ~piece.mask
                self._busy_bytes += sum(part.length for part in piece.parts)
                for stream, group, block in promotion.listeners:
                    stream.ready.append((group, piece.mask, block))
            if not promotion.pieces_left and promotion.failure is None:
                self._whole.append(promotion)
                for stream, _, _ in promotion.listeners:
                    stream.blocks_unread -= 1
            elif not promotion.pieces_left:
                self._drop(promotion, promotion.failure)
            told.update(stream for stream, _, _ in promotion.listeners)
        for stream in told:
            stream.changed.set()
        is_awaited = any(stream.is_piecemeal or not stream.blocks_unread for stream in told)
        is_last = len(self._whole) == len(self._running)
        self._measure(is_last)
        if self._whole and (is_awaited or is_last or len(self._whole) >= PUBLISH_BLOCKS):
            self._finish()

    def _measure(self, is_last: bool) -> None:
        """Tell the costs how fast reads went: after a busy stretch, or well into it."""
        if is_last or self._busy_bytes >= MEASURED_BYTES_MAX:
            now = self._now()
            self._store.costs.link_seen(Tier.NVME, self._busy_bytes, now - self._busy_since)
            self._busy_since, self._busy_bytes = now, 0

    def _finish(self) -> None:
        """Whole blocks become READY; those that were condemned meanwhile are dropped."""
        store, columns, whole = self._store, self._store.catalog, self._whole
        self._whole = []
        self._leave(whole)
        rows = np.array([promotion.row for promotion in whole], np.int64)
        broken = [promotion.row for promotion in whole if promotion.failure is not None]
        check(not broken, "I10: a block whose bytes failed a check is published", rows=broken)
        good = store.is_current(rows) & (columns.nvme_state[rows] == READY)
        if good.any():
            store.publish(rows[good], self._now())
            below = columns.nvme_state[rows[good]] == READY
            check(below.all(), "I7: the lower copy left while the upper one became READY")
        for promotion, is_good in zip(whole, good.tolist(), strict=True):
            store.counters.add("bytes_promoted", promotion.namespace.layout.block_bytes)
            if not is_good:
                store.drop_unready(promotion.row, "cleared")
            for stream, group, block in promotion.listeners:
                if not is_good:
                    stream.fail(group, block)
                    continue
                stream.blocks_missing -= 1
                stream.changed.set()

    def _tell_failed(self, promotion: Promotion) -> None:
        for stream, group, block in promotion.listeners:
            stream.fail(group, block)
            stream.blocks_unread -= 1

    def _drop(self, promotion: Promotion, failure: Exception | None) -> None:
        """The last read ended: the slot is free, and the unusable copy leaves NVMe."""
        store, row = self._store, promotion.row
        self._leave([promotion])
        reason = "checksum" if isinstance(failure, DataError) else "io"
        if reason == "io":
            self._failed = f"loads from NVMe fail: {failure}", self._now()
        store.condemn_damaged(row, reason)
        store.drop_unready(row, reason)

    def _leave(self, promotions: Sequence[Promotion]) -> None:
        for promotion in promotions:
            del self._running[promotion.row]
            self.bytes_inflight -= promotion.namespace.layout.block_bytes
        self._store.catalog.pins[[promotion.row for promotion in promotions]] -= 1

    def close(self) -> None:
        """Refuse new loads; those running end by themselves."""
        self.is_closing = True


def _portions(rows: IntArray, order: LoadOrder) -> list[IntArray]:
    """In block order the first few are read while room is made for the rest; else all at once."""
    if order != BLOCKS:
        return [rows] if len(rows) else []
    starts = [0, *range(HEAD_BLOCKS, len(rows), PORTION_BLOCKS)]
    return [part for part in np.split(rows, starts[1:]) if len(part)]
