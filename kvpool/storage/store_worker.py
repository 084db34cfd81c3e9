"""StoreWorker: run the calls of a store on its own threads, with deadlines; verify every block that it returns; call
back when a request is done; and stop using the store for a while when it fails."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import numpy as np

from kvpool.common.arguments import number_argument
from kvpool.common.arrays import Uint8s
from kvpool.common.arrays.digest import check_library
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.process import Closing, stays_here
from kvpool.errors import PoolClosed
from kvpool.hostcache.identity import ModelIdentity, identity_argument
from kvpool.storage.calls import NO_ROWS, StoreCalls
from kvpool.storage.circuit_breaker import CircuitBreaker, TroubleLog
from kvpool.storage.mac import BlockNames, Secret
from kvpool.storage.staging_rows import memory_argument
from kvpool.storage.store import (
    CANCELLED,
    CODES,
    KEY_BYTES,
    MODEL_BYTES,
    NO_LIMIT,
    TAG_BYTES,
    Bytes,
    Rows,
    Space,
    Store,
    store_argument,
)
from kvpool.storage.store_queue import StoreCall, StoreQueue
from kvpool.storage.store_requests import (
    CLEAR,
    DROPS,
    FIND,
    FORGET,
    KINDS,
    LOAD,
    SAVE,
    Call,
    Keys,
    Lend,
    RequestKind,
    StoreRequest,
    keys_argument,
    rows_argument,
)
from kvpool.storage.store_stats import StoreStats

PATIENCE_SECONDS = 0.1
"""A request that had less time than this and is late says nothing about its store."""


class StoreWorker(Closing):
    """The requests of one store, and the threads that do them.

    Parameters
    ----------
    store : Store
        It is opened here, and closed by ``close``.
    memory : ndarray of uint8, shape (slots, block_bytes + row_padding)
        Where blocks are saved from and loaded to, C-contiguous and writable.
    identity : ModelIdentity
        Whose KV this is. It is part of every key and every MAC.
    name : str, optional
        Name in figures and logs, in the place of the store's own, where two stores have the same.
    secret : bytes, optional
        32 bytes in the place of the store's own, for those who share a store without one.
    queued_blocks : int, default 65,536
        Bound for blocks of saves that wait, for those of finds and loads, and for those that are to be dropped.
    piece_bytes : int, default 4 MiB
        A request is cut into calls of about this size, so that threads share it.
    row_padding : int, default 0
        Bytes at the end of each row of ``memory`` that are no block's: see ``Space``. No row is in two requests then.
    staging : bool, default False
        Whether the rows of ``memory`` are lent out by ``take``. A request gives them back when it has returned, and not
        before; if it was begun with ``hold``, not before ``release`` either. Half of the rows, rounded down, are kept
        for loads, so that no save keeps a load waiting for a row.
    health : CircuitBreaker, optional
        Judges the store by its requests. By default a new one on this clock.
    patience : float, default 0.1
        Seconds. A request that had less time than this and is late does not count against its store.
    warns : bool, default False
        Whether ``poll`` logs what goes wrong: one WARNING for each kind of trouble, then a count, at most once a
        minute.
    clock : callable, optional
        ``() -> float``, monotonic seconds. Deadlines are on it.

    Attributes
    ----------
    memory : ndarray of uint8, shape (slots, block_bytes)
        The blocks of the array that was given.
    secret : Secret
        Makes keys and tags.
    name : str
        Name of the store, or the one that was given.

    Raises
    ------
    TypeError, ValueError
        For a bad argument, here and in every call, and what ``Store.open`` raises.
    OSError
        From ``Store.open``.
    ImportError
        If the library for MACs is missing.

    Notes
    -----
    The calls that begin requests return at once: no I/O, no hashing. Loads go before saves. When a deadline passes, the
    request is done at once, and what it has not got is LATE, even if the store hangs.

    ``done(request)`` is called once when the request is done, and ``returned(request)`` once after that, when no call
    of the store uses its rows any more. ``poll`` makes these calls, with no lock held. If one raises, the next ``poll``
    makes the others. A worker with such callbacks is polled by one thread, which makes all of these calls.

    A signal handler that raises in a call leaves no lock held. A request that had begun is cancelled. Rows that the
    caller had taken for it may not be free again before ``close``, but nobody else gets them.

    A MAC of each block is made before it is saved, and compared after it was loaded: 128 bits of keyed BLAKE2b over
    key, length, identity, context and a keyed ``Digest`` of the bytes. A block whose MAC differs is DAMAGED, and the
    store forgets it.

    From the moment that ``forget`` or ``clear`` has returned, what is to be dropped is CANCELLED for finds, loads and
    saves, also for those that were begun before. This ends when the store has confirmed the drop. Then the request is
    OK, and no save that was begun before has left such a block in the store. Until then the drop is repeated. If the
    worker is closed first, the request is CANCELLED, and the store may have the blocks.

    The rows of a save must not change, and those of a load belong to the store, until the request is *returned*.

    Any thread may call it. Calls that begin requests raise PoolClosed and StoreBusy; the caller keeps its rows then.
    All calls raise ForkedProcess in a child of ``os.fork()``.

    Examples
    --------
    >>> import numpy as np, kvpool
    >>> from kvpool.storage import BlockNames, MemoryStore, StoreWorker, staging_rows
    >>> model = kvpool.ModelIdentity("tiny", "rev 1", "float16", "2 layers", "mine 1")
    >>> worker = StoreWorker(MemoryStore(1 << 20), staging_rows(4, 4096), model, staging=True)
    >>> rows = worker.take("save", 2)
    >>> worker.memory[rows] = 7
    >>> request = worker.save(BlockNames([b"one", b"two"]), rows, lambda request: print(request.ok, "saved"))
    >>> request.wait(60.0)
    True
    >>> worker.poll()
    2 saved
    True
    >>> worker.close()
    True
    """

    def __init__(
        self,
        store: Store,
        memory: Uint8s,
        identity: ModelIdentity,
        *,
        name: str | None = None,
        secret: bytes | None = None,
        queued_blocks: int = 65_536,
        piece_bytes: int = 4 << 20,
        row_padding: int = 0,
        staging: bool = False,
        health: CircuitBreaker | None = None,
        patience: float = PATIENCE_SECONDS,
        warns: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_library("a store", "stores")
        memory_view = memory_argument(memory)
        identity = identity_argument(identity)
        row_padding = integer_argument("row_padding", row_padding, 0, memory_view.shape[1] - 1)
        self.memory = memory_view[:, : memory_view.shape[1] - row_padding]
        self.slots, self.block_bytes = self.memory.shape
        most = integer_argument("queued_blocks", queued_blocks, 1, 1 << 31)
        size = integer_argument("piece_bytes", piece_bytes, 1, 1 << 40)
        self.piece_blocks = max(1, size // self.block_bytes)
        """The most blocks of one call."""
        # The attributes are read once: they may change later.
        self.name, threads = name or store_argument("store", store).name, store.threads
        self.savers = max(1, threads - 1)
        """How many calls of the store save at a time. Saves and drops leave one thread to all others, so that one that
        hangs keeps no load waiting."""
        self.clears_prefix = store.clears_prefix
        """By how many bytes of a tag the store can drop blocks: see ``Store.clears_prefix``."""
        self.indexed = store.indexed
        """Whether ``find_now`` may have an answer."""
        self._clock = clock
        stays_here(self)
        self.health = health or CircuitBreaker(clock=clock)
        """Judges the store."""
        self._patience = patience
        store_secret = store.open(Space(bytes.fromhex(identity.fingerprint), memory_view, row_padding))
        try:
            self.secret = Secret(store_secret if secret is None else secret, identity)
        except BaseException:
            store.close()
            raise
        self._own_tag = self.secret.tag(b"")
        self._calls, self._close_store = StoreCalls(store, self.secret, self.memory, self.forget), store.close
        self._queue = StoreQueue(
            self.name, self.savers, self.piece_blocks, most, self.slots if staging else 0, self.health, clock
        )
        self._troubles = TroubleLog(self.name, clock) if warns else None
        self._seconds = dict.fromkeys(KINDS, 0.0)
        # The threads that wait for a call to make, and the one that waits for a deadline, are woken apart.
        self._work_comes = threading.Condition(self._queue.lock)
        self._alarm, self._wakes_at = threading.Condition(self._queue.lock), -math.inf
        # A store is not closed while somebody has this.
        self._in_use = threading.RLock()
        self._threads, self._closing, self._closed = threads, False, False
        # None of the threads runs a signal handler.
        for suffix, work in [*((str(i), self._work) for i in range(threads)), ("deadlines", self._watch)]:
            threading.Thread(target=work, name=f"kvpool-{self.name}-{suffix}", daemon=True).start()

    # -- requests ----------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time on the worker's clock.

        Returns
        -------
        float
            Seconds.
        """
        return self._clock()

    def usable(self, kind: RequestKind) -> bool:
        """Return whether a request of this kind may be begun now.

        While the store is suspended, this is true once after each wait, for a request that probes it. A drop is no
        probe. See ``CircuitBreaker``.

        Parameters
        ----------
        kind : {"find", "load", "save", "forget", "clear"}
            Of the request.

        Returns
        -------
        bool
            Whether it may.
        """
        if kind in DROPS:
            return not self.health.suspended(writes=True)
        return self.health.usable(writes=kind == SAVE, found=kind == LOAD)

    @property
    def suspended(self) -> bool:
        """Whether the circuit breaker suspends the store, for reads or for writes."""
        return self.health.is_suspended

    def find(
        self, keys: Keys, done: Call | None = None, *, tag: bytes | None = None, deadline: float = math.inf
    ) -> StoreRequest:
        """Begin to look up blocks in the store.

        Parameters
        ----------
        keys : BlockNames or ndarray of uint8, shape (n, 32)
            The blocks; keys are made by ``secret``.
        done : callable, optional
            ``done(request)`` is called by ``poll`` when the request is done.
        tag : bytes, optional
            The tag under which they were saved. By default that of no namespace.
        deadline : float, default inf
            Seconds on the worker's clock, after which a block without a result is LATE.

        Returns
        -------
        StoreRequest
            The request.
        """
        return self._begin(FIND, keys, None, done, None, deadline, tag)

    def find_now(self, keys: Keys) -> Bytes | None:
        """Look up blocks on this thread, in a store that is ``indexed``. Hashes names.

        Parameters
        ----------
        keys : BlockNames or ndarray of uint8, shape (n, 32)
            The blocks.

        Returns
        -------
        ndarray of uint8, shape (n,), or None
            The codes. None where only a request can tell: for another store, and for one that has failed, is suspended,
            or is to drop something.
        """
        checked_keys, queue = keys_argument(keys), self._queue
        if not self.indexed:
            return None
        with self._in_use:
            with queue.lock:
                if self._closing or len(queue.drops) or self.health.suspended():
                    return None
            began = time.perf_counter()
            try:
                codes = self._calls.find(checked_keys)
            except Exception:
                return None
        counts = np.bincount(codes, minlength=len(CODES)).tolist()
        if sum(counts[:2]) != len(checked_keys):
            return None
        with queue.lock:
            self._seconds[FIND] += time.perf_counter() - began
            for code, count in zip(CODES, counts, strict=True):
                queue.blocks[FIND, code] += count
        return codes

    def load(
        self,
        keys: Keys,
        rows: Rows,
        done: Call | None = None,
        returned: Call | None = None,
        *,
        tag: bytes | None = None,
        deadline: float = math.inf,
        hold: bool = False,
        owner: Hashable = None,
    ) -> StoreRequest:
        """Begin to load blocks into rows of the memory.

        Parameters
        ----------
        keys : BlockNames or ndarray of uint8, shape (n, 32)
            The blocks.
        rows : ndarray of int64, shape (n,)
            Their rows, which belong to the store until the request is returned. All differ.
        done, returned : callable, optional
            ``done(request)`` and ``returned(request)`` are called by ``poll`` when the request is done and returned.
        tag : bytes, optional
            The tag under which they were saved. By default that of no namespace.
        deadline : float, default inf
            Seconds on the worker's clock, after which a block without a result is LATE.
        hold : bool, default False
            Whether rows of ``take`` are read until ``release``.
        owner : hashable, optional
            What the caller identifies the request by: see ``requests``.

        Returns
        -------
        StoreRequest
            The request.
        """
        return self._begin(LOAD, keys, rows, done, returned, deadline, tag, held=hold, owner=owner)

    def save(
        self,
        keys: Keys,
        rows: Rows | Lend,
        done: Call | None = None,
        returned: Call | None = None,
        *,
        tag: bytes | None = None,
        limit: int = NO_LIMIT,
        deadline: float = math.inf,
    ) -> StoreRequest:
        """Begin to save rows of the memory, which nobody may change until the request is returned.

        Parameters
        ----------
        keys : BlockNames or ndarray of uint8, shape (n, 32)
            The blocks.
        rows : ndarray of int64, shape (n,), or callable
            Their rows. A callable lends them while a call of the store reads them: it is called on the worker's threads
            with the ``BlockNames`` of the call, and returns a context manager that gives int64[n], -1 for a block that
            is no longer there, which is ABSENT. If others took the rows back before the call had returned, the context
            raises BlockNotFound at its end; then the store drops what it has saved.
        done, returned : callable, optional
            ``done(request)`` and ``returned(request)`` are called by ``poll`` when the request is done and returned.
        tag : bytes, optional
            The tag of a namespace, made by ``secret``. By default ``secret.tag(b"")``.
        limit : int, optional
            The most blocks with this tag that the store may have: see ``Store.save``. By default there is no limit.
        deadline : float, default inf
            Seconds on the worker's clock, after which a block without a result is LATE.

        Returns
        -------
        StoreRequest
            The request.

        Raises
        ------
        TypeError
            For keys in the place of names where rows are lent.
        """
        limit, lend = integer_argument("limit", limit, 0, NO_LIMIT), rows if callable(rows) else None
        if lend is not None and not isinstance(keys, BlockNames):
            raise TypeError(f"keys: expected BlockNames where rows are lent, got {type(keys).__name__}")
        places = None if lend else rows
        return self._begin(SAVE, keys, places, done, returned, deadline, tag, limit=limit, lend=lend)

    def forget(self, keys: Keys, done: Call | None = None) -> StoreRequest:
        """Begin to drop blocks.

        Parameters
        ----------
        keys : BlockNames or ndarray of uint8, shape (n, 32)
            The blocks.
        done : callable, optional
            ``done(request)`` is called by ``poll`` when the store has confirmed it.

        Returns
        -------
        StoreRequest
            The request.
        """
        return self._begin(FORGET, keys, None, done)

    def clear(self, tag: bytes | None = None, done: Call | None = None) -> StoreRequest:
        """Begin to drop all blocks of the model, or all that were saved with one tag.

        Parameters
        ----------
        tag : bytes, optional
            The tag. By default all blocks of the model are dropped.
        done : callable, optional
            ``done(request)`` is called by ``poll`` when the store has confirmed it.

        Returns
        -------
        StoreRequest
            The request, which may be one that was begun before. Then its ``done`` is called too.

        Raises
        ------
        ValueError
            For a store that cannot drop blocks by their tag: see ``Store.clears_prefix``.
        """
        size = MODEL_BYTES if tag is None else TAG_BYTES
        if self.clears_prefix < size:
            what = "all blocks of a model" if tag is None else "the blocks of a namespace"
            raise ValueError(
                f"store: expected one that can drop {what}, whose clears_prefix is {size}, got {self.name!r}"
            )
        return self._clear(self.secret.model if tag is None else self._tag(tag), done)

    def reset(self, done: Call | None = None) -> StoreRequest:
        """Begin an epoch of the model: nothing that was saved before is found any more.

        For weights that were replaced. The store drops the blocks as for ``clear``, if it can. When the request is OK,
        a store with ``Store.epoch`` remembers the epoch. Workers that open it later find what is saved from then on.
        Others that have it open stay in their epoch until they are reset too: they find nothing of this one, and
        nothing that they save is found here. In a store without epochs, workers that open it later are in the first
        epoch, as far as its blocks were not dropped.

        Parameters
        ----------
        done : callable, optional
            ``done(request)`` is called by ``poll`` when the store has confirmed it.

        Returns
        -------
        StoreRequest
            The request.
        """
        return self._clear(self.secret.model, done, renews=True)

    def _clear(self, prefix: bytes, done: Call | None, renews: bool = False) -> StoreRequest:
        keys = np.empty((0, KEY_BYTES), np.uint8)
        return self._begin(CLEAR, keys, None, done, tag=prefix, renews=renews)

    @property
    def is_backlogged(self) -> bool:
        """Whether a save that begins now waits for others."""
        with self._queue.lock:
            return self._queue.is_backlogged

    def check_forget(self, blocks: int) -> None:
        """Raise StoreBusy if these blocks cannot be queued to be dropped now.

        Parameters
        ----------
        blocks : int
            Number of blocks.
        """
        with self._queue.lock:
            self._queue.check_room(FORGET, blocks)

    @property
    def has_results(self) -> bool:
        """Whether ``poll`` has a call to make."""
        return bool(self._queue.callbacks)

    def poll(self) -> bool:
        """Make the calls of requests that are done or returned. Never waits.

        Returns
        -------
        bool
            Whether there were such requests.

        Notes
        -----
        Clears ``fileno``.
        """
        return self._queue.callbacks.make(self._let_go)

    @property
    def requests(self) -> list[StoreRequest]:
        """Requests that are not over, with drops that are not confirmed.

        A request is over when it has returned, its rows are not held, and its callbacks were called.
        """
        with self._queue.lock:
            return list(self._queue.requests)

    @property
    def in_flight(self) -> int:
        """Number of finds, loads and saves that are not over: see ``requests``."""
        return sum(request.kind not in DROPS for request in self.requests)

    def fileno(self) -> int:
        """Return a file descriptor that can be read when ``poll`` has a call to make.

        Returns
        -------
        int
            The descriptor, for ``select`` and asyncio.
        """
        return self._queue.callbacks.fileno

    def wait(self, timeout: float) -> bool:
        """Wait until ``poll`` has a call to make.

        Parameters
        ----------
        timeout : float
            Seconds to wait.

        Returns
        -------
        bool
            Whether it has.

        Raises
        ------
        TypeError, ValueError
            If ``timeout`` is not a finite number of 0 or more.
        """
        return self._queue.callbacks.wait(number_argument("timeout", timeout))

    def drain(self, timeout: float) -> bool:
        """Wait until no find, load or save is queued or in flight.

        Parameters
        ----------
        timeout : float
            Seconds to wait.

        Returns
        -------
        bool
            Whether that is so.

        Notes
        -----
        Drops that the store does not confirm are not waited for: wait for their requests.
        """
        return self._queue.wait_until(
            lambda: all(request.returned or request.kind in DROPS for request in self._queue.requests), timeout
        )

    def stats(self) -> StoreStats:
        """Return the figures. Never waits for the store's I/O.

        Returns
        -------
        StoreStats
            Totals, and the state now.
        """
        figures, queue = self._calls.figures(), self._queue
        with queue.lock:
            blocks = dict(queue.blocks)
            return StoreStats(
                self.name,
                blocks,
                {kind: blocks[kind, "ok"] * self.block_bytes if kind in (LOAD, SAVE) else 0 for kind in KINDS},
                dict(self._seconds),
                queue.refused,
                queue.queued(*KINDS),
                len(queue.running),
                len(queue.drops),
                figures,
            )

    # -- rows ----------------------------------------------------------------------------------------

    def free(self, kind: RequestKind) -> int:
        """Return how many rows a request of this kind can take now.

        Parameters
        ----------
        kind : {"find", "load", "save", "forget", "clear"}
            Of the request.

        Returns
        -------
        int
            Number of rows.
        """
        return self._queue.free(kind)

    def take(self, kind: RequestKind, most: int, timeout: float = 0.0) -> Rows:
        """Take free rows for a request. They are the caller's until a request has them, or ``give_back``.

        Parameters
        ----------
        kind : {"find", "load", "save", "forget", "clear"}
            Of the request.
        most : int
            The most rows.
        timeout : float, default 0.0
            Seconds to wait for one, as long as others than calls that hang have some.

        Returns
        -------
        ndarray of int64, shape (n,)
            The rows. There may be none.
        """
        taken: list[int] = []

        def took() -> bool:
            taken.extend(() if taken else self._queue.take(kind, most))
            return bool(taken) or self._queue.all_hang

        self._queue.wait_until(took, timeout)
        return np.array(taken, np.int64)

    def give_back(self, rows: Rows) -> None:
        """Give back rows of ``take`` that no request has got.

        Parameters
        ----------
        rows : ndarray of int64
            The rows.
        """
        with self._queue.lock:
            self._queue.give_back(rows.tolist())

    def release(self, request: StoreRequest) -> None:
        """Release the rows of a request that was begun with ``hold``: nobody reads them any more.

        Parameters
        ----------
        request : StoreRequest
            The request.
        """
        request.held = False
        self._let_go(request)

    # -- the end -------------------------------------------------------------------------------------

    def close(self, timeout: float = 10.0, *, call_back: bool = True) -> bool:
        """Give up what is queued, ask calls in flight to stop, wait for them, and close the store.

        Parameters
        ----------
        timeout : float, default 10.0
            Seconds to wait.
        call_back : bool, default True
            Whether to ``poll``, so that callbacks learn that their request was cancelled.

        Returns
        -------
        bool
            False if a call still hangs. Its rows may still be written, so that their memory must not be used again; the
            store is closed when that call returns.

        Notes
        -----
        May be called again.
        """
        queue = self._queue
        with queue.lock:
            self._closing = True
            queue.give_up(list(queue.requests))
            self._work_comes.notify_all()
            self._alarm.notify_all()
        over = queue.wait_until(lambda: self._closed, timeout)
        if call_back:
            self.poll()
        return over

    # -- inside --------------------------------------------------------------------------------------

    def _begin(
        self,
        kind: RequestKind,
        keys: object,
        rows: object = None,
        done: Call | None = None,
        returned: Call | None = None,
        deadline: float = math.inf,
        tag: bytes | None = None,
        **fields: Any,
    ) -> StoreRequest:
        """Begin a request. ``fields``: others of it."""
        checked_keys = keys_argument(keys)
        if kind != CLEAR:
            tag = self._own_tag if tag is None else self._tag(tag)
        places = NO_ROWS if rows is None else rows_argument(rows, len(checked_keys), self.slots, kind == LOAD)
        end = _deadline_argument(deadline)
        request = StoreRequest(self._queue, self.secret, kind, checked_keys, places, end, tag or b"", **fields)
        request.hurried = end - self._clock() < self._patience
        request.on_done = [] if done is None else [done]
        request.on_returned = [] if returned is None else [returned]
        if self._troubles is not None and kind not in DROPS:
            request.on_done.insert(0, self._log)
        return self._join(request)

    def _join(self, request: StoreRequest) -> StoreRequest:
        """Queue a request, or return the one that does for it."""
        queue = self._queue
        self._hash(request)
        with queue.lock:
            if self._closing:
                raise PoolClosed(f"the worker of the store {self.name!r} is closed")
            same = queue.drops.clearing(request) if request.kind == CLEAR else None
            if same is not None:
                same.on_done += request.on_done
                return same
            queue.check_room(request.kind, request.queued)
            try:
                queue.add(request)
                if request.deadline < self._wakes_at or request.deadline <= self._clock():
                    self._alarm.notify()
                self._wake_one()
            except BaseException:
                # Of a signal handler: the caller does not get the request, but its callbacks do.
                request.held = False
                queue.settle(request, CANCELLED)
                queue.repair()
                # ``notify`` may have woken a thread that it still lists, and would then wake it in another's place.
                self._work_comes.notify_all()
                self._alarm.notify_all()
                raise
        return request

    def _hash(self, request: StoreRequest) -> None:
        """Hash the keys that are compared below, before the lock is taken for that."""
        if request.kind == FORGET:
            with self._queue.lock:
                others = self._queue.kept_from_drops()
            for other in (request, *others):
                _ = other.key_set
        elif request.kind != CLEAR and len(self._queue.drops):
            _ = request.key_bytes

    def _let_go(self, request: StoreRequest) -> None:
        with self._queue.lock:
            self._queue.let_go(request)

    def _log(self, request: StoreRequest) -> None:
        """Log what went wrong with a request that is done."""
        assert self._troubles is not None
        for code in () if request.hurried else request.counts.keys() - {"ok", "absent", "cancelled"}:
            self._troubles.note(request.kind, code, request.counts[code], request.error)
        if request.suspends:
            self._troubles.note(request.kind, "suspended", len(request.codes))

    def _tag(self, tag: object) -> bytes:
        if not isinstance(tag, bytes) or len(tag) != TAG_BYTES or not tag.startswith(self.secret.model):
            raise ValueError(f"tag: expected {TAG_BYTES} bytes that the worker's secret has made, got {tag!r:.80}")
        return tag

    # -- the threads ---------------------------------------------------------------------------------

    def _work(self) -> None:
        """One of the threads that call the store."""
        thread, queue = threading.get_ident(), self._queue
        while (call := self._next(thread)) is not None:
            began = time.perf_counter()
            codes, error = self._calls.do(*call)
            with queue.lock:
                self._seconds[call[0].kind] += time.perf_counter() - began
                queue.returned(thread, codes, error)
        self._end()

    def _next(self, thread: int) -> StoreCall | None:
        """Wait for a call to make: a request, and the places of its blocks. Returns None when there will be none."""
        queue = self._queue
        with queue.lock:
            while True:
                call = queue.next(thread)
                if call is not None:
                    self._wake_one()
                    return call
                if self._closing and queue.is_empty:
                    return None
                self._work_comes.wait(queue.drops.left(self._clock()))

    def _wake_one(self) -> None:
        """Wake one thread if there may be a call to make, or a drop to wait for. It wakes the next one in turn. The
        lock is held."""
        if self._queue.has_work:
            self._work_comes.notify()

    def _watch(self) -> None:
        """The thread that ends requests at their deadlines."""
        with self._queue.lock:
            while not self._closing:
                left = min(3600.0, max(0.0, self._queue.expire() - self._clock()))
                self._wakes_at = self._clock() + left
                self._alarm.wait(left)

    def _end(self) -> None:
        """A thread ends. The last one closes the store."""
        with self._queue.lock:
            self._threads -= 1
            if self._threads:
                return
        try:
            with self._in_use:
                self._close_store()
        finally:
            with self._queue.lock:
                self._closed = True
                self._queue.bell.ring()


def _deadline_argument(deadline: Any) -> float:
    with suppress(OverflowError):
        if isinstance(deadline, (int, float, np.number)) and deadline == deadline:
            return float(deadline)
    raise ValueError(f"deadline: expected seconds on the worker's clock, got {deadline!r:.80}")
