"""Bytes to and from segment files: page-aligned, whole or an error, physically reserved.

Primitives:
  `BlockIO`, `SegmentFile`  what the tier needs; fault injection wraps them
  `SystemCalls`, `KERNEL`   the calls that reach the kernel; replaced to inject faults further down
  `DirectIO`                O_DIRECT, or the page cache where the platform refuses, with the reason
  `prove`                   one real write and read of one page in a directory
  `page_aligned`            an anonymous page-aligned buffer

May not know frames, slots or records.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from kvstore.errors import InvalidRequest, TierError, TierFull, TierIO
from kvstore.types import PAGE_BYTES, ByteArray

BOUNCE_BYTES = 1 << 20
"""Size of one thread's bounce buffer; longer transfers go through it in turns."""
SECTOR_BYTES = 512
"""Unit of st_blocks, whatever the device."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

Mode = Literal["direct", "buffered"]


class SystemCalls(Protocol):
    """The calls that reach the kernel. Each raises OSError; transfers may be short."""

    def open(self, path: Path, flags: int) -> int: ...
    def fallocate(self, fd: int, length: int) -> None: ...
    def preadv(self, fd: int, views: Sequence[ByteArray], offset: int) -> int: ...
    def pwritev(self, fd: int, views: Sequence[ByteArray], offset: int) -> int: ...
    def fdatasync(self, fd: int) -> None: ...


class KernelCalls:
    """The kernel itself. `preadv`, `pwritev` and `fdatasync` run without the GIL."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def fallocate(self, fd: int, length: int) -> None:
        os.posix_fallocate(fd, 0, length)

    def preadv(self, fd: int, views: Sequence[ByteArray], offset: int) -> int:
        return os.preadv(fd, views, offset)  # type: ignore[arg-type]  # arrays are buffers

    def pwritev(self, fd: int, views: Sequence[ByteArray], offset: int) -> int:
        return os.pwritev(fd, views, offset)  # type: ignore[arg-type]  # arrays are buffers

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)


KERNEL = KernelCalls()


@dataclass(frozen=True)
class FileStatus:
    """What the file system says about an open segment."""

    length: int
    bytes_on_disk: int
    is_linked: bool
    """False once somebody removed the file from its directory."""


class SegmentFile(Protocol):
    """One open file. Offsets and total lengths are multiples of PAGE_BYTES; safe from several
    threads.
    """

    def preadv(self, views: Sequence[ByteArray], offset: int) -> None:
        """Fill every view (uint8, writable) from `offset` on. Raises TierIO, also when the file is
        too short.
        """

    def pwritev(self, views: Sequence[ByteArray], offset: int) -> None:
        """Write all of `views` at `offset`, continuing short writes. Raises TierIO, TierFull."""

    def fdatasync(self) -> None:
        """Raises TierIO."""

    def status(self) -> FileStatus: ...
    def close(self) -> None: ...


class BlockIO(Protocol):
    """Opens segment files and says how it reaches them."""

    @property
    def mode(self) -> Mode: ...
    @property
    def mode_reason(self) -> str:
        """Why the mode is not "direct"; "" when it is."""

    @property
    def reserve_reason(self) -> str:
        """Why space could not be preallocated in the plain way; "" when it could."""

    def open_segment(self, path: Path, length: int, create: bool) -> SegmentFile:
        """Open `path`; with `create`, make and physically reserve `length` bytes first where they
        are missing.

        A file that could not be reserved whole is removed again. Raises TierFull, TierIO.
        """


def page_aligned(length: int) -> ByteArray:
    """Zeroed uint8[length] at a page-aligned address."""
    return np.frombuffer(mmap.mmap(-1, max(length, 1)), np.uint8)[:length]


def address_of(view: ByteArray) -> int:
    """Address of the first byte."""
    return int(view.__array_interface__["data"][0])


class _Bounce(threading.local):
    """One page-aligned buffer a thread."""

    def __init__(self) -> None:
        self.buffer = page_aligned(BOUNCE_BYTES)


