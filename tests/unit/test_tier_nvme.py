"""The NVMe tier over real files: what was stored or a miss, within the cap, through every start."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from nvme_kit import (
    LAYOUT,
    MIB,
    NAMESPACE,
    RAGGED,
    Blocks,
    Declared,
    bytes_in,
    config,
    frame_of,
    name_of,
    open_tier,
    payload_of,
    small_filesystem,
)

from kvstore.blockio import DirectIO, page_aligned
from kvstore.config import NvmeConfig
from kvstore.errors import (
    ChecksumMismatch,
    ConfigError,
    FrameMalformed,
    GenerationMismatch,
    TierFull,
    TierIO,
)
from kvstore.index import RECORD
from kvstore.index import index as index_module
from kvstore.layout import BlockLayout
from kvstore.testing.clock import VirtualClock
from kvstore.testing.conformance import TierConformance
from kvstore.testing.faults import (
    Fail,
    FaultyBlockIO,
    FaultySystem,
    Flipped,
    Lost,
    Misdirected,
    Torn,
    at,
    from_nth,
)
from kvstore.tier.capacity import GROW_AGAIN_SECONDS
from kvstore.tier.recover import SLICE_FRAMES
from kvstore.types import PAGE_BYTES

SLAB = MIB + MIB // 64
PER_SLAB = 15
"""Blocks of LAYOUT in one segment."""
LARGE = BlockLayout(block_tokens=16, layers=4, layer_bytes=MIB)
"""4 MiB a block: larger than one read, larger than a segment."""

MODES = {
    "direct": lambda: DirectIO(),
    "buffered": lambda: DirectIO("off"),
    "fallen back": lambda: DirectIO(system=FaultySystem(at("write", 1, Fail(errno.EINVAL)))),
    "zero-filled": lambda: DirectIO(
        system=FaultySystem(from_nth("reserve", 1, Fail(errno.ENOTSUP)))
    ),
    "buffered, zero-filled": lambda: DirectIO(
        "off", FaultySystem(from_nth("reserve", 1, Fail(errno.EINVAL)))
    ),
}


@pytest.fixture(autouse=True)
def _quick_groups(monkeypatch):
    monkeypatch.setattr(index_module, "GROUP_SECONDS", 0.001)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def tier(directory):
    found = open_tier(directory)
    yield found
    found.check_integrity()
    assert found.statistics().bytes_on_disk == found.bytes_on_disk()
    found.close()


@pytest.fixture
def blocks(tier):
    return Blocks(tier)


class NvmeHarness:
    """Conformance over blocks of one part each."""

    def __init__(self, tier, directory) -> None:
        self.tier = tier
        self.directory = directory
        self.frames = {}

    def write(self, slot, payload):
        layout = BlockLayout(1, 1, len(payload))
        frame = frame_of(self.tier, slot, layout, payload)
        self.tier.write(slot, frame, layout.parts, payload)
        self.tier.sync([slot])
        self.tier.publish([slot])
        self.frames[slot] = frame

    def read(self, slot, length):
        layout = BlockLayout(1, 1, length)
        into = page_aligned(layout.slot_bytes)
        self.tier.read_parts(slot, layout.parts, into, self.frames[slot].checksums)
        return into[:length]

    def damage(self, slot):
        payload = payload_of(99, BlockLayout(1, 1, self.frames[slot].length))
        payload = self.read(slot, self.frames[slot].length)
        payload[len(payload) // 2] ^= 1
        frame = self.frames[slot]
        size = self.tier.slot_bytes_for(frame.length)
        self.tier._segments.write_frame(slot, frame, payload, size)


@pytest.mark.parametrize("mode", MODES)
class TestConformance(TierConformance):
    @pytest.fixture
    def harness(self, directory, mode):
        tier = open_tier(directory, MODES[mode](), bytes_max=8 * MIB)
        yield NvmeHarness(tier, directory)
        tier.close()


# ---------------------------------------------------------------------- stored bytes, in every mode


@pytest.mark.parametrize(
    "layout", [LAYOUT, RAGGED, LARGE, BlockLayout(16, 2, 100), BlockLayout(16, 1, 5 * MIB + 100)]
)
@pytest.mark.parametrize("mode", MODES)
def test_every_layout_comes_back_part_by_part(directory, mode, layout):
    tier = open_tier(directory, MODES[mode](), bytes_max=32 * MIB)
    blocks = Blocks(tier, layout)
    assert all(blocks.put(seed) for seed in range(3))
    assert all(blocks.is_whole(seed) for seed in range(3))
    slot, frame = blocks.held[1]
    for part in layout.parts:
        into = page_aligned(layout.slot_bytes)
        tier.read_parts(slot, [part], into, frame.checksums)
        stored = payload_of(1, layout)[part.offset : part.offset + part.length]
        assert np.array_equal(into[part.offset : part.offset + part.length], stored)
    tier.check_integrity()
    assert tier.statistics().bytes_on_disk == tier.bytes_on_disk()
    tier.close()


@pytest.mark.parametrize("skew", [1, 64, 512, 4095])
@pytest.mark.parametrize("mode", MODES)
def test_payloads_and_targets_at_any_address(directory, mode, skew):
    tier = open_tier(directory, MODES[mode]())
    blocks = Blocks(tier, RAGGED)
    assert blocks.put(1, skew=skew)
    slot, frame = blocks.held[1]
    into = page_aligned(RAGGED.slot_bytes + skew)[skew:]
    tier.read_parts(slot, RAGGED.parts, into, frame.checksums)
    assert blocks.is_whole(1)
    tier.close()


def test_reading_some_parts_leaves_the_bytes_of_the_others_alone(blocks, tier):
    """Another thread may be filling them."""
    blocks.put(1)
    slot, frame = blocks.held[1]
    parts = LAYOUT.parts
    into = page_aligned(LAYOUT.slot_bytes)
    tier.read_parts(slot, [parts[0], parts[2], parts[3], parts[7]], into, frame.checksums)
    for part in parts:
        piece = slice(part.offset, part.offset + part.length)
        expected = payload_of(1)[piece] if part.index in (0, 2, 3, 7) else 0
        assert (into[piece] == expected).all()


def test_adjacent_parts_share_reads_and_no_read_is_long(directory):
    io = FaultyBlockIO(DirectIO())
    tier = open_tier(directory, io, bytes_max=32 * MIB)
    sizes = []
    io.decide = lambda operation: (
        sizes.append(operation.length) if operation.kind == "read" else None
    )
    for layout, expected in (
        (LAYOUT, [64 << 10]),
        (RAGGED, [2 * 4 * PAGE_BYTES]),
        (LARGE, [2 * MIB, 2 * MIB]),
        (BlockLayout(16, 1, 5 * MIB + 100), [2 * MIB, 2 * MIB, MIB + PAGE_BYTES]),
    ):
        blocks = Blocks(tier, layout)
        assert blocks.put(1)
        sizes.clear()
        assert blocks.is_whole(1)
        assert sizes == expected
        blocks.drop(1)
    tier.close()


def test_a_target_that_ends_with_the_block_is_not_overrun(blocks, tier):
    ragged = Blocks(tier, RAGGED)
    ragged.put(1)
    slot, frame = ragged.held[1]
    room = page_aligned(RAGGED.slot_bytes)
    tier.read_parts(slot, RAGGED.parts, room[: RAGGED.block_bytes], frame.checksums)
    assert np.array_equal(room[: 3 * 5000], payload_of(1, RAGGED)[: 3 * 5000])
    assert not room[RAGGED.block_bytes :].any()


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.ENOTSUP])
@pytest.mark.parametrize("where", [("open", 1), ("write", 1), ("write", 100)])
def test_a_refused_direct_write_loses_no_block_and_is_told(directory, refusal, where):
    kind, number = where
    tier = open_tier(directory, DirectIO(system=FaultySystem(at(kind, number, Fail(refusal)))))
    blocks = Blocks(tier)
    assert len(blocks.fill(range(110))) == len(range(110))
    assert all(blocks.is_whole(seed) for seed in range(110))
    assert tier.statistics().mode == "buffered"
    assert os.strerror(refusal) in tier.statistics().mode_reason
    assert any("buffered I/O" in remark for remark in tier.remarks())
    assert tier.health() == []
    tier.close()


def test_missing_preallocation_is_told(directory):
    tier = open_tier(directory, MODES["zero-filled"]())
    Blocks(tier).put(1)
    assert any("filled with zeros" in remark for remark in tier.remarks())
    assert tier.health() == []
    assert tier.bytes_on_disk() >= PER_SLAB * 17 * PAGE_BYTES
    tier.close()


# ---------------------------------------------------------------------- never other bytes


def test_a_payload_that_is_not_what_was_committed_is_not_written(blocks, tier):
    (slot,) = tier.take(tier.slot_bytes_for(LAYOUT.block_bytes), 1)
    payload = payload_of(1)
    payload[70] ^= 1
    with pytest.raises(ChecksumMismatch, match="host copy"):
        tier.write(slot, frame_of(tier, 1), LAYOUT.parts, payload)
    assert tier.statistics().bytes_written == 0


@pytest.mark.parametrize(
    "fault",
    [
        Torn(0),
        Torn(PAGE_BYTES),
        Torn(5 * PAGE_BYTES),
        Torn(16 * PAGE_BYTES),
        Lost(),
        Misdirected(17 * PAGE_BYTES),
        Flipped(8 * (PAGE_BYTES + 5)),
        Flipped(8 * 17 * PAGE_BYTES - 1),
    ],
    ids=str,
)
def test_a_write_that_went_wrong_in_silence_is_a_mismatch(directory, fault):
    io = FaultyBlockIO(DirectIO())
    tier = open_tier(directory, io)
    blocks = Blocks(tier)
    blocks.fill(range(1, 4))
    blocks.drop(2)
    io.decide = at("write", io.counts["write"] + 1, fault)
    blocks.put(5)
    assert blocks.held[5][0] == 1
    victims = {5, 3} if isinstance(fault, Misdirected) else {5}
    for seed in (1, 3, 5):
        if seed in victims:
            with pytest.raises(ChecksumMismatch):
                blocks.get(seed)
        else:
            assert blocks.is_whole(seed)
    assert tier.statistics().checksum_failures == len(victims)
    tier.close()


def test_a_stale_slot_is_a_mismatch_for_whoever_held_it_before(blocks, tier):
    blocks.put(1)
    stale = blocks.held[1]
    blocks.drop(1)
    blocks.put(2)
    assert blocks.held[2][0] == stale[0]
    blocks.held[1] = stale
    with pytest.raises(ChecksumMismatch):
        blocks.get(1)
    with pytest.raises(FrameMalformed):
        tier.check_frame(name_of(1), *_slot_and_generation(stale))
    tier.check_frame(name_of(2), *_slot_and_generation(blocks.held[2]))


def _slot_and_generation(held):
    slot, frame = held
    return slot, frame.generation


def test_the_header_tells_an_older_write_of_the_same_block(blocks, tier):
    blocks.put(1)
    slot, frame = blocks.held[1]
    with pytest.raises(GenerationMismatch):
        tier.check_frame(name_of(1), slot, frame.generation + 1)
    tier.check_record(name_of(1), slot, frame.generation)
    with pytest.raises(GenerationMismatch):
        tier.check_record(name_of(1), slot + 1, frame.generation)
    with pytest.raises(GenerationMismatch):
        tier.check_record(name_of(2), slot, frame.generation)


def test_a_late_clean_up_spares_the_newer_value(blocks, tier):
    """A failing read of an old write ends after the block was stored again."""
    blocks.put(1)
    old = blocks.held[1][1].generation
    blocks.drop(1)
    blocks.put(1)
    tier.forget([(name_of(1), old)]).result(10)
    assert blocks.is_whole(1)
    assert tier.statistics().records == 1


@pytest.mark.parametrize("kind", ["open", "reserve", "write", "sync"])
def test_a_store_fails_whole(directory, kind):
    """Whatever call fails: no record, no slot lost, and the next store works."""
    system = FaultySystem()
    tier = open_tier(directory, DirectIO(system=system))
    blocks = Blocks(tier)
    room = tier.room(tier.slot_bytes_for(LAYOUT.block_bytes))
    system.decide = at(kind, system.counts[kind] + 1, Fail(errno.EIO))
    with pytest.raises(TierIO):
        blocks.put(1)
    assert tier.statistics().records == 0
    assert tier.room(tier.slot_bytes_for(LAYOUT.block_bytes)) == room
    assert blocks.put(1)
    assert blocks.is_whole(1)
    assert tier.statistics().bytes_on_disk == tier.bytes_on_disk()
    tier.close()


def test_a_read_error_is_that_block_only(directory):
    system = FaultySystem()
    tier = open_tier(directory, DirectIO(system=system))
    blocks = Blocks(tier)
    blocks.put(1)
    blocks.put(2)
    system.decide = at("read", system.counts["read"] + 1, Fail(errno.EIO))
    with pytest.raises(TierIO):
        blocks.get(1)
    assert blocks.is_whole(2)
    assert tier.statistics().io_failures == 1
    tier.close()


@pytest.mark.parametrize("harm", ["remove", "truncate"])
def test_a_harmed_file_costs_its_own_blocks_only(directory, harm):
    tier = open_tier(directory)
    blocks = Blocks(tier)
    blocks.fill(range(32))
    first = {seed for seed, (slot, _) in blocks.held.items() if slot < PER_SLAB}
    tier.close()
    victim = min((directory / "segments").iterdir())
    if harm == "remove":
        victim.unlink()
    else:
        os.truncate(victim, 3 * 17 * PAGE_BYTES)
    again = open_tier(directory)
    back = blocks.reopen(again)
    assert back == set(range(32)) - first
    assert all(blocks.is_whole(seed) for seed in back)
    assert again.statistics().records_unusable == len(first)
    again.close()
    third = open_tier(directory)
    assert third.statistics().records == len(back)
    third.close()


@pytest.mark.parametrize("harm", ["remove", "truncate"])
def test_a_file_harmed_while_in_use(directory, harm):
    tier = open_tier(directory)
    blocks = Blocks(tier)
    blocks.fill(range(32))
    victim = min((directory / "segments").iterdir())
    if harm == "remove":
        victim.unlink()
    else:
        os.truncate(victim, 3 * 17 * PAGE_BYTES)
    tier.maintain()
    outcome = {}
    for seed, (slot, _) in blocks.held.items():
        try:
            outcome[slot] = blocks.is_whole(seed)
        except (TierIO, ChecksumMismatch):
            outcome[slot] = False
    lost = {slot for slot, whole in outcome.items() if not whole}
    survivors = set(range(3)) if harm == "truncate" else set()
    assert lost == set(range(PER_SLAB)) - survivors
    blocks.drop(*blocks.held)
    tier.check_integrity()
    tier.maintain()
    assert tier.statistics().bytes_on_disk == tier.bytes_on_disk()
    assert blocks.fill(range(40)) == list(range(40))
    tier.close()


# ---------------------------------------------------------------------- starts


def test_everything_durable_is_there_after_a_restart(directory):
    tier = open_tier(directory)
    blocks = Blocks(tier)
    assert len(blocks.fill(range(120))) == len(range(120))
    blocks.drop(*range(0, 120, 3))
    kept = set(blocks.held)
    tier.close()
    again = open_tier(directory)
    assert blocks.reopen(again) == kept
    assert all(blocks.is_whole(seed) for seed in kept)
    assert again.health() == []
    assert again.statistics().index_damage == ""
    assert again.load_namespaces()[0].layout == LAYOUT
    free = again.take(again.slot_bytes_for(LAYOUT.block_bytes), 10_000)
    assert not set(free) & {slot for slot, _ in blocks.held.values()}
    again.close()


def test_a_frame_without_a_record_is_nothing_after_a_restart(directory):
    """A crash between the frame and its record."""
    tier = open_tier(directory)
    blocks = Blocks(tier)
    (slot,) = tier.take(tier.slot_bytes_for(LAYOUT.block_bytes), 1)
    tier.write(slot, frame_of(tier, 1), LAYOUT.parts, payload_of(1))
    tier.sync([slot])
    tier.close()
    again = open_tier(directory)
    assert len(again.scan()[0]) == 0
    blocks.tier = again
    assert blocks.put(2)
    assert blocks.held[2][0] == slot
    again.close()


def test_generations_never_repeat_over_lives(directory):
    seen: set[int] = set()
    for _ in range(3):
        tier = open_tier(directory)
        made = tier.next_generations(5).tolist()
        assert not seen & set(made)
        seen |= set(made)
        tier.close()


@pytest.mark.parametrize("loss", ["deleted", "garbage", "shortened", "from an older life"])
def test_a_lost_index_comes_back_from_the_frames(directory, loss):
    tier = open_tier(directory)
    blocks = Blocks(tier)
    blocks.fill(range(20))
    tier.close()
    shutil.copytree(directory / "index", directory.parent / "older")
    tier = open_tier(directory)
    blocks.reopen(tier)
    blocks.fill(range(20, 40))
    blocks.drop(3)
    blocks.put(3)
    tier.close()
    data = directory / "index" / "data.mdb"
    if loss == "deleted":
        shutil.rmtree(directory / "index")
    elif loss == "garbage":
        data.write_bytes(os.urandom(100_000))
    elif loss == "shortened":
        os.truncate(data, 2 * PAGE_BYTES)
    else:
        shutil.rmtree(directory / "index")
        shutil.copytree(directory.parent / "older", directory / "index")
        # One more life, so that the copy is behind by more than a crash could explain.
    again = open_tier(directory)
    assert any("index starts empty" in remark for remark in again.remarks())
    assert blocks.reopen(again) == set(range(40))
    assert all(blocks.is_whole(seed) for seed in range(40))
    assert again.statistics().index_damage
    assert again.remarks() == again.health() == []
    assert len(list(directory.glob("index.damaged-*"))) == (loss != "deleted")
    again.close()
    third = open_tier(directory)
    assert third.statistics().index_damage == ""
    assert blocks.reopen(third) == set(range(40))
    third.close()


def test_only_one_damaged_index_is_kept(directory):
    for _ in range(3):
        open_tier(directory).close()
        (directory / "index" / "data.mdb").write_bytes(os.urandom(100_000))
    tier = open_tier(directory)
    assert len(list(directory.glob("index.damaged-*"))) == 1
    tier.close()


def test_nothing_cleared_comes_back_with_a_rebuilt_index(directory):
    tier = open_tier(directory)
    blocks = Blocks(tier)
    blocks.put(1)
    tier.set_clear_count(NAMESPACE, 1)
    (slot,) = tier.take(tier.slot_bytes_for(LAYOUT.block_bytes), 1)
    frame = replace(frame_of(tier, 2), clear_count=1)
    tier.write(slot, frame, LAYOUT.parts, payload_of(2))
    tier.sync([slot])
    tier.record([frame], [slot]).result(10)
    tier.close()
    shutil.rmtree(directory / "index")
    again = open_tier(directory)
    names, _ = again.scan()
    assert names.tobytes() == name_of(2)
    assert again.load_namespaces()[0].clear_count == 1
    again.close()


def test_the_newest_of_several_frames_counts(directory):
    """Re-stored in another slot while the old frame still lies in its own."""
    tier = open_tier(directory)
    blocks = Blocks(tier)
    blocks.fill(range(4))
    oldest = blocks.held[0]
    blocks.drop(0)
    between = tier.take(tier.slot_bytes_for(LAYOUT.block_bytes), 1)
    assert between == [oldest[0]]
    blocks.put(0)
    tier.free(between)
    newest = blocks.held[0]
    tier.close()
    shutil.rmtree(directory / "index")
    again = open_tier(directory)
    again.check_frame(name_of(0), oldest[0], oldest[1].generation)
    assert blocks.reopen(again) == {0, 1, 2, 3}
    assert blocks.held[0][0] == newest[0]
    again.close()


def test_a_rebuild_goes_in_slices(directory):
    tier = open_tier(directory)
    blocks = Blocks(tier)
    blocks.fill(range(100))
    tier.close()
    shutil.rmtree(directory / "index")
    io = FaultyBlockIO(DirectIO())
    again = open_tier(directory, io)
    before, most = io.counts["read"], 0
    for _ in again.rebuild_from_frames():
        most = max(most, io.counts["read"] - before)
        before = io.counts["read"]
    assert 0 < most <= SLICE_FRAMES
    assert blocks.reopen(again) == set(range(100))
    assert list(again.rebuild_from_frames()) == []
    again.close()


@pytest.mark.parametrize("records", [0, 10])
def test_a_rebuild_that_was_killed_starts_anew(directory, monkeypatch, records):
    monkeypatch.setattr("kvstore.tier.recover.SLICE_RECORDS", 10)
    tier = open_tier(directory)
    blocks = Blocks(tier)
    blocks.fill(range(100))
    tier.close()
    shutil.rmtree(directory / "index")
    killed = open_tier(directory)
    steps = killed.rebuild_from_frames()
    next(steps)
    while killed.statistics().records < records:
        next(steps)
    steps.close()
    assert killed.statistics().records < 100
    killed.close()
    again = open_tier(directory)
    assert again.statistics().index_damage
    assert blocks.reopen(again) == set(range(100))
    again.close()


def test_files_of_an_older_copy_are_never_served(directory):
    """Index and superblock are current, a segment file is from before."""
    tier = open_tier(directory)
    blocks = Blocks(tier)
    blocks.fill(range(16))
    tier.close()
    file = min((directory / "segments").iterdir())
    older = file.read_bytes()
    tier = open_tier(directory)
    blocks.reopen(tier)
    for seed in range(8):
        blocks.drop(seed)
        blocks.put(100 + seed)
    tier.close()
    file.write_bytes(older)
    again = open_tier(directory)
    blocks.reopen(again)
    for seed in blocks.held:
        if seed < 100:
            assert blocks.is_whole(seed)
        else:
            with pytest.raises(ChecksumMismatch):
                blocks.get(seed)
    again.close()


def test_segments_of_another_store_are_never_served(directory, tmp_path):
    stores = []
    for number, path in enumerate((directory, tmp_path / "other")):
        tier = open_tier(path)
        blocks = Blocks(tier)
        for seed in range(4):
            blocks.put(seed + 10 * number)
        tier.close()
        stores.append(blocks)
    shutil.rmtree(directory / "segments")
    shutil.copytree(tmp_path / "other" / "segments", directory / "segments")
    again = open_tier(directory)
    stores[0].reopen(again)
    for seed in stores[0].held:
        with pytest.raises(ChecksumMismatch):
            stores[0].get(seed)
    again.close()


def test_an_index_of_another_store_is_set_aside(directory, tmp_path):
    for path in (directory, tmp_path / "other"):
        tier = open_tier(path)
        blocks = Blocks(tier)
        blocks.put(1)
        tier.close()
    shutil.rmtree(directory / "index")
    shutil.copytree(tmp_path / "other" / "index", directory / "index")
    again = open_tier(directory)
    assert "another data directory" in again.statistics().index_damage
    again.close()


def test_another_geometry_is_refused_with_the_way_out(directory):
    open_tier(directory).close()
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    with pytest.raises(Exception, match=rf"nvme\.segment_bytes={MIB}") as caught:
        open_tier(directory, segment_bytes=2 * MIB)
    assert type(caught.value).__name__ == "ForeignData"
    assert f"KVSTORE_NVME__SEGMENT_BYTES={MIB}" in str(caught.value)
    assert f"mv {directory} {directory}.old" in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


@pytest.mark.parametrize(
    ("field", "value"),
    [("format", "kvstore-nvme-9"), ("index_engine", "lmdb-1.0"), ("slab_bytes", 4096)],
)
def test_another_format_or_engine_is_refused(directory, field, value):
    open_tier(directory).close()
    path = directory / "superblock.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(Exception, match="mv ") as caught:
        open_tier(directory)
    assert type(caught.value).__name__ == "ForeignData"


def test_data_without_a_superblock_is_refused(directory):
    tier = open_tier(directory)
    Blocks(tier).put(1)
    tier.close()
    (directory / "superblock.json").unlink()
    with pytest.raises(Exception, match="is missing") as caught:
        open_tier(directory)
    assert type(caught.value).__name__ == "ForeignData"
    assert list((directory / "segments").iterdir())


def test_a_damaged_superblock_is_refused(directory):
    open_tier(directory).close()
    (directory / "superblock.json").write_bytes(b"{")
    with pytest.raises(Exception, match="is damaged"):
        open_tier(directory)


def test_the_superblock_describes_the_directory(directory, tier):
    found = json.loads((directory / "superblock.json").read_text())
    assert found["format"] == "kvstore-nvme-1"
    assert found["index_engine"] == "lmdb-0.9"
    assert (found["segment_bytes"], found["slab_bytes"], found["slot_bytes_min"]) == (
        MIB,
        SLAB,
        2 * PAGE_BYTES,
    )
    assert (found["lives"], len(found["uuid"])) == (1, 32)


def test_one_process_one_handle(tier, directory, blocks):
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        open_tier(directory)
    assert blocks.put(1)
    assert blocks.is_whole(1)


def test_a_directory_that_cannot_be_used_is_an_io_error(directory):
    directory.mkdir()
    (directory / "segments").write_text("a file")
    with pytest.raises(TierIO, match=f"cannot open {directory}"):
        open_tier(directory)


def test_a_start_that_fails_leaves_the_directory_usable(directory, monkeypatch):
    open_tier(directory).close()
    monkeypatch.setattr("kvstore.tier.superblock.os.fsync", _refuse)
    with pytest.raises(TierFull, match="cannot store"):
        open_tier(directory)
    monkeypatch.undo()
    tier = open_tier(directory)
    assert tier.statistics().index_damage == ""
    tier.close()


def _refuse(_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_namespaces_survive_in_either_copy(directory):
    tier = open_tier(directory)
    for number in range(3):
        tier.put_namespace(Declared(LAYOUT, name_of(number), number))
    tier.set_clear_count(name_of(1), 4)
    with pytest.raises(TierIO, match="never stored"):
        tier.set_clear_count(name_of(9), 1)
    tier.close()
    again = open_tier(directory)
    assert [(item.index, item.clear_count) for item in again.load_namespaces()] == [
        (0, 0),
        (1, 4),
        (2, 0),
    ]
    again.close()


def test_a_declaration_that_failed_half_way_gives_its_number_up(directory, monkeypatch):
    """Blocks of the next namespace carry the number, and must be that one's after a restart."""
    tier = open_tier(directory)
    with monkeypatch.context() as broken:
        broken.setattr("kvstore.tier.superblock.os.fsync", _refuse)
        with pytest.raises(TierFull):
            tier.put_namespace(Declared(LAYOUT, name_of(1), 0))
    tier.put_namespace(Declared(LAYOUT, name_of(2), 0))
    tier.close()
    again = open_tier(directory)
    assert [(item.index, item.id) for item in again.load_namespaces()] == [(0, name_of(2))]
    again.close()


