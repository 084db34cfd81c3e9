"""KVCacheManager: the order of things. Arguments are checked, a decision is made under the state lock, its moves are enqueued behind it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool import events as kv_events
from kvpool import stats as statistics
from kvpool.block_table import BlockTable
from kvpool.device import get_device
from kvpool.device.base import Device
from kvpool.errors import (
    BlockNotFound,
    DeviceError,
    KVPoolError,
    LeaseExpired,
    OutOfBlocks,
    OutOfSequences,
    PoolBusy,
    PoolClosed,
    UnknownSequence,
)
from kvpool.interrupt import DeferInterrupt
from kvpool.layout import BlockLayout, integer_argument
from kvpool.leases import Lease
from kvpool.memory import MemoryPools
from kvpool.retention import RetentionRange, priority_argument, retention_rows, ttl_argument
from kvpool.sequence import (
    Admission,
    BlockKeys,
    Match,
    address,
    count_array,
    extra_array,
    id_array,
    is_integer,
    key_row,
    key_rows,
    namespace_argument,
    token_array,
)
from kvpool.state import admission, blocks, growth, hashing, holds, requests
from kvpool.state.verify import verify as verify_state
from kvpool.transfer import Transfer

MAX_TOKENS = 262_144
Ids = Any
Prompt = Any
Retention = Sequence[RetentionRange | tuple[int | None, ...]]


class CloseReport(NamedTuple):
    """What was still held when a pool was closed: sequence ids, and owners of open leases."""

    sequences: list[int]
    leases: list[str]


class KVCacheManager:
    """A paged KV cache in two tiers: device blocks, and host blocks that take what leaves the device.

    Parameters
    ----------
    layout : shape and bytes of a block.
    device_blocks, host_blocks : capacities; ids [0, device_blocks) are device blocks, the rest host blocks.
    device : "auto", "cpu", or a ``kvpool.device.base.Device`` that serves no other pool.
    max_sequences, max_sequence_tokens : bounds of what lives at once; they size the block table (default: 256 sequences of as many
        tokens as fit on the device, at most 262,144).
    partial_reuse : also reuse the first tokens of a block that matches in part, by copying them.
    offload_min_priority, offload_min_reuse : content below either is forgotten, not offloaded, when evicted.
    secret : 16 to 64 bytes that key the hash of content; random by default. Pools with one secret agree on keys.
    event_capacity : events kept until ``events`` is called; 0 (default) records none.
    clock : () -> int, monotonic milliseconds.

    All methods are thread-safe. A call that raises has changed nothing. Calls that take a ``stream`` order the engine's accesses on it
    and the pool's copies; the default is the device's null stream.
    """

    def __init__(
        self, layout: BlockLayout, *, device_blocks: int, host_blocks: int = 0, device: str | Device = "auto", max_sequences: int = 256,
        max_sequence_tokens: int | None = None, partial_reuse: bool = True, offload_min_priority: int = 30, offload_min_reuse: int = 1,
        secret: bytes | None = None, event_capacity: int = 0, clock: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(layout, BlockLayout):
            raise TypeError(f"layout={layout!r:.80}: accepted is a BlockLayout")
        if secret is not None and (not isinstance(secret, bytes) or not 16 <= len(secret) <= 64):
            raise ValueError("secret: accepted are 16 to 64 bytes")
        if not isinstance(partial_reuse, bool):
            raise TypeError(f"partial_reuse={partial_reuse!r}: accepted are True and False")
        width = layout.tokens_per_block
        if width > np.iinfo(np.int16).max:
            raise ValueError(f"tokens_per_block={width}: accepted are up to {np.iinfo(np.int16).max}")
        priority_argument("offload_min_priority", offload_min_priority)
        integer_argument("offload_min_reuse", offload_min_reuse, 1, 65535)
        integer_argument("event_capacity", event_capacity, 0, 1 << 31)
        integer_argument("max_sequences", max_sequences, 1, 1 << 24)
        if max_sequence_tokens is not None:
            integer_argument("max_sequence_tokens", max_sequence_tokens, 1, (1 << 31) - 1)
        self.layout, self.tokens_per_block, self.partial_reuse = layout, width, partial_reuse
        self._device = get_device(device)
        self._pools = MemoryPools(self._device, layout, device_blocks, host_blocks)
        self.device_blocks, self.host_blocks = int(device_blocks), int(host_blocks)
        tokens = max_sequence_tokens or min(self.device_blocks * width, MAX_TOKENS)
        self._state = blocks.State(
            device_blocks=self.device_blocks, host_blocks=self.host_blocks, width=width, sequences=max_sequences,
            columns=-(-tokens // width), secret=secret or os.urandom(32), partial_reuse=partial_reuse,
            offload_min_priority=offload_min_priority, offload_min_reuse=offload_min_reuse, event_capacity=event_capacity,
        )  # fmt: skip
        self.now: Callable[[], int] = clock or _milliseconds
        self._table = self._state.table.view()
        self._table.flags.writeable = False
        self._lock = threading.Lock()
        self._transfer = Transfer(self._state, self._lock, self._device, self.now)
        self._leases: dict[int, Lease] = {}
        self._lease_count = 0
        self._owns_device = not isinstance(device, Device)
        self._report: CloseReport | None = None
        kv_events.announce(self._state)

    # -- the shape of every decision ------------------------------------------------------------

    def _decide(self, moves: int, stream: Any, verb: Callable[..., Any], *args: Any) -> Any:
        """Run a jitted verb under the state lock, queue its moves (at most ``moves``), and enqueue everything queued behind it.

        What other threads have decided is enqueued too: a block that this call hands out may wait for it.
        """
        on = self._device.as_stream(stream)
        with DeferInterrupt():
            with self._lock:
                self._check_open()
                self._state.reserve_moves(moves)
                result = verb(self._state.header, *args)
                if result < 0:
                    raise self._error(result, args[0])
                self._transfer.collect(on)
            if self._transfer.waiting:
                self._transfer.drain()
        return result

    def _check_open(self) -> None:
        if self._report is not None:
            raise PoolClosed("the pool is closed")
        if self._transfer.broken is not None:
            raise PoolClosed(f"the device has failed: {self._transfer.broken}") from self._transfer.broken

    def _error(self, code: int, ids: npt.NDArray[np.int64]) -> Exception:
        """The exception for what a verb refused; its details are in the header."""
        detail, more = int(self._state.header[blocks.DETAIL]), int(self._state.header[blocks.DETAIL2])
        if code == admission.SHORT_OF_BLOCKS:
            return OutOfBlocks("device", detail, more)
        if code == admission.SHORT_OF_SEQUENCES:
            return OutOfSequences(detail, more)
        which = int(ids[detail])
        if code == growth.UNKNOWN:
            return UnknownSequence(f"{which} is not a live sequence of this pool")
        if code == growth.DUPLICATE:
            return ValueError(f"sequence {which} is named twice")
        if code == growth.FAILED:
            return DeviceError(f"sequence {which} lost a block to a failed copy: release it")
        if code == growth.TOO_LONG:
            return ValueError(f"sequence {which} would pass max_sequence_tokens={self._state.table.shape[1] * self.tokens_per_block}")
        return ValueError(f"the count of sequence {which} is out of range: its bound is {more} tokens")

    # -- prompts ---------------------------------------------------------------------------------

    def block_keys(
        self, tokens: Any, *, salt: bytes | str | None = None, adapter_id: int | str | None = None, extra_ids: Any = None
    ) -> BlockKeys:
        """Hash a prompt once, before any lock; every call that takes a prompt takes the result.

        ``tokens``: n token ids in any integer buffer (int32 is not copied) or list. ``salt`` and ``adapter_id`` name the namespace:
        equal tokens in different ones never match. ``extra_ids`` int64[n] tell tokens apart whose ids do not, such as image
        placeholders. Raises TypeError / ValueError. Reads no state; thread-safe.
        """
        found = token_array("tokens", tokens)
        extra = extra_array(extra_ids, len(found))
        namespace_argument("salt", salt, (bytes, str))
        adapter = int(adapter_id) if isinstance(adapter_id, np.integer) else namespace_argument("adapter_id", adapter_id, (int, str))
        header, width = self._state.header, self.tokens_per_block
        in_key = bool(header[blocks.GUARD] & hashing.GUARDS["namespace_in_key"])
        root = hashing.namespace_root(self._state.secret, salt, adapter, in_key)
        keys = np.empty((len(found) // width, 2), np.uint64)
        result = BlockKeys(found, keys, salt, adapter, extra, root, (self._state.fingerprint, width))
        request = result.request[0]
        job = np.array(
            [request[requests.R_TOKENS], request[requests.R_EXTRA], request[requests.R_KEYS], len(keys), width,
             header[blocks.SECRET0], header[blocks.SECRET1], root[1], root[2], header[blocks.GUARD]], np.int64,
        )  # fmt: skip
        hashing.chain_keys(job)
        return result

    def _prompt(self, prompt: Prompt) -> BlockKeys:
        if not isinstance(prompt, BlockKeys):
            return self.block_keys(prompt)
        if prompt.origin != (self._state.fingerprint, self.tokens_per_block):
            raise ValueError("the keys were made by a pool with another secret or another tokens_per_block")
        return prompt

    def _enable_extra(self, prompts: Sequence[BlockKeys]) -> None:
        if any(prompt.extra_ids is not None for prompt in prompts):
            with self._lock:
                self._state.enable_extra()

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
            result = growth.check(self._state.header, ids, True) or growth.growth(self._state.header, ids, counts)
            if result < 0:
                raise self._error(result, ids)
        return int(result)

    # -- sequences -------------------------------------------------------------------------------

    def add_sequence(
        self, prompt: Prompt, *, retention: Retention | None = None, decode_priority: int = blocks.DEFAULT_PRIORITY,
        decode_ttl_ms: int | None = None, stream: Any = None,
    ) -> int:  # fmt: skip
        """``add_sequence_batch`` for one prompt; returns the sequence id."""
        batch = self.add_sequence_batch([prompt], retention=[retention], decode_priority=decode_priority, decode_ttl_ms=decode_ttl_ms,
                                        stream=stream)  # fmt: skip
        return int(batch.ids[0])

    def add_sequence_batch(
        self, prompts: Sequence[Prompt], *, retention: Sequence[Retention | None] | None = None,
        decode_priority: int = blocks.DEFAULT_PRIORITY, decode_ttl_ms: int | None = None, stream: Any = None, allow_partial_batch: bool = False,
    ) -> Admission:  # fmt: skip
        """Admit prompts: reuse what is cached on either tier, take blocks for the rest. Changes the pool.

        All prompts are matched before anything is taken, so each gets the full blocks that ``match_prefix`` promised right before. All
        or nothing, unless ``allow_partial_batch``: then the head of the batch that fits. ``retention`` has one list of ranges, or
        None, per prompt. Raises OutOfBlocks, OutOfSequences, ValueError, TypeError. ``stream``: the engine's, which will use the blocks.
        """
        keys = [self._prompt(prompt) for prompt in prompts]
        ranges = [None] * len(keys) if retention is None else [None if r is None else retention_rows(r) for r in retention]
        if len(ranges) != len(keys):
            raise ValueError(f"retention has {len(ranges)} entries: accepted is one for each of the {len(keys)} prompts")
        priority, ttl = priority_argument("decode_priority", decode_priority), ttl_argument("decode_ttl_ms", decode_ttl_ms)
        rows = np.concatenate([key.request for key in keys]) if keys else np.zeros((0, requests.REQUEST), np.int64)
        rows[:, requests.R_PRIORITY], rows[:, requests.R_TTL] = priority, ttl
        for row, own in zip(rows, ranges, strict=True):
            if own is not None:
                row[requests.R_RANGES], row[requests.R_RANGE_COUNT] = address(own), len(own)
        columns, longest = self._state.table.shape[1], max((len(key) for key in keys), default=0)
        if columns < min(-(-longest // self.tokens_per_block), self.device_blocks):
            raise ValueError(f"a prompt of {longest} tokens passes max_sequence_tokens={columns * self.tokens_per_block}")
        self._enable_extra(keys)
        out = np.zeros((len(keys), requests.OUTCOME), np.int64)
        moves = 2 * sum(len(key) // self.tokens_per_block + 1 for key in keys)
        n = self._decide(moves, stream, admission.admit, rows, out, self.now(), allow_partial_batch)
        ids = out[:n, requests.O_ID].copy()
        return Admission(ids, *out[:n, requests.O_CACHED : requests.O_MISSED + 1].T.astype(np.int32))

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
        self._decide(moves, stream, growth.append, which, each, new, self.now())

    def commit(self, ids: Ids, counts: Any = None, *, stream: Any = None) -> None:
        """Say that the KV of the first ``counts[i]`` tokens of each sequence is written (default: of all), and publish full blocks.

        ``counts`` never fall: to take tokens back, ``rewind``. Changes the pool. Raises UnknownSequence, DeviceError, ValueError.
        """
        which = id_array("ids", ids)
        each = np.full(len(which), blocks.NONE, np.int64) if counts is None else count_array("counts", counts, which)
        self._decide(0, stream, growth.commit, which, each, self.now())

    def rewind(self, ids: Ids, counts: Any, *, stream: Any = None) -> None:
        """Drop the last ``counts[i]`` tokens of each sequence. A block that others hold is copied, never written. Changes the pool.

        Raises OutOfBlocks (for such copies), UnknownSequence, DeviceError, ValueError.
        """
        which = id_array("ids", ids)
        self._decide(2 * len(which), stream, growth.rewind, which, count_array("counts", counts, which), self.now())

    def release(self, ids: Ids, *, store: bool = True, stream: Any = None) -> None:
        """Give sequences back, tail first. What was committed stays reusable until evicted; with ``store=False`` what they computed goes.

        Changes the pool. Raises UnknownSequence, ValueError.
        """
        self._decide(0, stream, growth.release, id_array("ids", ids), bool(store), self.now())

    def evictable_if_released(self, ids: Ids) -> int:
        """Device blocks that would become free if these sequences were released together. Does not change the pool."""
        named = self._table_of(ids)
        found, times = np.unique(named.table[named.rows][named.table[named.rows] != blocks.NONE], return_counts=True)
        with self._lock:
            return int(np.count_nonzero(self._state.blocks["word"][found] == times))

    def _table_of(self, ids: Ids) -> BlockTable:
        which = id_array("ids", ids)
        with self._lock:
            self._check_open()
            error = growth.check(self._state.header, which, True)
            if error:
                raise self._error(error, which)
            rows = which & 0xFFFFFFFF
            return BlockTable(self._table, rows, self._state.sequences["length"][rows].astype(np.int64))

    def block_table(self, ids: Ids, stream: Any = None) -> BlockTable:
        """Where the blocks of these sequences are, in the persistent host table. Raises UnknownSequence, DeviceError."""
        self._device.as_stream(stream)
        return self._table_of(ids)

    def _field(self, name: str, ids: Ids) -> Any:
        rows = self._table_of(ids).rows
        found = self._state.sequences[name][rows]
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

    def prefetch(self, prompt: Prompt, *, stream: Any = None) -> int:
        """Onboard the prompt's cached full blocks that are on the host only, without holding them; returns how many came.

        Stops where no device block can be had. Changes the pool.
        """
        keys = self._prompt(prompt)
        ids = np.empty(len(keys.keys), np.int32)
        return int(self._decide(2 * len(ids), stream, holds.prefetch, keys.request[0], ids, self.now()))

    def offload(self, prompt: Any, *, stream: Any = None) -> int:
        """Copy cached device blocks to the host and keep them, so that their eviction will cost no copy; returns how many were copied.

        Takes a prompt's BlockKeys, or keys. Stops where the host has no room. Changes the pool.
        """
        rows = key_rows(self._prompt(prompt) if isinstance(prompt, BlockKeys) or not _is_keys(prompt) else prompt)
        return int(self._decide(len(rows), stream, holds.offload, rows, self.now()))

    # -- pins ------------------------------------------------------------------------------------

    def pin(self, keys: Any, *, owner: str = "", tier: str | None = None) -> Lease:
        """Pin the block of each key on ``tier``, or (None) its host copy where there is one, else its device block.

        Raises BlockNotFound, naming the first key that is not there, with nothing pinned.
        """
        wanted = {None: holds.ANY_TIER, "device": blocks.DEVICE, "host": blocks.HOST}
        if tier not in wanted:
            raise ValueError(f"tier={tier!r}: accepted are None, 'device' and 'host'")
        rows = key_rows(keys)
        lease = self._pin(owner, rows, np.empty(len(rows), np.int64), wanted[tier])
        if isinstance(lease, int):
            raise BlockNotFound(f"key {rows[lease].tobytes().hex()} is not cached{'' if tier is None else f' on the {tier}'}")
        return lease

    def find_and_pin_host(self, key: Any, *, owner: str = "") -> Lease | None:
        """Pin the host copy of one key (16 bytes or uint64[2]), or None if it has none. Finding and pinning are one step."""
        lease = self._pin(owner, key_row(key), np.empty(1, np.int64), blocks.HOST)
        return None if isinstance(lease, int) else lease

    def pin_blocks(self, ids: Any, *, owner: str = "") -> Lease:
        """Pin blocks by id; each must hold content or be held. Raises BlockNotFound with nothing pinned."""
        which = id_array("ids", ids)
        lease = self._pin(owner, None, which.copy(), holds.ANY_TIER)
        if isinstance(lease, int):
            raise BlockNotFound(f"block {which[lease]} is unknown or holds nothing")
        return lease

    def _pin(self, owner: str, keys: npt.NDArray[np.int64] | None, ids: npt.NDArray[np.int64], tier: int) -> Lease | int:
        """A lease, or the place of the first block that cannot be pinned."""
        if not isinstance(owner, str):
            raise TypeError(f"owner={owner!r:.80}: accepted is a string")
        with DeferInterrupt():
            with self._lock:
                self._check_open()
                header = self._state.header
                failed = holds.pin_blocks(header, ids) if keys is None else holds.pin_keys(header, keys, tier, ids)
                if failed:
                    return int(header[blocks.DETAIL])
                self._lease_count += 1
                public = None if keys is None else keys.view(np.uint64)
                lease = Lease(
                    self, self._lease_count, owner, int(header[blocks.GENERATION]), self.now(), ids, public, self._pools.addresses(ids)
                )
                self._leases[lease.id] = lease
            if self._transfer.waiting:
                self._transfer.drain()
        return lease

    def is_leased(self, lease: Lease) -> bool:
        """Whether a lease is open."""
        return self._leases.get(lease.id) is lease

    def close_lease(self, lease: Lease) -> None:
        """What ``Lease.close`` does."""
        with DeferInterrupt(), self._lock:
            if self._report is not None:
                raise PoolClosed("the pool is closed")
            if not self.is_leased(lease):
                raise LeaseExpired(f"lease {lease.id} of {lease.owner!r} was closed or revoked")
            del self._leases[lease.id]
            holds.unpin(self._state.header, lease.blocks, self.now())

    @property
    def leases(self) -> list[Lease]:
        """Open leases, oldest first."""
        with self._lock:
            return list(self._leases.values())

    def revoke(self, owner: str) -> int:
        """Close all leases of an owner, whose readers then read memory that may be reused; returns how many."""
        with DeferInterrupt(), self._lock:
            self._check_open()
            mine = [lease for lease in self._leases.values() if lease.owner == owner]
            for lease in mine:
                del self._leases[lease.id]
                holds.unpin(self._state.header, lease.blocks, self.now())
        return len(mine)

    # -- the pool as a whole ---------------------------------------------------------------------

    @property
    def device_pool(self) -> npt.NDArray[Any]:
        """The device tier, shaped ``layout.device_shape(device_blocks)``, in the storage dtype."""
        return self._pools.device_pool

    @property
    def host_pool(self) -> npt.NDArray[Any]:
        """The host tier, shaped ``layout.host_shape(host_blocks)``; every block is contiguous."""
        return self._pools.host_pool

    @property
    def closed(self) -> bool:
        return self._report is not None

    def refresh(self, now_ms: int | None = None) -> int:
        """Let blocks whose time is over fall to the back of the default priority; returns how many. Changes the pool."""
        now = self.now() if now_ms is None else integer_argument("now_ms", now_ms, 0, (1 << 62))
        return int(self._decide(0, None, holds.refresh, now))

    def events(self) -> list[kv_events.Event]:
        """What has changed in the cache since the last call; each event is given once."""
        with self._lock:
            self._check_open()
            copied = kv_events.take(self._state)
        return kv_events.decode(*copied, self._state)

    def stats(self) -> statistics.Stats:
        """A snapshot; also of a closed pool."""
        with self._lock:
            return statistics.snapshot(self._state, self.layout.block_bytes, len(self._leases))

    def verify(self) -> None:
        """Check every invariant of the state; raises IntegrityError that names the one that does not hold. Slow."""
        with self._lock:
            self._check_open()
            leased = [lease.blocks for lease in self._leases.values()]
            verify_state(self._state, np.concatenate(leased) if leased else np.empty(0, np.int64))

    def _live(self) -> npt.NDArray[np.int64]:
        sequences = self._state.sequences
        rows = np.flatnonzero(sequences["live"])
        return (sequences["generation"][rows].astype(np.int64) << 32) | rows

    def reset(self, force: bool = False) -> None:
        """Forget all content. Raises PoolBusy while sequences live, unless ``force`` releases them. Pinned blocks stay readable."""
        with DeferInterrupt(), self._lock:
            self._check_open()
            ids = self._live()
            if len(ids) and not force:
                raise PoolBusy(f"{len(ids)} sequences are live: release them, or reset(force=True)")
            growth.release(self._state.header, ids, False, self.now())
            holds.reset(self._state.header, self.now())

    def close(self) -> CloseReport:
        """Give all memory back; returns what was still held. Further calls, but ``stats`` and ``close``, raise PoolClosed."""
        with DeferInterrupt():
            if self._transfer.waiting:
                self._transfer.drain()
            with self._lock:
                if self._report is not None:
                    return self._report
                self._report = CloseReport(self._live().tolist(), [lease.owner for lease in self._leases.values()])
                self._leases.clear()
            self._device.synchronize()
            self._pools.close()
            if self._owns_device:
                self._device.close()
        return self._report

    def __enter__(self) -> KVCacheManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        report = self.close()
        if kind is None and (report.sequences or report.leases):
            held = f"{len(report.sequences)} sequences and {len(report.leases)} leases"
            raise KVPoolError(f"the pool was closed while {held} were held: {report}")


def _milliseconds() -> int:
    return time.monotonic_ns() // 1_000_000


def _is_keys(value: Any) -> bool:
    """Whether an argument is keys rather than tokens: two dimensions, or single keys in a sequence."""
    if isinstance(value, np.ndarray):
        return value.ndim == 2
    return isinstance(value, (list, tuple)) and len(value) > 0 and not is_integer(value[0])
