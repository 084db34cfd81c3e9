"""Rows of a copy in the argument of its launch, and in a table that is uploaded: both do the same."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.cuda import CudaDevice
from kvpool.device.launches import SOME_ROWS
from kvpool.device.memory.pools import MemoryPools
from kvpool.device.regions import ALL_LAYERS
from kvpool.errors import DeviceError
from tests.device import reference
from tests.device.pools import as_moves, images, put
from tests.emulated import lab
from tests.emulated.lab import Driver

pytestmark = pytest.mark.gpu
LAYOUT, BLOCKS = BlockLayout(2, 2, 16, 4, order="block_first"), 300
WIDTH = LAYOUT.tokens_per_block


@pytest.fixture(params=["argument", "table"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "table":
        monkeypatch.setattr("kvpool.device.cuda.launcher.SOME_ROWS", 0)
    return str(request.param)


@pytest.fixture(params=["kernel", "bulk"])
def device(driver: Driver, way: str, request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    made = CudaDevice(calibration=request.param)
    yield made
    made.close()


def filled(device: CudaDevice) -> MemoryPools:
    """Pools in which every byte is random: what is written beside a target is seen."""
    pools, random = MemoryPools(device, LAYOUT, BLOCKS, BLOCKS), np.random.default_rng(0)
    for pool in (pools.flat("device"), pools.flat("host")):
        put(pool, random.integers(0, 256, pool.nbytes, np.uint8))
    return pools


def check(pools: MemoryPools, expected: tuple[np.ndarray, np.ndarray]) -> None:
    """Wait for the copies, and compare all bytes of both tiers."""
    pools.device.synchronize()
    for image, wanted in zip(images(pools), expected, strict=True):
        np.testing.assert_array_equal(image.view(np.uint8), wanted.view(np.uint8))


def scattered(count: int, tokens: int = WIDTH) -> np.ndarray:
    """Copies from scattered device blocks to scattered host blocks: a row each, of the first tokens too."""
    random = np.random.default_rng(count)
    ends = zip(random.permutation(BLOCKS)[:count], BLOCKS + random.permutation(BLOCKS)[:count], strict=True)
    return as_moves(*((source, target, tokens) for source, target in ends))


@pytest.mark.parametrize("tokens", [WIDTH, 1])
@pytest.mark.parametrize("count", [1, 15, 16, 127, 128])
def test_rows_are_copied_and_nothing_beside_them_and_only_a_table_has_an_event(
    driver: Driver, device: CudaDevice, way: str, count: int, tokens: int
) -> None:
    pools, stream, moves = filled(device), device.create_stream("copies"), scattered(count, tokens)
    rows = count if tokens == WIDTH else count * device._bound.cutters[ALL_LAYERS][0][0].room(1)
    expected = images(pools)
    reference.copy_blocks(LAYOUT, *expected, moves)
    with driver.counting("launches", "record") as grown:
        device.copy_blocks(moves, stream)
    assert grown == {"launches": 1, "record": int(way == "table" or rows > SOME_ROWS)}
    check(pools, expected)


@pytest.mark.parametrize("status", [lab.INVALID, lab.OUT_OF_MEMORY])
@pytest.mark.parametrize("place", range(3))
def test_a_refused_launch_copies_nothing_and_those_before_it_stand(
    driver: Driver, device: CudaDevice, place: int, status: int
) -> None:
    """A batch of three directions has three launches."""
    pools, stream = filled(device), device.create_stream("copies")
    launches = [as_moves((8, 9, WIDTH)), as_moves((0, BLOCKS, WIDTH)), as_moves((BLOCKS + 3, 3, WIDTH))]
    expected = images(pools)
    for moves in launches[:place]:
        reference.copy_blocks(LAYOUT, *expected, moves)
    with driver.failing("launch", status, place, 1), pytest.raises(DeviceError, match="LaunchKernel") as refused:
        device.copy_blocks(np.concatenate(launches), stream)
    assert not refused.value.sticky
    check(pools, expected)
    for moves in launches:
        reference.copy_blocks(LAYOUT, *expected, moves)
    device.copy_blocks(np.concatenate(launches), stream)
    check(pools, expected)


def test_the_next_copies_do_not_change_the_rows_of_those_that_wait(driver: Driver, device: CudaDevice) -> None:
    pools, stream = filled(device), device.create_stream("copies")
    expected, moves = images(pools), scattered(20)
    reference.copy_blocks(LAYOUT, *expected, moves)
    go = driver.stall(stream.handle)
    for move in np.split(moves, 20):
        device.copy_blocks(move, stream)
    go()
    check(pools, expected)


def test_a_captured_stream_is_refused_and_copies_beside_a_capture_end_none(driver: Driver, device: CudaDevice) -> None:
    pools, stream, moves = filled(device), device.create_stream("copies"), scattered(5)
    expected = images(pools)
    captured = driver.stream()
    driver.cuStreamBeginCapture_v2(captured, lab.GLOBAL)  # type: ignore[operator]
    with pytest.raises(ValueError, match="not being captured"):
        device.as_stream(captured)
    device.copy_blocks(moves, stream)
    graph = ctypes.c_size_t()
    driver.cuStreamEndCapture(captured, ctypes.byref(graph))  # type: ignore[operator]
    assert graph.value, "the capture is whole"
    reference.copy_blocks(LAYOUT, *expected, moves)
    check(pools, expected)
