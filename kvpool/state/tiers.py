"""Taking blocks and giving them back: eviction, offload or forget, and host copies. Decides moves, but moves no bytes.
The order of eviction is the policy's.

First, what a decision notes for others, in the order of the decisions: the accesses of the engine's streams to blocks,
past and future, by which copies and streams are ordered; and events, which say what was stored, removed, updated or
cleared.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import bit_length, memcpy
from kvpool.state.index import link, rival_child, unlink_content
from kvpool.state.policies.policy import (
    BACK,
    disown,
    expired,
    on_change,
    on_insert,
    on_only_copy,
    on_release,
    place_only_copy,
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
    accesses_of,
    add_reference,
    blocks_of,
    constants,
    counters_of,
    drop_reference,
    events_of,
    gone_of,
    head,
    histograms_of,
    moves_of,
    pool_id,
    ring_of,
    token_moves_of,
)

# -- accesses --------------------------------------------------------------------------------------------


# Kinds of rows (kind, stream, block). WILL_READ, WILL_WRITE: the stream will read or write the block from now on.
# ACCESSED: its accesses so far are enqueued. WROTE: the same, and one of them wrote the block's content. FOLLOWS has a
# second stream in place of the block: the first stream takes sequences over from it.
WILL_READ, WILL_WRITE, ACCESSED, WROTE, FOLLOWS = constants(*range(5))


@jit(forceinline=True)
def emit_access(h, kind, stream, b):
    """Note an access. A synchronous device needs none: then there is no room for rows, and this costs one
    comparison."""
    if h.accesses_capacity != 0:
        _note(h, kind, np.int64(stream), np.int64(b))


@jit(forceinline=True)
def _note(h, kind, stream, b):
    n = h.accesses
    if stream == NONE:
        return
    if n >= h.accesses_capacity:
        raise RuntimeError("more accesses than one call can note")
    rows = accesses_of(h)
    rows[n, 0], rows[n, 1], rows[n, 2] = kind, stream, b
    h.accesses = n + 1


@jit(nogil=False)
def collect(heads, moves, token_moves, accesses):
    """Take a decision's moves, token moves and accesses out of the buffers of the groups, into arrays of their lengths.
    Returns the ticket.

    This is one call, since the interpreter may run anything between two. If the lengths are no longer right, it returns
    NONE and changes nothing.
    """
    m = t = a = 0
    for g in range(heads.shape[0]):
        m, t, a = m + head(heads, g).moves, t + head(heads, g).token_moves, a + head(heads, g).accesses
    if moves.shape[0] != m or token_moves.shape[0] != t or accesses.shape[0] != a:
        return np.int64(NONE)
    m = t = a = 0
    for g in range(heads.shape[0]):
        h = head(heads, g)
        m, t, a = _take_moves(h, moves, m), _take_token_moves(h, token_moves, t), _take_accesses(h, accesses, a)
        h.moves = h.token_moves = h.accesses = 0
        h.ticket += 1
    return head(heads, 0).ticket - 1


@jit
def _take_moves(h, moves, n):
    """Take the moves of one group, and put them after the first ``n``. A move of a whole block has as many tokens as
    the device's block."""
    decided = moves_of(h)
    for i in range(h.moves):
        moves[n, 0], moves[n, 1] = pool_id(h, decided[i, 0]), pool_id(h, decided[i, 1])
        moves[n, 2], moves[n, 3] = min(decided[i, 2], h.block_tokens), decided[i, 3]
        moves[n, 4] = decided[i, 4]
        n += 1
    return n


@jit
def _take_token_moves(h, token_moves, n):
    shifted, first = token_moves_of(h), h.device_first * h.width
    for i in range(h.token_moves):
        token_moves[n, 0], token_moves[n, 1] = shifted[i, 0], shifted[i, 1]
        token_moves[n, 2], token_moves[n, 3] = shifted[i, 2] + first, shifted[i, 3] + first
        n += 1
    return n


@jit
def _take_accesses(h, accesses, n):
    noted = accesses_of(h)
    for i in range(h.accesses):
        accesses[n, 0], accesses[n, 1] = noted[i, 0], noted[i, 1]
        accesses[n, 2] = noted[i, 2] if noted[i, 0] == FOLLOWS else pool_id(h, noted[i, 2])
        n += 1
    return n


