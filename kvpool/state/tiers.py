"""Taking blocks and giving them back: eviction, offload or forget, and host copies. Decides copy ops, but copies no
bytes. The order of eviction is the policy's.

First, what a decision notes for others, in the order of the decisions: the accesses of the engine's streams to blocks,
past and future, by which copies and streams are ordered; and events of what was stored, removed, updated or
cleared.
"""

from __future__ import annotations

from kvpool.common.jit import inline, jit
from kvpool.common.jit.intrinsics import bit_length, memcpy
from kvpool.state.index import link, rival_child, unlink_content
from kvpool.state.policies.block_lists import BACK, relink, unlink
from kvpool.state.policies.policy import (
    disown,
    expired,
    on_change,
    on_insert,
    on_only_copy,
    on_release,
    place_only_copy,
    should_offload,
    take_victim,
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
    copy_ops_of,
    counters_of,
    drop_reference,
    events_of,
    gone_of,
    group_at,
    histograms_of,
    pool_id,
    ring_of,
    token_moves_of,
)

# -- accesses --------------------------------------------------------------------------------------------


# Kinds of rows (kind, stream, block). WILL_READ, WILL_WRITE: the stream will read or write the block from now on.
# ACCESSED: its accesses so far are enqueued. WROTE: the same, and one of them wrote the block's content. FOLLOWS has a
# second stream in place of the block: the first stream takes sequences over from it.
WILL_READ, WILL_WRITE, ACCESSED, WROTE, FOLLOWS = range(5)


@inline
def emit_access(group, kind, stream, b):
    """Note an access. A synchronous device needs no accesses. Then there are no rows, and this costs one
    comparison."""
    if group.accesses_capacity != 0:
        _note(group, kind, stream, b)


@inline
def _note(group, kind, stream, b):
    n = group.accesses
    if stream == NONE:
        return
    if n >= group.accesses_capacity:
        raise RuntimeError("more accesses than one call can note")
    rows = accesses_of(group)
    rows[n, 0], rows[n, 1], rows[n, 2] = kind, stream, b
    group.accesses = n + 1


@jit(nogil=False)
def collect(groups, copy_ops, token_moves, accesses):
    """Take a decision's copy ops, token moves and accesses out of the buffers of the groups, into arrays of their
    lengths. Returns the ticket.

    This is one call, since the interpreter may run anything between two. If the lengths are no longer right, it returns
    NONE and changes nothing.
    """
    m = t = a = 0
    for g in range(len(groups)):
        m += group_at(groups, g).copy_ops
        t += group_at(groups, g).token_moves
        a += group_at(groups, g).accesses
    if len(copy_ops) != m or len(token_moves) != t or len(accesses) != a:
        return NONE
    m = t = a = 0
    for g in range(len(groups)):
        group = group_at(groups, g)
        m = _take_copy_ops(group, copy_ops, m)
        t = _take_token_moves(group, token_moves, t)
        a = _take_accesses(group, accesses, a)
        group.copy_ops = group.token_moves = group.accesses = 0
        group.ticket += 1
    return group_at(groups, 0).ticket - 1


@jit
def _take_copy_ops(group, copy_ops, n):
    """Take the copy ops of one group, and put them after the first ``n``. One of a whole block has as many tokens as
    the device's block."""
    decided = copy_ops_of(group)
    for i in range(group.copy_ops):
        copy_ops[n, 0], copy_ops[n, 1] = pool_id(group, decided[i, 0]), pool_id(group, decided[i, 1])
        copy_ops[n, 2], copy_ops[n, 3] = min(decided[i, 2], group.block_tokens), decided[i, 3]
        copy_ops[n, 4] = decided[i, 4]
        n += 1
    return n


@jit
def _take_token_moves(group, token_moves, n):
    shifted, first = token_moves_of(group), group.device_first * group.width
    for i in range(group.token_moves):
        token_moves[n, 0], token_moves[n, 1] = shifted[i, 0], shifted[i, 1]
        token_moves[n, 2], token_moves[n, 3] = shifted[i, 2] + first, shifted[i, 3] + first
        n += 1
    return n


