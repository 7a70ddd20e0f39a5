"""Whether an index directory may be opened: one owner, whole pages, nothing that would kill us.

Damage in a memory-mapped file can end the process with a signal, at every start again. So a file
that is too short is refused before its pages are touched, and after a start that died inside the
index its pages are walked without LMDB first.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.index.records import IndexDamaged

if TYPE_CHECKING:
    import lmdb

OWNER_FILE = "owner.lock"
OPENING_FILE = "opening"
"""Exists from before LMDB opens the files until they were read whole once."""
DATA_FILE = "data.mdb"


def own(path: Path) -> int:
    """Take the lock file of the index directory; the descriptor holds it. Raises ConfigError naming
    the owner.
    """
    fd = os.open(path / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise ConfigError(
            f"{path}: the index is open in process {owner} already; stop that daemon or set "
            "another daemon.data_dir"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def verify_after_crash(path: Path) -> None:
    """When an earlier start ended inside the index, walk its pages without LMDB first: damage there
    can kill us.
    """
    data = path / DATA_FILE
    if not (path / OPENING_FILE).exists() or not data.exists():
        return
    from lmdb import verify

    try:
        findings = verify.verify(str(data))  # type: ignore[no-untyped-call]
    except (verify.VerifyError, OSError) as error:
        raise IndexDamaged(f"{data}: {error}") from error
    if findings:
        raise IndexDamaged(f"{data}: {findings[0]} ({len(findings)} findings)")


def check_length(path: Path, environment: lmdb.Environment) -> None:
    """A shortened file is refused before a page past its end is touched: that would be a SIGBUS."""
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    found = (path / DATA_FILE).stat().st_size
    if found < needed:
        raise IndexDamaged(f"{path / DATA_FILE}: {found} bytes, its pages need {needed}")
