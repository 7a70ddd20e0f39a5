"""`vllm serve` with the connector: eight clients at once over HTTP, scheduler and worker apart."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.vllm_serve import START_SECONDS_MAX, Server
from tests.conftest import DaemonProcess
from tests.e2e.kit import eventually
from tests.engines.vllm_engine.kit import BLOCK, prompt

SHARED = prompt(1, 400)
PROMPTS = [SHARED + prompt(10 + at, 30 + 7 * at) for at in range(8)]
OPTIONS = (
    *("--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "2048"),
    *("--kv-cache-memory-bytes", str(64 << 20)),
)


@pytest.fixture(scope="module")
def server(
    store: DaemonProcess, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with Server(llama, store.socket, log, *OPTIONS) as server:
        eventually(server.serves, f"serving, see {log}", START_SECONDS_MAX)
        yield server


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
    assert "vllm:external_prefix_cache_queries_total" in server.call("/metrics")
