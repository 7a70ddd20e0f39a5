"""An NVMe directory with very many small blocks, written through the tier's own verbs.

`fill_directory` gives every block its record and every segment its file, but writes no payloads: a
start reads none. For measurements of the index and of what a record costs, never for loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash

from bench.workload import identity_of
from kvstore.blockio import DirectIO
from kvstore.clock import SystemClock
from kvstore.config_load import load
from kvstore.fingerprint import namespace_of
from kvstore.layout import BlockLayout
from kvstore.namespaces import Namespace
from kvstore.segment import FrameFields, geometry_of
from kvstore.tier.nvme import NvmeTier
from kvstore.types import FINGERPRINT_BYTES, PARTS_MAX, ByteArray, NamespaceId, NamespaceKind

BATCH_BLOCKS = 5000
CHAIN_BLOCKS = 500


def fill_directory(
    directory: Path, settings: Mapping[str, str], count: int, block_bytes: int
) -> None:
    """`count` blocks in chains of CHAIN_BLOCKS; `settings` as the daemon will have them."""
    layout = BlockLayout(16, 1, block_bytes)
    space = namespace_of(identity_of(layout))
    config = load(None, {}, settings).nvme
    directory.mkdir(parents=True)
    tier = NvmeTier.open(directory, config=config, io=DirectIO(direct="off"), clock=SystemClock())
    try:
        tier.put_namespace(Namespace(0, space, NamespaceKind.CHAINED, layout, 0, "bench", 0))
        rng = np.random.default_rng(5)
        slab_slots = geometry_of(config.segment_bytes).slots_per_slab_max
        made: set[int] = set()
        for done in range(0, count, BATCH_BLOCKS):
            names = rng.bytes(min(BATCH_BLOCKS, count - done) * FINGERPRINT_BYTES)
            frames, slots = _frames(tier, space, layout, names)
            for frame, slot in zip(frames, slots, strict=True):
                if slot // slab_slots not in made:
                    made.add(slot // slab_slots)
                    tier.write(slot, frame, layout.parts, _payload(layout))
            tier.record(frames, slots).result()
    finally:
        tier.close()


def _payload(layout: BlockLayout) -> ByteArray:
    return np.zeros(layout.block_bytes, np.uint8)


def _frames(
    tier: NvmeTier, space: NamespaceId, layout: BlockLayout, joined: bytes
) -> tuple[list[FrameFields], list[int]]:
    """Chains of CHAIN_BLOCKS named by `joined`, and a slot for each block."""
    size = FINGERPRINT_BYTES
    names = [joined[at : at + size] for at in range(0, len(joined), size)]
    slots = tier.take(tier.slot_bytes_for(layout.block_bytes), len(names))
    if len(slots) < len(names):
        raise RuntimeError(f"the tier has room for {len(slots)} of {len(names)} blocks")
    checksums = np.zeros(PARTS_MAX, np.uint64)
    checksums[0] = xxhash.xxh3_64_intdigest(_payload(layout).data)
    frames = [
        FrameFields(
            generation=int(generation),
            namespace=space,
            fingerprint=name,
            parent=names[index - 1] if index % CHAIN_BLOCKS else space,
            namespace_index=0,
            clear_count=0,
            depth=index % CHAIN_BLOCKS,
            length=layout.block_bytes,
            checksums=checksums,
        )
        for index, (name, generation) in enumerate(
            zip(names, tier.next_generations(len(names)), strict=True)
        )
    ]
    return frames, slots
