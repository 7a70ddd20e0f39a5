"""Blocks put and got through a gateway, as a service on another machine would.

kvstore serve & kvstore gateway &
python examples/block_api.py 127.0.0.1:7420
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from kvstore.client import FlatNames
from kvstore.errors import KVStoreError
from kvstore.layout import BlockLayout
from kvstore.remote_client import Declared, RemoteClient
from kvstore.types import NamespaceId, NamespaceKind

BLOCK_BYTES = 2 << 20
# 32 bytes that stand for all that shaped the blocks; another model is another namespace.
SPACE = NamespaceId(hashlib.sha256(b"my model, its weights, dtype and layout").digest())


def main(address: str) -> None:
    rows = np.arange(3, dtype=np.uint8)[:, None] + np.zeros(BLOCK_BYTES, np.uint8)
    layout = BlockLayout(block_tokens=1, layers=1, layer_bytes=BLOCK_BYTES)
    space = Declared(SPACE, layout, NamespaceKind.FLAT, label="example")
    with RemoteClient(address) as client:
        blocks = client.namespace(space)  # made known by the first put
        names = FlatNames(space.id, [b"a", b"b", b"c"])
        put = blocks.put(names, rows)
        print("put: ", *(status.name.lower() for status in put.statuses))
        asked = FlatNames(space.id, [b"a", b"b", b"c", b"d"])
        into = np.empty((4, BLOCK_BYTES), np.uint8)
        got = blocks.get(asked, into)
        print("got: ", *(bool(found) for found in got.found))
        print("same:", np.array_equal(into[:3], rows))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} HOST:PORT")
    try:
        main(sys.argv[1])
    except KVStoreError as error:
        sys.exit(f"{type(error).__name__}: {error}")
