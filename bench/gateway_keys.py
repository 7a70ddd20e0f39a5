"""Long lists of keys: 150,000 of them asked for, and listed. Primitive: `PART`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable

import numpy as np

from bench.daemons import DaemonProcess
from bench.gateways import Gateway
from bench.harness import Bar, Context, Part, Reading
from kvstore.client import KVClient, RawNames
from kvstore.layout import BlockLayout
from kvstore.types import FINGERPRINT_BYTES, BlockStatus, NamespaceId, NamespaceKind

KEYS = 150_000
BLOCK_BYTES = 4096
BATCH = 2048
SETTINGS = {"host.bytes": "1GiB", "host.slot_bytes_min": "4KiB", "nvme.enabled": "false"}

BAR = Bar("keys_150k_seconds", "s", at_most=5.0)


def _measure(context: Context) -> Iterable[Reading]:
    keys = context.several(KEYS, KEYS // 10)
    space = NamespaceId(secrets.token_bytes(FINGERPRINT_BYTES))
    joined = np.random.default_rng(2).bytes(keys * FINGERPRINT_BYTES)
    with DaemonProcess(context.folder("keys"), SETTINGS) as daemon, Gateway(daemon) as gateway:
        context.step(f"store {keys} keys")
        _store(daemon, space, joined)
        with gateway.client() as client:
            namespace = client.namespace(space)
            context.step("ask for all, list all")
            start = time.perf_counter()
            found = namespace.exists(RawNames(space, joined))
            asked = time.perf_counter()
            listed = sum(len(page.tiers) for page in namespace.list_all())
            end = time.perf_counter()
    if found.prefix_blocks != keys or listed != keys:
        raise RuntimeError(f"{found.prefix_blocks} found and {listed} listed of {keys} keys")
    note = f"Exists {asked - start:.3g} s, ls {end - asked:.3g} s; {keys} keys"
    yield Reading(BAR.name, max(asked - start, end - asked), note)


def _store(daemon: DaemonProcess, space: NamespaceId, joined: bytes) -> None:
    blocks = np.zeros((BATCH, BLOCK_BYTES), np.uint8)
    with KVClient(daemon.socket, engine="bench", deadline_seconds=30.0) as client:
        client.wait_connected(10.0)
        handle = client.namespace(space, BlockLayout(1, 1, BLOCK_BYTES), kind=NamespaceKind.FLAT)
        step = BATCH * FINGERPRINT_BYTES
        for at in range(0, len(joined), step):
            names = RawNames(space, joined[at : at + step])
            statuses = handle.store(names, blocks[: len(names)]).result(60.0)
            if set(statuses) - {BlockStatus.STORED, BlockStatus.PRESENT}:
                raise RuntimeError(f"store: {set(statuses)}")


PART = Part("long lists of keys", (BAR,), _measure)
