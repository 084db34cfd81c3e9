"""Metrics of pools for Prometheus: a collector that reads ``stats()`` when it is scraped, and does nothing otherwise.

Names and units are Prometheus' conventions: base units, ``_total`` for what only grows. Every metric has the label ``pool``, and those of
blocks ``group``, of layers: "0" in a pool of one.
``DASHBOARD`` is a Grafana dashboard that shows them all.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpool.errors import PoolClosed
from kvpool.layout import integer_argument
from kvpool.manager import KVCacheManager
from kvpool.stats import GroupStats, Histogram, Stats, TierStats

try:
    from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "prometheus_client":
        raise
    raise ImportError("kvpool.metrics needs prometheus-client: pip install 'kvpool[metrics]'") from error

if TYPE_CHECKING:
    from typing_extensions import Self

DASHBOARD = Path(__file__).parent / "dashboards" / "grafana.json"
"""A dashboard to import into Grafana; it asks for the Prometheus data source."""

Value = float | Histogram | None
Read = Callable[[Stats], dict[tuple[str, ...], Value]]


class Definition(NamedTuple):
    """One metric: how it is read from a snapshot, by the values of ``labels``. What a device cannot tell is None, and is left out."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]
    name: str
    help: str
    labels: tuple[str, ...]
    read: Read


def _counter(name: str, help: str, labels: tuple[str, ...], read: Read) -> Definition:
    return Definition(CounterMetricFamily, name, help, labels, read)


def _gauge(name: str, help: str, labels: tuple[str, ...], read: Read) -> Definition:
    return Definition(GaugeMetricFamily, name, help, labels, read)


def _histogram(name: str, help: str, labels: tuple[str, ...], read: Read) -> Definition:
    return Definition(HistogramMetricFamily, name, help, labels, read)


def _each(read: Callable[[GroupStats], dict[tuple[str, ...], Value]]) -> Read:
    """The same figures of every group, by its number and then by their other labels."""
    return lambda s: {(str(g), *labels): value for g, group in enumerate(s.groups) for labels, value in read(group).items()}


def _states(tier: TierStats) -> dict[str, int]:
    """Every block of a tier in one of them."""
    return {"used": tier.used, "cached": tier.evictable - tier.redundant, "redundant": tier.redundant, "empty": tier.empty}


