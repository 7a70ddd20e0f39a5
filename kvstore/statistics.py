"""The statistics tree: what `kvstore stat`, `kvstore top` and metrics read.

Primitives: `statistics_of(service)`. A view only: every number is kept, and counted, where it
belongs.
"""

from __future__ import annotations

from kvstore.service import Service
from kvstore.version import VERSION


def statistics_of(service: Service) -> dict[str, object]:
    """The whole tree; keys are stable, new ones may appear."""
    store = service.store
    return {
        "version": VERSION,
        "boot_id": f"{service.boot_id:016x}",
        "uptime_seconds": round(service.now() - service.started, 3),
        "health": service.health() or ["ok"],
        "remarks": service.remarks(),
        "socket": str(service.config.daemon.socket_path),
        "clients": service.sessions.statistics(),
        "blocks": len(store.catalog),
        "namespaces": [
            {
                "id": namespace.id.hex(),
                "label": namespace.label,
                "kind": str(namespace.kind),
                "block_tokens": namespace.layout.block_tokens,
                "block_bytes": namespace.layout.block_bytes,
                "clear_count": namespace.clear_count,
            }
            for namespace in store.namespaces
        ],
        "host": store.host.describe() if store.host is not None else None,
        "nvme": store.nvme.describe() if store.nvme is not None else None,
        "gpu": service.gpu.copies.describe() if service.gpu is not None else None,
        "leases": store.leases.statistics(),
        "pins": service.pins.statistics(),
        "reservations": store.reservations.statistics(),
        "write_behind_queued_blocks": (
            service.write_behind.queued_blocks if service.write_behind is not None else 0
        ),
        "host_filled_bytes": service.elastic.filled_bytes,
        "prefetch_queued_blocks": service.prefetcher.queued_blocks,
        "costs": store.costs.statistics(),
        "policy": {"name": store.policy.name, **store.policy.statistics()},
        "promotions_bytes_inflight": service.mover.bytes_inflight,
        "loop_lag": service.lag.statistics(),
        "latencies": service.latencies.statistics(),
        "counters": store.counters.snapshot(),
    }
