"""Cached content that a caller names: it is forgotten, gets another priority, is counted, or pinned.

Content that somebody holds is forgotten too: nobody finds it any more, and its block is empty once nobody holds it. A
sequence or a reservation that holds forgotten content publishes nothing from then on. Otherwise a block that it commits
later, or has computed a second time, would bring the content back.
"""

from __future__ import annotations

from kvpool.common.jit import inline, jit
from kvpool.state.admit import write_tokens
from kvpool.state.index import begun_tail, device_copy, find_key, host_copy
from kvpool.state.policies.block_lists import BACK, unlink
from kvpool.state.policies.policy import (
    empty_blocks,
    evict_next,
    on_change,
    on_release,
    set_retention,
    stop_clock,
)
from kvpool.state.records import (
    DEVICE,
    HOST,
    INDEXED,
    KEYED,
    LOST,
    NONE,
    NOT_FOUND,
    PUBLISHED,
    SWAPPED,
    blocks_of,
    change_word,
    counters_of,
    group_at,
    place_of,
    pool_id,
    request_at,
    sequences_of,
    swapped_of,
    table_of,
)
from kvpool.state.requests import finds, finds_parts, needs_all, parent_of, request_extra, request_keys, request_tokens
from kvpool.state.tiers import EXPIRIES_PER_CALL, UPDATED, begin, emit, enter, expire, forget, forget_both, take_host


@jit
def _erase(group, b):
    """Remove the cached content of block ``b`` from the index on both tiers."""
    device = device_copy(group, b)
    if device == NONE:
        forget(group, b)
        on_change(group, b)
    else:
        forget_both(group, device, blocks_of(group)[device].other_copy)
        on_change(group, device)
    counters_of(group).forgotten_by_call_blocks += 1


@jit
def _withdraw(groups, slot):
    """Have a sequence or a reservation publish nothing from now on, in all groups."""
    for g in range(len(groups)):
        sequence = sequences_of(group_at(groups, g))[slot]
        sequence.private, sequence.duplicates = 1, NONE


@jit
def forget_namespace(groups, namespace, now_ms):
    """Forget all content of a namespace. Returns how many contents, counted in each group. Looks at every block."""
    done = 0
    for g in range(len(groups)):
        group = group_at(groups, g)
        begin(group, now_ms)
        blocks = blocks_of(group)
        for b in range(group.blocks if finds(group) else 0):
            if blocks[b].flags & INDEXED and blocks[b].namespace == namespace:
                _erase(group, b)
                done += 1
    first = group_at(groups, 0)
    for slot in range(first.sequences):
        if sequences_of(first)[slot].live and sequences_of(first)[slot].namespace == namespace:
            _withdraw(groups, slot)
    return done


@jit
def _is_among(key0, key1, keys):
    """Whether a key is one of ``keys`` int64[n, 2], which are sorted."""
    low, high = 0, len(keys)
    while low < high:
        at = (low + high) // 2
        if keys[at, 0] < key0 or (keys[at, 0] == key0 and keys[at, 1] < key1):
            low = at + 1
        else:
            high = at
    return low < len(keys) and keys[low, 0] == key0 and keys[low, 1] == key1


@jit
def _holds_some(group, slot, keys):
    """Whether a row has a block with one of these keys, cached or not. A sequence that is swapped out has its blocks
    elsewhere."""
    blocks, sequence = blocks_of(group), sequences_of(group)[slot]
    row = (swapped_of(group) if sequence.live == SWAPPED else table_of(group))[slot]
    for i in range(sequence.blocks):
        b = row[i]
        if b != NONE and blocks[b].flags & KEYED and _is_among(blocks[b].key0, blocks[b].key1, keys):
            return True
    return False


@jit
def forget_keys(groups, keys, ordered, now_ms):
    """Forget the contents of ``keys`` int64[n, 2] in all groups. Returns how many. ``ordered``: the same keys,
    sorted."""
    done = 0
    for g in range(len(groups)):
        group = group_at(groups, g)
        begin(group, now_ms)
        for i in range(len(keys) if finds(group) else 0):
            b = find_key(group, keys[i, 0], keys[i, 1])
            if b != NONE:
                _erase(group, b)
                done += 1
    for slot in range(group_at(groups, 0).sequences):
        if sequences_of(group_at(groups, 0))[slot].live:
            some = False
            for g in range(len(groups)):
                some |= finds(group_at(groups, g)) and _holds_some(group_at(groups, g), slot, ordered)
            if some:
                _withdraw(groups, slot)
    return done


