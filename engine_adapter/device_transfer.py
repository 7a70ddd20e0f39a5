"""The transfer engine of a GPU: `TransferEngine` over a `kvstore.device.Device`.

Primitives of `DeviceTransfers`: the verbs of `TransferEngine`, `attend` and `pin` for a new arena,
`open_slab` and `close_slab` for the daemon's GPU tier, and `open`, which finds the device and
measures it.

A load of blocks that lie in pinned host memory is enqueued before `start_load` returns. What has to
come from below, or to go through a bounce buffer, is enqueued by a background thread as it arrives:
disk, host copy and device copy overlap, layer by layer.

The life of a load, in the order to read it:
  transfer           what a caller says (targets, plans) and gets (handles), and the rules
  here               ids checked; the target's route looked up or compiled; ordered behind the
                     compute stream and behind earlier transfers of the same blocks (`_follow`)
  transfer_handles   `DeviceLoad.advance`: what is readable is sent, program by program, each with
                     an event that `wait_layer` has the compute stream wait for; then `is_ended`
  transfer_plan      a route's programs times the blocks: addresses and lengths, neighbours joined
  lanes              `enqueue`: by the mechanism that was measured to be faster, on the load stream
  transfer_moves     the mechanisms, and the measuring
  pinning            which addresses the device reaches; bounce buffers for the others
A save is the same the other way round. `quantised` has the targets of 8-bit KV.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from engine_adapter.lanes import Lanes
from engine_adapter.loader import LOAD_THREADS
from engine_adapter.quantised import QuantisedTarget
from engine_adapter.transfer import (
    LoadHandle,
    LoadPlan,
    SaveHandle,
    SavePlan,
    Target,
)
from engine_adapter.transfer_handles import DeviceLoad, DeviceSave, Nothing, Transfer
from engine_adapter.transfer_moves import QuantisingCopies, Route, calibrated
from engine_adapter.transfer_plan import compiled
from kvstore.client import NamespaceHandle
from kvstore.client.inplace import arena_regions, granted_addresses
from kvstore.device import open_device
from kvstore.errors import ConfigError, DeviceError, InvalidRequest, KVStoreError, Overloaded
from kvstore.types import ByteArray, IntArray

PAUSE_SECONDS = 0.0002
CLOSE_SECONDS = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Known:
    """A target seen before, for as long as somebody has it."""

    route: Route
    last: IntArray
    """int64 [engine blocks]: number of the last transfer that touched each."""


class DeviceTransfers:
    """Thread-safe. `executor` runs what cannot be enqueued at once."""

    def __init__(self, lanes: Lanes, executor: Executor) -> None:
        self._lanes = lanes
        self._executor = executor
        self._targets: dict[int, _Known] = {}
        self._running: dict[int, Transfer] = {}
        self._numbers = count(1)
        self._slabs: set[int] = set()
        self._is_dropping = False
        self._boot_id = 0
        self._is_closed = False

    @classmethod
    def open(cls, index: int = 0) -> DeviceTransfers:
        """On CUDA device `index`, measured: about a second. Raises ConfigError without a usable
        device, or a compiler for its kernels."""
        device = open_device(index)

        def pause() -> None:
            time.sleep(PAUSE_SECONDS)

        try:
            lanes = Lanes(device, now=time.monotonic, pause=pause)
        except DeviceError as error:
            raise ConfigError(f"{error}; the extra `gpu` brings cupy and NVRTC") from error
        try:
            lanes.choice = calibrated(device, list(lanes.mechanisms.values()), lanes.tables, pause)
        except DeviceError as error:
            _log.warning("copies were not measured, copy engines do them all: %s", error)
        return cls(lanes, ThreadPoolExecutor(LOAD_THREADS, "kvstore-transfer"))

    def attend(self, handle: NamespaceHandle) -> None:
        """A new daemon life brings a new arena: reach it directly."""
        boot_id, regions = arena_regions(handle)
        if boot_id and boot_id != self._boot_id:
            self._boot_id = boot_id
            self.pin(regions)

    def pin(self, regions: Sequence[ByteArray]) -> None:
        """Reach this arena directly, region by region, from a background thread.

        A new daemon life brings a new arena: the old one is let go of once no transfer touches
        it."""
        self._lanes.pins.renew(regions)
        self._executor.submit(self._pin_all)

    def _pin_all(self) -> None:
        self._drop_old()
        while not self._is_closed and self._lanes.pins.pin_next():
            pass

    def _drop_old(self) -> None:
        """Background thread: regions of earlier arenas, as far as no transfer touches them."""
        self._is_dropping = False
        if not self._is_closed:
            self._lanes.pins.drop_old(self._is_touched)

    # ------------------------------------------------------------------ the daemon's GPU tier

    def open_slab(self, handle: bytes, length: int) -> int:
        """See `kvstore.client.slabs.SlabUser`."""
        if self._is_closed:
            raise DeviceError("the transfer engine was closed")
        with self._lanes.lock:
            address = self._lanes.device.open_export(handle)
            self._lanes.pins.lend(address, length)
            self._slabs.add(address)
        return address

    def close_slab(self, address: int, then: Callable[[], None]) -> None:
        """See `kvstore.client.slabs.SlabUser`."""
        with self._lanes.lock:
            running = list(self._running.values())
            is_open = address in self._slabs
        if not is_open:  # `close` did it
            then()
            return
        with suppress(RuntimeError):  # `close` shut the executor down; copies may still run
            self._executor.submit(self._close_slab, address, running, then)

    def _close_slab(self, address: int, running: list[Transfer], then: Callable[[], None]) -> None:
        while not all(transfer.wait_ended(CLOSE_SECONDS) for transfer in running):
            if self._is_closed:
                return
        with self._lanes.lock:
            if address in self._slabs:
                self._let_go_of(address)
        then()

    def _let_go_of(self, address: int) -> None:
        self._slabs.discard(address)
        self._lanes.pins.take_back(address)
        with suppress(DeviceError):
            self._lanes.device.close_export(address)

    # ------------------------------------------------------------------ verbs

    def start_load(
        self, plan: LoadPlan, compute_stream: int, mark: int | None = None
    ) -> LoadHandle:
        """See `TransferEngine`."""
        known = self._checked(plan.target, plan.blocks)
        if not len(plan.blocks):
            return Nothing()
        lanes = self._lanes
        with lanes.lock:
            self._follow(known, plan.blocks, compute_stream, lanes.load_stream, mark)
            load = DeviceLoad(lanes, plan, known.route, compute_stream)
            self._enlist(load, known, plan.blocks)
        try:
            if not load.advance(may_wait=False):
                self._executor.submit(load.run)
        except (KVStoreError, RuntimeError) as error:  # RuntimeError: the executor was shut down
            load.fail(f"{type(error).__name__}: {error}")
        return load

    def start_save(
        self, plan: SavePlan, compute_stream: int, mark: int | None = None
    ) -> SaveHandle:
        """See `TransferEngine`."""
        known = self._checked(plan.target, plan.blocks)
        if not len(plan.blocks):
            return Nothing()
        slots = granted_addresses(plan.reservation, plan.at)
        lanes = self._lanes
        with lanes.lock:
            self._follow(known, plan.blocks, compute_stream, lanes.save_stream, mark)
            save = DeviceSave(lanes, plan, known.route, slots)
            self._enlist(save, known, plan.blocks)
        try:
            if not save.send_pinned():
                self._executor.submit(save.run)
        except (KVStoreError, RuntimeError) as error:
            save.fail(f"{type(error).__name__}: {error}")
        return save

    def mark(self, compute_stream: int) -> int:
        """See `TransferEngine`."""
        with self._lanes.lock:
            return self._lanes.mark(compute_stream)

    def forget(self, mark: int) -> None:
        """See `TransferEngine`."""
        with self._lanes.lock:
            self._lanes.events.give_back(mark)

    def _checked(self, target: Target, blocks: IntArray) -> _Known:
        if self._is_closed:
            raise InvalidRequest("the transfer engine was closed")
        if len(blocks) and (int(blocks.min()) < 0 or int(blocks.max()) >= target.blocks):
            raise InvalidRequest(f"transfer: a block is not one of the target's {target.blocks}")
        known = self._targets.get(id(target))
        if known is None:
            only = None
            if isinstance(target, QuantisedTarget):
                only = QuantisingCopies(self._lanes.device, self._lanes.tables, target)
            last = np.zeros(target.blocks, np.int64)
            known = _Known(Route(compiled(target), only), last)
            self._targets[id(target)] = known
            weakref.finalize(target, self._targets.pop, id(target), None)
        return known

    def _follow(
        self, known: _Known, blocks: IntArray, compute_stream: int, stream: int, mark: int | None
    ) -> None:
        """After the compute stream's work up to here, or to the mark, and after transfers of the
        same blocks."""
        self._reap()
        for number in sorted(set(known.last[blocks].tolist())):
            other = self._running.get(number)
            if other is None:
                continue
            if not other.is_closed:
                raise Overloaded("an earlier transfer of these blocks is not enqueued as a whole")
            self._lanes.device.wait(stream, other.end_event)
        self._lanes.hand_over(compute_stream, stream, mark)

    def _enlist(self, transfer: Transfer, known: _Known, blocks: IntArray) -> None:
        number = next(self._numbers)
        self._running[number] = transfer
        # Who has ended keeps no buffers of an engine alive.
        transfer.on_ended = partial(self._running.pop, number, None)
        known.last[blocks] = number

    def _reap(self) -> None:
        for transfer in list(self._running.values()):
            transfer.is_ended  # noqa: B018 - asks the device; those that have leave
        if self._lanes.pins.has_old and not self._is_dropping and not self._is_closed:
            self._is_dropping = True
            self._executor.submit(self._drop_old)

    def _is_touched(self, start: int, stop: int) -> bool:
        return any(transfer.touches(start, stop) for transfer in list(self._running.values()))

    # ------------------------------------------------------------------ state and end

    def describe(self) -> dict[str, object]:
        """See `TransferEngine`."""
        with self._lanes.lock, suppress(DeviceError):
            self._reap()
        return {
            "running": len(self._running),
            "bytes_by_way": dict(self._lanes.bytes_by_way),
            "measured": self._lanes.choice.describe(),
            **self._lanes.pins.describe(),
        }

    def close(self) -> None:
        """See `TransferEngine`. What has not ended by then keeps its memory for good."""
        if self._is_closed:
            return
        self._is_closed = True
        until = self._lanes.now() + CLOSE_SECONDS
        for transfer in list(self._running.values()):
            transfer.cancel()
        is_done = all(
            transfer.wait_ended(max(0.0, until - self._lanes.now()))
            for transfer in list(self._running.values())
        )
        self._executor.shutdown(wait=False, cancel_futures=True)
        if is_done:
            with self._lanes.lock:
                for address in list(self._slabs):
                    self._let_go_of(address)
            self._lanes.close()
        else:
            _log.error("copies still run: pinned memory and streams are left to the process' end")
