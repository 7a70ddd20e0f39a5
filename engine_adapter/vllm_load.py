"""Stored blocks into the engine's blocks, on a thread of its own.

Primitives:
  `LoadTask`   one request's load on one rank; `wait` for a layer, or for all
  `LoadThread` runs them in order

Everything lies in host memory: the scheduler's half saw to that. Slots are copied without a call
and compared once more after the last copy; what changed meanwhile, or is gone, has failed. A task
owns its engine blocks until it ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from engine_adapter.vllm_blocks import LanePages
from engine_adapter.vllm_orders import BlockOrder, LoadOrder
from kvstore.client import NamespaceHandle
from kvstore.client.inplace import InPlace, find_in_host
from kvstore.errors import KVStoreError
from kvstore.types import FINGERPRINT_BYTES

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadPart:
    """Consecutive blocks of one lane."""

    pages: LanePages
    handle: NamespaceHandle
    order: BlockOrder


class LoadTask:
    """Made on the engine's thread, run on the load thread. One beside the forward pass puts itself
    into `ended`."""

    def __init__(
        self, order: LoadOrder, parts: Sequence[LoadPart], ended: SimpleQueue[LoadTask]
    ) -> None:
        self.order = order
        self.seconds = 0.0
        self.bad_block_ids: set[int] = set()
        self.bad_names: set[bytes] = set()
        self._is_late = False
        self._parts = tuple(parts)
        self._ended = ended
        layers = parts[0].pages.layers if order.is_layerwise and parts else 1
        self._gates = [threading.Event() for _ in range(layers)]

    @property
    def tokens(self) -> int:
        """Of the lane with the most of them."""
        found: dict[int, int] = {}
        for part in self._parts:
            tokens = len(part.order) * part.pages.lane.block_tokens
            found[part.order.lane] = found.get(part.order.lane, 0) + tokens
        return max(found.values(), default=0)

    @property
    def size_bytes(self) -> int:
        return sum(len(part.order) * part.pages.lane.layout.block_bytes for part in self._parts)

    def wait(self, layer: str, seconds: float) -> None:
        """Until this layer's copies ended, well or not; only of a layerwise task. A layer that is
        later than that was read by the engine too early: nothing of the load counts."""
        number = self._parts[0].pages.layer_of[layer] if self._parts else 0
        if not self._gates[number].wait(seconds):
            self._is_late = True

    def wait_all(self) -> None:
        """Copies between two places in memory end by themselves."""
        self._gates[-1].wait()
        if self._is_late:
            self._all_bad()

    # ------------------------------------------------------------------ the load thread

    def run(self) -> None:
        began = time.monotonic()
        try:
            self._run()
        except KVStoreError as error:
            _log.warning("load of %s failed: %s", self.order.request, error)
            self._all_bad()
        except BaseException:
            self._all_bad()
            raise
        finally:
            self.seconds = time.monotonic() - began
            for gate in self._gates:
                gate.set()
            if not self.order.is_layerwise:
                self._ended.put(self)

    def _run(self) -> None:
        sources = [find_in_host(part.handle, part.order) for part in self._parts]
        found = list(zip(self._parts, sources, strict=True))
        for number, gate in enumerate(self._gates):
            for part, source in found:
                layers = range(part.pages.layers)
                if self.order.is_layerwise:
                    layers = range(number, number + 1)
                self._copy(part, source, layers)
            if gate is not self._gates[-1]:
                gate.set()
        for part, source in found:
            is_valid = source is not None and source.valid()
            blocks = source.blocks if source is not None and is_valid else 0
            self._bad(part, blocks)
            if source is not None:
                source.end(0)  # the scheduler's Match counted the use

    @staticmethod
    def _copy(part: LoadPart, source: InPlace | None, layers: range) -> None:
        if source is None:
            return
        ids = part.order.block_ids
        for first, slots in source.spans(0, source.blocks):
            part.pages.scatter(slots, ids[first : first + len(slots)], layers)

    def _all_bad(self) -> None:
        for part in self._parts:
            self._bad(part, 0)

    def _bad(self, part: LoadPart, first: int) -> None:
        """Blocks from `first` on do not hold the stored bytes."""
        self.bad_block_ids.update(part.order.block_ids[first:])
        joined = part.order.joined
        self.bad_names.update(
            joined[at : at + FINGERPRINT_BYTES]
            for at in range(first * FINGERPRINT_BYTES, len(joined), FINGERPRINT_BYTES)
        )


class LoadThread:
    """One thread: two would compete for the same memory bandwidth."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "kvstore-load")

    def start(self, task: LoadTask) -> None:
        self._pool.submit(task.run).add_done_callback(_report_bug)

    def close(self) -> None:
        """Waits for copies under way: the engine's memory goes next."""
        self._pool.shutdown(wait=True)


def _report_bug(future: Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        _log.error("load thread failed", exc_info=error)
