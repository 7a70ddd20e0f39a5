"""The verbs of a remote client, without I/O.

Each verb is a generator: it yields what is to be asked (`Ask`, `Stream`, `Pause`), is sent the
answer, and returns the verb's result; a failed call is thrown into it as its typed error. `client`
drives them blocking, `aio` on a loop. Long lists of names are cut into pages here, broken streams
taken up again, damaged blocks asked for once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np

from kvstore.client import Existence, ListedPage, Names, RawNames
from kvstore.client.copying import Rows
from kvstore.errors import ChecksumMismatch, InvalidRequest, Unavailable
from kvstore.layout import BlockLayout
from kvstore.rpc import blocks_pb2 as pb
from kvstore.rpc.chunks import Assembly, Received, chunks_of, join_data
from kvstore.rpc.wire import unpack_u8
from kvstore.types import (
    FINGERPRINT_BYTES,
    BlockStatus,
    BoolArray,
    NamespaceId,
    NamespaceKind,
)

T = TypeVar("T")
KEYS_PER_CALL = 16_384
"""Less than a gateway takes, so that no call lasts long."""
PINS_PER_CALL = 1024
TRIES = 4
PAUSE_SECONDS = 0.1
NOT_SENT = 0
SUCCESS = (BlockStatus.PRESENT, BlockStatus.STORED, BlockStatus.WAITING)


@dataclass(frozen=True)
class Ask:
    """One call; its reply is sent back. `messages`: Put's stream instead of `request`."""

    method: str
    request: Any = None
    messages: Iterator[bytes] | None = None
    deadline_seconds: float | None = None


@dataclass(frozen=True)
class Stream:
    """Get: every message goes to `take`."""

    request: pb.GetRequest
    take: Callable[[Received], None]
    deadline_seconds: float


@dataclass(frozen=True)
class Pause:
    seconds: float


Verb: TypeAlias = Generator[Ask | Stream | Pause, Any, T]


@dataclass(frozen=True)
class Declared:
    """A namespace and its blocks' layout, as known to the daemon or to be made known by a put."""

    id: NamespaceId
    layout: BlockLayout
    kind: NamespaceKind = NamespaceKind.CHAINED
    window_tokens: int = 0
    label: str = ""

    @property
    def is_chain(self) -> bool:
        """Whether blocks need those before them. Keys and sliding windows stand alone."""
        return self.kind is NamespaceKind.CHAINED and not self.window_tokens

    @classmethod
    def of(cls, found: Any) -> Declared:
        sizes = found.layout
        layout = BlockLayout(sizes.block_tokens, sizes.layers, sizes.layer_bytes, sizes.ranks)
        kind = NamespaceKind(found.kind)
        return cls(NamespaceId(found.namespace), layout, kind, found.window_tokens, found.label)

    def message(self) -> pb.Declaration:
        layout = self.layout
        return pb.Declaration(
            kind=self.kind,
            layout=pb.Layout(
                block_tokens=layout.block_tokens,
                layers=layout.layers,
                layer_bytes=layout.layer_bytes,
                ranks=layout.ranks,
            ),
            window_tokens=self.window_tokens,
            label=self.label,
        )


@dataclass(frozen=True)
class Limits:
    """What a gateway takes on."""

    keys_per_call_max: int
    streams_max: int
    idle_seconds_max: float


@dataclass
class GetResult:
    """`found` bool [n]: which blocks came; the rows of the others are undefined.

    `reason`: why the first of those did not come, "" if all did.
    """

    found: BoolArray
    reason: str = ""

    @property
    def blocks(self) -> int:
        """Leading blocks that came."""
        return len(self.found) if self.found.all() else int(self.found.argmin())


@dataclass(frozen=True)
class PutResult:
    """A status a block: STORED, PRESENT and WAITING are success. `reason`: why others were not."""

    statuses: tuple[BlockStatus, ...]
    reason: str = ""

    @property
    def all_stored(self) -> bool:
        return all(status in SUCCESS for status in self.statuses)


