"""Engines of other kinds and times on one store, one after the other in this process.

Field cases VLLM-8, 11, 12, 14, 17. The oracle is an engine without the connector.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.lanes import Lanes
from engine_adapter.vllm_device import Device, targets_mover
from engine_adapter.vllm_hold import HeldBlocks
from engine_adapter.vllm_mover import Mover, Side
from engine_adapter.vllm_target import prove_target, target_of
from engine_adapter.vllm_worker import MOVERS
from kvstore.testing.fake_device import FakeDevice
from tests.conftest import DaemonProcess
from tests.engines.vllm_engine.kit import BLOCK, Answer, Engine, prompt, tiny_llama

LONG = 400
HIT = LONG // BLOCK * BLOCK
PROMPTS = [prompt(at, LONG + at) for at in range(8)]
NEW = 100


@pytest.fixture(scope="module")
def plain(llama: Path) -> list[Answer]:
    """Each prompt by itself, without the connector."""
    with Engine(llama, None) as engine:
        return [engine.one(tokens, new_tokens=NEW) for tokens in PROMPTS]


@contextmanager
def engine_on(store: DaemonProcess, model: Path, **options: object) -> Iterator[Engine]:
    with Engine(model, store.socket, **options) as engine:  # type: ignore[arg-type]
        assert engine.connected()
        yield engine


def same(answers: list[Answer], oracle: list[Answer]) -> bool:
    return all(a.tokens == b.tokens for a, b in zip(answers, oracle, strict=True))


def test_with_the_connector_answers_are_those_without(
    store: DaemonProcess, llama: Path, plain: list[Answer]
) -> None:
    with engine_on(store, llama) as engine:
        first = [engine.store(tokens, new_tokens=NEW) for tokens in PROMPTS]
        assert all(answer.same(oracle) for answer, oracle in zip(first, plain, strict=True))
        again = [engine.one(tokens, new_tokens=NEW) for tokens in PROMPTS]
        assert all(answer.cached >= HIT for answer in again)
        assert all(answer.same(oracle) for answer, oracle in zip(again, plain, strict=True))


def test_an_engine_started_later_finds_what_earlier_ones_stored(
    store: DaemonProcess, llama: Path, plain: list[Answer]
) -> None:
    with engine_on(store, llama, enable_prefix_caching=False) as engine:
        answers = engine.run(PROMPTS, new_tokens=NEW)
        assert all(answer.cached >= HIT for answer in answers)
        assert same(answers, plain)


def test_little_memory_preempts_and_nothing_is_wrong(
    store: DaemonProcess, llama: Path, plain: list[Answer]
) -> None:
    with engine_on(store, llama, kv_cache_memory_bytes=3 << 20, max_model_len=1024) as engine:
        for _ in range(2):
            assert same(engine.run(PROMPTS, new_tokens=NEW), plain)
        metrics = {m.name: getattr(m, "value", 0) for m in engine.llm.get_metrics()}
        assert metrics["vllm:num_preemptions"] > 0
        assert metrics["vllm:kvstore_loads"] > 0


def test_blocks_move_as_on_a_gpu_and_are_held_meanwhile(
    store: DaemonProcess, llama: Path, plain: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine computes on the CPU, in memory of the stand-in for a GPU, which copies late."""
    fake = kv_on_stand_in(monkeypatch)
    options = {"kv_cache_memory_bytes": 3 << 20, "max_model_len": 1024}
    with engine_on(store, llama, extra={"layerwise": "never", "variant": "g"}, **options) as engine:
        scheduler = engine.core.scheduler
        scheduler.connector._held = HeldBlocks(scheduler.kv_cache_manager.block_pool)
        for _ in range(2):
            assert same(engine.run(PROMPTS, new_tokens=NEW), plain)
        metrics = {m.name: getattr(m, "value", 0) for m in engine.llm.get_metrics()}
        for name in ("vllm:num_preemptions", "vllm:kvstore_loads", "vllm:kvstore_saved_blocks"):
            assert metrics[name] > 0
        engine.drain()
        engine.forget()  # it would not while a block has a reference
        assert not scheduler.connector._held
        assert engine.one(PROMPTS[0], new_tokens=NEW).same(plain[0])
    assert fake.error == ""


