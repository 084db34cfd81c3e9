"""How admitted sequences grow and shrink: append, rewind, and drafts, of which one path is kept and moved together.

Before one of several sequences writes to a block that they share, it takes a private copy. Forks share blocks, and so
do beams, whose parents are reordered.
"""

from __future__ import annotations

from kvpool.common.jit import inline, jit
from kvpool.common.jit.intrinsics import array_at, prefetch
from kvpool.state.admit import write_tokens
from kvpool.state.policies.block_lists import FRONT
from kvpool.state.policies.policy import foresee, free_blocks
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
    emit_copy,
    forget,
    take_for,
)

# -- blocks that several sequences hold ------------------------------------------------------------------


@jit
def private_copy(group, b, count):
    """Take a fresh block, and copy the first ``count`` tokens of ``b`` into it. Other holders keep ``b``."""
    blocks = blocks_of(group)
    fresh = take_for(group, blocks[b])
    copy_tokens(group, b, fresh, count)
    emit_copy(group, b, fresh, count, WITHIN)
    drop_reference(blocks, b)
    counters_of(group).copied_blocks += 1
    return fresh


@jit
def unfull(group, slot):
    """The block into which the next token of a sequence goes, NONE if that is a new one."""
    sequence = sequences_of(group)[slot]
    return table_of(group)[slot, sequence.blocks - 1] if sequence.length % group.width else NONE


@jit
def copies(group, ids, counts):
    """How many of these sequences must copy their last block before they append ``counts`` tokens. The ids were
    checked.

    The last holder of a block writes in place. So this drops the holds one after the other, as the append will, and
    restores them.
    """
    blocks, sequences = blocks_of(group), sequences_of(group)
    n = 0
    for i in range(len(ids)):
        slot = slot_of(ids[i])
        b = unfull(group, slot)
        if counts[i] > 0 and b != NONE and blocks[b].ref_word & REFS > 1:
            drop_reference(blocks, b)
            sequences[slot].mark = 1
            n += 1
    restore_marked(group, ids)
    return n


@jit
def restore_marked(group, ids):
    """Add the references again that a count has dropped: those of marked sequences on their last block. Removes the
    marks."""
    for i in range(len(ids)):
        slot = slot_of(ids[i])
        if sequences_of(group)[slot].mark:
            add_reference(blocks_of(group), unfull(group, slot))
            sequences_of(group)[slot].mark = 0


@jit
def make_writable(group, slot, stream):
    """Before a forked sequence appends, make its unfull last block its own: by a copy, or in place for the last holder.

    A state that a reader holds is copied too.
    """
    blocks, sequence, row = blocks_of(group), sequences_of(group)[slot], table_of(group)[slot]
    sequence.forked = 0
    b = unfull(group, slot)
    if b == NONE:
        return
    whole = has_states(group)  # a state is written as a whole, also after a rewind to the committed tokens
    if blocks[b].ref_word & REFS > 1 or (whole and blocks[b].ref_word != 1):
        # The copy reads what the stream wrote, whether a call has reported it or not. A later writer of the block waits
        # for what the stream has read there.
        emit_access(group, WROTE if whole or sequence.committed < sequence.length else ACCESSED, stream, b)
        b = private_copy(group, b, group.width if whole else sequence.length % group.width)
        row[sequence.blocks - 1] = b
    emit_access(group, WILL_WRITE, stream, b)


# -- forks and beams -----------------------------------------------------------------------------------


@inline
def _become(sequences, row, others, other):
    """Copy all fields of a running sequence, except the generation of its row."""
    generation = sequences[row].generation
    sequences[row] = others[other]
    sequences[row].generation = generation


@jit
def _follow(group, stream, other):
    """Have ``stream``, which takes blocks over from another stream, wait for that stream."""
    if stream != other and stream != NONE and other != NONE:
        emit_access(group, FOLLOWS, stream, other)


@jit
def fork(group, ids, out):
    """Make sequences ``out`` int64[m, n] that continue ``ids`` int64[m]. There are rows for them, and the ids were
    checked.

    They hold the same blocks, also a last one that is not full. That one is copied when one of its holders writes.
    """
    top = group.free_rows
    sequences, table = sequences_of(group), table_of(group)
    for i in range(len(out)):
        slot = slot_of(ids[i])
        parent = sequences[slot]
        parent.forked = 1
        for k in range(out.shape[1]):
            top -= 1
            row = rows_of(group)[top]
            _become(sequences, row, sequences, slot)
            if group.stream != NONE:
                sequences[row].stream = group.stream
            for j in range(parent.blocks):
                table[row, j] = table[slot, j]
                if table[row, j] != NONE:
                    add_reference(blocks_of(group), table[row, j])
            if has_states(group):
                copy_row(group, slot, row)
            out[i, k] = (sequences[row].generation << 32) | row
        if out.shape[1]:
            _follow(group, group.stream, parent.stream)
    group.free_rows = top


