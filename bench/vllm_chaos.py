"""Eight requests at a time while the daemon is killed, stopped, slowed or its disk damaged.

Primitives: `PART`, `run_schedules`. One engine for all schedules; answers are compared with those
of an engine that never met trouble.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.daemons import DaemonProcess
from bench.harness import Bar, Context, Part, Reading

REQUESTS = 8
PROMPTS = 12
TOKENS = 300
NEW_TOKENS = 12
FINISH_SECONDS = 120.0
"""No request takes so long, whatever the daemon does; the machine may be busy."""
SETTINGS = {
    "host.bytes": "32MiB",
    "host.region_bytes": "16MiB",
    "host.slab_bytes": "2MiB",
    "nvme.bytes_max": "256MiB",
    "nvme.segment_bytes": "16MiB",
    "nvme.free_bytes_min": "1MiB",
}
TROUBLES = ("kill", "stop", "pauses", "damage", "restart", "clear", "none")
BARS = (
    Bar("hang_free_run", "schedules", at_least=40),
    Bar("hang_free_unfinished", "requests", at_most=0),
    Bar("hang_free_wrong", "answers", at_most=0),
)


def _damage(daemon: DaemonProcess, draw: random.Random) -> None:
    for segment in sorted((daemon.folder / "data" / "segments").glob("*.seg")):
        with segment.open("r+b") as file:
            for _ in range(20):
                file.seek(draw.randrange(max(segment.stat().st_size, 1)))
                file.write(b"\xff" * 64)


class _Trouble:
    """What happens to the daemon while requests run; afterwards it serves again."""

    def __init__(self, daemon: DaemonProcess, kind: str, draw: random.Random) -> None:
        self._daemon = daemon
        self._kind = kind
        self._draw = draw
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        daemon, pause = self._daemon, self._draw.uniform(0.0, 0.6)
        self._over.wait(pause)
        if self._kind in ("kill", "damage"):
            daemon.kill()
            if self._kind == "damage":
                _damage(daemon, self._draw)
            self._over.wait(self._draw.uniform(0.0, 0.5))
            daemon.start()
        elif self._kind == "restart":
            daemon.stop()
            daemon.start()
        elif self._kind == "stop":
            os.kill(daemon.pid, signal.SIGSTOP)
            self._over.wait(self._draw.uniform(0.5, 3.0))
            os.kill(daemon.pid, signal.SIGCONT)
        elif self._kind == "pauses":
            until = time.monotonic() + self._draw.uniform(0.5, 2.0)
            while time.monotonic() < until and not self._over.is_set():
                os.kill(daemon.pid, signal.SIGSTOP)
                self._over.wait(0.05)
                os.kill(daemon.pid, signal.SIGCONT)
                self._over.wait(0.02)
        elif self._kind == "clear":
            from kvstore.client import KVClient

            with KVClient(daemon.socket, attach=False) as client:
                client.clear_all()


def run_schedules(
    context: Context, count: int, seed: int = 1
) -> tuple[int, int, int, dict[str, float]]:
    """(schedules run, requests not finished in time, wrong answers, what the connector counted)."""
    from bench.vllm_engine import Engine, prompt, tiny_llama

    folder = context.work / "chaos"
    folder.mkdir()
    draw = random.Random(seed)
    prompts = [prompt(7, 100 * (at % 3)) + prompt(900 + at, TOKENS) for at in range(PROMPTS)]
    unfinished = wrong = 0
    with DaemonProcess(Path(folder), SETTINGS) as daemon:
        extra = {"lookup_seconds": 0.5, "load_seconds": 1.0, "suppress_seconds": 1.0}
        with Engine(
            tiny_llama(context.work / "chaos-llama"),
            daemon.socket,
            extra,
            kv_cache_memory_bytes=6 << 20,
            max_num_batched_tokens=512,
            max_model_len=1024,
        ) as engine:
            engine.connected()
            oracle = [engine.cold(tokens, new_tokens=NEW_TOKENS).tokens for tokens in prompts]
            for _ in range(count):
                engine.connected()  # else most schedules meet no daemon at all
                chosen = [draw.randrange(PROMPTS) for _ in range(REQUESTS)]
                engine.scheduler._may_layerwise = draw.random() < 0.5
                if draw.random() < 0.7:
                    engine.forget()
                began = time.monotonic()
                with _Trouble(daemon, draw.choice(TROUBLES), draw):
                    answers = engine.run([prompts[at] for at in chosen], new_tokens=NEW_TOKENS)
                seconds = time.monotonic() - began
                unfinished += REQUESTS * (seconds > FINISH_SECONDS)
                unfinished += sum(answer.reason != "length" for answer in answers)
                wrong += sum(
                    answer.tokens != oracle[at] for answer, at in zip(answers, chosen, strict=True)
                )
            counted = {
                metric.name.removeprefix("vllm:kvstore_"): float(metric.value)
                for metric in engine.llm.get_metrics()
                if metric.name.startswith("vllm:kvstore_")
            }
    return count, unfinished, wrong, counted


def _measure(context: Context) -> Iterator[Reading]:
    run, unfinished, wrong, counted = run_schedules(context, context.several(40, 8))
    told = ("loads", "loads_failed", "lookups_late", "saved_blocks", "refused_blocks")
    note = f"{REQUESTS} requests each, {', '.join(TROUBLES)}; " + ", ".join(
        f"{name} {counted.get(name, 0):.0f}" for name in told
    )
    yield Reading("hang_free_run", run, note)
    yield Reading("hang_free_unfinished", unfinished, f"of {run * REQUESTS} requests")
    yield Reading("hang_free_wrong", wrong, f"of {run * REQUESTS} answers")


PART = Part("a daemon in trouble", BARS, _measure)
