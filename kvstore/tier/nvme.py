"""The NVMe tier: frames in preallocated segments, their records in the index, within a byte cap.

Primitives of `NvmeTier`: loop     `take`, `publish`, `drain`, `free`, `room`, `adopt`,
`over_cap_slots`, `tend`: bookkeeping only threads  `write`, `sync`, `read_parts`, `check_frame`:
transfers on slots the caller owns index    `record`, `forget` (Futures, durable when done),
`recover`, namespaces and clear counts

A replica is durable after `write`, `sync` and `record`, in that order; its slot may be re-used
after `forget`. Reads are verified against checksums kept in the index, apart from the data: a torn,
stale or misdirected frame cannot match. The data directory is locked by the daemon before `open`.
Blocks are named by slot; what they mean is the store's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import xxhash

from kvstore.blockio import BlockIO, prove
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
from kvstore.index import Delete, NamespaceRecord
from kvstore.layout import BlockLayout, Part, align_up
from kvstore.segment import SLOT_BYTES_MIN, FrameFields, SegmentGeometry, frame_bytes
from kvstore.slab import SlabPool
from kvstore.tier import superblock as superblocks
from kvstore.tier.base import Slots
from kvstore.tier.capacity import Capacity, bytes_below
from kvstore.tier.recover import (
    OpenedIndex,
    Records,
    open_index,
    pack_record,
    rebuild,
    usable_records,
)
from kvstore.tier.segments import Segments, free_bytes
from kvstore.types import PAGE_BYTES, BoolArray, ByteArray, IntArray, NamespaceKind, Tier, UIntArray

READ_BYTES_MAX = 2 << 20
"""One read; larger ones were no faster, and a piece this size is hashed while it is in the cache.
"""
SHARE_OF_FREE_SPACE = 0.8
GENERATIONS_PER_LIFE = 1 << 32


def geometry_of(segment_bytes: int) -> SegmentGeometry:
    """Slabs are 1/64 larger than `segment_bytes`: room for header pages, so that payloads of a
    power of two fill it.
    """
    return SegmentGeometry(
        segment_bytes + align_up(segment_bytes // 64, PAGE_BYTES), SLOT_BYTES_MIN
    )


class DeclaredNamespace(Protocol):
    """What is kept of a namespace."""

    index: int
    id: bytes
    kind: NamespaceKind
    layout: BlockLayout
    window_tokens: int
    label: str
    clear_count: int


@dataclass(frozen=True)
class NvmeStatistics:
    """Bytes, blocks and what went wrong since open."""

    bytes_max: int
    bytes_allowed: int
    bytes_on_disk: int
    bytes_beside: int
    segments: int
    slots_ready: int
    records: int
    mode: str
    mode_reason: str
    reserve_reason: str
    limit_reason: str
    lives: int
    index_damage: str
    unknown_files_removed: int
    unknown_bytes_removed: int
    records_unusable: int
    segments_lost: int
    bytes_written: int
    bytes_read: int
    checksum_failures: int
    io_failures: int
    disk_full: int


class _Counts:
    """Counters that worker threads share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(
            (
                "segments_lost",
                "bytes_written",
                "bytes_read",
                "checksum_failures",
                "io_failures",
                "disk_full",
            ),
            0,
        )

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)


