"""Metrics of pools for Prometheus: a collector that reads ``stats()`` when it is scraped, and does nothing otherwise.

Every metric has the label ``pool``, and the labels that ``metric_definitions`` says. ``DASHBOARD`` is a Grafana
dashboard that shows all metrics.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from kvpool.common.arguments import text_argument
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.process import Closing
from kvpool.errors import PoolClosed
from kvpool.hostcache.host_cache import HostCache
from kvpool.hostcache.host_stats import HostCacheStats
from kvpool.integrations.metric_definitions import (
    COUNTER,
    DEFINITIONS,
    GAUGE,
    HISTOGRAM,
    HOST_DEFINITIONS,
    HOST_STORAGE_DEFINITIONS,
    SERVER_DEFINITIONS,
    STORAGE_DEFINITIONS,
    STORE_DEFINITIONS,
    Definition,
    Kind,
)
from kvpool.pool.manager import KVCacheManager
from kvpool.pool.stats import Histogram, Stats
from kvpool.storage.host_storage_manager import HostStorageManager, HostStorageManagerStats
from kvpool.storage.storage_manager import StorageManager, StorageManagerStats

try:
    from kvpool.storage.backends.peer import ServedStats, StoreServer

    SERVERS: tuple[type, ...] = (StoreServer,)
    SERVED: tuple[type, ...] = (ServedStats,)
except ImportError:  # Without pyzmq there are none.
    SERVERS = SERVED = ()
try:
    from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "prometheus_client":
        raise
    raise ImportError('kvpool.integrations.metrics needs prometheus-client: pip install ".[metrics]"') from error

DASHBOARD = Path(__file__).parent / "dashboards" / "grafana.json"
"""A dashboard to import into Grafana. It asks for the Prometheus data source."""

Cache: TypeAlias = "KVCacheManager | HostCache | StorageManager | HostStorageManager | StoreServer"
_FAMILIES: dict[Kind, Any] = {
    COUNTER: CounterMetricFamily,
    GAUGE: GaugeMetricFamily,
    HISTOGRAM: HistogramMetricFamily,
}


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound. The clock counts whole milliseconds, so a time below 2**i ms is at most
    that."""
    counts = histogram.bins.cumsum().tolist()
    # The last bin is empty: a clock of 32 bits has no such long times.
    return [(repr(2**i / 1e3), count) for i, count in enumerate(counts[:-1])] + [("+Inf", counts[-1])]


