"""kvstore below vLLM's own offloading, on the real engine: flat namespace, opaque keys."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.refusal import Refused
from engine_adapter.vllm_settings import Settings
from kvstore.fingerprint import namespace_of
from tests.conftest import DaemonProcess
from tests.engines.vllm_engine.kit import BLOCK, SECONDS_MAX, Answer, Engine, patched, prompt

LONG = 400


def offloading(store: DaemonProcess) -> dict[str, Any]:
    return {
        "kv_connector": "KVStoreOffloadingConnector",
        "kv_connector_module_path": "engine_adapter.vllm_tier",
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


def tier_of(engine: Engine) -> Any:
    return engine.core.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]


def stored(engine: Engine, store: DaemonProcess, tokens: list[int]) -> Answer:
    """Run it, see all of its blocks stored, and empty what vLLM has: what lies below stays."""
    wanted: Any = store.stat()["blocks"] + LONG // BLOCK
    first = engine.one(tokens)
    until = time.monotonic() + SECONDS_MAX
    while store.stat()["blocks"] < wanted:
        engine.one(prompt(int(1e6 * time.monotonic()), 3), new_tokens=2)
        assert time.monotonic() < until
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    return first


def test_what_vllm_forgets_comes_back(engine: Engine, store: DaemonProcess) -> None:
    tokens = prompt(1, LONG)
    first = stored(engine, store, tokens)
    again = engine.one(tokens)
    assert again.cached >= (LONG // BLOCK - 1) * BLOCK
    assert again.same(first)


def test_whatever_shapes_a_blocks_bytes_names_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine_adapter.vllm_tier import _ENGINE, _identity

    connector, spec = engine.core.scheduler.connector, tier_of(engine)._offloading_spec
    config = connector._vllm_config

    def name(owner: Any = None, attribute: str = "", value: Any = None, **settings: str) -> bytes:
        with monkeypatch.context() as patch:
            if owner is not None:
                patch.setattr(owner, attribute, value)
            return namespace_of(_identity(spec.config, 4096, Settings(**settings)))

    with pytest.raises(Refused, match="KVStoreOffloadingConnector"):
        name()
    token = _ENGINE.set((config, connector._kv_cache_config))
    names = [
        name(),
        name(config.model_config.hf_config, "rope_parameters", {"rope_theta": 1e6}),
        name(config.model_config, "quantization", "fp8"),
        name(config.cache_config, "cache_dtype", "fp8"),
        name(variant="edited"),
        name(weights_digest="others"),
        name(tenant_salt="other"),
    ]
    assert len(set(names)) == len(names)
    assert name() == names[0]
    with pytest.raises(Refused, match="LoRA"):
        name(config, "lora_config", object())
    _ENGINE.reset(token)


@pytest.mark.parametrize("lost", ["a block", "the daemon"])
def test_what_was_found_and_does_not_come_is_computed(
    lost: str, engine: Engine, store: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, tier, loads = prompt(len(lost), LONG), tier_of(engine), []
    first = stored(engine, store, tokens)

    def lose_first(submit: Any, job: Any) -> None:
        loads.append(job)
        assert len(loads) < 20, "the same load without end"
        if len(loads) == 1 and lost == "a block":
            assert tier._handle.delete(tier._handle.keys(job.keys), 3) == 1
        elif len(loads) == 1:
            store.kill()
            while tier._client.connected:
                time.sleep(0.01)
        submit(job)

    patched(monkeypatch, tier, "submit_load", lose_first)
    again = engine.one(tokens)
    assert again.same(first)
    assert again.cached == (3 * BLOCK if lost == "a block" else 0)
    assert loads
    if lost == "the daemon":
        engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.one(tokens).same(first)
        store.start()
