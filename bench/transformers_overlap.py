"""How much of a load from NVMe hides behind the computation of the suffix, layer by layer.

The disk reads as fast as the suffix computes: the daemon runs behind `bench.slow_disk`. Three times
are taken in each round: the load alone (find, reads, copies, the last comparison), the computation
alone (on a cache that never left the process), and a request that does both. The prefixes of
all requests hold the same bytes, which changes no time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np
import torch

import engine_adapter.transformers as kv
from bench.harness import Bar, Context, Part, Reading, spread
from bench.transformers_common import (
    Prose,
    Stand,
    StockCache,
    gemma,
    stand,
    stored,
    timed_dtype,
    warm_up,
)
from engine_adapter.loader import LoadThreads, PrefixLoad, Row
from engine_adapter.prefix import find
from engine_adapter.statistics import Tally
from engine_adapter.transformers_cache import KVCache, ModelShape

BLOCK_TOKENS = 100
PREFIX_TOKENS = 1500
SUFFIX_TOKENS = 500
WARM_UP = 1
DEADLINE_SECONDS = 20.0
HIDDEN = Bar("hf_overlap_hidden_share", "ratio", at_least=0.75)


class Loads:
    """Loads without a model behind them."""

    def __init__(self, here: Stand, shape: ModelShape) -> None:
        self._here = here
        self._shape = shape
        self._threads = LoadThreads()

    def alone(self, ids: torch.Tensor) -> float:
        """Seconds from the look-up until the prefix of `ids` lies in a cache, confirmed."""
        start = time.perf_counter()
        handle = self._here.attached.namespace()
        tokens = ids[0, :PREFIX_TOKENS].numpy().astype(np.uint32)
        found = find(handle, tokens, PREFIX_TOKENS // BLOCK_TOKENS, DEADLINE_SECONDS)
        cache = KVCache(self._shape.windows, PREFIX_TOKENS + SUFFIX_TOKENS)
        cache.restore(self._shape, 1, PREFIX_TOKENS, (0,))
        buffers = cache.buffers()
        rows = [Row(found, PREFIX_TOKENS, 0, (0,))]
        tensors = self._shape.tensors(BLOCK_TOKENS)
        load = PrefixLoad(tensors, rows, buffers, DEADLINE_SECONDS, Tally())
        self._threads.start(load)
        reason = load.confirm()
        seconds = time.perf_counter() - start
        from_nvme = found.below_host(found.blocks) * BLOCK_TOKENS
        found.end(found.blocks)
        if reason or from_nvme != PREFIX_TOKENS:
            raise RuntimeError(f"{from_nvme} tokens loaded from NVMe: {reason or found.reason}")
        return seconds

    def close(self) -> None:
        self._threads.close()


def _overlap(context: Context) -> Iterator[Reading]:
    model, tokens = gemma(timed_dtype())
    prose = Prose(tokens)
    shape = kv.probe(model)
    rounds = WARM_UP + context.several(9, 3)
    with stand(context.folder("overlap"), model, block_tokens=BLOCK_TOKENS, exact=False) as here:
        warm_up(context, here, prose.prompt(PREFIX_TOKENS))
        context.step(f"storing {2 * rounds} prefixes of {PREFIX_TOKENS} tokens")
        prefixes = stored(here, prose, 2 * rounds, PREFIX_TOKENS, prefill_chunk_size=BLOCK_TOKENS)
        prompts = [prose.after(prefix, SUFFIX_TOKENS) for prefix in prefixes]
        stock = StockCache(model, prompts[0][:, :PREFIX_TOKENS], BLOCK_TOKENS)
        compute = [here.ttft_without(prompts[0], **stock.copied()) for _ in range(3)]
        rate = PREFIX_TOKENS * shape.tensors(1).block_layout.block_bytes / np.median(compute)
        context.step(f"the daemon again, its disk at {rate / 1e6:.0f} MB/s")
        here.daemon.command = (sys.executable, "-m", "bench.slow_disk", f"{rate:.0f}", "serve")
        here.restart()
        loads = Loads(here, shape)
        try:
            seen = np.array([_round(here, loads, stock, prompts, turn) for turn in range(rounds)])
        finally:
            loads.close()
    load, compute_alone, both = seen[WARM_UP:].T
    shares = (load + compute_alone - both) / np.minimum(load, compute_alone)
    yield Reading(
        HIDDEN.name,
        float(np.median(shares)),
        f"{spread(shares)} of {len(shares)} rounds, worst {shares.min():.2f}; medians: load "
        f"{np.median(load) * 1e3:.0f} ms, compute {np.median(compute_alone) * 1e3:.0f} ms, both "
        f"{np.median(both) * 1e3:.0f} ms; {PREFIX_TOKENS} + {SUFFIX_TOKENS} tokens, the suffix in "
        f"one chunk (exact=False), {timed_dtype()}, the daemon's reads throttled to "
        f"{rate / 1e6:.0f} MB/s",
    )


def _round(
    here: Stand, loads: Loads, stock: StockCache, prompts: list[torch.Tensor], turn: int
) -> tuple[float, float, float]:
    """Seconds of load, computation, both; the order turns."""
    alone, overlapped = prompts[2 * turn : 2 * turn + 2]
    work = [
        lambda: loads.alone(alone),
        lambda: here.ttft_without(overlapped, **stock.copied()),
        lambda: here.ttft_hit(overlapped, nvme=PREFIX_TOKENS),
    ]
    seconds = [0.0, 0.0, 0.0]
    for step in range(3):
        which = (turn + step) % 3
        seconds[which] = work[which]()
    return seconds[0], seconds[1], seconds[2]


PART = Part("loads behind computation", (HIDDEN,), _overlap)
