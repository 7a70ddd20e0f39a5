"""`superblock.json`: what a data directory is, so that nothing is read with another geometry.

Primitives: `Superblock`, `load`, `store`. Beside format and geometry it keeps a copy of the
namespaces with their clear counts, so that a lost index cannot bring cleared blocks back, and the
number of lives, which makes generations unique and tells an older index from this one.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import msgspec

from kvstore.blockio import translated
from kvstore.errors import ForeignData
from kvstore.index import ENGINE, NamespaceRecord
from kvstore.segment import FORMAT_VERSION, SegmentGeometry
from kvstore.tier.segments import sync_directory

FORMAT = f"kvstore-nvme-{FORMAT_VERSION}"
FILE_NAME = "superblock.json"


class Superblock(msgspec.Struct, frozen=True):
    """Contents of the file. `lives` counts starts; it goes up before anything is written."""

    format: str
    uuid: str
    segment_bytes: int
    slab_bytes: int
    slot_bytes_min: int
    index_engine: str
    lives: int = 0
    namespaces: list[NamespaceRecord] = []


def load(directory: Path, *, segment_bytes: int, geometry: SegmentGeometry) -> Superblock:
    """The directory's superblock; a new one (not stored yet) for a directory that holds no data.

    Raises ForeignData, naming the way out, for another format or geometry.
    """
    path = directory / FILE_NAME
    way_out = f"or start empty: mv {directory} {directory}.old"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Superblock)
    except FileNotFoundError:
        held = [*(directory / "segments").glob("*.seg"), *(directory / "index").glob("data.mdb")]
        if held:
            raise ForeignData(
                f"{path} is missing but {held[0]} exists; restore it, {way_out}"
            ) from None
        return Superblock(
            FORMAT,
            uuid.uuid4().hex,
            segment_bytes,
            geometry.slab_bytes,
            geometry.slot_bytes_min,
            ENGINE,
        )
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ForeignData(f"{path} is damaged ({error}); restore it, {way_out}") from error
    if found.format != FORMAT:
        raise ForeignData(
            f"{path}: format {found.format!r}, this program writes {FORMAT!r}; {way_out}"
        )
    if found.index_engine != ENGINE:
        raise ForeignData(f"{path}: index engine {found.index_engine!r}, not {ENGINE!r}; {way_out}")
    if found.segment_bytes != segment_bytes:
        raise ForeignData(
            f"{path}: written with nvme.segment_bytes={found.segment_bytes}, configured is "
            f"{segment_bytes}; set nvme.segment_bytes={found.segment_bytes} "
            f"(or KVSTORE_NVME__SEGMENT_BYTES={found.segment_bytes}), {way_out}"
        )
    if (found.slab_bytes, found.slot_bytes_min) != (geometry.slab_bytes, geometry.slot_bytes_min):
        raise ForeignData(f"{path}: another slot geometry than this program's; {way_out}")
    return found


def store(directory: Path, superblock: Superblock) -> None:
    """Replace the file; durable when this returns, and either the old or the new one at any moment.

    Raises TierFull, TierIO.
    """
    path = directory / FILE_NAME
    fresh = path.with_suffix(".new")
    try:
        with fresh.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(superblock), indent=1))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        sync_directory(directory)
    except OSError as error:
        raise translated(error, f"cannot store {path}") from error
