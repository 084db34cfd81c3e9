"""Metrics: every figure of a scrape is what happened in the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine import Engine, small_layout
from kvpool import KVCacheManager
from kvpool.device.cpu import CpuDevice
from kvpool.observe.metrics import PoolMetrics
from tests.device.faults import FaultyDevice

Make = Callable[..., Engine]
Scrape = Callable[[], "Scraped"]
STATES = ("used", "cached", "redundant", "empty")


class Scraped:
    """The text of one scrape, as Prometheus reads it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.families = {
            family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())
        }
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """The value of the one sample with these labels."""
        (found,) = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        return found


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Iterator[PoolMetrics]:
    with PoolMetrics(registry) as opened:
        yield opened


@pytest.fixture
def watched(make: Make, metrics: PoolMetrics) -> Make:
    """Makes an engine whose pool the collector shows as "a"."""

    def open_(**options: Any) -> Engine:
        engine = make(**options)
        metrics.add("a", engine.cache)
        return engine

    return open_


@pytest.fixture
def scrape(registry: CollectorRegistry) -> Scrape:
    return lambda: Scraped(registry)


def tiers(scraped: Scraped, name: str) -> tuple[float, float]:
    return scraped(name, tier="device"), scraped(name, tier="host")


def test_blocks_of_a_tier_are_each_in_one_state(watched: Make, scrape: Scrape) -> None:
    engine = watched(P=6, S=4)
    engine.seed(range(9), committed=9)
    engine.cache.offload(engine.prompt(range(9)))
    running = engine.add(range(20, 25))
    lease = engine.cache.pin(engine.keys(range(9))[:1], tier="host")
    scraped = scrape()
    # On the device two of the request, two full ones and a tail, one never used.
    for tier, counts in (("device", [2, 3, 0, 1]), ("host", [1, 0, 1, 2])):
        assert [scraped("kvpool_blocks", tier=tier, state=state) for state in STATES] == counts
    assert tiers(scraped, "kvpool_pinned_blocks") == (0, 1)
    assert (scraped("kvpool_sequences"), scraped("kvpool_leases")) == (1, 1)
    lease.close()
    engine.release(running)
    scraped = scrape()
    assert scraped("kvpool_pinned_blocks", tier="host") == 0
    assert (scraped("kvpool_sequences"), scraped("kvpool_leases")) == (0, 0)


def test_tokens_are_counted_where_they_were_found(watched: Make, scrape: Scrape) -> None:
    engine = watched(P=4, S=4)
    engine.seed(range(8), committed=8)
    engine.release(engine.add([*range(8), 99]))
    assert tiers(scrape(), "kvpool_query_tokens_total") == (17, 9)
    assert tiers(scrape(), "kvpool_hit_tokens_total") == (8, 0)
    engine.release(engine.add(range(50, 66)), store=False)
    engine.release(engine.add([*range(8), 99]))
    engine.release(engine.add([0, 1, 2, 77, 78]))
    scraped = scrape()
    assert tiers(scraped, "kvpool_hit_tokens_total") == (8, 8)
    assert scraped("kvpool_query_tokens_total", tier="host") == 17 + 16 + 9 + 5 - 8
    assert scraped("kvpool_partial_hit_tokens_total") == 3


@pytest.mark.parametrize(
    ("host", "options", "retention", "reasons"),
    [
        (4, {}, None, {("device", "offloaded"): 1}),
        (0, {}, None, {("device", "rule"): 1}),
        (4, {}, [(0, None, 29, None)], {("device", "rule"): 1}),
        (4, {"offload_min_reuse": 2}, None, {("device", "rule"): 1}),
    ],
)
def test_an_eviction_has_one_reason(
    watched: Make,
    scrape: Scrape,
    host: int,
    options: Any,
    retention: Any,
    reasons: dict[Any, int],
) -> None:
    engine = watched(P=1, S=host, **options)
    engine.seed(range(4), committed=4, retention=retention)
    assert evictions(scrape) == {}
    engine.add([99])
    assert evictions(scrape) == reasons


def evictions(scrape: Scrape) -> dict[tuple[str, str], float]:
    samples = [s for s in scrape().samples if s.name == "kvpool_evicted_blocks_total" and s.value]
    return {(s.labels["tier"], s.labels["reason"]): s.value for s in samples}


