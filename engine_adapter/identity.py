"""The full identity of a transformers model's keys and values.

Primitives:
  `ModelIdentity`   made once a model; `current()` names the model as it is now
  `Choices`         what the user chose: block size, salt, exactness

The weights are named by the content that lies in memory, not by a path or a revision: processes
that loaded the same tensors share, and whoever merges an adapter, quantises or trains gets another
name. All tensors are read whole up to FULL_BYTES_MAX, beyond that a sample of each (both ends and
pieces spread evenly): an edit of a few rows of a very large model may go unseen, see `variant`.
Digests are kept per tensor and made again when the tensor, its memory, its version or a small
sample of it changed.
Adapters (LoRA and its kin) count by the content of what is active, their scaling and merge state,
never by their names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
import xxhash

from engine_adapter.quantised import Scheme
from engine_adapter.refusal import Refused
from engine_adapter.tensors import LAYOUT_NAME
from engine_adapter.transformers_cache import ModelShape
from engine_adapter.watch import Mark, ModelWatch, is_tuner
from kvstore.fingerprint import KVIdentity

FULL_BYTES_MAX = 4 << 30
SAMPLE_PIECES = 64
SAMPLE_PIECE_BYTES = 4096
NAMES_ONLY = ("_name_or_path", "_model_name_or_path", "transformers_version", "architectures")
"""Config entries that say where a model came from, not what it computes."""
PACKING = "a scale a block, layer, kind and head"
"""How 8-bit numbers are made."""
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class Choices:
    """`exact`: only what was computed in whole prefill chunks of `block_tokens` is shared, and only
    between equal arithmetic. `variant`: names what the adapter cannot see (hooks, edits).
    `scheme`: keys and values are stored as 8-bit numbers."""

    block_tokens: int
    tenant_salt: str = ""
    variant: str = ""
    exact: bool = True
    scheme: Scheme | None = None


class _Entry(NamedTuple):
    """One tensor of the model: where it hangs, and whose it is."""

    name: str
    tensor: torch.Tensor
    tuner: Any
    """The adapter layer it belongs to, None for the model's own."""


class ModelIdentity:
    """`current()` is cheap while nothing changed: see `watch`."""

    def __init__(self, model: Any, shape: ModelShape, choices: Choices) -> None:
        self._model = model
        self._shape = shape
        self._choices = choices
        self._config = model.config.get_text_config(decoder=True)
        self._digests: dict[int, tuple[Mark, bytes]] = {}
        self._watch: ModelWatch | None = None
        self._setting: tuple[object, ...] = ()
        self._identity: KVIdentity | None = None

    def current(self) -> KVIdentity:
        """Raises Refused for weights that are not in memory."""
        setting = (self._config._attn_implementation, self._model.dtype)
        if self._choices.exact:
            setting += arithmetic(self._shape.device)
        if (
            self._identity is None
            or self._watch is None
            or setting != self._setting
            or not self._watch.is_unchanged()
        ):
            watch = ModelWatch(self._model)
            self._identity = self._make()
            self._watch, self._setting = watch, setting
        return self._identity

    def _make(self) -> KVIdentity:
        config, shape = self._config, self._shape
        weights, adapters = self._digest_tensors()
        windows = [window or 0 for window in shape.windows]
        return KVIdentity(
            model=f"{type(self._model).__name__} {config.model_type}",
            weights_digest=weights,
            kv_dtype=self._choices.scheme or str(shape.dtype).removeprefix("torch."),
            quantization=PACKING if self._choices.scheme else "",
            layout=f"{LAYOUT_NAME} key={shape.key_size} value={shape.value_size}",
            block_tokens=self._choices.block_tokens,
            layers=len(shape.windows),
            kv_heads_per_rank=shape.heads,
            head_size=shape.key_size,
            adapter_digest=adapters,
            positions=_json(rope_settings(config)),
            attention=str(config._attn_implementation),
            kv_group=f"all layers, whole; windows {windows}",
            tenant_salt=self._choices.tenant_salt,
            extra=self._extra(),
        )

    def _extra(self) -> tuple[tuple[str, str], ...]:
        config = {k: v for k, v in self._model.config.to_dict().items() if k not in NAMES_ONLY}
        extra = [
            ("config", hashlib.blake2b(_json(config).encode(), digest_size=16).hexdigest()),
            ("compute", str(self._model.dtype)),
            ("transformers", transformers.__version__),
            ("torch", torch.__version__),
            ("variant", self._choices.variant),
        ]
        if self._choices.exact:
            extra.append(("exact", " ".join(map(str, arithmetic(self._shape.device)))))
        return tuple(extra)

    # ------------------------------------------------------------------ content

    def _digest_tensors(self) -> tuple[str, str]:
        """Digests of the model's own tensors and of the active adapters' (\"\" without any)."""
        entries = sorted(_entries(self._model), key=lambda entry: entry.name)
        own = [entry for entry in entries if entry.tuner is None]
        whole = sum(entry.tensor.nbytes for entry in entries) <= FULL_BYTES_MAX
        weights = hashlib.blake2b(digest_size=16, person=b"hf-weights")
        for entry in own:
            weights.update(self._line(entry, whole))
        active = [entry for entry in entries if entry.tuner is not None and _is_active(entry)]
        if not active:
            return weights.hexdigest(), ""
        adapters = hashlib.blake2b(digest_size=16, person=b"hf-adapters")
        for entry in active:
            adapters.update(self._line(entry, whole))
        return weights.hexdigest(), adapters.hexdigest()

    def _line(self, entry: _Entry, whole: bool) -> bytes:
        tensor = entry.tensor
        known = self._digests.get(id(tensor))
        if known is None or not known[0].fits(tensor):
            known = (Mark(tensor), content_digest(tensor, whole=whole))
            self._digests[id(tensor)] = known
        name = entry.name
        if entry.tuner is not None:
            name, adapter = _without_adapter(entry)
            name += f" x{_scaling(entry.tuner).get(adapter, 1.0)!r}"
        head = f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode()
        return len(head).to_bytes(4, "little") + head + known[1]


