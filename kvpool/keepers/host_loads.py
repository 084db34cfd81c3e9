"""HostLoads: keys that a HostCache does not have, which stores are asked for, and blocks that come from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import TypeAlias

from kvpool.errors import StoreBusy
from kvpool.hostcache.host_cache import HostCache
from kvpool.keepers.bridge import Bridge, Loading, Search
from kvpool.keepers.choice import LoadAttempt, LoadPolicy
from kvpool.keepers.host_cache_tier import HostCacheTier
from kvpool.stores.jobs import Job
from kvpool.stores.store import CODES, OK

ASKED_MAX = 65_536
"""Keys that are asked for at once, and keys that are remembered as absent."""
NOW_MAX = 64
"""Keys that are asked for at once, on the thread of the scheduler."""
UNREAD_SECONDS = 10.0
"""For so long a block that has come, and that nobody reads, takes room from others."""
Lines: TypeAlias = dict[tuple[int, bool, str], list[bytes]]
"""Keys by the number of a store, whether it is known to have them, and the hit that they are of."""


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
    """Keys that a host cache does not have, and blocks that come to it. The thread of the scheduler owns it.

    ``policies``: of each store, how many blocks of a hit are loaded; None loads all. ``room``: so many blocks may be
    reserved, or wait for their reader. ``seconds``: time for a key from ``find`` until it is HERE. ``retry_seconds``:
    so long a key that did not come is not asked for again.
    """

    def __init__(
        self, tier: HostCacheTier, bridge: Bridge[bytes], policies: Sequence[LoadPolicy | None], room: int,
        seconds: float, retry_seconds: float, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._tier, self._bridge, self._policies, self._clock = tier, bridge, policies, clock
        self._room, self._seconds, self._retry_seconds = room, seconds, retry_seconds
        # Keys that are looked for, with their deadlines, and what the next ``turn`` is to do for them.
        self.searching: dict[bytes, float] = {}
        self._lines: Lines = {}
        # Keys that did not come, and what was learned of them.
        self._absent: dict[bytes, _Absence] = {}
        # Keys that have come and had no reader yet: for how long they count as such, and the number of their store.
        self._unread: dict[bytes, tuple[float, int]] = {}
        # Keys whose blocks are reserved for loads, and whether these were given up.
        self.reserved: dict[bytes, bool] = {}
        self.asked = self.loaded = self.refused = 0
        self.missed: Counter[str] = Counter()
        self._stopped = False

    def answers(self, keys: Sequence[bytes], found: Sequence[int], hit: str) -> list[int]:
        """What ``HostKeeper.find`` says of keys of a hit that are not HERE. ``found``: what the cache says. Stores are
        asked for what is not known yet."""
        said = list(map(self._known, keys, found))
        if None in said:
            self._ask(dict.fromkeys(key for key, one in zip(keys, said, strict=True) if one is None), hit)
        return [one if one is not None else HostCache.PENDING if key in self.searching else HostCache.ABSENT
                for key, one in zip(keys, said, strict=True)]  # fmt: skip

    def _known(self, key: bytes, found: int) -> int | None:
        """What is said of a key; None if the stores are to be asked."""
        if found == HostCache.PENDING:
            return HostCache.ABSENT if self.reserved.get(key) else found
        if key in self.searching:
            return HostCache.PENDING
        absence = self._absent.get(key)
        if absence is not None and absence.read(key, self._clock(), self._retry_seconds):
            return HostCache.ABSENT
        return None

    def read(self, keys: Iterable[bytes]) -> None:
        """Keys have a reader."""
        if self._unread:
            for key in keys:
                self._unread.pop(key, None)

    def origin(self, key: bytes) -> int | None:
        """The number of the store that has brought a key which had no reader yet."""
        return self._unread.get(key, (0.0, None))[1]

    def published(self, keys: Iterable[bytes]) -> None:
        """The engine has written blocks itself. A store may have them soon."""
        if self._absent:
            for key in keys:
                self._absent.pop(key, None)

    def leave(self, keys: Iterable[bytes]) -> None:
        """Do not ask for these keys for a while, nor bring those that are on their way."""
        self._miss(keys, "cancelled")
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
        self._cancel()

    def _cancel(self) -> None:
        self.missed["cancelled"] += len(self.searching)
        self.searching.clear()
        self._lines.clear()

    def clear(self) -> None:
        """Give up the keys that are looked for, and know nothing of others."""
        self._cancel()
        self._absent.clear()
        self._unread.clear()

    def turn(self) -> None:
        """Load keys that stores are known to have, and ask them for others."""
        lines, self._lines = self._lines, {}
        for (number, there, _), keys in sorted(lines.items(), key=lambda line: not line[0][1]):
            # A load from before a ``clear`` may have brought one of them.
            left = [key for key in keys if key in self.searching]
            if left and there:
                self._load(number, left)
            elif left:
                self._bridge.search(Search(self._deadline(left), self._found, self._miss), left, number)

    def _ask(self, wanted: Iterable[bytes], hit: str) -> None:
        """Ask the stores for keys of a hit. Of a store with an index in memory, the first keys are asked at once: who
        needs a prefix learns that it is not there. While there is no room, nobody is asked."""
        keys = list(wanted)
        room = max(0, ASKED_MAX - len(self.searching)) if self._free and not self._stopped else 0
        self.refused += len(keys[room:])
        self.asked += len(keys[:room])
        left, later = keys[: min(room, NOW_MAX)], keys[NOW_MAX:room]
        for number in range(len(self._policies)):
            codes = self._bridge.find_now(number, left) if left else None
            if codes is None:
                self._line_up(number, False, left, hit)
                left = []
                break
            there = (codes == OK).tolist()
            self._line_up(number, True, compress(left, there), hit)
            left = [key for key, ok in zip(left, there, strict=True) if not ok]
        self._line_up(0, False, later, hit)
        if left:
            self.missed["absent"] += len(left)
            self._remember(left, _Absence((), self._clock() + self._retry_seconds))

    def _line_up(self, number: int, there: bool, keys: Iterable[bytes], hit: str) -> None:
        """Have the next ``turn`` ask a store for keys, or load them."""
        own = list(keys)
        if own:
            self._lines.setdefault((number, there, hit), []).extend(own)
            self.searching.update(dict.fromkeys(own, self._clock() + self._seconds))

    def _found(self, number: int, keys: Sequence[bytes], job: Job) -> list[bytes]:
        """A store has said which keys it has. Returns those that the next one is asked for."""
        # A key that is not looked for any more was dropped by ``clear``.
        found = [(key, ok) for key, ok in zip(keys, (job.codes == OK).tolist(), strict=True) if key in self.searching]
        there, others = [key for key, ok in found if ok], [key for key, ok in found if not ok]
        if there:
            self._load(number, there)
        if number + 1 < len(self._policies):
            return others
        self._miss_by_code(keys, job)
        return []

    def _miss(self, keys: Iterable[bytes], reason: str, remember: bool = True) -> None:
        """These keys do not come."""
        missed = [key for key in keys if self.searching.pop(key, None) is not None]
        self.missed[reason] += len(missed)
        self._remember(missed if remember else (), _Absence(missed))

    def _miss_by_code(self, keys: Iterable[bytes], job: Job) -> None:
        """Those of the keys of a job that the store has not given do not come."""
        for code in job.counts.keys() - {CODES[OK]}:
            self._miss(compress(keys, (job.codes == CODES.index(code)).tolist()), code)

    def _deadline(self, keys: Iterable[bytes]) -> float:
        return min(self.searching[key] for key in keys)

    # -- blocks that come ----------------------------------------------------------------------------

    def _load(self, number: int, keys: Sequence[bytes]) -> None:
        """Load keys that a store has, as many as its policy takes. What has no room is missed. It may be asked for as
        soon as what has come was read: so a prompt that is longer than the room comes window by window."""
        now, end = self._clock(), self._deadline(keys)
        room = keys[: self._free]
        self._miss(keys[len(room) :], "crowded", remember=False)
        attempt, policy = None, self._policies[number]
        if policy is not None and room:
            ahead = len(self.reserved) * self._bridge.clients[number].queue.block_bytes
            attempt = LoadAttempt.of(policy, len(room), ahead, now)
            self._miss(room[attempt.load.blocks :], "declined")
            room, end = room[: attempt.load.blocks], min(end, attempt.until)
        try:
            loading = self._bridge.load(number, room, end, partial(self._came, attempt), self._returned)
        except StoreBusy:
            loading = None
            self._miss(room, "busy")
        if loading is not None:
            self.reserved.update(dict.fromkeys(loading.blocks, False))
        elif attempt is not None and attempt.load.blocks:
            attempt.end(now, told=False)
        # Keys of an older load are in ``reserved`` too, and end with this one all the same.
        for key in self.searching.keys() & set(keys).difference(() if loading is None else loading.blocks):
            if self._tier.cache.find(key) == HostCache.ABSENT:
                self._miss([key], "crowded")
            else:
                # It may be asked for as soon as it is gone again.
                del self.searching[key]
                self.missed["taken"] += 1

    @property
    def _free(self) -> int:
        """How many blocks may be loaded now."""
        now = self._clock()
        while self._unread and next(iter(self._unread.values()))[0] <= now:
            del self._unread[next(iter(self._unread))]
        return max(0, self._room - len(self._unread) - len(self.reserved))

    def _came(self, attempt: LoadAttempt | None, loading: Loading[bytes]) -> None:
        """A load is done. What has come can be found."""
        job, now, ok = loading.job, self._clock(), loading.job.codes == OK
        here = list(compress(loading.blocks, ok.tolist()))
        self._tier.publish(self._bridge.clients[loading.number], here, loading.rows[ok])
        self.reserved.update(dict.fromkeys(loading.blocks, True))
        for key in here:
            del self.reserved[key]
            # ``clear`` drops a block that comes after it.
            if self.searching.pop(key, None) is not None:
                self._unread[key] = now + UNREAD_SECONDS, loading.number
                self.loaded += 1
        self._miss_by_code(loading.blocks, job)
        if attempt is not None:
            attempt.note(len(here), job.began, now)
            attempt.end(now, told="cancelled" not in job.counts)

    def _returned(self, loading: Loading[bytes]) -> None:
        """No call can write to the blocks of a load any more. Those that have not come are given back."""
        left = [key for key in loading.blocks if self.reserved.pop(key, False)]
        self._tier.abort(self._bridge.clients[loading.number], left, loading.rows)
