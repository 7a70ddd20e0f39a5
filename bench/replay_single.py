"""One tier: prefill seconds saved by the value policy ÷ by exact LRU over leaves, same blocks.

Primitives: `PARTS`; `Cell` and `measured`, which other parts share: no cell is replayed twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from bench import replay_models
from bench.harness import OUT, Bar, Context, Part, Reading
from bench.replay_cache import MODEL_8B, Outcome, Tiers
from bench.replay_run import Line, draw, replay_shown
from bench.replay_traces import Trace, find

VALUE = "value"
SIZES = {
    "conversation": (0.5, 1, 2, 5, 10, 20, 40),
    "synthetic": (0.5, 1, 2, 5, 10, 20, 40),
    "agents": (0.5, 1),
}
"""Capacities in % of a trace's unique blocks."""
QUICK_TOUCHES = 20000


@dataclass(frozen=True)
class Cell:
    """One trace at one capacity."""

    trace: str
    percent: float
    is_quick: bool

    @property
    def name(self) -> str:
        return f"{self.trace}_{self.percent:g}pct"


@dataclass(frozen=True)
class Measured:
    """Shares of what an infinite cache saves."""

    lru: float
    value: float
    outcome: Outcome

    @property
    def ratio(self) -> float:
        return self.value / self.lru


@cache
def trace_of(name: str, is_quick: bool) -> Trace:
    """The trace, or its start."""
    trace = find(name)
    return trace.first(QUICK_TOUCHES) if is_quick else trace


@cache
def infinite(name: str, is_quick: bool) -> float:
    return replay_models.infinite(trace_of(name, is_quick), MODEL_8B)


@cache
def room(cell: Cell) -> int:
    return max(1, round(trace_of(cell.trace, cell.is_quick).unique * cell.percent / 100))


@cache
def lru_share(cell: Cell) -> float:
    """Exact LRU's share of an infinite cache."""
    trace = trace_of(cell.trace, cell.is_quick)
    saved = replay_models.lru(trace, room(cell), MODEL_8B)
    return saved / infinite(cell.trace, cell.is_quick)


@cache
def measured(cell: Cell) -> Measured:
    """The value policy and LRU on one cell."""
    trace, tiers = trace_of(cell.trace, cell.is_quick), Tiers(VALUE, room(cell))
    outcome = replay_shown(cell.name, trace, tiers)
    whole = infinite(cell.trace, cell.is_quick)
    return Measured(lru_share(cell), outcome.saved_seconds / whole, outcome)


def _cells(context: Context) -> Iterable[Cell]:
    return (
        Cell(trace, percent, context.is_quick)
        for trace, sizes in SIZES.items()
        for percent in sizes
    )


def _note(cell: Cell, found: Measured) -> str:
    rate = found.outcome.touches / found.outcome.wall_seconds
    return (
        f"{room(cell):,} blocks: {100 * found.value:.1f} ÷ {100 * found.lru:.1f} % of an infinite "
        f"cache; {rate:,.0f} touches/s"
    )


def _part(trace: str, bars: dict[float, float]) -> Part:
    def measure(context: Context) -> Iterable[Reading]:
        for percent in bars:
            cell = Cell(trace, percent, context.is_quick)
            if context.wants(f"{cell.name}_vs_lru"):
                context.step(f"{cell.name}, {trace_of(trace, context.is_quick).touches:,} touches")
                found = measured(cell)
                yield Reading(f"{cell.name}_vs_lru", found.ratio, _note(cell, found))

    names = tuple(
        Bar(f"{trace}_{percent:g}pct_vs_lru", "ratio", at_least=bar)
        for percent, bar in bars.items()
    )
    return Part(f"{trace}, one tier", names, measure)


def _worst(context: Context) -> Iterable[Reading]:
    """Over all traces and capacities."""
    ratios: dict[str, float] = {}
    for cell in _cells(context):
        context.step(cell.name)
        ratios[cell.name] = measured(cell).ratio
    for trace in SIZES:
        _draw(trace, context)
    name = min(ratios, key=lambda each: ratios[each])
    told = ", ".join(f"{each} {ratio:.3f}" for each, ratio in ratios.items())
    yield Reading("worst_cell_vs_lru", ratios[name], f"{name}; all: {told}")


def _draw(trace: str, context: Context) -> None:
    """Plots of all its cells in bench/out/replay."""
    lines = []
    for cell in _cells(context):
        if cell.trace == trace:
            found, size = measured(cell), (room(cell), cell.percent)
            lines.append(Line("exact lru", *size, found.lru, 1.0))
            lines.append(Line(VALUE, *size, found.value, found.ratio, found.outcome))
    folder = OUT / "replay"
    folder.mkdir(parents=True, exist_ok=True)
    for plot in draw(trace, lines, folder):
        context.step(f"written: {plot}")


def _harness(percent: float, known: float) -> Part:
    name = f"lru_conversation_{percent:g}pct_of_infinite"

    def measure(context: Context) -> Iterable[Reading]:
        found = 100 * lru_share(Cell("conversation", percent, context.is_quick))
        yield Reading(
            name, abs(found - known), f"{found:.2f} %; an independent simulator: {known} %"
        )

    return Part(
        "LRU against an independent simulator", (Bar(name, "points", at_most=0.5),), measure
    )


PARTS = [
    *(_harness(percent, known) for percent, known in ((5, 37.6), (10, 63.4), (20, 85.3))),
    _part("conversation", {5: 1.25, 10: 1.05, 20: 1.00}),
    _part("synthetic", {5: 1.20, 10: 1.15, 20: 1.08}),
    _part("agents", {0.5: 1.12, 1: 1.03}),
    Part("every cell", (Bar("worst_cell_vs_lru", "ratio", at_least=0.99),), _worst),
]
