"""What judgement itself costs: time a touch, memory a block, time an eviction.

Primitive: `PARTS`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from bench.harness import Bar, Context, Part, Reading, spread
from bench.replay_cache import MODEL_8B, KnownCosts
from bench.replay_single import SIZES, Cell, measured, room
from bench.replay_traces import BLOCK_TOKENS
from kvstore.catalog import ABSENT_ROW, Catalog
from kvstore.policies import make_policy
from kvstore.policies.costs import BlockCosts
from kvstore.policies.wear import WearPrice
from kvstore.policy import VictimPicker
from kvstore.types import ReplicaState, Tier

_TOUCH = Bar("policy_us_per_touch", "µs", at_most=1.5)
_BYTES = Bar("metadata_bytes_per_block", "bytes", at_most=64)
_RATIO = Bar("eviction_cost_1M_vs_10k_median", "ratio", at_most=2.0)
_MICROSECONDS = Bar("eviction_us_at_1M", "µs", at_most=25)
CHAIN_BLOCKS = 16
VICTIMS = 64


def _amortised(context: Context) -> Iterable[Reading]:
    """Over the largest cell of each trace."""
    cells = [Cell(trace, max(sizes), context.is_quick) for trace, sizes in SIZES.items()]
    outcomes = {cell.name: measured(cell).outcome for cell in cells}
    seconds = sum(outcome.policy_seconds for outcome in outcomes.values())
    touches = sum(outcome.touches for outcome in outcomes.values())
    each = ", ".join(
        f"{name} {1e6 * outcome.policy_seconds / outcome.touches:.2f}"
        for name, outcome in outcomes.items()
    )
    yield Reading(_TOUCH.name, 1e6 * seconds / touches, f"all {touches:,} touches; {each}")
    sizes = {cell.name: outcomes[cell.name].metadata_bytes / room(cell) for cell in cells}
    largest = max(cells, key=room)
    told = ", ".join(
        f"{cell.name} {sizes[cell.name]:.0f} ({room(cell):,} blocks)" for cell in cells
    )
    yield Reading(_BYTES.name, sizes[largest.name], f"{told}; fixed tables included")


class _Full:
    """A full tier of chains, half of its blocks leased, two block sizes in turn."""

    def __init__(self, blocks: int) -> None:
        self.catalog = Catalog(host_slots=blocks, capacity=blocks)
        costs = BlockCosts(self.catalog, KnownCosts(MODEL_8B), np.array([BLOCK_TOKENS]))
        self.policy = make_policy("value", self.catalog, costs, WearPrice(0.0))
        rng = np.random.default_rng(7)
        names = np.random.default_rng(3)
        self.picker = VictimPicker(self.catalog, self.policy, np.zeros(1, np.bool_), rng)
        self.now = 1.0
        sizes = blocks // CHAIN_BLOCKS
        for number in range(sizes):
            rows = self.catalog.add_chain(
                names.bytes(32 * CHAIN_BLOCKS),
                parent=ABSENT_ROW,
                namespace=0,
                clear_count=0,
                depth=0,
                length=MODEL_8B.block_bytes,
            )
            slots = np.arange(number * CHAIN_BLOCKS, (number + 1) * CHAIN_BLOCKS)
            self.catalog.set_host(rows, ReplicaState.READY, slots)
            self.now += 1e-3
            self.policy.inserted(rows, self.now)
            self.catalog.leases[rows] += int(rng.random() < 0.5)
        every = np.arange(sizes * CHAIN_BLOCKS)
        chains = every // CHAIN_BLOCKS
        self.held = (every[chains % 2 == 0], every[chains % 2 == 1])

    def evict(self, turn: int) -> float:
        """Seconds a block: look for victims and take them out of the catalog."""
        start = time.perf_counter()
        victims = self.picker.choose(self.held[turn % 2], Tier.HOST, VICTIMS, self.now)
        self.catalog.set_host(victims, ReplicaState.ABSENT)
        self.policy.evicted(victims, Tier.HOST, self.now)
        self.catalog.remove_if_bare(victims)
        self.now += 1e-3
        return (time.perf_counter() - start) / max(1, victims.size)


def _evictions(context: Context) -> Iterable[Reading]:
    large = context.several(1_000_000, 100_000)
    context.step(f"filling a tier of {large:,} blocks")
    small_tier, large_tier = _Full(10_000), _Full(large)
    turns = context.several(60, 20)
    small = [small_tier.evict(turn) for turn in range(turns)]
    big = [large_tier.evict(turn) for turn in range(turns)]
    ratio = float(np.median(big) / np.median(small))
    told = f"{large:,} blocks, {VICTIMS} victims at a time, half leased, two sizes"
    yield Reading(_RATIO.name, ratio, f"{told}; spread at {large:,}: {spread(big)} s")
    yield Reading(_MICROSECONDS.name, 1e6 * float(np.median(big)), told)


PARTS = [
    Part("what the policy costs", (_TOUCH, _BYTES), _amortised),
    Part("what an eviction costs", (_RATIO, _MICROSECONDS), _evictions),
]
