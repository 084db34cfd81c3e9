"""CudaDevice: the device tier on a GPU, the host tier in pinned memory, copies by copy engines and kernels; all of it through CuPy."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool import dlpack
from kvpool.device import calibration as calibrations
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
    stream_argument,
    tier_argument,
)
from kvpool.device.block_copy import make_plan
from kvpool.device.calibration import BATCHED, KERNEL, PLAIN, WITHIN, Calibration
from kvpool.device.cuda_arrays import check_adopted, gpu_array, gpu_table
from kvpool.device.cuda_batch import find_batch
from kvpool.device.cuda_calls import STICKY, Calls, Gpu, gpus, status_of
from kvpool.device.cuda_events import CudaEvent, EventPool
from kvpool.device.cuda_launch import CudaLauncher
from kvpool.device.fragments import INSIDE_HOST, Cutter, by_direction
from kvpool.device.measure import measure
from kvpool.device.pinned import PinnedMemory
from kvpool.device.ram import available_ram
from kvpool.device.regions import Regions
from kvpool.device.tables import StagedRows, StagedVectors, Table
from kvpool.device.token_moves import TokenMoves
from kvpool.errors import DeviceError, PoolClosed
from kvpool.kernels.copies import block_copies
from kvpool.kernels.tables import stage_rows
from kvpool.kernels.token_moves import token_moves
from kvpool.layout import integer_argument
from kvpool.strided import StridedArray

_INSTALL = "pip install 'kvpool[cuda12]' or 'kvpool[cuda13]', by the CUDA version of the driver"
COPY_PATH = "KVPOOL_COPY_PATH"
_LEGACY_STREAM, _PER_THREAD_STREAM = 1, 2


class _Bound(NamedTuple):
    """What is known of the pool; ``cutters[region][part]``."""

    regions: Regions
    cutters: list[list[Cutter]]


def _cupy() -> Any:
    """CuPy, on a machine where it can be used. Raises DeviceError that says what is missing."""
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


_launchers: dict[int, CudaLauncher] = {}
_launchers_lock = threading.Lock()


def launcher() -> CudaLauncher:
    """What runs kernels on this thread's current GPU, for memory that belongs to no pool. Raises DeviceError. Thread-safe."""
    cupy = _cupy()
    index = int(cupy.cuda.runtime.getDevice())
    with _launchers_lock:
        if index not in _launchers:
            calls = Calls(cupy.cuda.runtime, index)
            _launchers[index] = CudaLauncher(cupy, calls, EventPool(calls))
        return _launchers[index]


