"""The directory: what is found, what is missed, and who is refused."""

from __future__ import annotations

import numpy as np
import pytest
from directory_kit import BOOT_ID, NAMESPACES, SLOTS, Directory, as_array, name, random_names

from kvstore.directory import DirectoryReader, DirectoryWriter, filter_counters
from kvstore.directory.layout import BUCKET, EMPTY, PAGE_0
from kvstore.errors import InvalidRequest, InvariantViolated, PeerGone, VersionMismatch


@pytest.fixture
def directory() -> Directory:
    return Directory()


# -------------------------------------------------------------------- what is found


def test_longest_prefix_is_found_with_all_fields(directory: Directory) -> None:
    names = random_names(10)
    slots = [63, 0, 17, 5, 40, 41, 2]
    generations = directory.publish(slots, names[:7])
    found = directory.reader.lookup(1, b"".join(names))
    assert found.count == 7
    assert found.slots.tolist() == slots
    assert found.generations.tolist() == generations.tolist()
    assert found.offsets.tolist() == [4096 * slot for slot in slots]
    assert found.lengths.tolist() == [100 + slot for slot in slots]
    directory.check(slots, names[:7])


def test_prefix_ends_at_the_first_hole_and_each_does_not(directory: Directory) -> None:
    names = random_names(6)
    directory.publish([0, 1, 3, 4], [names[0], names[1], names[3], names[4]])
    assert directory.found(names) == [0, 1]
    assert directory.found_each(names) == [0, 1, None, 3, 4, None]


def test_nothing_is_found_of_nothing(directory: Directory) -> None:
    assert directory.found([]) == []
    assert directory.found_each([]) == []
    assert directory.found(random_names(40)) == []
    assert directory.found_each(random_names(3)) == [None, None, None]


def test_an_array_does_as_well_as_bytes(directory: Directory) -> None:
    names = random_names(3)
    directory.publish([1, 2, 3], names)
    apart = np.stack([as_array(names)] * 2, axis=1)[:, 0]  # rows that do not lie back to back
    assert directory.reader.lookup(1, apart).slots.tolist() == [1, 2, 3]


def test_a_chain_longer_than_what_is_prepared() -> None:
    directory = Directory(slots=5000)
    names = random_names(3000)
    directory.publish(list(range(3000)), names)
    assert directory.found(names + random_names(10, seed=2)) == list(range(3000))
    assert directory.found_each(names)[2999] == 2999


def test_a_full_directory_finds_every_name() -> None:
    for slots in (1, 2, 3, 64, 1000):
        directory = Directory(slots)
        names = random_names(slots, seed=slots)
        directory.publish(list(range(slots)), names)
        assert directory.found(names) == list(range(slots))
        assert directory.found_each(names[::-1]) == list(range(slots))[::-1]
        directory.check(list(range(slots)), names)


# -------------------------------------------------------------------- generations


def test_retract_hides_and_voids(directory: Directory) -> None:
    names = random_names(3)
    directory.publish([4, 5, 6], names)
    found = directory.reader.lookup(1, b"".join(names))
    assert directory.reader.still_valid(BOOT_ID, found.slots, found.generations)
    directory.writer.retract(np.array([5]))
    assert not directory.reader.still_valid(BOOT_ID, found.slots, found.generations)
    assert directory.reader.still_valid(BOOT_ID, found.slots[:1], found.generations[:1])
    assert directory.found(names) == [4]
    assert directory.found_each(names) == [4, None, 6]
    directory.check([4, 6], [names[0], names[2]])


def test_reuse_never_looks_like_the_old_block(directory: Directory) -> None:
    old, new = random_names(2)
    directory.publish([9], [old])
    held = directory.reader.lookup(1, old)
    directory.writer.retract(np.array([9]))
    directory.publish([9], [new])
    assert not directory.reader.still_valid(BOOT_ID, held.slots, held.generations)
    assert directory.found([old]) == []
    assert directory.found([new]) == [9]
    directory.writer.retract(np.array([9]))
    directory.publish([9], [old])
    assert not directory.reader.still_valid(BOOT_ID, held.slots, held.generations)


def test_even_means_ready_and_generations_only_grow(directory: Directory) -> None:
    slots = np.array([3, 8])
    seen = [directory.writer.generations(slots)]
    directory.publish([3, 8], random_names(2))
    seen.append(directory.writer.generations(slots))
    directory.writer.retract(slots)
    seen.append(directory.writer.generations(slots))
    assert [(generations % 2).tolist() for generations in seen] == [[1, 1], [0, 0], [1, 1]]
    assert (np.diff(np.array(seen), axis=0) > 0).all()


