"""Swapping: a whole sequence leaves the device. Its content waits on the host, held, until the sequence is resumed.

A sequence that is swapped out keeps its row, its id and all notes about it. Its row of the table is empty. In its
place, ``swapped_of`` names the host blocks that it holds: host copies of cached content, which others may use too, and
blocks of its own for the rest.

Both directions work alike. First, what the other tier has already is claimed, and the rest is counted. If a group is
short, this is undone to the byte. Then the rest is copied, and the old blocks of the sequence are given back.
"""

from __future__ import annotations

from kvpool.common.jit import inline, jit
from kvpool.state.index import find_key
from kvpool.state.policies.policy import free_blocks, nth_released, stop_clocks
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
    group_at,
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
    emit_copy,
    enter,
    expire,
    hold,
    let_go,
    take_device,
    take_host,
    unhold,
)

# -- one sequence, on its way to ``tier`` ----------------------------------------------------------------------------


@inline
def _source_blocks(group, slot, tier):
    """The blocks that a sequence leaves, int32[columns]."""
    return (table_of(group) if tier == HOST else swapped_of(group))[slot]


@inline
def _target_blocks(group, slot, tier):
    """The blocks of a sequence on ``tier``."""
    return (swapped_of(group) if tier == HOST else table_of(group))[slot]


@jit
def _claim(group, slot, tier):
    """Hold what the tier has already of a sequence. Returns how many blocks the tier lacks; each is counted once, and
    marked."""
    blocks, need = blocks_of(group), 0
    sources, targets = _source_blocks(group, slot, tier), _target_blocks(group, slot, tier)
    for i in range(sequences_of(group)[slot].blocks):
        targets[i] = blocks[sources[i]].other_copy if sources[i] != NONE else NONE
        if targets[i] != NONE:
            hold(group, targets[i])
        elif sources[i] != NONE and not blocks[sources[i]].flags & ONBOARDING:
            blocks[sources[i]].flags |= ONBOARDING
            need += 1
    return need


@jit
def _unclaim(group, slot, tier):
    """Undo ``_claim``. Call it in the reverse order."""
    sources, targets = _source_blocks(group, slot, tier), _target_blocks(group, slot, tier)
    for i in range(sequences_of(group)[slot].blocks - 1, -1, -1):
        if targets[i] != NONE:
            unhold(group, targets[i])
        elif sources[i] != NONE:
            blocks_of(group)[sources[i]].flags &= ~ONBOARDING
        targets[i] = NONE


@jit
def _copy(group, b, copy, tokens, tier):
    """Give ``copy``, on ``tier``, the first ``tokens`` of ``b`` and all that is known about it. It can be found if
    ``b`` can."""
    blocks = blocks_of(group)
    copy_content(group, b, copy)
    blocks[b].other_copy = copy
    if blocks[b].flags & PUBLISHED:
        blocks[copy].other_copy = b
        emit(group, STORED, copy)
    else:
        blocks[copy].flags, blocks[copy].filled = blocks[b].flags & (KEYED | EXTRA), blocks[b].filled
    emit_copy(group, b, copy, tokens, OFFLOAD if tier == HOST else ONBOARD)


@jit
def _copy_rest(group, slot, tier):
    """Copy what the tier lacks. Returns how many blocks. Until the call ends, a block that nobody finds also names its
    copy, for other sequences that share it."""
    blocks, sequence, copied = blocks_of(group), sequences_of(group)[slot], 0
    sources, targets = _source_blocks(group, slot, tier), _target_blocks(group, slot, tier)
    for i in range(sequence.blocks):
        b = sources[i]
        if b == NONE or targets[i] != NONE:
            continue
        if blocks[b].flags & ONBOARDING:
            blocks[b].flags &= ~ONBOARDING
            tokens = group.width if has_states(group) else min(group.width, sequence.length - i * group.width)
            _copy(
                group,
                b,
                take_device(group) if tier == DEVICE else take_host(group, PRIORITY_MAX),
                tokens,
                tier,
            )
            copied += 1
        targets[i] = blocks[b].other_copy
        add_reference(blocks, targets[i])
    return copied


@jit
def _leave(group, slot, tier):
    """Give back the old blocks of a sequence, the last block first."""
    blocks, sequence, sources = blocks_of(group), sequences_of(group)[slot], _source_blocks(group, slot, tier)
    for n in range(sequence.blocks):
        i = nth_released(n, sequence.blocks)
        b, sources[i] = sources[i], NONE
        if b == NONE:
            continue
        if not blocks[b].flags & PUBLISHED:
            blocks[b].other_copy = NONE
        if tier == HOST:
            emit_access(group, ACCESSED, sequence.stream, b)
        let_go(group, b)


# -- both ways -------------------------------------------------------------------------------------------------------


