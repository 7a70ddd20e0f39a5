"""Plain operations that figures are compared with: memory on huge pages, O_DIRECT reads.

Primitives:
  `huge_buffer(...)`   anonymous memory on 2 MiB pages, touched
  `Ring`               several equal buffers used in turn, so that none is still in a cache
  `DirectFile`         a file read past the page cache, `inflight` pieces of 2 MiB at once

Knows nothing of kvstore.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MIB = 1 << 20
HUGE_BYTES = 2 * MIB
PIECE_BYTES = 2 * MIB
"""One plain read: what the disk does best."""

Bytes = NDArray[np.uint8]


def huge_buffer(size: int) -> Bytes:
    """uint8 [size], 2 MiB-aligned, on huge pages where the kernel grants them, touched."""
    area = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(area, np.uint8)
    start = -whole.ctypes.data % HUGE_BYTES
    buffer = whole[start : start + size]
    buffer.fill(1)
    return buffer


def huge_share(buffer: Bytes) -> float:
    """Share of the mapping around `buffer` that lies on huge pages."""
    address = buffer.ctypes.data
    inside, size_kib = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            first, last = (int(edge, 16) for edge in head.split("-"))
            inside = first <= address < last
            size_kib = (last - first) // 1024
        elif inside and head == "AnonHugePages:":
            return min(1.0, int(rest.split()[0]) / max(size_kib, 1))
    return 0.0


class Ring:
    """`count` buffers [rows, row_bytes] of huge-page memory; another one each turn."""

    def __init__(self, count: int, rows: int, row_bytes: int) -> None:
        self._whole = huge_buffer(count * rows * row_bytes)
        self._tables = self._whole.reshape(count, rows, row_bytes)

    def __len__(self) -> int:
        return len(self._tables)

    def of(self, turn: int) -> Bytes:
        """uint8 [rows, row_bytes]."""
        table: Bytes = self._tables[turn % len(self._tables)]
        return table

    @property
    def pages(self) -> str:
        """The page size, for notes."""
        return "2 MiB pages" if huge_share(self._whole) > 0.9 else "4 KiB pages"


class DirectFile:
    """`size` bytes on disk, physically written; `read_into` keeps `inflight` preadv calls going."""

    def __init__(self, path: Path, size: int, inflight: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(inflight, "plain-read")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, size)
        piece = huge_buffer(8 * MIB)
        piece[:] = np.random.default_rng(7).integers(0, 256, len(piece), np.uint8)
        for offset in range(0, size, len(piece)):
            os.pwrite(self._fd, piece[: min(len(piece), size - offset)].data, offset)
        os.fdatasync(self._fd)

    def read_into(self, buffer: Bytes, offset: int) -> None:
        """Fill flat `buffer` from `offset`, which wraps at the file's end; whole 2 MiB pieces."""
        starts = range(0, len(buffer), PIECE_BYTES)
        jobs = [
            self._pool.submit(
                self._read_piece, buffer[at : at + PIECE_BYTES], (offset + at) % self.size
            )
            for at in starts
        ]
        for job in jobs:
            job.result()

    def _read_piece(self, piece: Bytes, offset: int) -> None:
        got = os.preadv(self._fd, [piece.data], offset)
        if got != len(piece):
            raise OSError(f"plain read: {got} of {len(piece)} bytes at {offset}")

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)
