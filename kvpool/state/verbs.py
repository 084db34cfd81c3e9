"""The verbs over all groups of layers: a verb changes all groups, or none.

``heads`` int64[groups, HEADER] are the headers. An error has its details in the first header, and its group in
``detail_group``. What a verb does in one group depends on the kind of the group. That choice is made only here.
"""

from __future__ import annotations

import numpy as np

from kvpool.jit import jit
from kvpool.jit.intrinsics import address_of
from kvpool.state import drafts, forks, growth, recurrent, upkeep
from kvpool.state.codes import BAD_TOTAL, SHORT_OF_SEQUENCES
from kvpool.state.commit import DROP, STORE, commit_blocks, commit_error, release_rows
from kvpool.state.kinds import finds, has_states, needs_all
from kvpool.state.lookup import look
from kvpool.state.policy import free_blocks
from kvpool.state.records import (
    DEVICE,
    LIVE,
    RESERVED,
    SWAPPED,
    counters_of,
    head,
    place_of,
    request_at,
    sequences_of,
)
from kvpool.state.requests import findable
from kvpool.state.ring import emit_cleared
from kvpool.state.sequences import check_ids, check_kinds, follow, refuse, slot_of, within
from kvpool.state.swaps import give_up
from kvpool.state.tiers import EXPIRIES_PER_CALL, begin, expire


def _checked(need, fits, change):
    """Make a verb on sequences that is checked in every group before it changes any. The verb returns 0, or an error
    with nothing changed.

    ``need(h, ids, *args)`` returns the blocks that it takes in a group, or the error. ``fits(h, args)`` returns 0 or
    the error, after every group has counted its need, which is in its header. ``change(h, ids, *args)`` cannot fail.
    The encoder's content never changes: in its group, the engine only goes on, on the stream of the call.
    """

    @jit(forceinline=True)
    def verb(heads, ids, now, args):
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
            begin(h, now)
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


_tokens_need = _by_kind(growth.append_need, recurrent.append_need)
_add_tokens = _by_kind(growth.append, recurrent.append)


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
    _add_tokens(h, ids, counts, tokens)
    counters_of(h).appended_tokens += tokens.shape[0]


_append_checked = _checked(_append_need, _append_fits, _append)


@jit
def append(heads, ids, counts, tokens, now):
    """Grow each sequence by its count of ``tokens`` (int32, the tokens of all sequences in order). Returns 0, or an
    error with nothing changed."""
    return _append_checked(heads, ids, now, (counts, tokens))


@jit
def free_device_blocks(heads):
    """How many device blocks of the first group nobody holds."""
    return np.int64(free_blocks(head(heads, 0), DEVICE))


@jit
def free_in_groups(heads, found):
    """How many device blocks of each group nobody holds, into ``found`` int64[groups]."""
    for g in range(heads.shape[0]):
        found[g] = free_blocks(head(heads, g), DEVICE)


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


_keep_path_need = _by_kind(drafts.keep_need, recurrent.keep_need)
_keep_path = _by_kind(drafts.keep, recurrent.keep)


_rewind_need = _by_kind(growth.rewind_need, recurrent.rewind_need)
_rewind_checked = _checked(_rewind_need, _fits, _by_kind(growth.rewind, recurrent.rewind))


@jit
def rewind(heads, ids, counts, now):
    """Drop the last ``counts`` tokens of each sequence. Returns 0, or an error with nothing changed."""
    error = _rewind_checked(heads, ids, now, (counts,))
    for g in range(heads.shape[0] if error == 0 else 0):
        _count_dropped(head(heads, g), counts)
    return error


@jit
def _count_dropped(h, counts):
    for i in range(counts.shape[0] if finds(h) else 0):
        counters_of(h).dropped_tokens += counts[i]


@jit
def _keep_need(h, ids, lengths, accepted, counts, dropped):
    error = np.int64(drafts.draft_error(h, ids, lengths, accepted, counts))
    return error if error else _keep_path_need(h, ids, lengths, accepted, counts, dropped)


@jit
def _keep(h, ids, lengths, accepted, counts, dropped):
    _keep_path(h, ids, lengths, accepted, counts, dropped)
    _count_dropped(h, dropped)


_keep_checked = _checked(_keep_need, _fits, _keep)


