"""Building blocks of the catalog, which alone uses them.

Primitives: `Names` (fingerprint -> row), `SlotMap` (slot -> row, sparse), `Replicas` (state and
slot of every row in one tier, children counted by tier), `Family` (parent, children, siblings).
Pure numpy and dicts; knows nothing of leases, policy or time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.arrays import count_at, is_unique
from kvstore.errors import InvalidRequest, InvariantViolated, check
from kvstore.types import FINGERPRINT_BYTES, PARTS_MAX, ByteArray, IntArray, ReplicaState

ABSENT_ROW = -1
"""No such row; as a parent: the root, or a namespace without parents."""
FREE_ROW = -2
"""As a parent: the row is unused."""

COLUMNS: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
    "fingerprints": (np.uint8, (FINGERPRINT_BYTES,)),
    "namespace": (np.uint16, ()),
    "clear_count": (np.uint32, ()),
    "depth": (np.uint32, ()),
    "length": (np.uint32, ()),
    "nvme_generation": (np.uint64, ()),
    "checksums": (np.uint64, (PARTS_MAX,)),
    "leases": (np.int32, ()),
    "pins": (np.int32, ()),
    "last_use": (np.float64, ()),
    "uses": (np.uint32, ()),
}
"""What is kept of each row beside its replicas and its family: dtype and shape of an entry."""

_T = TypeVar("_T", bound=np.generic)
_SHARDS = 64
_CHUNK_BITS = 6
_CHUNK_SLOTS = 1 << _CHUNK_BITS
_ABSENT = int(ReplicaState.ABSENT)


class Names:
    """Fingerprint -> row, in many small dicts: one of 350,000 names takes 35 ms when it grows."""

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        self._get = [self._shards[first % _SHARDS].get for first in range(256)]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def find(self, joined: bytes) -> list[int]:
        """Row of each name in `joined`, ABSENT_ROW where unknown."""
        get = self._get
        return [get[name[0]](name, ABSENT_ROW) for name in split_names(joined)]

    def find_prefix(self, joined: bytes) -> list[int]:
        """Rows of the names before the first unknown one."""
        rows = self.find(joined)
        # Finding all and cutting is twice as fast as a loop that stops: hits are mostly whole.
        return rows[: rows.index(ABSENT_ROW)] if ABSENT_ROW in rows else rows

    def insert_many(self, names: Sequence[bytes], rows: Sequence[int]) -> None:
        """Name rows; a name that is taken is our bug."""
        shards, before = self._shards, len(self)
        for name, row in zip(names, rows, strict=True):
            shards[name[0] % _SHARDS][name] = row
        check(len(self) == before + len(names), "a block has one row", names=len(names))

    def remove_many(self, names: Sequence[bytes]) -> None:
        """Forget known names."""
        shards = self._shards
        for name in names:
            del shards[name[0] % _SHARDS][name]


class SlotMap:
    """Slot -> row, in chunks made when first written: large slots use few of the numbers."""

    def __init__(self, slots_max: int) -> None:
        self.slots_max = slots_max
        self._chunk_of: NDArray[np.int32] = np.zeros(-(-slots_max // _CHUNK_SLOTS), np.int32)
        # Entries are row + 1, so that 0 means none; chunk 0 is what unwritten slots read.
        self._entries: NDArray[np.int32] = np.zeros((1, _CHUNK_SLOTS), np.int32)
        self._chunks = 1

    def rows_of(self, slots: IntArray) -> IntArray:
        """Row of each slot, int64[n], ABSENT_ROW where none."""
        slots = np.asarray(slots, np.int64)
        entries = self._entries[self._chunk_of[slots >> _CHUNK_BITS], slots & (_CHUNK_SLOTS - 1)]
        rows: IntArray = entries.astype(np.int64) - 1
        return rows

    def put(self, slots: IntArray, rows: IntArray | int) -> None:
        """Set the rows of `slots`; ABSENT_ROW clears."""
        if not slots.size:
            return
        check(slots.min() >= 0, "a replica lies in a slot")
        chunks = slots >> _CHUNK_BITS
        unwritten = self._chunk_of[chunks] == 0
        if np.count_nonzero(unwritten):
            self._add_chunks(np.flatnonzero(np.bincount(chunks[unwritten])))
        self._entries[self._chunk_of[chunks], slots & (_CHUNK_SLOTS - 1)] = np.add(rows, 1)

    def _add_chunks(self, missing: IntArray) -> None:
        end = self._chunks + missing.size
        if end > len(self._entries):
            grown = np.zeros((max(end, 2 * len(self._entries)), _CHUNK_SLOTS), np.int32)
            grown[: self._chunks] = self._entries[: self._chunks]
            self._entries = grown
        self._chunk_of[missing] = np.arange(self._chunks, end)
        self._chunks = end


class Replicas:
    """One tier: state u8[n], slot int64[n], children with a replica here int32[n]."""

    def __init__(self, slots_max: int, capacity: int) -> None:
        self.state: ByteArray = np.zeros(capacity, np.uint8)
        self.slot: IntArray = np.full(capacity, -1, np.int64)
        self.children: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self.by_slot = SlotMap(slots_max)
        self.count = 0
        """Replicas in any state but ABSENT."""

    def grow(self, capacity: int, end: int) -> None:
        """Move the first `end` rows into larger columns."""
        self.state = grown(self.state, capacity, end)
        self.slot = grown(self.slot, capacity, end, -1)
        self.children = grown(self.children, capacity, end)

    def set(
        self, rows: IntArray, state: int, slots: IntArray | None, parents: NDArray[np.int32]
    ) -> None:
        """Change the replicas of unique `rows`, whose parents are `parents`, to a ReplicaState."""
        if not is_unique(rows):
            raise InvariantViolated(f"rows of one change are unique (rows={rows[:8].tolist()})")
        held = self.state[rows] != _ABSENT
        if state == _ABSENT:
            gone = rows[held]
            self.by_slot.put(self.slot[gone], ABSENT_ROW)
            self.slot[gone] = -1
            self._count(parents[held], -1)
        else:
            new = parents[~held]
            if slots is not None:
                self._place(rows, held, slots)
            elif new.size:
                raise InvariantViolated(f"a new replica needs a slot (rows={rows[:8].tolist()})")
            self._count(new, 1)
        self.state[rows] = state

    def _place(self, rows: IntArray, held: NDArray[np.bool_], slots: IntArray) -> None:
        check(slots.shape == rows.shape and is_unique(slots), "I6 one slot a row")
        moved = rows[held & (self.slot[rows] != slots)]
        self.by_slot.put(self.slot[moved], ABSENT_ROW)
        owners = self.by_slot.rows_of(slots)
        if np.count_nonzero((owners != ABSENT_ROW) & (owners != rows)):
            raise InvariantViolated(f"I6 a slot holds one block (slots={slots[:8].tolist()})")
        self.by_slot.put(slots, rows)
        self.slot[rows] = slots

    def _count(self, parents: NDArray[np.int32], change: int) -> None:
        self.count += change * parents.size
        parents = parents[parents >= 0]
        if parents.size:
            count_at(self.children, parents, change)


class Family:
    """Who follows whom: parent and number of children int32[n], and each row's list of children."""

    def __init__(self, capacity: int) -> None:
        self.parent: NDArray[np.int32] = np.full(capacity, FREE_ROW, np.int32)
        self.children: NDArray[np.int32] = np.zeros(capacity, np.int32)
        self._first: NDArray[np.int32] = np.full(capacity, ABSENT_ROW, np.int32)
        self._next: NDArray[np.int32] = np.full(capacity, ABSENT_ROW, np.int32)
        self._previous: NDArray[np.int32] = np.full(capacity, ABSENT_ROW, np.int32)

    def grow(self, capacity: int, end: int) -> None:
        """Move the first `end` rows into larger columns."""
        self.parent = grown(self.parent, capacity, end, FREE_ROW)
        self.children = grown(self.children, capacity, end)
        self._first = grown(self._first, capacity, end, ABSENT_ROW)
        self._next = grown(self._next, capacity, end, ABSENT_ROW)
        self._previous = grown(self._previous, capacity, end, ABSENT_ROW)

    def join_chain(self, rows: IntArray, parent: int) -> None:
        """Free rows become a chain: the first a child of `parent`, each other of the one before."""
        if not rows.size:
            return
        before, after = rows[:-1], rows[1:]
        self.parent[after], self._first[before], self.children[before] = before, after, 1
        first = int(rows[0])
        self.parent[first] = parent
        if parent >= 0:
            sibling = int(self._first[parent])
            self._next[first] = sibling
            if sibling >= 0:
                self._previous[sibling] = first
            self._first[parent] = first
            self.children[parent] += 1

    def join_many(self, rows: IntArray, parents: IntArray) -> None:
        """Free rows become children of live rows, of each other, or (ABSENT_ROW) of nobody."""
        self.parent[rows] = parents
        has_parent = parents >= 0
        order = np.argsort(parents[has_parent], kind="stable")
        child, parent = rows[has_parent][order], parents[has_parent][order]
        same = parent[1:] == parent[:-1]
        self._next[child[:-1][same]] = child[1:][same]
        self._previous[child[1:][same]] = child[:-1][same]
        is_first, is_last = np.ones((2, child.size), np.bool_)
        is_first[1:] = is_last[:-1] = ~same
        before = self._first[parent[is_last]]
        self._next[child[is_last]] = before
        self._previous[before[before >= 0]] = child[is_last][before >= 0]
        self._first[parent[is_first]] = child[is_first]
        count_at(self.children, parent, 1)

    def remove_if(self, rows: list[int], is_free: Callable[[int], bool]) -> list[int]:
        """Free childless rows, and parents that are childless then, as far as `is_free` says so of
        each; returns them.
        """
        # Numbers one by one come out of these in a third of an array's time.
        parents, first, children = self.parent.data, self._first.data, self.children.data
        following, previous = self._next.data, self._previous.data
        gone = []
        for row in rows:
            while row >= 0 and parents[row] != FREE_ROW and not children[row] and is_free(row):
                gone.append(row)
                parent, before, after = parents[row], previous[row], following[row]
                if after >= 0:
                    previous[after] = before
                if before >= 0:
                    following[before] = after
                elif parent >= 0:
                    first[parent] = after
                if parent >= 0:
                    children[parent] -= 1
                parents[row] = FREE_ROW
                following[row] = previous[row] = ABSENT_ROW
                row = parent
        return gone

    def children_of(self, row: int) -> list[int]:
        """Child rows."""
        found: list[int] = []
        child = int(self._first[row])
        while child >= 0:
            found.append(child)
            child = int(self._next[child])
        return found

    def check_rows(self, rows: IntArray) -> None:
        """Laws that live rows and their neighbours show."""
        parent, before, after = self.parent[rows], self._previous[rows], self._next[rows]
        check((self.parent[parent[parent >= 0]] != FREE_ROW).all(), "a parent lives")
        check((self._next[before[before >= 0]] == rows[before >= 0]).all(), "siblings, backward")
        check((self._previous[after[after >= 0]] == rows[after >= 0]).all(), "siblings, forward")
        check(
            (self.parent[after[after >= 0]] == parent[after >= 0]).all(), "siblings share a parent"
        )
        heads = (parent >= 0) & (before < 0)
        check((self._first[parent[heads]] == rows[heads]).all(), "first child")
        childless = self._first[rows] < 0
        check((childless == (self.children[rows] == 0)).all(), "children and their count")


def joined_names(fingerprints: bytes | ByteArray) -> bytes:
    """Names in one piece, from joined bytes or u8[n, 32]."""
    return fingerprints if isinstance(fingerprints, bytes) else fingerprints.tobytes()


def split_names(joined: bytes) -> list[bytes]:
    """The 32-byte names in `joined`. Raises InvalidRequest when a piece is left over."""
    if len(joined) % FINGERPRINT_BYTES:
        raise InvalidRequest(
            f"fingerprints: {len(joined)} bytes are not whole names of {FINGERPRINT_BYTES} bytes"
        )
    # tolist() of a void dtype makes the bytes objects in one C loop, 4 times as fast as slicing.
    names: list[bytes] = np.frombuffer(joined, f"V{FINGERPRINT_BYTES}").tolist()
    return names


def grown(column: NDArray[_T], capacity: int, end: int, rest: int = 0) -> NDArray[_T]:
    """A column of `capacity` rows: the first `end` of `column`, then `rest`."""
    larger = np.zeros((capacity, *column.shape[1:]), column.dtype)
    larger[:end] = column[:end]
    if rest:
        larger[end:] = rest
    return larger
