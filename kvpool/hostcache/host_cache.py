"""HostCache: an index from opaque keys to the host blocks that have their KV. It owns no memory, so any process can
have it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from kvpool.common.arguments import (
    bool_argument,
    clock_argument,
    deadline_argument,
    priority_argument,
    text_argument,
    ttl_argument,
)
from kvpool.common.arrays import Int64s, Uint8s
from kvpool.common.arrays.layout import BlockLayout, choice_argument, integer_argument
from kvpool.common.changes import Changes
from kvpool.common.process import Closing, Process
from kvpool.device.regions import BLOCKS_MAX
from kvpool.errors import (
    OutOfBlocks,
    PoolBusy,
    PoolClosed,
    ReservationExpired,
    counted,
)
from kvpool.hostcache.gone_keys import GoneKeys
from kvpool.hostcache.host_events import HostEvent, decoded
from kvpool.hostcache.host_lease import HostLease
from kvpool.hostcache.host_stats import HostCacheStats, HostUsage, stats_of, usage_of
from kvpool.hostcache.identity import ModelIdentity
from kvpool.hostcache.opaque_keys import Packed, key_argument, keys_argument, missing, one_key, packed, unpacked
from kvpool.hostcache.reserved_keys import Reserved, reserved_of
from kvpool.hostcache.tier import block_argument, fingerprint_of
from kvpool.pool import events as kv_events
from kvpool.pool.config import secret_argument
from kvpool.pool.core import MAX_MS, Names, host_states
from kvpool.pool.deadlines import Deadlines
from kvpool.pool.explain import Missed
from kvpool.state import hostcache, records, saving, verbs
from kvpool.state.arrays import LRU, POLICIES, PolicyName
from kvpool.state.hashing import namespace_root
from kvpool.state.verify import verify_states

Keys = Iterable[bytes]
_NO_PLACES = np.empty((0, 3), np.int64)
_FORGOTTEN = records.COUNTERS.index("forgotten_host_blocks")


class HostCache(Closing):
    """A pool of host blocks under opaque keys, for engines that keep their own device blocks.

    Parameters
    ----------
    host_blocks : int
        Number of blocks.
    block_bytes : int, BlockLayout or list of BlockLayout
        Bytes of a block, of all workers together; or the layouts of its content.
    identity : ModelIdentity
        Whose KV this is. It is hashed with every key, so that no other model's KV is found.
    secret : bytes, optional
        16 to 64 bytes that key the hash. Random by default.
    event_capacity : int, default 0
        Number of keys whose events are kept until ``events`` is called. 0 records none.
    clock : callable, optional
        ``() -> int``, monotonic milliseconds from 0 to 2**42. By default the system's monotonic clock.
    policy : {"lru", "reuse", "agent", "adaptive"}, default "lru"
        Which key is evicted next. All but "lru" follow conversations, which ``touch(keys, turn=True)`` reports.
    history : int, default 0
        Number of removed keys that are remembered, with the reason, for ``explain``. Each takes about 200 bytes.

    Raises
    ------
    TypeError, ValueError
        For a bad argument, here and in every call.

    Notes
    -----
    A key is 1 to 64 bytes, such as an engine's digest and the number of a group. A key is absent, pending (its block is
    being written) or here.

    The index copies nothing, and uses no memory and no device. A caller reserves keys, has their blocks written, and
    calls ``publish`` or ``abort``. A reader pins first. A process that dies while it copies changes nothing here: abort
    its keys and close its leases once it is gone.

    A reservation can have a deadline (``reserve``). Keys that are not published by then expire: they are ABSENT, and
    ``publish`` raises ReservationExpired. The index cannot stop a writer that holds an address, so the block of an
    expired reservation stays out of use until ``abort``. A late write therefore reaches no other key's bytes, and no
    reader gets them. Until then, the key cannot be reserved again. No thread runs for this: deadlines are checked by
    ``reserve``, ``publish``, ``abort``, ``find``, ``lookup``, ``overdue``, ``expired_reservations`` and ``stats``.

    Thread-safe. A call that raises has changed nothing, except that reservations may have expired, and that blocks
    whose time to live is over may have the default priority. Every call is one jitted call for all its keys. After
    ``close``, calls raise PoolClosed.

    An exception of a signal handler, such as the KeyboardInterrupt of Ctrl-C, can arrive after a call has changed the
    cache. ``leases`` and ``reserved_keys`` list what that call took.

    Examples
    --------
    >>> import kvpool
    >>> llama = kvpool.ModelIdentity("llama", "a1b2", "bfloat16", "32 layers, 8 heads of 128, 16 tokens", "my-engine 1")
    >>> with kvpool.HostCache(2, 4096, identity=llama) as cache:
    ...     first = cache.reserve([b"a", b"b"])  # copy KV into first.blocks, then:
    ...     print(cache.publish(first.keys), cache.lookup([b"a", b"c"]).tolist())
    ...     with cache.pin([b"b"]) as lease:  # copy KV out of lease.blocks
    ...         print(cache.reserve([b"c"]).evicted)
    ...     cache.abort([b"c"])
    2 [1, 0]
    [b'a']
    1
    """

    ABSENT, HERE, PENDING = hostcache.ABSENT, hostcache.HERE, hostcache.WAITING

    def __init__(
        self,
        host_blocks: int,
        block_bytes: int | BlockLayout | list[BlockLayout],
        *,
        identity: ModelIdentity,
        secret: bytes | None = None,
        event_capacity: int = 0,
        clock: Callable[[], int] | None = None,
        policy: PolicyName = LRU,
        history: int = 0,
    ) -> None:
        self.policy = choice_argument("policy", policy, POLICIES)
        self.host_blocks = integer_argument("host_blocks", host_blocks, 1, BLOCKS_MAX)
        self.block_bytes, self.identity = block_argument(block_bytes, identity)
        self.fingerprint = fingerprint_of(self.identity, self.host_blocks, self.block_bytes)
        secret_bytes, self._clock = secret_argument(secret), clock_argument(clock)
        events = integer_argument("event_capacity", event_capacity, 0, 1 << 31)
        self._states = host_states(self.host_blocks, secret_bytes, events, self.policy)
        self._groups = self._states.groups
        # The root of all keys, like that of a namespace with the identity as its name.
        self._root = np.array(namespace_root(secret_bytes, self.identity.content, None), np.int64)
        # Reentrant: a destructor that closes a lease while its thread is in a call must not wait for itself.
        self._lock: AbstractContextManager[Any] = threading.RLock()
        self._changes = Changes()
        self._forks = Process("HostCache")
        self._forks.guard(self, "_lock")
        # The open leases, with their blocks, the last first: the end of a prompt is evicted before its beginning.
        self._open: dict[int, tuple[HostLease, Int64s]] = {}
        self._lease_numbers = itertools.count(1)
        self._names = Names(self._states)
        kv_events.announce(self._states)
        # What ``find`` takes a key to the state in. Each call takes one out, so that another call inside it, by a
        # handler or a destructor, has its own.
        self._spare: list[Packed] = []
        # The order in which pending keys were reserved. Engines end them as a set.
        self._order: dict[bytes, int] = {}
        self._deadlines = Deadlines[bytes]()
        self._numbers = itertools.count()
        self._gone = GoneKeys(integer_argument("history", history, 0, 1 << 24))
        self._closed = False

    # -- keys that are looked for --------------------------------------------------------------------

    def lookup(self, keys: Keys) -> Uint8s:
        """Return whether each key is ABSENT, HERE or PENDING.

        Parameters
        ----------
        keys : iterable of bytes
            The keys.

        Returns
        -------
        ndarray of uint8, shape (n,)
            ``HostCache.ABSENT``, ``HERE`` or ``PENDING`` for each.

        Notes
        -----
        Changes nothing, except that reservations may expire.
        """
        wanted = packed(keys)
        answers, now_ms = np.empty(len(wanted.keys), np.uint8), self._now_for_deadlines()
        with self._lock:
            self._check_open()
            self._expire(now_ms)
            hostcache.lookup(self._groups, self._root, *wanted[1:], answers)
        return answers

    def find(self, key: bytes) -> int:
        """Return whether a key is ABSENT, HERE or PENDING.

        Parameters
        ----------
        key : bytes
            The key.

        Returns
        -------
        int
            ``HostCache.ABSENT``, ``HERE`` or ``PENDING``.

        Notes
        -----
        Changes nothing, except that reservations may expire.
        """
        if type(key) is not bytes or not 1 <= len(key) <= hostcache.KEY_BYTES:
            key = key_argument("key", key)
        size, now_ms = len(key), self._now_for_deadlines()
        try:
            scratch = self._spare.pop()
        except IndexError:
            scratch = one_key()
        scratch.data.data[:size] = key
        scratch.sizes[0] = size
        with self._lock:
            self._check_open()
            self._expire(now_ms)
            answer = int(hostcache.look(self._groups, self._root, *scratch[1:]))
        self._spare.append(scratch)
        return answer

    def pin(self, keys: Keys, *, owner: str = "") -> HostLease:
        """Hold the blocks of keys for a reader, until the lease is closed.

        Parameters
        ----------
        keys : iterable of bytes
            The keys. All must be HERE.
        owner : str, default ""
            Name of the reader, for ``revoke`` and for people.

        Returns
        -------
        HostLease
            The blocks.

        Raises
        ------
        BlockNotFound
            Where a key is not HERE. It names the first one, and nothing is pinned.

        Notes
        -----
        Changes the cache: the keys count as used.
        """
        wanted, owner = packed(keys), text_argument("owner", owner)
        now_ms = self._now()
        new = list[tuple[HostLease, Int64s]]()

        def open_lease(error: int) -> None:
            if error:
                return
            if not new:
                blocks = wanted.found[:, 2].copy()
                about = self._close_lease, self._open, self.fingerprint
                lease = HostLease(*about, next(self._lease_numbers), owner, now_ms, wanted.keys, blocks)
                new.append((lease, blocks[::-1].copy()))
            self._open[new[0][0].id] = new[0]

        with self._lock, self._changes:
            self._check_open()
            self._change(hostcache.pin, wanted, now_ms, needed="here", finish=open_lease)
        return new[0][0]

    def touch(self, keys: Keys, *, turn: bool = False) -> int:
        """Count the keys that are HERE as used now.

        They are evicted after everything that was used before. Of these keys, the last one is evicted first, since the
        end of a prompt is worth less than its beginning.

        Parameters
        ----------
        keys : iterable of bytes
            The keys, in the order of the prompt.
        turn : bool, default False
            Whether a request has ended, and these are all its keys. Pass it once for each request, for all policies but
            "lru".

        Returns
        -------
        int
            Number of keys that are HERE.

        Notes
        -----
        Changes the cache.
        """
        wanted, turn = packed(keys), bool_argument("turn", turn)
        return self._run(hostcache.touch, wanted, turn, self._now())

    # -- keys to come ----------------------------------------------------------------------------------

    def reserve(
        self,
        keys: Keys,
        *,
        priority: int = records.DEFAULT_PRIORITY,
        ttl_ms: int | None = None,
        deadline_seconds: float | None = None,
    ) -> Reserved:
        """Take a block for each absent key. These keys are then PENDING.

        Keys that are HERE count as used, and this call does not evict them. PENDING keys belong to another caller. Only
        the caller may write the blocks, until it calls ``publish`` or ``abort``. Empty blocks are taken first, then the
        content of the lowest priority, least recently used first, up to ``priority``.

        Parameters
        ----------
        keys : iterable of bytes
            The keys.
        priority : int, default 35
            0 (evicted first) to 100 (evicted last).
        ttl_ms : int, optional
            After this many milliseconds without a use, the priority falls to the default. By default it never does.
        deadline_seconds : float, optional
            After this many seconds on the clock of the cache, the keys that are not published expire. They are counted
            in ``stats``. Their blocks stay out of use until ``abort``, since the writer may still write them, and
            ``reserve`` does not take these keys until then. By default they never expire.

        Returns
        -------
        Reserved
            The keys that were absent, with their blocks, and the keys that were evicted.

        Raises
        ------
        OutOfBlocks
            Where too few blocks are free. Pinned and pending blocks are not free. Nothing has changed then.

        Notes
        -----
        Changes the cache.
        """
        wanted, priority, ttl = packed(keys), priority_argument("priority", priority), ttl_argument("ttl_ms", ttl_ms)
        lifetime = deadline_argument(deadline_seconds)
        now_ms = self._now()
        with self._lock, self._changes:
            self._check_open()
            self._expire(now_ms)
            deadline = None if lifetime is None else now_ms + lifetime
            reserved = self._reserve(wanted, priority, ttl, now_ms, deadline)
            if reserved is None and len(set(wanted.keys)) < len(wanted.keys):
                wanted = packed(dict.fromkeys(wanted.keys))
                reserved = self._reserve(wanted, priority, ttl, now_ms, deadline)
            if reserved is None:
                raise OutOfBlocks("host", int(wanted.found[0, 0]), int(wanted.found[0, 1]))
        return reserved

    def _reserve(self, wanted: Packed, priority: int, ttl: int, now_ms: int, deadline: int | None) -> Reserved | None:
        """What ``reserve`` does, for keys of which none may be named twice. None: too few blocks are free. The caller
        holds the lock."""
        evicted, new = np.empty_like(wanted.words), list[Reserved]()

        def note(count: int) -> None:
            if count < 0:
                return
            if not new:
                taken = int(wanted.found[0, 0]) if wanted.keys else 0
                new.append(reserved_of(wanted, taken, unpacked(evicted[:count]) if count else [], self.fingerprint))
            self._order.update(zip(new[0].keys, self._numbers, strict=False))
            if deadline is not None:
                self._deadlines.add(new[0].keys, deadline)
            self._gone.note(new[0].evicted, "evicted", now_ms)

        self._change(hostcache.reserve, wanted, priority, ttl, now_ms, evicted, finish=note)
        return new[0] if new else None

    def publish(self, keys: Keys) -> int:
        """Make pending keys available, whose bytes are written. They are then HERE.

        A key that ``forget`` or ``clear`` has named meanwhile is dropped instead. Of the keys of one call, the one that
        was reserved last is evicted first, whatever their order here.

        Parameters
        ----------
        keys : iterable of bytes
            The keys.

        Returns
        -------
        int
            Number of keys that are HERE now.

        Raises
        ------
        BlockNotFound
            Where a key is not pending. It names the first one.
        ReservationExpired
            Where a deadline has passed. It names the first such key: abort those that ``overdue`` returns, and publish
            the others.

        Notes
        -----
        Changes the cache.
        """
        return self.publish_ordered(self.in_order(keys))

    def publish_ordered(self, keys: Sequence[bytes]) -> int:
        """Do what ``publish`` does, with keys that ``in_order`` has returned.

        Parameters
        ----------
        keys : sequence of bytes
            The keys.

        Returns
        -------
        int
            Number of keys that are HERE now.

        Raises
        ------
        BlockNotFound, ReservationExpired
            As for ``publish``.
        """
        now_ms = self._now()
        with self._lock, self._changes:
            self._check_open()
            self._expire(now_ms)
            for key in keys if self._deadlines.overdue else ():
                if key in self._deadlines.overdue:
                    raise ReservationExpired(f"key {key.hex()} was not published before its deadline: abort it")
            return self._end(keys, True, now_ms)

    def in_order(self, keys: Keys) -> Sequence[bytes]:
        """Return pending keys in the order in which they were reserved.

        Parameters
        ----------
        keys : iterable of bytes
            The keys.

        Returns
        -------
        sequence of bytes
            The keys in that order, or as they are if one of them is not pending.
        """
        checked_keys = keys_argument(keys)
        try:
            return sorted(checked_keys, key=self._order.__getitem__)
        except KeyError:
            return checked_keys

    def abort(self, keys: Keys) -> int:
        """Give back the blocks of pending keys that will not be written.

        Nobody may write the blocks any more. Keys whose reservation has expired are among them: this makes their blocks
        usable again.

        Parameters
        ----------
        keys : iterable of bytes
            The keys.

        Returns
        -------
        int
            Number of keys.

        Raises
        ------
        BlockNotFound
            Where a key is not pending. It names the first one.

        Notes
        -----
        Changes the cache.
        """
        checked_keys, now_ms = keys_argument(keys), self._now()
        with self._lock, self._changes:
            self._check_open()
            self._expire(now_ms)
            return self._end(checked_keys, False, now_ms)

    @property
    def reserved_keys(self) -> list[bytes]:
        """Keys that were reserved, and neither published nor aborted, in the order of their reservation.

        Also those of a call whose result nobody received, because an exception of a signal handler came first. Fast.
        """
        return list(self._order)

    def overdue(self) -> list[bytes]:
        """Return the keys whose reservation has expired and that were not aborted yet.

        Returns
        -------
        list of bytes
            The keys, in the order in which they expired.

        Notes
        -----
        Changes nothing, except that reservations may expire.
        """
        now_ms = self._now_for_deadlines()
        with self._lock:
            self._check_open()
            self._expire(now_ms)
            return list(self._deadlines.overdue)

    @property
    def expired_reservations(self) -> int:
        """Number of blocks that were not published before the deadline of their reservation."""
        now_ms = self._now_for_deadlines()
        with self._lock, self._changes:
            if not self._closed and self._changes.torn is None:
                self._expire(now_ms)
            return self._deadlines.expired

    def _now_for_deadlines(self) -> int | None:
        """Return the time if a reservation can expire, else None. The clock is not read under the lock."""
        return self._now() if self._deadlines else None

    def _expire(self, now_ms: int | None) -> None:
        """Expire the reservations whose deadline has passed, as ``forget`` does: their blocks stay with the writers.
        The caller holds the lock."""
        if now_ms is None or not (keys := self._deadlines.passed(now_ms)):
            return

        def note(_: int) -> None:
            self._deadlines.expire(keys)
            self._gone.note(keys, "lost", now_ms)

        with self._changes:
            self._change(hostcache.forget_keys, packed(keys, known=True), now_ms, finish=note)

    def set_priority(self, keys: Keys, priority: int, *, ttl_ms: int | None = None) -> int:
        """Give the keys that are HERE another priority.

        Parameters
        ----------
        keys : iterable of bytes
            The keys.
        priority : int
            0 (evicted first) to 100 (evicted last).
        ttl_ms : int, optional
            After this many milliseconds without a use, the priority falls to the default. By default it never does.

        Returns
        -------
        int
            Number of keys that are HERE.

        Notes
        -----
        Changes the cache, and emits "updated" events.
        """
        priority, ttl = priority_argument("priority", priority), ttl_argument("ttl_ms", ttl_ms)
        return self._run(hostcache.set_priority, packed(keys), priority, ttl, self._now())

    # -- keys that go ----------------------------------------------------------------------------------

    def forget(self, keys: Keys) -> int:
        """Drop keys that are HERE or PENDING.

        A pinned block keeps its bytes until it is unpinned. A pending key stays with its writer, and nobody finds it.
        It is dropped when the writer publishes it.

        Parameters
        ----------
        keys : iterable of bytes
            The keys.

        Returns
        -------
        int
            Number of keys that were HERE or PENDING.

        Notes
        -----
        Changes the cache.
        """
        wanted, now_ms = packed(keys), self._now()
        present_keys = list(itertools.compress(wanted.keys, self.lookup(wanted.keys))) if self._gone.capacity else []
        return self._run(
            hostcache.forget_keys, wanted, now_ms, finish=lambda _: self._gone.note(present_keys, "forgotten", now_ms)
        )

    def clear(self, force: bool = False) -> None:
        """Drop all keys.

        Parameters
        ----------
        force : bool, default False
            Whether to do it while leases are open or keys are pending. These are treated as ``forget`` treats them.

        Raises
        ------
        PoolBusy
            While leases are open or keys are pending, without ``force``. Nothing has changed then.

        Notes
        -----
        Changes the cache.
        """
        force, now_ms = bool_argument("force", force), self._now()
        with self._lock, self._changes:
            self._check_open()
            leases, pending = len(self._open), len(self._pending())
            if (leases or pending) and not force:
                held = f"{counted(leases, 'open lease')} and {counted(pending, 'pending key')}"
                raise PoolBusy(f"the cache has {held}: end them, or clear(force=True)")
            self._decide(hostcache.clear, now_ms, finish=lambda _: self._gone.note_unnamed())

    def explain(self, key: bytes, tokens: int = 1) -> Missed:
        """Return why a key is not HERE.

        Parameters
        ----------
        key : bytes
            The key.
        tokens : int, default 1
            Tokens of its block, which the result repeats.

        Returns
        -------
        Missed
            Its reason is "evicted", "forgotten", "lost", "never_seen" or "unknown". ``history`` is the number of
            removed keys whose reason is remembered.
        """
        with self._lock:
            reason, left_ms = self._gone.reason_of(key)
        return Missed(0, tokens, reason, None if left_ms is None else max(0, self._now() - left_ms))

    # -- keys that are saved ---------------------------------------------------------------------------

    def open_dirty_cursor(self, *, pending: bool) -> int:
        """Open a cursor over the keys that are not saved yet.

        Parameters
        ----------
        pending : bool
            Whether ``unsaved_blocks`` counts blocks that are evicted before the cursor has read them.

        Returns
        -------
        int
            The number of the cursor, which has read no keys.

        Notes
        -----
        Changes the cache. At most ``SAVERS`` of ``kvpool.state.saving`` are open at once.
        """
        with self._lock, self._changes:
            self._check_open()
            saving.check_cursors(self._groups)
            return int(self._decide(saving.open_dirty_cursor, pending))

    def close_dirty_cursor(self, cursor: int) -> None:
        """Close a cursor of ``open_dirty_cursor``.

        Parameters
        ----------
        cursor : int
            Its number.

        Notes
        -----
        Changes the cache.
        """
        with self._lock, self._changes:
            if self._changes.torn is None:
                self._decide(saving.close_dirty_cursor, cursor)

    def read_dirty(self, cursor: int, keys: Keys) -> list[bytes]:
        """Return the keys that are HERE and that a cursor has not read.

        Parameters
        ----------
        cursor : int
            Its number.
        keys : iterable of bytes
            The keys that are looked at.

        Returns
        -------
        list of bytes
            The keys. They count as read until they leave the cache.

        Notes
        -----
        Changes the cache.
        """
        wanted = packed(keys)
        answers, block_rows = np.empty(len(wanted.keys), np.uint8), np.empty((len(wanted.keys), saving.FOUND), np.int64)
        with self._lock, self._changes:
            self._check_open()
            hostcache.lookup(self._groups, self._root, *wanted[1:], answers)
            count = self._decide(saving.held, cursor, wanted.found[:, 2].copy(), block_rows)
            return unpacked(self._states[0].tokens[block_rows[:count, saving.FOUND - 1]])

    def eviction_candidates(self, cursor: int | None, blocks: int, most: int) -> list[bytes]:
        """Return the keys that are evicted next, and that a cursor has not read.

        Parameters
        ----------
        cursor : int or None
            The number of a cursor. With None, keys count whether they were read or not.
        blocks : int
            Candidates are the keys that would be evicted if this many blocks more were reserved.
        most : int
            The most keys that are returned.

        Returns
        -------
        list of bytes
            The keys in the order of eviction. With a cursor they count as read.

        Notes
        -----
        Changes the cache.
        """
        margins, victim_rows = np.array([blocks]), np.empty((most, saving.FOUND), np.int64)
        with self._lock, self._changes:
            self._check_open()
            reader = records.NONE if cursor is None else cursor
            count = self._decide(saving.victims, reader, margins, victim_rows)
            return unpacked(self._states[0].tokens[victim_rows[:count, saving.FOUND - 1]])

    @property
    def unsaved_blocks(self) -> int:
        """Number of blocks that were evicted before a cursor opened with ``pending`` has read them."""
        return int(self._groups[0, records.H.unsaved])

    @property
    def forgotten_blocks(self) -> int:
        """Number of blocks that were evicted, forgotten or cleared since the cache was made. Fast."""
        return int(self._states[0].counters[_FORGOTTEN])

    def refresh(self) -> int:
        """Give blocks whose time to live is over the default priority.

        Returns
        -------
        int
            Number of these blocks.

        Notes
        -----
        Changes the cache.
        """
        now_ms = self._now()
        with self._lock, self._changes:
            self._check_open()
            return int(self._decide(verbs.refresh, now_ms))

    # -- the cache as a whole --------------------------------------------------------------------------

    @property
    def leases(self) -> list[HostLease]:
        """Open leases, oldest first."""
        return [lease for lease, _ in list(self._open.values())]

    def _close_lease(self, lease: int, used: bool) -> bool:
        return self._end_lease(lease, self._now(), used)

    def _end_lease(self, lease: int, now_ms: int, used: bool = True) -> bool:
        """Unpin the blocks of a lease. Returns whether it was open."""
        with self._lock, self._changes:
            opened = self._open.get(lease)
            if opened is None:
                return False
            self._check_open()
            ids = opened[1]
            before = _NO_PLACES if used else saving.places(self._states[0].blocks[ids])
            # A destructor may have ended it meanwhile: then this changes nothing.
            self._decide(hostcache.end_lease, ids, before, now_ms, finish=lambda _: self._open.pop(lease, None))
        return True

    def revoke(self, owner: str) -> int:
        """Close all leases of an owner that has ended and reads no more.

        Parameters
        ----------
        owner : str
            The owner, as given to ``pin``.

        Returns
        -------
        int
            Number of leases.

        Notes
        -----
        Changes the cache.
        """
        owner, now_ms = text_argument("owner", owner), self._now()
        with self._lock, self._changes:
            self._check_open()
            # A destructor may close one first.
            return sum(self._end_lease(lease.id, now_ms) for lease in self.leases if lease.owner == owner)

    def events(self) -> list[HostEvent]:
        """Return the changes since the last call. Each event is returned once.

        Returns
        -------
        list of HostEvent
            The events, in order. Empty without ``event_capacity``.
        """
        with self._lock, self._changes:
            self._check_open()
            taken = kv_events.take(self._states, self._names.known, False)
        try:
            return decoded(taken)
        except BaseException:
            with self._lock, self._changes:
                kv_events.put_back(self._states, taken)
            raise

    def usage(self) -> HostUsage:
        """Return what the blocks are used for. Fast enough for every step, and for a closed cache too.

        Returns
        -------
        HostUsage
            Numbers of blocks.
        """
        with self._lock, self._changes:
            return usage_of(self._states[0], self._pinned())

    def stats(self) -> HostCacheStats:
        """Return the figures of the cache, even if it is closed.

        Returns
        -------
        HostCacheStats
            The state now, and totals.

        Notes
        -----
        Changes nothing, except that reservations may expire.
        """
        now_ms = self._now()
        with self._lock, self._changes:
            if not self._closed and self._changes.torn is None:
                self._expire(now_ms)
            leases = [now_ms - lease.since for lease in self.leases]
            return stats_of(self._states[0], self.usage(), leases, self._deadlines)

    def verify(self) -> None:
        """Check every invariant of the state, even if the state is in doubt. Slow.

        Raises
        ------
        IntegrityError
            Where one does not hold. It names that one.
        """
        with self._lock, self._changes:
            if self._closed:
                self._check_open()
            verify_states(self._states, np.concatenate([self._pending(), *self._pinned()]))

    @property
    def closed(self) -> bool:
        """Whether the cache was closed."""
        return self._closed

    def close(self) -> None:
        """End the cache. Later calls raise PoolClosed, except ``stats`` and ``close``."""
        with self._lock, self._changes:
            self._closed = True
            self._open.clear()

    # -- what the verbs share --------------------------------------------------------------------------

    def _run(self, verb: Callable[..., Any], wanted: Packed, *more: Any, **options: Any) -> int:
        """``_change`` under the lock."""
        with self._lock, self._changes:
            self._check_open()
            return self._change(verb, wanted, *more, **options)

    def _change(
        self,
        verb: Callable[..., Any],
        wanted: Packed,
        *more: Any,
        needed: str = "",
        finish: Callable[[Any], object] | None = None,
    ) -> int:
        """Decide about packed keys. ``more``: the last arguments of the verb. ``needed`` is the state that all keys
        must have, if the verb refuses others. The caller holds the lock."""
        count = int(self._decide(verb, self._root, *wanted[1:], *more, finish=finish))
        if count == records.NOT_FOUND:
            raise missing(wanted, needed)
        return count

    def _decide(self, verb: Callable[..., Any], *args: Any, finish: Callable[[Any], object] | None = None) -> Any:
        """Change the state by a jitted verb, and note its result by ``finish``: see ``Changes``. The caller holds the
        lock."""
        result = self._changes.call(verb, self._groups, *args, finish=finish)
        if self._changes.torn is not None:
            self._check_open()
        return result

    def _end(self, keys: Sequence[bytes], publishes: bool, now_ms: int) -> int:
        """End the wait of pending keys. The caller holds the lock."""

        def note(count: int) -> None:
            if count >= 0:
                for key in keys:
                    self._order.pop(key, None)
                self._deadlines.end(keys)

        wanted = packed(keys, known=True)
        return self._change(hostcache.end_pending, wanted, publishes, now_ms, needed="pending", finish=note)

    def _pinned(self) -> list[Int64s]:
        """The blocks of each open lease. The caller holds the lock."""
        return [ids for _, ids in list(self._open.values())]

    def _pending(self) -> Int64s:
        """Blocks that wait for their bytes. The caller holds the lock."""
        return np.flatnonzero(self._states[0].blocks["flags"] & records.PENDING)

    def _now(self) -> int:
        return integer_argument("clock()", self._clock(), 0, MAX_MS)

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the cache is closed")
        if self._changes.torn is not None:
            raise PoolClosed(f"the state of the cache is in doubt: {self._changes.torn}") from self._changes.torn
