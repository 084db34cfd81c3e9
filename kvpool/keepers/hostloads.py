"""HostLoads: keys that a host cache does not have, and blocks that come to it from its stores. And HostCacheTier, the
cache as a bridge to stores sees it."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import compress, islice
from typing import NamedTuple, TypeAlias

import numpy as np

from kvpool.errors import BlockNotFound, KVPoolError, OutOfBlocks, StoreBusy
from kvpool.hostcache.host_cache import HostCache
from kvpool.hostcache.host_leases import HostLease
from kvpool.keepers.bridge import Bridge, Loading, Search
from kvpool.keepers.choice import LoadAttempt, LoadPolicy
from kvpool.stores.jobs import Job, Lend
from kvpool.stores.seals import BlockNames
from kvpool.stores.store import ABSENT, CODES, DAMAGED, OK, Rows
from kvpool.stores.store_client import StoreClient

AT_ONCE = 64
"""Most blocks of one save."""
ASKED_MAX = 65_536
"""Keys that are asked for at once, and keys that are remembered as absent."""
NOW_MAX = 64
"""Keys that are asked for at once, on the thread of the scheduler."""
UNREAD_SECONDS = 10.0
"""For so long a block that has come, and that nobody reads, takes room from others."""
OWNER = "kvpool stores"
"""Of the leases under which blocks are saved."""
Line: TypeAlias = dict[tuple[int, str], list[bytes]]
"""Keys by the number of a store, and by the hit that they are of."""


class StoreChange(NamedTuple):
    """A store, by its number, has these keys now, or has them no more."""

    store: int
    keys: tuple[bytes, ...]
    stored: bool


class HostCacheTier:
    """A ``HostCache`` as a bridge to stores sees it. Stores read and write its own rows.

    ``room``: so many blocks may be pinned for saves. ``limit``: so many may be in each store. Blocks are
    pinned by threads of the stores; all else is the scheduler's thread's.
    """

    def __init__(self, cache: HostCache, clients: Sequence[StoreClient], room: int, limit: int) -> None:
        self.cache, self._limit = cache, limit
        # By store: the blocks that are to be saved, with all of their prompt, in its order.
        self._prompts: list[dict[bytes, Sequence[bytes]]] = [{} for _ in clients]
        # So many blocks are saved by one call, under one lease.
        self._in_one = min(client.queue.piece_blocks for client in clients)
        # What is told of stores, and by store the keys that were told to be there.
        self.changes: deque[StoreChange] = deque(maxlen=ASKED_MAX)
        self._told: list[dict[bytes, None]] = [{} for _ in clients]
        self.tells = False
        self._at_once = max(1, min(AT_ONCE, room // sum(client.queue.savers for client in clients)))

    def names(self, blocks: Sequence[bytes], *, sealed: bool) -> BlockNames:
        return BlockNames(blocks)

    def space(self, client: StoreClient, block: bytes) -> tuple[None, int]:
        return None, self._limit

    def reserve(self, client: StoreClient, blocks: Sequence[bytes]) -> tuple[Sequence[bytes], Rows]:
        """Others may need the last blocks: no more than half of what is free is taken if not all have room."""
        while blocks:
            try:
                taken = self.cache.reserve(blocks)
                return taken.keys, taken.blocks
            except OutOfBlocks as full:
                blocks = blocks[: full.free // 2]
        return (), np.empty(0, np.int64)

    def publish(self, client: StoreClient, blocks: Sequence[bytes], rows: Rows) -> list[bool]:
        self.cache.publish(blocks)
        return [True] * len(blocks)

    def abort(self, client: StoreClient, blocks: Iterable[bytes], rows: Rows) -> None:
        self.cache.abort(blocks)

    def take(self, client: StoreClient, line: Iterable[bytes]) -> list[bytes]:
        return list(islice(line, self._at_once))

    def pin(self, client: StoreClient, blocks: Sequence[bytes]) -> tuple[Sequence[bytes], BlockNames, Lend]:
        """They are pinned when a call of the store begins, and not while they wait for it."""
        return blocks, self.names(blocks, sealed=True), self.lend

    def ended(self, number: int, blocks: Sequence[bytes], kept: Sequence[bool]) -> None:
        """A prompt whose saves have ended comes back into its order. Each of its leases counted as a use, so that the
        end of the prompt would be evicted last."""
        waiting = self._prompts[number]
        prompts = {id(prompt): prompt for prompt in (waiting.pop(block, ()) for block in blocks)}.values()
        here = list(compress(blocks, kept)) if self.tells else []
        if here:
            told = self._told[number]
            told.update(dict.fromkeys(here))
            while len(told) > ASKED_MAX:
                del told[next(iter(told))]
            self.changes.append(StoreChange(number, tuple(here), True))
        for prompt in prompts:
            at_once = len(prompt) <= len(blocks) <= self._in_one
            if not at_once and waiting.keys().isdisjoint(prompt):
                self.cache.touch(prompt)

    def gone(self, number: int, blocks: Iterable[bytes]) -> None:
        """A store does not have these blocks."""
        told = self._told[number]
        lost = tuple(block for block in blocks if told.pop(block, 0) is None) if told else ()
        if lost:
            self.changes.append(StoreChange(number, lost, False))

    def to_save(self, number: int, blocks: Sequence[bytes], prompt: Sequence[bytes]) -> None:
        """Blocks of a prompt are to be saved in this store."""
        self._prompts[number].update(dict.fromkeys(blocks, prompt))

    def touch(self, prompt: Sequence[bytes]) -> None:
        """What ``HostKeeper.touch`` does."""
        self.cache.touch(prompt)
        for waiting in self._prompts:
            waiting.update(dict.fromkeys(waiting.keys() & set(prompt), prompt))

    @property
    def pinned(self) -> int:
        """Blocks that stores read now."""
        return sum(len(lease.blocks) for lease in self.cache.leases if lease.owner == OWNER)

    @contextmanager
    def lend(self, names: BlockNames) -> Iterator[Rows]:
        """Rows of those of the blocks that are in the cache, pinned. On a thread of a queue."""
        rows = np.full(len(names), -1, np.int64)
        places, lease = self._pin(names.names)
        if lease is None:
            yield rows
            return
        rows[places] = lease.blocks
        try:
            yield rows
        finally:
            if lease.closed:
                raise BlockNotFound("others have closed the lease under which the blocks were saved")
            with suppress(KVPoolError):
                lease.close()

    def _pin(self, keys: Sequence[bytes]) -> tuple[Rows, HostLease | None]:
        """Pin those of the blocks that are in the cache. Returns their places too."""
        places = np.arange(len(keys))
        while len(places):
            try:
                return places, self.cache.pin([keys[place] for place in places.tolist()], owner=OWNER)
            except BlockNotFound:
                places = np.flatnonzero(self.cache.lookup(keys) == self.cache.HERE)
        return places, None


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
        # Keys that are looked for, with their deadlines. By the number of a store: those of them that it is to be asked
        # for, and those that it has, apart for each hit.
        self.searching: dict[bytes, float] = {}
        self._new: Line = {}
        self._there: Line = {}
        # Keys that did not come, and what was learned of them.
        self._absent: dict[bytes, _Absence] = {}
        # Keys that have come and had no reader yet: for how long they count as such, and the number of their store.
        self._unread: dict[bytes, tuple[float, int]] = {}
        # Keys whose blocks are reserved for loads, and whether these were given up.
        self.reserved: dict[bytes, bool] = {}
        self.asked = self.loaded = 0
        self.missed: Counter[str] = Counter()
        self._stopped = False

    def known(self, key: bytes, found: int) -> int | None:
        """What ``HostKeeper.find`` says of a key that is not HERE; None if the stores are to be asked. ``found``: what
        the cache says."""
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
        self._new.clear()
        self._there.clear()

    def clear(self) -> None:
        """Give up the keys that are looked for, and know nothing of others."""
        self._cancel()
        self._absent.clear()
        self._unread.clear()

    def turn(self) -> None:
        """Ask the stores for new keys, and load those that are known to be there."""
        new, there, self._new, self._there = self._new, self._there, {}, {}
        for (number, _), keys in there.items():
            # A load from before a ``clear`` may have brought one of them.
            if left := [key for key in keys if key in self.searching]:
                self._load(number, left)
        for (number, _), keys in new.items():
            if left := [key for key in keys if key in self.searching]:
                self._bridge.search(Search(self._deadline(left), self._found, self._miss), left, number)

    def ask(self, wanted: Sequence[bytes], hit: str) -> list[int]:
        """Ask the stores for keys of a hit, and say what ``HostKeeper.find`` says of them. Of a store with an index in
        memory, the first keys are asked at once: who needs a prefix learns that it is not there."""
        keys = list(dict.fromkeys(wanted))
        room = 0 if self._stopped else max(0, ASKED_MAX - len(self.searching))
        self.missed["busy"] += len(keys[room:])
        self.asked += len(keys[:room])
        left, later = keys[: min(room, NOW_MAX)], keys[NOW_MAX:room]
        for number in range(len(self._policies)):
            codes = self._bridge.find_now(number, left) if left else None
            if codes is None:
                self._line_up(self._new, number, left, hit)
                left = []
                break
            there = (codes == OK).tolist()
            self._line_up(self._there, number, compress(left, there), hit)
            left = [key for key, ok in zip(left, there, strict=True) if not ok]
            self._tier.gone(number, left)
        self._line_up(self._new, 0, later, hit)
        if left:
            self.missed["absent"] += len(left)
            self._remember(left, _Absence((), self._clock() + self._retry_seconds))
        return [HostCache.PENDING if key in self.searching else HostCache.ABSENT for key in wanted]

    def _line_up(self, line: Line, number: int, keys: Iterable[bytes], hit: str) -> None:
        """Have the next ``turn`` ask a store for keys, or load them."""
        own = list(keys)
        if own:
            line.setdefault((number, hit), []).extend(own)
            self.searching.update(dict.fromkeys(own, self._clock() + self._seconds))

    def _found(self, number: int, keys: Sequence[bytes], job: Job) -> list[bytes]:
        """A store has said which keys it has. Returns those that the next one is asked for."""
        # A key that is not looked for any more was dropped by ``clear``.
        found = [(key, ok) for key, ok in zip(keys, (job.codes == OK).tolist(), strict=True) if key in self.searching]
        there, others = [key for key, ok in found if ok], [key for key, ok in found if not ok]
        self._tier.gone(number, compress(keys, (job.codes == ABSENT).tolist()))
        if there:
            self._load(number, there)
        if number + 1 < len(self._policies):
            return others
        self._miss_by_code(keys, job)
        return []

    def _miss(self, keys: Iterable[bytes], reason: str) -> None:
        """These keys do not come."""
        missed = [key for key in keys if self.searching.pop(key, None) is not None]
        self.missed[reason] += len(missed)
        self._remember(missed, _Absence(missed))

    def _miss_by_code(self, keys: Iterable[bytes], job: Job) -> None:
        """Those of the keys of a job that the store has not given do not come."""
        for code in job.counts.keys() - {CODES[OK]}:
            self._miss(compress(keys, (job.codes == CODES.index(code)).tolist()), code)

    def _deadline(self, keys: Iterable[bytes]) -> float:
        return min(self.searching[key] for key in keys)

    # -- blocks that come ----------------------------------------------------------------------------

    def _load(self, number: int, keys: Sequence[bytes]) -> None:
        """Load keys that a store has, as many as its policy takes. What has no room is missed."""
        now, end = self._clock(), self._deadline(keys)
        while self._unread and next(iter(self._unread.values()))[0] <= now:
            del self._unread[next(iter(self._unread))]
        room = keys[: max(0, self._room - len(self._unread) - len(self.reserved))]
        attempt = self._attempt(number, len(room))
        if attempt is not None:
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

    def _attempt(self, number: int, there: int) -> LoadAttempt | None:
        """What the policy of a store says of so many blocks that it has. None if it has no policy, or
        there is nothing to say."""
        policy = self._policies[number]
        if policy is None or not there:
            return None
        load = policy.choose(there, len(self.reserved) * self._bridge.clients[number].queue.block_bytes)
        return LoadAttempt(policy, load, max(1, load.blocks), self._clock())

    def _came(self, attempt: LoadAttempt | None, loading: Loading[bytes]) -> None:
        """A load is done. What has come can be found."""
        job, now, ok = loading.job, self._clock(), loading.job.codes == OK
        here = list(compress(loading.blocks, ok.tolist()))
        self._tier.publish(self._bridge.clients[loading.number], here, loading.rows[ok])
        self._tier.gone(loading.number, compress(loading.blocks, np.isin(job.codes, (ABSENT, DAMAGED)).tolist()))
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
