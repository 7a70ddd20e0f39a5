"""Files that a process owns while it lives: its lock, its socket.

Primitives: `FileLock`, `remove_stale_socket`, `why_silent`, `share`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
from pathlib import Path

from kvstore.errors import ConfigError

PROBE_SECONDS_MAX = 1.0


class FileLock:
    """An exclusive kernel lock on a file that says who holds it; gone with the process."""

    def __init__(
        self,
        path: Path,
        facts: dict[str, object],
        setting: str = "daemon.data_dir and daemon.socket",
    ) -> None:
        """Raises ConfigError naming the owner, and `setting`, when another process holds it."""
        self._setting = setting
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self._fd = self._lock()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(facts).encode(), 0)

    def _lock(self) -> int:
        """A locked descriptor of the file that is at the path now: who ends removes it."""
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(self._path)):
                    return fd
            except FileNotFoundError:
                pass
            except BlockingIOError:
                owner = os.pread(fd, 4096, 0).decode(errors="replace").strip()
                os.close(fd)
                raise ConfigError(
                    f"{self._path} is held by another process ({owner or 'starting'}); "
                    f"stop it, or choose another {self._setting}"
                ) from None
            os.close(fd)

    def close(self) -> None:
        """Remove the file and end the lock."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def remove_stale_socket(path: Path, setting: str = "daemon.socket") -> None:
    """A dead owner's socket goes; raises ConfigError, naming `setting`, for anything else there.

    The caller holds the lock beside it.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{setting}={path} is there and no socket; choose another place")
        error = why_silent(path)
        if isinstance(error, ConnectionRefusedError):
            path.unlink()
            return
        if error is not None:
            raise ConfigError(
                f"{setting}={path} is another program's ({error}); choose another place"
            ) from error
        raise ConfigError(f"{setting}={path}: another program listens; choose another place")


def why_silent(path: Path) -> OSError | None:
    """Why nobody can be reached at a Unix socket; None when somebody listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_SECONDS_MAX)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error
    return None


def share(path: Path, gid: int, mode: int) -> None:
    """Let a group use what is ours. Raises ConfigError where this user may not give it away."""
    try:
        os.chown(path, -1, gid)
        os.chmod(path, mode)
    except PermissionError as error:
        raise ConfigError(
            f"host.group: {path} cannot be given to group {gid} ({error.strerror}); "
            "make the daemon's user a member of it"
        ) from error
