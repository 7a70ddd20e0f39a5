"""Suite `planner`: whether loading what is stored ever costs more than computing it.

Run it with `make bench SUITE=planner`; real engines need the environment of `make demo`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench import planner_grid
from bench.harness import Bar, Context, Part, Reading, Suite

CELLS_WORST = Bar("planner_real_cells_worst", "ratio", at_most=1.15)
MEETING = Bar("meet_in_the_middle", "ratio", at_most=0.72)


def _real(context: Context) -> Iterator[Reading]:
    """Imported when it is measured: it needs torch, the rest of the suite does not."""
    from bench import planner_real

    yield from planner_real.measure(context, CELLS_WORST, MEETING)


PARTS = [
    planner_grid.PART,
    Part("the planner with a real engine", (MEETING, CELLS_WORST), _real),
]
SUITE = Suite("planner", PARTS)

if __name__ == "__main__":
    sys.exit(SUITE.main())
