"""Groups of recurrent layers. A block is the state after a prefix. States are kept at snapshots and at the end of a
sequence.

The state after n tokens lies in the first entry of the row that is not NONE, at or after column (n - 1) // T. The last
column always has one, the running state. It moves on with the sequence, unless its column is a snapshot, or others hold
or find it. Others find snapshots, and the state after the last full block that a prompt can reuse. A commit gives back
the entries before the column of the committed tokens.
"""

from __future__ import annotations

from kvpool.common.jit import inline, jit
from kvpool.state.growth import gap_of, make_writable, note_dropped, private_copy, restore_marked, rewinding, unfull
from kvpool.state.policies.block_lists import FRONT
from kvpool.state.policies.policy import free_blocks
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
    group_at,
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


@inline
def _moves_on(group, b):
    """Whether only its sequence holds the running state in block ``b``, and nobody can find it."""
    return blocks_of(group)[b].ref_word == 1 and not blocks_of(group)[b].flags & PUBLISHED


@inline
def _is_copied(group, sequence, b):
    """Whether the running state in block ``b`` is copied before the next token. A state is written as a whole, so no
    reader may hold it then."""
    return sequence.length % group.width != 0 and blocks_of(group)[b].ref_word != 1


@jit
def _kept_states(group, first, end):
    """How many of the columns [first, end) keep their state."""
    return end // group.snapshot - first // group.snapshot if group.snapshot else 0


@jit
def _growth_of(group, sequence, row, count):
    """How many blocks it takes to grow one sequence, and whether one of them is a copy of its running state."""
    last = sequence.blocks - 1
    columns = blocks_for(group, sequence.length + count)
    if last < 0:
        return 1 + _kept_states(group, 0, columns - 1), False
    b = row[last]
    copied = _is_copied(group, sequence, b)
    need = _kept_states(group, last, columns - 1)
    if columns - 1 > last and not copied and not _moves_on(group, b) and not keeps_state(group, last, NONE):
        need += 1
    return need + (1 if copied else 0), copied


@jit
def need_alone(group, slot, count):
    """The states that a sequence has after it appended ``count`` tokens, if it is alone in the pool: it copies nothing
    then, and only what others can find keeps its running state from moving on."""
    sequence, row = sequences_of(group)[slot], table_of(group)[slot]
    last, columns = sequence.blocks - 1, blocks_for(group, sequence.length + count)
    if last < 0:
        return 1 + _kept_states(group, 0, columns - 1) if count else 0
    held = 0
    for i in range(last + 1):
        held += 1 if row[i] != NONE else 0
    published = blocks_of(group)[row[last]].flags & PUBLISHED
    stays = columns - 1 > last and published and not keeps_state(group, last, NONE)
    return held + _kept_states(group, last, columns - 1) + (1 if stays else 0)


@jit
def append_need(group, ids, counts):
    """The blocks that appending ``counts`` tokens takes, with copies of shared states, or the error. The ids were
    checked.

    Drops the holds on states that are copied one after the other, as the append will, and restores them.
    """
    blocks, sequences = blocks_of(group), sequences_of(group)
    for i in range(len(ids)):
        if blocks_for(group, sequences[slot_of(ids[i])].length + counts[i]) > group.columns:
            group.detail = i
            return TOO_LONG
    need = 0
    for i in range(len(ids)):
        slot = slot_of(ids[i])
        if counts[i] > 0:
            more, copied = _growth_of(group, sequences[slot], table_of(group)[slot], counts[i])
            need += more
            if copied:
                drop_reference(blocks, unfull(group, slot))
                sequences[slot].mark = 1
    restore_marked(group, ids)
    return need


@jit
def _open_column(group, slot, i):
    """The block of a new column: that of the running state, if it moves on, else a new one."""
    blocks, sequence, row = blocks_of(group), sequences_of(group)[slot], table_of(group)[slot]
    b = row[i - 1] if i > 0 else NONE
    if b != NONE and not keeps_state(group, i - 1, NONE) and _moves_on(group, b):
        row[i - 1] = NONE
        blocks[b].flags &= ~KEYED
        return b
    return take_for(group, sequence)


@jit
def append(group, ids, counts, tokens):
    """Grow each sequence by its count of ``tokens`` (int32, the tokens of all sequences in order). There is room: see
    ``append_need``."""
    start = 0
    for k in range(len(ids)):
        slot = slot_of(ids[k])
        sequence, stream = sequences_of(group)[slot], stream_of(group, slot)
        if counts[k] and (
            sequence.forked
            or (sequence.blocks and _is_copied(group, sequence, table_of(group)[slot, sequence.blocks - 1]))
        ):
            make_writable(group, slot, stream)
        note(group, slot, sequence.length, tokens, no_extra(group), start, counts[k])
        sequence.length += counts[k]
        for i in range(sequence.blocks, blocks_for(group, sequence.length)):
            table_of(group)[slot, i] = _open_column(group, slot, i)
            # Others may have read the state that moves on.
            emit_access(group, WILL_WRITE, stream, table_of(group)[slot, i])
        sequence.blocks = blocks_for(group, sequence.length)
        start += counts[k]


