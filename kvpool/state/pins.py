"""Pins: blocks that readers hold, by the ids that all behind the state knows them by, in all groups of layers."""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.accesses import outside
from kvpool.state.blocks import (
    ATTENTION,
    BLOCKS,
    DETAIL,
    DEVICE,
    DEVICE_BLOCKS,
    DEVICE_FIRST,
    HOST_FIRST,
    INDEXED,
    KIND,
    LOST,
    NONE,
    WINDOW,
    blocks_of,
    change_word,
    heap_of,
    lists_of,
)  # fmt: skip
from kvpool.state.index import find_key
from kvpool.state.lru import heap_remove, unlink
from kvpool.state.prefix import device_copy, host_copy
from kvpool.state.tiers import begin, shelve

ANY_TIER = -1


@jit
def place_of(heads, b):
    """The group of a block and its id there, from the id that all behind the state knows it by; (NONE, NONE) for none."""
    for g in range(heads.shape[0]):
        h = heads[g]
        if h[DEVICE_FIRST] <= b < h[DEVICE_FIRST] + h[DEVICE_BLOCKS]:
            return np.int64(g), b - h[DEVICE_FIRST]
        if h[HOST_FIRST] + h[DEVICE_BLOCKS] <= b < h[HOST_FIRST] + h[BLOCKS]:
            return np.int64(g), b - h[HOST_FIRST]
    return np.int64(NONE), np.int64(NONE)


@jit
def pin_block(h, b):
    blocks = blocks_of(h)
    if change_word(blocks, b, 0, 1) == 1 << 32:
        heap_remove(blocks, heap_of(h), b)
        unlink(blocks, lists_of(h), b)


@jit
def _copy_on(h, key0, key1, tier):
    """The block of a key on ``tier``, or with ANY_TIER its host copy where there is one; NONE if there is none."""
    b = find_key(h, key0, key1)
    if b == NONE:
        return np.int64(NONE)
    device, host = device_copy(h, b), host_copy(h, b)
    return np.int64(device if tier == DEVICE or (tier == ANY_TIER and host == NONE) else host)


@jit
def _complete(heads, keys, out):
    """The place of the first key that a group with attention to all tokens lacks, or that all groups lack; NONE if there is none."""
    for i in range(keys.shape[0]):
        found = 0
        for g in range(heads.shape[0]):
            if out[g, i] != NONE:
                found += 1
            elif heads[g, KIND] == ATTENTION and heads[g, WINDOW] == 0:
                return i
        if found == 0:
            return i
    return NONE


@jit
def pin_keys(heads, keys, tier, out):
    """Pin the blocks of each key (int64[n, 2]) in all groups that have one; ids into ``out`` int64[groups, n], NONE where a group has none.

    Returns 0, or -1 with nothing changed and the place of the first key that is missing in DETAIL.
    """
    for g in range(heads.shape[0]):
        for i in range(keys.shape[0]):
            out[g, i] = _copy_on(heads[g], keys[i, 0], keys[i, 1], tier)
    missing = _complete(heads, keys, out)
    if missing != NONE:
        heads[0, DETAIL] = missing
        return -1
    for g in range(heads.shape[0]):
        for i in range(keys.shape[0]):
            if out[g, i] != NONE:
                pin_block(heads[g], out[g, i])
                out[g, i] = outside(heads[g], out[g, i])
    return 0


@jit
def pin_blocks(heads, ids):
    """Pin blocks by id; each must be held or cached. Returns 0, or -1 with nothing changed and the offender's place in DETAIL."""
    for i in range(ids.shape[0]):
        g, b = place_of(heads, ids[i])
        bad = g == NONE
        if not bad:
            block = blocks_of(heads[g])[b]
            bad = block.flags & LOST != 0 or (block.word == 0 and not block.flags & INDEXED)
        if bad:
            heads[0, DETAIL] = i
            return -1
    for i in range(ids.shape[0]):
        g, b = place_of(heads, ids[i])
        pin_block(heads[g], b)
    return 0


@jit
def unpin(heads, ids, now):
    """Drop one pin of each block; what nobody holds then goes back into the list that its content says."""
    for g in range(heads.shape[0]):
        begin(heads[g], now)
    for i in range(ids.shape[0]):
        g, b = place_of(heads, ids[i])
        if change_word(blocks_of(heads[g]), b, 0, -1) == 0:
            shelve(heads[g], b, False)
