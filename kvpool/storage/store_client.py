"""CircuitBreaker: stop using a store that fails, and try it again later. TroubleLog: log what failed. StoreClient: use
one store, and call back when each of its requests has returned."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.common.arrays.layout import integer_argument
from kvpool.common.interrupt import DeferSignals
from kvpool.hostcache.identity import ModelIdentity
from kvpool.storage import store_requests as jobs
from kvpool.storage.store import Bytes, Rows, Store
from kvpool.storage.store_requests import Lend, StoreRequest
from kvpool.storage.store_worker import NO_LIMIT, Keys, StoreWorker

_READS, _WRITES = (jobs.FIND, jobs.LOAD), (jobs.SAVE,)


@dataclass(frozen=True)
class BreakerStats:
    """Totals since a CircuitBreaker was made, and its state now."""

    reads_suspended: bool
    writes_suspended: bool
    failed_jobs: int
    """jobs that counted as failures"""
    suspensions: int
    probes: int
    """jobs that were allowed, one at a time, while the store was suspended"""


class _Kind:
    """What is known of a store's jobs of one kind. The lock of the owner guards it.

    ``found``, of loads: a find that probes has found blocks, and none of their loads is done yet.
    """

    def __init__(self, wait: float) -> None:
        self.wait_first = wait
        self.answered()

    def answered(self) -> None:
        """A job was answered."""
        self.failures, self.suspended, self.probing, self.found = 0, False, False, False
        self.wait, self.probe_at = self.wait_first, 0.0

    def probe(self, now: float) -> None:
        """A probe may begin. If it is never begun, or never ends, the next one comes after another wait."""
        self.probing, self.found, self.probe_at = True, False, now + self.wait


class CircuitBreaker:
    """Suspends a store after consecutive failures, and tries it again with one job after a while.

    ``failures``: so many failed jobs in a row suspend it. ``probe_seconds``: how long until the next job is tried. It
    doubles with every probe that fails, up to ``probe_seconds_max``. A job that the store answers ends the suspension.
    ``clock``: () -> float, monotonic seconds.

    A job has failed if no block of it was answered: all are FAILED, LATE or DAMAGED. A block that is absent, or refused
    because the store is full, is an answer. A job that was cancelled says nothing. Nor does a save of blocks that had
    gone before the store got them; as a probe, it leaves the next job to be one.

    Reads and writes are suspended apart, since a disk that is full or read-only still gives what it has. Failures are
    counted for each kind of job: a find that is answered does not excuse loads that fail. Reads are suspended when
    finds or loads are. A probe of loads begins with a find. If that finds nothing, the next find is a probe too, until
    blocks are found and loaded. Drops say nothing.

    Thread-safe; never waits. Raises TypeError, ValueError.
    """

    def __init__(
        self,
        failures: int = 3,
        probe_seconds: float = 5.0,
        *,
        probe_seconds_max: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = integer_argument("failures", failures, 1, 1 << 20)
        self._wait = number_argument("probe_seconds", probe_seconds)
        self._wait_max = max(self._wait, number_argument("probe_seconds_max", probe_seconds_max))
        self._clock, self._lock = clock, threading.Lock()
        self._kinds = {kind: _Kind(self._wait) for kind in (*_READS, *_WRITES)}
        self._failed, self._suspensions, self._probes = 0, 0, 0

    def usable(self, *, writes: bool = False, found: bool = False) -> bool:
        """Whether a job may be begun now. While the store is suspended, this is true once after each wait: the job that
        is begun then is the probe. ``found``: the job loads blocks that a find has found. It may then be begun with the
        probe of that find."""
        with self._lock:
            down = self._suspended(writes)
            if not down:
                return True
            now_s, loads = self._clock(), self._kinds[jobs.LOAD]
            if found and loads.found:
                return True
            if any(now_s < kind.probe_at for kind in down):
                return False
            # A load that is answered does not end what finds that failed have begun: their probe stays to a find.
            probed = [kind for kind in down if not found or kind is loads]
            for kind in probed:
                kind.probe(now_s)
            self._probes += bool(probed)
            return True

    def suspended(self, *, writes: bool = False) -> bool:
        """Whether it is suspended. Asks for no probe."""
        with self._lock:
            return bool(self._suspended(writes))

    def note(self, job: StoreRequest) -> None:
        """Learn from a job that is done. Call it once for each job."""
        failed = _failed(job)
        if job.kind in jobs.DROPS:
            return
        with self._lock:
            kind = self._kinds[job.kind]
            if failed is None:
                if kind.probing and "absent" in job.counts:
                    kind.probing, kind.probe_at = False, self._clock()
                return
            self._failed += failed
            if failed:
                self._failure(kind)
                return
            kind.answered()
            loads = self._kinds[jobs.LOAD]
            if job.kind == jobs.FIND and loads.probing and not loads.found:
                loads.found = "ok" in job.counts
                if not loads.found:
                    loads.probing, loads.probe_at = False, self._clock()

    def resume(self) -> None:
        """End the suspensions, as if the store had answered."""
        with self._lock:
            for kind in self._kinds.values():
                kind.answered()

    def stats(self) -> BreakerStats:
        """Figures of now."""
        with self._lock:
            reads, writes = bool(self._suspended(False)), bool(self._suspended(True))
            return BreakerStats(reads, writes, self._failed, self._suspensions, self._probes)

    def _suspended(self, writes: bool) -> list[_Kind]:
        """The kinds of jobs that are suspended. The lock is held."""
        return [self._kinds[kind] for kind in (_WRITES if writes else _READS) if self._kinds[kind].suspended]

    def _failure(self, kind: _Kind) -> None:
        """A job of this kind has failed. The lock is held."""
        kind.failures += 1
        if not kind.suspended and kind.failures >= self._most:
            kind.suspended, kind.probe_at = True, self._clock() + kind.wait
            self._suspensions += 1
        elif kind.probing:
            kind.wait = min(2 * kind.wait, self._wait_max)
            kind.probing, kind.found, kind.probe_at = False, False, self._clock() + kind.wait


def number_argument(name: str, value: Any, least: float = 0.0) -> float:
    """A time in seconds, or a rate, finite and not below ``least``. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected numbers, got {value!r:.80}")
    if not least <= value <= sys.float_info.max:
        raise ValueError(f"{name}: expected finite numbers from {least:g}, got {value!r:.80}")
    return float(value)


