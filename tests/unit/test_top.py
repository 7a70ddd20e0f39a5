"""`kvstore top`: what a frame tells, rates between two of them, and how it ends."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
from rich.console import Console

from kvstore import cli, top
from kvstore.counters import Counters
from kvstore.errors import PeerGone

MIB = 1 << 20


def tree(**changes: Any) -> dict[str, Any]:
    """A small statistics tree, as the daemon gives it."""
    slots = {"filling": 2, "ready": 32, "draining": 1, "quarantined": 4}
    made = {
        "version": "9.9",
        "boot_id": "a1",
        "uptime_seconds": 3723.0,
        "health": ["ok"],
        "remarks": [],
        "socket": "/run/x.sock",
        "clients": {"attached": 3},
        "blocks": 77,
        "namespaces": [{"block_tokens": 128}],
        "host": {
            "slabs": {"bytes_total": 64 * MIB, "classes": [{"slot_bytes": MIB, **slots}]},
        },
        "gpu": None,
        "nvme": {
            "bytes_on_disk": 25 * MIB,
            "bytes_allowed": 100 * MIB,
            "slots_ready": 24,
            "mode": "direct",
        },
        "leases": {"active": 5, "blocks": 41, "expired": 6},
        "reservations": {"active": 7, "slots": 8, "quarantined_slots": 9},
        "write_behind_queued_blocks": 11,
        "loop_lag": {"p50_ms": 1.25, "p99_ms": 2.5, "max_ms": 33.0},
        "counters": Counters().snapshot(),
    }
    return {**made, **changes}


def later(before: dict[str, Any], seconds: float, **grown: int) -> dict[str, Any]:
    """The tree after `seconds`; counters grown by name, `__` for the colon of a label."""
    after = copy.deepcopy(before)
    after["uptime_seconds"] += seconds
    for name, amount in grown.items():
        after["counters"][name.replace("__", ":")] += amount
    return after


def lines(now: dict[str, Any], before: dict[str, Any] | None = None) -> dict[str, str]:
    """The frame as text, a line by its first word or words before two spaces."""
    console = Console(file=io.StringIO(), width=120)
    console.print(top.frame(now, before, 0.0042))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return {line.split("  ")[0].split(":")[0]: " ".join(line.split()) for line in text.splitlines()}


def test_a_frame_tells_what_is_there() -> None:
    grown = {"hit_tokens__host": 512, "hit_tokens__nvme": 128, "missed_tokens__absent": 640}
    shown = lines(later(tree(), 0, **grown, saved_prefill_us=2_500_000))
    head = next(line for line in shown.values() if line.startswith("kvstore 9.9"))
    assert "up 1:02:03, 3 clients, 77 blocks in 1 namespaces" in head
    assert shown["host"] == "host 32.0 MiB 64.0 MiB 50% 32 3 in motion, 4 quarantined"
    assert shown["nvme"] == "nvme 25.0 MiB 100.0 MiB 25% 24 11 waiting, direct I/O"
    assert shown["hits on host"] == "hits on host - 512 40.0%"
    assert shown["misses"] == "misses - 640 50.0%"
    assert shown["prefill saved (estimate)"] == "prefill saved (estimate) - 2.5 s"
    assert shown["leases"].startswith("leases: 5 on 41 blocks, 6 expired; reservations: 7 of 8")
    assert "Stat call 4.2 ms" in shown["latencies"]
    assert "P50 1.2, P99 2.5, worst 33.0 ms" in shown["latencies"]


def test_rates_are_growth_over_the_daemons_own_time() -> None:
    before = tree()
    now = later(before, 2.0, hit_tokens__nvme=768, bytes_promoted=4 * MIB, dropped_blocks__io=8)
    shown = lines(now, before)
    assert shown["hits on nvme"].split()[3] == "384"
    assert shown["nvme to host"] == "nvme to host 2.0 MiB 4.0 MiB"
    assert shown["dropped, blocks"] == "dropped, blocks 4 8"


def test_no_rates_across_two_lives() -> None:
    before = later(tree(), 0, store_blocks__stored=100)
    shown = lines(tree(boot_id="b2", uptime_seconds=5000.0), before)
    assert shown["stored, blocks"] == "stored, blocks - 0"


def test_tiers_may_be_off_and_ill_health_is_told() -> None:
    shown = lines(tree(host=None, nvme=None, health=["disk full"], remarks=["slow"]))
    assert not {"host", "nvme", "hits on host", "hits on nvme"} & set(shown)
    assert any("health: disk full; slow" in line for line in shown.values())


class Screen:
    """A terminal for `show`; reads end with what `ends` raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: BaseException) -> None:
        self.reads = 0
        self._ends = ends
        self.console = Console(
            file=io.StringIO(), force_terminal=True, width=120, _environ={"TERM": "xterm"}
        )
        monkeypatch.setattr(top, "PERIOD_SECONDS", 0.001)

    def read(self) -> dict[str, Any]:
        self.reads += 1
        if self.reads == 4:
            raise self._ends
        return later(tree(), float(self.reads))


def test_ctrl_c_ends_it_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch, KeyboardInterrupt())
    top.show(screen.read, screen.console, once=False)
    assert screen.reads == 4
    written = screen.console.file.getvalue()  # type: ignore[attr-defined]
    assert written.rindex("\x1b[?1049l") > written.rindex("\x1b[?1049h"), "screen restored"


def test_a_daemon_that_goes_away_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch, PeerGone("away"))
    with pytest.raises(PeerGone):
        top.show(screen.read, screen.console, once=False)
    written = screen.console.file.getvalue()  # type: ignore[attr-defined]
    assert written.rindex("\x1b[?1049l") > written.rindex("\x1b[?1049h"), "screen restored"


def test_the_command_without_a_daemon(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["top", "--once", "--socket", str(tmp_path / "s.sock")]) == cli.EXIT_AWAY
    error = capsys.readouterr().err
    assert error.startswith("kvstore: no daemon answers at")
    assert len(error.splitlines()) == 1
