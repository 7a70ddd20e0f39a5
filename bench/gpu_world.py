"""A world for the transfer engine: an arena, its daemon and an engine's blocks, all in colours.

Primitives:
  `World`      device, arena, target and the transfer engine under test, from one seed
  `Slots`      the daemon's side: who holds a slot, which content lies in it, generations
  `Source`     blocks in place, whole or arriving, as the client hands them out
  `Baton`      runs background tasks a stretch at a time, so that a seed is a schedule

Contents are colours: bytes that only this content has, at any place. Copies nothing by itself but
what a daemon or an engine would.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import lru_cache
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet

from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.lanes import Lanes
from engine_adapter.transfer import PagedTarget, Plane
from engine_adapter.transfer_moves import Choice
from engine_adapter.transfer_plan import Pieces
from kvstore.client.inplace import Span
from kvstore.errors import PeerGone
from kvstore.layout import BlockLayout
from kvstore.testing.fake_device import FakeDevice
from kvstore.types import ByteArray, IntArray, UIntArray

BLOCKS = 12
SLOTS = 16
TICK_SECONDS = 0.01


@lru_cache(maxsize=4096)
def colour(content: int, length: int) -> ByteArray:
    """uint8 [length] of one content; 0 is what nobody stored."""
    words = np.arange(content << 20, (content << 20) + -(-length // 8), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words.flags.writeable = False
    return words.view(np.uint8)[:length]


class Baton(Executor):
    """Tasks that run only between `step` and their next `checkpoint`, on stacks of their own."""

    def __init__(self) -> None:
        self._waiting: list[greenlet] = []
        self._world = getcurrent()

    def submit(self, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append(greenlet(lambda: future.set_result(task(*args, **kwargs))))
        return future

    @property
    def is_task(self) -> bool:
        """Whether a task asks."""
        return getcurrent() is not self._world

    def checkpoint(self) -> None:
        """In a task: let the world go on."""
        self._waiting.append(getcurrent())
        self._world.switch()

    def step(self, chance: random.Random) -> bool:
        """Let one task run to its next checkpoint; False if there is none."""
        if not self._waiting:
            return False
        self._waiting.pop(chance.randrange(len(self._waiting))).switch()
        return True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Tasks end by themselves."""


