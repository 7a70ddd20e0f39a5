"""`vllm serve` on Gemma 3 270M with and without the connector, under three workloads.

Primitives:
  `Server`   one server process on loopback; `complete`, `stream`, `counter`
  `PART`     three workloads: every prompt begins like an earlier one, half of them do, none does
  `draw`     the plot of what was measured last (`python -m bench.vllm_serve FILE.svg`)

Both servers live side by side and take turns, round by round, so that a busy machine is equally
busy for both. There are more shared prefixes than fit into the engine's own cache: it never hits.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from bench.daemons import DaemonProcess
from bench.harness import OUT, Bar, Context, Part, Reading
from bench.vllm_child import DTYPE

ROOT = Path(__file__).resolve().parent.parent
GEMMA = OUT / "models" / "gemma3-270m"
FOUND = OUT / "vllm_serve.json"
START_SECONDS_MAX = 420.0
ANSWER_SECONDS_MAX = 120.0
PREFIXES = 4
"""Requests of a round, a prefix each."""
PREFIX_TOKENS, TAIL_TOKENS, NEW_TOKENS = 512, 40, 16
CLIENTS = 2
OPTIONS = (
    *("--dtype", DTYPE, "--block-size", "128", "--max-model-len", "640"),
    *("--kv-cache-memory-bytes", str(56 << 20), "--no-disable-hybrid-kv-cache-manager"),
)
BARS = {
    "shared": Bar("serve_shared_ttft_p50", "ratio", at_most=0.4),
    "mixed": Bar("serve_mixed_ttft_p50", "ratio", at_most=1.05),
    "none": Bar("serve_none_outside", "ratios", at_most=0),
}
DAEMON = {"host.bytes": "1GiB", "nvme.enabled": "false"}
ROUNDS = {"shared": 3, "mixed": 3, "none": 6}
"""The last is about small differences."""
DRAWS = 1000
QUANTILES = (50, 95, 99)
Row = dict[str, float]
"""What one round, or all of them, showed: "throughput", "ttft_p50", ..., "itl_p99"."""
Round = tuple[float, list[list[float]]]
"""Seconds, and the times of every answer's pieces."""


class Server:
    """`socket`: the daemon's; None: no connector."""

    def __init__(self, model: Path, socket: Path | None, log: Path, *options: str) -> None:
        self.port, self.log = _free_port(), log
        command = [
            # `vllm serve` by its module: the package for CPUs has no metadata for the command.
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"),
            *("--skip-tokenizer-init", "--served-model-name", "m"),
            *options,
        ]
        if socket is not None:
            command += ["--kv-transfer-config", json.dumps(_transfer(socket))]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def serves(self) -> bool:
        """Raises AssertionError when the process ended."""
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
        try:
            self.call("/health")
        except OSError:
            return False
        return True

    def call(self, path: str, body: Any = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS_MAX) as reply:
            return str(reply.read().decode())

    def complete(self, tokens: Sequence[int], new_tokens: int = 8) -> list[int]:
        """Greedy answer, as token ids."""
        reply = self.call("/v1/completions", _body(tokens, new_tokens))
        (choice,) = json.loads(reply)["choices"]
        found: list[int] = choice["token_ids"]
        return found

    def stream(self, tokens: Sequence[int], new_tokens: int) -> list[float]:
        """Seconds from the request to each piece of its answer."""
        body = json.dumps({**_body(tokens, new_tokens), "stream": True})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS_MAX)
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        seen = [time.perf_counter() - began for line in reply if line.startswith(b"data: {")]
        connection.close()
        if len(seen) < new_tokens / 2:
            raise RuntimeError(f"an answer of {len(seen)} pieces, see {self.log}")
        return seen

    def counter(self, name: str) -> float:
        lines = [line for line in self.call("/metrics").splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _transfer(daemon: Path) -> dict[str, Any]:
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "engine_adapter.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # The machine is busy: patience, so that a hit is a hit.
        "kv_connector_extra_config": {"socket": str(daemon), "lookup_seconds": 20.0},
    }


def _body(tokens: Sequence[int], new_tokens: int) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": list(tokens),
        "max_tokens": new_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
    }


# ---------------------------------------------------------------------- workloads


def _prompt(kind: str, turn: int, at: int) -> list[int]:
    is_shared = kind == "shared" or (kind == "mixed" and at % 2 == 0)
    head = random.Random(f"{kind} {at}" if is_shared else f"{kind} {at} {turn}")
    tail = random.Random(f"tail {kind} {at} {turn}")
    tokens = [head.randrange(300, 200_000) for _ in range(PREFIX_TOKENS)]
    return tokens + [tail.randrange(300, 200_000) for _ in range(TAIL_TOKENS)]


def _round(server: Server, kind: str, turn: int) -> Round:
    prompts = [_prompt(kind, turn, at) for at in range(PREFIXES)]
    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        times = list(clients.map(lambda tokens: server.stream(tokens, NEW_TOKENS), prompts))
    return time.perf_counter() - began, times


