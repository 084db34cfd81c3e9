"""Metrics: every figure of a scrape is what happened in the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from random import Random
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine import Engine, Make, small_layout
from grouped import MIXES, cached, churn, encoded, pool_of, seed
from kvpool import EvictionOptions, KVCacheManager
from kvpool.device.cpu import CpuDevice
from kvpool.device.regions import SOURCE, TARGET, TOKENS
from kvpool.integrations.metric_definitions import DEFINITIONS
from kvpool.integrations.metrics import PoolMetrics
from kvpool.pool import GroupStats
from kvpool.pool.stats import Histogram, TierStats
from tests.device.faults import FaultyDevice

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
        (value,) = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        return value


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


def test_blocks_of_a_tier_are_each_in_one_state(watched: Make, scrape: Scrape) -> None:
    engine = watched(P=6, S=4)
    engine.seed(range(9), committed=9)
    engine.cache.content.offload(engine.prompt(range(9)))
    running = engine.add(range(20, 25))
    lease = engine.cache.pin(engine.keys(range(9))[:1], tier="host")
    scraped = scrape()
    # On the device two of the request, two full ones and a tail, one never used.
    for tier, counts in (("device", [2, 3, 0, 1]), ("host", [1, 0, 1, 2])):
        assert [scraped("kvpool_blocks", tier=tier, state=state) for state in STATES] == counts
    assert [scraped("kvpool_pinned_blocks", tier=tier) for tier in ("device", "host")] == [0, 1]
    assert (scraped("kvpool_sequences"), scraped("kvpool_leases")) == (1, 1)
    lease.close()
    engine.release(running)
    scraped = scrape()
    assert scraped("kvpool_pinned_blocks", tier="host") == 0
    assert (scraped("kvpool_sequences"), scraped("kvpool_leases")) == (0, 0)


def test_tokens_are_counted_where_they_were_found(watched: Make, scrape: Scrape) -> None:
    engine = watched(P=4, S=4)
    engine.seed(range(8), committed=8)
    for _ in range(2):
        engine.release(engine.add([*range(8), 99]))
    engine.release(engine.add(range(50, 66)), store=False)
    engine.release(engine.add([*range(8), 99]))
    engine.release(engine.add([0, 1, 2, 77, 78]))
    scraped = scrape()
    for name, device, host in (("query", 8 + 3 * 9 + 16 + 5, 56 - 16), ("hit", 16, 8)):
        assert scraped(f"kvpool_{name}_tokens_total", tier="device") == device
        assert scraped(f"kvpool_{name}_tokens_total", tier="host") == host
    assert scraped("kvpool_partial_hit_tokens_total") == 3


@pytest.mark.parametrize(
    ("host", "options", "retention", "reasons"),
    [
        (4, {}, None, {("device", "offloaded"): 1}),
        (0, {}, None, {("device", "rule"): 1}),
        (4, {}, [(0, None, 29, None)], {("device", "rule"): 1}),
        (4, {"eviction": EvictionOptions(offload_min_reuse=2)}, None, {("device", "rule"): 1}),
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
    engine.cache.content.offload(engine.prompt(range(4)))
    assert evictions(scrape) == {}, "a copy that was asked for is not an eviction"
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
    engine.cache.content.offload(engine.prompt(range(10, 14)))
    engine.add([99])
    assert evictions(scrape) == {("device", "offloaded"): 1, ("host", "redundant"): 1}


def histogram(scraped: Scraped, name: str, **labels: str) -> tuple[dict[float, float], float, float]:
    """Counts by upper bound, not cumulative and without zeros; the count; the sum."""
    buckets, before = {}, 0.0
    for sample in scraped.samples:
        if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
            if sample.value != before:
                buckets[float(sample.labels["le"])] = sample.value - before
            before = sample.value
    return buckets, scraped(f"{name}_count", **labels), scraped(f"{name}_sum", **labels)


def test_times_are_those_of_the_pools_clock(watched: Make, scrape: Scrape) -> None:
    engine = watched(P=2, S=1)

    def evicted(tier: str) -> tuple[Any, Any]:
        engine.release(engine.add(range(engine.clock.now, engine.clock.now + 8)), store=False)
        names = ("kvpool_block_lifetime_seconds", "kvpool_block_idle_before_eviction_seconds")
        lifetime, idle = (histogram(scrape(), name, tier=tier) for name in names)
        return lifetime, idle

    engine.clock.now = 1_000_000
    engine.seed(range(4), committed=4)
    engine.clock.now += 700
    running = engine.add([*range(4), 9])
    assert histogram(scrape(), "kvpool_block_reuse_gap_seconds") == ({1.024: 1}, 1, 0.7)
    engine.clock.now += 300
    engine.release(running, store=False)
    engine.clock.now += 4000
    assert evicted("device") == (({8.192: 1}, 1, 5.0), ({4.096: 1}, 1, 4.0))
    engine.clock.now += 2000
    engine.seed(range(20, 24), committed=4)
    engine.clock.now += 1
    assert evicted("host") == (({8.192: 1}, 1, 7.001), ({8.192: 1}, 1, 6.001))


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
    engine.cache.content.offload(engine.prompt(range(4)))
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


def moved(scrape: Scrape, unit: str) -> dict[str, float]:
    samples = [s for s in scrape().samples if s.name == f"kvpool_moved_{unit}_total"]
    return {s.labels["direction"]: s.value for s in samples}


def test_a_copy_that_the_device_refused_was_not_moved(metrics: PoolMetrics, scrape: Scrape) -> None:
    device = FaultyDevice(CpuDevice(), {(0, 0)})
    with KVCacheManager(small_layout(4), device_blocks=2, host_blocks=2, device=device) as cache:
        metrics.add("a", cache)
        sequence = cache.add_sequence(list(range(4)))
        cache.commit(sequence)
        assert cache.content.offload(cache.block_keys(list(range(4)))) == 1
        assert scrape()("kvpool_lost_blocks_total") == 1
        assert moved(scrape, "bytes") == {"offload": 0, "onboard": 0, "within": 0}
        cache.release(sequence)


def test_no_time_is_reported_where_the_device_copies_after_the_call(metrics: PoolMetrics, scrape: Scrape) -> None:
    with KVCacheManager(small_layout(4), device_blocks=2, host_blocks=2, device="sim") as cache:
        metrics.add("a", cache)
        sequence = cache.add_sequence(list(range(4)))
        cache.commit(sequence)
        cache.release(sequence)
        cache.content.offload(cache.block_keys(list(range(4))))
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


# ----------------------------------------
# Statistics and metrics of several groups of layers: each group's own, their sums, and a prompt that counts once.


OF_GROUPS = [field.name for field in fields(GroupStats)]


def plain(value: Any) -> Any:
    """A figure as numbers that can be added and compared."""
    if isinstance(value, TierStats):
        return np.array([getattr(value, field.name) for field in fields(value)])
    if isinstance(value, Histogram):
        return np.append(value.bins, value.total_ms)
    return np.array([value])


@pytest.mark.parametrize("mix", MIXES)
def test_figures_of_a_pool_are_the_sums_of_its_groups(mix: str) -> None:
    with pool_of(mix) as cache:
        for _ in churn(cache, Random(3), 40):
            pass
        stats = cache.stats()
        assert len(stats.groups) == len(cache.groups)
        for name in OF_GROUPS:
            assert (plain(getattr(stats, name)) == sum(plain(getattr(group, name)) for group in stats.groups)).all(), (
                name
            )
        assert stats.offloaded_bytes and stats.forgotten_host_blocks and stats.lifetime_ms.count


@pytest.mark.parametrize("mix", MIXES)
def test_events_that_any_group_dropped_are_counted(mix: str) -> None:
    with pool_of(mix, event_capacity=3) as cache:
        for _ in churn(cache, Random(6), 40):
            pass
        dropped = cache.stats().events_dropped
        assert 0 < dropped == cache.events().number, "numbers count from 0, and what is there begins after the gap"


@pytest.mark.parametrize("mix", MIXES)
def test_tiers_of_a_group_are_those_of_its_blocks(mix: str) -> None:
    with pool_of(mix, device=20) as cache:
        for _ in churn(cache, Random(6), 15):
            pass
        seed(cache, range(50, 63))
        live = cache.add_sequence(list(range(80, 90)), **encoded(cache))
        cache.content.offload(list(range(50, 63)))
        stats = cache.stats()
        for group, group_stats, state in zip(cache.groups, stats.groups, cache.core.states, strict=True):
            used = len(set(state.table[state.table >= 0].tolist()))
            assert (group_stats.device.capacity, group_stats.host.capacity) == (group.device_blocks, group.host_blocks)
            assert (
                group_stats.device.used == used == group_stats.device.capacity - group_stats.device.free
                and group_stats.device.pinned == group_stats.host.used == 0
            )
            copies = set(cached(cache)[group.index, "device"]) & set(cached(cache)[group.index, "host"])
            assert group_stats.host.redundant == len(copies) and (group.kind == "cross" or copies)
        cache.release(live)


@pytest.mark.parametrize("mix", MIXES)
def test_a_prompt_counts_once_and_is_reused_once(mix: str) -> None:
    with pool_of(mix, device=30) as cache:
        admitted = [seed(cache, range(17)), seed(cache, range(17)), seed(cache, [*range(16), 99])]
        stats = cache.stats()
        assert stats.prompt_tokens == 3 * 17
        assert stats.reused_device_tokens + stats.reused_host_tokens + stats.partial_tokens == sum(admitted) == 2 * 16
        assert (stats.reused_device_blocks + stats.reused_host_blocks, stats.missed_blocks) == (2 * 4, 5 + 1 + 1)
        assert stats.hit_rate == 8 / 15


class Recorder(CpuDevice):
    """Records every move that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.moves = list[list[int]]()

    def copy_blocks(self, moves: Any, stream: Any) -> None:
        super().copy_blocks(moves, stream)
        self.moves += moves[:, [SOURCE, TARGET, TOKENS]].tolist()


