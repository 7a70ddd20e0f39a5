"""What is known of every block: one row a block in numpy columns, and a name for each row.

Primitives: `rows`, `prefix_rows` (names to rows), `add_chain`, `add_many` (new rows),
`set_host`, `set_nvme` (the only ways a replica changes), `host_rows_of`, `nvme_rows_of` (slots to
rows), `children_of`, `subtree`, `remove_if_bare` (the only way a row goes), `check_integrity`.

Pure and synchronous: no clock, no I/O, no policy; changed on the daemon's loop only. Columns are
public: index them with a row or an IntArray of rows, but keep no column over an `add_...`,
which may move them all. Reading one at ABSENT_ROW gives some row's value, never an error: mask it.

Who writes what: replicas, `parent` and `children` only this module; `leases` the lease table;
`uses` and `last_use` the policy; `pins`, `checksums`, `clear_count` the store.

A row lives while it has a replica, a lease, a pin or a child row; one kept only for its children
is a *bare name*.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.catalog.laws import CatalogLaws
from kvstore.columns import (
    ABSENT_ROW,
    COLUMNS,
    FREE_ROW,
    Family,
    Names,
    Replicas,
    grown,
    joined_names,
    split_names,
)
from kvstore.errors import InvariantViolated, check
from kvstore.types import (
    FINGERPRINT_BYTES,
    BoolArray,
    ByteArray,
    FloatArray,
    IntArray,
    ReplicaState,
    Tier,
    UIntArray,
)

Numbers: TypeAlias = NDArray[np.integer] | int

__all__ = ["ABSENT_ROW", "Catalog"]

_CAPACITY_MIN = 1024
_CHECK_ROWS = 512
_ABSENT = int(ReplicaState.ABSENT)


class Catalog:
    """Rows and columns; see the module's text for who may write which."""

    fingerprints: ByteArray
    """u8[n, 32]"""
    parent: NDArray[np.int32]
    """Row of the block before; ABSENT_ROW at the root and where parents do not matter."""
    namespace: NDArray[np.uint16]
    """Index of the namespace."""
    clear_count: NDArray[np.uint32]
    depth: NDArray[np.uint32]
    """Blocks before this one in its chain."""
    length: NDArray[np.uint32]
    """Payload bytes."""
    host_state: ByteArray
    """ReplicaState, u8[n]; `nvme_state` likewise."""
    host_slot: IntArray
    """Slot, int64[n], -1 without a replica; `nvme_slot` likewise."""
    nvme_state: ByteArray
    nvme_slot: IntArray
    nvme_generation: UIntArray
    checksums: UIntArray
    """u64[n, PARTS_MAX]"""
    children: NDArray[np.int32]
    """Rows whose parent is this one; `host_children`, `nvme_children`: with a replica there."""
    host_children: NDArray[np.int32]
    nvme_children: NDArray[np.int32]
    leases: NDArray[np.int32]
    pins: NDArray[np.int32]
    """Jobs that need the row's replicas to stay."""
    last_use: FloatArray
    """Seconds, monotonic."""
    uses: NDArray[np.uint32]

    def __init__(
        self, *, host_slots: int = 0, nvme_slots: int = 0, capacity: int = _CAPACITY_MIN
    ) -> None:
        """`host_slots`, `nvme_slots`: one more than each tier's highest slot number.

        `capacity`: rows to make room for; more are made by doubling, which copies every column.
        """
        capacity = max(capacity, _CAPACITY_MIN)
        self._names = Names()
        self._free_rows: list[int] = []
        self._end = 0
        self._changes = 0
        self.on_nvme: Callable[[IntArray, int], None] = lambda rows, change: None
        """Told of rows that are about to get (1) or just lost (-1) their NVMe replica."""
        self._host = Replicas(host_slots, capacity)
        self._nvme = Replicas(nvme_slots, capacity)
        self._family = Family(capacity)
        for name, (dtype, shape) in COLUMNS.items():
            setattr(self, name, np.zeros((capacity, *shape), dtype))
        self._bind()

    # ------------------------------------------------------------ names to rows

    def __len__(self) -> int:
        return self._end - len(self._free_rows)

    @property
    def rows_end(self) -> int:
        """One more than the highest row ever used; free rows below it have ABSENT replicas."""
        return self._end

    def rows(self, fingerprints: bytes | ByteArray) -> IntArray:
        """Row of each name (joined bytes, or u8[n, 32]), int64[n], ABSENT_ROW where unknown.

        Raises InvalidRequest when the bytes are not a whole number of names.
        """
        return np.array(self._names.find(joined_names(fingerprints)), np.int64)

    def prefix_rows(self, fingerprints: bytes | ByteArray) -> IntArray:
        """Rows of the names before the first unknown one, int64[<= n]."""
        return np.array(self._names.find_prefix(joined_names(fingerprints)), np.int64)

    def host_rows_of(self, slots: IntArray) -> IntArray:
        """Row whose host replica lies in each slot, int64[n], ABSENT_ROW where none."""
        return self._host.by_slot.rows_of(slots)

    def nvme_rows_of(self, slots: IntArray) -> IntArray:
        """The same for NVMe."""
        return self._nvme.by_slot.rows_of(slots)

    def replicas(self, tier: Tier) -> Replicas:
        """The columns of one tier, for code that serves both. Read only."""
        return self._host if tier == Tier.HOST else self._nvme

    # ------------------------------------------------------------ new rows

    def add_chain(
        self,
        fingerprints: bytes,
        *,
        parent: int,
        namespace: int,
        clear_count: int,
        depth: int,
        length: int,
        is_linked: bool = True,
    ) -> IntArray:
        """Rows int64[n] for consecutive blocks, each the parent of the next; none may be known.

        `fingerprints`: n joined names; `parent` and `depth` are those of the first. Not linked:
        parents do not matter, and none has one.
        """
        self._check_parent(parent)
        count = len(fingerprints) // FINGERPRINT_BYTES
        rows = np.array(self._take_rows(count), np.int64)
        depths = np.arange(depth, depth + count)
        self._fill(rows, fingerprints, namespace, clear_count, depths, length)
        if is_linked:
            self._family.join_chain(rows, parent)
        else:
            self._family.parent[rows] = ABSENT_ROW
        return rows

    def add_many(
        self,
        fingerprints: ByteArray,
        *,
        parents: IntArray,
        namespaces: Numbers,
        clear_counts: Numbers,
        depths: Numbers,
        lengths: Numbers,
    ) -> IntArray:
        """Rows int64[n] for many blocks at once (recovery, flat namespaces); none may be known.

        `fingerprints` u8[n, 32]; `parents` int64[n]: position of each block's parent in this very
        batch, negative at the root. The others have n entries each, or one for all.
        """
        positions = np.asarray(parents, np.int64)
        check(not positions.size or positions.max() < positions.size, "parents lie in the batch")
        rows = np.array(self._take_rows(positions.size), np.int64)
        parents = np.where(positions >= 0, rows[positions], ABSENT_ROW)
        columns = (namespaces, clear_counts, depths, lengths)
        self._fill(rows, fingerprints.tobytes(), *columns)
        self._family.join_many(rows, parents)
        return rows

    # ------------------------------------------------------------ replicas

    def set_host(
        self, rows: IntArray | int, state: ReplicaState, slots: IntArray | int | None = None
    ) -> None:
        """Change the host replicas of unique rows.

        A replica that comes needs its slot; one that stays keeps its own or moves to the given one;
        ABSENT gives the slot up. Children counters and slot maps follow. Raises InvariantViolated
        when a slot holds another block.
        """
        self._set(self._host, rows, state, slots)

    def set_nvme(
        self,
        rows: IntArray | int,
        state: ReplicaState,
        slots: IntArray | int | None = None,
        generations: UIntArray | int | None = None,
    ) -> None:
        """The same for NVMe; `generations` when given."""
        rows = np.atleast_1d(np.asarray(rows, np.int64))
        is_held = self.nvme_state[rows] != _ABSENT
        if state != ReplicaState.ABSENT:
            self.on_nvme(rows[~is_held], 1)
        self._set(self._nvme, rows, state, slots)
        if state == ReplicaState.ABSENT:
            self.on_nvme(rows[is_held], -1)
        if generations is not None:
            self.nvme_generation[rows] = generations

    def remove_if_bare(self, rows: IntArray | int) -> int:
        """Remove the rows that nothing keeps, and parents kept only for them; returns how many."""
        rows = np.atleast_1d(np.asarray(rows, np.int64))
        host, nvme = self.host_state.data, self.nvme_state.data
        leases, pins = self.leases.data, self.pins.data
        gone = self._family.remove_if(
            rows.tolist(), lambda row: not (host[row] or nvme[row] or leases[row] or pins[row])
        )
        if gone:
            self._names.remove_many(split_names(self.fingerprints[gone].tobytes()))
            self._free_rows += gone
            self._changes += 1
        return len(gone)

    # ------------------------------------------------------------ family

    def children_of(self, row: int) -> IntArray:
        """Child rows, int64[children]."""
        return np.array(self._family.children_of(row), np.int64)

    def subtree(self, row: int) -> IntArray:
        """`row` and all its descendants, each after its parent: reversed, leaves come first."""
        found = [row]
        for parent in found:
            found += self._family.children_of(parent)
        return np.array(found, np.int64)

    # ------------------------------------------------------------ looking

    def check_integrity(
        self, is_current: Callable[[IntArray], BoolArray] | None = None
    ) -> Generator[None, None, bool]:
        """Verify the laws of rows, names, slots and counters in steps of at most 2 ms.

        `is_current`: which rows are not about to be dropped; given, I5 is verified for those.
        Returns False when the catalog changed while the counters were summed up: run it again.
        Raises InvariantViolated.
        """
        laws = CatalogLaws(self._names, self._family, self._host, self._nvme)
        for start in range(0, self._end, _CHECK_ROWS):
            rows = np.arange(start, min(start + _CHECK_ROWS, self._end))
            rows = rows[self.parent[rows] != FREE_ROW]
            laws.check_names(rows, self.fingerprints[rows])
            laws.check_holders(rows, self.leases[rows], self.pins[rows])
            laws.check_checksums(rows, self.checksums[rows])
            self._family.check_rows(rows)
            if is_current is not None:
                laws.check_ways(rows[is_current(rows)])
            yield
        return (yield from laws.check_counts(self._end, lambda: self._changes))

    # ------------------------------------------------------------ inside

    def _set(
        self,
        replicas: Replicas,
        rows: IntArray | int,
        state: ReplicaState,
        slots: IntArray | int | None,
    ) -> None:
        rows = np.atleast_1d(np.asarray(rows, np.int64))
        given = None if slots is None else np.atleast_1d(np.asarray(slots, np.int64))
        parents = self.parent[rows]
        if np.count_nonzero(parents == FREE_ROW):
            raise InvariantViolated(f"a replica belongs to a live row (rows={rows[:8].tolist()})")
        replicas.set(rows, int(state), given, parents)
        self._changes += 1

    def _check_parent(self, parent: int) -> None:
        if parent != ABSENT_ROW and self.parent[parent] == FREE_ROW:
            raise InvariantViolated(f"a parent lives (row={parent})")

    def _take_rows(self, count: int) -> list[int]:
        """Free rows, recycled ones first."""
        rows = self._free_rows[-count:][::-1] if count else []
        del self._free_rows[len(self._free_rows) - len(rows) :]
        end = self._end + count - len(rows)
        self._grow(end)
        rows += range(self._end, end)
        self._end = end
        self._changes += 1
        return rows

    def _clear(self, rows: IntArray | int) -> None:
        """What others write starts at 0."""
        self.last_use[rows] = 0.0
        self.uses[rows] = 0
        self.checksums[rows] = 0

    def _fill(
        self,
        rows: IntArray,
        names: bytes,
        namespaces: Numbers,
        clear_counts: Numbers,
        depths: Numbers,
        lengths: Numbers,
    ) -> None:
        """Names and columns of free rows; who follows whom is the caller's to say."""
        self._names.insert_many(split_names(names), rows.tolist())
        self._clear(rows)
        self.fingerprints[rows] = np.frombuffer(names, np.uint8).reshape(-1, FINGERPRINT_BYTES)
        self.namespace[rows] = namespaces
        self.clear_count[rows] = clear_counts
        self.depth[rows] = depths
        self.length[rows] = lengths

    def _grow(self, rows: int) -> None:
        capacity = len(self.parent)
        if rows <= capacity:
            return
        while capacity < rows:
            capacity *= 2
        end = self._end
        for part in (self._host, self._nvme, self._family):
            part.grow(capacity, end)
        for name in COLUMNS:
            setattr(self, name, grown(getattr(self, name), capacity, end))
        self._bind()

    def _bind(self) -> None:
        """The parts' columns under the catalog's names."""
        self.parent, self.children = self._family.parent, self._family.children
        self.host_state, self.host_slot = self._host.state, self._host.slot
        self.nvme_state, self.nvme_slot = self._nvme.state, self._nvme.slot
        self.host_children, self.nvme_children = self._host.children, self._nvme.children
