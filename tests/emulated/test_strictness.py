"""The emulated driver is as strict as the documentation of CUDA: each rule with a call that breaks it."""

from __future__ import annotations

import ctypes
import mmap
import threading

import pytest

from tests.emulated import lab
from tests.emulated.lab import Driver

pytestmark = pytest.mark.gpu


def filled(memory: ctypes.Array[ctypes.c_uint8], value: int) -> ctypes.Array[ctypes.c_uint8]:
    ctypes.memset(memory, value, len(memory))
    return memory


# -- lateness --------------------------------------------------------------------------------------------------


def test_a_gpu_gets_on_when_no_call_comes_and_a_loop_of_queries_ends(driver: Driver) -> None:
    for idle_ms in (1, -1):
        driver.quiet(idle_ms=idle_ms)
        done, stream = threading.Event(), driver.stream()
        kept = driver.host_function(done.set, stream)
        if idle_ms < 0:
            while driver.pending(stream):
                pass
        assert done.wait(600)
        driver.cuStreamSynchronize(stream)
        del kept


def test_the_legacy_stream_waits_for_blocking_streams_only_and_they_for_it(driver: Driver) -> None:
    for flags, bound in ((0, True), (lab.NON_BLOCKING, False)):
        reads = set()
        for seed in range(30):
            driver.quiet(seed)
            target, values, stream = (
                driver.near(1),
                [filled(driver.pinned(1), i) for i in (1, 2, 3)],
                driver.stream(flags),
            )
            for value, on in zip(values, (0, stream, 0), strict=True):
                driver.copy(target, value, 1, on)
            driver.cuCtxSynchronize()
            reads.add(target[0])
        assert reads == ({3} if bound else {2, 3})


def test_a_host_function_that_waits_holds_up_its_own_stream_only_and_may_not_call_cuda(driver: Driver) -> None:
    driver.quiet(idle_ms=5)
    gate, statuses, streams = threading.Event(), [], [driver.stream(), driver.stream()]

    def function() -> None:
        statuses.append(driver.status("cuStreamQuery", streams[1]))
        gate.wait(600)

    kept = driver.host_function(function, streams[0])
    driver.copy(driver.pinned(1), driver.pinned(1), 1, streams[1])
    driver.cuStreamSynchronize(streams[1])
    assert driver.pending(streams[0])
    gate.set()
    driver.cuStreamSynchronize(streams[0])
    assert statuses == [lab.NOT_PERMITTED]
    del kept


# -- memory ----------------------------------------------------------------------------------------------------


def test_a_range_is_registered_once_and_only_what_is_registered_is_unregistered(driver: Driver) -> None:
    memory = mmap.mmap(-1, 8 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_uint8.from_buffer(memory))
    driver.cuMemHostRegister_v2(address, 4 * mmap.PAGESIZE, 0)
    for first, pages in ((0, 4), (3, 1), (2, 4)):
        assert (
            driver.status("cuMemHostRegister_v2", address + first * mmap.PAGESIZE, pages * mmap.PAGESIZE, 0)
            == lab.ALREADY_REGISTERED
        )
    assert driver.status("cuMemHostUnregister", address + mmap.PAGESIZE) == lab.NOT_REGISTERED
    driver.cuMemHostUnregister(address)
    assert driver.status("cuMemHostUnregister", address) == lab.NOT_REGISTERED


def test_a_copy_across_two_registrations_is_refused(driver: Driver) -> None:
    memory, page = mmap.mmap(-1, 2 * mmap.PAGESIZE), mmap.PAGESIZE
    address = ctypes.addressof(ctypes.c_uint8.from_buffer(memory))
    device, stream = driver.allocate(2 * page), driver.stream()
    for half in (0, 1):
        driver.cuMemHostRegister_v2(address + half * page, page, 0)
    assert driver.copy(device, address, page, stream) == lab.SUCCESS
    assert driver.copy(device, address + page - 8, 16, stream) == lab.INVALID
    driver.cuCtxSynchronize()
    driver.cuMemHostUnregister(address + page)
    assert driver.copy(device, address + page - 8, 16, stream) == lab.INVALID, "pinned in part"
    driver.cuMemHostUnregister(address)


