"""Live sequences: found by id, checked before a call changes anything, each with the stream on which the engine uses
it; and what they leave in the cache.

Committed blocks get into the index, and held blocks are given back.
"""

from __future__ import annotations

from kvpool.common.jit import inline, jit
from kvpool.common.jit.intrinsics import call, prefetch
from kvpool.state.hashing import key_in
from kvpool.state.index import device_copy, expect, expect_child, expect_found, find_key, has_content, rival_child
from kvpool.state.policies.block_lists import BACK
from kvpool.state.policies.policy import (
    nth_released,
    on_begin_release,
    on_change,
    on_end_release,
    on_insert,
    on_release,
)
from kvpool.state.records import (
    BAD_COUNT,
    DUPLICATE,
    FAILED,
    IS_SWAPPED,
    KEYED,
    LIVE,
    LOST,
    NONE,
    NOT_SWAPPED,
    PUBLISHED,
    REFS,
    SHORT_OF_BLOCKS,
    SWAPPED,
    TAIL,
    UNKNOWN,
    blocks_of,
    counters_of,
    drop_reference,
    extra_in,
    group_at,
    rows_of,
    sequences_of,
    table_of,
    tokens_of,
)
from kvpool.state.requests import blocks_for, has_states, keeps_state, kept_from, needs_all, state_at
from kvpool.state.tiers import ACCESSED, FOLLOWS, STORED, WROTE, emit, emit_access, enter, forget_both


@inline
def slot_of(sequence_id):
    """The row of a sequence whose id was checked."""
    return sequence_id & 0xFFFFFFFF


@jit
def row_of(group, sequence_id):
    """The row of a sequence, running or swapped out, or NONE."""
    slot = slot_of(sequence_id)
    if sequence_id < 0 or slot >= group.sequences:
        return NONE
    sequence = sequences_of(group)[slot]
    return slot if sequence.live & (LIVE | SWAPPED) and sequence.generation == sequence_id >> 32 else NONE


@jit
def check_rows(group, ids, usable, kinds):
    """0 if all ids are different sequences of ``kinds`` (LIVE, SWAPPED or both), and, with ``usable``, none of them has
    lost a block. Else the error; ``detail`` has the place of the offender."""
    sequences = sequences_of(group)
    error = 0
    n = 0
    while n < len(ids):
        slot = row_of(group, ids[n])
        if slot == NONE:
            error = UNKNOWN
        elif not sequences[slot].live & kinds:
            error = IS_SWAPPED if kinds == LIVE else NOT_SWAPPED
        elif sequences[slot].mark:
            error = DUPLICATE
        elif usable and sequences[slot].failed:
            error = FAILED
        if error:
            group.detail = n
            break
        sequences[slot].mark = 1
        n += 1
    for i in range(n):
        sequences[slot_of(ids[i])].mark = 0
    return error


@jit
def check(group, ids, usable):
    """``check_rows`` of running sequences."""
    return check_rows(group, ids, usable, LIVE)


@jit
def refuse(groups, g, error):
    """Put the details of an error from group ``g`` into the first header, where the caller looks for them. Returns the
    error."""
    first, refused = group_at(groups, 0), group_at(groups, g)
    first.detail, first.bound, first.detail_group = refused.detail, refused.bound, g
    return error


@jit
def check_kinds(groups, ids, usable, kinds):
    """``check_rows`` for all groups. They have the same rows."""
    error = check_rows(group_at(groups, 0), ids, usable, kinds)
    return refuse(groups, 0, error) if error else 0


@jit
def check_ids(groups, ids, usable):
    """``check_kinds`` of running sequences. This is where a sequence that lost a block to a refused copy is refused."""
    return check_kinds(groups, ids, usable, LIVE)


@jit(nogil=False)
def are_short(groups, g, ids, most):
    """Whether these sequences, which are not checked, have up to ``most`` tokens together. A guess without the state
    lock."""
    group = group_at(groups, g)
    tokens = 0
    for i in range(len(ids)):
        slot = slot_of(ids[i])
        tokens += sequences_of(group)[slot].length if slot < group.sequences else 0
    return tokens <= most


@jit
def follow(group, ids):
    """Note that the engine continues with these sequences, which were checked, on the stream of the call."""
    for i in range(len(ids)):
        stream_of(group, slot_of(ids[i]))


@jit
def use(groups, ids):
    """``follow`` in all groups. Returns 0, or an error with nothing changed."""
    error = check_ids(groups, ids, True)
    if not error:
        for g in range(len(groups)):
            follow(group_at(groups, g), ids)
    return error


@jit
def stream_of(group, slot):
    """The stream of a sequence in this call: the one that the call names, which then waits for the last one used.
    Without a name, the last one used."""
    sequence = sequences_of(group)[slot]
    if group.stream != NONE and group.stream != sequence.stream:
        if sequence.stream != NONE:
            emit_access(group, FOLLOWS, group.stream, sequence.stream)
        sequence.stream = group.stream
    return sequence.stream


@jit
def within(group, need, free):
    """Return ``need`` if it is at most ``free``. Else SHORT_OF_BLOCKS, with both numbers as its details."""
    if need <= free:
        return need
    group.detail, group.bound = need, free
    return SHORT_OF_BLOCKS


