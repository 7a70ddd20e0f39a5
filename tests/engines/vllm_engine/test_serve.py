"""`vllm serve` with the connector: eight clients at once over HTTP, scheduler and worker apart."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DaemonProcess
from tests.e2e.kit import eventually
from tests.engines.vllm_engine.kit import BLOCK, prompt

START_SECONDS_MAX = 420.0
ANSWER_SECONDS_MAX = 120.0
SHARED = prompt(1, 400)
PROMPTS = [SHARED + prompt(10 + at, 30 + 7 * at) for at in range(8)]
HIT = len(SHARED) // BLOCK * BLOCK


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One `vllm serve`."""

    def __init__(self, model: Path, store: Path, log: Path) -> None:
        self.port, self.log = free_port(), log
        transfer = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "engine_adapter.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": str(store), "lookup_seconds": 20.0},
        }
        command = [
            # `vllm serve` by its module: the package for CPUs has no metadata for the command.
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK)),
            *("--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "2048"),
            *("--skip-tokenizer-init", "--served-model-name", "m"),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        root = Path(__file__).resolve().parents[3]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": str(root)}
            )

    def call(self, path: str, body: Any = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS_MAX) as reply:
            return str(reply.read().decode())

    def serves(self) -> bool:
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
        try:
            self.call("/health")
        except OSError:
            return False
        return True

    def complete(self, tokens: list[int]) -> list[int]:
        """Greedy answer, as token ids."""
        body = {
            "model": "m",
            "prompt": tokens,
            "max_tokens": 8,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
        }
        (choice,) = json.loads(self.call("/v1/completions", body))["choices"]
        found: list[int] = choice["token_ids"]
        return found

    def counter(self, name: str) -> float:
        lines = [line for line in self.call("/metrics").splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def server(
    store: DaemonProcess, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"
    server = Server(llama, store.socket, log)
    try:
        eventually(server.serves, f"serving, see {log}", START_SECONDS_MAX)
        yield server
    finally:
        server.stop()


@pytest.mark.timeout(600)
def test_eight_clients_get_the_answers_of_one(server: Server, store: DaemonProcess) -> None:
    alone = [server.complete(tokens) for tokens in PROMPTS]
    eventually(lambda: server.counter("vllm:kvstore_saved_blocks_total") > 0, "stored")
    with ThreadPoolExecutor(8) as clients:
        for _ in range(3):
            assert list(clients.map(server.complete, PROMPTS)) == alone
    store.kill()
    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(server.complete, PROMPTS)) == alone
    store.start()
    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(server.complete, PROMPTS)) == alone
    assert server.counter("vllm:kvstore_promised_host_tokens_total") >= HIT
    assert "vllm:external_prefix_cache_queries_total" in server.call("/metrics")
