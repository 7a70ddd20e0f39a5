"""The daemon's side of the arena: reserves every byte or refuses, takes over what is dead."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from arena_kit import (
    HEADER,
    MIB,
    REGION,
    child,
    create,
    killed_daemon,
    listing,
    mapped_bytes,
    small_mount,
    used_bytes,
)

from kvstore.arena import Arena, ArenaView, ClientLock
from kvstore.arena.owner import COLLAPSE_STEP_BYTES
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.types import HUGE_PAGE_BYTES


@pytest.fixture
def place() -> Iterator[Path]:
    """Where an arena's directory may be made, in shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvstore-test-") as scratch:
        yield Path(scratch)


@pytest.fixture
def directory(place: Path) -> Path:
    return place / "arena"


# -------------------------------------------------------------------- what is reserved


def test_regions_are_views_of_named_files(directory: Path) -> None:
    arena = create(directory)
    assert listing(directory) == {"LOCK", "clients", "header", "region-0000", "region-0001"}
    assert [len(region) for region in arena.regions] == [REGION, REGION]
    assert len(arena.header) == HEADER
    arena.view(REGION + 10, 4)[:] = [1, 2, 3, 4]
    assert (directory / "region-0001").read_bytes()[8:16] == bytes([0, 0, 1, 2, 3, 4, 0, 0])
    for mapping in (arena.header, *arena.regions):
        assert mapping.array.ctypes.data % HUGE_PAGE_BYTES == 0
        assert mapping.array.flags.writeable
    arena.close()


@pytest.mark.parametrize(
    ("offset", "length"), [(REGION - 1, 2), (2 * REGION, 1), (-1, 1), (0, REGION + 1), (8, -1)]
)
def test_a_view_lies_in_one_region(directory: Path, offset: int, length: int) -> None:
    arena = create(directory)
    with pytest.raises(InvalidRequest, match="does not lie in one of 2 regions"):
        arena.view(offset, length)
    arena.close()


@pytest.mark.parametrize("units", [5, 9, 17])
def test_memory_taken_is_what_was_asked_for(directory: Path, units: int) -> None:
    """HOST-18: also for sizes that are no power of two; the last region is shorter."""
    asked = units * MIB
    arena = create(directory, total=asked)
    assert asked <= used_bytes(directory) <= 1.05 * asked
    assert sum(len(region) for region in arena.regions) == arena.statistics().bytes_total == asked
    arena.close()


@pytest.mark.parametrize(
    ("total", "region", "key"),
    [(0, REGION, "bytes"), (REGION + 1, REGION, "bytes"), (REGION, MIB, "region_bytes")],
)
def test_odd_sizes_are_refused_by_name(directory: Path, total: int, region: int, key: str) -> None:
    with pytest.raises(ConfigError, match=f"host.{key}="):
        create(directory, total=total, region=region)
    assert not directory.exists()


def test_too_small_a_file_system_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """HOST-1"""
    with small_mount(tmp_path / "shm", MIB) as mount:
        with pytest.raises(ConfigError) as refused:
            create(mount / "arena", total=4 * MIB)
        assert f"needed {4 * MIB + HEADER} bytes" in str(refused.value)
        assert f"available {MIB - 4096} in the file system" in str(refused.value)  # LOCK has a page
        assert "lower host.bytes" in str(refused.value)
        assert listing(mount) == set()


def test_every_byte_is_there_before_it_is_touched(tmp_path: Path) -> None:
    """HOST-1: no touch ends in a bus error, also when others then fill the file system."""
    with small_mount(tmp_path / "shm", 9 * MIB) as mount:
        arena = create(mount / "arena")
        with pytest.raises(OSError, match="No space left"), (mount / "other").open("wb") as other:
            other.write(bytes(2 * MIB))
        for mapping in (arena.header, *arena.regions):
            mapping.array[:] = 1
        arena.close()


def test_an_allocation_that_fails_after_all_leaves_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        ConfigError, match=rf"cannot reserve {2 * REGION + HEADER} bytes .*No space"
    ):
        create(directory)
    assert not directory.exists()
    monkeypatch.undo()
    create(directory).close()


def test_a_full_file_system_is_refused_and_the_lock_let_go(tmp_path: Path) -> None:
    with small_mount(tmp_path / "shm", MIB) as mount:
        with pytest.raises(OSError, match="No space left"), (mount / "other").open("wb") as other:
            other.write(bytes(2 * MIB))
        for _ in range(2):
            with pytest.raises(ConfigError, match="No space left"):
                create(mount / "arena")
        assert listing(mount) == {"other"}


# -------------------------------------------------------------------- one owner