@jit
def forget_prompt(groups, requests, keys, ordered, now_ms):
    """``forget_keys`` for the ``keys`` of a prompt, and for stored tails with which its remaining tokens begin."""
    done, request = forget_keys(groups, keys, ordered, now_ms), request_at(requests, 0)
    tokens, extra = request_tokens(request), request_extra(request)
    for g in range(len(groups)):
        group = group_at(groups, g)
        start, i = 0, 0
        while finds_parts(group) and start < request.length:
            parent0, parent1 = parent_of(group, request, i)
            b = begun_tail(group, parent0, parent1, request.namespace, tokens, extra, start)
            if b == NONE:
                start, i = start + group.width, i + 1
            else:
                _erase(group, b)
                done += 1
    return done


@jit
def set_priority(groups, keys, priority, ttl, now_ms):
    """Give the cached contents of ``keys`` int64[n, 2] this priority and ttl from now on. Returns how many, counted in
    each group.

    If content is on both tiers, its other copy gets them when it becomes the only one.
    """
    done = 0
    for g in range(len(groups)):
        group = group_at(groups, g)
        begin(group, now_ms)
        for i in range(len(keys) if finds(group) else 0):
            b = find_key(group, keys[i, 0], keys[i, 1])
            if b != NONE:
                device = device_copy(group, b)
                b = b if device == NONE else device
                if set_retention(group, b, priority, ttl):
                    emit(group, UPDATED, b)
                done += 1
    return done


# -- for the storage manager ------------------------------------------------------------------------


@jit(nogil=False)
def evict_first(groups, g, keys, alone, now_ms):
    """Put the host copies of keys (int64[n, 2]) in front of the lists that they are in, the first key first: they are
    the next victims there. Clean copies only, or with ``alone`` also those that are the only ones. Held blocks stay
    as they are. Returns how many were put in front."""
    group = group_at(groups, g)
    begin(group, now_ms)
    moved = 0
    for i in range(len(keys) - 1, -1, -1):
        b = find_key(group, keys[i, 0], keys[i, 1])
        b = NONE if b == NONE else host_copy(group, b)
        if b != NONE and (alone or blocks_of(group)[b].other_copy != NONE) and evict_next(group, b):
            moved += 1
    return moved


# -- pins, by pool ids, in all groups --------------------------------------------------------------------


ANY_TIER = -1


@jit
def pin_block(group, b):
    if change_word(blocks_of(group), b, 0, 1) == 1 << 32:
        stop_clock(group, b)
        unlink(group, b)


@inline
def unpin_block(group, b, front):
    """Drop one pin of a block. If nobody holds it then, it joins the list of its content, at the ``front`` or the
    back."""
    if change_word(blocks_of(group), b, 0, -1) == 0:
        on_release(group, b, front)


@jit
def _copy_on(group, key0, key1, tier):
    """The block of a key on ``tier``, NONE if there is none. With ANY_TIER, the host copy is preferred."""
    b = find_key(group, key0, key1)
    if b == NONE:
        return NONE
    device, host = device_copy(group, b), host_copy(group, b)
    return device if tier == DEVICE or (tier == ANY_TIER and host == NONE) else host


@jit
def cached(groups, keys, tier, out):
    """Whether each group has a block of each key (int64[n, 2]) on ``tier``, into ``out`` bool[groups, n]."""
    for g in range(len(groups)):
        for i in range(len(keys)):
            out[g, i] = _copy_on(group_at(groups, g), keys[i, 0], keys[i, 1], tier) != NONE


@jit
def cached_in(groups, keys, namespace, out):
    """Whether some group has cached content of each key (int64[n, 2]) in a namespace, into ``out`` bool[n]."""
    for i in range(len(keys)):
        out[i] = False
        for g in range(len(groups)):
            b = find_key(group_at(groups, g), keys[i, 0], keys[i, 1])
            out[i] |= b != NONE and blocks_of(group_at(groups, g))[b].namespace == namespace


@jit
def _complete(groups, only, keys, out):
    """The place of the first key that is missing: a group with attention to all tokens lacks it, or all groups do. NONE
    if none is. ``only``: the one group to look at, or NONE for all."""
    for i in range(len(keys)):
        holders = 0
        for g in range(len(groups)):
            if out[g, i] != NONE:
                holders += 1
            elif needs_all(group_at(groups, g)) and only == NONE:
                return i
        if holders == 0:
            return i
    return NONE


