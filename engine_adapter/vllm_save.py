"""The engine's blocks into the store, without the engine ever waiting for the daemon.

Primitives:
  `Saver`   `take` copies blocks aside within the step; a thread stores them afterwards
  `Ring`    the memory they wait in

Once `take` returned the engine may do with its blocks what it likes: finish, preempt or abort the
request, or overwrite them. What finds no room in the ring is not stored, and counted.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine_adapter.vllm_blocks import LanePages
from engine_adapter.vllm_orders import BlockOrder
from engine_adapter.vllm_statistics import Counts
from kvstore.client import NamespaceHandle, StoreTicket
from kvstore.errors import KVStoreError
from kvstore.types import BlockStatus, ByteArray

_STORED = (BlockStatus.STORED, BlockStatus.WAITING)
_DONE = (*_STORED, BlockStatus.PRESENT)

_log = logging.getLogger(__name__)


class Ring:
    """One array, handed out in turn and given back in the same order. Not thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = np.empty(size_bytes, np.uint8)
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, rows: int, row_bytes: int) -> ByteArray | None:
        """uint8 [rows, row_bytes], or None without room."""
        size = rows * row_bytes
        start = self._place(size)
        if start is None:
            return None
        self._taken.append((start, start + size))
        return self._bytes[start : start + size].reshape(rows, row_bytes)

    def _place(self, size: int) -> int | None:
        if not self._taken:
            return 0 if size <= len(self._bytes) else None
        oldest, newest = self._taken[0][0], self._taken[-1][1]
        if newest <= oldest:  # wrapped around
            return newest if newest + size <= oldest else None
        if newest + size <= len(self._bytes):
            return newest
        return 0 if size <= oldest else None

    def give_back(self) -> None:
        """The oldest."""
        self._taken.popleft()


@dataclass
class _Job:
    order: BlockOrder
    handle: NamespaceHandle
    rows: ByteArray
    fence: int
    is_settled: bool = field(default=False)


class Saver:
    """`take` on the engine's thread; one thread of its own, in the order of the calls, since a
    block's parent must be stored before it."""

    def __init__(self, staging_bytes: int, counts: Counts) -> None:
        self._ring = Ring(staging_bytes)
        self._counts = counts
        self._queue: deque[_Job] = deque()
        self._unsettled: deque[_Job] = deque()
        self._stored: list[tuple[int, int]] = []
        self._fence = 0
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvstore-save", daemon=True)
        self._thread.start()

    def take(self, order: BlockOrder, pages: LanePages, handle: NamespaceHandle) -> None:
        """Copy the order's blocks aside, or count them as refused."""
        ids = order.block_ids
        with self._changed:
            rows = self._ring.take(len(ids), pages.lane.layout.block_bytes)
        if rows is None:
            self._counts.add(refused_blocks=len(ids))
            self._done(order.number, 0)
            return
        pages.gather(ids, rows)
        with self._changed:
            job = _Job(order, handle, rows, self._fence)
            self._queue.append(job)
            self._unsettled.append(job)
            self._changed.notify_all()

    def raise_fence(self, fence: int) -> None:
        """What was taken before is not stored any more, unless it is on its way already."""
        with self._changed:
            self._fence = max(self._fence, fence)

    @property
    def drained_fence(self) -> int:
        """Nothing that was taken before this fence is under way."""
        with self._changed:
            while self._unsettled and self._unsettled[0].is_settled:
                self._unsettled.popleft()
            return self._unsettled[0].fence if self._unsettled else self._fence

    def results(self) -> dict[int, int]:
        """Number of an order -> leading blocks stored, for orders settled since the last call."""
        if not self._stored:
            return {}
        with self._changed:
            stored, self._stored = self._stored, []
        return dict(stored)

    def wait_idle(self, seconds: float) -> bool:
        """Whether everything taken was stored or refused, within `seconds`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(job.is_settled for job in self._unsettled), seconds
            )

    def close(self, seconds: float) -> None:
        """Store what was taken for up to `seconds`; forget the rest."""
        self.wait_idle(seconds)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(seconds)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if self._is_closing:
                    return
                job = self._queue.popleft()
                is_fenced = job.fence < self._fence
            try:
                if is_fenced:
                    self._settle(job, [])
                else:
                    self._store(job)
            except KVStoreError as error:
                _log.debug("not stored: %s", error)
                self._settle(job, [])
            finally:
                with self._changed:
                    self._ring.give_back()

    def _store(self, job: _Job) -> None:
        ticket = job.handle.store(job.order, job.rows)
        ticket.when_done(self._settler(job, ticket))

    def _settler(self, job: _Job, ticket: StoreTicket) -> Callable[[], None]:
        return lambda: self._settle(job, list(ticket.result(0)))

    def _settle(self, job: _Job, statuses: list[BlockStatus]) -> None:
        blocks = len(job.order)
        stored = sum(status in _STORED for status in statuses)
        present = statuses.count(BlockStatus.PRESENT)
        self._counts.add(
            saved_blocks=stored,
            saved_bytes=stored * job.handle.layout.block_bytes,
            present_blocks=present,
            refused_blocks=blocks - stored - present,
        )
        leading = next((at for at, s in enumerate(statuses) if s not in _DONE), len(statuses))
        with self._changed:
            job.is_settled = True
            self._changed.notify_all()
        self._done(job.order.number, leading)

    def _done(self, number: int, leading: int) -> None:
        with self._changed:
            self._stored.append((number, leading))
