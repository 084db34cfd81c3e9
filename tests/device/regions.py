"""Pools of several regions full of random bytes, and moves in them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.base import Device
from kvpool.device.memory.pools import MemoryPools
from kvpool.device.regions import Part, Region
from kvpool.device.sim import SimDevice
from tests.device.pools import put, seen

# Two parts with other heads; states of one token a block; a region without a host tier; one with the tokens of the
# first.
LAYOUTS = [
    [BlockLayout(2, 2, 16, 4), BlockLayout(1, 3, 5, 4, "uint8", order="block_first", tokens="HND")],
    [BlockLayout(3, 1, 24, 1, "float32", planes=1, order="block_first")],
    [BlockLayout(1, 1, 8, 2, "bfloat16")],
    [BlockLayout(2, 1, 8, 4, "int64", tokens="HND")],
]
DEVICE_BLOCKS, HOST_BLOCKS = [5, 3, 2, 4], [4, 6, 0, 3]
WIDTHS = [4, 1, 2, 4]
WIDTH = 4
BLOCKS = sum(DEVICE_BLOCKS) + sum(HOST_BLOCKS)


def ids_of(region: int) -> list[int]:
    """All ids of a region, in order: of its device blocks, then of its host blocks."""
    first, first_host = sum(DEVICE_BLOCKS[:region]), sum(DEVICE_BLOCKS) + sum(HOST_BLOCKS[:region])
    return [*range(first, first + DEVICE_BLOCKS[region]), *range(first_host, first_host + HOST_BLOCKS[region])]


def whole(block: int) -> tuple[int, int, int]:
    """The row of all tokens of a block."""
    (region,) = (region for region in range(len(LAYOUTS)) if block in ids_of(region))
    return block, 0, WIDTHS[region]


def host_writes(pools: MemoryPools) -> AbstractContextManager[object]:
    """Declares, where the device wants to know, that the calling thread writes anywhere in the pools."""
    if not isinstance(pools.device, SimDevice):
        return nullcontext()
    return pools.device.host_access(writes=[whole(block) for block in range(BLOCKS)])


def make_regions(device: Device, seed: int = 0) -> MemoryPools:
    """Pools full of random bytes."""
    pools = MemoryPools(device, LAYOUTS, DEVICE_BLOCKS, HOST_BLOCKS)
    random = np.random.default_rng(seed)
    with host_writes(pools):
        for group, parts in enumerate(LAYOUTS):
            for part in range(len(parts)):
                for tier in ("device", "host"):
                    flat = pools.flat(tier, group, part)
                    put(flat, random.integers(0, 256, flat.size, dtype=np.uint8))
    return pools


def images(pools: MemoryPools) -> list[Region]:
    """Copies of all memory, for the reference."""
    regions = []
    for layouts, *pairs, device_blocks, host_blocks in zip(
        pools.layouts, pools.device_pools, pools.host_pools, DEVICE_BLOCKS, HOST_BLOCKS, strict=True
    ):
        parts = [
            Part(layout, seen(device_pool).copy(), other.copy())
            for layout, device_pool, other in zip(layouts, *pairs, strict=True)
        ]
        regions.append(Region(tuple(parts), device_blocks, host_blocks))
    return regions


def bound(pools: MemoryPools) -> list[Region]:
    """What the device was bound to."""
    regions = []
    for group, (layouts, *blocks) in enumerate(zip(LAYOUTS, DEVICE_BLOCKS, HOST_BLOCKS, strict=True)):
        parts = [
            Part(layout, pools.flat("device", group, part), pools.flat("host", group, part))
            for part, layout in enumerate(layouts)
        ]
        regions.append(Region(tuple(parts), *blocks))
    return regions


def assert_equal(pools: MemoryPools, expected: list[Region]) -> None:
    for region, wanted in zip(images(pools), expected, strict=True):
        for part, other in zip(region.parts, wanted.parts, strict=True):
            for actual, image in zip(part[1:], other[1:], strict=True):
                np.testing.assert_array_equal(actual.view(np.uint8), image.view(np.uint8))


def random_region_moves(random: np.random.Generator) -> np.ndarray:
    """Moves of all regions in disorder, whole and partial, that do not depend on each other."""
    moves = []
    for region, width in enumerate(WIDTHS):
        ids = random.permutation(ids_of(region))
        count = int(random.integers(0, len(ids)))
        targets, sources = ids[:count], random.choice(ids[count:], count)
        moves += [
            (s, t, int(random.integers(1, width + 1)) if random.random() < 0.5 else width)
            for s, t in zip(sources, targets, strict=True)
        ]
    moves_made = np.array([(*row, ticket) for ticket, row in enumerate(moves)], np.int64).reshape(-1, 4)
    return moves_made[random.permutation(len(moves_made))]
