"""A hit never loses to recomputation: on a simulated clock, whatever the store does."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from asv_bench.load_grid import cell, lost_most
from kvpool.storage.choice import BUDGET, Load, LoadOrCompute
from tests.seeds import some_of
from tests.stores.clock import World, grid, made_arrivals, means

REQUESTS = made_arrivals(1)
MIB = 1 << 20


def name_of(world: World) -> str:
    return f"{world.latency * 1e6:.0f}us-{world.bandwidth / 1e6:.0f}MB"


def trained(bandwidth: float, hits: int = 40) -> LoadOrCompute:
    """10 ms of computing a block of 1 MiB, and a store that has always had this bandwidth, and a latency of 10 ms."""
    latency, choice = 0.01, LoadOrCompute(1_600.0, MIB, 16)
    for _ in range(hits):
        for there in (100, 300):
            load = choice.choose(there)
            if load.blocks and choice.late(load, 0, min(latency + 4 * MIB / bandwidth, load.until)):
                choice.end(load, 0, load.until)
            elif load.blocks:
                choice.late(load, 4, latency + 4 * MIB / bandwidth)
                choice.end(load, there, latency + there * MIB / bandwidth)
    return choice


# -- on the simulated clock ----------------------------------------------------------------------------


@pytest.mark.parametrize("world", grid(4), ids=name_of)
def test_loading_never_loses_to_computing_nor_to_what_is_fixed(world: World) -> None:
    mean_seconds = means(world, REQUESTS)
    assert mean_seconds["choice"] <= 1.02 * mean_seconds["none"]
    assert mean_seconds["choice"] <= 1.1 * min(mean_seconds.values())


SCENARIOS: dict[str, tuple[World, float]] = {
    "one after another": (World(0, 1), 1.0),
    "prefill 1,500/s": (World(0, 1, prefill=1_500.0), 1.0),
    "prefill 100,000/s": (World(0, 1, prefill=100_000.0), 1.0),
    "noise": (World(0, 1, noise=1.0), 1.0),
    "collapse to 0.001": (World(0, 1, collapse=1e-3, every=100, lasts=100), 1.0),
    "collapse to 0": (World(0, 1, collapse=0.0, every=100, lasts=100), 1.0),
    "shared, as it came": (World(0, 1, alone=False), 1.0),
    "shared, 10 x as fast": (World(0, 1, alone=False), 10.0),
    "shared, 100 x as fast": (World(0, 1, alone=False), 100.0),
    "shared, 10 x, noise": (World(0, 1, alone=False, noise=1.0), 10.0),
    "shared, 10 x, collapse": (World(0, 1, alone=False, collapse=1e-3, every=100, lasts=100), 10.0),
    "one engine at 63 %": (World(0, 1, alone=False, engine=True, prefill=40_000.0), 0.63),
}
"""Worlds without their latency and bandwidth, and how much faster the requests come."""

FAST = [world for world in grid(4) if world.bandwidth > 1e9]


@pytest.mark.parametrize("world", some_of(2, [*FAST[2::3], *FAST[::3], *FAST[1::3]]), ids=name_of)
@pytest.mark.parametrize("name", SCENARIOS)
def test_it_holds_in_each_scenario(name: str, world: World) -> None:
    """Prefill speeds, noise, shared bandwidth, one engine for all, a collapse in the middle of a load."""
    model, faster = SCENARIOS[name]
    requests = [request._replace(time=request.time / faster) for request in made_arrivals(3)]
    latencies = means(replace(model, latency=world.latency, bandwidth=world.bandwidth), requests)
    assert latencies["choice"] <= 1.02 * latencies["none"]
    assert latencies["choice"] <= 1.1 * min(latencies.values())


@pytest.mark.parametrize("collapse", [1e-3, 0.0])
@pytest.mark.parametrize("world", some_of(3, [*grid(3)[::-2], *grid(3)[1::2]]), ids=name_of)
def test_collapses_in_mid_load_cost_little(world: World, collapse: float) -> None:
    latencies = means(replace(world, collapse=collapse, every=25, lasts=25), REQUESTS)
    assert latencies["choice"] <= 1.02 * latencies["none"]


@pytest.mark.parametrize(
    ("users", "bandwidth"),
    some_of(3, [(1, 1e9), (4, 1e9), (16, 20e9), (1, 0.5e9), (1, 4e9), (4, 4e9), (16, 2e9)]),
)
def test_neither_the_mean_nor_the_tail_loses_to_what_is_fixed(users: int, bandwidth: float) -> None:
    """Some cells of the grid, of prompts of 2,048 tokens."""
    losses = cell(2_048, users, bandwidth, requests=400)
    assert losses.mean <= 1.02 and losses.tail <= 1.10, losses
    assert losses.lost <= lost_most(users), losses


# -- the bound -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_no_store_costs_more_than_the_budget(seed: int) -> None:
    """Stores that give any number of blocks at any time, and stop at any time; several loads at once."""
    random = Random(seed)
    choice = LoadOrCompute(1_000.0, MIB, 16)
    open_loads: list[tuple[Load, int]] = []
    computing = spent = longest = 0.0
    kind = random.choice(["dead", "slow", "jumpy", "good, then dead"])
    for number in range(1_500):
        there = random.choice([1, 3, 10, 30, 100, 1_000])
        computed = there * choice.block_seconds
        computing, longest = computing + computed, max(longest, computed)
        load = choice.choose(there, random.choice([0, 0, MIB]))
        if load.blocks:
            open_loads.append((load, there))
        else:
            spent += computed
        while open_loads and (len(open_loads) > 3 or random.random() < 0.5):
            load, there = open_loads.pop(random.randrange(len(open_loads)))
            came, elapsed = run_of(choice, load, kind, random, number)
            choice.end(load, came, elapsed)
            spent += elapsed + (there - came) * choice.block_seconds
    for load, there in open_loads:
        choice.late(load, 0, load.until)
        choice.end(load, 0, load.until)
        spent += load.until + there * choice.block_seconds
    assert spent <= (1 + BUDGET) * computing + longest / 2, f"{kind}, seed {seed}"


def test_the_first_hits_in_a_dead_store_cost_no_more_than_half_of_one() -> None:
    choice = LoadOrCompute(1_600.0, MIB, 16)
    computing, lost = 0.0, 0.0
    for _ in range(20):
        load = choice.choose(100)
        computing += 100 * choice.block_seconds
        if load.blocks:
            assert choice.late(load, 0, load.until)
            choice.end(load, 0, load.until)
            lost += load.until
        assert lost <= BUDGET * computing + 100 * choice.block_seconds / 2
    assert lost > 0, "it was asked"


def run_of(choice: LoadOrCompute, load: Load, kind: str, random: Random, number: int) -> tuple[int, float]:
    """Blocks that come until the load is over or late, and the time it takes."""
    came, elapsed = 0, 0.0
    pace = choice.block_seconds * {"dead": 1e9, "slow": 1.5, "jumpy": 0.3, "good, then dead": 0.1}[kind]
    pace = 1e9 if kind == "good, then dead" and number % 400 > 200 else pace
    while came < load.blocks:
        piece = min(random.randint(1, 8), load.blocks - came)
        after = elapsed + piece * pace * (random.choice([0.1, 1, 20]) if kind == "jumpy" else 1)
        if after >= load.until:
            elapsed = load.until
            assert choice.late(load, came, elapsed)
            break
        came, elapsed = came + piece, after
        assert not choice.late(load, came, elapsed)
    return came, elapsed


# -- one choice ----------------------------------------------------------------------------------------


def test_a_hit_at_the_end_of_a_long_queue_is_computed() -> None:
    choice = trained(bandwidth=1e9)
    assert choice.choose(100, ahead_bytes=200 * MIB).blocks == 100
    assert choice.choose(100, ahead_bytes=800 * MIB).blocks == 0, "0.8 s of waiting saves 1 s and delays others"


def test_a_hit_that_would_make_an_older_load_wait_for_the_engine_waits_for_the_store() -> None:
    """A load takes 0.51 s, the engine 1 s, and the queue another 0.8 s."""
    choice, queue = trained(bandwidth=200e6), 150 * MIB
    assert choice.choose(100, queue).blocks == choice.choose(100, queue, waited=0.2).blocks == 0
    load = choice.choose(100, queue, waited=0.9)
    assert load.blocks == 100 and not choice.late(load, 0, 1.2)
    choice.end(load, 100, 1.3)
    lost = trained(bandwidth=200e6)
    for _ in range(200):
        other = lost.choose(100, queue, waited=0.9)
        if not other.blocks:
            break
        assert lost.late(other, 0, other.until)
        lost.end(other, 0, other.until)
    assert not other.blocks, "a store that does not keep its promises is waited for no more"


def test_many_loads_at_once_share_what_may_be_lost() -> None:
    """After a long good past, a store may die while many loads are on their way."""
    choice = trained(bandwidth=1e9, hits=500)
    loads = [load for load in (choice.choose(100) for _ in range(2_000)) if load.blocks]
    most = 64 * 2.0 + 2_000 * BUDGET * 1.0
    assert 100 < len(loads) and sum(load.until for load in loads) <= most, "a mean hit takes 2 s at most"
    assert min(load.until for load in loads) >= 0.01 + 4 * MIB / 1e9, "each can see its first blocks come"


def test_loads_that_gain_less_than_expected_end_until_one_succeeds() -> None:
    choice = trained(bandwidth=1e9)
    failed = 0
    while (load := choice.choose(100)).blocks:
        assert choice.late(load, 0, load.until)
        choice.end(load, 0, load.until)
        failed += 1
        assert failed < 10
    assert failed > 1, "one late load is not a reason"
    hits = 0
    while not (load := choice.choose(100)).blocks:
        hits += 1
        assert hits < 1_000, "no probe"
    choice.end(load, 100, 0.11)
    assert choice.choose(100).blocks == 100


def test_probes_wait_longer_each_time() -> None:
    """A latency that is longer than what the first probe may lose is found all the same."""
    choice = LoadOrCompute(1_600.0, MIB, 16)
    risked = []
    for _ in range(3_000):
        load = choice.choose(100)
        if load.blocks:
            risked.append(load.until)
            if load.until > 0.3:
                break
            assert choice.late(load, 0, load.until)
            choice.end(load, 0, load.until)
    assert risked[-1] > 0.3 and risked == sorted(risked)
    choice.end(load, 100, 0.3)
    assert choice.choose(100).blocks == 100


def test_a_load_that_nobody_waits_for_teaches_nothing() -> None:
    chooser, other = trained(1e9), trained(1e9)
    for _ in range(1_000):
        load = chooser.choose(100)
        assert load.blocks, "its risk has come back"
        chooser.drop(load)
    assert chooser.expected() == other.expected()
