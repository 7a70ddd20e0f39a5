"""Scratch places in shared memory, and child processes that use an arena and end in some way."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.arena import Arena

MIB = 1 << 20
REGION = 4 * MIB
HEADER = 64 << 10
CHILD_SECONDS_MAX = 30


def create(
    directory: Path,
    total: int = 2 * REGION,
    region: int = REGION,
    header: int = HEADER,
    **more: object,
) -> Arena:
    return Arena.create(
        directory, bytes_total=total, region_bytes=region, header_bytes=header, **more
    )


def child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter; `path` is its first argument, `create` this module's."""
    prelude = """
        import os, resource, signal, sys, threading, time
        from pathlib import Path
        import numpy as np
        from kvstore.arena import Arena, ArenaView, ClientLock
        from kvstore.errors import KVStoreError
        path = Path(sys.argv[1])
        def create(total, region, header=64 << 10):
            return Arena.create(path, bytes_total=total, region_bytes=region, header_bytes=header)
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code)]
        + [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS_MAX,
        check=False,
    )


def killed_daemon(directory: Path, total: int = 2 * REGION, region: int = REGION) -> None:
    """Leave what a daemon leaves that is killed while it serves: every byte coloured 7."""
    ended = child(
        """
        arena = create(int(sys.argv[2]), int(sys.argv[3]))
        arena.header.array[:] = 7
        for region in arena.regions:
            region.array[:] = 7
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        directory,
        total,
        region,
    )
    assert ended.returncode == -9, ended.stderr


def mapped_bytes(path: Path) -> int:
    """Bytes of this process's address space over files below `path`, removed ones too."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(path) in line:
            start, _, stop = line.split()[0].partition("-")
            total += int(stop, 16) - int(start, 16)
    return total


def used_bytes(path: Path) -> int:
    """Bytes that the files below `path` take."""
    return sum(512 * file.lstat().st_blocks for file in path.rglob("*"))


@contextmanager
def small_mount(path: Path, size: int) -> Iterator[Path]:
    """A tmpfs of `size` bytes at `path`; skips the test where this user may not mount."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"NOT TESTED: needs the right to mount a tmpfs ({mounted.stderr.strip()})")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def listing(path: Path) -> set[str]:
    return set(os.listdir(path))
