"""Blocks of one namespace to chunks and back, over the ordinary client.

Primitives: `send` (Get), `Upload` (Put), `Buffers` (memory that streams take turns with).

A block is copied out of the arena whole and compared before its first chunk leaves, so that a slow
reader holds no lease, and changed bytes are a miss. A block that arrives becomes the store's only
when it is whole and its checksum is right: what is damaged or given up leaves no trace. Blocks on
NVMe pass through staging slots: a scan from outside pushes nothing out of RAM.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future

import numpy as np
from numpy.typing import NDArray

from kvstore.client import NamespaceHandle, RawNames
from kvstore.client.reasons import AWAY, CHANGED, CLOSED, DRAINING
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.gateway.lookups import existence
from kvstore.rpc import blocks_pb2 as pb
from kvstore.rpc.chunks import Assembly, Received, chunks_of, join_data
from kvstore.types import FINGERPRINT_BYTES, BlockStatus, ByteArray, NamespaceKind

WINDOW_BYTES = 4 << 20
"""Read from the store in one go; a larger block is one by itself."""
WINDOW_BLOCKS_MAX = 256
CHANGED_TRIES = 3
"""A block that was moved while it was copied is looked for again."""
BATCH_BYTES = 8 << 20
"""Stored in one go."""
SUCCESS = (BlockStatus.STORED, BlockStatus.PRESENT, BlockStatus.WAITING)
_AWAY = (AWAY, CLOSED, DRAINING, "PeerGone", "Unavailable", "Draining", "Overloaded")


class Buffers:
    """Arrays of the same sizes again and again: fresh memory costs as much as the copy into it."""

    def __init__(self, kept_bytes_max: int) -> None:
        self._kept_bytes_max = kept_bytes_max
        self._kept: deque[ByteArray] = deque()
        self._lock = threading.Lock()

    def take(self, size: int) -> ByteArray:
        """uint8 [size], undefined content."""
        with self._lock:
            for number, kept in enumerate(self._kept):
                if len(kept) == size:
                    del self._kept[number]
                    return kept
        return np.empty(size, np.uint8)

    def give(self, buffer: ByteArray) -> None:
        """Its user is done with it."""
        with self._lock:
            self._kept.appendleft(buffer)
            while sum(map(len, self._kept)) > self._kept_bytes_max:
                self._kept.pop()


def send(handle: NamespaceHandle, names: RawNames, first: int, buffers: Buffers) -> Iterator[bytes]:
    """Messages of blocks [first, len(names)); ends after the first miss of a chain.

    Raises Unavailable when the daemon is away.
    """
    size = handle.layout.block_bytes
    window = max(1, min(WINDOW_BYTES // size, WINDOW_BLOCKS_MAX, len(names) - first))
    buffer = buffers.take(window * size)
    try:
        yield from _send(handle, names, first, buffer.reshape(window, size))
    finally:
        buffers.give(buffer)


def _send(
    handle: NamespaceHandle, names: RawNames, first: int, rows: NDArray[np.uint8]
) -> Iterator[bytes]:
    is_chain = handle.kind is NamespaceKind.CHAINED and not handle.window_tokens
    at, tries = first, 0
    while at < len(names):
        into = rows[: len(names) - at]
        if is_chain:
            result = handle.load(names, into, start=at, staging=True)
        else:
            piece = names.joined[at * FINGERPRINT_BYTES : (at + len(into)) * FINGERPRINT_BYTES]
            result = handle.load(RawNames(handle.id, piece), into, staging=True)
        for row in into[: result.blocks]:
            yield from chunks_of(at, row)
            at += 1
        if result.blocks:
            tries = 0
            continue
        if result.reason.partition(":")[0] in _AWAY:
            raise Unavailable(f"get: {result.reason}")
        tries += 1
        if result.reason == CHANGED and tries < CHANGED_TRIES:
            continue
        miss = pb.Chunk(block=at, last=True, missing=True, reason=result.reason)
        yield join_data(miss, b"")
        if is_chain:
            return
        at, tries = at + 1, 0


class Upload:
    """The blocks of one Put. While some are stored the next ones come in.

    Blocks are stored in batches, named beforehand: their parent cannot be evicted to make room for
    them. `close` gives the memory back.
    """

    def __init__(
        self, handle: NamespaceHandle, names: RawNames, buffers: Buffers, workers: Executor
    ) -> None:
        self._handle = handle
        self._names = names
        self._workers = workers
        size = handle.layout.block_bytes
        self._batch_max = max(1, min(BATCH_BYTES // size, WINDOW_BLOCKS_MAX, len(names)))
        self._buffers = buffers
        self._memory = [buffers.take(self._batch_max * size) for _ in range(2)]
        self._rows = [memory.reshape(self._batch_max, size) for memory in self._memory]
        self._assembly = Assembly(size)
        self._block = -1
        """The block that came last, or is coming."""
        self._first = self._whole = 0
        """The batch: whole blocks [first, first + whole), in rows [0, whole)."""
        self._storing: Future[None] | None = None
        self._statuses = bytearray(len(names))
        self._reason = ""

    def take(self, received: Received) -> None:
        """The next chunk.

        Raises InvalidRequest for what is out of order or of the wrong size, ChecksumMismatch; what
        was stored before stays.
        """
        block = received.chunk.block
        in_order = block == self._block if self._assembly.filled else block > self._block
        if not in_order or block >= len(self._names):
            raise InvalidRequest(
                f"put: a chunk of block {block} (of {len(self._names)}) after "
                f"{self._assembly.filled or 'all'} bytes of block {self._block}; blocks come "
                "whole, and in ascending order"
            )
        if not self._assembly.filled and block != self._first + self._whole:
            self._flush()
            self._first = block
        self._block = block
        if self._assembly.take(received, self._rows[0][self._whole]):
            self._whole += 1
            if self._whole == self._batch_max:
                self._flush()

    def finish(self) -> pb.PutReply:
        """All was sent. Raises InvalidRequest when the last block is not whole."""
        if self._assembly.filled:
            raise InvalidRequest(
                f"put: the stream ended after {self._assembly.filled} bytes of block {self._block}"
            )
        self._flush()
        self._wait()
        self._look_for_unsent()
        return pb.PutReply(statuses=bytes(self._statuses), reason=self._reason)

    def close(self) -> None:
        self._wait()
        for memory in self._memory:
            self._buffers.give(memory)

    def _flush(self) -> None:
        """Begin to store the batch; the one before is done first."""
        self._wait()
        if self._whole:
            self._storing = self._workers.submit(
                self._store, self._first, self._rows[0][: self._whole]
            )
            self._rows.reverse()
        self._first, self._whole = self._first + self._whole, 0

    def _wait(self) -> None:
        if self._storing is not None:
            self._storing.result()
            self._storing = None

    def _store(self, first: int, rows: NDArray[np.uint8]) -> None:
        """Worker thread: blocks [first, first + len(rows)); what fails is told by their status."""
        try:
            with self._handle.reserve(self._names, start=first, count=len(rows)) as reserved:
                reason = reserved.reason
                statuses = tuple(reserved.statuses)
                for block in reserved.granted:
                    np.copyto(reserved.view(block), rows[block])
                if reserved.granted:
                    statuses = reserved.commit()
        except KVStoreError as error:
            statuses, reason = (BlockStatus.DROPPED,) * len(rows), str(error)
        self._statuses[first : first + len(rows)] = bytes(statuses)
        failed = [status for status in statuses if status not in SUCCESS]
        if failed:
            self._reason = self._reason or reason or failed[0].name.lower()

    def _look_for_unsent(self) -> None:
        unsent = [block for block, status in enumerate(self._statuses) if not status]
        if unsent:
            names = self._names.joined
            joined = b"".join(names[block * 32 : block * 32 + 32] for block in unsent)
            tiers = existence(self._handle, joined).tiers
            for block, tier in zip(unsent, tiers.tolist(), strict=True):
                self._statuses[block] = pb.PRESENT if tier else pb.NOT_SENT
