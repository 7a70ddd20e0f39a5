"""Complete identity → namespace → chained fingerprints.

Primitives:
  `KVIdentity`              every field that shapes the bytes of a block
  `namespace_of(identity)`  its 32-byte digest, first parent of every chain in it
  `Chain`                   the fingerprints of one token sequence, grown as tokens come
  `chain(...)`              the same in one call
  `flat_fingerprint(...)`   a name for an opaque key in a flat namespace

Everything is BLAKE2b-256 over a canonical encoding: tags and length prefixes, little-endian, so
that values
that look alike when joined never collide. No builtin hash, no pickle, no process seed. Changing
any byte of
an encoding here changes `KEY_FORMAT` and thereby every name; golden vectors pin it.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.types import FINGERPRINT_BYTES, Fingerprint, NamespaceId, NamespaceKind

KEY_FORMAT = 1
TOKEN_BYTES = 4
_BLOCK = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"kvstore-block-1")
_SLICE_BLOCKS = 256
"""Blocks hashed in one go before other Python threads get a chance to run."""

Tokens = Sequence[int] | NDArray[np.uint32] | bytes | memoryview


@dataclass(frozen=True)
class KVIdentity:
    """Everything that shaped a block's bytes. Fields have no hidden default: what does not apply
    is "".

    Digests are hex or any text that changes with the content; names alone are not an identity.
    `extra` takes
    what a future engine needs; each pair is part of the name.
    """

    model: str
    weights_digest: str
    kv_dtype: str
    """dtype of the stored bytes, for example "bfloat16", "fp8_e4m3"."""
    layout: str
    """Physical layout the engine uses, for example "NHD"; opaque text."""
    block_tokens: int
    layers: int
    kv_heads_per_rank: int
    head_size: int
    kind: NamespaceKind = NamespaceKind.CHAINED
    quantization: str = ""
    """Scheme applied to KV before it was stored; a lossy codec is named here."""
    adapter_digest: str = ""
    """Content digest of the LoRA or other adapter; never its display name."""
    positions: str = ""
    """RoPE type, base and scaling, or whatever encodes positions."""
    attention: str = ""
    """Attention implementation and settings that change KV values."""
    kv_group: str = "full"
    """Which KV group of a hybrid model: "full", "sliding:512", and which layers."""
    tp_size: int = 1
    tp_rank_first: int = 0
    """First tensor-parallel rank whose part lies in these blocks (local ranks share one slot)."""
    tp_ranks_local: int = 1
    pp_size: int = 1
    pp_stage: int = 0
    tenant_salt: str = ""
    extra: tuple[tuple[str, str], ...] = field(default=())

    def encode(self) -> bytes:
        """Canonical bytes: for each field its name, a type tag and a length-prefixed value."""
        out = bytearray(struct.pack("<I", KEY_FORMAT))
        for spec in fields(self):
            out += _text(spec.name) + _value(getattr(self, spec.name))
        return bytes(out)


def namespace_of(identity: KVIdentity) -> NamespaceId:
    """The 32-byte digest that names `identity`."""
    digest = hashlib.blake2b(
        identity.encode(), digest_size=FINGERPRINT_BYTES, person=b"kvstore-space-1"
    )
    return NamespaceId(digest.digest())


def flat_fingerprint(namespace: NamespaceId, key: bytes) -> Fingerprint:
    """Name of an opaque `key` of any length in a flat namespace; never equal to a chained name."""
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"kvstore-flat-1")
    digest.update(namespace + key)
    return Fingerprint(digest.digest())


@dataclass(frozen=True)
class Content:
    """A non-text input (image, audio) whose placeholder tokens start at `position`.

    `digest` enters every block that overlaps [position, position + length) at full width, with its
    position.
    """

    position: int
    length: int
    digest: bytes


class Chain:
    """Fingerprints of the full blocks of one token sequence, grown with `extend`.

    `joined` is the wire and directory form: 32 bytes a block, back to back. A trailing partial
    block has no
    fingerprint; its tokens wait for the next `extend`. Not thread-safe.
    """

    def __init__(
        self, namespace: NamespaceId, block_tokens: int, contents: Iterable[Content] = ()
    ) -> None:
        if len(namespace) != FINGERPRINT_BYTES:
            raise InvalidRequest(f"namespace: {len(namespace)} bytes, must be {FINGERPRINT_BYTES}")
        self.namespace = namespace
        self.block_tokens = block_tokens
        self._contents = sorted(contents, key=lambda content: (content.position, content.digest))
        for content in self._contents:
            if content.position < 0 or content.length < 1:
                raise InvalidRequest(f"content at {content.position} of length {content.length}")
        self._joined = bytearray()
        self._tail = b""

    def __len__(self) -> int:
        return len(self._joined) // FINGERPRINT_BYTES

    def __getitem__(self, depth: int) -> Fingerprint:
        if not 0 <= depth < len(self):
            raise IndexError(f"block {depth} of {len(self)}")
        return Fingerprint(self.part(depth, depth + 1))

    @property
    def tokens(self) -> int:
        """Tokens covered by full blocks."""
        return len(self) * self.block_tokens

    @property
    def joined(self) -> bytes:
        """All fingerprints, concatenated."""
        return bytes(self._joined)

    def part(self, first: int, stop: int) -> bytes:
        """Fingerprints of blocks [first, stop), concatenated."""
        return bytes(self._joined[first * FINGERPRINT_BYTES : stop * FINGERPRINT_BYTES])

    def parent_of(self, depth: int) -> bytes:
        """Name of the block before `depth`; the namespace itself for the first."""
        return self.part(depth - 1, depth) if depth else self.namespace

    def extend(self, tokens: Tokens) -> int:
        """Append token ids (ints below 2^32, or uint32 little-endian bytes); return the number of
        full blocks.
        """
        data = self._tail + _token_bytes(tokens)
        block_bytes = self.block_tokens * TOKEN_BYTES
        usable = len(data) // block_bytes * block_bytes
        for start in range(0, usable, block_bytes * _SLICE_BLOCKS):
            stop = min(start + block_bytes * _SLICE_BLOCKS, usable)
            if self._contents:
                self._hash_with_contents(data, start, stop)
            else:
                self._hash(data, start, stop)
        self._tail = data[usable:]
        return len(self)

    def _hash(self, data: bytes, start: int, stop: int) -> None:
        block_bytes = self.block_tokens * TOKEN_BYTES
        joined, copy = self._joined, _BLOCK.copy
        parent = self.parent_of(len(self))
        for offset in range(start, stop, block_bytes):
            digest = copy()
            digest.update(parent + data[offset : offset + block_bytes])
            parent = digest.digest()
            joined += parent

    def _hash_with_contents(self, data: bytes, start: int, stop: int) -> None:
        block_bytes = self.block_tokens * TOKEN_BYTES
        for offset in range(start, stop, block_bytes):
            first = self.tokens
            digest = _BLOCK.copy()
            digest.update(self.parent_of(len(self)) + data[offset : offset + block_bytes])
            for content in self._contents:
                if content.position < first + self.block_tokens and (
                    content.position + content.length > first
                ):
                    digest.update(
                        struct.pack("<qqI", content.position, content.length, len(content.digest))
                    )
                    digest.update(content.digest)
            self._joined += digest.digest()


def chain(
    namespace: NamespaceId, tokens: Tokens, block_tokens: int, contents: Iterable[Content] = ()
) -> Chain:
    """Fingerprints of every full block of `tokens`."""
    result = Chain(namespace, block_tokens, contents)
    result.extend(tokens)
    return result


def _token_bytes(tokens: Tokens) -> bytes:
    if isinstance(tokens, np.ndarray):
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            raise InvalidRequest(
                f"tokens: need a flat integer array, got {tokens.dtype}{tokens.shape}"
            )
        if (
            tokens.dtype != np.uint32
            and tokens.size
            and (tokens.min() < 0 or tokens.max() >= 1 << 32)
        ):
            raise InvalidRequest("tokens: ids must lie between 0 and 2^32 - 1")
        return tokens.astype("<u4", copy=False).tobytes()
    if isinstance(tokens, (bytes, memoryview)):
        data = bytes(tokens)
        if len(data) % TOKEN_BYTES:
            raise InvalidRequest(f"tokens: {len(data)} bytes are not a whole number of uint32 ids")
        return data
    try:
        return array("I", tokens).tobytes()
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(
            f"tokens: ids must be integers between 0 and 2^32 - 1 ({error})"
        ) from error


def _text(value: str) -> bytes:
    data = value.encode()
    return b"s" + struct.pack("<I", len(data)) + data


def _value(value: object) -> bytes:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63:
        return b"i" + struct.pack("<q", value)
    if isinstance(value, tuple):
        return b"t" + struct.pack("<I", len(value)) + b"".join(_value(item) for item in value)
    raise InvalidRequest(f"identity: {value!r} is neither text, 64-bit integer nor tuple")
