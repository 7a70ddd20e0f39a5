"""Tools over a data directory whose daemon is stopped.

Primitives: `verify_offline`. Takes the directory's lock, so that it can never meet a live daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.assembly import lock_data, make_store, open_nvme
from kvstore.clock import SystemClock
from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.recovery import recover
from kvstore.scrub import Progress, Scrubber
from kvstore.tier.nvme import NvmeTier
from kvstore.tier.superblock import FILE_NAME


class _Untouched(NvmeTier):
    is_read_only = True


def verify_offline(config: Config, *, payloads: bool, fix: bool) -> Iterator[Progress]:
    """Index and segments against each other, payloads on request; progress with findings.

    Reads the tier as a start does, and reports the records that a start drops; without `fix`
    nothing but lock files changes on disk. Raises ConfigError (a daemon runs, or no daemon ever
    did), TierError.
    """
    directory = Path(config.daemon.data_dir)
    if not (directory / FILE_NAME).exists():
        raise ConfigError(f"{directory} has no {FILE_NAME}; name the daemon.data_dir of a daemon")
    lock = lock_data(config)
    try:
        nvme = open_nvme(config, SystemClock(), NvmeTier if fix else _Untouched)
        try:
            store = make_store(config, None, nvme)
            recovered = recover(store, nvme)
            yield Progress(0, recovered.kept, _before(nvme) + recovered.findings())
            with ThreadPoolExecutor(1) as workers, asyncio.Runner() as runner:
                steps = Scrubber(store, workers).verify(payloads=payloads, fix=fix)
                while (step := runner.run(anext(steps, None))) is not None:
                    if step.is_done:
                        step.findings.clear()  # records that were not kept: told above, by reason
                    yield step
        finally:
            nvme.close()
    finally:
        lock.close()


def _before(nvme: NvmeTier) -> list[str]:
    """What was found before there was a catalog."""
    seen = nvme.statistics()
    findings = []
    if seen.index_damage:
        findings.append(f"the index was built again from the blocks: {seen.index_damage}")
    if seen.records_unusable:
        findings.append(f"{seen.records_unusable} records that point to no slot of a segment")
    return findings
