"""vLLM's `TieringOffloadingSpec` with one part exchanged: copies between the KV cache and the CPU tier.

vLLM's own worker copies with CUDA streams and refuses to start without a GPU. This one copies with torch, in the same places of
the same shared memory; scheduler, connector, tiering manager and tiers are vLLM's.
"""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies at once."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region, self._per_chunk = region, blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._gpu = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        # A row of the CPU tier as blocks of one tensor.
        self._cpu = []
        for tensor in kv_caches.tensors:
            rows = region.create_next_worker_view(tensor.page_size_bytes * blocks_per_chunk)
            self._cpu.append(rows.unflatten(1, (blocks_per_chunk, tensor.page_size_bytes)))
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        self._cpu.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, gpu: GPULoadStoreSpec, cpu: LoadStoreSpec, is_store: bool) -> bool:
        assert isinstance(cpu, BlockIDsLoadStoreSpec)
        blocks, chunks, moved = iter(gpu.block_ids.tolist()), iter(cpu.block_ids.tolist()), 0
        for refs, size, first in zip(self._groups, gpu.group_sizes, gpu.block_indices):
            chunk = -1
            for place in range(first, first + size):
                if chunk < 0 or place % self._per_chunk == 0:
                    chunk = next(chunks)
                block = next(blocks)
                for ref in refs:
                    page = slice(0, ref.page_size_bytes)
                    on_gpu = self._gpu[ref.tensor_idx][block, page]
                    on_cpu = self._cpu[ref.tensor_idx][chunk, place % self._per_chunk, page]
                    source, target = (on_gpu, on_cpu) if is_store else (on_cpu, on_gpu)
                    target.copy_(source)
                    moved += ref.page_size_bytes
        assert next(blocks, None) is None and next(chunks, None) is None
        self._finished.append(TransferResult(job_id, True, moved, 1e-6))
        return True


class CopyingTieringSpec(TieringOffloadingSpec):
    """As configured with `spec_name` and `spec_module_path`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
