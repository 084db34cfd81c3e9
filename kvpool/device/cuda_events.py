"""Events of CUDA, used again once nobody can wait for them any more."""

from __future__ import annotations

from collections import deque

from kvpool.device.base import Event
from kvpool.device.cuda_calls import NOT_READY, Calls


class CudaEvent(Event):
    """A point on a stream. Its handle goes back to the pool with the last reference to it."""

    __slots__ = ("done", "handle", "pool")

    def __init__(self, handle: int, pool: EventPool) -> None:
        self.handle, self.pool, self.done = handle, pool, False

    def __del__(self) -> None:
        # What a stream waits for was settled when the wait was enqueued; only the holder of a reference can ask for more.
        self.pool.free.append(self.handle)


class EventPool:
    """Events without timing, made as needed. Thread-safe. All methods raise DeviceError."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        # A destructor may run in the middle of anything, so it takes no lock.
        self.free: deque[int] = deque()

    def record(self, stream: int) -> CudaEvent:
        """The point behind everything enqueued on a stream so far."""
        with self._calls("cudaEventRecord") as runtime:
            try:
                handle = self.free.popleft()
            except IndexError:
                handle = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
            event = CudaEvent(handle, self)
            runtime.eventRecord(handle, stream)
            return event

    def wait(self, stream: int, event: CudaEvent) -> None:
        """Have a stream wait."""
        if not event.done:
            with self._calls("cudaStreamWaitEvent") as runtime:
                runtime.streamWaitEvent(stream, event.handle)

    def query(self, event: CudaEvent) -> bool:
        """Whether an event is complete."""
        if not event.done:
            with self._calls("cudaEventQuery") as runtime:
                status = runtime.eventQuery(event.handle)
                if status == NOT_READY:
                    return False
                runtime.check_status(status)
            event.done = True
        return True

    def synchronize(self, event: CudaEvent) -> None:
        """Return when an event is complete."""
        if not event.done:
            with self._calls("cudaEventSynchronize") as runtime:
                runtime.eventSynchronize(event.handle)
            event.done = True

    def close(self) -> None:
        """Destroy what nobody refers to; events that are still referred to stay until the process ends."""
        with self._calls("cudaEventDestroy") as runtime:
            while self.free:
                runtime.eventDestroy(self.free.popleft())
