"""vLLM's paged KV on a device, as the transfer engine addresses it.

Primitives:
  `content_order`   what a layout's name says about the inside of a block
  `planes_for`      one layer's tensor, checked against what the layout declares
  `target_of`       one lane
  `prove_target`    loads a pattern and reads it through the tensors: they mean the same bytes

vLLM's tensors are [blocks, heads, tokens, content] whatever the memory's order is; strides tell
where things lie, the layout's name (a permutation of L, B, H, N, C) in which order a slot holds
them. Slots of layouts that differ in where layers and blocks lie are equal. A kernel may see a
block as several smaller ones; a slot does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from engine_adapter.device_transfer import DeviceTransfers
from engine_adapter.refusal import Refused
from engine_adapter.transfer import LoadPlan, PagedTarget, Plane, planes_of
from engine_adapter.vllm_orders import Lane
from kvstore.client.inplace import Span
from kvstore.errors import InvalidRequest
from kvstore.planner import Plan
from kvstore.types import ByteArray, IntArray, UIntArray

AXES = ("block", "split", "head", "token", "content")
"""Of a tensor whose first dimension was cut into blocks and what kernels split them into."""
ORDERS: Mapping[str, tuple[str, ...]] = {
    "HNC": ("block", "head", "split", "token", "content"),
    "NHC": ("block", "split", "token", "head", "content"),
}
"""In a slot."""
PROOF_BLOCK = 1
"""Never block 0, which the engine keeps as a place holder."""
PROOF_SECONDS = 30.0


def content_order(layout: str) -> str:
    """ "HNC" or "NHC". Raises Refused for names that are not known."""
    order = layout.replace("L", "").replace("B", "")
    if order not in ORDERS or sorted(layout) != sorted("LBHNC"):
        raise Refused(
            f"KV cache layout {layout!r}: kvstore knows permutations of LBHNC with C last"
        )
    return order


def planes_for(
    name: str,
    address: int,
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    item_bytes: int,
    blocks: int,
    layout: str,
) -> tuple[Plane, ...]:
    """`shape`, `strides_bytes`: of [blocks or a multiple of it, heads, tokens, content].

    Raises Refused when they do not fit the layout."""
    order = content_order(layout)
    if len(shape) != 4 or shape[0] % blocks or strides_bytes[3] != item_bytes:
        raise Refused(
            f"{name}: KV of shape {list(shape)} and byte strides {list(strides_bytes)} is not "
            f"{blocks} blocks of [heads, tokens, content]"
        )
    split = shape[0] // blocks
    sizes = dict(zip(AXES, (blocks, split, *shape[1:]), strict=True))
    by_axis = (split * strides_bytes[0], *strides_bytes)
    strides = dict(zip(AXES, by_axis, strict=True))
    inner, outer = ("token", "head") if order == "HNC" else ("head", "token")
    if sizes[inner] > 1 and sizes[outer] > 1 and strides[outer] < sizes[inner] * strides[inner]:
        raise Refused(
            f"{name}: byte strides {list(strides_bytes)} are not those of the layout {layout}"
        )
    names = ORDERS[order]
    ordered = [sizes[axis] for axis in names], [strides[axis] for axis in names]
    return planes_of(address, *ordered, ",".join(names), item_bytes)


def target_of(lane: Lane, caches: Mapping[str, Any], blocks: int, layout: str) -> PagedTarget:
    """Over torch tensors by layer name. Raises Refused."""
    planes: list[tuple[Plane, ...]] = []
    for name in lane.layer_names:
        kv, item = caches[name], caches[name].element_size()
        strides = [item * stride for stride in kv.stride()]
        planes.append(planes_for(name, kv.data_ptr(), kv.shape, strides, item, blocks, layout))
    owner = [caches[name] for name in lane.layer_names]
    try:
        return PagedTarget(lane.layout, tuple(planes), blocks, owner=owner)
    except InvalidRequest as error:
        raise Refused(f"KV group {lane.group}: {error}; padded blocks cannot be moved") from error


class _Pattern:
    """One block in this process' memory, in place: an `InPlace`."""

    reason = ""
    blocks = whole = whole_at_end = 1
    plan: Plan | None = None

    def __init__(self, slot: ByteArray) -> None:
        self._slot = slot
        self.tiers = np.ones(1, np.uint8)
        self.readable = np.full(1, 0xFF, np.uint8)

    def need_from(self, block: int) -> None:
        """All of it is here."""

    def arrivals(self, deadline_seconds: float) -> Iterator[None]:
        yield

    def is_readable(self, part: int, first: int, stop: int) -> bool:
        return True

    def spans(self, first: int, stop: int) -> Iterator[Span]:
        yield Span(0, self._slot[np.newaxis])

    def addresses(self, blocks: IntArray) -> UIntArray:
        return np.full(len(blocks), self._slot.ctypes.data, np.uint64)

    def valid(self) -> bool:
        return True

    def end(self, used: int) -> None:
        """It is nobody's."""


def prove_target(
    transfers: DeviceTransfers,
    target: PagedTarget,
    tensors: Sequence[Any],
    layout: str,
    stream: int,
) -> None:
    """Load a pattern into a block and read it through torch, on the thread whose stream this is.
    Raises Refused unless it is the same. Leaves the block as it was."""
    import torch

    block = min(PROOF_BLOCK, target.blocks - 1)
    axes = [AXES[1:].index(axis) for axis in ORDERS[content_order(layout)][1:]]
    views = [kv.unflatten(0, (target.blocks, -1))[block] for kv in tensors]
    before = [view.clone() for view in views]
    slot = (np.arange(target.layout.slot_bytes) * 131 % 251).astype(np.uint8)
    load = transfers.start_load(
        LoadPlan(target, _Pattern(slot), np.array([block]), 0, PROOF_SECONDS), stream
    )
    is_same = load.wait_ended(PROOF_SECONDS) and load.confirm() == ""
    for layer, view in enumerate(views):
        at = target.layout.layer_offset(target.rank, layer)
        found = view.permute(axes).contiguous().view(torch.uint8).cpu().numpy().reshape(-1)
        is_same = is_same and np.array_equal(found, slot[at : at + len(found)])
    for view, bytes_before in zip(views, before, strict=True):
        view.copy_(bytes_before)
    if not is_same:
        raise Refused("a block's bytes are not where the engine's tensors say")
