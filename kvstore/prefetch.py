"""Blocks that will be asked for soon, brought up while nobody else needs the bandwidth.

Primitives of `Prefetcher`:
  `announce`   names of a request that waits in an engine's queue
  `probe`      what a plan left on NVMe: some of it comes up later, which also shows how fast the
               tier is now
  `next`       the next few blocks to bring up, if no load runs

A hint, never a promise: the queue is bounded, what is not worth the room or went meanwhile is
dropped and counted. Runs on the daemon's loop; moves nothing itself.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvstore.matching import GroupMatch
from kvstore.namespaces import Namespace
from kvstore.store import ABSENT, READY, Store
from kvstore.types import FINGERPRINT_BYTES, IntArray

QUEUED_BLOCKS_MAX = 8192
STEP_BYTES_MAX = 32 << 20
"""Brought up in one go: a load that comes meanwhile waits for no more than this."""
PROBED_BLOCKS = 8
HOST_SHARE_MAX = 0.25
"""Share of the host tier that one announcement may fill."""


class Prefetcher:
    """The queue, in the order of arrival."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: deque[tuple[Namespace, bytes]] = deque()
        self.queued_blocks = 0

    def announce(self, namespace: Namespace, names: bytes) -> int:
        """Queue the blocks of this chain that lie on NVMe only; how many of its blocks are, or will
        be, in the host tier.
        """
        rows = self._store.find([(namespace, names)], 0).groups[0].rows
        here = int(np.count_nonzero(self._store.catalog.host_state[rows] != ABSENT))
        return here + self._enqueue(namespace, self._below(rows))

    def probe(self, namespace: Namespace, rows: IntArray) -> None:
        """A plan decided not to load `rows`."""
        self._enqueue(namespace, self._below(rows)[:PROBED_BLOCKS])

    def _below(self, rows: IntArray) -> IntArray:
        columns = self._store.catalog
        below: IntArray = rows[
            (columns.host_state[rows] == ABSENT) & (columns.nvme_state[rows] == READY)
        ]
        return below

    def _enqueue(self, namespace: Namespace, rows: IntArray) -> int:
        store = self._store
        if not len(rows):
            return 0
        share = HOST_SHARE_MAX * store.config.host.bytes / namespace.slot_bytes
        most = int(min(share, QUEUED_BLOCKS_MAX - self.queued_blocks))
        accepted = rows[: max(most, 0)]
        if len(accepted):
            self._queue.append((namespace, store.catalog.fingerprints[accepted].tobytes()))
            self.queued_blocks += len(accepted)
        store.counters.add("prefetch_blocks:accepted", len(accepted))
        store.counters.add("prefetch_blocks:refused", len(rows) - len(accepted))
        return len(accepted)

    def next(self, now: float) -> GroupMatch | None:
        """The next step, or None when nothing waits. The caller knows that no load runs."""
        while self._queue:
            namespace, names = self._queue.popleft()
            size = max(1, STEP_BYTES_MAX // namespace.slot_bytes) * FINGERPRINT_BYTES
            step, rest = names[:size], names[size:]
            if rest:
                self._queue.appendleft((namespace, rest))
            self.queued_blocks -= len(step) // FINGERPRINT_BYTES
            found = self._store.rows_of(namespace, step)
            rows = self._below(found[self._store.is_readable(found)])
            rows = rows[self._store.policy.promote(rows, now)] if len(rows) else rows
            counters, asked = self._store.counters, len(step) // FINGERPRINT_BYTES
            counters.add("prefetch_blocks:begun", len(rows))
            counters.add("prefetch_blocks:dropped", asked - len(rows))
            if len(rows):
                return GroupMatch(namespace, 0, rows)
        return None
