"""A daemon of its own for a measurement: started as users start it, watched, ended by its id.

Primitives of `DaemonProcess` (a context manager):
  `start`       seconds from exec to SERVING
  `kill`        SIGKILL; `start` again brings up the next life on the same directories
  `stat`        the statistics tree
  `private`     bytes of the process that nobody else maps; `cpu_seconds` it used

Leaves nothing behind: process, socket and shared memory go with the context, also after SIGKILL.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.harness import OUT
from kvstore.config_load import load
from kvstore.rpc.control_pb2 import StatRequest
from kvstore.rpc.control_pb2_grpc import ControlStub
from kvstore.settings import ENVIRONMENT_PREFIX

START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
POLL_SECONDS = 0.002
_COMMAND = (sys.executable, "-c", "from kvstore.cli import main; main()", "serve")


@dataclass(frozen=True)
class PrivateMemory:
    """Bytes of one process. `mapped_files`: pages of mapped disk files, the kernel's to drop."""

    private: int
    mapped_files: int


def child_environment() -> dict[str, str]:
    """No settings from outside; bytecode kept in a folder of ours, as if installed."""
    env = {key: text for key, text in os.environ.items() if not key.startswith(ENVIRONMENT_PREFIX)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**env, "PYTHONPYCACHEPREFIX": str(OUT / "bytecode")}


class DaemonProcess:
    """One daemon on directories of its own; `settings`: section.key → text, as for `--set`."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.folder = folder
        self._short = tempfile.mkdtemp(prefix="kvb-")  # a socket's path has 107 bytes at most
        self.socket = f"{self._short}/d.sock"
        self.settings = {
            "daemon.name": f"bench-{os.getpid()}-{folder.name}",
            "daemon.socket": self.socket,
            "daemon.data_dir": str(folder / "data"),
            "daemon.log_level": "warning",
            **settings,
        }
        self.config = load(None, {}, self.settings)
        self.command: Sequence[str] = _COMMAND
        """What the next `start` runs, without settings."""
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.stop()
        finally:
            self.kill()
            self._clean()

    @property
    def pid(self) -> int:
        """Of the running process."""
        if self._process is None:
            raise RuntimeError("the daemon does not run")
        return self._process.pid

    @property
    def log(self) -> str:
        """What the daemon said so far, all lives."""
        return (self.folder / "daemon.log").read_text(errors="replace")

    # ------------------------------------------------------------------ life

    def start(self) -> float:
        """Run it; seconds from exec until gRPC health says SERVING."""
        command = [*self.command]
        for key, value in self.settings.items():
            command += ["--set", f"{key}={value}"]
        with (self.folder / "daemon.log").open("ab") as log:
            start = time.perf_counter()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=child_environment()
            )
        self._wait(self._listens, start)
        self._channel = grpc.insecure_channel(f"unix:{self.socket}")
        self._control: Any = ControlStub(self._channel)  # type: ignore[no-untyped-call]
        self._wait(self._serves, start)
        return time.perf_counter() - start

    def _wait(self, condition: Callable[[], bool], start: float) -> None:
        while not condition():
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"the daemon ended while starting:\n{self.log[-2000:]}")
            if time.perf_counter() - start > START_SECONDS_MAX:
                raise RuntimeError(
                    f"not SERVING after {START_SECONDS_MAX:g} s:\n{self.log[-2000:]}"
                )
            time.sleep(POLL_SECONDS)

    def _listens(self) -> bool:
        """A raw connect: a gRPC channel would back off after a refusal and hide the moment."""
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self.socket) == 0

    def _serves(self) -> bool:
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0, wait_for_ready=True)
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        self._disconnect()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """SIGTERM, wait for the drain. Raises RuntimeError when it fails to end well."""
        self._disconnect()
        if self._process is None:
            return
        self._process.terminate()
        code = self._process.wait(STOP_SECONDS_MAX)
        self._process = None
        if code:
            raise RuntimeError(f"the daemon ended with {code}:\n{self.log[-2000:]}")

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _clean(self) -> None:
        shutil.rmtree(self._short, ignore_errors=True)
        shutil.rmtree(self.config.arena_directory, ignore_errors=True)
        shutil.rmtree(self.config.daemon.data_dir, ignore_errors=True)

    # ------------------------------------------------------------------ looking

    def stat(self) -> dict[str, Any]:
        """The statistics tree."""
        tree: dict[str, Any] = json.loads(self._control.Stat(StatRequest(), timeout=10.0).json)
        return tree

    def cpu_seconds(self) -> float:
        """What the process used so far, all threads, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def private(self) -> PrivateMemory:
        """Private_Clean + Private_Dirty of all but shared mappings (arena, index)."""
        private = mapped = 0
        shared = on_tmpfs = False
        for line in Path(f"/proc/{self.pid}/smaps").read_text().splitlines():
            head, _, rest = line.partition(" ")
            if not head.endswith(":"):
                shared = rest.split(" ", 1)[0].endswith("s")
                on_tmpfs = str(self.config.arena_directory) in rest
            elif head in ("Private_Clean:", "Private_Dirty:"):
                size = int(rest.split()[0]) * 1024
                if not shared:
                    private += size
                elif not on_tmpfs:
                    mapped += size
        return PrivateMemory(private, mapped)
