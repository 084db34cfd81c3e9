"""What every device promises of pools of several regions, against the plain NumPy reference."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device import CpuDevice
from kvpool.device.base import Device
from kvpool.device.cuda.calibration import OFFLOAD, ONBOARD, WITHIN
from kvpool.device.regions import BLOCKS_MAX, Layers, Region, Regions
from kvpool.device.work import TokenMoves
from tests.device import reference
from tests.device.conftest import gpu_device
from tests.device.pools import as_moves
from tests.device.regions import (
    BLOCKS,
    DEVICE_BLOCKS,
    HOST_BLOCKS,
    LAYOUTS,
    WIDTH,
    WIDTHS,
    assert_copies_as_the_reference,
    assert_equal,
    bound,
    ids_of,
    images,
    make_regions,
    random_region_moves,
)

NO_HOST = 2
FULL_WIDTH = [0, 3]


def test_copies_in_all_regions_at_once_are_those_of_the_reference(device: Device) -> None:
    pools = make_regions(device)
    for seed in range(12):
        assert_copies_as_the_reference(pools, random_region_moves(np.random.default_rng(seed)))
    pools.close()


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_copies_of_all_parts_of_the_layers_are_a_copy_and_each_copies_its_own_layers(
    device: Device, parts: int
) -> None:
    pools = make_regions(device)
    for seed in range(4):
        moves, expected = random_region_moves(np.random.default_rng(seed)), images(pools)
        reference.copy_region_blocks(expected, moves)
        for part in np.random.default_rng(seed).permutation(parts).tolist():
            before = images(pools)
            device.copy_blocks(moves, layers=Layers(part, parts))
            device.synchronize()
            for region, region_image in enumerate(images(pools)):
                first = 0
                for part_image, other, wanted in zip(
                    region_image.parts, before[region].parts, expected[region].parts, strict=True
                ):
                    layers = Layers(part, parts).of(sum(layout.layers for layout in LAYOUTS[region]))
                    for layer in range(part_image.layout.layers):
                        should = wanted if first + layer in layers else other
                        axis = 0 if part_image.layout.order == "layer_first" else 1
                        assert_same(part_image.device_pool.take(layer, axis), should.device_pool.take(layer, axis))
                        assert_same(part_image.host_pool.take(layer, 1), should.host_pool.take(layer, 1))
                    first += part_image.layout.layers
        assert_equal(pools, expected)
    pools.close()


def assert_same(actual: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(actual.view(np.uint8), wanted.view(np.uint8))


def test_copies_on_one_stream_are_made_in_the_order_of_the_calls_in_every_region(device: Device) -> None:
    pools, stream = make_regions(device), device.create_stream("own")
    expected = images(pools)
    for seed in range(8):
        moves = random_region_moves(np.random.default_rng(seed))
        reference.copy_region_blocks(expected, moves)
        device.copy_blocks(moves, stream)
    device.synchronize()
    assert_equal(pools, expected)
    pools.close()


@pytest.mark.gpu
def test_the_way_of_a_copy_is_chosen_for_its_direction_and_part() -> None:
    chosen = []

    class Noted:
        def choose(self, direction: str, nbytes: int, count: int, paths: Any) -> str:
            chosen.append((direction, nbytes * count))
            return "plain"

    device = gpu_device()
    make_regions(device)
    device.calibration = Noted()  # type: ignore[assignment]
    for region in (0, 1, 3):
        sizes = [layout.block_bytes for layout in LAYOUTS[region]]
        first, second, *_, host = ids_of(region)
        for row, direction in (((first, host), OFFLOAD), ((host, first), ONBOARD), ((first, second), WITHIN)):
            chosen.clear()
            device.copy_blocks(as_moves((*row, WIDTHS[region])))
            assert chosen == [(direction, size) for size in sizes]
    device.close()


# Token moves


def random_token_moves(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Groups as ``keep`` makes them, each of blocks of its own, of both regions with the most tokens: their rows lie
    among each other."""
    groups = []
    for _ in range(2):
        rows = []
        for region in FULL_WIDTH:
            half = DEVICE_BLOCKS[region] // 2
            slot_blocks = ids_of(region)[len(groups) * half :][:half]
            slots = (np.array(slot_blocks)[:, None] * WIDTH + np.arange(WIDTH)).ravel()
            chosen = np.sort(random.choice(len(slots), int(random.integers(1, len(slots) + 1)), replace=False))
            rows.append([(slots[place], slots[to]) for to, place in enumerate(chosen) if place != to])
        mixed = []
        while rows[0] or rows[1]:
            some = rows[int(random.integers(2))] or rows[0] or rows[1]
            mixed.append(some.pop(0))
        groups.append(mixed)
    starts = np.cumsum([0, *map(len, groups)])
    return np.array([row for group in groups for row in group], np.int64).reshape(-1, 2), starts.astype(np.int64)


def test_token_moves_in_all_parts_of_several_regions_are_those_of_the_reference(device: Device) -> None:
    pools = make_regions(device)
    for seed in range(8):
        moves, starts = random_token_moves(np.random.default_rng(seed))
        expected = images(pools)
        reference.move_region_tokens(expected, moves)
        device.enqueue(TokenMoves(moves, starts))
        device.synchronize()
        assert_equal(pools, expected)
    pools.close()


