"""The tokens and keys of requests, as jitted code sees them, and of the rows of live sequences.

A recurrent group has no blocks for most columns of a row, so it has notes beside it: for each sequence the key of its
full committed columns, and the ids of all tokens after these.

All differences between the kinds of groups stand here, at the end. No other module depends on a kind. A group with
attention has a block for each column of a row, found by its prefix. A recurrent group has states: blocks after some of
the columns. A group for cross attention has the encoder's content: nobody finds it, and nothing changes it.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.jit import inline, jit
from kvpool.common.jit.intrinsics import address_of, array_at, memcpy
from kvpool.state.hashing import LANES, key_in, keys_in_lanes
from kvpool.state.records import (
    ATTENTION,
    CROSS,
    DEFAULT_PRIORITY,
    EXTRA,
    KEYED,
    NONE,
    RECURRENT,
    blocks_of,
    extra_of,
    group_at,
    no_extra,
    request_at,
    row_extra_of,
    row_tokens_of,
    rows_of,
    sequences_of,
    table_of,
    tokens_of,
)


@inline
def request_tokens(request):
    return array_at(request.tokens_at, (request.length,), np.int32)


@inline
def request_keys(group, request):
    return array_at(request.keys_at, (request.length // group.width, 2), np.int64)


@inline
def request_extra(request):
    return array_at(request.extra_at, (request.length if request.extra_at else 0,), np.int64)


@jit
def reusable(request):
    """How many leading tokens may be matched. The engine computes the last one itself, since its KV does not say what
    comes next."""
    return request.length - (0 if request.reserves else 1)


@inline
def slot_for(group, r):
    """The row that request ``r`` of a batch gets: one of the free rows."""
    return rows_of(group)[group.free_rows - 1 - r]


@jit
def findable(request):
    """``reusable``, or 0 for a request that reuses nothing."""
    return 0 if request.fresh else reusable(request)


@jit
def describe(requests, tokens, keys, extra, namespace, root0, root1, fresh, private):
    """Fill int64[1, REQUEST] for a prompt. Its arrays must outlive it: int32[n], 64-bit [full blocks, 2], and int64[n]
    or int64[0]. ``fresh``: it reuses nothing. ``private``: it publishes nothing."""
    request = request_at(requests, 0)
    request.tokens_at, request.length, request.keys_at = address_of(tokens), len(tokens), address_of(keys)
    request.extra_at = address_of(extra) if len(extra) else 0
    request.namespace, request.root0, request.root1 = namespace, root0, root1
    request.fresh, request.private, request.priority, request.ttl = fresh, private, DEFAULT_PRIORITY, NONE


@jit
def describe_and_hash(groups, first, requests, tokens, keys, extra, namespace, root0, root1, fresh, private):
    """``describe``, and then ``hash_request`` from block ``first`` on, whose result it returns."""
    describe(requests, tokens, keys, extra, namespace, root0, root1, fresh, private)
    return hash_request(groups, requests, first)


@inline
def blocks_for(group, tokens):
    return (tokens + group.width - 1) // group.width


@jit
def parent_of(group, request, i):
    """Key of the block before block ``i`` of a prompt."""
    if i == 0:
        return request.root0, request.root1
    keys = request_keys(group, request)
    return keys[i - 1, 0], keys[i - 1, 1]


@jit
def hash_request(groups, requests, first):
    """Write the keys of a request's full blocks, from block ``first`` on, to the address in the request. The earlier
    keys are there already. Returns how many blocks it hashed. It reads only parts of the state that never change, so it
    needs no lock."""
    group, request = group_at(groups, 0), request_at(requests, 0)
    tokens, keys, extra, width = (
        request_tokens(request),
        request_keys(group, request),
        request_extra(request),
        group.width,
    )
    parent0, parent1 = parent_of(group, request, first)
    i, plain = first, len(extra) == 0 and width % 2 == 0
    while i < len(keys):
        if plain and i + 4 * LANES <= len(keys):
            words = array_at(request.tokens_at + 4 * i * width, (LANES, width >> 1), np.uint64)
            # Scratch, where later keys will be.
            states = array_at(request.keys_at + 16 * (i + LANES), (6, LANES), np.uint64)
            parent0, parent1 = keys_in_lanes(group, words, parent0, parent1, keys[i:], states)
            i += LANES
            continue
        block_extra = extra[i * width : (i + 1) * width] if len(extra) > 0 else extra
        parent0, parent1 = key_in(group, tokens[i * width : (i + 1) * width], block_extra, parent0, parent1)
        keys[i, 0], keys[i, 1] = parent0, parent1
        i += 1
    return max(len(keys) - first, 0)


@inline
def retention_at(request, position):
    """(given, priority, ttl) of the retention range that contains a token position."""
    ranges = array_at(request.ranges_at, (request.range_count, 4), np.int64)
    for i in range(len(ranges)):
        if ranges[i, 0] <= position < ranges[i, 1]:
            return True, ranges[i, 2], ranges[i, 3]
    return False, DEFAULT_PRIORITY, NONE


# -- rows ------------------------------------------------------------------------------------------------


@jit
def note(group, slot, at, tokens, extra, start, count):
    """Note ``count`` tokens of a sequence from its position ``at`` on. An empty ``extra`` stands for zeros."""
    memcpy(address_of(row_tokens_of(group)[slot]) + 4 * at, address_of(tokens) + 4 * start, 4 * count)
    if group.has_extra:
        mine = row_extra_of(group)[slot]
        for i in range(count):
            mine[at + i] = extra[start + i] if len(extra) > 0 else 0


@jit
def note_prompt(group, request, slot):
    """Note the tokens of an admitted prompt after the part that it reuses, and the key of that part."""
    sequence = sequences_of(group)[slot]
    sequence.chain0, sequence.chain1 = parent_of(group, request, sequence.reused)
    start = sequence.reused * group.width
    note(group, slot, start, request_tokens(request), request_extra(request), start, request.length - start)


@jit
def _noted(group, slot):
    """The tokens that are noted of a sequence: the first position, and the position after the last."""
    sequence = sequences_of(group)[slot]
    return sequence.committed // group.width * group.width, sequence.length


@jit
def copy_row(group, source, target):
    """Copy the notes of a sequence to its fork."""
    first, last = _noted(group, source)
    note(group, target, first, row_tokens_of(group)[source], row_extra_of(group)[source], first, last - first)


@jit
def reorder_rows(group, slots, parents, column):
    """Give each sequence the notes of its parent. The sequences' records are still the old ones. ``column`` int64[n] is
    scratch."""
    first, last = group.columns * group.width, 0
    for i in range(len(slots)):
        low, high = _noted(group, slots[i])
        first, last = min(first, low), max(last, high)
    for at in range(first, last):
        for i in range(len(slots)):
            column[i] = row_tokens_of(group)[slots[i], at]
        for i in range(len(slots)):
            row_tokens_of(group)[slots[i], at] = column[parents[i]]
        if group.has_extra:
            for i in range(len(slots)):
                column[i] = row_extra_of(group)[slots[i], at]
            for i in range(len(slots)):
                row_extra_of(group)[slots[i], at] = column[parents[i]]


@jit
def column_key(group, slot, i, parent0, parent1):
    """The key of column ``i`` of a sequence, whose tokens are noted, given the key of the columns before."""
    at = i * group.width
    extra = row_extra_of(group)[slot][at : at + group.width] if group.has_extra else no_extra(group)
    return key_in(group, row_tokens_of(group)[slot][at : at + group.width], extra, parent0, parent1)


@jit
def _write_ids(group, slot, i, b):
    """Give a block the ids of the tokens of its column."""
    blocks, at = blocks_of(group), i * group.width
    memcpy(address_of(tokens_of(group)[b]), address_of(row_tokens_of(group)[slot]) + 4 * at, 4 * group.width)
    blocks[b].filled = group.width
    blocks[b].flags &= ~EXTRA
    if group.has_extra:
        mine, extra = extra_of(group)[b], row_extra_of(group)[slot]
        for j in range(group.width):
            mine[j] = extra[at + j]
            if mine[j] != 0:
                blocks[b].flags |= EXTRA


@jit
def name(group, slot, first, last):
    """Give keys to the blocks in the full columns [first, last) of a sequence, which it has now committed, and to the
    row itself."""
    blocks, sequence, row = blocks_of(group), sequences_of(group)[slot], table_of(group)[slot]
    key0, key1, done = sequence.chain0, sequence.chain1, first
    for i in range(first, last + 1):
        b = row[i] if i < last else NONE
        if i < last and b == NONE:
            continue
        if b != NONE and blocks[b].flags & KEYED:  # blocks of a prompt have had it from the start
            key0, key1, done = blocks[b].key0, blocks[b].key1, i + 1
            continue
        for j in range(done, i):
            key0, key1 = column_key(group, slot, j, key0, key1)
        done = i
        if b != NONE:
            blocks[b].parent0, blocks[b].parent1 = key0, key1
            key0, key1 = column_key(group, slot, i, key0, key1)
            blocks[b].key0, blocks[b].key1, done = key0, key1, i + 1
            blocks[b].flags |= KEYED
            _write_ids(group, slot, i, b)
    sequence.chain0, sequence.chain1 = key0, key1


@jit
def read_row(groups, g, slot, tokens, extra, keys):
    """Copy a row of group ``g``. Returns how many leading ``keys`` it had, or NONE if a column has no block.

    ``tokens`` int32[length]; ``extra`` int64[length], or int64[0] if no token of the pool has one; ``keys`` uint64[full
    blocks, 2]. A full block that is not committed has no key yet, unless it is of the prompt.
    """
    group = group_at(groups, g)
    blocks, row, width = blocks_of(group), table_of(group)[slot], group.width
    known = 0
    for i in range(sequences_of(group)[slot].blocks):
        b = row[i]
        if b == NONE:
            return NONE
        at, count = i * width, min(width, len(tokens) - i * width)
        memcpy(address_of(tokens) + 4 * at, address_of(tokens_of(group)[b]), 4 * count)
        if len(extra) and blocks[b].flags & EXTRA:
            memcpy(address_of(extra) + 8 * at, address_of(extra_of(group)[b]), 8 * count)
        if known == i and i < len(keys) and blocks[b].flags & KEYED:
            keys[i, 0], keys[i, 1] = blocks[b].key0, blocks[b].key1
            known += 1
    return known


# -- kinds of groups ------------------------------------------------------------------------------------


@inline
def finds(group):
    """Whether prompts find content in this group. Then its rows have the tokens of their sequences."""
    return group.kind != CROSS


@inline
def has_states(group):
    """Whether its blocks are states, which are written as a whole."""
    return group.kind == RECURRENT


@inline
def needs_all(group):
    """Whether all blocks of a prefix are needed to reuse it."""
    return group.kind == ATTENTION and group.window == 0


@inline
def finds_parts(group):
    """Whether prompts can reuse the first tokens of a block."""
    return group.kind == ATTENTION and group.child_buckets != 0


@inline
def columns_for(group, request):
    """How many columns of a row a prompt takes in this group."""
    return blocks_for(group, request.length if finds(group) else request.encoder)


@inline
def has_block(group, request, i, columns):
    """Whether column ``i`` of the first ``columns``, which begin with a prompt, has a block if it is not reused.

    In a recurrent group, the columns whose state is kept have one, and the last column.
    """
    if not has_states(group):
        return True
    return i == columns - 1 or keeps_state(group, i, kept_column(group, request))


@inline
def kept_column(group, request):
    """The last column of a prompt whose state the same prompt could reuse."""
    return reusable(request) // group.width - 1


@inline
def keeps_state(group, i, kept):
    """Whether the state after column ``i`` of a sequence is kept for others to find. ``kept`` is that column of its
    prompt."""
    return i == kept or (group.snapshot != 0 and (i + 1) % group.snapshot == 0)


@inline
def state_at(group, slot, count):
    """The column of the state after ``count`` tokens of a sequence. NONE for 0 tokens."""
    i = (count - 1) // group.width
    while i >= 0 and table_of(group)[slot, i] == NONE:
        i += 1
    return i


@jit
def fresh_blocks(group, request, matched, columns):
    """How many blocks a prompt takes after ``matched`` columns, until it has ``columns``."""
    if not has_states(group):
        return columns - matched
    count = 0
    for i in range(matched, columns):
        count += 1 if has_block(group, request, i, columns) else 0
    return count


@jit
def fresh_of(groups, g, requests, matched, columns):
    """``fresh_blocks`` of the first of ``requests`` in group ``g``."""
    return fresh_blocks(group_at(groups, g), request_at(requests, 0), matched, columns)


# -- windows -------------------------------------------------------------------------------------------
#
# A token at position p sees the tokens [p - WINDOW + 1, p] and those of the first SINKS blocks. The window has passed
# the blocks [SINKS, first) of a sequence: its row has NONE there. Without a window, WINDOW and ``first`` are 0.


@inline
def kept_from(group, count):
    """The first block after the sinks that is needed once ``count`` tokens are computed.

    It is the first block that the next token sees, or the last full block if that comes before. The key of the last
    full block is the parent of the next key, and a hit compares its tokens.
    """
    return max(group.sinks, min((count - group.window + 1) // group.width, count // group.width - 1))


@inline
def holes(group, slot):
    """How many blocks a sequence has given back because its window has passed them."""
    return max(sequences_of(group)[slot].first - group.sinks, 0)


@inline
def least(group, slot):
    """How many tokens a sequence must keep, so that everything its next token sees is still there."""
    if holes(group, slot) == 0:
        return 0
    first = sequences_of(group)[slot].first * group.width
    return first + max(group.window - 1, group.width)
