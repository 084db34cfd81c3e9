"""Taking blocks and giving them back: victims, eviction, offload or forget, the host copy's life. Yields moves, moves no bytes."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.atomics import array_at, bit_length, prefetch
from kvpool.state.blocks import (
    A_TOKENS,
    BINS,
    BLOCKS,
    C_BY_RULE,
    C_EXPIRED,
    C_FORGOTTEN_DEVICE,
    C_FORGOTTEN_HOST,
    C_HOST_FULL,
    C_OFFLOADED,
    C_REDUNDANT,
    C_SAVED,
    CALL_EVENT,
    DEFAULT_PRIORITY,
    DEVICE,
    DEVICE_BLOCKS,
    EMPTY,
    EVENT_NEXT,
    EXTRA,
    HOST,
    HOST_IDLE,
    HOST_LIFETIME,
    IDLE,
    INDEXED,
    KEYED,
    LIFETIME,
    LINKED,
    LISTS_PER_TIER,
    MOVES,
    MOVES_CAPACITY,
    NONE,
    NOW,
    OFFLOAD_PRIORITY,
    OFFLOAD_REUSE,
    PUBLISHED,
    REDUNDANT,
    REMOVALS,
    SHELVED,
    TAIL,
    TICKET,
    TIE_BITS,
    WIDTH,
    add_reference,
    blocks_of,
    counters_of,
    drop_reference,
    extra_of,
    heap_of,
    histograms_of,
    lists_of,
    moves_of,
    ring_of,
    tokens_of,
)
from kvpool.state.index import expect
from kvpool.state.lru import heap_push, heap_remove, lowest, push_back, push_front, unlink
from kvpool.state.prefix import expect_child, link, rival_child, unlink_content
from kvpool.state.ring import REMOVED, STORED, UPDATED, emit

EXPIRIES_PER_CALL = 64


@jit(forceinline=True)
def begin(h, now):
    """Start of the part of a call that changes the pool."""
    h[NOW] = now
    ring = ring_of(h)
    ring[CALL_EVENT] = ring[EVENT_NEXT]


@jit(forceinline=True)
def emit_move(h, source, target, tokens):
    """Append a move to the call's batch; the target's content then waits for the batch's ticket."""
    n = h[MOVES]
    if n >= h[MOVES_CAPACITY]:
        raise RuntimeError("more moves than were reserved")
    moves, blocks = moves_of(h), blocks_of(h)
    moves[n, 0], moves[n, 1], moves[n, 2], moves[n, 3] = source, target, tokens, blocks[source].ticket
    h[MOVES] = n + 1
    blocks[target].ticket = h[TICKET]


@jit(forceinline=True)
def record(h, which, since):
    """Count the time from ``since`` (ms, modulo 2**32) to now in a histogram of powers of two."""
    span = (h[NOW] - np.int64(since)) & 0xFFFFFFFF
    if span >> 31:  # another thread read the clock before this one and came after it
        span = np.int64(0)
    histogram = histograms_of(h)[which]
    histogram[bit_length(span)] += 1
    histogram[BINS] += span


@jit
def copy_tokens(h, source, target, count):
    """The token ids of a block, not its bytes, that is what moves are for."""
    blocks, tokens = blocks_of(h), tokens_of(h)
    for i in range(count):
        tokens[target, i] = tokens[source, i]
    blocks[target].filled = count
    if blocks[source].flags & EXTRA:
        extra = extra_of(h)
        for i in range(count):
            extra[target, i] = extra[source, i]
        blocks[target].flags |= EXTRA


@jit
def copy_content(h, source, target):
    """Give ``target`` the identity of the published ``source``: key, tokens, priority, uses and times."""
    blocks = blocks_of(h)
    s, t = blocks[source], blocks[target]
    t.key0, t.key1, t.parent0, t.parent1, t.namespace = s.key0, s.key1, s.parent0, s.parent1, s.namespace
    t.priority, t.ttl, t.uses, t.stored_at, t.used_at = s.priority, s.ttl, s.uses, s.stored_at, s.used_at
    t.flags = KEYED | PUBLISHED
    copy_tokens(h, source, target, h[WIDTH])


@jit(forceinline=True)
def start_clock(h, b, deadline):
    """Enter a listed block that has a ttl into the expiries, from now on or with the ``deadline`` that it already has.

    A block of default priority has nothing to fall back to. Blocks that are due together expire in the order in which they came.
    """
    blocks = blocks_of(h)
    if blocks[b].ttl == NONE or blocks[b].priority == DEFAULT_PRIORITY:
        return
    if deadline == NONE:
        h[SHELVED] += 1
        deadline = ((h[NOW] + blocks[b].ttl) << TIE_BITS) | (h[SHELVED] & ((1 << TIE_BITS) - 1))
    heap_push(blocks, heap_of(h), b, deadline)


