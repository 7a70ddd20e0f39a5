"""One seed, one course: the whole store, a disk that lies, clients that stall, crash and overstay.

`Simulation(directory, seed).run()` plays a few daemon lives. Everything is drawn from the seed:
sizes, weights of what clients do, how often the disk fails and how. Asserted throughout:
  whatever a client reads and is told is valid is the block's own bytes (WrongBytes otherwise)
  laws and books hold at any moment, and when all clients are gone nothing is held any more
  what `flush` called durable and nobody dropped since is there after a power cut
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from kvstore.errors import KVStoreError, TierFull, TierIO
from kvstore.fingerprint import Chain
from kvstore.laws import check_integrity
from kvstore.layout import BlockLayout
from kvstore.namespaces import Namespace
from kvstore.store import READY
from kvstore.testing.engine import Engine, is_own_colour
from kvstore.testing.faults import Fail, Fault, Flipped, Lost, Misdirected, Operation, Torn
from kvstore.testing.harness import Harness
from kvstore.types import NamespaceKind

KIB = 1 << 10
SPACES = (
    ("full", BlockLayout(4, 2, 4096), NamespaceKind.CHAINED, 0),
    ("large", BlockLayout(4, 4, 8192), NamespaceKind.CHAINED, 0),
    ("flat", BlockLayout(4, 2, 4096), NamespaceKind.FLAT, 0),
    ("sliding", BlockLayout(4, 3, 4096), NamespaceKind.CHAINED, 12),
    ("ranks", BlockLayout(4, 1, 5000, ranks=2), NamespaceKind.CHAINED, 0),
)
VERBS = (
    "store", "store", "anonymous", "ranks", "load", "load", "groups", "directory", "flush",
    "exists", "delete", "clear", "abandon", "give_up", "leave", "verify",
)  # fmt: skip


@dataclass(frozen=True)
class Write:
    """One write of the disk as it was asked for, and what came of it."""

    path: Path
    offset: int
    length: int
    fault: Fault | None

    def spoils(self, path: Path, start: int, stop: int) -> bool:
        """Whether it may have put other bytes into [start, stop) without saying so."""
        if self.path != path or self.fault is None or isinstance(self.fault, Fail):
            return False
        moved = self.fault.distance if isinstance(self.fault, Misdirected) else 0
        return any(
            at < stop and at + self.length > start for at in (self.offset, self.offset + moved)
        )


class LyingDisk:
    """Decides which operations fail, and remembers every write."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.rate = random.choice([0.0, 0.0, 0.02, 0.1])
        self.silent = random.choice([0.0, 0.0, 0.05])
        self.writes: list[Write] = []

    def __call__(self, operation: Operation) -> Fault | None:
        random = self.random
        fault: Fault | None = None
        if random.random() < self.rate:
            error = TierFull("simulated") if random.random() < 0.4 else TierIO("simulated")
            fault = Fail(TierIO("simulated") if operation.kind in ("read", "sync") else error)
        elif operation.kind == "write" and random.random() < self.silent:
            fault = random.choice(
                [
                    Lost(),
                    Torn(random.randrange(operation.length)),
                    Flipped(random.randrange(8 * operation.length)),
                    Misdirected(operation.length),
                ]
            )
        if operation.kind == "write" and operation.path is not None:
            self.writes.append(Write(operation.path, operation.offset, operation.length, fault))
        return fault

    def is_spoilt(self, path: Path, start: int, length: int) -> bool:
        """Whether what was last written there may have been spoilt, then or later."""
        for write in reversed(self.writes):
            if write.spoils(path, start, start + length):
                return True
            if (write.path, write.offset) == (path, start):
                return False
        return False


