"""The front of a stored prefix computed while its back is loaded, until both meet.

Primitives:
  `BackLoad`   the load, from the last block to the first; `remaining`, `meet_at`, `confirm`
  `meet`       the engine's side: computes unit after unit until waiting is faster

A slow link then costs no more than computing what it does not bring in time. Columns have one
writer: the engine below the meeting point, the load from there on; what it copies below, before
it knows where they meet, is overwritten before anybody reads it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from engine_adapter.loader import CHANGED, DEADLINE, GRACE_SECONDS, LayerBuffers
from engine_adapter.prefix import Prefix
from engine_adapter.statistics import Tally
from engine_adapter.tensors import KVTensors
from kvstore.errors import KVStoreError
from kvstore.planner import Plan


class BackLoad:
    """One prompt's. `run` on a load thread; everything else on the engine's."""

    def __init__(
        self,
        tensors: KVTensors,
        prefix: Prefix,
        made: Plan,
        buffers: list[LayerBuffers],
        deadline_seconds: float,
        tally: Tally,
    ) -> None:
        assert prefix.source is not None  # a plan to load comes with blocks
        self.blocks = prefix.blocks
        self._tensors = tensors
        self._source = prefix.source
        self._plan = made
        self._buffers = buffers
        self._deadline_seconds = deadline_seconds
        self._tally = tally
        self._began = time.monotonic()
        self._until = self._began + deadline_seconds + GRACE_SECONDS
        self._news = threading.Condition()
        self._copied_from = prefix.blocks
        """Blocks from here on lie in the buffers. The load thread's, told through `_news`."""
        self._stop_at = made.first
        self._is_over = False

    # ------------------------------------------------------------------ the engine's thread

    def is_worth_computing(self, block: int, start_tokens: int, end_tokens: int) -> bool:
        """Whether computing tokens [start, end), from `block` on, is faster than to wait for it."""
        missing = self._copied_from - block
        if missing <= 0:
            return False
        if block < self._plan.first or self._is_over:
            return True
        total = self._plan.blocks
        ready = (self.blocks - self._copied_from) / total
        wanted = (self.blocks - block) / total
        elapsed = time.monotonic() - self._began
        waiting = self._plan.remaining_seconds(ready, wanted, elapsed)
        return self._plan.compute_seconds(start_tokens, end_tokens) < waiting

    def meet_at(self, block: int) -> int:
        """Nothing below `block` is wanted any more; waits for the rest, as long as it may take.

        Returns from which block on everything is there: higher than `block` if not all came.
        """
        self._source.need_from(block)
        with self._news:
            self._stop_at = max(block, self._plan.first)
            self._news.wait_for(
                lambda: self._copied_from <= block or self._is_over,
                max(self._until - time.monotonic(), 0.0),
            )
            return max(self._copied_from, block)

    def confirm(self) -> str:
        """After the forward pass: "" if every byte it read was the stored one, else the reason."""
        return "" if self._source.valid() else CHANGED

    def whole(self) -> list[int]:
        """A prefill that is done again computes it all."""
        return [0]

    # ------------------------------------------------------------------ the load thread

    def run(self) -> None:
        began, cpu = time.monotonic(), time.thread_time()
        try:
            for _ in self._source.arrivals(self._deadline_seconds):
                self._copy(max(self.blocks - self._source.whole_at_end, self._stop_at))
                if self._copied_from <= self._stop_at:
                    break
        except KVStoreError:
            pass  # the engine computes what did not come
        finally:
            with self._news:
                self._is_over = True
                self._news.notify_all()
            self._tally.add(
                load_seconds=time.monotonic() - began, load_cpu_seconds=time.thread_time() - cpu
            )

    def _copy(self, first: int) -> None:
        """Blocks [first, copied) into all layers' buffers, but for what a window hides."""
        tensors, size = self._tensors, self._tensors.block_tokens
        if first >= self._copied_from:
            return
        for layer, buffers in enumerate(self._buffers):
            start = max(first, buffers.first_column // size)
            for block, slots in self._source.spans(start, max(self._copied_from, start)):
                count, column = len(slots), block * size
                keys, values = tensors.keys(slots, layer), tensors.values(slots, layer)
                np.copyto(tensors.blocks_of(buffers.keys[0], column, count), keys)
                np.copyto(tensors.blocks_of(buffers.values[0], column, count), values)
        with self._news:
            self._copied_from = first
            self._news.notify_all()


def meet(load: BackLoad, block_tokens: int, compute: Callable[[int, int], None]) -> tuple[int, str]:
    """Compute the front, a block a unit, until the load has, or will sooner have, the rest.

    `compute(start, end)` makes tokens [start, end) part of the cache. Returns how many tokens were
    computed here, and "" or why the load did not bring what was waited for; then the front was
    computed on up to where the load had come.
    """
    block, reason = 0, ""
    while True:
        start, end = block * block_tokens, (block + 1) * block_tokens
        if block < load.blocks and load.is_worth_computing(block, start, end):
            compute(start, end)
            block += 1
            continue
        met = load.meet_at(block)
        if met <= block:
            return start, reason
        reason = DEADLINE
        for late in range(block, met):
            compute(late * block_tokens, (late + 1) * block_tokens)
        return met * block_tokens, reason
