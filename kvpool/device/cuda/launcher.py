"""CudaLauncher: runs kernels through CuPy, and keeps the arrays that they read until they are done."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.device.base import Stream
from kvpool.device.cuda.buffers import Buffers, Uploads
from kvpool.device.cuda.cuda_events import EventPool
from kvpool.device.cuda.runtime import RuntimeCalls
from kvpool.device.kernels.launch import (
    BUS_THREAD_BLOCKS,
    CHIP_THREAD_BLOCKS,
    OPTIONS,
    Grid,
    Launch,
    cuda_source,
    kernels,
)
from kvpool.errors import DeviceError

# cudaDevAttrHostNativeAtomicSupported. True for links from chip to chip, false for a bus. CuPy has no name for it.
_HOST_NATIVE_ATOMICS = 86


class CudaLauncher:
    """A ``kernels.launch.Launcher`` for one GPU. ``cupy`` is that package. Thread-safe."""

    def __init__(self, cupy: Any, calls: RuntimeCalls, events: EventPool, buffers: Buffers) -> None:
        self._cupy, self._calls = cupy, calls
        self._lock = threading.Lock()
        self._kernels: dict[tuple[str, str], Any] = {}
        self.uploads = Uploads(calls, events, buffers, self.own_address)
        with calls("cudaDeviceGetAttribute") as runtime:
            multiprocessors = int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, calls.index))
            chips = runtime.deviceGetAttribute(_HOST_NATIVE_ATOMICS, calls.index)
            # On other machines, kernels and batched copies of the driver need another address for pinned memory.
            self.same_addresses = bool(
                runtime.deviceGetAttribute(runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, calls.index)
            )
        self.grid = Grid(multiprocessors, CHIP_THREAD_BLOCKS if chips else BUS_THREAD_BLOCKS)

    def launch(self, launch: Launch, stream: int) -> None:
        """See ``kernels.launch.Launcher``. Raises DeviceError, also if the source cannot be compiled."""
        with self._calls(launch.kernel):
            kernel = self._kernels.get((launch.source, launch.kernel))
            if kernel is None:
                self.load(launch.source)
                kernel = self._kernels[launch.source, launch.kernel]
            on = self._cupy.cuda.Stream.from_external(Stream(stream))
            # CuPy passes a NumPy array of one element by value.
            kernel((launch.thread_blocks,), (launch.threads,), (launch.record,), stream=on)

    def load(self, source: str) -> None:
        """Compile a source and load its kernels completely. A driver that loads late may wait for the whole GPU at the
        first launch.

        Raises DeviceError.
        """
        with self._lock:
            if any(name == source for name, _ in self._kernels):
                return
            try:
                # CuPy switches the device while it compiles. A thread of the caller could not undo that.
                with ThreadPoolExecutor(1, "kvpool-compile") as compiler:
                    found = compiler.submit(self._compile, source).result()
            except (DeviceError, MemoryError):
                raise
            except Exception as error:  # The compiler and the loader have errors of their own.
                raise DeviceError(f"{source} cannot be compiled: {type(error).__name__}: {error}") from error
            self._kernels.update(found)

    def _compile(self, source: str) -> dict[tuple[str, str], Any]:
        with self._calls(source, unsafe=True):
            text = cuda_source(source)
            module = self._cupy.RawModule(code=text, options=OPTIONS)
            found = {(source, kernel): module.get_function(kernel) for kernel in kernels(text)}
            for kernel in found.values():
                kernel.num_regs  # noqa: B018  # An attribute of a kernel is known when it is loaded.
            return found

    def try_load(self, source: str) -> bool:
        """``load`` for a kernel that is not essential. Returns False, with a warning, if it cannot be loaded."""
        try:
            self.load(source)
        except (DeviceError, MemoryError) as error:
            if isinstance(error, DeviceError) and error.sticky:
                raise
            warnings.warn(f"{error}; its kernels are not used", stacklevel=2)
            return False
        return True

    def device_addresses(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """See ``kernels.launch.Launcher``."""
        found = np.empty_like(addresses)
        with self._calls("cudaPointerGetAttributes") as runtime:
            for i, address in enumerate(addresses.flat):
                attributes = runtime.pointerGetAttributes(int(address))
                if attributes.type == runtime.memoryTypeUnregistered or not attributes.devicePointer:
                    raise ValueError(
                        f"memory at {address:#x} is neither the device's nor pinned: kernels cannot reach it"
                    )
                found.flat[i] = attributes.devicePointer
        return found

    def own_address(self, address: int) -> int:
        """The address for kernels of pinned memory that belongs to the device itself. On most machines this costs no
        call."""
        return address if self.same_addresses else int(self.device_addresses(np.array([address]))[0])

    def uploaded(self, array: npt.NDArray[Any], stream: int, *, host: bool) -> AbstractContextManager[int]:
        """See ``kernels.launch.Launcher``. If too many uploads to this stream are unread, waits for the oldest. Raises
        DeviceError, MemoryError."""
        return self.uploads.uploaded(array, stream, host)
