"""Line: a store behind a host cache, what is known of it, and its jobs under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvpool.keepers.health import StoreHealth
from kvpool.stores.jobs import Job
from kvpool.stores.queue import StoreQueue

Call = Callable[[Job], None]


class _Followed(NamedTuple):
    """Who is told of a job."""

    hurried: bool
    done: Call
    returned: Call | None


class Line:
    """A queue, the health of its store, and who is told of its jobs. Not thread-safe.

    ``patience``: in seconds. A job that had less time than this and is late says nothing about its store.
    """

    def __init__(self, queue: StoreQueue, health: StoreHealth, patience: float) -> None:
        self.queue, self.health, self._patience = queue, health, patience
        self._jobs: dict[Job, _Followed] = {}
        # Jobs that are done, and whose call hangs.
        self._done: set[Job] = set()

    @property
    def busy(self) -> bool:
        """Whether somebody is still to be told of a job."""
        return bool(self._jobs)

    @property
    def suspended(self) -> bool:
        """Whether the store is left alone for a while, to save or for anything else."""
        return self.health.suspended() or self.health.suspended(writes=True)

    def follow(self, job: Job, done: Call, returned: Call | None = None) -> None:
        """Call ``done`` when the job is done, and ``returned`` when no call of the store uses its rows any more."""
        hurried = job.deadline - self.queue.now() < self._patience
        self._jobs[job] = _Followed(hurried, done, returned)

    def settle(self) -> None:
        """Tell of the jobs that were done or returned since the last call."""
        for job in self.queue.finished():
            followed = self._jobs.get(job)
            if followed is None:
                continue
            if job not in self._done:
                if not (followed.hurried and "late" in job.counts):
                    self.health.note(job)
                followed.done(job)
            if followed.returned is None or job.returned:
                del self._jobs[job]
                self._done.discard(job)
                if followed.returned is not None:
                    followed.returned(job)
            else:
                self._done.add(job)
