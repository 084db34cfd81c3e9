"""Tables of a step on the cuda device, where a kernel of Numba's writes them: late streams, launches that fail, several
GPUs and threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from numba import cuda

from engine import small_layout
from kvpool import KVCacheManager
from kvpool.device.cuda import CudaDevice
from kvpool.errors import DeviceError
from kvpool.pool import StepTables
from steps import arrays, check, expected
from tests.device.pools import on_device, seen
from tests.emulated import lab
from tests.emulated.barrier_kernels import reversed_with_a_barrier, reversed_without_a_barrier
from tests.emulated.lab import Driver

pytestmark = pytest.mark.gpu
SEEDS = range(12)


def out(device: CudaDevice) -> StepTables:
    return arrays(1, 3, 3, 3, put=lambda values: on_device(device, values))


def uploads(driver: Driver, seed: int, guard: str | None) -> bool:
    """Whether each of some steps, handed over to a stream that is late, has the tables of its sequence."""
    driver.quiet(seed)
    device = CudaDevice()
    cache = KVCacheManager(small_layout(2), device_blocks=40, device=device, max_sequences=4, staging_depth=2)
    if guard is not None:
        cache.core.disable_guard(guard)
    stream = device.create_stream("a")
    sequences = [cache.add_sequence([10 * number, 1, 2], stream=stream) for number in range(4)]
    outs, wanted = [out(device) for _ in sequences], [expected(cache, sequence, [0], [3]) for sequence in sequences]
    driver.hold(stream.handle)
    for step, sequence in zip(outs, sequences, strict=True):
        cache.tables.copy_step_tables(step, sequence, stream=stream)
    device.synchronize()
    cache.release(sequences)
    right = True
    for step, tables in zip(outs, wanted, strict=True):
        try:
            check(step, tables, seen)
        except AssertionError:
            right = False
    cache.close(force=True)
    device.close()
    return right


def test_a_staged_step_is_not_overwritten_before_it_has_been_read(driver: Driver) -> None:
    for seed in SEEDS:
        assert uploads(driver, seed, None), f"seed {seed}"


def test_a_staged_step_is_overwritten_in_every_run_without_its_guard(driver: Driver) -> None:
    for seed in SEEDS:
        assert not uploads(driver, seed, "staged_buffers_retire_by_event"), f"seed {seed}"


def test_a_launch_that_the_driver_refuses_is_an_error_and_the_next_one_goes_on(driver: Driver) -> None:
    device = CudaDevice()
    with KVCacheManager(small_layout(2), device_blocks=8, device=device) as cache:
        sequence, step = cache.add_sequence([1, 2, 3]), out(device)
        cache.tables.copy_step_tables(step, sequence)
        with driver.failing("launch", lab.OUT_OF_MEMORY):
            with pytest.raises(DeviceError, match="step_tables"):
                cache.tables.copy_step_tables(step, sequence)
        cache.verify()
        step = out(device)
        cache.tables.copy_step_tables(step, sequence)
        device.synchronize()
        check(step, expected(cache, sequence, [0], [3]), seen)
        cache.release(sequence)
    device.close()


FAILED_FOR_GOOD = """
import cupy
import numpy as np
from kvpool import BlockLayout, KVCacheManager, PoolClosed
from kvpool.errors import DeviceError
from kvpool.pool import StepTables

cache = KVCacheManager(BlockLayout(2, 2, 16, 4), device_blocks=3, device="cuda")
sequence, step = cache.add_sequence([1, 2, 3, 4, 5]), StepTables(seq_lens=cupy.zeros(1, np.int32))
cache.tables.copy_step_tables(step, sequence)
kernel = cupy.RawKernel('extern "C" __global__ void put(char* to, long long at) { to[at] = 1; }', "put")
kernel((1,), (1,), (cupy.cuda.alloc(4096).mem.ptr, 1 << 40))
raised = []
for call in (cupy.cuda.Device().synchronize, *[lambda: cache.tables.copy_step_tables(step, sequence)] * 2):
    try:
        call()
    except (DeviceError, PoolClosed, RuntimeError) as error:
        raised.append(type(error).__name__)
print(raised)
"""


def test_a_step_on_a_gpu_that_has_failed_for_good_closes_the_pool() -> None:
    """In a process of its own, by a kernel that writes where nothing is."""
    said = lab.in_a_process(FAILED_FOR_GOOD)
    assert "'DeviceError', 'PoolClosed'" in said, said


def test_gpus_and_threads_do_not_disturb_each_other(driver: Driver) -> None:
    devices = [CudaDevice(index) for index in (0, 1)]
    caches = [KVCacheManager(small_layout(2), device_blocks=8, device=device) for device in devices]
    sequences = [cache.add_sequence([1, 2, 3]) for cache in caches]
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for turn in range(4):
                device, cache, sequence = devices[turn % 2], caches[turn % 2], sequences[turn % 2]
                tables = out(device)
                cache.tables.copy_step_tables(tables, sequence)
                device.synchronize()
                check(tables, expected(cache, sequence, [0], [3]), seen)
        except BaseException as error:
            errors.append(error)

    threads: list[Any] = [threading.Thread(target=work) for _ in range(2)]
    before = driver.launches(0), driver.launches(1)
    work()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not errors
    assert [driver.launches(i) - before[i] for i in (0, 1)] == [6, 6]
    for cache, sequence in zip(caches, sequences, strict=True):
        cache.release(sequence)
        cache.close()
    for device in devices:
        device.close()


def test_tables_of_a_step_are_one_launch_and_no_copy(driver: Driver) -> None:
    device = CudaDevice()
    with KVCacheManager(small_layout(2), device_blocks=8, device=device) as cache:
        sequence, step = cache.add_sequence([1, 2, 3]), out(device)
        cache.tables.copy_step_tables(step, sequence)
        with driver.counting("launches", "copy_on", "cuMemAlloc_v2", "cuStreamSynchronize") as grown:
            cache.tables.copy_step_tables(step, sequence)
        assert grown == {"launches": 1, "copy_on": 0, "cuMemAlloc_v2": 0, "cuStreamSynchronize": 0}
        cache.release(sequence)
    device.close()


@pytest.mark.parametrize("kernel", [reversed_with_a_barrier, reversed_without_a_barrier])
def test_a_twin_of_numba_has_shared_memory_and_barriers(driver: Driver, kernel: Any) -> None:
    values = cuda.to_device(np.arange(4))
    out = cuda.to_device(np.zeros(4, np.int64))
    cuda.jit(kernel)[128, 4](values, out)
    right = out.copy_to_host().tolist() == [3, 2, 1, 0]
    assert right == (kernel is reversed_with_a_barrier)


ONLY_SOME_WAIT = """
import numpy as np
from numba import cuda
from tests.emulated.barrier_kernels import waiting_in_part

values = cuda.to_device(np.arange(4))
try:
    cuda.jit(waiting_in_part)[128, 4](values, values)
    cuda.synchronize()
except Exception as error:
    print("failed:", error)
"""


def test_a_barrier_that_only_some_threads_reach_fails_the_launch() -> None:
    said = lab.in_a_process(ONLY_SOME_WAIT)
    assert "3 of 4 threads wait at a barrier" in said and "failed:" in said, said
