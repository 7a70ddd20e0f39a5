"""Blocks as the chunks of a stream, with as few copies as Python allows.

Primitives:
  `join_data`, `split_data`   a `Chunk` and its bytes as one message, and apart again
  `chunks_of`                 the messages of one block, checksum in the last
  `Assembly`                  the other direction: chunks into one block's row, checked

The `data` field never passes through a protobuf object, which would copy it twice in either
direction: it is framed, and found, by hand; everything else is protobuf's. Knows nothing of gRPC.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash
from google.protobuf.message import DecodeError

from kvstore.errors import ChecksumMismatch, InvalidRequest
from kvstore.rpc import blocks_pb2 as pb
from kvstore.types import ByteArray

CHUNK_BYTES = 1 << 20
MESSAGE_BYTES_MAX = 4 << 20
_DATA_FIELD = pb.Chunk.DESCRIPTOR.fields_by_name["data"].number
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DATA_TAG = bytes([_DATA_FIELD << 3 | _BYTES])


class Received(NamedTuple):
    """One message. `problem`: why its bytes are no chunk, "" if they are."""

    chunk: pb.Chunk
    data: memoryview
    problem: str = ""


def join_data(chunk: pb.Chunk, data: memoryview | bytes) -> bytes:
    """The wire form of `chunk` with `data`; one copy."""
    return b"".join((chunk.SerializeToString(), _DATA_TAG, _varint(len(data)), data))


def split_data(message: bytes) -> Received:
    """Any valid encoding of a Chunk; `data` is a view of `message`. Never raises."""
    view = memoryview(message)
    rest: list[memoryview] = []
    data = view[:0]
    at, size = 0, len(view)
    try:
        while at < size:
            start = at
            tag, at = _read_varint(view, at)
            if tag & 7 == _BYTES:
                length, at = _read_varint(view, at)
                at += length
                if at <= size and tag >> 3 == _DATA_FIELD:
                    data = view[at - length : at]
                    continue
            else:
                at = _skip(view, at, tag & 7)
            rest.append(view[start:at])
        if at > size:
            raise DecodeError("truncated")
        return Received(pb.Chunk.FromString(b"".join(rest)), data)
    except (DecodeError, IndexError) as error:
        return Received(pb.Chunk(), view[:0], f"no Chunk message: {error}")


def chunks_of(block: int, payload: ByteArray) -> Iterator[bytes]:
    """`payload` uint8 [n] as messages; each is a copy of its piece."""
    view = memoryview(payload.data)
    checksum = xxhash.xxh3_64()
    size = len(view)
    for start in range(0, size, CHUNK_BYTES):
        piece = view[start : start + CHUNK_BYTES]
        checksum.update(piece)
        chunk = pb.Chunk(block=block, offset=start)
        if start + len(piece) == size:
            chunk.last, chunk.xxh3 = True, checksum.intdigest()
        yield join_data(chunk, piece)


class Assembly:
    """Chunks of one block at a time into a row of memory."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._checksum = xxhash.xxh3_64()
        self.filled = 0
        """Bytes of the block under way; 0 between blocks."""

    def take(self, received: Received, row: ByteArray) -> bool:
        """Add a chunk to `row`, uint8 [block_bytes]; True when the block is whole and right.

        Raises InvalidRequest (order, sizes), ChecksumMismatch; the assembly is then over.
        """
        chunk, data = received.chunk, received.data
        end = self.filled + len(data)
        if chunk.offset != self.filled or not 0 < len(data) <= CHUNK_BYTES:
            raise InvalidRequest(
                f"block {chunk.block}: a chunk of {len(data)} bytes at offset {chunk.offset}, "
                f"expected 1 to {CHUNK_BYTES} bytes at {self.filled}"
            )
        if end > self._block_bytes or chunk.last != (end == self._block_bytes):
            raise InvalidRequest(
                f"block {chunk.block}: {end} bytes with last={chunk.last}; "
                f"blocks of this namespace have {self._block_bytes}"
            )
        np.copyto(row[self.filled : end], np.frombuffer(data, np.uint8))
        self._checksum.update(row[self.filled : end].data)
        self.filled = end
        if not chunk.last:
            return False
        found = self._checksum.intdigest()
        self.filled = 0
        self._checksum.reset()
        if found != chunk.xxh3:
            raise ChecksumMismatch(
                f"block {chunk.block}: arrived with checksum {found:016x}, "
                f"its trailer says {chunk.xxh3:016x}"
            )
        return True


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise DecodeError("a number of more than ten bytes")


def _skip(view: memoryview, at: int, kind: int) -> int:
    if kind == _VARINT:
        return _read_varint(view, at)[1]
    if kind == _FIXED64:
        return at + 8
    if kind == _FIXED32:
        return at + 4
    raise DecodeError(f"field type {kind}")
