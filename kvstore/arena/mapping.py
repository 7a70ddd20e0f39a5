"""One shared mapping of a file, 2 MiB-aligned, that lives as long as any numpy view of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np

from kvstore.errors import InvalidRequest, TierIO
from kvstore.layout import align_up
from kvstore.types import HUGE_PAGE_BYTES, PAGE_BYTES, ByteArray

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_REMOVE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 9, 23, 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Span:
    """Address space that numpy arrays refer to as their base; unmapped when the last one goes.

    Not at interpreter exit: threads may still read then, and the kernel unmaps anyway.
    """

    def __init__(self, address: int, length: int, *, writable: bool) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (length,),
            "data": (address, not writable),
        }
        weakref.finalize(self, _libc.munmap, address, align_up(length, PAGE_BYTES)).atexit = False


class Mapping:
    """`array`, uint8[length], read-only unless `writable`, over `length` bytes of a file.

    Dropping the mapping drops one reference; slices of `array` keep the memory, without limit.
    """

    def __init__(self, address: int, length: int, *, writable: bool) -> None:
        self.array: ByteArray = np.asarray(_Span(address, length, writable=writable))
        self._address = address

    @classmethod
    def map_file(cls, fd: int, length: int, *, writable: bool) -> Mapping:
        """Map the first `length` bytes of `fd`, which may be closed afterwards.

        Raises TierIO if the file is shorter or the kernel refuses.
        """
        size = os.fstat(fd).st_size
        if not 0 < length <= size:
            raise TierIO(f"cannot map {length} bytes of a file of {size}")
        address = _reserve(length)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(address, length, protection, flags, fd, 0) == _MAP_FAILED:
            refused = _refused(length)
            _libc.munmap(address, align_up(length, PAGE_BYTES))
            raise refused
        return cls(address, length, writable=writable)

    def __len__(self) -> int:
        return len(self.array)

    def collapse(self, offset: int, length: int) -> str:
        """Put huge pages under [offset, offset + length), both multiples of 2 MiB.

        Returns why the kernel refused, "" when it did not; refused parts stay on 4 KiB pages.
        Allocated bytes only. Takes about 2 ms a MiB and drops the GIL: for a background thread.
        """
        return self._advise(offset, length, _MADV_COLLAPSE)

    def discard(self, offset: int, length: int) -> str:
        """Give the pages of [offset, offset + length) back to the system; they read as zeros.

        Returns why the kernel refused, "" when it did not.
        """
        return self._advise(offset, length, _MADV_REMOVE)

    def populate(self, offset: int, length: int) -> str:
        """Put pages under [offset, offset + length), or say why there are none left."""
        return self._advise(offset, length, _MADV_POPULATE_WRITE)

    def _advise(self, offset: int, length: int, advice: int) -> str:
        if _libc.madvise(self._address + offset, length, advice) == 0:
            return ""
        return os.strerror(ctypes.get_errno())


def view_of(regions: Sequence[ByteArray], region_bytes: int, offset: int, length: int) -> ByteArray:
    """uint8[length] at byte `offset` of all regions; raises InvalidRequest unless in one region."""
    number, start = divmod(offset, region_bytes)
    if length < 0 or not 0 <= number < len(regions) or start + length > len(regions[number]):
        raise InvalidRequest(
            f"arena: [{offset}, {offset + length}) does not lie in one of {len(regions)} regions"
            f" of {region_bytes} bytes"
        )
    return regions[number][start : start + length]


def _reserve(length: int) -> int:
    """Address space for `length` bytes at a multiple of 2 MiB; Python's own mmap does not align."""
    whole = align_up(length, PAGE_BYTES)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = _libc.mmap(None, whole + HUGE_PAGE_BYTES, 0, flags, -1, 0)
    if start == _MAP_FAILED:
        raise _refused(length)
    address = align_up(start, HUGE_PAGE_BYTES)
    if address > start:
        _libc.munmap(start, address - start)
    _libc.munmap(address + whole, start + HUGE_PAGE_BYTES - address)
    return address


def _refused(length: int) -> TierIO:
    return TierIO(
        f"cannot map {length} bytes: {os.strerror(ctypes.get_errno())}; raise the address space"
        " limit (ulimit -v) or make the arena smaller"
    )
