"""What a client may say about tokens of a request, and the class number that travels.

Primitives: `Hint`; `TokenHint`, as it travels; `classes_of`, its word on each block. The policy
learns for each class how its blocks fare; no class is a promise, and a wrong hint costs no more
than the place of the blocks concerned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.types import ByteArray

HINT_CLASSES = 16
"""Class numbers are smaller; 0 says nothing."""
SYSTEM_PROMPT, SESSION, _FIRST_EXPECTED = 1, 2, 3
_SOON_SECONDS, _LATER_SECONDS = 60.0, 600.0


@dataclass(frozen=True)
class Hint:
    """Of tokens [start, end) of a prompt; `end_tokens` 0 is its end."""

    start_tokens: int = 0
    end_tokens: int = 0
    is_system_prompt: bool = False
    """Shared by many requests to come."""
    is_session: bool = False
    """Part of a conversation that goes on."""
    priority: int = 0
    """-1, 0 or 1."""
    next_use_seconds: float | None = None
    """When it is expected to be asked for again."""
    ttl_seconds: float | None = None
    """After so long nobody will ask for it."""

    @property
    def hint_class(self) -> int:
        """1 system prompt; 2 session; from 3 on by expected next use and priority; else 0."""
        if self.is_system_prompt:
            return SYSTEM_PROMPT
        if self.next_use_seconds is None and self.ttl_seconds is None and not self.priority:
            return SESSION if self.is_session else 0
        return _FIRST_EXPECTED + 3 * self._expected + max(-1, min(self.priority, 1)) + 1

    @property
    def _expected(self) -> int:
        """0 soon, 1 in minutes, 2 later or unknown, 3 not any more."""
        ttl = float("inf") if self.ttl_seconds is None else self.ttl_seconds
        expected = min(ttl, _LATER_SECONDS * 2)
        if self.next_use_seconds is not None:
            expected = self.next_use_seconds
        if expected > ttl or ttl <= 0:
            return 3
        return int(expected > _SOON_SECONDS) + int(expected > _LATER_SECONDS)

    @property
    def token_hint(self) -> TokenHint:
        """What travels."""
        return TokenHint(self.hint_class, self.start_tokens, self.end_tokens)


class TokenHint(NamedTuple):
    """Tokens [start, end) of a request belong to this class; `end` 0 is the end. Class numbers too
    large count as the last.
    """

    hint_class: int
    start_tokens: int
    end_tokens: int


def classes_of(hints: Sequence[TokenHint], first: int, count: int, block_tokens: int) -> ByteArray:
    """uint8 [count]: class of blocks first, first + 1, …; of several hints the last one holds."""
    classes: ByteArray = np.zeros(count, np.uint8)
    for hint in hints:
        start = max(hint.start_tokens // block_tokens - first, 0)
        stop = count if not hint.end_tokens else max(-(-hint.end_tokens // block_tokens) - first, 0)
        classes[start:stop] = min(hint.hint_class, HINT_CLASSES - 1)
    return classes
