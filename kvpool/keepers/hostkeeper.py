"""HostKeeper: brings blocks from stores into a HostCache, and saves its blocks to them."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.arguments import list_argument
from kvpool.errors import BlockNotFound, OutOfBlocks, PoolClosed, StoreBusy
from kvpool.hostcache.identity import ModelIdentity
from kvpool.hostcache.index import HostCache
from kvpool.hostcache.leases import HostLease
from kvpool.hostcache.tier import HostTier
from kvpool.interrupt import DeferSignals
from kvpool.keepers.health import StoreHealth, seconds_argument
from kvpool.keepers.lanes import PATIENCE_SECONDS
from kvpool.process import Process
from kvpool.stores.base import LATE, OK, Store
from kvpool.stores.jobs import Job
from kvpool.stores.queue import CODES, StoreQueue, StoreStats

if TYPE_CHECKING:
    from typing_extensions import Self

Keys = Iterable[bytes]

ASKED_MAX = 65_536
"""Keys that are asked for at once, and keys that are remembered as absent."""
AT_ONCE = 64
"""Blocks of one save. They stay pinned until the last of them is saved."""
UNREAD_SECONDS = 10.0
"""For so long a block that has come, and that nobody reads, counts for ``load_share``."""
PUBLISH, REUSE = "publish", "reuse"


@dataclass(frozen=True)
class HostKeeperStats:
    """Totals in blocks since a keeper was made, and its state now."""

    asked: int
    """keys that were not in the cache, and for which the stores were asked"""
    loaded: int
    """blocks that came from a store, and could be found in the cache then"""
    missed: dict[str, int]
    """keys that did not come, by reason: "absent", "failed", "damaged", "late" (what the stores said), "cancelled"
    (``clear`` or ``close``), "crowded" (no room in the cache), "busy" (a full queue), "suspended" (no store is usable),
    "taken" (the engine has written the block itself meanwhile)"""
    saved: int
    """blocks that a store has kept. A block that two stores keep counts twice."""
    unsaved: dict[str, int]
    """blocks that a store has not kept, by reason: what the store said, "evicted" (they had left the cache), "busy",
    "suspended", "crowded" (too many waited), or "cancelled" (``clear`` or ``close``). A block that two stores have not
    kept counts twice."""
    searching: int
    """keys whose answer is not known yet"""
    loading: int
    """blocks that are reserved for loads"""
    hung: int
    """blocks of these that were given up, and that a call of a store may still write"""
    saving: int
    """blocks that are pinned for saves"""
    waiting: int
    """blocks whose save has not begun"""
    suspended: tuple[str, ...]
    """stores that have failed, and are not asked for a while"""
    stores: tuple[StoreStats, ...]


class _Line(NamedTuple):
    """A store, and what is known of it."""

    queue: StoreQueue
    health: StoreHealth


class _Search(NamedTuple):
    """Keys that a store is asked for."""

    began: float
    store: int
    keys: list[bytes]


class _Load(NamedTuple):
    """Keys whose blocks a store writes. ``left``: those that are still reserved."""

    began: float
    store: int
    keys: list[bytes]
    left: set[bytes]


class _Save(NamedTuple):
    """A lease whose blocks are saved. ``stores``: those that still read them."""

    began: float
    lease: HostLease
    stores: set[int]


class HostKeeper:
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
        "publish": every published block is saved. "reuse": a block is saved when it is pinned for a reader.
    load_share, save_share
        How much of the cache blocks may take that have come and wait for their reader, and those that are being saved.
    load_seconds, save_seconds
        Time for a key from the first ``find`` until it is HERE, and for a block from ``publish`` until it is saved.
        What takes longer is given up.
    retry_seconds
        For so long a key that did not come is not asked for again.
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
    Use ``find``, ``lookup``, ``pin``, ``publish``, ``forget`` and ``clear`` of the keeper in the place of the cache's.
    ``reserve``, ``abort`` and ``touch`` are the cache's own. Not thread-safe: the thread of the scheduler calls it.
    Calls never wait for a store, except ``drain`` and ``close``. In a child of ``os.fork()`` they raise ForkedProcess;
    ``find`` and ``lookup`` only for a key that is not HERE.

    Call ``poll`` in each step of the scheduler. It begins jobs and notes what has become of others: a store's I/O, its
    checks and its deadlines are on threads of the store's ``StoreQueue``. A key is PENDING only for as long as
    ``load_seconds`` says, if ``poll`` is called.

    A block is found only after its seal was checked. A load that was given up while its call hangs keeps its blocks
    until the call returns, so that it cannot write into blocks of others.
    """

    def __init__(
        self, cache: HostCache, tier: HostTier, stores: Sequence[Store], *, identity: ModelIdentity | None = None,
        save: str = PUBLISH, load_share: float = 0.5, save_share: float = 0.25, load_seconds: float = 2.0,
        save_seconds: float = 60.0, retry_seconds: float = 1.0, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        if not isinstance(cache, HostCache) or not isinstance(tier, HostTier):
            raise TypeError(f"cache={cache!r:.80}, tier={tier!r:.80}: accepted are a HostCache and its HostTier")
        if tier.fingerprint != cache.fingerprint:
            raise ValueError("tier: accepted is the memory of this cache, of the same model and sizes")
        if save not in (PUBLISH, REUSE):
            raise ValueError(f"save={save!r:.80}: accepted are {PUBLISH!r} and {REUSE!r}")
        self._cache, self._tier, self._clock, self._on_publish = cache, tier, clock, save == PUBLISH
        self._process = Process()
        self._load_max = _share("load_share", load_share, cache.host_blocks)
        self._save_max = _share("save_share", save_share, cache.host_blocks)
        self._load_seconds = seconds_argument("load_seconds", load_seconds)
        self._save_seconds = seconds_argument("save_seconds", save_seconds)
        self._retry_seconds = seconds_argument("retry_seconds", retry_seconds)
        # Keys that are looked for, with their deadlines; those of them that no store was asked for yet.
        self._asked: dict[bytes, float] = {}
        self._new: list[bytes] = []
        # Keys that did not come, and when they may be asked for again.
        self._absent: dict[bytes, float] = {}
        # Keys that have come and had no reader yet, and for how long they count as such.
        self._unread: dict[bytes, float] = {}
        # Blocks reserved for loads, and those of them that were given up.
        self._loading, self._hung = 0, set[bytes]()
        # Published blocks whose save has not begun, with its deadline; and for "reuse", those that nobody read yet.
        self._waiting: dict[bytes, float] = {}
        self._unused: dict[bytes, None] = {}
        self._saving = 0
        self._jobs: dict[Job, _Search | _Load | _Save] = {}
        # Jobs that are done, and whose call hangs.
        self._done: set[Job] = set()
        self._prefix = b""
        self._asked_count = self._loaded = self._saved = 0
        self._missed: Counter[str] = Counter()
        self._unsaved: Counter[str] = Counter()
        self._closed = False
        self._lines = self._open(list_argument("stores", stores), cache.identity if identity is None else identity)
        # A job that had less time than this and is late says nothing about its store. Half of the least time of a find.
        least = min(self._load_seconds / 2 ** len(self._lines), self._save_seconds / 2)
        self._patience = min(PATIENCE_SECONDS, least)

    def _open(self, stores: list[Store], identity: ModelIdentity) -> list[_Line]:
        """Open the stores: all, or none."""
        if not stores:
            raise ValueError("stores=[]: accepted are one or more")
        lines: list[_Line] = []
        try:
            for store in stores:
                queue = StoreQueue(store, self._tier.blocks, identity, clock=self._clock)
                lines.append(_Line(queue, StoreHealth(clock=self._clock)))
        except BaseException:
            for line in lines:
                line.queue.close()
            raise
        return lines

    # -- what the scheduler calls --------------------------------------------------------------------

    def find(self, key: bytes) -> int:
        """ABSENT, HERE or PENDING, as ``HostCache.find`` says it. A key that is not in the cache is asked for in the
        stores, and is PENDING meanwhile. Raises TypeError, ValueError, PoolClosed."""
        cache = self._cache
        found = cache.find(key)
        if found == cache.HERE:
            return found
        self._process.check(self)
        if found == cache.PENDING:
            return cache.ABSENT if key in self._hung else found
        if key in self._asked:
            return cache.PENDING
        return cache.PENDING if self._ask(bytes(key)) else cache.ABSENT

    def lookup(self, keys: Keys) -> npt.NDArray[np.uint8]:
        """``find`` for each key: uint8[n]."""
        own = tuple(keys)
        answers = self._cache.lookup(own)
        for place in np.flatnonzero(answers != self._cache.HERE).tolist():
            answers[place] = self.find(own[place])
        return answers

    def pin(self, keys: Keys, *, owner: str = "") -> HostLease:
        """What ``HostCache.pin`` does. With ``save="reuse"``, the blocks are saved now."""
        self._process.check(self)
        signals = DeferSignals()
        try:
            with signals:
                lease = self._cache.pin(keys, owner=owner)
                signals.undo = lease.close
                for key in lease.keys:
                    self._unread.pop(key, None)
                if self._unused:
                    self._save_later([key for key in lease.keys if key in self._unused])
                return lease
        except BaseException:
            signals.take_back()
            raise

    def publish(self, keys: Keys) -> int:
        """What ``HostCache.publish`` does. With ``save="publish"``, the blocks are saved after it."""
        self._process.check(self)
        own = tuple(keys)
        with DeferSignals():
            count = self._cache.publish(own)
            for key in own:
                self._absent.pop(key, None)
            if self._on_publish:
                self._save_later(own)
            else:
                self._unused.update(dict.fromkeys(own))
                _bound(self._unused, self._cache.host_blocks)
        return count

    def forget(self, keys: Keys) -> int:
        """What ``HostCache.forget`` does. The stores keep the blocks, but are not asked for them for a while."""
        self._process.check(self)
        own = tuple(keys)
        count = self._cache.forget(own)
        until = self._clock() + self._retry_seconds
        with DeferSignals():
            for key in own:
                self._absent.pop(key, None)
                self._absent[key] = until
            _bound(self._absent, ASKED_MAX)
        return count

    def poll(self) -> None:
        """Note what the stores have done, and begin what was asked for. Call it in each step. Raises PoolClosed."""
        self._process.check(self)
        if self._closed:
            raise PoolClosed("the keeper is closed")
        with DeferSignals():
            for number, line in enumerate(self._lines):
                for job in line.queue.finished():
                    self._ended(number, job)
            if self._new:
                new, self._new = self._new, []
                self._search([key for key in new if key in self._asked], 0)
            if self._waiting:
                self._begin_saves()

    @property
    def pending(self) -> bool:
        """Whether ``poll`` has something to begin, or somebody waits for a key."""
        return bool(self._asked or self._waiting)

    @property
    def totals(self) -> tuple[int, int, int, int]:
        """Blocks that were loaded, missed, saved and not saved, since the keeper was made. Fast."""
        return self._loaded, sum(self._missed.values()), self._saved, sum(self._unsaved.values())

    def clear(self) -> None:
        """Drop all keys of the cache, and find nothing any more that was saved before, such as the KV of weights that
        were replaced. What is saved from now on is found by this keeper only, and until its next ``clear``."""
        self._process.check(self)
        with DeferSignals():
            self._cancel()
            for keys in (self._absent, self._unread, self._unused):
                keys.clear()
            self._prefix = os.urandom(16)
            self._cache.clear(force=True)

    def stats(self) -> HostKeeperStats:
        """A snapshot. Not for every step."""
        self._process.check(self)
        return HostKeeperStats(
            self._asked_count, self._loaded, dict(self._missed), self._saved, dict(self._unsaved), len(self._asked),
            self._loading, len(self._hung), self._saving, len(self._waiting),
            tuple(line.queue.name for line in self._lines if _is_suspended(line.health)),
            tuple(line.queue.stats() for line in self._lines),
        )  # fmt: skip

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is under way or waits, at most ``timeout`` seconds. Returns whether that is so."""
        end = self._clock() + seconds_argument("timeout", timeout)
        self.poll()
        while (self._jobs or self.pending) and (left := end - self._clock()) > 0:
            self._lines[0].queue.wait(min(left, 0.01))
            self.poll()
        return not (self._jobs or self.pending)

    def close(self, timeout: float = 10.0) -> bool:
        """Give up what is under way, and close the stores. May be called again.

        Returns False if a call of a store still hangs after ``timeout`` seconds. It may still write into the tier, so
        that memory of the caller's must not be used again. Blocks of such a load stay reserved. Close the cache after
        the keeper.
        """
        self._process.check(self)
        over = True
        with DeferSignals():
            self._closed = True
            self._cancel()
        for number, line in enumerate(self._lines):
            over = line.queue.close(timeout) and over
            if not self._cache.closed:
                with DeferSignals():
                    for job in line.queue.finished():
                        self._ended(number, job)
        return over

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cancel(self) -> None:
        """Give up the keys that are looked for, and the saves that have not begun."""
        if self._asked:
            self._missed["cancelled"] += len(self._asked)
        self._not_saved("cancelled", len(self._waiting))
        self._asked.clear()
        self._new.clear()
        self._waiting.clear()

    # -- keys that are looked for --------------------------------------------------------------------

    def _ask(self, key: bytes) -> bool:
        """Ask the stores for a key in the next ``poll``. Returns False if it did not come a moment ago, or if too many
        are asked for."""
        now = self._clock()
        if self._absent and self._absent.get(key, -math.inf) > now:
            return False
        if self._closed or len(self._asked) >= ASKED_MAX:
            self._missed["busy"] += 1
            return False
        self._asked[key] = now + self._load_seconds
        self._new.append(key)
        self._asked_count += 1
        return True

    def _search(self, keys: list[bytes], first: int) -> None:
        """Ask the stores from this one on."""
        reason = "suspended"
        for number in range(first, len(self._lines)):
            line, now = self._lines[number], self._clock()
            if keys and line.health.usable():
                last, end = number + 1 == len(self._lines), self._deadline(keys)
                # One store that hangs leaves time for those behind it.
                deadline = end if last else now + (end - now) / 2
                try:
                    job = line.queue.find(self._opaque(line, keys), deadline=deadline)
                except StoreBusy:
                    reason = "busy"
                    continue
                self._jobs[job] = _Search(now, number, keys)
                return
        self._miss(keys, reason if not first else "absent")

    def _searched(self, search: _Search, job: Job) -> None:
        """A store has said which keys it has."""
        # A key that is not asked for any more was dropped by ``clear``.
        wanted = [key in self._asked for key in search.keys]
        found = (job.codes == OK).tolist()
        there = [key for key, want, ok in zip(search.keys, wanted, found, strict=True) if want and ok]
        others = [key for key, want, ok in zip(search.keys, wanted, found, strict=True) if want and not ok]
        if others and search.store + 1 < len(self._lines):
            self._search(others, search.store + 1)
        else:
            self._miss_by_code(search.keys, job)
        if there:
            self._load(search.store, there)

    def _miss(self, keys: Iterable[bytes], reason: str) -> None:
        """These keys do not come."""
        until = self._clock() + self._retry_seconds
        for key in keys:
            if self._asked.pop(key, None) is not None:
                self._missed[reason] += 1
                self._absent.pop(key, None)
                self._absent[key] = until
        _bound(self._absent, ASKED_MAX)

    def _miss_by_code(self, keys: list[bytes], job: Job) -> None:
        for code in np.unique(job.codes).tolist():
            if code != OK:
                self._miss(compress(keys, (job.codes == code).tolist()), CODES[code])

    # -- blocks that come ----------------------------------------------------------------------------

    def _load(self, store: int, keys: list[bytes]) -> None:
        """Reserve blocks for keys that a store has, and load them. What has no room is missed."""
        taken, line = self._reserve(keys), self._lines[store]
        loaded = set(taken.keys) if taken is not None else set()
        for key in keys:
            if key not in loaded:
                there = self._cache.find(key) != self._cache.ABSENT
                if there:
                    self._asked.pop(key, None)
                    self._missed["taken"] += 1
                else:
                    self._miss([key], "crowded")
        if taken is None or not loaded:
            return
        own, now = list(taken.keys), self._clock()
        try:
            job = line.queue.load(self._opaque(line, own), taken.blocks, deadline=self._deadline(own))
        except StoreBusy:
            self._cache.abort(own)
            self._miss(own, "busy")
            return
        self._jobs[job] = _Load(now, store, own, loaded)
        self._loading += len(own)

    def _reserve(self, keys: list[bytes]) -> Any:
        """Blocks for as many of the first keys as have room. Others may need the last of them: no more than half of
        what is free is taken."""
        now = self._clock()
        while self._unread and next(iter(self._unread.values())) <= now:
            del self._unread[next(iter(self._unread))]
        room = keys[: max(0, self._load_max - len(self._unread) - self._loading)]
        while room:
            try:
                return self._cache.reserve(room)
            except OutOfBlocks as full:
                room = room[: full.free // 2]
        return None

    def _came(self, load: _Load, job: Job) -> None:
        """A load is done. What has come can be found. The rest is given back once no call can write to it."""
        ok = (job.codes == OK).tolist()
        here = [key for key in compress(load.keys, ok) if key in load.left]
        if here:
            self._cache.publish(here)
            until = self._clock() + UNREAD_SECONDS
            for key in here:
                load.left.discard(key)
                # ``clear`` drops a block that comes after it.
                if self._asked.pop(key, None) is not None:
                    self._unread[key] = until
                    self._loaded += 1
            self._loading -= len(here)
        self._miss_by_code(load.keys, job)
        if not job.returned:
            self._hung |= load.left
            return
        self._hung -= load.left
        if load.left:
            self._cache.abort(load.left)
            self._loading -= len(load.left)
            load.left.clear()

    # -- blocks that are saved -----------------------------------------------------------------------

    def _save_later(self, keys: Iterable[bytes]) -> None:
        """Save these blocks in one of the next polls."""
        deadline = self._clock() + self._save_seconds
        for key in keys:
            self._unused.pop(key, None)
            self._waiting.setdefault(key, deadline)
        self._not_saved("crowded", _bound(self._waiting, self._cache.host_blocks))

    def _begin_saves(self) -> None:
        """Pin blocks that wait, as many as have room, and save them."""
        now = self._clock()
        while self._waiting and next(iter(self._waiting.values())) <= now:
            del self._waiting[next(iter(self._waiting))]
            self._not_saved("late", 1)
        while self._waiting and (room := min(AT_ONCE, self._save_max - self._saving)) > 0:
            keys = list(islice(self._waiting, room))
            deadline = self._waiting[keys[0]]
            for key in keys:
                del self._waiting[key]
            here = (self._cache.lookup(keys) == self._cache.HERE).tolist()
            self._not_saved("evicted", len(keys) - sum(here))
            self._save(list(compress(keys, here)), deadline)

    def _save(self, keys: list[bytes], deadline: float) -> None:
        """Save blocks to each store that is usable."""
        if not keys:
            return
        try:
            lease = self._cache.pin(keys, owner="kvpool stores")
        except BlockNotFound:
            self._not_saved("evicted", len(keys))
            return
        save = _Save(self._clock(), lease, set())
        for number, line in enumerate(self._lines):
            if not line.health.usable(writes=True):
                self._unsaved["suspended"] += len(keys)
                continue
            try:
                job = line.queue.save(self._opaque(line, keys), lease.blocks, deadline=deadline)
            except StoreBusy:
                self._unsaved["busy"] += len(keys)
                continue
            save.stores.add(number)
            self._jobs[job] = save
        if save.stores:
            self._saving += len(keys)
        else:
            lease.close()

    def _not_saved(self, reason: str, count: int) -> None:
        """Count blocks that no store gets."""
        if count:
            self._unsaved[reason] += count * len(self._lines)

    def _kept(self, save: _Save, store: int, job: Job, first: bool) -> None:
        """A save is done, or has returned."""
        if first:
            self._saved += job.ok
            for code, count in zip(CODES, np.bincount(job.codes, minlength=len(CODES)).tolist(), strict=True):
                if count and code != CODES[OK]:
                    self._unsaved[code] += count
        if job.returned:
            save.stores.discard(store)
            if not save.stores:
                self._saving -= len(save.lease.keys)
                if not save.lease.closed:
                    save.lease.close()

    # -- what they share -----------------------------------------------------------------------------

    def _ended(self, store: int, job: Job) -> None:
        """A job is done or has returned. Jobs that hang are told of twice."""
        work = self._jobs.get(job)
        if work is None:
            return
        first = job not in self._done
        hurried = job.deadline - work.began < self._patience
        if first and not (hurried and (job.codes == LATE).any()):
            self._lines[store].health.note(job)
        if job.returned or isinstance(work, _Search):
            del self._jobs[job]
            self._done.discard(job)
        else:
            self._done.add(job)
        if isinstance(work, _Search):
            self._searched(work, job)
        elif isinstance(work, _Load):
            self._came(work, job)
        else:
            self._kept(work, store, job, first)

    def _opaque(self, line: _Line, keys: list[bytes]) -> npt.NDArray[np.uint8]:
        """The keys as the store has them."""
        return line.queue.secret.opaque([self._prefix + key for key in keys] if self._prefix else keys)

    def _deadline(self, keys: list[bytes]) -> float:
        return min(self._asked[key] for key in keys)


def _is_suspended(health: StoreHealth) -> bool:
    return health.suspended() or health.suspended(writes=True)


def _share(name: str, share: Any, blocks: int) -> int:
    """A share of the blocks, one at least. Raises TypeError or ValueError."""
    found = seconds_argument(name, share)
    if not 0 < found <= 1:
        raise ValueError(f"{name}={share!r:.80}: accepted is a share above 0, up to 1")
    return max(1, int(found * blocks))


def _bound(keys: dict[bytes, Any], most: int) -> int:
    """Drop the oldest beyond ``most``. Returns how many."""
    dropped = max(0, len(keys) - most)
    for _ in range(dropped):
        del keys[next(iter(keys))]
    return dropped
