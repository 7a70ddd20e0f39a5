"""How a worker's blocks move: what host memory and devices have in common.

Primitives:
  `Mover`      a loader and a saver, made once where the engine's KV lies
  `Side`       what a mover is made for: one rank's lanes
  `Loader`, `LoadTask`   stored blocks into the engine's; one request's load
  `Saver`      the engine's blocks into the store: queue, fences, what came of them

`vllm_host` moves between two places in host memory, `vllm_device` by a device's transfer engine. A
task owns its engine blocks until it was answered. The engine's thread never waits for the daemon.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from engine_adapter.loader import report_bug
from engine_adapter.vllm_orders import BlockOrder, Lane, LoadOrder
from engine_adapter.vllm_settings import Settings
from engine_adapter.vllm_statistics import Counts
from kvstore.client import NamespaceHandle
from kvstore.errors import KVStoreError
from kvstore.types import FINGERPRINT_BYTES, BlockStatus

STORED = (BlockStatus.STORED, BlockStatus.WAITING)
_DONE = (*STORED, BlockStatus.PRESENT)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadPart:
    """Consecutive blocks of one lane."""

    lane: Lane
    handle: NamespaceHandle
    order: BlockOrder


@dataclass(frozen=True)
class Side:
    """`handles`: a lane each."""

    lanes: tuple[Lane, ...]
    handles: tuple[NamespaceHandle, ...]
    rank: int
    settings: Settings
    counts: Counts

    @cached_property
    def mine(self) -> dict[int, Lane]:
        """Lanes whose blocks lie on this rank, by index."""
        found = enumerate(self.lanes)
        return {index: lane for index, lane in found if lane.is_loaded_by(self.rank)}

    @cached_property
    def layer_of(self) -> dict[str, int]:
        """The place of each of the engine's layers within its lane."""
        return {name: at for lane in self.mine.values() for at, name in enumerate(lane.layer_names)}

    def parts_of(self, order: LoadOrder) -> list[LoadPart]:
        return [
            LoadPart(self.lanes[blocks.lane], self.handles[blocks.lane], blocks)
            for blocks in order.blocks
            if blocks.lane in self.mine
        ]


class LoadTask(ABC):
    """One request's load on one rank. `bad_block_ids` and `bad_names` count once it ended."""

    def __init__(self, order: LoadOrder, parts: Sequence[LoadPart]) -> None:
        self.order = order
        self.parts = tuple(parts)
        self.seconds = 0.0
        self.bad_block_ids: set[int] = set()
        self.bad_names: set[bytes] = set()
        self._layers_read = 0
        self._is_late = False

    @property
    def tokens(self) -> int:
        """Of the lane with the most of them."""
        found: dict[int, int] = {}
        for part in self.parts:
            tokens = len(part.order) * part.lane.block_tokens
            found[part.order.lane] = found.get(part.order.lane, 0) + tokens
        return max(found.values(), default=0)

    @property
    def size_bytes(self) -> int:
        return sum(len(part.order) * part.lane.layout.block_bytes for part in self.parts)

    def wait(self, layer: int, seconds: float) -> None:
        """What the engine computes from now on finds this layer, if it comes within `seconds`;
        only of a layerwise task."""
        self._layers_read += 1
        if self.parts and not self._comes(layer, seconds):
            self._is_late = True

    def end(self) -> None:
        """After the forward pass of a layerwise task. Nothing of a load counts of which a layer
        was read too early: before it came, or by a pass that did not ask."""
        self._settle()
        if self.parts and (self._is_late or self._layers_read < self.parts[0].lane.layout.layers):
            self._all_bad()

    @abstractmethod
    def start(self) -> None:
        """Begin to copy; once, in the step that made it."""

    @abstractmethod
    def _comes(self, layer: int, seconds: float) -> bool: ...

    @abstractmethod
    def _settle(self) -> None:
        """Until the last copy has ended; then tell bad blocks."""

    def _all_bad(self) -> None:
        for part in self.parts:
            self._bad(part, 0)

    def _bad(self, part: LoadPart, first: int) -> None:
        """Blocks from `first` on do not hold the stored bytes."""
        self.bad_block_ids.update(part.order.block_ids[first:])
        joined = part.order.joined
        self.bad_names.update(
            joined[at : at + FINGERPRINT_BYTES]
            for at in range(first * FINGERPRINT_BYTES, len(joined), FINGERPRINT_BYTES)
        )


class Loader(Protocol):
    """The engine's thread only."""

    def make(self, order: LoadOrder) -> LoadTask:
        """When the step begins: the engine may use the blocks up to here, not from here on."""

    def ended(self, wait_seconds: float) -> list[LoadTask]:
        """Those beside the forward pass that ended since the last call; waits for the first."""

    def close(self) -> None:
        """Waits for copies under way: the engine's memory goes next."""


