"""What 8-bit KV loses on a real model: the error a layer, and the perplexity it costs.

Run `.venv-torch/bin/python -m bench.kv_loss [--windows N] [--model NAME] [--texts FILE ...]`; it
needs torch and transformers. Unless others are named, the model is the demo's Gemma 3 270M and the
text this project's own. Of each window the first PREFIX tokens are
computed, their KV is rounded to bfloat16, then packed and restored block by block and head by head
as the GPU path does it, and the loss of the following tokens is compared with that of the same
split without packing. Writes bench/out/kv_loss.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bench.demo_models import load_model
from bench.harness import OUT
from engine_adapter.quantised import (
    SCHEMES,
    Scheme,
    error_of,
    from_bfloat16,
    packed,
    restored,
    to_bfloat16,
)
from engine_adapter.transformers import cache_name

PREFIX, SUFFIX, BLOCK_TOKENS = 480, 128, 16
"""The prefix is whole blocks and shorter than the model's window: no layer drops tokens."""
TEXTS = ("ARCHITECTURE.md", "docs/transformers.md", "docs/gpu.md", "bench/support_desk/handbook.md")


def windows(tokens: Any, texts: list[Path], count: int) -> Iterator[torch.Tensor]:
    """Token windows from all over the texts, int64 [1, PREFIX + SUFFIX]."""
    ids = [token for path in texts for token in tokens.encode(path.read_text("utf-8"))]
    length = PREFIX + SUFFIX
    for start in np.linspace(0, len(ids) - length, count).astype(int).tolist():
        yield torch.tensor([ids[start : start + length]])


def _pieces(values: torch.Tensor) -> Any:
    """float32 [heads * blocks, tokens * dim] of [1, heads, tokens, dim]."""
    _, heads, tokens, dim = values.shape
    rows = values[0].numpy().reshape(heads * (tokens // BLOCK_TOKENS), BLOCK_TOKENS * dim)
    return from_bfloat16(to_bfloat16(rows))


def prefix_cache(model: Any, ids: torch.Tensor) -> DynamicCache:
    """KV of the prefix as the model computes it."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :PREFIX], logits_to_keep=1, **{cache_name(model): cache})
    return cache


def stored(computed: DynamicCache, scheme: Scheme | None) -> tuple[DynamicCache, list[float]]:
    """The same as it comes back from the store, and what each layer lost."""
    cache, errors = copy.deepcopy(computed), []
    for layer in cache.layers:
        lost = []
        for name in ("keys", "values"):
            values = getattr(layer, name)
            rows = _pieces(values)
            if scheme is not None:
                lost.append(error_of(rows, scheme))
                rows = restored(packed(rows, scheme), scheme)
            setattr(layer, name, torch.from_numpy(rows.reshape(values.shape).copy()))
        errors.append(max(lost, default=0.0))
    return cache, errors


def loss_after(model: Any, ids: torch.Tensor, cache: DynamicCache) -> float:
    """Mean negative log likelihood of the suffix' tokens but the first."""
    logits = model(ids[:, PREFIX:], **{cache_name(model): cache}).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, PREFIX + 1 :]))


def main() -> int:
    root = Path(__file__).parent.parent
    parser = argparse.ArgumentParser(prog="bench.kv_loss")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--model", help="name or folder, as transformers takes it")
    parser.add_argument("--texts", nargs="+", type=Path, default=[root / name for name in TEXTS])
    options = parser.parse_args()
    count = options.windows
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        tokens = AutoTokenizer.from_pretrained(options.model)
    else:
        model, tokens = load_model("gemma3", lambda text: print(text, file=sys.stderr))
    model = model.float().eval()
    losses: dict[str, list[float]] = {}
    errors: dict[str, list[list[float]]] = {}
    with torch.inference_mode():
        for ids in windows(tokens, options.texts, count):
            computed = prefix_cache(model, ids)
            for scheme in (None, *SCHEMES):
                cache, lost = stored(computed, scheme)
                losses.setdefault(scheme or "bfloat16", []).append(loss_after(model, ids, cache))
                errors.setdefault(scheme or "bfloat16", []).append(lost)
            print(f"{len(losses['bfloat16'])} of {count} windows", file=sys.stderr, flush=True)
    report: dict[str, Any] = {"windows": count, "prefix": PREFIX, "suffix": SUFFIX}
    for name, found in losses.items():
        layers = np.mean(errors[name], axis=0)
        worst = int(layers.argmax())
        report[name] = {
            "perplexity": float(np.exp(np.mean(found))),
            "error_by_layer": [round(float(value), 5) for value in layers],
        }
        print(
            f"{name:9} perplexity {report[name]['perplexity']:.4f}  error a layer: median "
            f"{np.median(layers):.4f}, worst {layers[worst]:.4f} (layer {worst}); "
            + " ".join(f"{value:.3f}" for value in layers)
        )
    OUT.mkdir(exist_ok=True)
    (OUT / "kv_loss.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
