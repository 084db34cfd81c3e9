"""What the scheduler's side of the host tier tells vLLM's metrics and the log. Only vLLM imports this module."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvpool.engines.options import VLLM

with VLLM.imports():
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload import base

if TYPE_CHECKING:
    import kvpool
    from kvpool.hostcache.host_cache import HostUsage
    from kvpool.keepers.hostkeeper import HostKeeper

STORED, LOADED = "vllm:kvpool_stored_chunks", "vllm:kvpool_loaded_chunks"
EVICTED, REFUSED = "vllm:kvpool_evicted_chunks", "vllm:kvpool_refused_stores"
FAILED_LOADS, FAILED_STORES = "vllm:kvpool_failed_loads", "vllm:kvpool_failed_stores"
COUNTERS = {
    STORED: "Chunks that were copied to host memory and can be found there.",
    LOADED: "Chunks that were copied from host memory for a request.",
    EVICTED: "Chunks that were dropped for others.",
    REFUSED: "Times that chunks could not be stored, as too much of the host tier is in use.",
    FAILED_LOADS: "Loads whose bytes did not come; their requests computed them.",
    FAILED_STORES: "Chunks whose copy to host memory failed.",
}
_TOTALS = {
    "vllm:kvpool_store_loaded_chunks": "Chunks that came from a store to host memory.",
    "vllm:kvpool_store_missed_chunks": "Chunks that a store was asked for and that did not come.",
    "vllm:kvpool_store_saved_chunks": "Chunks that a store has kept.",
    "vllm:kvpool_store_unsaved_chunks": "Chunks that a store was to keep and has not kept.",
}
_MISSED, _UNSAVED = "vllm:kvpool_store_missed_reasons", "vllm:kvpool_store_unsaved_reasons"
_ANSWERS, _BYTES, _SECONDS = "vllm:kvpool_store_answers", "vllm:kvpool_store_bytes", "vllm:kvpool_store_seconds"
_LABELLED = {
    _MISSED: (("reason",), "Chunks that did not come from the stores."),
    _UNSAVED: (("reason",), "Chunks that a store has not kept."),
    _ANSWERS: (("store", "kind", "reason"), "What a store has said of chunks that were looked for, loaded or saved."),
    _BYTES: (("store", "kind"), "Bytes that were loaded from a store, and saved to it."),
    _SECONDS: (("store", "kind"), "Time in calls of a store, of all threads."),
}
_BLOCKS, _FIGURES, _SUSPENDED = "vllm:kvpool_host_blocks", "vllm:kvpool_store_figures", "vllm:kvpool_store_suspended"
_GAUGES = {
    _BLOCKS: (
        ("state",),
        "Host blocks: empty, evictable (with a chunk, not in use), pinned (being loaded), pending (being stored).",
    ),
    _FIGURES: (("store", "figure"), "What a store says of itself, such as its blocks and its capacity in blocks."),
    _SUSPENDED: (("store",), "1 while a store has failed and is not asked for a while."),
}
_EVERY_SECONDS = 1.0
"""How often the figures of stores are read."""
_KINDS = {_MISSED: "load", _UNSAVED: "save"}
_OWN = ("busy", "crowded")
"""Why the host tier asks no store for a chunk, or has no room for it. Of what stores do wrong, the keeper warns."""


def definitions() -> dict[str, base.OffloadingMetricMetadata]:
    """All metrics, by name."""
    found: dict[str, base.OffloadingMetricMetadata] = {}
    for name, text in (COUNTERS | _TOTALS).items():
        found[name] = base.OffloadingCounterMetadata(documentation=text)
    for name, (labels, text) in _LABELLED.items():
        found[name] = base.OffloadingCounterMetadata(documentation=text, labelnames=labels)
    for name, (labels, text) in _GAUGES.items():
        found[name] = base.OffloadingGaugeMetadata(documentation=text, labelnames=labels)
    return found


class HostTierMetrics:
    """Counts since they were read the last time, gauges now, and warnings where the host tier is too small."""

    def __init__(self, cache: kvpool.HostCache, clock: Callable[[], float] = time.monotonic) -> None:
        from kvpool.stores.store_health import TroubleLog  # imports Numba, which vLLM must not meet when it starts

        self._cache, self._clock = cache, clock
        self.counts: Counter[str] = Counter()
        """by name, of ``COUNTERS``"""
        self._totals = (0, 0, 0, 0)
        self._usage: HostUsage | None = None
        self._read_at = clock()
        self._known: dict[tuple[str, tuple[str, ...]], float] = {}
        self._troubles = TroubleLog("behind the host tier", clock, VLLM.log)

    def take(self, keeper: HostKeeper | None) -> OffloadingConnectorStats | None:
        """What has happened since the last call, or None if nothing has."""
        counts = +self.counts
        self.counts.clear()
        if keeper is not None:
            totals = keeper.totals
            if totals != self._totals:
                changes = zip(_TOTALS, totals, self._totals, strict=True)
                counts.update({name: now - old for name, now, old in changes if now != old})
                self._totals = totals
        due = keeper is not None and self._clock() - self._read_at >= _EVERY_SECONDS
        if not counts and not due:
            return None
        found = OffloadingConnectorStats()
        for name, count in counts.items():
            found.increase_counter(name, count)
        if counts:
            usage, before = self._cache.usage(), self._usage
            self._usage = usage
            for state, blocks in usage._asdict().items() if usage != before else ():
                found.set_gauge(_BLOCKS, blocks, (state,))
        if keeper is not None and due:
            self._read_at = self._clock()
            self._read(keeper, found)
        return found

    def _read(self, keeper: HostKeeper, found: OffloadingConnectorStats) -> None:
        """The figures of the stores, and of the keeper, by reason."""
        stats = keeper.stats()
        now: dict[tuple[str, tuple[str, ...]], float] = {}
        for name, reasons in ((_MISSED, stats.missed), (_UNSAVED, stats.unsaved)):
            now.update({(name, (reason,)): count for reason, count in reasons.items()})
        for store in stats.stores:
            now.update({(_ANSWERS, (store.name, *answer)): count for answer, count in store.blocks.items()})
            now.update({(_BYTES, (store.name, kind)): nbytes for kind, nbytes in store.nbytes.items()})
            now.update({(_SECONDS, (store.name, kind)): seconds for kind, seconds in store.seconds.items()})
            for figure, value in store.store.items():
                found.set_gauge(_FIGURES, value, (store.name, figure))
            found.set_gauge(_SUSPENDED, int(store.name in stats.suspended), (store.name,))
        for (name, labels), total in now.items():
            change = total - self._known.get((name, labels), 0)
            if change:
                found.increase_counter(name, change, labels)
                if name in _KINDS and labels[0] in _OWN:
                    self._troubles.note(_KINDS[name], labels[0], int(change))
        self._known = now
