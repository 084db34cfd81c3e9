"""Cached content that a caller names, by keys or by namespace. It is forgotten, or gets another priority.

Content that somebody holds is forgotten too: nobody finds it any more, and its block is empty once nobody holds it. A
sequence or a reservation that holds forgotten content publishes nothing from then on. Otherwise a block that it commits
later, or has computed a second time, would bring the content back.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.index import begun_tail, device_copy, find_key
from kvpool.state.kinds import finds, finds_parts
from kvpool.state.policy import on_change, set_retention
from kvpool.state.records import (
    INDEXED,
    KEYED,
    NONE,
    SWAPPED,
    blocks_of,
    counters_of,
    head,
    request_at,
    sequences_of,
    swapped_of,
    table_of,
)
from kvpool.state.requests import parent_of, request_extra, request_tokens
from kvpool.state.ring import UPDATED, emit
from kvpool.state.tiers import begin, forget, forget_both


@jit
def _erase(h, b):
    """Remove the cached content of block ``b`` from the index on both tiers."""
    device = np.int64(device_copy(h, b))
    if device == NONE:
        forget(h, b, NONE)
        on_change(h, b)
    else:
        forget_both(h, device, np.int64(blocks_of(h)[device].other_copy))
        on_change(h, device)
    counters_of(h).forgotten_by_call_blocks += 1


@jit
def _withdraw(heads, slot):
    """Have a sequence or a reservation publish nothing from now on, in all groups."""
    for g in range(heads.shape[0]):
        sequence = sequences_of(head(heads, g))[slot]
        sequence.private, sequence.duplicates = 1, NONE


@jit
def forget_namespace(heads, namespace, now):
    """Forget all content of a namespace. Returns how many contents, counted in each group. Looks at every block."""
    done = 0
    for g in range(heads.shape[0]):
        h = head(heads, g)
        begin(h, now)
        blocks = blocks_of(h)
        for b in range(h.blocks if finds(h) else 0):
            if blocks[b].flags & INDEXED and blocks[b].namespace == namespace:
                _erase(h, np.int64(b))
                done += 1
    first = head(heads, 0)
    for slot in range(first.sequences):
        if sequences_of(first)[slot].live and sequences_of(first)[slot].namespace == namespace:
            _withdraw(heads, slot)
    return np.int64(done)


@jit
def _is_among(key0, key1, keys):
    """Whether a key is one of ``keys`` int64[n, 2], which are sorted."""
    low, high = 0, keys.shape[0]
    while low < high:
        at = (low + high) // 2
        if keys[at, 0] < key0 or (keys[at, 0] == key0 and keys[at, 1] < key1):
            low = at + 1
        else:
            high = at
    return low < keys.shape[0] and keys[low, 0] == key0 and keys[low, 1] == key1


@jit
def _holds_some(h, slot, keys):
    """Whether a row has a block with one of these keys, cached or not. A sequence that is swapped out has its blocks
    elsewhere."""
    blocks, sequence = blocks_of(h), sequences_of(h)[slot]
    row = (swapped_of(h) if sequence.live == SWAPPED else table_of(h))[slot]
    for i in range(sequence.blocks):
        b = row[i]
        if b != NONE and blocks[b].flags & KEYED and _is_among(blocks[b].key0, blocks[b].key1, keys):
            return True
    return False


@jit
def forget_keys(heads, keys, ordered, now):
    """Forget the contents of ``keys`` int64[n, 2] in all groups. Returns how many. ``ordered``: the same keys,
    sorted."""
    done = 0
    for g in range(heads.shape[0]):
        h = head(heads, g)
        begin(h, now)
        for i in range(keys.shape[0] if finds(h) else 0):
            b = find_key(h, keys[i, 0], keys[i, 1])
            if b != NONE:
                _erase(h, b)
                done += 1
    for slot in range(head(heads, 0).sequences):
        if sequences_of(head(heads, 0))[slot].live:
            some = False
            for g in range(heads.shape[0]):
                some |= finds(head(heads, g)) and _holds_some(head(heads, g), slot, ordered)
            if some:
                _withdraw(heads, slot)
    return np.int64(done)


@jit
def forget_prompt(heads, requests, keys, ordered, now):
    """``forget_keys`` for the ``keys`` of a prompt, and for stored tails with which its remaining tokens begin."""
    done, request = forget_keys(heads, keys, ordered, now), request_at(requests, 0)
    tokens, extra = request_tokens(request), request_extra(request)
    for g in range(heads.shape[0]):
        h = head(heads, g)
        start, i = 0, 0
        while finds_parts(h) and start < request.length:
            parent0, parent1 = parent_of(h, request, i)
            b = begun_tail(h, parent0, parent1, request.namespace, tokens, extra, start)
            if b == NONE:
                start, i = start + h.width, i + 1
            else:
                _erase(h, b)
                done += 1
    return np.int64(done)


@jit
def set_priority(heads, keys, priority, ttl, now):
    """Give the cached contents of ``keys`` int64[n, 2] this priority and ttl from now on. Returns how many, counted in
    each group.

    If content is on both tiers, its other copy gets them when it becomes the only one.
    """
    done = 0
    for g in range(heads.shape[0]):
        h = head(heads, g)
        begin(h, now)
        for i in range(keys.shape[0] if finds(h) else 0):
            b = find_key(h, keys[i, 0], keys[i, 1])
            if b != NONE:
                device = np.int64(device_copy(h, b))
                b = b if device == NONE else device
                if set_retention(h, b, priority, ttl):
                    emit(h, UPDATED, b)
                done += 1
    return np.int64(done)
