"""What tests against real daemons share: engines that colour their blocks, raw callers, the books.

Primitives:
  `running(...)`     a daemon for longer than one test
  `Engine`           a client with one namespace; stores painted blocks, loads only what is right
  `RawClient`        the protocol without the client library: what a broken program may send
  `attempt`, `refusal`   the typed error of a call, and its status
  `assert_books`     what the daemon accounts for is what there is
  `mounted(...)`     a small file system of its own
  `Script`           Python in a process of its own, told and asked line by line
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest

from bench.workload import Painter, identity_of, prompt
from kvstore.client import KVClient, LoadResult, NamespaceHandle
from kvstore.fingerprint import Chain
from kvstore.layout import BlockLayout
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc.control_pb2_grpc import ControlStub
from kvstore.rpc.status import METADATA_KEY
from kvstore.types import BlockStatus, NamespaceId, NamespaceKind
from tests.conftest import SMALL, DaemonProcess

LAYOUT = BlockLayout(block_tokens=16, layers=4, layer_bytes=16384)
"""64 KiB a block, 4 parts."""
SECONDS_MAX = 30.0
"""Everything happens at once; on a machine that is busy with other things it may take so long."""
DONE = {BlockStatus.STORED, BlockStatus.WAITING, BlockStatus.PRESENT}


def eventually(holds: Callable[[], object], what: str, seconds: float = SECONDS_MAX) -> None:
    """Wait until `holds()`; an AssertionError names `what`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def new_daemon(settings: dict[str, str] | None = None) -> DaemonProcess:
    """Not started; `clean` it."""
    directory = Path(tempfile.mkdtemp(prefix="kvstore-", dir=os.environ.get("KVSTORE_TEST_DIR")))
    return DaemonProcess(directory, {**SMALL, **(settings or {})})


@contextlib.contextmanager
def running(settings: dict[str, str] | None = None) -> Iterator[DaemonProcess]:
    """A daemon for a whole module."""
    daemon = new_daemon(settings)
    try:
        yield daemon.start()
    finally:
        daemon.clean()


# ---------------------------------------------------------------------- engines


