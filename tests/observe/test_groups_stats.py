"""Statistics and metrics of several groups of layers: each group's own, their sums, and a prompt that counts once."""

from __future__ import annotations

from dataclasses import fields
from random import Random
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from grouped import MIXES, T, cached, churn, encoded, pool_of, seed
from kvpool import GroupStats
from kvpool.copying.transfer import Traffic
from kvpool.device.base import SOURCE, TARGET, TOKENS
from kvpool.device.cpu import CpuDevice
from kvpool.observe.metrics import DEFINITIONS, PoolMetrics
from kvpool.pool.stats import Histogram, TierStats
from kvpool.state.arrays import GroupSizes, Settings, States
from kvpool.state.records import OFFLOAD, ONBOARD, WITHIN
from tests import debug

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


def test_a_pool_of_one_group_says_of_it_what_it_says_of_itself() -> None:
    with pool_of("window", event_capacity=2) as cache:
        for _ in churn(cache, Random(4), 40):
            pass
        stats = cache.stats()
        (group,) = stats.groups
        assert all((plain(getattr(stats, name)) == plain(getattr(group, name))).all() for name in OF_GROUPS)
        assert stats.events_dropped and stats.prompt_tokens


@pytest.mark.parametrize("mix", MIXES)
def test_events_that_any_group_dropped_are_counted(mix: str) -> None:
    with pool_of(mix, event_capacity=3) as cache:
        for _ in churn(cache, Random(6), 40):
            pass
        dropped = cache.stats().events_dropped
        assert 0 < dropped == cache.events().number, "numbers count from 0, and what is there begins behind the gap"


@pytest.mark.parametrize("mix", MIXES)
def test_tiers_of_a_group_are_those_of_its_blocks(mix: str) -> None:
    with pool_of(mix, device=20) as cache:
        for _ in churn(cache, Random(6), 15):
            pass
        seed(cache, range(50, 63))
        live = cache.add_sequence(list(range(80, 90)), **encoded(cache))
        cache.offload(list(range(50, 63)))
        stats = cache.stats()
        for group, own, state in zip(cache.groups, stats.groups, cache.core.states, strict=True):
            used = len(set(state.table[state.table >= 0].tolist()))
            assert (own.device.capacity, own.host.capacity) == (group.device_blocks, group.host_blocks)
            assert (
                own.device.used == used == own.device.capacity - own.device.free
                and own.device.pinned == own.host.used == 0
            )
            copies = set(cached(cache)[group.index, "device"]) & set(cached(cache)[group.index, "host"])
            assert own.host.redundant == len(copies) and (group.kind == "cross" or copies)
        cache.release(live)


def test_pins_are_those_of_each_group() -> None:
    with pool_of("full window full") as cache:
        seed(cache, range(9))
        cache.offload(list(range(9)))
        local = [debug.cached(state) for state in cache.core.states]
        first, last = cache.groups[0], cache.groups[2]
        device = [first.first_device_block + min(local[0]["device"].values())]
        device += [last.first_device_block + b for b in local[2]["device"].values()]
        host = [last.first_host_block + b - last.device_blocks for b in local[2]["host"].values()]
        with cache.pin_blocks([*device, *host, device[0]]):
            stats = cache.stats()
            assert [(group.device.pinned, group.host.pinned) for group in stats.groups] == [(1, 0), (0, 0), (2, 2)]
            assert (stats.device.pinned, stats.host.pinned) == (3, 2), "a block that is pinned twice is one block"
            cache.verify()
        assert cache.stats().device.pinned == 0


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
    """Remembers every move that it was told to make."""

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
        for group, own in zip(cache.groups, stats.groups, strict=True):
            expected = {"offload": 0, "onboard": 0, "within": 0}
            ends = [(group.first_device_block, group.device_blocks), (group.first_host_block, group.host_blocks)]
            for source, target, tokens in device.moves:
                if any(0 <= target - first < count for first, count in ends):
                    on_device = source < boundary, target < boundary
                    direction = {(True, False): "offload", (False, True): "onboard"}.get(on_device, "within")
                    expected[direction] += tokens * group.block_bytes // group.layouts[0].tokens_per_block
            assert (own.offloaded_bytes, own.onboarded_bytes, own.within_bytes) == tuple(expected.values())
            if group.kind != "cross":
                assert own.offloaded_bytes and own.offload_seconds
                assert own.onboarded_bytes >= own.onboarded_blocks * group.block_bytes, (
                    "and partial copies out of host blocks"
                )
        assert stats.onboarded_bytes or "recurrent" in mix


def test_groups_that_move_in_one_call_share_its_time_by_their_bytes() -> None:
    heads = States([GroupSizes(2, 2), GroupSizes(3, 3)], Settings(T, 4, 8, bytes(16))).heads
    moved = Traffic(heads, [10, 30])
    # Device blocks 0 to 1 and 2 to 4, host blocks 5 to 6 and 7 to 9.
    moved.add(
        np.array(
            [[0, 6, T, -1, OFFLOAD], [2, 7, T, -1, OFFLOAD], [9, 3, T, -1, ONBOARD], [3, 4, 1, -1, WITHIN]], np.int64
        ),
        1000 * 290,
    )
    assert moved.nbytes == [[40, 0, 0], [120, 120, 30]]
    (first,) = [ns for ns in moved.nanoseconds[0] if ns]
    assert [round(ns / first, 3) for ns in moved.nanoseconds[1]] == [3, 3, 0.75]
    assert sum(map(sum, moved.nanoseconds)) == pytest.approx(290_000, abs=5)


# -- metrics -------------------------------------------------------------------------------------


def test_metrics_of_blocks_name_the_group_and_tokens_of_prompts_do_not() -> None:
    registry = CollectorRegistry()
    with PoolMetrics(registry) as metrics, pool_of("full window recurrent cross") as cache, pool_of("full") as single:
        metrics.add("several", cache)
        metrics.add("single", single)
        for pool in (cache, single):
            for _ in churn(pool, Random(1), 20):
                pass
        text = generate_latest(registry).decode()
        stats, samples = cache.stats(), [s for family in text_string_to_metric_families(text) for s in family.samples]

    def told(name: str, **labels: str) -> list[float]:
        return [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]

    for definition in DEFINITIONS:
        own = [s for s in samples if s.name.startswith(definition.name) and s.labels["pool"] == "several"]
        assert {s.labels.get("group") for s in own} == (
            {"0", "1", "2", "3"} if "group" in definition.labels else {None}
        ), definition.name
    assert {s.labels.get("group", "0") for s in samples if s.labels["pool"] == "single"} == {"0"}
    for g, group in enumerate(stats.groups):
        assert sum(told("kvpool_blocks", pool="several", group=str(g), tier="device")) == group.device.capacity
        assert told("kvpool_moved_bytes_total", pool="several", group=str(g), direction="offload") == [
            group.offloaded_bytes
        ]
    assert told("kvpool_query_tokens_total", pool="several", tier="device") == [stats.prompt_tokens]
