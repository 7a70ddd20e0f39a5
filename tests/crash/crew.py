"""Workers that come and go, a daemon that is killed, and the check that every promise was kept.

Primitives of `Crew`: `work`, `wait_for_work`, `rest`, `kill_some`, `next_life`,
`assert_promises_kept`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import MIB, DaemonProcess
from tests.crash.expectations import LANES, Expectations
from tests.crash.worker import engine_of, number_of
from tests.e2e.kit import SECONDS_MAX, assert_books, eventually, new_daemon

SETTINGS = {
    "host.bytes": "16MiB",
    "host.region_bytes": "8MiB",
    "nvme.bytes_max": "1GiB",
    "nvme.segment_bytes": "4MiB",
    "lease.read_seconds": "1s",
    "lease.write_seconds": "5s",
    "daemon.drain_seconds": "5s",
}
ROOT = Path(__file__).resolve().parents[2]


class Crew:
    """One daemon, LANES workers, one file of expectations."""

    def __init__(self, daemon: DaemonProcess, seed: int) -> None:
        self.daemon = daemon
        self.seed = seed
        self.random = np.random.default_rng(seed)
        self._file = daemon.directory / "expectations"
        self.expected = Expectations(self._file)
        self._workers: dict[int, subprocess.Popen[str]] = {}
        self._arena_bytes = 0
        self.promises_kept = 0
        """Durable blocks looked for and found, over all lives."""

    # ------------------------------------------------------------------ workers

    def work(self) -> None:
        """Everybody on."""
        self.expected.pause(False)
        for lane in set(range(LANES)) - self._workers.keys():
            command = [sys.executable, "-m", "tests.crash.worker", str(self.daemon.socket)]
            command += [str(self._file), str(lane), str(self.random.integers(1 << 30))]
            self._workers[lane] = subprocess.Popen(
                command, cwd=ROOT, stderr=subprocess.PIPE, text=True
            )

    def wait_for_work(self, things: int) -> None:
        """Until the workers did so many more things, on a machine of any speed."""
        goal = self.expected.things_done + things

        def is_done() -> bool:
            self.assert_alive()
            return self.expected.things_done >= goal

        eventually(is_done, f"{self}: the workers get on", 2 * SECONDS_MAX)

    def rest(self) -> None:
        """Wait until nobody does anything."""
        self.expected.pause(True)
        eventually(self._all_rest, "the workers rest", 2 * SECONDS_MAX)

    def _all_rest(self) -> bool:
        self.assert_alive()
        return self.expected.at_rest() >= self._workers.keys()

    def assert_alive(self) -> None:
        """A worker ends by itself only when it was lied to."""
        for lane, worker in self._workers.items():
            if worker.poll() is not None:
                assert worker.stderr is not None
                raise AssertionError(f"{self}: worker {lane}: {worker.stderr.read()[-3000:]}")

    def kill_some(self, chance: float) -> None:
        """SIGKILL to each worker with that chance."""
        self.assert_alive()
        for lane in [lane for lane in self._workers if self.random.random() < chance]:
            worker = self._workers.pop(lane)
            worker.kill()
            worker.communicate()

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.daemon.directory}"

    # ------------------------------------------------------------------ the daemon

    def kill_daemon(self) -> None:
        process = self.daemon.process
        assert process is not None
        assert process.poll() is None, f"{self}: it ended by itself: {self.daemon.log()}"
        self.daemon.kill()

    def next_life(self) -> None:
        """Started; every promise is kept, the books balance, memory is what it was."""
        self.expected.pause(True)
        self.daemon.start()
        self.rest()
        self.assert_promises_kept()
        tree: Any = assert_books(self.daemon)
        assert tree["nvme"]["checksum_failures"] == 0, f"{self}: {tree['nvme']}"
        used = sum(
            path.stat().st_blocks * 512
            for path in self.daemon.arena.iterdir()
            if path.is_file() and path.name != "LOCK"
        )
        assert used == (self._arena_bytes or used), f"{self}: arena holds {used / MIB} MiB"
        self._arena_bytes = used

    def assert_promises_kept(self) -> None:
        """`durable` <= blocks that hit <= `most`, and every byte right, for every chain."""
        with contextlib.ExitStack() as stack:
            engines = {
                (lane, space): stack.enter_context(engine_of(self.daemon.socket, lane, space))
                for lane in range(LANES)
                for space in range(2)
            }
            for place in self.expected.places():
                blocks, durable, most, turn = self.expected.get(place)
                engine = engines[place.lane, place.space]
                found = engine.load(engine.chain(number_of(place, turn), blocks))
                assert durable <= found.blocks <= most, (
                    f"{self}: {place} turn {turn} of {blocks} blocks: {found}, "
                    f"expected {durable} to {most}\n{self.daemon.log()}"
                )
                self.promises_kept += durable

    def end(self) -> None:
        for worker in self._workers.values():
            worker.kill()
            worker.communicate()
        self.daemon.clean()


@contextlib.contextmanager
def crew(seed: int, settings: dict[str, str] | None = None) -> Iterator[Crew]:
    """Everything started; ended by its ids."""
    made = Crew(new_daemon({**SETTINGS, **(settings or {})}), seed)
    try:
        made.daemon.start()
        made.work()
        yield made
    finally:
        made.end()
