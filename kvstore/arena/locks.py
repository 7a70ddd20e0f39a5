"""Kernel locks on files: one daemon an arena, and proof that a client process lives or is gone.

A lock belongs to an open file, so it ends with the last process that holds that open, however the
process ends. No lock is ever waited for.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from kvstore.arena.names import CLIENTS, LOCK, is_client_name
from kvstore.errors import ConfigError, InvalidRequest, PeerGone

_TRIES = 16


def _try_lock(fd: int, path: Path) -> bool:
    """Lock `fd` if nobody else has, and if `path` still names that very file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), path.lstat())
    except (BlockingIOError, FileNotFoundError):
        return False


def lock_directory(directory: Path) -> int:
    """Make `directory` if need be, and lock it; returns the descriptor that holds the lock.

    Raises ConfigError when another process owns it, naming that process; OSError as it comes.
    """
    path = directory / LOCK
    owner = ""
    for _ in range(_TRIES):  # an owner that leaves removes file and directory under our hands
        with suppress(FileExistsError):
            directory.mkdir(0o700)
        with suppress(FileNotFoundError):
            _refuse_foreign(directory)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            if _try_lock(fd, path):
                return fd
            owner = os.pread(fd, 20, 0).decode(errors="replace")
            os.close(fd)
    raise ConfigError(
        f"host.directory: {directory} belongs to a running daemon, process {owner or 'unknown'};"
        " stop that one, or give this one another daemon.name"
    )


def _refuse_foreign(directory: Path) -> None:
    """The parent is open to everybody: files of these names may be a trap."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(
            f"host.directory: {directory} is not a directory of user {os.geteuid()}; remove it, or"
            " use another daemon.name"
        )


def sign(lock_fd: int) -> None:
    """Write into the lock file who holds it, for the message above."""
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, str(os.getpid()).encode(), 0)


def client_path(directory: Path, name: str) -> Path:
    """Path of a client's lock file; raises InvalidRequest for anything but such a name."""
    if not is_client_name(name):
        raise InvalidRequest(f"lock file {name!r}: must look like <pid>-<16 hex digits>.lock")
    return directory / CLIENTS / name


def is_gone(directory: Path, name: str) -> bool:
    """Whether the client that made lock file `name` is gone; the file is removed then.

    Never known of a file that may not be opened: its client counts as living.
    """
    path = client_path(directory, name)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if not _try_lock(fd, path):
            return False
        path.unlink()
        return True
    finally:
        os.close(fd)


def living_clients(directory: Path) -> set[str]:
    """Names of the lock files that are held; those of dead clients are removed."""
    names = {name for name in os.listdir(directory / CLIENTS) if is_client_name(name)}
    return {name for name in names if not is_gone(directory, name)}


class ClientLock:
    """Held by a client process while it may touch the arena; its `name` goes to the daemon."""

    def __init__(self, path: Path, fd: int) -> None:
        self.name = path.name
        self._path = path
        self._fd = fd
        self._pid = os.getpid()

    @classmethod
    def create(cls, directory: Path) -> ClientLock:
        """Make and lock a file of this process below the arena's `directory`.

        Raises OSError as it comes: FileNotFoundError when no arena is there.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(_TRIES):  # a daemon that starts may take a file that is not locked yet
            path = client_path(directory, f"{os.getpid()}-{secrets.token_hex(8)}.lock")
            fd = os.open(path, flags, 0o640)
            os.fchmod(fd, 0o640)  # whatever the umask: the daemon must be able to open it
            if _try_lock(fd, path):
                return cls(path, fd)
            os.close(fd)
        raise PeerGone(f"arena: a daemon is taking over {directory}; attach again later")

    def close(self) -> None:
        """Remove the file and end the lock; idempotent. A forked child only drops its copy."""
        if self._fd < 0:
            return
        if self._pid == os.getpid():
            self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1
