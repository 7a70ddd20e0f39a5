"""Blocks between the arena and a caller's memory, in as few copies as their places allow.

Primitives:
  `Rows`           a caller's blocks: one array [n, bytes], or n arrays; sizes checked once
  `copy_out`       arena -> rows (a load); `copy_in` rows -> arena (a store)
  `runs(...)`      neighbouring slots that one copy can serve
  `CopyThreads`    a few threads for callers that ask for more than one

Copies go through `np.copyto`, which drops the GIL. Knows offsets, not leases or generations.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Lock
from typing import TypeAlias

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.types import ByteArray

BlockArrays: TypeAlias = ByteArray | Sequence[ByteArray]
"""uint8 [n, bytes], or n flat uint8 arrays of `bytes` each."""
ViewOf: TypeAlias = Callable[[int, int], ByteArray]
"""(offset, length) -> uint8 view of the arena."""

COPY_THREADS_MAX = 16


class Rows:
    """The caller's side of a copy.

    Raises InvalidRequest when a size, dtype or flag does not fit.
    """

    def __init__(self, blocks: BlockArrays, block_bytes: int, *, writable: bool) -> None:
        self.block_bytes = block_bytes
        self._table: ByteArray | None = None
        if isinstance(blocks, np.ndarray):
            if blocks.ndim != 2 or blocks.shape[1] != block_bytes or blocks.dtype != np.uint8:
                raise InvalidRequest(
                    f"blocks: need uint8 [n, {block_bytes}], "
                    f"got {blocks.dtype} {list(blocks.shape)}"
                )
            self._table = blocks
            if writable and not blocks.flags.writeable:
                raise InvalidRequest("blocks: the array to load into is read-only")
        else:
            self._check_each(blocks, writable)
        self._rows = blocks

    def _check_each(self, blocks: Sequence[ByteArray], writable: bool) -> None:
        for index, row in enumerate(blocks):
            if row.shape != (self.block_bytes,) or row.dtype != np.uint8:
                raise InvalidRequest(
                    f"blocks[{index}]: need uint8 [{self.block_bytes}], "
                    f"got {row.dtype} {list(row.shape)}"
                )
            if writable and not row.flags.writeable:
                raise InvalidRequest(f"blocks[{index}]: the array to load into is read-only")

    def __len__(self) -> int:
        return len(self._rows)

    def one(self, index: int) -> ByteArray:
        """uint8 [block_bytes]."""
        return self._rows[index]

    def several(self, first: int, count: int) -> ByteArray | None:
        """uint8 [count, block_bytes] if the caller's blocks lie in one array, else None."""
        return None if self._table is None else self._table[first : first + count]


def runs(offsets: Sequence[int], slot_bytes: int, region_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, stop) of stretches whose slots follow each other inside one region."""
    first = 0
    for stop in range(1, len(offsets)):
        at = offsets[stop]
        if at != offsets[stop - 1] + slot_bytes or not at % region_bytes:
            yield first, stop
            first = stop
    if offsets:
        yield first, len(offsets)


class Geometry:
    """Where the copied bytes lie: `length` bytes from `start` in each slot of `slot_bytes`."""

    __slots__ = ("length", "region_bytes", "slot_bytes", "start")

    def __init__(self, start: int, length: int, slot_bytes: int, region_bytes: int) -> None:
        self.start = start
        self.length = length
        self.slot_bytes = slot_bytes
        self.region_bytes = region_bytes

    def pairs(
        self, view: ViewOf, offsets: Sequence[int], rows: Rows, first_row: int
    ) -> Iterator[tuple[ByteArray, ByteArray]]:
        """(arena bytes, caller's bytes) of each copy; shapes agree."""
        slot, start, length = self.slot_bytes, self.start, self.length
        for first, stop in runs(offsets, slot, self.region_bytes):
            count = stop - first
            table = rows.several(first_row + first, count) if count > 1 else None
            if table is not None:
                span = view(offsets[first], count * slot).reshape(count, slot)
                yield (span if length == slot else span[:, start : start + length]), table
                continue
            for index in range(first, stop):
                yield view(offsets[index] + start, length), rows.one(first_row + index)


def copy_out(
    geometry: Geometry, view: ViewOf, offsets: Sequence[int], rows: Rows, first_row: int = 0
) -> None:
    """Copy the slots at `offsets` into rows first_row, first_row + 1, ..."""
    for arena, row in geometry.pairs(view, offsets, rows, first_row):
        np.copyto(row, arena)


def copy_in(
    geometry: Geometry, view: ViewOf, offsets: Sequence[int], rows: Rows, first_row: int = 0
) -> None:
    """Copy rows first_row, ... into the slots at `offsets`."""
    for arena, row in geometry.pairs(view, offsets, rows, first_row):
        np.copyto(arena, row)


class CopyThreads:
    """Threads made on first use and shared by all loads of a client."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._is_closed = False

    def copy_out(
        self,
        geometry: Geometry,
        view: ViewOf,
        offsets: Sequence[int],
        rows: Rows,
        first_row: int,
        threads: int,
    ) -> None:
        """As `copy_out`, the blocks dealt to `threads` threads, the caller's among them."""
        threads = min(threads, len(offsets), COPY_THREADS_MAX)
        if threads <= 1:
            copy_out(geometry, view, offsets, rows, first_row)
            return
        pool = self._started()
        if pool is None:
            copy_out(geometry, view, offsets, rows, first_row)
            return
        edges = [len(offsets) * turn // threads for turn in range(threads + 1)]
        others = [
            pool.submit(copy_out, geometry, view, offsets[start:stop], rows, first_row + start)
            for start, stop in pairwise(edges[1:])
        ]
        try:
            copy_out(geometry, view, offsets[: edges[1]], rows, first_row)
        finally:
            for other in others:
                other.result()

    def _started(self) -> ThreadPoolExecutor | None:
        with self._lock:
            if self._is_closed:
                return None
            if self._pool is None:
                most = min(COPY_THREADS_MAX, os.cpu_count() or 1)
                self._pool = ThreadPoolExecutor(most, "kvstore-copy")
            return self._pool

    def close(self) -> None:
        """Let running copies end; later ones run on the caller's thread only."""
        with self._lock:
            self._is_closed = True
            if self._pool is not None:
                self._pool.shutdown(wait=False)