def test_the_index_tells_what_it_holds(blocks, tier):
    blocks.fill(range(4))
    wanted = [(name_of(seed), blocks.held[seed][1].generation) for seed in range(4)]
    names, generations = tier.recorded()
    told = zip([name.tobytes() for name in names], generations.tolist(), strict=True)
    assert sorted(told) == sorted(wanted)
    blocks.drop(2)
    other = (wanted[1][0], wanted[1][1] + 1)
    assert tier.still_recorded([*wanted, other, (name_of(9), 1)]) == wanted[:2] + wanted[3:]


def test_an_older_copy_of_the_index_brings_nothing_cleared_back(directory):
    """Copied and put back within one life, so that nothing but its content is old."""
    tier = open_tier(directory)
    Blocks(tier)
    copy = (directory / "index" / "data.mdb").read_bytes()
    tier.set_clear_count(NAMESPACE, 3)
    tier.close()
    (directory / "index" / "data.mdb").write_bytes(copy)
    again = open_tier(directory)
    assert again.statistics().index_damage == ""
    assert [item.clear_count for item in again.load_namespaces()] == [3]
    again.close()


# ---------------------------------------------------------------------- the cap and the disk


def test_there_is_always_a_cap_and_a_floor():
    assert NvmeConfig().bytes_max > 0
    assert NvmeConfig().free_bytes_min > 0


