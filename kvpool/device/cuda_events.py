"""Events of CUDA, used again once nobody can wait for them any more."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvpool.device.base import Event
from kvpool.device.cuda_errors import reported, status_of

_NOT_READY = 600


class CudaEvent(Event):
    """A point on a stream. Its handle goes back to the pool with the last reference to it."""

    __slots__ = ("_pool", "done", "handle")

    def __init__(self, handle: int, pool: EventPool) -> None:
        self.handle, self._pool, self.done = handle, pool, False

    @property
    def pool(self) -> EventPool:
        return self._pool

    def __del__(self) -> None:
        # What a stream waits for was settled when the wait was enqueued; only the holder of a reference can ask for more.
        self._pool.free.append(self.handle)


class EventPool:
    """Events without timing, made as needed. Thread-safe. ``runtime`` is CuPy's."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        # A destructor may run in the middle of anything, so it takes no lock.
        self.free: deque[int] = deque()

    def record(self, stream: int) -> CudaEvent:
        """The point behind everything enqueued on a stream so far. Raises DeviceError."""
        with reported("cudaEventRecord"):
            try:
                handle = self.free.popleft()
            except IndexError:
                handle = self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming)
            event = CudaEvent(handle, self)
            self._runtime.eventRecord(handle, stream)
            return event

    def wait(self, stream: int, event: CudaEvent) -> None:
        """Have a stream wait. Raises DeviceError."""
        if not event.done:
            with reported("cudaStreamWaitEvent"):
                self._runtime.streamWaitEvent(stream, event.handle)

    def query(self, event: CudaEvent) -> bool:
        """Whether an event is complete. Raises DeviceError."""
        if not event.done:
            with reported("cudaEventQuery"):
                try:
                    # Depending on its version, CuPy gives the status or raises it.
                    status = self._runtime.eventQuery(event.handle)
                    if status not in (0, _NOT_READY):
                        self._runtime.check_status(status)
                except RuntimeError as error:
                    status = status_of(error)
                    if status != _NOT_READY:
                        raise
                event.done = status == 0
        return event.done

    def synchronize(self, event: CudaEvent) -> None:
        """Return when an event is complete. Raises DeviceError."""
        if not event.done:
            with reported("cudaEventSynchronize"):
                self._runtime.eventSynchronize(event.handle)
            event.done = True

    def close(self) -> None:
        """Destroy what nobody refers to; events that are still referred to stay until the process ends."""
        while True:
            try:
                handle = self.free.popleft()
            except IndexError:
                return
            with reported("cudaEventDestroy"):
                self._runtime.eventDestroy(handle)
