"""vLLM's blocks while a device still copies from them.

Primitive: `HeldBlocks`, one reference in vLLM's block pool to every block that is being saved.

A GPU's blocks are saved from where they lie, after the step that computed them. However a request
goes on meanwhile (it ends, is preempted or aborted, its window moves past them), a block with our
reference is handed to nobody. On the scheduler's thread; may not know a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from engine_adapter.vllm_orders import BlockOrder

WAIT_SECONDS = 0.5
"""An allocation waits for no save that takes longer: behind a daemon or a device that hangs, the
engine preempts instead."""


class HeldBlocks:
    """`pool`: vLLM's `BlockPool`."""

    def __init__(self, pool: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._held: dict[int, tuple[float, list[Any]]] = {}
        """By the number of the order, oldest first: since when, and its blocks."""

    def __bool__(self) -> bool:
        return bool(self._held)

    def take(self, saves: Iterable[BlockOrder]) -> None:
        """In the step that orders them, while the requests still own their blocks."""
        now = self._clock()
        for order in saves:
            blocks = [self._pool.blocks[block] for block in order.block_ids]
            self._pool.touch(blocks)
            self._held[order.number] = now, blocks

    def release(self, numbers: Iterable[int]) -> None:
        """Of these orders nothing is read any more; last blocks are the first to be re-used."""
        for number in numbers:
            if number in self._held:
                _, blocks = self._held.pop(number)
                self._pool.free_blocks(reversed(blocks))

    @property
    def will_free(self) -> bool:
        """Whether blocks wait for their saves alone: an allocation may wait for them, too."""
        held = list(self._held.values())
        if not held or self._clock() > held[0][0] + WAIT_SECONDS:
            return False
        return any(block.ref_cnt == 1 for _, blocks in held for block in blocks)
