"""One real engine, one KV group: every way in which a stored prefix comes, or does not.

Field cases VLLM-1, 2, 4, 5, 7, 10, 13, 14, 15, 16, 18. Each answer is compared with that of the
same prompt computed from nothing, and every loaded block with the bytes that were saved.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import DaemonProcess
from tests.e2e.kit import eventually
from tests.engines.vllm_engine.kit import BLOCK, SECONDS_MAX, Digests, Engine, patched, prompt

CHUNK = 256
LONG = 500
HIT = LONG // BLOCK * BLOCK


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


@pytest.fixture(scope="module")
def digests(patch: pytest.MonkeyPatch) -> Digests:
    return Digests(patch)


@pytest.fixture(scope="module")
def engine(store: DaemonProcess, llama: Path, digests: Digests) -> Iterator[Engine]:
    """Prefills in chunks of CHUNK tokens."""
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    with Engine(llama, store.socket, max_num_batched_tokens=CHUNK, kv_events_config=events) as made:
        assert made.connected()
        yield made


@pytest.fixture(params=["layerwise", "beside"])
def way(request: pytest.FixtureRequest, engine: Engine) -> Iterator[str]:
    """Loads inside the forward pass, or beside it."""
    scheduler, before = engine.scheduler, engine.scheduler._settings
    scheduler._settings = replace(before, layerwise="always")
    scheduler._may_layerwise = request.param == "layerwise"
    yield request.param
    scheduler._settings, scheduler._may_layerwise = before, True


@pytest.fixture(autouse=True)
def _bytes_were_right(digests: Digests) -> Iterator[None]:
    digests.wrong.clear()
    yield
    assert not digests.wrong, "blocks were loaded with other bytes than were saved"


def number(request: pytest.FixtureRequest) -> int:
    """Prompts of one test are no other's."""
    import zlib

    return zlib.crc32(request.node.nodeid.encode())


# ---------------------------------------------------------------------- hits


def test_a_stored_prefix_gives_the_same_answer(
    engine: Engine, way: str, digests: Digests, request: pytest.FixtureRequest
) -> None:
    tokens = prompt(number(request), LONG)
    cold = engine.cold(tokens)
    assert engine.store(tokens).same(cold)
    digests.loaded.clear()
    hit = engine.one(tokens)
    assert hit.cached == HIT
    assert hit.same(cold)
    assert len(digests.loaded) == HIT // BLOCK


def test_a_longer_prompt_loads_its_stored_part(
    engine: Engine, way: str, request: pytest.FixtureRequest
) -> None:
    tokens = prompt(number(request), LONG + 300)
    engine.store(tokens[:LONG])
    hit = engine.one(tokens)
    assert hit.cached >= HIT
    assert hit.same(engine.cold(tokens))


