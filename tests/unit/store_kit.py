"""Small stores for the store tests: 8 KiB blocks of 4 tokens, virtual time, a disk in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.layout import BlockLayout
from kvstore.namespaces import Namespace
from kvstore.store import READY
from kvstore.testing.harness import Harness
from kvstore.types import BlockStatus, IntArray

LAYOUT = BlockLayout(block_tokens=4, layers=2, layer_bytes=4096)
"""One block: 8 KiB, two parts."""
LARGE = BlockLayout(block_tokens=4, layers=8, layer_bytes=4096)
TWO_RANKS = BlockLayout(block_tokens=4, layers=1, layer_bytes=5000, ranks=2)
STORED, PRESENT, WAITING = BlockStatus.STORED, BlockStatus.PRESENT, BlockStatus.WAITING
GRANTED, REFUSED, DROPPED = BlockStatus.GRANTED, BlockStatus.REFUSED, BlockStatus.DROPPED
NO_ROOM, NO_PARENT = BlockStatus.NO_ROOM, BlockStatus.NO_PARENT
MEMORY = Path("/dev/shm")


@contextmanager
def harnesses() -> Iterator[Callable[..., Harness]]:
    """A factory of started harnesses; those that live at the end are checked."""
    made: list[Harness] = []
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:

        def make(settings: dict[str, object] | None = None, *, tasks: bool = True, **options: Any):
            path = Path(directory) / str(len(made))
            made.append(Harness(path, settings=settings, **options))
            return made[-1].start(tasks=tasks)

        yield make
        for harness in made:
            if harness.is_alive:
                harness.check()
                harness.crash()


def tokens(blocks: int, *, seed: int = 0, block_tokens: int = 4) -> list[int]:
    """Token ids of a chain of its own."""
    return list(range(seed << 16, (seed << 16) + blocks * block_tokens))


def rows_of(harness: Harness, chain: Any) -> IntArray:
    return harness.store.catalog.rows(chain.joined)


def drop_from_host(harness: Harness, chain: Any) -> None:
    """As if everything of a chain that may leave the host tier had been evicted."""
    rows = rows_of(harness, chain)
    rows = rows[rows >= 0]
    store = harness.store
    idle = rows[store.is_idle(rows) & (store.catalog.host_state[rows] == READY)]
    harness.call(store.drop_host, idle[::-1], "evicted", harness.service.now())


def on_nvme_only(harness: Harness, space: Namespace, chain: Any, engine: Any) -> None:
    """Store a chain, make it durable, drop it from host."""
    assert set(harness.wait(engine.store(space, chain))) <= {STORED, PRESENT}
    assert all(harness.wait(engine.flush(space, chain)))
    drop_from_host(harness, chain)
    assert harness.wait(engine.read_directory(space, chain)) == 0


def counters(harness: Harness, *names: str) -> list[int]:
    return [harness.store.counters[name] for name in names]


def dropped(harness: Harness) -> dict[str, int]:
    """Replicas that left, by reason; nothing that is 0."""
    series = ((name.split(":"), count) for name, count in harness.store.counters.snapshot().items())
    return {name[1]: count for name, count in series if name[0] == "dropped_blocks" and count}


def host_slots(harness: Harness) -> dict[str, int]:
    """Slots by state, summed over all sizes; `free` counts what classes own."""
    total = dict.fromkeys(("free", "filling", "ready", "draining", "quarantined"), 0)
    for item in harness.store.host_tier.pool.statistics().classes:
        for name in total:
            total[name] += getattr(item, name)
    return total


def held_slots(harness: Harness) -> int:
    return sum(count for name, count in host_slots(harness).items() if name != "free")
