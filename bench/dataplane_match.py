"""Looking up 10,240 tokens: through the directory, and by a `Match` call with a lease.

Directory: milliseconds for tokens → fingerprints → lookup, all blocks hit, no call made.
RPC: (fingerprints + Match + release in the background) ÷ (fingerprints + an echo call of equal
sizes on a bare gRPC server), taken in one loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from bench.daemons import DaemonProcess
from bench.dataplane_common import Space, space_on
from bench.echo_server import EchoServer
from bench.harness import Bar, Context, Part, Reading, pairs, spread, timed
from kvstore.rpc import control_pb2 as pb
from kvstore.types import FINGERPRINT_BYTES

TOKENS = 10_240
PAYLOAD_BYTES = 4096
PROMPTS = 8
"""Looked up in turn, so that neither tokens nor directory entries lie in a core's own cache."""
PEER = {40: "peer 1.95 ms by ZMQ, 4.8 by gRPC", 640: "no peer figure at 16 tokens a block"}


def measure(context: Context) -> Iterator[Reading]:
    """One daemon, two block sizes."""
    settings = {"nvme.enabled": "false"}
    with ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(context.folder("match"), settings))
        echo = stack.enter_context(EchoServer())
        for blocks in (40, 640):
            names = f"dir_match_{blocks}_blocks_ms", f"rpc_match_{blocks}_blocks_vs_floor"
            if not any(map(context.wants, names)):
                continue
            with space_on(daemon.socket, TOKENS // blocks, PAYLOAD_BYTES) as space:
                for number in range(PROMPTS):
                    space.store(space.chain(number, blocks))
                if context.wants(names[0]):
                    yield _directory(context, names[0], space, blocks)
                if context.wants(names[1]):
                    yield _rpc(context, names[1], space, blocks, echo)


def _directory(context: Context, name: str, space: Space, blocks: int) -> Reading:
    prompts = [space.tokens(number, blocks) for number in range(PROMPTS)]
    handle = space.handle
    matching: list[float] = []
    hashing: list[float] = []
    for turn in range(context.several(600, 60)):
        tokens = prompts[turn % PROMPTS]
        start = time.perf_counter()
        hits = handle.match(handle.chain(tokens))
        matching.append((time.perf_counter() - start) * 1e3)
        if hits != blocks:
            raise RuntimeError(f"match found {hits} of {blocks} blocks")
        start = time.perf_counter()
        handle.chain(tokens)
        hashing.append((time.perf_counter() - start) * 1e3)
    p95 = float(np.percentile(matching, 95))
    note = (
        f"{spread(matching)}, p95 {p95:.3g} of {len(matching)}; hashing alone "
        f"{np.median(hashing):.3g} ms; {PEER[blocks]}"
    )
    return Reading(name, float(np.median(matching)), note)


def _rpc(context: Context, name: str, space: Space, blocks: int, echo: EchoServer) -> Reading:
    prompts = [space.tokens(number, blocks) for number in range(PROMPTS)]
    handle = space.handle
    request, reply = _message_sizes(blocks)
    call = echo.call(request, reply)

    def floor(turn: int) -> float:
        tokens = prompts[turn % PROMPTS]
        return timed(lambda: (handle.chain(tokens), call()))

    def match(turn: int) -> float:
        tokens = prompts[turn % PROMPTS]
        start = time.perf_counter()
        lease = handle.lease(handle.chain(tokens))
        lease.release()
        seconds = time.perf_counter() - start
        if lease.blocks != blocks:
            raise RuntimeError(f"lease covers {lease.blocks} of {blocks} blocks: {lease.reason}")
        return seconds

    seen = pairs(context.several(400, 40), floor, match, warm_up=20)
    return Reading(
        name,
        seen.ratio,
        seen.note(f"fingerprints + gRPC echo of {request} B, answered with {reply} B"),
    )


def _message_sizes(blocks: int) -> tuple[int, int]:
    """Bytes of a `Match` request and of its reply when every block hits."""
    word = (1 << 62) + 1
    request = pb.MatchRequest(
        client=word,
        groups=[pb.Group(namespace=bytes(32), fingerprints=bytes(FINGERPRINT_BYTES * blocks))],
        prompt_tokens=TOKENS,
        deadline_ms=2000,
        want_lease=True,
    )
    group = pb.GroupMatch(
        blocks=blocks, offsets=bytes(8 * blocks), generations=bytes(8 * blocks), tiers=bytes(blocks)
    )
    reply = pb.MatchReply(
        boundary_tokens=TOKENS, lease=word, lease_seconds=10.0, groups=[group], boot_id=word
    )
    return request.ByteSize(), reply.ByteSize()


PART = Part(
    "lookup of 10,240 tokens",
    (
        Bar("dir_match_40_blocks_ms", "ms", at_most=0.35),
        Bar("dir_match_640_blocks_ms", "ms", at_most=1.0),
        Bar("rpc_match_40_blocks_vs_floor", "x", at_most=1.5),
        Bar("rpc_match_640_blocks_vs_floor", "x", at_most=1.6),
    ),
    measure,
)
