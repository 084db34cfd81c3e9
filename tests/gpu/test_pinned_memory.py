"""The host tier in pinned memory: CuPy's pool has the one that a device takes, and memory of the caller is used as it
is, pinned or not."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheManager, MemoryOptions
from kvpool.common.arrays import dlpack
from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.cuda import CudaDevice
from kvpool.device.memory import StridedArray
from kvpool.device.memory.pools import MemoryPools
from tests.device.pools import DEVICE_BLOCKS, HOST_BLOCKS, as_moves, assert_same_as_reference, put

pytestmark = pytest.mark.gpu
LAYOUT = BlockLayout(2, 2, 16, 4)
NBYTES = HOST_BLOCKS * LAYOUT.block_bytes
PAGE = mmap.PAGESIZE


class Pinned:
    """A tensor of another package in pinned memory, which only speaks DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        options.pop("max_version", None)
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA_HOST, 0


def by_pointer(array: np.ndarray) -> StridedArray:
    return StridedArray(array.ctypes.data, array.shape, 1, kind="u", owner=array)


def pinned(cupy: Any, nbytes: int = NBYTES) -> np.ndarray:
    import cupyx

    memory: np.ndarray = cupyx.empty_pinned(nbytes, np.uint8)
    return memory


def of_a_pool(cupy: Any) -> Callable[[int, int], np.ndarray]:
    pool = cupy.cuda.PinnedMemoryPool()
    return lambda nbytes, alignment: np.frombuffer(pool.malloc(nbytes), np.uint8, nbytes)


def pageable(nbytes: int = NBYTES, shift: int = 64) -> np.ndarray:
    """Zeros in pages of their own: whole pages are registered, and an array that shares one with the heap would make a
    copy of its neighbor cross the end of a registration, which the driver refuses."""
    pages = np.frombuffer(mmap.mmap(-1, nbytes + shift + 2 * PAGE), np.uint8)
    return pages[shift : shift + nbytes]


SOURCES: dict[str, Callable[[Any], Any]] = {
    "cupyx.empty_pinned": pinned,
    "malloc of a pool": of_a_pool,
    "DLPack": lambda cupy: Pinned(pinned(cupy)),
    "a pointer": lambda cupy: by_pointer(pinned(cupy)),
    "a function": lambda cupy: lambda nbytes, alignment: pinned(cupy, nbytes),
    "not pinned": lambda cupy: pageable(),
}


def kind_of(cupy: Any, address: int) -> int:
    return int(cupy.cuda.runtime.pointerGetAttributes(address).type)


def check_copies(pools: MemoryPools) -> None:
    """Whole blocks and parts of them, both ways and inside the host."""
    random = np.random.default_rng(0)
    for tier in (pools.flat("device"), pools.flat("host")):
        put(tier, random.integers(0, 256, tier.size, dtype=np.uint8))
    host = range(DEVICE_BLOCKS, DEVICE_BLOCKS + HOST_BLOCKS)
    for tokens in (4, 3):
        assert_same_as_reference(pools, as_moves(*((i, block, tokens) for i, block in enumerate(host))))
        assert_same_as_reference(pools, as_moves(*((block, i, tokens) for i, block in enumerate(host))))
        assert_same_as_reference(pools, as_moves((host[0], host[3], tokens)))


