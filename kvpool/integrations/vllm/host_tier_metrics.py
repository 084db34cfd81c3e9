"""Metrics of the host tier for vLLM: counts, gauges, the figures of its stores, and warnings where the host tier is too
small. Only vLLM imports this module."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import kvpool
from kvpool.integrations.options import VLLM

with VLLM.imports():
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload import base

if TYPE_CHECKING:
    from kvpool.hostcache.host_stats import HostUsage
    from kvpool.storage.host_storage_manager import HostStorageManager

STORED, LOADED = "vllm:kvpool_stored_chunks", "vllm:kvpool_loaded_chunks"
_HINTED = "vllm:kvpool_hint_actions"
EVICTED, REFUSED = "vllm:kvpool_evicted_chunks", "vllm:kvpool_refused_stores"
FAILED_LOADS, FAILED_STORES = "vllm:kvpool_failed_loads", "vllm:kvpool_failed_stores"
EXPIRED_STORES = "vllm:kvpool_expired_stores"
_TOTALS = (
    "vllm:kvpool_store_loaded_chunks",
    "vllm:kvpool_store_missed_chunks",
    "vllm:kvpool_store_saved_chunks",
    "vllm:kvpool_store_unsaved_chunks",
)
_MISSED, _UNSAVED = "vllm:kvpool_store_missed_reasons", "vllm:kvpool_store_unsaved_reasons"
_ANSWERS, _BYTES, _SECONDS = "vllm:kvpool_store_answers", "vllm:kvpool_store_bytes", "vllm:kvpool_store_seconds"
_BLOCKS, _FIGURES, _SUSPENDED = "vllm:kvpool_host_blocks", "vllm:kvpool_store_figures", "vllm:kvpool_store_suspended"
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    STORED: ("Chunks that were copied to host memory and can be found there.", ()),
    LOADED: ("Chunks that were copied from host memory for a request.", ()),
    EVICTED: ("Chunks that were dropped for others.", ()),
    REFUSED: ("Times that chunks could not be stored, as too much of the host tier is in use.", ()),
    FAILED_LOADS: ("Loads whose bytes did not come; their requests computed them.", ()),
    FAILED_STORES: ("Chunks whose copy to host memory failed.", ()),
    EXPIRED_STORES: ("Chunks whose copy to host memory did not end in time.", ()),
    _TOTALS[0]: ("Chunks that came from a store to host memory.", ()),
    _TOTALS[1]: ("Chunks that a store was asked for and that did not come.", ()),
    _TOTALS[2]: ("Chunks that a store has kept.", ()),
    _TOTALS[3]: ("Chunks that a store was to keep and has not kept.", ()),
    _HINTED: ("Actions of hints, by what became of them.", ("action", "outcome")),
    _MISSED: ("Chunks that did not come from the stores.", ("reason",)),
    _UNSAVED: ("Chunks that a store has not kept.", ("reason",)),
    _ANSWERS: ("What a store has said of chunks that were looked for, loaded or saved.", ("store", "kind", "reason")),
    _BYTES: ("Bytes that were loaded from a store, and saved to it.", ("store", "kind")),
    _SECONDS: ("Time in calls of a store, of all threads.", ("store", "kind")),
}
_GAUGES = {
    _BLOCKS: (
        "Host blocks: empty, evictable (with a chunk, not in use), pinned (being loaded), pending (being stored).",
        ("state",),
    ),
    _FIGURES: ("Figures that a store reports, such as its blocks and its capacity in blocks.", ("store", "figure")),
    _SUSPENDED: ("1 while a store is suspended because it has failed.", ("store",)),
}
_EVERY_SECONDS = 1.0
"""How often the figures of stores are read."""
_KINDS = {_MISSED: "load", _UNSAVED: "save"}
_OWN = ("busy", "crowded")
"""Why the host tier asks no store for a chunk, or has no room for it. The storage manager warns of errors of stores."""


def metric_definitions() -> dict[str, base.OffloadingMetricMetadata]:
    """All metrics, by name."""
    counters = {name: base.OffloadingCounterMetadata(*about) for name, about in _COUNTERS.items()}
    return counters | {name: base.OffloadingGaugeMetadata(*about) for name, about in _GAUGES.items()}


class HostTierMetrics:
    """Counts since they were read the last time, gauges now, and warnings where the host tier is too small."""

    def __init__(self, cache: kvpool.HostCache, clock: Callable[[], float] = time.monotonic) -> None:
        from kvpool.storage.circuit_breaker import TroubleLog  # imports Numba, which vLLM must not meet when it starts

        self._cache, self._clock = cache, clock
        self.counts: Counter[str] = Counter()
        """totals by name"""
        self._hints: Counter[tuple[str, str]] = Counter()
        self._usage: HostUsage | None = None
        self._read_at = clock()
        self._known: dict[tuple[str, tuple[str, ...]], float] = {}
        self._troubles = TroubleLog("behind the host tier", clock, VLLM.log)

    def hint(self, kind: str, outcome: str) -> None:
        """Count an action of a hint."""
        self._hints[kind, outcome] += 1

    def take(self, storage: HostStorageManager | None) -> OffloadingConnectorStats | None:
        """What has happened since the last call, or None if nothing has."""
        stats, totals = OffloadingConnectorStats(), Counter({EXPIRED_STORES: self._cache.expired_reservations})
        totals.update(self.counts)
        if storage is not None:
            totals.update(dict(zip(_TOTALS, storage.totals, strict=True)))
        changed = self._count({(name, ()): total for name, total in totals.items()}, stats)
        hinted = self._count({(_HINTED, labels): total for labels, total in self._hints.items()}, stats)
        if changed:
            usage, before = self._cache.usage(), self._usage
            self._usage = usage
            for state, blocks in usage._asdict().items() if usage != before else ():
                stats.set_gauge(_BLOCKS, blocks, (state,))
        due = storage is not None and self._clock() - self._read_at >= _EVERY_SECONDS
        if storage is not None and due:
            self._read_at = self._clock()
            self._read(storage, stats)
        return stats if changed or hinted or due else None

    def _read(self, storage: HostStorageManager, metrics: OffloadingConnectorStats) -> None:
        """Read the figures of the stores, and of the storage manager, by reason."""
        stats = storage.stats()
        totals: dict[tuple[str, tuple[str, ...]], float] = {}
        for name, reasons in ((_MISSED, stats.missed | {"refused": stats.refused}), (_UNSAVED, stats.unsaved)):
            totals.update({(name, (reason,)): count for reason, count in reasons.items()})
        for store in stats.stores:
            totals.update({(_ANSWERS, (store.name, *answer)): count for answer, count in store.blocks.items()})
            totals.update({(_BYTES, (store.name, kind)): nbytes for kind, nbytes in store.nbytes.items()})
            totals.update({(_SECONDS, (store.name, kind)): seconds for kind, seconds in store.seconds.items()})
            for figure, value in store.store.items():
                metrics.set_gauge(_FIGURES, value, (store.name, figure))
            metrics.set_gauge(_SUSPENDED, int(store.name in stats.suspended), (store.name,))
        self._count(totals, metrics)

    def _count(self, totals: Mapping[tuple[str, tuple[str, ...]], float], metrics: OffloadingConnectorStats) -> bool:
        """Count by how much totals have grown. Returns whether any has."""
        grown = {which: total - self._known.get(which, 0) for which, total in totals.items()}
        for (name, labels), change in grown.items():
            if change:
                metrics.increase_counter(name, change, labels)
                if name in _KINDS and labels[0] in _OWN:
                    self._troubles.note(_KINDS[name], labels[0], int(change))
        self._known.update(totals)
        return any(grown.values())
