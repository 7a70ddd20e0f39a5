"""The costs that were learnt, kept over restarts: `costs.json` in the data directory.

Primitives of `CostKeeper`: `turn`. A file that is damaged or of another release is as good as none:
what it held is learnt again. Without an NVMe tier there is no directory, and nothing is kept.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec

from kvstore.costs import Costs
from kvstore.logs import get_logger
from kvstore.store import Store

FILE_NAME = "costs.json"
SAVE_EVERY_SECONDS = 30.0
_log = get_logger("costs")


class CostKeeper:
    """Reads the file when it is made, at the daemon's start; writes on a worker thread."""

    def __init__(self, store: Store) -> None:
        self._costs = store.costs
        self._directory = Path(store.config.daemon.data_dir) if store.nvme is not None else None
        self._saved = 0
        self._due = SAVE_EVERY_SECONDS
        if self._directory is not None:
            _load(self._directory / FILE_NAME, self._costs)
        for namespace in store.namespaces:
            self._costs.declare(namespace.index, namespace.id)
        while self._costs.refresh():
            pass

    def turn(self, now: float, workers: Executor) -> Future[None] | None:
        """Save what is new, from time to time; at `now` = infinity in any case."""
        if self._directory is None or now < self._due or self._costs.changes == self._saved:
            return None
        self._due = now + SAVE_EVERY_SECONDS
        self._saved = self._costs.changes
        return workers.submit(_save, self._directory / FILE_NAME, self._costs.snapshot())


def _load(path: Path, costs: Costs) -> None:
    try:
        costs.restore(msgspec.json.decode(path.read_bytes()))
    except FileNotFoundError:
        return
    except (OSError, msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("costs are learnt anew", path=str(path), error=str(error))


def _save(path: Path, snapshot: dict[str, Any]) -> None:
    """Replace the file as a whole. Not made durable: what a crash loses is learnt again."""
    try:
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(snapshot))
        fresh.replace(path)
    except OSError as error:
        _log.warning("costs are not kept", path=str(path), error=str(error))
