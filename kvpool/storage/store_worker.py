"""StoreWorker: run the calls of a store on its own threads, with deadlines; verify every block that it returns; call
back when a request is done; and stop using the store for a while when it fails."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import re
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arguments import bool_argument
from kvpool.common.arrays import Uint8s
from kvpool.common.arrays.digest import check_library
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.changes import Changes, Step, from_handler
from kvpool.common.errors import PoolClosed, StoreBusy
from kvpool.common.process import Closing, Process
from kvpool.common.threads import Bell
from kvpool.hostcache.identity import ModelIdentity, identity_argument
from kvpool.storage.calls import NO_CODES, NO_ROWS, StoreCalls
from kvpool.storage.circuit_breaker import CircuitBreaker, TroubleLog
from kvpool.storage.mac import BlockNames, Secret
from kvpool.storage.store import (
    CANCELLED,
    CODES,
    KEY_BYTES,
    LATE,
    MODEL_BYTES,
    OK,
    TAG_BYTES,
    Bytes,
    Rows,
    Space,
    Store,
)
from kvpool.storage.store_requests import (
    CLEAR,
    DROPS,
    FIND,
    FORGET,
    KINDS,
    LOAD,
    SAVE,
    Call,
    Keys,
    Lend,
    StoreRequest,
    Tombstones,
    keys_argument,
    rows_argument,
)

NO_LIMIT = (1 << 63) - 1
_PRIORITY = {FIND: 0, LOAD: 1, SAVE: 2}
_READS = (FIND, LOAD)
_DROPS = "drops"
_BOUND = {FIND: LOAD, LOAD: LOAD, SAVE: SAVE, FORGET: _DROPS, CLEAR: _DROPS}
"""Kinds of jobs that wait together, up to a bound."""
PATIENCE_SECONDS = 0.1
"""A job that had less time than this and is late says nothing about its store."""
PAGE_BYTES = 4096


def row_padding_of(store: Store) -> int:
    """How many bytes more the rows have that are made for this store alone: whole pages."""
    padding = integer_argument("store.row_padding", getattr(store, "row_padding", 0), 0, 1 << 20)
    return -(-padding // PAGE_BYTES) * PAGE_BYTES


def staging_rows(count: int, nbytes: int) -> Bytes:
    """Rows in main memory, uint8[count, whole pages], which begin at a page: so direct I/O can use them."""
    size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    raw = np.zeros(count * size + PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES
    return raw[start : start + count * size].reshape(count, size)


class _Entry(NamedTuple):
    """A job in a ``_Line``. The first two fields are its order."""

    order: float
    number: int
    job: StoreRequest


class _Line:
    """Jobs in their order, the first in front. The owner holds the queue's lock.

    Those that are done meanwhile have no use. They are thrown away when as many have come as were left the last time,
    so that they do not pile up while all threads hang. A job may be in it twice.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._most, self._numbers = 1024, itertools.count()

    def putting(self, order: float, job: StoreRequest) -> Step:
        """The step that puts a job into the line."""
        if len(self._heap) >= self._most:
            self._heap = [entry for entry in self._heap if not entry.job.done]
            heapq.heapify(self._heap)
            self._most = max(1024, 2 * len(self._heap))
        return partial(heapq.heappush, self._heap, _Entry(order, next(self._numbers), job))

    def pop(self) -> None:
        heapq.heappop(self._heap)

    def first(self) -> _Entry | None:
        """The first job that is not done."""
        while self._heap and self._heap[0].job.done:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


@dataclass(frozen=True)
class StoreStats:
    """Totals since a queue was made, and its state now."""

    name: str
    blocks: dict[tuple[str, str], int]
    """by kind of job ("find", "load", "save", "forget", "clear") and by code ("absent", "ok", "failed", ...)"""
    nbytes: dict[str, int]
    """bytes of the blocks that are OK, by kind"""
    seconds: dict[str, float]
    """time in calls of the store, of all threads, by kind"""
    refused_jobs: int
    """jobs for which the queue was full"""
    queued_blocks: int
    running_calls: int
    unconfirmed_drops: int
    """forgets and clears that the store has not confirmed"""
    store: dict[str, int]
    """figures of the store itself"""


