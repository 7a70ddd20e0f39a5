"""The GPU tier on the stand-in: what every tier must do, and memory given back while in use."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.errors import DeviceError
from kvstore.testing.conformance import TierConformance
from kvstore.testing.fake_device import FakeDevice
from kvstore.tier.gpu import GpuTier
from kvstore.types import ByteArray, ClientId, UIntArray

MIB = 1 << 20
ONE, TWO = ClientId(1), ClientId(2)
SLOT = 256 << 10


def address(memory: ByteArray) -> UIntArray:
    return np.array([memory.ctypes.data], np.uint64)


class Harness:
    def __init__(self) -> None:
        self.device = FakeDevice(3, total_bytes=64 * MIB)
        self.tier = GpuTier(self.device, 4 * MIB, slab_bytes=MIB)

    def _finish(self, event: int) -> None:
        while not self.device.is_done(event):
            self.device.advance(1)
        self.device.drop_event(event)

    def write(self, slot: int, payload: ByteArray) -> None:
        host = self.device.allocate_pinned(len(payload))
        host[:] = payload
        length = np.array([len(payload)], np.uint64)
        self._finish(self.tier.copy_in([slot], address(host), length))
        self.tier.publish([slot])

    def read(self, slot: int, length: int) -> ByteArray:
        (place,) = self.tier.addresses([slot]).tolist()
        return self.device.bytes_at(place, length).copy()

    def damage(self, slot: int) -> None:
        (place,) = self.tier.addresses([slot]).tolist()
        self.device.bytes_at(place, 1)[:] ^= 1


@pytest.fixture
def harness() -> Iterator[Harness]:
    found = Harness()
    yield found
    found.tier.close()
    assert found.device.error == ""
    assert found.device.memory()[0] == 64 * MIB


class TestGpuTier(TierConformance):
    @pytest.fixture
    def harness(self) -> Iterator[Harness]:
        found = Harness()
        yield found
        found.tier.close()


def fill(harness: Harness, count: int) -> list[int]:
    slots = harness.tier.take(SLOT, count)
    for slot in slots:
        harness.write(slot, np.full(SLOT, slot % 251, np.uint8))
    return slots


def test_memory_is_taken_when_it_is_needed_and_one_slab_at_a_time(harness: Harness) -> None:
    assert harness.tier.allocated_bytes == 0
    fill(harness, 4)
    assert harness.tier.allocated_bytes == MIB
    fill(harness, 1)
    assert harness.tier.allocated_bytes == 2 * MIB


def test_a_device_without_memory_is_no_room_and_said(harness: Harness) -> None:
    taken = harness.device.allocate(62 * MIB + MIB // 2)
    assert len(harness.tier.take(SLOT, 16)) == 4
    assert harness.tier.take(SLOT, 4) == []
    assert "no memory" in harness.tier.remarks()[0]
    harness.device.free(taken)
    harness.tier.resize(4 * MIB)
    assert len(harness.tier.take(SLOT, 16)) == 12
    assert harness.tier.remarks() == harness.tier.health() == []


def test_a_slot_larger_than_a_slab_finds_no_room(harness: Harness) -> None:
    assert harness.tier.take(2 * MIB, 1) == []


def test_others_open_slabs_and_find_the_blocks(harness: Harness) -> None:
    slots = fill(harness, 6)
    handles = dict(harness.tier.handles_for(ONE))
    opened = {slab: harness.device.open_export(handle) for slab, handle in handles.items()}
    for slot in slots:
        slab, at = divmod(harness.tier.pool.offset_of(slot), MIB)
        found = harness.device.bytes_at(opened[slab] + at, SLOT)
        assert (found == slot % 251).all()
    assert harness.tier.handles_for(ONE) == []  # told once
    for base in opened.values():
        harness.device.close_export(base)


def test_memory_goes_back_after_blocks_and_openers_have_left(harness: Harness) -> None:
    tier = harness.tier
    slots = fill(harness, 9)
    tier.handles_for(ONE)
    tier.handles_for(TWO)
    tier.resize(MIB)
    leaving = tier.leaving()
    assert set(leaving.tolist()) < set(slots)
    assert tier.tend() == []  # blocks still lie there
    stays = next(slot for slot in slots if slot not in leaving.tolist())
    tier.free(leaving)
    asked = tier.tend()
    assert {client for client, _ in asked} == {ONE, TWO}
    assert "wait for engines" in tier.remarks()[0]
    for client, slab in asked:
        if client == ONE:
            tier.acknowledge(client, slab)
            tier.acknowledge(client, slab)
    assert tier.allocated_bytes == 3 * MIB
    tier.forget(TWO)
    assert tier.tend() == []
    assert tier.allocated_bytes == MIB
    assert (harness.read(stays, SLOT) == stays % 251).all()
    tier.check_integrity()


def test_closed_slabs_take_no_blocks_and_come_back_when_the_limit_rises(harness: Harness) -> None:
    tier = harness.tier
    fill(harness, 16)
    tier.resize(2 * MIB)
    assert tier.take(SLOT, 1) == []
    tier.free(tier.leaving())
    assert tier.take(SLOT, 1) == []
    tier.tend()
    assert tier.allocated_bytes == 2 * MIB
    tier.resize(4 * MIB)
    assert len(tier.take(SLOT, 9)) == 8
    tier.check_integrity()


def test_a_limit_that_rises_in_mid_give_back_is_reached_in_the_end(harness: Harness) -> None:
    tier = harness.tier
    fill(harness, 16)
    tier.handles_for(ONE)
    tier.resize(0)
    tier.free(tier.leaving())
    asked = tier.tend()
    tier.resize(4 * MIB)
    for client, slab in asked:
        tier.acknowledge(client, slab)
    tier.tend()
    assert len(tier.take(SLOT, 16)) == 16
    tier.check_integrity()


def test_freed_memory_is_poison_to_those_who_did_not_close_it(harness: Harness) -> None:
    (slot,) = fill(harness, 1)
    (base,) = harness.tier.addresses([slot]).tolist()
    harness.tier.free([slot])
    harness.tier.resize(0)
    harness.tier.tend()
    with pytest.raises(DeviceError):
        harness.device.export(base)
