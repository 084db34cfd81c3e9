"""How admitted sequences grow and shrink: append and rewind."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.accesses import WILL_WRITE, WROTE, emit_access
from kvpool.state.codes import BAD_COUNT, PASSED, TOO_LONG
from kvpool.state.fill import write_tokens
from kvpool.state.kinds import least
from kvpool.state.policy import FRONT, free_blocks
from kvpool.state.records import (
    DEVICE,
    KEYED,
    NONE,
    PUBLISHED,
    blocks_of,
    no_extra,
    sequences_of,
    table_of,
)
from kvpool.state.requests import blocks_for
from kvpool.state.sequences import give_columns, slot_of, stream_of, within
from kvpool.state.sharing import copies, make_writable, private_copy
from kvpool.state.tiers import forget, take_for


@jit
def append_need(h, ids, counts):
    """The blocks that appending ``counts`` tokens takes, with copies of shared ones, or the error. The ids were
    checked."""
    need = forked = 0
    for i in range(ids.shape[0]):
        sequence = sequences_of(h)[slot_of(ids[i])]
        forked |= sequence.forked
        more = blocks_for(h, sequence.length + counts[i])
        if more > h.columns and (h.columns < h.device_blocks or h.window):
            h.detail = i
            return TOO_LONG
        need += more - sequence.blocks
    return need + copies(h, ids, counts) if forked else need


@jit
def _append(h, slot, tokens, start, count):
    sequence, row, stream = sequences_of(h)[slot], table_of(h)[slot], stream_of(h, slot)
    done = 0
    if sequence.forked and count:
        make_writable(h, slot, stream)
    while done < count:
        at = sequence.length % h.width
        if at == 0:
            b = take_for(h, sequence)
            row[sequence.blocks] = b
            emit_access(h, WILL_WRITE, stream, b)
            sequence.blocks += 1
        n = min(count - done, h.width - at)
        write_tokens(h, row[sequence.blocks - 1], at, tokens, no_extra(h), start + done, n)
        sequence.length += n
        done += n


@jit
def append(h, ids, counts, tokens):
    """Grow each sequence by its count of ``tokens`` (int32, the tokens of all sequences in order). There is room: see
    ``append_need``."""
    start = 0
    for i in range(ids.shape[0]):
        _append(h, slot_of(ids[i]), tokens, start, counts[i])
        start += counts[i]


@jit
def shared(h, slot, i):
    """Whether other sequences or readers hold block ``i`` of a sequence too. Then its tokens may not be written
    again."""
    return blocks_of(h)[table_of(h)[slot, i]].word != 1


@jit
def _shorten(h, slot, length):
    """After a rewind, make the last block of a sequence its own again: a block with a key is never written."""
    blocks, row = blocks_of(h), table_of(h)[slot]
    i, keep = length // h.width, length % h.width
    b = np.int64(row[i])
    if shared(h, slot, i):
        row[i] = private_copy(h, b, keep)
        return
    if blocks[b].flags & PUBLISHED:
        forget(h, b, NONE)
    blocks[b].flags &= ~KEYED
    blocks[b].filled, blocks[b].uses = keep, 0


@jit
def _returned(h, slot, keep):
    """How many blocks nobody would hold if a sequence kept its first ``keep`` blocks."""
    count = 0
    for i in range(keep, sequences_of(h)[slot].blocks):
        count += 1 if blocks_of(h)[table_of(h)[slot, i]].word == 1 else 0
    return count


@jit
def rewind_need(h, ids, counts):
    """The blocks that dropping the last ``counts`` tokens of each sequence takes for copies, or the error. The ids were
    checked."""
    need, free = 0, free_blocks(h, DEVICE)
    for i in range(ids.shape[0]):
        slot = slot_of(ids[i])
        length = sequences_of(h)[slot].length
        if counts[i] > length:
            h.detail, h.bound = i, length
            return BAD_COUNT
        if h.window and length - counts[i] < least(h, slot):
            h.detail, h.bound = i, length - least(h, slot)
            return PASSED
        length -= counts[i]
        free += _returned(h, slot, blocks_for(h, length))
        need += 1 if counts[i] > 0 and length % h.width and shared(h, slot, length // h.width) else 0
        if need > free:
            return within(h, need, free)
    return need


@jit
def rewind(h, ids, counts):
    """Drop the last ``counts`` tokens of each sequence. ``rewind_need`` has found it possible."""
    for i in range(ids.shape[0]):
        slot = slot_of(ids[i])
        stream = stream_of(h, slot)
        if counts[i] > 0:
            rewind_one(h, slot, counts[i], stream)


@jit(forceinline=True)
def note_dropped(sequence, count):
    """Note that a sequence has become ``count`` tokens shorter."""
    sequence.prompt = min(sequence.prompt, sequence.length)
    sequence.dropped += count


@jit
def rewind_one(h, slot, count, stream):
    blocks, sequence, row = blocks_of(h), sequences_of(h)[slot], table_of(h)[slot]
    length = sequence.length - count
    keep = blocks_for(h, length)
    # The tokens that stay may be copied now, committed or not. The engine wrote them, except what this same call has
    # copied.
    if length % h.width and blocks[row[keep - 1]].ticket != h.ticket:
        emit_access(h, WROTE, stream, np.int64(row[keep - 1]))
    give_columns(h, slot, keep, sequence.blocks, FRONT)
    if length % h.width:
        _shorten(h, slot, length)
        emit_access(h, WILL_WRITE, stream, np.int64(row[keep - 1]))
    full = length // h.width
    sequence.length, sequence.blocks = length, keep
    note_dropped(sequence, count)
    sequence.committed, sequence.reused = min(sequence.committed, length), min(sequence.reused, full)
    if sequence.duplicates >= full:
        sequence.duplicates = NONE