@jit
def _take_accesses(group, accesses, n):
    noted = accesses_of(group)
    for i in range(group.accesses):
        accesses[n, 0], accesses[n, 1] = noted[i, 0], noted[i, 1]
        accesses[n, 2] = noted[i, 2] if noted[i, 0] == FOLLOWS else pool_id(group, noted[i, 2])
        n += 1
    return n


# -- events ----------------------------------------------------------------------------------------------


CREATED, STORED, REMOVED, UPDATED, CLEARED = range(5)


@jit
def _slot(group):
    """Count the next event and return its place. A full ring loses its oldest event. It is counted if nobody has read
    it."""
    ring = ring_of(group)
    if ring.next - ring.read == group.event_capacity:
        ring.read += 1
        if ring.read > ring.seen:
            counters_of(group).events_dropped += 1
    ring.next += 1
    return (ring.next - 1) % group.event_capacity


@inline
def emit(group, kind, b):
    """Record an event about block ``b`` in its present state. Costs one comparison if events are off."""
    if group.event_capacity != 0:
        _record(group, kind, b)


@jit
def _record(group, kind, b):
    blocks, events = blocks_of(group), events_of(group)
    ring = ring_of(group)
    before = (ring.next - 1) % group.event_capacity
    first = ring.next == ring.call
    i = _slot(group)
    tier = DEVICE if b < group.device_blocks else HOST
    joins = (
        kind == STORED
        and not first
        and events[before].kind == STORED
        and events[before].group == group.number
        and events[before].tier == tier
        and events[before].priority == blocks[b].priority
        and events[before].key0 == blocks[b].parent0
        and events[before].key1 == blocks[b].parent1
    )
    event, block = events[i], blocks[b]
    event.kind, event.tier, event.priority, event.joined = kind, tier, block.priority, 1 if joins else 0
    event.group, event.namespace = group.number, block.namespace
    event.key0, event.key1, event.parent0, event.parent1 = block.key0, block.key1, block.parent0, block.parent1
    event.extra = 1 if kind == STORED and block.flags & EXTRA else 0
    # In a pool of host blocks only, they are a key of the caller's, and every event has it.
    if kind == STORED or group.device_blocks == 0:
        memcpy(group.event_tokens_at + 4 * i * group.width, group.tokens_at + 4 * b * group.width, 4 * group.width)
    if event.extra:
        memcpy(group.event_extra_at + 8 * i * group.width, group.extra_at + 8 * b * group.width, 8 * group.width)


EVICTED, FORGOTTEN, EXPIRED, LOSS = range(4)
"""Why content is gone, or (EXPIRED) will be soon."""


@inline
def note_gone(group, b, why):
    """Remember why the content of block ``b`` leaves. Costs one comparison if the pool remembers nothing."""
    if group.gone_capacity != 0:
        ring, gone = ring_of(group), gone_of(group)
        i = ring.gone & (group.gone_capacity - 1)  # a power of two
        gone[i, 0], gone[i, 1] = blocks_of(group)[b].key0, group.now << 2 | why
        ring.gone += 1


@jit
def emit_cleared(group):
    ring_of(group).gone += group.gone_capacity + 1  # what was cached is not known any more
    if group.event_capacity == 0:
        return
    i = _slot(group)
    events_of(group)[i].kind = CLEARED
    events_of(group)[i].joined, events_of(group)[i].group = 0, group.number


# -- blocks ---------------------------------------------------------------------------------------------


EXPIRIES_PER_CALL = 64


@inline
def begin(group, now_ms):
    """Start the part of a call that changes the pool."""
    group.now = now_ms
    ring = ring_of(group)
    ring.call = ring.next


@inline
def emit_copy(group, source, target, tokens, direction):
    """Append a copy op to the call's batch. The target's content then waits for the batch's ticket."""
    n = group.copy_ops
    if n >= group.copy_ops_capacity:
        raise RuntimeError("more copy ops than one call can make")
    copy_ops, blocks = copy_ops_of(group), blocks_of(group)
    copy_ops[n, 0], copy_ops[n, 1], copy_ops[n, 2] = source, target, tokens
    copy_ops[n, 3], copy_ops[n, 4] = blocks[source].ticket, direction
    group.copy_ops = n + 1
    blocks[target].ticket = group.ticket


