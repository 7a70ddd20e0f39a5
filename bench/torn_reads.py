"""Does the second comparison of the directory protocol catch what it must?

`run(seconds, second_comparison)` lets one process re-use 64 slots of 256 KiB as fast as it can
while a reader looks blocks up, copies them, compares again and looks at every word: each is drawn
from the block's name. Returns how many copies were right, thrown away, and wrong: none may be wrong
with the second comparison, and the control without it must show some.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from bench.workload import Painter
from kvstore.arena import Arena, ArenaView
from kvstore.directory import DirectoryReader, DirectoryWriter, header_bytes
from kvstore.errors import PeerGone
from kvstore.types import HUGE_PAGE_BYTES, ByteArray

SLOTS = 64
SLOT_BYTES = 256 << 10
NAMES_A_SLOT = 4
REGION_BYTES = 4 * HUGE_PAGE_BYTES
REGIONS = SLOTS * SLOT_BYTES // REGION_BYTES
NAMESPACE = 3
BOOT_ID = 0x5EED
COPIES_A_LOOKUP = 8
WRITES_A_TURN = 256
SHARED_MEMORY = "/dev/shm"
START_SECONDS_MAX = 30.0


def run(seconds: float, second_comparison: bool, readers: int = 1) -> dict[str, int]:
    """{"hits", "discarded", "wrong"} of all readers after `seconds`, and the writer's "writes"."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="kvstore-torn-") as scratch:
        directory = Path(scratch) / "arena"
        pipes, processes = [], []
        for target in [_write] + [_read] * readers:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, directory), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            for pipe in pipes[1:]:
                pipe.send((seconds, second_comparison))
            counts = [_receive(pipe, seconds + START_SECONDS_MAX) for pipe in pipes[1:]]
            total = {name: sum(count[name] for count in counts) for name in counts[0]}
            pipes[0].send("stop")
            return total | _receive(pipes[0], START_SECONDS_MAX)
        finally:
            for process in processes:
                process.join(1)
                process.kill()
                process.join()


def _receive(pipe: Connection, seconds: float) -> dict[str, int]:
    if not pipe.poll(seconds):
        raise TimeoutError(f"a process of the torn-read bench is silent for {seconds} s")
    counts: dict[str, int] = pipe.recv()
    return counts


def names() -> ByteArray:
    """uint8[SLOTS * NAMES_A_SLOT, 32]: slot s is filled under the names s, SLOTS + s, and so on."""
    digests = [
        hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()
        for number in range(SLOTS * NAMES_A_SLOT)
    ]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


def _write(pipe: Connection, directory: Path) -> None:
    """The daemon's part: retract, fill, publish, without a pause, until told to stop."""
    arena = Arena.create(
        directory,
        bytes_total=SLOTS * SLOT_BYTES,
        region_bytes=REGION_BYTES,
        header_bytes=header_bytes(SLOTS, NAMESPACE + 1),
    )
    writer = DirectoryWriter(
        arena.header.array, slots=SLOTS, namespaces_max=NAMESPACE + 1, boot_id=BOOT_ID
    )
    fingerprints, painter = names(), Painter(SLOT_BYTES)
    offsets = np.arange(SLOTS, dtype=np.uint64) * np.uint64(SLOT_BYTES)
    lengths = np.array([SLOT_BYTES])
    views = [arena.view(offset, SLOT_BYTES) for offset in offsets.tolist()]
    random = np.random.default_rng(1)
    writes = 0
    while not pipe.poll():
        for number in random.integers(0, len(fingerprints), WRITES_A_TURN).tolist():
            slots = np.array([number % SLOTS])
            writer.retract(slots)
            painter.paint(fingerprints[number].tobytes(), views[number % SLOTS])
            writer.publish(
                slots,
                fingerprints[number : number + 1],
                offsets=offsets[slots],
                lengths=lengths,
                namespace=NAMESPACE,
                clear_count=0,
            )
        writes += WRITES_A_TURN
    arena.close()
    pipe.send({"writes": writes})


def _attach(directory: Path) -> tuple[ArenaView, DirectoryReader]:
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        try:
            view = ArenaView.attach(directory, REGION_BYTES, REGIONS)
            return view, DirectoryReader(view.header)
        except (FileNotFoundError, PeerGone):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _read(pipe: Connection, directory: Path) -> None:
    """A client's part: look up, copy, compare again, look at every word of what passed."""
    seconds, second_comparison = pipe.recv()
    view, reader = _attach(directory)
    fingerprints, painter = names(), Painter(SLOT_BYTES)
    random = np.random.default_rng()
    copy = np.empty(SLOT_BYTES, np.uint8)
    counts = {"hits": 0, "discarded": 0, "wrong": 0}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        wanted = random.integers(0, len(fingerprints), 4 * COPIES_A_LOOKUP)
        found = reader.lookup_each(NAMESPACE, fingerprints[wanted])
        for at in np.flatnonzero(found.mask)[:COPIES_A_LOOKUP].tolist():
            np.copyto(copy, view.read_view(int(found.offsets[at]), int(found.lengths[at])))
            one = slice(at, at + 1)
            if second_comparison and not reader.still_valid(
                BOOT_ID, found.slots[one], found.generations[one]
            ):
                counts["discarded"] += 1
            elif painter.is_painted(fingerprints[wanted[at]].tobytes(), copy):
                counts["hits"] += 1
            else:
                counts["wrong"] += 1
    pipe.send(counts)


def main() -> None:
    """Both ways, one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--readers", type=int, default=1)
    arguments = parser.parse_args()
    for second_comparison in (True, False):
        counts = run(arguments.seconds, second_comparison, arguments.readers)
        print(json.dumps({"second_comparison": second_comparison, **counts}))


if __name__ == "__main__":
    main()
