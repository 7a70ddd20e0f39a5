"""What is worth keeping, and who goes first.

Primitives: `Policy` (the judgement: told of uses, asked for scores), `LruLeaf` (the plain one; the
others are in `policies`), `VictimPicker` (finds the lowest scores among replicas that may leave
now).

Pure: time and random numbers come as arguments. A policy changes nothing but the catalog's `uses`
and `last_use`; the picker changes nothing at all: evicting what it returns is the caller's.

Leaf first: a block whose child has a replica in the same tier stays, and so does the only replica
of a block with a child in the host tier: no tier holds blocks that nothing leads to. In the host
tier a copy on NVMe is way enough. Namespaces in `leaf_exempt` (flat, sliding window) need none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvstore.arrays import distinct
from kvstore.catalog import Catalog
from kvstore.types import BoolArray, FloatArray, IntArray, ReplicaState, Tier

_ABSENT, _READY = int(ReplicaState.ABSENT), int(ReplicaState.READY)
_NONE: IntArray = np.empty(0, np.int64)

_BATCH = 64
"""Victims a search provides; what the caller did not ask for is kept for its next call."""
_SHARE = 4
"""Of what a search found, it provides the lowest quarter, or as many as were asked for."""
_SAMPLE = 8192
"""Blocks of one size to draw, about."""
_DRAWN_MAX = 32768
"""Rows of the catalog drawn for that, at most."""
_DRAWN_TOGETHER = 32
"""Neighbouring rows drawn at a time: they share cache lines, and mostly a request."""
_TOGETHER: IntArray = np.arange(_DRAWN_TOGETHER)
_KNOWN_A_VICTIM = 4
"""Candidates a victim is chosen from at least, where there are as many."""
_CHAINS = 8
"""Leaves whose ancestors are looked at too, and one more for each so many victims."""
_FOLLOWERS = 64
_PATIENCE = 16
_CREDIT_MAX = 1 << 18
_WINDOW = 32768
"""Rows a scan looks at in one piece: about 0.1 ms."""
_WINDOWS_MAX = 8
_SCAN_ROWS_A_VICTIM = 2048
_SECONDS_A_BLOCK = 1e-9
"""Orders equal times by depth; a chain of a million blocks shifts by a millisecond."""
_SCAN_PAUSE_SECONDS = 0.001
"""Pause after a fruitless scan, a window of the catalog: ten times what the scan took."""


@dataclass(frozen=True)
class RequestShape:
    """What is known of the request behind a use; 0 means unknown."""

    blocks: int = 0
    """Full blocks of its prompt."""
    blocks_found: int = 0
    """How many of them were held."""
    hint: int = 0
    """A class the client named."""


UNKNOWN_REQUEST = RequestShape()


class Policy(Protocol):
    """Judgement over catalog rows. It may read every column; `rows` are int64[n].

    A policy may keep what it likes beside the catalog (ghosts, class statistics), keyed by the
    first 8 bytes of the fingerprint; costs and budgets come to its constructor.
    """

    name: str
    wear_refusals: int
    """Blocks `admit` has refused so far because they are not worth the wear."""

    def inserted(self, rows: IntArray, now: float, request: RequestShape = UNKNOWN_REQUEST) -> None:
        """Blocks became READY: new, recovered (`uses` set before), or back in a faster tier."""

    def touched(self, rows: IntArray, now: float, request: RequestShape = UNKNOWN_REQUEST) -> None:
        """One request used these blocks: one use each, also of a row that is named twice."""

    def evicted(self, rows: IntArray, tier: Tier, now: float) -> None:
        """The rows' replicas in `tier` leave for want of room. Called while the rows still live."""

    def scores(self, rows: IntArray, tier: Tier, now: float) -> FloatArray:
        """Worth of the rows' replicas in `tier`, float64[n]; the lowest leaves first."""

    def admit(self, rows: IntArray, tier: Tier, now: float) -> BoolArray:
        """Which rows are worth writing to `tier`, bool[n]; whether affordable is not asked."""

    def promote(self, rows: IntArray, now: float) -> BoolArray:
        """Which rows, read from a slower tier, are worth keeping in the host tier, bool[n]."""

    def statistics(self) -> dict[str, float]:
        """Its state, for people; stable keys."""


