"""Which calls of generate can use a stored prefix: each one is served, plain, or refused.

Primitives:
  `read_call(...)`   a `Prompt` to be served, or a `Plain` call that goes on without the store
  `layer_windows`    the model's layers; raises Refused for kinds that cannot be restored

Plain: the call asks for something that is no business of the store (embeddings, images, training),
and is right without it. Refused: the call would give silently wrong results with a prefix in the
cache; the message names the mode and the way out. Touches nothing; decides from arguments alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, get_layer_types_and_kwargs

from engine_adapter.refusal import Refused
from engine_adapter.transformers_cache import KVCache

CACHE_NAMES = ("cache", "past_key_values")
"""The argument's name since transformers 5.24, and before."""
NEW_TOKENS_DEFAULT = 256
"""Room made beforehand when the call names no length; buffers grow past it."""
_OWN_ARGUMENTS = {
    "inputs",
    "input_ids",
    "attention_mask",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "tokenizer",
    "logits_to_keep",
    "return_dict",
    *CACHE_NAMES,
    *vars(GenerationConfig()),
}
"""Arguments that leave the prompt's KV as it is; any other is an input of the model."""
_REFUSED_MODES = {
    "assistant_model": "assisted decoding feeds the whole prompt again",
    "assistant_tokenizer": "assisted decoding feeds the whole prompt again",
    "prompt_lookup_num_tokens": "prompt lookup feeds the whole prompt again",
    "assistant_early_exit": "assisted decoding feeds the whole prompt again",
    "custom_generate": "what a custom decoding loop does with its cache is unknown",
    "cache_implementation": "it names another cache than the adapter's",
    "token_healing": "it changes the prompt after its prefix was looked up",
}
_WAY_OUT = "call generate inside `with attached.paused():`, or detach"


@dataclass(frozen=True)
class Prompt:
    """A call to serve. `pads`: leading padding of a row; `expand`: how often rows are repeated."""

    ids: torch.Tensor
    pads: tuple[int, ...]
    expand: int
    capacity: int
    cache: KVCache | None
    """The adapter's own cache of an earlier call that goes on; nothing is restored into it."""

    @property
    def tokens(self) -> int:
        """Prompt tokens without padding."""
        return int(self.ids.numel()) - sum(self.pads)


class Plain(NamedTuple):
    """A call that goes on as if the adapter were not there."""

    reason: str


