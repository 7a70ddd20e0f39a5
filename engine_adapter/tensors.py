"""How the keys and values of a block lie in a slot.

A slot holds [layer][keys, values][head][token][dim]: each layer is one contiguous stretch, so that
one strided copy moves one layer's keys of many neighbouring blocks into an engine's buffer. Works
on uint8 views; knows no dtype beyond its size. With a `scheme` a slot holds packed pieces in the
same order instead, which only a device's kernels write and read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from engine_adapter.quantised import ELEMENT_BYTES, Scheme, piece_bytes
from kvstore.errors import InvalidRequest
from kvstore.layout import BlockLayout
from kvstore.types import ByteArray

LAYOUT_NAME = "layer,kv,head,token,dim"
"""Part of every identity: other orders are other bytes."""


@dataclass(frozen=True)
class KVTensors:
    """One layer's shape, the same for all `layers`; bytes are those of one head and one token."""

    layers: int
    heads: int
    key_bytes: int
    value_bytes: int
    block_tokens: int
    scheme: Scheme | None = None
    """Keys and values are kept as 8-bit numbers."""

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "key_bytes", "value_bytes", "block_tokens"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"tensors: {name}={getattr(self, name)} must be at least 1")

    @property
    def layer_bytes(self) -> int:
        """Keys and values of one layer of one block."""
        if self.scheme is not None:
            return 2 * self.heads * piece_bytes(self.block_tokens, self.key_bytes // ELEMENT_BYTES)
        return self.heads * self.block_tokens * (self.key_bytes + self.value_bytes)

    @cached_property
    def block_layout(self) -> BlockLayout:
        """As the store sees it; raises InvalidRequest when a block would be too large."""
        return BlockLayout(self.block_tokens, self.layers, self.layer_bytes)

    @cached_property
    def part_of_layer(self) -> tuple[int, ...]:
        """The part that a layer lies in, as the store announces them."""
        return tuple(
            part.index for part in self.block_layout.parts for _ in range(part.layer_count)
        )

    def keys(self, slots: ByteArray, layer: int) -> ByteArray:
        """View [n, heads, block_tokens, key_bytes] of `slots` uint8 [n, slot bytes]."""
        return self._view(slots, layer * self.layer_bytes, self.key_bytes)

    def values(self, slots: ByteArray, layer: int) -> ByteArray:
        """View [n, heads, block_tokens, value_bytes] of `slots` uint8 [n, slot bytes]."""
        skip = self.heads * self.block_tokens * self.key_bytes
        return self._view(slots, layer * self.layer_bytes + skip, self.value_bytes)

    def _view(self, slots: ByteArray, offset: int, row_bytes: int) -> ByteArray:
        length = self.heads * self.block_tokens * row_bytes
        # Cutting the last axis never copies, so that writing through the result reaches the slots.
        return slots[:, offset : offset + length].reshape(
            len(slots), self.heads, self.block_tokens, row_bytes
        )

    def blocks_of(self, buffer: ByteArray, column: int, blocks: int) -> ByteArray:
        """View [blocks, heads, block_tokens, row bytes], from `column` on, of an engine's buffer
        uint8 [heads, columns, row bytes]."""
        heads, _, row_bytes = buffer.shape
        stretch = buffer[:, column : column + blocks * self.block_tokens]
        return stretch.reshape(heads, blocks, self.block_tokens, row_bytes).swapaxes(0, 1)
