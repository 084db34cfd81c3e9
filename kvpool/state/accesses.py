"""What the engine's streams will do and have done to blocks: the rows that transfer orders copies and streams by."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.blocks import (
    ACCESSES,
    ACCESSES_CAPACITY,
    MOVES,
    NONE,
    TICKET,
    TOKEN_MOVES,
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


@jit
def hand_over(h, moves, token_moves, accesses):
    """Take a decision's moves, token moves and accesses out of the buffers, into arrays of their lengths; returns its ticket.

    All in one call, since the interpreter may run anything between two: NONE, with nothing changed, if the lengths are no longer right.
    """
    if moves.shape[0] != h[MOVES] or token_moves.shape[0] != h[TOKEN_MOVES] or accesses.shape[0] != h[ACCESSES]:
        return np.int64(NONE)
    decided, shifted, noted = moves_of(h), token_moves_of(h), accesses_of(h)
    for i in range(moves.shape[0]):
        for j in range(4):
            moves[i, j] = decided[i, j]
    for i in range(token_moves.shape[0]):
        for j in range(4):
            token_moves[i, j] = shifted[i, j]
    for i in range(accesses.shape[0]):
        for j in range(3):
            accesses[i, j] = noted[i, j]
    h[MOVES] = h[TOKEN_MOVES] = h[ACCESSES] = 0
    h[TICKET] += 1
    return h[TICKET] - 1