class LruLeaf:
    """The least recently used leaf goes first; of one request's blocks the deepest. Admits all."""

    name = "lru"
    wear_refusals = 0

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def inserted(self, rows: IntArray, now: float, request: RequestShape = UNKNOWN_REQUEST) -> None:
        """New blocks count as used now, without a use."""
        self._catalog.last_use[rows] = now

    def touched(self, rows: IntArray, now: float, request: RequestShape = UNKNOWN_REQUEST) -> None:
        """See Policy."""
        self._catalog.last_use[rows] = now
        # Not np.add.at: a row that is named twice is used once.
        self._catalog.uses[rows] += 1

    def evicted(self, rows: IntArray, tier: Tier, now: float) -> None:
        """Nothing is kept of blocks that left."""

    def scores(self, rows: IntArray, tier: Tier, now: float) -> FloatArray:
        """Time of the last use."""
        return lru_order(self._catalog, rows)

    def admit(self, rows: IntArray, tier: Tier, now: float) -> BoolArray:
        """Everything."""
        return np.ones(rows.size, np.bool_)

    def promote(self, rows: IntArray, now: float) -> BoolArray:
        """Everything."""
        return np.ones(rows.size, np.bool_)

    def statistics(self) -> dict[str, float]:
        """Nothing to tell."""
        return {}


def lru_order(catalog: Catalog, rows: IntArray) -> FloatArray:
    """Time of the last use; of blocks used together the deepest comes first."""
    return catalog.last_use[rows] - catalog.depth[rows] * _SECONDS_A_BLOCK


@dataclass(slots=True, eq=False)
class _Pool:
    """What is remembered of one slot size; all of it is looked at again before use."""

    held: IntArray
    credit: int = _CREDIT_MAX
    """Rows that may be scanned although some victims are known."""
    queue: IntArray = field(default_factory=lambda: _NONE)
    """Slots of the next victims, lowest score first."""
    ceiling: float = -np.inf
    """Highest score in the queue when it was made."""
    followers: IntArray = field(default_factory=lambda: _NONE)
    """Slots of earlier victims' parents, which may be leaves by now, and of those victims."""
    patience: int = 0
    """Picks for which followers alone will do, because the last search found too little."""
    cursor: int = 0
    scan_after: float = -np.inf


