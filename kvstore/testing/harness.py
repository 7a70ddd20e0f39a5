"""A whole daemon life without processes, sockets or threads: real floors, private memory, virtual
time.

Primitives of `Harness`:
  `start`, `stop`, `crash`   a life begins (recovery included), drains, or is killed with the power
  `wait`, `call`, `sleep`    run a coroutine, a function on the loop, or just time
  `declare`, `chain`, `engine`   what tests need most
  `check`                    invariants, books, and every readable byte

Everything between the wire and the disk is the product's own; only threads (VirtualExecutor), the
arena's memory (MemoryArena), the index's timing (SteppedIndex) and the disk (CachedDisk under
FaultyBlockIO) are of this package. One seed, one course.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from hashlib import blake2b
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvstore.assembly import Workers, host_pool, make_service, make_store, open_gpu
from kvstore.blockio import DirectIO, page_aligned
from kvstore.config import Config
from kvstore.directory import DirectoryWriter, filter_counters, header_bytes
from kvstore.errors import DataError, TierError, check
from kvstore.fingerprint import Chain, Content, Tokens, chain
from kvstore.laws import check_integrity
from kvstore.layout import BlockLayout
from kvstore.namespaces import Namespace
from kvstore.recovery import Recovered, recover
from kvstore.rpc.server import ControlServicer
from kvstore.service import Service
from kvstore.store import READY, Store
from kvstore.testing.clock import VirtualClock
from kvstore.testing.disk import CachedDisk
from kvstore.testing.engine import Engine, is_own_colour
from kvstore.testing.fake_device import FakeDevice
from kvstore.testing.faults import Decide, FaultyBlockIO, never
from kvstore.testing.stepped import Commits, MemoryArena, SteppedIndex, SteppedNvme
from kvstore.testing.virtual_loop import VirtualExecutor, VirtualLoop
from kvstore.tier.gpu import GpuTier
from kvstore.tier.host import HostTier
from kvstore.types import NamespaceId, NamespaceKind

T = TypeVar("T")
KIB, MIB = 1 << 10, 1 << 20
SMALL: Mapping[str, object] = {
    "host.bytes": MIB,
    "host.region_bytes": MIB,
    "host.slab_bytes": 128 * KIB,
    "host.slot_bytes_min": 8 * KIB,
    "host.staging_slots_min": 1,
    "nvme.bytes_max": 4 * MIB,
    "nvme.segment_bytes": 128 * KIB,
    "nvme.free_bytes_min": 4 * KIB,
    "nvme.index_map_bytes": 16 * MIB,
    "limits.namespaces_max": 16,
}
"""128 host slots of 8 KiB, at most some 400 on NVMe."""


def config_of(directory: Path, settings: Mapping[str, object]) -> Config:
    """A configuration from "section.name" keys over SMALL."""
    config = Config()
    chosen = {**SMALL, "daemon.data_dir": str(directory), **settings}
    for section in {key.split(".")[0] for key in chosen}:
        values = msgspec.structs.asdict(getattr(config, section))
        values |= {
            key.split(".")[1]: value
            for key, value in chosen.items()
            if key.startswith(f"{section}.")
        }
        part = type(getattr(config, section))(**values)
        config = msgspec.structs.replace(config, **{section: part})
    return config


def _age(task: asyncio.Task[Any]) -> tuple[int, str]:
    """Orders tasks as they were made: "Task-9" before "Task-10"."""
    return len(task.get_name()), task.get_name()


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Harness:
    """Lives of one daemon over one data directory. `settings` are "section.name" keys."""

    def __init__(
        self,
        directory: Path,
        *,
        seed: int = 0,
        settings: Mapping[str, object] | None = None,
        decide: Decide = never,
        job_seconds: Callable[[Random], float] = lambda random: random.uniform(1e-4, 2e-3),
        commit_seconds: Callable[[Random], float] = lambda random: random.uniform(0.0, 0.02),
    ) -> None:
        self.config = config_of(directory, settings or {})
        self.random = Random(seed)
        self._seed = seed
        self.clock = VirtualClock()
        self.commits = Commits()
        self.decide = decide
        self.recovered: Recovered | None = None
        self.disk: CachedDisk
        self.io: FaultyBlockIO
        self.arena: MemoryArena
        self.device: FakeDevice
        self.store: Store
        self.service: Service
        self.servicer: ControlServicer
        self.loop: VirtualLoop
        self.fatal: BaseException | None = None
        self._directory = directory
        self._job_seconds = job_seconds
        self._commit_seconds = commit_seconds
        self._ids = count(1)
        self._workers: list[VirtualExecutor] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self.is_alive = False

    # ------------------------------------------------------------------ lives

    def start(self, *, tasks: bool = True) -> Harness:
        """A life up to SERVING. Without `tasks` nothing happens but what the test does."""
        check(not self.is_alive, "one life at a time")
        self.loop = VirtualLoop(self.clock)
        self.fatal = None
        self.commits.schedule = None
        nvme = self._open_nvme() if self.config.nvme.enabled else None
        self.device = FakeDevice(self._seed)
        gpu = open_gpu(self.config, self.device)
        self.store = make_store(self.config, self._open_host(gpu), nvme, self._ids.__next__, gpu)
        if nvme is not None:
            self.recovered = recover(self.store, nvme)
            self.commits.schedule = self._commit_later
        self._workers = [self._executor(number) for number in (2, 2, 2, 1)]
        self.service = self.call(
            make_service,
            self.store,
            self.clock,
            Workers(*self._workers),
            np.random.default_rng(self.random.getrandbits(32)),
            next(self._ids),
            self._failed,
            self._ids.__next__,
        )
        self.servicer = ControlServicer(self.service)
        self.is_alive = True
        if tasks:
            self.call(self._start_tasks)
        return self

    def _open_nvme(self) -> SteppedNvme:
        class OurIndex(SteppedIndex):
            commits = self.commits

        class OurNvme(SteppedNvme):
            index_type = OurIndex

        self.disk = CachedDisk(DirectIO("off"), self.random)
        self.io = FaultyBlockIO(self.disk, lambda operation: self.decide(operation))
        self._directory.mkdir(exist_ok=True, parents=True)
        return OurNvme.open(self._directory, config=self.config.nvme, io=self.io, clock=self.clock)

    def _open_host(self, gpu: GpuTier | None) -> HostTier:
        host = self.config.host
        pool = host_pool(host)
        namespaces_max = self.config.limits.namespaces_max
        counters = filter_counters(self.config.nvme.bytes_max if self.config.nvme.enabled else 0)
        own_bytes = header_bytes(pool.slots_max, namespaces_max, counters)
        beside = gpu.header_bytes(namespaces_max) if gpu is not None else 0
        self.arena = MemoryArena(host.bytes, own_bytes + beside)
        boot_id = next(self._ids)
        if gpu is not None:
            gpu.list_in(self.arena.header_memory, own_bytes, namespaces_max, boot_id)
        directory = DirectoryWriter(
            self.arena.header_memory,
            slots=pool.slots_max,
            namespaces_max=namespaces_max,
            boot_id=boot_id,
            counters=counters,
        )
        return HostTier(pool, self.arena, directory)

    def _executor(self, threads: int) -> VirtualExecutor:
        return VirtualExecutor(self.loop, self.random, threads, self._job_seconds)

    def _commit_later(self, commit: Callable[[], None]) -> None:
        self.loop.call_later(self._commit_seconds(self.random), commit)

    def _start_tasks(self) -> None:
        self.spawn(self.service.maintain())
        if self.service.write_behind is not None:
            self.spawn(self.service.write_behind.run())

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this life; an exception in it is fatal, as in the daemon."""
        task = self.loop.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self.fatal = self.fatal or error

    def crash(self) -> None:
        """SIGKILL and power cut at once: what was not synced or committed may be lost."""
        self.is_alive = False
        for workers in self._workers:
            workers.die()
        if self.config.nvme.enabled:
            assert isinstance(self.store.nvme, SteppedNvme)
            self.disk.crash()
            self.store.nvme.die()
        self._end_loop()

    def stop(self) -> None:
        """What SIGTERM does: drain, then close."""
        self.wait(self.service.drain())
        self.is_alive = False
        self._end_loop()
        for tier in (self.store.nvme, self.store.host):
            if tier is not None:
                tier.close()

    def _end_loop(self) -> None:
        """Every task of this life ends; nothing of it is left to run later."""
        self.commits.schedule = None
        left = asyncio.all_tasks(self.loop)
        self.loop.run_until_complete(_cancel(sorted(left, key=_age)))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self._tasks.clear()
        self.loop.close()

    # ------------------------------------------------------------------ running

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the loop until `work` is done; a fatal error of the daemon is raised instead."""
        try:
            return self.loop.run_until_complete(work)
        finally:
            if self.fatal is not None:
                raise self.fatal

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the running loop, as a verb would be."""

        async def work() -> T:
            return function(*arguments)

        return self.wait(work())

    def sleep(self, seconds: float) -> None:
        """Let time pass, and everything happen that is due in it."""
        self.wait(asyncio.sleep(seconds))

    def settle(self) -> None:
        """Until write-behind has nothing left to do."""
        while self.service.write_behind is not None and self.service.write_behind.queued_blocks:
            self.sleep(0.05)

    # ------------------------------------------------------------------ what tests need

    def engine(self, name: str = "engine", *, maps_arena: bool = True) -> Engine:
        """A new client process, attached."""
        return Engine(self.servicer, self.arena, name, maps_arena=maps_arena)

    def declare(
        self,
        label: str,
        layout: BlockLayout,
        *,
        kind: NamespaceKind = NamespaceKind.CHAINED,
        window_tokens: int = 0,
    ) -> Namespace:
        """The namespace called `label`, made known to this life."""
        name = blake2b(label.encode(), digest_size=32).digest()
        return self.wait(self.service.declare(name, kind, layout, window_tokens, label))

    @staticmethod
    def chain(namespace: Namespace, tokens: Tokens, contents: tuple[Content, ...] = ()) -> Chain:
        """Names of `tokens` in a namespace."""
        return chain(
            NamespaceId(namespace.id), tokens, namespace.layout.block_tokens, contents=contents
        )

    # ------------------------------------------------------------------ what must hold

    def check(self) -> None:
        """Invariants of the store, and its bytes."""
        check_integrity(self.store)
        if self.service.gpu is not None:
            self.service.gpu.copies.check_integrity()
        self.check_bytes()

    def check_bytes(self) -> None:
        """Each readable replica holds its own block's bytes."""
        columns = self.store.catalog
        rows = np.arange(columns.rows_end)
        rows = rows[self.store.is_readable(rows)]
        for row in rows.tolist():
            layout = self.store.namespaces.at(int(columns.namespace[row])).layout
            name = columns.fingerprints[row].tobytes()
            if columns.host_state[row] == READY:
                found = self.store.host_tier.view(int(columns.host_slot[row]), layout.slot_bytes)
                assert is_own_colour(found, name, layout), f"host row {row} holds other bytes"
            if columns.nvme_state[row] == READY:
                stored = self.read_nvme(row)
                assert stored is None or is_own_colour(stored, name, layout), f"NVMe row {row}"

    def read_nvme(self, row: int) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """The payload of a READY NVMe replica; None when it does not verify, which is a miss."""
        columns, nvme = self.store.catalog, self.store.nvme
        assert nvme is not None
        layout = self.store.namespaces.at(int(columns.namespace[row])).layout
        into = page_aligned(layout.slot_bytes)
        try:
            nvme.read_parts(
                int(columns.nvme_slot[row]), layout.parts, into, columns.checksums[row].copy()
            )
        except (DataError, TierError):
            return None
        return into
