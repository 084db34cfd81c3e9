"""Staging: buffers of the host tier that carry block tables to the device, each for one call, until the device has read it.

Its lock is the last in the order, behind the transfer lock and the state lock; inside it, the device is only queried.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvpool import guards
from kvpool.device.base import Device, Event, Stream
from kvpool.device.tables import StagedRows, Table, staged_bytes, staged_views
from kvpool.errors import DeviceError, PoolClosed
from kvpool.jit import jit
from kvpool.state.blocks import DETAIL, DETAIL2, NONE, SEQUENCES, STREAM, sequences_of, table_of
from kvpool.state.live import check, stream_of
from kvpool.transfer import Transfer

SEVERAL_STREAMS, TOO_WIDE, TOO_SMALL = -8, -9, -10
SMALLEST_BYTES = 4096


@jit
def columns_now(h, ids):  # type: ignore[no-untyped-def]
    """Blocks of the longest of these sequences. A guess: nothing is held, and ids may be wrong."""
    sequences = sequences_of(h)
    most = np.int64(0)
    for i in range(ids.shape[0]):
        slot = ids[i] & 0xFFFFFFFF
        if slot < h[SEQUENCES] and sequences[slot].blocks > most:
            most = np.int64(sequences[slot].blocks)
    return most


@jit
def stage(h, ids, rows, planes, address, nbytes, columns, cut):  # type: ignore[no-untyped-def]
    """Write a hand-over of at most ``columns`` columns into the buffer at ``address``; returns the columns in use.

    The sequences are used on the call's stream from now on. Errors, with nothing changed: those of ``live.check``; SEVERAL_STREAMS, where
    the call names none and the sequence at DETAIL is on another than the first; TOO_WIDE, unless ``cut``, where the one at DETAIL has
    DETAIL2 columns; TOO_SMALL for the buffer.
    """
    error = check(h, ids, True)
    if error:
        return error
    sequences, table = sequences_of(h), table_of(h)
    width, first = 0, sequences[ids[0] & 0xFFFFFFFF].stream
    for i in range(ids.shape[0]):
        sequence = sequences[ids[i] & 0xFFFFFFFF]
        if h[STREAM] == NONE and sequence.stream != first:
            h[DETAIL] = i
            return SEVERAL_STREAMS
        if sequence.blocks > columns and not cut:
            h[DETAIL], h[DETAIL2] = i, sequence.blocks
            return TOO_WIDE
        width = max(width, min(np.int64(sequence.blocks), columns))
    if staged_bytes(planes.shape[0], rows.shape[0], width) > nbytes:
        return TOO_SMALL
    to_ids, to_rows, to_planes = staged_views(address, planes.shape[0], rows.shape[0], width)
    for p in range(planes.shape[0]):
        for k in range(3):
            to_planes[p, k] = planes[p, k]
    for i in range(rows.shape[0]):
        slot = ids[i] & 0xFFFFFFFF
        stream_of(h, slot)
        to_rows[i] = rows[i]
        for j in range(width):
            to_ids[i, j] = table[slot, j]
    return width


class Buffer:
    """Memory of the host tier; ``event`` is behind the last work that was told to read it, for ``table``."""

    __slots__ = ("address", "array", "event", "table")

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self.array, self.address = array, array.ctypes.data
        self.event: Event | None = None
        self.table: Table | None = None


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

    def retain(self, buffer: Buffer, event: Event, table: Table) -> None:
        """A buffer that the device reads until ``event`` is complete, and the table that it then has written."""
        with self._lock:
            buffer.event, buffer.table = event, table
            by_event = self._transfer.guards & guards.STAGED_BUFFERS_RETIRE_BY_EVENT
            (self._retained if by_event else self._free).append(buffer)

    def _retire(self) -> None:
        while self._retained and self._is_read(self._retained[0]):
            self._retained[0].table = None
            self._free.append(self._retained.popleft())

    def _is_read(self, buffer: Buffer) -> bool:
        return buffer.event is None or self._device.query(buffer.event)

    @property
    def retained(self) -> int:
        """Hand-overs that are under way."""
        with self._lock:
            self._retire()
            return len(self._retained)

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


class HandOver:
    """Block tables of some sequences on their way into ``table``: once decided, ``enqueue`` has the device read them.

    ``planes`` and ``rows`` are as in ``StagedRows``. At most ``columns`` columns are written; a longer sequence is cut, or an error.
    """

    def __init__(self, table: Table, planes: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], columns: int, cut: bool) -> None:
        self.table, self.planes, self.rows, self.columns, self.cut = table, planes, rows, columns, cut
        self.error: DeviceError | None = None
        self.enqueued = False

    def nbytes(self, width: int) -> int:
        """Bytes of the buffer for so many columns in use."""
        return int(staged_bytes(len(self.planes), len(self.rows), min(width, self.columns)))

    def stage(self, header: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], buffer: Buffer) -> int:
        """Snapshot the tables into ``buffer``; returns what the jitted ``stage`` does. The state lock is held by the caller."""
        return int(stage(header, ids, self.rows, self.planes, buffer.address, buffer.array.nbytes, self.columns, self.cut))

    def enqueue(self, staging: Staging, device: Device, buffer: Buffer, width: int, stream: Stream) -> None:
        """Have the device write the table. The transfer lock is held by the caller. Raises DeviceError for what orders no more."""
        staged = StagedRows(buffer.array, buffer.address, len(self.planes), len(self.rows), width, self.columns)
        try:
            device.stage_rows(self.table, staged, stream)
        except DeviceError as error:
            if error.sticky:
                raise
            self.error = error
            return
        staging.retain(buffer, device.record(stream), self.table)
        self.enqueued = True