class DirectIO:
    """BlockIO over O_DIRECT; `direct="off"` or a refusal by the platform means the page cache.

    Alignment is checked here before every call; what is not aligned in memory goes through a bounce
    buffer. When the platform refuses O_DIRECT (EINVAL, ENOTSUP) at open or at any later transfer,
    this and all other files go on through the page cache and the refused transfer is repeated, so
    that nothing is lost.
    """

    def __init__(
        self, direct: Literal["auto", "off"] = "auto", system: SystemCalls = KERNEL
    ) -> None:
        self._system = system
        self._mode: Mode = "direct" if direct == "auto" else "buffered"
        self._mode_reason = "" if direct == "auto" else 'nvme.direct is "off"'
        self._reserve_reason = ""
        self._bounce = _Bounce()

    @property
    def mode(self) -> Mode:
        return self._mode

    @property
    def mode_reason(self) -> str:
        return self._mode_reason

    @property
    def reserve_reason(self) -> str:
        return self._reserve_reason

    def open_segment(self, path: Path, length: int, create: bool) -> SegmentFile:
        is_new = False
        try:
            if create:
                try:
                    fd = self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                    is_new = True
                except FileExistsError:
                    fd = self._open(path, os.O_RDWR)
            else:
                fd = self._open(path, os.O_RDWR)
        except OSError as error:
            raise translated(error, f"cannot open {path}") from error
        file = _File(self, self._system, path, fd, self._bounce)
        try:
            if create:
                self._reserve(file, length)
        except BaseException:
            file.close()
            if is_new:
                with suppress(FileNotFoundError):
                    path.unlink()
            raise
        return file

    def _open(self, path: Path, flags: int) -> int:
        if self._mode == "direct":
            try:
                return self._system.open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                self.fall_back(f"open refused O_DIRECT: {error.strerror}")
                # A refused O_CREAT may have left the empty file behind: it is ours.
                flags &= ~os.O_EXCL
        return self._system.open(path, flags)

    def fall_back(self, reason: str) -> None:
        """From now on through the page cache."""
        self._mode, self._mode_reason = "buffered", reason

    def _reserve(self, file: _File, length: int) -> None:
        """Blocks on disk for [0, length), by fallocate or by writing zeros past what exists."""
        before = file.status()
        if before.length >= length and before.bytes_on_disk >= length:
            return
        try:
            self._system.fallocate(file.fd, length)
            refused = ""
        except OSError as error:
            if error.errno not in _REFUSED:
                raise translated(error, f"cannot reserve {length} bytes for {file.path}") from error
            refused = f"preallocation refused ({error.strerror})"
        if not refused and file.status().bytes_on_disk >= length:
            return
        self._reserve_reason = (
            f"{refused or 'preallocation reserved nothing'}; segments are filled with zeros instead"
        )
        first = before.length // PAGE_BYTES * PAGE_BYTES
        zeros = page_aligned(BOUNCE_BYTES)
        for offset in range(first, length, BOUNCE_BYTES):
            file.pwritev([zeros[: min(BOUNCE_BYTES, length - offset)]], offset)
        file.fdatasync()
        if file.status().bytes_on_disk < length:
            self._reserve_reason = (
                "the file system keeps no blocks for written zeros; space is not reserved"
            )


