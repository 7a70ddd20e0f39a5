"""How one block's bytes lie in a slot: [rank][layer][bytes], rank parts 4 KiB aligned.

Primitives: `BlockLayout` (sizes), `BlockLayout.parts()` (ranges with a checksum each), `align_up`.
Knows nothing of tokens, tensors or dtypes: engine KV is opaque bytes per (layer, block).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvstore.errors import InvalidRequest
from kvstore.types import PAGE_BYTES, PARTS_MAX

BLOCK_BYTES_MAX = 1 << 30
LAYERS_MAX = 4096
RANKS_MAX = 64
BLOCK_TOKENS_MAX = 65536


def align_up(value: int, unit: int) -> int:
    """`value` rounded up to a multiple of `unit`."""
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Part:
    """A range of whole layers of one rank with its own checksum; offsets in bytes from the slot's
    start.
    """

    index: int
    rank: int
    layer_first: int
    layer_count: int
    offset: int
    length: int
    """Payload bytes; excludes the padding that aligns the next rank."""


@dataclass(frozen=True)
class BlockLayout:
    """Sizes of one block. Two layouts are equal exactly when their bytes are laid out alike.

    `layer_bytes` is the KV of one layer of one rank for `block_tokens` tokens, keys and values
    together.
    `ranks` counts the *local* ranks that share a slot; an MLA model, whose ranks hold equal bytes,
    has 1.
    """

    block_tokens: int
    layers: int
    layer_bytes: int
    ranks: int = 1

    def __post_init__(self) -> None:
        for name, value, most in (
            ("block_tokens", self.block_tokens, BLOCK_TOKENS_MAX),
            ("layers", self.layers, LAYERS_MAX),
            ("layer_bytes", self.layer_bytes, BLOCK_BYTES_MAX),
            ("ranks", self.ranks, RANKS_MAX),
        ):
            if not 1 <= value <= most:
                raise InvalidRequest(f"layout: {name}={value} must lie between 1 and {most}")
        if self.block_bytes > BLOCK_BYTES_MAX:
            raise InvalidRequest(
                f"layout: a block of {self.block_bytes} bytes exceeds {BLOCK_BYTES_MAX}; "
                "use fewer tokens a block"
            )

    @property
    def rank_payload_bytes(self) -> int:
        """Bytes one rank writes."""
        return self.layers * self.layer_bytes

    @property
    def rank_stride_bytes(self) -> int:
        """Distance between two ranks' bytes in a slot."""
        return align_up(self.rank_payload_bytes, PAGE_BYTES)

    @property
    def block_bytes(self) -> int:
        """Bytes from the first to the last payload byte of a block, inner padding included."""
        return (self.ranks - 1) * self.rank_stride_bytes + self.rank_payload_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds one block."""
        return self.ranks * self.rank_stride_bytes

    def rank_offset(self, rank: int) -> int:
        """Where rank `rank`'s bytes start in a slot."""
        if not 0 <= rank < self.ranks:
            raise InvalidRequest(f"layout: rank {rank} does not exist, there are {self.ranks}")
        return rank * self.rank_stride_bytes

    def layer_offset(self, rank: int, layer: int) -> int:
        """Where one layer of one rank starts in a slot."""
        if not 0 <= layer < self.layers:
            raise InvalidRequest(f"layout: layer {layer} does not exist, there are {self.layers}")
        return self.rank_offset(rank) + layer * self.layer_bytes

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """At most PARTS_MAX ranges that cover every payload byte, each starting on a 4 KiB
        boundary.

        Each lies in one rank when there are at most PARTS_MAX ranks, and is cut at layer
        boundaries that
        happen to be aligned; with more ranks one part covers several whole ranks.
        """
        if self.ranks > PARTS_MAX:
            return self._parts_of_many_ranks()
        groups = PARTS_MAX // self.ranks
        step = self._aligned_layer_step(groups)
        parts: list[Part] = []
        for rank in range(self.ranks):
            for first in range(0, self.layers, step):
                count = min(step, self.layers - first)
                offset = self.rank_offset(rank) + first * self.layer_bytes
                parts.append(Part(len(parts), rank, first, count, offset, count * self.layer_bytes))
        return tuple(parts)

    @cached_property
    def all_parts(self) -> int:
        """Bit mask of a block whose every part is there."""
        return (1 << len(self.parts)) - 1

    def _aligned_layer_step(self, groups: int) -> int:
        """Fewest layers a part may hold so that there are at most `groups` and each starts
        aligned.
        """
        for step in range(-(-self.layers // groups), self.layers):
            if step * self.layer_bytes % PAGE_BYTES == 0:
                return step
        return self.layers

    def _parts_of_many_ranks(self) -> tuple[Part, ...]:
        per_part = -(-self.ranks // PARTS_MAX)
        parts: list[Part] = []
        for rank in range(0, self.ranks, per_part):
            last = min(rank + per_part, self.ranks) - 1
            length = (last - rank) * self.rank_stride_bytes + self.rank_payload_bytes
            parts.append(Part(len(parts), rank, 0, self.layers, self.rank_offset(rank), length))
        return tuple(parts)
