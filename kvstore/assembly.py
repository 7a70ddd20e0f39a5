"""From a configuration to tiers and a store: what the daemon and the offline tools share.

Primitives: `lock_data`, `open_nvme`, `open_gpu`, `open_host`, `make_store`, `make_service`. Starts
no task of its own.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.arena import Arena
from kvstore.blockio import DirectIO
from kvstore.catalog import Catalog
from kvstore.clock import Clock
from kvstore.config import Config, HostConfig
from kvstore.costs import Costs
from kvstore.device import Device, open_device
from kvstore.directory import DirectoryWriter, filter_counters, header_bytes
from kvstore.elastic import Elastic, Pressure
from kvstore.errors import ConfigError
from kvstore.gpu_copies import GpuCopies
from kvstore.lease import LeaseTable, ReservationTable
from kvstore.mover import Mover
from kvstore.namespaces import NamespaceTable
from kvstore.nvme_room import NvmeRoom
from kvstore.places import FileLock
from kvstore.policies import make_policy
from kvstore.policies.costs import BlockCosts
from kvstore.policies.wear import WearPrice, bytes_per_second
from kvstore.policy import VictimPicker
from kvstore.reservation_ends import ReservationEnds
from kvstore.room import Room
from kvstore.rpc.gpu_desk import GpuDesk
from kvstore.rpc.sessions import Sessions
from kvstore.scrub import Scrubber
from kvstore.service import Service
from kvstore.slab import SlabPool
from kvstore.store import Store
from kvstore.tier.gpu import GpuTier
from kvstore.tier.host import HostTier
from kvstore.tier.nvme import NvmeTier
from kvstore.writebehind import WriteBehind
from kvstore.writes import WritePath


def lock_data(config: Config) -> FileLock:
    """The data directory's lock; whoever holds it owns everything below."""
    facts: dict[str, object] = {
        "pid": os.getpid(),
        "socket": str(config.daemon.socket_path),
        "arena": str(config.arena_directory),
    }
    return FileLock(Path(config.daemon.data_dir) / "LOCK", facts)


def open_nvme(config: Config, clock: Clock, kind: type[NvmeTier] = NvmeTier) -> NvmeTier:
    """The NVMe tier; its directory is locked. Raises ForeignData, ConfigError, TierError."""
    return kind.open(
        Path(config.daemon.data_dir),
        config=config.nvme,
        io=DirectIO(direct=config.nvme.direct),
        clock=clock,
    )


def open_gpu(config: Config, device: Device | None = None) -> GpuTier | None:
    """The GPU tier, if it is on, on `device` or the configured one. Raises ConfigError."""
    gpu = config.gpu
    if not gpu.bytes_max:
        return None
    try:
        device = device or open_device(gpu.device)
    except ConfigError as error:
        raise ConfigError(f"gpu.device: {error}; or turn the tier off: gpu.bytes_max = 0") from None
    return GpuTier(
        device, gpu.bytes_max, slab_bytes=gpu.slab_bytes, slot_bytes_min=gpu.slot_bytes_min
    )


def host_pool(host: HostConfig) -> SlabPool:
    """The books of the host tier's slots."""
    return SlabPool(
        host.bytes // host.slab_bytes,
        host.slab_bytes,
        host.slot_bytes_min,
        slabs_per_region=host.region_bytes // host.slab_bytes,
        staging_share=host.staging_share,
        staging_slots_min=host.staging_slots_min,
    )


