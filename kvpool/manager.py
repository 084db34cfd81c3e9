"""KVCacheManager: the verbs. Arguments are checked, a decision is made under the state lock, its moves are enqueued behind it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.block_table import BlockTable
from kvpool.device.base import NULL_STREAM
from kvpool.drafts import DraftPool
from kvpool.errors import KVPoolError
from kvpool.forks import ForkPool
from kvpool.layout import integer_argument
from kvpool.recurrent import RecurrentPool
from kvpool.reservations import Reservation
from kvpool.retention import RetentionRange, priority_argument, retention_rows, ttl_argument
from kvpool.sequence import (
    Admission,
    BlockKeys,
    Match,
    adapter_argument,
    address,
    bool_argument,
    count_array,
    encoder_argument,
    extra_array,
    id_array,
    is_integer,
    key_rows,
    list_argument,
    private,
    salt_argument,
    token_array,
)
from kvpool.state import answers, blocks, groups, hashing, live, requests
from kvpool.strided import in_numpy

NO_REQUESTS: npt.NDArray[np.int64] = np.empty((0, requests.REQUEST), np.int64)
NO_COUNTS: npt.NDArray[np.int64] = np.empty(0, np.int64)
Ids = Any
Prompt = Any
Retention = Sequence[RetentionRange | tuple[int | None, ...]]


class KVCacheManager(ForkPool, DraftPool, RecurrentPool):
    """A paged KV cache in two tiers: device blocks, and host blocks that take what leaves the device.

    Parameters
    ----------
    layout : shape and bytes of a block, of a model whose layers all keep the same.
    groups : in place of a layout, a list of ``LayerGroup``: layers with other attention, heads or state keep other blocks. All calls act
        on all groups or on none, and a prefix is reused as far as every group can. What is about the blocks of one group takes ``group=``.
    device_blocks, host_blocks : capacities, of each group where there are groups (see ``split_blocks``); ids [0, device_blocks) are device
        blocks, the rest host blocks.
    tokens_per_block : of a pool whose groups are all recurrent; others have it in their layouts.
    device : "auto" (a GPU where there is one), "cpu", "cuda", "sim", or a ``kvpool.device.base.Device`` that serves no other pool.
    max_sequences, max_sequence_tokens : bounds of what lives at once; they size the block table (default: 256 sequences of as many
        tokens as fit on the device, at most 262,144). ``max_sequence_tokens`` also bounds what an encoder gives.
    partial_reuse : also reuse the first tokens of a block that matches in part, by copying them.
    offload_min_priority, offload_min_reuse : content below either is forgotten, not offloaded, when evicted.
    secret : 16 to 64 bytes that key the hash of content; random by default. Pools with one secret agree on keys.
    event_capacity : blocks whose events are kept until ``events`` is called; 0 (default) records none.
    window, sinks : attention of all layers is a sliding window: a token sees ``window`` tokens, itself the last of them, and the first
        ``sinks`` tokens of the sequence. Blocks that nothing can see any more go back at ``commit``, which leaves -1 in the block table,
        and a prefix is reused if what the next token sees of it is cached. None: a token sees all before it. A sequence may then be
        longer than the device has room for: its bound is ``max_sequence_tokens``.
    clock : () -> int, monotonic milliseconds from 0 to 2**42.
    staging_depth : block tables that are on their way to the device at once; one more waits for the oldest.
    device_memory, host_memory : where a tier lies, instead of memory that the device takes: an array of any package, C-contiguous,
        writable, of exactly the tier's bytes at a multiple of 64, or a function (nbytes, alignment) that gives one. It stays the
        caller's, is kept until the pool is closed, and may hold anything; until then nobody else writes it. Of several groups or layouts,
        a list of these, one for each layout, group after group; one function is called for each.
    table : int32[max_sequences, columns], of several groups int32[groups, max_sequences, columns]: C-contiguous NumPy memory of the
        caller's in place of the pool's own persistent block table, where columns is ``max_sequence_tokens`` in blocks: rows of a larger
        array, say, of which other rows are another model's. The pool fills it with -1, writes it while it lives, and keeps it alive;
        nobody else writes these rows.

    All methods are thread-safe. A call that raises has changed nothing.

    Calls that take a ``stream`` order the engine's accesses on it, the pool's copies and other streams: what the call hands out may be
    used by work enqueued there from now on, and what it takes back or publishes is what was enqueued there before. The default is the
    stream that a sequence used last, the device's null stream for a new one.

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
    Match(device_tokens=4, host_tokens=0, partial_tokens=2)
    """

    # -- prompts ---------------------------------------------------------------------------------

    def block_keys(
        self, tokens: Any, *, salt: bytes | str | None = None, adapter_id: int | str | None = None, extra_ids: Any = None
    ) -> BlockKeys:
        """Hash a prompt once, before any lock; every call that takes a prompt takes the result.

        ``tokens``: n token ids in any integer buffer or list. ``salt`` and ``adapter_id`` name the namespace:
        equal tokens in different ones never match. ``extra_ids`` int64[n] tell tokens apart whose ids do not, such as image
        placeholders. Raises TypeError / ValueError. Reads no state; thread-safe.
        """
        self._check_open()
        # What was hashed is what is compared and stored, whatever becomes of the caller's buffer.
        return self._hash(private(token_array("tokens", tokens), tokens), salt, adapter_id, extra_ids)

    def _hash(self, found: npt.NDArray[np.int32], salt: Any = None, adapter_id: Any = None, extra_ids: Any = None) -> BlockKeys:
        extra = extra_array(extra_ids, len(found))
        salt, adapter = salt_argument(salt), adapter_argument(adapter_id)
        states, width = self._states, self.tokens_per_block
        root = hashing.namespace_root(states.secret, salt, adapter, states.namespace_in_key)
        keys = np.empty((len(found) // width, 2), np.uint64)
        result = BlockKeys(found, keys, salt, adapter, extra, root, self._origin)
        requests.hash_request(states.heads[0], result.request[0])
        return result

    def _prompt(self, prompt: Prompt) -> BlockKeys:
        """The keys of a prompt. What was hashed is what is compared and stored, whatever becomes of the caller's buffer."""
        if isinstance(prompt, BlockKeys):
            return self._own_keys(prompt)
        return self._hash(private(token_array("prompt", prompt), prompt))

    def match_prefix(self, prompt: Prompt) -> Match:
        """What the prompt would reuse if it were added now; its last token is never reused. Does not change the pool."""
        found = self._match(prompt)
        full, host, partial = found[-1, :3].tolist()
        return Match(full - host, host, partial)

    def _match(self, prompt: Prompt) -> npt.NDArray[np.int64]:
        keys = self._prompt(prompt)
        heads = self._states.heads
        out, ids = np.empty((len(heads) + 1, 6), np.int64), np.empty((len(heads), len(keys) // self.tokens_per_block), np.int32)
        with self._lock:
            self._check_open()
            answers.match(heads, keys.request[0], ids, out)
        return out

    def blocks_needed(
        self, prompt: Prompt = None, *, sequences: Ids = None, new_tokens: Any = 0, group: int | None = None,
        encoder_tokens: int | None = None,
    ) -> int:  # fmt: skip
        """Free device blocks that a step takes: for a prompt and ``new_tokens`` more, or for growing live sequences by ``new_tokens``.

        Only reusable blocks that somebody holds are subtracted, since unused cached ones count as free. ``group``: of layers, to be named
        where there are several; ``encoder_tokens``: of a prompt, exactly where that group is one for cross attention. Does not change
        the pool.
        """
        if (prompt is None) == (sequences is None):
            raise TypeError(f"prompt={prompt!r:.80}, sequences={sequences!r:.80}: accepted is exactly one of them")
        which = self._group(group)
        if sequences is None:
            more = integer_argument("new_tokens", new_tokens, 0, (1 << 31) - 1)
            keys, crosses = self._prompt(prompt), self._groups[which].kind == "cross"
            columns = -(-(len(keys) + more) // self.tokens_per_block)
            if crosses or encoder_tokens is not None:
                columns = -(-int(encoder_argument("encoder_tokens", encoder_tokens, 1, crosses)[0]) // self.tokens_per_block)
            found = self._match(keys)[which]
            if self._groups[which].kind == "recurrent":
                columns = found[3] + requests.fresh_blocks(self._states.heads[which], keys.request[0], found[3], columns)
            return int(columns - found[4])
        if encoder_tokens is not None:
            raise ValueError(f"encoder_tokens={encoder_tokens!r:.80}: accepted is None for sequences, which have their encoder's blocks")
        ids = id_array("sequences", sequences)
        counts = count_array("new_tokens", np.full(len(ids), new_tokens) if is_integer(new_tokens) else new_tokens, ids)
        with self._lock:
            self._check_open()
            # Its own, since a signal handler may decide before it is read.
            needs = np.empty_like(self._needs)
            error = groups.growth_needs(self._states.heads, ids, counts, needs)
            if error:
                raise self._error(error, ids)
        return int(needs[which])

    # -- sequences -------------------------------------------------------------------------------

    def add_sequence(
        self, prompt: Prompt, *, retention: Retention | None = None, decode_priority: int = blocks.DEFAULT_PRIORITY,
        decode_ttl_ms: int | None = None, stream: Any = None, encoder_tokens: int | None = None,
    ) -> int:  # fmt: skip
        """``add_sequence_batch`` for one prompt; returns the sequence id."""
        own = None if retention is None else retention_rows(retention)
        out = self._admit([self._prompt(prompt)], [own], decode_priority, decode_ttl_ms, stream, False, encoder_tokens)
        return int(out[0, requests.O_ID])

    def add_sequence_batch(
        self, prompts: Sequence[Prompt], *, retention: Sequence[Retention | None] | None = None,
        decode_priority: int = blocks.DEFAULT_PRIORITY, decode_ttl_ms: int | None = None, stream: Any = None,
        allow_partial_batch: bool = False, encoder_tokens: Any = None,
    ) -> Admission:  # fmt: skip
        """Admit prompts: reuse what is cached on either tier, take blocks for the rest. Changes the pool.

        All prompts are matched before anything is taken, so each gets the full blocks that ``match_prefix`` promised right before. All
        or nothing, unless ``allow_partial_batch``: then the head of the batch that fits. ``retention`` has one list of ranges, or
        None, per prompt. ``stream``: the engine's, which will use the blocks. ``encoder_tokens``: int64[n], what each has room for in the
        groups for cross attention, exactly where there is one. Raises OutOfBlocks, OutOfSequences, ValueError, TypeError.
        """
        partial = bool_argument("allow_partial_batch", allow_partial_batch)
        keys = [self._prompt(prompt) for prompt in list_argument("prompts", prompts)]
        given = [None] * len(keys) if retention is None else list_argument("retention", retention)
        ranges = [None if one is None else retention_rows(one) for one in given]
        if len(ranges) != len(keys):
            raise ValueError(f"retention has {len(ranges)} entries: accepted is one for each of the {len(keys)} prompts")
        out = self._admit(keys, ranges, decode_priority, decode_ttl_ms, stream, partial, encoder_tokens)
        return Admission(out[:, requests.O_ID].copy(), *out[:, requests.O_CACHED : requests.O_MISSED + 1].T.astype(np.int32))

    def _admit(
        self, keys: list[BlockKeys], ranges: Sequence[npt.NDArray[np.int64] | None], decode_priority: int, decode_ttl_ms: int | None,
        stream: Any, allow_partial: bool, encoder_tokens: Any,
    ) -> npt.NDArray[np.int64]:  # fmt: skip
        """The outcome rows (see ``state.requests``) of the requests that were admitted, the groups' as one."""
        rows = np.concatenate([key.request for key in keys] or [NO_REQUESTS])
        rows[:, requests.R_PRIORITY] = priority_argument("decode_priority", decode_priority)
        rows[:, requests.R_TTL] = ttl_argument("decode_ttl_ms", decode_ttl_ms)
        moves = longest = 0
        if self._crosses or encoder_tokens is not None:
            rows[:, requests.R_ENCODER] = encoder_argument("encoder_tokens", encoder_tokens, len(keys), self._crosses)
            moves = self._encoder_blocks(rows)
        for i, (key, own) in enumerate(zip(keys, ranges, strict=True)):
            held = -(-len(key) // self.tokens_per_block)
            moves, longest = moves + 2 * held, max(longest, held)
            if own is not None:
                rows[i, requests.R_RANGES], rows[i, requests.R_RANGE_COUNT] = address(own), len(own)
            if key.extra_ids is not None:
                self._enable_extra()
        self._check_columns(longest)
        out = np.full((len(self._states), len(keys), requests.OUTCOME), blocks.NONE, np.int64)
        try:
            on = NULL_STREAM if stream is None else stream
            n = self._decide(moves, on, self._admit_named, rows, out, self.now(), allow_partial, keys)
        except BaseException:
            # Ctrl-C is delivered behind the decision: nobody gets the ids.
            admitted = out[0, out[0, :, requests.O_ID] != blocks.NONE, requests.O_ID]
            if len(admitted) and not self.closed:
                with suppress(KVPoolError):
                    self.release(admitted)
            raise
        return out[0, :n] if len(out) == 1 else self._joined(out[:, :n])

    def _joined(self, out: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """One answer of all groups' outcomes, as ``Admission`` says."""
        found = out[int(self._state.header[blocks.GROUP])].copy()
        full, host = found[:, requests.O_CACHED] - found[:, requests.O_PARTIAL], out[:, :, requests.O_HOST_TOKENS].max(axis=0)
        found[:, requests.O_DEVICE_TOKENS], found[:, requests.O_HOST_TOKENS] = full - host, host
        return found

    def _admit_named(
        self, heads: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], out: npt.NDArray[np.int64], now: int, allow_partial: bool,
        keys: list[BlockKeys],
    ) -> int:  # fmt: skip
        """The verb, behind a note of the namespaces that events will name. The state lock is held by the caller."""
        self._names.learn(keys)
        return int(answers.admit(heads, rows, out, now, allow_partial))

    def append_tokens(self, ids: Ids, tokens: Any, counts: Any = None, *, stream: Any = None) -> None:
        """Grow sequences: sequence ``ids[i]`` gets the next ``counts[i]`` of ``tokens``; with one id, all of them. Changes the pool.

        Takes blocks as needed, all or nothing; a last block that forks hold too is copied, but by the last of them. Raises OutOfBlocks,
        UnknownSequence, DeviceError, ValueError.
        """
        which, new = id_array("ids", ids), token_array("tokens", tokens, empty=True)
        if counts is None:
            if len(which) != 1:
                raise ValueError("counts: accepted is one for each id where there are several")
            counts = len(new)
        each = count_array("counts", counts, which)
        moves = 2 * (len(new) // self.tokens_per_block) + 3 * len(which)
        self._decide(moves, stream, groups.append, which, each, new, self.now(), self._needs, ids=which)

    def commit(self, ids: Ids, counts: Any = None, *, stream: Any = None) -> None:
        """Say that the KV of the first ``counts[i]`` tokens of each sequence is written (default: of all), and publish full blocks.

        ``counts`` never fall: to take tokens back, ``rewind``. Blocks that no token behind these sees, of a window, and states behind fewer
        tokens, of a recurrent group, go back in order behind what is enqueued on the stream: have the kernels that read them enqueued
        there. Changes the pool.

        Raises UnknownSequence, DeviceError, ValueError.
        """
        which = id_array("ids", ids)
        each = NO_COUNTS if counts is None else count_array("counts", counts, which)
        self._decide(0, stream, groups.commit, which, each, self.now(), ids=which)

    def rewind(self, ids: Ids, counts: Any, *, stream: Any = None) -> None:
        """Drop the last ``counts[i]`` tokens of each sequence. A block that others hold is copied, never written. Changes the pool.

        Raises OutOfBlocks (for such copies), UnknownSequence, DeviceError, ValueError (also for a rewind behind which the window would
        reach blocks, or a recurrent group a state, that have gone back: never for tokens that were not committed).
        """
        which = id_array("ids", ids)
        each = count_array("counts", counts, which)
        self._decide(2 * len(which), stream, groups.rewind, which, each, self.now(), self._needs, ids=which)

    def release(self, ids: Ids, *, store: bool = True, stream: Any = None) -> None:
        """Give sequences back, tail first. What was committed stays reusable until evicted; with ``store=False`` what they computed goes,
        but for what a window has passed before.

        Changes the pool. Raises UnknownSequence, ValueError.
        """
        which = id_array("ids", ids)
        self._decide(0, stream, groups.release, which, bool_argument("store", store), self.now(), ids=which)

    def evictable_if_released(self, ids: Ids, group: int | None = None) -> int:
        """Device blocks, of a group where there are several, that would become free if these sequences were released together.

        Does not change the pool.
        """
        which, g = id_array("ids", ids), self._group(group)
        with self._lock:
            named = self._tables[g][self._rows(which)]
            found, times = np.unique(named[named != blocks.NONE], return_counts=True)
            return int(np.count_nonzero(self._states[g].blocks["word"][found] == times))

    def block_table(self, ids: Ids, stream: Any = None, group: int | None = None) -> BlockTable:
        """Where the blocks of these sequences are, in the persistent host table of a group of layers, to be named where there are several.

        ``stream``: where the engine goes on with them; it waits for what they were used on before. Raises UnknownSequence, DeviceError,
        ValueError.
        """
        which, g = id_array("ids", ids), self._group(group)
        if stream is not None:
            self._decide(0, stream, live.use, which, ids=which)
        with self._lock:
            rows = self._rows(which)
            lengths = self._states[g].sequences["length"][rows].astype(np.int64)
            return BlockTable(self._tables[g], rows, lengths, self.tokens_per_block)

    def _field(self, name: str, ids: Ids) -> Any:
        which = id_array("ids", ids)
        with self._lock:
            found = self._state.sequences[name][self._rows(which)]
        return int(found[0]) if is_integer(ids) else found

    def cached_tokens(self, ids: Ids) -> Any:
        """Tokens that each sequence reused when it was added: int for one id, int32[n] for several."""
        return self._field("cached", ids)

    def sequence_length(self, ids: Ids) -> Any:
        """Tokens of each sequence."""
        return self._field("length", ids)

    def committed_tokens(self, ids: Ids) -> Any:
        """Leading tokens of each sequence whose KV is written."""
        return self._field("committed", ids)

    # -- a loader's way in ----------------------------------------------------------------------

    def reserve(
        self, prompt: Prompt, *, owner: str = "", retention: Retention | None = None, stream: Any = None, encoder_tokens: int | None = None
    ) -> Reservation:
        """Take device blocks for the KV of a prompt that a loader, of this process or another, brings from elsewhere. Changes the pool.

        What the pool has of the prompt is held (and onboarded), as for a sequence, and the loader leaves it alone; the rest can be
        found by nobody before ``Reservation.commit``. ``stream``: the loader's. Without one, waits outside the locks until nothing
        that is enqueued touches the blocks, so that anybody may write to them, from any process and stream.

        ``owner`` is who to ask about it, and what ``revoke`` takes; ``retention`` and ``encoder_tokens`` as in ``add_sequence`` (0 takes
        no blocks for cross attention, of which a commit publishes nothing). A reservation takes one of
        ``max_sequences``, and counts as no reuse in the statistics. Thread-safe. Raises OutOfBlocks, OutOfSequences, DeviceError,
        ValueError, TypeError.
        """
        own = None if retention is None else retention_rows(retention)
        return self._reserve(self._prompt(prompt), own, owner, stream, encoder_tokens)

    # -- moving content between the tiers --------------------------------------------------------

    def prefetch(self, prompt: Prompt) -> int:
        """Onboard the prompt's cached full blocks that are on the host only, without holding them; returns how many came.

        With a window, those that adding the prompt would reuse. Stops where no device block can be had. Changes the pool.
        """
        keys = self._prompt(prompt)
        ids = np.empty((len(self._states), len(keys.keys)), np.int32)
        return int(self._decide(2 * len(keys.keys), None, groups.prefetch, keys.request[0], ids, self.now()))

    def offload(self, prompt: Any) -> int:
        """Copy cached device blocks to the host and keep them, so that their eviction will cost no copy; returns how many were copied.

        Takes a prompt's BlockKeys, or keys. Stops where the host has no room. Changes the pool.
        """
        prompt = in_numpy("prompt", prompt)
        rows = key_rows(self._prompt(prompt) if isinstance(prompt, BlockKeys) or not _is_keys(prompt) else prompt)
        return int(self._decide(len(rows), None, groups.offload, rows, self.now()))


def _is_keys(value: Any) -> bool:
    """Whether an argument is keys rather than tokens: two dimensions, or single keys in a sequence."""
    if isinstance(value, np.ndarray):
        return value.ndim == 2
    return isinstance(value, (list, tuple)) and len(value) > 0 and not is_integer(value[0])
