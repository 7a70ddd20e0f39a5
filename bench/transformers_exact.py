"""Logits of hits, bit by bit, beside runs that computed everything in the same chunks.

Of the prompts of each dtype some go to Gemma, past its window of 512 tokens, the others to small
random models (full attention; sliding windows) whose wide weights show every wrong key. The
control swaps two stored blocks, of two prompts: it must show. (Swapped within one prompt they would
show in sliding windows only: keys carry their positions, full attention sees a set.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from bench.demo_models import TINY_VOCABULARY, load_model
from bench.harness import Bar, Context, Part, Reading
from bench.transformers_common import Prose, Stand, gemma, stand, timed_dtype
from kvstore.types import BlockStatus

NEW_TOKENS = 2
RECLAIM_SECONDS_MAX = 30.0
DONE = (BlockStatus.STORED, BlockStatus.PRESENT)
BF16 = Bar("hf_exact_bf16", "values", at_most=0)
FP32 = Bar("hf_exact_fp32", "values", at_most=0)
CONTROL = Bar("hf_exact_control", "values", at_least=1)


@dataclass(frozen=True)
class Subject:
    """A model and its prompts: `prefixes` stored, `prompts_each` asked about each of them."""

    name: str
    model: Any
    block_tokens: int
    prefixes: int
    prompts_each: int
    blocks_max: int
    prose: Prose | None = None

    def prompt(self, length: int) -> torch.Tensor:
        if self.prose is not None:
            return self.prose.prompt(length)
        return torch.randint(3, TINY_VOCABULARY, (1, length))

    def after(self, prefix: torch.Tensor, length: int) -> torch.Tensor:
        return torch.cat([prefix, self.prompt(length)], dim=1)


@dataclass
class Seen:
    """Counts of one dtype."""

    prompts: list[str] = field(default_factory=list)
    values: int = 0
    differing: int = 0
    controls: list[int] = field(default_factory=list)
    """A control: logits that differ when two blocks are swapped."""


def _sliding() -> Any:
    """Random weights, four of six layers with a window of two blocks."""
    config = Gemma3TextConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=64,
        initializer_range=0.5,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).eval()


def _subjects(context: Context, dtype: torch.dtype) -> Iterator[Subject]:
    """Gemma gets few prompts where the processor emulates the dtype."""
    is_slow = dtype == torch.bfloat16 != timed_dtype()
    tiny, gemmas, each = (13, 2, 1) if is_slow else (12, 2, 2)
    prefixes = context.several(tiny, 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other cost more than they compute
    full, _ = load_model("tiny", lambda _: None)
    yield Subject("tiny full attention", full.to(dtype), 32, prefixes, 4, 8)
    yield Subject("tiny sliding windows", _sliding().to(dtype), 32, prefixes, 4, 8)
    torch.set_num_threads(threads)
    model, tokens = gemma(dtype)
    yield Subject("Gemma", model, 128, gemmas, each, 5, Prose(tokens))


def _run(here: Stand, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Logits [new tokens, vocabulary] of a greedy run."""
    output = here.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **arguments,
    )
    return torch.cat(output.logits)


def _uncached(here: Stand, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    with here.attached.paused():
        return _run(here, ids, prefill_chunk_size=chunk)


def _hit(here: Stand, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    logits = _run(here, ids)
    if here.attached.last.host_tokens != tokens:
        raise RuntimeError(f"no hit of {tokens} tokens: {here.attached.last}")
    here.settle()
    return logits


def _differing(ours: torch.Tensor, expected: torch.Tensor) -> int:
    return int((ours != expected).sum())


def _measure(here: Stand, subject: Subject, seen: Seen) -> None:
    """Every prefix is stored by a miss, then asked for by hits that go on differently."""
    size = subject.block_tokens
    prefixes = []
    for number in range(subject.prefixes):
        blocks = subject.blocks_max - number % (subject.blocks_max - 1)
        prefix = subject.prompt(blocks * size)
        prefixes.append(prefix)
        _run(here, subject.after(prefix, 1))
        here.settle()
        for turn in range(subject.prompts_each):
            ids = subject.after(prefix, 1 + (number * 29 + turn * 53) % (size + size // 2))
            expected = _uncached(here, ids, size)
            seen.differing += _differing(_hit(here, ids, blocks * size), expected)
            seen.values += expected.numel()
            seen.prompts.append(subject.name)
    _swap_last(here, *prefixes[-2:])
    seen.controls.append(_differing(_hit(here, ids, blocks * size), expected))


def _swap_last(here: Stand, *prefixes: torch.Tensor) -> None:
    """Store two prefixes anew, the last block that both have swapped."""
    handle = here.attached.namespace()
    chains = [handle.chain(prefix[0].numpy()) for prefix in prefixes]
    stored = [np.empty((len(chain), handle.layout.block_bytes), np.uint8) for chain in chains]
    for chain, blocks in zip(chains, stored, strict=True):
        if handle.load(chain, blocks).blocks != len(chain):
            raise RuntimeError("the stored blocks cannot be read")
    one, two = stored
    last = min(len(one), len(two)) - 1
    one[last], two[last] = two[last].copy(), one[last].copy()
    handle.clear()
    end = time.monotonic() + RECLAIM_SECONDS_MAX
    for chain, blocks in zip(chains, stored, strict=True):
        # What was cleared is still being reclaimed for a moment.
        while not all(status in DONE for status in handle.store(chain, blocks).result(20.0)):
            if time.monotonic() > end:
                raise RuntimeError("the swapped blocks were not stored")
            time.sleep(0.05)


def _exact(context: Context) -> Iterator[Reading]:
    controls: list[int] = []
    for bar, dtype in ((BF16, torch.bfloat16), (FP32, torch.float32)):
        if not (context.wants(bar.name) or context.wants(CONTROL.name)):
            continue
        seen = Seen()
        for subject in _subjects(context, dtype):
            context.step(f"{bar.name}: {subject.name}")
            folder = context.folder(f"{bar.name}-{subject.block_tokens}-{len(seen.controls)}")
            with stand(folder, subject.model, block_tokens=subject.block_tokens) as here:
                _measure(here, subject, seen)
        controls += seen.controls
        counts = {name: seen.prompts.count(name) for name in dict.fromkeys(seen.prompts)}
        share = ", ".join(f"{count} on {name}" for name, count in counts.items())
        note = f"of {seen.values} logits of {len(seen.prompts)} prompts ({share}), {NEW_TOKENS} "
        note += "steps each; hits of 2 blocks and more, block = prefill chunk, batch of one"
        yield Reading(bar.name, seen.differing, note)
    note = f"fewest of {len(controls)} controls, two stored blocks swapped in each: {controls}"
    yield Reading(CONTROL.name, min(controls), note)


PART = Part("exactness of hits", (BF16, FP32, CONTROL), _exact)
