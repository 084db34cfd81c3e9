"""The arrays of every group of layers, and what the groups have in common: the matrix of their headers, and the ring of events."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.state.blocks import (
    A_ACCESSES,
    A_BLOCKS,
    A_CHILDREN,
    A_COUNTERS,
    A_EVENT_EXTRA,
    A_EVENT_TOKENS,
    A_EVENTS,
    A_EXTRA,
    A_HEAP,
    A_HISTOGRAMS,
    A_INDEX,
    A_LISTS,
    A_MOVES,
    A_RING,
    A_ROW_EXTRA,
    A_ROW_TOKENS,
    A_ROWS,
    A_SEQUENCES,
    A_TABLE,
    A_TOKEN_MOVES,
    A_TOKENS,
    ACCESSES_CAPACITY,
    ATTENTION,
    BINS,
    BLOCK,
    BLOCK_TOKENS,
    BLOCKS,
    BUCKETS,
    BUCKETS_MAX,
    CHILD_BUCKETS,
    COLUMNS,
    COUNTERS,
    DEFAULT_PRIORITY,
    DEVICE,
    DEVICE_BLOCKS,
    DEVICE_FIRST,
    EMPTY,
    EVENT,
    EVENTS,
    FREE_ROWS,
    GROUP,
    GUARD,
    HAS_EXTRA,
    HEADER,
    HISTOGRAMS,
    HOST,
    HOST_FIRST,
    KIND,
    LISTS_PER_TIER,
    LOWEST,
    MOVES_CAPACITY,
    NONE,
    OFFLOAD_PRIORITY,
    OFFLOAD_REUSE,
    RECURRENT,
    RING,
    SECRET0,
    SECRET1,
    SEQUENCE,
    SEQUENCES,
    SINKS,
    SNAPSHOT,
    TOKEN_MOVES_CAPACITY,
    WIDTH,
    WINDOW,
)
from kvpool.state.hashing import GUARDS, block_secret, fingerprint

_POOLS = itertools.count(1)
Ids = npt.NDArray[np.int64]


class GroupSizes(NamedTuple):
    """Of one group: its blocks; tokens of its window and sinks, 0 for none; what it keeps; blocks from one kept state to the next, or 0."""

    device_blocks: int
    host_blocks: int
    window: int = 0
    sinks: int = 0
    kind: int = ATTENTION
    snapshot: int = 0


class Settings(NamedTuple):
    """What all groups of a pool have in common: tokens per block, rows, columns of a row, and rules."""

    width: int
    sequences: int
    columns: int
    secret: bytes
    partial_reuse: bool = True
    offload_min_priority: int = 30
    offload_min_reuse: int = 1
    event_capacity: int = 0


def buckets(count: int) -> int:
    """Buckets of the index, and of the children, of ``count`` blocks: four a block."""
    return min(4 * count, BUCKETS_MAX)


def state_bytes(groups: Sequence[GroupSizes], width: int, sequences: int, columns: int, events: int) -> int:
    """Bytes that the states of these groups will take."""
    count = sum(group.device_blocks + group.host_blocks for group in groups)
    rows = len(groups) * sequences * (SEQUENCE.itemsize + 4 + 4 * columns)
    rows += 4 * sum(group.kind == RECURRENT for group in groups) * sequences * columns * width
    return count * (BLOCK.itemsize + 36 + 4 * width) + rows + events * (EVENT.itemsize + 4 * width)


def _aligned(count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Zeros that begin at a line of a cache."""
    memory = np.zeros(count * dtype.itemsize + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][: count * dtype.itemsize].view(dtype)


class Ring:
    """The events of all groups, and their numbers."""

    def __init__(self, capacity: int, width: int) -> None:
        self.numbers = np.zeros(RING, np.int64)
        self.events = np.zeros(capacity, EVENT)
        self.tokens = np.zeros((capacity, width), np.int32)
        self.extra = np.zeros((1, 1), np.int64)


