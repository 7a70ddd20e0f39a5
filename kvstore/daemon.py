"""The daemon process: assembles the floors, serves until a signal, drains, leaves nothing behind.

Primitives: `serve(config)` runs a daemon in this process and returns its exit code; `Daemon` is the
same on a loop that runs already. Order of start: locks → NVMe directory → arena → recovery → socket
→ SERVING. The lock of the data directory is taken before anything else is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.arena import Arena
from kvstore.assembly import (
    Workers,
    lock_data,
    make_service,
    make_store,
    new_id,
    open_gpu,
    open_host,
    open_nvme,
)
from kvstore.clock import Clock, SystemClock
from kvstore.config import Config
from kvstore.config_fields import OFF
from kvstore.errors import InvariantViolated, KVStoreError
from kvstore.logs import get_logger
from kvstore.places import FileLock, remove_stale_socket, share
from kvstore.recovery import Recovered, recover
from kvstore.rpc import control_pb2, control_pb2_grpc
from kvstore.rpc.server import ControlServicer
from kvstore.scheduling import short_turns, usual_turns
from kvstore.service import Service
from kvstore.statistics import statistics_of
from kvstore.store import Store
from kvstore.tier.gpu import GpuTier
from kvstore.tier.host import HostTier
from kvstore.tier.nvme import NvmeTier

EXIT_OK, EXIT_FATAL, EXIT_REFUSED = 0, 1, 2
SWITCH_SECONDS = 0.00005
WATCHDOG_EXTRA_SECONDS = 4.0
"""The process ends at the latest this long after the drain time, whatever hangs; after a fatal
error, which drains nothing, so long after that."""
SERVICE_NAME = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name


class Daemon:
    """One life of the daemon on the running loop."""

    def __init__(self, config: Config, clock: Clock | None = None) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self.boot_id = new_id()
        self.service: Service
        self.recovered: Recovered | None = None
        self._locks: list[FileLock] = []
        self._tiers: list[HostTier | NvmeTier | GpuTier] = []
        self._pools: list[ThreadPoolExecutor] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._log = get_logger("daemon")

    # ------------------------------------------------------------------ start

    async def start(self) -> None:
        """Everything up to SERVING. Raises ConfigError, TierError; then nothing is left behind."""
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        # Collections while recovery fills the catalog would look at every record and free nothing.
        gc.disable()
        try:
            self._take_locks()
            gpu = open_gpu(self.config)
            self._tiers += [] if gpu is None else [gpu]
            # On a thread: it takes as long as there are memory and records, and signals are heard.
            self._assemble(await asyncio.to_thread(self._open_store, gpu))
            await self._listen()
        except BaseException:
            await self.stop()
            raise
        finally:
            gc.freeze()
            gc.enable()

    def _open_store(self, gpu: GpuTier | None) -> Store:
        config = self.config
        nvme = open_nvme(config, self.clock) if config.nvme.enabled else None
        self._tiers += [] if nvme is None else [nvme]
        host = open_host(config, self.boot_id, gpu) if config.host.bytes else None
        self._tiers += [] if host is None else [host]
        store = make_store(config, host, nvme, gpu=gpu)
        if nvme is not None:
            self.recovered = recover(store, nvme)
            self._log.info("recovered", **self.recovered.facts())
        return store

    def _take_locks(self) -> None:
        socket, gid = self.config.daemon.socket_path, self.config.host.gid
        is_new = not socket.parent.exists()
        if self.config.nvme.enabled:
            self._locks.append(lock_data(self.config))
        self._locks.append(FileLock(socket.with_name(socket.name + ".lock"), {"pid": os.getpid()}))
        remove_stale_socket(socket)
        if gid is not None:
            self._let_reach(socket, gid, is_new)

    def _let_reach(self, socket: Path, gid: int, is_new: bool) -> None:
        """Open the socket's directory to the group if it `is_new`; tell what else bars the way."""
        if is_new:
            share(socket.parent, gid, 0o750)
        places = [(place, place.stat()) for place in socket.absolute().parents]
        barred = [
            str(place)
            for place, found in places
            if not found.st_mode & (0o010 if found.st_gid == gid else 0o001)
        ]
        if barred:
            self._log.warning(
                "host.group cannot reach the socket: let it pass these directories "
                "(chgrp, chmod g+x), or choose another daemon.socket",
                group=self.config.host.group,
                barred=barred,
            )

    def _pool(self, name: str, threads: int) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(threads, f"kvstore-{name}", initializer=usual_turns)
        self._pools.append(pool)
        return pool

    def _assemble(self, store: Store) -> None:
        config = self.config
        workers = Workers(
            hash=self._pool("hash", 2),
            read=self._pool("read", config.nvme.readers),
            write=self._pool("write", config.nvme.writers),
            help=self._pool("help", 1),
        )
        rng = np.random.default_rng(secrets.randbits(64))
        self.service = make_service(store, self.clock, workers, rng, self.boot_id, self.fail)
        if self.service.write_behind is not None:
            self._start_task(self.service.write_behind.run())
        self._start_task(self.service.maintain())
        if store.host is not None:
            threading.Thread(
                target=self._collapse, args=(store.host.arena,), daemon=True, name="kvstore-huge"
            ).start()

    def _collapse(self, arena: Arena) -> None:
        """Background thread: huge pages for the arena, a step at a time; serving does not wait for
        it.
        """
        usual_turns()
        while not self._stop.is_set() and arena.collapse_next():
            pass

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What a callback or a forgotten task raised: ours is fatal, the rest is told."""
        error = context.get("exception")
        if isinstance(error, InvariantViolated):
            self.fail(error)
        else:
            loop.default_exception_handler(context)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _listen(self) -> None:
        config = self.config
        path = config.daemon.socket_path
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=config.limits.calls_inflight_max,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
                ("grpc.http2.max_ping_strikes", 0),
            ],
        )
        control_pb2_grpc.add_ControlServicer_to_server(  # type: ignore[no-untyped-call]
            ControlServicer(self.service), self._server
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        mask = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{path}")
            await self._server.start()
        finally:
            os.umask(mask)
        if config.host.gid is not None:
            share(path, config.host.gid, 0o660)
        if config.metrics.address != OFF:
            self._serve_metrics(config.metrics.address)
        for name in ("", SERVICE_NAME):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def _serve_metrics(self, address: str) -> None:
        from kvstore.metrics import MetricsServer

        loop = asyncio.get_running_loop()
        self._metrics = MetricsServer(address, loop, lambda: statistics_of(self.service))
        self._log.info("metrics", address=f"{address.rpartition(':')[0]}:{self._metrics.port}")

    # ------------------------------------------------------------------ run and stop

    def fail(self, error: BaseException) -> None:
        """Our bug: the arena's content is void at once, the process ends, engines recompute."""
        if self._failure is None:
            self._failure = error
            kind = (
                "invariant violated" if isinstance(error, InvariantViolated) else "unexpected error"
            )
            self._log.exception(f"fatal: {kind}", error=repr(error), exc_info=error)
            if hasattr(self, "service") and self.service.store.host is not None:
                self.service.store.host.directory.close_boot()
        self._stop.set()

    def request_stop(self) -> None:
        """What a signal does: leave `wait`, then drain."""
        self._stop.set()

    async def wait(self) -> int:
        """Until a signal or a fatal error; the exit code."""
        await self._stop.wait()
        return EXIT_OK if self._failure is None else EXIT_FATAL

    async def stop(self) -> None:
        """Drain within daemon.drain_seconds, end every stream, release files and locks. Safe after
        a failed start.
        """
        service = getattr(self, "service", None)
        self._stop.set()
        if hasattr(self, "_health"):
            await self._health.enter_graceful_shutdown()
        if service is not None:
            drain = control_pb2.AttachReply(
                draining=control_pb2.Draining(seconds=self.config.daemon.drain_seconds)
            )
            service.sessions.tell_all(drain)
            if self._failure is None:
                await service.drain()
            if service.store.host is not None:
                service.store.host.directory.close_boot()
            service.sessions.end_all()
        if hasattr(self, "_metrics"):
            await asyncio.to_thread(self._metrics.close)
        if hasattr(self, "_server"):
            await self._server.stop(1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)
        for tier in self._tiers:
            tier.close()
        with contextlib.suppress(FileNotFoundError):
            if hasattr(self, "_server"):
                self.config.daemon.socket_path.unlink()
        for lock in self._locks:
            lock.close()


