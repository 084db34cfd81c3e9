"""The index key -> block: bucket heads with links inside the blocks; four buckets a block, so that most lookups end at the head."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.atomics import prefetch
from kvpool.state.blocks import BUCKETS, NONE, blocks_of, index_of


@jit(forceinline=True)
def bucket(key, count):
    """Multiply-shift range reduction of the upper half of a uniform 64-bit key (Lemire, 2019)."""
    return (np.int64(np.uint64(key) >> np.uint64(32)) * count) >> 32


@jit(forceinline=True)
def expect(h, key0):
    """Begin to load what a lookup or change of this key will read first."""
    prefetch(index_of(h), bucket(key0, h[BUCKETS]))


@jit(forceinline=True)
def find_key(h, key0, key1):
    """The representative of a key, or NONE."""
    blocks = blocks_of(h)
    b = np.int64(index_of(h)[bucket(key0, h[BUCKETS])])
    while b != NONE and (blocks[b].key0 != key0 or blocks[b].key1 != key1):
        b = np.int64(blocks[b].chain)
    return b


@jit(forceinline=True)
def enter_key(h, b):
    """Make ``b`` the representative of its key; there must be none."""
    blocks, heads = blocks_of(h), index_of(h)
    at = bucket(blocks[b].key0, h[BUCKETS])
    blocks[b].chain = heads[at]
    heads[at] = b


@jit(forceinline=True)
def remove_key(h, b, successor):
    """Take representative ``b`` out, or put its other copy ``successor`` in its place."""
    blocks, heads = blocks_of(h), index_of(h)
    at, after = bucket(blocks[b].key0, h[BUCKETS]), blocks[b].chain
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