@jit(forceinline=True)
def shelve(h, b, front):
    """Put a block that nobody holds any more into the list that its content says."""
    blocks, lists = blocks_of(h), lists_of(h)
    tier = DEVICE if b < h[DEVICE_BLOCKS] else HOST
    blocks[b].used_at = np.uint32(h[NOW])
    if not blocks[b].flags & INDEXED:
        which = EMPTY
        blocks[b].flags = 0
        blocks[b].filled = 0
    elif tier == HOST and blocks[b].twin != NONE:
        which = REDUNDANT
    else:
        which = np.int64(blocks[b].priority)
        start_clock(h, b, NONE)
    if front:
        push_front(blocks, lists, b, tier * LISTS_PER_TIER + which)
    else:
        push_back(blocks, lists, b, tier * LISTS_PER_TIER + which)


@jit
def settle_host(h, b, device, deadline):
    """A host copy has become the only one: it takes the device block's retention and uses and, unless held, leaves the redundant list."""
    blocks, lists = blocks_of(h), lists_of(h)
    changed = blocks[b].priority != blocks[device].priority
    blocks[b].priority, blocks[b].ttl = blocks[device].priority, blocks[device].ttl
    blocks[b].uses, blocks[b].used_at = blocks[device].uses, blocks[device].used_at
    if blocks[b].list != NONE:
        unlink(blocks, lists, b)
        push_back(blocks, lists, b, HOST * LISTS_PER_TIER + np.int64(blocks[b].priority))
        start_clock(h, b, deadline)
    if changed:
        emit(h, UPDATED, b)


@jit
def unpublish(h, b, deadline):
    """Take the content of block ``b`` out of the cache on this tier; its other copy stays. Returns whether there is one.

    The block keeps its key (a caller that changes its bytes clears KEYED) and its place in a list, if it is in one.
    """
    blocks = blocks_of(h)
    twin = blocks[b].twin
    if blocks[b].flags & LINKED:
        unlink_content(h, b, twin)
    if blocks[b].flags & PUBLISHED:
        emit(h, REMOVED, b)
        if b < h[DEVICE_BLOCKS]:
            h[REMOVALS] += 1
    blocks[b].flags &= ~INDEXED
    if twin == NONE:
        return False
    blocks[twin].twin = NONE
    blocks[b].twin = NONE
    if twin >= h[DEVICE_BLOCKS]:
        settle_host(h, twin, b, deadline)
    return True


@jit(forceinline=True)
def forget(h, b, deadline):
    """``unpublish`` that counts content of which no copy is left."""
    if not unpublish(h, b, deadline):
        counters_of(h)[C_FORGOTTEN_DEVICE if b < h[DEVICE_BLOCKS] else C_FORGOTTEN_HOST] += 1


@jit
def take_host(h, priority):
    """An empty host block, made by evicting a redundant copy or content of no higher priority if need be; NONE if there is none."""
    blocks, lists = blocks_of(h), lists_of(h)
    base = HOST * LISTS_PER_TIER
    b = lists[base + EMPTY, 0]
    if b != NONE:
        unlink(blocks, lists, b)
    elif lists[base + REDUNDANT, 0] != NONE:
        b = lists[base + REDUNDANT, 0]
        unlink(blocks, lists, b)
        unpublish(h, b, NONE)
        counters_of(h)[C_REDUNDANT] += 1
    else:
        b = lowest(lists, HOST)
        if b == NONE or blocks[b].priority > priority:
            return NONE
        unlink(blocks, lists, b)
        heap_remove(blocks, heap_of(h), b)
        record(h, HOST_LIFETIME, blocks[b].stored_at)
        record(h, HOST_IDLE, blocks[b].used_at)
        forget(h, b, NONE)
    blocks[b].flags = 0
    return b


@jit
def _offload(h, b, timed):
    """Move the content of an evicted device block to the host tier if the rules allow it."""
    blocks = blocks_of(h)
    wanted = blocks[b].priority >= h[OFFLOAD_PRIORITY] and blocks[b].uses >= h[OFFLOAD_REUSE]
    if not wanted or blocks[b].flags & TAIL or h[DEVICE_BLOCKS] == blocks.shape[0]:
        counters_of(h)[C_BY_RULE] += 1
        return False
    g = take_host(h, np.int64(blocks[b].priority))
    if g == NONE:
        counters_of(h)[C_HOST_FULL] += 1
        return False
    copy_content(h, b, g)
    emit_move(h, b, g, h[WIDTH])
    unlink_content(h, b, g)
    emit(h, STORED, g)
    emit(h, REMOVED, b)
    h[REMOVALS] += 1
    push_back(blocks, lists_of(h), g, HOST * LISTS_PER_TIER + blocks[g].priority)
    if timed:
        start_clock(h, g, blocks[b].deadline)
    counters_of(h)[C_OFFLOADED] += 1
    return True


