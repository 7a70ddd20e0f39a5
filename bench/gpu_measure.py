"""What the transfer engine does on a GPU beside plain copies and a model's own computation.

Primitives: `PARTS`, the figures that need a device; `Rig`, an arena of pinned memory, paged KV of a
Llama-3-8B shape and the engine between them.

Copies are timed by events on the stream that runs them; every timed case is followed by a
comparison of bytes. The rig is written over `Device`, so that the stand-in can try it at a small
size; the part with a model is gpu_model.py, and needs torch and transformers.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.harness import OUT, Bar, Context, Part, Reading, spread
from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.transfer import LoadPlan, PagedTarget, Plane, SavePlan
from kvstore.device import Device, open_device
from kvstore.layout import BlockLayout
from kvstore.tier.gpu import GpuTier
from kvstore.types import ByteArray, ClientId, IntArray, UIntArray

LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 16
LAYER_BYTES = 2 * BLOCK_TOKENS * HEADS * HEAD_DIM * 2
GIB_BLOCKS = (1 << 30) // (LAYERS * LAYER_BYTES)
H2D = Bar("h2d_vs_pinned_peak", "ratio", at_least=0.93)
D2H = Bar("d2h_vs_pinned_peak", "ratio", at_least=0.90)
D2D = Bar("gpu_tier_load_vs_d2d", "ratio", at_least=0.85)
HIDDEN = Bar("overlap_hidden_share", "share", at_least=0.92)
TTFT = Bar("ttft_vs_recompute", "ratio", at_most=0.25)
SLOWDOWN = Bar("decode_slowdown_while_loading", "ratio", at_most=1.05)


class PinnedBlocks:
    """Blocks that lie in pinned slots."""

    reason = ""

    def __init__(self, places: UIntArray) -> None:
        self._places = places
        self.blocks = self.whole = len(places)
        self.readable = np.full(len(places), 0xFF, np.uint8)

    def addresses(self, blocks: IntArray) -> UIntArray:
        return self._places[blocks]

    def arrivals(self, deadline_seconds: float) -> Iterator[None]:
        yield

    def valid(self) -> bool:
        return True


class Reservation:
    """Slots to fill, as `granted_addresses` looks at them."""

    def __init__(self, arena: Any, slots: list[int]) -> None:
        self.arena = arena
        self._shared = self
        self.offsets = tuple(slots)

    def _filling(self) -> Reservation:
        return self


class Places:
    """What a reservation's slots are addressed in: offsets are slot numbers."""

    def __init__(self, places: UIntArray) -> None:
        self._places = places

    def addresses(self, offsets: UIntArray) -> UIntArray:
        return self._places[offsets.astype(np.int64)]


