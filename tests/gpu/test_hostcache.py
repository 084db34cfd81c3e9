"""A host tier for an engine with tensors by layers on a GPU: pinned in place, copied by the driver, on streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool import HostCache, HostTier, ModelIdentity, PagedKV
from kvpool.device.cuda import CudaDevice
from kvpool.hostcache import HostCopies

pytestmark = pytest.mark.gpu
IDENTITY = ModelIdentity("toy", "r1", "uint8", "pages", "1")
LAYERS, BLOCKS, PAGE, HOST = 4, 12, 4096, 6
SHAPES = {"L | P B T H D": (2, BLOCKS, 8, 2, 32), "L | B D": (BLOCKS, PAGE), "L | B T H P D": (BLOCKS, 8, 2, 2, 32)}


def engine(cupy: Any, layout: str) -> tuple[list[Any], PagedKV]:
    """Tensors by layers, as an engine lays them out, with another number in each block."""
    axis = layout.split()[2:].index("B")
    shape = SHAPES[layout]
    arrays = []
    for layer in range(LAYERS):
        values = np.arange(BLOCKS, dtype=np.uint8) * LAYERS + layer
        filled = np.broadcast_to(values.reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape)
        arrays.append(cupy.asarray(np.ascontiguousarray(filled)))
    cupy.cuda.Device().synchronize()
    return arrays, PagedKV.of(arrays, layout)


def block_of(array: Any, layout: str, block: int) -> np.ndarray:
    return np.moveaxis(array.get(), layout.split()[2:].index("B"), 0)[block]


@pytest.mark.parametrize("path", ["plain", "batched"])
@pytest.mark.parametrize("layout", SHAPES)
def test_blocks_go_down_and_come_back_to_others(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, layout: str, path: str
) -> None:
    monkeypatch.setattr("kvpool.device.cuda.cuda_memory.CHUNK_BYTES", 4096)
    if path == "plain":
        monkeypatch.setattr("kvpool.device.cuda.cuda_device.find_batch", lambda library: None)
    arrays, paged = engine(cupy, layout)
    stream = cupy.cuda.Stream(non_blocking=True)
    with HostCache(HOST, LAYERS * PAGE, identity=IDENTITY) as cache, HostTier.of(cache) as tier:
        tier.blocks[...] = 255
        with HostCopies(tier, paged) as copies:
            taken = cache.reserve([b"a", b"b", b"c"])
            with stream:
                for array in arrays:
                    array += cupy.uint8(1)
            copies.copy_in([7, 2, 11], taken.slots, stream=stream).wait()
            cache.publish(taken.keys)
            assert (tier.blocks[3:] == 255).all(), "its content stays where it is pinned in place"
            with cache.pin([b"b", b"a"]) as lease:
                done = copies.copy_out([0, 1], lease.slots, stream=stream)
                done.follow(stream)
                with stream:
                    seen = [array.copy() for array in arrays]
                stream.synchronize()
                assert done.done
        for layer, array in enumerate(seen):
            for block, was in ((0, 2), (1, 7)):
                assert (block_of(array, layout, block) == np.uint8(was * LAYERS + layer + 1)).all()


def test_a_tier_of_another_process_is_pinned_where_it_is(cupy: Any) -> None:
    """Two workers of one process stand for two processes: what counts is that both have mappings of their own."""
    with HostTier(HOST, 2 * LAYERS * PAGE, identity=IDENTITY) as tier:
        tier.blocks[...] = 9
        workers = []
        for rank in range(2):
            arrays, paged = engine(cupy, "L | B D")
            attached = HostTier.attach(tier.share())
            assert attached.flat.ctypes.data != tier.flat.ctypes.data
            workers.append((arrays, attached, HostCopies(attached, paged, first_byte=rank * LAYERS * PAGE)))
        for _, _, copies in workers:
            copies.copy_in([3], [1]).wait()
        expected = np.repeat(np.arange(LAYERS) + 3 * LAYERS, PAGE).astype(np.uint8)
        np.testing.assert_array_equal(tier.blocks[1], np.tile(expected, 2))
        assert (tier.blocks[0] == 9).all() and (tier.blocks[2:] == 9).all()
        for _, attached, copies in workers:
            copies.close()
            attached.close()


def test_memory_that_cannot_be_pinned_is_refused(cupy: Any) -> None:
    _, paged = engine(cupy, "L | B D")
    memory = np.zeros(HOST * LAYERS * PAGE + 4096 + 1, np.uint8)
    first = -memory.ctypes.data % 4096 + 1
    share = memory[first : first + HOST * LAYERS * PAGE]
    with HostTier(HOST, LAYERS * PAGE, identity=IDENTITY, memory=share) as tier:
        with pytest.raises(ValueError, match="expected memory from the start of a page"):
            HostCopies(tier, paged)
        with pytest.raises(ValueError, match="expected 'auto' or 'cuda'"):
            HostCopies(tier, paged, device="cpu")


def test_one_tier_serves_the_copies_of_several_gpus_of_a_process(cupy: Any) -> None:
    """It is registered once, and stays so until the last copies are closed."""
    runtime = cupy.cuda.runtime
    count = min(2, runtime.getDeviceCount())
    with HostTier(HOST, 2 * LAYERS * PAGE, identity=IDENTITY) as tier:
        where = tier.flat.ctypes.data, tier.flat.ctypes.data + tier.flat.nbytes - 1
        workers = []
        for worker in range(2):
            with cupy.cuda.Device(worker % count):
                arrays, paged = engine(cupy, "L | B D")
                first = worker * LAYERS * PAGE
                workers.append((arrays, HostCopies(tier, paged, first_byte=first, device=CudaDevice(worker % count))))
        for closed in range(2):
            for worker in range(closed, 2):
                tier.blocks[...] = 0
                arrays, copies = workers[worker]
                copies.copy_in([3, 5], [1, 4]).wait()
                share = tier.blocks[:, worker * LAYERS * PAGE :][:, : LAYERS * PAGE].reshape(HOST, LAYERS, PAGE)
                for layer in range(LAYERS):
                    assert (share[1, layer] == 3 * LAYERS + layer).all() and (
                        share[4, layer] == 5 * LAYERS + layer
                    ).all()
            assert [runtime.pointerGetAttributes(address).type for address in where] == [runtime.memoryTypeHost] * 2
            workers[closed][1].close()
        assert [runtime.pointerGetAttributes(address).type for address in where] == [runtime.memoryTypeUnregistered] * 2