@dataclass(eq=False)
class Save:
    """An order on its way into the store."""

    order: BlockOrder
    handle: NamespaceHandle
    fence: int
    is_settled: bool = field(default=False, kw_only=True)


class Saver(ABC):
    """`take` on the engine's thread; one task of `executor` at a time stores in the order of the
    calls, since a block's parent must be stored before it."""

    def __init__(self, side: Side, executor: Executor) -> None:
        self._side = side
        self._executor = executor
        self._queue: deque[Save] = deque()
        self._unsettled: deque[Save] = deque()
        self._stored: list[tuple[int, int]] = []
        self._fence = 0
        self._is_working = False
        self._is_closed = False
        self._changed = threading.Condition()

    @abstractmethod
    def take(self, order: BlockOrder) -> None:
        """Blocks that the step completed. What finds no room is not stored, and counted."""

    @abstractmethod
    def _store(self, save: Save) -> None:
        """On the executor. Settles it by and by; a KVStoreError drops it."""

    @abstractmethod
    def _go_on(self) -> None:
        """On the executor, between two saves and after the last."""

    def _drop(self, save: Save) -> None:
        """It was taken and will not be stored."""
        self._settle(save, [])

    def copied(self) -> list[int]:
        """Numbers of orders whose engine blocks nobody reads any more, since the last call."""
        return []

    # ------------------------------------------------------------------ the engine's thread

    def raise_fence(self, fence: int) -> None:
        """What was taken before is not stored any more, unless it is on its way already."""
        with self._changed:
            self._fence = max(self._fence, fence)

    @property
    def drained_fence(self) -> int:
        """Nothing that was taken before this fence is under way."""
        with self._changed:
            while self._unsettled and self._unsettled[0].is_settled:
                self._unsettled.popleft()
            return self._unsettled[0].fence if self._unsettled else self._fence

    def results(self) -> dict[int, int]:
        """Number of an order -> leading blocks stored, for orders settled since the last call."""
        if not self._stored:
            return {}
        with self._changed:
            stored, self._stored = self._stored, []
        return dict(stored)

    def wait_idle(self, seconds: float) -> bool:
        """Whether everything taken was stored or refused, within `seconds`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(save.is_settled for save in self._unsettled), seconds
            )

    def close(self, seconds: float) -> None:
        """Store what was taken for up to `seconds`; forget the rest."""
        until = time.monotonic() + seconds
        self.wait_idle(seconds)
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._is_working, until - time.monotonic())
        self._executor.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ for those that store

    def _put(self, save: Save) -> None:
        with self._changed:
            self._queue.append(save)
            self._unsettled.append(save)
            if self._is_working or self._is_closed:
                return
            self._is_working = True
        self._executor.submit(self._work).add_done_callback(report_bug)

    def _work(self) -> None:
        try:
            while (save := self._next()) is not None:
                self._handle(save)
                self._go_on()
        except BaseException:
            self._rest()
            raise

    def _next(self) -> Save | None:
        with self._changed:
            if self._queue and not self._is_closed:
                return self._queue.popleft()
            self._rest()
            return None

    def _rest(self) -> None:
        with self._changed:
            self._is_working = False
            self._changed.notify_all()

    def _handle(self, save: Save) -> None:
        if save.fence < self._fence:
            self._drop(save)
            return
        try:
            self._store(save)
        except KVStoreError as error:
            _log.debug("not stored: %s", error)
            self._drop(save)

    def _settle(self, save: Save, statuses: Sequence[BlockStatus]) -> None:
        blocks = len(save.order)
        stored = sum(status in STORED for status in statuses)
        present = list(statuses).count(BlockStatus.PRESENT)
        self._side.counts.add(
            saved_blocks=stored,
            saved_bytes=stored * save.handle.layout.block_bytes,
            present_blocks=present,
            refused_blocks=blocks - stored - present,
        )
        leading = next((at for at, s in enumerate(statuses) if s not in _DONE), len(statuses))
        with self._changed:
            save.is_settled = True
            self._stored.append((save.order.number, leading))
            self._changed.notify_all()

    def _refuse(self, order: BlockOrder) -> None:
        """No room for it: nothing of it is under way."""
        self._side.counts.add(refused_blocks=len(order))
        with self._changed:
            self._stored.append((order.number, 0))


@dataclass(frozen=True)
class Mover:
    """Where the engine's KV lies decides which."""

    loader: Loader
    saver: Saver
    begins_inside: bool = True
    """Loads beside a forward pass begin within it; else after it, when the engine's thread has
    enqueued the pass and is not awaited by a device."""
