"""Which of the arena's memory a device can reach, and the way round for what it cannot.

Primitives:
  `PinnedArena`   regions registered one by one, in the background; `renew` and `drop_old` for a new
                  arena, `is_pinned`, `close`; `lend`, `take_back` for memory of another process'
                  device that is open here
  `BounceRing`    a few pinned buffers, for bytes that are not (yet) pinned

A region is pinned as a whole or not at all. One that could not be unpinned is kept mapped for as
long as the process lives. May not start copies.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np

from kvstore.device import REGISTER_BYTES_MAX, Device
from kvstore.errors import DeviceError
from kvstore.types import BoolArray, ByteArray, IntArray, UIntArray

BOUNCE_BYTES = 4 << 20
BOUNCE_BUFFERS = 4

_log = logging.getLogger(__name__)
_never_unmapped: list[ByteArray] = []
"""Memory that a device still has registered: unmapping it would hand its pages to others."""


class Stretch(NamedTuple):
    """Memory that the device reaches, without its start."""

    stop: int
    shift: int
    """How much further kernels see it."""
    is_lent: bool = False
    """Device memory of another process, not ours to unpin."""


class _Reach(NamedTuple):
    """All stretches by their starts, as arrays [n]. Replaced, never changed in place."""

    starts: UIntArray
    stops: UIntArray
    shifts: IntArray
    are_lent: BoolArray

    @classmethod
    def of(cls, stretches: Mapping[int, Stretch]) -> _Reach:
        starts = sorted(stretches)
        known = [stretches[start] for start in starts]
        return cls(
            np.array(starts, np.uint64),
            np.array([one.stop for one in known], np.uint64),
            np.array([one.shift for one in known], np.int64),
            np.array([one.is_lent for one in known], np.bool_),
        )

    def find(self, addresses: UIntArray, lengths: UIntArray) -> tuple[IntArray, BoolArray]:
        """The stretch that each range begins in, if any, and whether it lies in it as a whole."""
        at = np.maximum(np.searchsorted(self.starts, addresses, "right") - 1, 0)
        inside: BoolArray = addresses >= self.starts[at]
        inside &= addresses + lengths <= self.stops[at]
        return at, inside


class PinnedArena:
    """Thread-safe. Holds every region it was given until `drop_old` or `close`."""

    def __init__(self, device: Device, register_bytes_max: int = REGISTER_BYTES_MAX) -> None:
        self._device = device
        self._register_bytes_max = register_bytes_max
        self._lock = Lock()
        self._dropping = Lock()
        """Held by the one thread that drops."""
        self._regions: dict[int, ByteArray] = {}
        """By address."""
        self._waiting: deque[ByteArray] = deque()
        self._old: dict[int, ByteArray] = {}
        """Those of earlier arenas."""
        self._stretches: dict[int, Stretch] = {}
        self._reach = _Reach.of({})
        self.failures: list[str] = []
        """Why regions stayed unpinned."""

    # ------------------------------------------------------------------ what is pinned

    def renew(self, regions: Sequence[ByteArray]) -> None:
        """These are the arena now, to be pinned by and by. Those known already are left alone;
        earlier others wait for `drop_old`."""
        with self._lock:
            before, self._regions = self._regions, {one.ctypes.data: one for one in regions}
            self._old |= {at: one for at, one in before.items() if at not in self._regions}
            fresh = [one for at, one in self._regions.items() if at not in before]
            self._waiting = deque(
                [one for one in self._waiting if one.ctypes.data in self._regions] + fresh
            )

    def pin_next(self) -> bool:
        """Pin one region; False if none waits. Slow (0.1 s a GiB): for a background thread."""
        with self._lock:
            if not self._waiting:
                return False
            region = self._waiting.popleft()
        start, stop = region.ctypes.data, region.ctypes.data + len(region)
        done: dict[int, Stretch] = {}
        try:
            for at in range(start, stop, self._register_bytes_max):
                length = min(self._register_bytes_max, stop - at)
                self._device.register(at, length)
                done[at] = Stretch(at + length, 0)
            done = {
                at: one._replace(shift=self._device.pointer_of(at) - at) for at, one in done.items()
            }
        except DeviceError as error:
            self._unpin(done, region)
            _log.warning("%d bytes of the arena stay unpinned: %s", len(region), error)
            self.failures.append(str(error))
            return True
        with self._lock:
            is_wanted = start in self._regions
            if is_wanted:
                self._set(self._stretches | done)
        if not is_wanted:  # a new arena came meanwhile
            self._unpin(done, region)
        return True

    @property
    def has_old(self) -> bool:
        """Whether regions of earlier arenas are left."""
        return bool(self._old)

    def drop_old(self, is_used: Callable[[int, int], bool]) -> None:
        """Unpin the regions of earlier arenas that no transfer uses, as `is_used` says of
        addresses [start, stop), and let go of them. As slow as `pin_next`."""
        with self._dropping:
            for start, region in list(self._old.items()):
                self._drop(start, region, is_used)

    def _drop(self, start: int, region: ByteArray, is_used: Callable[[int, int], bool]) -> None:
        stop = start + len(region)
        with self._lock:
            ours = {at: one for at, one in self._stretches.items() if start <= at < stop}
            self._set({at: one for at, one in self._stretches.items() if at not in ours})
        # In this order: who found it pinned before says by now that it is used.
        if is_used(start, stop):
            with self._lock:
                self._set(self._stretches | ours)
            return
        del self._old[start]
        self._unpin(ours, region)

    def lend(self, address: int, length: int) -> None:
        """Device memory that is copied from as if it were pinned."""
        with self._lock:
            self._set(self._stretches | {address: Stretch(address + length, 0, True)})

    def take_back(self, address: int) -> None:
        """No copy runs from it, and none will."""
        with self._lock:
            self._set({at: one for at, one in self._stretches.items() if at != address})

    def _set(self, stretches: dict[int, Stretch]) -> None:
        self._stretches, self._reach = stretches, _Reach.of(stretches)

    # ------------------------------------------------------------------ questions

    @property
    def fences(self) -> UIntArray:
        """Ascending addresses that no copy may run across."""
        return self._reach.starts

    def is_pinned(self, addresses: UIntArray, lengths: UIntArray) -> BoolArray:
        """bool [n]: whether each range lies in one stretch that the device reaches."""
        reach = self._reach
        if not len(reach.starts):
            return np.zeros(len(addresses), np.bool_)
        return reach.find(addresses, lengths)[1]

    def is_lent(self, addresses: UIntArray) -> BoolArray | None:
        """bool [n]: which lie in another process' device memory; None while none is open."""
        reach = self._reach
        if not reach.are_lent.any():
            return None
        at, inside = reach.find(addresses, np.ones(1, np.uint64))
        found: BoolArray = inside & reach.are_lent[at]
        return found

    def pointers(self, addresses: UIntArray) -> UIntArray:
        """Where kernels find these addresses: as they are where they lie in no stretch."""
        reach = self._reach
        if not reach.shifts.any():
            return addresses
        at, inside = reach.find(addresses, np.ones(1, np.uint64))
        return addresses + np.where(inside, reach.shifts[at], 0).astype(np.uint64)

    def describe(self) -> dict[str, object]:
        """How much is pinned, and why not more."""
        with self._lock:
            total = sum(map(len, self._regions.values()))
            mine = [(at, one) for at, one in self._stretches.items() if not one.is_lent]
            waiting = sum(map(len, self._waiting))
        return {
            "arena_bytes": total,
            "pinned_bytes": sum(one.stop - at for at, one in mine),
            "waiting_bytes": waiting,
            "failures": list(self.failures),
        }

    def close(self) -> None:
        """Unpin everything; no enqueued work touches it any more."""
        self.renew([])
        self.drop_old(lambda start, stop: False)

    def _unpin(self, starts: Iterable[int], region: ByteArray) -> None:
        for start in starts:
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
