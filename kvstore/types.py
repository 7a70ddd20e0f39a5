"""Names shared by every floor. No behaviour lives here."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

Fingerprint = NewType("Fingerprint", bytes)
"""32 bytes naming a block and its whole prefix."""
NamespaceId = NewType("NamespaceId", bytes)
"""32 bytes, digest of a full identity; the first parent of every chain in it."""
ClientId = NewType("ClientId", int)
"""Random u63 given at Attach; names one client process to one daemon life."""
LeaseId = NewType("LeaseId", int)
ReservationId = NewType("ReservationId", int)

ByteArray: TypeAlias = NDArray[np.uint8]
IntArray: TypeAlias = NDArray[np.int64]
UIntArray: TypeAlias = NDArray[np.uint64]
BoolArray: TypeAlias = NDArray[np.bool_]
FloatArray: TypeAlias = NDArray[np.float64]

FINGERPRINT_BYTES = 32
PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
PARTS_MAX = 8


class Tier(IntEnum):
    """Where a replica lives; smaller is faster."""

    GPU = 0
    HOST = 1
    NVME = 2
    REMOTE = 3


class ReplicaState(IntEnum):
    """State of one block in one tier. Only READY may be read by anyone but its writer."""

    ABSENT = 0
    FILLING = 1
    """Slots are a writer's (an engine's reservation, or a promotion); present to other
    reservers.
    """
    COMMITTED = 2
    """Bytes are whole; waits for its checksum or for its parent to become READY. Not matchable."""
    READY = 3
    DRAINING = 4
    """Being dropped; no new lease."""


class NamespaceKind(StrEnum):
    """`chained`: fingerprints name whole prefixes. `flat`: opaque keys, no parent."""

    CHAINED = "chained"
    FLAT = "flat"


class BlockStatus(IntEnum):
    """Per-block outcome of Reserve and Commit."""

    GRANTED = 0
    """Reserve: a slot is yours to fill."""
    PRESENT = 1
    """Held or being filled already: nothing to do, counts as success."""
    STORED = 2
    """Commit: READY, matchable from now on."""
    NO_ROOM = 3
    NO_PARENT = 4
    """The parent is in no tier; storing the block would leave it unreachable."""
    DROPPED = 5
    """Commit: not stored (cleared meanwhile, parent never filled, reservation expired)."""
    WAITING = 7
    """Commit: whole, becomes matchable with its parent."""
    REFUSED = 6
    """The policy or a limit said no."""
