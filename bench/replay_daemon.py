"""The same requests through a real daemon process and through the replay: do they decide alike?

Primitive: `differences(...)`. The daemon is started as users start it, except that its clock reads
a number from a file, which the replay moves to each request's time in the trace: every judgement
depends on time, and nothing else about a request may differ. A client maps the arena, matches,
reserves, paints the blocks and commits. Compared are the length of every hit, and which blocks are
resident after every few requests; loaded blocks must have their own colours.

One tier of few hundred blocks, which the picker ranks whole: with more it draws samples, from a
seed that a daemon does not tell. Write-behind is off, since what it has written by when depends on
the disk, and so is the stay of chains that somebody may be adding to, which no trace tells.
`python -m bench.replay_daemon CLOCK ...` is the daemon with that clock.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.daemons import DaemonProcess
from bench.replay_cache import READY, Model, Tiers, times_of
from bench.replay_traces import Trace
from bench.workload import Painter, identity_of
from kvstore import daemon
from kvstore.client import KVClient, NamespaceHandle
from kvstore.clock import SystemClock
from kvstore.costs import LINKS_GUESSED, Costs
from kvstore.fingerprint import Chain
from kvstore.layout import BlockLayout
from kvstore.rpc import control_pb2 as pb
from kvstore.types import BlockStatus, Tier

LAYOUT = BlockLayout(block_tokens=4, layers=1, layer_bytes=16384)
HOST_BYTES = 8 << 20
STAGING_SLOTS = 1
"""Slots that only loads may fill."""
COMPARE_EVERY = 64
CONNECT_SECONDS = 60.0
CALL_SECONDS = 60.0


class FileClock(SystemClock):
    """Monotonic seconds are the double at the start of a file."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._seconds = mmap.mmap(file.fileno(), 8)

    def monotonic(self) -> float:
        seconds: float = struct.unpack_from("d", self._seconds)[0]
        return seconds

    def move(self, seconds: float) -> None:
        """Everybody who maps the file sees it."""
        struct.pack_into("d", self._seconds, 0, seconds)


@dataclass
class Compared:
    """What was looked at, and what was not the same."""

    requests: int = 0
    touches: int = 0
    evicted_blocks: int = 0
    hits_that_differ: int = 0
    residents_that_differ: int = 0
    wrong_bytes: int = 0

    @property
    def differences(self) -> int:
        return self.hits_that_differ + self.residents_that_differ + self.wrong_bytes


def differences(
    trace: Trace, policy: str, folder: Path, told: Callable[[int], None] = lambda done: None
) -> Compared:
    """Replay `trace` through both; `told(request)` is called now and then."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "clock"
    path.write_bytes(struct.pack("d", 1.0))
    clock = FileClock(path)
    process = DaemonProcess(
        folder,
        {
            "host.bytes": str(HOST_BYTES),
            "host.staging_share": "0",
            "host.staging_slots_min": str(STAGING_SLOTS),
            "nvme.enabled": "false",
            "policy.name": policy,
            # For so long the ends of growing chains stay whatever they are worth (kvstore/room.py).
            "lease.write_seconds": "0.000001",
        },
    )
    process.command = (sys.executable, "-m", "bench.replay_daemon", str(path), "serve")
    with process, KVClient(process.socket, deadline_seconds=CALL_SECONDS) as client:
        if not client.wait_connected(CONNECT_SECONDS):
            raise RuntimeError(f"no daemon at {process.socket}: {client.away_reason}")
        both = _Both(trace, policy, client)
        for request, now in enumerate(times_of(trace).tolist()):
            clock.move(now)
            both.request(request, now)
            if not request % COMPARE_EVERY:
                both.compare_residents()
                told(request)
        both.compare_residents()
        told(trace.requests)
        return both.found


class _Both:
    """A daemon and a replay side by side."""

    def __init__(self, trace: Trace, policy: str, client: KVClient) -> None:
        self._trace = trace
        self._client = client
        identity = identity_of(LAYOUT, "replay")
        self._space: NamespaceHandle = client.namespace(identity, LAYOUT)
        self._painter = Painter(LAYOUT.block_bytes)
        # Beliefs as a daemon has them that was told nothing yet.
        model = Model(
            Costs().prefill(0),
            LAYOUT.block_bytes // LAYOUT.block_tokens,
            LINKS_GUESSED[Tier.HOST],
            LINKS_GUESSED[Tier.NVME],
            LAYOUT.block_tokens,
            is_measured=False,
        )
        self._tiers = Tiers(policy, HOST_BYTES // LAYOUT.slot_bytes - STAGING_SLOTS, model=model)
        self._seen: dict[bytes, Chain] = {}
        self.found = Compared()

    def request(self, number: int, now: float) -> None:
        """One request through both."""
        starts = self._trace.starts
        blocks = self._trace.blocks[starts[number] : starts[number + 1]].astype(np.int64)
        # Tokens that name the block; equal blocks have equal prefixes, so chains agree.
        tokens = np.repeat(blocks, LAYOUT.block_tokens)
        chain = self._space.chain(tokens)
        ours = self._tiers.request(chain.joined, now)
        theirs = self._daemon(chain)
        self.found.requests += 1
        self.found.touches += len(chain)
        self.found.hits_that_differ += ours != theirs
        self.found.evicted_blocks = self._tiers.outcome.evicted_blocks
        self._seen[chain.joined[-32:]] = chain

    def _daemon(self, chain: Chain) -> int:
        life = self._client._session.life
        if life is None:
            raise RuntimeError(f"the daemon left: {self._client.away_reason}")
        group = pb.Group(namespace=self._space.id, fingerprints=chain.joined)
        request = pb.MatchRequest(client=life.client, groups=[group])
        found = self._client._session.call("Match", request).boundary_tokens // LAYOUT.block_tokens
        if found:
            self._check(chain, int(found))
        with self._space.reserve(chain) as held:
            granted = [at for at, s in enumerate(held.statuses) if s == BlockStatus.GRANTED]
            for at in granted:
                self._painter.paint(bytes(chain[at]), held.view(at))
            if granted:
                held.commit()
        return int(found)

    def _check(self, chain: Chain, found: int) -> None:
        """Every found block, through the mapped arena; takes no lease and counts no use."""
        life = self._client._session.life
        assert life is not None
        assert life.directory is not None
        declared = self._client._session.declared(life, self._space)
        seen = life.directory.lookup(declared.index, chain.joined[: 32 * found])
        for at, offset in enumerate(seen.offsets.tolist()):
            view = life.arena.read_view(offset, LAYOUT.block_bytes)
            self.found.wrong_bytes += not self._painter.is_painted(bytes(chain[at]), view)
        self.found.wrong_bytes += found - seen.count

    def compare_residents(self) -> None:
        """Every block of every chain seen so far."""
        catalog = self._tiers.catalog
        for chain in self._seen.values():
            rows = catalog.rows(chain.joined)
            ours = (rows >= 0) & (catalog.host_state[rows] == int(READY))
            theirs = self._space.exists(chain).tiers > 0
            self.found.residents_that_differ += int(np.count_nonzero(ours != theirs))


def main() -> None:
    """A daemon whose clock is a file: the first argument, then those of the command line."""
    from kvstore.cli import main as command

    path = Path(sys.argv.pop(1))
    daemon.SystemClock = lambda: FileClock(path)  # type: ignore[misc, assignment]
    command()


if __name__ == "__main__":
    main()
