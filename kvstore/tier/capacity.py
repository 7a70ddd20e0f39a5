"""How many segments the NVMe tier may use now: byte cap, free-space floor, a disk that said "full".

Primitives of `Capacity`:
  `survey`, `disk_was_full`   worker threads: look at the disk, work out how many slabs are allowed
  `apply`                     loop: take free slabs out of service, or bring them back
  `over_cap_slots`            loop: blocks that must go, as fewer slabs are allowed than hold blocks
  `delete_retired`            worker thread: the files of slabs out of service

The pool belongs to the loop, the disk to threads; `allowed_slabs` and the set of retired files are
all they share. The hard bound on bytes is kept by `Segments` at every allocation; this makes `take`
say "no room" before it is met.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvstore.blockio import SECTOR_BYTES
from kvstore.clock import Clock
from kvstore.segment import SegmentGeometry
from kvstore.slab import SlabPool
from kvstore.tier.segments import Segments, free_bytes
from kvstore.types import IntArray

SEGMENTS = "segments"
"""Subdirectory of the data directory that holds the segment files."""
GROW_AGAIN_SECONDS = 10.0
"""After the file system refused space it said it had: no growth for so long."""


class Capacity:
    """See the module."""

    def __init__(
        self,
        data_dir: Path,
        pool: SlabPool,
        segments: Segments,
        *,
        bytes_max: int,
        free_bytes_min: int,
        clock: Clock,
    ) -> None:
        self._data_dir = data_dir
        self._pool = pool
        self._segments = segments
        self._geometry: SegmentGeometry = segments.geometry
        self.bytes_max = bytes_max
        self._free_bytes_min = free_bytes_min
        self._clock = clock
        self._full_until = -1.0
        self.allowed_slabs = pool.slabs
        self.limit_reason = ""
        self.bytes_beside = 0
        """Bytes below the data directory outside the segments: index, superblock, whatever else
        lies there.
        """
        self._settled_slabs = pool.slabs
        self._retired: set[int] = set()
        self._closed: set[int] = set()
        self._shared = threading.Lock()
        self._doomed: set[int] = set()
        self._deleting: set[int] = set()

    # ------------------------------------------------------------------ threads

    def survey(self) -> list[int]:
        """Work out how many slabs cap and disk allow now; segments whose file somebody removed."""
        lost, strangers = self._segments.reconcile()
        self.bytes_beside = strangers + bytes_below(self._data_dir, leave_out=SEGMENTS)
        self._segments.bytes_max = max(0, self.bytes_max - self.bytes_beside)
        slab = self._geometry.slab_bytes
        held = sum(self._geometry.span(size) for size in self._segments.files().values())
        free = free_bytes(self._data_dir)
        allowed, reason = self._segments.bytes_max // slab, ""
        by_space = held + (free - self._free_bytes_min) // slab
        if by_space < allowed:
            allowed = by_space
            if allowed <= held:
                reason = f"{free} bytes are free, nvme.free_bytes_min={self._free_bytes_min}"
        if self._clock.monotonic() < self._full_until and held < allowed:
            allowed, reason = held, "the file system refused more space"
        if allowed < 1 and not reason:
            reason = f"{self._segments.bytes_max} bytes are allowed, less than one segment"
        self.allowed_slabs, self.limit_reason = max(0, allowed), reason
        return lost

    def disk_was_full(self) -> None:
        """An allocation failed: no growth beyond what is held until the disk had time to change."""
        self._full_until = self._clock.monotonic() + GROW_AGAIN_SECONDS
        with suppress(OSError):  # the next look tells; who was refused is to hear of that
            self.survey()

    def delete_retired(self) -> None:
        """Delete the files of slabs out of service; a slab cannot come back before its file is
        gone.
        """
        with self._shared:
            self._deleting, self._doomed = self._doomed, set()
        try:
            self._segments.remove(sorted(self._deleting))
        finally:
            with self._shared:
                self._deleting = set()

    # ------------------------------------------------------------------ the loop

    def apply(self) -> None:
        """Bring the number of slabs in service to what is allowed, as far as slabs are free."""
        target = self.allowed_slabs
        if target == self._settled_slabs and not self._closed:
            return
        in_service = self._pool.slabs - len(self._retired)
        if in_service > target and self._pool.statistics().slabs_free:
            in_service -= self._retire(in_service - target)
        elif in_service < target:
            in_service += self._restore(target - in_service)
        if in_service <= target:
            self._reopen()
        self._settled_slabs = in_service

    def _retire(self, count: int) -> int:
        """Up to `count` free slabs out of service, those with a file first: their bytes go back to
        the disk.
        """
        files = self._segments.files()
        free = self._free_slabs()
        free.sort(key=lambda slab: (slab not in files, -slab))
        for slab in free[:count]:
            self._pool.retire_slab(slab)
        chosen = set(free[:count])
        self._retired |= chosen
        self._closed -= chosen
        with self._shared:
            self._doomed |= chosen & files.keys()
        return len(chosen)

    def _restore(self, count: int) -> int:
        with self._shared:
            back = sorted(self._retired - self._deleting)[:count]
            self._doomed.difference_update(back)
        for slab in back:
            self._pool.restore_slab(slab)
        self._retired.difference_update(back)
        return len(back)

    def _reopen(self) -> None:
        """Slabs closed by `over_cap_slots` that need not empty any more."""
        for slab in self._closed & self._assigned().keys():
            self._pool.reopen_slab(slab)
        self._closed.clear()

    def over_cap_slots(self) -> IntArray:
        """Held slots of the slabs that must empty, int64[n]; those slabs hand out no more slots.

        The caller drops their blocks; the emptied slabs leave service and their files are deleted.
        """
        self.apply()
        found = self._pool.statistics()
        surplus = found.slabs - found.slabs_free - found.slabs_retired - self.allowed_slabs
        if surplus <= 0:
            return np.zeros(0, np.int64)
        assigned = self._assigned()
        self._closed &= assigned.keys()
        held = {slab: self._pool.slots_in_slab(slab) for slab in assigned}
        files = self._segments.files()
        # Slabs whose file could not be made first: nothing is stored in them.
        order = sorted(
            held,
            key=lambda slab: (slab in files, slab not in self._closed, len(held[slab]), -slab),
        )
        leaving: list[IntArray] = []
        for slab in order:
            if surplus <= 0:
                break
            surplus -= assigned[slab]
            leaving.append(held[slab])
            if slab not in self._closed:
                self._closed.add(slab)
                self._pool.close_slab(slab)
        return np.concatenate(leaving)

    def _assigned(self) -> dict[int, int]:
        """First slab → number of slabs, of everything that serves a class."""
        return {
            int(slab): self._geometry.span(size)
            for size in self._pool.classes()
            for slab in self._pool.slabs_of_class(size)
        }

    def _free_slabs(self) -> list[int]:
        taken = {slab + step for slab, span in self._assigned().items() for step in range(span)}
        taken |= self._retired
        return [slab for slab in range(self._pool.slabs) if slab not in taken]


def bytes_below(directory: Path, leave_out: str = "") -> int:
    """What `directory` and everything below it occupies; files of one subdirectory left out.

    What vanishes meanwhile counts as 0.
    """
    total = 0
    for parent, _, names in os.walk(directory):
        is_left_out = leave_out and Path(parent) == directory / leave_out
        for name in (".",) if is_left_out else (".", *names):
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * SECTOR_BYTES
            except FileNotFoundError:
                continue
    return total
