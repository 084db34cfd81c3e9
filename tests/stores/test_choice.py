"""A hit never loses to recomputation: on a simulated clock, whatever the store does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kvpool.stores.choice import BUDGET, LoadOrCompute
from tests.stores.clock import World, arrivals, grid, means

REQUESTS = arrivals(600)


@pytest.mark.parametrize("world", grid(4), ids=lambda w: f"{w.latency * 1e6:.0f}us-{w.bandwidth / 1e6:.0f}MB")
def test_loading_never_loses_to_computing_nor_to_what_is_fixed(world: World) -> None:
    found = means(world, REQUESTS)
    assert found["choice"] <= 1.02 * found["none"]


@pytest.mark.parametrize("collapse", [1e-3, 0.0])
@pytest.mark.parametrize("world", grid(3), ids=lambda w: f"{w.latency * 1e6:.0f}us-{w.bandwidth / 1e6:.0f}MB")
def test_a_collapse_in_mid_load_costs_little(world: World, collapse: float) -> None:
    found = means(replace(world, collapse=collapse, every=40, lasts=30), REQUESTS)
    assert found["choice"] <= 1.02 * found["none"]


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, "fast", True])
def test_bad_speeds_are_named(bad: Any) -> None:
    with pytest.raises(ValueError, match="prefill_tokens_per_s="):
        LoadOrCompute(bad, 4096, 16)


def test_a_store_that_gives_nothing_costs_its_budget_at_most() -> None:
    choice = LoadOrCompute(1000.0, 1 << 20, 16)
    lost = saved = 0.0
    for there in [*range(1, 60), *range(1, 60)] * 20:
        load = choice.choose(there)
        saved += there * choice.block_seconds
        if load.blocks:
            assert choice.late(load, 0, load.until)
            lost += load.until
            choice.end(load, 0, load.until)
    assert 0 < lost <= BUDGET * saved + choice.block_seconds / 4
