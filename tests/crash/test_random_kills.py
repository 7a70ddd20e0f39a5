"""SIGKILL at random moments under a mixed workload: daemon, clients, both, in any order.

Set KVSTORE_CRASH_SEED to repeat a failure, KVSTORE_CRASH_SECONDS to go on for longer.
"""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from tests.crash.crew import Crew, crew
from tests.e2e.kit import findings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SECONDS = float(os.environ.get("KVSTORE_CRASH_SECONDS", "75"))
SEED = int(os.environ.get("KVSTORE_CRASH_SEED", time.time_ns() % 10**9))


def test_every_promise_survives_kills_at_random_moments() -> None:
    with crew(SEED) as made:
        end = time.monotonic() + SECONDS
        rounds = 0
        while time.monotonic() < end or rounds < 5:
            made.work()
            made.wait_for_work(int(made.random.integers(5, 120)))
            time.sleep(made.random.uniform(0.0, 0.05))
            _kill_in_any_order(made)
            while made.random.random() < 0.3:
                _kill_during_a_start(made)
            made.next_life()
            rounds += 1
        assert findings(made.daemon, payloads=True) == []
        assert made.promises_kept > 100, "there were promises to keep"


def _kill_in_any_order(made: Crew) -> None:
    if made.random.random() < 0.5:
        made.kill_some(0.15)
        made.kill_daemon()
    else:
        made.kill_daemon()
        made.kill_some(0.15)


def _kill_during_a_start(made: Crew) -> None:
    log = (made.daemon.directory / "log").open("ab")
    with log, subprocess.Popen(made.daemon.command(), stdout=log, stderr=log) as process:
        time.sleep(made.random.uniform(0.2, 1.5))
        process.kill()
