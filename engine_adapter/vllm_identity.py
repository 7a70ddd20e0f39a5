"""The full identity of a vLLM engine's blocks, one for each KV group and rank.

Primitives:
  `GroupFacts`, `EngineFacts`   what the connector read out of vLLM's configuration
  `refuse_unsupported`, `group_facts`   what is read there, or refused by name
  `lanes_of(facts)`             the lanes, each with its namespace; `size_of` a model's, for guesses
  `files_digest`, `Adapters`    weights or an adapter, named by content

Weights are named by the content of their files, read whole up to FULL_BYTES_MAX in all, beyond that
by pieces spread evenly: scheduler and workers are different processes, and only files are common to
them. Whoever changes weights in memory names it with the setting `variant`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from engine_adapter.refusal import Refused
from engine_adapter.vllm_orders import Lane
from kvstore.costs import ModelSize
from kvstore.fingerprint import KVIdentity, namespace_of
from kvstore.layout import BlockLayout

FULL_BYTES_MAX = 4 << 30
SAMPLE_PIECES = 256
SAMPLE_PIECE_BYTES = 64 << 10
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
ADAPTER_SUFFIXES = (*WEIGHT_SUFFIXES, ".json")
NAMES_ONLY = ("_name_or_path", "transformers_version", "architectures", "torch_dtype")
"""Config entries that say where a model came from, not what it computes."""
GROUP_KINDS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Plain numbers; with others, scales or codes lie among them."""
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

_log = logging.getLogger("vllm.kvstore")


@dataclass(frozen=True)
class GroupFacts:
    """One KV group: layers that share a block table."""

    number: int
    kind: str
    """Class of vLLM's spec."""
    layer_names: tuple[str, ...]
    block_tokens: int
    layer_bytes: int
    """Of one block on one rank."""
    heads: int
    head_size: int
    window_tokens: int
    is_shared: bool
    """All ranks hold equal bytes (MLA)."""


@dataclass(frozen=True)
class EngineFacts:
    """Everything that shapes the bytes of a block, in plain values."""

    architecture: str
    config: Mapping[str, Any]
    weights_digest: str
    model_length: int
    dtype: str
    kv_dtype: str
    quantization: str
    layout: str
    attention: str
    versions: tuple[tuple[str, str], ...]
    ranks: int
    groups: tuple[GroupFacts, ...]
    tenant_salt: str = ""
    variant: str = ""
    name: str = ""
    """Of the model, for people: no part of the identity."""
    size: ModelSize | None = None
    """Of the model, for guesses."""


def size_of(layers: int, hidden: int) -> ModelSize:
    """12 · layers · hidden² parameters besides the embeddings (Kaplan et al. 2020, section 2.1)."""
    return ModelSize(12.0 * layers * hidden**2, layers, hidden)


def refuse_unsupported(config: Any, platform: str, *, is_known: bool) -> None:
    """`config`: vLLM's. Raises Refused, naming everything that has to be turned off."""
    parallel, cache = config.parallel_config, config.cache_config
    found = {
        "speculative decoding": config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        # Data, expert and sequence parallelism leave every rank its heads of all tokens.
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "microbatches (DBO)": parallel.use_ubatching,
        "sleep mode": bool(getattr(config.model_config, "enable_sleep_mode", False)),
        "KV scales computed at run time": bool(getattr(cache, "calculate_kv_scales", False)),
        f"kv_cache_dtype {cache.cache_dtype!r}": cache.cache_dtype not in CACHE_DTYPES,
        f"platform {platform!r}": not is_known,
    }
    names = [name for name, is_used in found.items() if is_used]
    if names:
        raise Refused(f"kvstore does not support {', '.join(names)} with vLLM yet; turn it off")


def group_facts(number: int, group: Any) -> GroupFacts:
    """`group`: vLLM's `KVCacheGroupSpec`. Raises Refused for kinds that are not known."""
    spec = group.kv_cache_spec
    kind = type(spec).__name__
    if kind not in GROUP_KINDS:
        raise Refused(
            f"KV group {number} ({group.layer_names[0]}, ...) is a {kind}; kvstore supports "
            f"{', '.join(GROUP_KINDS)}"
        )
    is_sliding = kind == "SlidingWindowSpec"
    return GroupFacts(
        number=number,
        kind=kind,
        layer_names=tuple(group.layer_names),
        block_tokens=spec.block_size,
        layer_bytes=spec.page_size_bytes,
        heads=spec.num_kv_heads,
        head_size=spec.head_size,
        window_tokens=spec.sliding_window + spec.extra_retained_tokens if is_sliding else 0,
        is_shared=kind == "MLAAttentionSpec",
    )


def lanes_of(facts: EngineFacts) -> tuple[Lane, ...]:
    """Every group of every rank; groups that ranks share once."""
    return tuple(
        Lane(
            group=group.number,
            rank=rank,
            namespace=namespace_of(_identity(facts, group, rank)),
            layout=BlockLayout(group.block_tokens, len(group.layer_names), group.layer_bytes),
            window_tokens=group.window_tokens,
            layer_names=group.layer_names,
            is_shared=group.is_shared,
            label=f"vllm {facts.name} group {group.number} rank {rank}",
            model=facts.size,
        )
        for group in facts.groups
        for rank in range(1 if group.is_shared else facts.ranks)
    )


