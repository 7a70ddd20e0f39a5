"""The NVMe tier's segment files: opened lazily, allocated on first write, accounted by what they
occupy.

Primitives of `Segments`:
  `write_frame`, `read_payload`, `read_header`, `sync`   transfers, from worker threads
  `files`, `reconcile`, `measure`, `bytes_on_disk`       the books and the file system
  `remove`                                               files that hold no block

A file serves one slot size and says so in its name (`000012-2101248.seg`), so that frames can be
found without the index. The caller owns each slot it names; distinct slots may be used from several
threads at once.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstore.blockio import SECTOR_BYTES, BlockIO, SegmentFile, page_aligned, translated
from kvstore.errors import TierFull, TierIO, check
from kvstore.segment import (
    FRAME,
    FrameFields,
    SegmentGeometry,
    frame_bytes,
    pack_frame,
    parse_frame,
)
from kvstore.types import PAGE_BYTES, ByteArray

FILES_OPEN_MAX = 512
_NAME = re.compile(r"(\d{6,})-(\d+)\.seg")


@dataclass(eq=False)
class _Segment:
    """One file. `bytes_on_disk` is 0 until it is allocated; `users` counts running transfers."""

    number: int
    slot_bytes: int
    path: Path
    bytes_on_disk: int = 0
    file: SegmentFile | None = None
    users: int = 0
    opening: threading.Lock = field(default_factory=threading.Lock)


class _Scratch(threading.local):
    """One thread's aligned pages: a frame's header, a payload's last page."""

    def __init__(self) -> None:
        pages = page_aligned(2 * PAGE_BYTES)
        self.header, self.tail = pages[:PAGE_BYTES], pages[PAGE_BYTES:]


