"""The planner in virtual time: its choices beside the best fixed ones, with costs it got wrong.

Every cell of the grid (speed of the link, tokens stored, tokens new) is played several times. The
planner believes costs that are each off by up to 20 %; what then happens is played with the true
ones, block by block or layer by layer, give-up times included. Beside it stand the fixed choices,
played with the true costs too: no load, a quarter, half, three quarters, all; for engines that
compute while they load, meeting at these points as well. The note says what the best number of
blocks in hindsight, another one in each cell, would leave.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from bench.harness import Bar, Context, Part, Reading
from kvstore.costs import Costs, LinkCost, PrefillCost
from kvstore.planner import Pipeline, Plan, Prompt, plan
from kvstore.types import FloatArray

ERROR = 0.2
BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 131_072
UNIT_BLOCKS = 8
STORED_TOKENS = (512, 2048, 8192, 32768)
NEW_TOKENS = (16, 128, 1024, 4096)
SPEEDS = tuple(2.0**power for power in range(-4, 5))
"""Of the link, in multiples of the one at which loading takes as long as computing."""
SHARES = (0.25, 0.5, 0.75, 1.0)
STAGES = 8
"""Parts of a block: what a layer-wise load arrives in."""
PREFILL = Costs.prefill_of_shape(8.03e9, 32, 4096, 4e14)
HOST = LinkCost(2e-5, 1 / 2e10)
LATENCY_SECONDS = 2e-4
NEVER_LOSES = Bar("planner_never_loses_p95", "ratio", at_most=1.05)


@dataclass(frozen=True)
class Engine:
    """What an adapter can do."""

    name: str
    stages: int = 1
    unit_blocks: int = 0


ENGINES = (
    Engine("prefix"),
    Engine("layers", stages=STAGES),
    Engine("meeting", unit_blocks=UNIT_BLOCKS),
    Engine("layers and meeting", stages=STAGES, unit_blocks=UNIT_BLOCKS),
)


def _compute(world: Pipeline, start: int, end: int) -> float:
    return world.call_seconds + world.prefill.seconds(float(start), float(end))


def _arrivals(prompt: Prompt, world: Pipeline, blocks: int) -> FloatArray:
    """When each of so many blocks from NVMe is in the engine's memory, in the order of reading."""
    each = prompt.block_bytes * world.host.seconds_per_byte
    number = np.arange(1.0, blocks + 1)
    read = world.nvme.seconds(world.queued_bytes + number * prompt.block_bytes)
    # The copy of a block begins when it is read and the copy before has ended.
    behind_first = max(world.host.latency_seconds, read[0]) + number * each
    arrived: FloatArray = np.maximum(behind_first, read + each)
    return arrived


