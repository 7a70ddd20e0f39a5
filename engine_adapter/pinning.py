"""Which of the arena's memory a device can reach, and the way round for what it cannot.

Primitives:
  `PinnedArena`   regions registered one by one, in the background; `is_pinned`, `add`, `close`;
                  `lend`, `take_back` for memory of another process' device that is open here
  `BounceRing`    a few pinned buffers, for bytes that are not (yet) pinned

A region is pinned as a whole or not at all. One that could not be unpinned is kept mapped for as
long as the process lives. May not start copies.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from threading import Lock

import numpy as np

from kvstore.device import REGISTER_BYTES_MAX, Device
from kvstore.errors import DeviceError
from kvstore.types import BoolArray, ByteArray, UIntArray

BOUNCE_BYTES = 4 << 20
BOUNCE_BUFFERS = 4

_log = logging.getLogger(__name__)
_never_unmapped: list[ByteArray] = []
"""Memory that a device still has registered: unmapping it would hand its pages to others."""


class PinnedArena:
    """Thread-safe. Holds every region it was given until `close`."""

    def __init__(self, device: Device, register_bytes_max: int = REGISTER_BYTES_MAX) -> None:
        self._device = device
        self._register_bytes_max = register_bytes_max
        self._lock = Lock()
        self._waiting: deque[ByteArray] = deque()
        self._regions: list[ByteArray] = []
        self._ranges: dict[int, int] = {}
        """Start -> stop of each registration."""
        self._deltas: dict[int, int] = {}
        """Start -> how much further the device sees it."""
        self._lent: dict[int, int] = {}
        """Start -> stop of device memory; the device sees it where it is."""
        self._starts: UIntArray = np.empty(0, np.uint64)
        self._stops: UIntArray = np.empty(0, np.uint64)
        self.failures: list[str] = []
        """Why regions stayed unpinned."""

    def add(self, regions: Sequence[ByteArray]) -> None:
        """Regions to pin by and by; those known already are left alone."""
        with self._lock:
            known = {region.ctypes.data for region in self._regions}
            fresh = [region for region in regions if region.ctypes.data not in known]
            self._regions += fresh
            self._waiting.extend(fresh)

    def pin_next(self) -> bool:
        """Pin one region; False if none waits. Slow (0.1 s a GiB): for a background thread."""
        with self._lock:
            if not self._waiting:
                return False
            region = self._waiting.popleft()
        start, stop = region.ctypes.data, region.ctypes.data + len(region)
        done: dict[int, int] = {}
        try:
            for at in range(start, stop, self._register_bytes_max):
                length = min(self._register_bytes_max, stop - at)
                self._device.register(at, length)
                done[at] = at + length
            deltas = {at: self._device.pointer_of(at) - at for at in done}
        except DeviceError as error:
            self._unpin(done, region)
            _log.warning("%d bytes of the arena stay unpinned: %s", len(region), error)
            self.failures.append(str(error))
            return True
        with self._lock:
            self._ranges.update(done)
            self._deltas.update(deltas)
            self._sort()
        return True

    def lend(self, address: int, length: int) -> None:
        """Device memory that is copied from as if it were pinned."""
        with self._lock:
            self._lent[address], self._deltas[address] = address + length, 0
            self._sort()

    def take_back(self, address: int) -> None:
        """No copy runs from it, and none will."""
        with self._lock:
            del self._lent[address], self._deltas[address]
            self._sort()

    def is_lent(self, addresses: UIntArray) -> BoolArray | None:
        """bool [n]: which lie in device memory; None while there is none."""
        lent = self._lent
        if not lent:
            return None
        found = np.zeros(len(addresses), np.bool_)
        for start, stop in list(lent.items()):
            found |= (addresses >= start) & (addresses < stop)
        return found

    def _sort(self) -> None:
        known = sorted((self._ranges | self._lent).items())
        self._starts = np.array([start for start, _ in known], np.uint64)
        self._stops = np.array([stop for _, stop in known], np.uint64)

    @property
    def fences(self) -> UIntArray:
        """Ascending addresses that no copy may run across."""
        return self._starts

    def is_pinned(self, addresses: UIntArray, lengths: UIntArray) -> BoolArray:
        """bool [n]: whether each range lies in one registration."""
        starts, stops = self._starts, self._stops
        if not len(starts):
            return np.zeros(len(addresses), np.bool_)
        at = np.searchsorted(starts, addresses, "right") - 1
        inside: BoolArray = (at >= 0) & (addresses + lengths <= stops[np.maximum(at, 0)])
        return inside

    def pointers(self, addresses: UIntArray) -> UIntArray:
        """Where kernels find these pinned host addresses."""
        with self._lock:
            deltas = [self._deltas[start] for start in sorted(self._deltas)]
            if not any(deltas):
                return addresses
            at = np.searchsorted(self._starts, addresses, "right") - 1
        moved: UIntArray = addresses + np.array(deltas, np.int64)[at].astype(np.uint64)
        return moved

    def describe(self) -> dict[str, object]:
        """How much is pinned, and why not more."""
        with self._lock:
            total = sum(len(region) for region in self._regions)
            pinned = sum(stop - start for start, stop in self._ranges.items())
            waiting = sum(len(region) for region in self._waiting)
        return {
            "arena_bytes": total,
            "pinned_bytes": pinned,
            "waiting_bytes": waiting,
            "failures": list(self.failures),
        }

    def close(self) -> None:
        """Unpin everything; no enqueued work touches it any more."""
        with self._lock:
            ranges, self._ranges = self._ranges, {}
            regions, self._regions = self._regions, []
            self._waiting.clear()
            self._deltas = dict.fromkeys(self._lent, 0)
            self._sort()
        for region in regions:
            start = region.ctypes.data
            ours = {at: stop for at, stop in ranges.items() if start <= at < start + len(region)}
            self._unpin(ours, region)

    def _unpin(self, ranges: dict[int, int], region: ByteArray) -> None:
        for start in ranges:
            try:
                self._device.unregister(start)
            except DeviceError as error:
                _log.error("memory cannot be unpinned and stays mapped: %s", error)
                _never_unmapped.append(region)


class BounceRing:
    """Buffers are made on first use. A taken buffer is its taker's until given back."""

    def __init__(self, device: Device, buffer_bytes: int = BOUNCE_BYTES) -> None:
        self._device = device
        self.buffer_bytes = buffer_bytes
        self._free: list[ByteArray] = []
        self._made = 0

    def take(self) -> ByteArray | None:
        """uint8 [buffer_bytes], or None while all are taken. Raises DeviceError."""
        if self._free:
            return self._free.pop()
        if self._made == BOUNCE_BUFFERS:
            return None
        self._made += 1
        return self._device.allocate_pinned(self.buffer_bytes)

    def give_back(self, buffer: ByteArray) -> None:
        """No enqueued work touches it any more."""
        self._free.append(buffer)

    def close(self) -> None:
        """Let go of the buffers that were given back."""
        while self._free:
            self._device.free_pinned(self._free.pop())
            self._made -= 1
