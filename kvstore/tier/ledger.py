"""What the NVMe tier knows about its blocks, durably: records in the index, and the superblock.

Primitives of `Ledger`:
  `record`, `forget`       records of written frames (Futures, durable when done)
  `scan`, `rebuild`        start: every usable record; the index again from the frames' headers
  `put_namespace`, `set_clear_count`, `load_namespaces`   kept in index and superblock alike
  `next_generations`       names for writes, never given twice

May not touch slots: which of them are held is the tier's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from kvstore.clock import Clock
from kvstore.errors import GenerationMismatch, TierIO
from kvstore.index import Delete, Index, IndexStatistics, NamespaceRecord
from kvstore.layout import BlockLayout
from kvstore.segment import FrameFields
from kvstore.tier import superblock as superblocks
from kvstore.tier.base import Slots
from kvstore.tier.recover import Records, open_index, pack_record, rebuild, usable_records
from kvstore.tier.segments import Segments
from kvstore.types import ByteArray, NamespaceKind, UIntArray

GENERATIONS_PER_LIFE = 1 << 32


class DeclaredNamespace(Protocol):
    """What is kept of a namespace."""

    index: int
    id: bytes
    kind: NamespaceKind
    layout: BlockLayout
    window_tokens: int
    label: str
    clear_count: int


class Ledger:
    """See the module. Made by `open`. `next_generations` is the loop's; the rest is thread-safe."""

    def __init__(
        self,
        directory: Path,
        superblock: superblocks.Superblock,
        segments: Segments,
        clock: Clock,
        *,
        index_map_bytes: int,
        index_type: type[Index] = Index,
        read_only: bool = False,
    ) -> None:
        """Open the index and count this start. Raises ConfigError (open elsewhere), TierFull,
        TierIO.

        An index that is damaged or of another life is set aside; then `damage` says why.
        `read_only`: this is no start, such an index is refused, and `forget` does nothing.
        """
        opened = open_index(
            directory,
            superblock,
            map_bytes=index_map_bytes,
            index_type=index_type,
            read_only=read_only,
        )
        self._read_only = read_only
        self._directory = directory
        self._segments = segments
        self._clock = clock
        self._index = opened.index
        self._records: Records | None = opened.records
        self.damage = opened.damage
        """Why the index had to start empty; "" when it had not."""
        self.must_rebuild = bool(opened.damage)
        self.records_unusable = 0
        self._lock = threading.Lock()
        self._superblock = superblock
        try:
            if not read_only:
                self._superblock = self._begin_life(superblock, opened.lives)
        except BaseException:
            self._index.close()
            raise
        self._generation = self._superblock.lives * GENERATIONS_PER_LIFE

    def _begin_life(
        self, superblock: superblocks.Superblock, lives_of_index: int
    ) -> superblocks.Superblock:
        """Count in the index first: one that is behind the superblock is an older one."""
        lives = max(superblock.lives, lives_of_index) + 1
        superblock = msgspec.structs.replace(superblock, lives=lives)
        if not self.must_rebuild:
            self._own_index(superblock)
        superblocks.store(self._directory, superblock)
        return superblock

    def _own_index(self, superblock: superblocks.Superblock) -> None:
        """Without this an index is of no life: the next start builds it again."""
        uuid, lives = superblock.uuid.encode(), b"%d" % superblock.lives
        self._index.put_values({"uuid": uuid, "lives": lives})

    @property
    def failure(self) -> str:
        """Why the index takes no records; "" when it does."""
        return self._index.failure

    @property
    def lives(self) -> int:
        """Starts of this data directory, this one included."""
        return self._superblock.lives

    def next_generations(self, count: int) -> UIntArray:
        """Names for `count` writes, never given before in this data directory: uint64[count]."""
        first = self._generation + 1
        self._generation += count
        return np.arange(first, first + count, dtype=np.uint64)

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
        return self._index.submit([], () if self._read_only else names)

    def scan(self) -> Records:
        """Every usable record: fingerprints uint8[n, 32], RECORD[n], after a rebuild where one is
        due.

        Records that point nowhere are deleted and counted.
        """
        if self.must_rebuild:
            for _ in self.rebuild():
                continue
        names, records = self._records or self._index.scan()
        self._records = None
        good = usable_records(records, self._segments.files(), self._segments.geometry)
        bad = np.flatnonzero(~good)
        if len(bad):
            self.records_unusable += len(bad)
            generations = records["generation"][bad].tolist()
            self.forget(
                [(names[at].tobytes(), made) for at, made in zip(bad, generations, strict=True)]
            )
        return names[good], records[good]

    def rebuild(self) -> Iterator[None]:
        """Fill the empty index from the frames' headers, a slice a step; it counts once whole.

        Raises TierFull, TierIO.
        """
        yield from rebuild(self._index, self._segments, self.load_namespaces())
        self._own_index(self._superblock)
        self.must_rebuild = False
        self._records = None

    def check_record(self, name: bytes, slot: int, generation: int) -> None:
        """The index holds this block there. Raises GenerationMismatch."""
        found = self._index.get(name)
        if found is None or (int(found["slot"]), int(found["generation"])) != (slot, generation):
            raise GenerationMismatch(
                f"the index holds no record of write {generation} in NVMe slot {slot}"
            )

    def recorded(self) -> tuple[ByteArray, UIntArray]:
        """Names uint8[n, 32] and generations uint64[n] of every record. Raises IndexDamaged."""
        names, records = self._index.scan()
        return names, records["generation"].astype(np.uint64)

    def still_recorded(self, records: Sequence[Delete]) -> list[Delete]:
        """Those of (fingerprint, generation) that the index holds now. Raises IndexDamaged."""
        found = [self._index.get(name) for name, _ in records]
        return [
            record
            for record, held in zip(records, found, strict=True)
            if held is not None and int(held["generation"]) == record[1]
        ]

    def load_namespaces(self) -> list[NamespaceRecord]:
        """All that were declared, in index order, each with the newer of its two clear counts."""
        merged = {record.id: record for record in self._superblock.namespaces}
        for record in self._index.load_namespaces():
            other = merged.get(record.id, record)
            count = max(record.clear_count, other.clear_count)
            merged[record.id] = msgspec.structs.replace(record, clear_count=count)
        by_index = {record.index: record for record in merged.values()}
        # A declaration that failed half way left its number to a later one, which is in both.
        by_index |= {record.index: merged[record.id] for record in self._superblock.namespaces}
        return [by_index[index] for index in sorted(by_index)]

    def put_namespace(self, namespace: DeclaredNamespace) -> None:
        """Durable, in index and superblock, when this returns. Worker thread. Raises TierFull,
        TierIO.
        """
        layout = namespace.layout
        record = NamespaceRecord(
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
        with self._lock:
            self._keep(record)

    def set_clear_count(self, namespace: bytes, count: int) -> None:
        """Durable when this returns. Worker thread. Raises TierFull, TierIO (also for an unknown
        namespace).
        """
        with self._lock:
            for record in self.load_namespaces():
                if record.id == namespace:
                    self._keep(msgspec.structs.replace(record, clear_count=count))
                    return
        raise TierIO(f"namespace {namespace.hex()[:16]} was never stored here")

    def _keep(self, record: NamespaceRecord) -> None:
        """Under the lock. The index first: `load_namespaces` takes the newer of the two."""
        self._index.put_namespace(record)
        others = [item for item in self._superblock.namespaces if item.id != record.id]
        self._superblock = msgspec.structs.replace(self._superblock, namespaces=[*others, record])
        superblocks.store(self._directory, self._superblock)

    def statistics(self) -> IndexStatistics:
        return self._index.statistics()

    def close(self) -> None:
        """Commit what is queued; twice is a no-op."""
        self._index.close()
