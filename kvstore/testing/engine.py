"""An engine process as the store sees it: real messages, real reading of arena and directory.

Primitives of `Engine`: `reserve`, `fill`, `commit`, `store`, `match`, `load`, `read_directory`,
`flush`, and `leave`, `die` for its end. What it writes into a block is the block's *colour*,
bytes that only this name and this place give; what it reads it compares.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from kvstore.directory import DirectoryReader
from kvstore.fingerprint import Chain
from kvstore.layout import BlockLayout
from kvstore.namespaces import Namespace
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc import status, wire
from kvstore.rpc.server import ControlServicer
from kvstore.testing.leased import LeasedBlocks
from kvstore.testing.stepped import MemoryArena
from kvstore.types import BlockStatus, ByteArray

_ODD = np.uint64(0x9E3779B97F4A7C15)
_numbers = count(1)


def colour(name: bytes, length: int) -> ByteArray:
    """uint8[length] that no other block has, at any place."""
    words = np.arange(-(-length // 8), dtype=np.uint64) * _ODD
    words += np.uint64(int.from_bytes(name[:8], "little"))
    return words.view(np.uint8)[:length]


def is_own_colour(found: ByteArray, name: bytes, layout: BlockLayout) -> bool:
    """Whether every part holds the block's bytes; padding between ranks may hold anything."""
    wanted = colour(name, layout.block_bytes)
    return all(
        np.array_equal(
            found[part.offset : part.offset + part.length],
            wanted[part.offset : part.offset + part.length],
        )
        for part in layout.parts
    )


class WrongBytes(AssertionError):
    """The store served bytes that are not the block's: the one thing it must never do."""


class Refused(Exception):
    """How a call ends in a typed error; looks like a grpc.RpcError."""

    def __init__(self, code: Any, details: str, metadata: Any) -> None:
        super().__init__(details)
        self._told = (code, details, metadata)

    def code(self) -> Any:
        return self._told[0]

    def details(self) -> str:
        return str(self._told[1])

    def trailing_metadata(self) -> Any:
        return self._told[2]


class _Context:
    """As much of a server context as the servicer uses."""

    async def abort(self, code: Any, details: str, metadata: Any = ()) -> None:
        raise Refused(code, details, metadata)


@dataclass
class Held:
    """A reservation in the engine's hands: where each granted block lies."""

    reservation: int
    names: list[bytes]
    statuses: list[BlockStatus]
    offsets: list[int]

    @property
    def granted(self) -> list[int]:
        """Positions of the blocks that are ours to fill."""
        return [at for at, found in enumerate(self.statuses) if found == BlockStatus.GRANTED]


@dataclass
class Lease:
    """What `match` gave."""

    lease: int
    boundary_tokens: int
    groups: list[LeasedBlocks]


