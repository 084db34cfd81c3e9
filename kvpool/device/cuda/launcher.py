"""CudaLauncher: runs kernels that CuPy compiles, and keeps the small arrays that they read until they are done."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvpool.common.arrays import Array, Int64s, Uint8s
from kvpool.device.base import Retired, stream_argument
from kvpool.device.cuda import native
from kvpool.device.cuda.cuda_streams import CudaEvent, EventPool
from kvpool.device.cuda.runtime import RuntimeCalls, own_name, usable_stream
from kvpool.device.fragments import Cutter, table_size
from kvpool.device.launches import (
    BULK_FRAGMENTS,
    BUS_THREAD_BLOCKS,
    CHIP_THREAD_BLOCKS,
    HEADER_BYTES,
    OPTIONS,
    ROW_BYTES,
    SIZES,
    SOME_ROWS,
    THREADS,
    WARP,
    Grid,
    Launch,
    kernel_source,
)
from kvpool.errors import DeviceError

PENDING_BYTES_MAX = 64 << 20
"""The most bytes of all streams that kernels may not have read yet. That is the rows of two million fragments."""
QUERIED_ABOVE = 8
"""For this many uploads the driver is not asked whether they were read."""
_SMALLEST_BYTES = 4096


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


class UploadBuffer:
    """Pinned memory of a power of two bytes, its address, and the event that is recorded behind its readers. ``near``:
    the copy in GPU memory that they read instead, if they do."""

    __slots__ = ("address", "event", "memory", "near")

    def __init__(self, memory: Uint8s, event: CudaEvent) -> None:
        self.memory, self.address, self.event = memory, memory.ctypes.data, event
        self.near: Any = None


class Uploads:
    """Small arrays that kernels read besides the pools. Each is kept until an event shows that its own launch has read
    it. Thread-safe."""

    def __init__(self, calls: RuntimeCalls, events: EventPool, buffers: Buffers) -> None:
        self._calls, self._events, self._buffers = calls, events, buffers
        self._lock = threading.Lock()
        self._retired: Retired[UploadBuffer] = Retired(events.query)
        self._free: dict[int, list[UploadBuffer]] = {}
        self._kept: list[UploadBuffer] = []
        self._bytes = 0

    def take(self, nbytes: int) -> UploadBuffer | None:
        """A buffer of at least ``nbytes``. None, without waiting, where too many bytes are unread. Raises DeviceError,
        MemoryError."""
        size = max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
        with self._lock:
            if len(self._retired) > QUERIED_ABOVE or self._bytes + size > PENDING_BYTES_MAX:
                self._reclaim()
            if self._bytes and self._bytes + size > PENDING_BYTES_MAX:
                return None
            self._bytes += size
            free = self._free.get(size)
            buffer = free.pop() if free else None
        if buffer is None:
            try:
                buffer = UploadBuffer(self._buffers.pinned(size), self._events.take())
            except BaseException:
                with self._lock:
                    self._bytes -= size
                raise
        buffer.event.done = False
        return buffer

    def retire(self, buffer: UploadBuffer, stream: int, recorded: bool) -> None:
        """Reuse a buffer once its event is complete. Without one it is unknown when it has been read. It is not used
        again then, and stays until all work is done."""
        with self._lock:
            if recorded:
                self._retired.add(stream, buffer.event, buffer)
            else:
                self._kept.append(buffer)
                self._bytes -= buffer.memory.nbytes

    @contextmanager
    def uploaded(self, array: Array, stream: int, *, host: bool) -> Iterator[int]:
        """Upload an array, as in the ``Launcher`` protocol. If too many bytes are unread, waits for the oldest.

        Raises DeviceError, MemoryError.
        """
        buffer = self.take(array.nbytes)
        while buffer is None:
            with self._lock:
                events = [event for event, _ in self._retired]
            for event in events[:1]:
                self._events.synchronize(event)
            buffer = self.take(array.nbytes)
        recorded = False
        buffer.memory[: array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        try:
            if host:
                address = buffer.address
            else:
                buffer.near = self._buffers.near(array.nbytes)
                address = int(buffer.near.ptr)
                with self._calls("cudaMemcpyAsync") as runtime:
                    runtime.memcpyAsync(address, buffer.memory.ctypes.data, array.nbytes, runtime.memcpyDefault, stream)
            try:
                yield address
            finally:
                self._events.record_again(buffer.event, stream)
                recorded = True
        finally:
            self.retire(buffer, stream, recorded)

    def _reclaim(self) -> None:
        """The caller holds the lock."""
        for buffer in self._retired.reclaim():
            buffer.near = None
            size = buffer.memory.nbytes
            self._bytes -= size
            self._free.setdefault(size, []).append(buffer)

    def close(self) -> None:
        """Forget all of them. Nothing that reads them may be pending."""
        with self._lock:
            self._retired.clear()
            self._free.clear()
            self._kept.clear()


# cudaDevAttrHostNativeAtomicSupported. True for links from chip to chip, false for a bus. CuPy has no name for it.
_HOST_NATIVE_ATOMICS = 86


class CudaLauncher:
    """A ``launches.Launcher`` for one GPU. ``cupy`` is that package. ``thread_blocks``: those of kernels that cross the
    link to the host, 0 for as many as its kind needs. Thread-safe, but one thread at a time copies blocks or fragments.
    """

    def __init__(self, cupy: Any, calls: RuntimeCalls, thread_blocks: int = 0) -> None:
        self._cupy, self._calls = cupy, calls
        self.events, self.buffers = EventPool(cupy, calls), Buffers(cupy, calls)
        self._lock = threading.Lock()
        self._kernels: dict[tuple[str, str], tuple[Any, int]] = {}
        """Kernels of CuPy, and their handles on this GPU."""
        self.uploads = Uploads(calls, self.events, self.buffers)
        self.uploaded = self.uploads.uploaded
        with calls("cudaDeviceGetAttribute") as runtime:
            multiprocessors = int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, calls.index))
            chips = runtime.deviceGetAttribute(_HOST_NATIVE_ATOMICS, calls.index)
            # On other machines, kernels and batched copies of the driver need another address for memory that was
            # registered. What the runtime has allocated as pinned has one address everywhere.
            self.same_addresses = bool(
                runtime.deviceGetAttribute(runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, calls.index)
            )
        self._argument = np.empty((HEADER_BYTES + ROW_BYTES * SOME_ROWS) // 8, np.int64)
        self._rows = self._argument.ctypes.data + HEADER_BYTES
        self._copiers: dict[bool, Int64s] = {}
        """What ``native`` takes as ``kernels``: without copy units, and with them."""
        self.grid = Grid(multiprocessors, thread_blocks or (CHIP_THREAD_BLOCKS if chips else BUS_THREAD_BLOCKS))
        self._most = [self.grid.thread_blocks(1 << 30, host) for host in (False, True)]

    def stream(self, stream: Any, captured: bool) -> int:
        """See ``launches.Launcher``."""
        if captured:
            return own_name(stream_argument(stream)).handle
        return usable_stream(self._calls, stream).handle

    def launch(self, launch: Launch, stream: int) -> None:
        """See ``launches.Launcher``. Raises DeviceError, even if the source cannot be compiled."""
        self.load(launch.source, launch.kernel)
        _, handle = self._kernels[launch.source, launch.kernel]
        what = handle, launch.thread_blocks, launch.threads, launch.record.view(np.int64), stream
        native.check(self._calls, native.launch(self._calls.functions, *what))

    def copy_blocks(self, cutter: Cutter, copy_ops: Int64s, bulk: bool, host: bool, stream: int) -> bool:
        """Copy blocks whose bytes are whole words by a kernel: by copy units if ``bulk``. ``host``: they cross the
        link. Returns False, with nothing enqueued, where too many rows are unread. Raises DeviceError, MemoryError."""
        room = cutter.room(len(copy_ops))
        return self._copy(native.copy_blocks, copy_ops, cutter.vector, room, bulk, host, stream)

    def copy_fragments(self, fragments: Int64s, words: int | None, bulk: bool, host: bool, stream: int) -> bool:
        """Likewise for fragments. ``words``: as in ``measured``, where that is known."""
        words_max, room = table_size(fragments, words)
        return self._copy(native.copy_fragments, fragments, words_max, room, bulk, host, stream)

    def _copy(
        self,
        call: Callable[..., int],
        copies: Int64s,
        how: Any,
        room: int,
        bulk: bool,
        host: bool,
        stream: int,
    ) -> bool:
        """Make copies by a function of ``native``, in ``room`` rows or fewer. ``how``: its last argument."""
        buffer, place = None, (self._rows, room, stream, 0)
        if room > SOME_ROWS:
            buffer = self.uploads.take(ROW_BYTES * room)
            if buffer is None:
                return False
            place = buffer.address, room, stream, buffer.event.handle
        to = np.array([*place, self._most[host], 0], np.int64)
        try:
            native.check(self._calls, call(self._calls.functions, to, self._copiers[bulk], copies, how))
        finally:
            if buffer is not None:
                self.uploads.retire(buffer, stream, bool(to[native.RECORDED]))
        return True

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

    def _compile(self, source: str, kernel: str) -> tuple[Any, int]:
        with self._calls(source, unsafe=True):
            module = self._cupy.RawModule(code=kernel_source(source, kernel), options=OPTIONS)
            function = module.get_function(kernel)
            function.num_regs  # noqa: B018  # An attribute of a kernel is known when it is loaded.
            return function, int(function.kernel.ptr)

    def try_load(self, source: str, kernel: str) -> bool:
        """Load the kernels that copy fragments, of all ``SIZES``: ``COPY_FRAGMENTS`` first. Returns False, with a
        warning, if they cannot be loaded."""
        try:
            for size in SIZES:
                self.load(source, kernel + size)
        except (DeviceError, MemoryError) as error:
            if isinstance(error, DeviceError) and error.sticky:
                raise
            warnings.warn(f"{error}; its kernels are not used", stacklevel=2)
            return False
        bulk = (source, kernel) == BULK_FRAGMENTS
        whole = [*(self._kernels[source, kernel + size][1] for size in SIZES), WARP if bulk else THREADS]
        self._copiers[bulk] = np.array([whole, self._copiers[False][0] if bulk else whole])
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