class VictimPicker:
    """Finds which replicas of one slot size leave next.

    A catalog of one window is ranked whole. Of a larger one a sample is, and what is known from
    before: victims not taken, parents of those taken. Where that is not enough, windows of the
    whole are scanned, in proportion to the victims they serve. No pick takes over 2 ms.
    """

    def __init__(
        self,
        catalog: Catalog,
        policy: Policy,
        leaf_exempt: BoolArray,
        rng: np.random.Generator,
    ) -> None:
        """`leaf_exempt` bool[namespaces]: those without leaf-first; the caller keeps it current."""
        self._catalog = catalog
        self._policy = policy
        self._leaf_exempt = leaf_exempt
        self._rng = rng
        self._pools: dict[tuple[Tier, int], _Pool] = {}

    def pick(self, held: IntArray, tier: Tier, count: int, now: float) -> IntArray:
        """Up to `count` rows whose READY replicas in `tier` may leave now, lowest score first.

        `held`: all slot numbers of one size, ascending; keep passing the same array while its slabs
        stay the same. Never leased, pinned or (unless exempt) with a child in the tier. Fewer than
        `count`: evict these and ask again, their parents may follow. None: nothing may leave.
        With more than 32,768 rows in the catalog that stays the answer for up to 8 ms, unless a
        sample shows otherwise; with more than 262,144, each pick looks at so many of them.
        """
        if count <= 0 or not held.size:
            return _NONE
        chosen = self._lowest(held, tier, count, now)
        self._follow(held, tier, chosen)
        return chosen

    def choose(self, held: IntArray, tier: Tier, count: int, now: float) -> IntArray:
        """Up to `count` rows to evict together: the lowest leaves of `pick`, and ancestors that are
        leaves once those are gone. Children come before their parents.
        """
        if count <= 1 or not held.size:
            return self.pick(held, tier, count, now)
        leaves = self._lowest(held, tier, min(count, _CHAINS + count // _CHAINS), now)
        if not leaves.size:
            return leaves
        chains = self._chains_from(leaves.tolist(), tier, count)
        rows = np.array([row for chain in chains for row in chain], np.int64)
        scores = self._policy.scores(rows, tier, now)
        # An ancestor is worth at least its best child.
        start = 0
        for chain in chains:
            run = scores[start : start + len(chain)]
            if run.size > 1:
                np.maximum.accumulate(run, out=run)
            start += len(chain)
        chosen = rows[scores.argsort(kind="stable")[:count]]
        self._follow(held, tier, chosen)
        return chosen

    def _lowest(self, held: IntArray, tier: Tier, count: int, now: float) -> IntArray:
        """Up to `count` rows that may leave now, lowest first."""
        pool = self._pool_of(held, tier)
        found = self._next_in_line(pool, tier, count, now)
        if found is None:
            found = self._search(pool, tier, count, now)
        chosen = found[:count]
        pool.credit = min(_CREDIT_MAX, pool.credit + _SCAN_ROWS_A_VICTIM * chosen.size)
        return chosen

    def _chains_from(self, leaves: list[int], tier: Tier, count: int) -> list[list[int]]:
        """Each leaf and the ancestors that nothing but the one before keeps in place; at most
        `count` in a chain, and about twice as many in all.
        """
        catalog, replicas = self._catalog, self._catalog.replicas(tier)
        # Numbers one by one come out of these in a third of an array's time.
        parent, children = catalog.parent.data, replicas.children.data
        leases, pins = catalog.leases.data, catalog.pins.data
        state, above = replicas.state.data, catalog.host_children.data
        in_host = catalog.host_state.data
        known, left = set(leaves), 2 * count
        chains = []
        for leaf in leaves:
            chain, row, most = [leaf], parent[leaf], min(count, left)
            while row >= 0 and len(chain) < most and children[row] == 1 and row not in known:
                if state[row] != _READY or leases[row] or pins[row]:
                    break
                if tier == Tier.NVME and above[row] and not in_host[row]:
                    break
                chain.append(row)
                row = parent[row]
            chains.append(chain)
            left = max(1, left - len(chain))
        return chains

    def _pool_of(self, held: IntArray, tier: Tier) -> _Pool:
        """What is known of this size. Its slabs are its own, so the first slot names it."""
        key = (tier, int(held[0]))
        pool = self._pools.get(key)
        if pool is None or pool.held is not held:
            pool = self._pools[key] = _Pool(held)
        return pool

    def _next_in_line(self, pool: _Pool, tier: Tier, count: int, now: float) -> IntArray | None:
        """Rows from the queue and the followers, or None when a search is due."""
        if not pool.queue.size and not pool.patience:
            return None
        near = np.concatenate((pool.followers, pool.queue))
        found, scores = self._rank(self._may_leave(self._rows_of(near, tier), tier), tier, now)
        # Above the ceiling: used since the search. With too little found there was nothing else.
        ceiling = np.inf if pool.patience else pool.ceiling
        low = int(scores.searchsorted(ceiling, side="right"))
        if low < count and not (low and pool.patience):
            return None
        pool.patience = max(0, pool.patience - 1)
        pool.queue = self._slots_of(found[count:low], tier)
        return found[:low]

    def _may_leave(self, rows: IntArray, tier: Tier) -> IntArray:
        """Those of `rows`, once each, whose replica in `tier` nothing holds in place."""
        rows = rows[self._catalog.replicas(tier).state[rows] == _READY]
        # Most are no leaves: what is left to look at is little.
        rows = rows[self._is_leaf(rows, tier)]
        return distinct(rows[self._is_free(rows, tier)])

    def _rows_of(self, slots: IntArray, tier: Tier) -> IntArray:
        rows = self._catalog.replicas(tier).by_slot.rows_of(slots)
        known: IntArray = rows[rows >= 0]
        return known

    def _is_free(self, where: IntArray | slice, tier: Tier) -> BoolArray:
        catalog = self._catalog
        held = catalog.leases[where] | catalog.pins[where]
        is_free: BoolArray = (held == 0) & (catalog.replicas(tier).state[where] == _READY)
        return is_free

    def _is_leaf(self, where: IntArray | slice, tier: Tier) -> BoolArray:
        """Whether no block would be left in any tier without a way to it (I5)."""
        catalog = self._catalog
        is_leaf: BoolArray = catalog.replicas(tier).children[where] == 0
        if tier == Tier.NVME:
            is_leaf &= (catalog.host_children[where] == 0) | (catalog.host_state[where] != _ABSENT)
        else:
            # The copy below keeps the way to its children open.
            if catalog.replicas(Tier.NVME).count:
                is_leaf |= catalog.nvme_state[where] == _READY
        if np.count_nonzero(self._leaf_exempt):
            is_leaf |= self._leaf_exempt[catalog.namespace[where]]
        return is_leaf

    def _rank(self, rows: IntArray, tier: Tier, now: float) -> tuple[IntArray, FloatArray]:
        scores = self._policy.scores(rows, tier, now)
        order = scores.argsort(kind="stable")
        return rows[order], scores[order]

    def _slots_of(self, rows: IntArray, tier: Tier) -> IntArray:
        return self._catalog.replicas(tier).slot[rows]

    def _search(self, pool: _Pool, tier: Tier, count: int, now: float) -> IntArray:
        """A fresh look: at everything if that is little, else at a sample and what is known."""
        held, end = pool.held, self._catalog.rows_end
        is_whole = end <= _WINDOW
        if is_whole:
            rows = self._leaves_in(pool, tier, 0, end)
        else:
            places = min(_SAMPLE * end // held.size, _DRAWN_MAX) // _DRAWN_TOGETHER
            starts = self._rng.integers(end - _DRAWN_TOGETHER, size=places)
            drawn = self._may_leave((starts[:, None] + _TOGETHER).reshape(-1), tier)
            near = self._rows_of(np.concatenate((pool.followers, pool.queue)), tier)
            known = (self._may_leave(near, tier), self._ours(pool, tier, drawn))
            rows = distinct(np.concatenate(known))
            wanted = _KNOWN_A_VICTIM * max(count, _CHAINS)
            if rows.size < wanted:
                rows = self._scan(pool, tier, rows, wanted, now)
        rows, scores = self._rank(rows, tier, now)
        last = max(count, min(_BATCH, rows.size // _SHARE))
        pool.queue = self._slots_of(rows[count:last], tier)
        pool.ceiling = float(scores[:last][-1]) if rows.size else -np.inf
        pool.patience = _PATIENCE if rows.size < count and not is_whole else 0
        return rows

    def _scan(self, pool: _Pool, tier: Tier, rows: IntArray, wanted: int, now: float) -> IntArray:
        """`rows` and those found in the next windows of the catalog, on from the last scan's end.

        With some rows known, one window when earlier victims have earned it. With none, windows
        until there is enough, at most _WINDOWS_MAX, and not again too soon when that was fruitless.
        """
        end = self._catalog.rows_end
        if now < pool.scan_after or (rows.size and pool.credit < min(_WINDOW, end)):
            return rows
        windows = 1 if rows.size else min(_WINDOWS_MAX, -(-end // _WINDOW) + 1)
        for _ in range(windows):
            start = pool.cursor if pool.cursor < end else 0
            pool.cursor = min(start + _WINDOW, end)
            pool.credit = max(0, pool.credit - _WINDOW)
            more = self._leaves_in(pool, tier, start, pool.cursor)
            rows = distinct(np.concatenate((rows, more)))
            if rows.size >= wanted:
                break
        if not rows.size and windows > 2:
            pool.scan_after = now + _SCAN_PAUSE_SECONDS * windows
        return rows

    def _leaves_in(self, pool: _Pool, tier: Tier, start: int, stop: int) -> IntArray:
        """`_may_leave` over neighbouring rows, 20 times as fast, for this size's slots."""
        window = slice(start, stop)
        rows = start + np.flatnonzero(self._is_free(window, tier) & self._is_leaf(window, tier))
        return self._ours(pool, tier, rows)

    def _ours(self, pool: _Pool, tier: Tier, rows: IntArray) -> IntArray:
        """Those of `rows` that lie in this size's slots."""
        slots = self._slots_of(rows, tier)
        # One search after the other in nearly the same place: a third of the time.
        order = slots.argsort()
        ranked = slots[order]
        at = np.minimum(pool.held.searchsorted(ranked), pool.held.size - 1)
        is_ours = np.empty(rows.size, np.bool_)
        is_ours[order] = pool.held[at] == ranked
        ours: IntArray = rows[is_ours]
        return ours

    def _follow(self, held: IntArray, tier: Tier, victims: IntArray) -> None:
        """Remember the victims' parents, which are leaves without them, and victims not evicted."""
        pool = self._pool_of(held, tier)
        parents = self._catalog.parent[victims].astype(np.int64)
        slots = self._slots_of(distinct(parents[parents >= 0]), tier)
        latest = (slots[slots >= 0], self._slots_of(victims, tier), pool.followers)
        pool.followers = np.concatenate(latest)[: max(_FOLLOWERS, 2 * victims.size)]
