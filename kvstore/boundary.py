"""How far several KV groups of one model can be served together.

Primitives: `GroupReach` (one group's usable blocks), `common_boundary`, `counted_group`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from kvstore.types import BoolArray, IntArray

TOKENS_MAX = 1 << 62


@dataclass(frozen=True)
class GroupReach:
    """Which blocks of a chain one group can serve: `usable` bool[blocks], from the root."""

    block_tokens: int
    window_tokens: int
    """0: full attention, needs every block from the root. Else only those that overlap the
    window.
    """
    usable: BoolArray

    def reach_tokens(self) -> int:
        """No boundary beyond this can be served."""
        mask = self.usable
        if self.window_tokens or mask.all():
            return len(mask) * self.block_tokens
        return int(mask.argmin()) * self.block_tokens

    def serves(self, boundaries: IntArray) -> BoolArray:
        """For each token boundary (a positive multiple of block_tokens): is its window whole?"""
        index = np.arange(len(self.usable), dtype=np.int64)
        last_hole = np.maximum.accumulate(np.where(self.usable, -1, index))
        first_needed = np.maximum(0, boundaries - self.window_tokens) // self.block_tokens
        whole: BoolArray = last_hole[boundaries // self.block_tokens - 1] < first_needed
        return whole


def common_boundary(groups: Sequence[GroupReach], tokens_max: int) -> int:
    """Largest multiple of all block sizes, at most `tokens_max` (0: no cap), that every group
    serves.
    """
    step = lcm(*(group.block_tokens for group in groups))
    limit = min((tokens_max or TOKENS_MAX), *(group.reach_tokens() for group in groups))
    limit -= limit % step
    sliding = [group for group in groups if group.window_tokens]
    if not sliding or not limit:
        return limit
    candidates = np.arange(step, limit + 1, step, dtype=np.int64)
    fits = np.ones(len(candidates), np.bool_)
    for group in sliding:
        fits &= group.serves(candidates)
    return int(candidates[fits][-1]) if fits.any() else 0


def counted_group(windows_tokens: Sequence[int]) -> int:
    """Index of the group whose tokens are counted for all, as they are the same tokens: the first
    that needs every block.
    """
    return next((at for at, window in enumerate(windows_tokens) if not window), 0)