@jit
def give_columns(group, slot, first, last, front):
    """Give back the blocks in the columns [first, last) of a row, the last one first. Work that is enqueued on the
    sequence's stream may still use them. Returns how many there were."""
    row, stream, count = table_of(group)[slot], stream_of(group, slot), 0
    for i in range(last - 1, first - 1, -1):
        if row[i] != NONE:
            b, row[i] = row[i], NONE
            emit_access(group, ACCESSED, stream, b)
            if drop_reference(blocks_of(group), b) == 0:
                on_release(group, b, front)
            count += 1
    return count


# -- what is left in the cache ---------------------------------------------------------------------------


STORE, DROP = True, False  # the content that a sequence leaves stays in the cache, or is dropped
NEAR, AHEAD, FAR = 10, 20, 24  # how many blocks ahead what has a key is loaded, its place in the index, and the block


@jit
def _parent(group, slot, i):
    """The key of the block before block ``i`` of a sequence. Full committed blocks have keys."""
    if i == 0:
        return sequences_of(group)[slot].root0, sequences_of(group)[slot].root1
    before = blocks_of(group)[table_of(group)[slot, i - 1]]
    return before.key0, before.key1


@inline
def _publish(group, b):
    """Make a full block with a key the device copy of its content. Returns False if the content has a device copy
    already."""
    blocks = blocks_of(group)
    same_key = find_key(group, blocks[b].key0, blocks[b].key1)
    if same_key == NONE:
        enter(group, b, PUBLISHED)
        return True
    if not has_content(group, same_key, blocks[b].namespace, tokens_of(group)[b], extra_in(group, b), 0):
        return False  # other content has this key
    if device_copy(group, same_key) != NONE:
        return False
    blocks[b].other_copy, blocks[same_key].other_copy = same_key, b
    blocks[b].uses = blocks[same_key].uses
    on_insert(group, b)
    blocks[b].saved = blocks[same_key].saved
    blocks[b].flags |= PUBLISHED
    emit(group, STORED, b)
    on_change(group, same_key)
    return True


@jit
def _name(group, slot, i, b):
    """Give a full block ``b``, block ``i`` of a sequence, its key."""
    block = blocks_of(group)[b]
    parent0, parent1 = _parent(group, slot, i)
    block.key0, block.key1 = key_in(group, tokens_of(group)[b], extra_in(group, b), parent0, parent1)
    block.parent0, block.parent1 = parent0, parent1
    block.flags |= KEYED


