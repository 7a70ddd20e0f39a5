"""The store verb: copies into the arena at once, leaves the commit to a background thread.

Primitives: `StoreOrder`, `Storer.store`.

Blocks the directory has are skipped. The others go into slots reserved beforehand when there are
enough for all of them, else into slots reserved by name now; never half and half, because a child
may not be named before its parent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.client.committer import Commit, Committer, StoreTicket
from kvstore.client.copying import Geometry, Rows, copy_in
from kvstore.client.keeper import Keeper
from kvstore.client.life import Declared, Life
from kvstore.client.reasons import AWAY, BUSY, CLOSED, DRAINING, reason_of
from kvstore.client.reservation import reserve_named
from kvstore.client.session import Session
from kvstore.client.spare import Reserved, SpareSlots
from kvstore.errors import KVStoreError, Unavailable
from kvstore.layout import BlockLayout
from kvstore.rpc.wire import NO_OFFSET
from kvstore.types import FINGERPRINT_BYTES, BlockStatus

COMMIT_BLOCKS_MAX = 64
"""Blocks of one commit: the daemon takes them in one step of its loop, about 2 ms."""


@dataclass(frozen=True)
class StoreOrder:
    """One store.

    `rows[i]` is the block named `names[32 i : 32 i + 32]`; the first follows `parent`.
    """

    life: Life
    declared: Declared
    parent: bytes
    names: bytes
    rows: Rows
    ticket: StoreTicket
    hint_classes: bytes = b""
    """A byte a row, or nothing."""

    def parent_of(self, block: int) -> bytes:
        start = (block - 1) * FINGERPRINT_BYTES
        return self.names[start : start + FINGERPRINT_BYTES] if block else self.parent

    def commit(
        self,
        reservation: int,
        spare: tuple[SpareSlots, Reserved] | None,
        offsets: Sequence[int],
        blocks: Sequence[int],
    ) -> Commit:
        """Of consecutive `blocks`, which lie in the slots at `offsets`."""
        first, stop = blocks[0], blocks[-1] + 1
        return Commit(
            self.life,
            reservation,
            spare,
            self.parent_of(first),
            self.names[first * FINGERPRINT_BYTES : stop * FINGERPRINT_BYTES],
            offsets,
            self.ticket,
            blocks,
            self.hint_classes[first:stop],
        )


class Storer:
    """Stores of one namespace. Thread-safe."""

    def __init__(
        self,
        session: Session,
        keeper: Keeper,
        committer: Committer,
        spare: SpareSlots,
        namespace: bytes,
        layout: BlockLayout,
    ) -> None:
        self._session = session
        self._keeper = keeper
        self._committer = committer
        self._spare = spare
        self._namespace = namespace
        self._layout = layout

    def store(self, order: StoreOrder) -> None:
        """Settle the order's ticket, now or from the background thread. Never raises."""
        self._session.tally.add(stores=1)
        missing = self._missing(order)
        if missing:
            refusal = self._store(order, missing)
            if refusal:
                self._settle(order, missing, [BlockStatus.REFUSED] * len(missing), refusal)
            self._spare.want(len(missing))
            self._keeper.wake()

    def _store(self, order: StoreOrder, missing: list[int]) -> str:
        """Why nothing is stored, "" if it is on its way."""
        if order.life.is_draining:
            return DRAINING
        if self._committer.is_behind:
            return BUSY
        if not order.life.writer_begins():
            return AWAY
        try:
            commits = self._fill_spare(order, missing) or self._fill_reserved(order, missing)
        except KVStoreError as error:
            return CLOSED if self._session.is_closed else reason_of(error)
        finally:
            order.life.writer_ends()
        self._committer.put(commits)
        return ""

    def _missing(self, order: StoreOrder) -> list[int]:
        """Blocks the directory does not have; the others are settled as PRESENT."""
        life, count = order.life, len(order.rows)
        if not life.reads_directory:
            return list(range(count))
        mask = life.directory.lookup_each(order.declared.index, order.names).mask
        present = np.flatnonzero(mask).tolist()
        self._settle(order, present, [BlockStatus.PRESENT] * len(present))
        return np.flatnonzero(~mask).tolist()

    def _settle(
        self,
        order: StoreOrder,
        blocks: Sequence[int],
        statuses: Sequence[BlockStatus],
        reason: str = "",
    ) -> None:
        """Outcomes known before any commit: present, or not stored."""
        if blocks:
            present = list(statuses).count(BlockStatus.PRESENT)
            self._session.tally.add(store_present=present, store_refused=len(statuses) - present)
            order.ticket.settle(blocks, statuses, reason)

    def _copy(self, order: StoreOrder, offsets: Sequence[int], first_row: int) -> None:
        life = order.life
        geometry = Geometry(
            0, self._layout.block_bytes, order.declared.slot_bytes, life.region_bytes
        )
        copy_in(geometry, life.arena.write_view, offsets, order.rows, first_row)
        self._session.tally.add(store_copied=len(offsets))

    # ------------------------------------------------------------------ slots reserved beforehand

    def _fill_spare(self, order: StoreOrder, missing: list[int]) -> list[Commit] | None:
        """None: too few slots at hand for all of them."""
        taken = self._spare.take(order.life, len(missing))
        if not taken:
            self._session.tally.add(spare_shortfalls=1)
            return None
        commits: list[Commit] = []
        try:
            for first, stop in _stretches(missing, [id(spare.reserved) for spare in taken]):
                offsets = [spare.offset for spare in taken[first:stop]]
                blocks = missing[first:stop]
                self._copy(order, offsets, blocks[0])
                reserved = taken[first].reserved
                spare = (self._spare, reserved)
                commits.append(order.commit(reserved.id, spare, offsets, blocks))
        except BaseException:  # Ctrl-C too: else the slots were this client's for ever
            self._spare.give_up(taken)
            raise
        self._session.tally.add(spare_stores=1)
        return commits

    # ------------------------------------------------------------------ slots reserved now

    def _fill_reserved(self, order: StoreOrder, missing: list[int]) -> list[Commit]:
        """Reserve by name from the first missing block on; what the daemon grants is filled."""
        # The daemon does not know blocks whose commit is queued: it would refuse their children.
        limit = self._session.deadline_seconds
        until = time.monotonic() + limit
        if not self._committer.wait_idle(limit):
            raise Unavailable("earlier stores are not committed yet")
        base = missing[0]
        grant = reserve_named(
            self._session,
            self._keeper,
            order.life,
            self._namespace,
            order.parent_of(base),
            order.names[base * FINGERPRINT_BYTES :],
            until - time.monotonic(),
        )
        granted = [base + index for index, at in enumerate(grant.offsets) if at != NO_OFFSET]
        others = sorted(set(missing) - set(granted))
        self._settle(order, others, [grant.statuses[block - base] for block in others])
        if not granted:
            return []
        commits: list[Commit] = []
        try:
            for first, stop in _stretches(granted, [0] * len(granted)):
                blocks = granted[first:stop]
                offsets = [grant.offsets[block - base] for block in blocks]
                self._copy(order, offsets, blocks[0])
                commits.append(order.commit(grant.reservation, None, offsets, blocks))
        except BaseException:
            self._keeper.abort(order.life, grant.reservation)
            raise
        return commits


def _stretches(blocks: Sequence[int], owners: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, stop) positions of consecutive blocks whose slots have one owner, a commit each."""
    first = 0
    for stop in range(1, len(blocks) + 1):
        if (
            stop == len(blocks)
            or blocks[stop] != blocks[stop - 1] + 1
            or owners[stop] != owners[first]
            or stop - first == COMMIT_BLOCKS_MAX
        ):
            yield first, stop
            first = stop
