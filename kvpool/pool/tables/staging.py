"""Staging: buffers of the host tier that carry block tables to the device. Each belongs to one call, until the device
has read it.

Its lock comes last in the order, after the transfer lock and the state lock. While it is held, the device is only
queried.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, cast

from kvpool.common.arrays import Uint8s
from kvpool.device.base import STAGING, Device, DeviceEvent, Retired, Stream
from kvpool.device.work import Table
from kvpool.errors import DeviceError, PoolClosed
from kvpool.pool.transfer.transfer import Transfer
from kvpool.state import records

SMALLEST_BYTES = 4096


class Buffer:
    """Memory of the host tier. ``event`` comes after the last work that reads it, which is for ``tables``. ``replays``
    is the stream of the graph that reads it, if one does. ``user`` is the upload that a call of ``thread`` stages in
    it."""

    __slots__ = ("address", "array", "event", "nbytes", "replays", "tables", "thread", "user")

    def __init__(self, array: Uint8s) -> None:
        self.array, self.address, self.nbytes = array, array.ctypes.data, array.nbytes
        self.event: DeviceEvent | None = None
        self.replays: Stream | None = None
        self.tables: Sequence[Table] = ()
        self.user: Upload | None = None
        self.thread = 0


class Upload(Protocol):
    """What needs a buffer: see ``BlockTableUpload``."""

    begun: bool
    stream: Stream


class Staging:
    """The buffers of one pool. On a stream, at most ``depth`` uploads are enqueued and not done, besides those that
    other threads are about to enqueue.

    A call takes a buffer. It is retained with an event when the device has been told to read it. It is free again when
    that event is complete, in the order of the uploads to that stream: no stream waits for another. No buffer is
    given back to the device while an event is pending. Thread-safe.
    """

    def __init__(self, device: Device, transfer: Transfer, depth: int) -> None:
        self._device, self._transfer, self.depth = device, transfer, depth
        self._lock = threading.Lock()
        self._buffers: list[Buffer] = []
        self._free: list[Buffer] = []
        self._retained: Retired[Buffer] = Retired(partial(_is_complete, device))
        self._most = 0
        self._closed = False
        transfer.forks.guard(self, "_lock")

    def take(self, nbytes: int, stream: Stream, user: Upload) -> Buffer:
        """A buffer of at least ``nbytes``, which belongs to the caller until it is retained or given back. May wait for
        ``stream``, with no lock held. Also gives back what interrupted calls of this thread have left: uploads are not
        nested.

        Raises DeviceError, MemoryError, PoolClosed.
        """
        me = threading.get_ident()
        for left in tuple(self._buffers):
            if left.thread == me and left.user is not None:
                self.cancel(left.user)
        try:
            while True:
                with self._lock:
                    self._retire()
                    if self._retained.count(stream.handle) < self.depth:
                        buffer, spare = self._choose(nbytes, user)
                        break
                    oldest = self._retained.oldest(stream.handle)
                self._device.synchronize(oldest)
        except DeviceError as error:
            self._transfer.fail(error)
            raise
        if spare is not None:
            self._device.free(spare.array)
        return buffer or self.allocate(nbytes, user)

    def _choose(self, nbytes: int, user: Upload) -> tuple[Buffer | None, Buffer | None]:
        """The smallest free buffer that is large enough. If there is none: None, and a buffer that is too small and may
        be freed."""
        if self._closed:
            raise PoolClosed("the pool is closed")
        chosen = None
        for buffer in self._free:
            if buffer.nbytes >= nbytes and (chosen is None or buffer.nbytes < chosen.nbytes):
                chosen = buffer
        if chosen is not None:
            chosen.user, chosen.thread = user, threading.get_ident()
            self._free.remove(chosen)
            return chosen, None
        if len(self._buffers) < self.depth or not self._free:
            return None, None
        spare = min(self._free, key=attrgetter("nbytes"))
        self._free.remove(spare)
        self._buffers.remove(spare)
        return None, spare

    def allocate(self, nbytes: int, user: Upload | None = None) -> Buffer:
        """A new buffer of at least ``nbytes``. Raises DeviceError, MemoryError, PoolClosed."""
        memory = self._device.allocate(max(SMALLEST_BYTES, 1 << (nbytes - 1).bit_length()), STAGING)
        buffer = Buffer(cast(Uint8s, memory))
        buffer.user, buffer.thread = user, threading.get_ident()
        with self._lock:
            if not self._closed:
                self._buffers.append(buffer)
                return buffer
        self._device.free(buffer.array)
        raise PoolClosed("the pool is closed")

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer that the device was not told to read."""
        with self._lock:
            self._free.append(buffer)

    def cancel(self, user: Upload) -> None:
        """Return the buffer of an upload whose call has ended by an exception. If the device may read it already, it is
        retained. Raises DeviceError."""
        with self._transfer.lock:
            with self._lock:
                # The call may have ended right after it had retained its buffer.
                kept = [buffer for _, buffer in self._retained]
                mine = [buffer for buffer in self._buffers if buffer.user is user]
                for buffer in mine:
                    if buffer in kept:
                        buffer.user = None
                    elif not user.begun:
                        buffer.user = None
                        if buffer not in self._free:
                            self._free.append(buffer)
            for buffer in mine:
                if buffer.user is user and self._transfer.broken is None:
                    event, _ = self._transfer.upload(None, user.stream)
                    self.retain(buffer, user.stream, event, buffer.tables)

    def retain(self, buffer: Buffer, stream: Stream, event: DeviceEvent, tables: Sequence[Table]) -> None:
        """Keep a buffer that the device reads on ``stream`` until ``event`` is complete. By then it has written
        ``tables``."""
        with self._lock:
            buffer.event, buffer.tables = event, tables
            if not self._transfer.guards & records.STAGED_BUFFERS_RETIRE_BY_EVENT:
                buffer.user = None
                self._free.append(buffer)
                return
            self._retained.add(stream.handle, event, buffer)
            buffer.user = None
            if len(self._retained) > self._most:
                self._retire()
                self._most = max(self._most, len(self._retained))

    def await_replay(self, buffer: Buffer, stream: Stream) -> None:
        """Wait, with no lock held, until the graph of a buffer has been replayed for the last time: on ``stream``, if
        none was named for it before. Raises DeviceError, and ValueError while no work can be enqueued there."""
        if not self._transfer.guards & records.STAGED_BUFFERS_RETIRE_BY_EVENT:
            return
        try:
            self._device.synchronize(self._transfer.event_behind(buffer.replays or stream))
        except DeviceError as error:
            self._transfer.fail(error)
            raise

    def retain_replay(self, buffer: Buffer) -> None:
        """Keep the buffer of a graph until its last replay is done; until ``close``, if no stream was named for its
        replays. Raises as ``await_replay``, with nothing changed."""
        if buffer.replays is not None:
            self.retain(buffer, buffer.replays, self._transfer.event_behind(buffer.replays), ())
            buffer.replays = None

    def _retire(self) -> None:
        for buffer in self._retained.reclaim():
            buffer.tables, buffer.user = (), None
            self._free.append(buffer)

    @property
    def retained(self) -> int:
        """The uploads that are not done. Buffers of the others become free again."""
        with self._lock:
            self._retire()
            return len(self._retained)

    def in_flight(self) -> tuple[int, int]:
        """How many uploads are not done, and the most at any time. Changes nothing and takes no lock, so that a
        destructor may ask inside any call. The next upload reports a device that fails."""
        try:
            pending = self._retained.pending()
        except DeviceError:
            pending = len(self._retained)
        return pending, self._most

    def findings(self) -> Iterator[tuple[str, str]]:
        """Broken invariants as (check, detail)."""
        with self._lock:
            if any(event is None for event, _ in self._retained):
                yield "staging retained", "a buffer is retained without an event"
            if not all(_is_complete(self._device, buffer.event) for buffer in self._free):
                yield "staging free", "a buffer is free while an event behind a reader of it is pending"
            listed = [*self._free, *(buffer for _, buffer in self._retained)]
            if len({id(buffer) for buffer in listed}) != len(listed) or any(
                buffer not in self._buffers for buffer in listed
            ):
                yield "staging buffers", "a buffer is listed twice, or is none of this pool"

    def close(self) -> None:
        """Give all buffers back to the device, which has finished its work. A second call does nothing."""
        with self._lock:
            self._closed, buffers, self._buffers = True, self._buffers, []
            self._free.clear()
            self._retained.clear()
        for buffer in buffers:
            self._device.free(buffer.array)


def _is_complete(device: Device, event: Any) -> bool:
    """This is no method: then the pool has no reference cycles, and gives its memory back as soon as nobody refers to
    it."""
    return event is None or device.query(event)
