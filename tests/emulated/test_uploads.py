"""What kernels read besides the pools: each upload is its launch's own. And their sources, which may not compile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheManager
from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.base import Stream
from kvpool.device.cuda import COPY_PATH, CudaDevice
from kvpool.device.cuda.launcher import QUERIED_ABOVE
from kvpool.errors import DeviceError
from kvpool.pool import StepTables
from tests.device.pools import DEVICE_BLOCKS, as_moves, assert_same_as_reference, images, make_pools, seen
from tests.emulated import lab
from tests.emulated.lab import Driver

pytestmark = pytest.mark.gpu
LAYOUT = BlockLayout(2, 2, 16, 4)
OFFLOADS = as_moves(*((block, DEVICE_BLOCKS + block, 4) for block in (0, 2, 4)))


@pytest.fixture(autouse=True)
def rows_in_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows would be in the argument of their launch."""
    monkeypatch.setattr("kvpool.device.cuda.launcher.SOME_ROWS", 0)


@pytest.fixture
def device(driver: Driver) -> Iterator[CudaDevice]:
    """One that copies with kernels."""
    made = CudaDevice(calibration="kernel")
    yield made
    made.close()


def in_flight(device: Any) -> int:
    """The uploads that kernels may still read."""
    uploads = device._launcher.uploads
    uploads._reclaim()
    return len(uploads._retired)


