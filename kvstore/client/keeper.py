"""The client's housekeeper: what can wait happens on its thread, in batches.

Primitives of `Keeper`:
  `release(life, lease)`      leases that ended
  `report(life, id, names)`   uses seen through the directory; bounded, what does not fit is counted
  `missed(blocks, tokens)`    asked for, not found, and asked nobody for
  `abort(life, reservation)`  reservations given back: the word that our copies into them ended
  `attend(task)`              something to look after every turn (slots kept in reserve)
  `wake()`                    look after it now

May not block a caller: every method only queues.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol, TypeVar

from kvstore.client.life import Life
from kvstore.client.session import Session
from kvstore.client.timings import Timings
from kvstore.errors import KVStoreError, ReservationUnknown
from kvstore.rpc import control_pb2 as pb
from kvstore.types import FINGERPRINT_BYTES

GATHER_SECONDS = 0.02
"""How long a release or an abort may wait for company."""
TURN_SECONDS = 0.25
"""Time between two looks at what needs renewing and reporting: a load does not wake the thread."""
REPORT_BLOCKS_MAX = 65_536
"""Blocks in one report, and blocks that may wait for one."""

RETRY_SECONDS = 1.0
"""Pause before an abort that found the daemon busy is sent again: its slots are in quarantine until
then."""

Item = TypeVar("Item")


class Attended(Protocol):
    """Something the keeper looks after."""

    def attend(self, life: Life, now: float) -> None:
        """One turn; may make calls. Raises KVStoreError when the daemon does not play along."""

    def forget(self) -> None:
        """No daemon is attached: let go of what belonged to the last one, its memory above all."""


class Keeper:
    """One daemon thread; `close` says the last words."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._releases: deque[tuple[Life, int]] = deque()
        self._aborts: deque[tuple[Life, int]] = deque()
        self._uses: deque[tuple[Life, bytes, bytes]] = deque()
        self._waiting_blocks = 0
        self._missed_blocks = self._missed_tokens = 0
        self._lock = threading.Lock()
        self.timings = Timings(session)
        self._attended: list[Attended] = [self.timings]
        self._wake = threading.Event()
        self._due = float("inf")
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-keeper", daemon=True)

    def start(self) -> None:
        """Not done for a client that never attaches: nothing is ever queued then."""
        self._thread.start()

    def attend(self, task: Attended) -> None:
        self._attended.append(task)

    def wake(self) -> None:
        self._wake.set()

    def release(self, life: Life, lease: int) -> None:
        self._releases.append((life, lease))
        self._soon()

    def abort(self, life: Life, reservation: int) -> None:
        self._aborts.append((life, reservation))
        self._soon()

    def report(self, life: Life, namespace: bytes, names: bytes) -> None:
        """`names`: joined fingerprints that were read."""
        blocks = len(names) // FINGERPRINT_BYTES
        with self._lock:
            fits = self._waiting_blocks + blocks <= REPORT_BLOCKS_MAX
            if fits:
                self._waiting_blocks += blocks
                self._uses.append((life, namespace, names))
        if not fits:
            self._session.tally.add(reports_dropped=blocks)

    def missed(self, blocks: int, tokens: int) -> None:
        with self._lock:
            self._missed_blocks += blocks
            self._missed_tokens += tokens

    def close(self, timeout: float) -> None:
        """Send what is queued, then end."""
        self._is_closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    # ------------------------------------------------------------------ the thread

    def _soon(self) -> None:
        """Within GATHER_SECONDS; the thread is woken once for all that gather meanwhile."""
        if self._due == float("inf"):
            self._due = time.monotonic() + GATHER_SECONDS
            self._wake.set()

    def _run(self) -> None:
        turn = time.monotonic()
        while not self._is_closing:
            now = time.monotonic()
            self._wake.wait(max(0.0, min(self._due, turn + TURN_SECONDS) - now))
            was_woken = self._wake.is_set()
            self._wake.clear()
            now = time.monotonic()
            if was_woken or now >= turn + TURN_SECONDS:
                turn = now
                self._look_after(now)
            if now >= self._due or now == turn:
                self._send()
        self._send()

    def _look_after(self, now: float) -> None:
        life = self._session.life
        for task in list(self._attended):
            if life is None:
                task.forget()
                continue
            try:
                task.attend(life, now)
            except Exception as error:  # noqa: BLE001
                self._session.excuse(life, error)

    def _send(self) -> None:
        self._due = float("inf")
        life = self._session.life
        if life is None:
            self._releases.clear()
            self._aborts.clear()
            self._drop_reports()
            return
        for step in (self._send_releases, self._send_aborts, self._send_reports):
            try:
                step(life)
            except Exception as error:  # noqa: BLE001
                self._session.excuse(life, error)

    def _send_releases(self, life: Life) -> None:
        """A release that fails is not repeated: the lease runs out by itself."""
        leases = [lease for owner, lease in _drained(self._releases) if owner is life]
        if leases:
            request = pb.ReleaseRequest(client=life.client, leases=leases)
            self._session.call_until_closed("Release", request)
            self._session.tally.add(leases_released=len(leases))

    def _send_aborts(self, life: Life) -> None:
        while self._aborts:
            owner, reservation = self._aborts[0]
            if owner is life:
                request = pb.AbortRequest(client=life.client, reservation=reservation)
                try:
                    self._session.call_until_closed("Abort", request)
                except ReservationUnknown:
                    pass  # ended by itself, with nothing of ours left to acknowledge
                except KVStoreError:
                    self._due = time.monotonic() + RETRY_SECONDS
                    raise
            self._aborts.popleft()

    def _send_reports(self, life: Life) -> None:
        with self._lock:
            uses, self._waiting_blocks = _drained(self._uses), 0
            missed, self._missed_blocks = self._missed_blocks, 0
            tokens, self._missed_tokens = self._missed_tokens, 0
        by_namespace: dict[bytes, list[bytes]] = {}
        for owner, namespace, names in uses:
            if owner is life:
                by_namespace.setdefault(namespace, []).append(names)
            else:
                self._session.tally.add(reports_dropped=len(names) // FINGERPRINT_BYTES)
        if not by_namespace and not missed:
            return
        groups = [
            pb.Group(namespace=namespace, fingerprints=b"".join(names))
            for namespace, names in by_namespace.items()
        ]
        blocks = missed + sum(len(group.fingerprints) for group in groups) // FINGERPRINT_BYTES
        request = pb.ReportRequest(
            client=life.client, used=groups, missed_blocks=missed, missed_tokens=tokens
        )
        try:
            self._session.call_until_closed("Report", request)
        except KVStoreError:
            self._session.tally.add(reports_dropped=blocks)
            raise
        self._session.tally.add(reported=blocks)

    def _drop_reports(self) -> None:
        with self._lock:
            blocks = self._waiting_blocks + self._missed_blocks
            self._uses.clear()
            self._waiting_blocks = self._missed_blocks = self._missed_tokens = 0
        self._session.tally.add(reports_dropped=blocks)


def _drained(items: deque[Item]) -> list[Item]:
    return [items.popleft() for _ in range(len(items))]
