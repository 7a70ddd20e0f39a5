"""The load verb: stored blocks into a caller's memory, without a call where that can be.

Primitives: `LoadResult`, `Loader.load`.

Fast path: look up in the directory, copy, compare generations: no call, whatever the outcome. What
the directory does not have is asked of the daemon under a lease: the promotion from NVMe starts
first, then the host blocks are copied, then parts as they are announced. After the last copy
everything is compared once more; a difference turns the whole load into a miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.client.copying import CopyThreads, Geometry, Rows
from kvstore.client.groups import LeasedGroup, Ready
from kvstore.client.keeper import Keeper
from kvstore.client.lease import ReadLease
from kvstore.client.life import Declared, Life
from kvstore.client.reasons import ABSENT, CHANGED, CLOSED, reason_of
from kvstore.client.session import Session
from kvstore.directory import Found
from kvstore.errors import KVStoreError
from kvstore.layout import BlockLayout
from kvstore.types import FINGERPRINT_BYTES, Tier


@dataclass(frozen=True)
class LoadResult:
    """`blocks` leading blocks are the stored bytes; what follows in the buffer is undefined."""

    blocks: int
    from_host: int = 0
    from_nvme: int = 0
    reason: str = ""
    """Why it is less than asked; "" if whole. See `kvstore.client.reasons`."""


@dataclass(frozen=True)
class Order:
    """One load: blocks [start, start + len(rows)) of a chain into `rows`."""

    life: Life
    declared: Declared
    namespace: bytes
    joined: bytes
    """Fingerprints from the root to the last block wanted."""
    start: int
    rows: Rows
    rank: int | None
    """None: whole blocks. Else rows hold one rank's bytes."""
    copy_threads: int
    deadline_seconds: float
    staging: bool
    """What is brought up from below leaves the host tier again."""

    @property
    def names(self) -> bytes:
        return self.joined[self.start * FINGERPRINT_BYTES :]