@jit(forceinline=True)
def _evict(h, b):
    """Empty a device victim that has left its list: its content stays on the host, goes there, or is forgotten."""
    blocks = blocks_of(h)
    record(h, LIFETIME, blocks[b].stored_at)
    record(h, IDLE, blocks[b].used_at)
    timed = blocks[b].heap != NONE
    heap_remove(blocks, heap_of(h), b)
    if blocks[b].twin != NONE:
        counters_of(h)[C_SAVED] += 1
        unpublish(h, b, blocks[b].deadline if timed else NONE)
    elif not _offload(h, b, timed):
        forget(h, b, NONE)


@jit(forceinline=True)
def _expect_victims(h, b):
    """Begin to load what the evictions behind that of ``b`` will touch: the index two ahead, the block itself three ahead."""
    blocks = blocks_of(h)
    for _ in range(2):
        b = np.int64(blocks[b].next)
        if b == NONE:
            return
    expect(h, blocks[b].key0)
    expect_child(h, b)
    b = np.int64(blocks[b].next)
    if b != NONE:
        prefetch(blocks, b)
        prefetch(blocks["parent0"], b)
        prefetch(array_at(h[A_TOKENS], (h[BLOCKS] * h[WIDTH],), np.int32), b * h[WIDTH])


@jit
def take_device(h):
    """An empty device block out of its list, made by evicting if need be. The caller has counted that there is one."""
    blocks, lists = blocks_of(h), lists_of(h)
    b = lists[EMPTY, 0]
    if b == NONE:
        b = lowest(lists, DEVICE)
        if b == NONE:
            raise RuntimeError("a block was taken that was not counted")
        unlink(blocks, lists, b)
        _expect_victims(h, b)
        _evict(h, b)
    else:
        unlink(blocks, lists, b)
    blocks[b].flags, blocks[b].filled, blocks[b].uses, blocks[b].ticket = 0, 0, 0, NONE
    return b


@jit
def expire(h, limit):
    """Drop blocks whose time is over to the back of the default priority, at most ``limit``; returns how many."""
    blocks, lists, heap = blocks_of(h), lists_of(h), heap_of(h)
    n = 0
    while n < limit and heap[0] > 0 and blocks[heap[1]].deadline >> TIE_BITS <= h[NOW]:
        b = heap[1]
        tier = DEVICE if b < h[DEVICE_BLOCKS] else HOST
        heap_remove(blocks, heap, b)
        unlink(blocks, lists, b)
        blocks[b].priority, blocks[b].ttl = DEFAULT_PRIORITY, NONE
        push_back(blocks, lists, b, tier * LISTS_PER_TIER + DEFAULT_PRIORITY)
        if blocks[b].flags & PUBLISHED:
            emit(h, UPDATED, b)
        n += 1
    counters_of(h)[C_EXPIRED] += n
    return n


@jit
def supersede(h, b):
    """Forget stored tails that begin a new child ``b``, which serves every partial match that they could."""
    blocks, lists = blocks_of(h), lists_of(h)
    while blocks[b].child_next != NONE:  # children are entered in front, so that others are behind
        tail = rival_child(h, b, False)
        if tail == NONE:
            return
        heap_remove(blocks, heap_of(h), tail)
        forget(h, tail, NONE)
        if blocks[tail].list != NONE:
            unlink(blocks, lists, tail)
            shelve(h, tail, False)


@jit(forceinline=True)
def enter(h, b, flag):
    """Make the full (PUBLISHED) or unfull (TAIL) content of ``b`` findable; nobody else may represent its key."""
    blocks = blocks_of(h)
    if blocks[b].uses == 0:
        blocks[b].uses = 1
    blocks[b].stored_at = blocks[b].used_at = np.uint32(h[NOW])
    blocks[b].flags |= flag
    link(h, b)
    if flag == PUBLISHED:
        emit(h, STORED, b)


@jit(forceinline=True)
def hold(h, b):
    """Add a reference; a block that nobody held leaves its list."""
    blocks = blocks_of(h)
    if add_reference(blocks, b) == 1:
        unlink(blocks, lists_of(h), b)


@jit(forceinline=True)
def let_go(h, b):
    """Drop a reference; a block that nobody holds then is shelved."""
    if drop_reference(blocks_of(h), b) == 0:
        shelve(h, b, False)
