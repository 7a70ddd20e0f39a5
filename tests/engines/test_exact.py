"""Restored prefixes give the logits of a run that computed everything, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engines.kit import (
    BLOCK,
    WINDOW,
    gemma,
    llama,
    plain,
    prompt,
    put_instead,
    run,
    settled,
    torch,
)

Attach = Callable[..., Any]
MODELS = [llama, gemma]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_hits_equal_the_uncached_run_however_often(
    attach: Attach, model: Callable[..., Any], dtype: Any
) -> None:
    attached = attach(model(dtype))
    ids = prompt(5 * BLOCK + 3)
    expected = plain(attached, ids)
    assert run(attached.model, ids).differs(expected) == 0
    assert attached.last.hit_tokens == 0
    settled(attached)
    for _ in range(3):
        assert run(attached.model, ids).differs(expected) == 0
        assert attached.last.host_tokens == 5 * BLOCK
    assert attached.statistics().saved_blocks == 5


@pytest.mark.parametrize("model", MODELS)
def test_a_miss_equals_the_stock_cache(attach: Attach, model: Callable[..., Any]) -> None:
    attached = attach(model(), exact=False)
    ids = prompt(3 * BLOCK + 5)
    one_shot = plain(attached, ids, prefill_chunk_size=None)
    assert run(attached.model, ids).differs(one_shot) == 0
    assert attached.last.plain_reason == ""


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_prefixes_of_every_length_go_on(attach: Attach, length: int, new: int) -> None:
    attached = attach(llama())
    ids = prompt(length + new)
    run(attached.model, ids[:, :length])
    settled(attached)
    expected = plain(attached, ids)
    assert run(attached.model, ids).differs(expected) == 0
    assert attached.last.hit_tokens == length // BLOCK * BLOCK


def test_the_last_token_is_always_computed(attach: Attach) -> None:
    attached = attach(llama())
    ids = prompt(3 * BLOCK)
    expected = plain(attached, ids)
    run(attached.model, ids)
    settled(attached)
    assert run(attached.model, ids).differs(expected) == 0
    assert attached.last.hit_tokens == 2 * BLOCK


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "length",
    [WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + BLOCK, 2 * WINDOW - 1, 2 * WINDOW, 2 * WINDOW + 1],
)
def test_sliding_windows(attach: Attach, length: int, dtype: Any) -> None:
    attached = attach(gemma(dtype))
    ids = prompt(length + 2)
    run(attached.model, ids[:, :length])
    settled(attached)
    expected = plain(attached, ids)
    assert run(attached.model, ids).differs(expected) == 0
    assert attached.last.hit_tokens == length // BLOCK * BLOCK


@pytest.mark.parametrize("cut", range(1, 7))
def test_any_cut_of_a_longer_stored_prompt_is_served(attach: Attach, cut: int) -> None:
    """Sliding layers were stored whole, not only the window at the end of the first prompt."""
    attached = attach(gemma())
    stored = prompt(7 * BLOCK)
    run(attached.model, stored)
    settled(attached)
    ids = torch.cat([stored[:, : cut * BLOCK], prompt(3)], dim=1)
    expected = plain(attached, ids)
    assert run(attached.model, ids).differs(expected) == 0
    assert attached.last.hit_tokens == cut * BLOCK


def test_a_conversation_is_exact_turn_by_turn(attach: Attach) -> None:
    """Generated tokens were not computed in a chunk: they are computed again, not taken over."""
    attached = attach(gemma(torch.bfloat16))
    ids = prompt(2 * BLOCK + 9)
    for _ in range(3):
        expected = plain(attached, ids)
        found = run(attached.model, ids)
        assert found.differs(expected) == 0
        settled(attached)
        ids = torch.cat([found.tokens, prompt(BLOCK - 2)], dim=1)
    assert attached.last.hit_tokens >= 2 * BLOCK


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_control_a_block_of_another_prompt_shows(
    attach: Attach, model: Callable[..., Any], dtype: Any
) -> None:
    """Not one of the same prompt: keys carry their positions, and full attention sees a set."""
    attached = attach(model(dtype))
    handle = attached.namespace()
    stored = np.empty((2, 4, handle.layout.block_bytes), np.uint8)
    for blocks in stored:
        ids = prompt(4 * BLOCK + 1)
        expected = plain(attached, ids)
        run(attached.model, ids)
        settled(attached)
        chain = handle.chain(ids[0].numpy())
        assert handle.load(chain, blocks).blocks == 4
    stored[1, 3] = stored[0, 3]
    put_instead(handle, chain, stored[1])
    found = run(attached.model, ids)
    assert attached.last.hit_tokens == 4 * BLOCK
    assert found.differs(expected) > 0


@pytest.mark.parametrize("model", MODELS)
def test_restored_caches_are_independent(attach: Attach, model: Callable[..., Any]) -> None:
    attached = attach(model())
    ids = prompt(3 * BLOCK + 2)
    run(attached.model, ids)
    settled(attached)
    handle = attached.namespace()
    chain = handle.chain(ids[0].numpy())
    before = np.empty((3, handle.layout.block_bytes), np.uint8)
    assert handle.load(chain, before).blocks == 3
    runs = [run(attached.model, ids, max_new_tokens=20) for _ in range(3)]
    assert attached.last.hit_tokens == 3 * BLOCK
    assert runs[0].differs(runs[1]) == runs[1].differs(runs[2]) == 0
    after = np.empty_like(before)
    assert handle.load(chain, after).blocks == 3
    assert (before == after).all()


def test_inexact_hits_equal_a_cache_that_never_left(attach: Attach) -> None:
    """One-shot prefill, generated tokens stored too: the next turn goes on where this one ended."""
    attached = attach(gemma(), exact=False)
    ids = prompt(2 * BLOCK + 5)
    first = attached.model.generate(
        ids, max_new_tokens=BLOCK, do_sample=False, return_dict_in_generate=True
    )
    settled(attached)
    assert attached.statistics().saved_blocks == 3
    held = first.cache.get_seq_length()
    second = torch.cat([first.sequences, prompt(4)], dim=1)
    first.cache.crop(-(held - 3 * BLOCK))
    expected = run(attached.model, second, cache=first.cache)
    assert run(attached.model, second).differs(expected) == 0
    assert attached.last.hit_tokens == 3 * BLOCK
