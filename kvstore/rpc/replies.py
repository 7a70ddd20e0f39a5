"""Answers of the control API, packed from what the store says.

Primitives: `pack_group`, `offsets_of`, `pack_plan`, `announce`, `namespace_reply`. Pure
translation; decides nothing.
"""

from __future__ import annotations

import numpy as np

from kvstore.matching import GroupMatch
from kvstore.namespaces import Namespace
from kvstore.planner import Plan
from kvstore.promotion import LoadStream
from kvstore.rpc import control_pb2 as pb
from kvstore.rpc import wire
from kvstore.store import READY, Store
from kvstore.types import IntArray, Tier, UIntArray

_NO_OFFSETS = np.uint64(wire.NO_OFFSET)


def pack_group(store: Store, group: GroupMatch) -> pb.GroupMatch:
    """Offsets and generations of what is in host (READY, or being promoted); tiers as they are
    now.
    """
    rows = group.rows
    columns, host = store.catalog, store.host_tier
    reply = pb.GroupMatch(blocks=group.blocks, first=group.first)
    ready = columns.host_state[rows] == READY
    slots = columns.host_slot[rows]
    offsets = np.full(len(rows), _NO_OFFSETS, np.uint64)
    generations = np.zeros(len(rows), np.uint64)
    with_slot = slots >= 0
    if with_slot.any():
        offsets[with_slot] = host.pool.offsets_of(slots[with_slot])
        generations[with_slot] = host.generations(slots[with_slot])
    reply.offsets = offsets.tobytes()
    reply.generations = generations.tobytes()
    reply.tiers = np.where(ready, Tier.HOST, Tier.NVME).astype(np.uint8).tobytes()
    return reply


def offsets_of(store: Store, slots: IntArray) -> UIntArray:
    offsets = np.full(len(slots), _NO_OFFSETS, np.uint64)
    granted = slots >= 0
    if granted.any():
        offsets[granted] = store.host_tier.pool.offsets_of(slots[granted])
    return offsets


def announce(stream: LoadStream) -> pb.LoadReply:
    """What became readable, or failed, since the last message."""
    ready, failed = stream.take()
    lost = [(group, 0, block) for group, block in failed]
    return pb.LoadReply(
        ready=np.array(ready, wire.READY).tobytes(),
        failed=np.array(lost, wire.READY).tobytes(),
    )


def pack_plan(made: Plan) -> pb.Plan:
    return pb.Plan(
        first=made.first,
        last=made.last,
        from_back=made.from_back,
        in_layers=made.in_layers,
        ttft_seconds=made.ttft_seconds,
        recompute_seconds=made.recompute_seconds,
        begin_seconds=made.begin_seconds,
        load_seconds=made.load_seconds,
        saved_seconds=made.saved_seconds,
        seconds_per_call=made.call_seconds,
        seconds_per_token=made.prefill.seconds_per_token,
        seconds_per_token_position=made.prefill.seconds_per_token_position,
    )


def namespace_reply(namespace: Namespace) -> pb.NamespaceReply:
    layout = namespace.layout
    return pb.NamespaceReply(
        namespace=namespace.id,
        index=namespace.index,
        kind=namespace.kind,
        layout=pb.Layout(
            block_tokens=layout.block_tokens,
            layers=layout.layers,
            layer_bytes=layout.layer_bytes,
            ranks=layout.ranks,
        ),
        window_tokens=namespace.window_tokens,
        label=namespace.label,
        clear_count=namespace.clear_count,
        slot_bytes=namespace.slot_bytes,
    )
