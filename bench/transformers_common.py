"""Ground of the suite `transformers`: Gemma on the CPU, a daemon of its own, times to first token.

Primitives:
  `gemma()`         the model and its tokens, loaded once
  `Prose`           prompts of any length out of the support desk's texts, no two with equal starts
  `Stand`           model + daemon + adapter; `ttft`, `ttft_without`, `settle`, `restart`
  `stored(...)`     prompts whose prefixes are on NVMe
  `StockCache`      the stock cache filled with a prefix, as if it had never left the process
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

import engine_adapter.transformers as kv
from bench.daemons import DaemonProcess
from bench.demo import TEXTS, FirstToken
from bench.demo_models import Tokens, load_model
from bench.harness import Context

SETTINGS = {"host.bytes": "1GiB", "nvme.bytes_max": "4GiB"}
CONNECT_SECONDS_MAX = 30.0
SETTLE_SECONDS_MAX = 60.0
DEADLINE_SECONDS = 20.0
RECOMPUTE_CHUNK = 512
"""The honest baseline: faster here than one shot."""


def timed_dtype() -> torch.dtype:
    """What times are taken in: bfloat16, or float32 where the processor would emulate it (a prefill
    then takes several times as long, and every hit would look good beside it)."""
    has_bfloat16 = "AVX512" in torch.backends.cpu.get_cpu_capability()
    return torch.bfloat16 if has_bfloat16 else torch.float32


@cache
def gemma(dtype: torch.dtype) -> tuple[Any, Tokens]:
    """Gemma 3 270M, converted on the first run."""
    model, tokens = load_model("gemma3", lambda text: print(f"  {text}", flush=True))
    return model.to(dtype), tokens


class Prose:
    """Real text as token ids [1, n]. Every prompt starts elsewhere, so none is another's prefix."""

    def __init__(self, tokens: Tokens) -> None:
        texts = (TEXTS / "system.md", TEXTS / "handbook.md")
        first, *rest = tokens.encode("\n".join(path.read_text() for path in texts))
        self._first = first
        self._rest = rest
        self._starts = 0

    def prompt(self, length: int) -> torch.Tensor:
        """Begins with the first token of every text (BOS)."""
        return torch.tensor([[self._first, *self._stretch(length - 1)]])

    def after(self, prefix: torch.Tensor, length: int) -> torch.Tensor:
        """`prefix` and `length` new tokens."""
        return torch.cat([prefix, torch.tensor([self._stretch(length)])], dim=1)

    def _stretch(self, length: int) -> list[int]:
        self._starts += 1
        start = 37 * self._starts % len(self._rest)
        return [self._rest[(start + place) % len(self._rest)] for place in range(length)]


class Stand:
    """One model, attached to one daemon."""

    def __init__(self, model: Any, daemon: DaemonProcess, attached: kv.Attached) -> None:
        self.model = model
        self.daemon = daemon
        self.attached = attached

    def ttft(self, ids: torch.Tensor, **arguments: Any) -> float:
        """Seconds from the call of generate to its first new token, as things are."""
        first = FirstToken()
        start = time.perf_counter()
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            do_sample=False,
            streamer=first,
            **arguments,
        )
        return first.at - start

    def ttft_without(self, ids: torch.Tensor, **arguments: Any) -> float:
        """The same without kvstore."""
        with self.attached.paused():
            return self.ttft(ids, **arguments)

    def ttft_hit(self, ids: torch.Tensor, *, host: int = 0, nvme: int = 0) -> float:
        """With kvstore; raises RuntimeError unless so many tokens came from each tier."""
        seconds = self.ttft(ids)
        last = self.attached.last
        if (last.host_tokens, last.nvme_tokens, last.reruns) != (host, nvme, 0):
            raise RuntimeError(f"no hit of host={host}, nvme={nvme}: {last}")
        self.settle()
        return seconds

    def settle(self) -> None:
        """Wait until what was computed is stored. Raises RuntimeError when something was not."""
        done = self.attached.flush(SETTLE_SECONDS_MAX)
        if not done or self.attached.statistics().refused_blocks:
            raise RuntimeError(f"blocks were not stored: {self.attached.statistics()}")

    def to_disk(self, ids: torch.Tensor) -> None:
        """All stored blocks of the prompt are durable."""
        namespace = self.attached.namespace()
        chain = namespace.chain(ids[0].numpy())
        if not namespace.flush(chain, deadline_seconds=SETTLE_SECONDS_MAX).all():
            raise RuntimeError("the daemon did not write all blocks in time")

    def restart(self) -> None:
        """Kill the daemon, start the next life, wait until the adapter's client is with it."""
        client, before = self.attached.client, self.attached.client.boot_id
        self.daemon.kill()
        self.daemon.start()
        end = time.monotonic() + CONNECT_SECONDS_MAX
        while client.boot_id in (0, before) or not client.wait_connected(1.0):
            if time.monotonic() > end:
                raise RuntimeError(f"the client did not come back: {client.away_reason}")
            time.sleep(0.01)


def stored(
    here: Stand, prose: Prose, count: int, tokens: int, **arguments: Any
) -> list[torch.Tensor]:
    """`count` prefixes on NVMe. One was computed, the others have its bytes under names of their
    own: that changes no time, and saves as many prefills."""
    computed = prose.prompt(tokens)
    here.ttft(prose.after(computed, 1), **arguments)
    here.settle()
    handle = here.attached.namespace()
    blocks = np.empty((tokens // handle.layout.block_tokens, handle.layout.block_bytes), np.uint8)
    if handle.load(handle.chain(computed[0].numpy()), blocks).blocks != len(blocks):
        raise RuntimeError("the computed prefix was not stored")
    prefixes = [prose.prompt(tokens) for _ in range(count)]
    for prefix in prefixes:
        handle.store(handle.chain(prefix[0].numpy()), blocks).result(SETTLE_SECONDS_MAX)
        here.to_disk(prefix)
    return prefixes


@contextmanager
def stand(
    folder: Path, model: Any, settings: Mapping[str, str] = SETTINGS, **options: Any
) -> Iterator[Stand]:
    """A daemon in `folder` and `model` attached to it with `options`; what is stored is loaded,
    unless a plan is asked for."""
    options = {"deadline_seconds": DEADLINE_SECONDS, "plan": False, **options}
    with (
        DaemonProcess(folder, settings) as daemon,
        kv.attach(model, daemon.socket, **options) as attached,
    ):
        if not attached.client.wait_connected(CONNECT_SECONDS_MAX):
            raise RuntimeError(f"cannot reach the daemon: {attached.client.away_reason}")
        yield Stand(model, daemon, attached)


class StockCache:
    """transformers' own cache after a prefix that was prefilled in chunks."""

    def __init__(self, model: Any, prefix: torch.Tensor, chunk: int) -> None:
        self._filled = DynamicCache(config=model.config)
        self._name = kv.cache_name(model)
        with torch.no_grad():
            for piece in prefix.split(chunk, dim=1):
                model(piece, use_cache=True, logits_to_keep=1, **{self._name: self._filled})

    def copied(self) -> dict[str, Any]:
        """A copy that a call may change, as an argument of generate."""
        return {self._name: copy.deepcopy(self._filled)}


def warm_up(context: Context, stand: Stand, ids: torch.Tensor) -> None:
    """Make torch's threads, caches and kernels ready."""
    context.step("warming up the model")
    stand.ttft_without(ids, prefill_chunk_size=RECOMPUTE_CHUNK)
