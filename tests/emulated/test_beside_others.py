"""A pool beside others that use the GPU: captures that it does not end, contexts that are not its own, streams of its
own priority, memory that is nobody else's."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import BlockLayout, KVCacheManager, MemoryOptions, PagedKV, gather_kv
from kvpool.common.jit import cache
from kvpool.device.base import Stream
from kvpool.device.cuda import CudaDevice, calibration, describe_gpus, launcher, native
from kvpool.device.cuda import cuda_device as cuda
from kvpool.device.cuda.calibration import Calibration, Measurement
from kvpool.device.cuda.launcher import CudaLauncher
from kvpool.device.launches import SIZES
from kvpool.device.work import Fragments
from kvpool.tools.replay import Replay, ReplayConfig, Request, Summary, Trace
from tests.device.pools import make_pools, on_device
from tests.emulated import lab
from tests.emulated.lab import ROOT, Driver
from tests.emulated.test_capture_and_batches import Capturing

pytestmark = pytest.mark.gpu
LAYOUT = BlockLayout(2, 2, 16, 4)
MODES = [lab.GLOBAL, lab.THREAD_LOCAL, lab.RELAXED]


def serve(cache: KVCacheManager, stream: Any = None, rounds: int = 4) -> None:
    """Fill the pool several times, so that blocks go to the host and come back."""
    for number in (*range(rounds), *range(rounds)):
        sequence = cache.add_sequence(list(range(100 * number, 100 * number + 16)), stream=stream)
        cache.commit(sequence)
        cache.release(sequence)


# Captures


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_pool_closes_while_a_stream_is_captured_and_gives_everything_back(
    driver: Driver, mode: int, known: bool
) -> None:
    before = driver.in_use()
    cache = KVCacheManager(LAYOUT, device_blocks=6, host_blocks=40, device="cuda", max_sequences=4)
    stream = Stream(driver.stream())
    serve(cache, stream)
    capture = Capturing(driver, mode)
    if known:
        driver.cuStreamBeginCapture_v2(stream.handle, mode)
    cache.close()
    del cache
    status, graph = capture.end()
    assert status == lab.SUCCESS and graph
    if known:
        driver.cuStreamEndCapture(stream.handle, ctypes.byref(ctypes.c_size_t()))
    driver.cuStreamDestroy_v2(stream.handle)
    driver.cuStreamDestroy_v2(capture.stream)
    assert driver.in_use() == before


@pytest.mark.parametrize("mode", MODES)
def test_a_pool_whose_stream_was_destroyed_closes_while_another_is_captured(driver: Driver, mode: int) -> None:
    """What the pool enqueued on that stream is over then. It waits for no whole GPU, which would end the capture."""
    before = driver.in_use()
    cache = KVCacheManager(LAYOUT, device_blocks=6, host_blocks=4, device="cuda", max_sequences=4)
    table, stream = on_device(cache.core.device, np.zeros((4, 8), np.int32)), Stream(driver.stream())
    sequence = cache.add_sequence(list(range(9)), stream=stream)
    driver.hold(stream.handle)
    cache.tables.copy_batch_block_offsets(table, [sequence], stream=stream)
    address = table.data.ptr
    driver.cuStreamDestroy_v2(stream.handle)
    capture = Capturing(driver, mode)
    with driver.counting("cuCtxSynchronize") as whole:
        cache.close()
    assert whole["cuCtxSynchronize"] == 0
    assert capture.end()[0] == lab.SUCCESS
    copied = (ctypes.c_int32 * 3)()
    driver.cuMemcpyDtoH_v2(copied, address, 12)
    assert min(copied) >= 0 and len(set(copied)) == 3, "the table was written before the pool let go of what it reads"
    driver.cuStreamDestroy_v2(capture.stream)
    del cache, table
    assert driver.in_use() == before


def test_work_on_a_stream_that_was_destroyed_is_over_before_memory_is_given_back(driver: Driver) -> None:
    """Even where nobody recorded an event after it."""
    device, stream = CudaDevice(calibration="plain"), Stream(driver.stream())
    pools = make_pools(device, LAYOUT)
    pools.flat("device")[:] = 5
    device.synchronize()
    driver.hold(stream.handle)
    device.copy_blocks(np.array([[0, 6, 4, 0]]), stream)
    host = pools.flat("host")
    driver.cuStreamDestroy_v2(stream.handle)
    with driver.counting("cuCtxSynchronize") as whole:
        device.synchronize()
    assert whole["cuCtxSynchronize"] == 0 and (host[: LAYOUT.block_bytes] == 5).all()
    pools.close()
    device.close()


def paged() -> PagedKV:
    """A cache of one layer whose bytes are the numbers of its slots."""
    import cupy

    memory = cupy.zeros((2, 1, 4, 4, 1, 8), np.uint8)
    memory[...] = cupy.arange(16, dtype=np.uint8).reshape(1, 1, 4, 4, 1, 1)
    cupy.cuda.Device().synchronize()
    return PagedKV.of(memory, "| P L B T H D")


def test_slots_of_the_host_are_refused_on_a_stream_that_is_captured_and_nothing_breaks(driver: Driver) -> None:
    import cupy

    cache, slots, out = paged(), np.array([3, 1, 15]), cupy.zeros((2, 1, 3, 8), np.uint8)
    capture = Capturing(driver)
    with pytest.raises(ValueError, match="expected one that is not being captured"):
        gather_kv(cache, slots, out, stream=capture.stream)
    assert capture.end()[0] == lab.SUCCESS
    with pytest.raises(ValueError, match="per-thread"):
        gather_kv(cache, slots, out, stream=2)
    for _ in range(70):  # more than uploads that may be under way
        gather_kv(cache, slots, out, stream=capture.stream)
    cupy.cuda.Device().synchronize()
    assert out[0, 0, :, 0].get().tolist() == [3, 1, 15]


def test_slots_of_the_gpu_are_captured_and_replayed_with_others(driver: Driver) -> None:
    import cupy

    cache = paged()
    slots, out, stream = cupy.array([3, 1, 15]), cupy.zeros((2, 1, 3, 8), np.uint8), cupy.cuda.Stream(non_blocking=True)
    gather_kv(cache, slots, out, stream=stream)
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    gather_kv(cache, slots, out, stream=stream)
    graph = stream.end_capture()
    for wanted in ([5, 6, 7], [0, 9, -1]):
        slots.set(np.array(wanted))
        out.fill(77)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert out[0, 0, :, 0].get().tolist() == [77 if slot < 0 else slot for slot in wanted]


# Contexts and default streams


def test_a_pool_is_used_by_a_thread_whose_context_is_another_one_of_the_same_gpu(driver: Driver) -> None:
    with KVCacheManager(LAYOUT, device_blocks=6, host_blocks=40, device="cuda", max_sequences=4) as cache:
        stream, context = Stream(driver.stream()), ctypes.c_size_t()
        serve(cache, stream)
        driver.cuCtxCreate_v4(ctypes.byref(context), None, 0, 0)
        try:
            serve(cache, stream)
            cache.verify()
            assert driver.made("cuCtxGetCurrent") == context.value, "the thread has its context again"
        finally:
            driver.cuCtxDestroy_v2(context.value)


DEFAULT = """
from engine import small_layout
from kvpool import KVCacheManager
from steps import arrays
from tests.device.pools import on_device
from tests.emulated import lab
driver = lab.driver()
with KVCacheManager(small_layout(2), device_blocks=20, device="cuda", max_sequences=4) as cache:
    sequence = cache.add_sequence([1, 2, 3])
    out = arrays(1, 3, 3, 3, put=lambda values: on_device(cache.core.device, values))
    before = driver.counter("streams")
    cache.tables.copy_step_tables(out, sequence)
    cache.core.device.synchronize()
    assert out.seq_lens.get().tolist() == [3]
    assert driver.counter("streams") == before, "a default stream of the thread came to be"
    cache.release(sequence)
