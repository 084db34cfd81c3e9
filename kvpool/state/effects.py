"""What a decision notes for others, in the order of the decisions: the accesses of the engine's streams to blocks, and
KV events.

Accesses are rows, past and future. Copies and streams are ordered by them. Events say what was stored, removed, updated
or cleared.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.records import (
    DEVICE,
    EXTRA,
    HOST,
    NONE,
    accesses_of,
    blocks_of,
    constants,
    counters_of,
    event_extra_of,
    event_tokens_of,
    events_of,
    extra_of,
    gone_of,
    head,
    moves_of,
    pool_id,
    ring_of,
    token_moves_of,
    tokens_of,
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


@jit
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
    events[i].kind, events[i].tier, events[i].priority, events[i].joined = (
        kind,
        tier,
        blocks[b].priority,
        1 if joins else 0,
    )
    events[i].group = h.group
    events[i].key0, events[i].key1 = blocks[b].key0, blocks[b].key1
    events[i].parent0, events[i].parent1 = blocks[b].parent0, blocks[b].parent1
    events[i].namespace = blocks[b].namespace
    events[i].extra = 1 if kind == STORED and blocks[b].flags & EXTRA else 0
    # In a pool of host blocks only they are a key of the caller's, which every event tells.
    if kind == STORED or h.device_blocks == 0:
        copied, tokens = event_tokens_of(h), tokens_of(h)
        for t in range(h.width):
            copied[i, t] = tokens[b, t]
    if events[i].extra:
        told, own = event_extra_of(h), extra_of(h)
        for t in range(h.width):
            told[i, t] = own[b, t]


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
