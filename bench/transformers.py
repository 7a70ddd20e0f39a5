"""Suite `transformers`: what a stored prefix is worth to a real model, and what it costs.

Run it with `make bench SUITE=transformers`: it needs the engine's environment and Gemma, as
`make demo` makes them.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

from bench import transformers_cost, transformers_exact, transformers_overlap, transformers_ttft
from bench.harness import Bar, Context, Reading, Suite, single, spread, timed

DEMO_SECONDS_MAX = 300.0


def _demo(context: Context) -> Reading:
    """The command as users type it; installed files count as up to date."""
    command = ["make", "--silent", "--assume-old=pyproject.toml", "demo", "MODEL=tiny"]
    env = {key: text for key, text in os.environ.items() if not key.startswith("MAKE")}

    def run() -> None:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=DEMO_SECONDS_MAX, env=env
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout[-500:]} {done.stderr[-500:]}")

    seconds = [timed(run) for _ in range(context.several(2, 1))]
    note = f"{' '.join(command)}, median of {len(seconds)}; {spread(seconds)}"
    return Reading("demo_tiny_seconds", float(np.median(seconds)), note)


SUITE = Suite(
    "transformers",
    [
        *transformers_ttft.PARTS,
        transformers_cost.PART,
        transformers_overlap.PART,
        transformers_exact.PART,
        single(_demo, Bar("demo_tiny_seconds", "s", at_most=40)),
    ],
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
