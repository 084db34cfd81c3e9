"""The verbs over all groups of layers: a verb changes all groups, or none.

``heads`` int64[groups, HEADER] are the headers. An error has its details in the first header, and its group in
``detail_group``. What a verb does in one group depends on the kind of the group. That choice is made only here.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import address_of, call
from kvpool.state import growth, recurrent
from kvpool.state.admit import onboard
from kvpool.state.index import device_copy, find_key, host_copy, look
from kvpool.state.policies.policy import free_blocks, on_change, on_reset, stop_clock
from kvpool.state.records import (
    BAD_TOTAL,
    DEVICE,
    INDEXED,
    LIVE,
    LOST,
    NEVER_FITS,
    NONE,
    OFFLOAD,
    ONBOARDING,
    PUBLISHED,
    RESERVED,
    SHORT_OF_SEQUENCES,
    SWAPPED,
    TICKET_AT_LOSS,
    add_reference,
    blocks_of,
    children_of,
    counters_of,
    head,
    index_of,
    place_of,
    request_at,
    sequences_of,
    swapped_of,
    table_of,
)
from kvpool.state.requests import findable, finds, has_states, needs_all
from kvpool.state.sequences import (
    DROP,
    STORE,
    check_ids,
    check_kinds,
    commit_error,
    commit_rows,
    follow,
    refuse,
    release_rows,
    slot_of,
    within,
)
from kvpool.state.swaps import give_up
from kvpool.state.tiers import (
    EXPIRIES_PER_CALL,
    LOSS,
    STORED,
    begin,
    copy_content,
    emit,
    emit_cleared,
    emit_move,
    expire,
    hold,
    let_go,
    note_gone,
    take_host,
    unpublish,
)


def _checked(need, fits, change):
    """Make a verb on sequences that is checked in every group before it changes any. The verb returns 0, or an error
    with nothing changed.

    ``need(h, ids, *args)`` returns the blocks that it takes in a group, or the error. ``fits(h, args)`` returns 0 or
    the error, after every group has counted its need, which is in its header. ``change(h, ids, *args)`` cannot fail.
    The encoder's content never changes: in its group, the engine only goes on, on the stream of the call.
    """

    @jit(forceinline=True)
    def verb(heads, ids, now_ms, args):
        error = check_ids(heads, ids, True)
        if error:
            return error
        for g in range(heads.shape[0]):
            h = head(heads, g)
            h.need = need(h, ids, *args) if finds(h) else 0
            if h.need < 0:
                return refuse(heads, g, h.need)
        for g in range(heads.shape[0]):
            error = fits(head(heads, g), args)
            if error:
                return refuse(heads, g, error)
        for g in range(heads.shape[0]):
            h = head(heads, g)
            begin(h, now_ms)
            if h.need:
                expire(h, EXPIRIES_PER_CALL)
            follow(h, ids)
            if finds(h):
                change(h, ids, *args)
        return np.int64(0)

    return verb


def _by_kind(attention, states):
    """What a verb does in a group: ``attention`` where blocks have tokens, ``states`` where they are states."""

    @jit(forceinline=True)
    def part(h, ids, *args):
        return states(h, ids, *args) if has_states(h) else attention(h, ids, *args)

    return part


@jit
def _fits(h, args):
    """No further check."""
    return np.int64(0)


# -- grow and shrink ------------------------------------------------------------------------------


@jit(forceinline=True)
def _tokens_need(h, ids, counts):
    if has_states(h):
        return call(h.append_need, (h, ids, counts))
    return growth.append_need(h, ids, counts)


@jit
def _append_need(h, ids, counts, tokens):
    return _tokens_need(h, ids, counts)


@jit
def _append_fits(h, args):
    counts, tokens = args
    total = np.int64(0)
    for i in range(counts.shape[0]):
        total += counts[i]
    if total != tokens.shape[0]:
        h.detail, h.bound = total, tokens.shape[0]
        return np.int64(BAD_TOTAL)
    return min(within(h, h.need, free_blocks(h, DEVICE)), 0)


@jit
def _append(h, ids, counts, tokens):
    if has_states(h):
        call(h.append, (h, ids, counts, tokens))
    else:
        growth.append(h, ids, counts, tokens)
    counters_of(h).appended_tokens += tokens.shape[0]


_append_checked = _checked(_append_need, _append_fits, _append)


@jit
def append(heads, ids, counts, tokens, now_ms):
    """Grow each sequence by its count of ``tokens`` (int32, the tokens of all sequences in order). Returns 0, or an
    error with nothing changed."""
    return _append_checked(heads, ids, now_ms, (counts, tokens))


@jit(nogil=False)
def never_fits(heads, ids, counts):
    """NEVER_FITS, with the details of an error, if one of these sequences cannot grow by its count even if it is alone
    in the pool; else 0. The ids were checked. A group that needs all blocks of a sequence is named first. For a growth
    that is short of blocks."""
    short = np.int64(NONE)
    for g in range(heads.shape[0]):
        h = head(heads, g)
        for i in range(ids.shape[0] if finds(h) and (short == NONE or needs_all(h)) else 0):
            slot = slot_of(ids[i])
            need = recurrent.need_alone(h, slot, counts[i]) if has_states(h) else growth.need_alone(h, slot, counts[i])
            if need > h.device_blocks:
                h.detail, h.bound, short = i, need, g
                break
    return refuse(heads, short, NEVER_FITS) if short != NONE else np.int64(0)


@jit
def free_device_blocks(heads):
    """How many device blocks of the first group nobody holds."""
    return np.int64(free_blocks(head(heads, 0), DEVICE))


@jit
def free_in_groups(heads, counts):
    """How many device blocks of each group nobody holds, into ``counts`` int64[groups]."""
    for g in range(heads.shape[0]):
        counts[g] = free_blocks(head(heads, g), DEVICE)


@jit
def growth_needs(heads, ids, counts, needs):
    """The blocks that appending ``counts`` tokens takes in each group, into ``needs`` int64[groups]. Returns 0 or an
    error. Changes nothing."""
    error = check_ids(heads, ids, True)
    if error:
        return error
    for g in range(heads.shape[0]):
        h = head(heads, g)
        needs[g] = _tokens_need(h, ids, counts) if finds(h) else 0
        if needs[g] < 0:
            return refuse(heads, g, needs[g])
    return np.int64(0)


_keep_path_need = _by_kind(growth.keep_need, recurrent.keep_need)
_keep_path = _by_kind(growth.accept_drafts, recurrent.accept_drafts)


_rewind_need = _by_kind(growth.rewind_need, recurrent.rewind_need)
_rewind_checked = _checked(_rewind_need, _fits, _by_kind(growth.rewind, recurrent.rewind))


@jit
def rewind(heads, ids, counts, now_ms):
    """Drop the last ``counts`` tokens of each sequence. Returns 0, or an error with nothing changed."""
    error = _rewind_checked(heads, ids, now_ms, (counts,))
    for g in range(heads.shape[0] if error == 0 else 0):
        _count_dropped(head(heads, g), counts)
    return error


@jit
def _count_dropped(h, counts):
    for i in range(counts.shape[0] if finds(h) else 0):
        counters_of(h).dropped_tokens += counts[i]


@jit
def _keep_need(h, ids, lengths, accepted, counts, dropped):
    error = np.int64(growth.draft_error(h, ids, lengths, accepted, counts))
    return error if error else _keep_path_need(h, ids, lengths, accepted, counts, dropped)


@jit
def _keep(h, ids, lengths, accepted, counts, dropped):
    _keep_path(h, ids, lengths, accepted, counts, dropped)
    _count_dropped(h, dropped)


_keep_checked = _checked(_keep_need, _fits, _keep)


@jit
def accept_drafts(heads, ids, lengths, accepted, counts, dropped, now_ms):
    """Of the last ``lengths`` tokens of each sequence, keep its next ``counts`` of ``accepted``, which are indices
    among them in rising order.

    ``dropped`` is ``lengths - counts``. Returns 0, or an error with nothing changed.
    """
    return _keep_checked(heads, ids, now_ms, (lengths, accepted, counts, dropped))


# -- what is left behind ----------------------------------------------------------------------------


_commit_checked = _checked(commit_error, _fits, commit_rows)


@jit
def commit(heads, ids, counts, now_ms):
    """Publish the first ``counts`` tokens of each sequence (int64[0] = all tokens of all). Returns 0, or an error with
    nothing changed."""
    return _commit_checked(heads, ids, now_ms, (counts,))


@jit
def release(heads, ids, store, now_ms):
    """Release sequences, the last block of each first, so that leaves age first. Those that are swapped out come first.
    Returns 0, or an error with nothing changed."""
    error = check_kinds(heads, ids, False, LIVE | SWAPPED)
    if error:
        return error
    for g in range(heads.shape[0]):
        begin(head(heads, g), now_ms)
        give_up(head(heads, g), ids, store)
        release_rows(head(heads, g), ids, store)
    return np.int64(0)


@jit
def release_saying(heads, ids, store, stop, returns, now_ms):
    """``release``, and the policy hears what the engine knows: see ``stop`` and ``returns`` of the header."""
    for g in range(heads.shape[0]):
        head(heads, g).stop, head(heads, g).returns = stop, returns
    error = release(heads, ids, store, now_ms)
    for g in range(heads.shape[0]):
        head(heads, g).stop = head(heads, g).returns = 0
    return error


@jit
def fork(heads, ids, out):
    """Make sequences ``out`` int64[m, n] that continue ``ids`` int64[m]. Returns 0, or an error with nothing
    changed."""
    error = check_ids(heads, ids, True)
    if error:
        return error
    first = head(heads, 0)
    if out.size > first.free_rows:
        first.detail, first.bound = out.size, first.free_rows
        return refuse(heads, 0, SHORT_OF_SEQUENCES)
    for g in range(heads.shape[0]):
        growth.fork(head(heads, g), ids, out)
    return np.int64(0)


@jit
def reorder(heads, ids, parents, store, now_ms, before, scratch):
    """Sequence ``ids[i]`` continues from the present state of ``ids[parents[i]]``. Returns 0, or an error with nothing
    changed.

    ``before`` and ``scratch`` are as in ``growth.reorder``.
    """
    error = check_ids(heads, ids, True)
    if error:
        return error
    for g in range(heads.shape[0]):
        begin(head(heads, g), now_ms)
        growth.reorder(head(heads, g), ids, parents, store, before, scratch)
    return np.int64(0)


# -- reservations ----------------------------------------------------------------------------------


@jit
def _become(heads, sequence_id, kind):
    """Turn the row of an open reservation into that of a sequence, or the reverse."""
    for g in range(heads.shape[0]):
        sequences_of(head(heads, g))[sequence_id & 0xFFFFFFFF].live = kind


@jit
def publish_reserved(heads, ids, counts, now_ms):
    """Publish the first ``counts`` int64[1] tokens of the open reservation ``ids`` int64[1], and give all its blocks
    back.

    Returns 0, or an error with nothing changed.
    """
    _become(heads, ids[0], LIVE)
    error = commit(heads, ids, counts, now_ms)
    if error:
        _become(heads, ids[0], RESERVED)
        return error
    return release(heads, ids, STORE, now_ms)


@jit
def abort_reserved(heads, ids, counts, now_ms):
    """Give back the blocks of the open reservation ``ids`` int64[1]: first its own, empty, to the front of their list,
    then the matched ones.

    ``counts`` int64[1] is scratch.
    """
    _become(heads, ids[0], LIVE)
    for g in range(heads.shape[0]):
        h = head(heads, g)
        sequence = sequences_of(h)[slot_of(ids[0])]
        sequence.failed = 0  # nobody uses it any more
        if finds(h):
            counts[0] = sequence.length - sequence.reused * h.width
    if _rewind_checked(heads, ids, now_ms, (counts,)) < 0:  # takes no block, and ends at the end of the match
        raise RuntimeError("a reservation could not be taken back")
    return release(heads, ids, DROP, now_ms)


# -- between requests ----------------------------------------------------------------------------


@jit
def _prefetch(h, matched, ids):
    """Onboard those of the ``matched`` cached blocks ``ids`` int32 that are only on the host, as far as there are
    device blocks.

    Holds nothing afterwards. Returns blocks onboarded. The ids are scratch.
    """
    for i in range(matched):
        if ids[i] == NONE:
            continue
        b, device = np.int64(ids[i]), device_copy(h, np.int64(ids[i]))
        if device != NONE:
            ids[i] = b = device
        hold(h, b)
        stop_clock(h, b)
    expire(h, EXPIRIES_PER_CALL)
    done = 0
    for i in range(matched):
        if ids[i] >= h.device_blocks:
            if free_blocks(h, DEVICE) == 0:
                matched = _drop_rest(h, ids, i, matched)
                break
            host = np.int64(ids[i])
            ids[i] = onboard(h, host)
            let_go(h, host)
            done += 1
    _drop_rest(h, ids, 0, matched)
    return done


@jit
def _drop_rest(h, ids, first, last):
    """Let go of ``ids[first:last]``, the last block first. Returns ``first``."""
    for i in range(last - 1, first - 1, -1):
        if ids[i] != NONE:
            let_go(h, np.int64(ids[i]))
    return first


@jit
def _offload(h, keys):
    """Copy device blocks by key (int64[n, 2]) to the host, as far as it has room. The device blocks stay. Returns
    blocks copied.

    The copies are held until the call ends, so that they do not evict each other.
    """
    blocks = blocks_of(h)
    done = 0
    for i in range(keys.shape[0]):
        b = find_key(h, keys[i, 0], keys[i, 1])
        if b == NONE or device_copy(h, b) == NONE or host_copy(h, b) != NONE:
            continue
        g = take_host(h, np.int64(blocks[b].priority))
        if g == NONE:
            break
        copy_content(h, b, g)
        blocks[b].other_copy, blocks[g].other_copy = g, b
        add_reference(blocks, g)
        emit_move(h, b, g, h.width, OFFLOAD)
        emit(h, STORED, g)
        blocks[g].flags |= ONBOARDING
        done += 1
    counters_of(h).offloaded_blocks += done
    for i in range(keys.shape[0] if done else 0):
        b = find_key(h, keys[i, 0], keys[i, 1])
        g = np.int64(NONE if b == NONE else host_copy(h, b))
        if g != NONE and blocks[g].flags & ONBOARDING:
            blocks[g].flags &= ~ONBOARDING
            let_go(h, g)
    return done


@jit
def _lose(h, b, ticket):
    """Take the content of a block whose copy failed, unless a later decision than ``ticket`` has put other content
    there.

    A block in a list becomes empty. A held block is marked LOST, and its sequences fail (``lose``). Returns
    whether there was content.
    """
    blocks = blocks_of(h)
    stale = blocks[b].ticket != ticket and h.guards & TICKET_AT_LOSS != 0
    if stale or (blocks[b].word == 0 and not blocks[b].flags & INDEXED):
        return False
    known = blocks[b].flags & PUBLISHED
    if not unpublish(h, b, NONE) and known:
        note_gone(h, b, LOSS)
    if blocks[b].list >= 0:
        on_change(h, b)
    else:
        blocks[b].flags = LOST
    counters_of(h).lost_blocks += 1
    return True


@jit
def _lost_one(h, slot):
    """Whether a live sequence or reservation has lost a block in this group."""
    if sequences_of(h)[slot].live:
        row = (swapped_of(h) if sequences_of(h)[slot].live == SWAPPED else table_of(h))[slot]
        for i in range(sequences_of(h)[slot].blocks):
            b = np.int64(row[i])
            if b != NONE and blocks_of(h)[b].flags & LOST:
                return True
    return False


@jit
def _reset(h, ids, now_ms):
    """Drop all content, without an event, and ``ids``, which are all live sequences and reservations.

    Pinned blocks lose their keys and keep their bytes until the last unpin.
    """
    blocks, index, children = blocks_of(h), index_of(h), children_of(h)
    for i in range(index.shape[0]):
        index[i] = NONE
    for i in range(h.child_buckets):
        children[i] = NONE
    for b in range(h.blocks):
        if blocks[b].flags & PUBLISHED and b < h.device_blocks:
            h.removals += 1
        blocks[b].flags &= LOST
        blocks[b].other_copy = blocks[b].chain = blocks[b].child_prev = blocks[b].child_next = NONE
    begin(h, now_ms)
    give_up(h, ids, DROP)
    for i in range(ids.shape[0]):
        sequences_of(h)[slot_of(ids[i])].live = LIVE
    release_rows(h, ids, DROP)
    on_reset(h)
    h.generation += 1


@jit
def prefetch(heads, requests, ids, now_ms):
    """Onboard the cached full blocks of a prompt that are only on the host, as far as there are device blocks. Holds
    nothing afterwards.

    If a group needs only a part of a prefix, this onboards the blocks that an admission would hold. ``ids``
    int32[groups, full blocks] is scratch. Returns blocks onboarded.
    """
    request = request_at(requests, 0)
    tokens = 0 if request.fresh else request.length
    for g in range(heads.shape[0]):
        h = head(heads, g)
        if finds(h) and not needs_all(h):
            tokens = findable(request)
    matched = look(heads, request, tokens // head(heads, 0).width, address_of(ids), 4 * ids.shape[1])
    done = 0
    for g in range(heads.shape[0]):
        h = head(heads, g)
        if finds(h):
            begin(h, now_ms)
            done += _prefetch(h, matched, ids[g])
    return np.int64(done)


@jit
def offload(heads, keys, now_ms):
    """Copy device blocks by key (int64[n, 2]) to the host, as far as each group has room there. The device blocks stay.
    Returns blocks copied."""
    done = 0
    for g in range(heads.shape[0]):
        begin(head(heads, g), now_ms)
        done += _offload(head(heads, g), keys)
    return np.int64(done)


@jit
def refresh(heads, now_ms):
    """Give blocks whose time to live is over the default priority, at the back of its list. Returns how many."""
    done = 0
    for g in range(heads.shape[0]):
        begin(head(heads, g), now_ms)
        done += expire(head(heads, g), head(heads, g).blocks)
    return np.int64(done)


@jit
def lose(heads, targets):
    """Forget blocks whose copy the device refused. ``targets`` int64[n, 2]: the block, by its pool id, and the ticket
    of the copy.

    A sequence that has lost a block in any group has failed in all: the next call that names it is refused
    (``sequences.check_ids``). Returns how many blocks lost their content.
    """
    lost = 0
    for g in range(heads.shape[0]):
        begin(head(heads, g), head(heads, g).now)
    for i in range(targets.shape[0]):
        g, b = place_of(heads, targets[i, 0])
        lost += 1 if _lose(head(heads, g), b, targets[i, 1]) else 0
    for slot in range(head(heads, 0).sequences):
        failed = False
        for g in range(heads.shape[0]):
            failed |= _lost_one(head(heads, g), slot)
        for g in range(heads.shape[0] if failed else 0):
            sequences_of(head(heads, g))[slot].failed = 1
    return np.int64(lost)


@jit
def reset(heads, ids, now_ms):
    """Drop all content with one event, and ``ids``, which are all live sequences and reservations.

    Pinned blocks lose their keys and keep their bytes until the last unpin.
    """
    for g in range(heads.shape[0]):
        _reset(head(heads, g), ids, now_ms)
    emit_cleared(head(heads, 0))
