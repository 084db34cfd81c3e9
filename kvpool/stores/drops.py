"""Drops: what a store was told to drop, and has not confirmed yet. Nobody finds it, loads it or saves it meanwhile."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from kvpool.stores import jobs
from kvpool.stores.jobs import Job
from kvpool.stores.seals import BlockNames
from kvpool.stores.store import CANCELLED, Bytes, Rows

Running = Iterable[tuple[Job, Rows]]
"""Jobs with the places of the blocks that calls of the store have now."""
Hashed = Callable[[Bytes | BlockNames], Bytes]
"""Makes keys of names, and leaves keys as they are."""
RETRY_SECONDS, RETRY_SECONDS_MAX = 0.05, 30.0


class _Drop:
    """A forget or a clear. ``at``: when it may be tried again."""

    def __init__(self, job: Job, hashed: Hashed) -> None:
        self.job, self.at, self.running = job, -math.inf, False
        self.wait = RETRY_SECONDS
        self._hashed, self.keys = hashed, frozenset(key.tobytes() for key in hashed(job.keys))

    def concerns(self, job: Job) -> npt.NDArray[np.bool_]:
        """Which blocks of a job it drops: bool[n]."""
        if self.job.kind == jobs.CLEAR:
            return np.full(len(job.codes), job.tag.startswith(self.job.tag))
        return np.array([key.tobytes() in self.keys for key in self._hashed(job.keys)], np.bool_)


class Drops:
    """The forgets and clears of a queue that its store has not confirmed. The caller holds the queue's lock.

    A drop begins when no call is under way that may save what it drops. Saves that begin later leave out these blocks.
    So when the store has dropped them, nothing brings them back. A drop that fails is tried again, after 50 ms at
    first, and then after twice as long each time, up to 30 s.
    """

    def __init__(self, hashed: Hashed) -> None:
        self._hashed, self._drops = hashed, dict[Job, _Drop]()
        # How many forgets name a key: a job is screened by one look-up a block, however many there are.
        self._forgotten: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._drops)

    @property
    def jobs(self) -> list[Job]:
        return list(self._drops)

    def add(self, job: Job) -> None:
        drop = self._drops[job] = _Drop(job, self._hashed)
        self._forgotten.update(drop.keys)

    def clearing(self, tag: bytes) -> Job | None:
        """A clear of the same blocks. None of them was saved since it was added, so that it does for a later one."""
        return next((job for job in self._drops if job.kind == jobs.CLEAR and job.tag == tag), None)

    def remove(self, job: Job) -> None:
        """The store has confirmed it, or the queue is closed."""
        drop = self._drops.pop(job, None)
        for key in drop.keys if drop is not None else ():
            self._forgotten[key] -= 1
            if not self._forgotten[key]:
                del self._forgotten[key]

    def screen(self, job: Job) -> bool:
        """Cancel those blocks of a job that are to be dropped. Returns whether all blocks of the job are decided now.

        They are not called absent, since the store has said nothing: its health is judged by what it answers.
        """
        if not self._drops:
            return False
        cleared = any(drop.job.kind == jobs.CLEAR and job.tag.startswith(drop.job.tag) for drop in self._drops.values())
        concerned = np.full(len(job.codes), cleared)
        if self._forgotten and not cleared:
            concerned[:] = [key.tobytes() in self._forgotten for key in self._hashed(job.keys)]
        return job.decide(concerned, CANCELLED)

    def next(self, now: float, running: Running) -> Job | None:
        """A drop that may begin now, if there is one."""
        for drop in self._drops.values():
            if not drop.running and drop.at <= now and not _is_saved(drop, running):
                drop.running = True
                return drop.job
        return None

    def failed(self, job: Job, now: float) -> None:
        """The store has not dropped it. It is tried again."""
        drop = self._drops[job]
        drop.running, drop.at = False, now + drop.wait
        drop.wait = min(2 * drop.wait, RETRY_SECONDS_MAX)

    def left(self, now: float) -> float | None:
        """Seconds until a drop that has failed is tried again. None if there is none."""
        return min((drop.at - now for drop in self._drops.values() if drop.at > now), default=None)


def _is_saved(drop: _Drop, running: Running) -> bool:
    """Whether a call under way may save what a drop drops."""
    return any(job.kind == jobs.SAVE and bool(drop.concerns(job)[places].any()) for job, places in running)
