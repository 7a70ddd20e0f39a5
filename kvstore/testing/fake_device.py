"""A GPU that is none: streams run late, copies come in pieces, freed memory turns to poison.

Primitives of `FakeDevice`:
  the calls of `kvstore.device.Device`
  `enqueue(stream, body)`     work of the test's own, run when its turn comes
  `advance`, `drain`          let some, or all, of what is enqueued run
  `hold`, `let_go`            a stream that makes no progress
  `fail_registrations`        the registrations that will be refused

Nothing runs by itself: a seeded scheduler is stepped by queries, `advance` and `drain`, so that a
seed is a schedule. Its moods: `lazy` runs only what somebody asked for, `eager` everything at once,
`random` anything that may run. Addresses are this process' own; device memory is mapped twice when
exported. What a real device would answer with corruption or a fault, a touch of freed or
unregistered memory, is a lasting error here. Knows the bodies of kernels by their names.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count, pairwise
from threading import RLock
from typing import TypeAlias

import numpy as np

from kvstore.device import REGISTER_BYTES_MAX, Order
from kvstore.errors import DeviceError
from kvstore.testing.fake_memory import FRESH, FakeMemory
from kvstore.testing.fake_streams import FakeStreams, Mark, Mood, Step
from kvstore.types import ByteArray, UIntArray

SLICES_MAX = 3
COPY_SECONDS, COPY_BYTES_PER_SECOND = 1e-6, 50e9
LAUNCH_SECONDS, LAUNCH_BYTES_PER_SECOND = 8e-6, 40e9

Body: TypeAlias = Callable[["FakeDevice", tuple[int, ...]], Iterable[Step]]
"""A kernel: its arguments as they were at the launch -> its pieces, run when their turn comes."""


class FakeDevice:
    """See the module. `total_bytes`: device memory there is."""

    def __init__(
        self,
        seed: int = 0,
        *,
        mood: Mood = "random",
        total_bytes: int = 1 << 30,
        kernels: Mapping[str, Body] | None = None,
        index: int = 0,
    ) -> None:
        self.index = index
        self.calls = 0
        self.fail_registrations: set[int] = set()
        """Numbers, from 0, of the `register` calls to refuse."""
        self.registrations = 0
        """How many `register` calls there were."""
        self._chance = random.Random(seed)
        self._lock = RLock()
        self._ids = count(1)
        self._streams = FakeStreams(self._chance, mood)
        self._events: dict[int, Mark | None] = {}
        self._memory = FakeMemory(total_bytes)
        self._kernels: list[Body] = []
        self._bodies = {"copy_pieces": copy_pieces, **(kernels or {})}

    # ------------------------------------------------------------------ the test's side

    def make_compute_stream(self, *, is_blocking: bool = False) -> int:
        """A stream as an engine has it; a blocking one and stream 0 wait for each other."""
        stream = self.make_stream()
        if is_blocking:
            self._streams.blocking.add(stream)
        return stream

    def enqueue(self, stream: int, body: Callable[[], None]) -> None:
        with self._lock:
            self._begin_call()
            self._streams.push(stream, steps=iter((body,)))

    def advance(self, steps: int) -> None:
        """Run up to `steps` pieces of what may run."""
        with self._lock:
            for _ in range(steps):
                if not self._streams.step():
                    return

    def drain(self) -> None:
        """Run everything that is not held."""
        with self._lock:
            self._streams.drain()

    def hold(self, stream: int) -> None:
        self._streams.held.add(stream)

    def let_go(self, stream: int) -> None:
        self._streams.held.discard(stream)

    @property
    def error(self) -> str:
        """Why every call is refused: the first fault of something that ran."""
        return self._streams.error

    @property
    def is_idle(self) -> bool:
        return self._streams.is_idle

    # ------------------------------------------------------------------ streams and events

    def make_stream(self) -> int:
        with self._lock:
            self._begin_call()
            stream = next(self._ids)
            self._streams.open(stream)
            return stream

    def drop_stream(self, stream: int) -> None:
        with self._lock:
            self._begin_call()
            if not self._streams.close(stream):
                self._fault(f"stream {stream} was dropped with work in it")

    def make_event(self, *, timed: bool = False) -> int:
        with self._lock:
            self._begin_call()
            event = next(self._ids)
            self._events[event] = None
            return event

    def drop_event(self, event: int) -> None:
        with self._lock:
            self._begin_call()
            del self._events[event]

    def record(self, event: int, stream: int) -> None:
        with self._lock:
            self._begin_call()
            mark = self._events[event] = Mark(stream)
            self._streams.push(stream, mark=mark)

    def is_done(self, event: int) -> bool:
        with self._lock:
            self._begin_call()
            mark = self._events[event]
            if mark is None:
                return True
            if self._streams.mood == "lazy":
                if self._chance.random() < 0.5:
                    self._streams.run_for(mark)
            else:
                self.advance(self._chance.randrange(6))
            self._check()
            return mark.is_done

    def wait(self, stream: int, event: int) -> None:
        with self._lock:
            self._begin_call()
            mark = self._events[event]
            if mark is not None:
                self._streams.push(stream, until=mark)

    def seconds_between(self, first: int, last: int) -> float:
        with self._lock:
            self._begin_call()
            begin, end = self._events[first], self._events[last]
            if begin is None or end is None or not begin.is_done or not end.is_done:
                raise DeviceError("fake device: these events are not done")
            return end.at_seconds - begin.at_seconds

    # ------------------------------------------------------------------ memory

    def allocate(self, length: int) -> int:
        with self._lock:
            self._begin_call()
            return self._memory.allocate(length)

    def free(self, address: int) -> None:
        with self._lock:
            self._begin_call()
            if self._memory.is_open(address):
                self._fault("memory was freed while another process had it open")
            self._memory.free(address)

    def allocate_pinned(self, length: int) -> ByteArray:
        with self._lock:
            self._begin_call()
            memory = np.full(length, FRESH, np.uint8)
            self._memory.pin(self._memory.keep(memory), length)
            return memory

    def free_pinned(self, memory: ByteArray) -> None:
        self.unregister(memory.ctypes.data)

    def register(self, address: int, length: int) -> None:
        with self._lock:
            self._begin_call()
            number, self.registrations = self.registrations, self.registrations + 1
            if number in self.fail_registrations or length > REGISTER_BYTES_MAX:
                raise DeviceError("fake device: registration refused")
            self._memory.pin(address, length)

    def unregister(self, address: int) -> None:
        with self._lock:
            self._begin_call()
            self._memory.unpin(address)

    def pointer_of(self, address: int) -> int:
        self._begin_call()
        return address

    def export(self, address: int) -> bytes:
        self._begin_call()
        return self._memory.export(address)

    def open_export(self, handle: bytes) -> int:
        with self._lock:
            self._begin_call()
            return self._memory.open_export(handle)

    def close_export(self, address: int) -> None:
        with self._lock:
            self._begin_call()
            self._memory.close_export(address)

    def memory(self) -> tuple[int, int]:
        return self._memory.free_bytes, self._memory.total_bytes

    def bytes_at(self, address: int, length: int) -> ByteArray:
        """What lies there now; for tests, in no stream's order."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))

    # ------------------------------------------------------------------ copies and kernels

    def copy(self, destination: int, source: int, length: int, stream: int) -> None:
        with self._lock:
            self._begin_call()
            kinds = self._check_ends(destination, source, length)
            if kinds[1] == "pageable":  # staged before the call returns
                source = self._snapshot(source, length)
            self._streams.push(stream, steps=self._slices(destination, source, length, kinds))
            if kinds[0] == "pageable":
                end = Mark(stream)
                self._streams.push(stream, mark=end)
                self._streams.run_for(end)

    def copy_batch(
        self,
        destinations: UIntArray,
        sources: UIntArray,
        lengths: UIntArray,
        order: Order,
        stream: int,
    ) -> None:
        with self._lock:
            self._begin_call()
            if stream == 0:
                raise DeviceError("fake device: no batch copies on the default stream")
            steps: list[Step] = []
            pieces = zip(destinations.tolist(), sources.tolist(), lengths.tolist(), strict=True)
            for destination, source, length in pieces:
                kinds = self._check_ends(destination, source, length)
                is_early = order is Order.DURING_CALL or (
                    order is Order.ANY and self._chance.random() < 0.5
                )
                if is_early:
                    source, kinds = self._snapshot(source, length), (kinds[0], "pageable")
                steps += self._slices(destination, source, length, kinds)
            self._chance.shuffle(steps)
            self._streams.push(stream, steps=iter(steps))

    def make_kernel(self, source: str, name: str) -> int:
        self._begin_call()
        if name not in source or name not in self._bodies:
            raise DeviceError(f"fake device: no body for kernel {name}")
        self._kernels.append(self._bodies[name])
        return len(self._kernels) - 1

    def launch(
        self, kernel: int, blocks: int, threads: int, arguments: tuple[int, ...], stream: int
    ) -> None:
        with self._lock:
            self._begin_call()
            body = self._kernels[kernel]

            def steps() -> Iterator[Step]:
                self._streams.now_seconds += LAUNCH_SECONDS
                yield from body(self, arguments)

            self._streams.push(stream, steps=steps())

    def move(self, destination: int, source: int, length: int) -> None:
        """For kernel bodies: bytes copied now; a lasting error unless the device may touch both."""
        for address in (destination, source):
            if not self._memory.is_known(address, length):
                self._fault(f"a kernel touched {length} bytes at {address:#x}, not the device's")
                return
        self._streams.now_seconds += length / LAUNCH_BYTES_PER_SECOND
        ctypes.memmove(destination, source, length)

    def words_at(self, address: int, words: int) -> list[int]:
        """For kernel bodies: unsigned 64-bit numbers in memory that the device may read."""
        into = (ctypes.c_uint64 * words)()
        if self._memory.is_known(address, 8 * words):
            ctypes.memmove(into, address, 8 * words)
        else:
            self._fault(f"a table at {address:#x} that is not the device's")
        return list(into)

    # ------------------------------------------------------------------ inside: copies

    def _check_ends(self, destination: int, source: int, length: int) -> tuple[str, str]:
        """What both are by the books at the call; refuses what no copy may do."""
        kinds = self._memory.kind(destination, length), self._memory.kind(source, length)
        if "device" not in kinds:
            raise DeviceError(f"fake device: a copy between {kinds[1]} and {kinds[0]} memory")
        return kinds

    def _snapshot(self, source: int, length: int) -> int:
        return self._memory.keep(self.bytes_at(source, length).copy())

    def _slices(
        self, destination: int, source: int, length: int, kinds: tuple[str, str]
    ) -> Iterator[Step]:
        cuts = sorted(self._chance.randrange(length + 1) for _ in range(SLICES_MAX - 1))
        parts = [(a, b) for a, b in pairwise([0, *cuts, length]) if b > a]
        self._chance.shuffle(parts)
        for start, stop in parts:
            ends = destination + start, source + start
            yield partial(self._copy_slice, *ends, stop - start, kinds)

    def _copy_slice(
        self, destination: int, source: int, length: int, kinds: tuple[str, str]
    ) -> None:
        """`kinds`: what both ends were by the books at the call."""
        for address, kind in zip((destination, source), kinds, strict=True):
            if kind != "pageable" and not self._memory.is_known(address, length):
                self._fault(f"a copy touched freed or unpinned memory at {address:#x}")
                return
        self._streams.now_seconds += COPY_SECONDS / SLICES_MAX + length / COPY_BYTES_PER_SECOND
        ctypes.memmove(destination, source, length)

    # ------------------------------------------------------------------ inside: the scheduler

    def _begin_call(self) -> None:
        self.calls += 1
        self._check()
        if self._streams.mood == "random" and self._chance.random() < 0.2:
            self.advance(self._chance.randrange(4))

    def _check(self) -> None:
        if self.error:
            raise DeviceError(f"fake device: {self.error}")

    def _fault(self, what: str) -> None:
        self._streams.error = self._streams.error or what


def copy_pieces(device: FakeDevice, arguments: tuple[int, ...]) -> Iterator[Step]:
    """The body of the copy kernel: (destinations, sources, lengths, count); a table entry is read
    when its piece runs."""
    destinations, sources, lengths, pieces = arguments

    def piece(number: int) -> None:
        at = 8 * number
        device.move(
            device.words_at(destinations + at, 1)[0],
            device.words_at(sources + at, 1)[0],
            device.words_at(lengths + at, 1)[0],
        )

    for number in range(pieces):
        yield partial(piece, number)