@jit
def reorder(group, ids, parents, store, before, scratch):
    """Sequence ``ids[i]`` continues from the present state of ``ids[parents[i]]``. Content from which nobody continues
    is given back, as in a release.

    Scratch memory: SEQUENCE[n] at the address ``before``, and ``scratch`` int64[3, n]. The ids were checked.
    """
    scratch[:] = 0
    sequences, old = sequences_of(group), array_at(before, (len(ids),), SEQUENCE)
    slots, children, longest = scratch[0], scratch[1], 0
    for i in range(len(ids)):
        slots[i] = slot_of(ids[i])
        children[parents[i]] += 1
        stream_of(group, slots[i])
        longest = max(longest, sequences[slots[i]].blocks)
    for i in range(len(ids)):
        if store and children[i] == 0:
            retry_duplicates(group, slots[i])
    for j in range(longest - 1, -1, -1):
        _reorder_column(group, j, slots, parents, store, scratch[2])
    if has_states(group):
        reorder_rows(group, slots, parents, scratch[2])
    for i in range(len(ids)):
        old[i] = sequences[slots[i]]
    for i in range(len(ids)):
        parent = old[parents[i]]
        _follow(group, parent.stream, old[i].stream)
        _become(sequences, slots[i], old, parents[i])
        if children[parents[i]] > 1:
            sequences[slots[i]].forked = 1


@jit
def _reorder_column(group, j, slots, parents, store, column):
    """Block ``j`` of each row becomes its parent's. New holds come first, so that only blocks from which nobody
    continues are let go of."""
    table = table_of(group)
    for i in range(len(slots)):
        column[i] = table[slots[i], j]
    for i in range(len(slots)):
        b = column[parents[i]]
        if b != column[i]:
            table[slots[i], j] = b
            if b != NONE:
                add_reference(blocks_of(group), b)
    for i in range(len(slots)):
        if column[i] != NONE and column[i] != column[parents[i]]:
            stream = sequences_of(group)[slots[i]].stream
            give_back(group, slots[i], j, column[i], stream, store, stored_tail(group, slots[i], store))


# -- growth ----------------------------------------------------------------------------------------------


@jit
def append_need(group, ids, counts):
    """The blocks that appending ``counts`` tokens takes, with copies of shared ones, or the error. The ids were
    checked."""
    need = forked = 0
    for i in range(len(ids)):
        sequence = sequences_of(group)[slot_of(ids[i])]
        forked |= sequence.forked
        more = blocks_for(group, sequence.length + counts[i])
        if more > group.columns and (group.columns < group.device_blocks or group.window):
            group.detail = i
            return TOO_LONG
        need += more - sequence.blocks
    return need + copies(group, ids, counts) if forked else need


@jit
def need_alone(group, slot, count):
    """The blocks that a sequence has after it appended ``count`` tokens, if it is alone in the pool: it copies
    nothing then."""
    sequence = sequences_of(group)[slot]
    return blocks_for(group, sequence.length + count) - holes(group, slot)


@jit
def _append(group, slot, tokens, start, count):
    sequence, row, stream = sequences_of(group)[slot], table_of(group)[slot], stream_of(group, slot)
    done = 0
    if sequence.forked and count:
        make_writable(group, slot, stream)
    while done < count:
        at = sequence.length % group.width
        if at == 0:
            b = take_for(group, sequence)
            row[sequence.blocks] = b
            foresee(group, row, sequence.blocks)
            emit_access(group, WILL_WRITE, stream, b)
            sequence.blocks += 1
        n = min(count - done, group.width - at)
        write_tokens(group, row[sequence.blocks - 1], at, tokens, no_extra(group), start + done, n)
        sequence.length += n
        done += n


@jit
def expect_ends(group, ids):
    """Begin to load the last blocks of several sequences, and the ids of their tokens: each is somewhere else."""
    for i in range(len(ids) if len(ids) > 1 else 0):
        sequence = sequences_of(group)[slot_of(ids[i])]
        prefetch(table_of(group)[slot_of(ids[i])], sequence.blocks - 1)
    for i in range(len(ids) if len(ids) > 1 else 0):
        sequence = sequences_of(group)[slot_of(ids[i])]
        b = table_of(group)[slot_of(ids[i]), max(sequence.blocks - 1, 0)]
        prefetch(blocks_of(group), b)
        prefetch(tokens_of(group)[b], 0)


@jit
def append(group, ids, counts, tokens):
    """Grow each sequence by its count of ``tokens`` (int32, the tokens of all sequences in order). There is room: see
    ``append_need``."""
    expect_ends(group, ids)
    start = 0
    for i in range(len(ids)):
        _append(group, slot_of(ids[i]), tokens, start, counts[i])
        start += counts[i]