class CudaDevice(Device):
    """One GPU.

    Parameters
    ----------
    index
        Of the GPU, as CUDA counts them; None is the calling thread's current one.
    calibration
        How copies are made: a Calibration, the name of one of ``calibration.PATHS`` for that path wherever it can be taken, or None for
        such a name in the environment variable ``COPY_PATH``, else what ``calibrate`` has stored on this machine, else a rule.

    Streams: 0 and 1, which are CUDA's legacy default stream, are one stream. The per-thread default stream (2) is refused: it is another
    stream in every thread, and a pool enqueues for several. Raises DeviceError where there is no GPU to use.
    """

    name = "cuda"
    synchronous = False
    one_memory = False

    def __init__(self, index: int | None = None, *, calibration: Calibration | str | None = None) -> None:
        self._cupy = _cupy()
        runtime = self._cupy.cuda.runtime
        count = runtime.getDeviceCount()
        self.index = int(runtime.getDevice()) if index is None else integer_argument("index", index, 0, count - 1)
        self._calls = Calls(runtime, self.index)
        with self._calls("cudaGetDeviceProperties"):
            _, self.device_name, _, self.driver = gpus(runtime)[self.index]
            # Elsewhere kernels and the driver's batches know pinned memory by another address.
            self._same_addresses = bool(runtime.deviceGetAttribute(runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, self.index))
        self.calibration = self._calibration(calibration)
        self._batch = find_batch() if self._same_addresses else None
        self._events = EventPool(self._calls)
        self._launcher = CudaLauncher(self._cupy, self._calls, self._events)
        self._owned: dict[int, tuple[Any, PinnedMemory | None]] = {}
        self._streams: list[Stream] = []
        self._bound: _Bound | None = None
        self._kernels = False
        self._closed = False
        self._memory_stream = self.create_stream("memory")

    def _calibration(self, given: Calibration | str | None) -> Calibration:
        given = os.environ.get(COPY_PATH) if given is None else given
        if given is not None:
            return calibrations.always(given) if isinstance(given, str) else given
        path = calibrations.place(self.device_name, self.driver)
        try:
            stored = calibrations.load(path)
        except (OSError, ValueError) as error:
            warnings.warn(f"{path}: {error}; copies are chosen by rule until calibrate() is called", stacklevel=3)
            stored = None
        return stored or Calibration(self.device_name, self.driver)

    # -- memory ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, tier: str) -> Any:
        self._check_open()
        tier_argument(tier)
        nbytes = integer_argument("nbytes", nbytes, 0, 2**63 - 1 - ALIGNMENT)
        if tier == "host":
            return self._allocate_host(nbytes)
        with self._calls("cudaMalloc") as runtime:
            # Not from CuPy's pool, which would keep it. The memory goes back with the last array that refers to it.
            memory = self._cupy.cuda.Memory(nbytes + ALIGNMENT)
            pointer = self._cupy.cuda.MemoryPointer(memory, -memory.ptr % ALIGNMENT)
            array = self._cupy.ndarray((nbytes,), dtype=np.uint8, memptr=pointer)
            runtime.memsetAsync(pointer.ptr, 0, nbytes, self._memory_stream.handle)
            runtime.streamSynchronize(self._memory_stream.handle)
        self._owned[id(array)] = array, None
        return array

    def _allocate_host(self, nbytes: int) -> NDArray[np.uint8]:
        with self._calls("cudaHostRegister") as runtime:
            try:
                memory = PinnedMemory(nbytes, runtime)
            except MemoryError as error:
                if error.__cause__ is not None and status_of(error.__cause__) in STICKY:
                    raise error.__cause__ from None
                raise
        self._owned[id(memory.array)] = memory.array, memory
        return memory.array

    def adopt(self, memory: StridedArray, tier: str) -> Any:
        self._check_open()
        check_adopted(self._calls, memory, tier, self.index)
        return self.as_array(memory)

    def as_array(self, memory: StridedArray) -> Any:
        return memory.host_view() if memory.memory == "host" else gpu_array(self._cupy, memory, self.index)

    def dlpack_device(self, tier: str) -> tuple[int, int]:
        return (dlpack.CUDA_HOST, 0) if tier == "host" else (dlpack.CUDA, self.index)

    def free(self, array: Any) -> None:
        bound = self._bound
        if bound is not None and any(array is pool for pool in bound.regions.pools):
            self._bound = None
        _, memory = self._owned.pop(id(array), (None, None))
        if memory is not None:
            self._unless_broken("cudaHostUnregister", memory.free)

    def _unless_broken(self, what: str, call: Any) -> None:
        """Give something back, which a device that has failed for good no longer takes."""
        try:
            with self._calls(what):
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
        self._kernels = self._have_kernels()
        self._bound = _Bound(found, cutters)

    def _cutter(self, part: Part, region: Region) -> Cutter:
        _, memory = self._owned.get(id(part.host_pool), (None, None))
        if memory is None:
            raise ValueError("host_pool: what allocate gave for the host tier is needed")
        return Cutter(make_plan(*part, region.device_blocks, region.host_blocks), part.host_pool.nbytes, memory.chunk_bytes)

    # -- copies ----------------------------------------------------------------------------------

    def copy_blocks(self, moves: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        bound = self._pool()
        split, handle = bound.regions.split(moves_argument(moves)), self.as_stream(stream).handle
        try:
            for region, rows in split:
                for direction, some in by_direction(rows, bound.regions.all[region].device_blocks):
                    for cutter in bound.cutters[region]:
                        self._copy(cutter, direction, some, handle)
        except MemoryError as error:
            raise DeviceError(str(error)) from error

    def _copy(self, cutter: Cutter, direction: str, moves: NDArray[np.int64], stream: int) -> None:
        """Moves of one direction, by the path that is the fastest for so many fragments of such a size."""
        moves = cutter.order(moves)
        count = cutter.count(moves)
        nbytes = int(moves[:, TOKENS].sum()) * cutter.token_bytes // count
        path = PLAIN if direction == INSIDE_HOST else self.calibration.choose(direction, nbytes, count, self._paths(stream))
        if path == KERNEL:
            self._copy_by_kernel(cutter, direction, moves, stream)
            return
        fragments = cutter.cut(moves, count)
        if path == BATCHED:
            assert self._batch is not None
            with self._calls("cuMemcpyBatchAsync") as runtime:
                runtime.check_status(self._batch(fragments, stream))
            return
        with self._calls("cudaMemcpyAsync") as runtime:
            for source, target, size in fragments.tolist():
                runtime.memcpyAsync(target, source, size, runtime.memcpyDefault, stream)

    def _paths(self, stream: int) -> tuple[str, ...]:
        """What can be taken now: nothing that would wait."""
        batched = (BATCHED,) if self._batch is not None and stream else ()
        kernel = (KERNEL,) if self._kernels and not self._launcher.saturated() else ()
        return PLAIN, *batched, *kernel

    def _have_kernels(self) -> bool:
        return self._same_addresses and self._launcher.prepare("block_copy.cu")

    def _copy_by_kernel(self, cutter: Cutter, direction: str, moves: NDArray[np.int64], stream: int) -> None:
        address = self._launcher.upload(moves, stream)
        whole = bool((moves[:, TOKENS] == cutter.block_tokens).all())
        multiprocessors = self._launcher.multiprocessors
        for launch in block_copies(
            cutter.vector, address, len(moves), whole=whole, host=direction != WITHIN, multiprocessors=multiprocessors
        ):
            self._launcher.launch(launch, stream)

    def move_tokens(self, moves: NDArray[np.int64], starts: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        bound, handle, multiprocessors = self._pool(), self.as_stream(stream).handle, self._launcher.multiprocessors
        by_region = TokenMoves.of(moves, starts, bound.regions).by_region(bound.regions)
        launches = [token_moves(cutter.vector, *found, multiprocessors) for region, found in by_region for cutter in bound.cutters[region]]
        # All of them are made before the first is launched: one that cannot be made moves nothing.
        for launch in [launch for some in launches for launch in some]:
            self._launcher.launch(launch, handle)

    def _pool(self) -> _Bound:
        if self._bound is None:
            raise ValueError("device: not bound to a pool")
        return self._bound

    def calibrate(self) -> Calibration:
        """Measure every way of copying, use the fastest from now on, and keep it for other processes on this machine.

        Takes seconds, half a gigabyte of each tier at most, and the GPU's attention. Raises DeviceError, MemoryError.
        """
        self._check_open()
        paths = [PLAIN, *((BATCHED,) if self._batch is not None else ()), *((KERNEL,) if self._have_kernels() else ())]
        found = measure(lambda path: CudaDevice(self.index, calibration=path), paths)
        self.calibration = Calibration(self.device_name, self.driver, tuple(found))
        path = calibrations.place(self.device_name, self.driver)
        try:
            calibrations.store(path, self.calibration)
        except OSError as error:
            warnings.warn(f"{path}: {error}; the calibration is used by this device only", stacklevel=2)
        return self.calibration

    # -- tables ----------------------------------------------------------------------------------

    def as_table(self, target: Any, name: str = "target", vector: bool = False) -> Table:
        return gpu_table(target, name, vector)

    def stage_rows(self, table: Table, staged: StagedRows, stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        address = staged.address if self._same_addresses else self._launcher.device_address(staged.address)
        launch = stage_rows(staged, address, table.address, table.strides[-2], self._launcher.multiprocessors)
        self._launcher.launch(launch, self.as_stream(stream).handle)

    def stage_vectors(self, staged: StagedVectors, stream: Stream = NULL_STREAM) -> None:
        self._check_open()
        handle = self.as_stream(stream).handle
        with self._calls("cudaMemcpyAsync") as runtime:
            for vector, first, nbytes in staged.pieces:
                runtime.memcpyAsync(vector.address, staged.address + first, nbytes, runtime.memcpyDefault, handle)

    # -- streams and events ----------------------------------------------------------------------

    def as_stream(self, stream: Any) -> Stream:
        found = stream_argument(stream)
        if found.handle == _PER_THREAD_STREAM:
            raise ValueError("stream: the per-thread default stream (2) is another one in every thread; create a stream and name that")
        return NULL_STREAM if found.handle == _LEGACY_STREAM else found

    def create_stream(self, name: str) -> Stream:
        self._check_open()
        with self._calls("cudaStreamCreateWithFlags") as runtime:
            self._streams.append(Stream(int(runtime.streamCreateWithFlags(runtime.streamNonBlocking)), name))
        return self._streams[-1]

    def record(self, stream: Stream) -> Event:
        self._check_open()
        return self._events.record(self.as_stream(stream).handle)

    def wait(self, stream: Stream, event: Event) -> None:
        self._check_open()
        found = self._event(event)
        if found is not None:
            self._events.wait(self.as_stream(stream).handle, found)

    def query(self, event: Event) -> bool:
        found = self._event(event)
        return found is None or self._events.query(found)

    def synchronize(self, event: Event | None = None) -> None:
        """As every device; None waits for the whole GPU, other work of this process on it too."""
        self._check_open()
        if event is None:
            with self._calls("cudaDeviceSynchronize") as runtime:
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
        """As every device. Waits for the whole GPU first."""
        if self._closed:
            return
        self._closed, self._bound = True, None
        runtime = self._calls.runtime
        self._unless_broken("cudaDeviceSynchronize", runtime.deviceSynchronize)
        for array, _ in list(self._owned.values()):
            self.free(array)
        self._unless_broken("cudaHostUnregister", self._launcher.close)
        for stream in self._streams:
            self._unless_broken("cudaStreamDestroy", partial(runtime.streamDestroy, stream.handle))
        self._unless_broken("cudaEventDestroy", self._events.close)

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the cuda device is closed")