class PoolMetrics(Closing):
    """A Prometheus collector of the pools that were added. A context manager.

    Parameters
    ----------
    registry : prometheus_client.CollectorRegistry, optional
        It has the collector until ``close``. By default that of the process.

    Raises
    ------
    ValueError
        If the registry has these metrics already: add several pools to one collector.

    Notes
    -----
    Thread-safe; changes no pool. A scrape takes one snapshot of each pool, under that pool's state lock and no other.
    Between scrapes nothing runs. The collector does not keep pools alive, and no longer shows pools that are closed.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = REGISTRY if registry is None else registry
        self._pools: dict[tuple[str, bool], weakref.ref[Cache]] = {}
        self._lock = threading.Lock()
        self._registered = True
        self._registry.register(self)

    def add(self, pool: str, cache: Cache) -> None:
        """Show a pool, a host cache, a storage manager or a store server from now on.

        Parameters
        ----------
        pool : str
            Its label. A storage manager may have the label of its pool or cache.
        cache : KVCacheManager, HostCache, StorageManager, HostStorageManager or StoreServer
            What is shown. It is not kept alive.

        Raises
        ------
        TypeError
            For anything else.
        ValueError
            If an open pool has that name, if the name is not valid text, and if the collector is closed.
        PoolClosed
            If ``cache`` is closed.
        """
        pool = text_argument("pool", pool)
        try:
            pool.encode()
        except UnicodeEncodeError as error:  # No scrape could write it, nor any other metric of the process.
            raise ValueError(f"pool: expected text that UTF-8 can encode ({error.reason}), got {pool!a:.80}") from None
        if not isinstance(cache, (KVCacheManager, HostCache, StorageManager, HostStorageManager, *SERVERS)):
            accepted = "a KVCacheManager, a HostCache, their storage managers, or a StoreServer"
            raise TypeError(f"cache: expected {accepted}, got {cache!r:.80}")
        if cache.closed:
            raise PoolClosed(
                f"cache: expected an open one, got pool={pool!r:.80}, which is closed and would never be shown"
            )
        with self._lock:
            if not self._registered:
                raise ValueError(
                    f"pool: expected an open collector, which would show it, got a closed one for {pool!r:.80}"
                )
            what = pool, isinstance(cache, (StorageManager, HostStorageManager))
            if _open(self._pools.get(what)) not in (None, cache):
                raise ValueError(f"pool: expected a name that no open pool has, got {pool!r}")
            self._pools[what] = weakref.ref(cache)

    def remove(self, pool: str) -> None:
        """Stop showing a pool, and a storage manager of this name.

        Parameters
        ----------
        pool : str
            The label with which it was added.

        Raises
        ------
        ValueError
            For a name that was not added.
        """
        with self._lock:
            known = sorted({name for name, _ in self._pools})
            if pool not in known:
                raise ValueError(f"pool: expected the names that were added: {known}, got {pool!r}")
            self._pools = {what: cache for what, cache in self._pools.items() if what[0] != pool}

    def close(self) -> None:
        """Take the collector out of its registry. A second call does nothing."""
        with self._lock:
            registered, self._registered = self._registered, False
            self._pools.clear()
        if registered:
            self._registry.unregister(self)

    def describe(self) -> Iterator[Metric]:
        """Return all metrics without values, for a registry.

        Returns
        -------
        iterator of prometheus_client.Metric
            One for each family.
        """
        return _families([])

    def collect(self) -> Iterator[Metric]:
        """Return all metrics of all open pools, for a scrape.

        Returns
        -------
        iterator of prometheus_client.Metric
            One for each family.
        """
        with self._lock:
            # A pool that is closed while it is read still has its last figures.
            self._pools = {name: known for name, known in self._pools.items() if _open(known) is not None}
            pools = [(name, known()) for (name, _), known in self._pools.items()]
        return _families([(name, cache.stats()) for name, cache in pools if cache is not None])


@contextmanager
def served(port: int, host: str = "127.0.0.1", *, health: Callable[[], str] = str) -> Iterator[tuple[PoolMetrics, str]]:
    """Serve a collector over HTTP while the context is open.

    Parameters
    ----------
    port : int
        The port; 0 takes any free one.
    host : str, default "127.0.0.1"
        The address to listen at. Every client that reaches it can read the pages.
    health : callable, optional
        Returns what is wrong, or "". The page ``/health`` has the status 200, or 503 with this text.

    Yields
    ------
    collector : PoolMetrics
        A collector with a registry of its own.
    address : str
        The URL of the metrics.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type or value.
    OSError
        If the port is taken, or the address is not one of this machine.

    Notes
    -----
    A thread serves until the context is closed.
    """
    port = integer_argument("port", port, 0, 65535)
    registry = CollectorRegistry()
    with PoolMetrics(registry) as metrics:
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise OSError(f"metrics at {host}, port {port}: {error}") from error
        all_pages: Any = server.get_app()

        def pages(request: dict[str, Any], respond: Any) -> Any:
            if request["PATH_INFO"] != "/health":
                return all_pages(request, respond)
            wrong = health()
            respond("503 Service Unavailable" if wrong else "200 OK", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{wrong or 'ok'}\n".encode()]

        server.set_app(pages)
        try:
            yield metrics, f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _open(known: weakref.ref[Cache] | None) -> Cache | None:
    cache = None if known is None else known()
    return None if cache is None or cache.closed else cache


def _families(
    pools: list[tuple[str, Stats | HostCacheStats | StorageManagerStats | HostStorageManagerStats | ServedStats]],
) -> Iterator[Metric]:
    kinds: list[tuple[tuple[Definition, ...], Any]] = [
        (DEFINITIONS, Stats),
        (HOST_DEFINITIONS, HostCacheStats),
        (STORE_DEFINITIONS, (StorageManagerStats, HostStorageManagerStats)),
        (STORAGE_DEFINITIONS, StorageManagerStats),
        (HOST_STORAGE_DEFINITIONS, HostStorageManagerStats),
        *((SERVER_DEFINITIONS, kind) for kind in SERVED),
    ]
    for definitions, of in kinds:
        for kind, name, text, labels, read in definitions:
            family = _FAMILIES[kind](name, text, labels=("pool", *labels))
            for pool, stats in pools:
                for values, value in read(stats).items() if isinstance(stats, of) else ():
                    if isinstance(value, Histogram):
                        family.add_metric((pool, *values), _buckets(value), value.total_ms / 1e3)
                    elif value is not None:
                        family.add_metric((pool, *values), value)
            yield family
