"""The GPU tier: slabs of device memory, each one allocation that engines open by its IPC handle.

Primitives of `GpuTier`: the slot calls of every tier; `addresses`, `copy_in` for bytes;
`handles_for`, `acknowledge`, `forget` for the processes that have slabs open; `resize`, `leaving`,
`tend` for giving memory back.

All on the loop. A slab leaves in four steps, each one a state that the caller sees: no new blocks
(`resize` closes it), its blocks leave (`leaving` names them), its openers close it (`tend` tells
which to ask), its memory is freed. An opener that neither answers nor is proved gone keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict

import numpy as np

from kvstore.device import Device, Order
from kvstore.directory import DirectoryWriter, header_bytes
from kvstore.errors import DeviceError, check
from kvstore.layout import align_up
from kvstore.slab import SlabPool
from kvstore.tier.base import Slots
from kvstore.types import PAGE_BYTES, ByteArray, ClientId, IntArray, Tier, UIntArray


class GpuTier:
    """Owns the memory it allocates on `device`. `bytes_max` may be lowered and raised again, up to
    what it was at first."""

    name = Tier.GPU
    is_durable = False
    is_addressable = True
    directory: DirectoryWriter
    """Where clients find what is here; see `list_in`."""
    directory_at = 0

    def __init__(
        self,
        device: Device,
        bytes_max: int,
        *,
        slab_bytes: int,
        slot_bytes_min: int = PAGE_BYTES,
    ) -> None:
        # A slot never runs over two slabs: they are different allocations.
        self.pool = SlabPool(
            bytes_max // slab_bytes, slab_bytes, slot_bytes_min, slabs_per_region=1
        )
        self._device = device
        self._stream = device.make_stream()
        self._base: dict[int, int] = {}
        """Slab -> address, for slabs that have memory."""
        self._openers: dict[int, set[ClientId]] = {}
        self._closing: set[int] = set()
        self._retired: set[int] = set()
        """Out of service: over the limit, or refused by the device."""
        self._slabs_max = self.pool.slabs
        self._refusal = ""
        self._staging: ByteArray | None = None

    def list_in(self, header: ByteArray, at: int, namespaces_max: int, boot_id: int) -> None:
        """Keep the directory in the arena's header from byte `at` on."""
        self.directory_at = at
        self.directory = DirectoryWriter(
            header[at:],
            slots=self.pool.slots_max,
            namespaces_max=namespaces_max,
            boot_id=boot_id,
        )

    def header_bytes(self, namespaces_max: int) -> int:
        """Size of that directory."""
        return header_bytes(self.pool.slots_max, namespaces_max)

    # ------------------------------------------------------------------ slots

    def slot_bytes_for(self, length: int) -> int:
        """The payload padded to pages, at least the smallest slot."""
        return max(align_up(length, PAGE_BYTES), self.pool.slot_bytes_min)

    def take(self, slot_bytes: int, count: int, *, staging: bool = False) -> list[int]:
        """Up to `count` slots, FILLING and the caller's. A slab gets its memory here."""
        slots = self.pool.take(slot_bytes, count, staging=staging)
        missing = {self._slab_of(slot) for slot in slots} - self._base.keys()
        for slab in sorted(missing):
            if not self._allocate(slab):
                refused = [slot for slot in slots if self._slab_of(slot) == slab]
                slots = [slot for slot in slots if self._slab_of(slot) != slab]
                self.pool.free(refused)
                self._retire(slab)
        return slots

    def _allocate(self, slab: int) -> bool:
        try:
            self._base[slab] = self._device.allocate(self.pool.slab_bytes)
        except DeviceError as error:
            self._refusal = str(error)
            return False
        self._refusal = ""
        return True

    def publish(self, slots: Slots) -> None:
        """FILLING → READY: the copies into them have ended."""
        self.pool.publish(slots)

    def free(self, slots: Slots) -> None:
        """Held slots → free; no copy touches them."""
        if len(slots):
            self.pool.free(slots)
            self._retire_emptied()

    def room(self, slot_bytes: int) -> int:
        """As far as is known: the device may still refuse memory."""
        return self.pool.room(slot_bytes)

    def _slab_of(self, slot: int) -> int:
        return slot // self.pool.slots_per_slab_max

    # ------------------------------------------------------------------ bytes

    def addresses(self, slots: Slots) -> UIntArray:
        """Device addresses of held slots in this process, uint64 [n]."""
        bases = np.zeros(self.pool.slabs, np.uint64)
        bases[list(self._base)] = list(self._base.values())
        slabs = np.asarray(slots, np.int64) // self.pool.slots_per_slab_max
        places: UIntArray = (
            bases[slabs]
            + self.pool.offsets_of(slots)
            - slabs.astype(np.uint64) * np.uint64(self.pool.slab_bytes)
        )
        return places

    def copy_in(self, slots: Slots, sources: UIntArray, lengths: UIntArray) -> int:
        """Enqueue host → GPU; the event after which the slots hold their bytes. Its caller drops
        it."""
        event = self._device.make_event()
        to = self.addresses(slots)
        self._device.copy_batch(to, sources, lengths, Order.STREAM, self._stream)
        self._device.record(event, self._stream)
        return event

    def has_ended(self, event: int) -> bool:
        """Whether the copies behind it have; then the event is dropped."""
        if not self._device.is_done(event):
            return False
        self._device.drop_event(event)
        return True

    def staging(self, length: int) -> ByteArray:
        """uint8[>= length] of pinned host memory, the same at every call: no copy runs from it."""
        if self._staging is None or len(self._staging) < length:
            if self._staging is not None:
                self._device.free_pinned(self._staging)
            self._staging = self._device.allocate_pinned(length)
        return self._staging

    # ------------------------------------------------------------------ who has slabs open

    def handles_for(self, client: ClientId) -> list[tuple[int, bytes]]:
        """(slab, IPC handle) of slabs in service that the client was not told of yet; it counts as
        an opener of them from now on."""
        fresh = []
        for slab, base in sorted(self._base.items()):
            openers = self._openers.setdefault(slab, set())
            if slab not in self._closing | self._retired and client not in openers:
                openers.add(client)
                fresh.append((slab, self._device.export(base)))
        return fresh

    def acknowledge(self, client: ClientId, slab: int) -> None:
        """The client closed this slab. Repeated, or of a slab it never had: nothing changes."""
        self._openers.get(slab, set()).discard(client)

    def forget(self, client: ClientId) -> None:
        """The client is proved gone, and its mappings with it."""
        for openers in self._openers.values():
            openers.discard(client)

    # ------------------------------------------------------------------ giving memory back

    def resize(self, bytes_max: int) -> None:
        """From now on at most `bytes_max`: slabs over it are closed to new blocks, those with the
        fewest blocks first; slabs below it come back into service."""
        self._slabs_max = min(bytes_max // self.pool.slab_bytes, self.pool.slabs)
        while self._in_service() > self._slabs_max:
            self._close_emptiest()
        for slab in sorted(self._retired):
            if self._in_service() < self._slabs_max and slab not in self._base:
                self._retired.discard(slab)
                self.pool.restore_slab(slab)

    def _in_service(self) -> int:
        return self.pool.slabs - len(self._closing | self._retired)

    def _close_emptiest(self) -> None:
        open_slabs = [s for s in range(self.pool.slabs) if s not in self._closing | self._retired]
        held = {slab: len(self.pool.slots_in_slab(slab)) for slab in open_slabs}
        slab = min(open_slabs, key=lambda one: (held[one], one in self._base, -one))
        if held[slab]:
            self.pool.close_slab(slab)
            self._closing.add(slab)
        else:
            self._retire(slab)

    def _retire(self, slab: int) -> None:
        self.pool.retire_slab(slab)
        self._retired.add(slab)

    def _retire_emptied(self) -> None:
        for slab in [s for s in self._closing if not len(self.pool.slots_in_slab(s))]:
            self._closing.discard(slab)
            self._retire(slab)

    def leaving(self) -> IntArray:
        """Held slots of closed slabs, int64 [n]: to be demoted or dropped by the caller."""
        held = [self.pool.slots_in_slab(slab) for slab in sorted(self._closing)]
        return np.concatenate([np.zeros(0, np.int64), *held])

    def tend(self) -> list[tuple[ClientId, int]]:
        """Free what can be freed; (client, slab) of every opener that must close its slab."""
        waiting: list[tuple[ClientId, int]] = []
        for slab in sorted(self._retired & self._base.keys()):
            openers = self._openers.get(slab, set())
            waiting += [(client, slab) for client in sorted(openers)]
            if not openers:
                self._device.free(self._base.pop(slab))
                self._openers.pop(slab, None)
        if not waiting:
            self.resize(self.bytes_max)
        return waiting

    # ------------------------------------------------------------------ state and end

    @property
    def bytes_max(self) -> int:
        """Of device memory, as `resize` said last."""
        return self._slabs_max * self.pool.slab_bytes

    @property
    def allocated_bytes(self) -> int:
        """Device memory that is held now."""
        return len(self._base) * self.pool.slab_bytes

    def describe(self) -> dict[str, object]:
        """See `TierProtocol`."""
        free, total = self._device.memory()
        return {
            "slabs": asdict(self.pool.statistics()),
            "allocated_bytes": self.allocated_bytes,
            "bytes_max": self.bytes_max,
            "slabs_closing": len(self._closing),
            "device": {"index": self._device.index, "free_bytes": free, "total_bytes": total},
        }

    def health(self) -> list[str]:
        """See `TierProtocol`: without memory it holds fewer second copies, that is all."""
        return []

    def remarks(self) -> list[str]:
        """See `TierProtocol`."""
        reasons = [f"gpu: no memory for another slab: {self._refusal}"] if self._refusal else []
        waiting = len(self._retired & self._base.keys())
        if waiting:
            reasons.append(f"gpu: {waiting} slabs wait for engines to close them")
        return reasons

    def integrity_slices(self) -> Iterator[None]:
        """I1 for every slab, and that every held slot has memory under it."""
        yield from self.pool.integrity_slices()
        for slab in range(self.pool.slabs):
            held = len(self.pool.slots_in_slab(slab))
            check(not held or slab in self._base, "I6 held slots without memory", slab=slab)
        yield

    def check_integrity(self) -> None:
        """The same in one go."""
        for _ in self.integrity_slices():
            pass

    def close(self) -> None:
        """Free everything; no copy runs. Openers were told before, or their mappings go stale."""
        with suppress(DeviceError):
            for base in self._base.values():
                self._device.free(base)
            if self._staging is not None:
                self._device.free_pinned(self._staging)
            self._device.drop_stream(self._stream)
        self._base.clear()
