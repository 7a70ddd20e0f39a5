"""The worker's half of the vLLM connector: moves blocks as the scheduler's half ordered.

Primitives of `WorkerSide`, in the order of a step:
  `begin`            this step's orders
  `start_loads`      before the forward pass when one of them is layerwise, else in or after it
  `wait_for_layer`   inside the forward pass
  `end_forward`      layerwise loads are confirmed; what the pass computed is copied aside
  `received`, `failed`, `bad_block_ids`, `report`   what came of it, once a step each

Every order is answered exactly once, also when its request was aborted. Makes no call to the
daemon on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from engine_adapter.vllm_blocks import LanePages
from engine_adapter.vllm_load import LoadPart, LoadTask, LoadThread
from engine_adapter.vllm_orders import Lane, LoadOrder, StepOrders, WorkerReport
from engine_adapter.vllm_save import Saver
from engine_adapter.vllm_scheduler import NOTHING, open_lane
from engine_adapter.vllm_settings import Settings
from engine_adapter.vllm_statistics import Counts
from kvstore.client import KVClient

IDLE_WAIT_SECONDS = 0.0005
"""An engine with nothing to compute asks again and again whether a load is done: it leaves the
processor to the copy for so long."""
CLOSE_SECONDS = 2.0


class WorkerSide:
    """One rank's. The engine's thread only."""

    def __init__(
        self, client: KVClient, lanes: Sequence[Lane], rank: int, settings: Settings
    ) -> None:
        self._client = client
        self._lanes = tuple(lanes)
        self._rank = rank
        self._settings = settings
        self._handles = [open_lane(client, lane) for lane in lanes]
        self._pages: dict[int, LanePages] = {}
        self.counts = Counts()
        self._loader = LoadThread()
        self._saver = Saver(settings.staging_bytes, self.counts)
        self._orders = NOTHING
        self._waiting: list[LoadOrder] = []
        self._layerwise: list[LoadTask] = []
        self._running = 0
        """Loads beside the forward pass that were not reported yet."""
        self._ended: SimpleQueue[LoadTask] = SimpleQueue()
        self._had_forward = False
        self._bad_block_ids: set[int] = set()
        self._failed: set[str] = set()
        self._report: WorkerReport | None = None

    def register(self, caches: Mapping[str, Any], blocks: int) -> None:
        """The engine's KV tensors, by layer name. Raises Refused for what cannot be addressed."""
        for index, lane in enumerate(self._lanes):
            if lane.is_loaded_by(self._rank):
                self._pages[index] = LanePages.of(lane, caches, blocks)

    # ------------------------------------------------------------------ a step

    def begin(self, orders: StepOrders) -> None:
        self._orders = orders
        self._had_forward = False
        self._report = None
        if orders.loads:
            self._waiting += orders.loads
        if orders.fence:
            self._saver.raise_fence(orders.fence)

    def start_loads(self) -> None:
        """Hand this step's loads to the load thread."""
        for order in self._waiting:
            parts = [
                LoadPart(self._pages[blocks.lane], self._handles[blocks.lane], blocks)
                for blocks in order.blocks
                if blocks.lane in self._pages
            ]
            task = LoadTask(order, parts, self._ended)
            if order.is_layerwise:
                self._layerwise.append(task)
            else:
                self._running += 1
            self._loader.start(task)
        self._waiting.clear()

    def wait_for_layer(self, name: str) -> None:
        """Until layerwise loads have filled this layer. Begins the other loads: the engine has
        prepared its blocks by now, and the pass takes long enough to hide them."""
        self._had_forward = True
        if self._waiting:
            self.start_loads()
        for task in self._layerwise:
            task.wait(name, self._settings.load_seconds)

    def end_forward(self) -> None:
        """Nothing computed from blocks that did not come may be stored."""
        is_lost = False
        if self._layerwise:
            for task in self._layerwise:
                task.wait_all()
                is_lost |= bool(task.bad_block_ids)
                self._take(task)
            self._layerwise.clear()
        if not self._orders.saves:
            return
        if is_lost:
            self._reported().saves_lost = True
            return
        for order in self._orders.saves:
            index = order.lane
            if index in self._pages and self._lanes[index].rank == self._rank:
                self._saver.take(order, self._pages[index], self._handles[index])

    def _take(self, task: LoadTask) -> None:
        """A load ended."""
        if task.bad_block_ids:
            self._bad_block_ids |= task.bad_block_ids
            report = self._reported()
            report.failed |= task.bad_names
            report.failed_requests.add(task.order.request)
            if not task.order.is_layerwise:
                self._failed.add(task.order.request)
            return
        if task.seconds > 0 and task.size_bytes:
            self._reported().copy_bytes_per_second = task.size_bytes / task.seconds
        self.counts.add(
            loaded_tokens=task.tokens, loaded_bytes=task.size_bytes, load_seconds=task.seconds
        )

    def _reported(self) -> WorkerReport:
        if self._report is None:
            self._report = WorkerReport()
        return self._report

    # ------------------------------------------------------------------ what came of it

    def received(self) -> set[str]:
        """Requests whose load ended since the last step, well or not."""
        received: set[str] = set()
        wait = not self._had_forward
        while self._running:
            try:
                task = self._ended.get(wait, IDLE_WAIT_SECONDS)
            except Empty:
                break
            self._running -= 1
            self._take(task)
            received.add(task.order.request)
            wait = False
        return received

    def failed(self) -> set[str]:
        """Those of `received` that did not come whole."""
        failed, self._failed = self._failed, set()
        return failed

    def bad_block_ids(self) -> set[int]:
        """Engine blocks that do not hold what was promised, since the last step."""
        bad, self._bad_block_ids = self._bad_block_ids, set()
        return bad

    def report(self) -> WorkerReport | None:
        """None in most steps."""
        stored = self._saver.results()
        if stored:
            self._reported().stored = stored
        if self._orders.fence:
            self._reported().fence = self._saver.drained_fence
        return self._report

    def wait_idle(self, seconds: float) -> bool:
        """Whether everything that was to be saved was stored or refused, within `seconds`."""
        return self._saver.wait_idle(seconds)

    def close(self) -> None:
        """Waits for copies that touch the engine's memory, then leaves the daemon."""
        self._loader.close()
        self._saver.close(CLOSE_SECONDS)
        self._client.close()
