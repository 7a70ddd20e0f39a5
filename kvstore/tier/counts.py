"""The NVMe tier's statistics, and the counters its worker threads share."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class NvmeStatistics:
    """Bytes, blocks and what went wrong since open."""

    bytes_max: int
    bytes_allowed: int
    bytes_on_disk: int
    bytes_beside: int
    segments: int
    slots_ready: int
    records: int
    mode: str
    mode_reason: str
    reserve_reason: str
    limit_reason: str
    lives: int
    index_damage: str
    unknown_files_removed: int
    unknown_bytes_removed: int
    records_unusable: int
    segments_lost: int
    bytes_written: int
    bytes_read: int
    checksum_failures: int
    io_failures: int
    disk_full: int


class SharedCounts:
    """Counters that worker threads share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(
            (
                "segments_lost",
                "bytes_written",
                "bytes_read",
                "checksum_failures",
                "io_failures",
                "disk_full",
            ),
            0,
        )

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)
