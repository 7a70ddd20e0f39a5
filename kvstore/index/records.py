"""What the index stores, byte for byte, and the error that says it cannot be read."""

from __future__ import annotations

import msgspec
import numpy as np

from kvstore.errors import TierIO
from kvstore.layout import BlockLayout
from kvstore.types import FINGERPRINT_BYTES, PARTS_MAX, NamespaceId, NamespaceKind

ENGINE = "lmdb-0.9"
"""Format of the index on disk; LMDB 1.0 cannot read it, nor the other way round."""
ENGINE_MAJOR = 0

RECORD = np.dtype(
    [
        ("parent", f"V{FINGERPRINT_BYTES}"),
        ("namespace", "<u2"),
        ("clear_count", "<u4"),
        ("depth", "<u4"),
        ("slot", "<u8"),
        ("generation", "<u8"),
        ("length", "<u4"),
        ("checksums", "<u8", (PARTS_MAX,)),
        ("uses", "<u4"),
        ("stored_at", "<f8"),
    ]
)

Put = tuple[bytes, bytes]
"""Fingerprint, RECORD bytes."""
Delete = tuple[bytes, int | None]
"""Fingerprint, generation the record must have (None: any)."""


class IndexDamaged(TierIO):
    """The index cannot be opened or read; set it aside and rebuild it from frame headers."""


class NamespaceRecord(msgspec.Struct, frozen=True):
    """One declared namespace as it outlives the daemon."""

    index: int
    id: bytes
    kind: NamespaceKind
    block_tokens: int
    layers: int
    layer_bytes: int
    ranks: int
    window_tokens: int = 0
    label: str = ""
    clear_count: int = 0

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.block_tokens, self.layers, self.layer_bytes, self.ranks)

    @property
    def namespace(self) -> NamespaceId:
        return NamespaceId(self.id)
