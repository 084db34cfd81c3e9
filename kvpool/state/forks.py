"""Sequences that continue another: forks, and the step in which beams change places. Blocks are shared, by references alone."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.accesses import FOLLOWS, emit_access
from kvpool.state.atomics import array_at
from kvpool.state.blocks import (
    FREE_ROWS,
    KIND,
    LIVE,
    NONE,
    RECURRENT,
    SEQUENCE,
    STREAM,
    add_reference,
    blocks_of,
    rows_of,
    sequences_of,
    table_of,
)
from kvpool.state.live import slot_of, stream_of
from kvpool.state.noted import copy_row, reorder_rows
from kvpool.state.storing import give_back, retry_duplicates, stored_tail


@jit
def _become(sequence, other):
    """All of a sequence but which row it is."""
    sequence.length, sequence.committed, sequence.blocks = other.length, other.committed, other.blocks
    sequence.cached, sequence.reused, sequence.failed = other.cached, other.reused, other.failed
    sequence.namespace, sequence.root0, sequence.root1 = other.namespace, other.root0, other.root1
    sequence.chain0, sequence.chain1 = other.chain0, other.chain1
    sequence.removals, sequence.duplicates = other.removals, other.duplicates
    sequence.priority, sequence.ttl = other.priority, other.ttl
    sequence.stream, sequence.forked, sequence.first, sequence.kept = other.stream, other.forked, other.first, other.kept


@jit
def _follow(h, stream, other):
    """Have ``stream``, which takes blocks over from another, come behind it."""
    if stream != other and stream != NONE and other != NONE:
        emit_access(h, FOLLOWS, stream, other)


@jit
def fork(h, ids, out):
    """Sequences ``out`` int64[m, n] that continue ``ids`` int64[m], for which there are rows; ids were checked.

    They hold the same blocks, a last one that is not full included, which is copied when one of its holders writes.
    """
    top = h[FREE_ROWS]
    sequences, table = sequences_of(h), table_of(h)
    for i in range(out.shape[0]):
        slot = slot_of(h, ids[i])
        parent = sequences[slot]
        parent.forked = 1
        for k in range(out.shape[1]):
            top -= 1
            row = rows_of(h)[top]
            _become(sequences[row], parent)
            if h[STREAM] != NONE:
                sequences[row].stream = h[STREAM]
            for j in range(parent.blocks):
                table[row, j] = table[slot, j]
                if table[row, j] != NONE:
                    add_reference(blocks_of(h), table[row, j])
            if h[KIND] == RECURRENT:
                copy_row(h, slot, row)
            sequences[row].live = LIVE
            out[i, k] = (np.int64(sequences[row].generation) << 32) | row
        if out.shape[1]:
            _follow(h, h[STREAM], parent.stream)
    h[FREE_ROWS] = top


@jit
def reorder(h, ids, parents, store, before, scratch):
    """Sequence ``ids[i]`` goes on from what ``ids[parents[i]]`` is now; what nobody goes on from is given back, as by a release.

    Room to work in: SEQUENCE[n] at the address ``before``, and ``scratch`` int64[3, n]. The ids were checked.
    """
    scratch[:] = 0
    sequences, old = sequences_of(h), array_at(before, (ids.shape[0],), SEQUENCE)
    slots, children, longest = scratch[0], scratch[1], 0
    for i in range(ids.shape[0]):
        slots[i] = slot_of(h, ids[i])
        children[parents[i]] += 1
        stream_of(h, slots[i])
        longest = max(longest, np.int64(sequences[slots[i]].blocks))
    for i in range(ids.shape[0]):
        if store and children[i] == 0:
            retry_duplicates(h, slots[i])
    for j in range(longest - 1, -1, -1):
        _reorder_column(h, j, slots, parents, store, scratch[2])
    if h[KIND] == RECURRENT:
        reorder_rows(h, slots, parents, scratch[2])
    for i in range(ids.shape[0]):
        _become(old[i], sequences[slots[i]])
    for i in range(ids.shape[0]):
        parent = old[parents[i]]
        _follow(h, np.int64(parent.stream), np.int64(old[i].stream))
        _become(sequences[slots[i]], parent)
        if children[parents[i]] > 1:
            sequences[slots[i]].forked = 1


@jit
def _reorder_column(h, j, slots, parents, store, column):
    """Block ``j`` of each row becomes its parent's. New holds come first, so that only what nobody goes on from is let go of."""
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
