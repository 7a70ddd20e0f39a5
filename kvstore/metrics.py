"""Prometheus metrics over HTTP: the statistics tree under names that stay.

Primitives:
  `METRICS`             every series: name, kind, meaning, and where its value comes from
  `MetricsServer`       serves them at `metrics.address`, on a thread of its own

Every series is there from the start, at 0. Rates and shares are the reader's business; nothing is
computed here but units. Reads the tree on the daemon's loop, through the function it is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import start_http_server
from prometheus_client.registry import Collector, CollectorRegistry

from kvstore.errors import ConfigError

Tree = Mapping[str, Any]
"""What `kvstore stat --json` prints."""
READ_SECONDS_MAX = 5.0


@dataclass(frozen=True)
class Counted:
    """Counters `key` or `key:label` of the store as one metric."""

    name: str
    key: str
    meaning: str
    label: str = ""
    unit: float = 1.0
    """One of the counter in the metric's unit."""
    kind: str = "counter"

    def family(self, tree: Tree) -> Metric:
        """All its series."""
        found = CounterMetricFamily(
            self.name, self.meaning, labels=[self.label] if self.label else []
        )
        for counter, value in tree["counters"].items():
            key, _, label = counter.partition(":")
            if key == self.key:
                found.add_metric([label] if self.label else [], value * self.unit)
        return found


@dataclass(frozen=True)
class Gauge:
    """One number of the tree as it is now."""

    name: str
    value: Callable[[Tree], float]
    meaning: str
    label: str = ""
    kind: str = "gauge"

    def family(self, tree: Tree) -> Metric:
        """Its only series."""
        return GaugeMetricFamily(self.name, self.meaning, value=self.value(tree))


@dataclass(frozen=True)
class Histogram:
    """Time inside the daemon, a histogram a verb."""

    name: str
    meaning: str
    label: str = "verb"
    kind: str = "histogram"

    def family(self, tree: Tree) -> Metric:
        """A series a verb and bucket."""
        found = HistogramMetricFamily(self.name, self.meaning, labels=[self.label])
        for verb, seen in tree["latencies"].items():
            found.add_metric(
                [verb],
                [(bound, count) for bound, count in seen["buckets"].items()],
                seen["seconds"],
            )
        return found


def _in(section: str, key: str) -> Callable[[Tree], float]:
    """`section.key` of the tree; 0 for a tier that is off."""
    return lambda tree: float((tree[section] or {}).get(key, 0))


def _host_used(tree: Tree) -> float:
    classes = tree["host"]["slabs"]["classes"] if tree["host"] else []
    return float(sum(kind["ready"] * kind["slot_bytes"] for kind in classes))


def _host_total(tree: Tree) -> float:
    return float(tree["host"]["slabs"]["bytes_total"] if tree["host"] else 0)


