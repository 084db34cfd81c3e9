"""CudaLauncher: runs kernels through CuPy, and keeps the small arrays that they read until they are done."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from kvpool.common.arrays import Array, Int64s, Uint8s
from kvpool.common.errors import DeviceError
from kvpool.device.base import Retired, Stream, stream_argument
from kvpool.device.cuda.runtime import EventPool, RuntimeCalls, own_name, usable_stream
from kvpool.device.launches import BUS_THREAD_BLOCKS, CHIP_THREAD_BLOCKS, OPTIONS, Grid, Launch, kernel_source

DEPTH, ASKED = 64, 8
"""The most uploads to one stream that kernels may not have read yet, and for how many of all streams the driver is not
asked whether they were read."""


class Buffers:
    """Pinned buffers, and buffers in memory of the GPU. ``cupy`` is that package. Thread-safe.

    The pools are private. CuPy's common pool would reuse a buffer as soon as its last reference is gone, but only the
    code that enqueued its readers knows when they are done. No memory is returned to the driver before ``close``, since
    that may wait for the whole GPU.
    """

    def __init__(self, cupy: Any, calls: RuntimeCalls) -> None:
        self._calls = calls
        self._pinned, self._near = cupy.cuda.PinnedMemoryPool(), cupy.cuda.MemoryPool()
        # Runs also for a pool that is never closed, in the right context.
        self._free = weakref.finalize(self, _free, calls, self._pinned, self._near)
        self._free.atexit = False

    def pinned(self, nbytes: int) -> Uint8s:
        """uint8[nbytes] of main memory with any content. It returns to the pool with its last reference. Raises
        DeviceError, MemoryError."""
        with self._calls("cudaHostAlloc", unsafe=True):
            return np.frombuffer(self._pinned.malloc(nbytes), np.uint8, nbytes)

    def near(self, nbytes: int) -> Any:
        """nbytes of GPU memory at ``.ptr``, with the same rules as ``pinned``."""
        with self._calls("cudaMalloc", unsafe=True):
            return self._near.malloc(nbytes)

    def close(self) -> None:
        """Return all unused memory to the driver. Memory that is in use follows with its last reference."""
        self._free()


def _free(calls: RuntimeCalls, *pools: Any) -> None:
    with calls("cudaFreeHost", unsafe=True):
        for pool in pools:
            pool.free_all_blocks()


class Uploads:
    """Small arrays that kernels read besides the pools. Each is kept until an event shows that its own launch has read
    it. Thread-safe."""

    def __init__(
        self, calls: RuntimeCalls, events: EventPool, buffers: Buffers, address_of: Callable[[int], int]
    ) -> None:
        self._calls, self._events, self._buffers, self._address_of = calls, events, buffers, address_of
        self._lock = threading.Lock()
        self._retired: Retired[Any] = Retired(events.query)
        self._kept: list[Any] = []

    @contextmanager
    def uploaded(self, array: Array, stream: int, host: bool) -> Iterator[int]:
        """Upload an array, as in the ``Launcher`` protocol. If too many uploads to this stream are unread, waits for
        the oldest.

        Raises DeviceError, MemoryError.
        """
        self._make_room(stream)
        buffer, near = self._buffers.pinned(array.nbytes), None
        buffer.view(array.dtype).reshape(array.shape)[...] = array
        if host:
            address = self._address_of(buffer.ctypes.data)
        else:
            near = self._buffers.near(array.nbytes)
            address = int(near.ptr)
        try:
            if near is not None:
                with self._calls("cudaMemcpyAsync") as runtime:
                    runtime.memcpyAsync(address, buffer.ctypes.data, array.nbytes, runtime.memcpyDefault, stream)
            yield address
        finally:
            self._retire((buffer, near), stream)

    def _retire(self, buffers: Any, stream: int) -> None:
        try:
            event = self._events.record(stream)
        except BaseException:
            # It is unknown when they have been read. They are not used again, and stay until all work is done.
            self._kept.append(buffers)
            raise
        with self._lock:
            self._retired.add(stream, event, buffers)

    def full(self, stream: int) -> bool:
        """Whether the next upload to a stream has to wait."""
        with self._lock:
            if self._retired.count(stream) >= DEPTH or len(self._retired) > ASKED:
                self._reclaim()
            return self._retired.count(stream) >= DEPTH

    def _make_room(self, stream: int) -> None:
        while self.full(stream):
            with self._lock:
                oldest = self._retired.oldest(stream) if self._retired.count(stream) else None
            if oldest is not None:
                self._events.synchronize(oldest)

    def _reclaim(self) -> None:
        """The caller holds the lock."""
        for _ in self._retired.reclaim():
            pass

    @property
    def in_flight(self) -> int:
        """The uploads that kernels may still read."""
        with self._lock:
            self._reclaim()
            return len(self._retired)

    def close(self) -> None:
        """Forget all of them. Nothing that reads them may be pending."""
        with self._lock:
            self._retired.clear()
            self._kept.clear()


_void = lru_cache(None)(lambda nbytes: np.dtype((np.void, nbytes)))
"""The type of ``nbytes`` bytes without fields."""

# cudaDevAttrHostNativeAtomicSupported. True for links from chip to chip, false for a bus. CuPy has no name for it.
_HOST_NATIVE_ATOMICS = 86


class CudaLauncher:
    """A ``launches.Launcher`` for one GPU. ``cupy`` is that package. ``thread_blocks``: those of kernels that cross the
    link to the host, 0 for as many as its kind needs. Thread-safe."""

    def __init__(
        self, cupy: Any, calls: RuntimeCalls, events: EventPool, buffers: Buffers, thread_blocks: int = 0
    ) -> None:
        self._cupy, self._calls = cupy, calls
        self._lock = threading.Lock()
        self._kernels: dict[tuple[str, str], Any] = {}
        # Streams for CuPy, made of their numbers only.
        self._on = lru_cache(256)(lambda handle: cupy.cuda.Stream.from_external(Stream(handle)))
        self.uploads = Uploads(calls, events, buffers, self.own_address)
        with calls("cudaDeviceGetAttribute") as runtime:
            multiprocessors = int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, calls.index))
            chips = runtime.deviceGetAttribute(_HOST_NATIVE_ATOMICS, calls.index)
            # On other machines, kernels and batched copies of the driver need another address for pinned memory.
            self.same_addresses = bool(
                runtime.deviceGetAttribute(runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, calls.index)
            )
        self.grid = Grid(multiprocessors, thread_blocks or (CHIP_THREAD_BLOCKS if chips else BUS_THREAD_BLOCKS))

    def stream(self, stream: Any, captured: bool) -> int:
        """See ``launches.Launcher``."""
        if captured:
            return own_name(stream_argument(stream)).handle
        return usable_stream(self._calls, stream).handle

    def launch(self, launch: Launch, stream: int) -> None:
        """See ``launches.Launcher``. Raises DeviceError, even if the source cannot be compiled."""
        self.load(launch.source, launch.kernel)
        with self._calls(launch.kernel):
            # CuPy passes a NumPy array of one element by value. It takes longer for one with fields.
            record = launch.record.view(_void(launch.record.itemsize))
            kernel = self._kernels[launch.source, launch.kernel]
            kernel((launch.thread_blocks,), (launch.threads,), (record,), stream=self._on(stream))

    def load(self, source: str, kernel: str) -> None:
        """Compile a kernel and load it completely. A driver that loads late may wait for the whole GPU at the first
        launch.

        Raises DeviceError.
        """
        if (source, kernel) in self._kernels:
            return
        with self._lock:
            if (source, kernel) in self._kernels:
                return
            try:
                # CuPy switches the device while it compiles. A thread of the caller could not undo that.
                with ThreadPoolExecutor(1, "kvpool-compile") as compiler:
                    self._kernels[source, kernel] = compiler.submit(self._compile, source, kernel).result()
            except (DeviceError, MemoryError):
                raise
            except Exception as error:  # The compiler and the loader have errors of their own.
                raise DeviceError(f"{source} cannot be compiled: {type(error).__name__}: {error}") from error

    def _compile(self, source: str, kernel: str) -> Any:
        with self._calls(source, unsafe=True):
            module = self._cupy.RawModule(code=kernel_source(source, kernel), options=OPTIONS)
            function = module.get_function(kernel)
            function.num_regs  # noqa: B018  # An attribute of a kernel is known when it is loaded.
            return function

    def try_load(self, source: str, kernel: str) -> bool:
        """``load`` for a kernel that is not essential. Returns False, with a warning, if it cannot be loaded."""
        try:
            self.load(source, kernel)
        except (DeviceError, MemoryError) as error:
            if isinstance(error, DeviceError) and error.sticky:
                raise
            warnings.warn(f"{error}; its kernels are not used", stacklevel=2)
            return False
        return True

    def device_addresses(self, addresses: Int64s) -> Int64s:
        """See ``launches.Launcher``."""
        pointers = np.empty_like(addresses)
        with self._calls("cudaPointerGetAttributes") as runtime:
            for i, address in enumerate(addresses.flat):
                attributes = runtime.pointerGetAttributes(int(address))
                if attributes.type == runtime.memoryTypeUnregistered or not attributes.devicePointer:
                    raise ValueError(
                        f"memory at {address:#x} is neither the device's nor pinned: kernels cannot reach it"
                    )
                pointers.flat[i] = attributes.devicePointer
        return pointers

    def own_address(self, address: int) -> int:
        """The address for kernels of pinned memory that belongs to the device itself. On most machines this costs no
        call."""
        return address if self.same_addresses else int(self.device_addresses(np.array([address]))[0])

    def uploaded(self, array: Array, stream: int, *, host: bool) -> AbstractContextManager[int]:
        """See ``launches.Launcher``. If too many uploads to this stream are unread, waits for the oldest. Raises
        DeviceError, MemoryError."""
        return self.uploads.uploaded(array, stream, host)
