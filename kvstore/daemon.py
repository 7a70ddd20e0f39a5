"""The daemon process: assembles the floors, serves until a signal, drains, leaves nothing behind.

Primitives: `serve(config)` runs a daemon in this process and returns its exit code; `Daemon` is
the same for tests that
want it on their own loop. Order of start: locks → NVMe directory → recovery → arena → socket →
SERVING. The lock of
the data directory is taken before anything else is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import os
import secrets
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.arena import Arena
from kvstore.blockio import DirectIO
from kvstore.catalog import Catalog
from kvstore.clock import Clock, SystemClock
from kvstore.config import Config
from kvstore.directory import DirectoryWriter, header_bytes
from kvstore.errors import ConfigError, InvariantViolated, KVStoreError
from kvstore.lease import LeaseTable, ReservationTable
from kvstore.logs import get_logger
from kvstore.mover import Mover
from kvstore.namespaces import NamespaceTable
from kvstore.policy import VictimPicker, make_policy
from kvstore.recovery import Recovered, recover
from kvstore.room import Room
from kvstore.rpc import control_pb2, control_pb2_grpc
from kvstore.rpc.server import ControlServicer
from kvstore.rpc.sessions import Sessions
from kvstore.scrub import Scrubber
from kvstore.service import Service
from kvstore.slab import SlabPool
from kvstore.store import Store
from kvstore.tier.host import HostTier
from kvstore.tier.nvme import NvmeTier
from kvstore.writebehind import WriteBehind
from kvstore.writes import WritePath

EXIT_OK, EXIT_FATAL, EXIT_REFUSED = 0, 1, 2
WATCHDOG_EXTRA_SECONDS = 4.0
"""The process ends at the latest this long after the drain time, whatever hangs."""
SERVICE_NAME = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name


class FileLock:
    """An exclusive kernel lock on a file that says who holds it; gone with the process."""

    def __init__(self, path: Path, facts: dict[str, object]) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, 4096, 0).decode(errors="replace")
            os.close(self._fd)
            raise ConfigError(
                f"{path.parent} is in use by another daemon ({owner.strip() or 'starting'}); "
                "stop it, or choose another daemon.data_dir and daemon.name"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(facts).encode(), 0)

    def close(self) -> None:
        os.close(self._fd)


class Daemon:
    """One life of the daemon on the running loop."""

    def __init__(self, config: Config, clock: Clock | None = None) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self.boot_id = secrets.randbits(63) | 1
        self.service: Service
        self.recovered: Recovered | None = None
        self._locks: list[FileLock] = []
        self._pools: list[ThreadPoolExecutor] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._log = get_logger("daemon")

    # ------------------------------------------------------------------ start

    async def start(self) -> None:
        """Everything up to SERVING. Raises ConfigError, TierError; then nothing is left behind."""
        try:
            self._take_locks()
            nvme = self._open_nvme()
            host = self._open_host()
            store = self._make_store(host, nvme)
            if nvme is not None:
                self.recovered = recover(store, nvme)
                self._log.info("recovered", **self.recovered.facts())
            self._assemble(store)
            await self._listen()
        except BaseException:
            await self.stop()
            raise
        gc.collect()
        gc.freeze()

    def _take_locks(self) -> None:
        socket = self.config.daemon.socket_path
        facts: dict[str, object] = {
            "pid": os.getpid(),
            "socket": str(socket),
            "arena": str(self.config.arena_directory),
        }
        if self.config.nvme.enabled:
            self._locks.append(FileLock(Path(self.config.daemon.data_dir) / "LOCK", facts))
        self._locks.append(FileLock(socket.with_name(socket.name + ".lock"), facts))

    def _open_nvme(self) -> NvmeTier | None:
        if not self.config.nvme.enabled:
            return None
        return NvmeTier.open(
            Path(self.config.daemon.data_dir),
            config=self.config.nvme,
            io=DirectIO(direct=self.config.nvme.direct),
            clock=self.clock,
        )

    def _open_host(self) -> HostTier | None:
        host = self.config.host
        if not host.bytes:
            return None
        pool = SlabPool(
            host.bytes // host.slab_bytes,
            host.slab_bytes,
            host.slot_bytes_min,
            slabs_per_region=host.region_bytes // host.slab_bytes,
            staging_share=host.staging_share,
            staging_slots_min=host.staging_slots_min,
        )
        namespaces_max = self.config.limits.namespaces_max
        arena = Arena.create(
            self.config.arena_directory,
            bytes_total=host.bytes,
            region_bytes=host.region_bytes,
            header_bytes=header_bytes(pool.slots_max, namespaces_max),
            mode=0o660 if host.group else 0o600,
            gid=host.gid,
        )
        directory = DirectoryWriter(
            arena.header.array,
            slots=pool.slots_max,
            namespaces_max=namespaces_max,
            boot_id=self.boot_id,
        )
        return HostTier(pool, arena, directory)

    def _make_store(self, host: HostTier | None, nvme: NvmeTier | None) -> Store:
        lease = self.config.lease
        catalog = Catalog(
            host_slots=host.pool.slots_max if host is not None else 0,
            nvme_slots=nvme.pool.slots_max if nvme is not None else 0,
        )
        ids = iter(lambda: secrets.randbits(63) | 1, 0)
        return Store(
            config=self.config,
            catalog=catalog,
            leases=LeaseTable(
                catalog,
                lambda: next(ids),
                blocks_max=lease.blocks_max,
                leases_per_client_max=lease.leases_per_client_max,
            ),
            reservations=ReservationTable(
                lambda: next(ids), quarantine_bytes_max=lease.quarantine_bytes_per_client_max
            ),
            namespaces=NamespaceTable(self.config.limits.namespaces_max),
            policy=make_policy(self.config.policy.name, catalog),
            host=host,
            nvme=nvme,
        )

    def _pool(self, name: str, threads: int) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(threads, thread_name_prefix=f"kvstore-{name}")
        self._pools.append(pool)
        return pool

    def _assemble(self, store: Store) -> None:
        config, now = self.config, self.clock.monotonic
        rng = np.random.default_rng(secrets.randbits(64))
        picker = VictimPicker(store.catalog, store.policy, store.namespaces.leaf_exempt, rng)
        room = Room(store, picker)
        sessions = Sessions(config.limits.clients_max)
        hashers = self._pool("hash", 2)
        writes = WritePath(store, room, hashers, now, sessions.of_engine)
        readers = self._pool("read", config.nvme.readers)
        mover = Mover(store, room, readers, config.nvme.readers, now)
        write_behind = None
        if store.nvme is not None:
            writers = self._pool("write", config.nvme.writers)
            write_behind = WriteBehind(
                store, store.nvme, picker, writers, now, lambda: mover.is_busy
            )
            self._start_task(write_behind.run())
        helpers = self._pool("help", 1)
        self.service = Service(
            config,
            self.clock,
            store,
            writes,
            mover,
            write_behind,
            Scrubber(store, helpers, self.clock),
            sessions,
            helpers,
            self.boot_id,
            self.fail,
        )
        self._start_task(self.service.maintain())
        if store.host is not None:
            threading.Thread(
                target=self._collapse, args=(store.host.arena,), daemon=True, name="kvstore-huge"
            ).start()

    def _collapse(self, arena: Arena) -> None:
        """Background thread: huge pages for the arena, a step at a time; serving does not wait for
        it.
        """
        while not self._stop.is_set() and arena.collapse_next():
            pass

    def _start_task(self, work: Callable[..., object] | object) -> None:
        task = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _listen(self) -> None:
        config = self.config
        path = config.daemon.socket_path
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=config.limits.calls_inflight_max,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
                ("grpc.http2.max_ping_strikes", 0),
            ],
        )
        control_pb2_grpc.add_ControlServicer_to_server(ControlServicer(self.service), self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        mask = os.umask(0o177 if not config.host.group else 0o117)
        try:
            self._server.add_insecure_port(f"unix:{path}")
            await self._server.start()
        finally:
            os.umask(mask)
        for name in ("", SERVICE_NAME):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

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
        if hasattr(self, "_server"):
            await self._server.stop(1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)
        if service is not None:
            for tier in (service.store.nvme, service.store.host):
                if tier is not None:
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
    try:
        await daemon.start()
    except (KVStoreError, OSError) as error:
        log.error("refused to start", reason=str(error))
        return EXIT_REFUSED
    loop = asyncio.get_running_loop()

    def on_signal(name: str) -> None:
        log.info("draining", signal=name, seconds=config.daemon.drain_seconds)
        _watchdog(config.daemon.drain_seconds + WATCHDOG_EXTRA_SECONDS)
        daemon.request_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    on_ready(daemon)
    code = await daemon.wait()
    await daemon.stop()
    log.info("stopped", code=code)
    return code


def serve(config: Config, on_ready: Callable[[Daemon], None] = lambda daemon: None) -> int:
    """Run a daemon until SIGTERM, SIGINT or a fatal error. `on_ready` is called once it is
    SERVING.
    """
    import uvloop

    return uvloop.run(_serve(config, on_ready))
