"""Groups of recurrent layers: a block is the state behind a prefix, kept at snapshots and at the end of a sequence.

The state behind n tokens lies in the first entry of the row that is not NONE at or behind column (n - 1) // T. The last column always has
one, the running state: it moves on with the sequence unless its column is a snapshot, or somebody else has or finds it. Others find
snapshots, and the state behind the last full block that a prompt can reuse. Entries below the column of the committed tokens go back at
commit.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.accesses import ACCESSED, WILL_WRITE, WROTE, emit_access
from kvpool.state.admission import SHORT_OF_BLOCKS
from kvpool.state.blocks import (
    C_COPIED,
    C_PASSED,
    COLUMNS,
    DETAIL,
    DETAIL2,
    DEVICE,
    HAS_EXTRA,
    KEYED,
    NONE,
    PUBLISHED,
    REMOVALS,
    SNAPSHOT,
    TICKET,
    WIDTH,
    add_reference,
    blocks_of,
    counters_of,
    drop_reference,
    extra_of,
    lists_of,
    row_extra_of,
    row_tokens_of,
    sequences_of,
    table_of,
)
from kvpool.state.drafts import gap_of
from kvpool.state.growth import PASSED, TOO_LONG
from kvpool.state.live import slot_of, stream_of
from kvpool.state.lru import free_blocks
from kvpool.state.noted import name, note
from kvpool.state.requests import blocks_for, keeps_state
from kvpool.state.sharing import make_writable, private_copy, restore_marked, unfull
from kvpool.state.storing import BAD_COUNT, publish_range, retry_duplicates
from kvpool.state.tiers import forget, let_go, shelve, take_device

# -- growth ------------------------------------------------------------------------------------------


@jit(forceinline=True)
def _moves_on(h, b):
    """Whether the running state in block ``b`` is its sequence's alone: nobody else holds it, and nobody finds it."""
    return blocks_of(h)[b].word == 1 and not blocks_of(h)[b].flags & PUBLISHED


@jit(forceinline=True)
def _is_copied(h, sequence, b):
    """Whether the running state in block ``b`` is copied before the next token: it is written as a whole, so that no reader may hold it."""
    return sequence.length % h[WIDTH] != 0 and blocks_of(h)[b].word != 1


@jit
def _kept_states(h, first, end):
    """How many of the columns [first, end) keep their state."""
    return end // h[SNAPSHOT] - first // h[SNAPSHOT] if h[SNAPSHOT] else 0


@jit
def _growth_of(h, sequence, row, count):
    """Blocks that growing one sequence takes, and whether one of them is a copy of its running state."""
    last = sequence.blocks - 1
    columns = blocks_for(h, sequence.length + count)
    if last < 0:
        return 1 + _kept_states(h, 0, columns - 1), False
    b = row[last]
    copied = _is_copied(h, sequence, b)
    need = _kept_states(h, last, columns - 1)
    if columns - 1 > last and not copied and not _moves_on(h, b) and not keeps_state(h, last, NONE):
        need += 1
    return need + (1 if copied else 0), copied


@jit
def growth(h, ids, counts):
    """Blocks that appending ``counts`` tokens takes, copies of shared states included, or the error; ids were checked.

    Holds on what is copied are dropped one after the other, as the append will, and restored.
    """
    blocks, sequences = blocks_of(h), sequences_of(h)
    for i in range(ids.shape[0]):
        if blocks_for(h, sequences[slot_of(h, ids[i])].length + counts[i]) > h[COLUMNS]:
            h[DETAIL] = i
            return np.int64(TOO_LONG)
    need = np.int64(0)
    for i in range(ids.shape[0]):
        slot = slot_of(h, ids[i])
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
    """The block of a new column: the running state's, if it moves on, else a new one."""
    blocks, sequence, row = blocks_of(h), sequences_of(h)[slot], table_of(h)[slot]
    b = np.int64(row[i - 1]) if i > 0 else np.int64(NONE)
    if b != NONE and not keeps_state(h, i - 1, NONE) and _moves_on(h, b):
        row[i - 1] = NONE
        blocks[b].flags &= ~KEYED
        return b
    b = take_device(h)
    add_reference(blocks, b)
    blocks[b].namespace, blocks[b].priority, blocks[b].ttl = sequence.namespace, sequence.priority, sequence.ttl
    return b


