"""Why an answer is shorter than asked, in the words that results carry.

Primitives: the constants, `reason_of(error)`. "" means that nothing is missing.
"""

from __future__ import annotations

from kvstore.errors import KVStoreError

ABSENT = "absent"
"""Not stored, or dropped since."""
AWAY = "away"
"""No daemon is attached."""
CHANGED = "changed"
"""A slot was re-used, or the daemon began a new life, while bytes were copied: they were thrown
away."""
CLOSED = "closed"
"""The client was closed."""
DRAINING = "draining"
"""The daemon is shutting down and takes nothing new."""
BUSY = "busy"
"""Too many commits are waiting."""


def reason_of(error: KVStoreError) -> str:
    """The class, so that programs can tell, and the words, so that people can."""
    return f"{type(error).__name__}: {error}"
