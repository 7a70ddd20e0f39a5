"""The planner beside a plain enumeration of every split, on random requests and machines."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.costs import LinkCost, PrefillCost
from kvstore.planner import ERROR, Pipeline, Plan, Prompt, Watch, plan

rates = st.floats(1e-12, 1e-6)
links = st.builds(LinkCost, st.floats(0, 1e-2), rates)
pipelines = st.builds(
    Pipeline,
    st.builds(PrefillCost, st.floats(1e-7, 1e-2), st.floats(0, 1e-7)),
    links,
    links,
    st.floats(0, 0.1),
    st.floats(0, 1e8),
    st.integers(1, 8),
)


@st.composite
def prompts(draw) -> Prompt:
    below = draw(st.lists(st.booleans(), max_size=40))
    block_tokens = draw(st.sampled_from((1, 16, 128)))
    tokens = len(below) * block_tokens + draw(st.integers(1, 500))
    return Prompt(
        tokens,
        block_tokens,
        draw(st.integers(1, 1 << 22)),
        np.array(below, np.bool_),
        draw(st.integers(0, min(45, tokens // block_tokens))),
        draw(st.sampled_from((0, 1, 3, 8))),
        draw(st.booleans()),
    )


def hedged(one: float, other: float, steps: int) -> float:
    total = 0.0
    for slow, fast in ((1 - ERROR, 1 + ERROR), (1 + ERROR, 1 - ERROR), (1, 1)):
        a, b = one * slow, other * fast
        total += max(a + b / steps, a / steps + b) if steps else max(a, b)
    return total / 3


def load(prompt: Prompt, world: Pipeline, first: int, last: int) -> float:
    below = int(prompt.below_host[first:last].sum())
    copied = world.host.seconds(float((last - first) * prompt.block_bytes))
    if not below:
        return copied
    read = world.nvme.seconds(below * prompt.block_bytes + world.queued_bytes)
    return max(read + world.host.seconds(float(prompt.block_bytes)), copied)


def compute(prompt: Prompt, world: Pipeline, first_block: int, last_tokens: int) -> float:
    start = float(first_block * prompt.block_tokens)
    return world.call_seconds + world.prefill.seconds(start, float(last_tokens))


def every_choice(prompt: Prompt, world: Pipeline) -> list[float]:
    held, stored = prompt.held_blocks, len(prompt.below_host)
    choices = [compute(prompt, world, held, prompt.tokens)]
    for last in range(held + 1, stored + 1):
        if prompt.is_whole and last < stored:
            continue
        loading = load(prompt, world, held, last)
        rest = compute(prompt, world, last, prompt.tokens)
        if world.stages > 1:
            choices.append(hedged(loading, rest, world.stages))
        else:
            choices.append(loading + rest)
    if prompt.unit_blocks and not prompt.is_whole:
        for units, first in enumerate(range(held, stored, prompt.unit_blocks)):
            front = world.call_seconds * units
            front += world.prefill.seconds(
                float(held * prompt.block_tokens), float(first * prompt.block_tokens)
            )
            tail = compute(prompt, world, stored, prompt.tokens)
            choices.append(hedged(load(prompt, world, first, stored), front, 0) + tail)
    return choices


@settings(max_examples=60, deadline=None)
@given(prompts(), pipelines)
def test_no_split_is_predicted_to_be_faster(prompt: Prompt, world: Pipeline) -> None:
    made = plan(prompt, world)
    best = min(every_choice(prompt, world))
    assert made.ttft_seconds <= best * (1 + 1e-9)
    assert made.ttft_seconds >= best * (1 - 1e-9)
    assert made.ttft_seconds <= made.recompute_seconds * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(prompts(), pipelines)
def test_a_plan_can_be_carried_out(prompt: Prompt, world: Pipeline) -> None:
    made = plan(prompt, world)
    stored = len(prompt.below_host)
    if not made.blocks:
        assert made.ttft_seconds == made.recompute_seconds
        return
    assert prompt.held_blocks <= made.first < made.last <= stored
    if made.from_back:
        assert made.last == stored
        assert (made.first - prompt.held_blocks) % prompt.unit_blocks == 0
    else:
        assert made.first == prompt.held_blocks
        assert made.last == stored or not prompt.is_whole
    assert made.begin_seconds <= made.load_seconds
    assert made.saved_seconds > 0


@settings(max_examples=40, deadline=None)
@given(prompts(), pipelines, st.lists(st.integers(0, 20), max_size=20))
def test_patience_ends_and_grows_with_what_has_come(prompt, world, arrivals) -> None:
    made = plan(prompt, world)
    if not made.blocks:
        return
    watch = Watch(made, made.blocks * 4, began=100.0)
    if made.from_back:
        assert watch.until == float("inf")
        return
    now = 100.0
    for parts in arrivals:
        until = watch.until
        assert now <= 100.0 + 1e9
        assert until > 100.0
        # Even a load that shows nothing is given up soon after it was due.
        late = max(0.15 * made.recompute_seconds, 0.005)
        pace = max((now - 100.0) / made.expected_seconds(0.0), 1.0) if now > 100.0 else 1.0
        assert until <= 100.0 + made.expected_seconds(1.0) * pace + late + 1e-9
        now = min(until, now + made.expected_seconds(1.0) / 7)
        watch.seen(parts, now)


def test_nothing_stored_is_no_load() -> None:
    world = Pipeline(PrefillCost(1e-4, 0.0), LinkCost(0, 1e-12), LinkCost(0, 1e-12))
    made = plan(Prompt(100, 16, 1 << 20, np.empty(0, np.bool_)), world)
    assert made == Plan(0, 0, False, 0.01, 0.01, prefill=world.prefill)
