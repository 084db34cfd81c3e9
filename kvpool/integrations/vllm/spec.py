"""A host tier for vLLM, for its OffloadingConnector to load by module path. Only vLLM imports this module.

The scheduler's process has the index (``HostCache``), which owns no memory. Each worker has host memory of its own for
its share of the KV, and makes the copies. Between them, only ids of host blocks are sent. A host block holds one
*chunk* of vLLM's: ``blocks_per_chunk`` blocks of one group.

With stores all workers share one host memory, and a host block has the shares of all. The first worker makes it, the
others and the scheduler's process attach it. There a ``HostStorageManager`` saves and loads host blocks.

Numba is imported only when the index or a worker is made. On a CPU, vLLM reads the attributes of all loaded modules
when it starts, and fails at an attribute of llvmlite.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import kvpool
from kvpool.integrations.options import SEED, VLLM, lasting_identity

with VLLM.imports():
    from vllm.distributed.kv_transfer.kv_connector.v1 import base as connectors
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import get_sliding_window_size_in_chunks
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.platforms import current_platform
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
    from vllm.v1.kv_offload import base

from kvpool.integrations.vllm.host_tier_metrics import metric_definitions
from kvpool.integrations.vllm.offloading_manager import HostBlocks, KVPoolOffloadingManager, WorkerReport

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.v1.core.sched.output import KVConnectorOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingParallelConfig
    from vllm.v1.request import Request

    from kvpool.integrations.vllm.transfers import GroupBlocks, LayerPages, Piece, Transfers

__all__ = [
    "HostBlocks",
    "KVPoolOffloadingConnector",
    "KVPoolOffloadingManager",
    "KVPoolOffloadingSpec",
    "KVPoolOffloadingWorker",
    "WorkerReport",
]

log = VLLM.log

_EVENTS = 1 << 16


@dataclass
class HostMemory(connectors.KVConnectorHandshakeMetadata):
    """What a worker reports to the scheduler's process at the start: where its host memory is."""

    description: kvpool.hostcache.HostTierDescription
    stored_as: kvpool.ModelIdentity
    """whose KV the stores have"""


class Deployment(NamedTuple):
    """What kvpool's connector passes to the spec that vLLM makes for it."""

    config: VllmConfig
    groups: KVCacheConfig
    scheduler: bool
    """whether the spec is for the scheduler's process"""

    def check_seed(self, stores: list[str]) -> None:
        """Raises ValueError for stores that outlive the process where vLLM's keys do not."""
        algorithm = self.config.cache_config.prefix_caching_hash_algo
        hashes = get_hash_fn_by_name(algorithm)
        if stores and resolve_none_hash_seed(hashes) != resolve_none_hash_seed(hashes):
            raise ValueError(
                f"prefix_caching_hash_algo: expected 'sha256' with stores, or the environment variable {SEED} set to "
                f"one number for all engines that use these stores, such as {SEED}=0, got {algorithm!r}, whose seed "
                "is random, so that nothing would be found after a restart"
            )

    def check_latent(self) -> None:
        """Raises ValueError where vLLM computes other tokens after a prefix that was loaded."""
        latent, cached = self.config.model_config.use_mla, self.config.cache_config.enable_prefix_caching
        if latent and not cached and current_platform.is_cpu():
            raise ValueError(
                "latent attention on this CPU: vLLM switches prefix caching off, since it computes other "
                "tokens behind a prefix. Supported are GPUs, and CPUs with AMX"
            )

    def persistent(self, passing: kvpool.ModelIdentity, weights: str | None) -> kvpool.ModelIdentity:
        """The identity of the KV in stores. Raises ValueError if nothing identifies its weights."""
        algorithm = self.config.cache_config.prefix_caching_hash_algo
        return lasting_identity(passing, weights, self.config.model_config.compute_hash(), algorithm)

    def chunks_seen(self, group: int, tokens_per_chunk: int) -> float:
        """How many chunks a group of layers sees at most, which are those that vLLM keeps of a prompt."""
        spec = self.groups.kv_cache_groups[group].kv_cache_spec
        return get_sliding_window_size_in_chunks(spec, tokens_per_chunk) or math.inf


_deployment: ContextVar[Deployment | None] = ContextVar("deployment", default=None)


@contextmanager
def deployed(deployment: Deployment) -> Iterator[None]:
    """A spec that is made here is one of kvpool's connector."""
    token = _deployment.set(deployment)
    try:
        yield
    finally:
        _deployment.reset(token)


