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
    """A paged KV cache in two tiers: device blocks, and host blocks that take what leaves the device.

    Parameters
    ----------
    layout : shape and bytes of a block, for a model whose layers all keep the same.
    groups : a list of ``LayerGroup`` in place of a layout, for a model whose layers keep different blocks. Each call
        acts on all groups or on none. A prefix is reused as far as every group can. Calls about the blocks of one group
        take ``group=``, the index of that group; with several groups it must be given.
    device_blocks, host_blocks : capacities; with groups, a list with one for each (see ``split_blocks``). Ids [0,
        device_blocks) are device blocks, the rest host blocks.
    tokens_per_block : only for a pool whose groups are all recurrent. Other pools have it in their layouts.
    device : "auto" (a GPU where there is one), "cpu", "cuda", "sim", or a ``kvpool.device.base.Device`` that serves no
        other pool.
    max_sequences, max_sequence_tokens : bounds of what lives at once. They size the block table. Default: 256 sequences
        of as many tokens as fit on the device, at most 262,144. ``max_sequence_tokens`` also bounds the tokens of an
        encoder.
    partial_reuse : also reuse the first tokens of a block that matches in part, by copying them.
    offload_min_priority, offload_min_reuse : evicted content with a lower priority, or with fewer uses, is forgotten
        instead of offloaded.
    secret : 16 to 64 bytes that key the hash of content; random by default. Pools with the same secret have the same
        keys.
    event_capacity : blocks whose events are kept until ``events`` is called. 0 (default) records none.
    window, sinks : sliding-window attention in all layers. A token sees the last ``window`` tokens, itself included,
        and the first ``sinks`` tokens of the sequence. ``commit`` gives back blocks that no later token sees, and
        leaves -1 in the block table. A prefix is reused if what the next token sees of it is cached. A sequence may
        then be longer than the device has room for, up to ``max_sequence_tokens``. None: a token sees all tokens before
        it.
    clock : () -> int, monotonic milliseconds from 0 to 2**42.
    policy : which cached block is evicted next, among those of the default priority. ``"lru"``: the one
        that was not used for longest. ``"reuse"``: of the conversation that comes back least, as those of its length
        and as many turns do; its end goes first. ``"agent"``: the same, by the pauses that the conversation itself has
        made, and by the ``stop`` that ``release`` is told. ``"adaptive"``: one of these, whichever would have hit more
        lately. All but ``"lru"`` heed ``ends`` and ``returns_in_ms`` of ``release``. With a recurrent group,
        ``"reuse"`` and ``"agent"`` are refused, and ``"adaptive"`` is ``"lru"``.
    history_bytes : memory in which a pool notes what is gone and why, for ``explain``: 16 bytes for each of the last
        contents, whose number is a power of two. 0: none.
    staging_depth : block tables that may be on their way to the device on one stream. One more waits for the oldest on
        that stream.
    device_memory, host_memory : memory of the caller's for a tier: an array of any package, C-contiguous, writable, of
        exactly the tier's bytes, at a multiple of 64; or a function (nbytes, alignment) that returns one. The pool
        keeps it until it is closed, and nobody else writes it until then. Its content at the start does not matter.
        With several groups or layouts: a list with one for each layout, group after group; a function is called for
        each. On the cuda device, host memory that CUDA reports as pinned is used as it is and must stay pinned until
        the pool is closed; other host memory is registered until then.
    shared : put tiers in main memory where other processes can attach them, see ``share``. In a forked child, calls of
        such a pool raise ForkedProcess, and touching its memory ends the child.
    table : memory of the caller's for the persistent block table: C-contiguous NumPy int32[max_sequences, columns],
        with several groups int32[groups, max_sequences, columns]; ``columns`` is ``max_sequence_tokens`` in blocks. It
        may be some rows of a larger array whose other rows are another model's. The pool fills it with -1, writes it
        while it lives, and keeps it alive. Nobody else writes these rows.

    Attributes
    ----------
    content : cached content that a prompt, keys or a namespace names: see ``CachedContent``.
    imports : KV that comes from elsewhere: see ``Imports``.
    memory : the arrays of both tiers, and their exports to other packages and processes: see ``PoolMemory``.
    tables : tables of live sequences for kernels, and their uploads: see ``BlockTables``.

    All methods are thread-safe. A call that raises has changed nothing.

    Name the engine's ``stream`` in calls that take one. Work that you enqueue on it after the call may use what the
    call hands out. What the call commits or gives back is what you enqueued on it before. The pool's copies and other
    streams wait accordingly. The default is the stream that a sequence used last; for a new sequence, the device's null
    stream.

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
        """Pin the block of each key on ``tier``, or (None) its host copy where there is one, else its device block.

        With several groups of layers, it pins the blocks of all groups that have the key. At least one must have it,
        and every group with attention to all tokens must. With ``group``, it pins those of that group alone, which must
        have all keys. Without a ``stream``, the call waits, without a lock, until
        the host can read the bytes. With a ``stream`` it returns at once, and work that is enqueued there later waits.
        Raises BlockNotFound, naming the first key that is missing, with nothing pinned; DeviceError.
        """
        which = tier_number(tier)
        return self._leases.pin(key_rows(keys), None, which, owner, stream, group)

    def find_and_pin_host(
        self, key: Key, *, owner: str = "", stream: StreamLike = None, group: int | None = None
    ) -> Lease | None:
        """Pin the host copy of one key (16 bytes or uint64[2]), or None if it has none. Finding and pinning are one
        step.

        Readiness and ``group`` are as for ``pin``.
        """
        row = key_row(key)
        try:
            return self._leases.pin(row, None, records.HOST, owner, stream, group)
        except BlockNotFound:
            return None

    def pin_blocks(self, ids: Ids, *, owner: str = "", stream: StreamLike = None) -> Lease:
        """Pin blocks by id; each must hold content or be held. Raises BlockNotFound with nothing pinned.

        Ids are pool ids: ``groups[g].first_device_block`` + the id in a table of group g. The call waits as ``pin``
        does. Of a block that a sequence is still filling, only the committed tokens can be read; the engine goes on
        writing after them. Of a running state, which the next token overwrites, the lease keeps the block, and the
        sequence continues in a copy.
        """
        return self._leases.pin(None, id_array("ids", ids), control.ANY_TIER, owner, stream)

    @property
    def leases(self) -> list[Lease]:
        """Open leases, oldest first."""
        with self.core.lock, self.core.changes:
            return self._leases.all

    def revoke(self, owner: str) -> int:
        """Close all leases and abort all reservations of an owner that is gone; returns how many.

        The memory may be reused at once. So its readers must not read and its loaders must not write any more, except
        for what they have enqueued on the streams that they named. Changes the pool. Thread-safe.
        """
        owner = text_argument("owner", owner)
        return self._leases.revoke(owner) + self._reservations.revoke(owner)

    # -- the layers of the pool ------------------------------------------------------------------

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of layers in the order of the argument. A pool made of a layout has one group."""
        return self.core.config.groups

    @property
    def layout(self) -> BlockLayout:
        """The layout of a pool with one group of one layout. ValueError for other pools, which have ``groups``."""
        return self._pools.layout

    # -- the pool as a whole ---------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """Device blocks that can be taken now, with those that are cached, in a pool with one group.

        Cheap enough for every step. Thread-safe; changes nothing. Raises PoolClosed, and ValueError if there are several
        groups.
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
        """The same for each group: int64[groups]."""
        counts = np.empty(len(self.core.tables), np.int64)
        with self.core.lock, self.core.changes:
            self.core.check_open()
            verbs.free_in_groups(self.core.states.groups, counts)
        return counts

    @property
    def closed(self) -> bool:
        return self._shutdown.report is not None

    def now(self) -> int:
        """Milliseconds on the pool's clock. Raises TypeError or ValueError if the clock returns anything else."""
        return self.core.now()

    def events(self, *, snapshot: bool = False, since: int | None = None) -> kv_events.Events:
        """What has changed in the cache since the last call. Each event is returned once.

        ``snapshot=True`` adds one "cleared" event and then "stored" events for all that is cached now, parents before
        their children. A reader that starts late, or that has lost events, needs this.

        ``since``: for one of several readers, each of which gets all events. 0 at first, then the ``cursor`` of what
        this reader got last. The pool keeps the last ``event_capacity`` rows for all of them, and nothing for a reader;
        ``missed`` says how many came too late for it. Other calls, with ``since`` and without, get what they would have
        got. Numbers count from the first event of the pool, and those of a snapshot come again.

        Thread-safe; the cache stays as it is. Raises ValueError for a snapshot of a pool with ``event_capacity=0``, and
        for a cursor that the pool has not reached; TypeError, PoolClosed.
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
        """A snapshot; also of a closed pool. Thread-safe; changes nothing, except that reservations may expire."""
        core, deadlines = self.core, self._reservations.deadlines
        now_ms, uploads = core.now() if self._leases.all or deadlines else 0, self._staging.in_flight()
        with core.lock, core.changes:
            self._reservations.expire(now_ms)
            ages = [now_ms - lease.since for lease in self._leases.all]
            late = deadlines.expired, len(deadlines.overdue)
            return statistics.snapshot(core.states, core.tokens, core.transfer, self._pinned(), ages, uploads, late)

    def verify(self) -> None:
        """Check every invariant of the state; also where the pool has failed. Slow. Raises IntegrityError, which names
        the one that does not hold; PoolClosed."""
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
        """Forget all content. Pinned blocks stay readable.

        Raises PoolBusy while sequences live or reservations are open. ``force=True`` releases and aborts them; their
        loaders must not write any more.
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
        """Make a block of calls of this thread, with no call of another thread between them::

            with cache.exclusive():
                cache.commit(done)
                cache.release(done)
                sequence = cache.add_sequence(prompt)

        Returns a context manager for one block. Each call in it is done or refused by itself, as elsewhere, and sees
        the effects of those before it. Allowed are ``match_prefix``, ``pin`` with a ``stream``, ``Lease.close``,
        ``add_sequence``, ``add_sequence_batch`` without ``loads``, ``append_tokens``, ``commit`` and ``release``. Any
        other call raises RuntimeError, names itself, and changes nothing; so does a destructor's.

        No copy is enqueued before the end of the block. Until then, do not use on the device what its calls hand out;
        ``Lease.addresses`` raises RuntimeError. The end enqueues all copies in order, even after an exception in the
        block. It closes each lease whose copy the device refuses, and raises BlockNotFound, unless the block has
        raised.

        Notes
        -----
        The block holds the state lock. Other threads that call this pool wait meanwhile, so keep it short: hash
        prompts before it (``block_keys``), and wait for nothing in it: no thread, no lock, no device, no I/O, no other
        pool. The clock is read once, before it. Changes the pool; thread-safe. Entering it raises PoolClosed, and
        RuntimeError inside another call or another block of this pool.
        """
        return Exclusive(self.core, self._leases.settle)

    def close(self, force: bool = False) -> CloseReport:
        """Free all memory; returns what was still held. Later calls raise PoolClosed, except ``stats`` and ``close``.

        Warns with ResourceWarning, once everything is freed, if sequences, leases or reservations were still held.
        Raises PoolBusy, with nothing changed, while arrays that were made of exports live. With ``force=True`` it
        closes, and their memory stays until they are gone, but the pool no longer orders accesses to it.
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
