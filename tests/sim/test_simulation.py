"""Random schedules by seed. A failure names its seed: KVSTORE_SIM_SEED=n plays it again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from simulation import Simulation

SEEDS, SEEDS_SLOW = 100, 3000
GROUP = 10
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def play(seed: int) -> list[str]:
    """The course of one seed; whatever goes wrong says which it was."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        simulation = Simulation(Path(directory) / "data", seed)
        try:
            simulation.run()
        except BaseException as error:
            last = "\n".join(simulation.trace[-12:])
            error.add_note(f"seed {seed}: KVSTORE_SIM_SEED={seed} plays it again\n{last}")
            raise
    return simulation.trace


def seed_of(config: pytest.Config) -> int | None:
    """The one seed asked for, by option or environment."""
    chosen = config.getoption("--sim-seed", default=None)
    told = os.environ.get("KVSTORE_SIM_SEED")
    return int(told) if chosen is None and told else chosen


def play_all(config: pytest.Config, seeds: range) -> None:
    chosen = seed_of(config)
    before = len(os.listdir("/proc/self/fd"))
    for seed in seeds if chosen is None else [chosen]:
        play(seed)
    assert len(os.listdir("/proc/self/fd")) <= before, "files were left open"


@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_random_schedules(pytestconfig, first):
    play_all(pytestconfig, range(first, first + GROUP))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS_SLOW, 100))
def test_many_random_schedules(pytestconfig, first):
    play_all(pytestconfig, range(first, first + 100))


def test_a_seed_takes_the_same_course_twice():
    assert play(3) == play(3)
