"""A model with several KV groups: only the blocks that a window needs are loaded.

Field cases VLLM-6, VLLM-17. vLLM's hybrid manager is on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import DaemonProcess
from tests.engines.vllm_engine.kit import BLOCK, Digests, Engine, patched, prompt, tiny_gemma

WINDOW = 2 * BLOCK


@pytest.fixture(scope="module")
def digests() -> Iterator[Digests]:
    with pytest.MonkeyPatch.context() as patch:
        yield Digests(patch)


@pytest.fixture(scope="module")
def engine(
    store: DaemonProcess, digests: Digests, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    model = tiny_gemma(tmp_path_factory.mktemp("gemma"), WINDOW)
    with Engine(
        model,
        store.socket,
        max_num_batched_tokens=128,
        disable_hybrid_kv_cache_manager=False,
    ) as made:
        assert made.connected()
        assert len({lane.group for lane in made.scheduler._lanes}) > 1
        yield made


@pytest.mark.parametrize(
    "count",
    [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + BLOCK + 3, 9 * BLOCK, 400],
)
def test_a_hit_at_every_place_around_the_window(
    engine: Engine, digests: Digests, count: int
) -> None:
    tokens = prompt(1000 + count, count)
    cold = engine.cold(tokens)
    engine.store(tokens)
    digests.loaded.clear()
    hit = engine.one(tokens)
    assert hit.cached == (count - 1) // BLOCK * BLOCK
    assert hit.same(cold)
    assert not digests.wrong
    # Sliding groups load a window at most.
    groups = {lane.namespace: lane for lane in engine.scheduler._lanes}
    full = sum(lane.window_tokens == 0 for lane in groups.values())
    sliding = len(groups) - full
    blocks = hit.cached // BLOCK
    needed = min(blocks, WINDOW // BLOCK + 1)
    assert len(digests.loaded) <= full * blocks + sliding * needed


def test_longer_prompts_find_what_shorter_ones_left(engine: Engine) -> None:
    tokens = prompt(77, 600)
    engine.store(tokens[:300])
    hit = engine.one(tokens)
    assert hit.cached == 300 // BLOCK * BLOCK
    assert hit.same(engine.cold(tokens))


def test_a_load_that_fails_is_computed_from_the_start(engine: Engine) -> None:
    from engine_adapter.vllm_host import HostLoad

    tokens = prompt(78, 300)
    cold = engine.store(tokens)

    def failing(run: Any, task: Any) -> None:
        run(task)
        task._bad(task.parts[-1], 0)

    with pytest.MonkeyPatch.context() as patch:
        patched(patch, HostLoad, "_run", failing)
        answer = engine.one(tokens)
    assert answer.same(cold)
    engine.drain()
    engine.forget()
    assert engine.one(tokens).same(cold)


def test_requests_of_all_lengths_at_once(engine: Engine) -> None:
    shared = prompt(79, 250)
    prompts = [shared + prompt(500 + at, 7 * at + 1) for at in range(6)]
    colds = [engine.cold(tokens) for tokens in prompts]
    engine.store(shared)
    for hit, cold in zip(engine.run(prompts), colds, strict=True):
        assert hit.tokens == cold.tokens
