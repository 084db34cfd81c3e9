"""StoreQueue: the requests of one store that are not over, what becomes of them, and which call of the store begins
next."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvpool.common.process import stays_here
from kvpool.common.threads import Bell
from kvpool.errors import StoreBusy
from kvpool.storage.callbacks import Callbacks
from kvpool.storage.calls import NO_CODES
from kvpool.storage.circuit_breaker import CircuitBreaker
from kvpool.storage.store import CANCELLED, CODES, LATE, OK, Bytes, Rows
from kvpool.storage.store_requests import (
    CLEAR,
    DROPS,
    FIND,
    FORGET,
    KINDS,
    LOAD,
    SAVE,
    RequestKind,
    StoreRequest,
    Tombstones,
)

_PRIORITY = {FIND: 0, LOAD: 1, SAVE: 2}
_READS: tuple[RequestKind, ...] = (FIND, LOAD)
_TOGETHER: dict[RequestKind, tuple[RequestKind, ...]] = {
    FIND: _READS,
    LOAD: _READS,
    SAVE: (SAVE,),
    FORGET: DROPS,
    CLEAR: DROPS,
}
"""Kinds of requests that wait together, up to a bound."""
StoreCall = tuple[StoreRequest, Rows]
"""A request, and the places of the blocks that a call of the store is for."""


class _Entry(NamedTuple):
    """A request in a line. The first two fields are its order."""

    order: float
    number: int
    request: StoreRequest


class RequestHeap:
    """Requests in their order, the first in front. The owner holds its lock.

    Those that are done meanwhile have no use. They are thrown away when as many have come as were left the last time,
    so that they do not pile up while all threads hang.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._most, self._numbers = 1024, itertools.count()

    def put(self, order: float, request: StoreRequest) -> None:
        if len(self._heap) >= self._most:
            self._heap = [entry for entry in self._heap if not entry.request.done]
            heapq.heapify(self._heap)
            self._most = max(1024, 2 * len(self._heap))
        heapq.heappush(self._heap, _Entry(order, next(self._numbers), request))

    def pop(self) -> None:
        heapq.heappop(self._heap)

    def first(self) -> _Entry | None:
        """The first request that is not done."""
        while self._heap and self._heap[0].request.done:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


