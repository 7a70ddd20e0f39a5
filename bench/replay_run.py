"""Replays any trace at any capacities under any policies: a table, a JSON file, plots.

    python -m bench.replay_run conversation --percent 1 5 10 --policies value lru arc
    python -m bench.replay_run my.jsonl --blocks 20000 --nvme-percent 10 --bounds

A trace is a known name or a file (bench/replay_traces.py). Beside the policies stand exact LRU over
leaves, and with --bounds the optimum in hindsight and an upper bound. Everything goes to bench/out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from bench import replay_models
from bench.harness import OUT
from bench.replay_cache import MODEL_8B, MODEL_70B, Model, Outcome, Tiers, replay
from bench.replay_traces import Trace, TracesMissing, find
from kvstore.policies import NAMES

MODELS = {"8b": MODEL_8B, "70b": MODEL_70B}


@dataclass(frozen=True)
class Line:
    """One policy at one capacity; shares are of what an infinite cache saves."""

    policy: str
    blocks: int
    percent: float
    saved: float
    vs_lru: float
    outcome: Outcome | None = None

    def as_json(self) -> dict[str, object]:
        body: dict[str, object] = {
            "policy": self.policy,
            "blocks": self.blocks,
            "percent": self.percent,
            "saved_share": round(self.saved, 5),
            "vs_lru": round(self.vs_lru, 4),
        }
        if self.outcome is not None:
            found = vars(self.outcome).copy()
            lengths = found.pop("hit_lengths")
            body |= {**found, "hit_lengths": np.bincount(lengths).tolist() if lengths else []}
        return body


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 2 when a trace is missing."""
    options = _parser().parse_args(arguments)
    console = Console()
    try:
        trace = find(options.trace, options.traces)
    except TracesMissing as error:
        console.print(str(error), style="red", soft_wrap=True)
        return 2
    if options.touches:
        trace = trace.first(options.touches)
    lines = _lines(trace, options, console)
    console.print(_table(trace, lines))
    folder = options.out / "replay"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{trace.name}.json"
    body = {"trace": trace.name, "requests": trace.requests, "unique_blocks": trace.unique}
    facts = {**body, "touches": trace.touches, "lines": [line.as_json() for line in lines]}
    path.write_text(json.dumps(facts, indent=1) + "\n")
    console.print(f"written: {path}")
    if not options.no_plots:
        for plot in draw(trace.name, lines, folder):
            console.print(f"written: {plot}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.replay_run", description=__doc__.split("\n")[0])
    parser.add_argument("trace", help="conversation, synthetic, agents, or a .jsonl file")
    parser.add_argument("--traces", type=Path, help="folder of the known traces")
    parser.add_argument("--percent", type=float, nargs="+", default=[1, 5, 10, 20, 40])
    parser.add_argument("--blocks", type=int, nargs="+", help="capacities in blocks instead")
    parser.add_argument("--nvme-percent", type=float, default=0.0, help="a second tier")
    parser.add_argument("--write-on-demotion", action="store_true")
    parser.add_argument("--write-mb-per-second", type=float, default=0.0, help="a wear budget")
    parser.add_argument("--policies", nargs="+", choices=NAMES, default=["value", "lru"])
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--touches", type=int, default=0, help="only so many of the first")
    parser.add_argument("--bounds", action="store_true", help="hindsight and upper bound too")
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser


def _lines(trace: Trace, options: argparse.Namespace, console: Console) -> list[Line]:
    model = MODELS[options.model]
    rooms = options.blocks or [max(1, round(trace.unique * each / 100)) for each in options.percent]
    lines: list[Line] = []
    with progress_bar(console) as progress:
        for room in rooms:
            lines += _at(room, trace, model, options, progress)
    return lines