@pytest.mark.parametrize("count", [1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_at_most_all_but_one_token_is_loaded(engine: Engine, way: str, count: int) -> None:
    tokens = prompt(count + (7000 if way == "beside" else 8000), count)
    cold = engine.cold(tokens)
    engine.store(tokens, new_tokens=1)
    hit = engine.one(tokens)
    assert hit.cached == (count - 1) // BLOCK * BLOCK
    assert hit.same(cold)


def test_what_was_decoded_is_found_in_the_next_turn(
    engine: Engine, request: pytest.FixtureRequest
) -> None:
    tokens = prompt(number(request), 3 * BLOCK)
    answer = engine.store(tokens, new_tokens=2 * BLOCK + 2)
    turn = [*tokens, *answer.tokens, *prompt(number(request) + 1, 5)]
    hit = engine.one(turn)
    assert hit.cached == 5 * BLOCK
    assert hit.same(engine.cold(turn))


def test_many_requests_share_one_prefix(
    engine: Engine, way: str, request: pytest.FixtureRequest
) -> None:
    shared = prompt(number(request), LONG)
    prompts = [shared + prompt(number(request) + at, 40 + at) for at in range(1, 7)]
    colds = [engine.cold(tokens) for tokens in prompts]
    engine.store(shared)
    for hit, cold in zip(engine.run(prompts), colds, strict=True):
        assert hit.cached >= HIT
        assert hit.tokens == cold.tokens


def test_another_salt_is_another_prompt(engine: Engine, request: pytest.FixtureRequest) -> None:
    tokens = prompt(number(request), LONG)
    engine.store(tokens, salt="mine")
    assert engine.one(tokens, salt="yours").cached == 0
    engine.forget()
    assert engine.one(tokens).cached == 0
    engine.forget()
    assert engine.one(tokens, salt="mine").cached == HIT


@pytest.mark.parametrize("swap", ["blocks", "halves"])
def test_the_control_with_swapped_bytes_is_noticed(
    engine: Engine, digests: Digests, way: str, swap: str, request: pytest.FixtureRequest
) -> None:
    """If this passed with right digests, no other test here would mean anything.

    Attention does not see in which order blocks lie, since keys carry their positions: only their
    digests tell. Keys in the place of values are seen in the answer.
    """
    from engine_adapter.vllm_blocks import LanePages

    def swapped(scatter: Any, pages: Any, slots: Any, ids: Any, layers: Any) -> None:
        if swap == "blocks":
            scatter(pages, slots, ids[::-1], layers)
        else:
            scatter(pages, np.roll(slots, pages.lane.layout.layer_bytes // 2, axis=1), ids, layers)

    tokens = prompt(number(request), LONG)
    cold = engine.store(tokens)
    with pytest.MonkeyPatch.context() as patch:
        patched(patch, LanePages, "scatter", swapped)
        wrong = engine.one(tokens)
    noticed = list(digests.wrong)
    digests.wrong.clear()
    engine.forget()
    assert wrong.cached == HIT
    assert len(noticed) >= HIT // BLOCK - 1
    if swap == "halves":
        assert not wrong.same(cold)


# ---------------------------------------------------------------------- below host memory


def restarted(store: DaemonProcess, engine: Engine) -> None:
    """The next life of the daemon; host memory is empty, what was durable is on NVMe."""
    boots = engine.scheduler._client.boot_id, engine.worker._client.boot_id
    if store.process is not None and store.process.poll() is None:
        store.stop()
    store.start()
    eventually(
        lambda: (
            engine.scheduler._client.boot_id not in (0, boots[0])
            and engine.worker._client.boot_id not in (0, boots[1])
        ),
        "attached to the next life",
        SECONDS_MAX,
    )


def flushed(engine: Engine, tokens: list[int]) -> None:
    handle = engine.scheduler._handles[0]
    chain = handle.chain(tokens)
    assert handle.flush(chain, deadline_seconds=SECONDS_MAX).all()


def test_blocks_come_from_nvme_after_a_restart(
    store: DaemonProcess, engine: Engine, way: str, request: pytest.FixtureRequest
) -> None:
    tokens = prompt(number(request), LONG)
    cold = engine.store(tokens)
    flushed(engine, tokens)
    restarted(store, engine)
    engine.scheduler.counts.take()
    hit = engine.one(tokens)
    assert hit.cached == HIT
    assert hit.same(cold)


def test_a_damaged_block_is_computed_again(
    store: DaemonProcess, engine: Engine, request: pytest.FixtureRequest
) -> None:
    tokens = prompt(number(request), LONG)
    cold = engine.store(tokens)
    flushed(engine, tokens)
    store.stop()
    for segment in (store.data_dir / "segments").iterdir():
        data = bytearray(segment.read_bytes())
        for at in range(5000, len(data), 40_000):
            data[at] ^= 0xFF
        segment.write_bytes(data)
    restarted(store, engine)
    hit = engine.one(tokens)
    assert hit.cached < HIT
    assert hit.same(cold)
    engine.scheduler._client.clear_all()


# ---------------------------------------------------------------------- a daemon in trouble


def test_a_daemon_killed_in_mid_load(
    store: DaemonProcess, engine: Engine, way: str, request: pytest.FixtureRequest
) -> None:
    """Memory outlives its daemon: the bytes are right, or another life's and thrown away."""
    from engine_adapter.vllm_blocks import LanePages

    tokens = prompt(number(request), LONG)
    cold = engine.store(tokens)
    killed = threading.Event()

    def kill_first(scatter: Any, *arguments: Any) -> None:
        if not killed.is_set():
            killed.set()
            store.kill()
        scatter(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patched(patch, LanePages, "scatter", kill_first)
        answer = engine.one(tokens)
    assert killed.is_set()
    assert answer.same(cold)
    engine.forget()
    assert engine.one(tokens).same(cold), "without a daemon"
    restarted(store, engine)
    engine.forget()
    assert engine.one(tokens).same(cold)


def test_a_load_whose_daemon_began_a_new_life(
    store: DaemonProcess, engine: Engine, way: str, request: pytest.FixtureRequest
) -> None:
    from engine_adapter.vllm_blocks import LanePages

    tokens = prompt(number(request), LONG)
    cold = engine.store(tokens)
    begun = threading.Event()

    def restart_first(scatter: Any, *arguments: Any) -> None:
        scatter(*arguments)
        if not begun.is_set():
            begun.set()
            store.stop()
            store.start()

    with pytest.MonkeyPatch.context() as patch:
        patched(patch, LanePages, "scatter", restart_first)
        answer = engine.one(tokens)
    assert answer.same(cold)
    restarted(store, engine)
    engine.drain()
    engine.forget()
    assert engine.store(tokens).same(cold)
    assert engine.one(tokens).cached == HIT


def test_a_daemon_that_does_not_answer_costs_a_deadline(
    store: DaemonProcess, engine: Engine, request: pytest.FixtureRequest
) -> None:
    stored, fresh = prompt(number(request), LONG), prompt(number(request) + 1, LONG)
    cold, cold_fresh = engine.store(stored), engine.cold(fresh)
    scheduler, before = engine.scheduler, engine.scheduler._settings
    scheduler._settings = replace(before, lookup_seconds=0.5)
    scheduler._lookups._lookup_seconds = 0.5
    assert store.process is not None
    os.kill(store.process.pid, signal.SIGSTOP)
    try:
        assert engine.one(fresh).same(cold_fresh)
        host_hit = engine.one(stored)
        assert host_hit.same(cold)
        assert host_hit.cached == HIT, "host memory is read without the daemon"
    finally:
        os.kill(store.process.pid, signal.SIGCONT)
        scheduler._settings = before
        scheduler._lookups._lookup_seconds = before.lookup_seconds
    engine.forget()


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("share", ["one", "all"])
def test_what_fails_to_load_is_computed(
    engine: Engine, way: str, share: str, request: pytest.FixtureRequest
) -> None:
    tokens = prompt(number(request), LONG)
    cold = engine.store(tokens)
    handle = engine.scheduler._handles[0]
    chain = handle.chain(tokens)
    allocated = engine.scheduler.allocated

    def drop_first(*arguments: Any) -> None:
        allocated(*arguments)
        engine.scheduler.allocated = allocated
        handle.delete(chain, 7 if share == "one" else 0)

    engine.scheduler.allocated = drop_first
    for _ in range(2):
        answer = engine.one(tokens)
        assert answer.same(cold)
        engine.drain()
        engine.forget()
    assert engine.one(tokens).same(cold)


# ---------------------------------------------------------------------- aborts


@pytest.mark.parametrize("phase", ["queued", "loading", "loaded"])
def test_an_abort_in_every_phase_frees_every_block(
    engine: Engine, phase: str, request: pytest.FixtureRequest
) -> None:
    from vllm import SamplingParams

    from engine_adapter.vllm_blocks import LanePages

    tokens = prompt(number(request), LONG)
    cold = engine.store(tokens)
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    core, gate = engine.llm.llm_engine, threading.Event()
    engine.scheduler._may_layerwise = False

    def held(scatter: Any, *arguments: Any) -> None:
        gate.wait(SECONDS_MAX)
        scatter(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patched(patch, LanePages, "scatter", held)
        parameters = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)
        core.add_request(f"abort-{phase}", {"prompt_token_ids": tokens}, parameters)
        if phase != "queued":
            eventually(lambda: core.step() is not None and engine.scheduler._loading, "loading")
        if phase == "loaded":
            gate.set()
            eventually(lambda: core.step() is not None and not engine.scheduler._loading, "loaded")
        core.abort_request([f"abort-{phase}"])
        core.step()
        gate.set()
        eventually(
            lambda: core.step() is not None and pool.get_num_free_blocks() == free, "all freed"
        )
    engine.scheduler._may_layerwise = True
    assert not engine.scheduler._loading
    engine.forget()
    assert engine.one(tokens).same(cold)


# ---------------------------------------------------------------------- reset, metrics, events


def test_a_reset_reaches_the_store(engine: Engine, request: pytest.FixtureRequest) -> None:
    tokens = prompt(number(request), LONG)
    cold = engine.store(tokens)
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    again = engine.one(tokens)
    assert again.cached == 0
    assert again.same(cold)
    eventually(
        lambda: engine.one(prompt(1, 3)) and not engine.scheduler._is_resetting, "reset is over"
    )
    engine.drain()
    engine.forget()
    engine.store(tokens)
    assert engine.one(tokens).cached == HIT


def test_the_engines_own_exporter_tells_what_happened(
    engine: Engine, request: pytest.FixtureRequest
) -> None:
    def seen() -> dict[str, float]:
        return {m.name: getattr(m, "value", 0) for m in engine.llm.get_metrics()}

    tokens = prompt(number(request), LONG)
    before = seen()
    engine.store(tokens)
    engine.one(tokens)
    engine.one(prompt(2, 3))
    after = seen()
    assert after["vllm:kvstore_loaded_tokens"] - before["vllm:kvstore_loaded_tokens"] == HIT
    assert after["vllm:kvstore_saved_blocks"] > before["vllm:kvstore_saved_blocks"]
    assert after["vllm:external_prefix_cache_hits"] > before["vllm:external_prefix_cache_hits"]


def test_events_name_the_blocks_and_their_medium(
    engine: Engine, request: pytest.FixtureRequest
) -> None:
    from vllm.distributed.kv_events import BlockStored

    tokens, events = prompt(number(request), LONG), []
    publisher = engine.core.scheduler.kv_event_publisher
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "publish", lambda batch: events.extend(batch.events))
        engine.store(tokens)
        engine.one(prompt(3, 3))
    stored = [e for e in events if isinstance(e, BlockStored)]
    ours = [h for e in stored if e.medium == "CPU" for h in e.block_hashes]
    theirs = [h for e in stored if e.medium == "GPU" for h in e.block_hashes]
    assert len(ours) >= HIT // BLOCK
    assert set(ours) <= set(theirs)
