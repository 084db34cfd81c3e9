"""Taking blocks and giving them back: victims, eviction, offload or forget, and host copies. Decides moves, but moves
no bytes."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.jit.intrinsics import array_at, bit_length, prefetch
from kvpool.state.index import expect, expect_child, link, rival_child, unlink_content
from kvpool.state.lists import heap_push, heap_remove, push_back, push_front, relink, unlink
from kvpool.state.policy import fall, falls, goes_down, inherit, list_of, victim
from kvpool.state.records import (
    BINS,
    DEVICE,
    EXTRA,
    HOST,
    HOST_IDLE,
    HOST_LIFETIME,
    IDLE,
    INDEXED,
    KEYED,
    LIFETIME,
    LINKED,
    NONE,
    OFFLOAD,
    PRIORITY_MAX,
    PUBLISHED,
    TIE_BITS,
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
from kvpool.state.ring import REMOVED, STORED, UPDATED, emit

EXPIRIES_PER_CALL = 64
FRONT, BACK = np.bool_(True), np.bool_(False)  # of a list


@jit(forceinline=True)
def begin(h, now):
    """Start the part of a call that changes the pool."""
    h.now = now
    ring = ring_of(h)
    ring.call = ring.next


@jit(forceinline=True)
def emit_move(h, source, target, tokens, direction):
    """Append a move to the call's batch. The target's content then waits for the batch's ticket."""
    n = h.moves
    if n >= h.moves_capacity:
        raise RuntimeError("more moves than one call can make")
    moves, blocks = moves_of(h), blocks_of(h)
    moves[n, 0], moves[n, 1], moves[n, 2], moves[n, 3] = source, target, tokens, blocks[source].ticket
    moves[n, 4] = direction
    h.moves = n + 1
    blocks[target].ticket = h.ticket


@jit(forceinline=True)
def record(h, which, since):
    """Count the time from ``since`` (ms, modulo 2**32) to now in a histogram of powers of two."""
    span = (h.now - np.int64(since)) & 0xFFFFFFFF
    if span >> 31:  # another thread read the clock before this one, but decided after it
        span = np.int64(0)
    histogram = histograms_of(h)[which]
    histogram[bit_length(span)] += 1
    histogram[BINS] += span


@jit
def copy_tokens(h, source, target, count):
    """Copy the token ids of a block. Moves carry its bytes."""
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
    copy_tokens(h, source, target, h.width)


@jit(forceinline=True)
def start_clock(h, b, deadline):
    """Enter a listed block into the expiries, if its priority can fall. Its time begins now, or ends at the
    ``deadline`` that it already has.

    Blocks with the same deadline expire in the order in which they came.
    """
    if falls(h, b):
        if deadline == NONE:
            h.shelved += 1
            deadline = ((h.now + blocks_of(h)[b].ttl) << TIE_BITS) | (h.shelved & ((1 << TIE_BITS) - 1))
        heap_push(blocks_of(h), heap_of(h), b, deadline)


@jit(forceinline=True)
def shelve(h, b, front):
    """Put a block that nobody holds any more into the list of its content."""
    blocks, lists = blocks_of(h), lists_of(h)
    blocks[b].used_at = np.uint32(h.now)
    if blocks[b].flags & INDEXED:
        start_clock(h, b, NONE)
    else:
        blocks[b].flags = blocks[b].filled = 0
    if front:
        push_front(blocks, lists, b, list_of(h, b))
    else:
        push_back(blocks, lists, b, list_of(h, b))


@jit
def reshelve(h, b):
    """The content of a block has changed. If nobody holds it, it goes to the back of its present list."""
    blocks = blocks_of(h)
    if blocks[b].list >= 0:
        heap_remove(blocks, heap_of(h), b)
        unlink(blocks, lists_of(h), b)
        shelve(h, b, BACK)


@jit
def settle_host(h, b, device, deadline):
    """A host copy has become the only one. Unless it is held, it leaves the redundant list."""
    blocks, lists = blocks_of(h), lists_of(h)
    changed = inherit(h, b, device)
    if blocks[b].list >= 0:
        unlink(blocks, lists, b)
        push_back(blocks, lists, b, list_of(h, b))
        start_clock(h, b, deadline)
    if changed:
        emit(h, UPDATED, b)


@jit
def unpublish(h, b, deadline):
    """Remove the content of block ``b`` from the cache on this tier. Its other copy stays. Returns whether there is
    one.

    The block keeps its key (a caller that changes its bytes clears KEYED) and its place in a list, if it is in one.
    """
    blocks = blocks_of(h)
    twin = np.int64(blocks[b].twin)
    if blocks[b].flags & LINKED:
        unlink_content(h, b, twin)
    if blocks[b].flags & PUBLISHED:
        emit(h, REMOVED, b)
        if b < h.device_blocks:
            h.removals += 1
    blocks[b].flags &= ~INDEXED
    if twin == NONE:
        return False
    blocks[twin].twin = NONE
    blocks[b].twin = NONE
    if twin >= h.device_blocks:
        settle_host(h, twin, b, deadline)
    return True


@jit(forceinline=True)
def forget(h, b, deadline):
    """``unpublish``, and count the content as forgotten if no copy is left."""
    if not unpublish(h, b, deadline):
        counters = counters_of(h)
        if b < h.device_blocks:
            counters.forgotten_device_blocks += 1
        else:
            counters.forgotten_host_blocks += 1


