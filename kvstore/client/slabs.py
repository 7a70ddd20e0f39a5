"""The daemon's GPU tier as a device of this process sees it.

Primitives:
  `SlabUser`    what a device's owner offers: to open a slab, and to close it
  `OpenSlabs`   the slabs of one daemon life: which are open, where
  `GpuPlaces`   where copies of one chain's blocks lie in them

No call: the tier's directory lies in the arena's header, beside the host tier's. Bytes copied from
a slab count only if `GpuPlaces.valid` says so after the last copy. The daemon frees a slab only
after this process said that it closed it, or is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from typing import Protocol

import numpy as np

from kvstore.directory import DirectoryReader
from kvstore.errors import DeviceError
from kvstore.logs import get_logger
from kvstore.types import IntArray, UIntArray

_log = get_logger("client")


class SlabUser(Protocol):
    """Thread-safe."""

    def open_slab(self, handle: bytes, length: int) -> int:
        """Its address here. Raises DeviceError."""

    def close_slab(self, address: int, then: Callable[[], None]) -> None:
        """No later transfer will ask for it: close it once those that run have ended, then call
        `then`. Returns at once."""


class OpenSlabs:
    """Changed by the attach thread, read by any. `closed` tells the daemon."""

    def __init__(
        self,
        user: SlabUser,
        directory: DirectoryReader,
        slab_bytes: int,
        closed: Callable[[int], None],
    ) -> None:
        self.directory = directory
        self._user = user
        self._slab_bytes = slab_bytes
        self._closed = closed
        self._lock = Lock()
        self._bases: UIntArray = np.zeros(0, np.uint64)
        """Address of each slab, 0 while it is not open. Replaced, never changed in place."""

    def open(self, slabs: Iterable[tuple[int, bytes]]) -> None:
        """(slab, IPC handle) as the daemon told them; what cannot be opened is given up."""
        for slab, handle in slabs:
            try:
                self._set(slab, self._user.open_slab(handle, self._slab_bytes))
            except DeviceError as error:
                _log.warning("a slab of the GPU tier cannot be opened", slab=slab, error=str(error))
                self._closed(slab)

    def give_back(self, slab: int) -> None:
        """The daemon wants its memory. From here on nobody finds an address in it."""
        base = self._set(slab, 0)
        if base:
            self._user.close_slab(base, lambda: self._closed(slab))
        else:
            self._closed(slab)

    def close(self, *, is_told: bool = False) -> None:
        """Close them all; the daemon is told, or gone."""
        if not is_told:
            self._closed = lambda slab: None
        for slab in np.flatnonzero(self._bases).tolist():
            self.give_back(slab)

    def _set(self, slab: int, base: int) -> int:
        """What it was before."""
        with self._lock:
            bases = np.zeros(max(len(self._bases), slab + 1), np.uint64)
            bases[: len(self._bases)] = self._bases
            before, bases[slab] = int(bases[slab]), base
            self._bases = bases
        return before

    def addresses(self, offsets: UIntArray) -> UIntArray:
        """Where these bytes of the tier lie in this process, 0 in slabs that are not open."""
        bases = self._bases
        slabs, at = np.divmod(offsets, np.uint64(self._slab_bytes))
        is_known = slabs < len(bases)
        base = np.append(bases, np.uint64(0))[
            np.where(is_known, slabs, len(bases)).astype(np.int64)
        ]
        found: UIntArray = np.where(base != 0, base + at, 0).astype(np.uint64)
        return found


class GpuPlaces:
    """Copies of the blocks of `joined` in namespace `index`, as they were found."""

    def __init__(self, slabs: OpenSlabs, boot_id: int, index: int, joined: bytes) -> None:
        self._slabs = slabs
        self._boot_id = boot_id
        self._found = slabs.directory.lookup_each(index, joined)
        self._is_used = np.zeros(len(self._found.mask), np.bool_)

    def over(self, blocks: IntArray, host: UIntArray) -> UIntArray:
        """`host`, the addresses of `blocks` in the arena, or of their copies where there are."""
        there = self._slabs.addresses(self._found.offsets[blocks])
        is_there = self._found.mask[blocks] & (there != 0)
        self._is_used[blocks[is_there]] = True
        places: UIntArray = np.where(is_there, there, host)
        return places

    def valid(self) -> bool:
        """After the last copy: whether the copies that `over` named are still these blocks."""
        used = self._is_used
        slots, generations = self._found.slots[used], self._found.generations[used]
        return self._slabs.directory.still_valid(self._boot_id, slots, generations)
