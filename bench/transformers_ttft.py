"""Time to first token of hits: beside prefilling again, and beside a cache that never left."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.harness import Bar, Context, Part, Reading, pairs
from bench.transformers_common import (
    RECOMPUTE_CHUNK,
    Prose,
    Stand,
    StockCache,
    gemma,
    stand,
    stored,
    timed_dtype,
    warm_up,
)

BLOCK_TOKENS = 100
"""So that a hit has exactly PREFIX_TOKENS; the chunk of the stored prefill as well."""
PREFIX_TOKENS = 1900
NEW_TOKENS = 100
SIZE = f"{PREFIX_TOKENS} + {NEW_TOKENS} tokens, blocks of {BLOCK_TOKENS}, {timed_dtype()}"
RECOMPUTE = f"{PREFIX_TOKENS + NEW_TOKENS} tokens prefilled in chunks of {RECOMPUTE_CHUNK}"

VS_RECOMPUTE = Bar("hf_hit_ttft_vs_recompute", "ratio", at_most=0.2)
VS_WARM = Bar("hf_hit_ttft_vs_warm_cache", "ratio", at_most=1.10)
NVME_VS_RECOMPUTE = Bar("hf_nvme_hit_ttft_vs_recompute", "ratio", at_most=0.3)


def _host(context: Context) -> Iterator[Reading]:
    model, tokens = gemma(timed_dtype())
    prose = Prose(tokens)
    prefix = prose.prompt(PREFIX_TOKENS)
    with stand(context.folder("host"), model, block_tokens=BLOCK_TOKENS) as here:
        warm_up(context, here, prose.prompt(PREFIX_TOKENS))
        here.ttft(prose.after(prefix, 1))
        here.settle()
        asked = [prose.after(prefix, NEW_TOKENS) for _ in range(context.several(22, 6))]
        if context.wants(VS_RECOMPUTE.name):
            context.step("host hits beside prefilling again")
            yield _vs_recompute(here, asked[: context.several(6, 3)])
        if context.wants(VS_WARM.name):
            context.step("host hits beside a warm cache")
            yield _vs_warm(here, StockCache(model, prefix, BLOCK_TOKENS), asked)


def _vs_recompute(here: Stand, asked: list[torch.Tensor]) -> Reading:
    seen = pairs(
        len(asked) - 1,
        lambda turn: here.ttft_without(asked[turn], prefill_chunk_size=RECOMPUTE_CHUNK),
        lambda turn: here.ttft_hit(asked[turn], host=PREFIX_TOKENS),
        warm_up=1,
    )
    return Reading(VS_RECOMPUTE.name, seen.ratio, f"{seen.note(RECOMPUTE)}; {SIZE}")


def _vs_warm(here: Stand, stock: StockCache, asked: list[torch.Tensor]) -> Reading:
    seen = pairs(
        len(asked) - 2,
        # The argument is made, and the cache copied with it, before the clock starts.
        lambda turn: here.ttft_without(asked[turn], **stock.copied()),
        lambda turn: here.ttft_hit(asked[turn], host=PREFIX_TOKENS),
    )
    note = seen.note("transformers' own cache, kept in the process")
    return Reading(VS_WARM.name, seen.ratio, f"{note}; {SIZE}")


def _nvme(context: Context) -> Iterator[Reading]:
    model, tokens = gemma(timed_dtype())
    prose = Prose(tokens)
    with stand(context.folder("nvme"), model, block_tokens=BLOCK_TOKENS) as here:
        warm_up(context, here, prose.prompt(PREFIX_TOKENS))
        count = context.several(6, 3)
        context.step(f"storing {count} prefixes, then a SIGKILL")
        prefixes = stored(here, prose, count, PREFIX_TOKENS)
        here.restart()
        context.step("NVMe hits beside prefilling again")
        asked = [prose.after(prefix, NEW_TOKENS) for prefix in prefixes]
        seen = pairs(
            count - 1,
            lambda turn: here.ttft_without(asked[turn], prefill_chunk_size=RECOMPUTE_CHUNK),
            lambda turn: here.ttft_hit(asked[turn], nvme=PREFIX_TOKENS),
            warm_up=1,
        )
        mode = here.daemon.stat()["nvme"]["mode"]
        note = f"{seen.note(RECOMPUTE)}; {SIZE}, daemon killed and started between, {mode} I/O"
        yield Reading(NVME_VS_RECOMPUTE.name, seen.ratio, note)


PARTS = [
    Part("hits in host memory", (VS_RECOMPUTE, VS_WARM), _host),
    Part("hits on NVMe", (NVME_VS_RECOMPUTE,), _nvme),
]
