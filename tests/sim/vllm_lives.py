"""Random lives of an engine against the vLLM worker's half on the stand-in for a GPU.

Primitives: `run_engine(seed)` -> what went wrong, and `PLANTED`, ordering bugs that it must show.

The worker's half, its device mover, the transfer engine and the references on vLLM's blocks are
real; engine, block pool and store are models. A seed decides which requests come, what of them is
stored, how far the device got, who is preempted, aborted, evicted, and when the daemon dies.
Freed blocks are the next ones to be handed out. Every read of every block is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from bench.gpu_measure import Reservation
from bench.gpu_world import BLOCKS, Source, World
from engine_adapter import vllm_device
from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.lanes import Lanes
from engine_adapter.transfer_handles import DeviceLoad
from engine_adapter.vllm_device import Device, DeviceLoadTask, DeviceSaver, _Held
from engine_adapter.vllm_hold import HeldBlocks
from engine_adapter.vllm_mover import Mover
from engine_adapter.vllm_orders import BlockOrder, Lane, LoadOrder, StepOrders
from engine_adapter.vllm_settings import Settings
from engine_adapter.vllm_worker import WorkerSide
from kvstore.errors import DeviceError, PeerGone
from kvstore.rpc.wire import NO_OFFSET
from kvstore.types import FINGERPRINT_BYTES, BlockStatus, NamespaceId

STEPS = 40
ENDING_STEPS_MAX = 3000
NAMESPACE = NamespaceId(b"n" * 32)
LOAD_SECONDS = 0.6


class VllmWorld(World):
    """One rank: its slots hold what its blocks hold."""

    ranks = (1,)


class Found(Source):
    """In the directory, under no lease: slots may go to others at any time."""

    def end(self, used: int) -> None:
        """Nobody held it."""


class Grant(Reservation):
    """Slots for names; `statuses` a block."""

    def __init__(self, store: Store, names: list[bytes], slots: list[int | None]) -> None:
        super().__init__(store.world.arena, [])
        self._store = store
        self._names = names
        self._slots = slots
        self.offsets = tuple(NO_OFFSET if slot is None else slot for slot in slots)
        self.statuses = [
            BlockStatus.NO_ROOM if slot is None else BlockStatus.GRANTED for slot in slots
        ]
        self.granted = tuple(at for at, slot in enumerate(slots) if slot is not None)

    def commit(self) -> tuple[BlockStatus, ...]:
        self._store.pause()
        if not self.arena.is_alive:
            raise PeerGone("the daemon died")
        for name, slot in zip(self._names, self._slots, strict=True):
            if slot is None:
                continue
            content = int.from_bytes(name, "little")
            if not self.arena.holds(slot, content):
                self._store.world.wrong.append(f"a saved slot does not hold {content}")
            self.arena.contents[slot] = content
            self.arena.generations[slot] += 1
            self._store.slots[name] = slot
            self.statuses[self._slots.index(slot)] = BlockStatus.STORED
        self._end()
        return tuple(self.statuses)

    def abort(self) -> None:
        for slot in self._slots:
            if slot is not None:  # the daemon fills it for somebody else
                self.arena.fill(slot, next(self._store.world.colours))
        self._end()

    def _end(self) -> None:
        for slot in self._slots:
            if slot is not None:
                self.arena.holders[slot] -= 1


class Store:
    """The client and the daemon behind it, as the worker's half calls them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.id = NAMESPACE
        self.layout = world.layout
        self.slots: dict[bytes, int] = {}

    def namespace(self, *arguments: Any, **options: Any) -> Store:
        return self

    def pause(self) -> None:
        """A call takes its time, on the thread that makes it."""
        if self.world.baton.is_task:
            self.world.baton.checkpoint()

    def find(self, order: BlockOrder) -> Found | None:
        slots: list[int] = []
        for name in names_of(order):
            if name not in self.slots:
                break
            slots.append(self.slots[name])
        return Found(self.world, slots, 0, True) if slots else None

    def match_each(self, order: BlockOrder) -> Any:
        return np.array([name in self.slots for name in names_of(order)])

    def reserve(self, order: BlockOrder, *, start: int, count: int) -> Grant:
        self.pause()
        names = names_of(order)[start : start + count]
        arena = self.world.arena
        self.evict(count)
        idle = [at for at in range(len(arena.holders)) if not arena.holders[at]]
        free = [slot for slot in idle if slot not in self.slots.values()]
        slots = [*free[:count], *[None] * (count - len(free[:count]))]
        for slot in free[:count]:
            arena.holders[slot] += 1
            arena.contents[slot] = 0
            arena.generations[slot] += 1
            arena.bytes_of(slot)[:] = 0x11
        return Grant(self, names, slots)

    def evict(self, count: int) -> None:
        """Slots of blocks that nobody holds, given to others at once."""
        chance = self.world.chance
        for name in chance.sample(sorted(self.slots), min(count, len(self.slots))):
            if chance.random() < 0.3:
                self.world.arena.fill(self.slots.pop(name), next(self.world.colours))

    def die(self) -> None:
        self.world.die()
        self.slots.clear()


