"""What every device promises of token moves, against the plain NumPy reference."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvpool.arrays.layout import BlockLayout
from kvpool.device import CpuDevice
from kvpool.device.base import Device
from kvpool.device.work import TokenMoves
from kvpool.errors import PoolClosed
from kvpool.memory.pools import MemoryPools
from tests.device import reference
from tests.device.pools import DEVICE_BLOCKS, images, make_pools

SHAPES = [(2, 2, 16, 8), (3, 1, 8, 7), (2, 3, 5, 3), (1, 3, 448, 5)]


def random_token_moves(layout: BlockLayout, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Groups as ``keep`` makes them: in each, a rising choice of the slots of a few blocks of its own moves to its
    begin, in order."""
    width, blocks, moves, starts = layout.tokens_per_block, random.permutation(DEVICE_BLOCKS), [], [0]
    for own in np.split(blocks, np.sort(random.integers(0, DEVICE_BLOCKS + 1, 2))):
        slots = (own[:, None] * width + np.arange(width)).ravel()
        chosen = np.sort(random.choice(len(slots), int(random.integers(0, len(slots) + 1)), replace=False))
        moves += [(slots[place], slots[to]) for to, place in enumerate(chosen) if place != to]
        starts.append(len(moves))
    return np.array(moves, np.int64).reshape(-1, 2), np.array(starts, np.int64)


def assert_moves_as_the_reference(pools: MemoryPools, moves: np.ndarray, starts: np.ndarray) -> None:
    device, host = images(pools)
    reference.move_tokens(pools.layout, device, moves)
    pools.device.enqueue(TokenMoves(moves, starts))
    pools.device.synchronize()
    for found, wanted in zip(images(pools), (device, host), strict=True):
        np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("order", "tokens", "planes"), list(product(["layer_first", "block_first"], ["NHD", "HND"], [1, 2]))
)
def test_token_moves_are_those_of_the_reference(
    device: Device, shape: tuple[int, int, int, int], order: str, tokens: str, planes: int
) -> None:
    layout = BlockLayout(*shape, dtype="float16", planes=planes, order=order, tokens=tokens)
    pools = make_pools(device, layout)
    for seed in range(4):
        assert_moves_as_the_reference(pools, *random_token_moves(layout, np.random.default_rng(seed)))
    pools.close()


def test_a_token_may_move_to_where_another_of_its_group_came_from(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    chain = np.array([(slot + 1, slot) for slot in range(4 * DEVICE_BLOCKS - 1)], np.int64)
    assert_moves_as_the_reference(pools, chain, np.array([0, len(chain)]))
    pools.close()


def test_token_moves_come_behind_what_is_on_their_stream_and_belong_to_their_call(
    device: Device, layout: BlockLayout
) -> None:
    pools, stream = make_pools(device, layout), device.create_stream("own")
    expected, _ = images(pools)
    moves, starts = np.array([(5, 4), (6, 5)], np.int64), np.array([0, 2])
    reference.copy_blocks(layout, expected, pools.host_pool.copy(), np.array([(0, 1, 4, 0)]))
    reference.move_tokens(layout, expected, moves)
    device.copy_blocks(np.array([(0, 1, 4, 0)], np.int64), stream)
    device.enqueue(TokenMoves(moves, starts), stream)
    moves[...], starts[...] = 0, 0
    device.synchronize()
    np.testing.assert_array_equal(images(pools)[0].view(np.uint8), expected.view(np.uint8))
    pools.close()


def test_token_moves_need_a_pool() -> None:
    device, nothing = CpuDevice(), TokenMoves(np.zeros((0, 2), np.int64), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="not bound"):
        device.enqueue(nothing)
    device.close()
    with pytest.raises(PoolClosed):
        device.enqueue(nothing)
