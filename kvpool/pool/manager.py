"""KVCacheManager: the public calls of a pool. Those about prompts and block tables are those of its base classes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import FunctionType
from typing import Any, NamedTuple, overload
from weakref import WeakSet

import numpy as np

from kvpool.common.arguments import (
    Ids,
    Integers,
    Namespace,
    address,
    bool_argument,
    count_array,
    each_argument,
    id_array,
    int64_array,
    is_integer,
    list_argument,
    namespace_argument,
    priority_argument,
    returns_argument,
    split_argument,
    stop_argument,
    text_argument,
    token_array,
    ttl_argument,
)
from kvpool.common.arrays import Array, Bools, Int32s, Int64s
from kvpool.common.arrays.layout import BlockLayout, integer_argument
from kvpool.common.arrays.strided import in_numpy
from kvpool.common.errors import (
    BlockNotFound,
    DeviceError,
    IntegrityError,
    KVPoolError,
    OutOfSequences,
    PoolBusy,
    counted,
)
from kvpool.common.process import Closing
from kvpool.device import get_device
from kvpool.device.base import Device, DeviceArray, StreamLike, tier_argument
from kvpool.device.memory.attachments import SharedTier, Sharing
from kvpool.device.memory.export import Export, Lending, Loan, TierPlace
from kvpool.pool import events as kv_events
from kvpool.pool import stats as statistics
from kvpool.pool.block_tables import BlockTables
from kvpool.pool.config import Group, LayerGroup, PoolConfig
from kvpool.pool.core import MAX_MS, Core, pool_memory, pool_states
from kvpool.pool.exclusive import Exclusive, allowed_inside
from kvpool.pool.explain import Explanation, explained
from kvpool.pool.hints import Hints, name_argument
from kvpool.pool.keys import (
    BlockKeys,
    Key,
    Keys,
    MissingBlocks,
    Prompt,
    is_keys,
    key_row,
    key_rows,
    request_of,
    tier_number,
)
from kvpool.pool.leases import Lease, Leases
from kvpool.pool.prompts import Retention
from kvpool.pool.reservations import Imports, LoadTarget, Reservation, Reservations, block_buffer
from kvpool.pool.tables.staging import Staging
from kvpool.state import control, index, records, swaps, verbs
from kvpool.state.sequences import check_ids
from kvpool.state.verify import verify_states

NO_COUNTS: Int64s = np.empty(0, np.int64)


class CloseReport(NamedTuple):
    """What was still held when a pool was closed: sequence ids, and (owner, age in ms) of open leases and
    reservations."""

    sequences: list[int]
    leases: list[tuple[str, int]]
    reservations: list[tuple[str, int]]


class KVCacheManager(Hints, BlockTables, Closing):
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
        partial_reuse: bool = True,
        offload_min_priority: int = 30,
        offload_min_reuse: int = 1,
        secret: bytes | None = None,
        event_capacity: int = 0,
        clock: Callable[[], int] | None = None,
        staging_depth: int = 8,
        device_memory: object = None,
        host_memory: object = None,
        table: object = None,
        window: int | None = None,
        sinks: int = 0,
        shared: bool = False,
        policy: str = "lru",
        history_bytes: int = 65536,
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
            offload_min_priority=offload_min_priority,
            offload_min_reuse=offload_min_reuse,
            secret=secret,
            event_capacity=event_capacity,
            policy=policy,
            staging_depth=staging_depth,
            clock=clock,
            history_bytes=history_bytes,
        )
        pool_device, owned = get_device(device), not isinstance(device, Device)
        with ExitStack() as ends:
            if owned:
                ends.callback(pool_device.close)
            self._pools = pool_memory(config, pool_device, device_memory, host_memory, bool_argument("shared", shared))
            ends.callback(self._pools.close)
            core = Core(config, pool_device, pool_states(config, pool_device, table))
            ends.pop_all()
        self._owns_device = owned
        if self._pools.shared:
            core.transfer.forks.lost = "the shared memory of this pool is not in a child of os.fork()"
        super().__init__(core)
        self._leases = Leases(core, self._pools)
        self._staging = Staging(pool_device, core.transfer, config.staging_depth)
        self._imports, self._reservations = Imports(core, self._pools), Reservations(core, self._pools)
        self._loans: WeakSet[Loan] = WeakSet()
        self._sharing = Sharing(pool_device, self._pools)
        self._report: CloseReport | None = None
        self._closing, self._freed = threading.RLock(), False
        core.transfer.forks.guard(self, "_closing")
        self.tokens_per_block, self.partial_reuse = config.tokens_per_block, config.settings.partial_reuse
        self.device_blocks, self.host_blocks = self._pools.device_blocks, self._pools.host_blocks

    # -- sequences -------------------------------------------------------------------------------

    @allowed_inside
    def append_tokens(
        self, ids: Ids, tokens: Integers, counts: Ids | None = None, *, stream: StreamLike = None
    ) -> None:
        """Grow sequences: sequence ``ids[i]`` gets the next ``counts[i]`` of ``tokens``. Changes the pool.

        ``counts`` is required with several ids, even if each gets one token. With one id, the default is all of
        ``tokens``. Takes blocks as needed, for all sequences or for none. A last block that forks share is copied
        before it is written; its last holder needs no copy.

        Raises OutOfBlocks, after which the call may succeed once others have left. Raises ValueError if one of the
        sequences needs more blocks than the pool has, so that it would not fit alone either; with a window or
        recurrent layers, it may fit in parts, each committed before the next. Raises UnknownSequence, DeviceError,
        ValueError, TypeError. The pool is as before the call then.
        """
        which, new = id_array("ids", ids), token_array("tokens", tokens, empty=True)
        if counts is None and len(which) != 1:
            raise ValueError(f"counts: expected one for each of {len(which)} ids, got None")
        each = id_array("counts", len(new)) if counts is None else count_array("counts", counts, which)
        self.core.decide(stream, verbs.append, which, each, new, self.core.now(), ids=which)

    @allowed_inside
    def commit(self, ids: Ids, counts: Ids | None = None, *, stream: StreamLike = None) -> None:
        """Say that the KV of the first ``counts[i]`` tokens of each sequence is written (default: of all), and publish
        full blocks.

        ``counts`` never fall: use ``rewind`` to drop tokens. With a window, the call gives back blocks that no later
        token sees. In a recurrent group it gives back states that the committed tokens have passed. These blocks are
        written again only after the work that is enqueued on the stream, so enqueue the kernels that read them before
        this call. Changes the pool.

        Raises UnknownSequence, DeviceError, ValueError.
        """
        which = id_array("ids", ids)
        each = NO_COUNTS if counts is None else count_array("counts", counts, which)
        self.core.decide(stream, verbs.commit, which, each, self.core.now(), ids=which)

    def rewind(self, ids: Ids, counts: Ids, *, stream: StreamLike = None) -> None:
        """Drop the last ``counts[i]`` tokens of each sequence. A block that others hold is copied, never written.
        Changes the pool.

        Raises OutOfBlocks (for such copies), UnknownSequence, DeviceError, ValueError. It is also a ValueError if the
        shorter sequence would need blocks of a window, or a recurrent state, that were given back; tokens that were not
        committed can always be dropped.
        """
        which = id_array("ids", ids)
        each = count_array("counts", counts, which)
        self.core.decide(stream, verbs.rewind, which, each, self.core.now(), ids=which)

    @allowed_inside
    def release(
        self,
        ids: Ids,
        *,
        store: bool = True,
        stream: StreamLike = None,
        stop: str | None = None,
        ends: bool = False,
        returns_in_ms: int | None = None,
        session: str | None = None,
    ) -> None:
        """End sequences, and give their blocks back, the last block first.

        What was committed stays reusable until it is evicted. With ``store=False``, what these sequences computed is
        forgotten, except for blocks that a window gave back earlier. Changes the pool. Raises UnknownSequence,
        ValueError, TypeError.

        What the policies other than ``lru`` can use, if the engine knows it: ``stop``, why the model stopped
        (``"tool_use"`` or ``"end_turn"``); ``ends=True``, no request will continue these sequences; ``returns_in_ms``,
        in how many milliseconds the next one will. What is not true costs hits, and nothing else. ``session``: a name
        of 1 to 256 characters by which ``hints`` finds what the one sequence has now. It is remembered as ``keys_of``
        gives it, and raises what that raises; sessions that were named long ago are forgotten.
        """
        which, verb, how = _release_arguments(ids, store, stop, ends, returns_in_ms)
        name = None if session is None else name_argument("session", session)
        if name is not None and len(which) != 1:
            raise ValueError(f"session: expected None with {counted(len(which), 'sequence')}, got {name!r:.80}")
        left = None if name is None else self.keys_of(which)[0]
        self.core.decide(stream, verb, which, *how, self.core.now(), ids=which)
        if name is not None and left is not None:
            self._remember(name, left)

    def swap_out(self, ids: Ids, *, stream: StreamLike = None) -> int:
        """Move running sequences to the host, with all that they have. They wait there. Returns how many blocks were
        copied.

        Content that is not committed moves too: unfull blocks, drafts, running states, the encoder's tokens. Content
        that the host has already is not copied. A block that others use stays on the device for them; the other device
        blocks are free afterwards. The host blocks are held until ``resume`` or ``release``. Until then, these two are
        the only calls that accept the sequences. Each keeps its id, and takes one of ``max_sequences``. Changes the
        pool.

        ``stream``: the copies read what was enqueued on it before (default: the stream that a sequence used last).
        Thread-safe. Raises OutOfBlocks with ``tier`` "host" if the host has no room: nothing has changed then, and the
        sequences can be released instead. Raises UnknownSequence, DeviceError, ValueError.
        """
        which = id_array("ids", ids)
        return int(self.core.decide(stream, swaps.swap_out, which, self.core.now(), ids=which))

    def resume(self, ids: Ids, *, stream: StreamLike = None) -> int:
        """Have sequences that were swapped out run again, with all that they had. Returns how many blocks were copied.

        Content that is still on the device, or is there again, is not copied. The block table has other ids than
        before. Forks that are resumed in one call share what they shared. A fork that is resumed alone has blocks of
        its own. Changes the pool.

        ``stream``: where the engine continues with the sequences (default: the stream that each used last).
        Thread-safe. Raises OutOfBlocks with nothing changed, UnknownSequence, DeviceError (even if the device refused a
        copy to the host: release the sequence), ValueError.
        """
        which = id_array("ids", ids)
        return int(self.core.decide(stream, swaps.resume, which, self.core.now(), ids=which))

    def evictable_after_release(self, ids: Ids, group: int | None = None) -> int:
        """Device blocks that would become free if these sequences were released together.

        ``group``: the index of a group of layers, required where there are several. Does not change the pool.
        """
        which, g = id_array("ids", ids), self.core.config.group(group)
        with self.core.lock, self.core.changes:
            named = self.core.tables[g][self.core.rows(which)]
            blocks, times = np.unique(named[named != records.NONE], return_counts=True)
            return int(np.count_nonzero(self.core.states[g].blocks["ref_word"][blocks] == times))

    def fork(self, ids: Ids, n: int = 1, *, stream: StreamLike = None) -> Int64s:
        """Make sequences that continue a live one, ``n`` of each: int64[n] ids, or int64[m, n] for m ids.

        Changes the pool. Takes no blocks: all are shared, also a last block that is not full. A sequence that appends
        to that block, or rewinds into it, gets a copy, which ``append_tokens`` and ``blocks_needed`` count. The last
        holder writes in place. Each fork takes one of ``max_sequences``, and is committed, grown and released like any
        sequence. Write the KV of shared tokens that are not committed yet once, for all that share them, and before one
        of them appends.

        ``stream``: where the forks will be used (default: the parent's). It waits for what the parent was used for so
        far.
        Thread-safe. Raises OutOfSequences, UnknownSequence (also for reservations, which cannot be forked),
        DeviceError, ValueError, TypeError.
        """
        which, count = id_array("ids", ids), integer_argument("n", n, 0, 1 << 24)
        if len(which) * count > len(self.core.tokens.sequences):
            # It is refused in any case, so nothing is allocated for it.
            self.core.use(stream, _refuse_forks, which, len(which) * count, ids=which)
        out = np.full((len(which), count), records.NONE)
        self.core.decide(stream, verbs.fork, which, out, ids=which)
        return out[0] if is_integer(ids) else out

    def reorder(self, ids: Ids, parents: Ids, *, store: bool = False, stream: StreamLike = None) -> None:
        """The step of a beam search: sequence ``ids[i]`` continues what ``ids[parents[i]]`` has now, all at once.

        Changes the pool. ``parents``: int64[n], places in ``ids``. A parent that several name is shared by them, as
        ``fork`` shares. What no sequence names is given back as by ``release(store=store)``. Ids and their rows in
        block tables stay. Lengths, committed and cached tokens become the parent's; so does the stream, unless
        ``stream`` names another. Takes no blocks. One call takes several groups of beams.

        Thread-safe. Raises UnknownSequence, DeviceError, ValueError, TypeError.
        """
        which = id_array("ids", ids)
        places = each_argument("parents", parents, len(which), highest=len(which) - 1)
        before = np.empty((len(which), records.SEQUENCE.itemsize), np.uint8)
        scratch, kept = np.zeros((3, len(which)), np.int64), bool_argument("store", store)
        now_ms = self.core.now()
        self.core.decide(stream, verbs.reorder, which, places, kept, now_ms, address(before), scratch, ids=which)

    def accept_drafts(
        self, ids: Ids, drafts: Ids, accepted: Integers, counts: Ids | None = None, *, stream: StreamLike = None
    ) -> None:
        """Keep those of the last ``drafts[i]`` tokens of each sequence that the model accepted; drop the others.

        Changes the pool. ``accepted``: int[sum of counts]. For one sequence after the other, it has ``counts[i]``
        indices among the drafts (0 is the first), in rising order. With one id, all indices are for that sequence. A
        path through a tree of drafts is in rising order if parents were appended before their children. The accepted
        tokens then follow the text directly: their ids and their KV are moved, across blocks, in all layers and planes.
        Drafts are tokens that are not committed.

        The move is enqueued on the engine's stream that has written the drafts. It is one launch for each stream of the
        call, or several on a GPU if very many tokens move. If the accepted drafts are the first ones, nothing moves, as
        in ``rewind``. A block that others hold is copied, never written. States of recurrent groups are not moved: see
        ``state_blocks``.

        Raises OutOfBlocks (for such copies), UnknownSequence, DeviceError, ValueError, TypeError. Thread-safe.
        """
        which = id_array("ids", ids)
        tails, path = count_array("drafts", drafts, which), int64_array("accepted", accepted)
        each = split_argument(counts, which, "accepted", path)
        self.core.decide(
            stream, verbs.accept_drafts, which, tails, path, each, tails - each, self.core.now(), ids=which
        )

    @overload
    def cached_tokens(self, ids: int | np.integer[Any]) -> int: ...
    @overload
    def cached_tokens(self, ids: Integers) -> Int32s: ...
    def cached_tokens(self, ids: Ids) -> int | Int32s:
        """Tokens that each sequence reused when it was added: int for one id, int32[n] for several."""
        return self._field("cached", ids)

    @overload
    def sequence_length(self, ids: int | np.integer[Any]) -> int: ...
    @overload
    def sequence_length(self, ids: Integers) -> Int32s: ...
    def sequence_length(self, ids: Ids) -> int | Int32s:
        """Tokens of each sequence."""
        return self._field("length", ids)

    @overload
    def committed_tokens(self, ids: int | np.integer[Any]) -> int: ...
    @overload
    def committed_tokens(self, ids: Integers) -> Int32s: ...
    def committed_tokens(self, ids: Ids) -> int | Int32s:
        """Leading tokens of each sequence whose KV is written."""
        return self._field("committed", ids)

    def request_stats(self, ids: Ids) -> statistics.RequestStats:
        """What live sequences have reused, computed, decoded, dropped and computed in vain: see ``RequestStats``.

        Call it before ``release``. Thread-safe; changes nothing. Raises UnknownSequence, DeviceError, TypeError,
        ValueError.
        """
        which = id_array("ids", ids)
        with self.core.lock, self.core.changes:
            figures = statistics.requests(self.core, self.core.rows(which))
        return statistics.RequestStats(*(int(figure[0]) for figure in figures)) if is_integer(ids) else figures

    def _field(self, name: str, ids: Ids) -> Any:
        which = id_array("ids", ids)
        with self.core.lock, self.core.changes:
            values = self.core.tokens.sequences[name][self.core.rows(which)]
        return int(values[0]) if is_integer(ids) else values

    # -- holds on blocks -------------------------------------------------------------------------

    @allowed_inside
    def pin(
        self,
        keys: Keys,
        *,
        owner: str = "",
        tier: str | None = None,
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
    def sequences(self) -> list[int]:
        """The ids of live sequences, those that are swapped out included. Thread-safe. Raises PoolClosed."""
        with self.core.lock, self.core.changes:
            self.core.check_open()
            return self.core.live(records.LIVE | records.SWAPPED).tolist()

    @property
    def leases(self) -> list[Lease]:
        """Open leases, oldest first."""
        with self.core.lock, self.core.changes:
            return self._leases.all

    def reserve(
        self,
        prompt: Prompt,
        *,
        owner: str = "",
        retention: Retention | None = None,
        stream: StreamLike = None,
        encoder_tokens: int | None = None,
        deadline_ms: int | None = None,
    ) -> Reservation:
        """Take device blocks for the KV of a prompt that a loader, of this process or another, brings from elsewhere.
        Changes the pool.

        What the pool already has of the prompt is held (and onboarded), as for a sequence. The loader must not write
        it. Nobody finds the rest before ``Reservation.commit``. ``stream``: the loader's. Without one, the call waits,
        without a lock, until nothing that is enqueued touches the blocks. Then anybody may write to them, from any
        process and stream.

        ``owner`` names the loader, for ``revoke`` and for people. ``retention`` and ``encoder_tokens`` are as in
        ``add_sequence``; ``encoder_tokens=0`` takes no blocks for cross attention, which a commit never publishes. A
        reservation takes one of ``max_sequences``, and counts as no reuse in the statistics.

        The reservation expires ``deadline_ms`` after this call (None, the default: never). If it was not committed by
        then, ``commit`` is refused, and it counts in ``stats`` as expired. Its blocks stay out of use until ``abort``
        or ``revoke``, since the loader may still write them. There is no thread: deadlines are checked by each call
        that ends a reservation, by ``Reservation.overdue`` and by ``stats``.

        Thread-safe. Raises OutOfBlocks, OutOfSequences, DeviceError, ValueError, TypeError.
        """
        ranges = None if retention is None else [retention]
        (keys,), row, *_ = arrivals = self._arrivals(
            [prompt], ranges, records.DEFAULT_PRIORITY, None, False, encoder_tokens
        )
        row[0, records.R.reserves] = 1
        for why in self._refused([keys], row).values():
            raise ValueError(f"prompt: {why}")
        lifetime = None if deadline_ms is None else ttl_argument("deadline_ms", deadline_ms)
        return self._reservations.take(arrivals, text_argument("owner", owner), stream, lifetime)

    @property
    def reservations(self) -> list[Reservation]:
        """Open reservations, oldest first."""
        return self._reservations.all

    def load_targets(self, ids: Ids, *, stream: StreamLike = None) -> list[LoadTarget]:
        """Where a store may write for live sequences, in place of the engine: all tokens after the committed ones.

        ``stream``: the loader's, on which these sequences are used from now on. Without one, the call waits as
        ``reserve`` does. Then call ``commit`` for the tokens that came: with the loader's stream, or when the bytes are
        there. The engine continues with ``block_table(ids, stream)``, or any other call that names its own stream.
        Changes nothing else. Thread-safe as long as nobody else changes these sequences. Raises UnknownSequence,
        DeviceError, ValueError, TypeError.
        """
        return self._reservations.load_targets(id_array("ids", ids), stream)

    def import_blocks(
        self,
        prompt: BlockKeys,
        data: Sequence[Any],
        *,
        first: int = 0,
        priority: int = records.DEFAULT_PRIORITY,
        group: int | None = None,
    ) -> int:
        """Store the KV of full blocks ``first``, ``first + 1``, ... of a prompt on the host, so that the next request
        with it hits.

        ``data``: for each block a buffer or array of ``layout.block_bytes``, laid out as a block of ``host_pool``. The
        keys are the prompt's, which this pool computed. Blocks that are cached already are skipped. The call stops
        where the host has no room, and returns how many blocks were stored. Nobody finds a block while it is being
        written. If the pool is reset meanwhile, nothing is stored. The call waits, without a state or transfer lock,
        for copies out of the memory that it takes, and for other imports.

        ``group``: the index of a group of layers, required where there are several. A request hits once all groups have
        what they need of a prefix. A buffer has ``groups[group].block_bytes``: the block in ``host_pools[group][0]``,
        then the block in the next part. In a recurrent group, block i is the state after the i-th full block. Groups
        for cross attention are refused. Thread-safe; changes the pool. Raises TypeError, ValueError, PoolClosed,
        DeviceError.
        """
        if not isinstance(prompt, BlockKeys):
            raise TypeError(f"prompt: expected the BlockKeys of this pool, got {prompt!r:.80}")
        keys, into = self._keys_of(prompt), self.core.config.groups[self.core.config.group(group)]
        if into.kind == "cross":
            raise ValueError(
                f"group: expected one that is not for cross attention, whose content nobody finds, got {into.index}"
            )
        first = integer_argument("first", first, 0, (1 << 31) - 1)
        priority = priority_argument("priority", priority)
        buffers = [block_buffer(i, buffer, into.block_bytes) for i, buffer in enumerate(list_argument("data", data))]
        full = len(keys) // self.tokens_per_block
        if first + len(buffers) > full:
            raise ValueError(
                f"data: expected blocks of the prompt's {full} full ones, got {len(buffers)} from first={first} on"
            )
        return self._imports.store(into, keys, first, priority, buffers)

    def revoke(self, owner: str) -> int:
        """Close all leases and abort all reservations of an owner that is gone; returns how many.

        The memory may be reused at once. So its readers must not read and its loaders must not write any more, except
        for what they have enqueued on the streams that they named. Changes the pool. Thread-safe.
        """
        owner = text_argument("owner", owner)
        return self._leases.revoke(owner) + self._reservations.revoke(owner)

    # -- moving content between the tiers --------------------------------------------------------

    def prefetch(self, prompt: Prompt) -> int:
        """Onboard the prompt's cached full blocks that are only on the host, without holding them. Returns how many.

        With a window, it onboards those that adding the prompt would reuse. It stops when no device block is free.
        Changes the pool.
        """
        keys = self._keys_of(prompt)
        full = len(keys) // self.tokens_per_block
        ids = np.empty((len(self.core.states), full), np.int32)
        return int(self.core.decide(None, verbs.prefetch, request_of(keys), ids, self.core.now()))

    def offload(self, prompt: Prompt | Keys) -> int:
        """Copy cached device blocks to the host and keep both copies. Returns how many were copied.

        A later eviction from the device then costs no copy. Takes a prompt, or keys. Stops when the host has no room.
        Changes the pool.
        """
        return int(self.core.decide(None, verbs.offload, self._named(prompt)[1], self.core.now()))

    # -- cached content by name ------------------------------------------------------------------

    def cached_blocks(self, prompt: Prompt | Keys, *, tier: str | None = None) -> Bools:
        """Which blocks of a prompt, or of keys, are cached: bool[groups, n], for each group of layers and each key.

        ``tier``: "device" or "host", None for any. The answer may be outdated when the call returns. Thread-safe;
        changes nothing. Raises TypeError, ValueError, PoolClosed.
        """
        which, rows = tier_number(tier), self._named(prompt)[1]
        out = np.empty((len(self.core.states), len(rows)), np.bool_)
        with self.core.lock, self.core.changes:
            self.core.check_open()
            control.cached(self.core.states.groups, rows, which, out)
        return out

    def missing_blocks(self, prompt: Prompt, there: object) -> MissingBlocks:
        """Which blocks a loader should load for a prompt, so that more of it can be reused.

        ``there``: bool[groups, full blocks of the prompt], the blocks that it can load. The answer has the number of
        tokens that could then be reused. For each group of layers, it has the blocks that are lacking for that: in a
        group with attention to all tokens all of them, in a group with a window those that the next token sees, in a
        recurrent group the last state. It has no blocks if nothing is gained. Thread-safe; changes nothing. Raises
        TypeError, ValueError, PoolClosed.
        """
        keys, groups = self._keys_of(prompt), self.core.states.groups
        rows = key_rows(keys)
        brought = _flags(there, (len(groups), len(rows)))
        cached = np.empty_like(brought)
        with self.core.lock, self.core.changes:
            self.core.check_open()
            control.cached(groups, rows, control.ANY_TIER, cached)
            lacks = brought | cached
            most = int(index.missing_blocks(groups, request_of(keys), cached, lacks))
        return MissingBlocks(most * self.tokens_per_block, tuple(np.flatnonzero(group_lacks) for group_lacks in lacks))

    def explain(self, prompt: Prompt) -> Explanation:
        """Count the tokens of a prompt that the device and the host have, and say for the rest why not, by code and
        position. See ``Explanation``.

        Looks at every block of the prompt, and hashes it again for other namespaces that have or had sequences: for
        diagnosis, not for every request. Show the result to operators of the engine only, not to senders of prompts:
        "other_namespace" reveals what others have sent. Thread-safe; changes nothing. Raises TypeError, ValueError,
        PoolClosed.
        """
        keys = self._keys_of(prompt)
        match = self._match(keys)
        full = len(keys) // self.tokens_per_block
        lacks = np.zeros(full, np.bool_)
        for blocks in self.missing_blocks(keys, np.ones((len(self.groups), full), np.bool_)).blocks:
            lacks[blocks] = True
        return explained(self.core, keys, match, lacks)

    def forget(
        self,
        prompt: Prompt | Keys | None = None,
        *,
        namespace: Namespace | None = None,
    ) -> int:
        """Remove cached content from the index, on both tiers and in all groups of layers. Returns how many contents.

        ``prompt``: a prompt. This forgets its full blocks, and a stored tail with which the rest of it begins. Content
        that was computed after them stays, but nobody finds it without these blocks. Or keys. ``namespace``: a pair
        (salt, adapter_id), whose whole content is forgotten, as when a tenant leaves. That looks at every block of the
        pool, under the lock.

        Blocks that nobody holds are then empty, and are taken first. Blocks of sequences, reservations and leases keep
        their bytes until nobody holds them. A sequence or a reservation of the namespace, or with a block of the prompt
        or of the keys, publishes nothing from now on. Otherwise what it commits later would bring the content back. An
        ``import_blocks`` that is running is not stopped.

        Counted as ``forgotten_by_call_blocks``, with "removed" events. Changes the pool; thread-safe. Raises TypeError,
        ValueError, PoolClosed.
        """
        if (prompt is None) == (namespace is None):
            raise TypeError(f"prompt, namespace: expected exactly one of them, got {prompt!r:.80}, {namespace!r:.80}")
        if namespace is not None:
            tag = self._root(*namespace_argument("namespace", namespace))[0]
            return int(self.core.decide(None, control.forget_namespace, tag, self.core.now()))
        keys, rows = self._named(prompt)
        ordered, now_ms = rows[np.lexsort((rows[:, 1], rows[:, 0]))], self.core.now()
        if keys is None:
            return int(self.core.decide(None, control.forget_keys, rows, ordered, now_ms))
        return int(self.core.decide(None, control.forget_prompt, request_of(keys), rows, ordered, now_ms))

    def set_priority(self, prompt: Prompt | Keys, priority: int, *, ttl_ms: int | None = None) -> int:
        """Give the cached full blocks of a prompt, or of keys, another priority. Returns how many were found.

        ``priority``: 0 (evicted first) to 100 (stays longest). ``ttl_ms``: after so long the priority falls to the
        default. The time begins now, or at the release of a block that somebody holds. A block whose priority changes
        is the last victim of its new one; others keep their place. A later request that hits the block can change it
        again by a retention range. Emits "updated" events. Changes the pool; thread-safe. Raises TypeError, ValueError,
        PoolClosed.
        """
        value, ttl = priority_argument("priority", priority), ttl_argument("ttl_ms", ttl_ms)
        return int(self.core.decide(None, control.set_priority, self._named(prompt)[1], value, ttl, self.core.now()))

    def _named(self, prompt: object) -> tuple[BlockKeys | None, Int64s]:
        """A prompt and its keys, or keys alone. Raises TypeError, ValueError."""
        prompt = in_numpy("prompt", prompt)
        if not isinstance(prompt, BlockKeys) and is_keys(prompt):
            return None, key_rows(prompt)
        keys = self._keys_of(prompt)
        return keys, key_rows(keys)

    # -- the memory of the pool ------------------------------------------------------------------

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of layers in the order of the argument. A pool made of a layout has one group."""
        return self.core.config.groups

    @property
    def layout(self) -> BlockLayout:
        """The layout of a pool with one group of one layout. ValueError for other pools, which have ``groups``."""
        return self._pools.layout

    @property
    def device_pools(self) -> tuple[tuple[DeviceArray, ...], ...]:
        """The device tier of each group, and of each of its layouts: see ``device_pool``."""
        return self._pools.device_pools

    @property
    def host_pools(self) -> tuple[tuple[Array, ...], ...]:
        """The host tier of each group, and of each of its layouts: see ``host_pool``."""
        return self._pools.host_pools

    @property
    def device_pool(self) -> DeviceArray:
        """The device tier, shaped ``layout.device_shape(device_blocks)``, in the storage dtype: a NumPy array in main
        memory, else an array of the device's own kind, with DLPack and ``__cuda_array_interface__``."""
        return self._pools.device_pool

    @property
    def host_pool(self) -> Array:
        """The host tier, shaped ``layout.host_shape(host_blocks)``; every block is contiguous."""
        return self._pools.host_pool

    def export(
        self, tier: str = "device", *, writable: bool = True, raw: bool = False, group: int | None = None, part: int = 0
    ) -> Export:
        """A tier ("device" or "host") for arrays of other packages, in place: see ``Export``. Shaped like
        ``device_pool`` or ``host_pool``.

        ``writable=False`` marks it as read-only. ``raw=True`` exports types that NumPy has no name for (bfloat16,
        float8) as unsigned integers, for packages that have no name for them either. ``group`` is the index of a group
        of layers, required where there are several; ``part`` is the index of one of its layouts. The export is then of
        ``device_pools[group][part]`` or ``host_pools[group][part]``. Thread-safe; does not change the pool. Raises
        TypeError, ValueError, PoolClosed.
        """
        tier_argument(tier)
        g = self.core.config.group(group)
        place = TierPlace(tier, g, integer_argument("part", part, 0, len(self.core.config.groups[g].layouts) - 1))
        self.core.check_open()
        # Made here, since the pool may not refer to anything that refers to it: its memory is freed with the last
        # reference to it.
        core = self.core
        lending = Lending(core.device, self._pools, self._loans, lambda: core.lock, core.check_open, core.follow)
        return Export.of_place(lending, place, bool_argument("writable", writable), bool_argument("raw", raw))

    def share(self, tier: str = "device") -> SharedTier:
        """A description by which another process on this machine can attach a tier ("device" or "host"): see
        ``kvpool.attach``.

        Both tiers of a pool with ``shared=True`` can be shared, and on a GPU the device tier of any pool. Memory of the
        caller cannot. The description can be pickled. It lets processes of the same user read and write all KV of the
        tier, and cannot be taken back: give it only to processes that you trust. A loader in the other process fills
        the blocks of a ``reserve`` without a stream. A reader there reads the blocks of a ``pin`` without a stream.

        Close a pool on a GPU after its attachments; elsewhere the order does not matter. Thread-safe; does not change
        the pool. Raises ValueError for memory that cannot be shared, TypeError, DeviceError, MemoryError, PoolClosed.
        """
        tier_argument(tier)
        self.core.check_open()
        return self._sharing.describe(tier)

    # -- the pool as a whole ---------------------------------------------------------------------

    @property
    def free_blocks(self) -> Any:
        """Device blocks that can be taken now, with those that are cached: int, or int64[groups] if there are several
        groups of layers.

        Cheap enough for every step. Thread-safe; changes nothing. Raises PoolClosed.
        """
        with self.core.lock, self.core.changes:
            self.core.check_open()
            if len(self.core.tables) == 1:
                return int(verbs.free_device_blocks(self.core.states.groups))
            counts = np.empty(len(self.core.tables), np.int64)
            verbs.free_in_groups(self.core.states.groups, counts)
        return counts

    @property
    def closed(self) -> bool:
        return self._report is not None

    def now(self) -> int:
        """Milliseconds on the pool's clock. Raises TypeError or ValueError if the clock returns anything else."""
        return self.core.now()

    def refresh(self, now_ms: int | None = None) -> int:
        """Give blocks whose time to live is over the default priority. Returns how many. Changes the pool."""
        time_ms = self.core.now() if now_ms is None else integer_argument("now_ms", now_ms, 0, MAX_MS)
        return int(self.core.decide(None, verbs.refresh, time_ms))

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
        return np.concatenate([self._imports.pinned, *self._leases.pinned()])

    def reset(self, force: bool = False) -> None:
        """Forget all content. Pinned blocks stay readable.

        Raises PoolBusy while sequences live or reservations are open. ``force=True`` releases and aborts them; their
        loaders must not write any more.
        """
        force, now_ms = bool_argument("force", force), self.core.now()

        def named() -> tuple[Any, ...]:
            live, reserved = self.core.live(records.LIVE | records.SWAPPED), self.core.live(records.RESERVED)
            if len(reserved) and not force:
                raise PoolBusy(
                    f"{len(live)} sequences are live and {len(reserved)} reservations open: end them, or "
                    "reset(force=True)"
                )
            if len(live) and not force:
                raise PoolBusy(f"{len(live)} sequences are live: release them, or reset(force=True)")
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
        self.core.refuse_inside("exclusive")
        return Exclusive(self.core, self._leases.settle)

    def calibrate(self) -> Any:
        """Measure which way of copying is the fastest on this device, and use it from now on.

        The result is kept on disk for other processes. Returns what was measured, or None for devices that have
        nothing to choose. Takes seconds. The pool's blocks are not touched, and other calls can run meanwhile. Raises
        DeviceError, MemoryError, PoolClosed.
        """
        self.core.check_open()
        return self.core.device.calibrate()

    def close(self, force: bool = False) -> CloseReport:
        """Free all memory; returns what was still held. Later calls raise PoolClosed, except ``stats`` and ``close``.

        Raises PoolBusy, with nothing changed, while arrays that were made of exports live. With ``force=True`` it
        closes, and their memory stays until they are gone, but the pool no longer orders accesses to it.
        """
        force = bool_argument("force", force)
        self.core.refuse_inside("close")
        if self._loans:
            gc.collect()  # A view that nobody can reach does not count.
        now_ms = self.core.now() if self._leases.all or self._reservations.ids() else 0
        with self.core.lock, self.core.changes:
            views = len(self._loans)
            if self._report is None and views and not force:
                raise PoolBusy(
                    f"views of exported memory live: {views}; delete arrays made of exports, or close(force=True)"
                )
            if self._report is None:
                held = (
                    [(holder.owner, max(0, now_ms - holder.since)) for holder in holders]
                    for holders in (self._leases.all, self._reservations.all)
                )
                self._report = CloseReport(self.core.live(records.LIVE | records.SWAPPED).tolist(), *held)
            self.core.closed = True
            self._leases.clear()
            self._reservations.clear(now_ms)
        # A call that was interrupted here goes on at the next call.
        with self._closing:
            if not self._freed:
                self._free()
                self._freed = True
        return self._report

    def _free(self) -> None:
        """Free all memory, once nobody uses it."""
        try:
            # Nothing is decided any more. Once everything decided is enqueued, no thread is inside a copy.
            self.core.transfer.close()
            self.core.device.synchronize()
        except DeviceError as error:
            if not error.sticky and self.core.transfer.broken is None:
                raise
        finally:
            self._sharing.close()
            self._staging.close()
            self._imports.close()
            if self._owns_device:
                self.core.device.close()

    def __exit__(self, kind: object = None, *error: object) -> None:
        report = self.close(force=True)
        views = len(self._loans)
        if kind is None and (any(report) or views):
            held = [counted(len(items), name[:-1]) for name, items in report._asdict().items() if items]
            held += [counted(views, "view") + " of exported memory"] if views else []
            raise KVPoolError(f"the pool was closed while it held {', '.join(held)}: {report}")


# Python names a function in its own messages, such as those of unknown arguments: by the class that users know.
for _base in KVCacheManager.__mro__:
    for _name, _member in vars(_base).items():
        if isinstance(_member, FunctionType) and _member.__module__.startswith("kvpool.pool.") and _name[0] != "_":
            _member.__qualname__ = f"KVCacheManager.{_name}"


def _release_arguments(
    ids: object, store: object, stop: object, ends: object, returns: object
) -> tuple[Int64s, Any, Any]:
    """The sequences that a call releases, the verb for it, and its other arguments. Raises TypeError, ValueError."""
    which, keep = id_array("ids", ids), bool_argument("store", store)
    if stop is None and ends is False and returns is None:
        return which, verbs.release, (keep,)
    said = stop_argument(stop), returns_argument(ends, returns)
    return (which, verbs.release_saying, (keep, *said)) if any(said) else (which, verbs.release, (keep,))


def _refuse_forks(groups: Int64s, ids: Int64s, wanted: int) -> int:
    """Refuse a call for more forks than the pool has rows for: return the error of an id, or raise OutOfSequences. The
    caller holds the state lock."""
    error = int(check_ids(groups, ids, True))
    if error:
        return error
    raise OutOfSequences(wanted, int(groups[0, records.H.free_rows]))


def _flags(there: object, shape: tuple[int, int]) -> Bools:
    """Private bool[groups, full blocks]."""
    values = in_numpy("there", there)
    if isinstance(values, (list, tuple)):
        values = np.array(values)
    if not isinstance(values, np.ndarray):
        raise TypeError(f"there: expected bool{list(shape)}, got {there!r:.80}")
    flags = np.asarray(values)[...]
    if flags.dtype != np.bool_ or flags.shape != shape:
        raise ValueError(f"there: expected bool{list(shape)}, got shape {flags.shape} and dtype {flags.dtype}")
    return flags.copy()
