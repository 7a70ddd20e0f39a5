"""What a full miss costs beside the prefill: processor time of everything the adapter adds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness import Bar, Context, Part, Reading, spread
from bench.transformers_common import Prose, Stand, gemma, stand, timed_dtype, warm_up
from engine_adapter.transformers_cache import KVCache

PROMPT_TOKENS = 2000
BLOCK_TOKENS = 128
SHARE = Bar("hf_miss_hook_cpu_share", "ratio", at_most=0.02)


def threads() -> frozenset[int]:
    """Kernel ids of this process' threads."""
    return frozenset(int(path.name) for path in Path("/proc/self/task").iterdir())


def thread_seconds(ids: frozenset[int]) -> float:
    """Processor time of threads so far; what has ended counts nothing."""
    seconds = 0.0
    for number in ids:
        try:
            # The clock that the kernel keeps for a thread: pthread_getcpuclockid for any id.
            seconds += time.clock_gettime((~number << 3) | 6)
        except OSError:
            continue
    return seconds


class Capture:
    """Processor time inside the adapter's cache, where keys and values are captured."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        update = KVCache.update

        def timed(cache: KVCache, *args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return update(cache, *args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start

        KVCache.update = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            KVCache.update = update  # type: ignore[method-assign]


class Meter:
    """Processor seconds of misses, split by where they went. `engine`: threads of the model."""

    def __init__(self, here: Stand, engine: frozenset[int]) -> None:
        self._here = here
        self._engine = engine
        self._capture = Capture()
        self.parts: dict[str, list[float]] = {"hooks": [], "capture": [], "threads": []}

    def prefill(self, ids: torch.Tensor) -> float:
        """Without kvstore, in the same chunks."""
        start = thread_seconds(self._engine)
        self._here.ttft_without(ids, prefill_chunk_size=BLOCK_TOKENS)
        return thread_seconds(self._engine) - start

    def miss(self, ids: torch.Tensor) -> float:
        """What the adapter adds, until all blocks are stored."""
        before = self._now()
        with self._capture.watching():
            self._here.ttft(ids)
        self._here.settle()
        if self._here.attached.last.hit_tokens:
            raise RuntimeError(f"no miss: {self._here.attached.last}")
        spent = [now - then for now, then in zip(self._now(), before, strict=True)]
        for samples, seconds in zip(self.parts.values(), spent, strict=True):
            samples.append(seconds)
        return sum(spent)

    def _now(self) -> tuple[float, float, float]:
        hooks = self._here.attached.statistics().hook_cpu_seconds
        return hooks, self._capture.seconds, thread_seconds(threads() - self._engine)


def _miss(context: Context) -> Iterator[Reading]:
    model, tokens = gemma(timed_dtype())
    prose = Prose(tokens)
    # Threads of the engine are there before the adapter's are: what comes later is not its own.
    model.generate(prose.prompt(PROMPT_TOKENS), max_new_tokens=2, do_sample=False)
    engine = threads() - {thread.native_id for thread in threading.enumerate()} | {os.getpid()}
    with stand(context.folder("miss"), model, block_tokens=BLOCK_TOKENS) as here:
        warm_up(context, here, prose.prompt(PROMPT_TOKENS))
        meter = Meter(here, engine)
        context.step("full misses beside the prefill alone")
        shares: list[float] = []
        prefills: list[float] = []
        daemon = here.daemon.cpu_seconds()
        for _ in range(context.several(4, 2)):
            ids = prose.prompt(PROMPT_TOKENS)
            prefills.append(meter.prefill(ids))
            shares.append(meter.miss(ids) / prefills[-1])
        daemon = (here.daemon.cpu_seconds() - daemon) / sum(prefills)
    parts = ", ".join(
        f"{name} {np.median(samples) * 1e3:.3g} ms" for name, samples in meter.parts.items()
    )
    yield Reading(
        SHARE.name,
        float(np.median(shares)),
        f"{spread(shares)} of {len(shares)} pairs; {parts} (threads: saver and client, commit "
        f"included; capture: all of the cache's update, which the stock cache has too) ÷ "
        f"{np.median(prefills) * 1e3:.4g} ms of {PROMPT_TOKENS} tokens in chunks of "
        f"{BLOCK_TOKENS}, {timed_dtype()}; beside it the daemon, write-behind included, "
        f"{daemon:.2%} of the prefill",
    )


PART = Part("what a miss costs", (SHARE,), _miss)
