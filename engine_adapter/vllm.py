"""kvstore for vLLM: `--kv-transfer-config` with `kv_connector_module_path="engine_adapter.vllm"`.

Primitives:
  `KVStoreConnector`   vLLM's connector interface, handed on to `SchedulerSide` and `WorkerSide`
  `read_facts`         vLLM's configuration as plain values; refuses by name what is not supported

The only module besides `vllm_tier` that imports vLLM; decides nothing by itself. Written for the
versions in VERSIONS; see docs/vllm.md.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from engine_adapter.refusal import Refused
from engine_adapter.vllm_hold import HeldBlocks
from engine_adapter.vllm_identity import (
    Adapters,
    EngineFacts,
    group_facts,
    lanes_of,
    refuse_unsupported,
    size_of,
    weights_digest_of,
)
from engine_adapter.vllm_orders import StepOrders, WorkerReport
from engine_adapter.vllm_scheduler import SchedulerSide
from engine_adapter.vllm_settings import Settings, settings_from
from engine_adapter.vllm_statistics import COUNTERS, added
from engine_adapter.vllm_target import content_order
from engine_adapter.vllm_worker import WorkerSide
from kvstore.client import KVClient

VERSIONS = ("0.32.",)
"""Beginnings of vLLM versions whose connector interface this was proven on."""
ATTACH_SECONDS = 2.0
"""An engine waits so long for the daemon when it starts; later it attaches by itself."""

_log = logging.getLogger("vllm.kvstore")


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's orders, scheduler to workers."""

    orders: StepOrders


@dataclass
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What came of them, workers to scheduler."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return Report(self.report.merge(other.report))