def _identity(facts: EngineFacts, group: GroupFacts, rank: int) -> KVIdentity:
    return KVIdentity(
        model=facts.architecture,
        weights_digest=facts.weights_digest,
        kv_dtype=facts.kv_dtype,
        layout=facts.layout,
        block_tokens=group.block_tokens,
        layers=len(group.layer_names),
        kv_heads_per_rank=group.heads,
        head_size=group.head_size,
        quantization=facts.quantization,
        positions=_positions(facts),
        attention=facts.attention,
        kv_group=f"{group.kind}:{group.window_tokens} {' '.join(group.layer_names)}",
        tp_size=1 if group.is_shared else facts.ranks,
        tp_rank_first=rank,
        tenant_salt=facts.tenant_salt,
        extra=(
            ("config", _config_digest(facts.config)),
            ("compute", facts.dtype),
            ("variant", facts.variant),
            *facts.versions,
        ),
    )


def _config_digest(config: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in config.items() if key not in NAMES_ONLY}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _positions(facts: EngineFacts) -> str:
    """With some kinds of RoPE the engine's maximal length decides what keys look like."""
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    text = json.dumps(
        {name: facts.config[name] for name in names if facts.config.get(name) is not None},
        sort_keys=True,
        default=str,
    )
    if any(kind in text for kind in LENGTH_DEPENDENT_ROPE):
        text += f" up to {facts.model_length}"
    return text


def weights_digest_of(model: str, given: str) -> str:
    """Raises Refused when there are no weight files to read and no digest was given."""
    if given:
        return given
    folder = Path(model)
    if not folder.is_dir():
        folder = _snapshot(model)
    digest = files_digest(folder, WEIGHT_SUFFIXES)
    if not digest:
        raise Refused(
            f"{folder} holds no weight files to name the model by; set weights_digest in "
            "kv_connector_extra_config to something that changes with the weights"
        )
    return digest


def _snapshot(model: str) -> Path:
    """Where the hub's cache keeps a model that was given by name."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError) as error:
        raise Refused(
            f"the files of {model!r} are not on this machine ({error}); set weights_digest in "
            "kv_connector_extra_config"
        ) from error


def files_digest(folder: Path, suffixes: Iterable[str]) -> str:
    """Hex digest of the files' names, sizes and contents; "" when there are none."""
    wanted = tuple(suffixes)
    paths = sorted(path for path in folder.iterdir() if path.name.endswith(wanted))
    sizes = [path.stat().st_size for path in paths]
    if not paths:
        return ""
    whole = sum(sizes) <= FULL_BYTES_MAX
    digest = hashlib.blake2b(digest_size=16, person=b"vllm-files")
    for path, size in zip(paths, sizes, strict=True):
        digest.update(f"{path.name} {size} ".encode() + _content(path, size, whole))
    return digest.hexdigest()


def _content(path: Path, size: int, whole: bool) -> bytes:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        if whole or size <= SAMPLE_PIECES * SAMPLE_PIECE_BYTES:
            while piece := file.read(8 << 20):
                digest.update(piece)
            return digest.digest()
        for piece_number in range(SAMPLE_PIECES):
            file.seek((size - SAMPLE_PIECE_BYTES) * piece_number // (SAMPLE_PIECES - 1))
            digest.update(file.read(SAMPLE_PIECE_BYTES))
    return digest.digest()


class Adapters:
    """LoRAs by their content, as one engine knows them. Thread-safe."""

    def __init__(self) -> None:
        self._digests: dict[int, str] = {}
        """By vLLM's number; "": what it has there cannot be told any more."""

    def digest(self, lora: Any) -> str:
        """`lora`: vLLM's LoRARequest. vLLM keeps what it once loaded under a number, whatever
        becomes of the files, unless told `load_inplace`. Raises Refused when they cannot be read or
        are not what they were at first, and from then on."""
        number, digest = lora.lora_int_id, _adapter_content(Path(lora.lora_path))
        if lora.load_inplace:
            self._digests[number] = digest
        if digest and self._digests.setdefault(number, digest) == digest:
            return digest
        refused = Refused(
            f"adapter {lora.lora_name!r}: {lora.lora_path} cannot be read, or is not what vLLM "
            f"has as number {number}; load changed weights under a new number or with load_inplace"
        )
        if self._digests.get(number) != "":
            self._digests[number] = ""
            _log.warning("its requests pass by the store: %s", refused)
        raise refused


def _adapter_content(folder: Path) -> str:
    """ "" when there is nothing to read, or something is just being written."""
    try:
        marks = _marks(folder)
        digest = _known_digest(folder, marks)
        return digest if _marks(folder) == marks else ""
    except OSError:
        return ""


def _marks(folder: Path) -> tuple[tuple[str, int, int], ...]:
    return tuple(
        (path.name, path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(folder.iterdir())
        if path.name.endswith(ADAPTER_SUFFIXES)
    )


@lru_cache(maxsize=1024)
def _known_digest(folder: Path, marks: tuple[tuple[str, int, int], ...]) -> str:
    return files_digest(folder, ADAPTER_SUFFIXES)
