"""Reads from NVMe into arena slots: what is on its way, who waits for it, and the threads that
read.

Primitives:
  `Promotion`   one block on its way up; `LoadStream` what one load still waits for
  `Piece`       adjacent parts, read and verified in one go; `read_runs`
  `ReadBatch`   the pieces of one load, worked off by a few threads; completions come back to the
                loop in lumps

Worker threads touch the bytes and a piece's outcome; everything else belongs to the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import lru_cache

from kvstore.errors import DataError, TierError
from kvstore.layout import BlockLayout, Part
from kvstore.matching import GroupMatch
from kvstore.namespaces import Namespace
from kvstore.tier.nvme import NvmeTier
from kvstore.tier.parts import runs_of
from kvstore.types import ByteArray, UIntArray

PIECES_PER_TURN = 4

BLOCKS, LAYERS, BACK = range(3)
"""Orders of a load: block by block, a layer of all blocks at a time, from the last block down."""
LoadOrder = int

PieceKey = tuple[int, int, int]
"""(group of the request, bit mask of parts, block counted from the group's first)."""


@dataclass(slots=True, eq=False)
class Promotion:
    """One block on its way from NVMe to a host slot. Owned by the loop; `listeners` are told of
    each part.
    """

    row: int
    namespace: Namespace
    host_slot: int
    parts_missing: int
    """Bit mask."""
    pieces_left: int = 0
    """Reads not yet ended: the slot has no other owner before this is 0, also after a failure."""
    failure: Exception | None = None
    listeners: list[tuple[LoadStream, int, int]] = field(default_factory=list)
    """(stream, group, block) of every load that waits for this block."""

    @property
    def parts_ready(self) -> int:
        """Bit mask."""
        return self.namespace.layout.all_parts & ~self.parts_missing


@dataclass(eq=False)
class LoadStream:
    """What one load still waits for. `ready` and `failed` fill up; `changed` is set whenever one
    of them did.
    """

    groups: list[GroupMatch]
    short_reason: str = ""
    ready: list[PieceKey] = field(default_factory=list)
    failed: list[tuple[int, int]] = field(default_factory=list)
    blocks_missing: int = 0
    """Blocks that are neither READY nor failed."""
    blocks_unread: int = 0
    """Those of them that are not in host memory as a whole yet."""
    is_piecemeal: bool = False
    """Whoever waits may stop at any block: each is published as soon as it is whole."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> tuple[list[PieceKey], list[tuple[int, int]]]:
        """Everything announced since the last call."""
        ready, failed = self.ready, self.failed
        self.ready, self.failed = [], []
        self.changed.clear()
        return ready, failed

    @property
    def parts_ready(self) -> int:
        """Readable and not taken yet."""
        return sum(mask.bit_count() for _, mask, _ in self.ready)

    def fail(self, group: int, block: int) -> None:
        """It will not come. Parts not announced yet are taken back: its slot may go to others."""
        self.failed.append((group, block))
        self.ready = [ready for ready in self.ready if (ready[0], ready[2]) != (group, block)]
        self.short_reason = self.short_reason or "failed"
        self.blocks_missing -= 1
        self.changed.set()

    @property
    def is_done(self) -> bool:
        return self.blocks_missing == 0


@dataclass(slots=True, eq=False)
class Piece:
    """Adjacent parts of one block, read and verified by one worker turn."""

    promotion: Promotion
    nvme_slot: int
    parts: tuple[Part, ...]
    mask: int
    """The same parts as bits."""
    into: ByteArray
    checksums: UIntArray


class ReadBatch:
    """The pieces of one load, worked off by a few threads; completions are handed to the loop in
    lumps.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        nvme: NvmeTier,
        workers: Executor,
        loop: asyncio.AbstractEventLoop,
        settle: Callable[[Iterable[tuple[Piece, Exception | None]]], None],
    ) -> None:
        self._pieces = deque(pieces)
        self._nvme = nvme
        self._workers = workers
        self._loop = loop
        self._settle = settle
        self._done: deque[tuple[Piece, Exception | None]] = deque()
        self._is_told = False

    def start(self, threads: int) -> None:
        for _ in range(min(threads, len(self._pieces))):
            self._submit()

    def _submit(self) -> None:
        try:
            self._workers.submit(self._turn)
        except RuntimeError:
            self._fail_rest()

    def _turn(self) -> None:
        """Worker thread: a few pieces, then to the back of the queue."""
        for _ in range(PIECES_PER_TURN):
            try:
                piece = self._pieces.popleft()
            except IndexError:
                return
            self._done.append((piece, self._read(piece)))
            if not self._is_told:
                self._is_told = True
                self._loop.call_soon_threadsafe(self._collect)
        self._submit()

    def _read(self, piece: Piece) -> Exception | None:
        if piece.promotion.failure is not None:
            return piece.promotion.failure
        try:
            self._nvme.read_parts(piece.nvme_slot, piece.parts, piece.into, piece.checksums)
        except (DataError, TierError) as error:
            return error
        return None

    def _fail_rest(self) -> None:
        """The pool shuts down: what was not read is a miss."""
        while self._pieces:
            self._done.append((self._pieces.popleft(), TierError("the daemon is shutting down")))
        self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        """Loop: settle everything that ended. The flag falls first, so that no completion is left
        behind.
        """
        self._is_told = False
        done = [self._done.popleft() for _ in range(len(self._done))]
        if done:
            self._settle(done)


@lru_cache(maxsize=256)
def read_runs(layout: BlockLayout, layer_order: bool) -> list[tuple[tuple[Part, ...], int]]:
    """(parts, their bit mask) of each read of a block; in layer order a part a read."""
    runs = [(part,) for part in layout.parts] if layer_order else runs_of(layout.parts)
    return [(tuple(run), sum(1 << part.index for part in run)) for run in runs]
