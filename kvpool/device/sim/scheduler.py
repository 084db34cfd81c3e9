"""The queues of all streams, and the execution of what is in them: one step of one stream at a time, in an order that Choices make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvpool.device.base import SOURCE, TARGET, TOKENS, Event
from kvpool.device.sim.choices import Choices
from kvpool.device.sim.mirror import Mirror, Piece
from kvpool.device.sim.order import Clock, new_clock
from kvpool.device.sim.reports import Access, Deadlock, Site

# A copy is done in about so many steps, however many moves it has: a few moves in pieces, the others in groups.
_STEPS = 16
_TORN = 4


class Entry(ABC):
    """Something in the queue of a stream."""

    @abstractmethod
    def passes(self) -> bool:
        """Whether it needs no work and is over, now that all before it is done."""


class Work(Entry):
    """What takes steps. ``bound`` says that it touches blocks."""

    access: Access
    bound: bool

    @abstractmethod
    def advance(self, choices: Choices) -> bool:
        """Take a step; returns whether it was the last one."""

    def passes(self) -> bool:
        return False


class Copy(Work):
    """Moves, in random order: the first ones in pieces, which other streams' steps come between, the others in groups."""

    bound = True

    def __init__(self, access: Access, moves: NDArray[np.int64], mirror: Mirror, chunk_bytes: int) -> None:
        self.access, self._moves, self._mirror, self._chunk_bytes = access, moves, mirror, chunk_bytes
        self._units: list[NDArray[np.int64] | tuple[int, int, Piece]] | None = None

    def advance(self, choices: Choices) -> bool:
        if self._units is None:
            self._units = self._cut(choices)
        if self._units:
            at = choices.choose(len(self._units))
            self._units[at], self._units[-1] = self._units[-1], self._units[at]
            unit = self._units.pop()
            if isinstance(unit, tuple):
                self._mirror.copy_piece(*unit)
            else:
                self._mirror.copy(unit)
        return not self._units

    def _cut(self, choices: Choices) -> list[NDArray[np.int64] | tuple[int, int, Piece]]:
        moves, torn = self._moves, min(len(self._moves), _TORN)
        if len(moves) > torn:
            moves = moves[choices.permutation(len(moves))]
        units: list[NDArray[np.int64] | tuple[int, int, Piece]] = []
        for i in range(torn):
            source, target, tokens = (int(moves[i, column]) for column in (SOURCE, TARGET, TOKENS))
            pieces = self._mirror.pieces(tokens, self._chunk_bytes, _STEPS // torn)
            units += [(source, target, piece) for piece in pieces]
        rest = moves[torn:]
        return units + [group for group in np.array_split(rest, _TORN) if len(group)]


class Launch(Work):
    """A function of the engine, in one step. ``run`` calls it and sees to what it wrote."""

    def __init__(self, access: Access, run: Callable[[], None], bound: bool) -> None:
        self.access, self._run, self.bound = access, run, bound

    def advance(self, choices: Choices) -> bool:
        self._run()
        return True


class SimEvent(Event):
    """A point on the stream ``queue``, after which everything of ``clock`` is done."""

    __slots__ = ("clock", "done", "queries", "queue", "site")

    def __init__(self, queue: Queue, site: Site) -> None:
        self.queue, self.clock, self.site = queue, queue.clock, site
        self.done, self.queries = False, 0


class Record(Entry):
    """Completes its event."""

    def __init__(self, event: SimEvent) -> None:
        self.event = event

    def passes(self) -> bool:
        self.event.done = True
        return True


class Wait(Entry):
    """Holds its stream until an event is complete."""

    def __init__(self, event: SimEvent, access: Access) -> None:
        self.event, self.access = event, access

    def passes(self) -> bool:
        return self.event.done


class Stall(Entry):
    """Holds its stream until it is opened."""

    def __init__(self, access: Access) -> None:
        self.access, self.opened = access, False

    def passes(self) -> bool:
        return self.opened


class Queue:
    """A stream: what is enqueued and not done, and the clock of the next thing on it."""

    def __init__(self, name: str, handle: int, lane: int) -> None:
        self.name, self.handle, self.lane = name, handle, lane
        self.clock: Clock = new_clock(lane + 1)
        self.entries: deque[Entry] = deque()


class Scheduler:
    """Takes steps. Nothing here locks; whoever owns it does. ``finished`` is called after the last step of each work."""

    def __init__(self, choices: Choices, finished: Callable[[Work], None]) -> None:
        self._choices, self._finished = choices, finished
        self._busy: dict[int, Queue] = {}
        self.steps = 0

    def add(self, queue: Queue, entry: Entry) -> None:
        queue.entries.append(entry)
        self._busy[queue.lane] = queue

    def runnable(self) -> list[Queue]:
        """Streams that can take a step. A record on an idle stream takes one too: an event is never complete at once."""
        return [queue for queue in self._busy.values() if isinstance(queue.entries[0], Work | Record)]

    def poll(self) -> None:
        """Take as many steps as the choices of early progress say."""
        while ready := self.runnable():
            at = self._choices.early(len(ready))
            if at < 0:
                return
            self._step(ready[at])

    def run(self, steps: int | None) -> int:
        """Take up to ``steps`` steps, or all that can be taken; returns how many."""
        taken = 0
        while (steps is None or taken < steps) and (ready := self.runnable()):
            self._step(ready[self._choices.choose(len(ready))])
            taken += 1
        return taken

    def finish(self, event: SimEvent | None) -> None:
        """Take steps, of any stream, until ``event`` or (None) everything is done. Raises Deadlock."""
        while self._busy if event is None else not event.done:
            if not self.run(1):
                raise Deadlock(f"waiting for {_name(event)} can never end:\n{self.stuck()}")

    def toward(self, event: SimEvent) -> None:
        """Take one step without which ``event`` cannot be complete, if it can be taken now."""
        queue = event.queue
        while isinstance(head := queue.entries[0], Wait):
            queue = head.event.queue
        if not isinstance(head, Stall):
            self._step(queue)

    def settle(self) -> None:
        """Let everything pass that needs no work."""
        moved = True
        while moved:
            moved = False
            for queue in list(self._busy.values()):
                while queue.entries and queue.entries[0].passes():
                    queue.entries.popleft()
                    moved = True
                if not queue.entries:
                    del self._busy[queue.lane]

    def drop_bound(self) -> None:
        """Forget all work that touches blocks."""
        for queue in list(self._busy.values()):
            queue.entries = deque(entry for entry in queue.entries if not (isinstance(entry, Work) and entry.bound))
            if not queue.entries:
                del self._busy[queue.lane]
        self.settle()

    def stuck(self) -> str:
        """What every stream that has not finished is at."""
        return "\n".join(f"    {queue.name} is at {_describe(queue.entries[0])}" for queue in self._busy.values())

    def _step(self, queue: Queue) -> None:
        self.steps += 1
        head = queue.entries[0]
        if isinstance(head, Work) and head.advance(self._choices):
            queue.entries.popleft()
            self._finished(head)
        self.settle()


def _describe(entry: Entry) -> str:
    if isinstance(entry, Wait):
        return f"{entry.access}\n      for {_name(entry.event)}"
    if isinstance(entry, Stall):
        return f"a closed gate: {entry.access}"
    return str(entry.access) if isinstance(entry, Work) else "a record"


def _name(event: SimEvent | None) -> str:
    return "everything" if event is None else f"the event of {Access('record', event.queue.name, event.site)}"
