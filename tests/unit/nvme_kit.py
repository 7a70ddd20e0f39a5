"""Blocks for the NVMe tests: payloads by seed, and the shortest honest user of an NvmeTier."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.blockio import BlockIO, DirectIO, page_aligned
from kvstore.config import NvmeConfig
from kvstore.layout import BlockLayout
from kvstore.segment import FrameFields
from kvstore.testing.clock import VirtualClock
from kvstore.tier.nvme import NvmeTier
from kvstore.types import FINGERPRINT_BYTES, PARTS_MAX, ByteArray, NamespaceKind

MIB = 1 << 20
LAYOUT = BlockLayout(block_tokens=16, layers=8, layer_bytes=8 << 10)
"""64 KiB a block, eight parts."""
RAGGED = BlockLayout(block_tokens=1, layers=3, layer_bytes=5000, ranks=2)
"""Two ranks whose bytes end inside a page."""
NAMESPACE = b"n" * FINGERPRINT_BYTES


class Declared:
    """A namespace as the store hands it over."""

    def __init__(self, layout: BlockLayout = LAYOUT, name: bytes = NAMESPACE, index: int = 0):
        self.index, self.id, self.kind = index, name, NamespaceKind.CHAINED
        self.layout, self.window_tokens, self.label, self.clear_count = layout, 0, "", 0


def config(**changes: object) -> NvmeConfig:
    """Small segments, a small cap, a floor that leaves the disk alone."""
    values = {
        "bytes_max": 16 * MIB,
        "free_bytes_min": MIB,
        "segment_bytes": MIB,
        "index_map_bytes": 64 * MIB,
    }
    return NvmeConfig(**{**values, **changes})


def open_tier(directory: Path, io: BlockIO | None = None, **changes: object) -> NvmeTier:
    directory.mkdir(exist_ok=True)
    clock = changes.pop("clock", None) or VirtualClock()
    return NvmeTier.open(directory, config=config(**changes), io=io or DirectIO(), clock=clock)


def name_of(seed: int) -> bytes:
    return seed.to_bytes(FINGERPRINT_BYTES, "little")


def payload_of(seed: int, layout: BlockLayout = LAYOUT, skew: int = 0) -> ByteArray:
    """uint8[block_bytes], different for every seed; starts `skew` bytes past a page boundary."""
    room = page_aligned(layout.slot_bytes + skew)[skew:]
    random = np.random.default_rng(seed)
    room[: layout.block_bytes] = random.integers(0, 256, layout.block_bytes, dtype=np.uint8)
    return room[: layout.block_bytes]


def frame_of(
    tier: NvmeTier, seed: int, layout: BlockLayout = LAYOUT, payload: ByteArray | None = None
) -> FrameFields:
    payload = payload_of(seed, layout) if payload is None else payload
    checksums = np.zeros(PARTS_MAX, np.uint64)
    for part in layout.parts:
        piece = payload[part.offset : part.offset + part.length]
        checksums[part.index] = xxhash.xxh3_64_intdigest(piece)
    return FrameFields(
        generation=int(tier.next_generations(1)[0]),
        namespace=NAMESPACE,
        fingerprint=name_of(seed),
        parent=NAMESPACE,
        namespace_index=0,
        clear_count=0,
        depth=0,
        length=layout.block_bytes,
        checksums=checksums,
    )


class Blocks:
    """Durable blocks by seed over one tier at a time. Raises what the tier raises."""

    def __init__(self, tier: NvmeTier, layout: BlockLayout = LAYOUT) -> None:
        self.tier = tier
        self.layout = layout
        self.held: dict[int, tuple[int, FrameFields]] = {}
        tier.put_namespace(Declared(layout))

    def put(self, seed: int, skew: int = 0) -> bool:
        """Durable and READY; False when there is no room. A failed write gives its slot back."""
        return self.fill([seed], skew) == [seed]

    def fill(self, seeds: Iterable[int], skew: int = 0) -> list[int]:
        """Store until there is no room; one sync and one group of records. What was stored."""
        tier, size = self.tier, self.tier.slot_bytes_for(self.layout.block_bytes)
        stored: list[int] = []
        slots: list[int] = []
        frames: list[FrameFields] = []
        try:
            for seed in seeds:
                got = tier.take(size, 1)
                if not got:
                    break
                slots += got
                frames.append(frame_of(tier, seed, self.layout))
                payload = payload_of(seed, self.layout, skew)
                tier.write(got[0], frames[-1], self.layout.parts, payload)
                stored.append(seed)
            tier.sync(slots)
            tier.record(frames, slots).result(10)
        except BaseException:
            tier.free(slots)
            raise
        tier.publish(slots)
        self.held.update(zip(stored, zip(slots, frames, strict=True), strict=True))
        return stored

    def get(self, seed: int) -> ByteArray:
        slot, frame = self.held[seed]
        into = page_aligned(self.layout.slot_bytes)
        self.tier.read_parts(slot, self.layout.parts, into, frame.checksums)
        return into[: self.layout.block_bytes]

    def is_whole(self, seed: int) -> bool:
        """Every part of the block as it was stored (padding between ranks is not)."""
        found, stored = self.get(seed), payload_of(seed, self.layout)
        return all(
            np.array_equal(
                found[part.offset : part.offset + part.length],
                stored[part.offset : part.offset + part.length],
            )
            for part in self.layout.parts
        )

    def drop(self, *seeds: int) -> None:
        """Records first, then slots."""
        held = [self.held.pop(seed) for seed in seeds]
        names = [(frame.fingerprint, frame.generation) for _, frame in held]
        self.tier.forget(names).result(10)
        self.tier.free([slot for slot, _ in held])

    def reopen(self, tier: NvmeTier) -> set[int]:
        """Go on over a newly opened tier, as recovery would; seeds of the blocks that are back."""
        self.tier = tier
        names, records = tier.scan()
        size = tier.slot_bytes_for(self.layout.block_bytes)
        adopted = tier.adopt(size, records["slot"].astype(np.int64))
        before, self.held = self.held, {}
        for name, record in zip(names[adopted], records[adopted], strict=True):
            seed = int.from_bytes(name.tobytes(), "little")
            frame = before[seed][1]
            checksums = record["checksums"].copy()
            generation = int(record["generation"])
            frame = replace(frame, checksums=checksums, generation=generation)
            self.held[seed] = (int(record["slot"]), frame)
        return set(self.held)


def bytes_in(directory: Path) -> int:
    """What `du` says the directory occupies."""
    told = subprocess.run(
        ["du", "-s", "--block-size=1", str(directory)], capture_output=True, text=True, check=False
    )
    return int(told.stdout.split()[0])


@contextmanager
def small_filesystem(size_bytes: int) -> Iterator[Path]:
    """A file system of its own of that size; the test is skipped where none may be mounted."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", directory]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"SKIPPED, NOT PROVEN: cannot mount a small file system here ({error})")
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", "--lazy", directory], check=True)
