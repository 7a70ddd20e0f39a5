"""The value policy: keep what is expected to save the most prefill per byte and second.

Primitive: `ValuePolicy`, a Policy. Value of a replica = index of its class at its age (hazard.py)
× (seconds at stake ÷ byte) ^ 0.75: the stake is known, re-use only guessed. At stake is what its
loss would cost: in host memory the load from NVMe where a copy lies there, else the prefill; on
NVMe the prefill less the load.

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
from kvstore.policies.learner import USE_CLASSES, Learner, classes_of, mark, used_again
from kvstore.policies.wear import WearPrice
from kvstore.policy import UNKNOWN_REQUEST, RequestShape, lru_order
from kvstore.types import BoolArray, FloatArray, IntArray, ReplicaState, Tier

_READY = int(ReplicaState.READY)
_ABSENT = int(ReplicaState.ABSENT)
_SEEN_LIMITS = (0.125, 0.5)
_LENGTH_LIMITS = (2048, 8192, 32768)
"""Tokens."""
SHAPES = 1 + (len(_SEEN_LIMITS) + 1) * (len(_LENGTH_LIMITS) + 1)
_VICTIMS_A_LOOK = 64
"""Evictions between two looks at what leaves,"""
_LOOK_WEIGHT = 0.25
"""and what a look weighs in what is remembered of them."""
_WORTH_A_WRITE = 2.0
"""What comes must bring so many times what leaves for it: a swap for the same writes for nothing.
"""
_STAY_SECONDS_MIN = 1.0


class ValuePolicy:
    """See the module's text; `statistics` tells its state."""

    name = "value"

    def __init__(self, catalog: Catalog, costs: BlockCosts, wear: WearPrice) -> None:
        self._catalog = catalog
        self._costs = costs
        self._wear = wear
        # Only admission asks how requests looked; without NVMe these classes would stay empty.
        self._shapes = SHAPES if catalog.replicas(Tier.NVME).by_slot.slots_max else 1
        self._learner = Learner(catalog, costs, self._groups(1))
        self._victims_unseen = dict.fromkeys((Tier.HOST, Tier.NVME), _VICTIMS_A_LOOK)
        self._victim_scores: dict[Tier, float] = {}
        self._host_full = 0
        """Replicas in host memory when one had to leave."""
        self._started = np.inf
        self._nvme_stay_seconds: float | None = None
        self._nvme_victim_gain = 0.0
        self.wear_refusals = 0

    # ------------------------------------------------------------ told

    def inserted(self, rows: IntArray, now: float, request: RequestShape = UNKNOWN_REQUEST) -> None:
        """See Policy. A block that was here before counts as used again."""
        catalog, learner = self._catalog, self._learner
        learner.follow_catalog()
        rows = rows[catalog.last_use[rows] == 0.0]
        if not rows.size:
            return
        self._started = min(self._started, now)
        catalog.last_use[rows] = now
        marks = mark(catalog.uses[rows], self._shape_of(rows, request))
        learner.marks[rows] = marks
        learner.price(rows)
        learner.came(rows, marks, now)

    def touched(self, rows: IntArray, now: float, request: RequestShape = UNKNOWN_REQUEST) -> None:
        """See Policy."""
        catalog, learner = self._catalog, self._learner
        marks = learner.marks[rows]
        learner.used(rows, marks, now)
        catalog.last_use[rows] = now
        # Not np.add.at: a row that is named twice is used once.
        catalog.uses[rows] += 1
        learner.marks[rows] = used_again(marks, self._shape_of(rows, request))

    def evicted(self, rows: IntArray, tier: Tier, now: float) -> None:
        """See Policy. Of a block's last replica the metadata stays."""
        catalog, learner = self._catalog, self._learner
        learner.shadow.room = max(1, len(catalog))
        if tier == Tier.HOST:
            self._host_full = rows.size + catalog.replicas(tier).count
        self._victims_unseen[tier] += rows.size
        if self._victims_unseen[tier] >= _VICTIMS_A_LOOK and rows.size:
            self._look_at_victims(rows, tier, now)
        other = catalog.replicas(Tier.NVME if tier == Tier.HOST else Tier.HOST)
        is_known = catalog.last_use[rows] > 0.0
        if other.count:
            is_known &= other.state[rows] == _ABSENT
        rows = rows[is_known]
        if rows.size:
            learner.left(rows, now)

    # ------------------------------------------------------------ asked

    def scores(self, rows: IntArray, tier: Tier, now: float) -> FloatArray:
        """See Policy: value, or time of last use while the shadow leads."""
        learner = self._learner
        if learner.shadow.is_leading:
            return lru_order(self._catalog, rows)
        ages = now - self._catalog.last_use[rows]
        index = learner.hazard.index(classes_of(learner.marks[rows]), ages)
        stakes = self._stakes(rows, tier)
        # To the power of 0.75, in a third of the time.
        result: FloatArray = index * np.sqrt(stakes * np.sqrt(stakes))
        return result

    def admit(self, rows: IntArray, tier: Tier, now: float) -> BoolArray:
        """See Policy. Of each chain the part that brings most; rows are in chain order."""
        sizes = self._costs.bytes(rows)
        gains = self._gains(rows, now) - _WORTH_A_WRITE * self._nvme_victim_gain
        starts = self._starts_chain(rows)
        worth = _best_prefixes(gains * sizes, starts)
        self._wear.offer(np.maximum(gains, 0.0), sizes, now)
        if not self._wear.price:
            self._wear.spend(float(sizes[worth].sum()))
            return worth
        affordable = _best_prefixes((gains - self._wear.price) * sizes, starts)
        self.wear_refusals += int(np.count_nonzero(worth & ~affordable))
        self._wear.spend(float(sizes[affordable].sum()))
        return affordable

    def promote(self, rows: IntArray, now: float) -> BoolArray:
        """See Policy: those worth more than what left host memory lately, all if there is room."""
        victims, host = self._victim_scores.get(Tier.HOST), self._catalog.replicas(Tier.HOST)
        has_room = host.count + np.count_nonzero(host.state[rows] == _ABSENT) <= self._host_full
        if victims is None or has_room or self._learner.shadow.is_leading:
            return np.ones(rows.size, np.bool_)
        result: BoolArray = self.scores(rows, Tier.HOST, now) > victims
        return result

    @property
    def nbytes(self) -> int:
        """Memory beside the catalog."""
        return self._learner.nbytes

    def statistics(self) -> dict[str, float]:
        """For people."""
        return {
            "lru_leads": float(self._learner.shadow.is_leading),
            "wear_price_seconds_per_gb": self._wear.price * 1e9,
            "ghost_slots": float(self._learner.ghosts.slots),
            "bytes": float(self.nbytes),
        }

    # ------------------------------------------------------------ inside

    def _shape_of(self, rows: IntArray, request: RequestShape) -> int:
        """Number of the request's shape and hint."""
        hint = min(request.hint, HINT_CLASSES - 1)
        if (hint + 1) * self._shapes * USE_CLASSES > self._learner.hazard.classes:
            self._learner.grow(self._groups(hint + 1))
        if self._shapes == 1 or not request.blocks:
            return hint * self._shapes
        seen = sum(request.blocks_found >= limit * request.blocks for limit in _SEEN_LIMITS)
        tokens = request.blocks * int(self._costs.block_tokens[self._catalog.namespace[rows[0]]])
        length = sum(tokens >= limit for limit in _LENGTH_LIMITS)
        return hint * self._shapes + 1 + seen * (len(_LENGTH_LIMITS) + 1) + length

    def _groups(self, hints: int) -> IntArray:
        """Of each class: uses and hint. How requests look tells of new blocks, less of old ones."""
        use, shape = np.arange(USE_CLASSES), np.arange(hints * self._shapes)
        groups: IntArray = use[None, :] + USE_CLASSES * (shape[:, None] // self._shapes)
        return groups.reshape(-1)

    def _stakes(self, rows: IntArray, tier: Tier) -> NDArray[np.float32]:
        """Seconds a byte lost with each replica, float32[n]."""
        host, nvme = self._costs.byte_seconds(Tier.HOST), self._costs.byte_seconds(Tier.NVME)
        if tier == Tier.GPU:
            return np.full(rows.size, host, np.float32)  # the host replica stays: its way is all
        below = host if tier == Tier.HOST else nvme
        lost: NDArray[np.float32] = np.maximum(self._learner.density[rows] - below, 0.0)
        if tier == Tier.HOST and self._catalog.replicas(Tier.NVME).count:
            # Of a copy below a load is all that is lost, and costs the same for every byte.
            is_below = self._catalog.nvme_state[rows] == _READY
            np.minimum(lost, np.float32(nvme - host), out=lost, where=is_below)
        return lost

    def _gains(self, rows: IntArray, now: float) -> FloatArray:
        """Seconds a byte that an NVMe copy of each is expected to save before it has to leave."""
        ages = now - self._catalog.last_use[rows]
        classes = classes_of(self._learner.marks[rows])
        stay = self._nvme_stay_seconds
        if stay is None:
            # Nothing had to leave in all that time.
            stay = max(now - self._started, _STAY_SECONDS_MIN)
        chance = self._learner.hazard.chance(classes, ages, stay)
        return chance * self._stakes(rows, Tier.NVME)

    def _starts_chain(self, rows: IntArray) -> BoolArray:
        starts = np.ones(rows.size, np.bool_)
        np.not_equal(self._catalog.parent[rows[1:]], rows[:-1], out=starts[1:])
        return starts

    def _look_at_victims(self, rows: IntArray, tier: Tier, now: float) -> None:
        """What has to leave lately, as a moving mean: newcomers are held against it."""
        self._victims_unseen[tier] = 0
        if not self._learner.shadow.is_leading:
            score = float(self.scores(rows, tier, now).mean())
            self._victim_scores[tier] = _nearer(self._victim_scores.get(tier), score)
        if tier == Tier.NVME:
            stay = float((now - self._catalog.last_use[rows]).mean())
            self._nvme_stay_seconds = _nearer(self._nvme_stay_seconds, stay)
            gain = float(self._gains(rows, now).mean())
            self._nvme_victim_gain = _nearer(self._nvme_victim_gain, gain)


def _nearer(old: float | None, new: float) -> float:
    return new if old is None else old + _LOOK_WEIGHT * (new - old)


def _best_prefixes(gains: FloatArray, starts_chain: BoolArray) -> BoolArray:
    """Of each chain the blocks up to where the gains summed up are highest, if above 0."""
    chosen = np.zeros(gains.size, np.bool_)
    starts = np.flatnonzero(starts_chain)
    for start, stop in zip(starts, np.append(starts, gains.size)[1:], strict=True):
        summed = gains[start:stop].cumsum()
        best = int(summed.argmax())
        chosen[start : start + best + 1] = summed[best] > 0.0
    return chosen
