"""OpenRequests: the requests of one store that have not ended, and the threads that make its calls."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvpool.common.changes import Changes, from_handler
from kvpool.common.threads import Bell
from kvpool.errors import PoolClosed, StoreBusy
from kvpool.storage.callbacks import Callbacks
from kvpool.storage.calls import StoreCalls
from kvpool.storage.circuit_breaker import CircuitBreaker, TroubleLog
from kvpool.storage.lent_rows import LentRows
from kvpool.storage.store import CANCELLED, CODES, LATE, OK, Bytes, Rows
from kvpool.storage.store_figures import StoreFigures, StoreStats
from kvpool.storage.store_queue import RequestHeap, StoreCall, StoreQueue
from kvpool.storage.store_requests import CLEAR, DROPS, FIND, FORGET, Keys, RequestKind, StoreRequest


class OpenRequests:
    """What a ``StoreWorker`` has begun. Thread-safe.

    ``rows``: what its requests have on loan, if that is so. ``health`` judges the store by its
    requests. ``troubles`` logs what went wrong. ``close_store`` is called by the last thread.

    A caller's exception of a signal handler may come at any line. What it has changed then is whole: see ``Changes``.
    """

    def __init__(
        self,
        calls: StoreCalls,
        queue: Callable[[Callable[[StoreRequest, int], None]], StoreQueue],
        rows: LentRows | None,
        figures: StoreFigures,
        health: CircuitBreaker,
        troubles: TroubleLog | None,
        clock: Callable[[], float],
        close_store: Callable[[], object],
    ) -> None:
        self._calls, self._rows, self._figures, self._health = calls, rows, figures, health
        self._troubles, self._clock, self._close_store = troubles, clock, close_store
        # Whoever takes the lock enters ``changes``, except to read figures.
        self._lock, self._changes = threading.RLock(), Changes()
        # Callers wait for the bell. The threads that wait for a call to make, and the one that waits for a deadline,
        # are woken apart.
        self._bell, self._work_comes = Bell(), threading.Condition(self._lock)
        self._alarm, self._wakes_at = threading.Condition(self._lock), -math.inf
        # A store is not closed while somebody has this.
        self._in_use = threading.RLock()
        # Requests that have not returned, or are held, or whose callbacks were not called; and drops not confirmed.
        self._open: dict[StoreRequest, None] = {}
        self._queue, self._deadlines = queue(self._settle), RequestHeap()
        self.callbacks = Callbacks(self._called)
        self._threads, self._closing = 0, False
        self.closed = False
        """Whether the store is closed."""

    def start(self, name: str, threads: int) -> None:
        """Start the threads. None of them runs a signal handler."""
        self._threads = threads
        for suffix, work in [*((str(i), self._work) for i in range(threads)), ("deadlines", self._watch)]:
            threading.Thread(target=work, name=f"kvpool-{name}-{suffix}", daemon=True).start()

    # -- what callers do -----------------------------------------------------------------------------

    def begin(self, request: StoreRequest, taken: list[int]) -> StoreRequest:
        """Begin a request, or return the one that does for it. ``taken``: the list of its rows, which is empty then.
        Raises PoolClosed and StoreBusy."""
        request.on_done = (
            [self._log, *request.on_done]
            if self._troubles is not None and request.kind not in DROPS
            else request.on_done
        )
        self._hash(request)
        with self._lock, self._changes:
            if self._closing:
                raise PoolClosed(f"the worker of the store {self._figures.name!r} is closed")
            same = self._queue.drops.clearing(request) if request.kind == CLEAR else None
            if same is not None:
                same.on_done += request.on_done
                return same
            self.check_room(request.kind, request.queued)
            self._changes.run(
                partial(self._open.__setitem__, request, None),
                *self._queue.joining(request),
                taken.clear,
                finish=lambda _: self._begun(request),
            )
        return request

    def find_now(self, keys: Keys) -> Bytes | None:
        """What the store answers to a find on this thread. None if it fails or is suspended, or drops something."""
        with self._in_use:
            with self._lock, self._changes:
                if self._closing or len(self._queue.drops) or self._health.suspended():
                    return None
            began = time.perf_counter()
            try:
                codes = self._calls.find(keys)
            except Exception as error:
                if from_handler(error):
                    raise
                return None
        counts = np.bincount(codes, minlength=len(CODES)).tolist()
        if sum(counts[:2]) != len(keys):
            return None
        with self._lock:
            self._figures.note_call(FIND, time.perf_counter() - began)
            self._figures.note_blocks(FIND, dict(zip(CODES, counts, strict=True)))
        return codes

    def cancel(self, request: StoreRequest) -> None:
        """Give up what is not decided of a request."""
        with self._lock, self._changes:
            if not request.done:
                self._settle(request, CANCELLED)

    def check_room(self, kind: RequestKind, blocks: int) -> None:
        """Raise StoreBusy if no more blocks of requests of this kind may wait."""
        with self._lock, self._changes:
            try:
                self._queue.check_room(kind, blocks)
            except StoreBusy:
                self._figures.refused += 1
                raise

    def wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until a condition holds, which is asked with the lock held. Returns whether it does."""

        def asked() -> bool:
            with self._lock, self._changes:
                return condition()

        return self._bell.wait_for(asked, timeout)

    @property
    def all(self) -> list[StoreRequest]:
        """Requests that have not returned, or are held, or whose callbacks were not called; and drops not confirmed."""
        with self._lock, self._changes:
            return list(self._open)

    @property
    def is_backlogged(self) -> bool:
        """Whether a save that begins now waits for others."""
        with self._lock, self._changes:
            return self._queue.is_backlogged

    def stats(self) -> StoreStats:
        """Figures of now."""
        store, queue = self._calls.figures(), self._queue
        with self._lock, self._changes:
            return self._figures.stats(queue.waiting, len(queue.running), len(queue.drops), store)

    def take(self, kind: RequestKind, most: int, timeout: float, taken: list[int]) -> None:
        """Move free rows to a list, as ``StoreWorker.take`` says."""
        rows = self._rows
        if rows is None:
            return

        def took() -> bool:
            if not taken:
                self._changes.run(*rows.lending(kind, most, taken))
            hang = sum(
                len(request.rows)
                for request in self._open
                if request.done and not request.returned and not request.held
            )
            return bool(taken) or len(rows) + hang >= rows.count

        self.wait_until(took, timeout)

    def free(self, kind: RequestKind) -> int:
        """How many rows a request of this kind can take now."""
        return 0 if self._rows is None else self._rows.free(kind)

    def give_back(self, rows: list[int]) -> None:
        """Rows that were taken, and that no request has got. The list is empty then."""
        if self._rows is not None:
            with self._lock, self._changes:
                self._changes.run(self._rows.giving_back(rows[:]), rows.clear)
            self._bell.ring()

    def release(self, request: StoreRequest) -> None:
        """The rows of a request that are held are not read any more."""
        with self._lock, self._changes:
            self._changes.run(partial(setattr, request, "held", False), finish=lambda _: self._let_go(request))

    def close(self) -> None:
        """Give up what is queued, and have the threads end."""
        with self._lock, self._changes:
            self._closing = True
            for request in list(self._open):
                if not request.done:
                    self._settle(request, CANCELLED)
            self._work_comes.notify_all()
            self._alarm.notify_all()
            self._bell.ring()

    # -- what becomes of requests: the lock is held ---------------------------------------------------

    def _begun(self, request: StoreRequest) -> None:
        """Do what the beginning of a request needs besides. The lock is held."""
        if request.done:
            self._announce(request)
        elif request.kind in DROPS:
            self._queue.drops.add(request)
            for other in self._kept_from_drops():
                if request.kind == CLEAR or not other.key_set.isdisjoint(request.key_bytes):
                    self._screen(other)
        else:
            if request.deadline != math.inf:
                self._deadlines.putting(request.deadline, request)()
                if request.deadline < self._wakes_at or request.deadline <= self._clock():
                    self._alarm.notify()
            if len(self._queue.drops):
                self._screen(request)
        self._wake_one()

    def _hash(self, request: StoreRequest) -> None:
        """Hash the keys that are compared below, before the lock is taken for that."""
        if request.kind == FORGET:
            with self._lock, self._changes:
                others = self._kept_from_drops()
            for other in (request, *others):
                other.hashed()
        elif request.kind != CLEAR and len(self._queue.drops):
            request.hashed()

    def _kept_from_drops(self) -> list[StoreRequest]:
        """The requests that a drop may concern. The lock is held."""
        return [request for request in self._open if request.kind not in DROPS and not request.done]

    def _screen(self, request: StoreRequest) -> None:
        """Keep a request from what is to be dropped. The lock is held."""
        if self._queue.drops.screen(request):
            self._settle(request, CANCELLED)

    def _called(self, request: StoreRequest) -> None:
        with self._lock, self._changes:
            self._let_go(request)

    def _let_go(self, request: StoreRequest) -> None:
        """Take the rows of a request back if nobody uses them any more. The lock is held."""
        called = not (request.in_callback or request.on_done or request.on_returned)
        if request.returned and called and not request.held and request in self._open:
            rows = () if self._rows is None else (self._rows.giving_back(request.rows.tolist()),)
            self._changes.run(partial(self._open.__delitem__, request), *rows)
            self._bell.ring()

    def _settle(self, request: StoreRequest, code: int) -> None:
        """Decide a request that is not done. The lock is held."""
        self._changes.run(
            self._queue.leaving(request.kind, request.queued),
            *request.settling(code),
            finish=lambda _: self._settled(request),
        )

    def _settled(self, request: StoreRequest) -> None:
        """Note that a request is done. The lock is held."""
        self._queue.drops.remove(request)
        self._count(request)
        self._announce(request)
        self._bell.ring()

    def _count(self, request: StoreRequest) -> None:
        """Count a request that is done, once, and judge the store by it. The lock is held."""
        if request.counted:
            return
        request.counted = True
        request.seconds = 0.0 if math.isnan(request.began) else self._clock() - request.began
        self._figures.note(request)
        request.hurried = request.hurried and "late" in request.counts
        if not request.hurried:
            before = self._health.is_suspended
            self._health.note(request)
            request.suspends = self._health.is_suspended and not before

    def _log(self, request: StoreRequest) -> None:
        """Log what went wrong with a request that is done."""
        assert self._troubles is not None
        for code in () if request.hurried else request.counts.keys() - {"ok", "absent", "cancelled"}:
            self._troubles.note(request.kind, code, request.counts[code], request.error)
        if request.suspends:
            self._troubles.note(request.kind, "suspended", len(request.codes))

    def _announce(self, request: StoreRequest) -> None:
        """A request is done or returned. The lock is held."""
        self._let_go(request)
        self.callbacks.add(request)

    # -- the threads ---------------------------------------------------------------------------------

    def _work(self) -> None:
        """One of the threads that call the store."""
        thread = threading.get_ident()
        while (call := self._next(thread)) is not None:
            request, places = call
            began = time.perf_counter()
            codes, error = self._calls.do(request, places)
            with self._lock, self._changes:
                self._queue.returned(thread)
                self._figures.note_call(request.kind, time.perf_counter() - began)
                self._returned(request, places, codes, error)
                self._bell.ring()
        self._end()

    def _next(self, thread: int) -> StoreCall | None:
        """Wait for a call to make: a request, and the places of its blocks. Returns None when there will be none."""
        with self._lock, self._changes:
            while True:
                call = self._queue.next(thread)
                if call is not None:
                    self._wake_one()
                    return call
                if self._closing and self._queue.is_empty:
                    return None
                self._work_comes.wait(self._queue.drops.left(self._clock()))

    def _wake_one(self) -> None:
        """Wake one thread if there may be a call to make, or a drop to wait for. It wakes the next one in turn. The
        lock is held."""
        if self._queue.has_work:
            self._work_comes.notify()

    def _returned(self, request: StoreRequest, places: Rows, codes: Bytes, error: str) -> None:
        """A call has returned. The lock is held."""
        was_done, queued = request.done, request.queued
        request.call_ends(places, codes, error)
        if request.kind in DROPS and not was_done:
            if error:
                self._queue.drops.failed(request, self._clock())
            else:
                self._settle(request, OK)
            return
        if request.done and not was_done:
            # Blocks that were cancelled before a call began with them.
            self._queue.leaving(request.kind, queued)()
            self._count(request)
        if request.done and (request.returned or not was_done):
            self._announce(request)

    def _watch(self) -> None:
        """The thread that ends requests at their deadlines."""
        with self._lock, self._changes:
            while not self._closing:
                while (entry := self._deadlines.first()) is not None and entry.order <= self._clock():
                    self._settle(entry.request, LATE)
                left = 3600.0 if entry is None else min(3600.0, max(0.0, entry.order - self._clock()))
                self._wakes_at = self._clock() + left
                self._alarm.wait(left)

    def _end(self) -> None:
        """A thread ends. The last one closes the store."""
        with self._lock:
            self._threads -= 1
            if self._threads:
                return
        try:
            with self._in_use:
                self._close_store()
        finally:
            with self._lock:
                self.closed = True
                self._bell.ring()
