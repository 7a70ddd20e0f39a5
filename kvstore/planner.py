"""Which stored blocks of a request to load, which to compute again, and how long to wait for them.

Primitives:
  `Ability`              what an engine can do
  `Prompt`, `Pipeline`   what was asked and found; what a load passes through and what stands in it
  `plan`                 the `Plan` with the earliest predicted first token
  `Plan.patience`        until when a load that runs late is worth waiting for; `Watch` keeps count

Two forms. *Prefix*: blocks [first, last) are loaded, then, or meanwhile layer by layer, the rest is
computed. *Meeting*: blocks are loaded from the back while the front is computed in units, until
both meet. Pure: costs and queue come as arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from kvstore.costs import LinkCost, PrefillCost
from kvstore.types import BoolArray, FloatArray

ERROR = 0.2
"""How far off each cost may be; the split is chosen for the mean over such errors."""
LATE_SHARE_MAX = 0.15
"""News of a load may come later than expected by this share of a whole recompute,"""
LATE_SECONDS_MIN = 0.005
"""and always by so much: shorter delays are nobody's fault."""
MEETING_SPARE = 0.25
"""Share of a meeting's load that is asked for beyond the predicted meeting point."""
NOTHING = PrefillCost(0.0, 0.0)


@dataclass(frozen=True)
class Ability:
    """What an engine can do with one prompt, of which a prefix may be stored."""

    prompt_tokens: int
    held_blocks: int = 0
    """Leading blocks that it has itself."""
    stages: int = 1
    """Above 1: it computes on early layers while later ones arrive, in so many steps."""
    unit_blocks: int = 0
    """Above 0: it can compute the front, so many blocks at a time, while the back is loaded."""


@dataclass(frozen=True)
class Prompt:
    """One request. Blocks are counted from the prompt's start."""

    tokens: int
    """Of the whole prompt."""
    block_tokens: int
    block_bytes: int
    below_host: BoolArray
    """A stored block: whether it must be read from NVMe first."""
    held_blocks: int = 0
    unit_blocks: int = 0
    """These two as in Ability."""
    is_whole: bool = False
    """All stored blocks or none: what lies between cannot be cut."""


@dataclass(frozen=True)
class Pipeline:
    """NVMe → host memory → engine, at the costs believed now."""

    prefill: PrefillCost
    host: LinkCost
    nvme: LinkCost
    call_seconds: float = 0.0
    """Of a forward pass beside its tokens."""
    queued_bytes: float = 0.0
    """Reads from NVMe that come before ours."""
    stages: int = 1
    """Steps in which prefix layers arrive while earlier ones are computed on; 1: no overlap."""


@dataclass(frozen=True)
class Plan:
    """Load blocks [first, last), in order from the front or from the back; compute the others."""

    first: int
    last: int
    from_back: bool
    ttft_seconds: float
    """Predicted, from the start of the load."""
    recompute_seconds: float
    """The same without any load."""
    begin_seconds: float = 0.0
    """Until the first bytes of the load are expected."""
    load_seconds: float = 0.0
    """Until its last ones are."""
    saved_seconds: float = 0.0
    """Of computing what is loaded."""
    in_layers: bool = False
    """The load is of use only when every block's layer is there, not block by block."""
    prefill: PrefillCost = NOTHING
    call_seconds: float = 0.0
    """What it was judged with."""

    @property
    def blocks(self) -> int:
        return self.last - self.first

    def expected_seconds(self, share: float) -> float:
        """From the load's start until so much of it is there, as predicted."""
        begin = max(self.begin_seconds, 1e-9)
        return begin + share * max(self.load_seconds - self.begin_seconds, 1e-9)

    def compute_seconds(self, start_tokens: int, end_tokens: int) -> float:
        """Of one forward pass over tokens [start, end)."""
        return self.call_seconds + self.prefill.seconds(float(start_tokens), float(end_tokens))

    def patience(self, ready_share: float, next_share: float, news_seconds: float) -> float:
        """Seconds from the load's start after which to stop waiting.

        `ready_share` of it is there since `news_seconds`; the next news would make it `next_share`.
        The rest is taken to be as late as the news that does not come, and is worth waiting for
        while that costs less than computing it.
        """
        span = self.expected_seconds(1.0) - self.begin_seconds
        gain = self.saved_seconds / span
        if self.in_layers:
            # All is lost by giving up: only when waiting is worse with both costs off.
            gain *= (1 + ERROR) / (1 - ERROR) / max(1.0 - ready_share, 1e-9)
        expected = self.expected_seconds(next_share)
        pace = news_seconds / self.expected_seconds(ready_share) if ready_share else 1.0
        slack = max(LATE_SHARE_MAX * self.recompute_seconds, LATE_SECONDS_MIN)
        limit = min(expected * max(gain, 1.0), expected * max(pace, 1.0) + slack)
        return max(limit, LATE_SECONDS_MIN)

    def remaining_seconds(self, ready_share: float, wanted_share: float, elapsed: float) -> float:
        """Until `wanted_share` of the load is there, at the pace seen so far."""
        expected = self.expected_seconds(ready_share)
        pace = elapsed / expected if ready_share else max(elapsed / expected, 1.0)
        span = self.expected_seconds(wanted_share) - (expected if ready_share else 0.0)
        return max(span * pace - (0.0 if ready_share else elapsed), 0.0)


