"""Loads that pass through the host tier without staying there.

Primitives of `Staging`: `opened` (before such a load begins), `ended` (its lease was released),
`tend` (leases that ended otherwise).

What a staging load brings up from NVMe leaves the host tier with its lease, so that a scan uses a
few slots again and again and pushes nothing else out. Of any other load so do the blocks that the
policy would not keep there. A block stays when somebody else used it meanwhile. Runs on the
daemon's loop; reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.arrays import distinct
from kvstore.matching import GroupMatch
from kvstore.store import NO_ROWS, READY, Store
from kvstore.types import IntArray, LeaseId


class Staging:
    """What each staging load brought up, by lease."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of_lease: dict[LeaseId, tuple[IntArray, IntArray]] = {}
        """Rows, and how often each had been used when the load began."""

    def opened(
        self, lease: LeaseId, groups: Sequence[GroupMatch], now: float, *, whole: bool
    ) -> None:
        """The rows of `groups` that lie on NVMe only will be brought up for this lease alone: all
        of them (`whole`), or those that are not worth keeping.
        """
        self._store.apply_touches(now)  # the match of this very load is no use by somebody else
        rows = distinct(np.concatenate([NO_ROWS, *(group.rows for group in groups)]))
        columns = self._store.catalog
        below = rows[(columns.host_state[rows] != READY) & (columns.nvme_state[rows] == READY)]
        if not whole:
            below = below[~self._store.policy.promote(below, now)]
        if len(below):
            self._of_lease[lease] = (below, columns.uses[below].copy())

    def ended(self, lease: LeaseId, now: float) -> None:
        """Its lease is over: drop what nobody else came to use. Unknown leases are a no-op."""
        rows, uses = self._of_lease.pop(lease, (NO_ROWS, NO_ROWS))
        store, columns = self._store, self._store.catalog
        unwanted = (columns.host_state[rows] == READY) & (columns.nvme_state[rows] == READY)
        unwanted &= store.is_idle(rows) & (columns.uses[rows] == uses)
        store.drop_host(rows[unwanted], "staged", now)

    def tend(self, now: float) -> None:
        """Loads whose lease ran out, or whose client left."""
        leases = self._store.catalog.leases
        over = [lease for lease, (rows, _) in self._of_lease.items() if not leases[rows].any()]
        for lease in over:
            self.ended(lease, now)
