"""Damage on the disk: what it hits is a miss, counted and dropped; everything else is served.

Field cases IDX-10, OPS-7 and SGL-11: files flipped, zeroed, swapped, cut, removed, or from an
earlier day.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore.fingerprint import Chain
from kvstore.types import BlockStatus
from tests.conftest import DaemonProcess
from tests.e2e.kit import (
    LAYOUT,
    Engine,
    assert_books,
    findings,
    running,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
PAGE = 4096
BLOCKS = 8
SETTINGS = {"nvme.segment_bytes": "2MiB", "nvme.bytes_max": "64MiB"}


@dataclass(frozen=True)
class Frame:
    """Where a block lies: found by its name in the files, as anybody could."""

    path: Path
    offset: int

    def read(self, start: int, length: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset + start)
            return file.read(length)

    def write(self, start: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.offset + start)
            file.write(data)


def frame_of(daemon: DaemonProcess, name: bytes) -> Frame:
    """The frame whose header page names the block."""
    for path in sorted((daemon.data_dir / "segments").iterdir()):
        data = path.read_bytes()
        for offset in range(0, len(data), PAGE):
            if name in data[offset : offset + 256] and data[offset : offset + 4] != bytes(4):
                return Frame(path, offset)
    raise AssertionError(f"{name.hex()[:16]} lies nowhere")


@dataclass
class Disk:
    """A stopped daemon's data with two chains in it: one to be hurt, one that must not notice."""

    daemon: DaemonProcess
    hurt: Chain
    other: Chain

    def frame(self, block: int) -> Frame:
        return frame_of(self.daemon, self.hurt[block])

    def start(self) -> Engine:
        self.daemon.start()
        return Engine(self.daemon)


@pytest.fixture
def disk() -> Iterator[Disk]:
    with running(SETTINGS) as daemon:
        with Engine(daemon) as engine:
            other = engine.durable(2, BLOCKS)
            hurt = engine.durable(1, BLOCKS)
        daemon.kill()
        yield Disk(daemon, hurt, other)


def flip(disk: Disk) -> None:
    frame = disk.frame(5)
    at = PAGE + LAYOUT.layer_bytes * 2 + 100
    frame.write(at, bytes([frame.read(at, 1)[0] ^ 1]))


def zero_a_page(disk: Disk) -> None:
    disk.frame(5).write(2 * PAGE, bytes(PAGE))


def zero_the_frame(disk: Disk) -> None:
    disk.frame(5).write(0, bytes(PAGE + LAYOUT.block_bytes))


def swap_payloads(disk: Disk) -> None:
    one, two = disk.frame(5), disk.frame(6)
    size = LAYOUT.block_bytes
    first, second = one.read(PAGE, size), two.read(PAGE, size)
    one.write(PAGE, second)
    two.write(PAGE, first)


def swap_frames(disk: Disk) -> None:
    one, two = disk.frame(5), disk.frame(6)
    size = PAGE + LAYOUT.block_bytes
    first, second = one.read(0, size), two.read(0, size)
    one.write(0, second)
    two.write(0, first)


IN_PLACE = [flip, zero_a_page, zero_the_frame, swap_payloads, swap_frames]


@pytest.mark.parametrize("damage", IN_PLACE, ids=lambda damage: damage.__name__)
def test_a_damaged_block_ends_its_chain_there(disk: Disk, damage: Callable[[Disk], None]) -> None:
    damage(disk)
    with disk.start() as engine:
        assert engine.load(disk.hurt).blocks == 5
        assert engine.loads_whole(disk.other).from_nvme == BLOCKS
        before: Any = disk.daemon.stat()
        assert before["nvme"]["checksum_failures"] >= 1, "counted"
        assert before["counters"]["dropped_blocks:checksum"] >= BLOCKS - 5, "with what follows it"
        for _ in range(5):
            assert engine.load(disk.hurt).blocks == 5
        after: Any = disk.daemon.stat()
        assert after["nvme"]["checksum_failures"] == before["nvme"]["checksum_failures"], (
            "dropped: read once, then never again"
        )
        statuses = engine.store(disk.hurt)
        while BlockStatus.REFUSED in statuses or BlockStatus.NO_PARENT in statuses:
            statuses = engine.store(disk.hurt)
        assert engine.handle.flush(disk.hurt).all()
        engine.loads_whole(disk.hurt)
        assert findings(disk.daemon, payloads=True) == [], "as if nothing had been"
    assert_books(disk.daemon)


@pytest.mark.parametrize("damage", IN_PLACE, ids=lambda damage: damage.__name__)
def test_verification_finds_it_first(disk: Disk, damage: Callable[[Disk], None]) -> None:
    damage(disk)
    with disk.start() as engine:
        found = findings(disk.daemon, payloads=True)
        assert found
        assert len(found) <= 2, found
        assert findings(disk.daemon, payloads=True, fix=True) != []
        assert findings(disk.daemon, payloads=True) == []
        assert engine.handle.exists(disk.hurt).prefix_blocks == 5
        assert engine.load(disk.hurt).blocks == 5
        engine.loads_whole(disk.other)
    assert_books(disk.daemon)


def test_a_frames_header_alone_is_not_needed_to_serve(disk: Disk) -> None:
    """What is read is checked against the index; a lost header is told by verification."""
    disk.frame(5).write(0, bytes(PAGE))
    with disk.start() as engine:
        engine.loads_whole(disk.hurt)
        assert len(findings(disk.daemon, payloads=True)) == 1
    assert_books_but_for_findings(disk.daemon)


def assert_books_but_for_findings(daemon: DaemonProcess) -> None:
    findings(daemon, payloads=True, fix=True)
    assert_books(daemon)


# ---------------------------------------------------------------------- whole files


