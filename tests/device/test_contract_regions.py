"""What every device promises of pools of several regions, against the plain NumPy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device import CpuDevice
from kvpool.device.base import Device
from kvpool.device.cuda.calibration import OFFLOAD, ONBOARD, WITHIN
from kvpool.device.regions import Layers, Region, Regions
from kvpool.device.work import TokenMoves
from tests.device import reference
from tests.device.conftest import gpu_device
from tests.device.pools import as_moves
from tests.device.regions import (
    BLOCKS,
    DEVICE_BLOCKS,
    LAYOUTS,
    WIDTH,
    WIDTHS,
    assert_equal,
    bound,
    ids_of,
    images,
    make_regions,
    random_region_moves,
)

FULL_WIDTH = [0, 3]


def test_copies_in_all_regions_are_those_of_the_reference_in_the_order_of_the_calls(device: Device) -> None:
    pools, stream = make_regions(device), device.create_stream("own")
    expected = images(pools)
    for seed in range(12):
        moves = random_region_moves(np.random.default_rng(seed))
        reference.copy_region_blocks(expected, moves)
        device.copy_blocks(moves, stream)
        if seed < 6:
            device.synchronize()
            assert_equal(pools, expected)
    device.synchronize()
    assert_equal(pools, expected)


def layer_images(regions: list[Region]) -> list[list[np.ndarray]]:
    """All layers of each region, of both tiers, in the order of its parts."""
    return [
        [
            np.concatenate([device_pool.take(layer, axis), host_pool.take(layer, 1)], axis=None).view(np.uint8)
            for layout, device_pool, host_pool in region.parts
            for axis in [0 if layout.order == "layer_first" else 1]
            for layer in range(layout.layers)
        ]
        for region in regions
    ]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_copies_of_all_parts_of_the_layers_are_a_copy_and_each_copies_its_own_layers(
    device: Device, parts: int
) -> None:
    pools = make_regions(device)
    for seed in range(4):
        moves, expected = random_region_moves(np.random.default_rng(seed)), images(pools)
        reference.copy_region_blocks(expected, moves)
        copied = layer_images(expected)
        for part in np.random.default_rng(seed).permutation(parts).tolist():
            before = layer_images(images(pools))
            device.copy_blocks(moves, layers=Layers(part, parts))
            device.synchronize()
            for old, new, actual in zip(before, copied, layer_images(images(pools)), strict=True):
                chosen = Layers(part, parts).of(len(actual))
                for layer, image in enumerate(actual):
                    np.testing.assert_array_equal(image, (new if layer in chosen else old)[layer])
        assert_equal(pools, expected)


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
    moves, starts = [], [0]
    for group in range(2):
        rows = []
        for region in FULL_WIDTH:
            half = DEVICE_BLOCKS[region] // 2
            blocks = np.array(ids_of(region)[group * half :][:half])
            slots = (blocks[:, None] * WIDTH + np.arange(WIDTH)).ravel()
            chosen = np.sort(random.choice(len(slots), int(random.integers(1, len(slots) + 1)), replace=False))
            rows.append([(slots[place], slots[to]) for to, place in enumerate(chosen) if place != to])
        while rows[0] or rows[1]:
            moves.append((rows[int(random.integers(2))] or rows[0] or rows[1]).pop(0))
        starts.append(len(moves))
    return np.array(moves, np.int64).reshape(-1, 2), np.array(starts, np.int64)


def test_token_moves_in_all_parts_of_several_regions_are_those_of_the_reference(device: Device) -> None:
    pools = make_regions(device)
    for seed in range(8):
        moves, starts = random_token_moves(np.random.default_rng(seed))
        expected = images(pools)
        reference.move_region_tokens(expected, moves)
        device.enqueue(TokenMoves(moves, starts))
        device.synchronize()
        assert_equal(pools, expected)


def test_token_moves_of_a_region_keep_their_groups() -> None:
    regions = Regions(bound(make_regions(CpuDevice())))
    other = ids_of(3)[0] * WIDTH
    moves = np.array([(other + 1, other), (1, 0), (2, 1), (5, 4), (other + 5, other + 4), (6, 5)], np.int64)
    by_region = {
        region: (part.moves.tolist(), part.starts.tolist())
        for region, part in TokenMoves(moves, np.array([0, 3, 3, 5, 6])).by_region(regions)
    }
    assert by_region == {
        0: ([[1, 0], [2, 1], [5, 4], [6, 5]], [0, 2, 2, 3, 4]),
        3: ([[1, 0], [5, 4]], [0, 1, 1, 2, 2]),
    }


# Bind


def test_a_device_is_unbound_when_memory_of_any_region_is_freed(device: Device) -> None:
    pools = make_regions(device)
    device.free(pools.flat("host", 3))
    with pytest.raises(ValueError, match="not bound"):
        device.copy_blocks(as_moves((0, 1, 4)))
    with pytest.raises(ValueError, match="not bound"):
        device.enqueue(TokenMoves(np.array([(0, 1)]), np.array([0, 1])))


# The map


@pytest.mark.parametrize(
    "counts", [[(3, 2)], [(2, 0), (1, 0)], [(2, 4), (3, 0), (1, 1)], [(1, 1)] * 9, [(0, 2), (3, 1), (0, 0), (1, 0)]]
)
def test_ids_count_device_blocks_of_all_regions_then_host_blocks(counts: list[tuple[int, int]]) -> None:
    layout = BlockLayout(1, 1, 1, 1, "uint8", planes=1)
    regions = Regions([Region.of(layout, *(np.zeros(count, np.uint8) for count in pair), *pair) for pair in counts])
    places = list(zip(*(part.tolist() for part in regions.pool_ids.place(np.arange(regions.blocks))), strict=True))
    assert places == [reference.block_place(regions.all, block) for block in range(regions.blocks)]
    assert (regions.device_blocks, regions.host_blocks) == tuple(map(sum, zip(*counts, strict=True)))
    for region, pair in enumerate(counts):
        mine = regions.pool_ids.of(region, np.arange(sum(pair)))
        assert [places[place] for place in mine.tolist()] == [(region, block) for block in range(sum(pair))]
        assert not pair[0] or regions.pool_ids.first(region)[0] == mine[0]


def test_a_split_keeps_every_row_and_the_order_inside_each_region() -> None:
    regions = Regions(bound(make_regions(CpuDevice())))
    for seed in range(20):
        moves = random_region_moves(np.random.default_rng(seed))
        expected: dict[int, list[list[int]]] = {}
        for source, target, *rest in moves.tolist():
            region, local = reference.block_place(regions.all, source)
            expected.setdefault(region, []).append([local, reference.block_place(regions.all, target)[1], *rest])
        assert [(region, rows.tolist()) for region, rows in regions.split(moves)] == sorted(expected.items())
    ((region, rows),) = Regions(regions.all[:1]).split(moves)
    assert region == 0 and rows is moves, "a pool of one region is copied as it is"
    assert regions.lengths.tolist() == [WIDTHS[reference.block_place(regions.all, block)[0]] for block in range(BLOCKS)]
