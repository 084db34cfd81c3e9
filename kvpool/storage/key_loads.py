"""KeyLoads: keys of a HostCache that stores are asked for, and the loads of those that they have."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress

from kvpool.errors import StoreBusy
from kvpool.hostcache.host_cache import HostCache
from kvpool.storage.store import CODES, OK
from kvpool.storage.store_requests import StoreRequest
from kvpool.storage.tier_storage import Loading, Search, TierStorage

ASKED_MAX = 65_536
"""Keys that are asked for at once, and keys that are remembered as absent."""
ROOM_SHARE = 0.5
"""The part of the time for a key for which it may wait for room that other requests hold. The rest is for its load."""
NOW_MAX = 64
"""Keys that are asked for at once, on the thread of the scheduler."""


class _Absence:
    """That no store had keys that were asked for together.

    ``until``: when they may be asked for again. It is unknown until one of them is read: whoever asked learns of it,
    however long that takes, as it would otherwise ask for ever.
    """

    def __init__(self, reason: str, unread: Iterable[bytes] = (), until: float = math.inf) -> None:
        self.reason = reason
        self._unread = set(unread)
        self._until = until

    def read(self, key: bytes, now: float, retry_seconds: float) -> bool:
        """Whether the key counts as absent."""
        self._until = min(self._until, now + retry_seconds)
        if key in self._unread:
            self._unread.remove(key)
            return now <= self._until
        return now < self._until


class KeyLoads:
    """Keys that are not in a cache, from the first look-up until their blocks are there or do not come.

    ``seconds``: the time for a key. ``retry_seconds``: for so long one that did not come is not asked for again.
    ``spare``: for how many seconds the engine is busy. Not thread-safe.
    """

    def __init__(
        self,
        cache: HostCache,
        storage: TierStorage[bytes],
        seconds: float,
        retry_seconds: float,
        spare: Callable[[], float],
    ) -> None:
        self._cache, self._storage, self._spare, self._clock = cache, storage, spare, storage.clock
        self._seconds, self._retry_seconds = seconds, retry_seconds
        # Keys that are looked for, with their deadlines. What the next ``begin`` is to do for them: keys by the number
        # of a store, whether it is known to have them, and the hit that they are of.
        self.searching: dict[bytes, float] = {}
        self._queued: dict[tuple[int, bool, str], list[bytes]] = {}
        # Keys that did not come, and what was learned of them.
        self._absent: OrderedDict[bytes, _Absence] = OrderedDict()
        self.closed = False
        """Whether no store is asked any more."""
        self.asked = self.loaded = self.refused = 0
        self.missed: Counter[str] = Counter()
        self._forgotten_before = cache.forgotten_blocks

    # -- keys that the cache does not have -----------------------------------------------------------

    def answers(self, keys: Sequence[bytes], states: Sequence[int], hit: str) -> list[int]:
        """What ``find`` says of keys of a hit that are not HERE. ``states``: what the cache says. Stores are asked for
        what is not known yet."""
        self.drop_unread(keys)
        said = list(map(self._known, keys, states))
        self._ask([*dict.fromkeys(key for key, known in zip(keys, said, strict=True) if known is None)], hit)
        answers = []
        for key, known in zip(keys, said, strict=True):
            searched = key in self.searching
            if searched or known == HostCache.PENDING and key in self._storage.coming:
                self._storage.add_user(key, hit)
            answers.append(known if known is not None else HostCache.PENDING if searched else HostCache.ABSENT)
        return answers

    def _known(self, key: bytes, state: int) -> int | None:
        """What is said of a key; None if the stores are to be asked."""
        if state == HostCache.PENDING:
            loading = self._storage.coming.get(key)
            return HostCache.ABSENT if loading is not None and loading.over else state
        if key in self.searching:
            return HostCache.PENDING
        absence = self._absent.get(key)
        return HostCache.ABSENT if absence and absence.read(key, self._clock(), self._retry_seconds) else None

    def drop_evicted(self) -> None:
        """Stop counting unread blocks that the cache no longer has: they occupy no room."""
        forgotten = self._cache.forgotten_blocks
        if forgotten != self._forgotten_before:
            self._forgotten_before = forgotten
            unread = list(self._storage.unread)
            self.drop_unread(compress(unread, (self._cache.lookup(unread) != HostCache.HERE).tolist()))

    def drop_unread(self, keys: Iterable[bytes]) -> None:
        """Stop counting those of the keys that count as unread. They were evicted since they came."""
        for key in keys if self._storage.unread else ():
            if key in self._storage.unread:
                self._storage.drop(key)

    def _free(self, wanted: int) -> int:
        """Return how many blocks may be loaded now. The cache is searched for evicted ones only if that is fewer than
        ``wanted``, since the search takes time for each unread block."""
        if self._storage.free < wanted:
            self.drop_evicted()
        return self._storage.free

    def _remember(self, keys: Iterable[bytes], absence: _Absence) -> None:
        for key in keys:
            self._absent.pop(key, None)
            self._absent[key] = absence
        while len(self._absent) > ASKED_MAX:
            self._absent.popitem(last=False)

    def note_written(self, keys: Sequence[bytes]) -> None:
        """The engine has written these keys itself. A store may have them soon."""
        self.drop_unread(keys)
        for key in keys if self._absent else ():
            self._absent.pop(key, None)

    def forget(self, keys: Sequence[bytes]) -> None:
        """The cache has forgotten these keys: they do not come, and are not asked for for a while."""
        self._miss(keys, "cancelled")
        for key in keys:
            self._storage.drop(key)
        self._remember(keys, _Absence("forgotten", until=self._clock() + self._retry_seconds))

    def why_absent(self, key: bytes) -> str:
        """Why no store has brought a key; "" if nothing is remembered."""
        absence = self._absent.get(key)
        return "" if absence is None else absence.reason

    def clear(self) -> None:
        """Give up all keys. Any may be asked for again."""
        self.cancel()
        self._absent.clear()
        self._storage.forget_requests()

    def cancel(self) -> None:
        """Give up the keys that are looked for."""
        self.missed["cancelled"] += len(self.searching)
        self.searching.clear()
        self._queued.clear()

    def begin(self) -> None:
        """Load keys that stores are known to have, and ask them for others."""
        lines, self._queued = self._queued, {}
        for (number, is_stored, hit), keys in sorted(lines.items(), key=lambda line: not line[0][1]):
            # A load from before a ``clear`` may have brought one of them.
            left = [key for key in keys if key in self.searching]
            if is_stored:
                self._miss([key for key in left if not self._storage.wanted(key)], "cancelled", remember=False)
                left = [key for key in left if key in self.searching]
            if not left:
                continue
            if not is_stored:
                found = partial(self._found, hit)
                self._storage.search(Search(self._deadline(left), found, self._miss), left, number)
            elif not self._storage.waits(number, hit, self._free(len(left)), len(left)):
                self._load(number, left)
            elif self._clock() < self._deadline(left) - self._seconds * (1 - ROOM_SHARE):
                self._queued[number, True, hit] = left
            else:
                self._storage.end_wait(hit)
                self._miss(left, "crowded", remember=False)

    def _ask(self, keys: Sequence[bytes], hit: str) -> None:
        """Look up keys of a hit in the stores. A store with an index in memory answers for the first keys at once, so
        that a request learns in this step that its prefix is not there. While there is no room, and the hit cannot wait
        for it, no store is asked."""
        if not keys:
            return
        is_open = not self.closed and (self._free(1) or self._storage.may_wait(hit))
        room = max(0, ASKED_MAX - len(self.searching)) if is_open else 0
        self.refused += len(keys[room:])
        self.asked += len(keys[:room])
        left, later = keys[: min(room, NOW_MAX)], keys[NOW_MAX:room]
        for number in range(len(self._storage.workers)):
            codes = self._storage.find_now(number, left) if left else None
            if codes is None:
                self._enqueue(number, False, left, hit)
                left = []
                break
            stored = (codes == OK).tolist()
            self._enqueue(number, True, list(compress(left, stored)), hit)
            left = [key for key, ok in zip(left, stored, strict=True) if not ok]
        self._enqueue(0, False, later, hit)
        if left:
            self.missed["absent"] += len(left)
            self._remember(left, _Absence("absent", until=self._clock() + self._retry_seconds))

    def _enqueue(self, number: int, is_stored: bool, keys: Sequence[bytes], hit: str) -> None:
        """Have the next ``poll`` ask a store for keys, or load them."""
        if keys:
            self._queued.setdefault((number, is_stored, hit), []).extend(keys)
            self.searching.update(dict.fromkeys(keys, self._clock() + self._seconds))

    def _found(self, hit: str, number: int, keys: Sequence[bytes], request: StoreRequest) -> list[bytes]:
        """A store has returned which keys of a hit it has. The next ``begin`` loads them. Returns those that the
        next store is asked for."""
        # A key that is not looked for any more was dropped by ``clear``.
        answers = [(key, ok) for key, ok in zip(keys, request.codes == OK, strict=True) if key in self.searching]
        stored = [key for key, ok in answers if ok]
        if stored:
            self._queued.setdefault((number, True, hit), []).extend(stored)
        if number + 1 < len(self._storage.workers):
            return [key for key, ok in answers if not ok]
        self._miss_by_code(keys, request)
        return []

    def _miss(self, keys: Iterable[bytes], reason: str, remember: bool = True) -> None:
        """These keys do not come."""
        missed = [key for key in keys if self.searching.pop(key, None) is not None]
        for key in missed:
            self._storage.drop(key)
        self.missed[reason] += len(missed)
        self._remember(missed if remember else (), _Absence(reason, missed))

    def _miss_by_code(self, keys: Iterable[bytes], request: StoreRequest) -> None:
        """Those of the keys of a store request that the store has not given do not come."""
        for code in request.counts.keys() - {CODES[OK]}:
            self._miss(compress(keys, (request.codes == CODES.index(code)).tolist()), code)

    def _deadline(self, keys: Iterable[bytes]) -> float:
        return min(self.searching[key] for key in keys)

    # -- blocks that come ----------------------------------------------------------------------------

    def _load(self, number: int, keys: Sequence[bytes]) -> None:
        """Load keys that a store has, as many as its policy takes. What has no room is missed. It may be asked for as
        soon as what has come was read: so a prompt that is longer than the room comes window by window."""
        end, room = self._deadline(keys), keys[: self._free(len(keys))]
        self._miss(keys[len(room) :], "crowded", remember=False)
        try:
            attempt = self._storage.attempt(number, len(room), spare=self._spare()) if room else None
        except BaseException:  # of a policy, or of what says how busy the engine is: others than the pool's own
            self._miss(room, "failed")
            raise
        if attempt is not None:
            self._miss(room[attempt.load.blocks :], "declined")
            room, end = room[: attempt.load.blocks], min(end, attempt.until)
        try:
            loading = self._storage.load(number, room, end, attempt, self._came, self._returned)
        except StoreBusy:
            loading = None
            self._miss(room, "busy")
        if loading is None and attempt is not None and attempt.load.blocks:
            attempt.end(self._clock(), measured=False)
        # Keys of an older load may be on their way, and end with this one all the same.
        for key in self.searching.keys() & set(keys).difference(() if loading is None else loading.blocks):
            if self._cache.find(key) == HostCache.ABSENT:
                self._miss([key], "crowded")
            else:
                # It may be asked for as soon as it is gone again.
                del self.searching[key]
                self.missed["taken"] += 1
                if key not in self._storage.coming:
                    self._storage.drop(key)

    def _came(self, loading: Loading[bytes]) -> None:
        """A load is done. What has come can be found."""
        request = loading.request
        if loading.over:
            return  # a signal handler has raised
        for key in self._storage.enter(loading, request.codes == OK):
            # ``clear`` drops a block that comes after it.
            if self.searching.pop(key, None) is None:
                self._storage.drop(key)
            else:
                self.loaded += 1
        self._miss_by_code(loading.blocks, request)
        if loading.attempt is not None:
            loading.attempt.end(self._clock(), measured="cancelled" not in request.counts)

    def _returned(self, loading: Loading[bytes]) -> None:
        """No call can write to the blocks of a load any more. Those that have not come are given back."""
        self._storage.give_back(loading, loading.request)
