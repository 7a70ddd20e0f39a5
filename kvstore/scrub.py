"""Verification: catalog, index and segments against each other, payloads against their checksums.

Primitives:
  `Scrubber.verify`     everything once, findings as they are made; with `fix`, what is wrong
                        leaves the store

Reads go to a private buffer, never into the arena. A finding is a miss for that block, not an
alarm for the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from kvstore.arrays import distinct
from kvstore.blockio import page_aligned
from kvstore.catalog import ABSENT_ROW
from kvstore.errors import DataError, TierError
from kvstore.index import Delete
from kvstore.laws import check_slices
from kvstore.layout import BlockLayout
from kvstore.store import ABSENT, READY, Store
from kvstore.tier.nvme import NvmeTier
from kvstore.types import IntArray, UIntArray

SLICE_BLOCKS = 64
SLICE_BYTES = 32 << 20
SLICE_RECORDS = 1024


@dataclass
class Progress:
    """How far a verification is; `findings` are new since the last one, a line each."""

    checked_blocks: int
    total_blocks: int
    findings: list[str] = field(default_factory=list)
    is_done: bool = False


@dataclass(frozen=True)
class _Job:
    """What one block must look like."""

    name: bytes
    slot: int
    generation: int
    layout: BlockLayout
    checksums: UIntArray


class Scrubber:
    """Verification over one store; its reads run on the worker threads."""

    def __init__(self, store: Store, workers: Executor) -> None:
        self._store = store
        self._workers = workers

    async def verify(self, *, payloads: bool, fix: bool) -> AsyncIterator[Progress]:
        """Yield progress with findings; with `fix`, blocks that cannot be served are dropped."""
        for _ in check_slices(self._store):
            await asyncio.sleep(0)
        nvme, columns = self._store.nvme, self._store.catalog
        if nvme is None:
            yield Progress(0, 0, is_done=True)
            return
        total = int(np.count_nonzero(columns.nvme_state[: columns.rows_end] == READY))
        checked, start = 0, 0
        while start < columns.rows_end:
            rows, start = self._slice(start, payloads)
            bad = await self._check(rows, payloads)
            if fix:
                await self._drop(list(bad))
            checked += len(rows)
            yield Progress(checked, max(total, checked), list(bad.values()))
        strays = await self._strays(nvme)
        findings = [
            f"record {name.hex()[:16]}… is in the index, not in the catalog" for name, _ in strays
        ]
        if fix and strays:
            await asyncio.wrap_future(nvme.forget(strays))
        yield Progress(checked, max(total, checked), findings, is_done=True)

    async def _drop(self, rows: list[int]) -> None:
        """Damaged blocks and what is reachable only through them leave catalog and index."""
        store, columns, nvme = self._store, self._store.catalog, self._store.nvme
        if not rows or nvme is None:
            return
        doomed = distinct(np.concatenate([store.descent_of(row) for row in rows]))
        # All of it before the first wait: later these numbers may be other blocks' rows.
        records = [
            (columns.fingerprints[row].tobytes(), int(columns.nvme_generation[row]))
            for row in doomed[columns.nvme_state[doomed] == READY].tolist()
        ]
        store.condemn(doomed, "checksum")
        await asyncio.wrap_future(nvme.forget(records))

    async def _strays(self, nvme: NvmeTier) -> list[Delete]:
        """Records whose write the catalog knows nothing of. What came or went during the scan is
        none: it is looked at again.
        """
        columns, loop = self._store.catalog, asyncio.get_running_loop()
        names, generations = await loop.run_in_executor(self._workers, nvme.recorded)
        suspects: list[Delete] = []
        for start in range(0, len(names), SLICE_RECORDS):
            part = slice(start, start + SLICE_RECORDS)
            rows = columns.rows(names[part])
            unknown = (rows == ABSENT_ROW) | (columns.nvme_state[rows] == ABSENT)
            unknown |= columns.nvme_generation[rows] != generations[part]
            suspects += [
                (names[at].tobytes(), int(generations[at]))
                for at in (np.flatnonzero(unknown) + start).tolist()
            ]
            await asyncio.sleep(0)
        return await loop.run_in_executor(self._workers, nvme.still_recorded, suspects)

    def _slice(self, start: int, payloads: bool) -> tuple[IntArray, int]:
        """READY NVMe rows from `start` on, bounded in number and (with payloads) bytes; where to
        go on.
        """
        columns = self._store.catalog
        stop = min(start + 4096, columns.rows_end)
        rows = np.arange(start, stop, dtype=np.int64)
        rows = rows[columns.nvme_state[rows] == READY]
        if payloads and len(rows):
            sizes = np.cumsum(columns.length[rows].astype(np.int64))
            most = max(1, int(np.searchsorted(sizes, SLICE_BYTES, side="right")))
            most = min(most, SLICE_BLOCKS)
            if most < len(rows):
                return rows[:most], int(rows[most])
        return rows, stop

    async def _check(self, rows: IntArray, payloads: bool) -> dict[int, str]:
        """row → finding, for those that do not hold what they should."""
        store, columns, nvme = self._store, self._store.catalog, self._store.nvme
        if nvme is None or not len(rows):
            return {}
        columns.pins[rows] += 1
        try:
            jobs = [
                _Job(
                    columns.fingerprints[row].tobytes(),
                    int(columns.nvme_slot[row]),
                    int(columns.nvme_generation[row]),
                    store.namespaces.at(int(columns.namespace[row])).layout,
                    columns.checksums[row].copy(),
                )
                for row in rows.tolist()
            ]
            loop = asyncio.get_running_loop()
            findings = await loop.run_in_executor(
                self._workers, self._read_all, nvme, jobs, payloads
            )
        finally:
            columns.pins[rows] -= 1
        # What was deleted or cleared meanwhile need not be whole any more.
        still = store.is_current(rows) & (columns.nvme_state[rows] == READY)
        return {
            row: finding
            for row, finding, is_due in zip(rows.tolist(), findings, still.tolist(), strict=True)
            if finding is not None and is_due
        }

    def _read_all(self, nvme: NvmeTier, jobs: list[_Job], payloads: bool) -> list[str | None]:
        """Worker thread: one finding or None a block."""
        findings: list[str | None] = []
        buffer = np.empty(0, np.uint8)
        for job in jobs:
            if payloads and len(buffer) < job.layout.slot_bytes:
                buffer = page_aligned(job.layout.slot_bytes)
            try:
                nvme.check_record(job.name, job.slot, job.generation)
                if payloads:
                    nvme.check_frame(job.name, job.slot, job.generation)
                    nvme.read_parts(job.slot, job.layout.parts, buffer, job.checksums)
                findings.append(None)
            except (DataError, TierError) as error:
                findings.append(f"block {job.name.hex()[:16]}… in slot {job.slot}: {error}")
        return findings