class Segments:
    """All segment files of one directory.

    `bytes_max` and `free_bytes_min` are hard bounds of every allocation; the tier moves
    `bytes_max`. Lock order: growing, opening, table; the table lock is never held across a system
    call that can wait.
    """

    def __init__(
        self,
        directory: Path,
        io: BlockIO,
        geometry: SegmentGeometry,
        *,
        free_bytes_min: int,
        read_only: bool = False,
    ) -> None:
        self._directory = directory
        self._io = io
        self.geometry = geometry
        self.bytes_max = 0
        self.free_bytes_min = free_bytes_min
        self._table: dict[int, _Segment] = {}
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._scratch = _Scratch()
        self.unknown_files = 0
        self.unknown_bytes = 0
        self._discover(read_only)

    # ------------------------------------------------------------------ what is there

    def _discover(self, read_only: bool) -> None:
        """Take the segments found; remove every other file. Nothing was written yet."""
        for entry in sorted(os.scandir(self._directory), key=lambda item: item.name):
            match = _NAME.fullmatch(entry.name)
            status = entry.stat(follow_symlinks=False)
            size = status.st_blocks * SECTOR_BYTES
            number, slot_bytes = (int(match[1]), int(match[2])) if match else (-1, 0)
            is_ours = (
                match is not None
                and entry.is_file(follow_symlinks=False)
                and number not in self._table
                and slot_bytes >= self.geometry.slot_bytes_min
                and slot_bytes % PAGE_BYTES == 0
                and status.st_size >= self.geometry.file_bytes(slot_bytes)
            )
            if is_ours:
                self._table[number] = _Segment(number, slot_bytes, Path(entry.path), size)
            elif not entry.is_dir(follow_symlinks=False):
                self.unknown_files += 1
                self.unknown_bytes += size
                if not read_only:
                    os.unlink(entry.path)

    @property
    def bytes_on_disk(self) -> int:
        """What the books say all segment files occupy."""
        with self._lock:
            return sum(segment.bytes_on_disk for segment in self._table.values())

    def measure(self) -> int:
        """What the file system says they occupy, everything in the directory counted."""
        return sum(
            entry.stat(follow_symlinks=False).st_blocks * SECTOR_BYTES
            for entry in os.scandir(self._directory)
        )

    def files(self) -> dict[int, int]:
        """Segment number → slot size of every allocated file."""
        with self._lock:
            return {
                number: segment.slot_bytes
                for number, segment in self._table.items()
                if segment.bytes_on_disk
            }

    def reconcile(self) -> tuple[list[int], int]:
        """Put what the file system says into the books.

        Returns the segments whose file somebody removed, and the bytes of files that are not ours.
        """
        with self._lock:
            known = {item.path.name: item for item in self._table.values()}
            missing = {name for name, item in known.items() if item.bytes_on_disk}
        strangers = 0
        for entry in os.scandir(self._directory):
            try:
                size = entry.stat(follow_symlinks=False).st_blocks * SECTOR_BYTES
            except FileNotFoundError:
                continue
            if entry.name in missing:
                missing.discard(entry.name)
                known[entry.name].bytes_on_disk = size
            elif entry.name not in known:
                strangers += size
        for name in missing:
            self._forget(known[name])
        return sorted(known[name].number for name in missing), strangers

    # ------------------------------------------------------------------ frames

    def write_frame(
        self, slot: int, frame: FrameFields, payload: ByteArray, slot_bytes: int
    ) -> None:
        """Header and payload (uint8[frame.length]) in one write. Raises TierFull, TierIO."""
        check(frame_bytes(frame.length) <= slot_bytes, "a frame fits its slot", slot=slot)
        header, tail = self._scratch.header, self._scratch.tail
        header[: FRAME.size] = np.frombuffer(pack_frame(frame), np.uint8)
        views = [header]
        whole = frame.length // PAGE_BYTES * PAGE_BYTES
        if whole:
            views.append(payload[:whole])
        rest = frame.length - whole
        if rest:
            np.copyto(tail[:rest], payload[whole : frame.length])
            tail[rest:] = 0
            views.append(tail)
        with self._use(self.geometry.segment_of(slot), slot_bytes) as segment:
            assert segment.file is not None
            segment.file.pwritev(views, self.geometry.offset_of(slot, slot_bytes))

    def read_payload(self, slot: int, offset: int, views: Sequence[ByteArray]) -> None:
        """Fill `views` from byte `offset` (a multiple of PAGE_BYTES) of the slot's payload on.
        Raises TierIO.
        """
        self._read(slot, PAGE_BYTES + offset, views)

    def read_header(self, slot: int) -> FrameFields:
        """Raises FrameMalformed, TierIO."""
        page = page_aligned(PAGE_BYTES)
        self._read(slot, 0, [page])
        return parse_frame(page)

    def _read(self, slot: int, offset: int, views: Sequence[ByteArray]) -> None:
        with self._use(self.geometry.segment_of(slot), None) as segment:
            assert segment.file is not None
            start = self.geometry.offset_of(slot, segment.slot_bytes)
            segment.file.preadv(views, start + offset)

    def sync(self, slots: Iterable[int]) -> None:
        """Everything written to these slots is on the medium when this returns. Raises TierIO."""
        for number in sorted({self.geometry.segment_of(int(slot)) for slot in slots}):
            with self._use(number, None) as segment:
                assert segment.file is not None
                segment.file.fdatasync()
                status = segment.file.status()
                if status.is_linked:
                    segment.bytes_on_disk = status.bytes_on_disk
                    continue
            self._forget(segment)
            raise TierIO(f"{segment.path} was removed by somebody else; its blocks are lost")

    def remove(self, numbers: Iterable[int]) -> None:
        """Delete segment files that hold no block; one that is gone already is success."""
        for number in numbers:
            with self._lock:
                segment = self._table.get(number)
            if segment is not None:
                self._delete(segment)

    def close(self) -> None:
        """Close every file; transfers must have ended."""
        with self._lock:
            for segment in self._table.values():
                if segment.file is not None:
                    segment.file.close()
                    segment.file = None

    # ------------------------------------------------------------------ opening, growing

    @contextmanager
    def _use(self, number: int, slot_bytes: int | None) -> Iterator[_Segment]:
        """The segment with its file open. With `slot_bytes` it is made when missing or of another
        size. Raises TierFull, TierIO, also for an OSError of the caller's.
        """
        with self._lock:
            segment = self._table.get(number)
            if segment is None or (slot_bytes is not None and segment.slot_bytes != slot_bytes):
                if slot_bytes is None:
                    raise TierIO(f"segment {number} has no file")
                segment = None
        try:
            if segment is None:
                assert slot_bytes is not None
                segment = self._make_way(number, slot_bytes)
            with self._lock:
                segment.users += 1
            try:
                if segment.file is None:
                    self._open(segment, create=slot_bytes is not None)
                yield segment
            finally:
                with self._lock:
                    segment.users -= 1
                    if self._table.get(number) is not segment:
                        _close_if_idle(segment)
        except OSError as error:
            raise translated(error, f"{self._directory}: segment {number}") from error

    def _make_way(self, number: int, slot_bytes: int) -> _Segment:
        """A table entry for a new file; files of other sizes on the same slabs, empty by now, are
        deleted.
        """
        with self._growing:
            with self._lock:
                known = self._table.get(number)
                if known is not None and known.slot_bytes == slot_bytes:
                    return known
                last = number + self.geometry.span(slot_bytes)
                stale = [
                    other
                    for other in self._table.values()
                    if other.number < last
                    and number < other.number + self.geometry.span(other.slot_bytes)
                ]
            for other in stale:
                self._delete(other)
            path = self._directory / f"{number:06d}-{slot_bytes}.seg"
            segment = _Segment(number, slot_bytes, path)
            with self._lock:
                self._table[number] = segment
            return segment

    def _open(self, segment: _Segment, create: bool) -> None:
        with segment.opening:
            if segment.file is not None:
                return
            length = self.geometry.file_bytes(segment.slot_bytes)
            if create and segment.bytes_on_disk < length:
                self._grow(segment, length)
            else:
                segment.file = self._io.open_segment(segment.path, length, False)
            self._close_idle(segment)

    def _grow(self, segment: _Segment, length: int) -> None:
        """Allocate the file within both bounds. One at a time, so that the bounds hold at every
        moment.
        """
        with self._growing:
            held, missing = self.bytes_on_disk, length - segment.bytes_on_disk
            if held + missing > self.bytes_max:
                raise TierFull(
                    f"{missing} bytes for a segment beside {held} exceed the {self.bytes_max} "
                    "allowed now"
                )
            free = free_bytes(self._directory)
            if free - missing < self.free_bytes_min:
                raise TierFull(
                    f"{self._directory}: {free} bytes are free, {self.free_bytes_min} of them stay "
                    "for others (nvme.free_bytes_min)"
                )
            file = self._io.open_segment(segment.path, length, True)
            occupied = file.status().bytes_on_disk
            if occupied < length:
                file.close()
                if not segment.bytes_on_disk:
                    segment.path.unlink()
                raise TierFull(
                    f"{segment.path} occupies {occupied} of {length} bytes: "
                    f"{self._io.reserve_reason}; use another file system, or turn its compression "
                    "off for nvme files"
                )
            check(occupied >= length, "I11: what is accounted is on disk", on_disk=occupied)
            segment.bytes_on_disk, segment.file = occupied, file
            sync_directory(self._directory)

    def _close_idle(self, keep: _Segment) -> None:
        """Stay below FILES_OPEN_MAX descriptors: idle files are closed, oldest first."""
        with self._lock:
            others = [item for item in self._table.values() if item.file and item is not keep]
            for segment in others[: max(0, len(others) + 1 - FILES_OPEN_MAX)]:
                _close_if_idle(segment)

    def _forget(self, segment: _Segment) -> None:
        """Out of the table; its descriptor is closed as soon as no transfer uses it."""
        with self._lock:
            if self._table.get(segment.number) is segment:
                del self._table[segment.number]
            _close_if_idle(segment)

    def _delete(self, segment: _Segment) -> None:
        segment.path.unlink(missing_ok=True)
        self._forget(segment)


def _close_if_idle(segment: _Segment) -> None:
    if segment.file is not None and not segment.users:
        segment.file.close()
        segment.file = None


def free_bytes(directory: Path) -> int:
    """Bytes an ordinary process may still allocate on the directory's file system."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def sync_directory(directory: Path) -> None:
    """Names created or removed in `directory` survive a power cut."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
