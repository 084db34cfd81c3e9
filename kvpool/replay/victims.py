"""VictimWatch: finds the host evictions that would have taken a pinned block. For this it keeps an eviction order of
the host tier that includes pinned blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.jit import jit
from kvpool.pool.manager import KVCacheManager
from kvpool.state.records import (
    CLEAN,
    DEFAULT_PRIORITY,
    HOST,
    LISTS_PER_TIER,
    NONE,
    PUBLISHED,
    blocks_of,
    counters_of,
    head,
    lists_of,
)

# One host block. ``rank`` is the list that it is in, or would be in without its pins: 0 redundant, 1 content, NONE
# neither. ``stamp`` orders the arrivals in a list. ``ticket`` and ``other_copy`` show that its content or its list
# changed. ``pinned`` says that it is pinned, and ``gone`` that without its pins it would have been evicted.
PLACE = np.dtype(
    [("rank", "i8"), ("stamp", "i8"), ("ticket", "i8"), ("other_copy", "i8"), ("pinned", "i8"), ("gone", "i8")],
    align=True,
)
LOOKS, EVICTIONS, SHIELDED, CLOCK, SEEN_REDUNDANT, SEEN_FORGOTTEN, SEEN_COPIED, TOTALS = range(8)
BEFORE, NOW = 1, 2  # values of ``gone``: in an earlier decision, in the current one


@jit
def _shielded(h: Any, places: npt.NDArray[Any], redundant: int, forgotten: int) -> int:
    """Count the evictions of a decision that would have taken a pinned block. Such blocks leave the order."""
    blocks, count = blocks_of(h), places.shape[0]
    copies = 0
    for place in places:
        if place.rank == 0 and not place.pinned:
            copies += 1
    # A clean copy that was made in this decision is not in the order, so its eviction proves nothing.
    evictions = min(redundant, copies) + forgotten
    taken = 0
    for i in range(count):
        block = blocks[h.device_blocks + i]
        if not places[i].pinned or places[i].gone or block.word >> 32 == 0 or block.other_copy != places[i].other_copy:
            continue
        before = 0
        for place in places:
            if place.rank != NONE and place.gone != BEFORE:
                before += place.rank < places[i].rank or (
                    place.rank == places[i].rank and place.stamp < places[i].stamp
                )
        if before < evictions:
            places[i].gone = NOW
            taken += 1
    for place in places:
        if place.gone == NOW:
            place.gone = BEFORE
    return taken


@jit
def _arrive(places: npt.NDArray[Any], totals: npt.NDArray[np.int64], i: int, rank: int, ticket: int) -> None:
    totals[CLOCK] += 1
    places[i].rank, places[i].stamp, places[i].ticket, places[i].gone = rank, totals[CLOCK], ticket, 0


@jit
def _follow(h: Any, places: npt.NDArray[Any], totals: npt.NDArray[np.int64]) -> None:
    """Give a stamp to each block that has entered a list, and keep the places of pinned blocks."""
    blocks, lists, origin = blocks_of(h), lists_of(h), h.device_blocks
    for rank in range(2):
        b, last = lists[HOST * LISTS_PER_TIER + (DEFAULT_PRIORITY if rank else CLEAN), 0], 0
        while b != NONE:
            i = b - origin
            # A block that stands after a later arrival has itself moved to the back.
            if (
                places[i].rank != rank
                or places[i].ticket != blocks[b].ticket
                or places[i].pinned
                or places[i].stamp < last
            ):
                _arrive(places, totals, i, rank, blocks[b].ticket)
            last, b = places[i].stamp, blocks[b].next
    for i in range(places.shape[0]):
        block = blocks[origin + i]
        places[i].pinned, places[i].other_copy = 0, block.other_copy
        if block.word >> 32 and block.flags & PUBLISHED:
            places[i].pinned = 1
            rank = 0 if block.other_copy != NONE else 1
            if places[i].rank != rank or places[i].ticket != block.ticket:
                _arrive(places, totals, i, rank, block.ticket)
        elif block.list != HOST * LISTS_PER_TIER + CLEAN and block.list != HOST * LISTS_PER_TIER + DEFAULT_PRIORITY:
            places[i].rank = NONE


@jit
def look(heads: npt.NDArray[Any], places: npt.NDArray[Any], totals: npt.NDArray[np.int64]) -> None:
    """Record one lock holder's changes in ``places`` PLACE[host blocks] and ``totals`` int64[TOTALS]."""
    h = head(heads, 0)
    counters = counters_of(h)
    redundant, forgotten = (
        counters.redundant_dropped - totals[SEEN_REDUNDANT],
        counters.forgotten_host_blocks - totals[SEEN_FORGOTTEN],
    )
    totals[LOOKS] += 1
    totals[EVICTIONS] += redundant + forgotten
    if redundant + forgotten and counters.copied_blocks == totals[SEEN_COPIED]:
        totals[SHIELDED] += _shielded(h, places, redundant, forgotten)
    totals[SEEN_REDUNDANT], totals[SEEN_FORGOTTEN] = counters.redundant_dropped, counters.forgotten_host_blocks
    totals[SEEN_COPIED] = counters.copied_blocks
    _follow(h, places, totals)


class VictimWatch:
    """Counts the host evictions of a pool, and those that would have taken a block that was pinned.

    The watch looks at the pool each time the state lock is released, before another thread can take it. So between two
    looks there is one decision, one pin or one unpin, and during a decision no pin begins or ends.

    A block that enters a list goes to its back and gets the next *stamp*. A block that is pinned leaves its list, but
    keeps its stamp here. All blocks, ordered by list and stamp, form the eviction order that the pool would have if
    leases did not hold blocks. If an eviction would have taken a pinned block, the block leaves this order until it is
    listed again. So each of its stays in the order counts at most once.

    The watch sees how many blocks a decision evicted, but not the order in which blocks arrived and left. Arriving
    blocks go to the back. So n evictions would have taken at least the first n blocks of the order before the decision,
    and more if blocks at the front left for other reasons. So ``shielded`` is a lower bound. It leaves out uncertain
    cases: pinned blocks whose content came to the device or left it in the decision, and decisions with partial copies,
    since the call itself may have held their source.

    Use it for new pools, if all blocks have the default priority and sequences are stored when they are released.
    Thread-safe: all its work is done under the state lock.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        heads = cache.core.states.heads
        self._places, self._totals = np.zeros(cache.host_blocks, PLACE), np.zeros(TOTALS, np.int64)
        self._places["rank"] = NONE
        places, totals = self._places, self._totals
        look(heads, places, totals)
        # Every holder of the state lock must be seen, so the lock is replaced.
        cache.core.use_lock(WatchedLock(cache.core.lock, lambda: look(heads, places, totals)))

    @property
    def evictions(self) -> int:
        """The number of host blocks that were evicted."""
        return int(self._totals[EVICTIONS])

    @property
    def shielded(self) -> int:
        """A lower bound of the host evictions whose victim would have been a pinned block."""
        return int(self._totals[SHIELDED])


class WatchedLock:
    """A reentrant lock that calls ``look`` before its outermost release."""

    def __init__(self, inner: Any, look: Callable[[], None]) -> None:
        self.inner, self._look, self._depth = inner, look, 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = bool(self.inner.acquire(blocking, timeout))
        self._depth += taken
        return taken

    def release(self) -> None:
        try:
            if self._depth == 1:
                self._look()
        finally:
            self._depth -= 1
            self.inner.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()
