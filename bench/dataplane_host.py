"""Loads from and stores into host memory against plain numpy copies of the same bytes.

Both sides copy between sets of huge-page memory several times the caches, each turn another place
(cold), on one thread. A load is fingerprints + lookup + copy + second comparison; a store is what
the caller waits for: fingerprints, slots, copy, hand-over of the commit. NVMe is off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from bench.daemons import DaemonProcess
from bench.dataplane_common import STORE_SECONDS_MAX, Space, space_on, stored_all
from bench.harness import Bar, Context, Part, Reading, pairs, timed
from bench.plain import MIB, Bytes, Ring

SET_BYTES = 512 * MIB
"""What sources rotate over; the last-level cache of a server core complex is a tenth of it."""
TARGET_BYTES = 256 * MIB
ARENA_BYTES = 1024 * MIB
HUGE_SECONDS_MAX = 30.0
SETTLE_SECONDS = 0.03
"""After a store: checksum, commit and refill of slots end before the next sample."""


@dataclass(frozen=True)
class Shape:
    """One request: `blocks` blocks of `block_bytes`."""

    name: str
    blocks: int
    block_bytes: int
    peer_load: str
    peer_store: str

    @property
    def size(self) -> int:
        return self.blocks * self.block_bytes


SHAPES = (
    Shape("2x32MiB", 2, 32 * MIB, "peer 1.18 to 1.68", "peer 3.1 to 11.9"),
    Shape("8x2MiB", 8, 2 * MIB, "peer 3.0 to 4.6", "peer 9.4 to 12.9"),
)


def measure(context: Context) -> Iterator[Reading]:
    """One daemon a shape; loads first, so that the arena holds nothing but their chains."""
    for shape in SHAPES:
        load, store = f"load_host_{shape.name}_vs_memcpy", f"store_host_{shape.name}_vs_memcpy"
        if not context.wants(load) and not context.wants(store):
            continue
        settings = {"nvme.enabled": "false", "host.bytes": str(ARENA_BYTES)}
        with (
            DaemonProcess(context.folder(f"host-{shape.name}"), settings) as daemon,
            space_on(daemon.socket, 256, shape.block_bytes) as space,
        ):
            wait_for_huge_pages(context, daemon)
            copier = _Copier(shape)
            if context.wants(load):
                yield _load(context, load, space, shape, copier)
            if context.wants(store):
                yield _store(context, store, space, shape, copier)


def wait_for_huge_pages(context: Context, daemon: DaemonProcess) -> None:
    """The arena is collapsed in the background while it serves; a steady state is measured."""
    end = time.monotonic() + HUGE_SECONDS_MAX
    while time.monotonic() < end:
        arena = daemon.stat()["host"]["arena"]
        if arena["collapsed_bytes"] >= arena["bytes_total"]:
            return
        time.sleep(0.1)
    context.step("the arena is not on huge pages: figures are on 4 KiB pages")


class _Copier:
    """The plain operation: np.copyto of one request's bytes, block by block.

    One np.copyto of all blocks at once is faster where libc changes to stores past the cache (above
    some 32 MiB); blocks of a request rarely lie side by side, so it is told in the note only.
    """

    def __init__(self, shape: Shape) -> None:
        self._sources = Ring(SET_BYTES // shape.size, shape.blocks, shape.block_bytes)
        self.targets = Ring(TARGET_BYTES // shape.size, shape.blocks, shape.block_bytes)

    def copy(self, turn: int) -> float:
        return self._timed(turn, _copy_blocks)

    def _timed(self, turn: int, copy: Callable[[Bytes, Bytes], None]) -> float:
        source, target = self._sources.of(turn), self.targets.of(2 * turn)
        return timed(lambda: copy(target, source))

    def note(self) -> str:
        """How the plain operation was done, and what other ways of it take in comparison."""
        with ThreadPoolExecutor(2) as pool:

            def copy_by_two(target: Bytes, source: Bytes) -> None:
                half = target.shape[1] // 2
                halves = [
                    (target[:, :half], source[:, :half]),
                    (target[:, half:], source[:, half:]),
                ]
                list(pool.map(lambda pair: _copy_blocks(*pair), halves))

            once, two = (
                np.median([self._timed(turn, way) / self.copy(turn + 1) for turn in range(9)])
                for way in (np.copyto, copy_by_two)
            )
        return (
            f"np.copyto block by block, one thread, cold, {self._sources.pages}; all at once takes "
            f"{once:.2f} of it, two threads {two:.2f}"
        )


def _copy_blocks(target: Bytes, source: Bytes) -> None:
    for into, block in zip(target, source, strict=True):
        np.copyto(into, block)


def _load(context: Context, name: str, space: Space, shape: Shape, copier: _Copier) -> Reading:
    count = SET_BYTES // shape.size
    prompts = [space.tokens(number, shape.blocks) for number in range(count)]
    chains = [space.handle.chain(tokens) for tokens in prompts]
    for chain in chains:
        space.store(chain, copier.targets.of(0))

    def load(turn: int) -> float:
        target = copier.targets.of(2 * turn + 1)
        start = time.perf_counter()
        result = space.handle.load(space.handle.chain(prompts[turn % count]), target)
        seconds = time.perf_counter() - start
        if result.from_host != shape.blocks:
            raise RuntimeError(f"loaded {result} instead of {shape.blocks} host blocks")
        space.check(chains[turn % count], target)
        return seconds

    seen = pairs(context.several(64, 8), copier.copy, load, warm_up=count)
    return Reading(name, seen.ratio, f"{seen.note(copier.note(), shape.size)}; {shape.peer_load}")


def _store(context: Context, name: str, space: Space, shape: Shape, copier: _Copier) -> Reading:
    sources = Ring(TARGET_BYTES // shape.size, shape.blocks, shape.block_bytes)
    first = SET_BYTES // shape.size

    def store(turn: int) -> float:
        tokens, source = space.tokens(first + turn, shape.blocks), sources.of(turn)
        start = time.perf_counter()
        ticket = space.handle.store(space.handle.chain(tokens), source)
        seconds = time.perf_counter() - start
        stored_all(ticket.result(STORE_SECONDS_MAX))
        time.sleep(SETTLE_SECONDS)
        return seconds

    # Once round the arena: later stores evict, and find their slots' pages mapped.
    warm_up = context.several(ARENA_BYTES // shape.size, 4)
    before = space.client.statistics()
    seen = pairs(context.several(48, 8), copier.copy, store, warm_up=warm_up)
    after = space.client.statistics()
    waited = after.spare_shortfalls - before.spare_shortfalls
    return Reading(
        name,
        seen.ratio,
        f"{seen.note(copier.note(), shape.size)}; {waited} of {after.stores - before.stores} "
        f"stores had to ask for slots first; {shape.peer_store}",
    )


PART = Part(
    "host loads and stores against memcpy",
    (
        Bar("load_host_2x32MiB_vs_memcpy", "x", at_most=1.08),
        Bar("load_host_8x2MiB_vs_memcpy", "x", at_most=1.25),
        Bar("store_host_2x32MiB_vs_memcpy", "x", at_most=1.2),
        Bar("store_host_8x2MiB_vs_memcpy", "x", at_most=1.5),
    ),
    measure,
)
