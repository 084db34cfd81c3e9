"""Pins: blocks that readers hold, by their pool ids, in all groups of layers; and host blocks that wait, pinned,
for the bytes of a prompt from elsewhere."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.codes import NOT_FOUND
from kvpool.state.fill import write_tokens
from kvpool.state.index import device_copy, find_key, host_copy
from kvpool.state.kinds import needs_all
from kvpool.state.policy import BACK, empty_blocks, on_release, stop_clock, unlist
from kvpool.state.records import (
    DEVICE,
    HOST,
    INDEXED,
    KEYED,
    LOST,
    NONE,
    PUBLISHED,
    blocks_of,
    change_word,
    head,
    place_of,
    pool_id,
    request_at,
)
from kvpool.state.requests import parent_of, request_extra, request_keys, request_tokens
from kvpool.state.tiers import EXPIRIES_PER_CALL, begin, enter, expire, take_host

ANY_TIER = -1


@jit
def pin_block(h, b):
    blocks = blocks_of(h)
    if change_word(blocks, np.int64(b), np.int64(0), np.int64(1)) == 1 << 32:
        stop_clock(h, b)
        unlist(h, b)


@jit
def _copy_on(h, key0, key1, tier):
    """The block of a key on ``tier``, NONE if there is none. With ANY_TIER, the host copy is preferred."""
    b = find_key(h, key0, key1)
    if b == NONE:
        return np.int64(NONE)
    device, host = device_copy(h, b), host_copy(h, b)
    return np.int64(device if tier == DEVICE or (tier == ANY_TIER and host == NONE) else host)


@jit
def cached(heads, keys, tier, out):
    """Whether each group has a block of each key (int64[n, 2]) on ``tier``, into ``out`` bool[groups, n]."""
    for g in range(heads.shape[0]):
        for i in range(keys.shape[0]):
            out[g, i] = _copy_on(head(heads, g), keys[i, 0], keys[i, 1], tier) != NONE


@jit
def _complete(heads, only, keys, out):
    """The place of the first key that is missing: a group with attention to all tokens lacks it, or all groups do. NONE
    if none is. ``only``: the one group to look at, or NONE for all."""
    for i in range(keys.shape[0]):
        found = 0
        for g in range(heads.shape[0]):
            if out[g, i] != NONE:
                found += 1
            elif needs_all(head(heads, g)) and only == NONE:
                return i
        if found == 0:
            return i
    return NONE


@jit
def pin_keys(heads, only, keys, tier, out):
    """Pin the blocks of each key (int64[n, 2]) in all groups that have one. Ids go into ``out`` int64[groups, n], NONE
    if a group has none. ``only``: the one group to pin in, or NONE for all.

    Returns 0. Or returns NOT_FOUND; then ``detail`` has the place of the first missing key, and nothing has changed.
    """
    for g in range(heads.shape[0]):
        for i in range(keys.shape[0]):
            asked = only == NONE or only == g
            out[g, i] = _copy_on(head(heads, g), keys[i, 0], keys[i, 1], tier) if asked else NONE
    missing = _complete(heads, only, keys, out)
    if missing != NONE:
        head(heads, 0).detail = missing
        return NOT_FOUND
    for g in range(heads.shape[0]):
        for i in range(keys.shape[0]):
            if out[g, i] != NONE:
                pin_block(head(heads, g), out[g, i])
                out[g, i] = pool_id(head(heads, g), out[g, i])
    return 0


@jit
def pin_blocks(heads, ids):
    """Pin blocks by id. Each must be held or cached. Returns 0. Or returns NOT_FOUND; then ``detail`` has the place of
    the block, and nothing has changed."""
    for i in range(ids.shape[0]):
        g, b = place_of(heads, ids[i])
        bad = g == NONE
        if not bad:
            block = blocks_of(head(heads, g))[b]
            bad = block.flags & LOST != 0 or (block.word == 0 and not block.flags & INDEXED)
        if bad:
            head(heads, 0).detail = i
            return NOT_FOUND
    for i in range(ids.shape[0]):
        g, b = place_of(heads, ids[i])
        pin_block(head(heads, g), b)
    return 0


@jit
def unpin(heads, ids, now):
    """Drop one pin of each block. A block that nobody holds then joins the list of its content."""
    for g in range(heads.shape[0]):
        begin(head(heads, g), now)
    for i in range(ids.shape[0]):
        g, b = place_of(heads, ids[i])
        if change_word(blocks_of(head(heads, g)), b, np.int64(0), np.int64(-1)) == 0:
            on_release(head(heads, g), b, BACK)


# -- content that comes from elsewhere -----------------------------------------------------------------


@jit
def take_missing(heads, g, requests, first, priority, out, held, now):
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
def publish_taken(heads, g, requests, first, priority, ids, now):
    """Publish the blocks that ``take_missing`` took, except those whose content has been cached meanwhile. Returns how
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
