"""One vLLM engine in a process of its own, told what to run line by line.

Primitives:
  `EngineProcess`   the parent's end: `run`, `first_token`, `forget`, `hooks`
  `main`            the child's end

Two engines with and without the connector live side by side and take turns, so that a busy machine
is equally busy for both. The child counts the processor time of every connector hook, without that
of the clock.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
MARK = "REPLY "
DTYPE = "bfloat16" if "avx512f" in Path("/proc/cpuinfo").read_text() else "float32"
"""Other processors emulate bfloat16 at a fifth of the speed of float32."""
SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
)
ASKING = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc")
WORKER_HOOKS = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)


class EngineProcess:
    """Made with the options of `bench.vllm_engine.Engine`, which must be plain values."""

    def __init__(self, model: Path, socket: str | None, **options: Any) -> None:
        self._log = (Path(os.environ.get("TMPDIR", "/tmp")) / f"vllm-{os.getpid()}.log").open("a")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.vllm_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
        )
        self.ask("start", model=str(model), socket=socket, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def ask(self, verb: str, **values: Any) -> Any:
        """One command and its answer. Raises RuntimeError when the engine ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"verb": verb, **values}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                reply = json.loads(line.removeprefix(MARK))
                if "error" in reply:
                    raise RuntimeError(f"{verb}: {reply['error']}")
                return reply
        raise RuntimeError(f"{verb}: the engine ended, see {self._log.name}")

    def run(
        self, prompts: Sequence[tuple[int, int]], new_tokens: int, shared: int = 0
    ) -> dict[str, Any]:
        """Prompts (number, tokens) at once, `shared` tokens of each the same; seconds, cached
        tokens, digest of all answers."""
        reply: dict[str, Any] = self.ask(
            "run", prompts=list(prompts), new_tokens=new_tokens, shared=shared
        )
        return reply

    def first_token(self, number: int, tokens: int, salt: str = "") -> tuple[float, int]:
        """(seconds from request to first token, tokens that were not computed)."""
        reply = self.ask("first_token", number=number, tokens=tokens, salt=salt)
        return reply["seconds"], reply["cached"]

    def forget(self) -> None:
        """What was computed is stored; the engine's own cache is empty."""
        self.ask("forget")

    def wait_life(self, boot_id: int) -> int:
        """Until both halves are attached to another daemon life than `boot_id`; its id."""
        return int(self.ask("wait_life", boot_id=boot_id)["boot_id"])

    def forget_all(self) -> None:
        """As `forget`, and the connector's cache too, as far as its reset reaches."""
        self.ask("forget_all")

    def slow_loads(self, seconds: float) -> None:
        """Every copy of a load takes so much longer from now on."""
        self.ask("slow_loads", seconds=seconds)

    def hooks(self) -> dict[str, Any]:
        """Processor seconds a step since the last call: `scheduler` and `worker` lists, `steps`
        seconds, `collected` where Python's collector ran inside a hook, `idle` for steps that
        computed nothing."""
        reply: dict[str, Any] = self.ask("hooks")
        return reply


# ---------------------------------------------------------------------- the child


