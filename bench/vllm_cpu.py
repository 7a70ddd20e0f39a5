"""Suite `vllm_cpu`: the connector on a real vLLM engine without a GPU.

Run it with `make bench SUITE=vllm_cpu`: it needs vLLM's environment, and for hits on a real model
Gemma as `make demo` converts it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from bench import vllm_chaos, vllm_cost, vllm_hits, vllm_serve
from bench.harness import Bar, Context, Part, Reading, Suite

ROWS = Path("tests/engines/vllm_engine")
ROWS_SECONDS_MAX = 1800.0


def _rows(context: Context) -> Iterator[Reading]:
    """The table of behaviours: every test on the real engine, a process a module."""
    run = failed = 0
    names = []
    for module in sorted(ROWS.glob("test_*.py")):
        report = context.work / f"{module.stem}.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", str(module)]
        subprocess.run(
            command,
            check=False,
            capture_output=True,
            timeout=ROWS_SECONDS_MAX,
            env=dict(os.environ),
        )
        suite = next(ET.parse(report).getroot().iter("testsuite"))
        tests, bad = int(suite.get("tests", 0)), 0
        bad += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        run, failed = run + tests - int(suite.get("skipped", 0)), failed + bad
        names.append(f"{module.stem.removeprefix('test_')} {tests - bad}/{tests}")
    yield Reading("vllm_rows_run", run, "; ".join(names))
    yield Reading("vllm_rows_failed", failed, "answers and block digests compared with cold runs")


SUITE = Suite(
    "vllm_cpu",
    [
        Part(
            "rows",
            (
                Bar("vllm_rows_run", "rows", at_least=55),
                Bar("vllm_rows_failed", "rows", at_most=0),
            ),
            _rows,
        ),
        vllm_cost.PART,
        *vllm_hits.PARTS,
        vllm_serve.PART,
        vllm_chaos.PART,
    ],
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
