"""Blocks that several sequences hold, and the private copy that one of them takes before it writes."""

from __future__ import annotations

from kvpool.jit import jit
from kvpool.state.accesses import ACCESSED, WILL_WRITE, WROTE, emit_access
from kvpool.state.kinds import has_states
from kvpool.state.records import (
    NONE,
    REFS,
    WITHIN,
    add_reference,
    blocks_of,
    counters_of,
    drop_reference,
    sequences_of,
    table_of,
)
from kvpool.state.sequences import slot_of
from kvpool.state.tiers import copy_tokens, emit_move, take_for


@jit
def private_copy(h, b, count):
    """Take a fresh block, and copy the first ``count`` tokens of ``b`` into it. Other holders keep ``b``."""
    blocks = blocks_of(h)
    fresh = take_for(h, blocks[b])
    copy_tokens(h, b, fresh, count)
    emit_move(h, b, fresh, count, WITHIN)
    drop_reference(blocks, b)
    counters_of(h).copied_blocks += 1
    return fresh


@jit
def unfull(h, slot):
    """The block into which the next token of a sequence goes, NONE if that is a new one."""
    sequence = sequences_of(h)[slot]
    return table_of(h)[slot, sequence.blocks - 1] if sequence.length % h.width else NONE


@jit
def copies(h, ids, counts):
    """How many of these sequences must copy their last block before they append ``counts`` tokens. The ids were
    checked.

    The last holder of a block writes in place. So this drops the holds one after the other, as the append will, and
    restores them.
    """
    blocks, sequences = blocks_of(h), sequences_of(h)
    n = 0
    for i in range(ids.shape[0]):
        slot = slot_of(ids[i])
        b = unfull(h, slot)
        if counts[i] > 0 and b != NONE and blocks[b].word & REFS > 1:
            drop_reference(blocks, b)
            sequences[slot].mark = 1
            n += 1
    restore_marked(h, ids)
    return n


@jit
def restore_marked(h, ids):
    """Add the references again that a count has dropped: those of marked sequences on their last block. Removes the
    marks."""
    for i in range(ids.shape[0]):
        slot = slot_of(ids[i])
        if sequences_of(h)[slot].mark:
            add_reference(blocks_of(h), unfull(h, slot))
            sequences_of(h)[slot].mark = 0


@jit
def make_writable(h, slot, stream):
    """Before a forked sequence appends, make its unfull last block its own: by a copy, or in place for the last holder.

    A state that a reader holds is copied too.
    """
    blocks, sequence, row = blocks_of(h), sequences_of(h)[slot], table_of(h)[slot]
    sequence.forked = 0
    b = unfull(h, slot)
    if b == NONE:
        return
    whole = has_states(h)  # a state is written as a whole, also after a rewind to the committed tokens
    if blocks[b].word & REFS > 1 or (whole and blocks[b].word != 1):
        # The copy reads what the stream wrote, whether a call has said so or not. A later writer of the block waits for
        # what the stream has read there.
        emit_access(h, WROTE if whole or sequence.committed < sequence.length else ACCESSED, stream, b)
        b = private_copy(h, b, h.width if whole else sequence.length % h.width)
        row[sequence.blocks - 1] = b
    emit_access(h, WILL_WRITE, stream, b)
