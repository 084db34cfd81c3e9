"""StoreClient: one store, whether it may be asked now, and who is told of each job until it has returned."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from kvpool.entry.interrupt import DeferSignals
from kvpool.hostcache.identity import ModelIdentity
from kvpool.stores import jobs
from kvpool.stores.jobs import Job, Lend
from kvpool.stores.queue import NO_LIMIT, Keys, StoreQueue
from kvpool.stores.store import Bytes, Rows, Store
from kvpool.stores.store_health import StoreHealth, TroubleLog

Call = Callable[[Job], object]
QUIET = ("ok", "absent", "cancelled")
"""What is no trouble."""
PATIENCE_SECONDS = 0.1
"""A job that had less time than this and is late says nothing about its store."""
PAGE_BYTES = 4096
_WAIT_SECONDS = 0.01


def staging_rows(count: int, nbytes: int) -> Bytes:
    """Rows in main memory, uint8[count, whole pages], which begin at a page: so direct I/O can use them."""
    size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    raw = np.zeros(count * size + PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES
    return raw[start : start + count * size].reshape(count, size)


class _Followed:
    """Who is still to be told of a job. ``hurried``: it had less time than the client's patience. ``held``: the caller
    reads its rows. ``noted``: its health was. ``over``: it has returned, and all were told."""

    def __init__(self, hurried: bool, held: bool) -> None:
        self.hurried, self.held, self.noted, self.over = hurried, held, False, False
        self.done: list[Call] = []
        self.returned: list[Call] = []


class StoreClient:
    """Follows the jobs of a store for whoever begins them.

    Parameters
    ----------
    store, memory, identity, clock
        As for ``StoreQueue``, which is made here. It is open to all as ``queue``.
    health
        Judges the store by its jobs. None: a ``StoreHealth`` on this clock.
    patience
        In seconds. A job that had less time than this and is late says nothing about its store.
    warns
        Whether what goes wrong is logged: one WARNING for each kind of trouble, then a count, at most once a minute.
    staging
        Whether the rows of ``memory`` are lent out by ``take``. A job gives them back when it has returned, and not
        before; if it was begun with ``hold``, not before ``release`` either. Half of the rows, rounded down, are kept
        for loads, so that no save keeps a load waiting for a row.

    Notes
    -----
    Calls that begin jobs return at once. They raise what those of ``StoreQueue`` raise; the caller keeps its rows then.
    ``done(job)`` is called once when the job is done, and ``returned(job)`` once after that, when no call of the store
    uses its rows any more. ``poll`` makes these calls, with no lock held. If one raises, the others are made by the
    next ``poll``.

    Thread-safe. Who gives calls to be made polls on one thread, which makes them all. In a child of ``os.fork()`` calls
    that begin jobs, ``poll``, ``wait`` and ``close`` raise ForkedProcess.

    Examples
    --------
    >>> import numpy as np, kvpool
    >>> from kvpool.stores import MemoryStore, BlockNames
    >>> model = kvpool.ModelIdentity("tiny", "rev 1", "float16", "2 layers", "mine 1")
    >>> client = StoreClient(MemoryStore(1 << 20), staging_rows(4, 4096), model, staging=True)
    >>> rows = client.take("save", 2)
    >>> client.memory[rows] = 7
    >>> job = client.save(BlockNames([b"one", b"two"]), rows, lambda job: print(job.ok, "saved"))
    >>> client.wait(job, 60.0)
    2 saved
    True
    >>> client.close()
    True
    """

    def __init__(
        self, store: Store, memory: Bytes, identity: ModelIdentity, *, health: StoreHealth | None = None,
        patience: float = PATIENCE_SECONDS, staging: bool = False, warns: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.queue = StoreQueue(store, memory, identity, clock=clock)
        self.health = health or StoreHealth(clock=clock)
        self.name, self.secret, self.memory = self.queue.name, self.queue.secret, self.queue.memory
        self._patience, self._staging, self._clock = patience, staging, clock
        self._troubles = TroubleLog(self.name, clock) if warns else None
        # Also held while a job is begun, so that nobody is told of it before it is followed.
        self._lock = threading.Lock()
        self._jobs: dict[Job, _Followed] = {}
        self._news: deque[Job] = deque()
        self._free = list(range(self.queue.slots if staging else 0))
        self._kept_for_loads = len(self._free) // 2

    # -- whether it is asked -------------------------------------------------------------------------

    def usable(self, kind: str) -> bool:
        """Whether a job of this kind may be begun now. While the store is suspended, this is true once after each wait,
        for a job that probes it. A drop is no probe. See ``StoreHealth``."""
        if kind in jobs.DROPS:
            return not self.health.suspended(writes=True)
        return self.health.usable(writes=kind == jobs.SAVE, found=kind == jobs.LOAD)

    @property
    def suspended(self) -> bool:
        """Whether the store is left alone for a while, to save or for anything else."""
        return self.health.suspended() or self.health.suspended(writes=True)

    # -- jobs ----------------------------------------------------------------------------------------

    def find(
        self, keys: Keys, done: Call | None = None, *, tag: bytes | None = None, deadline: float = math.inf
    ) -> Job:
        """What ``StoreQueue.find`` does."""
        return self._follow(lambda: self.queue.find(keys, tag=tag, deadline=deadline), done)

    def load(
        self, keys: Keys, rows: Rows, done: Call | None = None, returned: Call | None = None, *,
        tag: bytes | None = None, deadline: float = math.inf, hold: bool = False,
    ) -> Job:  # fmt: skip
        """What ``StoreQueue.load`` does. ``hold``: the rows are read until ``release``."""
        return self._follow(lambda: self.queue.load(keys, rows, tag=tag, deadline=deadline), done, returned, hold)

    def save(
        self, keys: Keys, rows: Rows | Lend, done: Call | None = None, returned: Call | None = None, *,
        tag: bytes | None = None, limit: int = NO_LIMIT, deadline: float = math.inf,
    ) -> Job:  # fmt: skip
        """What ``StoreQueue.save`` does."""
        begin = self.queue.save
        return self._follow(lambda: begin(keys, rows, tag=tag, limit=limit, deadline=deadline), done, returned)

    def forget(self, keys: Keys, done: Call | None = None) -> Job:
        """What ``StoreQueue.forget`` does."""
        return self._follow(lambda: self.queue.forget(keys), done)

    def clear(self, tag: bytes | None = None, done: Call | None = None) -> Job:
        """What ``StoreQueue.clear`` does. It may give a job that was begun before: then ``done`` is called too."""
        return self._follow(lambda: self.queue.clear(tag), done)

    def reset(self, done: Call | None = None) -> Job:
        """What ``StoreQueue.reset`` does."""
        return self._follow(self.queue.reset, done)

    def _follow(
        self, begin: Callable[[], Job], done: Call | None, returned: Call | None = None, held: bool = False
    ) -> Job:
        with DeferSignals(), self._lock:
            job = begin()
            followed = self._jobs.get(job)
            if followed is None:
                followed = self._jobs[job] = _Followed(job.deadline - self._clock() < self._patience, held)
            followed.done += [done] if done else []
            followed.returned += [returned] if returned else []
            if job.done:  # The queue may have told of it before.
                self._news.append(job)
            return job

    @property
    def news(self) -> bool:
        """Whether ``poll`` has a call to make."""
        return bool(self._news) or self.queue.news

    def poll(self) -> bool:
        """Make the calls of jobs that are done or returned. Never waits. Returns whether there were such jobs."""
        with DeferSignals():
            self._news.extend(self.queue.finished())
        any_news = False
        while self._news:
            any_news = True
            with suppress(IndexError):  # another thread polls, too
                self._tell(self._news.popleft())
        return any_news

    def _tell(self, job: Job) -> None:
        with self._lock:
            followed = self._jobs.get(job)
            if followed is None:
                return
            first, followed.noted = not followed.noted, True
        if first and not (followed.hurried and "late" in job.counts):
            self._judge(job)
        over = job.returned
        try:
            while followed.done:
                followed.done.pop(0)(job)
            while over and followed.returned:
                followed.returned.pop(0)(job)
        except BaseException:
            self._news.append(job)
            raise
        if over:
            with self._lock:
                followed.over = True
                self._end(job, followed)

    def _judge(self, job: Job) -> None:
        """What a job says of its store."""
        troubles = [(code, count) for code, count in job.counts.items() if code not in QUIET]
        before = bool(troubles) and self.suspended
        self.health.note(job)
        if self._troubles is not None:
            for code, count in troubles:
                self._troubles.note(job.kind, code, count, job.error)
            if troubles and self.suspended and not before:
                self._troubles.note(job.kind, "suspended", len(job.codes))

    def _end(self, job: Job, followed: _Followed) -> None:
        """Take the rows of a job back if nobody uses them any more. The lock is held."""
        if followed.over and not followed.held and self._jobs.pop(job, None) is not None and self._staging:
            self._free += job.rows.tolist()

    @property
    def under_way(self) -> int:
        """Jobs that have not returned, or whose rows are held, or of which ``poll`` has not told yet."""
        return len(self._jobs)

    # -- rows ----------------------------------------------------------------------------------------

    def free(self, kind: str) -> int:
        """How many rows a job of this kind can take now."""
        return max(0, len(self._free) - (0 if kind == jobs.LOAD else self._kept_for_loads))

    def take(self, kind: str, most: int, timeout: float = 0.0) -> Rows:
        """Up to ``most`` free rows for a job of this kind, int64[n]. They are the caller's until a job has them, or
        ``give_back``. Waits up to ``timeout`` seconds for one, as long as others than calls that hang have some. There
        may be none."""
        end = time.monotonic() + timeout
        while True:
            with self._lock:
                count = min(most, self.free(kind))
                if count:
                    taken = self._free[len(self._free) - count :]
                    del self._free[len(self._free) - count :]
                    return np.array(taken, np.int64)
                hangs = [job for job, each in self._jobs.items() if job.done and not job.returned and not each.held]
                in_use = self.queue.slots - len(self._free) - sum(len(job.rows) for job in hangs)
            left = end - time.monotonic()
            if left <= 0 or in_use <= 0:
                return np.empty(0, np.int64)
            self.queue.wait(min(left, _WAIT_SECONDS))
            self.poll()

    def give_back(self, rows: Rows) -> None:
        """Rows that were taken, and that no job has got."""
        with self._lock:
            self._free += rows.tolist()

    def release(self, job: Job) -> None:
        """The rows of a job that was begun with ``hold`` are not read any more."""
        with self._lock:
            followed = self._jobs.get(job)
            if followed is not None:
                followed.held = False
                self._end(job, followed)

    # -- waiting -------------------------------------------------------------------------------------

    def wait(self, job: Job, timeout: float | None = None) -> bool:
        """Wait until a job is done, at most ``timeout`` seconds, and ``poll``. Returns whether it is done."""
        job.wait(timeout)
        self.poll()
        return job.done

    def close(self, timeout: float = 10.0) -> bool:
        """What ``StoreQueue.close`` does, and ``poll``: whoever waits for a job is told that it was cancelled."""
        over = self.queue.close(timeout)
        self.poll()
        return over
