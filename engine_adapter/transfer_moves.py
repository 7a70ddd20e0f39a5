"""The ways to move many pieces at once, and which one for what.

Primitives:
  `Mechanism`      enqueues the copies of a list of pieces on a stream
  `BatchCopies`    the copy engines: one call for all pieces
  `KernelCopies`   a kernel of few blocks that reads tables of pieces
  `QuantisingCopies`   the same with 8-bit numbers on the host's side
  `Route`          a target's programs, for blocks that are all there
  `Choice`         which mechanism, from times measured on this device by `calibrated`

Copy engines leave the processors alone and win for long pieces, a kernel for short ones; where they
meet depends on device, length and number, so it is measured. Never waits, except to calibrate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from itertools import product
from math import log2
from typing import Protocol, TypeAlias

import numpy as np

from engine_adapter.quantised import QuantisedTarget
from engine_adapter.transfer_plan import Pieces, Program, placed
from kvstore.device import Device, Order
from kvstore.types import ByteArray, IntArray, UIntArray

KERNEL_BLOCKS = 12
"""More processors than this are not taken from the engine."""
KERNEL_THREADS = 1024
"""Of a block, in groups that take a piece each: many bytes must be under way on a slow bus."""
KERNEL_HANDICAP = 1.15
"""A kernel is chosen where it is faster by more than this."""
LENGTHS = tuple(1024 * kib for kib in (4, 16, 28, 64, 256))
COUNTS = (16, 256, 2048)
TABLES_BYTES = 1 << 20
"""Pinned at once for tables."""
PROBE_BYTES = 32 << 20
ROUNDS = 3

Tables: TypeAlias = Sequence[ByteArray]
"""Pinned memory that enqueued work still reads: `PinnedTables` has it back after its event."""


class Mechanism(Protocol):
    """Called with pinned host memory only."""

    name: str

    def enqueue(self, pieces: Pieces, to_device: bool, stream: int) -> Tables:
        """Raises DeviceError."""


class BatchCopies:
    """See the module."""

    name = "batch"

    def __init__(self, device: Device) -> None:
        self._device = device

    def enqueue(self, pieces: Pieces, to_device: bool, stream: int) -> Tables:
        """A load's sources are finished host bytes and may be read at once; a save's are not."""
        ends = (pieces.device, pieces.host) if to_device else (pieces.host, pieces.device)
        order = Order.ANY if to_device else Order.STREAM
        self._device.copy_batch(*ends, pieces.lengths, order, stream)
        return ()


class PinnedTables:
    """Tables of addresses for kernels, which read them when they run: never re-used before.

    Cut out of few allocations: a driver may let everything else wait for one."""

    def __init__(self, device: Device, pointers: Callable[[UIntArray], UIntArray] | None) -> None:
        """`pointers`: where kernels find the host addresses given; None: where the host does."""
        self._device = device
        self._pointers = pointers
        self._free: dict[int, list[ByteArray]] = {}
        """By size."""
        self._made: list[ByteArray] = []
        self._places: dict[int, int] = {}
        """Host address of a table -> where kernels find it."""

    def write(self, columns: Sequence[UIntArray]) -> tuple[ByteArray, list[int]]:
        """A table and where kernels find each column of uint64 [n]."""
        length = 8 * len(columns[0])
        table = self._take(len(columns) * length)
        words = table[: len(columns) * length].view(np.uint64).reshape(len(columns), -1)
        for row, column in zip(words, columns, strict=True):
            row[:] = column
        at = self._places[table.ctypes.data]
        return table, [at + number * length for number in range(len(columns))]

    def host(self, pieces: Pieces) -> UIntArray:
        """The pieces' host addresses as kernels know them."""
        return pieces.host if self._pointers is None else self._pointers(pieces.host)

    def give_back(self, tables: Tables) -> None:
        """The work that read them has ended."""
        for table in tables:
            self._free[len(table)].append(table)

    def _take(self, length: int) -> ByteArray:
        size = 1 << max(length - 1, 4095).bit_length()
        free = self._free.setdefault(size, [])
        if not free:
            made = self._device.allocate_pinned(max(size, TABLES_BYTES))
            self._made.append(made)
            place = self._device.pointer_of(made.ctypes.data)
            for at in range(0, len(made), size):
                free.append(made[at : at + size])
                self._places[free[-1].ctypes.data] = place + at
        return free.pop()

    def close(self) -> None:
        """All were given back."""
        for made in self._made:
            self._device.free_pinned(made)
        self._made.clear()
        self._free.clear()


class KernelCopies:
    """See the module."""

    name = "kernel"

    def __init__(self, device: Device, tables: PinnedTables) -> None:
        self._device = device
        self._tables = tables
        self._kernel = device.make_kernel(source_of("copy_pieces"), "copy_pieces")

    def enqueue(self, pieces: Pieces, to_device: bool, stream: int) -> Tables:
        host, count = self._tables.host(pieces), len(pieces.lengths)
        ends = (pieces.device, host) if to_device else (host, pieces.device)
        table, places = self._tables.write((*ends, pieces.lengths))
        blocks = min(count, KERNEL_BLOCKS)
        self._device.launch(self._kernel, blocks, KERNEL_THREADS, (*places, count), stream)
        return (table,)


