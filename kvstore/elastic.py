"""How much memory the host tier fills: less under pressure, all it was started with otherwise.

Primitives of `Elastic`: `resize` (somebody's word), `turn` (a step towards it, every tick),
`filled_bytes`.

A slab that leaves is emptied first, the one of least value, and what a lease or a job holds stays:
running requests win. Its memory goes back to the system while clients keep their mappings; nobody
reads there, for no slot of it is READY. A slab that comes back gets its pages before it serves,
so that no client ever touches memory that is not there. Nothing stops meanwhile: pages go a few
megabytes at a time, and come on a worker thread. While a process keeps the arena pinned for a
device, nothing goes: the device would go on reading the old pages.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path

from kvstore.logs import get_logger
from kvstore.room import Room
from kvstore.store import Store

STEPS_PER_TURN = 8
DISCARD_BYTES = 8 << 20
"""Pages given back in one go, about 1.5 ms of the kernel's time."""
LOOK_EVERY_SECONDS = 1.0
SHRINK_SHARE = 1 / 8
"""Of the memory filled now, given back each second while the pressure lasts."""
GROW_SHARE = 1 / 16
GROW_AFTER_SECONDS = 30.0
"""So long there must have been no pressure before memory is taken again."""
SLABS_MIN = 1


class Elastic:
    """On the daemon's loop. A pressure limit of 0: only `resize` says how much."""

    def __init__(
        self,
        store: Store,
        room: Room,
        pressure: Pressure,
        is_pinned: Callable[[], bool],
        workers: Executor,
    ) -> None:
        self._store = store
        self._is_pinned = is_pinned
        self._room = room
        self._pressure = pressure
        self._workers = workers
        self._going = range(0)
        """Bytes of a retired slab whose pages are still to be given back."""
        self._coming: Future[bool] | None = None
        """Pages for the slab retired last are being taken."""
        self._wanted_slabs = store.host_tier.pool.slabs
        self._retired: list[int] = []
        self._look_at = 0.0
        self._calm_since = 0.0
        self._log = get_logger("elastic")

    @property
    def target_bytes(self) -> int:
        """What the tier may fill."""
        return self._wanted_slabs * self._store.host_tier.pool.slab_bytes

    @property
    def filled_bytes(self) -> int:
        """What it fills now, free slots included."""
        pool = self._store.host_tier.pool
        return (pool.slabs - len(self._retired)) * pool.slab_bytes

    def resize(self, count_bytes: int) -> int:
        """Fill at most so much from now on, whole slabs, at least one; 0: all. What it will be."""
        pool = self._store.host_tier.pool
        slabs = count_bytes // pool.slab_bytes if count_bytes else pool.slabs
        self._wanted_slabs = max(SLABS_MIN, min(slabs, pool.slabs))
        self._log.info("host tier resized", bytes=self.target_bytes)
        return self.target_bytes

    def turn(self, now: float) -> None:
        """A bounded step towards the target."""
        host = self._store.host_tier
        if self._pressure.limit_percent and now >= self._look_at:
            self._look_at = now + LOOK_EVERY_SECONDS
            self._follow(self._pressure, now)
        if self._coming is not None and not self._arrived(self._coming):
            return
        allowed = host.pool.slabs - self._wanted_slabs
        if len(self._retired) > allowed:
            self._going = range(0)
            size = host.pool.slab_bytes
            self._coming = self._workers.submit(host.arena.populate, self._retired[-1] * size, size)
        elif not self._is_pinned():
            self._shrink(len(self._retired) < allowed, now)

    def _shrink(self, is_due: bool, now: float) -> None:
        pool = self._store.host_tier.pool
        for _ in range(STEPS_PER_TURN):
            if self._going:
                piece, self._going = self._going[:DISCARD_BYTES], self._going[DISCARD_BYTES:]
                self._store.host_tier.arena.discard(piece.start, len(piece))
                return
            if not is_due:
                return
            slab = pool.free_slab()
            if slab >= 0:
                pool.retire_slab(slab)
                self._retired.append(slab)
                self._going = range(slab * pool.slab_bytes, (slab + 1) * pool.slab_bytes)
            elif not self._room.shed_slab(now):
                return

    def _arrived(self, coming: Future[bool]) -> bool:
        """Whether nothing is on its way any more."""
        if not coming.done():
            return False
        self._coming = None
        pool = self._store.host_tier.pool
        if coming.result():
            pool.restore_slab(self._retired.pop())
        else:
            self._wanted_slabs = pool.slabs - len(self._retired)
        return True

    def _follow(self, pressure: Pressure, now: float) -> None:
        """Less while others wait for memory, slowly more once they no longer do."""
        percent, host = pressure.percent(), self._store.host_tier
        filled = host.pool.slabs - len(self._retired)
        if percent >= pressure.limit_percent:
            self._calm_since = now
            self._wanted_slabs = max(SLABS_MIN, filled - max(1, int(filled * SHRINK_SHARE)))
        elif now - self._calm_since >= GROW_AFTER_SECONDS and self._wanted_slabs < host.pool.slabs:
            step = max(1, int(host.pool.slabs * GROW_SHARE))
            self._wanted_slabs = min(host.pool.slabs, self._wanted_slabs + step)


class Pressure:
    """The kernel's pressure stall file: share of time that some task waited for memory."""

    def __init__(self, path: Path, limit_percent: float) -> None:
        self._path = path
        self.limit_percent = limit_percent

    def percent(self) -> float:
        """Over the last ten seconds; 0 where the kernel does not tell."""
        try:
            some = self._path.read_text().split("avg10=", 1)[1]
            return float(some.split(None, 1)[0])
        except (OSError, IndexError, ValueError):
            return 0.0
