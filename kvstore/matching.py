"""What a look-up found.

Primitives: `GroupMatch` (one KV group's blocks), `MatchResult` (all of a request's),
`groups_of` (a lease's rows). Plain data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.namespaces import Namespace, NamespaceTable
from kvstore.types import IntArray, LeaseId


@dataclass
class GroupMatch:
    """What one KV group can serve: blocks [first, first + len(rows)) of the request's chain."""

    namespace: Namespace
    first: int
    rows: IntArray

    @property
    def blocks(self) -> int:
        """Blocks of this group below the boundary."""
        return self.first + len(self.rows)


def groups_of(rows: IntArray, indexes: IntArray, namespaces: NamespaceTable) -> list[GroupMatch]:
    """The rows of a lease, one group a namespace; `indexes`: the namespace of each row."""
    cuts = np.flatnonzero(np.diff(indexes)) + 1
    return [
        GroupMatch(namespaces.at(int(own[0])), 0, run)
        for run, own in zip(np.split(rows, cuts), np.split(indexes, cuts), strict=True)
        if len(run)
    ]


@dataclass
class MatchResult:
    """Largest token boundary every group can serve, and the lease that keeps it so."""

    boundary_tokens: int
    groups: list[GroupMatch]
    asked_blocks: list[int]
    """A group: how many were named."""
    lease: LeaseId | None = None
    short_reason: str = ""

    def cut(self, tokens: int, reason: str) -> None:
        """Only the first `tokens` tokens: 0, or whole blocks of groups without a window."""
        for group in self.groups:
            group.first = group.first if tokens else 0
            group.rows = group.rows[: tokens // group.namespace.layout.block_tokens]
        self.boundary_tokens = tokens
        self.short_reason = reason
