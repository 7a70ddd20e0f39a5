"""Adapters are told apart by what they contain, not by what they are called."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DaemonProcess
from tests.engines.vllm_engine.kit import BLOCK, Engine, prompt

LONG = 300
HIT = LONG // BLOCK * BLOCK


def adapter(folder: Path, model: Path, seed: int) -> Path:
    """A random LoRA on queries and values, in the format that PEFT writes."""
    import torch
    from safetensors.torch import save_file

    shape = json.loads((model / "config.json").read_text())
    hidden, heads = shape["hidden_size"], shape["head_dim"]
    outs = {
        "q_proj": shape["num_attention_heads"] * heads,
        "v_proj": shape["num_key_value_heads"] * heads,
    }
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, size in outs.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(8, hidden, generator=draw)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(size, 8, generator=draw)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(outs),
        "base_model_name_or_path": str(model),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def engine(store: DaemonProcess, llama: Path) -> Iterator[Engine]:
    with Engine(llama, store.socket, enable_lora=True, max_lora_rank=8, max_loras=2) as made:
        assert made.connected()
        yield made


def test_the_content_counts_not_the_name(engine: Engine, llama: Path, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    one, two = adapter(tmp_path / "one", llama, 1), adapter(tmp_path / "two", llama, 2)
    copy = Path(shutil.copytree(one, tmp_path / "copy"))
    tokens = prompt(1, LONG)

    def run(name: str, number: int, path: Path | None) -> Any:
        lora = None if path is None else LoRARequest(name, number, str(path))
        answer = engine.one(tokens, lora_request=lora)
        engine.drain()
        engine.forget()
        return answer

    plain = run("", 0, None)
    first = run("a", 1, one)
    assert (plain.cached, first.cached) == (0, 0)
    assert plain.tokens != first.tokens
    other = run("b", 2, two)
    assert other.cached == 0
    assert other.tokens != first.tokens
    # Overwritten under the engine, which keeps what it has loaded.
    shutil.copytree(two, one, dirs_exist_ok=True)
    stale = run("a", 1, one)
    assert stale.cached == 0
    assert stale.same(first)
    again = run("another name", 3, copy)
    assert again.cached == HIT
    assert again.same(first)
    fresh = run("a", 4, one)
    assert fresh.cached == HIT
    assert fresh.same(other)
    assert run("", 0, None).same(plain)
