"""The KV groups of a lease: what is promised, where it lies, which of it may be read.

Primitives:
  `Wanted`       one group of a request
  `LeasedGroup`  its answer; takes grants and announcements, tells runs and whether all held
  `Ready`        neighbouring blocks with the same readable parts

Pure bookkeeping over what the daemon said and what its directory says; copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.directory import DirectoryReader
from kvstore.layout import BlockLayout
from kvstore.rpc.wire import NO_OFFSET, unpack_u8, unpack_u64
from kvstore.types import FINGERPRINT_BYTES, PARTS_MAX, ByteArray, Tier, UIntArray


@dataclass(frozen=True)
class Wanted:
    """One KV group of a request: fingerprints from the root, and what its namespace was declared
    as.
    """

    namespace: bytes
    joined: bytes
    layout: BlockLayout
    index: int


@dataclass(frozen=True)
class Ready:
    """Blocks [first, first + count) of a group: `parts` of each may be read now.

    `parts` are numbers in `BlockLayout.parts`, ascending; all of them when blocks became readable
    as a whole.
    """

    group: int
    first: int
    count: int
    parts: tuple[int, ...]


@dataclass
class LeasedGroup:
    """One KV group of a lease. Arrays have one entry a block of [first, blocks)."""

    joined: bytes
    """Fingerprints from the root, also those not needed."""
    layout: BlockLayout
    index: int
    """Of the namespace in the arena's directory."""
    first: int
    blocks: int
    offsets: UIntArray
    generations: UIntArray
    """Promised: even; 0 where no slot is known yet."""
    tiers: ByteArray
    """Tier a block was read from: where it lay when the lease was given."""
    readable: ByteArray = field(init=False)
    """Bit mask of parts a block."""

    def __post_init__(self) -> None:
        self.readable = np.zeros(len(self.tiers), np.uint8)
        self.readable[(self.tiers == Tier.HOST) & (self.offsets != NO_OFFSET)] = self.all_parts

    @classmethod
    def of(cls, asked: Wanted, match: Any) -> LeasedGroup:
        """From the daemon's GroupMatch. Raises InvalidRequest when its arrays do not fit."""
        count = match.blocks - match.first
        return cls(
            asked.joined,
            asked.layout,
            asked.index,
            match.first,
            match.blocks,
            unpack_u64(match.offsets, "offsets", count).copy(),
            _promised(unpack_u64(match.generations, "generations", count)),
            unpack_u8(match.tiers, "tiers", count),
        )

    @property
    def count(self) -> int:
        return self.blocks - self.first

    @property
    def all_parts(self) -> int:
        """`readable` of a block that is whole."""
        return (1 << len(self.layout.parts)) - 1

    @property
    def whole(self) -> int:
        """Leading blocks of [first, blocks) that are readable as a whole."""
        is_whole = self.readable == self.all_parts
        return len(is_whole) if is_whole.all() else int(is_whole.argmin())

    def take_grant(self, grant: Any) -> None:
        """Where blocks will lie; those that came to the host tier meanwhile are readable."""
        count = min(grant.blocks - grant.first, self.count)
        offsets = unpack_u64(grant.offsets, "grants.offsets")[:count]
        generations = _promised(unpack_u64(grant.generations, "grants.generations")[:count])
        tiers = unpack_u8(grant.tiers, "grants.tiers")[:count]
        # What was readable before keeps its promise: a moved slot must show in `holds`.
        fresh = np.flatnonzero(self.readable[:count] == 0)
        self.offsets[fresh] = offsets[fresh]
        self.generations[fresh] = generations[fresh]
        here = fresh[(tiers[fresh] == Tier.HOST) & (offsets[fresh] != NO_OFFSET)]
        self.readable[here] = self.all_parts

    def take_parts(self, blocks: NDArray[np.uint32], parts: NDArray[np.uint16]) -> None:
        """Parts that were announced: block counted from `first`, number of the part."""
        known = (blocks < self.count) & (parts < PARTS_MAX)
        blocks, parts = blocks[known], parts[known]
        bits = np.left_shift(1, parts, dtype=np.uint16).astype(np.uint8)
        bits[self.offsets[blocks] == NO_OFFSET] = 0
        np.bitwise_or.at(self.readable, blocks, bits)

    def runs(self, number: int, mask: ByteArray) -> Iterator[Ready]:
        """`mask`, parts a block, as runs of neighbours with the same parts; `number` is this
        group's.
        """
        edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
        for start, stop in pairwise(edges):
            if stop > start and mask[start]:
                bits = int(mask[start])
                parts = tuple(part for part in range(PARTS_MAX) if bits >> part & 1)
                yield Ready(number, self.first + start, stop - start, parts)

    def holds(self, directory: DirectoryReader) -> bool:
        """Whether every block that is readable as a whole lies where and as it was promised."""
        read = np.flatnonzero(self.readable == self.all_parts)
        names = np.frombuffer(self.joined, np.uint8).reshape(-1, FINGERPRINT_BYTES)
        found = directory.lookup_each(self.index, names[self.first + read])
        promised = self.generations[read]
        same = found.mask & (found.offsets == self.offsets[read])
        same &= (promised == 0) | (found.generations == promised)
        return bool(same.all())


def _promised(generations: UIntArray) -> UIntArray:
    """A slot that is being filled (odd) becomes READY at its generation + 1; 0 promises nothing."""
    return generations + (generations & np.uint64(1))
