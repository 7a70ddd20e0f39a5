"""The NVMe tier: frames in preallocated segments, records in the index, within a byte cap.

Primitives of `NvmeTier`:
  loop     `take`, `publish`, `drain`, `free`, `room`, `adopt`, `tend`: bookkeeping only
  threads  `write`, `sync`, `read_parts`, `check_frame`: transfers on slots the caller owns
  index    `record`, `forget` (Futures, durable when done), `scan`, namespaces, clear counts

A replica is durable after `write`, `sync` and `record`, in that order; its slot may be re-used
after `forget`. Reads are verified against checksums kept in the index, apart from the data: a torn,
stale or misdirected frame cannot match. The daemon locks the data directory before `open`. Blocks
are named by slot; what they mean is the store's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

import xxhash

from kvstore.blockio import BlockIO, prove, translated
from kvstore.clock import Clock
from kvstore.config import NvmeConfig
from kvstore.errors import (
    ChecksumMismatch,
    ConfigError,
    FrameMalformed,
    GenerationMismatch,
    TierFull,
    TierIO,
)
from kvstore.index import Delete, Index, NamespaceRecord
from kvstore.layout import Part, align_up
from kvstore.segment import FrameFields, frame_bytes, geometry_of
from kvstore.slab import SlabPool
from kvstore.tier import superblock as superblocks
from kvstore.tier.base import Slots
from kvstore.tier.capacity import SEGMENTS, Capacity, bytes_below
from kvstore.tier.counts import NvmeStatistics, SharedCounts
from kvstore.tier.ledger import DeclaredNamespace, Ledger
from kvstore.tier.parts import READ_BYTES_MAX, runs_of, verify
from kvstore.tier.recover import Records
from kvstore.tier.segments import Segments, free_bytes
from kvstore.types import PAGE_BYTES, BoolArray, ByteArray, IntArray, Tier, UIntArray

SHARE_OF_FREE_SPACE = 0.8


class NvmeTier:
    """See the module. Made by `open`."""

    name = Tier.NVME
    is_durable = True
    is_addressable = False
    index_type = Index
    """A simulation's index commits when the simulation says."""
    is_read_only = False
    """A look's: what a start would mend or drop stays on disk, and `forget` does nothing."""

    def __init__(
        self,
        io: BlockIO,
        clock: Clock,
        pool: SlabPool,
        segments: Segments,
        capacity: Capacity,
        ledger: Ledger,
        prove_reason: str,
    ) -> None:
        self._io = io
        self._clock = clock
        self.pool = pool
        self._segments = segments
        self._capacity = capacity
        self._ledger = ledger
        self._prove_reason = prove_reason
        self._counts = SharedCounts()
        self._wake = threading.Event()
        self._is_closing = False
        self._tender = threading.Thread(target=self._tend, name="kvstore-nvme", daemon=True)
        self._tender.start()

    @classmethod
    def open(cls, directory: Path, *, config: NvmeConfig, io: BlockIO, clock: Clock) -> Self:
        """Open or create the tier in `directory`; does I/O, about 0.2 s per 100,000 records.

        Raises ForeignData (another geometry or format, with the way out), ConfigError (too small,
        or open elsewhere), TierFull, TierIO.
        """
        try:
            return cls._open(directory, config, io, clock)
        except OSError as error:
            raise translated(error, f"cannot open {directory}") from error

    @classmethod
    def _open(cls, directory: Path, config: NvmeConfig, io: BlockIO, clock: Clock) -> Self:
        geometry = geometry_of(config.segment_bytes)
        if config.bytes_max < 2 * geometry.slab_bytes:
            raise ConfigError(
                f"nvme.bytes_max={config.bytes_max} holds less than two segments of "
                f"nvme.segment_bytes={config.segment_bytes}; raise the first to "
                f"{2 * geometry.slab_bytes} or lower the second"
            )
        superblock = superblocks.load(
            directory, segment_bytes=config.segment_bytes, geometry=geometry
        )
        files = directory / SEGMENTS
        files.mkdir(parents=True, exist_ok=True, mode=0o700)
        segments = Segments(
            files, io, geometry, free_bytes_min=config.free_bytes_min, read_only=cls.is_read_only
        )
        share = int(SHARE_OF_FREE_SPACE * (free_bytes(directory) + bytes_below(directory)))
        segments.bytes_max = bytes_max = min(config.bytes_max, share)
        prove_reason = "" if cls.is_read_only else _prove(io, files)
        if not superblock.lives and not cls.is_read_only:
            superblocks.store(directory, superblock)
        ledger = Ledger(
            directory,
            superblock,
            segments,
            clock,
            index_map_bytes=config.index_map_bytes,
            index_type=cls.index_type,
            read_only=cls.is_read_only,
        )
        slabs = max(bytes_max // geometry.slab_bytes, max(segments.files(), default=-1) + 1)
        pool = SlabPool(slabs, geometry.slab_bytes, geometry.slot_bytes_min)
        capacity = Capacity(
            directory,
            pool,
            segments,
            bytes_max=bytes_max,
            free_bytes_min=config.free_bytes_min,
            clock=clock,
        )
        capacity.survey()
        return cls(io, clock, pool, segments, capacity, ledger, prove_reason)

    # ------------------------------------------------------------------ slots (on the loop)

    @property
    def slots_max(self) -> int:
        """One more than the highest slot number."""
        return self.pool.slots_max

    def slot_bytes_for(self, length: int) -> int:
        """A header page and the payload padded to pages."""
        return frame_bytes(length)

    def take(self, slot_bytes: int, count: int, *, staging: bool = False) -> list[int]:
        """Up to `count` slots; fewer means no room. There is no staging reserve here."""
        self._capacity.apply()
        return self.pool.take(slot_bytes, count, staging=staging)

    def publish(self, slots: Slots) -> None:
        self.pool.publish(slots)

    def drain(self, slots: Slots) -> None:
        """READY → DRAINING."""
        self.pool.drain(slots)

    def free(self, slots: Slots) -> None:
        """The slots' records must be gone from the index, durably."""
        self.pool.free(slots)

    def room(self, slot_bytes: int) -> int:
        self._capacity.apply()
        return self.pool.room(slot_bytes)

    def slots_of_class(self, slot_bytes: int) -> IntArray:
        """All slot numbers of a size, free ones included, for sampling victims."""
        return self.pool.slots_of_class(slot_bytes)

    def adopt(self, slot_bytes: int, slots: IntArray) -> BoolArray:
        """Recovery: slots of one size that hold durable blocks become READY; returns which did.

        False where a slot cannot be held (claimed twice, outside the tier): forget that record.
        """
        return self.pool.adopt(slot_bytes, slots)

    def over_cap_slots(self) -> IntArray:
        """Slots whose blocks must go because less space is allowed than is held; mostly none."""
        return self._capacity.over_cap_slots()

    def tend(self) -> IntArray:
        """Once a second: wakes the thread that looks at the disk; returns `over_cap_slots`."""
        self._wake.set()
        return self.over_cap_slots()

    def next_generations(self, count: int) -> UIntArray:
        """Names for `count` writes, never given before in this data directory: uint64[count]."""
        return self._ledger.next_generations(count)

    # ------------------------------------------------------------------ transfers (worker threads)

    def write(
        self, slot: int, frame: FrameFields, parts: Sequence[Part], payload: ByteArray
    ) -> None:
        """Verify the payload (uint8[frame.length]) against its checksums, then write header and
        payload at once.

        Raises ChecksumMismatch (the bytes are not those that were committed), TierFull, TierIO.
        Durable after `sync`.
        """
        verify(parts, payload, frame.checksums, f"host copy of {frame.fingerprint.hex()[:16]}")
        frame = replace(
            frame,
            stored_at=self._clock.wall(),
            parts=tuple((part.offset, part.length) for part in parts),
        )
        try:
            self._segments.write_frame(slot, frame, payload, frame_bytes(frame.length))
        except TierFull:
            self._counts.add("disk_full")
            self._capacity.disk_was_full()
            raise
        except TierIO:
            self._counts.add("io_failures")
            raise
        self._counts.add("bytes_written", frame_bytes(frame.length))

    def sync(self, slots: Slots) -> None:
        """Put what was written there on the medium. Raises TierIO: none of it may be recorded."""
        try:
            self._segments.sync(slots)
        except TierIO:
            self._counts.add("io_failures")
            raise

    def read_parts(
        self, slot: int, parts: Sequence[Part], into: ByteArray, checksums: UIntArray
    ) -> None:
        """Read `parts` to their offsets in `into` (a whole slot, uint8, best page-aligned) and
        verify each.

        Adjacent parts share reads of up to READ_BYTES_MAX. `checksums` is indexed by part. Padding
        behind a part may be overwritten. Raises ChecksumMismatch, TierIO; then `into` holds garbage
        there.
        """
        try:
            for run in runs_of(parts):
                self._read_run(slot, run, into, checksums)
        except TierIO:
            self._counts.add("io_failures")
            raise
        except ChecksumMismatch:
            self._counts.add("checksum_failures")
            raise
        self._counts.add("bytes_read", sum(part.length for part in parts))

    def _read_run(
        self, slot: int, run: Sequence[Part], into: ByteArray, checksums: UIntArray
    ) -> None:
        first, last = run[0].offset, run[-1].offset + run[-1].length
        end = align_up(last, PAGE_BYTES)
        if len(run) > 1 or end - first <= READ_BYTES_MAX:
            self._segments.read_payload(slot, first, [into[first:end]])
            verify(run, into, checksums, f"NVMe slot {slot}")
            return
        digest = xxhash.xxh3_64()
        for start in range(first, end, READ_BYTES_MAX):
            stop = min(start + READ_BYTES_MAX, end)
            self._segments.read_payload(slot, start, [into[start:stop]])
            digest.update(into[start : min(stop, last)])  # type: ignore[arg-type]  # a buffer
        if digest.intdigest() != int(checksums[run[0].index]):
            raise ChecksumMismatch(f"NVMe slot {slot}: part {run[0].index} is not what was stored")

    def check_frame(self, name: bytes, slot: int, generation: int) -> None:
        """Raises FrameMalformed, GenerationMismatch (it names another block or write), TierIO."""
        frame = self._segments.read_header(slot)
        if frame.fingerprint != name:
            raise FrameMalformed(f"NVMe slot {slot} holds {frame.fingerprint.hex()[:16]}")
        if frame.generation != generation:
            raise GenerationMismatch(
                f"NVMe slot {slot} holds write {frame.generation}, expected {generation}"
            )

    # ------------------------------------------------------------------ index

    def record(self, frames: Sequence[FrameFields], slots: Slots) -> Future[None]:
        """Records of written and synced frames; durable when done.

        Raises, in the Future, TierFull, TierIO, Overloaded.
        """
        return self._ledger.record(frames, slots)

    def forget(self, names: Sequence[Delete]) -> Future[None]:
        """Delete records by (fingerprint, generation); done when durable. Others stay."""
        return self._ledger.forget(names)

    def scan(self) -> Records:
        """Start: every usable record, fingerprints uint8[n, 32] and RECORD[n] (`Ledger.scan`)."""
        return self._ledger.scan()

    def rebuild_from_frames(self) -> Iterator[None]:
        """Start: what `scan` does by itself when the index had to start empty, a slice a step."""
        if self._ledger.must_rebuild:
            yield from self._ledger.rebuild()

    def check_record(self, name: bytes, slot: int, generation: int) -> None:
        """The index holds this block there. Raises GenerationMismatch."""
        self._ledger.check_record(name, slot, generation)

    def recorded(self) -> tuple[ByteArray, UIntArray]:
        """Names uint8[n, 32] and generations uint64[n] of every record. Worker thread."""
        return self._ledger.recorded()

    def still_recorded(self, records: Sequence[Delete]) -> list[Delete]:
        """Those of (fingerprint, generation) that the index holds now. Worker thread."""
        return self._ledger.still_recorded(records)

    def load_namespaces(self) -> list[NamespaceRecord]:
        """All that were ever declared here, in index order."""
        return self._ledger.load_namespaces()

    def put_namespace(self, namespace: DeclaredNamespace) -> None:
        """Durable when this returns. Worker thread. Raises TierFull, TierIO."""
        self._ledger.put_namespace(namespace)

    def set_clear_count(self, namespace: bytes, count: int) -> None:
        """Durable when this returns. Worker thread. Raises TierFull, TierIO."""
        self._ledger.set_clear_count(namespace, count)

    # ------------------------------------------------------------------ looking after itself

    def maintain(self) -> None:
        """Look at the disk: delete retired files, notice removed ones, see what is allowed.

        A thread's work; `tend` has it done.
        """
        self._capacity.delete_retired()
        self._counts.add("segments_lost", len(self._capacity.survey()))

    def _tend(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._is_closing:
                return
            try:
                self.maintain()
            except (OSError, TierIO):
                self._counts.add("io_failures")

    def bytes_on_disk(self) -> int:
        """What the file system says the segments occupy (I11: as `statistics` says)."""
        return self._segments.measure()

    def health(self) -> list[str]:
        return _told(
            self._capacity.limit_reason and f"cannot grow: {self._capacity.limit_reason}",
            self._ledger.failure and f"nothing becomes durable: {self._ledger.failure}",
        )

    def remarks(self) -> list[str]:
        return _told(
            self._io.mode_reason and f"buffered I/O: {self._io.mode_reason}",
            self._io.reserve_reason,
            self._prove_reason and f"direct I/O {self._prove_reason}",
            self._ledger.must_rebuild and f"the index starts empty: {self._ledger.damage}",
        )

    def statistics(self) -> NvmeStatistics:
        """As it is now; takes a read transaction of the index."""
        return NvmeStatistics(
            bytes_max=self._capacity.bytes_max,
            bytes_allowed=self._capacity.allowed_slabs * self._segments.geometry.slab_bytes,
            bytes_on_disk=self._segments.bytes_on_disk,
            bytes_beside=self._capacity.bytes_beside,
            segments=len(self._segments.files()),
            slots_ready=sum(item.ready for item in self.pool.statistics().classes),
            records=self._ledger.statistics().records,
            mode=self._io.mode,
            mode_reason=self._io.mode_reason,
            reserve_reason=self._io.reserve_reason,
            limit_reason=self._capacity.limit_reason,
            lives=self._ledger.lives,
            index_damage=self._ledger.damage,
            unknown_files_removed=self._segments.unknown_files,
            unknown_bytes_removed=self._segments.unknown_bytes,
            records_unusable=self._ledger.records_unusable,
            **self._counts.snapshot(),
        )

    def describe(self) -> dict[str, object]:
        return {**asdict(self.statistics()), "index": asdict(self._ledger.statistics())}

    def integrity_slices(self) -> Iterator[None]:
        """I1 for every slab, a bounded piece a step. Raises InvariantViolated."""
        yield from self.pool.integrity_slices()

    def check_integrity(self) -> None:
        """The same in one go."""
        self.pool.check_integrity()

    def close(self) -> None:
        """Transfers must have ended. Commits what the index has queued; twice is a no-op."""
        self._is_closing = True
        self._wake.set()
        self._tender.join()
        self._ledger.close()
        self._segments.close()


def _told(*reasons: str | bool) -> list[str]:
    return [f"nvme: {reason}" for reason in reasons if reason]


def _prove(io: BlockIO, directory: Path) -> str:
    """Why direct I/O could not be tried; "" once it was, whatever came out (`io` knows)."""
    try:
        prove(io, directory)
    except TierFull as error:
        return f"not proven by a write: {error}"
    return ""
