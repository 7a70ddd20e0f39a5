"""The floor of a control call: a bare grpc.aio + uvloop server that only answers.

`EchoServer` runs `serve` in a process of its own. A request's first 4 bytes say how long the reply
shall be; no messages are parsed on either side. Knows nothing of kvstore.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc

METHOD = "/bench.Echo/Echo"
_SIZE_BYTES = 4


class EchoServer:
    """Context manager; `call(request_bytes, reply_bytes)` gives a function that makes one call."""

    def __enter__(self) -> Self:
        self._folder = tempfile.mkdtemp(prefix="kve-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.echo_server", f"{self._folder}/e.sock"]
        )
        self._channel = grpc.insecure_channel(f"unix:{self._folder}/e.sock")
        grpc.channel_ready_future(self._channel).result(timeout=20)
        self._method = self._channel.unary_unary(METHOD)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()
        self._process.terminate()
        self._process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, request_bytes: int, reply_bytes: int) -> Callable[[], bytes]:
        """One echo call with messages of these sizes."""
        request = reply_bytes.to_bytes(_SIZE_BYTES, "little").ljust(request_bytes, b"\1")
        return lambda: self._method(request, timeout=10.0)


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(_echo)


async def _echo(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return bytes(int.from_bytes(request[:_SIZE_BYTES], "little"))


async def serve(path: str) -> None:
    """Until the process is ended."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Handler(),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    import uvloop

    uvloop.install()
    asyncio.run(serve(sys.argv[1]))