class QuantisingCopies:
    """Packs what is saved and restores what is loaded, for the target it was made for."""

    name = "quantising"

    def __init__(self, device: Device, tables: PinnedTables, target: QuantisedTarget) -> None:
        self._device = device
        self._tables = tables
        source = source_of("quantise_pieces")
        self._pack = [
            device.make_kernel(source, name) for name in ("scale_pieces", "quantise_pieces")
        ]
        self._restore = [device.make_kernel(source, "restore_pieces")]
        is_fp8 = int(target.scheme == "fp8_e4m3")
        self._shape = (target.tokens, target.dim, target.token_stride_bytes, is_fp8)

    def enqueue(self, pieces: Pieces, to_device: bool, stream: int) -> Tables:
        count = len(pieces.lengths)
        table, places = self._tables.write((self._tables.host(pieces), pieces.device))
        for kernel in self._restore if to_device else self._pack:
            arguments = (*places, count, *self._shape)
            blocks = min(count, KERNEL_BLOCKS)
            self._device.launch(kernel, blocks, KERNEL_THREADS, arguments, stream)
        return (table,)


class Route:
    """A target's programs in layer order, and the only mechanism that fits it, if there is one."""

    def __init__(self, programs: tuple[Program, ...], only: Mechanism | None = None) -> None:
        self.programs = programs
        self.only = only
        self._alike = [one.stride.tobytes() + one.length.tobytes() for one in programs]

    def placed(
        self, slots: UIntArray, blocks: IntArray, fences: UIntArray
    ) -> Iterator[tuple[int, Pieces]]:
        """(number, copies) of every program. What layers have in common is worked out once."""
        # Blocks are the inner axis: numpy is slow along short ones.
        ids = blocks.astype(np.uint64)
        common: dict[bytes, tuple[UIntArray, UIntArray]] = {}
        for number, (program, alike) in enumerate(zip(self.programs, self._alike, strict=True)):
            if program.is_joinable:
                yield number, placed(program, slots, blocks, fences)
                continue
            if alike not in common:
                lengths = np.repeat(program.length, len(slots))
                common[alike] = ids * program.stride[:, None], lengths
            offsets, lengths = common[alike]
            host, device = slots + program.at[:, None], offsets + program.base[:, None]
            total = len(slots) * program.block_bytes
            yield number, Pieces(host.ravel(), device.ravel(), lengths, total)


@cache
def source_of(name: str) -> str:
    """A CUDA source that ships with this package."""
    return (files("engine_adapter") / "kernels" / f"{name}.cu").read_text(encoding="utf-8")


Case: TypeAlias = tuple[bool, int, int]
"""To the device or from it, length of a piece, number of pieces."""


@dataclass(frozen=True)
class Choice:
    """Which mechanism moves what, as measured on this device."""

    seconds: Mapping[Case, Mapping[str, float]]
    """Of each mechanism; nothing measured: copy engines do everything."""

    @cached_property
    def _best(self) -> dict[Case, str]:
        return {case: self._best_of(times) for case, times in self.seconds.items()}

    @staticmethod
    def _best_of(times: Mapping[str, float]) -> str:
        """A kernel takes processors from the engine: it has to be worth it."""
        handicaps = {name: KERNEL_HANDICAP if name == KernelCopies.name else 1.0 for name in times}
        return min(times, key=lambda name: times[name] * handicaps[name])

    def name_for(self, pieces: Pieces, to_device: bool) -> str:
        """Of the mechanism for these pieces: the nearest case that was measured decides."""
        if not self.seconds:
            return BatchCopies.name
        count = len(pieces.lengths)
        length = _nearest(LENGTHS, pieces.total_bytes / count)
        return self._best[to_device, length, _nearest(COUNTS, count)]

    def describe(self) -> dict[str, str]:
        """For people: a case -> what moves it, and GB/s of each mechanism."""
        told = {}
        for (to_device, length, count), times in self.seconds.items():
            case = f"{'load' if to_device else 'save'} {count} x {length >> 10} KiB"
            rates = {name: count * length / taken / 1e9 for name, taken in times.items()}
            each = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
            told[case] = f"{self._best_of(times)} ({each} GB/s)"
        return told


def _nearest(known: Sequence[int], value: float) -> int:
    return min(known, key=lambda one: abs(log2(one / value)))


def calibrated(
    device: Device,
    mechanisms: Sequence[Mechanism],
    tables: PinnedTables,
    pause: Callable[[], None],
) -> Choice:
    """Measure every case on a stream of its own; about a second. Leaves nothing allocated.

    Raises DeviceError, also when there is no memory for it.
    """
    host, there = device.allocate_pinned(PROBE_BYTES), device.allocate(PROBE_BYTES)
    stream = device.make_stream()
    events = [device.make_event(timed=True) for _ in range(2)]
    seconds: dict[Case, dict[str, float]] = {}

    def timed(mechanism: Mechanism, pieces: Pieces, to_device: bool) -> float:
        device.record(events[0], stream)
        read = mechanism.enqueue(pieces, to_device, stream)
        device.record(events[1], stream)
        while not device.is_done(events[1]):
            pause()
        tables.give_back(read)
        return device.seconds_between(*events)

    try:
        for to_device, length, count in product((True, False), LENGTHS, COUNTS):
            pieces = _probe(host.ctypes.data, there, length, count)
            seconds[to_device, length, count] = {
                one.name: min(timed(one, pieces, to_device) for _ in range(ROUNDS))
                for one in mechanisms
            }
    finally:
        for event in events:
            device.drop_event(event)
        device.drop_stream(stream)
        device.free(there)
        device.free_pinned(host)
    return Choice(seconds)


def _probe(host: int, there: int, length: int, count: int) -> Pieces:
    """Every second place, so that no two pieces join; places repeat when they run out."""
    places = PROBE_BYTES // length
    at = (np.arange(count, dtype=np.uint64) * np.uint64(2) % np.uint64(places)) * np.uint64(length)
    lengths = np.full(count, length, np.uint64)
    return Pieces(np.uint64(host) + at, np.uint64(there) + at, lengths, count * length)