def _at(
    room: int, trace: Trace, model: Model, options: argparse.Namespace, progress: Progress
) -> list[Line]:
    """All policies at one capacity."""
    whole = replay_models.infinite(trace, model)
    percent = 100 * room / trace.unique
    saved = {"exact lru": replay_models.lru(trace, room, model)}
    outcomes: dict[str, Outcome] = {}
    for name in options.policies:
        task = progress.add_task(f"{name}, {room:,} blocks", total=trace.requests)
        tiers = Tiers(
            name,
            room,
            round(trace.unique * options.nvme_percent / 100),
            model=model,
            write_on_demotion=options.write_on_demotion,
            write_bytes_per_second=options.write_mb_per_second * 1e6,
        )
        outcomes[name] = replay(trace, tiers, partial(_show, progress, task))
        saved[name] = outcomes[name].saved_seconds
    if options.bounds:
        saved["hindsight"] = replay_models.hindsight(trace, room, model)
        saved["upper bound"] = min(whole, replay_models.upper_bound(trace, room, model))
    lru = saved["exact lru"]
    return [
        Line(name, room, percent, seconds / whole, seconds / lru, outcomes.get(name))
        for name, seconds in saved.items()
    ]


def _show(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, completed=done)


def progress_bar(console: Console) -> Progress:
    """What is replayed, how far it is, how long it still takes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


def replay_shown(name: str, trace: Trace, tiers: Tiers) -> Outcome:
    """`replay` under a progress bar on stderr, which goes when it ends."""
    with progress_bar(Console(stderr=True)) as progress:
        task = progress.add_task(name, total=trace.requests)
        return replay(trace, tiers, partial(_show, progress, task))


def _table(trace: Trace, lines: Sequence[Line]) -> Table:
    title = f"{trace.name}: {trace.requests:,} requests, {trace.unique:,} different blocks"
    table = Table(title=title, title_justify="left")
    for name in ("blocks", "%", "policy", "saved %", "÷ exact lru", "net %", "NVMe writes", "k/s"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for line in lines:
        found = line.outcome
        rest = ("", "", "")
        if found is not None:
            net = line.saved * found.net_seconds / max(found.saved_seconds, 1e-12)
            rate = found.touches / found.wall_seconds / 1e3
            rest = (f"{100 * net:.1f}", f"{found.written_blocks:,}", f"{rate:,.0f}")
        numbers = (f"{100 * line.saved:.1f}", f"{line.vs_lru:.3f}")
        table.add_row(f"{line.blocks:,}", f"{line.percent:.3g}", line.policy, *numbers, *rest)
    return table


def draw(name: str, lines: Sequence[Line], folder: Path) -> list[Path]:
    """Saved share against capacity, lengths of hits, blocks written; paths of the PNG files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made: list[Path] = []

    def keep(kind: str) -> None:
        made.append(folder / f"{name}-{kind}.png")
        pyplot.title(f"{name}: {kind}")
        pyplot.legend()
        pyplot.tight_layout()
        pyplot.savefig(made[-1], dpi=120)
        pyplot.close()

    policies = list(dict.fromkeys(line.policy for line in lines))
    for policy in policies:
        own = [line for line in lines if line.policy == policy]
        pyplot.plot(
            [one.percent for one in own], [100 * one.saved for one in own], "o-", label=policy
        )
    pyplot.xscale("log")
    pyplot.xlabel("capacity, % of all blocks")
    pyplot.ylabel("saved prefill seconds, % of an infinite cache")
    keep("saved")
    replayed = [line for line in lines if line.outcome is not None]
    for line in replayed:
        assert line.outcome is not None
        counts = np.bincount(line.outcome.hit_lengths)
        label = f"{line.policy} {line.percent:.3g} %"
        pyplot.step(np.arange(counts.size), counts, label=label, where="mid")
    pyplot.xlabel("blocks found by a request")
    pyplot.ylabel("requests")
    pyplot.yscale("symlog")
    keep("hits")
    labels = [f"{line.policy}\n{line.percent:.3g} %" for line in replayed]
    stored = [line.outcome.stored_blocks for line in replayed if line.outcome is not None]
    written = [line.outcome.written_blocks for line in replayed if line.outcome is not None]
    places = np.arange(len(labels))
    pyplot.bar(places - 0.2, stored, 0.4, label="to host memory")
    pyplot.bar(places + 0.2, written, 0.4, label="to NVMe")
    pyplot.xticks(places, labels, fontsize=7)
    pyplot.ylabel("blocks written")
    keep("written")
    return made


if __name__ == "__main__":
    sys.exit(main())