@pytest.mark.parametrize("mix", MIXES)
def test_moved_bytes_are_those_of_each_groups_blocks(mix: str) -> None:
    device = Recorder()
    with pool_of(mix, device=13, host=9, on=device) as cache:
        for _ in churn(cache, Random(8), 40):
            pass
        stats, boundary = cache.stats(), cache.device_blocks
        for group, group_stats in zip(cache.groups, stats.groups, strict=True):
            expected = {"offload": 0, "onboard": 0, "within": 0}
            ends = [(group.first_device_block, group.device_blocks), (group.first_host_block, group.host_blocks)]
            for source, target, tokens in device.moves:
                if any(0 <= target - first < count for first, count in ends):
                    on_device = source < boundary, target < boundary
                    direction = {(True, False): "offload", (False, True): "onboard"}.get(on_device, "within")
                    expected[direction] += tokens * group.block_bytes // group.layouts[0].tokens_per_block
            assert (group_stats.offloaded_bytes, group_stats.onboarded_bytes, group_stats.within_bytes) == tuple(
                expected.values()
            )
            if group.kind != "cross":
                assert group_stats.offloaded_bytes and group_stats.offload_seconds
                assert group_stats.onboarded_bytes >= group_stats.onboarded_blocks * group.block_bytes, (
                    "and partial copies out of host blocks"
                )
        assert stats.onboarded_bytes or "recurrent" in mix


