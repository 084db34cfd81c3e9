"""Memory of a GPU, arrays on it and on pinned memory, and its handles for other processes. Callers pass in the driver
package."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from kvpool.arrays import dlpack
from kvpool.arrays.strided import StridedArray, as_strided
from kvpool.device.base import ALIGNMENT
from kvpool.device.cuda.driver import Driver
from kvpool.device.cuda.pinned import PinnedMemory, processors_near
from kvpool.device.cuda.runtime import RuntimeCalls
from kvpool.device.shared import GpuMemory, MainMemory
from kvpool.device.steps import StepTargets
from kvpool.device.tables import Table, make_table
from kvpool.device.views import HostViews
from kvpool.errors import DeviceError

_UUID_BYTES = 16


class DeviceMemory:
    """Memory of a GPU at ``ptr``, freed with the last reference. CuPy's own class frees in the current context; this
    one frees in the context that the memory belongs to, on any thread, also while another thread captures."""

    def __init__(self, calls: RuntimeCalls, nbytes: int) -> None:
        self._calls = calls
        with calls("cudaMalloc", unsafe=True) as runtime:
            self.ptr = int(runtime.malloc(nbytes))

    def __del__(self) -> None:
        if hasattr(self, "ptr") and not sys.is_finalizing():
            # A GPU that has failed cannot free memory.
            with suppress(DeviceError), self._calls("cudaFree", unsafe=True) as runtime:
                runtime.free(self.ptr)


def check_adopted(calls: RuntimeCalls, memory: StridedArray, tier: str, index: int) -> None:
    """Raise ValueError unless memory of the caller lies on GPU ``index``. Waits for everything enqueued. Raises
    DeviceError."""
    if tier == "host":
        raise ValueError("host_memory: the cuda device pins memory of its own; accepted is None")
    with calls("cudaPointerGetAttributes", unsafe=True) as runtime:
        found = runtime.pointerGetAttributes(memory.address)
        runtime.deviceSynchronize()
    if found.type not in (calls.runtime.memoryTypeDevice, calls.runtime.memoryTypeManaged) or found.device != index:
        raise ValueError(
            f"device_memory: {memory.address:#x} is no memory of GPU {index}, which is the one that this device is"
        )


class PinnedLoan:
    """Pinned memory of another owner, in the form that a ``PinnedMemoryPointer`` of CuPy needs: ``ptr``, ``size``, and
    a reference to the owner."""

    def __init__(self, memory: StridedArray) -> None:
        self.ptr, self.size, self.owner = memory.address, memory.shape[0], memory.owner


def gpu_array(cupy: Any, memory: StridedArray, index: int) -> Any:
    """The elements as a ``cupy.ndarray`` of integers or floats of that size. It keeps ``owner`` alive."""
    nbytes = (
        sum((extent - 1) * abs(step) for extent, step in zip(memory.shape, memory.steps, strict=True)) + memory.itemsize
    )
    unowned = cupy.cuda.UnownedMemory(memory.address, nbytes, memory.owner, index)
    dtype = np.dtype(f"{memory.kind}{memory.itemsize}")
    return cupy.ndarray(memory.shape, dtype, memptr=cupy.cuda.MemoryPointer(unowned, 0), strides=memory.steps)


def pinned_memory(calls: RuntimeCalls, nbytes: int, take: Any, kept: bool) -> PinnedMemory:
    """Allocate pinned memory near the GPU of ``calls``, as ``PinnedMemory``. Raises MemoryError, DeviceError."""
    with calls("cudaDeviceGetPCIBusId") as runtime:
        near = processors_near(runtime.deviceGetPCIBusId(calls.index))
    try:
        return PinnedMemory(nbytes, calls, processors=near, take=take, kept=kept)
    except MemoryError as error:
        if isinstance(error.__cause__, DeviceError) and error.__cause__.sticky:
            raise error.__cause__ from None
        raise


def zeroed_array(cupy: Any, calls: RuntimeCalls, nbytes: int, stream: int) -> Any:
    """Allocate uint8[nbytes] of zeros, at a multiple of ``ALIGNMENT``. It does not come from CuPy's pool, which would
    keep it: the memory is freed with the last array that refers to it."""
    memory = DeviceMemory(calls, nbytes + ALIGNMENT)
    address = memory.ptr + -memory.ptr % ALIGNMENT
    with calls("cudaMemsetAsync", unsafe=True) as runtime:
        array = gpu_array(
            cupy, StridedArray(address, (nbytes,), 1, memory="device", kind="u", owner=memory), calls.index
        )
        runtime.memsetAsync(address, 0, nbytes, stream)
        runtime.streamSynchronize(stream)
    return array


def gpu_table(target: Any, name: str, vector: bool, itemsize: int) -> Table:
    """An array on the GPU as a table, by ``__cuda_array_interface__`` or DLPack. Raises TypeError or ValueError."""
    found = as_strided(name, target)
    if found.memory != "device" or (found.kind, found.itemsize) != ("i", itemsize):
        given = f"{found.kind}{8 * found.itemsize} in {found.memory} memory"
        raise TypeError(f"{name}: accepted is an int{8 * itemsize} array of a GPU, not {given}")
    if not found.writable:
        raise ValueError(f"{name} is read-only: accepted is an array that can be written")
    return make_table(name, found.address, found.shape, found.steps, target, vector, itemsize)


def _uuid(runtime: Any, index: int) -> bytes:
    # CuPy cuts the UUID at a zero byte, in the same way in every process.
    return bytes(runtime.getDeviceProperties(index)["uuid"][:_UUID_BYTES])


def gpu_handle(runtime: Any, array: Any, index: int, own: bool) -> GpuMemory:
    """The handle of an array that lies in an allocation of its own. CUDA's handle is that of the allocation; the array
    begins inside it.

    Raises ValueError for memory that the device did not allocate, since the handle might open other data too.
    """
    if not own:
        raise ValueError(
            "device_memory is the caller's and cannot be shared: accepted is memory that the pool took itself"
        )
    base = array.data.mem.ptr
    return GpuMemory(_uuid(runtime, index), bytes(runtime.ipcGetMemHandle(base)), array.data.ptr - base)


def _gpu_with(runtime: Any, uuid: bytes) -> int:
    """The GPU with a UUID, as this process counts GPUs. Raises ValueError."""
    seen = [_uuid(runtime, index) for index in range(runtime.getDeviceCount())]
    if uuid not in seen:
        found = [one.hex() for one in seen]
        raise ValueError(f"description: the memory is on the GPU with UUID {uuid.hex()}, and this process sees {found}")
    return seen.index(uuid)


class _Opened:
    """An allocation of another process. It stays open while somebody refers to it."""

    def __init__(self, calls: RuntimeCalls, handle: bytes) -> None:
        with calls("cudaIpcOpenMemHandle") as runtime:
            self.pointer = int(runtime.ipcOpenMemHandle(handle))
        # The driver closes it at the end of the process.
        weakref.finalize(self, _close, calls, self.pointer).atexit = False


def _close(calls: RuntimeCalls, pointer: int) -> None:
    with calls("cudaIpcCloseMemHandle") as runtime:
        runtime.deviceSynchronize()  # Nothing that this process has enqueued may still use it.
        runtime.ipcCloseMemHandle(pointer)


def open_memory(cupy: Any, driver: Driver, memory: GpuMemory, nbytes: int) -> Any:
    """Open memory of another process as a ``cupy.ndarray`` uint8[nbytes]. It stays open until the last view is gone.

    Raises DeviceError, and ValueError for a GPU that this process does not see. Thread-safe.
    """
    calls = RuntimeCalls(cupy.cuda.runtime, _gpu_with(cupy.cuda.runtime, memory.uuid), driver)
    opened = _Opened(calls, memory.handle)
    place = StridedArray(opened.pointer + memory.offset, (nbytes,), 1, None, "device", "u", owner=opened)
    return gpu_array(cupy, place, calls.index)


class CudaViews(HostViews):
    """Views of the memory of one GPU, as CuPy's arrays. ``is_own`` says whether the device allocated an array,
    ``load_step`` loads the kernel of step tables."""

    def __init__(
        self, cupy: Any, calls: RuntimeCalls, is_own: Callable[[Any], bool], load_step: Callable[[], None]
    ) -> None:
        self._cupy, self._calls, self._is_own, self._load_step = cupy, calls, is_own, load_step
        self.places = {"device": (dlpack.CUDA, calls.index), "host": (dlpack.CUDA_HOST, 0)}

    def array(self, memory: StridedArray) -> Any:
        return memory.host_view() if memory.memory == "host" else gpu_array(self._cupy, memory, self._calls.index)

    def pinned(self, memory: StridedArray) -> Any:
        return self._cupy.cuda.PinnedMemoryPointer(PinnedLoan(memory), 0)

    def handle(self, array: Any, tier: str) -> MainMemory | GpuMemory:
        if tier == "host":
            return super().handle(array, tier)
        with self._calls("cudaIpcGetMemHandle") as runtime:
            return gpu_handle(runtime, array, self._calls.index, self._is_own(array))

    def table(self, target: Any, name: str = "target", vector: bool = False, itemsize: int = 4) -> Table:
        return gpu_table(target, name, vector, itemsize)

    def step(self, arrays: Any) -> StepTargets:
        """See ``HostViews.step``. The kernel is Numba's: DeviceError is raised also if numba-cuda is not installed."""
        self._load_step()
        found: StepTargets = arrays.targets(gpu_table)
        return found