class KVPoolOffloadingWorker(base.OffloadingWorker):
    """Copies between a worker's KV tensors and its host memory. All calls come from the worker's main thread.

    On a GPU the copies run on streams of their own, after all work that vLLM has enqueued. On a CPU the calling thread
    makes the copies without the interpreter lock, and they have ended when the call returns.
    """

    def __init__(self, transfers: Transfers, on_gpu: bool) -> None:
        self._transfers = transfers
        self._on_gpu = on_gpu
        self._expedited: set[int] = set()
        self._failed: set[int] = set()
        self._report = WorkerReport()
        self.recovers = False
        """Whether the connector reports failed loads, so that vLLM computes their tokens."""

    def submit_store(self, job_id: int, src_spec: base.GPULoadStoreSpec, dst_spec: base.LoadStoreSpec) -> bool:
        self._transfers.store(job_id, self._parts(src_spec, dst_spec), self._stream())
        return True

    def submit_load(
        self, job_id: int, src_spec: base.LoadStoreSpec, dst_spec: base.GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Begin a load. Later versions of vLLM pass ``expedited``: the request computes in the same step, so nobody
        recovers if the load fails."""
        parts = self._parts(dst_spec, src_spec)
        if expedited:
            self._expedited.add(job_id)
        self._transfers.load(job_id, parts, self._stream(), src_spec.partial)
        return True

    def _stream(self) -> Any:
        return current_platform.current_stream() if self._on_gpu else None

    def _parts(self, device: base.GPULoadStoreSpec, host: base.LoadStoreSpec) -> list[GroupBlocks]:
        if not isinstance(host, HostBlocks):
            raise TypeError(f"scheduler and workers have different specs: {type(host).__name__} is none of kvpool's")
        return self._transfers.parts(device.block_ids, device.group_sizes, device.block_indices, host.blocks)

    def get_finished(self) -> list[base.TransferResult]:
        """The jobs that have ended. A failed load ends the engine, unless the connector recovers from it.

        A failed store is reported as a success, since vLLM would count its chunks as stored in any case. kvpool's
        connector has the scheduler drop them; under another one, a later load of such a chunk fails.
        """
        results = []
        for ended in self._transfers.finished():
            recovers = ended.store or (self.recovers and ended.job not in self._expedited)
            self._expedited.discard(ended.job)
            if ended.store:
                self._report.partial_blocks |= ended.partial
            if ended.error is not None:
                log.error("kvpool: %s %d failed: %s", "store" if ended.store else "load", ended.job, ended.error)
                if ended.store:
                    self._report.failed_blocks |= ended.host_blocks
                else:
                    self._failed.add(ended.job)
            success = ended.error is None or recovers
            results.append(base.TransferResult(ended.job, success, ended.nbytes, ended.seconds))
        return results

    def take_failed(self) -> set[int]:
        """The failed loads that ``get_finished`` has returned since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def take_report(self, ended: OffloadingWorkerMetadata) -> WorkerReport:
        """What vLLM says of ended jobs, with what has become of host blocks since the last call."""
        report, self._report = self._report, WorkerReport()
        report.completed_jobs, report.transfer_stats = ended.completed_jobs, ended.transfer_stats
        return report

    def wait(self, job_ids: set[int]) -> None:
        self._transfers.wait(job_ids)

    def shutdown(self) -> None:
        self._transfers.close()


class KVPoolOffloadingSpec(base.OffloadingSpec):
    """The factory of both sides. vLLM makes one in the scheduler's process and one in each worker's.

    Its options are in ``kv_connector_extra_config``: those that ``options.VLLM`` takes. ``host_bytes``
    is the memory of all workers together, in bytes or as text such as ``"8GiB"``. ``stores`` are the stores behind it,
    such as ``["disk:/path?capacity=100GiB"]``, with ``save`` ("commit" or "reuse"), ``weights``, a text that tells the
    model's weights from others, ``load_seconds`` and more. vLLM's own options that belong to no backend work too
    (``blocks_per_chunk``, ``block_size``, ``offload_prompt_only``, ``self_describing_kv_events``).

    Raises
    ------
    ValueError
        For options that are missing or not supported.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, base.OffloadingMetricMetadata]:
        return metric_definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        installed, parallel, self._deployment = VLLM.checked_version(), config.parallel, _deployment.get()
        self.replicated_layout = config.replicated_layout
        if config.canonical_layout and not parallel.is_parallelism_agnostic:
            raise ValueError(
                "canonical_layout=True in kv_connector_extra_config: vLLM does not certify that this model's blocks "
                "are the same with any number of workers"
            )
        self.share = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        """Bytes of one host block of one worker."""
        if not self.share:
            raise ValueError("vLLM says that a block has no bytes: kvpool's host tier does not support this model")
        if self._deployment is not None:
            self._deployment.check_latent()
        in_worker = self._deployment is not None and not self._deployment.scheduler
        self.options = VLLM.read(self.extra_config, quiet=in_worker)
        chunk = self.share * (1 if self.replicated_layout else parallel.world_size)
        self.host_blocks = self.options.host_bytes // chunk
        if not self.host_blocks:
            raise ValueError(
                f"host_bytes: expected {chunk} bytes or more, for one chunk, got {self.extra_config['host_bytes']!r}"
            )
        self.identity = identity(config, installed)
        self.stores = self.options.stores
        self.stored_as = self._identity_in_stores() if self.stores else None
        """Whose KV the stores have."""
        self.shared = bool(self.stores) or config.canonical_layout or self.replicated_layout
        """Whether all workers have one host memory."""
        self.block_bytes = chunk if self.shared else self.share
        """Bytes of a host block: in one memory those of all workers."""
        self.description: kvpool.hostcache.HostTierDescription | None = None
        """where the host memory is that all workers share, in a worker"""

    def _identity_in_stores(self) -> kvpool.ModelIdentity:
        """Raises ValueError for what cannot have stores."""
        parallel, stores = self.config.parallel, list(self.stores)
        if parallel.world_size != parallel.tp_size * parallel.pp_size:
            raise ValueError(f"stores: expected none without tensor and pipeline parallelism alone, got {stores}")
        if self._deployment is None:
            raise ValueError(
                f"stores: expected none without the connector of kvpool, got {stores} in kv_connector_extra_config: "
                '"kv_connector": "KVPoolOffloadingConnector", '
                '"kv_connector_module_path": "kvpool.integrations.vllm.spec"'
            )
        self._deployment.check_seed(self.options.persistent)
        return self._deployment.persistent(self.identity, self.options.weights)

    def chunks_of(self, tokens: int) -> int:
        """How many host blocks a prompt of this many tokens takes."""
        count = 0
        for group in self.config.groups:
            size = group.tokens_per_block * self.blocks_per_chunk
            seen = self._deployment.chunks_seen(group.group_id, size) if self._deployment is not None else math.inf
            count += int(min(tokens // size, seen))
        return count

    def _say(self) -> None:
        """Log what was decided, and warn if it will not do."""
        sizes = sorted({group.tokens_per_block * self.blocks_per_chunk for group in self.config.groups})
        log.info(
            "kvpool: host tier of %d blocks of %d bytes in each of %d workers, about %d tokens; chunks of %s tokens; "
            "stores: %s; KV of %s",
            self.host_blocks,
            self.share,
            self.config.parallel.world_size,
            self.host_blocks * sizes[-1] // max(1, self.chunks_of(sizes[-1])),
            " and ".join(map(str, sizes)),
            ", ".join(self.stores) or "none",
            self.stored_as or self.identity,
        )
        longest = self._deployment.config.model_config.max_model_len if self._deployment is not None else 0
        if self.chunks_of(longest) > self.host_blocks:
            least = self.chunks_of(longest) * self.share * self.config.parallel.world_size
            log.warning(
                "kvpool: host_bytes=%r: one request of max_model_len=%d takes %d host blocks, and there are %d. What "
                "does not fit is not kept. Give %.1f GiB or more",
                self.extra_config["host_bytes"],
                longest,
                self.chunks_of(longest),
                self.host_blocks,
                least / (1 << 30),
            )

    def get_manager(self) -> base.OffloadingManager:
        events = self.kv_events_config.enable_kv_cache_events
        with compiling("the index of the host tier"):
            from kvpool.hostcache.warming import warm_host_cache

            warm_host_cache([self.options.policy] if self.options.policy != "lru" else [])
        cache = kvpool.HostCache(
            self.host_blocks,
            self.block_bytes,
            identity=self.identity,
            event_capacity=_EVENTS if events else 0,
            policy=self.options.policy,
            history=VLLM.history(),
        )
        VLLM.show_warnings()
        self._say()
        chunk = max(group.tokens_per_block for group in self.config.groups) * self.blocks_per_chunk
        tokens = max(1, chunk // max(1, self.chunks_of(chunk)))
        replica = self.config.parallel.data_parallel_index
        return KVPoolOffloadingManager(
            cache, self.options, events=events, tokens_per_block=tokens, dp_rank=replica, shared=self.shared
        )

    def get_worker(self, kv_caches: base.CanonicalKVCaches) -> base.OffloadingWorker:
        from kvpool.integrations.vllm.transfers import Transfers, pieces

        canonical = self.config.canonical_layout
        has_share = self.shared and not (canonical or self.replicated_layout)
        first = self.config.parallel.rank * self.share if has_share else 0
        groups = [pieces(layers, self.blocks_per_chunk, first) for layers in layers_of(kv_caches, canonical)]
        copies = self.get_copies([piece for group in groups for piece in group])
        transfers = Transfers(copies, self.host_blocks, self.blocks_per_chunk, groups)
        with compiling("the copies of the host tier"):
            transfers.warm_up()
        return KVPoolOffloadingWorker(transfers, groups[0][0].cache.memory == "device")

    def get_copies(self, found: list[Piece]) -> kvpool.hostcache.HostCopies:
        """A copy engine over this worker's part of the host memory."""
        caches, places = [piece.cache for piece in found], [piece.place for piece in found]
        return kvpool.hostcache.HostCopies(
            self.get_tier(), caches, blocks_per_host_block=self.blocks_per_chunk, places=places
        )

    def get_tier(self) -> kvpool.HostTier:
        """This worker's own host memory, or that of all workers, which the first one makes. As many blocks as the first
        worker has: the scheduler counts by its layers."""
        parallel, tier = self.config.parallel, None
        if parallel.rank == 0 and self.shared:
            tier = kvpool.HostTier(self.host_blocks, self.block_bytes, identity=self.identity)
        ours = self.share, self.host_blocks, self.stored_as, tier and tier.share()
        share, self.host_blocks, self.stored_as, self.description = from_first_worker(ours, parallel)
        if not self.shared:
            return kvpool.HostTier(self.host_blocks, self.block_bytes, identity=self.identity)
        if share != self.share:
            raise ValueError(
                f"pipeline_parallel_size: expected stages with equally many layers where there are stores, got "
                f"{parallel.pp_size}: worker {parallel.rank} has chunks of {self.share} bytes, the first one of {share}"
            )
        return tier or kvpool.HostTier.attach(self.description)


class KVPoolOffloadingConnector(OffloadingConnector):
    """vLLM's OffloadingConnector, which also reports failed loads. With ``kv_load_failure_policy="recompute"``, the
    requests of failed loads compute the missing tokens. With vLLM's own connector, a failed load ends the engine.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: connectors.KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        scheduler = role == connectors.KVConnectorRole.SCHEDULER
        with deployed(Deployment(vllm_config, kv_cache_config, scheduler)):
            super().__init__(vllm_config, role, kv_cache_config)
        self._requests: dict[int, str] = {}
        """By job, the requests whose loads have not ended."""

    def on_new_request(self, request: Request) -> None:
        manager = self.scheduler.manager
        if isinstance(manager, KVPoolOffloadingManager):
            manager.salt = request.cache_salt or ""
        super().on_new_request(request)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._worker.recovers = True

    @property
    def _worker(self) -> KVPoolOffloadingWorker:
        worker = self.connector_worker.worker if self.connector_worker is not None else None
        if not isinstance(worker, KVPoolOffloadingWorker):
            raise TypeError("KVPoolOffloadingConnector: spec_name must be KVPoolOffloadingSpec")
        return worker

    def get_handshake_metadata(self) -> HostMemory | None:
        """In a worker: where the host memory is, for stores."""
        spec = self.connector_worker.spec if self.connector_worker is not None else None
        if not isinstance(spec, KVPoolOffloadingSpec) or spec.description is None or spec.stored_as is None:
            return None
        return HostMemory(spec.description, spec.stored_as)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], connectors.KVConnectorHandshakeMetadata]
    ) -> None:
        """In the scheduler's process, before the first request: open the stores. By stage and rank in it."""
        manager, memory = self.scheduler.manager, metadata.get((0, 0))
        if isinstance(manager, KVPoolOffloadingManager) and isinstance(memory, HostMemory):
            manager.open_stores(memory.description, memory.stored_as)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        jobs = getattr(self._connector_metadata, "load_jobs", {})
        self._requests.update({job: load.req_id for job, load in jobs.items()})
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> connectors.KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= {self._requests[job] for job in self._worker.take_failed()}
        ended = results.finished_recving
        self._requests = {job: request for job, request in self._requests.items() if request not in ended}
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        metadata = super().build_connector_worker_meta()
        return None if metadata is None else self._worker.take_report(metadata)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> connectors.KVConnectorMetadata:
        manager = self.scheduler.manager
        if isinstance(manager, KVPoolOffloadingManager):
            manager.prefill.begin(scheduler_output.total_num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        manager = self.scheduler.manager
        if isinstance(manager, KVPoolOffloadingManager):
            manager.prefill.end()
            report = connector_output.kv_connector_worker_meta
            if isinstance(report, WorkerReport):
                manager.report(report)
            for request in connector_output.failed_recving:
                manager.load_failed(request)
        super().update_connector_output(connector_output)


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Say at the start and the end that code is compiled, which takes long where no folder has it yet."""
    began = time.perf_counter()
    log.info("kvpool: compiling %s, or loading what was compiled before", what)
    yield
    log.info("kvpool: %s is ready after %.1f s", what, time.perf_counter() - began)


def from_first_worker(value: Any, parallel: OffloadingParallelConfig) -> Any:
    """What the first worker of the first stage has given, in all workers."""
    if parallel.world_size > 1:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        if parallel.pp_size > 1:
            value = get_pp_group().broadcast_object(value, src=0)
        value = get_tp_group().broadcast_object(value, src=0)
    return value


def identity(config: OffloadingConfig, version: str) -> kvpool.ModelIdentity:
    """The identity of the KV. The memory lives no longer than the engine, so the engine's id stands for its loaded
    weights."""
    groups = [(group.tokens_per_block, group.layer_names) for group in config.groups]
    layers = hashlib.sha256(repr(groups).encode()).hexdigest()[:16]
    parallel = config.parallel
    block = f"{config.worker_kv_bytes_per_block} bytes a block, {config.cache.blocks_per_chunk} a chunk"
    workers = f"tp {parallel.tp_size} pcp {parallel.pcp_size} dcp {parallel.dcp_size}"
    workers += f" pp {parallel.pp_size}" if parallel.pp_size > 1 else ""
    if config.canonical_layout:
        # The same bytes with any number of workers.
        copies = 1 if config.replicated_layout else parallel.world_size
        block = f"{config.worker_kv_bytes_per_block * copies} bytes a block, {config.cache.blocks_per_chunk} a chunk"
        workers = f"canonical {canonical_format_id(str(config.kv_cache_layout))}"
    return kvpool.ModelIdentity(
        model=config.model.name,
        revision=f"engine {config.engine_id}",
        kv_dtype=config.model.dtype,
        layout=f"{config.kv_cache_layout}, {block}, {workers}, layers {layers}",
        hash_version=f"vllm {version}, {config.cache.tokens_per_hash} tokens",
    )


def layers_of(kv_caches: base.CanonicalKVCaches, canonical: bool) -> list[list[LayerPages]]:
    """The memory of each group's layers. A tensor that several layers share is listed once. ``canonical``: where each
    worker has its place in a page that is the same for any number of them. Raises ValueError where vLLM does not say
    that of a layer."""
    from kvpool.integrations.vllm.transfers import LayerPages, Run

    def layer(ref: base.CanonicalKVCacheRef) -> LayerPages:
        tensor, mapping = kv_caches.tensors[ref.tensor_idx].tensor, ref.mapping
        if not canonical:
            return LayerPages.whole(tensor)
        if mapping is None or not mapping.parallelism_agnostic:
            raise ValueError(
                "canonical_layout=True in kv_connector_extra_config: vLLM does not certify the layout of all layers"
            )
        runs = tuple(
            Run(
                run.local_offset,
                run.canonical_offset,
                run.fragment_size,
                run.num_fragments,
                run.local_stride,
                run.canonical_stride,
            )
            for run in mapping.runs
        )
        return LayerPages(tensor, mapping.canonical_page_size_bytes, runs, mapping.writer_index == 0)

    return [
        [layer(ref) for ref in {ref.tensor_idx: ref for ref in refs}.values()] for refs in kv_caches.group_data_refs
    ]
