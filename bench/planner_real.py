"""The planner with a real engine: Gemma on the CPU, prefixes on an NVMe tier that is throttled.

Prefixes are stored as blocks of 128 tokens. The meeting computes in chunks of a block (bit-exact
units), beside a prefill in chunks of 512, which is faster; the cells are about decisions alone:
nothing is asked of chunks there (`exact=False`), with kvstore or without. Each round takes three
times to the first token: computed without kvstore, loaded whole, and as planned. The daemon
learns what prefill and link cost from the rounds before those that count. The prefixes of all
requests hold the same bytes, which changes no time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

import engine_adapter.transformers as kv
from bench.harness import Bar, Context, Reading, spread
from bench.transformers_common import (
    RECOMPUTE_CHUNK,
    Prose,
    Stand,
    gemma,
    stand,
    stored,
    timed_dtype,
    warm_up,
)
from kvstore.client.inplace import timings_of

BLOCK_TOKENS = 128
LEARNING_LENGTHS = (200, 300, 400, 500)
LEARNT_SECONDS_MAX = 60.0


@dataclass(frozen=True)
class Cell:
    """`speed`: of the link, in multiples of the one at which the prefix loads as fast as it
    computes."""

    speed: float
    stored_tokens: int
    new_tokens: int


CELLS = tuple(
    Cell(speed, stored_tokens, new_tokens)
    for speed in (0.25, 1.0, 8.0)
    for stored_tokens, new_tokens in ((512, 16), (384, 144))
)
MEETING_CELL = Cell(1.0, 1024, 16)


@dataclass(frozen=True)
class Round:
    """Seconds to the first token."""

    computed: float
    loaded: float
    planned: float


class Bench:
    """One daemon after the other, one a link speed."""

    def __init__(self, context: Context, here: Stand, prose: Prose, **plain: int) -> None:
        """`plain`: arguments of a generate call without kvstore."""
        self._context = context
        self._here = here
        self._prose = prose
        self._plain = plain

    def rounds(self, cell: Cell, count: int, learning: int = 2) -> list[Round]:
        """The first `learning` rounds are not kept."""
        here, prose = self._here, self._prose
        prefixes = stored(here, prose, 2 * (learning + count), cell.stored_tokens)
        asked = [prose.after(prefix, cell.new_tokens) for prefix in prefixes]
        layout = here.attached.namespace().layout
        token_bytes = layout.block_bytes / layout.block_tokens
        probe = [self._computed(prose.prompt(cell.stored_tokens)) for _ in range(2)]
        rate = cell.speed * token_bytes * cell.stored_tokens / float(np.median(probe))
        self._context.step(
            f"{cell.stored_tokens} + {cell.new_tokens} tokens, disk at {rate / 1e6:.0f} MB/s"
        )
        here.daemon.command = (sys.executable, "-m", "bench.slow_disk", f"{rate:.0f}", "serve")
        here.restart()
        self._teach()
        seen = [
            self._round(*asked[2 * turn : 2 * turn + 2], turn) for turn in range(len(asked) // 2)
        ]
        return seen[learning:]

    def _teach(self) -> None:
        """Prompts that nobody stored: the adapter reports how long they take."""
        attached = self._here.attached
        timings = timings_of(attached.namespace())
        for length in LEARNING_LENGTHS:
            self._here.ttft(self._prose.prompt(length))
            self._here.settle()
        end = time.monotonic() + LEARNT_SECONDS_MAX
        while not self._here.daemon.stat()["costs"]["prefill"] or not timings.is_idle:
            if time.monotonic() > end:
                raise RuntimeError("the daemon did not learn what prefill costs")
            time.sleep(0.05)

    def _round(self, first: torch.Tensor, second: torch.Tensor, turn: int) -> Round:
        """The order alternates."""
        if turn % 2:
            planned, loaded = self._planned(first), self._loaded(second)
            return Round(self._computed(first), loaded, planned)
        computed, loaded = self._computed(first), self._loaded(first)
        return Round(computed, loaded, self._planned(second))

    def _computed(self, ids: torch.Tensor) -> float:
        return self._here.ttft_without(ids, **self._plain)

    def _planned(self, ids: torch.Tensor) -> float:
        seconds = self._here.ttft(ids)
        self._here.settle()
        return seconds

    def _loaded(self, ids: torch.Tensor) -> float:
        """Everything that is stored, whatever that takes."""
        attached = self._here.attached
        tools = attached._tools
        attached._tools = replace(tools, is_planned=False)
        try:
            seconds = self._here.ttft(ids)
        finally:
            attached._tools = tools
        if not attached.last.nvme_tokens:
            raise RuntimeError(f"nothing was loaded: {attached.last}")
        self._here.settle()
        return seconds

    @property
    def last(self) -> kv.RequestReport:
        return self._here.attached.last


def _ratio(seen: list[Round]) -> float:
    """Median of what was planned ÷ the better of the two fixed choices' medians."""
    return _median(seen, "planned") / min(_median(seen, "computed"), _median(seen, "loaded"))


def _median(seen: list[Round], name: str) -> float:
    return float(np.median([getattr(each, name) for each in seen]))


def _medians(seen: list[Round]) -> str:
    names = ("computed", "loaded", "planned")
    return ", ".join(f"{name} {1e3 * _median(seen, name):.0f}" for name in names) + " ms"


def measure(context: Context, cells_worst: Bar, meeting: Bar) -> Iterator[Reading]:
    """Both figures, over one model."""
    model, tokens = gemma(timed_dtype())
    prose = Prose(tokens)
    options = {"block_tokens": BLOCK_TOKENS, "plan": True}
    if context.wants(meeting.name):
        with stand(context.folder("meeting"), model, **options) as here:
            warm_up(context, here, prose.prompt(256))
            bench = Bench(context, here, prose, prefill_chunk_size=RECOMPUTE_CHUNK)
            seen = bench.rounds(MEETING_CELL, context.several(7, 3))
            yield Reading(
                meeting.name,
                _ratio(seen),
                f"{_medians(seen)}, medians of {len(seen)} rounds, planned "
                f"{spread([each.planned for each in seen])} s, last met at "
                f"{bench.last.met_at_tokens} of {MEETING_CELL.stored_tokens} tokens; "
                f"{MEETING_CELL.new_tokens} new, blocks of {BLOCK_TOKENS}, {timed_dtype()}",
            )
    if context.wants(cells_worst.name):
        with stand(context.folder("cells"), model, exact=False, **options) as here:
            warm_up(context, here, prose.prompt(256))
            bench = Bench(context, here, prose)
            ratios, notes = [], []
            for cell in CELLS:
                seen = bench.rounds(cell, context.several(5, 3))
                ratios.append(_ratio(seen))
                notes.append(
                    f"{cell.speed:g} x, {cell.stored_tokens} + {cell.new_tokens}: "
                    f"{ratios[-1]:.2f} ({_medians(seen)})"
                )
            yield Reading(cells_worst.name, max(ratios), "; ".join(notes))
