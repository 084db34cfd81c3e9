"""Fragments copy exactly what the moves say, are as few as they can be, and cross no chunk of registered memory."""

from __future__ import annotations

import ctypes
from itertools import product

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device import CpuDevice
from kvpool.device.copy_plan import make_plan
from kvpool.device.fragments import INSIDE_HOST, Cutter, by_direction, split
from kvpool.device.memory.pools import MemoryPools
from kvpool.device.regions import BYTES, SOURCE, TOKENS
from tests.device import reference
from tests.device.pools import BLOCKS, DEVICE_BLOCKS, HOST_BLOCKS, as_moves, make_pools, random_moves
from tests.kernels.fragment_tables import table_of

LAYOUTS = [
    BlockLayout(*shape, dtype="uint8", planes=planes, order=order, tokens=tokens)
    for shape, order, tokens, planes in product(
        [(2, 2, 16, 8), (3, 1, 5, 3)], ["layer_first", "block_first"], ["NHD", "HND"], [1, 2]
    )
]


def cutter_of(pools: MemoryPools, chunk: int) -> Cutter:
    plan = make_plan(pools.layout, pools.flat("device"), pools.flat("host"), DEVICE_BLOCKS, HOST_BLOCKS)
    return Cutter(plan, np.array([[plan.host.base, plan.host.base + pools.flat("host").nbytes, chunk]]))


def cut(pools: MemoryPools, moves: np.ndarray, chunk: int = 1 << 30) -> np.ndarray:
    return cutter_of(pools, chunk).cut(moves)


@pytest.mark.parametrize("chunk", [64, 4096, 1 << 30])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fragments_copy_what_the_moves_say(layout: BlockLayout, chunk: int) -> None:
    pools = make_pools(CpuDevice(), layout)
    start, end = pools.flat("host").ctypes.data, pools.flat("host").ctypes.data + pools.flat("host").nbytes
    for seed in range(8):
        moves = random_moves(layout, np.random.default_rng(seed))
        expected = [pools.device_pool.copy(), pools.host_pool.copy()]
        reference.copy_blocks(layout, expected[0], expected[1], moves)
        for source, target, nbytes in cut(pools, moves, chunk).tolist():
            for address in (source, target):
                if start <= address < end:
                    assert (address - start) // chunk == (address + nbytes - 1 - start) // chunk
            ctypes.memmove(target, source, nbytes)
        np.testing.assert_array_equal(pools.device_pool, expected[0])
        np.testing.assert_array_equal(pools.host_pool, expected[1])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_fragments_of_whole_blocks_are_known_without_cutting_them(layout: BlockLayout) -> None:
    pools = make_pools(CpuDevice(), layout)
    cutter = cutter_of(pools, 1 << 30)
    for seed in range(50):
        random_order = random_moves(layout, np.random.default_rng(seed))
        moves = random_order[np.argsort(random_order[:, SOURCE])][:: 1 - 2 * (seed % 2)]
        for direction, some in by_direction(moves[moves[:, TOKENS] == layout.tokens_per_block], DEVICE_BLOCKS):
            fragments = cutter.cut(some)
            if direction != INSIDE_HOST:
                assert cutter.about(some) == (len(fragments), fragments[:, BYTES].sum(), direction)
                shuffled = cutter.about(np.random.default_rng(seed).permutation(some))
                assert shuffled[0] >= len(fragments) and shuffled[1] == fragments[:, BYTES].sum()


FIRST_LAYERS, FIRST_BLOCKS = (BlockLayout(3, 1, 16, 4, order=order) for order in ("layer_first", "block_first"))
SEGMENT, WHOLE = FIRST_LAYERS.segment_bytes, FIRST_BLOCKS.block_bytes
HOST = DEVICE_BLOCKS
CUTS = {
    "neighbours in no order": (
        FIRST_BLOCKS,
        [(2, HOST + 2, 4), (0, HOST, 4), (1, HOST + 1, 4), (5, HOST + 3, 4)],
        [3 * WHOLE, WHOLE],
    ),
    "neighbours in a layer-first tier": (FIRST_LAYERS, [(0, 3, 4), (1, 4, 4), (2, 5, 4)], [3 * SEGMENT] * 6),
    "a layer-first tier and the host": (FIRST_LAYERS, [(0, HOST, 4), (1, HOST + 1, 4)], [SEGMENT] * 12),
    # The first part follows the block before it.
    "a part is not a neighbour": (
        FIRST_BLOCKS,
        [(0, 3, 4), (1, 4, 2), (2, 5, 4)],
        [WHOLE + SEGMENT // 2, *[SEGMENT // 2] * 5, WHOLE],
    ),
    "inside the host": (FIRST_BLOCKS, [(HOST, BLOCKS - 1, 4)], [WHOLE]),
    "the last of a tier and the first of the other": (FIRST_BLOCKS, [(HOST - 1, 0, 4), (HOST, 1, 4)], [WHOLE, WHOLE]),
    "no moves": (FIRST_BLOCKS, [], []),
}


@pytest.mark.parametrize("case", CUTS)
def test_what_lies_together_in_both_tiers_is_one_fragment(case: str) -> None:
    layout, moves, sizes = CUTS[case]
    assert cut(make_pools(CpuDevice(), layout), as_moves(*moves))[:, BYTES].tolist() == sizes


def test_given_fragments_cross_no_chunk_of_any_host_memory_and_follow_each_other_in_none_beside() -> None:
    hosts = np.array([[0, 256, 64], [1024, 1536, 96]])
    neighbours = [[32, 10_032, 32], [64, 10_064, 64], [1024, 20_000, 96]]
    fragments = np.array([*neighbours, [1120, 20_096, 8], [1128, 20_104, 8]])
    assert split(fragments, hosts).tolist() == [*neighbours, [1120, 20_096, 16]]
    assert split(np.array([[0, 1024, 128]]), hosts).tolist() == [[0, 1024, 64], [64, 1088, 32], [96, 1120, 32]]


def test_nothing_is_sorted_for_a_kernel() -> None:
    pools = make_pools(CpuDevice(), BlockLayout(2, 1, 16, 4, order="block_first"))
    places = np.random.default_rng(0).permutation(DEVICE_BLOCKS)
    table = table_of(cutter_of(pools, 1 << 30), as_moves(*((block, DEVICE_BLOCKS + block, 4) for block in places)))
    first = pools.flat("device").ctypes.data
    assert ((table.rows[:, 0] - first) // pools.layout.block_bytes).tolist() == places.tolist()