def test_what_an_abandoned_filling_promised_never_comes(directory: Directory) -> None:
    slot = np.array([12])
    directory.writer.retract(slot)
    promised = directory.writer.generations(slot) + np.uint64(1)
    directory.writer.retract(slot)  # given up, and taken again for another block
    directory.publish([12], random_names(1))
    assert not directory.reader.still_valid(BOOT_ID, slot, promised)
    directory.writer.retract(slot)
    directory.writer.retract(slot)
    assert directory.writer.published == 0


def test_a_readable_slot_is_not_published(directory: Directory) -> None:
    first, second = random_names(2)
    directory.publish([1], [first])
    with pytest.raises(InvariantViolated, match="unreadable"):
        directory.publish([1], [second])
    assert directory.found([first]) == [1]


# -------------------------------------------------------------------- the table


def test_names_of_one_tag_are_told_apart_by_the_rest(directory: Directory) -> None:
    names = [name(home=2, salt=salt) for salt in range(5)]
    directory.publish([10, 11, 12, 13], names[:4])
    assert directory.found(names) == [10, 11, 12, 13]
    assert directory.found_each(names[::-1]) == [None, 13, 12, 11, 10]
    directory.writer.retract(np.array([10, 12]))
    assert directory.found_each(names) == [None, 11, None, 13, None]
    assert directory.found([names[3]]) == [13]
    directory.check([11, 13], [names[1], names[3]])


def test_an_upper_half_of_zero_is_no_empty_place(directory: Directory) -> None:
    names = [name(home=1, upper=0, salt=salt) for salt in range(3)]
    assert directory.found(names) == []
    directory.publish([7, 8], names[:2])
    directory.writer.retract(np.array([7]))  # leaves a hole that looks alike before the entry
    assert directory.found([names[1]]) == [8]
    assert directory.found_each(names) == [None, 8, None]


def crowd(directory: Directory, home: int) -> tuple[list[int], list[bytes]]:
    """Three buckets' worth of names of one home, as many of the next, all published."""
    names = [name(home, upper=number + 1) for number in range(3 * BUCKET)]
    names += [name(home + 1, upper=number + 1) for number in range(BUCKET)]
    slots = list(range(len(names)))
    directory.publish(slots, names)
    return slots, names


@pytest.mark.parametrize("home", [3, 14, 15])
def test_full_buckets_spill_into_the_next(directory: Directory, home: int) -> None:
    slots, names = crowd(directory, home)  # 16 buckets: the last homes spill around the end
    assert directory.found(names) == slots
    assert directory.found_each(names[::-1]) == slots[::-1]
    directory.check(slots, names)


@pytest.mark.parametrize("seed", range(8))
def test_removal_leaves_no_tombstone_and_loses_nobody(directory: Directory, seed: int) -> None:
    slots, names = crowd(directory, home=14)
    order = np.random.default_rng(seed).permutation(len(slots)).tolist()
    while order:
        gone = order.pop()
        directory.writer.retract(np.array([slots[gone]]))
        assert directory.found_each(names) == [
            slots[number] if number in order else None for number in range(len(names))
        ]
        directory.check([slots[number] for number in order], [names[number] for number in order])
    assert (directory.writer._columns.buckets[:, BUCKET:] == EMPTY).all()


def test_a_block_that_moves_is_found_all_the_time(directory: Directory) -> None:
    (block,) = random_names(1)
    directory.publish([20], [block])
    directory.publish([21], [block])
    assert directory.found([block]) in ([20], [21])
    directory.writer.retract(np.array([20]))
    assert directory.found([block]) == [21]
    directory.check([21], [block])


# -------------------------------------------------------------------- namespaces and clears


def test_a_block_is_found_in_its_namespace_only(directory: Directory) -> None:
    (block,) = random_names(1)
    directory.publish([1], [block], namespace=2)
    assert directory.found([block], namespace=2) == [1]
    assert directory.found([block], namespace=3) == []
    assert directory.found_each([block], namespace=0) == [None]


def test_clear_hides_what_was_published_before(directory: Directory) -> None:
    old, new = random_names(2)
    directory.publish([1], [old], namespace=2)
    directory.writer.set_clear_count(2, 1)
    assert directory.found([old], namespace=2) == []
    directory.publish([2], [new], namespace=2, clear_count=1)
    assert directory.found_each([old, new], namespace=2) == [None, 2]
    directory.writer.retract(np.array([1]))
    directory.publish([1], [old], namespace=2, clear_count=0)  # a commit that came too late
    assert directory.found([old], namespace=2) == []


@pytest.mark.parametrize("namespace", [-1, NAMESPACES])
def test_an_unknown_namespace_is_refused(directory: Directory, namespace: int) -> None:
    with pytest.raises(InvalidRequest, match="namespace index"):
        directory.reader.lookup(namespace, bytes(32))