class _File:
    """One open segment file of a DirectIO. The descriptor is owned here and closed once."""

    def __init__(
        self, io: DirectIO, system: SystemCalls, path: Path, fd: int, bounce: _Bounce
    ) -> None:
        self._io = io
        self._system = system
        self.path = path
        self.fd = fd
        self._bounce = bounce
        self._is_direct = io.mode == "direct"

    def preadv(self, views: Sequence[ByteArray], offset: int) -> None:
        _check_page(self.path, "offset", offset)
        if all(_is_aligned(view) for view in views):
            self._read(views, offset)
            return
        for view in views:
            self._read_bounced(view, offset)
            offset += len(view)
            # Only the last view may end inside a page: the next one would start there.

    def _read_bounced(self, view: ByteArray, offset: int) -> None:
        _check_page(self.path, "offset", offset)
        whole = len(view) // PAGE_BYTES * PAGE_BYTES
        if whole and _is_aligned(view[:whole]):
            self._read([view[:whole]], offset)
        else:
            whole = 0
        buffer = self._bounce.buffer
        for start in range(whole, len(view), BOUNCE_BYTES):
            rest = min(BOUNCE_BYTES, len(view) - start)
            self._read([buffer[: -(-rest // PAGE_BYTES) * PAGE_BYTES]], offset + start)
            np.copyto(view[start : start + rest], buffer[:rest])

    def _read(self, views: Sequence[ByteArray], offset: int) -> None:
        left = sum(len(view) for view in views)
        stuck = 0
        while left:
            count = self._transfer(self._system.preadv, "read", views, offset)
            count = self._usable(count, left)
            stuck = stuck + 1 if count == 0 else 0
            if stuck > 1:
                raise TierIO(f"{self.path}: ends before byte {offset + left}")
            views, offset, left = _after(views, count), offset + count, left - count

    def pwritev(self, views: Sequence[ByteArray], offset: int) -> None:
        total = sum(len(view) for view in views)
        _check_page(self.path, "offset", offset)
        _check_page(self.path, "length", total)
        if all(_is_aligned(view) for view in views):
            self._write(views, offset)
            return
        buffer = self._bounce.buffer
        while total:
            count = min(total, BOUNCE_BYTES)
            _gather(views, buffer[:count])
            self._write([buffer[:count]], offset)
            views, offset, total = _after(views, count), offset + count, total - count

    def _write(self, views: Sequence[ByteArray], offset: int) -> None:
        left = sum(len(view) for view in views)
        stuck = 0
        while left:
            count = self._transfer(self._system.pwritev, "write", views, offset)
            count = self._usable(count, left)
            stuck = stuck + 1 if count == 0 else 0
            if stuck > 1:
                raise TierIO(f"{self.path}: a write at {offset} makes no progress")
            views, offset, left = _after(views, count), offset + count, left - count

    def _transfer(self, call: _Call, verb: str, views: Sequence[ByteArray], offset: int) -> int:
        """One call; a platform that refuses O_DIRECT is asked again without it."""
        if self._is_direct and self._io.mode == "buffered":
            self._leave_direct()
        try:
            return call(self.fd, views, offset)
        except OSError as error:
            if not self._is_direct or error.errno not in _REFUSED:
                raise translated(error, f"cannot {verb} {self.path} at {offset}") from error
            self._io.fall_back(f"{verb} refused O_DIRECT: {error.strerror}")
        self._leave_direct()
        try:
            return call(self.fd, views, offset)
        except OSError as error:
            raise translated(error, f"cannot {verb} {self.path} at {offset}") from error

    def _leave_direct(self) -> None:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._is_direct = False

    def _usable(self, count: int, left: int) -> int:
        """Bytes to go on after: O_DIRECT must continue on a page boundary, so a ragged end is done
        again.
        """
        if count < left and self._is_direct:
            return count // PAGE_BYTES * PAGE_BYTES
        return count

    def fdatasync(self) -> None:
        try:
            self._system.fdatasync(self.fd)
        except OSError as error:
            raise TierIO(f"cannot sync {self.path}: {error.strerror}") from error

    def status(self) -> FileStatus:
        found = os.fstat(self.fd)
        return FileStatus(found.st_size, found.st_blocks * SECTOR_BYTES, found.st_nlink > 0)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _Call(Protocol):
    def __call__(self, fd: int, views: Sequence[ByteArray], offset: int, /) -> int: ...


def prove(io: BlockIO, directory: Path) -> tuple[Mode, str]:
    """Write, sync and read back one page in `directory`; return the mode that worked and why it is
    not direct.

    Raises TierIO when the page does not come back as written, TierFull, TierIO when it cannot be
    written at all.
    """
    path = directory / f"probe-{os.getpid()}.tmp"
    written, found = page_aligned(PAGE_BYTES), page_aligned(PAGE_BYTES)
    written[:] = np.frombuffer(os.urandom(PAGE_BYTES), np.uint8)
    try:
        file = io.open_segment(path, PAGE_BYTES, True)
        try:
            file.pwritev([written], 0)
            file.fdatasync()
            file.preadv([found], 0)
        finally:
            file.close()
    finally:
        path.unlink(missing_ok=True)
    if not np.array_equal(written, found):
        raise TierIO(f"{directory}: a page read back differs from the page written")
    return io.mode, io.mode_reason


def translated(error: OSError, what: str) -> TierError:
    """The typed error for a failed call: TierFull for every way of having no space, else TierIO."""
    message = f"{what}: {error.strerror or error}"
    return TierFull(message) if error.errno in _NO_SPACE else TierIO(message)


def _is_aligned(view: ByteArray) -> bool:
    return len(view) % PAGE_BYTES == 0 and address_of(view) % PAGE_BYTES == 0


def _check_page(path: Path, name: str, value: int) -> None:
    if value % PAGE_BYTES:
        raise InvalidRequest(f"{path}: {name} {value} is not a multiple of {PAGE_BYTES}")


def _after(views: Sequence[ByteArray], count: int) -> list[ByteArray]:
    """What is left of `views` after their first `count` bytes."""
    rest: list[ByteArray] = []
    for view in views:
        if count < len(view):
            rest.append(view[count:])
        count = max(0, count - len(view))
    return rest


def _gather(views: Sequence[ByteArray], into: ByteArray) -> None:
    """Copy the first len(into) bytes of `views`, joined, to `into`."""
    start = 0
    for view in views:
        piece = view[: len(into) - start]
        np.copyto(into[start : start + len(piece)], piece)
        start += len(piece)
