"""Ground of every benchmark suite: figures with bars, interleaved pairs, a table, a JSON file.

Primitives:
  `Bar`, `Reading`, `Figure`   what must hold, what was seen, both together
  `Part`, `Suite`              measurements that share a set-up, and the command line around them
  `Context`                    what a part gets: scratch folder, `--quick`, progress, what is wanted
  `pairs(...)`                 plain and measured work interleaved, the order alternating
  `spread(...)`                "p25..p75" of samples, for notes

A figure is a ratio to a plain operation or to a peer in the same run, as the median of interleaved
pairs. May not know what is measured. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import shutil
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

import numpy as np

OUT = Path(__file__).parent / "out"
NOTE_WIDTH = 110


@dataclass(frozen=True)
class Bar:
    """A figure's name, its unit, and the bound it is held to: exactly one of the two."""

    name: str
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"{self.name}: needs either at_most or at_least")

    def holds(self, value: float) -> bool:
        """Whether `value` keeps the bound; a value that is no number never does."""
        if self.at_most is not None:
            return value <= self.at_most
        return self.at_least is not None and value >= self.at_least

    @property
    def text(self) -> str:
        """For people."""
        return f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"


@dataclass(frozen=True)
class Reading:
    """What a part saw. `note`: spread, size of the sample, the baseline, the peer's figure."""

    name: str
    value: float
    note: str


@dataclass(frozen=True)
class Figure:
    """A reading against its bar. `value`: NaN when the measurement failed; `note` then says why."""

    bar: Bar
    value: float
    note: str

    @property
    def holds(self) -> bool:
        return self.bar.holds(self.value)

    def as_json(self) -> dict[str, object]:
        bound = "at_most" if self.bar.at_most is not None else "at_least"
        return {
            "name": self.bar.name,
            "value": None if math.isnan(self.value) else rounded(self.value),
            "unit": self.bar.unit,
            bound: getattr(self.bar, bound),
            "holds": self.holds,
            "note": self.note,
        }


