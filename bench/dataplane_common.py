"""What the parts of the data plane suite share: a client on a layout, chains of numbered prompts.

Primitives:
  `Space`            an attached client and one namespace of `block_bytes`-sized blocks
  `space_on(...)`    context manager that makes one
  `stored_all`       raises unless a store kept every block
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.workload import Painter, identity_of, prompt
from kvstore.client import KVClient, NamespaceHandle
from kvstore.fingerprint import Chain
from kvstore.layout import BlockLayout
from kvstore.types import BlockStatus

CONNECT_SECONDS_MAX = 10.0
STORE_SECONDS_MAX = 30.0
LAYERS = 8
"""Layers of a synthetic block; each is an eighth of it."""


@dataclass(frozen=True)
class Space:
    """One namespace as one client sees it."""

    client: KVClient
    handle: NamespaceHandle
    layout: BlockLayout
    painter: Painter

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    def tokens(self, number: int, blocks: int) -> NDArray[np.uint32]:
        """Token ids of prompt `number`, `blocks` full blocks long."""
        return prompt(number, blocks * self.layout.block_tokens)

    def chain(self, number: int, blocks: int) -> Chain:
        """Names of prompt `number`'s blocks."""
        return self.handle.chain(self.tokens(number, blocks))

    def paint(self, chain: Chain, into: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Colour uint8 [blocks, block_bytes] as `chain`; returns it."""
        for index, row in enumerate(into):
            self.painter.paint(chain[index], row)
        return into

    def store(self, chain: Chain, scratch: NDArray[np.uint8] | None = None) -> None:
        """Coloured blocks of `chain`, all of them READY in host memory when this returns."""
        if scratch is None:
            scratch = np.empty((len(chain), self.block_bytes), np.uint8)
        blocks = self.paint(chain, scratch[: len(chain)])
        stored_all(self.handle.store(chain, blocks).result(STORE_SECONDS_MAX))

    def flush(self, chain: Chain) -> None:
        """Wait until every block of `chain` is durable. Raises RuntimeError when one is not."""
        durable = np.asarray(self.handle.flush(chain, deadline_seconds=STORE_SECONDS_MAX))
        if not durable.all():
            raise RuntimeError(f"flush: {int(durable.sum())} of {len(chain)} blocks are durable")

    def check(self, chain: Chain, blocks: NDArray[np.uint8]) -> None:
        """Raises RuntimeError unless uint8 [n, block_bytes] are the first n blocks of `chain`."""
        for index, row in enumerate(blocks):
            if not self.painter.is_painted(chain[index], row):
                wrong = self.painter.wrong_bytes(chain[index], row)
                raise RuntimeError(f"block {index}: {wrong} wrong bytes were served")


@contextlib.contextmanager
def space_on(
    socket: str, block_tokens: int, block_bytes: int, model: str = "bench"
) -> Iterator[Space]:
    """A client attached to `socket`, closed at the end."""
    layers = LAYERS if block_bytes >= 1 << 20 else 1
    layout = BlockLayout(block_tokens, layers, block_bytes // layers)
    with KVClient(socket, engine="bench", deadline_seconds=20.0) as client:
        if not client.wait_connected(CONNECT_SECONDS_MAX):
            raise RuntimeError(f"not attached to {socket}: {client.statistics().away_reason}")
        handle = client.namespace(identity_of(layout, model), layout)
        yield Space(client, handle, layout, Painter(layout.block_bytes))


def stored_all(statuses: Sequence[BlockStatus]) -> None:
    """Raises RuntimeError unless every block is stored or present."""
    kept = (BlockStatus.STORED, BlockStatus.PRESENT)
    lost = [status.name for status in statuses if status not in kept]
    if lost:
        raise RuntimeError(f"store: {len(lost)} of {len(statuses)} blocks not kept: {set(lost)}")
