"""The value policy: keep what is expected to save the most prefill per byte and second.

Primitive: `ValuePolicy`, a Policy. Value of a replica = index of its class at its age (hazard.py)
× (seconds at stake ÷ byte) ^ 0.75. At stake is what its loss would cost: in host memory the load
from NVMe where a copy lies there, else the prefill; on NVMe the prefill less the load.

Class of a block = how often it was used × what is known of the request that used it last (how much
of it was found, how long it was, the client's hint); eviction takes uses and hint only, admission
all of it. An LRU shadow takes over where it does better
(shadow.py). NVMe admits by value against what has to leave for it, and a wear price (wear.py).

An ancestor is worth at least its best child: the picker takes leaves first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.catalog import Catalog
from kvstore.hints import HINT_CLASSES
from kvstore.policies.costs import BlockCosts
from kvstore.policies.ghosts import Ghosts, Remembered
from kvstore.policies.hazard import Hazard, Intervals
from kvstore.policies.shadow import Shadow
from kvstore.policies.wear import WearPrice
from kvstore.policy import UNKNOWN_REQUEST, RequestShape, lru_order
from kvstore.types import BoolArray, ByteArray, FloatArray, IntArray, ReplicaState, Tier

_READY = int(ReplicaState.READY)
_ABSENT = int(ReplicaState.ABSENT)
_COST_POWER = 0.75
"""Below 1: the stake is known, re-use is only guessed."""

_USE_CLASS = np.array([0, 1, 2, 2, 3])
"""Class by uses after the first: used once, twice, 3 or 4 times, more often."""
USE_CLASSES = 4
_SEEN_LIMITS = (0.125, 0.5)
_LENGTH_LIMITS = (2048, 8192, 32768)
"""Tokens."""
SHAPES = 1 + (len(_SEEN_LIMITS) + 1) * (len(_LENGTH_LIMITS) + 1)

_LOG = 4096
_SWEEP = 32768
"""Entries looked at in one go: under a millisecond."""
_FIT_TOUCHES_MIN = 1024
_FIT_SHARE = 8
"""A fit looks at everything known; it is due after a touch for each so many of that."""
_GHOSTS_A_ROW = 1.5
_RECENT = 1.0 / 64.0
"""Weight of one eviction in what is remembered of victims."""


class ValuePolicy:
    """See the module's text; `statistics` tells its state."""

    name = "value"

    def __init__(self, catalog: Catalog, costs: BlockCosts, wear: WearPrice) -> None:
        self._catalog = catalog
        self._costs = costs
        self._wear = wear
        self._hazard = Hazard(_groups(1))
        self._ghosts = Ghosts()
        self._shadow = Shadow()
        self._shape: ByteArray = np.zeros(len(catalog.parent), np.uint8)
        self._log_classes: IntArray = np.zeros(_LOG, np.int64)
        self._log_ages: FloatArray = np.zeros(_LOG)
        self._logged = 0
        self._touches_until_fit = _FIT_TOUCHES_MIN
        self._sweep_at = -1
        self._still_open = Intervals(self._hazard.classes)
        self._victim_scores: dict[Tier, float] = {}
        self._nvme_stay_seconds = np.inf
        self._nvme_victim_gain = 0.0
        self.wear_refusals = 0

    # ------------------------------------------------------------ told

    def inserted(self, rows: IntArray, now: float, request: RequestShape = UNKNOWN_REQUEST) -> None:
        """See Policy. A block that was here before counts as used again."""
        catalog = self._catalog
        self._follow_catalog()
        rows = rows[catalog.last_use[rows] == 0.0]
        if not rows.size:
            return
        found, known = self._ghosts.take(self._keys(rows))
        again = rows[found]
        if again.size:
            self._close(self._classes(known.uses, known.shapes), now - known.last_use)
            catalog.uses[again] = np.maximum(catalog.uses[again], known.uses + 1)
            was_held = self._shadow.holds(known.last_use)
            if np.count_nonzero(was_held):
                lost = self._costs.recompute_seconds(again[was_held]).sum()
                self._shadow.judge(0.0, float(lost), 0.0)
        self._shadow.moved(known.last_use, rows.size - again.size, now)
        catalog.last_use[rows] = now
        self._shape[rows] = self._shape_of(rows, request)
        self._work(rows.size, now)

    def touched(self, rows: IntArray, now: float, request: RequestShape = UNKNOWN_REQUEST) -> None:
        """See Policy."""
        catalog = self._catalog
        self._follow_catalog()
        last_use = catalog.last_use[rows]
        self._close(self._classes(catalog.uses[rows], self._shape[rows]), now - last_use)
        saved = self._costs.recompute_seconds(rows)
        held = self._shadow.holds(last_use)
        total, both = float(saved.sum()), float(saved[held].sum())
        self._shadow.judge(total - both, 0.0, both)
        self._shadow.moved(last_use, 0, now)
        catalog.last_use[rows] = now
        # Not np.add.at: a row that is named twice is used once.
        catalog.uses[rows] += 1
        self._shape[rows] = self._shape_of(rows, request)
        self._work(rows.size, now)

    def evicted(self, rows: IntArray, tier: Tier, now: float) -> None:
        """See Policy. Of a block's last replica the metadata stays."""
        catalog = self._catalog
        self._shadow.room = max(1, len(catalog))
        self._remember_victims(rows, tier, now)
        other = catalog.replicas(Tier.NVME if tier == Tier.HOST else Tier.HOST)
        rows = rows[(other.state[rows] == _ABSENT) & (catalog.last_use[rows] > 0.0)]
        if not rows.size:
            return
        self._make_room_for_ghosts(now)
        new = Remembered(
            catalog.last_use[rows],
            catalog.uses[rows].astype(np.int64),
            self._shape[rows].astype(np.int64),
        )
        self._forget(self._ghosts.put(self._keys(rows), new), now)

    # ------------------------------------------------------------ asked

    def scores(self, rows: IntArray, tier: Tier, now: float) -> FloatArray:
        """See Policy: value, or time of last use while the shadow leads."""
        if self._shadow.is_leading:
            return lru_order(self._catalog, rows)
        index = self._hazard.index(*self._classes_and_ages(rows, now))
        worth = self._stakes(rows, tier) / self._costs.bytes(rows)
        result: FloatArray = index * worth**_COST_POWER
        return result

    def admit(self, rows: IntArray, tier: Tier, now: float) -> BoolArray:
        """See Policy. Of each chain the part that brings most; rows are in chain order."""
        sizes = self._costs.bytes(rows)
        gains = self._gains(rows, now) - self._nvme_victim_gain * sizes
        worth = _best_prefixes(gains, self._starts_chain(rows))
        self._wear.offer(np.maximum(gains, 0.0) / sizes, sizes, now)
        if not self._wear.price:
            return worth
        affordable = _best_prefixes(gains - self._wear.price * sizes, self._starts_chain(rows))
        self.wear_refusals += int(np.count_nonzero(worth & ~affordable))
        self._wear.spend(float(sizes[affordable].sum()))
        return affordable

    def promote(self, rows: IntArray, now: float) -> BoolArray:
        """See Policy: those worth more than what left the host tier lately."""
        victims = self._victim_scores.get(Tier.HOST)
        if victims is None or self._shadow.is_leading:
            return np.ones(rows.size, np.bool_)
        result: BoolArray = self.scores(rows, Tier.HOST, now) > victims
        return result

    @property
    def nbytes(self) -> int:
        """Memory beside the catalog."""
        rest = self._shape.nbytes + self._log_ages.nbytes + self._log_classes.nbytes
        return rest + self._ghosts.nbytes + self._hazard.nbytes + self._still_open.nbytes

    def statistics(self) -> dict[str, float]:
        """For people."""
        return {
            "lru_leads": float(self._shadow.is_leading),
            "wear_price_seconds_per_gb": self._wear.price * 1e9,
            "ghost_slots": float(self._ghosts.slots),
            "bytes": float(self.nbytes),
        }

    # ------------------------------------------------------------ inside

    def _keys(self, rows: IntArray) -> NDArray[np.uint64]:
        keys: NDArray[np.uint64] = self._catalog.fingerprints[rows, :8].copy().view(np.uint64)[:, 0]
        return keys

    def _classes(self, uses: NDArray[np.integer], shapes: NDArray[np.integer]) -> IntArray:
        found: IntArray = _USE_CLASS[np.minimum(uses, 4)] + USE_CLASSES * shapes.astype(np.int64)
        return found

    def _classes_and_ages(self, rows: IntArray, now: float) -> tuple[IntArray, FloatArray]:
        catalog = self._catalog
        classes = self._classes(catalog.uses[rows], self._shape[rows])
        return classes, now - catalog.last_use[rows]

    def _shape_of(self, rows: IntArray, request: RequestShape) -> int:
        """Number of the request's shape and hint."""
        hint = min(request.hint, HINT_CLASSES - 1)
        if (hint + 1) * SHAPES * USE_CLASSES > self._hazard.classes:
            self._add_hints(hint)
        if not request.blocks:
            return hint * SHAPES
        seen = sum(request.blocks_found >= limit * request.blocks for limit in _SEEN_LIMITS)
        tokens = request.blocks * int(self._costs.block_tokens[self._catalog.namespace[rows[0]]])
        length = sum(tokens >= limit for limit in _LENGTH_LIMITS)
        return hint * SHAPES + 1 + seen * (len(_LENGTH_LIMITS) + 1) + length

    def _add_hints(self, hint: int) -> None:
        """Classes for a hint not seen before."""
        self._fold()
        self._hazard.grow(_groups(hint + 1))
        self._still_open = Intervals(self._hazard.classes)
        self._sweep_at = -1

    def _stakes(self, rows: IntArray, tier: Tier) -> FloatArray:
        """Seconds lost with each replica."""
        costs = self._costs
        recompute = costs.recompute_seconds(rows)
        if tier == Tier.NVME:
            return np.maximum(recompute - costs.load_seconds(rows, Tier.NVME), 0.0)
        in_host = costs.load_seconds(rows, Tier.HOST)
        lost = np.maximum(recompute - in_host, 0.0)
        has_copy = self._catalog.nvme_state[rows] == _READY
        if np.count_nonzero(has_copy):
            reload = costs.load_seconds(rows, Tier.NVME) - in_host
            lost = np.where(has_copy, np.minimum(lost, reload), lost)
        return lost

    def _gains(self, rows: IntArray, now: float) -> FloatArray:
        """Seconds an NVMe copy of each is expected to save before it has to leave again."""
        classes, ages = self._classes_and_ages(rows, now)
        chance = self._hazard.chance(classes, ages, self._nvme_stay_seconds)
        return chance * self._stakes(rows, Tier.NVME)

    def _starts_chain(self, rows: IntArray) -> BoolArray:
        starts = np.ones(rows.size, np.bool_)
        np.not_equal(self._catalog.parent[rows[1:]], rows[:-1], out=starts[1:])
        return starts

    def _remember_victims(self, rows: IntArray, tier: Tier, now: float) -> None:
        """What has to leave lately, as a moving mean: newcomers are held against it."""
        if not rows.size or self._shadow.is_leading:
            return
        weight = 1.0 - (1.0 - _RECENT) ** rows.size
        score = float(self.scores(rows, tier, now).mean())
        self._victim_scores[tier] = _nearer(self._victim_scores.get(tier), score, weight)
        if tier == Tier.NVME:
            stay = float((now - self._catalog.last_use[rows]).mean())
            known = self._nvme_stay_seconds if np.isfinite(self._nvme_stay_seconds) else None
            self._nvme_stay_seconds = _nearer(known, stay, weight)
            gain = float((self._gains(rows, now) / self._costs.bytes(rows)).mean())
            self._nvme_victim_gain = _nearer(self._nvme_victim_gain, gain, weight)

    def _close(self, classes: IntArray, ages: FloatArray) -> None:
        """Intervals that ended with a use."""
        if self._logged + classes.size > _LOG:
            self._fold()
        if classes.size > _LOG:
            self._hazard.closed.add(classes, ages)
            return
        end = self._logged + classes.size
        self._log_classes[self._logged : end] = classes
        self._log_ages[self._logged : end] = ages
        self._logged = end

    def _fold(self) -> None:
        logged = slice(0, self._logged)
        self._hazard.closed.add(self._log_classes[logged], self._log_ages[logged])
        self._logged = 0

    def _forget(self, lost: Remembered, now: float) -> None:
        """Ghosts that made way: their intervals were seen up to now, without a use."""
        if lost.uses.size:
            self._hazard.cut.add(self._classes(lost.uses, lost.shapes), now - lost.last_use)

    def _make_room_for_ghosts(self, now: float) -> None:
        wanted = _GHOSTS_A_ROW * len(self._catalog)
        if self._ghosts.slots < wanted:
            self._sweep_at = -1
            self._forget(self._ghosts.grow(int(2 * wanted)), now)

    def _follow_catalog(self) -> None:
        if len(self._shape) < len(self._catalog.parent):
            grown = np.zeros(len(self._catalog.parent), np.uint8)
            grown[: len(self._shape)] = self._shape
            self._shape = grown

    # ------------------------------------------------------------ fitting, in slices

    def _work(self, touches: int, now: float) -> None:
        """A slice of the next fit, when one is due."""
        self._touches_until_fit -= touches
        if self._touches_until_fit > 0:
            return
        if self._sweep_at < 0:
            self._still_open = Intervals(self._hazard.classes)
            self._sweep_at = 0
        self._sweep(now)
        if self._sweep_at < self._catalog.rows_end + self._ghosts.slots:
            return
        self._fold()
        self._costs.refresh()
        self._hazard.fit(self._still_open)
        self._touches_until_fit = max(_FIT_TOUCHES_MIN, self._sweep_at // _FIT_SHARE)
        self._sweep_at = -1

    def _sweep(self, now: float) -> None:
        """The open intervals of the next entries: rows first, then ghosts."""
        catalog, end = self._catalog, self._catalog.rows_end
        start, stop = self._sweep_at, self._sweep_at + _SWEEP
        self._sweep_at = stop
        if start < end:
            rows = np.arange(start, min(stop, end))
            rows = rows[(catalog.last_use[rows] > 0.0) & (catalog.parent[rows] >= -1)]
            self._still_open.add(*self._classes_and_ages(rows, now))
        if stop > end:
            found = self._ghosts.entries(max(0, start - end), stop - end)
            classes = self._classes(found.uses, found.shapes)
            self._still_open.add(classes, now - found.last_use)


def _groups(hints: int) -> IntArray:
    """Group of each class: uses and hint. How requests look tells of new blocks, less of old."""
    use, shape = np.arange(USE_CLASSES), np.arange(hints * SHAPES)
    groups: IntArray = (use[None, :] + USE_CLASSES * (shape[:, None] // SHAPES)).reshape(-1)
    return groups


def _nearer(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)


def _best_prefixes(gains: FloatArray, starts_chain: BoolArray) -> BoolArray:
    """Of each chain the blocks up to where the gains summed up are highest, if above 0."""
    chosen = np.zeros(gains.size, np.bool_)
    starts = np.flatnonzero(starts_chain)
    for start, stop in zip(starts, np.append(starts[1:], gains.size), strict=True):
        summed = gains[start:stop].cumsum()
        best = int(summed.argmax())
        chosen[start : start + best + 1] = summed[best] > 0.0
    return chosen
