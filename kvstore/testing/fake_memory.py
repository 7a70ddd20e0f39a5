"""The memory of a fake device: what is allocated, pinned, exported, and what was freed.

Primitives of `FakeMemory`: `allocate`, `free`, `pin`, `unpin`, `export`, `open_export`,
`close_export`, and the questions `kind`, `is_known`.

Freed memory stays mapped, holding poison, for as long as the object lives: whoever touches it is
found out, and this process does not crash. Raises DeviceError like a driver refuses.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvstore.device import IPC_HANDLE_BYTES
from kvstore.errors import DeviceError
from kvstore.types import ByteArray

FRESH, FREED = 0xAB, 0xDD
"""What new and what freed device memory holds."""


@dataclass(frozen=True)
class _Range:
    start: int
    stop: int
    kind: Literal["device", "pinned", "freed"]


class _File:
    """A memory file, closed when nobody refers to it."""

    def __init__(self, length: int) -> None:
        self.fd = os.memfd_create("fake-device")
        os.ftruncate(self.fd, length)
        self.length = length

    def map(self) -> ByteArray:
        return np.frombuffer(mmap.mmap(self.fd, self.length), np.uint8)

    def __del__(self) -> None:
        os.close(self.fd)


class FakeMemory:
    """Addresses are this process' own."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = total_bytes
        self._ranges: list[_Range] = []
        self._starts: list[int] = []
        self._files: dict[int, _File] = {}
        self._opened: dict[int, _File] = {}
        """Exports that are open."""
        self._kept: list[ByteArray] = []

    def keep(self, memory: ByteArray) -> int:
        """Its address, good for as long as this object lives."""
        self._kept.append(memory)
        return memory.ctypes.data

    # ------------------------------------------------------------------ device memory

    def allocate(self, length: int) -> int:
        if length > self.free_bytes:
            raise DeviceError(f"fake device: no memory for {length} bytes")
        self.free_bytes -= length
        file = _File(length)
        file.map()[:] = FRESH
        address = self._open(file)
        self._files[address] = file
        return address

    def free(self, address: int) -> None:
        if address not in self._files:
            raise DeviceError("fake device: freeing what was not allocated")
        file = self._files.pop(address)
        file.map()[:] = FREED
        self._bury(address)
        self.free_bytes += file.length

    def export(self, address: int) -> bytes:
        if address not in self._files:
            raise DeviceError("fake device: only the base of an allocation can be exported")
        return address.to_bytes(8, "little").ljust(IPC_HANDLE_BYTES, b"\0")

    def open_export(self, handle: bytes) -> int:
        file = self._files.get(int.from_bytes(handle[:8], "little"))
        if file is None:
            raise DeviceError("fake device: nothing is exported under this handle")
        address = self._open(file)
        self._opened[address] = file
        return address

    def close_export(self, address: int) -> None:
        self._bury(address)
        del self._opened[address]

    def is_open(self, address: int) -> bool:
        """Whether an allocation's export is: its memory may not go."""
        return self._files.get(address) in self._opened.values()

    def _open(self, file: _File) -> int:
        address = self.keep(file.map())
        self._add(_Range(address, address + file.length, "device"))
        return address

    def _bury(self, address: int) -> None:
        found = self._at(address)
        if found is None or found.start != address or found.kind != "device":
            raise DeviceError("fake device: closing what is not open")
        self._remove(found)
        self._add(_Range(found.start, found.stop, "freed"))

    # ------------------------------------------------------------------ host memory

    def pin(self, address: int, length: int) -> None:
        if any(r.start < address + length and address < r.stop for r in self._ranges):
            raise DeviceError("fake device: already registered (712)")
        self._add(_Range(address, address + length, "pinned"))

    def unpin(self, address: int) -> None:
        found = self._at(address)
        if found is None or found.kind != "pinned" or found.start != address:
            raise DeviceError("fake device: not registered (713)")
        self._remove(found)

    # ------------------------------------------------------------------ questions

    def _add(self, known: _Range) -> None:
        at = bisect_right(self._starts, known.start)
        self._starts.insert(at, known.start)
        self._ranges.insert(at, known)

    def _remove(self, known: _Range) -> None:
        at = self._ranges.index(known)
        del self._starts[at], self._ranges[at]

    def _at(self, address: int) -> _Range | None:
        at = bisect_right(self._starts, address) - 1
        found = self._ranges[at] if at >= 0 else None
        return found if found is not None and address < found.stop else None

    def kind(self, address: int, length: int) -> str:
        """device, pinned, freed or pageable; refuses bytes that cross the end of their memory."""
        found = self._at(address)
        if found is None:
            return "pageable"
        if address + length > found.stop:
            raise DeviceError("fake device: a copy crosses the end of its memory")
        return found.kind

    def is_known(self, address: int, length: int) -> bool:
        """Whether the device may touch it."""
        found = self._at(address)
        return found is not None and found.kind != "freed" and address + length <= found.stop
