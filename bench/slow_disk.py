"""`kvstore serve` on a slow disk: `python -m bench.slow_disk RATE serve`.

Everything is the real daemon but for the last call: `preadv` returns no earlier than a disk of RATE
bytes per second, shared by all readers, would have. Writes go at full speed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from functools import partial

from kvstore import assembly, cli
from kvstore.blockio import DirectIO, KernelCalls
from kvstore.types import ByteArray


class ThrottledReads(KernelCalls):
    """The kernel, its reads paced. Thread-safe."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0
        """When the disk has served all that was asked of it; monotonic seconds."""

    def preadv(self, fd: int, views: Sequence[ByteArray], offset: int) -> int:
        with self._lock:
            length = sum(view.nbytes for view in views)
            self._free_at = max(self._free_at, time.monotonic()) + length / self._rate
            done_at = self._free_at
        done = super().preadv(fd, views, offset)
        time.sleep(max(0.0, done_at - time.monotonic()))
        return done


def main() -> None:
    """First argument: bytes per second; the rest is `kvstore`'s."""
    rate, *arguments = sys.argv[1:]
    assembly.DirectIO = partial(DirectIO, system=ThrottledReads(float(rate)))  # type: ignore[misc]
    cli.main(arguments)


if __name__ == "__main__":
    main()
