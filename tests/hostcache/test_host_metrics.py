"""Metrics of a host cache, beside those of pools: every figure of a scrape is what happened in it."""

from __future__ import annotations

import pytest

from tests.hostcache.conftest import Make, keys, store

prometheus = pytest.importorskip("prometheus_client")


def test_a_scrape_has_the_figures_of_a_host_cache(make: Make) -> None:
    from kvpool.integrations.metrics import PoolMetrics

    now = [0]
    registry, cache = prometheus.CollectorRegistry(), make(4, clock=lambda: now[0])
    with PoolMetrics(registry) as metrics:
        metrics.add("host", cache)

        def value(name: str, **labels: str) -> float | None:
            sample: float | None = registry.get_sample_value(f"kvpool_host_cache_{name}", {"pool": "host", **labels})
            return sample

        store(cache, "a", "b", "c")
        cache.reserve(keys("d"))
        cache.abort(keys("d"))
        lease = cache.pin(keys("a"))
        cache.reserve(keys("e", "f"))
        states = {state: value("blocks", state=state) for state in ("used", "cached", "empty")}
        assert states == {"used": 3, "cached": 1, "empty": 0}
        assert (value("pinned_blocks"), value("pending_blocks"), value("leases")) == (1, 2, 1)
        counted = {"reserved": 6, "published": 3, "aborted": 1, "reused": 1, "evicted": 1, "forgotten": 1}
        assert {what: value("keys_total", what=what) for what in counted} == counted
        assert value("lifetime_seconds_count") == value("reuse_gap_seconds_count") == 1
        assert registry.get_sample_value("kvpool_blocks", {"pool": "host"}) is None
        cache.abort(keys("e", "f"))
        cache.reserve(keys("g", "h"), deadline_seconds=0.01)
        assert (value("overdue_blocks"), value("expired_reservations_total")) == (0, 0)
        now[0] = 10
        assert (value("overdue_blocks"), value("expired_reservations_total")) == (2, 2)
        cache.abort(keys("g"))
        assert (value("overdue_blocks"), value("expired_reservations_total")) == (1, 2)
        lease.close()
        cache.close()
        assert value("leases") is None, "a closed cache is not shown"
        with pytest.raises(TypeError, match="expected a KVCacheManager, a HostCache, their storage managers"):
            metrics.add("other", object())  # type: ignore[arg-type]
