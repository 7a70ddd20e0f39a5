"""Limits on memory: each is found, counted as the kernel does, and named in a refusal (HOST-19)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from arena_kit import MIB, REGION, child, create

from kvstore.arena import owner
from kvstore.arena.room import rooms
from kvstore.errors import ConfigError
from kvstore.types import PAGE_BYTES

TIER = 64 * MIB
HUGE = 9223372036854771712


class Machine:
    """A /proc and control groups made of plain files."""

    def __init__(self, path: Path) -> None:
        self.proc = path / "proc"
        self.groups = path / "groups"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8388608 kB\n")
        self._cgroup: list[str] = []
        self._mounts = ["25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw"]
        self._write()

    def _write(self) -> None:
        (self.proc / "self/cgroup").write_text("\n".join(self._cgroup) + "\n" * bool(self._cgroup))
        (self.proc / "self/mountinfo").write_text("\n".join(self._mounts) + "\n")

    def version_1(self, path: str, root: str = "/") -> Path:
        """Mount the memory hierarchy and join group `path`; returns its mount."""
        self._cgroup += ["5:cpu,cpuacct:/elsewhere", f"4:memory:{path}"]
        mount = self.groups / "memory"
        self._mounts.append(f"35 31 0:32 {root} {mount} rw shared:9 - cgroup cgroup rw,memory")
        self._mounts.append(f"36 31 0:33 / {self.groups}/cpu rw - cgroup cgroup rw,cpu,cpuacct")
        self._write()
        return mount

    def version_2(self, path: str, root: str = "/") -> Path:
        self._cgroup.append(f"0::{path}")
        mount = self.groups / "unified"
        self._mounts.append(f"41 31 0:38 {root} {mount} rw - cgroup2 cgroup2 rw,nsdelegate")
        self._write()
        return mount

    def rooms(self) -> dict[str, int]:
        """Bytes available, by the control group that limits them."""
        found = rooms(Path("/dev/shm"), self.proc)
        return {
            room.where.split()[6]: room.bytes_available
            for room in found
            if "control group" in room.where
        }


def group_1(path: Path, limit: int, usage: int = 0, cached: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (path / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (path / "memory.stat").write_text(
        f"cache 1\ninactive_file 7\ntotal_inactive_file {cached}\ntotal_active_file 0\n"
    )


def group_2(path: Path, limit: str, usage: int = 0, cached: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{usage}\n")
    (path / "memory.stat").write_text(f"anon 5\ninactive_file 0\nactive_file {cached}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvstore-test-") as scratch:
        yield Path(scratch) / "arena"


# -------------------------------------------------------------------- finding limits


def test_without_control_groups_machine_and_file_system_limit(machine: Machine) -> None:
    found = rooms(Path("/dev/shm"), machine.proc)
    assert [room.where for room in found] == [
        "this machine's memory",
        "the file system of /dev/shm",
    ]
    assert found[0].bytes_available == 8388608 * 1024
    status = os.statvfs("/dev/shm")
    assert 0 < found[1].bytes_available <= status.f_blocks * status.f_frsize


def test_a_file_system_without_a_size_limits_nothing(machine: Machine) -> None:
    assert [room.where for room in rooms(Path("/proc"), machine.proc)] == ["this machine's memory"]


def test_version_1_counts_every_level_and_not_its_caches(machine: Machine) -> None:
    mount = machine.version_1("/a/b")
    group_1(mount, HUGE)
    group_1(mount / "a", 1000, usage=700, cached=300)
    group_1(mount / "a/b", 900, usage=100)
    assert machine.rooms() == {str(mount / "a"): 600, str(mount / "a/b"): 800}


def test_version_2_counts_every_level_and_not_its_caches(machine: Machine) -> None:
    mount = machine.version_2("/x.slice/y.scope")
    group_2(mount / "x.slice", "5000", usage=4000, cached=500)
    group_2(mount / "x.slice/y.scope", "max")
    assert machine.rooms() == {str(mount / "x.slice"): 1500}


def test_both_versions_at_once_both_count(machine: Machine) -> None:
    old, new = machine.version_1("/old"), machine.version_2("/new")
    group_1(old / "old", 10)
    group_2(new / "new", "20")
    assert machine.rooms() == {str(old / "old"): 10, str(new / "new"): 20}


def test_a_container_sees_its_group_at_the_mount(machine: Machine) -> None:
    mount = machine.version_2("/docker/abc", root="/docker/abc")
    group_2(mount, "4096")
    assert machine.rooms() == {str(mount): 4096}


def test_a_group_below_what_is_mounted_is_found_there(machine: Machine) -> None:
    mount = machine.version_2("/docker/abc/worker", root="/docker/abc")
    group_2(mount / "worker", "4096")
    assert machine.rooms() == {str(mount / "worker"): 4096}


def test_a_group_outside_what_is_mounted_is_looked_for_at_the_mount(machine: Machine) -> None:
    mount = machine.version_1("/../host/group", root="/docker/abc")
    group_1(mount, 2048)
    assert machine.rooms() == {str(mount): 2048}


def test_a_group_past_its_limit_leaves_nothing(machine: Machine) -> None:
    mount = machine.version_2("/g")
    group_2(mount / "g", "100", usage=300)
    assert machine.rooms() == {str(mount / "g"): 0}


def test_the_real_machine_has_limits() -> None:
    found = rooms(Path("/dev/shm"))
    assert {"this machine's memory", "the file system of /dev/shm"} <= {x.where for x in found}
    assert all(room.bytes_available > 0 for room in found)


# -------------------------------------------------------------------- refusing


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_too_small_for_the_tier_is_refused_by_name(
    machine: Machine, directory: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = 2 * REGION
    monkeypatch.setattr(owner, "rooms", lambda path: rooms(path, machine.proc))
    mount = machine.version_1("/g") if version == 1 else machine.version_2("/g")

    def limit(share: float) -> int:
        most = int(share * tier)
        if version == 1:
            group_1(mount / "g", most, usage=MIB)
        else:
            group_2(mount / "g", str(most), usage=MIB)
        return most

    limit(1.2)
    create(directory).close()
    most = limit(0.8)
    with pytest.raises(ConfigError) as refused:
        create(directory)
    for part in (f"host.bytes={tier}", f"available {most - MIB}", f"{most} bytes", f"{MIB} in use"):
        assert part in str(refused.value)
    assert str(mount / "g") in str(refused.value)
    assert not directory.exists()


def test_a_machine_without_memory_is_refused(
    machine: Machine, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "rooms", lambda path: rooms(path, machine.proc))
    (machine.proc / "meminfo").write_text("MemAvailable: 1024 kB\n")
    with pytest.raises(ConfigError, match=f"available {MIB} in this machine's memory"):
        create(directory)


@pytest.fixture
def real_group() -> Iterator[tuple[Path, str]]:
    """A new memory control group and the name of its limit file."""
    for parent, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = parent / f"kvstore-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                yield group, limit
                return
        finally:
            group.rmdir()
    pytest.skip("NOT TESTED: needs the right to make a memory control group under /sys/fs/cgroup")


@pytest.mark.parametrize(("share", "starts"), [(1.2, True), (0.8, False)])
def test_a_real_group_lets_the_tier_start_or_refuses_it(
    real_group: tuple[Path, str], directory: Path, share: float, starts: bool
) -> None:
    group, limit = real_group
    most = int(share * TIER) // PAGE_BYTES * PAGE_BYTES
    (group / limit).write_text(str(most))
    ended = child(
        """
Path(sys.argv[3], "cgroup.procs").write_text(str(os.getpid()))
try:
    arena = create(int(sys.argv[2]), 16 << 20)
except KVStoreError as error:
    print(error)
else:
    for region in arena.regions:
        region.array[:] = 1
    arena.close()
    print("started")
Path(sys.argv[3]).parent.joinpath("cgroup.procs").write_text(str(os.getpid()))
""",
        directory,
        TIER,
        group,
    )
    if starts:
        assert ended.stdout == "started\n", ended.stderr
    else:
        assert f"host.bytes={TIER}: needed" in ended.stdout, ended.stderr
        assert f"{most} bytes" in ended.stdout
        assert str(group) in ended.stdout
