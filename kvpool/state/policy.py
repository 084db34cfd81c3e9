"""All rules of eviction: which list a block is in while nobody holds it, what a hit changes, which block is the next
victim, and whether its content is offloaded.

``tiers`` moves blocks between lists by these rules. ``verify`` has its own version of ``list_of``, to check this one.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state.lists import lowest
from kvpool.state.records import (
    DEFAULT_PRIORITY,
    DEVICE,
    EMPTY,
    HOST,
    INDEXED,
    LISTS_PER_TIER,
    LOWEST,
    NONE,
    REDUNDANT,
    TAIL,
    USES_MAX,
    blocks_of,
    lists_of,
)


@jit(forceinline=True)
def list_of(h, b):
    """The list of a block while nobody holds it. Each tier has a list of empty blocks, one of redundant host copies
    (the device has the content too), and one for each priority."""
    block = blocks_of(h)[b]
    first = np.int64(DEVICE if b < h.device_blocks else HOST) * LISTS_PER_TIER
    if not block.flags & INDEXED:
        return first + EMPTY
    if b >= h.device_blocks and block.twin != NONE:
        return first + REDUNDANT
    return first + block.priority


@jit(forceinline=True)
def falls(h, b):
    """Whether the content of a listed block gets the default priority when its time to live is over. Content that has
    that priority already does not, nor a redundant copy, which is one of the first victims anyway."""
    block = blocks_of(h)[b]
    return block.ttl != NONE and block.priority != DEFAULT_PRIORITY and (b < h.device_blocks or block.twin == NONE)


@jit(forceinline=True)
def fall(h, b):
    """Give a block the default priority, because its time to live is over."""
    blocks_of(h)[b].priority, blocks_of(h)[b].ttl = DEFAULT_PRIORITY, NONE


@jit(forceinline=True)
def victim(h, tier, priority):
    """The block of a tier that is taken next, its *victim*: an empty block, else on the host a redundant copy, else the
    oldest block of the lowest priority.

    Returns NONE if that priority is above ``priority``: then the host keeps its content. While an admission still has
    to forget content on the host (``overflow``), it takes that content before redundant copies. The blocks that it
    onboards become redundant copies, and could be overwritten only after their own copies; each such wait would add to
    a chain. Changes only where the search starts.
    """
    lists, first = lists_of(h), tier * LISTS_PER_TIER
    b = np.int64(lists[first + EMPTY, 0])
    if b == NONE and tier == HOST and h.overflow == 0:
        b = np.int64(lists[first + REDUNDANT, 0])
    if b != NONE:
        return b
    b = np.int64(lowest(lists, tier))
    return b if b != NONE and blocks_of(h)[b].priority <= priority else np.int64(NONE)


@jit(forceinline=True)
def goes_down(h, b):
    """Whether the content of an evicted device block that has no host copy is worth an offload."""
    block = blocks_of(h)[b]
    wanted = block.priority >= h.offload_priority and block.uses >= h.offload_reuse
    return wanted and not block.flags & TAIL and h.device_blocks != h.blocks


@jit
def count_down(h, takes):
    """Of the next ``takes`` device blocks that are taken, how many have to be offloaded because the host has no copy.
    Changes nothing."""
    blocks, lists = blocks_of(h), lists_of(h)
    left, count = takes - lists[EMPTY, 2], 0
    for which in range(lists[LOWEST + DEVICE, 0], EMPTY):
        b = np.int64(lists[which, 0])
        while b != NONE and left > 0:
            count += 1 if blocks[b].twin == NONE and goes_down(h, b) else 0
            left -= 1
            b = np.int64(blocks[b].next)
    return count


@jit(forceinline=True)
def hit(h, b):
    """A prompt hits a block: count one more use, now."""
    block = blocks_of(h)[b]
    block.used_at = np.uint32(h.now)
    if block.uses < USES_MAX:
        block.uses += 1


@jit(forceinline=True)
def inherit(h, b, other):
    """A host copy has become the only one, and takes over the retention and uses of the device block. Returns whether
    its priority has changed."""
    block, device = blocks_of(h)[b], blocks_of(h)[other]
    changed = block.priority != device.priority
    block.priority, block.ttl, block.uses, block.used_at = device.priority, device.ttl, device.uses, device.used_at
    return changed
