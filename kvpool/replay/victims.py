"""VictimWatch: finds the host evictions that would have taken a pinned block, had it not been pinned."""

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
    blocks_of,
    counters_of,
    head,
    lists_of,
)

# One host block. ``ahead``: how many blocks of its list go before it, NONE where it is in none. ``rank`` is that list,
# or the last one: 0 clean copies, 1 content. ``ticket`` and ``other_copy`` show that its content or its list changed.
# ``due`` is of a block that was pinned while it was listed: how many evictions from its list it outlives.
PLACE = np.dtype([("rank", "i8"), ("ahead", "i8"), ("ticket", "i8"), ("other_copy", "i8"), ("due", "i8")], align=True)
REDUNDANT, FORGOTTEN, COPIED, SHIELDED, TOTALS = range(5)


@jit
def _count(h: Any, places: npt.NDArray[Any], totals: npt.NDArray[np.int64]) -> None:
    """Count the pinned blocks that the evictions since the last look would have reached."""
    counters = counters_of(h)
    copied = counters.copied_blocks != totals[COPIED]
    for i in range(places.shape[0]):
        place, block = places[i], blocks_of(h)[h.device_blocks + i]
        lost = counters.forgotten_host_blocks if place.rank else counters.redundant_dropped
        if block.word >> 32 == 0 or block.ticket != place.ticket or block.other_copy != place.other_copy:
            place.due = NONE
        elif place.ahead != NONE:
            place.due = totals[place.rank] + place.ahead
        if place.due != NONE and copied:
            place.due += lost - totals[place.rank]
        elif place.due != NONE and lost > place.due:
            totals[SHIELDED] += 1
            place.due = NONE
    totals[REDUNDANT], totals[FORGOTTEN] = counters.redundant_dropped, counters.forgotten_host_blocks
    totals[COPIED] = counters.copied_blocks


@jit
def look(heads: npt.NDArray[Any], places: npt.NDArray[Any], totals: npt.NDArray[np.int64]) -> None:
    """Record one lock holder's changes in ``places`` PLACE[host blocks] and ``totals`` int64[TOTALS]."""
    h = head(heads, 0)
    lists = lists_of(h)
    _count(h, places, totals)
    for place in places:
        place.ahead = NONE
    for rank in range(2):
        b, ahead = lists[HOST * LISTS_PER_TIER + (DEFAULT_PRIORITY if rank else CLEAN), 0], 0
        while b != NONE:
            place, block = places[b - h.device_blocks], blocks_of(h)[b]
            place.rank, place.ahead, place.ticket, place.other_copy = rank, ahead, block.ticket, block.other_copy
            b, ahead = block.next, ahead + 1


class VictimWatch:
    """Counts the host evictions of a pool, and the blocks that were spared because they were pinned.

    The watch looks at the pool each time the state lock is released, before another thread can take it. So between two
    looks there is one decision, one pin or one unpin, and during a decision no pin begins or ends.

    Evictions take a list from its front, and blocks enter it at its back. So a block with n blocks ahead of it is among
    the first n + 1 that its list loses, or leaves it for another reason. One that is pinned has left its list: when the
    list has lost n + 1 since then, the block would have been a victim if it alone had not been pinned. Each stay in a
    list counts at most once.

    ``shielded`` is a lower bound. It leaves out blocks whose content came to the device or left it while they were
    pinned, and evictions of decisions with partial copies, since the call itself may have held their source.

    Use it for new pools, if all blocks have the default priority and sequences are stored when they are released.
    Thread-safe: all its work is done under the state lock.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        heads = cache.core.states.heads
        places, self._totals = np.full(cache.host_blocks, NONE, PLACE), np.zeros(TOTALS, np.int64)
        totals = self._totals
        look(heads, places, totals)
        # Every holder of the state lock must be seen, so the lock is replaced.
        cache.core.use_lock(WatchedLock(cache.core.lock, lambda: look(heads, places, totals)))

    @property
    def evictions(self) -> int:
        """The number of host blocks that were evicted."""
        return int(self._totals[REDUNDANT] + self._totals[FORGOTTEN])

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
