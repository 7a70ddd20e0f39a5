"""What a client counts. Every counter only grows; rates are for the reader.

Primitives: `ClientStatistics`, `Tally` (the thread-safe place where they grow).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Lock


@dataclass
class ClientStatistics:
    """A snapshot. Blocks unless a name says otherwise."""

    connected: bool = False
    boot_id: int = 0
    away_reason: str = ""
    """Why the client is not attached now; "" while it is."""
    attaches: int = 0
    """Daemon lives seen, the first included."""
    away_calls: int = 0
    """Matches, loads and stores answered with a miss or refusal because no daemon was attached."""
    failed_calls: int = 0
    """Control calls that ended with an error, deadline included."""
    matches: int = 0
    loads: int = 0
    loads_changed: int = 0
    """Loads thrown away because a slot or the daemon changed during the copy."""
    loaded_host: int = 0
    loaded_nvme: int = 0
    load_missed: int = 0
    stores: int = 0
    store_copied: int = 0
    store_present: int = 0
    store_stored: int = 0
    store_refused: int = 0
    """No room, no parent, dropped or refused."""
    spare_stores: int = 0
    """Stores copied at once into slots reserved beforehand."""
    spare_shortfalls: int = 0
    """Stores that had to reserve first because too few slots were at hand."""
    spare_slots: int = 0
    """Slots reserved beforehand and free now."""
    reported: int = 0
    reports_dropped: int = 0
    """Uses and misses never reported: the queue was full, or the daemon away."""
    leases: int = 0
    leases_released: int = 0


class Tally:
    """One lock around one ClientStatistics."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values = ClientStatistics()

    def add(self, **amounts: int) -> None:
        """Grow counters by name; a wrong name is our bug (AttributeError)."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._values, name, getattr(self._values, name) + amount)

    def snapshot(self) -> ClientStatistics:
        with self._lock:
            return replace(self._values)
