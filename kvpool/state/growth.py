"""How admitted sequences grow and shrink: append, rewind, and drafts, of which one path is kept and moved together.

Before one of several sequences writes to a block that they share, it takes a private copy. Forks share blocks, and so
do beams, whose parents are reordered.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import array_at
from kvpool.state.admit import write_tokens
from kvpool.state.policies.policy import FRONT, foresee, free_blocks
from kvpool.state.records import (
    BAD_ACCEPTED,
    BAD_COUNT,
    BAD_DRAFTS,
    DEVICE,
    EXTRA,
    KEYED,
    NONE,
    PASSED,
    PUBLISHED,
    REFS,
    SEQUENCE,
    TOO_LONG,
    WITHIN,
    add_reference,
    blocks_of,
    counters_of,
    drop_reference,
    extra_of,
    no_extra,
    rows_of,
    sequences_of,
    table_of,
    token_moves_of,
    tokens_of,
)
from kvpool.state.requests import blocks_for, copy_row, has_states, holes, least, reorder_rows
from kvpool.state.sequences import give_back, give_columns, retry_duplicates, slot_of, stored_tail, stream_of, within
from kvpool.state.tiers import (
    ACCESSED,
    FOLLOWS,
    WILL_WRITE,
    WROTE,
    copy_tokens,
    emit_access,
    emit_move,
    forget,
    take_for,
)

# -- blocks that several sequences hold ------------------------------------------------------------------


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


# -- growth ----------------------------------------------------------------------------------------------


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
def need_alone(h, slot, count):
    """The blocks that a sequence has after it appended ``count`` tokens, if it is alone in the pool: it copies
    nothing then."""
    sequence = sequences_of(h)[slot]
    return blocks_for(h, sequence.length + count) - holes(h, slot)


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
            foresee(h, row, sequence.blocks)
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


def rewinding(drop_tokens):
    """Make the function that drops the last ``counts`` tokens of each sequence by ``drop_tokens(h, slot, count,
    stream)``. The need was found possible."""

    @jit
    def rewind(h, ids, counts):
        for i in range(ids.shape[0]):
            slot = slot_of(ids[i])
            stream = stream_of(h, slot)
            if counts[i] > 0:
                drop_tokens(h, slot, counts[i], stream)

    return rewind


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


rewind = rewinding(rewind_one)


# -- drafts --------------------------------------------------------------------------------------------


@jit
def draft_error(h, ids, drafts, accepted, counts):
    """0, or an error. ``detail`` is the place of the offender in ``ids``, or for BAD_ACCEPTED in ``accepted``.
    ``bound`` is the bound that it broke.

    The ids were checked.
    """
    start = 0
    for i in range(ids.shape[0]):
        sequence = sequences_of(h)[slot_of(ids[i])]
        if drafts[i] > sequence.length - sequence.committed:
            h.detail, h.bound = i, sequence.length - sequence.committed
            return BAD_DRAFTS
        least = np.int64(0)
        for j in range(start, start + counts[i]):
            if accepted[j] < least or accepted[j] >= drafts[i]:
                h.detail, h.bound = j, drafts[i]
                return BAD_ACCEPTED
            least = accepted[j] + 1
        start += counts[i]
    return 0


@jit
def gap_of(accepted, start, count):
    """How many accepted drafts of a sequence stay where they are: those before the first rejected one."""
    n = 0
    while n < count and accepted[start + n] == n:
        n += 1
    return n


@jit
def _shared_between(h, slot, first, end):
    """How many of the blocks of the tokens [first, end) others hold too."""
    count = 0
    for i in range(first // h.width, (end - 1) // h.width + 1 if end > first else 0):
        count += 1 if shared(h, slot, i) else 0
    return count


@jit
def _copies(h, ids, drafts, accepted, counts):
    """How many blocks have to be copied because others hold them too, and whether any token has to move."""
    need, start, moving = 0, 0, False
    for i in range(ids.shape[0]):
        slot, gap = slot_of(ids[i]), gap_of(accepted, start, counts[i])
        base = sequences_of(h)[slot].length - drafts[i]
        end = base + counts[i]
        if gap < counts[i]:
            moving = True
            need += _shared_between(h, slot, base + gap, end)
        elif counts[i] < drafts[i] and end % h.width:
            need += _shared_between(h, slot, end - 1, end)
        start += counts[i]
    return need, moving


@jit
def _move_token(h, source, at, target, to):
    """Move the id of a token, and its extra id. Token moves carry its bytes."""
    blocks, tokens = blocks_of(h), tokens_of(h)
    tokens[target, to] = tokens[source, at]
    if not h.has_extra:
        return
    extra = extra_of(h)
    extra_id = extra[source, at] if blocks[source].flags & EXTRA else np.int64(0)
    if extra_id != 0 and not blocks[target].flags & EXTRA:
        for i in range(h.width):
            extra[target, i] = 0
        blocks[target].flags |= EXTRA
    if blocks[target].flags & EXTRA:
        extra[target, to] = extra_id


@jit
def _gather(h, slot, base, accepted, gap, stream):
    """Move the accepted drafts, int64[n], from number ``gap`` on, to the places after those before them.

    First, the sequence gets blocks of its own for all that will be written. A copy of a block has all of its tokens,
    since it is also read from.
    """
    blocks, row, width = blocks_of(h), table_of(h)[slot], h.width
    length = sequences_of(h)[slot].length
    for i in range((base + gap) // width, (base + accepted.shape[0] - 1) // width + 1):
        if shared(h, slot, i):
            emit_access(h, WROTE, stream, np.int64(row[i]))
            row[i] = private_copy(h, np.int64(row[i]), min(width, length - i * width))
        if blocks[row[i]].flags & PUBLISHED:  # by a fork that has committed it, and has gone
            forget(h, np.int64(row[i]), NONE)
        blocks[row[i]].flags &= ~KEYED
        blocks[row[i]].ticket = h.ticket  # if that decision fails, these tokens are lost
        emit_access(h, WILL_WRITE, stream, np.int64(row[i]))
    moves, n = token_moves_of(h), h.token_moves
    if n + accepted.shape[0] - gap > h.token_moves_capacity:
        raise RuntimeError("more token moves than one call can make")
    for j in range(gap, accepted.shape[0]):
        place, to = base + accepted[j], base + j
        source, target = np.int64(row[place // width]), np.int64(row[to // width])
        _move_token(h, source, place % width, target, to % width)
        moves[n, 0], moves[n, 1] = stream, slot
        moves[n, 2], moves[n, 3] = source * width + place % width, target * width + to % width
        n += 1
    h.token_moves = n


@jit
def _drop(h, ids, drafts, accepted, counts, moved):
    """Drop the rejected drafts: with ``moved``, of the sequences in which a token moves, else of the others. Returns
    blocks copied."""
    start = 0
    for i in range(ids.shape[0]):
        slot = slot_of(ids[i])
        if counts[i] < drafts[i] and (gap_of(accepted, start, counts[i]) < counts[i]) == moved:
            rewind_one(h, slot, drafts[i] - counts[i], stream_of(h, slot))
        start += counts[i]


@jit
def keep_need(h, ids, drafts, accepted, counts, dropped):
    """The blocks that ``keep`` takes for copies, or the error. Called after ``draft_error``. ``dropped`` is
    ``drafts - counts``."""
    need, moving = _copies(h, ids, drafts, accepted, counts)
    if not moving:
        return rewind_need(h, ids, dropped)
    # Blocks that this call gives back do not count. Tokens move out of them after all copies into fresh blocks.
    return within(h, need, free_blocks(h, DEVICE))


@jit
def accept_drafts(h, ids, drafts, accepted, counts, dropped):
    """Of the last ``drafts`` tokens of each sequence, keep its next ``counts`` of ``accepted``, which are indices among
    them in rising order.

    ``keep_need`` has found it possible.
    """
    if not _copies(h, ids, drafts, accepted, counts)[1]:
        rewind(h, ids, dropped)
        return
    start = 0
    for i in range(ids.shape[0]):
        slot, gap = slot_of(ids[i]), gap_of(accepted, start, counts[i])
        if gap < counts[i]:
            base = sequences_of(h)[slot].length - drafts[i]
            _gather(h, slot, base, accepted[start : start + counts[i]], gap, stream_of(h, slot))
        start += counts[i]
    # Sequences without a move come first: they may take a block.
    _drop(h, ids, drafts, accepted, counts, False)
    _drop(h, ids, drafts, accepted, counts, True)
