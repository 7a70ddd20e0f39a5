"""One view of a namespace's blocks, through a gateway or through the daemon on this machine.

Primitives: `Access` (what commands and scripts need: both sides offer it), `LocalAccess`,
`RemoteAccess`. Thin: the clients do the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from kvstore.client import Existence, KVClient, ListedPage, NamespaceHandle, RawNames
from kvstore.errors import PeerGone
from kvstore.remote_client import Declared, RemoteClient, RemoteNamespace
from kvstore.types import FINGERPRINT_BYTES, BlockStatus, BoolArray, ByteArray, NamespaceId

COMMIT_SECONDS_MAX = 60.0
PINS_PER_CALL = 1024


class Access(Protocol):
    """Blocks of one namespace. Every verb raises KVStoreError for what fails."""

    @property
    def declared(self) -> Declared: ...

    def exists(self, names: RawNames) -> Existence: ...

    def pages(self) -> Iterator[ListedPage]: ...

    def get(self, names: RawNames, into: Sequence[ByteArray], start: int) -> BoolArray:
        """bool [n]: which of blocks [start, start + n) came."""

    def put(
        self, names: RawNames, rows: Sequence[ByteArray], start: int
    ) -> tuple[Sequence[BlockStatus], str]:
        """A status a block of [start, start + n), and why some were not stored."""

    def pin(self, names: RawNames, seconds: float, hard: bool) -> tuple[int, str]:
        """How many leading blocks are pinned, and why not all."""

    def unpin(self, names: RawNames) -> int: ...


class RemoteAccess:
    """Through a gateway."""

    def __init__(self, client: RemoteClient, space: NamespaceId | Declared) -> None:
        """Raises NamespaceUnknown, AccessDenied, Unavailable."""
        self._remote: RemoteNamespace = client.namespace(space)
        self.declared = self._remote.declared

    def exists(self, names: RawNames) -> Existence:
        return self._remote.exists(names)

    def pages(self) -> Iterator[ListedPage]:
        return self._remote.list_all()

    def get(self, names: RawNames, into: Sequence[ByteArray], start: int) -> BoolArray:
        return self._remote.get(names, into, start=start).found

    def put(
        self, names: RawNames, rows: Sequence[ByteArray], start: int
    ) -> tuple[Sequence[BlockStatus], str]:
        result = self._remote.put(names, rows, start=start)
        return result.statuses, result.reason

    def pin(self, names: RawNames, seconds: float, hard: bool) -> tuple[int, str]:
        pinned = self._remote.pin(names, seconds, hard=hard)
        return pinned.blocks, pinned.reason

    def unpin(self, names: RawNames) -> int:
        return self._remote.unpin(names)


class LocalAccess:
    """Through the daemon on this machine, as an engine would."""

    def __init__(self, client: KVClient, space: NamespaceId | Declared, tenant: str) -> None:
        """Raises NamespaceUnknown, NamespaceConflict, Unavailable."""
        self._tenant = tenant
        if isinstance(space, Declared):
            self._handle = client.namespace(
                space.id,
                space.layout,
                kind=space.kind,
                window_tokens=space.window_tokens,
                label=space.label,
            )
        else:
            self._handle = client.known_namespace(space)
        self.declared = _declared(self._handle)

    def exists(self, names: RawNames) -> Existence:
        return self._handle.exists(names)

    def pages(self) -> Iterator[ListedPage]:
        page = self._handle.list()
        yield page
        while page.cursor:
            page = self._handle.list(page.cursor)
            yield page

    def get(self, names: RawNames, into: Sequence[ByteArray], start: int) -> BoolArray:
        """Blocks one by one where they stand alone; from the first on in a chain."""
        found = np.zeros(len(into), np.bool_)
        if self.declared.is_chain:
            found[: self._handle.load(names, into, start=start).blocks] = True
            return found
        for at, row in enumerate(into, start):
            name = names.joined[at * FINGERPRINT_BYTES : (at + 1) * FINGERPRINT_BYTES]
            one = self._handle.load(RawNames(names.namespace, name), [row])
            found[at - start] = one.blocks == 1
        return found

    def put(
        self, names: RawNames, rows: Sequence[ByteArray], start: int
    ) -> tuple[Sequence[BlockStatus], str]:
        ticket = self._handle.store(names, rows, start=start)
        try:
            return ticket.result(COMMIT_SECONDS_MAX), ticket.reason
        except TimeoutError as error:
            raise PeerGone(f"put: {error}") from error

    def pin(self, names: RawNames, seconds: float, hard: bool) -> tuple[int, str]:
        done = 0
        for page in _pages(names):
            pinned, reason = self._handle.pin(page, seconds, hard=hard, tenant=self._tenant)
            done += pinned
            if reason:
                return done, reason
        return done, ""

    def unpin(self, names: RawNames) -> int:
        return sum(self._handle.unpin(page, tenant=self._tenant) for page in _pages(names))


def _pages(names: RawNames) -> Iterator[RawNames]:
    step = PINS_PER_CALL * FINGERPRINT_BYTES
    for at in range(0, len(names.joined), step):
        yield RawNames(names.namespace, names.joined[at : at + step])


def _declared(handle: NamespaceHandle) -> Declared:
    return Declared(handle.id, handle.layout, handle.kind, handle.window_tokens, handle.label)