@jit(nogil=False)
def pin_keys(groups, only, keys, tier, out):
    """Pin the blocks of each key (int64[n, 2]) in all groups that have one. Ids go into ``out`` int64[groups, n], NONE
    if a group has none. ``only``: the one group to pin in, or NONE for all.

    Returns 0. Or returns NOT_FOUND; then ``detail`` has the place of the first missing key, and nothing has changed.
    """
    for g in range(len(groups)):
        for i in range(len(keys)):
            asked = only == NONE or only == g
            out[g, i] = _copy_on(group_at(groups, g), keys[i, 0], keys[i, 1], tier) if asked else NONE
    missing = _complete(groups, only, keys, out)
    if missing != NONE:
        group_at(groups, 0).detail = missing
        return NOT_FOUND
    for g in range(len(groups)):
        for i in range(len(keys)):
            if out[g, i] != NONE:
                pin_block(group_at(groups, g), out[g, i])
                out[g, i] = pool_id(group_at(groups, g), out[g, i])
    return 0


@jit(nogil=False)
def pin_blocks(groups, ids):
    """Pin blocks by id. Each must be held or cached. Returns 0. Or returns NOT_FOUND; then ``detail`` has the place of
    the block, and nothing has changed."""
    for i in range(len(ids)):
        g, b = place_of(groups, ids[i])
        bad = g == NONE
        if not bad:
            block = blocks_of(group_at(groups, g))[b]
            bad = block.flags & LOST != 0 or (block.ref_word == 0 and not block.flags & INDEXED)
        if bad:
            group_at(groups, 0).detail = i
            return NOT_FOUND
    for i in range(len(ids)):
        g, b = place_of(groups, ids[i])
        pin_block(group_at(groups, g), b)
    return 0


@jit(nogil=False)
def unpin(groups, ids, now_ms):
    """``unpin_block`` for each of these blocks, at the back."""
    for g in range(len(groups)):
        begin(group_at(groups, g), now_ms)
    for i in range(len(ids)):
        g, b = place_of(groups, ids[i])
        unpin_block(group_at(groups, g), b, BACK)


@jit(nogil=False)
def end_pins(groups, ids, now_ms):
    """``unpin``, and fill ``ids`` with NONE, so that a second call does nothing."""
    if len(ids) and ids[0] != NONE:
        unpin(groups, ids, now_ms)
        ids[:] = NONE


# -- content that comes from elsewhere -----------------------------------------------------------------


@jit
def take_missing(groups, g, requests, first, priority, out, held, now_ms):
    """Pin a host block for each full block ``first + i`` of a prompt that is cached nowhere, as far as the host has
    room.

    Ids go into ``out`` int64[n], NONE for a block that was not taken. Nobody can find these blocks. If something is
    evicted for them, host copies of the prompt's other blocks are pinned too, so that the prompt does not evict itself:
    their ids go into ``held`` int64[full blocks], which is all NONE before.
    """
    group, request = group_at(groups, g), request_at(requests, 0)
    blocks, keys = blocks_of(group), request_keys(group, request)
    begin(group, now_ms)
    expire(group, EXPIRIES_PER_CALL)
    evicts = empty_blocks(group, HOST) < len(out)
    for i in range(len(held) if evicts else 0):
        b = find_key(group, keys[i, 0], keys[i, 1])
        held[i] = NONE if b == NONE else host_copy(group, b)
        if held[i] != NONE:
            pin_block(group, held[i])
    room = True
    for i in range(len(out)):
        out[i] = NONE
        if room and find_key(group, keys[first + i, 0], keys[first + i, 1]) == NONE:
            b = take_host(group, priority)
            room = b != NONE
            if room:
                blocks[b].filled, blocks[b].uses, blocks[b].ticket, blocks[b].ttl = 0, 0, NONE, NONE
                change_word(blocks, b, 0, 1)
                out[i] = b


@jit
def publish_taken(groups, g, requests, first, priority, ids, now_ms):
    """Publish the blocks that ``take_missing`` took, except those whose content has been cached meanwhile. Returns how
    many."""
    group, request = group_at(groups, g), request_at(requests, 0)
    blocks, keys = blocks_of(group), request_keys(group, request)
    begin(group, now_ms)
    published = 0
    for i in range(len(ids)):
        b, at = ids[i], first + i
        if b == NONE or find_key(group, keys[at, 0], keys[at, 1]) != NONE:
            continue
        write_tokens(group, b, 0, request_tokens(request), request_extra(request), at * group.width, group.width)
        blocks[b].key0, blocks[b].key1 = keys[at, 0], keys[at, 1]
        blocks[b].parent0, blocks[b].parent1 = parent_of(group, request, at)
        blocks[b].namespace, blocks[b].priority = request.namespace, priority
        blocks[b].flags |= KEYED
        enter(group, b, PUBLISHED)
        published += 1
    return published