def _in_layers(prompt: Prompt, world: Pipeline, blocks: int, made: Plan | None) -> float:
    """First token when layers of all blocks arrive in turn and are computed on at once."""
    rest = _compute(world, blocks * prompt.block_tokens, prompt.tokens) / STAGES
    pieces = replace(prompt, block_bytes=prompt.block_bytes * blocks // STAGES)
    done = news = 0.0
    for stage, arrived in enumerate(_arrivals(pieces, world, STAGES).tolist()):
        if made is not None:  # fixed choices wait to the end
            given_up = made.patience(stage / STAGES, (stage + 1) / STAGES, news)
            if arrived > given_up:
                return max(done, given_up) + _compute(world, 0, prompt.tokens)
        done, news = max(done, arrived) + rest, arrived
    return done


def _in_blocks(prompt: Prompt, world: Pipeline, blocks: int, made: Plan | None) -> float:
    """First token when computing begins after the load, or after as much of it as came in time."""
    arrivals = _arrivals(prompt, world, blocks)
    news = 0.0
    for ready, arrived in enumerate(arrivals.tolist()):
        if made is None:
            break
        given_up = made.patience(ready / blocks, (ready + 1) / blocks, news)
        if arrived > given_up:
            start = ready * prompt.block_tokens
            return max(news, given_up) + _compute(world, start, prompt.tokens)
        news = arrived
    return float(arrivals[-1]) + _compute(world, blocks * prompt.block_tokens, prompt.tokens)


def _meeting(prompt: Prompt, world: Pipeline, made: Plan) -> float:
    """First token when blocks are loaded from the back while the front is computed.

    Before each unit of the front the engine asks whether the load will be there sooner.
    """
    stored, unit, total = len(prompt.below_host), prompt.unit_blocks, made.blocks
    arrivals = _arrivals(prompt, world, total)
    front, at = 0.0, 0
    while at < stored:
        stop = min(at + unit, stored)
        needed = _compute(world, at * prompt.block_tokens, stop * prompt.block_tokens)
        if at >= made.first:
            ready = int(arrivals.searchsorted(front, side="right")) / total
            wanted = (stored - at) / total
            if ready >= wanted or made.remaining_seconds(ready, wanted, front) < needed:
                break
        front, at = front + needed, stop
    loaded = float(arrivals[stored - at - 1]) if at < stored else 0.0
    return max(front, loaded) + _compute(world, stored * prompt.block_tokens, prompt.tokens)


def _fixed_meeting(prompt: Prompt, world: Pipeline, first: int) -> float:
    """The same with a meeting point chosen before: wait there for the other side."""
    stored, each = len(prompt.below_host), prompt.block_tokens
    loaded = float(_arrivals(prompt, world, stored - first)[-1])
    front = world.prefill.seconds(0.0, float(first * each))
    front += world.call_seconds * (first // prompt.unit_blocks)
    return max(front, loaded) + _compute(world, stored * each, prompt.tokens)


def _played(prompt: Prompt, world: Pipeline, made: Plan) -> float:
    if not made.blocks:
        return _compute(world, 0, prompt.tokens)
    if made.from_back:
        return _meeting(prompt, world, made)
    play = _in_layers if world.stages > 1 else _in_blocks
    return play(prompt, world, made.last, made)


def _best_fixed(prompt: Prompt, world: Pipeline) -> float:
    """No load, or the best of the shares."""
    stored, unit = len(prompt.below_host), prompt.unit_blocks
    play = _in_layers if world.stages > 1 else _in_blocks
    choices = [_compute(world, 0, prompt.tokens)]
    for share in SHARES:
        choices.append(play(prompt, world, max(1, int(stored * share)), None))
        if unit and share < 1:
            choices.append(_fixed_meeting(prompt, world, int(stored * share) // unit * unit))
    return min(choices)


def _best_in_hindsight(prompt: Prompt, world: Pipeline) -> float:
    """Over every number of blocks and every meeting point."""
    stored = len(prompt.below_host)
    play = _in_layers if world.stages > 1 else _in_blocks
    best = min(_compute(world, 0, prompt.tokens), play(prompt, world, stored, None))
    best = min(best, _lowest(lambda at: play(prompt, world, at + 1, None), stored))
    if prompt.unit_blocks:
        unit = prompt.unit_blocks
        best = min(
            best, _lowest(lambda at: _fixed_meeting(prompt, world, at * unit), stored // unit)
        )
    return best


def _lowest(seconds: Callable[[int], float], count: int) -> float:
    """The least of `count` values that fall and then rise: coarse steps, then all around it."""
    step = max(1, count // 32)
    at = min(range(0, count, step), key=seconds)
    return min(seconds(near) for near in range(max(0, at - step), min(count, at + step + 1)))


def _off(random: np.random.Generator, link: LinkCost) -> LinkCost:
    latency, rate = random.uniform(1 - ERROR, 1 + ERROR, 2)
    return LinkCost(link.latency_seconds * latency, link.seconds_per_byte * rate)


def _believed(random: np.random.Generator, world: Pipeline) -> Pipeline:
    """The same with each cost off by up to ERROR."""
    each = random.uniform(1 - ERROR, 1 + ERROR)
    prefill = PrefillCost(
        world.prefill.seconds_per_token * each, world.prefill.seconds_per_token_position * each
    )
    return replace(
        world, prefill=prefill, host=_off(random, world.host), nvme=_off(random, world.nvme)
    )


def cell(
    random: np.random.Generator, engine: Engine, speed: float, stored: int, new: int
) -> tuple[float, float]:
    """Time to first token ÷ the best fixed choice's, once."""
    seconds = PREFILL.seconds(0.0, float(stored)) / speed
    world = Pipeline(
        PREFILL,
        HOST,
        LinkCost(LATENCY_SECONDS, seconds / (stored * BYTES_PER_TOKEN)),
        stages=engine.stages,
    )
    prompt = Prompt(
        stored + new,
        BLOCK_TOKENS,
        BLOCK_TOKENS * BYTES_PER_TOKEN,
        np.ones(stored // BLOCK_TOKENS, np.bool_),
        unit_blocks=engine.unit_blocks,
    )
    made = plan(prompt, _believed(random, world))
    seen = _played(prompt, world, made)
    return seen / _best_fixed(prompt, world), seen / _best_in_hindsight(prompt, world)


def _never_loses(context: Context) -> Iterator[Reading]:
    random = np.random.default_rng(4)
    grid = list(itertools.product(SPEEDS, STORED_TOKENS, NEW_TOKENS))
    rounds = context.several(8, 2)
    ratios, notes = [], []
    for engine in ENGINES:
        context.step(
            f"{len(grid)} cells, {rounds} times each: an engine that loads by {engine.name}"
        )
        seen = np.array([cell(random, engine, *at) for at in grid for _ in range(rounds)])
        ratios.append(seen[:, 0])
        p95, hindsight = np.percentile(seen, 95, axis=0)
        notes.append(f"{engine.name} {p95:.3f} ({hindsight:.3f})")
    together = np.concatenate(ratios)
    yield Reading(
        NEVER_LOSES.name,
        float(np.percentile(together, 95)),
        f"{len(grid)} cells x {rounds} x {len(ENGINES)} kinds of engine, costs off by up to "
        f"{ERROR:.0%}; max {together.max():.2f}, median {np.median(together):.3f}; p95 by kind, "
        f"and in brackets beside the best choice in hindsight: {', '.join(notes)}",
    )


PART = Part("the planner in virtual time", (NEVER_LOSES,), _never_loses)