@inline
def record(group, which, since):
    """Count the time from ``since`` (ms, modulo 2**32) to now in a histogram of powers of two."""
    span = (group.now - since) & 0xFFFFFFFF
    if span >> 31:  # another thread read the clock before this one, but decided after it
        span = 0
    histogram = histograms_of(group)[which]
    histogram[bit_length(span)] += 1
    histogram[BINS] += span


@jit
def copy_tokens(group, source, target, count):
    """Copy the token ids of a block. Copy ops carry its bytes."""
    blocks = blocks_of(group)
    memcpy(group.tokens_at + 4 * target * group.width, group.tokens_at + 4 * source * group.width, 4 * count)
    blocks[target].filled = count
    if blocks[source].flags & EXTRA:
        memcpy(group.extra_at + 8 * target * group.width, group.extra_at + 8 * source * group.width, 8 * count)
        blocks[target].flags |= EXTRA


@jit
def copy_content(group, source, target):
    """Give ``target`` the identity of the published ``source``: key, tokens, priority, uses and times."""
    blocks = blocks_of(group)
    s, t = blocks[source], blocks[target]
    t.key0, t.key1, t.namespace = s.key0, s.key1, s.namespace
    t.parent0, t.parent1 = s.parent0, s.parent1
    t.priority, t.ttl, t.uses = s.priority, s.ttl, s.uses
    t.stored_at, t.used_at = s.stored_at, s.used_at
    t.saved = s.saved
    t.flags = KEYED | PUBLISHED
    copy_tokens(group, source, target, group.width)


@jit
def unpublish(group, b, deadline):
    """Remove the content of block ``b`` from the cache on this tier. Its other copy stays. Returns whether there is
    one.

    The block keeps its key (a caller that changes its bytes clears KEYED) and its place in a list, if it is in one.
    """
    blocks = blocks_of(group)
    other = blocks[b].other_copy
    if blocks[b].flags & LINKED:
        unlink_content(group, b, other)
    if blocks[b].flags & PUBLISHED:
        emit(group, REMOVED, b)
        if b < group.device_blocks:
            group.removals += 1
    blocks[b].flags &= ~INDEXED
    if other == NONE:
        return False
    blocks[other].other_copy = NONE
    blocks[b].other_copy = NONE
    if other >= group.device_blocks:
        if on_only_copy(group, other, b, deadline):
            emit(group, UPDATED, other)
    return True


@inline
def drop(group, b, why):
    """``unpublish``, and count the content as forgotten if no copy is left, which is remembered."""
    known = blocks_of(group)[b].flags & PUBLISHED
    if not unpublish(group, b, NONE):
        counters = counters_of(group)
        if known:
            note_gone(group, b, why)
        if b < group.device_blocks:
            counters.forgotten_device_blocks += 1
        else:
            counters.forgotten_host_blocks += 1


@inline
def forget(group, b):
    """``drop`` of content that a caller, or other content, has made needless."""
    drop(group, b, FORGOTTEN)


@jit
def take_host(group, priority):
    """Take an empty host block. If there is none, evict a clean copy, or content of no higher priority. NONE if
    that is impossible."""
    blocks = blocks_of(group)
    b, _ = take_victim(group, HOST, priority)
    if b == NONE:
        return b
    if blocks[b].other_copy != NONE:
        unpublish(group, b, NONE)
        counters_of(group).redundant_dropped += 1
    elif blocks[b].flags & INDEXED:
        record(group, HOST_LIFETIME, blocks[b].stored_at)
        record(group, HOST_IDLE, blocks[b].used_at)
        if group.pending & ~blocks[b].saved:
            group.unsaved += 1
        drop(group, b, EVICTED)
    blocks[b].flags = 0
    return b