def test_evictions_where_the_host_has_a_copy_or_no_room(watched: Make, scrape: Scrape) -> None:
    engine = watched(P=1, S=1)
    engine.seed(range(4), committed=4)
    engine.cache.offload(engine.prompt(range(4)))
    assert evictions(scrape) == {}, "a copy that was asked for is no eviction"
    engine.seed(range(10, 14), committed=4)
    assert evictions(scrape) == {("device", "on_host"): 1}
    engine.seed(range(20, 24), committed=4)
    assert evictions(scrape) == {("device", "on_host"): 1, ("device", "offloaded"): 1, ("host", "capacity"): 1}
    with engine.cache.pin(engine.keys(range(10, 14)), tier="host"):
        engine.seed(range(30, 34), committed=4)
    assert evictions(scrape)["device", "host_full"] == 1
    engine.seed(range(40, 43), committed=3)
    engine.add([77])
    assert evictions(scrape)["device", "rule"] == 1, "an unfull tail is not offloaded"


def test_a_redundant_copy_that_makes_room_is_an_eviction_from_the_host(watched: Make, scrape: Scrape) -> None:
    engine = watched(P=2, S=1)
    engine.seed(range(4), committed=4)
    engine.seed(range(10, 14), committed=4)
    engine.cache.offload(engine.prompt(range(10, 14)))
    engine.add([99])
    assert evictions(scrape) == {("device", "offloaded"): 1, ("host", "redundant"): 1}


def histogram(scraped: Scraped, name: str, **labels: str) -> tuple[dict[float, float], float, float]:
    """Counts by upper bound, not cumulative and without zeros; the count; the sum."""
    found, before = {}, 0.0
    for sample in scraped.samples:
        if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
            if sample.value != before:
                found[float(sample.labels["le"])] = sample.value - before
            before = sample.value
    return found, scraped(f"{name}_count", **labels), scraped(f"{name}_sum", **labels)


def test_times_are_those_of_the_pools_clock(watched: Make, scrape: Scrape) -> None:
    engine = watched(P=2, S=1)
    engine.clock.now = 1_000_000
    engine.seed(range(4), committed=4)
    engine.clock.now += 700
    running = engine.add([*range(4), 9])
    scraped = scrape()
    assert histogram(scraped, "kvpool_block_reuse_gap_seconds") == ({1.024: 1}, 1, 0.7)
    engine.clock.now += 300
    engine.release(running, store=False)
    engine.clock.now += 4000
    engine.release(engine.add(range(10, 18)), store=False)
    scraped = scrape()
    assert histogram(scraped, "kvpool_block_lifetime_seconds", tier="device") == ({8.192: 1}, 1, 5.0)
    assert histogram(scraped, "kvpool_block_idle_before_eviction_seconds", tier="device") == ({4.096: 1}, 1, 4.0)
    assert histogram(scraped, "kvpool_block_lifetime_seconds", tier="host") == ({}, 0, 0)
    engine.clock.now += 2000
    engine.seed(range(20, 24), committed=4)
    engine.clock.now += 1
    engine.release(engine.add(range(30, 38)), store=False)
    scraped = scrape()
    assert histogram(scraped, "kvpool_block_lifetime_seconds", tier="host") == ({8.192: 1}, 1, 7.001)
    assert histogram(scraped, "kvpool_block_idle_before_eviction_seconds", tier="host") == ({8.192: 1}, 1, 6.001)
    assert histogram(scraped, "kvpool_block_lifetime_seconds", tier="device") == ({0.002: 1, 8.192: 1}, 2, 5.001)


def test_a_gap_is_between_two_hits(watched: Make, scrape: Scrape) -> None:
    engine = watched(P=4)
    engine.seed(range(4), committed=4)
    for milliseconds in (700, 300):
        engine.clock.now += milliseconds
        engine.add([*range(4), 9])
    assert histogram(scrape(), "kvpool_block_reuse_gap_seconds") == ({0.512: 1, 1.024: 1}, 2, 1.0)


