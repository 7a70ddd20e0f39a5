"""Random sequences over the block API: two gateways, four clients, and things that are killed.

Primitives:
  `World`     a daemon, two gateways and two namespaces, kept for many runs
  `run(...)`  one sequence from a seed; an `Outcome`: bytes that were wrong, calls that hung

Every block is painted with its name, so that any reader tells right from wrong. A call may fail
with a typed error, or miss; it may not return other bytes, raise anything else, or never end.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc
import numpy as np

from bench.daemons import DaemonProcess
from bench.gateways import Gateway
from bench.workload import Painter, prompt
from kvstore.client import FlatNames, Names, RawNames
from kvstore.errors import KVStoreError
from kvstore.fingerprint import Chain
from kvstore.layout import BlockLayout
from kvstore.remote_client import Declared, RemoteClient, RemoteNamespace
from kvstore.rpc import blocks_pb2 as pb
from kvstore.rpc.chunks import chunks_of, join_data, split_data
from kvstore.types import NamespaceId, NamespaceKind

CLIENTS = 4
GATEWAYS = 2
STEPS = 5
PROMPTS = 12
BLOCKS = 6
TOKENS = 4
DEADLINE_SECONDS = 20.0
HANG_SECONDS = 90.0
"""Everything has a deadline below this; a machine that is busy with other things included."""
SETTINGS = {
    "host.bytes": "16MiB",
    "host.slab_bytes": "2MiB",
    "nvme.bytes_max": "128MiB",
    "nvme.segment_bytes": "8MiB",
    "nvme.free_bytes_min": "1MiB",
    "daemon.drain_seconds": "2s",
}
LAYOUT = BlockLayout(TOKENS, 1, (1 << 20) + 4096)
"""Two chunks a block, the second one small."""


@dataclass
class Outcome:
    """`broken`: what was raised that is no typed error."""

    wrong_bytes: int = 0
    blocks_read: int = 0
    calls: int = 0
    failed_calls: int = 0
    hangs: int = 0
    broken: list[str] = field(default_factory=list)


class World:
    """Context manager. `spaces`: one chained, one flat namespace."""

    def __init__(self, folder: Path) -> None:
        self.daemon = DaemonProcess(folder, SETTINGS)
        self.gateways = [Gateway(self.daemon) for _ in range(GATEWAYS)]
        self.painter = Painter(LAYOUT.block_bytes)
        self.spaces = [
            Declared(NamespaceId(secrets.token_bytes(32)), LAYOUT, kind) for kind in NamespaceKind
        ]
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.enter_context(self.daemon)
            for gateway in self.gateways:
                gateway.__enter__()
                undo.callback(gateway.kill)
            for gateway in self.gateways:
                with gateway.client() as client:
                    for space in self.spaces:
                        client.namespace(space).put(self.names(space, 0), self.painted(space, 0))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def names(self, space: Declared, number: int) -> Names:
        """Those of prompt `number`; prompts share their first two blocks."""
        if space.kind is NamespaceKind.FLAT:
            return FlatNames(space.id, [b"%d/%d" % (number, at) for at in range(BLOCKS)])
        chain = Chain(space.id, TOKENS)
        chain.extend(prompt(number, BLOCKS * TOKENS, 2 * TOKENS))
        return chain

    def painted(self, space: Declared, number: int) -> list[np.ndarray]:
        return [self.painter.painted(name) for name in _each(self.names(space, number))]


def _each(names: Names) -> list[bytes]:
    return [names.joined[at : at + 32] for at in range(0, len(names.joined), 32)]


class _Client:
    """One client's steps; `client` may be closed under it at any moment."""

    def __init__(self, world: World, seed: list[int], outcome: Outcome) -> None:
        self._world = world
        self._random = np.random.default_rng(seed)
        self._outcome = outcome
        self.client: RemoteClient | None = None

    def work(self) -> None:
        for _ in range(STEPS):
            gateway = self._world.gateways[self._random.integers(GATEWAYS)]
            if self.client is None or self._random.random() < 0.5:
                self.client = RemoteClient(gateway.address, deadline_seconds=DEADLINE_SECONDS)
            space = self._world.spaces[self._random.integers(len(self._world.spaces))]
            step = self._random.choice(
                [self._put, self._get, self._get, self._look, self._drop, self._damage]
            )
            self._outcome.calls += 1
            try:
                step(self.client.namespace(space), space, int(self._random.integers(PROMPTS)))
            except (KVStoreError, grpc.RpcError):
                self._outcome.failed_calls += 1
                self.client = None
            except Exception as error:  # noqa: BLE001 - told by the outcome
                self._outcome.broken.append(f"{step.__name__}: {error!r}")
        if self.client is not None:
            self.client.close()

    def _put(self, remote: RemoteNamespace, space: Declared, number: int) -> None:
        remote.put(self._world.names(space, number), self._world.painted(space, number))

    def _get(self, remote: RemoteNamespace, space: Declared, number: int) -> None:
        names = self._world.names(space, number)
        into = np.zeros((BLOCKS, LAYOUT.block_bytes), np.uint8)
        result = remote.get(names, into)
        for name, row, is_found in zip(_each(names), into, result.found.tolist(), strict=True):
            if is_found:
                self._outcome.blocks_read += 1
                self._outcome.wrong_bytes += self._world.painter.wrong_bytes(name, row)

    def _look(self, remote: RemoteNamespace, space: Declared, number: int) -> None:
        names = self._world.names(space, number)
        remote.exists(names)
        remote.pin(names, 1.0, hard=bool(self._random.integers(2)))
        remote.list()
        remote.score(names)
        remote.unpin(names)

    def _drop(self, remote: RemoteNamespace, space: Declared, number: int) -> None:
        names = self._world.names(space, number)
        at = int(self._random.integers(BLOCKS))
        remote.delete(RawNames(space.id, names.joined[at * 32 : at * 32 + 32]))
        if self._random.random() < 0.1:
            remote.clear()

    def _damage(self, remote: RemoteNamespace, space: Declared, number: int) -> None:
        """A put with one damaged chunk, or one that stops in the middle."""
        names = self._world.names(space, number)
        rows = self._world.painted(space, number)
        gateway = self._world.gateways[self._random.integers(GATEWAYS)]
        messages = list(_messages(space, names, rows))
        cut = int(self._random.integers(1, len(messages)))
        if self._random.random() < 0.5:
            chunk, data, _ = split_data(messages[cut])
            spoiled = bytearray(data)
            spoiled[self._random.integers(len(spoiled))] ^= 1
            messages[cut] = join_data(chunk, bytes(spoiled))
        else:
            del messages[cut:]
        with grpc.insecure_channel(gateway.address) as channel:
            put = channel.stream_unary(
                "/kvstore.blocks.v1.Blocks/Put", None, pb.PutReply.FromString
            )
            put(iter(messages), timeout=DEADLINE_SECONDS)


