"""What the cuda device asks of the driver, as the emulated one counts it."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvpool import KVCacheManager, PagedKV, gather_kv, scatter_kv
from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.cuda import CudaDevice
from kvpool.device.cuda import cuda_device as cuda
from kvpool.device.cuda.cuda_streams import UsedStreams
from kvpool.device.memory.pools import MemoryPools
from tests.device.pools import as_moves
from tests.emulated.lab import Driver

pytestmark = pytest.mark.gpu
LAYOUT = BlockLayout(3, 2, 16, 4, dtype="float16")
SMALL = BlockLayout(1, 1, 1, 1, dtype="uint8")


@pytest.fixture
def bounded(driver: Driver) -> Iterator[Driver]:
    """A driver that refuses batches of more than 8,192 copies."""
    driver.library.emu_set_batch_limit(ctypes.c_size_t(8192))
    yield driver
    driver.library.emu_set_batch_limit(ctypes.c_size_t(50000))


@pytest.mark.parametrize(("bound", "blocks", "batches"), [(None, 5000, 2), ("4", 6, 3)])
def test_a_batched_copy_has_a_bound(
    bounded: Driver, monkeypatch: pytest.MonkeyPatch, bound: str | None, blocks: int, batches: int
) -> None:
    """Two fragments a block, K and V; blocks that are not neighbours are not merged."""
    if bound is not None:
        monkeypatch.setenv("KVPOOL_BATCH_FRAGMENTS", bound)
    device = CudaDevice(calibration="batched")
    pools = MemoryPools(device, SMALL, 2 * blocks, 2 * blocks)
    values = np.random.default_rng(0).integers(0, 256, pools.flat("device").size, dtype=np.uint8)
    pools.flat("device").set(values)
    device.synchronize()
    before = bounded.counter("batches")
    moves = as_moves(*((block, 2 * blocks + block, 1) for block in range(0, 2 * blocks, 2)))
    device.copy_blocks(moves, device.create_stream("copies"))
    device.synchronize()
    assert bounded.counter("batches") - before == batches
    kept = pools.device_pool.get().view(np.uint8)
    np.testing.assert_array_equal(pools.host_pool.view(np.uint8).reshape(-1, 2)[::2], kept.reshape(2, -1).T[::2])
    device.close()


def test_tokens_are_copied_by_the_gpu_whose_memory_it_is(driver: Driver) -> None:
    """The thread is on GPU 0, which has a context; pool and staging are on GPU 1."""
    device = CudaDevice(1)
    with KVCacheManager(LAYOUT, device_blocks=4, device=device) as cache:
        memory = device.allocate(LAYOUT.planes * LAYOUT.layers * 2 * 32 * 2, "device")
        staging = memory.view(np.float16).reshape(LAYOUT.planes, LAYOUT.layers, 2, 32)
        before = driver.launches(0), driver.launches(1)
        paged = PagedKV.of_pool(LAYOUT, cache.memory.device_pool)
        gather_kv(paged, np.array([3, 1]), staging)
        scatter_kv(paged, np.array([3, 1]), staging)
        device.synchronize()
        assert (driver.launches(0) - before[0], driver.launches(1) - before[1]) == (0, 2)
        device.free(memory)
    device.close()


def test_no_pinned_memory_is_given_back_before_the_close(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads of growing size, and tables of copies that have been read: to give one back would wait for the whole
    GPU."""
    import cupy

    monkeypatch.setenv(cuda.COPY_PATH, "kernel")
    cache = KVCacheManager(LAYOUT, device_blocks=600, host_blocks=600, device="cuda", max_sequence_tokens=2200)
    stream, first = cupy.cuda.Stream(non_blocking=True), 0
    gc.collect()  # what other tests have left
    before, launched = driver.counter("unpinned"), driver.counter("launches")
    for tokens in (3, 100, 900, 2100, 3, 900, 2100):
        sequence = cache.add_sequence(list(range(first, first + tokens)), stream=stream)
        table = cupy.full((1, 600), -7, np.int32)
        for _ in range(3):
            cache.tables.copy_batch_block_offsets(table, sequence)
        cache.commit(sequence)
        cache.release(sequence)
        first += tokens
        cupy.cuda.Device().synchronize()
    assert cache.stats().offloaded_blocks > 0 and driver.counter("launches") > launched
    assert driver.counter("unpinned") == before
    cache.close()
    assert driver.counter("unpinned") > before


def test_memory_of_the_caller_is_kept_until_the_copies_of_a_device_that_nobody_closed_are_done(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy's pool would give the buffer to another user while an offload still writes it."""
    import cupy

    pinned, waited = cupy.cuda.PinnedMemoryPool(), list[int]()
    synchronize = UsedStreams.synchronize

    def let_go_and_wait(streams: UsedStreams, closing: bool = False) -> None:
        waited.append(pinned.n_free_blocks())
        go()
        synchronize(streams, closing)

    monkeypatch.setattr(UsedStreams, "synchronize", let_go_and_wait)
    device = CudaDevice(calibration="plain")
    # Memory of the caller's too: to free memory of the device would wait for the stalled stream.
    blocks = cupy.empty(2 * LAYOUT.block_bytes, np.uint8)
    pools = MemoryPools(
        device,
        LAYOUT,
        2,
        2,
        device_memory=blocks,
        host_memory=lambda nbytes, alignment: np.frombuffer(pinned.malloc(nbytes), np.uint8, nbytes),
    )
    stream = device.create_stream("engine")
    go = driver.stall(stream.handle)
    device.copy_blocks(as_moves((0, 2, 4), (1, 3, 4)), stream)
    assert pinned.n_free_blocks() == 0
    del pools, device
    gc.collect()
    assert waited == [0] and pinned.n_free_blocks() == 1


def test_a_question_for_an_event_leaves_no_error_behind(driver: Driver) -> None:
    """ "Not ready" as the last error of the runtime would be taken for the failure of somebody else's launch."""

    runtime = ctypes.CDLL(_runtime_module())
    device, gate = CudaDevice(), threading.Event()
    stream = device.create_stream("stalled")
    kept = driver.host_function(lambda: gate.wait(600), stream.handle)
    event = device.record(stream)
    runtime.cudaGetLastError()
    assert not device.query(event) and runtime.cudaPeekAtLastError() == 0
    gate.set()
    device.synchronize(event)
    assert device.query(event)
    del kept
    device.close()


def test_events_go_with_their_pool_in_its_context(driver: Driver) -> None:
    """Even one that outlives its device, and those of a device that nobody closed."""
    gc.collect()
    before = driver.counter("events")
    device = CudaDevice(1)
    events = [device.record(device.create_stream("any")) for _ in range(3)]
    device.close()
    assert driver.counter("events") == before + 3
    del device
    events.clear()
    gc.collect()
    assert driver.counter("events") == before


def _runtime_module() -> str:
    """The module of CuPy's that has the runtime in it."""
    import cupy_backends.cuda.api.runtime as module

    return str(module.__file__)