def _failed(job: StoreRequest) -> bool | None:
    """Whether a job has failed. None if it says nothing."""
    # The store was not asked to save what is absent.
    told = job.counts.keys() - {"cancelled", "absent" if job.kind == jobs.SAVE else ""}
    return told <= {"failed", "late", "damaged"} if told else None


REPEAT_SECONDS = 60.0
"""How long until trouble that goes on is told again."""
_MEANING = {
    "absent": "the store does not have them",
    "busy": "more waited than the queue takes",
    "crowded": "there was no room for them",
    "damaged": "the bytes were not those that were saved",
    "evicted": "they left the host before the store could take them",
    "failed": "the store raised an error",
    "late": "the store took longer than its deadline",
    "refused": "the store is full",
    "suspended": "after failures the store is not asked for a while",
}
_LOG = logging.getLogger("kvpool.storage")


class TroubleLog:
    """Blocks of a store by kind of job and by what went wrong. The first of each kind is a warning in the log. From
    then on they are counted, and their number is a warning at most every ``REPEAT_SECONDS``. Thread-safe."""

    def __init__(self, store: str, clock: Callable[[], float] = time.monotonic, log: logging.Logger = _LOG) -> None:
        self._store, self._clock, self._log, self._lock = store, clock, log, threading.Lock()
        self.counts: Counter[tuple[str, str]] = Counter()
        """by kind of job and by what went wrong"""
        self._told: dict[tuple[str, str], tuple[int, float]] = {}

    def note(self, kind: str, what: str, count: int, detail: str = "", quiet: bool = False) -> None:
        """Something went wrong with so many blocks. ``quiet``: it is the consequence of what was told before."""
        trouble, now_s = (kind, what), self._clock()
        with self._lock:
            self.counts[trouble] += count
            before, since = self._told.get(trouble, (0, -math.inf))
            if quiet or now_s - since < REPEAT_SECONDS:
                return
            more = self.counts[trouble] - before
            self._told[trouble] = self.counts[trouble], now_s
        why = f"{what} {detail}".strip() + (f" ({_MEANING[what]})" if what in _MEANING else "")
        text = "kvpool: store %s: %s of %d blocks%s: %s. From now on this is counted, and told once a minute."
        self._log.warning(text, self._store, kind, more, " more" if before else "", why)


Call = Callable[[StoreRequest], object]
QUIET = ("ok", "absent", "cancelled")
"""What is no trouble."""
PATIENCE_SECONDS = 0.1
"""A job that had less time than this and is late says nothing about its store."""
PAGE_BYTES = 4096
_WAIT_SECONDS = 0.01


