"""Blocks between the store and an engine's KV in host memory, by this process' threads.

Primitives:
  `host_mover`   over the tensors that the engine registered
  `HostLoad`, `HostLoader`   slots into the engine's blocks, one load after the other
  `HostSaver`    `take` copies blocks aside within the step; a thread stores them afterwards
  `Ring`         the memory they wait in

What is loaded lies in host memory: the scheduler's half saw to that. Slots are copied without a
call and compared once more after the last copy; what changed meanwhile, or is gone, has failed.
Once `take` returned the engine may do with its blocks what it likes: finish, preempt or abort the
request, or overwrite them. What finds no room in the ring is not stored, and counted: neither is
what follows it in its request then, for want of a parent, until another request computes it again.
So the ring has room for a whole step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from engine_adapter.loader import report_bug
from engine_adapter.vllm_blocks import LanePages
from engine_adapter.vllm_mover import LoadPart, LoadTask, Mover, Save, Saver, Side
from engine_adapter.vllm_orders import BlockOrder, LoadOrder
from kvstore.client import StoreTicket
from kvstore.client.inplace import InPlace, find_in_host
from kvstore.errors import KVStoreError
from kvstore.types import FINGERPRINT_BYTES, ByteArray

STEP_TOKENS = 8192
"""More than vLLM computes in a step on a CPU unless it is told to."""
STAGING_BYTES_MIN = 64 << 20

_log = logging.getLogger(__name__)


def host_mover(side: Side, caches: Mapping[str, Any], blocks: int, layout: str) -> Mover:
    """Raises Refused for tensors that are not `blocks` blocks one after the other."""
    return pages_mover(
        side, {index: LanePages.of(lane, caches, blocks) for index, lane in side.mine.items()}
    )


def pages_mover(side: Side, pages: Mapping[int, LanePages]) -> Mover:
    """Over memory that is known already; `pages` by the number of the lane."""
    return Mover(HostLoader(side, pages), HostSaver(side, pages))


class HostLoad(LoadTask):
    """Made on the engine's thread, run on the load thread. One beside the forward pass puts itself
    into `ended`."""

    def __init__(
        self,
        order: LoadOrder,
        side: Side,
        pages: Mapping[int, LanePages],
        pool: Executor,
        ended: Callable[[HostLoad], None],
    ) -> None:
        super().__init__(order, side.parts_of(order))
        self._pages = pages
        self._pool = pool
        self._ended = ended
        layers = self.parts[0].lane.layout.layers if order.is_layerwise and self.parts else 1
        self._gates = [threading.Event() for _ in range(layers)]

    def start(self) -> None:
        self._pool.submit(self.run).add_done_callback(report_bug)

    def _comes(self, layer: int, seconds: float) -> bool:
        return self._gates[layer].wait(seconds)

    def _settle(self) -> None:
        """Copies between two places in memory end by themselves."""
        self._gates[-1].wait()

    # ------------------------------------------------------------------ the load thread

    def run(self) -> None:
        began = time.monotonic()
        try:
            self._run()
        except KVStoreError as error:
            _log.warning("load of %s failed: %s", self.order.request, error)
            self._all_bad()
        except BaseException:
            self._all_bad()
            raise
        finally:
            self.seconds = time.monotonic() - began
            for gate in self._gates:
                gate.set()
            if not self.order.is_layerwise:
                self._ended(self)

    def _run(self) -> None:
        sources = [find_in_host(part.handle, part.order) for part in self.parts]
        found = list(zip(self.parts, sources, strict=True))
        for number, gate in enumerate(self._gates):
            for part, source in found:
                layers = range(part.lane.layout.layers)
                if self.order.is_layerwise:
                    layers = range(number, number + 1)
                self._copy(part, source, layers)
            if gate is not self._gates[-1]:
                gate.set()
        for part, source in found:
            is_valid = source is not None and source.valid()
            blocks = source.blocks if source is not None and is_valid else 0
            self._bad(part, blocks)
            if source is not None:
                source.end(0)  # the scheduler's Match counted the use

    def _copy(self, part: LoadPart, source: InPlace | None, layers: range) -> None:
        if source is None:
            return
        pages, ids = self._pages[part.order.lane], part.order.block_ids
        for first, slots in source.spans(0, source.blocks):
            pages.scatter(slots, ids[first : first + len(slots)], layers)


class HostLoader:
    """One thread: two would compete for the same memory bandwidth."""

    def __init__(self, side: Side, pages: Mapping[int, LanePages]) -> None:
        self._side = side
        self._pages = pages
        self._ended: deque[HostLoad] = deque()
        self._none_ended = threading.Lock()
        """Held but for a moment: an idle engine waits at every step, on a bare lock cheapest."""
        self._pool = ThreadPoolExecutor(1, "kvstore-load")

    def make(self, order: LoadOrder) -> LoadTask:
        return HostLoad(order, self._side, self._pages, self._pool, self._end)

    def _end(self, task: HostLoad) -> None:
        """On the load thread."""
        self._ended.append(task)
        if self._none_ended.locked():
            self._none_ended.release()

    def ended(self, wait_seconds: float) -> list[LoadTask]:
        self._none_ended.acquire(blocking=False)
        if wait_seconds and not self._ended:
            self._none_ended.acquire(timeout=wait_seconds)
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class Ring:
    """One array, handed out in turn and given back in the same order. Not thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = np.empty(size_bytes, np.uint8)
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, rows: int, row_bytes: int) -> ByteArray:
        """uint8 [n, row_bytes], n <= rows: as many as find room. None of them: nothing to give
        back."""
        start, size = self._place(rows * row_bytes)
        rows = min(rows, size // row_bytes)
        stop = start + rows * row_bytes
        if rows:
            self._taken.append((start, stop))
        return self._bytes[start:stop].reshape(rows, row_bytes)

    def _place(self, size: int) -> tuple[int, int]:
        """Start and size of a free piece: the next one that is large enough, else the largest."""
        whole = len(self._bytes)
        if not self._taken:
            return 0, whole
        oldest, newest = self._taken[0][0], self._taken[-1][1]
        if newest <= oldest:  # wrapped around
            return newest, oldest - newest
        if size <= whole - newest or oldest <= whole - newest:
            return newest, whole - newest
        return 0, oldest

    def give_back(self) -> None:
        """The oldest."""
        self._taken.popleft()


@dataclass(eq=False)
class _Aside(Save):
    """With its blocks' bytes."""

    rows: ByteArray


def _step_bytes(pages: Mapping[int, LanePages]) -> int:
    """What a step computes at most. The ring is not touched beyond what ever waits."""
    layouts = [one.lane.layout for one in pages.values()]
    token_bytes = sum(layout.block_bytes / layout.block_tokens for layout in layouts)
    return max(ceil(STEP_TOKENS * token_bytes), STAGING_BYTES_MIN)


class HostSaver(Saver):
    """See the module."""

    def __init__(self, side: Side, pages: Mapping[int, LanePages]) -> None:
        super().__init__(side, ThreadPoolExecutor(1, "kvstore-save"))
        self._pages = pages
        self._ring = Ring(side.settings.staging_bytes or _step_bytes(pages))

    def take(self, order: BlockOrder) -> None:
        """Leading blocks, if there is not room for all of them: no block waits for a later one."""
        pages, handle = self._pages[order.lane], self._side.handles[order.lane]
        with self._changed:
            rows = self._ring.take(len(order), pages.lane.layout.block_bytes)
        count = len(rows)
        if not count:
            self._refuse(order)
            return
        if count < len(order):
            self._side.counts.add(refused_blocks=len(order) - count)
            joined = order.joined[: count * FINGERPRINT_BYTES]
            order = replace(order, joined=joined, block_ids=order.block_ids[:count])
        pages.gather(order.block_ids, rows)
        self._put(_Aside(order, handle, self._fence, rows=rows))

    def _store(self, save: Save) -> None:
        assert isinstance(save, _Aside)  # `take` makes no others
        ticket = save.handle.store(save.order, save.rows)
        ticket.when_done(self._settler(save, ticket))

    def _settler(self, save: Save, ticket: StoreTicket) -> Callable[[], None]:
        return lambda: self._settle(save, ticket.result(0))

    def _go_on(self) -> None:
        with self._changed:
            self._ring.give_back()
