"""The lists of evictable blocks, and the heap of deadlines. Nothing here depends on what the blocks hold."""

from __future__ import annotations

from kvpool.common.jit import inline, jit
from kvpool.state.records import DEVICE, EMPTY, HOST, LISTS_PER_TIER, LOWEST, NONE, blocks_of, heap_of, lists_of

FRONT, BACK = True, False  # of a list


@inline
def unlink(group, b):
    """Take a block out of its list. It keeps its neighbours, for ``relink``, and its deadline."""
    blocks, lists = blocks_of(group), lists_of(group)
    which, before, after = blocks[b].list, blocks[b].prev, blocks[b].next
    if which < 0:
        raise RuntimeError("a block was taken out of a list that is in none")
    if before == NONE:
        lists[which, 0] = after
    else:
        blocks[before].next = after
    if after == NONE:
        lists[which, 1] = before
    else:
        blocks[after].prev = before
    lists[which, 2] -= 1
    blocks[b].list = ~which


@inline
def relink(group, b):
    """Undo ``unlink`` to the byte: put a block back between its former neighbours. Nothing may have changed there
    since, so call it in the reverse order."""
    _link(group, b, ~blocks_of(group)[b].list)


@inline
def _link(group, b, which):
    """Put a block into a list, between the neighbours that it names."""
    blocks, lists = blocks_of(group), lists_of(group)
    if blocks[b].list >= 0:
        raise RuntimeError("a block was put into a list that is in one")
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


@inline
def _lower(lists, which):
    tier = DEVICE if which < LISTS_PER_TIER else HOST
    priority = which - tier * LISTS_PER_TIER
    if priority < lists[LOWEST + tier, 0]:
        lists[LOWEST + tier, 0] = priority


@inline
def push(group, b, which, front):
    """Put a block that is in no list at an end of one."""
    blocks, lists = blocks_of(group), lists_of(group)
    blocks[b].prev = NONE if front else lists[which, 1]
    blocks[b].next = lists[which, 0] if front else NONE
    _link(group, b, which)
    _lower(lists, which)


@jit
def push_after(group, b, which, before):
    """Put a block that is in no list into one: after the block ``before`` if that is in it, else in front."""
    blocks = blocks_of(group)
    if before == NONE or blocks[before].list != which:
        push(group, b, which, FRONT)
        return
    blocks[b].prev, blocks[b].next = before, blocks[before].next
    _link(group, b, which)


@inline
def lowest(group, tier):
    """The first block of the lowest priority that has one, or NONE. Changes only where the search starts."""
    lists, base = lists_of(group), tier * LISTS_PER_TIER
    p = lists[LOWEST + tier, 0]
    while p < EMPTY and lists[base + p, 2] == 0:
        p += 1
    lists[LOWEST + tier, 0] = p
    return lists[base + p, 0] if p < EMPTY else NONE


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
def heap_push(group, b, deadline):
    """Add a block to the heap of deadlines, int32[blocks + 1]: the size, then a binary heap of block ids by deadline
    from index 1 on."""
    blocks, heap = blocks_of(group), heap_of(group)
    if blocks[b].heap != NONE:
        raise RuntimeError("a block was put into the expiries that is there")
    heap[0] += 1
    blocks[b].deadline = deadline
    heap[heap[0]] = b
    _sift_up(blocks, heap, heap[0])


@jit
def heap_remove(group, b):
    """Remove a block from the heap, in which it is."""
    blocks, heap = blocks_of(group), heap_of(group)
    place, last = blocks[b].heap, heap[heap[0]]
    heap[0] -= 1
    blocks[b].heap = NONE
    if last != b:
        heap[place] = last
        blocks[last].heap = place
        _sift_up(blocks, heap, place)
        _sift_down(blocks, heap, blocks[last].heap)
