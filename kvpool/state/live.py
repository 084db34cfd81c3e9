"""Live sequences: found by id, checked before a call changes anything, and each with the stream that the engine uses it on."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.accesses import FOLLOWS, emit_access
from kvpool.state.blocks import DETAIL, DETAIL2, DETAIL_GROUP, LIVE, NONE, SEQUENCES, STREAM, sequences_of

UNKNOWN, DUPLICATE, FAILED = -3, -4, -5


@jit
def slot_of(h, sequence_id):
    """Row of a live sequence, or NONE."""
    slot = sequence_id & 0xFFFFFFFF
    if sequence_id < 0 or slot >= h[SEQUENCES]:
        return NONE
    sequence = sequences_of(h)[slot]
    return slot if sequence.live == LIVE and sequence.generation == sequence_id >> 32 else NONE


@jit
def check(h, ids, usable):
    """0 if all ids are live, distinct and (with ``usable``) have lost no block; else the error, and the offender's place in DETAIL."""
    sequences = sequences_of(h)
    error = 0
    n = 0
    while n < ids.shape[0]:
        slot = slot_of(h, ids[n])
        if slot == NONE:
            error = UNKNOWN
        elif sequences[slot].mark:
            error = DUPLICATE
        elif usable and sequences[slot].failed:
            error = FAILED
        if error:
            h[DETAIL] = n
            break
        sequences[slot].mark = 1
        n += 1
    for i in range(n):
        sequences[slot_of(h, ids[i])].mark = 0
    return error


@jit
def refuse(heads, g, error):
    """Put what group ``g`` says of an error into the first header, where the caller looks for it; returns the error."""
    heads[0, DETAIL], heads[0, DETAIL2], heads[0, DETAIL_GROUP] = heads[g, DETAIL], heads[g, DETAIL2], g
    return np.int64(error)


@jit
def check_ids(heads, ids, usable):
    """``check`` for all groups, in which rows are the same."""
    error = check(heads[0], ids, usable)
    return refuse(heads, 0, error) if error else np.int64(0)


@jit
def follow(h, ids):
    """The engine goes on with these sequences, which were checked, on the call's stream."""
    for i in range(ids.shape[0]):
        stream_of(h, slot_of(h, ids[i]))


@jit
def use(heads, ids):
    """``follow`` in all groups. Returns 0 or an error with nothing changed."""
    error = check_ids(heads, ids, True)
    if not error:
        for g in range(heads.shape[0]):
            follow(heads[g], ids)
    return error


@jit
def stream_of(h, slot):
    """The stream that a call means for a sequence: the one it names, which then follows the one used last, or that one."""
    sequence = sequences_of(h)[slot]
    if h[STREAM] != NONE and h[STREAM] != sequence.stream:
        if sequence.stream != NONE:
            emit_access(h, FOLLOWS, h[STREAM], sequence.stream)
        sequence.stream = h[STREAM]
    return np.int64(sequence.stream)