@jit
def append(h, ids, counts, tokens):
    """Grow each sequence by its count of ``tokens`` (int32, one after the other), for which there is room: see ``growth``."""
    start = 0
    for k in range(ids.shape[0]):
        slot = slot_of(h, ids[k])
        sequence, stream = sequences_of(h)[slot], stream_of(h, slot)
        if counts[k] and (sequence.forked or (sequence.blocks and _is_copied(h, sequence, table_of(h)[slot, sequence.blocks - 1]))):
            make_writable(h, slot, stream)
        note(h, slot, sequence.length, tokens, extra_of(h)[0][:0], start, counts[k])
        sequence.length += counts[k]
        for i in range(sequence.blocks, blocks_for(h, sequence.length)):
            table_of(h)[slot, i] = _open_column(h, slot, i)
            # Others may have read the state that moves on.
            emit_access(h, WILL_WRITE, stream, table_of(h)[slot, i])
        sequence.blocks = blocks_for(h, sequence.length)
        start += counts[k]


# -- commit ------------------------------------------------------------------------------------------


@jit(forceinline=True)
def state_at(h, slot, count):
    """The column of the state behind ``count`` tokens of a sequence, NONE where no token was counted."""
    i = (count - 1) // h[WIDTH]
    while i >= 0 and table_of(h)[slot, i] == NONE:
        i += 1
    return i