class Simulation:
    """All of it for one seed."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random = Random(seed)
        self.disk = LyingDisk(random)
        self.freeze = random.choice([0.0, 0.0, 0.01])
        self.harness = Harness(
            directory,
            seed=seed,
            settings={
                "host.bytes": random.choice([256, 512, 1024]) * KIB,
                "host.region_bytes": 256 * KIB,
                "host.slab_bytes": random.choice([64, 128]) * KIB,
                "host.staging_slots_min": random.choice([1, 4]),
                "nvme.bytes_max": random.choice([800, 1600, 4096]) * KIB,
                "nvme.queue_blocks_max": random.choice([4, 64]),
                "nvme.write_bytes_per_day": random.choice([0, 0, 0, 192 << 20]),
                "lease.read_seconds": 0.5,
                "lease.write_seconds": 1.0,
                "lease.quarantine_bytes_per_client_max": random.choice([64, 1024]) * KIB,
                "limits.jobs_inflight_max": random.choice([3, 1000]),
            },
            decide=self.disk,
            job_seconds=self._job_seconds,
            commit_seconds=lambda random: random.uniform(0, 0.05),
        )
        self.harness.commits.fail = self._maybe_refuse
        self.weights = [random.choice([0, 1, 1, 3]) for _ in VERBS]
        self.weights[0] = 3
        self.durable: dict[bytes, str] = {}
        """Name → namespace label of every block that `flush` called durable in this life."""
        self.trace: list[str] = []
        self._is_starting = False

    def _job_seconds(self, random: Random) -> float:
        return (
            random.uniform(0.2, 2.0) if random.random() < self.freeze else random.expovariate(800)
        )

    def _maybe_refuse(self) -> None:
        if not self._is_starting and self.random.random() < self.disk.rate / 2:
            raise TierIO("simulated index failure")

    # ------------------------------------------------------------------ lives

    def run(self) -> None:
        harness, expected = self.harness, {}
        for life in range(self.random.choice([2, 3])):
            self._start()
            self._verify_recovered(expected)
            self.durable = {}
            seconds = self.random.uniform(0.3, 1.4)
            self.clients_wanted = self.random.randint(2, 5)
            for number in range(self.clients_wanted):
                harness.call(harness.spawn, self._client(f"e{number % 3}"))
            for _ in range(3):
                harness.sleep(seconds / 3)
                harness.call(check_integrity, harness.store)
            harness.check()
            if self.random.random() < 0.4:
                self._everybody_leaves()
            expected = self._expected()
            self.trace.append(
                f"life {life}: {len(expected)} expected, {len(harness.store.catalog)}"
            )
            harness.crash()
        self._start()
        self._verify_recovered(expected)
        harness.check()
        harness.crash()

    def _start(self) -> None:
        """The disk behaves while a daemon starts: refusing to start is not simulated."""
        rates = self.disk.rate, self.disk.silent
        self.disk.rate = self.disk.silent = 0.0
        self.harness.start()
        self.spaces = [
            self.harness.declare(label, layout, kind=kind, window_tokens=window)
            for label, layout, kind, window in SPACES
        ]
        self.disk.rate, self.disk.silent = rates
        self.engines: list[Engine] = []
        self.is_over = False

    def _everybody_leaves(self) -> None:
        """Then nothing is reserved, leased, pinned or quarantined any more."""
        harness, store = self.harness, self.harness.store
        self.is_over = True
        harness.sleep(4)
        for engine in self.engines:
            engine.die()
        harness.sleep(4)
        harness.check()
        assert not harness.service.mover.is_busy, "a promotion never ended"
        assert not store.catalog.leases.any(), "a lease outlived its client"
        pinned = store.catalog.pins[: store.catalog.rows_end].any()
        assert not pinned or harness.service.write_behind.queued_blocks, "a pin never ended"
        assert not store.waiting, "blocks wait for parents that never come"
        harness.wait(self._no_stray_records())
        for item in store.host_tier.pool.statistics().classes:
            assert item.filling == item.quarantined == 0, f"slots nobody owns: {item}"

    async def _no_stray_records(self) -> None:
        """I6: every index record points to a block that the catalog knows."""
        with suppress(KVStoreError):
            async for progress in self.harness.service.scrubber.verify(payloads=False, fix=False):
                strays = [text for text in progress.findings if "not in the catalog" in text]
                assert not strays, strays[:3]

    # ------------------------------------------------------------------ what must be durable

    def _expected(self) -> dict[bytes, tuple[str, bool]]:
        """Name → (namespace, whether the disk may have spoilt it) of what must come back."""
        store = self.harness.store
        columns, segments = store.catalog, store.nvme._segments
        expected = {}
        for name, label in self.durable.items():
            row = int(columns.rows(name)[0])
            if row < 0 or not store.is_current(columns.rows(name))[0]:
                continue
            if columns.nvme_state[row] == READY:
                slot = int(columns.nvme_slot[row])
                size = store.nvme.slot_bytes_for(int(columns.length[row]))
                number = segments.geometry.segment_of(slot)
                path = segments._table[number].path if number in segments._table else Path()
                start = segments.geometry.offset_of(slot, size)
                expected[name] = (label, self.disk.is_spoilt(path, start, size))
        return expected

    def _verify_recovered(self, expected: dict[bytes, tuple[str, bool]]) -> None:
        store = self.harness.store
        layouts = {label: layout for label, layout, _, _ in SPACES}
        for name, (label, is_spoilt) in expected.items():
            rows = store.catalog.rows(name)
            assert rows[0] >= 0, f"{label} block {name.hex()[:16]} was durable and is gone"
            assert store.is_readable(rows)[0], f"{label} block {name.hex()[:16]} is unreadable"
            rate, self.disk.rate = self.disk.rate, 0.0
            found = self.harness.read_nvme(int(rows[0]))
            self.disk.rate = rate
            is_whole = found is not None and is_own_colour(found, name, layouts[label])
            assert is_whole or (is_spoilt and found is None), f"{label} block {name.hex()[:16]}"

    # ------------------------------------------------------------------ clients

    def _chain(self, space: Namespace) -> Chain:
        """One of a few chains that share trunks."""
        random = self.random
        trunk, branch = random.randrange(3), random.randrange(4)
        head = [trunk * 1000 + at for at in range(4 * random.choice([0, 2, 4]))]
        tail = [(trunk * 7 + branch) * 10_000 + at for at in range(4 * random.randint(1, 8))]
        return self.harness.chain(space, head + tail)

    async def _pause(self) -> None:
        """Mostly short; now and then longer than any lease."""
        random, kind = self.random, self.random.random()
        if kind < 0.05:
            await asyncio.sleep(random.uniform(0, 3))
        else:
            await asyncio.sleep(random.expovariate(100) if kind < 0.6 else 0)

    async def _client(self, name: str) -> None:
        engine = self._attach(name)
        while not self.is_over:
            verb = self.random.choices(VERBS, self.weights)[0]
            self.trace.append(f"{self.harness.clock.monotonic():.6f} {name} {verb}")
            if not engine.is_attached:
                engine = self._attach(name)
            with suppress(KVStoreError):
                await getattr(self, f"_{verb}")(engine, self.random.choice(self.spaces))
            await self._pause()

    def _attach(self, name: str) -> Engine:
        engine = self.harness.engine(name)
        self.engines.append(engine)
        return engine

    async def _store(self, engine: Engine, space: Namespace) -> None:
        chain = self._chain(space)
        start = self.random.choice([0, 0, self.random.randrange(len(chain))])
        held = await engine.reserve(space, chain, start)
        await self._pause()
        granted = held.granted
        cut = self.random.choice([len(granted), self.random.randint(0, len(granted))])
        engine.fill(space, held, granted[:cut])
        await self._pause()
        if granted:
            await engine.commit(held, granted[:cut], end=self.random.random() < 0.7)

    async def _anonymous(self, engine: Engine, space: Namespace) -> None:
        chain = self._chain(space)
        held = await engine.reserve_anonymous(space, len(chain))
        held.names = [bytes(chain[at]) for at in range(len(held.offsets))]
        await self._pause()
        engine.fill(space, held)
        await self._pause()
        if held.reservation:
            await engine.commit(held, parent=space.id, end=True)

    async def _ranks(self, engine: Engine, _: Namespace) -> None:
        space = self.spaces[-1]
        held = await engine.reserve(space, self._chain(space))
        engine.fill(space, held)
        for rank in self.random.sample([0, 1], 2):
            await self._pause()
            if held.granted:
                await engine.commit(held, rank=rank)

    async def _abandon(self, engine: Engine, space: Namespace) -> None:
        """Reserve and copy, late perhaps, then give the slots back."""
        held = await engine.reserve(space, self._chain(space))
        await self._pause()
        engine.fill(space, held)
        if held.reservation:
            await engine.abort(held)

    async def _load(self, engine: Engine, space: Namespace) -> None:
        await engine.load(
            [(space, self._chain(space))],
            layer_order=self.random.random() < 0.5,
            pause_seconds=self.random.choice([0, 0, 0, 0.01, 0.01, 1.5]),
            deadline_seconds=self.random.choice([0.05, 1.0, 3.0]),
            keep_lease=self.random.random() < 0.2,
        )

    async def _groups(self, engine: Engine, _: Namespace) -> None:
        chosen = self.random.sample(self.spaces, 2)
        await engine.load([(space, self._chain(space)) for space in chosen])

    async def _directory(self, engine: Engine, space: Namespace) -> None:
        pause = self.random.choice([0, 0.001, 0.01, 0.1])
        await engine.read_directory(space, self._chain(space), pause)

    async def _flush(self, engine: Engine, space: Namespace) -> None:
        chain = self._chain(space)
        durable = await engine.flush(space, chain, self.random.choice([0.01, 0.05, 1.0]))
        index = self.harness.store.nvme._ledger._index
        for name, is_durable in zip(chain, durable, strict=True):
            if is_durable:
                assert index.get(bytes(name)) is not None, "called durable, not in the index"
                self.durable[bytes(name)] = space.label

    async def _exists(self, engine: Engine, space: Namespace) -> None:
        await engine.exists(space, self._chain(space))

    async def _delete(self, engine: Engine, space: Namespace) -> None:
        if self.random.random() < 0.3:
            chain = self._chain(space)
            name = bytes(chain[self.random.randrange(len(chain))])
            await self.harness.service.delete(space, name)

    async def _clear(self, engine: Engine, space: Namespace) -> None:
        if self.random.random() < 0.2:
            await self.harness.service.clear(space)

    async def _give_up(self, engine: Engine, space: Namespace) -> None:
        """A call whose caller goes away in the middle."""
        verb = self.random.choice([self._store, self._load, self._flush, self._groups])
        task = self.harness.loop.create_task(verb(engine, space))
        await asyncio.sleep(self.random.expovariate(300))
        task.cancel()
        with suppress(KVStoreError, asyncio.CancelledError):
            await task

    async def _leave(self, engine: Engine, space: Namespace) -> None:
        """The stream ends; the process copies on for a while, then it is gone."""
        held = await engine.reserve(space, self._chain(space))
        engine.leave()
        await self._pause()
        engine.fill(space, held)
        engine.die()

    async def _verify(self, engine: Engine, space: Namespace) -> None:
        if self.random.random() < 0.2:
            async for _ in self.harness.service.scrubber.verify(payloads=True, fix=True):
                await self._pause()