def test_pageable_memory_is_read_at_the_call_and_arrives_late(driver: Driver) -> None:
    """A copy from pageable memory returns when it is staged, even a synchronous one."""
    source, memory, out = (ctypes.c_uint8 * 8)(*[7] * 8), driver.allocate(8), driver.pinned(8)
    filled(source, 7)
    driver.cuMemcpyHtoD_v2(memory, source, 8)
    filled(source, 9)
    assert driver.pending(0)
    driver.copy(out, memory, 8, 0)
    driver.cuStreamSynchronize(0)
    assert set(out) == {7}


def test_a_copy_from_host_to_host_is_done_when_the_call_returns(driver: Driver) -> None:
    """CUDA's "API synchronization behavior": it is fully synchronous with respect to the host. Other work of the stream
    is done then."""
    stream, near, source = driver.stream(), filled(driver.near(8), 0), filled(driver.pinned(8), 5)
    for target in (driver.pinned(8), (ctypes.c_uint8 * 8)()):
        driver.copy(near, source, 8, stream)
        assert driver.pending(stream)
        driver.copy(target, source, 8, stream)
        assert set(target) == set(near) == {5} and not driver.pending(stream)
        filled(near, 0)


# -- streams, events, contexts ---------------------------------------------------------------------------------


def test_a_destroyed_stream_or_event_is_an_error(driver: Driver) -> None:
    stream, event, other = driver.stream(), driver.event(), driver.stream()
    driver.cuEventRecord(event, stream)
    driver.cuEventDestroy_v2(event)
    for call in (
        ("cuEventQuery", event),
        ("cuEventRecord", event, other),
        ("cuStreamWaitEvent", other, event, 0),
        ("cuEventDestroy_v2", event),
    ):
        assert driver.status(*call) == lab.INVALID_HANDLE, call
    driver.cuStreamDestroy_v2(stream)
    for call in (
        ("cuStreamQuery", stream),
        ("cuStreamSynchronize", stream),
        ("cuStreamDestroy_v2", stream),
        ("cuEventRecord", driver.event(), stream),
    ):
        assert driver.status(*call) == lab.INVALID_HANDLE, call
    assert driver.copy(driver.pinned(1), driver.pinned(1), 1, stream) == lab.INVALID_HANDLE


def test_the_handle_of_a_destroyed_stream_becomes_that_of_another(driver: Driver) -> None:
    """By the documentation of cudaStreamDestroy, use of the handle after that call is undefined. What names it then
    means the other stream, but events of the old one stay its own."""
    event, target, source = driver.event(), filled(driver.near(8), 0), filled(driver.pinned(8), 5)
    gone = driver.stream()
    driver.cuEventRecord(event, gone)
    driver.cuStreamSynchronize(gone)
    driver.cuStreamDestroy_v2(gone)
    streams = [driver.stream() for _ in range(64)]
    assert gone in streams
    driver.copy(target, source, 8, gone)
    assert driver.status("cuEventQuery", event) == lab.SUCCESS
    assert driver.pending(gone)
    for stream in streams:
        driver.cuStreamDestroy_v2(stream)


def test_a_wait_is_for_the_record_before_it(driver: Driver) -> None:
    """What a stream waits for is settled at the call, and an event that was never recorded holds nobody up."""
    driver.quiet(idle_ms=5)
    gate, (first, second), event = threading.Event(), (driver.stream(), driver.stream()), driver.event()
    driver.cuStreamWaitEvent(second, event, 0)
    driver.cuStreamSynchronize(second)
    driver.cuEventRecord(event, second)
    driver.cuStreamWaitEvent(second, event, 0)
    kept = driver.host_function(lambda: gate.wait(600), first)
    driver.cuEventRecord(event, first)
    driver.cuStreamSynchronize(second)
    assert driver.status("cuEventQuery", event) == lab.NOT_READY
    gate.set()
    driver.cuEventSynchronize(event)
    del kept