@jit
def keep(heads, ids, lengths, accepted, counts, dropped, now):
    """Of the last ``lengths`` tokens of each sequence, keep its next ``counts`` of ``accepted``, which are indices
    among them in rising order.

    ``dropped`` is ``lengths - counts``. Returns 0, or an error with nothing changed.
    """
    return _keep_checked(heads, ids, now, (lengths, accepted, counts, dropped))


# -- what is left behind ----------------------------------------------------------------------------


_commit_checked = _checked(commit_error, _fits, _by_kind(commit_blocks, recurrent.commit))


@jit
def commit(heads, ids, counts, now):
    """Publish the first ``counts`` tokens of each sequence (int64[0] = all tokens of all). Returns 0, or an error with
    nothing changed."""
    return _commit_checked(heads, ids, now, (counts,))


@jit
def release(heads, ids, store, now):
    """Release sequences, the last block of each first, so that leaves age first. Those that are swapped out come first.
    Returns 0, or an error with nothing changed."""
    error = check_kinds(heads, ids, False, LIVE | SWAPPED)
    if error:
        return error
    for g in range(heads.shape[0]):
        begin(head(heads, g), now)
        give_up(head(heads, g), ids, store)
        release_rows(head(heads, g), ids, store)
    return np.int64(0)


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
        forks.fork(head(heads, g), ids, out)
    return np.int64(0)


@jit
def reorder(heads, ids, parents, store, now, before, scratch):
    """Sequence ``ids[i]`` continues from the present state of ``ids[parents[i]]``. Returns 0, or an error with nothing
    changed.

    ``before`` and ``scratch`` are as in ``forks.reorder``.
    """
    error = check_ids(heads, ids, True)
    if error:
        return error
    for g in range(heads.shape[0]):
        begin(head(heads, g), now)
        forks.reorder(head(heads, g), ids, parents, store, before, scratch)
    return np.int64(0)


# -- reservations ----------------------------------------------------------------------------------


@jit
def _become(heads, sequence_id, kind):
    """Turn the row of an open reservation into that of a sequence, or the reverse."""
    for g in range(heads.shape[0]):
        sequences_of(head(heads, g))[sequence_id & 0xFFFFFFFF].live = kind


@jit
def publish_reserved(heads, ids, counts, now):
    """Publish the first ``counts`` int64[1] tokens of the open reservation ``ids`` int64[1], and give all its blocks
    back.

    Returns 0, or an error with nothing changed.
    """
    _become(heads, ids[0], LIVE)
    error = commit(heads, ids, counts, now)
    if error:
        _become(heads, ids[0], RESERVED)
        return error
    return release(heads, ids, STORE, now)


@jit
def abort_reserved(heads, ids, counts, now):
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
    if _rewind_checked(heads, ids, now, (counts,)) < 0:  # takes no block, and ends at the end of the match
        raise RuntimeError("a reservation could not be taken back")
    return release(heads, ids, DROP, now)


# -- between requests ----------------------------------------------------------------------------


@jit
def prefetch(heads, requests, ids, now):
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
            begin(h, now)
            done += upkeep.prefetch(h, matched, ids[g])
    return np.int64(done)


@jit
def offload(heads, keys, now):
    """Copy device blocks by key (int64[n, 2]) to the host, as far as each group has room there. The device blocks stay.
    Returns blocks copied."""
    done = 0
    for g in range(heads.shape[0]):
        begin(head(heads, g), now)
        done += upkeep.offload(head(heads, g), keys)
    return np.int64(done)


@jit
def refresh(heads, now):
    """Give blocks whose time to live is over the default priority, at the back of its list. Returns how many."""
    done = 0
    for g in range(heads.shape[0]):
        begin(head(heads, g), now)
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
        lost += 1 if upkeep.lose(head(heads, g), b, targets[i, 1]) else 0
    for slot in range(head(heads, 0).sequences):
        failed = False
        for g in range(heads.shape[0]):
            failed |= upkeep.lost_one(head(heads, g), slot)
        for g in range(heads.shape[0] if failed else 0):
            sequences_of(head(heads, g))[slot].failed = 1
    return np.int64(lost)


@jit
def reset(heads, ids, now):
    """Drop all content with one event, and ``ids``, which are all live sequences and reservations.

    Pinned blocks lose their keys and keep their bytes until the last unpin.
    """
    for g in range(heads.shape[0]):
        upkeep.reset(head(heads, g), ids, now)
    emit_cleared(head(heads, 0))
