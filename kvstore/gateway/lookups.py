"""Long lists of names asked for in pages, so that no page holds the daemon's loop for long.

Primitives: `existence`.
"""

from __future__ import annotations

import numpy as np

from kvstore.client import Existence, NamespaceHandle, RawNames
from kvstore.types import FINGERPRINT_BYTES

PAGE_BLOCKS = 4096


def existence(handle: NamespaceHandle, joined: bytes) -> Existence:
    """Of any number of names, 32 bytes each. Raises KVStoreError."""
    step = PAGE_BLOCKS * FINGERPRINT_BYTES
    tiers = [
        handle.exists(RawNames(handle.id, joined[at : at + step])).tiers
        for at in range(0, len(joined), step)
    ]
    found = np.concatenate(tiers) if tiers else np.zeros(0, np.uint8)
    held = found != 0
    return Existence(len(held) if held.all() else int(held.argmin()), found)
