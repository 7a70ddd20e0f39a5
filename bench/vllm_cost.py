"""What the connector costs where it cannot help: hooks, steps, throughput of prompts that miss.

Primitives: `PART`. Tiny random Llama: its steps are so short that every microsecond shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench.daemons import DaemonProcess
from bench.harness import Bar, Context, Part, Reading, pairs, spread
from bench.vllm_child import DTYPE, EngineProcess

PROMPTS = 64
PAIRED = 16
"""Prompts a turn where both engines take turns: the shorter, the more alike is what both meet."""
TOKENS = 500
NEW_TOKENS = 16
HIT_TOKENS = 1900
BARS = (
    Bar("miss_overhead_hooks", "ratio", at_most=0.02),
    Bar("miss_overhead", "ratio", at_least=0.97),
    Bar("scheduler_hook_us_p99", "us", at_most=300),
    Bar("idle_step_us", "us", at_most=30),
)
DAEMON = {"host.bytes": "1GiB", "nvme.enabled": "false"}
OPTIONS = {"kv_cache_memory_bytes": 256 << 20, "max_num_batched_tokens": 2048, "dtype": DTYPE}


def _fresh(turn: int, count: int) -> list[tuple[int, int]]:
    """Prompts that nobody sent before."""
    first = 1_000_000 * count + 1000 * turn
    return [(first + at, TOKENS) for at in range(count)]


def _measure(context: Context) -> Iterator[Reading]:
    from bench.vllm_engine import tiny_llama

    model = tiny_llama(context.work / "llama")
    folder = context.work / "cost"
    folder.mkdir()
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(Path(folder), DAEMON))
        off = stack.enter_context(EngineProcess(model, None, **OPTIONS))
        on = stack.enter_context(
            EngineProcess(model, daemon.socket, extra={"layerwise": "never"}, **OPTIONS)
        )
        found = pairs(
            context.several(24, 4),
            lambda turn: off.run(_fresh(turn, PAIRED), NEW_TOKENS)["seconds"],
            lambda turn: on.run(_fresh(turn, PAIRED), NEW_TOKENS)["seconds"],
        )
        on.hooks()
        for turn in range(context.several(6, 2)):
            on.run(_fresh(turn, PROMPTS), NEW_TOKENS)
        seen = on.hooks()
        inside = sum(seen["scheduler"]) + sum(seen["worker"])
        share = inside / sum(seen["steps"])
        setting = f"{PROMPTS} prompts of {TOKENS} tokens, none shared, {NEW_TOKENS} new each"
        yield Reading(
            "miss_overhead_hooks",
            share,
            f"{setting}: {inside:.3g} s of processor time in all hooks, saves included, ÷ "
            f"{sum(seen['steps']):.3g} s in {len(seen['steps'])} steps",
        )
        throughput = [1 / ratio for ratio in found.ratios]
        yield Reading(
            "miss_overhead",
            float(np.median(throughput)),
            f"{PAIRED} at a time: throughput on ÷ off, {spread(throughput)} of "
            f"{len(throughput)} pairs",
        )
        hooks = [second * 1e6 for second in seen["scheduler"]]
        both = zip(hooks, seen["collected"], strict=True)
        quiet = [value for value, is_collected in both if not is_collected]
        yield Reading(
            "scheduler_hook_us_p99",
            float(np.percentile(hooks, 99)),
            f"P50 {np.percentile(hooks, 50):.3g}, {len(hooks)} steps, {PROMPTS} requests queued at "
            f"once; in {sum(seen['collected'])} a collection of Python's fell into a hook, without "
            f"those P99 {np.percentile(quiet, 99):.3g}",
        )
        on.slow_loads(0.05)
        seen["idle"].clear()
        for turn in range(context.several(12, 4)):
            on.first_token(5_000_000 + turn, HIT_TOKENS)
            on.forget()
            on.hooks()
            on.first_token(5_000_000 + turn, HIT_TOKENS)
            seen["idle"] += on.hooks()["idle"]
        idle = [second * 1e6 for second in seen["idle"]]
        yield Reading(
            "idle_step_us",
            float(np.median(idle)),
            f"processor time of all hooks in steps that computed nothing while a load of "
            f"{HIT_TOKENS} tokens was pending; {spread(idle)} of {len(idle)} steps",
        )


PART = Part("hooks and misses, tiny Llama", BARS, _measure)
