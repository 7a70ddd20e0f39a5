"""The GPU tier by seed; a failure names the seed that plays it again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from gpu_tier import GpuTierCourse
from test_simulation import MEMORY, seed_of

SEEDS, SEEDS_SLOW = 6, 800


def play(config: pytest.Config, seeds: range) -> int:
    chosen, blocks = seed_of(config), 0
    for seed in seeds if chosen is None else [chosen]:
        with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
            try:
                blocks += GpuTierCourse(Path(directory) / "data", seed).run()
            except BaseException as error:
                error.add_note(f"KVSTORE_SIM_SEED={seed} plays it again")
                raise
    return blocks


def test_random_courses(pytestconfig: pytest.Config) -> None:
    assert play(pytestconfig, range(SEEDS)) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SEEDS_SLOW, 100))
def test_many_random_courses(pytestconfig: pytest.Config, first: int) -> None:
    assert play(pytestconfig, range(first, first + 100)) > 0
