"""The order of accesses: the last accesses of every block, as stream points, and the waits that follow from them.

A *stream point* is a number. Its event is complete once everything that was enqueued on the stream before it is done. A
reader of a block waits for the block's last write. A writer waits for the last write and for all reads since. Calls
report the work of the engine between them: a commit means that tokens are written, a release that the blocks of a
sequence are no longer used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from kvpool.common.arrays import Bools, Int64s
from kvpool.common.jit import jit
from kvpool.device.base import NULL_EVENT, Device, DeviceEvent, Stream, StreamGone
from kvpool.device.regions import SOURCE, TARGET
from kvpool.state.records import DIRECTIONS, ONBOARD
from kvpool.state.tiers import ACCESSED, FOLLOWS, WILL_READ, WILL_WRITE, WROTE

_OWN = DIRECTIONS
"""The pool's own streams, one for each direction of copy ops."""
_SLOT_BITS = 16
STREAMS_KEPT = 16
"""This many streams keep their numbers. If there are more, a new stream takes the number of one whose work is done."""
COPY_READS, COPY_WRITES, ENGINE_READS, ENGINE_WRITES = 0, 2, 4, 6
"""Where the two guards of an access begin among those of ``records``: its wait for copies, then that for engines."""


@jit
def _need(write: Int64s, read: Int64s, b: int, stream: int, writes: bool, guards: int, need: Int64s) -> None:
    """Raise ``need`` int64[streams] to the stream points for which ``stream`` waits before it accesses block ``b``.
    ``guards`` begin with the two of this access."""
    slot, stream_point = write[b] & ((1 << _SLOT_BITS) - 1), write[b] >> _SLOT_BITS
    if slot != stream and stream_point > need[slot] and guards & (1 if slot < _OWN else 2):
        need[slot] = stream_point
    if writes:
        for slot in range(read.shape[1]):
            if slot != stream and read[b, slot] > need[slot] and guards & (1 if slot < _OWN else 2):
                need[slot] = read[b, slot]


@jit(nogil=False)
def _need_of_copies(write: Int64s, read: Int64s, copy_ops: Int64s, stream: int, guards: int, need: Int64s) -> None:
    for i in range(len(copy_ops)):
        _need(write, read, copy_ops[i, SOURCE], stream, False, guards >> COPY_READS, need)
        _need(write, read, copy_ops[i, TARGET], stream, True, guards >> COPY_WRITES, need)


@jit(nogil=False)
def _need_of_accesses(write: Int64s, read: Int64s, rows: Int64s, guards: int, need: Int64s, waits: Bools) -> None:
    """Fill ``need`` int64[streams, streams], by the stream that waits. ``waits`` bool[streams] says which streams
    wait."""
    for i in range(len(rows)):
        kind, stream, block = rows[i, 0], rows[i, 1], rows[i, 2]
        if kind == WILL_READ:
            _need(write, read, block, stream, False, guards >> ENGINE_READS, need[stream])
        elif kind == WILL_WRITE:
            _need(write, read, block, stream, True, guards >> ENGINE_WRITES, need[stream])
        if kind == WILL_READ or kind == WILL_WRITE:
            waits[stream] = True


@jit(nogil=False)
def _need_of_host(write: Int64s, read: Int64s, ids: Int64s, writes: bool, need: Int64s) -> None:
    for i in range(len(ids)):
        _need(write, read, ids[i], -1, writes, 3, need)


@jit(nogil=False)
def _mark_copies(write: Int64s, read: Int64s, copy_ops: Int64s, stream: int, stream_point: int) -> None:
    for i in range(len(copy_ops)):
        read[copy_ops[i, SOURCE], stream] = stream_point
        write[copy_ops[i, TARGET]] = (stream_point << _SLOT_BITS) | stream


@jit(nogil=False)
def _survey(rows: Int64s, done: Bools) -> bool:
    """Mark the streams that have used blocks in ``done`` bool[streams]. Returns whether a stream follows another
    one."""
    follows = False
    for i in range(len(rows)):
        if rows[i, 0] == ACCESSED or rows[i, 0] == WROTE:
            done[rows[i, 1]] = True
        elif rows[i, 0] == FOLLOWS:
            follows = True
    return follows


