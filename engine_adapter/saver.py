"""Full blocks from an engine's buffers into the store, behind the engine's back.

Primitives:
  `SaveJob`   blocks of one sequence; `HostSaveJob`, from buffers in host memory
  `Saver`     the thread and its bounded queue

Ownership: the buffers of a queued job may be appended to, but the columns of its blocks may not
change before the job is done. Whatever goes wrong is counted; a block that was not stored is
computed again one day. Never waits on the engine's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_adapter.statistics import Tally
from engine_adapter.tensors import KVTensors
from kvstore.client import NamespaceHandle, WriteReservation
from kvstore.client.inplace import granted_spans
from kvstore.errors import KVStoreError
from kvstore.fingerprint import Chain
from kvstore.types import BlockStatus, ByteArray

JOBS_MAX = 64
"""Jobs hold their request's buffers alive; more are refused."""
BLOCKS_PER_RESERVATION = 64
BUSY = "busy"
CLOSED = "closed"
STUCK = "copies do not end"
_STORED = (BlockStatus.STORED, BlockStatus.WAITING)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveJob(ABC):
    """Blocks [first, stop) of `tokens` (uint32 ids of one sequence from its start)."""

    handle: NamespaceHandle
    tensors: KVTensors
    tokens: NDArray[np.uint32]
    first: int
    stop: int

    @abstractmethod
    def fill(self, reservation: WriteReservation, start: int) -> bool:
        """Blocks into the granted slots, which are counted from block `start`. False: copies into
        them may still run, and nobody knows how long. Raises KVStoreError when none does."""


@dataclass(frozen=True)
class HostSaveJob(SaveJob):
    """From buffers in host memory."""

    column: int
    """Buffer column of the sequence's first token."""
    keys: Sequence[ByteArray]
    """A layer: uint8 [heads, columns, key bytes]."""
    values: Sequence[ByteArray]

    def fill(self, reservation: WriteReservation, start: int) -> bool:
        for first, slots in granted_spans(self.handle, reservation):
            self._copy(start + first, slots)
        return True

    def _copy(self, block: int, slots: ByteArray) -> None:
        """One copy a layer for keys, one for values, however many blocks `slots` holds."""
        tensors = self.tensors
        column = self.column + block * tensors.block_tokens
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            np.copyto(tensors.keys(slots, layer), tensors.blocks_of(keys, column, len(slots)))
            np.copyto(tensors.values(slots, layer), tensors.blocks_of(values, column, len(slots)))


class Saver:
    """One thread, in the order of the calls: a block's parent is stored before it."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._queue: deque[SaveJob] = deque()
        self._changed = threading.Condition()
        self._is_busy = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-save", daemon=True)
        self._thread.start()

    def submit(self, job: SaveJob) -> None:
        """Queue it, or count it as refused when too many wait."""
        with self._changed:
            reason = CLOSED if self._is_closing else BUSY if len(self._queue) >= JOBS_MAX else ""
            if not reason:
                self._queue.append(job)
                self._changed.notify_all()
                return
        self._refuse(job.stop - job.first, reason)

    def wait_idle(self, timeout: float | None) -> bool:
        """Whether everything submitted was handled, waiting up to `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._is_busy, timeout)

    def close(self, timeout: float) -> None:
        """Handle what is queued for up to `timeout` seconds; refuse the rest."""
        self.wait_idle(timeout)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if not self._queue:
                    return
                job = self._queue.popleft()
                self._is_busy = True
            self._handle(job)

    def _handle(self, job: SaveJob) -> None:
        began = time.thread_time()
        left, reason = job.stop - job.first, ""
        try:
            for settled, reason in self._save(job):  # noqa: B007
                left -= settled
        except KVStoreError as error:
            reason = f"{type(error).__name__}: {error}"
        if left:
            _log.debug("%d of %d blocks not stored: %s", left, job.stop - job.first, reason)
            self._refuse(left, reason)
        self._tally.add(save_cpu_seconds=time.thread_time() - began)

    def _save(self, job: SaveJob) -> Iterator[tuple[int, str]]:
        """A step: (blocks that are stored now, why later ones cannot be); ends at a refusal."""
        chain = job.handle.chain(job.tokens[: job.stop * job.tensors.block_tokens])
        first = min(max(job.first, job.handle.match(chain)), job.stop)
        self._tally.add(present_blocks=first - job.first)
        yield first - job.first, ""
        for start in range(first, job.stop, BLOCKS_PER_RESERVATION):
            count = min(BLOCKS_PER_RESERVATION, job.stop - start)
            settled, reason = self._save_some(job, chain, start, count)
            yield settled, reason
            if settled < count:
                return

    def _save_some(self, job: SaveJob, chain: Chain, start: int, count: int) -> tuple[int, str]:
        reservation = job.handle.reserve(chain, start=start, count=count)
        if reservation.granted:
            try:
                is_filled = job.fill(reservation, start)
            except KVStoreError:
                reservation.abort()
                raise
            if not is_filled:  # neither committed nor given back: the daemon holds the slots
                return 0, STUCK
            reservation.commit()
        statuses = reservation.statuses
        stored = sum(status in _STORED for status in statuses)
        present = statuses.count(BlockStatus.PRESENT)
        self._tally.add(saved_blocks=stored, present_blocks=present)
        refused = [s for s in statuses if s not in _STORED and s is not BlockStatus.PRESENT]
        return stored + present, reservation.reason or (refused[0].name.lower() if refused else "")

    def _refuse(self, blocks: int, reason: str) -> None:
        self._tally.add(refused_blocks=blocks)
        self._tally.reason("save_reasons", reason, blocks)