@pytest.mark.parametrize("source", SOURCES)
def test_memory_of_the_caller_is_the_host_tier_whatever_copies(
    cupy: Any, path: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.device.cuda.cuda_memory.CHUNK_BYTES", PAGE)
    device = CudaDevice()
    pools = MemoryPools(device, LAYOUT, DEVICE_BLOCKS, HOST_BLOCKS, host_memory=SOURCES[source](cupy))
    ends = pools.address("host"), pools.address("host") + NBYTES - 1
    host = cupy.cuda.runtime.memoryTypeHost
    assert [kind_of(cupy, address) for address in ends] == [host] * 2
    check_copies(pools)
    kept = pools.host_pool
    pools.close()
    after = cupy.cuda.runtime.memoryTypeUnregistered if source == "not pinned" else host
    assert [kind_of(cupy, address) for address in ends] == [after] * 2
    assert kept.any()
    device.close()


@contextmanager
def registered(cupy: Any, array: np.ndarray, *pages: int) -> Iterator[np.ndarray]:
    """Memory that its owner has registered in parts of that many pages, from its first page on."""
    address, starts = array.ctypes.data - array.ctypes.data % PAGE, list[int]()
    for count in pages:
        cupy.cuda.runtime.hostRegister(address, count * PAGE, 0)
        starts.append(address)
        address += count * PAGE
    yield array
    for start in starts:
        cupy.cuda.runtime.hostUnregister(start)


@pytest.mark.parametrize("parts", [(1, 1, 1), (1, 2), (2, 1), (1,), (2,)])
@pytest.mark.parametrize("shift", [0, 2048])
def test_copies_do_not_cross_from_one_registration_of_the_caller_into_another(
    cupy: Any, path: str, parts: tuple[int, ...], shift: int
) -> None:
    """Even where the owner has registered only the beginning: the rest is registered here."""
    device = CudaDevice()
    with registered(cupy, pageable(shift=shift), *parts) as array:
        pools = MemoryPools(device, LAYOUT, DEVICE_BLOCKS, HOST_BLOCKS, host_memory=array)
        check_copies(pools)
        pools.close()
        assert kind_of(cupy, array.ctypes.data) == cupy.cuda.runtime.memoryTypeHost
    assert kind_of(cupy, array.ctypes.data + NBYTES - 1) == cupy.cuda.runtime.memoryTypeUnregistered
    device.close()


def test_two_tiers_may_lie_on_one_page(cupy: Any) -> None:
    """The parts of a pool lie in one array, and neither begins with a page."""
    raw, layouts = pageable(2 * NBYTES), [(LAYOUT, LAYOUT)]
    halves = [raw[:NBYTES], raw[NBYTES:]]
    device = CudaDevice()
    pools = MemoryPools(device, layouts, [DEVICE_BLOCKS], [HOST_BLOCKS], host_memory=halves)
    for i, (on_gpu, on_host) in enumerate(zip(pools.device_pools[0], pools.host_pools[0], strict=True)):
        put(on_gpu.view(np.uint8), np.full(on_gpu.view(np.uint8).shape, i + 1, np.uint8))
        on_host.view(np.uint8)[...] = 0
    device.copy_blocks(as_moves(*((i, DEVICE_BLOCKS + i, 4) for i in range(HOST_BLOCKS))))
    device.synchronize()
    assert (halves[0] == 1).all() and (halves[1] == 2).all()
    pools.close()
    assert kind_of(cupy, raw.ctypes.data + NBYTES) == cupy.cuda.runtime.memoryTypeUnregistered
    device.close()


def test_a_pool_serves_from_memory_of_the_caller_and_keeps_its_owner(cupy: Any) -> None:
    owner = pinned(cupy)
    alive = weakref.ref(owner)
    cache = KVCacheManager(
        LAYOUT,
        device_blocks=2,
        host_blocks=HOST_BLOCKS,
        device="cuda",
        memory=MemoryOptions(host_memory=owner),
        max_sequences=2,
    )
    address = owner.ctypes.data
    del owner
    gc.collect()
    assert alive() is not None and cache.memory.host_pool.ctypes.data == address
    for first in (0, 100, 0):
        sequence = cache.add_sequence([first + token for token in range(5)])
        cache.core.device.synchronize()
        block = cache.block_table(sequence).dense()[0, 0]
        if cache.cached_tokens(sequence):
            assert (cache.memory.device_pool[:, :, block].get().view(np.uint8) == first + 1).all()
        cache.memory.device_pool[:, :, block].view(np.uint8)[...] = first + 1
        cupy.cuda.Device().synchronize()
        cache.commit(sequence)
        cache.release(sequence)
    assert cache.stats().onboarded_blocks > 0
    pointer = cache.memory.export("host").pinned_memory()
    cache.close(force=True)
    gc.collect()
    assert alive() is not None, "a view needs it"
    del pointer, cache
    gc.collect()
    assert alive() is None


def test_memory_that_is_pinned_in_the_middle_only_is_refused_by_name(cupy: Any) -> None:
    array, device = pageable(4 * NBYTES, shift=0), CudaDevice()
    cupy.cuda.runtime.hostRegister(array.ctypes.data + PAGE, PAGE, 0)
    with pytest.raises(
        ValueError, match=rf"^host_memory: expected memory that is pinned as a whole.* got {4 * NBYTES}"
    ):
        MemoryPools(device, LAYOUT, 1, 4 * HOST_BLOCKS, host_memory=array)
    assert kind_of(cupy, array.ctypes.data) == cupy.cuda.runtime.memoryTypeUnregistered
    cupy.cuda.runtime.hostUnregister(array.ctypes.data + PAGE)
    MemoryPools(device, LAYOUT, 1, 4 * HOST_BLOCKS, host_memory=array).close()
    device.close()


def test_memory_that_does_not_fit_is_refused_before_anything_is_pinned(cupy: Any) -> None:
    device, read_only = CudaDevice(), pageable()
    read_only.flags.writeable = False
    for bad, error, message in (
        (pinned(cupy, NBYTES + 64), ValueError, f"host_memory: expected .*, got {NBYTES + 64}"),
        (pageable(shift=32), ValueError, "host_memory: expected an address that is a multiple of 64"),
        (read_only, ValueError, "host_memory: expected memory that can be written"),
        (cupy.zeros(NBYTES, np.uint8), ValueError, "host_memory is device memory"),
        ("pinned", TypeError, "host_memory"),
    ):
        with pytest.raises(error, match=message):
            MemoryPools(device, LAYOUT, 1, HOST_BLOCKS, host_memory=bad)
    assert kind_of(cupy, read_only.ctypes.data) == cupy.cuda.runtime.memoryTypeUnregistered
    device.close()
