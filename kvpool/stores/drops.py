"""Drops: what a store was told to drop, and has not confirmed yet. Nobody finds it, loads it or saves it meanwhile."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from kvpool.stores import jobs
from kvpool.stores.jobs import Job
from kvpool.stores.store import CANCELLED, MODEL_BYTES, Rows

Running = Mapping[int, tuple[Job, Rows]]
"""By thread: the job that a call of the store is for, and the places of its blocks."""
RETRY_SECONDS, RETRY_SECONDS_MAX = 0.05, 30.0


class Drops:
    """The forgets and clears of a queue that its store has not confirmed. The caller holds the queue's lock.

    A drop begins when no call is under way that may save what it drops. Saves that begin later leave out these blocks.
    So when the store has dropped them, nothing brings them back. A drop that fails is tried again, after 50 ms at
    first, and then after twice as long each time, up to 30 s.

    However many drops wait, a job costs one look-up a block. A drop that waits for a call to end is looked at again
    when that call has ended.
    """

    def __init__(self) -> None:
        self._pauses: dict[Job, float] = {}  # of every drop: until it is tried again
        self._forgotten: Counter[bytes] = Counter()  # how many forgets name a key
        self._cleared: dict[tuple[bytes, bool], Job] = {}  # by the beginning of a tag, and whether it begins an epoch
        self._due: list[tuple[float, int, Job]] = []
        self._held: dict[int, list[Job]] = {}  # by the thread whose call they wait for
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._pauses)

    def add(self, job: Job) -> None:
        self._pauses[job] = RETRY_SECONDS
        if job.kind == jobs.CLEAR:
            self._cleared[job.tag, job.renews] = job
        else:
            self._forgotten.update(job.key_set)
        self._put(job, -math.inf)

    def clearing(self, job: Job) -> Job | None:
        """The same clear, which waits. No block was saved since it was added, so that it does for a later one."""
        return self._cleared.get((job.tag, job.renews))

    def remove(self, job: Job) -> None:
        """The store has confirmed it, or the queue is closed."""
        if self._pauses.pop(job, None) is None:
            return
        if job.kind == jobs.CLEAR:
            del self._cleared[job.tag, job.renews]
            return
        self._forgotten.subtract(job.key_set)
        for key in job.key_set:
            if not self._forgotten[key]:
                del self._forgotten[key]

    def screen(self, job: Job) -> bool:
        """Cancel those blocks of a job that are to be dropped. Returns whether all blocks of the job are decided now.

        They are not called absent, since the store has said nothing: its health is judged by what it answers.
        """
        tags = (job.tag, job.tag[:MODEL_BYTES])
        cleared = any((tag, renews) in self._cleared for tag in tags for renews in (False, True))
        concerned = np.full(len(job.codes), cleared)
        if self._forgotten and not concerned.all():
            concerned[:] = [key in self._forgotten for key in job.key_bytes]
        return job.decide(concerned, CANCELLED)

    def next(self, now: float, running: Running) -> Job | None:
        """A drop that may begin now, if there is one."""
        while self._due and self._due[0][0] <= now:
            drop = heapq.heappop(self._due)[2]
            if drop in self._pauses:
                saver = next((thread for thread, call in running.items() if _saves(drop, *call)), None)
                if saver is None:
                    return drop
                self._held.setdefault(saver, []).append(drop)
        return None

    def returned(self, thread: int) -> None:
        """The call of this thread has ended."""
        for drop in self._held.pop(thread, ()):
            self._put(drop, -math.inf)

    def failed(self, job: Job, now: float) -> None:
        """The store has not dropped it. It is tried again."""
        self._put(job, now + self._pauses[job])
        self._pauses[job] = min(2 * self._pauses[job], RETRY_SECONDS_MAX)

    def left(self, now: float) -> float | None:
        """Seconds until a drop that has failed is tried again. None if there is none."""
        return self._due[0][0] - now if self._due and self._due[0][0] > now else None

    def _put(self, job: Job, at: float) -> None:
        heapq.heappush(self._due, (at, next(self._numbers), job))


def _saves(drop: Job, job: Job, places: Rows) -> bool:
    """Whether a call for these places of a job may save what is to be dropped."""
    if job.kind != jobs.SAVE:
        return False
    if drop.kind == jobs.CLEAR:
        return job.tag.startswith(drop.tag)
    return not drop.key_set.isdisjoint(job.key_bytes[place] for place in places.tolist())
