"""What all transfers of one device share: two streams, events, mechanisms, pinned memory.

Primitives of `Lanes`:
  `enqueue`    pieces of pinned memory, by the mechanism that suits them
  `bounce`     one lot between the device and a pinned buffer, for memory that is not pinned
  `Events`     a pool; an event is its taker's until given back
`lock` guards everything here and every transfer's state; it is never held while waiting.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import RLock

import numpy as np

from engine_adapter.pinning import BounceRing, PinnedArena
from engine_adapter.transfer_moves import (
    BatchCopies,
    Choice,
    KernelCopies,
    Mechanism,
    PinnedTables,
    QuantisingCopies,
    Tables,
)
from engine_adapter.transfer_plan import Pieces
from kvstore.device import OVERLAP_BYTES_MAX, Device
from kvstore.errors import DeviceError
from kvstore.types import ByteArray


class Events:
    """Made on demand, never destroyed before `close`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[int] = []

    def take(self) -> int:
        return self._free.pop() if self._free else self._device.make_event()

    def give_back(self, event: int) -> None:
        """Nobody will wait for, or ask about, what it means."""
        self._free.append(event)

    def close(self) -> None:
        while self._free:
            self._device.drop_event(self._free.pop())


class Lanes:
    """See the module. `now` and `pause` are a monotonic clock and a very short sleep."""

    def __init__(
        self,
        device: Device,
        *,
        now: Callable[[], float],
        pause: Callable[[], None],
        choice: Choice | None = None,
    ) -> None:
        self.device = device
        self.now = now
        self.pause = pause
        self.lock = RLock()
        self.load_stream = device.make_stream()
        self.save_stream = device.make_stream()
        self.events = Events(device)
        self.pins = PinnedArena(device)
        self.ring = BounceRing(device)
        self.tables = PinnedTables(device, self.pins.pointers)
        self.mechanisms: dict[str, Mechanism] = {
            one.name: one for one in (BatchCopies(device), KernelCopies(device, self.tables))
        }
        self.choice = choice or Choice({})
        ways = (*self.mechanisms, QuantisingCopies.name, "bounced", "gpu_tier")
        self.bytes_by_way = dict.fromkeys(ways, 0)
        self._in_flight: list[tuple[int, ByteArray]] = []
        """Bounce buffers and the events after which they are free."""

    def mark(self, stream: int) -> int:
        """An event: what is enqueued on the stream by now."""
        event = self.events.take()
        self.device.record(event, stream)
        return event

    def hand_over(self, compute_stream: int, stream: int, mark: int | None) -> None:
        """Later work of `stream` waits for what is enqueued on the compute stream by now, or was
        when it was marked."""
        event = self.mark(compute_stream) if mark is None else mark
        self.device.wait(stream, event)
        # The wait is bound to this recording already: others may record the event anew.
        if mark is None:
            self.events.give_back(event)

    def enqueue(
        self,
        pieces: Pieces,
        to_device: bool,
        stream: int,
        held: list[ByteArray],
        only: Mechanism | None,
    ) -> None:
        """By `only`, or by the fastest. What `held` gains is for `tables` to have back, after the
        copies."""
        is_lent = self.pins.is_lent(pieces.host) if to_device else None
        if is_lent is not None and is_lent.any():
            there = pieces.only(is_lent)
            self.bytes_by_way["gpu_tier"] += there.total_bytes
            # Within a device copy engines are slow with pieces that a batch asks to keep off the
            # processors.
            short = there.total_bytes <= OVERLAP_BYTES_MAX * len(there.lengths)
            near = self.mechanisms[KernelCopies.name if short else BatchCopies.name]
            held += self._enqueue(there, True, stream, only or near)
            pieces = pieces.only(~is_lent)
        if len(pieces.lengths):
            fastest = self.mechanisms[self.choice.name_for(pieces, to_device)]
            held += self._enqueue(pieces, to_device, stream, only or fastest)

    def _enqueue(
        self, pieces: Pieces, to_device: bool, stream: int, mechanism: Mechanism
    ) -> Tables:
        tables = mechanism.enqueue(pieces, to_device, stream)
        self.bytes_by_way[mechanism.name] += pieces.total_bytes
        return tables

    # ------------------------------------------------------------------ memory that is not pinned

    def take_buffer(self, until: float) -> ByteArray | None:
        """A bounce buffer, waiting for one up to `until`; call it without the lock."""
        while True:
            with self.lock:
                self._reclaim()
                buffer = self.ring.take()
            if buffer is not None or self.now() >= until:
                return buffer
            self.pause()

    def bounce(
        self,
        pieces: Pieces,
        buffer: ByteArray,
        to_device: bool,
        stream: int,
        held: list[ByteArray],
        only: Mechanism | None,
    ) -> int:
        """One lot between the device and `buffer`; the event after which it is through is the
        caller's."""
        self.enqueue(_through(pieces, buffer), to_device, stream, held, only)
        self.bytes_by_way["bounced"] += pieces.total_bytes
        event = self.events.take()
        self.device.record(event, stream)
        return event

    def reclaim_after(self, event: int, buffer: ByteArray) -> None:
        """The buffer is free once the event is done, and so is the event."""
        self._in_flight.append((event, buffer))

    def _reclaim(self) -> None:
        still: list[tuple[int, ByteArray]] = []
        for event, buffer in self._in_flight:
            if self.device.is_done(event):
                self.events.give_back(event)
                self.ring.give_back(buffer)
            else:
                still.append((event, buffer))
        self._in_flight = still

    def close(self) -> None:
        """All transfers have ended. A device that fails by now keeps what it has."""
        with suppress(DeviceError), self.lock:
            self._reclaim()
            self.tables.close()
            self.ring.close()
            self.pins.close()
            self.events.close()
            self.device.drop_stream(self.load_stream)
            self.device.drop_stream(self.save_stream)


def _through(pieces: Pieces, buffer: ByteArray) -> Pieces:
    """The same pieces, with the buffer in the slots' place: one after the other."""
    at = np.cumsum(pieces.lengths) - pieces.lengths
    return pieces._replace(host=np.uint64(buffer.ctypes.data) + at)


def host_copies(pieces: Pieces, buffer: ByteArray) -> Iterator[tuple[int, int, int]]:
    """(slot address, buffer address, bytes) of each piece of a lot."""
    yield from zip(
        pieces.host.tolist(),
        _through(pieces, buffer).host.tolist(),
        pieces.lengths.tolist(),
        strict=True,
    )


def fill(pieces: Pieces, buffer: ByteArray) -> None:
    """Slots -> buffer, by the processor."""
    for slot, at, length in host_copies(pieces, buffer):
        ctypes.memmove(at, slot, length)


def spill(pieces: Pieces, buffer: ByteArray) -> None:
    """Buffer -> slots, by the processor."""
    for slot, at, length in host_copies(pieces, buffer):
        ctypes.memmove(slot, at, length)
