"""What must be found after a crash, kept outside every process that may be killed.

Primitives:
  `Expectations`   a mapped file: a record a chain, written before and after each promise
  `Lane`           one worker's part of it: which chains are its own

A worker writes what it is about to take back *before* the call, and what it was promised *after*
the answer. Whatever moment it or the daemon is killed at, the file then says: at least `durable`
blocks of this chain must hit, at most `most` may.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

LANES = 3
CHAINS = 48
"""Chains a lane has at a time; the oldest is deleted and stored anew."""
NO_BOUND = 0xFFFFFFFF
RECORD = np.dtype([("blocks", "<u4"), ("durable", "<u4"), ("most", "<u4"), ("turn", "<u4")])
"""`turn` makes the chain's tokens: the same place holds other chains over time."""


@dataclass(frozen=True)
class Place:
    """Number of a chain: lane, namespace of the lane (0 is never cleared) and index."""

    lane: int
    space: int
    index: int


class Expectations:
    """Shared by the workers and the test through the file; every field is one aligned store."""

    def __init__(self, path: Path) -> None:
        shape = (LANES, 2, CHAINS)
        if not path.exists():
            fresh = np.memmap(path, RECORD, "w+", shape=shape)
            fresh["most"] = NO_BOUND
            fresh.flush()
        self._records = np.memmap(path, RECORD, "r+", shape=shape)
        words = path.with_suffix(".flags")
        if not words.exists():
            np.memmap(words, np.uint32, "w+", shape=(2 * LANES + 1,)).flush()
        self._words = np.memmap(words, np.uint32, "r+", shape=(2 * LANES + 1,))

    def places(self) -> list[Place]:
        """Of every chain that was ever begun."""
        begun = np.argwhere(self._records["blocks"] > 0)
        return [Place(*map(int, place)) for place in begun]

    def get(self, place: Place) -> tuple[int, int, int, int]:
        """(blocks, durable, most, turn)"""
        record = self._records[place.lane, place.space, place.index]
        return (
            int(record["blocks"]),
            int(record["durable"]),
            int(record["most"]),
            int(record["turn"]),
        )

    def begin(self, place: Place, blocks: int, turn: int) -> None:
        """A chain is about to be stored in this place; the one before was taken back."""
        record = self._records[place.lane, place.space, place.index]
        record["durable"] = 0
        record["most"] = NO_BOUND
        record["turn"] = turn
        record["blocks"] = blocks

    def is_durable(self, place: Place, blocks: int) -> None:
        """Flush said so."""
        record = self._records[place.lane, place.space, place.index]
        record["durable"] = max(int(record["durable"]), blocks)

    def may_go(self, place: Place, keep: int) -> None:
        """Before blocks from `keep` on are deleted or cleared."""
        record = self._records[place.lane, place.space, place.index]
        record["durable"] = min(int(record["durable"]), keep)

    def is_gone(self, place: Place, keep: int) -> None:
        """They were: never again more than `keep`."""
        self._records[place.lane, place.space, place.index]["most"] = keep

    # ------------------------------------------------------------------ pausing

    @property
    def is_paused(self) -> bool:
        return bool(self._words[0])

    def pause(self, on: bool) -> None:
        self._words[1 : LANES + 1] = 0
        self._words[0] = on

    def rest(self, lane: int) -> None:
        """A worker says that it does nothing now."""
        self._words[1 + lane] = 1

    def at_rest(self) -> set[int]:
        return {lane for lane in range(LANES) if self._words[1 + lane]}

    def did(self, lane: int) -> None:
        """A worker finished one thing."""
        self._words[1 + LANES + lane] += 1

    @property
    def things_done(self) -> int:
        """By all workers since the file was made."""
        return int(self._words[1 + LANES :].sum())
