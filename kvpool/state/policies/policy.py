"""The order of eviction: which block is evicted next, what a use of a block changes, and whether evicted content is
offloaded.

The state tells this module what happens (``on_insert``, ``on_hit``, ``on_release``, ``on_change``, ``on_only_copy``),
and asks it for a ``victim``. No other module touches the lists of evictable blocks, or the heap of deadlines.

The order is that of ``victim``: by priority, and within one LRU, but for what ``choose`` says. Each tier has a list of
empty blocks, one of clean host copies (the device has the content too), and one for each priority. A block that nobody
holds is in one of them. ``verify`` has its own version of ``list_of``, to check this one.

A pool with another policy than LRU (``policy=``) has records of chains. Then ``on_admit``, ``on_begin_release`` and
``on_end_release`` keep them, and ``agent.choose`` says which block of the default priority is next on a tier, unless
``adaptive`` follows LRU. ``on_join`` keeps what the host has of a chain together. In a HostCache ``on_touch`` and
``on_touched`` keep them.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import address_of, array_at, call, prefetch, record_at
from kvpool.state.index import expect, expect_child
from kvpool.state.policies.chains import LRU, host_policy_of, owners_of, policy_of, put_last
from kvpool.state.records import (
    CLEAN,
    DEFAULT_PRIORITY,
    DEVICE,
    EMPTY,
    HEAD,
    HOST,
    INDEXED,
    LISTS_PER_TIER,
    LOWEST,
    NONE,
    REQUEST_BYTES,
    TAIL,
    TIE_BITS,
    USES_MAX,
    blocks_of,
    heap_of,
    lists_of,
)

# -- lists, and the heap of deadlines: they know nothing of KV -------------------------------------------


FRONT, BACK = np.bool_(True), np.bool_(False)  # of a list


@jit(forceinline=True)
def unlink(blocks, lists, b):
    """Take a block out of its list."""
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


@jit(forceinline=True)
def relink(blocks, lists, b):
    """Put a block back into the list that it left, between its former neighbours. Nothing may have changed there
    since."""
    _link(blocks, lists, b, ~blocks[b].list)


@jit(forceinline=True)
def _link(blocks, lists, b, which):
    """Put a block into a list, between the neighbours that it names."""
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


@jit(forceinline=True)
def _lower(lists, which):
    tier = DEVICE if which < LISTS_PER_TIER else HOST
    priority = which - tier * LISTS_PER_TIER
    if priority < lists[LOWEST + tier, 0]:
        lists[LOWEST + tier, 0] = priority


@jit(forceinline=True)
def push(blocks, lists, b, which, front):
    """Put a block that is in no list at an end of one."""
    blocks[b].prev = NONE if front else lists[which, 1]
    blocks[b].next = lists[which, 0] if front else NONE
    _link(blocks, lists, b, which)
    _lower(lists, which)


@jit
def push_behind(blocks, lists, b, which, behind):
    """Put a block that is in no list into one: behind another block if that is in it, else in front."""
    if behind == NONE or blocks[behind].list != which:
        push(blocks, lists, b, which, FRONT)
        return
    blocks[b].prev, blocks[b].next = behind, blocks[behind].next
    _link(blocks, lists, b, which)


@jit(forceinline=True)
def lowest(lists, tier):
    """The first block of the lowest priority that has one, or NONE. Changes only where the search starts."""
    base = tier * LISTS_PER_TIER
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
def heap_push(blocks, heap, b, deadline):
    """Add a block to ``heap`` int32[blocks + 1]: the size, then a binary heap of block ids by deadline from index 1
    on."""
    if blocks[b].heap != NONE:
        raise RuntimeError("a block was put into the expiries that is there")
    heap[0] += 1
    blocks[b].deadline = deadline
    heap[heap[0]] = b
    _sift_up(blocks, heap, heap[0])


@jit(forceinline=True)
def heap_remove(blocks, heap, b):
    """Remove a block from the heap, if it is in it."""
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


@jit(forceinline=True)
def nth_released(n, count):
    """Which of ``count`` blocks that one prompt covers is released as number ``n``: the last block first, so that
    leaves age before what they continue."""
    return count - 1 - n


# -- lists and deadlines -------------------------------------------------------------------------------


@jit(forceinline=True)
def list_of(h, b):
    """The list of a block while nobody holds it."""
    block = blocks_of(h)[b]
    first = np.int64(DEVICE if b < h.device_blocks else HOST) * LISTS_PER_TIER
    if not block.flags & INDEXED:
        return first + EMPTY
    if b >= h.device_blocks and block.other_copy != NONE:
        return first + CLEAN
    return first + block.priority


@jit(forceinline=True)
def _demotes(h, b):
    """Whether the content of a listed block gets the default priority when its time to live is over. Content that has
    that priority already does not, nor a clean copy, which is one of the first victims anyway."""
    block = blocks_of(h)[b]
    return (
        block.ttl != NONE and block.priority != DEFAULT_PRIORITY and (b < h.device_blocks or block.other_copy == NONE)
    )


@jit(forceinline=True)
def _start_clock(h, b, deadline):
    """Enter a listed block into the heap of deadlines, if its priority can change. Its time begins now, or ends at the
    ``deadline`` that it already has.

    Blocks with the same deadline expire in the order in which they came.
    """
    if _demotes(h, b):
        if deadline == NONE:
            h.clocks += 1
            deadline = ((h.now + blocks_of(h)[b].ttl) << TIE_BITS) | (h.clocks & ((1 << TIE_BITS) - 1))
        heap_push(blocks_of(h), heap_of(h), b, deadline)


@jit(forceinline=True)
def stop_clock(h, b):
    """Remove a block from the heap of deadlines. Returns its deadline, NONE if it has none."""
    block = blocks_of(h)[b]
    if block.heap == NONE:
        return np.int64(NONE)
    heap_remove(blocks_of(h), heap_of(h), b)
    return np.int64(block.deadline)


@jit(forceinline=True)
def place(h, b, deadline):
    """Put a block that is in no list at the back of the list of its content, with its ``deadline`` or a new one."""
    push(blocks_of(h), lists_of(h), b, list_of(h, b), BACK)
    _start_clock(h, b, deadline)


@jit(forceinline=True)
def unlist(h, b):
    """Take a block out of its list, because somebody holds it. Its deadline stays until ``stop_clock``: a heap cannot
    be undone to the byte."""
    unlink(blocks_of(h), lists_of(h), b)


@jit(forceinline=True)
def relist(h, b):
    """Undo ``unlist`` to the byte. Call it in the reverse order."""
    relink(blocks_of(h), lists_of(h), b)


@jit(forceinline=True)
def expired(h):
    """Give the next block whose time to live is over the default priority, at the back of its list. NONE if there is
    none."""
    blocks, heap = blocks_of(h), heap_of(h)
    if heap[0] == 0 or blocks[heap[1]].deadline >> TIE_BITS > h.now:
        return np.int64(NONE)
    b = np.int64(heap[1])
    heap_remove(blocks, heap, b)
    unlink(blocks, lists_of(h), b)
    blocks[b].priority, blocks[b].ttl = DEFAULT_PRIORITY, NONE
    push(blocks, lists_of(h), b, list_of(h, b), BACK)
    return b


# -- what happens --------------------------------------------------------------------------------------


@jit(forceinline=True)
def on_insert(h, b):
    """A block becomes a copy of cached content. The one that computed it is its first use."""
    block = blocks_of(h)[b]
    if block.uses == 0:
        block.uses = 1
    block.stored_at = block.used_at = np.uint32(h.now)
    block.saved = 0


@jit(forceinline=True)
def on_hit(h, b):
    """A prompt hits a block: count one more use, now."""
    block = blocks_of(h)[b]
    block.used_at = np.uint32(h.now)
    if block.uses < USES_MAX:
        block.uses += 1


@jit(forceinline=True)
def on_release(h, b, front):
    """Nobody holds a block any more. It becomes evictable: the last of its list, or with ``front`` the next one. What
    is not cached leaves an empty block."""
    blocks, lists = blocks_of(h), lists_of(h)
    blocks[b].used_at = np.uint32(h.now)
    if blocks[b].flags & INDEXED:
        _start_clock(h, b, NONE)
    else:
        blocks[b].flags = blocks[b].filled = 0
    push(blocks, lists, b, list_of(h, b), front)


@jit(forceinline=True)
def on_admit(h, requests, r, slot):
    """Request ``r`` has got its blocks, in the row ``slot``."""
    if h.policy_at:
        call(policy_of(h).on_admit, (policy_of(h).head_at, address_of(requests) + r * REQUEST_BYTES, slot))


@jit(forceinline=True)
def on_begin_release(h, slot):
    """All blocks of a row are given back next."""
    if h.policy_at:
        call(policy_of(h).on_begin_release, (policy_of(h).head_at, slot, np.int64(0)))


@jit(forceinline=True)
def on_end_release(h, slot):
    """They were."""
    if h.policy_at:
        call(policy_of(h).on_end_release, (policy_of(h).head_at, slot, np.int64(h.stop)))


@jit(forceinline=True)
def on_touch(h, matches, turn):
    """Keys of a HostCache are used, the ``turn`` of a request or not. Their blocks are given back next."""
    if h.policy_at:
        call(policy_of(h).on_touch, (policy_of(h).head_at, address_of(matches), matches.shape[0] * (1 if turn else -1)))


@jit(forceinline=True)
def on_touched(h, matches, turn):
    """They were."""
    if h.policy_at:
        call(
            policy_of(h).on_touched, (policy_of(h).head_at, address_of(matches), matches.shape[0] * (1 if turn else -1))
        )


@jit
def on_change(h, b):
    """The content of a block has changed. If nobody holds it, it goes to the back of its present list."""
    if blocks_of(h)[b].list >= 0:
        stop_clock(h, b)
        unlink(blocks_of(h), lists_of(h), b)
        on_release(h, b, BACK)


@jit(forceinline=True)
def on_only_copy(h, b, device, deadline):
    """A host copy has become the only one, and takes over the retention and uses of the device block. Unless it is
    held, it is no clean copy any more. Returns whether its priority has changed."""
    block, other = blocks_of(h)[b], blocks_of(h)[device]
    changed = block.priority != other.priority
    block.priority, block.ttl, block.uses, block.used_at = other.priority, other.ttl, other.uses, other.used_at
    if block.list >= 0:
        unlink(blocks_of(h), lists_of(h), b)
        place_only_copy(h, b, device, deadline)
    return changed


@jit(forceinline=True)
def place_only_copy(h, b, device, deadline):
    """``place`` a host block that has become the only copy of what a device block had. What the host has of one chain
    lies side by side."""
    place(h, b, deadline)
    if h.policy_at and policy_of(h).on_join:
        call(policy_of(h).on_join, (policy_of(h).head_at, np.int64(b), np.int64(device)))


@jit
def on_join(at, b, device):
    """A host block is listed with what a device block has had: it is of the same chain."""
    h = record_at(at, HEAD)
    if blocks_of(h)[b].list != host_policy_of(h).list:
        return np.int64(0)
    owners = owners_of(h)
    c = owners[b] = owners[device]
    behind = put_last(h, np.int64(c), b) if c != NONE else np.int64(NONE)
    if behind != NONE:
        unlink(blocks_of(h), lists_of(h), b)
        push_behind(blocks_of(h), lists_of(h), b, host_policy_of(h).list, behind)
    return np.int64(0)


@jit
def set_retention(h, b, priority, ttl):
    """Give content another priority and time to live, which begins anew. A listed block whose priority changes goes to
    the back of its new list. Returns whether it changed."""
    blocks, lists = blocks_of(h), lists_of(h)
    changed, listed = blocks[b].priority != priority, blocks[b].list >= 0
    stop_clock(h, b)
    if listed and changed:
        unlink(blocks, lists, b)
    blocks[b].priority, blocks[b].ttl = priority, ttl
    if listed and changed:
        push(blocks, lists, b, list_of(h, b), BACK)
    if listed:
        _start_clock(h, b, NONE)
    return changed


@jit
def evict_next(h, b):
    """Put a block that nobody holds in front of its list. Returns whether it is in one."""
    which = blocks_of(h)[b].list
    if which < 0:
        return False
    unlink(blocks_of(h), lists_of(h), b)
    push(blocks_of(h), lists_of(h), b, which, FRONT)
    return True


@jit
def on_reset(h):
    """All content is gone: every block that nobody holds is empty."""
    for b in range(h.blocks):
        if blocks_of(h)[b].list >= 0:
            stop_clock(h, b)
            unlink(blocks_of(h), lists_of(h), b)
            blocks_of(h)[b].filled = 0
            push(blocks_of(h), lists_of(h), b, list_of(h, b), BACK)


# -- victims -------------------------------------------------------------------------------------------


@jit(forceinline=True)
def victim(h, tier, priority):
    """The block of a tier that is taken next, its *victim*. The first of these that there is:

    1. an empty block;
    2. on the host a clean copy, unless an admission still has to forget content there (``overflow``);
    3. a block of the lowest priority. It is the oldest one, or in the list that the policy has a say in, the one that
       its ``choose`` names, where that does not follow LRU.

    Returns NONE if that priority is above ``priority``: then the host keeps its content. Clean copies wait behind what
    an admission has to forget, since the blocks that it onboards become such: they could be overwritten only after
    their own copies, and each such wait would add to a chain. Changes only where the search starts. ``choose`` also
    notes that the block goes, so the caller takes it.
    """
    lists, first = lists_of(h), tier * LISTS_PER_TIER
    b = np.int64(lists[first + EMPTY, 0])
    if b == NONE and tier == HOST and h.overflow == 0:
        b = np.int64(lists[first + CLEAN, 0])
    if b != NONE:
        return b
    b = np.int64(lowest(lists, tier))
    if b == NONE or blocks_of(h)[b].priority > priority:
        return np.int64(NONE)
    if h.policy_at:
        policy, which = policy_of(h), blocks_of(h)[b].list
        if policy.follows != LRU and (which == policy.list or which == host_policy_of(h).list):
            b = call(policy.choose, (policy.head_at, np.int64(which != policy.list), np.int64(0)))
    return b


@jit
def expect_victims(h, tier, count):
    """Have the lists of a tier begin with the blocks that the next ``count`` victims with content are, in this order.

    LRU's do. What another policy chooses is put in front, and is of no chain any more. So it stays there until it is
    used.
    """
    blocks, lists, last = blocks_of(h), lists_of(h), np.int64(NONE)
    usual = tier * LISTS_PER_TIER + DEFAULT_PRIORITY
    if (
        not h.policy_at
        or policy_of(h).follows == LRU
        or (usual != policy_of(h).list and usual != host_policy_of(h).list)
    ):
        return
    for which in range(tier * LISTS_PER_TIER, usual):
        count -= lists[which, 2]
    for _ in range(min(count, lists[usual, 2])):
        b = call(policy_of(h).choose, (policy_of(h).head_at, np.int64(usual != policy_of(h).list), np.int64(0)))
        unlink(blocks, lists, b)
        owners_of(h)[b] = NONE
        blocks[b].prev, last = last, b
    while last != NONE:
        b, last = last, np.int64(blocks[last].prev)
        push(blocks, lists, b, usual, FRONT)


@jit(forceinline=True)
def take_victim(h, tier, priority):
    """Take the ``victim`` of a tier out of its list. Returns it, or NONE, and the deadline of its content, or NONE."""
    b = victim(h, tier, priority)
    cached = b != NONE and blocks_of(h)[b].flags & INDEXED != 0
    if tier == HOST and h.overflow and (b == NONE or cached):
        h.overflow -= 1
    if b == NONE:
        return b, np.int64(NONE)
    unlink(blocks_of(h), lists_of(h), b)
    if tier == HOST:
        disown(h, b)
    if tier == DEVICE and cached:
        _expect_victims(h, b)
    return b, stop_clock(h, b)


@jit(forceinline=True)
def disown(h, b):
    """The content of a block that was taken has gone where it goes: the block is of no chain any more."""
    if h.policy_at:
        owners_of(h)[b] = NONE


SOON = 10  # how many evictions ahead the index is loaded; the block twice as many


@jit(forceinline=True)
def foresee(h, row, i):
    """Note the block that a release of this row gives back some places behind its block ``i``."""
    blocks_of(h)[row[i]].soon = max(row[max(i - SOON, 0)], 0)


@jit(forceinline=True)
def _expect_victims(h, b):
    """Begin to load what the evictions after that of ``b`` will touch. What was foreseen may be wrong: nothing depends
    on it."""
    blocks, soon = blocks_of(h), np.int64(blocks_of(h)[b].soon)
    later = np.int64(blocks[soon].soon)
    prefetch(blocks, later)
    prefetch(blocks["parent0"], later)
    prefetch(array_at(h.tokens_at, (h.blocks * h.width,), np.int32), later * h.width)
    expect(h, blocks[soon].key0)
    expect_child(h, soon)


@jit(forceinline=True)
def should_offload(h, b):
    """Whether the content of an evicted device block that has no host copy is worth an offload."""
    block = blocks_of(h)[b]
    wanted = block.priority >= h.offload_priority and block.uses >= h.offload_reuse
    return wanted and not block.flags & TAIL and h.device_blocks != h.blocks


@jit
def overflow(h, takes, onboards):
    """How many contents the host forgets while an admission takes ``takes`` device blocks and onboards ``onboards``
    contents.

    Each eviction needs a host block. Empty blocks, clean copies and the sources of the onboards serve some of them;
    the rest is the result. Changes nothing.
    """
    room = empty_blocks(h, HOST) + lists_of(h)[HOST * LISTS_PER_TIER + CLEAN, 2] + onboards
    return max(0, _offloads(h, takes) - room) if onboards and takes > room else 0


@jit
def _offloads(h, takes):
    """Of the next ``takes`` victims of the device, how many have to be offloaded because the host has no copy. Changes
    nothing. Other policies than LRU may take others: then it is a guess."""
    blocks, lists = blocks_of(h), lists_of(h)
    left, count = takes - empty_blocks(h, DEVICE), 0
    for which in range(lists[LOWEST + DEVICE, 0], EMPTY):
        b = np.int64(lists[which, 0])
        while b != NONE and left > 0:
            count += 1 if blocks[b].other_copy == NONE and should_offload(h, b) else 0
            left -= 1
            b = np.int64(blocks[b].next)
    return count


# -- how many ------------------------------------------------------------------------------------------


@jit
def free_blocks(h, tier):
    """How many blocks of a tier nobody holds."""
    total = 0
    for which in range(tier * LISTS_PER_TIER, (tier + 1) * LISTS_PER_TIER):
        total += lists_of(h)[which, 2]
    return total


@jit(forceinline=True)
def empty_blocks(h, tier):
    """How many of them have no content."""
    return np.int64(lists_of(h)[tier * LISTS_PER_TIER + EMPTY, 2])


@jit
def host_room(h, priority):
    """How many host blocks content of a priority can take: empty ones, and listed ones of no higher priority."""
    total = empty_blocks(h, HOST)
    for p in range(priority + 1):
        total += lists_of(h)[HOST * LISTS_PER_TIER + p, 2]
    return total


@jit(forceinline=True)
def is_room(h, b, priority):
    """Whether content of a priority can take the block ``b``, which is cached."""
    return blocks_of(h)[b].list >= 0 and blocks_of(h)[b].priority <= priority
