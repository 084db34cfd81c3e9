"""KVCacheManager: the public calls of a pool. Those about prompts and block tables are those of its base classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import FunctionType
from typing import Any
from weakref import WeakSet

import numpy as np

from kvpool.common.arguments import (
    Ids,
    Integers,
    bool_argument,
    id_array,
    text_argument,
)
from kvpool.common.arrays import Int64s
from kvpool.common.arrays.layout import BlockLayout, Tier, integer_argument
from kvpool.common.process import Closing
from kvpool.device import get_device
from kvpool.device.base import Device, StreamLike
from kvpool.device.memory.attachments import Sharing
from kvpool.device.memory.export import Loan
from kvpool.errors import BlockNotFound, IntegrityError, PoolBusy, counted
from kvpool.pool import events as kv_events
from kvpool.pool import stats as statistics
from kvpool.pool.block_tables import BlockTables
from kvpool.pool.cached_content import CachedContent
from kvpool.pool.config import EvictionOptions, Group, LayerGroup, MemoryOptions, PoolConfig, options_argument
from kvpool.pool.core import Core, pool_memory, pool_states
from kvpool.pool.exclusive import Exclusive, allowed_inside
from kvpool.pool.hints import ClientHints
from kvpool.pool.imports import Imports
from kvpool.pool.keys import Key, Keys, key_row, key_rows, tier_number
from kvpool.pool.leases import Lease, Leases
from kvpool.pool.live_sequences import LiveSequences
from kvpool.pool.pool_memory import PoolMemory
from kvpool.pool.prompt_requests import PromptRequests
from kvpool.pool.reservations import ImportWriter, Reservations
from kvpool.pool.shutdown import CloseReport, Shutdown
from kvpool.pool.tables.staging import Staging
from kvpool.state import control, records, verbs
from kvpool.state.arrays import PolicyName
from kvpool.state.verify import verify_states


class KVCacheManager(LiveSequences, Closing):
    """Manage a paged KV cache in two tiers: device blocks, and host blocks for what is evicted from the device.

    Parameters
    ----------
    layout : BlockLayout, optional
        Shape and bytes of a block, for a model whose layers all keep the same. Not with ``groups``.
    device_blocks, host_blocks : int or sequence of int
        Capacities of the tiers; with ``groups``, one for each group: see ``split_blocks``. ``host_blocks`` is 0 by
        default. Ids [0, device_blocks) are device blocks, the ids after them host blocks.
    groups : sequence of LayerGroup, optional
        In place of ``layout``, for a model whose layers keep different blocks. Each call acts on all groups or on none.
        A prefix is reused as far as every group can. Calls about the blocks of one group take ``group=``, the index of
        that group; it is required where there are several.
    tokens_per_block : int, optional
        Only for a pool whose groups are all recurrent. Other pools have it in their layouts.
    device : {"auto", "cpu", "cuda", "sim"} or Device, default "auto"
        "auto" is a GPU where there is one, else the CPU. A ``kvpool.device.base.Device`` must serve no other pool.
    max_sequences : int, default 256
        Sequences that can live at the same time. It sizes the block table.
    max_sequence_tokens : int, optional
        Tokens that a sequence can have, and those of an encoder. It sizes the block table. Default: as many as fit on
        the device, at most 262,144.
    window : int, optional
        Sliding-window attention in all layers: a token sees the last ``window`` tokens, itself included. ``commit``
        frees the blocks that no later token sees, and sets them to -1 in the block table. A prefix is reused if what
        the next token sees of it is cached. A sequence may then be longer than the device has room for, up to
        ``max_sequence_tokens``. By default a token sees all tokens before it.
    sinks : int, default 0
        With ``window``, the first tokens of a sequence that every token sees as well.
    partial_reuse : bool, default True
        Whether the first tokens of a block that matches in part are reused too, by a copy of the block.
    policy : {"lru", "reuse", "agent", "adaptive"}, default "lru"
        Which cached block is evicted next, among those of the default priority. "lru" evicts the least recently used
        block. "reuse" evicts the end of the conversation that is least likely to continue, as estimated from
        conversations of its length and number of turns. "agent" also uses the pauses that the conversation itself has
        made, and the ``stop`` of ``release``. "adaptive" follows the one of these that would have hit more lately. All
        but "lru" use ``ends`` and ``returns_in_ms`` of ``release``. With a recurrent group, "reuse" and "agent" are
        refused, and "adaptive" is "lru".
    eviction : EvictionOptions, optional
        Which evicted content is offloaded to the host, and the history for ``CachedContent.explain``.
    memory : MemoryOptions, optional
        Memory of the caller for the tiers and the block table, shared memory, and how many uploads can be in
        flight.
    secret : bytes, optional
        16 to 64 bytes that key the hash of content; random by default. Pools with the same secret have the same keys.
    event_capacity : int, default 0
        Blocks whose events are kept until ``events`` is called. 0 records none.
    clock : callable, optional
        ``() -> int``, monotonic milliseconds from 0 to 2**42. By default the monotonic clock of the system.

    Attributes
    ----------
    content : CachedContent
        The calls about cached content that a prompt, keys or a namespace names.
    imports : Imports
        The calls for KV that comes from elsewhere.
    memory : PoolMemory
        The arrays of both tiers, and their exports to other packages and processes.
    tables : BlockTables
        The tables of live sequences for kernels, and their uploads.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type or value, here and in every call; the message names it.
    InsufficientMemory
        Where the tiers or the state do not fit.

    Notes
    -----
    All calls are thread-safe. A call that raises has changed nothing. After ``close``, calls raise PoolClosed, except
    ``stats`` and ``close``.

    Pass the stream of the engine to calls that take ``stream=``. Work that is enqueued on it after the call may use the
    blocks that the call returns. Blocks that the call commits or frees are used by the work enqueued on it before. The
    copies of the pool, and other streams, wait accordingly. The default is the stream that a sequence used last; for a
    new sequence, the null stream of the device.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
    >>> with kvpool.KVCacheManager(layout, device_blocks=8, device="cpu") as cache:
    ...     first = cache.add_sequence([1, 2, 3, 4, 5, 6])
    ...     cache.commit(first)  # the engine has written the KV of all six
    ...     second = cache.add_sequence([1, 2, 3, 4, 5, 7, 8])
    ...     print(cache.cached_tokens([first, second]), cache.blocks_needed([1, 2, 3, 4, 5, 6, 9]))
    ...     cache.release([first, second])
    ...     print(cache.match_prefix([1, 2, 3, 4, 5, 6, 9]))
    [0 4] 1
    Match(device_tokens=4, host_tokens=0, partial_tokens=2, store_tokens=0)
    """

    def __init__(
        self,
        layout: BlockLayout | None = None,
        *,
        device_blocks: int | Integers,
        host_blocks: int | Integers = 0,
        groups: Sequence[LayerGroup] | None = None,
        tokens_per_block: int | None = None,
        device: str | Device = "auto",
        max_sequences: int = 256,
        max_sequence_tokens: int | None = None,
        window: int | None = None,
        sinks: int = 0,
        partial_reuse: bool = True,
        policy: PolicyName = "lru",
        eviction: EvictionOptions | None = None,
        memory: MemoryOptions | None = None,
        secret: bytes | None = None,
        event_capacity: int = 0,
        clock: Callable[[], int] | None = None,
    ) -> None:
        config = PoolConfig.of(
            layout,
            groups,
            tokens_per_block,
            window,
            sinks,
            device_blocks,
            host_blocks,
            max_sequences=max_sequences,
            max_sequence_tokens=max_sequence_tokens,
            partial_reuse=partial_reuse,
            policy=policy,
            eviction=eviction,
            secret=secret,
            event_capacity=event_capacity,
            clock=clock,
        )
        options = options_argument("memory", memory, MemoryOptions)
        pool_device, owned = get_device(device), not isinstance(device, Device)
        with ExitStack() as ends:
            if owned:
                ends.callback(pool_device.close)
            self._pools = pool_memory(config, pool_device, options)
            ends.callback(self._pools.close)
            core = Core(config, pool_device, pool_states(config, pool_device, options.table))
            ends.pop_all()
        if self._pools.shared:
            core.transfer.forks.lost = "the shared memory of this pool is not in a child of os.fork()"
        super().__init__(core, requests := PromptRequests(core), hints := ClientHints(core, requests))
        self._leases = Leases(core, self._pools)
        self._staging = Staging(pool_device, core.transfer, options.staging_depth)
        self.tables = BlockTables(core, self._staging)
        self._writer, self._reservations = ImportWriter(core, self._pools), Reservations(core, self._pools)
        self.content = CachedContent(core, requests, hints)
        self.imports = Imports(core, requests, self._reservations, self._writer)
        self._loans: WeakSet[Loan] = WeakSet()
        self.memory = PoolMemory(core, self._pools, sharing := Sharing(pool_device, self._pools), self._loans)
        frees = [sharing.close, self._staging.close, self._writer.close, *([pool_device.close] if owned else [])]
        self._shutdown = Shutdown(core, self._leases, self._reservations, self._loans, frees)
        self.tokens_per_block, self.partial_reuse = config.tokens_per_block, config.settings.partial_reuse
        self.device_blocks, self.host_blocks = self._pools.device_blocks, self._pools.host_blocks

    # -- holds on blocks -------------------------------------------------------------------------

    @allowed_inside
    def pin(
        self,
        keys: Keys,
        *,
        owner: str = "",
        tier: Tier | None = None,
        stream: StreamLike = None,
        group: int | None = None,
    ) -> Lease:
        """Pin the blocks of keys, so that they stay readable until the lease is closed.

        Parameters
        ----------
        keys : array_like of uint64, shape (n, 2), or sequence of bytes
            Keys of full blocks, 16 bytes each: ``BlockKeys.keys``.
        owner : str, default ""
            Name of the reader, for ``revoke`` and for people.
        tier : {"device", "host"}, optional
            The tier whose blocks are pinned. By default the host copy of a key where there is one, else its device
            block.
        stream : Stream, int, or stream of another package, optional
            The call returns at once, and work that is enqueued on this stream afterwards can read the blocks. Without a
            stream, the call waits until the host can read the bytes.
        group : int, optional
            The index of a group of layers, which must have all keys. By default the blocks of all groups that have a
            key are pinned. At least one group must have it, and so must every group with attention to all tokens.

        Returns
        -------
        Lease
            The pinned blocks. Close it, or use it in a ``with`` statement.

        Raises
        ------
        BlockNotFound
            For the first key that is missing. Nothing is pinned then.
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool. The call holds no lock while it waits.
        """
        which = tier_number(tier)
        return self._leases.pin(key_rows(keys), None, which, owner, stream, group)

    def find_and_pin_host(
        self, key: Key, *, owner: str = "", stream: StreamLike = None, group: int | None = None
    ) -> Lease | None:
        """Look up the host copy of one key and pin it, in one step.

        Parameters
        ----------
        key : bytes or array_like of uint64, shape (2,)
            The key of a full block, 16 bytes.
        owner : str, default ""
            Name of the reader, for ``revoke`` and for people.
        stream : Stream, int, or stream of another package, optional
            As for ``pin``.
        group : int, optional
            As for ``pin``.

        Returns
        -------
        Lease or None
            The pinned block, or None if the key has no host copy.

        Raises
        ------
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool.
        """
        row = key_row(key)
        try:
            return self._leases.pin(row, None, records.HOST, owner, stream, group)
        except BlockNotFound:
            return None

    def pin_blocks(self, ids: Ids, *, owner: str = "", stream: StreamLike = None) -> Lease:
        """Pin blocks by id. Each must hold content, or be held by a sequence or a lease.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Pool ids: ``groups[g].first_device_block`` plus the id in a block table of group g.
        owner : str, default ""
            Name of the reader, for ``revoke`` and for people.
        stream : Stream, int, or stream of another package, optional
            As for ``pin``.

        Returns
        -------
        Lease
            The pinned blocks. Close it, or use it in a ``with`` statement.

        Raises
        ------
        BlockNotFound
            For the first block that is empty. Nothing is pinned then.
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool. In a block that a sequence is still filling, only the committed tokens can be
        read; the engine writes on after them. If the block is the running state of a recurrent group, which the next
        token overwrites, the lease keeps the block, and the sequence continues in a copy.
        """
        return self._leases.pin(None, id_array("ids", ids), control.ANY_TIER, owner, stream)

    @property
    def leases(self) -> list[Lease]:
        """Open leases, oldest first."""
        with self.core.lock, self.core.changes:
            return self._leases.all

    def revoke(self, owner: str) -> int:
        """Close all leases and abort all reservations of an owner.

        Parameters
        ----------
        owner : str
            The name that ``pin`` or ``reserve`` was given.

        Returns
        -------
        int
            Number of leases and reservations that were ended.

        Raises
        ------
        TypeError
            For an owner that is not a string.
        PoolClosed
            After the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool. The memory may be reused at once: the readers and loaders of the owner must have
        ended, except for the work that they have enqueued on the streams that they named.
        """
        owner = text_argument("owner", owner)
        return self._leases.revoke(owner) + self._reservations.revoke(owner)

    # -- the layers of the pool ------------------------------------------------------------------

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of layers, in the order of the argument. A pool made of a layout has one group."""
        return self.core.config.groups

    @property
    def layout(self) -> BlockLayout:
        """The layout of a pool with one group of one layout.

        Raises
        ------
        ValueError
            For other pools: use ``groups``.
        """
        return self._pools.layout

    # -- the pool as a whole ---------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """Device blocks that an allocation can take now, cached ones included, in a pool with one group.

        Raises
        ------
        ValueError
            In a pool with several groups: use ``free_blocks_per_group``.
        PoolClosed
            After the pool was closed.

        Notes
        -----
        Thread-safe. Changes nothing. Cheap enough for every step.
        """
        with self.core.lock, self.core.changes:
            self.core.check_open()
            if len(self.core.tables) > 1:
                raise ValueError(
                    f"free_blocks: expected free_blocks_per_group in a pool of {len(self.core.tables)} groups"
                )
            return int(verbs.free_device_blocks(self.core.states.groups))

    @property
    def free_blocks_per_group(self) -> Int64s:
        """Device blocks that an allocation can take now in each group, cached ones included: int64[groups].

        Raises
        ------
        PoolClosed
            After the pool was closed.

        Notes
        -----
        Thread-safe. Changes nothing. Cheap enough for every step. The array is the caller's.
        """
        counts = np.empty(len(self.core.tables), np.int64)
        with self.core.lock, self.core.changes:
            self.core.check_open()
            verbs.free_in_groups(self.core.states.groups, counts)
        return counts

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._shutdown.report is not None

    def now(self) -> int:
        """Return the time on the clock of the pool.

        Returns
        -------
        int
            Milliseconds.

        Raises
        ------
        TypeError, ValueError
            If the ``clock`` of the caller returns anything but an int from 0 to 2**42.
        """
        return self.core.now()

    def events(self, *, snapshot: bool = False, since: int | None = None) -> kv_events.Events:
        """Return what has changed in the cache since the last call. Each event is returned once.

        Parameters
        ----------
        snapshot : bool, default False
            Whether to add a "cleared" event, and then "stored" events for all that is cached, parents before their
            children. A reader that starts late, or that has missed events, needs this.
        since : int, optional
            For one of several readers, each of which gets all events: 0 at first, then the ``cursor`` of the last
            result. Calls without ``since`` are not affected.

        Returns
        -------
        Events
            The events, in order, and how many were missed.

        Raises
        ------
        ValueError
            For a snapshot of a pool with ``event_capacity=0``, and for a cursor that the pool has not reached.
        TypeError, PoolClosed
            For an argument of the wrong type; after the pool was closed.

        Notes
        -----
        Thread-safe. The cached content stays as it is. The pool keeps the last ``event_capacity`` rows for all readers
        together, and no state for a reader with ``since``; ``missed`` counts those that it was too late for. Events are
        numbered from the first one of the pool, and the numbers of a snapshot occur again.
        """
        if bool_argument("snapshot", snapshot) and not self.core.states.groups[0, records.H.event_capacity]:
            raise ValueError("snapshot: expected False in a pool that records no events (event_capacity=0), got True")
        if since is not None:
            since = integer_argument("since", since, 0, 1 << 62)
        with self.core.lock, self.core.changes:
            self.core.check_open()
            taken = kv_events.take(self.core.states, self.core.names.known, snapshot, since)
        try:
            return kv_events.decode(taken)
        except BaseException:
            with self.core.lock, self.core.changes:
                kv_events.put_back(self.core.states, taken)
            raise

    def stats(self) -> statistics.Stats:
        """Return a snapshot of the statistics. A closed pool has them too.

        Returns
        -------
        Stats
            The numbers since the pool was made, and those of now.

        Notes
        -----
        Thread-safe. Changes nothing, except that reservations may expire.
        """
        core, deadlines = self.core, self._reservations.deadlines
        now_ms, uploads = core.now() if self._leases.all or deadlines else 0, self._staging.in_flight()
        with core.lock, core.changes:
            self._reservations.expire(now_ms)
            ages = [now_ms - lease.since for lease in self._leases.all]
            late = deadlines.expired, len(deadlines.overdue)
            return statistics.snapshot(core.states, core.tokens, core.transfer, self._pinned(), ages, uploads, late)

    def verify(self) -> None:
        """Check every invariant of the state. This is slow, and meant for tests and diagnosis.

        Raises
        ------
        IntegrityError
            If an invariant does not hold; the message names it.
        PoolClosed
            After the pool was closed.

        Notes
        -----
        Thread-safe. Changes nothing. It also works after the pool has failed.
        """
        with self.core.lock, self.core.changes:
            if self.core.closed:
                self.core.check_open()
            if self.core.changes.torn is None:
                self.core.transfer.collect()  # what an interrupted call has decided and not queued
            verify_states(self.core.states, self._pinned())
            for check, detail in self._staging.findings():
                raise IntegrityError(check, detail)
            if set(self.core.live(records.RESERVED).tolist()) != self._reservations.ids():
                wrong = "the rows that are reserved are not those of the open reservations"
                raise IntegrityError("reservations", wrong)

    def _pinned(self) -> Int64s:
        """The blocks that leases and imports hold, once for each pin. The caller holds the state lock."""
        return np.concatenate([self._writer.pinned, *self._leases.pinned()])

    def clear(self, force: bool = False) -> None:
        """Drop all content of both tiers. Pinned blocks stay readable.

        Parameters
        ----------
        force : bool, default False
            Whether to release live sequences and abort open reservations. Their loaders must not write any more.

        Raises
        ------
        PoolBusy
            While sequences live or reservations are open, without ``force``.
        TypeError, PoolClosed
            For a bad argument; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool. It does not change stores: see ``StorageManager.clear``.
        """
        force, now_ms = bool_argument("force", force), self.core.now()

        def named() -> tuple[Any, ...]:
            live, reserved = self.core.live(records.LIVE | records.SWAPPED), self.core.live(records.RESERVED)
            if len(reserved) and not force:
                held = f"{counted(len(live), 'live sequence')} and {counted(len(reserved), 'open reservation')}"
                raise PoolBusy(f"the pool has {held}: end them, or clear(force=True)")
            if len(live) and not force:
                raise PoolBusy(
                    f"the pool has {counted(len(live), 'live sequence')}: release them, or clear(force=True)"
                )
            return np.concatenate([live, reserved]), now_ms

        self.core.decide(None, verbs.reset, ids=None, first=named, finish=lambda _: self._reservations.clear(now_ms))

    def exclusive(self) -> AbstractContextManager[None]:
        """Return a context manager for calls of this thread that no call of another thread interleaves with.

        Each call in the block is done or refused by itself, as elsewhere, and sees the effects of those before it.
        Allowed are ``match_prefix``, ``pin`` with a ``stream``, ``Lease.close``, ``add_sequence``,
        ``add_sequence_batch`` without ``loads``, ``append_tokens``, ``commit`` and ``release``. Any other call raises
        RuntimeError and changes nothing, even one of a destructor.

        Returns
        -------
        context manager
            For one ``with`` statement. Entering it raises PoolClosed, and RuntimeError inside another call or another
            block of this pool. Its end raises BlockNotFound if the device has refused a copy for a lease, which is
            closed then.

        Notes
        -----
        Thread-safe. Changes the pool. No copy is enqueued before the end of the block: until then, do not use on the
        device what its calls return; ``Lease.addresses`` raises RuntimeError. The end enqueues all copies in order,
        even after an exception in the block.

        The block holds the state lock, and other threads that call this pool wait, so keep it short: hash prompts
        before it (``block_keys``), and wait for nothing in it: no thread, lock, device, I/O or other pool. The clock is
        read once, before it.

        Examples
        --------
        >>> import kvpool
        >>> layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
        >>> with kvpool.KVCacheManager(layout, device_blocks=4, device="cpu") as cache:
        ...     done = cache.add_sequence(range(12))
        ...     with cache.exclusive():
        ...         cache.commit(done)
        ...         cache.release(done)
        ...         sequence = cache.add_sequence(range(16))
        ...     print(cache.cached_tokens(sequence))
        ...     cache.release(sequence)
        12
        """
        return Exclusive(self.core, self._leases.settle)

    def close(self, force: bool = False) -> CloseReport:
        """Free all memory. Later calls raise PoolClosed, except ``stats`` and ``close``.

        Parameters
        ----------
        force : bool, default False
            Whether to close although arrays made of exports live. Their memory stays until they are gone, but the pool
            no longer orders accesses to it.

        Returns
        -------
        CloseReport
            What was still held.

        Raises
        ------
        PoolBusy
            While arrays that were made of exports live, without ``force``. Nothing has changed then.
        TypeError
            For a bad argument.

        Warns
        -----
        ResourceWarning
            If sequences, leases or reservations were still held. Everything is freed by then.

        Notes
        -----
        Thread-safe. The end of a ``with`` block does the same with ``force=True``.
        """
        return self._close(bool_argument("force", force), 4)

    def __exit__(self, kind: object = None, *error: object) -> None:
        try:
            self._close(True, 4)
        except ResourceWarning:  # the interpreter has been told to raise it
            if kind is None:
                raise

    def _close(self, force: bool, stacklevel: int) -> CloseReport:
        was_open = not self.closed
        report = self._shutdown.close(force)
        if was_open:
            self._shutdown.warn("closed", stacklevel)
        return report

    def __del__(self) -> None:
        if "_shutdown" in vars(self) and not self.closed:
            self._shutdown.warn("never closed, and dropped", 3)


# Python names a function in its own messages, such as those of unknown arguments: by the class that users know.
for _base in KVCacheManager.__mro__:
    for _name, _member in vars(_base).items():
        if isinstance(_member, FunctionType) and _member.__module__.startswith("kvpool.pool.") and _name[0] != "_":
            _member.__qualname__ = f"KVCacheManager.{_name}"
