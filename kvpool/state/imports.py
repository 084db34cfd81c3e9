"""Content that comes from elsewhere: host blocks taken for the missing blocks of a prompt, and published once their
bytes are there."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.fill import write_tokens
from kvpool.state.index import find_key, host_copy
from kvpool.state.pins import pin_block
from kvpool.state.policy import empty_blocks
from kvpool.state.records import (
    HOST,
    KEYED,
    NONE,
    PUBLISHED,
    blocks_of,
    change_word,
    head,
    request_at,
)
from kvpool.state.requests import parent_of, request_extra, request_keys, request_tokens
from kvpool.state.tiers import EXPIRIES_PER_CALL, begin, enter, expire, take_host


@jit
def take(heads, g, requests, first, priority, out, held, now):
    """Pin a host block for each full block ``first + i`` of a prompt that is cached nowhere, as far as the host has
    room.

    Ids go into ``out`` int64[n], NONE for a block that was not taken. Nobody can find these blocks. If something is
    evicted for them, host copies of the prompt's other blocks are pinned too, so that the prompt does not evict itself:
    their ids go into ``held`` int64[full blocks], which is all NONE before.
    """
    h, request = head(heads, g), request_at(requests, 0)
    blocks, keys = blocks_of(h), request_keys(h, request)
    begin(h, now)
    expire(h, EXPIRIES_PER_CALL)
    evicts = empty_blocks(h, HOST) < out.shape[0]
    for i in range(held.shape[0] if evicts else 0):
        b = find_key(h, keys[i, 0], keys[i, 1])
        held[i] = NONE if b == NONE else host_copy(h, b)
        if held[i] != NONE:
            pin_block(h, held[i])
    room = True
    for i in range(out.shape[0]):
        out[i] = NONE
        if room and find_key(h, keys[first + i, 0], keys[first + i, 1]) == NONE:
            b = take_host(h, priority)
            room = b != NONE
            if room:
                blocks[b].filled, blocks[b].uses, blocks[b].ticket, blocks[b].ttl = 0, 0, NONE, NONE
                change_word(blocks, np.int64(b), np.int64(0), np.int64(1))
                out[i] = b


@jit
def publish(heads, g, requests, first, priority, ids, now):
    """Publish the blocks that ``take`` returned, except those whose content has been cached meanwhile. Returns how
    many."""
    h, request = head(heads, g), request_at(requests, 0)
    blocks, keys = blocks_of(h), request_keys(h, request)
    begin(h, now)
    published = 0
    for i in range(ids.shape[0]):
        b, at = ids[i], first + i
        if b == NONE or find_key(h, keys[at, 0], keys[at, 1]) != NONE:
            continue
        write_tokens(h, b, 0, request_tokens(request), request_extra(request), at * h.width, h.width)
        blocks[b].key0, blocks[b].key1 = keys[at, 0], keys[at, 1]
        blocks[b].parent0, blocks[b].parent1 = parent_of(h, request, at)
        blocks[b].namespace, blocks[b].priority = request.namespace, priority
        blocks[b].flags |= KEYED
        enter(h, b, PUBLISHED)
        published += 1
    return np.int64(published)
