"""A gateway of its own for a measurement, and the bare gRPC stream it is held against.

Primitives:
  `Gateway`       `kvstore gateway` beside a daemon; plain, or with mutual TLS
  `BareStream`    a server that streams the same messages in the same chunks, and nothing else
  `Certificates`  an authority, a server and a client, for TLS on loopback

Each is a context manager and ends its process by its id.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import trustme

from bench.daemons import START_SECONDS_MAX, STOP_SECONDS_MAX, DaemonProcess, child_environment
from kvstore.errors import KVStoreError
from kvstore.remote_client import RemoteClient, Tls
from kvstore.rpc import blocks_pb2 as pb
from kvstore.rpc.chunks import CHUNK_BYTES

METHODS = {"get": "/bench.Bare/Get", "put": "/bench.Bare/Put"}


class Certificates:
    """PEM files in `folder`; the client is called "bench"."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        server = authority.issue_cert("localhost", "127.0.0.1")
        client = authority.issue_cert("bench", common_name="bench")
        self.authority = folder / "authority.pem"
        authority.cert_pem.write_to_path(str(self.authority))
        self.certificate, self.key = self._write(folder, "server", server)
        certificate, key = self._write(folder, "client", client)
        self.client = Tls(self.authority, certificate, key, server_name="localhost")

    @staticmethod
    def _write(folder: Path, name: str, issued: Any) -> tuple[Path, Path]:
        certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
        for blob in issued.cert_chain_pems:
            blob.write_to_path(str(certificate), append=True)
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key

    @property
    def settings(self) -> dict[str, str]:
        """Mutual TLS for a gateway."""
        return {
            "gateway.tls_certificate": str(self.certificate),
            "gateway.tls_key": str(self.key),
            "gateway.tls_client_ca": str(self.authority),
        }


class _Process:
    """A child that prints the port it serves on."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self.process: subprocess.Popen[str] | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, text=True, env=child_environment()
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.strip().isdigit():
            raise RuntimeError(f"{self._command} did not start: {line!r}")
        self.port = int(line)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process is not None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS_MAX)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, if it runs; it may be entered again."""
        if self.process is not None:
            assert self.process.stdout is not None
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self.process = None


class Gateway(_Process):
    """`kvstore gateway` beside `daemon` on a free port."""

    def __init__(self, daemon: DaemonProcess, settings: Mapping[str, str] | None = None) -> None:
        chosen = {
            "daemon.socket": daemon.socket,
            "daemon.log_level": "error",
            "gateway.address": "127.0.0.1:0",
            "gateway.socket": "off",
            "gateway.drain_seconds": "2s",
            **(settings or {}),
        }
        program = (
            "import sys; from bench.gateways import serve_gateway; serve_gateway(sys.argv[1:])"
        )
        super().__init__(
            [sys.executable, "-c", program, *(f"{key}={text}" for key, text in chosen.items())]
        )

    def client(self, tls: Tls | None = None) -> RemoteClient:
        """A client, once the gateway has its daemon."""
        client = RemoteClient(self.address, tls=tls, deadline_seconds=300.0)
        deadline = time.monotonic() + START_SECONDS_MAX
        while True:
            try:
                client.describe()
                return client
            except KVStoreError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def serve_gateway(settings: list[str]) -> None:
    """In the child."""
    from kvstore.config_load import load
    from kvstore.gateway.process import serve

    overrides = dict(text.split("=", 1) for text in settings)
    sys.exit(serve(load(None, {}, overrides), lambda running: print(running.port, flush=True)))


class BareStream(_Process):
    """The floor: `pb.Chunk` messages of 1 MiB through gRPC as it comes, on threads."""

    def __init__(self) -> None:
        super().__init__([sys.executable, "-m", "bench.gateways"])

    def get(self, chunks: int) -> float:
        """Seconds to receive so many chunks."""
        with grpc.insecure_channel(self.address) as channel:
            call = channel.unary_stream(
                METHODS["get"], pb.GetRequest.SerializeToString, pb.Chunk.FromString
            )
            grpc.channel_ready_future(channel).result(START_SECONDS_MAX)
            start = time.perf_counter()
            size = sum(len(chunk.data) for chunk in call(pb.GetRequest(first_block=chunks)))
            seconds = time.perf_counter() - start
        if size != chunks * CHUNK_BYTES:
            raise RuntimeError(f"bare get: {size} bytes came")
        return seconds

    def put(self, chunks: int) -> float:
        """Seconds to send so many chunks."""
        data = bytes(CHUNK_BYTES)
        with grpc.insecure_channel(self.address) as channel:
            call = channel.stream_unary(
                METHODS["put"], pb.Chunk.SerializeToString, pb.PutReply.FromString
            )
            grpc.channel_ready_future(channel).result(START_SECONDS_MAX)
            start = time.perf_counter()
            call(pb.Chunk(block=number, data=data) for number in range(chunks))
            return time.perf_counter() - start


def _bare_get(request: pb.GetRequest, context: Any) -> Iterator[pb.Chunk]:
    data = bytes(CHUNK_BYTES)
    for number in range(request.first_block):
        yield pb.Chunk(block=number, data=data)


def _bare_put(chunks: Iterator[pb.Chunk], context: Any) -> pb.PutReply:
    size = sum(len(chunk.data) for chunk in chunks)
    return pb.PutReply(reason=str(size))


def _serve_bare() -> None:
    handlers = {
        "Get": grpc.unary_stream_rpc_method_handler(
            _bare_get, pb.GetRequest.FromString, pb.Chunk.SerializeToString
        ),
        "Put": grpc.stream_unary_rpc_method_handler(
            _bare_put, pb.Chunk.FromString, pb.PutReply.SerializeToString
        ),
    }
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bare", handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    _serve_bare()