@jit
def shared(group, slot, i):
    """Whether other sequences or readers hold block ``i`` of a sequence too. Then its tokens may not be written
    again."""
    return blocks_of(group)[table_of(group)[slot, i]].ref_word != 1


@jit
def _shorten(group, slot, length):
    """After a rewind, make the last block of a sequence its own again: a block with a key is never written."""
    blocks, row = blocks_of(group), table_of(group)[slot]
    i, keep = length // group.width, length % group.width
    b = row[i]
    if shared(group, slot, i):
        row[i] = private_copy(group, b, keep)
        return
    if blocks[b].flags & PUBLISHED:
        forget(group, b)
    blocks[b].flags &= ~KEYED
    blocks[b].filled, blocks[b].uses = keep, 0


@jit
def _returned(group, slot, keep):
    """How many blocks nobody would hold if a sequence kept its first ``keep`` blocks."""
    count = 0
    for i in range(keep, sequences_of(group)[slot].blocks):
        count += 1 if blocks_of(group)[table_of(group)[slot, i]].ref_word == 1 else 0
    return count


@jit
def rewind_need(group, ids, counts):
    """The blocks that dropping the last ``counts`` tokens of each sequence takes for copies, or the error. The ids were
    checked."""
    need, free = 0, free_blocks(group, DEVICE)
    for i in range(len(ids)):
        slot = slot_of(ids[i])
        length = sequences_of(group)[slot].length
        if counts[i] > length:
            group.detail, group.bound = i, length
            return BAD_COUNT
        if group.window and length - counts[i] < least(group, slot):
            group.detail, group.bound = i, length - least(group, slot)
            return PASSED
        length -= counts[i]
        free += _returned(group, slot, blocks_for(group, length))
        need += 1 if counts[i] > 0 and length % group.width and shared(group, slot, length // group.width) else 0
        if need > free:
            return within(group, need, free)
    return need


def rewinding(drop_tokens):
    """Make the function that drops the last ``counts`` tokens of each sequence by ``drop_tokens(group, slot, count,
    stream)``. The need was found possible."""

    @jit
    def rewind(group, ids, counts):
        for i in range(len(ids)):
            slot = slot_of(ids[i])
            stream = stream_of(group, slot)
            if counts[i] > 0:
                drop_tokens(group, slot, counts[i], stream)

    return rewind


@inline
def note_dropped(group, sequence, count):
    """Note that a sequence has become ``count`` tokens shorter."""
    length = sequence.length - count
    full = length // group.width
    sequence.length, sequence.blocks = length, blocks_for(group, length)
    sequence.prompt, sequence.committed = min(sequence.prompt, length), min(sequence.committed, length)
    sequence.reused = min(sequence.reused, full)
    sequence.dropped += count
    if sequence.duplicates >= full:
        sequence.duplicates = NONE


@jit
def rewind_one(group, slot, count, stream):
    blocks, sequence, row = blocks_of(group), sequences_of(group)[slot], table_of(group)[slot]
    length = sequence.length - count
    keep = blocks_for(group, length)
    # The tokens that stay may be copied now, committed or not. The engine wrote them, except what this same call has
    # copied.
    if length % group.width and blocks[row[keep - 1]].ticket != group.ticket:
        emit_access(group, WROTE, stream, row[keep - 1])
    give_columns(group, slot, keep, sequence.blocks, FRONT)
    if length % group.width:
        _shorten(group, slot, length)
        emit_access(group, WILL_WRITE, stream, row[keep - 1])
    note_dropped(group, sequence, count)


rewind = rewinding(rewind_one)


# -- drafts --------------------------------------------------------------------------------------------


@jit
def draft_error(group, ids, drafts, accepted, counts):
    """0, or an error. ``detail`` is the place of the offender in ``ids``, or for BAD_ACCEPTED in ``accepted``.
    ``bound`` is the bound that it broke.

    The ids were checked.
    """
    start = 0
    for i in range(len(ids)):
        sequence = sequences_of(group)[slot_of(ids[i])]
        if drafts[i] > sequence.length - sequence.committed:
            group.detail, group.bound = i, sequence.length - sequence.committed
            return BAD_DRAFTS
        least = 0
        for j in range(start, start + counts[i]):
            if accepted[j] < least or accepted[j] >= drafts[i]:
                group.detail, group.bound = j, drafts[i]
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
def _shared_between(group, slot, first, end):
    """How many of the blocks of the tokens [first, end) others hold too."""
    count = 0
    for i in range(first // group.width, (end - 1) // group.width + 1 if end > first else 0):
        count += 1 if shared(group, slot, i) else 0
    return count


@jit
def _copies(group, ids, drafts, accepted, counts):
    """How many blocks have to be copied because others hold them too, and whether any token has to move."""
    need, start, moving = 0, 0, False
    for i in range(len(ids)):
        slot, gap = slot_of(ids[i]), gap_of(accepted, start, counts[i])
        base = sequences_of(group)[slot].length - drafts[i]
        end = base + counts[i]
        if gap < counts[i]:
            moving = True
            need += _shared_between(group, slot, base + gap, end)
        elif counts[i] < drafts[i] and end % group.width:
            need += _shared_between(group, slot, end - 1, end)
        start += counts[i]
    return need, moving


@jit
def _move_token(group, source, at, target, to):
    """Move the id of a token, and its extra id. Token moves carry its bytes."""
    blocks, tokens = blocks_of(group), tokens_of(group)
    tokens[target, to] = tokens[source, at]
    if not group.has_extra:
        return
    extra = extra_of(group)
    extra_id = extra[source, at] if blocks[source].flags & EXTRA else 0
    if extra_id != 0 and not blocks[target].flags & EXTRA:
        for i in range(group.width):
            extra[target, i] = 0
        blocks[target].flags |= EXTRA
    if blocks[target].flags & EXTRA:
        extra[target, to] = extra_id


@jit
def _gather(group, slot, base, accepted, gap, stream):
    """Move the accepted drafts, int64[n], from number ``gap`` on, to the places after those before them.

    First, the sequence gets blocks of its own for all that will be written. A copy of a block has all of its tokens,
    since it is also read from.
    """
    blocks, row, width = blocks_of(group), table_of(group)[slot], group.width
    length = sequences_of(group)[slot].length
    for i in range((base + gap) // width, (base + len(accepted) - 1) // width + 1):
        if shared(group, slot, i):
            emit_access(group, WROTE, stream, row[i])
            row[i] = private_copy(group, row[i], min(width, length - i * width))
        if blocks[row[i]].flags & PUBLISHED:  # by a fork that has committed it, and has gone
            forget(group, row[i])
        blocks[row[i]].flags &= ~KEYED
        blocks[row[i]].ticket = group.ticket  # if that decision fails, these tokens are lost
        emit_access(group, WILL_WRITE, stream, row[i])
    moves, n = token_moves_of(group), group.token_moves
    if n + len(accepted) - gap > group.token_moves_capacity:
        raise RuntimeError("more token moves than one call can make")
    for j in range(gap, len(accepted)):
        place, to = base + accepted[j], base + j
        source, target = row[place // width], row[to // width]
        _move_token(group, source, place % width, target, to % width)
        moves[n, 0], moves[n, 1] = stream, slot
        moves[n, 2], moves[n, 3] = source * width + place % width, target * width + to % width
        n += 1
    group.token_moves = n


@jit
def _drop(group, ids, drafts, accepted, counts, moved):
    """Drop the rejected drafts: with ``moved``, of the sequences in which a token moves, else of the others. Returns
    blocks copied."""
    start = 0
    for i in range(len(ids)):
        slot = slot_of(ids[i])
        if counts[i] < drafts[i] and (gap_of(accepted, start, counts[i]) < counts[i]) == moved:
            rewind_one(group, slot, drafts[i] - counts[i], stream_of(group, slot))
        start += counts[i]


@jit
def keep_need(group, ids, drafts, accepted, counts, dropped):
    """The blocks that ``keep`` takes for copies, or the error. Called after ``draft_error``. ``dropped`` is
    ``drafts - counts``."""
    need, moving = _copies(group, ids, drafts, accepted, counts)
    if not moving:
        return rewind_need(group, ids, dropped)
    # Blocks that this call gives back do not count. Tokens move out of them after all copies into fresh blocks.
    return within(group, need, free_blocks(group, DEVICE))


@jit
def accept_drafts(group, ids, drafts, accepted, counts, dropped):
    """Keep ``counts`` of the last ``drafts`` tokens of each sequence: those at the indices in ``accepted``, which rise.

    ``keep_need`` has found it possible.
    """
    if not _copies(group, ids, drafts, accepted, counts)[1]:
        rewind(group, ids, dropped)
        return
    start = 0
    for i in range(len(ids)):
        slot, gap = slot_of(ids[i]), gap_of(accepted, start, counts[i])
        if gap < counts[i]:
            base = sequences_of(group)[slot].length - drafts[i]
            _gather(group, slot, base, accepted[start : start + counts[i]], gap, stream_of(group, slot))
        start += counts[i]
    # Sequences without a move come first: they may take a block.
    _drop(group, ids, drafts, accepted, counts, False)
    _drop(group, ids, drafts, accepted, counts, True)