# -- metrics -------------------------------------------------------------------------------------


def test_metrics_of_blocks_name_the_group_and_tokens_of_prompts_do_not() -> None:
    registry = CollectorRegistry()
    with PoolMetrics(registry) as metrics, pool_of("full window recurrent cross") as cache, pool_of("full") as single:
        for name, pool in (("several", cache), ("single", single)):
            metrics.add(name, pool)
            for _ in churn(pool, Random(1), 20):
                pass
        stats, scraped = cache.stats(), Scraped(registry)
    for definition in DEFINITIONS:
        samples = [s for s in scraped.samples if s.name.startswith(definition.name)]
        groups = {
            pool: {s.labels.get("group") for s in samples if s.labels["pool"] == pool} for pool in ("several", "single")
        }
        of_groups = "group" in definition.labels
        assert groups == {"several": set("0123") if of_groups else {None}, "single": {"0" if of_groups else None}}
    for g, group in enumerate(stats.groups):
        labels = {"pool": "several", "group": str(g)}
        blocks = [scraped("kvpool_blocks", tier="device", state=state, **labels) for state in STATES]
        assert sum(blocks) == group.device.capacity
        assert scraped("kvpool_moved_bytes_total", direction="offload", **labels) == group.offloaded_bytes
    assert scraped("kvpool_query_tokens_total", pool="several", tier="device") == stats.prompt_tokens