class Engine:
    """One client process. Raises the typed errors a client raises."""

    def __init__(
        self, servicer: ControlServicer, arena: MemoryArena, name: str, *, maps_arena: bool = True
    ) -> None:
        self._servicer = servicer
        self._arena = arena
        number = next(_numbers)
        self.lock_file = f"{number}-test.lock" if maps_arena else ""
        if maps_arena:
            arena.living.add(self.lock_file)
        service = servicer.service
        self.session = service.sessions.open(
            pb.Hello(engine=name, pid=number, lock_file=self.lock_file)
        )
        service.attached(self.session)
        self.is_attached = True
        self.directory = DirectoryReader(arena.header_memory)
        self.boot_id = self.directory.boot_id
        self.client = int(self.session.client)

    async def call(self, verb: str, request: Any) -> Any:
        """One unary call."""
        try:
            return await getattr(self._servicer, verb)(request, _Context())
        except Refused as error:
            raise status.from_rpc_error(error) from error

    # ------------------------------------------------------------------ writing

    async def reserve(
        self, namespace: Namespace, chain: Chain, start: int = 0, stop: int | None = None
    ) -> Held:
        """Slots by name for blocks [start, stop) of a chain."""
        names = [bytes(chain[at]) for at in range(start, len(chain) if stop is None else stop)]
        return await self.reserve_names(namespace, chain.parent_of(start), names)

    async def reserve_names(
        self, namespace: Namespace, parent: bytes, names: Sequence[bytes]
    ) -> Held:
        reply = await self.call(
            "Reserve",
            pb.ReserveRequest(
                client=self.client,
                namespace=namespace.id,
                parent=parent,
                fingerprints=b"".join(names),
            ),
        )
        return Held(
            reply.reservation,
            list(names),
            [BlockStatus(value) for value in reply.statuses],
            wire.unpack_u64(reply.offsets, "offsets", len(names)).tolist(),
        )

    async def reserve_anonymous(self, namespace: Namespace, blocks: int) -> Held:
        """Slots without names; give them names in `held.names` before `fill`."""
        reply = await self.call(
            "Reserve",
            pb.ReserveRequest(client=self.client, namespace=namespace.id, count=blocks),
        )
        offsets = wire.unpack_u64(reply.offsets, "offsets").tolist() if reply.reservation else []
        return Held(reply.reservation, [], [BlockStatus.GRANTED] * len(offsets), offsets)

    def fill(
        self, namespace: Namespace, held: Held, positions: Sequence[int] | None = None
    ) -> None:
        """Copy the colours of granted blocks into their slots."""
        length = namespace.layout.block_bytes
        for at in held.granted if positions is None else positions:
            self._arena.view(held.offsets[at], length)[:] = colour(held.names[at], length)

    async def commit(
        self,
        held: Held,
        positions: Sequence[int] | None = None,
        *,
        rank: int | None = None,
        parent: bytes = b"",
        end: bool = False,
    ) -> list[BlockStatus]:
        """Publish the blocks at `positions` (all granted ones); `rank` None: whole blocks."""
        chosen = held.granted if positions is None else list(positions)
        reply = await self.call(
            "Commit",
            pb.CommitRequest(
                client=self.client,
                reservation=held.reservation,
                rank=rank or 0,
                all_ranks=rank is None,
                parent=parent,
                fingerprints=b"".join(held.names[at] for at in chosen),
                offsets=np.array([held.offsets[at] for at in chosen], np.uint64).tobytes(),
                end=end,
            ),
        )
        return [BlockStatus(value) for value in reply.statuses]

    async def abort(self, held: Held) -> int:
        """Give the slots back; how many were freed."""
        reply = await self.call(
            "Abort", pb.AbortRequest(client=self.client, reservation=held.reservation)
        )
        return int(reply.freed)

    async def store(
        self,
        namespace: Namespace,
        chain: Chain,
        start: int = 0,
        stop: int | None = None,
        *,
        anonymous: bool = False,
    ) -> list[BlockStatus]:
        """Reserve, fill, commit; a status a block of [start, stop)."""
        stop = len(chain) if stop is None else stop
        if not anonymous:
            held = await self.reserve(namespace, chain, start, stop)
            self.fill(namespace, held)
            results = list(held.statuses)
            if held.granted:
                committed = await self.commit(held)
                for at, result in zip(held.granted, committed, strict=True):
                    results[at] = result
            return results
        held = await self.reserve_anonymous(namespace, stop - start)
        if not held.reservation:
            return [BlockStatus.NO_ROOM] * (stop - start)
        held.names = [bytes(chain[start + at]) for at in range(len(held.offsets))]
        self.fill(namespace, held)
        statuses = await self.commit(held, parent=chain.parent_of(start), end=True)
        return statuses + [BlockStatus.NO_ROOM] * (stop - start - len(statuses))

    # ------------------------------------------------------------------ reading

    async def match(
        self,
        groups: Sequence[tuple[Namespace, Chain]],
        prompt_tokens: int = 0,
        *,
        want_lease: bool = True,
    ) -> Lease:
        """Largest common prefix of the groups' chains."""
        request = pb.MatchRequest(
            client=self.client,
            groups=[
                pb.Group(namespace=space.id, fingerprints=chain.joined) for space, chain in groups
            ],
            prompt_tokens=prompt_tokens,
            want_lease=want_lease,
        )
        reply = await self.call("Match", request)
        found = [
            LeasedBlocks.of(space, chain.joined, match)
            for (space, chain), match in zip(groups, reply.groups, strict=True)
        ]
        return Lease(reply.lease, reply.boundary_tokens, found)

    async def bring_up(
        self,
        lease: Lease,
        *,
        layer_order: bool = False,
        staging: bool = False,
        deadline_seconds: float = 2.0,
    ) -> str:
        """The Load stream to its end; the groups say what came, the answer why not more."""
        request = pb.LoadRequest(
            client=self.client,
            lease=lease.lease,
            order=pb.LAYER_ORDER if layer_order else pb.BLOCK_ORDER,
            deadline_ms=max(1, int(deadline_seconds * 1000)),
            staging=staging,
        )
        filled = [group for group in lease.groups if group.names]
        reason = ""
        try:
            async for reply in self._servicer.Load(request, _Context()):
                reason = reason or reply.short_reason
                for group, grant in zip(filled, reply.grants, strict=False):
                    group.grant(grant)
                for order, parts, block in np.frombuffer(reply.ready, wire.READY).tolist():
                    filled[order].announce(block, parts)
        except Refused as error:
            raise status.from_rpc_error(error) from error
        return reason

    async def load(
        self,
        groups: Sequence[tuple[Namespace, Chain]],
        *,
        layer_order: bool = False,
        pause_seconds: float = 0.0,
        deadline_seconds: float = 2.0,
        keep_lease: bool = False,
    ) -> list[int]:
        """Match, load, copy (after `pause_seconds`), compare: leading blocks that came, a group.

        0 for all of them when something moved meanwhile. Raises WrongBytes when what counts as
        valid is not what was stored.
        """
        lease = await self.match(groups)
        if not lease.lease:
            return [0] * len(groups)
        try:
            await self.bring_up(lease, layer_order=layer_order, deadline_seconds=deadline_seconds)
            if pause_seconds:
                await asyncio.sleep(pause_seconds)
            copies = [self._copy(group) for group in lease.groups]
            if not all(group.holds(self.directory) for group in lease.groups):
                return [0] * len(groups)
            for group, copy in zip(lease.groups, copies, strict=True):
                self._compare(group, copy)
            return [group.whole for group in lease.groups]
        finally:
            if not keep_lease:
                await self.release(lease)

    async def release(self, lease: Lease) -> int:
        """End a lease; 0 when there was nothing to end."""
        reply = await self.call(
            "Release", pb.ReleaseRequest(client=self.client, leases=[lease.lease])
        )
        return int(reply.released)

    def _copy(self, group: LeasedBlocks) -> list[ByteArray]:
        offsets = group.offsets[: group.whole]
        return [self._arena.view(at, group.layout.block_bytes).copy() for at in offsets]

    def _compare(self, group: LeasedBlocks, copies: list[ByteArray]) -> None:
        for at, (name, found) in enumerate(zip(group.names, copies, strict=False)):
            if not is_own_colour(found, name, group.layout):
                raise WrongBytes(f"block {group.first + at} of a leased load, {name.hex()[:16]}")

    async def read_directory(
        self, namespace: Namespace, chain: Chain, pause_seconds: float = 0.0
    ) -> int:
        """Look up, copy after a pause, compare: blocks that are valid, -1 when some changed."""
        found = self.directory.lookup(namespace.index, chain.joined)
        if pause_seconds:
            await asyncio.sleep(pause_seconds)
        copies = [
            self._arena.view(int(at), namespace.layout.block_bytes).copy() for at in found.offsets
        ]
        if not self.directory.still_valid(self.boot_id, found.slots, found.generations):
            return -1
        for at, copy in enumerate(copies):
            if not is_own_colour(copy, bytes(chain[at]), namespace.layout):
                raise WrongBytes(f"block {at} through the directory, {chain[at].hex()[:16]}")
        return found.count

    async def exists(self, namespace: Namespace, chain: Chain) -> tuple[int, ByteArray]:
        """(readable prefix in blocks, bit mask of tiers a block)."""
        reply = await self.call(
            "Exists", pb.ExistsRequest(namespace=namespace.id, fingerprints=chain.joined)
        )
        return reply.prefix_blocks, np.frombuffer(reply.tiers, np.uint8)

    async def flush(
        self, namespace: Namespace, chain: Chain, deadline_seconds: float = 5.0
    ) -> list[bool]:
        """Which blocks are durable by the deadline."""
        reply = await self.call(
            "Flush",
            pb.FlushRequest(
                namespace=namespace.id,
                fingerprints=chain.joined,
                deadline_ms=int(deadline_seconds * 1000),
            ),
        )
        return [bool(value) for value in reply.durable]

    # ------------------------------------------------------------------ its end

    def leave(self) -> None:
        """The stream ends; the process lives on and may still copy."""
        if self.is_attached:
            self.is_attached = False
            self._servicer.service.detached(self.session)

    def die(self) -> None:
        """The process ends: its lock is free."""
        self._arena.living.discard(self.lock_file)
        self.leave()
