"""From decisions to copies: batches of moves in the order of their tickets, and what becomes of a batch that a device refuses.

State decides under the state lock, where each batch takes the next ticket and joins the queue; whoever then holds the transfer lock
enqueues what is queued, strictly in that order. The transfer lock is taken before the state lock, never while holding it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool import guards
from kvpool.device.base import NULL_STREAM, SOURCE, TARGET, TICKET, Device, Event, Stream
from kvpool.errors import DeviceError
from kvpool.levels import Levels
from kvpool.moved import Moved
from kvpool.order import OFFLOAD, ONBOARD, WITHIN, Order
from kvpool.state import blocks, groups
from kvpool.state.accesses import ACCESSED, hand_over
from kvpool.state.blocks import ACCESSES, MOVES, TOKEN_MOVES
from kvpool.state.states import State, States

NO_LOST: npt.NDArray[np.int64] = np.zeros((0, 2), np.int64)
NO_MOVES: npt.NDArray[np.int64] = np.zeros((0, 4), np.int64)
NO_IDS: npt.NDArray[np.int64] = np.empty(0, np.int64)
Moves = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int64] | None


class Batch(NamedTuple):
    """One decision: moves int64[n, 4] (source, target, tokens, ticket of the source's content), token moves int64[k, 4] and accesses
    int64[m, 3] as in the state. Tokens move on the engine's streams, behind the moves.

    ``behind`` is called when they are enqueued, with the transfer lock held.
    """

    ticket: int
    moves: Moves
    token_moves: Moves
    accesses: npt.NDArray[np.int64]
    behind: Callable[[], object] | None


class Transfer:
    """The queue of decided batches. ``token_bytes`` are the bytes of a token in each group of layers.

    ``broken`` is the device error that will not go away, or None; ``order`` is None where nothing runs behind its caller; ``moved`` is what
    the device has taken.
    """

    def __init__(self, states: States, state_lock: AbstractContextManager[Any], device: Device, token_bytes: Sequence[int]) -> None:
        self._states, self._state_lock, self._device = states, state_lock, device
        # The headers without an array around them: what a decision left is asked twice in every call.
        self._numbers, self._bases = states.heads.reshape(-1).data, range(0, states.heads.size, blocks.HEADER)
        self._lock = threading.Lock()
        self._queue: dict[int, Batch] = {}
        self._notes: deque[npt.NDArray[np.int64]] = deque()
        self._draining = 0
        self._lost: dict[int, int] = {}
        self._decided = self._enqueued = -1
        self._width = int(states.heads[0, blocks.WIDTH])
        self._levels = Levels(states.blocks, self._width, _states_of(states.heads))
        self.order = None if device.synchronous else Order(device, states.blocks)
        self.moved = Moved(states.heads, states.device_blocks, token_bytes)
        self.broken: DeviceError | None = None
        self._exit: BaseException | None = None
        self._behind: Callable[[], object] | None = None
        self.guards = guards.ALL

    def put_behind(self, call: Callable[[], object]) -> None:
        """Have ``call`` enqueue more behind the decision being made; its DeviceError breaks the device. The caller holds the state lock."""
        self._behind = call

    def note(self, accesses: npt.NDArray[np.int64]) -> None:
        """Have accesses, int64[n, 3], go with the next decision. Safe in a destructor that runs inside any call."""
        self._notes.append(accesses)

    def collect(self) -> bool:
        """Give the moves and accesses of the decision just made their ticket; False if it made none. The caller holds the state lock.

        A destructor or signal handler may decide in the middle of this: what it finds in the buffers goes before its own.
        """
        numbers, bases = self._numbers, self._bases
        while True:
            moved = noted = shifts = 0
            for base in bases:
                moved += numbers[base + MOVES]
                noted += numbers[base + ACCESSES]
                shifts += numbers[base + TOKEN_MOVES]
            if not (moved or noted or shifts or self._notes or self._behind is not None):
                return False
            moves, own = np.empty((moved, 4), np.int64), np.empty((noted, 3), np.int64)
            shifted = np.empty((shifts, 4), np.int64) if shifts else NO_MOVES
            ticket = int(hand_over(self._states.heads, moves, shifted, own))
            if ticket != blocks.NONE:
                behind, self._behind = self._behind, None
                self._queue[ticket] = Batch(ticket, moves, shifted, self._with_notes(own), behind)
                self._decided = max(self._decided, ticket)
                return True

    def _with_notes(self, accesses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        while self._notes:
            with suppress(IndexError):
                accesses = np.concatenate([self._notes.popleft(), accesses])
        return accesses

    @property
    def enqueuing(self) -> bool:
        """Whether this thread has the transfer lock: then it is in a destructor or signal handler, inside the call that took it."""
        return self._draining == threading.get_ident()

    @property
    def waiting(self) -> bool:
        """Whether a decided batch, this thread's or another's, may not be enqueued yet."""
        return self._enqueued < self._decided and bool(self.guards & guards.OTHERS_BATCHES_TOO)

    def drain(self) -> None:
        """Enqueue every batch decided before this call, oldest first. Takes the transfer lock; the caller holds no lock.

        Does nothing in a destructor or signal handler that runs inside it: the call that was interrupted goes on with all that is queued.
        """
        if self.enqueuing:
            return
        while self._enqueued < self._decided:
            with self._lock:
                self._draining = threading.get_ident()
                try:
                    more = self._enqueue_next()
                finally:
                    self._draining = 0
            if not more:
                return

    def _enqueue_next(self) -> bool:
        """Enqueue one batch; False if the next one is not queued yet, as whoever decided it will see to it."""
        batch = self._queue.get(self._enqueued + 1 if self.guards & guards.TICKET_ORDER else max(self._queue, default=-1))
        if batch is None:
            return False
        self._acknowledge(batch, self._enqueue(batch))
        leaving, self._exit = self._exit, None
        if leaving is not None:
            raise leaving
        return True

    def pending(self, ids: npt.NDArray[np.int64], *, writes: bool = False) -> list[Event]:
        """Events to wait for before the host reads (``writes``: or writes) blocks whose copies are enqueued. Takes the transfer lock."""
        if self.order is None or not self.guards & guards.READER_WAITS:
            return []
        with self._lock:
            return self.order.pending(ids, writes)

    def follow(self, stream: Stream) -> None:
        """Have work enqueued on ``stream`` from now on wait for all copies enqueued so far. Takes the transfer lock. Raises DeviceError."""
        if self.order is not None:
            with self._lock:
                self.order.follow_copies(stream)

    def decide(self, stream: Stream | None, moves: int, ids: Ids, verb: Callable[..., Any], *args: Any) -> Any:
        """Run a verb on a device that runs behind, with room for what it says of streams; ``stream`` is the call's, if it names one.

        ``ids`` are the sequences that it concerns, None for all that live. The state lock is held by the caller.
        """
        heads = self._states.heads
        before = heads[0, blocks.STREAM]
        try:
            for state in self._states:
                state.reserve_accesses(_accesses(state, moves, ids))
            heads[:, blocks.STREAM] = blocks.NONE if stream is None else self.slot(stream)
            return verb(heads, *args)
        finally:
            heads[:, blocks.STREAM] = before

    def slot(self, stream: Stream) -> int:
        """The small number of a stream. The caller holds the state lock."""
        assert self.order is not None
        return self.order.slot(stream, self._idle)

    def _idle(self) -> npt.NDArray[np.bool_]:
        """Streams that no sequence uses and no batch names: none while there are batches."""
        sequences = self._states[0].sequences
        idle = np.full(1 << 16, not self._queue and not self._notes)
        idle[sequences["stream"][sequences["live"] != 0]] = False
        return idle

    def _acknowledge(self, batch: Batch, lost: npt.NDArray[np.int64]) -> None:
        """A batch is on its way, except for the moves to ``lost`` targets (block, ticket), which lose their content."""
        with self._state_lock:
            if len(lost) and self.guards & guards.LOST_CONTENT_IS_FORGOTTEN:
                groups.lose(self._states.heads, lost)
            del self._queue[batch.ticket]
            self._enqueued += 1
            if not self._queue:
                self._lost.clear()

    def _enqueue(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Hand a batch to the device; returns the (block, ticket) pairs of the targets that it will not reach."""
        order = self.order
        if order is not None and len(batch.accesses):
            self._attempt_order(order.accessed, batch.accesses)
        if len(batch.moves):
            for level in self._levels.cut(batch.moves) if self.guards & guards.LEVELS else [batch.moves]:
                if order is None:
                    self._copy(level, batch.ticket, ONBOARD)
                else:
                    self._copy_by_direction(level, batch.ticket)
        if order is not None and len(batch.accesses):
            self._attempt_order(order.hold_back, batch.accesses, self.guards)
        if len(batch.token_moves):
            self._move_tokens(batch.token_moves, batch.ticket)
        if batch.behind is not None:
            self._attempt_order(batch.behind)
        lost = [(target, ticket) for target, ticket in self._lost.items() if ticket == batch.ticket]
        return np.array(lost, np.int64) if lost else NO_LOST

    def _copy_by_direction(self, moves: Moves, ticket: int) -> None:
        boundary = self._states.device_blocks
        source_host, target_host = moves[:, SOURCE] >= boundary, moves[:, TARGET] >= boundary
        directions = ((OFFLOAD, target_host & ~source_host), (ONBOARD, source_host & ~target_host), (WITHIN, source_host == target_host))
        for stream, which in directions:
            if which.any():
                self._copy(moves if which.all() else moves[which], ticket, stream)

    def _copy(self, moves: Moves, ticket: int, stream: int) -> None:
        """Copies that do not depend on each other. Where one fails, or has failed before, the others are made one by one."""
        first = 0
        if not self._lost:
            first = self._attempt_copies(moves, stream)
            if first < len(moves):
                self._lost[int(moves[first, TARGET])] = ticket
                first += 1
        for i in range(first, len(moves)):
            source, target = int(moves[i, SOURCE]), int(moves[i, TARGET])
            stale = self._lost.get(source) == moves[i, TICKET]
            if stale or self._attempt_copies(moves[i : i + 1], stream) == 0:
                self._lost[target] = ticket
            else:
                self._lost.pop(target, None)

    def _attempt_copies(self, moves: Moves, stream: int) -> int:
        """Moves that the device took."""
        order = self.order
        if order is not None:
            self._attempt_order(order.before_copies, moves, stream, self.guards)
        completed, begun = len(moves), perf_counter_ns()
        try:
            self._attempt(self._device.copy_blocks, moves, NULL_STREAM if order is None else order.stream(stream))
        except DeviceError as error:
            completed = error.completed
            if error.sticky:
                self.broken = error
                return completed
        if self.broken is None:
            self.moved.add(moves[:completed], perf_counter_ns() - begun)
        if order is not None:
            self._attempt_order(order.after_copies, moves, stream)
        return completed if self.broken is None else 0

    def _move_tokens(self, moves: Moves, ticket: int) -> None:
        """Token moves, each on the stream of its sequence. Blocks that they should have written and did not are lost."""
        order, width = self.order, self._width
        for slot in np.unique(moves[:, 0]).tolist():
            mine = moves[moves[:, 0] == slot]
            starts = np.flatnonzero(np.diff(mine[:, 1], prepend=-1, append=-1))
            try:
                self._attempt(self._device.move_tokens, mine[:, 2:], starts, NULL_STREAM if order is None else order.stream(slot))
            except DeviceError as error:
                if error.sticky:
                    self.broken = error
                self._lost.update(dict.fromkeys((mine[:, 3] // width).tolist(), ticket))
            if order is not None and self.guards & guards.TOKENS_MOVE_BEFORE_REUSE:
                # What is dropped is free for others already, who come behind this as well.
                read = [(ACCESSED, slot, block) for block in np.unique(mine[:, 2] // width).tolist()]
                self._attempt_order(order.accessed, np.array(read, np.int64))

    def _attempt_order(self, call: Any, *args: Any) -> None:
        """Streams that cannot be ordered break the device: somebody would read too early, or be overwritten."""
        try:
            self._attempt(call, *args)
        except DeviceError as error:
            self.broken = error

    def _attempt(self, call: Any, *args: Any) -> None:
        """A call of the device, if it still works. After any error but DeviceError nobody knows what was done: the device is broken."""
        if self.broken is not None:
            return
        try:
            call(*args)
        except DeviceError:
            raise
        except BaseException as error:
            self.broken = DeviceError(f"{type(error).__name__}: {error}", sticky=True)
            if not isinstance(error, Exception):
                self._exit = error


def _states_of(heads: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The ranges of blocks that hold states, int64[n, 2]."""
    h = heads[heads[:, blocks.KIND] == blocks.RECURRENT].T
    device, host = h[blocks.DEVICE_FIRST], h[blocks.HOST_FIRST]
    first = np.concatenate([device, host + h[blocks.DEVICE_BLOCKS]])
    return np.stack([first, np.concatenate([device + h[blocks.DEVICE_BLOCKS], host + h[blocks.BLOCKS]])], axis=1)


def _accesses(state: State, moves: int, ids: Ids) -> int:
    """Most accesses of a verb in one group: one for each block it takes, holds or lets go (with a window both), 3 per sequence."""
    if ids is NO_IDS:
        return moves + 1
    held = state.sequences["blocks"]
    held = held if ids is None else held[(ids & 0xFFFFFFFF) % len(held)]
    whole = state.header[blocks.KIND] == blocks.ATTENTION and not state.header[blocks.WINDOW]
    return moves + (1 if whole else 2) * int(held.sum()) + 3 * len(held) + 1
