"""Tools over a data directory whose daemon is stopped.

Primitives: `verify_offline`. Takes the directory's lock, so that it can never meet a live daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from kvstore.assembly import lock_data, make_store, open_nvme
from kvstore.clock import SystemClock
from kvstore.config import Config
from kvstore.recovery import recover
from kvstore.scrub import Progress, Scrubber


def verify_offline(config: Config, *, payloads: bool, fix: bool) -> Iterator[Progress]:
    """Index and segments against each other, payloads on request; progress with findings.

    Opens the tier as a start does: records that a start drops leave the index and are reported.
    Raises ConfigError (a daemon runs), TierError.
    """
    lock = lock_data(config)
    try:
        nvme = open_nvme(config, SystemClock())
        try:
            store = make_store(config, None, nvme)
            found = recover(store, nvme)
            yield Progress(0, found.kept, found.findings())
            with ThreadPoolExecutor(1) as workers, asyncio.Runner() as runner:
                steps = Scrubber(store, workers).verify(payloads=payloads, fix=fix)
                while (step := runner.run(anext(steps, None))) is not None:
                    yield step
        finally:
            nvme.close()
    finally:
        lock.close()