class Engine:
    """One client process' worth of an engine: a namespace, and blocks coloured by their names."""

    def __init__(
        self,
        daemon: DaemonProcess,
        name: str = "engine",
        *,
        model: str = "synthetic",
        layout: BlockLayout = LAYOUT,
        kind: NamespaceKind = NamespaceKind.CHAINED,
        window_tokens: int = 0,
        space: NamespaceId | None = None,
    ) -> None:
        self.client = KVClient(str(daemon.socket), engine=name, deadline_seconds=SECONDS_MAX)
        assert self.client.wait_connected(SECONDS_MAX), self.client.away_reason
        self.painter = Painter(layout.block_bytes)
        self.handle: NamespaceHandle = self.client.namespace(
            identity_of(layout, model) if space is None else space,
            layout,
            kind=kind,
            window_tokens=window_tokens,
            label=model,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def chain(self, number: int, blocks: int, shared: int = 0) -> Chain:
        """Names of prompt `number`; its first `shared` blocks are those of every other prompt."""
        tokens = self.handle.layout.block_tokens
        return self.handle.chain(prompt(number, blocks * tokens, shared * tokens))

    def painted(self, names: Sequence[bytes]) -> Any:
        """uint8 [n, block_bytes]"""
        return np.stack([self.painter.painted(name) for name in names])

    def store(self, chain: Chain) -> tuple[BlockStatus, ...]:
        """A status a block, once all is known."""
        ticket = self.handle.store(chain, self.painted([chain[at] for at in range(len(chain))]))
        return ticket.result(SECONDS_MAX)

    def stored(self, number: int, blocks: int, shared: int = 0) -> Chain:
        """Store a whole prompt; every block must be taken."""
        chain = self.chain(number, blocks, shared)
        statuses = self.store(chain)
        assert set(statuses) <= DONE, statuses
        return chain

    def durable(self, number: int, blocks: int, shared: int = 0) -> Chain:
        """Store a whole prompt and see it on NVMe."""
        chain = self.stored(number, blocks, shared)
        assert self.handle.flush(chain, deadline_seconds=SECONDS_MAX).all()
        return chain

    def load(self, chain: Chain, deadline_seconds: float = SECONDS_MAX) -> LoadResult:
        """What is stored of `chain`; every block that comes must be the right bytes."""
        into = np.zeros((len(chain), self.handle.layout.block_bytes), np.uint8)
        result = self.handle.load(chain, into, deadline_seconds=deadline_seconds)
        for at in range(result.blocks):
            assert self.painter.is_painted(chain[at], into[at]), (
                f"block {at} of {result} has {self.painter.wrong_bytes(chain[at], into[at])} "
                "wrong bytes"
            )
        return result

    def loads_whole(self, chain: Chain) -> LoadResult:
        """As `load`; all blocks must come."""
        result = self.load(chain)
        assert result.blocks == len(chain), result
        return result

    def wait_new_life(self, boot_id: int) -> None:
        """Until the client is attached to another daemon life than `boot_id`."""
        eventually(
            lambda: self.client.connected and self.client.boot_id not in (0, boot_id),
            f"attached again ({self.client.away_reason})",
        )


# ---------------------------------------------------------------------- the protocol, raw


class RawClient:
    """A caller without the library: an attached session and the stub."""

    def __init__(
        self, socket: Path, engine: str = "raw", lock_file: str = "", **hello: Any
    ) -> None:
        self.channel = grpc.insecure_channel(
            f"unix:{socket}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.stub: Any = ControlStub(self.channel)
        self._requests: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        greeting = {"protocol_major": 1, "engine": engine, "pid": os.getpid(), **hello}
        self._requests.put(pb.AttachRequest(hello=pb.Hello(lock_file=lock_file, **greeting)))
        self.stream = self.stub.Attach(iter(self._requests.get, None))
        try:
            self.welcome: pb.Welcome = next(self.stream).welcome
        except BaseException:
            self.close()
            raise
        self.client: int = self.welcome.client

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._requests.put(None)
        self.stream.cancel()
        self.channel.close()

    def call(self, method: str, **fields: Any) -> Any:
        """One call as this client."""
        request_type = getattr(pb, f"{method}Request")
        if "client" in request_type.DESCRIPTOR.fields_by_name:
            fields.setdefault("client", self.client)
        return getattr(self.stub, method)(request_type(**fields), timeout=SECONDS_MAX)

    def declare(self, space: bytes, layout: BlockLayout = LAYOUT, **fields: Any) -> Any:
        sizes = pb.Layout(
            block_tokens=layout.block_tokens,
            layers=layout.layers,
            layer_bytes=layout.layer_bytes,
            ranks=layout.ranks,
        )
        values = {"kind": "chained", "layout": sizes, **fields}
        return self.call("Declare", namespace=space, **values)


class Refusal(NamedTuple):
    """How a call failed; `kind` is the error's class, "" when it is none of ours."""

    kind: str
    code: grpc.StatusCode
    message: str


def attempt(call: Callable[[], object]) -> Refusal | None:
    """None when the call (or the whole stream it returns) goes well."""
    try:
        reply = call()
        if isinstance(reply, Iterator):
            list(reply)
    except grpc.RpcError as error:
        known = dict(error.trailing_metadata() or ())
        return Refusal(known.get(METADATA_KEY, ""), error.code(), error.details() or "")
    return None


def refusal(call: Callable[[], object]) -> Refusal:
    """Of a call that must fail."""
    found = attempt(call)
    assert found is not None, "the call was not refused"
    return found


# ---------------------------------------------------------------------- the books


def assert_books(daemon: DaemonProcess) -> dict[str, Any]:
    """Invariants hold, every slot has its owner, disk bytes are accounted bytes; the statistics.

    Waits for what the daemon still has under way; nobody may use it meanwhile.
    """
    problems: list[str] = ["never looked"]

    def balanced() -> bool:
        problems[:] = _imbalances(daemon)
        return not problems

    try:
        eventually(balanced, "the books balance")
    except AssertionError:
        raise AssertionError(f"the books do not balance: {problems}\n{daemon.log()}") from None
    assert findings(daemon) == []
    return daemon.stat()


def findings(daemon: DaemonProcess, *, payloads: bool = False, fix: bool = False) -> list[str]:
    """What Verify says; it also checks every invariant at once, and a violated one is fatal."""
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        request = pb.VerifyRequest(payloads=payloads, fix=fix)
        stub: Any = ControlStub(channel)
        steps = list(stub.Verify(request, timeout=SECONDS_MAX))
    assert steps[-1].done
    return [finding for step in steps for finding in step.findings]


def _imbalances(daemon: DaemonProcess) -> list[str]:
    tree: Any = daemon.stat()
    found: list[str] = []

    def equal(what: str, left: object, right: object) -> None:
        if left != right:
            found.append(f"{what}: {left} != {right}")

    equal("writes under way", tree["write_behind_queued_blocks"], 0)
    equal("promotions under way", tree["promotions_bytes_inflight"], 0)
    classes = tree["host"]["slabs"]["classes"]
    reserved = tree["reservations"]
    equal("slots being filled", sum(size["filling"] for size in classes), reserved["slots"])
    in_quarantine = sum(size["quarantined"] for size in classes)
    equal("slots in quarantine", in_quarantine, reserved["quarantined_slots"])
    equal("slots draining", sum(size["draining"] for size in classes), 0)
    equal("frees refused", tree["host"]["slabs"]["frees_refused"], 0)
    for size in classes:
        states = ("free", "filling", "ready", "draining", "quarantined")
        equal("I1", sum(size[state] for state in states), size["slots"])
    if tree["nvme"] is not None:
        equal("records", tree["nvme"]["records"], tree["nvme"]["slots_ready"])
        equal("I11", tree["nvme"]["bytes_on_disk"], segment_bytes(daemon.data_dir))
    return found


def segment_bytes(data_dir: Path) -> int:
    """What the file system says the segments occupy."""
    return sum(path.stat().st_blocks * 512 for path in (data_dir / "segments").iterdir())


# ---------------------------------------------------------------------- processes


class Script:
    """`source` in a Python process of its own, given `arguments`; it prints lines and reads lines.

    Names of this module are imported in it. Ended by its id.
    """

    def __init__(self, source: str, *arguments: str) -> None:
        program = "from tests.e2e.kit import *\nimport sys\n" + textwrap.dedent(source)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS_MAX)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def read(self) -> Any:
        """The next line it prints, decoded from JSON."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended ({self.process.wait(SECONDS_MAX)})"
        return json.loads(line)

    def tell(self, line: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


def say(value: object) -> None:
    """In a `Script`: one JSON line to whoever started it."""
    print(json.dumps(value), flush=True)


@contextlib.contextmanager
def mounted(directory: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of that size at `directory`; the test is skipped where none may be made."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "tmpfs", directory]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def bytes_used(mount: Path) -> int:
    """What everything on that file system occupies."""
    status = os.statvfs(mount)
    return (status.f_blocks - status.f_bfree) * status.f_frsize