def test_a_second_daemon_is_refused_and_harms_nobody(directory: Path) -> None:
    arena = create(directory)
    arena.regions[0].array[:] = 3
    with pytest.raises(ConfigError, match=f"process {os.getpid()};"):
        create(directory)
    ended = child("create(1 << 22, 1 << 22)", directory)
    assert "ConfigError" in ended.stderr
    assert (ArenaView.attach(directory, REGION, 2).read_view(0, REGION) == 3).all()
    arena.close()
    create(directory).close()


def test_a_directory_of_somebody_else_is_refused(place: Path) -> None:
    (place / "real").mkdir()
    (place / "real" / "region-0000").write_bytes(b"mine")
    (place / "trap").symlink_to("real")
    (place / "file").touch()
    for name in ("trap", "file"):
        with pytest.raises(ConfigError, match="is not a directory of user"):
            create(place / name)
    if os.geteuid() == 0:
        os.chown(place / "real", 12345, -1)
        with pytest.raises(ConfigError, match="is not a directory of user"):
            create(place / "real")
    assert (place / "real" / "region-0000").read_bytes() == b"mine"


def test_files_are_private_unless_a_group_is_named(directory: Path) -> None:
    def mode(name: str) -> int:
        return stat.S_IMODE((directory / name).stat().st_mode)

    arena = create(directory)
    assert [mode(name) for name in (".", "clients", "header", "region-0000", "LOCK")] == (
        [0o700, 0o700, 0o600, 0o600, 0o600]
    )
    arena.close()
    arena = create(directory, mode=0o660, gid=os.getgid())
    assert [mode(name) for name in (".", "clients", "header", "region-0000", "LOCK")] == (
        [0o750, 0o2770, 0o640, 0o660, 0o600]
    )
    arena.close()


# -------------------------------------------------------------------- taking over


def test_a_start_after_a_kill_fits_into_the_same_memory(tmp_path: Path) -> None:
    """HOST-3, HOST-2: a mount for one tier plus 5 %, killed again and again."""
    with small_mount(tmp_path / "shm", int(1.05 * 2 * REGION)) as mount:
        directory = mount / "arena"
        for _ in range(3):
            killed_daemon(directory)
            assert used_bytes(directory) <= 1.05 * 2 * REGION
        arena = create(directory)
        assert arena.statistics().regions_reused == 2
        assert not arena.header.array.any()
        arena.close()
        assert listing(mount) == set()


