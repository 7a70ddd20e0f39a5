"""Where things lie in the directory's header: sizes, page 0, typed views. Decides nothing."""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.layout import align_up
from kvstore.types import FINGERPRINT_BYTES, PAGE_BYTES, ByteArray, UIntArray

STORE_ORDER_TRUSTED = platform.machine().lower() in ("x86_64", "amd64")
"""Whether this processor keeps stores in order; where it does not, readers need leases."""

FORMAT_VERSION = 2
MAGIC = b"KVARENA\0"
PAGE_0 = struct.Struct("<8sIIQQQQQ")
"""magic, format version, 0, boot id, slots, buckets, namespaces_max, filter counters"""
BOOT_WORD = 2
"""Place of the boot id among page 0's 64-bit words."""
NAME_WORDS = FINGERPRINT_BYTES // 8
RECORD_WORDS = 8
OFFSET, LENGTH, SPACE = 4, 5, 6
"""Words of a record behind the fingerprint; the last one is free."""
BUCKET = 8
BUCKET_WORDS = 2 * BUCKET
EMPTY = 0xFFFF_FFFF
SLOTS_MAX = 1 << 31
U32 = np.dtype(np.uint32)
U64 = np.dtype(np.uint64)
I64 = np.dtype(np.int64)
# 0-d arrays: numpy takes them at half the price of its scalars, and a lookup is thirty such calls.
ONE = np.array(1, U64)
HALF = np.array(32, U64)
_NAME = np.dtype((np.uint64, NAME_WORDS))
_ALIGN_BYTES = 64


def header_bytes(slots: int, namespaces_max: int, counters: int = 0) -> int:
    """Bytes of the header for `slots` slots and a filter of `counters`; a multiple of 4096."""
    return align_up(_starts(slots, namespaces_max, counters)[-1], PAGE_BYTES)


def buckets_for(slots: int) -> int:
    """A power of two that gives at least two entries a slot."""
    return 1 << (max(2 * slots // BUCKET, 1) - 1).bit_length()


def _starts(slots: int, namespaces_max: int, counters: int) -> list[int]:
    """Where spaces, generations, records, buckets and filter start, and where the last one ends."""
    rows = slots + 1
    sizes = (namespaces_max, rows, rows * RECORD_WORDS, buckets_for(slots) * BUCKET, counters // 8)
    starts = [PAGE_BYTES]
    for words in sizes:
        starts.append(align_up(starts[-1] + words * 8, _ALIGN_BYTES))
    return starts


class Columns:
    """Typed views of one header, shared by both sides. Bytes of `header` stay someone else's."""

    def __init__(self, header: ByteArray, slots: int, namespaces_max: int, counters: int) -> None:
        starts = _starts(slots, namespaces_max, counters)
        spaces, generations, records, buckets, below, end = starts
        rows = slots + 1
        self.slots = slots
        self.namespaces_max = namespaces_max
        self.mask = buckets_for(slots) - 1
        """Buckets less one; a tag's home bucket is tag & mask."""
        self.spaces: UIntArray = header[spaces : spaces + namespaces_max * 8].view(U64)
        """namespace << 32 | clear count"""
        self.generations: UIntArray = header[generations : generations + rows * 8].view(U64)
        words = header[records : records + rows * RECORD_WORDS * 8].view(U64)
        self.records: UIntArray = words.reshape(rows, RECORD_WORDS)
        halves = header[buckets:below].view(U32)
        self.buckets: NDArray[np.uint32] = halves.reshape(-1, BUCKET_WORDS)
        """Eight upper halves of tags, then their eight slots."""
        self.below: ByteArray = header[below:end][:counters]
        """Counters of the filter of names below the host tier."""
        # memoryviews: scalar access at a third of numpy's price, still one load or store each
        self.page_words = header[:PAGE_BYTES].view(U64).data
        self.record_words = words.data
        self.halves = halves.data

    def bucket(self, number: int) -> tuple[list[int], list[int]]:
        """(upper halves of tags, slots) of one bucket."""
        words = self.halves[number * BUCKET_WORDS : (number + 1) * BUCKET_WORDS].tolist()
        return words[:BUCKET], words[BUCKET:]

    def slots_in(self, number: int) -> list[int]:
        """Slots of one bucket."""
        end = (number + 1) * BUCKET_WORDS
        slots: list[int] = self.halves[end - BUCKET : end].tolist()
        return slots

    def tag(self, slot: int) -> int:
        """First 8 bytes of the fingerprint in a slot's record."""
        tag: int = self.record_words[slot * RECORD_WORDS]
        return tag

    def candidates(self, tag: int) -> Iterator[int]:
        """Slots whose entries share the tag's upper half, from its home to a bucket with room."""
        upper = tag >> 32
        for step in range(self.mask + 1):
            uppers, slots = self.bucket((tag + step) & self.mask)
            if upper in uppers:
                for index, slot in enumerate(slots):
                    if uppers[index] == upper and slot != EMPTY:
                        yield slot
            if EMPTY in slots:
                return

    def is_absent(self, tag: int) -> bool:
        """Whether the tag's home bucket alone tells that there is no candidate."""
        uppers, slots = self.bucket(tag & self.mask)
        return tag >> 32 not in uppers and EMPTY in slots


def names_of(fingerprints: bytes | ByteArray) -> UIntArray:
    """Fingerprints as u64[n, 4]; raises InvalidRequest unless whole."""
    data = fingerprints if isinstance(fingerprints, bytes) else fingerprints.tobytes()
    try:
        return np.frombuffer(data, _NAME)
    except ValueError as error:
        raise InvalidRequest(
            f"fingerprints: {len(data)} bytes are not a whole number of {FINGERPRINT_BYTES}"
        ) from error
