"""The figure of bench/replay_daemon.py: decisions in which daemon and replay differ."""

from __future__ import annotations

from collections.abc import Iterable

from bench.harness import Bar, Context, Part, Reading
from bench.replay_daemon import differences
from bench.replay_single import VALUE
from bench.replay_traces import find

_BAR = Bar("daemon_vs_simulator_differences", "decisions", at_most=0)
TOUCHES = 20_000


def _measure(context: Context) -> Iterable[Reading]:
    trace = find("conversation").first(context.several(TOUCHES, 2_000))
    found = differences(trace, VALUE, context.folder("same"))
    yield Reading(
        _BAR.name,
        found.differences,
        f"{found.touches:,} touches, {found.requests:,} hits and residents after every 64th, "
        f"{found.evicted_blocks:,} evictions; {found.wrong_bytes} blocks with wrong bytes",
    )


PART = Part("a real daemon beside the replay", (_BAR,), _measure)
