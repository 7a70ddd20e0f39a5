"""Uses of blocks that the policy has not seen yet, and what clients said about them.

Primitives: `TokenHint` (a client's word on a range of tokens), `classes_of`, `Uses`.

Uses wait until the reply went out; hints on blocks that are being stored wait until these are
READY. Runs on the daemon's loop; reads no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.arrays import distinct
from kvstore.hints import HINT_CLASSES
from kvstore.policy import Policy, RequestShape
from kvstore.types import ByteArray, IntArray


class TokenHint(NamedTuple):
    """Tokens [start, end) of a request belong to this class; `end` 0 is the end. Class numbers too
    large count as the last.
    """

    hint_class: int
    start_tokens: int
    end_tokens: int


def classes_of(hints: Sequence[TokenHint], first: int, count: int, block_tokens: int) -> ByteArray:
    """uint8 [count]: class of blocks first, first + 1, …; of several hints the last one holds."""
    classes: ByteArray = np.zeros(count, np.uint8)
    for hint in hints:
        start = max(hint.start_tokens // block_tokens - first, 0)
        stop = count if not hint.end_tokens else max(-(-hint.end_tokens // block_tokens) - first, 0)
        classes[start:stop] = min(hint.hint_class, HINT_CLASSES - 1)
    return classes


class Uses:
    """What waits to be told to the policy."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[IntArray, RequestShape]] = deque()
        self._stored: dict[int, int] = {}
        """Row of a block that is not READY yet → class."""

    def used(self, rows: IntArray, asked_blocks: int = 0, classes: ByteArray | None = None) -> None:
        """A request that asked for so many blocks used `rows`."""
        for chosen, hint in _by_class(rows, classes):
            self._waiting.append((chosen, RequestShape(asked_blocks, len(rows), hint)))

    def apply(self, policy: Policy, now: float, told: Callable[[IntArray], None]) -> None:
        """Tell it all; then `told` is."""
        while self._waiting:
            rows, shape = self._waiting.popleft()
            policy.touched(rows, now, shape)
            told(rows)

    def will_store(self, rows: IntArray, classes: ByteArray) -> None:
        """Hints on rows that become READY later, or never."""
        hinted = classes > 0
        self._stored.update(zip(rows[hinted].tolist(), classes[hinted].tolist(), strict=True))

    def stored(self, policy: Policy, rows: IntArray, depths: IntArray, now: float) -> None:
        """`rows` became READY. What is new follows what was found: depths show the request."""
        found, asked = int(depths.min()), int(depths.max()) + 1
        classes = None
        if self._stored:
            classes = np.array([self._stored.pop(row, 0) for row in rows.tolist()], np.uint8)
        for chosen, hint in _by_class(rows, classes):
            policy.inserted(chosen, now, RequestShape(asked, found, hint))

    def dropped(self, row: int) -> None:
        """It will never be READY."""
        self._stored.pop(row, None)


def _by_class(rows: IntArray, classes: ByteArray | None) -> list[tuple[IntArray, int]]:
    if classes is None or not classes.any():
        return [(rows, 0)]
    return [(rows[classes == each], int(each)) for each in distinct(classes)]
