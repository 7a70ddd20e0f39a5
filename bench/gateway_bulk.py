"""One client: bytes through the gateway against a bare stream, TLS against plain, one block.

Primitives: `PART`; `Remote` (a namespace with stored blocks, seen through a gateway).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator

import numpy as np

from bench.daemons import DaemonProcess
from bench.gateways import BareStream, Certificates, Gateway
from bench.harness import Bar, Context, Pairs, Part, Reading, pairs, spread, timed
from bench.workload import prompt
from kvstore.fingerprint import Chain
from kvstore.layout import BlockLayout
from kvstore.remote_client import Declared, RemoteClient, RemoteNamespace
from kvstore.rpc.chunks import CHUNK_BYTES
from kvstore.types import ByteArray, NamespaceId

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
TOKENS = 16
RING_BLOCKS = 16
"""Memory a client uses again and again: a machine reads and writes fresh memory more slowly."""
SAMPLES = (12, 4)
SETTINGS = {"host.bytes": "1280MiB", "nvme.enabled": "false"}

GET = Bar("gateway_get_vs_grpc_limit", "ratio", at_least=0.80)
PUT = Bar("gateway_put_vs_grpc_limit", "ratio", at_least=0.70)
SMALL = Bar("gateway_get_small_p50_ms", "ms", at_most=4.0)
TLS = Bar("tls_get_vs_plain", "ratio", at_least=0.6)


class Remote:
    """One client's namespace of 2 MiB blocks. `blocks` of them are what one turn moves."""

    def __init__(self, client: RemoteClient, blocks: int, space: NamespaceId | None = None) -> None:
        self.blocks = blocks
        layout = BlockLayout(TOKENS, 8, BLOCK_BYTES // 8)
        self.space = NamespaceId(secrets.token_bytes(32)) if space is None else space
        declared = Declared(self.space, layout, label="bench")
        self.namespace: RemoteNamespace = client.namespace(declared)
        ring = np.random.default_rng(1).integers(0, 256, (RING_BLOCKS, BLOCK_BYTES), np.uint8)
        self.rows: list[ByteArray] = [ring[number % RING_BLOCKS] for number in range(blocks)]
        into = np.ones((RING_BLOCKS, BLOCK_BYTES), np.uint8)
        self.into: list[ByteArray] = [into[number % RING_BLOCKS] for number in range(blocks)]

    def chain(self, number: int) -> Chain:
        chain = Chain(self.space, TOKENS)
        chain.extend(prompt(number, self.blocks * TOKENS))
        return chain

    def put(self, number: int) -> float:
        """Seconds to put prompt `number`, of which nothing is stored."""
        chain = self.chain(number)
        result = None

        def work() -> None:
            nonlocal result
            result = self.namespace.put(chain, self.rows)

        seconds = timed(work)
        if result is None or not result.all_stored:
            raise RuntimeError(f"put: {result.reason if result else 'nothing'}")
        return seconds

    def get(self, chain: Chain) -> float:
        """Seconds to get all of it, compared by checksum on the way."""
        found = 0

        def work() -> None:
            nonlocal found
            found = self.namespace.get(chain, self.into).blocks

        seconds = timed(work)
        if found != self.blocks or not np.array_equal(self.into[-1], self.rows[-1]):
            raise RuntimeError(f"get: {found} of {self.blocks} blocks came, or others")
        return seconds


@contextlib.contextmanager
def daemon_for(context: Context, name: str) -> Iterator[DaemonProcess]:
    """Enough shared memory for 1 GiB of blocks; less under --quick."""
    settings = {**SETTINGS, "host.bytes": "512MiB"} if context.is_quick else SETTINGS
    with DaemonProcess(context.folder(name), settings) as daemon:
        yield daemon


def _measure(context: Context) -> Iterable[Reading]:
    blocks = context.several(512, 64)
    count = context.several(*SAMPLES)
    chunks = blocks * BLOCK_BYTES // CHUNK_BYTES
    with daemon_for(context, "bulk") as daemon, Gateway(daemon) as gateway, BareStream() as bare:
        client = gateway.client()
        remote = Remote(client, blocks)
        if context.wants(PUT.name):
            context.step(f"put {blocks} blocks, {count} pairs")
            found = pairs(count, lambda turn: bare.put(chunks), lambda turn: remote.put(turn))
            yield _throughput(PUT.name, found, blocks)
        remote.put(1000)
        chain = remote.chain(1000)
        if context.wants(GET.name):
            context.step(f"get {blocks} blocks, {count} pairs")
            found = pairs(count, lambda turn: bare.get(chunks), lambda turn: remote.get(chain))
            yield _throughput(GET.name, found, blocks)
        if context.wants(SMALL.name):
            yield _small(context, remote, chain)
        if context.wants(TLS.name):
            certificates = Certificates(context.folder("certificates"))
            with Gateway(daemon, certificates.settings) as safe:
                secret = Remote(safe.client(certificates.client), blocks, remote.space)
                context.step("get, mutual TLS against plain")
                found = pairs(count, lambda turn: remote.get(chain), lambda turn: secret.get(chain))
            yield _throughput(TLS.name, found, blocks, "without TLS")
        client.close()


def _throughput(name: str, found: Pairs, blocks: int, plain: str = "bare stream") -> Reading:
    """Bytes a second, so that more is better."""
    ratios = [base / ours for base, ours in zip(found.plain, found.measured, strict=True)]
    size = blocks * BLOCK_BYTES
    ours, base = float(np.median(found.measured)), float(np.median(found.plain))
    return Reading(
        name,
        float(np.median(ratios)),
        f"{spread(ratios)} of {len(ratios)} pairs; {size / MIB:g} MiB in 2 MiB blocks: "
        f"{size / ours / 1e9:.3g} GB/s ÷ {size / base / 1e9:.3g} GB/s ({plain})",
    )


def _small(context: Context, remote: Remote, chain: Chain) -> Reading:
    context.step("one block at a time")
    one = [remote.into[0]]
    samples: list[float] = []
    for turn in range(context.several(400, 100)):
        at = turn % remote.blocks
        samples.append(timed(lambda at=at: remote.namespace.get(chain, one, start=at)) * 1e3)
    p95 = float(np.percentile(samples, 95))
    note = f"{spread(samples)}, p95 {p95:.3g} of {len(samples)}; one 2 MiB block, loopback TCP"
    return Reading(SMALL.name, float(np.median(samples)), note)


PART = Part("one client", (GET, PUT, SMALL, TLS), _measure)
