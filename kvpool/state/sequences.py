"""Live sequences: found by id, checked before a call changes anything, and each with the stream on which the engine
uses it."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.accesses import ACCESSED, FOLLOWS, emit_access
from kvpool.state.codes import DUPLICATE, FAILED, IS_SWAPPED, NOT_SWAPPED, SHORT_OF_BLOCKS, UNKNOWN
from kvpool.state.policy import on_release
from kvpool.state.records import LIVE, NONE, SWAPPED, blocks_of, drop_reference, head, sequences_of, table_of


@jit(forceinline=True)
def slot_of(sequence_id):
    """The row of a sequence whose id was checked."""
    return sequence_id & 0xFFFFFFFF


@jit
def row_of(h, sequence_id):
    """The row of a sequence, running or swapped out, or NONE."""
    slot = slot_of(sequence_id)
    if sequence_id < 0 or slot >= h.sequences:
        return NONE
    sequence = sequences_of(h)[slot]
    return slot if sequence.live & (LIVE | SWAPPED) and sequence.generation == sequence_id >> 32 else NONE


@jit
def check_rows(h, ids, usable, kinds):
    """0 if all ids are different sequences of ``kinds`` (LIVE, SWAPPED or both), and, with ``usable``, none of them has
    lost a block. Else the error; ``detail`` has the place of the offender."""
    sequences = sequences_of(h)
    error = 0
    n = 0
    while n < ids.shape[0]:
        slot = row_of(h, ids[n])
        if slot == NONE:
            error = UNKNOWN
        elif not sequences[slot].live & kinds:
            error = IS_SWAPPED if kinds == LIVE else NOT_SWAPPED
        elif sequences[slot].mark:
            error = DUPLICATE
        elif usable and sequences[slot].failed:
            error = FAILED
        if error:
            h.detail = n
            break
        sequences[slot].mark = 1
        n += 1
    for i in range(n):
        sequences[slot_of(ids[i])].mark = 0
    return error


@jit
def check(h, ids, usable):
    """``check_rows`` of running sequences."""
    return check_rows(h, ids, usable, LIVE)


@jit
def refuse(heads, g, error):
    """Put the details of an error from group ``g`` into the first header, where the caller looks for them. Returns the
    error."""
    first, refused = head(heads, 0), head(heads, g)
    first.detail, first.bound, first.detail_group = refused.detail, refused.bound, g
    return np.int64(error)


@jit
def check_kinds(heads, ids, usable, kinds):
    """``check_rows`` for all groups. They have the same rows."""
    error = check_rows(head(heads, 0), ids, usable, np.int64(kinds))
    return refuse(heads, 0, error) if error else np.int64(0)


@jit
def check_ids(heads, ids, usable):
    """``check_kinds`` of running sequences. This is where a sequence that lost a block to a refused copy is refused."""
    return check_kinds(heads, ids, usable, LIVE)


@jit
def follow(h, ids):
    """Note that the engine continues with these sequences, which were checked, on the stream of the call."""
    for i in range(ids.shape[0]):
        stream_of(h, slot_of(ids[i]))


@jit
def use(heads, ids):
    """``follow`` in all groups. Returns 0, or an error with nothing changed."""
    error = check_ids(heads, ids, True)
    if not error:
        for g in range(heads.shape[0]):
            follow(head(heads, g), ids)
    return error


@jit
def stream_of(h, slot):
    """The stream of a sequence in this call: the one that the call names, which then waits for the last one used.
    Without a name, the last one used."""
    sequence = sequences_of(h)[slot]
    if h.stream != NONE and h.stream != sequence.stream:
        if sequence.stream != NONE:
            emit_access(h, FOLLOWS, h.stream, sequence.stream)
        sequence.stream = h.stream
    return np.int64(sequence.stream)


@jit
def within(h, need, free):
    """``need``, if there are so many ``free`` blocks. Else SHORT_OF_BLOCKS, with both numbers as its details."""
    if need <= free:
        return np.int64(need)
    h.detail, h.bound = need, free
    return np.int64(SHORT_OF_BLOCKS)


@jit
def give_columns(h, slot, first, last, front):
    """Give back the blocks in the columns [first, last) of a row, the last one first. Work that is enqueued on the
    sequence's stream may still use them. Returns how many there were."""
    row, stream, count = table_of(h)[slot], stream_of(h, slot), 0
    for i in range(last - 1, first - 1, -1):
        if row[i] != NONE:
            b, row[i] = np.int64(row[i]), NONE
            emit_access(h, ACCESSED, stream, b)
            if drop_reference(blocks_of(h), b) == 0:
                on_release(h, b, front)
            count += 1
    return count
