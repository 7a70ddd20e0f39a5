"""Read leases: blocks that stay where they are while an engine copies them.

Primitives of `ReadLease`:
  `blocks`, `groups`   what the lease promises
  `view`, `rank_view`  read-only arrays over the arena, for blocks that are readable
  `load`               brings the rest up to the host tier; yields what became readable, in runs
  `valid`              after the last copy: whether all that was readable is the stored bytes
  `release`            ends it, off the caller's path

Ownership of a group's blocks [0, blocks): [0, first) not needed (sliding window); [first, blocks)
leased; of those, readable now, or coming by `load`. Bytes copied count only if `valid` says so
afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import grpc

from kvstore.client.groups import LeasedGroup, News, Ready, Wanted
from kvstore.client.keeper import Keeper
from kvstore.client.life import Life
from kvstore.client.plans import Asking, load_order, unpack_plan
from kvstore.client.session import Session
from kvstore.errors import (
    InvalidRequest,
    KVStoreError,
    LeaseExpired,
    LeaseUnknown,
    PeerGone,
    Unavailable,
)
from kvstore.planner import Plan
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc.status import from_rpc_error
from kvstore.rpc.wire import each_ready
from kvstore.types import ByteArray


class ReadLease:
    """Made by `NamespaceHandle.lease` and `KVClient.match_groups`; a context manager.

    Not thread-safe.

    An empty lease (`blocks` 0, `reason` says why) is what a miss or an absent daemon gives.
    """

    def __init__(
        self,
        session: Session,
        keeper: Keeper,
        life: Life | None,
        groups: Sequence[LeasedGroup] = (),
        *,
        lease: int = 0,
        until: float = 0.0,
        boundary_tokens: int = 0,
        reason: str = "",
        plan: Plan | None = None,
    ) -> None:
        self._session = session
        self._keeper = keeper
        self._life = life
        self._lease = lease
        self._until = until
        self._is_released = lease == 0
        self.groups = tuple(groups)
        self.boundary_tokens = boundary_tokens
        """Largest token boundary that every group can serve."""
        self.reason = reason
        """Why it is shorter than asked, "" if whole."""
        self.plan = plan
        """How to load it; None when none was asked for, or nothing is known of costs yet."""

    # ------------------------------------------------------------------ what it holds

    @property
    def blocks(self) -> int:
        """Blocks of the first group below the boundary."""
        return self.groups[0].blocks if self.groups else 0

    @property
    def seconds_left(self) -> float:
        """By this process' clock, which started before the daemon's."""
        return max(0.0, self._until - time.monotonic())

    def view(self, block: int, group: int = 0) -> ByteArray:
        """Read-only uint8 [block_bytes] of a readable block, counted from the root.

        Raises InvalidRequest (not leased, or not readable yet: iterate `load` first), LeaseExpired,
        LeaseUnknown.
        """
        layout = self._group(group).layout
        return self._bytes(block, group, 0, layout.block_bytes)

    def rank_view(self, block: int, rank: int, group: int = 0) -> ByteArray:
        """Read-only uint8 [rank_payload_bytes]: one rank's part of a block; raises like `view`."""
        layout = self._group(group).layout
        return self._bytes(block, group, layout.rank_offset(rank), layout.rank_payload_bytes)

    def _bytes(self, block: int, group: int, start: int, length: int) -> ByteArray:
        self._session.check_open()
        life = self._alive()
        held = self._group(group)
        if not held.first <= block < held.blocks:
            raise InvalidRequest(
                f"lease: block {block} is not leased, "
                f"group {group} holds [{held.first}, {held.blocks})"
            )
        at = block - held.first
        if int(held.readable[at]) != held.all_parts:
            raise InvalidRequest(f"lease: block {block} is not readable yet; iterate load() first")
        view: ByteArray = life.arena.read_view(int(held.offsets[at]) + start, length)
        return view

    def _group(self, group: int) -> LeasedGroup:
        try:
            return self.groups[group]
        except IndexError:
            raise InvalidRequest(
                f"lease: group {group} of {len(self.groups)} ({self.reason or 'empty'})"
            ) from None

    def _alive(self) -> Life:
        if self._life is None or self._is_released:
            raise LeaseUnknown(f"lease: released, or never granted ({self.reason})")
        if self._life.is_over:
            raise PeerGone("lease: the daemon went away, and the lease with it")
        if not self.seconds_left:
            raise LeaseExpired(f"lease {self._lease:x} ran out; renew before it does")
        return self._life

    # ------------------------------------------------------------------ bringing the rest up

    def load(
        self,
        *,
        layer_order: bool = False,
        staging: bool = False,
        deadline_seconds: float | None = None,
    ) -> Generator[Ready, None, None]:
        """Yield what is readable: first what lies in the host tier, then the rest as it arrives.

        `staging`: what arrives leaves the host tier again with this lease.

        Ends when all has come or the rest will not come: `groups[i].whole` tells how far, `reason`
        why. Raises LeaseExpired, LeaseUnknown, PeerGone, Unavailable; what was announced before
        stays readable.
        """
        life = self._alive()
        limit = self._session.deadline_seconds if deadline_seconds is None else deadline_seconds
        pending = [group for group in self.groups if group.whole < group.count]
        if not pending:
            yield from self._readable_now()
            return
        order, first = load_order(self.plan, layer_order)
        request = pb.LoadRequest(
            client=life.client,
            lease=self._lease,
            order=order,
            first_block=first,
            deadline_ms=max(1, int(limit * 1000)),
            staging=staging,
        )
        # The transport's deadline is a little later, so that the daemon's last word arrives.
        call = self._session.stream("Load", request, limit + _GRACE_SECONDS)
        try:
            yield from self._readable_now()
            for reply in call:
                yield from self._take(reply)
                self._renew_if_due()
                if reply.done:
                    return
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
            self._session.lost(life, failure)
            raise failure from error
        finally:
            call.cancel()

    def _take(self, reply: Any) -> Iterator[Ready]:
        """One message of the load stream; its groups are those of the lease that are not empty."""
        filled = [number for number, group in enumerate(self.groups) if group.count]
        news: dict[int, News] = {number: {} for number in filled}
        self.reason = self.reason or reply.short_reason
        for number, grant in zip(filled, reply.grants, strict=False):
            self.groups[number].take_grant(grant, news[number])
        for order, parts, block in each_ready(reply.ready, "ready"):
            if order < len(filled):
                self.groups[filled[order]].take_parts(block, parts, news[filled[order]])
        for number in filled:
            yield from self.groups[number].runs(number, news[number])

    def _readable_now(self) -> Iterator[Ready]:
        for number, group in enumerate(self.groups):
            yield from group.runs(number, group.readable_now())

    # ------------------------------------------------------------------ its life

    def valid(self) -> bool:
        """After the last copy: whether every block that was readable as a whole stayed so.

        Compares boot id, slots and generations in the directory, without a call. Where the
        directory cannot be trusted (see `KVClient.directory_reads`) the lease itself must still
        run.
        """
        life = self._life
        if life is None or not life.is_boot_current:
            return False
        if not life.reads_directory:
            return not life.is_over and not self._is_released and self.seconds_left > 0
        directory = life.directory
        return all(group.holds(directory) for group in self.groups) and life.is_boot_current

    def renew(self) -> float:
        """Prolong it; seconds from now.

        Raises LeaseExpired, LeaseUnknown, PeerGone, Unavailable.
        """
        life = self._alive()
        request = pb.RenewRequest(client=life.client, lease=self._lease)
        sent = time.monotonic()
        try:
            reply = self._session.call("Renew", request)
        except KVStoreError as error:
            self._session.lost(life, error)
            raise
        self._until = sent + reply.lease_seconds
        return float(reply.lease_seconds)

    def _renew_if_due(self) -> None:
        """A long load keeps its own lease alive; if that fails, `valid` has the last word."""
        if self._life is None or self.seconds_left > self._life.read_lease_seconds / 2:
            return
        try:
            self.renew()
        except Unavailable:
            return

    def release(self) -> None:
        """End it; queued, not waited for. Twice is a no-op."""
        if not self._is_released and self._life is not None:
            self._is_released = True
            self._keeper.release(self._life, self._lease)

    def __enter__(self) -> ReadLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_GRACE_SECONDS = 0.25


