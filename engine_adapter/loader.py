"""Stored blocks into an engine's buffers, layer by layer, while the engine computes.

Primitives:
  `Row`           one sequence: which blocks, and where in the buffers they go
  `LayerBuffers`  one layer's destination
  `PrefixLoad`    the load of one batch: `wait` before a layer is read, `confirm` at the end
  `LoadThreads`   where loads run

Everything computed from a load is provisional until `confirm` says that the bytes were the stored
ones: boot id and generations are compared after the last copy. A load that fails, or takes longer
than its deadline, opens its gates with LoadFailed, which the caller turns into a forward pass
without it. A copy that comes too late lands in buffers that nobody uses any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine_adapter.prefix import Prefix
from engine_adapter.statistics import Tally
from engine_adapter.tensors import KVTensors
from kvstore.client.inplace import InPlace
from kvstore.errors import KVStoreError, Unavailable
from kvstore.types import ByteArray

LOAD_THREADS = 4
GRACE_SECONDS = 0.5
"""The daemon's word on what came arrives a little after the load's own deadline."""
DEADLINE = "deadline"
CHANGED = "changed"
UNFINISHED = "load thread ended early"

_log = logging.getLogger(__name__)


class LoadFailed(Unavailable):
    """What was promised did not come, or is no longer the stored bytes: compute it instead."""


@dataclass(frozen=True)
class Row:
    """The first `tokens` tokens of `prefix` go to columns [column, column + tokens) of `rows`."""

    prefix: Prefix
    tokens: int
    column: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class LayerBuffers:
    """uint8 views of one layer's buffers: [batch, heads, columns, bytes of one token]."""

    keys: ByteArray
    values: ByteArray
    first_column: int
    """Columns before it are never read: the layer's window begins here."""


class PrefixLoad:
    """Made by `LoadThreads.start`. `wait` and `confirm` on the engine's thread, once each."""

    def __init__(
        self,
        tensors: KVTensors,
        rows: Sequence[Row],
        buffers: Sequence[LayerBuffers],
        deadline_seconds: float,
        tally: Tally,
    ) -> None:
        self._tensors = tensors
        self._rows = tuple(row for row in rows if row.tokens > 0)
        self._buffers = buffers
        self._deadline_seconds = deadline_seconds
        self._until = time.monotonic() + deadline_seconds + GRACE_SECONDS
        self._tally = tally
        self._gates = [threading.Event() for _ in buffers]
        self._failure = ""

    # ------------------------------------------------------------------ the engine's thread

    def wait(self, layer: int) -> None:
        """Until `layer` lies in its buffers. Raises LoadFailed; never waits past the deadline."""
        gate = self._gates[layer]
        if not gate.is_set() and not gate.wait(max(0.0, self._until - time.monotonic())):
            self._fail(DEADLINE)
        if self._failure:
            raise LoadFailed(self._failure)

    def confirm(self) -> str:
        """After the forward pass: "" if every byte it read was the stored one, else the reason."""
        try:
            self.wait(len(self._gates) - 1)
        except LoadFailed as error:
            return str(error)
        is_valid = all(source.valid() for source in self._sources())
        return "" if is_valid else CHANGED

    def whole(self) -> list[int]:
        """For each row leading blocks that could be read by now; what a second try can count on."""
        return [row.prefix.source.whole if row.prefix.source else 0 for row in self._rows]

    def _sources(self) -> list[InPlace]:
        return [row.prefix.source for row in self._rows if row.prefix.source is not None]

    # ------------------------------------------------------------------ the load thread

    def run(self) -> None:
        began, cpu = time.monotonic(), time.thread_time()
        try:
            self._copy_all()
        except KVStoreError as error:
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            if not self._gates[-1].is_set():
                self._fail(UNFINISHED)
            self._tally.add(
                load_seconds=time.monotonic() - began, load_cpu_seconds=time.thread_time() - cpu
            )

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        for gate in self._gates:
            gate.set()

    def _copy_all(self) -> None:
        """Layers in order, each as soon as its part of all blocks of all rows is readable.

        With several rows only the last one's arrival overlaps with the copies."""
        *others, last = self._sources()
        for source in others:
            for _ in source.arrivals(self._deadline_seconds):
                pass
        layer = 0
        for _ in last.arrivals(self._deadline_seconds):
            while layer < len(self._buffers) and self._is_readable(layer):
                if self._failure:
                    return
                self._copy_layer(layer)
                self._gates[layer].set()
                layer += 1
        if layer < len(self._buffers):
            self._fail(last.reason or DEADLINE)

    def _blocks(self, row: Row, layer: int) -> tuple[int, int]:
        """[first, stop) blocks of a row that a layer needs."""
        size = self._tensors.block_tokens
        first = max(self._buffers[layer].first_column - row.column, 0) // size
        return first, -(-row.tokens // size)

    def _is_readable(self, layer: int) -> bool:
        part = self._tensors.part_of_layer[layer]
        return all(
            row.prefix.source is not None
            and row.prefix.source.is_readable(part, *self._blocks(row, layer))
            for row in self._rows
        )

    def _copy_layer(self, layer: int) -> None:
        tensors, buffers = self._tensors, self._buffers[layer]
        for row in self._rows:
            source = row.prefix.source
            assert source is not None  # rows without tokens were left out
            first, stop = self._blocks(row, layer)
            whole = row.tokens // tensors.block_tokens
            for block, slots in source.spans(first, min(stop, whole)):
                column = row.column + block * tensors.block_tokens
                keys, values = tensors.keys(slots, layer), tensors.values(slots, layer)
                for at in row.rows:
                    np.copyto(tensors.blocks_of(buffers.keys[at], column, len(slots)), keys)
                    np.copyto(tensors.blocks_of(buffers.values[at], column, len(slots)), values)
            if stop > whole and first < stop:
                self._copy_cut(layer, row, source, whole)

    def _copy_cut(self, layer: int, row: Row, source: InPlace, block: int) -> None:
        """The first tokens of a block: batches share one length, rows need not end on a block."""
        tensors, buffers = self._tensors, self._buffers[layer]
        start = row.column + block * tensors.block_tokens
        stop = row.column + row.tokens
        for _, slots in source.spans(block, block + 1):
            keys, values = tensors.keys(slots, layer)[0], tensors.values(slots, layer)[0]
            for at in row.rows:
                np.copyto(buffers.keys[at, :, start:stop], keys[:, : stop - start])
                np.copyto(buffers.values[at, :, start:stop], values[:, : stop - start])


def report_bug(future: Future[None]) -> None:
    """What the task was for became a miss; the fault must not stay unseen."""
    if not future.cancelled() and (error := future.exception()) is not None:
        _log.error("a background task failed", exc_info=error)


class Runnable(Protocol):
    """A load."""

    def run(self) -> None: ...


class LoadThreads:
    """A few threads, made on first use, shared by all loads of an adapter."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(LOAD_THREADS, "kvstore-load")

    def start(self, load: Runnable) -> None:
        """Run it; a load that finds all threads busy for its whole deadline has failed."""
        self._pool.submit(load.run).add_done_callback(report_bug)

    def close(self) -> None:
        """Running loads end within their deadlines."""
        self._pool.shutdown(wait=False, cancel_futures=True)
