"""Any engine with kvstore: the second prompt's shared prefix is loaded, not computed.

kvstore serve &
python examples/engine_client.py
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from kvstore.client import KVClient
from kvstore.fingerprint import KVIdentity
from kvstore.layout import BlockLayout

LAYOUT = BlockLayout(block_tokens=16, layers=4, layer_bytes=8192)
IDENTITY = KVIdentity(
    model="toy",
    weights_digest="sha256:of-the-weights",  # of their content, never of their name
    kv_dtype="uint8",
    layout="layer, token, byte",
    block_tokens=LAYOUT.block_tokens,
    layers=LAYOUT.layers,
    kv_heads_per_rank=1,
    head_size=512,
)


def prefill(tokens: list[int], first: int) -> NDArray[np.uint8]:
    """Stands for the engine: KV of the full blocks from token `first` on, [blocks, block bytes]."""
    starts = range(first, len(tokens) - LAYOUT.block_tokens + 1, LAYOUT.block_tokens)
    blocks = [
        np.resize(np.cumsum(tokens[: start + LAYOUT.block_tokens]), LAYOUT.block_bytes)
        for start in starts
    ]
    return np.array(blocks, np.uint8).reshape(len(blocks), LAYOUT.block_bytes)


def serve_prompt(client: KVClient, tokens: list[int]) -> None:
    space = client.namespace(IDENTITY, LAYOUT, label="toy")
    chain = space.chain(tokens)  # names of the prompt's full blocks; the tokens stay here
    kv = np.empty((len(chain), LAYOUT.block_bytes), np.uint8)
    hit = space.load(chain, kv)  # the leading blocks that are stored; never raises
    kv[hit.blocks :] = prefill(tokens, hit.blocks * LAYOUT.block_tokens)
    stored = space.store(chain, kv[hit.blocks :], start=hit.blocks)  # copies, then returns
    right = np.array_equal(kv, prefill(tokens, 0))
    print(f"{hit.blocks} of {len(chain)} blocks loaded, bytes {'equal' if right else 'DIFFER'}")
    stored.result(timeout=10)  # an engine goes on; this example ends here


def main(socket: str | None = None) -> None:
    client = KVClient(socket, engine="example")
    if not client.wait_connected(timeout=5):
        sys.exit(f"no daemon: {client.away_reason}; start one with `kvstore serve`")
    manual = [token * 7919 % 50_000 for token in range(640)]
    serve_prompt(client, [*manual, *range(1, 65)])
    serve_prompt(client, [*manual, *range(101, 165)])
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:2])