class State:
    """Owns every array of one group but the ring, and fills its ``header``, int64[HEADER], which points to them.

    Not thread-safe: the manager's state lock guards it.
    """

    def __init__(
        self, header: Ids, sizes: GroupSizes, settings: Settings, ring: Ring, table: npt.NDArray[np.int32], generation: int
    ) -> None:
        count, width = sizes.device_blocks + sizes.host_blocks, settings.width
        self.header, self.ring = header, ring
        self.blocks = np.zeros(count, BLOCK)
        self.tokens = np.zeros((count, width), np.int32)
        self.extra = np.zeros((1, 1), np.int64)
        self.lists = np.full((LOWEST + 2, 3), NONE, np.int32)
        self.index = np.full(buckets(count), NONE, np.int32)
        self.children = np.full(buckets(count) if settings.partial_reuse else 0, NONE, np.int32)
        self.heap = np.zeros(count + 1, np.int32)
        self.sequences = _aligned(settings.sequences, SEQUENCE)
        self.rows = np.arange(settings.sequences - 1, -1, -1, dtype=np.int32)
        self.table = table
        self.table.fill(NONE)
        # Pages that no token is written to cost no memory.
        self.row_tokens = np.zeros((settings.sequences, settings.columns * width if sizes.kind == RECURRENT else 0), np.int32)
        self.row_extra = np.zeros((1, 1), np.int64)
        self.moves = np.zeros((64, 4), np.int64)
        self.token_moves = np.zeros((0, 4), np.int64)
        self.accesses = np.zeros((0, 3), np.int64)
        self.counters = np.zeros(len(COUNTERS), np.int64)
        self.histograms = np.zeros((HISTOGRAMS, BINS + 1), np.int64)
        self._fill_header(sizes, settings, ring)
        self._fill_lists(sizes.device_blocks, count)
        self.sequences["generation"] = generation

    def _fill_header(self, sizes: GroupSizes, settings: Settings, ring: Ring) -> None:
        h = self.header
        for slot, array in (
            (A_BLOCKS, self.blocks), (A_TOKENS, self.tokens), (A_EXTRA, self.extra), (A_LISTS, self.lists), (A_INDEX, self.index),
            (A_CHILDREN, self.children), (A_HEAP, self.heap), (A_SEQUENCES, self.sequences), (A_ROWS, self.rows), (A_TABLE, self.table),
            (A_MOVES, self.moves), (A_EVENTS, ring.events), (A_EVENT_TOKENS, ring.tokens), (A_COUNTERS, self.counters),
            (A_HISTOGRAMS, self.histograms), (A_ACCESSES, self.accesses), (A_EVENT_EXTRA, ring.extra), (A_RING, ring.numbers),
            (A_TOKEN_MOVES, self.token_moves), (A_ROW_TOKENS, self.row_tokens), (A_ROW_EXTRA, self.row_extra),
        ):  # fmt: skip
            h[slot] = array.ctypes.data
        h[DEVICE_BLOCKS], h[BLOCKS], h[WIDTH] = sizes.device_blocks, len(self.blocks), settings.width
        h[BUCKETS], h[CHILD_BUCKETS] = len(self.index), len(self.children)
        h[SEQUENCES], h[COLUMNS], h[FREE_ROWS] = settings.sequences, settings.columns, settings.sequences
        h[MOVES_CAPACITY] = len(self.moves)
        h[OFFLOAD_PRIORITY], h[OFFLOAD_REUSE] = settings.offload_min_priority, settings.offload_min_reuse
        h[SECRET0], h[SECRET1] = block_secret(settings.secret)
        h[GUARD] = sum(GUARDS.values())
        h[EVENTS] = settings.event_capacity
        h[WINDOW], h[SINKS] = sizes.window, -(-sizes.sinks // settings.width)
        h[KIND], h[SNAPSHOT] = sizes.kind, sizes.snapshot
        h[BLOCK_TOKENS] = 1 if sizes.kind == RECURRENT else settings.width

    def _fill_lists(self, device_blocks: int, count: int) -> None:
        blocks, lists = self.blocks, self.lists
        for name in ("twin", "chain", "child_prev", "child_next", "heap", "ttl", "ticket", "prev", "next"):
            blocks[name] = NONE
        blocks["priority"] = DEFAULT_PRIORITY
        self.sequences["duplicates"] = NONE
        lists[:, 2] = 0
        lists[LOWEST:, 0] = EMPTY
        for tier, low, high in ((DEVICE, 0, device_blocks), (HOST, device_blocks, count)):
            if low == high:
                continue
            which = tier * LISTS_PER_TIER + EMPTY
            blocks["list"][low:high] = which
            blocks["prev"][low + 1 : high] = np.arange(low, high - 1)
            blocks["next"][low : high - 1] = np.arange(low + 1, high)
            lists[which] = low, high - 1, high - low

    @property
    def nbytes(self) -> int:
        """Bytes of state that grow with the blocks, tokens left out."""
        return sum(a.nbytes for a in (self.blocks, self.index, self.children, self.heap))

    def reserve_moves(self, count: int) -> None:
        """Make room for ``count`` moves of the next call. No move may be waiting in the buffer."""
        if count > len(self.moves):
            self.moves = np.zeros((max(count, 2 * len(self.moves)), 4), np.int64)
            self.header[A_MOVES] = self.moves.ctypes.data
            self.header[MOVES_CAPACITY] = len(self.moves)

    def reserve_token_moves(self, count: int) -> None:
        """Make room for ``count`` token moves of the next call. None may be waiting in the buffer."""
        if count > len(self.token_moves):
            self.token_moves = np.zeros((max(count, 2 * len(self.token_moves)), 4), np.int64)
            self.header[A_TOKEN_MOVES] = self.token_moves.ctypes.data
            self.header[TOKEN_MOVES_CAPACITY] = len(self.token_moves)

    def reserve_accesses(self, count: int) -> None:
        """Make room for ``count`` accesses of the next call; without any room, none is noted. None may be waiting in the buffer."""
        if count > len(self.accesses):
            self.accesses = np.zeros((max(count, 2 * len(self.accesses)), 3), np.int64)
            self.header[A_ACCESSES] = self.accesses.ctypes.data
            self.header[ACCESSES_CAPACITY] = len(self.accesses)


class States:
    """The states of a pool's groups. ``heads`` int64[groups, HEADER] are their headers, ``table`` int32[groups, sequences, columns] their
    rows.

    A sequence has the same row in all of them. Not thread-safe: the manager's state lock guards it.
    """

    def __init__(self, groups: Sequence[GroupSizes], settings: Settings, table: npt.NDArray[np.int32] | None = None) -> None:
        self.secret, self.fingerprint = settings.secret, fingerprint(settings.secret)
        self.namespace_in_key = True
        self.heads = np.zeros((len(groups), HEADER), np.int64)
        self.ring = Ring(settings.event_capacity, settings.width)
        shape = (len(groups), settings.sequences, settings.columns)
        self.table = np.empty(shape, np.int32) if table is None else table.reshape(shape)
        # Ids of one pool mean nothing to another: generations start elsewhere in each.
        generation = (next(_POOLS) * 0x9E3779B1) & 0x7FFFFFFF
        parts = zip(self.heads, groups, self.table, strict=True)
        self.groups = tuple(State(header, sizes, settings, self.ring, rows, generation) for header, sizes, rows in parts)
        self.device_blocks = sum(group.device_blocks for group in groups)
        device, host = 0, self.device_blocks
        for g, group in enumerate(groups):
            self.heads[g, GROUP], self.heads[g, DEVICE_FIRST], self.heads[g, HOST_FIRST] = g, device, host - group.device_blocks
            device, host = device + group.device_blocks, host + group.host_blocks
        self.blocks = host
        self._moves = 0

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[State]:
        return iter(self.groups)

    def __getitem__(self, group: int) -> State:
        return self.groups[group]

    def split(self, ids: Ids) -> list[tuple[State, npt.NDArray[np.intp], Ids]]:
        """Blocks by the ids that all behind the state knows them by: for each group that has some, their places and their ids in it."""
        if len(self.groups) == 1:
            return [(self.groups[0], np.arange(len(ids)), ids)]
        found = []
        for state in self.groups:
            h = state.header
            device = (ids >= h[DEVICE_FIRST]) & (ids < h[DEVICE_FIRST] + h[DEVICE_BLOCKS])
            host = (ids >= h[HOST_FIRST] + h[DEVICE_BLOCKS]) & (ids < h[HOST_FIRST] + h[BLOCKS])
            places = np.flatnonzero(device | host)
            if len(places):
                found.append((state, places, np.where(device, ids - h[DEVICE_FIRST], ids - h[HOST_FIRST])[places]))
        return found

    def groups_of(self, ids: Ids) -> Ids:
        """The group of each block by those ids; 0 for none."""
        found = np.zeros(len(ids), np.int64)
        for state, places, _ in self.split(ids) if len(self.groups) > 1 else []:
            found[places] = state.header[GROUP]
        return found

    def gather(self, field: str, ids: Ids) -> npt.NDArray[Any]:
        """A field of blocks by those ids."""
        found = np.zeros(len(ids), BLOCK[field])
        for state, places, own in self.split(ids):
            found[places] = state.blocks[field][own]
        return found

    def reserve_moves(self, count: int) -> None:
        """As ``State.reserve_moves``, in each group."""
        if count > self._moves:
            for state in self.groups:
                state.reserve_moves(count)
            self._moves = min(len(state.moves) for state in self.groups)

    def reserve_accesses(self, count: int) -> None:
        """As ``State.reserve_accesses``, in each group."""
        for state in self.groups:
            state.reserve_accesses(count)

    def reserve_token_moves(self, count: int) -> None:
        """As ``State.reserve_token_moves``, in each group."""
        for state in self.groups:
            state.reserve_token_moves(count)

    def enable_extra(self) -> None:
        """Allocate the extra ids when the first prompt that has some comes; untouched rows cost no memory."""
        if self.heads[0, HAS_EXTRA]:
            return
        self.ring.extra = np.zeros(self.ring.tokens.shape, np.int64)
        for state in self.groups:
            state.extra, state.row_extra = np.zeros(state.tokens.shape, np.int64), np.zeros(state.row_tokens.shape, np.int64)
            state.header[A_ROW_EXTRA] = state.row_extra.ctypes.data
            state.header[A_EXTRA], state.header[A_EVENT_EXTRA] = state.extra.ctypes.data, self.ring.extra.ctypes.data
            state.header[HAS_EXTRA] = 1

    def disable_guard(self, name: str) -> None:
        """Take one named rule out, so that a test can show that its proof fails without it. Never call it elsewhere."""
        self.heads[:, GUARD] &= ~GUARDS[name]
        self.namespace_in_key = bool(self.heads[0, GUARD] & GUARDS["namespace_in_key"])