def request_lease(
    session: Session,
    keeper: Keeper,
    life: Life,
    wanted: Sequence[Wanted],
    prompt_tokens: int,
    deadline_seconds: float,
    extra: Asking,
) -> ReadLease:
    """Match over `wanted`; raises what the call raises."""
    request = pb.MatchRequest(
        client=life.client,
        groups=[
            pb.Group(namespace=group.namespace, fingerprints=group.joined, hints=extra.packed_hints)
            for group in wanted
        ],
        prompt_tokens=prompt_tokens,
        deadline_ms=max(1, int(deadline_seconds * 1000)),
        want_lease=True,
        begin_load=extra.begin_load,
        plan=extra.packed_ability,
    )
    sent = time.monotonic()
    try:
        reply = session.call("Match", request, deadline_seconds)
    except KVStoreError as error:
        session.lost(life, error)
        raise
    if reply.boot_id != life.boot_id:
        raise PeerGone("match: the answer came from another daemon life")
    if len(reply.groups) != len(wanted):
        raise InvalidRequest(f"match: {len(reply.groups)} groups came back for {len(wanted)}")
    groups = [
        LeasedGroup.of(asked, match) for asked, match in zip(wanted, reply.groups, strict=True)
    ]
    session.tally.add(leases=1)
    return ReadLease(
        session,
        keeper,
        life,
        groups,
        lease=reply.lease,
        until=sent + reply.lease_seconds,
        boundary_tokens=reply.boundary_tokens,
        reason=reply.short_reason,
        plan=unpack_plan(reply.plan) if reply.HasField("plan") else None,
    )