def content_digest(tensor: torch.Tensor, *, whole: bool) -> bytes:
    """16 bytes of a tensor's content, or of evenly spread pieces of it, both ends among them."""
    if tensor.device.type == "meta":
        raise Refused("a weight is not in memory (meta device); load the model whole, then attach")
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if whole or len(flat) <= SAMPLE_PIECES * SAMPLE_PIECE_BYTES:
        return xxhash.xxh3_128_digest(flat.cpu().numpy())
    starts = np.linspace(0, len(flat) - SAMPLE_PIECE_BYTES, SAMPLE_PIECES).astype(np.int64)
    digest = xxhash.xxh3_128()
    for start in starts.tolist():
        digest.update(flat[start : start + SAMPLE_PIECE_BYTES].cpu().numpy())
    return digest.digest()


def arithmetic(device: torch.device) -> tuple[object, ...]:
    """What decides how the same operations round: bits are shared only where it is equal."""
    found: tuple[object, ...] = (
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
    if device.type == "cuda":
        found += (
            torch.cuda.get_device_name(device),
            torch.version.cuda,
            torch.backends.cudnn.version(),
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        )
    return found


def rope_settings(config: Any) -> dict[str, Any]:
    """Whatever the config says of positions. Raises Refused where keys depend on what follows
    them."""
    found = {
        name: getattr(config, name)
        for name in ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
        if getattr(config, name, None) is not None
    }
    for settings in found.values():
        if isinstance(settings, dict):
            for part in (settings, *(v for v in settings.values() if isinstance(v, dict))):
                kind = part.get("rope_type", part.get("type"))
                if kind in LENGTH_DEPENDENT_ROPE:
                    raise Refused(
                        f"rope type {kind!r}: keys depend on the length of the whole prompt, not "
                        "only on what precedes them, and cannot be shared"
                    )
    return found


def _entries(model: Any) -> Iterator[_Entry]:
    """Every parameter and buffer once, with the name it would have without adapters around it."""
    todo: list[tuple[Any, str, Any]] = [(model, "", None)]
    seen: set[int] = set()
    while todo:
        module, path, tuner = todo.pop()
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield _Entry(f"{path}{name}", tensor, tuner)
        for name, child in module._modules.items():
            if child is None:
                continue
            if is_tuner(module) and name == "base_layer":
                todo.append((child, path, None))
            else:
                owner = module if is_tuner(module) else tuner
                todo.append((child, f"{path}{name}.", owner))


def _scaling(tuner: Any) -> dict[str, Any]:
    """By adapter name; not every kind of adapter has one."""
    scaling: dict[str, Any] = getattr(tuner, "scaling", {})
    return scaling


def _is_active(entry: _Entry) -> bool:
    """Merged adapters are in the weights already."""
    tuner = entry.tuner
    if tuner.disable_adapters or tuner.merged_adapters:
        return False
    return _without_adapter(entry)[1] in tuner.active_adapters


def _without_adapter(entry: _Entry) -> tuple[str, str]:
    """The entry's name without its adapter's display name, and that name."""
    known = {*_scaling(entry.tuner), *entry.tuner.active_adapters}
    for adapter in known:
        if f".{adapter}." in entry.name:
            return entry.name.replace(f".{adapter}.", ".*.", 1), adapter
        if entry.name.endswith(f".{adapter}"):
            return f"{entry.name.removesuffix(adapter)}*", adapter
    return entry.name, ""


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
