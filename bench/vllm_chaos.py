"""Eight requests at a time while the daemon is killed, stopped, slowed or its disk damaged.

Primitives: `PART`, `run_schedules`; as many as wanted: `python -m bench.vllm_chaos COUNT [SEED]`.
One engine for all schedules; answers are compared with those of an engine that never met trouble.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bench.daemons import DaemonProcess
from bench.harness import Bar, Context, Part, Reading

if TYPE_CHECKING:
    from bench.vllm_engine import Engine

REQUESTS = 8
PROMPTS = 12
TOKENS = 300
NEW_TOKENS = 12
FINISH_SECONDS = 120.0
"""No request takes so long, whatever the daemon does; the machine may be busy."""
HANG_SECONDS = 4 * FINISH_SECONDS
"""An engine that is not back by then never will be: the process ends and shows where it stands."""
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


@dataclass
class Ran:
    """What came of some schedules. `counted`: the connector's counters."""

    schedules: int = 0
    unfinished: int = 0
    wrong: int = 0
    counted: dict[str, float] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return self.schedules * REQUESTS

    def __str__(self) -> str:
        told = ("loads", "loads_failed", "lookups_late", "saved_blocks", "refused_blocks")
        return f"{REQUESTS} requests each, {', '.join(TROUBLES)}; " + ", ".join(
            f"{name} {self.counted.get(name, 0):.0f}" for name in told
        )


def run_schedules(folder: Path, count: int, seed: int, step: Callable[[str], None]) -> Ran:
    """`folder`: an empty one; `step`: told now and then how far it is."""
    from bench.vllm_engine import Engine, prompt, tiny_llama

    draw = random.Random(seed)
    prompts = [prompt(7, 100 * (at % 3)) + prompt(900 + at, TOKENS) for at in range(PROMPTS)]
    ran = Ran()
    with DaemonProcess(folder, SETTINGS) as daemon:
        extra = {
            "lookup_seconds": 0.5,
            "load_seconds": 1.0,
            "suppress_seconds": 1.0,
            "plan": True,
        }
        with Engine(
            tiny_llama(folder / "llama"),
            daemon.socket,
            extra,
            kv_cache_memory_bytes=6 << 20,
            max_num_batched_tokens=512,
            max_model_len=1024,
        ) as engine:
            engine.connected()
            oracle = [engine.cold(tokens, new_tokens=NEW_TOKENS).tokens for tokens in prompts]
            for at in range(count):
                if at % 20 == 0:
                    step(f"schedule {at}: {ran.unfinished} unfinished, {ran.wrong} wrong")
                faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
                _schedule(engine, daemon, draw, prompts, oracle, ran)
                faulthandler.cancel_dump_traceback_later()
            ran.counted = {
                metric.name.removeprefix("vllm:kvstore_"): float(metric.value)
                for metric in engine.llm.get_metrics()
                if metric.name.startswith("vllm:kvstore_")
            }
    return ran


def _schedule(
    engine: Engine,
    daemon: DaemonProcess,
    draw: random.Random,
    prompts: Sequence[list[int]],
    oracle: Sequence[tuple[int, ...]],
    ran: Ran,
) -> None:
    engine.connected()  # else most schedules meet no daemon at all
    chosen = [draw.randrange(PROMPTS) for _ in range(REQUESTS)]
    engine.scheduler._may_layerwise = draw.random() < 0.5
    if draw.random() < 0.7:
        engine.forget()
    began = time.monotonic()
    with _Trouble(daemon, draw.choice(TROUBLES), draw):
        answers = engine.run([prompts[at] for at in chosen], new_tokens=NEW_TOKENS)
    seconds = time.monotonic() - began
    ran.schedules += 1
    ran.unfinished += REQUESTS * (seconds > FINISH_SECONDS)
    ran.unfinished += sum(answer.reason != "length" for answer in answers)
    ran.wrong += sum(
        answer.tokens != oracle[at] for answer, at in zip(answers, chosen, strict=True)
    )


def _measure(context: Context) -> Iterator[Reading]:
    ran = run_schedules(context.folder("chaos"), context.several(40, 8), 1, context.step)
    yield Reading("hang_free_run", ran.schedules, str(ran))
    yield Reading("hang_free_unfinished", ran.unfinished, f"of {ran.requests} requests")
    yield Reading("hang_free_wrong", ran.wrong, f"of {ran.requests} answers")


PART = Part("a daemon in trouble", BARS, _measure)

if __name__ == "__main__":
    many, seed = map(int, [*sys.argv[1:], "1"][:2])
    with TemporaryDirectory() as place:
        done = run_schedules(Path(place), many, seed, print)
        print(
            f"{done.schedules} schedules, {done.unfinished} of {done.requests} requests unfinished"
        )
        print(f"{done.wrong} answers wrong; {done}")
