"""What a client measured, told to the daemon now and then: the costs it plans with.

Primitives of `Timings`: `prefill`, `copy`. Adding never waits and never fails; what nobody fetches
in time is dropped, oldest first.
"""

from __future__ import annotations

from collections import deque

from kvstore.client.life import Life
from kvstore.client.session import Session
from kvstore.rpc import control_pb2 as pb

WAITING_MAX = 64
COPIED_BYTES_MIN = 1 << 20
"""Shorter copies say more about the scheduler than about memory."""


class Timings:
    """Attended by the keeper; thread-safe."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._prefills: deque[pb.PrefillTime] = deque(maxlen=WAITING_MAX)
        self._copies: deque[pb.CopyTime] = deque(maxlen=WAITING_MAX)

    def prefill(self, namespace: bytes, start_tokens: int, end_tokens: int, seconds: float) -> None:
        """The engine computed tokens [start, end) of a prompt and waited for nothing."""
        self._prefills.append(
            pb.PrefillTime(
                namespace=namespace,
                start_tokens=start_tokens,
                end_tokens=end_tokens,
                seconds=seconds,
            )
        )

    def copy(self, count_bytes: int, seconds: float) -> None:
        """So many bytes were copied out of host memory in one go."""
        if count_bytes >= COPIED_BYTES_MIN:
            self._copies.append(pb.CopyTime(bytes=count_bytes, seconds=seconds))

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be told."""
        return not self._prefills and not self._copies

    def attend(self, life: Life, now: float) -> None:
        """Send what waits."""
        prefills = [self._prefills.popleft() for _ in range(len(self._prefills))]
        copies = [self._copies.popleft() for _ in range(len(self._copies))]
        if not prefills and not copies:
            return
        for name in {time.namespace for time in prefills} - life.namespaces.keys():
            prefills = [time for time in prefills if time.namespace != name]
        request = pb.ReportRequest(client=life.client, prefills=prefills, copies=copies)
        self._session.call_until_closed("Report", request)

    def forget(self) -> None:
        """The measurements keep for the next daemon life."""