class Context:
    """Handed to a part. `work` is a scratch folder on a real disk, removed at the end."""

    def __init__(self, work: Path, wanted: frozenset[str], is_quick: bool) -> None:
        self.work = work
        self.is_quick = is_quick
        self._wanted = wanted
        self._start = time.monotonic()

    def wants(self, name: str) -> bool:
        """Whether figure `name` was asked for."""
        return name in self._wanted

    def several(self, full: int, quick: int) -> int:
        """How many samples: `quick` under --quick."""
        return quick if self.is_quick else full

    def step(self, text: str) -> None:
        """Say what is going on; long steps name themselves before they start."""
        print(f"  [{time.monotonic() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def folder(self, name: str) -> Path:
        """A new empty folder below `work`."""
        path = self.work / name
        path.mkdir(parents=True)
        return path


@dataclass(frozen=True)
class Part:
    """Figures measured by one function over one set-up; it skips what is not wanted."""

    title: str
    bars: tuple[Bar, ...]
    measure: Callable[[Context], Iterable[Reading]]


def single(measure: Callable[[Context], Reading], bar: Bar) -> Part:
    """A part of one figure."""
    return Part(bar.name, (bar,), lambda context: [measure(context)])


# ---------------------------------------------------------------------- samples


def rounded(value: float, digits: int = 4) -> float:
    """`value` with `digits` significant digits."""
    return float(f"{value:.{digits}g}")


def spread(samples: Sequence[float], digits: int = 3) -> str:
    """The middle half of the samples as text."""
    p25, p75 = np.percentile(samples, [25, 75])
    return f"p25..p75 {p25:.{digits}g}..{p75:.{digits}g}"


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass
class Pairs:
    """Seconds of plain and measured work, side by side."""

    plain: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """measured / plain of each pair."""
        return [ours / plain for plain, ours in zip(self.plain, self.measured, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return float(np.median(self.ratios))

    def note(self, plain: str, size_bytes: int = 0) -> str:
        """Spread of the ratios, and both medians; `plain` describes the plain operation."""
        base, ours = float(np.median(self.plain)), float(np.median(self.measured))
        text = (
            f"{spread(self.ratios)} of {len(self.plain)} pairs; {ours * 1e3:.3g} ms "
            f"÷ {base * 1e3:.3g} ms ({plain}"
        )
        return text + (f", {size_bytes / base / 1e9:.2f} GB/s)" if size_bytes else ")")


def pairs(
    count: int,
    plain: Callable[[int], float],
    measured: Callable[[int], float],
    warm_up: int = 2,
) -> Pairs:
    """`count` pairs; each callable takes the number of its turn and returns the seconds that count.

    The plain work goes first in every other pair. The first `warm_up` pairs are not kept.
    """
    result = Pairs()
    for turn in range(warm_up + count):
        if turn % 2:
            ours = measured(turn)
            base = plain(turn)
        else:
            base = plain(turn)
            ours = measured(turn)
        if turn >= warm_up:
            result.plain.append(base)
            result.measured.append(ours)
    return result


# ---------------------------------------------------------------------- the machine


def machine(work: Path) -> dict[str, object]:
    """What the figures were taken on; `load_average` tells who else was busy."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1
        ),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "disk": _mount_of(work),
        "huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": list(os.getloadavg()),
    }


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return "unknown"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def _mount_of(path: Path) -> str:
    """Device and file system type that hold `path`."""
    best = ("", "unknown", "unknown")
    target = str(path.resolve())
    for line in Path("/proc/mounts").read_text().splitlines():
        device, place, kind = line.split()[:3]
        inside = target == place or target.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best[0]):
            best = (place, device, kind)
    return f"{best[2]} on {best[1]}"


# ---------------------------------------------------------------------- suites


class Suite:
    """A named list of parts, and the command that runs them."""

    def __init__(
        self, name: str, parts: Sequence[Part], setting: Mapping[str, object] | None = None
    ) -> None:
        """`setting`: what the JSON file tells beside the machine."""
        self.name = name
        self.setting = dict(setting or {})
        self.parts = tuple(parts)
        self.bars = {bar.name: bar for part in parts for bar in part.bars}
        if len(self.bars) != sum(len(part.bars) for part in parts):
            raise ValueError(f"suite {name}: a figure's name occurs twice")

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run from the command line; 1 when something could not be measured. A miss is no error."""
        parser = argparse.ArgumentParser(prog=f"bench.{self.name}")
        parser.add_argument("--only", nargs="+", metavar="NAME", choices=sorted(self.bars))
        parser.add_argument("--quick", action="store_true", help="fewer samples; to try the suite")
        parser.add_argument("--out", type=Path, default=OUT, help="folder of the JSON file")
        options = parser.parse_args(arguments)
        wanted = frozenset(options.only or self.bars)
        with workspace(options.out / "work") as work:
            before = machine(work)
            figures = self.run(Context(work, wanted, options.quick), wanted)
            facts = {**before, "load_average_after": list(os.getloadavg())}
        write_json(options.out, self.name, facts | self.setting, figures)
        print(table(facts, figures))
        print(f"figures: {len(figures)}, hold: {sum(figure.holds for figure in figures)}")
        return int(any(math.isnan(figure.value) for figure in figures))

    def run(self, context: Context, wanted: frozenset[str]) -> list[Figure]:
        """Every wanted figure, in the order of the bars; a part that fails costs only its own."""
        seen: dict[str, Reading] = {}
        failures: dict[str, str] = {}
        for part in self.parts:
            names = [bar.name for bar in part.bars if bar.name in wanted]
            if not names:
                continue
            context.step(part.title)
            try:
                for reading in part.measure(context):
                    seen[reading.name] = reading
                    context.step(f"{reading.name}: {rounded(reading.value):g}")
            except Exception as error:  # noqa: BLE001 - told below; other parts still count
                traceback.print_exc()
                reason = f"failed: {type(error).__name__}: {error}"
                failures.update((name, reason) for name in names if name not in seen)
        return [
            self._figure(name, seen, failures.get(name, "failed: not measured"))
            for name in self.bars
            if name in wanted
        ]

    def _figure(self, name: str, seen: dict[str, Reading], failure: str) -> Figure:
        reading = seen.get(name)
        if reading is None:
            return Figure(self.bars[name], math.nan, failure)
        return Figure(self.bars[name], reading.value, reading.note)


@contextlib.contextmanager
def workspace(parent: Path) -> Iterator[Path]:
    """A scratch folder of this process, removed at the end, also on SIGTERM; dead runs' go too."""
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.iterdir():
        if old.name.isdigit() and not Path("/proc", old.name).exists():
            shutil.rmtree(old, ignore_errors=True)
    path = parent / str(os.getpid())
    path.mkdir()
    previous = signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        yield path
    finally:
        signal.signal(signal.SIGTERM, previous)
        shutil.rmtree(path, ignore_errors=True)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Leave through every `finally`, so that daemons and files go."""
    sys.exit(128 + number)


def write_json(
    folder: Path, suite: str, facts: dict[str, object], figures: Iterable[Figure]
) -> None:
    """`folder`/`suite`.json, replaced as a whole."""
    body = {
        "suite": suite,
        "machine": facts,
        "figures": [figure.as_json() for figure in figures],
    }
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{suite}.json.new"
    draft.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n")
    draft.replace(folder / f"{suite}.json")


def table(facts: dict[str, object], figures: Sequence[Figure]) -> str:
    """For people: a line a figure, its note below."""
    lines = [", ".join(f"{key} {value}" for key, value in facts.items()), ""]
    width = max((len(figure.bar.name) for figure in figures), default=0)
    for figure in figures:
        value = "not measured" if math.isnan(figure.value) else f"{rounded(figure.value):g}"
        verdict = "holds" if figure.holds else "MISSES"
        unit = figure.bar.unit
        lines.append(
            f"{figure.bar.name:<{width}}  {value:>9} {unit:<10} {figure.bar.text:<9} {verdict}"
        )
        lines.append(textwrap.indent(textwrap.fill(figure.note, NOTE_WIDTH), "    "))
    return "\n".join(lines)
