"""One daemon's decisions at virtual time: the real catalog, policy and picker, no bytes.

Primitives:
  `Model`         what prefill and loads cost; `MODEL_8B`, `MODEL_70B`
  `Tiers`         host memory and NVMe as slots; `request` is one request's match, load and store
  `Outcome`       what a replay saved, and at what price
  `Timed`         a policy that says how long it took

A request goes as in the daemon: its known prefix is matched and touched, what lies on NVMe only is
loaded, what is new is stored, and admitted blocks are written at once, ancestors first. Everything
it uses is pinned until it ends.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.replay_traces import BLOCK_TOKENS, Trace
from kvstore.catalog import ABSENT_ROW, Catalog
from kvstore.costs import Costs, LinkCost, PrefillCost
from kvstore.policies import make_policy
from kvstore.policies.costs import BlockCosts
from kvstore.policies.wear import WearPrice
from kvstore.policy import Policy, RequestShape, VictimPicker
from kvstore.types import BoolArray, FloatArray, IntArray, ReplicaState, Tier

READY, ABSENT = ReplicaState.READY, ReplicaState.ABSENT
_READY, _ABSENT = int(READY), int(ABSENT)
_HOST, _NVME = LinkCost(0.0, 1 / 50e9), LinkCost(0.0, 1 / 6e9)


@dataclass(frozen=True)
class Model:
    """A model's prefill on one machine, its KV bytes a token, and the machine's links."""

    prefill: PrefillCost
    token_bytes: int
    host: LinkCost = _HOST
    nvme: LinkCost = _NVME
    block_tokens: int = BLOCK_TOKENS
    is_measured: bool = True
    """Whether anybody has told the daemon so."""

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    def block_seconds(self, depths: IntArray) -> FloatArray:
        """Prefill of the block at each depth."""
        start = depths * float(self.block_tokens)
        return self.prefill.seconds(start, start + self.block_tokens)

    def prefix_seconds(self, blocks: int) -> float:
        return self.prefill.seconds(0.0, float(blocks * self.block_tokens))

    def load_seconds(self, tier: Tier) -> float:
        """One block, up to the engine."""
        seconds = self.host.seconds(float(self.block_bytes))
        return seconds + (self.nvme.seconds(float(self.block_bytes)) if tier == Tier.NVME else 0.0)


MODEL_8B = Model(Costs.prefill_of_shape(8.03e9, 32, 4096, 4e14), 131072)
MODEL_70B = Model(Costs.prefill_of_shape(70.6e9, 80, 8192, 4e14), 327680)


class KnownCosts(Costs):
    """Beliefs that are exactly right."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    def prefill(self, namespace_index: int) -> PrefillCost:
        return self._model.prefill

    def is_calibrated(self, namespace_index: int) -> bool:
        return self._model.is_measured

    def link(self, tier: Tier) -> LinkCost:
        return self._model.nvme if tier == Tier.NVME else self._model.host


@dataclass
class Outcome:
    """What one replay came to. Seconds are of prefill saved, or of loads."""

    saved_seconds: float = 0.0
    load_seconds: float = 0.0
    host_blocks: int = 0
    nvme_blocks: int = 0
    stored_blocks: int = 0
    """Blocks that came into host memory anew."""
    written_blocks: int = 0
    """Blocks written to NVMe."""
    evicted_blocks: int = 0
    policy_seconds: float = 0.0
    wall_seconds: float = 0.0
    touches: int = 0
    metadata_bytes: int = 0
    hit_lengths: list[int] = field(default_factory=list)

    @property
    def net_seconds(self) -> float:
        return self.saved_seconds - self.load_seconds


