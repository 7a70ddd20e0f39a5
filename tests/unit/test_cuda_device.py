"""What `CudaDevice` asks of cupy and the driver, both replaced by what writes the calls down.

Whether a GPU then does it, only `tests/gpu` can tell.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore import device as device_module
from kvstore.device import CudaDevice, Order
from kvstore.errors import DeviceError


class CUDARuntimeError(RuntimeError):
    """cupy's, of the runtime."""


class CUDADriverError(RuntimeError):
    """cupy's, of the driver: what a launch raises."""


class Recorder:
    """A driver and a runtime; `known` are the driver's symbols."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self) -> None:
        self.known: tuple[str, ...] = ()
        self.current = 0
        self.calls: list[tuple[Any, ...]] = []

    def getDevice(self) -> int:
        return self.current

    def setDevice(self, index: int) -> None:
        self.current = index

    def free(self, address: int) -> None:
        """What makes the context."""

    def memcpyAsync(self, *arguments: Any) -> None:
        self.calls.append(("memcpyAsync", self.current, *arguments))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name not in self.known:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append((name, self.current, *arguments))
            return 0

        return call


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    found = Recorder()
    monkeypatch.setattr(device_module.ctypes, "CDLL", lambda name: found)
    yield found
    assert found.current == 0, "the caller's device was changed"


def cuda(recorder: Recorder, **more: Any) -> CudaDevice:
    driver = SimpleNamespace(CUDADriverError=CUDADriverError)
    inner = SimpleNamespace(runtime=recorder, driver=driver, **more)
    return CudaDevice(SimpleNamespace(cuda=inner, RawModule=more.get("RawModule")), 1)


def batch(device: CudaDevice, longest: int) -> None:
    to, fro = np.array([16, 64], np.uint64), np.array([1024, 2048], np.uint64)
    device.copy_batch(to, fro, np.array([8, longest], np.uint64), Order.STREAM, 7)


def table(pointer: Any) -> list[int]:
    return list((ctypes.c_uint64 * 2).from_address(pointer.value))


@pytest.mark.parametrize("name", ["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"])
def test_a_batch_is_one_call_of_the_driver(
    recorder: Recorder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.known = (name,)
    device, tables = cuda(recorder), []

    def call(*arguments: Any) -> int:
        *head, count, attributes, first, many = arguments[:7]
        tables.extend(map(table, head))
        seen = attributes._obj
        assert (count.value, first._obj.value, many.value) == (2, 0, 1)
        assert (seen.order, seen.flags, ctypes.sizeof(seen)) == (1, 1, 24)
        assert len(arguments) == (8 if name.endswith("_v2") else 9)
        assert arguments[-1].value == 7
        assert recorder.current == 1
        return 0

    monkeypatch.setattr(Recorder, name, staticmethod(call), raising=False)
    batch(device, 96)
    assert tables == [[16, 64], [1024, 2048], [8, 96]]


def test_without_batches_every_run_is_a_copy(recorder: Recorder) -> None:
    batch(cuda(recorder), 96)
    copies = [(1, 16, 1024, 8, 4, 7), (1, 64, 2048, 96, 4, 7)]
    assert recorder.calls == [("memcpyAsync", *one) for one in copies]


def test_long_pieces_do_not_ask_to_stay_off_the_processors(recorder: Recorder) -> None:
    recorder.known = ("cuMemcpyBatchAsync_v2",)
    batch(cuda(recorder), (128 << 10) + 1)
    (call,) = recorder.calls
    assert call[6]._obj.flags == 0


def test_a_kernel_is_made_once_and_a_refused_launch_is_a_device_error(recorder: Recorder) -> None:
    made: list[str] = []

    class Stream:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        @classmethod
        def from_external(cls, stream: Any) -> Stream:
            return cls(stream.__cuda_stream__()[1])

        def __enter__(self) -> None:
            assert (self.handle, recorder.current) == (7, 1)

        def __exit__(self, *_: object) -> None: ...

    class RawModule:
        def __init__(self, code: str, options: tuple[str, ...]) -> None: ...

        def get_function(self, name: str) -> Any:
            made.append(name)

            def run(grid: Any, threads: Any, values: Any) -> None:
                assert (grid, threads, [int(one) for one in values]) == ((3,), (32,), [5, 6])
                raise CUDADriverError("CUDA_ERROR_LAUNCH_FAILED")

            return run

    device = cuda(recorder, Stream=Stream, RawModule=RawModule)
    kernel = device.make_kernel("source", "name")
    assert device.make_kernel("source", "name") == kernel
    assert made == ["name"]
    with pytest.raises(DeviceError, match="LAUNCH_FAILED"):
        device.launch(kernel, 3, 32, (5, 6), 7)
