"""The cuda device and the driver below it: contexts, captures, streams that are gone, and memory of pools that nobody
closed."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheManager
from kvpool.common.arrays.layout import BlockLayout
from kvpool.pool import StepTables

pytestmark = pytest.mark.gpu
LAYOUT = BlockLayout(3, 2, 16, 4, dtype="float16")
ROOT = Path(__file__).resolve().parents[2]

ONE_GPU = """
import ctypes, threading
import numpy as np
from kvpool import KVCacheManager, PagedKV, gather_kv
from kvpool.device.cuda import CudaDevice
from kvpool.common.arrays.layout import BlockLayout

driver = ctypes.CDLL("libcuda.so.1")

def active(index):
    flags, found = ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(found)) == 0
    return bool(found.value)

layout = BlockLayout(3, 2, 16, 4, dtype="float16")
device = CudaDevice(1, calibration="kernel")
with KVCacheManager(layout, device_blocks=16, host_blocks=60, device=device, max_sequences=4) as cache:
    def serve(first):
        for start in range(first, first + 5000, 1000):
            sequence = cache.add_sequence(list(range(start, start + 16)))
            cache.commit(sequence)
            cache.release(sequence)
    threads = [threading.Thread(target=serve, args=[10**6 * n]) for n in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    serve(0)
    out = device.allocate(2 * 3 * 3 * 2 * 16 * 2, "device")
    rows = out.view(np.float16).reshape(2, 3, 3, 32)
    gather_kv(PagedKV.of_pool(layout, cache.memory.device_pool), np.array([1, 2, 3]), rows)
    device.synchronize()
    device.free(out)
device.close()
assert active(1) and not active(0), [active(0), active(1)]
import cupy
assert cupy.cuda.runtime.getDevice() == 0
"""


def test_threads_that_chose_no_gpu_get_no_context_beside_that_of_the_pool(cupy: Any) -> None:
    """In a process of its own, as contexts stay until a process ends."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU: a second is needed")
    done = subprocess.run([sys.executable, "-c", ONE_GPU], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def serve(cache: KVCacheManager, stream: Any, first: int, count: int) -> None:
    for start in range(first, first + 100 * count, 100):
        sequence = cache.add_sequence(list(range(start, start + 16)), stream=stream)
        cache.commit(sequence)
        cache.release(sequence)


@pytest.mark.parametrize(
    "mode", ["streamCaptureModeGlobal", "streamCaptureModeThreadLocal", "streamCaptureModeRelaxed"]
)
def test_a_pool_is_used_while_a_stream_is_captured_and_refuses_that_stream(cupy: Any, mode: str) -> None:
    """Offloads, onboards, uploads and leases on other streams, by this thread and others: the capture ends as a
    graph that runs."""
    with KVCacheManager(LAYOUT, device_blocks=6, host_blocks=90, device="cuda", max_sequences=4) as cache:
        captured, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        out, table = cupy.zeros(4, np.int32), cupy.full((1, 8), -7, np.int32)
        vectors = [cupy.full(size, -7, np.int32) for size in (2, 8, 1)]
        step = StepTables(seq_lens=cupy.full(1, -7, np.int32))
        held = cache.add_sequence([1, 2, 3], stream=captured)
        cupy.cuda.Device().synchronize()
        errors: list[BaseException] = []

        def work() -> None:
            try:
                serve(cache, other, 10**6, 10)
                cache.content.prefetch(list(range(10**6, 10**6 + 16)))
            except BaseException as error:
                errors.append(error)

        gc.collect()  # Memory of other tests that is freed in this thread would end the capture.
        captured.begin_capture(getattr(cupy.cuda.runtime, mode))
        cupy.cuda.runtime.memsetAsync(out.data.ptr, 1, out.nbytes, captured.ptr)
        for call in (
            lambda: cache.add_sequence([9] * 4, stream=captured),
            lambda: cache.append_tokens(held, [4]),
            lambda: cache.tables.copy_batch_block_offsets(table, held),
            lambda: cache.tables.copy_batch_block_csr(*vectors, held),
            lambda: cache.tables.copy_step_tables(step, held, stream=captured),
            lambda: cache.commit(held),
        ):
            with pytest.raises(ValueError, match="expected one that is not being captured"):
                call()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        serve(cache, other, 2 * 10**6, 10)
        graph = captured.end_capture()
        assert not errors
        graph.launch(captured)
        captured.synchronize()
        assert (out.get() == 0x01010101).all()
        assert all((vector.get() == -7).all() for vector in (table, *vectors, step.seq_lens))
        cache.tables.copy_batch_block_offsets(table, held)
        cache.commit(held)
        cache.release(held)
        cupy.cuda.Device().synchronize()
        cache.verify()


def test_a_graph_is_replayed_with_the_tables_that_were_handed_over_before_it(cupy: Any) -> None:
    with KVCacheManager(LAYOUT, device_blocks=6, host_blocks=40, device="cuda", max_sequences=4) as cache:
        stream = cupy.cuda.Stream(non_blocking=True)
        table, lengths, read = cupy.full((1, 6), -7, np.int32), cupy.full(1, -7, np.int32), cupy.zeros(7, np.int32)
        sequence = cache.add_sequence([1, 2, 3], stream=stream)
        cupy.cuda.Device().synchronize()
        stream.begin_capture()
        for source, first in ((table, 0), (lengths, table.nbytes)):
            kind = cupy.cuda.runtime.memcpyDeviceToDevice
            cupy.cuda.runtime.memcpyAsync(read.data.ptr + first, source.data.ptr, source.nbytes, kind, stream.ptr)
        graph = stream.end_capture()
        for tokens in (3, 7, 11):
            cache.tables.copy_batch_block_offsets(table, sequence, stream=stream)
            cache.tables.copy_step_tables(StepTables(seq_lens=lengths), sequence, stream=stream)
            graph.launch(stream)
            wanted = [*cache.block_table(sequence).dense()[0].tolist(), *[-1] * 6][:6]
            cache.append_tokens(sequence, [0] * 4)
            cache.commit(sequence, stream=stream)
            stream.synchronize()
            assert read.get().tolist() == [*wanted, tokens]
        cache.release(sequence)


def test_pools_that_nobody_closed_leave_no_memory_pinned(cupy: Any) -> None:
    runtime = cupy.cuda.runtime
    for _ in range(5):
        cache = KVCacheManager(LAYOUT, device_blocks=2, host_blocks=3, device="cuda")
        address = cache.memory.host_pool.ctypes.data
        del cache
        gc.collect()
        assert runtime.pointerGetAttributes(address).type == runtime.memoryTypeUnregistered
