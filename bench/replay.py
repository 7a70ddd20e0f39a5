"""Suite `replay`: what the policy saves on public traces, against LRU as engines have it.

Run it with `make bench SUITE=replay`; `python -m bench.replay_run` replays any trace, capacity and
policy. The traces lie outside the project (bench/replay_traces.py). The planner's figures are those
of bench/planner.py, which this suite includes.
"""

from __future__ import annotations

import sys

from bench import planner, replay_cost, replay_same, replay_single, replay_tiers
from bench.harness import Suite

SUITE = Suite(
    "replay",
    [
        *replay_single.PARTS,
        replay_tiers.PART,
        *replay_cost.PARTS,
        replay_same.PART,
        *planner.PARTS,
    ],
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
