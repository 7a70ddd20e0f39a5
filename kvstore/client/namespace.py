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

import numpy as np

from kvstore.client.committer import Committer, StoreTicket
from kvstore.client.control import ControlVerbs
from kvstore.client.copying import BlockArrays, CopyThreads, Rows
from kvstore.client.groups import Wanted
from kvstore.client.keeper import Keeper
from kvstore.client.lease import ReadLease, request_lease
from kvstore.client.life import Declared, Life
from kvstore.client.loading import Loader, LoadResult, Order
from kvstore.client.names import FlatNames, Names, stretch
from kvstore.client.plans import Asking, packed_size
from kvstore.client.reasons import ABSENT, AWAY, CLOSED, reason_of
from kvstore.client.reservation import SharedReservation, WriteReservation, reserve_named
from kvstore.client.session import Session
from kvstore.client.spare import SpareSlots
from kvstore.client.storing import StoreOrder, Storer
from kvstore.costs import ModelSize
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.fingerprint import Chain, Content, Tokens
from kvstore.hints import Hint, classes_of
from kvstore.layout import BlockLayout
from kvstore.planner import Ability
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc.wire import NO_OFFSET
from kvstore.types import (
    FINGERPRINT_BYTES,
    BlockStatus,
    BoolArray,
    NamespaceId,
    NamespaceKind,
)


class NamespaceHandle(ControlVerbs):
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
        model: ModelSize | None = None,
    ) -> None:
        self.id = namespace
        self.layout = layout
        self.kind = kind
        self.window_tokens = window_tokens
        self.label = label
        self._model = model
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
            model=packed_size(self._model),
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
        if not life.reads_directory:
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
        if not life.reads_directory:
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
        return self._request_lease(
            order.life,
            order.declared,
            order.joined,
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
        if self.kind is NamespaceKind.FLAT:  # keys before the first wanted lead nowhere
            joined, start = joined[start * FINGERPRINT_BYTES :], 0
        attached = self._attached()
        if isinstance(attached, str):
            return LoadResult(0, reason=attached)
        life, declared = attached
        limit = self._session.deadline_seconds if deadline_seconds is None else deadline_seconds
        return self._loader.load(
            Order(life, declared, self.id, joined, start, rows, rank, copy_threads, limit, staging)
        )

    # ------------------------------------------------------------------ writes

    def store(
        self,
        names: Names,
        blocks: BlockArrays,
        *,
        start: int = 0,
        hints: Sequence[Hint] = (),
    ) -> StoreTicket:
        """Store uint8 [n, block_bytes], or n arrays, as blocks [start, start + n).

        `hints` count tokens from the first of `names`. Returns when the bytes are copied and the
        caller's memory is free again; the ticket tells what became of them. What is stored already
        is not copied. Raises InvalidRequest for wrong sizes.
        """
        rows = Rows(blocks, self.layout.block_bytes, writable=False)
        joined = stretch(names, self.id, start, len(rows))
        ticket = StoreTicket(len(rows))
        attached = self._attached()
        if isinstance(attached, str):
            ticket.settle(range(len(rows)), [BlockStatus.REFUSED] * len(rows), attached)
            return ticket
        life, declared = attached
        parent, classes = names.parent_of(start), b""
        if hints:
            words = [hint.token_hint for hint in hints]
            classes = classes_of(words, start, len(rows), self.layout.block_tokens).tobytes()
        self._storer.store(StoreOrder(life, declared, parent, joined, rows, ticket, classes))
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
                parent = names.parent_of(start)
                shared = reserve_named(self._session, self._keeper, life, self.id, parent, joined)
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
