"""CudaLauncher: runs kernels through CuPy, and keeps what they read until they are done."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections import deque
from typing import Any

import numpy.typing as npt

from kvpool.device.base import Stream
from kvpool.device.cuda_calls import Calls
from kvpool.device.cuda_events import CudaEvent, EventPool
from kvpool.device.pinned import PinnedMemory
from kvpool.errors import DeviceError
from kvpool.kernels.launch import OPTIONS, Launch, cuda_source

_DEPTH = 64
_BUFFER_BYTES = 64 << 10


class CudaLauncher:
    """A ``kernels.launch.Launcher`` for one GPU. ``cupy`` is that package. Thread-safe.

    What is uploaded lies in pinned buffers. Each belongs to one call of ``upload`` until an event behind the kernels that read it is
    complete; at most a fixed number wait for theirs.
    """

    def __init__(self, cupy: Any, calls: Calls, events: EventPool) -> None:
        self._cupy, self._calls, self._events = cupy, calls, events
        self._lock = threading.Lock()
        self._modules: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], Any] = {}
        # What the last upload of a thread to a stream put there; then, oldest first, what events are to set free; then what is free.
        self._open: dict[tuple[int, int], PinnedMemory] = {}
        self._retired: deque[tuple[CudaEvent, PinnedMemory]] = deque()
        self._free: list[PinnedMemory] = []
        with calls("cudaDeviceGetAttribute") as runtime:
            self.multiprocessors = int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, calls.index))

    def launch(self, launch: Launch, stream: int) -> None:
        """As the protocol says. The first launch of a kernel compiles its source. Raises DeviceError."""
        with self._calls(launch.kernel):
            name = launch.source, launch.kernel
            if name not in self._kernels:
                self._kernels[name] = self._module(launch.source).get_function(launch.kernel)
            on = self._cupy.cuda.Stream.from_external(Stream(stream))
            # CuPy passes a NumPy array of one element by value.
            self._kernels[name]((launch.thread_blocks,), (launch.threads,), (launch.record,), stream=on)

    def prepare(self, source: str) -> bool:
        """Compile a source now; False, with a warning, where that cannot be done."""
        try:
            with self._calls("compile"):
                self._module(source).compile()
        except DeviceError as error:
            if error.sticky:
                raise
            reason: Exception = error
        except Exception as error:  # The compiler has its own, and the loader of a library that is missing another.
            reason = error
        else:
            return True
        warnings.warn(f"{source} cannot be compiled, kernels are not used: {reason}", stacklevel=2)
        return False

    def _module(self, source: str) -> Any:
        with self._lock:
            if source not in self._modules:
                self._modules[source] = self._cupy.RawModule(code=cuda_source(source), options=OPTIONS)
            return self._modules[source]

    def device_address(self, address: int) -> int:
        """As the protocol says."""
        with self._calls("cudaPointerGetAttributes") as runtime:
            found = runtime.pointerGetAttributes(address)
        if found.type == runtime.memoryTypeUnregistered or not found.devicePointer:
            raise ValueError(f"memory at {address:#x} is neither the device's nor pinned: kernels cannot reach it")
        return int(found.devicePointer)

    def saturated(self) -> bool:
        """Whether the next upload may have to wait."""
        return self.retained >= _DEPTH

    def upload(self, array: npt.NDArray[Any], stream: int) -> int:
        """As the protocol says. Waits for the oldest upload where too many are under way. Raises DeviceError, MemoryError."""
        key = threading.get_ident(), stream
        while True:
            with self._lock:
                last = self._open.pop(key, None)
                if last is not None:
                    self._retired.append((self._events.record(stream), last))
                self._reclaim()
                if len(self._retired) < _DEPTH:
                    buffer = self._open[key] = self._take(array.nbytes)
                    break
                oldest = self._retired[0][0]
            self._events.synchronize(oldest)
        ctypes.memmove(buffer.array.ctypes.data, array.ctypes.data, array.nbytes)
        return self.device_address(buffer.array.ctypes.data)

    def _reclaim(self) -> None:
        """The lock is held by the caller."""
        while self._retired and self._events.query(self._retired[0][0]):
            self._free.append(self._retired.popleft()[1])

    def _take(self, nbytes: int) -> PinnedMemory:
        """The lock is held by the caller."""
        for i, buffer in enumerate(self._free):
            if buffer.array.nbytes >= nbytes:
                return self._free.pop(i)
        size = max(_BUFFER_BYTES, 1 << (nbytes - 1).bit_length())
        with self._calls("cudaHostRegister") as runtime:
            return PinnedMemory(size, runtime, chunk_bytes=size)

    @property
    def retained(self) -> int:
        """Uploads that kernels may still read."""
        with self._lock:
            self._reclaim()
            return len(self._retired) + len(self._open)

    def close(self) -> None:
        """Give all buffers back; nothing that reads them may be under way."""
        with self._lock:
            buffers = [*self._open.values(), *(buffer for _, buffer in self._retired), *self._free]
            self._open.clear()
            self._retired.clear()
            self._free.clear()
        with self._calls("cudaHostUnregister"):
            for buffer in buffers:
                buffer.free()
