"""The asyncio client of a gateway: the blocking one's verbs, awaitable.

Primitives: `AsyncRemoteClient`, `AsyncRemoteNamespace`. Belongs to the loop it was made on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio

from kvstore.client import Existence, ListedPage, Names
from kvstore.client.copying import BlockArrays, Rows
from kvstore.errors import InvalidRequest, KVStoreError, PeerGone
from kvstore.remote_client import verbs
from kvstore.remote_client.target import Target, Tls
from kvstore.remote_client.verbs import Ask, Declared, GetResult, Limits, Pause, Stream, Verb
from kvstore.rpc import blocks_pb2 as pb
from kvstore.rpc import blocks_pb2_grpc
from kvstore.rpc.chunks import split_data
from kvstore.rpc.status import from_rpc_error
from kvstore.types import NamespaceId

T = TypeVar("T")
_PREFIX = "/kvstore.blocks.v1.Blocks/"


class AsyncRemoteClient:
    """See `RemoteClient`. Make it inside the running loop."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        deadline_seconds: float = 30.0,
    ) -> None:
        self._target = target = Target(address, token, tls)
        self.deadline_seconds = deadline_seconds
        self._loop = asyncio.get_running_loop()
        self._metadata = target.metadata
        self._channel = target.open(grpc.aio)
        self._stub: Any = blocks_pb2_grpc.BlocksStub(self._channel)  # type: ignore[no-untyped-call]
        self._get = self._channel.unary_stream(
            _PREFIX + "Get", pb.GetRequest.SerializeToString, split_data
        )
        self._put = self._channel.stream_unary(_PREFIX + "Put", None, pb.PutReply.FromString)

    async def describe(self) -> tuple[list[Declared], Limits]:
        """See `RemoteClient.describe`."""
        return await self.run(verbs.describe())

    async def namespace(self, namespace: NamespaceId | Declared) -> AsyncRemoteNamespace:
        """See `RemoteClient.namespace`."""
        if isinstance(namespace, Declared):
            return AsyncRemoteNamespace(self, namespace, declares=True)
        found, _ = await self.run(verbs.describe(namespace))
        return AsyncRemoteNamespace(self, found[0], declares=False)

    async def run(self, verb: Verb[T]) -> T:
        """Drive a verb to its end. Raises what it raises; InvalidRequest on another loop."""
        self._target.check_process()
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidRequest("this client belongs to another event loop; make one on this loop")
        try:
            step = next(verb)
            while True:
                try:
                    answer = await self._do(step)
                except KVStoreError as error:
                    step = verb.throw(error)
                else:
                    step = verb.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result

    async def _do(self, step: Ask | Stream | Pause) -> Any:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        limit = step.deadline_seconds
        more: dict[str, Any] = {
            "timeout": max(self.deadline_seconds if limit is None else limit, 0.001),
            "metadata": self._metadata,
        }
        try:
            if isinstance(step, Stream):
                call = self._get(step.request, **more)
                try:
                    async for received in call:
                        step.take(received)
                finally:
                    call.cancel()
                return None
            if step.messages is not None:
                return await self._put(step.messages, **more)
            return await getattr(self._stub, step.method)(step.request, **more)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except grpc.aio.UsageError as error:  # grpc's word for a closed channel
            raise PeerGone("the client was closed") from error

    async def close(self) -> None:
        """Calls under way end as failed. Idempotent."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncRemoteClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncRemoteNamespace:
    """See `RemoteNamespace`, verb by verb."""

    def __init__(self, client: AsyncRemoteClient, declared: Declared, *, declares: bool) -> None:
        self.declared = declared
        self.id = declared.id
        self.layout = declared.layout
        self._client = client
        self._declares = declares

    async def exists(self, names: Names) -> Existence:
        return await self._client.run(verbs.exists(names))

    async def list(self, cursor: int = 0, blocks_max: int = 0) -> ListedPage:
        return await self._client.run(verbs.list_page(self.id, cursor, blocks_max))

    async def list_all(self) -> AsyncIterator[ListedPage]:
        page = await self.list()
        yield page
        while page.cursor:
            page = await self.list(page.cursor)
            yield page

    async def get(
        self,
        names: Names,
        into: BlockArrays,
        *,
        start: int = 0,
        deadline_seconds: float | None = None,
    ) -> GetResult:
        rows = Rows(into, self.layout.block_bytes, writable=True)
        limit = self._limit(deadline_seconds)
        return await self._client.run(verbs.get(self.declared, names, rows, start, limit))

    async def put(
        self,
        names: Names,
        blocks: BlockArrays,
        *,
        start: int = 0,
        deadline_seconds: float | None = None,
    ) -> verbs.PutResult:
        rows = Rows(blocks, self.layout.block_bytes, writable=False)
        declared = self.declared if self._declares else None
        limit = self._limit(deadline_seconds)
        return await self._client.run(verbs.put(names, rows, start, declared, limit))

    async def delete(self, names: Names) -> int:
        return await self._client.run(verbs.delete(names))

    async def clear(self) -> None:
        await self._client.run(verbs.clear(self.id))

    async def pin(self, names: Names, seconds: float, *, hard: bool = False) -> verbs.Pinned:
        return await self._client.run(verbs.pin(names, seconds, hard))

    async def unpin(self, names: Names) -> int:
        return await self._client.run(verbs.unpin(names))

    async def score(self, names: Names, prompt_tokens: int = 0) -> verbs.Score:
        return await self._client.run(verbs.score(names, prompt_tokens))

    def _limit(self, deadline_seconds: float | None) -> float:
        return self._client.deadline_seconds if deadline_seconds is None else deadline_seconds