class StoreWorker(Closing):
    """The jobs of one store, and the threads that do them.

    Parameters
    ----------
    store
        It is opened here, and closed by ``close``.
    memory
        uint8[slots, block_bytes + spare], C-contiguous, writable: where blocks are saved from and loaded to.
    identity
        Whose KV this is. It is part of every key and every seal.
    secret
        32 bytes in the place of the store's own, for those who share a store without one.
    queued_blocks
        Bound for blocks of saves that wait, for those of finds and loads, and for those that are to be dropped.
    spare
        Bytes at the end of each row of ``memory`` that are no block's: see ``Space``. No row is in two jobs then.
    piece_bytes
        A job is cut into calls of about this size, so that threads share it.
    staging
        Whether the rows of ``memory`` are lent out by ``take``. A job gives them back when it has returned, and not
        before; if it was begun with ``hold``, not before ``release`` either. Half of the rows, rounded down, are kept
        for loads, so that no save keeps a load waiting for a row.
    health
        Judges the store by its jobs. None: a ``CircuitBreaker`` on this clock.
    patience
        In seconds. A job that had less time than this and is late says nothing about its store.
    warns
        Whether what goes wrong is logged by ``poll``: one WARNING for each kind of trouble, then a count, at most once
        a minute.
    clock
        () -> float, monotonic seconds. Deadlines are on it.

    Notes
    -----
    The calls that begin jobs return at once: no I/O, no hashing. Loads go before saves. When a deadline passes, the job
    is done at once, and what it has not got is LATE, even if the store hangs.

    ``done(job)`` is called once when the job is done, and ``returned(job)`` once after that, when no call of the store
    uses its rows any more. ``poll`` makes these calls, with no lock held. If one raises, the next ``poll`` makes the
    others. If the exception is one of a signal handler, such as the KeyboardInterrupt of Ctrl-C, the next ``poll``
    makes the same call again. A worker with such callbacks is polled by one thread, which makes all of these calls.

    A signal handler that raises in a call leaves the call undone, or done. Rows that ``take`` has given to nobody then
    are the only loss.

    The bytes of a block are sealed before they are saved, and compared with their seal after they were loaded: 128 bits
    of keyed BLAKE2b over key, length, identity, context and a keyed ``Digest`` of the bytes. What does not agree is
    DAMAGED, and forgotten by the store.

    From the moment that ``forget`` or ``clear`` has returned, what is to be dropped is CANCELLED for finds, loads and
    saves, also for those that were begun before. This ends when the store has confirmed the drop. Then the job is OK,
    and no save that was begun before has left such a block in the store. Until then the store is told again and again.
    If the queue is closed first, the job is CANCELLED, and the store may have the blocks.

    The rows of a save must not change, and those of a load belong to the store, until the job is *returned*.

    ``memory`` has the blocks of the array that was given, ``secret`` makes the keys. Thread-safe. Bad arguments raise
    TypeError or ValueError. Calls that begin jobs raise PoolClosed and StoreBusy; the caller keeps its rows then. All
    calls raise ForkedProcess in a child of ``os.fork()``. The constructor raises what ``store.open`` raises, and
    ImportError if the library for seals is missing.

    Examples
    --------
    >>> import numpy as np, kvpool
    >>> from kvpool.storage import BlockNames, MemoryStore, StoreWorker, staging_rows
    >>> model = kvpool.ModelIdentity("tiny", "rev 1", "float16", "2 layers", "mine 1")
    >>> worker = StoreWorker(MemoryStore(1 << 20), staging_rows(4, 4096), model, staging=True)
    >>> rows = worker.take("save", 2)
    >>> worker.memory[rows] = 7
    >>> job = worker.save(BlockNames([b"one", b"two"]), rows, lambda job: print(job.ok, "saved"))
    >>> job.wait(60.0)
    True
    >>> worker.poll()
    2 saved
    True
    >>> worker.close()
    True
    """

    def __init__(
        self,
        store: Store,
        memory: Uint8s,
        identity: ModelIdentity,
        *,
        secret: bytes | None = None,
        queued_blocks: int = 65_536,
        piece_bytes: int = 4 << 20,
        row_padding: int = 0,
        staging: bool = False,
        health: CircuitBreaker | None = None,
        patience: float = PATIENCE_SECONDS,
        warns: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_library("a store", "stores")
        memory_view = _memory_argument(memory)
        identity = identity_argument(identity)
        row_padding = integer_argument("row_padding", row_padding, 0, memory_view.shape[1] - 1)
        self.memory = memory_view[:, : memory_view.shape[1] - row_padding]
        self.slots, self.block_bytes = self.memory.shape
        self._queued_max = integer_argument("queued_blocks", queued_blocks, 1, 1 << 31)
        size = integer_argument("piece_bytes", piece_bytes, 1, 1 << 40)
        self.piece_blocks = max(1, size // self.block_bytes)
        """The most blocks of one call."""
        # Asked once: a store may say something else later.
        self.name = _name_argument(store.name)
        self._workers = integer_argument("store.threads", store.threads, 1, 256)
        self.savers = max(1, self._workers - 1)
        """How many calls of the store save at a time."""
        self.clears_prefix = integer_argument("store.clears_prefix", getattr(store, "clears_prefix", 0), 0, TAG_BYTES)
        """By how many bytes of a tag the store can drop blocks: see ``Store.clears_prefix``."""
        self.persistent = bool_argument("store.persistent", getattr(store, "persistent", True))
        """Whether what the store keeps can outlive the process."""
        self.indexed = bool_argument("store.indexed", getattr(store, "indexed", False))
        """Whether ``find_now`` may have an answer."""
        self._store, self._clock, self._process = store, clock, Process()
        self.health = health or CircuitBreaker(clock=clock)
        """Judges the store."""
        self._patience, self._staging, self._warns = patience, staging, warns
        self._troubles = TroubleLog(self.name, clock)
        self._free = list(range(self.slots if staging else 0))
        self._kept_for_loads = len(self._free) // 2
        store_secret = store.open(Space(bytes.fromhex(identity.fingerprint), memory_view, row_padding))
        try:
            self.secret = Secret(store_secret if secret is None else secret, identity)
        except BaseException:
            store.close()
            raise
        self._calls, self._drops = StoreCalls(store, self.secret, self.memory, self.forget), Tombstones()
        self._own_tag = self.secret.tag(b"")
        # Callers wait for the bell. The threads that wait for a call to make, and the one that waits for a deadline,
        # are woken apart.
        # Whoever takes the lock enters ``changes``, but for those that wait and read only.
        self._lock, self._changes, self._bell = threading.RLock(), Changes(), Bell()
        # A store is not closed while somebody has this.
        self._in_use = threading.RLock()
        self._work_comes, self._alarm = threading.Condition(self._lock), threading.Condition(self._lock)
        # Jobs that have not returned, or are held, or of which ``poll`` has not told; and drops not confirmed.
        self._open: dict[StoreRequest, None] = {}
        self._queue, self._deadlines = _Line(), _Line()
        # By kind how many blocks wait, in arrays of one number: to add to one is a single step.
        self._waiting = {bound: np.zeros(1, np.int64) for bound in _BOUND.values()}
        self._running: dict[int, tuple[StoreRequest, Rows]] = {}
        self._wakes_at = -math.inf  # when the thread that waits for a deadline looks again, if nobody wakes it
        self._finished: deque[StoreRequest] = deque()
        self._blocks = {(kind, code): 0 for kind in KINDS for code in CODES}
        self._nbytes, self._seconds = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0)
        self._refused, self._closing, self._store_closed = 0, False, False
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._signal)
        for name, work in [*((str(i), self._work) for i in range(self._workers)), ("deadlines", self._watch)]:
            threading.Thread(target=work, name=f"kvpool-{self.name}-{name}", daemon=True).start()

    # -- jobs ----------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds on the queue's clock."""
        return self._clock()

    def usable(self, kind: str) -> bool:
        """Whether a job of this kind may be begun now. While the store is suspended, this is true once after each wait,
        for a job that probes it. A drop is no probe. See ``CircuitBreaker``."""
        if kind in DROPS:
            return not self.health.suspended(writes=True)
        return self.health.usable(writes=kind == SAVE, found=kind == LOAD)

    @property
    def suspended(self) -> bool:
        """Whether the store is left alone for a while, to save or for anything else."""
        return self.health.suspended() or self.health.suspended(writes=True)

    def find(
        self, keys: Keys, done: Call | None = None, *, tag: bytes | None = None, deadline: float = math.inf
    ) -> StoreRequest:
        """Ask which blocks the store has. ``keys``: uint8[n, 32], made by ``secret``, or ``BlockNames``. ``tag``: that
        with which they were saved."""
        return self._begin(FIND, keys, None, done, None, deadline, tag)

    def find_now(self, keys: Keys) -> Bytes | None:
        """The codes of ``find``, asked on this thread, of a store that is ``indexed``. None if only a job can tell:
        another store, one that has failed or is suspended, or one that is to drop something. Hashes names."""
        self._process.check(self)
        checked_keys = keys_argument(keys)
        with self._in_use:
            with self._lock, self._changes:
                if not self.indexed or self._closing or len(self._drops) or self.health.suspended():
                    return None
            began = time.perf_counter()
            try:
                codes = self._calls.find(checked_keys)
            except Exception as error:
                if from_handler(error):
                    raise
                return None
        counts = np.bincount(codes, minlength=len(CODES)).tolist()
        if sum(counts[:2]) != len(checked_keys):
            return None
        with self._lock:
            self._seconds[FIND] += time.perf_counter() - began
            for code, count in zip(CODES, counts, strict=True):
                self._blocks[FIND, code] += count
        return codes

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
        owner: object = None,
    ) -> StoreRequest:
        """Load blocks into rows of the memory, ``rows`` int64[n], which belong to the store until the job is
        returned. ``tag``: that with which they were saved. ``hold``: rows of ``take`` are read until ``release``.
        ``owner``: of the job, for ``requests``."""
        return self._begin(LOAD, keys, rows, done, returned, deadline, tag, hold=hold, owner=owner)

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
        """Save rows of the memory, which nobody may change until the job is returned. ``tag``: of a namespace, made by
        ``secret``; None: ``secret.tag(b"")``. ``limit``: as in ``Store.save``.

        ``rows``: int64[n], or what lends them for as long as a call of the store reads them. It is called on the
        queue's threads, with the ``BlockNames`` of the call. A block that is not there any more is ABSENT. If others
        took the rows back before the call had returned, its context raises BlockNotFound at the end; then the store
        drops what it has saved.
        """
        limit, lend = integer_argument("limit", limit, 0, NO_LIMIT), rows if callable(rows) else None
        if lend is not None and not isinstance(keys, BlockNames):
            raise TypeError(f"keys: expected BlockNames where rows are lent, got {type(keys).__name__}")
        return self._begin(SAVE, keys, None if lend else rows, done, returned, deadline, tag, limit, lend)

    def forget(self, keys: Keys, done: Call | None = None) -> StoreRequest:
        """Drop blocks."""
        return self._begin(FORGET, keys, None, done)

    def clear(self, tag: bytes | None = None, done: Call | None = None) -> StoreRequest:
        """Drop all blocks of the model, or all that were saved with this tag. It may give a job that was begun before:
        then ``done`` is called too. Raises ValueError for a store that cannot do it."""
        size = MODEL_BYTES if tag is None else TAG_BYTES
        if self.clears_prefix < size:
            what = "all blocks of a model" if tag is None else "the blocks of a namespace"
            raise ValueError(
                f"store: expected one that can drop {what}, whose clears_prefix is {size}, got {self.name!r}"
            )
        return self._clear(self.secret.model if tag is None else self._tag(tag), done)

    def reset(self, done: Call | None = None) -> StoreRequest:
        """Begin an epoch of the model: find nothing any more that was saved before, such as the KV of weights that were
        replaced. The store drops it as for ``clear``, if it can.

        When the job is OK, a store with ``Store.epoch`` remembers the epoch. Whoever opens it later finds what is saved
        from then on. Others who have it open stay in the epoch in which they are until they reset it too: they
        find nothing of this one, and nothing that they save is found here. A store without ``Store.epoch`` has
        what was saved in the first one for those who open it later, as far as it has not dropped it.
        """
        return self._clear(self.secret.model, done, renews=True)

    def _clear(self, prefix: bytes, done: Call | None, renews: bool = False) -> StoreRequest:
        keys = np.empty((0, KEY_BYTES), np.uint8)
        return self._begin(CLEAR, keys, None, done, tag=prefix, renews=renews)

    @property
    def is_backlogged(self) -> bool:
        """Whether a save that begins now waits for others."""
        with self._lock, self._changes:
            return bool(self._waiting[SAVE]) or not self._may_begin(SAVE)

    def check_forget(self, blocks: int) -> None:
        """Raise StoreBusy if so many blocks more may not wait to be dropped now."""
        with self._lock, self._changes:
            self._check_room(FORGET, blocks)

    def wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until a condition holds, which is asked with the lock held. Returns whether it does. Raises
        ForkedProcess."""
        self._process.check(self)

        def asked() -> bool:
            with self._lock, self._changes:
                return condition()

        return self._bell.wait_for(asked, timeout)

    def cancel(self, job: StoreRequest) -> None:
        """What ``Job.cancel`` does."""
        self._process.check(self)
        if job.kind in DROPS:
            raise ValueError(f"{job!r}: it cannot be cancelled")
        with self._lock, self._changes:
            if not job.done:
                self._settle(job, CANCELLED)

    @property
    def has_results(self) -> bool:
        """Whether ``poll`` has a call to make."""
        return bool(self._finished)

    def poll(self) -> bool:
        """Make the calls of jobs that are done or returned. Never waits. Returns whether there were such jobs. Clears
        ``fileno``."""
        self._process.check(self)
        told = self.has_results
        if told:
            with suppress(BlockingIOError):
                os.eventfd_read(self._signal)
        try:
            # Those of a callback that polls are made by the call around it.
            while self._finished and not (job := self._finished[0]).telling:
                self._tell(job)
                self._finished.popleft()
        except BaseException:
            if self._finished:
                os.eventfd_write(self._signal, 1)
            raise
        return told

    def _tell(self, job: StoreRequest) -> None:
        """Make the calls of a job. Each is dropped after it was made, so that none is lost."""
        job.telling = True
        try:
            for calls in (job.on_done, job.on_returned if job.returned else []):
                while calls:
                    try:
                        calls[0](job)
                    except BaseException as error:
                        if not from_handler(error):
                            del calls[0]
                        raise
                    del calls[0]
        finally:
            job.telling = False
        with self._lock, self._changes:
            self._let_go(job)

    @property
    def requests(self) -> list[StoreRequest]:
        """Jobs that have not returned, or whose rows are held, or of which ``poll`` has not told yet; and drops that
        are not confirmed."""
        with self._lock, self._changes:
            return list(self._open)

    @property
    def in_flight(self) -> int:
        """Finds, loads and saves that have not returned, or whose rows are held, or of which ``poll`` has not told
        yet."""
        return sum(job.kind not in DROPS for job in self.requests)

    def fileno(self) -> int:
        """A file descriptor that can be read when ``poll`` has a call to make: for ``select`` and asyncio."""
        return self._signal

    def wait(self, timeout: float) -> bool:
        """Wait until ``poll`` has a call to make, at most ``timeout`` seconds. Returns whether it has."""
        self._process.check(self)
        return self.has_results or bool(select.select([self._signal], [], [], timeout)[0])

    def drain(self, timeout: float) -> bool:
        """Wait until no find, load or save is queued or under way, at most ``timeout`` seconds. Returns whether that is
        so. Drops that the store does not confirm are not waited for: wait for their jobs."""
        self._process.check(self)
        return self.wait_until(lambda: all(job.returned or job.kind in DROPS for job in self._open), timeout)

    def stats(self) -> StoreStats:
        """Figures of now. Never waits for the store's I/O."""
        self._process.check(self)
        store_figures = self._calls.figures()
        with self._lock, self._changes:
            return StoreStats(
                self.name,
                dict(self._blocks),
                dict(self._nbytes),
                dict(self._seconds),
                self._refused,
                sum(int(blocks[0]) for blocks in self._waiting.values()),
                len(self._running),
                len(self._drops),
                store_figures,
            )

    # -- rows ----------------------------------------------------------------------------------------

    def free(self, kind: str) -> int:
        """How many rows a job of this kind can take now."""
        return max(0, len(self._free) - (0 if kind == LOAD else self._kept_for_loads))

    def take(self, kind: str, most: int, timeout: float = 0.0) -> Rows:
        """Up to ``most`` free rows for a job of this kind, int64[n]. They are the caller's until a job has them, or
        ``give_back``. Waits up to ``timeout`` seconds for one, as long as others than calls that hang have some. There
        may be none."""
        taken: list[int] = []

        def took() -> bool:
            count = 0 if taken else min(most, self.free(kind))
            if count:
                taken.extend(self._free[-count:])
                del self._free[-count:]
            hang = sum(len(job.rows) for job in self._open if job.done and not job.returned and not job.held)
            return bool(taken) or len(self._free) + hang >= self.slots

        self.wait_until(took, timeout)
        return np.array(taken, np.int64)

    def give_back(self, rows: Rows) -> None:
        """Rows that were taken, and that no job has got."""
        with self._lock, self._changes:
            self._free += rows.tolist()
        self._bell.ring()

    def release(self, job: StoreRequest) -> None:
        """The rows of a job that was begun with ``hold`` are not read any more."""
        with self._lock, self._changes:
            self._changes.run(partial(setattr, job, "held", False), finish=lambda _: self._let_go(job))

    def _let_go(self, job: StoreRequest) -> None:
        """Take the rows of a job back if nobody uses them any more. The lock is held."""
        told = not (job.telling or job.on_done or job.on_returned)
        if job.returned and told and not job.held and job in self._open:
            rows = job.rows.tolist() if self._staging else []
            self._changes.run(partial(self._open.__delitem__, job), partial(self._free.extend, rows))
            self._bell.ring()

    # -- the end -------------------------------------------------------------------------------------

    def close(self, timeout: float = 10.0, *, tell: bool = True) -> bool:
        """Give up what is queued, ask calls under way to stop, wait for them, and close the store. ``tell``: ``poll``,
        so that whoever waits for a job is told that it was cancelled.

        Returns False if a call still hangs after ``timeout`` seconds. Its rows may still be written to, so their memory
        must not be used again; the store is closed when that call returns. May be called again.
        """
        self._process.check(self)
        with self._lock, self._changes:
            self._closing = True
            for job in list(self._open):
                if not job.done:
                    self._settle(job, CANCELLED)
            self._work_comes.notify_all()
            self._alarm.notify_all()
            self._bell.ring()
        over = self.wait_until(lambda: self._store_closed, timeout)
        if tell:
            self.poll()
        return over

    # -- inside --------------------------------------------------------------------------------------

    def _begin(
        self,
        kind: str,
        keys: object,
        rows: object,
        done: Call | None = None,
        returned: Call | None = None,
        deadline: float = math.inf,
        tag: bytes | None = None,
        limit: int = 0,
        lend: Lend | None = None,
        renews: bool = False,
        hold: bool = False,
        owner: object = None,
    ) -> StoreRequest:
        self._process.check(self)
        checked_keys = keys_argument(keys)
        if kind != CLEAR:
            tag = self._own_tag if tag is None else self._tag(tag)
        places = NO_ROWS if rows is None else rows_argument(rows, len(checked_keys), self.slots, kind == LOAD)
        end = _deadline_argument(deadline)
        job = StoreRequest(self, kind, checked_keys, places, lend, end, tag or b"", limit, renews)
        job.owner, job.held, job.hurried = owner, hold, end - self._clock() < self._patience
        job.on_done = [self._log] if self._warns and kind not in DROPS else []
        job.on_done += [] if done is None else [done]
        job.on_returned += [] if returned is None else [returned]
        self._hash(job)
        with self._lock, self._changes:
            if self._closing:
                raise PoolClosed(f"the queue of the store {self.name!r} is closed")
            same = self._drops.clearing(job) if kind == CLEAR else None
            if same is not None:
                same.on_done += job.on_done
                return same
            self._check_room(kind, job.queued)
            lined_up = () if job.done or kind in DROPS else (self._queue.putting(_PRIORITY[kind], job),)
            self._changes.run(
                partial(self._open.__setitem__, job, None),
                partial(self._waiting[_BOUND[kind]].__iadd__, job.queued),
                *lined_up,
                finish=lambda _: self._begun(job),
            )
        return job

    def _begun(self, job: StoreRequest) -> None:
        """Do what the beginning of a job needs besides. The lock is held."""
        if job.done:
            self._announce(job)
        elif job.kind in DROPS:
            self._drops.add(job)
            for other in self._kept_from_drops():
                if job.kind == CLEAR or not other.key_set.isdisjoint(job.key_bytes):
                    self._screen(other)
        else:
            if job.deadline != math.inf:
                self._deadlines.putting(job.deadline, job)()
                if job.deadline < self._wakes_at or job.deadline <= self._clock():
                    self._alarm.notify()
            if len(self._drops):
                self._screen(job)
        self._wake_one()

    def _hash(self, job: StoreRequest) -> None:
        """Hash the keys that are compared below, before the lock is taken for that."""
        if job.kind == FORGET:
            with self._lock, self._changes:
                others = self._kept_from_drops()
            for other in (job, *others):
                other.hashed()
        elif job.kind != CLEAR and len(self._drops):
            job.hashed()

    def _check_room(self, kind: str, blocks: int) -> None:
        """The lock is held."""
        waiting = int(self._waiting[_BOUND[kind]][0])
        if waiting + blocks > self._queued_max:
            self._refused += 1
            raise StoreBusy(self.name, kind, waiting, self._queued_max)

    def _tag(self, tag: object) -> bytes:
        if not isinstance(tag, bytes) or len(tag) != TAG_BYTES or not tag.startswith(self.secret.model):
            raise ValueError(f"tag: expected {TAG_BYTES} bytes that the queue's secret has made, got {tag!r:.80}")
        return tag

    def _kept_from_drops(self) -> list[StoreRequest]:
        """The jobs that a drop may concern. The lock is held."""
        return [job for job in self._open if job.kind not in DROPS and not job.done]

    def _screen(self, job: StoreRequest) -> None:
        """Keep a job from what is to be dropped. The lock is held."""
        if self._drops.screen(job):
            self._settle(job, CANCELLED)

    def _work(self) -> None:
        """One of the threads that call the store."""
        thread = threading.get_ident()
        while (call := self._next(thread)) is not None:
            job, places = call
            began = time.perf_counter()
            codes, error = self._calls.do(job, places)
            with self._lock, self._changes:
                del self._running[thread]
                self._drops.returned(thread)
                self._seconds[job.kind] += time.perf_counter() - began
                self._returned(job, places, codes, error)
                self._bell.ring()
        self._end()

    def _next(self, thread: int) -> tuple[StoreRequest, Rows] | None:
        """Wait for a call to make: a job, and the places of its blocks. Returns None when there will be none."""
        with self._lock, self._changes:
            while True:
                call = self._next_drop() or self._next_piece()
                if call is not None:
                    self._running[thread] = call
                    self._wake_one()
                    return call
                if self._closing and self._queue.first() is None:
                    return None
                self._work_comes.wait(self._drops.left(self._clock()))

    def _wake_one(self) -> None:
        """Wake one thread if there may be a call to make, or a drop to wait for. It wakes the next one in turn. The
        lock is held."""
        entry = self._queue.first()
        if len(self._drops) or (entry is not None and self._may_begin(entry.job.kind)):
            self._work_comes.notify()

    def _may_begin(self, kind: str) -> bool:
        """Saves and drops leave one thread to all others, so that one that hangs keeps no load waiting."""
        if kind in _READS or len(self._running) < self.savers:
            return True
        return sum(job.kind not in _READS for job, _ in self._running.values()) < self.savers

    def _next_drop(self) -> tuple[StoreRequest, Rows] | None:
        """A drop that may begin now. The lock is held."""
        job = self._drops.next(self._clock(), self._running) if self._may_begin(CLEAR) else None
        return None if job is None else (job, job.call_begins(slice(0, 0), self._clock()))

    def _next_piece(self) -> tuple[StoreRequest, Rows] | None:
        """The next blocks that may be found, loaded or saved now. The lock is held."""
        while (entry := self._queue.first()) is not None and self._may_begin(entry.job.kind):
            job = entry.job
            if self._clock() >= job.deadline:
                self._settle(job, LATE)
                continue
            part = slice(job.begun, min(job.begun + self.piece_blocks, len(job.keys)))
            if part.stop == len(job.keys):
                self._queue.pop()
            self._waiting[_BOUND[job.kind]] -= part.stop - part.start
            places = job.call_begins(part, self._clock())
            if len(places):
                return job, places
            job.call_ends(places, NO_CODES, "")
        return None

    def _returned(self, job: StoreRequest, places: Rows, codes: Bytes, error: str) -> None:
        """A call has returned. The lock is held."""
        was_done, queued = job.done, job.queued
        job.call_ends(places, codes, error)
        if job.kind in DROPS and not was_done:
            if error:
                self._drops.failed(job, self._clock())
            else:
                self._settle(job, OK)
            return
        if job.done and not was_done:
            # Blocks that were cancelled before a call began with them.
            self._waiting[_BOUND[job.kind]] -= queued
            self._count(job)
        if job.done and (job.returned or not was_done):
            self._announce(job)

    def _watch(self) -> None:
        """The thread that ends jobs at their deadlines."""
        with self._lock, self._changes:
            while not self._closing:
                while (entry := self._deadlines.first()) is not None and entry.order <= self._clock():
                    self._settle(entry.job, LATE)
                left = 3600.0 if entry is None else min(3600.0, max(0.0, entry.order - self._clock()))
                self._wakes_at = self._clock() + left
                self._alarm.wait(left)

    def _settle(self, job: StoreRequest, code: int) -> None:
        """Decide a job that is not done. The lock is held."""
        self._changes.run(
            partial(self._waiting[_BOUND[job.kind]].__isub__, job.queued),
            *job.settling(code),
            finish=lambda _: self._settled(job),
        )

    def _settled(self, job: StoreRequest) -> None:
        """Note that a job is done. The lock is held."""
        self._drops.remove(job)
        self._count(job)
        self._announce(job)
        self._bell.ring()

    def _count(self, job: StoreRequest) -> None:
        """Count a job that is done, once, and judge the store by it. The lock is held."""
        if job.counted:
            return
        job.counted = True
        job.seconds = 0.0 if math.isnan(job.began) else self._clock() - job.began
        for code, count in job.counts.items():
            self._blocks[job.kind, code] += count
        if job.kind in (LOAD, SAVE):
            self._nbytes[job.kind] += job.ok * self.block_bytes
        job.hurried = job.hurried and "late" in job.counts
        if not job.hurried:
            before = self.suspended
            self.health.note(job)
            job.suspends = self.suspended and not before

    def _log(self, job: StoreRequest) -> None:
        """Log what went wrong with a job that is done."""
        for code in () if job.hurried else job.counts.keys() - {"ok", "absent", "cancelled"}:
            self._troubles.note(job.kind, code, job.counts[code], job.error)
        if job.suspends:
            self._troubles.note(job.kind, "suspended", len(job.codes))

    def _announce(self, job: StoreRequest) -> None:
        """A job is done or returned. The lock is held."""
        self._let_go(job)
        if job.on_done or job.on_returned:
            self._finished.append(job)
            os.eventfd_write(self._signal, 1)

    def _end(self) -> None:
        """A thread ends. The last one closes the store."""
        with self._lock:
            self._workers -= 1
            if self._workers:
                return
        try:
            with self._in_use:
                self._store.close()
        finally:
            with self._lock:
                self._store_closed = True
                self._bell.ring()


def _memory_argument(memory: object) -> Bytes:
    if isinstance(memory, np.ndarray) and memory.dtype == np.uint8 and memory.ndim == 2 and memory.size:
        if memory.flags.c_contiguous and memory.flags.writeable:
            return np.asarray(memory)[...]  # whose shape and type nobody else can change
    raise ValueError("memory: expected a writable, C-contiguous array uint8[slots, block_bytes], got another")


def _name_argument(name: object) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9_-]{1,64}", name):
        raise ValueError(f"store.name: expected 1 to 64 of the characters a-z, 0-9, _ and -, got {name!r:.80}")
    return name


def _deadline_argument(deadline: Any) -> float:
    with suppress(OverflowError):
        if isinstance(deadline, (int, float, np.number)) and deadline == deadline:
            return float(deadline)
    raise ValueError(f"deadline: expected seconds on the queue's clock, got {deadline!r:.80}")
