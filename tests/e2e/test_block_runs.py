"""Random sequences with kills over the block API: nothing wrong, nothing hangs."""

from __future__ import annotations

import pytest

from bench.block_runs import HANG_SECONDS, World, run

RUNS = 100
SECONDS_A_RUN_MAX = 15.0


@pytest.mark.slow
@pytest.mark.timeout(RUNS * SECONDS_A_RUN_MAX + HANG_SECONDS)
def test_sequences_with_kills_serve_the_stored_bytes_or_a_miss(tmp_path):
    """A seed of a failing run reproduces its choices, though not the moments."""
    read = failed = 0
    with World(tmp_path) as world:
        for seed in range(RUNS):
            outcome = run(world, seed)
            assert not outcome.wrong_bytes, (seed, outcome)
            assert not outcome.hangs, (seed, outcome)
            assert not outcome.broken, (seed, outcome)
            read += outcome.blocks_read
            failed += outcome.failed_calls
    assert read, "no run compared anything"
    assert failed, "no run met a kill"
