"""Uses of blocks that the policy has not seen yet, and what clients said about them.

Primitive: `Uses`.

Uses wait until the reply went out; hints on blocks that are being stored wait until these are
READY. Runs on the daemon's loop; reads no clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.arrays import distinct
from kvstore.hints import HINT_CLASSES
from kvstore.policy import Policy, RequestShape
from kvstore.types import FINGERPRINT_BYTES, ByteArray, IntArray

HINTS_WAITING_MAX = 65536


class Uses:
    """What waits to be told to the policy."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[IntArray, RequestShape]] = deque()
        self._stored: OrderedDict[bytes, int] = OrderedDict()
        """Name of a block that is not READY yet → class."""

    def used(self, rows: IntArray, asked_blocks: int = 0, classes: ByteArray | None = None) -> None:
        """A request that asked for so many blocks used `rows`."""
        for chosen, hint in _by_class(rows, classes):
            self._waiting.append((chosen, RequestShape(asked_blocks, len(rows), hint)))

    def apply(self, policy: Policy, now: float, told: Sequence[Callable[[IntArray], None]]) -> None:
        """Tell it all; then `told` are."""
        while self._waiting:
            rows, shape = self._waiting.popleft()
            policy.touched(rows, now, shape)
            for tell in told:
                tell(rows)

    def will_store(self, names: bytes, classes: ByteArray) -> None:
        """Hints on blocks that become READY later, or never: then they are forgotten in time."""
        for at in np.flatnonzero(classes).tolist():
            name = names[at * FINGERPRINT_BYTES : (at + 1) * FINGERPRINT_BYTES]
            self._stored[name] = min(int(classes[at]), HINT_CLASSES - 1)
        while len(self._stored) > HINTS_WAITING_MAX:
            self._stored.popitem(last=False)

    def stored(
        self, policy: Policy, rows: IntArray, names: ByteArray, depths: IntArray, now: float
    ) -> None:
        """`rows` became READY. What is new follows what was found: depths show the request.

        `names` uint8 [n, 32].
        """
        found, asked = int(depths.min()), int(depths.max()) + 1
        classes = None
        if self._stored:
            known = [self._stored.pop(name.tobytes(), 0) for name in names]
            classes = np.array(known, np.uint8)
        for chosen, hint in _by_class(rows, classes):
            policy.inserted(chosen, now, RequestShape(asked, found, hint))


def _by_class(rows: IntArray, classes: ByteArray | None) -> list[tuple[IntArray, int]]:
    if classes is None or not classes.any():
        return [(rows, 0)]
    return [(rows[classes == each], int(each)) for each in distinct(classes)]
