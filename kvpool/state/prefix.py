"""What is cached of a prefix: full blocks by key, and the children of a key for partial matches, bucket heads with links inside the blocks.

A cached content has one representative in both, marked LINKED: its device or its host copy; ``twin`` leads to the other.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.atomics import prefetch
from kvpool.state.blocks import (
    CHILD_BUCKETS,
    DEVICE_BLOCKS,
    EXTRA,
    GUARD,
    LINKED,
    NONE,
    TAIL,
    WIDTH,
    blocks_of,
    children_of,
    extra_of,
    tokens_of,
)
from kvpool.state.hashing import NAMESPACE_AT_HIT, TOKENS_AT_HIT
from kvpool.state.index import bucket, enter_key, find_key, remove_key

CANDIDATES = 16  # children that a lookup compares at most, most recent first


@jit(forceinline=True)
def child_bucket(parent, first_token, count):
    return bucket(np.uint64(parent) + np.uint64(np.uint32(first_token)) * np.uint64(0x9E3779B97F4A7C15), count)


@jit
def same_tokens(h, b, tokens, extra, start, count):
    """How many of the first ``count`` tokens of block ``b`` equal ``tokens[start:]``, extra ids included, in one run from the first."""
    own = tokens_of(h)
    n = 0
    while n < count and own[b, n] == tokens[start + n]:
        n += 1
    has = blocks_of(h)[b].flags & EXTRA
    if has or extra.shape[0] > 0:
        m = 0
        while m < n:
            mine = extra_of(h)[b, m] if has else 0
            asked = extra[start + m] if extra.shape[0] > 0 else 0
            if mine != asked:
                break
            m += 1
        n = m
    return n


@jit(forceinline=True)
def holds(h, b, namespace, tokens, extra, start):
    """Whether the namespace, tokens and extra ids of full block ``b`` are those asked for: a hash alone is never a hit."""
    if (h[GUARD] & NAMESPACE_AT_HIT) and blocks_of(h)[b].namespace != namespace:
        return False
    if not h[GUARD] & TOKENS_AT_HIT:
        return True
    own, width = tokens_of(h), h[WIDTH]
    different = np.int32(0)
    for i in range(width):
        different |= own[b, i] ^ tokens[start + i]
    if different != 0:
        return False
    if extra.shape[0] > 0 or blocks_of(h)[b].flags & EXTRA:
        return same_tokens(h, b, tokens, extra, start, width) == width
    return True


@jit(forceinline=True)
def find(h, key0, key1, namespace, tokens, extra, start):
    """The representative of a key whose namespace, tokens and extra ids are those asked for, or NONE."""
    b = find_key(h, key0, key1)
    if b != NONE and not holds(h, b, namespace, tokens, extra, start):
        return np.int64(NONE)
    return b


@jit(forceinline=True)
def device_copy(h, b):
    return b if b < h[DEVICE_BLOCKS] else blocks_of(h)[b].twin


@jit(forceinline=True)
def host_copy(h, b):
    return b if b >= h[DEVICE_BLOCKS] else blocks_of(h)[b].twin


@jit(forceinline=True)
def expect_child(h, b):
    """Begin to load what entering or removing ``b`` among the children of its parent will read first."""
    if h[CHILD_BUCKETS]:
        prefetch(children_of(h), child_bucket(blocks_of(h)[b].parent0, tokens_of(h)[b, 0], h[CHILD_BUCKETS]))


@jit(forceinline=True)
def _add_child(h, b):
    blocks, heads = blocks_of(h), children_of(h)
    at = child_bucket(blocks[b].parent0, tokens_of(h)[b, 0], h[CHILD_BUCKETS])
    first = heads[at]
    blocks[b].child_prev, blocks[b].child_next = NONE, first
    if first != NONE:
        blocks[first].child_prev = b
    heads[at] = b


@jit
def _remove_child(h, b, successor):
    """Take ``b`` out of its bucket, or put ``successor`` in its place."""
    blocks = blocks_of(h)
    before, after = blocks[b].child_prev, blocks[b].child_next
    into_before = after if successor == NONE else successor
    if before == NONE:
        children_of(h)[child_bucket(blocks[b].parent0, tokens_of(h)[b, 0], h[CHILD_BUCKETS])] = into_before
    else:
        blocks[before].child_next = into_before
    if after != NONE:
        blocks[after].child_prev = before if successor == NONE else successor
    if successor != NONE:
        blocks[successor].child_prev, blocks[successor].child_next = before, after
    blocks[b].child_prev = blocks[b].child_next = NONE


@jit(forceinline=True)
def link(h, b):
    """Enter a block into the index (unless it is an unfull tail) and among the children of its parent."""
    blocks = blocks_of(h)
    if not blocks[b].flags & TAIL:
        enter_key(h, b)
    if h[CHILD_BUCKETS]:
        _add_child(h, b)
    blocks[b].flags |= LINKED


@jit(forceinline=True)
def unlink_content(h, b, successor):
    """Take the representative ``b`` out, or put its other copy ``successor`` in its place."""
    blocks = blocks_of(h)
    if not blocks[b].flags & TAIL:
        remove_key(h, b, successor)
    if h[CHILD_BUCKETS]:
        _remove_child(h, b, successor)
    blocks[b].flags &= ~LINKED
    if successor != NONE:
        blocks[successor].flags |= LINKED


@jit
def _is_child(h, b, parent0, parent1, namespace):
    blocks = blocks_of(h)
    if blocks[b].parent0 != parent0 or blocks[b].parent1 != parent1:
        return False
    return not (h[GUARD] & NAMESPACE_AT_HIT) or blocks[b].namespace == namespace


@jit
def best_child(h, parent0, parent1, namespace, tokens, extra, start, limit):
    """(block, n): the child that begins with most of ``tokens[start : start + limit]``, most recent first, and how many; n may be 0."""
    best, most = NONE, 0
    b = children_of(h)[child_bucket(parent0, tokens[start], h[CHILD_BUCKETS])]
    seen = 0
    while b != NONE and seen < CANDIDATES:
        if _is_child(h, b, parent0, parent1, namespace):
            n = same_tokens(h, b, tokens, extra, start, min(limit, np.int64(blocks_of(h)[b].filled)))
            if n > most:
                best, most = b, n
        b = blocks_of(h)[b].child_next
        seen += 1
    return best, most


@jit
def rival_child(h, b, longer):
    """A sibling of ``b``: with ``longer`` one that begins with all of its tokens and has more, else a tail that ``b`` begins with."""
    blocks = blocks_of(h)
    tokens = tokens_of(h)[b]
    extra = extra_of(h)[b] if blocks[b].flags & EXTRA else extra_of(h)[0][:0]
    i = children_of(h)[child_bucket(blocks[b].parent0, tokens[0], h[CHILD_BUCKETS])]
    seen = 0
    while i != NONE and seen < CANDIDATES:
        if i != b and _is_child(h, i, blocks[b].parent0, blocks[b].parent1, blocks[b].namespace):
            mine, other = np.int64(blocks[b].filled), np.int64(blocks[i].filled)
            if longer and other > mine and same_tokens(h, i, tokens, extra, 0, mine) == mine:
                return i
            if not longer and blocks[i].flags & TAIL and other <= mine and same_tokens(h, i, tokens, extra, 0, other) == other:
                return i
        i = blocks[i].child_next
        seen += 1
    return NONE