def _messages(space: Declared, names: Names, rows: list[np.ndarray]) -> Iterator[bytes]:
    header = pb.PutHeader(namespace=space.id, fingerprints=names.joined, declare=space.message())
    yield join_data(pb.Chunk(header=header), b"")
    for block, row in enumerate(rows):
        yield from chunks_of(block, row)


def run(world: World, seed: int) -> Outcome:
    """One sequence: clients at work while something is killed, or nothing."""
    outcome = Outcome()
    random = np.random.default_rng(seed)
    clients = [_Client(world, [seed, number], outcome) for number in range(CLIENTS)]
    threads = [threading.Thread(target=client.work, daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    time.sleep(float(random.random()) * 0.3)
    _disturb(world, clients, random)
    until = time.monotonic() + HANG_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
        outcome.hangs += thread.is_alive()
    return outcome


def _disturb(world: World, clients: list[_Client], random: np.random.Generator) -> None:
    def daemon() -> None:
        world.daemon.kill()
        world.daemon.start()

    def gateway() -> None:
        chosen = world.gateways[random.integers(GATEWAYS)]
        chosen.kill()
        chosen.__enter__()

    def client() -> None:
        chosen = clients[random.integers(CLIENTS)].client
        if chosen is not None:
            chosen.close()

    acts: list[Callable[[], object]] = [daemon, gateway, client, client, lambda: None]
    acts[random.integers(len(acts))]()
