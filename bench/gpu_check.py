"""Suite `gpu_check`: the transfer engine on a GPU, and what of it needs none.

Run it with `make bench SUITE=gpu_check`, or `python -m bench.gpu_check [--only NAME...] [--quick]`.
On a machine without a usable GPU it says so, measures what needs none on the stand-in, names the
rest as not measured, and ends with 0. With one it first runs `tests/gpu`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np

from bench import gpu_kernels, gpu_measure
from bench.harness import Bar, Context, Part, Reading, Suite, single, spread
from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.lanes import Lanes
from engine_adapter.pinning import Stretch
from engine_adapter.transfer import LoadPlan, PagedTarget, Plane
from engine_adapter.transfer_moves import COUNTS, LENGTHS, Choice, Tables, source_of
from engine_adapter.transfer_plan import Pieces
from kvstore.device import open_device
from kvstore.errors import ConfigError
from kvstore.layout import BlockLayout
from kvstore.testing.fake_device import FakeDevice
from kvstore.types import IntArray, UIntArray

BLOCKS, LAYERS, LAYER_BYTES = 1000, 32, 64 << 10
SEEDS_PER_BUG = 500
SEEDS_A_LOT = 250
"""Schedules that a process plays in one go."""
SUBMIT = Bar("submit_us_per_1000_blocks", "us", at_most=2000)
SCHEDULES = (
    Bar("fake_schedules_run", "schedules", at_least=10_000),
    Bar("fake_schedules_wrong", "schedules", at_most=0),
)
BUGS = Bar("fake_ordering_bugs_found", "of 8", at_least=8)
COMPILED = Bar("kernels_compiled", "targets", at_least=3)
MISMATCHES = Bar("kernel_cpu_mismatches", "cases", at_most=0)


class _Scattered:
    """Blocks in slots that do not follow each other: nothing can be joined."""

    def __init__(self, layout: BlockLayout) -> None:
        order = np.random.default_rng(1).permutation(2 * BLOCKS)[:BLOCKS].astype(np.uint64)
        self._places: UIntArray = np.uint64(1 << 40) + order * np.uint64(layout.slot_bytes)
        self.readable = np.full(BLOCKS, 0xFF, np.uint8)
        self.whole = BLOCKS
        self.span = (1 << 40, 2 * BLOCKS * layout.slot_bytes)

    def addresses(self, blocks: IntArray) -> UIntArray:
        return self._places[blocks]


class _Counting:
    """A mechanism that only counts: what is left is planning."""

    name = "batch"

    def __init__(self) -> None:
        self.pieces = 0

    def enqueue(self, pieces: Pieces, to_device: bool, stream: int) -> Tables:
        self.pieces += len(pieces.lengths)
        return ()


class _Silent(FakeDevice):
    """Takes events without a word: what a driver does with them is not planning."""

    def record(self, event: int, stream: int) -> None:
        """Nothing runs here."""

    def wait(self, stream: int, event: int) -> None:
        """Nothing runs here."""


def submit(context: Context) -> Reading:
    """Planning alone."""
    layout = BlockLayout(16, LAYERS, LAYER_BYTES)
    half = LAYER_BYTES // 2
    planes = tuple((Plane(n << 32, half, half, 2, 2 * BLOCKS * half),) for n in range(LAYERS))
    target, source = PagedTarget(layout, planes, 2 * BLOCKS), _Scattered(layout)
    device = _Silent(mood="eager")
    cases = product((True, False), LENGTHS, COUNTS)
    measured = Choice({case: {"batch": 1.0, "kernel": 2.0} for case in cases})
    lanes = Lanes(device, now=time.monotonic, pause=lambda: None, choice=measured)
    lanes.mechanisms["batch"] = counting = _Counting()
    device.register(*source.span)
    # The arena is address space nobody backs here: planning never reads it.
    lanes.pins._set({source.span[0]: Stretch(sum(source.span), 0)})
    transfers, compute = DeviceTransfers(lanes, ThreadPoolExecutor(1)), device.make_compute_stream()
    taken: list[float] = []
    for turn in range(context.several(41, 11)):
        blocks = np.random.default_rng(turn).permutation(2 * BLOCKS)[:BLOCKS]
        any_source: Any = source
        began = time.thread_time()
        load = transfers.start_load(LoadPlan(target, any_source, blocks), compute)
        taken.append(1e6 * (time.thread_time() - began))
        assert load.wait_ended(1.0)
    assert counting.pieces == len(taken) * BLOCKS * LAYERS * 2
    note = (
        f"CPU time of start_load for {BLOCKS} scattered blocks, {LAYERS} layers, keys and values "
        f"apart (64,000 pieces), until they are handed to a mechanism; without the driver's share; "
        f"{spread(taken)} of {len(taken)}"
    )
    return Reading(SUBMIT.name, float(np.median(taken)), note)


def wrong_of(first: int) -> list[int]:
    """Seeds of one lot whose schedule had a wrong byte."""
    from bench.gpu_schedules import run_schedule  # greenlet

    logging.disable(logging.WARNING)
    return [seed for seed in range(first, first + SEEDS_A_LOT) if run_schedule(seed)]


def _schedules(context: Context) -> Iterable[Reading]:
    count = context.several(10_000, 500)
    starts = range(0, count, SEEDS_A_LOT)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        wrong = [seed for found in processes.map(wrong_of, starts) for seed in found]
    note = "loads, saves, aborts, re-use, timeouts, stuck streams, daemon deaths; seeds from 0"
    yield Reading("fake_schedules_run", count, note)
    yield Reading("fake_schedules_wrong", len(wrong), f"seeds with a wrong byte: {wrong[:5]}")


def _bugs(context: Context) -> Reading:
    from bench.gpu_schedules import PLANTED, seeds_until_found  # greenlet

    found = {bug: seeds_until_found(bug, iter(range(SEEDS_PER_BUG))) for bug in PLANTED}
    note = "schedules until seen: " + ", ".join(f"{bug} {at}" for bug, at in found.items())
    return Reading(BUGS.name, sum(at is not None for at in found.values()), note)


def _compiled(context: Context) -> Reading:
    notes, good = [], 0
    for target in gpu_kernels.TARGETS:
        made = [gpu_kernels.compiled(source_of(name), target) for name in gpu_kernels.names()]
        good += all(one.code_bytes and not one.spilled_bytes for one in made)
        notes.append(f"{target}: {max(one.registers for one in made)} registers at most")
    note = f"{len(gpu_kernels.names())} sources, no spills; " + ", ".join(notes)
    return Reading(COMPILED.name, good, note)


def _mismatches(context: Context) -> Reading:
    wrong = gpu_kernels.mismatches_in_child()
    note = "the same sources through g++ against numpy; first: " + (wrong[0] if wrong else "none")
    return Reading(MISMATCHES.name, len(wrong), note)


WITHOUT_GPU = (
    single(submit, SUBMIT),
    Part("random schedules on the stand-in", SCHEDULES, _schedules),
    single(_bugs, BUGS),
    single(_compiled, COMPILED),
    single(_mismatches, MISMATCHES),
)


def why_no_gpu() -> str:
    """ "" when there is a device to measure on."""
    try:
        open_device(0)
    except ConfigError as error:
        return str(error)
    return ""


def main() -> int:
    logging.disable(logging.WARNING)  # schedules refuse registrations by the thousand
    reason = why_no_gpu()
    if not reason:
        # Without plug-ins too, whose settings would be unknown ones.
        quiet = ["-W", "ignore::pytest.PytestConfigWarning"]
        tests = [sys.executable, "-m", "pytest", "-q", *quiet, "-m", "gpu", "tests/gpu"]
        failed = subprocess.run(tests, env={**os.environ, "PYTHONPATH": "."}).returncode
        parts = [*gpu_measure.PARTS, *WITHOUT_GPU]
        return Suite("gpu_check", parts, gpu_measure.setting()).main() or failed
    names = ", ".join(bar.name for part in gpu_measure.PARTS for bar in part.bars)
    status = Suite("gpu_check", WITHOUT_GPU, {"not_measured": names}).main()
    print(f"no GPU to measure on: {reason}; not measured: {names}")
    return status


if __name__ == "__main__":
    sys.exit(main())
