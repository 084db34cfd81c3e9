"""VictimWatch: which host evictions would have hit a pinned block, from an order of the host tier that is kept beside the pool's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool.jit import jit
from kvpool.manager import KVCacheManager
from kvpool.state.blocks import (
    C_COPIED,
    C_FORGOTTEN_HOST,
    C_REDUNDANT,
    DEFAULT_PRIORITY,
    DEVICE_BLOCKS,
    HOST,
    LISTS_PER_TIER,
    NONE,
    PUBLISHED,
    REDUNDANT,
    blocks_of,
    counters_of,
    lists_of,
)

# One host block: the list that it is in or would be in but for its pins (0 redundant, 1 content, NONE neither), when it came there, by
# what a change of its content or of the list is known, and whether but for its pins it would have been evicted.
PLACE = np.dtype(
    [("rank", "i8"), ("stamp", "i8"), ("ticket", "i8"), ("twin", "i8"), ("pinned", "i8"), ("gone", "i8")],
    align=True,
)
LOOKS, EVICTIONS, SHIELDED, CLOCK, SEEN_REDUNDANT, SEEN_FORGOTTEN, SEEN_COPIED, TOTALS = range(8)
BEFORE, NOW = 1, 2  # gone: in an earlier decision, in the one under way


@jit
def _shielded(h: Any, places: Any, redundant: int, forgotten: int) -> int:
    """How many of a decision's evictions would have taken a pinned block. Those are out of the order from then on."""
    blocks, count = blocks_of(h), places.shape[0]
    copies = 0
    for place in places:
        if place.rank == 0 and not place.pinned:
            copies += 1
    # A redundant copy that came only in the decision is not in the order: its eviction proves nothing.
    evictions = min(redundant, copies) + forgotten
    taken = 0
    for i in range(count):
        block = blocks[h[DEVICE_BLOCKS] + i]
        if not places[i].pinned or places[i].gone or block.word >> 32 == 0 or block.twin != places[i].twin:
            continue
        before = 0
        for place in places:
            if place.rank != NONE and place.gone != BEFORE:
                before += place.rank < places[i].rank or (place.rank == places[i].rank and place.stamp < places[i].stamp)
        if before < evictions:
            places[i].gone = NOW
            taken += 1
    for place in places:
        if place.gone == NOW:
            place.gone = BEFORE
    return taken


@jit
def _arrive(places: Any, totals: Any, i: int, rank: int, ticket: int) -> None:
    totals[CLOCK] += 1
    places[i].rank, places[i].stamp, places[i].ticket, places[i].gone = rank, totals[CLOCK], ticket, 0


@jit
def _follow(h: Any, places: Any, totals: Any) -> None:
    """Give a stamp to what has come into a list, and keep the places of what is pinned."""
    blocks, lists, origin = blocks_of(h), lists_of(h), h[DEVICE_BLOCKS]
    for rank in range(2):
        b, last = lists[HOST * LISTS_PER_TIER + (DEFAULT_PRIORITY if rank else REDUNDANT), 0], 0
        while b != NONE:
            i = b - origin
            # What stands behind a later arrival has gone to the back, too.
            if places[i].rank != rank or places[i].ticket != blocks[b].ticket or places[i].pinned or places[i].stamp < last:
                _arrive(places, totals, i, rank, blocks[b].ticket)
            last, b = places[i].stamp, blocks[b].next
    for i in range(places.shape[0]):
        block = blocks[origin + i]
        places[i].pinned, places[i].twin = 0, block.twin
        if block.word >> 32 and block.flags & PUBLISHED:
            places[i].pinned = 1
            rank = 0 if block.twin != NONE else 1
            if places[i].rank != rank or places[i].ticket != block.ticket:
                _arrive(places, totals, i, rank, block.ticket)
        elif block.list != HOST * LISTS_PER_TIER + REDUNDANT and block.list != HOST * LISTS_PER_TIER + DEFAULT_PRIORITY:
            places[i].rank = NONE


@jit
def look(h: Any, places: Any, totals: Any) -> None:
    """See what one holder of the state lock has changed: ``places`` PLACE[host blocks], ``totals`` int64[TOTALS]."""
    counters = counters_of(h)
    redundant, forgotten = counters[C_REDUNDANT] - totals[SEEN_REDUNDANT], counters[C_FORGOTTEN_HOST] - totals[SEEN_FORGOTTEN]
    totals[LOOKS] += 1
    totals[EVICTIONS] += redundant + forgotten
    if redundant + forgotten and counters[C_COPIED] == totals[SEEN_COPIED]:
        totals[SHIELDED] += _shielded(h, places, redundant, forgotten)
    totals[SEEN_REDUNDANT], totals[SEEN_FORGOTTEN] = counters[C_REDUNDANT], counters[C_FORGOTTEN_HOST]
    totals[SEEN_COPIED] = counters[C_COPIED]
    _follow(h, places, totals)


class VictimWatch:
    """Counts the host evictions of a pool, and those that would have taken a block that was pinned.

    It sees the pool whenever its state lock is let go, before another thread can have it: between two looks lies one decision, one pin
    or one unpin, and within a decision no pin comes or goes. A block that enters a list goes to its back and gets the next *stamp*; a
    block that is pinned leaves its list, but keeps its stamp here. Ordered by list and stamp, all blocks together are the order of
    eviction that the pool would have if its leases did not count. An eviction that would have taken a pinned block takes it out of this
    order, until it is listed again: each stay counts once.

    Of one decision the watch sees how many blocks were evicted, not in which order blocks came and went. Whatever arrives goes to the
    back, so n evictions would have taken the first n blocks of the order before the decision; if blocks in front left it otherwise, then
    more. So ``shielded`` is a lower bound. It leaves out what is not sure: pinned blocks whose content came to the device or left it
    in the decision, and decisions with partial copies, whose source the call itself may have held.

    For pools whose blocks all have the default priority and whose sequences are stored when released. Thread-safe: everything happens
    under the state lock.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        header = cache._state.header
        self._places, self._totals = np.zeros(cache.host_blocks, PLACE), np.zeros(TOTALS, np.int64)
        self._places["rank"] = NONE
        places, totals = self._places, self._totals
        look(header, places, totals)
        lock = WatchedLock(cache._lock, lambda: look(header, places, totals))
        # Whoever holds the state lock must be seen: every name that the pool and its parts have for it.
        for owner in (cache, cache._transfer):
            for name, value in list(vars(owner).items()):
                if value is lock.inner:
                    setattr(owner, name, lock)

    @property
    def evictions(self) -> int:
        """Host blocks evicted."""
        return int(self._totals[EVICTIONS])

    @property
    def shielded(self) -> int:
        """Host evictions, at least, whose victim would have been a pinned block."""
        return int(self._totals[SHIELDED])


class WatchedLock:
    """A reentrant lock that calls ``look`` each time before it is let go for good."""

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