def _row(rounds: Sequence[Round]) -> Row:
    """Throughput in tokens a second, the rest in seconds."""
    times = [one for _, answers in rounds for one in answers]
    row = {"throughput": sum(map(len, times)) / sum(seconds for seconds, _ in rounds)}
    gaps = np.concatenate([np.diff(one) for one in times])
    for name, values in (("ttft", [one[0] for one in times]), ("itl", gaps)):
        for quantile in QUANTILES:
            row[f"{name}_p{quantile}"] = float(np.percentile(values, quantile))
    return row


def _compare(context: Context, servers: dict[str, Server], kind: str) -> dict[str, Any]:
    """{"on": row, "off": row, "ratio": row, "low": row, "high": row} over all rounds."""
    rounds: dict[str, list[Round]] = {"on": [], "off": []}
    counters = [f"vllm:{name}_total" for name in ("kvstore_loaded_tokens", "prefix_cache_hits")]
    before = {name: [server.counter(one) for one in counters] for name, server in servers.items()}
    count = context.several(ROUNDS[kind], 1)
    for turn in range(-2, count):  # twice to store, and to meet all shapes
        context.step(f"{kind}: round {turn}")
        for name in sorted(servers, reverse=turn % 2 == 0):
            seen = _round(servers[name], kind, turn)
            if turn >= 0:
                rounds[name].append(seen)
    on, off = _row(rounds["on"]), _row(rounds["off"])
    low, high = _interval(rounds["on"], rounds["off"])
    hits = {
        f"{name}_{one}": server.counter(one) - before[name][at]
        for name, server in servers.items()
        for at, one in enumerate(counters)
    }
    return {
        "on": on,
        "off": off,
        "ratio": {name: on[name] / off[name] for name in on},
        "low": low,
        "high": high,
        "requests": PREFIXES * count,
        "tokens": hits,
    }


def _interval(on: Sequence[Round], off: Sequence[Round]) -> tuple[Row, Row]:
    """Where 95 % of the ratios lie that other rounds like these would show: drawn from them again
    and again, with replacement (Efron's bootstrap). Two clients make two kinds of TTFT, alone and
    behind a prefill: one request more of a kind moves the P50 from one to the other."""
    draw = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        chosen = draw.integers(len(on), size=len(on))
        a, b = _row([on[at] for at in chosen]), _row([off[at] for at in chosen])
        drawn.append([a[name] / b[name] for name in a])
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    names = list(_row(on))
    return dict(zip(names, low.tolist(), strict=True)), dict(zip(names, high.tolist(), strict=True))


def _measure(context: Context) -> Iterator[Reading]:
    if not (GEMMA / "config.json").exists():
        raise RuntimeError(f"{GEMMA} is missing; `make demo` converts the model")
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(context.folder("serve"), DAEMON))
        sockets = {"on": Path(daemon.socket), "off": None}
        servers = {
            name: stack.enter_context(Server(GEMMA, path, OUT / f"serve-{name}.log", *OPTIONS))
            for name, path in sockets.items()
        }
        until = time.monotonic() + START_SECONDS_MAX
        while not all(server.serves() for server in servers.values()):
            if time.monotonic() > until:
                raise TimeoutError(f"not serving after {START_SECONDS_MAX} s, see {OUT}")
            time.sleep(0.5)
        for kind, bar in BARS.items():
            if context.wants(bar.name):
                yield _reading(kind, _compare(context, servers, kind))


def _reading(kind: str, found: dict[str, Any]) -> Reading:
    known = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    FOUND.write_text(json.dumps({**known, kind: found}, indent=1) + "\n")
    ratio, low, high = found["ratio"], found["low"], found["high"]
    note = f"{found['requests']} requests a server, {CLIENTS} clients; " + ", ".join(
        f"{name} {ratio[name]:.3g} ({low[name]:.3g}..{high[name]:.3g})" for name in ratio
    )
    if kind != "none":
        return Reading(BARS[kind].name, ratio["ttft_p50"], note)
    outside = sum(
        not (0.95 <= ratio[name] <= 1.05 or low[name] <= 1 <= high[name]) for name in ratio
    )
    return Reading(BARS[kind].name, outside, f"of {len(ratio)} ratios: {note}")


PART = Part("vllm serve on Gemma 3 270M", tuple(BARS.values()), _measure)


def draw(path: Path) -> None:
    """On ÷ off of every quantity, a group a workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = json.loads(FOUND.read_text())
    kinds = [kind for kind in ("shared", "mixed", "none") if kind in found]
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    for at, kind in enumerate(kinds):
        one = found[kind]
        names = list(one["ratio"])
        places = np.arange(len(names)) + (at - (len(kinds) - 1) / 2) * 0.25
        values = np.array([one["ratio"][name] for name in names])
        spread = [
            np.maximum(values - [one["low"][name] for name in names], 0),
            np.maximum([one["high"][name] for name in names] - values, 0),
        ]
        axes.bar(places, values, 0.25, label=kind, yerr=spread, error_kw={"linewidth": 0.8})
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), [name.replace("_p", " P") for name in names])
    axes.set_ylabel("with kvstore ÷ without")
    axes.legend(title="prefixes")
    figure.savefig(path)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