@jit
def commit(h, ids, counts):
    """Publish the states in the first ``counts`` tokens of each sequence, which ``storing.commit_error`` has found possible."""
    for k in range(ids.shape[0]):
        slot = slot_of(h, ids[k])
        sequence, row = sequences_of(h)[slot], table_of(h)[slot]
        retry_duplicates(h, slot)
        before, committed = np.int64(sequence.committed), counts[k] if counts.shape[0] else np.int64(sequence.length)
        stream = stream_of(h, slot)
        for i in range(before // h[WIDTH], state_at(h, slot, committed) + 1 if committed > before else 0):
            if row[i] != NONE:
                emit_access(h, WROTE, stream, row[i])
        if sequence.duplicates == NONE:
            sequence.removals = h[REMOVALS]
        first, last = before // h[WIDTH], committed // h[WIDTH]
        name(h, slot, first, last)
        sequence.committed = committed
        publish_range(h, slot, first, last)
        _give_passed(h, slot, before, stream)


@jit
def _give_passed(h, slot, before, stream):
    """Give back the states that nobody goes on from any more, last first; ``before`` tokens had been committed."""
    sequence, row = sequences_of(h)[slot], table_of(h)[slot]
    last = (sequence.committed - 1) // h[WIDTH]
    for i in range(last - 1, max((before - 1) // h[WIDTH], 0) - 1, -1):
        if row[i] != NONE:
            emit_access(h, ACCESSED, stream, row[i])
            let_go(h, row[i])
            row[i] = NONE
            counters_of(h)[C_PASSED] += 1
    if sequence.duplicates != NONE:
        sequence.duplicates = max(sequence.duplicates, last)


# -- rewind and keep -----------------------------------------------------------------------------------


@jit
def _written(h, slot, length):
    """The column of the state that a shortened sequence runs on with, NONE where nothing is left; whether it has to be written again."""
    at = state_at(h, slot, length)
    return at, at != NONE and (length % h[WIDTH] != 0 or at != length // h[WIDTH] - 1)


@jit
def rewind_need(h, ids, counts):
    """Blocks that dropping the last ``counts`` tokens of each sequence takes for copies, or the error; ids were checked."""
    blocks = blocks_of(h)
    for k in range(ids.shape[0]):
        sequence = sequences_of(h)[slot_of(h, ids[k])]
        if counts[k] > sequence.length - sequence.committed:
            too_many = counts[k] > sequence.length
            h[DETAIL], h[DETAIL2] = k, sequence.length if too_many else sequence.length - sequence.committed
            return np.int64(BAD_COUNT) if too_many else np.int64(PASSED)
    need, free = np.int64(0), np.int64(free_blocks(lists_of(h), DEVICE))
    for k in range(ids.shape[0]):
        slot = slot_of(h, ids[k])
        if counts[k] == 0:
            continue
        length, row = sequences_of(h)[slot].length - counts[k], table_of(h)[slot]
        at, written = _written(h, slot, length)
        for i in range(blocks_for(h, length), sequences_of(h)[slot].blocks):
            free += 1 if row[i] != NONE and i != at and blocks[row[i]].word == 1 else 0
        need += 1 if written and blocks[row[at]].word != 1 else 0
        if need > free:
            h[DETAIL], h[DETAIL2] = need, free
            return np.int64(SHORT_OF_BLOCKS)
    return need


@jit
def _own(h, b, stream):
    """The block that a sequence writes its state to again: its own, or a copy where others hold it too."""
    blocks = blocks_of(h)
    if blocks[b].word != 1:
        if blocks[b].ticket != h[TICKET]:  # what this very call has copied there was not written by the engine
            emit_access(h, WROTE, stream, b)
        b = private_copy(h, b, h[WIDTH])
        counters_of(h)[C_COPIED] += 1
    elif blocks[b].flags & PUBLISHED:  # by a fork that has committed it, and has gone
        forget(h, b, NONE)
    blocks[b].flags &= ~KEYED
    emit_access(h, WILL_WRITE, stream, b)
    return b


@jit
def _rewind_one(h, slot, count, stream):
    blocks, sequence, row = blocks_of(h), sequences_of(h)[slot], table_of(h)[slot]
    length = sequence.length - count
    columns, full = blocks_for(h, length), length // h[WIDTH]
    at, written = _written(h, slot, length)
    for i in range(sequence.blocks - 1, columns - 1, -1):
        if row[i] != NONE and i != at:
            emit_access(h, ACCESSED, stream, row[i])
            if drop_reference(blocks, row[i]) == 0:
                shelve(h, row[i], True)
            row[i] = NONE
    if written:
        b = row[at]
        row[at] = NONE
        row[columns - 1] = _own(h, b, stream)
    sequence.length, sequence.blocks, sequence.reused = length, columns, min(sequence.reused, full)
    if sequence.duplicates >= full:
        sequence.duplicates = NONE


@jit
def rewind(h, ids, counts):
    """Drop the last ``counts`` tokens of each sequence, which ``rewind_need`` has found possible."""
    for k in range(ids.shape[0]):
        slot = slot_of(h, ids[k])
        stream = stream_of(h, slot)
        if counts[k] > 0:
            _rewind_one(h, slot, counts[k], stream)


@jit
def keep_need(h, ids, drafts, accepted, counts, dropped):
    """Blocks that ``keep`` takes for copies, or the error, after ``drafts.draft_error``; ``dropped`` is ``drafts - counts``."""
    need = rewind_need(h, ids, dropped)
    if need < 0:
        return need
    start, shared = 0, 0
    for k in range(ids.shape[0]):
        slot, gap = slot_of(h, ids[k]), gap_of(accepted, start, counts[k])
        base, row = sequences_of(h)[slot].length - drafts[k], table_of(h)[slot]
        start += counts[k]
        if gap == counts[k]:
            continue
        at, written = _written(h, slot, base + counts[k])
        for i in range((base + gap) // h[WIDTH], at + (0 if written else 1)):
            shared += 1 if row[i] != NONE and blocks_of(h)[row[i]].word != 1 else 0
    free = free_blocks(lists_of(h), DEVICE)
    if shared and need + shared > free:
        h[DETAIL], h[DETAIL2] = need + shared, free
        return np.int64(SHORT_OF_BLOCKS)
    return need + shared


@jit
def keep(h, ids, drafts, accepted, counts, dropped):
    """Of the last ``drafts`` tokens of each sequence keep its next ``counts`` of ``accepted``, indices among them in rising order.

    ``keep_need`` has found it possible. No bytes move: the states of columns whose tokens are others now are written again.
    """
    rewind(h, ids, dropped)
    start = 0
    for k in range(ids.shape[0]):
        slot, gap = slot_of(h, ids[k]), gap_of(accepted, start, counts[k])
        sequence, row, stream = sequences_of(h)[slot], table_of(h)[slot], stream_of(h, slot)
        base = sequence.length - counts[k]
        for j in range(gap, counts[k]):
            row_tokens_of(h)[slot, base + j] = row_tokens_of(h)[slot, base + accepted[start + j]]
            if h[HAS_EXTRA]:
                row_extra_of(h)[slot, base + j] = row_extra_of(h)[slot, base + accepted[start + j]]
        for i in range((base + gap) // h[WIDTH], sequence.blocks if gap < counts[k] else 0):
            if row[i] != NONE:
                row[i] = _own(h, np.int64(row[i]), stream)
        start += counts[k]


# -- what engines ask ------------------------------------------------------------------------------------


@jit
def state_blocks(h, rows, out):
    """The blocks of the states behind the committed and behind all tokens of these rows, into ``out`` int32[n, 2]; NONE for no token."""
    for k in range(rows.shape[0]):
        sequence = sequences_of(h)[rows[k]]
        for j, count in ((0, np.int64(sequence.committed)), (1, np.int64(sequence.length))):
            at = state_at(h, rows[k], count)
            out[k, j] = table_of(h)[rows[k], at] if at != NONE else NONE