class Slots:
    """One daemon life: `is_alive` False after its death; its memory stays mapped."""

    def __init__(self, layout: BlockLayout, regions: int) -> None:
        self.layout = layout
        each = SLOTS // regions * layout.slot_bytes
        self.regions = [np.zeros(each, np.uint8) for _ in range(regions)]
        self.contents = [0] * SLOTS
        self.generations = [0] * SLOTS
        self.holders = [0] * SLOTS
        """Leases and reservations over each."""
        self.is_alive = True

    def bytes_of(self, slot: int) -> ByteArray:
        region, at = divmod(slot, SLOTS // len(self.regions))
        size = self.layout.slot_bytes
        return self.regions[region][at * size : (at + 1) * size]

    def addresses(self, offsets: UIntArray) -> UIntArray:
        """`offsets` are slot numbers here."""
        found = [self.bytes_of(int(slot)).ctypes.data for slot in offsets]
        return np.array(found, np.uint64)

    def fill(self, slot: int, content: int) -> None:
        """Re-used by the daemon: generation first, then the bytes."""
        self.generations[slot] += 2
        self.contents[slot] = content
        self.bytes_of(slot)[: self.layout.block_bytes] = colour(content, self.layout.block_bytes)

    def wrong(self) -> list[int]:
        """Slots whose payload is not their content."""
        return [
            slot
            for slot in range(SLOTS)
            if self.contents[slot] and not self.holds(slot, self.contents[slot])
        ]

    def holds(self, slot: int, content: int) -> bool:
        found, wanted = self.bytes_of(slot), colour(content, self.layout.block_bytes)
        return all(
            np.array_equal(found[p.offset : p.offset + p.length], wanted[p.offset :][: p.length])
            for p in self.layout.parts
        )


class Source:
    """Blocks in place in `slots`; those in `missing` arrive part by part, or never."""

    def __init__(self, world: World, slots: list[int], missing: int, arrives: bool) -> None:
        self._world = world
        self._arena = world.arena
        self.slots = slots
        self.reason = ""
        self._arrives = arrives
        self._is_over = False
        self.blocks = len(slots)
        self.tiers = np.ones(self.blocks, np.uint8)
        self._all_parts = (1 << len(world.layout.parts)) - 1
        self.readable = np.full(self.blocks, self._all_parts, np.uint8)
        self.readable[self.blocks - missing :] = 0
        for slot in slots[self.blocks - missing :]:
            self._arena.generations[slot] += 2  # another's no more
            self._arena.bytes_of(slot)[:] = 0xEE  # not read from the disk yet
        self._generations = [self._arena.generations[slot] for slot in slots]

    @property
    def whole(self) -> int:
        is_whole = self.readable == self._all_parts
        return self.blocks if is_whole.all() else int(is_whole.argmin())

    def arrivals(self, deadline_seconds: float) -> Iterator[None]:
        yield
        for part in self._world.layout.parts:
            for block in np.flatnonzero(self.readable != self._all_parts).tolist():
                self._world.baton.checkpoint()
                if not self._arena.is_alive:
                    raise PeerGone("the daemon died")
                if not self._arrives or self._is_over:
                    self.reason = "failure"
                    return
                slot = self.slots[block]
                at = slice(part.offset, part.offset + part.length)
                wanted = colour(self._arena.contents[slot], self._world.layout.block_bytes)
                self._arena.bytes_of(slot)[at] = wanted[at]
                self.readable[block] |= 1 << part.index
                yield

    def is_readable(self, part: int, first: int, stop: int) -> bool:
        return bool((self.readable[first:stop] >> part & 1).all())

    def spans(self, first: int, stop: int) -> Iterator[Span]:
        for block in range(first, stop):
            yield Span(block, self._arena.bytes_of(self.slots[block])[np.newaxis])

    def addresses(self, blocks: IntArray) -> UIntArray:
        if not self._arena.is_alive:
            raise PeerGone("the daemon died")
        return self._arena.addresses(np.array(self.slots)[blocks])

    def valid(self) -> bool:
        now = [self._arena.generations[slot] for slot in self.slots]
        return self._arena.is_alive and now == self._generations

    def end(self, used: int) -> None:
        """The daemon gives up what did not arrive: such a slot is filled for others."""
        self._is_over = True
        for slot, mask in zip(self.slots, self.readable.tolist(), strict=True):
            self._arena.holders[slot] -= 1
            if mask != self._all_parts:
                self._arena.fill(slot, next(self._world.colours))


class RandomChoice(Choice):
    """Either mechanism, by chance."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__({})
        object.__setattr__(self, "_chance", chance)

    def name_for(self, pieces: Pieces, to_device: bool) -> str:
        return self._chance.choice(("batch", "kernel"))  # type: ignore[attr-defined,no-any-return]


class World:
    """Everything one schedule needs. `now` is its clock."""

    ranks = (1, 1, 2)

    def __init__(self, seed: int, first_block: int = 0) -> None:
        """Engine blocks are numbered from `first_block` on: no slot has such a number."""
        self.first_block = first_block
        self.chance = random.Random(seed)
        self.now = 0.0
        self.baton = Baton()
        mood = self.chance.choice(("lazy", "random", "random"))
        self.is_lazy = mood == "lazy"
        self.device = FakeDevice(seed, mood=mood)  # type: ignore[arg-type]
        self.compute = self.device.make_compute_stream(is_blocking=self.chance.random() < 0.5)
        layers, layer_bytes = self.chance.choice(((3, 96), (2, 4096), (3, 4096), (4, 40)))
        ranks = self.chance.choice(self.ranks)
        self.layout = BlockLayout(4, layers, layer_bytes, ranks)
        self.target = self._make_target(self.chance.randrange(ranks))
        self.free = list(range(first_block, first_block + BLOCKS))
        self.colours = iter(range(1 + seed * 1000, 1 + (seed + 1) * 1000))
        self.wrong: list[str] = []
        lanes = Lanes(
            self.device,
            now=lambda: self.now,
            pause=self.pause,
            choice=RandomChoice(self.chance),
        )
        lanes.ring.buffer_bytes = layer_bytes * self.chance.choice((2, 8)) // 3
        self.transfers = DeviceTransfers(lanes, self.baton)
        self.streams = (lanes.load_stream, lanes.save_stream, self.compute)
        self.arena = self._new_arena()

    def _make_target(self, rank: int) -> PagedTarget:
        """Layer by layer with keys and values apart; or a block's layers side by side."""
        size, layers = self.layout.layer_bytes, self.layout.layers
        half = size // 2
        if self.chance.random() < 0.5:
            base = self._place_for(size * layers)
            planes = tuple((Plane(base + n * size, size * layers, size),) for n in range(layers))
        else:
            halves = [(self._place_for(half), self._place_for(half)) for _ in range(layers)]
            planes = tuple((Plane(a, half, half), Plane(b, half, half)) for a, b in halves)
        return PagedTarget(self.layout, planes, self.first_block + BLOCKS, rank)

    def _place_for(self, stride: int) -> int:
        """Where block 0 would lie: before `first_block` there is no memory."""
        return self.device.allocate(BLOCKS * stride) - self.first_block * stride

    def _new_arena(self) -> Slots:
        arena = Slots(self.layout, self.chance.choice((1, 2)))
        for slot in range(SLOTS):
            arena.fill(slot, next(self.colours))
        if self.chance.random() < 0.25:
            self.device.fail_registrations.add(self.device.registrations)
        self.transfers.pin(arena.regions)
        if self.chance.random() < 0.7:
            self.baton.step(self.chance)
        return arena

    # ------------------------------------------------------------------ time

    def pause(self) -> None:
        """A short sleep of whoever asks: others go on meanwhile."""
        if self.baton.is_task:
            self.baton.checkpoint()
            return
        self.now += TICK_SECONDS
        self.go_on()

    def go_on(self) -> None:
        if not self.is_lazy:
            self.device.advance(self.chance.randrange(6))
        if self.chance.random() < 0.7:
            self.baton.step(self.chance)

    # ------------------------------------------------------------------ the daemon

    def die(self) -> None:
        """This daemon life ends; another begins with other memory."""
        self.arena.is_alive = False
        self.arena = self._new_arena()

    def idle_slot(self) -> int | None:
        idle = [slot for slot in range(SLOTS) if not self.arena.holders[slot]]
        return self.chance.choice(idle) if idle else None

    def take_slots(self, count: int) -> list[int]:
        idle = [slot for slot in range(SLOTS) if not self.arena.holders[slot]]
        taken = sorted(self.chance.sample(idle, min(count, len(idle))))
        for slot in taken:
            self.arena.holders[slot] += 1
        return taken

    # ------------------------------------------------------------------ the engine's blocks

    def expected(self, content: int, layer: int) -> ByteArray:
        """A layer of our rank's part of a content."""
        at = self.layout.layer_offset(self.target.rank, layer)
        return colour(content, self.layout.block_bytes)[at : at + self.layout.layer_bytes]

    def read(self, block: int, layer: int) -> ByteArray:
        """A layer of a block as its planes lie, now."""
        rows = [
            self.device.bytes_at(
                plane.address + block * plane.block_stride_bytes + row * plane.row_stride_bytes,
                plane.row_bytes,
            )
            for plane in self.target.planes[layer]
            for row in range(plane.rows)
        ]
        return np.concatenate(rows)

    def write(self, block: int, layer: int, found: ByteArray) -> None:
        at = 0
        for plane in self.target.planes[layer]:
            for row in range(plane.rows):
                place = plane.address + block * plane.block_stride_bytes
                place += row * plane.row_stride_bytes
                self.device.bytes_at(place, plane.row_bytes)[:] = found[at : at + plane.row_bytes]
                at += plane.row_bytes
