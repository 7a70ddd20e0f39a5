"""A client's tie to its daemon: one channel, one attach stream, and what happens when they break.

Primitives of `Session`:
  `life`          the current attachment, or None: every data verb asks once and carries it along
  `call`          one unary call with a deadline; raises typed errors
  `declare`       makes a namespace known in a life; `declared` answers from memory when it can
  `check_usable`  refuses a forked child at once
  `lost`          a caller found the daemon gone: attach again
  `let_in`        a device of this process: it pins the arena and opens the GPU tier's slabs
  `press`         the engine needs device memory back from the daemon

A background thread attaches, and attaches again with growing pauses, for as long as the session is
open. Blocking stubs only. May not touch bytes of blocks.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import grpc

from kvstore.arena import ClientLock
from kvstore.client.life import AttachStream, Declared, Life, take_lock
from kvstore.client.slabs import SlabUser
from kvstore.client.statistics import Tally
from kvstore.errors import (
    ClientForked,
    Draining,
    InvalidRequest,
    KVStoreError,
    Overloaded,
    PeerGone,
    Unavailable,
)
from kvstore.logs import get_logger
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc.control_pb2_grpc import ControlStub
from kvstore.rpc.status import from_rpc_error

ATTACH_PAUSE_SECONDS_MIN = 0.05
ATTACH_PAUSE_SECONDS_MAX = 2.0
DECLARE_PAUSE_SECONDS = 1.0
"""A namespace that could not be declared is a miss at once for so long, not a wait a call."""
_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_log = get_logger("client")


class Declaration(Protocol):
    """What the session must know of a namespace to declare it (again)."""

    @property
    def id(self) -> bytes: ...
    def request(self, client: int) -> pb.DeclareRequest: ...


class Session:
    """Thread-safe. Until `start` it makes control calls only and has no background thread."""

    def __init__(self, socket: str, engine: str, deadline_seconds: float) -> None:
        self.socket = socket
        self.engine = engine
        self.deadline_seconds = deadline_seconds
        self.tally = Tally()
        self.life: Life | None = None
        self.away_reason = "opened without attaching"
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._attached = threading.Condition()
        self._declarations: dict[bytes, Declaration] = {}
        self._arena_dir: str = ""
        self._stream: AttachStream | None = None
        self._device: SlabUser | None = None
        self._pressure_bytes = 0
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=_CHANNEL_OPTIONS)
        self._stub: Any = ControlStub(self._channel)  # type: ignore[no-untyped-call]
        self._on_life: Callable[[], None] = lambda: None
        self._thread = threading.Thread(
            target=self._stay_attached, name="kvstore-attach", daemon=True
        )

    def start(self, on_life: Callable[[], None]) -> None:
        """Attach, now and always again. `on_life` is called when a life begins or ends."""
        self._on_life = on_life
        self.away_reason = "not attached yet"
        self._thread.start()

    # ------------------------------------------------------------------ callers

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process that opened the session."""
        return os.getpid() != self._pid

    def check_usable(self) -> None:
        """Raises ClientForked in a forked child: threads and channel did not come along."""
        if self.is_forked:
            raise ClientForked(
                f"this client belongs to process {self._pid}; "
                f"open a new one in process {os.getpid()}"
            )

    def check_open(self) -> None:
        """Raises ClientForked, InvalidRequest after close."""
        self.check_usable()
        if self._closing.is_set():
            raise InvalidRequest("the client was closed")

    def wait_connected(self, timeout: float | None) -> bool:
        """Whether a daemon is attached, waiting up to `timeout` seconds for one."""
        self.check_usable()
        with self._attached:
            self._attached.wait_for(
                lambda: self.life is not None or self._closing.is_set(), timeout
            )
            return self.life is not None

    def call(self, method: str, request: object, deadline_seconds: float | None = None) -> Any:
        """The reply to one unary call. Raises the typed error, PeerGone when nobody listens."""
        self.check_open()
        return self.call_until_closed(method, request, deadline_seconds)

    def call_until_closed(
        self, method: str, request: object, deadline_seconds: float | None = None
    ) -> Any:
        """As `call`, also while the session is closing: for the background threads' last words."""
        limit = self.deadline_seconds if deadline_seconds is None else deadline_seconds
        try:
            return getattr(self._stub, method)(request, timeout=max(limit, 0.001))
        except grpc.RpcError as error:
            self.tally.add(failed_calls=1)
            raise from_rpc_error(error) from error
        except ValueError as error:  # grpc's word for a closed channel
            raise PeerGone("the client was closed") from error

    def reserve(
        self,
        life: Life,
        request: pb.ReserveRequest,
        abort: Callable[[Life, int], None],
        deadline_seconds: float | None = None,
    ) -> pb.ReserveReply:
        """A Reserve, aborted when no answer comes: it may have been granted all the same."""
        request.client, request.reservation = life.client, secrets.randbits(63) | 1
        try:
            reply: pb.ReserveReply = self.call_until_closed("Reserve", request, deadline_seconds)
        except BaseException as error:  # Ctrl-C, too
            is_answer = isinstance(error, KVStoreError) and not isinstance(error, Unavailable)
            if not is_answer and not isinstance(error, (Draining, Overloaded)):
                abort(life, request.reservation)
            raise
        return reply

    def stream(self, method: str, request: object, deadline_seconds: float) -> Any:
        """A server stream's call object; iterating it raises grpc.RpcError."""
        self.check_open()
        return getattr(self._stub, method)(request, timeout=max(deadline_seconds, 0.001))

    def lost(self, life: Life, error: KVStoreError) -> None:
        """`error` came from a call in `life`; if it says that the daemon forgot us, attach anew."""
        if isinstance(error, PeerGone) and life is self.life:
            stream = self._stream
            if stream is not None:
                stream.close()

    def excuse(self, life: Life, error: Exception) -> KVStoreError:
        """What a background thread makes of what it caught: it goes on, whatever it was."""
        if isinstance(error, KVStoreError):
            self.lost(life, error)
            return error
        _log.exception("a bug of the client", exc_info=error)
        return Unavailable(f"a bug of the client: {error!r}")

    # ------------------------------------------------------------------ namespaces

    def register(self, declaration: Declaration) -> None:
        """Declare now if attached, and in every later life.

        Raises NamespaceConflict, InvalidRequest.
        """
        self._declarations[declaration.id] = declaration
        life = self.life
        if life is None:
            return
        try:
            self.declared(life, declaration)
        except Unavailable:
            _log.debug("declaring later", namespace=declaration.id.hex()[:16])

    def declared(self, life: Life, declaration: Declaration) -> Declared:
        """The daemon's answer for this namespace in `life`.

        Raises the refusal, or PeerGone and the like.
        """
        known = life.namespaces.get(declaration.id)
        if known is None:
            known = self._declare(life, declaration)
        if isinstance(known, KVStoreError):
            raise known
        return known

    def _declare(self, life: Life, declaration: Declaration) -> Declared | KVStoreError:
        answer: Declared | KVStoreError
        if time.monotonic() < life.declare_from.get(declaration.id, 0.0):
            raise Unavailable("the daemon did not answer when this namespace was declared")
        try:
            reply = self.call("Declare", declaration.request(life.client))
            answer = Declared(reply.index, reply.slot_bytes)
        except InvalidRequest as error:
            answer = error
            _log.warning("namespace refused", namespace=declaration.id.hex()[:16], error=str(error))
        except Unavailable:
            life.declare_from[declaration.id] = time.monotonic() + DECLARE_PAUSE_SECONDS
            raise
        life.namespaces[declaration.id] = answer
        return answer

    # ------------------------------------------------------------------ attaching

    def _stay_attached(self) -> None:
        pause = ATTACH_PAUSE_SECONDS_MIN
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                if self._attach_once():
                    continue
                reason = "the daemon ended the attachment"
            except Exception as error:  # noqa: BLE001  # a bug, too, may not keep us away for ever
                reason = f"{type(error).__name__}: {error}"
                say = _log.info if isinstance(error, Unavailable) else _log.warning
                say("not attached", socket=self.socket, reason=reason)
            self.away_reason = reason
            self._set_life(None)
            if time.monotonic() - began > ATTACH_PAUSE_SECONDS_MAX:
                pause = ATTACH_PAUSE_SECONDS_MIN
            self._closing.wait(pause)
            pause = min(2 * pause, ATTACH_PAUSE_SECONDS_MAX)

    def _attach_once(self) -> bool:
        """One life from hello to end; True: try again at once, with a lock file.

        The lock file lies in the arena's directory, whose place only a first hello without one can
        tell.
        """
        lock = self._lock_file()
        stream = self._stream = AttachStream(self._stub, self.engine, lock)
        life: Life | None = None
        try:
            welcome = stream.welcome(self.deadline_seconds)
            if welcome.arena_dir != self._arena_dir:
                self._arena_dir = welcome.arena_dir
                return True
            life = Life.open(welcome, lock)
            for declaration in list(self._declarations.values()):
                self._declare_quietly(life, declaration)
            self._set_life(life)
            self._introduce(life, stream)
            for news in stream.news():
                self._take_news(life, news)
            return False
        finally:
            stream.close()
            if life is not None:
                life.end()
            elif lock is not None:
                lock.close()

    @staticmethod
    def _take_news(life: Life, news: pb.AttachReply) -> None:
        match news.WhichOneof("kind"):
            case "draining":
                life.is_draining = True
            case "slabs" if life.slabs is not None:
                life.slabs.open((told.slab, told.handle) for told in news.slabs.slabs)
            case "unmap" if life.slabs is not None:
                life.slabs.give_back(news.unmap.slab)

    # ------------------------------------------------------------------ devices

    def let_in(self, device: SlabUser) -> None:
        """In this life and all later ones, in place of the one before."""
        life, stream = self.life, self._stream
        with self._attached:
            if life is not None and life.slabs is not None and device is not self._device:
                life.slabs.close(is_told=True)
                life.slabs = None
            self._device = device
        if life is not None and stream is not None:
            self._introduce(life, stream)

    def press(self, device_bytes: int) -> None:
        """The engine needs so many bytes of device memory back, in all; 0: none any more."""
        self._pressure_bytes = device_bytes
        if self._stream is not None:
            self._stream.say(pb.AttachRequest(pressure=pb.Pressure(device_bytes=device_bytes)))

    def _introduce(self, life: Life, stream: AttachStream) -> None:
        """What a new daemon life must know of our device."""

        def closed(slab: int) -> None:
            stream.say(pb.AttachRequest(unmapped=pb.Unmapped(slab=slab)))

        with self._attached:
            if self._device is not None and life.slabs is None:
                maps = life.open_slabs(self._device, closed)
                stream.say(pb.AttachRequest(device=pb.Device(maps_slabs=maps)))
        if self._pressure_bytes:
            stream.say(pb.AttachRequest(pressure=pb.Pressure(device_bytes=self._pressure_bytes)))

    def _lock_file(self) -> ClientLock | None:
        if not self._arena_dir:
            return None
        try:
            return take_lock(self._arena_dir)
        except PeerGone:
            # The arena moved or went away; the next welcome says where it is.
            self._arena_dir = ""
            raise

    def _declare_quietly(self, life: Life, declaration: Declaration) -> None:
        """A refusal is kept in the life for those who use the namespace; others need not suffer."""
        with suppress(InvalidRequest, Unavailable):
            self.declared(life, declaration)

    def _set_life(self, life: Life | None) -> None:
        if life is self.life:
            return
        if life is not None:
            self.away_reason = ""
            self.tally.add(attaches=1)
        with self._attached:
            self.life = life
            self._attached.notify_all()
        self._on_life()

    # ------------------------------------------------------------------ end

    def begin_close(self) -> bool:
        """Refuse new calls; False if that was done before."""
        if self._closing.is_set():
            return False
        self._closing.set()
        return True

    def finish_close(self, timeout: float) -> None:
        """Leave the daemon; the last words were said."""
        self.away_reason = "the client was closed"
        life, stream = self.life, self._stream
        if stream is not None:
            stream.close()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._channel.close()
        self._set_life(None)
        if life is not None:
            life.end()
            life.arena.close()
