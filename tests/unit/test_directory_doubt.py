"""The directory in doubt: races and damage are misses for readers, and our checks name the law."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest
from directory_kit import BOOT_ID, NAMESPACES, SLOTS, Directory, as_array, name, random_names

from kvstore.directory.layout import BUCKET, EMPTY
from kvstore.errors import InvariantViolated
from kvstore.types import IntArray, UIntArray


@pytest.fixture
def directory() -> Directory:
    return Directory()


# -------------------------------------------------------------------- doubt is a miss


class Raced:
    """Stands in for the generations column: `then` happens after the first reading."""

    def __init__(self, column: UIntArray, then: object) -> None:
        self.column = column
        self.then = then

    def take(self, slots: IntArray, mode: str) -> UIntArray:
        now = self.column.take(slots, mode=mode)
        then, self.then = self.then, None
        if callable(then):
            then()
        return now


def test_a_slot_reused_while_its_record_is_read_is_a_miss(directory: Directory) -> None:
    old, new = random_names(2)
    directory.publish([5], [old])

    def reuse() -> None:
        directory.writer.retract(np.array([5]))
        directory.publish([5], [new])
        directory.writer.retract(np.array([5]))
        directory.publish([5], [old])  # even the same name again: fields of two moments

    columns = directory.reader._columns
    columns.generations = Raced(columns.generations, reuse)  # type: ignore[assignment]
    directory.reader._retry = lambda *_: None  # type: ignore[method-assign]
    assert directory.found([old]) == []


def test_a_slot_that_is_being_retracted_is_a_miss(directory: Directory) -> None:
    (block,) = random_names(1)
    directory.publish([5], [block])
    directory.writer._columns.generations[5] += np.uint64(1)  # before its entry is removed
    assert directory.found([block]) == []
    assert directory.found_each([block]) == [None]


def test_an_entry_that_names_no_slot_is_a_miss(directory: Directory) -> None:
    (block,) = random_names(1)
    directory.publish([5], [block])
    entries = directory.writer._columns.buckets[:, BUCKET:]
    entries[entries == 5] = SLOTS + 1000
    assert directory.found([block]) == []
    assert directory.found_each([block]) == [None]


def test_readers_beside_a_writer_take_only_stored_bytes() -> None:
    """Threads that switch after every few instructions; bytes are drawn from the name."""
    directory = Directory()
    names = random_names(24)
    arena = np.zeros((8, 512), np.int64)
    stop = threading.Event()
    failures: list[str] = []
    hits = 0

    def write() -> None:
        random = np.random.default_rng(3)
        while not stop.is_set():
            number = int(random.integers(len(names)))
            slot = number % len(arena)
            directory.writer.retract(np.array([slot]))
            arena[slot] = number
            directory.publish([slot], [names[number]])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline or (hits == 0 and time.monotonic() < deadline + 10):
            found = directory.reader.lookup_each(1, b"".join(names))
            for number in np.flatnonzero(found.mask).tolist():
                one = slice(number, number + 1)
                copy = arena[found.slots[number]].copy()
                if directory.reader.still_valid(BOOT_ID, found.slots[one], found.generations[one]):
                    hits += 1
                    if (copy != number).any() or found.offsets[number] != 4096 * (number % 8):
                        failures.append(f"{number}: {copy[:4]}, {found.offsets[number]}")
    finally:
        stop.set()
        writer.join()
        sys.setswitchinterval(before)
    assert failures == []
    assert hits > 0


# -------------------------------------------------------------------- self-checks


def test_integrity_names_a_generation_that_is_odd(directory: Directory) -> None:
    names = random_names(2)
    directory.publish([1, 2], names)
    with pytest.raises(InvariantViolated, match=r"generation is even .*\[3\]"):
        directory.writer.check_integrity(np.array([1, 3]), as_array(names))


def test_integrity_names_a_record_of_another_block(directory: Directory) -> None:
    names = random_names(2)
    directory.publish([1, 2], names)
    with pytest.raises(InvariantViolated, match=r"has its name .*\[1, 2\]"):
        directory.writer.check_integrity(np.array([1, 2]), as_array(names[::-1]))


def test_integrity_names_a_block_that_nobody_finds(directory: Directory) -> None:
    names = random_names(2)
    directory.publish([1, 2], names)
    entries = directory.writer._columns.buckets[:, BUCKET:]
    entries[entries == 2] = EMPTY
    with pytest.raises(InvariantViolated, match=r"is found .*slot=2"):
        directory.writer.check_integrity(np.array([1, 2]), as_array(names))
    with pytest.raises(InvariantViolated, match=r"entry in the table .*slot=2"):
        directory.writer.retract(np.array([2]))


@pytest.mark.parametrize("namespace", [-1, NAMESPACES])
def test_a_block_of_no_namespace_is_not_published(directory: Directory, namespace: int) -> None:
    with pytest.raises(InvariantViolated, match="I8"):
        directory.publish([1], random_names(1), namespace=namespace)


@pytest.mark.parametrize(
    ("law", "change"),
    [
        ("names a slot", lambda columns, used: columns.buckets[:, BUCKET:].__setitem__(used, 999)),
        ("is READY", lambda columns, used: columns.generations.__setitem__(6, 3)),
        ("slot's tag", lambda columns, used: columns.records.__setitem__((6, 0), 1 << 40)),
    ],
)
def test_the_table_check_names_the_law(directory: Directory, law: str, change: object) -> None:
    directory.publish([6], [name(home=1, upper=9)])
    columns = directory.writer._columns
    assert callable(change)
    change(columns, columns.buckets[:, BUCKET:] == 6)
    with pytest.raises(InvariantViolated, match=law):
        for _ in directory.writer.check_table():
            pass


def test_a_table_of_many_slices_is_checked_to_its_end() -> None:
    directory = Directory(slots=40_000)
    names = random_names(40_000)
    directory.publish(list(range(40_000)), names)
    assert len(list(directory.writer.check_table())) == 16
    columns = directory.writer._columns
    last = int(columns.buckets[-1024:, BUCKET:][columns.buckets[-1024:, BUCKET:] != EMPTY][-1])
    columns.generations[last] += np.uint64(1)
    with pytest.raises(InvariantViolated, match="READY"):
        for _ in directory.writer.check_table():
            pass
