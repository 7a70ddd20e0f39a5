"""vLLM's paged tensors as planes: every layout it knows, element by element; and what is refused.

Field cases GPU-14, 15, VLLM-13, 17.
"""

from __future__ import annotations

import ctypes
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from engine_adapter.refusal import Refused
from engine_adapter.vllm_hold import WAIT_SECONDS, HeldBlocks
from engine_adapter.vllm_identity import group_facts, refuse_unsupported
from engine_adapter.vllm_orders import BlockOrder, Lane
from engine_adapter.vllm_settings import Settings
from engine_adapter.vllm_target import content_order, planes_for
from engine_adapter.vllm_worker import WorkerSide
from kvstore.layout import BlockLayout
from kvstore.types import NamespaceId
from tests.sim.vllm_lives import Pool

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
LAYERS, BLOCKS, CONTENT = 3, 5, 6


def tensors(layout: str, blocks: int, heads: int, tokens: int) -> list[Any]:
    """A layer each: uint16 [blocks, heads, tokens, content], every element another one."""
    sizes = dict(zip("LBHNC", (LAYERS, blocks, heads, tokens, CONTENT), strict=True))
    memory = np.arange(np.prod(list(sizes.values())), dtype=np.uint16)
    whole = memory.reshape([sizes[axis] for axis in layout])
    return list(whole.transpose([layout.index(axis) for axis in "LBHNC"]))


def bytes_of(planes: Any, block: int) -> bytes:
    """As a slot holds them."""
    rows = [
        ctypes.string_at(
            p.address + block * p.block_stride_bytes + r * p.row_stride_bytes, p.row_bytes
        )
        for p in planes
        for r in range(p.rows)
    ]
    return b"".join(rows)


def planes(kv: Any, layout: str, blocks: int = BLOCKS) -> Any:
    return planes_for("kv", kv.ctypes.data, kv.shape, kv.strides, kv.itemsize, blocks, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("tokens", [1, 16])
def test_a_slot_holds_a_block_in_the_layouts_order(layout: str, heads: int, tokens: int) -> None:
    order = (0, 1, 2) if content_order(layout) == "HNC" else (1, 0, 2)
    for kv in tensors(layout, BLOCKS, heads, tokens):
        found = planes(kv, layout)
        for block in range(BLOCKS):
            assert bytes_of(found, block) == kv[block].transpose(order).tobytes()


def test_a_block_is_one_piece_where_it_lies_in_one() -> None:
    for layout in ("LBHNC", "LBNHC", "BLHNC", "BLNHC"):
        for kv in tensors(layout, BLOCKS, 2, 16):
            (plane,) = planes(kv, layout)
            assert plane.rows == 1


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_what_kernels_split_a_block_into_does_not_show(layout: str) -> None:
    heads, tokens, split = 2, 8, 4
    whole = tensors(layout, BLOCKS, heads, tokens)[0]
    seen = tensors(layout, BLOCKS * split, heads, tokens // split)[0]
    for block in range(BLOCKS):
        parts = whole[block].reshape(heads, split, tokens // split, CONTENT)
        seen[block * split : (block + 1) * split] = parts.swapaxes(0, 1)
    for block in range(BLOCKS):
        assert bytes_of(planes(seen, layout), block) == bytes_of(planes(whole, layout), block)


def test_strides_that_are_not_the_layouts_are_refused() -> None:
    kv = tensors("LBHNC", BLOCKS, 2, 16)[0]
    with pytest.raises(Refused, match="LBNHC"):
        planes(kv, "LBNHC")
    with pytest.raises(Refused, match="blocks"):
        planes(kv, "LBHNC", blocks=4)
    for unknown in ("2LBNHC", "LBCNH", "NHD"):
        with pytest.raises(Refused, match=unknown):
            content_order(unknown)


def config(**changes: Any) -> Any:
    parallel = {
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "use_ubatching": False,
    }
    given = {key: changes.pop(key) for key in list(changes) if key in parallel}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**parallel, **given}),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto")),
        model_config=SimpleNamespace(enable_sleep_mode=changes.get("sleep", False)),
        speculative_config=None,
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"cache_dtype": "int8_per_token_head"}, "int8_per_token_head"),
        ({"cache_dtype": "nvfp4"}, "nvfp4"),
        ({"use_ubatching": True}, "DBO"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"prefill_context_parallel_size": 2}, "prefill context"),
        ({"sleep": True}, "sleep"),
    ],
)
def test_what_cannot_work_is_refused_by_name(change: Any, word: str) -> None:
    refuse_unsupported(config(), "cuda", is_known=True)
    with pytest.raises(Refused, match=word):
        refuse_unsupported(config(**change), "cuda", is_known=True)
    with pytest.raises(Refused, match="rocm"):
        refuse_unsupported(config(), "rocm", is_known=False)
    mamba = SimpleNamespace(kv_cache_spec=SimpleNamespace(), layer_names=["one"])
    with pytest.raises(Refused, match="SimpleNamespace"):
        group_facts(0, mamba)


def test_kv_on_an_unknown_kind_of_device_is_refused_by_name() -> None:
    place = namedtuple("place", "type")
    lane = Lane(0, 0, NamespaceId(bytes(32)), BlockLayout(16, 2, 4096), 0, ("one", "two"))
    worker = WorkerSide(mock.MagicMock(), [lane], 0, Settings())
    with pytest.raises(Refused, match="two"):
        worker.register({"one": SimpleNamespace(device=place("cpu"))}, 8, "LBHNC")
    for kinds in (("xpu", "xpu"), ("cuda", "cpu")):
        caches = {
            name: SimpleNamespace(device=place(kind))
            for name, kind in zip(("one", "two"), kinds, strict=True)
        }
        with pytest.raises(Refused, match=kinds[0]):
            worker.register(caches, 8, "LBHNC")


def test_held_blocks_are_free_when_their_save_and_their_request_ended() -> None:
    pool = Pool(4)
    pool.touch(pool.blocks)
    now = [5.0]
    held = HeldBlocks(pool, lambda: now[0])
    order = BlockOrder(0, NamespaceId(bytes(32)), bytes(32), bytes(64), [1, 3], number=7)
    held.take([order])
    assert [block.ref_cnt for block in pool.blocks] == [1, 2, 1, 2]
    assert held
    assert not held.will_free
    pool.blocks[3].ref_cnt -= 1  # the request was preempted
    assert held.will_free
    now[0] += WAIT_SECONDS * 2
    assert not held.will_free, "nobody waits for a save that hangs"
    held.take([replace(order, number=9)])
    assert not held.will_free, "nor for those behind it"
    held.release([9])
    held.release([7, 8])
    assert [block.ref_cnt for block in pool.blocks] == [1, 1, 1, 0]
    assert not held
