"""The queues of all streams, and the execution of their work: one step of one stream at a time, in an order that
Choices decide."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from kvpool.common.arrays import Int64s
from kvpool.device.base import NULL_STREAM, DeviceEvent, Stream
from kvpool.device.regions import Layers
from kvpool.device.sim.order import LANES, Access, Clock, Rows, Site, new_clock
from kvpool.device.sim.shadow import Shadow


class Choices(ABC):
    """The source of all decisions of a ``SimDevice``. Equal choices and equal calls give equal schedules.

    Notes
    -----
    Not thread-safe: the device calls it under its lock.
    """

    @abstractmethod
    def choose(self, n: int) -> int:
        """Choose one of several ways to continue.

        Parameters
        ----------
        n : int
            The number of ways, 1 or more.

        Returns
        -------
        int
            The index of the way, from 0 to ``n - 1``.
        """

    def early(self, n: int) -> int:
        """Choose which stream takes a step at a call that forces none.

        Parameters
        ----------
        n : int
            The number of streams that can take a step.

        Returns
        -------
        int
            The index of the stream, or -1 for none.
        """
        return self.choose(n + 1) - 1

    def permutation(self, n: int) -> Int64s:
        """Choose an order of several items.

        Parameters
        ----------
        n : int
            The number of items.

        Returns
        -------
        ndarray of int64, shape (n,)
            A permutation of ``range(n)``.
        """
        left = list(range(n))
        return np.array([left.pop(self.choose(len(left))) for _ in range(n)], np.int64)


class SeededChoices(Choices):
    """Random choices.

    Parameters
    ----------
    seed : int
        Equal seeds make equal choices.
    progress : float
        The probability that one more step is taken early, from 0 to 1.

    Raises
    ------
    ValueError
        For another ``progress``.

    Notes
    -----
    Not thread-safe: the device calls it under its lock.
    """

    def __init__(self, seed: int, progress: float) -> None:
        if isinstance(progress, bool) or not isinstance(progress, int | float) or not 0 <= progress <= 1:
            raise ValueError(f"progress: expected a number from 0 to 1, got {progress!r:.80}")
        self._seed, self._progress = seed, progress
        self._random = random.Random(seed)
        self._array_random = np.random.default_rng(seed)

    def choose(self, n: int) -> int:
        return self._random.randrange(n) if n > 1 else 0

    def early(self, n: int) -> int:
        return self.choose(n) if self._random.random() < self._progress else -1

    def permutation(self, n: int) -> Int64s:
        return self._array_random.permutation(n)

    def __repr__(self) -> str:
        return f"seed={self._seed}, progress={self._progress}"


# A copy is done in few steps, however many copy ops it has: some in pieces, the others in groups.
_TORN = 2
_PIECES = 8
_GROUPS = 4
_FIRST_CREATED = 1 << 63


class Task(NamedTuple):
    """Work in the queue of a stream. Each of its ``steps`` returns whether it was the last one. ``writes`` are the rows
    that it writes, ``bound`` is whether it touches blocks, ``mirrored`` whether it is done on the shadow too."""

    access: Access
    writes: Rows
    steps: Iterator[bool]
    bound: bool = True
    mirrored: bool = False


def copying(copy_ops: Int64s, shadow: Shadow, chunk_bytes: int, layers: Layers, choices: Choices) -> Iterator[bool]:
    """Copy ops, in random order. The first ones are made in pieces, between which other streams can take steps. The
    others are made in groups."""
    torn = min(len(copy_ops), _TORN)
    if len(copy_ops) > torn:
        copy_ops = copy_ops[choices.permutation(len(copy_ops))]
    units = [unit for copy_op in copy_ops[:torn] for unit in shadow.torn(copy_op, chunk_bytes, _PIECES // torn, layers)]
    groups = np.array_split(copy_ops[torn:], _GROUPS)
    units += [partial(shadow.copy, group, layers) for group in groups if len(group)]
    while units:
        at = choices.choose(len(units))
        units[at], units[-1] = units[-1], units[at]
        units.pop()()
        yield not units


class SimEvent(DeviceEvent):
    """A point on the stream ``queue``, in whose entries it stands. At that point, everything of ``clock`` is done."""

    __slots__ = ("clock", "done", "queries", "queue", "site")

    def __init__(self, queue: Queue, site: Site) -> None:
        self.queue, self.clock, self.site = queue, queue.clock, site
        self.done, self.queries = False, 0


@dataclass(eq=False)
class Wait:
    """Holds its stream until an event is complete, or without one until it is ``opened``."""

    access: Access
    event: SimEvent | None = None
    opened: bool = False


Entry: TypeAlias = Task | SimEvent | Wait
"""What stands in the queue of a stream."""


class Queue:
    """A stream: what is enqueued and not done, and the clock of the next work on it."""

    def __init__(self, name: str, handle: int, lane: int) -> None:
        self.name, self.handle, self.lane = name, handle, lane
        self.clock: Clock = new_clock(lane + 1)
        self.entries: deque[Entry] = deque()

    def pass_entries(self) -> bool:
        """Remove the entries that need no work and have nothing before them. Returns whether there were any."""
        before = len(self.entries)
        while self.entries:
            head = self.entries[0]
            if isinstance(head, SimEvent):
                head.done = True
            elif isinstance(head, Task) or not (head.opened or (head.event is not None and head.event.done)):
                break
            self.entries.popleft()
        return len(self.entries) < before


class Scheduler:
    """Takes steps. It takes no lock; its owner does. ``finished`` is called after the last step of each work.
    ``queues`` are those of all streams that were ever named, by handle."""

    def __init__(self, choices: Choices, finished: Callable[[Task], None]) -> None:
        self._choices, self._finished = choices, finished
        self.queues: dict[int, Queue] = {}
        self._created = itertools.count(_FIRST_CREATED)
        self._busy: dict[int, Queue] = {}

    def create(self, name: str) -> Stream:
        """Create a stream. Its handle is not an address that an engine's stream could have."""
        stream = Stream(next(self._created))
        self.queue(stream, f"stream {name!r}")
        return stream

    def queue(self, stream: Stream, name: str = "") -> Queue:
        """The queue of ``stream``, which may be new. Raises ValueError if there are too many streams."""
        if stream.handle not in self.queues:
            if len(self.queues) >= LANES:
                raise ValueError(f"stream: expected one of the {LANES} streams that there are, got {stream!r}")
            name = name or ("the null stream" if stream == NULL_STREAM else f"stream {stream.handle:#x}")
            # Lane 0 is unused.
            self.queues[stream.handle] = Queue(name, stream.handle, len(self.queues) + 1)
        return self.queues[stream.handle]

    def add(self, queue: Queue, entry: Entry) -> None:
        queue.entries.append(entry)
        self._busy[queue.lane] = queue

    def runnable(self) -> list[Queue]:
        """The streams that can take a step. A record on an idle stream takes one too, so an event is never complete at
        once."""
        return [queue for queue in self._busy.values() if isinstance(queue.entries[0], Task | SimEvent)]

    def poll(self) -> None:
        """Take as many early steps as the choices say."""
        while ready := self.runnable():
            at = self._choices.early(len(ready))
            if at < 0:
                return
            self._step(ready[at])

    def run(self, steps: int | None) -> int:
        """Take up to ``steps`` steps, or all that can be taken. Returns how many were taken."""
        taken = 0
        while (steps is None or taken < steps) and (ready := self.runnable()):
            self._step(ready[self._choices.choose(len(ready))])
            taken += 1
        return taken

    def finish(self, event: SimEvent | None) -> bool:
        """Take steps of any stream until ``event``, or (None) everything, is done. Returns False if nothing can run
        before that."""
        while self._busy if event is None else not event.done:
            if not self.run(1):
                return False
        return True

    def toward(self, event: SimEvent) -> None:
        """Take one step that is needed for ``event`` to be complete, unless a closed gate forbids it."""
        queue = event.queue
        while isinstance(head := queue.entries[0], Wait) and head.event is not None:
            queue = head.event.queue
        self._step(queue)

    def settle(self) -> None:
        """Remove the entries that need no work and have nothing before them."""
        while any(queue.pass_entries() for queue in self._busy.values()):
            pass
        self._busy = {lane: queue for lane, queue in self._busy.items() if queue.entries}

    def drop_bound(self) -> None:
        """Forget all work that touches blocks."""
        for queue in self._busy.values():
            queue.entries = deque(entry for entry in queue.entries if not (isinstance(entry, Task) and entry.bound))
        self.settle()

    def stuck(self) -> str:
        """The entry that every unfinished stream is at."""
        return "\n".join(f"    {queue.name} is at {describe(queue.entries[0])}" for queue in self._busy.values())

    def _step(self, queue: Queue) -> None:
        head = queue.entries[0]
        if isinstance(head, Task):
            if not next(head.steps):
                return
            queue.entries.popleft()
            self._finished(head)
        self.settle()


def describe(entry: Entry) -> str:
    """An entry for people."""
    if isinstance(entry, SimEvent):
        return f"the event of {Access('record', entry.queue.name, entry.site)}"
    if isinstance(entry, Task):
        return str(entry.access)
    return f"{entry.access}\n      for {describe(entry.event)}" if entry.event else f"a closed gate: {entry.access}"
