"""Commits off the caller's path: one thread, in the order the stores were made.

Primitives:
  `StoreTicket`   what a caller holds; `result()` waits for the outcome of every block
  `Commit`        blocks that lie filled in their slots, waiting to be published
  `Committer`     the thread and its bounded queue

Parents are committed before their children because the queue is first in, first out; a child sent
first would be refused for want of its parent. May not copy bytes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.client.life import Life
from kvstore.client.reasons import reason_of
from kvstore.client.session import Session
from kvstore.client.spare import Reserved, SpareSlots
from kvstore.errors import KVStoreError, PeerGone
from kvstore.logs import get_logger
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc.wire import pack_u64, unpack_u8
from kvstore.types import BlockStatus

QUEUE_COMMITS_MAX = 1024
"""Stores beyond it are refused until the daemon has caught up."""
COMMIT_SECONDS_MIN = 5.0
"""A commit waits for checksums of many bytes; nobody waits for the commit."""
_log = get_logger("client")


class StoreTicket:
    """One store's outcome. `statuses` of blocks still under way read GRANTED until `is_done`."""

    def __init__(self, blocks: int) -> None:
        self._statuses = [BlockStatus.GRANTED] * blocks
        self._open = set(range(blocks))
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._reason = ""
        self._callbacks: list[Callable[[], None]] = []
        if not blocks:
            self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def reason(self) -> str:
        """Why blocks were not stored, "" if nothing is known to have gone wrong."""
        return self._reason

    def result(self, timeout: float | None = None) -> tuple[BlockStatus, ...]:
        """A status a block; STORED, WAITING and PRESENT are success.

        Raises TimeoutError after `timeout` seconds.

        Ends by itself: every commit queued before it has a deadline, and a dead daemon ends them
        all.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the store is not committed after {timeout} s; ask again")
        return tuple(self._statuses)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once all is known: at once, or on a thread of the client.

        It may not block.
        """
        with self._lock:
            if self._open:
                self._callbacks.append(callback)
                return
        callback()

    def settle(
        self, blocks: Sequence[int], statuses: Sequence[BlockStatus], reason: str = ""
    ) -> None:
        """Outcome of `blocks`, for whoever stores them. The last word counts."""
        with self._lock:
            for block, status in zip(blocks, statuses, strict=True):
                self._statuses[block] = status
            self._open.difference_update(blocks)
            self._reason = self._reason or reason
            if self._open:
                return
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001  # the caller's own: its loop may be closed
                _log.exception("a callback of a store failed")


@dataclass(frozen=True)
class Commit:
    """Blocks of one reservation that lie whole in their slots.

    An anonymous one names consecutive blocks only.
    """

    life: Life
    reservation: int
    spare: tuple[SpareSlots, Reserved] | None
    """Whose slots they are when the reservation is anonymous; None: a named one, which ends with
    its last block."""
    parent: bytes
    names: bytes
    offsets: Sequence[int]
    ticket: StoreTicket
    blocks: Sequence[int]
    """Which of the ticket's blocks these are."""
    hint_classes: bytes = b""
    """A byte a block, or nothing."""


class Committer:
    """`abort` queues an Abort: the word that our copies into a failed reservation have ended."""

    def __init__(self, session: Session, abort: Callable[[Life, int], None]) -> None:
        self._session = session
        self._abort = abort
        self._deadline_seconds = max(session.deadline_seconds, COMMIT_SECONDS_MIN)
        self._queue: deque[Commit] = deque()
        self._changed = threading.Condition()
        self._is_busy = False
        self._busy_since = 0.0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-commit", daemon=True)

    def start(self) -> None:
        """Not done for a client that never attaches: nothing is ever queued then."""
        self._thread.start()

    @property
    def is_behind(self) -> bool:
        """Too many commits wait, or one has waited longer than the client's deadline."""
        overdue = time.monotonic() - self._session.deadline_seconds
        return len(self._queue) >= QUEUE_COMMITS_MAX or (
            self._is_busy and self._busy_since < overdue
        )

    def put(self, commits: Sequence[Commit]) -> None:
        """Queue blocks that lie whole in their slots. After close they are DROPPED at once."""
        with self._changed:
            if not self._is_closing:
                self._queue.extend(commits)
                self._changed.notify_all()
                return
        for commit in commits:
            self._settle(commit, PeerGone("the client was closed"))

    def wait_idle(self, timeout: float) -> bool:
        """Whether everything queued was answered, waiting up to `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._is_busy, timeout)

    def close(self, timeout: float) -> None:
        """Send what is queued for up to `timeout` seconds; the rest is DROPPED."""
        until = time.monotonic() + timeout
        self.wait_idle(timeout)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(max(0.1, until - time.monotonic()))

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                # Not kept in a variable: it would hold on to the memory of a daemon that left.
                self._send(self._queue.popleft())
        finally:
            # Also when a bug of ours ends this thread: nobody may wait for it in vain.
            with self._changed:
                self._is_closing, self._is_busy = True, False
                self._changed.notify_all()
            while self._queue:
                self._settle(self._queue.popleft(), PeerGone("the client was closed"))

    def _wait_for_work(self) -> bool:
        """False: closed, and nothing is left. Whoever waits for idleness is told in between."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            self._is_busy, self._busy_since = bool(self._queue), time.monotonic()
            return self._is_busy

    def _send(self, commit: Commit) -> None:
        is_last = False
        if commit.spare:
            slots, reserved = commit.spare
            is_last = slots.settle(reserved, len(commit.offsets))
        request = pb.CommitRequest(
            client=commit.life.client,
            reservation=commit.reservation,
            all_ranks=True,
            parent=commit.parent,
            fingerprints=commit.names,
            offsets=pack_u64(commit.offsets),
            end=is_last,
            hint_classes=commit.hint_classes,
        )
        try:
            if commit.life.is_over or self._is_closing:
                raise PeerGone("the daemon went away before the commit")
            reply = self._session.call_until_closed("Commit", request, self._deadline_seconds)
            self._settle(commit, unpack_statuses(reply.statuses, len(commit.offsets)))
        except Exception as error:  # noqa: BLE001  # nobody may wait for a commit in vain
            if commit.spare:
                slots.failed(reserved)
            else:
                self._abort(commit.life, commit.reservation)
            self._settle(commit, self._session.excuse(commit.life, error))

    def _settle(self, commit: Commit, outcome: list[BlockStatus] | KVStoreError) -> None:
        if isinstance(outcome, KVStoreError):
            statuses, reason = [BlockStatus.DROPPED] * len(commit.offsets), reason_of(outcome)
        else:
            statuses, reason = outcome, ""
        stored = sum(status in (BlockStatus.STORED, BlockStatus.WAITING) for status in statuses)
        present = statuses.count(BlockStatus.PRESENT)
        self._session.tally.add(
            store_stored=stored,
            store_present=present,
            store_refused=len(statuses) - stored - present,
        )
        commit.ticket.settle(commit.blocks, statuses, reason)


def unpack_statuses(data: bytes, count: int) -> list[BlockStatus]:
    """A status a block; one that a newer daemon invented reads REFUSED."""
    known = set(BlockStatus)
    return [
        BlockStatus(value) if value in known else BlockStatus.REFUSED
        for value in unpack_u8(data, "statuses", count).tolist()
    ]
