"""What only a GPU can show: real memory, real copies, real kernels, and other packages' views of the pools."""

from __future__ import annotations

import gc
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheManager, MemoryOptions, PagedKV, PoolClosed, gather_kv, scatter_kv
from kvpool.__main__ import main
from kvpool.common.arrays.layout import BlockLayout
from kvpool.device import get_device
from kvpool.device.cuda import CudaDevice, calibration
from kvpool.device.cuda import cuda_device as cuda
from kvpool.device.cuda.calibration import DIRECTIONS, PATHS
from kvpool.device.cuda.trials import measure
from kvpool.device.fragments import Cutter
from kvpool.errors import PoolBusy

pytestmark = pytest.mark.gpu
LAYOUT = BlockLayout(3, 2, 16, 4, dtype="float16")


def test_exports_and_memory_of_the_caller_are_in_place(cupy: Any) -> None:
    owned = cupy.empty(5 * LAYOUT.block_bytes, cupy.uint8)
    with KVCacheManager(
        LAYOUT, device_blocks=5, host_blocks=2, device="cuda", memory=MemoryOptions(device_memory=owned)
    ) as cache:
        stream = cupy.cuda.Stream(non_blocking=True)
        for take in (cupy.asarray, cupy.from_dlpack):
            with stream:
                view = take(cache.memory.export()[1])
            assert view.data.ptr == cache.memory.device_pool[1].data.ptr and view.dtype == np.float16
            with pytest.raises(PoolBusy):
                cache.close()
            del view
        assert owned.data.ptr == cache.memory.device_pool.data.ptr
        assert np.from_dlpack(cache.memory.export("host")).ctypes.data == cache.memory.host_pool.ctypes.data


def test_the_host_tier_is_pinned_memory_of_cupy_on_loan(cupy: Any) -> None:
    with KVCacheManager(LAYOUT, device_blocks=2, host_blocks=3, device="cuda") as cache:
        cache.memory.host_pool.view(np.uint16)[...] = np.arange(cache.memory.host_pool.size, dtype=np.uint16).reshape(
            cache.memory.host_pool.shape
        )
        pointer = cache.memory.export("host")[1].pinned_memory()
        assert isinstance(pointer, cupy.cuda.PinnedMemoryPointer)
        assert pointer.ptr == cache.memory.host_pool[1].ctypes.data and pointer.size() == LAYOUT.block_bytes
        seen = np.frombuffer(pointer, np.uint8, pointer.size())
        np.testing.assert_array_equal(seen, cache.memory.host_pool[1].view(np.uint8).reshape(-1))
        with pytest.raises(PoolBusy, match="views of exported memory live: 1"):
            cache.close()
        del pointer
        with pytest.raises(PoolBusy):
            cache.close()
        del seen
        gc.collect()
        with pytest.raises(BufferError, match="gaps"):
            cache.memory.export("host")[:, 0].pinned_memory()
        with pytest.raises(TypeError, match="expected pinned memory"):
            cache.memory.export("device").pinned_memory()
        assert not cache.close().sequences
    with pytest.raises(PoolClosed):
        cache.memory.export("host").pinned_memory()


def test_a_buffer_of_a_closed_pool_that_is_still_on_loan_can_be_read(cupy: Any) -> None:
    cache = KVCacheManager(LAYOUT, device_blocks=2, host_blocks=3, device="cuda")
    cache.memory.host_pool.view(np.uint8)[...] = 7
    pointer = cache.memory.export("host").pinned_memory()
    cache.close(force=True)
    del cache
    gc.collect()
    assert (np.frombuffer(pointer, np.uint8, pointer.size()) == 7).all()


def test_a_sequence_comes_back_from_the_host_with_what_its_stream_wrote(cupy: Any) -> None:
    with KVCacheManager(LAYOUT, device_blocks=3, host_blocks=3, device="cuda") as cache:
        stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        sequence = cache.add_sequence(list(range(10)), stream=stream)  # its last block is not full, nor committed
        with stream:
            for i, block in enumerate(cache.block_table(sequence).dense()[0].tolist()):
                cupy.asarray(cache.memory.device_pool)[:, :, block] = i + 1
        assert cache.swap_out(sequence, stream=stream) == 3
        with cache.exclusive():
            added = cache.add_sequence_batch([list(range(100, 112))], stream=other)
        with other:
            cupy.asarray(cache.memory.device_pool)[...] = 0
        cache.release(added.ids, stream=other, store=False)
        assert cache.resume(sequence, stream=other) == 3
        with other:
            blocks = [
                cupy.asarray(cache.memory.device_pool)[:, :, block].copy()
                for block in cache.block_table(sequence).dense()[0].tolist()
            ]
        other.synchronize()
        tokens = [4, 4, 2]
        for i, (block_kv, count) in enumerate(zip(blocks, tokens, strict=True)):
            assert (block_kv[:, :, :count].get() == i + 1).all()
        cache.verify()
        cache.release(sequence)