def cut_segment(disk: Disk) -> None:
    path = disk.frame(0).path
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def remove_segment(disk: Disk) -> None:
    disk.frame(0).path.unlink()


def remove_all_segments(disk: Disk) -> None:
    for path in (disk.daemon.data_dir / "segments").iterdir():
        path.unlink()


def empty_segment(disk: Disk) -> None:
    disk.frame(0).path.write_bytes(b"")


@pytest.mark.parametrize(
    "damage",
    [cut_segment, remove_segment, remove_all_segments, empty_segment],
    ids=lambda damage: damage.__name__,
)
def test_a_lost_file_is_a_miss(disk: Disk, damage: Callable[[Disk], None]) -> None:
    damage(disk)
    with disk.start() as engine:
        assert engine.load(disk.hurt).blocks == 0, "its root is gone"
        engine.load(disk.other)
        tree: Any = disk.daemon.stat()
        lost = tree["nvme"]["records_unusable"] + tree["nvme"]["unknown_files_removed"]
        assert lost > 0, "counted"
        for number in (1, 2, 3):
            chain = engine.durable(number, BLOCKS)
            engine.loads_whole(chain)
    assert findings(disk.daemon, payloads=True) == []
    assert_books(disk.daemon)


def test_files_of_others_do_not_stay(disk: Disk) -> None:
    """Every byte below the segments is accounted for, or removed and counted."""
    (disk.daemon.data_dir / "segments" / "core.1234").write_bytes(bytes(1 << 20))
    with disk.start() as engine:
        engine.loads_whole(disk.hurt)
        tree: Any = disk.daemon.stat()
        assert tree["nvme"]["unknown_files_removed"] == 1
        assert tree["nvme"]["unknown_bytes_removed"] == 1 << 20
    assert_books(disk.daemon)


# ---------------------------------------------------------------------- the index


def remove_index(data: Path) -> None:
    shutil.rmtree(data / "index")


def fill_index_with_noise(data: Path) -> None:
    path = data / "index" / "data.mdb"
    path.write_bytes(b"\xa5" * path.stat().st_size)


def zero_index(data: Path) -> None:
    path = data / "index" / "data.mdb"
    path.write_bytes(bytes(path.stat().st_size))


def cut_index(data: Path) -> None:
    with (data / "index" / "data.mdb").open("r+b") as file:
        file.truncate(2 * PAGE)


def empty_index(data: Path) -> None:
    (data / "index" / "data.mdb").write_bytes(b"")


@pytest.mark.parametrize(
    "damage",
    [remove_index, fill_index_with_noise, zero_index, cut_index, empty_index],
    ids=lambda damage: damage.__name__,
)
def test_a_lost_index_is_made_again_from_the_frames(
    disk: Disk, damage: Callable[[Path], None]
) -> None:
    with disk.start() as engine:
        engine.handle.delete(disk.other, 0)
        with Engine(disk.daemon, model="cleared") as cleared:
            gone = cleared.durable(1, BLOCKS)
            cleared.handle.clear()
    disk.daemon.kill()
    damage(disk.daemon.data_dir)
    with disk.start() as engine, Engine(disk.daemon, model="cleared") as cleared:
        assert engine.loads_whole(disk.hurt).from_nvme == BLOCKS
        assert cleared.load(gone).blocks == 0, "a clear outlives the index"
        assert cleared.durable(1, BLOCKS).joined == gone.joined
        tree: Any = disk.daemon.stat()
        assert tree["nvme"]["index_damage"], "said so"
    assert findings(disk.daemon, payloads=True) == []
    assert_books(disk.daemon)


@pytest.mark.parametrize("same_life", [True, False], ids=["of this life", "of an earlier life"])
def test_an_index_of_an_earlier_day_serves_nothing_wrong(disk: Disk, same_life: bool) -> None:
    """IDX-10: records that point where other blocks lie by now."""
    data = disk.daemon.data_dir
    with disk.start() as engine:
        engine.loads_whole(disk.hurt)
        if same_life:
            shutil.copytree(data / "index", data.parent / "older")
        else:
            disk.daemon.kill()
            shutil.copytree(data / "index", data.parent / "older")
            boot_id = engine.client.boot_id
            disk.daemon.start()
            engine.wait_new_life(boot_id)
        engine.handle.delete(disk.hurt, 0)
        chains = [engine.durable(number, BLOCKS) for number in range(10, 16)]
    disk.daemon.kill()
    shutil.rmtree(data / "index")
    (data.parent / "older").rename(data / "index")
    with disk.start() as engine:
        for chain in (disk.hurt, disk.other, *chains):
            engine.load(chain)
        for number in (30, 31):
            engine.loads_whole(engine.durable(number, BLOCKS))
    assert_books_but_for_findings(disk.daemon)


def test_segments_of_an_earlier_day_serve_nothing_wrong(disk: Disk) -> None:
    data = disk.daemon.data_dir
    shutil.copytree(data / "segments", data.parent / "older")
    with disk.start() as engine:
        engine.handle.delete(disk.hurt, 0)
        chains = [engine.durable(number, BLOCKS) for number in range(10, 14)]
    disk.daemon.kill()
    for path in (data.parent / "older").iterdir():
        shutil.copyfile(path, data / "segments" / path.name)
    with disk.start() as engine:
        assert engine.load(disk.hurt).blocks == 0, "deleted, although its bytes are back"
        engine.loads_whole(disk.other)
        for chain in chains:
            engine.load(chain)
    assert_books_but_for_findings(disk.daemon)


def test_damage_under_a_running_daemon(disk: Disk) -> None:
    with disk.start() as engine:
        flip(disk)
        assert engine.load(disk.hurt).blocks == 5
        engine.loads_whole(disk.other)
    assert_books(disk.daemon)
