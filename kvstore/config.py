"""Every setting of the daemon: its name, default, limits and meaning, declared once.

Primitives:
  `Config` and its sections   frozen structs; "0: automatic" is made concrete on construction
  `conflicts(config)`         settings that cannot work together
  `default_socket(...)`       where daemon and clients meet unless told otherwise

Their limits live here; those of two sections in `config_gateway` and `config_gpu`. No I/O;
`config_load.load` reads files and variables, `settings` describes what is declared here.
"""

from __future__ import annotations

import grp
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvstore.config_fields import OFF, is_address
from kvstore.config_fields import Section as _Section
from kvstore.config_fields import count as _count
from kvstore.config_fields import number as _number
from kvstore.config_fields import size as _size
from kvstore.config_fields import text as _text
from kvstore.config_fields import time as _time
from kvstore.config_gateway import GatewayConfig, gateway_conflicts
from kvstore.config_gpu import GpuConfig, gpu_conflicts
from kvstore.types import HUGE_PAGE_BYTES, PAGE_BYTES
from kvstore.units import GIB, KIB, MIB, format_bytes

SOCKET_PATH_BYTES_MAX = 107
"""What the kernel's sockaddr_un holds, less its closing zero."""


class DaemonConfig(_Section, frozen=True):
    """The process: its name, where it listens, where it keeps things, how it talks."""

    name: Annotated[
        str,
        _text(
            "Names this daemon, its socket and its shared memory, so that several can run.",
            pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        ),
    ] = "default"
    socket: Annotated[
        str,
        _text(
            "Unix socket of the control API. Empty: $XDG_RUNTIME_DIR/kvstore/NAME.sock, "
            "or /tmp/kvstore-UID/NAME.sock without a runtime directory."
        ),
    ] = ""
    data_dir: Annotated[str, _text("Directory of the NVMe tier: segments and their index.")] = (
        "kvstore-data"
    )
    drain_seconds: Annotated[
        float, _time("On shutdown: longest wait for running jobs and for writes to NVMe.", 3600.0)
    ] = 10.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _text("Least severe message that is written.")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "console", "json"],
        _text("auto: console on a terminal, one JSON object a line otherwise."),
    ] = "auto"

    @property
    def socket_path(self) -> Path:
        """`socket`, or the default one for `name` in this process' environment."""
        return Path(self.socket) if self.socket else default_socket(self.name, os.environ)


