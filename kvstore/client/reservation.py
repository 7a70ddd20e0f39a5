"""Write reservations: slots granted by name, filled in place, published by a commit.

Primitives:
  `WriteReservation`   a whole block's slot, or one rank's part of it; commit or abort
  `SharedReservation`  the same to hand to the other ranks of an engine
  `reserve_named`      asks the daemon

A writer's slots are quarantined by the daemon when their reservation expires while it may still
copy: `commit` and `abort`, also late ones, are its word that the last copy has ended.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvstore.client.committer import unpack_statuses
from kvstore.client.keeper import Keeper
from kvstore.client.life import Life
from kvstore.client.session import Session
from kvstore.errors import InvalidRequest, KVStoreError, PeerGone, ReservationUnknown
from kvstore.layout import BlockLayout
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc.wire import NO_OFFSET, pack_u64, unpack_u64
from kvstore.types import FINGERPRINT_BYTES, BlockStatus, ByteArray


@dataclass(frozen=True)
class SharedReservation:
    """What another process of the same engine needs to fill its ranks' parts.

    Plain values: send it as you like.
    """

    reservation: int
    boot_id: int
    namespace: bytes
    names: bytes
    statuses: tuple[BlockStatus, ...]
    offsets: tuple[int, ...]
    seconds_left: float


class WriteReservation:
    """Slots for consecutive blocks; made by `NamespaceHandle.reserve`.

    A context manager: leaving without commit aborts.

    Blocks are counted from the first one asked for. An empty one (`granted` is empty, `reason` says
    why) is what an absent daemon gives. Not thread-safe.
    """

    def __init__(
        self,
        session: Session,
        keeper: Keeper,
        life: Life | None,
        layout: BlockLayout,
        shared: SharedReservation,
        reason: str = "",
    ) -> None:
        self._session = session
        self._keeper = keeper
        self._layout = layout
        self._shared = shared
        self._until = time.monotonic() + shared.seconds_left
        self.statuses = list(shared.statuses)
        """A BlockStatus a block: GRANTED slots are yours to fill; the others' outcome is known
        already."""
        self.reason = reason
        """Why nothing was granted for want of a daemon; "" otherwise."""
        has_slots = life is not None and shared.reservation != 0
        self._life = life if has_slots and life is not None and life.writer_begins() else None
        self._ranks_left = set(range(layout.ranks))

    @property
    def granted(self) -> tuple[int, ...]:
        """Blocks with a slot to fill."""
        return tuple(
            block for block, offset in enumerate(self._shared.offsets) if offset != NO_OFFSET
        )

    @property
    def seconds_left(self) -> float:
        """Before the daemon takes the slots out of use."""
        return max(0.0, self._until - time.monotonic())

    def share(self) -> SharedReservation:
        """For the engine's other ranks: each passes it to `NamespaceHandle.join`."""
        s = self._shared
        return SharedReservation(
            s.reservation, s.boot_id, s.namespace, s.names, s.statuses, s.offsets, self.seconds_left
        )

    def view(self, block: int) -> ByteArray:
        """Writable uint8 [block_bytes] of a granted block; write nothing after commit or abort.

        Raises InvalidRequest (no slot), ReservationUnknown (ended), PeerGone (the daemon went
        away).
        """
        return self._bytes(block, 0, self._layout.block_bytes)

    def rank_view(self, block: int, rank: int) -> ByteArray:
        """Writable uint8 [rank_payload_bytes]: one rank's part; raises like `view`."""
        return self._bytes(block, self._layout.rank_offset(rank), self._layout.rank_payload_bytes)

    def _bytes(self, block: int, start: int, length: int) -> ByteArray:
        self._session.check_open()
        life = self._filling()
        if not 0 <= block < len(self.statuses) or self._shared.offsets[block] == NO_OFFSET:
            raise InvalidRequest(f"reservation: block {block} has no slot; granted: {self.granted}")
        return life.arena.write_view(self._shared.offsets[block] + start, length)

    def _filling(self) -> Life:
        if self._life is None:
            raise ReservationUnknown(f"reservation: ended, or nothing was granted ({self.reason})")
        if self._life.is_over:
            raise PeerGone("reservation: the daemon went away, and the slots with it")
        return self._life

    def commit(self, rank: int | None = None) -> tuple[BlockStatus, ...]:
        """Publish; a status a block asked for, GRANTED where other ranks have yet to come.

        `rank`: only that rank's part is filled. None: all of them are. Raises ReservationUnknown
        (expired, ended), PeerGone, Unavailable; the blocks are then not stored.
        """
        life = self._filling()
        if rank is not None:
            self._layout.rank_offset(rank)
        granted = self.granted
        names = self._shared.names
        request = pb.CommitRequest(
            client=life.client,
            reservation=self._shared.reservation,
            rank=rank or 0,
            all_ranks=rank is None,
            fingerprints=b"".join(
                names[block * FINGERPRINT_BYTES : (block + 1) * FINGERPRINT_BYTES]
                for block in granted
            ),
            offsets=pack_u64([self._shared.offsets[block] for block in granted]),
        )
        self._ranks_left = set() if rank is None else self._ranks_left - {rank}
        try:
            reply = self._session.call("Commit", request)
            answers = unpack_statuses(reply.statuses, len(granted))
        except KVStoreError as error:
            self.abort()
            self._session.lost(life, error)
            raise
        for block, status in zip(granted, answers, strict=True):
            self.statuses[block] = status
        if not self._ranks_left or BlockStatus.GRANTED not in answers:
            self._leave()
        return tuple(self.statuses)

    def abort(self) -> None:
        """Give the slots back; also the word that no copy is under way.

        Queued; a second time is a no-op.
        """
        if self._life is not None:
            self._keeper.abort(self._life, self._shared.reservation)
            self._leave()

    def _leave(self) -> None:
        if self._life is not None:
            self._life.writer_ends()
            self._life = None

    def __enter__(self) -> WriteReservation:
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._ranks_left) == self._layout.ranks:
            self.abort()
        else:
            self._leave()


def reserve_named(
    session: Session,
    keeper: Keeper,
    life: Life,
    namespace: bytes,
    parent: bytes,
    names: bytes,
    deadline_seconds: float | None = None,
) -> SharedReservation:
    """Ask for slots for the blocks of `names`, which follow `parent`."""
    request = pb.ReserveRequest(namespace=namespace, parent=parent, fingerprints=names)
    count = len(names) // FINGERPRINT_BYTES
    try:
        session.check_open()
        reply = session.reserve(life, request, keeper.abort, deadline_seconds)
    except KVStoreError as error:
        session.lost(life, error)
        raise
    return SharedReservation(
        reply.reservation,
        life.boot_id,
        namespace,
        names,
        tuple(unpack_statuses(reply.statuses, count)),
        tuple(unpack_u64(reply.offsets, "offsets", count).tolist()),
        reply.lease_seconds,
    )
