"""Content that comes from elsewhere: host blocks taken for a prompt's missing blocks, and published once their bytes are there."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.blocks import (
    CHILD_BUCKETS,
    EMPTY,
    HOST,
    KEYED,
    LISTS_PER_TIER,
    NONE,
    PUBLISHED,
    WIDTH,
    blocks_of,
    change_word,
    lists_of,
)
from kvpool.state.grants import write_tokens
from kvpool.state.index import find_key
from kvpool.state.pins import pin_block
from kvpool.state.prefix import host_copy
from kvpool.state.requests import R_NAMESPACE, parent_of, request_extra, request_keys, request_tokens
from kvpool.state.tiers import EXPIRIES_PER_CALL, begin, enter, expire, supersede, take_host


@jit
def take(h, request, first, priority, out, held, now):
    """Pin a host block for each full block ``first + i`` of a prompt that is cached nowhere, as far as the host has room.

    Ids go into ``out`` int64[n], NONE where none was taken; the blocks hold nothing that can be found. Where something is evicted for
    them, host copies of the prompt's other blocks are pinned too, so that it does not push itself out: ids into ``held`` int64[full
    blocks], which is all NONE before.
    """
    blocks, keys = blocks_of(h), request_keys(h, request)
    begin(h, now)
    expire(h, EXPIRIES_PER_CALL)
    evicts = lists_of(h)[HOST * LISTS_PER_TIER + EMPTY, 2] < out.shape[0]
    for i in range(held.shape[0] if evicts else 0):
        b = find_key(h, keys[i, 0], keys[i, 1])
        held[i] = NONE if b == NONE else host_copy(h, b)
        if held[i] != NONE:
            pin_block(h, held[i])
    room = True
    for i in range(out.shape[0]):
        out[i] = NONE
        if room and find_key(h, keys[first + i, 0], keys[first + i, 1]) == NONE:
            g = take_host(h, priority)
            room = g != NONE
            if room:
                blocks[g].filled, blocks[g].uses, blocks[g].ticket, blocks[g].ttl = 0, 0, NONE, NONE
                change_word(blocks, g, 0, 1)
                out[i] = g


@jit
def publish(h, request, first, priority, ids, now):
    """Make the blocks that ``take`` gave findable, except where the content has been cached meanwhile. Returns how many."""
    blocks, keys = blocks_of(h), request_keys(h, request)
    begin(h, now)
    published = 0
    for i in range(ids.shape[0]):
        g, at = ids[i], first + i
        if g == NONE or find_key(h, keys[at, 0], keys[at, 1]) != NONE:
            continue
        write_tokens(h, g, 0, request_tokens(request), request_extra(request), at * h[WIDTH], h[WIDTH])
        blocks[g].key0, blocks[g].key1 = keys[at, 0], keys[at, 1]
        blocks[g].parent0, blocks[g].parent1 = parent_of(h, request, at)
        blocks[g].namespace, blocks[g].priority = request[R_NAMESPACE], priority
        blocks[g].flags |= KEYED
        enter(h, g, PUBLISHED)
        if h[CHILD_BUCKETS]:
            supersede(h, g)
        published += 1
    return np.int64(published)
