"""The order of eviction: which block is evicted next, what a use of a block changes, and whether evicted content is
offloaded.

The state calls hooks here (``on_insert``, ``on_hit``, ``on_release``, ``on_change``, ``on_only_copy``), and ``victim``.
Other modules change the lists of evictable blocks only where a block becomes held (``unlink``) or returns to its former
place (``relink``, ``put_back``).

The order is that of ``victim``: by priority, and LRU within a priority, unless ``choose`` overrides it. Each tier has a
list of empty blocks, one of clean host copies (the device has the content too), and one for each priority. A block that
nobody holds is in one of them. ``verify`` has its own version of ``list_of``, to check this one.

A pool with another policy than LRU (``policy=``) has records of chains. Then ``on_admit``, ``on_begin_release`` and
``on_end_release`` keep them, and ``agent.choose`` returns the next block of the default priority on a tier, unless
``adaptive`` follows LRU. ``on_join`` keeps what the host has of a chain together. In a HostCache ``on_touch`` and
``on_touched`` keep them.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.jit import inline, jit
from kvpool.common.jit.intrinsics import array_at, call, prefetch
from kvpool.state.index import expect, expect_child
from kvpool.state.policies.block_lists import (
    BACK,
    FRONT,
    heap_push,
    heap_remove,
    lowest,
    push,
    push_after,
    unlink,
)
from kvpool.state.policies.chains import LRU, host_policy_of, owners_of, policy_of, put_last
from kvpool.state.records import (
    CLEAN,
    DEFAULT_PRIORITY,
    DEVICE,
    EMPTY,
    HOST,
    INDEXED,
    LISTS_PER_TIER,
    LOWEST,
    NONE,
    TAIL,
    TIE_BITS,
    USES_MAX,
    blocks_of,
    heap_of,
    lists_of,
    request_at,
)


@inline
def nth_released(n, count):
    """Which of ``count`` blocks that one prompt covers is released as number ``n``: the last block first, so that
    leaves age before what they continue."""
    return count - 1 - n


# -- lists and deadlines -------------------------------------------------------------------------------


@inline
def list_of(group, b):
    """The list of a block while nobody holds it."""
    block = blocks_of(group)[b]
    first = (DEVICE if b < group.device_blocks else HOST) * LISTS_PER_TIER
    if not block.flags & INDEXED:
        return first + EMPTY
    if b >= group.device_blocks and block.other_copy != NONE:
        return first + CLEAN
    return first + block.priority


@inline
def _enlist(group, b, front):
    """Put a block that is in no list at an end of the list of its content."""
    push(group, b, list_of(group, b), front)


@inline
def _demotes(group, b):
    """Whether the content of a listed block gets the default priority when its time to live is over. Content that has
    that priority already does not, nor a clean copy, which is one of the first victims anyway."""
    block = blocks_of(group)[b]
    return (
        block.ttl != NONE
        and block.priority != DEFAULT_PRIORITY
        and (b < group.device_blocks or block.other_copy == NONE)
    )


@inline
def _start_clock(group, b, deadline):
    """Enter a listed block into the heap of deadlines, if its priority can change. Its time begins now, or ends at the
    ``deadline`` that it already has.

    Blocks with the same deadline expire in the order in which they came.
    """
    if _demotes(group, b):
        if deadline == NONE:
            group.clocks += 1
            deadline = ((group.now + blocks_of(group)[b].ttl) << TIE_BITS) | (group.clocks & ((1 << TIE_BITS) - 1))
        heap_push(group, b, deadline)


@inline
def stop_clock(group, b):
    """Remove a block from the heap of deadlines. Returns its deadline, NONE if it has none."""
    block = blocks_of(group)[b]
    if block.heap == NONE:
        return NONE
    heap_remove(group, b)
    return block.deadline


@inline
def stop_clocks(group, row, count):
    """Remove the blocks in the first ``count`` columns of a row from the heap of deadlines."""
    for i in range(count):
        if row[i] != NONE:
            stop_clock(group, row[i])


@inline
def place(group, b, deadline):
    """Put a block that is in no list at the back of the list of its content, with its ``deadline`` or a new one."""
    _enlist(group, b, BACK)
    _start_clock(group, b, deadline)


@inline
def expired(group):
    """Give the next block whose time to live is over the default priority, at the back of its list. NONE if there is
    none."""
    blocks, heap = blocks_of(group), heap_of(group)
    if heap[0] == 0 or blocks[heap[1]].deadline >> TIE_BITS > group.now:
        return NONE
    b = heap[1]
    heap_remove(group, b)
    unlink(group, b)
    blocks[b].priority, blocks[b].ttl = DEFAULT_PRIORITY, NONE
    _enlist(group, b, BACK)
    return b


# -- what happens --------------------------------------------------------------------------------------


@inline
def on_insert(group, b):
    """A block becomes a copy of cached content. The one that computed it is its first use."""
    block = blocks_of(group)[b]
    if block.uses == 0:
        block.uses = 1
    block.stored_at = block.used_at = np.uint32(group.now)
    block.saved = 0


@inline
def on_hit(group, b):
    """A prompt hits a block: count one more use, now."""
    block = blocks_of(group)[b]
    block.used_at = np.uint32(group.now)
    if block.uses < USES_MAX:
        block.uses += 1


@inline
def on_release(group, b, front):
    """Nobody holds a block any more. It becomes evictable: the last of its list, or with ``front`` the next one. What
    is not cached leaves an empty block."""
    blocks = blocks_of(group)
    blocks[b].used_at = np.uint32(group.now)
    if blocks[b].flags & INDEXED:
        _start_clock(group, b, NONE)
    else:
        blocks[b].flags = blocks[b].filled = 0
    _enlist(group, b, front)


@inline
def on_admit(group, requests, r, slot):
    """Request ``r`` has got its blocks, in the row ``slot``."""
    if group.policy_at:
        call(policy_of(group).on_admit, (group, request_at(requests, r), slot))


@inline
def on_begin_release(group, slot):
    """All blocks of a row are given back next."""
    if group.policy_at:
        call(policy_of(group).on_begin_release, (group, slot))


@inline
def on_end_release(group, slot):
    """All blocks of a row have been given back."""
    if group.policy_at:
        call(policy_of(group).on_end_release, (group, slot, group.stop))


@inline
def on_touch(group, matches, turn):
    """Keys of a HostCache are used, as the ``turn`` of a request or not. Their blocks are given back next."""
    if group.policy_at:
        call(policy_of(group).on_touch, (group, matches, turn))


@inline
def on_touched(group, matches, turn):
    """The blocks of these keys have been given back."""
    if group.policy_at:
        call(policy_of(group).on_touched, (group, matches, turn))


@jit
def on_change(group, b):
    """The content of a block has changed. If nobody holds it, it goes to the back of its present list."""
    if blocks_of(group)[b].list >= 0:
        stop_clock(group, b)
        unlink(group, b)
        on_release(group, b, BACK)


@inline
def on_only_copy(group, b, device, deadline):
    """A host copy has become the only one, and takes over the retention and uses of the device block. Unless it is
    held, it is not a clean copy any more. Returns whether its priority has changed."""
    block, other = blocks_of(group)[b], blocks_of(group)[device]
    changed = block.priority != other.priority
    block.priority, block.ttl, block.uses, block.used_at = other.priority, other.ttl, other.uses, other.used_at
    if block.list >= 0:
        unlink(group, b)
        place_only_copy(group, b, device, deadline)
    return changed


@inline
def place_only_copy(group, b, device, deadline):
    """``place`` a host block that has become the only copy of a device block's content. The host blocks of a chain are
    side by side."""
    place(group, b, deadline)
    if group.policy_at and policy_of(group).on_join:
        call(policy_of(group).on_join, (group, b, device))


@jit
def on_join(group, b, device):
    """A host block is listed with the content of a device block: it is of the same chain."""
    if blocks_of(group)[b].list != host_policy_of(group).list:
        return
    owners = owners_of(group)
    c = owners[b] = owners[device]
    before = put_last(group, c, b) if c != NONE else NONE
    if before != NONE:
        unlink(group, b)
        push_after(group, b, host_policy_of(group).list, before)


@jit
def set_retention(group, b, priority, ttl):
    """Give content another priority and time to live, which begins anew. A listed block whose priority changes goes to
    the back of its new list. Returns whether it changed."""
    blocks = blocks_of(group)
    changed, listed = blocks[b].priority != priority, blocks[b].list >= 0
    stop_clock(group, b)
    if listed and changed:
        unlink(group, b)
    blocks[b].priority, blocks[b].ttl = priority, ttl
    if listed and changed:
        _enlist(group, b, BACK)
    if listed:
        _start_clock(group, b, NONE)
    return changed


@jit
def evict_next(group, b):
    """Put a block that nobody holds in front of its list. Returns whether it is in one."""
    which = blocks_of(group)[b].list
    if which < 0:
        return False
    unlink(group, b)
    push(group, b, which, FRONT)
    return True


@jit
def on_reset(group):
    """All content is gone: every block that nobody holds is empty."""
    for b in range(group.blocks):
        if blocks_of(group)[b].list >= 0:
            stop_clock(group, b)
            unlink(group, b)
            blocks_of(group)[b].filled = 0
            _enlist(group, b, BACK)


# -- victims -------------------------------------------------------------------------------------------


@inline
def victim(group, tier, priority):
    """The block of a tier that is taken next, its *victim*. The first of these that there is:

    1. an empty block;
    2. on the host a clean copy, unless an admission still has to forget content there (``overflow``);
    3. a block of the lowest priority. It is the oldest one, or in the list of the policy, the one that its ``choose``
       returns, where that does not follow LRU.

    Returns NONE if that priority is above ``priority``: then the host keeps its content. Clean copies come after the
    content that an admission has to forget, since the blocks that it onboards become such: they could be overwritten
    only after their own copies, and each such wait would add to a chain. Changes only where the search starts.
    ``choose`` also notes that the block goes, so the caller takes it.
    """
    lists, first = lists_of(group), tier * LISTS_PER_TIER
    b = lists[first + EMPTY, 0]
    if b == NONE and tier == HOST and group.overflow == 0:
        b = lists[first + CLEAN, 0]
    if b != NONE:
        return b
    b = lowest(group, tier)
    if b == NONE or blocks_of(group)[b].priority > priority:
        return NONE
    return _choice(group, blocks_of(group)[b].list) if _chooses(group, blocks_of(group)[b].list) else b


@inline
def _chooses(group, which):
    """Whether the policy chooses the victims of a list, which has blocks."""
    if not group.policy_at:
        return False
    policy = policy_of(group)
    return policy.follows != LRU and (which == policy.list or which == host_policy_of(group).list)


@inline
def _choice(group, which):
    """The victim that the policy chooses from a list."""
    policy = policy_of(group)
    return call(policy.choose, (policy.header_at, which != policy.list, 0))


@jit
def expect_victims(group, tier, count):
    """Have the lists of a tier begin with the blocks that the next ``count`` victims with content are, in this order.

    LRU's do. What another policy chooses is put in front, and is of no chain any more. So it stays there until it is
    used.
    """
    blocks, lists, last = blocks_of(group), lists_of(group), NONE
    usual = tier * LISTS_PER_TIER + DEFAULT_PRIORITY
    if not _chooses(group, usual):
        return
    for which in range(tier * LISTS_PER_TIER, usual):
        count -= lists[which, 2]
    for _ in range(min(count, lists[usual, 2])):
        b = _choice(group, usual)
        unlink(group, b)
        owners_of(group)[b] = NONE
        blocks[b].prev, last = last, b
    while last != NONE:
        b, last = last, blocks[last].prev
        push(group, b, usual, FRONT)


@inline
def take_victim(group, tier, priority):
    """Take the ``victim`` of a tier out of its list. Returns it, or NONE, and the deadline of its content, or NONE."""
    b = victim(group, tier, priority)
    cached = b != NONE and blocks_of(group)[b].flags & INDEXED != 0
    if tier == HOST and group.overflow and (b == NONE or cached):
        group.overflow -= 1
    if b == NONE:
        return b, NONE
    unlink(group, b)
    if tier == HOST:
        disown(group, b)
    if tier == DEVICE and cached:
        _expect_victims(group, b)
    return b, stop_clock(group, b)


@inline
def disown(group, b):
    """Remove a block that was taken from its chain."""
    if group.policy_at:
        owners_of(group)[b] = NONE


SOON = 10  # how many evictions ahead the index is loaded; the block twice as many


@inline
def foresee(group, row, i):
    """Note the block that a release of this row gives back some places after its block ``i``."""
    blocks_of(group)[row[i]].soon = max(row[max(i - SOON, 0)], 0)


@inline
def _expect_victims(group, b):
    """Prefetch what the evictions after that of ``b`` will touch. The forecast may be wrong: nothing depends on it."""
    blocks, soon = blocks_of(group), blocks_of(group)[b].soon
    later = blocks[soon].soon
    prefetch(blocks, later)
    prefetch(blocks["parent0"], later)
    prefetch(array_at(group.tokens_at, (group.blocks * group.width,), np.int32), later * group.width)
    expect(group, blocks[soon].key0)
    expect_child(group, soon)


@inline
def should_offload(group, b):
    """Whether the content of an evicted device block that has no host copy is worth an offload."""
    block = blocks_of(group)[b]
    wanted = block.priority >= group.offload_priority and block.uses >= group.offload_reuse
    return wanted and not block.flags & TAIL and group.device_blocks != group.blocks


@jit
def overflow(group, takes, onboards):
    """How many contents the host forgets while an admission takes ``takes`` device blocks and onboards ``onboards``
    contents.

    Each eviction needs a host block. Empty blocks, clean copies and the sources of the onboards serve some of them;
    the rest is the result. Changes nothing.
    """
    room = empty_blocks(group, HOST) + lists_of(group)[HOST * LISTS_PER_TIER + CLEAN, 2] + onboards
    return max(0, _offloads(group, takes) - room) if onboards and takes > room else 0


@jit
def _offloads(group, takes):
    """How many of the next ``takes`` victims of the device have to be offloaded because the host has no copy. Changes
    nothing. Other policies than LRU may take others; then this is an estimate."""
    blocks, lists = blocks_of(group), lists_of(group)
    left, count = takes - empty_blocks(group, DEVICE), 0
    for which in range(lists[LOWEST + DEVICE, 0], EMPTY):
        b = lists[which, 0]
        while b != NONE and left > 0:
            count += 1 if blocks[b].other_copy == NONE and should_offload(group, b) else 0
            left -= 1
            b = blocks[b].next
    return count


# -- how many ------------------------------------------------------------------------------------------


@jit
def free_blocks(group, tier):
    """How many blocks of a tier nobody holds."""
    total = 0
    for which in range(tier * LISTS_PER_TIER, (tier + 1) * LISTS_PER_TIER):
        total += lists_of(group)[which, 2]
    return total


@inline
def empty_blocks(group, tier):
    """How many of them have no content."""
    return lists_of(group)[tier * LISTS_PER_TIER + EMPTY, 2]


@jit
def host_room(group, priority):
    """How many host blocks content of a priority can take: empty ones, and listed ones of no higher priority."""
    total = empty_blocks(group, HOST)
    for p in range(priority + 1):
        total += lists_of(group)[HOST * LISTS_PER_TIER + p, 2]
    return total


@inline
def is_room(group, b, priority):
    """Whether content of a priority can take the block ``b``, which is cached."""
    return blocks_of(group)[b].list >= 0 and blocks_of(group)[b].priority <= priority
