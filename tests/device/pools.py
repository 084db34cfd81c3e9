"""Small pools full of random bytes, and moves in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.base import Device
from kvpool.device.memory.pools import MemoryPools
from kvpool.device.sim import SimDevice
from tests.device import reference
from tests.seeds import some_of

DEVICE_BLOCKS, HOST_BLOCKS = 6, 5
BLOCKS = DEVICE_BLOCKS + HOST_BLOCKS


def seen(array: Any) -> np.ndarray:
    """An array of a device in NumPy: itself where it is one, else a copy."""
    return array if isinstance(array, np.ndarray) else array.get()


def images(pools: MemoryPools) -> tuple[np.ndarray, np.ndarray]:
    """Copies of both tiers."""
    return seen(pools.device_pool).copy(), pools.host_pool.copy()


def put(array: Any, values: np.ndarray) -> None:
    """Write all of an array of a device."""
    if isinstance(array, np.ndarray):
        array[...] = values
    else:
        array.set(values)
        array.device.synchronize()


def on_device(device: Device, values: np.ndarray) -> Any:
    """An array that the device can write, with these values: the one that is given where it can."""
    if device.name != "cuda":
        return values
    array = device.allocate(values.nbytes, "device").view(values.dtype).reshape(values.shape)
    put(array, values)
    return array


def make_pools(device: Device, layout: BlockLayout, seed: int = 0) -> MemoryPools:
    """Pools full of random bytes."""
    pools = MemoryPools(device, layout, DEVICE_BLOCKS, HOST_BLOCKS)
    random = np.random.default_rng(seed)
    with host_writes(pools):
        for tier in (pools.flat("device"), pools.flat("host")):
            put(tier, random.integers(0, 256, tier.size, dtype=np.uint8))
    return pools


def host_writes(pools: MemoryPools) -> AbstractContextManager[None]:
    """Declares, where the device wants to know, that the calling thread writes anywhere in the pools."""
    if not isinstance(pools.device, SimDevice):
        return nullcontext()
    blocks = pools.device_blocks + pools.host_blocks
    return pools.device.host_access(writes=[(block, 0, pools.layout.tokens_per_block) for block in range(blocks)])


def as_moves(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array([(*row, 0) for row in rows], dtype=np.int64).reshape(-1, 4)


def random_moves(layout: BlockLayout, random: np.random.Generator) -> np.ndarray:
    """Some whole and some partial moves that do not depend on each other."""
    blocks = random.permutation(BLOCKS)
    count = int(random.integers(1, BLOCKS - 1))
    target, source = blocks[:count], random.choice(blocks[count:], count)
    whole = random.random(count) < 0.5
    tokens = np.where(whole, layout.tokens_per_block, random.integers(1, layout.tokens_per_block + 1, count))
    return np.stack([source, target, tokens, np.arange(count)], axis=1).astype(np.int64)


def assert_same_as_reference(pools: MemoryPools, moves: np.ndarray) -> None:
    expected = images(pools)
    reference.copy_blocks(pools.layout, *expected, moves)
    pools.device.copy_blocks(moves)
    pools.device.synchronize()
    for image, wanted in zip(images(pools), expected, strict=True):
        np.testing.assert_array_equal(image.view(np.uint8), wanted.view(np.uint8))


def sims(layout: BlockLayout, **defaults: Any) -> Iterator[Callable[..., tuple[SimDevice, MemoryPools]]]:
    """Opens sim devices with a pool of 6 + 5 blocks of random bytes; all are finished, checked and closed at the
    end."""
    opened = []

    def build(chosen: BlockLayout = layout, **options: Any) -> tuple[SimDevice, MemoryPools]:
        opened.append(SimDevice(**{**defaults, **options}))
        return opened[-1], make_pools(opened[-1], chosen)

    yield build
    for device in opened:
        if not device.closed:
            device.synchronize()
            device.close()


# layers, kv_heads, head_dim, tokens_per_block: runs of a few lines, of one line, of odd sizes, and longer than what is
# fetched ahead with a rest that is not a chunk.
SHAPES = [(2, 2, 16, 8), (3, 1, 8, 7), (2, 3, 5, 3), (1, 3, 448, 5)]
TYPES = ["uint8", "bfloat16", "float32", "int64"]
ORDERS = list(product(["layer_first", "block_first"], ["NHD", "HND"], [1, 2]))
# Each shape meets each order with one type, so that each type meets each shape and each order; with the other types in
# exhaustive tests.
LAYOUTS = [
    BlockLayout(*shape, dtype=TYPES[(s + o + turn) % len(TYPES)], order=order, tokens=tokens, planes=planes)
    for turn in range(len(TYPES))
    for s, shape in enumerate(SHAPES)
    for o, (order, tokens, planes) in enumerate(ORDERS)
]
each_layout = pytest.mark.parametrize("layout", some_of(len(SHAPES) * len(ORDERS), LAYOUTS), ids=str)
