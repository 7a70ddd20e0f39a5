"""What to hold a policy against: LRU as engines have it, the optimum in hindsight, and bounds.

Primitives: `lru` (exact LRU over leaves, from an ordered dictionary), `infinite`, `hindsight`
(MIN: the furthest next use goes first, the deepest of those), `upper_bound` (no policy saves more).
All return seconds of prefill saved. Independent of the product's code.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush

import numpy as np

from bench.replay_cache import Model
from bench.replay_traces import Trace
from kvstore.types import IntArray


def lru(trace: Trace, room: int, model: Model) -> float:
    """The least recently used block goes first; of one request's blocks the deepest."""
    held: OrderedDict[int, None] = OrderedDict()
    starts = trace.starts.tolist()
    saved = 0.0
    for request in range(trace.requests):
        blocks = trace.blocks[starts[request] : starts[request + 1]].tolist()
        found = 0
        for block in blocks:
            if block not in held:
                break
            found += 1
        saved += model.prefix_seconds(found)
        kept = blocks[:room]
        for block in reversed(kept):
            held[block] = None
            held.move_to_end(block)
        while len(held) > room:
            held.popitem(last=False)
    return saved


def infinite(trace: Trace, model: Model) -> float:
    """Every block is there from its second use on."""
    seen = _previous(trace) >= 0
    return float(model.block_seconds(trace.depths[seen]).sum())


def hindsight(trace: Trace, room: int, model: Model) -> float:
    """The most tokens that any policy can hit: who knows the future keeps what is used next."""
    following = _following(trace).tolist()
    starts, blocks = trace.starts.tolist(), trace.blocks.tolist()
    depths = trace.depths.tolist()
    never = trace.requests
    next_use: dict[int, tuple[int, int]] = {}
    heap: list[tuple[int, int, int]] = []
    saved = 0.0
    for request in range(trace.requests):
        run = range(starts[request], starts[request + 1])
        found = 0
        for at in run:
            if blocks[at] not in next_use:
                break
            found += 1
        saved += model.prefix_seconds(found)
        for at in run:
            block = blocks[at]
            if following[at] == never:
                next_use.pop(block, None)
                continue
            next_use[block] = (-following[at], -depths[at])
            heappush(heap, (-following[at], -depths[at], block))
        while len(next_use) > room:
            use, depth, block = heappop(heap)
            if next_use.get(block) == (use, depth):
                del next_use[block]
        if len(heap) > 4 * len(next_use) + 1024:
            heap = [(use, depth, block) for block, (use, depth) in next_use.items()]
            heapify(heap)
    return saved


def upper_bound(trace: Trace, room: int, model: Model) -> float:
    """A bound on what any policy saves: intervals between uses, those that save most per request
    they last first, until they fill the room on average. Prefix order and peaks are left out.
    """
    previous = _previous(trace)
    again = np.flatnonzero(previous >= 0)
    requests = np.repeat(np.arange(trace.requests), np.diff(trace.starts))
    length = np.maximum(requests[again] - requests[previous[again]], 1)
    worth = model.block_seconds(trace.depths[again])
    order = np.argsort(-(worth / length), kind="stable")
    filled = length[order].cumsum()
    budget = room * max(1, trace.requests - 1)
    whole = int(filled.searchsorted(budget, side="right"))
    saved = float(worth[order[:whole]].sum())
    if whole < order.size:
        before = float(filled[whole - 1]) if whole else 0.0
        last = order[whole]
        saved += float(worth[last]) * (budget - before) / float(length[last])
    return saved


def _previous(trace: Trace) -> IntArray:
    """Touch at which each touch's block was used before, -1 if never."""
    order = np.argsort(trace.blocks, kind="stable")
    same = trace.blocks[order][1:] == trace.blocks[order][:-1]
    previous = np.full(trace.touches, -1, np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _following(trace: Trace) -> IntArray:
    """Request in which each touch's block is used next; the number of requests if never."""
    previous = _previous(trace)
    requests = np.repeat(np.arange(trace.requests), np.diff(trace.starts))
    following = np.full(trace.touches, trace.requests, np.int64)
    again = np.flatnonzero(previous >= 0)
    following[previous[again]] = requests[again]
    return following
