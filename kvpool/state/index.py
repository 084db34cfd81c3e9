"""The index of cached content: full blocks by key, and the children of a key for partial matches. It has bucket heads,
and links inside the blocks.

There are three buckets for each block, so most lookups end at the head. One block represents a cached content in both
structures: its device copy or its host copy. That block is marked LINKED; ``other_copy`` leads to the other copy.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.jit.intrinsics import prefetch
from kvpool.state.records import (
    EXTRA,
    LINKED,
    NAMESPACE_AT_HIT,
    NONE,
    TAIL,
    TOKENS_AT_HIT,
    blocks_of,
    children_of,
    extra_in,
    extra_of,
    index_of,
    tokens_of,
)

CANDIDATES = 16  # the most children that a lookup compares, most recent first


@jit(forceinline=True)
def bucket(key, count):
    """Multiply-shift range reduction of the upper half of a uniform 64-bit key (Lemire, 2019)."""
    return (np.int64(np.uint64(key) >> np.uint64(32)) * count) >> 32


@jit(forceinline=True)
def expect(h, key0):
    """Begin to load what a lookup or change of this key will read first."""
    prefetch(index_of(h), bucket(key0, h.buckets))


@jit(forceinline=True)
def expect_found(h, key0):
    """Begin to load what stands where a key is looked for. ``expect`` was called some time ago."""
    prefetch(blocks_of(h), np.int64(index_of(h)[bucket(key0, h.buckets)]))


@jit(forceinline=True)
def find_key(h, key0, key1):
    """The representative of a key, or NONE."""
    blocks = blocks_of(h)
    b = np.int64(index_of(h)[bucket(key0, h.buckets)])
    while b != NONE and (blocks[b].key0 != key0 or blocks[b].key1 != key1):
        b = np.int64(blocks[b].chain)
    return b


@jit(forceinline=True)
def enter_key(h, b):
    """Make ``b`` the representative of its key. There must be none. It comes last in its bucket, since older content
    is removed first, and is found first then."""
    blocks, heads = blocks_of(h), index_of(h)
    at = bucket(blocks[b].key0, h.buckets)
    blocks[b].chain, last = NONE, heads[at]
    if last == NONE:
        heads[at] = b
        return
    while blocks[last].chain != NONE:
        last = blocks[last].chain
    blocks[last].chain = b


@jit(forceinline=True)
def remove_key(h, b, successor):
    """Remove the representative ``b``, or replace it by its other copy ``successor``."""
    blocks, heads = blocks_of(h), index_of(h)
    at, after = bucket(blocks[b].key0, h.buckets), blocks[b].chain
    if successor != NONE:
        blocks[successor].chain = after
        after = successor
    if heads[at] == b:
        heads[at] = after
    else:
        i = heads[at]
        while blocks[i].chain != b:
            i = blocks[i].chain
        blocks[i].chain = after
    blocks[b].chain = NONE


@jit(forceinline=True)
def child_bucket(parent, first_token, count):
    return bucket(np.uint64(parent) + np.uint64(np.uint32(first_token)) * np.uint64(0x9E3779B97F4A7C15), count)


@jit
def same_tokens(h, b, tokens, extra, start, count):
    """How many of the first ``count`` tokens of block ``b`` equal ``tokens[start:]``, with their extra ids, up to the
    first difference."""
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
def has_content(h, b, namespace, tokens, extra, start):
    """Whether a full block has this namespace, these tokens and these extra ids. A hash alone is never a hit."""
    if (h.guards & NAMESPACE_AT_HIT) and blocks_of(h)[b].namespace != namespace:
        return False
    if not h.guards & TOKENS_AT_HIT:
        return True
    own, width = tokens_of(h), h.width
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
    """The representative of a key, if it has this namespace, these tokens and these extra ids; else NONE."""
    b = find_key(h, key0, key1)
    if b != NONE and not has_content(h, b, namespace, tokens, extra, start):
        return np.int64(NONE)
    return b


@jit(forceinline=True)
def device_copy(h, b):
    return b if b < h.device_blocks else blocks_of(h)[b].other_copy


@jit(forceinline=True)
def host_copy(h, b):
    return b if b >= h.device_blocks else blocks_of(h)[b].other_copy


@jit(forceinline=True)
def expect_child(h, b):
    """Begin to load what entering or removing ``b`` among the children of its parent will read first."""
    if h.child_buckets:
        prefetch(children_of(h), child_bucket(blocks_of(h)[b].parent0, tokens_of(h)[b, 0], h.child_buckets))


@jit(forceinline=True)
def _add_child(h, b):
    blocks, heads = blocks_of(h), children_of(h)
    at = child_bucket(blocks[b].parent0, tokens_of(h)[b, 0], h.child_buckets)
    first = heads[at]
    blocks[b].child_prev, blocks[b].child_next = NONE, first
    if first != NONE:
        blocks[first].child_prev = b
    heads[at] = b


@jit
def _remove_child(h, b, successor):
    """Remove ``b`` from its bucket, or replace it by ``successor``."""
    blocks = blocks_of(h)
    before, after = blocks[b].child_prev, blocks[b].child_next
    into_before = after if successor == NONE else successor
    if before == NONE:
        children_of(h)[child_bucket(blocks[b].parent0, tokens_of(h)[b, 0], h.child_buckets)] = into_before
    else:
        blocks[before].child_next = into_before
    if after != NONE:
        blocks[after].child_prev = before if successor == NONE else successor
    if successor != NONE:
        blocks[successor].child_prev, blocks[successor].child_next = before, after
    blocks[b].child_prev = blocks[b].child_next = NONE


@jit(forceinline=True)
def link(h, b):
    """Put a block into the index (unless it is an unfull tail) and among the children of its parent."""
    blocks = blocks_of(h)
    if not blocks[b].flags & TAIL:
        enter_key(h, b)
    if h.child_buckets:
        _add_child(h, b)
    blocks[b].flags |= LINKED


@jit(forceinline=True)
def unlink_content(h, b, successor):
    """Remove the representative ``b``, or replace it by its other copy ``successor``."""
    blocks = blocks_of(h)
    if not blocks[b].flags & TAIL:
        remove_key(h, b, successor)
    if h.child_buckets:
        _remove_child(h, b, successor)
    blocks[b].flags &= ~LINKED
    if successor != NONE:
        blocks[successor].flags |= LINKED


@jit
def _is_child(h, b, parent0, parent1, namespace):
    blocks = blocks_of(h)
    if blocks[b].parent0 != parent0 or blocks[b].parent1 != parent1:
        return False
    return not (h.guards & NAMESPACE_AT_HIT) or blocks[b].namespace == namespace


@jit
def best_child(h, parent0, parent1, namespace, tokens, extra, start, limit):
    """(block, n): the child that begins with the most of ``tokens[start : start + limit]``, and how many tokens that
    are. The most recent child wins a tie. n may be 0."""
    best, most = NONE, 0
    b = np.int64(children_of(h)[child_bucket(parent0, tokens[start], h.child_buckets)])
    seen = 0
    while b != NONE and seen < CANDIDATES:
        if _is_child(h, b, parent0, parent1, namespace):
            n = same_tokens(h, b, tokens, extra, start, min(limit, np.int64(blocks_of(h)[b].filled)))
            if n > most:
                best, most = b, n
        b = np.int64(blocks_of(h)[b].child_next)
        seen += 1
    return best, most


@jit
def begun_tail(h, parent0, parent1, namespace, tokens, extra, start):
    """A stored tail of this parent whose tokens are the next ones of ``tokens[start:]``, or NONE. Looks at all
    children."""
    blocks, left = blocks_of(h), tokens.shape[0] - start
    b = np.int64(children_of(h)[child_bucket(parent0, tokens[start], h.child_buckets)])
    while b != NONE:
        count = np.int64(blocks[b].filled)
        if blocks[b].flags & TAIL and count <= left and _is_child(h, b, parent0, parent1, namespace):
            if same_tokens(h, b, tokens, extra, start, count) == count:
                return b
        b = np.int64(blocks[b].child_next)
    return np.int64(NONE)


@jit
def rival_child(h, b, longer):
    """A sibling of ``b``. With ``longer``, one that begins with all tokens of ``b`` and has more. Else a tail with
    which ``b`` begins."""
    blocks = blocks_of(h)
    tokens = tokens_of(h)[b]
    extra = extra_in(h, b)
    i = np.int64(children_of(h)[child_bucket(blocks[b].parent0, tokens[0], h.child_buckets)])
    seen = 0
    while i != NONE and seen < CANDIDATES:
        if i != b and _is_child(h, i, blocks[b].parent0, blocks[b].parent1, blocks[b].namespace):
            mine, other = np.int64(blocks[b].filled), np.int64(blocks[i].filled)
            if longer and other > mine and same_tokens(h, i, tokens, extra, 0, mine) == mine:
                return i
            if (
                not longer
                and blocks[i].flags & TAIL
                and other <= mine
                and same_tokens(h, i, tokens, extra, 0, other) == other
            ):
                return i
        i = np.int64(blocks[i].child_next)
        seen += 1
    return NONE
