"""HostStorageManager: brings blocks from stores into a HostCache, and saves its blocks to them."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import compress

from kvpool.common.arguments import list_argument, text_argument
from kvpool.common.arrays import Uint8s
from kvpool.common.arrays.layout import choice_argument, integer_argument
from kvpool.common.errors import ForkedProcess, PoolClosed, StoreBusy
from kvpool.common.process import Closing, Process
from kvpool.hostcache.host_cache import HostCache, HostLease
from kvpool.hostcache.identity import ModelIdentity, check_identity, identity_argument
from kvpool.hostcache.opaque_keys import key_argument, keys_argument
from kvpool.hostcache.tier import HostTier
from kvpool.pool.explain import Missed
from kvpool.storage.choice import LoadPolicy
from kvpool.storage.circuit_breaker import BreakerStats, number_argument
from kvpool.storage.host_cache_adapter import HostCacheAdapter, StoreChange
from kvpool.storage.recovery import Recovery
from kvpool.storage.store import CODES, NO_LIMIT, OK, Store
from kvpool.storage.store_figures import StoreStats
from kvpool.storage.store_requests import StoreRequest
from kvpool.storage.store_worker import PATIENCE_SECONDS, StoreWorker
from kvpool.storage.tier_storage import COMMIT, NO_STORE, SAVES, Loading, Search, TierStorage, open_workers

Keys = Iterable[bytes]
UNREAD_SECONDS = 10.0
"""After this time a block that nobody has read stops taking room from others, though its request was never said to
have ended."""
ASKED_MAX = 65_536
"""Keys that are asked for at once, and keys that are remembered as absent."""
ROOM_SHARE = 0.5
"""The part of the time for a key for which it may wait for room that other requests hold. The rest is for its load."""
NOW_MAX = 64
"""Keys that are asked for at once, on the thread of the scheduler."""


@dataclass(frozen=True)
class HostStorageManagerStats:
    """Totals in blocks since a storage manager was made, and its state now."""

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
    health: dict[str, BreakerStats] = field(default_factory=dict)
    refused: int = 0
    """keys that no store was asked for: all room was taken by what had come or was on its way, for a request that does
    not wait, or has waited. ``asked`` has them not,
    and a key that is looked for in each step counts in each."""
    unread: int = 0
    """blocks that have come for requests that have neither pinned them nor ended. With ``loading``, they take the room
    for loads."""


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


class HostStorageManager(Closing):
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
        "commit": every published block is saved. "reuse": a block is saved when it is pinned for a reader. "evict":
        what the cache evicts next is saved before: a quarter of its blocks, at least 64 and at most 1,024 of them, but
        never more than half.
    load_share, save_share
        How much of the cache blocks may take that have come and wait for their reader, and those that stores read to
        save them, but one for each such call.
    load_seconds, save_seconds
        Time for a key from the first ``find`` until it is HERE, and for a block from the ``poll`` after ``publish``
        until it is saved. What takes longer is given up. For up to half of ``load_seconds``, and once, a named request
        waits until others have read what takes the room for loads, unless the store has a policy. While a store is busy
        with other saves, blocks wait for more, as long as each step brings some, and are saved together;
        ``save_seconds`` begins then.
    retry_seconds
        For so long a key that did not come is not asked for again.
    quota
        Bytes that blocks of this identity may have in each store. None: no limit.
    policies
        For each store what says how many blocks of a hit are loaded, such as a ``LoadOrCompute``. The others are
        missed, as "declined". None in the place of one: all that there is room for.
    spare
        () -> float, for how many seconds the engine is busy with what it has. Policies let a load take so long.
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
    Use ``find``, ``lookup``, ``pin``, ``publish``, ``touch``, ``forget``, ``clear`` and ``explain`` of the storage
    manager in the place of the cache's. ``reserve`` and ``abort`` are the cache's own. Not thread-safe: the thread of
    the scheduler calls it. Calls never wait for a store, except ``drain`` and ``close``. In a child of ``os.fork()``
    they raise ForkedProcess; ``find`` and ``lookup`` only for a key that is not HERE.

    Call ``poll`` in each step of the scheduler. It begins jobs and notes what has become of others: a store's I/O, its
    keys, checks and deadlines are on threads of the store's ``StoreWorker``. A key is PENDING only for as long as
    ``load_seconds`` says, if ``poll`` is called. These threads also pin what they save, and while they read it.

    A signal handler that raises in a call does no harm: the next call gives up the look-ups and loads that are under
    way, so that their keys may be looked up again. What was about to be saved may be lost.

    A block is found only after its seal was checked. A load that was given up while its call hangs keeps its blocks
    until the call returns, so that it cannot write into blocks of others.
    """

    def __init__(
        self,
        cache: HostCache,
        tier: HostTier,
        stores: Sequence[Store],
        *,
        identity: ModelIdentity | None = None,
        save: str = COMMIT,
        load_share: float = 0.5,
        save_share: float = 0.25,
        load_seconds: float = 2.0,
        save_seconds: float = 60.0,
        retry_seconds: float = 1.0,
        quota: int | None = None,
        policies: Sequence[LoadPolicy | None] | None = None,
        spare: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(cache, HostCache) or not isinstance(tier, HostTier):
            raise TypeError(f"cache, tier: expected a HostCache and its HostTier, got {cache!r:.80}, {tier!r:.80}")
        if tier.fingerprint != cache.fingerprint:
            raise ValueError("tier: expected the memory of this cache, of the same model and sizes, got another")
        save = choice_argument("save", save, SAVES)
        load_room = _share("load_share", load_share, cache.host_blocks)
        save_room = _share("save_share", save_share, cache.host_blocks)
        load_seconds = number_argument("load_seconds", load_seconds)
        save_seconds = number_argument("save_seconds", save_seconds)
        retry_seconds = number_argument("retry_seconds", retry_seconds)
        store_list, whose = list_argument("stores", stores), cache.identity
        if identity is not None:
            whose = identity_argument(identity)
            check_identity(whose, cache.identity.layouts)
        limit = NO_LIMIT if quota is None else integer_argument("quota", quota, 0, 1 << 62) // cache.block_bytes
        chosen = [None] * len(store_list) if policies is None else list_argument("policies", policies)
        if not store_list:
            raise ValueError("stores: expected one or more, got none")
        if not callable(spare):
            raise TypeError(f"spare: expected a function that returns seconds, got {spare!r:.80}")
        if len(chosen) != len(store_list):
            raise ValueError(f"policies: expected one for each of {len(store_list)} stores, got {len(chosen)}")
        # Half of the least time of a find: it is a job that has time enough.
        patience = min(PATIENCE_SECONDS, load_seconds / 2 ** len(store_list), save_seconds / 2)
        self._cache, self._clock, self._spare = cache, clock, spare
        self._seconds, self._retry_seconds = load_seconds, retry_seconds
        self._on_publish = save == COMMIT
        self._process, self._closed, self._recovery = Process(), False, Recovery(self._recover)
        self._workers = open_workers(
            store_list, lambda store: StoreWorker(store, tier.blocks, whose, patience=patience, warns=True, clock=clock)
        )
        self._adapter = HostCacheAdapter(cache, self._workers, save, save_room, limit)
        self._storage = TierStorage[bytes](
            self._adapter, self._workers, cache.host_blocks, save_seconds, chosen, load_room, UNREAD_SECONDS, clock
        )
        # Whether nothing was looked for since the last ``poll``.
        self._step_begins = True
        # Keys that are looked for, with their deadlines. What the next ``poll`` is to do for them: keys by the number
        # of a store, whether it is known to have them, and the hit that they are of.
        self._searching: dict[bytes, float] = {}
        self._lines: dict[tuple[int, bool, str], list[bytes]] = {}
        # Keys that did not come, and what was learned of them.
        self._absent: OrderedDict[bytes, _Absence] = OrderedDict()
        self._asked = self._loaded = self._refused = 0
        self._missed: Counter[str] = Counter()
        self._forgotten_before = cache.forgotten_blocks

    # -- what the scheduler calls --------------------------------------------------------------------

    def find(self, key: bytes, hit: str = "") -> int:
        """ABSENT, HERE or PENDING, as ``HostCache.find`` says it. A key that is not in the cache is asked for in the
        stores, and is PENDING meanwhile. ``hit``: names the request; ``policies`` judge the keys of one together. What
        comes for it counts against the room for loads until ``pin`` with this ``owner``, or ``finish``. Raises
        TypeError, ValueError, PoolClosed."""
        checked_key = key if type(key) is bytes else key_argument("key", key)
        if self._step_begins or self._recovery.needed:
            self._settle()
        state = self._cache.find(checked_key)
        if state == self._cache.HERE:
            self._storage.want_unread((checked_key,), hit)
            return state
        self._process.check(self)
        with self._recovery:
            return self._answers((checked_key,), (state,), hit)[0]

    def lookup(self, keys: Keys, hit: str = "") -> Uint8s:
        """``find`` for each key: uint8[n]."""
        checked_keys = keys_argument(keys)
        if self._step_begins or self._recovery.needed:
            self._settle()
        answers = self._cache.lookup(checked_keys)
        here = answers == self._cache.HERE
        if self._storage.unread:
            self._storage.want_unread(compress(checked_keys, here.tolist()), hit)
        if not here.all():
            self._process.check(self)
            others = list(compress(checked_keys, (~here).tolist()))
            with self._recovery:
                answers[~here] = self._answers(others, answers[~here].tolist(), hit)
        return answers

    def pin(self, keys: Keys, *, owner: str = "") -> HostLease:
        """What ``HostCache.pin`` does. With ``save="reuse"``, the blocks are saved now. ``owner``: the request that
        ``find`` knows as ``hit``. What else has come for it, and was not pinned, stops counting against the room for
        loads. Without an owner, the keys stop counting for all requests."""
        self._process.check(self)
        with self._recovery:
            lease = self._cache.pin(keys, owner=owner)
            self._storage.read(lease.keys, owner)
            self._save(self._adapter.first_used(lease), lease.keys)
            return lease

    def finish(self, request: str) -> None:
        """Note that a request has ended: it has finished, or was aborted or cancelled.

        Blocks that were loaded for it alone stop counting against the room for loads, and stay cached like any other
        block. Keys that it alone looked for are not loaded. Blocks on their way count until they have arrived.

        Parameters
        ----------
        request
            The ``hit`` of its look-ups. An unknown one changes nothing.

        Raises
        ------
        TypeError, ValueError
            For a bad argument.
        """
        self._process.check(self)
        with self._recovery:
            self._storage.leave(text_argument("request", request))

    def publish(self, keys: Keys, *, unsaved: Keys = ()) -> int:
        """What ``HostCache.publish`` does. With ``save="commit"``, the blocks are saved after it, but those of
        ``unsaved``, which no store gets."""
        self._process.check(self)
        ordered_keys = self._cache.in_order(keys)
        with self._recovery:
            count = self._cache.publish_ordered(ordered_keys)
            private = frozenset(unsaved)
            saved = [key for key in ordered_keys if key not in private] if private else ordered_keys
            # The engine has written them itself. A store may have them soon.
            self._drop_unread(saved)
            for key in saved if self._absent else ():
                self._absent.pop(key, None)
            if self._on_publish:
                self._save(saved, ordered_keys)
            elif private:
                self._adapter.leave_unsaved([key for key in ordered_keys if key in private])
        return count

    def touch(self, keys: Keys, *, turn: bool = False) -> None:
        """What ``HostCache.touch`` does, for the keys of one prompt. They keep this order also when those that are to
        be saved have been."""
        self._process.check(self)
        self._adapter.touch(keys_argument(keys), turn)

    def forget(self, keys: Keys) -> int:
        """What ``HostCache.forget`` does, also to keys that are on their way from a store. The stores keep the blocks,
        but are not asked for them for a while."""
        self._process.check(self)
        checked_keys = keys_argument(keys)
        with self._recovery:
            count = self._cache.forget(checked_keys)
            self._miss(checked_keys, "cancelled")
            for key in checked_keys:
                self._storage.drop(key)
            self._remember(checked_keys, _Absence("forgotten", until=self._clock() + self._retry_seconds))
        return count

    def poll(self) -> None:
        """Note what the stores have done, and begin what was asked for. Call it in each step. Raises PoolClosed."""
        self._process.check(self)
        if self._closed:
            raise PoolClosed("the storage manager is closed")
        with self._recovery:
            self._storage.poll()
            self._ask_stores()
            self._save(self._adapter.victims(), ())
            self._storage.save()
            self._step_begins = True

    @property
    def pending(self) -> bool:
        """Whether ``poll`` has something to begin, or somebody waits for a key."""
        return bool(self._searching) or self._storage.has_pending

    def origin(self, key: bytes) -> int | None:
        """The number of the store that has brought this key to the cache, until somebody pins it. None otherwise."""
        arrival = self._storage.unread.get(key)
        return None if arrival is None or arrival.number == NO_STORE else arrival.number

    def explain(self, key: bytes, tokens: int = 1) -> Missed:
        """Return what ``HostCache.explain`` returns, and as ``trouble`` why no store has brought the key."""
        absence = self._absent.get(key)
        trouble = () if absence is None else (("stores", absence.reason),)
        return self._cache.explain(key, tokens)._replace(trouble=trouble)

    def changes(self) -> list[StoreChange]:
        """What the stores have got and lost since the last call, as far as this storage manager knows, in order: what
        it has saved, and of that what they did not have when they were asked for it. The first call begins it."""
        self._adapter.tells = True
        changes = list(self._adapter.changes)
        self._adapter.changes.clear()
        return changes

    @property
    def totals(self) -> tuple[int, int, int, int]:
        """Blocks that were loaded, missed, saved and not saved, since the storage manager was made. Fast."""
        storage = self._storage
        return self._loaded, self._missed.total(), storage.saved_blocks, storage.dropped.total()

    @property
    def closed(self) -> bool:
        return self._closed

    def clear(self) -> None:
        """Drop all keys of the cache, and find nothing any more that was saved before, such as the KV of weights that
        were replaced: an epoch of the identity begins in each store.

        The stores drop what was there, for all who share them. Until a store has confirmed, it is told again, and
        nothing is saved there: ``unconfirmed_drops`` of its figures is 0 again then. What is saved later is found by
        this storage manager, and by whoever opens the store after it, if the store has ``Store.epoch``. See
        ``StoreWorker.reset``. If the storage manager is closed before a store has confirmed, a later process may find
        what was there before.
        """
        self._process.check(self)
        with self._recovery:
            self._cancel()
            self._absent.clear()
            self._storage.forget_requests()
            self._storage.give_up("cancelled")
            for worker in self._workers:
                # Saves that have begun end with it.
                worker.reset()
            self._storage.poll()
            # After the poll: saves that had ended before are noted by it.
            self._adapter.cleared()
            self._cache.clear(force=True)

    def stats(self) -> HostStorageManagerStats:
        """A snapshot. Not for every step."""
        self._process.check(self)
        storage, coming = self._storage, self._storage.coming
        self._drop_evicted()
        unsaved: Counter[str] = Counter()
        dropped = storage.not_saved(self._adapter.lost)
        for (_, reason), count in dropped.items():
            unsaved[reason] += count
        return HostStorageManagerStats(
            self._asked,
            self._loaded,
            dict(+self._missed),
            storage.saved_blocks,
            dict(unsaved),
            len(self._searching),
            len(coming),
            sum(loading.over for loading in coming.values()),
            self._adapter.pinned,
            storage.waiting,
            tuple(worker.name for worker in self._workers if worker.suspended),
            tuple(worker.stats() for worker in self._workers),
            dict(dropped),
            {worker.name: worker.health.stats() for worker in self._workers},
            self._refused,
            len(storage.unread),
        )

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is under way or waits, at most ``timeout`` seconds. Returns whether that is so."""
        end = self._clock() + number_argument("timeout", timeout)
        self.poll()
        while self._busy and (left := end - self._clock()) > 0:
            self._workers[0].wait(min(left, 0.01))
            self.poll()
        return not self._busy

    def close(self, timeout: float = 10.0) -> bool:
        """Give up what is under way, and close the stores. May be called again.

        Returns False if a call of a store still hangs after ``timeout`` seconds. It may still write into the tier, so
        that memory of the caller's must not be used again. Blocks of such a load stay reserved. Close the cache after
        the storage manager.
        """
        self._process.check(self)
        with self._recovery:
            self._closed = True
            self._cancel()
            self._storage.give_up("cancelled")
        over = self._storage.close(timeout, tell=not self._cache.closed)
        if over:
            self._adapter.close()
        return over

    @property
    def _busy(self) -> bool:
        return self.pending or self._storage.in_flight

    def _settle(self) -> None:
        """Note what the stores have done since the last step, before the first answer of this one. Later in the step
        nothing may be evicted that was found."""
        self._step_begins = False
        if not (self._storage.has_results or self._recovery.needed):
            return
        with suppress(ForkedProcess):
            self._process.check(self)
            with self._recovery:
                self._storage.poll()

    def _recover(self) -> None:
        """Give up what is under way: a signal handler has raised in a call."""
        self._cancel()
        self._storage.recover()

    def _save(self, keys: Sequence[bytes], prompt: Sequence[bytes]) -> None:
        self._storage.enqueue(keys, partial(self._adapter.to_save, prompt))

    # -- keys that the cache does not have -----------------------------------------------------------

    def _answers(self, keys: Sequence[bytes], states: Sequence[int], hit: str) -> list[int]:
        """What ``find`` says of keys of a hit that are not HERE. ``states``: what the cache says. Stores are asked for
        what is not known yet."""
        self._drop_unread(keys)
        said = list(map(self._known, keys, states))
        self._ask([*dict.fromkeys(key for key, known in zip(keys, said, strict=True) if known is None)], hit)
        answers = []
        for key, known in zip(keys, said, strict=True):
            searched = key in self._searching
            if searched or known == HostCache.PENDING and key in self._storage.coming:
                self._storage.want(key, hit)
            answers.append(known if known is not None else HostCache.PENDING if searched else HostCache.ABSENT)
        return answers

    def _known(self, key: bytes, state: int) -> int | None:
        """What is said of a key; None if the stores are to be asked."""
        if state == HostCache.PENDING:
            loading = self._storage.coming.get(key)
            return HostCache.ABSENT if loading is not None and loading.over else state
        if key in self._searching:
            return HostCache.PENDING
        absence = self._absent.get(key)
        return HostCache.ABSENT if absence and absence.read(key, self._clock(), self._retry_seconds) else None

    def _drop_evicted(self) -> None:
        """Stop counting unread blocks that the cache no longer has: they occupy no room."""
        forgotten = self._cache.forgotten_blocks
        if forgotten != self._forgotten_before:
            self._forgotten_before = forgotten
            unread = list(self._storage.unread)
            self._drop_unread(compress(unread, (self._cache.lookup(unread) != HostCache.HERE).tolist()))

    def _drop_unread(self, keys: Iterable[bytes]) -> None:
        """Stop counting those of the keys that count as unread. They were evicted since they came."""
        for key in keys if self._storage.unread else ():
            if key in self._storage.unread:
                self._storage.drop(key)

    def _free(self, wanted: int) -> int:
        """Return how many blocks may be loaded now. The cache is searched for evicted ones only if that is fewer than
        ``wanted``, since the search takes time for each unread block."""
        if self._storage.free < wanted:
            self._drop_evicted()
        return self._storage.free

    def _remember(self, keys: Iterable[bytes], absence: _Absence) -> None:
        for key in keys:
            self._absent.pop(key, None)
            self._absent[key] = absence
        while len(self._absent) > ASKED_MAX:
            self._absent.popitem(last=False)

    def _cancel(self) -> None:
        """Give up the keys that are looked for."""
        self._missed["cancelled"] += len(self._searching)
        self._searching.clear()
        self._lines.clear()

    def _ask_stores(self) -> None:
        """Load keys that stores are known to have, and ask them for others."""
        lines, self._lines = self._lines, {}
        for (number, is_stored, hit), keys in sorted(lines.items(), key=lambda line: not line[0][1]):
            # A load from before a ``clear`` may have brought one of them.
            left = [key for key in keys if key in self._searching]
            if is_stored:
                self._miss([key for key in left if not self._storage.wanted(key)], "cancelled", remember=False)
                left = [key for key in left if key in self._searching]
            if not left:
                continue
            if not is_stored:
                found = partial(self._found, hit)
                self._storage.search(Search(self._deadline(left), found, self._miss), left, number)
            elif not self._storage.waits(number, hit, self._free(len(left)), len(left)):
                self._load(number, left)
            elif self._clock() < self._deadline(left) - self._seconds * (1 - ROOM_SHARE):
                self._lines[number, True, hit] = left
            else:
                self._storage.end_wait(hit)
                self._miss(left, "crowded", remember=False)

    def _ask(self, keys: Sequence[bytes], hit: str) -> None:
        """Look up keys of a hit in the stores. A store with an index in memory answers for the first keys at once, so
        that a request learns in this step that its prefix is not there. While there is no room, and the hit cannot wait
        for it, no store is asked."""
        if not keys:
            return
        is_open = not self._closed and (self._free(1) or self._storage.may_wait(hit))
        room = max(0, ASKED_MAX - len(self._searching)) if is_open else 0
        self._refused += len(keys[room:])
        self._asked += len(keys[:room])
        left, later = keys[: min(room, NOW_MAX)], keys[NOW_MAX:room]
        for number in range(len(self._workers)):
            codes = self._storage.find_now(number, left) if left else None
            if codes is None:
                self._line_up(number, False, left, hit)
                left = []
                break
            stored = (codes == OK).tolist()
            self._line_up(number, True, list(compress(left, stored)), hit)
            left = [key for key, ok in zip(left, stored, strict=True) if not ok]
        self._line_up(0, False, later, hit)
        if left:
            self._missed["absent"] += len(left)
            self._remember(left, _Absence("absent", until=self._clock() + self._retry_seconds))

    def _line_up(self, number: int, is_stored: bool, keys: Sequence[bytes], hit: str) -> None:
        """Have the next ``poll`` ask a store for keys, or load them."""
        if keys:
            self._lines.setdefault((number, is_stored, hit), []).extend(keys)
            self._searching.update(dict.fromkeys(keys, self._clock() + self._seconds))

    def _found(self, hit: str, number: int, keys: Sequence[bytes], job: StoreRequest) -> list[bytes]:
        """A store has returned which keys of a hit it has. The next ``_ask_stores`` loads them. Returns those that the
        next store is asked for."""
        # A key that is not looked for any more was dropped by ``clear``.
        answers = [(key, ok) for key, ok in zip(keys, job.codes == OK, strict=True) if key in self._searching]
        stored = [key for key, ok in answers if ok]
        if stored:
            self._lines.setdefault((number, True, hit), []).extend(stored)
        if number + 1 < len(self._workers):
            return [key for key, ok in answers if not ok]
        self._miss_by_code(keys, job)
        return []

    def _miss(self, keys: Iterable[bytes], reason: str, remember: bool = True) -> None:
        """These keys do not come."""
        missed = [key for key in keys if self._searching.pop(key, None) is not None]
        for key in missed:
            self._storage.drop(key)
        self._missed[reason] += len(missed)
        self._remember(missed if remember else (), _Absence(reason, missed))

    def _miss_by_code(self, keys: Iterable[bytes], job: StoreRequest) -> None:
        """Those of the keys of a job that the store has not given do not come."""
        for code in job.counts.keys() - {CODES[OK]}:
            self._miss(compress(keys, (job.codes == CODES.index(code)).tolist()), code)

    def _deadline(self, keys: Iterable[bytes]) -> float:
        return min(self._searching[key] for key in keys)

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
            attempt.end(self._clock(), told=False)
        # Keys of an older load may be on their way, and end with this one all the same.
        for key in self._searching.keys() & set(keys).difference(() if loading is None else loading.blocks):
            if self._cache.find(key) == HostCache.ABSENT:
                self._miss([key], "crowded")
            else:
                # It may be asked for as soon as it is gone again.
                del self._searching[key]
                self._missed["taken"] += 1
                if key not in self._storage.coming:
                    self._storage.drop(key)

    def _came(self, loading: Loading[bytes]) -> None:
        """A load is done. What has come can be found."""
        job = loading.job
        if loading.over:
            return  # a signal handler has raised
        for key in self._storage.enter(loading, job.codes == OK):
            # ``clear`` drops a block that comes after it.
            if self._searching.pop(key, None) is None:
                self._storage.drop(key)
            else:
                self._loaded += 1
        self._miss_by_code(loading.blocks, job)
        if loading.attempt is not None:
            loading.attempt.end(self._clock(), told="cancelled" not in job.counts)

    def _returned(self, loading: Loading[bytes]) -> None:
        """No call can write to the blocks of a load any more. Those that have not come are given back."""
        self._storage.give_back(loading, loading.job)


def _share(name: str, share: object, blocks: int) -> int:
    """A share of the blocks, one at least. Raises TypeError or ValueError."""
    number = number_argument(name, share)
    if not 0 < number <= 1:
        raise ValueError(f"{name}: expected a share above 0, up to 1, got {share!r:.80}")
    return max(1, int(number * blocks))
