"""The host tier: slots of the shared arena, and the directory that lets clients find them.

Primitives of `HostTier`: `take`, `publish`, `retract`, `quarantine`, `free`, `view`.
All on the loop. A slot's generation moves (directory) before its bytes may be re-used (pool).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from kvstore.arena import Arena
from kvstore.directory import DirectoryWriter
from kvstore.errors import InvalidRequest
from kvstore.layout import align_up
from kvstore.slab import SlabPool
from kvstore.tier.base import Slots
from kvstore.types import PAGE_BYTES, ByteArray, IntArray, Tier, UIntArray


class HostTier:
    """Owns pool, arena and directory, which must have one geometry. `close` ends all three."""

    name = Tier.HOST
    is_durable = False
    is_addressable = True

    def __init__(self, pool: SlabPool, arena: Arena, directory: DirectoryWriter) -> None:
        self.pool = pool
        self.arena = arena
        self.directory = directory
        self._quarantined = [
            slab
            for slab in range(pool.slabs)
            if slab // pool.slabs_per_region in arena.quarantined_regions
        ]
        """Slabs that clients of the last daemon may still write to: out of service until then."""
        for slab in self._quarantined:
            pool.retire_slab(slab)

    def slot_bytes_for(self, length: int) -> int:
        """The payload padded to pages, at least the smallest slot."""
        return max(align_up(length, PAGE_BYTES), self.pool.slot_bytes_min)

    def take(self, slot_bytes: int, count: int, *, staging: bool = False) -> list[int]:
        """Up to `count` slots, FILLING and the caller's; the last of a class only for `staging`."""
        return self.pool.take(slot_bytes, count, staging=staging)

    def view(self, slot: int, length: int) -> ByteArray:
        """The first `length` bytes of a slot: uint8[length], writable, in place."""
        return self.arena.view(self.pool.offset_of(slot), length)

    def views(self, slots: IntArray, length: int) -> list[ByteArray]:
        """The same of many."""
        return [self.arena.view(at, length) for at in self.pool.offsets_of(slots).tolist()]

    def publish(
        self,
        slots: IntArray,
        fingerprints: ByteArray,
        *,
        namespace: int,
        clear_count: int,
        lengths: IntArray,
    ) -> UIntArray:
        """FILLING → READY, readable by every client as `fingerprints` uint8[n, 32]; generations."""
        self.pool.publish(slots)
        return self.directory.publish(
            slots,
            fingerprints,
            offsets=self.pool.offsets_of(slots),
            lengths=lengths,
            namespace=namespace,
            clear_count=clear_count,
        )

    def retract(self, slots: Slots) -> None:
        """Clients find these slots no more and discard what they copy; the slots stay held."""
        self.directory.retract(np.asarray(slots, np.int64))

    def quarantine(self, slots: Slots) -> None:
        """FILLING or DRAINING → held back until the caller frees them: a writer may be at it."""
        self.pool.quarantine(slots)

    def free(self, slots: Slots) -> None:
        """Held slots → free, unreadable first."""
        if len(slots):
            self.retract(slots)
            self.pool.free(slots)

    def slots_at(self, held: IntArray, offsets: UIntArray) -> IntArray:
        """Which of the slots `held` lie at these byte offsets. Raises InvalidRequest for others."""
        at = dict(zip(self.pool.offsets_of(held).tolist(), held.tolist(), strict=True))
        try:
            return np.array([at[offset] for offset in offsets.tolist()], np.int64)
        except KeyError as error:
            raise InvalidRequest(
                f"commit: no slot of this reservation lies at offset {error.args[0]}"
            ) from error

    def generations(self, slots: IntArray) -> UIntArray:
        """Even while READY, uint64[n]."""
        return self.directory.generations(slots)

    def room(self, slot_bytes: int) -> int:
        return self.pool.room(slot_bytes)

    def recheck(self) -> None:
        """Hand quarantined slabs out once the last client of the last daemon is gone."""
        if self._quarantined and self.arena.recheck_clients():
            for slab in self._quarantined:
                self.pool.restore_slab(slab)
            self._quarantined.clear()

    def health(self) -> list[str]:
        return self._waiting() if len(self._quarantined) == self.pool.slabs else []

    def remarks(self) -> list[str]:
        return self._waiting() if 0 < len(self._quarantined) < self.pool.slabs else []

    def _waiting(self) -> list[str]:
        waiting = f"{len(self._quarantined)} of {self.pool.slabs}"
        return [f"host: {waiting} slabs wait for clients of the last daemon"]

    def describe(self) -> dict[str, object]:
        return {"slabs": asdict(self.pool.statistics()), "arena": asdict(self.arena.statistics())}

    def integrity_slices(self) -> Iterator[None]:
        """I1 for every slab, a bounded piece a step. Raises InvariantViolated."""
        yield from self.pool.integrity_slices()

    def check_integrity(self) -> None:
        """The same in one go."""
        self.pool.check_integrity()

    def close(self) -> None:
        """Void what clients hold, then let go of the arena; their views stay readable memory."""
        self.directory.close_boot()
        self.arena.close()
