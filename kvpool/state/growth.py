"""How admitted sequences grow and shrink: append and rewind."""

from __future__ import annotations

from kvpool.jit import jit
from kvpool.state.accesses import ACCESSED, WILL_WRITE, WROTE, emit_access
from kvpool.state.admission import SHORT_OF_BLOCKS
from kvpool.state.blocks import (
    C_COPIED,
    COLUMNS,
    DETAIL,
    DETAIL2,
    DEVICE,
    DEVICE_BLOCKS,
    KEYED,
    NONE,
    PUBLISHED,
    TICKET,
    WIDTH,
    WINDOW,
    add_reference,
    blocks_of,
    counters_of,
    drop_reference,
    extra_of,
    lists_of,
    sequences_of,
    table_of,
)
from kvpool.state.grants import write_tokens
from kvpool.state.live import slot_of, stream_of
from kvpool.state.lru import free_blocks
from kvpool.state.requests import blocks_for
from kvpool.state.sharing import copies, make_writable, private_copy
from kvpool.state.storing import BAD_COUNT
from kvpool.state.tiers import forget, shelve, take_device
from kvpool.state.windows import least

TOO_LONG, PASSED = -6, -20


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
def append(h, ids, counts, tokens):
    """Grow each sequence by its count of ``tokens`` (int32, one after the other), for which there is room: see ``growth``."""
    start = 0
    for i in range(ids.shape[0]):
        _append(h, slot_of(h, ids[i]), tokens, start, counts[i])
        start += counts[i]


@jit
def shared(h, slot, i):
    """Whether others, sequences or readers, hold block ``i`` of a sequence too, so that its tokens may not be written again."""
    return blocks_of(h)[table_of(h)[slot, i]].word != 1


@jit
def _shorten(h, slot, length):
    """Give the last block of a rewound sequence back to it alone: a block that has a key is never written."""
    blocks, row = blocks_of(h), table_of(h)[slot]
    i, keep = length // h[WIDTH], length % h[WIDTH]
    b = row[i]
    if shared(h, slot, i):
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
def rewind_need(h, ids, counts):
    """Blocks that dropping the last ``counts`` tokens of each sequence takes for copies, or the error; ids were checked."""
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
        need += 1 if counts[i] > 0 and length % h[WIDTH] and shared(h, slot, length // h[WIDTH]) else 0
        if need > free:
            h[DETAIL], h[DETAIL2] = need, free
            return SHORT_OF_BLOCKS
    return need


@jit
def rewind(h, ids, counts):
    """Drop the last ``counts`` tokens of each sequence, which ``rewind_need`` has found possible. Returns blocks copied."""
    copied = 0
    for i in range(ids.shape[0]):
        slot = slot_of(h, ids[i])
        stream = stream_of(h, slot)
        if counts[i] > 0:
            copied += rewind_one(h, slot, counts[i], stream)
    counters_of(h)[C_COPIED] += copied
    return copied


@jit
def rewind_one(h, slot, count, stream):
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
