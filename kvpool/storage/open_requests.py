"""OpenRequests: the requests of one store that have not ended, the threads that make its calls, and the rows and
callbacks of the requests."""

from __future__ import annotations

import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from kvpool.common.process import stays_here
from kvpool.common.threads import Bell
from kvpool.errors import PoolClosed, StoreBusy
from kvpool.storage.calls import StoreCalls
from kvpool.storage.circuit_breaker import CircuitBreaker, TroubleLog
from kvpool.storage.mac import Secret
from kvpool.storage.store import CANCELLED, CODES, LATE, OK, Bytes, Rows
from kvpool.storage.store_figures import StoreFigures, StoreStats
from kvpool.storage.store_queue import RequestHeap, StoreCall, StoreQueue
from kvpool.storage.store_requests import CLEAR, DROPS, FIND, FORGET, LOAD, Keys, RequestKind, StoreRequest


class OpenRequests:
    """What a ``StoreWorker`` has begun. Thread-safe.

    ``rows``: how many rows its requests have on loan. Half of them, rounded down, are kept for loads, so that no save
    keeps a load waiting. ``health`` judges the store by its requests. ``troubles`` logs what went wrong.
    ``close_store`` is called by the last thread.

    An exception of a signal handler may end a caller's change half-way. No lock is held then, and no row is free that
    a request or a caller has: rows leave a table before they join another one, so that they may only be in none.
    """

    def __init__(
        self,
        calls: StoreCalls,
        secret: Secret,
        queue: Callable[[Callable[[StoreRequest, int], None]], StoreQueue],
        rows: int,
        figures: StoreFigures,
        health: CircuitBreaker,
        troubles: TroubleLog | None,
        clock: Callable[[], float],
        close_store: Callable[[], object],
    ) -> None:
        self._calls, self.secret, self._figures, self._health = calls, secret, figures, health
        self._troubles, self._clock, self._close_store = troubles, clock, close_store
        # A lock of C: no exception comes between taking it and the block of ``with``.
        self._lock = threading.RLock()
        # Callers wait for the bell. The threads that wait for a call to make, and the one that waits for a deadline,
        # are woken apart.
        self._bell, self._work_comes = Bell(), threading.Condition(self._lock)
        self._alarm, self._wakes_at = threading.Condition(self._lock), -math.inf
        # A store is not closed while somebody has this.
        self._in_use = threading.RLock()
        # Requests that have not returned, or are held, or whose callbacks were not called; and drops not confirmed.
        self._open: dict[StoreRequest, None] = {}
        self._queue, self._deadlines = queue(self._settle), RequestHeap()
        self._rows, self._free_rows = rows, list(range(rows))
        # Requests whose callbacks are to be called, in order.
        self._ready: deque[StoreRequest] = deque()
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._signal)
        self._threads, self._closing = 0, False
        # A request refers to these, and has no threads that would end it in a child.
        stays_here(self)
        self.closed = False
        """Whether the store is closed."""

    def start(self, name: str, threads: int) -> None:
        """Start the threads. None of them runs a signal handler."""
        self._threads = threads
        for suffix, work in [*((str(i), self._work) for i in range(threads)), ("deadlines", self._watch)]:
            threading.Thread(target=work, name=f"kvpool-{name}-{suffix}", daemon=True).start()

    # -- what callers do -----------------------------------------------------------------------------

    def begin(self, request: StoreRequest) -> StoreRequest:
        """Begin a request, or return the one that does for it. Raises PoolClosed and StoreBusy."""
        if self._troubles is not None and request.kind not in DROPS:
            request.on_done.insert(0, self._log)
        self._hash(request)
        with self._lock:
            if self._closing:
                raise PoolClosed(f"the worker of the store {self._figures.name!r} is closed")
            same = self._queue.drops.clearing(request) if request.kind == CLEAR else None
            if same is not None:
                same.on_done += request.on_done
                return same
            self.check_room(request.kind, request.queued)
            try:
                self._join(request)
            except BaseException:
                # Of a signal handler: the caller does not get the request, but its callbacks do.
                request.held = False
                self._settle(request, CANCELLED)
                self._repair()
                # ``notify`` may have woken a thread that it still lists, and would then wake it in another's place.
                self._work_comes.notify_all()
                self._alarm.notify_all()
                raise
        return request

    def find_now(self, keys: Keys) -> Bytes | None:
        """What the store answers to a find on this thread. None if it fails or is suspended, or drops something."""
        with self._in_use:
            with self._lock:
                if self._closing or len(self._queue.drops) or self._health.suspended():
                    return None
            began = time.perf_counter()
            try:
                codes = self._calls.find(keys)
            except Exception:
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
        with self._lock:
            self._give_up((request,))

    def check_room(self, kind: RequestKind, blocks: int) -> None:
        """Raise StoreBusy if no more blocks of requests of this kind may wait."""
        with self._lock:
            try:
                self._queue.check_room(kind, blocks)
            except StoreBusy:
                self._figures.refused += 1
                raise

    def wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until a condition holds, which is asked with the lock held. Returns whether it does."""

        def asked() -> bool:
            with self._lock:
                return condition()

        return self._bell.wait_for(asked, timeout)

    @property
    def all(self) -> list[StoreRequest]:
        """Requests that have not returned, or are held, or whose callbacks were not called; and drops not confirmed."""
        with self._lock:
            return list(self._open)

    @property
    def is_backlogged(self) -> bool:
        """Whether a save that begins now waits for others."""
        with self._lock:
            return self._queue.is_backlogged

    def stats(self) -> StoreStats:
        """Figures of now."""
        store, queue = self._calls.figures(), self._queue
        with self._lock:
            waiting = sum(request.queued for request in self._open)
            return self._figures.stats(waiting, len(queue.running), len(queue.drops), store)

    def close(self) -> None:
        """Give up what is queued, and have the threads end."""
        with self._lock:
            self._closing = True
            self._give_up(list(self._open))
            self._work_comes.notify_all()
            self._alarm.notify_all()
            self._bell.ring()

    # -- rows ----------------------------------------------------------------------------------------

    def free(self, kind: RequestKind) -> int:
        """How many rows a request of this kind can take now."""
        return max(0, len(self._free_rows) - (0 if kind == LOAD else self._rows // 2))

    def take(self, kind: RequestKind, most: int, timeout: float) -> list[int]:
        """Take free rows, as ``StoreWorker.take`` says."""
        taken: list[int] = []

        def took() -> bool:
            if not taken:
                first = len(self._free_rows) - min(most, self.free(kind))
                taken.extend(self._free_rows[first:])
                del self._free_rows[first:]
            hang = sum(
                len(request.rows)
                for request in self._open
                if request.done and not request.returned and not request.held
            )
            return bool(taken) or len(self._free_rows) + hang >= self._rows

        self.wait_until(took, timeout)
        return taken

    def give_back(self, rows: list[int]) -> None:
        """Rows that were taken, and that no request has got."""
        with self._lock:
            self._free_rows += rows
        self._bell.ring()

    def release(self, request: StoreRequest) -> None:
        """The rows of a request that are held are not read any more."""
        with self._lock:
            request.held = False
            self._let_go(request)

    # -- callbacks: by the thread that polls ---------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether ``poll`` has a call to make."""
        return bool(self._ready)

    def fileno(self) -> int:
        """A file descriptor that can be read when ``poll`` has a call to make."""
        return self._signal

    def wait(self, timeout: float) -> bool:
        """Wait until ``poll`` has a call to make, at most ``timeout`` seconds. Returns whether it has."""
        return self.ready or bool(select.select([self._signal], [], [], timeout)[0])

    def poll(self) -> bool:
        """Make the calls. Returns whether there were any. Clears ``fileno``."""
        if not self._ready:
            return False
        with suppress(BlockingIOError):
            os.eventfd_read(self._signal)
        try:
            # Those of a callback that polls are made by the call around it.
            while self._ready and not (request := self._ready[0]).in_callback:
                self._call_back(request)
                self._ready.popleft()
        except BaseException:
            if self._ready:
                os.eventfd_write(self._signal, 1)
            raise
        return True

    def _call_back(self, request: StoreRequest) -> None:
        """Make the calls of a request, each once."""
        request.in_callback = True
        try:
            while request.on_done:
                request.on_done.pop(0)(request)
            while request.returned and request.on_returned:
                request.on_returned.pop(0)(request)
        finally:
            request.in_callback = False
        with self._lock:
            self._let_go(request)

    # -- what becomes of requests: the lock is held ---------------------------------------------------

    def _join(self, request: StoreRequest) -> None:
        """Put a request into the tables, and see to what it needs besides."""
        self._open[request] = None
        self._queue.add(request)
        if request.done:
            self._announce(request)
        elif request.kind in DROPS:
            self._queue.drops.add(request)
            for other in self._kept_from_drops():
                if request.kind == CLEAR or not other.key_set.isdisjoint(request.key_bytes):
                    self._screen(other)
        else:
            if request.deadline != math.inf:
                self._deadlines.put(request.deadline, request)
                if request.deadline < self._wakes_at or request.deadline <= self._clock():
                    self._alarm.notify()
            if len(self._queue.drops):
                self._screen(request)
        self._wake_one()

    def _hash(self, request: StoreRequest) -> None:
        """Hash the keys that are compared below, before the lock is taken for that."""
        if request.kind == FORGET:
            with self._lock:
                others = self._kept_from_drops()
            for other in (request, *others):
                other.hashed()
        elif request.kind != CLEAR and len(self._queue.drops):
            request.hashed()

    def _kept_from_drops(self) -> list[StoreRequest]:
        """The requests that a drop may concern."""
        return [request for request in self._open if request.kind not in DROPS and not request.done]

    def _screen(self, request: StoreRequest) -> None:
        """Keep a request from what is to be dropped."""
        if self._queue.drops.screen(request):
            self._settle(request, CANCELLED)

    def _let_go(self, request: StoreRequest) -> None:
        """Take the rows of a request back if nobody uses them any more."""
        called = not (request.in_callback or request.on_done or request.on_returned)
        if request.returned and called and not request.held and request in self._open:
            del self._open[request]
            if self._rows:
                self._free_rows += request.rows.tolist()
            self._bell.ring()

    def _settle(self, request: StoreRequest, code: int) -> None:
        """Decide a request that is not done."""
        self._queue.leave(request.kind, request.queued)
        request.settle(code)
        self._queue.drops.remove(request)
        self._count(request)
        self._announce(request)
        self._bell.ring()

    def _give_up(self, requests: Iterable[StoreRequest]) -> None:
        """Cancel those of these requests that are not done."""
        try:
            for request in requests:
                if not request.done:
                    self._settle(request, CANCELLED)
        except BaseException:  # of a signal handler
            self._repair()
            raise

    def _repair(self) -> None:
        """Announce what was decided and perhaps not announced, and count what waits."""
        announced = {*self._ready}
        for request in list(self._open):
            if request.done and request not in announced:
                self._queue.drops.remove(request)
                self._count(request)
                self._announce(request)
        self._queue.recount(self._open)
        self._bell.ring()

    def _count(self, request: StoreRequest) -> None:
        """Count a request that is done, once, and judge the store by it."""
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
        """A request is done or returned."""
        self._let_go(request)
        if request.on_done or request.on_returned:
            self._ready.append(request)
            os.eventfd_write(self._signal, 1)

    # -- the threads ---------------------------------------------------------------------------------

    def _work(self) -> None:
        """One of the threads that call the store."""
        thread = threading.get_ident()
        while (call := self._next(thread)) is not None:
            request, places = call
            began = time.perf_counter()
            codes, error = self._calls.do(request, places)
            with self._lock:
                self._queue.returned(thread)
                self._figures.note_call(request.kind, time.perf_counter() - began)
                self._returned(request, places, codes, error)
                self._bell.ring()
        self._end()

    def _next(self, thread: int) -> StoreCall | None:
        """Wait for a call to make: a request, and the places of its blocks. Returns None when there will be none."""
        with self._lock:
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
        """A call has returned."""
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
            self._queue.leave(request.kind, queued)
            self._count(request)
        if request.done and (request.returned or not was_done):
            self._announce(request)

    def _watch(self) -> None:
        """The thread that ends requests at their deadlines."""
        with self._lock:
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
