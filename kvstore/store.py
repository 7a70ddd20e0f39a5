"""The store: where the mind (catalog, leases, policy) and the tiers meet.

Primitives of `Store`, all synchronous and on the daemon's loop:
  `find`, `hold`  largest common prefix of one or several KV groups; one lease over it
  `exists`        residency by tier; takes no lease, counts no use
  `make_ready`    COMMITTED host replicas whose parent is READY become matchable
  `drop_host`, `forget`  replicas leave
  `condemn`       rows that may never match again (deleted, damaged); `reclaim_slice` frees what
                  they hold

Writes live in writes.py, room-making in room.py, movement in mover, writebehind, gpu_copies.
Nothing here awaits, reads a clock, or touches bytes of blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.arrays import distinct
from kvstore.boundary import GroupReach, common_boundary
from kvstore.catalog import ABSENT_ROW, Catalog
from kvstore.config import Config
from kvstore.costs import Costs
from kvstore.counters import Counters
from kvstore.errors import InvalidRequest, check
from kvstore.hints import TokenHint, classes_of
from kvstore.lease import LeaseTable, ReservationTable
from kvstore.matching import GroupMatch, MatchResult
from kvstore.namespaces import Namespace, NamespaceTable
from kvstore.policy import Policy
from kvstore.tier.gpu import GpuTier
from kvstore.tier.host import HostTier
from kvstore.tier.nvme import NvmeTier
from kvstore.types import (
    FINGERPRINT_BYTES,
    BoolArray,
    ByteArray,
    ClientId,
    IntArray,
    ReplicaState,
    Tier,
)
from kvstore.uses import Uses

ABSENT, FILLING, COMMITTED, READY, DRAINING = (int(state) for state in ReplicaState)
NO_ROWS: IntArray = np.empty(0, np.int64)
CONDEMNED = 0xFFFFFFFF
"""Clear count that no namespace reaches: the row is dead, whatever still holds it."""
RECLAIM_SCAN_ROWS = 32768
RECLAIM_ROWS_MAX = 128


@dataclass
class Store:
    """All state of one daemon life. A tier that is off is None."""

    config: Config
    catalog: Catalog
    leases: LeaseTable
    reservations: ReservationTable
    namespaces: NamespaceTable
    costs: Costs
    policy: Policy
    host: HostTier | None
    nvme: NvmeTier | None
    gpu: GpuTier | None = None
    counters: Counters = field(default_factory=Counters)
    on_ready: Callable[[IntArray], None] = lambda rows: None
    """Told of rows that became READY in the host tier (write-behind listens)."""
    on_used: list[Callable[[IntArray], None]] = field(default_factory=list)
    """Told of rows that were used (write-behind looks again at those without a copy)."""
    on_host_leaves: Callable[[IntArray], None] = lambda rows: None
    """Told of rows whose host replica is about to leave; the GPU tier, if on, says what it has."""
    in_gpu: Callable[[IntArray], BoolArray] = lambda rows: np.zeros(len(rows), np.bool_)
    on_nvme_lost: Callable[[IntArray], None] = lambda rows: None
    """Told of rows whose NVMe replica must go (its record is deleted, then its slot is free)."""
    waiting: dict[int, list[int]] = field(default_factory=dict)
    """parent row → COMMITTED rows that become READY when it does."""
    uses: Uses = field(default_factory=Uses)
    _reclaim_from: int | None = None
    _reclaim_again: bool = False

    # ------------------------------------------------------------------ reads

    def is_current(self, rows: IntArray) -> BoolArray:
        """Rows that exist and were stored since the last clear of their namespace."""
        known = rows != ABSENT_ROW
        columns = self.catalog
        result: BoolArray = known & (
            columns.clear_count[rows] == self.namespaces.clear_counts[columns.namespace[rows]]
        )
        return result

    def is_readable(self, rows: IntArray) -> BoolArray:
        """Current rows with a READY replica in any tier."""
        columns = self.catalog
        held = (columns.host_state[rows] == READY) | (columns.nvme_state[rows] == READY)
        result: BoolArray = self.is_current(rows) & held
        return result

    def is_held(self, rows: IntArray) -> BoolArray:
        """Current rows that are stored or being stored: nobody need store them again."""
        columns = self.catalog
        host = columns.host_state[rows]
        coming = (host == FILLING) | (host == COMMITTED) | (host == READY)
        result: BoolArray = self.is_current(rows) & (coming | (columns.nvme_state[rows] == READY))
        return result

    def find(self, groups: Sequence[tuple[Namespace, bytes]], prompt_tokens: int) -> MatchResult:
        """Longest usable prefix of `groups` [(namespace, joined fingerprints from the root)].

        `prompt_tokens` caps the boundary (0: no cap). Counts nothing and holds nothing. Raises
        InvalidRequest.
        """
        if not groups:
            raise InvalidRequest("match: no KV group given")
        rows = [self._known_rows(namespace, names) for namespace, names in groups]
        usable = [self.is_readable(found) for found in rows]
        boundary = common_boundary(
            [
                GroupReach(namespace.layout.block_tokens, namespace.window_tokens, mask)
                for (namespace, _), mask in zip(groups, usable, strict=True)
            ],
            prompt_tokens,
        )
        result = MatchResult(boundary, [], [])
        for (namespace, names), found in zip(groups, rows, strict=True):
            block_tokens = namespace.layout.block_tokens
            last = boundary // block_tokens
            first = max(0, boundary - namespace.window_tokens) // block_tokens
            first = min(first, last) if namespace.window_tokens else 0
            result.groups.append(GroupMatch(namespace, first, found[first:last]))
            result.asked_blocks.append(len(names) // FINGERPRINT_BYTES)
        return result

    def hold(
        self,
        client: ClientId,
        result: MatchResult,
        want_lease: bool,
        now: float,
        hints: Sequence[TokenHint] = (),
    ) -> None:
        """Count what was found as used once. The lease, when wanted, covers every row of the result
        and keeps all its replicas where they are. Raises LeaseTooLarge.
        """
        in_host = [self.catalog.host_state[group.rows] == READY for group in result.groups]
        self.counters.matched(result, [int(np.count_nonzero(each)) for each in in_host])
        for group in result.groups:
            self._count_saved(group.namespace, group.first, group.blocks)
        leased = np.concatenate([group.rows for group in result.groups])
        if not len(leased):
            return
        if want_lease:
            seconds = self.config.lease.read_seconds
            result.lease = self.leases.grant(client, leased, now, seconds)
            self.counters.add("leases_granted")
        for group, asked in zip(result.groups, result.asked_blocks, strict=True):
            tokens = group.namespace.layout.block_tokens
            classes = classes_of(hints, group.first, len(group.rows), tokens) if hints else None
            self.uses.used(group.rows, asked, classes)

    def rows_of(self, namespace: Namespace, names: bytes) -> IntArray:
        """Rows of blocks of `namespace`; ABSENT_ROW for unknown names and another's (I8)."""
        rows = self.catalog.rows(names)
        rows[self.catalog.namespace[rows] != namespace.index] = ABSENT_ROW
        return rows

    def _known_rows(self, namespace: Namespace, names: bytes) -> IntArray:
        if not namespace.is_prefix_closed:
            return self.rows_of(namespace, names)
        rows = self.catalog.prefix_rows(names)
        # Names that are no chain of this namespace lead no further than they are one.
        astray = self.catalog.namespace[rows] != namespace.index
        astray |= self.catalog.parent[rows] != np.append(ABSENT_ROW, rows[:-1])[: len(rows)]
        return rows[: int(astray.argmax())] if astray.any() else rows

    def _count_saved(self, namespace: Namespace, first: int, last: int) -> None:
        """Prefill of blocks [first, last), where engines told how long theirs takes."""
        if self.costs.is_calibrated(namespace.index) and not namespace.window_tokens:
            tokens = namespace.layout.block_tokens
            cost = self.costs.prefill(namespace.index)
            saved = cost.seconds(float(first * tokens), float(last * tokens))
            self.counters.add("saved_prefill_us", round(float(saved) * 1e6))

    def exists(self, namespace: Namespace, names: bytes) -> tuple[int, ByteArray]:
        """(length of the readable prefix in blocks, uint8 bit mask a block: 1 << tier)."""
        mask = self.tiers_of(self.rows_of(namespace, names))
        held = mask != 0
        return len(held) if held.all() else int(held.argmin()), mask

    def tiers_of(self, rows: IntArray) -> ByteArray:
        """uint8 bit mask a row: 1 << tier for every tier with a READY replica; 0 if not current."""
        current = self.is_current(rows)
        host = current & (self.catalog.host_state[rows] == READY)
        nvme = current & (self.catalog.nvme_state[rows] == READY)
        mask = (host << np.uint8(Tier.HOST)) | (nvme << np.uint8(Tier.NVME))
        mask |= (current & self.in_gpu(rows)) << np.uint8(Tier.GPU)
        tiers: ByteArray = mask.astype(np.uint8)
        return tiers

    def report(self, namespace: Namespace, names: bytes, hints: Sequence[TokenHint] = ()) -> None:
        """Uses of blocks of `namespace`, read through the directory."""
        rows = self.rows_of(namespace, names)
        classes = classes_of(hints, 0, len(rows), namespace.layout.block_tokens) if hints else None
        readable = self.is_readable(rows)
        rows, classes = rows[readable], None if classes is None else classes[readable]
        self.counters.reported(len(readable), namespace.layout.block_tokens)
        if len(rows):
            first = int(self.catalog.depth[rows[0]])
            self._count_saved(namespace, first, first + len(rows))
            self.uses.used(rows, len(readable), classes)

    def report_missed(self, blocks: int, tokens: int) -> None:
        """Blocks of any namespace that clients did not find, and asked nobody for."""
        self.counters.add("queried_blocks", blocks)
        self.counters.add("missed_blocks:absent", blocks)
        self.counters.add("missed_tokens:absent", tokens)
        self.counters.add("reported_missed_blocks", blocks)

    def apply_touches(self, now: float) -> None:
        """Let the policy see the uses that wait; called after replies went out."""
        self.uses.apply(self.policy, now, self.on_used)

    # ------------------------------------------------------------------ visibility

    def make_ready(self, rows: IntArray, now: float) -> None:
        """COMMITTED → READY where the parent is READY in some tier; others wait for their parent.

        Rows are in chain order. Rows whose parent is gone, or whose namespace was cleared
        meanwhile, are dropped.
        """
        ready: dict[int, None] = {}
        columns = self.catalog
        queue = deque(int(row) for row in rows)
        while queue:
            row = queue.popleft()
            if columns.host_state[row] != COMMITTED or row in ready:
                continue
            if columns.clear_count[row] != self.namespaces.clear_counts[columns.namespace[row]]:
                self.drop_unready(row, "cleared")
                continue
            parent = int(columns.parent[row])
            standing = READY if parent in ready else self._standing(row, parent)
            if standing == READY:
                ready[row] = None
                queue.extend(self.waiting.pop(row, ()))
            elif standing == FILLING:
                self.waiting.setdefault(parent, []).append(row)
            else:
                self.drop_unready(row, "parent_lost")
        if ready:
            self.publish(np.array(list(ready), np.int64), now)

    def _standing(self, row: int, parent: int) -> int:
        """READY: may be seen now. FILLING: its parent is on its way. ABSENT: it never will be."""
        columns = self.catalog
        namespace = self.namespaces.at(int(columns.namespace[row]))
        if not namespace.is_prefix_closed or parent < 0:
            return READY
        if columns.clear_count[parent] != namespace.clear_count:
            return ABSENT
        if READY in (columns.host_state[parent], columns.nvme_state[parent]):
            return READY
        return FILLING if columns.host_state[parent] in (FILLING, COMMITTED) else ABSENT

    def publish(self, rows: IntArray, now: float) -> None:
        """FILLING or COMMITTED → READY: whole, verified, its parent reachable; matchable from here
        on.
        """
        host, columns = self.host_tier, self.catalog
        for index in distinct(columns.namespace[rows]):
            namespace = self.namespaces.at(int(index))
            own = rows[columns.namespace[rows] == index]
            host.publish(
                columns.host_slot[own],
                columns.fingerprints[own],
                namespace=namespace.index,
                clear_count=namespace.clear_count,
                lengths=columns.length[own],
            )
        columns.set_host(rows, ReplicaState.READY)
        names, depths = columns.fingerprints[rows], columns.depth[rows].astype(np.int64)
        self.uses.stored(self.policy, rows, names, depths, now)
        self.on_ready(rows)

    @property
    def host_tier(self) -> HostTier:
        """The host tier. Only the store of `offline` has none: it serves nobody."""
        check(self.host is not None, "host tier is on")
        assert self.host is not None
        return self.host

    # ------------------------------------------------------------------ leaving

    def count_dropped(self, rows: IntArray, reason: str) -> None:
        """A whole replica of each leaves. Those of condemned rows were counted with these."""
        fresh = self.catalog.clear_count[rows] != CONDEMNED
        self.counters.add(f"dropped_blocks:{reason}", int(np.count_nonzero(fresh)))

    def drop_unready(self, row: int, reason: str) -> None:
        """A FILLING or COMMITTED host replica will never be READY; its waiting children neither."""
        columns = self.catalog
        stack = [row]
        while stack:
            lost = stack.pop()
            stack.extend(self.waiting.pop(lost, ()))
            if columns.host_state[lost] in (FILLING, COMMITTED):
                slot, rows = int(columns.host_slot[lost]), np.array([lost], np.int64)
                self.count_dropped(rows[columns.host_state[rows] == COMMITTED], reason)
                columns.set_host(lost, ReplicaState.ABSENT)
                if slot >= 0:
                    self.host_tier.free([slot])
                columns.remove_if_bare(rows)

    def drop_host(self, rows: IntArray, reason: str, now: float) -> None:
        """READY host replicas leave; the slots are re-usable at once (generation moves first)."""
        if not len(rows):
            return
        columns = self.catalog
        is_last = columns.nvme_state[rows] != READY
        is_last &= reason == "evicted" and self.nvme is not None
        self.count_dropped(rows[is_last], "dropped_before_write")
        self.count_dropped(rows[~is_last], reason)
        self.on_host_leaves(rows)
        slots = columns.host_slot[rows].copy()
        self.host_tier.retract(slots)
        columns.set_host(rows, ReplicaState.ABSENT)
        self.host_tier.free(slots)
        self.policy.evicted(rows, Tier.HOST, now)
        columns.remove_if_bare(rows)

    def set_clear_count(self, namespace: Namespace) -> None:
        """Clients find only what was stored since the namespace's last clear."""
        for tier in (self.host, self.gpu):
            if tier is not None:
                tier.directory.set_clear_count(namespace.index, namespace.clear_count)

    def is_idle(self, rows: IntArray) -> BoolArray:
        """Rows that no lease and no job holds."""
        result: BoolArray = (self.catalog.leases[rows] == 0) & (self.catalog.pins[rows] == 0)
        return result

    def forget(self, rows: IntArray, reason: str, now: float) -> IntArray:
        """Drop every replica of the idle ones among `rows`; return those that must be tried again
        later.

        Host replicas go at once. NVMe replicas become DRAINING here and leave with their index
        record.
        """
        columns = self.catalog
        busy = ~self.is_idle(rows) | (columns.nvme_state[rows] == FILLING)
        busy |= (columns.host_state[rows] == FILLING) | (columns.host_state[rows] == COMMITTED)
        free = rows[~busy]
        on_nvme = free[columns.nvme_state[free] == READY]
        if len(on_nvme):
            self.count_dropped(on_nvme, reason)
            columns.set_nvme(on_nvme, ReplicaState.DRAINING)
            self.on_nvme_lost(on_nvme)
        self.drop_host(free[columns.host_state[free] == READY], reason, now)
        result: IntArray = rows[busy]
        return result

    def condemn(self, rows: IntArray, reason: str) -> None:
        """`rows` never match again, from now on; their replicas leave in slices as soon as nobody
        holds them.
        """
        columns = self.catalog
        rows = rows[columns.clear_count[rows] != CONDEMNED]
        in_host = rows[columns.host_state[rows] == READY]
        coming = rows[columns.host_state[rows] == COMMITTED]
        for held in (in_host, coming, rows[columns.nvme_state[rows] == READY]):
            self.count_dropped(held, reason)
        if len(in_host):
            self.on_host_leaves(in_host)
            self.host_tier.retract(columns.host_slot[in_host])
        columns.clear_count[rows] = CONDEMNED
        self.start_reclaim()

    def condemn_damaged(self, row: int, reason: str) -> None:
        """A check on `row`'s bytes failed: it goes, with all that is reachable only through it."""
        self.condemn(self.descent_of(row), reason)

    def descent_of(self, row: int) -> IntArray:
        """`row` and its descendants; just the row where blocks do not need their parents."""
        if self.namespaces.at(int(self.catalog.namespace[row])).is_prefix_closed:
            return self.catalog.subtree(row)
        return np.array([row], np.int64)

    def start_reclaim(self) -> None:
        """Something stopped being current: look at every row once more."""
        self._reclaim_from = 0
        self._reclaim_again = False

    def reclaim_slice(self, now: float) -> bool:
        """Drop replicas of rows that are no longer current, a bounded piece a call; False when
        none is left.
        """
        if self._reclaim_from is None:
            return False
        start, stop = self._reclaim_from, self._reclaim_from + RECLAIM_SCAN_ROWS
        columns = self.catalog
        rows = np.arange(start, min(stop, columns.rows_end), dtype=np.int64)
        held = (columns.host_state[rows] != ABSENT) | (columns.nvme_state[rows] != ABSENT)
        rows = rows[held]
        rows = rows[~self.is_current(rows)]
        if len(rows) > RECLAIM_ROWS_MAX:
            rows, stop = rows[:RECLAIM_ROWS_MAX], int(rows[RECLAIM_ROWS_MAX])
        if len(rows) and len(self.forget(rows, "cleared", now)):
            self._reclaim_again = True
        self._reclaim_from = stop
        if stop >= columns.rows_end:
            self._reclaim_from = 0 if self._reclaim_again else None
            self._reclaim_again = False
        return self._reclaim_from is not None
