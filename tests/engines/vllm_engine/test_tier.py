"""kvstore below vLLM's own offloading, on the real engine: flat namespace, opaque keys."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DaemonProcess
from tests.engines.vllm_engine.kit import BLOCK, SECONDS_MAX, Engine, prompt

LONG = 400


def offloading(store: DaemonProcess) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieredSpec",
            "spec_module_path": "bench.vllm_offload_spec",
            "cpu_bytes_to_use": 16 << 20,
            "secondary_tiers": [
                {
                    "type": "KVStoreTier",
                    "module_path": "engine_adapter.vllm_tier",
                    "socket": str(store.socket),
                    "deadline_seconds": 20.0,
                }
            ],
        },
    }


@pytest.fixture(scope="module")
def engine(store: DaemonProcess, llama: Path) -> Iterator[Engine]:
    with Engine(llama, None, transfer=offloading(store)) as made:
        yield made


def stored(store: DaemonProcess) -> int:
    return store.counters().get("committed_blocks", 0)


def test_what_vllm_forgets_comes_back(engine: Engine, store: DaemonProcess) -> None:
    tokens = prompt(1, LONG)
    first = engine.one(tokens)
    until = time.monotonic() + SECONDS_MAX
    seen = 0
    while seen < LONG // BLOCK:
        engine.one(prompt(int(1e6 * time.monotonic()), 3), new_tokens=2)
        tree: Any = store.stat()
        seen = sum(size["ready"] for size in tree["host"]["slabs"]["classes"])
        assert time.monotonic() < until, f"{seen} blocks arrived"
    # vLLM's own host tier is emptied with its prefix cache; what lies below stays.
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    again = engine.one(tokens)
    assert again.cached >= (LONG // BLOCK - 1) * BLOCK
    assert again.same(first)
    engine.forget()


def test_without_the_daemon_it_is_a_miss(engine: Engine, store: DaemonProcess) -> None:
    tokens = prompt(2, LONG)
    first = engine.one(tokens)
    store.kill()
    engine.llm.reset_prefix_cache(reset_connector=True)
    assert engine.one(tokens).same(first)
    store.start()