def test_a_cap_below_two_segments_is_refused_by_name(directory):
    with pytest.raises(ConfigError, match=r"nvme\.bytes_max=.*nvme\.segment_bytes"):
        open_tier(directory, bytes_max=2 * MIB)


def test_full_is_an_answer_and_eviction_makes_room(blocks, tier):
    stored = blocks.fill(range(10_000))
    # 15 slabs: the 16th slab's bytes belong to index, superblock and directories.
    assert len(stored) == 15 * PER_SLAB
    blocks.drop(7)
    assert blocks.put(1000)
    assert blocks.is_whole(1000)


def test_the_directory_never_exceeds_the_cap(directory):
    """18 MiB from an earlier run, half of it unknown, then 40 MiB more under a cap of 20 MiB."""
    tier = open_tier(directory, bytes_max=20 * MIB)
    blocks = Blocks(tier)
    blocks.fill(range(9 * 16))
    tier.close()
    for number in range(9):
        (directory / "segments" / f"junk{number}").write_bytes(bytes(MIB))
    tier = open_tier(directory, bytes_max=20 * MIB)
    assert tier.statistics().unknown_files_removed == 9
    assert blocks.reopen(tier) == set(range(9 * 16))
    highest, stop = [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.02):
            highest[0] = max(highest[0], bytes_in(directory))

    sampler = threading.Thread(target=sample)
    sampler.start()
    wanted = list(range(1000, 1000 + 40 * 16))
    while wanted:
        wanted = wanted[len(blocks.fill(wanted[:48])) :]
        blocks.drop(*list(blocks.held)[:24])
        tier.maintain()
    stop.set()
    sampler.join()
    assert 10 * MIB < highest[0] <= 20 * MIB + LAYOUT.slot_bytes
    assert tier.statistics().bytes_on_disk == tier.bytes_on_disk()
    tier.close()