"""


def test_the_default_stream_is_the_legacy_one_whatever_numbas_setting() -> None:
    """By Numba's variable, or that of the bindings that it uses."""
    variable = "CUDA_PER_THREAD_DEFAULT_STREAM"
    settings = {f"NUMBA_{variable}": "1", f"CUDA_PYTHON_{variable}": "1"}
    places = f"{ROOT}/tests:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, **settings, "PYTHONPATH": places}
    done = subprocess.run([sys.executable, "-c", DEFAULT], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Streams, copies, memory


def priority(driver: Driver, stream: Stream) -> int:
    value = ctypes.c_int()
    driver.cuStreamGetPriority(stream.handle, ctypes.byref(value))
    return value.value


def test_loads_go_before_saves_and_by_how_much_are_settings(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lower number is a higher priority. What no device accepts is refused when the device is made."""

    def priorities() -> tuple[int, int]:
        device = CudaDevice()
        priorities = [priority(driver, device.create_stream("any", urgent)) for urgent in (True, False)]
        device.close()
        return priorities[0], priorities[1]

    assert priorities() == (-5, 0), "the highest and the lowest"
    monkeypatch.setenv("KVPOOL_LOAD_PRIORITY", "-2")
    monkeypatch.setenv("KVPOOL_SAVE_PRIORITY", "-1")
    assert priorities() == (-2, -1)
    for name, wrong in product(("LOAD_PRIORITY", "SAVE_PRIORITY", "BATCH_FRAGMENTS"), ("high", "-1000", "99999999999")):
        monkeypatch.setenv(f"KVPOOL_{name}", wrong)
        with pytest.raises(ValueError, match=f"KVPOOL_{name}: expected a number from.*got '{wrong}'"):
            CudaDevice()
        monkeypatch.delenv(f"KVPOOL_{name}")


CALLS = {"plain": {"launches": 0, "batches": 0}, "batched": {"launches": 0, "batches": 1}}
CALLS["kernel"] = {"launches": 1, "batches": 0}


@pytest.mark.parametrize("best", CALLS)
@pytest.mark.parametrize("direction", ["offload", "onboard"])
def test_fragments_are_copied_in_the_way_that_was_measured(
    driver: Driver, best: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What engines copy between their own memory and the host. The other direction was measured otherwise."""
    monkeypatch.setenv("KVPOOL_COPY_KERNELS", "kernel")
    other = {"plain": "batched", "batched": "kernel", "kernel": "plain"}
    ways = {direction: best, {"offload": "onboard", "onboard": "offload"}[direction]: other[best]}
    rows = tuple(
        Measurement(path, 64, 16, way, 2.0 if way == fast else 1.0) for path, fast in ways.items() for way in CALLS
    )
    device = CudaDevice(calibration=Calibration("any", 0, rows))
    pools, stream = make_pools(device, LAYOUT), device.create_stream("engine")
    ends = [pools.flat("device").data.ptr, pools.flat("host").ctypes.data]
    source, target = ends if direction == "offload" else reversed(ends)
    places, sizes = 64 * np.arange(16), 1 + np.arange(16)
    before = pools.flat("device").get(), pools.flat("host").copy()
    with driver.counting(*CALLS[best]) as grown:
        device.enqueue(Fragments(np.stack([source + places, target + places, sizes], axis=1)), stream)
    assert grown == CALLS[best]
    device.synchronize()
    written, read = (1, 0) if direction == "offload" else (0, 1)
    for place, size in zip(places, sizes, strict=True):
        before[written][place : place + size] = before[read][place : place + size]
    np.testing.assert_array_equal(pools.flat("device").get(), before[0])
    np.testing.assert_array_equal(pools.flat("host"), before[1])
    device.close()


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for results of tests, with none in it. This process has none either."""
    monkeypatch.setattr(cuda, "_tested", {})

    def there(call: Callable[..., Any]) -> Callable[..., Any]:
        """Compiled code stays where it is."""

        def called(*arguments: Any) -> Any:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(cache, "cache_root", lambda: tmp_path)
                patched.setattr(cache, "_read_folders", lambda: [tmp_path])
                return call(*arguments)

        return called

    for call in (cuda.has_passed, cuda.keep_pass):
        monkeypatch.setattr(cuda, call.__name__, there(call))
    return tmp_path


def loaded() -> tuple[str, ...]:
    """The kernels that a pool of a new device may use."""
    device = CudaDevice()
    make_pools(device, LAYOUT).close()
    device.close()
    return device._loaded


def test_no_kernel_is_chosen_that_nobody_asked_for_and_that_has_passed_no_test(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = np.stack([np.arange(4), 6 + np.arange(4), np.full(4, 4), np.zeros(4, int)], axis=1)
    many = tuple(Measurement(direction, 64, 16, "kernel", 99.0) for direction in ("offload", "onboard", "within"))
    calibration = Calibration("any", 0, (*many, Measurement("offload", 64, 16, "plain", 1.0)))

    def launches(measured: Any = calibration) -> int:
        device = CudaDevice(calibration=measured)
        pools, stream = make_pools(device, LAYOUT), device.create_stream("engine")
        with driver.counting("launches") as grown:
            device.copy_blocks(moves, stream)
        device.synchronize()
        pools.close()
        device.close()
        return grown["launches"]

    assert launches() == 1, "both have passed the test"
    monkeypatch.setattr(cuda, "_TESTED_FROM", (9, 1))
    assert launches() == 0
    assert launches("kernel") == 1, "a name asks for it"
    monkeypatch.setenv("KVPOOL_COPY_KERNELS", "kernel")
    assert launches() == 1
    monkeypatch.undo()
    monkeypatch.setenv("KVPOOL_COPY_KERNELS", "none")
    assert launches() == 0
    monkeypatch.setenv("KVPOOL_COPY_KERNELS", "warp,kernel")
    with pytest.raises(ValueError, match="KVPOOL_COPY_KERNELS: expected .*got 'warp,kernel'"):
        CudaDevice()


@pytest.mark.parametrize("path", ["kernel", "bulk"])
def test_a_kernel_that_copies_other_bytes_on_this_gpu_is_not_used_and_says_so_once(
    driver: Driver, untested: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A launch is refused, or one of many is left out. The other kernel stays in use."""
    launch, other = CudaLauncher.copy_blocks, {"kernel": "bulk", "bulk": "kernel"}[path]

    def lose_one(launcher: CudaLauncher, cutter: Any, copy_ops: Any, bulk: bool, *how: Any) -> bool:
        return launch(launcher, cutter, copy_ops[1:] if bulk == (path == "bulk") else copy_ops, bulk, *how)

    monkeypatch.setattr(CudaLauncher, "copy_blocks", lose_one)
    before = driver.in_use()
    device = CudaDevice(calibration=path)  # It is requested by name.
    with pytest.warns(UserWarning, match=f"the path '{path}' is not used on GPU 0: .* of blocks gave other bytes"):
        make_pools(device, LAYOUT).close()
    assert device._loaded == (other,)
    make_pools(device, LAYOUT).close()
    device.close()
    assert driver.in_use() == before
    assert len(list(untested.iterdir())) == 1, "that of the other kernel"
    (untested / next(untested.iterdir()).name).unlink()
    cuda._tested.clear()
    with driver.failing("launch", lab.INVALID), pytest.warns(UserWarning, match="is not used") as caught:
        device = CudaDevice()
        make_pools(device, LAYOUT).close()
        assert device._loaded == () and len(caught) == 2
    device.close()
    assert driver.in_use() == before


@pytest.mark.parametrize(("path", "kernel"), [("kernel", "copy_fragments"), ("bulk", "bulk_fragments")])
def test_the_test_of_a_kernel_launches_it_for_blocks_and_fragments_in_every_direction(
    driver: Driver, untested: Path, monkeypatch: pytest.MonkeyPatch, path: str, kernel: str
) -> None:
    launches, handles, sizes = list[tuple[int, bool]](), dict[int, str](), set[str]()
    compiled, find_functions = CudaLauncher._compile, native.find_functions
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 11)
    kept: list[Any] = []

    def named(launcher: CudaLauncher, source: str, name: str) -> Any:
        made = compiled(launcher, source, name)
        handles[made[1]] = name
        return made

    def noting(*arguments: Any) -> np.ndarray:
        """The functions of the driver, of which that of a launch notes the stream, and whether another one is busy."""
        functions = find_functions(*arguments)
        launch = kind(int(functions[native.LAUNCH]))

        def noted(*of_launch: int) -> int:
            name, stream = handles.get(of_launch[0], ""), of_launch[8]
            if name.startswith(kernel):
                sizes.add(name)
                others = {other for other, _ in launches} - {stream}
                busy = any(driver.library.emu_pending(ctypes.c_void_p(other)) for other in others)
                launches.append((stream, busy))
            return int(launch(*of_launch))

        kept.append(kind(noted))
        functions[native.LAUNCH] = ctypes.cast(kept[-1], ctypes.c_void_p).value
        return functions

    monkeypatch.setattr(CudaLauncher, "_compile", named)
    monkeypatch.setattr(native, "find_functions", noting)
    assert cuda.wrong_bytes(describe_gpus()[0], path) == ""
    (first, _), *_ = launches
    kinds = 2 * 3  # blocks and fragments, three directions
    assert launches.count((first, False)) >= kinds
    assert sum(busy for stream, busy in launches if stream != first) >= kinds, "beside copies on the first stream"
    assert sizes == {kernel + size for size in SIZES}, "with rows in a table, and in arguments"


def test_a_kernel_whose_code_is_wrong_is_not_used(
    driver: Driver, untested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forgets the last words of a piece: seen in long fragments only. Bulk copies leave crooked fragments to it."""
    source = launcher.kernel_source

    def wrong(name: str, kernel: str) -> str:
        right = source(name, kernel)
        before = "if (first + i * WARP < all) store"
        assert (before in right) == kernel.startswith("copy_fragments")
        return right.replace(before, "if (i + 1 < IN_FLIGHT && first + i * WARP < all) store")

    monkeypatch.setattr(launcher, "kernel_source", wrong)
    with pytest.warns(UserWarning, match="not used on GPU 0: offload of fragments gave other bytes") as caught:
        assert loaded() == loaded() == () and len(caught) == 2 and not list(untested.iterdir())
    monkeypatch.setenv("KVPOOL_SELF_TEST", "0")
    assert loaded() == ("bulk", "kernel"), "without a test"


def test_a_test_that_was_passed_is_not_repeated_by_another_process_unless_something_has_changed(
    driver: Driver, untested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    tests, difference = list[str](), cuda.difference
    monkeypatch.setattr(cuda, "difference", lambda device, path: tests.append(path) or difference(device, path))

    def tested() -> list[str]:
        """The kernels that a new process tests."""
        tests.clear()
        cuda._tested.clear()
        assert loaded() == ("bulk", "kernel")
        return sorted(tests)

    both = ["bulk", "kernel"]
    assert (tested(), tested()) == (both, [])
    for file in untested.iterdir():
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert (tested(), tested()) == (both, []), "damaged files are replaced"
    (first, *_), gpus = sorted(untested.iterdir()), cuda.gpus
    first.chmod(0o666)
    assert len(tested()) == 1 and stat.S_IMODE(first.stat().st_mode) == 0o600, "others could write it"
    for name, other in {"driver": 1, "name": "other", "multiprocessors": 1, "link": "x4", "compiler": "1.0"}.items():
        changed = [gpu._replace(**{name: other}) for gpu in gpus(cupy.cuda)]
        monkeypatch.setattr(cuda, "gpus", lambda module, changed=changed: changed)
        assert (tested(), tested()) == (both, []), name
    monkeypatch.setattr(cuda, "gpus", gpus)
    assert tested() == []
    monkeypatch.setattr(calibration, "_ROW_BUILDERS", calibration._ROW_BUILDERS[:1])
    assert tested() == both, "other code writes the rows"
    shutil.rmtree(untested)
    assert (tested(), tested()) == (both, both), "nothing can be kept"


def test_memory_for_other_processes_shares_its_pages_with_nobody(driver: Driver) -> None:
    """A handle opens whole pieces of 2 MiB, which the driver may give to several small allocations."""
    with KVCacheManager(LAYOUT, device_blocks=6, device="cuda") as cache:
        base, nbytes = ctypes.c_size_t(), ctypes.c_size_t()
        driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), cache.memory.device_pool.data.ptr)
        assert nbytes.value % (2 << 20) == 0
        whole = (ctypes.c_uint8 * nbytes.value)()
        driver.cuMemcpyDtoH_v2(whole, base.value, nbytes.value)
        assert not any(whole), "nothing of what this process had there before"


def test_memory_of_the_caller_is_used_once_what_was_enqueued_on_it_is_done(driver: Driver) -> None:
    import cupy

    memory, stream = cupy.empty(LAYOUT.block_bytes * 6, np.uint8), cupy.cuda.Stream(non_blocking=True)
    with stream:
        memory.fill(7)
    with KVCacheManager(LAYOUT, device_blocks=6, device="cuda", memory=MemoryOptions(device_memory=memory)):
        assert driver.library.emu_pending(ctypes.c_void_p(stream.ptr)) == 0


def test_a_forked_child_gets_no_copy_of_pinned_pages(driver: Driver) -> None:
    """A page that both processes have is copied at the next write, and the driver would keep the other copy."""
    with KVCacheManager(LAYOUT, device_blocks=2, host_blocks=40, device="cuda") as cache:
        address, flags, inside = cache.memory.host_pool.ctypes.data, "", False
        with open("/proc/self/smaps", encoding="ascii") as smaps:
            for line in smaps:
                first, dash, rest = line.split()[0].partition("-")
                if dash and rest and not first.endswith(":"):
                    inside = int(first, 16) <= address < int(rest, 16)
                elif inside and line.startswith("VmFlags:"):
                    flags = line
        assert "dc" in flags.split()[1:], flags


def test_work_after_the_last_event_of_a_stream_is_waited_for_however_many_streams_came_since(driver: Driver) -> None:
    device = CudaDevice()
    pools, stream = make_pools(device, LAYOUT), Stream(driver.stream())
    device.synchronize(device.record(stream))
    driver.hold(stream.handle)
    device.copy_blocks(np.array([[0, 6, 4, 0]]), stream)
    others = [Stream(driver.stream()) for _ in range(80)]
    for other in others:
        device.record(other)
    device.synchronize()
    assert driver.library.emu_pending(ctypes.c_void_p(stream.handle)) == 0
    del pools
    device.close()
    for other_stream in (stream, *others):
        driver.cuStreamDestroy_v2(other_stream.handle)


def test_pools_on_two_gpus_serve_two_threads_with_every_byte_right(driver: Driver) -> None:
    """Blocks go to the host and come back, on each GPU in an order of its own."""
    import cupy

    prompts = [np.arange(64 * (i % 6), 64 * (i % 6) + 40 + i, dtype=np.int32) for i in range(24)]
    requests = [Request(i, i + 1, len(tokens), 3, tokens=tokens) for i, tokens in enumerate(prompts)]
    config = ReplayConfig(BlockLayout.of_block_bytes(256, 4), 40, 60, active=2, verify=True, device="cuda")
    served: dict[int, Summary] = {}

    def serve_on(index: int) -> None:
        cupy.cuda.Device(index).use()
        with Replay(Trace("made", "native", requests), config) as replay:
            assert replay.cache.memory.device_pool.device.id == index
            served[index] = replay.run()

    threads = [threading.Thread(target=serve_on, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    for index in (0, 1):
        summary = served[index]
        assert summary.failure is None and summary.requests == len(requests)
        assert summary.verified and min(summary.verified.onboarded_blocks, summary.verified.offloaded_blocks) > 0


def test_the_thread_blocks_of_copies_over_the_link_are_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    thread_blocks = []
    for setting in ("3", "0"):
        monkeypatch.setenv("KVPOOL_COPY_THREAD_BLOCKS", setting)
        device = CudaDevice(calibration="kernel")
        thread_blocks.append(device._launcher.grid.thread_blocks(1000, host=True))
        device.close()
    assert thread_blocks == [3, 8]
