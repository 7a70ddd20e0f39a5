"""Attached client processes: who is there, who left, and when a left one is proved gone.

Primitives of `Sessions`: `open`, `close`, `get`, `of_engine`, `waiting`, `gone`, `tell_all`.
A broken stream says that a client left; only its kernel lock says that its process can write no
more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.errors import Overloaded, PeerGone
from kvstore.rpc import control_pb2 as pb
from kvstore.types import ClientId


@dataclass
class Session:
    """One attached client. `outbox` holds what the daemon has to tell it."""

    client: ClientId
    engine: str
    pid: int
    lock_file: str
    pins_arena: bool = False
    """A device of its reads the arena's pages as they are now: none may be given back."""
    outbox: asyncio.Queue[pb.AttachReply | None] = field(
        default_factory=lambda: asyncio.Queue(maxsize=16)
    )

    def tell(self, reply: pb.AttachReply) -> bool:
        """Queue a message; False for a client that does not read, which is not waited for."""
        if self.outbox.full():
            return False
        self.outbox.put_nowait(reply)
        return True


class Sessions:
    """All sessions of one daemon life, on its loop."""

    def __init__(self, clients_max: int, ids: Callable[[], int]) -> None:
        """`ids` names clients: never zero, never the same again."""
        self._clients_max = clients_max
        self._ids = ids
        self._attached: dict[ClientId, Session] = {}
        self._left: dict[ClientId, Session] = {}

    def __len__(self) -> int:
        return len(self._attached)

    def open(self, hello: pb.Hello) -> Session:
        """Register a client. Raises Overloaded."""
        if len(self._attached) >= self._clients_max:
            raise Overloaded(
                f"{self._clients_max} clients are attached already; raise limits.clients_max"
            )
        if len(self._left) >= self._clients_max:
            raise Overloaded(
                f"{len(self._left)} clients left whose processes still hold their lock files; "
                "end those processes"
            )
        client = ClientId(self._ids())
        session = Session(client, hello.engine or f"pid-{hello.pid}", hello.pid, hello.lock_file)
        self._attached[client] = session
        return session

    def get(self, client: int) -> Session:
        """Raises PeerGone for a client of another daemon life, or one whose stream ended."""
        session = self._attached.get(ClientId(client))
        if session is None:
            raise PeerGone("this client is not attached (any more): attach again")
        return session

    def close(self, session: Session) -> None:
        """Its stream ended."""
        if self._attached.pop(session.client, None) is not None:
            self._left[session.client] = session

    def of_engine(self, engine: str) -> set[ClientId]:
        """Clients of one engine whose process may still touch the arena."""
        return {
            session.client
            for session in (*self._attached.values(), *self._left.values())
            if session.engine == engine and session.lock_file
        }

    @property
    def pins_arena(self) -> bool:
        """Whether a process that may live keeps the arena pinned."""
        return any(s.pins_arena for s in (*self._attached.values(), *self._left.values()))

    def waiting(self) -> list[Session]:
        """Clients that left and are not yet known to be gone."""
        return list(self._left.values())

    def gone(self, session: Session) -> None:
        """The process is proved gone."""
        self._left.pop(session.client, None)

    def tell_all(self, reply: pb.AttachReply) -> None:
        """Queue a message for everyone; a client that does not read is not waited for."""
        for session in self._attached.values():
            session.tell(reply)

    def end_all(self) -> None:
        """Close every stream from our side."""
        for session in self._attached.values():
            if session.outbox.full():
                session.outbox.get_nowait()
            session.outbox.put_nowait(None)

    def statistics(self) -> dict[str, object]:
        return {
            "attached": len(self._attached),
            "left_but_maybe_alive": len(self._left),
            "clients": [
                {"engine": session.engine, "pid": session.pid}
                for session in self._attached.values()
            ],
        }