def _watchdog(seconds: float) -> None:
    """End the process hard after `seconds`; whatever hangs then is not worth waiting for."""
    timer = threading.Timer(seconds, os._exit, args=(EXIT_FATAL,))
    timer.daemon = True
    timer.start()


async def _serve(config: Config, on_ready: Callable[[Daemon], None]) -> int:
    daemon = Daemon(config)
    log = get_logger("daemon")
    loop = asyncio.get_running_loop()

    def on_signal(name: str) -> None:
        log.info("draining", signal=name, seconds=config.daemon.drain_seconds)
        _watchdog(config.daemon.drain_seconds + WATCHDOG_EXTRA_SECONDS)
        daemon.request_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    try:
        await daemon.start()
    except (KVStoreError, OSError) as error:
        log.error("refused to start", reason=str(error))
        return EXIT_REFUSED
    on_ready(daemon)
    code = await daemon.wait()
    if code == EXIT_FATAL:
        _watchdog(WATCHDOG_EXTRA_SECONDS)
    await daemon.stop()
    log.info("stopped", code=code)
    return code


def serve(config: Config, on_ready: Callable[[Daemon], None] = lambda daemon: None) -> int:
    """Run a daemon until SIGTERM, SIGINT or a fatal error. `on_ready` is called once it is
    SERVING.
    """
    import uvloop

    # Worker threads that return from a copy or a read wait at most this long for the loop.
    sys.setswitchinterval(SWITCH_SECONDS)
    short_turns()
    return uvloop.run(_serve(config, on_ready))
