"""kvstore below vLLM's own offloading: vLLM keeps blocks in host memory, kvstore what leaves it.

Primitives:
  `KVStoreOffloadingConnector`   vLLM's `OffloadingConnector`, for the sake of the tier's identity
  `KVStoreTier`                  named among its `secondary_tiers`; see docs/vllm.md

The smaller of two doors: no worker code and no layout code, but blocks lie twice in memory, and
opaque keys (vLLM's block hashes) name no prefixes. All methods run in the scheduler's process; none
waits for the daemon.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from typing import Any, ClassVar

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from engine_adapter.refusal import Refused
from engine_adapter.vllm import read_facts
from engine_adapter.vllm_identity import lanes_of
from engine_adapter.vllm_settings import Settings, settings_from
from kvstore.client import KVClient, NamespaceHandle
from kvstore.errors import KVStoreError
from kvstore.fingerprint import KVIdentity, namespace_of
from kvstore.layout import BlockLayout
from kvstore.types import BlockStatus, NamespaceKind

JOB_THREADS = 2
_ENGINE: ContextVar[tuple[VllmConfig, KVCacheConfig] | None] = ContextVar("engine", default=None)
"""Of the connector that is being made."""
_STORED = (BlockStatus.STORED, BlockStatus.WAITING, BlockStatus.PRESENT)


class _Presence(AsyncLookupManager):  # type: ignore[misc]
    """Asks on a thread of its own whether the store has chunks."""

    def __init__(self, tier_type: str, handle: NamespaceHandle) -> None:
        self._handle = handle
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        try:
            found: list[bool] = (self._handle.exists(self._handle.keys(keys)).tiers != 0).tolist()
        except KVStoreError:
            return [False] * len(keys)
        return found


class KVStoreOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's, which tells its tiers too little of the model to name a block's bytes by."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        token = _ENGINE.set((vllm_config, kv_cache_config))
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            _ENGINE.reset(token)


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """A chunk of vLLM's primary tier is a block here. Raises Refused for what could be silently
    wrong."""

    medium: ClassVar[Medium] = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        socket: str = "",
        tenant_salt: str = "",
        variant: str = "",
        weights_digest: str = "",
        deadline_seconds: float = 2.0,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        self._deadline_seconds = deadline_seconds
        settings = settings_from(
            {"tenant_salt": tenant_salt, "variant": variant, "weights_digest": weights_digest}
        )
        identity = _identity(offloading_spec.config, self._rows.shape[1], settings)
        self._client = KVClient(socket or None, deadline_seconds=deadline_seconds)
        self._handle = self._client.namespace(
            namespace_of(identity),
            BlockLayout(identity.block_tokens, 1, self._rows.shape[1]),
            kind=NamespaceKind.FLAT,
            label="vllm tier",
        )
        self._presence = _Presence(tier_type, self._handle)
        self._pool = ThreadPoolExecutor(JOB_THREADS, "kvstore-tier")
        self._jobs: dict[Future[JobResult], Sequence[OffloadKey]] = {}
        """With what they load."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._presence.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._jobs[self._pool.submit(self._store, job_metadata)] = ()

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._jobs[self._pool.submit(self._load, job_metadata)] = tuple(job_metadata.keys)

    def _store(self, job: TransferJob) -> JobResult:
        """vLLM's slots are free again once the job is reported: all was copied by then."""
        began, keys = time.monotonic(), list(job.keys)
        rows = [self._rows[chunk] for chunk in job.chunk_ids]
        ticket = self._handle.store(self._handle.keys(keys), rows)
        try:
            statuses = ticket.result(2 * self._deadline_seconds)
        except TimeoutError:
            statuses = ()
        is_stored = len(statuses) == len(keys) and all(one in _STORED for one in statuses)
        return self._result(job, is_stored, None, began)

    def _load(self, job: TransferJob) -> JobResult:
        began, keys = time.monotonic(), list(job.keys)
        rows = [self._rows[chunk] for chunk in job.chunk_ids]
        loaded = self._handle.load(
            self._handle.keys(keys), rows, deadline_seconds=self._deadline_seconds
        ).blocks
        return self._result(job, loaded == len(keys), keys[:loaded], began)

    def _result(
        self, job: TransferJob, success: bool, loaded: Collection[OffloadKey] | None, began: float
    ) -> JobResult:
        return JobResult(
            job_id=job.job_id,
            success=success,
            successful_keys=None if success else loaded,
            transfer_time=time.monotonic() - began,
            transfer_bytes=len(job.keys) * self._rows.shape[1],
        )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """What was found and did not come is a miss from now on: an answer is kept as long as a
        request asks, and vLLM would have the same load tried without end."""
        results = []
        for job in [job for job in self._jobs if job.done()]:
            keys, result = self._jobs.pop(job), job.result()
            if not result.success:
                self._presence.mark_miss(keys[len(result.successful_keys or ()) :])
            results.append(result)
        return results

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._presence.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._presence.flush()

    def drain_jobs(self) -> None:
        """Every job has a deadline of its own."""
        wait(self._jobs)

    def shutdown(self) -> None:
        self._presence.shutdown()
        self._pool.shutdown(wait=True)
        self._client.close()


def _identity(config: Any, chunk_bytes: int, settings: Settings) -> KVIdentity:
    """`config`: vLLM's, as far as its tiers are told. What else shapes blocks is what shapes the
    connector's. Raises Refused for what it refuses, and for adapters."""
    if (engine := _ENGINE.get()) is None:
        raise Refused(
            "KVStoreTier cannot see the model's configuration below vLLM's own connector; set "
            '"kv_connector": "KVStoreOffloadingConnector" and '
            '"kv_connector_module_path": "engine_adapter.vllm_tier"'
        )
    vllm_config, kv_cache_config = engine
    if vllm_config.lora_config is not None:
        raise Refused(
            "KVStoreTier does not support LoRA: vLLM's names of blocks tell where an adapter lies, "
            "not what it contains; turn it off, or use KVStoreConnector"
        )
    facts = read_facts(vllm_config, kv_cache_config, settings)
    parallel, cache = config.parallel, config.cache
    hashes = f"{vllm_config.cache_config.prefix_caching_hash_algo} {cache.tokens_per_hash}"
    return KVIdentity(
        model=facts.architecture,
        weights_digest=facts.weights_digest,
        kv_dtype=config.model.dtype,
        layout=f"vllm offload {config.kv_cache_layout} {chunk_bytes} "
        f"{config.canonical_layout} {config.replicated_layout}",
        block_tokens=config.groups[0].tokens_per_block * cache.blocks_per_chunk,
        layers=1,
        kv_heads_per_rank=0,
        head_size=0,
        kind=NamespaceKind.FLAT,
        tp_size=parallel.tp_size,
        tp_ranks_local=parallel.world_size,
        tenant_salt=settings.tenant_salt,
        extra=(
            ("lanes", " ".join(lane.namespace.hex() for lane in lanes_of(facts))),
            ("hash", hashes),
        ),
    )
