"""One generate call: what is restored for it, confirmed, tried again, and saved.

Primitives:
  `Tools`     what all sessions of an attached model share
  `Session`   open -> (meet, confirm | fall_back)* -> prefilled -> save_decoded -> close

Ownership of a row's columns: [0, pad) padding, zeroed; [pad, restored) from the store, provisional
until confirmed; [restored, tokens) computed here. A saver gets whole blocks of the last range only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_adapter.accelerator import (
    Accelerator,
    DevicePrefixLoad,
    DeviceSaveJob,
    target_of,
)
from engine_adapter.loader import CHANGED, LoadThreads, PrefixLoad, Row
from engine_adapter.meeting import BackLoad, meet
from engine_adapter.prefix import Prefix, find
from engine_adapter.saver import HostSaveJob, SaveJob, Saver
from engine_adapter.statistics import RequestReport, Tally
from engine_adapter.tensors import KVTensors
from engine_adapter.transformers_cache import KVCache, ModelShape
from engine_adapter.transformers_modes import Prompt
from kvstore.client import NamespaceHandle
from kvstore.client.inplace import timings_of
from kvstore.errors import KVStoreError
from kvstore.planner import Ability

MEETING_TOKENS_MIN = 64
"""Shorter units cost more in calls than they bring."""


@dataclass(frozen=True)
class Tools:
    """`chunk`: prefill chunk size that exactness asks for, 0 for none. `is_planned`: only what is
    worth loading is loaded. `accelerator`: where the model is on a device."""

    shape: ModelShape
    tensors: KVTensors
    chunk: int
    is_planned: bool
    deadline_seconds: float
    threads: LoadThreads
    saver: Saver
    tally: Tally
    accelerator: Accelerator | None


class Session:
    """On the caller's thread. `handle` None: the store cannot be used, only the cache is ours."""

    def __init__(
        self,
        tools: Tools,
        handle: NamespaceHandle | None,
        prompt: Prompt,
        report: RequestReport,
        began: float,
    ) -> None:
        self._tools = tools
        self._handle = handle
        self._prompt = prompt
        self._report = report
        self._began = began
        empty = tools.accelerator.empty if tools.accelerator else torch.Tensor.new_empty
        self._cache = prompt.cache or KVCache(
            tools.shape.windows, prompt.capacity, tools.chunk, empty
        )
        self._prefixes: list[Prefix] = []
        self._restored: list[int] = [0] * len(prompt.pads)
        """A sequence: its leading tokens that come from the store."""
        self._load: PrefixLoad | BackLoad | DevicePrefixLoad | None = None
        self._tried_again = False
        self._computed_in_front = 0
        """Restored tokens that were computed after all, while others were loaded."""

    def open(self) -> KVCache:
        """The cache to generate with; its prefix may still be on the way."""
        prompt, cache = self._prompt, self._cache
        self._report.prompt_tokens = prompt.tokens
        cache.session = self
        if prompt.cache is None and self._handle is not None:
            cache.namespace = self._handle.id
            columns = prompt.ids.shape[1] - 1  # the last token is always computed
            self._restore([(columns - pad) // self._block_tokens for pad in prompt.pads])
        self._report.lookup_seconds = time.perf_counter() - self._began
        return cache

    @property
    def _block_tokens(self) -> int:
        return self._tools.tensors.block_tokens

    def _row_tokens(self, ids: torch.Tensor, row: int) -> NDArray[np.uint32]:
        """One sequence's token ids without padding."""
        tokens: NDArray[np.uint32] = ids[row, self._prompt.pads[row] :].numpy().astype(np.uint32)
        return tokens

    # ------------------------------------------------------------------ the prefix

    def _restore(self, blocks_max: list[int]) -> None:
        """Find at most so many blocks of each row, and start to load what all rows can share."""
        tools, prompt, handle = self._tools, self._prompt, self._handle
        assert handle is not None  # open asks for it
        ability = self._ability()
        self._prefixes = [
            find(handle, self._row_tokens(prompt.ids, row), blocks, tools.deadline_seconds, ability)
            for row, blocks in enumerate(blocks_max)
        ]
        ends = [
            pad + prefix.blocks * self._block_tokens
            for pad, prefix in zip(prompt.pads, self._prefixes, strict=True)
        ]
        columns = min(*ends, prompt.ids.shape[1] - 1)
        self._restored = [max(columns - pad, 0) for pad in prompt.pads]
        self._report.miss_reason = next((p.reason for p in self._prefixes if p.reason), "")
        if not any(self._restored):
            self._abandon()
            return
        repeat = prompt.expand
        rows = [
            Row(prefix, count, pad, tuple(range(row * repeat, (row + 1) * repeat)))
            for row, (prefix, count, pad) in enumerate(
                zip(self._prefixes, self._restored, prompt.pads, strict=True)
            )
        ]
        pads = [pad for pad in prompt.pads for _ in range(repeat)]
        room = columns + self._block_tokens  # a device brings whole blocks
        self._cache.restore(tools.shape, len(pads), columns, pads, room)
        self._cache.fed_max = prompt.ids.shape[1]
        try:
            self._load = self._start(rows)
        except KVStoreError as error:
            self._abandon()
            self._report.miss_reason = f"{type(error).__name__}: {error}"

    def _start(self, rows: list[Row]) -> PrefixLoad | BackLoad | DevicePrefixLoad:
        """Raises KVStoreError for a device that does not take it."""
        tools, cache = self._tools, self._cache
        tensors, limit, tally = tools.tensors, tools.deadline_seconds, tools.tally
        if tools.accelerator is not None:
            there = DevicePrefixLoad(tools.accelerator, tensors, rows, cache.whole(), limit)
            cache.await_load(there)
            return there
        made = self._prefixes[0].plan
        load: PrefixLoad | BackLoad
        if made is not None and made.from_back:
            load = BackLoad(tensors, self._prefixes[0], made, cache.buffers(), limit, tally)
        else:
            load = PrefixLoad(tensors, rows, cache.buffers(), limit, tally)
            cache.await_load(load)
        tools.threads.start(load)
        return load

    def _ability(self) -> Ability | None:
        """What can be planned for: a single prompt. Batches share one length, whatever it costs."""
        tools, prompt = self._tools, self._prompt
        if not tools.is_planned or len(prompt.pads) > 1 or prompt.pads[0] or prompt.expand > 1:
            return None
        # In chunks, only the first one is computed while layers arrive.
        stages = 1 if tools.chunk else len(tools.tensors.block_layout.parts)
        can_meet = self._block_tokens >= MEETING_TOKENS_MIN and tools.accelerator is None
        return Ability(prompt.ids.shape[1], stages=stages, unit_blocks=int(can_meet))

    def meet(self, compute: Callable[[int, int], None]) -> None:
        """Compute the front while the back is loaded, if that is the plan. `compute(start, end)`
        feeds tokens [start, end) to the model and this cache."""
        if not isinstance(self._load, BackLoad):
            return
        self._cache.move_to(0)
        computed, reason = meet(self._load, self._block_tokens, compute)
        self._cache.move_to(self._restored[0])
        self._computed_in_front = min(computed, self._restored[0])
        self._report.met_at_tokens = self._computed_in_front
        self._report.miss_reason = self._report.miss_reason or reason

    def _abandon(self) -> None:
        """Nothing is restored: the cache starts empty."""
        if isinstance(self._load, DevicePrefixLoad):
            self._load.cancel()
        self._end_prefixes()
        self._load = None
        self._restored = [0] * len(self._restored)
        self._computed_in_front = 0
        self._cache.restart()
        self._cache.fed_max = 0

    def _end_prefixes(self, *, used: bool = False) -> None:
        for prefix, tokens in zip(self._prefixes, self._restored, strict=False):
            prefix.end(-(-tokens // self._block_tokens) if used else 0)
        self._prefixes = []

    def confirm(self) -> str:
        """After the prefill: "" if it stands, else why it does not."""
        return self._load.confirm() if self._load is not None else ""

    def fall_back(self, reason: str) -> None:
        """The prefill is thrown away. Once more with the blocks that did come, then without any."""
        assert self._load is not None  # nothing else fails
        self._report.reruns += 1
        whole = min(self._load.whole(), default=0)
        again = len(self._prefixes) == 1 and whole and reason != CHANGED and not self._tried_again
        self._abandon()
        if again:
            self._tried_again = True
            self._restore([whole])
        self._report.miss_reason = reason

    def prefilled(self, ids: torch.Tensor, seconds: float) -> None:
        """The prefill stands, and took so long. `ids`: the whole prompt as it was fed, rows
        repeated."""
        cpu = time.thread_time()
        size, report = self._block_tokens, self._report
        waited = isinstance(self._load, PrefixLoad | DevicePrefixLoad)
        if self._handle is not None and len(ids) == 1 and not waited and not report.reruns:
            timings = timings_of(self._handle)
            timings.prefill(self._handle.id, self._restored[0], ids.shape[1], seconds)
        report.first_token_seconds = time.perf_counter() - self._began
        for prefix, tokens in zip(self._prefixes, self._restored, strict=False):
            front = self._computed_in_front
            below = prefix.below_host(-(-tokens // size)) - prefix.below_host(front // size)
            report.nvme_tokens += min(below * size, tokens - front)
            report.host_tokens += tokens - front - min(below * size, tokens - front)
        self._end_prefixes(used=True)
        self._load = None
        self._cache.fed_max = 0
        if self._prompt.cache is None:
            self._cache.saved_blocks = [-(-tokens // size) for tokens in self._restored]
        self._tools.tally.request(report)
        self._save(ids[:: self._prompt.expand].cpu())
        self._tools.tally.add(hook_cpu_seconds=time.thread_time() - cpu)

    # ------------------------------------------------------------------ what was computed

    def save_decoded(self, output: Any) -> None:
        """After generate: blocks that generated tokens filled, unless only prefill chunks count."""
        if self._tools.chunk or self._prompt.expand > 1:
            return
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        self._save(sequences[:, : self._cache.get_seq_length()].cpu())

    def _save(self, ids: torch.Tensor) -> None:
        """Hand whole blocks that are not stored yet to the saver. `ids`: all the cache's tokens."""
        cache, prompt, handle = self._cache, self._prompt, self._handle
        if handle is None or cache.namespace != handle.id:
            return
        if ids.shape != (len(prompt.pads), cache.get_seq_length()):
            return
        if not all(self._tools.shape.shows(layer) for layer in cache.layers):
            return
        for row, pad in enumerate(prompt.pads):
            first, stop = cache.saved_blocks[row], self._savable(ids.shape[1], pad)
            if stop <= first:
                continue
            cache.share()
            tokens = self._row_tokens(ids, row)
            self._tools.saver.submit(self._job(handle, row, tokens, first, stop))
            cache.saved_blocks[row] = stop

    def _job(
        self, handle: NamespaceHandle, row: int, tokens: NDArray[np.uint32], first: int, stop: int
    ) -> SaveJob:
        tools, at, pad = self._tools, row * self._prompt.expand, self._prompt.pads[row]
        what = (handle, tools.tensors, tokens, first, stop)
        if (there := tools.accelerator) is not None:
            target = target_of(self._cache.whole(), at, pad, tools.tensors)
            return DeviceSaveJob(*what, there, target, there.stream())
        held = self._cache.buffers()
        keys, values = [one.keys[at] for one in held], [one.values[at] for one in held]
        return HostSaveJob(*what, pad, keys, values)

    def _savable(self, columns: int, pad: int) -> int:
        """Leading blocks of a row that may be stored."""
        if not self._tools.chunk:
            return (columns - pad) // self._block_tokens
        is_single = len(self._prompt.pads) == 1 and self._prompt.expand == 1 and pad == 0
        return self._cache.exact_tokens // self._block_tokens if is_single else 0

    def close(self) -> None:
        """However generate ended."""
        if isinstance(self._load, DevicePrefixLoad):
            self._load.cancel()
        self._end_prefixes()
        self._load = None
        self._cache.session = None