@pytest.mark.parametrize("where", [".", "segments"])
def test_what_lies_beside_the_blocks_counts_against_the_cap(directory, where):
    tier = open_tier(directory)
    blocks = Blocks(tier)
    (directory / where / "other").write_bytes(bytes(5 * MIB))
    tier.maintain()
    blocks.fill(range(1000))
    assert 14 * MIB < bytes_in(directory) <= 16 * MIB
    assert len(blocks.held) == 10 * PER_SLAB
    tier.close()


def test_a_lower_cap_at_start_drops_blocks_and_files(directory):
    tier = open_tier(directory, bytes_max=16 * MIB)
    blocks = Blocks(tier)
    blocks.fill(range(200))
    tier.close()
    tier = open_tier(directory, bytes_max=6 * MIB)
    blocks.reopen(tier)
    leaving = set(tier.over_cap_slots().tolist())
    assert leaving
    blocks.drop(*[seed for seed, (slot, _) in blocks.held.items() if slot in leaving])
    assert len(tier.over_cap_slots()) == 0
    tier.take(tier.slot_bytes_for(LAYOUT.block_bytes), 1)
    tier.maintain()
    assert bytes_in(directory) <= 6 * MIB
    assert blocks.held
    assert all(blocks.is_whole(seed) for seed in blocks.held)
    tier.check_integrity()
    tier.close()


