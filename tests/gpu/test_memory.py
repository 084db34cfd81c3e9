"""Memory of a GPU and pinned memory: what their protocols say, who waits for what, and memory of the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool import BlockLayout, KVCacheManager, MemoryOptions
from kvpool.common.arrays import dlpack
from kvpool.common.arrays.strided import as_strided
from kvpool.device.cuda import CudaDevice
from kvpool.errors import PoolBusy
from tests.gpu.machines import Machine
from tests.interop.arrays import LAYOUT, aligned, described, open_pool

pytestmark = pytest.mark.gpu
PLACES = {"device": (2, 0), "host": (3, 0)}
NBYTES = 6 * LAYOUT.block_bytes


@pytest.fixture
def cache(cupy: Any) -> Iterator[KVCacheManager]:
    with open_pool(device="cuda") as made:
        yield made
        made.verify()


def address(cache: KVCacheManager, tier: str) -> int:
    return cache._pools.address(tier)


@pytest.mark.parametrize("version", [None, (1, 0)])
@pytest.mark.parametrize("tier", PLACES)
def test_capsules_name_the_gpu_and_pinned_memory(cache: KVCacheManager, tier: str, version: Any) -> None:
    export = cache.memory.export(tier)[1]
    capsule = export.__dlpack__(max_version=version)
    tensor, _ = described(capsule)
    assert (tensor.device_type, tensor.device_id) == export.__dlpack_device__() == PLACES[tier]
    whole = cache.memory.device_pool if tier == "device" else cache.memory.host_pool
    assert tensor.data == as_strided("whole", whole[1]).address
    with pytest.raises(PoolBusy, match="live: 1"):
        cache.close()
    del capsule
    assert len(cache._loans) == 0


ELSEWHERE = [
    ({"dl_device": (1, 0)}, r"expected \(2, 0\)"),
    ({"dl_device": (2, 1)}, "expected "),
    ({"copy": True}, "copy: expected None or False"),
]


@pytest.mark.parametrize(("options", "message"), ELSEWHERE)
def test_memory_of_a_gpu_goes_nowhere_else(cache: KVCacheManager, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BufferError, match=message):
        cache.memory.export().__dlpack__(max_version=(1, 0), **options)
    with pytest.raises(BufferError, match="read-only"):
        cache.memory.export(writable=False).__dlpack__()
    _, head = described(cache.memory.export(writable=False).__dlpack__(max_version=(1, 0)))
    assert head is not None and head.flags == dlpack.READ_ONLY
    with pytest.raises(TypeError, match="expected main memory for a NumPy array"):
        np.asarray(cache.memory.export())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_the_cuda_array_interface_names_type_place_and_stream(cupy: Any, dtype: str) -> None:
    with open_pool(BlockLayout(2, 2, 8, 4, dtype=dtype), device="cuda") as cache:
        raw = dtype != "float16"
        assert hasattr(cache.memory.export(), "__cuda_array_interface__") != raw
        export = cache.memory.export(raw=raw, writable=False)[:, 1]
        interface, expected = export.__cuda_array_interface__, cache.memory.device_pool[:, 1]
        assert (interface["version"], interface["stream"], interface["data"]) == (3, 1, (expected.data.ptr, True))
        assert (interface["shape"], interface["strides"], interface["typestr"]) == (
            expected.shape,
            expected.strides,
            expected.dtype.str,
        )
        assert not hasattr(cache.memory.export("host"), "__cuda_array_interface__")
        with pytest.raises(PoolBusy):
            cache.close()
        other = as_strided("x", cache.memory.export(raw=True))
        assert (other.memory, other.address, other.writable) == ("device", address(cache, "device"), True)
        del export, other


def offloading(cache: KVCacheManager) -> None:
    """Leaves copies under way: the second prompt evicts the first."""
    for first in (0, 100):
        seq = cache.add_sequence(list(range(first, first + 17)))
        cache.commit(seq)
        cache.release(seq)


TAKERS: dict[str, Callable[[Any, int], Any]] = {
    "dlpack on a stream": lambda export, stream: export.__dlpack__(stream=stream),
    "dlpack on the default": lambda export, stream: export.__dlpack__(),
    "cuda array interface": lambda export, stream: export.__cuda_array_interface__,
}


@pytest.mark.parametrize("taker", TAKERS)
def test_who_takes_memory_waits_for_the_copies_enqueued_so_far(cache: KVCacheManager, cupy: Any, taker: str) -> None:
    """The pool's own streams are held back: who takes memory is held up, and who asks for no wait is not."""
    machine, mine = Machine(cupy), cupy.cuda.Stream(non_blocking=True)
    stream = mine if taker == "dlpack on a stream" else cupy.cuda.Stream.null
    order: Any = cache.core.transfer.order
    gates = [machine.stall(cupy.cuda.Stream.from_external(pointer)) for pointer in order._streams[:3]]
    offloading(cache)
    assert cache.memory.export().__dlpack__(stream=-1) is not None and not machine.busy(mine)
    taken = TAKERS[taker](cache.memory.export(), mine.ptr)
    for number, go in enumerate(gates):
        assert machine.busy(stream), f"{number} of the pool's streams had come to their end"
        go()
    stream.synchronize()
    assert all(cupy.cuda.Stream.from_external(pointer).done for pointer in order._streams[:3])
    del taken


