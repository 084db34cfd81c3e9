"""CudaDevice: the device tier on a GPU, the host tier in pinned memory. Copy engines and kernels copy. All calls go
through CuPy."""

from __future__ import annotations

import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Int64s, Uint8s
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.arrays.strided import StridedArray
from kvpool.device.base import (
    BOUND_ALREADY,
    NOT_BOUND,
    NULL_EVENT,
    NULL_STREAM,
    STAGING,
    Device,
    DeviceEvent,
    Stream,
    StreamGone,
)
from kvpool.device.copy_plan import make_plan
from kvpool.device.cuda import calibration as calibrations
from kvpool.device.cuda import native
from kvpool.device.cuda.calibration import BATCHED, BULK, KERNEL, KERNELS, PLAIN, Calibration
from kvpool.device.cuda.cuda_memory import (
    AdoptedMemory,
    CudaViews,
    PinnedMemory,
    PinnedRange,
    allocatable,
    check_adopted,
    open_memory,
    pinned_memory,
    zeroed_array,
)
from kvpool.device.cuda.cuda_streams import CudaEvent, UsedStreams
from kvpool.device.cuda.launcher import CudaLauncher
from kvpool.device.cuda.runtime import (
    GONE,
    CopySettings,
    Driver,
    Gpu,
    RuntimeCalls,
    captured_stream,
    find_batch,
    gpus,
    own_name,
    state_of,
    usable_stream,
)
from kvpool.device.cuda.trials import difference, has_passed, keep_pass, measure
from kvpool.device.fragments import (
    INSIDE_HOST,
    OFFLOAD,
    ONBOARD,
    WITHIN,
    Cutter,
    by_direction,
    load_cutting,
    measured,
    split,
)
from kvpool.device.launches import BULK_CAPABILITY, move_kernel, token_moves
from kvpool.device.memory.main_memory import GpuMemory, allocate_shared, available_ram, free_shared
from kvpool.device.regions import ALL_LAYERS, Layers, Part, Region, Regions
from kvpool.device.work import Fragments, StagedRows, StagedStep, StagedVectors, TokenMoves, Work
from kvpool.errors import DeviceError, PoolClosed

if TYPE_CHECKING:
    from types import ModuleType

    from kvpool.device.cuda.table_kernels import TableKernel

_INSTALL = 'pip install ".[cuda12]" or ".[cuda13]", by the CUDA version of the driver'
COPY_PATH = "KVPOOL_COPY_PATH"
_FRAGMENTS_AT_ONCE, _ROWS_AT_ONCE = 64, 1024


class _CutPool(NamedTuple):
    """The pool that the device is bound to. ``cutters[layers][region][part]`` is the cutter of some layers of a part of
    a region. ``hosts`` has a row for each host memory, as ``fragments.cut`` takes them."""

    regions: Regions
    cutters: dict[Layers, list[list[Cutter]]]
    hosts: Int64s