def test_a_host_copy_was_used_when_its_device_block_was(watched: Make, scrape: Scrape) -> None:
    engine = watched(P=2, S=1)
    engine.seed(range(4), committed=4)
    engine.cache.offload(engine.prompt(range(4)))
    engine.clock.now += 1000
    engine.release(engine.add([*range(4), 9]), store=False)
    engine.clock.now += 2000
    engine.release(engine.add(range(10, 18)), store=False)
    engine.clock.now += 3000
    engine.seed(range(20, 24), committed=4)
    engine.release(engine.add(range(30, 38)), store=False)
    idle = histogram(scrape(), "kvpool_block_idle_before_eviction_seconds", tier="host")
    assert idle == ({8.192: 1}, 1, 5.0)


@pytest.mark.parametrize("milliseconds", [0, 1, 1023, 1024, 1025, (1 << 31) - 1])
def test_a_time_is_in_the_bucket_of_its_bounds(watched: Make, scrape: Scrape, milliseconds: int) -> None:
    engine = watched(P=1)
    engine.seed(range(4), committed=4)
    engine.clock.now += milliseconds
    engine.add([99])
    (bound,), _, total = histogram(scrape(), "kvpool_block_lifetime_seconds", tier="device")
    # A clock of whole milliseconds has seen less than one more.
    assert bound / 2 <= max(total, 0.0005) < bound and total == milliseconds / 1000


def test_moved_bytes_are_those_that_the_device_took(watched: Make, scrape: Scrape) -> None:
    engine = watched(P=2, S=2)
    layout = engine.cache.layout
    engine.seed(range(4), committed=4)
    engine.release(engine.add([0, 1, 2, 70]), store=False)
    assert moved(scrape, "bytes") == {"offload": 0, "onboard": 0, "within": 3 * layout.token_bytes}
    engine.release(engine.add(range(10, 18)), store=False)
    engine.release(engine.add([*range(4), 9]))
    block, within = layout.block_bytes, 3 * layout.token_bytes
    assert moved(scrape, "bytes") == {"offload": block, "onboard": block, "within": within}
    assert all(0 < seconds < 60 for seconds in moved(scrape, "seconds").values())


def moved(scrape: Scrape, unit: str) -> dict[str, float]:
    samples = [s for s in scrape().samples if s.name == f"kvpool_moved_{unit}_total"]
    return {s.labels["direction"]: s.value for s in samples}


def test_a_copy_that_the_device_refused_was_not_moved(metrics: PoolMetrics, scrape: Scrape) -> None:
    device = FaultyDevice(CpuDevice(), {(0, 0)})
    with KVCacheManager(small_layout(4), device_blocks=2, host_blocks=2, device=device) as cache:
        metrics.add("a", cache)
        sequence = cache.add_sequence(list(range(4)))
        cache.commit(sequence)
        assert cache.offload(cache.block_keys(list(range(4)))) == 1
        assert scrape()("kvpool_lost_blocks_total") == 1
        assert moved(scrape, "bytes") == {"offload": 0, "onboard": 0, "within": 0}
        cache.release(sequence)


def test_no_time_is_told_where_the_device_copies_behind_its_caller(metrics: PoolMetrics, scrape: Scrape) -> None:
    with KVCacheManager(small_layout(4), device_blocks=2, host_blocks=2, device="sim") as cache:
        metrics.add("a", cache)
        sequence = cache.add_sequence(list(range(4)))
        cache.commit(sequence)
        cache.release(sequence)
        cache.offload(cache.block_keys(list(range(4))))
        assert moved(scrape, "bytes")["offload"] == cache.layout.block_bytes
        assert moved(scrape, "seconds") == {} and cache.stats().offload_seconds is None


def test_the_oldest_lease_ages_on_the_pools_clock(watched: Make, scrape: Scrape) -> None:
    engine = watched(P=2, S=2)
    assert scrape()("kvpool_oldest_lease_age_seconds") == 0
    keys = engine.keys(range(4))
    engine.seed(range(4), committed=4)
    oldest = engine.cache.pin(keys)
    engine.clock.now += 1500
    with engine.cache.pin(keys):
        engine.clock.now += 1000
        assert scrape()("kvpool_oldest_lease_age_seconds") == 2.5
        assert scrape()("kvpool_pinned_blocks", tier="device") == 1, "pinned twice, it is one block"
        oldest.close()
        assert scrape()("kvpool_oldest_lease_age_seconds") == 1
        engine.clock.now = 0
        assert scrape()("kvpool_oldest_lease_age_seconds") == 0, "a clock that was set back"
