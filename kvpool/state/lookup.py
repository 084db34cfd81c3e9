"""What is cached of a prompt, in one group and in all. Changes nothing."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.jit.intrinsics import address_of, array_at
from kvpool.state.index import best_child, device_copy, find
from kvpool.state.kinds import finds, finds_parts, has_states, needs_all
from kvpool.state.records import NONE, blocks_of, head, request_at
from kvpool.state.requests import findable, parent_of, request_extra, request_keys, request_tokens
from kvpool.state.windows import kept_from


@jit
def walk(h, request, limit, ids):
    """Put the representatives of the first full blocks that are cached, at most ``limit``, into ``ids``. Returns how
    many. Changes nothing."""
    tokens, keys, extra = request_tokens(request), request_keys(h, request), request_extra(request)
    i = 0
    while i < limit:
        b = find(h, keys[i, 0], keys[i, 1], request.namespace, tokens, extra, i * h.width)
        if b == NONE:
            break
        ids[i] = b
        i += 1
    return i


@jit
def longest(h, request, limit, ids):
    """The longest prefix, in full blocks and at most ``limit``, that can be reused: everything that its next token sees
    is cached.

    The representatives go into ``ids``, NONE for a block that is not needed. Looks up no block twice. Changes nothing.
    """
    if has_states(h):
        return _last_state(h, request, limit, ids)
    if h.window == 0:
        return walk(h, request, limit, ids)
    sinks = min(limit, h.sinks)
    found = walk(h, request, sinks, ids)
    if found < sinks:
        return found
    tokens, keys, extra = request_tokens(request), request_keys(h, request), request_extra(request)
    end, i = limit, limit - 1
    while i >= kept_from(h, end * h.width):
        b = find(h, keys[i, 0], keys[i, 1], request.namespace, tokens, extra, i * h.width)
        ids[i] = b
        if b == NONE:
            end = i
        i -= 1
    for i in range(end, limit):
        ids[i] = NONE
    for i in range(sinks, min(end, kept_from(h, end * h.width))):
        ids[i] = NONE
    return end


@jit
def _last_state(h, request, limit, ids):
    """``longest`` in a recurrent group. There the next token sees only the state after the last block."""
    tokens, keys, extra = request_tokens(request), request_keys(h, request), request_extra(request)
    for i in range(limit - 1, -1, -1):
        ids[i] = find(h, keys[i, 0], keys[i, 1], request.namespace, tokens, extra, i * h.width)
        if ids[i] != NONE:
            for j in range(i):
                ids[j] = NONE
            return i + 1
    return 0


@jit
def partial_match(h, request, matched):
    """(block, tokens) of the best partial match after ``matched`` full blocks. Prefers the device copy. Changes
    nothing."""
    start = matched * h.width
    limit = min(h.width, findable(request) - start)
    if limit <= 0 or not finds_parts(h):
        return NONE, 0
    parent0, parent1 = parent_of(h, request, matched)
    b, n = best_child(
        h, parent0, parent1, request.namespace, request_tokens(request), request_extra(request), start, limit
    )
    if b != NONE and device_copy(h, b) != NONE:
        b = device_copy(h, b)
    return b, n


@jit
def matched_in(h, request, count, ids, out):
    """What an admission would reuse, if ``count`` full blocks were found with the representatives ``ids``, into ``out``
    int64[6]. Changes nothing.

    The six are: tokens on the device (or not needed), tokens on the host, tokens of a partial match, the count, full
    blocks that cost no free block, and the partial source.
    """
    blocks = blocks_of(h)
    device = costless = 0
    for i in range(count):
        b = device_copy(h, np.int64(ids[i])) if ids[i] != NONE else np.int64(NONE)
        if b != NONE or ids[i] == NONE:
            device += 1
            costless += 1 if b == NONE or blocks[b].word != 0 else 0
    source, n = partial_match(h, request, count)
    out[0], out[1], out[2] = device * h.width, (count - device) * h.width, n
    out[3], out[4], out[5] = count, costless, source


@jit
def look(heads, request, limit, ids, step):
    """The longest prefix of a prompt, in full blocks and at most ``limit``, that every group can reuse. Changes
    nothing.

    The blocks of group g go into the int32[limit] at the address ``ids + g * step``, NONE for a block that is not
    needed. The answer of each group bounds the others, until all agree. Groups that need all blocks of a prefix are
    asked first, and only once.
    """
    most = np.int64(limit)
    for g in range(heads.shape[0]):
        h = head(heads, g)
        if needs_all(h):
            most = longest(h, request, most, array_at(ids + g * step, (limit,), np.int32))
    agreed = g = 0
    while agreed < heads.shape[0]:
        h = head(heads, g)
        if has_states(h) or h.window != 0:
            found = longest(h, request, most, array_at(ids + g * step, (limit,), np.int32))
            if found < most:
                most, agreed = found, 0
        agreed += 1
        g = (g + 1) % heads.shape[0]
    for g in range(heads.shape[0] if heads.shape[0] > 1 else 0):
        row = array_at(ids + g * step, (limit,), np.int32)
        for i in range(most, limit):
            row[i] = NONE
    return most


@jit
def match(heads, requests, ids, out):
    """What ``admit`` would reuse now, into ``out`` int64[groups + 1, 6], with columns as in ``matched_in``. Changes
    nothing.

    The last row is the answer for all groups: tokens of full blocks, tokens in part, and how many tokens have to come
    from the host in the group with the most there. ``ids`` int32[groups, full blocks] is scratch.
    """
    request, groups, width = request_at(requests, 0), heads.shape[0], head(heads, 0).width
    most = look(heads, request, findable(request) // width, address_of(ids), 4 * ids.shape[1])
    least = NONE
    for g in range(groups):
        h = head(heads, g)
        out[g] = 0
        if finds(h):
            matched_in(h, request, most, ids[g], out[g])
            least = out[g, 2] if least == NONE else min(least, out[g, 2])
    out[groups, 0], out[groups, 1], out[groups, 2] = most * width, 0, least
    for g in range(groups):
        out[g, 2] = least
        out[groups, 1] = max(out[groups, 1], out[g, 1])


# -- what could be brought -----------------------------------------------------------------------------


@jit
def _reach(h, have, limit):
    """The longest prefix, in full blocks and at most ``limit``, that could be reused if a group had the blocks in
    ``have`` bool[n]. See ``longest``."""
    if not finds(h):
        return limit
    if has_states(h):
        while limit > 0 and not have[limit - 1]:
            limit -= 1
        return limit
    full = limit if h.window == 0 else min(limit, h.sinks)
    for i in range(full):
        if not have[i]:
            return i
    end, i = limit, limit - 1
    while h.window != 0 and i >= kept_from(h, end * h.width):
        if not have[i]:
            end = i
        i -= 1
    return end


@jit
def _agreed(heads, have, limit):
    """``_reach`` of all groups together. ``have`` is bool[groups, n]."""
    g, agreed = 0, 0
    while agreed < heads.shape[0]:
        found = _reach(head(heads, g), have[g], limit)
        agreed = agreed + 1 if found == limit else 1
        limit = found
        g = (g + 1) % heads.shape[0]
    return limit


@jit
def lacking(heads, requests, here, had):
    """Find the blocks that would make the reusable prefix of a prompt longer than what is cached. Changes no state.

    ``here`` bool[groups, full blocks] is what is cached. ``had``, of the same shape, is what is cached or could be
    loaded. It is overwritten: it then names the blocks that are lacking for the longer prefix, or none if there is no
    longer one. Returns the prefix in full blocks.
    """
    limit = findable(request_at(requests, 0)) // head(heads, 0).width
    before, most = _agreed(heads, here, limit), _agreed(heads, had, limit)
    for g in range(heads.shape[0]):
        h = head(heads, g)
        kept, sinks = np.int64(0), np.int64(0)
        if has_states(h):
            kept = np.int64(most - 1)
        elif h.window != 0:
            kept, sinks = kept_from(h, most * h.width), np.int64(h.sinks)
        for i in range(had.shape[1]):
            needed = finds(h) and most > before and i < most and (i < sinks or i >= kept)
            had[g, i] = needed and not here[g, i]
    return np.int64(most)
