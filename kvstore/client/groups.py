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
from typing import Any, TypeAlias

import numpy as np

from kvstore.directory import DirectoryReader
from kvstore.layout import BlockLayout
from kvstore.rpc.wire import NO_OFFSET, unpack_u8, unpack_u64
from kvstore.types import FINGERPRINT_BYTES, PARTS_MAX, ByteArray, Tier, UIntArray

News: TypeAlias = dict[int, int]
"""Block, counted from the group's first -> bit mask of its parts that became readable."""

_PARTS_OF = [
    tuple(part for part in range(PARTS_MAX) if mask >> part & 1) for mask in range(1 << PARTS_MAX)
]


@dataclass(frozen=True)
class Wanted:
    """One KV group of a request: fingerprints from the root, and its namespace."""

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
    needed: int = 0
    """Blocks before it, counted from `first`, are nobody's business: the engine computes them."""

    def __post_init__(self) -> None:
        # Bytes for what is done part by part, an array over them for what is done at once.
        self._masks = bytearray(len(self.tiers))
        self._has_slot = (self.offsets != NO_OFFSET).tobytes()
        self.readable = np.frombuffer(self._masks, np.uint8)
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
        return self.layout.all_parts

    @property
    def whole(self) -> int:
        """Blocks of [first, blocks) up to the first one needed that is not readable as a whole."""
        is_whole = self.readable[self.needed :] == self.all_parts
        return self.needed + (len(is_whole) if is_whole.all() else int(is_whole.argmin()))

    @property
    def whole_at_end(self) -> int:
        """Last blocks that are readable as a whole."""
        is_whole = self.readable[::-1] == self.all_parts
        return len(is_whole) if is_whole.all() else int(is_whole.argmin())

    def take_grant(self, grant: Any, news: News) -> None:
        """Where blocks will lie; those that came to the host tier meanwhile are readable."""
        count = min(grant.blocks - grant.first, self.count)
        offsets = unpack_u64(grant.offsets, "grants.offsets")[:count]
        generations = _promised(unpack_u64(grant.generations, "grants.generations")[:count])
        tiers = unpack_u8(grant.tiers, "grants.tiers")[:count]
        # What was readable before keeps its promise: a moved slot must show in `holds`.
        fresh = np.flatnonzero(self.readable[:count] == 0)
        self.offsets[fresh] = offsets[fresh]
        self._has_slot = (self.offsets != NO_OFFSET).tobytes()
        self.generations[fresh] = generations[fresh]
        here = fresh[(tiers[fresh] == Tier.HOST) & (offsets[fresh] != NO_OFFSET)]
        self.readable[here] = self.all_parts
        news.update(dict.fromkeys(here.tolist(), self.all_parts))

    def take_parts(self, block: int, parts: int, news: News) -> None:
        """Parts (bit mask) of a block, counted from `first`, were announced."""
        if block < len(self._masks) and self._has_slot[block]:
            fresh = parts & self.all_parts & ~self._masks[block]
            if fresh:
                self._masks[block] |= fresh
                news[block] = news.get(block, 0) | fresh

    def readable_now(self) -> News:
        """Everything that is readable, as news."""
        return {block: mask for block, mask in enumerate(self._masks) if mask}

    def runs(self, number: int, news: News) -> Iterator[Ready]:
        """`news` as runs of neighbours with the same parts; `number` is this group's."""
        start = stop = mask = 0
        for block in sorted(news):
            if block == stop and news[block] == mask:
                stop += 1
                continue
            if mask:
                yield Ready(number, self.first + start, stop - start, _PARTS_OF[mask])
            start, stop, mask = block, block + 1, news[block]
        if mask:
            yield Ready(number, self.first + start, stop - start, _PARTS_OF[mask])

    def holds(self, directory: DirectoryReader) -> bool:
        """Whether the leading whole blocks, from the first one needed, lie where and as promised.

        Whole blocks behind the first hole that do not (they fell with the block that failed) stop
        being readable.
        """
        read = self.needed + np.flatnonzero(self.readable[self.needed :] == self.all_parts)
        names = np.frombuffer(self.joined, np.uint8).reshape(-1, FINGERPRINT_BYTES)
        found = directory.lookup_each(self.index, names[self.first + read])
        promised = self.generations[read]
        same = found.mask & (found.offsets == self.offsets[read])
        same &= (promised == 0) | (found.generations == promised)
        leading = self.whole
        self.readable[read[~same & (read >= leading)]] = 0
        return bool(same[read < leading].all())


def _promised(generations: UIntArray) -> UIntArray:
    """A slot that is being filled (odd) becomes READY at its generation + 1; 0 promises nothing."""
    return generations + (generations & np.uint64(1))
