"""Sliding windows: what a later token can still see of a sequence, and the blocks that the window has passed.

A token at position p sees the tokens [p - WINDOW + 1, p] and those of the first SINKS blocks. The window has passed the
blocks [SINKS, first) of a sequence: its row has NONE there. Without a window, WINDOW and ``first`` are 0.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.accesses import ACCESSED, emit_access
from kvpool.state.records import NONE, counters_of, sequences_of, table_of
from kvpool.state.tiers import let_go


@jit(forceinline=True)
def kept_from(h, count):
    """The first block after the sinks that is needed once ``count`` tokens are computed.

    It is the first block that the next token sees, or the last full block if that comes before. The key of the last
    full block is the parent of the next key, and a hit compares its tokens.
    """
    return max(h.sinks, min((count - h.window + 1) // h.width, count // h.width - 1))


@jit(forceinline=True)
def holes(h, slot):
    """How many blocks a sequence has given back because its window has passed them."""
    return max(sequences_of(h)[slot].first - h.sinks, 0)


@jit(forceinline=True)
def least(h, slot):
    """How many tokens a sequence must keep, so that everything its next token sees is still there."""
    if holes(h, slot) == 0:
        return 0
    first = sequences_of(h)[slot].first * h.width
    return first + max(h.window - 1, h.width)


@jit
def give_passed(h, slot, stream):
    """Give back the blocks that no token after the committed ones sees, last first. Work that is enqueued on ``stream``
    may still read them."""
    sequence, row = sequences_of(h)[slot], table_of(h)[slot]
    first, last = sequence.first, kept_from(h, sequence.committed)
    for i in range(last - 1, first - 1, -1):
        b, row[i] = np.int64(row[i]), NONE
        emit_access(h, ACCESSED, stream, b)
        let_go(h, b)
    if last > first:
        sequence.first = last
        counters_of(h).passed_blocks += last - first
