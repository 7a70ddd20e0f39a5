"""Blocks read and written where they lie, for engines that copy by themselves, layer by layer.

Primitives:
  `find_in_host(handle, names)`   leading blocks READY in the host tier; no call, no lease
  `under_lease(handle, names)`    the longest prefix of any tier, held by a lease
  `timings_of(handle)`            where to tell what prefills and copies took
  `granted_spans(...)`            the slots of a write reservation
  `granted_addresses`, `arena_regions`   the same memory for copies by a device
  `let_in`, `press`               a device that also reads the GPU tier, and asks memory back
Both finders give `InPlace`: slots that follow each other as one array, what is readable by now, and
whether it stayed so. May not copy bytes: bytes that a caller copied count only if `valid` says so
after its last copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from kvstore.client.copying import ViewOf, runs
from kvstore.client.lease import ReadLease
from kvstore.client.life import Life
from kvstore.client.names import Names, stretch
from kvstore.client.namespace import NamespaceHandle
from kvstore.client.reservation import WriteReservation
from kvstore.client.slabs import GpuPlaces, SlabUser
from kvstore.client.timings import Timings
from kvstore.directory import Found
from kvstore.errors import InvalidRequest
from kvstore.planner import Ability, Plan
from kvstore.rpc.wire import NO_OFFSET
from kvstore.types import FINGERPRINT_BYTES, ByteArray, IntArray, Tier, UIntArray


def timings_of(handle: NamespaceHandle) -> Timings:
    """Where an engine tells what its prefills and copies took; the daemon plans with it."""
    return handle._keeper.timings


class Span(NamedTuple):
    """Blocks first, first + 1, ... that lie in neighbouring slots: uint8 [count, slot bytes]."""

    first: int
    slots: ByteArray


class InPlace(Protocol):
    """Leading blocks of a chain. One thread at a time; end it with exactly one `end`."""

    @property
    def blocks(self) -> int:
        """Readable now, or promised."""

    @property
    def tiers(self) -> ByteArray:
        """uint8 [blocks]: the tier each was found in."""

    @property
    def reason(self) -> str:
        """Why there are not more; "" if nothing is missing."""

    @property
    def whole(self) -> int:
        """Leading blocks that are readable as a whole by now."""

    @property
    def whole_at_end(self) -> int:
        """Last blocks that are readable as a whole by now."""

    @property
    def plan(self) -> Plan | None:
        """How to load them, if that was asked for and is known."""

    def need_from(self, block: int) -> None:
        """The engine computes blocks before it by itself: `valid` and `whole` leave them out."""

    def arrivals(self, deadline_seconds: float) -> Iterator[None]:
        """One turn whenever more became readable, part by part across all blocks.

        Ends when all has come or the rest will not. Raises KVStoreError."""

    def is_readable(self, part: int, first: int, stop: int) -> bool:
        """Whether this part of blocks [first, stop) may be read."""

    def spans(self, first: int, stop: int) -> Iterator[Span]:
        """Read-only slots of blocks [first, stop); only readable parts of them mean anything.

        Raises InvalidRequest after the client was closed."""

    @property
    def readable(self) -> ByteArray:
        """uint8 [blocks]: bit mask of the parts of each that may be read by now."""

    def addresses(self, blocks: IntArray) -> UIntArray:
        """uint64 [n]: where `blocks` lie in this process, for copies by a device: in the arena,
        or in the GPU tier where a copy is there and open.

        Only for blocks of which something is readable. Raises like `spans`, and PeerGone."""

    def valid(self) -> bool:
        """After the last copy: whether all that was readable was and still is the stored bytes."""

    def end(self, used: int) -> None:
        """Give it up; `used` leading blocks served their purpose."""


def find_in_host(handle: NamespaceHandle, names: Names) -> HostBlocks | None:
    """None when nothing is found, or when this processor's directory must not be read without a
    call."""
    joined = stretch(names, handle.id, 0, len(names))
    attached = handle._attached()
    if isinstance(attached, str):
        return None
    life, declared = attached
    if not life.reads_directory:
        return None
    found = life.directory.lookup(declared.index, joined)
    if not found.count or not (found.lengths == handle.layout.block_bytes).all():
        return None
    return HostBlocks(handle, life, declared.slot_bytes, joined, found)


def under_lease(
    handle: NamespaceHandle,
    names: Names,
    *,
    deadline_seconds: float | None = None,
    ability: Ability | None = None,
) -> LeasedBlocks:
    """Never raises for what the daemon does or does not do: `blocks` 0 and `reason` tell.

    With `ability` it is cut to what is worth loading; `plan` says how.
    """
    lease = handle.lease(names, deadline_seconds=deadline_seconds, ability=ability)
    return LeasedBlocks(handle, lease)


def granted_spans(handle: NamespaceHandle, reservation: WriteReservation) -> Iterator[Span]:
    """Writable slots of the granted blocks, counted from the first block asked for.

    Raises ReservationUnknown, PeerGone, InvalidRequest like `WriteReservation.view`."""
    granted = reservation.granted
    if not granted:
        return
    life = reservation._filling()
    arena = life.arena
    slot_bytes = handle._declared(life).slot_bytes
    edges = [0, *(np.flatnonzero(np.diff(granted) != 1) + 1).tolist(), len(granted)]
    for start, stop in pairwise(edges):
        offsets = [reservation._shared.offsets[block] for block in granted[start:stop]]
        yield from _spans(arena.write_view, offsets, granted[start], slot_bytes, life)


def granted_addresses(reservation: WriteReservation, at: IntArray) -> UIntArray:
    """uint64 [n]: where the slots granted for blocks `at` lie, to be written by a device.

    Raises like `WriteReservation.view`."""
    arena = reservation._filling().arena
    offsets = np.array(reservation._shared.offsets, np.uint64)[at]
    if (offsets == NO_OFFSET).any():
        raise InvalidRequest("reservation: a block without a slot was to be saved")
    return arena.addresses(offsets)


def arena_regions(handle: NamespaceHandle) -> tuple[int, list[ByteArray]]:
    """Boot id and writable regions of the attached daemon's arena: what a device may pin.

    (0, []) while none is attached. Keep the arrays for as long as a device may touch them."""
    attached = handle._attached()
    if isinstance(attached, str):
        return 0, []
    return attached[0].boot_id, attached[0].arena.writable_regions()


def let_in(handle: NamespaceHandle, device: SlabUser) -> None:
    """Tell this and every later daemon life that `device` keeps the arena pinned (no memory of it
    is given back meanwhile), and open the GPU tier to it, if there is one."""
    handle._session.let_in(device)


def press(handle: NamespaceHandle, device_bytes: int) -> None:
    """The engine is short of device memory: the GPU tier gives so much back, in all, within
    seconds, until another number is told (0: none) or the client is closed."""
    handle._session.press(device_bytes)


def _spans(
    view: ViewOf, offsets: Sequence[int], first_block: int, slot_bytes: int, life: Life
) -> Iterator[Span]:
    for first, stop in runs(offsets, slot_bytes, life.region_bytes):
        slots = view(offsets[first], (stop - first) * slot_bytes)
        yield Span(first_block + first, slots.reshape(stop - first, slot_bytes))


def _gpu_places(life: Life, handle: NamespaceHandle, joined: bytes) -> GpuPlaces | None:
    if life.slabs is None:
        return None
    return GpuPlaces(life.slabs, life.boot_id, handle._declared(life).index, joined)


class HostBlocks:
    """Found in the directory: all readable at once, or not at all."""

    reason = ""
    counted = 0
    """Leading blocks that the daemon was asked for as well, and counted as used."""

    def __init__(
        self,
        handle: NamespaceHandle,
        life: Life,
        slot_bytes: int,
        joined: bytes,
        found: Found,
    ) -> None:
        self._handle = handle
        self._life = life
        self._slot_bytes = slot_bytes
        self._joined = joined
        self._found = found
        self._offsets: list[int] = found.offsets.tolist()
        self.blocks = self.whole = self.whole_at_end = found.count
        self.plan: Plan | None = None
        self._gpu = _gpu_places(life, handle, joined)
        self.tiers: ByteArray = np.full(found.count, Tier.HOST, np.uint8)

    def need_from(self, block: int) -> None:
        """All of it was here at once; nothing is left out."""

    def arrivals(self, deadline_seconds: float) -> Iterator[None]:
        yield

    def is_readable(self, part: int, first: int, stop: int) -> bool:
        return True

    def spans(self, first: int, stop: int) -> Iterator[Span]:
        life = self._life
        yield from _spans(
            life.arena.read_view, self._offsets[first:stop], first, self._slot_bytes, life
        )

    @property
    def readable(self) -> ByteArray:
        return np.full(self.blocks, 0xFF, np.uint8)

    def addresses(self, blocks: IntArray) -> UIntArray:
        places = self._life.arena.addresses(self._found.offsets[blocks])
        return places if self._gpu is None else self._gpu.over(blocks, places)

    def valid(self) -> bool:
        life = self._life
        found = self._found
        is_whole = life.directory.still_valid(life.boot_id, found.slots, found.generations)
        return is_whole and (self._gpu is None or self._gpu.valid())

    def end(self, used: int) -> None:
        """Tell the daemon what was used of what it saw nothing of."""
        if used > self.counted:
            names = self._joined[self.counted * FINGERPRINT_BYTES : used * FINGERPRINT_BYTES]
            self._handle._keeper.report(self._life, self._handle.id, names)


class LeasedBlocks:
    """Held by a lease; a Match counts the uses by itself."""

    def __init__(self, handle: NamespaceHandle, lease: ReadLease) -> None:
        self._handle = handle
        self._lease = lease
        self.is_counted = lease._life is not None
        """Whether the daemon answered, and counted what it found as used."""
        self._group = lease.groups[0] if lease.blocks else None
        self._gpu: GpuPlaces | None = None
        if self._group is not None and lease._life is not None:
            self._gpu = _gpu_places(lease._life, handle, self._group.joined)

    @property
    def blocks(self) -> int:
        return self._lease.blocks

    @property
    def tiers(self) -> ByteArray:
        return np.empty(0, np.uint8) if self._group is None else self._group.tiers

    @property
    def reason(self) -> str:
        return self._lease.reason

    @property
    def whole(self) -> int:
        return 0 if self._group is None else self._group.whole

    @property
    def whole_at_end(self) -> int:
        return 0 if self._group is None else self._group.whole_at_end

    @property
    def plan(self) -> Plan | None:
        return self._lease.plan

    def need_from(self, block: int) -> None:
        if self._group is not None:
            self._group.needed = block

    def arrivals(self, deadline_seconds: float) -> Iterator[None]:
        if self._group is not None:
            for _ in self._lease.load(layer_order=True, deadline_seconds=deadline_seconds):
                yield

    def is_readable(self, part: int, first: int, stop: int) -> bool:
        if self._group is None:
            return False
        return bool((self._group.readable[first:stop] >> part & 1).all())

    def spans(self, first: int, stop: int) -> Iterator[Span]:
        life, group = self._lease._alive(), self._group
        if group is None:
            raise InvalidRequest("these blocks are not leased")
        offsets = group.offsets[first:stop].tolist()
        slot_bytes = self._handle._declared(life).slot_bytes
        yield from _spans(life.arena.read_view, offsets, first, slot_bytes, life)

    @property
    def readable(self) -> ByteArray:
        return np.empty(0, np.uint8) if self._group is None else self._group.readable.copy()

    def addresses(self, blocks: IntArray) -> UIntArray:
        life, group = self._lease._alive(), self._group
        if group is None:
            raise InvalidRequest("these blocks are not leased")
        places = life.arena.addresses(group.offsets[blocks])
        return places if self._gpu is None else self._gpu.over(blocks + group.first, places)

    def valid(self) -> bool:
        return self._lease.valid() and (self._gpu is None or self._gpu.valid())

    def end(self, used: int) -> None:
        self._lease.release()