def test_on_a_gpu_it_asks_for_whole_blocks_and_keeps_full_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from engine_adapter import vllm as connector

    gpu = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: (9, 0))
    monkeypatch.setattr(connector, "current_platform", gpu)
    kind = connector.KVStoreConnector
    for is_given, layout in ((False, "BLNHC"), (True, None)):
        cache = SimpleNamespace(user_specified_block_size=is_given)
        assert kind.get_required_kvcache_layout(SimpleNamespace(cache_config=cache)) == layout
    for layerwise, is_piecewise in (("auto", False), ("never", False), ("always", True)):
        assert kind.requires_piecewise_for_cudagraph({"layerwise": layerwise}) is is_piecewise
    assert connector._layout("BLNHC") == connector._layout("LBNHC") == "NHC cuda 9.0"
    assert connector._layout("LBHNC") == "HNC cuda 9.0"


def kv_on_stand_in(patch: pytest.MonkeyPatch) -> FakeDevice:
    """Engines made from now on have their KV there."""
    import torch

    fake, zeros = FakeDevice(1), torch.zeros

    def allocate(*size: Any, **options: Any) -> Any:
        if options.get("dtype") is not torch.int8 or not isinstance(size[0], int):
            return zeros(*size, **options)
        memory = fake.bytes_at(fake.allocate(size[0]), size[0])
        memory[:] = 0
        return torch.from_numpy(memory).view(torch.int8)

    def pause() -> None:
        fake.advance(50)
        time.sleep(0.0002)

    def mover(side: Side, caches: Any, blocks: int, layout: str) -> Mover:
        lanes = Lanes(fake, now=time.monotonic, pause=pause)
        transfers = DeviceTransfers(lanes, ThreadPoolExecutor(2))
        compute, targets = fake.make_compute_stream(), {}
        for index, lane in side.mine.items():
            targets[index] = target_of(lane, caches, blocks, layout)
            tensors = [caches[name] for name in lane.layer_names]
            prove_target(transfers, targets[index], tensors, layout, compute)
        device = Device(transfers, targets, lambda: compute)
        return targets_mover(side, device, ThreadPoolExecutor(1))

    patch.setattr(torch, "zeros", allocate)
    patch.setitem(MOVERS, "cpu", mover)  # type: ignore[arg-type]
    return fake


def test_another_model_in_the_same_store_finds_nothing(
    store: DaemonProcess, tmp_path: Path
) -> None:
    with engine_on(store, tiny_llama(tmp_path, seed=1)) as engine:
        cold = engine.one(PROMPTS[0])
        assert cold.cached == 0
        engine.drain()
        engine.forget()
        hit = engine.one(PROMPTS[0])
        assert hit.cached == HIT
        assert hit.same(cold)


def test_roles_say_who_saves_and_who_loads(store: DaemonProcess, llama: Path) -> None:
    tokens = prompt(100, LONG)
    with engine_on(store, llama, role="kv_producer") as engine:
        engine.store(tokens)
        assert engine.one(tokens).cached == 0
    fresh = prompt(101, LONG)
    with engine_on(store, llama, role="kv_consumer") as engine:
        assert engine.one(tokens).cached == HIT
        engine.store(fresh)
        assert engine.one(fresh).cached == 0


_OTHER_PROCESS = """
import json, sys
if __name__ == "__main__":
    from pathlib import Path
    from tests.engines.vllm_engine.kit import Engine, prompt
    engine = Engine(Path(sys.argv[1]), sys.argv[2])
    known, fresh = prompt(0, 400), prompt(200, 400)
    answers = [engine.one(known, new_tokens=100), engine.one(fresh)]
    for _ in range(20):
        engine.one(prompt(300, 3))
    print("ANSWERS", json.dumps([[list(a.tokens), a.cached] for a in answers]), flush=True)
"""


def test_two_engines_share_one_daemon_also_across_processes(
    store: DaemonProcess, llama: Path, plain: list[Answer], tmp_path: Path
) -> None:
    """The other one runs scheduler and worker in processes of their own."""
    script = tmp_path / "other.py"
    script.write_text(_OTHER_PROCESS)
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(root)}
    with engine_on(store, llama) as engine:
        engine.store(PROMPTS[0], new_tokens=NEW)
        done = subprocess.run(
            [sys.executable, str(script), str(llama), str(store.socket)],
            env=environment,
            cwd=root,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert "ANSWERS" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
        line = next(text for text in done.stdout.splitlines() if text.startswith("ANSWERS"))
        (known, known_cached), (fresh, fresh_cached) = json.loads(line.removeprefix("ANSWERS"))
        assert known_cached >= HIT
        assert tuple(known) == plain[0].tokens
        assert fresh_cached == 0
        here = engine.one(prompt(200, LONG))
        assert here.cached == HIT
        assert list(here.tokens) == fresh
