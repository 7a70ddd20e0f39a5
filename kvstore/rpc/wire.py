"""Packed little-endian arrays as they travel in `bytes` fields of the control protocol.

Primitives: `pack_u64`, `unpack_u64`, `unpack_u8`, `split_fingerprints`, `unpack_name`, the record
`READY` with `each_ready`, and the protocol's version. Every unpack checks the length first and
raises InvalidRequest naming the field; the arrays it returns are read-only views into the message's
bytes. Knows nothing of gRPC.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.types import FINGERPRINT_BYTES, ByteArray, IntArray, UIntArray

PROTOCOL_MAJOR = 1
"""Differs: the pair cannot talk, and says so once."""
PROTOCOL_MINOR = 0
"""Differs: works; what one side does not know it ignores."""

NO_OFFSET = 2**64 - 1
"""In an offsets field: this block has no slot that may be touched now."""
READY = np.dtype([("group", "<u2"), ("parts", "<u2"), ("block", "<u4")])
"""Readable parts of one block: group of the request, bit mask, block counted from `first`; in
`LoadReply.failed` the mask is 0."""

_READY_RECORD = struct.Struct("<HHI")
"""The same as READY, for one record at a time."""


def pack_u64(values: Sequence[int] | IntArray | UIntArray) -> bytes:
    """8 bytes a value; -1 in a signed array becomes NO_OFFSET."""
    return np.asarray(values, np.uint64).tobytes()


def unpack_u64(data: bytes, field: str, count: int | None = None) -> UIntArray:
    """uint64 [count]; `count=None` takes what is there."""
    return _unpack(data, field, count, "<u8")


def unpack_u8(data: bytes, field: str, count: int | None = None) -> ByteArray:
    """uint8 [count]; `count=None` takes what is there."""
    return _unpack(data, field, count, "u1")


def split_fingerprints(data: bytes, field: str, most: int | None = None) -> ByteArray:
    """uint8 [n, 32]; raises InvalidRequest for a ragged length or more than `most` blocks."""
    if len(data) % FINGERPRINT_BYTES:
        raise InvalidRequest(
            f"{field}: {len(data)} bytes are not a whole number of {FINGERPRINT_BYTES}-byte names"
        )
    count = len(data) // FINGERPRINT_BYTES
    if most is not None and count > most:
        raise InvalidRequest(f"{field}: {count} blocks in one call, the limit is {most}; split it")
    return np.frombuffer(data, np.uint8).reshape(count, FINGERPRINT_BYTES)


def unpack_name(data: bytes, field: str) -> bytes:
    """`data` itself when it is one 32-byte name (fingerprint, parent, namespace)."""
    if len(data) != FINGERPRINT_BYTES:
        raise InvalidRequest(f"{field}: {len(data)} bytes, must be {FINGERPRINT_BYTES}")
    return data


def each_ready(data: bytes, field: str) -> Iterator[tuple[int, int, int]]:
    """(group, mask of parts, block) of each record: cheaper than an array for a few of them."""
    _check_whole(data, field, _READY_RECORD.size)
    return _READY_RECORD.iter_unpack(data)


def _unpack(data: bytes, field: str, count: int | None, dtype: str) -> NDArray[Any]:
    size = np.dtype(dtype).itemsize
    _check_whole(data, field, size)
    if count is not None and len(data) != count * size:
        raise InvalidRequest(f"{field}: {len(data) // size} entries, expected {count}")
    return np.frombuffer(data, dtype)


def _check_whole(data: bytes, field: str, size: int) -> None:
    if len(data) % size:
        raise InvalidRequest(f"{field}: {len(data)} bytes are not a multiple of {size}")