def _cupy() -> Any:
    """CuPy, on a machine where it can be used. Raises DeviceError, which says what is missing."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"the cuda device needs CuPy ({error}): {_INSTALL}") from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise DeviceError(f"the cuda device needs a working NVIDIA driver: {error}; {_INSTALL}") from error
    if count == 0:
        raise DeviceError("the cuda device needs an NVIDIA GPU, and the driver shows none")
    return cupy


def unusable() -> str | None:
    """Why there is no cuda device on this machine, or None if there is one."""
    try:
        _cupy()
    except DeviceError as error:
        return str(error)
    return None


def describe_gpus() -> list[Gpu]:
    """All GPUs that this process sees. Raises DeviceError."""
    return gpus(_cupy().cuda)


find_driver = lru_cache(maxsize=1)(Driver)
_launchers: dict[int, CudaLauncher] = {}
_launchers_lock = threading.Lock()


def _gpu_of(address: int) -> int:
    """The number of the GPU whose memory is at ``address``. Raises ValueError for memory of no GPU, DeviceError."""
    index = find_driver().gpu_of(address, _cupy().cuda.runtime.getDeviceCount())
    if index is None:
        raise ValueError(f"memory at {address:#x} is no memory of a GPU")
    return index


def launcher_at(address: int) -> CudaLauncher:
    """The launcher of kernels on the GPU whose memory is at ``address``, for memory that belongs to no pool.

    Raises DeviceError, and ValueError for memory of no GPU. Thread-safe.
    """
    cupy, index = _cupy(), _gpu_of(address)
    with _launchers_lock:
        if index not in _launchers:
            calls = RuntimeCalls(cupy.cuda.runtime, index, find_driver())
            _launchers[index] = CudaLauncher(cupy, calls)
        return _launchers[index]


def device_at(address: int) -> CudaDevice:
    """A device for the GPU whose memory is at ``address``. Raises ValueError for memory of no GPU, DeviceError."""
    return CudaDevice(_gpu_of(address))


_tested: dict[tuple[Gpu, str], str] = {}
_testing = threading.RLock()
_TESTED_FROM = (7, 5)
"""The first compute capability whose machine code of the kernels is examined."""


def wrong_bytes(gpu: Gpu, path: str) -> str:
    """What is wrong with the copies that the kernel of a path makes on a GPU; empty if it copies the right bytes. See
    ``trials.difference``. A process tests each kernel once, and warns of one that fails. A passed test is kept on disk,
    and not repeated.

    Raises DeviceError for a GPU that has failed for good.
    """
    with _testing:
        wrong = _tested.get((gpu, path))
        if wrong is None:
            wrong = "" if has_passed(gpu, path) else _wrong_bytes(gpu.number, path)
            if wrong:
                warnings.warn(f"the kernel of the path {path!r} is not used on GPU {gpu.number}: {wrong}", stacklevel=2)
            else:
                keep_pass(gpu, path)
            _tested[gpu, path] = wrong
        return wrong


def _wrong_bytes(index: int, path: str) -> str:
    device = CudaDevice(index, calibration=PLAIN)
    device.kernels, device.self_test = {path}, False
    try:
        return difference(device, path) or ""
    except (DeviceError, MemoryError) as error:
        if isinstance(error, DeviceError) and error.sticky:
            raise
        return str(error)
    finally:
        device.close()


def _version(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


def open_gpu_memory(memory: GpuMemory, nbytes: int) -> Any:
    """See ``cuda_memory.open_memory``. Raises DeviceError where there is no GPU to use."""
    return open_memory(_cupy(), find_driver(), memory, nbytes)


class CudaDevice(Device):
    """One GPU.

    Parameters
    ----------
    index
        The number of the GPU in CUDA. None is the current GPU of the calling thread.
    calibration
        How copies are made: a Calibration, or the name of one of ``calibration.PATHS``, which is then used wherever it
        is possible. With None, the environment variable ``COPY_PATH`` may have such a name. Without it, the device uses
        what ``calibrate`` has stored on this machine, and without that a rule. A kernel is used if it has copied the
        right bytes on this GPU: see ``wrong_bytes``.

    Streams 0 and 1 both mean CUDA's legacy default stream. The per-thread default stream (2) is refused: it is a
    different stream in every thread, and a pool enqueues for several threads. Raises DeviceError if there is no usable
    GPU.

    Attributes
    ----------
    crowded_copies
        Copies that copy engines made in place of a kernel, since ``launcher.PENDING_BYTES_MAX`` bytes of rows were
        unread.
    """

    name = "cuda"
    synchronous = False
    one_memory = False

    def __init__(self, index: int | None = None, *, calibration: Calibration | str | None = None) -> None:
        self.settings = CopySettings.read(KERNELS)
        self._cupy = _cupy()
        runtime = self._cupy.cuda.runtime
        count = runtime.getDeviceCount()
        self.index = int(runtime.getDevice()) if index is None else integer_argument("index", index, 0, count - 1)
        self._calls = RuntimeCalls(runtime, self.index, find_driver())
        with self._calls("cudaGetDeviceProperties"):
            self.gpu = gpus(self._cupy.cuda)[self.index]
        choice = calibration or os.environ.get(COPY_PATH)
        named = self.settings.copy_kernels
        default = KERNELS if _version(self.gpu.capability) >= _TESTED_FROM else ()
        self.kernels = {path for path in KERNELS if path == choice or path in (default if named is None else named)}
        self.self_test = bool(self.settings.self_test)
        self._launcher = CudaLauncher(self._cupy, self._calls, self.settings.copy_thread_blocks)
        self._events, self._buffers = self._launcher.events, self._launcher.buffers
        self._streams = UsedStreams(self._calls, self._events)
        self.calibration = calibrations.chosen(choice, self.gpu)
        self._batch = find_batch(self._calls.driver.library) if self._launcher.same_addresses else None
        self._engines = (PLAIN,) if self._batch is None else (PLAIN, BATCHED)
        self.crowded_copies = 0
        self._owned: dict[int, tuple[Any, PinnedRange | None]] = {}
        self._bound: _CutPool | None = None
        self._loaded: tuple[str, ...] = ()
        self._loaded_tables: dict[str, TableKernel] = {}
        self._closed = False
        self._memory_stream = self.create_stream("memory")
        # Weak, so that a closed device goes with its last reference.
        load = partial(CudaDevice._kernel, weakref.proxy(self))
        self.views = CudaViews(self._cupy, self._calls, self._owned, load)

    # -- memory ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, tier: str, shared: bool = False) -> Any:
        self._check_open()
        if tier == STAGING:
            return self._buffers.pinned(nbytes)
        if tier == "host":
            take = allocate_shared if shared else None
            return self._pin(partial(PinnedMemory, nbytes, self._calls, self._cupy.cuda, take=take))
        array = zeroed_array(self._cupy, self._calls, nbytes, self._memory_stream.handle)
        self._owned[id(array)] = array, None
        return array

    def _pin(self, make: Callable[..., PinnedRange]) -> Uint8s:
        memory = pinned_memory(self._calls, make, partial(self._streams.synchronize, closing=True))
        self._owned[id(memory.array)] = memory.array, memory
        return memory.array

    def adopt(self, memory: StridedArray, tier: str, pin: bool = False) -> Any:
        self._check_open()
        if pin and memory.address % mmap.PAGESIZE:
            raise ValueError(f"memory: expected memory from the start of a page, got {memory.address:#x}")
        if not pin:
            check_adopted(self._calls, memory, tier)
        if tier != "host":
            return self.views.array(memory)
        name = "tier" if pin else "host_memory"
        return self._pin(partial(AdoptedMemory, memory.host_view(), self._calls, name))

    def free(self, array: Any) -> None:
        if self._bound is not None and self._bound.regions.have(array):
            self._bound = None
        _, memory = self._owned.pop(id(array), (None, None))
        free_shared(array)
        if memory is not None:
            self._unless_broken("cudaHostUnregister", memory.free)

    def _unless_broken(self, what: str, call: Any) -> None:
        """Free something, unless the device has failed for good: then it cannot."""
        try:
            with self._calls(what, unsafe=True):
                call()
        except DeviceError as error:
            if not error.sticky:
                raise

    def available_bytes(self, tier: str) -> int | None:
        if tier == "host":
            return available_ram()
        with self._calls("cudaMemGetInfo") as runtime:
            return allocatable(int(runtime.memGetInfo()[0]))

    def bind(self, regions: Sequence[Region]) -> None:
        self._check_open()
        if self._bound is not None:
            raise ValueError(BOUND_ALREADY)
        bound_regions = Regions(regions)
        cutters = self._cut_layers(bound_regions, ALL_LAYERS)
        # Compiled now, since a decision that has been made cannot be enqueued without them.
        plans = [cutter.plan for of_region in cutters for cutter in of_region]
        for plan in plans:
            self._launcher.load(*move_kernel(plan))
        self._loaded = self._load_kernels()
        load_cutting([cutter for of_region in cutters for cutter in of_region])
        hosts = np.unique(np.concatenate([cutter.host for of_region in cutters for cutter in of_region]), axis=0)
        self._bound = _CutPool(bound_regions, {ALL_LAYERS: cutters}, hosts)
        # Of a kernel's copies a block is a row or a few. A driver takes about half a microsecond for a fragment.
        fragments = 1 if self._loaded else max(sum(cutter.plan.runs for cutter in of_region) for of_region in cutters)
        self.at_once = max(1, (_ROWS_AT_ONCE if self._loaded else _FRAGMENTS_AT_ONCE) // fragments)

    def _cut_layers(self, regions: Regions, layers: Layers) -> list[list[Cutter]]:
        return [[self._cutter(region, *part) for part in region.parts_of(layers)] for region in regions.all]

    def _cutter(self, region: Region, part: Part, layers: range) -> Cutter:
        _, memory = self._owned.get(id(part.host_pool), (None, None))
        if memory is None:
            raise ValueError("host_pool: what allocate or adopt gave for the host tier is needed")
        return Cutter(make_plan(*part, region.device_blocks, region.host_blocks, layers), memory.rows)

    # -- copies ----------------------------------------------------------------------------------

    def copy_blocks(self, copy_ops: Int64s, stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
        self._check_open()
        bound = self._pool()
        if layers not in bound.cutters:
            bound.cutters[layers] = self._cut_layers(bound.regions, layers)
        cutters = bound.cutters[layers]
        try:
            with self._streams.work(stream) as handle:
                for region, rows in bound.regions.split(copy_ops):
                    for cutter in cutters[region] if len(rows) else ():
                        self._copy(cutter, rows, handle)
        except MemoryError as error:
            raise DeviceError(str(error)) from error

    def _copy(self, cutter: Cutter, copy_ops: Int64s, stream: int) -> None:
        """Make the copy ops of each direction by the fastest path for this number and size of fragments."""
        count, nbytes, direction = cutter.about(copy_ops)
        if not direction:
            for _, some in by_direction(copy_ops, cutter.plan.device_blocks):
                self._copy(cutter, some, stream)
            return
        if cutter.in_words:
            self._copy_one_way(
                direction,
                nbytes,
                count,
                stream,
                partial(self._launcher.copy_blocks, cutter, copy_ops),
                lambda: cutter.cut(copy_ops),
            )
            return
        fragments = cutter.cut(copy_ops)
        kernel = partial(self._launcher.copy_fragments, fragments, None)
        self._copy_one_way(direction, nbytes, count, stream, kernel, lambda: fragments)

    def _copy_given(self, fragments: Int64s, bound: _CutPool, stream: int) -> None:
        """Copy fragments of the caller, which all go one way."""
        if not len(fragments):
            return
        nbytes, words, source, target = measured(fragments, bound.hosts)
        direction = OFFLOAD if target else ONBOARD if source else WITHIN
        kernel = partial(self._launcher.copy_fragments, fragments, words)
        cut = partial(split, fragments, bound.hosts)
        self._copy_one_way(direction, nbytes, len(fragments), stream, kernel, cut)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths that copies on a stream may take on this GPU. On the null stream, ``plain`` replaces the engines."""
        return self._engines + self._loaded

    def _copy_one_way(
        self,
        direction: str,
        nbytes: int,
        count: int,
        stream: int,
        kernel: Callable[[bool, bool, int], bool],
        cut: Callable[[], Int64s],
    ) -> None:
        """Make copies by the fastest path for this number of fragments and of bytes: ``kernel``, or the fragments of
        ``cut`` by copy engines. These copy too where too many rows are unread: to make room would wait for the device,
        which holds the transfer lock."""
        engines = self._engines if stream else (PLAIN,)
        choose = partial(self.calibration.choose, direction, nbytes // count, count)
        path = PLAIN if direction == INSIDE_HOST else choose(engines + self._loaded)
        if path in KERNELS:
            if kernel(path == BULK, direction != WITHIN, stream):
                return
            self.crowded_copies += 1
            path = choose(engines)
        self._copy_fragments(cut(), path, stream)

    def _load_kernels(self) -> tuple[str, ...]:
        """The paths of kernels that may be chosen. They are compiled."""
        usable = self.kernels if self._launcher.same_addresses else set()
        if _version(self.gpu.capability)[0] < BULK_CAPABILITY:
            usable = usable - {BULK}
        # Bytes that are not whole words always take the other kernel.
        if not usable or not self._launcher.try_load(*KERNELS[KERNEL]):
            return ()
        native.load()
        loaded = [path for path in sorted(usable) if self._launcher.try_load(*KERNELS[path])]
        return tuple(path for path in loaded if not (self.self_test and wrong_bytes(self.gpu, path)))

    def enqueue(self, work: Work, stream: Stream = NULL_STREAM, captured: bool = False) -> None:
        self._check_open()
        self._pool()
        if captured:
            # No event follows it: an event of a capture cannot be queried.
            self._enqueue(work, captured_stream(self._calls, stream))
            return
        with self._streams.work(stream) as handle:
            self._enqueue(work, handle)

    def upload(self, work: Work, stream: Stream) -> DeviceEvent:
        self._check_open()
        handle, event = self._streams.handle(stream), self._events.take()
        if not self._enqueue(work, handle, event.handle):
            self._events.record_again(event, handle)
        self._streams.note(handle, event)
        return event

    def _enqueue(self, work: Work, stream: int, event: int = 0) -> bool:
        """Enqueue work of any kind. Returns whether ``event`` was recorded behind it, in the same call."""
        if isinstance(work, StagedRows):
            launch = self._table_kernels.rows_launch(work)
            return self._kernel("stage_rows").launch(launch, stream, event)
        if isinstance(work, StagedStep):
            launch = self._table_kernels.step_launch(work)
            return self._kernel("step_tables").launch(launch, stream, event)
        if isinstance(work, StagedVectors):
            rows = [(work.address + first, vector.address, nbytes) for vector, first, nbytes in work.pieces]
            self._copy_fragments(np.array(rows, np.int64).reshape(-1, 3), PLAIN, stream)
        elif isinstance(work, Fragments):
            self._copy_given(work.rows, self._pool(), stream)
        elif isinstance(work, TokenMoves):
            bound, grid = self._pool(), self._launcher.grid
            by_region, cutters = work.by_region(bound.regions), bound.cutters[ALL_LAYERS]
            plans = [(cutter.plan, moves) for region, moves in by_region for cutter in cutters[region]]
            # All are made before the first is enqueued: if one cannot be made, nothing happens.
            for launch in [launch for plan, moves in plans for launch in token_moves(plan, moves, grid)]:
                self._launcher.launch(launch, stream)
        return False

    def _copy_fragments(self, fragments: Int64s, path: str, stream: int) -> None:
        """Copies by copy engines."""
        if path == BATCHED:
            assert self._batch is not None
            most = self.settings.batch_fragments
            with self._calls("cuMemcpyBatchAsync") as runtime:
                for first in range(0, len(fragments), most):
                    runtime.check_status(self._batch(fragments[first : first + most], stream))
            return
        with self._calls("cudaMemcpyAsync") as runtime:
            for source, target, size in fragments.tolist():
                runtime.memcpyAsync(target, source, size, runtime.memcpyDefault, stream)

    def _pool(self) -> _CutPool:
        if self._bound is None:
            raise ValueError(NOT_BOUND)
        return self._bound

    def calibrate(self) -> Calibration:
        """Measure every way of copying that may be chosen, use the best from now on, and store the result for other
        processes on this machine.

        The time of the call, and the multiprocessors that a kernel takes, count too. A way that copies other bytes than
        it should, or fails, is left out with a warning. Takes seconds and at most half a gigabyte of each tier, and
        keeps the GPU busy. Raises DeviceError, MemoryError.
        """
        self._check_open()
        device = CudaDevice(self.index)
        device.kernels, device.self_test = self.kernels, self.self_test
        try:
            measurements = measure(device, self._engines + device._load_kernels(), share=self._share)
        finally:
            device.close()
        self.calibration = calibrations.made(self.gpu, measurements)
        calibrations.keep(self.calibration)
        return self.calibration

    def _share(self, path: str, direction: str) -> float:
        """The share of the multiprocessors that a path takes."""
        grid = self._launcher.grid
        most = grid.thread_blocks(1 << 30, host=direction != WITHIN)
        return min(1.0, most / grid.multiprocessors) if path in KERNELS else 0.0

    # -- streams and events ----------------------------------------------------------------------

    def as_stream(self, stream: Any) -> Stream:
        """See ``Device.as_stream``."""
        return usable_stream(self._calls, stream)

    def create_stream(self, name: str, urgent: bool = False) -> Stream:
        self._check_open()
        return self._streams.create(name, self.settings.load_priority if urgent else self.settings.save_priority)

    def record(self, stream: Stream) -> DeviceEvent:
        self._check_open()
        return self._streams.record(stream)

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        self._check_open()
        recorded = self._event(event)
        try:
            if recorded is not None:
                self._events.wait(own_name(stream).handle, recorded)
        except DeviceError as error:
            if error.sticky or state_of(self._calls, own_name(stream)) != GONE:
                raise
            raise StreamGone(str(error)) from error

    def query(self, event: DeviceEvent) -> bool:
        recorded = self._event(event)
        return recorded is None or self._events.query(recorded)

    def synchronize(self, event: DeviceEvent | None = None) -> None:
        """See ``Device.synchronize``. Without an event, waits for all streams that calls have named, and so for other
        work of this process on them."""
        self._check_open()
        if event is None:
            self._streams.synchronize()
        elif (recorded := self._event(event)) is not None:
            self._events.synchronize(recorded)

    def _event(self, event: Any) -> CudaEvent | None:
        if event is NULL_EVENT:
            return None
        if not isinstance(event, CudaEvent) or event.pool is not self._events:
            raise TypeError(f"event: expected one that this device has recorded, got {event!r:.80}")
        return event

    def close(self) -> None:
        """See ``Device.close``. Waits as ``synchronize`` does first, but never for a whole GPU. If that fails, nothing
        is closed."""
        if self._closed:
            return
        self._unless_broken("cudaStreamSynchronize", partial(self._streams.synchronize, closing=True))
        self._closed, self._bound = True, None
        runtime = self._calls.runtime
        for array, _ in list(self._owned.values()):
            self.free(array)
        self._launcher.uploads.close()
        self._unless_broken("cudaFreeHost", self._buffers.close)
        for handle in self._streams.own:
            self._unless_broken("cudaStreamDestroy", partial(runtime.streamDestroy, handle))
        self._unless_broken("cudaEventDestroy", self._events.close)

    def _kernel(self, name: str) -> TableKernel:
        """A kernel that writes tables. It is made at the first use, so that only table uploads need numba-cuda and wait
        for its compiler."""
        self._check_open()
        if name not in self._loaded_tables:
            self._loaded_tables[name] = self._table_kernels.TableKernel(name, self._calls)
        return self._loaded_tables[name]

    @cached_property
    def _table_kernels(self) -> ModuleType:
        try:
            from kvpool.device.cuda import table_kernels
        except ImportError as error:
            raise DeviceError(f"tables on a GPU need numba-cuda ({error}): {_INSTALL}") from error
        return table_kernels

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the cuda device is closed")
