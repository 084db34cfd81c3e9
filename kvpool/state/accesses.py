"""What the engine's streams will do and have done to blocks: the rows that transfer orders copies and streams by."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.blocks import (
    ACCESSES,
    ACCESSES_CAPACITY,
    BLOCK_TOKENS,
    DEVICE_BLOCKS,
    DEVICE_FIRST,
    HOST_FIRST,
    MOVES,
    NONE,
    TICKET,
    TOKEN_MOVES,
    WIDTH,
    accesses_of,
    moves_of,
    token_moves_of,
)

# Kinds of rows (kind, stream, block). The stream will read the block, or write it, from now on; its accesses so far are enqueued,
# and among them is what wrote the block's content. FOLLOWS has a second stream in place of the block, which the first one takes over from.
WILL_READ, WILL_WRITE, ACCESSED, WROTE, FOLLOWS = range(5)


@jit(forceinline=True)
def emit_access(h, kind, stream, b):
    """Note an access; where the device orders nothing by them there is no room, and this costs one comparison."""
    if h[ACCESSES_CAPACITY] != 0:
        _note(h, kind, stream, b)


@jit(forceinline=True)
def _note(h, kind, stream, b):
    n = h[ACCESSES]
    if stream == NONE:
        return
    if n >= h[ACCESSES_CAPACITY]:
        raise RuntimeError("more accesses than were reserved")
    rows = accesses_of(h)
    rows[n, 0], rows[n, 1], rows[n, 2] = kind, stream, b
    h[ACCESSES] = n + 1


@jit(forceinline=True)
def outside(h, b):
    """The id by which all behind the state knows a block: all device blocks of all groups, then all host blocks."""
    return b + (h[DEVICE_FIRST] if b < h[DEVICE_BLOCKS] else h[HOST_FIRST])


@jit
def hand_over(heads, moves, token_moves, accesses):
    """Take a decision's moves, token moves and accesses out of the groups' buffers, into arrays of their lengths; returns its ticket.

    All in one call, since the interpreter may run anything between two: NONE, with nothing changed, if the lengths are no longer right.
    """
    m = t = a = 0
    for g in range(heads.shape[0]):
        m, t, a = m + heads[g, MOVES], t + heads[g, TOKEN_MOVES], a + heads[g, ACCESSES]
    if moves.shape[0] != m or token_moves.shape[0] != t or accesses.shape[0] != a:
        return np.int64(NONE)
    m = t = a = 0
    for g in range(heads.shape[0]):
        h = heads[g]
        m, t, a = _take_moves(h, moves, m), _take_token_moves(h, token_moves, t), _take_accesses(h, accesses, a)
        h[MOVES] = h[TOKEN_MOVES] = h[ACCESSES] = 0
        h[TICKET] += 1
    return heads[0, TICKET] - 1


@jit
def _take_moves(h, moves, n):
    """One group's, behind the first ``n``; a whole block has the tokens that the device knows of it."""
    decided = moves_of(h)
    for i in range(h[MOVES]):
        moves[n, 0], moves[n, 1] = outside(h, decided[i, 0]), outside(h, decided[i, 1])
        moves[n, 2], moves[n, 3] = min(decided[i, 2], h[BLOCK_TOKENS]), decided[i, 3]
        n += 1
    return n


@jit
def _take_token_moves(h, token_moves, n):
    shifted, first = token_moves_of(h), h[DEVICE_FIRST] * h[WIDTH]
    for i in range(h[TOKEN_MOVES]):
        token_moves[n, 0], token_moves[n, 1] = shifted[i, 0], shifted[i, 1]
        token_moves[n, 2], token_moves[n, 3] = shifted[i, 2] + first, shifted[i, 3] + first
        n += 1
    return n


@jit
def _take_accesses(h, accesses, n):
    noted = accesses_of(h)
    for i in range(h[ACCESSES]):
        accesses[n, 0], accesses[n, 1] = noted[i, 0], noted[i, 1]
        accesses[n, 2] = noted[i, 2] if noted[i, 0] == FOLLOWS else outside(h, noted[i, 2])
        n += 1
    return n