def test_a_lower_cap_hands_out_nothing_before_it_is_met(directory):
    tier = open_tier(directory, bytes_max=16 * MIB)
    blocks = Blocks(tier)
    blocks.fill(range(200))
    tier.close()
    tier = open_tier(directory, bytes_max=6 * MIB)
    blocks.reopen(tier)
    leaving = set(tier.over_cap_slots().tolist())
    blocks.drop(*[seed for seed, (slot, _) in blocks.held.items() if slot in list(leaving)[:5]])
    some = tier.take(tier.slot_bytes_for(LAYOUT.block_bytes), 10_000)
    assert not leaving & set(some)
    tier.close()


def test_a_cap_that_rises_again_uses_what_had_to_empty(directory):
    """Slabs closed for a while serve again, those that emptied and those that did not."""
    tier = open_tier(directory)
    blocks = Blocks(tier)
    blocks.fill(range(1000))
    (directory / "other").write_bytes(bytes(5 * MIB))
    tier.maintain()
    leaving = tier.tend().tolist()
    assert len(leaving) >= 5 * PER_SLAB
    blocks.drop(*[seed for seed, (slot, _) in blocks.held.items() if slot in leaving[::2]])
    assert not blocks.put(5000)
    (directory / "other").unlink()
    tier.maintain()
    assert blocks.fill(range(6000, 8000))
    assert len(blocks.held) == 15 * PER_SLAB
    assert len(tier.tend()) == 0
    tier.check_integrity()
    tier.close()


