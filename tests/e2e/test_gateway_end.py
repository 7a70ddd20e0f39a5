"""The end of a gateway process, and connections on which nothing moves."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.remote_client import RemoteClient
from kvstore.rpc import blocks_pb2 as pb
from kvstore.rpc.chunks import chunks_of, join_data
from tests.conftest import DaemonProcess
from tests.e2e.gateway_kit import Blocks, RawBlocks, address, serving
from tests.e2e.kit import SECONDS_MAX, eventually, running

pytestmark = pytest.mark.slow
Process = subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with running() as daemon:
        yield daemon


@pytest.fixture
def start(daemon: DaemonProcess, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts `kvstore gateway` on the socket `tmp_path`/g."""
    started: list[Process] = []

    def start(drain: str) -> Process:
        settings = {
            "gateway.socket": str(tmp_path / "g"),
            "gateway.address": "off",
            "gateway.drain_seconds": drain,
            "daemon.socket": str(daemon.socket),
        }
        flags = [flag for item in settings.items() for flag in ("--set", "=".join(item))]
        started.append(subprocess.Popen([sys.executable, "-m", "kvstore.cli", "gateway", *flags]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[RawBlocks]:
    with RawBlocks(f"unix:{tmp_path / 'g'}") as raw:
        yield raw


@pytest.fixture
def blocks(tmp_path: Path) -> Iterator[Blocks]:
    with RemoteClient(f"unix:{tmp_path / 'g'}", deadline_seconds=SECONDS_MAX) as client:
        yield Blocks(client)


def wait_for(raw: RawBlocks) -> None:
    """Until a gateway serves here."""
    grpc.channel_ready_future(raw.channel).result(SECONDS_MAX)

    def describes() -> bool:
        try:
            raw.stub.Describe(pb.DescribeRequest())
        except grpc.RpcError:
            return False
        return True

    eventually(describes, "the gateway serves")


class Upload:
    """A Put whose messages go out when they are told to."""

    def __init__(self, raw: RawBlocks, blocks: Blocks, names: Any) -> None:
        header = pb.PutHeader(
            namespace=blocks.space, fingerprints=names.joined, declare=blocks.declared.message()
        )
        self._first = join_data(pb.Chunk(header=header), b"")
        self._chunks = [
            chunk for at, row in enumerate(blocks.rows(names)) for chunk in chunks_of(at, row)
        ]
        self.is_begun, self.may_end = threading.Event(), threading.Event()
        put = raw.channel.stream_unary(
            "/kvstore.blocks.v1.Blocks/Put", None, pb.PutReply.FromString
        )
        self.call = put.future(self._messages())

    def _messages(self) -> Iterator[bytes]:
        yield self._first
        yield self._chunks[0]
        self.is_begun.set()
        self.may_end.wait(SECONDS_MAX)
        yield from self._chunks[1:]


def test_a_put_under_way_is_finished_and_new_calls_are_refused(start, raw, blocks, tmp_path):
    process = start("30s")
    wait_for(raw)
    names = blocks.names(1, 3)
    upload = Upload(raw, blocks, names)
    assert upload.is_begun.wait(SECONDS_MAX)
    process.send_signal(signal.SIGTERM)

    def is_refused() -> bool:
        try:
            raw.stub.Describe(pb.DescribeRequest())
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNAVAILABLE
        return False

    eventually(is_refused, "new calls are refused")
    upload.may_end.set()
    assert list(upload.call.result(SECONDS_MAX).statuses) == [pb.STORED] * 3
    assert process.wait(SECONDS_MAX) == 0
    assert not (tmp_path / "g").exists()
    start("1s")
    wait_for(raw)
    assert blocks.got(names) == [True] * 3


def test_streams_that_never_end_do_not_hold_the_process(start, raw, blocks):
    process = start("1s")
    wait_for(raw)
    stalled = Upload(raw, blocks, blocks.names(1, 2))
    assert stalled.is_begun.wait(SECONDS_MAX)
    many = blocks.put(2, 64)
    unread = raw.stub.Get(pb.GetRequest(namespace=blocks.space, fingerprints=many.joined))
    next(unread)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS_MAX) == 0
    stalled.may_end.set()
    assert isinstance(stalled.call.exception(SECONDS_MAX), grpc.RpcError)


def test_a_client_that_pings_is_not_hung_up_on(daemon):
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with serving(daemon) as gateway, grpc.insecure_channel(address(gateway), options) as channel:
        grpc.channel_ready_future(channel).result(SECONDS_MAX)
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        time.sleep(8)
        assert set(states) <= {grpc.ChannelConnectivity.READY}