class Loader:
    """Loads of one namespace. `lease_for(order)` asks the daemon for a lease over its chain."""

    def __init__(
        self,
        session: Session,
        keeper: Keeper,
        threads: CopyThreads,
        layout: BlockLayout,
        is_prefix_closed: bool,
        lease_for: Callable[[Order], ReadLease],
    ) -> None:
        self._session = session
        self._keeper = keeper
        self._threads = threads
        self._layout = layout
        self._is_prefix_closed = is_prefix_closed
        self._lease_for = lease_for

    def load(self, order: Order) -> LoadResult:
        """Never raises: whatever goes wrong is a miss with its reason."""
        wanted = len(order.rows)
        try:
            result = self._load(order)
        except KVStoreError as error:
            # Only the arena can say no here: it was closed with the client, or there is none.
            result = LoadResult(0, reason=CLOSED if self._session.is_closed else reason_of(error))
        self._session.tally.add(
            loads=1,
            loaded_host=result.from_host,
            loaded_nvme=result.from_nvme,
            load_missed=wanted - result.blocks,
            loads_changed=int(result.reason == CHANGED),
        )
        return result

    def _load(self, order: Order) -> LoadResult:
        """The directory first; the daemon may hold more.

        If it does not answer, what was found counts.
        """
        wanted = len(order.rows)
        found = self._lookup(order)
        have = 0 if found is None else found.count
        if found is not None and have == wanted:
            return self._reported(order, self._copy_found(order, found))
        if found is not None and self._ends_here(order, have):
            self._missed(wanted - have)
            return self._reported(order, self._copy_found(order, found, ABSENT))
        try:
            lease = self._lease_for(order)
        except KVStoreError as error:
            self._missed(wanted - have)
            if found is None:
                return LoadResult(0, reason=reason_of(error))
            return self._reported(order, self._copy_found(order, found, reason_of(error)))
        with lease:
            if found is not None and lease.blocks <= order.start + have:
                return self._copy_found(order, found, lease.reason or ABSENT)
            return self._load_leased(order, lease)

    def _missed(self, blocks: int) -> None:
        self._keeper.missed(blocks, blocks * self._layout.block_tokens)

    def _reported(self, order: Order, result: LoadResult) -> LoadResult:
        """The daemon saw nothing of this load; tell it what was used.

        A Match counts uses by itself.
        """
        if result.blocks:
            used = order.names[: result.blocks * FINGERPRINT_BYTES]
            self._keeper.report(order.life, order.namespace, used)
        return result

    # ------------------------------------------------------------------ without a call

    def _lookup(self, order: Order) -> Found | None:
        life = order.life
        if not life.reads_directory:
            return None
        found = life.directory.lookup(order.declared.index, order.names)
        return found if (found.lengths == self._layout.block_bytes).all() else None

    def _ends_here(self, order: Order, have: int) -> bool:
        """Whether the chain cannot go on below the host tier: certain, and known without a call."""
        if not self._is_prefix_closed:
            return False
        at = have * FINGERPRINT_BYTES
        return not order.life.directory.may_be_below(order.names[at : at + FINGERPRINT_BYTES])

    def _copy_found(self, order: Order, found: Found, reason: str = "") -> LoadResult:
        life = order.life
        self._copy(order, found.offsets.tolist(), 0)
        if not life.directory.still_valid(life.boot_id, found.slots, found.generations):
            return LoadResult(0, reason=CHANGED)
        return LoadResult(found.count, from_host=found.count, reason=reason)

    def _copy(self, order: Order, offsets: list[int], first_row: int) -> None:
        if offsets:
            view = order.life.arena.read_view
            geometry = self._geometry(order)
            began = time.perf_counter()
            self._threads.copy_out(
                geometry, view, offsets, order.rows, first_row, order.copy_threads
            )
            count_bytes = len(offsets) * order.rows.block_bytes
            self._keeper.timings.copy(count_bytes, time.perf_counter() - began)

    def _geometry(self, order: Order) -> Geometry:
        start = 0 if order.rank is None else self._layout.rank_offset(order.rank)
        return Geometry(
            start, order.rows.block_bytes, order.declared.slot_bytes, order.life.region_bytes
        )

    # ------------------------------------------------------------------ with the daemon

    def _load_leased(self, order: Order, lease: ReadLease) -> LoadResult:
        if not lease.groups or lease.groups[0].first > order.start:
            return LoadResult(0, reason=lease.reason or ABSENT)
        group, failure = lease.groups[0], ""
        try:
            for ready in lease.load(staging=order.staging, deadline_seconds=order.deadline_seconds):
                self._copy_ready(order, group, ready)
        except KVStoreError as error:
            failure = reason_of(error)
        if not lease.valid():
            return LoadResult(0, reason=CHANGED)
        skipped = order.start - group.first
        blocks = max(group.whole - skipped, 0)
        tiers = group.tiers[skipped : skipped + blocks]
        from_host = int(np.count_nonzero(tiers == Tier.HOST))
        reason = "" if blocks == len(order.rows) else lease.reason or failure or ABSENT
        return LoadResult(blocks, from_host, blocks - from_host, reason)

    def _copy_ready(self, order: Order, group: LeasedGroup, ready: Ready) -> None:
        first = max(ready.first, order.start)
        last = ready.first + ready.count
        if first >= last:
            return
        offsets = group.offsets[first - group.first : last - group.first].tolist()
        if len(ready.parts) == len(self._layout.parts):
            self._copy(order, offsets, first - order.start)
            return
        view = order.life.arena.read_view
        for start, length in self._ranges(ready.parts, order.rank):
            base = self._geometry(order).start
            for index, offset in enumerate(offsets):
                row = order.rows.one(first - order.start + index)
                np.copyto(row[start - base : start - base + length], view(offset + start, length))

    def _ranges(self, parts: tuple[int, ...], rank: int | None) -> list[tuple[int, int]]:
        """(start, length) in the slot of what `parts` hold of `rank`; neighbours joined."""
        low, high = 0, self._layout.block_bytes
        if rank is not None:
            low = self._layout.rank_offset(rank)
            high = low + self._layout.rank_payload_bytes
        ranges: list[tuple[int, int]] = []
        for number in parts:
            part = self._layout.parts[number]
            start, stop = max(part.offset, low), min(part.offset + part.length, high)
            if stop <= start:
                continue
            if ranges and sum(ranges[-1]) == start:
                ranges[-1] = (ranges[-1][0], stop - ranges[-1][0])
            else:
                ranges.append((start, stop - start))
        return ranges
