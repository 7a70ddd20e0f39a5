"""Several client processes at once: a load's cost beside its copy, the lag of the daemon's loop.

Primitives: `loads_with_pauses`, `store_and_load` run in processes of their own; `PARTS`.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.daemons import DaemonProcess
from bench.dataplane_common import Space, space_on
from bench.dataplane_host import wait_for_huge_pages
from bench.harness import Bar, Context, Reading, single, spread
from bench.plain import MIB, Ring

CLIENTS = 4
BLOCKS, BLOCK_BYTES = 8, 2 * MIB
PAUSE_SECONDS = 0.01
CHAINS = 8
"""A client's own chains: 128 MiB, loaded in turn."""
WORKER_SECONDS_MAX = 120.0


class CopyClock:
    """Time inside `np.copyto` in this process, by standing in for it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._copyto: Callable[..., None] = np.copyto
        np.copyto = self._timed

    def _timed(self, *arguments: Any, **options: Any) -> None:
        start = time.perf_counter()
        self._copyto(*arguments, **options)
        self.seconds += time.perf_counter() - start


def loads_with_pauses(socket: str, number: int, count: int, say: Connection) -> None:
    """`count` host loads with pauses; sends [(seconds in all, seconds copying)]."""
    clock = CopyClock()
    targets = Ring(4, BLOCKS, BLOCK_BYTES)
    with space_on(socket, 256, BLOCK_BYTES) as space:
        prompts = _stored(space, number, targets)
        say.send("ready")
        say.recv()
        samples: list[tuple[float, float]] = []
        for turn in range(count):
            time.sleep(PAUSE_SECONDS)
            tokens, target = prompts[turn % CHAINS], targets.of(turn)
            clock.seconds = 0.0
            start = time.perf_counter()
            chain = space.handle.chain(tokens)
            result = space.handle.load(chain, target)
            samples.append((time.perf_counter() - start, clock.seconds))
            if result.from_host != BLOCKS:
                raise RuntimeError(f"client {number} loaded {result}")
        space.check(chain, target)
    say.send(samples)


def store_and_load(socket: str, number: int, seconds: float, say: Connection) -> None:
    """Store a new chain, load it and an older one, at full speed; sends bytes (stored, loaded)."""
    targets = Ring(4, BLOCKS, BLOCK_BYTES)
    stored = loaded = 0
    with space_on(socket, 256, BLOCK_BYTES) as space:
        say.send("ready")
        say.recv()
        end = time.monotonic() + seconds
        turn = 0
        while time.monotonic() < end:
            chain = space.chain(number * 1_000_000 + turn, BLOCKS)
            ticket = space.handle.store(chain, targets.of(turn))
            older = space.chain(number * 1_000_000 + turn // 2, BLOCKS)
            loaded += space.handle.load(older, targets.of(turn + 1)).blocks * BLOCK_BYTES
            kept = [status.name in ("STORED", "PRESENT") for status in ticket.result(20.0)]
            stored += sum(kept) * BLOCK_BYTES
            turn += 1
    say.send((stored, loaded))


def _stored(space: Space, number: int, targets: Ring) -> list[Any]:
    """Token ids of this client's chains, all in host memory."""
    prompts = [space.tokens(number * 1000 + turn, BLOCKS) for turn in range(CHAINS)]
    for tokens in prompts:
        space.store(space.handle.chain(tokens), targets.of(0))
    for turn, tokens in enumerate(prompts):  # touch the pages once
        space.handle.load(space.handle.chain(tokens), targets.of(turn))
    return prompts


class _Workers:
    """Processes that get ready, start together and send one result each."""

    def __init__(
        self, target: Callable[[str, int, Any, Connection], None], socket: str, argument: object
    ) -> None:
        spawn = multiprocessing.get_context("spawn")  # a forked gRPC client does not work
        self._ends: list[Connection] = []
        self._processes = []
        for number in range(CLIENTS):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=target, args=(socket, number, argument, theirs))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def start(self) -> None:
        """Wait for all, then let them go. Raises RuntimeError when one fails."""
        for number in range(CLIENTS):
            self._receive(number)
        for end in self._ends:
            end.send("go")

    def results(self) -> list[Any]:
        """One a process. Raises RuntimeError when one fails."""
        return [self._receive(number) for number in range(CLIENTS)]

    def _receive(self, number: int) -> Any:
        if not self._ends[number].poll(WORKER_SECONDS_MAX):
            raise RuntimeError(f"client process {number} is silent")
        try:
            return self._ends[number].recv()
        except EOFError:
            raise RuntimeError(f"client process {number} failed, see above") from None

    def end(self) -> None:
        for process, end in zip(self._processes, self._ends, strict=True):
            end.close()
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()


def four_clients(context: Context) -> Reading:
    """Time of a load that is not its copy, with four clients that pause between loads."""
    settings = {"nvme.enabled": "false", "host.bytes": "1GiB"}
    with DaemonProcess(context.folder("four"), settings) as daemon:
        wait_for_huge_pages(context, daemon)
        workers = _Workers(loads_with_pauses, daemon.socket, context.several(300, 40))
        try:
            workers.start()
            samples = [sample for result in workers.results() for sample in result]
        finally:
            workers.end()
    fixed = [(total - copying) * 1e3 for total, copying in samples]
    totals = [total * 1e3 for total, _ in samples]
    return Reading(
        "four_clients_fixed_p95_ms",
        float(np.percentile(fixed, 95)),
        f"total less the time inside np.copyto of the same load; {spread(fixed)}, p99 "
        f"{np.percentile(fixed, 99):.3g} of {len(fixed)}; whole load {np.median(totals):.3g} ms, "
        f"p95 {np.percentile(totals, 95):.3g}; peer 15 to 66 ms",
    )


def loop_lag(context: Context) -> Reading:
    """The daemon's own measure while clients do all they can and write-behind runs."""
    seconds = context.several(15, 4)
    settings = {"host.bytes": "1GiB", "nvme.bytes_max": "4GiB"}
    with DaemonProcess(context.folder("lag"), settings) as daemon:
        workers = _Workers(store_and_load, daemon.socket, float(seconds))
        try:
            workers.start()
            before = daemon.stat()["nvme"]["bytes_written"]
            time.sleep(seconds - 0.5)
            tree = daemon.stat()
            moved = workers.results()
        finally:
            workers.end()
        lag, written = tree["loop_lag"], tree["nvme"]["bytes_written"] - before
        if not written:
            raise RuntimeError("nothing was written to NVMe: not the load that is asked for")
    stored, loaded = (sum(sums) / 1e9 / seconds for sums in zip(*moved, strict=True))
    return Reading(
        "loop_lag_p99_ms",
        float(lag["p99_ms"]),
        f"from the daemon's Stat after {seconds} s of {CLIENTS} clients; p50 {lag['p50_ms']:g}, "
        f"max {lag['max_ms']:g}; stored {stored:.2f}, loaded {loaded:.2f}, written behind "
        f"{written / 1e9 / seconds:.2f} GB/s",
    )


PARTS = (
    single(four_clients, Bar("four_clients_fixed_p95_ms", "ms", at_most=3)),
    single(loop_lag, Bar("loop_lag_p99_ms", "ms", at_most=10)),
)
