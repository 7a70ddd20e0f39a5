"""Where the stored prefix of a token sequence is found.

Primitives: `Prefix` (blocks in place, or nothing and why), `find`.

Host memory is asked first, through the directory, without a call; if it has less than what was
asked for, the daemon is asked what lies below. Whatever goes wrong is a miss with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.client import NamespaceHandle
from kvstore.client.inplace import InPlace, find_in_host, under_lease
from kvstore.errors import KVStoreError
from kvstore.planner import Ability, Plan
from kvstore.types import Tier

ABSENT = "absent"


@dataclass(frozen=True)
class Prefix:
    """The first `blocks` blocks are readable or promised; without any, `source` is None.

    End it with exactly one `end`."""

    source: InPlace | None = None
    reason: str = ""
    """Why not more blocks were found; "" if all asked for are here."""

    @property
    def blocks(self) -> int:
        return 0 if self.source is None else self.source.blocks

    @property
    def plan(self) -> Plan | None:
        """How to load them; None: all of it, from the front."""
        return None if self.source is None else self.source.plan

    def below_host(self, blocks: int) -> int:
        """How many of the first `blocks` blocks were below host memory when they were found."""
        if self.source is None:
            return 0
        return int(np.count_nonzero(self.source.tiers[:blocks] != Tier.HOST))

    def end(self, used: int = 0) -> None:
        """Give it up; its first `used` blocks were used."""
        if self.source is not None:
            self.source.end(used)


def find(
    handle: NamespaceHandle,
    tokens: NDArray[np.uint32],
    blocks: int,
    deadline_seconds: float,
    ability: Ability | None = None,
) -> Prefix:
    """The longest stored prefix of the first `blocks` blocks of `tokens`; with `ability`, what of
    it is worth loading. Never raises."""
    if blocks < 1:
        return Prefix(reason="prompt shorter than a block")
    try:
        names = handle.chain(tokens[: blocks * handle.layout.block_tokens])
        host = find_in_host(handle, names)
        if host is not None and host.blocks == blocks:
            return Prefix(host)
        leased = under_lease(handle, names, deadline_seconds=deadline_seconds, ability=ability)
    except KVStoreError as error:
        return Prefix(reason=f"{type(error).__name__}: {error}")
    reason = leased.reason or ABSENT
    if host is not None and host.blocks >= leased.blocks:
        leased.end(0)
        host.counted = leased.blocks if leased.is_counted else 0
        return Prefix(host, reason)
    if leased.blocks:
        return Prefix(leased, "" if leased.blocks == blocks else reason)
    leased.end(0)
    return Prefix(reason=reason)