class Watch:
    """One load while it runs: how much is there, and until when to wait for more."""

    def __init__(self, made: Plan, parts: int, began: float) -> None:
        """`parts` will be announced from `began` on; times by one clock."""
        self._plan = made
        self._parts = max(parts, 1)
        self._step = self._parts / max(made.blocks, 1)
        self._began = began
        self._ready = 0
        self._news = 0.0

    def seen(self, parts: int, now: float) -> None:
        """So many more parts are there."""
        self._ready += parts
        self._news = now - self._began

    @property
    def until(self) -> float:
        """When to give up if nothing else comes. A load from the back is the engine's to end."""
        if self._plan.from_back:
            return math.inf
        ready = min(self._ready / self._parts, 1.0)
        following = min((self._ready + self._step) / self._parts, 1.0)
        return self._began + self._plan.patience(ready, following, self._news)


def plan(prompt: Prompt, pipeline: Pipeline) -> Plan:
    """The split with the earliest predicted first token; of equal ones the shortest load."""
    recompute = _compute(pipeline, prompt.held_blocks * prompt.block_tokens, prompt.tokens)
    candidates = [Plan(prompt.held_blocks, prompt.held_blocks, False, recompute, recompute)]
    if len(prompt.below_host) > prompt.held_blocks:
        candidates.append(_best_prefix(prompt, pipeline, recompute))
        if prompt.unit_blocks and not prompt.is_whole:
            candidates.append(_best_meeting(prompt, pipeline, recompute))
    fastest = min(candidates, key=lambda found: found.ttft_seconds)
    return replace(fastest, prefill=pipeline.prefill, call_seconds=pipeline.call_seconds)


def _compute(pipeline: Pipeline, start_tokens: float, end_tokens: float) -> float:
    return pipeline.call_seconds + pipeline.prefill.seconds(float(start_tokens), float(end_tokens))


def _best_prefix(prompt: Prompt, pipeline: Pipeline, recompute: float) -> Plan:
    held, stored = prompt.held_blocks, len(prompt.below_host)
    lasts: FloatArray = np.arange(held + 1.0, stored + 1.0)
    below: FloatArray = prompt.below_host[held:].cumsum(dtype=np.float64)
    if prompt.is_whole:
        lasts, below = lasts[-1:], below[-1:]
    load = _load_seconds(prompt, pipeline, below, lasts - held)
    end: FloatArray = np.full(len(lasts), float(prompt.tokens))
    rest = pipeline.prefill.seconds(lasts * prompt.block_tokens, end) + pipeline.call_seconds
    steps = pipeline.stages
    ttft = _hedged(load, rest, steps) if steps > 1 else load + rest
    at = int(ttft.argmin())
    last, in_layers = int(lasts[at]), steps > 1
    return Plan(
        held,
        last,
        False,
        float(ttft[at]),
        recompute,
        _begin_seconds(prompt, pipeline, held, last),
        float(load[at]),
        # In layers a load ends as a whole or not at all: nothing was computed meanwhile.
        recompute - (float(rest[at]) / steps if in_layers else float(rest[at])),
        in_layers,
    )


def _best_meeting(prompt: Prompt, pipeline: Pipeline, recompute: float) -> Plan:
    held, stored = prompt.held_blocks, len(prompt.below_host)
    firsts: FloatArray = np.arange(float(held), float(stored), prompt.unit_blocks)
    from_end: FloatArray = prompt.below_host[::-1].cumsum(dtype=np.float64)[::-1]
    below = from_end[held :: prompt.unit_blocks]
    load = _load_seconds(prompt, pipeline, below, stored - firsts)
    start: FloatArray = np.full(len(firsts), float(held * prompt.block_tokens))
    front = pipeline.prefill.seconds(start, firsts * prompt.block_tokens)
    front += pipeline.call_seconds * np.arange(len(firsts))
    ttft = _hedged(load, front)
    at = int(ttft.argmin())
    tail = _compute(pipeline, stored * prompt.block_tokens, prompt.tokens)
    spare = math.ceil(MEETING_SPARE * (stored - int(firsts[at])))
    first = max(held, int(firsts[at]) - -(-spare // prompt.unit_blocks) * prompt.unit_blocks)
    return Plan(
        first,
        stored,
        True,
        float(ttft[at]) + tail,
        recompute,
        _begin_seconds(prompt, pipeline, first, stored),
        float(load[(first - held) // prompt.unit_blocks]),
        recompute - tail - float(front[at]),
    )


def _hedged(one: FloatArray, other: FloatArray, steps: int = 0) -> FloatArray:
    """Seconds of two stages that run side by side, as a mean over errors of both.

    `steps` 0: they are independent. Else the second follows the first in so many equal steps: the
    slower one and one step of the faster. Where both cross, each error costs; the mean keeps to the
    side where it costs less.
    """
    total = np.zeros(len(one))
    for slow, fast in ((1 - ERROR, 1 + ERROR), (1 + ERROR, 1 - ERROR), (1.0, 1.0)):
        a, b = one * slow, other * fast
        total += np.maximum(a + b / steps, a / steps + b) if steps else np.maximum(a, b)
    return total / 3


def _load_seconds(
    prompt: Prompt, pipeline: Pipeline, below: FloatArray, blocks: FloatArray
) -> FloatArray:
    """Until `blocks` blocks are in the engine's memory, `below` of them from NVMe."""
    block = float(prompt.block_bytes)
    read = pipeline.nvme.seconds(below * block + pipeline.queued_bytes)
    read = np.where(below > 0, read + pipeline.host.seconds(block), 0.0)
    return np.maximum(read, pipeline.host.seconds(blocks * block))


def _begin_seconds(prompt: Prompt, pipeline: Pipeline, first: int, last: int) -> float:
    below = prompt.below_host[first:last]
    if below.any():
        return pipeline.nvme.seconds(float(pipeline.queued_bytes)) + pipeline.host.latency_seconds
    return pipeline.host.latency_seconds
