"""The engine's paged KV in host memory, block by block, as bytes nobody looks into.

Primitives:
  `LanePages`     one lane's pages: `scatter` slots into engine blocks, `gather` blocks into rows
  `pages_of`      one layer's memory as uint8 [blocks, bytes of a block]
  `prove`         writes through the view and reads through the tensor: they mean the same bytes

A row holds a block's layers one after the other, as a slot does. Copies drop the GIL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine_adapter.refusal import Refused
from engine_adapter.vllm_orders import Lane
from kvstore.types import ByteArray

PROOF_BLOCK = 1
"""Never block 0, which the engine keeps as a place holder."""


def pages_of(name: str, tensor: Any, blocks: int, block_bytes: int) -> ByteArray:
    """uint8 [blocks, block_bytes] over a torch tensor in host memory whose first axis is the block.

    Raises Refused for tensors that do not lie like this."""
    import torch

    if not tensor.is_contiguous() or tensor.shape[0] % blocks:
        raise Refused(
            f"{name}: KV of shape {list(tensor.shape)} and strides {list(tensor.stride())} is not "
            f"{blocks} blocks one after the other; ask vLLM for the layout LBHNC"
        )
    pages: ByteArray = tensor.view(torch.uint8).reshape(blocks, -1).numpy()
    if pages.shape[1] != block_bytes:
        raise Refused(f"{name}: a block has {pages.shape[1]} bytes, its spec says {block_bytes}")
    return pages


def prove(name: str, tensor: Any, pages: ByteArray) -> None:
    """Raises Refused unless bytes written through `pages` are what the tensor holds. Leaves the
    block as it was."""
    import torch

    block = min(PROOF_BLOCK, len(pages) - 1)
    before = pages[block].copy()
    pattern = (np.arange(pages.shape[1]) * 131 % 251).astype(np.uint8)
    pages[block] = pattern
    per_block = tensor.shape[0] // len(pages)
    seen = tensor[block * per_block : (block + 1) * per_block].contiguous().view(torch.uint8)
    is_same = bool((seen.reshape(-1).numpy() == pattern).all())
    pages[block] = before
    if not is_same:
        raise Refused(f"{name}: a block's bytes are not where its shape says")


class LanePages:
    """`pages`: uint8 [blocks, layer_bytes], a layer each, in the lane's order."""

    def __init__(self, lane: Lane, pages: Sequence[ByteArray]) -> None:
        self.lane = lane
        self._pages = tuple(pages)

    @classmethod
    def of(cls, lane: Lane, caches: Mapping[str, Any], blocks: int) -> LanePages:
        """Over the tensors that the engine registered. Raises Refused."""
        found = []
        for name in lane.layer_names:
            pages = pages_of(name, caches[name], blocks, lane.layout.layer_bytes)
            prove(name, caches[name], pages)
            found.append(pages)
        return cls(lane, found)

    def scatter(self, slots: ByteArray, block_ids: Sequence[int], layers: range) -> None:
        """Slots, uint8 [n, at least block_bytes], into n engine blocks; only these layers."""
        size = self.lane.layout.layer_bytes
        for layer in layers:
            pages, start = self._pages[layer], layer * size
            for row, block in enumerate(block_ids):
                np.copyto(pages[block], slots[row, start : start + size])

    def gather(self, block_ids: Sequence[int], rows: ByteArray) -> None:
        """n engine blocks into rows, uint8 [n, block_bytes]."""
        size = self.lane.layout.layer_bytes
        for layer, pages in enumerate(self._pages):
            start = layer * size
            for row, block in enumerate(block_ids):
                np.copyto(rows[row, start : start + size], pages[block])
