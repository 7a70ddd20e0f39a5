"""The engine-side client: one object per process, thread-safe, never in the engine's way.

Primitives of `KVClient`:
  `namespace`      a handle with all verbs on one namespace's blocks; `known_namespace` by its id
  `match_groups`   one lease over several KV groups of a hybrid model
  `boundary_in_host`   how far those groups can be served from host memory; no call
  `wait_connected`, `connected`, `away_reason`, `directory_reads`, `statistics`
  `stat`, `clear_all`, `close`

Opening never fails because the daemon is away: a background thread attaches when it comes, and
again after it was restarted. Meanwhile everything is a miss.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple

from kvstore.boundary import GroupReach, common_boundary, counted_group
from kvstore.client.committer import Committer
from kvstore.client.copying import CopyThreads
from kvstore.client.groups import Wanted
from kvstore.client.keeper import Keeper
from kvstore.client.lease import ReadLease, request_lease
from kvstore.client.names import Names, stretch
from kvstore.client.namespace import NamespaceHandle
from kvstore.client.plans import Asking
from kvstore.client.reasons import ABSENT, AWAY, CLOSED, reason_of
from kvstore.client.session import Session
from kvstore.client.statistics import ClientStatistics
from kvstore.config_load import socket_of
from kvstore.costs import ModelSize
from kvstore.directory import STORE_ORDER_TRUSTED
from kvstore.errors import InvalidRequest, KVStoreError, NamespaceConflict
from kvstore.fingerprint import KVIdentity, namespace_of
from kvstore.layout import BlockLayout
from kvstore.planner import Ability
from kvstore.rpc import control_pb2 as pb
from kvstore.types import FINGERPRINT_BYTES, NamespaceId, NamespaceKind

CLOSE_SECONDS = 0.9
"""Longest time `close` takes; what could not be said by then is lost, as after a crash."""


class DirectoryReads(NamedTuple):
    """Whether blocks are found and read without a call, and if not, why."""

    enabled: bool
    reason: str


class KVClient:
    """A process' client of one daemon.

    `socket`: None is what KVSTORE_DAEMON__SOCKET says, else the default one of the daemon that
    KVSTORE_DAEMON__NAME names, else the default daemon's. `engine`: processes of one engine share a
    name, and reservations.

    `deadline_seconds` bounds every call unless the verb is given its own. `attach=False` opens a
    tool's client: control verbs only, nothing mapped, no thread. Raises ConfigError where those
    variables can name no daemon.
    """

    def __init__(
        self,
        socket: str | None = None,
        *,
        engine: str = "",
        deadline_seconds: float = 2.0,
        attach: bool = True,
    ) -> None:
        self._session = Session(socket or socket_of(os.environ), engine, deadline_seconds)
        self._keeper = Keeper(self._session)
        self._committer = Committer(self._session, self._keeper.abort)
        self._threads = CopyThreads()
        self._handles: dict[bytes, NamespaceHandle] = {}
        self._declaring = Lock()
        if attach:
            self._keeper.start()
            self._committer.start()
            self._session.start(self._keeper.wake)

    # ------------------------------------------------------------------ state

    @property
    def connected(self) -> bool:
        """Whether a daemon is attached now."""
        return self._session.life is not None

    @property
    def away_reason(self) -> str:
        """Why no daemon is attached; "" while one is."""
        return "" if self.connected else self._session.away_reason

    @property
    def boot_id(self) -> int:
        """Names the daemon life attached to; 0 for none."""
        life = self._session.life
        return life.boot_id if life else 0

    @property
    def directory_reads(self) -> DirectoryReads:
        """Whether matches and loads from the host tier go without a call."""
        life = self._session.life
        if not STORE_ORDER_TRUSTED:
            return DirectoryReads(
                False, "this processor may reorder stores; blocks are read under leases"
            )
        if life is None:
            return DirectoryReads(False, self.away_reason)
        return DirectoryReads(True, "")

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Whether a daemon is attached, within `timeout` seconds (None: wait for ever)."""
        return self._session.wait_connected(timeout)

    def statistics(self) -> ClientStatistics:
        """A snapshot of the counters."""
        return replace(
            self._session.tally.snapshot(),
            connected=self.connected,
            boot_id=self.boot_id,
            away_reason=self.away_reason,
            spare_slots=sum(handle.spare.free for handle in list(self._handles.values())),
        )

    # ------------------------------------------------------------------ verbs

    def namespace(
        self,
        identity: KVIdentity | NamespaceId,
        layout: BlockLayout,
        *,
        kind: NamespaceKind = NamespaceKind.CHAINED,
        window_tokens: int = 0,
        label: str = "",
        model: ModelSize | None = None,
    ) -> NamespaceHandle:
        """The handle of a namespace; declared to every daemon life, now and later.

        `model`: what the daemon guesses the cost of prefill from, until it knows better.
        `identity` is complete, or the digest of one made elsewhere. Asked again it returns the same
        handle. Raises NamespaceConflict when it is known, here or to the daemon, with another
        layout, kind or window; InvalidRequest.
        """
        self._session.check_open()
        space = namespace_of(identity) if isinstance(identity, KVIdentity) else identity
        if len(space) != FINGERPRINT_BYTES:
            raise InvalidRequest(f"namespace: {len(space)} bytes, must be {FINGERPRINT_BYTES}")
        with self._declaring:
            return self._open(space, layout, kind, window_tokens, label, model)

    def _open(
        self,
        space: NamespaceId,
        layout: BlockLayout,
        kind: NamespaceKind,
        window_tokens: int,
        label: str,
        model: ModelSize | None,
    ) -> NamespaceHandle:
        known = self._handles.get(space)
        if known is not None:
            if (known.layout, known.kind, known.window_tokens) != (layout, kind, window_tokens):
                raise NamespaceConflict(
                    f"namespace {space.hex()[:16]}… is {known.kind} with {known.layout} and window "
                    f"{known.window_tokens} in this client; what differs belongs in the identity"
                )
            return known
        handle = NamespaceHandle(
            self._session,
            self._keeper,
            self._committer,
            self._threads,
            space,
            layout,
            kind,
            window_tokens,
            label,
            model,
        )
        self._session.register(handle)
        self._handles[space] = handle
        self._keeper.attend(handle.spare)
        return handle

    def match_groups(
        self,
        groups: Sequence[Names],
        prompt_tokens: int = 0,
        *,
        deadline_seconds: float | None = None,
        ability: Ability | None = None,
    ) -> ReadLease:
        """One lease over all KV groups of a model, at the largest boundary they share.

        `groups`: the same tokens' names in each group's namespace; `prompt_tokens` caps the
        boundary (0: no cap). Never raises for what the daemon does: an empty lease carries the
        reason. Raises InvalidRequest for names of a namespace this client has no handle for.
        """
        self._session.check_usable()
        handles = [self._handle_of(names) for names in groups]
        joined = [stretch(names, names.namespace, 0, len(names)) for names in groups]
        life = self._session.life
        if life is None or self._session.is_closed:
            reason = CLOSED if self._session.is_closed else AWAY
            return ReadLease(self._session, self._keeper, None, reason=reason)
        limit = self._session.deadline_seconds if deadline_seconds is None else deadline_seconds
        try:
            known = [self._session.declared(life, handle) for handle in handles]
            asked = list(zip(handles, known, joined, strict=True))
            if any(handle._is_nowhere(life, its, names) for handle, its, names in asked):
                counted = counted_group([handle.window_tokens for handle in handles])
                tokens = len(groups[counted]) * handles[counted].layout.block_tokens
                self._keeper.missed(sum(map(len, groups)), tokens)
                return ReadLease(self._session, self._keeper, None, reason=ABSENT)
            wanted = [
                Wanted(handle.id, names, handle.layout, its.index) for handle, its, names in asked
            ]
            extra = Asking(ability)
            return request_lease(
                self._session, self._keeper, life, wanted, prompt_tokens, limit, extra
            )
        except KVStoreError as error:
            return ReadLease(self._session, self._keeper, None, reason=reason_of(error))

    def boundary_in_host(self, groups: Sequence[Names], prompt_tokens: int = 0) -> int:
        """The boundary in tokens that `match_groups` would find if there was only the host tier.

        No call, no lease, counts no use; 0 where the directory must not be read without a call.
        Raises InvalidRequest like `match_groups`.
        """
        handles = [self._handle_of(names) for names in groups]
        if not self.directory_reads.enabled:
            return 0
        reaches = [
            GroupReach(handle.layout.block_tokens, handle.window_tokens, handle.match_each(names))
            for handle, names in zip(handles, groups, strict=True)
        ]
        return common_boundary(reaches, prompt_tokens)

    def known_namespace(self, namespace: NamespaceId) -> NamespaceHandle:
        """The handle of a namespace that was declared by whoever knows its layout.

        Raises NamespaceUnknown when nobody did, and KVStoreError.
        """
        known = self._handles.get(namespace)
        if known is not None:
            return known
        found = self._session.call("Describe", pb.DescribeRequest(namespace=namespace))
        sizes = found.layout
        return self.namespace(
            namespace,
            BlockLayout(sizes.block_tokens, sizes.layers, sizes.layer_bytes, sizes.ranks),
            kind=NamespaceKind(found.kind),
            window_tokens=found.window_tokens,
            label=found.label,
        )

    def _handle_of(self, names: Names) -> NamespaceHandle:
        try:
            return self._handles[names.namespace]
        except KeyError:
            raise InvalidRequest(
                f"namespace {names.namespace.hex()[:16]}… has no handle here; "
                "call namespace() first"
            ) from None

    def stat(self) -> dict[str, Any]:
        """The daemon's statistics tree. Raises KVStoreError."""
        tree: dict[str, Any] = json.loads(self._session.call("Stat", pb.StatRequest()).json)
        return tree

    def clear_all(self) -> int:
        """Clear every namespace of every engine; namespaces cleared. Raises KVStoreError."""
        return int(self._session.call("Clear", pb.ClearRequest(all=True)).namespaces)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Commit what is queued, give back what is held, leave; within a second. Idempotent.

        Arrays handed out stay readable memory; new ones are refused. In a forked child it only
        forgets.
        """
        if self._session.is_forked or not self._session.begin_close():
            return
        end = time.monotonic() + CLOSE_SECONDS
        self._committer.close(CLOSE_SECONDS * 0.5)
        for handle in list(self._handles.values()):
            handle.spare.withdraw()
        self._keeper.close(max(0.1, end - time.monotonic()) * 0.7)
        self._threads.close()
        self._session.finish_close(max(0.1, end - time.monotonic()))

    def __enter__(self) -> KVClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