@dataclass(eq=False)
class Block:
    """As vLLM's: free without references."""

    number: int
    ref_cnt: int = 0


class Pool:
    """What was freed last is handed out first."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [Block(number) for number in range(blocks)]
        self.free = list(reversed(self.blocks))

    def new(self, count: int) -> list[Block]:
        taken = [self.free.pop() for _ in range(count)]
        self.touch(taken)
        return taken

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.free.append(block)


@dataclass(eq=False)
class Request:
    """Block i of its table shall hold `contents[i]`; the first `found` are stored."""

    name: str
    contents: list[int]
    found: int
    blocks: list[Block]
    is_layerwise: bool
    state: str = "new"
    """new, loading, running; gone: aborted while it loads."""
    to_compute: list[int] = field(default_factory=list)


class Engine:
    """Requests, steps, and what must be true of every block that a request reads."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.store = Store(world)
        self.pool = Pool(BLOCKS)
        self.held = HeldBlocks(self.pool)
        self.requests: list[Request] = []
        self._numbers = iter(range(1, 10_000))
        layers = tuple(f"layer{at}" for at in range(world.layout.layers))
        lane = Lane(0, 0, NAMESPACE, world.layout, 0, layers)
        client: Any = self.store
        self.worker = WorkerSide(client, [lane], 0, Settings(load_seconds=LOAD_SECONDS))
        side, device = self.worker.side, Device(world.transfers, {0: world.target}, self._stream)
        self.saver = DeviceSaver(side, device, world.baton)
        self.saver._held_blocks_max = 8
        loads = vllm_device.DeviceLoads(side, device)
        self.worker.use(Mover(loads, self.saver, begins_inside=False))
        self._provisional: list[tuple[dict[str, bool], bool, str]] = []

    def _stream(self) -> int:
        return self.world.compute

    # ------------------------------------------------------------------ the scheduler

    def arrive(self) -> None:
        chance = self.world.chance
        known = sorted(self.store.slots)
        found = chance.sample(known, min(len(known), chance.randrange(4)))
        fresh = [next(self.world.colours) for _ in range(chance.randint(1, 3))]
        contents = [*(int.from_bytes(name, "little") for name in found), *fresh]
        while len(self.pool.free) < len(contents):
            running = [one for one in self.requests if one.state == "running"]
            if not running or self.held.will_free:
                return
            self.end(chance.choice(running))  # preempted: its blocks go to the new one
        blocks = self.pool.new(len(contents))
        is_layerwise = chance.random() < 0.4
        name = str(next(self._numbers))
        self.requests.append(Request(name, contents, len(found), blocks, is_layerwise))

    def end(self, request: Request) -> None:
        """Finished, preempted or aborted: all the same to the blocks."""
        if request.state in ("loading", "gone"):
            request.state = "gone"
            return
        self.requests.remove(request)
        self.pool.free_blocks(reversed(request.blocks))

    def order_of(self, request: Request, first: int, stop: int) -> BlockOrder:
        names = [content.to_bytes(FINGERPRINT_BYTES, "little") for content in request.contents]
        parent = names[first - 1] if first else bytes(NAMESPACE)
        ids = [block.number for block in request.blocks[first:stop]]
        return BlockOrder(0, NAMESPACE, parent, b"".join(names[first:stop]), ids)

    # ------------------------------------------------------------------ a step

    def step(self) -> None:
        loads: list[LoadOrder] = []
        scheduled: list[Request] = []
        for request in self.requests:
            if request.state == "new":
                self._admit(request, loads)
            if request.state == "running":
                scheduled.append(request)
        saves = [save for request in scheduled for save in self._saves(request)]
        self.held.take(saves)
        worker = self.worker
        worker.begin(StepOrders(tuple(loads), tuple(saves)))
        if any(order.is_layerwise for order in loads):
            worker.start_loads()
        verdict = {"is_good": False}
        if scheduled:
            self._forward(scheduled, {order.request for order in loads}, verdict)
        worker.start_loads()
        worker.end_forward()
        received, bad = worker.received(), worker.bad_block_ids()
        worker.failed()
        report = worker.report()
        self.held.release([] if report is None else report.copied)
        verdict["is_good"] = not any(
            block.number in bad for request in scheduled for block in request.blocks
        )
        self._answered(received, bad, scheduled)

    def _admit(self, request: Request, loads: list[LoadOrder]) -> None:
        request.to_compute = list(range(request.found, len(request.contents)))
        request.state = "running"
        if request.found:
            order = self.order_of(request, 0, request.found)
            loads.append(LoadOrder(request.name, request.is_layerwise, (order,)))
            request.state = "running" if request.is_layerwise else "loading"

    def _saves(self, request: Request) -> list[BlockOrder]:
        if not request.to_compute or self.world.chance.random() < 0.2:
            return []
        order = self.order_of(request, request.to_compute[0], len(request.blocks))
        order.number = next(self._numbers)
        return [order]

    def _forward(self, scheduled: list[Request], loading: set[str], verdict: Any) -> None:
        for layer in range(self.world.layout.layers):
            self.worker.wait_for_layer(f"layer{layer}")
            for request in scheduled:
                self._compute(request, layer)
                self._attend(request, layer, verdict if request.name in loading else None)
            if self.world.chance.random() < 0.5:
                self.world.go_on()
        for request in scheduled:
            request.to_compute = []

    def _compute(self, request: Request, layer: int) -> None:
        world = self.world
        work = [(request.blocks[at].number, request.contents[at]) for at in request.to_compute]

        def write() -> None:
            for block, content in work:
                world.write(block, layer, world.expected(content, layer))

        world.device.enqueue(world.compute, write)

    def _attend(self, request: Request, layer: int, verdict: Any) -> None:
        """All blocks are read when the stream gets there; of a step that loads, provisionally."""
        world = self.world
        pairs = [(b.number, c) for b, c in zip(request.blocks, request.contents, strict=True)]

        def read() -> None:
            for block, content in pairs:
                if not np.array_equal(world.read(block, layer), world.expected(content, layer)):
                    what = f"request {request.name} read other bytes in block {block}"
                    self._provisional.append((verdict or {"is_good": True}, False, what))

        world.device.enqueue(world.compute, read)

    def _answered(self, received: set[str], bad: set[int], scheduled: list[Request]) -> None:
        for request in list(self.requests):
            if request.name in received:
                is_gone = request.state == "gone"
                request.state = "running"
                if is_gone:
                    self.end(request)
                    continue
            elif request not in scheduled:
                continue
            ids = [block.number for block in request.blocks]
            first = next((at for at, block in enumerate(ids) if block in bad), None)
            if first is not None:  # computed again from there
                request.to_compute = list(range(first, len(ids)))

    def finish(self) -> None:
        """Everything ends; no block may be left with a reference."""
        for stream in self.world.streams:
            self.world.device.let_go(stream)
        for _ in range(ENDING_STEPS_MAX):
            for request in list(self.requests):
                if request.state != "gone":
                    self.end(request)
            self.step()
            self.world.pause()
            if not self.requests and not self.held and not self.world.baton._waiting:
                break
        else:
            self.world.wrong.append("the engine came to no end")
        self.world.device.drain()
        self.world.wrong += [what for verdict, _, what in self._provisional if verdict["is_good"]]
        if any(block.ref_cnt for block in self.pool.blocks):
            self.world.wrong.append("blocks were never given back")


