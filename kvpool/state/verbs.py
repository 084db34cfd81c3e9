"""The verbs over all groups of layers: a verb changes all groups, or none.

``groups`` int64[groups, GROUP_COLUMNS] are the headers. An error has its details in the first header, and its group in
``detail_group``. What a verb does in one group depends on the kind of the group. That choice is made only here.
"""

from __future__ import annotations

from kvpool.common.jit import inline, jit
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
    group_at,
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
    emit_copy,
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

    ``need(group, ids, *args)`` returns the blocks that it takes in a group, or the error. ``fits(group, args)`` returns
    0 or the error, after every group has counted its need, which is in its header. ``change(group, ids, *args)`` cannot
    fail. The encoder's content never changes: in its group, the engine only goes on, on the stream of the call.
    """

    @inline
    def verb(groups, ids, now_ms, args):
        error = check_ids(groups, ids, True)
        if error:
            return error
        for g in range(len(groups)):
            group = group_at(groups, g)
            group.need = need(group, ids, *args) if finds(group) else 0
            if group.need < 0:
                return refuse(groups, g, group.need)
        for g in range(len(groups)):
            error = fits(group_at(groups, g), args)
            if error:
                return refuse(groups, g, error)
        for g in range(len(groups)):
            group = group_at(groups, g)
            begin(group, now_ms)
            if group.need:
                expire(group, EXPIRIES_PER_CALL)
            follow(group, ids)
            if finds(group):
                change(group, ids, *args)
        return 0

    return verb


def _by_kind(attention, states):
    """What a verb does in a group: ``attention`` where blocks have tokens, ``states`` where they are states."""

    @inline
    def part(group, ids, *args):
        return states(group, ids, *args) if has_states(group) else attention(group, ids, *args)

    return part


@jit
def _fits(group, args):
    """No further check."""
    return 0


# -- grow and shrink ------------------------------------------------------------------------------


@inline
def _tokens_need(group, ids, counts):
    if has_states(group):
        return call(group.append_need, (group, ids, counts))
    return growth.append_need(group, ids, counts)


@jit
def _append_need(group, ids, counts, tokens):
    return _tokens_need(group, ids, counts)


@jit
def _append_fits(group, args):
    counts, tokens = args
    total = 0
    for i in range(len(counts)):
        total += counts[i]
    if total != len(tokens):
        group.detail, group.bound = total, len(tokens)
        return BAD_TOTAL
    return min(within(group, group.need, free_blocks(group, DEVICE)), 0)


@jit
def _append(group, ids, counts, tokens):
    if has_states(group):
        call(group.append, (group, ids, counts, tokens))
    else:
        growth.append(group, ids, counts, tokens)
    counters_of(group).appended_tokens += len(tokens)


_append_checked = _checked(_append_need, _append_fits, _append)


@jit
def append(groups, ids, counts, tokens, now_ms):
    """Grow each sequence by its count of ``tokens`` (int32, the tokens of all sequences in order). Returns 0, or an
    error with nothing changed."""
    return _append_checked(groups, ids, now_ms, (counts, tokens))


@jit(nogil=False)
def never_fits(groups, ids, counts):
    """NEVER_FITS, with the details of an error, if one of these sequences cannot grow by its count even if it is alone
    in the pool; else 0. The ids were checked. A group that needs all blocks of a sequence is named first. For a growth
    that is short of blocks."""
    short = NONE
    for g in range(len(groups)):
        group = group_at(groups, g)
        for i in range(len(ids) if finds(group) and (short == NONE or needs_all(group)) else 0):
            slot = slot_of(ids[i])
            need = (
                recurrent.need_alone(group, slot, counts[i])
                if has_states(group)
                else growth.need_alone(group, slot, counts[i])
            )
            if need > group.device_blocks:
                group.detail, group.bound, short = i, need, g
                break
    return refuse(groups, short, NEVER_FITS) if short != NONE else 0


@jit
def free_device_blocks(groups):
    """How many device blocks of the first group nobody holds."""
    return free_blocks(group_at(groups, 0), DEVICE)


@jit
def free_in_groups(groups, counts):
    """How many device blocks of each group nobody holds, into ``counts`` int64[groups]."""
    for g in range(len(groups)):
        counts[g] = free_blocks(group_at(groups, g), DEVICE)


@jit
def growth_needs(groups, ids, counts, needs):
    """The blocks that appending ``counts`` tokens takes in each group, into ``needs`` int64[groups]. Returns 0 or an
    error. Changes nothing."""
    error = check_ids(groups, ids, True)
    if error:
        return error
    for g in range(len(groups)):
        group = group_at(groups, g)
        needs[g] = _tokens_need(group, ids, counts) if finds(group) else 0
        if needs[g] < 0:
            return refuse(groups, g, needs[g])
    return 0


_keep_path_need = _by_kind(growth.keep_need, recurrent.keep_need)
_keep_path = _by_kind(growth.accept_drafts, recurrent.accept_drafts)


_rewind_need = _by_kind(growth.rewind_need, recurrent.rewind_need)
_rewind_checked = _checked(_rewind_need, _fits, _by_kind(growth.rewind, recurrent.rewind))


@jit
def rewind(groups, ids, counts, now_ms):
    """Drop the last ``counts`` tokens of each sequence. Returns 0, or an error with nothing changed."""
    error = _rewind_checked(groups, ids, now_ms, (counts,))
    for g in range(len(groups) if error == 0 else 0):
        _count_dropped(group_at(groups, g), counts)
    return error


@jit
def _count_dropped(group, counts):
    for i in range(len(counts) if finds(group) else 0):
        counters_of(group).dropped_tokens += counts[i]


@jit
def _keep_need(group, ids, lengths, accepted, counts, dropped):
    error = growth.draft_error(group, ids, lengths, accepted, counts)
    return error if error else _keep_path_need(group, ids, lengths, accepted, counts, dropped)


@jit
def _keep(group, ids, lengths, accepted, counts, dropped):
    _keep_path(group, ids, lengths, accepted, counts, dropped)
    _count_dropped(group, dropped)


_keep_checked = _checked(_keep_need, _fits, _keep)


@jit
def accept_drafts(groups, ids, lengths, accepted, counts, dropped, now_ms):
    """Keep ``counts`` of the last ``lengths`` tokens of each sequence: those at the indices in ``accepted``, which
    rise.

    ``dropped`` is ``lengths - counts``. Returns 0, or an error with nothing changed.
    """
    return _keep_checked(groups, ids, now_ms, (lengths, accepted, counts, dropped))


# -- commit and release ----------------------------------------------------------------------------


_commit_checked = _checked(commit_error, _fits, commit_rows)


@jit
def commit(groups, ids, counts, now_ms):
    """Publish the first ``counts`` tokens of each sequence (int64[0] = all tokens of all). Returns 0, or an error with
    nothing changed."""
    return _commit_checked(groups, ids, now_ms, (counts,))


@jit
def release(groups, ids, store, now_ms):
    """Release sequences, the last block of each first, so that leaves age first. Those that are swapped out come first.
    Returns 0, or an error with nothing changed."""
    error = check_kinds(groups, ids, False, LIVE | SWAPPED)
    if error:
        return error
    for g in range(len(groups)):
        begin(group_at(groups, g), now_ms)
        give_up(group_at(groups, g), ids, store)
        release_rows(group_at(groups, g), ids, store)
    return 0


@jit
def release_saying(groups, ids, store, stop, returns, now_ms):
    """``release`` with hints of the engine for the policy: see ``stop`` and ``returns`` of the header."""
    for g in range(len(groups)):
        group_at(groups, g).stop, group_at(groups, g).returns = stop, returns
    error = release(groups, ids, store, now_ms)
    for g in range(len(groups)):
        group_at(groups, g).stop = group_at(groups, g).returns = 0
    return error


@jit
def fork(groups, ids, out):
    """Make sequences ``out`` int64[m, n] that continue ``ids`` int64[m]. Returns 0, or an error with nothing
    changed."""
    error = check_ids(groups, ids, True)
    if error:
        return error
    first = group_at(groups, 0)
    if out.size > first.free_rows:
        first.detail, first.bound = out.size, first.free_rows
        return refuse(groups, 0, SHORT_OF_SEQUENCES)
    for g in range(len(groups)):
        growth.fork(group_at(groups, g), ids, out)
    return 0


@jit
def reorder(groups, ids, parents, store, now_ms, before, scratch):
    """Sequence ``ids[i]`` continues from the present state of ``ids[parents[i]]``. Returns 0, or an error with nothing
    changed.

    ``before`` and ``scratch`` are as in ``growth.reorder``.
    """
    error = check_ids(groups, ids, True)
    if error:
        return error
    for g in range(len(groups)):
        begin(group_at(groups, g), now_ms)
        growth.reorder(group_at(groups, g), ids, parents, store, before, scratch)
    return 0


# -- reservations ----------------------------------------------------------------------------------


@jit
def _become(groups, sequence_id, kind):
    """Turn the row of an open reservation into that of a sequence, or the reverse."""
    for g in range(len(groups)):
        sequences_of(group_at(groups, g))[sequence_id & 0xFFFFFFFF].live = kind


@jit
def publish_reserved(groups, ids, counts, now_ms):
    """Publish the first ``counts`` int64[1] tokens of the open reservation ``ids`` int64[1], and give all its blocks
    back.

    Returns 0, or an error with nothing changed.
    """
    _become(groups, ids[0], LIVE)
    error = commit(groups, ids, counts, now_ms)
    if error:
        _become(groups, ids[0], RESERVED)
        return error
    return release(groups, ids, STORE, now_ms)


@jit
def abort_reserved(groups, ids, counts, now_ms):
    """Give back the blocks of the open reservation ``ids`` int64[1]: first its own, empty, to the front of their list,
    then the matched ones.

    ``counts`` int64[1] is scratch.
    """
    _become(groups, ids[0], LIVE)
    for g in range(len(groups)):
        group = group_at(groups, g)
        sequence = sequences_of(group)[slot_of(ids[0])]
        sequence.failed = 0  # nobody uses it any more
        if finds(group):
            counts[0] = sequence.length - sequence.reused * group.width
    if _rewind_checked(groups, ids, now_ms, (counts,)) < 0:  # takes no block, and ends at the end of the match
        raise RuntimeError("a reservation could not be taken back")
    return release(groups, ids, DROP, now_ms)


# -- between requests ----------------------------------------------------------------------------


@jit
def _prefetch(group, matched, ids):
    """Onboard those of the ``matched`` cached blocks ``ids`` int32 that are only on the host, as far as there are
    device blocks.

    Holds nothing afterwards. Returns blocks onboarded. The ids are scratch.
    """
    for i in range(matched):
        if ids[i] == NONE:
            continue
        b, device = ids[i], device_copy(group, ids[i])
        if device != NONE:
            ids[i] = b = device
        hold(group, b)
        stop_clock(group, b)
    expire(group, EXPIRIES_PER_CALL)
    done = 0
    for i in range(matched):
        if ids[i] >= group.device_blocks:
            if free_blocks(group, DEVICE) == 0:
                matched = _drop_rest(group, ids, i, matched)
                break
            host = ids[i]
            ids[i] = onboard(group, host)
            let_go(group, host)
            done += 1
    _drop_rest(group, ids, 0, matched)
    return done


@jit
def _drop_rest(group, ids, first, last):
    """Let go of ``ids[first:last]``, the last block first. Returns ``first``."""
    for i in range(last - 1, first - 1, -1):
        if ids[i] != NONE:
            let_go(group, ids[i])
    return first


@jit
def _offload(group, keys):
    """Copy device blocks by key (int64[n, 2]) to the host, as far as it has room. The device blocks stay. Returns
    blocks copied.

    The copies are held until the call ends, so that they do not evict each other.
    """
    blocks = blocks_of(group)
    done = 0
    for i in range(len(keys)):
        b = find_key(group, keys[i, 0], keys[i, 1])
        if b == NONE or device_copy(group, b) == NONE or host_copy(group, b) != NONE:
            continue
        g = take_host(group, blocks[b].priority)
        if g == NONE:
            break
        copy_content(group, b, g)
        blocks[b].other_copy, blocks[g].other_copy = g, b
        add_reference(blocks, g)
        emit_copy(group, b, g, group.width, OFFLOAD)
        emit(group, STORED, g)
        blocks[g].flags |= ONBOARDING
        done += 1
    counters_of(group).offloaded_blocks += done
    for i in range(len(keys) if done else 0):
        b = find_key(group, keys[i, 0], keys[i, 1])
        g = NONE if b == NONE else host_copy(group, b)
        if g != NONE and blocks[g].flags & ONBOARDING:
            blocks[g].flags &= ~ONBOARDING
            let_go(group, g)
    return done


@jit
def _lose(group, b, ticket):
    """Take the content of a block whose copy failed, unless a later decision than ``ticket`` has put other content
    there.

    A block in a list becomes empty. A held block is marked LOST, and its sequences fail (``lose``). Returns
    whether there was content.
    """
    blocks = blocks_of(group)
    stale = blocks[b].ticket != ticket and group.guards & TICKET_AT_LOSS != 0
    if stale or (blocks[b].ref_word == 0 and not blocks[b].flags & INDEXED):
        return False
    known = blocks[b].flags & PUBLISHED
    if not unpublish(group, b, NONE) and known:
        note_gone(group, b, LOSS)
    if blocks[b].list >= 0:
        on_change(group, b)
    else:
        blocks[b].flags = LOST
    counters_of(group).lost_blocks += 1
    return True


@jit
def _lost_one(group, slot):
    """Whether a live sequence or reservation has lost a block in this group."""
    if sequences_of(group)[slot].live:
        row = (swapped_of(group) if sequences_of(group)[slot].live == SWAPPED else table_of(group))[slot]
        for i in range(sequences_of(group)[slot].blocks):
            b = row[i]
            if b != NONE and blocks_of(group)[b].flags & LOST:
                return True
    return False


@jit
def _reset(group, ids, now_ms):
    """Drop all content, without an event, and ``ids``, which are all live sequences and reservations.

    Pinned blocks lose their keys and keep their bytes until the last unpin.
    """
    blocks, index, children = blocks_of(group), index_of(group), children_of(group)
    for i in range(len(index)):
        index[i] = NONE
    for i in range(group.child_buckets):
        children[i] = NONE
    for b in range(group.blocks):
        if blocks[b].flags & PUBLISHED and b < group.device_blocks:
            group.removals += 1
        blocks[b].flags &= LOST
        blocks[b].other_copy = blocks[b].chain = blocks[b].child_prev = blocks[b].child_next = NONE
    begin(group, now_ms)
    give_up(group, ids, DROP)
    for i in range(len(ids)):
        sequences_of(group)[slot_of(ids[i])].live = LIVE
    release_rows(group, ids, DROP)
    on_reset(group)
    group.generation += 1


@jit
def prefetch(groups, requests, ids, now_ms):
    """Onboard the cached full blocks of a prompt that are only on the host, as far as there are device blocks. Holds
    nothing afterwards.

    If a group needs only a part of a prefix, this onboards the blocks that an admission would hold. ``ids``
    int32[groups, full blocks] is scratch. Returns blocks onboarded.
    """
    request = request_at(requests, 0)
    tokens = 0 if request.fresh else request.length
    for g in range(len(groups)):
        group = group_at(groups, g)
        if finds(group) and not needs_all(group):
            tokens = findable(request)
    matched = look(groups, request, tokens // group_at(groups, 0).width, address_of(ids), 4 * ids.shape[1])
    done = 0
    for g in range(len(groups)):
        group = group_at(groups, g)
        if finds(group):
            begin(group, now_ms)
            done += _prefetch(group, matched, ids[g])
    return done


@jit
def offload(groups, keys, now_ms):
    """Copy device blocks by key (int64[n, 2]) to the host, as far as each group has room there. The device blocks stay.
    Returns blocks copied."""
    done = 0
    for g in range(len(groups)):
        begin(group_at(groups, g), now_ms)
        done += _offload(group_at(groups, g), keys)
    return done


@jit
def refresh(groups, now_ms):
    """Give blocks whose time to live is over the default priority, at the back of its list. Returns how many."""
    done = 0
    for g in range(len(groups)):
        begin(group_at(groups, g), now_ms)
        done += expire(group_at(groups, g), group_at(groups, g).blocks)
    return done


@jit
def lose(groups, targets):
    """Forget blocks whose copy the device refused. ``targets`` int64[n, 2]: the block, by its pool id, and the ticket
    of the copy.

    A sequence that has lost a block in any group has failed in all: the next call that names it is refused
    (``sequences.check_ids``). Returns how many blocks lost their content.
    """
    lost = 0
    for g in range(len(groups)):
        begin(group_at(groups, g), group_at(groups, g).now)
    for i in range(len(targets)):
        g, b = place_of(groups, targets[i, 0])
        lost += 1 if _lose(group_at(groups, g), b, targets[i, 1]) else 0
    for slot in range(group_at(groups, 0).sequences):
        failed = False
        for g in range(len(groups)):
            failed |= _lost_one(group_at(groups, g), slot)
        for g in range(len(groups) if failed else 0):
            sequences_of(group_at(groups, g))[slot].failed = 1
    return lost


@jit
def reset(groups, ids, now_ms):
    """Drop all content with one event, and ``ids``, which are all live sequences and reservations.

    Pinned blocks lose their keys and keep their bytes until the last unpin.
    """
    for g in range(len(groups)):
        _reset(group_at(groups, g), ids, now_ms)
    emit_cleared(group_at(groups, 0))