@dataclass
class Stats(KVConnectorStats):  # type: ignore[misc]
    """`data`: amounts by the names in COUNTERS."""

    data: dict[str, float] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return Stats(added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return {name: round(amount, 6) for name, amount in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One Prometheus counter `vllm:kvstore_<name>` a counter."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        labels = arguments[2]
        self._counters: dict[tuple[str, int], Any] = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(f"vllm:kvstore_{name}", text, labelnames=labels)
            for engine, values in self.per_engine_labelvalues.items():
                self._counters[name, engine] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            if (name, engine_idx) in self._counters:
                self._counters[name, engine_idx].inc(amount)


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Made by vLLM, once a role. Raises Refused for what could be silently wrong."""

    scheduler: SchedulerSide
    """Only in the scheduler's role, as `worker` in the other: vLLM calls a role's own hooks."""
    worker: WorkerSide
    _side: SchedulerSide | WorkerSide
    _handled: BaseException | None
    """What whoever runs the engine is just handling, from a step's begin on."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = settings_from(transfer.kv_connector_extra_config)
        if transfer.kv_load_failure_policy != "recompute":
            _log.warning(
                "kv_load_failure_policy is %r: a block that cannot be loaded ends its request; "
                'set "recompute"',
                transfer.kv_load_failure_policy,
            )
        self._groups = len(kv_cache_config.kv_cache_groups)
        self._was_reset = False
        self._tables: dict[str, Any] = {}
        """Block ids a KV group of all requests in the last step that loads within its pass."""
        self._held: HeldBlocks | None = None
        """On a GPU blocks are saved from where they lie."""
        lanes = lanes_of(read_facts(vllm_config, kv_cache_config, settings))
        client = KVClient(
            settings.socket or None,
            engine=f"vllm-{transfer.engine_id}",
            deadline_seconds=max(settings.lookup_seconds, 2.0),
        )
        if not client.wait_connected(ATTACH_SECONDS):
            _log.warning("kvstore: no daemon yet (%s); everything is a miss", client.away_reason)
        if role is KVConnectorRole.SCHEDULER:
            events = vllm_config.kv_events_config
            self._side = self.scheduler = SchedulerSide(
                client,
                lanes,
                settings,
                adapter_digest=Adapters().digest,
                step_tokens_max=vllm_config.scheduler_config.max_num_batched_tokens,
                may_load=transfer.is_kv_consumer,
                may_save=transfer.is_kv_producer,
                may_layerwise=self._groups == 1
                and vllm_config.max_concurrent_batches == 1
                # One rank's failed load spoils what the others compute, and they do not know.
                and vllm_config.parallel_config.world_size == 1
                and settings.layerwise in _layerwise_settings(),
                has_overlap=vllm_config.max_concurrent_batches > 1,
                wants_events=bool(events and events.enable_kv_cache_events),
            )
        else:
            rank = vllm_config.parallel_config.rank % max(
                vllm_config.parallel_config.tensor_parallel_size, 1
            )
            self._side = self.worker = WorkerSide(client, lanes, rank, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not handed on is computed again."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Hooks inside the forward pass are skipped in full graphs, which GPUs should not lose for
        loads that only somebody who asks for them gets."""
        return settings_from(extra_config).layerwise in _layerwise_settings()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """On GPUs a block's layers side by side: one long copy. vLLM takes another one where the
        attention backend cannot; a block size given by hand may be split, which this layout
        forbids."""
        is_plain = not vllm_config.cache_config.user_specified_block_size
        return "BLNHC" if current_platform.is_cuda() and is_plain else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KVConnectorPromMetrics:
        return PromMetrics(*arguments)

    # ------------------------------------------------------------------ scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._kv_cache_manager = kv_cache_manager
        if current_platform.is_cuda():
            self._held = HeldBlocks(kv_cache_manager.block_pool)

    def has_pending_push_work(self) -> bool:
        """Steps go on until held blocks are free."""
        return bool(self._held)

    def has_pending_block_frees(self) -> bool:
        return self._held is not None and self._held.will_free

    def on_new_request(self, request: Any) -> None:
        self.scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        block_ids = blocks.get_block_ids() if num_external_tokens else ()
        self.scheduler.allocated(request, block_ids, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_tokens: int) -> dict[Any, int]:
        host, disk = self.scheduler.sources(request.request_id, num_tokens)
        return {CacheHitSource.HOST: host, CacheHitSource.DISK: disk}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        scheduled = scheduler_output.num_scheduled_tokens
        state = scheduler_output.kv_connector_block_state
        # Tables of new requests were made for the workers; others' are made here, where needed.
        made = {new.req_id: new.block_ids for new in scheduler_output.scheduled_new_reqs}

        def block_ids_of(request_id: str) -> Any:
            return made.get(request_id) or state.get_block_ids(request_id)

        orders = self.scheduler.step_orders(
            scheduled, scheduler_output.preempted_req_ids or (), block_ids_of
        )
        has_layerwise = any(order.is_layerwise for order in orders.loads)
        self._tables = {one: block_ids_of(one) for one in scheduled} if has_layerwise else {}
        if self._held is not None and orders.saves:
            self._held.take(orders.saves)
        return Metadata(orders)

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.invalid_block_ids:
            self._evict(connector_output.invalid_block_ids)
        meta = connector_output.kv_connector_worker_meta
        report = None if meta is None else meta.report
        if self._held is not None and report is not None:
            self._held.release(report.copied)
        self.scheduler.step_ended(report, connector_output.finished_recving or ())

    def _evict(self, bad: set[int]) -> None:
        """vLLM keeps bad blocks, and what was computed from them, in its prefix cache until they
        are computed again, by the first request that shares them and in steps of its own. After an
        abort others would find them there: nobody keeps them, everybody computes them. By the
        step's tables, as a request aborted during it has none any more."""
        for request_id, (ids,) in self._tables.items():
            first = next((at for at, block in enumerate(ids) if block in bad), None)
            if first is not None:
                self._kv_cache_manager.evict_blocks(set(ids[first:]))
                self.scheduler.rewind(request_id, first)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request.request_id)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        if self._was_reset:
            self._was_reset = False
            yield AllBlocksCleared()
        for request, lane, first, order, stored in self.scheduler.take_stored():
            yield _stored_event(self._vllm_config, request, lane, first, order, stored)

    def reset_cache(self) -> bool:
        self._was_reset = True
        return self.scheduler.reset()

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        cache = self._kv_cache_config
        self.worker.register(kv_caches, cache.num_blocks, cache.kv_cache_layout or "LBHNC")

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._handled = sys.exc_info()[1]
        self.worker.begin(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, after the forward pass."""

    def wait_for_save(self) -> None:
        # vLLM calls it in a `finally`: a signal or an error may have ended the forward pass early.
        self.worker.end_forward(is_broken=sys.exc_info()[1] is not self._handled)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received = self.worker.received()
        failed = self.worker.failed()
        # With one group the scheduler is told by block, and keeps what came before the bad ones.
        return KVConnectorTransferResults(
            finished_recving=received, failed_recving=failed if self._groups > 1 else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad = self.worker.bad_block_ids()
        return bad if self._groups == 1 else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self.worker.report()
        return None if report is None else Report(report)

    # ------------------------------------------------------------------ both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        data = self._side.counts.take()
        return Stats(data) if data else None

    def shutdown(self) -> None:
        self._side.close()


def _stored_event(
    config: VllmConfig, request: Any, lane: Any, first: int, order: Any, stored: int
) -> KVCacheEvent:
    """Blocks that are found in the host tier from now on."""
    step = lane.block_tokens // (config.cache_config.block_size or lane.block_tokens) or 1
    hashes = request.block_hashes
    chosen = [hashes[(block + 1) * step - 1] for block in range(first, first + stored)]
    tokens = request.all_token_ids[first * lane.block_tokens : (first + stored) * lane.block_tokens]
    lora = request.lora_request
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(value) for value in chosen],
        parent_block_hash=maybe_convert_block_hash(hashes[first * step - 1]) if first else None,
        token_ids=list(tokens),
        block_size=lane.block_tokens,
        lora_id=lora.adapter_id if lora else None,
        medium=MEDIUM_CPU,
        lora_name=lora.name if lora else None,
        group_idx=lane.group,
    )


def read_facts(config: VllmConfig, cache: KVCacheConfig, settings: Settings) -> EngineFacts:
    """Raises Refused, naming what is not supported and the way out."""
    if not vllm.__version__.startswith(VERSIONS):
        raise Refused(
            f"vLLM {vllm.__version__}: this connector was proven on {', '.join(VERSIONS)}* only"
        )
    refuse_unsupported(
        config,
        current_platform.device_name,
        is_known=current_platform.is_cpu() or current_platform.is_cuda(),
    )
    model, parallel = config.model_config, config.parallel_config
    return EngineFacts(
        architecture=" ".join(model.hf_config.architectures or ()),
        config=model.hf_config.to_dict(),
        weights_digest=weights_digest_of(model.model, settings.weights_digest),
        model_length=model.max_model_len,
        dtype=str(model.dtype),
        kv_dtype=str(config.cache_config.cache_dtype),
        quantization=str(model.quantization or ""),
        layout=_layout(cache.kv_cache_layout or "LBHNC"),
        attention=str(config.attention_config.backend or "default"),
        versions=(("vllm", vllm.__version__), ("torch", torch.__version__)),
        ranks=parallel.tensor_parallel_size,
        groups=tuple(group_facts(*numbered) for numbered in enumerate(cache.kv_cache_groups)),
        tenant_salt=settings.tenant_salt,
        variant=settings.variant,
        name=Path(model.model).name,
        size=size_of(model.get_total_num_hidden_layers(), model.get_hidden_size()),
    )


def _layerwise_settings() -> tuple[str, ...]:
    """Values of `layerwise` that may bring loads inside a forward pass."""
    return ("always",) if current_platform.is_cuda() else ("auto", "always")


def _layout(name: str) -> str:
    """What the inside of a block looks like, as far as names must tell it apart."""
    if current_platform.is_cuda():
        capability = current_platform.get_device_capability() or ()
        return f"{content_order(name)} cuda {'.'.join(map(str, capability))}"
    return f"{name} {torch.backends.cpu.get_cpu_capability()}"