def names_of(order: BlockOrder) -> list[bytes]:
    return [order.parent_of(at + 1) for at in range(len(order))]


def run_engine(seed: int) -> list[str]:
    """Everything that was wrong in this life of an engine."""
    world = VllmWorld(seed)
    with ExitStack() as patches:
        finds = mock.patch.object(
            vllm_device, "find_in_host", lambda store, order: store.find(order)
        )
        patches.enter_context(finds)
        patches.enter_context(mock.patch.object(DeviceTransfers, "attend"))
        patches.enter_context(mock.patch("engine_adapter.vllm_worker.IDLE_WAIT_SECONDS", 0.02))
        try:
            _play(world)
        except DeviceError as error:
            world.wrong.append(f"the device failed: {error}")
    return world.wrong


def _play(world: World) -> None:
    engine, chance = Engine(world), world.chance
    for _ in range(STEPS):
        if chance.random() < 0.5:
            engine.arrive()
        engine.step()
        for request in list(engine.requests):
            if chance.random() < 0.15:
                engine.end(request)
        if chance.random() < 0.1:
            engine.store.evict(2)
        if chance.random() < 0.05:
            world.device.hold(chance.choice(world.streams))
        if chance.random() < 0.2:
            for stream in world.streams:
                world.device.let_go(stream)
        if chance.random() < 0.01:
            engine.store.die()
        world.go_on()
    engine.finish()
    if world.device.error:
        raise DeviceError(world.device.error)
    world.wrong += [f"slot {slot} was overwritten" for slot in world.arena.wrong()]


