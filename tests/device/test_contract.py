"""What every device promises, against the plain NumPy reference."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import numpy as np
import pytest

from kvpool.arrays.layout import BlockLayout
from kvpool.arrays.strided import as_strided
from kvpool.device import CpuDevice, get_device
from kvpool.device.base import Device
from kvpool.device.main_memory import ALIGNMENT
from kvpool.device.sim import SimDevice
from kvpool.errors import DeviceError, PoolClosed
from kvpool.memory.pools import MemoryPools
from tests.device import reference
from tests.device.faults import FaultyDevice
from tests.device.pools import (
    DEVICE_BLOCKS,
    as_moves,
    assert_same_as_reference,
    host_writes,
    images,
    make_pools,
    put,
    random_moves,
    seen,
)

TYPES = ["uint8", "bfloat16", "float32", "int64"]
ORDERS = list(product(["layer_first", "block_first"], ["NHD", "HND"], [1, 2]))
# layers, kv_heads, head_dim, tokens_per_block: runs of a few lines, of one line, longer than what is fetched ahead with
# a rest that is no chunk, and of odd sizes.
SHAPES = [(2, 2, 16, 8), (3, 1, 8, 8), (1, 3, 448, 4), (2, 3, 5, 3)]


# Each shape meets each order, and each of these pairs one type, so that each type meets each shape and each order.
LAYOUTS = [
    (shape, TYPES[(s + o) % len(TYPES)], *order) for s, shape in enumerate(SHAPES) for o, order in enumerate(ORDERS)
]


@pytest.mark.parametrize(("shape", "dtype", "order", "tokens", "planes"), LAYOUTS)
def test_copies_are_those_of_the_reference(
    device: Device, shape: tuple[int, int, int, int], dtype: str, order: str, tokens: str, planes: int
) -> None:
    layout = BlockLayout(*shape, dtype=dtype, planes=planes, order=order, tokens=tokens)
    pools = make_pools(device, layout)
    for seed in range(6):
        assert_same_as_reference(pools, random_moves(layout, np.random.default_rng(seed)))


@pytest.mark.parametrize("tokens", ["NHD", "HND"])
def test_partial_copy_takes_the_first_tokens_of_every_layer_plane_and_head_and_leaves_the_rest(
    device: Device, tokens: str
) -> None:
    layout = BlockLayout(2, 3, 4, 5, dtype="uint8", tokens=tokens)
    pools = MemoryPools(device, layout, 2, 1)
    image = np.zeros(pools.device_pool.shape, np.uint8)
    image[:, :, 0] = np.arange(image[:, :, 0].size, dtype=np.uint8).reshape(image[:, :, 0].shape)
    source = image[:, :, 0] if tokens == "NHD" else image[:, :, 0].swapaxes(2, 3)
    target = pools.host_pool[0] if tokens == "NHD" else pools.host_pool[0].swapaxes(2, 3)
    with host_writes(pools):
        put(pools.device_pool, image)
        target[...] = 255
    device.copy_blocks(as_moves((0, 2, 2)))
    device.synchronize()
    np.testing.assert_array_equal(target[:, :, :2], source[:, :, :2])
    assert (target[:, :, 2:] == 255).all()
    assert (seen(pools.device_pool)[:, :, 1] == 0).all()


def test_a_copy_sees_what_the_copies_before_it_wrote(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    first = seen(pools.device_pool)[:, :, 0].copy()
    for row in ((0, 7, 4), (7, 2, 4), (2, 3, 4), (3, 10, 4)):
        device.copy_blocks(as_moves(row))
    device.synchronize()
    for block in (7, 2, 3, 10):
        np.testing.assert_array_equal(reference.block_view(layout, *images(pools), block), first)


def test_of_two_copies_into_one_target_the_later_one_stays(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    early, late = (seen(pools.device_pool)[:, :, block].copy() for block in (0, 1))
    device.copy_blocks(as_moves((0, 8, 4)))
    device.copy_blocks(as_moves((1, 8, 3)))
    device.synchronize()
    target = pools.host_pool[8 - DEVICE_BLOCKS]
    np.testing.assert_array_equal(target[:, :, :3], late[:, :, :3])
    np.testing.assert_array_equal(target[:, :, 3:], early[:, :, 3:])


def test_blocks_can_change_places(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    a, b = seen(pools.device_pool)[:, :, 0].copy(), pools.host_pool[0].copy()
    for row in ((0, 1, 4), (6, 0, 4), (1, 6, 4)):
        device.copy_blocks(as_moves(row))
    device.synchronize()
    np.testing.assert_array_equal(seen(pools.device_pool)[:, :, 0], b)
    np.testing.assert_array_equal(pools.host_pool[0], a)


def test_an_empty_batch_copies_nothing(device: Device, layout: BlockLayout) -> None:
    assert_same_as_reference(make_pools(device, layout), as_moves())


def test_moves_may_be_read_only_or_strided(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    moves = random_moves(layout, np.random.default_rng(1))
    moves.flags.writeable = False
    assert_same_as_reference(pools, moves)
    assert_same_as_reference(pools, moves[::2])


@pytest.mark.parametrize("name", ["cpu", "sim"])
def test_two_pools_are_copied_at_once_by_two_threads(layout: BlockLayout, name: str) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            device = get_device(name)
            pools = make_pools(device, layout, seed)
            random = np.random.default_rng(seed)
            for _ in range(20):
                assert_same_as_reference(pools, random_moves(layout, random))
            device.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# Memory


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 1 << 20])
def test_memory_is_zeroed_and_aligned(device: Device, tier: str, nbytes: int) -> None:
    array = device.allocate(nbytes, tier)
    assert array.dtype == np.uint8 and array.shape == (nbytes,)
    assert not seen(array).any()
    assert nbytes == 0 or as_strided("array", array).address % ALIGNMENT == 0
    device.free(array)


def test_memory_that_is_not_there_raises_memory_error(device: Device) -> None:
    with pytest.raises(MemoryError):
        device.allocate(2**62, "host")


def test_a_device_serves_one_pool_at_a_time(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    with pytest.raises(ValueError, match="of its own"):
        MemoryPools(device, layout, 1, 0)
    assert_same_as_reference(pools, as_moves((0, 1, 4)))
    pools.close()
    assert_same_as_reference(make_pools(device, layout), as_moves((0, 1, 4)))


def test_nothing_is_copied_before_bind_or_after_free(device: Device, layout: BlockLayout) -> None:
    with pytest.raises(ValueError, match="not bound"):
        device.copy_blocks(as_moves((0, 1, 4)))
    make_pools(device, layout).close()
    with pytest.raises(ValueError, match="not bound"):
        device.copy_blocks(as_moves((0, 1, 4)))


def test_a_closed_device_says_so_and_closes_again(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    view = pools.flat("device")
    expected = seen(view).copy()
    device.close()
    device.close()
    for call in (lambda: device.copy_blocks(as_moves()), device.synchronize, lambda: device.allocate(1, "host")):
        with pytest.raises(PoolClosed):
            call()
    np.testing.assert_array_equal(seen(view), expected)


# Choosing a device


def test_get_device_knows_names_and_devices() -> None:
    assert isinstance(get_device("cpu"), CpuDevice)
    assert isinstance(get_device("auto"), CpuDevice)
    assert isinstance(get_device("sim"), SimDevice)
    device = CpuDevice()
    assert get_device(device) is device


@pytest.mark.parametrize(
    ("spec", "error"),
    [("gpu", ValueError), ("", ValueError), (None, TypeError), (CpuDevice, TypeError), (0, TypeError)],
)
def test_get_device_names_what_it_does_not_know(spec: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="device="):
        get_device(spec)


# The fault injector that other tests rely on


@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("completed", [0, 1, 2])
def test_faulty_device_has_copied_exactly_what_it_says(layout: BlockLayout, completed: int, sticky: bool) -> None:
    device = FaultyDevice(CpuDevice(), fail_at={(1, completed)}, sticky=sticky)
    pools = make_pools(device, layout)
    rows = as_moves((0, 7, 4), (1, 8, 4), (2, 9, 4))
    device.copy_blocks(as_moves((3, 4, 4)))
    expected = images(pools)
    reference.copy_blocks(layout, *expected, rows[:completed])
    with pytest.raises(DeviceError) as caught:
        device.copy_blocks(rows)
    assert (caught.value.completed, caught.value.sticky) == (completed, sticky)
    np.testing.assert_array_equal(seen(pools.device_pool), expected[0])
    np.testing.assert_array_equal(pools.host_pool, expected[1])
    if sticky:
        with pytest.raises(DeviceError):
            device.copy_blocks(rows)
        np.testing.assert_array_equal(pools.host_pool, expected[1])
    else:
        assert_same_as_reference(pools, rows)


def test_faulty_device_takes_a_predicate(layout: BlockLayout) -> None:
    device = FaultyDevice(CpuDevice(), fail_at=lambda call, index, move: move[1] == 9)
    make_pools(device, layout)
    with pytest.raises(DeviceError) as caught:
        device.copy_blocks(as_moves((0, 7, 4), (1, 9, 4)))
    assert caught.value.completed == 1
    assert (device.calls, device.failures) == (1, 1)
