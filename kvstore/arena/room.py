"""How many bytes can still be reserved: file system, machine, control groups. Reads, never takes.

`rooms(directory)` lists every limit with what it leaves; the least of them is the answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 62
"""Version 1 control groups write "no limit" as a number beyond this."""


@dataclass(frozen=True)
class Room:
    """Bytes that one limit leaves, and its name for people."""

    bytes_available: int
    where: str


@dataclass(frozen=True)
class _Files:
    """Names of the memory controller's files in one version of control groups."""

    limit: str
    usage: str
    cached: tuple[str, str]
    """Entries of memory.stat that are given back under pressure."""


_VERSION_1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_VERSION_2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))


def rooms(directory: Path, proc: Path = Path("/proc")) -> list[Room]:
    """Every limit on new bytes in files of `directory`."""
    found = list(_control_groups(proc))
    found += _machine(proc)
    status = os.statvfs(directory)
    if status.f_blocks:
        where = f"the file system of {directory}"
        found.append(Room(status.f_bavail * status.f_frsize, where))
    return found


def _machine(proc: Path) -> Iterator[Room]:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            yield Room(int(line.split()[1]) * 1024, "this machine's memory")


def _control_groups(proc: Path) -> Iterator[Room]:
    for files, mount, group in _memory_groups(proc):
        while True:
            room = _room_of(group, files)
            if room is not None:
                yield room
            if group == mount:
                break
            group = group.parent


def _memory_groups(proc: Path) -> Iterator[tuple[_Files, Path, Path]]:
    """(files, mount point, this process's directory) for each hierarchy that can limit memory."""
    paths = {}
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    for line in (proc / "self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        root, point = mount.split()[3:5]
        kind_name, _, options = kind.split(" ", 2)
        if kind_name == "cgroup2":
            files, controller = _VERSION_2, ""
        elif kind_name == "cgroup" and "memory" in options.split(","):
            files, controller = _VERSION_1, "memory"
        else:
            continue
        if controller in paths:
            yield files, Path(point), _below(Path(point), root, paths[controller])


def _below(mount: Path, root: str, path: str) -> Path:
    """Where `path` is seen under a mount of `root`: at the mount itself if it is not below it."""
    if not Path(path).is_relative_to(root) or ".." in Path(path).parts:
        return mount
    return mount / Path(path).relative_to(root)


def _room_of(group: Path, files: _Files) -> Room | None:
    try:
        text = (group / files.limit).read_text().strip()
        if text == "max" or int(text) >= _UNLIMITED:
            return None
        usage = int((group / files.usage).read_text())
        statistics = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return None  # the hierarchy's root, or a group that this process may not see, has no limit
    pairs = (line.split() for line in statistics)
    held = usage - sum(int(value) for name, value in pairs if name in files.cached)
    limit = int(text)
    where = f"the memory limit of control group {group} ({limit} bytes, {held} in use)"
    return Room(max(limit - held, 0), where)
