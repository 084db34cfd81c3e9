"""Staging: buffers of the host tier that carry block tables to the device, each for one call, until the device has read it.

Its lock is the last in the order, behind the transfer lock and the state lock; inside it, the device is only queried.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvpool import guards
from kvpool.device.base import Device, Event
from kvpool.device.tables import Table
from kvpool.errors import DeviceError, PoolClosed
from kvpool.transfer import Transfer

SMALLEST_BYTES = 4096


class Buffer:
    """Memory of the host tier; ``event`` is behind the last work that was told to read it, for ``tables``."""

    __slots__ = ("address", "array", "event", "tables")

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self.array, self.address = array, array.ctypes.data
        self.event: Event | None = None
        self.tables: Sequence[Table] = ()


class Staging:
    """The buffers of one pool. At most ``depth`` hand-overs are under way, and those that other threads are about to enqueue.

    A buffer is taken for a call, retained with an event when the device has been told to read it, and free again when that event is
    complete, in the order of the hand-overs. None is given back to the device while an event is pending. Thread-safe.
    """

    def __init__(self, device: Device, transfer: Transfer, depth: int) -> None:
        self._device, self._transfer, self.depth = device, transfer, depth
        self._lock = threading.Lock()
        self._buffers: list[Buffer] = []
        self._free: list[Buffer] = []
        self._retained: deque[Buffer] = deque()
        self._most = 0
        self._closed = False

    def take(self, nbytes: int) -> Buffer:
        """A buffer of at least ``nbytes``, the caller's until it is retained or given back. May wait, with no lock held.

        Raises DeviceError, MemoryError, PoolClosed.
        """
        try:
            while True:
                with self._lock:
                    self._retire()
                    if len(self._retained) < self.depth:
                        found, spare = self._choose(nbytes)
                        break
                    oldest = self._retained[0].event
                self._device.synchronize(oldest)
        except DeviceError as error:
            self._transfer.broken = self._transfer.broken or error
            raise
        if spare is not None:
            self._device.free(spare.array)
        return found or self._allocate(nbytes)

    def _choose(self, nbytes: int) -> tuple[Buffer | None, Buffer | None]:
        """The smallest free buffer that is large enough; or None, and one that is too small and may go."""
        if self._closed:
            raise PoolClosed("the pool is closed")
        self._free.sort(key=_size)
        for buffer in self._free:
            if buffer.array.nbytes >= nbytes:
                self._free.remove(buffer)
                return buffer, None
        if len(self._buffers) < self.depth or not self._free:
            return None, None
        spare = self._free.pop(0)
        self._buffers.remove(spare)
        return None, spare

    def _allocate(self, nbytes: int) -> Buffer:
        buffer = Buffer(self._device.allocate(max(SMALLEST_BYTES, 1 << (nbytes - 1).bit_length()), "host"))
        with self._lock:
            if not self._closed:
                self._buffers.append(buffer)
                return buffer
        self._device.free(buffer.array)
        raise PoolClosed("the pool is closed")

    def give_back(self, buffer: Buffer) -> None:
        """A buffer that the device was not told to read."""
        with self._lock:
            self._free.append(buffer)

    def retain(self, buffer: Buffer, event: Event, tables: Sequence[Table]) -> None:
        """A buffer that the device reads until ``event`` is complete, and the tables that it then has written."""
        with self._lock:
            buffer.event, buffer.tables = event, tables
            if not self._transfer.guards & guards.STAGED_BUFFERS_RETIRE_BY_EVENT:
                self._free.append(buffer)
                return
            self._retained.append(buffer)
            if len(self._retained) > self._most:
                self._retire()
                self._most = max(self._most, len(self._retained))

    def _retire(self) -> None:
        while self._retained and self._is_read(self._retained[0]):
            self._retained[0].tables = ()
            self._free.append(self._retained.popleft())

    def _is_read(self, buffer: Buffer) -> bool:
        return buffer.event is None or self._device.query(buffer.event)

    @property
    def retained(self) -> int:
        """Hand-overs that are under way; buffers of the others are free again."""
        with self._lock:
            self._retire()
            return len(self._retained)

    def under_way(self) -> tuple[int, int]:
        """Hand-overs that are under way, and the most that ever were at once. Changes nothing and takes no lock, so that a signal handler
        may ask inside any call. A device that fails is reported by the next hand-over."""
        retained = list(self._retained)
        with suppress(DeviceError):
            while retained and self._is_read(retained[0]):
                del retained[0]
        return len(retained), self._most

    def findings(self) -> Iterator[tuple[str, str]]:
        """Broken invariants as (check, detail)."""
        with self._lock:
            if any(buffer.event is None for buffer in self._retained):
                yield "staging retained", "a buffer is retained without an event"
            if not all(self._is_read(buffer) for buffer in self._free):
                yield "staging free", "a buffer is free while an event behind a reader of it is pending"
            listed = [*self._free, *self._retained]
            if len({id(buffer) for buffer in listed}) != len(listed) or any(buffer not in self._buffers for buffer in listed):
                yield "staging buffers", "a buffer is listed twice, or is none of this pool"

    def close(self) -> None:
        """Give all buffers back to the device, which has finished its work. Closing twice is fine."""
        with self._lock:
            self._closed, buffers, self._buffers = True, self._buffers, []
            self._free.clear()
            self._retained.clear()
        for buffer in buffers:
            self._device.free(buffer.array)


def _size(buffer: Buffer) -> int:
    return buffer.array.nbytes
