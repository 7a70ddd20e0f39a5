"""Pins: blocks that a tenant wants kept for a while.

Primitives of `Pins`: `pin`, `unpin`, `tend` (the periodic call), `statistics`.

A *hard* pin counts in the catalog's `pins` column, which no eviction passes, in either tier. A
*soft* pin is a use now and then: its block leaves only when everything else was used more recently.
Bytes are bounded, a tenant's and all together; past a bound fewer blocks are pinned, which is an
answer and no error. A block that is deleted or cleared loses its pins. Runs on the daemon's loop;
reads no clock.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from kvstore.config import LimitsConfig
from kvstore.namespaces import Namespace
from kvstore.store import Store
from kvstore.types import FINGERPRINT_BYTES, IntArray

USE_SECONDS = 5.0
"""How often a soft pin counts as a use."""
BLOCKS_PER_CALL_MAX = 2048
"""A call holds the loop for a few milliseconds at most."""
PINS_PER_TURN = 512
ABSENT, BUDGET = "absent", "budget"


@dataclass(slots=True)
class _Pin:
    row: int
    until: float
    hard: bool
    bytes: int
    use_at: float = 0.0


@dataclass(frozen=True)
class Pinned:
    """Leading blocks that are pinned now, and why not all: "", "absent" or "budget"."""

    blocks: int
    short_reason: str = ""


class Pins:
    """All pins of one daemon life; they end with it."""

    def __init__(self, store: Store, limits: LimitsConfig) -> None:
        self._store = store
        self._tenant_bytes_max = limits.pinned_bytes_per_tenant_max
        self._bytes_max = limits.pinned_bytes_max
        self._pins: dict[tuple[str, bytes], _Pin] = {}
        """(tenant, fingerprint) -> its pin."""
        self._bytes: Counter[str] = Counter()
        self._queue: deque[tuple[str, bytes, _Pin]] = deque()
        """Every pin, and some that ended: looked at in turn."""

    def pin(
        self,
        tenant: str,
        namespace: Namespace,
        names: bytes,
        seconds: float,
        hard: bool,
        now: float,
    ) -> Pinned:
        """Keep the leading stored blocks of `names` until `seconds` from now.

        Pinned again by the same tenant, a block has the later end and the harder kind.
        """
        rows = self._store.rows_of(namespace, names)
        readable = self._store.is_readable(rows)
        stored = len(rows) if readable.all() else int(readable.argmin())
        size = namespace.layout.block_bytes
        for block, row in enumerate(rows[:stored].tolist()):
            name = names[block * FINGERPRINT_BYTES : (block + 1) * FINGERPRINT_BYTES]
            found = self._pins.get((tenant, name))
            if found is not None and found.row != row:
                self._end(tenant, name)
                found = None
            if found is None:
                if not self._has_room(tenant, size):
                    return Pinned(block, BUDGET)
                found = self._pins[tenant, name] = _Pin(row, now, False, size)
                self._bytes[tenant] += size
                self._queue.append((tenant, name, found))
            if hard and not found.hard:
                self._store.catalog.pins[row] += 1
            found.hard |= hard
            found.until = max(found.until, now + seconds)
        self._store.policy.touched(rows[:stored], now)
        return Pinned(stored, "" if stored == len(rows) else ABSENT)

    def _has_room(self, tenant: str, size: int) -> bool:
        return (
            self._bytes[tenant] + size <= self._tenant_bytes_max
            and self._bytes.total() + size <= self._bytes_max
        )

    def unpin(self, tenant: str, names: bytes) -> int:
        """End the tenant's pins of `names`; how many there were."""
        starts = range(0, len(names), FINGERPRINT_BYTES)
        pinned = {names[at : at + FINGERPRINT_BYTES] for at in starts}
        pinned = {name for name in pinned if (tenant, name) in self._pins}
        for name in pinned:
            self._end(tenant, name)
        return len(pinned)

    def tend(self, now: float) -> None:
        """Look at the next few pins: end what ran out, was cleared or evicted; soft ones are used
        now and then.
        """
        turn = [self._queue.popleft() for _ in range(min(len(self._queue), PINS_PER_TURN))]
        turn = [entry for entry in turn if self._pins.get(entry[:2]) is entry[2]]
        if not turn:
            return
        rows: IntArray = np.array([pin.row for _, _, pin in turn], np.int64)
        # A row may be another block's by now.
        named = self._store.catalog.rows(b"".join(name for _, name, _ in turn)) == rows
        kept = named & self._store.is_readable(rows)
        used: list[int] = []
        for (tenant, name, pin), is_kept in zip(turn, kept.tolist(), strict=True):
            if not is_kept or pin.until <= now:
                self._end(tenant, name)
                continue
            self._queue.append((tenant, name, pin))
            if not pin.hard and pin.use_at <= now:
                pin.use_at = now + USE_SECONDS
                used.append(pin.row)
        if used:
            self._store.policy.touched(np.array(used, np.int64), now)

    def _end(self, tenant: str, name: bytes) -> None:
        pin = self._pins.pop((tenant, name))
        self._bytes[tenant] -= pin.bytes
        if not self._bytes[tenant]:
            del self._bytes[tenant]
        if pin.hard:
            self._store.catalog.pins[pin.row] -= 1
            self._store.catalog.remove_if_bare(np.array([pin.row], np.int64))

    def statistics(self) -> dict[str, object]:
        return {
            "blocks": len(self._pins),
            "hard_blocks": sum(pin.hard for pin in self._pins.values()),
            "bytes": self._bytes.total(),
            "tenants": len(self._bytes),
        }
