"""vLLM's tiered offloading with a worker that runs on a CPU, where vLLM's own refuses: its tiers, policies and host
memory are vLLM's, the copies are kvpool's."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvpool
from kvpool.integrations.options import VLLM
from kvpool.integrations.vllm.spec import HostBlocks, KVPoolOffloadingWorker, identity, layers_of


class _Worker(KVPoolOffloadingWorker):
    """Takes vLLM's numbers of chunks for host blocks."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: LoadStoreSpec) -> bool:
        return super().submit_store(job_id, src_spec, HostBlocks(tuple(dst_spec.chunk_ids.tolist())))

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: Any, expedited: bool = False) -> bool:
        whole = HostBlocks(tuple(src_spec.chunk_ids.tolist()), partial=())
        return super().submit_load(job_id, whole, dst_spec, expedited)


def _worker(spec: Any, kv_caches: Any, tier: kvpool.HostTier) -> OffloadingWorker:
    from kvpool.integrations.vllm.transfers import Transfers, pieces

    first = spec.config.parallel.rank * spec.cpu_page_size_per_worker
    groups = [pieces(layers, spec.blocks_per_chunk, first) for layers in layers_of(kv_caches, False)]
    caches, places = zip(*((piece.cache, piece.place) for group in groups for piece in group), strict=True)
    copies = kvpool.hostcache.HostCopies(tier, caches, blocks_per_host_block=spec.blocks_per_chunk, places=places)
    return _Worker(Transfers(copies, spec.num_chunks, spec.blocks_per_chunk, groups), False)


class CpuSpec(CPUOffloadingSpec):
    """vLLM's CPU tier alone."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        model_identity = identity(self.config, VLLM.version())
        return _worker(
            self, kv_caches, kvpool.HostTier(self.num_chunks, self.kv_bytes_per_chunk, identity=model_identity)
        )


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        self.region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        rows = np.asarray(self.region.create_kv_memoryview()).view(np.uint8)
        tier = kvpool.HostTier(*rows.shape, identity=identity(self.config, VLLM.version()), memory=rows)
        return _worker(self, kv_caches, tier)
