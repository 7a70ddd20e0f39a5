"""What an engine knows of one KV group of a lease, kept as plainly as the protocol allows.

Primitives of `LeasedBlocks`: `grant` and `announce` take what the daemon says, `whole` and `holds`
are what a reader asks. Written from the protocol's text, apart from the client library, so that
the two can disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.directory import DirectoryReader
from kvstore.layout import BlockLayout
from kvstore.namespaces import Namespace
from kvstore.rpc.wire import NO_OFFSET
from kvstore.types import FINGERPRINT_BYTES, Tier


@dataclass
class LeasedBlocks:
    """Blocks [first, blocks) of a chain; the lists have one entry a block."""

    names: list[bytes]
    layout: BlockLayout
    index: int
    first: int
    blocks: int
    offsets: list[int] = field(default_factory=list)
    promised: list[int] = field(default_factory=list)
    """Generation at which the block is READY; 0: none was told."""
    tiers: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    """Bit mask of the parts that may be read."""

    @classmethod
    def of(cls, namespace: Namespace, joined: bytes, match: Any) -> LeasedBlocks:
        """From the daemon's GroupMatch."""
        size = FINGERPRINT_BYTES
        names = [joined[at * size : (at + 1) * size] for at in range(match.first, match.blocks)]
        found = cls(names, namespace.layout, namespace.index, match.first, match.blocks)
        found.parts = [0] * len(names)
        found.grant(match)
        found.tiers = list(match.tiers)
        return found

    def grant(self, match: Any) -> None:
        """Where blocks lie or will lie. What was readable before keeps its promise."""
        offsets = np.frombuffer(match.offsets, "<u8").tolist()
        generations = np.frombuffer(match.generations, "<u8").tolist()
        if not self.offsets:
            self.offsets = [NO_OFFSET] * len(self.names)
            self.promised = [0] * len(self.names)
        for at, (offset, generation, tier) in enumerate(
            zip(offsets, generations, match.tiers, strict=True)
        ):
            if self.parts[at]:
                continue
            self.offsets[at] = offset
            self.promised[at] = generation + generation % 2
            if tier == Tier.HOST and offset != NO_OFFSET:
                self.parts[at] = self.layout.all_parts

    def announce(self, block: int, parts: int) -> None:
        """Parts (bit mask) of a block, counted from `first`, may be read where a grant told."""
        assert self.offsets[block] != NO_OFFSET, "a part was announced before its place was told"
        self.parts[block] |= parts

    @property
    def whole(self) -> int:
        """Leading blocks that may be read as a whole."""
        count = 0
        while count < len(self.parts) and self.parts[count] == self.layout.all_parts:
            count += 1
        return count

    def holds(self, directory: DirectoryReader) -> bool:
        """After the last copy: whether the leading whole blocks lie where and as promised."""
        count = self.whole
        found = directory.lookup_each(self.index, b"".join(self.names[:count]))
        for at in range(count):
            if not found.mask[at] or int(found.offsets[at]) != self.offsets[at]:
                return False
            if self.promised[at] not in (0, int(found.generations[at])):
                return False
        return True
