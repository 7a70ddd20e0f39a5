"""The gateway process: listens, serves until a signal, drains, leaves no socket behind.

Primitives: `serve(config)` runs one in this process and returns its exit code; `Gateway` is the
same for whoever has a process already.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.client import KVClient
from kvstore.config import Config
from kvstore.config_fields import OFF
from kvstore.config_gateway import GatewayConfig
from kvstore.errors import ConfigError
from kvstore.gateway.access import Access
from kvstore.gateway.servicer import SERVICE_NAME, BlocksServicer, handlers
from kvstore.logs import get_logger
from kvstore.places import FileLock, remove_stale_socket
from kvstore.rpc.channels import BULK_OPTIONS

EXIT_OK, EXIT_REFUSED = 0, 2
SHORT_CALLS_MAX = 32
"""Calls that are no bulk streams, served at once beside them."""
CALL_SECONDS = 10.0
LOOK_SECONDS = 0.25
SWITCH_SECONDS = 0.0005
NICENESS = 10
"""Bulk steps back for the daemon and the engine; where cores are free it costs nothing."""
WATCHDOG_EXTRA_SECONDS = 4.0
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    *BULK_OPTIONS,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.http2.max_ping_strikes", 0),
)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_log = get_logger("gateway")


class Gateway:
    """One gateway; serving once made. Raises ConfigError; then nothing is left behind."""

    def __init__(self, config: Config) -> None:
        settings = config.gateway
        self.settings = settings
        self.port = 0
        """Of the TCP address; 0 without one."""
        self._undo = contextlib.ExitStack()
        self._is_stopping = threading.Event()
        with contextlib.ExitStack() as undo:
            access = Access(Path(settings.tokens) if settings.tokens else None)
            client = undo.enter_context(
                KVClient(
                    str(config.daemon.socket_path),
                    engine=f"gateway-{os.getpid()}",
                    deadline_seconds=CALL_SECONDS,
                )
            )
            self._client = client
            self.servicer = BlocksServicer(client, access, settings)
            undo.callback(self.servicer.close)
            threads = settings.streams_max + SHORT_CALLS_MAX
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-call")
            undo.callback(self._pool.shutdown, wait=False)
            self._server = grpc.server(
                self._pool, options=_OPTIONS, maximum_concurrent_rpcs=threads
            )
            self._server.add_generic_rpc_handlers((handlers(self.servicer),))
            self._health = health.HealthServicer()
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
            reflection.enable_server_reflection(
                (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
            )
            self.socket = settings.socket_path(config.daemon.socket_path)
            if self.socket is not None:
                self._bind_socket(self.socket, undo)
            if settings.address != OFF:
                self.port = self._bind_address(settings)
            self._server.start()
            self._undo = undo.pop_all()
        self._health.set(SERVICE_NAME, _NOT_SERVING)
        threading.Thread(target=self._tell_health, name="kvstore-health", daemon=True).start()

    def _bind_socket(self, path: Path, undo: contextlib.ExitStack) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(path.with_name(path.name + ".lock"), {"pid": os.getpid()}, "gateway.socket")
        undo.callback(lock.close)
        remove_stale_socket(path, "gateway.socket")
        undo.callback(path.unlink, missing_ok=True)
        mask = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{path}")
        finally:
            os.umask(mask)

    def _bind_address(self, settings: GatewayConfig) -> int:
        try:
            if not settings.tls_certificate:
                return int(self._server.add_insecure_port(settings.address))
            authority = _read(settings, "tls_client_ca") if settings.tls_client_ca else None
            credentials = grpc.ssl_server_credentials(
                [(_read(settings, "tls_key"), _read(settings, "tls_certificate"))],
                root_certificates=authority,
                require_client_auth=authority is not None,
            )
            return int(self._server.add_secure_port(settings.address, credentials))
        except RuntimeError as error:
            raise ConfigError(
                f"gateway.address={settings.address} cannot be bound ({error}); "
                "is another gateway there? Choose another port, or 0 for a free one"
            ) from error

    def _tell_health(self) -> None:
        """The block API serves while a daemon is attached; the process itself always does."""
        told = False
        while not self._is_stopping.wait(LOOK_SECONDS):
            if self._client.connected != told:
                told = not told
                self._health.set(SERVICE_NAME, _SERVING if told else _NOT_SERVING)
                _log.info("daemon attached" if told else "daemon away")

    def stop(self) -> None:
        """Refuse new calls, let those under way end within drain_seconds, leave. Idempotent."""
        self._is_stopping.set()
        self._health.enter_graceful_shutdown()
        self._server.stop(self.settings.drain_seconds).wait()
        self._undo.close()


def _read(settings: GatewayConfig, name: str) -> bytes:
    try:
        return Path(getattr(settings, name)).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"gateway.{name}={getattr(settings, name)} cannot be read ({error.strerror})"
        ) from error


def serve(config: Config, on_ready: Callable[[Gateway], None] = lambda gateway: None) -> int:
    """Run a gateway until SIGTERM or SIGINT. `on_ready` is called once it serves."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    # Threads that return from a copy wait at most this long for the others.
    sys.setswitchinterval(SWITCH_SECONDS)
    os.nice(NICENESS)
    try:
        gateway = Gateway(config)
    except (ConfigError, OSError) as error:
        _log.error("refused to start", reason=str(error))
        return EXIT_REFUSED
    settings = config.gateway
    if settings.insecure and settings.address != OFF and not settings.is_loopback:
        _log.warning(
            "INSECURE: whoever reaches this address may read, replace and drop every block",
            address=settings.address,
            tls=bool(settings.tls_certificate),
            callers_known=bool(settings.tokens or settings.tls_client_ca),
        )
    on_ready(gateway)
    stopping.wait()
    _log.info("draining", seconds=settings.drain_seconds, streams=len(gateway.servicer.streams))
    watchdog = threading.Timer(
        settings.drain_seconds + WATCHDOG_EXTRA_SECONDS, os._exit, args=(EXIT_OK,)
    )
    watchdog.daemon = True
    watchdog.start()
    gateway.stop()
    _log.info("stopped")
    return EXIT_OK
