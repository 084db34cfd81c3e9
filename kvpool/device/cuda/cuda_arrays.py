"""Arrays over GPU memory or pinned memory that something else owns. Callers pass in the driver package."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import numpy as np

from kvpool.arrays.strided import StridedArray, as_strided
from kvpool.device.base import ALIGNMENT
from kvpool.device.cuda.numa import processors_near
from kvpool.device.cuda.pinned import PinnedMemory
from kvpool.device.cuda.runtime import Calls
from kvpool.device.tables import Table, make_table
from kvpool.errors import DeviceError


class DeviceMemory:
    """Memory of a GPU at ``ptr``, freed with the last reference. CuPy's own class frees in the current context; this
    one frees in the context that the memory belongs to, on any thread, also while another thread captures."""

    def __init__(self, calls: Calls, nbytes: int) -> None:
        self._calls = calls
        with calls("cudaMalloc", unsafe=True) as runtime:
            self.ptr = int(runtime.malloc(nbytes))

    def __del__(self) -> None:
        if hasattr(self, "ptr") and not sys.is_finalizing():
            # A GPU that has failed cannot free memory.
            with suppress(DeviceError), self._calls("cudaFree", unsafe=True) as runtime:
                runtime.free(self.ptr)


def check_adopted(calls: Calls, memory: StridedArray, tier: str, index: int) -> None:
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


def pinned_memory(calls: Calls, nbytes: int, take: Any, kept: bool) -> PinnedMemory:
    """Allocate pinned memory near the GPU of ``calls``, as ``PinnedMemory``. Raises MemoryError, DeviceError."""
    with calls("cudaDeviceGetPCIBusId") as runtime:
        near = processors_near(runtime.deviceGetPCIBusId(calls.index))
    try:
        return PinnedMemory(nbytes, calls, processors=near, take=take, kept=kept)
    except MemoryError as error:
        if isinstance(error.__cause__, DeviceError) and error.__cause__.sticky:
            raise error.__cause__ from None
        raise


def zeroed_array(cupy: Any, calls: Calls, nbytes: int, stream: int) -> Any:
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
