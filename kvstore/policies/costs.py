"""What catalog rows cost: the policy's view of the cost model, many rows at a time.

Primitive: `BlockCosts`. Pure; copies the beliefs when asked to and reads them from then on.
"""

from __future__ import annotations

import numpy as np

from kvstore.catalog import Catalog
from kvstore.costs import Costs
from kvstore.types import BoolArray, FloatArray, IntArray, Tier


class BlockCosts:
    """Seconds and bytes of rows. Namespaces differ in their tokens a block and in their model."""

    def __init__(self, catalog: Catalog, costs: Costs, block_tokens: IntArray) -> None:
        """`block_tokens` int64[namespaces_max], by index; the caller keeps it current."""
        self._catalog = catalog
        self._costs = costs
        self.block_tokens = block_tokens
        self._first: FloatArray = np.zeros(0)
        self._each: FloatArray = np.zeros(0)
        self._is_known: BoolArray = np.zeros(0, np.bool_)
        self._beliefs: tuple[list[float], list[float], list[bool]] = ([], [], [])
        self._byte_seconds: dict[Tier, float] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Take the beliefs as they are now; whether they are others than before."""
        known = int(np.count_nonzero(self.block_tokens))
        before = self._beliefs
        self._first, self._each = np.zeros((2, known))
        self._is_known = np.array([self._costs.is_calibrated(at) for at in range(known)], np.bool_)
        for index, tokens in enumerate(self.block_tokens[:known].astype(np.float64).tolist()):
            cost = self._costs.prefill(index)
            self._first[index] = cost.seconds(0.0, tokens)
            # Linear in the depth: each block before costs so much more.
            self._each[index] = cost.seconds(tokens, 2 * tokens) - self._first[index]
        for tier in (Tier.HOST, Tier.NVME):
            link = self._costs.link(tier)
            self._byte_seconds[tier] = link.seconds_per_byte + link.decode_seconds_per_byte
        self._beliefs = (self._first.tolist(), self._each.tolist(), self._is_known.tolist())
        return before != self._beliefs

    def recompute_seconds(self, rows: IntArray) -> FloatArray:
        """To prefill each block, its prefix being there, float64[n]."""
        namespaces, depths = self._catalog.namespace[rows], self._catalog.depth[rows]
        if namespaces.size and namespaces.max() >= self._first.size:
            self.refresh()  # one was declared since
        seconds: FloatArray = self._first[namespaces] + self._each[namespaces] * depths
        if False not in self._beliefs[2]:
            return seconds
        # Nobody is advised against keeping what nobody has measured: its guess is beside a load.
        unknown = np.where(self._is_known[namespaces], 0.0, self.bytes(rows))
        return seconds + self.byte_seconds(Tier.NVME) * unknown

    def byte_seconds(self, tier: Tier) -> float:
        """To bring a byte up from `tier` to the engine, as part of a long load."""
        below = self._byte_seconds[Tier.NVME] if tier == Tier.NVME else 0.0
        return self._byte_seconds[Tier.HOST] + below

    def bytes(self, rows: IntArray) -> FloatArray:
        """Payload of each block, float64[n]."""
        return self._catalog.length[rows].astype(np.float64)
