"""A client under whose hands daemons die: stores, flushes, loads, deletes, clears, for ever.

Run as `python -m tests.crash.worker SOCKET FILE LANE SEED`; it may be killed at any moment too.
Ends by itself, with a traceback, only when it was served other bytes than it stored, or when the
library raised what it promises not to.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore.errors import KVStoreError
from kvstore.fingerprint import Chain
from kvstore.layout import BlockLayout
from tests.crash.expectations import CHAINS, Expectations, Place
from tests.e2e.kit import Engine

BLOCKS_MAX = 8
LAYOUTS = (
    BlockLayout(block_tokens=16, layers=4, layer_bytes=8192),
    BlockLayout(block_tokens=16, layers=3, layer_bytes=7000),
    BlockLayout(block_tokens=16, layers=8, layer_bytes=16384),
)
"""One a lane: whole pages, torn pages, 128 KiB in 8 parts."""
DEADLINE_SECONDS = 3.0


def engine_of(socket: Path, lane: int, space: int) -> Engine:
    """A lane's namespace; the same in every process."""
    daemon: Any = SimpleNamespace(socket=socket)
    return Engine(daemon, f"lane-{lane}", model=f"{lane}-{space}", layout=LAYOUTS[lane])


def number_of(place: Place, turn: int) -> int:
    return ((place.lane * 2 + place.space) * CHAINS + place.index) * 100_000 + turn


class Worker:
    """One lane's traffic."""

    def __init__(self, socket: Path, expected: Expectations, lane: int, seed: int) -> None:
        self._expected = expected
        self._lane = lane
        self._random = np.random.default_rng([seed, lane])
        self._newest = Place(lane, 0, 0)
        self._engines = [engine_of(socket, lane, space) for space in range(2)]

    def run(self) -> None:
        often = [self.renew_chain, self.load, self.flush]
        verbs = [*often, *often, self.cut, self.abandon]
        while True:
            while self._expected.is_paused:
                self._expected.rest(self._lane)
                time.sleep(0.01)
            chosen = int(self._random.integers(100))
            try:
                self.clear() if not chosen else verbs[chosen % len(verbs)]()
                self._expected.did(self._lane)
            except KVStoreError:
                time.sleep(0.02)  # the daemon is away; what was asked for is in doubt

    def _place(self) -> Place:
        return Place(self._lane, int(self._random.integers(2)), int(self._random.integers(CHAINS)))

    def _chain(self, place: Place, blocks: int, turn: int) -> Chain:
        return self._engines[place.space].chain(number_of(place, turn), blocks)

    def renew_chain(self) -> None:
        """Delete what is in a place, store another chain there."""
        place = self._place()
        blocks, _, _, turn = self._expected.get(place)
        engine = self._engines[place.space]
        if blocks:
            self._expected.may_go(place, 0)
            engine.handle.delete(self._chain(place, blocks, turn), 0)
        fresh = int(self._random.integers(1, BLOCKS_MAX + 1))
        self._expected.begin(place, fresh, turn + 1)
        self._newest = place
        chain = self._chain(place, fresh, turn + 1)
        engine.store(chain)  # waits: a commit may not land after a later delete

    def flush(self) -> None:
        place = self._newest
        blocks, _, _, turn = self._expected.get(place)
        if blocks:
            chain = self._chain(place, blocks, turn)
            durable = self._engines[place.space].handle.flush(
                chain, deadline_seconds=DEADLINE_SECONDS
            )
            self._expected.is_durable(place, int(durable.argmin()) if not durable.all() else blocks)

    def load(self) -> None:
        place = self._place()
        blocks, _, most, turn = self._expected.get(place)
        if blocks:
            found = self._engines[place.space].load(
                self._chain(place, blocks, turn), DEADLINE_SECONDS
            )
            assert found.blocks <= most, f"{place}: {found} although cut to {most}"

    def cut(self) -> None:
        """Delete the end of a chain."""
        place = self._place()
        blocks, _, most, turn = self._expected.get(place)
        if blocks > 1 and most > blocks:
            keep = int(self._random.integers(1, blocks))
            self._expected.may_go(place, keep)
            self._engines[place.space].handle.delete(self._chain(place, blocks, turn), keep)
            self._expected.is_gone(place, keep)

    def clear(self) -> None:
        """The lane's second namespace."""
        places = [Place(self._lane, 1, index) for index in range(CHAINS)]
        for place in places:
            self._expected.may_go(place, 0)
        self._engines[1].handle.clear()
        for place in places:
            self._expected.is_gone(place, 0)

    def abandon(self) -> None:
        """A reservation given up half filled, a lease that is forgotten."""
        place = self._place()
        engine = self._engines[place.space]
        chain = engine.chain(number_of(place, 99_999), 3)
        with engine.handle.reserve(chain) as reservation:
            for block in reservation.granted[:2]:
                reservation.view(block)[:] = 0xEE
        blocks, _, _, turn = self._expected.get(place)
        if blocks:
            engine.handle.lease(self._chain(place, blocks, turn))


if __name__ == "__main__":
    Worker(
        Path(sys.argv[1]), Expectations(Path(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4])
    ).run()
