"""Random sequences with kills over the block API: nothing wrong, nothing hangs.

Primitive: `PART`, 100 sequences. `python -m bench.gateway_runs COUNT [FIRST]` plays as many as
one likes, from the FIRST on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.block_runs import World, run
from bench.harness import Bar, Context, Part, Reading

RUNS = Bar("block_api_runs", "runs", at_least=100)
WRONG = Bar("block_api_wrong_bytes", "bytes", at_most=0)
HANGS = Bar("block_api_hangs", "calls", at_most=0)
SEED = 7000


@dataclass
class Played:
    """What many sequences came to."""

    runs: int = 0
    wrong_bytes: int = 0
    hangs: int = 0
    calls: int = 0
    failed_calls: int = 0
    blocks_read: int = 0

    @property
    def note(self) -> str:
        return (
            f"{self.calls} calls, {self.failed_calls} of them ended by a kill or refused; "
            f"{self.blocks_read} blocks compared"
        )


def play(folder: Path, seeds: Iterable[int], step: Callable[[str], None]) -> Played:
    """All seeds, or up to the first call that hangs. Raises RuntimeError for a broken law."""
    played = Played()
    with World(folder) as world:
        for seed in seeds:
            if played.runs % 50 == 0:
                step(f"sequence {played.runs}")
            outcome = run(world, seed)
            if outcome.broken:
                raise RuntimeError(f"seed {seed}: {outcome.broken[0]}")
            played.runs += 1
            played.wrong_bytes += outcome.wrong_bytes
            played.hangs += outcome.hangs
            played.calls += outcome.calls
            played.failed_calls += outcome.failed_calls
            played.blocks_read += outcome.blocks_read
            if played.hangs:
                break
    return played


def _measure(context: Context) -> Iterable[Reading]:
    seeds = range(SEED, SEED + context.several(100, 10))
    played = play(context.folder("runs"), seeds, context.step)
    yield Reading(RUNS.name, played.runs, played.note)
    yield Reading(WRONG.name, played.wrong_bytes, f"in {played.blocks_read} blocks that were read")
    yield Reading(HANGS.name, played.hangs, "calls that did not end within their deadline")


PART = Part("random sequences with kills", (RUNS, WRONG, HANGS), _measure)


if __name__ == "__main__":
    count, first = map(int, [*sys.argv[1:], "0"][:2])
    with TemporaryDirectory() as place:
        print(play(Path(place), range(SEED + first, SEED + first + count), print))