class NvmeTier:
    """See the module. Made by `open`."""

    name = Tier.NVME
    is_durable = True
    is_addressable = False

    def __init__(
        self,
        directory: Path,
        io: BlockIO,
        clock: Clock,
        pool: SlabPool,
        segments: Segments,
        capacity: Capacity,
        opened: OpenedIndex,
        superblock: superblocks.Superblock,
        prove_reason: str,
    ) -> None:
        self._directory = directory
        self._io = io
        self._clock = clock
        self._pool = pool
        self._segments = segments
        self._capacity = capacity
        self._index = opened.index
        self._records: Records | None = opened.records
        self.rebuild_reason = opened.damage
        """Why the index starts empty; `rebuild_from_frames` must run before `scan`. "" when it need
        not.
        """
        self._index_damage = opened.damage
        self._superblock = superblock
        self._superblock_lock = threading.Lock()
        self._prove_reason = prove_reason
        self._generation = superblock.lives * GENERATIONS_PER_LIFE
        self._records_unusable = 0
        self._counts = _Counts()
        self._wake = threading.Event()
        self._is_closing = False
        self._tender = threading.Thread(
            target=self._tend_until_closed, name="kvstore-nvme", daemon=True
        )
        self._tender.start()

    @classmethod
    def open(cls, directory: Path, *, config: NvmeConfig, io: BlockIO, clock: Clock) -> NvmeTier:
        """Open or create the tier in `directory`; blocks for I/O, about 0.2 s per 100,000 records.

        Raises ForeignData (another geometry or format, with the way out), ConfigError (too small,
        or open elsewhere), TierFull, TierIO.
        """
        geometry = geometry_of(config.segment_bytes)
        if config.bytes_max < 2 * geometry.slab_bytes:
            raise ConfigError(
                f"nvme.bytes_max={config.bytes_max} holds less than two segments of nvme.segment_bytes="
                f"{config.segment_bytes}; raise the first to {2 * geometry.slab_bytes} or lower the second"
            )
        superblock = superblocks.load(
            directory, segment_bytes=config.segment_bytes, geometry=geometry
        )
        files = directory / "segments"
        files.mkdir(parents=True, exist_ok=True, mode=0o700)
        segments = Segments(files, io, geometry, bytes_max=0, free_bytes_min=config.free_bytes_min)
        share = int(SHARE_OF_FREE_SPACE * (free_bytes(directory) + bytes_below(directory)))
        bytes_max = min(config.bytes_max, share)
        segments.bytes_max = bytes_max
        try:
            prove(io, files)
            prove_reason = ""
        except TierFull as error:
            prove_reason = f"not proven by a write: {error}"
        if not superblock.lives:
            superblocks.store(directory, superblock)
        opened = open_index(directory, superblock, map_bytes=config.index_map_bytes)
        try:
            superblock = _begin_life(directory, superblock, opened)
        except BaseException:
            opened.index.close()
            raise
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
        return cls(directory, io, clock, pool, segments, capacity, opened, superblock, prove_reason)

    # ------------------------------------------------------------------ slots (on the loop)

    def slot_bytes_for(self, length: int) -> int:
        """A header page and the payload padded to pages."""
        return frame_bytes(length)

    def take(self, slot_bytes: int, count: int, *, staging: bool = False) -> list[int]:
        """Up to `count` slots; fewer means no room. There is no staging reserve here."""
        self._capacity.apply()
        return self._pool.take(slot_bytes, count, staging=staging)

    def publish(self, slots: Slots) -> None:
        self._pool.publish(slots)

    def drain(self, slots: Slots) -> None:
        """READY → DRAINING."""
        self._pool.drain(slots)

    def free(self, slots: Slots) -> None:
        """The slots' records must be gone from the index, durably."""
        self._pool.free(slots)

    def room(self, slot_bytes: int) -> int:
        self._capacity.apply()
        return self._pool.room(slot_bytes)

    def slots_of_class(self, slot_bytes: int) -> IntArray:
        """All slot numbers of a size, free ones included, for sampling victims."""
        return self._pool.slots_of_class(slot_bytes)

    def adopt(self, slots: IntArray, lengths: IntArray) -> BoolArray:
        """Recovery: slots that hold durable blocks of these payload lengths become READY.

        False where a slot cannot be held (claimed twice, outside the tier): the caller forgets that
        record.
        """
        adopted = np.zeros(len(slots), np.bool_)
        sizes = PAGE_BYTES + -(-lengths.astype(np.int64) // PAGE_BYTES) * PAGE_BYTES
        for size in np.unique(sizes):
            own = np.flatnonzero(sizes == size)
            adopted[own] = self._pool.adopt(int(size), slots[own].astype(np.int64))
        return adopted

    def finish_recovery(self) -> None:
        """After `adopt`, before the first `take`: files without a block are deleted. Does I/O."""
        held = {
            int(slab) for size in self._pool.classes() for slab in self._pool.slabs_of_class(size)
        }
        self._segments.remove(sorted(self._segments.files().keys() - held))
        self._capacity.survey()

    def over_cap_slots(self) -> IntArray:
        """Slots whose blocks must go because less space is allowed than is held; mostly none."""
        return self._capacity.over_cap_slots()

    def tend(self) -> IntArray:
        """Once a second: wakes the thread that looks at the disk; returns `over_cap_slots`."""
        self._wake.set()
        return self.over_cap_slots()

    def next_generations(self, count: int) -> UIntArray:
        """Names for `count` writes, never given before in this data directory: uint64[count]."""
        first = self._generation + 1
        self._generation += count
        return np.arange(first, first + count, dtype=np.uint64)

    # ------------------------------------------------------------------ transfers (worker threads)

    def write(
        self, slot: int, frame: FrameFields, parts: Sequence[Part], payload: ByteArray
    ) -> None:
        """Verify the payload (uint8[frame.length]) against its checksums, then write header and
        payload at once.

        Raises ChecksumMismatch (the bytes are not those that were committed), TierFull, TierIO.
        Durable after `sync`.
        """
        _verify(parts, payload, frame.checksums, f"host copy of {frame.fingerprint.hex()[:16]}")
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
        """What was written to these slots is on the medium. Raises TierIO: none of it may be
        recorded.
        """
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
            for run in _runs(parts):
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
        end = min(align_up(last, PAGE_BYTES), len(into))
        if len(run) > 1 or end - first <= READ_BYTES_MAX:
            self._segments.read_payload(slot, first, [into[first:end]])
            _verify(run, into, checksums, f"NVMe slot {slot}")
            return
        digest = xxhash.xxh3_64()
        for start in range(first, end, READ_BYTES_MAX):
            stop = min(start + READ_BYTES_MAX, end)
            self._segments.read_payload(slot, start, [into[start:stop]])
            digest.update(into[start : min(stop, last)])  # type: ignore[arg-type]  # a buffer
        if digest.intdigest() != int(checksums[run[0].index]):
            raise ChecksumMismatch(f"NVMe slot {slot}: part {run[0].index} is not what was stored")

    def check_frame(self, name: bytes, slot: int, generation: int) -> None:
        """The header in `slot` names this block and write. Raises FrameMalformed,
        GenerationMismatch, TierIO.
        """
        frame = self._segments.read_header(slot)
        if frame.fingerprint != name:
            raise FrameMalformed(f"NVMe slot {slot} holds {frame.fingerprint.hex()[:16]}")
        if frame.generation != generation:
            raise GenerationMismatch(
                f"NVMe slot {slot} holds write {frame.generation}, expected {generation}"
            )

    # ------------------------------------------------------------------ index

    def record(self, frames: Sequence[FrameFields], slots: Slots) -> Future[None]:
        """Records of written and synced frames; durable when done. Raises (in the Future) TierFull,
        TierIO, Overloaded.
        """
        now = self._clock.wall()
        puts = [
            (
                frame.fingerprint,
                pack_record(replace(frame, stored_at=now), int(slot), frame.namespace_index),
            )
            for frame, slot in zip(frames, slots, strict=True)
        ]
        return self._index.submit(puts, [])

    def forget(self, names: Sequence[Delete]) -> Future[None]:
        """Delete (fingerprint, generation) records, durable when done; other generations and
        unknown names stay.
        """
        return self._index.submit([], names)

    def scan(self) -> Records:
        """Every usable record: fingerprints uint8[n, 32], RECORD[n]. Those that point nowhere are
        deleted and counted.
        """
        names, records = self._records or self._index.scan()
        self._records = None
        good = usable_records(records, self._segments.files(), self._segments.geometry)
        bad = np.flatnonzero(~good)
        if len(bad):
            self._records_unusable += len(bad)
            generations = records["generation"][bad].tolist()
            self.forget(
                [(names[at].tobytes(), made) for at, made in zip(bad, generations, strict=True)]
            )
        return names[good], records[good]

    def rebuild_from_frames(self) -> Iterator[None]:
        """Fill the empty index from the frames' headers, a slice a step. Raises TierFull, TierIO."""
        for record in self._superblock.namespaces:
            self._index.put_namespace(record)
        yield from rebuild(self._index, self._segments, self.load_namespaces())
        self.rebuild_reason = ""
        self._records = None

    def check_record(self, name: bytes, slot: int, generation: int) -> None:
        """The index holds this block there. Raises GenerationMismatch."""
        found = self._index.get(name)
        if found is None or (int(found["slot"]), int(found["generation"])) != (slot, generation):
            raise GenerationMismatch(
                f"the index holds no record of write {generation} in NVMe slot {slot}"
            )

    def stray_records(self, known: set[bytes]) -> list[bytes]:
        """Fingerprints in the index that are not in `known`."""
        names, _ = self._index.scan()
        return [name for name in map(bytes, names) if name not in known]

    def load_namespaces(self) -> list[NamespaceRecord]:
        """All that were declared, in index order, with the highest clear count either copy knows."""
        merged = {record.id: record for record in self._superblock.namespaces}
        for record in self._index.load_namespaces():
            other = merged.get(record.id, record)
            count = max(record.clear_count, other.clear_count)
            merged[record.id] = msgspec.structs.replace(record, clear_count=count)
        return sorted(merged.values(), key=lambda record: record.index)

    def put_namespace(self, namespace: DeclaredNamespace) -> None:
        """Durable, in index and superblock, when this returns. Worker thread. Raises TierFull,
        TierIO.
        """
        layout = namespace.layout
        self._keep(
            NamespaceRecord(
                namespace.index,
                namespace.id,
                namespace.kind,
                layout.block_tokens,
                layout.layers,
                layout.layer_bytes,
                layout.ranks,
                namespace.window_tokens,
                namespace.label,
                namespace.clear_count,
            )
        )

    def set_clear_count(self, namespace: bytes, count: int) -> None:
        """Durable when this returns. Worker thread. Raises TierFull, TierIO (also for an unknown
        namespace).
        """
        for record in self.load_namespaces():
            if record.id == namespace:
                self._keep(msgspec.structs.replace(record, clear_count=count))
                return
        raise TierIO(f"namespace {namespace.hex()[:16]} was never stored here")

    def _keep(self, record: NamespaceRecord) -> None:
        with self._superblock_lock:
            self._index.put_namespace(record)
            others = [item for item in self._superblock.namespaces if item.id != record.id]
            self._superblock = msgspec.structs.replace(
                self._superblock, namespaces=[*others, record]
            )
            try:
                superblocks.store(self._directory, self._superblock)
            except OSError as error:
                raise TierIO(f"cannot store the superblock: {error}") from error

    # ------------------------------------------------------------------ looking after itself

    def maintain(self) -> None:
        """Look at the disk: delete retired files, notice removed ones, work out what is allowed. A
        thread's work.
        """
        self._capacity.delete_retired()
        self._counts.add("segments_lost", len(self._segments.reconcile()))
        self._capacity.survey()

    def _tend_until_closed(self) -> None:
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
        """What the file system says the segments occupy (I11: equal to
        `statistics().bytes_on_disk`).
        """
        return self._segments.measure()

    def health(self) -> list[str]:
        io = self._io
        return [
            f"nvme: {reason}"
            for reason in (
                io.mode_reason and f"buffered I/O: {io.mode_reason}",
                io.reserve_reason,
                self._prove_reason and f"direct I/O {self._prove_reason}",
                self._capacity.limit_reason and f"cannot grow: {self._capacity.limit_reason}",
                self.rebuild_reason and f"rebuilding the index: {self.rebuild_reason}",
            )
            if reason
        ]

    def statistics(self) -> NvmeStatistics:
        """As it is now; takes a read transaction of the index."""
        return NvmeStatistics(
            bytes_max=self._capacity.bytes_max,
            bytes_allowed=self._capacity.allowed_slabs * self._segments.geometry.slab_bytes,
            bytes_on_disk=self._segments.bytes_on_disk,
            bytes_beside=self._capacity.bytes_beside,
            segments=len(self._segments.files()),
            slots_ready=sum(item.ready for item in self._pool.statistics().classes),
            records=self._index.statistics().records,
            mode=self._io.mode,
            mode_reason=self._io.mode_reason,
            reserve_reason=self._io.reserve_reason,
            limit_reason=self._capacity.limit_reason,
            lives=self._superblock.lives,
            index_damage=self._index_damage,
            unknown_files_removed=self._segments.unknown_files,
            unknown_bytes_removed=self._segments.unknown_bytes,
            records_unusable=self._records_unusable,
            **self._counts.snapshot(),
        )

    def describe(self) -> dict[str, object]:
        return {**asdict(self.statistics()), "index": asdict(self._index.statistics())}

    def check_integrity(self) -> None:
        """I1 for every slab."""
        self._pool.check_integrity()

    def close(self) -> None:
        """Transfers must have ended. Commits what the index has queued; twice is a no-op."""
        self._is_closing = True
        self._wake.set()
        self._tender.join()
        self._index.close()
        self._segments.close()


def _begin_life(
    directory: Path, superblock: superblocks.Superblock, opened: OpenedIndex
) -> superblocks.Superblock:
    """Count this start in index and superblock, in that order; an index behind the superblock is an
    older one.
    """
    lives = max(superblock.lives, opened.lives) + 1
    opened.index.put_value("uuid", superblock.uuid.encode())
    opened.index.put_value("lives", str(lives).encode())
    superblock = msgspec.structs.replace(superblock, lives=lives)
    superblocks.store(directory, superblock)
    return superblock


def _runs(parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """Adjacent parts, together up to READ_BYTES_MAX (a larger part alone)."""
    start = 0
    for at in range(1, len(parts) + 1):
        if at < len(parts):
            before, part = parts[at - 1], parts[at]
            size = part.offset + part.length - parts[start].offset
            if before.offset + before.length == part.offset and size <= READ_BYTES_MAX:
                continue
        yield parts[start:at]
        start = at


def _verify(parts: Sequence[Part], payload: ByteArray, checksums: UIntArray, where: str) -> None:
    for part in parts:
        view = payload[part.offset : part.offset + part.length]
        found = xxhash.xxh3_64_intdigest(view)  # type: ignore[arg-type]  # a buffer
        if found != int(checksums[part.index]):
            raise ChecksumMismatch(f"{where}: part {part.index} is not what was stored")