def gpu_memory(cupy: Any, nbytes: int, **changes: Any) -> Any:
    """What RMM gives: an object with an interface; ``owner`` is freed with it."""
    memory = cupy.cuda.Memory(nbytes + 64)
    start = -memory.ptr % 64
    interface = {
        "version": 3,
        "shape": (nbytes,),
        "typestr": "|u1",
        "strides": None,
        "data": (memory.ptr + start, False),
        "stream": None,
    }
    return SimpleNamespace(__cuda_array_interface__={**interface, **changes}, owner=memory)


@pytest.mark.parametrize("as_function", [False, True])
def test_the_device_tier_lies_in_memory_of_the_caller(cupy: Any, as_function: bool) -> None:
    owned = gpu_memory(cupy, NBYTES)
    where = owned.__cuda_array_interface__["data"][0]
    with open_pool(
        device="cuda", memory=MemoryOptions(device_memory=(lambda nbytes, alignment: owned) if as_function else owned)
    ) as cache:
        assert address(cache, "device") == where == cache.memory.device_pool.data.ptr
        cache.memory.device_pool.fill(4)
        cupy.cuda.Device().synchronize()
        seq = cache.add_sequence(list(range(16)))
        cache.commit(seq)
        cache.release(seq)
        assert cache.content.offload(list(range(16))) == 4
        cache.core.device.synchronize()
        with cache.pin(cache.block_keys(list(range(16))).keys, tier="host") as lease:
            assert (cache.memory.host_pool[lease.blocks - cache.device_blocks] == 4).all()
    assert cupy.cuda.runtime.pointerGetAttributes(where).type == cupy.cuda.runtime.memoryTypeDevice


def test_memory_that_is_none_of_this_gpu_is_refused(cupy: Any) -> None:
    device = CudaDevice()
    with pytest.raises(
        ValueError, match="device_memory is host memory: the cuda device has this tier in device memory"
    ):
        open_pool(device=device, memory=MemoryOptions(device_memory=aligned(NBYTES)))
    raw = aligned(NBYTES)
    stranger = SimpleNamespace(__cuda_array_interface__={**raw.__array_interface__})
    with pytest.raises(ValueError, match="device_memory: expected memory of GPU 0, got 0x"):
        open_pool(device=device, memory=MemoryOptions(device_memory=stranger))
    if cupy.cuda.runtime.getDeviceCount() > 1:
        with cupy.cuda.Device(1):
            elsewhere = gpu_memory(cupy, NBYTES)
        with pytest.raises(ValueError, match="expected memory of GPU 0, got 0x"):
            open_pool(device=device, memory=MemoryOptions(device_memory=elsewhere))
    open_pool(device=device).close()
    device.close()
