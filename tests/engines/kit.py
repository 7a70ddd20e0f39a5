"""What tests with a real engine share: tiny models whose outputs show any wrong KV, and a runner.

Primitives:
  `llama(...)`, `gemma(...)`   random models; weights so wide that a wrong block changes the logits
  `prompt(...)`                token ids nobody else uses
  `Run`, `run`                 tokens and logits of one greedy generate
  `plain`                      the oracle: the same call without the store, in the same chunks
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any, NamedTuple

import pytest

from tests.e2e.kit import DONE, eventually

torch = pytest.importorskip("torch", reason="install torch and the engine extra")
transformers = pytest.importorskip("transformers", reason="install torch and the engine extra")
# Ours, and imports torch: from here on it must be there.
accelerator = importlib.import_module("engine_adapter.accelerator")

BLOCK = 16
WINDOW = 2 * BLOCK
VOCABULARY = 128
NEW_TOKENS = 5
_seeds = itertools.count(1)

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.5,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def llama(dtype: Any = None, seed: int = 0, **config: Any) -> Any:
    """Four layers of full attention."""
    settings = {**_SMALL, "num_hidden_layers": 4, **config}
    return _made(transformers.LlamaForCausalLM, transformers.LlamaConfig(**settings), dtype, seed)


def gemma(dtype: Any = None, seed: int = 0, **config: Any) -> Any:
    """Six layers, all but two with a sliding window of two blocks."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    settings = {**_SMALL, "num_hidden_layers": 6, "layer_types": kinds, "sliding_window": WINDOW}
    made = transformers.Gemma3TextConfig(**{**settings, "query_pre_attn_scalar": 16, **config})
    return _made(transformers.Gemma3ForCausalLM, made, dtype, seed)


def _made(kind: Any, config: Any, dtype: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return kind(config).to(dtype or torch.float32).eval()


def prompt(tokens: int, rows: int = 1) -> Any:
    """int64 [rows, tokens] without padding or special ids; other values at every call."""
    generator = torch.Generator().manual_seed(next(_seeds))
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)


class Run(NamedTuple):
    """`logits` [new tokens, rows, vocabulary], `tokens` [rows, prompt + new tokens]."""

    logits: Any
    tokens: Any

    def differs(self, other: Run) -> int:
        """Logits that are not the same bits."""
        return int((self.logits != other.logits).sum())

    def is_near(self, other: Run) -> bool:
        """Equal but for rounding; the same tokens."""
        scale = float(other.logits.abs().max())
        near = torch.allclose(self.logits, other.logits, atol=1e-4 * scale, rtol=0)
        return near and bool((self.tokens == other.tokens).all())


def run(model: Any, ids: Any, **arguments: Any) -> Run:
    """Greedy; every argument can be given another value."""
    settings = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    output = model.generate(ids, **{**settings, **arguments})
    return Run(torch.stack(output.logits), output.sequences)


def plain(attached: Any, ids: Any, **arguments: Any) -> Run:
    """Without the store, prefilled in chunks of a block."""
    with attached.paused():
        return run(attached.model, ids, **{"prefill_chunk_size": BLOCK, **arguments})


def put_instead(handle: Any, chain: Any, blocks: Any) -> None:
    """Other bytes under the same names: what no engine would do, to see that tests notice."""
    handle.clear()

    def are_stored() -> bool:
        return all(status in DONE for status in handle.store(chain, blocks).result(20))

    # What was cleared is still being reclaimed for a moment.
    eventually(are_stored, "stored after a clear")


def settled(attached: Any) -> None:
    """All that was computed so far is stored."""
    assert attached.flush(30)
