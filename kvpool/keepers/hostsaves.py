"""HostSaves: blocks of a host cache on their way to its stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from kvpool.errors import BlockNotFound, KVPoolError, StoreBusy
from kvpool.hostcache.host_cache import HostCache
from kvpool.hostcache.host_leases import HostLease
from kvpool.stores.jobs import SAVE, Job
from kvpool.stores.seals import BlockNames
from kvpool.stores.store import Rows
from kvpool.stores.store_client import StoreClient

AT_ONCE = 64
"""Most blocks of one job."""
OWNER = "kvpool stores"
"""Of the leases under which blocks are saved."""


class HostSaves:
    """Saves blocks to all stores. They are pinned while a call of a store reads them, and not while they wait.

    ``room``: so many blocks may be pinned. ``seconds``: what is not saved so long after its ``turn`` is given up.
    ``generation``: what the names of blocks begin with now. The thread of the scheduler owns it.
    """

    def __init__(
        self, cache: HostCache, lines: Sequence[StoreClient], generation: Callable[[], bytes], room: int,
        seconds: float, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._cache, self._lines, self._generation = cache, lines, generation
        self._at_once = max(1, min(AT_ONCE, room // sum(line.queue.savers for line in lines)))
        self._seconds, self._clock = seconds, clock
        self.new: list[bytes] = []
        self._jobs: set[Job] = set()
        self.saved = 0
        self.unsaved: Counter[str] = Counter()

    @property
    def pinned(self) -> int:
        """Blocks that stores read now."""
        return sum(len(lease.blocks) for lease in self._cache.leases if lease.owner == OWNER)

    @property
    def waiting(self) -> int:
        """Blocks that no store has begun with. Those that wait for two stores count twice."""
        return len(self.new) + sum(job.queued for job in self._jobs)

    def add(self, keys: Sequence[bytes]) -> None:
        """Save these blocks from the next turn on."""
        room = self._cache.host_blocks - len(self.new)
        self.new += keys[:room]
        self._not_saved("crowded", len(keys) - room)

    def turn(self) -> None:
        """Begin to save what is new."""
        if self.new:
            new, self.new, deadline = self.new, [], self._clock() + self._seconds
            for first in range(0, len(new), self._at_once):
                self._save(BlockNames(new[first : first + self._at_once], self._generation()), deadline)

    def cancel(self) -> None:
        """Give up all saves."""
        self._not_saved("cancelled", len(self.new))
        self.new.clear()
        for job in self._jobs:
            job.cancel()

    def _save(self, names: BlockNames, deadline: float) -> None:
        for line in self._lines:
            if not line.usable(SAVE):
                self.unsaved["suspended"] += len(names)
                continue
            try:
                self._jobs.add(line.save(names, self._lend, self._ended, self._jobs.discard, deadline=deadline))
            except StoreBusy:
                self.unsaved["busy"] += len(names)

    @contextmanager
    def _lend(self, names: BlockNames) -> Iterator[Rows]:
        """Rows of those of the blocks that are in the cache, pinned. On a thread of a queue."""
        rows = np.full(len(names), -1, np.int64)
        places, lease = self._pin(names.names)
        if lease is None:
            yield rows
            return
        rows[places] = lease.blocks
        try:
            yield rows
        finally:
            if lease.closed:
                raise BlockNotFound("others have closed the lease under which the blocks were saved")
            with suppress(KVPoolError):
                lease.close()

    def _pin(self, keys: Sequence[bytes]) -> tuple[Rows, HostLease | None]:
        """Pin those of the blocks that are in the cache. Returns their places too."""
        places = np.arange(len(keys))
        while len(places):
            try:
                return places, self._cache.pin([keys[place] for place in places.tolist()], owner=OWNER)
            except BlockNotFound:
                places = np.flatnonzero(self._cache.lookup(keys) == self._cache.HERE)
        return places, None

    def _not_saved(self, reason: str, count: int) -> None:
        """Count blocks that no store gets."""
        if count > 0:
            self.unsaved[reason] += count * len(self._lines)

    def _ended(self, job: Job) -> None:
        """A job is done."""
        for code, count in job.counts.items():
            if code == "ok":
                self.saved += count
            else:
                self.unsaved["evicted" if code == "absent" else code] += count