def row_padding_of(store: Store) -> int:
    """How many bytes more the rows have that are made for this store alone: whole pages."""
    return (
        -(-integer_argument("store.row_padding", getattr(store, "row_padding", 0), 0, 1 << 20) // PAGE_BYTES)
        * PAGE_BYTES
    )


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
    store, memory, identity, spare, clock
        As for ``StoreWorker``, which is made here. It is open to all as ``queue``.
    health
        Judges the store by its jobs. None: a ``CircuitBreaker`` on this clock.
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
    Calls that begin jobs return at once. They raise what those of ``StoreWorker`` raise; the caller keeps its rows
    then. ``done(job)`` is called once when the job is done, and ``returned(job)`` once after that, when no call of the
    store uses its rows any more. ``poll`` makes these calls, with no lock held. If one raises, the others are made by
    the next ``poll``.

    Thread-safe. Who gives calls to be made polls on one thread, which makes them all. In a child of ``os.fork()`` calls
    that begin jobs, ``poll``, ``wait`` and ``close`` raise ForkedProcess.

    Examples
    --------
    >>> import numpy as np, kvpool
    >>> from kvpool.storage import MemoryStore, BlockNames
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
        self,
        store: Store,
        memory: Bytes,
        identity: ModelIdentity,
        *,
        health: CircuitBreaker | None = None,
        patience: float = PATIENCE_SECONDS,
        staging: bool = False,
        row_padding: int = 0,
        warns: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue = StoreWorker(store, memory, identity, row_padding=row_padding, clock=clock)
        self.health = health or CircuitBreaker(clock=clock)
        self.name, self.secret, self.memory = self.queue.name, self.queue.secret, self.queue.memory
        self._patience, self._staging, self._clock = patience, staging, clock
        self._troubles = TroubleLog(self.name, clock) if warns else None
        # Also held while a job is begun, so that nobody is told of it before it is followed.
        self._lock = threading.Lock()
        self._jobs: dict[StoreRequest, _Followed] = {}
        self._news: deque[StoreRequest] = deque()
        self._free = list(range(self.queue.slots if staging else 0))
        self._kept_for_loads = len(self._free) // 2

    # -- whether it is asked -------------------------------------------------------------------------

    def usable(self, kind: str) -> bool:
        """Whether a job of this kind may be begun now. While the store is suspended, this is true once after each wait,
        for a job that probes it. A drop is no probe. See ``CircuitBreaker``."""
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
    ) -> StoreRequest:
        """What ``StoreWorker.find`` does."""
        return self._follow(lambda: self.queue.find(keys, tag=tag, deadline=deadline), done)

    def load(
        self,
        keys: Keys,
        rows: Rows,
        done: Call | None = None,
        returned: Call | None = None,
        *,
        tag: bytes | None = None,
        deadline: float = math.inf,
        hold: bool = False,
    ) -> StoreRequest:
        """What ``StoreWorker.load`` does. ``hold``: the rows are read until ``release``."""
        return self._follow(lambda: self.queue.load(keys, rows, tag=tag, deadline=deadline), done, returned, hold)

    def save(
        self,
        keys: Keys,
        rows: Rows | Lend,
        done: Call | None = None,
        returned: Call | None = None,
        *,
        tag: bytes | None = None,
        limit: int = NO_LIMIT,
        deadline: float = math.inf,
    ) -> StoreRequest:
        """What ``StoreWorker.save`` does."""
        begin = self.queue.save
        return self._follow(lambda: begin(keys, rows, tag=tag, limit=limit, deadline=deadline), done, returned)

    def forget(self, keys: Keys, done: Call | None = None) -> StoreRequest:
        """What ``StoreWorker.forget`` does."""
        return self._follow(lambda: self.queue.forget(keys), done)

    def clear(self, tag: bytes | None = None, done: Call | None = None) -> StoreRequest:
        """What ``StoreWorker.clear`` does. It may give a job that was begun before: then ``done`` is called too."""
        return self._follow(lambda: self.queue.clear(tag), done)

    def reset(self, done: Call | None = None) -> StoreRequest:
        """What ``StoreWorker.reset`` does."""
        return self._follow(self.queue.reset, done)

    def _follow(
        self, begin: Callable[[], StoreRequest], done: Call | None, returned: Call | None = None, held: bool = False
    ) -> StoreRequest:
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
    def has_results(self) -> bool:
        """Whether ``poll`` has a call to make."""
        return bool(self._news) or self.queue.has_results

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

    def _tell(self, job: StoreRequest) -> None:
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

    def _judge(self, job: StoreRequest) -> None:
        """What a job says of its store."""
        troubles = [(code, count) for code, count in job.counts.items() if code not in QUIET]
        before = bool(troubles) and self.suspended
        self.health.note(job)
        if self._troubles is not None:
            for code, count in troubles:
                self._troubles.note(job.kind, code, count, job.error)
            if troubles and self.suspended and not before:
                self._troubles.note(job.kind, "suspended", len(job.codes))

    def _end(self, job: StoreRequest, followed: _Followed) -> None:
        """Take the rows of a job back if nobody uses them any more. The lock is held."""
        if followed.over and not followed.held and self._jobs.pop(job, None) is not None and self._staging:
            self._free += job.rows.tolist()

    @property
    def in_flight(self) -> int:
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

    def release(self, job: StoreRequest) -> None:
        """The rows of a job that was begun with ``hold`` are not read any more."""
        with self._lock:
            followed = self._jobs.get(job)
            if followed is not None:
                followed.held = False
                self._end(job, followed)

    # -- waiting -------------------------------------------------------------------------------------

    def wait(self, job: StoreRequest, timeout: float | None = None) -> bool:
        """Wait until a job is done, at most ``timeout`` seconds, and ``poll``. Returns whether it is done."""
        job.wait(timeout)
        self.poll()
        return job.done

    def close(self, timeout: float = 10.0) -> bool:
        """What ``StoreWorker.close`` does, and ``poll``: whoever waits for a job is told that it was cancelled."""
        over = self.queue.close(timeout)
        self.poll()
        return over
