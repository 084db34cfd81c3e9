"""What sequences leave in the cache: committed blocks become findable, and what is held is given back."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.accesses import ACCESSED, WROTE, emit_access
from kvpool.state.blocks import (
    CHILD_BUCKETS,
    DETAIL,
    DETAIL2,
    EXTRA,
    FREE_ROWS,
    GUARD,
    KEYED,
    KIND,
    NONE,
    NOW,
    PUBLISHED,
    RECURRENT,
    REFS,
    REMOVALS,
    SECRET0,
    SECRET1,
    TAIL,
    WIDTH,
    WINDOW,
    blocks_of,
    drop_reference,
    extra_of,
    heap_of,
    lists_of,
    rows_of,
    sequences_of,
    table_of,
    tokens_of,
)
from kvpool.state.hashing import block_key
from kvpool.state.index import expect, find_key
from kvpool.state.live import slot_of, stream_of
from kvpool.state.lru import heap_remove, unlink
from kvpool.state.prefix import device_copy, expect_child, holds, rival_child
from kvpool.state.requests import blocks_for, keeps_state
from kvpool.state.ring import STORED, emit
from kvpool.state.tiers import enter, forget, shelve, supersede
from kvpool.state.windows import give_passed

BAD_COUNT = -7
AHEAD = 4  # blocks whose place in the index is loaded beforehand


@jit
def _parent(h, slot, i):
    """Key of the block before block ``i`` of a sequence; full committed blocks have keys."""
    if i == 0:
        return sequences_of(h)[slot].root0, sequences_of(h)[slot].root1
    before = blocks_of(h)[table_of(h)[slot, i - 1]]
    return before.key0, before.key1


@jit(forceinline=True)
def _publish(h, b):
    """Make a full keyed block the device copy of its content; False if the content has one already."""
    blocks = blocks_of(h)
    extra = extra_of(h)[b] if blocks[b].flags & EXTRA else extra_of(h)[0][:0]
    found = find_key(h, blocks[b].key0, blocks[b].key1)
    if found == NONE:
        enter(h, b, PUBLISHED)
        if h[CHILD_BUCKETS]:
            supersede(h, b)
        return True
    if not holds(h, found, blocks[b].namespace, tokens_of(h)[b], extra, 0):
        return False  # other content has this key
    if device_copy(h, found) != NONE:
        return False
    blocks[b].twin, blocks[found].twin = found, b
    blocks[b].uses = max(1, blocks[found].uses)
    blocks[b].stored_at = blocks[b].used_at = h[NOW] & 0xFFFFFFFF
    blocks[b].flags |= PUBLISHED
    emit(h, STORED, b)
    if blocks[found].list != NONE:
        to_redundant(h, found)
    return True


@jit
def to_redundant(h, host):
    """The content of a listed host block is on the device as well: it becomes one of the first victims."""
    heap_remove(blocks_of(h), heap_of(h), host)
    unlink(blocks_of(h), lists_of(h), host)
    shelve(h, host, False)


@jit
def publish_range(h, slot, first, last):
    """Publish the keyed blocks [first, last) of a sequence, noting the first that must wait as a duplicate."""
    blocks, sequence, row = blocks_of(h), sequences_of(h)[slot], table_of(h)[slot]
    for i in range(first, last):
        b = row[i]
        if i + AHEAD < last:
            expect(h, blocks[row[i + AHEAD]].key0)  # a guess where it has no key yet
            expect_child(h, row[i + AHEAD])
        if b == NONE or blocks[b].flags & PUBLISHED:
            continue
        if h[KIND] == RECURRENT and not (blocks[b].flags & KEYED and keeps_state(h, i, sequence.kept)):
            continue  # written again since it was committed, or on its way to a later column
        if not blocks[b].flags & KEYED:
            parent0, parent1 = _parent(h, slot, i)
            extra = extra_of(h)[b] if blocks[b].flags & EXTRA else extra_of(h)[0][:0]
            blocks[b].key0, blocks[b].key1 = block_key(tokens_of(h)[b], extra, h[SECRET0], h[SECRET1], parent0, parent1, h[GUARD])
            blocks[b].parent0, blocks[b].parent1 = parent0, parent1
            blocks[b].flags |= KEYED
        if not _publish(h, b) and (sequence.duplicates == NONE or i < sequence.duplicates):
            sequence.duplicates = i


@jit
def retry_duplicates(h, slot):
    """Publish what others held the key of when it was committed, if a device copy has gone since."""
    sequence = sequences_of(h)[slot]
    first = sequence.duplicates
    if first != NONE and sequence.removals != h[REMOVALS]:
        sequence.duplicates = NONE
        publish_range(h, slot, first, sequence.committed // h[WIDTH])
        sequence.removals = h[REMOVALS]


@jit
def commit_error(h, ids, counts):
    """0 if the first ``counts`` tokens of each sequence (int64[0] = all of all) can be published, else the error; ids were checked."""
    for i in range(counts.shape[0]):
        sequence = sequences_of(h)[slot_of(h, ids[i])]
        if counts[i] > sequence.length or counts[i] < sequence.committed:
            h[DETAIL], h[DETAIL2] = i, sequence.length if counts[i] > sequence.length else sequence.committed
            return BAD_COUNT
    return 0


@jit
def commit(h, ids, counts):
    """Publish the first ``counts`` tokens of each sequence, which ``commit_error`` has found possible."""
    for i in range(ids.shape[0]):
        slot = slot_of(h, ids[i])
        sequence = sequences_of(h)[slot]
        retry_duplicates(h, slot)
        before, first = sequence.committed, sequence.committed // h[WIDTH]
        sequence.committed = counts[i] if counts.shape[0] else np.int64(sequence.length)
        stream = stream_of(h, slot)
        for at in range(first, blocks_for(h, sequence.committed) if sequence.committed > before else 0):
            emit_access(h, WROTE, stream, table_of(h)[slot, at])
        if sequence.duplicates == NONE:
            sequence.removals = h[REMOVALS]
        publish_range(h, slot, first, sequence.committed // h[WIDTH])
        if h[WINDOW]:
            give_passed(h, slot, stream)


@jit
def _store_tail(h, slot, i, b):
    """Enter the committed part of an unfull block as a child, unless a sibling holds all of it already."""
    blocks, sequence = blocks_of(h), sequences_of(h)[slot]
    blocks[b].flags &= ~KEYED
    blocks[b].filled = sequence.committed % h[WIDTH]
    blocks[b].parent0, blocks[b].parent1 = _parent(h, slot, i)
    if rival_child(h, b, True) == NONE:
        enter(h, b, TAIL)
        supersede(h, b)


@jit
def _forget_everywhere(h, b):
    """Forget the content of a device block and of its host copy."""
    blocks = blocks_of(h)
    host = np.int64(blocks[b].twin)
    forget(h, b, NONE)
    if host != NONE:
        forget(h, host, NONE)
        if blocks[host].list != NONE:
            heap_remove(blocks, heap_of(h), host)
            unlink(blocks, lists_of(h), host)
            shelve(h, host, False)


@jit(forceinline=True)
def stored_tail(h, slot, store):
    """Place of the unfull block whose committed part a sequence leaves behind for partial matches, NONE if it leaves none."""
    sequence = sequences_of(h)[slot]
    if not store or sequence.failed or not h[CHILD_BUCKETS] or sequence.committed % h[WIDTH] == 0:
        return np.int64(NONE)
    return sequence.committed // h[WIDTH]


@jit(forceinline=True)
def give_back(h, slot, i, b, stream, store, tail):
    """Drop the hold of a sequence on ``b``, its block ``i``; the blocks before are still in its row. ``tail`` as in ``stored_tail``."""
    blocks = blocks_of(h)
    emit_access(h, ACCESSED, stream, b)
    word = drop_reference(blocks, b)
    if not store and i >= sequences_of(h)[slot].reused and word & REFS == 0 and blocks[b].flags & PUBLISHED:
        _forget_everywhere(h, b)
    if word == 0:
        if i == tail and not blocks[b].flags & PUBLISHED:  # as a fork does that has committed more of it
            _store_tail(h, slot, i, b)
        shelve(h, b, False)


@jit
def _release(h, slot, store):
    sequence, row = sequences_of(h)[slot], table_of(h)[slot]
    stream, tail = stream_of(h, slot), stored_tail(h, slot, store)
    if store and not sequence.failed:
        retry_duplicates(h, slot)
    for i in range(sequence.blocks - 1, -1, -1):
        b = row[i]
        if b == NONE:
            continue
        row[i] = NONE
        give_back(h, slot, i, b, stream, store, tail)
    sequence.live = sequence.length = sequence.blocks = sequence.first = 0
    sequence.generation = (sequence.generation + 1) & 0x7FFFFFFF
    rows_of(h)[h[FREE_ROWS]] = slot
    h[FREE_ROWS] += 1


@jit
def release(h, ids, store):
    """Give sequences back, each tail first so that leaves age first; ids were checked."""
    for i in range(ids.shape[0]):
        _release(h, slot_of(h, ids[i]), store)
