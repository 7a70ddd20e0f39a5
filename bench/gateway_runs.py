"""Random sequences with kills over the block API: nothing wrong, nothing hangs.

Primitive: `PART`.
"""

from __future__ import annotations

from collections.abc import Iterable

from bench.block_runs import World, run
from bench.harness import Bar, Context, Part, Reading

RUNS = Bar("block_api_runs", "runs", at_least=100)
WRONG = Bar("block_api_wrong_bytes", "bytes", at_most=0)
HANGS = Bar("block_api_hangs", "calls", at_most=0)
SEED = 7000


def _measure(context: Context) -> Iterable[Reading]:
    runs = context.several(2000, 10)
    done = wrong = hangs = calls = failed = read = 0
    with World(context.folder("runs")) as world:
        for number in range(runs):
            if number % 50 == 0:
                context.step(f"sequence {number} of {runs}")
            outcome = run(world, SEED + number)
            if outcome.broken:
                raise RuntimeError(f"seed {SEED + number}: {outcome.broken[0]}")
            done += 1
            wrong += outcome.wrong_bytes
            hangs += outcome.hangs
            calls += outcome.calls
            failed += outcome.failed_calls
            read += outcome.blocks_read
            if hangs:
                break
    note = f"{calls} calls, {failed} of them ended by a kill or refused; {read} blocks compared"
    yield Reading(RUNS.name, done, note)
    yield Reading(WRONG.name, wrong, f"in {read} blocks that were read")
    yield Reading(HANGS.name, hangs, "calls that did not end within their deadline")


PART = Part("random sequences with kills", (RUNS, WRONG, HANGS), _measure)
