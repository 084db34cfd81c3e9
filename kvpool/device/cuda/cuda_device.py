"""CudaDevice: the device tier on a GPU, the host tier in pinned memory. Copy engines and kernels copy. All calls go
through CuPy."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.arrays import dlpack
from kvpool.arrays.layout import integer_argument
from kvpool.arrays.strided import StridedArray
from kvpool.device.base import (
    ALIGNMENT,
    NULL_EVENT,
    NULL_STREAM,
    TOKENS,
    Device,
    Event,
    Part,
    Region,
    Stream,
    moves_argument,
    tier_argument,
)
from kvpool.device.block_copy import make_plan
from kvpool.device.cuda import calibration as calibrations
from kvpool.device.cuda.batch import batch_fragments, find_batch
from kvpool.device.cuda.buffers import Buffers
from kvpool.device.cuda.calibration import BATCHED, KERNEL, PLAIN, WITHIN, Calibration
from kvpool.device.cuda.cuda_arrays import PinnedLoan, check_adopted, gpu_array, gpu_table, pinned_memory, zeroed_array
from kvpool.device.cuda.cuda_events import CudaEvent, EventPool
from kvpool.device.cuda.driver import Driver
from kvpool.device.cuda.fragments import INSIDE_HOST, Cutter, by_direction
from kvpool.device.cuda.ipc import gpu_handle, open_memory
from kvpool.device.cuda.launcher import CudaLauncher
from kvpool.device.cuda.measure import measure
from kvpool.device.cuda.pinned import PinnedMemory
from kvpool.device.cuda.runtime import Calls, Gpu, gpus
from kvpool.device.cuda.step_kernel import StepKernel
from kvpool.device.cuda.streams import own_name, stream_exists, usable_stream
from kvpool.device.kernels.copies import block_copies, move_table
from kvpool.device.kernels.table_launches import stage_rows
from kvpool.device.kernels.token_launches import token_moves
from kvpool.device.ram import available_ram
from kvpool.device.regions import Regions
from kvpool.device.shared import GpuMemory, MainMemory, SharedMemories
from kvpool.device.steps import StagedStep, StepTargets
from kvpool.device.tables import StagedRows, StagedVectors, Table
from kvpool.device.token_moves import TokenMoves
from kvpool.errors import DeviceError, PoolClosed

_INSTALL = "pip install 'kvpool[cuda12]' or 'kvpool[cuda13]', by the CUDA version of the driver"
COPY_PATH = "KVPOOL_COPY_PATH"
_NEEDED = "stage_rows.cu", "token_moves.cu"


class _Bound(NamedTuple):
    """The pool that the device is bound to. A part has the cutter ``cutters[region][part]``."""

    regions: Regions
    cutters: list[list[Cutter]]


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
    return gpus(_cupy().cuda.runtime)


find_driver = lru_cache(maxsize=1)(Driver)
_launchers: dict[int, CudaLauncher] = {}
_launchers_lock = threading.Lock()


def launcher(address: int) -> CudaLauncher:
    """The launcher of kernels on the GPU whose memory is at ``address``, for memory that belongs to no pool.

    Raises DeviceError, and ValueError for memory of no GPU. Thread-safe.
    """
    cupy = _cupy()
    index = find_driver().gpu_of(address, cupy.cuda.runtime.getDeviceCount())
    if index is None:
        raise ValueError(f"memory at {address:#x} is no memory of a GPU")
    with _launchers_lock:
        if index not in _launchers:
            calls = Calls(cupy.cuda.runtime, index, find_driver())
            _launchers[index] = CudaLauncher(cupy, calls, EventPool(cupy, calls), Buffers(cupy, calls))
        return _launchers[index]


def device_at(address: int) -> CudaDevice:
    """A device for the GPU whose memory is at ``address``. Raises ValueError for memory of no GPU, DeviceError."""
    index = find_driver().gpu_of(address, _cupy().cuda.runtime.getDeviceCount())
    if index is None:
        raise ValueError(f"memory at {address:#x} is no memory of a GPU")
    return CudaDevice(index)


def open_gpu_memory(memory: GpuMemory, nbytes: int) -> Any:
    """See ``ipc.open_memory``. Raises DeviceError where there is no GPU to use."""
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
        what ``calibrate`` has stored on this machine, and without that a rule.

    Streams 0 and 1 both mean CUDA's legacy default stream. The per-thread default stream (2) is refused: it is a
    different stream in every thread, and a pool enqueues for several threads. Raises DeviceError if there is no usable
    GPU.
    """

    name = "cuda"
    synchronous = False
    one_memory = False

    def __init__(self, index: int | None = None, *, calibration: Calibration | str | None = None) -> None:
        self._cupy = _cupy()
        runtime = self._cupy.cuda.runtime
        count = runtime.getDeviceCount()
        self.index = int(runtime.getDevice()) if index is None else integer_argument("index", index, 0, count - 1)
        self._calls = Calls(runtime, self.index, find_driver())
        with self._calls("cudaGetDeviceProperties"):
            _, self.device_name, _, self.driver = gpus(runtime)[self.index]
        self.calibration = calibrations.chosen(calibration or os.environ.get(COPY_PATH), self.device_name, self.driver)
        self._events, self._buffers = EventPool(self._cupy, self._calls), Buffers(self._cupy, self._calls)
        self._launcher = CudaLauncher(self._cupy, self._calls, self._events, self._buffers)
        self._steps = StepKernel(self._calls)
        self._batch, self._batch_fragments = find_batch() if self._launcher.same_addresses else None, batch_fragments()
        self._owned: dict[int, tuple[Any, PinnedMemory | None]] = {}
        self._shared = SharedMemories()
        self._streams: list[Stream] = []
        self._bound: _Bound | None = None
        self._kernels = False
        self._closed = False
        self._memory_stream = self.create_stream("memory")

    # -- memory ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, tier: str) -> Any:
        self._check_open()
        tier_argument(tier)
        nbytes = integer_argument("nbytes", nbytes, 0, 2**63 - 1 - ALIGNMENT)
        if tier == "host":
            return self._allocate_host(nbytes)
        array = zeroed_array(self._cupy, self._calls, nbytes, self._memory_stream.handle)
        self._owned[id(array)] = array, None
        return array

    def allocate_shared(self, nbytes: int, tier: str) -> Any:
        self._check_open()
        tier_argument(tier)
        return self.allocate(nbytes, tier) if tier == "device" else self._allocate_host(nbytes, self._shared.allocate)

    def ipc_handle(self, array: Any, tier: str) -> MainMemory | GpuMemory:
        if tier == "host":
            return self._shared.handle(array)
        with self._calls("cudaIpcGetMemHandle") as runtime:
            return gpu_handle(runtime, array, self.index, id(array) in self._owned)

    def pin(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        self._check_open()
        if memory.ctypes.data % mmap.PAGESIZE:
            raise ValueError(f"memory at {memory.ctypes.data:#x}: accepted is memory from the start of a page")
        return self._allocate_host(memory.nbytes, lambda nbytes: memory, kept=True)

    def _allocate_host(self, nbytes: int, take: Any = None, kept: bool = False) -> NDArray[np.uint8]:
        memory = pinned_memory(self._calls, nbytes, take, kept)
        self._owned[id(memory.array)] = memory.array, memory
        return memory.array

    def allocate_staging(self, nbytes: int) -> NDArray[np.uint8]:
        self._check_open()
        return self._buffers.pinned(nbytes)

    def adopt(self, memory: StridedArray, tier: str) -> Any:
        self._check_open()
        check_adopted(self._calls, memory, tier, self.index)
        return self.as_array(memory)

    def as_array(self, memory: StridedArray) -> Any:
        return memory.host_view() if memory.memory == "host" else gpu_array(self._cupy, memory, self.index)

    def as_pinned_memory(self, memory: StridedArray) -> Any:
        return self._cupy.cuda.PinnedMemoryPointer(PinnedLoan(memory), 0)

    def dlpack_device(self, tier: str) -> tuple[int, int]:
        return (dlpack.CUDA_HOST, 0) if tier == "host" else (dlpack.CUDA, self.index)

    def free(self, array: Any) -> None:
        bound = self._bound
        if bound is not None and any(array is pool for pool in bound.regions.pools):
            self._bound = None
        _, memory = self._owned.pop(id(array), (None, None))
        self._shared.free(array)
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
        tier_argument(tier)
        if tier == "host":
            return available_ram()
        with self._calls("cudaMemGetInfo") as runtime:
            return max(0, int(runtime.memGetInfo()[0]) - ALIGNMENT)

    def bind(self, regions: Sequence[Region]) -> None:
        self._check_open()
        if self._bound is not None:
            raise ValueError("device: already bound to a pool; every pool needs a device of its own")
        found = Regions(regions, "device")
        cutters = [[self._cutter(part, region) for part in region.parts] for region in found.all]
        # Allocated now, since a decision that has been made cannot be enqueued without them.
        for source in _NEEDED:
            self._launcher.load(source)
        self._kernels = self._have_kernels()
        self._bound = _Bound(found, cutters)

    def _cutter(self, part: Part, region: Region) -> Cutter:
        _, memory = self._owned.get(id(part.host_pool), (None, None))
        if memory is None:
            raise ValueError("host_pool: what allocate gave for the host tier is needed")
        return Cutter(
            make_plan(*part, region.device_blocks, region.host_blocks), part.host_pool.nbytes, memory.chunk_bytes
        )

    # -- copies ----------------------------------------------------------------------------------

    def copy_blocks(self, moves: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        bound = self._pool()
        split, handle = bound.regions.split(moves_argument(moves)), own_name(stream).handle
        try:
            for region, rows in split:
                for direction, some in by_direction(rows, bound.regions.all[region].device_blocks):
                    for cutter in bound.cutters[region]:
                        self._copy(cutter, direction, some, handle)
        except MemoryError as error:
            raise DeviceError(str(error)) from error

    def _copy(self, cutter: Cutter, direction: str, moves: NDArray[np.int64], stream: int) -> None:
        """Copy moves of one direction, by the fastest path for this number and size of fragments."""
        moves = cutter.order(moves)
        count = cutter.count(moves)
        nbytes = int(moves[:, TOKENS].sum()) * cutter.token_bytes // count
        path = (
            PLAIN
            if direction == INSIDE_HOST
            else self.calibration.choose(direction, nbytes, count, self._paths(stream))
        )
        if path == KERNEL:
            self._copy_by_kernel(cutter, direction, moves, stream)
            return
        self._enqueue(cutter.cut(moves, count), path, stream)

    def _paths(self, stream: int) -> tuple[str, ...]:
        """The paths that can be used now without waiting."""
        batched = (BATCHED,) if self._batch is not None and stream else ()
        kernel = (KERNEL,) if self._kernels and not self._launcher.saturated(stream) else ()
        return PLAIN, *batched, *kernel

    def _have_kernels(self) -> bool:
        return self._launcher.same_addresses and self._launcher.try_load("block_copy.cu")

    def _copy_by_kernel(self, cutter: Cutter, direction: str, moves: NDArray[np.int64], stream: int) -> None:
        whole, host = bool((moves[:, TOKENS] == cutter.block_tokens).all()), direction != WITHIN
        with self._launcher.uploaded(move_table(moves), stream, host=host) as address:
            for launch in block_copies(
                cutter.vector, address, len(moves), whole=whole, host=host, grid=self._launcher.grid
            ):
                self._launcher.launch(launch, stream)

    def copy_fragments(self, fragments: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        handle = own_name(stream).handle
        for of_region in self._pool().cutters:
            for cutter in of_region:
                fragments = cutter.split(fragments)
        self._enqueue(fragments, BATCHED if BATCHED in self._paths(handle) else PLAIN, handle)

    def _enqueue(self, fragments: NDArray[np.int64], path: str, stream: int) -> None:
        """Copies by copy engines."""
        if path == BATCHED:
            assert self._batch is not None
            with self._calls("cuMemcpyBatchAsync") as runtime:
                for first in range(0, len(fragments), self._batch_fragments):
                    runtime.check_status(self._batch(fragments[first : first + self._batch_fragments], stream))
            return
        with self._calls("cudaMemcpyAsync") as runtime:
            for source, target, size in fragments.tolist():
                runtime.memcpyAsync(target, source, size, runtime.memcpyDefault, stream)

    def move_tokens(self, moves: NDArray[np.int64], starts: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        bound, handle, grid = self._pool(), own_name(stream).handle, self._launcher.grid
        by_region = TokenMoves.of(moves, starts, bound.regions).by_region(bound.regions)
        launches = [
            token_moves(cutter.vector, *found, grid) for region, found in by_region for cutter in bound.cutters[region]
        ]
        # All launches are made before the first is enqueued. If one cannot be made, nothing moves.
        for launch in [launch for some in launches for launch in some]:
            self._launcher.launch(launch, handle)

    def _pool(self) -> _Bound:
        if self._bound is None:
            raise ValueError("device: not bound to a pool")
        return self._bound

    def calibrate(self) -> Calibration:
        """Measure every way of copying, use the fastest from now on, and store the result for other processes on this
        machine.

        Takes seconds and at most half a gigabyte of each tier, and keeps the GPU busy. Raises DeviceError, MemoryError.
        """
        self._check_open()
        paths = [PLAIN, *((BATCHED,) if self._batch is not None else ()), *((KERNEL,) if self._have_kernels() else ())]
        found = measure(lambda path: CudaDevice(self.index, calibration=path), paths)
        self.calibration = Calibration(self.device_name, self.driver, tuple(found))
        calibrations.keep(self.calibration)
        return self.calibration

    # -- tables ----------------------------------------------------------------------------------

    def as_table(self, target: Any, name: str = "target", vector: bool = False, itemsize: int = 4) -> Table:
        return gpu_table(target, name, vector, itemsize)

    def as_step(self, arrays: Any) -> StepTargets:
        """See ``Device.as_step``. The kernel is Numba's: DeviceError is raised also if numba-cuda is not installed."""
        self._check_open()
        self._steps.load()
        found: StepTargets = arrays.targets(gpu_table)
        return found

    def stage_rows(self, table: Table, staged: StagedRows, stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        address, handle = self._launcher.own_address(staged.address), own_name(stream).handle
        for launch in stage_rows(staged, address, table.address, table.strides[-2], self._launcher.grid):
            self._launcher.launch(launch, handle)

    def stage_vectors(self, staged: StagedVectors, stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        handle = own_name(stream).handle
        with self._calls("cudaMemcpyAsync") as runtime:
            for vector, first, nbytes in staged.pieces:
                runtime.memcpyAsync(vector.address, staged.address + first, nbytes, runtime.memcpyDefault, handle)

    def stage_step(self, targets: StepTargets, staged: StagedStep, stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        self._steps.launch(targets, staged, self._launcher.own_address(staged.address), own_name(stream).handle)

    # -- streams and events ----------------------------------------------------------------------

    def as_stream(self, stream: Any) -> Stream:
        """See ``Device.as_stream``."""
        return usable_stream(self._calls, stream)

    def exists(self, stream: Stream) -> bool:
        return stream_exists(self._calls, stream)

    def create_stream(self, name: str) -> Stream:
        self._check_open()
        with self._calls("cudaStreamCreateWithFlags", unsafe=True) as runtime:
            self._streams.append(Stream(int(runtime.streamCreateWithFlags(runtime.streamNonBlocking)), name))
        return self._streams[-1]

    def record(self, stream: Stream) -> Event:
        self._check_open()
        return self._events.record(own_name(stream).handle)

    def wait(self, stream: Stream, event: Event) -> None:
        self._check_open()
        found = self._event(event)
        if found is not None:
            self._events.wait(own_name(stream).handle, found)

    def query(self, event: Event) -> bool:
        found = self._event(event)
        return found is None or self._events.query(found)

    def synchronize(self, event: Event | None = None) -> None:
        """See ``Device.synchronize``. Without an event, waits for the whole GPU, also for other work of this process on
        it."""
        self._check_open()
        if event is None:
            with self._calls("cudaDeviceSynchronize", unsafe=True) as runtime:
                runtime.deviceSynchronize()
            return
        found = self._event(event)
        if found is not None:
            self._events.synchronize(found)

    def _event(self, event: Any) -> CudaEvent | None:
        if event is NULL_EVENT:
            return None
        if not isinstance(event, CudaEvent) or event.pool is not self._events:
            raise TypeError(f"event={event!r}: an event that this device recorded is needed")
        return event

    def close(self) -> None:
        """See ``Device.close``. Waits for the whole GPU first."""
        if self._closed:
            return
        self._closed, self._bound = True, None
        runtime = self._calls.runtime
        self._unless_broken("cudaDeviceSynchronize", runtime.deviceSynchronize)
        for array, _ in list(self._owned.values()):
            self.free(array)
        self._launcher.close()
        self._unless_broken("cudaFreeHost", self._buffers.close)
        for stream in self._streams:
            self._unless_broken("cudaStreamDestroy", partial(runtime.streamDestroy, stream.handle))
        self._unless_broken("cudaEventDestroy", self._events.close)

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the cuda device is closed")
