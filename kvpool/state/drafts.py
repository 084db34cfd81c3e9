"""Drafts: of the last tokens of a sequence a path is kept, moved together, and the others are dropped."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.accesses import WILL_WRITE, WROTE, emit_access
from kvpool.state.admission import SHORT_OF_BLOCKS
from kvpool.state.blocks import (
    C_COPIED,
    DETAIL,
    DETAIL2,
    DEVICE,
    EXTRA,
    HAS_EXTRA,
    KEYED,
    NONE,
    PUBLISHED,
    TICKET,
    TOKEN_MOVES,
    TOKEN_MOVES_CAPACITY,
    WIDTH,
    blocks_of,
    counters_of,
    extra_of,
    lists_of,
    sequences_of,
    table_of,
    token_moves_of,
    tokens_of,
)
from kvpool.state.growth import rewind, rewind_need, rewind_one, shared
from kvpool.state.live import slot_of, stream_of
from kvpool.state.lru import free_blocks
from kvpool.state.sharing import private_copy
from kvpool.state.tiers import forget

BAD_DRAFTS, BAD_ACCEPTED = -11, -12


@jit
def draft_error(h, ids, drafts, accepted, counts):
    """0, or an error: DETAIL is the offender's place in ``ids``, for BAD_ACCEPTED in ``accepted``; DETAIL2 the bound that it broke.

    The ids were checked.
    """
    start = 0
    for i in range(ids.shape[0]):
        sequence = sequences_of(h)[slot_of(h, ids[i])]
        if drafts[i] > sequence.length - sequence.committed:
            h[DETAIL], h[DETAIL2] = i, sequence.length - sequence.committed
            return BAD_DRAFTS
        least = np.int64(0)
        for j in range(start, start + counts[i]):
            if accepted[j] < least or accepted[j] >= drafts[i]:
                h[DETAIL], h[DETAIL2] = j, drafts[i]
                return BAD_ACCEPTED
            least = accepted[j] + 1
        start += counts[i]
    return 0


@jit
def gap_of(accepted, start, count):
    """How many of the accepted drafts of a sequence are where they stay: those before the first that was not accepted."""
    n = 0
    while n < count and accepted[start + n] == n:
        n += 1
    return n


@jit
def _shared_between(h, slot, first, end):
    """How many of the blocks of tokens [first, end) others hold too."""
    found = 0
    for i in range(first // h[WIDTH], (end - 1) // h[WIDTH] + 1 if end > first else 0):
        found += 1 if shared(h, slot, i) else 0
    return found


@jit
def _copies(h, ids, drafts, accepted, counts):
    """Blocks that have to be copied since others hold them too, and whether a token is to move."""
    need, start, moving = 0, 0, False
    for i in range(ids.shape[0]):
        slot, gap = slot_of(h, ids[i]), gap_of(accepted, start, counts[i])
        base = sequences_of(h)[slot].length - drafts[i]
        end = base + counts[i]
        if gap < counts[i]:
            moving = True
            need += _shared_between(h, slot, base + gap, end)
        elif counts[i] < drafts[i] and end % h[WIDTH]:
            need += _shared_between(h, slot, end - 1, end)
        start += counts[i]
    return need, moving


@jit
def _move_token(h, source, at, target, to):
    """The ids of a token; its bytes are what token moves are for."""
    blocks, tokens = blocks_of(h), tokens_of(h)
    tokens[target, to] = tokens[source, at]
    if not h[HAS_EXTRA]:
        return
    extra = extra_of(h)
    own = extra[source, at] if blocks[source].flags & EXTRA else np.int64(0)
    if own != 0 and not blocks[target].flags & EXTRA:
        for i in range(h[WIDTH]):
            extra[target, i] = 0
        blocks[target].flags |= EXTRA
    if blocks[target].flags & EXTRA:
        extra[target, to] = own


@jit
def _gather(h, slot, base, accepted, gap, stream):
    """Move the accepted drafts, int64[n], from the place ``gap`` on behind those before; returns blocks copied.

    The blocks that are written become the sequence's own first: a copy of one has all of its tokens, so that it is read as well.
    """
    blocks, row, width = blocks_of(h), table_of(h)[slot], h[WIDTH]
    length, copied = sequences_of(h)[slot].length, 0
    for i in range((base + gap) // width, (base + accepted.shape[0] - 1) // width + 1):
        if shared(h, slot, i):
            emit_access(h, WROTE, stream, row[i])
            row[i] = private_copy(h, row[i], min(width, length - i * width))
            copied += 1
        if blocks[row[i]].flags & PUBLISHED:  # by a fork that has committed it, and has gone
            forget(h, row[i], NONE)
        blocks[row[i]].flags &= ~KEYED
        blocks[row[i]].ticket = h[TICKET]  # whose failure loses them
        emit_access(h, WILL_WRITE, stream, row[i])
    moves, n = token_moves_of(h), h[TOKEN_MOVES]
    if n + accepted.shape[0] - gap > h[TOKEN_MOVES_CAPACITY]:
        raise RuntimeError("more token moves than were reserved")
    for j in range(gap, accepted.shape[0]):
        place, to = base + accepted[j], base + j
        source, target = np.int64(row[place // width]), np.int64(row[to // width])
        _move_token(h, source, place % width, target, to % width)
        moves[n, 0], moves[n, 1] = stream, slot
        moves[n, 2], moves[n, 3] = source * width + place % width, target * width + to % width
        n += 1
    h[TOKEN_MOVES] = n
    return copied


@jit
def _drop(h, ids, drafts, accepted, counts, moved):
    """Drop what was not accepted, of the sequences with a token that ``moved`` or of the others; returns blocks copied."""
    start, copied = 0, 0
    for i in range(ids.shape[0]):
        slot = slot_of(h, ids[i])
        if counts[i] < drafts[i] and (gap_of(accepted, start, counts[i]) < counts[i]) == moved:
            copied += rewind_one(h, slot, drafts[i] - counts[i], stream_of(h, slot))
        start += counts[i]
    return copied


@jit
def keep_need(h, ids, drafts, accepted, counts, dropped):
    """Blocks that ``keep`` takes for copies, or the error, after ``draft_error``; ``dropped`` is ``drafts - counts``."""
    need, moving = _copies(h, ids, drafts, accepted, counts)
    if not moving:
        return rewind_need(h, ids, dropped)
    # Blocks that this call returns do not count: tokens are moved out of them behind all copies into fresh blocks.
    free = free_blocks(lists_of(h), DEVICE)
    if need > free:
        h[DETAIL], h[DETAIL2] = need, free
        return np.int64(SHORT_OF_BLOCKS)
    return need


@jit
def keep(h, ids, drafts, accepted, counts, dropped):
    """Of the last ``drafts`` tokens of each sequence keep its next ``counts`` of ``accepted``, indices among them in rising order.

    ``keep_need`` has found it possible. Returns blocks copied.
    """
    if not _copies(h, ids, drafts, accepted, counts)[1]:
        return rewind(h, ids, dropped)
    start, copied = 0, 0
    for i in range(ids.shape[0]):
        slot, gap = slot_of(h, ids[i]), gap_of(accepted, start, counts[i])
        if gap < counts[i]:
            base = sequences_of(h)[slot].length - drafts[i]
            copied += _gather(h, slot, base, accepted[start : start + counts[i]], gap, stream_of(h, slot))
        start += counts[i]
    # Those without a move first: they may take a block.
    copied += _drop(h, ids, drafts, accepted, counts, False)
    copied += _drop(h, ids, drafts, accepted, counts, True)
    counters_of(h)[C_COPIED] += copied
    return copied
