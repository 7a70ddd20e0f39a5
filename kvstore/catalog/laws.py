"""What must hold between the catalog's columns. Reads, raises InvariantViolated, changes nothing.

Primitives of `CatalogLaws`: `check_names`, `check_holders`, `check_checksums`, `check_ways` for
some live rows, `check_counts` over all rows in steps. Used by `Catalog.check_integrity` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.columns import FREE_ROW, Family, Names, Replicas
from kvstore.errors import check
from kvstore.types import ByteArray, IntArray, ReplicaState, UIntArray

_ABSENT, _READY = int(ReplicaState.ABSENT), int(ReplicaState.READY)
_DRAINING = int(ReplicaState.DRAINING)
_COUNT_ROWS = 8192


@dataclass(slots=True, frozen=True)
class CatalogLaws:
    """The parts of one catalog, as they are now; `rows` are live ones, int64[n]."""

    names: Names
    family: Family
    host: Replicas
    nvme: Replicas

    def check_names(self, rows: IntArray, fingerprints: ByteArray) -> None:
        """A row is found by its name, and a slot and its row name each other."""
        found = self.names.find(fingerprints.tobytes())
        check(found == rows.tolist(), "a live row is found by its name")
        for replicas in (self.host, self.nvme):
            slots = replicas.slot[rows]
            held = replicas.state[rows] != _ABSENT
            check((slots[~held] == -1).all(), "an absent replica has no slot")
            owners = replicas.by_slot.rows_of(slots[held])
            same = owners == rows[held]
            check(same.all(), "I2 I6 one slot, one row", slots=slots[held][~same][:8].tolist())

    def check_holders(
        self, rows: IntArray, leases: NDArray[np.int32], pins: NDArray[np.int32]
    ) -> None:
        """I4: what is leased does not leave; a copy may, while the one in the other tier stays."""
        check((leases >= 0).all() and (pins >= 0).all(), "no negative lease or pin")
        for replicas, others in ((self.host, self.nvme), (self.nvme, self.host)):
            leaving = (replicas.state[rows] == _DRAINING) & (leases > 0)
            leaving &= others.state[rows] != _READY
            check(not leaving.any(), "I4 a leased replica stays", rows=rows[leaving][:8].tolist())

    def check_checksums(self, rows: IntArray, checksums: UIntArray) -> None:
        """I3: NVMe replicas are READY only with known checksums."""
        unknown = (self.nvme.state[rows] == _READY) & ~checksums.any(axis=1)
        check(not unknown.any(), "I3 checksums are known", rows=rows[unknown][:8].tolist())

    def check_ways(self, rows: IntArray) -> None:
        """I5: NVMe is prefix-closed by itself; a host replica's parent is in some tier."""
        rows = rows[self.family.parent[rows] >= 0]
        parents = self.family.parent[rows]
        on_nvme = self.nvme.state[parents] != _ABSENT
        anywhere = on_nvme | (self.host.state[parents] != _ABSENT)
        lost = (self.nvme.state[rows] == _READY) & ~on_nvme
        lost |= (self.host.state[rows] == _READY) & ~anywhere
        check(not lost.any(), "I5 a way leads to every block", rows=rows[lost][:8].tolist())

    def check_counts(self, end: int, changes: Callable[[], int]) -> Generator[None, None, bool]:
        """Children and replica counters of the first `end` rows are the sums they claim to be.

        False when `changes()` moved between two steps: nothing can be said then.
        """
        before = changes()
        parent = self.family.parent
        sums = np.zeros((3, end), np.int32)
        tiers = (self.host, self.nvme)
        found = [0, 0]
        for start in range(0, end, _COUNT_ROWS):
            rows = slice(start, min(start + _COUNT_ROWS, end))
            parents = parent[rows].astype(np.int64)
            np.add.at(sums[2], parents[parents >= 0], 1)
            for index, tier in enumerate(tiers):
                held = tier.state[rows] != _ABSENT
                found[index] += int(np.count_nonzero(held))
                np.add.at(sums[index], parents[held & (parents >= 0)], 1)
            yield
            if changes() != before:
                return False
        said = (self.host.children, self.nvme.children, self.family.children)
        for start in range(0, end, _COUNT_ROWS):
            rows = slice(start, min(start + _COUNT_ROWS, end))
            live = parent[rows] != FREE_ROW
            for column, total in zip(said, sums[:, rows], strict=True):
                check((column[rows][live] == total[live]).all(), "children counters")
            yield
            if changes() != before:
                return False
        check(found == [tier.count for tier in tiers], "replica counters", found=found)
        free = int(np.count_nonzero(parent[:end] == FREE_ROW))
        check(len(self.names) == end - free, "one name a row", names=len(self.names))
        return True
