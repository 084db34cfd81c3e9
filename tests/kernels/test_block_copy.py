"""The kernel that copies blocks, run by the shim, against the plain reference."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvpool.arrays.layout import BlockLayout
from kvpool.device import CpuDevice
from kvpool.device import launches as copies
from kvpool.device.base import TOKENS
from kvpool.device.block_copy import make_plan
from kvpool.memory.pools import MemoryPools
from tests.device import reference
from tests.device.pools import DEVICE_BLOCKS, HOST_BLOCKS, as_moves, make_pools, random_moves
from tests.kernels.shim import ShimLauncher

# layers, kv_heads, head_dim, tokens_per_block: odd sizes, and runs of several pieces with a rest.
SHAPES = [(2, 2, 16, 8), (3, 1, 8, 7), (2, 3, 5, 3), (1, 3, 448, 5)]


def copy_by_kernel(pools: MemoryPools, moves: np.ndarray, launcher: ShimLauncher, chosen: int | None = None) -> None:
    """What a device does with a batch: the moves lie where kernels can read them."""
    layout = pools.layout
    plan = make_plan(layout, pools.device_bytes, pools.host_bytes, DEVICE_BLOCKS, HOST_BLOCKS)
    whole = bool((moves[:, TOKENS] == layout.tokens_per_block).all())
    with launcher.uploaded(copies.move_table(moves, plan), 0, host=True) as address:
        for launch in copies.block_copies(
            plan, address, len(moves), whole=whole, host=True, grid=launcher.grid, chosen=chosen
        ):
            launcher.launch(launch, 0)


def check(pools: MemoryPools, moves: np.ndarray, launcher: ShimLauncher, chosen: int | None = None) -> None:
    expected = pools.device_pool.copy(), pools.host_pool.copy()
    reference.copy_blocks(pools.layout, *expected, moves)
    copy_by_kernel(pools, moves, launcher, chosen)
    np.testing.assert_array_equal(pools.device_pool.view(np.uint8), expected[0].view(np.uint8))
    np.testing.assert_array_equal(pools.host_pool.view(np.uint8), expected[1].view(np.uint8))


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("order", "tokens", "planes"), list(product(["layer_first", "block_first"], ["NHD", "HND"], [1, 2]))
)
def test_shim_copies_blocks_as_the_reference_does(
    shape: tuple[int, int, int, int], dtype: str, order: str, tokens: str, planes: int
) -> None:
    layout = BlockLayout(*shape, dtype=dtype, planes=planes, order=order, tokens=tokens)
    pools, launcher = make_pools(CpuDevice(), layout), ShimLauncher()
    for seed in range(4):
        moves = random_moves(layout, np.random.default_rng(seed))
        check(pools, moves, launcher, chosen=1 + seed % 2)
        moves[:, TOKENS] = layout.tokens_per_block
        check(pools, moves, launcher)
    pools.close()


def test_shim_copies_no_byte_when_there_are_no_moves() -> None:
    pools, launcher = make_pools(CpuDevice(), BlockLayout(2, 2, 16, 8)), ShimLauncher()
    check(pools, as_moves(), launcher)
    assert not launcher.launches
    pools.close()


def test_shim_moves_whole_blocks_in_wider_words_than_single_tokens_allow() -> None:
    layout = BlockLayout(2, 1, 3, 8, dtype="float16", tokens="HND")
    pools, launcher = make_pools(CpuDevice(), layout), ShimLauncher()
    check(pools, as_moves((0, 7, 8), (1, 8, 8)), launcher)
    check(pools, as_moves((0, 9, 8), (1, 10, 5)), launcher)
    assert [launch.kernel for launch in launcher.launches] == ["block_copy_16", "block_copy_2"]
    pools.close()


def test_shim_reads_one_row_of_the_table_for_a_piece() -> None:
    layout = BlockLayout(3, 2, 64, 8, dtype="float32")
    pools, launcher = make_pools(CpuDevice(), layout), ShimLauncher()
    check(pools, as_moves((0, 7, 8), (1, 8, 8), (2, 9, 8)), launcher)
    (launch,) = launcher.launches
    pieces = 3 * int(launch.record["pieces"][0])
    # Of each lane; a warp makes one load of 16 bytes.
    assert pieces == 3 * layout.layers * layout.planes and launcher.table_loads == 32 * pieces
    pools.close()


def test_shim_splits_batches_of_more_pieces_than_the_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout(2, 2, 16, 8)
    pools, launcher = make_pools(CpuDevice(), layout), ShimLauncher()
    # Each move has as many pieces as there are layers and planes.
    monkeypatch.setattr(copies, "_COUNT_MAX", 2 * 2 * 2 + 1)
    check(pools, as_moves((0, 7, 8), (1, 8, 8), (2, 9, 3), (3, 10, 8), (4, 5, 8)), launcher)
    assert len(launcher.launches) == 3
    pools.close()
