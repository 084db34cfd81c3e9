"""The arrays of every group of layers, and what the groups share: the matrix of their headers, and the ring of events.
They can be copied, and restored to the byte."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.common.arrays import Array, Int32s, Int64s
from kvpool.common.arrays.layout import PoolIds
from kvpool.common.jit.intrinsics import entry_of
from kvpool.state import admit, records, recurrent, requests, sequences
from kvpool.state.hashing import block_secret, fingerprint
from kvpool.state.policies import adaptive, agent
from kvpool.state.policies.chains import CHAIN, CHAINS_MAX, EXPERTS, POLICY, TIER_LIST
from kvpool.state.policies.pauses import PAUSE_BINS, ROWS, TABLES
from kvpool.state.policies.policy import on_join
from kvpool.state.records import (
    ATTENTION,
    BINS,
    BLOCK,
    BUCKETS_MAX,
    COUNTERS,
    CROSS,
    DEFAULT_PRIORITY,
    DEVICE,
    EMPTY,
    EVENT,
    GROUP,
    GROUP_COLUMNS,
    HISTOGRAMS,
    HOST,
    LISTS_PER_TIER,
    LOWEST,
    NONE,
    OUTCOME,
    RECURRENT,
    REQUEST,
    RING,
    SEQUENCE,
    H,
)

# -- records of policies ---------------------------------------------------------------------------------


LRU: Final = "lru"
_GHOST_BLOCKS = 1 << 15
"""This many blocks, or up to twice as many, are enough to compare policies by."""
PolicyName: TypeAlias = Literal["lru", "reuse", "agent", "adaptive"]
POLICIES: tuple[PolicyName, ...] = (LRU, "reuse", "agent", "adaptive")
POLICY_BYTES = 12
"""Bytes for each block, at most. The tables of pauses take some 90 KB more."""
_BLOCKS_PER_CHAIN, _BLOCKS_PER_CHAIN_OF_TWO, _BLOCKS_PER_NAME, _LEAST = 6.75, 9.75, 2, 16
"""The blocks for each chain, in a pool of one and of two tiers; the blocks for each name; the fewest chains. That makes
12 bytes a block."""


class PolicyState:
    """The records of one group, about its device blocks, or those of a HostCache. ``address`` is that of the POLICY
    record. The state lock guards it."""

    def __init__(self, policy: str, header_at: int, device_blocks: int, blocks: int, rows: int) -> None:
        both = 0 < device_blocks < blocks
        per_chain = _BLOCKS_PER_CHAIN_OF_TWO if both else _BLOCKS_PER_CHAIN
        chains = min(max(int(blocks / per_chain), _LEAST), CHAINS_MAX)
        names = 1 << max(blocks // _BLOCKS_PER_NAME, 4 * _LEAST).bit_length() - 1
        self.policy_state = np.zeros(2, POLICY)
        self.turns = np.full(max(rows, 1), NONE, np.int32)
        self.chains, self.names = np.zeros(chains, CHAIN), np.full(names, NONE, np.int64)
        self.order, self.rates = np.arange(chains, dtype=np.int32), np.zeros((2, TABLES, ROWS, PAUSE_BINS))
        self.ghosts, self.scores = np.zeros((chains, EXPERTS), np.uint16), np.zeros((7, EXPERTS))
        self.tier_lists, self.host_order = (
            np.zeros(chains if both else 0, TIER_LIST),
            self.order[: chains if both else 0].copy(),
        )
        self.chains["after"] = self.chains["before"] = self.order
        for tier_lists in (self.chains, self.tier_lists):
            tier_lists["first"] = tier_lists["rest"] = NONE
            tier_lists["place"] = self.order[: len(tier_lists)]
        policy_state: Any = self.policy_state.view(np.recarray)[0]
        for name in ("chains", "order", "names", "turns", "rates", "ghosts", "scores"):
            policy_state[f"{name}_at"] = getattr(self, name).ctypes.data
        begins = adaptive if policy == "adaptive" else agent
        hooks: list[Any] = [(agent.choose, 0, 0, 0)]
        if device_blocks:
            hooks += [(begins.on_admit, GROUP, REQUEST, 0)]
            hooks += [(agent.on_begin_release, GROUP, 0), (agent.on_end_release, GROUP, 0, 0)]
        else:
            hooks += [(begins.on_touch, GROUP, _KEYS, 0), (agent.on_touched, GROUP, _KEYS, 0)]
        if both:
            hooks.append((on_join, GROUP, 0, 0))
        for hook, *like in hooks:
            policy_state[hook.__name__] = entry_of(hook, *like)
        policy_state.list = (DEVICE if device_blocks else HOST) * LISTS_PER_TIER + DEFAULT_PRIORITY
        policy_state.header_at, policy_state.chains, policy_state.names, policy_state.rows = (
            header_at,
            chains,
            names,
            len(self.turns),
        )
        policy_state.tier_lists_at, policy_state.tier_list_bytes = policy_state.chains_at, CHAIN.itemsize
        policy_state.capacity, policy_state.pick = blocks, NONE
        policy_state.shift = max((blocks // _GHOST_BLOCKS).bit_length() - 1, 0)
        policy_state.follows = POLICIES.index(policy) % EXPERTS
        self.policy_state[1] = self.policy_state[0]
        host: Any = self.policy_state.view(np.recarray)[1]
        host.list = HOST * LISTS_PER_TIER + DEFAULT_PRIORITY if both else NONE
        host.order_at, host.tier_lists_at = self.host_order.ctypes.data, self.tier_lists.ctypes.data
        host.tier_list_bytes = TIER_LIST.itemsize

    @property
    def address(self) -> int:
        return int(self.policy_state.ctypes.data)


_IDS, _KEYS = np.zeros(0, np.int64), np.zeros((0, 3), np.int64)
_TOKENS = np.zeros(0, np.int32)
_WINDOWS: list[Any] = [(sequences.give_passed, 0, 0)]
_HOOKS: dict[int, list[Any]] = {
    ATTENTION: [],
    CROSS: [(admit.fill_encoded, REQUEST, 0, OUTCOME)],
    RECURRENT: [
        (recurrent.append_need, _IDS, _IDS),
        (recurrent.append, _IDS, _IDS, _TOKENS),
        (requests.note_prompt, REQUEST, 0),
        (requests.name, 0, 0, 0),
        *_WINDOWS,
    ],
}
"""The functions that only groups of a kind need, and what they are called with after the header. They are compiled for
the first pool with such a group."""
_POOLS = itertools.count(1)
_HUGE_PAGE, _GAP = 1 << 21, 128
_OWN = (
    "blocks tokens extra lists index children heap sequences rows table copy_ops counters histograms accesses "
    "token_moves row_tokens row_extra swapped"
).split()
"""The arrays of a group whose addresses are in its header."""
Ids = Int64s


class GroupSizes(NamedTuple):
    """One group: its blocks; the tokens of its window and sinks, 0 for none; its kind; the blocks from one kept state
    to the next, or 0."""

    device_blocks: int
    host_blocks: int
    window: int = 0
    sinks: int = 0
    kind: int = ATTENTION
    snapshot: int = 0


class Settings(NamedTuple):
    """What all groups of a pool share: tokens per block, rows, columns of a row, and rules."""

    width: int
    sequences: int
    columns: int
    secret: bytes
    partial_reuse: bool = True
    offload_min_priority: int = 30
    offload_min_reuse: int = 1
    event_capacity: int = 0
    policy: str = LRU
    gone_capacity: int = 0
    notes_accesses: bool = False
    """whether calls note the accesses of streams to blocks: not for a synchronous device"""


def buckets(count: int) -> int:
    """How many buckets the index, and the index of children, have for ``count`` blocks: three for each block."""
    return min(3 * count, BUCKETS_MAX)


def state_bytes(groups: Sequence[GroupSizes], settings: Settings) -> int:
    """The bytes of the states of these groups."""
    width, columns = settings.width, settings.columns
    count = sum(group.device_blocks + group.host_blocks for group in groups)
    row_bytes = len(groups) * (SEQUENCE.itemsize + 4 + 8 * columns)
    row_bytes += 4 * sum(group.kind == RECURRENT for group in groups) * columns * width
    block_bytes = BLOCK.itemsize + 28 + 4 * width + (0 if settings.policy == LRU else POLICY_BYTES)
    event_bytes = settings.event_capacity * (EVENT.itemsize + 4 * width)
    return count * block_bytes + settings.sequences * row_bytes + event_bytes + 16 * settings.gone_capacity


def _zeros(*parts: tuple[int, Any]) -> list[Array]:
    """Allocate zeros, (count, dtype) for each array, in one piece of memory. Each array starts at a cache line, after
    two unused lines: index -1 (NONE) is in those.

    The memory is in huge pages if it fills one. Else most uses of a block would also wait until the processor has
    looked up its page.
    """
    sizes = [_GAP - (-count * np.dtype(dtype).itemsize // 64) * 64 for count, dtype in parts]
    page = _HUGE_PAGE if sum(sizes) >= _HUGE_PAGE else 64
    pages = mmap.mmap(-1, sum(sizes) + page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if page == _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    ends = np.cumsum([-memory.ctypes.data % page, *sizes])
    return [
        memory[end + _GAP : end + _GAP + count * np.dtype(dtype).itemsize].view(dtype)
        for end, (count, dtype) in zip(ends, parts, strict=False)
    ]


class Ring:
    """The events of all groups, and their numbers."""

    def __init__(self, capacity: int, width: int, gone: int) -> None:
        self.gone = np.zeros((gone, 2), np.int64)
        self.numbers = np.zeros(RING.itemsize // 8, np.int64)
        self.events = np.zeros(capacity, EVENT)
        self.tokens = np.zeros((capacity, width), np.int32)
        self.extra = np.zeros((1, 1), np.int64)


class State:
    """Owns every array of one group except the ring. Fills the ``header``, row ``group`` of ``groups``, which points to
    these arrays.

    Not thread-safe: the state lock guards it.
    """

    def __init__(
        self,
        groups: Ids,
        group: int,
        sizes: GroupSizes,
        settings: Settings,
        ring: Ring,
        table: Int32s,
        generation: int,
    ) -> None:
        count, width = sizes.device_blocks + sizes.host_blocks, settings.width
        self.groups, self.group, self.ring = groups, group, ring
        self.header: Any = groups[group].view(GROUP).view(np.recarray)[0]
        children = buckets(count) if settings.partial_reuse else 0
        self.blocks, tokens, self.index, self.children, self.heap, self.sequences = _zeros(
            (count, BLOCK),
            (count * width, np.int32),
            (buckets(count), np.int32),
            (children, np.int32),
            (count + 1, np.int32),
            (settings.sequences, SEQUENCE),
        )
        self.tokens = tokens.reshape(count, width)
        self.index[:] = self.children[:] = NONE
        self.extra = np.zeros((1, 1), np.int64)
        self.lists = np.full((LOWEST + 2, 3), NONE, np.int32)
        self.rows = np.arange(settings.sequences - 1, -1, -1, dtype=np.int32)
        self.table = table
        self.table.fill(NONE)
        # Pages of these arrays that are never written cost no memory.
        self.swapped = np.zeros(table.shape, np.int32)
        self.row_tokens = np.zeros(
            (settings.sequences, settings.columns * width if sizes.kind == RECURRENT else 0), np.int32
        )
        self.row_extra = np.zeros((1, 1), np.int64)
        # The buffers have room for all that one call can decide, so no call stops in the middle. A call takes each
        # device block at most once, since the block's new holder keeps it until the call ends. The exceptions are a
        # rewind and a keep, which take one block for each sequence after others were given back. A block that is taken
        # is evicted by at most one copy op, and filled by one. A call that offloads takes host blocks instead, and
        # holds them too.
        self.copy_ops = np.zeros((2 * (sizes.device_blocks + settings.sequences) + sizes.host_blocks, 5), np.int64)
        # Each slot to which a token moves is in a block that one sequence has alone by then.
        self.token_moves = np.zeros((sizes.device_blocks * width if sizes.kind == ATTENTION else 0, 4), np.int64)
        # Room for two accesses for each column of a row. A commit notes that the column was written and that the window
        # has passed it. A keep notes that it was written and will be. Other calls note less. The end of a reservation,
        # which is one row, commits and releases. For each sequence a call also notes the stream that it follows (a
        # reorder: also its parent's stream), and two accesses of its last block.
        accesses = (2 * settings.sequences + 1) * settings.columns + 6 * settings.sequences
        self.accesses = np.zeros((accesses if settings.notes_accesses else 0, 3), np.int64)
        self.counters = np.zeros(len(COUNTERS), np.int64)
        self.histograms = np.zeros((HISTOGRAMS, BINS + 1), np.int64)
        self._fill_header(sizes, settings, ring)
        self._fill_lists(sizes.device_blocks, count)
        self.policy_state = None
        if settings.policy != LRU:
            self.policy_state = PolicyState(
                settings.policy, groups[group].ctypes.data, sizes.device_blocks, count, len(self.rows)
            )
            self.header.policy_at = self.policy_state.address
        self.sequences["generation"] = generation

    def _fill_header(self, sizes: GroupSizes, settings: Settings, ring: Ring) -> None:
        header = self.header
        for name in _OWN:
            header[f"{name}_at"] = getattr(self, name).ctypes.data
        header.ring_at, header.events_at = ring.numbers.ctypes.data, ring.events.ctypes.data
        header.event_tokens_at, header.event_extra_at = ring.tokens.ctypes.data, ring.extra.ctypes.data
        header.device_blocks, header.blocks, header.width = sizes.device_blocks, len(self.blocks), settings.width
        header.buckets, header.child_buckets = len(self.index), len(self.children)
        header.sequences, header.columns, header.free_rows = settings.sequences, settings.columns, settings.sequences
        header.copy_ops_capacity, header.token_moves_capacity = len(self.copy_ops), len(self.token_moves)
        header.accesses_capacity = len(self.accesses)
        header.offload_priority, header.offload_reuse = settings.offload_min_priority, settings.offload_min_reuse
        header.secret0, header.secret1 = block_secret(settings.secret)
        header.guards = records.ALL_GUARDS
        header.event_capacity = settings.event_capacity
        header.gone_at, header.gone_capacity = ring.gone.ctypes.data, len(ring.gone)
        header.window, header.sinks = sizes.window, -(-sizes.sinks // settings.width)
        header.kind, header.snapshot = sizes.kind, sizes.snapshot
        header.block_tokens = 1 if sizes.kind == RECURRENT else settings.width
        hooks = _HOOKS[sizes.kind]
        if sizes.window:
            hooks = hooks + _WINDOWS
        for hook, *like in hooks:
            header[hook.__name__] = entry_of(hook, GROUP, *like)

    def _fill_lists(self, device_blocks: int, count: int) -> None:
        blocks, lists = self.blocks, self.lists
        for name in "other_copy chain child_prev child_next heap ttl ticket prev next owner".split():
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


class States:
    """The states of a pool's groups. ``groups`` int64[groups, GROUP_COLUMNS] are their headers, ``table`` int32[groups,
    sequences, columns] their rows.

    A sequence has the same row in all groups. Not thread-safe: the state lock guards it.
    """

    def __init__(self, sizes: Sequence[GroupSizes], settings: Settings, table: Int32s | None = None) -> None:
        self.secret, self.fingerprint = settings.secret, fingerprint(settings.secret)
        self.namespace_in_key = True
        self.groups = np.zeros((len(sizes), GROUP_COLUMNS), np.int64)
        self.ring = Ring(settings.event_capacity, settings.width, settings.gone_capacity)
        shape = (len(sizes), settings.sequences, settings.columns)
        self.table = np.empty(shape, np.int32) if table is None else table.reshape(shape)
        # Ids of one pool mean nothing to another, so generations start elsewhere in each.
        generation = (next(_POOLS) * 0x9E3779B1) & 0x7FFFFFFF
        parts = enumerate(zip(sizes, self.table, strict=True))
        self._states = tuple(
            State(self.groups, g, group, settings, self.ring, rows, generation) for g, (group, rows) in parts
        )
        self.pool_ids = PoolIds([group.device_blocks for group in sizes], [group.host_blocks for group in sizes])
        self.device_blocks, self.blocks = self.pool_ids.device_blocks, self.pool_ids.blocks
        for g, state in enumerate(self._states):
            header, shifts = state.header, self.pool_ids.shifts
            header.number, header.device_first, header.host_first = g, -shifts[g], -shifts[g + len(sizes)]

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    def __getitem__(self, group: int) -> State:
        return self._states[group]

    def split(self, ids: Ids) -> list[tuple[State, npt.NDArray[np.intp], Ids]]:
        """Split blocks, given by pool ids, by group. For each group that has some: their places in ``ids``, and their
        ids in the group."""
        if len(self._states) == 1:
            return [(self._states[0], np.arange(len(ids)), ids)]
        groups, group_ids = self.pool_ids.place(ids)
        places = ((state, np.flatnonzero(groups == state.group)) for state in self._states)
        return [(state, mine, group_ids[mine]) for state, mine in places if len(mine)]

    def gather(self, field: str, ids: Ids) -> Array:
        """A field of blocks, given by pool ids."""
        values = np.zeros(len(ids), BLOCK[field])
        for state, places, group_ids in self.split(ids):
            values[places] = state.blocks[field][group_ids]
        return values

    def enable_extra(self) -> None:
        """Allocate the extra ids, when the first prompt that has some comes. Rows that are not touched cost no
        memory."""
        if self.groups[0, H.has_extra]:
            return
        self.ring.extra = np.zeros(self.ring.tokens.shape, np.int64)
        for state in self._states:
            state.extra = np.zeros(state.tokens.shape, np.int64)
            state.row_extra = np.zeros(state.row_tokens.shape, np.int64)
            state.header.row_extra_at = state.row_extra.ctypes.data
            state.header.extra_at, state.header.event_extra_at = state.extra.ctypes.data, self.ring.extra.ctypes.data
            state.header.has_extra = 1

    def disable_guard(self, name: str) -> None:
        """Take one named rule out, so that a test can show that its proof fails without it. Never call it elsewhere."""
        self.groups[:, H.guards] &= ~records.GUARDS[name]
        self.namespace_in_key = bool(self.groups[0, H.guards] & records.NAMESPACE_IN_KEY)
