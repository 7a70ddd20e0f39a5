"""Frames and segment files: the format, where slots lie, and books that equal the disk."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from nvme_kit import LAYOUT, MIB, NAMESPACE, name_of, payload_of

from kvstore.blockio import DirectIO, page_aligned
from kvstore.errors import FrameMalformed, InvariantViolated, TierFull, TierIO
from kvstore.segment import (
    FRAME,
    MAGIC,
    SLOT_BYTES_MIN,
    FrameFields,
    SegmentGeometry,
    frame_bytes,
    pack_frame,
    parse_frame,
)
from kvstore.testing.faults import Fail, FaultySystem, at
from kvstore.tier import segments as segments_module
from kvstore.tier.segments import Segments
from kvstore.types import PAGE_BYTES, PARTS_MAX

SLOT = frame_bytes(LAYOUT.block_bytes)
GEOMETRY = SegmentGeometry(MIB + MIB // 64)


def frame(seed: int, length: int = LAYOUT.block_bytes, **changes: object) -> FrameFields:
    fields = FrameFields(
        generation=seed + 1,
        namespace=NAMESPACE,
        fingerprint=name_of(seed),
        parent=name_of(seed + 1000),
        namespace_index=3,
        clear_count=2,
        depth=seed,
        length=length,
        checksums=np.arange(seed, seed + PARTS_MAX, dtype=np.uint64) << np.uint64(40),
        uses=7,
        stored_at=1.5,
        parts=((0, length),),
    )
    return replace(fields, **changes)


def segments_in(directory, io=None, bytes_max=64 * MIB, free_bytes_min=0) -> Segments:
    found = Segments(directory, io or DirectIO(), GEOMETRY, free_bytes_min=free_bytes_min)
    found.bytes_max = bytes_max
    return found


@pytest.fixture
def segments(tmp_path):
    found = segments_in(tmp_path)
    yield found
    assert found.bytes_on_disk == found.measure()
    found.close()


# ---------------------------------------------------------------------- the format


def test_a_frame_says_what_was_packed():
    packed = frame(5, 100_000, parts=((0, 40_960), (40_960, 59_040)))
    found = parse_frame(pack_frame(packed).ljust(PAGE_BYTES, b"\0"))
    assert np.array_equal(found.checksums, packed.checksums)
    blank = np.zeros(0)
    assert replace(found, checksums=blank).__dict__ == replace(packed, checksums=blank).__dict__


def test_the_header_is_pinned_byte_for_byte():
    """Data on disk outlives this program: another digest here needs another FORMAT_VERSION."""
    assert FRAME.size == 280
    digest = hashlib.blake2b(pack_frame(frame(1)), digest_size=8).hexdigest()
    assert digest == "7ea30558bb0a8589"


@pytest.mark.parametrize("offset", [0, 3, 8, 10, 12, 16, 40, 100, 150, 200, 271, 279])
def test_any_flipped_header_byte_is_malformed(offset):
    data = bytearray(pack_frame(frame(1)))
    data[offset] ^= 0x10
    with pytest.raises(FrameMalformed):
        parse_frame(bytes(data))


@pytest.mark.parametrize("page", [b"", b"short", MAGIC, bytes(PAGE_BYTES), b"\xff" * PAGE_BYTES])
def test_what_is_no_header_is_malformed(page):
    with pytest.raises(FrameMalformed):
        parse_frame(page)


@pytest.mark.parametrize(
    "parts", [(), ((0, LAYOUT.block_bytes + 1),), ((LAYOUT.block_bytes, 1),)], ids=str
)
def test_parts_that_do_not_fit_are_malformed(parts):
    with pytest.raises(FrameMalformed, match="do not fit"):
        parse_frame(pack_frame(frame(1, parts=parts)))


def test_a_header_of_another_program_is_malformed(monkeypatch):
    monkeypatch.setattr("kvstore.segment.MAGIC", b"OTHERPRG")
    other = pack_frame(frame(1))
    monkeypatch.undo()
    with pytest.raises(FrameMalformed, match="no frame header"):
        parse_frame(other)


def test_a_header_of_a_later_format_is_refused(monkeypatch):
    monkeypatch.setattr("kvstore.segment.FORMAT_VERSION", 2)
    later = pack_frame(frame(1))
    monkeypatch.undo()
    with pytest.raises(FrameMalformed, match="format 2"):
        parse_frame(later)


# ---------------------------------------------------------------------- where slots lie


def test_power_of_two_payloads_fill_a_segment():
    for shift in range(18, 21):
        assert GEOMETRY.slots_in(frame_bytes(1 << shift)) == MIB >> shift


def test_frames_of_one_file_never_overlap():
    for slot_bytes in (SLOT_BYTES_MIN, SLOT, 3 * PAGE_BYTES, 5 * MIB):
        first = 7 * GEOMETRY.slots_per_slab_max
        ends = 0
        for index in range(GEOMETRY.slots_in(slot_bytes)):
            assert GEOMETRY.segment_of(first + index) == 7
            assert GEOMETRY.offset_of(first + index, slot_bytes) == ends
            ends += slot_bytes
        assert ends == GEOMETRY.file_bytes(slot_bytes)
        assert ends <= GEOMETRY.span(slot_bytes) * GEOMETRY.slab_bytes


# ---------------------------------------------------------------------- files


def write(segments: Segments, slot: int, seed: int, length: int = LAYOUT.block_bytes) -> None:
    payload = page_aligned(length)
    payload[:] = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
    segments.write_frame(slot, frame(seed, length), payload, frame_bytes(length))


def read(segments: Segments, slot: int, length: int = LAYOUT.block_bytes) -> np.ndarray:
    into = page_aligned(length)
    segments.read_payload(slot, 0, [into])
    return into


def stored(seed: int, length: int = LAYOUT.block_bytes) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 65536, 70_001, 3 * MIB + 5])
def test_frames_come_back(segments, length):
    first = GEOMETRY.slots_per_slab_max
    slots = [first + index for index in range(min(3, GEOMETRY.slots_in(frame_bytes(length))))]
    for slot in slots:
        write(segments, slot, slot, length)
    for slot in slots:
        assert np.array_equal(read(segments, slot, length), stored(slot, length))
        assert segments.read_header(slot).fingerprint == name_of(slot)
    assert segments.files() == {1: frame_bytes(length)}


def test_a_frame_too_large_for_its_slot_is_our_bug(segments):
    with pytest.raises(InvariantViolated):
        segments.write_frame(0, frame(1), payload_of(1), SLOT - PAGE_BYTES)


def test_a_file_is_reserved_whole_at_its_first_write(segments):
    write(segments, 0, 1)
    assert segments.measure() >= GEOMETRY.file_bytes(SLOT)
    assert segments.bytes_on_disk == segments.measure()


def test_another_slot_size_on_the_same_slab_starts_from_nothing(segments):
    """No header of an earlier size can be taken for a frame of the new one."""
    write(segments, 0, 1, 8 * PAGE_BYTES)
    write(segments, 1, 2, 2 * PAGE_BYTES)
    assert segments.files() == {0: frame_bytes(2 * PAGE_BYTES)}
    with pytest.raises(FrameMalformed):
        segments.read_header(0)


def test_a_frame_over_several_slabs_takes_their_files_place(segments):
    per_slab = GEOMETRY.slots_per_slab_max
    for slab in range(4):
        write(segments, slab * per_slab, slab)
    write(segments, 1 * per_slab, 9, 2 * MIB)
    assert sorted(segments.files()) == [0, 1, 3]
    write(segments, 2 * per_slab, 5)
    assert sorted(segments.files()) == [0, 2, 3]


def test_the_byte_bound_holds_at_every_allocation(tmp_path):
    length = GEOMETRY.file_bytes(SLOT)
    segments = segments_in(tmp_path, bytes_max=2 * length + 100)
    per_slab = GEOMETRY.slots_per_slab_max
    write(segments, 0, 1)
    write(segments, per_slab, 1)
    with pytest.raises(TierFull, match="allowed now"):
        write(segments, 2 * per_slab, 1)
    assert segments.measure() <= 2 * length + 100
    write(segments, per_slab + 1, 2)
    segments.remove([0])
    write(segments, 2 * per_slab, 3)
    assert sorted(segments.files()) == [1, 2]
    segments.close()


def test_the_bound_holds_under_concurrent_first_writes(tmp_path):
    length = GEOMETRY.file_bytes(SLOT)
    segments = segments_in(tmp_path, bytes_max=3 * length)
    refused = []

    def store(slab: int) -> None:
        try:
            write(segments, slab * GEOMETRY.slots_per_slab_max, slab)
        except TierFull:
            refused.append(slab)

    threads = [threading.Thread(target=store, args=(slab,)) for slab in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 5
    assert segments.measure() == segments.bytes_on_disk <= 3 * length
    for slab in set(range(8)) - set(refused):
        block = read(segments, slab * GEOMETRY.slots_per_slab_max)
        assert np.array_equal(block, stored(slab))
    segments.close()


def test_the_free_space_floor_stops_growth_only(tmp_path):
    segments = segments_in(tmp_path)
    write(segments, 0, 1)
    segments.free_bytes_min = 1 << 60
    with pytest.raises(TierFull, match="free_bytes_min"):
        write(segments, GEOMETRY.slots_per_slab_max, 1)
    write(segments, 1, 2)
    assert np.array_equal(read(segments, 1), stored(2))
    segments.close()


def test_a_refused_allocation_leaves_nothing_and_heals(tmp_path):
    system = FaultySystem(at("reserve", 1, Fail(errno.ENOSPC)))
    segments = segments_in(tmp_path, DirectIO(system=system))
    with pytest.raises(TierFull):
        write(segments, 0, 1)
    assert list(tmp_path.iterdir()) == []
    assert (segments.bytes_on_disk, segments.files()) == (0, {})
    write(segments, 0, 1)
    assert np.array_equal(read(segments, 0), stored(1))
    segments.close()


def test_unknown_and_unfinished_files_go_before_anything_is_written(tmp_path):
    segments = segments_in(tmp_path)
    write(segments, 0, 1)
    write(segments, GEOMETRY.slots_per_slab_max, 2)
    segments.close()
    (tmp_path / "core.1234").write_bytes(b"x" * 8192)
    (tmp_path / f"000007-{SLOT}.seg").write_bytes(b"partly allocated")
    (tmp_path / "000009-12289.seg").write_bytes(bytes(2 * MIB))
    (tmp_path / "link.seg").symlink_to("/etc/hostname")
    again = segments_in(tmp_path)
    assert again.files() == {0: SLOT, 1: SLOT}
    assert again.unknown_files == 4
    assert again.unknown_bytes >= 8192
    assert sorted(item.name for item in tmp_path.iterdir()) == [
        f"000000-{SLOT}.seg",
        f"000001-{SLOT}.seg",
    ]
    assert again.bytes_on_disk == again.measure()
    assert np.array_equal(read(again, 0), stored(1))
    again.close()


def test_removing_what_is_gone_already_is_success(segments, tmp_path):
    write(segments, 0, 1)
    next(tmp_path.iterdir()).unlink()
    segments.remove([0, 5])
    segments.remove([0])
    assert segments.files() == {}


def test_a_removed_file_costs_its_own_blocks_only(tmp_path):
    segments = segments_in(tmp_path)
    other = GEOMETRY.slots_per_slab_max
    write(segments, 0, 1)
    write(segments, other, 2)
    segments.close()
    (tmp_path / f"000000-{SLOT}.seg").unlink()
    with pytest.raises(TierIO):
        read(segments, 0)
    assert np.array_equal(read(segments, other), stored(2))
    assert segments.reconcile() == ([0], 0)
    assert segments.bytes_on_disk == segments.measure()
    (tmp_path / "stranger").write_bytes(b"x" * 5000)
    assert segments.reconcile() == ([], 8192)
    with pytest.raises(TierIO, match="no file"):
        read(segments, 0)
    segments.close()


def test_a_file_removed_while_open_is_not_called_durable(segments, tmp_path):
    write(segments, 0, 1)
    (tmp_path / f"000000-{SLOT}.seg").unlink()
    write(segments, 1, 2)
    with pytest.raises(TierIO, match="removed by somebody else"):
        segments.sync([1])
    write(segments, 1, 3)
    segments.sync([1])
    assert np.array_equal(read(segments, 1), stored(3))


def test_few_descriptors_serve_many_files(segments, monkeypatch):
    monkeypatch.setattr(segments_module, "FILES_OPEN_MAX", 4)
    before = len(os.listdir("/proc/self/fd"))
    per_slab = GEOMETRY.slots_per_slab_max
    for slab in range(20):
        write(segments, slab * per_slab, slab, PAGE_BYTES)
    for slab in range(20):
        found = read(segments, slab * per_slab, PAGE_BYTES)
        assert np.array_equal(found, stored(slab, PAGE_BYTES))
    assert len(os.listdir("/proc/self/fd")) - before <= 4


def test_distinct_slots_from_many_threads(segments):
    slots = [slab * GEOMETRY.slots_per_slab_max + index for slab in range(3) for index in range(8)]
    wrong = []

    def work(own: list[int]) -> None:
        for turn in range(3):
            for slot in own:
                write(segments, slot, slot + turn)
            segments.sync(own)
            wrong.extend(s for s in own if not np.array_equal(read(segments, s), stored(s + turn)))

    threads = [threading.Thread(target=work, args=(slots[start::6],)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
