"""StorageManager: stands between a pool and its stores. It saves what the pool has, and brings back what waiting
requests need."""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvpool.common.arguments import Namespace, bool_argument, namespace_argument, number_argument, token_array
from kvpool.common.arrays import Int64s
from kvpool.common.arrays.layout import choice_argument, integer_argument
from kvpool.common.arrays.strided import in_numpy
from kvpool.common.process import Closing, stays_here
from kvpool.common.threads import Bell
from kvpool.errors import PoolClosed
from kvpool.hostcache.identity import ModelIdentity, check_identity, identity_argument
from kvpool.pool.events import Events
from kvpool.pool.explain import Explanation, InStores
from kvpool.pool.keys import BlockKeys, Keys, Match, Prompt, is_keys, key_rows
from kvpool.pool.manager import KVCacheManager
from kvpool.state.records import H
from kvpool.storage.choice import SLOWEST, LoadOrCompute
from kvpool.storage.circuit_breaker import BreakerStats, CircuitBreaker
from kvpool.storage.forgotten import Forgotten
from kvpool.storage.pool_adapter import (
    Content,
    PoolAdapter,
    StoredContent,
    Unsaved,
    cached_groups,
    namespace_bytes,
    split,
)
from kvpool.storage.prefetches import UNUSED_SECONDS, Prefetch, Prefetches
from kvpool.storage.staging_rows import row_padding_of, staging_rows
from kvpool.storage.store import MODEL_BYTES, TAG_BYTES, Store
from kvpool.storage.store_requests import StoreRequest
from kvpool.storage.store_stats import StoreStats
from kvpool.storage.store_worker import StoreWorker
from kvpool.storage.tier_storage import COMMIT, EVICT, SAVES, SaveMode, TierStorage, open_workers
from kvpool.storage.urls import open_stores

BLOCKS_PER_TURN = 64
"""Blocks that are copied for a store before the storage manager looks at its prefetches again."""
REST_SECONDS = 1e-4
"""In a rest others get the lock of the interpreter. Without it, whoever waits wakes up too late to take it, and waits
for the 5 ms after which the interpreter takes it away."""
KNOWN_BLOCKS = 4096
"""Blocks of stores that a storage manager knows of, and readers of its events too, beside as many as the pool has."""
SAVE_DEADLINES = 4
"""A save may take so many times as long as other store requests: nobody waits for it, and it waits for all others."""
_ENDED = "the storage manager has ended: it or its pool was closed, or an error that the log has"
_log = logging.getLogger(__name__)
T = TypeVar("T")


class _Order(NamedTuple):
    """Work for the thread, and the callback for what it raises. A ``Future`` would not do: if a signal handler raises
    inside one of its calls, its lock can stay held, and the thread would block on it."""

    work: Callable[[], object]
    failed: Callable[[BaseException], object]


@dataclass(frozen=True)
class StorageManagerStats:
    """Totals of a ``StorageManager``, and its state now.

    Attributes
    ----------
    saved_blocks : int
        Blocks that a store has saved.
    saved_bytes : int
        Their bytes.
    loaded_blocks : int
        Blocks that have entered the host tier from stores.
    loaded_bytes : int
        Their bytes.
    found_blocks : int
        Blocks that stores had when they were asked for a prompt.
    dropped : dict of (str, str) to int
        Saves that were given up, by store and reason: "queue_full", "evicted" (before it was copied), "quota",
        "suspended", "forgotten", and the codes of store requests: "failed", "late", "refused", "cancelled".
    prefetches : dict of str to int
        Prefetches that have ended, by ``Prefetch.ended``.
    events_dropped : int
        Rows of events that were overwritten before the storage manager, or the reader of its ``events``, had read them.
    waiting_blocks : int
        Blocks that wait to be saved.
    promoted_blocks : int
        Blocks that were loaded to the host and wait for their request.
    prefetching : int
        Prefetches in flight.
    stores : dict of str to StoreStats
        The figures of each store.
    health : dict of str to BreakerStats
        The circuit breaker of each store.
    """

    saved_blocks: int
    saved_bytes: int
    loaded_blocks: int
    loaded_bytes: int
    found_blocks: int
    dropped: dict[tuple[str, str], int]
    prefetches: dict[str, int]
    events_dropped: int
    waiting_blocks: int
    promoted_blocks: int
    prefetching: int
    stores: dict[str, StoreStats]
    health: dict[str, BreakerStats]


