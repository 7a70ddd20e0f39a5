"""What the client tests share: small layouts, coloured blocks, waiting for something to become
true."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.client import KVClient, NamespaceHandle
from kvstore.layout import BlockLayout
from kvstore.types import BlockStatus, ByteArray, NamespaceId

LAYOUT = BlockLayout(block_tokens=16, layers=2, layer_bytes=4096)
"""8192 bytes a block in two parts: the fake daemon's slot size."""
TWO_RANKS = BlockLayout(block_tokens=16, layers=1, layer_bytes=4000, ranks=2)
"""8096 bytes a block: two parts of 4000, the second at 4096."""
SPACE = NamespaceId(b"n" * 32)
STORED = BlockStatus.STORED
SECONDS = 20.0
"""Everything happens at once; on a machine that is busy with other things it may take so long."""


def open_space(client: KVClient, layout: BlockLayout = LAYOUT, **options: Any) -> NamespaceHandle:
    return client.namespace(SPACE, layout, **options)


def chain_of(space: NamespaceHandle, blocks: int, seed: int = 0) -> Any:
    """Names of `blocks` blocks; chains of different seeds share nothing."""
    return space.chain(range(seed * 10_000, seed * 10_000 + blocks * 16))


def coloured(blocks: int, layout: BlockLayout = LAYOUT, seed: int = 0) -> ByteArray:
    """uint8 [blocks, block_bytes], different everywhere."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (blocks, layout.block_bytes), np.uint8)


def fill(fake: Any, space: NamespaceHandle, chain: Any, blocks: ByteArray, disk_from: int) -> None:
    """Blocks below `disk_from` are READY in the fake's host tier, the others on its disk."""
    for index, block in enumerate(blocks):
        if index < disk_from:
            fake.put(space.id, chain[index], block.tobytes())
        else:
            fake.on_disk[chain[index]] = block.tobytes()


def eventually(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until `condition` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.005)
