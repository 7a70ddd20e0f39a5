"""The verbs of the block API: requests checked and translated to the ordinary client and back.

Primitives: `BlocksServicer`, `SERVICE_NAME`, `handlers(servicer)` (what a gRPC server serves).
Typed errors become a status; bytes that are no message do too. Blocking: a thread a call. Owns no
blocks and no state but the open streams.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from kvstore.client import KVClient, NamespaceHandle, RawNames
from kvstore.config_gateway import GatewayConfig
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.gateway.access import Access, Tenant
from kvstore.gateway.lookups import existence
from kvstore.gateway.streams import Streams
from kvstore.gateway.transfer import Buffers, Upload, send
from kvstore.layout import BlockLayout
from kvstore.rpc import blocks_pb2 as pb
from kvstore.rpc import status, wire
from kvstore.rpc.chunks import CHUNK_BYTES, MESSAGE_BYTES_MAX, Received, split_data
from kvstore.types import NamespaceId, NamespaceKind

KEYS_PER_CALL_MAX = 65_536
PINS_PER_CALL_MAX = 2048
KEPT_BUFFER_BYTES_MAX = 256 << 20
SERVICE = pb.DESCRIPTOR.services_by_name["Blocks"]
SERVICE_NAME = SERVICE.full_name


class _Malformed(NamedTuple):
    """In place of a message that could not be parsed."""

    problem: str


def _checked(method: Callable[..., Any]) -> Any:
    """A verb that answers once: the caller's tenant is found, typed errors become a status."""

    @functools.wraps(method)
    def call(self: BlocksServicer, request: Any, context: Any) -> Any:
        try:
            if isinstance(request, _Malformed):
                raise InvalidRequest(f"{method.__name__}: {request.problem}")
            return method(self, request, self.access.tenant_of(context), context)
        except KVStoreError as error:
            status.abort_blocking(context, error)

    return call


