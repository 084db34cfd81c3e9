"""Groups of recurrent layers. A block is the state after a prefix. States are kept at snapshots and at the end of a
sequence.

The state after n tokens lies in the first entry of the row that is not NONE, at or after column (n - 1) // T. The last
column always has one, the running state. It moves on with the sequence, unless its column is a snapshot, or others hold
or find it. Others find snapshots, and the state after the last full block that a prompt can reuse. A commit gives back
the entries before the column of the committed tokens.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.jit import jit
from kvpool.state.growth import gap_of, make_writable, note_dropped, private_copy, restore_marked, rewinding, unfull
from kvpool.state.policies.policy import FRONT, free_blocks
from kvpool.state.records import (
    BAD_COUNT,
    DEVICE,
    KEYED,
    NONE,
    PASSED,
    PUBLISHED,
    TOO_LONG,
    blocks_of,
    drop_reference,
    head,
    no_extra,
    row_extra_of,
    row_tokens_of,
    sequences_of,
    table_of,
)
from kvpool.state.requests import blocks_for, keeps_state, note, state_at
from kvpool.state.sequences import give_columns, slot_of, stream_of, within
from kvpool.state.tiers import WILL_WRITE, WROTE, emit_access, forget, take_for

# -- growth ------------------------------------------------------------------------------------------


@jit(forceinline=True)
def _moves_on(h, b):
    """Whether only its sequence holds the running state in block ``b``, and nobody can find it."""
    return blocks_of(h)[b].word == 1 and not blocks_of(h)[b].flags & PUBLISHED


@jit(forceinline=True)
def _is_copied(h, sequence, b):
    """Whether the running state in block ``b`` is copied before the next token. A state is written as a whole, so no
    reader may hold it then."""
    return sequence.length % h.width != 0 and blocks_of(h)[b].word != 1


@jit
def _kept_states(h, first, end):
    """How many of the columns [first, end) keep their state."""
    return end // h.snapshot - first // h.snapshot if h.snapshot else 0


@jit
def _growth_of(h, sequence, row, count):
    """How many blocks it takes to grow one sequence, and whether one of them is a copy of its running state."""
    last = sequence.blocks - 1
    columns = blocks_for(h, sequence.length + count)
    if last < 0:
        return 1 + _kept_states(h, 0, columns - 1), False
    b = np.int64(row[last])
    copied = _is_copied(h, sequence, b)
    need = _kept_states(h, last, columns - 1)
    if columns - 1 > last and not copied and not _moves_on(h, b) and not keeps_state(h, last, NONE):
        need += 1
    return need + (1 if copied else 0), copied


@jit
def need_alone(h, slot, count):
    """The states that a sequence has after it appended ``count`` tokens, if it is alone in the pool: it copies nothing
    then, and only what others can find keeps its running state from moving on."""
    sequence, row = sequences_of(h)[slot], table_of(h)[slot]
    last, columns = sequence.blocks - 1, blocks_for(h, sequence.length + count)
    if last < 0:
        return 1 + _kept_states(h, 0, columns - 1) if count else np.int64(0)
    held = np.int64(0)
    for i in range(last + 1):
        held += 1 if row[i] != NONE else 0
    published = blocks_of(h)[row[last]].flags & PUBLISHED
    stays = columns - 1 > last and published and not keeps_state(h, last, NONE)
    return held + _kept_states(h, last, columns - 1) + (1 if stays else 0)


@jit
def append_need(h, ids, counts):
    """The blocks that appending ``counts`` tokens takes, with copies of shared states, or the error. The ids were
    checked.

    Drops the holds on states that are copied one after the other, as the append will, and restores them.
    """
    blocks, sequences = blocks_of(h), sequences_of(h)
    for i in range(ids.shape[0]):
        if blocks_for(h, sequences[slot_of(ids[i])].length + counts[i]) > h.columns:
            h.detail = i
            return np.int64(TOO_LONG)
    need = np.int64(0)
    for i in range(ids.shape[0]):
        slot = slot_of(ids[i])
        if counts[i] > 0:
            more, copied = _growth_of(h, sequences[slot], table_of(h)[slot], counts[i])
            need += more
            if copied:
                drop_reference(blocks, unfull(h, slot))
                sequences[slot].mark = 1
    restore_marked(h, ids)
    return need


@jit
def _open_column(h, slot, i):
    """The block of a new column: that of the running state, if it moves on, else a new one."""
    blocks, sequence, row = blocks_of(h), sequences_of(h)[slot], table_of(h)[slot]
    b = np.int64(row[i - 1]) if i > 0 else np.int64(NONE)
    if b != NONE and not keeps_state(h, i - 1, NONE) and _moves_on(h, b):
        row[i - 1] = NONE
        blocks[b].flags &= ~KEYED
        return b
    return take_for(h, sequence)


@jit
def append(h, ids, counts, tokens):
    """Grow each sequence by its count of ``tokens`` (int32, the tokens of all sequences in order). There is room: see
    ``append_need``."""
    start = 0
    for k in range(ids.shape[0]):
        slot = slot_of(ids[k])
        sequence, stream = sequences_of(h)[slot], stream_of(h, slot)
        if counts[k] and (
            sequence.forked or (sequence.blocks and _is_copied(h, sequence, table_of(h)[slot, sequence.blocks - 1]))
        ):
            make_writable(h, slot, stream)
        note(h, slot, sequence.length, tokens, no_extra(h), start, counts[k])
        sequence.length += counts[k]
        for i in range(sequence.blocks, blocks_for(h, sequence.length)):
            table_of(h)[slot, i] = _open_column(h, slot, i)
            # Others may have read the state that moves on.
            emit_access(h, WILL_WRITE, stream, np.int64(table_of(h)[slot, i]))
        sequence.blocks = blocks_for(h, sequence.length)
        start += counts[k]


# -- rewind and keep -----------------------------------------------------------------------------------


@jit
def _written(h, slot, length):
    """The column of the state with which a shortened sequence continues, NONE if nothing is left. Also whether that
    state has to be written again."""
    at = state_at(h, slot, length)
    return at, at != length // h.width - 1


@jit
def rewind_need(h, ids, counts):
    """The blocks that dropping the last ``counts`` tokens of each sequence takes for copies, or the error. The ids were
    checked."""
    blocks = blocks_of(h)
    for k in range(ids.shape[0]):
        sequence = sequences_of(h)[slot_of(ids[k])]
        if counts[k] > sequence.length - sequence.committed:
            too_many = counts[k] > sequence.length
            h.detail, h.bound = k, sequence.length if too_many else sequence.length - sequence.committed
            return np.int64(BAD_COUNT) if too_many else np.int64(PASSED)
    need, free = np.int64(0), np.int64(free_blocks(h, DEVICE))
    for k in range(ids.shape[0]):
        slot = slot_of(ids[k])
        if counts[k] == 0:
            continue
        length, row = sequences_of(h)[slot].length - counts[k], table_of(h)[slot]
        at, written = _written(h, slot, length)
        for i in range(blocks_for(h, length), sequences_of(h)[slot].blocks):
            free += 1 if row[i] != NONE and i != at and blocks[row[i]].word == 1 else 0
        need += 1 if written and blocks[row[at]].word != 1 else 0
        if need > free:
            return within(h, need, free)
    return need


@jit
def _own(h, b, stream):
    """The block to which a sequence writes its state again: its own, or a copy if others hold it too."""
    blocks = blocks_of(h)
    if blocks[b].word != 1:
        if blocks[b].ticket != h.ticket:  # the engine did not write what this same call has copied there
            emit_access(h, WROTE, stream, b)
        b = private_copy(h, b, h.width)
    elif blocks[b].flags & PUBLISHED:  # by a fork that has committed it, and has gone
        forget(h, b, NONE)
    blocks[b].flags &= ~KEYED
    emit_access(h, WILL_WRITE, stream, b)
    return b


@jit
def _rewind_one(h, slot, count, stream):
    sequence, row = sequences_of(h)[slot], table_of(h)[slot]
    length = sequence.length - count
    columns, full = blocks_for(h, length), length // h.width
    at, written = _written(h, slot, length)
    state = np.int64(NONE)
    if written:
        state = np.int64(row[at])
        row[at] = NONE
    give_columns(h, slot, columns, sequence.blocks, FRONT)
    if written:
        row[columns - 1] = _own(h, state, stream)
    sequence.length, sequence.blocks, sequence.reused = length, columns, min(sequence.reused, full)
    note_dropped(sequence, count)
    if sequence.duplicates >= full:
        sequence.duplicates = NONE


rewind = rewinding(_rewind_one)


@jit
def keep_need(h, ids, drafts, accepted, counts, dropped):
    """The blocks that ``keep`` takes for copies, or the error. Called after ``growth.draft_error``. ``dropped`` is
    ``drafts - counts``."""
    need = rewind_need(h, ids, dropped)
    if need < 0:
        return need
    start, shared = 0, 0
    for k in range(ids.shape[0]):
        slot, gap = slot_of(ids[k]), gap_of(accepted, start, counts[k])
        base, row = sequences_of(h)[slot].length - drafts[k], table_of(h)[slot]
        start += counts[k]
        if gap == counts[k]:
            continue
        at, written = _written(h, slot, base + counts[k])
        for i in range((base + gap) // h.width, at + (0 if written else 1)):
            shared += 1 if row[i] != NONE and blocks_of(h)[row[i]].word != 1 else 0
    return within(h, need + shared, free_blocks(h, DEVICE)) if shared else need


@jit
def accept_drafts(h, ids, drafts, accepted, counts, dropped):
    """Of the last ``drafts`` tokens of each sequence, keep its next ``counts`` of ``accepted``, which are indices among
    them in rising order.

    ``keep_need`` has found it possible. No bytes move: the engine writes the states of columns whose tokens have
    changed again.
    """
    rewind(h, ids, dropped)
    start = 0
    for k in range(ids.shape[0]):
        slot, gap = slot_of(ids[k]), gap_of(accepted, start, counts[k])
        sequence, row, stream = sequences_of(h)[slot], table_of(h)[slot], stream_of(h, slot)
        base = sequence.length - counts[k]
        for j in range(gap, counts[k]):
            row_tokens_of(h)[slot, base + j] = row_tokens_of(h)[slot, base + accepted[start + j]]
            if h.has_extra:
                row_extra_of(h)[slot, base + j] = row_extra_of(h)[slot, base + accepted[start + j]]
        for i in range((base + gap) // h.width, sequence.blocks if gap < counts[k] else 0):
            if row[i] != NONE:
                row[i] = _own(h, np.int64(row[i]), stream)
        start += counts[k]


# -- what engines ask ------------------------------------------------------------------------------------


@jit
def state_blocks(heads, g, rows, out):
    """The blocks of the states after the committed tokens and after all tokens of these rows, into ``out`` int32[n, 2].
    NONE for 0 tokens."""
    h = head(heads, g)
    for k in range(rows.shape[0]):
        sequence = sequences_of(h)[rows[k]]
        for j, count in ((0, np.int64(sequence.committed)), (1, np.int64(sequence.length))):
            at = state_at(h, rows[k], count)
            out[k, j] = table_of(h)[rows[k], at] if at != NONE else NONE
