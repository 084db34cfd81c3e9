"""StoreQueue: which call of a store begins next, and how many blocks wait."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvpool.errors import StoreBusy
from kvpool.storage.calls import NO_CODES
from kvpool.storage.store import LATE, Rows
from kvpool.storage.store_requests import CLEAR, DROPS, FIND, FORGET, LOAD, SAVE, RequestKind, StoreRequest, Tombstones

_PRIORITY = {FIND: 0, LOAD: 1, SAVE: 2}
_READS = (FIND, LOAD)
_BOUND: dict[RequestKind, RequestKind] = {FIND: LOAD, LOAD: LOAD, SAVE: SAVE, FORGET: FORGET, CLEAR: FORGET}
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
    """Requests that wait for calls of a store, and the calls under way. The owner holds its lock.

    ``savers``: how many calls save or drop at a time. ``piece_blocks``: the most blocks of one call. ``most``: the
    bound for blocks of saves, of finds and loads, and of drops that wait. ``settle`` gives a code to the blocks of a
    request that have none.
    """

    def __init__(
        self,
        store: str,
        savers: int,
        piece_blocks: int,
        most: int,
        clock: Callable[[], float],
        settle: Callable[[StoreRequest, int], None],
    ) -> None:
        self._store, self._most, self._clock, self._settle = store, most, clock, settle
        self._savers, self._piece_blocks = savers, piece_blocks
        self.drops = Tombstones()
        self.running: dict[int, StoreCall] = {}
        """By thread."""
        self._waiting_requests = RequestHeap()
        self._waiting: Counter[RequestKind] = Counter()

    def check_room(self, kind: RequestKind, blocks: int) -> None:
        """Raise StoreBusy if no more blocks of requests of this kind may wait."""
        waiting = self._waiting[_BOUND[kind]]
        if waiting + blocks > self._most:
            raise StoreBusy(self._store, kind, waiting, self._most)

    def add(self, request: StoreRequest) -> None:
        """A request joins."""
        self._waiting[_BOUND[request.kind]] += request.queued
        if not request.done and request.kind not in DROPS:
            self._waiting_requests.put(_PRIORITY[request.kind], request)

    def leave(self, kind: RequestKind, blocks: int) -> None:
        """Blocks of a request of this kind wait no more."""
        self._waiting[_BOUND[kind]] -= blocks

    def recount(self, requests: Iterable[StoreRequest]) -> None:
        """Count the blocks of these requests, which are all that there are, as those that wait."""
        self._waiting.clear()
        for request in requests:
            self._waiting[_BOUND[request.kind]] += request.queued

    @property
    def is_backlogged(self) -> bool:
        """Whether a save that begins now waits for others."""
        return self._waiting[SAVE] > 0 or not self._may_begin(SAVE)

    @property
    def is_empty(self) -> bool:
        """Whether no find, load or save has blocks with which no call has begun."""
        return self._waiting_requests.first() is None

    @property
    def has_work(self) -> bool:
        """Whether there may be a call to make, or a drop to wait for."""
        entry = self._waiting_requests.first()
        return len(self.drops) > 0 or (entry is not None and self._may_begin(entry.request.kind))

    def next(self, thread: int) -> StoreCall | None:
        """The call that a thread is to make now, if there is one."""
        call = self._next_drop() or self._next_piece()
        if call is not None:
            self.running[thread] = call
        return call

    def returned(self, thread: int) -> None:
        """The call of a thread has returned."""
        del self.running[thread]
        self.drops.returned(thread)

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
        while (entry := self._waiting_requests.first()) is not None and self._may_begin(entry.request.kind):
            request = entry.request
            if self._clock() >= request.deadline:
                self._settle(request, LATE)
                continue
            count = len(request.codes)
            part = slice(request.begun, min(request.begun + self._piece_blocks, count))
            if part.stop == count:
                self._waiting_requests.pop()
            self.leave(request.kind, part.stop - part.start)
            places = request.call_begins(part, self._clock())
            if len(places):
                return request, places
            request.call_ends(places, NO_CODES, "")
        return None