PROCESSES = {
    "unregistering waits for nobody and a copy under way fails": """
import ctypes, mmap
from tests.emulated import lab
driver = lab.driver()
driver.use(0)
driver.quiet()
array = (ctypes.c_uint8 * mmap.PAGESIZE).from_buffer(mmap.mmap(-1, mmap.PAGESIZE))
device, stream = driver.allocate(mmap.PAGESIZE), driver.stream()
for pending in (False, True):
    driver.cuMemHostRegister_v2(ctypes.addressof(array), mmap.PAGESIZE, 0)
    driver.copy(device, array, mmap.PAGESIZE, stream)
    if not pending:
        driver.cuStreamSynchronize(stream)
    driver.cuMemHostUnregister(ctypes.addressof(array))
    found = driver.status("cuStreamSynchronize", stream)
    assert found == (lab.ILLEGAL_ADDRESS if pending else lab.SUCCESS), found
""",
    "a primary context is made by whoever makes a device current, and is counted": """
from tests.emulated import lab
driver = lab.driver()
assert driver.counter("contexts") == 0 and driver.status("cuCtxSynchronize") == lab.INVALID_CONTEXT
import cupy
cupy.cuda.runtime.getDeviceCount()
assert driver.counter("contexts") == 0
cupy.cuda.runtime.setDevice(1)
assert driver.counter("contexts") == 1
cupy.cuda.runtime.setDevice(1)
cupy.cuda.runtime.memGetInfo()
assert driver.counter("contexts") == 1
import threading
thread = threading.Thread(target=lambda: cupy.cuda.runtime.memGetInfo())
thread.start(); thread.join()
assert driver.counter("contexts") == 2, "a thread that never chose a device is on GPU 0"
""",
    "a forked process cannot use the driver": """
import os
from tests.emulated import lab
driver = lab.driver()
driver.use(0)
child = os.fork()
if not child:
    os._exit(driver.status("cuMemHostAlloc", 0, 0, 0) != lab.NOT_INITIALIZED)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
    "an access outside an allocation ends the context and no other": """
import sys
import cupy
from tests.emulated import lab
driver = lab.driver()
kernel = cupy.RawKernel('extern "C" __global__ void put(char* to, long long at) { to[at] = 1; }', "put")
memory = cupy.cuda.alloc(4096).mem
kernel((1,), (1,), (memory.ptr, 4095))
cupy.cuda.Device().synchronize()
stream = cupy.cuda.Stream(non_blocking=True)
kernel((1,), (1,), (memory.ptr, 4096), stream=stream)
for call in (stream.synchronize, lambda: cupy.cuda.alloc(8192), cupy.cuda.Device(0).synchronize):
    try:
        call()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        assert error.status == 700, error
    else:
        raise SystemExit("not sticky")
driver.use(1)
driver.allocate(64)
print("the other GPU lives")
""",
    "a misaligned access of a kernel ends the context": """
import cupy
kernel = cupy.RawKernel('extern "C" __global__ void put(long long* to) { *to = 1; }', "put")
memory = cupy.cuda.alloc(4096)
kernel((1,), (1,), (memory.ptr + 4,))
try:
    cupy.cuda.Device().synchronize()
except cupy.cuda.runtime.CUDARuntimeError as error:
    assert error.status == 716, error
else:
    raise SystemExit("no error")
""",
}


@pytest.mark.parametrize("script", PROCESSES.values(), ids=PROCESSES)
def test_what_ends_a_context_is_done_in_a_process_of_its_own(script: str) -> None:
    """The documentation of cudaHostUnregister promises no wait."""
    lab.in_a_process(script)
