"""Block layouts: parts cover every byte once, start on pages, and stay few."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.layout import BlockLayout, align_up
from kvstore.types import PAGE_BYTES, PARTS_MAX

layouts = st.builds(
    BlockLayout,
    block_tokens=st.integers(1, 512),
    layers=st.integers(1, 96),
    layer_bytes=st.one_of(
        st.integers(1, 20_000),
        st.integers(1, 100).map(lambda sectors: sectors * 512),
        st.integers(1, 40).map(lambda pages: pages * PAGE_BYTES),
    ),
    ranks=st.integers(1, 20),
)


@settings(max_examples=100, deadline=None)
@given(layouts)
def test_parts_cover_every_payload_byte_once(layout):
    for before, part in pairwise(layout.parts):
        gap = part.offset - before.offset - before.length
        is_next_rank = part.rank != before.rank
        assert gap == is_next_rank * (layout.rank_stride_bytes - layout.rank_payload_bytes)
    assert [part.index for part in layout.parts] == list(range(len(layout.parts)))
    assert layout.parts[0].offset == 0
    last = layout.parts[-1]
    assert last.offset + last.length == layout.block_bytes <= layout.slot_bytes


@settings(max_examples=60, deadline=None)
@given(layouts)
def test_parts_are_few_and_start_on_pages(layout):
    parts = layout.parts
    assert 1 <= len(parts) <= PARTS_MAX
    assert all(part.offset % PAGE_BYTES == 0 for part in parts)
    assert all(part.length > 0 and part.layer_count > 0 for part in parts)


@settings(max_examples=60, deadline=None)
@given(layouts)
def test_parts_hold_whole_layers_of_one_rank(layout):
    if layout.ranks > PARTS_MAX:
        return
    layers = {rank: [] for rank in range(layout.ranks)}
    for part in layout.parts:
        assert part.offset == layout.layer_offset(part.rank, part.layer_first)
        assert part.length == part.layer_count * layout.layer_bytes
        layers[part.rank] += range(part.layer_first, part.layer_first + part.layer_count)
    assert all(found == list(range(layout.layers)) for found in layers.values())


@settings(max_examples=60, deadline=None)
@given(layouts)
def test_sizes_follow_from_ranks_on_pages(layout):
    stride = align_up(layout.layers * layout.layer_bytes, PAGE_BYTES)
    assert layout.rank_stride_bytes == stride
    assert layout.slot_bytes == layout.ranks * stride
    assert [layout.rank_offset(rank) for rank in range(layout.ranks)] == [
        rank * stride for rank in range(layout.ranks)
    ]
    assert layout.slot_bytes - layout.block_bytes == stride - layout.rank_payload_bytes


def test_aligned_layers_are_cut_finely_and_ragged_ones_not_at_all():
    assert len(BlockLayout(16, 32, 4 * PAGE_BYTES).parts) == PARTS_MAX
    assert len(BlockLayout(16, 32, PAGE_BYTES // 4).parts) == 8
    assert len(BlockLayout(16, 3, 5000).parts) == 1
    assert len(BlockLayout(16, 32, 4 * PAGE_BYTES, ranks=2).parts) == 8
    assert len(BlockLayout(16, 32, 4 * PAGE_BYTES, ranks=9).parts) == 5


def test_layouts_are_equal_exactly_when_all_sizes_are():
    one = BlockLayout(16, 4, 4096, 2)
    assert one == BlockLayout(16, 4, 4096, 2)
    others = [(8, 4, 4096, 2), (16, 8, 4096, 2), (16, 4, 8192, 2), (16, 4, 4096, 1)]
    assert all(one != BlockLayout(*sizes) for sizes in others)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("block_tokens", (0, 1, 1, 1)),
        ("block_tokens", (65537, 1, 1, 1)),
        ("layers", (1, 0, 1, 1)),
        ("layers", (1, 4097, 1, 1)),
        ("layer_bytes", (1, 1, 0, 1)),
        ("layer_bytes", (1, 1, (1 << 30) + 1, 1)),
        ("ranks", (1, 1, 1, 0)),
        ("ranks", (1, 1, 1, 65)),
        ("block of", (1, 2, 1 << 30, 1)),
    ],
)
def test_sizes_have_bounds(name, sizes):
    with pytest.raises(InvalidRequest, match=name):
        BlockLayout(*sizes)


def test_there_are_no_other_ranks_and_layers():
    layout = BlockLayout(16, 4, 4096, 2)
    for call in (lambda: layout.rank_offset(2), lambda: layout.rank_offset(-1)):
        with pytest.raises(InvalidRequest, match="rank"):
            call()
    for layer in (4, -1):
        with pytest.raises(InvalidRequest, match="layer"):
            layout.layer_offset(0, layer)
