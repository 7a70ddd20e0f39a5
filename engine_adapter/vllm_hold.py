"""vLLM's blocks while a device still copies from them.

Primitive: `HeldBlocks`, one reference in vLLM's block pool to every block that is being saved.

A GPU's blocks are saved from where they lie, after the step that computed them. However a request
goes on meanwhile (it ends, is preempted or aborted, its window moves past them), a block with our
reference is handed to nobody. On the scheduler's thread; may not know a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from engine_adapter.vllm_orders import BlockOrder


class HeldBlocks:
    """`pool`: vLLM's `BlockPool`."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._held: dict[int, list[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def take(self, saves: Iterable[BlockOrder]) -> None:
        """In the step that orders them, while the requests still own their blocks."""
        for order in saves:
            blocks = [self._pool.blocks[block] for block in order.block_ids]
            self._pool.touch(blocks)
            self._held[order.number] = blocks

    def release(self, numbers: Iterable[int]) -> None:
        """Of these orders nothing is read any more; last blocks are the first to be re-used."""
        for number in numbers:
            self._pool.free_blocks(reversed(self._held.pop(number, [])))

    @property
    def will_free(self) -> bool:
        """Whether blocks wait for their saves alone: an allocation may wait for them, too."""
        return any(block.ref_cnt == 1 for block in chain(*self._held.values()))
