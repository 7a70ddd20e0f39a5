"""kvstore for Hugging Face transformers: one call, then `model.generate` as always.

    import engine_adapter.transformers as kv
    attached = kv.attach(model)                 # the default daemon; or a socket, or a KVClient
    model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=64)
    kv.detach(model)

Primitives: `attach`, `detach`, `Attached` (`last`, `statistics`, `flush`, `transfers`, `press`,
`paused`), `Refused`.

Generate is wrapped on the instance: the longest stored prefix of the prompt is restored into the
cache that the call works on, the rest is computed, and full blocks are stored afterwards on a
thread. Layer i of the suffix waits for layer i of the prefix only. The whole prefill is
provisional: it is thrown away and done again, without the prefix or with the part that did come,
when the load fails, is late, or was not the stored bytes in the end. Without a daemon everything
is a miss.

Exactness (`exact=True`, the default): generate prefills in chunks of `block_tokens`, only blocks
that were computed as one whole chunk are stored, and hits end on a chunk. Logits of a hit are then
bit-equal, in every dtype, to an uncached run with the same `prefill_chunk_size` and arithmetic
(processor capability, threads, versions: part of the identity), for a batch of one. A one-shot
prefill rounds differently by itself. `exact=False` stores everything, generated tokens and batches
too, and prefills as the caller says; a hit then equals a run whose cache never left the process.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from engine_adapter.accelerator import Accelerator
from engine_adapter.identity import Choices, ModelIdentity, rope_settings
from engine_adapter.loader import LoadFailed, LoadThreads
from engine_adapter.quantised import Scheme
from engine_adapter.refusal import Refused
from engine_adapter.saver import Saver
from engine_adapter.statistics import AdapterStatistics, RequestReport, Tally
from engine_adapter.transformers_cache import KVCache, ModelShape
from engine_adapter.transformers_modes import CACHE_NAMES, Plain, layer_windows, read_call
from engine_adapter.transformers_session import Session, Tools
from kvstore.client import KVClient, NamespaceHandle
from kvstore.client.inplace import press
from kvstore.costs import ModelSize
from kvstore.errors import KVStoreError
from kvstore.fingerprint import KVIdentity

__all__ = ["AdapterStatistics", "Attached", "Refused", "RequestReport", "attach", "detach"]

BLOCK_TOKENS_DEFAULT = 128
CLOSE_SECONDS = 2.0
DEADLINE_SECONDS_DEFAULT = 2.0
_MARK = "_kvstore_attached"


def attach(
    model: Any,
    client: KVClient | str | None = None,
    *,
    block_tokens: int = BLOCK_TOKENS_DEFAULT,
    exact: bool = True,
    plan: bool = True,
    tenant_salt: str = "",
    variant: str = "",
    deadline_seconds: float = DEADLINE_SECONDS_DEFAULT,
    accelerator: Accelerator | None = None,
    kv_dtype: Scheme | None = None,
) -> Attached:
    """Serve the prompts of `model.generate` from kvstore, and store what it computes.

    `client`: a KVClient (stays the caller's), a daemon's socket, or None: as `KVClient` finds it.
    `plan`: load only what is faster to load than to compute, as far as times are known; otherwise
    all that is stored. `tenant_salt`: only callers with the same salt share blocks. `variant`:
    names what the adapter cannot see and what changes KV (forward hooks, edits of a few weights).
    `deadline_seconds`: how long one prompt may wait for the store. `accelerator`: of a model on a
    CUDA device; opened here unless given (needs cupy). `kv_dtype`: "int8" or "fp8_e4m3" stores half
    the bytes; lossy, so only with `exact=False`; packed on the way out of a device, so only there
    (docs/gpu.md). A PeftModel is attached inside.
    Raises Refused for models whose KV cannot be restored, naming what is in the way, ConfigError
    for a device that cannot be used."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(model, _MARK, None) is not None:
        raise Refused("attach: this model is attached already; detach it first")
    choices = Choices(block_tokens, tenant_salt, variant, exact, kv_dtype)
    shape = probe(model)
    _check_packing(shape, choices, accelerator)
    opened = None
    if accelerator is None and shape.device.type == "cuda":
        accelerator = opened = Accelerator.open(shape.device)
    owned = not isinstance(client, KVClient)
    used = client if isinstance(client, KVClient) else KVClient(client)

    def close() -> None:
        if owned:
            used.close()
        if opened is not None:
            opened.transfers.close()

    try:
        attached = Attached(model, used, shape, choices, deadline_seconds, close, plan, accelerator)
    except KVStoreError:
        close()
        raise
    setattr(model, _MARK, attached)
    model.generate = attached.generate
    model._prefill = attached.prefill
    return attached


def detach(model: Any) -> None:
    """Undo `attach`; store what waits, for up to two seconds. No-op for a model that is not
    attached."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    attached = getattr(model, _MARK, None)
    if attached is not None:
        attached.detach()


def probe(model: Any) -> ModelShape:
    """What one token's forward pass shows of keys and values. Raises Refused."""
    if not all(hasattr(model, name) for name in ("generate", "_prefill", "config")):
        raise Refused(
            f"attach: {type(model).__name__} has no generate of transformers 5 (5.24 is tested)"
        )
    windows = layer_windows(model.config)
    rope_settings(model.config.get_text_config(decoder=True))
    if model.device.type not in ("cpu", "cuda"):
        raise Refused(f"attach: the model is on {model.device}; cpu and cuda are served")
    cache = KVCache(windows, 1)
    with torch.no_grad():
        ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        model(input_ids=ids, use_cache=True, **{cache_name(model): cache})
    shapes = [layer.shape for layer in cache.layers]
    for index, found in enumerate(shapes):
        if found is None or found != shapes[0]:
            raise Refused(
                f"attach: layer {index} keeps {found} (heads, key size, value size, dtype), "
                f"layer 0 {shapes[0]}: all layers must be alike"
            )
    assert shapes[0] is not None  # checked above
    devices = {layer.whole()[0].device for layer in cache.layers}
    if len(devices) > 1:
        raise Refused(f"attach: layers lie on {sorted(map(str, devices))}; one device is served")
    return ModelShape(windows, *shapes[0], devices.pop())


def _check_packing(shape: ModelShape, choices: Choices, accelerator: Accelerator | None) -> None:
    """Raises InvalidRequest for 8-bit KV where it cannot be, by name."""
    scheme = choices.scheme
    shape.tensors(choices.block_tokens, scheme)
    if scheme is not None and choices.exact:
        raise Refused(
            f"attach: {scheme} is lossy, so that no hit can equal an uncached run bit by bit; "
            "say exact=False as well"
        )
    if scheme is not None and accelerator is None and shape.device.type != "cuda":
        raise Refused(f"attach: {scheme} is packed by a GPU; this model is on {shape.device}")


def cache_name(model: Any) -> str:
    """What this model's forward calls its cache."""
    known = inspect.signature(model.forward).parameters
    for name in CACHE_NAMES:
        if name in known:
            return name
    raise Refused(f"attach: {type(model).__name__}.forward takes no cache")


def _size_of(model: Any) -> ModelSize:
    """What a token's work depends on; looking an embedding up is none."""
    embedded = sum(weight.numel() for weight in model.get_input_embeddings().parameters())
    parameters = sum(weight.numel() for weight in model.base_model.parameters()) - embedded
    text = model.config.get_text_config(decoder=True)
    return ModelSize(float(max(parameters, 1)), text.num_hidden_layers, text.hidden_size)


class Attached:
    """One model's tie to the store. Thread-safe as far as the model's generate is."""

    def __init__(
        self,
        model: Any,
        client: KVClient,
        shape: ModelShape,
        choices: Choices,
        deadline_seconds: float,
        close: Callable[[], None],
        is_planned: bool,
        accelerator: Accelerator | None,
    ) -> None:
        self.model = model
        self.client = client
        self.choices = choices
        self.last = RequestReport()
        """Of the latest call."""
        self._shape = shape
        self._cache_name = cache_name(model)
        self._size = _size_of(model)
        self._close = close
        self._tally = Tally()
        self._identity = ModelIdentity(model, shape, choices)
        self._identity.current()
        self._known: tuple[KVIdentity, NamespaceHandle] | None = None
        self._here = threading.local()
        self._threads = LoadThreads()
        self._saver = Saver(self._tally)
        self._tools = Tools(
            shape,
            shape.tensors(choices.block_tokens, choices.scheme),
            choices.block_tokens if choices.exact else 0,
            is_planned,
            deadline_seconds,
            self._threads,
            self._saver,
            self._tally,
            accelerator,
        )
        self._plain_generate = model.generate
        self._plain_prefill = model._prefill
        self._parameters = tuple(inspect.signature(model.generate).parameters)
        handle = self.namespace()
        if accelerator is not None:
            accelerator.introduce(handle)

    # ------------------------------------------------------------------ what users call

    def namespace(self) -> NamespaceHandle:
        """The handle of the model as it is now. Raises NamespaceConflict, InvalidRequest."""
        identity = self._identity.current()
        known = self._known
        if known is None or known[0] is not identity:
            handle = self.client.namespace(
                identity,
                self._tools.tensors.block_layout,
                label=f"transformers {type(self.model).__name__}",
                model=self._size,
            )
            self._known = known = (identity, handle)
        return known[1]

    def statistics(self) -> AdapterStatistics:
        """A snapshot of the counters."""
        return self._tally.snapshot()

    def flush(self, timeout: float | None = 30.0) -> bool:
        """Whether all that was computed so far is stored or refused, waiting up to `timeout`
        seconds."""
        return self._saver.wait_idle(timeout)

    def transfers(self) -> dict[str, object]:
        """On a device, what the transfer engine did and measured: bytes by way, which mechanism
        moves what, how much of the arena is pinned and why not more. Empty on the CPU."""
        accelerator = self._tools.accelerator
        return {} if accelerator is None else accelerator.transfers.describe()

    def press(self, device_bytes: int) -> None:
        """Ask the daemon's GPU tier for so much device memory back, in all; it comes within
        seconds and stays away until another number is told (0: none)."""
        press(self.namespace(), device_bytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """This thread's calls of generate go on without the store."""
        before, self._here.is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._here.is_paused = before

    @property
    def _is_paused(self) -> bool:
        return getattr(self._here, "is_paused", False)

    def detach(self) -> None:
        """Give the model its own generate back. Idempotent."""
        if getattr(self.model, _MARK, None) is not self:
            return
        del self.model.generate, self.model._prefill
        delattr(self.model, _MARK)
        self._saver.close(CLOSE_SECONDS)
        self._threads.close()
        self._close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __deepcopy__(self, memo: object) -> Attached:
        raise Refused("an attached model cannot be copied: detach it, copy, attach again")

    def __reduce__(self) -> str:
        raise Refused("an attached model cannot be pickled: detach it first")

    # ------------------------------------------------------------------ what the model calls

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's generate; same arguments, same results."""
        if self._is_paused:
            return self._plain_generate(*args, **kwargs)
        began, cpu = time.perf_counter(), time.thread_time()
        arguments = dict(zip(self._parameters, args, strict=False)) | kwargs
        chunk = self._tools.chunk
        prompt = read_call(self.model, arguments, chunk)
        report = self.last = RequestReport()
        if isinstance(prompt, Plain):
            report.plain_reason = prompt.reason
            self._tally.request(report)
            return self._plain_generate(*args, **kwargs)
        session = Session(self._tools, self._handle(report), prompt, report, began)
        for name in CACHE_NAMES:
            arguments.pop(name, None)
        arguments[self._cache_name] = session.open()
        if chunk and prompt.cache is None:
            arguments["prefill_chunk_size"] = chunk
        self._tally.add(hook_cpu_seconds=time.thread_time() - cpu)
        try:
            output = self._plain_generate(**arguments)
        finally:
            session.close()
        session.save_decoded(output)
        return output

    def _handle(self, report: RequestReport) -> NamespaceHandle | None:
        try:
            handle = self.namespace()
            if self._tools.accelerator is not None:
                self._tools.accelerator.attend(handle)
            return handle
        except KVStoreError as error:
            report.miss_reason = f"{type(error).__name__}: {error}"
            return None

    def prefill(
        self,
        input_ids: torch.Tensor,
        generation_config: Any,
        model_kwargs: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        """The model's prefill, repeated until what it was computed from is confirmed."""
        cache = model_kwargs.get(self._cache_name)
        session = cache.session if isinstance(cache, KVCache) else None
        if not isinstance(session, Session):
            return self._plain_prefill(input_ids, generation_config, model_kwargs, *args, **kw)
        while True:
            # A chunked prefill that fails leaves its arguments changed.
            attempt = dict(model_kwargs)
            try:
                session.meet(partial(self._compute, input_ids, model_kwargs))
                began = time.perf_counter()
                outputs = self._plain_prefill(input_ids, generation_config, attempt, *args, **kw)
                if self._tools.accelerator is not None:
                    self._tools.accelerator.computed()
            except LoadFailed as error:
                reason = str(error)
            else:
                seconds = time.perf_counter() - began
                reason = session.confirm()
            if not reason:
                break
            session.fall_back(reason)
        model_kwargs.clear()
        model_kwargs.update(attempt)
        session.prefilled(input_ids, seconds)
        return outputs

    def _compute(self, ids: torch.Tensor, model_kwargs: Any, start: int, end: int) -> None:
        """Tokens [start, end) of a prompt into the cache, as a prefill chunk of generate; no
        logits."""
        given = dict(model_kwargs)
        for name in ("attention_mask", "position_ids"):
            if given.get(name) is not None:
                given[name] = given[name][..., 0 if name == "attention_mask" else start : end]
        inputs = self.model.prepare_inputs_for_generation(
            ids[:, start:end], is_first_iteration=True, **given
        )
        inputs.pop("logits_to_keep", None)
        self.model.base_model(**inputs, return_dict=True)
