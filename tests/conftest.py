"""Fixtures shared by all tests: a real daemon in its own process, on a disk and a tmpfs of its
own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from hypothesis import settings

from kvstore.rpc import control_pb2, control_pb2_grpc

MIB = 1 << 20
START_SECONDS_MAX = 60.0

# The same examples every time: what fails failed because of the change at hand. New ones are looked
# for with `--hypothesis-profile=explore`.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("fixed")


@dataclass
class DaemonProcess:
    """One `kvstore serve` at a time over one data directory; ended by its id."""

    directory: Path
    settings: dict[str, str]
    name: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:12]}")
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.directory / "s"

    @property
    def data_dir(self) -> Path:
        return Path(self.settings.get("daemon.data_dir", self.directory / "data"))

    @property
    def arena(self) -> Path:
        return Path(f"/dev/shm/kvstore-{os.getuid()}-{self.name}")

    def command(self, **more: str) -> list[str]:
        settings = {
            "daemon.name": self.name,
            "daemon.socket": str(self.socket),
            "daemon.data_dir": str(self.data_dir),
            **self.settings,
            **more,
        }
        flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={value}")]
        return [sys.executable, "-m", "kvstore.cli", "serve", *flags]

    def start(self, **more: str) -> DaemonProcess:
        """Start and wait until it serves."""
        log = (self.directory / "log").open("ab")
        self.process = subprocess.Popen(self.command(**more), stdout=log, stderr=log)
        log.close()
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"daemon exited {self.process.returncode}: {self.log()}")
            if self.socket.exists() and self._answers():
                return self
            time.sleep(0.02)
        raise AssertionError(f"daemon does not serve: {self.log()}")

    def _answers(self) -> bool:
        try:
            self.stat(timeout=1.0)
        except grpc.RpcError:
            return False
        return True

    def stat(self, timeout: float = 5.0) -> dict[str, object]:
        """The daemon's statistics tree."""
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            reply = stub.Stat(control_pb2.StatRequest(), timeout=timeout)
        return json.loads(reply.json)

    def counters(self) -> dict[str, int]:
        return self.stat()["counters"]

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-4000:]

    def clean(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.arena, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)


SMALL = {
    "host.bytes": "32MiB",
    "host.region_bytes": "16MiB",
    "host.slab_bytes": "2MiB",
    "nvme.bytes_max": "256MiB",
    "nvme.segment_bytes": "16MiB",
    "nvme.free_bytes_min": "1MiB",
    "daemon.drain_seconds": "5s",
}


@pytest.fixture
def make_daemon() -> Iterator[Callable[..., DaemonProcess]]:
    """Factory of daemons with small tiers; every one is ended and its files removed."""
    made: list[DaemonProcess] = []

    def make(settings: dict[str, str] | None = None, **kwargs: object) -> DaemonProcess:
        directory = Path(tempfile.mkdtemp(prefix="kvstore-"))
        daemon = DaemonProcess(directory, {**SMALL, **(settings or {})}, **kwargs)
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.clean()


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """A running daemon: 32 MiB of shared memory, 256 MiB of NVMe."""
    return make_daemon().start()
