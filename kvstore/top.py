"""`kvstore top`: what a daemon holds and does, live.

Primitives:
  `frame(tree, before, call_seconds)`   one picture of a statistics tree; rates since `before`
  `show(read, console, once)`           frames once a second until Ctrl-C, or one of them

Reads statistics and nothing else. Rates are differences of counters over the daemon's own uptime,
so that a slow terminal bends none; none is shown across two lives of a daemon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvstore.counters import HIT_TIERS

PERIOD_SECONDS = 1.0
UNKNOWN = "-"

Tree = Mapping[str, Any]


class Rates:
    """Growth per second of one daemon life between two statistics trees."""

    def __init__(self, tree: Tree, before: Tree | None) -> None:
        self._now = tree["counters"]
        self._then: Mapping[str, int] = {}
        self._seconds = 0.0
        if before is not None and before["boot_id"] == tree["boot_id"]:
            self._then = before["counters"]
            self._seconds = tree["uptime_seconds"] - before["uptime_seconds"]

    def of(self, *names: str) -> float | None:
        """Sum of the counters' growth per second; None without a frame before."""
        if self._seconds <= 0:
            return None
        growth: int = sum(self._now[name] - self._then[name] for name in names)
        return growth / self._seconds

    def total(self, *names: str) -> int:
        """Sum of the counters since the daemon started."""
        total: int = sum(self._now[name] for name in names)
        return total


def frame(tree: Tree, before: Tree | None, call_seconds: float) -> Group:
    """One picture. `before`: an earlier tree, or None; `call_seconds`: what this Stat took."""
    rates = Rates(tree, before)
    return Group(
        _head(tree),
        Text(),
        _tiers(tree),
        Text(),
        _hits(tree, rates),
        Text(),
        _flows(tree, rates),
        Text(),
        _leases(tree),
        _latencies(tree, call_seconds),
    )


def show(read: Callable[[], Tree], console: Console, *, once: bool) -> None:
    """Frames of what `read` returns, until Ctrl-C. Errors of `read` leave after the screen is
    restored."""
    tree, seconds = _timed(read)
    if once:
        console.print(frame(tree, None, seconds))
        return
    try:
        with Live(frame(tree, None, seconds), console=console, screen=True) as live:
            while True:
                time.sleep(PERIOD_SECONDS)
                before = tree
                tree, seconds = _timed(read)
                live.update(frame(tree, before, seconds), refresh=True)
    except KeyboardInterrupt:
        return


def _timed(read: Callable[[], Tree]) -> tuple[Tree, float]:
    start = time.perf_counter()
    tree = read()
    return tree, time.perf_counter() - start


# ---------------------------------------------------------------------- pieces of a frame


def _head(tree: Tree) -> Text:
    told = "; ".join([*tree["health"], *tree.get("remarks", ())])
    return Text.assemble(
        ("kvstore ", "bold"),
        f"{tree['version']} at {tree['socket']}, up {_duration(tree['uptime_seconds'])}, "
        f"{tree['clients']['attached']} clients, {tree['blocks']} blocks in "
        f"{len(tree['namespaces'])} namespaces, health: ",
        (told, "green" if tree["health"] == ["ok"] else "bold red"),
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table


def _tiers(tree: Tree) -> RenderableType:
    table = _table("tiers", "tier", "used", "of", "share", "blocks", "beside")
    if (host := tree["host"]) is not None:
        slabs = host["slabs"]
        classes = slabs["classes"]
        used = sum(kind["ready"] * kind["slot_bytes"] for kind in classes)
        moving = sum(kind["filling"] + kind["draining"] for kind in classes)
        held = sum(kind["quarantined"] for kind in classes)
        ready = sum(kind["ready"] for kind in classes)
        beside = f"{moving} in motion, {held} quarantined"
        table.add_row("host", *_fill(used, slabs["bytes_total"]), str(ready), beside)
    if (nvme := tree["nvme"]) is not None:
        beside = f"{tree['write_behind_queued_blocks']} waiting, {nvme['mode']} I/O"
        filled = _fill(nvme["bytes_on_disk"], nvme["bytes_allowed"])
        table.add_row("nvme", *filled, str(nvme["slots_ready"]), beside)
    return table


def _fill(used: int, most: int) -> tuple[str, str, str]:
    return _size(used), _size(most), f"{used / most:.0%}" if most else UNKNOWN


def _hits(tree: Tree, rates: Rates) -> RenderableType:
    table = _table("asked for, tokens", "", "per second", "since start", "share")
    rows = {f"hits on {tier}": (f"hit_tokens:{tier}",) for tier in HIT_TIERS if tree.get(tier)} | {
        "misses": tuple(name for name in tree["counters"] if name.startswith("missed_tokens:"))
    }
    asked = sum(rates.total(*names) for names in rows.values())
    for title, names in rows.items():
        count, rate = rates.total(*names), rates.of(*names)
        share = f"{count / asked:.1%}" if asked else UNKNOWN
        table.add_row(title, UNKNOWN if rate is None else _count(rate), _count(count), share)
    return table


def _flows(tree: Tree, rates: Rates) -> RenderableType:
    table = _table("flows", "", "per second", "since start")
    dropped = tuple(name for name in tree["counters"] if name.startswith("dropped_blocks:"))
    skipped = tuple(name for name in tree["counters"] if name.startswith("write_skipped_blocks:"))
    for title, write, names in (
        ("prefill saved (estimate)", _seconds, ("saved_prefill_us",)),
        ("stored, blocks", _count, ("store_blocks:stored",)),
        ("refused for lack of room, blocks", _count, ("store_blocks:no_room",)),
        ("nvme to host", _size, ("bytes_promoted",)),
        ("host to nvme", _size, ("bytes_written_behind",)),
        ("not written to nvme, blocks", _count, skipped),
        ("dropped, blocks", _count, dropped),
    ):
        rate = rates.of(*names)
        table.add_row(title, UNKNOWN if rate is None else write(rate), write(rates.total(*names)))
    return table


def _leases(tree: Tree) -> Text:
    leases, writes = tree["leases"], tree["reservations"]
    return Text(
        f"leases: {leases['active']} on {leases['blocks']} blocks, {leases['expired']} expired; "
        f"reservations: {writes['active']} of {writes['slots']} slots, "
        f"{writes['quarantined_slots']} slots quarantined"
    )


def _latencies(tree: Tree, call_seconds: float) -> Text:
    lag = tree["loop_lag"]
    return Text(
        f"latencies: Stat call {call_seconds * 1e3:.1f} ms; loop lag P50 {lag['p50_ms']:.1f}, "
        f"P99 {lag['p99_ms']:.1f}, worst {lag['max_ms']:.1f} ms"
    )


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _seconds(microseconds: float) -> str:
    return f"{microseconds / 1e6:,.1f} s"


def _size(value: float) -> str:
    """Bytes with three digits or so."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
