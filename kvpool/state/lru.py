"""Intrusive doubly linked lists per tier and priority, and the heap of expiries; knows nothing of KV.

``lists`` int32[LOWEST + 2, 3] has (first, last, length) per list. A block is in one list or in none (`list` is NONE). ``unlink`` leaves
the block's own links as they were, so that a chain of unlinks is undone exactly by ``relink`` in reverse order (dancing links).
"""

from __future__ import annotations

from kvpool.jit import jit
from kvpool.state.blocks import EMPTY, LISTS_PER_TIER, LOWEST, NONE


@jit(forceinline=True)
def unlink(blocks, lists, b):
    which, before, after = blocks[b].list, blocks[b].prev, blocks[b].next
    if before == NONE:
        lists[which, 0] = after
    else:
        blocks[before].next = after
    if after == NONE:
        lists[which, 1] = before
    else:
        blocks[after].prev = before
    lists[which, 2] -= 1
    blocks[b].list = NONE


@jit(forceinline=True)
def relink(blocks, lists, b, which):
    """Put the block back between the neighbours it was unlinked from; nothing may have changed there since."""
    before, after = blocks[b].prev, blocks[b].next
    if before == NONE:
        lists[which, 0] = b
    else:
        blocks[before].next = b
    if after == NONE:
        lists[which, 1] = b
    else:
        blocks[after].prev = b
    lists[which, 2] += 1
    blocks[b].list = which


@jit(forceinline=True)
def _lower(lists, which):
    tier = which // LISTS_PER_TIER
    priority = which - tier * LISTS_PER_TIER
    if priority < lists[LOWEST + tier, 0]:
        lists[LOWEST + tier, 0] = priority


@jit(forceinline=True)
def push_back(blocks, lists, b, which):
    last = lists[which, 1]
    blocks[b].prev, blocks[b].next = last, NONE
    relink(blocks, lists, b, which)
    _lower(lists, which)


@jit(forceinline=True)
def push_front(blocks, lists, b, which):
    first = lists[which, 0]
    blocks[b].prev, blocks[b].next = NONE, first
    relink(blocks, lists, b, which)
    _lower(lists, which)


@jit(forceinline=True)
def lowest(lists, tier):
    """First block of the lowest non-empty priority, or NONE. Moves the search's starting point only."""
    base = tier * LISTS_PER_TIER
    p = lists[LOWEST + tier, 0]
    while p < EMPTY and lists[base + p, 2] == 0:
        p += 1
    lists[LOWEST + tier, 0] = p
    return lists[base + p, 0] if p < EMPTY else NONE


@jit
def free_blocks(lists, tier):
    total = 0
    for which in range(tier * LISTS_PER_TIER, (tier + 1) * LISTS_PER_TIER):
        total += lists[which, 2]
    return total


@jit
def _sift_up(blocks, heap, place):
    b = heap[place]
    while place > 1 and blocks[heap[place >> 1]].deadline > blocks[b].deadline:
        heap[place] = heap[place >> 1]
        blocks[heap[place]].heap = place
        place >>= 1
    heap[place] = b
    blocks[b].heap = place


@jit
def _sift_down(blocks, heap, place):
    b, size = heap[place], heap[0]
    while 2 * place <= size:
        child = 2 * place
        if child < size and blocks[heap[child + 1]].deadline < blocks[heap[child]].deadline:
            child += 1
        if blocks[heap[child]].deadline >= blocks[b].deadline:
            break
        heap[place] = heap[child]
        blocks[heap[place]].heap = place
        place = child
    heap[place] = b
    blocks[b].heap = place


@jit
def heap_push(blocks, heap, b, deadline):
    """``heap`` int32[blocks + 1]: size, then a binary heap of block ids from index 1 by deadline."""
    heap[0] += 1
    blocks[b].deadline = deadline
    heap[heap[0]] = b
    _sift_up(blocks, heap, heap[0])


@jit(forceinline=True)
def heap_remove(blocks, heap, b):
    """Does nothing for a block that is not in the heap."""
    if blocks[b].heap != NONE:
        _heap_remove(blocks, heap, b)


@jit
def _heap_remove(blocks, heap, b):
    place = blocks[b].heap
    last = heap[heap[0]]
    heap[0] -= 1
    blocks[b].heap = NONE
    if last != b:
        heap[place] = last
        blocks[last].heap = place
        _sift_up(blocks, heap, place)
        _sift_down(blocks, heap, blocks[last].heap)
