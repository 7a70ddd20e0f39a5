"""The device stand-in: what it must do wrong on purpose, so that the code on it must be right."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvstore.device import Order
from kvstore.errors import DeviceError
from kvstore.testing.fake_device import FakeDevice
from kvstore.testing.fake_memory import FREED, FRESH
from kvstore.types import ByteArray, UIntArray

LENGTH = 256


def words(*values: int) -> UIntArray:
    return np.array(values, np.uint64)


def filled(device: FakeDevice, value: int) -> ByteArray:
    memory = device.allocate_pinned(LENGTH)
    memory[:] = value
    return memory


def test_streams_run_late_and_waits_order_them() -> None:
    device = FakeDevice(mood="lazy")
    first, second, event = device.make_stream(), device.make_stream(), device.make_event()
    order: list[int] = []
    device.enqueue(first, lambda: order.append(1))
    device.record(event, first)
    device.wait(second, event)
    device.enqueue(second, lambda: order.append(2))
    assert order == []
    device.drain()
    assert order == [1, 2]


def test_an_event_never_recorded_counts_as_done_and_holds_nobody() -> None:
    device = FakeDevice(mood="lazy")
    event, stream = device.make_event(), device.make_stream()
    assert device.is_done(event)
    device.wait(stream, event)
    device.enqueue(stream, lambda: None)
    device.drain()
    assert device.is_idle


def test_a_wait_is_bound_to_the_record_before_it() -> None:
    device = FakeDevice(mood="random")
    stream, other, event = device.make_stream(), device.make_stream(), device.make_event()
    device.record(event, stream)
    device.wait(other, event)
    device.hold(stream)
    device.record(event, stream)
    device.let_go(stream)
    device.drain()
    assert device.is_done(event)


def test_the_default_stream_and_blocking_ones_wait_for_each_other() -> None:
    for seed in range(20):
        device = FakeDevice(seed, mood="random")
        blocking = device.make_compute_stream(is_blocking=True)
        order: list[int] = []
        for number, stream in enumerate((blocking, 0, blocking, 0)):
            device.enqueue(stream, partial(order.append, number))
        device.drain()
        assert order == [0, 1, 2, 3]


def test_new_and_freed_memory_hold_poison_and_a_late_copy_is_found_out() -> None:
    device = FakeDevice(mood="lazy")
    host, stream = filled(device, 7), device.make_stream()
    there = device.allocate(LENGTH)
    assert (device.bytes_at(there, LENGTH) == FRESH).all()
    device.copy(there, host.ctypes.data, LENGTH, stream)
    device.free(there)
    assert (device.bytes_at(there, LENGTH) == FREED).all()
    device.drain()
    with pytest.raises(DeviceError, match="freed or unpinned"):
        device.make_event()


def test_pinned_sources_are_read_late_and_pageable_ones_at_the_call() -> None:
    device = FakeDevice(mood="lazy")
    pinned, pageable = filled(device, 1), np.full(LENGTH, 2, np.uint8)
    stream, there = device.make_stream(), device.allocate(2 * LENGTH)
    device.copy(there, pinned.ctypes.data, LENGTH, stream)
    device.copy(there + LENGTH, pageable.ctypes.data, LENGTH, stream)
    pinned[:] = pageable[:] = 9
    device.drain()
    assert (device.bytes_at(there, LENGTH) == 9).all()
    assert (device.bytes_at(there + LENGTH, LENGTH) == 2).all()


@pytest.mark.parametrize("order", [Order.ANY, Order.STREAM])
def test_any_order_may_read_before_earlier_work(order: Order) -> None:
    seen = set()
    for seed in range(12):
        device = FakeDevice(seed, mood="lazy")
        host, stream, there = filled(device, 0), device.make_stream(), device.allocate(LENGTH)
        source = device.bytes_at(there, LENGTH)
        device.enqueue(stream, partial(source.fill, 5))
        device.copy_batch(words(host.ctypes.data), words(there), words(LENGTH), order, stream)
        device.drain()
        seen.add(int(host[0]))
    assert seen == ({5, FRESH} if order is Order.ANY else {5})


def test_tables_are_read_when_the_kernel_runs() -> None:
    device = FakeDevice(mood="lazy")
    one, two, table = filled(device, 1), filled(device, 2), device.allocate_pinned(24)
    there, stream = device.allocate(LENGTH), device.make_stream()
    kernel = device.make_kernel("copy_pieces", "copy_pieces")
    table.view(np.uint64)[:] = there, one.ctypes.data, LENGTH
    at = table.ctypes.data
    device.launch(kernel, 1, 32, (at, at + 8, at + 16, 1), stream)
    table.view(np.uint64)[1] = two.ctypes.data
    device.drain()
    assert (device.bytes_at(there, LENGTH) == 2).all()


def test_registrations_are_kept_like_a_driver_keeps_them() -> None:
    device = FakeDevice(mood="lazy")
    memory = np.zeros(4 * LENGTH, np.uint8)
    at = memory.ctypes.data
    device.register(at, LENGTH)
    device.register(at + LENGTH, LENGTH)
    with pytest.raises(DeviceError, match="712"):
        device.register(at, LENGTH)
    with pytest.raises(DeviceError, match="713"):
        device.unregister(at + 2 * LENGTH)
    stream, there = device.make_stream(), device.allocate(LENGTH)
    with pytest.raises(DeviceError, match="crosses"):
        device.copy(there, at + LENGTH // 2, LENGTH, stream)
    with pytest.raises(DeviceError, match="default stream"):
        device.copy_batch(words(there), words(at), words(8), Order.ANY, 0)
    device.fail_registrations = {device.registrations}
    with pytest.raises(DeviceError, match="refused"):
        device.register(at + 2 * LENGTH, LENGTH)
    device.make_event()  # a refusal leaves no error behind
    device.copy(there, at, LENGTH, stream)
    device.unregister(at)
    device.drain()
    with pytest.raises(DeviceError, match="freed or unpinned"):
        device.make_event()


def test_exports_are_the_same_memory_until_closed() -> None:
    device = FakeDevice(mood="lazy")
    there, stream, host = device.allocate(LENGTH), device.make_stream(), filled(device, 4)
    mapped = device.open_export(device.export(there))
    assert mapped != there
    device.copy(there, host.ctypes.data, LENGTH, stream)
    device.drain()
    assert (device.bytes_at(mapped, LENGTH) == 4).all()
    device.close_export(mapped)
    with pytest.raises(DeviceError, match="freed"):
        device.copy(mapped, host.ctypes.data, LENGTH, stream)
