"""The client for asyncio programs: the same verbs, awaitable.

Primitives: `AsyncKVClient`, `AsyncNamespaceHandle`, `AsyncReadLease`, `AsyncWriteReservation`.

A thin wrapper: every verb runs the blocking one on this client's own few threads, so that any event
loop may use it, also several. A cancelled `load` or `store` waits for its copy to end before it
raises: the caller's memory is then free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from kvstore.client import (
    ClientStatistics,
    Existence,
    KVClient,
    LoadResult,
    Names,
    NamespaceHandle,
    ReadLease,
    Ready,
    SharedReservation,
    StoreTicket,
    WriteReservation,
)
from kvstore.client.copying import BlockArrays
from kvstore.fingerprint import Chain, Content, KVIdentity, Tokens
from kvstore.hints import Hint
from kvstore.layout import BlockLayout
from kvstore.planner import Ability
from kvstore.types import BlockStatus, BoolArray, NamespaceId, NamespaceKind

P = ParamSpec("P")
T = TypeVar("T")
THREADS = 4
"""Verbs under way at once; more wait for their turn."""


class _Threads:
    """Runs blocking verbs off the loop."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "kvstore-async")
        self._is_closed = False

    async def run(self, verb: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The verb's result; cancelled, it first lets the verb end."""
        if self._is_closed:
            return verb(*args, **kwargs)  # every verb of a closed client answers at once
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._pool, partial(verb, *args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    def close(self) -> None:
        self._is_closed = True
        self._pool.shutdown(wait=False)


class AsyncKVClient:
    """As `KVClient`.

    `client` is the blocking client underneath, and may be used beside this one.
    """

    def __init__(
        self,
        socket: str | None = None,
        *,
        engine: str = "",
        deadline_seconds: float = 2.0,
        attach: bool = True,
        threads: int = THREADS,
    ) -> None:
        self.client = KVClient(
            socket, engine=engine, deadline_seconds=deadline_seconds, attach=attach
        )
        self._threads = _Threads(threads)

    @property
    def connected(self) -> bool:
        """Whether a daemon is attached now."""
        return self.client.connected

    async def wait_connected(self, seconds: float | None = None) -> bool:
        """Whether a daemon is attached, waiting up to `seconds` for one."""
        return await self._threads.run(self.client.wait_connected, seconds)

    async def namespace(
        self,
        identity: KVIdentity | NamespaceId,
        layout: BlockLayout,
        *,
        kind: NamespaceKind = NamespaceKind.CHAINED,
        window_tokens: int = 0,
        label: str = "",
    ) -> AsyncNamespaceHandle:
        """See `KVClient.namespace`."""
        declare = partial(
            self.client.namespace,
            identity,
            layout,
            kind=kind,
            window_tokens=window_tokens,
            label=label,
        )
        return AsyncNamespaceHandle(await self._threads.run(declare), self._threads)

    async def match_groups(
        self,
        groups: Sequence[Names],
        prompt_tokens: int = 0,
        *,
        deadline_seconds: float | None = None,
    ) -> AsyncReadLease:
        """See `KVClient.match_groups`."""
        match = partial(
            self.client.match_groups, groups, prompt_tokens, deadline_seconds=deadline_seconds
        )
        return AsyncReadLease(await self._threads.run(match), self._threads)

    def statistics(self) -> ClientStatistics:
        """A snapshot of the counters."""
        return self.client.statistics()

    async def stat(self) -> dict[str, Any]:
        """The daemon's statistics tree. Raises KVStoreError."""
        return await self._threads.run(self.client.stat)

    async def close(self) -> None:
        """See `KVClient.close`."""
        await self._threads.run(self.client.close)
        self._threads.close()

    async def __aenter__(self) -> AsyncKVClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncNamespaceHandle:
    """As `NamespaceHandle`, which is `handle`."""

    def __init__(self, handle: NamespaceHandle, threads: _Threads) -> None:
        self.handle = handle
        self._threads = threads

    @property
    def id(self) -> NamespaceId:
        return self.handle.id

    @property
    def layout(self) -> BlockLayout:
        return self.handle.layout

    def chain(self, tokens: Tokens, contents: Iterable[Content] = ()) -> Chain:
        """Names of the full blocks of `tokens`; computed here and now."""
        return self.handle.chain(tokens, contents)

    def keys(self, keys: Iterable[bytes]) -> Names:
        """Names of opaque keys, in a flat namespace."""
        return self.handle.keys(keys)

    async def match(self, names: Names) -> int:
        """See `NamespaceHandle.match`."""
        return await self._threads.run(self.handle.match, names)

    async def match_each(self, names: Names) -> BoolArray:
        """See `NamespaceHandle.match_each`."""
        return await self._threads.run(self.handle.match_each, names)

    async def lease(
        self,
        names: Names,
        *,
        deadline_seconds: float | None = None,
        ability: Ability | None = None,
        hints: Sequence[Hint] = (),
    ) -> AsyncReadLease:
        """See `NamespaceHandle.lease`."""
        lease = await self._threads.run(
            self.handle.lease,
            names,
            deadline_seconds=deadline_seconds,
            ability=ability,
            hints=hints,
        )
        return AsyncReadLease(lease, self._threads)

    async def load(
        self,
        names: Names,
        into: BlockArrays,
        *,
        start: int = 0,
        rank: int | None = None,
        deadline_seconds: float | None = None,
        copy_threads: int = 1,
        staging: bool = False,
    ) -> LoadResult:
        """See `NamespaceHandle.load`."""
        return await self._threads.run(
            self.handle.load,
            names,
            into,
            start=start,
            rank=rank,
            deadline_seconds=deadline_seconds,
            copy_threads=copy_threads,
            staging=staging,
        )

    async def store(
        self,
        names: Names,
        blocks: BlockArrays,
        *,
        start: int = 0,
        hints: Sequence[Hint] = (),
    ) -> StoreTicket:
        """See `NamespaceHandle.store`; await the outcome with `stored`."""
        return await self._threads.run(self.handle.store, names, blocks, start=start, hints=hints)

    async def stored(self, ticket: StoreTicket) -> tuple[BlockStatus, ...]:
        """Outcome of a store, a status a block; takes no thread while it waits."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(done.set)

        ticket.when_done(tell)
        await done.wait()
        return ticket.result(0)

    async def reserve(
        self, names: Names, *, start: int = 0, count: int | None = None
    ) -> AsyncWriteReservation:
        """See `NamespaceHandle.reserve`."""
        reserve = partial(self.handle.reserve, names, start=start, count=count)
        return AsyncWriteReservation(await self._threads.run(reserve), self._threads)

    def join(self, shared: SharedReservation) -> AsyncWriteReservation:
        """See `NamespaceHandle.join`."""
        return AsyncWriteReservation(self.handle.join(shared), self._threads)

    async def exists(self, names: Names) -> Existence:
        """See `NamespaceHandle.exists`."""
        return await self._threads.run(self.handle.exists, names)

    async def prefetch(self, names: Names) -> int:
        """See `NamespaceHandle.prefetch`."""
        return await self._threads.run(self.handle.prefetch, names)

    async def flush(self, names: Names, *, deadline_seconds: float = 10.0) -> BoolArray:
        """See `NamespaceHandle.flush`."""
        return await self._threads.run(self.handle.flush, names, deadline_seconds=deadline_seconds)

    async def delete(self, names: Names, block: int) -> int:
        """See `NamespaceHandle.delete`."""
        return await self._threads.run(self.handle.delete, names, block)

    async def clear(self) -> None:
        """See `NamespaceHandle.clear`."""
        await self._threads.run(self.handle.clear)


class AsyncReadLease:
    """As `ReadLease`, which is `lease`: its views, `valid` and `release` never block."""

    def __init__(self, lease: ReadLease, threads: _Threads) -> None:
        self.lease = lease
        self._threads = threads

    @property
    def blocks(self) -> int:
        """Blocks of the first group below the boundary."""
        return self.lease.blocks

    @property
    def reason(self) -> str:
        """Why it is shorter than asked."""
        return self.lease.reason

    async def load(
        self, *, layer_order: bool = False, deadline_seconds: float | None = None
    ) -> AsyncIterator[Ready]:
        """See `ReadLease.load`."""
        news = self.lease.load(layer_order=layer_order, deadline_seconds=deadline_seconds)
        try:
            while (ready := await self._threads.run(next, news, None)) is not None:
                yield ready
        finally:
            await self._threads.run(news.close)

    async def renew(self) -> float:
        """See `ReadLease.renew`."""
        return await self._threads.run(self.lease.renew)

    async def __aenter__(self) -> AsyncReadLease:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.lease.release()


class AsyncWriteReservation:
    """As `WriteReservation`, which is `reservation`: its views never block."""

    def __init__(self, reservation: WriteReservation, threads: _Threads) -> None:
        self.reservation = reservation
        self._threads = threads

    async def commit(self, rank: int | None = None) -> tuple[BlockStatus, ...]:
        """See `WriteReservation.commit`."""
        return await self._threads.run(self.reservation.commit, rank)

    async def __aenter__(self) -> AsyncWriteReservation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.reservation.__exit__()
