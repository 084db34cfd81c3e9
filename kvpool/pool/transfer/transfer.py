"""From decisions to copies: batches of copy ops in the order of their tickets, cut into levels of copy ops that do not
depend on each other, and what happens to a batch that a device refuses.

The state decides under the state lock. There each batch takes the next ticket and joins the queue. A thread that holds
the transfer lock then enqueues the queue, strictly in the order of tickets. The transfer lock is taken before the state
lock, never while holding it.

When the device refuses a copy, ``_copy`` notes its target as lost and goes on with the other copy ops. ``_end``
has the state forget the lost blocks and mark their sequences. The call that decided the batch raises nothing. The next
call that names such a sequence raises DeviceError.

An exception of a signal handler may end ``drain`` anywhere. The batch stays in the queue, with a note of how far it is,
and the next call goes on with it. Independent copy ops that were perhaps enqueued are enqueued once more, which copies
the same bytes. Token moves that were perhaps enqueued are not, and their targets are lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import count
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvpool.common.arrays import Bools, Int64s
from kvpool.common.changes import Changes, from_handler
from kvpool.common.process import Process
from kvpool.common.threads import Worker
from kvpool.device.base import NULL_STREAM, Device, DeviceEvent, Stream, StreamGone
from kvpool.device.regions import SOURCE, TARGET, TICKET, Layers
from kvpool.device.work import TokenMoves, Work
from kvpool.errors import DeviceError
from kvpool.pool.transfer.levels import Levels
from kvpool.pool.transfer.traffic import Traffic
from kvpool.pool.transfer.waits import Order, event_behind
from kvpool.state import records, verbs
from kvpool.state.arrays import States
from kvpool.state.records import DIRECTION, DIRECTIONS, H
from kvpool.state.tiers import ACCESSED, collect

NO_TOKEN_MOVES: Int64s = np.zeros((0, 4), np.int64)
NO_IDS: Int64s = np.empty(0, np.int64)


class LayerEvents(Protocol):
    """What has an event for each part of the layers that a decision loads: ``parts`` of them, or none if nothing is
    loaded by layers."""

    parts: int
    events: list[DeviceEvent]


class Decision(NamedTuple):
    """One decision: copy ops int64[n, 5] (source, target, tokens, ticket of the source's content, direction), token
    moves int64[k, 4] and accesses int64[m, 3], as in the state. Tokens move on the engine's streams, after the copy
    ops.

    ``loads`` gets the events of what is loaded by layers. ``levels`` are the copy ops, cut, once somebody has cut them.
    """

    ticket: int
    copy_ops: Int64s
    token_moves: Int64s
    accesses: Int64s
    loads: LayerEvents | None
    levels: list[tuple[Int64s, int]]


class Transfer:
    """The queue of decided batches. ``token_bytes`` are the bytes of a token in each group of layers. ``changes`` are
    those of the state.

    ``broken`` is the permanent error of the device, or None. ``order`` is None on a synchronous device. ``moved``
    counts what the device has accepted. ``lock`` is the transfer lock. ``at_once`` is that of the device. ``start``
    runs a call in the thread of this pool. ``state_lock`` is
    another lock in a test that takes the rule out.
    """

    def __init__(
        self,
        states: States,
        state_lock: AbstractContextManager[Any],
        changes: Changes,
        device: Device,
        token_bytes: Sequence[int],
    ) -> None:
        self._states, self.state_lock, self._changes, self._device = states, state_lock, changes, device
        self._numbers = states.groups.reshape(-1).data
        # The copy ops, token moves and accesses that a decision has left in each group. Every call asks twice whether
        # there are any.
        self._left = [row[H.copy_ops : H.accesses + 1].data for row in states.groups]
        # The stream that a decision names, in each group.
        self._named = [row[H.stream : H.stream + 1].data for row in states.groups]
        self._nothing = [np.zeros(3, np.int64).data for _ in self._left]
        # Reentrant, for what a destructor does inside: it asks ``enqueuing`` before it takes it.
        self.lock: Any = threading.RLock()
        # ``drain`` enqueues what is up to ``_decided``.
        self._queue: dict[int, Decision] = {}
        self._notes: dict[int, Int64s] = {}
        self._numbers_of_notes = count()
        self._lost: dict[int, int] = {}
        self._decided = self._enqueued = -1
        self._width = int(states.groups[0, records.H.width])
        # Blocks that hold states are always copied whole.
        whole = np.where(states.groups[:, H.kind] == records.RECURRENT, 0, states.groups[:, H.width])
        self._levels = Levels(states.pool_ids.each(whole))
        self.order = None if device.synchronous else Order(device, states.blocks)
        self.moved = Traffic(states.groups, token_bytes)
        self.broken: DeviceError | None = None
        # The batch that is being enqueued, its copy ops in pieces that are enqueued one after the other, how many of
        # them are, how many streams have their token moves, whether the next one perhaps has, and ``loaded`` of
        # ``Order.hold_back`` for it.
        self._begun: Decision | None = None
        self._pieces: list[tuple[Int64s, int]] = []
        self._copied = self._shifted = 0
        self._shifting = False
        self._loaded: int | None = None
        self.at_once = device.at_once
        # It ends with this object or with ``close``.
        self._worker = Worker()
        self.start: Callable[[Callable[[], None]], object] = self._worker.post
        # Parts with locks of their own add them.
        self.forks = Process("pool")
        self.forks.guard(self, "lock", "state_lock")
        self._loads: LayerEvents | None = None

    @property
    def guards(self) -> int:
        """The rules that are on, as ``kvpool.state.records`` names them. All are on, except in a test."""
        return self._numbers[H.guards]

    def put_layers(self, loads: LayerEvents) -> None:
        """Load layer by layer what the decision that is being made loads. The caller holds the state lock, and lets its
        streams wait for the events."""
        self._loads, loads.events = loads, []

    def note(self, accesses: Int64s) -> None:
        """Add accesses, int64[n, 3], to the next decision. Safe in a destructor that runs inside any call."""
        self._notes[next(self._numbers_of_notes)] = accesses

    def collect(self) -> bool:
        """Give the copy ops and accesses of the decision just made their ticket, and queue them. Returns False if it
        made none. The caller holds the state lock.

        A destructor may decide in the middle of this. It collects what it finds in the buffers before its own decision.
        """
        while self._left != self._nothing or self._notes:
            moved, shifts, noted = map(sum, zip(*self._left, strict=True))
            copy_ops, accesses = np.empty((moved, 5), np.int64), np.empty((noted, 3), np.int64)
            shifted = np.empty((shifts, 4), np.int64) if shifts else NO_TOKEN_MOVES
            take = partial(collect, self._states.groups, copy_ops, shifted, accesses)
            if self._changes.run(take, finish=partial(self._queue_up, copy_ops, shifted, accesses, {})) >= 0:
                return True
        self._loads = None  # An admission of nothing loads nothing, and the next decision may be anybody's.
        return False

    def _queue_up(
        self, copy_ops: Int64s, token_moves: Int64s, accesses: Int64s, noted: dict[int, Int64s], ticket: int
    ) -> None:
        """Queue what ``collect`` took out of the state. Done twice, it is queued once. ``noted``: notes that go with
        it."""
        if ticket < 0:
            return
        if ticket > self._enqueued and ticket not in self._queue:
            noted.update(self._notes)
            accesses = np.concatenate([*noted.values(), accesses])
            self._queue[ticket] = Decision(ticket, copy_ops, token_moves, accesses, self._loads, [])
        self._loads = None
        for number in noted:
            self._notes.pop(number, None)
        if self._changes.hold is None:
            self._decided = max(self._decided, ticket)

    def let_go(self) -> None:
        """Let ``drain`` enqueue what was decided under a ``LockHold``. The caller holds the state lock."""
        self._decided = max(self._decided, max(self._queue, default=-1))

    @property
    def enqueuing(self) -> bool:
        """Whether this thread has the transfer lock. Then it runs a destructor, inside the call that took the lock."""
        return bool(getattr(self.lock, "_is_owned", bool)())  # A test may put a lock without it here.

    @property
    def waiting(self) -> bool:
        """Whether a batch of any thread is decided and perhaps not enqueued yet."""
        return self._enqueued < self._decided and bool(self.guards & records.OTHERS_BATCHES_TOO)

    def may_lag(self) -> bool:
        """Whether all that is queued may be enqueued behind the call that decided it: many copy ops, and nothing that a
        stream of a caller has to wait for, or has to have done. The caller holds the state lock."""
        most = self.at_once
        if most is None or self.order is None or sum(len(batch.copy_ops) for batch in self._queue.values()) < most:
            return False
        if not self.guards & records.HANDED_OUT_IS_ENQUEUED:
            return True
        return not any(len(batch.accesses) or len(batch.token_moves) for batch in self._queue.values())

    def drain_later(self) -> None:
        """``drain`` in the thread of this pool. All calls but those whose decisions may lag too wait for it. In a child
        of a fork there is no such thread, and the next call enqueues."""
        try:
            self.start(self.drain)
        except RuntimeError:  # The system, or an interpreter that ends, gives no more threads.
            self.drain()

    def close(self) -> None:
        """Wait until everything decided is enqueued and the thread has ended. Nobody decides any more. The caller holds
        no lock."""
        try:
            self.drain()
            with self.lock:
                pass  # An upload that found the pool open is enqueued now.
        finally:
            self._worker.close()

    def _is_large(self, batch: Decision) -> bool:
        return self.at_once is not None and len(batch.copy_ops) > self.at_once

    def _cut_large(self) -> None:
        """Cut large batches before anybody holds the transfer lock for them. Who comes to one first has to cut it."""
        for batch in list(self._queue.values()) if self.at_once is not None else ():
            if self._is_large(batch) and not batch.levels:
                batch.levels[:] = self._independent(batch.copy_ops)

    def drain(self) -> None:
        """Enqueue every batch decided before this call, oldest first. Takes the transfer lock, for a part of a large
        batch at a time. The caller holds no lock.

        Does nothing in a destructor that runs inside it: the interrupted call enqueues everything that is queued. Nor
        if the state is in doubt: no byte moves then.
        """
        if self.enqueuing:
            return
        self._cut_large()
        while self._enqueued < self._decided and self._changes.torn is None:
            with self.lock:
                batch = self._begun
                if batch is None:
                    batch = self._begin()
                    if batch is None:
                        return  # The thread that decided it will enqueue it.
                    if self._is_large(batch):
                        continue
                self._enqueue(batch)

    def drain_accesses(self) -> None:
        """``drain`` inside a hold of the transfer lock, while a stream of a caller has to wait for something decided.
        The caller is in no other call that enqueues."""
        while self.waiting and self._changes.torn is None:
            if not any(len(batch.accesses) for batch in list(self._queue.values())):
                return
            batch = self._begun or self._begin()
            if batch is None:
                return
            self._enqueue(batch)

    def _enqueue(self, batch: Decision) -> None:
        """Enqueue what is left of a batch, or the next piece of a large one."""
        large = self._is_large(batch)
        while self._copied < len(self._pieces):
            some, direction = self._pieces[self._copied]
            if direction != records.ONBOARD or not self._load(some, batch.loads):
                self._copy(some, batch.ticket, direction)
            self._copied += 1
            if large:
                return
        self._end(batch)

    def _begin(self) -> Decision | None:
        """Begin with the next batch, if there is one."""
        in_order = self.guards & records.TICKET_ORDER
        batch = self._queue.get(self._enqueued + 1 if in_order else max(self._queue, default=-1))
        if batch is None:
            return None
        order = self.order
        if len(batch.accesses) and order is not None:
            self._attempt_order(order.accessed, batch.accesses)
        self._loaded = None if batch.loads is None or order is None else order.loaded
        self._pieces = list(self._cut(batch))
        self._copied = self._shifted = 0
        self._shifting = False
        self._begun = batch
        return batch

    def _cut(self, batch: Decision) -> Iterator[tuple[Int64s, int]]:
        """The batch that begins in pieces that are enqueued one after the other, each in one hold of the lock."""
        for some, direction in batch.levels or (self._independent(batch.copy_ops) if len(batch.copy_ops) else ()):
            step = len(some) if self.at_once is None or self._loaded is not None else self.at_once
            for first in range(0, len(some), step):
                yield some[first : first + step], direction

    def pending(self, ids: Int64s, *, writes: bool = False) -> list[DeviceEvent]:
        """The events to wait for before the host reads blocks whose copies are enqueued, or, with ``writes``, before it
        writes them. Takes the transfer lock."""
        if self.order is None or not self.guards & records.READER_WAITS:
            return []
        with self.lock:
            return self.order.pending(ids, writes)

    def event_behind(self, stream: Stream) -> DeviceEvent:
        """An event behind all that is enqueued on ``stream``. Takes the transfer lock. Waits for the device where the
        stream was destroyed. Raises DeviceError, and ValueError for a stream that is being captured."""
        with self.lock:
            with suppress(StreamGone):
                self.as_stream(stream)
            return event_behind(self._device, stream)

    def wait_for(self, stream: Stream, event: DeviceEvent) -> None:
        """Have all work that is enqueued on ``stream`` from now on wait for an event. Takes the transfer lock. Raises
        DeviceError."""
        if self.guards & records.ENGINE_READS_LAYER_AFTER_COPY:
            with self.lock:
                self._device.wait(stream, event)

    def follow(self, stream: Stream) -> None:
        """Have all work that is enqueued on ``stream`` from now on wait for all copies enqueued so far. Takes the
        transfer lock. Raises DeviceError."""
        if self.order is not None:
            with self.lock:
                self.order.follow_copies(stream)

    def decide(
        self,
        stream: Stream | None,
        ids: Int64s | None,
        make: Callable[..., Any],
        *call: Any,
    ) -> Any:
        """``make`` a call of a verb, which is its function and arguments, on a device that is not synchronous.
        ``stream`` is the one that the call names, if any.

        ``ids`` are the sequences of the call, None for all live ones. The caller holds the state lock. Raises
        ValueError if work cannot be enqueued on the stream of one of them now; nothing has been decided then.
        """
        named = self._named
        before = named[0][0]
        if stream is None and ids is not None:
            self.check_streams(ids)
        try:
            slot = records.NONE if stream is None else self.slot(stream)
            for place in named:
                place[0] = slot
            return make(*call)
        finally:
            for place in named:
                place[0] = before

    def check_streams(self, ids: Int64s) -> None:
        """Raise ValueError if a sequence was last used on a stream on which no work can be enqueued now. The caller has
        to name another stream."""
        if self.order is None:
            return
        streams = self._states[0].sequences["stream"]
        for slot in set(streams[(ids & 0xFFFFFFFF) % len(streams)].tolist()):
            self.as_stream(self.order.stream(slot))

    def as_stream(self, stream: Any) -> Stream:
        """``Device.as_stream``. A permanent failure of the device may be noticed here first."""
        try:
            return self._device.as_stream(stream)
        except DeviceError as error:
            if error.sticky:
                self.fail(error)
            raise

    def fail(self, error: DeviceError) -> None:
        """Count the device as broken, by its first error. The error itself is not kept: its frames refer to the pool,
        which would then keep its memory and events until the garbage collector finds it."""
        self.broken = self.broken or DeviceError(str(error), sticky=True)

    def slot(self, stream: Stream) -> int:
        """The small number of a stream. The caller holds the state lock."""
        assert self.order is not None
        return self.order.slot(stream, self._idle)

    def _idle(self) -> Bools:
        """Which streams no sequence uses and no batch names. While there are batches, none is idle."""
        sequences = self._states[0].sequences
        idle = np.full(1 << 16, not self._queue and not self._notes)
        idle[sequences["stream"][sequences["live"] != 0]] = False
        return idle

    def _independent(self, copy_ops: Int64s) -> Iterator[tuple[Int64s, int]]:
        """Yield the copies level by level, with the stream of each part. Those of one part can run in any order."""
        cut = self._device.copies and self.guards & records.LEVELS
        for level in self._levels.cut(copy_ops) if cut else [copy_ops]:
            if self.order is None:
                yield level, records.ONBOARD
                continue
            for direction in range(DIRECTIONS):
                which = level[:, DIRECTION] == direction
                if which.any():
                    yield level if which.all() else level[which], direction

    def _end(self, batch: Decision) -> None:
        """Enqueue what comes after the copy ops of a batch, and count it as enqueued. Targets whose copy ops were not
        enqueued lose their content."""
        if len(batch.accesses) and self.order is not None:
            self._attempt_order(self.order.hold_back, batch.accesses, self.guards, self._loaded)
        if len(batch.token_moves):
            self._move_tokens(batch.token_moves, batch.ticket)
        with self.state_lock, self._changes:
            lost = [(target, ticket) for target, ticket in self._lost.items() if ticket == batch.ticket]
            end = partial(self._count_as_enqueued, batch.ticket)
            if lost and self.guards & records.LOST_CONTENT_IS_FORGOTTEN:
                self._changes.run(partial(verbs.lose, self._states.groups, np.array(lost, np.int64)), finish=end)
            else:
                end()

    def _count_as_enqueued(self, ticket: int, _: object = None) -> None:
        """Take a batch out of the queue. Done twice, it counts once: there is no call between these lines."""
        if ticket in self._queue:
            self._enqueued += 1
            self._begun = None
            del self._queue[ticket]
        if not self._queue:
            self._lost.clear()

    def _load(self, copy_ops: Int64s, loads: LayerEvents | None) -> bool:
        """Enqueue loads that do not depend on each other, one part of the layers after the other, if the batch wants
        that. Returns whether the device has taken all; if not, none counts as enqueued, and the caller's streams wait
        for all loads of the batch."""
        order, device, loaded = self.order, self._device, self._loaded
        events: list[DeviceEvent] = []
        self._loaded = None
        if order is None or loads is None or loaded is None or self._lost or self.broken is not None:
            return False
        on, begun = order.stream(records.ONBOARD), perf_counter_ns()
        rows = np.ascontiguousarray(copy_ops[:, :DIRECTION])
        try:
            order.before_copies(copy_ops, records.ONBOARD, self.guards)
            for part in range(loads.parts):
                device.copy_blocks(rows, on, Layers(part, loads.parts))
                events.append(device.record(on))
            order.after_copies(copy_ops, records.ONBOARD)
        except BaseException as error:
            self._failed(error)
            return False
        loads.events, self._loaded = events, loaded
        self.moved.add(copy_ops, perf_counter_ns() - begun)
        return True

    def _copy(self, copy_ops: Int64s, ticket: int, stream: int) -> None:
        """Enqueue copies that do not depend on each other. After one has failed, in this batch or before, the others
        are enqueued one by one, except those that read a lost block."""
        order, first = self.order, 0
        on = NULL_STREAM if order is None else order.stream(stream)
        while first < len(copy_ops):
            some = copy_ops[first : first + 1] if self._lost else copy_ops
            stale = bool(self._lost) and self._lost.get(int(some[0, SOURCE])) == some[0, TICKET]
            if order is not None and not stale:
                self._attempt_order(order.before_copies, some, stream, self.guards)
            completed, begun = 0, perf_counter_ns()
            try:
                if self.broken is None and not stale:
                    self._device.copy_blocks(np.ascontiguousarray(some[:, :DIRECTION]), on)
                    completed = len(some)
            except BaseException as error:
                completed = self._failed(error).completed
            if self.broken is None and not stale:
                self.moved.add(some[:completed], perf_counter_ns() - begun)
                if order is not None:
                    self._attempt_order(order.after_copies, some, stream)
                    completed = completed if self.broken is None else 0
            if completed < len(some):
                self._lost[int(some[completed, TARGET])] = ticket
                completed += 1
            first += completed

    def _move_tokens(self, token_moves: Int64s, ticket: int) -> None:
        """Enqueue token moves, each on the stream of its sequence. If some fail, the blocks that they should have
        written are lost."""
        order, width = self.order, self._width
        for slot in np.unique(token_moves[:, 0]).tolist()[self._shifted :]:
            mine = token_moves[token_moves[:, 0] == slot]
            starts = np.flatnonzero(np.diff(mine[:, 1], prepend=-1, append=-1))
            # Some of them may be enqueued already, and made again they would move other tokens.
            in_doubt, self._shifting = self._shifting, True
            try:
                if self.broken is None and not in_doubt:
                    on = NULL_STREAM if order is None else order.stream(slot)
                    self._device.enqueue(TokenMoves(np.ascontiguousarray(mine[:, 2:]), starts), on)
            except BaseException as error:
                self._failed(error)
                in_doubt = True
            if in_doubt:
                self._lost.update(dict.fromkeys((mine[:, 3] // width).tolist(), ticket))
            if order is not None and self.guards & records.TOKENS_MOVE_BEFORE_REUSE:
                # The slots that were dropped may already belong to other sequences. Their work must come after this as
                # well.
                read = [(ACCESSED, slot, block) for block in np.unique(mine[:, 2] // width).tolist()]
                self._attempt_order(order.accessed, np.array(read, np.int64))
            self._shifted += 1
            self._shifting = False

    def upload(self, work: Work | None, stream: Stream) -> tuple[DeviceEvent, list[DeviceError]]:
        """Enqueue staged tables. Returns an event behind what is enqueued, and why the device refused some of it. With
        None, only the event.

        The caller holds the transfer lock. Raises DeviceError if the device can order no more work: it counts as broken
        then.
        """
        refused = list[DeviceError]()
        try:
            try:
                if work is not None and self.broken is None:
                    return self._device.upload(work, stream), refused
            except DeviceError as error:
                if error.sticky:
                    raise
                refused.append(error)
            if self.broken is None:
                return self._device.record(stream), refused
        except BaseException as error:
            self.fail(self._failed(error))
        # Not inside the handler: whoever kept the first error would be kept by its frames.
        raise DeviceError(f"the device has failed: {self.broken}", sticky=True)

    def _attempt_order(self, call: Callable[..., object], *args: Any) -> None:
        """Call the device, if it still works. If streams cannot be ordered, it counts as broken, since somebody would
        read too early or be overwritten."""
        if self.broken is None:
            try:
                call(*args)
            except BaseException as error:
                self.fail(self._failed(error))

    def _failed(self, error: BaseException) -> DeviceError:
        """What an error of the device means. Raises what a signal handler has raised meanwhile: the next call goes on
        where this one was. After any other error but DeviceError nobody knows what was done, so the device counts as
        broken."""
        if isinstance(error, DeviceError):
            failure = error
        elif from_handler(error):
            raise error
        else:
            failure = DeviceError(f"{type(error).__name__}: {error}", sticky=True)
        if failure.sticky:
            self.fail(failure)
        return failure
