"""`kvstore resize` on a daemon in use: memory goes back and comes again, nobody stops."""

from __future__ import annotations

import itertools
import subprocess
import threading
from collections.abc import Callable

import pytest

from tests.conftest import DaemonProcess
from tests.e2e.kit import SECONDS_MAX, Engine, assert_books, eventually

MIB = 1 << 20
HOST = 16 * MIB
CHAINS, BLOCKS = 14, 20
"""17 MiB in all: more than host memory has."""


def resize(daemon: DaemonProcess, size: str) -> None:
    command = [size if word == "serve" else word for word in daemon.command()]
    command.insert(command.index(size), "resize")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def filled_bytes(daemon: DaemonProcess) -> object:
    return daemon.stat()["host_filled_bytes"]


def pages_bytes(daemon: DaemonProcess) -> int:
    """What the regions really occupy."""
    return sum(path.stat().st_blocks * 512 for path in daemon.arena.glob("region-*"))


@pytest.mark.slow
def test_memory_is_given_back_and_taken_again_under_load(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    daemon = make_daemon({"host.bytes": str(HOST)}).start()
    stop, turns, failures = threading.Event(), [0, 0], []

    def work(number: int) -> None:
        """Load every chain that others stored, right bytes or none, and store new ones."""
        try:
            with Engine(daemon, f"engine-{number}") as engine:
                for turn in itertools.count():
                    if stop.is_set():
                        return
                    engine.load(engine.chain(turn % CHAINS, BLOCKS))
                    engine.store(engine.chain(1000 * (number + 1) + turn % CHAINS, BLOCKS))
                    turns[number] += 1
        except BaseException as error:
            failures.append(error)
            raise

    def worked() -> None:
        """Both go on: two whole turns more each."""
        before = list(turns)
        eventually(
            lambda: (
                failures or all(now > then + 2 for now, then in zip(turns, before, strict=True))
            ),
            f"engines go on: {turns}, {failures}",
        )
        assert not failures

    with Engine(daemon) as engine:
        chains = [engine.durable(number, BLOCKS) for number in range(CHAINS)]
        workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for worker in workers:
            worker.start()
        try:
            for size, filled in (("8MiB", 8 * MIB), ("all", HOST), ("4MiB", 4 * MIB)):
                resize(daemon, size)
                eventually(lambda wanted=filled: filled_bytes(daemon) == wanted, size)
                eventually(lambda wanted=filled: pages_bytes(daemon) <= wanted, f"{size}: pages")
                worked()
        finally:
            stop.set()
            for worker in workers:
                worker.join(SECONDS_MAX)
        assert assert_books(daemon)["host_filled_bytes"] == 4 * MIB
        resize(daemon, "all")
        eventually(lambda: filled_bytes(daemon) == HOST, "all of it is back")
        assert pages_bytes(daemon) == HOST
        for chain in chains:
            engine.loads_whole(chain)
