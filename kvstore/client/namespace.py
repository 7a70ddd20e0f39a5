"""One namespace as a client sees it: every verb on its blocks.

Primitives of `NamespaceHandle`:
  `chain`, `keys`              names of blocks
  `match`, `match_each`        what lies READY in the host tier; no call
  `load`                       into the caller's memory; no call when the directory has it all
  `lease`                      blocks that stay put, for engines that copy themselves
  `store`                      copies at once, commits in the background
  `reserve`, `join`            slots to fill in place; several ranks of one engine
  `exists`, `list`, `score`, `prefetch`, `pin`, `unpin`, `flush`, `delete`, `clear`

`match`, `load`, `store`, `lease` and `reserve` never raise for what the daemon does or does not do:
their results carry the reason. The others raise typed errors.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.client.committer import Committer, StoreTicket
from kvstore.client.copying import BlockArrays, CopyThreads, Rows
from kvstore.client.groups import Wanted
from kvstore.client.keeper import Keeper
from kvstore.client.lease import ReadLease, request_lease
from kvstore.client.life import Declared, Life
from kvstore.client.loading import Loader, LoadResult, Order
from kvstore.client.names import FlatNames, Names, stretch
from kvstore.client.plans import Asking
from kvstore.client.reasons import ABSENT, AWAY, CLOSED, reason_of
from kvstore.client.reservation import SharedReservation, WriteReservation, reserve_named
from kvstore.client.session import Session
from kvstore.client.spare import SpareSlots
from kvstore.client.storing import StoreOrder, Storer
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.fingerprint import Chain, Content, Tokens
from kvstore.hints import Hint
from kvstore.layout import BlockLayout
from kvstore.planner import Ability
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc.wire import NO_OFFSET, unpack_u8
from kvstore.types import (
    FINGERPRINT_BYTES,
    BlockStatus,
    BoolArray,
    ByteArray,
    NamespaceId,
    NamespaceKind,
)


@dataclass(frozen=True)
class Existence:
    """Where blocks are.

    `tiers` uint8 [n]: bit `1 << Tier` a tier that holds the block; 0 is absent.
    """

    prefix_blocks: int
    tiers: ByteArray


@dataclass(frozen=True)
class ListedPage:
    """`names` 32 bytes a block; `tiers` as in Existence; `cursor` of the next page, 0: none."""

    names: bytes
    tiers: ByteArray
    cursor: int


class NamespaceHandle:
    """Made by `KVClient.namespace`; thread-safe.

    `id`, `layout`, `kind`, `window_tokens`, `label` as declared.
    """

    def __init__(
        self,
        session: Session,
        keeper: Keeper,
        committer: Committer,
        threads: CopyThreads,
        namespace: NamespaceId,
        layout: BlockLayout,
        kind: NamespaceKind,
        window_tokens: int,
        label: str,
    ) -> None:
        self.id = namespace
        self.layout = layout
        self.kind = kind
        self.window_tokens = window_tokens
        self.label = label
        self._session = session
        self._keeper = keeper
        self.spare = SpareSlots(session, namespace, self._declared, keeper.abort, time.monotonic)
        self._is_prefix_closed = kind is NamespaceKind.CHAINED and not window_tokens
        self._loader = Loader(
            session, keeper, threads, layout, self._is_prefix_closed, self._lease_for
        )
        self._storer = Storer(session, keeper, committer, self.spare, namespace, layout)

    def request(self, client: int) -> pb.DeclareRequest:
        """What makes this namespace known to a daemon."""
        layout = self.layout
        return pb.DeclareRequest(
            client=client,
            namespace=self.id,
            kind=self.kind,
            layout=pb.Layout(
                block_tokens=layout.block_tokens,
                layers=layout.layers,
                layer_bytes=layout.layer_bytes,
                ranks=layout.ranks,
            ),
            window_tokens=self.window_tokens,
            label=self.label,
        )

    def _declared(self, life: Life) -> Declared:
        return self._session.declared(life, self)

    def _attached(self) -> tuple[Life, Declared] | str:
        """The life to work in, or the reason why there is none."""
        self._session.check_usable()
        if self._session.is_closed:
            return CLOSED
        life = self._session.life
        if life is None:
            self._session.tally.add(away_calls=1)
            return AWAY
        try:
            return life, self._declared(life)
        except KVStoreError as error:
            return reason_of(error)

    # ------------------------------------------------------------------ names

    def chain(self, tokens: Tokens, contents: Iterable[Content] = ()) -> Chain:
        """Names of the full blocks of `tokens`; grow it with `extend`.

        `contents`: images and the like.
        """
        chain = Chain(self.id, self.layout.block_tokens, contents)
        chain.extend(tokens)
        return chain

    def keys(self, keys: Iterable[bytes]) -> FlatNames:
        """Names of opaque keys of any length, in a flat namespace."""
        if self.kind is not NamespaceKind.FLAT:
            raise InvalidRequest("keys name blocks of a flat namespace only; use chain() here")
        return FlatNames(self.id, keys)

    # ------------------------------------------------------------------ reads

    def match(self, names: Names) -> int:
        """Leading blocks that lie READY in the host tier now. No call, no lease, counts no use."""
        joined = stretch(names, self.id, 0, len(names))
        attached = self._attached()
        if isinstance(attached, str):
            return 0
        life, declared = attached
        self._session.tally.add(matches=1)
        if life.directory is None or not life.reads_directory:
            return self._leading_in_host(names)
        return life.directory.lookup(declared.index, joined).count

    def match_each(self, names: Names) -> BoolArray:
        """bool [n]: which blocks lie READY in the host tier now, each for itself."""
        joined = stretch(names, self.id, 0, len(names))
        attached = self._attached()
        if isinstance(attached, str):
            return np.zeros(len(names), np.bool_)
        life, declared = attached
        self._session.tally.add(matches=1)
        if life.directory is None or not life.reads_directory:
            return np.zeros(len(names), np.bool_)
        return life.directory.lookup_each(declared.index, joined).mask

    def lease(
        self,
        names: Names,
        *,
        deadline_seconds: float | None = None,
        ability: Ability | None = None,
        hints: Sequence[Hint] = (),
    ) -> ReadLease:
        """A lease over the longest prefix that any tier holds; empty when there is none.

        With `ability` it is cut to what is worth loading, and the load begins at once.
        """
        joined = stretch(names, self.id, 0, len(names))
        attached = self._attached()
        if isinstance(attached, str):
            return ReadLease(self._session, self._keeper, None, reason=attached)
        life, declared = attached
        if self._is_nowhere(life, declared, joined):
            self._keeper.missed(len(names), len(names) * self.layout.block_tokens)
            return ReadLease(self._session, self._keeper, None, reason=ABSENT)
        try:
            extra = Asking(ability, tuple(hints), begin_load=ability is not None)
            return self._request_lease(life, declared, joined, deadline_seconds, extra)
        except KVStoreError as error:
            return ReadLease(self._session, self._keeper, None, reason=reason_of(error))

    def _is_nowhere(self, life: Life, declared: Declared, joined: bytes) -> bool:
        """Whether no tier can hold a prefix of these names: certain, and known without a call."""
        if not (self._is_prefix_closed and life.reads_directory):
            return False
        assert life.directory is not None  # it is read
        first = joined[:FINGERPRINT_BYTES]
        if not first or life.directory.may_be_below(first):
            return False
        return life.directory.lookup(declared.index, first).count == 0

    def _request_lease(
        self,
        life: Life,
        declared: Declared,
        joined: bytes,
        deadline_seconds: float | None,
        extra: Asking,
    ) -> ReadLease:
        limit = self._session.deadline_seconds if deadline_seconds is None else deadline_seconds
        wanted = Wanted(self.id, joined, self.layout, declared.index)
        return request_lease(self._session, self._keeper, life, [wanted], 0, limit, extra)

    def _lease_for(self, order: Order) -> ReadLease:
        joined = order.names if self.kind is NamespaceKind.FLAT else order.joined
        return self._request_lease(
            order.life,
            order.declared,
            joined,
            order.deadline_seconds,
            Asking(begin_load=not order.staging),
        )

    def _leading_in_host(self, names: Names) -> int:
        """The same answer as the directory's, by a call: for processors without an ordered one."""
        try:
            tiers = self.exists(names).tiers
        except KVStoreError:
            return 0
        here = tiers & (1 << 1) != 0
        return len(here) if here.all() else int(here.argmin())

    def load(
        self,
        names: Names,
        into: BlockArrays,
        *,
        start: int = 0,
        rank: int | None = None,
        deadline_seconds: float | None = None,
        copy_threads: int = 1,
        staging: bool = False,
    ) -> LoadResult:
        """Copy the stored ones among blocks [start, start + len(into)), from the first on.

        `into`: uint8 [n, bytes] or n arrays of `bytes` each, bytes = `layout.block_bytes`, or
        `layout.rank_payload_bytes` when only one `rank`'s part is wanted. No call when the
        directory has them all; otherwise the rest is promoted within `deadline_seconds`, to stay
        in the host tier or, with `staging`, to pass through it. Raises InvalidRequest for wrong
        sizes.
        """
        size = self.layout.block_bytes
        if rank is not None:
            self.layout.rank_offset(rank)
            size = self.layout.rank_payload_bytes
        rows = Rows(into, size, writable=True)
        joined = stretch(names, self.id, 0, start + len(rows))
        attached = self._attached()
        if isinstance(attached, str):
            return LoadResult(0, reason=attached)
        life, declared = attached
        limit = self._session.deadline_seconds if deadline_seconds is None else deadline_seconds
        return self._loader.load(
            Order(life, declared, self.id, joined, start, rows, rank, copy_threads, limit, staging)
        )

    # ------------------------------------------------------------------ writes

    def store(self, names: Names, blocks: BlockArrays, *, start: int = 0) -> StoreTicket:
        """Store uint8 [n, block_bytes], or n arrays, as blocks [start, start + n).

        Returns when the bytes are copied and the caller's memory is free again; the ticket tells
        what became of them. What is stored already is not copied. Raises InvalidRequest for wrong
        sizes.
        """
        rows = Rows(blocks, self.layout.block_bytes, writable=False)
        joined = stretch(names, self.id, start, len(rows))
        ticket = StoreTicket(len(rows))
        attached = self._attached()
        if isinstance(attached, str):
            ticket.settle(range(len(rows)), [BlockStatus.REFUSED] * len(rows), attached)
            return ticket
        life, declared = attached
        parent = names.parent_of(start)
        self._storer.store(StoreOrder(life, declared, parent, joined, rows, ticket))
        return ticket

    def reserve(
        self, names: Names, *, start: int = 0, count: int | None = None
    ) -> WriteReservation:
        """Slots to fill in place, for blocks [start, start + count), by default to the end.

        Present blocks get none, and after the first without room no later one does: see `statuses`.
        """
        joined = stretch(names, self.id, start, len(names) - start if count is None else count)
        attached = self._attached()
        if not isinstance(attached, str):
            life, _ = attached
            try:
                shared = reserve_named(self._session, life, self.id, names.parent_of(start), joined)
                return self._reservation(life, shared)
            except KVStoreError as error:
                attached = reason_of(error)
        blocks = len(joined) // 32
        nothing = SharedReservation(
            0,
            0,
            self.id,
            joined,
            (BlockStatus.REFUSED,) * blocks,
            (NO_OFFSET,) * blocks,
            0.0,
        )
        return self._reservation(None, nothing, attached)

    def join(self, shared: SharedReservation) -> WriteReservation:
        """Another rank's reservation, to fill and commit this process' part of it.

        Its `reason` says when it belongs to an earlier daemon life. Raises InvalidRequest for
        another namespace's.
        """
        if shared.namespace != self.id:
            raise InvalidRequest("join: the reservation belongs to another namespace")
        self._session.check_usable()
        life = self._session.life
        if life is None or life.boot_id != shared.boot_id:
            return self._reservation(None, shared, AWAY)
        return self._reservation(life, shared)

    def _reservation(
        self, life: Life | None, shared: SharedReservation, reason: str = ""
    ) -> WriteReservation:
        return WriteReservation(self._session, self._keeper, life, self.layout, shared, reason)

    # ------------------------------------------------------------------ control

    def exists(self, names: Names) -> Existence:
        """Residency by tier; takes no lease, counts no use. Raises KVStoreError."""
        joined = stretch(names, self.id, 0, len(names))
        request = pb.ExistsRequest(namespace=self.id, fingerprints=joined)
        reply = self._session.call("Exists", request)
        return Existence(reply.prefix_blocks, unpack_u8(reply.tiers, "tiers", len(names)))

    def prefetch(self, names: Names) -> int:
        """Hint that these blocks will be asked for soon; blocks accepted. Raises KVStoreError."""
        joined = stretch(names, self.id, 0, len(names))
        group = pb.Group(namespace=self.id, fingerprints=joined)
        request = pb.PrefetchRequest(client=self._client_number(), groups=[group])
        return int(self._session.call("Prefetch", request).accepted)

    def list(self, cursor: int = 0, blocks_max: int = 0) -> ListedPage:
        """A page of what is stored, from a page's `cursor` on. Raises KVStoreError."""
        request = pb.ListRequest(namespace=self.id, cursor=cursor, blocks_max=blocks_max)
        reply = self._session.call("List", request)
        return ListedPage(reply.fingerprints, unpack_u8(reply.tiers, "tiers"), reply.cursor)

    def pin(
        self, names: Names, seconds: float, *, hard: bool = False, tenant: str = ""
    ) -> tuple[int, str]:
        """Keep the leading stored blocks; (how many, why not all: "", "absent", "budget").

        At most 2,048 names. Raises KVStoreError.
        """
        request = pb.PinRequest(
            client=self._client_number(),
            namespace=self.id,
            fingerprints=stretch(names, self.id, 0, len(names)),
            seconds=seconds,
            hard=hard,
            tenant=tenant,
        )
        reply = self._session.call("Pin", request)
        return reply.pinned, reply.short_reason

    def unpin(self, names: Names, *, tenant: str = "") -> int:
        """End pins of this tenant; how many there were. Raises KVStoreError."""
        request = pb.UnpinRequest(
            client=self._client_number(),
            namespace=self.id,
            fingerprints=stretch(names, self.id, 0, len(names)),
            tenant=tenant,
        )
        return int(self._session.call("Unpin", request).unpinned)

    def score(self, names: Names, prompt_tokens: int = 0) -> tuple[dict[int, int], float]:
        """({tier: tokens of the prefix there}, predicted seconds to the first token or 0)."""
        joined = stretch(names, self.id, 0, len(names))
        request = pb.ScoreRequest(
            namespace=self.id, fingerprints=joined, prompt_tokens=prompt_tokens
        )
        reply = self._session.call("Score", request)
        return dict(reply.tokens_by_tier), reply.predicted_ttft_seconds

    def _client_number(self) -> int:
        life = self._session.life
        return life.client if life else 0

    def flush(self, names: Names, *, deadline_seconds: float = 10.0) -> BoolArray:
        """bool [n]: which blocks are durable by the deadline. Raises KVStoreError."""
        joined = stretch(names, self.id, 0, len(names))
        request = pb.FlushRequest(
            namespace=self.id, fingerprints=joined, deadline_ms=max(1, int(deadline_seconds * 1000))
        )
        reply = self._session.call("Flush", request, deadline_seconds + 0.25)
        durable: BoolArray = unpack_u8(reply.durable, "durable", len(names)) != 0
        return durable

    def delete(self, names: Names, block: int) -> int:
        """Drop one block and all that follows it; blocks dropped. Raises KVStoreError."""
        name = stretch(names, self.id, block, 1)
        request: Any = pb.DeleteRequest(namespace=self.id, fingerprint=name)
        return int(self._session.call("Delete", request).deleted_blocks)

    def clear(self) -> None:
        """No block stored before this call matches again, for any engine. Raises KVStoreError."""
        self._session.call("Clear", pb.ClearRequest(namespace=self.id))
