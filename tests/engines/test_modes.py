"""Modes of generate: served with equal results, left alone, or refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.kit import (
    BLOCK,
    NEW_TOKENS,
    gemma,
    llama,
    plain,
    prompt,
    run,
    settled,
    torch,
    transformers,
)

Attach = Callable[..., Any]


@pytest.fixture
def warm(attach: Attach) -> tuple[Any, Any]:
    """A model and a prompt whose first three blocks are stored."""
    attached = attach(gemma())
    ids = prompt(3 * BLOCK + 4)
    run(attached.model, ids)
    settled(attached)
    return attached, ids


def padded(rows: list[Any]) -> tuple[Any, Any]:
    """Left-padded ids and mask of rows [1, n]."""
    length = max(row.shape[1] for row in rows)
    ids = torch.zeros((len(rows), length), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, length - row.shape[1] :] = row
        mask[at, length - row.shape[1] :] = 1
    return ids, mask


# ---------------------------------------------------------------------- served


@pytest.mark.parametrize("model", [llama, gemma])
@pytest.mark.parametrize("lengths", [(5, 3), (3, 5), (4, 4), (5, 0)], ids=str)
def test_left_padded_batches(
    attach: Attach, model: Callable[..., Any], lengths: tuple[int, int]
) -> None:
    attached = attach(model())
    rows = [prompt(blocks * BLOCK + 3 + at) for at, blocks in enumerate(lengths)]
    for row in rows:
        run(attached.model, row)
    settled(attached)
    ids, mask = padded(rows)
    expected = plain(attached, ids, attention_mask=mask)
    found = run(attached.model, ids, attention_mask=mask)
    assert found.is_near(expected)
    if min(lengths):
        ends = [ids.shape[1] - row.shape[1] + row.shape[1] // BLOCK * BLOCK for row in rows]
        pads = [ids.shape[1] - row.shape[1] for row in rows]
        assert attached.last.hit_tokens == sum(min(ends) - pad for pad in pads)


def test_padding_may_hold_anything(attach: Attach) -> None:
    attached = attach(llama(), exact=False)
    rows = [prompt(2 * BLOCK + 1), prompt(3 * BLOCK + 7)]
    ids, mask = padded(rows)
    expected = plain(attached, ids, attention_mask=mask)
    ids[mask == 0] = 77
    assert run(attached.model, ids, attention_mask=mask).is_near(
        plain(attached, ids, attention_mask=mask)
    )
    settled(attached)
    ids[mask == 0] = 55
    found = run(attached.model, ids, attention_mask=mask)
    assert attached.last.hit_tokens > 0
    assert torch.equal(found.tokens[:, -NEW_TOKENS:], expected.tokens[:, -NEW_TOKENS:])


def test_batches_store_what_single_prompts_find(attach: Attach) -> None:
    attached = attach(gemma(), exact=False)
    rows = [prompt(2 * BLOCK + 3), prompt(4 * BLOCK + 3)]
    ids, mask = padded(rows)
    run(attached.model, ids, attention_mask=mask)
    settled(attached)
    for row in rows:
        expected = plain(attached, row)
        assert run(attached.model, row).is_near(expected)
        assert attached.last.hit_tokens == row.shape[1] // BLOCK * BLOCK


def test_an_exact_adapter_stores_nothing_of_a_batch(attach: Attach) -> None:
    attached = attach(llama())
    run(attached.model, prompt(3 * BLOCK, rows=2))
    settled(attached)
    assert attached.statistics().saved_blocks == 0


def test_sampling_with_a_seed(warm: tuple[Any, Any]) -> None:
    attached, ids = warm
    torch.manual_seed(5)
    expected = plain(attached, ids, do_sample=True, max_new_tokens=12)
    torch.manual_seed(5)
    found = run(attached.model, ids, do_sample=True, max_new_tokens=12)
    assert attached.last.hit_tokens == 3 * BLOCK
    assert found.differs(expected) == 0


@pytest.mark.parametrize(
    "extra", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}]
)
def test_rows_that_are_repeated(warm: tuple[Any, Any], extra: dict[str, Any]) -> None:
    attached, ids = warm
    arguments = {"max_new_tokens": 8, "prefill_chunk_size": BLOCK, "do_sample": False, **extra}
    torch.manual_seed(6)
    with attached.paused():
        expected = attached.model.generate(ids, **arguments)
    torch.manual_seed(6)
    found = attached.model.generate(ids, **arguments)
    assert attached.last.hit_tokens == 3 * BLOCK
    assert torch.equal(found, expected)


def test_the_next_turn_on_the_same_cache(warm: tuple[Any, Any]) -> None:
    attached, ids = warm
    first = attached.model.generate(
        ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True
    )
    second = torch.cat([first.sequences, prompt(BLOCK + 3)], dim=1)
    with attached.paused():
        stock = attached.model.generate(
            ids,
            max_new_tokens=4,
            do_sample=False,
            return_dict_in_generate=True,
            prefill_chunk_size=BLOCK,
        )
        expected = run(attached.model, second, cache=stock.cache)
    assert run(attached.model, second, past_key_values=first.cache).differs(expected) == 0
    assert attached.last.plain_reason == ""


def test_arguments_by_position_and_config(warm: tuple[Any, Any]) -> None:
    attached, ids = warm
    config = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    found = attached.model.generate(ids, config)
    assert attached.last.hit_tokens == 3 * BLOCK
    assert found.shape[1] == ids.shape[1] + 3
    assert config.prefill_chunk_size is None


# ---------------------------------------------------------------------- left alone


def test_calls_that_are_no_business_of_the_store(warm: tuple[Any, Any]) -> None:
    attached, ids = warm
    model = attached.model
    embeddings = model.get_input_embeddings()(ids)
    stock = transformers.DynamicCache(config=model.config)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("use_cache=False", {"input_ids": ids, "use_cache": False}),
        ("input beside tokens", {"input_ids": ids, "inputs_embeds": embeddings}),
        (
            "input beside tokens",
            {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]},
        ),
        ("input beside tokens", {"inputs_embeds": embeddings}),
        ("the caller's own Cache", {"input_ids": ids, "past_key_values": stock}),
        ("output_hidden_states", {"input_ids": ids, "output_hidden_states": True}),
    ]
    for reason, arguments in calls:
        model.generate(**arguments, max_new_tokens=2, do_sample=False)
        assert attached.last.plain_reason.startswith(reason.partition(":")[0]), arguments.keys()
        assert attached.last.hit_tokens == 0
    assert attached.statistics().plain == len(calls)


def test_masks_with_gaps_and_unmarked_padding(warm: tuple[Any, Any]) -> None:
    attached, ids = warm
    gap = torch.ones_like(ids)
    gap[0, 5] = 0
    run(attached.model, ids, attention_mask=gap)
    assert attached.last.plain_reason.startswith("attention mask with gaps")
    right = torch.ones_like(ids)
    right[0, -1] = 0
    run(attached.model, ids, attention_mask=right)
    assert attached.last.plain_reason.startswith("attention mask with gaps")
    ids = ids.clone()
    ids[0, 0] = 0
    run(attached.model, ids, attention_mask=None)
    assert attached.last.plain_reason == "padding tokens without an attention mask"


def test_training_mode_is_left_alone(warm: tuple[Any, Any]) -> None:
    attached, ids = warm
    attached.model.train()
    run(attached.model, ids)
    assert attached.last.plain_reason == "the model is in training mode"


def test_autocast_is_left_alone(warm: tuple[Any, Any]) -> None:
    attached, ids = warm
    with torch.autocast("cpu", torch.bfloat16):
        run(attached.model, ids)
    assert attached.last.plain_reason == "autocast"


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
        {"custom_generate": "somewhere/else"},
        {"token_healing": True},
        {"assistant_model": object()},
        {"prefill_chunk_size": BLOCK + 1},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_modes_are_refused_by_name(warm: tuple[Any, Any], arguments: dict[str, Any]) -> None:
    attached, ids = warm
    with pytest.raises(attached_refusal(), match=next(iter(arguments))):
        run(attached.model, ids, **arguments)


def test_a_cache_without_use_cache_is_refused(warm: tuple[Any, Any]) -> None:
    attached, ids = warm
    cache = transformers.DynamicCache(config=attached.model.config)
    with pytest.raises(attached_refusal(), match="use_cache=False"):
        run(attached.model, ids, cache=cache, use_cache=False)


@pytest.mark.parametrize("change", [-1, 1])
def test_masks_of_another_length_are_refused(warm: tuple[Any, Any], change: int) -> None:
    attached, ids = warm
    mask = torch.ones((1, ids.shape[1] + change), dtype=torch.long)
    with pytest.raises(attached_refusal(), match="attention mask"):
        run(attached.model, ids, attention_mask=mask)


def test_a_prompt_fed_twice_is_refused(warm: tuple[Any, Any]) -> None:
    """The last line of defence: what a decoding loop unknown to us might do."""
    attached, ids = warm
    prefill = attached.prefill

    def feeds_all(input_ids: Any, config: Any, model_kwargs: Any, *args: Any, **kw: Any) -> Any:
        longer = torch.cat([input_ids, input_ids], dim=1)
        return prefill(longer, config, {**model_kwargs, "position_ids": None}, *args, **kw)

    attached.model._prefill = feeds_all
    with pytest.raises(attached_refusal(), match="repeats the prompt"):
        run(attached.model, ids)


def attached_refusal() -> type[Exception]:
    from engine_adapter.transformers import Refused

    return Refused


# ---------------------------------------------------------------------- attaching


def test_attach_and_detach_leave_the_model_as_it_was(attach: Attach) -> None:
    model = llama()
    before = set(vars(model))
    attached = attach(model)
    with pytest.raises(attached_refusal(), match="attached already"):
        attach(model)
    attached.detach()
    attached.detach()
    assert set(vars(model)) == before
    attach(model)


def test_an_attached_model_is_not_copied(attach: Attach) -> None:
    attached = attach(llama())
    with pytest.raises(attached_refusal(), match="detach"):
        copy.deepcopy(attached.model)
    with pytest.raises(attached_refusal(), match="detach"):
        pickle.dumps(attached.model)


def test_an_own_client_stays_open(store: Any) -> None:
    import engine_adapter.transformers as kv
    from kvstore.client import KVClient

    with KVClient(str(store.socket)) as client:
        assert client.wait_connected(20)
        model = llama()
        with kv.attach(model, client, block_tokens=BLOCK) as attached:
            run(model, prompt(BLOCK + 1))
            settled(attached)
        kv.detach(model)
        assert client.connected
        assert client.stat()
