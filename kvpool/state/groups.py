"""The verbs over all groups of layers: every change in all groups, or in none.

A verb checks in every group before it changes any. ``heads`` int64[groups, HEADER] are the headers. An error has its details in the
first header, and the group that it is about in DETAIL_GROUP.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.state import drafts, forks, growth, holds, recurrent, storing
from kvpool.state.admission import SHORT_OF_BLOCKS, SHORT_OF_SEQUENCES
from kvpool.state.answers import look
from kvpool.state.atomics import address_of
from kvpool.state.blocks import (
    ATTENTION,
    CROSS,
    DETAIL,
    DETAIL2,
    DEVICE,
    FREE_ROWS,
    KIND,
    LIVE,
    NOW,
    RECURRENT,
    RESERVED,
    SEQUENCES,
    WIDTH,
    WINDOW,
    lists_of,
    sequences_of,
)
from kvpool.state.live import check_ids, follow, refuse
from kvpool.state.lru import free_blocks
from kvpool.state.pins import place_of
from kvpool.state.requests import (
    R_LENGTH,
    reusable,
)
from kvpool.state.ring import emit_cleared
from kvpool.state.tiers import EXPIRIES_PER_CALL, begin, expire

BAD_TOTAL = -8


@jit
def growth_needs(heads, ids, counts, needs):
    """Blocks that appending ``counts`` tokens takes in each group, into ``needs`` int64[groups]. Returns 0 or an error; changes nothing."""
    error = check_ids(heads, ids, True)
    if error:
        return error
    for g in range(heads.shape[0]):
        needs[g] = 0
        if heads[g, KIND] == ATTENTION:
            needs[g] = growth.growth(heads[g], ids, counts)
        elif heads[g, KIND] == RECURRENT:
            needs[g] = recurrent.growth(heads[g], ids, counts)
        if needs[g] < 0:
            return refuse(heads, g, needs[g])
    return np.int64(0)


@jit
def append(heads, ids, counts, tokens, now, needs):
    """Grow each sequence by its count of ``tokens`` (int32, one after the other). Returns 0 or an error with nothing changed.

    ``needs`` int64[groups] is scratch.
    """
    total = 0
    for i in range(counts.shape[0]):
        total += counts[i]
    error = growth_needs(heads, ids, counts, needs)
    if error:
        return error
    if total != tokens.shape[0]:
        heads[0, DETAIL], heads[0, DETAIL2] = total, tokens.shape[0]
        return refuse(heads, 0, BAD_TOTAL)
    for g in range(heads.shape[0]):
        free = free_blocks(lists_of(heads[g]), DEVICE)
        if needs[g] > free:
            heads[g, DETAIL], heads[g, DETAIL2] = needs[g], free
            return refuse(heads, g, SHORT_OF_BLOCKS)
    for g in range(heads.shape[0]):
        if heads[g, KIND] == CROSS:
            follow(heads[g], ids)
            continue
        _begin(heads[g], now, needs[g])
        if heads[g, KIND] == RECURRENT:
            recurrent.append(heads[g], ids, counts, tokens)
        else:
            growth.append(heads[g], ids, counts, tokens)
    return np.int64(0)


@jit
def _begin(h, now, need):
    """Begin a change in one group, which will take ``need`` blocks."""
    begin(h, now)
    if need:
        expire(h, EXPIRIES_PER_CALL)


@jit
def commit(heads, ids, counts, now):
    """Publish the first ``counts`` tokens of each sequence (int64[0] = all of all). Returns 0 or an error with nothing changed."""
    error = check_ids(heads, ids, True)
    if error:
        return error
    for g in range(heads.shape[0]):
        error = storing.commit_error(heads[g], ids, counts) if heads[g, KIND] != CROSS else 0
        if error:
            return refuse(heads, g, error)
    for g in range(heads.shape[0]):
        if heads[g, KIND] == CROSS:
            follow(heads[g], ids)
            continue
        begin(heads[g], now)
        if heads[g, KIND] == RECURRENT:
            recurrent.commit(heads[g], ids, counts)
        else:
            storing.commit(heads[g], ids, counts)
    return np.int64(0)


@jit
def rewind(heads, ids, counts, now, needs):
    """Drop the last ``counts`` tokens of each sequence. Returns 0 or an error with nothing changed.

    ``needs`` is scratch, as in ``append``.
    """
    error = check_ids(heads, ids, True)
    if error:
        return error
    for g in range(heads.shape[0]):
        needs[g] = 0
        if heads[g, KIND] == ATTENTION:
            needs[g] = growth.rewind_need(heads[g], ids, counts)
        elif heads[g, KIND] == RECURRENT:
            needs[g] = recurrent.rewind_need(heads[g], ids, counts)
        if needs[g] < 0:
            return refuse(heads, g, needs[g])
    for g in range(heads.shape[0]):
        if heads[g, KIND] == CROSS:
            follow(heads[g], ids)
            continue
        _begin(heads[g], now, needs[g])
        if heads[g, KIND] == RECURRENT:
            recurrent.rewind(heads[g], ids, counts)
        else:
            growth.rewind(heads[g], ids, counts)
    return np.int64(0)


@jit
def keep(heads, ids, lengths, accepted, counts, dropped, now, needs):
    """Of the last ``lengths`` tokens of each sequence keep its next ``counts`` of ``accepted``, indices among them in rising order.

    ``dropped`` is ``lengths - counts``. Returns 0 or an error with nothing changed. ``needs`` is scratch, as in ``append``.
    """
    error = check_ids(heads, ids, True)
    if error:
        return error
    for g in range(heads.shape[0]):
        needs[g] = 0
        if heads[g, KIND] == CROSS:
            continue
        error = drafts.draft_error(heads[g], ids, lengths, accepted, counts)
        if error:
            return refuse(heads, g, error)
        if heads[g, KIND] == RECURRENT:
            needs[g] = recurrent.keep_need(heads[g], ids, lengths, accepted, counts, dropped)
        else:
            needs[g] = drafts.keep_need(heads[g], ids, lengths, accepted, counts, dropped)
        if needs[g] < 0:
            return refuse(heads, g, needs[g])
    for g in range(heads.shape[0]):
        follow(heads[g], ids)
        if heads[g, KIND] == CROSS:
            continue
        _begin(heads[g], now, needs[g])
        if heads[g, KIND] == RECURRENT:
            recurrent.keep(heads[g], ids, lengths, accepted, counts, dropped)
        else:
            drafts.keep(heads[g], ids, lengths, accepted, counts, dropped)
    return np.int64(0)


@jit
def release(heads, ids, store, now):
    """Give sequences back, each tail first so that leaves age first. Returns 0 or an error with nothing changed."""
    error = check_ids(heads, ids, False)
    if error:
        return error
    for g in range(heads.shape[0]):
        begin(heads[g], now)
        storing.release(heads[g], ids, store)
    return np.int64(0)


@jit
def fork(heads, ids, out):
    """Sequences ``out`` int64[m, n] that continue ``ids`` int64[m]. Returns 0 or an error with nothing changed."""
    error = check_ids(heads, ids, True)
    if error:
        return error
    if out.size > heads[0, FREE_ROWS]:
        heads[0, DETAIL], heads[0, DETAIL2] = out.size, heads[0, FREE_ROWS]
        return refuse(heads, 0, SHORT_OF_SEQUENCES)
    for g in range(heads.shape[0]):
        forks.fork(heads[g], ids, out)
    return np.int64(0)


@jit
def reorder(heads, ids, parents, store, now, before, scratch):
    """Sequence ``ids[i]`` goes on from what ``ids[parents[i]]`` is now. Returns 0 or an error with nothing changed.

    ``before`` and ``scratch`` are as in ``forks.reorder``.
    """
    error = check_ids(heads, ids, True)
    if error:
        return error
    for g in range(heads.shape[0]):
        begin(heads[g], now)
        forks.reorder(heads[g], ids, parents, store, before, scratch)
    return np.int64(0)


@jit
def _become(heads, sequence_id, kind):
    """Make the row of an open reservation that of a sequence, or the reverse."""
    for g in range(heads.shape[0]):
        sequences_of(heads[g])[sequence_id & 0xFFFFFFFF].live = kind


@jit
def publish_reserved(heads, ids, counts, now, needs):
    """Publish the first ``counts`` int64[1] tokens of the open reservation ``ids`` int64[1], and give all its blocks back.

    Returns 0 or an error with nothing changed.
    """
    _become(heads, ids[0], LIVE)
    error = commit(heads, ids, counts, now)
    if error:
        _become(heads, ids[0], RESERVED)
        return error
    return release(heads, ids, True, now)


@jit
def abort_reserved(heads, ids, counts, now, needs):
    """Give the blocks of the open reservation ``ids`` int64[1] back: its own empty, to the front, then what matched.

    ``counts`` int64[1] and ``needs`` are scratch.
    """
    _become(heads, ids[0], LIVE)
    for g in range(heads.shape[0]):
        sequence = sequences_of(heads[g])[ids[0] & 0xFFFFFFFF]
        sequence.failed = 0  # nobody uses it any more
        if heads[g, KIND] != CROSS:
            counts[0] = sequence.length - sequence.reused * heads[g, WIDTH]
    if rewind(heads, ids, counts, now, needs) < 0:  # takes no block, and ends where what was matched does
        raise RuntimeError("a reservation could not be taken back")
    return release(heads, ids, False, now)


# -- between requests ----------------------------------------------------------------------------


@jit
def prefetch(heads, request, ids, now):
    """Onboard the cached full blocks of a prompt that are on the host only, as far as device blocks can be had; holds nothing after.

    Where a group needs only a part of a prefix, those that an admission would hold. ``ids`` int32[groups, full blocks] is scratch.
    Returns blocks onboarded.
    """
    limit = request[R_LENGTH] // heads[0, WIDTH]
    for g in range(heads.shape[0]):
        if heads[g, WINDOW] != 0 or heads[g, KIND] == RECURRENT:
            limit = reusable(request) // heads[0, WIDTH]
    matched = look(heads, request, limit, address_of(ids), 4 * ids.shape[1])
    done = 0
    for g in range(heads.shape[0]):
        if heads[g, KIND] != CROSS:
            begin(heads[g], now)
            done += holds.prefetch(heads[g], matched, ids[g])
    return np.int64(done)


@jit
def offload(heads, keys, now):
    """Copy device blocks by key (int64[n, 2]) to the host, as far as each group has room there, and keep them; returns blocks copied."""
    done = 0
    for g in range(heads.shape[0]):
        begin(heads[g], now)
        done += holds.offload(heads[g], keys)
    return np.int64(done)


@jit
def refresh(heads, now):
    """Let blocks whose time is over fall to the back of the default priority; returns how many."""
    done = 0
    for g in range(heads.shape[0]):
        done += holds.refresh(heads[g], now)
    return np.int64(done)


@jit
def lose(heads, targets):
    """Blocks whose bytes never came: ``targets`` int64[n, 2] of block, as all behind the state knows it, and the ticket of the copy.

    A sequence that lost one in any group has failed in all. Returns how many blocks lost their content.
    """
    lost = 0
    for g in range(heads.shape[0]):
        begin(heads[g], heads[g, NOW])
    for i in range(targets.shape[0]):
        g, b = place_of(heads, targets[i, 0])
        lost += 1 if holds.lose(heads[g], b, targets[i, 1]) else 0
    for slot in range(heads[0, SEQUENCES]):
        failed = False
        for g in range(heads.shape[0]):
            failed |= holds.lost_one(heads[g], slot)
        for g in range(heads.shape[0] if failed else 0):
            sequences_of(heads[g])[slot].failed = 1
    return np.int64(lost)


@jit
def reset(heads, ids, now):
    """Drop all content with one event, and ``ids``, all sequences and reservations that live.

    Pinned blocks become keyless and keep their bytes until the last unpin.
    """
    for g in range(heads.shape[0]):
        holds.reset(heads[g], ids, now)
    emit_cleared(heads[0])
