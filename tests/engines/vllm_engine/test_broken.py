"""What a real engine must not keep: KV of a pass that broke off, and of loads that did not come.

Field cases VLLM-4, 7, 15.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DaemonProcess
from tests.engines.vllm_engine.kit import Engine, patched, prompt

LONG = 500


def engine_on(store: DaemonProcess, llama: Path, variant: str, **options: Any) -> Engine:
    """Loads inside the forward pass; what other tests stored is not found, and requests that come
    together are scheduled together."""
    extra = {"layerwise": "always", "variant": variant, "stall_seconds": 5.0}
    engine = Engine(llama, store.socket, extra, **options)
    assert engine.connected()
    return engine


def fail_first_load(patch: pytest.MonkeyPatch, then: Any = lambda: None) -> list[Any]:
    """Nothing of it is copied, its layers are told to be late, and `then` is called; the loads
    that failed."""
    from engine_adapter.vllm_host import HostLoad

    failed: list[Any] = []

    def nothing(copy_layers: Any, task: Any, *arguments: Any) -> None:
        if not failed:
            failed.append(task)
            then()
        if task not in failed:
            copy_layers(task, *arguments)

    patched(patch, HostLoad, "_copy", nothing)
    patched(
        patch,
        HostLoad,
        "_comes",
        lambda comes, task, *arguments: comes(task, *arguments) and task not in failed,
    )
    return failed


def test_a_pass_that_breaks_off_stores_nothing(store: DaemonProcess, llama: Path) -> None:
    """Ctrl-C in the middle of it; vLLM calls its connectors all the same."""
    from vllm.model_executor.models.llama import LlamaDecoderLayer

    tokens, calls = prompt(1, LONG), []

    def interrupted(forward: Any, *arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*arguments, **more)

    with engine_on(store, llama, "broken") as engine:
        with pytest.MonkeyPatch.context() as patch:
            patched(patch, LlamaDecoderLayer, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.one(tokens)
        engine.drain()
        handle = engine.scheduler._handles[0]
        assert handle.match(handle.chain(tokens)) == 0


def test_blocks_that_did_not_come_are_nobodys_after_an_abort(
    store: DaemonProcess, llama: Path
) -> None:
    from vllm import SamplingParams

    tokens = prompt(3, LONG)
    with engine_on(store, llama, "abort") as engine:
        cold = engine.store(tokens)
        core = engine.llm.llm_engine
        with pytest.MonkeyPatch.context() as patch:
            # An abort that arrives while the pass runs is looked at before its results.
            failed = fail_first_load(patch, lambda: engine.core.aborts_queue.put(names))
            parameters = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)
            core.add_request("a", {"prompt_token_ids": tokens}, parameters)
            names = list(engine.core.scheduler.requests)
            while not failed:
                core.step()
        core.abort_request(["a"])
        again = engine.one(tokens)
        assert again.same(cold)
        assert again.cached == 0


def test_who_shares_blocks_that_did_not_come_computes_them(
    store: DaemonProcess, llama: Path
) -> None:
    """The first one needs several steps for it, in which the other would run on what is there."""
    shared = prompt(4, LONG)
    prompts = [shared + prompt(5 + at, 40) for at in range(2)]
    with engine_on(store, llama, "shared", long_prefill_token_threshold=64) as engine:
        engine.store(shared)
        colds = [engine.cold(tokens) for tokens in prompts]
        with pytest.MonkeyPatch.context() as patch:
            failed = fail_first_load(patch)
            answers = engine.run(prompts)
        assert failed
        for answer, cold in zip(answers, colds, strict=True):
            assert answer.tokens == cold.tokens


def test_loads_of_several_ranks_lie_beside_the_pass(store: DaemonProcess, llama: Path) -> None:
    """A rank whose load failed spoils what the others compute and save."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from engine_adapter.vllm import KVStoreConnector

    with engine_on(store, llama, "ranks") as engine:
        assert engine.scheduler._may_layerwise
        config = copy.copy(engine.llm.llm_engine.vllm_config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.world_size = 2
        cache = engine.core.scheduler.kv_cache_config
        connector = KVStoreConnector(config, KVConnectorRole.SCHEDULER, cache)
        assert not connector.scheduler._may_layerwise
        connector.shutdown()
