"""Blocks between the store and an engine's KV on a CUDA device, by the transfer engine.

Primitives:
  `device_mover`   over the tensors that the engine registered, on their device
  `targets_mover`  over targets and a transfer engine that are there already
  `DeviceLoads`, `DeviceLoadTask`, `DeviceSaver`

What is loaded lies in host memory, or also in the daemon's GPU tier: copies come from wherever they
can be had. Who may touch an engine block, and when:
  * A load begins after everything that was enqueued on the compute stream when its step began, and
    its blocks are answered for once its last copy is known to have ended; then generations are
    compared. Inside a forward pass the compute stream waits for each layer and the host for none,
    but for bytes that are not pinned yet; the answer waits for the last copy.
  * A save reads the engine's blocks where they lie, after the step that computed them, and the step
    goes on without it. They are the save's until `copied` names it: the scheduler's half holds a
    reference to each in vLLM's block pool (`vllm_hold`). So much may be held and no more; what is
    beyond it is not stored, and counted.
The engine's thread enqueues and asks; slots are reserved and committed on a thread of its own.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.loader import LoadFailed
from engine_adapter.saver import BLOCKS_PER_RESERVATION
from engine_adapter.transfer import LoadHandle, LoadPlan, PagedTarget, SaveHandle, SavePlan
from engine_adapter.vllm_mover import LoadPart, LoadTask, Mover, Save, Saver, Side
from engine_adapter.vllm_orders import BlockOrder, LoadOrder
from engine_adapter.vllm_target import prove_target, target_of
from kvstore.client import WriteReservation
from kvstore.client.inplace import InPlace, find_in_host, let_in
from kvstore.errors import DeviceError, KVStoreError, Unavailable
from kvstore.types import BlockStatus

HELD_SHARE = 4
"""Saves hold at most a quarter of the engine's blocks."""
UNDER_WAY_MAX = 16
"""Saves that may copy before the oldest one is committed."""
STUCK_SECONDS = 60.0
"""A save that has not ended by then is given up with its slots."""
SLOW_SECONDS = 1.9
"""A call that took so long came to its deadline, 2 s at least, or nearly: the daemon hangs."""
PAUSE_SECONDS = 1.0
"""It is then not asked for so long: what waits is not stored, and its blocks are free at once."""

_GRANTED = frozenset((BlockStatus.GRANTED, BlockStatus.PRESENT))

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Device:
    """Where this rank's KV lies; `targets` by the number of the lane."""

    transfers: DeviceTransfers
    targets: Mapping[int, PagedTarget]
    stream: Callable[[], int]
    """The stream that the engine's thread computes on."""


def device_mover(side: Side, caches: Mapping[str, Any], blocks: int, layout: str) -> Mover:
    """Raises Refused for tensors that cannot be addressed, ConfigError without cupy or a driver
    that it can use."""
    import torch

    there = caches[next(iter(side.layer_of))].device
    targets = {index: target_of(lane, caches, blocks, layout) for index, lane in side.mine.items()}
    transfers = DeviceTransfers.open(there.index or 0)

    def stream() -> int:
        return int(torch.cuda.current_stream(there).cuda_stream)

    for index, lane in side.mine.items():
        tensors = [caches[name] for name in lane.layer_names]
        prove_target(transfers, targets[index], tensors, layout, stream())
    pool = ThreadPoolExecutor(1, "kvstore-save")
    return targets_mover(side, Device(transfers, targets, stream), pool)


def targets_mover(side: Side, device: Device, executor: Executor) -> Mover:
    """The daemon learns of the device, in every life of it."""
    let_in(side.handles[0], device.transfers)
    loads, saver = DeviceLoads(side, device), DeviceSaver(side, device, executor)
    return Mover(loads, saver, begins_inside=False)


