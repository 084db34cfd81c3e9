"""What the cuda device adds to the contract, on a CuPy without a GPU: paths, streams, errors, and that everything is given back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvpool import KVCacheManager
from kvpool.device import cuda
from kvpool.device.base import NULL_STREAM, Region, Stream
from kvpool.device.calibration import PATHS
from kvpool.device.cuda import CudaDevice
from kvpool.device.cuda_batch import find_batch
from kvpool.device.cuda_calls import STICKY
from kvpool.device.sim import SimDevice
from kvpool.errors import DeviceError, InsufficientMemory, PoolClosed
from kvpool.layout import BlockLayout
from kvpool.memory import MemoryPools
from tests.device.fake_cupy import INVALID, NOT_READY, OUT_OF_MEMORY, FakeCupy
from tests.device.pools import DEVICE_BLOCKS, as_moves, assert_same_as_reference, images, make_pools

Fake = Callable[..., FakeCupy]
LAYOUT = BlockLayout(2, 2, 16, 4)
OFFLOADS = as_moves(*((block, DEVICE_BLOCKS + block, 4) for block in (0, 2, 4)))


def status(cupy: FakeCupy, call: str, value: int) -> None:
    cupy.runtime.fails[call] = value


# Paths


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_asked_for_is_taken(fake_cuda: Fake, path: str) -> None:
    cupy = fake_cuda()
    device = CudaDevice(calibration=path)
    pools, stream = make_pools(device, LAYOUT), device.create_stream("copies")
    expected = images(pools)
    cupy.runtime.calls.clear()
    device.copy_blocks(OFFLOADS, stream)
    device.synchronize()
    fragments = 3 * LAYOUT.layers * LAYOUT.planes
    assert cupy.batched == ([fragments] if path == "batched" else [])
    assert len(cupy.launched) == (path == "kernel")
    assert cupy.runtime.calls.count("memcpyAsync") == (0 if path == "kernel" else fragments)
    for block in (0, 2, 4):
        np.testing.assert_array_equal(pools.host_pool[block], expected[0][:, :, block])
    device.close()


def test_the_null_stream_takes_no_batches_and_an_old_driver_has_none(fake_cuda: Fake) -> None:
    cupy = fake_cuda()
    device = CudaDevice(calibration="batched")
    assert_same_as_reference(make_pools(device, LAYOUT), OFFLOADS)
    assert not cupy.batched
    device.close()
    fake_cuda(batches=False)
    device = CudaDevice(calibration="batched")
    pools = make_pools(device, LAYOUT)
    assert_same_as_reference(pools, OFFLOADS)
    device.copy_blocks(OFFLOADS, device.create_stream("copies"))
    device.close()


def test_a_machine_whose_pinned_memory_has_other_addresses_takes_plain_copies_only(fake_cuda: Fake) -> None:
    cupy = fake_cuda()
    cupy.runtime.attributes["same addresses"] = 0
    for path in PATHS:
        device = CudaDevice(calibration=path)
        make_pools(device, LAYOUT)
        device.copy_blocks(OFFLOADS, device.create_stream("copies"))
        device.close()
    assert not cupy.batched and not cupy.launched


def test_no_driver_and_a_driver_without_the_function_have_no_batches() -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    assert find_batch(missing) is None
    assert find_batch(lambda name: object()) is None
    assert find_batch(FakeCupy(batches=False).library) is None


def test_the_environment_chooses_a_path_and_is_checked(fake_cuda: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cuda()
    monkeypatch.setenv(cuda.COPY_PATH, "kernel")
    device = CudaDevice()
    assert_same_as_reference(make_pools(device, LAYOUT), OFFLOADS)
    assert cupy.launched
    device.close()
    monkeypatch.setenv(cuda.COPY_PATH, "teleport")
    with pytest.raises(ValueError, match="path='teleport'"):
        CudaDevice()


def test_kernels_that_pile_up_are_replaced_by_copies_and_nothing_waits(fake_cuda: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.device.cuda_launch._DEPTH", 3)
    cupy = fake_cuda()
    device = CudaDevice(calibration="kernel")
    pools, stream = make_pools(device, LAYOUT), device.create_stream("copies")
    cupy.runtime.stalled.add(stream.handle)
    cupy.runtime.calls.clear()
    for _ in range(10):
        device.copy_blocks(OFFLOADS, stream)
    assert "eventSynchronize" not in cupy.runtime.calls
    assert device._launcher.retained == len(cupy.launched) == 3
    cupy.runtime.stalled.clear()
    assert_same_as_reference(pools, OFFLOADS)
    device.close()


def test_each_launch_has_moves_of_its_own_until_it_is_done(fake_cuda: Fake) -> None:
    cupy = fake_cuda()
    device = CudaDevice(calibration="kernel")
    pools, stream = make_pools(device, LAYOUT), device.create_stream("copies")
    expected = images(pools)
    cupy.runtime.stalled.add(stream.handle)
    for block in range(4):
        device.copy_blocks(as_moves((block, DEVICE_BLOCKS + block, 4)), stream)
    cupy.runtime.stalled.clear()
    device.synchronize()
    for block in range(4):
        np.testing.assert_array_equal(pools.host_pool[block], expected[0][:, :, block])
    assert device._launcher.retained <= 1
    device.close()


def test_uploads_wait_for_the_oldest_when_too_many_are_under_way(fake_cuda: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.device.cuda_launch._DEPTH", 2)
    cupy = fake_cuda()
    launcher, table = cuda.launcher(), np.arange(10)
    monkeypatch.setattr(cupy.runtime, "eventQuery", lambda event: 0 if cupy.runtime.events[event].done else NOT_READY)  # type: ignore[union-attr]
    addresses = {launcher.upload(table + i, 0) for i in range(20)}
    assert len(addresses) == 2 and cupy.runtime.calls.count("eventSynchronize") == 18
    launcher.close()
    assert not cupy.runtime.registered


# Streams and events


def test_the_legacy_stream_has_one_name_and_the_per_thread_stream_none(fake_cuda: Fake) -> None:
    fake_cuda()
    device = CudaDevice()
    assert device.as_stream(None) is device.as_stream(1) is device.as_stream(Stream(1)) is NULL_STREAM
    assert device.as_stream(0) == NULL_STREAM
    with pytest.raises(ValueError, match="stream: the per-thread default stream"):
        device.as_stream(2)
    device.close()


def test_events_are_used_again_once_nobody_has_them(fake_cuda: Fake) -> None:
    cupy = fake_cuda()
    device = CudaDevice()
    stream = device.create_stream("copies")
    for _ in range(50):
        device.wait(NULL_STREAM, device.record(stream))
        gc.collect()
    assert cupy.runtime.calls.count("eventCreateWithFlags") == 1
    kept = [device.record(stream) for _ in range(3)]
    assert len({event.handle for event in kept}) == 3  # type: ignore[attr-defined]
    device.close()
    del kept


def test_a_complete_event_costs_no_call(fake_cuda: Fake) -> None:
    cupy = fake_cuda()
    device = CudaDevice()
    event = device.record(NULL_STREAM)
    assert not device.query(event)
    device.synchronize(event)
    cupy.runtime.calls.clear()
    assert device.query(event)
    device.wait(NULL_STREAM, event)
    device.synchronize(event)
    assert not cupy.runtime.calls
    device.close()


def test_events_of_another_device_are_refused(fake_cuda: Fake) -> None:
    fake_cuda()
    device, other, sim = CudaDevice(), CudaDevice(), SimDevice()
    for foreign in (other.record(NULL_STREAM), sim.record(NULL_STREAM), None, 5):
        with pytest.raises(TypeError, match="event="):
            device.query(foreign)  # type: ignore[arg-type]
    for one in (device, other, sim):
        one.close()


def test_a_thread_keeps_its_own_gpu_current(fake_cuda: Fake) -> None:
    cupy = fake_cuda()
    device = CudaDevice(1)
    assert_same_as_reference(make_pools(device, LAYOUT), OFFLOADS)
    thread = threading.Thread(target=lambda: device.query(device.record(NULL_STREAM)))
    thread.start()
    thread.join()
    assert cupy.runtime.current == 0
    device.close()
    with pytest.raises(ValueError, match="index=2"):
        CudaDevice(2)


# Errors


@pytest.mark.parametrize(("value", "sticky"), [(INVALID, False), (400, False), (700, True), (719, True), (999, True)])
@pytest.mark.parametrize("call", ["memcpyAsync", "eventRecord", "streamWaitEvent", "eventQuery", "eventSynchronize", "launchKernel"])
def test_errors_of_the_runtime_say_what_failed_and_whether_it_will_go_away(fake_cuda: Fake, call: str, value: int, sticky: bool) -> None:
    cupy = fake_cuda()
    device = CudaDevice(calibration="kernel" if call == "launchKernel" else "batched")
    pools, stream = make_pools(device, LAYOUT), device.create_stream("copies")
    event = device.record(stream)
    attempts = {"eventRecord": lambda: device.record(stream), "streamWaitEvent": lambda: device.wait(stream, event)}
    attempts |= {"eventQuery": lambda: device.query(event), "eventSynchronize": lambda: device.synchronize(event)}
    status(cupy, call, value)
    with pytest.raises(DeviceError, match=f"status {value}") as caught:
        attempts.get(call, lambda: device.copy_blocks(OFFLOADS, stream))()
    assert (caught.value.sticky, caught.value.completed) == (sticky, 0)
    cupy.runtime.fails.clear()
    assert_same_as_reference(pools, OFFLOADS)
    device.close()


def test_the_errors_that_do_not_go_away_are_those_that_the_runtime_documents() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed; it documents every error")
    documented = {error.value for error in runtime.cudaError_t if "relaunched" in (error.__doc__ or "")}
    if not documented:
        pytest.skip("this version of cuda-bindings does not document errors")
    known = {error.value for error in runtime.cudaError_t}
    assert documented <= STICKY and known >= STICKY
    assert not STICKY & {0, INVALID, OUT_OF_MEMORY, NOT_READY, 400, 801}


def test_memory_that_is_not_there_is_a_memory_error_and_nothing_stays(fake_cuda: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cuda()
    device = CudaDevice()
    with pytest.raises(MemoryError):
        device.allocate(1 << 40, "device")
    status(cupy, "hostRegister", OUT_OF_MEMORY)
    with pytest.raises(MemoryError, match="refused"):
        MemoryPools(device, LAYOUT, 2, 2)
    status(cupy, "hostRegister", 700)
    with pytest.raises(DeviceError) as caught:
        device.allocate(100, "host")
    assert caught.value.sticky
    cupy.runtime.fails.clear()
    gc.collect()
    assert not cupy.runtime.registered and not cupy.runtime.allocated
    device.close()


def test_a_copy_that_finds_no_memory_is_refused_and_goes_through_when_there_is_some(fake_cuda: Fake) -> None:
    cupy = fake_cuda()
    device = CudaDevice(calibration="kernel")
    pools = make_pools(device, LAYOUT)
    status(cupy, "hostRegister", OUT_OF_MEMORY)
    with pytest.raises(DeviceError, match="pinned 0 of") as caught:
        device.copy_blocks(OFFLOADS)
    assert not caught.value.sticky
    cupy.runtime.fails.clear()
    assert_same_as_reference(pools, OFFLOADS)
    device.close()


def test_a_pool_that_does_not_fit_leaves_nothing(fake_cuda: Fake) -> None:
    cupy = fake_cuda()
    with pytest.raises(InsufficientMemory, match="device tier asks for"):
        KVCacheManager(LAYOUT, device_blocks=1 << 30, device="cuda")
    status(cupy, "hostRegister", INVALID)
    with pytest.raises(InsufficientMemory, match="host tier asks for .* the driver pinned 0 of"):
        KVCacheManager(LAYOUT, device_blocks=1, host_blocks=1, device="cuda")
    gc.collect()
    assert not cupy.runtime.allocated and not cupy.runtime.registered and list(cupy.runtime.streams) == [0]


def test_a_gpu_that_has_failed_for_good_can_be_closed(fake_cuda: Fake) -> None:
    cupy = fake_cuda()
    device = CudaDevice()
    make_pools(device, LAYOUT)
    for call in ("setDevice", "memGetInfo", "deviceSynchronize", "hostUnregister", "streamDestroy"):
        status(cupy, call, 700)
    device.close()
    with pytest.raises(PoolClosed):
        device.record(NULL_STREAM)


def test_closing_gives_everything_back(fake_cuda: Fake) -> None:
    cupy = fake_cuda()
    device = CudaDevice(calibration="kernel")
    pools = make_pools(device, LAYOUT)
    device.copy_blocks(OFFLOADS, device.create_stream("copies"))
    view = pools.device_pool
    device.close()
    gc.collect()
    assert not cupy.runtime.registered and list(cupy.runtime.streams) == [0] and len(cupy.runtime.allocated) == 1
    del view, pools
    gc.collect()
    assert not cupy.runtime.allocated and not cupy.runtime.events


def test_only_memory_of_this_device_is_bound(fake_cuda: Fake) -> None:
    fake_cuda()
    device = CudaDevice()
    on_device, on_host = device.allocate(LAYOUT.block_bytes, "device"), np.zeros(LAYOUT.block_bytes, np.uint8)
    with pytest.raises(ValueError, match="host_pool: what allocate gave"):
        device.bind([Region.of(LAYOUT, on_device, on_host, 1, 1)])
    with pytest.raises(ValueError, match="device_pool: .* device memory"):
        device.bind([Region.of(LAYOUT, on_host, on_host, 1, 1)])
    device.close()
