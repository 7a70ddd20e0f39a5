"""Suite `planner`: whether loading what is stored ever costs more than computing it.

Run it with `make bench SUITE=planner`; real engines need the environment of `make demo`.
"""

from __future__ import annotations

import sys

from bench import planner_grid
from bench.harness import Suite

PARTS = [planner_grid.PART]
SUITE = Suite("planner", PARTS)

if __name__ == "__main__":
    sys.exit(SUITE.main())