@jit
def _short(groups, ids, tier):
    """Claim and count in all groups. Returns NONE, or the first group that is short; then nothing is claimed any
    more."""
    short = NONE
    for g in range(len(groups)):
        group = group_at(groups, g)
        group.need = 0
        for k in range(len(ids)):
            group.need += _claim(group, slot_of(ids[k]), tier)
        free = free_blocks(group, tier)
        if group.need > free and short == NONE:
            group.detail, group.bound, short = group.need, free, g
    for g in range(len(groups) if short != NONE else 0):
        for k in range(len(ids) - 1, -1, -1):
            _unclaim(group_at(groups, g), slot_of(ids[k]), tier)
    return short


@jit
def _change_tier(group, ids, tier, now_ms):
    """Copy what was counted, and give back the old blocks, in one group. Nothing here can fail. Returns blocks
    copied."""
    copied = 0
    for k in range(len(ids)):
        slot = slot_of(ids[k])
        if tier == HOST:
            _note_written(group, slot)
        # Not before everything is known to fit: a heap cannot be undone to the byte.
        stop_clocks(group, _target_blocks(group, slot, tier), sequences_of(group)[slot].blocks)
    begin(group, now_ms)
    expire(group, EXPIRIES_PER_CALL)
    for k in range(len(ids)):
        copied += _copy_rest(group, slot_of(ids[k]), tier)
    for k in range(len(ids)):
        _leave(group, slot_of(ids[k]), tier)
        sequences_of(group)[slot_of(ids[k])].live = LIVE if tier == DEVICE else SWAPPED
        if tier == DEVICE:
            _note_use(group, slot_of(ids[k]))
    if tier == HOST:
        counters_of(group).offloaded_blocks += copied
    else:
        counters_of(group).onboarded_blocks += copied
    return copied


@jit
def swap(groups, ids, tier, now_ms):
    """Move running sequences to the HOST, where they wait, or have sequences that were swapped out run again, on the
    DEVICE. Returns blocks copied, or an error with nothing changed."""
    error = check_kinds(groups, ids, True, LIVE if tier == HOST else SWAPPED)
    if error:
        return error
    short = _short(groups, ids, tier)
    if short != NONE:
        return refuse(groups, short, SHORT_OF_HOST_BLOCKS if tier == HOST else SHORT_OF_BLOCKS)
    copied = 0
    for g in range(len(groups)):
        copied += _change_tier(group_at(groups, g), ids, tier, now_ms)
    return copied


@jit
def _note_written(group, slot):
    """The copies read what the stream wrote, whether a call has reported it or not."""
    sequence, row, stream = sequences_of(group)[slot], table_of(group)[slot], stream_of(group, slot)
    for i in range(sequence.committed // group.width, sequence.blocks):
        if row[i] != NONE:
            emit_access(group, WROTE, stream, row[i])


@jit
def _note_use(group, slot):
    """The engine continues: it reads what is committed, and may write the rest."""
    sequence, row, stream = sequences_of(group)[slot], table_of(group)[slot], stream_of(group, slot)
    for i in range(sequence.blocks):
        if row[i] != NONE:
            emit_access(group, WILL_READ if i < sequence.committed // group.width else WILL_WRITE, stream, row[i])


# -- sequences that end on the host ----------------------------------------------------------------------------------


@jit
def give_up(group, ids, store):
    """Give back the host blocks of those of these sequences that are swapped out. They are then running sequences
    without blocks."""
    for k in range(len(ids)):
        if sequences_of(group)[slot_of(ids[k])].live == SWAPPED:
            _give_up(group, slot_of(ids[k]), store)


@jit
def _give_up(group, slot, store):
    sequence, away = sequences_of(group)[slot], swapped_of(group)[slot]
    if store and sequence.duplicates != NONE:
        _publish_duplicates(group, slot)
    for n in range(sequence.blocks):
        i = nth_released(n, sequence.blocks)
        b, away[i] = away[i], NONE
        if b != NONE:  # no stream uses host blocks
            give_back(group, slot, i, b, NONE, store, NONE)
    sequence.live, sequence.blocks, sequence.duplicates = LIVE, 0, NONE


@jit
def _publish_duplicates(group, slot):
    """Publish content whose key others held when it was committed, if it is cached nowhere now."""
    blocks, sequence, away = blocks_of(group), sequences_of(group)[slot], swapped_of(group)[slot]
    for i in range(sequence.duplicates, sequence.committed // group.width):
        b = away[i]
        if b == NONE or blocks[b].flags & PUBLISHED or not blocks[b].flags & KEYED:
            continue
        if has_states(group) and not keeps_state(group, i, sequence.kept):
            continue
        if find_key(group, blocks[b].key0, blocks[b].key1) == NONE:
            enter(group, b, PUBLISHED)
