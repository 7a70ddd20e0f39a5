"""One attachment to one daemon life, and everything that ends with it.

Primitives:
  `Life`          client id, boot id, mapped arena, directory, lock file, declared namespaces
  `AttachStream`  the two-way stream behind it: hello out, welcome in, news until it ends

A life is never repaired: when its stream ends it is over, and the session opens another. Views
handed out keep the mapping alive. The lock file stays locked while a writer may still copy into the
arena, however the life ended.
"""

from __future__ import annotations

import os
import queue
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Timer
from typing import Any

import grpc

from kvstore.arena import ArenaView, ClientLock
from kvstore.client.slabs import OpenSlabs, SlabUser
from kvstore.directory import STORE_ORDER_TRUSTED, DirectoryReader
from kvstore.errors import ConfigError, KVStoreError, PeerGone, VersionMismatch
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc.status import from_rpc_error
from kvstore.rpc.wire import PROTOCOL_MAJOR, PROTOCOL_MINOR

_locks: weakref.WeakSet[ClientLock] = weakref.WeakSet()
"""Every lock file of this process. A kernel lock outlives its process in forked children: they let
go."""


def take_lock(arena_dir: str) -> ClientLock:
    """A lock file of this process, and of no child it forks.

    Raises PeerGone without an arena, ConfigError where this user may not make one.
    """
    try:
        lock = ClientLock.create(Path(arena_dir))
    except PermissionError as error:
        raise ConfigError(
            f"may not make a lock file in {arena_dir}: {error}; "
            "run as the daemon's user, or set host.group"
        ) from error
    except OSError as error:
        raise PeerGone(f"cannot make a lock file in {arena_dir}: {error}") from error
    _locks.add(lock)
    return lock


def _let_go_in_child() -> None:
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_let_go_in_child)


@dataclass(frozen=True)
class Declared:
    """What the daemon answered when a namespace was made known to it."""

    index: int
    slot_bytes: int


class Life:
    """Fields are fixed once made, but for `is_over`, `is_draining`, `namespaces` and `slabs`."""

    def __init__(
        self,
        welcome: pb.Welcome,
        arena: ArenaView,
        directory: DirectoryReader,
        lock: ClientLock | None,
    ) -> None:
        self.client = welcome.client
        self.boot_id = welcome.boot_id
        self.region_bytes = welcome.region_bytes
        self.arena_bytes = welcome.regions * welcome.region_bytes
        self.read_lease_seconds = welcome.read_lease_seconds
        self.arena = arena
        self.directory = directory
        self.gpu_directory_at = welcome.gpu_directory_at
        self.gpu_slab_bytes = welcome.gpu_slab_bytes
        self.slabs: OpenSlabs | None = None
        """Of the GPU tier, where a device of this process opens them."""
        self.is_over = False
        self.is_draining = False
        self.namespaces: dict[bytes, Declared | KVStoreError] = {}
        """Answers to Declare; an error is a refusal that will not change in this life."""
        self.declare_from: dict[bytes, float] = {}
        """The daemon did not answer a Declare: not asked again before this time."""
        self._lock = lock
        self._writers = 0
        self._guard = Lock()

    @classmethod
    def open(cls, welcome: pb.Welcome, lock: ClientLock | None) -> Life:
        """Map what `welcome` names.

        Raises PeerGone, VersionMismatch, InvalidRequest, ConfigError.
        """
        try:
            arena = ArenaView.attach(Path(welcome.arena_dir), welcome.region_bytes, welcome.regions)
        except PermissionError as error:
            raise ConfigError(
                f"may not map the arena {welcome.arena_dir}: {error}; "
                "run as the daemon's user, or set host.group"
            ) from error
        except OSError as error:
            raise PeerGone(f"cannot map the arena {welcome.arena_dir}: {error}") from error
        directory = DirectoryReader(arena.header)
        if directory.boot_id != welcome.boot_id:
            raise PeerGone("the daemon was restarted while attaching")
        return cls(welcome, arena, directory, lock)

    def open_slabs(self, user: SlabUser, closed: Callable[[int], None]) -> bool:
        """Let a device in; whether there is a GPU tier to open."""
        if not self.gpu_directory_at or not self.reads_directory:
            return False
        directory = DirectoryReader(self.arena.header[self.gpu_directory_at :])
        self.slabs = OpenSlabs(user, directory, self.gpu_slab_bytes, closed)
        return True

    @property
    def reads_directory(self) -> bool:
        """Whether lookups without a lease are sound here."""
        return STORE_ORDER_TRUSTED

    @property
    def is_boot_current(self) -> bool:
        """Whether the mapped header still belongs to the daemon life we attached to."""
        return self.directory.boot_id == self.boot_id

    def writer_begins(self) -> bool:
        """Before the first byte is written into the arena. False: it is over, write nothing."""
        with self._guard:
            if self.is_over:
                return False
            self._writers += 1
            return True

    def writer_ends(self) -> None:
        """After the last byte; pairs with a `writer_begins` that said True."""
        with self._guard:
            self._writers -= 1
            self._unlock_if_done()

    def end(self) -> None:
        """The stream is gone. Idempotent."""
        if self.slabs is not None:
            self.slabs.close()
        with self._guard:
            self.is_over = True
            self._unlock_if_done()

    def _unlock_if_done(self) -> None:
        if self.is_over and self._writers == 0 and self._lock is not None:
            self._lock.close()
            self._lock = None


class AttachStream:
    """Opened in the constructor; iterate for news after `welcome`.

    `close` from any thread ends it.
    """

    def __init__(self, stub: Any, engine: str, lock: ClientLock | None) -> None:
        self._requests: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        hello = pb.Hello(
            protocol_major=PROTOCOL_MAJOR,
            protocol_minor=PROTOCOL_MINOR,
            engine=engine,
            pid=os.getpid(),
            lock_file=lock.name if lock else "",
        )
        self._requests.put(pb.AttachRequest(hello=hello))
        try:
            self._call = stub.Attach(iter(self._requests.get, None))
        except ValueError as error:  # grpc's word for a closed channel
            raise PeerGone("the client was closed") from error

    def welcome(self, deadline_seconds: float) -> pb.Welcome:
        """The first answer. Raises PeerGone, VersionMismatch, Overloaded, Draining."""
        watchdog = Timer(deadline_seconds, self._call.cancel)
        watchdog.daemon = True
        watchdog.start()
        try:
            reply = next(self._call)
        except StopIteration:
            raise PeerGone("the daemon ended the attach stream at once") from None
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            watchdog.cancel()
        if reply.WhichOneof("kind") != "welcome":
            raise VersionMismatch(
                f"the daemon's first word was {reply.WhichOneof('kind')!r}, not a welcome"
            )
        welcome: pb.Welcome = reply.welcome
        if welcome.protocol_major != PROTOCOL_MAJOR:
            raise VersionMismatch(
                "the daemon speaks protocol "
                f"{welcome.protocol_major}.{welcome.protocol_minor}, this client "
                f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}; install the daemon's release of kvstore"
            )
        return welcome

    def news(self) -> Iterator[pb.AttachReply]:
        """What the daemon says until the stream ends, normally or by its death."""
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def say(self, word: pb.AttachRequest) -> None:
        """Tell the daemon, by and by; after the end of the stream nobody hears it."""
        self._requests.put(word)

    def close(self) -> None:
        """End the stream; idempotent."""
        self._requests.put(None)
        self._call.cancel()