@jit(nogil=False)
def _mark_accesses(write: Int64s, read: Int64s, rows: Int64s, stream_points: Int64s) -> None:
    for i in range(len(rows)):
        stream = rows[i, 1]
        if rows[i, 0] == WROTE:
            write[rows[i, 2]] = (stream_points[stream] << _SLOT_BITS) | stream
        elif rows[i, 0] == ACCESSED:
            read[rows[i, 2], stream] = stream_points[stream]


def event_behind(device: Device, stream: Stream) -> DeviceEvent:
    """Return an event that is complete once all work enqueued on a stream so far is done. The caller holds the transfer
    lock. Raises DeviceError."""
    try:
        return device.record(stream)
    except StreamGone:
        # Its work continues, and only a wait for the whole device shows its end. No other wait holds the transfer lock.
        device.synchronize()
        return NULL_EVENT


class Order:
    """The last accesses of the blocks of one pool on a device that is not synchronous.

    The transfer lock guards everything but ``slot``, which the state lock guards. Raises whatever the device raises.

    An exception of a signal handler may end any method anywhere. The method is then called once more with the same
    arguments, which at most records stream points and waits for them twice. So a method updates its fields only after
    the device calls that they describe.
    """

    def __init__(self, device: Device, blocks: int) -> None:
        self._device = device
        self._streams = [device.create_stream(name, name == "onboard") for name in ("offload", "onboard", "within")]
        self._slots = {stream.handle: slot for slot, stream in enumerate(self._streams)}
        self._write = np.zeros(blocks, np.int64)
        self._read = np.zeros((blocks, _OWN), np.int64)
        # For each stream: its number of points, the last point known to be complete, and the events of the points after
        # it.
        self._stream_points: Int64s = np.zeros(_OWN, np.int64)
        self._complete: Int64s = np.zeros(_OWN, np.int64)
        self._events: list[deque[tuple[int, DeviceEvent]]] = [deque() for _ in range(_OWN)]
        # [a, b]: the last point of stream b that stream a has waited for.
        self._waited: Int64s = np.zeros((_OWN, _OWN), np.int64)
        # By stream: the last point of loads for which it waits layer by layer.
        self._by_layer: dict[int, int] = {}

    def stream(self, slot: int) -> Stream:
        """Return the stream that has this number."""
        return self._streams[slot]

    def slot(self, stream: Stream, idle: Callable[[], Bools]) -> int:
        """Return the small number of a stream. If there are many streams, a new one takes the number of an old one
        whose work is done.

        ``idle`` returns bool[n], for all numbers or more: True where no sequence and no queued batch names the number.
        """
        number = self._slots.get(stream.handle)
        if number is None:
            number = self._reusable(idle) if len(self._streams) >= STREAMS_KEPT else len(self._streams)
            # The stream is kept alive: its handle must not become another stream's while its work is remembered.
            if number == len(self._streams):
                self._streams.append(stream)
            else:
                self._slots.pop(self._streams[number].handle, None)
                self._waited[number] = 0
                self._streams[number] = stream
            self._slots[stream.handle] = number
        return number

    def _reusable(self, idle: Callable[[], Bools]) -> int:
        """Return a number to reuse, or a new one. Points continue to count when another stream takes a number, so old
        points stay complete."""
        known = len(self._stream_points)
        free = np.flatnonzero((self._complete == self._stream_points) & idle()[:known])
        free = free[free >= _OWN]
        return int(free[0]) if len(free) else len(self._streams)

    def accessed(self, rows: Int64s) -> None:
        """Before a batch, record points after the work that calls have reported, and let streams follow each other."""
        self._grow()
        done = np.zeros(len(self._stream_points), np.bool_)
        if _survey(rows, done):
            for stream, other in dict.fromkeys(map(tuple, rows[rows[:, 0] == FOLLOWS, 1:].tolist())):
                self._wait(stream, other, self._record(other))
        if len(self._stream_points) >= STREAMS_KEPT:
            for stream in range(len(self._stream_points)):
                self._forget_complete(stream)
        streams = np.flatnonzero(done).tolist()
        for stream in streams:
            self._record(stream)
        if streams:
            _mark_accesses(self._write, self._read, rows, self._stream_points)

    def before_copies(self, copy_ops: Int64s, stream: int, guards: int) -> None:
        """Have one of the pool's own streams wait for every access that must come before independent copies on it."""
        need = np.zeros(len(self._stream_points), np.int64)
        _need_of_copies(self._write, self._read, copy_ops, stream, guards, need)
        self._wait_all(stream, need)

    def after_copies(self, copy_ops: Int64s, stream: int) -> None:
        """Note copies that were enqueued. For a copy that was not, this costs at most an unnecessary wait."""
        _mark_copies(self._write, self._read, copy_ops, stream, self._record(stream))

    @property
    def loaded(self) -> int:
        """The last point of loads."""
        return int(self._stream_points[ONBOARD])

    def hold_back(self, rows: Int64s, guards: int, loaded: int | None = None) -> None:
        """After a batch, have streams wait for the blocks that they will use. With ``loaded``, callers wait for loads
        after this point themselves, layer by layer."""
        streams = len(self._stream_points)
        waits, need = np.zeros(streams, np.bool_), np.zeros((streams, streams), np.int64)
        _need_of_accesses(self._write, self._read, rows, guards, need, waits)
        for stream in np.flatnonzero(waits).tolist():
            if loaded is not None and need[stream, ONBOARD] > loaded:
                self._by_layer[stream], need[stream, ONBOARD] = int(need[stream, ONBOARD]), loaded
            self._wait_all(stream, need[stream])

    def follow_copies(self, stream: Stream) -> None:
        """Have any stream, even one without a number, wait for all copies enqueued so far."""
        for copy_stream in self._streams[:_OWN]:
            self._device.wait(stream, self._device.record(copy_stream))

    def pending(self, ids: Int64s, writes: bool) -> list[DeviceEvent]:
        """Return the events for which the host waits before it reads the bytes of blocks, or, with ``writes``, before
        it writes them."""
        need = np.zeros(len(self._stream_points), np.int64)
        _need_of_host(self._write, self._read, ids, writes, need)
        return [self._event(slot, int(need[slot])) for slot in np.flatnonzero(need > self._complete).tolist()]

    def _grow(self) -> None:
        count, known = len(self._streams), len(self._stream_points)
        if count > known:
            read, waited = np.zeros((len(self._write), count), np.int64), np.zeros((count, count), np.int64)
            read[:, :known], waited[:known, :known] = self._read[:, :known], self._waited[:known, :known]
            self._read, self._waited = read, waited
            self._events += [deque() for _ in range(count - len(self._events))]
            self._complete = np.pad(self._complete[:known], (0, count - known))
            self._stream_points = np.pad(self._stream_points, (0, count - known))  # the last: it says what is known

    def _record(self, stream: int) -> int:
        """Record a new point of a stream. Forgets the events that have completed meanwhile."""
        # Work after this point also comes after the loads of all layers.
        self._wait(stream, ONBOARD, self._by_layer.get(stream, 0))
        self._by_layer.pop(stream, None)
        stream_point = int(self._stream_points[stream]) + 1
        self._events[stream].append((stream_point, event_behind(self._device, self._streams[stream])))
        self._stream_points[stream] = stream_point
        self._forget_complete(stream)
        return stream_point

    def _forget_complete(self, stream: int) -> None:
        # A stream point that was recorded twice has two events, and is complete once both are.
        events = self._events[stream]
        while events and self._device.query(events[0][1]):
            events.popleft()
            self._complete[stream] = events[0][0] - 1 if events else self._stream_points[stream]

    def _event(self, stream: int, stream_point: int) -> DeviceEvent:
        """Return the last event of a stream point. NULL_EVENT for one that is complete."""
        events = self._events[stream]
        first, last = (events[0][0], events[-1][0]) if events else (0, -1)
        if first <= stream_point <= last and last - first + 1 == len(events):
            return events[stream_point - first][1]
        return next((event for number, event in reversed(events) if number == stream_point), NULL_EVENT)

    def _wait_all(self, stream: int, need: Int64s) -> None:
        for other in np.flatnonzero(need > np.maximum(self._complete, self._waited[stream])).tolist():
            self._wait(stream, other, int(need[other]))

    def _wait(self, stream: int, other: int, stream_point: int) -> None:
        if stream != other and stream_point > self._complete[other]:
            try:
                self._device.wait(self._streams[stream], self._event(other, stream_point))
            except StreamGone:
                pass  # No more work comes on it.
            self._waited[stream, other] = stream_point
