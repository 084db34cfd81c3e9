"""The verbs of a ``HostCache``: host blocks under opaque keys. They use the lists, index, rules and events of pools.

A key has up to 64 bytes. Its *words*, int32[17], are its length and its bytes, padded with zeros. They are stored where
a block of a prompt has its tokens. They are hashed with the secret, under the root of the cache's identity, and
compared whole. A block that waits for its bytes is *pending*: it has its key, is in the index, and is pinned once.

``identity`` int64[3] is the namespace and the root. ``data`` uint8 has the bytes of all keys, concatenated. ``sizes``
int64[n] has their lengths, or int64[1] if all have the same. ``words`` int32[n, 17] and ``found`` int64[n, 3] (hash in
columns 0 and 1, block in column 2) are the call's own memory, which it fills.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.jit import inline, jit
from kvpool.common.jit.intrinsics import address_of, array_at, memcpy
from kvpool.state.control import pin_block, unpin, unpin_block
from kvpool.state.hashing import key_in
from kvpool.state.index import expect, find, link, unlink_content
from kvpool.state.policies.block_lists import BACK, FRONT
from kvpool.state.policies.policy import (
    host_room,
    is_room,
    nth_released,
    on_change,
    on_hit,
    on_insert,
    on_touch,
    on_touched,
    set_retention,
)
from kvpool.state.records import (
    INDEXED,
    KEYED,
    LOST,
    NONE,
    NOT_FOUND,
    PENDING,
    PUBLISHED,
    REUSE_GAP,
    SHORT_OF_BLOCKS,
    blocks_of,
    change_word,
    counters_of,
    group_at,
    no_extra,
    tokens_of,
)
from kvpool.state.saving import put_back
from kvpool.state.tiers import (
    EXPIRIES_PER_CALL,
    STORED,
    UPDATED,
    begin,
    emit,
    emit_cleared,
    expire,
    forget,
    record,
    take_host,
)

KEY_BYTES = 64
KEY_WORDS = 1 + KEY_BYTES // 4
ABSENT, HERE, WAITING = range(3)


@inline
def _flat(words):
    """All rows of words as one flat array."""
    return array_at(address_of(words), (len(words) * KEY_WORDS,), np.int32)


@inline
def _size(sizes, i):
    return sizes[0] if len(sizes) == 1 else sizes[i]


@jit
def _write_words(data, sizes, words):
    """Write the words of each key."""
    flat, source = _flat(words), address_of(data)
    for k in range(len(flat)):
        flat[k] = 0
    for i in range(len(words)):
        size = _size(sizes, i)
        flat[i * KEY_WORDS] = size
        memcpy(address_of(words) + 4 * (i * KEY_WORDS + 1), source, size)
        source += size


@inline
def _find(group, identity, words, matches, i):
    """The block of key ``i``, or NONE. Its hash is in ``matches``; the namespace and the words are compared as well."""
    return find(group, matches[i, 0], matches[i, 1], identity[0], _flat(words), no_extra(group), i * KEY_WORDS)


@jit
def locate(group, identity, data, sizes, words, matches):
    """Write the words, the hash and the block of each key; NONE means no block."""
    _write_words(data, sizes, words)
    for i in range(len(words)):
        key = key_in(group, words[i], no_extra(group), identity[1], identity[2])
        matches[i, 0], matches[i, 1] = key[0], key[1]
        expect(group, key[0])
    for i in range(len(words)):
        matches[i, 2] = _find(group, identity, words, matches, i)


@inline
def _answer(group, b):
    """The answer of a lookup for a block. A block that will not be published is ABSENT."""
    if b == NONE:
        return ABSENT
    flags = blocks_of(group)[b].flags
    if flags & PENDING:
        return ABSENT if flags & LOST else WAITING
    return HERE


@jit(nogil=False)
def lookup(groups, identity, data, sizes, words, matches, answers):
    """Write ABSENT, HERE or WAITING for each key into ``answers`` uint8[n]. Changes nothing else."""
    group = group_at(groups, 0)
    locate(group, identity, data, sizes, words, matches)
    for i in range(len(words)):
        answers[i] = _answer(group, matches[i, 2])


@jit(nogil=False)
def look(groups, identity, data, sizes, words, matches):
    """The answer for one key. Changes nothing."""
    group = group_at(groups, 0)
    locate(group, identity, data, sizes, words, matches)
    return _answer(group, matches[0, 2])


@jit
def set_priority(groups, identity, data, sizes, words, matches, priority, ttl, now_ms):
    """Give the keys that are HERE this priority and ttl from now on. Returns how many."""
    group, done = group_at(groups, 0), 0
    locate(group, identity, data, sizes, words, matches)
    begin(group, now_ms)
    for i in range(len(words)):
        b = matches[i, 2]
        if _answer(group, b) == HERE:
            if set_retention(group, b, priority, ttl):
                emit(group, UPDATED, b)
            done += 1
    return done


# -- pending ------------------------------------------------------------------------------------------


@jit
def _take(group, identity, words, matches, i, priority, ttl, evicted, count):
    """Take a pending block for key ``i``. Returns the number of rows of ``evicted`` int32[n, 17] that are filled."""
    blocks, tokens, before = blocks_of(group), tokens_of(group), counters_of(group).forgotten_host_blocks
    b = take_host(group, priority)
    if b == NONE:
        raise RuntimeError("a block was taken that was not counted")
    if counters_of(group).forgotten_host_blocks != before:
        for k in range(KEY_WORDS):
            evicted[count, k] = tokens[b, k]
        count += 1
    for k in range(KEY_WORDS):
        tokens[b, k] = words[i, k]
    block = blocks[b]
    block.key0, block.key1, block.namespace = matches[i, 0], matches[i, 1], identity[0]
    block.parent0, block.parent1 = identity[1], identity[2]
    block.filled, block.uses, block.ticket = KEY_WORDS, 0, NONE
    block.priority, block.ttl = priority, ttl
    block.flags = KEYED | PENDING
    link(group, b)
    change_word(blocks, b, 0, 1)
    matches[i, 2] = b
    return count


@jit(nogil=False)
def reserve(groups, identity, data, sizes, words, matches, priority, ttl, now_ms, evicted):
    """Take a pending block for each key that has no block. Column 2 of ``matches`` gets it, and NONE for other keys.

    Keys that are HERE already count as used now, and this call does not evict them. Returns the number of evicted keys.
    Their words are in ``evicted``, and ``matches[0, 0]`` is the number of blocks that were taken.

    Returns SHORT_OF_BLOCKS, with no block taken, if there are too few. Then ``matches[0, 0]`` is the number of blocks
    needed (a key that is named twice counts twice), and ``matches[0, 1]`` the number available.
    """
    group = group_at(groups, 0)
    blocks, n = blocks_of(group), len(words)
    locate(group, identity, data, sizes, words, matches)
    begin(group, now_ms)
    expire(group, EXPIRIES_PER_CALL)
    need, free = 0, host_room(group, priority)
    for i in range(n):
        b = matches[i, 2]
        if b == NONE:
            need += 1
        elif is_room(group, b, priority):
            free -= 1
    if need > free:
        matches[0, 0], matches[0, 1] = need, max(free, 0)
        return SHORT_OF_BLOCKS
    for i in range(n):
        if matches[i, 2] != NONE and blocks[matches[i, 2]].flags & PUBLISHED:
            on_hit(group, matches[i, 2])
            pin_block(group, matches[i, 2])
    count, taken = 0, 0
    for i in range(n):  # the hash of a key is not needed after this: column 1 says whether its block was taken
        if matches[i, 2] == NONE and _find(group, identity, words, matches, i) == NONE:
            count = _take(group, identity, words, matches, i, priority, ttl, evicted, count)
            taken += 1
            matches[i, 1] = 1
        else:
            matches[i, 1] = 0
    for i in range(n - 1, -1, -1):
        if matches[i, 1] == 0 and matches[i, 2] != NONE:
            if blocks[matches[i, 2]].flags & PUBLISHED:
                unpin_block(group, matches[i, 2], BACK)
            matches[i, 2] = NONE
    counters_of(group).missed_blocks += taken
    if n > 0:
        matches[0, 0] = taken
    return count


@jit
def _drop(group, b):
    """Empty a pending block and return it to the list of empty blocks."""
    unlink_content(group, b, NONE)
    blocks_of(group)[b].flags = 0
    unpin_block(group, b, FRONT)


@jit
def _locate_pending(group, identity, data, sizes, words, matches):
    """Call ``locate``. Returns 0, or NOT_FOUND if a key is not pending: ``matches[0, 0]`` is the place of the
    first one."""
    locate(group, identity, data, sizes, words, matches)
    for i in range(len(words)):
        b = matches[i, 2]
        if b == NONE or not blocks_of(group)[b].flags & PENDING:
            matches[0, 0] = i
            return NOT_FOUND
    return 0


@jit(nogil=False)
def end_pending(groups, identity, data, sizes, words, matches, publishes, now_ms):
    """End the wait of pending blocks. With ``publishes``, make them HERE, and empty those that were forgotten
    meanwhile; else empty all.

    Returns how many were published, or else emptied. If a key is not pending, returns NOT_FOUND and changes nothing:
    ``matches[0, 0]`` is the place of the first one.
    """
    group = group_at(groups, 0)
    blocks = blocks_of(group)
    error = _locate_pending(group, identity, data, sizes, words, matches)
    if error:
        return error
    begin(group, now_ms)
    published = dropped = 0
    for i in range(len(words)):
        b = matches[i, 2]
        block = blocks[b]
        if not block.flags & PENDING:  # named twice
            matches[i, 2] = NONE
        elif publishes and not block.flags & LOST:
            block.flags = (block.flags & ~PENDING) | PUBLISHED
            on_insert(group, b)
            emit(group, STORED, b)
            published += 1
        else:
            _drop(group, b)
            matches[i, 2] = NONE
            dropped += 1
    for n in range(len(words)):
        i = nth_released(n, len(words))
        if matches[i, 2] != NONE:
            unpin_block(group, matches[i, 2], BACK)
    counters = counters_of(group)
    if not publishes:
        counters.lost_blocks += dropped
        return dropped
    counters.offloaded_blocks += published
    counters.forgotten_host_blocks += dropped
    return published


# -- here ---------------------------------------------------------------------------------------------


@inline
def _use(group, b):
    """Record the use of a block that is HERE."""
    record(group, REUSE_GAP, blocks_of(group)[b].used_at)
    on_hit(group, b)


@jit(nogil=False)
def pin(groups, identity, data, sizes, words, matches, now_ms):
    """Pin the block of each key, and write it into column 2 of ``matches``. Returns 0. If a key is not HERE, returns
    NOT_FOUND and changes nothing: ``matches[0, 0]`` is the place of the first one."""
    group = group_at(groups, 0)
    locate(group, identity, data, sizes, words, matches)
    for i in range(len(words)):
        if _answer(group, matches[i, 2]) != HERE:
            matches[0, 0] = i
            return NOT_FOUND
    begin(group, now_ms)
    for i in range(len(words)):
        _use(group, matches[i, 2])
        pin_block(group, matches[i, 2])
    counters_of(group).reused_host_blocks += len(words)
    return 0


@jit(nogil=False)
def end_lease(groups, held, before, now_ms):
    """Unpin the blocks of a lease, ``held`` int64[n]. It is filled with NONE, so that a second call does nothing.
    ``before`` has rows if the blocks were not used: see ``put_back``."""
    if len(held) == 0 or held[0] == NONE:
        return 0
    unpin(groups, held, now_ms)
    if len(before) > 0:
        put_back(groups, 0, held, before)
    for i in range(len(held)):
        held[i] = NONE
    return 0


@jit(nogil=False)
def touch(groups, identity, data, sizes, words, matches, turn, now_ms):
    """Record a use of each key that is HERE, from the last key to the first. ``turn``: they are all keys of a request
    that has ended, in the order of its prompt. Returns their number."""
    group = group_at(groups, 0)
    locate(group, identity, data, sizes, words, matches)
    begin(group, now_ms)
    touched = 0
    for i in range(len(words)):
        if _answer(group, matches[i, 2]) == HERE:
            touched += 1
            if group.policy_at:
                pin_block(group, matches[i, 2])
        else:
            matches[i, 2] = NONE
    if touched > 0:
        on_touch(group, matches, turn)
    for i in range(len(words) - 1, -1, -1):
        b = matches[i, 2]
        if b != NONE:
            _use(group, b)
            if group.policy_at:
                unpin_block(group, b, BACK)
            else:
                on_change(group, b)
    if touched > 0:
        on_touched(group, matches, turn)
    return touched


@jit
def _forget(group, b):
    """Forget a block. Returns whether it had content, or was pending and not forgotten before."""
    blocks = blocks_of(group)
    if blocks[b].flags & PENDING:
        coming = blocks[b].flags & LOST == 0
        blocks[b].flags |= LOST
        return coming
    forget(group, b)
    on_change(group, b)
    return True


@jit(nogil=False)
def forget_keys(groups, identity, data, sizes, words, matches, now_ms):
    """Drop keys that are HERE at once, and pending keys when their writer publishes them. Returns their number."""
    group = group_at(groups, 0)
    locate(group, identity, data, sizes, words, matches)
    begin(group, now_ms)
    forgotten = 0
    for i in range(len(words)):
        b = _find(group, identity, words, matches, i)
        if b != NONE:
            forgotten += 1 if _forget(group, b) else 0
    return forgotten


@jit
def clear(groups, now_ms):
    """Forget all keys, as ``forget_keys`` does, with one event."""
    group = group_at(groups, 0)
    blocks = blocks_of(group)
    begin(group, now_ms)
    for b in range(group.blocks):
        if blocks[b].flags & PENDING:
            blocks[b].flags |= LOST
        elif blocks[b].flags & PUBLISHED:
            unlink_content(group, b, NONE)
            blocks[b].flags &= ~INDEXED
            counters_of(group).forgotten_host_blocks += 1
            on_change(group, b)
    group.generation += 1
    emit_cleared(group)
    return 0
