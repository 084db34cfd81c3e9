"""Dirty-block cursors: which content a reader has not read yet, so that the reader keeps no list of blocks.

A cursor is a number. Content that it has read has the cursor's bit in ``saved``, in both copies, until the content is
gone. Content is read as a row of ``found`` int64[n, 5]: group, both halves of the key, namespace, block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.common.arrays import Int64s
from kvpool.common.jit import jit
from kvpool.state.index import find_key
from kvpool.state.policies.block_lists import push_after, unlink
from kvpool.state.policies.policy import expect_victims
from kvpool.state.records import (
    CLEAN,
    EMPTY,
    HOST,
    LISTS_PER_TIER,
    LOWEST,
    NONE,
    PUBLISHED,
    H,
    blocks_of,
    events_of,
    group_at,
    lists_of,
    ring_of,
)
from kvpool.state.tiers import STORED

SAVERS = 62
FOUND = 5
CURSOR, PLACE, MISSED = range(3)


def check_cursors(groups: Int64s) -> None:
    """Raise RuntimeError if no cursor more can be opened."""
    if int(groups[0, H.cursors]) & ((1 << SAVERS) - 1) == (1 << SAVERS) - 1:
        raise RuntimeError(f"dirty-block cursors: expected up to {SAVERS} at once, got another")


@jit(nogil=False)
def open_dirty_cursor(groups, pending):
    """Open a cursor that has read nothing. ``pending``: whether content that is evicted unread is counted."""
    cursor = 0
    while cursor < SAVERS and group_at(groups, 0).cursors >> cursor & 1:
        cursor += 1
    if cursor == SAVERS:
        raise RuntimeError("more dirty-block cursors than a pool can have")
    bit = 1 << cursor
    for g in range(len(groups)):
        group = group_at(groups, g)
        group.cursors |= bit
        group.pending |= bit if pending else 0
        for b in range(group.blocks):
            blocks_of(group)[b].saved &= ~bit
    return cursor


@jit(nogil=False)
def close_dirty_cursor(groups, cursor):
    for g in range(len(groups)):
        group = group_at(groups, g)
        group.cursors &= ~(1 << cursor)
        group.pending &= group.cursors
    return 0


@jit
def _read(group, b, bits, uses, report, count):
    """Read block ``b``, if it is cached, was used at least ``uses`` times, and none of the cursors in ``bits`` has read
    it; then they have. Returns how many rows of ``report`` are filled now."""
    blocks = blocks_of(group)
    if b == NONE or not blocks[b].flags & PUBLISHED or blocks[b].saved & bits or blocks[b].uses < uses:
        return count
    blocks[b].saved |= bits
    if blocks[b].other_copy != NONE:
        blocks[blocks[b].other_copy].saved |= bits
    report[count, 0] = group.number
    report[count, 1] = blocks[b].key0
    report[count, 2] = blocks[b].key1
    report[count, 3] = blocks[b].namespace
    report[count, 4] = b
    return count + 1


@jit(nogil=False)
def stored(groups, cursor, at, report):
    """Report what was stored since the event ``at[CURSOR]``, by the events. Advances ``at`` int64[3]. If some events
    are gone, they are counted in ``at[MISSED]``, and a ``sweep`` is due: ``at[PLACE]`` is 0. Returns how many rows are
    filled. Looks at no more events than there are rows."""
    first = group_at(groups, 0)
    ring, count, bit = ring_of(first), 0, 1 << cursor
    gone = ring.next - first.event_capacity - at[CURSOR]
    if gone > 0:
        at[CURSOR], at[PLACE], at[MISSED] = at[CURSOR] + gone, 0, at[MISSED] + gone
    last = min(ring.next, at[CURSOR] + len(report))
    for i in range(at[CURSOR], last):
        event = events_of(first)[i % first.event_capacity]
        if event.kind == STORED:
            group = group_at(groups, event.group)
            count = _read(group, find_key(group, event.key0, event.key1), bit, 1, report, count)
    at[CURSOR] = last
    return count


@jit(nogil=False)
def sweep(groups, cursor, uses, at, report):
    """Report the content that was used at least ``uses`` times, in as many blocks as there are rows, from ``at[PLACE]``
    on. After the last block of the pool that is NONE. Returns how many rows are filled."""
    count, place, most, bit = 0, at[PLACE], len(report), 1 << cursor
    for g in range(len(groups)):
        group = group_at(groups, g)
        for b in range(max(place, 0), min(place + most, group.blocks)):
            count = _read(group, b, bit, uses, report, count)
        place -= group.blocks
    at[PLACE] = NONE if place + most >= 0 else at[PLACE] + most
    return count


@jit(nogil=False)
def victims(groups, cursor, margins, report):
    """Report what the host evicts soon: of the victims of each group, ``margins`` int64[groups], less those that have
    nothing to lose, and those that the cursor has read. With NONE as the cursor, none is left out or marked as read.
    The next victim comes first. Returns how many rows are filled."""
    count, bits = 0, 0 if cursor == NONE else 1 << cursor
    for g in range(len(groups)):
        group = group_at(groups, g)
        lists, first = lists_of(group), HOST * LISTS_PER_TIER
        left = margins[g] - lists[first + EMPTY, 2] - lists[first + CLEAN, 2]
        expect_victims(group, HOST, left)
        for which in range(lists[LOWEST + HOST, 0], EMPTY):
            b = lists[first + which, 0]
            while b != NONE and left > 0 and count < len(report):
                count = _read(group, b, bits, 1, report, count)
                left -= 1
                b = blocks_of(group)[b].next
    return count


@jit(nogil=False)
def held(groups, cursor, ids, report):
    """Report blocks that the caller holds. Returns how many rows are filled."""
    count = 0
    for i in range(len(ids)):
        count = _read(group_at(groups, 0), ids[i], 1 << cursor, 1, report, count)
    return count


@jit(nogil=False)
def put_back(groups, g, ids, before):
    """Put blocks that were released back to their places in the lists, since a save is not a use. ``before`` int64[n,
    3] has the ``prev``, ``used_at`` and ``key0`` of each block while it was held.

    They follow the block that was before them, if it is there and was not used since; else they are the next victims.
    The last of ``ids`` comes first. A block that has other content now, or is held by others, stays as it is.
    """
    group, behind = group_at(groups, g), NONE
    blocks = blocks_of(group)
    for i in range(len(ids)):
        b = ids[i]
        if blocks[b].list < 0 or blocks[b].key0 != before[i, 2]:
            before[i, 1] = NONE
            continue
        unlink(group, b)
        blocks[b].used_at = np.uint32(before[i, 1])
    for i in range(len(ids)):
        prev = before[i, 0]
        if behind == NONE and before[i, 1] != NONE and prev != NONE and blocks[prev].list >= 0:
            later = (blocks[prev].used_at - before[i, 1]) & 0xFFFFFFFF  # a clock of 32 bits
            behind = prev if later == 0 or later >> 31 else behind
    for i in range(len(ids)):
        if before[i, 1] != NONE:
            push_after(group, ids[i], ~blocks[ids[i]].list, behind)
    return 0


def places(blocks: npt.NDArray[Any]) -> Int64s:
    """What ``put_back`` needs of blocks that are held."""
    return np.stack([blocks["prev"], blocks["used_at"], blocks["key0"]], axis=1, dtype=np.int64)
