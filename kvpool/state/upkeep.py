"""What one group does between requests: prefetch, offload on demand, expiry, loss of blocks whose copy failed,
reset."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.commit import DROP, release_rows
from kvpool.state.fill import onboard
from kvpool.state.guards import TICKET_AT_LOSS
from kvpool.state.index import device_copy, find_key, host_copy
from kvpool.state.policy import free_blocks, on_change, on_reset, stop_clock
from kvpool.state.records import (
    DEVICE,
    INDEXED,
    LIVE,
    LOST,
    NONE,
    OFFLOAD,
    PUBLISHED,
    SWAPPED,
    add_reference,
    blocks_of,
    children_of,
    counters_of,
    index_of,
    sequences_of,
    swapped_of,
    table_of,
)
from kvpool.state.ring import STORED, emit
from kvpool.state.sequences import slot_of
from kvpool.state.swaps import give_up
from kvpool.state.tiers import (
    EXPIRIES_PER_CALL,
    begin,
    copy_content,
    emit_move,
    expire,
    hold,
    let_go,
    take_host,
    unpublish,
)


@jit
def prefetch(h, matched, ids):
    """Onboard those of the ``matched`` cached blocks ``ids`` int32 that are only on the host, as far as there are
    device blocks.

    Holds nothing afterwards. Returns blocks onboarded. The ids are scratch.
    """
    for i in range(matched):
        if ids[i] == NONE:
            continue
        b, device = np.int64(ids[i]), device_copy(h, np.int64(ids[i]))
        if device != NONE:
            ids[i] = b = device
        hold(h, b)
        stop_clock(h, b)
    expire(h, EXPIRIES_PER_CALL)
    done = 0
    for i in range(matched):
        if ids[i] >= h.device_blocks:
            if free_blocks(h, DEVICE) == 0:
                matched = _drop_rest(h, ids, i, matched)
                break
            host = np.int64(ids[i])
            ids[i] = onboard(h, host)
            let_go(h, host)
            done += 1
    _drop_rest(h, ids, 0, matched)
    return done


@jit
def _drop_rest(h, ids, first, last):
    """Let go of ``ids[first:last]``, the last block first. Returns ``first``."""
    for i in range(last - 1, first - 1, -1):
        if ids[i] != NONE:
            let_go(h, np.int64(ids[i]))
    return first


@jit
def offload(h, keys):
    """Copy device blocks by key (int64[n, 2]) to the host, as far as it has room. The device blocks stay. Returns
    blocks copied.

    The copies are held until the call ends, so that they do not evict each other.
    """
    blocks = blocks_of(h)
    done, first = 0, np.int64(NONE)
    for i in range(keys.shape[0]):
        b = find_key(h, keys[i, 0], keys[i, 1])
        if b == NONE or device_copy(h, b) == NONE or host_copy(h, b) != NONE:
            continue
        g = take_host(h, np.int64(blocks[b].priority))
        if g == NONE:
            break
        copy_content(h, b, g)
        blocks[b].other_copy, blocks[g].other_copy = g, b
        add_reference(blocks, g)
        emit_move(h, b, g, h.width, OFFLOAD)
        emit(h, STORED, g)
        blocks[g].next, blocks[g].prev = NONE, first
        first = g
        done += 1
    counters_of(h).offloaded_blocks += done
    _let_go_chain(h, first)
    return done


@jit
def _let_go_chain(h, last):
    """Let go of held blocks that ``prev`` links, first to last."""
    blocks = blocks_of(h)
    while last != NONE and blocks[last].prev != NONE:
        blocks[blocks[last].prev].next = last
        last = blocks[last].prev
    while last != NONE:
        after = np.int64(blocks[last].next)
        let_go(h, last)
        last = after


@jit
def lose(h, b, ticket):
    """Take the content of a block whose copy failed, unless a later decision than ``ticket`` has put other content
    there.

    A block in a list becomes empty. A held block is marked LOST, and its sequences fail (``verbs.lose``). Returns
    whether there was content.
    """
    blocks = blocks_of(h)
    stale = blocks[b].ticket != ticket and h.guards & TICKET_AT_LOSS != 0
    if stale or (blocks[b].word == 0 and not blocks[b].flags & INDEXED):
        return False
    unpublish(h, b, NONE)
    if blocks[b].list >= 0:
        on_change(h, b)
    else:
        blocks[b].flags = LOST
    counters_of(h).lost_blocks += 1
    return True


@jit
def lost_one(h, slot):
    """Whether a live sequence or reservation has lost a block in this group."""
    if sequences_of(h)[slot].live:
        row = (swapped_of(h) if sequences_of(h)[slot].live == SWAPPED else table_of(h))[slot]
        for i in range(sequences_of(h)[slot].blocks):
            b = np.int64(row[i])
            if b != NONE and blocks_of(h)[b].flags & LOST:
                return True
    return False


@jit
def reset(h, ids, now):
    """Drop all content, without an event, and ``ids``, which are all live sequences and reservations.

    Pinned blocks lose their keys and keep their bytes until the last unpin.
    """
    blocks, index, children = blocks_of(h), index_of(h), children_of(h)
    for i in range(index.shape[0]):
        index[i] = NONE
    for i in range(h.child_buckets):
        children[i] = NONE
    for b in range(h.blocks):
        if blocks[b].flags & PUBLISHED and b < h.device_blocks:
            h.removals += 1
        blocks[b].flags &= LOST
        blocks[b].other_copy = blocks[b].chain = blocks[b].child_prev = blocks[b].child_next = NONE
    begin(h, now)
    give_up(h, ids, DROP)
    for i in range(ids.shape[0]):
        sequences_of(h)[slot_of(ids[i])].live = LIVE
    release_rows(h, ids, DROP)
    on_reset(h)
    h.generation += 1