class HostConfig(_Section, frozen=True):
    """The host tier: blocks in shared memory that engines map."""

    bytes: Annotated[
        int, _size("Shared memory for blocks; reserved physically at start.", HUGE_PAGE_BYTES)
    ] = GIB
    region_bytes: Annotated[
        int,
        _size(
            "One file, mapped and registered as a whole. 0: 1 GiB, or less to fill `bytes` evenly."
        ),
    ] = 0
    slab_bytes: Annotated[
        int,
        _size(
            "Memory given to one block size at a time. 0: a sixteenth of `bytes`, 2 MiB to 64 MiB."
        ),
    ] = 0
    slot_bytes_min: Annotated[
        int,
        _size(
            "Smallest slot; smaller blocks still take one. Sizes the arena's directory.", PAGE_BYTES
        ),
    ] = 16 * KIB
    directory: Annotated[str, _text("A tmpfs that engines can see too.")] = "/dev/shm"
    group: Annotated[
        str,
        _text(
            "Unix group whose members may attach besides the daemon's user, who must be one "
            "(docs/operations.md). Empty: nobody else."
        ),
    ] = ""
    staging_share: Annotated[
        float,
        Meta(
            description="Share of each block size's slots kept for loads from NVMe.",
            ge=0.0,
            le=0.5,
        ),
    ] = 0.02
    staging_slots_min: Annotated[
        int, _count("Fewest slots of each block size kept for loads from NVMe.", 1, 65536)
    ] = 16
    pressure_percent_max: Annotated[
        float,
        Meta(
            description="Memory is given back while the kernel reports more pressure (avg10 of "
            "/proc/pressure/memory), and taken again later. 0: never.",
            ge=0.0,
            le=100.0,
        ),
    ] = 0.0
    write_pool_bytes_per_client_max: Annotated[
        int,
        _size(
            "Most bytes one client may hold reserved for stores. "
            "0: a quarter of `bytes`, at most 256 MiB."
        ),
    ] = 0

    def __post_init__(self) -> None:
        """Make automatic values concrete; an automatic region rounds `bytes` down to whole ones."""
        resolve = msgspec.structs.force_setattr
        if not self.write_pool_bytes_per_client_max:
            resolve(self, "write_pool_bytes_per_client_max", min(256 * MIB, self.bytes // 4))
        if not self.slab_bytes:
            slab = min(64 * MIB, self.bytes // 16) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            resolve(self, "slab_bytes", max(slab, HUGE_PAGE_BYTES))
        if not self.region_bytes:
            slabs = max(self.bytes // self.slab_bytes, 1)
            fewest = -(-slabs * self.slab_bytes // max(GIB, self.slab_bytes))
            regions = min(range(fewest, 2 * fewest + 1), key=lambda count: slabs % count)
            resolve(self, "region_bytes", slabs // regions * self.slab_bytes)
            resolve(self, "bytes", min(regions * self.region_bytes, self.bytes))

    @property
    def gid(self) -> int | None:
        """Number of `group`; None without one. KeyError if it does not exist (see `conflicts`)."""
        return grp.getgrnam(self.group).gr_gid if self.group else None

    @property
    def regions(self) -> int:
        """How many regions the arena has."""
        return self.bytes // self.region_bytes


class NvmeConfig(_Section, frozen=True):
    """The NVMe tier: blocks in preallocated files below `daemon.data_dir`."""

    enabled: Annotated[bool, Meta(description="false: blocks live in shared memory only.")] = True
    bytes_max: Annotated[
        int,
        _size(
            "Most bytes below `data_dir`, everything counted; "
            "at most 80 % of the space free at start."
        ),
    ] = 10 * GIB
    free_bytes_min: Annotated[
        int, _size("Free space left to others on that file system; below it writes stop.")
    ] = GIB
    segment_bytes: Annotated[
        int, _size("One preallocated file; serves one block size at a time.", HUGE_PAGE_BYTES)
    ] = 64 * MIB
    readers: Annotated[int, _count("Threads that read.", 1, 64)] = 4
    writers: Annotated[int, _count("Threads that write.", 1, 64)] = 2
    direct: Annotated[
        Literal["auto", "off"],
        _text(
            "auto: past the page cache, if the file system proves at start that it can. "
            "off: through the page cache."
        ),
    ] = "auto"
    write_bytes_per_day: Annotated[
        int,
        _size(
            "Wear budget: bytes written in a day, spread over it. The value policy gets choosier "
            "with it; past it nothing is written. 0: no budget."
        ),
    ] = 0
    drive_writes_per_day: Annotated[
        float,
        _number("The same as a multiple of bytes_max; the smaller of the two counts.", 1000.0),
    ] = 0.0
    queue_blocks_max: Annotated[
        int, _count("Blocks that may wait to be written; beyond it new ones stay in memory only.")
    ] = 4096
    index_map_bytes: Annotated[
        int, _size("Address space (not disk, not memory) set aside for the index.", 16 * MIB)
    ] = 16 * GIB


class LeaseConfig(_Section, frozen=True):
    """Promises to clients: how long, how many."""

    read_seconds: Annotated[float, _time("Life of a read lease unless renewed.", 600.0)] = 10.0
    write_seconds: Annotated[float, _time("Life of a reservation unless renewed.", 600.0)] = 30.0
    blocks_max: Annotated[int, _count("Most blocks under one lease.", 1, 65536)] = 65536
    leases_per_client_max: Annotated[int, _count("Most leases one client may hold.")] = 1024
    quarantine_bytes_per_client_max: Annotated[
        int,
        _size(
            "Most bytes held back for a silent client; beyond it, it gets no new reservation.",
            PAGE_BYTES,
        ),
    ] = 256 * MIB


class LimitsConfig(_Section, frozen=True):
    """Bounds of what queues or waits. Past one: a typed refusal, and the engine recomputes."""

    clients_max: Annotated[int, _count("Attached client processes.", 1, 4096)] = 64
    namespaces_max: Annotated[int, _count("Declared namespaces.", 1, 65535)] = 1024
    calls_inflight_max: Annotated[int, _count("Control calls served at once.", 8, 65536)] = 512
    blocks_per_call_max: Annotated[
        int, _count("Fingerprints in one call; keeps a message below 4 MiB.", 1, 65536)
    ] = 65536
    jobs_inflight_max: Annotated[
        int, _count("Blocks on their way up from NVMe at once; a load past it is shortened.")
    ] = 16384
    bytes_inflight_max: Annotated[
        int,
        _size("Bytes on their way up from NVMe at once; a load past it is shortened.", 2 * MIB),
    ] = 4 * GIB
    pinned_bytes_max: Annotated[
        int, _size("Most bytes of blocks that may be pinned; past it fewer blocks are.")
    ] = 512 * MIB
    pinned_bytes_per_tenant_max: Annotated[int, _size("Most bytes one tenant may pin.")] = 128 * MIB
    deadline_seconds_max: Annotated[
        float, _time("Longest deadline a call may ask for; longer ones are cut to it.", 3600.0)
    ] = 60.0


class PolicyConfig(_Section, frozen=True):
    """What is worth keeping, and where."""

    name: Annotated[
        Literal["value", "lru", "lfu", "arc", "s3fifo"],
        _text(
            "value: what is expected to save the most prefill per byte stays (docs/policy.md); "
            "lru: the least recently used leaf goes first; lfu, arc, s3fifo: for comparison."
        ),
    ] = "value"


class MetricsConfig(_Section, frozen=True):
    """Prometheus metrics of the daemon, read-only, over HTTP."""

    address: Annotated[
        str,
        _text(
            "host:port to serve /metrics on; port 0 takes a free one. off: none. They name no "
            "prompt and no key, but whoever reaches the address may read them."
        ),
    ] = OFF


class Config(_Section, frozen=True):
    """The whole configuration. Whoever builds one by hand calls `validate`; `load` does."""

    daemon: DaemonConfig = DaemonConfig()
    host: HostConfig = HostConfig()
    nvme: NvmeConfig = NvmeConfig()
    gpu: GpuConfig = GpuConfig()
    lease: LeaseConfig = LeaseConfig()
    limits: LimitsConfig = LimitsConfig()
    policy: PolicyConfig = PolicyConfig()
    gateway: GatewayConfig = GatewayConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def arena_directory(self) -> Path:
        """Directory of the arena's files: one a user and daemon name."""
        return Path(self.host.directory) / f"kvstore-{os.getuid()}-{self.daemon.name}"


def default_socket(name: str, env: Mapping[str, str]) -> Path:
    """Where a daemon called `name` listens unless told otherwise; clients look there too."""
    runtime = env.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) / "kvstore" if runtime else Path(f"/tmp/kvstore-{os.getuid()}")
    return base / f"{name}.sock"


def conflicts(config: Config) -> Iterator[tuple[str, str, str]]:
    """(key, problem, way out) for every pair of settings that cannot work together."""
    host, nvme = config.host, config.nvme
    if host.slab_bytes % HUGE_PAGE_BYTES:
        yield (
            "host.slab_bytes",
            "is not a whole number of 2 MiB pages",
            "use a multiple of 2 MiB, or 0",
        )
    if host.bytes < host.slab_bytes:
        yield (
            "host.bytes",
            f"holds not even one slab of {format_bytes(host.slab_bytes)}",
            "raise it, or set host.slab_bytes to 0",
        )
    if host.region_bytes % host.slab_bytes:
        yield (
            "host.region_bytes",
            f"is not a whole number of slabs of {format_bytes(host.slab_bytes)}",
            "use a multiple of host.slab_bytes, or 0",
        )
    if host.bytes % host.region_bytes:
        yield (
            "host.bytes",
            f"is not a whole number of regions of {format_bytes(host.region_bytes)}",
            "use a multiple of host.region_bytes, or set that to 0",
        )
    yield from _slot_conflicts(host)
    if nvme.enabled:
        yield from _nvme_conflicts(config)
    limits = config.limits
    if limits.calls_inflight_max <= limits.clients_max:
        yield (
            "limits.calls_inflight_max",
            f"leaves no call free: an attached client holds one, limits.clients_max is "
            f"{limits.clients_max}",
            "raise it, or lower limits.clients_max",
        )
    socket = os.fsencode(config.daemon.socket_path)
    if len(socket) > SOCKET_PATH_BYTES_MAX:
        yield (
            "daemon.socket",
            f"the path has {len(socket)} bytes, a Unix socket takes {SOCKET_PATH_BYTES_MAX}",
            "choose a shorter path",
        )
    yield from gpu_conflicts(config.gpu)
    yield from gateway_conflicts(config.gateway)
    if not is_address(config.metrics.address):
        yield "metrics.address", "is not host:port", "write 127.0.0.1:9464, [::1]:9464, or off"
    if host.group and not _has_group(host.group):
        yield "host.group", "there is no such group", "create it, or leave it empty"
    if not Path(host.directory).is_absolute():
        yield "host.directory", "is not an absolute path", "name a tmpfs, for example /dev/shm"


def _has_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def _slot_conflicts(host: HostConfig) -> Iterator[tuple[str, str, str]]:
    if host.slot_bytes_min % PAGE_BYTES or host.slot_bytes_min > host.slab_bytes:
        yield (
            "host.slot_bytes_min",
            f"is not a multiple of 4 KiB up to host.slab_bytes ({format_bytes(host.slab_bytes)})",
            "16 KiB suits all but the tiniest models",
        )
    if host.bytes // host.slot_bytes_min >= 1 << 32:
        yield "host.slot_bytes_min", "makes more than 2^32 slots", "raise it"
    if host.staging_slots_min * host.slot_bytes_min > host.bytes // 2:
        yield (
            "host.staging_slots_min",
            f"would keep more than half of host.bytes ({format_bytes(host.bytes)}) from new stores",
            "lower it, or raise host.bytes",
        )


def _nvme_conflicts(config: Config) -> Iterator[tuple[str, str, str]]:
    host, nvme = config.host, config.nvme
    if nvme.segment_bytes % PAGE_BYTES:
        yield (
            "nvme.segment_bytes",
            "is not a whole number of 4 KiB pages",
            "use a multiple of 4 KiB",
        )
    if nvme.segment_bytes < host.slot_bytes_min + PAGE_BYTES:
        yield (
            "nvme.segment_bytes",
            f"cannot hold one slot of {format_bytes(host.slot_bytes_min)} and its header",
            "raise it, or lower host.slot_bytes_min",
        )
    if nvme.bytes_max < 2 * nvme.segment_bytes:
        yield (
            "nvme.bytes_max",
            f"holds fewer than two segments of {format_bytes(nvme.segment_bytes)}",
            "raise it, lower nvme.segment_bytes, or set nvme.enabled = false",
        )
    if not config.daemon.data_dir:
        yield "daemon.data_dir", "is empty", "name a directory, or set nvme.enabled = false"
