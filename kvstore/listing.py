"""What a namespace holds, a page at a time.

Primitives: `list_page`. A cursor is a place in the catalog: blocks that stay throughout are listed
once, blocks that come or go meanwhile may be missed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.namespaces import Namespace
from kvstore.store import Store
from kvstore.types import ByteArray

SCAN_ROWS = 32768
"""Rows a call looks at, whatever it finds: about a millisecond."""


@dataclass(frozen=True)
class ListedBlocks:
    """`names` 32 bytes a block; `tiers` uint8 [n]; `cursor` of the next page, 0 after the last."""

    names: bytes
    tiers: ByteArray
    cursor: int


def list_page(store: Store, namespace: Namespace, cursor: int, blocks_max: int) -> ListedBlocks:
    """Up to `blocks_max` readable blocks from `cursor` on; a page may be empty before the last."""
    columns = store.catalog
    stop = min(cursor + SCAN_ROWS, columns.rows_end)
    rows = np.arange(min(cursor, stop), stop, dtype=np.int64)
    rows = rows[columns.namespace[rows] == namespace.index]
    rows = rows[store.is_readable(rows)]
    if len(rows) > blocks_max:
        stop = int(rows[blocks_max])
        rows = rows[:blocks_max]
    names = columns.fingerprints[rows].tobytes()
    return ListedBlocks(names, store.tiers_of(rows), stop if stop < columns.rows_end else 0)
