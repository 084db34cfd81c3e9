"""From decisions to copies: batches of moves in the order of their tickets, and what becomes of a batch that a device refuses.

State decides under the state lock, where each batch takes the next ticket and joins the queue; whoever then holds the transfer lock
enqueues what is queued, strictly in that order. The transfer lock is taken before the state lock, never while holding it.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.device.base import SOURCE, TARGET, TICKET, Device, Stream
from kvpool.errors import DeviceError
from kvpool.state import blocks, holds
from kvpool.state.blocks import State


class Batch(NamedTuple):
    """Moves int64[n, 4] (source, target, tokens, ticket of the source's content) of one decision."""

    ticket: int
    moves: npt.NDArray[np.int64]
    stream: Stream


class Transfer:
    """The queue of decided batches. ``broken`` is the device error that will not go away, or None."""

    def __init__(self, state: State, state_lock: AbstractContextManager[Any], device: Device) -> None:
        self._state, self._state_lock, self._device = state, state_lock, device
        self._lock = threading.Lock()
        self._queue: deque[Batch] = deque()
        self._lost: dict[int, int] = {}
        self._decided = self._enqueued = -1
        self.broken: DeviceError | None = None

    def collect(self, stream: Stream) -> None:
        """Give the moves of the decision just made their ticket. The state lock is held by the caller."""
        header = self._state.header
        count = header[blocks.MOVES]
        if count:
            self._queue.append(Batch(int(header[blocks.TICKET]), self._state.moves[:count].copy(), stream))
            header[blocks.MOVES] = 0
            self._decided = int(header[blocks.TICKET])
            header[blocks.TICKET] += 1

    @property
    def waiting(self) -> bool:
        """Whether a decided batch may not be enqueued yet."""
        return self._enqueued < self._decided

    def drain(self) -> None:
        """Enqueue every batch decided before this call, oldest first. Takes the transfer lock; the caller holds no lock."""
        last = self._decided
        while self._enqueued < last:
            with self._lock:
                if self._enqueued < last:
                    self._acknowledge(self._enqueue(self._queue[0]))

    def _acknowledge(self, lost: npt.NDArray[np.int64]) -> None:
        """The oldest batch is on its way, except for the moves to ``lost`` targets (block, ticket), which lose their content."""
        with self._state_lock:
            if len(lost):
                holds.lose(self._state.header, lost)
            self._enqueued = self._queue.popleft().ticket
            if not self._queue:
                self._lost.clear()

    def _enqueue(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Hand a batch to the device; returns the (block, ticket) pairs of the targets that it will not reach."""
        first = 0
        if not self._lost:
            first = self._copy(batch.moves, batch.stream)
            if first < len(batch.moves):
                self._lost[int(batch.moves[first, TARGET])] = batch.ticket
                first += 1
        for i in range(first, len(batch.moves)):
            source, target = int(batch.moves[i, SOURCE]), int(batch.moves[i, TARGET])
            stale = self._lost.get(source) == batch.moves[i, TICKET]
            if stale or self._copy(batch.moves[i : i + 1], batch.stream) == 0:
                self._lost[target] = batch.ticket
            else:
                self._lost.pop(target, None)
        lost = [(target, ticket) for target, ticket in self._lost.items() if ticket == batch.ticket]
        return np.array(lost, np.int64).reshape(-1, 2)

    def _copy(self, moves: npt.NDArray[np.int64], stream: Stream) -> int:
        """Moves that the device took. After any error but DeviceError nobody knows what was copied: the device counts as broken."""
        if self.broken is not None:
            return 0
        try:
            self._device.copy_blocks(moves, stream)
        except DeviceError as error:
            if error.sticky:
                self.broken = error
            return error.completed
        except BaseException as error:
            self.broken = DeviceError(f"{type(error).__name__}: {error}", sticky=True)
            if not isinstance(error, Exception):
                raise
            return 0
        return len(moves)