class Timed:
    """A policy and the seconds spent in it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.policy, name)
        if not callable(found):
            return found

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return found(*arguments)
            finally:
                self.seconds += time.perf_counter() - start

        self.__dict__[name] = timed
        return timed


class Slots:
    """Numbered places of one tier."""

    def __init__(self, count: int) -> None:
        self.held: IntArray = np.arange(count)
        self._free: IntArray = np.arange(count)[::-1].copy()
        self.free = count

    def take(self, count: int) -> IntArray:
        """`count` of the free ones."""
        self.free -= count
        return self._free[self.free : self.free + count].copy()

    def give(self, slots: IntArray) -> None:
        self._free[self.free : self.free + slots.size] = slots
        self.free += slots.size


class Tiers:
    """`nvme_blocks` 0: host memory alone. `write_on_demotion`: a block is written to NVMe when it
    leaves host memory, instead of when it came; admission is not asked.
    """

    def __init__(
        self,
        policy: str,
        host_blocks: int,
        nvme_blocks: int = 0,
        *,
        model: Model = MODEL_8B,
        write_bytes_per_second: float = 0.0,
        write_on_demotion: bool = False,
        seed: int = 1,
    ) -> None:
        self.catalog = Catalog(
            host_slots=host_blocks, nvme_slots=nvme_blocks, capacity=host_blocks + nvme_blocks
        )
        self.model = model
        costs = BlockCosts(self.catalog, KnownCosts(model), np.array([model.block_tokens]))
        self.policy = Timed(
            make_policy(policy, self.catalog, costs, WearPrice(write_bytes_per_second))
        )
        self.picker = VictimPicker(
            self.catalog, self.policy, np.zeros(1, np.bool_), np.random.default_rng(seed)
        )
        self.host, self.nvme = Slots(host_blocks), Slots(nvme_blocks)
        self.outcome = Outcome()
        self._write_on_demotion = write_on_demotion
        self._load_seconds = {tier: model.load_seconds(tier) for tier in (Tier.HOST, Tier.NVME)}

    # ------------------------------------------------------------ a request

    def request(self, names: bytes, now: float) -> int:
        """One request for the chain of `names`; how many blocks of it were held."""
        catalog, asked = self.catalog, len(names) // 32
        rows = catalog.prefix_rows(names)
        below = self._below(rows)
        rows = rows[: len(below)]
        found = len(rows)
        if found:
            catalog.pins[rows] += 1
            self.policy.touched(rows, now, RequestShape(asked, found))
            if self.nvme.held.size:
                self._write(self._unwritten(rows), now)
                self._load(rows[below], now)
            self._count(found, int(np.count_nonzero(below)))
        if found < asked:
            rows = self._store(rows, names, now)
        catalog.pins[rows] -= 1
        self.outcome.touches += asked
        self.outcome.hit_lengths.append(found)
        return found

    def _below(self, rows: IntArray) -> BoolArray:
        """Of the readable prefix, which blocks lie on NVMe only."""
        if not self.nvme.held.size:
            return np.zeros(rows.size, np.bool_)
        below: BoolArray = self.catalog.host_state[rows] != _READY
        lost = below & (self.catalog.nvme_state[rows] != _READY)
        return below[: int(lost.argmax())] if lost.any() else below

    def _count(self, found: int, below: int) -> None:
        outcome = self.outcome
        outcome.saved_seconds += self.model.prefix_seconds(found)
        outcome.host_blocks += found - below
        outcome.nvme_blocks += below
        outcome.load_seconds += (found - below) * self._load_seconds[Tier.HOST]
        outcome.load_seconds += below * self._load_seconds[Tier.NVME]

    def _load(self, rows: IntArray, now: float) -> None:
        """Blocks come up for this request; those worth it stay in host memory."""
        rows = rows[self.policy.promote(rows, now)] if rows.size else rows
        rows = rows[: self._make_room(rows.size, now)]
        if rows.size:
            self.catalog.set_host(rows, READY, self.host.take(rows.size))
            self.policy.inserted(rows, now)

    def _store(self, rows: IntArray, names: bytes, now: float) -> IntArray:
        """The rest of the chain comes into host memory, as far as there is room."""
        catalog, found = self.catalog, len(rows)
        room = self._make_room(len(names) // 32 - found, now)
        if not room:
            return rows
        new = catalog.add_chain(
            names[32 * found : 32 * (found + room)],
            parent=int(rows[-1]) if found else ABSENT_ROW,
            namespace=0,
            clear_count=0,
            depth=found,
            length=self.model.block_bytes,
        )
        catalog.pins[new] += 1
        catalog.set_host(new, READY, self.host.take(room))
        self.policy.inserted(new, now, RequestShape(found + room, found))
        self.outcome.stored_blocks += room
        if self.nvme.held.size:
            self._write(new, now)
        return np.concatenate((rows, new))

    # ------------------------------------------------------------ room

    def _make_room(self, count: int, now: float) -> int:
        """Evict until `count` host slots are free; how many are, at most `count`."""
        while self.host.free < count:
            victims = self.picker.choose(self.host.held, Tier.HOST, count - self.host.free, now)
            if not victims.size:
                break
            if self._write_on_demotion:
                self._demote(victims, now)
            self._drop_host(victims, now)
        return min(count, self.host.free)

    def _drop_host(self, rows: IntArray, now: float) -> None:
        catalog = self.catalog
        self.host.give(catalog.host_slot[rows])
        catalog.set_host(rows, ABSENT)
        self.policy.evicted(rows, Tier.HOST, now)
        catalog.remove_if_bare(rows)
        self.outcome.evicted_blocks += rows.size

    # ------------------------------------------------------------ NVMe

    def _unwritten(self, rows: IntArray) -> IntArray:
        catalog = self.catalog
        return rows[(catalog.host_state[rows] == _READY) & (catalog.nvme_state[rows] == _ABSENT)]

    def _write(self, rows: IntArray, now: float) -> None:
        """Write what is admitted."""
        if rows.size and not self._write_on_demotion:
            self._put(rows[self.policy.admit(rows, Tier.NVME, now)], now)

    def _demote(self, rows: IntArray, now: float) -> None:
        # Held: a copy on NVMe may be the reason why a block may leave host memory.
        self.catalog.pins[rows] += 1
        self._put(rows[self.catalog.nvme_state[rows] == _ABSENT], now)
        self.catalog.pins[rows] -= 1

    def _put(self, rows: IntArray, now: float) -> None:
        """Write blocks and those of their ancestors that are missing, ancestors first."""
        catalog = self.catalog
        chosen: dict[int, None] = {}
        for row in rows.tolist():
            path = []
            while row >= 0 and row not in chosen and catalog.nvme_state[row] != _READY:
                path.append(row)
                row = int(catalog.parent[row])
            if all(catalog.host_state[path] == _READY):
                chosen.update(dict.fromkeys(path[::-1]))
        rows = np.array(list(chosen), np.int64)
        parents = catalog.parent[rows]
        held = np.concatenate((rows, parents[parents >= 0]))
        np.add.at(catalog.pins, held, 1)
        while self.nvme.free < rows.size:
            missing = rows.size - self.nvme.free
            victims = self.picker.choose(self.nvme.held, Tier.NVME, missing, now)
            if not victims.size:
                rows = rows[: self.nvme.free]
                break
            self._drop_nvme(victims, now)
        np.subtract.at(catalog.pins, held, 1)
        if rows.size:
            catalog.checksums[rows] = 1  # there are no bytes to sum up
            catalog.set_nvme(rows, READY, self.nvme.take(rows.size))
            self.outcome.written_blocks += rows.size

    def _drop_nvme(self, rows: IntArray, now: float) -> None:
        catalog = self.catalog
        self.nvme.give(catalog.nvme_slot[rows])
        catalog.set_nvme(rows, ABSENT)
        self.policy.evicted(rows, Tier.NVME, now)
        catalog.remove_if_bare(rows)


_APART_SECONDS = 1e-5
"""Requests at the same time in the trace come one after the other."""
_START_SECONDS = 1.0


def times_of(trace: Trace) -> FloatArray:
    """When each request comes, strictly rising, float64[requests]."""
    times: FloatArray = _START_SECONDS + trace.times + np.arange(trace.requests) * _APART_SECONDS
    return times


def replay(trace: Trace, tiers: Tiers, told: Any = lambda done: None) -> Outcome:
    """All requests of `trace`; `told(request)` is called now and then."""
    times, starts = times_of(trace).tolist(), trace.starts.tolist()
    began = time.perf_counter()
    for request, now in enumerate(times):
        blocks = trace.blocks[starts[request] : starts[request + 1]]
        tiers.request(trace.names[blocks].tobytes(), now)
        if not request % 256:
            told(request)
    outcome = tiers.outcome
    outcome.wall_seconds = time.perf_counter() - began
    outcome.policy_seconds = tiers.policy.seconds
    outcome.metadata_bytes = int(getattr(tiers.policy.policy, "nbytes", 0))
    told(trace.requests)
    return outcome
