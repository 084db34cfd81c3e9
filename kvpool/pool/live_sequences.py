"""LiveSequences: calls that grow, commit, fork, move and release admitted sequences, or say what they have."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from kvpool.common.arguments import (
    Ids,
    Integers,
    StopReason,
    address,
    bool_argument,
    count_array,
    each_argument,
    id_array,
    int64_array,
    is_integer,
    returns_argument,
    split_argument,
    stop_argument,
    token_array,
)
from kvpool.common.arrays import Int32s, Int64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.device.base import StreamLike
from kvpool.errors import OutOfSequences, counted
from kvpool.pool import stats as statistics
from kvpool.pool.core import Core
from kvpool.pool.exclusive import allowed_inside
from kvpool.pool.hints import ClientHints, name_argument
from kvpool.pool.prompt_requests import PromptRequests
from kvpool.pool.prompts import Prompts
from kvpool.pool.tables.block_table import BlockTable
from kvpool.state import records, swaps, verbs
from kvpool.state.sequences import check_ids, use

NO_COUNTS: Int64s = np.empty(0, np.int64)


class LiveSequences(Prompts):
    """The calls of a pool that name live sequences. Thread-safe."""

    def __init__(self, core: Core, requests: PromptRequests, client_hints: ClientHints) -> None:
        super().__init__(core, requests)
        self._client_hints = client_hints

    @property
    def sequences(self) -> list[int]:
        """Ids of live sequences, including those that are swapped out.

        Raises
        ------
        PoolClosed
            After the pool was closed.
        """
        with self.core.lock, self.core.changes:
            self.core.check_open()
            return self.core.live(records.LIVE | records.SWAPPED).tolist()

    @allowed_inside
    def append_tokens(
        self, ids: Ids, tokens: Integers, counts: Ids | None = None, *, stream: StreamLike = None
    ) -> None:
        """Append tokens to sequences, and take the blocks for them.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.
        tokens : array_like of int, shape (sum of counts,)
            Token ids, those of the first sequence first.
        counts : int or array_like of int, shape (n,), optional
            Number of tokens for each sequence. Required with several ids. By default the only sequence gets all tokens.
        stream : Stream, int, or stream of another package, optional
            The stream of the engine, by default the one that a sequence used last.

        Raises
        ------
        OutOfBlocks
            Where too few device blocks are free. The call may succeed once others have left.
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument, and for a sequence that needs more blocks than the pool has. With a window or recurrent
            layers, it may fit in parts, each committed before the next.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool, for all sequences or for none. A last block that forks share is copied before it
        is written; its last holder needs no copy.
        """
        which, new = id_array("ids", ids), token_array("tokens", tokens, empty=True)
        if counts is None and len(which) != 1:
            raise ValueError(f"counts: expected one for each of {len(which)} ids, got None")
        each = id_array("counts", len(new)) if counts is None else count_array("counts", counts, which)
        self.core.decide(stream, verbs.append, which, each, new, self.core.now(), ids=which)

    @allowed_inside
    def commit(self, ids: Ids, counts: Ids | None = None, *, stream: StreamLike = None) -> None:
        """Mark the KV of the first tokens of sequences as written, and publish full blocks.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.
        counts : int or array_like of int, shape (n,), optional
            Number of tokens of each sequence whose KV is written, no fewer than before: ``rewind`` drops tokens. By
            default all of them.
        stream : Stream, int, or stream of another package, optional
            The stream on which the KV was written, by default the one that a sequence used last.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool. With a window, the call frees the blocks that no later token sees; in a recurrent
        group, it frees the states that the committed tokens have passed. These blocks are written again only after the
        work that is enqueued on the stream, so enqueue the kernels that read them before this call.
        """
        which = id_array("ids", ids)
        each = NO_COUNTS if counts is None else count_array("counts", counts, which)
        self.core.decide(stream, verbs.commit, which, each, self.core.now(), ids=which)

    def rewind(self, ids: Ids, counts: Ids, *, stream: StreamLike = None) -> None:
        """Drop the last tokens of sequences.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.
        counts : int or array_like of int, shape (n,)
            Number of tokens to drop from each sequence.
        stream : Stream, int, or stream of another package, optional
            The stream of the engine, by default the one that a sequence used last.

        Raises
        ------
        OutOfBlocks
            Where a block that others hold must be copied, and no block is free.
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument, and if the shorter sequence would need blocks of a window, or a recurrent state, that
            were freed. Tokens that are not committed can always be dropped.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool. A block that others hold is copied, never written.
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
        stop: StopReason | None = None,
        ends: bool = False,
        returns_in_ms: int | None = None,
        session: str | None = None,
    ) -> None:
        """End sequences and free their blocks. Committed content stays reusable until it is evicted.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.
        store : bool, default True
            Whether to keep what these sequences computed. With False it is dropped, except for blocks that a window
            freed earlier.
        stream : Stream, int, or stream of another package, optional
            The stream on which the blocks were used, by default the one that a sequence used last.
        stop : {"tool_use", "end_turn"}, optional
            Why the model stopped, for the eviction policy.
        ends : bool, default False
            Whether no request will continue these sequences, for the eviction policy.
        returns_in_ms : int, optional
            Milliseconds after which a request will continue these sequences, for the eviction policy.
        session : str, optional
            1 to 256 characters, with one id: a name by which ``CachedContent.hints`` finds what the sequence has now,
            as ``keys_of`` returns it. Only the most recently named sessions are kept.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument, for ``session`` with several ids, and where ``keys_of`` raises it.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool. The last block of a sequence is freed first. All policies but "lru" use ``stop``,
        ``ends`` and ``returns_in_ms``; a wrong value costs hits, and nothing else.
        """
        which, verb, how = _release_arguments(ids, store, stop, ends, returns_in_ms)
        name = None if session is None else name_argument("session", session)
        if name is not None and len(which) != 1:
            raise ValueError(f"session: expected None with {counted(len(which), 'sequence')}, got {name!r:.80}")
        left = None if name is None else self.keys_of(which)[0]
        self.core.decide(stream, verb, which, *how, self.core.now(), ids=which)
        if name is not None and left is not None:
            self._client_hints.remember(name, left)

    def swap_out(self, ids: Ids, *, stream: StreamLike = None) -> int:
        """Move running sequences to the host tier, with all that they have.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.
        stream : Stream, int, or stream of another package, optional
            The stream whose work the copies wait for, by default the one that a sequence used last.

        Returns
        -------
        int
            Number of blocks that were copied. Content that the host tier has already is not copied.

        Raises
        ------
        OutOfBlocks
            With ``tier`` "host", if the host tier has no room. The sequences can be released instead.
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool. Content that is not committed moves too: partly filled blocks, drafts, running
        states, the tokens of the encoder. A block that others use stays on the device for them; the other device blocks
        are free afterwards. The host blocks are held until ``resume`` or ``release``. Until then, only these two calls
        accept the sequences. Each keeps its id, and takes one of ``max_sequences``.
        """
        which = id_array("ids", ids)
        return int(self.core.decide(stream, swaps.swap, which, records.HOST, self.core.now(), ids=which))

    def resume(self, ids: Ids, *, stream: StreamLike = None) -> int:
        """Move sequences that were swapped out back to the device.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of sequences that ``swap_out`` has moved.
        stream : Stream, int, or stream of another package, optional
            The stream on which the engine continues with the sequences, by default the one that each used last.

        Returns
        -------
        int
            Number of blocks that were copied. Content that is on the device is not copied.

        Raises
        ------
        OutOfBlocks
            Where too few device blocks are free.
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument, and for a sequence that is not swapped out.
        DeviceError, PoolClosed
            Where the device has failed, or has refused a copy to the host: release the sequence. After the pool was
            closed.

        Notes
        -----
        Thread-safe. Changes the pool. The block table has other ids than before. Forks that are resumed in one call
        share what they shared; a fork that is resumed alone has blocks of its own.
        """
        which = id_array("ids", ids)
        return int(self.core.decide(stream, swaps.swap, which, records.DEVICE, self.core.now(), ids=which))

    def block_table(self, ids: Ids, stream: StreamLike = None, group: int | None = None) -> BlockTable:
        """Return the block ids of sequences, in the persistent host table.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.
        stream : Stream, int, or stream of another package, optional
            The stream on which the engine continues with the sequences. It waits for the streams that used them before.
        group : int, optional
            The index of a group of layers, required where there are several.

        Returns
        -------
        BlockTable
            The rows and lengths of the sequences, with a read-only view of the table.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes nothing but the stream of the sequences.
        """
        core, which, g = self.core, id_array("ids", ids), self.core.config.group(group)
        if stream is not None:
            core.decide(stream, use, which, ids=which)
        with core.lock, core.changes:
            rows = core.rows(which)
            lengths = core.states[g].sequences["length"][rows].astype(np.int64)
            return BlockTable(core.tables[g], rows, lengths, core.config.tokens_per_block)

    def evictable_after_release(self, ids: Ids, group: int | None = None) -> int:
        """Return how many device blocks would become free if sequences were released together.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.
        group : int, optional
            The index of a group of layers, required where there are several.

        Returns
        -------
        int
            Device blocks of the group that only these sequences hold.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes nothing.
        """
        which, g = id_array("ids", ids), self.core.config.group(group)
        with self.core.lock, self.core.changes:
            named = self.core.tables[g][self.core.rows(which)]
            blocks, times = np.unique(named[named != records.NONE], return_counts=True)
            return int(np.count_nonzero(self.core.states[g].blocks["ref_word"][blocks] == times))

    def fork(self, ids: Ids, n: int = 1, *, stream: StreamLike = None) -> Int64s:
        """Make sequences that continue live ones, and share their blocks.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.
        n : int, default 1
            Number of forks of each sequence.
        stream : Stream, int, or stream of another package, optional
            The stream on which the forks are used, by default the one of the parent. It waits for the work on the
            parent so far.

        Returns
        -------
        ndarray of int64, shape (n,) or (m, n)
            Ids of the forks: (n,) for one id, (m, n) for m ids.

        Raises
        ------
        OutOfSequences
            Where too few of ``max_sequences`` are free.
        UnknownSequence
            For an id that is not a live sequence, and for a reservation.
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool. It takes no blocks: all are shared, even a last block that is not full. A
        sequence that appends to that block, or rewinds into it, gets a copy, which ``append_tokens`` and
        ``blocks_needed`` count; the last holder writes in place. Each fork takes one of ``max_sequences``, and is
        committed, grown and released like any sequence. Write the KV of shared tokens that are not committed yet once
        for all forks, before one of them appends.
        """
        which, count = id_array("ids", ids), integer_argument("n", n, 0, 1 << 24)
        if len(which) * count > len(self.core.tokens.sequences):
            # It is refused in any case, so nothing is allocated for it.
            on = None if stream is None else self.core.as_stream(stream)
            self.core.use(on, _refuse_forks, which, len(which) * count, ids=which)
        out = np.full((len(which), count), records.NONE)
        self.core.decide(stream, verbs.fork, which, out, ids=which)
        return out[0] if is_integer(ids) else out

    def reorder(self, ids: Ids, parents: Ids, *, store: bool = False, stream: StreamLike = None) -> None:
        """Reorder the beams of a beam search: each sequence continues what another one has now, all at once.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.
        parents : int or array_like of int, shape (n,)
            For each sequence, the index in ``ids`` of the one that it continues.
        store : bool, default False
            Whether what no sequence continues stays reusable, as in ``release``.
        stream : Stream, int, or stream of another package, optional
            The stream of the engine, by default the one of the parent.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool. It takes no blocks. A parent with several children is shared by them, as by
        ``fork``. Ids and their rows in block tables stay; lengths, committed and cached tokens become those of the
        parent. One call takes several groups of beams.
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
        """Keep the draft tokens that the model accepted, and drop the others.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.
        drafts : int or array_like of int, shape (n,)
            Number of draft tokens of each sequence: its last tokens, which are not committed.
        accepted : array_like of int, shape (sum of counts,)
            For one sequence after the other, the accepted indices among its drafts in rising order; 0 is the first
            draft. A path through a tree of drafts is in rising order if parents were appended before their children.
        counts : int or array_like of int, shape (n,), optional
            Number of accepted drafts of each sequence. By default all of ``accepted``, with one id.
        stream : Stream, int, or stream of another package, optional
            The stream that has written the drafts, by default the one that a sequence used last.

        Raises
        ------
        OutOfBlocks
            Where a block that others hold must be copied, and no block is free.
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes the pool. The accepted tokens then follow the text directly: their ids and their KV are
        moved, across blocks, in all layers and planes. If the accepted drafts are the first ones, nothing moves, as in
        ``rewind``. The move is one launch for each stream of the call, or several on a GPU if very many tokens move. A
        block that others hold is copied, never written. States of recurrent groups are not moved: see
        ``BlockTables.state_blocks``.
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
        """Return how many tokens sequences reused when they were added.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.

        Returns
        -------
        int or ndarray of int32, shape (n,)
            The number of tokens, for one id an int.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes nothing.
        """
        return self._field("cached", ids)

    @overload
    def sequence_length(self, ids: int | np.integer[Any]) -> int: ...
    @overload
    def sequence_length(self, ids: Integers) -> Int32s: ...
    def sequence_length(self, ids: Ids) -> int | Int32s:
        """Return how many tokens sequences have.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.

        Returns
        -------
        int or ndarray of int32, shape (n,)
            The number of tokens, for one id an int.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes nothing.
        """
        return self._field("length", ids)

    @overload
    def committed_tokens(self, ids: int | np.integer[Any]) -> int: ...
    @overload
    def committed_tokens(self, ids: Integers) -> Int32s: ...
    def committed_tokens(self, ids: Ids) -> int | Int32s:
        """Return how many leading tokens of sequences have KV that is written.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.

        Returns
        -------
        int or ndarray of int32, shape (n,)
            The number of tokens, for one id an int.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes nothing.
        """
        return self._field("committed", ids)

    def request_stats(self, ids: Ids) -> statistics.RequestStats:
        """Return what live sequences have reused, computed, decoded and dropped. Call it before ``release``.

        Parameters
        ----------
        ids : int or array_like of int, shape (n,)
            Ids of live sequences.

        Returns
        -------
        RequestStats
            The numbers of tokens: ints for one id, arrays of shape (n,) for several.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Thread-safe. Changes nothing.
        """
        which = id_array("ids", ids)
        with self.core.lock, self.core.changes:
            return statistics.requests(self.core, self.core.rows(which), is_integer(ids))

    def _field(self, name: str, ids: Ids) -> Any:
        which = id_array("ids", ids)
        with self.core.lock, self.core.changes:
            values = self.core.tokens.sequences[name][self.core.rows(which)]
        return int(values[0]) if is_integer(ids) else values


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
