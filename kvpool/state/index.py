"""The index of cached content: full blocks by key, and the children of a key for partial matches. It has bucket heads,
and links inside the blocks.

There are three buckets for each block, so most lookups end at the head. One block represents a cached content in both
structures: its device copy or its host copy. That block is marked LINKED; ``other_copy`` leads to the other copy.

Then what is cached of a prompt, in one group and in all: ``look``, ``match``, ``lacking``. They change nothing.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.jit import inline, jit
from kvpool.common.jit.intrinsics import address_of, array_at, prefetch
from kvpool.state.records import (
    EXTRA,
    LINKED,
    NAMESPACE_AT_HIT,
    NONE,
    TAIL,
    TOKENS_AT_HIT,
    blocks_of,
    children_of,
    extra_in,
    extra_of,
    group_at,
    index_of,
    request_at,
    tokens_of,
)
from kvpool.state.requests import (
    findable,
    finds,
    finds_parts,
    has_states,
    kept_from,
    needs_all,
    parent_of,
    request_extra,
    request_keys,
    request_tokens,
)

CANDIDATES = 16  # the most children that a lookup compares, most recent first


@inline
def bucket(key, count):
    """Multiply-shift range reduction of the upper half of a uniform 64-bit key (Lemire, 2019)."""
    return (np.int64(np.uint64(key) >> np.uint64(32)) * count) >> 32


@inline
def expect(group, key0):
    """Begin to load what a lookup or change of this key will read first."""
    prefetch(index_of(group), bucket(key0, group.buckets))


@inline
def expect_found(group, key0):
    """Begin to load what stands where a key is looked for. ``expect`` was called some time ago."""
    prefetch(blocks_of(group), index_of(group)[bucket(key0, group.buckets)])


@inline
def find_key(group, key0, key1):
    """The representative of a key, or NONE."""
    blocks = blocks_of(group)
    b = index_of(group)[bucket(key0, group.buckets)]
    while b != NONE and (blocks[b].key0 != key0 or blocks[b].key1 != key1):
        b = blocks[b].chain
    return b


@inline
def enter_key(group, b):
    """Make ``b`` the representative of its key. There must be none. It comes last in its bucket, since older content
    is removed first, and is found first then."""
    blocks, groups = blocks_of(group), index_of(group)
    at = bucket(blocks[b].key0, group.buckets)
    blocks[b].chain, last = NONE, groups[at]
    if last == NONE:
        groups[at] = b
        return
    while blocks[last].chain != NONE:
        last = blocks[last].chain
    blocks[last].chain = b


@inline
def remove_key(group, b, successor):
    """Remove the representative ``b``, or replace it by its other copy ``successor``."""
    blocks, groups = blocks_of(group), index_of(group)
    at, after = bucket(blocks[b].key0, group.buckets), blocks[b].chain
    if successor != NONE:
        blocks[successor].chain = after
        after = successor
    if groups[at] == b:
        groups[at] = after
    else:
        i = groups[at]
        while blocks[i].chain != b:
            i = blocks[i].chain
        blocks[i].chain = after
    blocks[b].chain = NONE


@inline
def child_bucket(parent, first_token, count):
    return bucket(np.uint64(parent) + np.uint64(np.uint32(first_token)) * np.uint64(0x9E3779B97F4A7C15), count)


@jit
def same_tokens(group, b, tokens, extra, start, count):
    """How many of the first ``count`` tokens of block ``b`` equal ``tokens[start:]``, with their extra ids, up to the
    first difference."""
    block_tokens = tokens_of(group)
    n = 0
    while n < count and block_tokens[b, n] == tokens[start + n]:
        n += 1
    has = blocks_of(group)[b].flags & EXTRA
    if has or len(extra) > 0:
        m = 0
        while m < n:
            mine = extra_of(group)[b, m] if has else 0
            asked = extra[start + m] if len(extra) > 0 else 0
            if mine != asked:
                break
            m += 1
        n = m
    return n


@inline
def has_content(group, b, namespace, tokens, extra, start):
    """Whether a full block has this namespace, these tokens and these extra ids. A hash alone is never a hit."""
    if (group.guards & NAMESPACE_AT_HIT) and blocks_of(group)[b].namespace != namespace:
        return False
    if not group.guards & TOKENS_AT_HIT:
        return True
    block_tokens, width = tokens_of(group), group.width
    different = np.int32(0)
    for i in range(width):
        different |= block_tokens[b, i] ^ tokens[start + i]
    if different != 0:
        return False
    if len(extra) > 0 or blocks_of(group)[b].flags & EXTRA:
        return same_tokens(group, b, tokens, extra, start, width) == width
    return True


@inline
def find(group, key0, key1, namespace, tokens, extra, start):
    """The representative of a key, if it has this namespace, these tokens and these extra ids; else NONE."""
    b = find_key(group, key0, key1)
    if b != NONE and not has_content(group, b, namespace, tokens, extra, start):
        return NONE
    return b


@inline
def device_copy(group, b):
    return b if b < group.device_blocks else blocks_of(group)[b].other_copy


@inline
def host_copy(group, b):
    return b if b >= group.device_blocks else blocks_of(group)[b].other_copy


@inline
def expect_child(group, b):
    """Begin to load what entering or removing ``b`` among the children of its parent will read first."""
    if group.child_buckets:
        prefetch(
            children_of(group), child_bucket(blocks_of(group)[b].parent0, tokens_of(group)[b, 0], group.child_buckets)
        )


@inline
def _add_child(group, b):
    blocks, groups = blocks_of(group), children_of(group)
    at = child_bucket(blocks[b].parent0, tokens_of(group)[b, 0], group.child_buckets)
    first = groups[at]
    blocks[b].child_prev, blocks[b].child_next = NONE, first
    if first != NONE:
        blocks[first].child_prev = b
    groups[at] = b


@jit
def _remove_child(group, b, successor):
    """Remove ``b`` from its bucket, or replace it by ``successor``."""
    blocks = blocks_of(group)
    before, after = blocks[b].child_prev, blocks[b].child_next
    into_before = after if successor == NONE else successor
    if before == NONE:
        children_of(group)[child_bucket(blocks[b].parent0, tokens_of(group)[b, 0], group.child_buckets)] = into_before
    else:
        blocks[before].child_next = into_before
    if after != NONE:
        blocks[after].child_prev = before if successor == NONE else successor
    if successor != NONE:
        blocks[successor].child_prev, blocks[successor].child_next = before, after
    blocks[b].child_prev = blocks[b].child_next = NONE


@inline
def link(group, b):
    """Put a block into the index (unless it is an unfull tail) and among the children of its parent."""
    blocks = blocks_of(group)
    if not blocks[b].flags & TAIL:
        enter_key(group, b)
    if group.child_buckets:
        _add_child(group, b)
    blocks[b].flags |= LINKED


@inline
def unlink_content(group, b, successor):
    """Remove the representative ``b``, or replace it by its other copy ``successor``."""
    blocks = blocks_of(group)
    if not blocks[b].flags & TAIL:
        remove_key(group, b, successor)
    if group.child_buckets:
        _remove_child(group, b, successor)
    blocks[b].flags &= ~LINKED
    if successor != NONE:
        blocks[successor].flags |= LINKED


@jit
def _is_child(group, b, parent0, parent1, namespace):
    blocks = blocks_of(group)
    if blocks[b].parent0 != parent0 or blocks[b].parent1 != parent1:
        return False
    return not (group.guards & NAMESPACE_AT_HIT) or blocks[b].namespace == namespace


@jit
def best_child(group, parent0, parent1, namespace, tokens, extra, start, limit):
    """(block, n): the child that begins with the most of ``tokens[start : start + limit]``, and how many tokens that
    are. The most recent child wins a tie. n may be 0."""
    best, most = NONE, 0
    b = children_of(group)[child_bucket(parent0, tokens[start], group.child_buckets)]
    seen = 0
    while b != NONE and seen < CANDIDATES:
        if _is_child(group, b, parent0, parent1, namespace):
            n = same_tokens(group, b, tokens, extra, start, min(limit, blocks_of(group)[b].filled))
            if n > most:
                best, most = b, n
        b = blocks_of(group)[b].child_next
        seen += 1
    return best, most


@jit
def begun_tail(group, parent0, parent1, namespace, tokens, extra, start):
    """A stored tail of this parent whose tokens are the next ones of ``tokens[start:]``, or NONE. Looks at all
    children."""
    blocks, left = blocks_of(group), len(tokens) - start
    b = children_of(group)[child_bucket(parent0, tokens[start], group.child_buckets)]
    while b != NONE:
        count = blocks[b].filled
        if blocks[b].flags & TAIL and count <= left and _is_child(group, b, parent0, parent1, namespace):
            if same_tokens(group, b, tokens, extra, start, count) == count:
                return b
        b = blocks[b].child_next
    return NONE


@jit
def rival_child(group, b, longer):
    """A sibling of ``b``. With ``longer``, one that begins with all tokens of ``b`` and has more. Else a tail with
    which ``b`` begins."""
    blocks = blocks_of(group)
    tokens = tokens_of(group)[b]
    extra = extra_in(group, b)
    i = children_of(group)[child_bucket(blocks[b].parent0, tokens[0], group.child_buckets)]
    seen = 0
    while i != NONE and seen < CANDIDATES:
        if i != b and _is_child(group, i, blocks[b].parent0, blocks[b].parent1, blocks[b].namespace):
            mine, other = blocks[b].filled, blocks[i].filled
            if longer and other > mine and same_tokens(group, i, tokens, extra, 0, mine) == mine:
                return i
            if (
                not longer
                and blocks[i].flags & TAIL
                and other <= mine
                and same_tokens(group, i, tokens, extra, 0, other) == other
            ):
                return i
        i = blocks[i].child_next
        seen += 1
    return NONE


# -- what is cached of a prompt -------------------------------------------------------------------------


def _reach(has_block):
    """Make the function that finds the longest prefix, in full blocks and at most ``limit``, that a group can reuse:
    everything that its next token sees is there.

    ``has_block(group, i, *args)`` returns whether block ``i`` is. It is called at most once for each block.
    """

    @jit
    def reach(group, limit, *args):
        if has_states(group):
            while limit > 0 and not has_block(group, limit - 1, *args):
                limit -= 1
            return limit
        full = limit if group.window == 0 else min(limit, group.sinks)
        for i in range(full):
            if not has_block(group, i, *args):
                return i
        end, i = limit, limit - 1
        while group.window != 0 and i >= kept_from(group, end * group.width):
            if not has_block(group, i, *args):
                end = i
            i -= 1
        return end

    return reach


@inline
def is_needed(group, i, count):
    """Whether a group needs block ``i`` to reuse the first ``count`` full blocks. A recurrent group needs the last
    state."""
    if has_states(group):
        return i == count - 1
    return i < count and (group.window == 0 or i < group.sinks or i >= kept_from(group, count * group.width))


@inline
def _cached(group, i, tokens, keys, extra, namespace, ids):
    ids[i] = find(group, keys[i, 0], keys[i, 1], namespace, tokens, extra, i * group.width)
    return ids[i] != NONE


_reach_cached = _reach(_cached)


@jit
def longest(group, request, limit, ids):
    """The longest prefix of a prompt, in full blocks and at most ``limit``, that a group can reuse.

    The representatives go into ``ids``, NONE for a block that is not needed. Changes nothing.
    """
    tokens, keys, extra = request_tokens(request), request_keys(group, request), request_extra(request)
    count = _reach_cached(group, limit, tokens, keys, extra, request.namespace, ids)
    for i in range(0 if needs_all(group) else limit):
        if not is_needed(group, i, count):
            ids[i] = NONE
    return count


@jit
def partial_match(group, request, matched):
    """(block, tokens) of the best partial match after ``matched`` full blocks. Prefers the device copy. Changes
    nothing."""
    start = matched * group.width
    limit = min(group.width, findable(request) - start)
    if limit <= 0 or not finds_parts(group):
        return NONE, 0
    parent0, parent1 = parent_of(group, request, matched)
    b, n = best_child(
        group, parent0, parent1, request.namespace, request_tokens(request), request_extra(request), start, limit
    )
    if b != NONE and device_copy(group, b) != NONE:
        b = device_copy(group, b)
    return b, n


@jit
def matched_in(group, request, count, ids, out):
    """What an admission would reuse, if ``count`` full blocks were found with the representatives ``ids``, into ``out``
    int64[6]. Changes nothing.

    The six are: tokens on the device (or not needed), tokens on the host, tokens of a partial match, the count, full
    blocks that cost no free block, and the partial source.
    """
    blocks = blocks_of(group)
    device = costless = 0
    for i in range(count):
        b = device_copy(group, ids[i]) if ids[i] != NONE else NONE
        if b != NONE or ids[i] == NONE:
            device += 1
            costless += 1 if b == NONE or blocks[b].ref_word != 0 else 0
    source, n = partial_match(group, request, count)
    out[0], out[1], out[2] = device * group.width, (count - device) * group.width, n
    out[3], out[4], out[5] = count, costless, source


def agree(ask):
    """Make the function that calls, for each group, ``ask(group, g, most, *args)``, until no group bounds the
    others."""

    @jit
    def agreed(groups, most, *args):
        g = asked = 0
        while asked < len(groups):
            reached = ask(group_at(groups, g), g, most, *args)
            asked = asked + 1 if reached == most else 1
            most = reached
            g = (g + 1) % len(groups)
        return most

    return agreed


@jit
def _longest_of(group, g, most, request, limit, ids, step):
    return longest(group, request, most, array_at(ids + g * step, (limit,), np.int32))


@jit
def _ask_again(group, g, most, request, limit, ids, step):
    """The answer of a group that may need only a part of a prefix. It comes after the other groups."""
    return _longest_of(group, g, most, request, limit, ids, step) if has_states(group) or group.window != 0 else most


_agree_cached = agree(_ask_again)


@jit
def look(groups, request, limit, ids, step):
    """The longest prefix of a prompt, in full blocks and at most ``limit``, that every group can reuse. Changes
    nothing.

    The blocks of group g go into the int32[limit] at the address ``ids + g * step``, NONE for a block that is not
    needed. The answer of each group bounds the others, until all agree. Groups that need all blocks of a prefix are
    asked first, and only once.
    """
    most = limit
    for g in range(len(groups)):
        if needs_all(group_at(groups, g)):
            most = _longest_of(group_at(groups, g), g, most, request, limit, ids, step)
    most = _agree_cached(groups, most, request, limit, ids, step)
    for g in range(len(groups) if len(groups) > 1 else 0):
        row = array_at(ids + g * step, (limit,), np.int32)
        for i in range(most, limit):
            row[i] = NONE
    return most


@jit
def match(groups, requests, ids, out):
    """What ``admit`` would reuse now, into ``out`` int64[groups + 1, 6], with columns as in ``matched_in``. Changes
    nothing.

    The last row is the answer for all groups: tokens of full blocks, tokens in part, and how many tokens have to come
    from the host in the group with the most there. ``ids`` int32[groups, full blocks] is scratch.
    """
    request, n_groups, width = request_at(requests, 0), len(groups), group_at(groups, 0).width
    most = look(groups, request, findable(request) // width, address_of(ids), 4 * ids.shape[1])
    least = NONE
    for g in range(n_groups):
        group = group_at(groups, g)
        out[g] = 0
        if finds(group):
            matched_in(group, request, most, ids[g], out[g])
            least = out[g, 2] if least == NONE else min(least, out[g, 2])
    out[n_groups, 0], out[n_groups, 1], out[n_groups, 2] = most * width, 0, least
    for g in range(n_groups):
        out[g, 2] = least
        out[n_groups, 1] = max(out[n_groups, 1], out[g, 1])


# -- what could be brought -----------------------------------------------------------------------------


@inline
def _has(group, i, have):
    return have[i]


_reach_had = _reach(_has)


@jit
def _ask_had(group, g, most, have):
    return _reach_had(group, most, have[g]) if finds(group) else most


_agree_had = agree(_ask_had)


@jit
def missing_blocks(groups, requests, cached, had):
    """Find the blocks that would make the reusable prefix of a prompt longer than what is cached. Changes no state.

    ``cached`` bool[groups, full blocks] is what is cached. ``had``, of the same shape, is what is cached or could be
    loaded. It is overwritten: it then names the blocks that are lacking for the longer prefix, or none if there is no
    longer one. Returns the prefix in full blocks.
    """
    limit = findable(request_at(requests, 0)) // group_at(groups, 0).width
    before, most = _agree_had(groups, limit, cached), _agree_had(groups, limit, had)
    for g in range(len(groups)):
        group = group_at(groups, g)
        for i in range(had.shape[1]):
            had[g, i] = finds(group) and most > before and is_needed(group, i, most) and not cached[g, i]
    return most
