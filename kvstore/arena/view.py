"""A client's side of the arena: maps what the daemon reserved; makes and removes no file."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np

from kvstore.arena.mapping import Mapping, view_of
from kvstore.arena.names import HEADER, region_name
from kvstore.errors import InvalidRequest, PeerGone
from kvstore.types import ByteArray, UIntArray


class ArenaView:
    """Views of an arena, for any thread. Arrays given out stay readable memory after `close`.

    Load mappings are read-only; a region is mapped for writing when the first `write_view` asks.
    """

    def __init__(self, region_bytes: int, header: _File, regions: list[_File]) -> None:
        self.header = header.array
        """uint8[...], read-only; empty once closed."""
        self._region_bytes = region_bytes
        self._files = regions
        self._regions = [region.array for region in regions]
        self._writable: dict[int, ByteArray] = {}
        self._lock = threading.Lock()

    @classmethod
    def attach(cls, directory: Path, region_bytes: int, regions: int) -> ArenaView:
        """Map header and `regions` regions of `region_bytes` (the last may be shorter), read-only.

        Raises OSError as opening does, PeerGone if sizes are not those announced (the daemon is a
        new one: compare the boot id afterwards), TierIO if the kernel refuses to map. A failure
        leaves nothing mapped and changes nothing of the arena.
        """
        header = _File(directory / HEADER)
        files = [_File(directory / region_name(number)) for number in range(regions)]
        sizes = [len(file.array) for file in files]
        if any(size != region_bytes for size in sizes[:-1]) or max(sizes, default=0) > region_bytes:
            raise PeerGone(
                f"arena: regions in {directory} are not of {region_bytes} bytes any more"
            )
        return cls(region_bytes, header, files)

    def read_view(self, offset: int, length: int) -> ByteArray:
        """Read-only uint8[length] at byte `offset` of all regions.

        Raises InvalidRequest unless it lies in one region, or when closed.
        """
        return view_of(self._regions, self._region_bytes, offset, length)

    def write_view(self, offset: int, length: int) -> ByteArray:
        """Writable uint8[length] at byte `offset`: in a slot that is reserved for this client.

        Raises as `read_view`, PeerGone if the file is gone or another one now.
        """
        with self._lock:
            self.read_view(offset, length)
            number, start = divmod(offset, self._region_bytes)
            array = self._writable.get(number)
            if array is None:
                array = self._writable[number] = self._files[number].map_writable()
        return array[start : start + length]

    def writable_regions(self) -> list[ByteArray]:
        """Every region mapped for writing, for those who hand addresses to a device.

        Raises as `write_view`; a closed view has none.
        """
        return [
            self.write_view(number * self._region_bytes, len(region))
            for number, region in enumerate(list(self._regions))
        ]

    def addresses(self, offsets: UIntArray) -> UIntArray:
        """Where bytes at `offsets`, uint64[n], lie in the writable mappings of this process.

        Raises as `write_view`.
        """
        bases = np.array([region.ctypes.data for region in self.writable_regions()], np.uint64)
        numbers, starts = np.divmod(offsets, np.uint64(self._region_bytes))
        if numbers.size and int(numbers.max()) >= bases.size:
            raise InvalidRequest(f"arena: an offset lies behind its {bases.size} regions")
        places: UIntArray = bases[numbers] + starts
        return places

    def close(self) -> None:
        """Let go of the mappings; memory goes back when the last view does."""
        with self._lock:
            self._files = []
            self._regions = []
            self._writable = {}
            self.header = np.empty(0, np.uint8)


class _File:
    """One file of the arena, mapped whole; opened again by name for writing if still the same."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.array, self._identity = self._map(os.O_RDONLY)

    def map_writable(self) -> ByteArray:
        try:
            array, identity = self._map(os.O_RDWR)
        except OSError as error:
            raise PeerGone(f"arena: {self._path} cannot be mapped: {error.strerror}") from error
        if identity != self._identity:
            raise PeerGone(f"arena: {self._path} was replaced by a new daemon; attach again")
        return array

    def _map(self, access: int) -> tuple[ByteArray, tuple[int, int]]:
        fd = os.open(self._path, access | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            mapping = Mapping.map_file(fd, found.st_size, writable=access == os.O_RDWR)
        finally:
            os.close(fd)
        return mapping.array, (found.st_dev, found.st_ino)
