"""Start of the NVMe tier: an index that can be trusted, and records that fit the files.

Primitives:
  `open_index`      the index of this data directory; a damaged, foreign or older one is set aside
  `usable_records`  which records point to a whole slot of an existing file
  `rebuild`         the index again, from the frames' own headers, in slices
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import FrameMalformed, TierIO
from kvstore.index import RECORD, Index, IndexDamaged, NamespaceRecord
from kvstore.segment import FrameFields, SegmentGeometry, frame_bytes
from kvstore.tier.segments import Segments
from kvstore.tier.superblock import Superblock
from kvstore.types import PAGE_BYTES, BoolArray, ByteArray

Records = tuple[ByteArray, NDArray[np.void]]
"""Fingerprints uint8[n, 32], records RECORD[n]."""
SLICE_FRAMES = 16
SLICE_RECORDS = 256


@dataclass(frozen=True)
class OpenedIndex:
    """`records` is all it holds; `damage` says why it starts empty and must be rebuilt, "" when it
    need not be.
    """

    index: Index
    records: Records
    lives: int
    damage: str


def open_index(
    directory: Path,
    superblock: Superblock,
    *,
    map_bytes: int,
    index_type: type[Index] = Index,
    read_only: bool = False,
) -> OpenedIndex:
    """Open `directory`/index and read it once. Raises ConfigError when it is open elsewhere,
    TierFull, TierIO; with `read_only` also for an index that would be set aside.
    """
    path = directory / "index"
    index: Index | None = None
    try:
        if read_only and not (path / "data.mdb").exists():
            raise IndexDamaged(f"{path} is missing")
        index = index_type.open(path, map_bytes=map_bytes)
        lives, damage = _origin(index, superblock)
        records = index.scan()
        index.load_namespaces()
        if not damage:
            return OpenedIndex(index, records, lives, "")
        if not len(records[0]) and not lives:
            return OpenedIndex(index, records, superblock.lives, damage)
    except IndexDamaged as error:
        damage = str(error)
    if index is not None:
        index.close()
    if read_only:
        raise TierIO(f"{damage}; with --fix, or at a start, it is built again from the blocks")
    set_aside(path)
    index = index_type.open(path, map_bytes=map_bytes)
    return OpenedIndex(index, index.scan(), superblock.lives, damage)


def _origin(index: Index, superblock: Superblock) -> tuple[int, str]:
    """How many lives the index saw (0: it is new), and why it is not the superblock's."""
    owner, lives = index.get_value("uuid"), index.get_value("lives")
    if owner is None or lives is None:
        return 0, "the index is missing, or was never built whole" if superblock.lives else ""
    if owner.decode() != superblock.uuid:
        return int(lives), "the index belongs to another data directory"
    if int(lives) not in (superblock.lives, superblock.lives + 1):
        return int(
            lives
        ), f"the index is of life {int(lives)}, the superblock of {superblock.lives}"
    return int(lives), ""


def set_aside(path: Path) -> Path:
    """Rename a damaged index out of the way; one earlier damaged index at most stays for a look."""
    parent = path.parent
    numbers = [
        int(found.suffix[1:].removeprefix("damaged-")) for found in _set_aside_before(parent)
    ]
    for old in _set_aside_before(parent):
        shutil.rmtree(old)
    target = parent / f"{path.name}.damaged-{max(numbers, default=0) + 1}"
    os.rename(path, target)
    return target


def _set_aside_before(parent: Path) -> list[Path]:
    return sorted(found for found in parent.glob("index.damaged-*") if found.suffix[9:].isdigit())


def usable_records(
    records: NDArray[np.void], files: dict[int, int], geometry: SegmentGeometry
) -> BoolArray:
    """True where the slot lies in an existing file of the right slot size; of two claims the newer
    holds.
    """
    if not len(records):
        return np.zeros(0, np.bool_)
    slots = records["slot"].astype(np.int64)
    segments = slots // geometry.slots_per_slab_max
    sizes = np.zeros(max(max(files, default=0), 0) + 2, np.int64)
    for number, slot_bytes in files.items():
        sizes[number] = slot_bytes
    inside = (slots >= 0) & (segments < len(sizes))
    found = sizes[np.where(inside, segments, len(sizes) - 1)]
    lengths = records["length"].astype(np.int64)
    needed = PAGE_BYTES + -(-lengths // PAGE_BYTES) * PAGE_BYTES
    per_file = np.maximum(1, geometry.slab_bytes // np.maximum(found, 1))
    good = inside & (found == needed) & (slots % geometry.slots_per_slab_max < per_file)
    newest = np.lexsort((records["generation"], slots))
    last = np.ones(len(slots), np.bool_)
    last[newest[:-1]] = slots[newest[:-1]] != slots[newest[1:]]
    usable: BoolArray = good & last
    return usable


def rebuild(
    index: Index, segments: Segments, namespaces: Iterable[NamespaceRecord]
) -> Iterator[None]:
    """Fill an empty index from the frames on disk; durable when exhausted. Raises TierFull, TierIO.

    Of several frames of one block the newest counts; frames of unknown namespaces and of earlier
    clear counts are left out, so that nothing cleared comes back.
    """
    known = {record.id: record for record in namespaces}
    newest: dict[bytes, tuple[int, FrameFields]] = {}
    for step, (slot, frame) in enumerate(_frames(segments)):
        if step % SLICE_FRAMES == 0:
            yield
        if frame is None or frame.namespace not in known:
            continue
        before = newest.get(frame.fingerprint)
        if frame.clear_count == known[frame.namespace].clear_count and (
            before is None or before[1].generation < frame.generation
        ):
            newest[frame.fingerprint] = (slot, frame)
    frames = list(newest.values())
    for start in range(0, len(frames), SLICE_RECORDS):
        part = frames[start : start + SLICE_RECORDS]
        done = index.submit(
            [
                (frame.fingerprint, pack_record(frame, slot, known[frame.namespace].index))
                for slot, frame in part
            ],
            [],
        )
        while not done.done():
            yield
        done.result()


def _frames(segments: Segments) -> Iterator[tuple[int, FrameFields | None]]:
    """Every slot of every file with its header; None where there is no readable one or it does not
    fit.
    """
    geometry = segments.geometry
    for number, slot_bytes in sorted(segments.files().items()):
        for place in range(geometry.slots_in(slot_bytes)):
            slot = number * geometry.slots_per_slab_max + place
            try:
                frame = segments.read_header(slot)
            except (FrameMalformed, TierIO):
                yield slot, None
                continue
            yield slot, frame if frame_bytes(frame.length) == slot_bytes else None


def pack_record(frame: FrameFields, slot: int, namespace_index: int) -> bytes:
    """RECORD bytes of a written frame."""
    record = np.zeros((), RECORD)
    record["parent"] = np.void(frame.parent)
    record["namespace"] = namespace_index
    record["clear_count"] = frame.clear_count
    record["depth"] = frame.depth
    record["slot"] = slot
    record["generation"] = frame.generation
    record["length"] = frame.length
    record["checksums"] = frame.checksums
    record["uses"] = frame.uses
    record["stored_at"] = frame.stored_at
    return record.tobytes()
