"""Which blocks a step of the engine saves, decided by the scheduler's half.

Primitives of `SavePlan`:
  `look_in`   a request may complete a block so many steps from now
  `orders`    a step's saves
  `lost`      those of the last step were thrown away
  `stored`    what the workers stored, for events

A request is looked at when it computes many tokens at once, and else only in steps in which a block
of it may end: most of those that decode are not touched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import gcd
from sys import maxsize
from typing import Any

from engine_adapter.vllm_lookup import Suppressed
from engine_adapter.vllm_orders import BlockOrder, Lane
from engine_adapter.vllm_requests import NOT_TOLD, Tracked
from kvstore.fingerprint import Chain

ANSWERS_MAX = 2
"""Requests that decode whose blocks a step saves, besides those that compute many tokens. The
others wait their turn: their blocks stay theirs while they run."""
ANSWER_TOKENS = 64
"""An answer's blocks are saved so many tokens at a time: a store costs the same for one or four."""
NULL_BLOCK = 0
"""vLLM's place holder for blocks that left a sliding window."""

BlockIdsOf = Callable[[str], Sequence[Sequence[int]] | None]
"""A request's block ids, a list a KV group."""


class SavePlan:
    """`requests`: those that run or will, by id."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        requests: Mapping[str, Tracked],
        suppressed: Suppressed,
        may_save: bool,
        wants_events: bool,
    ) -> None:
        self._may_save = may_save
        self._lanes = tuple(lanes)
        self._requests = requests
        self._suppressed = suppressed
        self._wants_events = wants_events
        self._step_tokens = gcd(*(lane.block_tokens for lane in lanes))
        """Some lane's block may end at every multiple of it."""
        has_windows = any(lane.window_tokens for lane in lanes)
        self._answers_max = maxsize if has_windows else ANSWERS_MAX
        """What leaves a window is gone after its step."""
        step = self._step_tokens
        self._answer_tokens = step if has_windows else -(-ANSWER_TOKENS // step) * step
        self._step = 0
        self._due: dict[int, list[str]] = {}
        """Requests by step. An entry counts while `Tracked.due` says the same; by id, so that
        what an entry outlives is freed by the engine, not by a later step of ours."""
        self._overdue: deque[str] = deque()
        self._last: list[tuple[Tracked, int]] = []
        """Requests saved in the step that was ordered last, and what they had saved before."""
        self._next_number = self._last_from = 0
        self._unstored: dict[int, tuple[Any, ...]] = {}
        self._stored: list[tuple[Any, ...]] = []

    def look_in(self, steps: int, tracked: Tracked) -> None:
        """Nothing for a request whose prefix is not known, or that waits for it anew."""
        if self._may_save and tracked.lookup is not None:
            tracked.due = self._step + steps
            self._due.setdefault(tracked.due, []).append(tracked.request.request_id)

    def orders(
        self, scheduled: Mapping[str, int], tokens: int, block_ids_of: BlockIdsOf, is_held: bool
    ) -> list[BlockOrder]:
        """`scheduled`: tokens computed in this step, by request, `tokens` in all. `is_held`:
        nothing may be saved in this one."""
        if not self._may_save:
            return []
        self._step += 1
        self._last.clear()
        self._last_from = self._next_number
        saves: list[BlockOrder] = []
        for tracked in self._looked_at(scheduled, tokens):
            count = scheduled.get(tracked.request.request_id, 0)
            computed = tracked.request.num_computed_tokens + count
            is_due = count > 1 or (count and computed >= tracked.save_from)
            if is_due and not is_held:
                self._save(tracked, computed, block_ids_of, saves)
            self.look_in(max(tracked.save_from - computed, 1), tracked)
        return saves

    def _looked_at(self, scheduled: Mapping[str, int], tokens: int) -> list[Tracked]:
        chosen: list[Tracked] = []
        if tokens > len(scheduled):
            names = [request_id for request_id, count in scheduled.items() if count > 1]
            chosen = [one for one in map(self._requests.get, names) if one is not None]
            for one in chosen:
                one.due = 0
        overdue, step = self._overdue, self._step
        overdue.extend(self._due.pop(step, ()))
        chosen_max = len(chosen) + self._answers_max
        while overdue and len(chosen) < chosen_max:
            tracked = self._requests.get(overdue.popleft())
            if tracked is not None and 0 < tracked.due <= step:
                chosen.append(tracked)
        return chosen

    def _save(
        self,
        tracked: Tracked,
        computed: int,
        block_ids_of: BlockIdsOf,
        saves: list[BlockOrder],
    ) -> None:
        """Order what this step completes of a request, once the lookup told what is stored."""
        saved = tracked.saved_tokens
        if saved == NOT_TOLD:
            if not tracked.take_lookup():
                return
            saved = tracked.saved_tokens
        request, step = tracked.request, self._step_tokens
        computed = min(computed, request.num_tokens)
        ids = block_ids_of(request.request_id) if computed // step > saved // step else None
        if ids is None:
            return
        tracked.name_computed(computed)
        for index, lane in enumerate(self._lanes):
            size = lane.layout.block_tokens
            chain, table = tracked.chains[index], ids[lane.group]
            first = saved // size
            for order in orders_of(index, lane, chain, table, first, computed // size):
                order.number = self._next_number = self._next_number + 1
                saves.append(order)
                self._suppressed.lift(order.joined)
                if self._wants_events and lane.rank == 0:
                    self._unstored[order.number] = (request, lane, first, order)
        self._last.append((tracked, saved))
        tracked.saved_tokens = computed
        tracked.save_from = computed - computed % step + self._answer_tokens

    def lost(self) -> None:
        """The last step's saves count for nothing."""
        for number in range(self._last_from + 1, self._next_number + 1):
            self._unstored.pop(number, None)
        for tracked, before in self._last:
            if tracked.saved_tokens != NOT_TOLD:
                tracked.saved_tokens = tracked.save_from = min(tracked.saved_tokens, before)
                self.look_in(1, tracked)

    # ------------------------------------------------------------------ events

    def stored(self, found: Mapping[int, int]) -> None:
        """Number of an order -> leading blocks of it that are stored."""
        for number, stored in found.items():
            event = self._unstored.pop(number, None)
            if event is not None and stored:
                self._stored.append((*event, stored))

    def take_stored(self) -> list[tuple[Any, ...]]:
        """(request, lane, first block, order, leading blocks stored) since the last call."""
        stored, self._stored = self._stored, []
        return stored

    def forget(self) -> None:
        """What is not stored yet will not be."""
        self._unstored.clear()


def orders_of(
    number: int, lane: Lane, chain: Chain, ids: Sequence[int], begin: int, end: int
) -> list[BlockOrder]:
    """Blocks [begin, end) of a request's table, without those that a window has left behind."""
    end = min(end, len(ids), len(chain))
    if not lane.window_tokens:
        return [BlockOrder.of(number, chain, ids, begin, end)] if begin < end else []
    orders: list[BlockOrder] = []
    while begin < end:
        if ids[begin] == NULL_BLOCK:
            begin += 1
            continue
        stop = begin + 1
        while stop < end and ids[stop] != NULL_BLOCK:
            stop += 1
        orders.append(BlockOrder.of(number, chain, ids, begin, stop))
        begin = stop
    return orders