@jit
def take_host(h, priority):
    """Take an empty host block. If there is none, evict a redundant copy, or content of no higher priority. NONE if
    that is impossible."""
    blocks = blocks_of(h)
    b = victim(h, np.int64(HOST), priority)
    if h.overflow and (b == NONE or blocks[b].flags & INDEXED):
        h.overflow -= 1
    if b == NONE:
        return b
    unlink(blocks, lists_of(h), b)
    if blocks[b].twin != NONE:
        unpublish(h, b, NONE)
        counters_of(h).redundant_dropped += 1
    elif blocks[b].flags & INDEXED:
        heap_remove(blocks, heap_of(h), b)
        record(h, HOST_LIFETIME, blocks[b].stored_at)
        record(h, HOST_IDLE, blocks[b].used_at)
        forget(h, b, NONE)
    blocks[b].flags = 0
    return b


@jit
def _offload(h, b, timed):
    """Move the content of an evicted device block to the host tier, if the rules allow it."""
    blocks = blocks_of(h)
    if not goes_down(h, b):
        counters_of(h).evicted_by_rule_blocks += 1
        return False
    g = take_host(h, np.int64(blocks[b].priority))
    if g == NONE:
        counters_of(h).evicted_host_full_blocks += 1
        return False
    copy_content(h, b, g)
    emit_move(h, b, g, h.width, OFFLOAD)
    unlink_content(h, b, g)
    emit(h, STORED, g)
    emit(h, REMOVED, b)
    h.removals += 1
    push_back(blocks, lists_of(h), g, list_of(h, g))
    if timed:
        start_clock(h, g, blocks[b].deadline)
    counters_of(h).offloaded_blocks += 1
    return True


@jit(forceinline=True)
def _evict(h, b):
    """Empty a device victim that has left its list. Its content stays on the host, is offloaded, or is forgotten."""
    blocks = blocks_of(h)
    record(h, LIFETIME, blocks[b].stored_at)
    record(h, IDLE, blocks[b].used_at)
    timed = blocks[b].heap != NONE
    heap_remove(blocks, heap_of(h), b)
    if blocks[b].twin != NONE:
        counters_of(h).offloads_saved += 1
        unpublish(h, b, blocks[b].deadline if timed else NONE)
    elif not _offload(h, b, timed):
        forget(h, b, NONE)


@jit(forceinline=True)
def _expect_victims(h, b):
    """Begin to load what the evictions after that of ``b`` will touch: the index two ahead, the block itself three
    ahead."""
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
        prefetch(array_at(h.tokens_at, (h.blocks * h.width,), np.int32), b * h.width)


@jit
def take_device(h):
    """Take an empty device block from its list, and evict content for it if needed. The caller has counted that there
    is one."""
    blocks = blocks_of(h)
    b = victim(h, np.int64(DEVICE), PRIORITY_MAX)
    if b == NONE:
        raise RuntimeError("a block was taken that was not counted")
    unlink(blocks, lists_of(h), b)
    if blocks[b].flags & INDEXED:
        _expect_victims(h, b)
        _evict(h, b)
    blocks[b].flags, blocks[b].filled, blocks[b].uses, blocks[b].ticket = 0, 0, 0, NONE
    return b


@jit
def expire(h, limit):
    """Move blocks whose time to live is over to the back of the default priority, at most ``limit``. Returns how
    many."""
    blocks, lists, heap = blocks_of(h), lists_of(h), heap_of(h)
    n = 0
    while n < limit and heap[0] > 0 and blocks[heap[1]].deadline >> TIE_BITS <= h.now:
        b = np.int64(heap[1])
        heap_remove(blocks, heap, b)
        unlink(blocks, lists, b)
        fall(h, b)
        push_back(blocks, lists, b, list_of(h, b))
        if blocks[b].flags & PUBLISHED:
            emit(h, UPDATED, b)
        n += 1
    counters_of(h).expired_blocks += n
    return n


@jit
def supersede(h, b):
    """Forget stored tails with which a new child ``b`` begins. It serves every partial match that they could."""
    while blocks_of(h)[b].child_next != NONE:  # children are entered in front, so older ones come after
        tail = rival_child(h, b, False)
        if tail == NONE:
            return
        forget(h, tail, NONE)
        reshelve(h, tail)


@jit
def forget_both(h, b, other):
    """Forget the content of a block and of its other copy, if there is one."""
    forget(h, b, NONE)
    if other != NONE:
        forget(h, other, NONE)
        reshelve(h, other)


@jit(forceinline=True)
def enter(h, b, flag):
    """Make the full (PUBLISHED) or unfull (TAIL) content of ``b`` findable. No other block may represent its key."""
    blocks = blocks_of(h)
    if blocks[b].uses == 0:
        blocks[b].uses = 1
    blocks[b].stored_at = blocks[b].used_at = np.uint32(h.now)
    blocks[b].flags |= flag
    link(h, b)
    if flag == PUBLISHED:
        emit(h, STORED, b)


@jit(forceinline=True)
def hold(h, b):
    """Add a reference. A block that nobody held leaves its list."""
    blocks = blocks_of(h)
    if add_reference(blocks, b) == 1:
        unlink(blocks, lists_of(h), b)


@jit(forceinline=True)
def unhold(h, b):
    """Undo ``hold`` to the byte. Call it in the reverse order."""
    blocks = blocks_of(h)
    if drop_reference(blocks, b) == 0:
        relink(blocks, lists_of(h), b)


@jit(forceinline=True)
def let_go(h, b):
    """Drop a reference. A block that nobody holds then joins a list."""
    if drop_reference(blocks_of(h), b) == 0:
        shelve(h, b, BACK)
