"""The life of an admitted sequence: append, commit, rewind, release."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.accesses import ACCESSED, WILL_WRITE, WROTE, emit_access
from kvpool.state.admission import SHORT_OF_BLOCKS
from kvpool.state.blocks import (
    C_COPIED,
    CHILD_BUCKETS,
    COLUMNS,
    DETAIL,
    DETAIL2,
    DEVICE,
    DEVICE_BLOCKS,
    EXTRA,
    FREE_ROWS,
    GUARD,
    KEYED,
    NONE,
    NOW,
    PUBLISHED,
    REFS,
    REMOVALS,
    SECRET0,
    SECRET1,
    TAIL,
    TICKET,
    WIDTH,
    WINDOW,
    add_reference,
    blocks_of,
    counters_of,
    drop_reference,
    extra_of,
    heap_of,
    lists_of,
    rows_of,
    sequences_of,
    table_of,
    tokens_of,
)
from kvpool.state.grants import write_tokens
from kvpool.state.hashing import block_key
from kvpool.state.index import expect, find_key
from kvpool.state.live import check, slot_of, stream_of
from kvpool.state.lru import free_blocks, heap_remove, unlink
from kvpool.state.prefix import device_copy, expect_child, holds, rival_child
from kvpool.state.requests import blocks_for
from kvpool.state.ring import STORED, emit
from kvpool.state.sharing import copies, make_writable, private_copy
from kvpool.state.tiers import EXPIRIES_PER_CALL, begin, enter, expire, forget, shelve, supersede, take_device
from kvpool.state.windows import give_passed, least

TOO_LONG, BAD_COUNT, BAD_TOTAL = -6, -7, -8
PASSED = -20
AHEAD = 4  # blocks whose place in the index is loaded beforehand


@jit
def growth(h, ids, counts):
    """Blocks that appending ``counts`` tokens takes, copies of shared ones included, or the error; ids were checked."""
    need = forked = 0
    for i in range(ids.shape[0]):
        sequence = sequences_of(h)[slot_of(h, ids[i])]
        forked |= sequence.forked
        more = blocks_for(h, sequence.length + counts[i])
        if more > h[COLUMNS] and (h[COLUMNS] < h[DEVICE_BLOCKS] or h[WINDOW]):
            h[DETAIL] = i
            return TOO_LONG
        need += more - sequence.blocks
    return need + copies(h, ids, counts) if forked else need


@jit
def _append(h, slot, tokens, start, count):
    blocks, sequence, row, stream = blocks_of(h), sequences_of(h)[slot], table_of(h)[slot], stream_of(h, slot)
    done = 0
    if sequence.forked and count:
        make_writable(h, slot, stream)
    while done < count:
        at = sequence.length % h[WIDTH]
        if at == 0:
            b = take_device(h)
            add_reference(blocks, b)
            blocks[b].namespace, blocks[b].priority, blocks[b].ttl = sequence.namespace, sequence.priority, sequence.ttl
            row[sequence.blocks] = b
            emit_access(h, WILL_WRITE, stream, b)
            sequence.blocks += 1
        n = min(count - done, h[WIDTH] - at)
        write_tokens(h, row[sequence.blocks - 1], at, tokens, extra_of(h)[0][:0], start + done, n)
        sequence.length += n
        done += n


@jit
def append(h, ids, counts, tokens, now):
    """Grow each sequence by its count of ``tokens`` (int32, one after the other). Returns 0 or an error with nothing changed."""
    error = check(h, ids, True)
    if error:
        return error
    total = 0
    for i in range(counts.shape[0]):
        total += counts[i]
    if total != tokens.shape[0]:
        h[DETAIL], h[DETAIL2] = total, tokens.shape[0]
        return BAD_TOTAL
    need, free = growth(h, ids, counts), free_blocks(lists_of(h), DEVICE)
    if need < 0:
        return need
    if need > free:
        h[DETAIL], h[DETAIL2] = need, free
        return SHORT_OF_BLOCKS
    begin(h, now)
    if need:
        expire(h, EXPIRIES_PER_CALL)
    start = 0
    for i in range(ids.shape[0]):
        _append(h, slot_of(h, ids[i]), tokens, start, counts[i])
        start += counts[i]
    return 0


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
def _publish_range(h, slot, first, last):
    """Publish the keyed blocks [first, last) of a sequence, noting the first that must wait as a duplicate."""
    blocks, sequence, row = blocks_of(h), sequences_of(h)[slot], table_of(h)[slot]
    for i in range(first, last):
        b = row[i]
        if i + AHEAD < last:
            expect(h, blocks[row[i + AHEAD]].key0)  # a guess where it has no key yet
            expect_child(h, row[i + AHEAD])
        if b == NONE or blocks[b].flags & PUBLISHED:
            continue
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
        _publish_range(h, slot, first, sequence.committed // h[WIDTH])
        sequence.removals = h[REMOVALS]


@jit
def commit(h, ids, counts, now):
    """Publish the first ``counts`` tokens of each sequence (int64[0] = all of all). Returns 0 or an error with nothing changed."""
    error = check(h, ids, True)
    if error:
        return error
    for i in range(counts.shape[0]):
        sequence = sequences_of(h)[slot_of(h, ids[i])]
        if counts[i] > sequence.length or counts[i] < sequence.committed:
            h[DETAIL], h[DETAIL2] = i, sequence.length if counts[i] > sequence.length else sequence.committed
            return BAD_COUNT
    begin(h, now)
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
        _publish_range(h, slot, first, sequence.committed // h[WIDTH])
        if h[WINDOW]:
            give_passed(h, slot, stream)
    return 0


@jit
def _shared(h, slot, i):
    """Whether others, sequences or readers, hold block ``i`` of a sequence too, so that its tokens may not be written again."""
    return blocks_of(h)[table_of(h)[slot, i]].word != 1


@jit
def _shorten(h, slot, length):
    """Give the last block of a rewound sequence back to it alone: a block that has a key is never written."""
    blocks, row = blocks_of(h), table_of(h)[slot]
    i, keep = length // h[WIDTH], length % h[WIDTH]
    b = row[i]
    if _shared(h, slot, i):
        row[i] = private_copy(h, b, keep)
        return 1
    if blocks[b].flags & PUBLISHED:
        forget(h, b, NONE)
    blocks[b].flags &= ~KEYED
    blocks[b].filled, blocks[b].uses = keep, 0
    return 0


@jit
def _returned(h, slot, keep):
    """Blocks that nobody would hold if a sequence kept its first ``keep``."""
    count = 0
    for i in range(keep, sequences_of(h)[slot].blocks):
        count += 1 if blocks_of(h)[table_of(h)[slot, i]].word == 1 else 0
    return count


@jit
def rewind(h, ids, counts, now):
    """Drop the last ``counts`` tokens of each sequence. Returns blocks copied, or an error with nothing changed."""
    error = check(h, ids, True)
    if error:
        return error
    need, free = 0, free_blocks(lists_of(h), DEVICE)
    for i in range(ids.shape[0]):
        slot = slot_of(h, ids[i])
        length = sequences_of(h)[slot].length
        if counts[i] > length:
            h[DETAIL], h[DETAIL2] = i, length
            return BAD_COUNT
        if h[WINDOW] and length - counts[i] < least(h, slot):
            h[DETAIL], h[DETAIL2] = i, length - least(h, slot)
            return PASSED
        length -= counts[i]
        free += _returned(h, slot, blocks_for(h, length))
        need += 1 if counts[i] > 0 and length % h[WIDTH] and _shared(h, slot, length // h[WIDTH]) else 0
        if need > free:
            h[DETAIL], h[DETAIL2] = need, free
            return SHORT_OF_BLOCKS
    begin(h, now)
    if need:
        expire(h, EXPIRIES_PER_CALL)
    copied = 0
    for i in range(ids.shape[0]):
        slot = slot_of(h, ids[i])
        stream = stream_of(h, slot)
        if counts[i] > 0:
            copied += _rewind(h, slot, counts[i], stream)
    counters_of(h)[C_COPIED] += copied
    return copied


@jit
def _rewind(h, slot, count, stream):
    blocks, sequence, row = blocks_of(h), sequences_of(h)[slot], table_of(h)[slot]
    length = sequence.length - count
    keep = blocks_for(h, length)
    # Committed or not, what stays may be copied now. What this very call has copied there was not written by the engine.
    if length % h[WIDTH] and blocks[row[keep - 1]].ticket != h[TICKET]:
        emit_access(h, WROTE, stream, row[keep - 1])
    for i in range(sequence.blocks - 1, keep - 1, -1):
        emit_access(h, ACCESSED, stream, row[i])
        if drop_reference(blocks, row[i]) == 0:
            shelve(h, row[i], True)
        row[i] = NONE
    copied = 0
    if length % h[WIDTH]:
        copied = _shorten(h, slot, length)
        emit_access(h, WILL_WRITE, stream, row[keep - 1])
    full = length // h[WIDTH]
    sequence.length, sequence.blocks = length, keep
    sequence.committed, sequence.reused = min(sequence.committed, length), min(sequence.reused, full)
    if sequence.duplicates >= full:
        sequence.duplicates = NONE
    return copied


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
def release(h, ids, store, now):
    """Give sequences back, each tail first so that leaves age first. Returns 0 or an error with nothing changed."""
    error = check(h, ids, False)
    if error:
        return error
    begin(h, now)
    for i in range(ids.shape[0]):
        _release(h, slot_of(h, ids[i]), store)
    return 0
