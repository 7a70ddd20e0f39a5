"""Blocks whose bytes follow from their fingerprints: any reader can tell right from wrong.

Primitives:
  `Painter(block_bytes)`   `paint` a block, `is_painted`, count `wrong_bytes`
  `prompt(...)`            token ids of a numbered prompt, equal in every process
  `identity_of(...)`       a complete identity for a layout

Every 8-byte word of a block depends on the fingerprint and on its place: another block's bytes,
bytes moved within a block, zeroes and remains of an earlier owner all differ. Used by benchmarks
and by tests that kill the daemon.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.fingerprint import KVIdentity
from kvstore.layout import BlockLayout

WORD_BYTES = 8
_STRIDE = 0x9E3779B97F4A7C15
"""Odd, so that no two places of a block are alike below 2^64 words."""
_SLICE_WORDS = 1 << 15
"""256 KiB: what is compared at a time stays in a core's cache."""

Bytes = NDArray[np.uint8]


class Painter:
    """Colours blocks of one size. Thread-safe; paints about as fast as memory copies."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        words = -(-block_bytes // WORD_BYTES)
        self._ramp = np.arange(words, dtype=np.uint64) * np.uint64(_STRIDE)

    def paint(self, fingerprint: bytes, into: Bytes) -> None:
        """Write the block named `fingerprint` into flat uint8 [block_bytes]."""
        colour = _colour(fingerprint)
        whole = self.block_bytes // WORD_BYTES
        np.add(self._ramp[:whole], colour, out=into[: whole * WORD_BYTES].view(np.uint64))
        if tail := self.block_bytes % WORD_BYTES:
            into[-tail:] = (self._ramp[whole:] + colour).view(np.uint8)[:tail]

    def painted(self, fingerprint: bytes) -> Bytes:
        """A new uint8 [block_bytes] with the block named `fingerprint`."""
        block = np.empty(self.block_bytes, np.uint8)
        self.paint(fingerprint, block)
        return block

    def is_painted(self, fingerprint: bytes, block: Bytes) -> bool:
        """Whether flat uint8 [block_bytes] is that block, every byte of it."""
        if block.shape != (self.block_bytes,):
            return False
        colour = _colour(fingerprint)
        whole = self.block_bytes // WORD_BYTES
        words = block[: whole * WORD_BYTES].view(np.uint64)
        for start in range(0, whole, _SLICE_WORDS):
            piece = slice(start, min(start + _SLICE_WORDS, whole))
            if not np.array_equal(self._ramp[piece] + colour, words[piece]):
                return False
        tail = self.block_bytes % WORD_BYTES
        expected = (self._ramp[whole:] + colour).view(np.uint8)[:tail]
        return not tail or bool(np.array_equal(expected, block[-tail:]))

    def wrong_bytes(self, fingerprint: bytes, block: Bytes) -> int:
        """How many bytes of flat uint8 [block_bytes] differ from that block's."""
        return int(np.count_nonzero(self.painted(fingerprint) != block))


def _colour(fingerprint: bytes) -> np.uint64:
    """All 32 bytes of a name folded into one word."""
    words = np.frombuffer(fingerprint, np.uint64)
    return np.uint64(np.bitwise_xor.reduce(words * np.uint64(_STRIDE) ^ words >> np.uint64(29)))


def prompt(number: int, tokens: int, shared: int = 0) -> NDArray[np.uint32]:
    """uint32 [tokens]: the first `shared` ids are the same for every `number`, the rest its own."""
    ids = np.random.default_rng([number, tokens]).integers(0, 128_000, tokens, np.uint32)
    ids[:shared] = np.random.default_rng(shared).integers(
        0, 128_000, min(shared, tokens), np.uint32
    )
    return ids


def identity_of(layout: BlockLayout, model: str = "synthetic") -> KVIdentity:
    """An identity that names `model` and fits `layout`."""
    return KVIdentity(
        model=model,
        weights_digest=f"sha256:{model}",
        kv_dtype="uint8",
        layout="opaque",
        block_tokens=layout.block_tokens,
        layers=layout.layers,
        kv_heads_per_rank=1,
        head_size=layout.layer_bytes,
        tp_size=layout.ranks,
        tp_ranks_local=layout.ranks,
    )
