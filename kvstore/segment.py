"""Frames on NVMe: one header page and one payload in a slot of a preallocated segment file.

Primitives:
  `FRAME`, `FORMAT_VERSION`        the header's one definition
  `FrameFields`, `pack_frame`, `parse_frame`
  `frame_bytes`                    size of the slot that holds a payload
  `SegmentGeometry`                slot number → segment, byte offset, file length

Pure: bytes in, bytes out; no file is touched here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from kvstore.errors import FrameMalformed, check
from kvstore.layout import align_up
from kvstore.types import PAGE_BYTES, PARTS_MAX, ByteArray, UIntArray

FORMAT_VERSION = 1
FRAME = struct.Struct("<8sHHIQd32s32s32sIIII8I8I8QQ")
"""magic, version, part count, payload length, generation, stored at (s), namespace, fingerprint,
parent, namespace index, clear count, depth, uses, part offsets, part lengths, part checksums,
xxh3_64 of all before it."""
MAGIC = b"KVFRAME\x01"
SLOT_BYTES_MIN = 2 * PAGE_BYTES
_CHECKSUM_BYTES = 8
check(FRAME.size == 280, "the frame header has the size its format version says", size=FRAME.size)


@dataclass(frozen=True, eq=False)
class FrameFields:
    """What a frame says about its block. `checksums` is uint64[PARTS_MAX], indexed by part."""

    generation: int
    """Names one write; never used twice in one data directory."""
    namespace: bytes
    fingerprint: bytes
    parent: bytes
    """Fingerprint of the block before, the namespace for a chain's first block."""
    namespace_index: int
    clear_count: int
    depth: int
    length: int
    """Payload bytes."""
    checksums: UIntArray
    uses: int = 0
    stored_at: float = 0.0
    """Wall-clock seconds; set by the tier."""
    parts: tuple[tuple[int, int], ...] = ()
    """(offset, length) of every part in the payload; set by the tier."""


def frame_bytes(length: int) -> int:
    """Bytes of a slot for a payload of `length` bytes."""
    return PAGE_BYTES + align_up(length, PAGE_BYTES)


def pack_frame(frame: FrameFields) -> bytes:
    """The header, FRAME.size bytes; the rest of its page is zero."""
    pad = (0,) * (PARTS_MAX - len(frame.parts))
    body = FRAME.pack(
        MAGIC,
        FORMAT_VERSION,
        len(frame.parts),
        frame.length,
        frame.generation,
        frame.stored_at,
        frame.namespace,
        frame.fingerprint,
        frame.parent,
        frame.namespace_index,
        frame.clear_count,
        frame.depth,
        frame.uses,
        *(offset for offset, _ in frame.parts),
        *pad,
        *(length for _, length in frame.parts),
        *pad,
        *frame.checksums.tolist(),
        0,
    )[:-_CHECKSUM_BYTES]
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(_CHECKSUM_BYTES, "little")


def parse_frame(page: bytes | ByteArray) -> FrameFields:
    """Raises FrameMalformed for anything that is not a whole, undamaged header of this format."""
    data = bytes(page[: FRAME.size])
    if len(data) < FRAME.size or data[: len(MAGIC)] != MAGIC:
        raise FrameMalformed("no frame header here")
    values = FRAME.unpack(data)
    if xxhash.xxh3_64_intdigest(data[:-_CHECKSUM_BYTES]) != values[-1]:
        raise FrameMalformed("the frame header's checksum differs")
    version, part_count, length = values[1:4]
    if version != FORMAT_VERSION:
        raise FrameMalformed(f"frame format {version}, this is {FORMAT_VERSION}")
    offsets, lengths, checksums = values[13:21], values[21:29], values[29:37]
    if not 1 <= part_count <= PARTS_MAX or any(
        offset + size > length for offset, size in zip(offsets, lengths, strict=True)
    ):
        raise FrameMalformed(f"{part_count} parts of a payload of {length} bytes do not fit it")
    return FrameFields(
        generation=values[4],
        stored_at=values[5],
        namespace=values[6],
        fingerprint=values[7],
        parent=values[8],
        namespace_index=values[9],
        clear_count=values[10],
        depth=values[11],
        uses=values[12],
        length=length,
        checksums=np.array(checksums, np.uint64),
        parts=tuple(zip(offsets[:part_count], lengths[:part_count], strict=True)),
    )


@dataclass(frozen=True)
class SegmentGeometry:
    """Where slots lie. `slab_bytes` is the address range of one segment; a larger frame takes
    several.
    """

    slab_bytes: int
    slot_bytes_min: int = SLOT_BYTES_MIN

    @property
    def slots_per_slab_max(self) -> int:
        return self.slab_bytes // self.slot_bytes_min

    def segment_of(self, slot: int) -> int:
        return slot // self.slots_per_slab_max

    def offset_of(self, slot: int, slot_bytes: int) -> int:
        """Byte offset in the segment's file."""
        return slot % self.slots_per_slab_max * slot_bytes

    def slots_in(self, slot_bytes: int) -> int:
        """Slots one file serves."""
        return max(1, self.slab_bytes // slot_bytes)

    def file_bytes(self, slot_bytes: int) -> int:
        return self.slots_in(slot_bytes) * slot_bytes

    def span(self, slot_bytes: int) -> int:
        """Segments a file of this slot size takes."""
        return max(1, -(-slot_bytes // self.slab_bytes))


def geometry_of(segment_bytes: int) -> SegmentGeometry:
    """Slabs are 1/64 larger than `segment_bytes`: room for header pages, so that payloads of a
    power of two fill it.
    """
    return SegmentGeometry(
        segment_bytes + align_up(segment_bytes // 64, PAGE_BYTES), SLOT_BYTES_MIN
    )