@jit
def _offload(group, b, deadline):
    """Move the content of an evicted device block to the host tier, if there is room."""
    blocks = blocks_of(group)
    g = take_host(group, blocks[b].priority)
    if g == NONE:
        counters_of(group).evicted_host_full_blocks += 1
        return False
    copy_content(group, b, g)
    emit_copy(group, b, g, group.width, OFFLOAD)
    unlink_content(group, b, g)
    emit(group, STORED, g)
    emit(group, REMOVED, b)
    group.removals += 1
    place_only_copy(group, g, b, deadline)
    counters_of(group).offloaded_blocks += 1
    return True


@inline
def _evict(group, b, deadline):
    """Empty a device victim that has left its list. Its content stays on the host, is offloaded, or is forgotten."""
    blocks = blocks_of(group)
    record(group, LIFETIME, blocks[b].stored_at)
    record(group, IDLE, blocks[b].used_at)
    if blocks[b].other_copy != NONE:
        counters_of(group).offloads_saved += 1
        unpublish(group, b, deadline)
    else:
        wanted = should_offload(group, b)
        counters_of(group).evicted_by_rule_blocks += 0 if wanted else 1
        if not wanted or not _offload(group, b, deadline):
            drop(group, b, EVICTED)


@jit
def take_device(group):
    """Take an empty device block from its list, and evict content for it if needed. The caller has counted that there
    is one."""
    blocks = blocks_of(group)
    b, deadline = take_victim(group, DEVICE, PRIORITY_MAX)
    if b == NONE:
        raise RuntimeError("a block was taken that was not counted")
    if blocks[b].flags & INDEXED:
        _evict(group, b, deadline)
    disown(group, b)
    blocks[b].flags, blocks[b].filled, blocks[b].uses, blocks[b].ticket = 0, 0, 0, NONE
    return b


@inline
def take_for(group, owner):
    """Take a device block, with one reference, for a sequence, or as a copy of a block: ``owner`` is its record."""
    b = take_device(group)
    blocks = blocks_of(group)
    add_reference(blocks, b)
    blocks[b].namespace, blocks[b].priority, blocks[b].ttl = owner.namespace, owner.priority, owner.ttl
    return b


@jit
def expire(group, limit):
    """Move blocks whose time to live is over to the back of the default priority, at most ``limit``. Returns how
    many."""
    n = 0
    while n < limit:
        b = expired(group)
        if b == NONE:
            break
        if blocks_of(group)[b].flags & PUBLISHED:
            emit(group, UPDATED, b)
            note_gone(group, b, EXPIRED)
        n += 1
    counters_of(group).expired_blocks += n
    return n


@jit
def _supersede(group, b):
    """Forget stored tails with which a new child ``b`` begins. It serves every partial match that they could."""
    while blocks_of(group)[b].child_next != NONE:  # children are entered in front, so older ones come after
        tail = rival_child(group, b, False)
        if tail == NONE:
            return
        forget(group, tail)
        on_change(group, tail)


@jit
def forget_both(group, b, other):
    """Forget the content of a block and of its other copy, if there is one."""
    forget(group, b)
    if other != NONE:
        forget(group, other)
        on_change(group, other)


@inline
def enter(group, b, flag):
    """Make the full (PUBLISHED) or unfull (TAIL) content of ``b`` findable. No other block may represent its key."""
    on_insert(group, b)
    blocks_of(group)[b].flags |= flag
    link(group, b)
    if flag == PUBLISHED:
        emit(group, STORED, b)
    if group.child_buckets:
        _supersede(group, b)


@inline
def hold(group, b):
    """Add a reference. A block that nobody held leaves its list."""
    if add_reference(blocks_of(group), b) == 1:
        unlink(group, b)


@inline
def unhold(group, b):
    """Undo ``hold`` to the byte. Call it in the reverse order."""
    if drop_reference(blocks_of(group), b) == 0:
        relink(group, b)


@inline
def let_go(group, b):
    """Drop a reference. A block that nobody holds then joins a list."""
    if drop_reference(blocks_of(group), b) == 0:
        on_release(group, b, BACK)
