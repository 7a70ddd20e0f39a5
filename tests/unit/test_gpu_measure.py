"""What a GPU check measures with, tried at a small size on the stand-in."""

from __future__ import annotations

import time

import numpy as np

from bench.gpu_measure import Rig
from bench.gpu_world import Baton
from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.lanes import Lanes
from kvstore.testing.fake_device import FakeDevice


def test_the_rig_loads_saves_and_times() -> None:
    device = FakeDevice(mood="random")
    lanes = Lanes(device, now=time.monotonic, pause=lambda: device.advance(5))
    transfers = DeviceTransfers(lanes, Baton())
    rig = Rig(device, transfers, 6, 4096, 2)
    transfers._pin_all()
    rig.wait_pinned()
    assert rig.seconds_of(rig.load) > 0
    rig.check()
    before = rig.arena.copy()
    rig.arena[:] = 0
    assert rig.seconds_of(rig.save) > 0
    assert np.array_equal(rig.arena, before)
    assert rig.plain_seconds(rig.there, rig.arena.ctypes.data) > 0
    slab = device.allocate(rig.size)
    base = transfers.open_slab(device.export(slab), rig.size)
    rig.fill(base)
    rig.arena[:] = 0  # nothing comes from there
    assert rig.seconds_of(lambda: rig.load(base)) > 0
    rig.arena[:] = before
    rig.check()
    assert transfers.describe()["bytes_by_way"]["gpu_tier"] == rig.size  # type: ignore[index]
