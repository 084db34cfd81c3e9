"""What one group does between requests: prefetch, offload on demand, expiry, blocks that a failed device lost, reset."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.blocks import (
    BLOCKS,
    C_LOST,
    C_OFFLOADED,
    CHILD_BUCKETS,
    DEVICE,
    DEVICE_BLOCKS,
    EMPTY,
    GENERATION,
    GUARD,
    HOST,
    INDEXED,
    LISTS_PER_TIER,
    LIVE,
    LOST,
    NONE,
    PUBLISHED,
    REMOVALS,
    WIDTH,
    add_reference,
    blocks_of,
    children_of,
    counters_of,
    heap_of,
    index_of,
    lists_of,
    sequences_of,
    table_of,
)
from kvpool.state.grants import onboard, release_sources
from kvpool.state.hashing import TICKET_AT_LOSS
from kvpool.state.index import find_key
from kvpool.state.lru import free_blocks, heap_remove, push_back, unlink
from kvpool.state.prefix import device_copy, host_copy
from kvpool.state.ring import STORED, emit
from kvpool.state.storing import release
from kvpool.state.tiers import EXPIRIES_PER_CALL, begin, copy_content, emit_move, expire, hold, let_go, shelve, take_host, unpublish


@jit
def prefetch(h, matched, ids):
    """Onboard those of the ``matched`` cached blocks ``ids`` int32 that are on the host only, as far as device blocks can be had.

    Holds nothing after. Returns blocks onboarded. The ids are scratch.
    """
    for i in range(matched):
        if ids[i] == NONE:
            continue
        b = device_copy(h, ids[i])
        if b != NONE:
            ids[i] = b
        hold(h, ids[i])
        heap_remove(blocks_of(h), heap_of(h), ids[i])
    expire(h, EXPIRIES_PER_CALL)
    done = 0
    for i in range(matched):
        if ids[i] >= h[DEVICE_BLOCKS]:
            if free_blocks(lists_of(h), DEVICE) == 0:
                matched = _drop_rest(h, ids, i, matched)
                break
            ids[i] = onboard(h, ids[i])
            done += 1
    release_sources(h, 0)
    _drop_rest(h, ids, 0, matched)
    return done


@jit
def _drop_rest(h, ids, first, last):
    """Let go of ``ids[first:last]``, tail first; returns ``first``."""
    for i in range(last - 1, first - 1, -1):
        if ids[i] != NONE:
            let_go(h, ids[i])
    return first


@jit
def offload(h, keys):
    """Copy device blocks by key (int64[n, 2]) to the host, as far as it has room, and keep them; returns blocks copied.

    The copies are held until the call ends, so that they do not push each other out.
    """
    blocks = blocks_of(h)
    done = 0
    first = np.int64(NONE)
    for i in range(keys.shape[0]):
        b = find_key(h, keys[i, 0], keys[i, 1])
        if b == NONE or device_copy(h, b) == NONE or host_copy(h, b) != NONE:
            continue
        g = take_host(h, np.int64(blocks[b].priority))
        if g == NONE:
            break
        copy_content(h, b, g)
        blocks[b].twin, blocks[g].twin = g, b
        add_reference(blocks, g)
        emit_move(h, b, g, h[WIDTH])
        emit(h, STORED, g)
        blocks[g].next = NONE
        blocks[g].prev = first
        first = g
        done += 1
    counters_of(h)[C_OFFLOADED] += done
    _let_go_chain(h, first)
    return done


@jit
def _let_go_chain(h, last):
    """Let go of held blocks strung together by ``prev``, first to last."""
    blocks = blocks_of(h)
    while last != NONE and blocks[last].prev != NONE:
        blocks[blocks[last].prev].next = last
        last = blocks[last].prev
    while last != NONE:
        after = blocks[last].next
        let_go(h, last)
        last = after


@jit
def refresh(h, now):
    begin(h, now)
    return expire(h, h[BLOCKS])


@jit
def lose(h, b, ticket):
    """Take the content of a block whose bytes never came, unless a later decision than ``ticket`` has put other content there.

    Returns whether there was any.
    """
    blocks = blocks_of(h)
    stale = blocks[b].ticket != ticket and h[GUARD] & TICKET_AT_LOSS != 0
    if stale or (blocks[b].word == 0 and not blocks[b].flags & INDEXED):
        return False
    unpublish(h, b, NONE)
    if blocks[b].list != NONE:
        heap_remove(blocks, heap_of(h), b)
        unlink(blocks, lists_of(h), b)
        shelve(h, b, False)
    else:
        blocks[b].flags = LOST
    counters_of(h)[C_LOST] += 1
    return True


@jit
def lost_one(h, slot):
    """Whether a live sequence or reservation has lost a block in this group."""
    if sequences_of(h)[slot].live:
        for i in range(sequences_of(h)[slot].blocks):
            b = table_of(h)[slot, i]
            if b != NONE and blocks_of(h)[b].flags & LOST:
                return True
    return False


@jit
def reset(h, ids, now):
    """Drop all content, without an event, and ``ids``, all sequences and reservations that live.

    Pinned blocks become keyless and keep their bytes until the last unpin.
    """
    blocks, lists, index, children, heap = blocks_of(h), lists_of(h), index_of(h), children_of(h), heap_of(h)
    for i in range(index.shape[0]):
        index[i] = NONE
    for i in range(h[CHILD_BUCKETS]):
        children[i] = NONE
    while heap[0] > 0:
        heap_remove(blocks, heap, heap[heap[0]])
    for b in range(h[BLOCKS]):
        if blocks[b].flags & PUBLISHED and b < h[DEVICE_BLOCKS]:
            h[REMOVALS] += 1
        blocks[b].flags &= LOST
        blocks[b].twin = blocks[b].chain = blocks[b].child_prev = blocks[b].child_next = NONE
    begin(h, now)
    for i in range(ids.shape[0]):
        sequences_of(h)[ids[i] & 0xFFFFFFFF].live = LIVE
    release(h, ids, False)
    for b in range(h[BLOCKS]):
        if blocks[b].list != NONE:
            unlink(blocks, lists, b)
            blocks[b].filled = 0
            push_back(blocks, lists, b, (DEVICE if b < h[DEVICE_BLOCKS] else HOST) * LISTS_PER_TIER + EMPTY)
    h[GENERATION] += 1
