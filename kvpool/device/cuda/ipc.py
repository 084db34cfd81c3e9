"""GPU memory shared by two processes: the handle that one process gives, and the array that the other one opens."""

from __future__ import annotations

import weakref
from typing import Any

from kvpool.arrays.strided import StridedArray
from kvpool.device.cuda.cuda_arrays import gpu_array
from kvpool.device.cuda.driver import Driver
from kvpool.device.cuda.runtime import Calls
from kvpool.device.shared import GpuMemory

_UUID_BYTES = 16


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

    def __init__(self, calls: Calls, handle: bytes) -> None:
        with calls("cudaIpcOpenMemHandle") as runtime:
            self.pointer = int(runtime.ipcOpenMemHandle(handle))
        # The driver closes it at the end of the process.
        weakref.finalize(self, _close, calls, self.pointer).atexit = False


def _close(calls: Calls, pointer: int) -> None:
    with calls("cudaIpcCloseMemHandle") as runtime:
        runtime.deviceSynchronize()  # Nothing that this process has enqueued may still use it.
        runtime.ipcCloseMemHandle(pointer)


def open_memory(cupy: Any, driver: Driver, memory: GpuMemory, nbytes: int) -> Any:
    """Open memory of another process as a ``cupy.ndarray`` uint8[nbytes]. It stays open until the last view is gone.

    Raises DeviceError, and ValueError for a GPU that this process does not see. Thread-safe.
    """
    calls = Calls(cupy.cuda.runtime, _gpu_with(cupy.cuda.runtime, memory.uuid), driver)
    opened = _Opened(calls, memory.handle)
    place = StridedArray(opened.pointer + memory.offset, (nbytes,), 1, None, "device", "u", owner=opened)
    return gpu_array(cupy, place, calls.index)
