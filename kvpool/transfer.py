"""From decisions to copies: batches of moves in the order of their tickets, and what becomes of a batch that a device refuses.

State decides under the state lock, where each batch takes the next ticket and joins the queue; whoever then holds the transfer lock
enqueues what is queued, strictly in that order. The transfer lock is taken before the state lock, never while holding it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool import guards
from kvpool.device.base import SOURCE, TARGET, TICKET, Device, Event
from kvpool.errors import DeviceError
from kvpool.levels import Levels
from kvpool.order import OFFLOAD, ONBOARD, WITHIN, Order
from kvpool.state import blocks, holds
from kvpool.state.blocks import State

NO_ACCESSES: npt.NDArray[np.int64] = np.zeros((0, 3), np.int64)
NO_MOVES: npt.NDArray[np.int64] = np.zeros((0, 4), np.int64)
NO_LOST: npt.NDArray[np.int64] = np.zeros((0, 2), np.int64)
Moves = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Batch:
    """One decision: moves int64[n, 4] (source, target, tokens, ticket of the source's content), accesses int64[m, 3] as in the state.

    ``behind`` is called when they are enqueued, with the transfer lock held.
    """

    ticket: int
    moves: Moves
    accesses: npt.NDArray[np.int64]
    behind: Callable[[], object] | None


class Transfer:
    """The queue of decided batches.

    ``broken`` is the device error that will not go away, or None; ``order`` is None where nothing runs behind its caller.
    """

    def __init__(self, state: State, state_lock: AbstractContextManager[Any], device: Device) -> None:
        self._state, self._state_lock, self._device = state, state_lock, device
        self._lock = threading.Lock()
        self._queue: deque[Batch] = deque()
        self._lost: dict[int, int] = {}
        self._decided = self._enqueued = -1
        self._levels = Levels(len(state.blocks), int(state.header[blocks.WIDTH]))
        self.order = None if device.synchronous else Order(device, len(state.blocks))
        self.broken: DeviceError | None = None
        self._exit: BaseException | None = None
        self._behind: Callable[[], object] | None = None
        self.guards = guards.ALL

    def put_behind(self, call: Callable[[], object]) -> None:
        """Have ``call`` enqueue more behind the decision being made; its DeviceError breaks the device. The caller holds the state lock."""
        self._behind = call

    def collect(self, accesses: npt.NDArray[np.int64] = NO_ACCESSES) -> bool:
        """Give the moves and accesses of the decision just made their ticket; False if it made none. The caller holds the state lock."""
        header = self._state.header
        moves, noted = int(header[blocks.MOVES]), int(header[blocks.ACCESSES])
        if noted:
            accesses = self._state.accesses[:noted].copy()
        if moves or len(accesses) or self._behind is not None:
            self._decided = int(header[blocks.TICKET])
            behind, self._behind = self._behind, None
            self._queue.append(Batch(self._decided, self._state.moves[:moves].copy() if moves else NO_MOVES, accesses, behind))
            header[blocks.MOVES] = header[blocks.ACCESSES] = 0
            header[blocks.TICKET] += 1
            return True
        return False

    @property
    def waiting(self) -> bool:
        """Whether a decided batch, this thread's or another's, may not be enqueued yet."""
        return self._enqueued < self._decided and bool(self.guards & guards.OTHERS_BATCHES_TOO)

    def drain(self) -> None:
        """Enqueue every batch decided before this call, oldest first. Takes the transfer lock; the caller holds no lock."""
        last = self._decided
        while self._enqueued < last:
            with self._lock:
                if self._enqueued < last:
                    batch = self._queue[0 if self.guards & guards.TICKET_ORDER else -1]
                    self._acknowledge(batch, self._enqueue(batch))
                    if self._exit is not None:
                        leaving, self._exit = self._exit, None
                        raise leaving

    def pending(self, ids: npt.NDArray[np.int64], *, writes: bool = False) -> list[Event]:
        """Events to wait for before the host reads (``writes``: or writes) blocks whose copies are enqueued. Takes the transfer lock."""
        if self.order is None or not self.guards & guards.READER_WAITS:
            return []
        with self._lock:
            return self.order.pending(ids, writes)

    def _acknowledge(self, batch: Batch, lost: npt.NDArray[np.int64]) -> None:
        """A batch is on its way, except for the moves to ``lost`` targets (block, ticket), which lose their content."""
        with self._state_lock:
            if len(lost) and self.guards & guards.LOST_CONTENT_IS_FORGOTTEN:
                holds.lose(self._state.header, lost)
            self._queue.remove(batch)
            self._enqueued = self._queue[0].ticket - 1 if self._queue else self._decided
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
        if batch.behind is not None:
            self._attempt_order(batch.behind)
        lost = [(target, ticket) for target, ticket in self._lost.items() if ticket == batch.ticket]
        return np.array(lost, np.int64) if lost else NO_LOST

    def _copy_by_direction(self, moves: Moves, ticket: int) -> None:
        boundary = self._state.header[blocks.DEVICE_BLOCKS]
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
        try:
            if self.order is None:
                self._attempt(self._device.copy_blocks, moves)
            else:
                self._attempt(self.order.copy, moves, stream, self.guards)
        except DeviceError as error:
            if error.sticky:
                self.broken = error
            return error.completed
        return len(moves) if self.broken is None else 0

    def _attempt_order(self, call: Any, *args: Any) -> None:
        """Streams that cannot be ordered break the device: the engine would read too early, or be overwritten."""
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
