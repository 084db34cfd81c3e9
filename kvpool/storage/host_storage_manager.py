"""HostStorageManager: brings blocks from stores into a HostCache, and saves its blocks to them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress

from kvpool.common.arguments import list_argument, number_argument, text_argument
from kvpool.common.arrays import Uint8s
from kvpool.common.arrays.layout import choice_argument, integer_argument
from kvpool.common.process import Closing, stays_here
from kvpool.errors import PoolClosed
from kvpool.hostcache.host_cache import HostCache
from kvpool.hostcache.host_lease import HostLease
from kvpool.hostcache.identity import ModelIdentity, check_identity, identity_argument
from kvpool.hostcache.opaque_keys import key_argument, keys_argument
from kvpool.hostcache.tier import HostTier
from kvpool.pool.explain import Missed
from kvpool.storage.choice import LoadPolicy
from kvpool.storage.circuit_breaker import BreakerStats
from kvpool.storage.host_cache_adapter import HostCacheAdapter, StoreChange
from kvpool.storage.key_loads import KeyLoads
from kvpool.storage.recovery import Recovery
from kvpool.storage.store import NO_LIMIT, Store
from kvpool.storage.store_stats import StoreStats
from kvpool.storage.store_worker import PATIENCE_SECONDS, StoreWorker
from kvpool.storage.tier_storage import COMMIT, NO_STORE, SAVES, SaveMode, TierStorage, open_workers
from kvpool.storage.urls import open_stores

Keys = Iterable[bytes]
UNREAD_SECONDS = 10.0
"""After this time a block that nobody has read stops taking room from others, though its request was never said to
have ended."""


@dataclass(frozen=True)
class HostStorageManagerStats:
    """Totals of a ``HostStorageManager`` in blocks, and its state now.

    Attributes
    ----------
    asked : int
        Keys that were not in the cache, and for which the stores were asked.
    loaded_blocks : int
        Blocks that came from a store, and could be found in the cache then.
    missed : dict of str to int
        Keys that did not come, by reason: "absent", "failed", "damaged", "late" (the answers of stores), "cancelled"
        (``forget``, ``clear`` or ``close``), "crowded" (no room in the cache), "busy" (a full queue), "suspended" (no
        store is usable), "taken" (the engine has written the block itself meanwhile), "declined" (by the policy of the
        store).
    saved_blocks : int
        Blocks that a store has saved. A block that two stores save counts twice.
    unsaved : dict of str to int
        Blocks that a store has not saved, by reason: the answer of the store, "quota", "evicted" (they had left the
        cache), "busy" (a full queue), "suspended", "crowded" (published without ``poll``), or "cancelled" (``clear`` or
        ``close``). A block that two stores have not saved counts twice.
    searching : int
        Keys whose answer is not known yet.
    loading : int
        Blocks that are reserved for loads.
    hung : int
        Blocks of these that were given up, and that a call of a store may still write.
    saving : int
        Blocks that are pinned for saves.
    waiting_blocks : int
        Blocks whose save has not begun. A block that waits for two stores counts twice.
    suspended : tuple of str
        Stores that have failed, and are suspended for a while.
    stores : tuple of StoreStats
        The figures of each store.
    dropped : dict of (str, str) to int
        The blocks of ``unsaved`` by store and reason.
    health : dict of str to BreakerStats
        The circuit breaker of each store.
    refused : int
        Keys that no store was asked for, because all room was taken, for a request that does not wait, or has waited.
        They are not in ``asked``, and a key that is looked up in each step counts in each.
    promoted_blocks : int
        Blocks that were loaded for requests that have neither pinned them nor ended. With ``loading``, they take the
        room for loads.
    """

    asked: int
    loaded_blocks: int
    missed: dict[str, int]
    saved_blocks: int
    unsaved: dict[str, int]
    searching: int
    loading: int
    hung: int
    saving: int
    waiting_blocks: int
    suspended: tuple[str, ...]
    stores: tuple[StoreStats, ...]
    dropped: dict[tuple[str, str], int] = field(default_factory=dict)
    health: dict[str, BreakerStats] = field(default_factory=dict)
    refused: int = 0
    promoted_blocks: int = 0


class HostStorageManager(Closing):
    """Saves the blocks of a ``HostCache`` in stores, and loads those that requests look up. A context manager.

    Parameters
    ----------
    cache : HostCache
        The index. It is not closed here.
    tier : HostTier
        Its memory, which may have been attached. It is not closed here.
    stores : sequence of Store
        One or more, the nearest first. Each is opened here. A key is looked up in one after the other, and is saved to
        all of them.
    identity : ModelIdentity, optional
        Whose KV the stores have, by default that of the cache. Name another where the cache's identity ends with the
        engine.
    save : {"commit", "reuse", "evict"}, default "commit"
        "commit" saves every published block. "reuse" saves a block when it is pinned for a reader. "evict" saves what
        the cache evicts next: a quarter of its blocks, at least 64 and at most 1,024 of them, but never more than half.
    load_share : float, default 0.5
        The share of the cache for blocks that were loaded and wait for their reader, above 0 and up to 1.
    save_share : float, default 0.25
        The share of the cache for blocks that stores read to save them. One for each such call is allowed in any case.
    load_seconds : float, default 2.0
        Time for a key from the first ``find`` until it is HERE. A load that takes longer is given up. For up to half of
        it, and once, a named request waits until others have read what takes the room for loads, unless the store has a
        policy.
    save_seconds : float, default 60.0
        Time for a block from the ``poll`` after ``publish`` until it is saved. A save that takes longer is given up.
        While a store is busy with other saves, blocks wait for more, as long as each step brings some, and are saved
        together; the time begins then.
    retry_seconds : float, default 1.0
        For this long a key that was not loaded is not looked up again.
    quota : int, optional
        Bytes that blocks of this identity may have in each store. By default there is no limit.
    policies : sequence of LoadPolicy or None, optional
        For each store a policy that chooses how many blocks of a hit are loaded, such as a ``LoadOrCompute``. The
        others are missed, as "declined". None loads all that there is room for.
    spare : callable, optional
        ``() -> float``, seconds for which the engine is busy. Policies let a load take that long.
    clock : callable, optional
        ``() -> float``, monotonic seconds.

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
    they raise ForkedProcess.

    Call ``poll`` in each step of the scheduler. It begins store requests and notes the results of others. A store's
    I/O, its keys, checks and deadlines are on threads of the store's ``StoreWorker``. A key is PENDING for
    ``load_seconds`` at most, if ``poll`` is called. These threads also pin what they save, and while they read it.

    A signal handler that raises in a call does no harm: the next call gives up the look-ups and loads that are in
    flight, so that their keys may be looked up again. What was about to be saved may be lost.

    A block is found only after its MAC was checked. A load that was given up while its call hangs keeps its blocks
    until the call returns, so that it cannot write into blocks of others.
    """

    def __init__(
        self,
        cache: HostCache,
        tier: HostTier,
        stores: Sequence[Store | str],
        *,
        identity: ModelIdentity | None = None,
        save: SaveMode = COMMIT,
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
            raise ValueError(f"tier: expected the memory of this cache, of the same model and sizes, got {tier!r:.80}")
        mode = choice_argument("save", save, SAVES)
        load_room = _share("load_share", load_share, cache.host_blocks)
        save_room = _share("save_share", save_share, cache.host_blocks)
        load_seconds = number_argument("load_seconds", load_seconds)
        save_seconds = number_argument("save_seconds", save_seconds)
        retry_seconds = number_argument("retry_seconds", retry_seconds)
        store_list, whose = open_stores(stores), cache.identity
        if identity is not None:
            whose = identity_argument(identity)
            check_identity(whose, cache.identity.layouts)
        limit = NO_LIMIT if quota is None else integer_argument("quota", quota, 0, 1 << 62) // cache.block_bytes
        chosen = [None] * len(store_list) if policies is None else list_argument("policies", policies)
        if not callable(spare):
            raise TypeError(f"spare: expected a function that returns seconds, got {spare!r:.80}")
        if len(chosen) != len(store_list):
            raise ValueError(f"policies: expected one for each of {len(store_list)} stores, got {len(chosen)}")
        # Half of the least time of a find: it is a store request that has time enough.
        patience = min(PATIENCE_SECONDS, load_seconds / 2 ** len(store_list), save_seconds / 2)
        self._cache, self._clock = cache, clock
        self._on_publish = mode == COMMIT
        self._recovery = Recovery(self._recover)
        stays_here(self)
        # Whether nothing was looked for since the last ``poll``.
        self._step_begins = True

        def worker_of(store: Store, name: str) -> StoreWorker:
            return StoreWorker(store, tier.blocks, whose, name=name, patience=patience, warns=True, clock=clock)

        with open_workers(store_list, worker_of) as self._workers:
            self._adapter = HostCacheAdapter(cache, self._workers, mode, save_room, limit)
            self._storage = TierStorage[bytes](
                self._adapter, self._workers, cache.host_blocks, save_seconds, chosen, load_room, UNREAD_SECONDS
            )
            self._loads = KeyLoads(cache, self._storage, load_seconds, retry_seconds, spare)

    # -- what the scheduler calls --------------------------------------------------------------------

    def find(self, key: bytes, request: str = "") -> int:
        """Return whether a key is ABSENT, HERE or PENDING. One that is not in the cache is looked up in the stores.

        It is PENDING meanwhile.

        Parameters
        ----------
        key : bytes
            The key.
        request : str, default ""
            Name of the request. ``policies`` judge the keys of one together. What is loaded for it counts against the
            room for loads until ``pin`` with this ``owner``, or ``finish``.

        Returns
        -------
        int
            ``HostCache.ABSENT``, ``HERE`` or ``PENDING``.
        """
        checked_key = key if type(key) is bytes else key_argument("key", key)
        if self._step_begins or self._recovery.needed:
            self._settle()
        state = self._cache.find(checked_key)
        if state == self._cache.HERE:
            self._storage.add_user_of_unread((checked_key,), request)
            return state
        with self._recovery:
            return self._loads.answers((checked_key,), (state,), request)[0]

    def lookup(self, keys: Keys, request: str = "") -> Uint8s:
        """Do what ``find`` does, for several keys.

        Parameters
        ----------
        keys : iterable of bytes
            The keys.
        request : str, default ""
            Name of the request: see ``find``.

        Returns
        -------
        ndarray of uint8, shape (n,)
            ``HostCache.ABSENT``, ``HERE`` or ``PENDING`` for each.
        """
        checked_keys = keys_argument(keys)
        if self._step_begins or self._recovery.needed:
            self._settle()
        answers = self._cache.lookup(checked_keys)
        here = answers == self._cache.HERE
        if self._storage.unread:
            self._storage.add_user_of_unread(compress(checked_keys, here.tolist()), request)
        if not here.all():
            others = list(compress(checked_keys, (~here).tolist()))
            with self._recovery:
                answers[~here] = self._loads.answers(others, answers[~here].tolist(), request)
        return answers

    def pin(self, keys: Keys, *, owner: str = "") -> HostLease:
        """Do what ``HostCache.pin`` does. With ``save="reuse"``, the blocks are saved now.

        Parameters
        ----------
        keys : iterable of bytes
            The keys. All must be HERE.
        owner : str, default ""
            Name of the request, as given to ``find``. What else was loaded for it, and is not pinned, stops counting
            against the room for loads. Without an owner, the keys stop counting for all requests.

        Returns
        -------
        HostLease
            The blocks.
        """
        with self._recovery:
            lease = self._cache.pin(keys, owner=owner)
            self._storage.read(lease.keys, owner)
            self._save(self._adapter.first_used(lease), lease.keys)
            return lease

    def finish(self, request: str) -> None:
        """Report that a request has ended: it has finished, or was aborted or cancelled.

        Blocks that were loaded for it alone stop counting against the room for loads, and stay cached like any other
        block. Keys that it alone has looked up are not loaded. Blocks in flight count until they have arrived.

        Parameters
        ----------
        request : str
            The name that it had in ``find``. An unknown one changes nothing.
        """
        with self._recovery:
            self._storage.leave(text_argument("request", request))

    def publish(self, keys: Keys, *, unsaved: Keys = ()) -> int:
        """Do what ``HostCache.publish`` does. With ``save="commit"``, the blocks are saved after it.

        Parameters
        ----------
        keys : iterable of bytes
            The keys.
        unsaved : iterable of bytes, optional
            Keys of these that no store gets.

        Returns
        -------
        int
            Number of keys that are HERE now.
        """
        ordered_keys = self._cache.in_order(keys)
        with self._recovery:
            count = self._cache.publish_ordered(ordered_keys)
            private = frozenset(unsaved)
            saved = [key for key in ordered_keys if key not in private] if private else ordered_keys
            self._loads.note_written(saved)
            if self._on_publish:
                self._save(saved, ordered_keys)
            elif private:
                self._adapter.leave_unsaved([key for key in ordered_keys if key in private])
        return count

    def touch(self, keys: Keys, *, turn: bool = False) -> None:
        """Do what ``HostCache.touch`` does, for the keys of one prompt.

        They keep this order also when those that are to be saved have been.

        Parameters
        ----------
        keys : iterable of bytes
            The keys, in the order of the prompt.
        turn : bool, default False
            As for ``HostCache.touch``.
        """
        self._adapter.touch(keys_argument(keys), turn)

    def forget(self, keys: Keys) -> int:
        """Do what ``HostCache.forget`` does, also to keys that are being loaded from a store.

        The stores keep the blocks, but are not asked for them for ``retry_seconds``.

        Parameters
        ----------
        keys : iterable of bytes
            The keys.

        Returns
        -------
        int
            Number of keys that were HERE or PENDING in the cache.
        """
        checked_keys = keys_argument(keys)
        with self._recovery:
            count = self._cache.forget(checked_keys)
            self._loads.forget(checked_keys)
        return count

    def poll(self) -> None:
        """Note the results of the stores, and begin what was requested. Call it in each step.

        Raises
        ------
        PoolClosed
            After ``close``.
        """
        if self.closed:
            raise PoolClosed("the storage manager is closed")
        with self._recovery:
            self._storage.poll()
            self._loads.begin()
            self._save(self._adapter.victims(), ())
            self._storage.save()
            self._step_begins = True

    @property
    def pending(self) -> bool:
        """Whether ``poll`` has something to begin, or somebody waits for a key."""
        return bool(self._loads.searching) or self._storage.has_pending

    def origin(self, key: bytes) -> int | None:
        """Return which store has brought a key to the cache, until somebody pins it.

        Parameters
        ----------
        key : bytes
            The key.

        Returns
        -------
        int or None
            Index of the store. None for another key.
        """
        arrival = self._storage.unread.get(key)
        return None if arrival is None or arrival.number == NO_STORE else arrival.number

    def explain(self, key: bytes, tokens: int = 1) -> Missed:
        """Return what ``HostCache.explain`` returns, and as ``trouble`` why no store has brought the key.

        Parameters
        ----------
        key : bytes
            The key.
        tokens : int, default 1
            Tokens of its block, which the result repeats.

        Returns
        -------
        Missed
            Why it is not there.
        """
        reason = self._loads.why_absent(key)
        trouble = (("stores", reason),) if reason else ()
        return self._cache.explain(key, tokens)._replace(trouble=trouble)

    def changes(self) -> list[StoreChange]:
        """Return what the stores have got and lost since the last call, as far as it is known here.

        Known is what this storage manager has saved, and which of that was absent when a store was asked for it. The
        first call begins it.

        Returns
        -------
        list of StoreChange
            The changes, in order.
        """
        self._adapter.reports = True
        changes = list(self._adapter.changes)
        self._adapter.changes.clear()
        return changes

    @property
    def totals(self) -> tuple[int, int, int, int]:
        """Blocks that were loaded, missed, saved and not saved, since the storage manager was made. Fast."""
        storage, loads = self._storage, self._loads
        return loads.loaded, loads.missed.total(), storage.saved_blocks, storage.dropped.total()

    @property
    def closed(self) -> bool:
        """Whether the storage manager was closed."""
        return self._loads.closed

    def clear(self) -> None:
        """Drop all keys of the cache, and begin a new epoch in each store: nothing is found that was saved before.

        For KV of weights that were replaced. The stores drop what was there, for all who share them. Until a store has
        confirmed, the drop is repeated, and nothing is saved there: ``unconfirmed_drops`` of its figures is 0 again
        then. What is saved later is found by this storage manager, and by whoever opens the store after it, if the
        store has ``Store.epoch``. See ``StoreWorker.reset``. If the storage manager is closed before a store has
        confirmed, a later process may find what was there before.
        """
        with self._recovery:
            self._loads.clear()
            self._storage.give_up("cancelled")
            for worker in self._workers:
                # Saves that have begun end with it.
                worker.reset()
            self._storage.poll()
            # After the poll: saves that had ended before are noted by it.
            self._adapter.cleared()
            self._cache.clear(force=True)

    def stats(self) -> HostStorageManagerStats:
        """Return the figures. Not for every step.

        Returns
        -------
        HostStorageManagerStats
            Totals, and the state now.
        """
        storage, loads, coming = self._storage, self._loads, self._storage.coming
        self._loads.drop_evicted()
        unsaved: Counter[str] = Counter()
        dropped = storage.not_saved(self._adapter.lost)
        for (_, reason), count in dropped.items():
            unsaved[reason] += count
        return HostStorageManagerStats(
            loads.asked,
            loads.loaded,
            dict(+loads.missed),
            storage.saved_blocks,
            dict(unsaved),
            len(loads.searching),
            len(coming),
            sum(loading.over for loading in coming.values()),
            self._adapter.pinned,
            storage.waiting,
            tuple(worker.name for worker in self._workers if worker.suspended),
            tuple(worker.stats() for worker in self._workers),
            dict(dropped),
            {worker.name: worker.health.stats() for worker in self._workers},
            loads.refused,
            len(storage.unread),
        )

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is in flight or waits.

        Parameters
        ----------
        timeout : float
            Seconds to wait.

        Returns
        -------
        bool
            Whether that is so.
        """
        end = self._clock() + number_argument("timeout", timeout)
        self.poll()
        while self._busy and (left := end - self._clock()) > 0:
            self._workers[0].wait(min(left, 0.01))
            self.poll()
        return not self._busy

    def close(self, timeout: float = 10.0) -> bool:
        """Give up what is in flight, and close the stores. Close the cache after it.

        Parameters
        ----------
        timeout : float, default 10.0
            Seconds to wait for calls of the stores.

        Returns
        -------
        bool
            False if a call of a store still hangs. It may still write into the tier, so that memory of the caller's
            must not be used again. Blocks of such a load stay reserved.

        Notes
        -----
        May be called again.
        """
        with self._recovery:
            self._loads.closed = True
            self._loads.cancel()
            self._storage.give_up("cancelled")
        over = self._storage.close(timeout, call_back=not self._cache.closed)
        if over:
            self._adapter.close()
        return over

    @property
    def _busy(self) -> bool:
        return self.pending or self._storage.in_flight

    def _settle(self) -> None:
        """Note what the stores have done since the last step, before the first answer of this one: what has come is
        HERE in this step. Nothing is evicted by that. Blocks for loads are reserved by ``poll`` alone."""
        self._step_begins = False
        if not (self._storage.has_results or self._recovery.needed):
            return
        with self._recovery:
            self._storage.poll()

    def _recover(self) -> None:
        """Give up what is under way: a signal handler has raised in a call."""
        self._loads.cancel()
        self._adapter.recover()
        self._storage.recover()

    def _save(self, keys: Sequence[bytes], prompt: Sequence[bytes]) -> None:
        self._storage.enqueue(keys, partial(self._adapter.to_save, prompt))


def _share(name: str, share: object, blocks: int) -> int:
    """A share of the blocks, one at least. Raises TypeError or ValueError."""
    number = number_argument(name, share)
    if not 0 < number <= 1:
        raise ValueError(f"{name}: expected a share above 0, up to 1, got {share!r:.80}")
    return max(1, int(number * blocks))