class Rig:
    """`blocks` blocks in slots and as many engine blocks, in shuffled order, cross-layer by
    default: [block][layer][bytes], where a block is one run."""

    def __init__(
        self, device: Device, transfers: DeviceTransfers, blocks: int, layer_bytes: int, layers: int
    ) -> None:
        self.device = device
        self.transfers = transfers
        self.blocks = blocks
        self.layout = BlockLayout(BLOCK_TOKENS, layers, layer_bytes)
        self.size = blocks * self.layout.slot_bytes
        self.arena: ByteArray = np.arange(self.size // 8, dtype=np.uint64).view(np.uint8)
        self.there = device.allocate(self.size)
        stride = layers * layer_bytes
        planes = tuple(
            (Plane(self.there + n * layer_bytes, stride, layer_bytes),) for n in range(layers)
        )
        self.target = PagedTarget(self.layout, planes, blocks)
        self.compute = device.make_stream()
        order = np.random.default_rng(1).permutation(blocks).astype(np.uint64)
        self.places = np.uint64(self.arena.ctypes.data) + order * np.uint64(self.layout.slot_bytes)
        self.ids = np.random.default_rng(2).permutation(blocks)
        transfers.pin([self.arena])

    def wait_pinned(self) -> None:
        while self.transfers.describe()["pinned_bytes"] != self.size:
            time.sleep(0.01)

    def load(self, copy: int | None = None) -> Any:
        """Out of the slots, or out of a `copy` of the arena that lies elsewhere."""
        start = self.arena.ctypes.data
        moved = 0 if copy is None else (copy - start) % (1 << 64)
        source: Any = PinnedBlocks(self.places + np.uint64(moved))
        return self.transfers.start_load(LoadPlan(self.target, source, self.ids), self.compute)

    def save(self) -> Any:
        reservation: Any = Reservation(Places(self.places), list(range(self.blocks)))
        plan = SavePlan(self.target, reservation, self.ids, np.arange(self.blocks))
        return self.transfers.start_save(plan, self.compute)

    def seconds_of(self, start: Any) -> float:
        """Device seconds from hand-over to the last copy of what `start()` starts."""
        first, last = (self.device.make_event(timed=True) for _ in range(2))
        self.device.record(first, self.compute)
        handle = start()
        self.device.wait(self.compute, handle.end_event)
        self.device.record(last, self.compute)
        while not self.device.is_done(last):
            time.sleep(1e-4)
        assert handle.is_ended
        assert not handle.failure, handle.failure
        return self.device.seconds_between(first, last)

    def plain_seconds(self, destination: int, source: int) -> float:
        """One copy of everything."""
        first, last = (self.device.make_event(timed=True) for _ in range(2))
        self.device.record(first, self.compute)
        self.device.copy(destination, source, self.size, self.compute)
        self.device.record(last, self.compute)
        while not self.device.is_done(last):
            time.sleep(1e-4)
        return self.device.seconds_between(first, last)

    def fill(self, copy: int) -> None:
        """Make device memory a copy of the arena."""
        self.plain_seconds(copy, self.arena.ctypes.data)

    def block_bytes(self, block: int) -> ByteArray:
        """An engine block, brought to the host."""
        size = self.layout.block_bytes
        found = self.device.allocate_pinned(size)
        event = self.device.make_event()
        self.device.copy(found.ctypes.data, self.there + block * size, size, self.compute)
        self.device.record(event, self.compute)
        while not self.device.is_done(event):
            time.sleep(1e-4)
        return found

    def check(self) -> None:
        """A few blocks of the last load are those of their slots."""
        for number in (0, self.blocks // 2, self.blocks - 1):
            start = int(self.places[number]) - self.arena.ctypes.data
            wanted = self.arena[start : start + self.layout.block_bytes]
            assert np.array_equal(self.block_bytes(int(self.ids[number])), wanted)


@contextmanager
def _real_rig() -> Iterator[Rig]:
    transfers = DeviceTransfers.open(0)
    rig = Rig(open_device(0), transfers, GIB_BLOCKS, LAYER_BYTES, LAYERS)
    try:
        rig.wait_pinned()
        yield rig
    finally:
        transfers.close()


def setting() -> dict[str, object]:
    """The device, and which mechanism it prefers for what."""
    import cupy  # type: ignore[import-not-found, import-untyped, unused-ignore]

    runtime = cupy.cuda.runtime
    transfers = DeviceTransfers.open(0)
    try:
        return {
            "gpu": runtime.getDeviceProperties(0)["name"].decode(),
            "driver": runtime.driverGetVersion(),
            "cupy": cupy.__version__,
            "measured": transfers.describe()["measured"],
        }
    finally:
        transfers.close()


def _ratio(name: str, rounds: int, plain: Any, ours: Any) -> Reading:
    ratios, rates = [], []
    for turn in range(rounds + 2):
        base, measured = plain(), ours()
        if turn >= 2:
            ratios.append(base / measured)
            rates.append((1 << 30) / measured / 1e9)
    note = (
        f"{spread(ratios)} of {rounds} pairs; {np.median(rates):.1f} GB/s, 1 GiB in blocks of 2 MiB"
    )
    return Reading(name, float(np.median(ratios)), note)


def _copies(context: Context) -> Iterable[Reading]:
    rounds = context.several(9, 3)
    with _real_rig() as rig:
        host = rig.arena.ctypes.data
        yield _ratio(
            H2D.name,
            rounds,
            lambda: rig.plain_seconds(rig.there, host),
            lambda: rig.seconds_of(rig.load),
        )
        rig.seconds_of(rig.load)
        rig.check()
        yield _ratio(
            D2H.name,
            rounds,
            lambda: rig.plain_seconds(host, rig.there),
            lambda: rig.seconds_of(rig.save),
        )


# ---------------------------------------------------------------------- slabs of another process


def _hold_slab(pipe: Any, length: int) -> None:
    """Another process: a slab as the daemon exports it, until the pipe says that it is done."""
    tier = GpuTier(open_device(0), length, slab_bytes=length)
    tier.take(length, 1)
    pipe.send(tier.handles_for(ClientId(1)))
    pipe.recv()
    tier.close()


def _from_slab(context: Context) -> Iterable[Reading]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with _real_rig() as rig:
        child = multiprocessing.get_context("spawn").Process(
            target=_hold_slab, args=(theirs, rig.size), daemon=True
        )
        child.start()
        ((_, handle),) = ours.recv()
        base = rig.transfers.open_slab(handle, rig.size)
        try:
            rig.fill(base)
            yield _ratio(
                D2D.name,
                context.several(9, 3),
                lambda: rig.plain_seconds(rig.there, base),
                lambda: rig.seconds_of(lambda: rig.load(base)),
            )
            rig.check()
        finally:
            rig.transfers.close()
            ours.send(None)
            child.join(30)


def _with_a_model(context: Context) -> Iterable[Reading]:
    from bench.gpu_model import measure  # torch and transformers

    OUT.mkdir(parents=True, exist_ok=True)
    yield from measure(OUT, quick=context.is_quick)


PARTS: tuple[Part, ...] = (
    Part("copies between host and device", (H2D, D2H), _copies),
    Part("blocks out of another process' slab", (D2D,), _from_slab),
    Part("a model that computes meanwhile", (HIDDEN, TTFT, SLOWDOWN), _with_a_model),
)