class DeviceLoadTask(LoadTask):
    """On the engine's thread."""

    def __init__(self, order: LoadOrder, side: Side, device: Device) -> None:
        super().__init__(order, side.parts_of(order))
        self._seconds = side.settings.load_seconds
        self._device = device
        self._loads: list[tuple[LoadPart, InPlace, LoadHandle]] = []
        self._is_started = False
        self._began = 0.0
        self._stream = device.stream()
        self._mark = device.transfers.mark(self._stream)

    def start(self) -> None:
        self._began = time.monotonic()
        for part in self.parts:
            try:
                self._bad(part, self._start(part))
            except KVStoreError as error:
                _log.warning("load of %s failed: %s", self.order.request, error)
                self._bad(part, 0)
        self._device.transfers.forget(self._mark)
        self._is_started = True

    def _start(self, part: LoadPart) -> int:
        """Leading blocks that are on their way."""
        transfers = self._device.transfers
        transfers.attend(part.handle)
        source = find_in_host(part.handle, part.order)
        if source is None:
            return 0
        target = self._device.targets[part.order.lane]
        blocks = np.array(part.order.block_ids[: source.blocks], np.int64)
        plan = LoadPlan(target, source, blocks, 0, self._seconds)
        load = transfers.start_load(plan, self._stream, self._mark)
        self._loads.append((part, source, load))
        return source.blocks

    def _comes(self, layer: int, seconds: float) -> bool:
        try:
            for _, _, load in self._loads:
                load.wait_layer(layer)
        except LoadFailed:
            return True  # `confirm` says the same
        except DeviceError:
            return False
        return True

    @property
    def is_ended(self) -> bool:
        """No copy runs or will run. Never waits."""
        return self._is_started and all(load.is_ended or load.is_lost for _, _, load in self._loads)

    def wait_ended(self, seconds: float) -> None:
        """For the first of its copies that has not ended."""
        running = (load for _, _, load in self._loads if not load.is_ended)
        if (load := next(running, None)) is not None:
            load.wait_ended(seconds)

    def _settle(self) -> None:
        for part, source, load in self._loads:
            reason = load.confirm()
            if reason:
                _log.warning("load of %s failed: %s", self.order.request, reason)
                self._bad(part, 0)
            source.end(0)  # the scheduler's Match counted the use
        self.seconds = time.monotonic() - self._began


class DeviceLoads:
    """A `Loader`."""

    def __init__(self, side: Side, device: Device) -> None:
        self._side = side
        self._device = device
        self._beside: list[DeviceLoadTask] = []

    def make(self, order: LoadOrder) -> LoadTask:
        task = DeviceLoadTask(order, self._side, self._device)
        if not order.is_layerwise:
            self._beside.append(task)
        return task

    def ended(self, wait_seconds: float) -> list[LoadTask]:
        if wait_seconds and self._beside and not self._beside[0].is_ended:
            self._beside[0].wait_ended(wait_seconds)
        found: list[LoadTask] = []
        for task in list(self._beside):
            if task.is_ended:
                self._beside.remove(task)
                task._settle()
                found.append(task)
        return found

    def close(self) -> None:
        """The transfer engine waits for them when the saver closes it."""


@dataclass(eq=False)
class _Lot:
    """Blocks of one reservation; `copies` None: there was nothing to copy."""

    reservation: WriteReservation
    copies: SaveHandle | None


@dataclass(eq=False)
class _Held(Save):
    """Its engine blocks are read until `is_free`."""

    mark: int
    present: int = 0
    """Leading blocks that the store had."""
    lots: list[_Lot] = field(default_factory=list)
    is_begun: bool = False
    """No further lot will come."""

    @property
    def is_free(self) -> bool:
        copies = [lot.copies for lot in self.lots if lot.copies is not None]
        return self.is_begun and all(one.is_ended or one.is_lost for one in copies)


