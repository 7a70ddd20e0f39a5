"""What a GPU check measures with, tried at a small size on the stand-in, and what it imports."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from bench.gpu_check import submit
from bench.gpu_measure import Rig
from bench.gpu_world import Baton
from bench.harness import Context
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


def test_planning_is_timed_where_no_device_is(tmp_path: Path) -> None:
    assert submit(Context(tmp_path, frozenset(), True)).value > 0


def test_a_gpu_check_needs_only_what_its_machine_has() -> None:
    """What docs/gpu.md names, and what bench/gpu_check.txt lists."""
    root = Path(__file__).parents[2]
    code = """
import sys
import bench.gpu_check, engine_adapter.pinning, kvstore.tier.gpu
ours = {"bench", "engine_adapter", "kvstore"}
tops = {name.partition(".")[0] for name in sys.modules if hasattr(sys.modules[name], "__file__")}
print(*(tops - ours - set(sys.stdlib_module_names)))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    found = {name for name in done.stdout.split() if not name.startswith(("_", "grpc"))}
    lines = (root / "bench" / "gpu_check.txt").read_text("utf-8").splitlines()
    listed = {line.partition(">")[0] for line in lines if not line.startswith("#")}
    assert found <= {"numpy", "typing_extensions", "google"} | listed
