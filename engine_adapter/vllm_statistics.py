"""What the connector counts. Counters only grow; `Counts.take` gives what came since the last call.

Primitives: `COUNTERS` (names and what they mean), `Counts`, `added`.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

COUNTERS: dict[str, str] = {
    "loads": "Loads ordered",
    "loads_layerwise": "Loads ordered inside a forward pass",
    "loads_failed": "Loads that did not bring the stored bytes; computed instead",
    "loads_given_up": "Requests computed because their loads failed before",
    "loads_not_worth": "Hits computed because loading was predicted to be slower",
    "lookups_late": "Requests that did not wait any longer to learn what is stored",
    "promised_host_tokens": "Tokens found in host memory",
    "promised_nvme_tokens": "Tokens brought up from NVMe for a request",
    "loaded_tokens": "Tokens whose blocks were loaded and confirmed",
    "loaded_bytes": "Bytes of those blocks",
    "saved_prefill_seconds": "Computing those tokens would have taken so long, by recent steps",
    "load_seconds": "Seconds that loads took",
    "saved_blocks": "Blocks stored",
    "present_blocks": "Blocks that were stored already",
    "refused_blocks": "Blocks not stored: no room, no parent, daemon away or busy",
    "saved_bytes": "Bytes of the blocks stored",
    "stall_seconds": "Seconds that scheduling waited for lookups",
}


class Counts:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        """Grow counters by name; a wrong name is our bug (KeyError)."""
        with self._lock:
            for name, amount in amounts.items():
                COUNTERS[name]
                if amount:
                    self._values[name] = self._values.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """What was added since the last call; often nothing."""
        if not self._values:
            return {}
        with self._lock:
            values, self._values = self._values, {}
        return values


def added(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    """The sum of both, by name."""
    return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}
