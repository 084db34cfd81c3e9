"""What an admission would do now: how many of a batch would fit, the blocks that they would take, and which sequence is
computing what a prompt lacks."""

from __future__ import annotations

from kvpool.common.jit import jit
from kvpool.state.admit import blocks_taken, claim, unclaim
from kvpool.state.index import agree, same_tokens
from kvpool.state.policies.policy import free_blocks
from kvpool.state.records import (
    DEVICE,
    LIVE,
    NONE,
    blocks_of,
    group_at,
    outcome_at,
    request_at,
    row_extra_of,
    row_tokens_of,
    sequences_of,
    table_of,
)
from kvpool.state.requests import (
    findable,
    finds,
    has_states,
    keeps_state,
    parent_of,
    request_extra,
    request_tokens,
)


@jit
def plan(groups, requests, out, blocks, computing):
    """Plan the admission of as many of the first requests as fit. Returns how many.

    ``out`` int64[groups, n, OUTCOME] is as after an admission, without ids. ``blocks`` int64[groups] gets the free
    device blocks that these requests take. ``computing`` int64[n, 2] gets two numbers for each request. The first is
    the live sequence that is computing the most tokens that the prompt begins with and lacks, or NONE. The
    second is how many tokens the prompt could reuse after that sequence's commit.
    """
    for g in range(len(groups)):
        blocks[g] = free_blocks(group_at(groups, g), DEVICE)
    n = claim(groups, requests, out, True)
    for g in range(len(groups)):
        blocks[g] = blocks_taken(group_at(groups, g), requests, out[g], n, blocks[g])
    unclaim(groups, out, 0, n)
    token_group = 0
    while not finds(group_at(groups, token_group)):
        token_group += 1
    for r in range(n):
        _find_computing(
            groups, token_group, request_at(requests, r), outcome_at(out[token_group], r).matched, computing[r]
        )
    return n


@jit
def _found_in(group, g, most, slot):
    """The largest number of leading columns, at most ``most``, that one group finds. In a group with states, a state
    must be kept after the last of them."""
    kept, row = sequences_of(group)[slot].kept, table_of(group)[slot]
    while has_states(group) and most > 0 and not (row[most - 1] != NONE and keeps_state(group, most - 1, kept)):
        most -= 1
    return most


_shared_columns = agree(_found_in)
"""(groups, most, slot): the largest number of leading columns that every group finds once a sequence has committed
them."""


@jit
def _find_computing(groups, token_group, request, matched, out):
    """The numbers of ``computing`` for one request, of which all groups can reuse ``matched`` blocks, into ``out``
    int64[2]. ``token_group`` is a group that has the tokens of sequences."""
    group = group_at(groups, token_group)
    sequences = sequences_of(group)
    out[0], out[1] = NONE, 0
    least = matched + 1
    for slot in range(group.sequences):
        sequence = sequences[slot]
        # Fields that every step reads rule out most sequences.
        if sequence.live != LIVE or sequence.failed or sequence.private or sequence.committed >= sequence.length:
            continue
        if sequence.length < least * group.width or sequence.namespace != request.namespace:
            continue
        columns = _shared_columns(groups, _shared_tokens(group, request, slot) // group.width, slot)
        if columns >= least and columns * group.width > sequence.committed:
            out[0], out[1] = (sequence.generation << 32) | slot, columns * group.width
            least = columns + 1


@jit
def _shared_tokens(group, request, slot):
    """How many leading tokens a prompt could reuse that a live sequence has too. 0 if they differ within the committed
    tokens."""
    sequence, row = sequences_of(group)[slot], table_of(group)[slot]
    full = sequence.committed // group.width
    end = min(findable(request), sequence.length)
    if full * group.width >= end or not _begins_with(group, request, slot, full):
        return 0
    tokens, extra = request_tokens(request), request_extra(request)
    if has_states(group):
        return _same_noted(group, slot, tokens, extra, full * group.width, end)
    same, more = full * group.width, group.width
    while same < end and more == group.width:
        more = same_tokens(group, row[same // group.width], tokens, extra, same, min(group.width, end - same))
        same += more
    return same


@jit
def _begins_with(group, request, slot, full):
    """Whether the first ``full`` blocks of a prompt are the blocks that a sequence has committed."""
    sequence = sequences_of(group)[slot]
    if has_states(group):
        key0, key1 = sequence.chain0, sequence.chain1
    elif full == 0:
        key0, key1 = sequence.root0, sequence.root1
    else:
        last = blocks_of(group)[table_of(group)[slot, full - 1]]
        key0, key1 = last.key0, last.key1
    wanted0, wanted1 = parent_of(group, request, full)
    return key0 == wanted0 and key1 == wanted1


@jit
def _same_noted(group, slot, tokens, extra, start, end):
    """The first position in [start, end) at which a prompt differs from the tokens that are noted beside a row, or
    ``end``."""
    noted, has = row_tokens_of(group)[slot], len(extra) > 0
    for i in range(start, end):
        if noted[i] != tokens[i]:
            return i
        if has or group.has_extra:
            mine = row_extra_of(group)[slot, i] if group.has_extra else 0
            if mine != (extra[i] if has else 0):
                return i
    return end
