"""A daemon with its GPU tier on, and an engine that loads out of it; the device is the stand-in.

Daemon, wire, client and transfer engine are real. They live in one process, for the stand-in's
memory is its process' own.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from kvstore.client.inplace import find_in_host, let_in, press
from kvstore.daemon import Daemon
from kvstore.testing.fake_device import FakeDevice
from kvstore.testing.harness import config_of
from tests.e2e.kit import Engine, RawClient, eventually
from tests.e2e.test_device_live import Gpu
from tests.e2e.vllm_kit import BLOCK, DeviceEngine, FakeRequest, lane

MIB = 1 << 20
BLOCKS = 4


class LocalDaemon:
    """A daemon on a loop of its own, in a thread."""

    def __init__(self, directory: Path, device: FakeDevice) -> None:
        self.socket = directory / "s.sock"
        settings = {
            "daemon.name": directory.name,
            "daemon.socket": str(self.socket),
            "host.bytes": 32 * MIB,
            "host.region_bytes": 16 * MIB,
            "host.slab_bytes": 2 * MIB,
            "nvme.enabled": False,
            "gpu.bytes_max": 4 * MIB,
            "gpu.slab_bytes": 2 * MIB,
        }
        self.daemon = Daemon(config_of(directory, settings))
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        with mock.patch("kvstore.assembly.open_device", return_value=device):
            self._thread.start()
            assert self._is_up.wait(60)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self.daemon.start()
        finally:
            self._is_up.set()
        await self.daemon.wait()
        await self.daemon.stop()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self.daemon.request_stop)
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(3, mood="random", total_bytes=64 * MIB)


@pytest.fixture
def daemon(device: FakeDevice) -> Iterator[LocalDaemon]:
    with tempfile.TemporaryDirectory(prefix="kvstore-") as directory:
        found = LocalDaemon(Path(directory), device)
        yield found
        found.stop()


@pytest.fixture
def engine(daemon: LocalDaemon, device: FakeDevice) -> Iterator[SimpleNamespace]:
    with Engine(daemon) as found:
        gpu = Gpu(found, device)
        let_in(found.handle, gpu.transfers)
        chain = found.chain(1, BLOCKS)
        found.store(chain)
        eventually(lambda: found.handle.match(chain) == BLOCKS, "the blocks are READY")
        world = SimpleNamespace(kit=found, gpu=gpu, chain=chain, handle=found.handle)
        yield world
        world.gpu.transfers.close()
        assert device.error == ""


def loaded_from(engine: SimpleNamespace, first: int) -> int:
    """Load the chain, compare it; bytes of it that came out of the GPU tier."""
    ways = engine.gpu.transfers.describe()["bytes_by_way"]
    source = find_in_host(engine.handle, engine.chain)
    blocks = list(range(first, first + BLOCKS))
    load = engine.gpu.load(source, blocks)
    assert load.confirm() == ""
    source.end(BLOCKS)
    wanted = engine.kit.painted([engine.chain[at] for at in range(BLOCKS)])
    layout = engine.handle.layout
    for layer in range(layout.layers):
        at = layout.layer_offset(0, layer)
        found = engine.gpu.bytes_of(layer, blocks)
        assert np.array_equal(found, wanted[:, at : at + layout.layer_bytes])
    return engine.gpu.transfers.describe()["bytes_by_way"]["gpu_tier"] - ways["gpu_tier"]


def test_used_blocks_come_up_and_are_loaded_out_of_a_slab(
    daemon: LocalDaemon, engine: SimpleNamespace
) -> None:
    assert loaded_from(engine, 0) == 0
    whole = BLOCKS * engine.handle.layout.block_bytes
    eventually(lambda: loaded_from(engine, 4) == whole, "the blocks came up")
    assert engine.kit.client.stat()["gpu"]["blocks"] == BLOCKS
    tiers = engine.handle.exists(engine.chain).tiers
    assert all(mask & 1 for mask in tiers)


def test_memory_goes_back_when_the_engine_asks_and_loads_go_on(
    daemon: LocalDaemon, engine: SimpleNamespace, device: FakeDevice
) -> None:
    whole = BLOCKS * engine.handle.layout.block_bytes
    eventually(lambda: loaded_from(engine, 4) == whole, "the blocks came up")
    free_before = device.memory()[0]
    press(engine.handle, 4 * MIB)
    eventually(lambda: device.memory()[0] == free_before + 2 * MIB, "its slab was freed")
    assert loaded_from(engine, 8) == 0
    press(engine.handle, 0)
    eventually(lambda: loaded_from(engine, 4) == whole, "they came up again")
    with RawClient(daemon.socket) as raw:
        reply = raw.call("Resize", gpu_bytes=0)
        assert (reply.gpu_bytes, reply.host_bytes) == (0, 32 * MIB)
    eventually(lambda: device.memory()[0] == free_before + 2 * MIB, "and was freed again")


def test_another_device_takes_the_place_of_the_first(
    daemon: LocalDaemon, engine: SimpleNamespace, device: FakeDevice
) -> None:
    whole = BLOCKS * engine.handle.layout.block_bytes
    eventually(lambda: loaded_from(engine, 4) == whole, "the blocks came up")
    first = engine.gpu.transfers
    engine.gpu = Gpu(engine.kit, device)
    let_in(engine.handle, engine.gpu.transfers)
    eventually(lambda: loaded_from(engine, 4) == whole, "the second was told of the slab")
    first.close()
    assert loaded_from(engine, 8) == whole


def test_an_engine_that_leaves_holds_no_memory_back(
    daemon: LocalDaemon, engine: SimpleNamespace, device: FakeDevice
) -> None:
    whole = BLOCKS * engine.handle.layout.block_bytes
    eventually(lambda: loaded_from(engine, 4) == whole, "the blocks came up")
    engine.kit.client.close()
    with Engine(daemon, "another") as other, RawClient(daemon.socket) as raw:
        raw.call("Resize", gpu_bytes=0)
        eventually(lambda: other.client.stat()["gpu"]["allocated_bytes"] == 0, "it was freed")


def test_vllms_worker_loads_out_of_a_slab(daemon: LocalDaemon, device: FakeDevice) -> None:
    with DeviceEngine(daemon.socket, lane(name="slab"), fake=device) as engine:
        tokens = list(range(5 * BLOCK))
        engine.compute(FakeRequest("a", tokens))
        names = (f"b{number}" for number in count())

        def came_from_a_slab() -> bool:
            before = engine.lanes_of_device.bytes_by_way["gpu_tier"]
            request = FakeRequest(next(names), tokens)
            found, table, last = engine.load(request)
            assert (found, last.bad) == (4 * BLOCK, set())
            assert all(engine.holds(request, table, 0, at) for at in range(4))
            return engine.lanes_of_device.bytes_by_way["gpu_tier"] > before

        eventually(came_from_a_slab, "the blocks came up")
