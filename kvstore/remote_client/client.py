"""The blocking client of a gateway. Thread-safe.

Primitives: `RemoteClient`, `RemoteNamespace`. What the verbs mean is in `verbs`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, TypeVar

import grpc

from kvstore.client import Existence, ListedPage, Names
from kvstore.client.copying import BlockArrays, Rows
from kvstore.errors import KVStoreError, PeerGone
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


class RemoteClient:
    """One gateway. `address`: host:port or unix:PATH; opening connects to nothing yet.

    `deadline_seconds` bounds every verb unless it is given its own.
    """

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
        self._metadata = target.metadata
        self._channel = target.open(grpc)
        self._stub: Any = blocks_pb2_grpc.BlocksStub(self._channel)  # type: ignore[no-untyped-call]
        self._get = self._channel.unary_stream(
            _PREFIX + "Get", pb.GetRequest.SerializeToString, split_data
        )
        self._put = self._channel.stream_unary(_PREFIX + "Put", None, pb.PutReply.FromString)

    def describe(self) -> tuple[list[Declared], Limits]:
        """Every namespace this caller may use, and the gateway's limits. Raises KVStoreError."""
        return self.run(verbs.describe())

    def namespace(self, namespace: NamespaceId | Declared) -> RemoteNamespace:
        """A namespace by its id, which must be known there; or as declared: made known by a put.

        Raises NamespaceUnknown, AccessDenied, Unavailable.
        """
        if isinstance(namespace, Declared):
            return RemoteNamespace(self, namespace, declares=True)
        found, _ = self.run(verbs.describe(namespace))
        return RemoteNamespace(self, found[0], declares=False)

    def run(self, verb: Verb[T]) -> T:
        """Drive a verb to its end. Raises what it raises; ClientForked in a forked child."""
        self._target.check_process()
        try:
            step = next(verb)
            while True:
                try:
                    answer = self._do(step)
                except KVStoreError as error:
                    step = verb.throw(error)
                else:
                    step = verb.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result

    def _do(self, step: Ask | Stream | Pause) -> Any:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
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
                    for received in call:
                        step.take(received)
                finally:
                    call.cancel()
                return None
            if step.messages is not None:
                return self._put(step.messages, **more)
            return getattr(self._stub, step.method)(step.request, **more)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except ValueError as error:  # grpc's word for a closed channel
            raise PeerGone("the client was closed") from error

    def close(self) -> None:
        """Calls under way end as failed. Idempotent."""
        self._channel.close()

    def __enter__(self) -> RemoteClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RemoteNamespace:
    """Made by `RemoteClient.namespace`. Every verb raises KVStoreError for what fails."""

    def __init__(self, client: RemoteClient, declared: Declared, *, declares: bool) -> None:
        self.declared = declared
        self.id = declared.id
        self.layout = declared.layout
        self._client = client
        self._declares = declares

    def exists(self, names: Names) -> Existence:
        """Residency by tier, of any number of blocks."""
        return self._client.run(verbs.exists(names))

    def list(self, cursor: int = 0, blocks_max: int = 0) -> ListedPage:
        """A page of what is stored, from a page's `cursor` on; cursor 0 ends it."""
        return self._client.run(verbs.list_page(self.id, cursor, blocks_max))

    def list_all(self) -> Iterator[ListedPage]:
        """All pages."""
        page = self.list()
        yield page
        while page.cursor:
            page = self.list(page.cursor)
            yield page

    def get(
        self,
        names: Names,
        into: BlockArrays,
        *,
        start: int = 0,
        deadline_seconds: float | None = None,
    ) -> GetResult:
        """Blocks [start, start + len(into)) into uint8 [n, block_bytes], or n arrays.

        In a chained namespace `names` come from the root. A broken stream is taken up where it
        broke.
        """
        rows = Rows(into, self.layout.block_bytes, writable=True)
        limit = self._limit(deadline_seconds)
        return self._client.run(verbs.get(self.declared, names, rows, start, limit))

    def put(
        self,
        names: Names,
        blocks: BlockArrays,
        *,
        start: int = 0,
        deadline_seconds: float | None = None,
    ) -> verbs.PutResult:
        """Store uint8 [n, block_bytes], or n arrays, as blocks [start, start + n)."""
        rows = Rows(blocks, self.layout.block_bytes, writable=False)
        declared = self.declared if self._declares else None
        limit = self._limit(deadline_seconds)
        return self._client.run(verbs.put(names, rows, start, declared, limit))

    def delete(self, names: Names) -> int:
        """Drop these blocks and, in a chained namespace, all that follow; blocks dropped."""
        return self._client.run(verbs.delete(names))

    def clear(self) -> None:
        """No block put before this call is found again, by anyone."""
        self._client.run(verbs.clear(self.id))

    def pin(self, names: Names, seconds: float, *, hard: bool = False) -> verbs.Pinned:
        """Keep the leading stored blocks for a while, within this caller's budget."""
        return self._client.run(verbs.pin(names, seconds, hard))

    def unpin(self, names: Names) -> int:
        """End this caller's pins; how many there were."""
        return self._client.run(verbs.unpin(names))

    def score(self, names: Names, prompt_tokens: int = 0) -> verbs.Score:
        """What a prompt would find there."""
        return self._client.run(verbs.score(names, prompt_tokens))

    def _limit(self, deadline_seconds: float | None) -> float:
        return self._client.deadline_seconds if deadline_seconds is None else deadline_seconds
