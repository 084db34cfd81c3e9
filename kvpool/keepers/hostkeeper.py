"""HostKeeper: brings blocks from stores into a HostCache, and saves its blocks to them. HostCacheTier: the cache as a
bridge to stores sees it. HostLoads: keys that it does not have, and blocks that come."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, islice
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import integer_argument
from kvpool.entry.arguments import list_argument
from kvpool.entry.closing import Closing
from kvpool.entry.interrupt import DeferSignals
from kvpool.entry.process import Process
from kvpool.errors import BlockNotFound, ForkedProcess, KVPoolError, OutOfBlocks, PoolClosed, StoreBusy
from kvpool.hostcache.host_cache import HostCache, HostLease
from kvpool.hostcache.identity import ModelIdentity
from kvpool.hostcache.opaque_keys import key_argument, keys_argument
from kvpool.hostcache.tier import HostTier
from kvpool.keepers.bridge import (
    COMMIT,
    EVICT,
    REUSE,
    SAVES,
    TOLD_AT_ONCE,
    Bridge,
    Loading,
    Search,
    open_clients,
    pin_those_here,
    victims_margin,
)
from kvpool.keepers.choice import LoadAttempt, LoadPolicy
from kvpool.stores.jobs import Job, Lend
from kvpool.stores.queue import NO_LIMIT, StoreStats
from kvpool.stores.seals import BlockNames
from kvpool.stores.store import ABSENT, CODES, DAMAGED, OK, Rows, Store
from kvpool.stores.store_client import PATIENCE_SECONDS, StoreClient
from kvpool.stores.store_health import HealthStats, seconds_argument

Keys = Iterable[bytes]
PUBLISH = "publish"
"""The same as COMMIT."""
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

    ``save``: when blocks are saved. The cache's state knows which it was asked for before. ``room``: so many blocks may
    be pinned for saves. ``limit``: so many may be in each store. Blocks are pinned by threads of the stores; all else
    is the scheduler's thread's.
    """

    def __init__(self, cache: HostCache, clients: Sequence[StoreClient], save: str, room: int, limit: int) -> None:
        self.cache = cache
        self._save, self._limit = save, limit
        self._saver = cache.open_saver(owed=save == EVICT)
        self._before = cache.unsaved_blocks
        self._margin = victims_margin(cache.host_blocks, AT_ONCE)
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
        if self._save != COMMIT:
            # A store has them.
            self.cache.tell_saver(self._saver, blocks)
        return [True] * len(blocks)

    def abort(self, client: StoreClient, blocks: Iterable[bytes], rows: Rows) -> None:
        self.cache.abort(blocks)

    def lacking(self, number: int, blocks: Sequence[bytes]) -> Sequence[bytes]:
        return blocks

    def victims(self) -> list[bytes]:
        """What is to be saved before it is evicted."""
        if self._save != EVICT:
            return []
        return self.cache.next_victims(self._saver, self._margin, TOLD_AT_ONCE)

    def leave_unsaved(self, keys: Sequence[bytes]) -> None:
        """No store gets these, unless it has them."""
        self.cache.tell_saver(self._saver, keys)

    def first_used(self, lease: HostLease) -> list[bytes]:
        """Which of these blocks are to be saved, as they are used now."""
        if self._save != REUSE:
            return []
        return self.cache.tell_saver(self._saver, lease.keys)

    @property
    def lost(self) -> int:
        """Blocks that were evicted before they were to be saved."""
        return self.cache.unsaved_blocks - self._before if self._save == EVICT else 0

    def close(self) -> None:
        """No store is asked any more, and none reads or writes blocks."""
        if self._saver >= 0:
            self.cache.close_saver(self._saver)
            self._saver = -1

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

    def to_save(self, blocks: Sequence[bytes], prompt: Sequence[bytes]) -> None:
        """Blocks of a prompt are to be saved."""
        for waiting in self._prompts:
            waiting.update(dict.fromkeys(blocks, prompt))

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
        keys = names.names
        places, lease = pin_those_here(
            len(keys), lambda own: self.cache.pin([keys[place] for place in own.tolist()], owner=OWNER),
            lambda: self.cache.lookup(keys) == self.cache.HERE,
        )  # fmt: skip
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
                lease.close(used=self._save != EVICT)


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
        memory, the first keys are asked at once: who needs a prefix learns that it is not there. While there is no
        room, nobody is asked."""
        keys = list(dict.fromkeys(wanted)) if self._free else []
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

    @property
    def _free(self) -> int:
        """How many blocks may be loaded now."""
        now = self._clock()
        while self._unread and next(iter(self._unread.values()))[0] <= now:
            del self._unread[next(iter(self._unread))]
        return max(0, self._room - len(self._unread) - len(self.reserved))

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


@dataclass(frozen=True)
class HostKeeperStats:
    """Totals in blocks since a keeper was made, and its state now."""

    asked: int
    """keys that were not in the cache, and for which the stores were asked"""
    loaded: int
    """blocks that came from a store, and could be found in the cache then"""
    missed: dict[str, int]
    """keys that did not come, by reason: "absent", "failed", "damaged", "late" (what the stores said), "cancelled"
    (``forget``, ``clear`` or ``close``), "crowded" (no room in the cache), "busy" (a full queue), "suspended" (no store
    is usable), "taken" (the engine has written the block itself meanwhile), "declined" (by the policy of the store)"""
    saved: int
    """blocks that a store has kept. A block that two stores keep counts twice."""
    unsaved: dict[str, int]
    """blocks that a store has not kept, by reason: what the store said, "quota", "evicted" (they had left the cache),
    "busy" (a full queue), "suspended", "crowded" (published without ``poll``), or "cancelled" (``clear`` or ``close``).
    A block that two stores have not kept counts twice."""
    searching: int
    """keys whose answer is not known yet"""
    loading: int
    """blocks that are reserved for loads"""
    hung: int
    """blocks of these that were given up, and that a call of a store may still write"""
    saving: int
    """blocks that are pinned for saves"""
    waiting: int
    """blocks whose save has not begun. A block that waits for two stores counts twice."""
    suspended: tuple[str, ...]
    """stores that have failed, and are not asked for a while"""
    stores: tuple[StoreStats, ...]
    dropped: dict[tuple[str, str], int] = field(default_factory=dict)
    """``unsaved`` by store and reason"""
    health: dict[str, HealthStats] = field(default_factory=dict)


class HostKeeper(Closing):
    """Stands between a ``HostCache`` and the stores behind it.

    Parameters
    ----------
    cache, tier
        The index and its memory, which may have been attached. Neither is closed here.
    stores
        One or more, the nearest first. Each is opened here. A key is asked for in one after the other, and is saved to
        all of them.
    identity
        Whose KV the stores have. None: that of the cache. Name another where the cache's identity ends with the engine.
    save
        "commit", or "publish": every published block is saved. "reuse": a block is saved when it is pinned for a
        reader. "evict": what the cache evicts next is saved before: a quarter of its blocks, at least 64 and at most
        1,024 of them, but never more than half.
    load_share, save_share
        How much of the cache blocks may take that have come and wait for their reader, and those that stores read to
        save them, but one for each such call.
    load_seconds, save_seconds
        Time for a key from the first ``find`` until it is HERE, and for a block from the ``poll`` after ``publish``
        until it is saved. What takes longer is given up.
    retry_seconds
        For so long a key that did not come is not asked for again.
    quota
        Bytes that blocks of this identity may have in each store. None: no limit.
    policies
        For each store what says how many blocks of a hit are loaded, such as a ``LoadOrCompute``. The others are
        missed, as "declined". None in the place of one: all that there is room for.
    clock
        () -> float, monotonic seconds.

    Raises
    ------
    TypeError, ValueError
        For a bad argument, or a tier of another cache.
    OSError, ImportError
        What opening a store raises. No store is open then.

    Notes
    -----
    Use ``find``, ``lookup``, ``pin``, ``publish``, ``touch``, ``forget`` and ``clear`` of the keeper in the place of
    the cache's. ``reserve`` and ``abort`` are the cache's own. Not thread-safe: the thread of the scheduler calls it.
    Calls never wait for a store, except ``drain`` and ``close``. In a child of ``os.fork()`` they raise ForkedProcess;
    ``find`` and ``lookup`` only for a key that is not HERE.

    Call ``poll`` in each step of the scheduler. It begins jobs and notes what has become of others: a store's I/O, its
    keys, checks and deadlines are on threads of the store's ``StoreQueue``. A key is PENDING only for as long as
    ``load_seconds`` says, if ``poll`` is called. These threads also pin what they save, and while they read it.

    A block is found only after its seal was checked. A load that was given up while its call hangs keeps its blocks
    until the call returns, so that it cannot write into blocks of others.
    """

    def __init__(
        self, cache: HostCache, tier: HostTier, stores: Sequence[Store], *, identity: ModelIdentity | None = None,
        save: str = PUBLISH, load_share: float = 0.5, save_share: float = 0.25, load_seconds: float = 2.0,
        save_seconds: float = 60.0, retry_seconds: float = 1.0, quota: int | None = None,
        policies: Sequence[LoadPolicy | None] | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        if not isinstance(cache, HostCache) or not isinstance(tier, HostTier):
            raise TypeError(f"cache={cache!r:.80}, tier={tier!r:.80}: accepted are a HostCache and its HostTier")
        if tier.fingerprint != cache.fingerprint:
            raise ValueError("tier: accepted is the memory of this cache, of the same model and sizes")
        save = COMMIT if save == PUBLISH else save
        if save not in SAVES:
            raise ValueError(f"save={save!r:.80}: accepted are {', '.join(map(repr, SAVES))}")
        load_room = _share("load_share", load_share, cache.host_blocks)
        save_room = _share("save_share", save_share, cache.host_blocks)
        load_seconds = seconds_argument("load_seconds", load_seconds)
        save_seconds = seconds_argument("save_seconds", save_seconds)
        retry_seconds = seconds_argument("retry_seconds", retry_seconds)
        own, whose = list_argument("stores", stores), cache.identity if identity is None else identity
        limit = NO_LIMIT if quota is None else integer_argument("quota", quota, 0, 1 << 62) // cache.block_bytes
        chosen = [None] * len(own) if policies is None else list_argument("policies", policies)
        if not own:
            raise ValueError("stores=[]: accepted are one or more")
        if len(chosen) != len(own):
            raise ValueError(f"policies has {len(chosen)} elements: accepted is one for each of {len(own)} stores")
        # Half of the least time of a find: it is a job that has time enough.
        patience = min(PATIENCE_SECONDS, load_seconds / 2 ** len(own), save_seconds / 2)
        self._cache, self._clock, self._on_publish = cache, clock, save == COMMIT
        self._process, self._closed = Process(), False
        self._clients = open_clients(
            own, lambda store: StoreClient(store, tier.blocks, whose, patience=patience, warns=True, clock=clock)
        )
        self._tier = HostCacheTier(cache, self._clients, save, save_room, limit)
        self._bridge = Bridge[bytes](self._tier, self._clients, cache.host_blocks, save_seconds, clock)
        self._loads = HostLoads(self._tier, self._bridge, chosen, load_room, load_seconds, retry_seconds, clock)
        # Whether nothing was looked for since the last ``poll``.
        self._step_begins = True

    # -- what the scheduler calls --------------------------------------------------------------------

    def find(self, key: bytes, hit: str = "") -> int:
        """ABSENT, HERE or PENDING, as ``HostCache.find`` says it. A key that is not in the cache is asked for in the
        stores, and is PENDING meanwhile. ``hit``: names the prompt; ``policies`` judge the keys of one together. Raises
        TypeError, ValueError, PoolClosed."""
        own = key if type(key) is bytes else key_argument("key", key)
        if self._step_begins:
            self._settle()
        found = self._cache.find(own)
        if found == self._cache.HERE:
            return found
        self._process.check(self)
        said = self._loads.known(own, found)
        return self._loads.ask([own], hit)[0] if said is None else said

    def lookup(self, keys: Keys, hit: str = "") -> npt.NDArray[np.uint8]:
        """``find`` for each key: uint8[n]."""
        own = keys_argument(keys)
        if self._step_begins:
            self._settle()
        answers = self._cache.lookup(own)
        places = np.flatnonzero(answers != self._cache.HERE)
        if len(places):
            self._process.check(self)
            new: list[int] = []
            for place in places.tolist():
                said = self._loads.known(own[place], int(answers[place]))
                if said is None:
                    new.append(place)
                else:
                    answers[place] = said
            answers[new] = self._loads.ask([own[place] for place in new], hit)
        return answers

    def pin(self, keys: Keys, *, owner: str = "") -> HostLease:
        """What ``HostCache.pin`` does. With ``save="reuse"``, the blocks are saved now."""
        self._process.check(self)
        with DeferSignals() as signals:
            lease = self._cache.pin(keys, owner=owner)
            signals.undo = lease.close
            self._loads.read(lease.keys)
            self._save(self._tier.first_used(lease), lease.keys)
            return lease

    def publish(self, keys: Keys, *, unsaved: Keys = ()) -> int:
        """What ``HostCache.publish`` does. With ``save="publish"``, the blocks are saved after it, but those of
        ``unsaved``, which no store gets."""
        self._process.check(self)
        own = self._cache.in_order(keys)
        with DeferSignals():
            count = self._cache.publish_ordered(own)
            private = frozenset(unsaved)
            saved = [key for key in own if key not in private] if private else own
            self._loads.published(saved)
            if self._on_publish:
                self._save(saved, own)
            elif private:
                self._tier.leave_unsaved([key for key in own if key in private])
        return count

    def touch(self, keys: Keys) -> None:
        """What ``HostCache.touch`` does, for the keys of one prompt. They keep this order also when those that are to
        be saved have been."""
        self._process.check(self)
        self._tier.touch(keys_argument(keys))

    def forget(self, keys: Keys) -> int:
        """What ``HostCache.forget`` does, also to keys that are on their way from a store. The stores keep the blocks,
        but are not asked for them for a while."""
        self._process.check(self)
        own = keys_argument(keys)
        count = self._cache.forget(own)
        with DeferSignals():
            self._loads.leave(own)
        return count

    def poll(self) -> None:
        """Note what the stores have done, and begin what was asked for. Call it in each step. Raises PoolClosed."""
        self._process.check(self)
        if self._closed:
            raise PoolClosed("the keeper is closed")
        with DeferSignals():
            self._bridge.poll()
            self._loads.turn()
            self._bridge.want(self._tier.victims())
            self._bridge.save()
            self._step_begins = True

    @property
    def pending(self) -> bool:
        """Whether ``poll`` has something to begin, or somebody waits for a key."""
        return bool(self._loads.searching) or self._bridge.lined_up

    def origin(self, key: bytes) -> int | None:
        """The number of the store that has brought this key to the cache, until somebody pins it. None otherwise."""
        return self._loads.origin(key)

    def changes(self) -> list[StoreChange]:
        """What the stores have got and lost since the last call, as far as this keeper knows, in order: what it has
        saved, and of that what they did not have when they were asked for it. The first call begins it."""
        self._tier.tells = True
        found = list(self._tier.changes)
        self._tier.changes.clear()
        return found

    @property
    def totals(self) -> tuple[int, int, int, int]:
        """Blocks that were loaded, missed, saved and not saved, since the keeper was made. Fast."""
        loads, bridge = self._loads, self._bridge
        return loads.loaded, loads.missed.total(), bridge.saved_blocks, bridge.dropped.total()

    @property
    def closed(self) -> bool:
        return self._closed

    def clear(self) -> None:
        """Drop all keys of the cache, and find nothing any more that was saved before, such as the KV of weights that
        were replaced: an epoch of the identity begins in each store.

        The stores drop what was there, for all who share them. Until a store has confirmed, it is told again, and
        nothing is saved there: ``unconfirmed_drops`` of its figures is 0 again then. What is saved later is found by
        this keeper, and by whoever opens the store after it, if the store has ``Store.epoch``. See
        ``StoreQueue.reset``. If the keeper is closed before a store has confirmed, a later process may find what was
        there before.
        """
        self._process.check(self)
        with DeferSignals():
            self._loads.clear()
            self._bridge.cancel()
            self._bridge.poll()
            for client in self._clients:
                client.queue.reset()
            self._cache.clear(force=True)

    def stats(self) -> HostKeeperStats:
        """A snapshot. Not for every step."""
        self._process.check(self)
        loads, bridge = self._loads, self._bridge
        unsaved: Counter[str] = Counter()
        dropped = Counter(bridge.dropped)
        if lost := self._tier.lost:
            dropped.update({(client.name, "evicted"): lost for client in self._clients})
        for (_, reason), count in dropped.items():
            unsaved[reason] += count
        missed = {reason: count for reason, count in dict(loads.missed).items() if count}
        return HostKeeperStats(
            loads.asked, loads.loaded, missed, bridge.saved_blocks, dict(unsaved), len(loads.searching),
            len(loads.reserved), sum(loads.reserved.values()), self._tier.pinned, bridge.waiting,
            tuple(client.name for client in self._clients if client.suspended),
            tuple(client.queue.stats() for client in self._clients), dict(dropped),
            {client.name: client.health.stats() for client in self._clients},
        )  # fmt: skip

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is under way or waits, at most ``timeout`` seconds. Returns whether that is so."""
        end = self._clock() + seconds_argument("timeout", timeout)
        self.poll()
        while self._busy and (left := end - self._clock()) > 0:
            self._clients[0].queue.wait(min(left, 0.01))
            self.poll()
        return not self._busy

    def close(self, timeout: float = 10.0) -> bool:
        """Give up what is under way, and close the stores. May be called again.

        Returns False if a call of a store still hangs after ``timeout`` seconds. It may still write into the tier, so
        that memory of the caller's must not be used again. Blocks of such a load stay reserved. Close the cache after
        the keeper.
        """
        self._process.check(self)
        with DeferSignals():
            self._closed = True
            self._loads.stop()
            self._bridge.cancel()
        over = self._bridge.close(timeout, tell=not self._cache.closed)
        if over:
            self._tier.close()
        return over

    def _settle(self) -> None:
        """Note what the stores have done since the last step, before the first answer of this one. Later in the step
        nothing may be evicted that was found."""
        with suppress(ForkedProcess), DeferSignals():
            self._step_begins = False
            self._process.check(self)
            self._bridge.poll()

    def _save(self, keys: Sequence[bytes], prompt: Sequence[bytes]) -> None:
        self._tier.to_save(keys, prompt)
        self._bridge.want(keys)

    @property
    def _busy(self) -> bool:
        return self.pending or self._bridge.under_way


def _share(name: str, share: object, blocks: int) -> int:
    """A share of the blocks, one at least. Raises TypeError or ValueError."""
    found = seconds_argument(name, share)
    if not 0 < found <= 1:
        raise ValueError(f"{name}={share!r:.80}: accepted is a share above 0, up to 1")
    return max(1, int(found * blocks))
