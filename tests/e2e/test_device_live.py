"""Blocks from a device through a real daemon and back: addresses, order, and the daemon's word.

The device is the stand-in; daemon, client, arena and generations are real.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.lanes import Lanes
from engine_adapter.loader import CHANGED
from engine_adapter.transfer import LoadPlan, PagedTarget, Plane, SavePlan
from kvstore.client.inplace import arena_regions, find_in_host, under_lease
from kvstore.testing.fake_device import FakeDevice
from tests.conftest import DaemonProcess
from tests.e2e.kit import Engine, eventually, running

BLOCKS = 16


class Gpu:
    """A device with paged KV for the engine's layout, and the transfer engine on it."""

    def __init__(self, engine: Engine, device: FakeDevice | None = None) -> None:
        self.device = device or FakeDevice(1, mood="random")
        self.compute = self.device.make_compute_stream()
        lanes = Lanes(self.device, now=time.monotonic, pause=lambda: self.device.advance(20))
        self.transfers = DeviceTransfers(lanes, ThreadPoolExecutor(2))
        layout = engine.handle.layout
        self.size = layout.layer_bytes
        self.layers = [self.device.allocate(BLOCKS * self.size) for _ in range(layout.layers)]
        planes = tuple((Plane(at, self.size, self.size),) for at in self.layers)
        self.target = PagedTarget(layout, planes, BLOCKS)
        self.transfers.pin(arena_regions(engine.handle)[1])

    def bytes_of(self, layer: int, blocks: list[int]) -> Any:
        every = self.device.bytes_at(self.layers[layer], BLOCKS * self.size)
        return every.reshape(BLOCKS, self.size)[blocks]

    def paint(self) -> None:
        for number, at in enumerate(self.layers):
            rng = np.random.default_rng(number)
            self.device.bytes_at(at, BLOCKS * self.size)[:] = rng.integers(
                0, 256, BLOCKS * self.size, np.uint8
            )

    def save(self, engine: Engine, chain: Any, blocks: list[int]) -> None:
        with engine.handle.reserve(chain) as reservation:
            at = np.arange(len(blocks))
            plan = SavePlan(self.target, reservation, np.array(blocks), at)
            handle = self.transfers.start_save(plan, self.compute)
            assert handle.wait_ended(60)
            assert handle.failure == ""
            reservation.commit()

    def load(self, source: Any, blocks: list[int]) -> Any:
        plan = LoadPlan(self.target, source, np.array(blocks), 0, 60)
        return self.transfers.start_load(plan, self.compute)


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with running() as process:
        yield process


def test_blocks_leave_a_device_and_come_back(daemon: DaemonProcess) -> None:
    with Engine(daemon) as engine:
        gpu, chain = Gpu(engine), engine.chain(1, 4)
        gpu.paint()
        saved, loaded = [3, 0, 7, 12], [9, 5, 1, 2]
        gpu.save(engine, chain, saved)
        for find in (find_in_host, under_lease):
            eventually(lambda: engine.handle.match(chain) == 4, "the blocks are READY")
            source = find(engine.handle, chain)
            assert source is not None
            load = gpu.load(source, loaded)
            for layer in range(engine.handle.layout.layers):
                load.wait_layer(layer)
            assert load.confirm() == ""
            source.end(4)
            for layer in range(engine.handle.layout.layers):
                assert np.array_equal(gpu.bytes_of(layer, loaded), gpu.bytes_of(layer, saved))
            loaded = loaded[::-1]
        gpu.transfers.close()


def test_a_load_that_outlives_its_blocks_is_not_confirmed(daemon: DaemonProcess) -> None:
    with Engine(daemon) as engine:
        gpu, chain = Gpu(engine), engine.chain(2, 4)
        gpu.paint()
        gpu.save(engine, chain, [0, 1, 2, 3])
        eventually(lambda: engine.handle.match(chain) == 4, "the blocks are READY")
        source = find_in_host(engine.handle, chain)
        load = gpu.load(source, [4, 5, 6, 7])
        engine.client.clear_all()
        eventually(lambda: source is not None and not source.valid(), "the slots were reclaimed")
        assert load.confirm() == CHANGED
        assert load.is_ended
        gpu.transfers.close()