_TIERS = ("device", "host")
DEFINITIONS = (
    _gauge(
        "kvpool_blocks",
        "Blocks: used (held by sequences or pins), cached (reusable until evicted), redundant (host copies of what is on the device too), "
        "empty.",
        ("group", "tier", "state"),
        _each(lambda g: {(tier, state): count for tier in _TIERS for state, count in _states(getattr(g, tier)).items()}),
    ),
    _gauge(
        "kvpool_pinned_blocks", "Blocks that leases hold.", ("group", "tier"), _each(lambda g: {(t,): getattr(g, t).pinned for t in _TIERS})
    ),
    _gauge("kvpool_sequences", "Live sequences.", (), lambda s: {(): s.sequences}),
    _gauge("kvpool_leases", "Open leases.", (), lambda s: {(): s.leases}),
    _gauge("kvpool_reservations", "Open reservations of loaders.", (), lambda s: {(): s.reservations}),
    _gauge("kvpool_oldest_lease_age_seconds", "Age of the oldest open lease, 0 without any.", (), lambda s: {(): s.oldest_lease_ms / 1e3}),
    _gauge("kvpool_staging_hand_overs", "Block tables on their way to the device.", (), lambda s: {(): s.hand_overs}),
    _gauge("kvpool_staging_hand_overs_peak", "The most of them at once, ever.", (), lambda s: {(): s.most_hand_overs}),
    _counter(
        "kvpool_query_tokens",
        "Tokens of prompts that were looked up: on the device all, on the host those that full blocks of the device did not have.",
        ("tier",),
        lambda s: {("device",): s.prompt_tokens, ("host",): s.prompt_tokens - s.reused_device_tokens},
    ),
    _counter(
        "kvpool_hit_tokens",
        "Tokens of prompts that were reused in full blocks.",
        ("tier",),
        lambda s: {("device",): s.reused_device_tokens, ("host",): s.reused_host_tokens},
    ),
    _counter(
        "kvpool_partial_hit_tokens",
        "Tokens of prompts that were copied out of blocks that matched in part.",
        (),
        lambda s: {(): s.partial_tokens},
    ),
    _counter(
        "kvpool_evicted_blocks",
        "Evictions. Device: offloaded, on_host (a copy was there), rule (not to be offloaded, or no host tier), host_full. "
        "Host: redundant (the content is still on the device), capacity.",
        ("group", "tier", "reason"),
        _each(
            lambda g: {
                ("device", "offloaded"): g.evicted_offloaded_blocks,
                ("device", "on_host"): g.offloads_saved,
                ("device", "rule"): g.evicted_by_rule_blocks,
                ("device", "host_full"): g.evicted_host_full_blocks,
                ("host", "redundant"): g.redundant_dropped,
                ("host", "capacity"): g.evicted_host_blocks,
            }
        ),
    ),
    _counter(
        "kvpool_forgotten_blocks",
        "Blocks whose content is nowhere any more: evicted, superseded, rewound, or released without storing.",
        ("group", "tier"),
        _each(lambda g: {("device",): g.forgotten_device_blocks, ("host",): g.forgotten_host_blocks}),
    ),
    _counter(
        "kvpool_moved_bytes",
        "Bytes that the device was told to copy: offload, onboard, within a tier.",
        ("group", "direction"),
        _each(lambda g: {("offload",): g.offloaded_bytes, ("onboard",): g.onboarded_bytes, ("within",): g.within_bytes}),
    ),
    _counter(
        "kvpool_moved_seconds",
        "Time that those copies took. Absent where the device copies behind its callers: the time to enqueue is not the time to move.",
        ("group", "direction"),
        _each(lambda g: {("offload",): g.offload_seconds, ("onboard",): g.onboard_seconds, ("within",): g.within_seconds}),
    ),
    _counter("kvpool_lost_blocks", "Blocks whose bytes a failing device never brought.", ("group",), _each(lambda g: {(): g.lost_blocks})),
    _counter("kvpool_expired_blocks", "Blocks whose retention has ended.", ("group",), _each(lambda g: {(): g.expired_blocks})),
    _counter(
        "kvpool_passed_blocks",
        "Blocks that a sliding window has passed, and that went back.",
        ("group",),
        _each(lambda g: {(): g.passed_blocks}),
    ),
    _counter("kvpool_events_dropped", "Events that were overwritten before anybody took them.", (), lambda s: {(): s.events_dropped}),
    _histogram(
        "kvpool_block_lifetime_seconds",
        "From storing to eviction. On the host, of content that was nowhere else.",
        ("group", "tier"),
        _each(lambda g: {("device",): g.lifetime_ms, ("host",): g.host_lifetime_ms}),
    ),
    _histogram(
        "kvpool_block_idle_before_eviction_seconds",
        "From the last use to eviction. On the host, of content that was nowhere else.",
        ("group", "tier"),
        _each(lambda g: {("device",): g.idle_ms, ("host",): g.host_idle_ms}),
    ),
    _histogram(
        "kvpool_block_reuse_gap_seconds",
        "From the last use of a block to the next hit on it.",
        ("group",),
        _each(lambda g: {(): g.reuse_gap_ms}),
    ),
)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound. The clock has whole milliseconds: below 2**i of them is no more than that."""
    counts = histogram.bins.cumsum().tolist()
    # The last bin is beyond what 32 bits of milliseconds can be told apart from the past, and is empty.
    return [(repr(2**i / 1e3), count) for i, count in enumerate(counts[:-1])] + [("+Inf", counts[-1])]


class PoolMetrics:
    """A collector of the pools that were added, registered in ``registry`` (default: that of the process) until ``close``.

    A scrape takes one snapshot of each pool, under that pool's state lock and no other; between scrapes nothing runs. Pools are not kept
    alive, and are shown no more once they are closed. A context manager. Thread-safe; changes no pool. Raises ValueError where the registry
    has these metrics already: several pools go into one collector.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = REGISTRY if registry is None else registry
        self._pools: dict[str, weakref.ref[KVCacheManager]] = {}
        self._lock = threading.Lock()
        self._registered = True
        self._registry.register(self)

    def add(self, pool: str, cache: KVCacheManager) -> None:
        """Show a pool from now on, with ``pool`` as its label.

        Raises TypeError, PoolClosed, and ValueError where an open pool has that name, for one that is no text, and by a closed collector.
        """
        if not isinstance(pool, str):
            raise TypeError(f"pool={pool!r:.80}: accepted is a string")
        try:
            pool.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"pool={pool!a:.80}: accepted is what UTF-8 can say ({error.reason})") from None
        if not isinstance(cache, KVCacheManager):
            raise TypeError(f"cache={cache!r:.80}: accepted is a KVCacheManager")
        if cache.closed:
            raise PoolClosed(f"pool={pool!r:.80}: it is closed, and would never be shown")
        with self._lock:
            if not self._registered:
                raise ValueError(f"pool={pool!r:.80}: the collector is closed, and would never show it")
            if _open(self._pools.get(pool)) not in (None, cache):
                raise ValueError(f"pool={pool!r}: an open pool has this name already")
            self._pools[pool] = weakref.ref(cache)

    def remove(self, pool: str) -> None:
        """Show a pool no more. Raises ValueError for a name that was not added."""
        with self._lock:
            if self._pools.pop(pool, None) is None:
                raise ValueError(f"pool={pool!r}: accepted are the names that were added: {sorted(self._pools)}")

    def close(self) -> None:
        """Take the collector out of its registry. Closing twice is fine."""
        with self._lock:
            registered, self._registered = self._registered, False
            self._pools.clear()
        if registered:
            self._registry.unregister(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def describe(self) -> Iterator[Metric]:
        """All metrics without values; what a registry asks for."""
        return _families([])

    def collect(self) -> Iterator[Metric]:
        """All metrics of all open pools; what a scrape asks for."""
        with self._lock:
            # A pool that is closed while it is read still has its last figures.
            self._pools = {name: known for name, known in self._pools.items() if _open(known) is not None}
            pools = [(name, known()) for name, known in self._pools.items()]
        return _families([(name, cache.stats()) for name, cache in pools if cache is not None])


@contextmanager
def served(port: int, host: str = "127.0.0.1") -> Iterator[tuple[PoolMetrics, str]]:
    """A collector in a registry of its own, and the address where it is served over HTTP, by a thread, while the context is open.

    Anybody who reaches ``host`` can read it; by default this machine. Port 0 is any that is free. Raises TypeError, ValueError, OSError.
    """
    port = integer_argument("port", port, 0, 65535)
    registry = CollectorRegistry()
    with PoolMetrics(registry) as metrics:
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise OSError(f"metrics at {host}, port {port}: {error}") from error
        try:
            yield metrics, f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _open(known: weakref.ref[KVCacheManager] | None) -> KVCacheManager | None:
    cache = None if known is None else known()
    return None if cache is None or cache.closed else cache


def _families(pools: list[tuple[str, Stats]]) -> Iterator[Metric]:
    for kind, name, text, labels, read in DEFINITIONS:
        family: Any = kind(name, text, labels=("pool", *labels))
        for pool, stats in pools:
            for values, value in read(stats).items():
                if isinstance(value, Histogram):
                    family.add_metric((pool, *values), _buckets(value), value.total_ms / 1e3)
                elif value is not None:
                    family.add_metric((pool, *values), value)
        yield family
