"""What the cuda device adds to the contract: ways of copying, streams, events, and that everything is given back."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from kvpool import KVCacheManager
from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.base import NULL_STREAM, Stream
from kvpool.device.cuda import CudaDevice
from kvpool.device.cuda import cuda_device as cuda
from kvpool.device.cuda.calibration import PATHS
from kvpool.errors import DeviceError, InsufficientMemory
from tests.device.pools import DEVICE_BLOCKS, as_moves, assert_same_as_reference, make_pools, on_device, seen
from tests.emulated import lab
from tests.emulated.lab import Driver

pytestmark = pytest.mark.gpu
LAYOUT = BlockLayout(2, 2, 16, 4)
OFFLOADS = as_moves(*((block, DEVICE_BLOCKS + block, 4) for block in (0, 2, 4)))
FRAGMENTS = 3 * LAYOUT.layers * LAYOUT.planes
MAX_REGISTERS_PER_BLOCK, SAME_ADDRESSES = 12, 91


# Ways of copying


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_asked_for_is_taken(driver: Driver, path: str) -> None:
    device = CudaDevice(calibration=path)
    make_pools(device, LAYOUT)
    with driver.counting("copies", "batches", "launches") as grown:
        device.copy_blocks(OFFLOADS, device.create_stream("copies"))
    wanted = {"plain": (FRAGMENTS, 0, 0), "batched": (FRAGMENTS, 1, 0), "kernel": (0, 0, 1), "bulk": (0, 0, 1)}
    assert tuple(grown.values()) == wanted[path]
    device.close()


def test_the_null_stream_takes_no_batches_and_an_old_driver_has_none(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driver.counting("batches") as grown:
        device = CudaDevice(calibration="batched")
        assert_same_as_reference(make_pools(device, LAYOUT), OFFLOADS)
        device.close()
        monkeypatch.setattr(cuda, "find_batch", lambda library: None)
        device = CudaDevice(calibration="batched")
        pools = make_pools(device, LAYOUT)
        device.copy_blocks(OFFLOADS, device.create_stream("copies"))
        assert_same_as_reference(pools, OFFLOADS)
        device.close()
    assert grown == {"batches": 0}


def test_a_machine_whose_pinned_memory_has_other_addresses_takes_plain_copies_and_hands_tables_over(
    driver: Driver,
) -> None:
    with driver.attribute(SAME_ADDRESSES, 0):
        for path in PATHS:
            device = CudaDevice(calibration=path)
            pools = make_pools(device, LAYOUT)
            with driver.counting("batches", "launches") as grown:
                device.copy_blocks(OFFLOADS, device.create_stream("copies"))
            assert grown == {"batches": 0, "launches": 0}
            assert_same_as_reference(pools, OFFLOADS)
            device.close()
        device = CudaDevice()
        with KVCacheManager(LAYOUT, device_blocks=3, device=device) as cache:
            sequence, table = cache.add_sequence([1, 2]), on_device(device, np.zeros((1, 2), np.int32))
            cache.tables.copy_batch_block_offsets(table, sequence)
            device.synchronize()
            assert seen(table)[0, 0] == cache.block_table(sequence).dense()[0, 0]
            cache.release(sequence)
        device.close()


# Streams and events


def test_a_launch_that_fails_for_resources_is_an_error_that_goes_away(driver: Driver) -> None:
    """Documentation of CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: more threads than the registers of a kernel allow. The
    launch did not occur, and the context lives."""
    device = CudaDevice()
    table = on_device(device, np.zeros((1, 64), np.int32))
    with KVCacheManager(LAYOUT, device_blocks=8, device=device) as cache:
        sequence = cache.add_sequence([1, 2, 3])
        with (
            driver.attribute(MAX_REGISTERS_PER_BLOCK, 63 * 32),
            pytest.raises(DeviceError, match="stage_rows: .*LaunchOutOfResources"),
        ):
            cache.tables.copy_batch_block_offsets(table, sequence)
        cache.tables.copy_batch_block_offsets(table, sequence)
        cache.verify()
        device.synchronize()
        assert seen(table).tolist() == cache.block_table(sequence).dense(64).tolist()
        cache.release(sequence)
    device.close()


def test_the_legacy_stream_has_one_name_and_the_per_thread_stream_none() -> None:
    device = CudaDevice()
    assert device.as_stream(None) is device.as_stream(1) is device.as_stream(Stream(1)) is NULL_STREAM
    assert device.as_stream(0) == NULL_STREAM
    with pytest.raises(ValueError, match="stream: the per-thread default stream"):
        device.as_stream(2)
    device.close()


def test_a_thread_keeps_its_own_gpu_and_its_own_mode_of_capture(driver: Driver) -> None:
    mine, theirs = driver.made("cuCtxGetCurrent"), list[int]()
    device = CudaDevice(1)
    assert_same_as_reference(make_pools(device, LAYOUT), OFFLOADS)

    def work() -> None:
        device.synchronize(device.record(NULL_STREAM))
        theirs.append(driver.made("cuCtxGetCurrent"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    mode = ctypes.c_int(lab.GLOBAL)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert (driver.made("cuCtxGetCurrent"), theirs, mode.value) == (mine, [0], lab.GLOBAL)
    device.close()
    with pytest.raises(ValueError, match="index: .*2"):
        CudaDevice(2)


# What is given back


def test_memory_that_is_not_there_is_a_memory_error_and_nothing_stays(driver: Driver) -> None:
    device = CudaDevice()
    before = driver.in_use()
    with pytest.raises(MemoryError):
        device.allocate(1 << 40, "device")
    with driver.failing("cuMemHostRegister_v2", lab.OUT_OF_MEMORY), pytest.raises(MemoryError, match="refused"):
        make_pools(device, LAYOUT)
    with driver.failing("cuMemHostRegister_v2", lab.ILLEGAL_ADDRESS), pytest.raises(DeviceError) as caught:
        device.allocate(100, "host")
    assert caught.value.sticky
    del caught
    assert driver.in_use() == before
    device.close()


def test_a_copy_that_finds_no_memory_is_refused_and_goes_through_when_there_is_some(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.device.cuda.launcher.SOME_ROWS", 0)  # rows need a table
    device = CudaDevice(calibration="kernel")
    pools = make_pools(device, LAYOUT)
    with (
        driver.failing("cuMemHostAlloc", lab.OUT_OF_MEMORY),
        pytest.raises(DeviceError, match="cudaHostAlloc") as caught,
    ):
        device.copy_blocks(OFFLOADS)
    assert not caught.value.sticky
    assert_same_as_reference(pools, OFFLOADS)
    device.close()


def test_a_pool_that_does_not_fit_leaves_nothing(driver: Driver) -> None:
    before = driver.in_use()
    with pytest.raises(InsufficientMemory, match="device tier asks for"):
        KVCacheManager(LAYOUT, device_blocks=1 << 30, device="cuda")
    with driver.failing("cuMemHostRegister_v2", lab.INVALID), pytest.raises(InsufficientMemory, match="pinned 0 of"):
        KVCacheManager(LAYOUT, device_blocks=1, host_blocks=1, device="cuda")
    assert driver.in_use() == before


def test_what_is_said_to_be_available_can_be_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
from kvpool.device.cuda import CudaDevice
from tests.emulated import lab
lab.driver().use(0)
device, odd = CudaDevice(), lab.driver().made("cuMemAlloc_v2", 1 << 16)
print(device.allocate(device.available_bytes("device"), "device").nbytes >> 20)
"""
    monkeypatch.setenv("EMU_MEMORY_BYTES", str(32 << 20))
    assert lab.in_a_process(script).split()[-1] == "29"


