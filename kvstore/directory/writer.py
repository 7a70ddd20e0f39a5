"""The daemon's side of the directory: the only writer. No locks; every method runs on one loop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.directory.below import count_below, counts_of
from kvstore.directory.layout import (
    BOOT_WORD,
    BUCKET,
    BUCKET_WORDS,
    EMPTY,
    FORMAT_VERSION,
    HALF,
    LENGTH,
    MAGIC,
    NAME_WORDS,
    OFFSET,
    ONE,
    PAGE_0,
    RECORD_WORDS,
    SLOTS_MAX,
    SPACE,
    U64,
    Columns,
    header_bytes,
    names_of,
)
from kvstore.errors import check
from kvstore.types import PAGE_BYTES, ByteArray, IntArray, UIntArray

_CHECK_BUCKETS = 1024


class DirectoryWriter:
    """Writes `header`, uint8[>= header_bytes(...)], 64-byte aligned.

    Invariant: a slot's generation is even exactly while the slot is READY and has its entry in the
    table; every retract and every publish moves it forward.
    """

    def __init__(
        self,
        header: ByteArray,
        *,
        slots: int,
        namespaces_max: int,
        boot_id: int,
        counters: int = 0,
    ) -> None:
        """Initialise the whole header: nothing readable, clear counts 0, boot word last.

        `counters`: size of the filter of names below, see `filter_counters`; 0: none.
        """
        needed = header_bytes(slots, namespaces_max, counters)
        check(0 < slots < SLOTS_MAX, "a directory has slots", slots=slots)
        check(0 < namespaces_max < SLOTS_MAX, "and namespaces", namespaces_max=namespaces_max)
        check(0 < boot_id < 1 << 64, "a boot id is a positive u64", boot_id=boot_id)
        check(len(header) >= needed, "the header is whole", has=len(header), needs=needed)
        self._columns = columns = Columns(header, slots, namespaces_max, counters)
        header[:PAGE_BYTES] = 0
        columns.spaces[:] = np.arange(namespaces_max, dtype=U64) << HALF
        columns.generations[:] = 1
        columns.buckets[:, :BUCKET] = 0
        columns.buckets[:, BUCKET:] = EMPTY
        columns.below[:] = 0
        sizes = (slots, columns.mask + 1, namespaces_max, counters)
        PAGE_0.pack_into(header.data, 0, MAGIC, FORMAT_VERSION, 0, 0, *sizes)
        columns.page_words[BOOT_WORD] = boot_id
        self.boot_id = boot_id
        self.slots = slots
        self.published = 0
        """Slots that are READY now."""

    def close_boot(self) -> None:
        """Void everything readers hold; the first act of a shutdown."""
        self._columns.page_words[BOOT_WORD] = 0

    def set_clear_count(self, namespace: int, count: int) -> None:
        """From now on only blocks published with `count` are found in namespace `namespace`."""
        self._columns.spaces[namespace] = namespace << 32 | count

    def count_below(self, fingerprints: ByteArray, change: int) -> None:
        """Names, uint8[n, 32], that come below the host tier (1; before they can be read there) or
        left it (-1)."""
        count_below(self._columns.below, fingerprints, change)

    def generations(self, slots: IntArray) -> UIntArray:
        """Generations now: even = READY. A filling slot becomes READY at its generation + 1."""
        return self._columns.generations[slots]

    def retract(self, slots: IntArray) -> None:
        """Make distinct `slots` unreadable, before any re-use. May be repeated.

        The generation of a slot that was not READY moves on too, by two, so that the one promised
        to somebody who waits for an abandoned filling never comes true for other bytes.
        """
        generations = self._columns.generations
        before = generations[slots]
        odd = before & ONE
        generations[slots] = before + ONE + odd
        readable = slots[odd == 0]
        tags = self._columns.records[readable, 0]
        for slot, tag in zip(readable.tolist(), tags.tolist(), strict=True):
            self._remove(slot, tag)
        self.published -= len(readable)

    def publish(
        self,
        slots: IntArray,
        fingerprints: ByteArray,
        *,
        offsets: UIntArray,
        lengths: UIntArray | IntArray,
        namespace: int,
        clear_count: int,
    ) -> UIntArray:
        """Make distinct `slots` readable as `fingerprints` uint8[n, 32]; return their generations.

        `offsets` and `lengths` are bytes in the arena, [n]; the payload must be in place. A
        fingerprint may be in two slots for a moment (a block that moves): publish the new one,
        then retract the old.
        """
        columns = self._columns
        generations = columns.generations[slots]
        check((generations & ONE).all(), "only an unreadable slot is published")
        check(
            0 <= namespace < columns.namespaces_max,
            "I8: a block has its namespace",
            index=namespace,
        )
        records = np.empty((len(slots), RECORD_WORDS), U64)
        records[:, :NAME_WORDS] = names_of(fingerprints)
        records[:, OFFSET] = offsets
        records[:, LENGTH] = lengths
        records[:, SPACE:] = namespace << 32 | clear_count
        columns.records[slots] = records
        generations += ONE
        columns.generations[slots] = generations
        for slot, tag in zip(slots.tolist(), records[:, 0].tolist(), strict=True):
            self._insert(slot, tag)
        self.published += len(slots)
        return generations

    def _insert(self, slot: int, tag: int) -> None:
        halves, mask = self._columns.halves, self._columns.mask
        number = tag & mask
        position = number * BUCKET_WORDS + BUCKET
        while halves[position] != EMPTY:
            position += 1
            if position % BUCKET_WORDS == 0:
                number = (number + 1) & mask
                position = number * BUCKET_WORDS + BUCKET
        halves[position - BUCKET] = tag >> 32
        halves[position] = slot

    def _remove(self, slot: int, tag: int) -> None:
        """Take out a slot's entry. Where that makes room in a full bucket, an entry that had to
        pass it shifts back, and so on behind that one: no tombstone stays."""
        columns = self._columns
        halves = columns.halves
        number = tag & columns.mask
        while slot not in (slots := columns.slots_in(number)):
            check(EMPTY not in slots, "a READY slot has its entry in the table", slot=slot)
            number = (number + 1) & columns.mask
        hole = number * BUCKET_WORDS + slots.index(slot)
        while EMPTY not in slots and (follower := self._follower_of(number)) is not None:
            halves[hole] = halves[follower]
            halves[hole + BUCKET] = halves[follower + BUCKET]
            hole, number = follower, follower // BUCKET_WORDS
            slots = columns.slots_in(number)
        halves[hole + BUCKET] = EMPTY
        halves[hole] = 0

    def _follower_of(self, number: int) -> int | None:
        """Position of an entry behind bucket `number` that had to pass it, if there is one."""
        columns = self._columns
        for step in range(1, columns.mask + 1):
            behind = (number + step) & columns.mask
            slots = columns.slots_in(behind)
            for index, slot in enumerate(slots):
                if slot != EMPTY and (behind - columns.tag(slot)) & columns.mask >= step:
                    return behind * BUCKET_WORDS + index
            if EMPTY in slots:
                break
        return None

    def check_integrity(self, slots: IntArray, fingerprints: ByteArray) -> None:
        """Raise InvariantViolated unless `slots` are READY, named `fingerprints` and found so.

        Some 4 µs a slot: the daemon passes its READY blocks in slices and compares their total
        with `published`.
        """
        columns = self._columns
        names = names_of(fingerprints)
        odd = (columns.generations[slots] & ONE) != 0
        check(not odd.any(), "a READY block's generation is even", slots=slots[odd].tolist())
        other = (columns.records[slots, :NAME_WORDS] != names).any(axis=1)
        check(not other.any(), "a READY block's record has its name", slots=slots[other].tolist())
        for slot, tag in zip(slots.tolist(), names[:, 0].tolist(), strict=True):
            check(slot in columns.candidates(tag), "a READY block is found", slot=slot)

    def check_below(self, fingerprints: ByteArray) -> None:
        """Raise InvariantViolated if a reader would be told that one of these is not below."""
        counts = counts_of(self._columns.below, fingerprints)
        check(bool(counts.all()), "a block below is not denied")

    def check_table(self) -> Iterator[None]:
        """Raise InvariantViolated unless every entry names a READY slot of that tag.

        A generator; one step takes 1024 buckets, under 2 ms; changes between steps are welcome.
        """
        columns = self._columns
        for first in range(0, columns.mask + 1, _CHECK_BUCKETS):
            buckets = columns.buckets[first : first + _CHECK_BUCKETS]
            used = buckets[:, BUCKET:] != EMPTY
            slots = buckets[:, BUCKET:][used]
            check((slots < columns.slots).all(), "an entry names a slot")
            check(not (columns.generations[slots] & ONE).any(), "an entry's slot is READY")
            uppers = columns.records[slots, 0] >> HALF
            check((uppers == buckets[:, :BUCKET][used]).all(), "an entry has its slot's tag")
            yield
