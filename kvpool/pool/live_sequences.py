"""LiveSequences: calls that grow, commit, fork, move and release admitted sequences, or say what they have."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from kvpool.common.arguments import (
    Ids,
    Integers,
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
        """The ids of live sequences, those that are swapped out included. Thread-safe. Raises PoolClosed."""
        with self.core.lock, self.core.changes:
            self.core.check_open()
            return self.core.live(records.LIVE | records.SWAPPED).tolist()

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
            self._client_hints.remember(name, left)

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

    def block_table(self, ids: Ids, stream: StreamLike = None, group: int | None = None) -> BlockTable:
        """The block ids of these sequences, in the persistent host table.

        ``stream``: where the engine continues with them; it waits for the streams that used them before. ``group``: the
        index of a group of layers, required where there are several. Raises UnknownSequence, DeviceError, ValueError.
        """
        core, which, g = self.core, id_array("ids", ids), self.core.config.group(group)
        if stream is not None:
            core.decide(stream, use, which, ids=which)
        with core.lock, core.changes:
            rows = core.rows(which)
            lengths = core.states[g].sequences["length"][rows].astype(np.int64)
            return BlockTable(core.tables[g], rows, lengths, core.config.tokens_per_block)

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
            on = None if stream is None else self.core.as_stream(stream)
            self.core.use(on, _refuse_forks, which, len(which) * count, ids=which)
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
        ``BlockTables.state_blocks``.

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
