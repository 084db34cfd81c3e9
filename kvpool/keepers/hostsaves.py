"""HostSaves: blocks of a host cache on their way to its stores."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple

from kvpool.errors import BlockNotFound, StoreBusy
from kvpool.hostcache.index import HostCache
from kvpool.hostcache.leases import HostLease
from kvpool.keepers.lines import Line
from kvpool.stores.jobs import Job
from kvpool.stores.seals import BlockNames

AT_ONCE = 64
"""Blocks of one job. They stay pinned until the last of them is saved."""
OWNER = "kvpool stores"
"""Of the leases under which blocks are saved."""
Keys = Sequence[bytes]


class _Waiting(NamedTuple):
    """Keys whose save has not begun, up to ``AT_ONCE``."""

    deadline: float
    keys: Keys


class HostSaves:
    """Saves blocks to all stores, and pins them meanwhile. The thread of the scheduler owns it.

    ``room``: so many blocks may be pinned. ``seconds``: what is not saved that long after ``add`` is given up.
    ``named``: what a store gets in place of keys.
    """

    def __init__(
        self, cache: HostCache, lines: Sequence[Line], named: Callable[[Keys], BlockNames], room: int, seconds: float,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._cache, self._lines, self._named = cache, lines, named
        self._room, self._seconds, self._clock = room, seconds, clock
        self._queue: deque[_Waiting] = deque()
        self.waiting = self.pinned = self.saved = 0
        self.unsaved: Counter[str] = Counter()

    def add(self, keys: Keys) -> None:
        """Save these blocks in one of the next turns. The oldest make room for them."""
        deadline = self._clock() + self._seconds
        self._queue.extend(_Waiting(deadline, keys[i : i + AT_ONCE]) for i in range(0, len(keys), AT_ONCE))
        self.waiting += len(keys)
        while self.waiting > self._cache.host_blocks:
            self._drop("crowded")

    def cancel(self) -> None:
        """Give up the saves that have not begun."""
        while self._queue:
            self._drop("cancelled")

    def turn(self) -> None:
        """Begin saves, as many as have room."""
        now = self._clock()
        while self._queue and self._queue[0].deadline <= now:
            self._drop("late")
        while self._queue and self.pinned < self._room:
            deadline = self._queue[0].deadline
            self._save(self._take(min(AT_ONCE, self._room - self.pinned)), deadline)

    def _drop(self, reason: str) -> None:
        """Give up the oldest."""
        count = len(self._queue.popleft().keys)
        self.waiting -= count
        self._not_saved(reason, count)

    def _take(self, room: int) -> Keys:
        """The oldest keys, as many as have room."""
        taken: list[bytes] = []
        while self._queue and len(taken) < room:
            deadline, keys = self._queue.popleft()
            left = room - len(taken)
            taken += keys[:left]
            if len(keys) > left:
                self._queue.appendleft(_Waiting(deadline, keys[left:]))
        self.waiting -= len(taken)
        return taken

    def _save(self, keys: Keys, deadline: float) -> None:
        """Save blocks to each store that is usable."""
        lease = self._pin(keys)
        if lease is None:
            return
        names, readers, count = self._named(lease.keys), set[Job](), len(lease.keys)
        for line in self._lines:
            if not line.health.usable(writes=True):
                self.unsaved["suspended"] += count
                continue
            try:
                job = line.queue.save(names, lease.blocks, deadline=deadline)
            except StoreBusy:
                self.unsaved["busy"] += count
                continue
            readers.add(job)
            line.follow(job, self._ended, partial(self._returned, lease, readers))
        if readers:
            self.pinned += count
        else:
            lease.close()

    def _pin(self, keys: Keys) -> HostLease | None:
        """Pin those of the blocks that are still in the cache."""
        while keys:
            try:
                return self._cache.pin(keys, owner=OWNER)
            except BlockNotFound:
                here = (self._cache.lookup(keys) == self._cache.HERE).tolist()
                self._not_saved("evicted", len(keys) - sum(here))
                keys = list(compress(keys, here))
        return None

    def _not_saved(self, reason: str, count: int) -> None:
        """Count blocks that no store gets."""
        if count:
            self.unsaved[reason] += count * len(self._lines)

    def _ended(self, job: Job) -> None:
        """A job is done."""
        counts = job.counts
        self.saved += counts.pop("ok", 0)
        self.unsaved.update(counts)

    def _returned(self, lease: HostLease, readers: set[Job], job: Job) -> None:
        """A store reads the blocks of a lease no more."""
        readers.discard(job)
        if not readers:
            self.pinned -= len(lease.keys)
            if not lease.closed:
                lease.close()