@pytest.mark.parametrize(("old", "new"), [(REGION, 2 * REGION), (2 * REGION, REGION)])
def test_regions_of_another_size_make_room_first(tmp_path: Path, old: int, new: int) -> None:
    with small_mount(tmp_path / "shm", int(1.05 * 2 * REGION)) as mount:
        killed_daemon(mount / "arena", region=old)
        arena = create(mount / "arena", region=new)
        assert arena.statistics().regions_reused == 0
        files = sorted(path.name for path in (mount / "arena").glob("region-*"))
        assert files == [f"region-{number:04}" for number in range(2 * REGION // new)]
        assert all((mount / "arena" / name).stat().st_size == new for name in files)
        arena.close()


def test_a_sparse_or_shared_file_is_not_used_again(directory: Path) -> None:
    create(directory).close(unlink=False)
    (directory / "region-0000").unlink()
    with (directory / "region-0000").open("wb") as sparse:
        sparse.truncate(REGION)
    os.link(directory / "region-0001", directory / "kept")
    arena = create(directory)
    assert arena.statistics().regions_reused == 0
    assert used_bytes(directory / "region-0000") == 0  # not a directory: nothing below it
    assert 512 * (directory / "region-0000").stat().st_blocks == REGION
    arena.close()


def test_the_last_life_is_void_before_memory_is_used_again(directory: Path) -> None:
    killed_daemon(directory)
    view = ArenaView.attach(directory, REGION, 2)
    assert (view.header == 7).all()
    arena = create(directory)
    assert not view.header[:4096].any()
    assert (view.header[4096:] == 7).all()
    arena.header.array[:] = 9
    assert not view.header[:4096].any()  # the new header is another file
    arena.close()


def test_only_dead_files_of_this_instance_are_removed(place: Path) -> None:
    """HOST-4"""
    ours, live = place / "ours", create(place / "other")
    killed_daemon(ours, total=3 * REGION)
    (ours / "header.new").write_bytes(bytes([7]) * HEADER)
    (ours / "header.1234").write_bytes(b"unfinished")
    dead = ours / "clients" / "123-0123456789abcdef.lock"
    dead.touch()
    foreign = [
        place / "foreign",
        ours / "notes.txt",
        ours / "region-1",
        ours / "clients" / "x.lock",
    ]
    for path in foreign:
        path.write_bytes(b"not ours")
    arena = create(ours)
    assert listing(ours) == (
        {"LOCK", "clients", "header", "region-0000", "region-0001", "notes.txt", "region-1"}
    )
    assert not dead.exists()
    assert not arena.header.array.any()
    arena.close()
    assert listing(ours) == {"clients", "notes.txt", "region-1"}
    assert all(path.read_bytes() == b"not ours" for path in foreign)
    live.view(0, 1)[:] = 1
    assert listing(place / "other") == {"LOCK", "clients", "header", "region-0000", "region-0001"}
    live.close()


# -------------------------------------------------------------------- clients of the last daemon


def test_regions_wait_for_clients_that_still_live(directory: Path) -> None:
    killed_daemon(directory)
    lock, other = ClientLock.create(directory), ClientLock.create(directory)
    arena = create(directory, total=3 * REGION)
    assert arena._waited_for == {lock.name, other.name}
    assert arena.quarantined_regions
    assert arena.quarantined_regions == (0, 1)  # the third one is new
    assert not arena.recheck_clients()
    arena.acknowledge_client(lock.name)
    assert arena._waited_for == {other.name}
    other.close()
    assert arena.recheck_clients()
    assert not arena.quarantined_regions
    assert arena.quarantined_regions == ()
    arena.close()
    lock.close()


def test_a_client_that_dies_is_waited_for_no_more(directory: Path) -> None:
    killed_daemon(directory)
    lock = ClientLock.create(directory)
    arena = create(directory)
    assert not arena.client_gone(lock.name)
    assert arena.quarantined_regions
    lock.close()
    assert arena.client_gone(lock.name)
    assert not arena.quarantined_regions
    arena.close()


def test_new_regions_wait_for_nobody(directory: Path) -> None:
    killed_daemon(directory)
    lock = ClientLock.create(directory)
    arena = create(directory, total=2 * REGION, region=2 * REGION)
    assert not arena.quarantined_regions
    assert arena.recheck_clients()
    arena.close()
    lock.close()


def test_a_living_client_is_known_to_the_daemon_after_next(directory: Path) -> None:
    arena = create(directory)
    lock = ClientLock.create(directory)
    arena.close()
    assert listing(directory / "clients") == {lock.name}
    arena = create(directory)
    assert not arena.client_gone(lock.name)
    lock.close()
    arena.close()
    assert not directory.exists()


# -------------------------------------------------------------------- huge pages and the end


def test_huge_pages_come_step_by_step_and_change_no_byte(directory: Path) -> None:
    arena = create(directory, total=40 * MIB, region=36 * MIB, header=2 * MIB)
    colours = np.arange(36 * MIB, dtype=np.uint8)
    arena.regions[0].array[:] = colours
    progress = [0]
    while arena.collapse_next():
        progress.append(arena.collapsed_bytes)
    assert not arena.collapse_next()
    statistics = arena.statistics()
    if statistics.collapse_refused:
        pytest.skip(f"NOT TESTED: this kernel gives no huge pages: {statistics.collapse_refused}")
    assert statistics.collapsed_bytes == 40 * MIB  # of the regions; the header has its own
    assert max(np.diff(progress)) == COLLAPSE_STEP_BYTES
    assert (arena.regions[0].array == colours).all()
    arena.close()


def test_a_refusal_of_huge_pages_is_told_and_survived(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = create(directory)
    monkeypatch.setattr("kvstore.arena.mapping._MADV_COLLAPSE", 12345)
    while arena.collapse_next():
        pass
    assert arena.statistics().collapse_refused == "Invalid argument"
    assert arena.statistics().collapsed_bytes == 0
    arena.close()
    assert not arena.collapse_next()


def test_close_lets_views_live_and_memory_go_with_the_last(directory: Path) -> None:
    """HOST-8"""
    arena = create(directory)
    views = [arena.view(0, 10), arena.regions[1].array[5:], arena.header.array]
    views[0][:] = 1
    before = mapped_bytes(directory)
    assert before == 2 * REGION + HEADER
    arena.close()
    arena.close()
    assert not directory.exists()
    assert mapped_bytes(directory) == before
    assert (views[0] == 1).all()
    del views[0]
    assert mapped_bytes(directory) == before - REGION
    views.clear()
    assert mapped_bytes(directory) == 0
    with pytest.raises(InvalidRequest):
        arena.view(0, 1)
    with pytest.raises(InvalidRequest, match="closed"):
        _ = arena.header


def test_close_survives_what_somebody_removed(directory: Path) -> None:
    arena = create(directory)
    for path in directory.rglob("*"):
        if path.is_file():
            path.unlink()
    (directory / "clients").rmdir()
    directory.rmdir()
    arena.close()
    assert arena.regions == ()


def test_keeping_the_files_keeps_the_bytes(directory: Path) -> None:
    arena = create(directory)
    arena.view(5, 1)[:] = 200
    arena.close(unlink=False)
    arena = create(directory)
    assert arena.view(5, 1)[0] == 200
    assert isinstance(arena, Arena)
    arena.close()