def test_a_shrinking_tier_gives_back_files_before_free_space_it_never_used(directory):
    tier = open_tier(directory)
    blocks = Blocks(tier)
    blocks.fill(range(3 * PER_SLAB))
    blocks.drop(*range(PER_SLAB))
    assert tier.statistics().segments == 3
    (directory / "other").write_bytes(bytes(5 * MIB))
    tier.maintain()
    assert len(tier.tend()) == 0
    tier.maintain()
    assert tier.statistics().segments == 2
    assert tier.statistics().bytes_on_disk == tier.bytes_on_disk()
    assert all(blocks.is_whole(seed) for seed in blocks.held)
    tier.close()


def test_slots_of_a_size_may_be_given_to_another(blocks, tier):
    """All slabs serve one size; once its blocks leave, another size gets their room."""
    blocks.fill(range(10_000))
    other = Blocks(tier, RAGGED)
    assert not other.put(5000)
    blocks.drop(*blocks.held)
    assert len(other.fill(range(5000, 5100))) == 100
    assert all(other.is_whole(5000 + number) for number in range(100))


def test_no_space_from_the_file_system_stops_growth_and_heals(directory):
    clock = VirtualClock()
    system = FaultySystem()
    tier = open_tier(directory, DirectIO(system=system), clock=clock)
    blocks = Blocks(tier)
    blocks.fill(range(2 * PER_SLAB))
    system.decide = from_nth("reserve", 1, Fail(errno.ENOSPC))
    with pytest.raises(TierFull):
        blocks.put(100)
    assert not blocks.put(100)
    assert any("refused more space" in reason for reason in tier.health())
    blocks.drop(3)
    assert blocks.put(101)
    assert tier.statistics().bytes_on_disk == tier.bytes_on_disk()
    system.decide = lambda _: None
    clock.advance(GROW_AGAIN_SECONDS + 1)
    tier.maintain()
    assert tier.health() == []
    assert len(blocks.fill(range(200, 232))) == 32
    tier.check_integrity()
    tier.close()


