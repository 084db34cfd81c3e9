"""StoreQueue: runs the calls of a store on threads of its own, with deadlines, and believes no byte that it gives."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.arguments import bool_argument, id_array
from kvpool.arrays.layout import integer_argument
from kvpool.errors import PoolClosed, StoreBusy
from kvpool.hostcache.identity import ModelIdentity, identity_argument
from kvpool.interrupt import Bell, DeferSignals
from kvpool.process import Process
from kvpool.stores import jobs
from kvpool.stores.base import (
    CANCELLED,
    DAMAGED,
    FAILED,
    KEY_BYTES,
    LATE,
    OK,
    SEAL_BYTES,
    TAG_BYTES,
    Bytes,
    Rows,
    Space,
    Store,
)
from kvpool.stores.jobs import Job
from kvpool.stores.seals import Secret, check_library

if TYPE_CHECKING:
    from typing_extensions import Self

NO_LIMIT = (1 << 63) - 1
_NO_ROWS: Rows = np.empty(0, np.int64)
_PRIORITY = {jobs.FIND: 0, jobs.LOAD: 1, jobs.FORGET: 2, jobs.SAVE: 3}


class _Piece(NamedTuple):
    """The blocks of a job that one call of the store has. The first fields are the order in the queue."""

    priority: int
    number: int
    job: Job
    part: slice


@dataclass(frozen=True)
class StoreStats:
    """Totals since a queue was made, and its state now."""

    name: str
    blocks: dict[tuple[str, str], int]
    """by kind of job ("find", "load", "save", "forget") and by code ("absent", "ok", "failed", ...)"""
    nbytes: dict[str, int]
    """bytes of the blocks that are OK, by kind"""
    seconds: dict[str, float]
    """time in calls of the store, of all threads, by kind"""
    refused_jobs: int
    """jobs for which the queue was full"""
    queued_blocks: int
    running_calls: int
    store: dict[str, int]
    """figures of the store itself"""


CODES = ("absent", "ok", "failed", "damaged", "late", "cancelled", "refused")


class StoreQueue:
    """The jobs of one store, and the threads that do them.

    Parameters
    ----------
    store
        It is opened here, and closed by ``close``.
    memory
        uint8[slots, block_bytes], C-contiguous, writable: where blocks are saved from and loaded to.
    identity
        Whose KV this is. It is part of every key and every seal.
    secret
        32 bytes in the place of the store's own, for those who share a store without one.
    queued_blocks
        Bound for blocks of saves that wait, and for those of all other jobs that wait.
    report
        False if nobody will call ``finished``, so that no list is kept for it.
    piece_bytes
        A job is cut into calls of about this size, so that threads share it.
    clock
        () -> float, monotonic seconds. Deadlines are on it.

    Notes
    -----
    The calls that begin jobs return at once: no I/O, no hashing. Loads go before saves. When a deadline passes, the job
    is done at once, and what it has not got is LATE, even if the store hangs.

    The bytes of a block are sealed before they are saved, and compared with their seal after they were loaded: keyed
    BLAKE3, 128 bits, over key, length, identity and bytes. What does not agree is DAMAGED, and forgotten by the store.

    The rows of a save must not change, and those of a load belong to the store, until the job is *returned*.

    ``memory`` is the array that was given, ``secret`` makes the keys. Thread-safe. Bad arguments raise TypeError or
    ValueError. Calls that begin jobs raise PoolClosed and StoreBusy. All calls raise ForkedProcess in a child of
    ``os.fork()``. The constructor raises what ``store.open`` raises, and ImportError if the library for seals is
    missing.
    """

    def __init__(
        self, store: Store, memory: npt.NDArray[np.uint8], identity: ModelIdentity, *, secret: bytes | None = None,
        queued_blocks: int = 65_536, piece_bytes: int = 4 << 20, report: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        check_library()
        self.memory, identity = _memory_argument(memory), identity_argument(identity)
        self._queued_max = integer_argument("queued_blocks", queued_blocks, 1, 1 << 31)
        size = integer_argument("piece_bytes", piece_bytes, 1, 1 << 40)
        self._piece_blocks = max(1, size // self.memory.shape[1])
        if secret is not None and (not isinstance(secret, bytes) or len(secret) != 32):
            raise ValueError("secret: accepted are 32 bytes")
        self._report = bool_argument("report", report)
        self._store, self._clock, self._process = store, clock, Process()
        own = store.open(Space(bytes.fromhex(identity.fingerprint), self.memory))
        try:
            self.secret = Secret(own if secret is None else secret, identity)
        except BaseException:
            store.close()
            raise
        # Taken by itself, and not by way of a condition: see ``Bell``.
        self._lock = threading.Lock()
        self._changed, self._bell = threading.Condition(self._lock), Bell()
        self._queue: list[_Piece] = []
        self._queue_max = 1024
        self._numbers = itertools.count()
        self._waiting = {True: 0, False: 0}
        self._running: dict[int, Job] = {}
        self._deadlines: list[tuple[float, int, Job]] = []
        self._deadlines_max = 1024
        self._finished: deque[Job] = deque()
        self._blocks = {(kind, code): 0 for kind in jobs.KINDS for code in CODES}
        self._nbytes, self._seconds = dict.fromkeys(jobs.KINDS, 0), dict.fromkeys(jobs.KINDS, 0.0)
        self._refused, self._closing, self._store_closed = 0, False, False
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._signal)
        self._workers = store.threads
        names = [f"kvpool-{store.name}-{i}" for i in range(store.threads)]
        threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        threads.append(threading.Thread(target=self._watch, name=f"kvpool-{store.name}-deadlines", daemon=True))
        for thread in threads:
            thread.start()

    # -- jobs ----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the store."""
        return self._store.name

    @property
    def slots(self) -> int:
        return int(self.memory.shape[0])

    @property
    def block_bytes(self) -> int:
        return int(self.memory.shape[1])

    def now(self) -> float:
        """Seconds on the queue's clock."""
        return self._clock()

    def find(self, keys: Bytes, *, deadline: float = math.inf) -> Job:
        """Ask which blocks the store has. ``keys`` uint8[n, 32], made by ``secret``."""
        return self._begin(jobs.FIND, keys, None, deadline)

    def load(self, keys: Bytes, rows: Rows, *, deadline: float = math.inf) -> Job:
        """Load blocks into rows of the memory, ``rows`` int64[n], which belong to the store until the job is
        returned."""
        return self._begin(jobs.LOAD, keys, rows, deadline)

    def save(
        self, keys: Bytes, rows: Rows, *, tag: bytes = bytes(TAG_BYTES), limit: int = NO_LIMIT,
        deadline: float = math.inf,
    ) -> Job:  # fmt: skip
        """Save rows of the memory, which nobody may change until the job is returned. ``tag``, ``limit``: as in
        ``Store.save``."""
        if not isinstance(tag, bytes) or len(tag) != TAG_BYTES:
            raise ValueError(f"tag={tag!r:.80}: accepted are {TAG_BYTES} bytes")
        limit = integer_argument("limit", limit, 0, NO_LIMIT)
        return self._begin(jobs.SAVE, keys, rows, deadline, tag, limit)

    def forget(self, keys: Bytes) -> Job:
        """Drop blocks."""
        return self._begin(jobs.FORGET, keys, None, math.inf)

    def wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until a condition holds, which is asked with the lock held. Returns whether it does. Raises
        ForkedProcess."""
        self._process.check(self)

        def asked() -> bool:
            with self._lock:
                return condition()

        return self._bell.wait_for(asked, timeout)

    def cancel(self, job: Job) -> None:
        """What ``Job.cancel`` does."""
        self._process.check(self)
        with DeferSignals(), self._lock:
            if not job.done:
                self._settle(job, CANCELLED)

    def finished(self) -> list[Job]:
        """The jobs that were done or returned since the last call: a job that was late comes twice if its call hangs.
        Never waits. Clears ``fileno``."""
        self._process.check(self)
        signals, found = DeferSignals(), list[Job]()
        try:
            with signals, self._lock:
                signals.undo = partial(self._put_back, found)
                found += self._finished
                self._finished.clear()
                if found:
                    os.eventfd_read(self._signal)
                return found
        except BaseException:
            signals.take_back()
            raise

    def _put_back(self, found: list[Job]) -> None:
        """Nobody has learned of these jobs."""
        with self._lock:
            if found and not self._finished:
                os.eventfd_write(self._signal, 1)
            self._finished.extendleft(reversed(found))

    def fileno(self) -> int:
        """A file descriptor that can be read when ``finished`` has something: for ``select`` and asyncio."""
        return self._signal

    def wait(self, timeout: float) -> bool:
        """Wait until ``finished`` has something, at most ``timeout`` seconds. Returns whether it has."""
        self._process.check(self)
        return bool(select.select([self._signal], [], [], timeout)[0])

    def drain(self, timeout: float) -> bool:
        """Wait until no job is queued or under way, at most ``timeout`` seconds. Returns whether that is so."""
        self._process.check(self)
        return self.wait_until(lambda: not self._queue and not self._running, timeout)

    def stats(self) -> StoreStats:
        """Figures of now. Never waits for the store's I/O."""
        self._process.check(self)
        own = self._store.stats()
        with self._lock:
            return StoreStats(
                self.name, dict(self._blocks), dict(self._nbytes), dict(self._seconds), self._refused,
                sum(self._waiting.values()), len(self._running), own,
            )  # fmt: skip

    def close(self, timeout: float = 10.0) -> bool:
        """Give up what is queued, ask calls under way to stop, wait for them, and close the store.

        Returns False if a call still hangs after ``timeout`` seconds. Its rows may still be written to, so their memory
        must not be used again; the store is closed when that call returns. May be called again.
        """
        self._process.check(self)
        with DeferSignals(), self._lock:
            self._closing = True
            for job in {piece.job for piece in self._queue} | set(self._running.values()):
                if not job.done:
                    self._settle(job, CANCELLED)
            self._notify()
        return self.wait_until(lambda: self._store_closed, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------

    def _begin(
        self, kind: str, keys: Any, rows: Any, deadline: float, tag: bytes = bytes(TAG_BYTES), limit: int = 0
    ) -> Job:
        self._process.check(self)
        own = _keys_argument(keys)
        places = _NO_ROWS if rows is None else _rows_argument(rows, len(own), self.slots, kind == jobs.LOAD)
        if not isinstance(deadline, (int, float)) or math.isnan(deadline):
            raise ValueError(f"deadline={deadline!r:.80}: accepted are seconds on the queue's clock")
        job = Job(self, kind, own, places, float(deadline), tag, limit)
        parts = [slice(i, min(i + self._piece_blocks, len(own))) for i in range(0, len(own), self._piece_blocks)]
        with DeferSignals(), self._lock:
            if self._closing:
                raise PoolClosed(f"the queue of the store {self.name!r} is closed")
            saving = kind == jobs.SAVE
            if self._waiting[saving] + len(own) > self._queued_max:
                self._refused += 1
                raise StoreBusy(self.name, kind, self._waiting[saving], self._queued_max)
            self._waiting[saving] += len(own)
            for part in parts:
                heapq.heappush(self._queue, _Piece(_PRIORITY[kind], next(self._numbers), job, part))
            if not parts:
                self._announce(job)
            elif job.deadline != math.inf:
                self._watch_for(job)
            self._notify()
        return job

    def _work(self) -> None:
        """One of the threads that call the store."""
        while (piece := self._next()) is not None:
            began = time.perf_counter()
            codes, error = self._call(piece.job, piece.part)
            spent = time.perf_counter() - began
            with self._lock:
                del self._running[threading.get_ident()]
                self._seconds[piece.job.kind] += spent
                was_done = piece.job.done
                piece.job.call_ends(piece.part, codes, error)
                if piece.job.done and not was_done:
                    self._count(piece.job)
                    self._announce(piece.job)
                elif piece.job.returned:
                    self._announce(piece.job)
                self._notify()
        self._end()

    def _next(self) -> _Piece | None:
        """Wait for a call to make. Returns None when there will be none."""
        with self._lock:
            while True:
                while self._queue and self._queue[0].job.done:
                    heapq.heappop(self._queue)
                if self._queue and self._may_begin(self._queue[0].job):
                    piece = heapq.heappop(self._queue)
                    if self._clock() >= piece.job.deadline:
                        self._settle(piece.job, LATE)
                        continue
                    self._waiting[piece.job.kind == jobs.SAVE] -= piece.part.stop - piece.part.start
                    piece.job.call_begins(piece.part, self._clock())
                    self._running[threading.get_ident()] = piece.job
                    return piece
                if self._closing and not self._queue:
                    return None
                self._changed.wait()

    def _may_begin(self, job: Job) -> bool:
        """Saves leave one thread to all others, so that a save that hangs keeps no load waiting."""
        saves = sum(other.kind == jobs.SAVE for other in self._running.values())
        return job.kind != jobs.SAVE or saves < max(1, self._store.threads - 1)

    def _call(self, job: Job, part: slice) -> tuple[Bytes, str]:
        """One call of the store. Returns the codes, and the text of an error."""
        keys, rows, store = job.keys[part], job.rows[part], self._store
        try:
            if job.kind == jobs.FIND:
                return _codes(store.find(keys), len(keys)), ""
            if job.kind == jobs.FORGET:
                store.forget(keys)
                return np.full(len(keys), OK, np.uint8), ""
            if job.kind == jobs.SAVE:
                seals = self.secret.seal(keys, rows, self.memory)
                return _codes(store.save(keys, rows, seals, job.tag, job.limit, lambda: job.done), len(keys)), ""
            return self._checked(job, keys, rows), ""
        except BaseException as error:  # A store that fails in any way must not end the thread.
            return np.full(len(keys), FAILED, np.uint8), f"{type(error).__name__}: {error}"[:1000]

    def _checked(self, job: Job, keys: Bytes, rows: Rows) -> Bytes:
        """Load, and compare each block with its seal. The store is told to forget those that differ."""
        answer, found = self._store.load(keys, rows, lambda: job.done)
        codes, seals = _codes(answer, len(keys)), np.asarray(found, np.uint8).reshape(len(keys), SEAL_BYTES)
        there = np.flatnonzero(codes == OK)
        if len(there) and not job.done:
            own = self.secret.seal(keys[there], rows[there], self.memory)
            wrong = there[(seals[there] != own).any(axis=1)]
            if len(wrong):
                codes[wrong] = DAMAGED
                with suppress(Exception):
                    self._store.forget(keys[wrong])
        return codes

    def _notify(self) -> None:
        """Something has changed. The lock is held."""
        self._changed.notify_all()
        self._bell.ring()

    def _watch_for(self, job: Job) -> None:
        """End this job at its deadline. The lock is held."""
        if len(self._deadlines) >= self._deadlines_max:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
            heapq.heapify(self._deadlines)
            self._deadlines_max = max(1024, 2 * len(self._deadlines))
        heapq.heappush(self._deadlines, (job.deadline, next(self._numbers), job))

    def _watch(self) -> None:
        """The thread that ends jobs at their deadlines."""
        with self._lock:
            while not self._closing:
                while self._deadlines and (self._deadlines[0][2].done or self._deadlines[0][0] <= self._clock()):
                    _, _, job = heapq.heappop(self._deadlines)
                    if not job.done:
                        self._settle(job, LATE)
                left = self._deadlines[0][0] - self._clock() if self._deadlines else 3600.0
                self._changed.wait(min(max(left, 0.0), 3600.0))

    def _settle(self, job: Job, code: int) -> None:
        """Decide a job that is not done. The lock is held."""
        self._waiting[job.kind == jobs.SAVE] -= job.queued
        job.settle(code)
        if len(self._queue) > self._queue_max:
            # Calls that will not be made are not kept until a thread that hangs comes back.
            self._queue = [piece for piece in self._queue if not piece.job.done]
            heapq.heapify(self._queue)
            self._queue_max = max(1024, 2 * len(self._queue))
        self._count(job)
        self._announce(job)
        self._notify()

    def _count(self, job: Job) -> None:
        """Count a job that is done. The lock is held."""
        job.seconds = 0.0 if math.isnan(job.began) else self._clock() - job.began
        for code, count in zip(CODES, np.bincount(job.codes, minlength=len(CODES)).tolist(), strict=True):
            self._blocks[job.kind, code] += count
        if job.kind in (jobs.LOAD, jobs.SAVE):
            self._nbytes[job.kind] += job.ok * self.block_bytes

    def _announce(self, job: Job) -> None:
        """Tell of a job that is done or returned. The lock is held."""
        if self._report:
            if not self._finished:
                os.eventfd_write(self._signal, 1)
            self._finished.append(job)

    def _end(self) -> None:
        """A thread ends. The last one closes the store."""
        with self._lock:
            self._workers -= 1
            if self._workers:
                return
        try:
            self._store.close()
        finally:
            with self._lock:
                self._store_closed = True
                self._notify()


def _memory_argument(memory: Any) -> Bytes:
    fits = isinstance(memory, np.ndarray) and memory.dtype == np.uint8 and memory.ndim == 2 and memory.size > 0
    if not fits or not memory.flags.c_contiguous or not memory.flags.writeable:
        raise ValueError("memory: accepted is a writable, C-contiguous array uint8[slots, block_bytes]")
    # A view of its own, whose shape and type nobody else can change.
    return np.ndarray.view(memory, np.ndarray)[:]


def _keys_argument(keys: Any) -> Bytes:
    if not isinstance(keys, np.ndarray) or keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
        raise ValueError(f"keys: accepted is an array uint8[n, {KEY_BYTES}], made by the queue's secret")
    return keys.copy()


def _rows_argument(rows: Any, count: int, slots: int, distinct: bool) -> Rows:
    own = id_array("rows", rows).copy()
    if len(own) != count:
        raise ValueError(f"rows has {len(own)} elements: accepted is one for each of the {count} keys")
    if count and not (0 <= own.min() and own.max() < slots):
        raise ValueError(f"rows={own!r:.80}: accepted are 0 to {slots - 1}")
    if distinct and len(np.unique(own)) != count:
        raise ValueError(f"rows={own!r:.80}: accepted are rows that differ, as each gets one block")
    return own


def _codes(answer: Any, count: int) -> Bytes:
    """A private copy of what a store has answered. Raises ValueError for what it must not answer."""
    codes = np.array(answer, np.uint8)
    if codes.shape != (count,) or (count and int(codes.max()) >= len(CODES)):
        raise ValueError(f"the store has answered {answer!r:.80}: accepted is one code for each of {count} keys")
    return codes
