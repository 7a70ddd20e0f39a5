"""Parts of a daemon that normally have threads or shared memory of their own, for one thread.

Primitives:
  `MemoryArena`     an Arena in private memory; which client processes live is the test's word
  `SteppedIndex`    the real index; its commits happen when `Commits` says
  `SteppedNvme`     the real NVMe tier over it; looking after the disk happens when asked
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kvstore.arena import Arena
from kvstore.arena.owner import ArenaStatistics
from kvstore.blockio import page_aligned
from kvstore.errors import check
from kvstore.index import Index
from kvstore.index.index import _Job
from kvstore.tier.nvme import NvmeTier
from kvstore.types import ByteArray, IntArray

if TYPE_CHECKING:
    from pathlib import Path

    import lmdb


class MemoryArena(Arena):
    """One region of private memory. `living` are the lock files that a process holds."""

    def __init__(self, bytes_total: int, header_bytes: int) -> None:
        self.region_bytes = bytes_total
        self.memory = page_aligned(bytes_total)
        self.header_memory = page_aligned(header_bytes)
        self.living: set[str] = set()
        self.collapsed_bytes = 0

    def view(self, offset: int, length: int) -> ByteArray:
        check(offset >= 0 and offset + length <= len(self.memory), "a view lies in the arena")
        return self.memory[offset : offset + length]

    @property
    def quarantined_regions(self) -> tuple[int, ...]:
        return ()

    def acknowledge_client(self, lock_file: str) -> None:
        """Nobody is left from an earlier life."""

    def recheck_clients(self) -> bool:
        return True

    def client_gone(self, lock_file: str) -> bool:
        return lock_file not in self.living

    def collapse_next(self) -> bool:
        return False

    def discard(self, offset: int, length: int) -> bool:
        self.memory[offset : offset + length] = 0
        return True

    def populate(self, offset: int, length: int) -> bool:
        return True

    def statistics(self) -> ArenaStatistics:
        return ArenaStatistics(len(self.memory), len(self.header_memory), 1, 0, 0, 0, 0, "")

    def close(self, unlink: bool = True) -> None:
        """The memory goes with its last view."""


class Commits:
    """When an index commits. `schedule(commit)` calls `commit` later; None: at once."""

    def __init__(self) -> None:
        self.schedule: Callable[[Callable[[], None]], object] | None = None
        self.fail: Callable[[], None] = lambda: None
        """Called before each commit of a group; may raise a TierError."""


class _Awaited(Future[None]):
    """Who waits for it without a loop makes it happen: there is no other thread to do it."""

    def __init__(self, commit: Callable[[], None]) -> None:
        super().__init__()
        self._commit = commit

    def result(self, timeout: float | None = None) -> None:
        if not self.done():
            self._commit()
        return super().result(timeout)


class SteppedIndex(Index):
    """No writer thread: a submit asks `commits` for a commit of all that waits by then."""

    commits = Commits()

    def __init__(self, path: Path, environment: lmdb.Environment, owner_fd: int) -> None:
        self._jobs: deque[_Job] = deque()
        self._is_due = False
        super().__init__(path, environment, owner_fd)
        self._queue.put(None)
        self._writer.join()
        self._is_closed = False

    def _enqueue(self, job: _Job) -> None:
        job.done = _Awaited(self.commit)
        job.done.set_running_or_notify_cancel()
        self._jobs.append(job)
        if self.commits.schedule is None or job.is_urgent:
            self.commit()
        elif not self._is_due:
            self._is_due = True
            self.commits.schedule(self.commit)

    def commit(self) -> None:
        """Everything submitted so far becomes durable, in one transaction."""
        self._is_due = False
        if self._is_closed or not self._jobs:
            return
        group = list(self._jobs)
        self._jobs.clear()
        self._commit(group)

    def _transact(self, jobs: list[_Job]) -> None:
        self.commits.fail()
        super()._transact(jobs)

    def close(self) -> None:
        self.commit()
        super().close()

    def die(self) -> None:
        """The process was killed: what was not committed never is."""
        if not self._is_closed:
            self._is_closed = True
            self._environment.close()
            os.close(self._owner_fd)


class SteppedNvme(NvmeTier):
    """Its index is a SteppedIndex; `tend` looks at the disk itself."""

    index_type = SteppedIndex

    def tend(self) -> IntArray:
        self.maintain()
        return self.over_cap_slots()

    def die(self) -> None:
        """The process was killed. Files stay as they are."""
        self._is_closing = True
        self._wake.set()
        self._tender.join()
        index = self._ledger._index
        assert isinstance(index, SteppedIndex)
        index.die()
