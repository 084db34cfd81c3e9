"""KVCacheManager: the verbs. Arguments are checked, a decision is made under the state lock, its moves are enqueued behind it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool import staging
from kvpool.block_table import BlockTable, planes_argument, rows_argument
from kvpool.device.base import NULL_STREAM, Stream
from kvpool.errors import DeviceError, KVPoolError
from kvpool.layout import integer_argument
from kvpool.pins import PinPool
from kvpool.retention import RetentionRange, priority_argument, retention_rows, ttl_argument
from kvpool.sequence import (
    Admission,
    BlockKeys,
    Match,
    adapter_argument,
    address,
    bool_argument,
    count_array,
    extra_array,
    id_array,
    is_integer,
    key_rows,
    list_argument,
    private,
    salt_argument,
    token_array,
)
from kvpool.staging import Buffer, HandOver, columns_now
from kvpool.state import admission, blocks, growth, hashing, holds, live, requests

Ids = Any
Prompt = Any
Retention = Sequence[RetentionRange | tuple[int | None, ...]]


class KVCacheManager(PinPool):
    """A paged KV cache in two tiers: device blocks, and host blocks that take what leaves the device.

    Parameters
    ----------
    layout : shape and bytes of a block.
    device_blocks, host_blocks : capacities; ids [0, device_blocks) are device blocks, the rest host blocks.
    device : "auto" (a GPU where there is one), "cpu", "cuda", "sim", or a ``kvpool.device.base.Device`` that serves no other pool.
    max_sequences, max_sequence_tokens : bounds of what lives at once; they size the block table (default: 256 sequences of as many
        tokens as fit on the device, at most 262,144).
    partial_reuse : also reuse the first tokens of a block that matches in part, by copying them.
    offload_min_priority, offload_min_reuse : content below either is forgotten, not offloaded, when evicted.
    secret : 16 to 64 bytes that key the hash of content; random by default. Pools with one secret agree on keys.
    event_capacity : blocks whose events are kept until ``events`` is called; 0 (default) records none.
    clock : () -> int, monotonic milliseconds from 0 to 2**42.
    staging_depth : block tables that are on their way to the device at once; one more waits for the oldest.

    All methods are thread-safe. A call that raises has changed nothing.

    Calls that take a ``stream`` order the engine's accesses on it, the pool's copies and other streams: what the call hands out may be
    used by work enqueued there from now on, and what it takes back or publishes is what was enqueued there before. The default is the
    stream that a sequence used last, the device's null stream for a new one.
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
        state, width = self._state, self.tokens_per_block
        root = hashing.namespace_root(state.secret, salt, adapter, state.namespace_in_key)
        keys = np.empty((len(found) // width, 2), np.uint64)
        result = BlockKeys(found, keys, salt, adapter, extra, root, self._origin)
        requests.hash_request(state.header, result.request[0])
        return result

    def _prompt(self, prompt: Prompt) -> BlockKeys:
        return self._own_keys(prompt) if isinstance(prompt, BlockKeys) else self._hash(token_array("prompt", prompt))

    def match_prefix(self, prompt: Prompt) -> Match:
        """What the prompt would reuse if it were added now; its last token is never reused. Does not change the pool."""
        found = self._match(prompt)
        return Match(int(found[0]), int(found[1]), int(found[2]))

    def _match(self, prompt: Prompt) -> npt.NDArray[np.int64]:
        keys = self._prompt(prompt)
        out, ids = np.zeros(6, np.int64), np.empty(len(keys.keys), np.int32)
        with self._lock:
            self._check_open()
            requests.match(self._state.header, keys.request[0], ids, out)
        return out

    def blocks_needed(self, prompt: Prompt = None, *, sequences: Ids = None, new_tokens: Any = 0) -> int:
        """Free device blocks that a step takes: for a prompt and ``new_tokens`` more, or for growing live sequences by ``new_tokens``.

        Only reusable blocks that somebody holds are subtracted, since unused cached ones count as free. Does not change the pool.
        """
        if (prompt is None) == (sequences is None):
            raise TypeError("accepted is either a prompt or sequences=")
        if sequences is None:
            more = integer_argument("new_tokens", new_tokens, 0, (1 << 31) - 1)
            keys = self._prompt(prompt)
            return -(-(len(keys) + more) // self.tokens_per_block) - int(self._match(keys)[4])
        ids = id_array("sequences", sequences)
        counts = count_array("new_tokens", np.full(len(ids), new_tokens) if is_integer(new_tokens) else new_tokens, ids)
        with self._lock:
            self._check_open()
            result = live.check(self._state.header, ids, True) or growth.growth(self._state.header, ids, counts)
            if result < 0:
                raise self._error(result, ids)
        return int(result)

    # -- sequences -------------------------------------------------------------------------------

    def add_sequence(
        self, prompt: Prompt, *, retention: Retention | None = None, decode_priority: int = blocks.DEFAULT_PRIORITY,
        decode_ttl_ms: int | None = None, stream: Any = None,
    ) -> int:  # fmt: skip
        """``add_sequence_batch`` for one prompt; returns the sequence id."""
        own = None if retention is None else retention_rows(retention)
        out = self._admit([self._prompt(prompt)], [own], decode_priority, decode_ttl_ms, stream, False)
        return int(out[0, requests.O_ID])

    def add_sequence_batch(
        self, prompts: Sequence[Prompt], *, retention: Sequence[Retention | None] | None = None,
        decode_priority: int = blocks.DEFAULT_PRIORITY, decode_ttl_ms: int | None = None, stream: Any = None,
        allow_partial_batch: bool = False,
    ) -> Admission:  # fmt: skip
        """Admit prompts: reuse what is cached on either tier, take blocks for the rest. Changes the pool.

        All prompts are matched before anything is taken, so each gets the full blocks that ``match_prefix`` promised right before. All
        or nothing, unless ``allow_partial_batch``: then the head of the batch that fits. ``retention`` has one list of ranges, or
        None, per prompt. Raises OutOfBlocks, OutOfSequences, ValueError, TypeError. ``stream``: the engine's, which will use the blocks.
        """
        partial = bool_argument("allow_partial_batch", allow_partial_batch)
        keys = [self._prompt(prompt) for prompt in list_argument("prompts", prompts)]
        given = [None] * len(keys) if retention is None else list_argument("retention", retention)
        ranges = [None if one is None else retention_rows(one) for one in given]
        if len(ranges) != len(keys):
            raise ValueError(f"retention has {len(ranges)} entries: accepted is one for each of the {len(keys)} prompts")
        out = self._admit(keys, ranges, decode_priority, decode_ttl_ms, stream, partial)
        return Admission(out[:, requests.O_ID].copy(), *out[:, requests.O_CACHED : requests.O_MISSED + 1].T.astype(np.int32))

    def _admit(
        self, keys: list[BlockKeys], ranges: Sequence[npt.NDArray[np.int64] | None], decode_priority: int, decode_ttl_ms: int | None,
        stream: Any, allow_partial: bool,
    ) -> npt.NDArray[np.int64]:  # fmt: skip
        """The outcome rows (see ``state.requests``) of the requests that were admitted."""
        rows = np.concatenate([key.request for key in keys]) if keys else np.zeros((0, requests.REQUEST), np.int64)
        rows[:, requests.R_PRIORITY] = priority_argument("decode_priority", decode_priority)
        rows[:, requests.R_TTL] = ttl_argument("decode_ttl_ms", decode_ttl_ms)
        moves = longest = 0
        for i, (key, own) in enumerate(zip(keys, ranges, strict=True)):
            blocks_held = -(-len(key.tokens) // self.tokens_per_block)
            moves, longest = moves + 2 * blocks_held, max(longest, blocks_held)
            if own is not None:
                rows[i, requests.R_RANGES], rows[i, requests.R_RANGE_COUNT] = address(own), len(own)
            if key.extra_ids is not None:
                self._enable_extra()
        if self._columns < min(longest, self.device_blocks):
            raise ValueError(f"a prompt of {longest} blocks passes max_sequence_tokens={self._columns * self.tokens_per_block}")
        out = np.zeros((len(keys), requests.OUTCOME), np.int64)
        out[:, requests.O_ID] = blocks.NONE
        try:
            on = NULL_STREAM if stream is None else stream
            n = self._decide(moves, on, self._admit_named, rows, out, self.now(), allow_partial, keys)
        except BaseException:
            # Ctrl-C is delivered behind the decision: nobody gets the ids.
            admitted = out[out[:, requests.O_ID] != blocks.NONE, requests.O_ID]
            if len(admitted) and not self.closed:
                with suppress(KVPoolError):
                    self.release(admitted)
            raise
        return out[:n]

    def _admit_named(
        self, header: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], out: npt.NDArray[np.int64], now: int, allow_partial: bool,
        keys: list[BlockKeys],
    ) -> int:  # fmt: skip
        """The verb, behind a note of the namespaces that events will name. The state lock is held by the caller."""
        self._names.learn(keys)
        return int(admission.admit(header, rows, out, now, allow_partial))

    def append_tokens(self, ids: Ids, tokens: Any, counts: Any = None, *, stream: Any = None) -> None:
        """Grow sequences: sequence ``ids[i]`` gets the next ``counts[i]`` of ``tokens``; with one id, all of them. Changes the pool.

        Takes blocks as needed, all or nothing. Raises OutOfBlocks, UnknownSequence, DeviceError, ValueError.
        """
        which, new = id_array("ids", ids), token_array("tokens", tokens, empty=True)
        if counts is None:
            if len(which) != 1:
                raise ValueError("counts: accepted is one for each id where there are several")
            counts = len(new)
        each = count_array("counts", counts, which)
        if int(each.sum()) != len(new):
            raise ValueError(f"counts add up to {int(each.sum())}, tokens has {len(new)} entries")
        moves = 2 * (len(new) // self.tokens_per_block + len(which))
        self._decide(moves, stream, growth.append, which, each, new, self.now(), ids=which)

    def commit(self, ids: Ids, counts: Any = None, *, stream: Any = None) -> None:
        """Say that the KV of the first ``counts[i]`` tokens of each sequence is written (default: of all), and publish full blocks.

        ``counts`` never fall: to take tokens back, ``rewind``. Changes the pool. Raises UnknownSequence, DeviceError, ValueError.
        """
        which = id_array("ids", ids)
        each = np.full(len(which), blocks.NONE, np.int64) if counts is None else count_array("counts", counts, which)
        self._decide(0, stream, growth.commit, which, each, self.now(), ids=which)

    def rewind(self, ids: Ids, counts: Any, *, stream: Any = None) -> None:
        """Drop the last ``counts[i]`` tokens of each sequence. A block that others hold is copied, never written. Changes the pool.

        Raises OutOfBlocks (for such copies), UnknownSequence, DeviceError, ValueError.
        """
        which = id_array("ids", ids)
        self._decide(2 * len(which), stream, growth.rewind, which, count_array("counts", counts, which), self.now(), ids=which)

    def release(self, ids: Ids, *, store: bool = True, stream: Any = None) -> None:
        """Give sequences back, tail first. What was committed stays reusable until evicted; with ``store=False`` what they computed goes.

        Changes the pool. Raises UnknownSequence, ValueError.
        """
        which = id_array("ids", ids)
        self._decide(0, stream, growth.release, which, bool_argument("store", store), self.now(), ids=which)

    def evictable_if_released(self, ids: Ids) -> int:
        """Device blocks that would become free if these sequences were released together. Does not change the pool."""
        which = id_array("ids", ids)
        with self._lock:
            named = self._table[self._rows(which)]
            found, times = np.unique(named[named != blocks.NONE], return_counts=True)
            return int(np.count_nonzero(self._state.blocks["word"][found] == times))

    def _rows(self, which: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of live sequences. The state lock is held by the caller."""
        self._check_open()
        error = live.check(self._state.header, which, True)
        if error:
            raise self._error(error, which)
        return which & 0xFFFFFFFF

    def block_table(self, ids: Ids, stream: Any = None) -> BlockTable:
        """Where the blocks of these sequences are, in the persistent host table. Raises UnknownSequence, DeviceError.

        ``stream``: where the engine goes on with them; it waits for what they were used on before.
        """
        which = id_array("ids", ids)
        if stream is not None:
            self._decide(0, stream, live.use, which, ids=which)
        with self._lock:
            rows = self._rows(which)
            return BlockTable(self._table, rows, self._state.sequences["length"][rows].astype(np.int64), self.tokens_per_block)

    def copy_batch_block_offsets(
        self, target: Any, ids: Ids, *, rows: Any = None, max_blocks: int | None = None, scale: Any = 1, v_offset: Any = None,
        stream: Any = None,
    ) -> None:  # fmt: skip
        """Hand the block tables of sequences, as they are now, over to ``stream``: enqueue the write of their rows of ``target``.

        ``target``: int32[rows, columns] that the device can write, each row without gaps, of any length; with one more dimension in
        front, [pools], where ``scale`` is a list, and behind that [2], for K and V, where ``v_offset`` (one, or one per pool) is given.
        Block id b becomes ``b * scale``, for V ``b * scale + v_offset``; where there is no block is -1. ``rows``: the row of the target
        for each sequence, all different (default: 0, 1, ...).

        Rows are written whole, and a sequence that does not fit is an error; with ``max_blocks`` only that many columns are, and what
        is behind them, of the sequence and of the target, is left out. Only columns in use travel. What is handed over belongs to this
        call: the sequences may be changed, released and their blocks and rows reused as soon as it returns.

        ``stream`` (default: the one that all these sequences used last) waits for what they were used on before. Waits, outside the
        locks, while ``staging_depth`` hand-overs are under way. Thread-safe; changes nothing but the stream of the sequences. Raises
        UnknownSequence, DeviceError, TypeError, ValueError.
        """
        which, table = id_array("ids", ids), self._device.as_table(target)
        planes = planes_argument(table, scale, v_offset, self.device_blocks)
        places = rows_argument(None if rows is None else id_array("rows", rows).copy(), len(which), table.shape[-2])
        columns = table.shape[-1] if max_blocks is None else integer_argument("max_blocks", max_blocks, 1, table.shape[-1])
        on = None if stream is None else self._device.as_stream(stream)
        if len(which):
            self._hand_over(HandOver(table, planes, places, columns, cut=max_blocks is not None), which, on)
        else:
            with self._lock:
                self._check_open()

    def _hand_over(self, hand_over: HandOver, which: npt.NDArray[np.int64], stream: Stream | None) -> None:
        """Stage and enqueue; again where a sequence has outgrown the buffer meanwhile."""
        self._refuse_inside("copy_batch_block_offsets")
        while not hand_over.enqueued:
            buffer = self._staging.take(hand_over.nbytes(columns_now(self._state.header, which)))
            try:
                decided = self._decide(0, stream, self._stage, which, hand_over, buffer, stream)
            finally:
                if not hand_over.enqueued:
                    self._staging.give_back(buffer)
            if decided and not hand_over.enqueued:
                raise hand_over.error or DeviceError(f"the device has failed: {self._transfer.broken}", sticky=True)

    def _stage(
        self, header: npt.NDArray[np.int64], which: npt.NDArray[np.int64], hand_over: HandOver, buffer: Buffer, stream: Stream | None
    ) -> int:
        """Snapshot the tables; whether the buffer was large enough. The state lock is held by the caller."""
        self._state.reserve_accesses(len(which) if stream is not None and self._transfer.order is not None else 0)
        with self._device.host_access(stores=[buffer.array]):
            width = hand_over.stage(header, which, buffer)
        if width == staging.SEVERAL_STREAMS:
            raise ValueError(f"stream=None: sequence {which[header[blocks.DETAIL]]} was used on another stream than {which[0]}: name one")
        if width == staging.TOO_WIDE:
            raise ValueError(
                f"target has {hand_over.columns} columns: sequence {which[header[blocks.DETAIL]]} has {header[blocks.DETAIL2]} blocks; "
                "accepted are as many, or max_blocks"
            )
        if width < 0:
            return 0 if width == staging.TOO_SMALL else width
        if stream is None and self._transfer.order is not None:
            stream = self._transfer.order.stream(int(self._state.sequences["stream"][which[0] & 0xFFFFFFFF]))
        self._transfer.put_behind(partial(hand_over.enqueue, self._staging, self._device, buffer, width, stream or NULL_STREAM))
        return 1

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

    # -- moving content between the tiers --------------------------------------------------------

    def prefetch(self, prompt: Prompt) -> int:
        """Onboard the prompt's cached full blocks that are on the host only, without holding them; returns how many came.

        Stops where no device block can be had. Changes the pool.
        """
        keys = self._prompt(prompt)
        ids = np.empty(len(keys.keys), np.int32)
        return int(self._decide(2 * len(ids), None, holds.prefetch, keys.request[0], ids, self.now()))

    def offload(self, prompt: Any) -> int:
        """Copy cached device blocks to the host and keep them, so that their eviction will cost no copy; returns how many were copied.

        Takes a prompt's BlockKeys, or keys. Stops where the host has no room. Changes the pool.
        """
        rows = key_rows(self._prompt(prompt) if isinstance(prompt, BlockKeys) or not _is_keys(prompt) else prompt)
        return int(self._decide(len(rows), None, holds.offload, rows, self.now()))

def _is_keys(value: Any) -> bool:
    """Whether an argument is keys rather than tokens: two dimensions, or single keys in a sequence."""
    if isinstance(value, np.ndarray):
        return value.ndim == 2
    return isinstance(value, (list, tuple)) and len(value) > 0 and not is_integer(value[0])
