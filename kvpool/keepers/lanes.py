"""Lane: one store of a keeper, with the staging rows that its blocks pass through, and its jobs under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from kvpool.hostcache.identity import ModelIdentity
from kvpool.keepers.health import StoreHealth
from kvpool.stores.jobs import Job
from kvpool.stores.queue import StoreQueue
from kvpool.stores.store import LATE, Bytes, Rows, Store

Namespace = tuple[bytes | str | None, int | str | None]
PAGE_BYTES = 4096
PATIENCE_SECONDS = 0.1
"""A job that had less time than this and is late says nothing about its store."""


def staging_rows(count: int, nbytes: int) -> Bytes:
    """Rows in main memory, uint8[count, whole pages], which begin at a page: so direct I/O can use them."""
    size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    raw = np.zeros(count * size + PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES
    return raw[start : start + count * size].reshape(count, size)


class _Followed:
    """What is to be done with a job: the call that waits for it, and whether its rows are still read."""

    def __init__(self, done: Callable[[Job], None], began: float, held: bool) -> None:
        self.done: Callable[[Job], None] | None = done
        self.began, self.held = began, held


class Lane:
    """A store, its queue, its health and its staging rows. The keeper's thread owns it.

    Half of the rows are kept for loads, so that saves never make them wait for a row.
    """

    def __init__(
        self, index: int, store: Store, identity: ModelIdentity, rows: int, nbytes: int, health: StoreHealth,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.index, self.health, self._clock = index, health, clock
        self.queue = StoreQueue(store, staging_rows(rows, nbytes), identity, clock=clock)
        self.memory, self.name, self.secret = self.queue.memory, self.queue.name, self.queue.secret
        self._free = list(range(rows))
        self._reserved = rows // 2
        self._jobs: dict[Job, _Followed] = {}
        self._tags: dict[Namespace, bytes] = {}
        self.dropped: Counter[str] = Counter()
        """saves that were given up, by reason"""

    @property
    def free_for_loads(self) -> int:
        return len(self._free)

    @property
    def free_for_saves(self) -> int:
        return max(0, len(self._free) - self._reserved)

    @property
    def under_way(self) -> int:
        """Jobs that are not returned."""
        return len(self._jobs)

    def tag(self, namespace: Namespace) -> bytes:
        """The name of a namespace in the store."""
        if namespace not in self._tags:
            if len(self._tags) >= 4096:
                self._tags.clear()
            self._tags[namespace] = self.secret.tag(ascii(namespace).encode())
        return self._tags[namespace]

    def take(self, count: int) -> Rows:
        """Free rows for a job."""
        taken, self._free = self._free[len(self._free) - count :], self._free[: len(self._free) - count]
        return np.array(taken, np.int64)

    def give_back(self, rows: Rows) -> None:
        """Rows that no job uses."""
        self._free += rows.tolist()

    def follow(self, job: Job, done: Callable[[Job], None], *, held: bool = False) -> None:
        """Call ``done`` once when the job is done. Its rows are free again when it is returned, but not before; of a
        job that is ``held``, not before ``release`` either."""
        self._jobs[job] = _Followed(done, self._clock(), held)

    def release(self, job: Job) -> None:
        """The rows of a job that was held are not read any more."""
        followed = self._jobs.get(job)
        if followed is not None:
            followed.held = False
            self._end(job, followed)

    def settle(self) -> bool:
        """See to the jobs that are done or returned. Returns whether there were any."""
        finished = self.queue.finished()
        for job in finished:
            followed = self._jobs.get(job)
            if followed is None:
                continue
            done, followed.done = followed.done, None
            if done is not None:
                if not (job.codes == LATE).any() or job.deadline - followed.began >= PATIENCE_SECONDS:
                    self.health.note(job)
                done(job)
            self._end(job, followed)
        return bool(finished)

    def _end(self, job: Job, followed: _Followed) -> None:
        if job.returned and followed.done is None and not followed.held and self._jobs.pop(job, None) is not None:
            self.give_back(job.rows)

    def drop(self, reason: str, count: int = 1) -> None:
        """Count saves that are given up."""
        self.dropped[reason] += count
