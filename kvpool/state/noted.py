"""What is noted beside the rows of a recurrent group, which have no blocks for most columns.

That is the key of the full committed columns of a sequence, and the ids of all tokens behind them.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.blocks import (
    COLUMNS,
    EXTRA,
    GUARD,
    HAS_EXTRA,
    KEYED,
    NONE,
    SECRET0,
    SECRET1,
    WIDTH,
    blocks_of,
    extra_of,
    row_extra_of,
    row_tokens_of,
    sequences_of,
    table_of,
    tokens_of,
)
from kvpool.state.hashing import block_key
from kvpool.state.requests import R_LENGTH, parent_of, request_extra, request_tokens


@jit
def note(h, slot, at, tokens, extra, start, count):
    """Note ``count`` tokens of a sequence from its position ``at`` on; no extra ids are zeros."""
    own = row_tokens_of(h)[slot]
    for i in range(count):
        own[at + i] = tokens[start + i]
    if h[HAS_EXTRA]:
        mine = row_extra_of(h)[slot]
        for i in range(count):
            mine[at + i] = extra[start + i] if extra.shape[0] > 0 else 0


@jit
def begin_row(h, request, slot):
    """Note the tokens of a prompt that was granted behind what it reuses, and the key of that."""
    sequence = sequences_of(h)[slot]
    sequence.chain0, sequence.chain1 = parent_of(h, request, sequence.reused)
    start = sequence.reused * h[WIDTH]
    note(h, slot, start, request_tokens(request), request_extra(request), start, request[R_LENGTH] - start)


@jit
def _noted(h, slot):
    """The tokens that are noted of a sequence: from the first to behind the last."""
    sequence = sequences_of(h)[slot]
    return sequence.committed // h[WIDTH] * h[WIDTH], np.int64(sequence.length)


@jit
def copy_row(h, source, target):
    """What is noted of a sequence is that of its fork, too."""
    first, last = _noted(h, source)
    for i in range(first, last):
        row_tokens_of(h)[target, i] = row_tokens_of(h)[source, i]
        if h[HAS_EXTRA]:
            row_extra_of(h)[target, i] = row_extra_of(h)[source, i]


@jit
def reorder_rows(h, slots, parents, column):
    """What is noted of each sequence becomes its parent's; the sequences are still those of before. ``column`` int64[n] is scratch."""
    first, last = np.int64(h[COLUMNS] * h[WIDTH]), np.int64(0)
    for i in range(slots.shape[0]):
        low, high = _noted(h, slots[i])
        first, last = min(first, low), max(last, high)
    for at in range(first, last):
        for i in range(slots.shape[0]):
            column[i] = row_tokens_of(h)[slots[i], at]
        for i in range(slots.shape[0]):
            row_tokens_of(h)[slots[i], at] = column[parents[i]]
        if h[HAS_EXTRA]:
            for i in range(slots.shape[0]):
                column[i] = row_extra_of(h)[slots[i], at]
            for i in range(slots.shape[0]):
                row_extra_of(h)[slots[i], at] = column[parents[i]]


@jit
def column_key(h, slot, i, parent0, parent1):
    """Key of column ``i`` of a sequence, whose tokens are noted, behind the key of those before."""
    at = i * h[WIDTH]
    extra = row_extra_of(h)[slot][at : at + h[WIDTH]] if h[HAS_EXTRA] else extra_of(h)[0][:0]
    return block_key(row_tokens_of(h)[slot][at : at + h[WIDTH]], extra, h[SECRET0], h[SECRET1], parent0, parent1, h[GUARD])


@jit
def _write_ids(h, slot, i, b):
    """Give a block the ids of the tokens of its column."""
    blocks, own, noted, at = blocks_of(h), tokens_of(h)[b], row_tokens_of(h)[slot], i * h[WIDTH]
    for j in range(h[WIDTH]):
        own[j] = noted[at + j]
    blocks[b].filled = h[WIDTH]
    blocks[b].flags &= ~EXTRA
    if h[HAS_EXTRA]:
        mine, extra = extra_of(h)[b], row_extra_of(h)[slot]
        for j in range(h[WIDTH]):
            mine[j] = extra[at + j]
            if mine[j] != 0:
                blocks[b].flags |= EXTRA


@jit
def name(h, slot, first, last):
    """Keys for the blocks in the full columns [first, last) of a sequence, which it has now committed, and for the row itself."""
    blocks, sequence, row = blocks_of(h), sequences_of(h)[slot], table_of(h)[slot]
    key0, key1, done = sequence.chain0, sequence.chain1, first
    for i in range(first, last + 1):
        b = row[i] if i < last else NONE
        if i < last and b == NONE:
            continue
        if b != NONE and blocks[b].flags & KEYED:  # those of a prompt have had it from the start
            key0, key1, done = blocks[b].key0, blocks[b].key1, i + 1
            continue
        for j in range(done, i):
            key0, key1 = column_key(h, slot, j, key0, key1)
        done = i
        if b != NONE:
            blocks[b].parent0, blocks[b].parent1 = key0, key1
            key0, key1 = column_key(h, slot, i, key0, key1)
            blocks[b].key0, blocks[b].key1, done = key0, key1, i + 1
            blocks[b].flags |= KEYED
            _write_ids(h, slot, i, b)
    sequence.chain0, sequence.chain1 = key0, key1
