"""kvstore below vLLM's own offloading: vLLM keeps blocks in host memory, kvstore what leaves it.

Primitives: `KVStoreTier`, named among `secondary_tiers` with
`"type": "KVStoreTier", "module_path": "engine_adapter.vllm_tier"`; see docs/vllm.md.

The smaller of two doors: no worker code and no layout code, but blocks lie twice in memory, and
opaque keys (vLLM's block hashes) name no prefixes. All methods run in the scheduler's process; none
waits for the daemon.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar

import numpy as np
import vllm
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from engine_adapter.vllm_identity import weights_digest_of
from kvstore.client import KVClient, NamespaceHandle
from kvstore.errors import KVStoreError
from kvstore.fingerprint import KVIdentity, namespace_of
from kvstore.layout import BlockLayout
from kvstore.types import BlockStatus, NamespaceKind

JOB_THREADS = 2
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


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """A chunk of vLLM's primary tier is a block here. Raises Refused without a name for the
    weights."""

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
        weights_digest: str = "",
        deadline_seconds: float = 2.0,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        self._deadline_seconds = deadline_seconds
        self._client = KVClient(socket or None, deadline_seconds=deadline_seconds)
        config = offloading_spec.config
        tokens = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
        identity = _identity(config, tokens, self._rows.shape[1], weights_digest, tenant_salt)
        self._handle = self._client.namespace(
            namespace_of(identity),
            BlockLayout(tokens, 1, self._rows.shape[1]),
            kind=NamespaceKind.FLAT,
            label="vllm tier",
        )
        self._presence = _Presence(tier_type, self._handle)
        self._pool = ThreadPoolExecutor(JOB_THREADS, "kvstore-tier")
        self._jobs: list[Future[JobResult]] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._presence.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._jobs.append(self._pool.submit(self._store, job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._jobs.append(self._pool.submit(self._load, job_metadata))

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
        done = [job for job in self._jobs if job.done()]
        if done:
            self._jobs = [job for job in self._jobs if job not in done]
        return [job.result() for job in done]

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


def _identity(
    config: Any, tokens: int, chunk_bytes: int, weights_digest: str, salt: str
) -> KVIdentity:
    groups = " ".join(
        f"{group.group_id}:{group.tokens_per_block}:{','.join(group.layer_names)}"
        for group in config.groups
    )
    parallel = config.parallel
    return KVIdentity(
        model=config.model.name.rsplit("/", 1)[-1],
        weights_digest=weights_digest_of(config.model.name, weights_digest),
        kv_dtype=config.model.dtype,
        layout=f"vllm offload {config.kv_cache_layout} {chunk_bytes}",
        block_tokens=tokens,
        layers=1,
        kv_heads_per_rank=0,
        head_size=0,
        kind=NamespaceKind.FLAT,
        kv_group=groups,
        tp_size=parallel.tp_size,
        tp_ranks_local=parallel.world_size,
        tenant_salt=salt,
        extra=(("vllm", vllm.__version__), ("hash", str(config.cache.tokens_per_hash))),
    )