def test_a_torn_fingerprint_is_refused(directory: Directory) -> None:
    with pytest.raises(InvalidRequest, match="33 bytes"):
        directory.reader.lookup(1, bytes(33))
    with pytest.raises(InvalidRequest, match="31 bytes"):
        directory.reader.lookup_each(1, np.zeros(31, np.uint8))


# -------------------------------------------------------------------- lives and formats


def test_the_end_of_a_life_voids_everything(directory: Directory) -> None:
    names = random_names(2)
    directory.publish([1, 2], names)
    found = directory.reader.lookup(1, b"".join(names))
    assert directory.reader.boot_id == BOOT_ID
    assert not directory.reader.still_valid(BOOT_ID + 1, found.slots, found.generations)
    directory.writer.close_boot()
    assert directory.reader.boot_id == 0
    assert not directory.reader.still_valid(BOOT_ID, found.slots, found.generations)
    with pytest.raises(PeerGone, match="no living daemon"):
        DirectoryReader(directory.header)


def test_a_header_in_use_again_starts_empty(directory: Directory) -> None:
    names = random_names(40)
    directory.publish(list(range(40)), names)
    directory.writer.set_clear_count(1, 9)
    DirectoryWriter(directory.header, slots=SLOTS, namespaces_max=NAMESPACES, boot_id=78)
    reader = DirectoryReader(directory.header)
    assert reader.boot_id == 78
    assert not reader.lookup_each(1, b"".join(names)).mask.any()


def test_a_header_of_nobody_is_no_life() -> None:
    with pytest.raises(PeerGone, match="no living daemon"):
        DirectoryReader(np.zeros(1 << 16, np.uint8))


RIGHT = (b"KVARENA\0", 2, 0, BOOT_ID, SLOTS, 16, NAMESPACES, 0)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param((b"KVSTORE\0", *RIGHT[1:]), id="magic"),
        pytest.param((RIGHT[0], 1, *RIGHT[2:]), id="version"),
        pytest.param((*RIGHT[:4], 0, 1, NAMESPACES, 0), id="no slots"),
        pytest.param((*RIGHT[:4], 1 << 20, 1 << 18, NAMESPACES, 0), id="more slots than bytes"),
        pytest.param((*RIGHT[:5], 32, *RIGHT[6:]), id="other buckets"),
        pytest.param((*RIGHT[:6], 0, 0), id="no namespaces"),
        pytest.param((*RIGHT[:7], 1 << 20), id="more counters than bytes"),
        pytest.param((*RIGHT[:7], 24), id="counters are no power of two"),
    ],
)
def test_another_format_is_refused(directory: Directory, fields: tuple[object, ...]) -> None:
    assert PAGE_0.unpack_from(directory.header.data) == RIGHT
    PAGE_0.pack_into(directory.header.data, 0, *fields)
    with pytest.raises(VersionMismatch, match="client"):
        DirectoryReader(directory.header)


# -------------------------------------------------------------------- what is below


def test_without_a_filter_anything_may_be_below(directory: Directory) -> None:
    assert directory.reader.may_be_below(name(1))


@pytest.mark.parametrize("counters", [64, 4096])
def test_what_is_below_is_never_denied(counters: int) -> None:
    """However full: names come and go in batches, some twice (written again before they leave)."""
    directory = Directory(counters=counters)
    rng = np.random.default_rng(counters)
    names = random_names(300)
    below: list[bytes] = []
    for _ in range(60):
        coming = [names[at] for at in rng.integers(len(names), size=20)]
        directory.writer.count_below(as_array(coming), 1)
        below += coming
        rng.shuffle(below)
        leaving, below = below[:15], below[15:]
        directory.writer.count_below(as_array(leaving), -1)
        assert all(directory.reader.may_be_below(name) for name in below)
        directory.writer.check_below(as_array(below))


def test_what_left_is_denied_again() -> None:
    directory = Directory(counters=4096)
    names = random_names(50)
    assert not any(directory.reader.may_be_below(name) for name in names)
    directory.writer.count_below(as_array(names), 1)
    assert all(directory.reader.may_be_below(name) for name in names)
    directory.writer.count_below(as_array(names), -1)
    assert not any(directory.reader.may_be_below(name) for name in names)
    with pytest.raises(InvariantViolated, match="below"):
        directory.writer.check_below(as_array(names[:1]))


def test_a_counter_at_its_end_stays_there() -> None:
    directory = Directory(counters=64)
    same = as_array([name(1)] * 100)
    for change in [1] * 4 + [-1] * 4:
        directory.writer.count_below(same, change)
    assert directory.reader.may_be_below(name(1)), "unknown from here on, never denied"


@pytest.mark.parametrize(
    ("bytes_below", "counters"), [(0, 1 << 16), (64 << 30, 1 << 19), (1 << 50, 1 << 24)]
)
def test_the_filter_follows_the_tiers_size(bytes_below: int, counters: int) -> None:
    assert filter_counters(bytes_below) == counters