class BlocksServicer:
    """All verbs over one attached client."""

    def __init__(self, client: KVClient, access: Access, settings: GatewayConfig) -> None:
        self.client = client
        self.access = access
        self.streams = Streams(settings.streams_max, settings.idle_seconds_max)
        self._settings = settings
        self._buffers = Buffers(KEPT_BUFFER_BYTES_MAX)
        self._workers = ThreadPoolExecutor(settings.streams_max, "kvstore-store")

    def close(self) -> None:
        """After the server: no stream is under way any more."""
        self.streams.close()
        self._workers.shutdown(wait=False)

    def _handle(self, namespace: bytes, tenant: Tenant) -> NamespaceHandle:
        """Raises AccessDenied, NamespaceUnknown, InvalidRequest, Unavailable."""
        wire.unpack_name(namespace, "namespace")
        tenant.check(namespace)
        return self.client.known_namespace(NamespaceId(namespace))

    @staticmethod
    def _names(
        handle: NamespaceHandle, joined: bytes, parent: bytes = b"", most: int = KEYS_PER_CALL_MAX
    ) -> RawNames:
        wire.split_fingerprints(joined, "fingerprints", most)
        if parent:
            wire.unpack_name(parent, "parent")
        return RawNames(handle.id, joined, parent)

    # ------------------------------------------------------------------ looking

    @_checked
    def Describe(self, request: pb.DescribeRequest, tenant: Tenant, context: Any) -> Any:
        if request.namespace:
            handles = [self._handle(request.namespace, tenant)]
        else:
            known = [bytes.fromhex(space["id"]) for space in self.client.stat()["namespaces"]]
            handles = [self._handle(space, tenant) for space in known if tenant.may_use(space)]
        return pb.DescribeReply(
            namespaces=[_described(handle) for handle in handles],
            limits=pb.Limits(
                keys_per_call_max=KEYS_PER_CALL_MAX,
                pins_per_call_max=PINS_PER_CALL_MAX,
                chunk_bytes_max=CHUNK_BYTES,
                message_bytes_max=MESSAGE_BYTES_MAX,
                streams_max=self._settings.streams_max,
                idle_seconds_max=self._settings.idle_seconds_max,
            ),
        )

    @_checked
    def Exists(self, request: pb.ExistsRequest, tenant: Tenant, context: Any) -> Any:
        handle = self._handle(request.namespace, tenant)
        found = existence(handle, self._names(handle, request.fingerprints).joined)
        return pb.ExistsReply(prefix_blocks=found.prefix_blocks, tiers=found.tiers.tobytes())

    @_checked
    def List(self, request: pb.ListRequest, tenant: Tenant, context: Any) -> Any:
        handle = self._handle(request.namespace, tenant)
        page = handle.list(request.cursor, min(request.blocks_max, KEYS_PER_CALL_MAX))
        return pb.ListReply(fingerprints=page.names, tiers=page.tiers.tobytes(), cursor=page.cursor)

    @_checked
    def Score(self, request: pb.ScoreRequest, tenant: Tenant, context: Any) -> Any:
        handle = self._handle(request.namespace, tenant)
        names = self._names(handle, request.fingerprints)
        tokens, seconds = handle.score(names, request.prompt_tokens)
        return pb.ScoreReply(tokens_by_tier=tokens, predicted_ttft_seconds=seconds)

    # ------------------------------------------------------------------ bulk

    def Get(self, request: pb.GetRequest, context: Any) -> Iterator[bytes]:
        try:
            if isinstance(request, _Malformed):
                raise InvalidRequest(f"Get: {request.problem}")
            handle = self._handle(request.namespace, self.access.tenant_of(context))
            names = self._names(handle, request.fingerprints)
            with self.streams.one(context) as stream:
                for message in send(handle, names, request.first_block, self._buffers):
                    stream.moved()
                    yield message
        except KVStoreError as error:
            status.abort_blocking(context, error)

    @_checked
    def Put(self, messages: Iterator[Received], tenant: Tenant, context: Any) -> Any:
        with self.streams.one(context) as stream:
            first = next(messages, None)
            if first is None or first.problem or not first.chunk.HasField("header"):
                raise InvalidRequest(
                    (first.problem if first else "") or "put: the first message must be a header"
                )
            header = first.chunk.header
            handle = self._target(header, tenant)
            names = self._names(handle, header.fingerprints, header.parent)
            upload = Upload(handle, names, self._buffers, self._workers)
            try:
                for received in messages:
                    stream.moved()
                    if received.problem or received.chunk.HasField("header"):
                        raise InvalidRequest(received.problem or "put: a second header")
                    upload.take(received)
                return upload.finish()
            finally:
                upload.close()

    def _target(self, header: pb.PutHeader, tenant: Tenant) -> NamespaceHandle:
        """The namespace to put to; made known first, where the header declares it."""
        if not header.HasField("declare"):
            return self._handle(header.namespace, tenant)
        wire.unpack_name(header.namespace, "namespace")
        tenant.check(header.namespace)
        declared, sizes = header.declare, header.declare.layout
        if declared.kind not in tuple(NamespaceKind):
            raise InvalidRequest(f"declare: kind {declared.kind!r} is neither chained nor flat")
        return self.client.namespace(
            NamespaceId(header.namespace),
            BlockLayout(sizes.block_tokens, sizes.layers, sizes.layer_bytes, sizes.ranks or 1),
            kind=NamespaceKind(declared.kind),
            window_tokens=declared.window_tokens,
            label=declared.label,
        )

    # ------------------------------------------------------------------ keeping and dropping

    @_checked
    def Delete(self, request: pb.DeleteRequest, tenant: Tenant, context: Any) -> Any:
        handle = self._handle(request.namespace, tenant)
        names = self._names(handle, request.fingerprints)
        deleted = sum(handle.delete(names, block) for block in range(len(names)))
        return pb.DeleteReply(deleted_blocks=deleted)

    @_checked
    def Clear(self, request: pb.ClearRequest, tenant: Tenant, context: Any) -> Any:
        self._handle(request.namespace, tenant).clear()
        return pb.ClearReply()

    @_checked
    def Pin(self, request: pb.PinRequest, tenant: Tenant, context: Any) -> Any:
        handle = self._handle(request.namespace, tenant)
        names = self._names(handle, request.fingerprints, most=PINS_PER_CALL_MAX)
        pinned, reason = handle.pin(names, request.seconds, hard=request.hard, tenant=tenant.name)
        return pb.PinReply(pinned=pinned, short_reason=reason)

    @_checked
    def Unpin(self, request: pb.UnpinRequest, tenant: Tenant, context: Any) -> Any:
        handle = self._handle(request.namespace, tenant)
        names = self._names(handle, request.fingerprints, most=PINS_PER_CALL_MAX)
        return pb.UnpinReply(unpinned=handle.unpin(names, tenant=tenant.name))


def _described(handle: NamespaceHandle) -> pb.Namespace:
    layout = handle.layout
    return pb.Namespace(
        namespace=handle.id,
        kind=handle.kind,
        layout=pb.Layout(
            block_tokens=layout.block_tokens,
            layers=layout.layers,
            layer_bytes=layout.layer_bytes,
            ranks=layout.ranks,
        ),
        window_tokens=handle.window_tokens,
        label=handle.label,
        block_bytes=layout.block_bytes,
    )


# ---------------------------------------------------------------------- serving


def handlers(servicer: BlocksServicer) -> grpc.GenericRpcHandler:
    """What a server on threads serves. Chunks are framed by hand, all else is generated."""
    return grpc.method_handlers_generic_handler(SERVICE_NAME, _methods(servicer))


def _methods(servicer: BlocksServicer) -> Mapping[str, Any]:
    methods: dict[str, Any] = {
        "Get": grpc.unary_stream_rpc_method_handler(servicer.Get, _parser(pb.GetRequest)),
        "Put": grpc.stream_unary_rpc_method_handler(
            servicer.Put, split_data, pb.PutReply.SerializeToString
        ),
    }
    for method in SERVICE.methods:
        if method.name not in methods:
            methods[method.name] = grpc.unary_unary_rpc_method_handler(
                getattr(servicer, method.name),
                _parser(getattr(pb, method.input_type.name)),
                getattr(pb, method.output_type.name).SerializeToString,
            )
    return methods


def _parser(message: Any) -> Callable[[bytes], Any]:
    """Parses requests; what cannot be parsed is told by the verb, not logged by gRPC."""

    def parse(data: bytes) -> Any:
        try:
            return message.FromString(data)
        except DecodeError as error:
            return _Malformed(f"no {message.DESCRIPTOR.name} message: {error}")

    return parse
