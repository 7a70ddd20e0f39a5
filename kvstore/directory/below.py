"""Which names may lie below the host tier: a counting filter in the header, so that a miss asks
nobody.

Primitives: `filter_counters` (its size), `count_below` (the daemon), `may_be_below` (any process).

A name has two counters, by its second and third word; the daemon adds one to each before the block
becomes readable below, and takes it off when the block left. A reader that finds a 0 knows that
the block is not there; anything else means that the daemon must be asked. A counter that came
near its end stays there for this life.
"""

from __future__ import annotations

import numpy as np

from kvstore.directory.layout import U64, names_of
from kvstore.types import ByteArray, IntArray

_WORDS = (1, 2)
"""Words of a fingerprint that choose its counters; the first one chooses its bucket."""
_STUCK = 192
_BYTES_A_COUNTER = 128 << 10
_COUNTERS_MIN, _COUNTERS_MAX = 1 << 16, 1 << 24


def filter_counters(bytes_below: int) -> int:
    """Counters (a byte each, a power of two) for so many bytes of blocks below the host tier.

    With blocks of 1 MiB a full tier answers 1 name in 20 "maybe" that is not there.
    """
    wanted = max(bytes_below // _BYTES_A_COUNTER, 1)
    return min(max(1 << (wanted - 1).bit_length(), _COUNTERS_MIN), _COUNTERS_MAX)


def _places(fingerprints: bytes | ByteArray, counters: int) -> IntArray:
    """int64[2 n]: the counters of each name."""
    words = names_of(fingerprints)[:, _WORDS] & np.array(counters - 1, U64)
    places: IntArray = words.ravel().astype(np.int64)
    return places


def count_below(counters: ByteArray, fingerprints: bytes | ByteArray, change: int) -> None:
    """Add `change`, 1 or -1, for each of the names."""
    places = _places(fingerprints, len(counters))
    places = places[counters[places] < _STUCK]
    np.add.at(counters, places, np.uint8(change % 256))


def counts_of(counters: ByteArray, fingerprints: bytes | ByteArray) -> ByteArray:
    """uint8[2 n]: the counters of each name."""
    return counters[_places(fingerprints, len(counters))] if len(counters) else counters


def may_be_below(counters: ByteArray, fingerprint: bytes) -> bool:
    """False: the block is not below the host tier. Without counters nobody can tell."""
    return bool(counts_of(counters, fingerprint).all())
