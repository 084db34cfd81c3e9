"""Swapping: a whole sequence leaves the device. Its content waits on the host, held, until the sequence is resumed.

A sequence that is swapped out keeps its row, its id and all notes about it. Its row of the table is empty. In its
place, ``swapped_of`` names the host blocks that it holds: host copies of cached content, which others may use too, and
blocks of its own for the rest.

Both directions work alike. First, what the other tier has already is claimed, and the rest is counted. If a group is
short, this is undone to the byte. Then the rest is copied, and the old blocks of the sequence are given back.
"""

from __future__ import annotations

import numpy as np

from kvpool.common.jit import jit
from kvpool.state.index import find_key
from kvpool.state.policies.policy import free_blocks, nth_released, stop_clock
from kvpool.state.records import (
    DEVICE,
    EXTRA,
    HOST,
    KEYED,
    LIVE,
    NONE,
    OFFLOAD,
    ONBOARD,
    ONBOARDING,
    PRIORITY_MAX,
    PUBLISHED,
    SHORT_OF_BLOCKS,
    SHORT_OF_HOST_BLOCKS,
    SWAPPED,
    add_reference,
    blocks_of,
    counters_of,
    head,
    sequences_of,
    swapped_of,
    table_of,
)
from kvpool.state.requests import has_states, keeps_state
from kvpool.state.sequences import check_kinds, give_back, refuse, slot_of, stream_of
from kvpool.state.tiers import (
    ACCESSED,
    EXPIRIES_PER_CALL,
    STORED,
    WILL_READ,
    WILL_WRITE,
    WROTE,
    begin,
    copy_content,
    emit,
    emit_access,
    emit_move,
    enter,
    expire,
    hold,
    let_go,
    take_device,
    take_host,
    unhold,
)

# -- one sequence, on its way to ``tier`` ----------------------------------------------------------------------------


@jit(forceinline=True)
def _source_blocks(h, slot, tier):
    """The blocks that a sequence leaves, int32[columns]."""
    return (table_of(h) if tier == HOST else swapped_of(h))[slot]


@jit(forceinline=True)
def _target_blocks(h, slot, tier):
    """The blocks of a sequence on ``tier``."""
    return (swapped_of(h) if tier == HOST else table_of(h))[slot]


@jit
def _claim(h, slot, tier):
    """Hold what the tier has already of a sequence. Returns how many blocks the tier lacks; each is counted once, and
    marked."""
    blocks, need = blocks_of(h), np.int64(0)
    sources, targets = _source_blocks(h, slot, tier), _target_blocks(h, slot, tier)
    for i in range(sequences_of(h)[slot].blocks):
        targets[i] = blocks[sources[i]].other_copy if sources[i] != NONE else NONE
        if targets[i] != NONE:
            hold(h, np.int64(targets[i]))
        elif sources[i] != NONE and not blocks[sources[i]].flags & ONBOARDING:
            blocks[sources[i]].flags |= ONBOARDING
            need += 1
    return need


@jit
def _unclaim(h, slot, tier):
    """Undo ``_claim``. Call it in the reverse order."""
    sources, targets = _source_blocks(h, slot, tier), _target_blocks(h, slot, tier)
    for i in range(sequences_of(h)[slot].blocks - 1, -1, -1):
        if targets[i] != NONE:
            unhold(h, np.int64(targets[i]))
        elif sources[i] != NONE:
            blocks_of(h)[sources[i]].flags &= ~ONBOARDING
        targets[i] = NONE


@jit
def _untime(h, slot, tier):
    """Remove claimed blocks from the expiries, once everything is known to fit. A heap cannot be undone to the byte."""
    targets = _target_blocks(h, slot, tier)
    for i in range(sequences_of(h)[slot].blocks):
        if targets[i] != NONE:
            stop_clock(h, np.int64(targets[i]))


@jit
def _copy(h, b, copy, tokens, tier):
    """Give ``copy``, on ``tier``, the first ``tokens`` of ``b`` and all that is known about it. It can be found if
    ``b`` can."""
    blocks = blocks_of(h)
    copy_content(h, b, copy)
    blocks[b].other_copy = copy
    if blocks[b].flags & PUBLISHED:
        blocks[copy].other_copy = b
        emit(h, STORED, copy)
    else:
        blocks[copy].flags, blocks[copy].filled = blocks[b].flags & (KEYED | EXTRA), blocks[b].filled
    emit_move(h, b, copy, tokens, OFFLOAD if tier == HOST else ONBOARD)


@jit
def _copy_rest(h, slot, tier):
    """Copy what the tier lacks. Returns how many blocks. Until the call ends, a block that nobody finds also names its
    copy, for other sequences that share it."""
    blocks, sequence, copied = blocks_of(h), sequences_of(h)[slot], 0
    sources, targets = _source_blocks(h, slot, tier), _target_blocks(h, slot, tier)
    for i in range(sequence.blocks):
        b = np.int64(sources[i])
        if b == NONE or targets[i] != NONE:
            continue
        if blocks[b].flags & ONBOARDING:
            blocks[b].flags &= ~ONBOARDING
            tokens = h.width if has_states(h) else min(h.width, sequence.length - i * h.width)
            _copy(h, b, take_device(h) if tier == DEVICE else take_host(h, np.int64(PRIORITY_MAX)), tokens, tier)
            copied += 1
        targets[i] = blocks[b].other_copy
        add_reference(blocks, np.int64(targets[i]))
    return copied


