"""The client for asyncio programs: the same verbs, awaitable.

Primitives: `AsyncKVClient`, `AsyncNamespaceHandle`, `AsyncReadLease`, `AsyncWriteReservation`; each
takes the arguments of the blocking one, which it wraps and offers.

Every verb runs the blocking one on this client's own few threads, so that any event loop may use
it, also several. A cancelled `load` or `store` waits for its copy to end before it raises: the
caller's memory is then free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from kvstore.client import (
    ClientStatistics,
    KVClient,
    Names,
    NamespaceHandle,
    ReadLease,
    Ready,
    SharedReservation,
    StoreTicket,
    WriteReservation,
)
from kvstore.fingerprint import Chain, Content, Tokens
from kvstore.layout import BlockLayout
from kvstore.types import BlockStatus, NamespaceId

P = ParamSpec("P")
T = TypeVar("T")
B = TypeVar("B")
W = TypeVar("W")
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
            future.add_done_callback(_give_back)
            await asyncio.wait([future])
            raise

    def close(self) -> None:
        self._is_closed = True
        self._pool.shutdown(wait=False)


def _give_back(verb: asyncio.Future[Any]) -> None:
    """What a cancelled verb came by is nobody's."""
    found = None if verb.cancelled() or verb.exception() else verb.result()
    if isinstance(found, WriteReservation):
        found.abort()
    elif isinstance(found, ReadLease):
        found.release()


class _Wrapper(Generic[B]):
    """Around something blocking; verbs run on `threads`."""

    def __init__(self, blocking: B, threads: _Threads) -> None:
        self._blocking = blocking
        self._threads = threads


def _awaitable(
    verb: Callable[Concatenate[B, P], T],
) -> Callable[Concatenate[_Wrapper[B], P], Coroutine[Any, Any, T]]:
    """The verb with the same arguments and result."""

    @wraps(verb)
    async def run(self: _Wrapper[B], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._threads.run(verb, self._blocking, *args, **kwargs)

    return run


def _wrapping(
    verb: Callable[Concatenate[B, P], T], wrap: Callable[[T, _Threads], W]
) -> Callable[Concatenate[_Wrapper[B], P], Coroutine[Any, Any, W]]:
    """The same for a verb whose result has verbs of its own."""

    @wraps(verb)
    async def run(self: _Wrapper[B], /, *args: P.args, **kwargs: P.kwargs) -> W:
        found = await self._threads.run(verb, self._blocking, *args, **kwargs)
        return wrap(found, self._threads)

    return run


class AsyncReadLease(_Wrapper[ReadLease]):
    """As `ReadLease`, which is `lease`: its views, `valid` and `release` never block."""

    @property
    def lease(self) -> ReadLease:
        return self._blocking

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

    renew = _awaitable(ReadLease.renew)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.lease.release()


class AsyncWriteReservation(_Wrapper[WriteReservation]):
    """As `WriteReservation`, which is `reservation`: its views never block."""

    @property
    def reservation(self) -> WriteReservation:
        return self._blocking

    commit = _awaitable(WriteReservation.commit)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.reservation.__exit__()


class AsyncNamespaceHandle(_Wrapper[NamespaceHandle]):
    """As `NamespaceHandle`, which is `handle`. Await a store's outcome with `stored`."""

    @property
    def handle(self) -> NamespaceHandle:
        return self._blocking

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

    match = _awaitable(NamespaceHandle.match)
    match_each = _awaitable(NamespaceHandle.match_each)
    lease = _wrapping(NamespaceHandle.lease, AsyncReadLease)
    load = _awaitable(NamespaceHandle.load)
    store = _awaitable(NamespaceHandle.store)
    reserve = _wrapping(NamespaceHandle.reserve, AsyncWriteReservation)
    exists = _awaitable(NamespaceHandle.exists)
    prefetch = _awaitable(NamespaceHandle.prefetch)
    flush = _awaitable(NamespaceHandle.flush)
    delete = _awaitable(NamespaceHandle.delete)
    clear = _awaitable(NamespaceHandle.clear)

    async def stored(self, ticket: StoreTicket) -> tuple[BlockStatus, ...]:
        """Outcome of a store, a status a block; takes no thread while it waits."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(done.set)

        ticket.when_done(tell)
        await done.wait()
        return ticket.result(0)

    def join(self, shared: SharedReservation) -> AsyncWriteReservation:
        """See `NamespaceHandle.join`."""
        return AsyncWriteReservation(self.handle.join(shared), self._threads)


class AsyncKVClient(_Wrapper[KVClient]):
    """As `KVClient`, which is `client` and may be used beside this one."""

    def __init__(
        self,
        socket: str | None = None,
        *,
        engine: str = "",
        deadline_seconds: float = 2.0,
        attach: bool = True,
        threads: int = THREADS,
    ) -> None:
        client = KVClient(socket, engine=engine, deadline_seconds=deadline_seconds, attach=attach)
        super().__init__(client, _Threads(threads))

    @property
    def client(self) -> KVClient:
        return self._blocking

    @property
    def connected(self) -> bool:
        """Whether a daemon is attached now."""
        return self.client.connected

    wait_connected = _awaitable(KVClient.wait_connected)
    namespace = _wrapping(KVClient.namespace, AsyncNamespaceHandle)
    match_groups = _wrapping(KVClient.match_groups, AsyncReadLease)
    stat = _awaitable(KVClient.stat)

    def statistics(self) -> ClientStatistics:
        """A snapshot of the counters."""
        return self.client.statistics()

    async def close(self) -> None:
        """See `KVClient.close`."""
        await self._threads.run(self.client.close)
        self._threads.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