class _Watch:
    """Adds up what the connector's hooks take in each step."""

    def __init__(self, engine: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.rows: list[tuple[float, float, float, bool, bool]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._in_hook = False
        core = engine.core
        self._wrap(core.scheduler.connector, SCHEDULER_HOOKS, "scheduler")
        self._wrap(get_kv_transfer_group(), WORKER_HOOKS, "worker")
        step = core.step_fn
        gc.callbacks.append(self._collects)

        def watched() -> Any:
            began = time.perf_counter()
            result = step()
            computed = bool(result[1])
            seconds = time.perf_counter() - began
            now = self._now
            if computed or not now["asked"]:  # empty steps that only wait are of interest
                was_collected = bool(now["collected"])
                self.rows.append(
                    (now["scheduler"], now["worker"], seconds, computed, was_collected)
                )
            now.clear()
            return result

        core.step_fn = watched

    def _wrap(self, connector: Any, names: Sequence[str], side: str) -> None:
        for name in names:
            hook = getattr(connector, name)

            def timed(*arguments: Any, _hook: Any = hook, _name: str = name, **more: Any) -> Any:
                # The clock is a system call: dear where those are, and not the hook's doing.
                clock = time.thread_time()
                self._in_hook = True
                began = time.thread_time()
                try:
                    return _hook(*arguments, **more)
                finally:
                    self._in_hook = False
                    self._now[side] += time.thread_time() - began - (began - clock)
                    self._now["asked"] += _name in ASKING

            setattr(connector, name, timed)

    def _collects(self, phase: str, _: dict[str, int]) -> None:
        """What it looks at is mostly the engine's."""
        self._now["collected"] += self._in_hook and phase == "start"

    def take(self) -> dict[str, Any]:
        rows, self.rows = self.rows, []
        busy = [row for row in rows if row[3]]
        idle = [row for row in rows if not row[3]]
        return {
            "scheduler": [row[0] for row in busy],
            "worker": [row[1] for row in busy],
            "steps": [row[2] for row in busy],
            "collected": [row[4] for row in busy],
            "idle": [row[0] + row[1] for row in idle],
        }


def _answer(engine: Any, watch: _Watch | None, order: dict[str, Any]) -> dict[str, Any]:
    from bench.vllm_engine import prompt

    verb = order["verb"]
    if verb == "run":
        head = prompt(0, order["shared"])
        prompts = [head + prompt(at, count)[len(head) :] for at, count in order["prompts"]]
        began = time.perf_counter()
        answers = engine.run(prompts, new_tokens=order["new_tokens"])
        seconds = time.perf_counter() - began
        tokens = [answer.tokens for answer in answers]
        return {
            "seconds": seconds,
            "cached": sum(answer.cached for answer in answers),
            "digest": hash(tuple(tokens)),
        }
    if verb == "first_token":
        tokens = prompt(order["number"], order["tokens"])
        began = time.perf_counter()
        answer = engine.one(tokens, new_tokens=1, salt=order["salt"] or None)
        return {"seconds": time.perf_counter() - began, "cached": answer.cached}
    if verb == "forget":
        if watch is not None:
            engine.drain()
        engine.forget()
        return {}
    if verb == "forget_all":
        until = time.monotonic() + 60
        while not engine.llm.reset_prefix_cache(reset_connector=True):
            engine.llm.llm_engine.step()
            if time.monotonic() > until:
                raise TimeoutError("the engine does not let go of its blocks")
        return {}
    if verb == "wait_life":
        clients = (engine.scheduler._client, engine.worker._client)
        until = time.monotonic() + 60
        while any(client.boot_id in (0, order["boot_id"]) for client in clients):
            time.sleep(0.01)
            if time.monotonic() > until:
                raise TimeoutError("not attached to a new daemon life")
        return {"boot_id": clients[0].boot_id}
    if verb == "slow_loads":
        from engine_adapter.vllm_blocks import LanePages

        scatter = LanePages.scatter

        def slow(*arguments: Any) -> None:
            time.sleep(order["seconds"])
            scatter(*arguments)

        LanePages.scatter = slow  # type: ignore[method-assign]
        return {}
    if verb == "hooks":
        assert watch is not None, "without the connector there are no hooks"
        return watch.take()
    raise ValueError(verb)


def main() -> None:
    """Commands on stdin until it closes."""
    engine: Any = None
    watch: _Watch | None = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["verb"] == "start":
                from bench.vllm_engine import Engine

                engine = Engine(Path(order["model"]), order["socket"], **order["options"])
                if order["socket"]:
                    engine.connected()
                    watch = _Watch(engine)
                gc.collect()
                gc.freeze()  # as the engine's own process does: what it imported is not looked at
                reply: dict[str, Any] = {}
            else:
                reply = _answer(engine, watch, order)
        except Exception as error:  # noqa: BLE001 - told to the parent, who decides
            import traceback

            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(MARK + json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