class StorageManager(Closing):
    """Saves the content of a pool in stores, and loads what waiting requests need. A context manager.

    Parameters
    ----------
    pool : KVCacheManager
        A pool with a host tier and with ``event_capacity``. Its secret makes the keys of stores too. So it must be
        given, unless no store outlives the process: ``KVCacheManager(..., secret=store.secret)``.
    stores : sequence of Store or str
        1 to 16 stores, the nearest first, or texts for ``open_store``. They are opened here, and closed by ``close``. A
        second one of the same name, such as "disk", is called "disk-2" in figures and events.
    identity : ModelIdentity
        The model whose KV this is. Nothing that was saved under another identity, or for other block layouts, is found.
    save : {"commit", "evict", "reuse"}, default "commit"
        When a block is saved: as soon as the pool has it, before the host evicts it, or when it has been used twice.
    quotas : mapping of (salt, adapter_id) to int, optional
        Bytes that a namespace may have in each store. Others have no limit.
    load_seconds : float, default 2.0
        The default timeout of ``prefetch``.
    save_seconds : float, optional
        A save that takes longer is given up. By default four times ``load_seconds``.
    staging_blocks : int, default 64
        Blocks that may be on their way to or from each store. They take as much main memory, in whole pages.
    promotion_blocks : int, optional
        The most blocks that wait on the host for requests that have not been admitted, or are on their way there. By
        default half of the host tier.
    queued_blocks : int, default 4096
        The most blocks that wait to be saved, for each store. More are dropped, and counted.
    prefill_tokens_per_s : float, optional
        Tokens of a prompt that the engine computes in a second. A prefetch then loads only what is expected sooner than
        the engine computes it, and gives up a load that is late. By default it loads all that is there.
    failures : int, default 3
        See ``CircuitBreaker``.
    probe_seconds : float, default 5.0
        See ``CircuitBreaker``.
    interval_seconds : float, default 0.005
        How often the pool is asked for events, 0.001 to 60.
    clock : callable, optional
        ``() -> float``, monotonic seconds.

    Raises
    ------
    TypeError, ValueError
        For a bad argument.
    OSError, ImportError
        What opening a store raises. No store is open then.

    Notes
    -----
    A thread of the storage manager does all hashing, copying and waiting. The scheduler's thread records events, and
    nothing else. Prompts with ``publish=False`` are never saved.

    Close the storage manager before the pool. If the pool is closed first, the storage manager ends by itself; close it
    nevertheless. Any thread may call it. After it has ended, calls raise PoolClosed. All calls raise ForkedProcess in a
    child of ``os.fork()``.
    """

    def __init__(
        self,
        pool: KVCacheManager,
        stores: Sequence[Store | str],
        *,
        identity: ModelIdentity,
        save: SaveMode = COMMIT,
        quotas: Mapping[Namespace, int] | None = None,
        load_seconds: float = 2.0,
        save_seconds: float | None = None,
        staging_blocks: int = 64,
        promotion_blocks: int | None = None,
        queued_blocks: int = 4096,
        prefill_tokens_per_s: float | None = None,
        failures: int = 3,
        probe_seconds: float = 5.0,
        interval_seconds: float = 0.005,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        host_blocks = _host_blocks(pool)
        identity, chosen = identity_argument(identity), open_stores(stores)
        check_identity(identity, [layout for group in pool.groups for layout in group.layouts])
        _check_secret(pool, chosen)
        mode = choice_argument("save", save, SAVES)
        limits = _quotas_argument(quotas)
        self._load_seconds = number_argument("load_seconds", load_seconds, 1e-3)
        longest = SAVE_DEADLINES * self._load_seconds if save_seconds is None else save_seconds
        longest = number_argument("save_seconds", longest, 1e-3)
        rows = integer_argument("staging_blocks", staging_blocks, 2, 1 << 20)
        most = max(1, sum(host_blocks) // 2) if promotion_blocks is None else promotion_blocks
        promotions = integer_argument("promotion_blocks", most, 1, 1 << 31)
        queued = integer_argument("queued_blocks", queued_blocks, 1, 1 << 31)
        self._interval = number_argument("interval_seconds", interval_seconds, 1e-3, 60.0)
        if prefill_tokens_per_s is not None:
            number_argument("prefill_tokens_per_s", prefill_tokens_per_s, SLOWEST)
        self._pool, self._clock = pool, clock
        stays_here(self)
        nbytes = max(group.block_bytes for group in pool.groups)

        make = partial(StoreWorker, staging=True, warns=True, clock=clock)

        def worker_of(store: Store, name: str) -> StoreWorker:
            health, padding = CircuitBreaker(failures, probe_seconds, clock=clock), row_padding_of(store)
            memory = staging_rows(rows, nbytes + padding)
            return make(store, memory, identity, name=name, health=health, row_padding=padding)

        self._orders = deque[_Order]()
        self._lock = threading.Lock()
        self._idle = Bell()
        self._turns = self._awaited = 0
        self._quiet = self._ended = self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)
        with open_workers(chosen, worker_of) as self._workers:
            blocks, kinds = pool.device_blocks + pool.host_blocks, len(cached_groups(pool))
            self._stored = StoredContent(pool, [worker.name for worker in self._workers], blocks + KNOWN_BLOCKS)
            self._adapter = PoolAdapter(pool, self._stored, limits, mode == EVICT)
            policies: list[LoadOrCompute | None] = [None] * len(self._workers)
            if prefill_tokens_per_s is not None:
                sizes = [kinds * worker.block_bytes for worker in self._workers]
                policies = [LoadOrCompute(prefill_tokens_per_s, size, pool.tokens_per_block) for size in sizes]
            self._storage = TierStorage[Content](
                self._adapter, self._workers, queued, longest, policies, promotions, UNUSED_SECONDS
            )
            self._prefetches = Prefetches(pool, self._adapter, self._storage)
            self._unsaved = Unsaved(pool, mode, rows)
            self._thread = threading.Thread(target=self._run, name="kvpool-storage", daemon=True)
            self._thread.start()

    # -- for the scheduler ---------------------------------------------------------------------------

    def prefetch(self, prompt: Prompt, timeout: float | None = None, *, spare: float = 0.0) -> Prefetch:
        """Begin to load what stores have of a prompt, after its cached prefix, to the host tier.

        Parameters
        ----------
        prompt : BlockKeys or sequence of int
            As for the pool; BlockKeys cost least.
        timeout : float, optional
            Seconds after which nothing more is loaded, ``load_seconds`` by default. The next admission uses what has
            arrived by then.
        spare : float, default 0.0
            Seconds for which the request waits for the engine in any case. A load that takes no longer loses nothing.

        Returns
        -------
        Prefetch
            The state of the loads.

        Notes
        -----
        Returns at once. Changes the pool: blocks enter its host tier.
        """
        keys = self._keys(prompt)
        seconds = self._load_seconds if timeout is None else number_argument("timeout", timeout)
        now_s = self._clock()
        handle = Prefetch(keys, now_s + seconds, now_s + number_argument("spare", spare))
        self._order(lambda: self._prefetches.begin(handle), partial(_end_failed, handle))
        return handle

    def match_prefix(self, prompt: Prompt) -> Match:
        """Return what ``KVCacheManager.match_prefix`` returns, with ``store_tokens``.

        Parameters
        ----------
        prompt : BlockKeys or sequence of int
            As for the pool.

        Returns
        -------
        Match
            ``store_tokens`` is how many more tokens could be reused with what stores are known to have. A store was
            asked at the last ``prefetch``, or has confirmed a save; it may have lost blocks since.

        Notes
        -----
        Does not change the pool.
        """
        keys = self._keys(prompt)
        match = self._pool.match_prefix(keys)
        # The last token of a prompt is never reused.
        full, last = (count // self._pool.tokens_per_block for count in (len(keys), len(keys) - 1))
        stored = self._stored.known(keys, full)
        stored[:, last:] = False
        if not keys.reuse or not stored.any():
            return match
        return match._replace(
            store_tokens=max(0, self._pool.content.missing_blocks(keys, stored).tokens - match.full_tokens)
        )

    def explain(self, prompt: Prompt) -> Explanation:
        """Return what ``CachedContent.explain`` returns, with what is known of the stores.

        Parameters
        ----------
        prompt : BlockKeys or sequence of int
            As for the pool.

        Returns
        -------
        Explanation
            For what the pool lacks, the stores that are known to have it, and the last trouble with it there: see
            ``Missed``.

        Notes
        -----
        For diagnosis, not for every request. Asks no store, and changes nothing.
        """
        keys = self._keys(prompt)
        chain, groups = split(keys.keys.tobytes(), 16), cached_groups(self._pool)

        def of_stores(place: int) -> InStores:
            blocks, stores, trouble = [Content(group, chain[place]) for group in groups], [], []
            for number, worker in enumerate(self._workers):
                if all(self._stored.has(block, number) for block in blocks):
                    stores.append(worker.name)
                said = [self._storage.trouble(number, block) for block in blocks]
                trouble += [(worker.name, what) for what in dict.fromkeys(said) if what]
            return tuple(stores), tuple(trouble)

        return self._pool.content.explain(keys).with_stores(self._pool.tokens_per_block, of_stores)

    def _keys(self, prompt: Prompt) -> BlockKeys:
        return self._pool.block_keys(prompt if isinstance(prompt, BlockKeys) else token_array("prompt", prompt))

    def events(self, *, snapshot: bool = False) -> Events:
        """Return the events of the pool, and those of the stores, whose tier is the name of the store.

        As ``KVCacheManager.events``, with numbers of its own. "stored" in a store means that it has confirmed it. A
        store may evict blocks by itself: this is noticed when they are asked for. "cleared", after ``clear`` of the
        pool, empties all tiers for a reader. In the same call, "stored" events follow for everything that stores are
        known to have. So a reader that applies all events knows what ``match_prefix`` counts, tier by tier.

        Parameters
        ----------
        snapshot : bool, default False
            Whether to begin with everything that is there.

        Returns
        -------
        Events
            The events since the last call.
        """
        return self._stored.read(bool_argument("snapshot", snapshot))

    # -- for operators -------------------------------------------------------------------------------

    def forget(self, prompt: Prompt | Keys | None = None, *, namespace: Namespace | None = None) -> Forgotten:
        """Do what ``CachedContent.forget`` does, and drop the same content from every store.

        From the moment it returns, nobody finds this content in a store and no prefetch loads it, until it was computed
        again. The stores confirm later that it is gone: see ``Forgotten``. Waits for the storage manager's thread, and
        not for a store.

        Parameters
        ----------
        prompt : BlockKeys, sequence of int, or keys, optional
            As for ``CachedContent.forget``.
        namespace : (salt, adapter_id), optional
            As for ``CachedContent.forget``, instead of ``prompt``. All stores must be able to drop it, which a
            ``MooncakeStore`` is not.

        Returns
        -------
        Forgotten
            What the pool has forgotten, and what the stores confirm.

        Raises
        ------
        TypeError, ValueError
            For a bad argument, and for a namespace that a store cannot drop.
        StoreBusy
            Where too much waits to be dropped. Nothing has changed then.

        Notes
        -----
        Changes the pool.
        """
        if (prompt is None) == (namespace is None):
            raise TypeError(f"prompt: expected exactly one of them, got {prompt!r:.80}, namespace={namespace!r:.80}")
        if namespace is not None:
            pair = namespace_argument("namespace", namespace)
            return self._ordered(lambda: self._forget_namespace(pair))
        exact_prompt: Any = in_numpy("prompt", prompt)
        alone = is_keys(exact_prompt) and not isinstance(exact_prompt, BlockKeys)
        blocks = key_rows(exact_prompt) if alone else self._pool.block_keys(exact_prompt)
        return self._ordered(lambda: self._forget_blocks(blocks))

    def clear(self, force: bool = False) -> Forgotten:
        """Do what ``KVCacheManager.clear`` does, and drop everything of this identity from every store.

        For KV of weights that were replaced: call it after the new weights are loaded, before the next request. From
        the moment it returns, nothing is found or loaded that was saved before. The stores confirm later: see
        ``Forgotten``. In a store that several processes share, it is dropped for all. A process that still has such
        content in its pool may save it again.

        Parameters
        ----------
        force : bool, default False
            As for ``KVCacheManager.clear``.

        Returns
        -------
        Forgotten
            What the stores confirm.

        Raises
        ------
        ValueError
            For a store without ``Store.clear``.
        PoolBusy, StoreBusy
            Nothing has changed then.

        Notes
        -----
        Changes the pool.
        """
        force = bool_argument("force", force)
        return self._ordered(lambda: self._forget_all(force))

    @property
    def pool(self) -> KVCacheManager:
        """The pool."""
        return self._pool

    @property
    def closed(self) -> bool:
        """Whether it was closed, or has ended because the pool was closed."""
        return self._ended or self._closing

    def drain(self, timeout: float) -> bool:
        """Wait until everything decided before this call is saved or given up, and no prefetch is in flight.

        Parameters
        ----------
        timeout : float
            Seconds to wait.

        Returns
        -------
        bool
            Whether that is so.
        """
        with self._lock:
            wanted = self._awaited = self._turns + 2
            self._quiet = False
        os.eventfd_write(self._wake, 1)

        def quiet() -> bool:
            with self._lock:
                return self._quiet and self._turns >= wanted

        self._idle.wait_for(lambda: self._ended or quiet(), timeout)
        return quiet()

    def stats(self) -> StorageManagerStats:
        """Return the figures, even if it is closed. Never waits for I/O.

        Returns
        -------
        StorageManagerStats
            Each figure is right, but they may be some microseconds apart.
        """
        tier, storage, prefetches = self._adapter, self._storage, self._prefetches
        dropped: Counter[tuple[str, str]] = Counter()
        for (name, reason), count in storage.not_saved(self._unsaved.lost).items():
            dropped[name, "queue_full" if reason in ("busy", "crowded") else reason] += count
        return StorageManagerStats(
            storage.saved_blocks,
            tier.saved_bytes,
            tier.loaded_blocks,
            tier.loaded_bytes,
            prefetches.found_blocks,
            dict(dropped),
            dict(prefetches.ended),
            self._stored.dropped + self._unsaved.missed,
            storage.waiting,
            len(self._storage.unread),
            prefetches.in_flight,
            {worker.name: worker.stats() for worker in self._workers},
            {worker.name: worker.health.stats() for worker in self._workers},
        )

    def close(self, timeout: float = 10.0) -> bool:
        """Give up what waits, and close the stores. Call ``drain`` before to have everything saved.

        Parameters
        ----------
        timeout : float, default 10.0
            Seconds to wait for calls of the stores.

        Returns
        -------
        bool
            False if a call of a store still hangs. The staging memory stays until that call returns.

        Notes
        -----
        May be called again.
        """
        end = time.monotonic() + number_argument("timeout", timeout)
        with self._lock:
            self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(max(0.0, end - time.monotonic()))
        over = not self._thread.is_alive()
        return self._storage.close(max(0.0, end - time.monotonic()), call_back=over) and over

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake, selectors.EVENT_READ)
                for worker in self._workers:
                    selector.register(worker.fileno(), selectors.EVENT_READ)
                wait = 0.0
                while not self._closing:
                    if any(key.fd == self._wake for key, _ in selector.select(wait)):
                        os.eventfd_read(self._wake)
                    wait = self._turn()
        except PoolClosed:
            pass
        except Exception:
            _log.exception("the storage manager has ended")
        finally:
            with self._lock:
                self._ended = True
                for order in self._orders:
                    order.failed(PoolClosed(_ENDED))
                self._idle.ring()
            self._prefetches.stop_all("closed")
            self._storage.give_up("cancelled")
            self._unsaved.close()

    def _turn(self) -> float:
        """One round of work. Returns how long to wait for the next."""
        orders = len(self._orders)
        for _ in range(orders):
            order = self._orders.popleft()
            try:
                order.work()
            except BaseException as error:
                order.failed(error)
            self._idle.ring()
        busy = self._storage.poll()
        self._prefetches.turn()
        unsaved, behind = self._unsaved.next(whole=self._turns < self._awaited)
        self._storage.enqueue(unsaved, self._adapter.to_save)
        more = self._storage.save(BLOCKS_PER_TURN) or behind
        if more:
            time.sleep(REST_SECONDS)
        with self._lock:
            self._turns += not behind
            waits = orders or self._orders or self._storage.waiting or self._prefetches.in_flight
            self._quiet = not (busy or more or waits or self._storage.in_flight)
            if self._quiet:
                self._idle.ring()
        if more or busy or self._turns < self._awaited:
            return 0.0
        until = self._prefetches.next_deadline()
        return self._interval if until is None else min(self._interval, max(0.0, until - self._clock()))

    def _ordered(self, work: Callable[[], T]) -> T:
        """Have the thread do this between its turns, wait for it, and raise what it raises."""
        results, errors = list[T](), list[BaseException]()
        self._order(lambda: results.append(work()), errors.append)
        self._idle.wait_for(lambda: bool(results or errors))
        if errors:
            raise errors.pop()
        return results[0]

    def _order(self, work: Callable[[], object], failed: Callable[[BaseException], object]) -> None:
        """Have the thread do this between its turns. ``failed`` gets what it raises, or PoolClosed if the thread ends
        before. Raises PoolClosed."""
        with self._lock:
            if self._ended or self._closing:
                raise PoolClosed(_ENDED)
            self._orders.append(_Order(work, failed))
            self._quiet = False
        os.eventfd_write(self._wake, 1)

    # -- what must go: between two turns, so that nothing is half imported or copied -----------------

    def _forget_blocks(self, prompt: BlockKeys | Int64s) -> Forgotten:
        """Forget the full blocks of a prompt, and its stored tail; or contents by keys of the pool, int64[n, 2]."""
        contents = self._adapter.of_keys(key_rows(prompt) if isinstance(prompt, BlockKeys) else prompt)
        for worker in self._workers:
            worker.check_forget(len(contents))
        named, names = set(contents), self._adapter.names(contents, with_contexts=False)
        count = self._pool.content.forget(prompt if isinstance(prompt, BlockKeys) else prompt.view(np.uint64))
        return self._forgotten(count, named.__contains__, lambda worker: worker.forget(names))

    def _forget_namespace(self, namespace: Namespace) -> Forgotten:
        self._check_clears(TAG_BYTES, "drop a namespace")
        count, name = self._pool.content.forget(namespace=namespace), namespace_bytes(namespace)
        return self._forgotten(
            count,
            lambda content: content.whose == namespace,
            lambda worker: worker.clear(worker.secret.tag(name)),
        )

    def _forget_all(self, force: bool) -> Forgotten:
        self._check_clears(MODEL_BYTES, "be cleared")
        self._pool.clear(force)
        self._prefetches.stop_all("cleared")
        return self._forgotten(None, lambda content: True, lambda worker: worker.clear())

    def _check_clears(self, size: int, what: str) -> None:
        """Raise unless all stores can drop blocks by so many bytes of their tags, now."""
        for worker in self._workers:
            if worker.clears_prefix < size:
                raise ValueError(
                    f"stores: expected stores that can {what}, see Store.clears_prefix, got {worker.name!r}"
                )
            worker.check_forget(1)

    def _forgotten(
        self, blocks: int | None, concerns: Callable[[Content], bool], begin: Callable[[StoreWorker], StoreRequest]
    ) -> Forgotten:
        """What is left to do when the pool has forgotten these contents."""
        self._prefetches.stop_all("forgotten", concerns)
        # From here on the workers give none of it to anybody, and save none of it.
        drops = {worker.name: begin(worker) for worker in self._workers}
        # What had ended before: it is noted now, and then taken back.
        self._storage.poll()
        self._storage.give_up("forgotten", concerns)
        known = [content for content in self._stored.all() if concerns(content)]
        for number in range(len(self._workers)):
            self._stored.note(number, known, False)
        return Forgotten(blocks, drops)


def _end_failed(handle: Prefetch, error: BaseException) -> None:
    """End a prefetch that could not begin. Others go on."""
    if isinstance(error, PoolClosed):
        handle.end("closed")
    else:
        _log.error("a prefetch has failed", exc_info=error)
        handle.end("failed")


def _host_blocks(pool: object) -> list[int]:
    """The host blocks of each group of layers. Raises for a pool that cannot have a storage manager."""
    if not isinstance(pool, KVCacheManager):
        raise TypeError(f"pool: expected a KVCacheManager, got {pool!r:.80}")
    host_blocks = [group.host_blocks for group in pool.groups]
    if not all(blocks for blocks, group in zip(host_blocks, pool.groups, strict=True) if group.kind != "cross"):
        raise ValueError(
            "pool: expected a host tier for all groups of layers, got host_blocks="
            f"{host_blocks[0] if len(host_blocks) == 1 else host_blocks}"
        )
    if not pool.core.states.groups[0, H.event_capacity]:
        raise ValueError(
            "pool: expected one that records events, with event_capacity of 1 or more, got event_capacity=0"
        )
    return host_blocks


def _check_secret(pool: KVCacheManager, stores: Sequence[Store]) -> None:
    """Raise ValueError if the keys of the pool end with it, and a store does not."""
    persistent = [store.name for store in stores if store.persistent]
    if persistent and not pool.core.config.persistent_secret:
        raise ValueError(
            f"pool: expected KVCacheManager(..., secret=store.secret), so that what the store {persistent[0]!r} keeps "
            "is found after a restart, got a random secret"
        )


def _quotas_argument(quotas: object) -> dict[Namespace, int]:
    if quotas is not None and not isinstance(quotas, Mapping):
        raise TypeError(f"quotas: expected bytes by namespace, got {quotas!r:.80}")
    limits: dict[Namespace, int] = {}
    for namespace, nbytes in (quotas or {}).items():
        key = namespace_argument("quotas", namespace)
        limits[key] = integer_argument(f"quotas[{namespace!r:.80}]", nbytes, 0, 1 << 62)
    return limits
