"""vLLM's own offloading, with its host tier, on a machine without a GPU: a peer to measure against.

Primitives: `HostSpec`, named in `kv_connector_extra_config`. Scheduler half, manager and policy are
vLLM's; only the copy, which vLLM ships for GPUs alone, is made here, at once and with one call a
layer.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """Blocks of one token count everywhere: a chunk is a block."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        return HostWorker(kv_caches, self.num_chunks)


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies when it is asked to."""

    def __init__(self, caches: Any, chunks: int) -> None:
        self._caches = caches
        self._blocks = [tensor.tensor for tensor in caches.tensors]
        self._host = [torch.empty((chunks, *t.shape[1:]), dtype=t.dtype) for t in self._blocks]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, dst_spec, src_spec, is_store=False)

    def _move(self, job_id: int, blocks: Any, chunks: Any, is_store: bool) -> bool:
        began, moved, start = time.perf_counter(), 0, 0
        for group, size in enumerate(blocks.group_sizes):
            at = slice(start, start + size)
            block = torch.from_numpy(blocks.block_ids[at]).long()
            chunk = torch.from_numpy(chunks.block_ids[at]).long()
            start += size
            for index in {ref.tensor_idx for ref in self._caches.group_data_refs[group]}:
                if is_store:
                    self._host[index][chunk] = self._blocks[index][block]
                else:
                    self._blocks[index][block] = self._host[index][chunk]
                moved += self._host[index][0].nbytes * size
        self._done.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=moved,
                transfer_time=time.perf_counter() - began,
            )
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""