class DeviceSaver(Saver):
    """See the module."""

    def __init__(self, side: Side, device: Device, executor: Executor) -> None:
        super().__init__(side, executor)
        self._device = device
        self._held: list[_Held] = []
        self._held_blocks = 0
        blocks = (target.blocks for target in device.targets.values())
        self._held_blocks_max = min(blocks, default=0) // HELD_SHARE
        self._free: list[int] = []
        self._under_way: deque[_Held] = deque()
        self._ask_from = 0.0

    # ------------------------------------------------------------------ the engine's thread

    def take(self, order: BlockOrder) -> None:
        if self._held_blocks + len(order) > self._held_blocks_max:
            self._refuse(order)
            self._free.append(order.number)
            return
        mark = self._device.transfers.mark(self._device.stream())
        save = _Held(order, self._side.handles[order.lane], self._fence, mark)
        self._held.append(save)
        self._held_blocks += len(order)
        self._put(save)

    def copied(self) -> list[int]:
        free, self._free = self._free, []
        if self._held:
            ended = [save for save in self._held if save.is_free]
            self._held = [save for save in self._held if save not in ended]
            self._held_blocks -= sum(len(save.order) for save in ended)
            free += [save.order.number for save in ended]
        return free

    def close(self, seconds: float) -> None:
        super().close(seconds)
        self._device.transfers.close()

    # ------------------------------------------------------------------ the executor

    def _store(self, save: Save) -> None:
        assert isinstance(save, _Held)  # `take` makes no others
        try:
            self._begin(save)
        except KVStoreError as error:
            _log.debug("not stored: %s", error)
        finally:
            self._end_of_lots(save)
            self._under_way.append(save)

    def _drop(self, save: Save) -> None:
        assert isinstance(save, _Held)
        self._end_of_lots(save)
        super()._drop(save)

    def _end_of_lots(self, save: _Held) -> None:
        self._device.transfers.forget(save.mark)
        save.is_begun = True

    def _begin(self, save: _Held) -> None:
        """Copies into slots that are reserved here, in lots. Raises KVStoreError."""
        order, handle = save.order, save.handle
        self._device.transfers.attend(handle)
        has = handle.match_each(order)
        save.present = len(order) if has.all() else int(has.argmin())
        for start in range(save.present, len(order), BLOCKS_PER_RESERVATION):
            count = min(BLOCKS_PER_RESERVATION, len(order) - start)
            with self._asking():
                reservation = handle.reserve(order, start=start, count=count)
            try:
                copies = self._copy(save, reservation, start)
            except KVStoreError:
                reservation.abort()
                raise
            save.lots.append(_Lot(reservation, copies))
            if not _GRANTED.issuperset(reservation.statuses):
                return  # what follows would lack its parent

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """One call of the daemon. Raises Unavailable at once after one that took too long."""
        began = time.monotonic()
        if began < self._ask_from:
            raise Unavailable("the daemon was slow to answer a moment ago")
        try:
            yield
        finally:
            now = time.monotonic()
            if now > began + SLOW_SECONDS:
                self._ask_from = now + PAUSE_SECONDS

    def _copy(self, save: _Held, reservation: WriteReservation, start: int) -> SaveHandle | None:
        at = np.array(reservation.granted, np.int64)
        if not len(at):
            return None
        blocks = np.array(save.order.block_ids, np.int64)[start + at]
        target = self._device.targets[save.order.lane]
        plan = SavePlan(target, reservation, blocks, at, STUCK_SECONDS)
        return self._device.transfers.start_save(plan, 0, save.mark)

    def _go_on(self) -> None:
        """Commit the oldest, unless more wait to begin."""
        while self._under_way and (not self._queue or len(self._under_way) > UNDER_WAY_MAX):
            save = self._under_way.popleft()
            statuses = [BlockStatus.PRESENT] * save.present
            for lot in save.lots:
                statuses += self._committed(lot)
            self._settle(save, statuses)

    def _committed(self, lot: _Lot) -> list[BlockStatus]:
        """A status a block. Neither committed nor given back while copies may still run: the
        daemon holds such slots until this process is gone."""
        reservation, copies = lot.reservation, lot.copies
        refused = [BlockStatus.REFUSED] * len(reservation.statuses)
        if copies is None:
            return reservation.statuses
        if not copies.wait_ended(STUCK_SECONDS):
            copies.cancel()
            return refused
        if copies.failure:
            reservation.abort()
            return refused
        try:
            with self._asking():
                return list(reservation.commit())
        except KVStoreError as error:
            _log.debug("not stored: %s", error)
            reservation.abort()
            return refused
