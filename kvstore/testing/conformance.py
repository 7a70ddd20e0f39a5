"""What every tier must do, as a pytest class: subclass it and give it a `harness` fixture.

    class TestMyTier(TierConformance):
        @pytest.fixture
        def harness(self, tmp_path): ...   # yields a TierHarness

Every test ends with the tier's own books balanced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import pytest

from kvstore.errors import ChecksumMismatch, InvariantViolated
from kvstore.tier.base import TierProtocol
from kvstore.types import PAGE_BYTES, ByteArray

LENGTHS = (1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES + 64, 256 * 1024)
"""Payload sizes around page boundaries; a harness must have room for one block of each."""
BLOCK_BYTES = 64 * 1024


class TierHarness(Protocol):
    """One tier with the transfers that differ from tier to tier."""

    tier: TierProtocol

    def write(self, slot: int, payload: ByteArray) -> None:
        """Store a block's payload in a FILLING slot of its size and make the slot READY."""

    def read(self, slot: int, length: int) -> ByteArray:
        """The payload of a READY slot; raises what the tier raises."""

    def damage(self, slot: int) -> None:
        """Change one stored payload byte behind the tier's back (durable tiers only)."""


def pattern(seed: int, length: int) -> ByteArray:
    """uint8[length] that differs for every seed."""
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


class TierConformance:
    """Inherit, and define the `harness` fixture."""

    @pytest.fixture(autouse=True)
    def _books_balance(self, harness: TierHarness) -> Iterator[None]:
        yield
        harness.tier.check_integrity()

    @pytest.mark.parametrize("length", LENGTHS)
    def test_written_bytes_come_back(self, harness: TierHarness, length: int) -> None:
        tier = harness.tier
        slots = tier.take(tier.slot_bytes_for(length), 3)
        for slot in slots:
            harness.write(slot, pattern(slot + 1, length))
        for slot in slots:
            assert np.array_equal(harness.read(slot, length), pattern(slot + 1, length))

    def test_no_room_is_a_short_answer(self, harness: TierHarness) -> None:
        tier = harness.tier
        size = tier.slot_bytes_for(BLOCK_BYTES)
        slots: list[int] = []
        while got := tier.take(size, 7):
            slots += got
        assert slots
        assert len(set(slots)) == len(slots)
        assert tier.room(size) == 0
        tier.free(slots[:2])
        assert len(tier.take(size, 7)) == 2

    def test_room_is_what_take_gives(self, harness: TierHarness) -> None:
        tier = harness.tier
        size = tier.slot_bytes_for(BLOCK_BYTES)
        room = tier.room(size)
        assert len(tier.take(size, room + 1)) == room

    def test_freeing_a_free_slot_is_refused(self, harness: TierHarness) -> None:
        tier = harness.tier
        slots = tier.take(tier.slot_bytes_for(BLOCK_BYTES), 2)
        tier.free(slots)
        with pytest.raises(InvariantViolated):
            tier.free(slots[:1])

    def test_a_freed_slot_serves_the_next_block(self, harness: TierHarness) -> None:
        tier = harness.tier
        size = tier.slot_bytes_for(BLOCK_BYTES)
        while slots := tier.take(size, 64):
            last = slots
        harness.write(last[0], pattern(1, BLOCK_BYTES))
        tier.free(last[:1])
        assert tier.take(size, 1) == last[:1]
        harness.write(last[0], pattern(2, BLOCK_BYTES))
        assert np.array_equal(harness.read(last[0], BLOCK_BYTES), pattern(2, BLOCK_BYTES))

    def test_damaged_bytes_are_never_served(self, harness: TierHarness) -> None:
        tier = harness.tier
        if not tier.is_durable:
            pytest.skip(f"{tier.name.name}: bytes are trusted while they lie in memory")
        (slot, other) = tier.take(tier.slot_bytes_for(BLOCK_BYTES), 2)
        harness.write(slot, pattern(1, BLOCK_BYTES))
        harness.write(other, pattern(2, BLOCK_BYTES))
        harness.damage(slot)
        with pytest.raises(ChecksumMismatch):
            harness.read(slot, BLOCK_BYTES)
        assert np.array_equal(harness.read(other, BLOCK_BYTES), pattern(2, BLOCK_BYTES))

    def test_the_tier_describes_itself(self, harness: TierHarness) -> None:
        assert harness.tier.describe()
        assert harness.tier.health() == []
