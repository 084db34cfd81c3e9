"""What is cached of a prompt, in one group and in all. Changes nothing."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.jit.intrinsics import address_of, array_at
from kvpool.state.index import best_child, device_copy, find
from kvpool.state.kinds import finds, finds_parts, has_states, kept_from, needs_all
from kvpool.state.records import NONE, blocks_of, head, request_at
from kvpool.state.requests import findable, parent_of, request_extra, request_keys, request_tokens


def _reach(there):
    """Make the function that finds the longest prefix, in full blocks and at most ``limit``, that a group can reuse:
    everything that its next token sees is there.

    ``there(h, i, *args)`` says whether block ``i`` is. It is asked at most once for each block.
    """

    @jit
    def reach(h, limit, *args):
        if has_states(h):
            while limit > 0 and not there(h, limit - 1, *args):
                limit -= 1
            return limit
        full = limit if h.window == 0 else min(limit, h.sinks)
        for i in range(full):
            if not there(h, np.int64(i), *args):
                return np.int64(i)
        end, i = limit, limit - 1
        while h.window != 0 and i >= kept_from(h, end * h.width):
            if not there(h, i, *args):
                end = i
            i -= 1
        return end

    return reach


@jit(forceinline=True)
def is_needed(h, i, count):
    """Whether a group needs block ``i`` to reuse the first ``count`` full blocks. A recurrent group needs the last
    state."""
    if has_states(h):
        return i == count - 1
    return i < count and (h.window == 0 or i < h.sinks or i >= kept_from(h, count * h.width))


@jit(forceinline=True)
def _cached(h, i, tokens, keys, extra, namespace, ids):
    ids[i] = find(h, keys[i, 0], keys[i, 1], namespace, tokens, extra, i * h.width)
    return ids[i] != NONE


_reach_cached = _reach(_cached)


@jit
def longest(h, request, limit, ids):
    """The longest prefix of a prompt, in full blocks and at most ``limit``, that a group can reuse.

    The representatives go into ``ids``, NONE for a block that is not needed. Changes nothing.
    """
    tokens, keys, extra = request_tokens(request), request_keys(h, request), request_extra(request)
    count = _reach_cached(h, np.int64(limit), tokens, keys, extra, request.namespace, ids)
    for i in range(0 if needs_all(h) else limit):
        if not is_needed(h, i, count):
            ids[i] = NONE
    return count


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


def agree(ask):
    """Make the function that asks the groups in turn, ``ask(h, g, most, *args)``, until no group bounds the others."""

    @jit
    def agreed(heads, most, *args):
        g = asked = 0
        while asked < heads.shape[0]:
            found = ask(head(heads, g), g, most, *args)
            asked = asked + 1 if found == most else 1
            most = found
            g = (g + 1) % heads.shape[0]
        return most

    return agreed


@jit
def _longest_of(h, g, most, request, limit, ids, step):
    return longest(h, request, most, array_at(ids + g * step, (limit,), np.int32))


@jit
def _ask_again(h, g, most, request, limit, ids, step):
    """What a group answers that may need only a part of a prefix. Others were asked before."""
    return _longest_of(h, g, most, request, limit, ids, step) if has_states(h) or h.window != 0 else most


_agree_cached = agree(_ask_again)


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
        if needs_all(head(heads, g)):
            most = _longest_of(head(heads, g), g, most, request, limit, ids, step)
    most = _agree_cached(heads, most, request, limit, ids, step)
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


@jit(forceinline=True)
def _has(h, i, have):
    return have[i]


_reach_had = _reach(_has)


@jit
def _ask_had(h, g, most, have):
    return _reach_had(h, most, have[g]) if finds(h) else most


_agree_had = agree(_ask_had)


@jit
def lacking(heads, requests, here, had):
    """Find the blocks that would make the reusable prefix of a prompt longer than what is cached. Changes no state.

    ``here`` bool[groups, full blocks] is what is cached. ``had``, of the same shape, is what is cached or could be
    loaded. It is overwritten: it then names the blocks that are lacking for the longer prefix, or none if there is no
    longer one. Returns the prefix in full blocks.
    """
    limit = findable(request_at(requests, 0)) // head(heads, 0).width
    before, most = _agree_had(heads, limit, here), _agree_had(heads, limit, had)
    for g in range(heads.shape[0]):
        h = head(heads, g)
        for i in range(had.shape[1]):
            had[g, i] = finds(h) and most > before and is_needed(h, i, most) and not here[g, i]
    return np.int64(most)
