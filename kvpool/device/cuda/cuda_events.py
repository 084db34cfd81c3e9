"""CUDA events, reused once nobody can wait for them any more."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from typing import Any

from kvpool.device.base import Event
from kvpool.device.cuda.runtime import NOT_READY, RuntimeCalls
from kvpool.errors import DeviceError


class CudaEvent(Event):
    """A point on a stream. Its ``cupy.cuda.Event`` returns to the pool with the last reference to this object."""

    __slots__ = ("done", "handle", "inner", "pool")

    def __init__(self, inner: Any, pool: EventPool) -> None:
        self.inner, self.handle, self.pool, self.done = inner, inner.ptr, pool, False

    def __del__(self) -> None:
        # What a stream waits for was settled when the wait was enqueued. Only the holder of a reference can ask for
        # more.
        self.pool.free.append(self.inner)


class EventPool:
    """``cupy.cuda.Event`` objects without timing, created as needed. ``cupy`` is that package. Thread-safe. All methods
    raise DeviceError.

    They are recorded by handle, since CuPy's own method needs a stream object of CuPy.
    """

    def __init__(self, cupy: Any, calls: RuntimeCalls) -> None:
        self._make, self._calls = cupy.cuda.Event, calls
        # A destructor may run in the middle of anything, so this takes no lock.
        self.free: deque[Any] = deque()
        # The pool refers to events that are in use. Otherwise the garbage collector could destroy an event in a cycle
        # together with the reference that returns it.
        self._made: set[Any] = set()
        # Runs also for a pool that nobody closes, in the right context.
        weakref.finalize(self, _let_go, calls, self.free, self._made).atexit = False

    def record(self, stream: int) -> CudaEvent:
        """Record an event after everything enqueued on a stream so far."""
        with self._calls("cudaEventRecord") as runtime:
            try:
                inner = self.free.popleft()
            except IndexError:
                # A thread that waits for an event, for a reader or a loader, leaves its processor to others.
                inner = self._make(block=True, disable_timing=True)
                self._made.add(inner)
            event = CudaEvent(inner, self)
            runtime.eventRecord(event.handle, stream)
            return event

    def wait(self, stream: int, event: CudaEvent) -> None:
        """Have a stream wait for an event."""
        if not event.done:
            with self._calls("cudaStreamWaitEvent") as runtime:
                runtime.streamWaitEvent(stream, event.handle)

    def query(self, event: CudaEvent) -> bool:
        """Whether an event is complete."""
        if not event.done:
            with self._calls("cudaEventQuery", unsafe=True) as runtime:
                status = self._calls.driver.query(event.handle)
                if status == NOT_READY:
                    return False
                runtime.check_status(status)
            event.done = True
        return True

    def synchronize(self, event: CudaEvent) -> None:
        """Wait until an event is complete."""
        if not event.done:
            with self._calls("cudaEventSynchronize", unsafe=True) as runtime:
                runtime.eventSynchronize(event.handle)
            event.done = True

    def close(self) -> None:
        """Destroy the unused events. Events that are in use follow with their last reference."""
        _destroy(self._calls, self.free, self._made)


def _destroy(calls: RuntimeCalls, free: deque[Any], made: set[Any]) -> None:
    with calls("cudaEventDestroy", unsafe=True):
        made.difference_update(list(free))
        free.clear()


def _let_go(calls: RuntimeCalls, free: deque[Any], made: set[Any]) -> None:
    """Destroy events if ``close`` is never called, or after it. A GPU that has failed cannot destroy them."""
    with suppress(DeviceError):
        _destroy(calls, free, made)
