"""Sliding windows: what a later token can still see of a prefix, the longest prefix to reuse by that, and blocks that have been passed.

A token at position p sees the tokens [p - WINDOW + 1, p] and those of the first SINKS blocks. Blocks [SINKS, first) of a sequence have
been passed: its row has NONE there. All this is off while WINDOW is 0, and then ``first`` is 0 too.
"""

from __future__ import annotations

from kvpool.jit import jit
from kvpool.state.accesses import ACCESSED, emit_access
from kvpool.state.blocks import C_PASSED, KIND, NONE, RECURRENT, SINKS, WIDTH, WINDOW, counters_of, sequences_of, table_of
from kvpool.state.prefix import find
from kvpool.state.requests import R_NAMESPACE, request_extra, request_keys, request_tokens, walk
from kvpool.state.tiers import let_go


@jit(forceinline=True)
def kept_from(h, count):
    """The first block behind the sinks that is needed once ``count`` tokens are computed.

    That is what the next token sees, and at least the last full block: its key is the next one's parent, and a hit compares its tokens.
    """
    return max(h[SINKS], min((count - h[WINDOW] + 1) // h[WIDTH], count // h[WIDTH] - 1))


@jit(forceinline=True)
def holes(h, slot):
    """Blocks that a sequence has given back since its window has passed them."""
    return max(sequences_of(h)[slot].first - h[SINKS], 0)


@jit(forceinline=True)
def least(h, slot):
    """Tokens that a sequence must keep, so that all that its next token sees is still there."""
    if holes(h, slot) == 0:
        return 0
    first = sequences_of(h)[slot].first * h[WIDTH]
    return first + max(h[WINDOW] - 1, h[WIDTH])


@jit
def longest(h, request, limit, ids):
    """The most leading full blocks, at most ``limit``, that can be reused: all that the token behind them sees is cached.

    Their representatives go into ``ids``, NONE where a block is not needed. Looks no block up twice. Changes nothing.
    """
    if h[KIND] == RECURRENT:
        return _last_state(h, request, limit, ids)
    if h[WINDOW] == 0:
        return walk(h, request, limit, ids)
    sinks = min(limit, h[SINKS])
    found = walk(h, request, sinks, ids)
    if found < sinks:
        return found
    tokens, keys, extra = request_tokens(request), request_keys(h, request), request_extra(request)
    end, i = limit, limit - 1
    while i >= kept_from(h, end * h[WIDTH]):
        b = find(h, keys[i, 0], keys[i, 1], request[R_NAMESPACE], tokens, extra, i * h[WIDTH])
        ids[i] = b
        if b == NONE:
            end = i
        i -= 1
    for i in range(end, limit):
        ids[i] = NONE
    for i in range(sinks, min(end, kept_from(h, end * h[WIDTH]))):
        ids[i] = NONE
    return end


@jit
def _last_state(h, request, limit, ids):
    """``longest`` in a recurrent group, where all that the next token sees is the state behind the last block."""
    tokens, keys, extra = request_tokens(request), request_keys(h, request), request_extra(request)
    for i in range(limit - 1, -1, -1):
        ids[i] = find(h, keys[i, 0], keys[i, 1], request[R_NAMESPACE], tokens, extra, i * h[WIDTH])
        if ids[i] != NONE:
            for j in range(i):
                ids[j] = NONE
            return i + 1
    return 0


@jit
def give_passed(h, slot, stream):
    """Give back the blocks that no token behind the committed ones sees, last first; what is enqueued on ``stream`` may still read them."""
    sequence, row = sequences_of(h)[slot], table_of(h)[slot]
    first, last = max(sequence.first, h[SINKS]), kept_from(h, sequence.committed)
    for i in range(last - 1, first - 1, -1):
        emit_access(h, ACCESSED, stream, row[i])
        let_go(h, row[i])
        row[i] = NONE
    if last > first:
        sequence.first = last
        counters_of(h)[C_PASSED] += last - first
        if h[SINKS] <= sequence.duplicates < last:
            sequence.duplicates = last
