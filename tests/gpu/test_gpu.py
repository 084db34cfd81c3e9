"""What only a GPU can show: real memory, real copies, real kernels, and other packages' views of the pools."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheManager, PagedKV, PoolBusy, gather_kv, scatter_kv
from kvpool.__main__ import main
from kvpool.device import calibration, cuda
from kvpool.device.calibration import DIRECTIONS, PATHS
from kvpool.device.cuda import CudaDevice
from kvpool.device.measure import measure
from kvpool.layout import BlockLayout

pytestmark = pytest.mark.gpu
LAYOUT = BlockLayout(3, 2, 16, 4, dtype="float16")
GIB = 1 << 30


def test_the_device_tier_is_seen_by_other_packages_in_place(cupy: Any) -> None:
    with KVCacheManager(LAYOUT, device_blocks=5, host_blocks=2, device="cuda") as cache:
        pool = cache.device_pool
        assert pool.shape == LAYOUT.device_shape(5) and pool.dtype == np.float16
        for view in (cupy.asarray(pool), cupy.from_dlpack(pool)):
            assert view.__cuda_array_interface__["data"][0] == pool.__cuda_array_interface__["data"][0]
            view[1, 0, 2] = 3
        cupy.cuda.Device().synchronize()
        assert (pool[1, 0, 2].get() == 3).all() and (pool[1, 0, 3].get() == 0).all()
        assert isinstance(cache.host_pool, np.ndarray)


def test_exports_and_memory_of_the_caller_are_in_place(cupy: Any) -> None:
    owned = cupy.empty(5 * LAYOUT.block_bytes, cupy.uint8)
    with KVCacheManager(LAYOUT, device_blocks=5, host_blocks=2, device="cuda", device_memory=owned) as cache:
        stream = cupy.cuda.Stream(non_blocking=True)
        for take in (cupy.asarray, cupy.from_dlpack):
            with stream:
                view = take(cache.export()[1])
            assert view.data.ptr == cache.device_pool[1].data.ptr and view.dtype == np.float16
            with pytest.raises(PoolBusy):
                cache.close()
            del view
        assert owned.data.ptr == cache.device_pool.data.ptr
        assert np.from_dlpack(cache.export("host")).ctypes.data == cache.host_pool.ctypes.data


def test_pinned_memory_is_known_to_the_driver_until_it_is_freed(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.device.pinned.CHUNK_BYTES", 64 << 20)
    runtime, device = cupy.cuda.runtime, CudaDevice()
    array = device.allocate(200 << 20, "host")
    first, last = array.ctypes.data, array.ctypes.data + array.nbytes - 1
    assert not array.any()
    assert [runtime.pointerGetAttributes(address).type for address in (first, last)] == [runtime.memoryTypeHost] * 2
    device.free(array)
    assert [runtime.pointerGetAttributes(address).type for address in (first, last)] == [runtime.memoryTypeUnregistered] * 2
    device.close()


def test_closing_gives_the_memory_of_the_gpu_back(cupy: Any) -> None:
    KVCacheManager(LAYOUT, device_blocks=1, host_blocks=1, device="cuda").close()
    before = cupy.cuda.runtime.memGetInfo()[0]
    blocks = GIB // LAYOUT.block_bytes
    with KVCacheManager(LAYOUT, device_blocks=blocks, device="cuda"):
        assert cupy.cuda.runtime.memGetInfo()[0] <= before - GIB // 2
    gc.collect()
    assert cupy.cuda.runtime.memGetInfo()[0] >= before - (64 << 20)


@pytest.mark.parametrize("path", PATHS)
def test_a_replay_finds_every_byte(cupy: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv(cuda.COPY_PATH, path)
    sizes = ["--device-blocks", "300", "--host-blocks", "300", "--cut", "600", "--active", "8", "--limit", "60"]
    assert main(["replay", "--device", "cuda", "--verify", *sizes]) == 0


def test_every_path_can_be_measured_and_is_kept(cupy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda, "measure", lambda make, paths: measure(make, paths, sizes=(4096, 65536), counts=(4, 64)))
    device = CudaDevice()
    found = device.calibrate()
    assert {(m.direction, m.path) for m in found.measurements} >= {(direction, "plain") for direction in DIRECTIONS}
    assert calibration.load(calibration.place(device.device_name, device.driver)) == found
    device.close()


@pytest.mark.parametrize("staging", ["device", "host"])
@pytest.mark.parametrize("skip", [0, 3, 9])
def test_tokens_are_gathered_and_scattered_as_on_the_cpu(cupy: Any, staging: str, skip: int) -> None:
    device, random, tokens = CudaDevice(), np.random.default_rng(skip), 9
    blocks, shape = 6, (LAYOUT.planes, LAYOUT.layers, tokens, LAYOUT.kv_heads * LAYOUT.head_dim)
    content = random.integers(0, 2**15, LAYOUT.device_shape(blocks)).astype(np.uint16).view(np.float16)
    pool = cupy.asarray(content)
    slots = random.permutation(blocks * LAYOUT.tokens_per_block)[:tokens]
    slots[2] = -1
    wanted = np.zeros(shape, np.float16)
    gather_kv(PagedKV.of_pool(LAYOUT, content), slots, wanted, skip_prefix_n_tokens=skip)
    flat = device.allocate(wanted.nbytes, staging)
    out = flat.view(np.float16).reshape(shape)
    cupy.cuda.Device().synchronize()
    gather_kv(PagedKV.of_pool(LAYOUT, pool), slots, out, skip_prefix_n_tokens=skip)
    device.synchronize()
    found = out if staging == "host" else out.get()
    np.testing.assert_array_equal(found.view(np.uint16), wanted.view(np.uint16))
    scatter_kv(PagedKV.of_pool(LAYOUT, content), slots, np.zeros_like(wanted), skip_prefix_n_tokens=skip)
    flat[...] = 0
    cupy.cuda.Device().synchronize()
    scatter_kv(PagedKV.of_pool(LAYOUT, pool), slots, out, skip_prefix_n_tokens=skip)
    device.synchronize()
    np.testing.assert_array_equal(pool.get().view(np.uint16), content.view(np.uint16))
    device.free(flat)
    device.close()
