"""HostLoads: keys that a host cache does not have, and blocks that come to it from its stores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress

from kvpool.errors import OutOfBlocks, StoreBusy
from kvpool.hostcache.host_cache import HostCache, Reserved
from kvpool.stores.jobs import FIND, Job
from kvpool.stores.seals import BlockNames
from kvpool.stores.store import CODES, OK
from kvpool.stores.store_client import StoreClient

ASKED_MAX = 65_536
"""Keys that are asked for at once, and keys that are remembered as absent."""
UNREAD_SECONDS = 10.0
"""For so long a block that has come, and that nobody reads, takes room from others."""
Keys = Sequence[bytes]


class _Absence:
    """That no store had keys that were asked for together.

    ``until``: when they may be asked for again. It is unknown until one of them is read: whoever asked learns of it,
    however long that takes, as it would otherwise ask for ever.
    """

    def __init__(self, unread: Iterable[bytes], until: float = math.inf) -> None:
        self._unread, self._until = set(unread), until

    def read(self, key: bytes, now: float, retry_seconds: float) -> bool:
        """Whether the key counts as absent."""
        self._until = min(self._until, now + retry_seconds)
        if key in self._unread:
            self._unread.remove(key)
            return now <= self._until
        return now < self._until


class HostLoads:
    """Asks one store after the other, and loads what they have. The thread of the scheduler owns it.

    ``room``: so many blocks may be reserved, or wait for their reader. ``seconds``: time for a key from ``find`` until
    it is HERE. ``retry_seconds``: so long a key that did not come is not asked for again. ``generation``: what the
    names of blocks begin with now.
    """

    def __init__(
        self, cache: HostCache, lines: Sequence[StoreClient], generation: Callable[[], bytes], room: int,
        seconds: float, retry_seconds: float, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._cache, self._lines, self._generation, self._clock = cache, lines, generation, clock
        self._room, self._seconds, self._retry_seconds = room, seconds, retry_seconds
        # Keys that are looked for, with their deadlines; those of them that no store was asked for yet.
        self.searching: dict[bytes, float] = {}
        self._new: list[bytes] = []
        # Keys that did not come, and what was learned of them.
        self._absent: dict[bytes, _Absence] = {}
        # Keys that have come and had no reader yet, and for how long they count as such.
        self._unread: dict[bytes, float] = {}
        # Reserved blocks of loads that were given up.
        self.hung: set[bytes] = set()
        self.reserved = self.asked = self.loaded = 0
        self.missed: Counter[str] = Counter()
        self._stopped = False

    def missing(self, key: bytes, found: int) -> int:
        """What ``HostKeeper.find`` says of a key that is not HERE. ``found``: what the cache says."""
        cache = self._cache
        if found == cache.PENDING:
            return cache.ABSENT if key in self.hung else found
        if key in self.searching:
            return cache.PENDING
        return cache.PENDING if self._ask(key) else cache.ABSENT

    def read(self, keys: Iterable[bytes]) -> None:
        """Keys have a reader."""
        if self._unread:
            for key in keys:
                self._unread.pop(key, None)

    def published(self, keys: Iterable[bytes]) -> None:
        """The engine has written blocks itself. A store may have them soon."""
        if self._absent:
            for key in keys:
                self._absent.pop(key, None)

    def leave(self, keys: Iterable[bytes]) -> None:
        """Do not ask for these keys for a while."""
        self._remember(keys, _Absence((), self._clock() + self._retry_seconds))

    def _remember(self, keys: Iterable[bytes], absence: _Absence) -> None:
        for key in keys:
            self._absent.pop(key, None)
            self._absent[key] = absence
        while len(self._absent) > ASKED_MAX:
            del self._absent[next(iter(self._absent))]

    def stop(self) -> None:
        """Give up the keys that are looked for, and look for no others."""
        self._stopped = True
        self.cancel()

    def cancel(self) -> None:
        """Give up the keys that are looked for."""
        if self.searching:
            self.missed["cancelled"] += len(self.searching)
        self.searching.clear()
        self._new.clear()

    def clear(self) -> None:
        """Give up the keys that are looked for, and know nothing of others."""
        self.cancel()
        self._absent.clear()
        self._unread.clear()

    def turn(self) -> None:
        """Ask the stores for new keys."""
        if self._new:
            # A load from before a ``clear`` may have brought one of them.
            new, self._new = [key for key in self._new if key in self.searching], []
            if new:
                self._search(new, 0)

    # -- keys that are looked for --------------------------------------------------------------------

    def _ask(self, key: bytes) -> bool:
        """Ask the stores for a key in the next turn. Returns False if it did not come a moment ago, or if too many are
        asked for."""
        now = self._clock()
        absence = self._absent.get(key)
        if absence is not None and absence.read(key, now, self._retry_seconds):
            return False
        if self._stopped or len(self.searching) >= ASKED_MAX:
            self.missed["busy"] += 1
            return False
        self.searching[key] = now + self._seconds
        self._new.append(key)
        self.asked += 1
        return True

    def _search(self, keys: list[bytes], first: int) -> None:
        """Ask the stores from this one on."""
        reason = "absent" if first else "suspended"
        for number, line in enumerate(self._lines[first:], first):
            if not line.usable(FIND):
                continue
            now, end = self._clock(), self._deadline(keys)
            # One store that hangs leaves time for those behind it.
            deadline = end if number + 1 == len(self._lines) else now + (end - now) / 2
            try:
                names, done = BlockNames(keys, self._generation()), partial(self._searched, keys, number)
                line.find(names, done, deadline=deadline)
            except StoreBusy:
                reason = reason if first else "busy"
                continue
            return
        self._miss(keys, reason)

    def _searched(self, keys: list[bytes], number: int, job: Job) -> None:
        """A store has said which keys it has."""
        # A key that is not looked for any more was dropped by ``clear``.
        wanted = [key in self.searching for key in keys]
        found = (job.codes == OK).tolist()
        there = [key for key, want, ok in zip(keys, wanted, found, strict=True) if want and ok]
        others = [key for key, want, ok in zip(keys, wanted, found, strict=True) if want and not ok]
        if others and number + 1 < len(self._lines):
            self._search(others, number + 1)
        else:
            self._miss_by_code(keys, job)
        if there:
            self._load(there, self._lines[number])

    def _miss(self, keys: Iterable[bytes], reason: str) -> None:
        """These keys do not come."""
        missed = [key for key in keys if self.searching.pop(key, None) is not None]
        if missed:
            self.missed[reason] += len(missed)
            self._remember(missed, _Absence(missed))

    def _miss_by_code(self, keys: Keys, job: Job) -> None:
        for code in job.counts.keys() - {CODES[OK]}:
            self._miss(compress(keys, (job.codes == CODES.index(code)).tolist()), code)

    def _deadline(self, keys: Iterable[bytes]) -> float:
        return min(self.searching[key] for key in keys)

    # -- blocks that come ----------------------------------------------------------------------------

    def _load(self, keys: list[bytes], line: StoreClient) -> None:
        """Reserve blocks for keys that a store has, and load them. What has no room is missed."""
        taken = self._reserve(keys)
        own = taken.keys if taken is not None else ()
        self._miss_what_was_not_taken(keys, set(own))
        if taken is None or not own:
            return
        names, left = BlockNames(own, self._generation()), set(own)
        came, returned = partial(self._came, own, left), partial(self._returned, left)
        try:
            line.load(names, taken.blocks, came, returned, deadline=self._deadline(own))
        except StoreBusy:
            self._cache.abort(own)
            self._miss(own, "busy")
            return
        self.reserved += len(own)

    def _reserve(self, keys: list[bytes]) -> Reserved | None:
        """Blocks for as many of the first keys as have room. Others may need the last of them: no more than half of
        what is free is taken."""
        now = self._clock()
        while self._unread and next(iter(self._unread.values())) <= now:
            del self._unread[next(iter(self._unread))]
        room = keys[: max(0, self._room - len(self._unread) - self.reserved)]
        while room:
            try:
                return self._cache.reserve(room)
            except OutOfBlocks as full:
                room = room[: full.free // 2]
        return None

    def _miss_what_was_not_taken(self, keys: Iterable[bytes], taken: set[bytes]) -> None:
        for key in keys:
            if key in taken:
                continue
            if self._cache.find(key) == self._cache.ABSENT:
                self._miss([key], "crowded")
            else:
                # It may be asked for as soon as it is gone again.
                self.searching.pop(key, None)
                self.missed["taken"] += 1

    def _came(self, keys: Keys, left: set[bytes], job: Job) -> None:
        """A load is done. What has come can be found. ``left``: what is still reserved."""
        here = list(compress(keys, (job.codes == OK).tolist()))
        if here:
            self._cache.publish(here)
            left.difference_update(here)
            self.reserved -= len(here)
            until = self._clock() + UNREAD_SECONDS
            for key in here:
                # ``clear`` drops a block that comes after it.
                if self.searching.pop(key, None) is not None:
                    self._unread[key] = until
                    self.loaded += 1
        self._miss_by_code(keys, job)
        self.hung |= left

    def _returned(self, left: set[bytes], _: Job) -> None:
        """No call can write to the blocks of a load any more. Those that have not come are given back."""
        self.hung -= left
        if left:
            self._cache.abort(left)
            self.reserved -= len(left)