class _Call:
    """The arguments of one generate call, and its settings as generate will resolve them."""

    def __init__(self, model: Any, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self._sources = (arguments.get("generation_config"), model.generation_config)

    def setting(self, name: str) -> Any:
        """Argument, else the given config, else the model's; None if nobody set it."""
        if (value := self.arguments.get(name)) is not None:
            return value
        for source in self._sources:
            if source is not None and (value := getattr(source, name, None)) is not None:
                return value
        return None

    @property
    def cache(self) -> Any:
        return next(
            (c for name in CACHE_NAMES if (c := self.arguments.get(name)) is not None), None
        )


def read_call(model: Any, arguments: dict[str, Any], chunk: int) -> Prompt | Plain:
    """`arguments` by name; `chunk`: the prefill chunk size that exactness asks for, 0 for any.

    Raises Refused."""
    call = _Call(model, arguments)
    _refuse_modes(call, chunk)
    if reason := _plain_reason(model, call):
        return Plain(reason)
    ids = arguments.get("input_ids")
    ids = arguments["inputs"] if ids is None else ids
    pads = _pads(model, ids, arguments.get("attention_mask"), call.cache)
    if isinstance(pads, Plain):
        return pads
    room = call.setting("max_new_tokens")
    if room is None:
        length = call.setting("max_length")
        room = NEW_TOKENS_DEFAULT if length is None else max(length - ids.shape[1], 0)
    return Prompt(
        ids.cpu(),
        pads,
        max(call.setting("num_beams") or 1, call.setting("num_return_sequences") or 1),
        ids.shape[1] + room,
        call.cache,
    )


def _refuse_modes(call: _Call, chunk: int) -> None:
    for name, why in _REFUSED_MODES.items():
        if call.setting(name):
            raise Refused(f"generate with {name}: {why}; {_WAY_OUT}")
    if call.cache is not None and call.setting("use_cache") is False:
        raise Refused(
            "generate with a cache and use_cache=False would feed the prompt after its own prefix; "
            "pass one of them"
        )
    asked = call.setting("prefill_chunk_size")
    if chunk and asked is not None and asked != chunk and call.cache is None:
        raise Refused(
            f"generate with prefill_chunk_size={asked}: this adapter shares only what was "
            f"computed in chunks of {chunk}; leave it out, or attach with block_tokens={asked} or "
            "exact=False"
        )


def _plain_reason(model: Any, call: _Call) -> str:
    """Why this call cannot use the store, "" if it can."""
    cache = call.cache
    if cache is not None and not isinstance(cache, KVCache):
        kind = "Cache" if isinstance(cache, Cache) else type(cache).__name__
        return f"the caller's own {kind}"
    if call.setting("use_cache") is False:
        return "use_cache=False"
    for name in ("output_hidden_states", "output_attentions"):
        if call.setting(name):
            return f"{name}: a restored prefix has none"
    inputs = [name for name in call.arguments if name not in _OWN_ARGUMENTS]
    if inputs := [name for name in inputs if call.arguments[name] is not None]:
        return f"input beside tokens: {', '.join(sorted(inputs))}"
    ids = call.arguments.get("input_ids")
    ids = call.arguments.get("inputs") if ids is None else ids
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        return "no token ids"
    if model.training:
        return "the model is in training mode"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast"
    return ""


def _pads(
    model: Any, ids: torch.Tensor, mask: torch.Tensor | None, cache: KVCache | None
) -> tuple[int, ...] | Plain:
    """Leading padding of each row. Raises Refused for a mask of another length than the prompt."""
    if mask is None:
        pad = model.generation_config.pad_token_id
        if pad is not None and bool((ids == pad).any()):
            return Plain("padding tokens without an attention mask")
        return (0,) * len(ids)
    if mask.dim() != 2:
        return Plain("attention mask of more than two dimensions")
    if mask.shape != ids.shape:
        if cache is not None and mask.shape[1] == ids.shape[1] + cache.get_seq_length():
            return Plain("only the new tokens of a turn were passed")
        raise Refused(
            f"attention mask {tuple(mask.shape)} for a prompt of {tuple(ids.shape)}: it must cover "
            "the whole prompt, restored prefix included, and nothing else"
        )
    real = mask != 0
    pads = (~real).long().cumprod(-1).sum(-1)
    if int((pads + real.sum(-1)).min()) < ids.shape[1] or int(pads.max()) >= ids.shape[1]:
        return Plain("attention mask with gaps, or padding on the right")
    return tuple(pads.tolist())


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """A layer's window, None for full attention. Raises Refused for any other kind of layer."""
    if config.is_encoder_decoder:
        raise Refused("encoder-decoder models: their decoder's KV depends on the encoder's input")
    text = config.get_text_config(decoder=True)
    for name in ("use_bidirectional_attention", "is_prefix_lm"):
        if getattr(text, name, None) not in (None, False):
            raise Refused(f"{name}: KV of a token depends on the tokens after it")
    windows: list[int | None] = []
    for index, (kind, settings) in enumerate(zip(*get_layer_types_and_kwargs(text), strict=True)):
        if kind == "full_attention":
            windows.append(None)
        elif kind == "sliding_attention":
            windows.append(int(settings["sliding_window"]))
        else:
            raise Refused(
                f"layer {index} is of kind {kind!r}: only full_attention and sliding_attention "
                "layers can be restored from blocks"
            )
    return tuple(windows)
