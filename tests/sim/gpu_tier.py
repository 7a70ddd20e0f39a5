"""One seed, one course of the GPU tier: promotion, loads out of slabs, memory asked back.

`GpuTierCourse(directory, seed).run()` plays one daemon life with engines that store, use and clear
blocks, read copies through the tier's directory with the product's own client code, close slabs
late or die with them open, and ask for device memory. Asserted throughout:
  what a reader is told is valid is the block's own bytes (WrongBytes otherwise)
  every copy has its replica in the host tier, its slot and its entry
  no memory goes while somebody has it open (the stand-in's device would fail), and all of it comes
  back in the end
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np

from kvstore.client.slabs import GpuPlaces, OpenSlabs
from kvstore.directory import DirectoryReader
from kvstore.errors import DeviceError, KVStoreError
from kvstore.layout import BlockLayout
from kvstore.namespaces import Namespace
from kvstore.rpc import control_pb2 as pb
from kvstore.testing.engine import Engine, WrongBytes, is_own_colour
from kvstore.testing.harness import Harness

KIB = 1 << 10
SPACES = (("small", BlockLayout(4, 2, 4096)), ("large", BlockLayout(4, 4, 8192)))
SLAB = 64 * KIB
VERBS = ("store", "use", "use", "read", "read", "read", "clear", "press", "resize", "die")


class Reader:
    """An engine with a device: the user of the slabs it was told of."""

    def __init__(self, course: GpuTierCourse, engine: Engine) -> None:
        self.engine = engine
        self.course = course
        self.device = course.harness.device
        self.stream = self.device.make_stream()
        self.copies_running = 0
        harness = course.harness
        at = harness.store.gpu.directory_at
        directory = DirectoryReader(harness.arena.header_memory[at:])
        self.slabs = OpenSlabs(self, directory, SLAB, self.closed)
        self.say(pb.AttachRequest(device=pb.Device(maps_slabs=True)))

    def say(self, word: pb.AttachRequest) -> None:
        if self.engine.is_attached:
            self.course.harness.service.gpu.heard(self.engine.session, word)

    def closed(self, slab: int) -> None:
        self.say(pb.AttachRequest(unmapped=pb.Unmapped(slab=slab)))

    def open_slab(self, handle: bytes, length: int) -> int:
        if self.course.random.random() < 0.05:
            raise DeviceError("simulated")
        return self.device.open_export(handle)

    def close_slab(self, address: int, then: Callable[[], None]) -> None:
        self.course.harness.spawn(self._close(address, then))

    async def _close(self, address: int, then: Callable[[], None]) -> None:
        while self.copies_running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(self.course.random.choice([0, 0.01, 0.3]))
        self.device.close_export(address)
        then()

    def listen(self) -> None:
        outbox = self.engine.session.outbox
        while self.engine.is_attached and not outbox.empty():
            news = outbox.get_nowait()
            if news.HasField("slabs"):
                self.slabs.open((told.slab, told.handle) for told in news.slabs.slabs)
            elif news.HasField("unmap"):
                self.slabs.give_back(news.unmap.slab)

    async def read(self, space: Namespace) -> None:
        """Copy what is in the tier, some time later and in pieces; compare what is still valid."""
        chain, length = self.course.chain(space), space.layout.block_bytes
        self.listen()
        places = GpuPlaces(self.slabs, self.engine.boot_id, space.index, chain.joined)
        self.copies_running += 1
        try:
            found = places.over(np.arange(len(chain)), np.zeros(len(chain), np.uint64))
            blocks = np.flatnonzero(found)
            into = self.device.allocate_pinned(max(length * len(blocks), 1))
            await self.course.pause()
            for number, block in enumerate(blocks):
                to = into.ctypes.data + number * length
                self.device.copy(to, int(found[block]), length, self.stream)
            event = self.device.make_event()
            self.device.record(event, self.stream)
            while not self.device.is_done(event):
                await asyncio.sleep(0.001)
        finally:
            self.copies_running -= 1
        if not places.valid():
            return
        for number, block in enumerate(blocks):
            bytes_read = into[number * length : (number + 1) * length]
            if not is_own_colour(bytes_read, bytes(chain[block]), space.layout):
                raise WrongBytes(f"block {block} out of a slab")
            self.course.blocks_read += 1


class GpuTierCourse:
    """All of it for one seed."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random = Random(seed)
        self.harness = Harness(
            directory,
            seed=seed,
            settings={
                "host.bytes": 512 * KIB,
                "host.region_bytes": 256 * KIB,
                "host.slab_bytes": 64 * KIB,
                "nvme.enabled": random.random() < 0.5,
                "lease.read_seconds": 0.5,
                "gpu.bytes_max": random.choice([2, 6]) * SLAB,
                "gpu.slab_bytes": SLAB,
                "gpu.slot_bytes_min": 4096,
            },
        )
        self.blocks_read = 0
        self.weights = [random.choice([1, 1, 3]) for _ in VERBS]
        self.weights[-4:] = [random.choice([0, 0.2, 1]) for _ in range(4)]

    def run(self) -> int:
        """Blocks that were read out of slabs."""
        harness = self.harness.start()
        self.spaces = [harness.declare(label, layout) for label, layout in SPACES]
        self.is_over = False
        for number in range(3):
            harness.call(harness.spawn, self._client(f"e{number}"))
        for _ in range(4):
            harness.sleep(0.4)
            harness.check()
        self.is_over = True
        harness.sleep(3)
        self._give_everything_back()
        harness.crash()
        return self.blocks_read

    def _give_everything_back(self) -> None:
        harness = self.harness
        harness.call(harness.service.gpu.copies.resize, 0)
        harness.sleep(2)
        harness.check()
        device, tier = harness.device, harness.store.gpu
        assert device.error == ""
        assert not len(harness.service.gpu.copies)
        assert tier.allocated_bytes == 0, "slabs that never went back"
        assert device.memory()[0] == device.memory()[1]

    def chain(self, space: Namespace):
        random = self.random
        first = random.randrange(2) * 1000
        return self.harness.chain(space, range(first, first + 4 * random.randint(1, 5)))

    async def pause(self) -> None:
        await asyncio.sleep(self.random.choice([0, 0, 0.002, 0.05, 0.3]))

    async def _client(self, name: str) -> None:
        reader = Reader(self, self.harness.engine(name))
        while not self.is_over:
            verb = self.random.choices(VERBS, self.weights)[0]
            if not reader.engine.is_attached:
                reader = Reader(self, self.harness.engine(name))
            reader.listen()
            with suppress(KVStoreError):
                await getattr(self, f"_{verb}")(reader, self.random.choice(self.spaces))
            await asyncio.sleep(self.random.expovariate(150))
        await self._die(reader, self.spaces[0])

    async def _store(self, reader: Reader, space: Namespace) -> None:
        await reader.engine.store(space, self.chain(space))

    async def _use(self, reader: Reader, space: Namespace) -> None:
        await reader.engine.load([(space, self.chain(space))])

    async def _read(self, reader: Reader, space: Namespace) -> None:
        await reader.read(space)

    async def _clear(self, reader: Reader, space: Namespace) -> None:
        await reader.engine.call("Clear", pb.ClearRequest(namespace=space.id))

    async def _press(self, reader: Reader, space: Namespace) -> None:
        needed = self.random.choice([0, 1, SLAB, 100 * SLAB])
        reader.say(pb.AttachRequest(pressure=pb.Pressure(device_bytes=needed)))

    async def _resize(self, reader: Reader, space: Namespace) -> None:
        most = self.random.choice([0, 1, 2, 6, 6]) * SLAB
        await reader.engine.call("Resize", pb.ResizeRequest(gpu_bytes=most))

    async def _die(self, reader: Reader, space: Namespace) -> None:
        """With slabs open; its mappings go with it, at some time before its lock does."""
        reader.engine.leave()
        await asyncio.sleep(self.random.choice([0, 0.2]))
        reader.slabs.close()
        await asyncio.sleep(0.4)
        reader.engine.die()
