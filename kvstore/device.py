"""A GPU, seen through the few calls that moving blocks takes.

Primitives:
  `Device`                     streams, events, memory, registration, copies, launches
  `Order`                      when a batch copy may read its sources
  `CudaDevice`, `open_device`  the real one; `kvstore.testing.fake_device` is the stand-in

Streams, events and addresses are plain numbers, so that an engine's own can be passed in. Nothing
here waits for a device: a caller asks `is_done`. cupy is imported in the factory and nowhere else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from kvstore.errors import ConfigError, DeviceError
from kvstore.types import ByteArray, UIntArray

REGISTER_BYTES_MAX = 64 << 30
"""One registration; drivers refuse calls of 512 GiB."""
IPC_HANDLE_BYTES = 64
OVERLAP_BYTES_MAX = 128 << 10
"""Longest piece of a batch that is asked to stay off the processors: longer ones get slow so."""


class Order(IntEnum):
    """When the copies of a batch may read their sources; the values are CUDA's."""

    STREAM = 1
    """After all earlier work of the stream."""
    DURING_CALL = 2
    """Before the call returns."""
    ANY = 3
    """Also before earlier work of the stream: only for sources that nobody writes any more."""


class Device(Protocol):
    """Thread-safe. Every method raises DeviceError when the device refuses, or reports that earlier
    work failed; a device that failed once refuses everything."""

    index: int

    def make_stream(self) -> int:
        """A stream that does not wait for the default stream, nor that for it."""

    def drop_stream(self, stream: int) -> None:
        """After its last work has ended."""

    def make_event(self, *, timed: bool = False) -> int: ...

    def drop_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None:
        """The event now means all work enqueued on the stream up to here."""

    def is_done(self, event: int) -> bool:
        """Whether what the event means has ended; True if it was never recorded."""

    def wait(self, stream: int, event: int) -> None:
        """Later work of the stream waits for what the event means at this moment."""

    def seconds_between(self, first: int, last: int) -> float:
        """Between two timed events that are done."""

    def allocate(self, length: int) -> int:
        """Address of new device memory; one allocation is one IPC handle."""

    def free(self, address: int) -> None:
        """Memory that no enqueued work touches."""

    def allocate_pinned(self, length: int) -> ByteArray:
        """uint8 [length] of host memory that the device reads and writes by its address."""

    def free_pinned(self, memory: ByteArray) -> None: ...

    def register(self, address: int, length: int) -> None:
        """Pin host memory, at most REGISTER_BYTES_MAX. A refusal leaves no error behind."""

    def unregister(self, address: int) -> None:
        """What `register` pinned at this address; no enqueued work touches it."""

    def pointer_of(self, address: int) -> int:
        """Where kernels find pinned host memory."""

    def export(self, address: int) -> bytes:
        """IPC handle of an allocation's base, for another process."""

    def open_export(self, handle: bytes) -> int:
        """Base address here of another process' allocation."""

    def close_export(self, address: int) -> None: ...

    def copy(self, destination: int, source: int, length: int, stream: int) -> None:
        """One copy, in stream order. Direction follows from the addresses."""

    def copy_batch(
        self,
        destinations: UIntArray,
        sources: UIntArray,
        lengths: UIntArray,
        order: Order,
        stream: int,
    ) -> None:
        """Many copies in no order among each other. The three arrays, uint64 [n], are read before
        the call returns. Not on the default stream."""

    def make_kernel(self, source: str, name: str) -> int:
        """A function of a CUDA source whose arguments are all unsigned 64-bit numbers; the same
        one for the same words."""

    def launch(
        self, kernel: int, blocks: int, threads: int, arguments: tuple[int, ...], stream: int
    ) -> None: ...

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of device memory."""


_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_HOST_PORTABLE_MAPPED = 1 | 2
_IPC_LAZY_PEER_ACCESS = 1
_COPY_BY_ADDRESS = 4
_NOT_READY = 600
_BATCH_PREFERS_OVERLAP = 1


class _BatchAttributes(ctypes.Structure):
    """CUmemcpyAttributes: 24 bytes."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("destination_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CudaDevice:
    """A `Device` over cupy's runtime calls and, where cupy has none, the driver itself."""

    def __init__(self, cupy: Any, index: int) -> None:
        self.index = index
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._kernels: list[Any] = []
        self._numbers: dict[tuple[str, str], int] = {}
        """(source, name) -> number of a kernel."""
        self._streams: dict[int, Any] = {}
        """Streams as cupy launches on them."""
        self._call(self._runtime.free, 0)  # the first call of a process makes the context

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """On this device; the calling thread's own current device is as it was afterwards. cupy
        clears the pending error of a refused call, so that nobody else trips over it."""
        runtime = self._runtime
        refused = (runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError)
        try:
            before = runtime.getDevice()
            if before == self.index:
                return function(*arguments)
            runtime.setDevice(self.index)
            try:
                return function(*arguments)
            finally:
                runtime.setDevice(before)
        except refused as error:
            raise DeviceError(f"cuda device {self.index}: {error}") from error

    def _drive(self, name: str, *arguments: Any) -> None:
        """A driver call that cupy does not offer."""
        status = self._call(getattr(self._driver, name), *arguments)
        if status:
            raise DeviceError(f"cuda device {self.index}: {name} failed with {status}")

    # ------------------------------------------------------------------ streams and events

    def make_stream(self) -> int:
        return int(self._call(self._runtime.streamCreateWithFlags, _STREAM_NON_BLOCKING))

    def drop_stream(self, stream: int) -> None:
        self._streams.pop(stream, None)
        self._call(self._runtime.streamDestroy, stream)

    def make_event(self, *, timed: bool = False) -> int:
        flags = 0 if timed else _EVENT_DISABLE_TIMING
        return int(self._call(self._runtime.eventCreateWithFlags, flags))

    def drop_event(self, event: int) -> None:
        self._call(self._runtime.eventDestroy, event)

    def record(self, event: int, stream: int) -> None:
        self._call(self._runtime.eventRecord, event, stream)

    def is_done(self, event: int) -> bool:
        status: int = self._call(self._runtime.eventQuery, event)
        if status not in (0, _NOT_READY):
            raise DeviceError(f"cuda device {self.index}: earlier work failed with {status}")
        return status == 0

    def wait(self, stream: int, event: int) -> None:
        self._call(self._runtime.streamWaitEvent, stream, event)

    def seconds_between(self, first: int, last: int) -> float:
        milliseconds: float = self._call(self._runtime.eventElapsedTime, first, last)
        return milliseconds / 1000

    # ------------------------------------------------------------------ memory

    def allocate(self, length: int) -> int:
        return int(self._call(self._runtime.malloc, length))

    def free(self, address: int) -> None:
        self._call(self._runtime.free, address)

    def allocate_pinned(self, length: int) -> ByteArray:
        address = self._call(self._runtime.hostAlloc, length, _HOST_PORTABLE_MAPPED)
        return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))

    def free_pinned(self, memory: ByteArray) -> None:
        self._call(self._runtime.freeHost, memory.ctypes.data)

    def register(self, address: int, length: int) -> None:
        self._call(self._runtime.hostRegister, address, length, _HOST_PORTABLE_MAPPED)

    def unregister(self, address: int) -> None:
        self._call(self._runtime.hostUnregister, address)

    def pointer_of(self, address: int) -> int:
        found = ctypes.c_uint64()
        self._drive(
            "cuMemHostGetDevicePointer_v2",
            ctypes.byref(found),
            ctypes.c_void_p(address),
            ctypes.c_uint(0),
        )
        return found.value

    def export(self, address: int) -> bytes:
        return bytes(self._call(self._runtime.ipcGetMemHandle, address))

    def open_export(self, handle: bytes) -> int:
        return int(self._call(self._runtime.ipcOpenMemHandle, handle, _IPC_LAZY_PEER_ACCESS))

    def close_export(self, address: int) -> None:
        self._call(self._runtime.ipcCloseMemHandle, address)

    def memory(self) -> tuple[int, int]:
        free, total = self._call(self._runtime.memGetInfo)
        return int(free), int(total)

    # ------------------------------------------------------------------ copies

    def copy(self, destination: int, source: int, length: int, stream: int) -> None:
        self._call(self._runtime.memcpyAsync, destination, source, length, _COPY_BY_ADDRESS, stream)

    @cached_property
    def has_batch_copies(self) -> bool:
        """Whether the driver takes a whole batch in one call."""
        names = ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync")
        return any(hasattr(self._driver, name) for name in names)

    def copy_batch(
        self,
        destinations: UIntArray,
        sources: UIntArray,
        lengths: UIntArray,
        order: Order,
        stream: int,
    ) -> None:
        if not self.has_batch_copies:
            for piece in zip(
                destinations.tolist(), sources.tolist(), lengths.tolist(), strict=True
            ):
                self.copy(*piece, stream)
            return
        tables = [
            np.ascontiguousarray(table, np.uint64) for table in (destinations, sources, lengths)
        ]
        is_short = int(tables[2].max(initial=0)) <= OVERLAP_BYTES_MAX
        flags = _BATCH_PREFERS_OVERLAP if is_short else 0
        attributes = _BatchAttributes(order=int(order), flags=flags)
        first = ctypes.c_size_t(0)
        arguments = [
            *(ctypes.c_void_p(table.ctypes.data) for table in tables),
            ctypes.c_size_t(len(lengths)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
        ]
        if hasattr(self._driver, "cuMemcpyBatchAsync_v2"):
            self._drive("cuMemcpyBatchAsync_v2", *arguments, ctypes.c_void_p(stream))
        else:
            failed = ctypes.c_size_t(0)
            self._drive(
                "cuMemcpyBatchAsync", *arguments, ctypes.byref(failed), ctypes.c_void_p(stream)
            )

    # ------------------------------------------------------------------ kernels

    def make_kernel(self, source: str, name: str) -> int:
        if (source, name) not in self._numbers:
            module = self._cupy.RawModule(code=source, options=("-std=c++17",))
            try:
                self._kernels.append(self._call(module.get_function, name))
            except self._cupy.cuda.compiler.CompileException as error:
                raise DeviceError(f"cuda device {self.index}: {name} does not compile") from error
            self._numbers[source, name] = len(self._kernels) - 1
        return self._numbers[source, name]

    def launch(
        self, kernel: int, blocks: int, threads: int, arguments: tuple[int, ...], stream: int
    ) -> None:
        values = tuple(np.uint64(argument) for argument in arguments)
        if stream not in self._streams:
            self._streams[stream] = self._cupy.cuda.Stream.from_external(_External(stream))

        def enqueue() -> None:
            with self._streams[stream]:
                self._kernels[kernel]((blocks,), (threads,), values)

        self._call(enqueue)


class _External:
    """A stream's handle, as cupy takes it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def open_device(index: int = 0) -> Device:
    """CUDA device `index`. Raises ConfigError when there is none, or no cupy to reach it."""
    try:
        import cupy  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"cuda device {index}: cupy does not import ({error}); install cupy-cuda12x or "
            "cupy-cuda13x, whichever fits the driver"
        ) from error
    try:
        found = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(f"cuda device {index}: no usable driver ({error})") from error
    if not 0 <= index < found:
        raise ConfigError(f"cuda device {index}: this machine has {found}")
    return CudaDevice(cupy, index)
