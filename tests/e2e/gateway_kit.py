"""What tests of the gateway share: a gateway in this process, painted blocks, raw calls.

Primitives:
  `serving(...)`     a gateway beside a daemon; ended with its context
  `Blocks`           a namespace seen through a client, with blocks painted by their names
  `RawBlocks`        the protocol without the client library
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np

from bench.workload import Painter, prompt
from kvstore.client import FlatNames, Names
from kvstore.config_load import load
from kvstore.fingerprint import Chain
from kvstore.gateway.process import Gateway
from kvstore.layout import BlockLayout
from kvstore.remote_client import Declared, RemoteClient
from kvstore.rpc import blocks_pb2 as pb
from kvstore.rpc import blocks_pb2_grpc
from kvstore.rpc.chunks import CHUNK_BYTES, chunks_of, join_data, split_data
from kvstore.types import NamespaceId, NamespaceKind
from tests.conftest import DaemonProcess
from tests.e2e.kit import SECONDS_MAX, eventually

SMALL = BlockLayout(4, 2, 8192)
"""16 KiB a block: one chunk."""
BLOCKS_MAX = 64
"""Of one prompt: shorter ones are its beginning."""
LARGE = BlockLayout(4, 1, CHUNK_BYTES + 4096)
"""Two chunks a block."""


@contextlib.contextmanager
def serving(daemon: DaemonProcess, **settings: str) -> Iterator[Gateway]:
    """On a Unix socket beside the daemon's, and a free port of loopback."""
    chosen = {
        "daemon.socket": str(daemon.socket),
        "gateway.address": "127.0.0.1:0",
        "gateway.drain_seconds": "1s",
        **{f"gateway.{name}": text for name, text in settings.items()},
    }
    gateway = Gateway(load(None, {}, chosen))
    try:
        eventually(lambda: gateway.servicer.client.connected, "the gateway is attached")
        yield gateway
    finally:
        gateway.stop()


def address(gateway: Gateway) -> str:
    return f"127.0.0.1:{gateway.port}"


class Blocks:
    """`space`: of another one; by default a new namespace."""

    def __init__(
        self,
        client: RemoteClient,
        layout: BlockLayout = SMALL,
        kind: NamespaceKind = NamespaceKind.CHAINED,
        space: NamespaceId | None = None,
    ) -> None:
        self.space = space or NamespaceId(secrets.token_bytes(32))
        self.layout = layout
        self.declared = Declared(self.space, layout, kind, label="test")
        self.remote = client.namespace(self.declared)
        self.painter = Painter(layout.block_bytes)

    def names(self, number: int, blocks: int) -> Names:
        if self.declared.kind is NamespaceKind.FLAT:
            return FlatNames(self.space, [b"%d.%d" % (number, at) for at in range(blocks)])
        chain = Chain(self.space, self.layout.block_tokens)
        tokens = self.layout.block_tokens
        chain.extend(prompt(number, BLOCKS_MAX * tokens)[: blocks * tokens])
        return chain

    def rows(self, names: Names) -> Any:
        return np.stack([self.painter.painted(name) for name in each(names)])

    def put(self, number: int, blocks: int) -> Names:
        """Stored, all of them."""
        names = self.names(number, blocks)
        result = self.remote.put(names, self.rows(names))
        assert result.all_stored, result
        return names

    def got(self, names: Names, start: int = 0) -> list[bool]:
        """Which of the blocks from `start` on came; those that did are the right bytes."""
        into = np.zeros((len(names) - start, self.layout.block_bytes), np.uint8)
        result = self.remote.get(names, into, start=start)
        for name, row, found in zip(each(names)[start:], into, result.found, strict=True):
            assert not found or self.painter.is_painted(name, row)
        return result.found.tolist()


def each(names: Names) -> list[bytes]:
    return [names.joined[at : at + 32] for at in range(0, len(names.joined), 32)]


class RawBlocks:
    """A caller without the library; closed with its context."""

    def __init__(self, target: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(target, options=options)
        self.stub: Any = blocks_pb2_grpc.BlocksStub(self.channel)
        self.metadata = tuple(metadata)

    def __enter__(self) -> RawBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def call(self, method: str, **fields: Any) -> Any:
        request = getattr(pb, f"{method}Request")(**fields)
        return getattr(self.stub, method)(request, timeout=SECONDS_MAX, metadata=self.metadata)

    def bytes_to(self, method: str, data: bytes) -> bytes:
        """A unary call with these bytes for a message."""
        call = self.channel.unary_unary(f"/kvstore.blocks.v1.Blocks/{method}")
        return call(data, timeout=SECONDS_MAX)

    def put(self, messages: Any) -> Any:
        """Messages as bytes."""
        call = self.channel.stream_unary(
            "/kvstore.blocks.v1.Blocks/Put", None, pb.PutReply.FromString
        )
        return call(iter(messages), timeout=SECONDS_MAX, metadata=self.metadata)


def put_messages(blocks: Blocks, names: Names, rows: Any) -> list[bytes]:
    """What a client sends to put all of them: a header, then the chunks."""
    header = pb.PutHeader(
        namespace=blocks.space, fingerprints=names.joined, declare=blocks.declared.message()
    )
    messages = [join_data(pb.Chunk(header=header), b"")]
    for block, row in enumerate(rows):
        messages += chunks_of(block, row)
    return messages


def changed(message: bytes, data: bytes | None = None, **fields: Any) -> bytes:
    """A chunk message with some fields replaced."""
    chunk, old, problem = split_data(message)
    assert not problem
    for name, value in fields.items():
        setattr(chunk, name, value)
    return join_data(chunk, bytes(old) if data is None else data)
