"""Several gateway clients at once: what they do to the daemon beside them, and to each other.

Primitives: `PARTS`; `stream_for` and `read_slowly` run in processes of their own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import grpc

from bench.daemons import DaemonProcess
from bench.dataplane_common import Space, space_on
from bench.gateway_bulk import Remote, daemon_for
from bench.gateways import Gateway
from bench.harness import Bar, Context, Part, Reading, spread
from kvstore.remote_client import RemoteClient
from kvstore.rpc import blocks_pb2 as pb
from kvstore.rpc import blocks_pb2_grpc
from kvstore.types import NamespaceId

CLIENTS = 4
BLOCKS = 64
MATCH_BLOCKS = 40
LAG_SECONDS = 85.0
"""As long as the daemon remembers the delays of its loop."""
WORKER_SECONDS_MAX = 120.0

HANDLING = Bar("match_handling_p99_under_bulk_ratio", "ratio", at_most=2.0)
LAG = Bar("loop_lag_p99_ms_under_bulk", "ms", at_most=5.0)
SLOW = Bar("slow_reader_others", "ratio", at_least=0.9)


def stream_for(address: str, space: bytes, say: Connection) -> None:
    """Reads as fast as it can until told to stop; then sends the blocks it read a second."""
    with RemoteClient(address, deadline_seconds=120.0) as client:
        remote = Remote(client, BLOCKS, NamespaceId(space))
        chain = remote.chain(0)
        remote.get(chain)
        say.send("ready")
        while say.recv() == "go":
            count, start = 0, time.perf_counter()
            while not say.poll():
                remote.get(chain)
                count += BLOCKS
            say.recv()
            say.send(count / (time.perf_counter() - start))


def read_slowly(address: str, space: bytes, say: Connection) -> None:
    """One Get, of which a chunk a second is read."""
    with grpc.insecure_channel(address) as channel:
        with RemoteClient(address) as client:
            chain = Remote(client, BLOCKS, NamespaceId(space)).chain(0)
        stub: Any = blocks_pb2_grpc.BlocksStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Get(pb.GetRequest(namespace=space, fingerprints=chain.joined))
        next(call)
        say.send("ready")
        for _ in call:
            if say.poll(1.0):
                break
        call.cancel()


class Crowd:
    """Processes of `work`, told together."""

    def __init__(self, work: Any, count: int, *arguments: object) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=work, args=(*arguments, theirs), daemon=True)
            process.start()
            self._ends.append(ours)
            self._processes.append(process)
        for _ in self.answers():
            pass

    def answers(self) -> Iterator[Any]:
        for end in self._ends:
            if not end.poll(WORKER_SECONDS_MAX):
                raise RuntimeError("a client process said nothing")
            yield end.recv()

    def tell(self, word: str) -> None:
        for end in self._ends:
            end.send(word)

    def during(self, seconds: float) -> list[float]:
        """Run for so long; what each did a second."""
        self.tell("go")
        time.sleep(seconds)
        self.tell("pause")
        return list(self.answers())

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)


@contextlib.contextmanager
def _crowd(work: Any, count: int, *arguments: object) -> Iterator[Crowd]:
    crowd = Crowd(work, count, *arguments)
    try:
        yield crowd
    finally:
        crowd.close()


@contextlib.contextmanager
def _stored(context: Context, name: str) -> Iterator[tuple[DaemonProcess, Gateway, NamespaceId]]:
    with daemon_for(context, name) as daemon, Gateway(daemon) as gateway:
        with gateway.client() as client:
            remote = Remote(client, BLOCKS)
            remote.put(0)
        yield daemon, gateway, remote.space


def _match_p99(daemon: DaemonProcess, space: Space, calls: int) -> float:
    """Milliseconds from receipt to reply inside the daemon, over `calls` of them."""
    chain = space.chain(1, MATCH_BLOCKS)
    before = daemon.stat()["latencies"]["Match"]["buckets"]
    for _ in range(calls):
        space.handle.lease(chain).release()
    after = daemon.stat()["latencies"]["Match"]["buckets"]
    return _quantile({bound: after[bound] - before[bound] for bound in after}, 0.99) * 1e3


def _quantile(buckets: Mapping[str, int], share: float) -> float:
    """Seconds, from counts up to each bound; inside a bucket as if spread evenly."""
    wanted, low, below = share * max(buckets.values()), 0.0, 0
    for bound, count in buckets.items():
        if count >= wanted:
            if bound == "+Inf":
                return low
            return low + (float(bound) - low) * (wanted - below) / max(count - below, 1)
        low, below = float(bound), count
    return low


def _under_bulk(context: Context) -> Iterable[Reading]:
    calls = context.several(4000, 500)
    with (
        _stored(context, "under-bulk") as (daemon, gateway, blocks),
        space_on(daemon.socket, 16, 65536) as space,
    ):
        space.store(space.chain(1, MATCH_BLOCKS))
        context.step(f"{calls} matches, nothing else going on")
        idle = _match_p99(daemon, space, calls)
        with _crowd(stream_for, CLIENTS, gateway.address, blocks) as crowd:
            context.step(f"{calls} matches while {CLIENTS} clients stream")
            crowd.tell("go")
            start = time.perf_counter()
            busy = _match_p99(daemon, space, calls)
            left = LAG_SECONDS - (time.perf_counter() - start)
            if not context.is_quick and left > 0:
                time.sleep(left)
            lag = daemon.stat()["loop_lag"]
            crowd.tell("pause")
            rate = sum(crowd.answers()) * 2 / 1024
    note = f"p99 {busy:.3g} ms ÷ {idle:.3g} ms idle; {rate:.3g} GiB/s streamed meanwhile"
    yield Reading(HANDLING.name, busy / max(idle, 1e-3), note)
    seen = "part of it idle" if context.is_quick else "the last 80 s"
    yield Reading(LAG.name, float(lag["p99_ms"]), f"p50 {lag['p50_ms']:.3g} ms; {seen}")


def _slow_reader(context: Context) -> Iterable[Reading]:
    seconds = 6.0 if not context.is_quick else 2.0
    ratios: list[float] = []
    with (
        _stored(context, "slow-reader") as (_, gateway, blocks),
        _crowd(stream_for, CLIENTS - 1, gateway.address, blocks) as crowd,
    ):
        crowd.during(1.0)
        for _ in range(context.several(7, 2)):
            alone = sum(crowd.during(seconds))
            with _crowd(read_slowly, 1, gateway.address, blocks):
                ratios.append(sum(crowd.during(seconds)) / alone)
    ratios.sort()
    note = f"{spread(ratios)} of {len(ratios)} pairs of {seconds:g} s; a 4th reads 1 chunk a second"
    yield Reading(SLOW.name, ratios[len(ratios) // 2], note)


PARTS = (
    Part("the daemon under bulk", (HANDLING, LAG), _under_bulk),
    Part("a slow reader", (SLOW,), _slow_reader),
)
