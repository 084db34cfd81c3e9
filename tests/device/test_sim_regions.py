"""What the sim device says of pools of several regions: races, undeclared writes and bad rows, by the ids of the
pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.device.sim import RaceError, SimDevice, UndeclaredWrite
from kvpool.memory.pools import MemoryPools
from tests.device import reference
from tests.device.pools import as_moves
from tests.device.regions import (
    BLOCKS,
    DEVICE_BLOCKS,
    LAYOUTS,
    WIDTH,
    WIDTHS,
    bound,
    ids_of,
    make_regions,
    random_region_moves,
    whole,
)

REGIONS = range(len(LAYOUTS))
PARTS = [(group, part) for group, parts in enumerate(LAYOUTS) for part in range(len(parts))]


@pytest.fixture(params=[0.0, 0.5, 1.0], ids=lambda progress: f"progress {progress}")
def pools(request: pytest.FixtureRequest) -> Iterator[MemoryPools]:
    """Races and writes that a test has not taken fail it at the end."""
    made = make_regions(SimDevice(3, progress=request.param, chunk_bytes=16))
    yield made
    made.device.synchronize()
    made.device.close()


def sim_of(pools: MemoryPools) -> SimDevice:
    assert isinstance(pools.device, SimDevice)
    return pools.device


def nothing() -> None:
    pass


def part_of(pools: MemoryPools, group: int, part: int) -> Any:
    """A layout and both tiers as integers, for ``reference.block_view``."""
    layout = pools.layouts[group][part]
    return layout, *(tier[group][part].view(f"u{layout.itemsize}") for tier in (pools.device_pools, pools.host_pools))


@pytest.mark.parametrize("region", REGIONS)
def test_accesses_of_a_block_on_two_streams_race_in_every_region(pools: MemoryPools, region: int) -> None:
    sim, (first, second, *_) = sim_of(pools), ids_of(region)
    a, b = (sim.create_stream(name) for name in "ab")
    sim.copy_blocks(as_moves((first, second, WIDTHS[region])), a)
    sim.launch(b, nothing, reads=[whole(second)])
    with pytest.raises(RaceError) as caught:
        sim.check()
    ((race,),) = [caught.value.races]
    assert (race.first.kind, race.second.kind, race.rows) == ("copy_blocks", "launch", (whole(second),))


@pytest.mark.parametrize("region", REGIONS)
def test_what_an_event_orders_is_no_race_in_any_region_and_neighbours_of_other_regions_do_not_race(
    pools: MemoryPools, region: int
) -> None:
    sim, (first, second, *_) = sim_of(pools), ids_of(region)
    a, b = (sim.create_stream(name) for name in "ab")
    sim.copy_blocks(as_moves((first, second, WIDTHS[region])), a)
    others = [whole(block) for block in range(BLOCKS) if block not in (first, second)]
    sim.launch(b, nothing, writes=others)
    sim.wait(b, sim.record(a))
    sim.launch(b, nothing, writes=[whole(second)])
    sim.check()


def test_rows_of_one_call_that_depend_on_each_other_race_with_themselves_in_their_region(pools: MemoryPools) -> None:
    sim = sim_of(pools)
    for region in (0, 1, 3):
        first, second, third, *_ = ids_of(region)
        sim.copy_blocks(as_moves((first, second, 1), (second, third, 1)))
        with pytest.raises(RaceError) as caught:
            sim.check()
        assert [race.rows for race in caught.value.races] == [(whole(second),)]


@pytest.mark.parametrize(("group", "part"), PARTS)
def test_a_write_of_the_host_that_it_did_not_declare_is_named_by_the_id_of_the_pool(
    pools: MemoryPools, group: int, part: int
) -> None:
    sim, token = sim_of(pools), WIDTHS[group] - 1
    memory = part_of(pools, group, part)
    for local, block in enumerate(ids_of(group)):
        with sim.host_access(reads=[whole(block)]):
            reference.block_view(*memory, local)[-1, -1, token, -1, -1] += 1
        with pytest.raises(UndeclaredWrite, match=rf"^block {block} tokens \[{token}\] changed") as caught:
            sim.check()
        assert (caught.value.block, caught.value.tokens) == (block, [token])
        with sim.host_access(writes=[(block, token, token + 1)]):
            reference.block_view(*memory, local)[-1, -1, token, -1, -1] += 1
        sim.check()


def test_a_write_in_a_pool_that_is_sampled_is_found_by_check_in_every_region() -> None:
    sim = SimDevice(0, compare="sample")
    pools = make_regions(sim)
    for group, part in PARTS:
        pools.host_pools[group][part].reshape(-1).view(np.uint8)[-1:] ^= 1
        if pools.host_pools[group][part].size:
            with pytest.raises(UndeclaredWrite) as caught:
                sim.check()
            assert caught.value.block == ids_of(group)[-1]
    sim.copy_blocks(random_region_moves(np.random.default_rng(0)))
    sim.synchronize()
    sim.close()


@pytest.mark.parametrize("row", [(5, 0, 2), (10, 0, 2), (8, 0, 3), (0, 0, 5), (BLOCKS, 0, 1), (-1, 0, 1), (7, 1, 2)])
def test_rows_of_more_tokens_than_a_block_of_the_region_has_are_refused(
    pools: MemoryPools, row: tuple[int, int, int]
) -> None:
    sim = sim_of(pools)
    if row[0] == 10:
        row = (sum(DEVICE_BLOCKS) + 4, 0, 2)
    for call in (lambda **rows: sim.launch(None, nothing, **rows), sim.host_access):
        for name in ("reads", "writes"):
            with pytest.raises(ValueError, match=rf"{name}\[1\]=.* are needed"):
                call(**{name: [(0, 0, WIDTH), row]})


def test_a_launch_may_write_what_it_declares_in_every_part(pools: MemoryPools) -> None:
    sim = sim_of(pools)

    def kernel() -> None:
        for group, part in PARTS:
            reference.block_view(*part_of(pools, group, part), 0)[...] = 7

    sim.launch(None, kernel, writes=[whole(ids_of(region)[0]) for region in REGIONS])
    sim.synchronize()
    for group, part in PARTS:
        assert (reference.block_view(*part_of(pools, group, part), 0) == 7).all()


def test_closing_under_a_read_of_the_last_token_of_any_region_is_a_race() -> None:
    for region in REGIONS:
        sim = SimDevice(progress=0.0)
        pools = make_regions(sim)
        block, _, tokens = whole(ids_of(region)[-1])
        sim.launch(None, nothing, reads=[(block, tokens - 1, tokens)])
        pools.close()
        with pytest.raises(RaceError) as caught:
            sim.close()
        assert [race.rows for race in caught.value.races] == [((block, tokens - 1, tokens),)]


def test_memory_of_every_part_is_poison_when_it_has_been_freed() -> None:
    sim = SimDevice()
    pools = make_regions(sim)
    memory = [pool for region in bound(pools) for part in region.parts for pool in (part.device_pool, part.host_pool)]
    pools.close()
    assert len(memory) == 10 and all((pool == 0xA5).all() for pool in memory)
    sim.close()
