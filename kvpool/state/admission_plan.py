"""What an admission would do now, and which live sequence is computing what a prompt lacks. Changes nothing.

A plan claims a batch as an admission does, reads the result, and undoes the claim to the byte.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.admit import blocks_taken, claim, unclaim
from kvpool.state.index import same_tokens
from kvpool.state.kinds import finds, has_states, keeps_state
from kvpool.state.lookup import agree
from kvpool.state.policy import free_blocks
from kvpool.state.records import (
    DEVICE,
    LIVE,
    NONE,
    blocks_of,
    head,
    outcome_at,
    request_at,
    row_extra_of,
    row_tokens_of,
    sequences_of,
    table_of,
)
from kvpool.state.requests import findable, parent_of, request_extra, request_tokens


@jit
def plan(heads, requests, out, blocks, computing):
    """Plan the admission of as many of the first requests as fit. Returns how many.

    ``out`` int64[groups, n, OUTCOME] is as after an admission, without ids. ``blocks`` int64[groups] gets the free
    device blocks that these requests take. ``computing`` int64[n, 2] gets two numbers for each request. The first is
    the live sequence that is computing the most tokens with which the prompt begins and which it lacks, or NONE. The
    second is how many tokens the prompt could reuse after that sequence's commit.
    """
    for g in range(heads.shape[0]):
        blocks[g] = free_blocks(head(heads, g), DEVICE)
    n = claim(heads, requests, out, True)
    for g in range(heads.shape[0]):
        blocks[g] = blocks_taken(head(heads, g), requests, out[g], n, blocks[g])
    unclaim(heads, out, 0, n)
    told = 0
    while not finds(head(heads, told)):
        told += 1
    for r in range(n):
        _find_computing(heads, told, request_at(requests, r), outcome_at(out[told], r).matched, computing[r])
    return n


@jit
def _found_in(h, g, most, slot):
    """The largest number of leading columns, at most ``most``, that one group finds. In a group with states, a state
    must be kept after the last of them."""
    kept, row = sequences_of(h)[slot].kept, table_of(h)[slot]
    while has_states(h) and most > 0 and not (row[most - 1] != NONE and keeps_state(h, most - 1, kept)):
        most -= 1
    return most


_shared_columns = agree(_found_in)
"""(heads, most, slot): the largest number of leading columns that every group finds once a sequence has committed
them."""


@jit
def _find_computing(heads, told, request, matched, out):
    """The numbers of ``computing`` for one request, of which all groups can reuse ``matched`` blocks, into ``out``
    int64[2]. Group ``told`` knows the tokens of sequences."""
    h = head(heads, told)
    sequences = sequences_of(h)
    out[0], out[1] = NONE, 0
    least = matched + 1
    for slot in range(h.sequences):
        sequence = sequences[slot]
        # Fields that every step reads rule out most sequences.
        if sequence.live != LIVE or sequence.failed or sequence.private or sequence.committed >= sequence.length:
            continue
        if sequence.length < least * h.width or sequence.namespace != request.namespace:
            continue
        columns = _shared_columns(heads, _shared_tokens(h, request, slot) // h.width, slot)
        if columns >= least and columns * h.width > sequence.committed:
            out[0], out[1] = (np.int64(sequence.generation) << 32) | slot, columns * h.width
            least = columns + 1


@jit
def _shared_tokens(h, request, slot):
    """How many leading tokens a prompt could reuse that a live sequence has too. 0 if they differ within the committed
    tokens."""
    sequence, row = sequences_of(h)[slot], table_of(h)[slot]
    full = sequence.committed // h.width
    end = min(findable(request), np.int64(sequence.length))
    if full * h.width >= end or not _begins_with(h, request, slot, full):
        return np.int64(0)
    tokens, extra = request_tokens(request), request_extra(request)
    if has_states(h):
        return _same_noted(h, slot, tokens, extra, full * h.width, end)
    same, more = full * h.width, h.width
    while same < end and more == h.width:
        more = same_tokens(h, np.int64(row[same // h.width]), tokens, extra, same, min(h.width, end - same))
        same += more
    return same


@jit
def _begins_with(h, request, slot, full):
    """Whether the first ``full`` blocks of a prompt are the blocks that a sequence has committed."""
    sequence = sequences_of(h)[slot]
    if has_states(h):
        key0, key1 = sequence.chain0, sequence.chain1
    elif full == 0:
        key0, key1 = sequence.root0, sequence.root1
    else:
        last = blocks_of(h)[table_of(h)[slot, full - 1]]
        key0, key1 = last.key0, last.key1
    wanted0, wanted1 = parent_of(h, request, full)
    return key0 == wanted0 and key1 == wanted1


@jit
def _same_noted(h, slot, tokens, extra, start, end):
    """The first position in [start, end) at which a prompt differs from the tokens that are noted beside a row, or
    ``end``."""
    noted, has = row_tokens_of(h)[slot], extra.shape[0] > 0
    for i in range(start, end):
        if noted[i] != tokens[i]:
            return i
        if has or h.has_extra:
            mine = row_extra_of(h)[slot, i] if h.has_extra else 0
            if mine != (extra[i] if has else 0):
                return i
    return end