METRICS: tuple[Counted | Gauge | Histogram, ...] = (
    Counted("kvstore_queries", "queries", "Look-ups of a prefix that the daemon saw."),
    Counted("kvstore_queried_blocks", "queried_blocks", "Blocks that were looked up."),
    Counted("kvstore_hit_tokens", "hit_tokens", "Tokens found, by the tier that had them.", "tier"),
    Counted("kvstore_missed_tokens", "missed_tokens", "Tokens not found, by reason.", "reason"),
    Counted("kvstore_hit_blocks", "hit_blocks", "Blocks found, by the tier that had them.", "tier"),
    Counted("kvstore_missed_blocks", "missed_blocks", "Blocks not found, by reason.", "reason"),
    Counted(
        "kvstore_saved_prefill_seconds",
        "saved_prefill_us",
        "Estimate: prefill time of the tokens found, from the prefill times that engines "
        "reported. Time spent loading is not subtracted.",
        unit=1e-6,
    ),
    Counted(
        "kvstore_reported_blocks",
        "reported_blocks",
        "Blocks read without a call, as clients reported afterwards.",
    ),
    Counted(
        "kvstore_reported_missed_blocks",
        "reported_missed_blocks",
        "Blocks missed without a call, as clients reported afterwards.",
    ),
    Counted(
        "kvstore_nvme_to_host_bytes", "bytes_promoted", "Payload read up from NVMe and verified."
    ),
    Counted(
        "kvstore_host_to_nvme_bytes", "bytes_written_behind", "Payload written to NVMe: the wear."
    ),
    Counted("kvstore_nvme_written_blocks", "blocks_written_behind", "Blocks written to NVMe."),
    Counted(
        "kvstore_nvme_skipped_blocks",
        "write_skipped_blocks",
        "Blocks not written to NVMe, by reason (policy: not worth it; write_budget, wear: not "
        "affordable).",
        "reason",
    ),
    Counted(
        "kvstore_gpu_blocks", "gpu_blocks", "Copies in the GPU tier that came and left.", "change"
    ),
    Counted("kvstore_stored_blocks", "store_blocks", "Blocks offered, by outcome.", "outcome"),
    Counted(
        "kvstore_dropped_blocks",
        "dropped_blocks",
        "Replicas that left, each once, by reason (for want of room: evicted, or "
        "dropped_before_write when NVMe had no copy).",
        "reason",
    ),
    Counted(
        "kvstore_prefetch_blocks",
        "prefetch_blocks",
        "Blocks of announced requests, by outcome.",
        "outcome",
    ),
    Counted("kvstore_leases_granted", "leases_granted", "Read leases given."),
    Counted(
        "kvstore_expired_reservations",
        "expired_reservations",
        "Write reservations that ran out; their slots are quarantined.",
    ),
    Counted("kvstore_late_commits", "late_commits", "Commits that came after their reservation."),
    Counted(
        "kvstore_suppressed_errors",
        "suppressed_errors",
        "Errors that had a fallback; the log names each.",
    ),
    Gauge(
        "kvstore_healthy",
        lambda tree: float(list(tree["health"]) == ["ok"]),
        "1 while nothing keeps a tier from serving and storing; kvstore stat says what does, and "
        "remarks on what is slower or less than it could be.",
    ),
    Gauge("kvstore_uptime_seconds", lambda tree: tree["uptime_seconds"], "Age of this life."),
    Gauge("kvstore_clients", _in("clients", "attached"), "Attached client processes."),
    Gauge("kvstore_blocks", lambda tree: tree["blocks"], "Blocks in any tier."),
    Gauge("kvstore_host_bytes", _host_total, "Bytes of the host tier."),
    Gauge("kvstore_host_used_bytes", _host_used, "Bytes of slots with blocks in them."),
    Gauge("kvstore_nvme_allowed_bytes", _in("nvme", "bytes_allowed"), "What NVMe may grow to."),
    Gauge("kvstore_nvme_used_bytes", _in("nvme", "bytes_on_disk"), "Bytes of segment files."),
    Gauge("kvstore_gpu_bytes", _in("gpu", "allocated_bytes"), "Device memory the GPU tier holds."),
    Gauge("kvstore_leases", _in("leases", "active"), "Read leases that run."),
    Gauge("kvstore_leased_blocks", _in("leases", "blocks"), "Blocks they hold in place."),
    Gauge("kvstore_pinned_bytes", _in("pins", "bytes"), "Bytes that pins keep."),
    Gauge("kvstore_reserved_slots", _in("reservations", "slots"), "Slots being filled."),
    Gauge(
        "kvstore_quarantined_bytes",
        _in("reservations", "quarantined_bytes"),
        "Bytes of slots into which a late writer may still copy.",
    ),
    Gauge(
        "kvstore_write_behind_queue_blocks",
        lambda tree: tree["write_behind_queued_blocks"],
        "Blocks that wait to be written to NVMe.",
    ),
    Gauge(
        "kvstore_promoting_bytes",
        lambda tree: tree["promotions_bytes_inflight"],
        "Bytes on their way up from NVMe.",
    ),
    Gauge(
        "kvstore_loop_lag_p99_seconds",
        lambda tree: tree["loop_lag"]["p99_ms"] / 1e3,
        "How late the daemon's loop wakes up, 99th percentile of the last minutes.",
    ),
    Histogram("kvstore_call_seconds", "Time inside the daemon from request to reply, by verb."),
)


class MetricsServer(Collector):
    """Serves METRICS until `close`. `read` gives the tree and is run on `loop`."""

    def __init__(
        self, address: str, loop: asyncio.AbstractEventLoop, read: Callable[[], Tree]
    ) -> None:
        """`address` is host:port, port 0 takes a free one. Raises ConfigError."""
        self._loop = loop
        self._read = read
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        host, _, port = address.rpartition(":")
        try:
            self._server, self._thread = start_http_server(
                int(port), host.strip("[]"), registry=registry
            )
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"metrics.address: cannot listen on {address}: {error}; take another port, or off"
            ) from error
        self.port: int = self._server.server_port

    def describe(self) -> Iterator[Metric]:
        """Nothing is asked of the loop before the first scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All families. Raises TimeoutError, a 500 to the scraper, if the loop does not answer."""
        tree = asyncio.run_coroutine_threadsafe(self._on_loop(), self._loop).result(
            READ_SECONDS_MAX
        )
        for metric in METRICS:
            yield metric.family(tree)

    async def _on_loop(self) -> Tree:
        return self._read()

    def close(self) -> None:
        """Stop listening; a running scrape ends first. From a thread other than the server's."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
