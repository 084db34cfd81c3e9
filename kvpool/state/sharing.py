"""Blocks that several sequences hold: the private copy that one of them takes before it writes, forks, and the step in
which beams change places."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.jit.intrinsics import array_at
from kvpool.state.accesses import ACCESSED, FOLLOWS, WILL_WRITE, WROTE, emit_access
from kvpool.state.commit import give_back, retry_duplicates, stored_tail
from kvpool.state.kinds import has_states
from kvpool.state.records import (
    NONE,
    REFS,
    SEQUENCE,
    WITHIN,
    add_reference,
    blocks_of,
    counters_of,
    drop_reference,
    rows_of,
    sequences_of,
    table_of,
)
from kvpool.state.row_tokens import copy_row, reorder_rows
from kvpool.state.sequences import slot_of, stream_of
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


# -- forks and beams -----------------------------------------------------------------------------------


@jit(forceinline=True)
def _become(sequences, row, others, other):
    """Copy all fields of a running sequence, except the generation of its row."""
    generation = sequences[row].generation
    sequences[row] = others[other]
    sequences[row].generation = generation


@jit
def _follow(h, stream, other):
    """Have ``stream``, which takes blocks over from another stream, wait for that stream."""
    if stream != other and stream != NONE and other != NONE:
        emit_access(h, FOLLOWS, stream, other)


@jit
def fork(h, ids, out):
    """Make sequences ``out`` int64[m, n] that continue ``ids`` int64[m]. There are rows for them, and the ids were
    checked.

    They hold the same blocks, also a last one that is not full. That one is copied when one of its holders writes.
    """
    top = h.free_rows
    sequences, table = sequences_of(h), table_of(h)
    for i in range(out.shape[0]):
        slot = slot_of(ids[i])
        parent = sequences[slot]
        parent.forked = 1
        for k in range(out.shape[1]):
            top -= 1
            row = rows_of(h)[top]
            _become(sequences, row, sequences, slot)
            if h.stream != NONE:
                sequences[row].stream = h.stream
            for j in range(parent.blocks):
                table[row, j] = table[slot, j]
                if table[row, j] != NONE:
                    add_reference(blocks_of(h), np.int64(table[row, j]))
            if has_states(h):
                copy_row(h, slot, row)
            out[i, k] = (np.int64(sequences[row].generation) << 32) | row
        if out.shape[1]:
            _follow(h, h.stream, parent.stream)
    h.free_rows = top


@jit
def reorder(h, ids, parents, store, before, scratch):
    """Sequence ``ids[i]`` continues from the present state of ``ids[parents[i]]``. Content from which nobody continues
    is given back, as in a release.

    Scratch memory: SEQUENCE[n] at the address ``before``, and ``scratch`` int64[3, n]. The ids were checked.
    """
    scratch[:] = 0
    sequences, old = sequences_of(h), array_at(before, (ids.shape[0],), SEQUENCE)
    slots, children, longest = scratch[0], scratch[1], 0
    for i in range(ids.shape[0]):
        slots[i] = slot_of(ids[i])
        children[parents[i]] += 1
        stream_of(h, slots[i])
        longest = max(longest, np.int64(sequences[slots[i]].blocks))
    for i in range(ids.shape[0]):
        if store and children[i] == 0:
            retry_duplicates(h, slots[i])
    for j in range(longest - 1, -1, -1):
        _reorder_column(h, j, slots, parents, store, scratch[2])
    if has_states(h):
        reorder_rows(h, slots, parents, scratch[2])
    for i in range(ids.shape[0]):
        old[i] = sequences[slots[i]]
    for i in range(ids.shape[0]):
        parent = old[parents[i]]
        _follow(h, np.int64(parent.stream), np.int64(old[i].stream))
        _become(sequences, slots[i], old, parents[i])
        if children[parents[i]] > 1:
            sequences[slots[i]].forked = 1


@jit
def _reorder_column(h, j, slots, parents, store, column):
    """Block ``j`` of each row becomes its parent's. New holds come first, so that only blocks from which nobody
    continues are let go of."""
    table = table_of(h)
    for i in range(slots.shape[0]):
        column[i] = table[slots[i], j]
    for i in range(slots.shape[0]):
        b = column[parents[i]]
        if b != column[i]:
            table[slots[i], j] = b
            if b != NONE:
                add_reference(blocks_of(h), b)
    for i in range(slots.shape[0]):
        if column[i] != NONE and column[i] != column[parents[i]]:
            stream = np.int64(sequences_of(h)[slots[i]].stream)
            give_back(h, slots[i], j, column[i], stream, store, stored_tail(h, slots[i], store))
