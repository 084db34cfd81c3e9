"""Copies in several regions that the driver refuses half-way."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.device.cuda import CudaDevice
from kvpool.errors import DeviceError
from tests.device import reference
from tests.device.regions import assert_equal, images, make_regions, random_region_moves
from tests.emulated import lab
from tests.emulated.lab import Driver

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fail_at", range(1, 12, 3))
def test_a_failure_inside_the_second_region_promises_no_more_than_was_enqueued(driver: Driver, fail_at: int) -> None:
    device = CudaDevice(calibration="plain")
    pools = make_regions(device)
    moves = random_region_moves(np.random.default_rng(4))
    expected = images(pools)
    reference.copy_region_blocks(expected, moves)
    before = images(pools)
    refused = driver.failing("copy_on", lab.INVALID, passed=fail_at, failing=1)
    with refused, pytest.raises(DeviceError) as caught:
        device.copy_blocks(moves)
    device.synchronize()
    done = images(pools)
    reference.copy_region_blocks(before, moves[: caught.value.completed])
    for row in moves[: caught.value.completed].tolist():
        region, block = reference.block_place(done, row[1])
        for part, wanted in zip(done[region].parts, before[region].parts, strict=True):
            np.testing.assert_array_equal(reference.block_view(*part, block), reference.block_view(*wanted, block))
    device.copy_blocks(moves)
    device.synchronize()
    assert_equal(pools, expected)
    device.close()
