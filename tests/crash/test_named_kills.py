"""SIGKILL at moments that can be named by what they leave on the disk: nothing is asked of the
product but its files.

A `Moment` is seen from outside, by polling; the kill follows at once, or a little later, so that
several places around it are hit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.errors import KVStoreError
from tests.conftest import DaemonProcess
from tests.crash.crew import Crew, crew
from tests.e2e.kit import Engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SECONDS_MAX = 60.0
DELAYS = (0.0, 0.004)
Moment = Callable[[DaemonProcess], Callable[[], object]]
"""Given a daemon as it is now: a test that says when the moment has come."""


def changed(path_of: Callable[[DaemonProcess], Path], times: int = 1) -> Moment:
    """A file was written, made or replaced `times` more times."""

    def since(daemon: DaemonProcess) -> Callable[[], object]:
        path = path_of(daemon)
        seen = [_stamp(path), 0]

        def is_now() -> bool:
            stamp = _stamp(path)
            if stamp is not None and stamp != seen[0]:
                seen[:] = [stamp, seen[1] + 1]
            return bool(seen[1] >= times)

        return is_now

    return since


def _stamp(path: Path) -> object:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def there(path_of: Callable[[DaemonProcess], Path]) -> Moment:
    """A file exists that lives for a moment only."""
    return lambda daemon: path_of(daemon).exists


INDEX_DATA = changed(lambda daemon: daemon.data_dir / "index" / "data.mdb", times=3)
AT_WORK: dict[str, Moment] = {
    "a segment is made": changed(lambda daemon: daemon.data_dir / "segments"),
    "records are committed": INDEX_DATA,
    "a clear is made durable": changed(lambda daemon: daemon.data_dir / "superblock.json"),
}
AT_START: dict[str, Moment] = {
    "the data is locked": changed(lambda daemon: daemon.data_dir / "LOCK"),
    "the index is opened": there(lambda daemon: daemon.data_dir / "index" / "opening"),
    "the life is counted": changed(lambda daemon: daemon.data_dir / "superblock.json"),
    "the arena is whole": changed(lambda daemon: daemon.arena / "header"),
    "it listens": changed(lambda daemon: daemon.socket),
}


def kill_at(process: subprocess.Popen[bytes], is_now: Callable[[], object], delay: float) -> bool:
    """SIGKILL `delay` seconds after the moment; False when the process ended before it came."""
    deadline = time.monotonic() + SECONDS_MAX
    while not is_now():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "the moment never came"
    time.sleep(delay)
    process.kill()
    process.wait(10)
    return True


def start_and_kill(made: Crew, moment: Moment, delay: float) -> bool:
    is_now = moment(made.daemon)
    with (made.daemon.directory / "log").open("ab") as log:
        process = subprocess.Popen(made.daemon.command(), stdout=log, stderr=log)
    try:
        return kill_at(process, is_now, delay)
    finally:
        process.kill()
        process.wait(10)


def test_promises_survive_kills_at_work() -> None:
    with crew(11) as made:
        for moment in AT_WORK.values():
            for delay in DELAYS:
                made.work()
                made.wait_for_work(20)
                assert made.daemon.process is not None
                with Engine(made.daemon, "clearer", model="cleared") as engine:
                    # A namespace that nobody expects anything of.
                    threading.Thread(target=_clear, args=(engine,), daemon=True).start()
                    assert kill_at(made.daemon.process, moment(made.daemon), delay)
                made.next_life()
        assert made.promises_kept > 20


def _clear(engine: Engine) -> None:
    with contextlib.suppress(KVStoreError):  # killed in the middle, as it was meant to be
        while True:
            engine.handle.clear()
            time.sleep(0.02)


def test_promises_survive_kills_at_start() -> None:
    """Killed at every step of a start, one after the other, without a whole life between."""
    with crew(12) as made:
        made.wait_for_work(60)
        made.kill_daemon()
        for name, moment in AT_START.items():
            for delay in DELAYS:
                assert start_and_kill(made, moment, delay), f"{name}: {made.daemon.log()}"
            made.next_life()
            made.kill_daemon()
        made.next_life()
        assert made.promises_kept > 20


def test_promises_survive_kills_while_draining() -> None:
    with crew(13) as made:
        for delay in (0.0, 0.005, 0.02, 0.05, 0.2):
            made.work()
            made.wait_for_work(30)
            assert made.daemon.process is not None
            made.daemon.process.send_signal(signal.SIGTERM)
            time.sleep(delay)
            made.daemon.process.kill()
            made.daemon.process.wait(10)
            made.next_life()


def test_promises_survive_kills_while_the_index_is_rebuilt() -> None:
    """The index is lost, and the daemon is killed while it makes a new one from the frames."""
    with crew(14) as made:
        made.wait_for_work(60)
        for times in (1, 2, 3):
            made.rest()
            made.kill_daemon()
            shutil.rmtree(made.daemon.data_dir / "index")
            rebuilt = changed(lambda daemon: daemon.data_dir / "index" / "data.mdb", times)
            start_and_kill(made, rebuilt, 0.0)
            made.next_life()
            made.work()
            made.wait_for_work(20)
        made.rest()
        assert os.listdir(made.daemon.data_dir / "segments")