# -- events ----------------------------------------------------------------------------------------------


CREATED, STORED, REMOVED, UPDATED, CLEARED = constants(*range(5))


@jit
def _slot(h):
    """Count the next event and return its place. A full ring loses its oldest event. It is counted if nobody has read
    it."""
    ring = ring_of(h)
    if ring.next - ring.read == h.event_capacity:
        ring.read += 1
        if ring.read > ring.seen:
            counters_of(h).events_dropped += 1
    ring.next += 1
    return (ring.next - 1) % h.event_capacity


@jit(forceinline=True)
def emit(h, kind, b):
    """Record an event about block ``b`` in its present state. Costs one comparison if nobody wants events."""
    if h.event_capacity != 0:
        _record(h, kind, np.int64(b))


@jit
def _record(h, kind, b):
    blocks, events = blocks_of(h), events_of(h)
    ring = ring_of(h)
    before = (ring.next - 1) % h.event_capacity
    first = ring.next == ring.call
    i = _slot(h)
    tier = DEVICE if b < h.device_blocks else HOST
    joins = (
        kind == STORED
        and not first
        and events[before].kind == STORED
        and events[before].group == h.group
        and events[before].tier == tier
        and events[before].priority == blocks[b].priority
        and events[before].key0 == blocks[b].parent0
        and events[before].key1 == blocks[b].parent1
    )
    event, block = events[i], blocks[b]
    event.kind, event.tier, event.priority, event.joined = kind, tier, block.priority, 1 if joins else 0
    event.group, event.namespace = h.group, block.namespace
    event.key0, event.key1, event.parent0, event.parent1 = block.key0, block.key1, block.parent0, block.parent1
    event.extra = 1 if kind == STORED and block.flags & EXTRA else 0
    # In a pool of host blocks only they are a key of the caller's, which every event tells.
    if kind == STORED or h.device_blocks == 0:
        memcpy(h.event_tokens_at + 4 * i * h.width, h.tokens_at + 4 * b * h.width, 4 * h.width)
    if event.extra:
        memcpy(h.event_extra_at + 8 * i * h.width, h.extra_at + 8 * b * h.width, 8 * h.width)


EVICTED, FORGOTTEN, EXPIRED, LOSS = constants(*range(4))
"""Why content is gone, or (EXPIRED) will be soon."""


@jit(forceinline=True)
def note_gone(h, b, why):
    """Remember why the content of block ``b`` leaves. Costs one comparison if the pool remembers nothing."""
    if h.gone_capacity != 0:
        ring, gone = ring_of(h), gone_of(h)
        i = ring.gone & (h.gone_capacity - 1)  # a power of two
        gone[i, 0], gone[i, 1] = blocks_of(h)[b].key0, h.now << 2 | why
        ring.gone += 1


@jit
def emit_cleared(h):
    ring_of(h).gone += h.gone_capacity + 1  # what was cached is not known any more
    if h.event_capacity == 0:
        return
    i = _slot(h)
    events_of(h)[i].kind = CLEARED
    events_of(h)[i].joined, events_of(h)[i].group = 0, h.group


# -- blocks ---------------------------------------------------------------------------------------------


EXPIRIES_PER_CALL = 64


@jit(forceinline=True)
def begin(h, now_ms):
    """Start the part of a call that changes the pool."""
    h.now = now_ms
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
        memcpy(h.extra_at + 8 * target * h.width, h.extra_at + 8 * source * h.width, 8 * count)
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
        if h.pending & ~blocks[b].saved:
            h.unsaved += 1
        drop(h, b, NONE, EVICTED)
    blocks[b].flags = 0
    return b


@jit
def _offload(h, b, deadline):
    """Move the content of an evicted device block to the host tier, if there is room."""
    blocks = blocks_of(h)
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
    place_only_copy(h, g, b, deadline)
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
    else:
        wanted = should_offload(h, b)
        counters_of(h).evicted_by_rule_blocks += 0 if wanted else 1
        if not wanted or not _offload(h, b, deadline):
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
    disown(h, b)
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