def test_a_disk_without_room_for_one_segment_is_told():
    with small_filesystem(3 * MIB) as mount:
        tier = open_tier(mount / "data", free_bytes_min=0, index_map_bytes=16 * MIB)
        assert tier.take(tier.slot_bytes_for(LAYOUT.block_bytes), 1)
        tier.close()
        (mount / "other").write_bytes(bytes(2 * MIB))
        tier = open_tier(mount / "data", free_bytes_min=0, index_map_bytes=16 * MIB)
        assert tier.take(tier.slot_bytes_for(LAYOUT.block_bytes), 1) == []
        assert any("cannot grow" in reason for reason in tier.health())
        tier.close()


def test_a_full_index_is_told_and_stores_fail_whole(directory):
    tier = open_tier(directory, index_map_bytes=MIB // 2, bytes_max=64 * MIB)
    blocks = Blocks(tier, BlockLayout(1, 1, 100))
    foreign = [(name_of(seed), bytes(RECORD.itemsize)) for seed in range(300_000, 300_500)]
    for start in range(0, len(foreign), 20):
        tier._ledger._index.submit(foreign[start : start + 20], []).result(10)

    def fill_on() -> None:
        for start in range(0, 100_000, 50):
            blocks.fill(range(start, start + 50))

    with pytest.raises(TierFull, match="index_map_bytes"):
        fill_on()
    assert any("nothing becomes durable" in reason for reason in tier.health())
    assert tier.statistics().slots_ready == len(blocks.held)
    assert tier.statistics().records == len(blocks.held) + len(foreign)
    tier.forget([(name, None) for name, _ in foreign]).result(30)
    blocks.drop(*blocks.held)
    assert blocks.put(200_000)
    assert tier.health() == []
    tier.close()


def test_a_file_system_smaller_than_the_cap():
    """40 MiB of disk, a cap of 60: 200 MiB go through in 1 MiB blocks."""
    layout = BlockLayout(16, 8, MIB // 8)
    with small_filesystem(40 * MIB) as mount:
        tier = open_tier(
            mount / "data",
            bytes_max=60 * MIB,
            free_bytes_min=2 * MIB,
            segment_bytes=4 * MIB,
            index_map_bytes=16 * MIB,
        )
        blocks = Blocks(tier, layout)
        outcome = []
        for seed in range(200):
            stored = False
            for _ in range(2):
                with suppress(TierFull):
                    stored = stored or blocks.put(seed)
                if not stored:
                    blocks.drop(next(iter(blocks.held)))
            outcome.append(stored)
        assert sum(outcome[-100:]) >= 95
        assert all(blocks.is_whole(seed) for seed in blocks.held)
        assert len(blocks.held) >= 24
        tier.close()


def test_a_disk_filled_from_outside_stops_writes_then_frees_then_heals():
    with small_filesystem(40 * MIB) as mount:
        tier = open_tier(
            mount / "data", bytes_max=30 * MIB, free_bytes_min=4 * MIB, index_map_bytes=16 * MIB
        )
        blocks = Blocks(tier)
        for seed in range(160):
            blocks.put(seed)
        (mount / "other").write_bytes(bytes(28 * MIB))
        tier.maintain()
        assert any("bytes are free" in reason for reason in tier.health())
        leaving = set(tier.tend().tolist())
        assert leaving
        assert all(blocks.is_whole(seed) for seed in blocks.held)
        blocks.drop(*[seed for seed, (slot, _) in blocks.held.items() if slot in leaving])
        tier.take(tier.slot_bytes_for(LAYOUT.block_bytes), 0)
        tier.maintain()
        free = os.statvfs(mount)
        assert free.f_bavail * free.f_frsize >= 4 * MIB
        assert all(blocks.is_whole(seed) for seed in blocks.held)
        (mount / "other").unlink()
        tier.maintain()
        assert tier.health() == []
        assert len(blocks.fill(range(1000, 1160))) == 160
        tier.check_integrity()
        assert tier.statistics().bytes_on_disk == tier.bytes_on_disk()
        tier.close()


def test_tending_runs_by_itself(blocks, tier, directory):
    blocks.put(1)
    next((directory / "segments").iterdir()).unlink()
    tier.tend()
    deadline = 100
    while tier.statistics().segments_lost == 0 and deadline:
        deadline -= 1
        threading.Event().wait(0.02)
    assert tier.statistics().segments_lost == 1


def test_removed_files_and_dropped_blocks_leave_books_and_disk_equal(blocks, tier, directory):
    blocks.fill(range(160))
    for file in list((directory / "segments").iterdir())[:10]:
        file.unlink()
    blocks.drop(*blocks.held)
    tier.maintain()
    assert tier.statistics().bytes_on_disk == tier.bytes_on_disk()
    assert tier.statistics().segments_lost == 10
    assert blocks.fill(range(160)) == list(range(160))
    assert all(blocks.is_whole(seed) for seed in range(160))


# ---------------------------------------------------------------------- threads


def test_many_threads_write_and_read_distinct_slots(tier):
    tier.put_namespace(Declared())
    slots = tier.take(tier.slot_bytes_for(LAYOUT.block_bytes), 96)
    frames = {slot: frame_of(tier, slot) for slot in slots}
    wrong = []

    def work(own):
        for slot in own:
            tier.write(slot, frames[slot], LAYOUT.parts, payload_of(slot))
        tier.sync(own)
        tier.record([frames[slot] for slot in own], own).result(10)
        into = page_aligned(LAYOUT.slot_bytes)
        for slot in own:
            tier.read_parts(slot, LAYOUT.parts, into, frames[slot].checksums)
            if not np.array_equal(into, payload_of(slot)):
                wrong.append(slot)

    threads = [threading.Thread(target=work, args=(slots[start::6],)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert tier.statistics().records == 96


def test_a_slow_disk_holds_up_neither_books_nor_other_reads(directory):
    """One read hangs in the kernel; taking, freeing and other reads go on."""
    release = threading.Event()
    hung = threading.Event()
    io = FaultyBlockIO(DirectIO())
    tier = open_tier(directory, io)
    blocks = Blocks(tier)
    blocks.put(1)
    blocks.put(2)
    first = io.counts["read"] + 1

    def decide(operation):
        if operation.kind == "read" and operation.number == first:
            hung.set()
            release.wait(10)

    io.decide = decide
    outcome = []
    stuck = threading.Thread(target=lambda: outcome.append(blocks.is_whole(1)))
    stuck.start()
    assert hung.wait(10)
    assert blocks.is_whole(2)
    slots = tier.take(tier.slot_bytes_for(LAYOUT.block_bytes), 5)
    tier.free(slots)
    assert blocks.put(3)
    tier.maintain()
    assert outcome == []
    release.set()
    stuck.join()
    assert outcome == [True]
    tier.close()


def test_the_configured_values_are_the_ones_described(tier):
    described = tier.describe()
    assert described["bytes_max"] == config().bytes_max
    assert described["mode"] in ("direct", "buffered")
    assert described["index"]["bytes_max"] == config().index_map_bytes


class Compressing(FaultySystem):
    """A file system that keeps no blocks for zeros."""

    def fallocate(self, fd, length):
        os.ftruncate(fd, length)

    def pwritev(self, fd, views, offset):
        if any(view.any() for view in views):
            return super().pwritev(fd, views, offset)
        return sum(map(len, views))


def test_a_file_system_that_reserves_nothing_is_left_alone(directory):
    tier = open_tier(directory, DirectIO(system=Compressing()))
    blocks = Blocks(tier)
    with pytest.raises(TierFull, match="keeps no blocks for written zeros"):
        blocks.put(0)
    assert not blocks.put(1), "shed"
    assert any("cannot grow" in reason for reason in tier.health())
    assert any("keeps no blocks" in remark for remark in tier.remarks())
    assert list((directory / "segments").iterdir()) == []
    tier.close()


def fails(_):
    raise OSError(errno.EIO, "on purpose")


@pytest.mark.parametrize("call", ["sync_directory", "free_bytes"])
def test_what_the_system_refuses_is_a_typed_error(directory, monkeypatch, call):
    tier = open_tier(directory)
    blocks = Blocks(tier)
    with monkeypatch.context() as patched:
        patched.setattr(f"kvstore.tier.segments.{call}", fails)
        with pytest.raises(TierIO, match="on purpose"):
            blocks.put(0)
    assert blocks.put(1)
    tier.close()


def test_a_full_disk_that_cannot_be_looked_at_is_full_all_the_same(directory, monkeypatch):
    io = DirectIO(system=FaultySystem(from_nth("reserve", 2, Fail(errno.ENOSPC))))
    tier = open_tier(directory, io)
    blocks = Blocks(tier)
    with monkeypatch.context() as patched:
        patched.setattr("kvstore.tier.capacity.free_bytes", fails)
        with pytest.raises(TierFull, match="cannot reserve"):
            blocks.put(0)
    tier.close()
