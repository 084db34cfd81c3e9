"""What the sim device says about bytes: writes that nobody declared, freed memory, functions that fail, arguments that
are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device import CpuDevice
from kvpool.device.base import NULL_STREAM, DeviceEvent
from kvpool.device.memory.pools import MemoryPools
from kvpool.device.regions import ALL_LAYERS, Region, Regions
from kvpool.device.sim import POISON, Choices, RaceError, SimDevice, UndeclaredWrite
from kvpool.device.sim.shadow import Shadow
from kvpool.errors import DeviceError
from tests.device import reference
from tests.device.pools import as_moves, images, make_pools, sims
from tests.device.regions import (
    BLOCKS,
    DEVICE_BLOCKS,
    WIDTH,
    WIDTHS,
    ids_of,
    make_regions,
    whole,
)
from tests.device.regions import LAYOUTS as GROUP_LAYOUTS
from tests.waiting import at_once

T = 4
LAYOUTS = [
    BlockLayout(2, 3, 5, T, dtype="bfloat16", order=order, tokens=tokens, planes=planes)
    for order, tokens, planes in product(("layer_first", "block_first"), ("NHD", "HND"), (1, 2))
]
LAYOUT = LAYOUTS[0]
Open = Callable[..., tuple[SimDevice, MemoryPools]]


@pytest.fixture
def sim() -> Iterator[Open]:
    yield from sims(LAYOUT)


def write(pools: MemoryPools, block: int, token: int) -> None:
    """Change one element of one token, in the last layer, plane and head."""
    reference.block_view(pools.layout, pools.device_pool, pools.host_pool, block)[-1, -1, token, -1, -1] += 1


# Not rows (block, first token, end) of a pool with 11 blocks of 4 tokens.
NO_TOKENS: list[Any] = [
    *([(0, 0)], [0, 0, 1], [(11, 0, 1)], [(-1, 0, 1)], [(0, 1, 1)], [(0, -1, 1)], [(0, 0, T + 1)], [(0, 0, 1.0)]),
    "rows",
]


@pytest.mark.parametrize("verb", ["check", "synchronize", "close"])
def test_an_undeclared_write_is_reported_at_the_next_call_that_may_raise(sim: Open, verb: str) -> None:
    device, pools = sim()
    write(pools, 3, 0)
    device.copy_blocks(as_moves((0, 3, T)))
    device.synchronize(device.record(NULL_STREAM))
    with pytest.raises(UndeclaredWrite, match="block 3"):
        getattr(device, verb)()


def test_a_small_pool_is_compared_before_its_write_is_copied_over_and_after_each_operation(sim: Open) -> None:
    device, pools = sim(progress=1.0)
    device.launch(1, lambda: write(pools, 7, 1), writes=[(7, 1, 2)])
    device.launch(1, lambda: write(pools, 8, 1), writes=[(7, 0, T)])  # the culprit
    device.launch(1, lambda: None, writes=[(8, 0, T)])
    with pytest.raises(UndeclaredWrite, match=r"block 8 tokens \[1\]") as caught:
        device.check()
    culprit, before = str(caught.value).split("\n    after ")
    assert "seen right after launch on stream 0x1" in culprit and "launch" in before
    path, _, line = culprit.splitlines()[-1].strip().rpartition(":")
    assert "# the culprit" in Path(path).read_text().splitlines()[int(line.split()[0]) - 1]


def test_a_large_pool_is_sampled_after_each_operation_and_compared_whole_by_check(sim: Open) -> None:
    launches = {}
    for compare in ("all", "sample"):
        device, pools = sim(compare=compare, progress=1.0)
        write(pools, 4, 0)
        launches[compare] = 0
        while not device._findings._failures and launches[compare] < 200:
            device.launch(None, lambda: None)
            launches[compare] += 1
        with pytest.raises(UndeclaredWrite, match="block 4"):
            device.check()
    assert launches["all"] == 1 < launches["sample"] < 200
    device, pools = sim(BlockLayout.of_block_bytes(1 << 16, T))
    write(pools, 9, 3)
    device.record(NULL_STREAM)
    assert not device._findings._failures
    with pytest.raises(UndeclaredWrite, match="compare='all'"):
        device.check()


def test_an_undeclared_write_is_found_in_what_was_copied_from_it(sim: Open) -> None:
    device, pools = sim(compare="sample", progress=1.0)
    write(pools, 0, 0)
    device.copy_blocks(as_moves((0, 8, T)))
    device.copy_blocks(as_moves((1, 0, T)))
    with pytest.raises(UndeclaredWrite):
        while True:
            device.check()
    assert not np.array_equal(pools.host_pool[2], pools.device_pool[:, :, 0])


@pytest.mark.parametrize("compare", ["all", "sample"])
def test_a_race_with_the_host_is_a_race_and_no_undeclared_write(sim: Open, compare: str) -> None:
    class Writing(Choices):
        """Stands for another thread: writes whenever something is chosen."""

        def choose(self, n: int) -> int:
            write(pools, 0, 0)
            return 0

        def early(self, n: int) -> int:
            return -1

    device, pools = sim(progress=0.0, compare=compare, chunk_bytes=8)
    with device.host_access(writes=[(0, 0, T)]):
        for target in range(6, 11):
            write(pools, 0, target % T)
            device.copy_blocks(as_moves((0, target, T)))
        choices = device._scheduler._choices
        device._scheduler._choices = Writing()
        with pytest.raises(RaceError):
            device.synchronize()
        device._scheduler._choices = choices
    device.check()


def test_freed_memory_is_poison_and_stays_it(sim: Open) -> None:
    device, pools = sim(compare="sample")
    views = pools.flat("device"), pools.flat("host")
    write(pools, 3, 1)
    pools.close()
    assert all((view == POISON).all() for view in views)
    with pytest.raises(UndeclaredWrite, match=r"block 3 tokens \[1\]"):
        device.check()
    views[1][5] = 0
    with pytest.raises(UndeclaredWrite, match="memory given back by free") as caught:
        device.check()
    assert caught.value.block == -1 and "memory.py" in str(caught.value)
    device.check()
    for bad in (views[0], np.zeros(10, np.uint8)):
        with pytest.raises(ValueError, match="array"):
            device.free(bad)


def test_work_on_freed_memory_is_dropped_and_named(sim: Open) -> None:
    device, pools = sim(progress=0.0)
    ran: list[int] = []
    device.launch(1, lambda: ran.append(0), writes=[(0, 0, T)])
    device.launch(1, lambda: ran.append(1))
    pools.close()
    with pytest.raises(RaceError, match=r"launch on stream 0x1[^$]*free on thread"):
        device.synchronize()
    assert ran == [1]
    with pytest.raises(ValueError, match="not bound"):
        device.launch(1, print, writes=[(0, 0, T)])


# Functions


def test_an_error_of_a_launched_function_is_kept_and_raised_once(sim: Open) -> None:
    device, _ = sim()
    device.launch(None, lambda: 1 // 0)
    device.launch(None, lambda: [][1])
    device.synchronize(device.record(NULL_STREAM))
    with pytest.raises(ZeroDivisionError):
        device.synchronize()
    with pytest.raises(IndexError):
        device.check()
    device.check()


def test_a_launched_function_may_not_call_the_device_and_says_so(sim: Open) -> None:
    device, _ = sim()
    gate = device.stall(9)
    gate.open()
    for call in (lambda: device.launch(None, print), device.synchronize, device.close, gate.open):
        device.launch(None, call)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="a launched function"):
            device.synchronize()


def test_threads_enqueue_query_and_wait_at_once(sim: Open) -> None:
    device, pools = sim(chunk_bytes=16)

    def work(number: int) -> None:
        stream = device.create_stream(f"thread {number}")
        for _ in range(30):
            device.copy_blocks(as_moves((number, 6 + number, T)), stream)
            event = device.record(stream)
            if number % 2:
                device.synchronize(event)
            while not device.query(event):
                pass
            with device.host_access(reads=[(6 + number, 0, T)], writes=[(number, 0, T)]):
                write(pools, number, 0)

    at_once(work, range(4))
    device.synchronize()


# Arguments


def test_options_and_arguments_that_cannot_be_are_named(sim: Open) -> None:
    device, _ = sim(progress=0.0)
    event: list[Any] = [None, DeviceEvent(), SimDevice().record(NULL_STREAM)]
    refused: list[tuple[str, Callable[[Any], object], list[Any]]] = [
        ("seed", lambda value: SimDevice(seed=value), [-1, 1.0]),
        ("progress", lambda value: SimDevice(progress=value), [1.5, True, None]),
        ("chunk_bytes", lambda value: SimDevice(chunk_bytes=value), [0]),
        ("choices", lambda value: SimDevice(choices=value), [3, Choices]),
        ("compare", lambda value: SimDevice(compare=value), ["some"]),
        ("event", device.query, event),
        ("event", lambda value: device.wait(NULL_STREAM, value), event),
        ("function", lambda value: device.launch(None, value), [5]),
        ("steps", device.run, [-1]),
        ("reads", lambda rows: device.launch(None, print, reads=rows), NO_TOKENS),
        ("writes", lambda rows: device.host_access(writes=rows), NO_TOKENS),
    ]
    for name, call, values in refused:
        for value in values:
            with pytest.raises((TypeError, ValueError), match=name):
                call(value)
    device.launch(None, lambda: None, reads=[], writes=np.empty((0, 3), np.int64))
    device.run()


# The mirror


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("chunk_bytes", [1, 7, 10, 30, 64, 1000])
def test_the_pieces_of_a_move_make_the_move(layout: BlockLayout, chunk_bytes: int) -> None:
    pools, random = make_pools(CpuDevice(), layout), np.random.default_rng(0)
    shadow = Shadow(Regions([Region.of(layout, pools.flat("device"), pools.flat("host"), 6, 5)]))
    for tokens, (source, target) in product(range(1, T + 1), ((0, 7), (6, 1), (2, 0), (7, 6))):
        move, expected = as_moves((source, target, tokens)), images(pools)
        reference.copy_blocks(layout, *expected, move)
        pieces, nbytes = shadow.torn(move[0], chunk_bytes, 1000, ALL_LAYERS), layout.token_bytes * tokens
        assert len(pieces) >= min(1000, nbytes / chunk_bytes) and (chunk_bytes < nbytes or len(pieces) == 1)
        for piece in random.permutation(np.array(pieces, object)):
            piece()
        assert all(np.array_equal(*pair) for pair in zip(images(pools), expected, strict=True))
        assert not len(shadow.differences())


# ----------------------------------------
# What the sim device says of pools of several regions: races, undeclared writes and bad rows, by the ids of the pool.


PARTS = [(group, part) for group, parts in enumerate(GROUP_LAYOUTS) for part in range(len(parts))]


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


@pytest.mark.parametrize("region", range(len(GROUP_LAYOUTS)))
def test_accesses_of_a_block_on_two_streams_race_in_every_region_until_an_event_orders_them(
    pools: MemoryPools, region: int
) -> None:
    sim, (first, second, *_) = sim_of(pools), ids_of(region)
    a, b = (sim.create_stream(name) for name in "ab")
    sim.copy_blocks(as_moves((first, second, WIDTHS[region])), a)
    sim.launch(b, nothing, writes=[whole(block) for block in range(BLOCKS) if block not in (first, second)])
    sim.check()
    sim.launch(b, nothing, reads=[whole(second)])
    with pytest.raises(RaceError) as caught:
        sim.check()
    ((race,),) = [caught.value.races]
    assert (race.first.kind, race.second.kind, race.rows) == ("copy_blocks", "launch", (whole(second),))
    sim.wait(b, sim.record(a))
    sim.launch(b, nothing, writes=[whole(second)])
    sim.check()


@pytest.mark.parametrize(("group", "part"), PARTS)
def test_a_write_of_the_host_that_it_did_not_declare_is_named_by_block_and_token(
    pools: MemoryPools, group: int, part: int
) -> None:
    sim, token, layout = sim_of(pools), WIDTHS[group] - 1, pools.layouts[group][part]
    tiers = [tier[group][part].view(f"u{layout.itemsize}") for tier in (pools.device_pools, pools.host_pools)]
    for local, block in enumerate(ids_of(group)):
        last = reference.block_view(layout, *tiers, local)[-1, -1, token, -1, -1:]
        with sim.host_access(reads=[whole(block)], writes=[(block, 0, token)] if token else []):
            last += 1
        with pytest.raises(UndeclaredWrite, match=rf"^block {block} tokens \[{token}\] changed") as caught:
            sim.check()
        assert (caught.value.block, caught.value.tokens) == (block, [token])
        assert "test_sim_memory.py" in str(caught.value)
        with sim.host_access(writes=[(block, token, token + 1)]):
            last += 1
        sim.check()


@pytest.mark.parametrize("row", [(5, 0, 2), (8, 0, 3), (0, 0, 5), (sum(DEVICE_BLOCKS) + 4, 0, 2), (7, 1, 2)])
def test_rows_of_more_tokens_than_a_block_of_the_region_has_are_refused(
    pools: MemoryPools, row: tuple[int, int, int]
) -> None:
    with pytest.raises(ValueError, match=r"reads\[1\]: .*expected"):
        sim_of(pools).host_access(reads=[(0, 0, WIDTH), row])


def test_a_handler_that_raises_inside_a_call_closes_the_device_and_keeps_no_lock() -> None:
    """Nobody knows how far the schedule and the shadow are then."""
    device = SimDevice(0)
    memory = device.allocate(64, "host")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        device.launch(7, interrupted)
        device.synchronize()
    for call in (lambda: device.launch(7, print), device.synchronize, lambda: device.record(NULL_STREAM)):
        with pytest.raises(DeviceError, match="in doubt") as error:
            at_once(lambda call: call(), [call])  # No lock is held.
        assert error.value.sticky
    device.free(memory)
    device.close()
