"""Random schedules of loads, saves and computation against the transfer engine.

Primitives: `run_schedule(seed)` -> what went wrong, and `PLANTED`, eight ordering bugs that a
schedule must show.

Requests of several kinds are coroutines over one world; a seed decides whose turn it is, how far
the device got, when a request is aborted, a slot re-used, a stream stuck, the daemon dead. Every
byte is compared with what it must be. Bugs are planted by replacing methods from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np

from bench.gpu_measure import Reservation
from bench.gpu_world import Source, World
from engine_adapter.lanes import Lanes
from engine_adapter.loader import LoadFailed
from engine_adapter.transfer import LoadHandle, LoadPlan, SaveHandle, SavePlan
from engine_adapter.transfer_handles import CANCELLED, DeviceLoad, DeviceSave
from engine_adapter.transfer_moves import BatchCopies, KernelCopies
from kvstore.device import Order
from kvstore.errors import DeviceError, KVStoreError, Overloaded

REQUESTS = 6
TURNS_MAX = 4000
DEADLINE_SECONDS = 0.6

Request = Generator[None, None, None]
_is_ended = DeviceLoad.is_ended.fget


def run_schedule(seed: int) -> list[str]:
    """Everything that was wrong in this schedule; empty when all bytes were right."""
    world = World(seed, first_block=1000 * (seed % 2))
    try:
        _play(world)
    except DeviceError as error:
        world.wrong.append(f"the device failed: {error}")
    return world.wrong


def _play(world: World) -> None:
    chance = world.chance
    running: list[Request] = []
    started = 0
    for _ in range(TURNS_MAX):
        if started < REQUESTS and len(running) < 3 and chance.random() < 0.5:
            running.append(chance.choice((_load, _load, _save, _owner))(world))
            started += 1
        if running:
            request = chance.choice(running)
            try:
                next(request)
            except StopIteration:
                running.remove(request)
        elif started == REQUESTS:
            break
        _mischief(world)
        world.go_on()
    else:
        world.wrong.append("the schedule came to no end")
    for stream in world.streams:
        world.device.let_go(stream)
    while world.baton.step(chance):
        world.now += 0.01
    world.device.drain()
    if world.device.error:
        raise DeviceError(world.device.error)
    world.wrong += [f"slot {slot} was overwritten" for slot in world.arena.wrong()]


def _mischief(world: World) -> None:
    """What the world does while requests run."""
    chance = world.chance
    if chance.random() < 0.1 and (slot := world.idle_slot()) is not None:
        world.arena.fill(slot, next(world.colours))
    if chance.random() < 0.02:
        world.device.hold(chance.choice(world.streams))
    if chance.random() < 0.1:
        for stream in world.streams:
            world.device.let_go(stream)
    if chance.random() < 0.005:
        world.die()


# ---------------------------------------------------------------------- requests


def _blocks(world: World, count: int) -> list[int]:
    taken = [world.free.pop(world.chance.randrange(len(world.free))) for _ in range(count)]
    return sorted(taken) if world.chance.random() < 0.5 else taken


def _compute(world: World, blocks: list[int], contents: list[int]) -> None:
    """The engine computes these blocks: written when the compute stream gets there."""

    def write() -> None:
        for block, content in zip(blocks, contents, strict=True):
            for layer in range(world.layout.layers):
                world.write(block, layer, world.expected(content, layer))

    world.device.enqueue(world.compute, write)


def _attend(world: World, blocks: list[int], layer: int, into: list[Any]) -> None:
    """The engine reads one layer of these blocks, when the compute stream gets there."""
    world.device.enqueue(
        world.compute, lambda: into.append([world.read(block, layer) for block in blocks])
    )


def _computed(world: World) -> Request:
    """Until the compute stream has passed this point."""
    event = world.device.make_event()
    world.device.record(event, world.compute)
    while not world.device.is_done(event):
        yield


def _owner(world: World) -> Request:
    """A request that only computes: its blocks are its own until it ends."""
    if len(world.free) < 2:
        return
    blocks = _blocks(world, 2)
    yield from _own(world, blocks)
    world.free += blocks


def _own(world: World, blocks: list[int]) -> Request:
    contents = [next(world.colours) for _ in blocks]
    _compute(world, blocks, contents)
    for _ in range(world.chance.randrange(6)):
        yield
    found: list[Any] = []
    for layer in range(world.layout.layers):
        _attend(world, blocks, layer, found)
    yield from _computed(world)
    _compare(world, found, contents, "computed blocks were overwritten")


def _compare(world: World, found: list[Any], contents: list[int], what: str) -> None:
    for layer, rows in enumerate(found):
        for row, content in zip(rows, contents, strict=True):
            if not np.array_equal(row, world.expected(content, layer)):
                world.wrong.append(f"{what}: layer {layer}")
                return


def _load(world: World) -> Request:
    count = world.chance.randint(1, 4)
    if len(world.free) < count:
        return
    blocks = _blocks(world, count)
    if world.chance.random() < 0.5:  # the last owner's work is still under way
        _compute(world, blocks, [next(world.colours) for _ in blocks])
    yield from _load_into(world, blocks)
    world.free += blocks


def _load_into(world: World, blocks: list[int]) -> Request:
    slots = world.take_slots(len(blocks))
    if len(slots) < len(blocks):
        for slot in slots:
            world.arena.holders[slot] -= 1
        return
    chance = world.chance
    missing = chance.choice((0, 0, chance.randint(0, len(slots))))
    source = Source(world, slots, missing, arrives=chance.random() < 0.9)
    arena = world.arena
    contents = [arena.contents[slot] for slot in slots]
    plan = LoadPlan(world.target, source, np.array(blocks), 0, DEADLINE_SECONDS)
    try:
        handle = world.transfers.start_load(plan, world.compute)
    except Overloaded:
        source.end(0)
        return
    is_lost = chance.random() < 0.15
    if is_lost:  # the lease runs out, the slots go to others
        source.end(0)
        yield
        for slot in slots:
            if not arena.holders[slot]:
                arena.fill(slot, next(world.colours))
    found: list[Any] = []
    verdict = yield from _forward(world, handle, blocks, found)
    if verdict == CANCELLED:  # aborted: nobody computes, the blocks wait for the last copy
        yield from _until_ended(handle)
    if not is_lost:
        source.end(0)
    if verdict and verdict != CANCELLED:
        yield from _own(world, blocks)
    elif not verdict:
        yield from _computed(world)
        _compare(world, found, contents, "a confirmed load had other bytes")
    yield from _until_ended(handle)


def _forward(
    world: World, handle: LoadHandle, blocks: list[int], found: list[Any]
) -> Generator[None, None, str]:
    """Layer by layer; "" if what was read is confirmed, else why not."""
    try:
        for layer in range(world.layout.layers):
            if world.chance.random() < 0.1:
                handle.cancel()
                return CANCELLED
            yield
            handle.wait_layer(layer)
            _attend(world, blocks, layer, found)
        return handle.confirm()
    except LoadFailed as error:
        return str(error)


def _until_ended(handle: LoadHandle | SaveHandle) -> Request:
    while not handle.is_ended:
        yield


def _save(world: World) -> Request:
    count = world.chance.randint(1, 4)
    if len(world.free) < count:
        return
    blocks, slots, arena = _blocks(world, count), world.take_slots(count), world.arena
    if len(slots) == count:
        yield from _save_from(world, blocks, slots)
        for slot in slots:
            arena.holders[slot] -= 1
    world.free += blocks


def _save_from(world: World, blocks: list[int], slots: list[int]) -> Request:
    arena, contents = world.arena, [next(world.colours) for _ in blocks]
    for slot in slots:
        arena.contents[slot] = 0
        arena.generations[slot] += 1
        arena.bytes_of(slot)[:] = 0x11
    _compute(world, blocks, contents)
    reservation: Any = Reservation(arena, slots)
    plan = SavePlan(world.target, reservation, np.array(blocks), np.arange(len(slots)))
    try:
        handle = world.transfers.start_save(plan, world.compute)
    except Overloaded:
        return
    if world.chance.random() < 0.25:
        handle.cancel()
    elif world.chance.random() < 0.4:  # the blocks are loaded into before they were saved
        yield from _load_into(world, blocks)
    yield from _until_ended(handle)
    for slot, content in zip(slots, contents, strict=True):
        arena.generations[slot] += 1
        if handle.failure:  # given back: the daemon fills it for somebody else
            arena.fill(slot, next(world.colours))
        elif not _holds_ours(world, arena, slot, content):
            world.wrong.append("a saved slot has other bytes")
        else:
            arena.fill(slot, content)  # the other ranks' parts


def _holds_ours(world: World, arena: Any, slot: int, content: int) -> bool:
    rank, layout = world.target.rank, world.layout
    return all(
        np.array_equal(
            arena.bytes_of(slot)[layout.layer_offset(rank, layer) :][: layout.layer_bytes],
            world.expected(content, layer),
        )
        for layer in range(layout.layers)
    )


# ---------------------------------------------------------------------- planted bugs


def _without_hand_over(is_load: bool) -> AbstractContextManager[Any]:
    real = Lanes.hand_over

    def hand_over(self: Lanes, compute_stream: int, stream: int, mark: int | None) -> None:
        if (stream == self.load_stream) is not is_load:
            real(self, compute_stream, stream, mark)

    return mock.patch.object(Lanes, "hand_over", hand_over)


def _late_table() -> AbstractContextManager[Any]:
    real = KernelCopies.enqueue

    def enqueue(self: KernelCopies, *arguments: Any) -> Any:
        self._tables.give_back(real(self, *arguments))
        return ()

    return mock.patch.object(KernelCopies, "enqueue", enqueue)


def _any_order() -> AbstractContextManager[Any]:
    def enqueue(self: BatchCopies, pieces: Any, to_device: bool, stream: int) -> Any:
        ends = (pieces.device, pieces.host) if to_device else (pieces.host, pieces.device)
        self._device.copy_batch(*ends, pieces.lengths, Order.ANY, stream)
        return ()

    return mock.patch.object(BatchCopies, "enqueue", enqueue)


def _early_verdict() -> AbstractContextManager[Any]:
    def confirm(self: DeviceLoad) -> str:
        while not self.is_closed:
            self._lanes.pause()
        return self.failure or ("" if self._plan.source.valid() else "changed")

    return mock.patch.object(DeviceLoad, "confirm", confirm)


def _no_following() -> AbstractContextManager[Any]:
    from engine_adapter.device_transfer import DeviceTransfers

    def follow(self: Any, known: Any, blocks: Any, *streams: Any) -> None:
        self._reap()
        self._lanes.hand_over(*streams)

    return mock.patch.object(DeviceTransfers, "_follow", follow)


def _ended_when(kind: type, condition: Callable[[Any], bool]) -> AbstractContextManager[Any]:
    """Handles of this kind say that they ended when `condition` holds."""
    ended = property(lambda self: condition(self) or bool(_is_ended and _is_ended(self)))
    return mock.patch.object(kind, "is_ended", ended)


PLANTED: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "no wait before a load": lambda: _without_hand_over(is_load=True),
    "free before the event": lambda: _ended_when(DeviceLoad, lambda load: load.is_closed),
    "late table read": _late_table,
    "missing cross-stream wait": lambda: _without_hand_over(is_load=False),
    "any order on a save": _any_order,
    "re-use after abort": lambda: _ended_when(DeviceSave, lambda save: bool(save.failure)),
    "two batches in flight": _no_following,
    "early release": _early_verdict,
}


def seeds_until_found(bug: str, seeds: Iterator[int]) -> int | None:
    """How many schedules it took to see a planted bug; None if none of them showed it."""
    with PLANTED[bug]():
        for tried, seed in enumerate(seeds, 1):
            try:
                if run_schedule(seed):
                    return tried
            except (KVStoreError, AssertionError, KeyError):
                return tried
    return None