def test_closing_gives_everything_back(driver: Driver) -> None:
    before = driver.in_use()
    device = CudaDevice(calibration="kernel")
    pools = make_pools(device, LAYOUT)
    device.copy_blocks(OFFLOADS, device.create_stream("copies"))
    view = pools.device_pool
    device.close()
    del pools
    assert driver.in_use()["allocations"] == before["allocations"] + 1, "what somebody looks at stays"
    del view, device
    assert driver.in_use() == before


FAILED_FOR_GOOD = """
import cupy
import numpy as np
from kvpool import BlockLayout, KVCacheManager, PoolClosed
from kvpool.errors import DeviceError
from tests.emulated import lab

layout = BlockLayout(2, 2, 16, 4)
cache = KVCacheManager(layout, device_blocks=3, host_blocks=3, device="cuda")
kernel = cupy.RawKernel('extern "C" __global__ void put(char* to, long long at) { to[at] = 1; }', "put")
sequence = cache.add_sequence([1, 2, 3, 4, 5])
kernel((1,), (1,), (cupy.cuda.alloc(4096).mem.ptr, 1 << 40))
raised = []
for call in (
    cupy.cuda.Device().synchronize,
    lambda: cache.add_sequence([7]),
    lambda: cache.append_tokens(sequence, [6]),
    lambda: cache.commit(sequence),
    lambda: cache.tables.copy_batch_block_offsets(cupy.zeros((1, 4), np.int32), sequence),
):
    try:
        call()
    except (DeviceError, PoolClosed, RuntimeError) as error:
        raised.append(type(error).__name__)
print(raised)
assert cache.close().sequences == [sequence]
try:
    cache.core.device.record(cache.core.device.create_stream("late"))
except PoolClosed:
    print("closed")
"""


def test_a_gpu_that_has_failed_for_good_can_be_closed() -> None:
    """In a process of its own, by a kernel that writes where nothing is."""
    said = lab.in_a_process(FAILED_FOR_GOOD)
    assert "fails with error 700" in said and said.count("DeviceError") == 1, said
    assert "'PoolClosed', 'PoolClosed'" in said and "\nclosed\n" in said
