"""Lives of an engine over the stand-in for a GPU, by seed; a failure names its seed.

Field cases GPU-1, 3, 5 and VLLM-4, 7, 8, 9.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from vllm_lives import PLANTED, run_engine, seeds_until_found

SEEDS, SEEDS_SLOW, SEEDS_PER_BUG = 12, 597, 60


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Loads fail by the hundred."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def wrong_of(seeds: range) -> dict[int, list[str]]:
    found = {seed: run_engine(seed) for seed in seeds}
    return {seed: wrong[:3] for seed, wrong in found.items() if wrong}


def test_no_life_has_a_wrong_byte() -> None:
    assert wrong_of(range(SEEDS)) == {}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_shows(bug: str) -> None:
    assert seeds_until_found(bug, range(SEEDS_PER_BUG)) is not None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS_SLOW, 117))
def test_many_lives(first: int) -> None:
    assert wrong_of(range(first, first + 117)) == {}