def open_host(config: Config, boot_id: int, gpu: GpuTier | None) -> HostTier:
    """The host tier with a fresh, empty directory, and that of `gpu` behind it. Raises
    ConfigError."""
    counters = filter_counters(config.nvme.bytes_max if config.nvme.enabled else 0)
    host, pool = config.host, host_pool(config.host)
    namespaces_max = config.limits.namespaces_max
    own_bytes = header_bytes(pool.slots_max, namespaces_max, counters)
    arena = Arena.create(
        config.arena_directory,
        bytes_total=host.bytes,
        region_bytes=host.region_bytes,
        header_bytes=own_bytes + (gpu.header_bytes(namespaces_max) if gpu is not None else 0),
        mode=0o660 if host.group else 0o600,
        gid=host.gid,
    )
    directory = DirectoryWriter(
        arena.header.array,
        slots=pool.slots_max,
        namespaces_max=namespaces_max,
        boot_id=boot_id,
        counters=counters,
    )
    if gpu is not None:
        gpu.list_in(arena.header.array, own_bytes, namespaces_max, boot_id)
    return HostTier(pool, arena, directory)


def new_id() -> int:
    """A random, never zero u63."""
    return secrets.randbits(63) | 1


def make_store(
    config: Config,
    host: HostTier | None,
    nvme: NvmeTier | None,
    ids: Callable[[], int] = new_id,
    gpu: GpuTier | None = None,
) -> Store:
    """An empty store over the tiers; `ids` names leases and reservations."""
    lease = config.lease
    catalog = Catalog(
        host_slots=host.pool.slots_max if host is not None else 0,
        nvme_slots=nvme.slots_max if nvme is not None else 0,
    )
    if host is not None:
        catalog.on_nvme = lambda rows, change: host.directory.count_below(
            catalog.fingerprints[rows], change
        )
    namespaces = NamespaceTable(config.limits.namespaces_max)
    costs = Costs()
    block_costs = BlockCosts(catalog, costs, namespaces.block_tokens)
    return Store(
        config=config,
        catalog=catalog,
        leases=LeaseTable(
            catalog,
            ids,
            blocks_max=lease.blocks_max,
            leases_per_client_max=lease.leases_per_client_max,
        ),
        reservations=ReservationTable(
            ids, quarantine_bytes_max=lease.quarantine_bytes_per_client_max
        ),
        namespaces=namespaces,
        costs=costs,
        policy=make_policy(
            config.policy.name, catalog, block_costs, WearPrice(bytes_per_second(config.nvme))
        ),
        host=host,
        nvme=nvme,
        gpu=gpu,
    )


PRESSURE_FILE = Path("/proc/pressure/memory")


@dataclass(frozen=True)
class Workers:
    """Where bytes move: one executor a kind of work, so that one kind never waits for another."""

    hash: Executor
    read: Executor
    write: Executor
    help: Executor


def make_service(
    store: Store,
    clock: Clock,
    workers: Workers,
    rng: np.random.Generator,
    boot_id: int,
    on_fatal: Callable[[BaseException], None],
    ids: Callable[[], int] = new_id,
) -> Service:
    """Everything between store and verbs; the caller runs `maintain` and `write_behind.run`."""
    config, now = store.config, clock.monotonic
    picker = VictimPicker(store.catalog, store.policy, store.namespaces.leaf_exempt, rng)
    room = Room(store, picker)
    sessions = Sessions(config.limits.clients_max, ids)
    ends = ReservationEnds(store, sessions.of_engine)
    mover = Mover(store, room, workers.read, config.nvme.readers, now)
    write_behind = nvme_room = None
    if store.nvme is not None:
        nvme_room = NvmeRoom(store, store.nvme, picker, now)
        write_behind = WriteBehind(
            store, store.nvme, nvme_room, workers.write, now, lambda: mover.is_busy
        )
    gpu = None
    if store.gpu is not None:
        gpu = GpuDesk(store.gpu, GpuCopies(store, store.gpu, workers.help))
    return Service(
        config,
        clock,
        store,
        WritePath(store, room, workers.hash, ends, now),
        ends,
        mover,
        write_behind,
        nvme_room,
        Scrubber(store, workers.help),
        sessions,
        Elastic(
            store,
            room,
            Pressure(PRESSURE_FILE, config.host.pressure_percent_max),
            lambda: sessions.pins_arena,
            workers.help,
        ),
        gpu,
        workers.help,
        boot_id,
        on_fatal,
    )
