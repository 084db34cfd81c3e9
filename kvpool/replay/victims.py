"""VictimWatch: which host evictions would have hit a pinned block, from an order of the host tier that is kept beside the pool's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
)

_RANKS = (REDUNDANT, DEFAULT_PRIORITY)
"""The lists that host victims come from, first to last."""


class VictimWatch:
    """Counts the host evictions of a pool, and those whose victim would have been a block that was pinned.

    It sees the pool whenever its state lock is let go, before any other thread can have it: so between two looks lies one
    decision, one pin or one unpin, and no pin comes or goes within a decision. A block that enters a list goes to its back and gets
    the next *stamp*; a block that is pinned leaves its list, but keeps its stamp here. Ordered by list and stamp, all blocks
    together are the order of eviction that the pool would have if its leases did not count.

    Of one decision the watch sees only how many blocks were evicted, not which one when. It counts those that cannot be explained
    without passing the first pinned block: a block that stands in front of it can be evicted from there once, and what enters its list
    later stands behind it. So ``shielded`` is a lower bound. It leaves out what it cannot be sure of: pinned blocks whose content
    came to the device or left it in the decision, and decisions with partial copies, whose source the call itself may hold.

    For pools whose blocks all have the default priority, and whose device blocks alone are rewound or released without storing.
    ``evictions`` counts host blocks, ``shields`` the pins that stood in the way of at least one. Thread-safe: everything happens under
    the state lock.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._state, self._origin = cache._state, int(cache._state.header[DEVICE_BLOCKS])
        fields = cache._state.blocks[self._origin :]
        self._word, self._next, self._twin, self._ticket = (fields[name] for name in ("word", "next", "twin", "ticket"))
        self._flags, self._priority = fields["flags"], fields["priority"]
        count = len(fields)
        self._rank, self._stamp, self._tickets, self._twins = [NONE] * count, [0] * count, [NONE] * count, [NONE] * count
        self._pinned = [False] * count
        self._clock = 0
        self._seen = (0, 0, 0)
        self._shields: set[int] = set()
        self.evictions = self.shielded = self.looks = 0
        lock = WatchedLock(cache._lock, self.look)
        # Whoever holds the state lock must be seen: every name that the pool and its parts have for it.
        for owner in (cache, cache._transfer):
            for name, value in list(vars(owner).items()):
                if value is lock.inner:
                    setattr(owner, name, lock)

    @property
    def shields(self) -> int:
        return len(self._shields)

    def look(self) -> None:
        """See what the holder of the state lock has changed."""
        self.looks += 1
        words, twins = self._word.tolist(), self._twin.tolist()
        counters = self._state.counters
        seen = int(counters[C_REDUNDANT]), int(counters[C_FORGOTTEN_HOST]), int(counters[C_COPIED])
        redundant, forgotten, copied = (now - before for now, before in zip(seen, self._seen, strict=True))
        self._seen = seen
        if redundant + forgotten:
            self.evictions += redundant + forgotten
            if not copied:
                self._count(redundant, forgotten, words, twins)
        self._follow(words, twins)

    def _count(self, redundant: int, forgotten: int, words: list[int], twins: list[int]) -> None:
        """Count the evictions that passed a pinned block in the order as it was before the decision."""
        stays = [i for i, pinned in enumerate(self._pinned) if pinned and words[i] >> 32 and twins[i] == self._twins[i]]
        if not stays:
            return
        first = min(stays, key=lambda i: (self._rank[i], self._stamp[i]))
        rank, stamp = self._rank[first], self._stamp[first]
        before = sum(r == rank and s < stamp for r, s in zip(self._rank, self._stamp, strict=True))
        # Content is evicted only where no redundant copy is left, so that it passes a pinned redundant copy in any case.
        passed = max(0, redundant - before) + forgotten if rank == 0 else max(0, forgotten - before)
        if passed:
            self.shielded += passed
            self._shields.add(stamp)

    def _follow(self, words: list[int], twins: list[int]) -> None:
        """Give a stamp to what has come into a list, and keep the places of what is pinned."""
        following, tickets = self._next.tolist(), self._ticket.tolist()
        ranks = [NONE] * len(words)
        for rank, which in enumerate(_RANKS):
            b, last = int(self._state.lists[HOST * LISTS_PER_TIER + which, 0]), 0
            while b != NONE:
                i = b - self._origin
                ranks[i] = rank
                stays = self._rank[i] == rank and self._tickets[i] == tickets[i] and not self._pinned[i]
                # What stands behind a later arrival has gone to the back, too.
                if not stays or self._stamp[i] < last:
                    self._clock += 1
                    self._stamp[i] = self._clock
                last, b = self._stamp[i], following[i]
        self._pinned = [False] * len(words)
        for i, word in enumerate(words):
            if word >> 32 and self._flags[i] & PUBLISHED:
                if self._priority[i] != DEFAULT_PRIORITY:
                    raise AssertionError(f"host block {i + self._origin} has priority {self._priority[i]}")
                ranks[i], self._pinned[i] = 0 if twins[i] != NONE else 1, True
                if ranks[i] != self._rank[i] or tickets[i] != self._tickets[i]:
                    self._clock += 1
                    self._stamp[i] = self._clock
        self._rank, self._tickets, self._twins = ranks, tickets, twins


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
