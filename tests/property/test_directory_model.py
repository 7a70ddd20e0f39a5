"""The directory against a dict, on names that collide in home bucket and tag."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.directory import DirectoryReader, DirectoryWriter, header_bytes
from kvstore.types import ByteArray

SLOTS = 40
NAMESPACES = 2
BOOT_ID = 5

# 16 buckets; three homes next to each other around the end, two upper halves, one of them zero
NAMES = [
    struct.pack("<IIQQQ", home, upper, salt, 0, 0)
    for home in (14, 15, 16)
    for upper in (0, 7)
    for salt in range(8)
]
SLOT_SETS = st.sets(st.integers(0, SLOTS - 1), min_size=1, max_size=12).map(sorted)
CHAINS = st.lists(st.sampled_from(NAMES), max_size=12)
SPACES = st.integers(0, NAMESPACES - 1)

Block = tuple[bytes, int, int]
"""(name, namespace, clear count)"""


def as_array(names: list[bytes]) -> ByteArray:
    return np.frombuffer(b"".join(names), np.uint8).reshape(-1, 32)


class DirectoryModel(RuleBasedStateMachine):
    """`blocks` says what each READY slot holds; names may be in several slots."""

    def __init__(self) -> None:
        super().__init__()
        header = np.zeros(header_bytes(SLOTS, NAMESPACES), np.uint8)
        self.writer = DirectoryWriter(
            header, slots=SLOTS, namespaces_max=NAMESPACES, boot_id=BOOT_ID
        )
        self.reader = DirectoryReader(header)
        self.blocks: dict[int, Block] = {}
        self.clear_counts = [0] * NAMESPACES
        self.generations = self.writer.generations(np.arange(SLOTS))
        self.held: list[tuple[int, int, Block]] = []
        """(slot, generation, block) of what was found at some time."""

    @rule(slots=SLOT_SETS, names=st.permutations(NAMES), namespace=SPACES, late=st.booleans())
    def publish(self, slots: list[int], names: list[bytes], namespace: int, late: bool) -> None:
        slots = [slot for slot in slots if slot not in self.blocks]
        names = names[: len(slots)]
        clear_count = max(self.clear_counts[namespace] - late, 0)
        where = np.array(slots, np.int64)
        self.writer.publish(
            where,
            as_array(names),
            offsets=where.astype(np.uint64) * np.uint64(64),
            lengths=where + 1,
            namespace=namespace,
            clear_count=clear_count,
        )
        for slot, name in zip(slots, names, strict=True):
            self.blocks[slot] = (name, namespace, clear_count)

    @rule(slots=SLOT_SETS)
    def retract(self, slots: list[int]) -> None:
        self.writer.retract(np.array(slots))
        for slot in slots:
            self.blocks.pop(slot, None)

    @rule(namespace=SPACES)
    def clear(self, namespace: int) -> None:
        self.clear_counts[namespace] += 1
        self.writer.set_clear_count(namespace, self.clear_counts[namespace])

    @rule(names=CHAINS, namespace=SPACES)
    def lookup(self, names: list[bytes], namespace: int) -> None:
        found = self.reader.lookup(namespace, b"".join(names))
        expected = [self.slots_of(name, namespace) for name in names]
        count = next((at for at, slots in enumerate(expected) if not slots), len(names))
        assert found.count == count == len(found.slots) == len(found.generations)
        for at in range(count):
            slot = int(found.slots[at])
            assert slot in expected[at]
            assert found.offsets[at] == 64 * slot
            assert found.lengths[at] == slot + 1
            self.held.append((slot, int(found.generations[at]), self.blocks[slot]))

    @rule(names=CHAINS, namespace=SPACES)
    def lookup_each(self, names: list[bytes], namespace: int) -> None:
        found = self.reader.lookup_each(namespace, as_array(names))
        for at, name in enumerate(names):
            expected = self.slots_of(name, namespace)
            assert bool(found.mask[at]) == bool(expected)
            if expected:
                assert found.slots[at] in expected
                assert found.offsets[at] == 64 * found.slots[at]

    @rule()
    def compare_again(self) -> None:
        for slot, generation, block in self.held:
            one = np.array([slot]), np.array([generation], np.uint64)
            if self.reader.still_valid(BOOT_ID, *one):
                assert self.blocks.get(slot) == block

    def slots_of(self, name: bytes, namespace: int) -> set[int]:
        wanted = (name, namespace, self.clear_counts[namespace])
        return {slot for slot, block in self.blocks.items() if block == wanted}

    @invariant()
    def is_whole(self) -> None:
        slots = np.array(list(self.blocks), np.int64)
        self.writer.check_integrity(slots, as_array([block[0] for block in self.blocks.values()]))
        assert self.writer.published == len(self.blocks)
        for _ in self.writer.check_table():
            pass

    @invariant()
    def generations_tell(self) -> None:
        now = self.writer.generations(np.arange(SLOTS))
        assert (now >= self.generations).all()
        assert set(np.flatnonzero(now % 2 == 0).tolist()) == set(self.blocks)
        self.generations = now


DirectoryModel.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestDirectoryModel = DirectoryModel.TestCase