@jit
def _leave(h, slot, tier):
    """Give back the old blocks of a sequence, the last block first."""
    blocks, sequence, sources = blocks_of(h), sequences_of(h)[slot], _source_blocks(h, slot, tier)
    for n in range(sequence.blocks):
        i = nth_released(n, sequence.blocks)
        b, sources[i] = np.int64(sources[i]), NONE
        if b == NONE:
            continue
        if not blocks[b].flags & PUBLISHED:
            blocks[b].other_copy = NONE
        if tier == HOST:
            emit_access(h, ACCESSED, np.int64(sequence.stream), b)
        let_go(h, b)


# -- both ways -------------------------------------------------------------------------------------------------------


@jit
def _short(heads, ids, tier):
    """Claim and count in all groups. Returns NONE, or the first group that is short; then nothing is claimed any
    more."""
    short = np.int64(NONE)
    for g in range(heads.shape[0]):
        h = head(heads, g)
        h.need = 0
        for k in range(ids.shape[0]):
            h.need += _claim(h, slot_of(ids[k]), tier)
        free = free_blocks(h, tier)
        if h.need > free and short == NONE:
            h.detail, h.bound, short = h.need, free, g
    for g in range(heads.shape[0] if short != NONE else 0):
        for k in range(ids.shape[0] - 1, -1, -1):
            _unclaim(head(heads, g), slot_of(ids[k]), tier)
    return short


@jit
def _change_tier(h, ids, tier, now_ms):
    """Copy what was counted, and give back the old blocks, in one group. Nothing here can fail. Returns blocks
    copied."""
    copied = np.int64(0)
    for k in range(ids.shape[0]):
        if tier == HOST:
            _note_written(h, slot_of(ids[k]))
        _untime(h, slot_of(ids[k]), tier)
    begin(h, now_ms)
    expire(h, EXPIRIES_PER_CALL)
    for k in range(ids.shape[0]):
        copied += _copy_rest(h, slot_of(ids[k]), tier)
    for k in range(ids.shape[0]):
        _leave(h, slot_of(ids[k]), tier)
        sequences_of(h)[slot_of(ids[k])].live = LIVE if tier == DEVICE else SWAPPED
        if tier == DEVICE:
            _note_use(h, slot_of(ids[k]))
    if tier == HOST:
        counters_of(h).offloaded_blocks += copied
    else:
        counters_of(h).onboarded_blocks += copied
    return copied


@jit
def _swap(heads, ids, tier, now_ms):
    error = check_kinds(heads, ids, True, LIVE if tier == HOST else SWAPPED)
    if error:
        return error
    short = _short(heads, ids, tier)
    if short != NONE:
        return refuse(heads, short, SHORT_OF_HOST_BLOCKS if tier == HOST else SHORT_OF_BLOCKS)
    copied = np.int64(0)
    for g in range(heads.shape[0]):
        copied += _change_tier(head(heads, g), ids, tier, now_ms)
    return copied


@jit
def swap_out(heads, ids, now_ms):
    """Move running sequences to the host, where they wait. Returns blocks copied, or an error with nothing changed."""
    return _swap(heads, ids, HOST, now_ms)


@jit
def resume(heads, ids, now_ms):
    """Have sequences that were swapped out run again. Returns blocks copied, or an error with nothing changed."""
    return _swap(heads, ids, DEVICE, now_ms)


@jit
def _note_written(h, slot):
    """The copies read what the stream wrote, whether a call has said so or not."""
    sequence, row, stream = sequences_of(h)[slot], table_of(h)[slot], stream_of(h, slot)
    for i in range(sequence.committed // h.width, sequence.blocks):
        if row[i] != NONE:
            emit_access(h, WROTE, stream, np.int64(row[i]))


@jit
def _note_use(h, slot):
    """The engine continues: it reads what is committed, and may write the rest."""
    sequence, row, stream = sequences_of(h)[slot], table_of(h)[slot], stream_of(h, slot)
    for i in range(sequence.blocks):
        if row[i] != NONE:
            emit_access(h, WILL_READ if i < sequence.committed // h.width else WILL_WRITE, stream, np.int64(row[i]))


# -- sequences that end on the host ----------------------------------------------------------------------------------


@jit
def give_up(h, ids, store):
    """Give back the host blocks of those of these sequences that are swapped out. They are then running sequences
    without blocks."""
    for k in range(ids.shape[0]):
        if sequences_of(h)[slot_of(ids[k])].live == SWAPPED:
            _give_up(h, slot_of(ids[k]), store)


@jit
def _give_up(h, slot, store):
    sequence, away = sequences_of(h)[slot], swapped_of(h)[slot]
    if store and sequence.duplicates != NONE:
        _publish_duplicates(h, slot)
    for n in range(sequence.blocks):
        i = nth_released(n, sequence.blocks)
        b, away[i] = np.int64(away[i]), NONE
        if b != NONE:  # no stream uses host blocks
            give_back(h, slot, i, b, NONE, store, NONE)
    sequence.live, sequence.blocks, sequence.duplicates = LIVE, 0, NONE


@jit
def _publish_duplicates(h, slot):
    """Publish content whose key others held when it was committed, if it is cached nowhere now."""
    blocks, sequence, away = blocks_of(h), sequences_of(h)[slot], swapped_of(h)[slot]
    for i in range(sequence.duplicates, sequence.committed // h.width):
        b = np.int64(away[i])
        if b == NONE or blocks[b].flags & PUBLISHED or not blocks[b].flags & KEYED:
            continue
        if has_states(h) and not keeps_state(h, i, sequence.kept):
            continue
        if find_key(h, blocks[b].key0, blocks[b].key1) == NONE:
            enter(h, b, PUBLISHED)
