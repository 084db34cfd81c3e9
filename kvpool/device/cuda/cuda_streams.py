"""Streams and events of CUDA: those that a device has used or created, and events that are used again."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import nullcontext, suppress
from typing import Any

from kvpool.device.base import NULL_STREAM, DeviceEvent, Stream, StreamGone
from kvpool.device.cuda import native
from kvpool.device.cuda.runtime import GONE, NOT_READY, USABLE, RuntimeCalls, own_name, state_of
from kvpool.errors import DeviceError

_STREAMS_KEPT = 64


class CudaEvent(DeviceEvent):
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
        # Runs also for a pool that is never closed, in the right context.
        weakref.finalize(self, _let_go, calls, self.free, self._made).atexit = False

    def record(self, stream: int) -> CudaEvent:
        """Record an event after everything enqueued on a stream so far."""
        event = self.take()
        self.record_again(event, stream)
        return event

    def take(self) -> CudaEvent:
        """An event that is not recorded yet."""
        try:
            inner = self.free.popleft()
        except IndexError:
            with self._calls("cudaEventCreate", unsafe=True):
                # A thread that waits for an event, for a reader or a loader, leaves its processor to others.
                inner = self._make(block=True, disable_timing=True)
                self._made.add(inner)
        return CudaEvent(inner, self)

    def record_again(self, event: CudaEvent, stream: int) -> None:
        """Record an event that nothing waits for any more."""
        event.done = False
        native.check(self._calls, native.record(self._calls.functions, event.handle, stream))

    def wait(self, stream: int, event: CudaEvent) -> None:
        """Have a stream wait for an event."""
        if not event.done:
            with self._calls("cudaStreamWaitEvent") as runtime:
                runtime.streamWaitEvent(stream, event.handle)

    def query(self, event: CudaEvent) -> bool:
        """Whether an event is complete."""
        if not event.done:
            result = native.query(self._calls.functions, event.handle)
            if result:
                if native.failure(result)[1] == NOT_READY:
                    return False
                native.check(self._calls, result)
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


class _WorkOn:
    """The context manager of ``UsedStreams.work``. It is a class because a generator would cost more."""

    __slots__ = ("_stream", "_streams")

    def __init__(self, streams: UsedStreams, stream: Stream) -> None:
        self._streams, self._stream = streams, stream

    def __enter__(self) -> int:
        return self._streams.handle(self._stream)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._stream.handle in self._streams.own:
            return
        with suppress(DeviceError) if kind else nullcontext():
            self._streams.record(self._stream)


class UsedStreams:
    """The streams on which a device enqueues: its ``own``, and those that calls have named. One thread at a time
    creates streams and enqueues; any thread may call ``synchronize``."""

    def __init__(self, calls: RuntimeCalls, events: EventPool) -> None:
        self.own: dict[int, Stream] = {}
        """By handle."""
        self._calls, self._events = calls, events
        self._used: dict[int, tuple[Stream, CudaEvent | None]] = {}
        """The streams of callers, each with the last event after work of the device's."""
        self._lost: set[int] = set()
        """Streams that were destroyed with work of their owners' after that event."""

    def create(self, name: str, priority: int) -> Stream:
        """A stream of the device's own. Raises DeviceError."""
        with self._calls("cudaStreamCreateWithPriority", unsafe=True) as runtime:
            handle = int(runtime.streamCreateWithPriority(runtime.streamNonBlocking, priority))
        self.own[handle] = Stream(handle, name)
        return self.own[handle]

    def handle(self, stream: Stream) -> int:
        """The handle of a stream, for work. ``synchronize`` waits for it from now on, until it is known to be idle."""
        if stream.handle in self._used or stream.handle in self.own:
            return stream.handle
        stream = own_name(stream)
        if stream.handle not in self._used:
            if len(self._used) >= _STREAMS_KEPT:
                idle = [h for h, (_, event) in self._used.items() if event is not None and self._events.query(event)]
                self._used = {h: entry for h, entry in self._used.items() if h not in idle}
            self._used[stream.handle] = stream, None
        return stream.handle

    def work(self, stream: Stream) -> _WorkOn:
        """A context manager that gives the handle of a stream, for work that is enqueued inside the context. On streams
        of callers an event follows it, which shows when the work is done, even if the stream is destroyed before.
        Raises DeviceError."""
        return _WorkOn(self, stream)

    def record(self, stream: Stream) -> CudaEvent:
        """An event of a stream. Raises DeviceError, StreamGone."""
        handle = self.handle(stream)
        try:
            event = self._events.record(handle)
        except DeviceError as error:
            if handle in self.own or error.sticky or state_of(self._calls, self._used[handle][0]) != GONE:
                raise
            self._lost.add(handle)
            raise StreamGone(str(error)) from error
        self.note(handle, event)
        return event

    def note(self, handle: int, event: CudaEvent) -> None:
        """Note an event that was recorded behind work on a stream that ``handle`` returned."""
        if handle not in self.own:
            self._used[handle] = self._used[handle][0], event

    def synchronize(self, closing: bool = False) -> None:
        """Wait for these streams, and for the default stream. Raises DeviceError.

        For a stream that is captured, or was destroyed, it waits for the last event. Its owner's work after that event
        can only be waited for with the whole GPU. CUDA refuses that while any stream of the GPU is captured, and ends
        the capture, so it is not done when ``closing``.
        """
        own = list(self.own.values())  # at once: another thread may add one
        for stream, event in [(NULL_STREAM, None), *self._used.values(), *((ours, None) for ours in own)]:
            if state_of(self._calls, stream) == USABLE:
                with self._calls("cudaStreamSynchronize", unsafe=True) as runtime:
                    runtime.streamSynchronize(stream.handle)
            elif event is not None:
                self._events.synchronize(event)
        if self._lost and not closing:
            with self._calls("cudaDeviceSynchronize", unsafe=True) as runtime:
                runtime.deviceSynchronize()
            self._used = {handle: entry for handle, entry in self._used.items() if handle not in self._lost}
            self._lost.clear()