# ---------------------------------------------------------------------- planted bugs


def _without_mark(stream_name: str) -> AbstractContextManager[Any]:
    real = Lanes.hand_over

    def hand_over(self: Lanes, compute_stream: int, stream: int, mark: int | None) -> None:
        if stream != getattr(self, stream_name):
            real(self, compute_stream, stream, mark)

    return mock.patch.object(Lanes, "hand_over", hand_over)


def _free_when_enqueued() -> AbstractContextManager[Any]:
    return mock.patch.object(_Held, "is_free", property(lambda self: self.is_begun))


def _answered_when_enqueued() -> AbstractContextManager[Any]:
    def ended(self: DeviceLoadTask) -> bool:
        return self._is_started and all(
            isinstance(load, DeviceLoad) and load.is_closed for _, _, load in self._loads
        )

    def settle(self: DeviceLoadTask) -> None:
        for part, source, load in self._loads:
            if load.failure or not source.valid():  # type: ignore[attr-defined]
                self._bad(part, 0)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(DeviceLoadTask, "is_ended", property(ended)))
    stack.enter_context(mock.patch.object(DeviceLoadTask, "_settle", settle))
    return stack


def _no_wait_for_layers() -> AbstractContextManager[Any]:
    return mock.patch.object(DeviceLoadTask, "_comes", return_value=True)


def _no_second_look() -> AbstractContextManager[Any]:
    return mock.patch.object(Found, "valid", return_value=True)


PLANTED: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "a save that does not wait for its step": partial(_without_mark, "save_stream"),
    "a load that does not wait for the last owner": partial(_without_mark, "load_stream"),
    "blocks given back before the save's last copy": _free_when_enqueued,
    "a load answered before its last copy": _answered_when_enqueued,
    "layers read before they came": _no_wait_for_layers,
    "generations not compared": _no_second_look,
}


def seeds_until_found(bug: str, seeds: range) -> int | None:
    """How many lives it took to see a planted bug; None if none of them showed it."""
    with PLANTED[bug]():
        for tried, seed in enumerate(seeds, 1):
            try:
                if run_engine(seed):
                    return tried
            except (AssertionError, KeyError):
                return tried
    return None
