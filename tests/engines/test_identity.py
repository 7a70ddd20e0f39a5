"""Whatever shapes keys and values is part of their name; what does not is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.kit import BLOCK, gemma, llama, prompt, run, settled, torch, transformers

Attach = Callable[..., Any]


def name_of(model: Any, **choices: Any) -> bytes:
    """The namespace of `model`, without a store."""
    from engine_adapter.identity import Choices, ModelIdentity
    from engine_adapter.transformers import probe
    from kvstore.fingerprint import namespace_of

    settings = Choices(**{"block_tokens": BLOCK, **choices})
    return namespace_of(ModelIdentity(model, probe(model), settings).current())


def nudged(model: Any, tensor: str) -> Any:
    """One element of one tensor changed by a little."""
    with torch.no_grad():
        dict(model.named_parameters())[tensor].view(-1)[7] += 0.01
    return model


def test_two_loads_of_one_model_share() -> None:
    assert name_of(llama()) == name_of(llama())
    assert name_of(gemma()) == name_of(gemma())


CHANGES: dict[str, Callable[[], bytes]] = {
    "weights of another seed": lambda: name_of(llama(seed=1)),
    "one element of one weight": lambda: name_of(
        nudged(llama(), "model.layers.2.self_attn.q_proj.weight")
    ),
    "the embedding": lambda: name_of(nudged(llama(), "model.embed_tokens.weight")),
    "dtype": lambda: name_of(llama(torch.bfloat16)),
    "attention implementation": lambda: name_of(llama(attn_implementation="eager")),
    "rope settings": lambda: name_of(
        llama(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    ),
    "a config entry": lambda: name_of(llama(rms_norm_eps=1e-4)),
    "block size": lambda: name_of(llama(), block_tokens=2 * BLOCK),
    "tenant salt": lambda: name_of(llama(), tenant_salt="a"),
    "variant": lambda: name_of(llama(), variant="steered"),
    "exactness": lambda: name_of(llama(), exact=False),
    "another architecture": lambda: name_of(gemma()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_change_is_another_name(change: str) -> None:
    assert CHANGES[change]() != name_of(llama())


def test_windows_are_part_of_the_name() -> None:
    assert name_of(gemma(sliding_window=3 * BLOCK)) != name_of(gemma())


def test_arithmetic_is_part_of_an_exact_name_only() -> None:
    exact, loose = name_of(llama()), name_of(llama(), exact=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert name_of(llama()) != exact
        assert name_of(llama(), exact=False) == loose
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "edit",
    [
        lambda weight: weight.add_(0.1),
        lambda weight: weight[3].zero_(),
        lambda weight: setattr(weight, "data", weight.data + 0.1),
        lambda weight: weight.data.mul_(1.01),
    ],
    ids=["in place", "one row", "new data", "behind the version's back"],
)
def test_weights_that_change_while_attached_miss(attach: Attach, edit: Callable[..., Any]) -> None:
    attached = attach(llama())
    ids = prompt(2 * BLOCK + 1)
    run(attached.model, ids)
    settled(attached)
    run(attached.model, ids)
    assert attached.last.hit_tokens == 2 * BLOCK
    with torch.no_grad():
        edit(attached.model.model.layers[1].mlp.up_proj.weight)
    run(attached.model, ids)
    assert attached.last.hit_tokens == 0


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_another_dtype_misses(attach: Attach, kind: Any) -> None:
    ids = prompt(2 * BLOCK + 1)
    other = torch.bfloat16 if kind is torch.float32 else torch.float32
    attached = attach(llama(kind))
    run(attached.model, ids)
    settled(attached)
    foreign = attach(llama(other))
    run(foreign.model, ids)
    assert foreign.last.hit_tokens == 0
    again = attach(llama(kind))
    run(again.model, ids)
    assert again.last.hit_tokens == 2 * BLOCK


def test_tenants_with_other_salts_do_not_meet(attach: Attach) -> None:
    ids = prompt(2 * BLOCK + 1)
    for salt, tokens in (("a", 0), ("b", 0), ("", 0), ("a", 2 * BLOCK)):
        attached = attach(llama(), tenant_salt=salt)
        run(attached.model, ids)
        settled(attached)
        assert attached.last.hit_tokens == tokens


# ---------------------------------------------------------------------- adapters


def lora(seed: int, name: str = "one", model: Any = None) -> Any:
    """A LoRA of random content around a tiny llama, or one more around `model`."""
    peft = pytest.importorskip("peft", reason="install the engine-tests extra: peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_alpha=4
    )
    torch.manual_seed(seed)
    if model is None:
        base = llama()
        torch.manual_seed(seed)
        return peft.get_peft_model(base, config, adapter_name=name)
    model.add_adapter(name, config)
    return model


def test_adapters_count_by_content_not_by_name() -> None:
    one = name_of(lora(1, "one").get_base_model())
    assert name_of(lora(1, "two").get_base_model()) == one
    assert name_of(lora(2, "one").get_base_model()) != one
    assert name_of(llama()) != one


def test_adapters_that_are_not_active_do_not_count() -> None:
    alone = name_of(lora(1).get_base_model())
    several = lora(2, "second", lora(1))
    assert name_of(several.get_base_model()) == alone
    several.set_adapter("second")
    assert name_of(several.get_base_model()) != alone
    with several.disable_adapter():
        assert name_of(several.get_base_model()) == name_of(llama())


def test_scaling_counts() -> None:
    model = lora(1)
    before = name_of(model.get_base_model())
    for module in model.modules():
        if hasattr(type(module), "active_adapters") and hasattr(module, "scaling"):
            module.scaling["one"] *= 2
    assert name_of(model.get_base_model()) != before


def test_a_changed_adapter_misses(attach: Attach) -> None:
    model = lora(1)
    attached = attach(model)
    ids = prompt(2 * BLOCK + 1)

    def hit_tokens() -> int:
        model.generate(input_ids=ids, max_new_tokens=1, do_sample=False)
        settled(attached)
        return int(attached.last.hit_tokens)

    assert [hit_tokens(), hit_tokens()] == [0, 2 * BLOCK]
    with model.disable_adapter():
        assert [hit_tokens(), hit_tokens()] == [0, 2 * BLOCK]
    assert hit_tokens() == 2 * BLOCK
    lora(2, "second", model).set_adapter("second")
    assert [hit_tokens(), hit_tokens()] == [0, 2 * BLOCK]
    model.merge_adapter()
    assert hit_tokens() == 0
    model.unmerge_adapter()
    model.delete_adapter("second")
    lora(3, "second", model).set_adapter("second")
    assert hit_tokens() == 0


def test_a_cache_of_one_adapter_is_not_stored_under_another(attach: Attach) -> None:
    model = lora(1)
    attached = attach(model, exact=False)
    ids = prompt(BLOCK + 3)
    arguments = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(input_ids=ids, **arguments)
    settled(attached)
    assert attached.statistics().saved_blocks == 1
    longer = torch.cat([first.sequences, prompt(2 * BLOCK)], dim=1)
    with model.disable_adapter():
        model.generate(input_ids=longer, cache=first.cache, **arguments)
        settled(attached)
        assert attached.statistics().saved_blocks == 1
        model.generate(input_ids=longer, **arguments)
        assert attached.last.hit_tokens == 0


# ---------------------------------------------------------------------- what cannot be restored


def refused(model: Any) -> str:
    from engine_adapter.transformers import Refused, probe

    with pytest.raises(Refused) as caught:
        probe(model)
    return str(caught.value)


def test_a_recurrent_model_is_refused_by_name() -> None:
    config = transformers.Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    assert "linear_attention" in refused(transformers.Qwen3NextForCausalLM(config))


def test_chunked_attention_is_refused_by_name() -> None:
    model = llama()
    model.config.layer_types = ["chunked_attention"] * 4
    model.config.attention_chunk_size = 32
    assert "chunked_attention" in refused(model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_whole_length_are_refused(kind: str) -> None:
    model = llama()
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    assert kind in refused(model)


def test_bidirectional_models_are_refused() -> None:
    model = gemma()
    model.config.use_bidirectional_attention = True
    assert "use_bidirectional_attention" in refused(model)


def test_encoder_decoder_models_are_refused() -> None:
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    assert "encoder-decoder" in refused(transformers.T5ForConditionalGeneration(config))


def test_weights_that_are_not_in_memory_are_refused() -> None:
    from engine_adapter.identity import content_digest
    from engine_adapter.transformers import Refused

    with pytest.raises(Refused, match="meta"):
        content_digest(torch.empty(3, device="meta"), whole=True)


def test_samples_of_large_tensors_see_both_ends_and_wide_edits() -> None:
    from engine_adapter.identity import content_digest

    weight = torch.randn(1000, 1000)
    before = content_digest(weight, whole=False)
    for edit in (
        lambda w: w.view(-1)[:1].add_(1),
        lambda w: w.view(-1)[-1:].add_(1),
        lambda w: w.add_(torch.randn(1000, 2) @ torch.randn(2, 1000)),
    ):
        changed = weight.clone()
        edit(changed)
        assert content_digest(changed, whole=False) != before
    assert content_digest(weight.clone(), whole=False) == before
