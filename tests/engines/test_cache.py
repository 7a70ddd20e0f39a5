"""The cache alone: what attention is shown, and what a saver may rely on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.kit import torch, transformers

HEADS, SIZE = 2, 4


def states(tokens: int, batch: int = 1, seed: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed * 1000 + tokens)
    shape = (batch, HEADS, tokens, SIZE)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def layer_of(window: int | None = None, capacity: int = 8) -> Any:
    from engine_adapter.transformers_cache import KVLayer

    return KVLayer(window, capacity)


def refusal() -> type[Exception]:
    from engine_adapter.transformers import Refused

    return Refused


@pytest.mark.parametrize("window", [None, 2, 5, 8])
@pytest.mark.parametrize("steps", [(1,) * 12, (5, 1, 1, 6), (3, 4, 5), (12,)], ids=str)
def test_attention_is_shown_what_the_stock_layer_shows(
    window: int | None, steps: tuple[int, ...]
) -> None:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    stock = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    own = layer_of(window)
    for seed, step in enumerate(steps):
        keys, values = states(step, seed=seed)
        assert own.get_mask_sizes(step) == stock.get_mask_sizes(step)
        for shown, expected in zip(
            own.update(keys, values), stock.update(keys, values), strict=True
        ):
            assert torch.equal(shown, expected)
        assert own.get_seq_length() == stock.get_seq_length()


def test_every_token_is_kept_though_the_window_moves_on() -> None:
    layer = layer_of(window=3, capacity=2)
    given = [states(step, seed=step) for step in (2, 5, 1)]
    for keys, values in given:
        layer.update(keys, values)
    assert torch.equal(layer.keys, torch.cat([keys for keys, _ in given], dim=2))
    assert torch.equal(layer.values, torch.cat([values for _, values in given], dim=2))


@pytest.mark.parametrize("change", ["crop", "grow", "reorder", "reset"])
def test_columns_of_a_saver_stay_what_they_were(change: str) -> None:
    layer = layer_of(capacity=6)
    layer.update(*states(4))
    held = layer.buffers()
    before = held.keys[:, :, :4].copy(), held.values[:, :, :4].copy()
    layer.share()
    if change == "crop":
        layer.crop(-2)
    elif change == "reorder":
        layer.reorder_cache(torch.tensor([0]))
    elif change == "reset":
        layer.reset()
    layer.update(*states(5, seed=1))
    layer.update(*states(1, seed=2))
    assert (held.keys[:, :, :4] == before[0]).all()
    assert (held.values[:, :, :4] == before[1]).all()


def test_appending_does_not_copy_what_a_saver_reads() -> None:
    layer = layer_of(capacity=6)
    layer.update(*states(4))
    held = layer.buffers()
    layer.share()
    layer.update(*states(1, seed=1))
    assert layer.buffers().keys.ctypes.data == held.keys.ctypes.data


def test_rows_can_be_chosen_and_repeated() -> None:
    layer = layer_of()
    keys, values = states(3, batch=2)
    layer.update(keys, values)
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.keys, keys.repeat_interleave(2, dim=0))
    layer.batch_select_indices(torch.tensor([3, 0]))
    assert torch.equal(layer.values, values[[1, 0]])
    assert layer.batch_size == 2


@pytest.mark.parametrize(
    "other",
    [states(1, batch=2), tuple(state.double() for state in states(1))],
    ids=["batch", "dtype"],
)
def test_states_of_another_kind_are_refused(other: tuple[Any, Any]) -> None:
    layer = layer_of()
    layer.update(*states(3))
    with pytest.raises(refusal(), match="start without it"):
        layer.update(*other)
    assert layer.tokens == 3


def test_a_restored_window_cannot_be_cropped_away() -> None:
    from engine_adapter.transformers_cache import ModelShape

    layer = layer_of(window=4)
    layer.prepare(ModelShape((4,), HEADS, SIZE, SIZE, torch.float32), 1, 10, [0])
    layer.update(*states(3))
    layer.crop(-3)
    with pytest.raises(RuntimeError, match="restored from token 7"):
        layer.crop(-1)


def test_padding_of_a_restored_layer_is_zero() -> None:
    from engine_adapter.transformers_cache import KVCache, ModelShape

    shape = ModelShape((None, 4), HEADS, SIZE, SIZE, torch.float32)
    cache = KVCache(shape.windows, 20)
    cache.restore(shape, 2, 10, [3, 15])
    for layer in cache.buffers():
        for buffer in (layer.keys, layer.values):
            assert not buffer[0, :, :3].any()
            assert not buffer[1, :, :10].any()


def test_only_whole_chunks_in_a_row_are_exact() -> None:
    from engine_adapter.transformers_cache import KVCache

    for steps, exact in (((4, 4, 2), 8), ((4, 2, 4), 4), ((8,), 0), ((3, 4), 0), ((4, 1, 4), 4)):
        cache = KVCache([None], 20, chunk=4)
        for step in steps:
            cache.update(*states(step), 0)
        assert cache.exact_tokens == exact, steps


def test_what_transformers_asks_of_a_cache() -> None:
    from engine_adapter.transformers_cache import KVCache

    cache = KVCache([None, 4], 8)
    assert isinstance(cache, transformers.Cache)
    assert cache.is_sliding == [False, True]
    assert not cache.is_compileable
    assert cache.is_croppable
    assert cache.get_max_length() == -1
    assert cache.get_seq_length() == 0
    for layer in range(2):
        cache.update(*states(3), layer)
    cache.crop(-1)
    assert cache.get_seq_length() == 2
    cache.reset()
    assert cache.get_seq_length() == 0
