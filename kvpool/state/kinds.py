"""The differences between the kinds of groups. No other module asks for a kind.

A group with attention has a block for each column of a row, found by its prefix. A recurrent group has states: blocks
after some of the columns. A group for cross attention has the encoder's content: nobody finds it, and nothing changes
it.
"""

from __future__ import annotations

from kvpool.jit import jit
from kvpool.state.records import ATTENTION, CROSS, NONE, RECURRENT, head, request_at, sequences_of, table_of
from kvpool.state.requests import blocks_for, reusable


@jit(forceinline=True)
def finds(h):
    """Whether prompts find content in this group. Then its rows have the tokens of their sequences."""
    return h.kind != CROSS


@jit(forceinline=True)
def has_states(h):
    """Whether its blocks are states, which are written as a whole."""
    return h.kind == RECURRENT


@jit(forceinline=True)
def needs_all(h):
    """Whether all blocks of a prefix are needed to reuse it."""
    return h.kind == ATTENTION and h.window == 0


@jit(forceinline=True)
def finds_parts(h):
    """Whether prompts can reuse the first tokens of a block."""
    return h.kind == ATTENTION and h.child_buckets != 0


@jit(forceinline=True)
def columns_for(h, request):
    """How many columns of a row a prompt takes in this group."""
    return blocks_for(h, request.length if finds(h) else request.encoder)


@jit(forceinline=True)
def has_block(h, request, i, columns):
    """Whether column ``i`` of the first ``columns``, which begin with a prompt, has a block if it is not reused.

    In a recurrent group, the columns whose state is kept have one, and the last column.
    """
    if not has_states(h):
        return True
    return i == columns - 1 or keeps_state(h, i, kept_column(h, request))


@jit(forceinline=True)
def kept_column(h, request):
    """The last column of a prompt whose state the same prompt could reuse."""
    return reusable(request) // h.width - 1


@jit(forceinline=True)
def keeps_state(h, i, kept):
    """Whether the state after column ``i`` of a sequence is kept for others to find. ``kept`` is that column of its
    prompt."""
    return i == kept or (h.snapshot != 0 and (i + 1) % h.snapshot == 0)


@jit(forceinline=True)
def state_at(h, slot, count):
    """The column of the state after ``count`` tokens of a sequence. NONE for 0 tokens."""
    i = (count - 1) // h.width
    while i >= 0 and table_of(h)[slot, i] == NONE:
        i += 1
    return i


@jit
def fresh_blocks(h, request, matched, columns):
    """How many blocks a prompt takes after ``matched`` columns, until it has ``columns``."""
    if not has_states(h):
        return columns - matched
    count = 0
    for i in range(matched, columns):
        count += 1 if has_block(h, request, i, columns) else 0
    return count


@jit
def fresh_of(heads, g, requests, matched, columns):
    """``fresh_blocks`` of the first of ``requests`` in group ``g``."""
    return fresh_blocks(head(heads, g), request_at(requests, 0), matched, columns)


@jit
def has_all(heads, g):
    """Whether the rows of a group have blocks for all of their tokens."""
    return needs_all(head(heads, g))


@jit
def has_windows(heads, g):
    """Whether the rows of a group have blocks for all tokens that a window has not passed."""
    h = head(heads, g)
    return finds(h) and not has_states(h) and not needs_all(h)


# -- windows -------------------------------------------------------------------------------------------
#
# A token at position p sees the tokens [p - WINDOW + 1, p] and those of the first SINKS blocks. The window has passed
# the blocks [SINKS, first) of a sequence: its row has NONE there. Without a window, WINDOW and ``first`` are 0.


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
