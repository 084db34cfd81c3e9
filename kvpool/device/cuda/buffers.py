"""Buffers: small memory that is taken often, from CuPy pools that belong to one device alone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.device.cuda.cuda_events import EventPool
from kvpool.device.cuda.runtime import RuntimeCalls
from kvpool.device.retired import Retired

DEPTH = 64
"""The most uploads to one stream that kernels may not have read yet."""


class Buffers:
    """Pinned buffers, and buffers in memory of the GPU. ``cupy`` is that package. Thread-safe.

    The pools are private. CuPy's common pool would reuse a buffer as soon as its last reference is gone, but only the
    code that enqueued its readers knows when they are done. No memory is returned to the driver before ``close``, since
    that may wait for the whole GPU.
    """

    def __init__(self, cupy: Any, calls: RuntimeCalls) -> None:
        self._calls = calls
        self._pinned, self._near = cupy.cuda.PinnedMemoryPool(), cupy.cuda.MemoryPool()
        # Runs also for a pool that nobody closes, in the right context.
        self._free = weakref.finalize(self, _free, calls, self._pinned, self._near)
        self._free.atexit = False

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
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
    """Small arrays that kernels read besides the pools. Each is kept until an event says that its own launch has read
    it. Thread-safe."""

    def __init__(
        self, calls: RuntimeCalls, events: EventPool, buffers: Buffers, address_of: Callable[[int], int]
    ) -> None:
        self._calls, self._events, self._buffers, self._address_of = calls, events, buffers, address_of
        self._lock = threading.Lock()
        self._retired: Retired[Any] = Retired(events.query)
        self._kept: list[Any] = []

    @contextmanager
    def uploaded(self, array: NDArray[Any], stream: int, host: bool) -> Iterator[int]:
        """Upload an array, as the ``Launcher`` protocol says. If too many uploads to this stream are unread, waits for
        the oldest.

        Raises DeviceError, MemoryError.
        """
        self._make_room(stream)
        buffer, near = self._buffers.pinned(array.nbytes), None
        buffer[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
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
            # Nobody can tell when they have been read. They are not used again, and stay until all work is done.
            self._kept.append(buffers)
            raise
        with self._lock:
            self._retired.add(stream, event, buffers)

    def full(self, stream: int) -> bool:
        """Whether the next upload to a stream has to wait."""
        with self._lock:
            self._reclaim()
            return self._retired.count(stream) >= DEPTH

    def _make_room(self, stream: int) -> None:
        while True:
            with self._lock:
                self._reclaim()
                if self._retired.count(stream) < DEPTH:
                    return
                oldest = self._retired.oldest(stream)
            self._events.synchronize(oldest)

    def _reclaim(self) -> None:
        """The caller holds the lock."""
        for _ in self._retired.reclaim():
            pass

    @property
    def under_way(self) -> int:
        """The uploads that kernels may still read."""
        with self._lock:
            self._reclaim()
            return len(self._retired)

    def close(self) -> None:
        """Forget all of them. Nothing that reads them may be pending."""
        with self._lock:
            self._retired.clear()
            self._kept.clear()
