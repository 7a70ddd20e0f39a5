"""A disk that forgets: what was not synced when the machine stopped may be gone, in any part.

Primitives of `CachedDisk`, a BlockIO over another: reads see every write at once; the files below
get them at `fdatasync`, or page by page at `crash`, as the seed decides. Wrap it in a
`FaultyBlockIO` for disks that lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np

from kvstore.blockio import BlockIO, FileStatus, Mode, SegmentFile, page_aligned
from kvstore.errors import TierIO
from kvstore.types import PAGE_BYTES, ByteArray

Pages = dict[int, ByteArray]
"""Byte offset → page written and not yet synced."""


class CachedDisk:
    """One thread. `crash` ends it: every later operation raises TierIO."""

    def __init__(self, inner: BlockIO, random: Random) -> None:
        self._inner = inner
        self._random = random
        self._unsynced: dict[Path, Pages] = {}
        self._open: list[SegmentFile] = []
        self.is_off = False

    @property
    def mode(self) -> Mode:
        return self._inner.mode

    @property
    def mode_reason(self) -> str:
        return self._inner.mode_reason

    @property
    def reserve_reason(self) -> str:
        return self._inner.reserve_reason

    def open_segment(self, path: Path, length: int, create: bool) -> SegmentFile:
        self.check_power(path)
        if create and not path.exists():
            self._unsynced.pop(path, None)
        file = self._inner.open_segment(path, length, create)
        self._open.append(file)
        return _CachedFile(self, path, file, self._unsynced.setdefault(path, {}))

    def check_power(self, path: Path) -> None:
        if self.is_off:
            raise TierIO(f"{path}: the machine is off")

    def crash(self, share_kept: float = 0.5) -> None:
        """Power off. Each page that was not synced is kept with probability `share_kept`."""
        self.is_off = True
        for path, pages in self._unsynced.items():
            kept = {at: page for at, page in pages.items() if self._random.random() < share_kept}
            if kept and path.exists():
                file = self._inner.open_segment(path, path.stat().st_size, False)
                write_pages(file, kept)
                file.close()
        self._unsynced.clear()
        # Nobody else will: whoever opened them is as dead as a killed process.
        for file in self._open:
            file.close()


class _CachedFile:
    """One open file; files of one path share their unsynced pages."""

    def __init__(self, disk: CachedDisk, path: Path, inner: SegmentFile, pages: Pages) -> None:
        self._disk = disk
        self._path = path
        self._inner = inner
        self._pages = pages

    def preadv(self, views: Sequence[ByteArray], offset: int) -> None:
        self._disk.check_power(self._path)
        self._inner.preadv(views, offset)
        if self._pages:
            for view in views:
                for start in range(0, len(view), PAGE_BYTES):
                    page = self._pages.get(offset + start)
                    if page is not None:
                        piece = view[start : start + PAGE_BYTES]
                        piece[:] = page[: len(piece)]
                offset += len(view)

    def pwritev(self, views: Sequence[ByteArray], offset: int) -> None:
        self._disk.check_power(self._path)
        data = np.concatenate(list(views))
        for start in range(0, len(data), PAGE_BYTES):
            self._pages[offset + start] = data[start : start + PAGE_BYTES]

    def fdatasync(self) -> None:
        self._disk.check_power(self._path)
        write_pages(self._inner, self._pages)
        self._inner.fdatasync()
        self._pages.clear()

    def status(self) -> FileStatus:
        return self._inner.status()

    def close(self) -> None:
        self._inner.close()


def write_pages(file: SegmentFile, pages: Pages) -> None:
    """Put pages into a file, in no order that anybody may rely on."""
    buffer = page_aligned(PAGE_BYTES)
    for at, page in pages.items():
        buffer[:] = page
        file.pwritev([buffer], at)
