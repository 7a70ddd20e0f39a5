"""The clients' side of the directory: vectorised lookups that never wait. Any thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.directory.below import may_be_below
from kvstore.directory.layout import (
    BOOT_WORD,
    BUCKET,
    BUCKET_WORDS,
    EMPTY,
    FORMAT_VERSION,
    I64,
    LENGTH,
    MAGIC,
    NAME_WORDS,
    OFFSET,
    PAGE_0,
    SLOTS_MAX,
    SPACE,
    U32,
    U64,
    Columns,
    buckets_for,
    header_bytes,
    names_of,
)
from kvstore.errors import InvalidRequest, PeerGone, VersionMismatch
from kvstore.types import BoolArray, ByteArray, IntArray, UIntArray

_EVEN = np.array((1 << 64) - 2, U64)
_EQUAL = np.array(0x01010101, U32)
"""Four true bools seen as one word."""


@dataclass(slots=True)
class Found:
    """A readable prefix of `count` blocks; every array has `count` entries.

    Each block's fields were READY together at the moment of the lookup. Bytes copied from
    [offset, offset + length) of the arena are the stored ones exactly if `still_valid` says so
    after the last copy.
    """

    count: int
    slots: IntArray
    generations: UIntArray
    offsets: UIntArray
    lengths: UIntArray


@dataclass(slots=True)
class FoundEach:
    """An answer a block: `mask` bool[n] says which are readable; the other arrays, also [n], mean
    nothing where it is False."""

    mask: BoolArray
    slots: IntArray
    generations: UIntArray
    offsets: UIntArray
    lengths: UIntArray


_NOTHING = Found(0, np.empty(0, I64), np.empty(0, U64), np.empty(0, U64), np.empty(0, U64))


class _Read(NamedTuple):
    """What was read for each name; only where `mask` is True it is a READY block of that name."""

    mask: BoolArray
    slots: IntArray
    generations: UIntArray
    records: UIntArray


class DirectoryReader:
    """Reads `header`, the mapped header as uint8, read-only or not.

    Raises PeerGone when no daemon lives in the header (it shuts down, or the next one is just
    starting), VersionMismatch when it was written in another format.
    """

    def __init__(self, header: ByteArray) -> None:
        fields = PAGE_0.unpack_from(header.data)
        magic, version, _, boot_id, slots, buckets, namespaces_max, counters = fields
        if magic == bytes(len(MAGIC)) or boot_id == 0:
            raise PeerGone("directory: the header names no living daemon; attach again later")
        if magic != MAGIC or version != FORMAT_VERSION:
            raise VersionMismatch(
                f"directory: the header is {magic!r} version {version}, this client reads {MAGIC!r}"
                f" version {FORMAT_VERSION}; use the client library of the daemon's release"
            )
        if (
            not 0 < slots < SLOTS_MAX
            or not 0 < namespaces_max < SLOTS_MAX
            or buckets != buckets_for(slots)
            or counters & (counters - 1)
            or header_bytes(slots, namespaces_max, counters) > len(header)
        ):
            raise VersionMismatch(
                f"directory: {slots} slots, {buckets} buckets, {namespaces_max} namespaces do not"
                f" fit a header of {len(header)} bytes; daemon and client disagree on its layout"
            )
        self._columns = Columns(header, slots, namespaces_max, counters)
        self._mask = np.array(self._columns.mask, U64)
        self._places = np.arange(BUCKET, 1024 * BUCKET_WORDS, BUCKET_WORDS)

    @property
    def boot_id(self) -> int:
        """The life of the daemon that writes here now; 0 once it ended."""
        boot_id: int = self._columns.page_words[BOOT_WORD]
        return boot_id

    def lookup(self, namespace: int, fingerprints: bytes | ByteArray) -> Found:
        """Longest READY prefix of `fingerprints` (32 bytes each) in namespace index `namespace`.

        Raises InvalidRequest for an index out of range or a torn fingerprint. O(n), no lock, no
        call; missing at the first block costs a tenth of a hit.
        """
        space = self._space_of(namespace)
        wanted = names_of(fingerprints)
        if not len(wanted) or self._columns.is_absent(int(wanted[0, 0])):
            return _NOTHING
        slots, _ = self._probe(wanted)
        read = self._read(slots, wanted, space)
        count = read.mask.tobytes().find(0)
        if count >= 0 and not self._columns.is_absent(int(wanted[count, 0])):
            others = []
            for place in np.flatnonzero(~read.mask).tolist():
                candidates = list(self._columns.candidates(int(wanted[place, 0])))
                if not candidates:
                    break
                others += [(place, slot) for slot in candidates]
            self._retry(others, read, wanted, space)
            count = read.mask.tobytes().find(0)
        if count < 0:
            count = len(wanted)
        records = read.records[:count]
        return Found(
            count,
            read.slots[:count],
            read.generations[:count],
            records[:, OFFSET],
            records[:, LENGTH],
        )

    def lookup_each(self, namespace: int, fingerprints: bytes | ByteArray) -> FoundEach:
        """As `lookup` for blocks that stand alone: an answer each."""
        space = self._space_of(namespace)
        wanted = names_of(fingerprints)
        slots, buckets = self._probe(wanted)
        read = self._read(slots, wanted, space)
        alike = buckets[:, :BUCKET] == wanted.view(U32)[:, 1:2]
        absent = ~alike.any(axis=1) & (buckets[:, BUCKET:] == EMPTY).any(axis=1)
        others = [
            (place, slot)
            for place in np.flatnonzero(~(read.mask | absent)).tolist()
            for slot in self._columns.candidates(int(wanted[place, 0]))
        ]
        self._retry(others, read, wanted, space)
        mask, slots, generations, records = read
        return FoundEach(mask, slots, generations, records[:, OFFSET], records[:, LENGTH])

    def may_be_below(self, fingerprint: bytes) -> bool:
        """Whether the daemon may hold this block below the host tier; False is certain."""
        return may_be_below(self._columns.below, fingerprint)

    def still_valid(self, boot_id: int, slots: IntArray, generations: UIntArray) -> bool:
        """Whether all `slots` kept `generations` in the life `boot_id`: ask after the last copy."""
        now = self._columns.generations.take(slots, mode="clip")
        return now.tobytes() == generations.tobytes() and self.boot_id == boot_id

    def _space_of(self, namespace: int) -> UIntArray:
        """The namespace's space word now, as u64[1]."""
        if not 0 <= namespace < self._columns.namespaces_max:
            raise InvalidRequest(
                f"directory: namespace index {namespace}, there are {self._columns.namespaces_max}"
            )
        return self._columns.spaces[namespace : namespace + 1]

    def _probe(self, wanted: UIntArray) -> tuple[IntArray, NDArray[np.uint32]]:
        """(first candidate of each name in its home bucket, any word if there is none; buckets)."""
        homes = (wanted[:, 0] & self._mask).view(I64)
        buckets = self._columns.buckets.take(homes, axis=0, mode="clip")
        at = (buckets[:, :BUCKET] == wanted.view(U32)[:, 1:2]).argmax(axis=1)
        at += self._slot_places(len(at))
        return buckets.take(at).astype(I64), buckets

    def _slot_places(self, count: int) -> IntArray:
        """Where the first slot of each of `count` gathered buckets lies."""
        if count > len(self._places):
            return np.arange(BUCKET, count * BUCKET_WORDS, BUCKET_WORDS)
        return self._places[:count]

    def _read(self, slots: IntArray, wanted: UIntArray, space: UIntArray) -> _Read:
        """Records of `slots` as one moment, and which are READY under that name and space."""
        columns = self._columns
        generations = columns.generations.take(slots, mode="clip")
        records = columns.records.take(slots, axis=0, mode="clip")
        after = columns.generations.take(slots, mode="clip")
        same = records[:, :NAME_WORDS] == wanted
        mask: BoolArray = same.view(U32).ravel() == _EQUAL
        mask &= records[:, SPACE] == space
        mask &= generations & _EVEN == after  # even and unchanged: a generation never goes back
        return _Read(mask, slots, generations, records)

    def _retry(
        self, others: list[tuple[int, int]], read: _Read, wanted: UIntArray, space: UIntArray
    ) -> None:
        """Read further candidates (place, slot); put those that are right in their places."""
        if others:
            places, slots = np.array(others).T
            again = self._read(slots, wanted[places], space)
            for kept, new in zip(read, again, strict=True):
                kept[places[again.mask]] = new[again.mask]
