"""Client: a store, what is known of its health, and who is told of its jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpool.stores.jobs import Job
from kvpool.stores.queue import StoreQueue
from kvpool.stores.store_health import StoreHealth

PATIENCE_SECONDS = 0.1
Call = Callable[[Job], None]


@dataclass
class _Pending:
    """A job, and who is told when it is done, and when no call of the store uses its rows any more."""

    job: Job
    hurried: bool
    done: Call
    returned: Call | None
    is_done: bool = False


class Client:
    """A queue, the health of its store, and who is told of its jobs. Not thread-safe.

    ``patience``: in seconds. A job that had less time than this and is late says nothing about its store.
    """

    def __init__(self, queue: StoreQueue, health: StoreHealth, patience: float = PATIENCE_SECONDS) -> None:
        self.queue, self.health, self._patience = queue, health, patience
        self._jobs: dict[Job, _Pending] = {}

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
        self._jobs[job] = _Pending(job, job.deadline - self.queue.now() < self._patience, done, returned)

    def settle(self) -> bool:
        """Tell of the jobs that were done or returned since the last call. Returns whether there were any."""
        finished = self.queue.finished()
        for job in finished:
            pending = self._jobs.get(job)
            if pending is None:
                continue
            if not pending.is_done:
                pending.is_done = True
                if not (pending.hurried and "late" in job.counts):
                    self.health.note(job)
                pending.done(job)
            if pending.returned is None or job.returned:
                del self._jobs[job]
                if pending.returned is not None:
                    pending.returned(job)
        return bool(finished)