def test_token_moves_of_a_region_keep_their_groups() -> None:
    pools = make_regions(CpuDevice())
    regions = Regions(bound(pools))
    other = ids_of(3)[0] * WIDTH
    moves = np.array([(other + 1, other), (1, 0), (2, 1), (5, 4), (other + 5, other + 4), (6, 5)], np.int64)
    by_region = dict(TokenMoves(moves, np.array([0, 3, 3, 5, 6])).by_region(regions))
    assert by_region[0].moves.tolist() == [[1, 0], [2, 1], [5, 4], [6, 5]] and by_region[0].starts.tolist() == [
        0,
        2,
        2,
        3,
        4,
    ]
    assert by_region[3].moves.tolist() == [[1, 0], [5, 4]] and by_region[3].starts.tolist() == [0, 1, 1, 2, 2]
    pools.close()


# Bind


def test_a_pool_of_one_region_is_copied_as_it_is() -> None:
    moves = as_moves((0, 1, 4))
    memory = [np.zeros(2 * LAYOUTS[0][0].block_bytes, np.uint8) for _ in range(2)]
    regions = Regions([Region.of(LAYOUTS[0][0], *memory, 2, 2)])
    ((region, rows),) = regions.split(moves)
    assert region == 0 and rows is moves
    token_moves = TokenMoves(np.array([(0, 1)]), np.array([0, 1]))
    assert list(token_moves.by_region(regions)) == [(0, token_moves)]


def test_a_device_is_unbound_when_memory_of_any_region_is_freed(device: Device) -> None:
    pools = make_regions(device)
    device.free(pools.flat("host", 3))
    with pytest.raises(ValueError, match="not bound"):
        device.copy_blocks(as_moves((0, 1, 4)))
    with pytest.raises(ValueError, match="not bound"):
        device.enqueue(TokenMoves(np.array([(0, 1)]), np.array([0, 1])))


# The map


def regions_of(counts: list[tuple[int, int]]) -> Regions:
    layout = BlockLayout(1, 1, 1, 1, "uint8", planes=1)
    return Regions([Region.of(layout, *(np.zeros(count, np.uint8) for count in pair), *pair) for pair in counts])


@pytest.mark.parametrize(
    "counts",
    [
        [(3, 2)],
        [(1, 0), (2, 3)],
        [(2, 0), (1, 0)],
        [(2, 4), (3, 0), (1, 1)],
        [(1, 1)] * 9,
        [(0, 2), (3, 1), (0, 0), (1, 0)],
    ],
)
def test_ids_count_device_blocks_of_all_regions_then_host_blocks(counts: list[tuple[int, int]]) -> None:
    regions = regions_of(counts)
    ids = np.arange(regions.blocks)
    places = list(zip(*(part.tolist() for part in regions.pool_ids.place(ids)), strict=True))
    devices = [(region, block) for region, (blocks, _) in enumerate(counts) for block in range(blocks)]
    hosts = [(region, first + block) for region, (first, blocks) in enumerate(counts) for block in range(blocks)]
    assert places == devices + hosts == [reference.block_place(regions.all, block) for block in range(regions.blocks)]
    assert (regions.device_blocks, regions.host_blocks) == (len(devices), len(hosts))
    for region, (blocks, host_blocks) in enumerate(counts):
        mine = regions.pool_ids.of(region, np.arange(blocks + host_blocks))
        assert [places[place] for place in mine.tolist()] == [(region, block) for block in range(blocks + host_blocks)]
        assert not blocks or regions.pool_ids.first(region)[0] == mine[0]


def test_a_split_keeps_every_row_and_the_order_inside_each_region() -> None:
    pools = make_regions(CpuDevice())
    regions = Regions(bound(pools))
    for seed in range(20):
        moves = random_region_moves(np.random.default_rng(seed))
        parts = regions.split(moves)
        assert [region for region, _ in parts] == sorted(
            {reference.block_place(regions.all, row[0])[0] for row in moves.tolist()}
        )
        assert sorted(ticket for _, rows in parts for ticket in rows[:, 3].tolist()) == list(range(len(moves)))
        places = {row[3]: place for place, row in enumerate(moves.tolist())}
        for region, rows in parts:
            assert all(places[a] < places[b] for a, b in pairwise(rows[:, 3].tolist()))
            for source, target, tokens, ticket in rows.tolist():
                whole = moves[places[ticket]].tolist()
                assert [reference.block_place(regions.all, block) for block in whole[:2]] == [
                    (region, source),
                    (region, target),
                ]
                assert tokens == whole[2]
    pools.close()


def test_lengths_are_the_tokens_of_each_block() -> None:
    pools = make_regions(CpuDevice())
    regions = Regions(bound(pools))
    assert regions.width == WIDTH
    for region, width in enumerate(WIDTHS):
        assert set(regions.lengths[ids_of(region)].tolist()) == {width}
    assert HOST_BLOCKS[NO_HOST] == 0 and len(regions.lengths) == BLOCKS <= BLOCKS_MAX
    pools.close()
