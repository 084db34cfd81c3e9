"""Live sequences: found by id, checked before a call changes anything, each with the stream on which the engine uses
it; and what they leave in the cache.

Committed blocks get into the index, and held blocks are given back.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import call, prefetch
from kvpool.state.hashing import key_in
from kvpool.state.index import device_copy, expect, expect_child, expect_found, find_key, has_content, rival_child
from kvpool.state.policies.policy import (
    BACK,
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
    head,
    rows_of,
    sequences_of,
    table_of,
    tokens_of,
)
from kvpool.state.requests import blocks_for, has_states, keeps_state, kept_from, needs_all, state_at
from kvpool.state.tiers import ACCESSED, FOLLOWS, STORED, WROTE, emit, emit_access, enter, forget_both


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


@jit(nogil=False)
def are_short(heads, g, ids, most):
    """Whether these sequences, which are not checked, have up to ``most`` tokens together. A guess without the state
    lock."""
    h = head(heads, g)
    tokens = np.int64(0)
    for i in range(ids.shape[0]):
        slot = slot_of(ids[i])
        tokens += np.int64(sequences_of(h)[slot].length) if slot < h.sequences else 0
    return tokens <= most


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


# -- what is left in the cache ---------------------------------------------------------------------------


STORE, DROP = np.bool_(True), np.bool_(False)  # the content that a sequence leaves stays in the cache, or is dropped
NEAR, AHEAD, FAR = 10, 20, 24  # how many blocks ahead what has a key is loaded, its place in the index, and the block


@jit
def _parent(h, slot, i):
    """The key of the block before block ``i`` of a sequence. Full committed blocks have keys."""
    if i == 0:
        return sequences_of(h)[slot].root0, sequences_of(h)[slot].root1
    before = blocks_of(h)[table_of(h)[slot, i - 1]]
    return before.key0, before.key1


@jit(forceinline=True)
def _publish(h, b):
    """Make a full block with a key the device copy of its content. Returns False if the content has a device copy
    already."""
    blocks = blocks_of(h)
    same_key = find_key(h, blocks[b].key0, blocks[b].key1)
    if same_key == NONE:
        enter(h, b, PUBLISHED)
        return True
    if not has_content(h, same_key, blocks[b].namespace, tokens_of(h)[b], extra_in(h, b), 0):
        return False  # other content has this key
    if device_copy(h, same_key) != NONE:
        return False
    blocks[b].other_copy, blocks[same_key].other_copy = same_key, b
    blocks[b].uses = blocks[same_key].uses
    on_insert(h, b)
    blocks[b].saved = blocks[same_key].saved
    blocks[b].flags |= PUBLISHED
    emit(h, STORED, b)
    on_change(h, same_key)
    return True


@jit
def publish_range(h, slot, first, last):
    """Publish the blocks with keys in [first, last) of a sequence. Some may have to wait as duplicates: the first of
    them is noted. Returns how many must wait."""
    blocks, sequence, row = blocks_of(h), sequences_of(h)[slot], table_of(h)[slot]
    waiting = 0
    for i in range(first, last):
        b = np.int64(row[i])
        if i + AHEAD < last and needs_all(h):
            expect(h, blocks[row[i + AHEAD]].key0)  # a guess, if it has no key yet
            expect_child(h, np.int64(row[i + AHEAD]))
            expect_found(h, blocks[row[i + NEAR]].key0)
        if b == NONE or blocks[b].flags & (PUBLISHED | LOST):
            continue
        if has_states(h) and not (blocks[b].flags & KEYED and keeps_state(h, i, sequence.kept)):
            continue  # written again since it was committed, or about to become a later column
        if not blocks[b].flags & KEYED:
            parent0, parent1 = _parent(h, slot, i)
            blocks[b].key0, blocks[b].key1 = key_in(h, tokens_of(h)[b], extra_in(h, b), parent0, parent1)
            blocks[b].parent0, blocks[b].parent1 = parent0, parent1
            blocks[b].flags |= KEYED
        if sequence.private or _publish(h, b):
            continue
        waiting += 1
        if sequence.duplicates == NONE:
            sequence.duplicates = i
    return waiting


@jit
def publish_committed(h, slot, first, last):
    """``publish_range`` for blocks that were just committed. Content that was already cached has been computed
    twice."""
    count = publish_range(h, slot, first, last) * h.width
    sequences_of(h)[slot].recomputed += count
    counters_of(h).recomputed_tokens += count


@jit
def retry_duplicates(h, slot):
    """Publish duplicates of a sequence. When they were committed, others had published their content; a device copy may
    have gone since."""
    sequence = sequences_of(h)[slot]
    first = sequence.duplicates
    if first != NONE and sequence.removals != h.removals:
        sequence.duplicates = NONE
        publish_range(h, slot, first, sequence.committed // h.width)
        sequence.removals = h.removals


@jit
def give_passed(h, slot, before):
    """Give back the blocks that no token after the committed ones sees, or the states from which nobody continues any
    more. ``before`` tokens had been committed."""
    sequence = sequences_of(h)[slot]
    if has_states(h):
        first, last = max((before - 1) // h.width, 0), (sequence.committed - 1) // h.width
    else:
        first, last = np.int64(sequence.first), kept_from(h, sequence.committed)
    if last > first:
        counters_of(h).passed_blocks += give_columns(h, slot, first, last, BACK)
        if h.window:
            sequence.first = last


@jit
def commit_error(h, ids, counts):
    """0 if the first ``counts`` tokens of each sequence (int64[0] = all tokens of all) can be published, else the
    error. The ids were checked."""
    for i in range(counts.shape[0]):
        sequence = sequences_of(h)[slot_of(ids[i])]
        if counts[i] > sequence.length or counts[i] < sequence.committed:
            h.detail, h.bound = i, sequence.length if counts[i] > sequence.length else sequence.committed
            return BAD_COUNT
    return 0


@jit
def commit_rows(h, ids, counts):
    """Publish the first ``counts`` tokens of each sequence. ``commit_error`` has found it possible."""
    for i in range(ids.shape[0]):
        slot = slot_of(ids[i])
        sequence, row = sequences_of(h)[slot], table_of(h)[slot]
        retry_duplicates(h, slot)
        before = np.int64(sequence.committed)
        sequence.committed = counts[i] if counts.shape[0] else np.int64(sequence.length)
        first, last, stream = before // h.width, sequence.committed // h.width, stream_of(h, slot)
        end = state_at(h, slot, sequence.committed) + 1 if has_states(h) else blocks_for(h, sequence.committed)
        for at in range(first, end if sequence.committed > before else 0):
            if row[at] != NONE:
                emit_access(h, WROTE, stream, np.int64(row[at]))
        if sequence.duplicates == NONE:
            sequence.removals = h.removals
        if has_states(h):
            call(h.name, (h, slot, first, last))
        publish_committed(h, slot, first, last)
        if h.window or has_states(h):
            call(h.give_passed, (h, slot, before))


@jit
def _store_tail(h, slot, i, b):
    """Make the committed part of an unfull block a child of the block before, unless a sibling has all of these
    tokens."""
    blocks, sequence = blocks_of(h), sequences_of(h)[slot]
    blocks[b].flags &= ~KEYED
    blocks[b].filled = sequence.committed % h.width
    blocks[b].parent0, blocks[b].parent1 = _parent(h, slot, i)
    if rival_child(h, b, True) == NONE:
        enter(h, b, TAIL)


@jit(forceinline=True)
def forget_everywhere(h, b):
    """Forget the content of a block that no sequence holds any more, and of its other copy, unless somebody holds
    that."""
    if not blocks_of(h)[b].flags & PUBLISHED:
        return
    other = np.int64(blocks_of(h)[b].other_copy)
    if other == NONE or blocks_of(h)[other].word & REFS == 0:
        forget_both(h, b, other)


@jit(forceinline=True)
def stored_tail(h, slot, store):
    """The column of the unfull block whose committed part a sequence leaves in the cache for partial matches. NONE if
    there is none."""
    sequence = sequences_of(h)[slot]
    if not store or sequence.private or sequence.failed or not h.child_buckets or sequence.committed % h.width == 0:
        return np.int64(NONE)
    return sequence.committed // h.width


@jit(forceinline=True)
def give_back(h, slot, i, b, stream, store, tail):
    """Drop the hold of a sequence on ``b``, its block ``i``. The earlier blocks are still in its row. ``tail`` is a
    result of ``stored_tail``."""
    blocks = blocks_of(h)
    emit_access(h, ACCESSED, stream, b)
    word = drop_reference(blocks, b)
    if not store and i >= sequences_of(h)[slot].reused and word & REFS == 0:
        forget_everywhere(h, b)
    if word == 0:
        if i == tail and not blocks[b].flags & PUBLISHED:  # as a fork does that has committed more of it
            _store_tail(h, slot, i, b)
        on_release(h, b, BACK)


@jit
def _release(h, slot, store):
    sequence, row = sequences_of(h)[slot], table_of(h)[slot]
    stream, tail = stream_of(h, slot), stored_tail(h, slot, store)
    if store:
        retry_duplicates(h, slot)
    on_begin_release(h, slot)
    for n in range(sequence.blocks):
        i = nth_released(n, sequence.blocks)
        b = np.int64(row[i])
        prefetch(blocks_of(h), row[nth_released(min(n + FAR, sequence.blocks - 1), sequence.blocks)])
        if b == NONE:
            continue
        row[i] = NONE
        give_back(h, slot, i, b, stream, store, tail)
    on_end_release(h, slot)
    sequence.live = sequence.length = sequence.blocks = sequence.first = 0
    sequence.generation = (sequence.generation + 1) & 0x7FFFFFFF
    rows_of(h)[h.free_rows] = slot
    h.free_rows += 1


@jit
def release_rows(h, ids, store):
    """Give back the blocks of sequences, the last block of each first, so that leaves age first. The ids were
    checked."""
    for i in range(ids.shape[0]):
        _release(h, slot_of(ids[i]), store)
