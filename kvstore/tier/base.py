"""What every tier offers the store's loop. Transfers differ by tier and are not part of this."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

from kvstore.types import IntArray, Tier

Slots: TypeAlias = Sequence[int] | IntArray


class TierProtocol(Protocol):
    """Slot bookkeeping of one tier. Called on the loop only; every call is quick and does no I/O.

    Raises InvariantViolated when slots are not in the state the call needs.
    """

    name: Tier
    is_durable: bool
    """READY blocks outlive the daemon."""
    is_addressable: bool
    """Slots are memory that engines read in place."""

    def slot_bytes_for(self, length: int) -> int:
        """Size of the slot for a payload of `length` bytes; names the size class in every other
        call.
        """

    def take(self, slot_bytes: int, count: int, *, staging: bool = False) -> list[int]:
        """Up to `count` slots, FILLING and the caller's; fewer (or none) means no room."""

    def free(self, slots: Slots) -> None:
        """Held slots → free. Freeing a free slot is refused whole: InvariantViolated."""

    def room(self, slot_bytes: int) -> int:
        """Slots that `take` would give now."""

    def describe(self) -> dict[str, object]:
        """Numbers for people and metrics; keys are stable."""

    def integrity_slices(self) -> Iterator[None]:
        """Raises InvariantViolated when the books do not balance; a bounded piece a step."""

    def check_integrity(self) -> None:
        """The same in one go."""

    def health(self) -> list[str]:
        """Why this tier does not serve or not store; empty when all is well."""

    def remarks(self) -> list[str]:
        """What is slower or less than it could be; it serves and stores all the same."""