@jit
def _name_ahead(group, ids, counts):
    """Give the blocks that several sequences will publish their keys, and begin to load their places in the index: each
    is somewhere else."""
    blocks = blocks_of(group)
    for n in range(len(ids) if len(ids) > 1 and not has_states(group) else 0):
        slot = slot_of(ids[n])
        sequence, row = sequences_of(group)[slot], table_of(group)[slot]
        committed = counts[n] if len(counts) else sequence.length
        for i in range(sequence.committed // group.width, committed // group.width):
            b = row[i]
            if b != NONE and not blocks[b].flags & (KEYED | PUBLISHED | LOST):
                _name(group, slot, i, b)
                expect(group, blocks[b].key0)


@jit
def publish_range(group, slot, first, last):
    """Publish the blocks with keys in [first, last) of a sequence. Some may have to wait as duplicates: the first of
    them is noted. Returns how many must wait."""
    blocks, sequence, row = blocks_of(group), sequences_of(group)[slot], table_of(group)[slot]
    waiting = 0
    for i in range(first, last):
        b = row[i]
        if i + AHEAD < last and needs_all(group):
            expect(group, blocks[row[i + AHEAD]].key0)  # a guess, if it has no key yet
            expect_child(group, row[i + AHEAD])
            expect_found(group, blocks[row[i + NEAR]].key0)
        if b == NONE or blocks[b].flags & (PUBLISHED | LOST):
            continue
        if has_states(group) and not (blocks[b].flags & KEYED and keeps_state(group, i, sequence.kept)):
            continue  # written again since it was committed, or about to become a later column
        if not blocks[b].flags & KEYED:
            _name(group, slot, i, b)
        if sequence.private or _publish(group, b):
            continue
        waiting += 1
        if sequence.duplicates == NONE:
            sequence.duplicates = i
    return waiting


@jit
def publish_committed(group, slot, first, last):
    """``publish_range`` for blocks that were just committed. Content that was already cached has been computed
    twice."""
    count = publish_range(group, slot, first, last) * group.width
    sequences_of(group)[slot].recomputed += count
    counters_of(group).recomputed_tokens += count


@jit
def retry_duplicates(group, slot):
    """Publish duplicates of a sequence. When they were committed, others had published their content; a device copy may
    have gone since."""
    sequence = sequences_of(group)[slot]
    first = sequence.duplicates
    if first != NONE and sequence.removals != group.removals:
        sequence.duplicates = NONE
        publish_range(group, slot, first, sequence.committed // group.width)
        sequence.removals = group.removals


@jit
def give_passed(group, slot, before):
    """Give back the blocks that no token after the committed ones sees, or the states from which nobody continues any
    more. ``before`` tokens had been committed."""
    sequence = sequences_of(group)[slot]
    if has_states(group):
        first, last = max((before - 1) // group.width, 0), (sequence.committed - 1) // group.width
    else:
        first, last = sequence.first, kept_from(group, sequence.committed)
    if last > first:
        counters_of(group).passed_blocks += give_columns(group, slot, first, last, BACK)
        if group.window:
            sequence.first = last


@jit
def commit_error(group, ids, counts):
    """0 if the first ``counts`` tokens of each sequence (int64[0] = all tokens of all) can be published, else the
    error. The ids were checked."""
    for i in range(len(counts)):
        sequence = sequences_of(group)[slot_of(ids[i])]
        if counts[i] > sequence.length or counts[i] < sequence.committed:
            group.detail, group.bound = i, sequence.length if counts[i] > sequence.length else sequence.committed
            return BAD_COUNT
    return 0


@jit
def commit_rows(group, ids, counts):
    """Publish the first ``counts`` tokens of each sequence. ``commit_error`` has found it possible."""
    _name_ahead(group, ids, counts)
    for i in range(len(ids)):
        slot = slot_of(ids[i])
        sequence, row = sequences_of(group)[slot], table_of(group)[slot]
        retry_duplicates(group, slot)
        before = sequence.committed
        sequence.committed = counts[i] if len(counts) else sequence.length
        first, last, stream = before // group.width, sequence.committed // group.width, stream_of(group, slot)
        end = (
            state_at(group, slot, sequence.committed) + 1
            if has_states(group)
            else blocks_for(group, sequence.committed)
        )
        for at in range(first, end if sequence.committed > before else 0):
            if row[at] != NONE:
                emit_access(group, WROTE, stream, row[at])
        if sequence.duplicates == NONE:
            sequence.removals = group.removals
        if has_states(group):
            call(group.name, (group, slot, first, last))
        publish_committed(group, slot, first, last)
        if group.window or has_states(group):
            call(group.give_passed, (group, slot, before))


@jit
def _store_tail(group, slot, i, b):
    """Make the committed part of an unfull block a child of the block before, unless a sibling has all of these
    tokens."""
    blocks, sequence = blocks_of(group), sequences_of(group)[slot]
    blocks[b].flags &= ~KEYED
    blocks[b].filled = sequence.committed % group.width
    blocks[b].parent0, blocks[b].parent1 = _parent(group, slot, i)
    if rival_child(group, b, True) == NONE:
        enter(group, b, TAIL)


@inline
def forget_everywhere(group, b):
    """Forget the content of a block that no sequence holds any more, and of its other copy, unless somebody holds
    that."""
    if not blocks_of(group)[b].flags & PUBLISHED:
        return
    other = blocks_of(group)[b].other_copy
    if other == NONE or blocks_of(group)[other].ref_word & REFS == 0:
        forget_both(group, b, other)


@inline
def stored_tail(group, slot, store):
    """The column of the unfull block whose committed part a sequence leaves in the cache for partial matches. NONE if
    there is none."""
    sequence = sequences_of(group)[slot]
    if (
        not store
        or sequence.private
        or sequence.failed
        or not group.child_buckets
        or sequence.committed % group.width == 0
    ):
        return NONE
    return sequence.committed // group.width


@inline
def give_back(group, slot, i, b, stream, store, tail):
    """Drop the hold of a sequence on ``b``, its block ``i``. The earlier blocks are still in its row. ``tail`` is a
    result of ``stored_tail``."""
    blocks = blocks_of(group)
    emit_access(group, ACCESSED, stream, b)
    ref_word = drop_reference(blocks, b)
    if not store and i >= sequences_of(group)[slot].reused and ref_word & REFS == 0:
        forget_everywhere(group, b)
    if ref_word == 0:
        if i == tail and not blocks[b].flags & PUBLISHED:  # as a fork does that has committed more of it
            _store_tail(group, slot, i, b)
        on_release(group, b, BACK)


@jit
def _release(group, slot, store):
    sequence, row = sequences_of(group)[slot], table_of(group)[slot]
    stream, tail = stream_of(group, slot), stored_tail(group, slot, store)
    if store:
        retry_duplicates(group, slot)
    on_begin_release(group, slot)
    for n in range(sequence.blocks):
        i = nth_released(n, sequence.blocks)
        b = row[i]
        prefetch(blocks_of(group), row[nth_released(min(n + FAR, sequence.blocks - 1), sequence.blocks)])
        if b == NONE:
            continue
        row[i] = NONE
        give_back(group, slot, i, b, stream, store, tail)
    on_end_release(group, slot)
    sequence.live = sequence.length = sequence.blocks = sequence.first = 0
    sequence.generation = (sequence.generation + 1) & 0x7FFFFFFF
    rows_of(group)[group.free_rows] = slot
    group.free_rows += 1


@jit
def release_rows(group, ids, store):
    """Give back the blocks of sequences, the last block of each first, so that leaves age first. The ids were
    checked."""
    for i in range(len(ids)):
        _release(group, slot_of(ids[i]), store)