def test_threads_and_streams_that_are_gone_leave_the_kernels_in_use(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 threads that each cause an offload, then 20 evicting admissions: every copy is a kernel's."""
    monkeypatch.setenv(COPY_PATH, "kernel")
    with KVCacheManager(LAYOUT, device_blocks=4, host_blocks=200, device="cuda", max_sequences=2) as cache:

        def evict(number: int) -> None:
            sequence = cache.add_sequence(list(range(100 * number, 100 * number + 16)))
            cache.commit(sequence)
            cache.release(sequence)

        turn, over, done = threading.Lock(), threading.Event(), threading.Semaphore(0)

        def work(number: int) -> None:
            with turn:
                evict(number)
            done.release()
            over.wait()

        threads = [threading.Thread(target=work, args=[number], daemon=True) for number in range(70)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert done.acquire(timeout=600)
        cache.core.device.synchronize()
        with driver.counting("copies", "launches") as grown:
            for number in range(70, 90):
                evict(number)
        over.set()
        assert grown == {"copies": 0, "launches": 20}
        cache.core.device.synchronize()
        assert in_flight(cache.core.device) == 0


def test_short_lived_streams_keep_no_buffers(driver: Driver, device: CudaDevice) -> None:
    make_pools(device, LAYOUT)
    before = driver.counter("pinned")
    with driver.counting("launches") as grown:
        for _ in range(200):
            stream = driver.stream()
            device.copy_blocks(OFFLOADS, Stream(stream))
            driver.cuStreamSynchronize(stream)
            driver.cuStreamDestroy_v2(stream)
    assert grown == {"launches": 200} and driver.counter("pinned") <= before + QUERIED_ABOVE + 2


def test_an_upload_is_not_written_over_while_another_stream_is_stalled(driver: Driver, device: CudaDevice) -> None:
    pools, stalled, other = make_pools(device, LAYOUT), device.create_stream("stalled"), device.create_stream("other")
    expected = images(pools)
    go = driver.stall(stalled.handle)
    device.copy_blocks(as_moves((0, DEVICE_BLOCKS, 4)), stalled)
    for _ in range(10):
        device.copy_blocks(as_moves((1, DEVICE_BLOCKS + 1, 4)), other)
        device.synchronize(device.record(other))
        assert in_flight(device) == 1
    go()
    device.synchronize()
    for block in (0, 1):
        np.testing.assert_array_equal(pools.host_pool[block], expected[0][:, :, block])


def test_kernels_that_pile_up_are_replaced_by_copies_and_nothing_waits(
    driver: Driver, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.device.cuda.launcher.PENDING_BYTES_MAX", 3 * 4096)
    pools, stream = make_pools(device, LAYOUT), device.create_stream("copies")
    go = driver.stall(stream.handle)
    with driver.counting("cuEventSynchronize", "launches") as grown:
        for _ in range(10):
            device.copy_blocks(OFFLOADS, stream)
    assert grown == {"cuEventSynchronize": 0, "launches": 3} and in_flight(device) == 3
    assert device.crowded_copies == 7
    go()
    device.synchronize()
    assert_same_as_reference(pools, OFFLOADS)
    assert device.crowded_copies == 7, "there is room again"


def test_uploads_wait_for_the_oldest_when_too_many_are_under_way(
    driver: Driver, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.device.cuda.launcher.PENDING_BYTES_MAX", 2 * 4096)
    stream, table, addresses = device.create_stream("any"), np.arange(10), set()
    with driver.counting("cuEventSynchronize") as grown:
        for i in range(20):
            with device._launcher.uploaded(table + i, stream.handle, host=True) as address:
                addresses.add(address)
    assert len(addresses) == 2 and grown["cuEventSynchronize"] > 0


def test_a_buffer_whose_event_cannot_be_recorded_is_not_used_again(driver: Driver) -> None:
    before = driver.in_use()
    device = CudaDevice(calibration="kernel")
    pools, stream = make_pools(device, LAYOUT), device.create_stream("copies")
    expected = images(pools)
    go = driver.stall(stream.handle)
    with driver.failing("record", lab.INVALID), pytest.raises(DeviceError, match="EventRecord"):
        device.copy_blocks(as_moves((0, DEVICE_BLOCKS, 4)), stream)
    for block in (1, 2):
        device.copy_blocks(as_moves((block, DEVICE_BLOCKS + block, 4)), stream)
    go()
    device.synchronize()
    for block in range(3):
        np.testing.assert_array_equal(pools.host_pool[block], expected[0][:, :, block])
    device.close()
    del pools, device
    assert driver.in_use() == before


# Sources


def test_a_table_kernel_is_loaded_on_each_gpu_before_its_first_launch(driver: Driver) -> None:
    """Both GPUs are of one kind. A load at the first launch could wait for all that runs there."""
    from kvpool.device.cuda import table_kernels

    table_kernels.compiled.cache_clear()
    for index in (0, 1):
        device = CudaDevice(index)
        with KVCacheManager(LAYOUT, device_blocks=4, device=device) as cache:
            table = device.allocate(16, "device").view(np.int32).reshape(1, 4)
            with driver.counting("load") as loaded:
                device.views.table(table)
            sequence = cache.add_sequence([1, 2, 3])
            with driver.counting("load", "launches") as grown:
                cache.tables.copy_batch_block_offsets(table, sequence)
            assert (loaded, grown) == ({"load": 1}, {"load": 0, "launches": 1})
            device.synchronize()
            assert seen(table).tolist() == cache.block_table(sequence).dense(4).tolist()
            for status in (lab.INVALID, lab.OUT_OF_MEMORY):
                with driver.failing("launch", status), pytest.raises(DeviceError, match="stage_rows: ") as refused:
                    cache.tables.copy_batch_block_offsets(table, sequence)
                assert not refused.value.sticky
            cache.release(sequence)
        device.close()


def test_what_cannot_be_compiled_is_said_when_the_pool_is_made(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    def broken(code: str, options: tuple[str, ...]) -> object:
        raise RuntimeError("no compiler")

    before = driver.in_use()
    monkeypatch.setattr(cupy, "RawModule", broken)
    with pytest.raises(DeviceError, match=r"token_moves\.cu cannot be compiled: RuntimeError: no compiler"):
        KVCacheManager(LAYOUT, device_blocks=2, host_blocks=2, device="cuda")
    assert driver.in_use() == before


@pytest.mark.parametrize("name", ["stage_rows", "step_tables"])
def test_what_numba_cannot_compile_is_said_before_a_table_is_handed_over(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import cupy

    from kvpool.device.cuda import table_kernels

    def broken(name: str, capability: tuple[int, int]) -> object:
        raise RuntimeError("no compiler")

    with KVCacheManager(LAYOUT, device_blocks=2, device="cuda") as cache:
        sequence, table = cache.add_sequence([1]), cupy.full((1, 2), 7, np.int32)
        call = {
            "stage_rows": lambda: cache.tables.copy_batch_block_offsets(table, sequence),
            "step_tables": lambda: cache.tables.copy_step_tables(StepTables(table=table), sequence),
        }[name]
        with monkeypatch.context() as patch:
            patch.setattr(table_kernels, "compiled", broken)
            with pytest.raises(DeviceError, match=f"{name} cannot be compiled: RuntimeError: no compiler"):
                call()
        assert cache.stats().uploads == 0
        call()
        cupy.cuda.runtime.deviceSynchronize()
        assert table.get().tolist() == [[cache.block_table(sequence).dense()[0, 0], -1]]
        cache.release(sequence)


def test_block_copies_do_without_a_kernel_that_cannot_be_compiled(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    module = cupy.RawModule

    def broken(code: str, options: tuple[str, ...]) -> object:
        if "copy_fragments" in code:
            raise RuntimeError("no such thing")
        return module(code=code, options=options)

    monkeypatch.setattr(cupy, "RawModule", broken)
    device = CudaDevice(calibration="kernel")
    with pytest.warns(UserWarning, match=r"copy_fragments\.cu cannot be compiled: RuntimeError: no such thing"):
        pools = make_pools(device, LAYOUT)
    with driver.counting("launches") as grown:
        assert_same_as_reference(pools, OFFLOADS)
    assert grown == {"launches": 0}
    device.close()
