"""Loads of blocks that lie on NVMe only, against plain O_DIRECT reads of the same bytes.

Measured: fingerprints + match + promotion + verification + copy into the caller's memory. Plain:
preadv calls of 2 MiB from a file on the same disk, as large as all stored blocks together, into a
huge-page buffer, as many in flight as the daemon has readers. Both walk over their whole set, each
turn another place. The set is several times the arena, so that a chain is gone from host memory
when its turn comes again; every load proves it by where its blocks came from.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.daemons import DaemonProcess
from bench.dataplane_common import Space, space_on
from bench.dataplane_host import wait_for_huge_pages
from bench.harness import Bar, Context, Part, Reading, pairs, timed
from bench.plain import MIB, DirectFile, Ring

READERS = 4
LOAD_SECONDS_MAX = 20.0


@dataclass(frozen=True)
class Shape:
    """One request: `blocks` blocks; `chains` different ones, asked for in turn."""

    name: str
    blocks: int
    chains: int
    peer: str

    @property
    def figure(self) -> str:
        return f"load_nvme_{self.name}_vs_odirect"


@dataclass(frozen=True)
class Store:
    """A daemon's life with one block size, and the requests measured on it."""

    block_bytes: int
    host_bytes: int
    shapes: tuple[Shape, ...]


STORES = (
    Store(
        2 * MIB,
        512 * MIB,
        (
            Shape("64x2MiB", 64, 12, "peer, 8 blocks: 1.8 to 2.4"),
            Shape("16x2MiB", 16, 40, "peer, 8 blocks: 1.8 to 2.4"),
        ),
    ),
    Store(32 * MIB, 512 * MIB, (Shape("4x32MiB", 4, 12, "peer, 2 blocks: 1.1 to 1.7"),)),
)


def measure(context: Context) -> Iterator[Reading]:
    """One daemon a block size; its requests one shape after the other."""
    for store in STORES:
        shapes = [shape for shape in store.shapes if context.wants(shape.figure)]
        if shapes:
            yield from _measure(context, store, shapes)


def _measure(context: Context, store: Store, shapes: Sequence[Shape]) -> Iterator[Reading]:
    settings = {
        "host.bytes": str(store.host_bytes),
        "nvme.bytes_max": "6GiB",
        "nvme.readers": str(READERS),
    }
    folder = context.folder(f"nvme-{store.block_bytes // MIB}")
    with (
        DaemonProcess(folder, settings) as daemon,
        space_on(daemon.socket, 16, store.block_bytes) as space,
    ):
        wait_for_huge_pages(context, daemon)
        first = 0
        for shape in shapes:
            size = shape.chains * shape.blocks * store.block_bytes
            context.step(f"storing {size // MIB} MiB, until they are durable")
            _fill(space, shape, first)
            _push_out(space, shape, first + shape.chains, store.host_bytes)
            mode = daemon.stat()["nvme"]["mode"]
            yield _load(context, space, shape, first, folder, mode)
            first += 2 * shape.chains


def _fill(space: Space, shape: Shape, first: int) -> None:
    scratch = Ring(1, shape.blocks, space.block_bytes).of(0)
    for number in range(first, first + shape.chains):
        chain = space.chain(number, shape.blocks)
        space.store(chain, scratch)
        space.flush(chain)


def _push_out(space: Space, shape: Shape, number: int, host_bytes: int) -> None:
    """Store other blocks until nothing of the set is left in host memory."""
    scratch = Ring(1, shape.blocks, space.block_bytes).of(0)
    for extra in range(2 * host_bytes // (shape.blocks * space.block_bytes)):
        chain = space.chain(number + extra, shape.blocks)
        space.store(chain, scratch)
        space.flush(chain)


def _load(
    context: Context, space: Space, shape: Shape, first: int, folder: Path, mode: str
) -> Reading:
    size = shape.blocks * space.block_bytes
    prompts = [space.tokens(first + turn, shape.blocks) for turn in range(shape.chains)]
    targets = Ring(2, shape.blocks, space.block_bytes)
    file = DirectFile(folder / f"{shape.name}.plain", shape.chains * size, READERS)
    try:

        def plain(turn: int) -> float:
            return timed(lambda: file.read_into(targets.of(0).reshape(-1), turn * size))

        def load(turn: int) -> float:
            tokens, target = prompts[turn % shape.chains], targets.of(1)
            start = time.perf_counter()
            chain = space.handle.chain(tokens)
            result = space.handle.load(chain, target, deadline_seconds=LOAD_SECONDS_MAX)
            seconds = time.perf_counter() - start
            if result.from_nvme != shape.blocks:
                raise RuntimeError(f"loaded {result} instead of {shape.blocks} NVMe blocks")
            space.check(chain, target)
            return seconds

        seen = pairs(context.several(2 * shape.chains, 6), plain, load, warm_up=2)
    finally:
        file.close()
        (folder / f"{shape.name}.plain").unlink()
    base = f"O_DIRECT preadv of 2 MiB, {READERS} in flight, {targets.pages}; daemon reads {mode}"
    return Reading(shape.figure, seen.ratio, f"{seen.note(base, size)}; {shape.peer}")


PART = Part(
    "loads from NVMe against plain O_DIRECT reads",
    (
        Bar("load_nvme_64x2MiB_vs_odirect", "x", at_most=1.15),
        Bar("load_nvme_16x2MiB_vs_odirect", "x", at_most=1.35),
        Bar("load_nvme_4x32MiB_vs_odirect", "x", at_most=1.2),
    ),
    measure,
)
