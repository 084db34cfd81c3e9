"""Memory of a GPU that something else owns, as an array of the driver package, which its callers bring."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.device.cuda_calls import Calls
from kvpool.device.tables import Table, make_table
from kvpool.strided import StridedArray, as_strided


def check_adopted(calls: Calls, memory: StridedArray, tier: str, index: int) -> None:
    """Raise ValueError unless memory of the caller's lies on GPU ``index``; waits for whatever has been enqueued. Raises DeviceError."""
    if tier == "host":
        raise ValueError("host_memory: the cuda device pins memory of its own; accepted is None")
    with calls("cudaPointerGetAttributes") as runtime:
        found = runtime.pointerGetAttributes(memory.address)
        runtime.deviceSynchronize()
    if found.type not in (calls.runtime.memoryTypeDevice, calls.runtime.memoryTypeManaged) or found.device != index:
        raise ValueError(f"device_memory: {memory.address:#x} is no memory of GPU {index}, which is the one that this device is")


def gpu_array(cupy: Any, memory: StridedArray, index: int) -> Any:
    """The elements as a ``cupy.ndarray`` of integers or floats of that size, which keeps ``owner`` alive."""
    nbytes = sum((extent - 1) * abs(step) for extent, step in zip(memory.shape, memory.steps, strict=True)) + memory.itemsize
    unowned = cupy.cuda.UnownedMemory(memory.address, nbytes, memory.owner, index)
    dtype = np.dtype(f"{memory.kind}{memory.itemsize}")
    return cupy.ndarray(memory.shape, dtype, memptr=cupy.cuda.MemoryPointer(unowned, 0), strides=memory.steps)


def gpu_table(target: Any, name: str, vector: bool) -> Table:
    """An array of the GPU as a table, by ``__cuda_array_interface__`` or DLPack. Raises TypeError or ValueError."""
    found = as_strided(name, target)
    if found.memory != "device" or (found.kind, found.itemsize) != ("i", 4):
        raise TypeError(f"{name}: accepted is an int32 array of a GPU, not {found.kind}{8 * found.itemsize} in {found.memory} memory")
    if not found.writable:
        raise ValueError(f"{name} is read-only: accepted is an array that can be written")
    return make_table(name, found.address, found.shape, found.steps, target, vector)
