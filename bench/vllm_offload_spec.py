"""vLLM's own offloading, with its host tier, on a machine without a GPU: a peer to measure against.

Primitives: `HostSpec`, and `TieredSpec` for tiers below it, named in `kv_connector_extra_config`.
Scheduler half, managers and policies are vLLM's; only the copy, which vLLM ships for GPUs alone, is
made here, at once and with one call a layer.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """A chunk is a block; chunks in private memory."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        rows = torch.empty((self.num_chunks, self.kv_bytes_per_chunk), dtype=torch.int8)
        return HostWorker(kv_caches, rows)


class TieredSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """As `HostSpec`, chunks in the memory that vLLM shares with its secondary tiers."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        shared = np.memmap(region.mmap_path, np.int8, "r+")
        rows = torch.from_numpy(shared.reshape(self.num_chunks, self.kv_bytes_per_chunk))
        return HostWorker(kv_caches, rows, region)


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies when it is asked to. `rows`: int8 [chunks, bytes of a chunk]."""

    def __init__(self, caches: Any, rows: torch.Tensor, region: Any = None) -> None:
        self._groups = caches.group_data_refs
        self._blocks = [tensor.tensor.view(torch.int8).flatten(1) for tensor in caches.tensors]
        self._region = region
        self._hosts, start = [], 0
        for blocks in self._blocks:
            self._hosts.append(rows[:, start : start + blocks.shape[1]])
            start += blocks.shape[1]
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
            for index in {ref.tensor_idx for ref in self._groups[group]}:
                if is_store:
                    self._hosts[index][chunk] = self._blocks[index][block]
                else:
                    self._blocks[index][block] = self._hosts[index][chunk]
                moved += self._hosts[index].shape[1] * size
        result = TransferResult(
            job_id=job_id,
            success=True,
            transfer_size=moved,
            transfer_time=time.perf_counter() - began,
        )
        self._done.append(result)
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        if self._region is not None:
            self._region.cleanup()
