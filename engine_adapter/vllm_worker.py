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

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine_adapter.refusal import Refused
from engine_adapter.vllm_device import device_mover
from engine_adapter.vllm_host import host_mover
from engine_adapter.vllm_mover import LoadTask, Mover, Side
from engine_adapter.vllm_orders import Lane, StepOrders, WorkerReport
from engine_adapter.vllm_scheduler import NOTHING, open_lane
from engine_adapter.vllm_settings import Settings
from engine_adapter.vllm_statistics import Counts
from kvstore.client import KVClient

IDLE_WAIT_SECONDS = 0.0005
"""An engine with nothing to compute asks again and again whether a load is done: it leaves the
processor to the copy for so long."""
CLOSE_SECONDS = 2.0
MOVERS: Mapping[str, Callable[[Side, Mapping[str, Any], int, str], Mover]] = {
    "cpu": host_mover,
    "cuda": device_mover,
}
"""By the kind of device that the engine's KV lies on."""

_log = logging.getLogger(__name__)


class WorkerSide:
    """One rank's. The engine's thread only."""

    _mover: Mover
    """From `register` on."""

    def __init__(
        self, client: KVClient, lanes: Sequence[Lane], rank: int, settings: Settings
    ) -> None:
        self._client = client
        self.counts = Counts()
        handles = tuple(open_lane(client, lane) for lane in lanes)
        self.side = Side(tuple(lanes), handles, rank, settings, self.counts)
        self._orders = NOTHING
        self._waiting: list[LoadTask] = []
        self._layerwise: list[LoadTask] = []
        self._running = 0
        """Loads beside the forward pass that were not reported yet."""
        self._had_forward = False
        self._is_open = self._is_broken = False
        self._bad_block_ids: set[int] = set()
        self._failed: set[str] = set()
        self._report: WorkerReport | None = None

    def register(self, caches: Mapping[str, Any], blocks: int, layout: str) -> None:
        """The engine's KV tensors by layer name, and how vLLM says that they lie. Raises Refused
        for what cannot be addressed."""
        missing = [name for name in self.side.layer_of if name not in caches]
        if missing:
            raise Refused(f"{missing[0]}: the engine registered no KV for this layer")
        devices = {caches[name].device for name in self.side.layer_of}
        kinds = {device.type for device in devices}
        if len(devices) != 1 or not kinds <= set(MOVERS):
            raise Refused(
                f"KV lies on {', '.join(sorted(map(str, devices)))}; this connector moves KV that "
                f"lies on one device of a kind of {', '.join(MOVERS)}"
            )
        self.use(MOVERS[kinds.pop()](self.side, caches, blocks, layout))

    def use(self, mover: Mover) -> None:
        """Move blocks by it."""
        self._mover = mover

    # ------------------------------------------------------------------ a step

    def begin(self, orders: StepOrders) -> None:
        if self._is_open:  # vLLM's newer runner ends no step that raised
            self._break()
        self._is_open = True
        self._orders = orders
        self._had_forward = False
        self._report = None
        if orders.loads:
            self._waiting += map(self._mover.loader.make, orders.loads)
        if orders.fence:
            self._mover.saver.raise_fence(orders.fence)

    def start_loads(self) -> None:
        """Begin this step's loads."""
        for task in self._waiting:
            if task.order.is_layerwise:
                self._layerwise.append(task)
            else:
                self._running += 1
            task.start()
        self._waiting.clear()

    def wait_for_layer(self, name: str) -> None:
        """Until layerwise loads have filled this layer. Other loads may begin here: the engine has
        prepared its blocks by now, and the pass takes long enough to hide them."""
        self._had_forward = True
        if self._waiting and self._mover.begins_inside:
            self.start_loads()
        if self._layerwise:
            layer = self.side.layer_of.get(name)
            if layer is None:
                return  # it shares the KV of an earlier layer, which was waited for
            for task in self._layerwise:
                task.wait(layer, self.side.settings.load_seconds)

    def end_forward(self, is_broken: bool = False) -> None:
        """Nothing computed from blocks that did not come may be stored, nor anything from a pass
        that broke off or after it: the engine takes its tokens for computed."""
        self._is_open = False
        if is_broken:
            self._break()
        is_lost = self._is_broken
        if self._layerwise:
            for task in self._layerwise:
                task.end()
                is_lost |= bool(task.bad_block_ids)
                self._take(task)
            self._layerwise.clear()
        if not self._orders.saves:
            return
        side = self.side
        mine = [order for order in self._orders.saves if side.lanes[order.lane].rank == side.rank]
        if is_lost:
            self._reported().saves_lost = True
            self._reported().copied += [order.number for order in mine]
            return
        for order in mine:
            self._mover.saver.take(order)

    def _break(self) -> None:
        if not self._is_broken:
            _log.error("a forward pass broke off: nothing is saved until the engine starts anew")
        self._is_broken = True

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
            self._reported().copy = task.size_bytes, task.seconds
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
        if not self._running:
            return set()
        ended = self._mover.loader.ended(0 if self._had_forward else IDLE_WAIT_SECONDS)
        self._running -= len(ended)
        for task in ended:
            self._take(task)
        return {task.order.request for task in ended}

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
        saver = self._mover.saver
        stored = saver.results()
        if stored:
            self._reported().stored = stored
        copied = saver.copied()
        if copied:
            self._reported().copied += copied
        if self._orders.step:
            self._reported().step = self._orders.step
        if self._orders.fence:
            self._reported().fence = saver.drained_fence
        return self._report

    def wait_idle(self, seconds: float) -> bool:
        """Whether everything that was to be saved was stored or refused, within `seconds`."""
        return self._mover.saver.wait_idle(seconds)

    def close(self) -> None:
        """Waits for copies that touch the engine's memory, then leaves the daemon."""
        if hasattr(self, "_mover"):
            self._mover.loader.close()
            self._mover.saver.close(CLOSE_SECONDS)
        self._client.close()
