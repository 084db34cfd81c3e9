"""The kernel that moves tokens, run by the shim, against the plain reference."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device import CpuDevice
from kvpool.device.copy_plan import CopyPlan, Tier, make_plan
from kvpool.device.launches import MOVES, TOKEN_MOVES, Grid, token_moves
from kvpool.device.work import TokenMoves
from tests.device import reference
from tests.device.pools import DEVICE_BLOCKS, HOST_BLOCKS, each_layout, images, make_pools
from tests.device.test_contract import random_token_moves
from tests.kernels.shim import ShimLauncher


def check(layout: BlockLayout, moves: np.ndarray, starts: np.ndarray, launcher: ShimLauncher) -> None:
    pools = make_pools(CpuDevice(), layout)
    expected, host = images(pools)
    reference.move_tokens(layout, expected, moves)
    plan = make_plan(layout, pools.flat("device"), pools.flat("host"), DEVICE_BLOCKS, HOST_BLOCKS)
    for launch in token_moves(plan, TokenMoves(moves, starts), launcher.grid):
        launcher.launch(launch, 0)
    for image, wanted in zip(images(pools), (expected, host), strict=True):
        np.testing.assert_array_equal(image.view(np.uint8), wanted.view(np.uint8))


@each_layout
def test_shim_moves_tokens_as_the_reference_does(layout: BlockLayout) -> None:
    for seed in range(4):
        check(layout, *random_token_moves(layout, np.random.default_rng(seed)), ShimLauncher())


def test_shim_makes_one_launch_for_as_many_moves_as_the_argument_holds_and_splits_groups_between_more() -> None:
    chain = np.array([(slot + 1, slot) for slot in range(DEVICE_BLOCKS * 128 - 1)], np.int64)
    for count, launches in ((0, 0), (1, 1), (MOVES, 1), (MOVES + 1, 2), (2 * MOVES + 3, 3)):
        launcher, starts = ShimLauncher(), np.array([0, 0, min(3, count), min(3, count), count], np.int64)
        check(BlockLayout(1, 1, 4, 128, dtype="uint8"), chain[:count], starts, launcher)
        assert len(launcher.launches) == launches
    assert TOKEN_MOVES.itemsize <= 4096, "every driver passes such an argument"


def test_kernels_refuse_more_slots_than_they_count() -> None:
    tier = Tier(1, 1, 1, 1, 1)
    plan = CopyPlan(tier, tier, 1 << 20, 1 << 20, 1 << 12, 0, 1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="device_blocks"):
        next(token_moves(plan, TokenMoves(np.zeros((1, 2), np.int64), np.array([0, 1])), Grid(1)))