@pytest.mark.parametrize("path", PATHS)
def test_a_replay_finds_every_byte(cupy: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv(cuda.COPY_PATH, path)
    sizes = ["--device-blocks", "300", "--host-blocks", "300", "--cut", "600", "--active", "8", "--limit", "60"]
    assert main(["replay", "--device", "cuda", "--verify", *sizes]) == 0


def test_a_replay_finds_a_fragment_that_was_left_out(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Cutter.cut
    monkeypatch.setattr(Cutter, "cut", lambda cutter, moves: whole(cutter, moves)[:-1])
    monkeypatch.setenv(cuda.COPY_PATH, "plain")
    sizes = ["--device-blocks", "300", "--host-blocks", "300", "--cut", "600", "--active", "8", "--limit", "40"]
    assert main(["replay", "--device", "cuda", "--verify", *sizes]) == 1


def test_a_thousand_requests_of_a_trace_are_served_with_every_byte_right(
    cupy: Any, request: pytest.FixtureRequest
) -> None:
    """Requests of the trace that ``--request-trace`` names, else of generated chats; by the path that the pool chooses
    for each copy."""
    trace = request.config.getoption("--request-trace")
    sizes = ["--device-blocks", "2000", "--host-blocks", "4000", "--cut", "2000", "--active", "16", "--limit", "1000"]
    assert main(["replay", "--device", "cuda", "--verify", *sizes, *([trace] if trace else [])]) == 0


def test_every_path_can_be_measured_and_is_kept(cupy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda, "measure", partial(measure, sizes=(4096, 65536), counts=(4, 64)))
    monkeypatch.setenv("KVPOOL_COPY_KERNELS", "kernel,bulk")
    device = CudaDevice()
    calibration_made = device.calibrate()
    assert {(m.direction, m.path) for m in calibration_made.measurements} >= set(
        product(DIRECTIONS, ("plain", "kernel", "bulk"))
    )
    path = calibration.place(device.gpu.name, device.gpu.driver)
    assert calibration.load(path) == calibration_made
    device.close()
    device = CudaDevice()
    assert device.calibration == calibration_made, "the next device has it"
    device.close()
    path.write_text("{}")
    with pytest.warns(UserWarning, match="by rule"):
        device = CudaDevice()
    assert device.calibration.measurements == ()
    device.close()


def test_auto_is_the_gpu_unless_the_environment_says_otherwise(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for said, name in ((None, "cuda"), ("cpu", "cpu"), ("cuda", "cuda")):
        monkeypatch.delenv("KVPOOL_DEVICE", raising=False)
        if said is not None:
            monkeypatch.setenv("KVPOOL_DEVICE", said)
        device = get_device("auto")
        assert device.name == name
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
    copied = out if staging == "host" else out.get()
    np.testing.assert_array_equal(copied.view(np.uint16), wanted.view(np.uint16))
    scatter_kv(PagedKV.of_pool(LAYOUT, content), slots, np.zeros_like(wanted), skip_prefix_n_tokens=skip)
    flat[...] = 0
    cupy.cuda.Device().synchronize()
    scatter_kv(PagedKV.of_pool(LAYOUT, pool), slots, out, skip_prefix_n_tokens=skip)
    device.synchronize()
    np.testing.assert_array_equal(pool.get().view(np.uint16), content.view(np.uint16))
    device.free(flat)
    device.close()


def test_pinned_memory_is_known_to_the_driver_until_it_is_freed(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.device.cuda.cuda_memory.CHUNK_BYTES", 64 << 20)
    runtime, device = cupy.cuda.runtime, CudaDevice()
    array = device.allocate(200 << 20, "host")
    first, last = array.ctypes.data, array.ctypes.data + array.nbytes - 1
    assert not array.any()
    assert [runtime.pointerGetAttributes(address).type for address in (first, last)] == [runtime.memoryTypeHost] * 2
    device.free(array)
    assert [runtime.pointerGetAttributes(address).type for address in (first, last)] == [
        runtime.memoryTypeUnregistered
    ] * 2
    device.close()