@dataclass(frozen=True)
class Pinned:
    """Leading blocks that are pinned, and why not all: "", "absent" or "budget"."""

    blocks: int
    reason: str = ""


@dataclass(frozen=True)
class Score:
    """Tokens of the prefix by tier number; predicted seconds to the first token, or 0."""

    tokens_by_tier: dict[int, int]
    predicted_ttft_seconds: float


# ---------------------------------------------------------------------- looking


def describe(namespace: bytes = b"") -> Verb[tuple[list[Declared], Limits]]:
    """One namespace, or all this caller may use."""
    reply = yield Ask("Describe", pb.DescribeRequest(namespace=namespace))
    limits = reply.limits
    return (
        [Declared.of(found) for found in reply.namespaces],
        Limits(limits.keys_per_call_max, limits.streams_max, limits.idle_seconds_max),
    )


def exists(names: Names) -> Verb[Existence]:
    """Any number of names."""
    tiers = []
    for page in _pages(names.joined, KEYS_PER_CALL):
        request = pb.ExistsRequest(namespace=names.namespace, fingerprints=page)
        reply = yield Ask("Exists", request)
        tiers.append(unpack_u8(reply.tiers, "tiers", len(page) // FINGERPRINT_BYTES))
    found = np.concatenate(tiers) if tiers else np.zeros(0, np.uint8)
    held = found != 0
    return Existence(len(held) if held.all() else int(held.argmin()), found)


def list_page(namespace: bytes, cursor: int, blocks_max: int) -> Verb[ListedPage]:
    """See `RemoteNamespace.list`."""
    request = pb.ListRequest(namespace=namespace, cursor=cursor, blocks_max=blocks_max)
    reply = yield Ask("List", request)
    return ListedPage(reply.fingerprints, unpack_u8(reply.tiers, "tiers"), reply.cursor)


def score(names: Names, prompt_tokens: int) -> Verb[Score]:
    request = pb.ScoreRequest(
        namespace=names.namespace, fingerprints=names.joined, prompt_tokens=prompt_tokens
    )
    reply = yield Ask("Score", request)
    return Score(dict(reply.tokens_by_tier), reply.predicted_ttft_seconds)


# ---------------------------------------------------------------------- bulk


@dataclass
class _Incoming:
    """One Get under way: which block comes next, and what came. Blocks count from the root."""

    rows: Rows
    start: int
    found: BoolArray
    at: int
    """The first block that neither came nor is missing."""
    base: int = 0
    """What the stream under way calls block 0."""
    reason: str = ""
    assembly: Assembly = field(init=False)

    def begin(self, base: int) -> None:
        """A stream begins; half a block of the one before is forgotten."""
        self.base = base
        self.assembly = Assembly(self.rows.block_bytes)

    def take(self, received: Received) -> None:
        """Raises InvalidRequest, ChecksumMismatch for what is not the next piece of a block."""
        chunk = received.chunk
        if received.problem or self.base + chunk.block != self.at:
            raise InvalidRequest(
                received.problem
                or f"get: block {self.base + chunk.block} came instead of {self.at}"
            )
        row = self.at - self.start
        if chunk.missing:
            self.reason = self.reason or chunk.reason
            self.at += 1
        elif self.assembly.take(received, self.rows.one(row)):
            self.found[row] = True
            self.at += 1


def get(
    declared: Declared, names: Names, rows: Rows, start: int, deadline_seconds: float
) -> Verb[GetResult]:
    """Blocks [start, start + len(rows)) into `rows`. In a chain nothing follows a miss."""
    until = time.monotonic() + deadline_seconds
    stop = _stop(names, start, rows)
    is_chain = declared.is_chain
    incoming = _Incoming(rows, start, np.zeros(len(rows), np.bool_), start)
    tries = 0
    while incoming.at < stop and (not is_chain or not incoming.reason):
        began = incoming.at
        base = 0 if is_chain else began - began % KEYS_PER_CALL
        end = stop if is_chain else min(base + KEYS_PER_CALL, stop)
        request = pb.GetRequest(
            namespace=names.namespace,
            fingerprints=_cut(names.joined, base, end),
            first_block=began - base,
        )
        incoming.begin(base)
        try:
            yield Stream(request, incoming.take, until - time.monotonic())
            if incoming.at < end and not incoming.reason:
                raise Unavailable(f"get: the stream ended at block {incoming.at} of {end}")
        except (Unavailable, ChecksumMismatch):
            tries = 1 if incoming.at > began else tries + 1
            if tries >= TRIES or time.monotonic() >= until:
                raise
            yield Pause(PAUSE_SECONDS * tries)
    return GetResult(incoming.found, incoming.reason)


def put(
    names: Names,
    rows: Rows,
    start: int,
    declared: Declared | None,
    deadline_seconds: float,
) -> Verb[PutResult]:
    """Blocks [start, start + len(rows)), those that are there already not sent."""
    statuses: list[BlockStatus] = []
    reason = ""
    count = _stop(names, start, rows) - start
    for first in range(0, count, KEYS_PER_CALL):
        blocks = range(first, min(first + KEYS_PER_CALL, count))
        joined = _cut(names.joined, start + blocks.start, start + blocks.stop)
        piece = RawNames(names.namespace, joined, names.parent_of(start + first))
        there = None
        if declared is None or first:
            there = (yield from exists(piece)).tiers
        header = pb.PutHeader(
            namespace=names.namespace, parent=piece.parent_of(0), fingerprints=joined
        )
        if declared is not None:
            header.declare.CopyFrom(declared.message())
        messages = _outgoing(header, rows, blocks, there)
        reply = yield Ask("Put", messages=messages, deadline_seconds=deadline_seconds)
        statuses += map(BlockStatus, unpack_u8(reply.statuses, "statuses", len(blocks)).tolist())
        reason = reason or reply.reason
    return PutResult(tuple(statuses), reason)


def _outgoing(header: pb.PutHeader, rows: Rows, blocks: range, there: Any) -> Iterator[bytes]:
    yield join_data(pb.Chunk(header=header), b"")
    for number, block in enumerate(blocks):
        if there is None or not there[number]:
            yield from chunks_of(number, rows.one(block))


# ---------------------------------------------------------------------- keeping and dropping


def delete(names: Names) -> Verb[int]:
    deleted = 0
    for page in _pages(names.joined, KEYS_PER_CALL):
        request = pb.DeleteRequest(namespace=names.namespace, fingerprints=page)
        deleted += (yield Ask("Delete", request)).deleted_blocks
    return deleted


def clear(namespace: bytes) -> Verb[None]:
    yield Ask("Clear", pb.ClearRequest(namespace=namespace))


def pin(names: Names, seconds: float, hard: bool) -> Verb[Pinned]:
    pinned = 0
    for page in _pages(names.joined, PINS_PER_CALL):
        reply = yield Ask(
            "Pin",
            pb.PinRequest(namespace=names.namespace, fingerprints=page, seconds=seconds, hard=hard),
        )
        pinned += reply.pinned
        if reply.short_reason:
            return Pinned(pinned, reply.short_reason)
    return Pinned(pinned)


def unpin(names: Names) -> Verb[int]:
    unpinned = 0
    for page in _pages(names.joined, PINS_PER_CALL):
        request = pb.UnpinRequest(namespace=names.namespace, fingerprints=page)
        unpinned += (yield Ask("Unpin", request)).unpinned
    return unpinned


# ---------------------------------------------------------------------- names


def _stop(names: Names, start: int, rows: Rows) -> int:
    """Where blocks [start, start + len(rows)) end. Raises InvalidRequest unless they are named."""
    stop = start + len(rows)
    if start < 0 or stop > len(names):
        raise InvalidRequest(f"blocks [{start}, {stop}) do not exist, {len(names)} are named")
    return stop


def _cut(joined: bytes, first: int, stop: int) -> bytes:
    return joined[first * FINGERPRINT_BYTES : stop * FINGERPRINT_BYTES]


def _pages(joined: bytes, blocks: int) -> Iterator[bytes]:
    step = blocks * FINGERPRINT_BYTES
    return (joined[at : at + step] for at in range(0, len(joined), step))
