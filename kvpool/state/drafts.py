"""Drafts: one path of the last tokens of a sequence is kept and moved together. The other drafts are dropped."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.accesses import WILL_WRITE, WROTE, emit_access
from kvpool.state.codes import BAD_ACCEPTED, BAD_DRAFTS
from kvpool.state.growth import rewind, rewind_need, rewind_one, shared
from kvpool.state.policy import free_blocks
from kvpool.state.records import (
    DEVICE,
    EXTRA,
    KEYED,
    NONE,
    PUBLISHED,
    blocks_of,
    extra_of,
    sequences_of,
    table_of,
    token_moves_of,
    tokens_of,
)
from kvpool.state.sequences import slot_of, stream_of, within
from kvpool.state.sharing import private_copy
from kvpool.state.tiers import forget


@jit
def draft_error(h, ids, drafts, accepted, counts):
    """0, or an error. ``detail`` is the place of the offender in ``ids``, or for BAD_ACCEPTED in ``accepted``.
    ``bound`` is the bound that it broke.

    The ids were checked.
    """
    start = 0
    for i in range(ids.shape[0]):
        sequence = sequences_of(h)[slot_of(ids[i])]
        if drafts[i] > sequence.length - sequence.committed:
            h.detail, h.bound = i, sequence.length - sequence.committed
            return BAD_DRAFTS
        least = np.int64(0)
        for j in range(start, start + counts[i]):
            if accepted[j] < least or accepted[j] >= drafts[i]:
                h.detail, h.bound = j, drafts[i]
                return BAD_ACCEPTED
            least = accepted[j] + 1
        start += counts[i]
    return 0


@jit
def gap_of(accepted, start, count):
    """How many accepted drafts of a sequence stay where they are: those before the first rejected one."""
    n = 0
    while n < count and accepted[start + n] == n:
        n += 1
    return n


@jit
def _shared_between(h, slot, first, end):
    """How many of the blocks of the tokens [first, end) others hold too."""
    found = 0
    for i in range(first // h.width, (end - 1) // h.width + 1 if end > first else 0):
        found += 1 if shared(h, slot, i) else 0
    return found


@jit
def _copies(h, ids, drafts, accepted, counts):
    """How many blocks have to be copied because others hold them too, and whether any token has to move."""
    need, start, moving = 0, 0, False
    for i in range(ids.shape[0]):
        slot, gap = slot_of(ids[i]), gap_of(accepted, start, counts[i])
        base = sequences_of(h)[slot].length - drafts[i]
        end = base + counts[i]
        if gap < counts[i]:
            moving = True
            need += _shared_between(h, slot, base + gap, end)
        elif counts[i] < drafts[i] and end % h.width:
            need += _shared_between(h, slot, end - 1, end)
        start += counts[i]
    return need, moving


@jit
def _move_token(h, source, at, target, to):
    """Move the id of a token, and its extra id. Token moves carry its bytes."""
    blocks, tokens = blocks_of(h), tokens_of(h)
    tokens[target, to] = tokens[source, at]
    if not h.has_extra:
        return
    extra = extra_of(h)
    own = extra[source, at] if blocks[source].flags & EXTRA else np.int64(0)
    if own != 0 and not blocks[target].flags & EXTRA:
        for i in range(h.width):
            extra[target, i] = 0
        blocks[target].flags |= EXTRA
    if blocks[target].flags & EXTRA:
        extra[target, to] = own


@jit
def _gather(h, slot, base, accepted, gap, stream):
    """Move the accepted drafts, int64[n], from number ``gap`` on, to the places after those before them.

    First, the sequence gets blocks of its own for all that will be written. A copy of a block has all of its tokens,
    since it is also read from.
    """
    blocks, row, width = blocks_of(h), table_of(h)[slot], h.width
    length = sequences_of(h)[slot].length
    for i in range((base + gap) // width, (base + accepted.shape[0] - 1) // width + 1):
        if shared(h, slot, i):
            emit_access(h, WROTE, stream, np.int64(row[i]))
            row[i] = private_copy(h, np.int64(row[i]), min(width, length - i * width))
        if blocks[row[i]].flags & PUBLISHED:  # by a fork that has committed it, and has gone
            forget(h, np.int64(row[i]), NONE)
        blocks[row[i]].flags &= ~KEYED
        blocks[row[i]].ticket = h.ticket  # if that decision fails, these tokens are lost
        emit_access(h, WILL_WRITE, stream, np.int64(row[i]))
    moves, n = token_moves_of(h), h.token_moves
    if n + accepted.shape[0] - gap > h.token_moves_capacity:
        raise RuntimeError("more token moves than one call can make")
    for j in range(gap, accepted.shape[0]):
        place, to = base + accepted[j], base + j
        source, target = np.int64(row[place // width]), np.int64(row[to // width])
        _move_token(h, source, place % width, target, to % width)
        moves[n, 0], moves[n, 1] = stream, slot
        moves[n, 2], moves[n, 3] = source * width + place % width, target * width + to % width
        n += 1
    h.token_moves = n


@jit
def _drop(h, ids, drafts, accepted, counts, moved):
    """Drop the rejected drafts: with ``moved``, of the sequences in which a token moves, else of the others. Returns
    blocks copied."""
    start = 0
    for i in range(ids.shape[0]):
        slot = slot_of(ids[i])
        if counts[i] < drafts[i] and (gap_of(accepted, start, counts[i]) < counts[i]) == moved:
            rewind_one(h, slot, drafts[i] - counts[i], stream_of(h, slot))
        start += counts[i]


@jit
def keep_need(h, ids, drafts, accepted, counts, dropped):
    """The blocks that ``keep`` takes for copies, or the error. Called after ``draft_error``. ``dropped`` is
    ``drafts - counts``."""
    need, moving = _copies(h, ids, drafts, accepted, counts)
    if not moving:
        return rewind_need(h, ids, dropped)
    # Blocks that this call gives back do not count. Tokens move out of them after all copies into fresh blocks.
    return within(h, need, free_blocks(h, DEVICE))


@jit
def keep(h, ids, drafts, accepted, counts, dropped):
    """Of the last ``drafts`` tokens of each sequence, keep its next ``counts`` of ``accepted``, which are indices among
    them in rising order.

    ``keep_need`` has found it possible.
    """
    if not _copies(h, ids, drafts, accepted, counts)[1]:
        rewind(h, ids, dropped)
        return
    start = 0
    for i in range(ids.shape[0]):
        slot, gap = slot_of(ids[i]), gap_of(accepted, start, counts[i])
        if gap < counts[i]:
            base = sequences_of(h)[slot].length - drafts[i]
            _gather(h, slot, base, accepted[start : start + counts[i]], gap, stream_of(h, slot))
        start += counts[i]
    # Sequences without a move come first: they may take a block.
    _drop(h, ids, drafts, accepted, counts, False)
    _drop(h, ids, drafts, accepted, counts, True)
