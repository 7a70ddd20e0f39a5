"""Moving blocks: plans against plain loops, layouts there and back, random schedules."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.gpu_measure import Reservation
from bench.gpu_schedules import PLANTED, run_schedule, seeds_until_found
from bench.gpu_world import Baton, RandomChoice, Slots, Source, World
from engine_adapter import device_transfer, transfer_moves
from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.lanes import Lanes
from engine_adapter.loader import LoadFailed
from engine_adapter.transfer import LoadPlan, PagedTarget, Plane, SavePlan, planes_of
from engine_adapter.transfer_moves import Choice, calibrated
from engine_adapter.transfer_plan import Pieces, compiled, placed, portions
from kvstore.device import OVERLAP_BYTES_MAX, Device
from kvstore.errors import ConfigError, DeviceError, InvalidRequest
from kvstore.layout import BlockLayout
from kvstore.testing.fake_device import FakeDevice
from kvstore.types import ByteArray, IntArray

LAYOUTS = ("kv,block,token,head,dim", "block,kv,token,head,dim", "block,head,kv,token,dim")


def tensor(device: FakeDevice, shape: tuple[int, ...]) -> tuple[int, ByteArray]:
    size = int(np.prod(shape))
    address = device.allocate(size)
    return address, device.bytes_at(address, size).reshape(shape)


# ---------------------------------------------------------------------- plans


@pytest.mark.parametrize("axes", LAYOUTS)
@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 1, 6), (2, 16, 8), (8, 3, 4), (4, 64, 2)])
def test_a_block_goes_out_and_comes_back_element_by_element(
    axes: str, heads: int, tokens: int, dim: int
) -> None:
    """One layer of each layout, out of every second block, into other blocks of a like tensor."""
    device = FakeDevice(mood="eager")
    sizes = {"kv": 2, "block": 6, "token": tokens, "head": heads, "dim": dim}
    shape = tuple(sizes[axis] for axis in axes.split(","))
    at, values = tensor(device, shape)
    values[...] = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    back_at, back = tensor(device, shape)
    layout = BlockLayout(tokens, 1, 2 * heads * tokens * dim)
    slots = np.zeros((3, layout.slot_bytes), np.uint8)
    addresses = slots.ctypes.data + np.arange(3, dtype=np.uint64) * np.uint64(layout.slot_bytes)
    move(device, compiled(target_of(layout, at, values, axes)), addresses, [0, 2, 4], False)
    move(device, compiled(target_of(layout, back_at, back, axes)), addresses, [5, 1, 3], True)
    block = axes.split(",").index("block")
    assert np.array_equal(np.take(back, [5, 1, 3], block), np.take(values, [0, 2, 4], block))
    ordered = np.moveaxis(np.take(values, [0, 2, 4], block), block, 0).reshape(3, -1)
    assert np.array_equal(slots[:, : layout.layer_bytes], ordered)


def target_of(layout: BlockLayout, at: int, values: ByteArray, axes: str) -> PagedTarget:
    planes = planes_of(at, values.shape, values.strides, axes, 1)
    return PagedTarget(layout, (planes,), 6)


def move(device: FakeDevice, programs: Any, slots: Any, blocks: list[int], load: bool) -> None:
    for program in programs:
        pieces = placed(program, slots, np.array(blocks))
        for host, there, length in zip(*(column.tolist() for column in pieces[:3]), strict=True):
            ends = (there, host) if load else (host, there)
            device.copy(*ends, length, 0)


def test_a_strided_tensor_is_read_as_it_lies() -> None:
    device = FakeDevice(mood="eager")
    at, memory = tensor(device, (4, 3, 8, 2, 5))
    view = memory[:, :, :6].swapaxes(2, 3)  # a slice of a wider tensor, heads before tokens
    planes = planes_of(at, view.shape, view.strides, "block,kv,head,token,dim", 1)
    found = [
        device.bytes_at(p.address + 2 * p.block_stride_bytes + r * p.row_stride_bytes, p.row_bytes)
        for p in planes
        for r in range(p.rows)
    ]
    assert np.array_equal(np.concatenate(found), view[2].ravel())


def test_an_undeclared_or_ill_fitting_layout_is_refused() -> None:
    for axes in ("kv,token,head,dim", "block,block,head,dim", "block,kv"):
        with pytest.raises(InvalidRequest):
            planes_of(0, (2, 2, 4, 4), (32, 16, 4, 1), axes, 1)
    with pytest.raises(InvalidRequest, match="layer 0 has 8 bytes"):
        PagedTarget(BlockLayout(4, 1, 16), ((Plane(0, 8, 8),),), 2)


def test_neighbours_are_joined_and_fences_are_kept() -> None:
    layout = BlockLayout(4, 2, 2048)
    side_by_side = tuple((Plane(1 << 20 | n * 2048, 4096, 2048),) for n in range(2))
    (program,) = compiled(PagedTarget(layout, side_by_side, 16))
    slots = np.array([0, 4096, 8192, 40960, 49152], np.uint64)
    joined = placed(program, slots, np.array([3, 4, 5, 6, 9]))
    assert joined.lengths.tolist() == [3 * 4096, 4096, 4096]
    fenced = placed(program, slots, np.array([3, 4, 5, 6, 9]), np.array([0, 8192], np.uint64))
    assert fenced.lengths.tolist() == [2 * 4096, 4096, 4096, 4096]
    assert joined.host.tolist() == [0, 40960, 49152]


def test_layers_of_different_parts_never_travel_together() -> None:
    layout = BlockLayout(4, 16, 4096)
    planes = tuple((Plane(n * 4096, 65536, 4096),) for n in range(16))
    programs = compiled(PagedTarget(layout, planes, 4))
    assert [(p.first_layer, p.layers, p.part) for p in programs] == [
        (part.layer_first, part.layer_count, part.index) for part in layout.parts
    ]


@pytest.mark.parametrize("most", [1, 7, 64, 10_000])
def test_portions_are_the_same_bytes(most: int) -> None:
    lengths = np.array([5, 64, 1, 200, 3], np.uint64)
    starts = np.array([0, 100, 300, 1000, 5000], np.uint64)
    lots = list(portions(Pieces(starts, starts + np.uint64(9), lengths, 273), most))
    assert all(lot.total_bytes == lot.lengths.sum() <= most for lot in lots)
    covered = [
        (at + n, there + n)
        for lot in lots
        for at, there, length in zip(*(column.tolist() for column in lot[:3]), strict=True)
        for n in range(length)
    ]
    assert covered == [
        (at + n, at + 9 + n)
        for at, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        for n in range(length)
    ]


# ---------------------------------------------------------------------- the engine


def world_of(seed: int) -> World:
    world = World(seed)
    while world.baton.step(world.chance):
        pass
    return world


def source_of(world: World, count: int, missing: int = 0) -> Source:
    return Source(world, world.take_slots(count), missing, arrives=True)


def test_empty_plans_touch_no_device() -> None:
    world = world_of(1)
    before = world.device.calls
    none: IntArray = np.zeros(0, np.int64)
    load = world.transfers.start_load(LoadPlan(world.target, source_of(world, 0), none), 0)
    reservation: Any = Reservation(world.arena, [])
    save = world.transfers.start_save(SavePlan(world.target, reservation, none, none), 0)
    load.wait_layer(0)
    assert (load.confirm(), load.is_ended, save.is_ended, save.failure) == ("", True, True, "")
    assert world.device.calls == before


def test_ids_that_are_not_the_targets_are_refused() -> None:
    world = world_of(1)
    for blocks in ([-1], [12]):
        plan = LoadPlan(world.target, source_of(world, 1), np.array(blocks))
        with pytest.raises(InvalidRequest):
            world.transfers.start_load(plan, world.compute)


def test_a_stuck_stream_ends_in_a_deadline_and_the_blocks_stay_taken() -> None:
    world = world_of(3)
    world.device.hold(world.streams[0])
    plan = LoadPlan(world.target, source_of(world, 2), np.array([1, 2]), 0, 0.5)
    load = world.transfers.start_load(plan, world.compute)
    assert load.confirm()
    assert not load.wait_ended(1.0)
    world.device.let_go(world.streams[0])
    assert load.wait_ended(10.0)


def test_a_device_that_failed_is_a_miss_and_never_an_end() -> None:
    world = world_of(3)
    plan = LoadPlan(world.target, source_of(world, 2), np.array([1, 2]), 0, 0.5)
    load = world.transfers.start_load(plan, world.compute)
    world.device._fault("an uncorrectable error")
    with pytest.raises((LoadFailed, DeviceError)):
        load.wait_layer(0)
    assert load.confirm()
    assert not load.is_ended
    assert world.transfers.describe()["running"] == 1


def test_an_old_arena_is_unpinned_once_no_transfer_touches_it() -> None:
    world = world_of(4)
    old = world.arena.regions
    world.device.hold(world.streams[0])
    plan = LoadPlan(world.target, source_of(world, 2), np.array([1, 2]))
    load = world.transfers.start_load(plan, world.compute)
    new = [np.zeros(64, np.uint8)]
    world.transfers.pin(new)

    def pinned(regions: list[ByteArray]) -> bool:
        world.transfers.describe()
        while world.baton.step(world.chance):
            pass
        at = np.array([region.ctypes.data for region in regions], np.uint64)
        return bool(world.transfers._lanes.pins.is_pinned(at, np.ones(1, np.uint64)).all())

    assert pinned(new)
    assert pinned(old)
    world.device.let_go(world.streams[0])
    assert load.wait_ended(10.0)
    assert not pinned(old)
    assert pinned(new)
    assert world.device.error == ""


def test_buffers_live_until_the_last_copy_whoever_forgot_them() -> None:
    class Tensors:
        """What addresses point into."""

    world, owner = world_of(3), Tensors()
    alive = weakref.ref(owner)
    target = replace(world.target, owner=owner)
    world.device.hold(world.streams[0])
    plan = LoadPlan(target, source_of(world, 2), np.array([1, 2]), 0, 0.5)
    world.transfers.start_load(plan, world.compute).cancel()
    del owner, target, plan
    assert world.transfers.describe()["running"] == 1
    assert alive() is not None
    world.device.let_go(world.streams[0])
    world.device.drain()
    world.transfers.describe()
    gc.collect()
    assert alive() is None


def test_layers_go_while_later_ones_are_still_read_from_the_disk() -> None:
    worlds = map(World, itertools.count())
    world = next(one for one in worlds if len(one.layout.parts) > 2)
    while world.baton.step(world.chance):
        pass
    source = source_of(world, 3, missing=3)
    plan = LoadPlan(world.target, source, np.array([4, 9, 2]), 0, 60.0)
    load: Any = world.transfers.start_load(plan, world.compute)
    moved: set[int] = set()
    while load._gates[0] is None:
        assert world.baton.step(world.chance)
        ways = world.transfers._lanes.bytes_by_way
        moved.add(ways["batch"] + ways["kernel"])
    assert len(moved) > 2, "blocks did not leave one by one"
    assert source.whole == 0
    now = world.now
    load.wait_layer(0)
    assert world.now == now, "it waited for layers that it does not need"
    found: list[Any] = []
    blocks = plan.blocks.tolist()
    world.device.enqueue(world.compute, lambda: found.extend(world.read(b, 0) for b in blocks))
    world.device.drain()
    for slot, row in zip(source.slots, found, strict=True):
        assert np.array_equal(row, world.expected(world.arena.contents[slot], 0))
    assert source.whole == 0
    load.wait_layer(world.layout.layers - 1)
    assert load.confirm() == ""


def test_closing_waits_for_copies_and_unpins() -> None:
    world = world_of(4)
    plan = LoadPlan(world.target, source_of(world, 2), np.array([1, 2]))
    load = world.transfers.start_load(plan, world.compute)
    world.transfers.close()
    assert load.is_ended
    assert world.device.error == ""
    with pytest.raises(InvalidRequest):
        world.transfers.start_load(plan, world.compute)


def test_both_mechanisms_are_measured_and_the_faster_one_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer_moves, "COUNTS", (4, 16))
    monkeypatch.setattr(transfer_moves, "LENGTHS", (4096, 65536))
    monkeypatch.setattr(transfer_moves, "PROBE_BYTES", 1 << 21)
    device = FakeDevice(mood="random")
    lanes = Lanes(device, now=itertools.count().__next__, pause=lambda: device.advance(500))
    cases = list(lanes.mechanisms.values())
    before = device.memory()
    choice = calibrated(device, cases, lanes.tables, lanes.pause)
    assert device.memory() == before
    pieces = Pieces(*(np.full(64, 4096, np.uint64) for _ in range(3)), 64 * 4096)
    assert set(choice.seconds) == set(itertools.product((True, False), (4096, 65536), (4, 16)))
    assert len(choice.describe()) == 8
    assert Choice({}).name_for(pieces, True) == "batch"
    for kernel, wanted in ((0.5, "kernel"), (0.95, "batch"), (2.0, "batch")):
        # The nearest case by length and number decides; the others say the opposite.
        against = {"batch": 1.0, "kernel": 0.5 if wanted == "batch" else 2.0}
        table = dict.fromkeys(choice.seconds, against)
        measured = Choice(table | {(True, 4096, 16): {"batch": 1.0, "kernel": kernel}})
        assert measured.name_for(pieces, True) == wanted
        assert measured.name_for(pieces, False) != wanted
        assert measured.describe()["load 16 x 4 KiB"].startswith(wanted)


def test_a_device_is_measured_when_it_is_opened_and_used_as_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer_moves, "COUNTS", (4,))
    monkeypatch.setattr(transfer_moves, "LENGTHS", (4096,))
    monkeypatch.setattr(transfer_moves, "PROBE_BYTES", 1 << 16)
    for total, cases in ((1 << 17, 2), (1 << 15, 0)):
        device = FakeDevice(mood="eager", total_bytes=total)
        monkeypatch.setattr(device_transfer, "open_device", lambda index, found=device: found)
        transfers = DeviceTransfers.open(0)
        assert len(transfers.describe()["measured"]) == cases  # type: ignore[arg-type]
        transfers.close()
    case = (True, 4096, 4)
    for faster in ("batch", "kernel"):
        device = FakeDevice(mood="eager")
        times = {"batch": 1.0, "kernel": 1.0, faster: 0.1}
        lanes = Lanes(device, now=float, pause=lambda: None, choice=Choice({case: times}))
        host, there = device.allocate_pinned(16384), device.allocate(16384)
        at = np.arange(0, 16384, 4096, dtype=np.uint64)
        ends = np.uint64(host.ctypes.data) + at, np.uint64(there) + at
        pieces = Pieces(*ends, np.full(4, 4096, np.uint64), 16384)
        lanes.enqueue(pieces, True, lanes.load_stream, [], None)
        assert lanes.bytes_by_way[faster] == 16384
    monkeypatch.setattr(FakeDevice, "make_kernel", broken)
    with pytest.raises(ConfigError, match="extra `gpu`"):
        DeviceTransfers.open(0)


def test_a_batch_that_stays_off_the_processors_is_never_within_the_device() -> None:
    device = FakeDevice(mood="eager")
    lanes = Lanes(device, now=float, pause=lambda: None)
    most = OVERLAP_BYTES_MAX
    lent, there = device.allocate(2 * most), device.allocate(2 * most)
    lanes.pins.lend(lent, 2 * most)
    for length, way in ((most, "kernel"), (most + 1, "batch")):
        ends = (np.array([at], np.uint64) for at in (lent, there, length))
        lanes.enqueue(Pieces(*ends, length), True, lanes.load_stream, [], None)
        assert lanes.bytes_by_way[way] == length


def broken(*_: object) -> None:
    raise DeviceError("it does not compile")


def test_what_is_not_pinned_goes_through_buffers_and_says_so() -> None:
    world = World(5)
    world.device.fail_registrations = set(range(100))
    arena = Slots(world.layout, 1)
    arena.fill(3, 77)
    device, baton = world.device, Baton()
    lanes = Lanes(device, now=lambda: 0.0, pause=world.pause, choice=RandomChoice(world.chance))
    transfers = DeviceTransfers(lanes, baton)
    transfers.pin(arena.regions)
    world.arena, world.baton = arena, baton
    plan = LoadPlan(world.target, Source(world, [3], 0, arrives=True), np.array([5]))
    load = transfers.start_load(plan, world.compute)
    for layer in range(world.layout.layers):
        load.wait_layer(layer)
    assert load.confirm() == ""
    for layer in range(world.layout.layers):
        assert np.array_equal(world.read(5, layer), world.expected(77, layer))
    told = transfers.describe()
    assert told["pinned_bytes"] == 0
    assert told["failures"]
    assert told["bytes_by_way"]["bounced"] > 0  # type: ignore[index]


def test_nobody_waits_for_a_whole_device() -> None:
    forbidden = re.compile(
        r"(device|ctx|context)_?synchronize|cuda\.synchronize|\bmem(cpy|set)\(|set_?limit", re.I
    )
    root = Path(__file__).parents[2]
    for folder in ("kvstore", "engine_adapter"):
        for path in (root / folder).rglob("*.py"):
            found = forbidden.search(path.read_text("utf-8"))
            assert found is None, f"{path.relative_to(root)}: {found}"
    assert not [name for name in vars(Device) if "synch" in name]


# ---------------------------------------------------------------------- schedules


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_schedule_shows_a_wrong_byte(first: int) -> None:
    for seed in range(first, first + 20):
        assert run_schedule(seed) == [], f"seed {seed}"


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_ordering_bugs_show(bug: str) -> None:
    assert seeds_until_found(bug, iter(range(500))) is not None
