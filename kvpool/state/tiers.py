"""Taking blocks and giving them back: eviction, offload or forget, and host copies. Decides moves, but moves no bytes.
The order of eviction is the policy's."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.jit.intrinsics import bit_length, memcpy
from kvpool.state.effects import EVICTED, EXPIRED, FORGOTTEN, REMOVED, STORED, UPDATED, emit, note_gone
from kvpool.state.index import link, rival_child, unlink_content
from kvpool.state.policy import (
    BACK,
    expired,
    on_change,
    on_insert,
    on_only_copy,
    on_release,
    place,
    relist,
    should_offload,
    take_victim,
    unlist,
)
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
    add_reference,
    blocks_of,
    counters_of,
    drop_reference,
    extra_of,
    histograms_of,
    moves_of,
    ring_of,
)

EXPIRIES_PER_CALL = 64


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
    moves[n, 0], moves[n, 1], moves[n, 2] = source, target, tokens
    moves[n, 3], moves[n, 4] = blocks[source].ticket, direction
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
    blocks = blocks_of(h)
    memcpy(h.tokens_at + 4 * target * h.width, h.tokens_at + 4 * source * h.width, 4 * count)
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
    t.key0, t.key1, t.namespace = s.key0, s.key1, s.namespace
    t.parent0, t.parent1 = s.parent0, s.parent1
    t.priority, t.ttl, t.uses = s.priority, s.ttl, s.uses
    t.stored_at, t.used_at = s.stored_at, s.used_at
    t.saved = s.saved
    t.flags = KEYED | PUBLISHED
    copy_tokens(h, source, target, h.width)


@jit
def unpublish(h, b, deadline):
    """Remove the content of block ``b`` from the cache on this tier. Its other copy stays. Returns whether there is
    one.

    The block keeps its key (a caller that changes its bytes clears KEYED) and its place in a list, if it is in one.
    """
    blocks = blocks_of(h)
    other = np.int64(blocks[b].other_copy)
    if blocks[b].flags & LINKED:
        unlink_content(h, b, other)
    if blocks[b].flags & PUBLISHED:
        emit(h, REMOVED, b)
        if b < h.device_blocks:
            h.removals += 1
    blocks[b].flags &= ~INDEXED
    if other == NONE:
        return False
    blocks[other].other_copy = NONE
    blocks[b].other_copy = NONE
    if other >= h.device_blocks:
        if on_only_copy(h, other, b, deadline):
            emit(h, UPDATED, other)
    return True


@jit(forceinline=True)
def drop(h, b, deadline, why):
    """``unpublish``, and count the content as forgotten if no copy is left, which is remembered."""
    known = blocks_of(h)[b].flags & PUBLISHED
    if not unpublish(h, b, deadline):
        counters = counters_of(h)
        if known:
            note_gone(h, b, why)
        if b < h.device_blocks:
            counters.forgotten_device_blocks += 1
        else:
            counters.forgotten_host_blocks += 1


@jit(forceinline=True)
def forget(h, b, deadline):
    """``drop`` of content that a caller, or other content, has made needless."""
    drop(h, b, deadline, FORGOTTEN)


@jit
def take_host(h, priority):
    """Take an empty host block. If there is none, evict a clean copy, or content of no higher priority. NONE if
    that is impossible."""
    blocks = blocks_of(h)
    b, _ = take_victim(h, np.int64(HOST), priority)
    if b == NONE:
        return b
    if blocks[b].other_copy != NONE:
        unpublish(h, b, NONE)
        counters_of(h).redundant_dropped += 1
    elif blocks[b].flags & INDEXED:
        record(h, HOST_LIFETIME, blocks[b].stored_at)
        record(h, HOST_IDLE, blocks[b].used_at)
        if h.owed & ~blocks[b].saved:
            h.unsaved += 1
        drop(h, b, NONE, EVICTED)
    blocks[b].flags = 0
    return b


@jit
def _offload(h, b, deadline):
    """Move the content of an evicted device block to the host tier, if the rules allow it."""
    blocks = blocks_of(h)
    if not should_offload(h, b):
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
    place(h, g, deadline)
    counters_of(h).offloaded_blocks += 1
    return True


@jit(forceinline=True)
def _evict(h, b, deadline):
    """Empty a device victim that has left its list. Its content stays on the host, is offloaded, or is forgotten."""
    blocks = blocks_of(h)
    record(h, LIFETIME, blocks[b].stored_at)
    record(h, IDLE, blocks[b].used_at)
    if blocks[b].other_copy != NONE:
        counters_of(h).offloads_saved += 1
        unpublish(h, b, deadline)
    elif not _offload(h, b, deadline):
        drop(h, b, NONE, EVICTED)


@jit
def take_device(h):
    """Take an empty device block from its list, and evict content for it if needed. The caller has counted that there
    is one."""
    blocks = blocks_of(h)
    b, deadline = take_victim(h, np.int64(DEVICE), PRIORITY_MAX)
    if b == NONE:
        raise RuntimeError("a block was taken that was not counted")
    if blocks[b].flags & INDEXED:
        _evict(h, b, deadline)
    blocks[b].flags, blocks[b].filled, blocks[b].uses, blocks[b].ticket = 0, 0, 0, NONE
    return b


@jit(forceinline=True)
def take_for(h, owner):
    """Take a device block, with one reference, for a sequence, or as a copy of a block: ``owner`` is its record."""
    b = take_device(h)
    blocks = blocks_of(h)
    add_reference(blocks, b)
    blocks[b].namespace, blocks[b].priority, blocks[b].ttl = owner.namespace, owner.priority, owner.ttl
    return b


@jit
def expire(h, limit):
    """Move blocks whose time to live is over to the back of the default priority, at most ``limit``. Returns how
    many."""
    n = 0
    while n < limit:
        b = expired(h)
        if b == NONE:
            break
        if blocks_of(h)[b].flags & PUBLISHED:
            emit(h, UPDATED, b)
            note_gone(h, b, EXPIRED)
        n += 1
    counters_of(h).expired_blocks += n
    return n


@jit
def _supersede(h, b):
    """Forget stored tails with which a new child ``b`` begins. It serves every partial match that they could."""
    while blocks_of(h)[b].child_next != NONE:  # children are entered in front, so older ones come after
        tail = rival_child(h, b, False)
        if tail == NONE:
            return
        forget(h, tail, NONE)
        on_change(h, tail)


@jit
def forget_both(h, b, other):
    """Forget the content of a block and of its other copy, if there is one."""
    forget(h, b, NONE)
    if other != NONE:
        forget(h, other, NONE)
        on_change(h, other)


@jit(forceinline=True)
def enter(h, b, flag):
    """Make the full (PUBLISHED) or unfull (TAIL) content of ``b`` findable. No other block may represent its key."""
    on_insert(h, b)
    blocks_of(h)[b].flags |= flag
    link(h, b)
    if flag == PUBLISHED:
        emit(h, STORED, b)
    if h.child_buckets:
        _supersede(h, b)


@jit(forceinline=True)
def hold(h, b):
    """Add a reference. A block that nobody held leaves its list."""
    if add_reference(blocks_of(h), b) == 1:
        unlist(h, b)


@jit(forceinline=True)
def unhold(h, b):
    """Undo ``hold`` to the byte. Call it in the reverse order."""
    if drop_reference(blocks_of(h), b) == 0:
        relist(h, b)


@jit(forceinline=True)
def let_go(h, b):
    """Drop a reference. A block that nobody holds then joins a list."""
    if drop_reference(blocks_of(h), b) == 0:
        on_release(h, b, BACK)