class StoreQueue:
    """The requests of a ``StoreWorker`` that are not over. The caller holds ``lock``, except for ``wait_until``
    and ``cancel``.

    ``savers``: how many calls save or drop at a time. ``piece_blocks``: the most blocks of one call. ``most``: the
    bound for blocks of saves, of finds and loads, and of drops that wait. ``rows``: how many rows requests have on
    loan. Half of them, rounded down, are kept for loads, so that no save keeps a load waiting. ``health`` judges the
    store by its requests.

    An exception of a signal handler may end a caller's change half-way. No lock is held then, and no row is free that
    a request or a caller has: rows leave a table before they join another one, so that they may only be in none.
    """

    def __init__(
        self,
        store: str,
        savers: int,
        piece_blocks: int,
        most: int,
        rows: int,
        health: CircuitBreaker,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._most, self._health, self._clock = store, most, health, clock
        self._savers, self._piece_blocks = savers, piece_blocks
        # A lock of C: no exception comes between taking it and the block of ``with``.
        self.lock = threading.RLock()
        self.bell = Bell()
        """What callers wait for."""
        self.callbacks, self.drops = Callbacks(), Tombstones()
        self.requests: dict[StoreRequest, None] = {}
        """Requests that have not returned, or are held, or whose callbacks were not called; and drops not confirmed."""
        self.running: dict[int, StoreCall] = {}
        """By thread."""
        self._waiting, self._deadlines = RequestHeap(), RequestHeap()
        # The blocks of ``requests`` that wait. A sum over the requests takes a millisecond if a store hangs.
        self._queued: Counter[RequestKind] = Counter()
        self._rows, self._free_rows = rows, list(range(rows))
        self.blocks = {(kind, code): 0 for kind in KINDS for code in CODES}
        """How many became what, since the beginning."""
        self.refused = 0
        """Requests for which there was no room."""
        # A request refers to this, and has no threads that would end it in a child.
        stays_here(self)

    # -- without the lock ----------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until a condition holds, which is asked with the lock held. Returns whether it does."""

        def asked() -> bool:
            with self.lock:
                return condition()

        return self.bell.wait_for(asked, timeout)

    def cancel(self, request: StoreRequest) -> None:
        """Give up what is not decided of a request."""
        with self.lock:
            self.give_up((request,))

    # -- what waits ----------------------------------------------------------------------------------

    def queued(self, *kinds: RequestKind) -> int:
        """How many blocks of requests of these kinds wait."""
        return sum(self._queued[kind] for kind in kinds)

    def check_room(self, kind: RequestKind, blocks: int) -> None:
        """Raise StoreBusy if no more blocks of requests of this kind may wait."""
        waiting = self.queued(*_TOGETHER[kind])
        if waiting + blocks > self._most:
            self.refused += 1
            raise StoreBusy(self._store, kind, waiting, self._most)

    def add(self, request: StoreRequest) -> None:
        """A request joins. What is to be dropped is kept from it, or from the others if it is a drop."""
        self.requests[request] = None
        self._queued[request.kind] += request.queued
        if request.done:
            self._finish(request)
        elif request.kind in DROPS:
            self.drops.add(request)
            for other in self.kept_from_drops():
                if request.kind == CLEAR or not other.key_set.isdisjoint(request.key_bytes):
                    self._screen(other)
        else:
            self._waiting.put(_PRIORITY[request.kind], request)
            if request.deadline != math.inf:
                self._deadlines.put(request.deadline, request)
            if len(self.drops):
                self._screen(request)

    def kept_from_drops(self) -> list[StoreRequest]:
        """The requests that a drop may concern."""
        return [request for request in self.requests if request.kind not in DROPS and not request.done]

    def _screen(self, request: StoreRequest) -> None:
        """Keep a request from what is to be dropped."""
        if self.drops.screen(request):
            self.settle(request, CANCELLED)

    # -- calls of the store --------------------------------------------------------------------------

    @property
    def is_backlogged(self) -> bool:
        """Whether a save that begins now waits for others."""
        return self.queued(SAVE) > 0 or not self._may_begin(SAVE)

    @property
    def is_empty(self) -> bool:
        """Whether no find, load or save has blocks with which no call has begun."""
        return self._waiting.first() is None

    @property
    def has_work(self) -> bool:
        """Whether there may be a call to make, or a drop to wait for."""
        entry = self._waiting.first()
        return len(self.drops) > 0 or (entry is not None and self._may_begin(entry.request.kind))

    def next(self, thread: int) -> StoreCall | None:
        """The call that a thread is to make now, if there is one."""
        call = self._next_drop() or self._next_piece()
        if call is not None:
            self.running[thread] = call
        return call

    def returned(self, thread: int, codes: Bytes, error: str) -> None:
        """The call of a thread has returned."""
        request, places = self.running.pop(thread)
        self.drops.returned(thread)
        was_done, queued = request.done, request.queued
        request.call_ends(places, codes, error)
        if request.kind in DROPS and not was_done:
            if error:
                self.drops.failed(request, self._clock())
            else:
                self.settle(request, OK)
        elif request.done and (request.returned or not was_done):
            # Of blocks that were cancelled before a call began with them.
            self._queued[request.kind] -= queued
            self._finish(request)
        self.bell.ring()

    def _may_begin(self, kind: RequestKind) -> bool:
        if kind in _READS or len(self.running) < self._savers:
            return True
        return sum(request.kind not in _READS for request, _ in self.running.values()) < self._savers

    def _next_drop(self) -> StoreCall | None:
        """A drop that may begin now."""
        drop = self.drops.next(self._clock(), self.running) if self._may_begin(CLEAR) else None
        return None if drop is None else (drop, drop.call_begins(slice(0, 0), self._clock()))

    def _next_piece(self) -> StoreCall | None:
        """The next blocks that may be found, loaded or saved now."""
        while (entry := self._waiting.first()) is not None and self._may_begin(entry.request.kind):
            request = entry.request
            if self._clock() >= request.deadline:
                self.settle(request, LATE)
                continue
            count = len(request.codes)
            part = slice(request.begun, min(request.begun + self._piece_blocks, count))
            if part.stop == count:
                self._waiting.pop()
            self._queued[request.kind] -= part.stop - part.start
            places = request.call_begins(part, self._clock())
            if len(places):
                return request, places
            request.call_ends(places, NO_CODES, "")
        return None

    # -- what becomes of requests --------------------------------------------------------------------

    def settle(self, request: StoreRequest, code: int) -> None:
        """Give a code to the blocks of a request that have none."""
        self._queued[request.kind] -= request.queued
        request.settle(code)
        self._finish(request)

    def expire(self) -> float:
        """End requests at their deadlines. Returns the next deadline, or infinity."""
        while (entry := self._deadlines.first()) is not None and entry.order <= self._clock():
            self.settle(entry.request, LATE)
        return math.inf if entry is None else entry.order

    def give_up(self, requests: Iterable[StoreRequest]) -> None:
        """Cancel those of these requests that are not done."""
        try:
            for request in requests:
                if not request.done:
                    self.settle(request, CANCELLED)
        except BaseException:  # of a signal handler
            self.repair()
            raise

    def repair(self) -> None:
        """Finish what was decided and perhaps not finished, and count what waits."""
        self._queued.clear()
        for request in list(self.requests):
            self._queued[request.kind] += request.queued
            if request.done:
                self._finish(request)

    def _finish(self, request: StoreRequest) -> None:
        """A request is done or returned. Idempotent."""
        self.drops.remove(request)
        self._count(request)
        self.let_go(request)
        if request.on_done or request.on_returned:
            self.callbacks.add(request)
        self.bell.ring()

    def _count(self, request: StoreRequest) -> None:
        """Count a request that is done, once, and judge the store by it."""
        if request.counted:
            return
        request.counted = True
        request.seconds = 0.0 if math.isnan(request.began) else self._clock() - request.began
        for code, count in request.counts.items():
            self.blocks[request.kind, code] += count
        request.hurried = request.hurried and "late" in request.counts
        if not request.hurried:
            before = self._health.is_suspended
            self._health.note(request)
            request.suspends = self._health.is_suspended and not before

    def let_go(self, request: StoreRequest) -> None:
        """Take the rows of a request back if nobody uses them any more."""
        called = not (request.in_callback or request.on_done or request.on_returned)
        if request.returned and called and not request.held and request in self.requests:
            del self.requests[request]
            if self._rows:
                self._free_rows += request.rows.tolist()
            self.bell.ring()

    # -- rows ----------------------------------------------------------------------------------------

    def free(self, kind: RequestKind) -> int:
        """How many rows a request of this kind can take now."""
        return max(0, len(self._free_rows) - (0 if kind == LOAD else self._rows // 2))

    def take(self, kind: RequestKind, most: int) -> list[int]:
        """Take free rows."""
        first = len(self._free_rows) - min(most, self.free(kind))
        taken = self._free_rows[first:]
        del self._free_rows[first:]
        return taken

    @property
    def all_hang(self) -> bool:
        """Whether it is useless to wait for rows: each is free, or in a call that hangs."""
        hang = sum(
            len(request.rows) for request in self.requests if request.done and not request.returned and not request.held
        )
        return len(self._free_rows) + hang >= self._rows

    def give_back(self, rows: list[int]) -> None:
        """Rows that were taken, and that no request has got."""
        self._free_rows += rows
        self.bell.ring()
