"""One daemon life: the store, its tasks and its clients behind the verbs of the control API.

Primitives of `Service`: a method a verb that needs more than the store (`declare`, `commit`,
`load_soon`, `flush`, `delete`, `clear`), the session hooks (`attached`, `detached`), `maintain`
(the periodic task), `drain` and `health`. Runs on the loop. Knows no gRPC: rpc/server.py
translates. Assembled by assembly.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar

import numpy as np

from kvstore.advice import Advisor
from kvstore.catalog import ABSENT_ROW
from kvstore.clock import Clock
from kvstore.config import Config
from kvstore.cost_file import CostKeeper
from kvstore.costs import ModelSize
from kvstore.elastic import Elastic
from kvstore.errors import Draining, InvalidRequest, KVStoreError, LeaseError
from kvstore.latency import Latencies
from kvstore.laws import check_slices
from kvstore.layout import BlockLayout
from kvstore.logs import get_logger, tell_held_back
from kvstore.loop_lag import LoopLag
from kvstore.matching import GroupMatch
from kvstore.mover import Mover
from kvstore.namespaces import Namespace
from kvstore.nvme_room import NvmeRoom
from kvstore.pins import Pins
from kvstore.prefetch import Prefetcher
from kvstore.promotion import BLOCKS, LoadOrder
from kvstore.reservation_ends import ReservationEnds
from kvstore.rpc.control_pb2 import DESCRIPTOR
from kvstore.rpc.gpu_desk import GpuDesk
from kvstore.rpc.sessions import Session, Sessions
from kvstore.scrub import Scrubber
from kvstore.staging import Staging
from kvstore.store import Store
from kvstore.types import (
    FINGERPRINT_BYTES,
    PAGE_BYTES,
    BoolArray,
    ByteArray,
    ClientId,
    IntArray,
    LeaseId,
    ReservationId,
    UIntArray,
)
from kvstore.writebehind import WriteBehind
from kvstore.writes import WritePath

Result = TypeVar("Result")
VERBS = tuple(method.name for method in DESCRIPTOR.services_by_name["Control"].methods)
TICK_SECONDS = 0.02
SLOW_TICK_SECONDS = 0.5
SLICES_SECONDS_MAX = 0.001
"""Longest stretch of background work in one step of the loop."""
INTEGRITY_EVERY_SECONDS = 60.0
SHRINK_SLOTS_MAX = 32


class Service:
    """Owns nothing but the periodic task; everything it coordinates is handed in."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        store: Store,
        writes: WritePath,
        ends: ReservationEnds,
        mover: Mover,
        write_behind: WriteBehind | None,
        nvme_room: NvmeRoom | None,
        scrubber: Scrubber,
        sessions: Sessions,
        elastic: Elastic,
        gpu: GpuDesk | None,
        workers: Executor,
        boot_id: int,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.config = config
        self.store = store
        self.writes = writes
        self.ends = ends
        self.mover = mover
        self.write_behind = write_behind
        self.nvme_room = nvme_room
        self.scrubber = scrubber
        self.sessions = sessions
        self.elastic = elastic
        self.gpu = gpu
        self.pins = Pins(store, config.limits)
        self.staging = Staging(store)
        self.prefetcher = Prefetcher(store)
        self.advisor = Advisor(store, mover, self.prefetcher)
        self.cost_keeper = CostKeeper(store)
        self.boot_id = boot_id
        self.fatal = on_fatal
        self.lag = LoopLag()
        self.latencies = Latencies(VERBS)
        self.is_draining = False
        self._clock = clock
        self._workers = workers
        self.started = clock.monotonic()
        self._declaring = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self._touch_is_scheduled = False
        self._integrity: Iterator[None] | None = None
        self._integrity_at = clock.monotonic() + INTEGRITY_EVERY_SECONDS
        self._log = get_logger("service")

    def now(self) -> float:
        return self._clock.monotonic()

    def deadline(self, milliseconds: int) -> float:
        """Absolute deadline of a call; 0 and what exceeds limits.deadline_seconds_max become that
        limit.
        """
        most = self.config.limits.deadline_seconds_max
        return self.now() + (min(milliseconds / 1000, most) if milliseconds else most)

    def check_admission(self) -> None:
        """Raises Draining once shutdown began."""
        if self.is_draining:
            raise Draining("the daemon is shutting down")

    async def to_the_end(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do `work` whole, whatever becomes of the caller; shutting down waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._changes.add(task)
        task.add_done_callback(self._change_ended)
        return await asyncio.shield(task)

    def _change_ended(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KVStoreError):
            self.fatal(error)

    # ------------------------------------------------------------------ clients

    def check_lock_file(self, name: str) -> None:
        """Raises InvalidRequest unless it is a held lock file of this arena, or none at all: the
        end of its lock is the only proof of its process' end.
        """
        if name and self.store.host_tier.arena.client_gone(name):
            raise InvalidRequest(f"attach: lock file {name} is not held; lock it before the hello")

    def attached(self, session: Session) -> None:
        if session.lock_file:
            self.store.host_tier.arena.acknowledge_client(session.lock_file)
        self._log.info("client attached", engine=session.engine, pid=session.pid)

    def detached(self, session: Session) -> None:
        """The stream ended: leases go, reservations end, slots wait until the process is known to
        be gone.
        """
        self.sessions.close(session)
        self.store.leases.drop_client(session.client, self.now())
        self.ends.client_lost(session.client)
        if self.gpu is not None:
            self.gpu.left(session.client)
        self._log.info("client left", engine=session.engine, pid=session.pid)
        self._bury()

    def _bury(self) -> None:
        """Clients that left and whose kernel lock is free can write no more."""
        arena = self.store.host_tier.arena
        for session in self.sessions.waiting():
            if not session.lock_file or arena.client_gone(session.lock_file):
                self.ends.client_gone(session.client)
                if self.gpu is not None:
                    self.gpu.gone(session.client)
                self.sessions.gone(session)

    # ------------------------------------------------------------------ verbs

    async def declare(
        self,
        namespace: bytes,
        kind: str,
        layout: BlockLayout,
        window_tokens: int,
        label: str,
        size: ModelSize | None = None,
    ) -> Namespace:
        """Make a namespace known; new ones are durable before this returns."""
        async with self._declaring:
            found, is_new = self.store.namespaces.propose(
                namespace, kind, layout, window_tokens, label
            )
            if is_new:
                self._check_fits(layout)
                if self.store.nvme is not None:
                    await self._in_worker(self.store.nvme.put_namespace, found)
                found = self.store.namespaces.add(found)
            self.store.costs.declare(found.index, found.id, size)
            return found

    def _check_fits(self, layout: BlockLayout) -> None:
        host = self.config.host
        if layout.slot_bytes > min(host.bytes, host.region_bytes):
            raise InvalidRequest(
                f"a block of {layout.slot_bytes} bytes does not fit into host.region_bytes="
                f"{host.region_bytes} of host.bytes={host.bytes}; raise them or use fewer "
                "tokens a block"
            )
        room = self.config.nvme.segment_bytes
        if self.store.nvme is not None and layout.slot_bytes + PAGE_BYTES > room:
            raise InvalidRequest(
                f"a block of {layout.slot_bytes} bytes does not fit into "
                f"nvme.segment_bytes={room}; raise it (in a new data directory) or use "
                "fewer tokens a block"
            )

    def touch_soon(self) -> None:
        """Let the policy see uses after the reply went out."""
        if not self._touch_is_scheduled:
            self._touch_is_scheduled = True
            asyncio.get_running_loop().call_soon(self._apply_touches)

    def _apply_touches(self) -> None:
        self._touch_is_scheduled = False
        self.store.apply_touches(self.now())

    def load_soon(
        self, groups: list[GroupMatch], order: LoadOrder = BLOCKS, first: int = 0
    ) -> None:
        """Start what a Load call, which is on its way, will join. Waits for no room."""
        task = asyncio.get_running_loop().create_task(
            self.mover.open_load(groups, order=order, first=first, deadline=0.0)
        )
        self._changes.add(task)
        task.add_done_callback(self._change_ended)

    def release(self, client: ClientId, lease: int) -> bool:
        """Twice, or after its end: a counted no-op."""
        now = self.now()
        released = self.store.leases.release(client, LeaseId(lease), now)
        if released:
            self.staging.ended(LeaseId(lease), now)
        return released

    def renew(self, session: Session, lease: int, reservation: int) -> float:
        """Prolong a lease or a reservation; seconds it lives from now."""
        if lease:
            seconds = self.config.lease.read_seconds
            self.store.leases.renew(session.client, LeaseId(lease), self.now(), seconds)
            return seconds
        seconds = self.config.lease.write_seconds
        found = self.store.reservations.find(session.engine, ReservationId(reservation))
        self.store.reservations.renew(found, self.now() + seconds)
        return seconds

    async def commit(
        self,
        session: Session,
        reservation: ReservationId,
        parent: bytes,
        names: bytes,
        offsets: UIntArray,
        rank: int | None,
        end: bool,
    ) -> ByteArray:
        """Find the slots behind `offsets`, then `WritePath.commit`; `rank` None: every rank's part
        is filled.
        """
        # Other slots of it may still be copied into: only `end` says that none is.
        found = self.store.reservations.acknowledge(session.client, reservation, is_last=end)
        if found is not None:
            self.store.counters.add("late_commits")
            self.store.host_tier.free(found)
            raise LeaseError("commit: the reservation expired; nothing was stored")
        reserved = self.store.reservations.find(session.engine, reservation)
        ranks = self.store.namespaces.at(reserved.namespace).layout.ranks
        if rank is not None and not 0 <= rank < ranks:
            raise InvalidRequest(f"commit: rank {rank} does not exist, the layout has {ranks}")
        return await self.writes.commit(
            session.client,
            reserved,
            parent,
            names,
            self.store.host_tier.slots_at(reserved.slots, offsets),
            range(ranks) if rank is None else range(rank, rank + 1),
            end,
        )

    async def flush(self, namespace: Namespace, names: bytes, deadline: float) -> BoolArray:
        """Which blocks are durable by the deadline; without an NVMe tier none is."""
        if self.write_behind is None:
            return np.zeros(len(names) // FINGERPRINT_BYTES, np.bool_)
        return await self.write_behind.flush(namespace, names, deadline)

    async def delete(self, namespace: Namespace, name: bytes) -> int:
        """A block and all that follows it; invisible when this returns, and gone from the index as
        well.
        """
        row = self.store.rows_of(namespace, name)
        if row[0] == ABSENT_ROW or not self.store.is_current(row)[0]:
            return 0
        doomed = self.store.descent_of(int(row[0]))
        self.store.condemn(doomed, "deleted")
        if self.nvme_room is not None:
            await self.nvme_room.delete_records(doomed)
        return len(doomed)

    async def clear(self, namespace: Namespace) -> None:
        """No block stored before this call matches again, also after a SIGKILL: the new count is
        durable first.
        """
        count = namespace.clear_count + 1
        if self.store.nvme is not None:
            await self._in_worker(self.store.nvme.set_clear_count, namespace.id, count)
        count = max(count, namespace.clear_count)
        self.store.namespaces.set_clear_count(namespace, count)
        self.store.set_clear_count(namespace)
        self.store.start_reclaim()
        self._log.info("namespace cleared", namespace=namespace.id.hex()[:16], clear_count=count)

    async def _in_worker(self, function: Callable[..., None], *arguments: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._workers, function, *arguments)

    # ------------------------------------------------------------------ the periodic task

    async def maintain(self) -> None:
        """Expire leases, free what nobody holds, reclaim and check in slices; until cancelled."""
        next_slow = 0.0
        while True:
            await self.lag.sleep(TICK_SECONDS)
            now = self.now()
            self.store.leases.expire(now)
            self.ends.expire(now)
            self.pins.tend(now)
            self._work_in_slices(now)
            self.elastic.turn(now)
            if self.gpu is not None:
                self.gpu.turn(now)
            self.store.costs.refresh()
            if not self.mover.is_busy and (step := self.prefetcher.next(now)) is not None:
                self.load_soon([step])
            if self.nvme_room is not None:
                self.nvme_room.reap()
            if now >= next_slow:
                next_slow = now + SLOW_TICK_SECONDS
                self._bury()
                self.staging.tend(now)
                self.cost_keeper.turn(now, self._workers)
                tell_held_back()
                self.store.host_tier.recheck()
                if self.store.nvme is not None:
                    self._shrink_nvme(self.store.nvme.tend(), now)

    def _work_in_slices(self, now: float) -> None:
        end = time.perf_counter() + SLICES_SECONDS_MAX
        while time.perf_counter() < end:
            if self.store.reclaim_slice(now):
                continue
            if self._integrity is None:
                if now < self._integrity_at or self.mover.is_busy:
                    return
                self._integrity = check_slices(self.store)
            try:
                next(self._integrity)
            except StopIteration:
                self._integrity = None
                self._integrity_at = now + INTEGRITY_EVERY_SECONDS

    def _shrink_nvme(self, slots: IntArray, now: float) -> None:
        """Blocks in slots beyond what the disk allows leave with their descendants, some a call."""
        rows = self.store.catalog.nvme_rows_of(slots[:SHRINK_SLOTS_MAX])
        for row in rows[rows != ABSENT_ROW].tolist():
            self.store.condemn(self.store.descent_of(row), "over_cap")

    async def drain(self) -> None:
        """Refuse new calls, finish changes and then write-behind within daemon.drain_seconds."""
        self.is_draining = True
        self.mover.close()
        saving = self.cost_keeper.turn(math.inf, self._workers)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.daemon.drain_seconds):
                if saving is not None:
                    await asyncio.wrap_future(saving)
                if self._changes:
                    await asyncio.wait(self._changes)
                if self.write_behind is not None:
                    self.write_behind.drain()
                    await self.write_behind.drained()

    # ------------------------------------------------------------------ looking

    def health(self) -> list[str]:
        """Why some tier does not serve or not store; empty when all is well."""
        reasons: list[str] = []
        gpu = self.gpu.copies if self.gpu is not None else None
        for tier in (self.store.host, self.store.nvme, gpu):
            if tier is not None:
                reasons += tier.health()
        for mover in (self.mover, self.write_behind):
            if mover is not None and mover.failure:
                reasons.append(f"nvme: {mover.failure}")
        return reasons

    def remarks(self) -> list[str]:
        """What is slower or less than it could be, and harms nothing."""
        gpu = self.gpu.copies if self.gpu is not None else None
        tiers = (self.store.host, self.store.nvme, gpu)
        return [remark for tier in tiers if tier is not None for remark in tier.remarks()]