# -- rewind and keep -----------------------------------------------------------------------------------


@jit
def _written(group, slot, length):
    """The column of the state with which a shortened sequence continues, NONE if nothing is left. Also whether that
    state has to be written again."""
    at = state_at(group, slot, length)
    return at, at != length // group.width - 1


@jit
def rewind_need(group, ids, counts):
    """The blocks that dropping the last ``counts`` tokens of each sequence takes for copies, or the error. The ids were
    checked."""
    blocks = blocks_of(group)
    for k in range(len(ids)):
        sequence = sequences_of(group)[slot_of(ids[k])]
        if counts[k] > sequence.length - sequence.committed:
            too_many = counts[k] > sequence.length
            group.detail, group.bound = k, sequence.length if too_many else sequence.length - sequence.committed
            return BAD_COUNT if too_many else PASSED
    need, free = 0, free_blocks(group, DEVICE)
    for k in range(len(ids)):
        slot = slot_of(ids[k])
        if counts[k] == 0:
            continue
        length, row = sequences_of(group)[slot].length - counts[k], table_of(group)[slot]
        at, written = _written(group, slot, length)
        for i in range(blocks_for(group, length), sequences_of(group)[slot].blocks):
            free += 1 if row[i] != NONE and i != at and blocks[row[i]].ref_word == 1 else 0
        need += 1 if written and blocks[row[at]].ref_word != 1 else 0
        if need > free:
            return within(group, need, free)
    return need


@jit
def _own(group, b, stream):
    """The block to which a sequence writes its state again: its own, or a copy if others hold it too."""
    blocks = blocks_of(group)
    if blocks[b].ref_word != 1:
        if blocks[b].ticket != group.ticket:  # the engine did not write what this same call has copied there
            emit_access(group, WROTE, stream, b)
        b = private_copy(group, b, group.width)
    elif blocks[b].flags & PUBLISHED:  # by a fork that has committed it, and has gone
        forget(group, b)
    blocks[b].flags &= ~KEYED
    emit_access(group, WILL_WRITE, stream, b)
    return b


@jit
def _rewind_one(group, slot, count, stream):
    sequence, row = sequences_of(group)[slot], table_of(group)[slot]
    length = sequence.length - count
    columns = blocks_for(group, length)
    at, written = _written(group, slot, length)
    state = NONE
    if written:
        state = row[at]
        row[at] = NONE
    give_columns(group, slot, columns, sequence.blocks, FRONT)
    if written:
        row[columns - 1] = _own(group, state, stream)
    note_dropped(group, sequence, count)


rewind = rewinding(_rewind_one)


@jit
def keep_need(group, ids, drafts, accepted, counts, dropped):
    """The blocks that ``keep`` takes for copies, or the error. Called after ``growth.draft_error``. ``dropped`` is
    ``drafts - counts``."""
    need = rewind_need(group, ids, dropped)
    if need < 0:
        return need
    start, shared = 0, 0
    for k in range(len(ids)):
        slot, gap = slot_of(ids[k]), gap_of(accepted, start, counts[k])
        base, row = sequences_of(group)[slot].length - drafts[k], table_of(group)[slot]
        start += counts[k]
        if gap == counts[k]:
            continue
        at, written = _written(group, slot, base + counts[k])
        for i in range((base + gap) // group.width, at + (0 if written else 1)):
            shared += 1 if row[i] != NONE and blocks_of(group)[row[i]].ref_word != 1 else 0
    return within(group, need + shared, free_blocks(group, DEVICE)) if shared else need


@jit
def accept_drafts(group, ids, drafts, accepted, counts, dropped):
    """Keep ``counts`` of the last ``drafts`` tokens of each sequence: those at the indices in ``accepted``, which rise.

    ``keep_need`` has found it possible. No bytes move: the engine writes the states of columns whose tokens have
    changed again.
    """
    rewind(group, ids, dropped)
    start = 0
    for k in range(len(ids)):
        slot, gap = slot_of(ids[k]), gap_of(accepted, start, counts[k])
        sequence, row, stream = sequences_of(group)[slot], table_of(group)[slot], stream_of(group, slot)
        base = sequence.length - counts[k]
        for j in range(gap, counts[k]):
            row_tokens_of(group)[slot, base + j] = row_tokens_of(group)[slot, base + accepted[start + j]]
            if group.has_extra:
                row_extra_of(group)[slot, base + j] = row_extra_of(group)[slot, base + accepted[start + j]]
        for i in range((base + gap) // group.width, sequence.blocks if gap < counts[k] else 0):
            if row[i] != NONE:
                row[i] = _own(group, row[i], stream)
        start += counts[k]


# -- for engines ------------------------------------------------------------------------------------


@jit
def state_blocks(groups, g, rows, out):
    """The blocks of the states after the committed tokens and after all tokens of these rows, into ``out`` int32[n, 2].
    NONE for 0 tokens."""
    group = group_at(groups, g)
    for k in range(len(rows)):
        sequence = sequences_of(group)[rows[k]]
        for j, count in ((0, sequence.committed), (1, sequence.length)):
            at = state_at(group, rows[k], count)
            out[k, j] = table_of(group)[rows[k], at] if at != NONE else NONE
