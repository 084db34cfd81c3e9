"""Layer groups: one answer over all of them, every change in all or in none, and what each kind keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import small_layout
from group_engine import GroupsEngine
from kvpool import DeviceError, KVCacheManager, LayerGroup, OutOfBlocks
from kvpool.device.cpu import CpuDevice
from kvpool.device.sim import SimDevice
from kvpool.state import records
from tests import debug
from tests.device.faults import FaultyDevice

Open = Callable[..., GroupsEngine]
A = list(range(100, 148))
"""Twelve blocks of four tokens."""
RECURRENT = {"kind": "recurrent"}
CROSS = {"kind": "cross"}


def columns(engine: GroupsEngine, sequence: Any) -> list[list[int]]:
    """Columns of a sequence's row that have a block, in each group."""
    return [[i for i, block in enumerate(engine.table(sequence, side.index)) if block >= 0] for side in engine.sides]


def everything(engine: GroupsEngine) -> list[bytes]:
    """Every byte that a decision depends on, in each group."""
    return [debug.dump(state) for state in engine.states()]


def test_what_is_reused_is_what_every_group_can_reuse(open_: Open) -> None:
    engine = open_({"device_blocks": 24}, {"window": 8}, {"window": 16, "device_blocks": 11})
    engine.seed(A[:20], committed=20, retention=[(8, 12, 10, None), (16, 20, 5, None)])
    assert engine.reusable(A[:21]) == 20
    # The second group needs one more block than are empty and loses block 4, the third block 2 as well.
    other = engine.add(range(32))
    assert engine.reusable(A[:21]) == 8
    engine.release(other)
    before = engine.free_blocks()
    sequence = engine.add(A[:21])
    assert sequence.cached == 8
    engine.release(sequence, store=False)
    assert engine.free_blocks() == before


def test_what_one_group_lacks_is_held_in_none(open_: Open) -> None:
    engine = open_({"device_blocks": 24}, {"device_blocks": 5})
    engine.seed(A[:20])
    engine.seed(A[24:44])  # takes all blocks of the second group
    assert engine.reusable(A[:21]) == 0
    before = engine.free_blocks()
    sequence = engine.add(A[:4])
    assert sequence.cached == 0
    assert engine.free_blocks() == [before[0] - 1, before[1] - 1]


def test_tokens_of_a_part_are_copied_in_all_groups_or_in_none(open_: Open) -> None:
    engine = open_({}, {"window": 6}, partial_reuse=True)
    engine.seed(A[:7], committed=7)
    sequence = engine.add(A[:8])
    assert sequence.cached == 7
    assert [int(state.counters[records.COUNTERS.index("copied_blocks")]) for state in engine.states()] == [1, 1]


def test_a_part_that_one_group_has_to_drop_is_reused_in_none(open_: Open) -> None:
    engine = open_({"device_blocks": 2}, {})
    engine.seed(A[:3], committed=3)
    # Both want the tail, and the first group has one block beside it.
    first, second = engine.add_batch([[*A[:3], 1], [*A[:3], 2]])
    assert (first.cached, second.cached) == (3, 0)
    assert [int(state.counters[records.COUNTERS.index("partial_tokens")]) for state in engine.states()] == [3, 3]
    assert [int(state.counters[records.COUNTERS.index("copied_blocks")]) for state in engine.states()] == [0, 1]


def test_a_call_that_one_group_has_no_room_for_changes_nothing_in_any(open_: Open) -> None:
    engine = open_({}, {"device_blocks": 3}, {"window": 8})
    engine.seed(A[:8])
    first = engine.add(A[:9])
    before = everything(engine)
    with pytest.raises(OutOfBlocks):
        engine.cache.add_sequence_batch([A[:4], A[20:24]])
    with pytest.raises(OutOfBlocks):
        engine.cache.append_tokens(first.id, A[9:13])
    with pytest.raises(OutOfBlocks):
        engine.cache.reserve(A[20:28])
    assert everything(engine) == before
    assert engine.cache.add_sequence_batch([[1], A[20:24]], allow_partial_batch=True).admitted == 0


@pytest.mark.parametrize("group", [0, 1])
def test_a_sequence_that_lost_a_block_in_one_group_leaves_no_part_of_one_behind_in_any(group: int) -> None:
    """The end that two beams share is copied for the one that writes, and that copy fails in one of the groups."""
    wide = small_layout(4)
    device = FaultyDevice(CpuDevice(), lambda call, index, move: (int(move[0]) >= 8) == bool(group))
    with KVCacheManager(groups=[LayerGroup(wide), LayerGroup(wide)], device_blocks=[8, 8], device=device) as cache:
        first = cache.add_sequence(A[:6])
        cache.commit(first)
        (second,) = cache.fork(first)
        cache.append_tokens(second, [1])
        with pytest.raises(DeviceError, match="lost a block"):
            cache.commit(second)
        place = cache.block_table(first, group=group).dense()[0, 1]
        cache.release(first)  # leaves its end behind, which the copy would take the place of
        cache.release(second)
        tails = [np.flatnonzero(state.blocks["flags"] & records.TAIL).tolist() for state in cache.core.states]
        assert tails[group] == [place] and cache.match_prefix([*A[:6], 1]).tokens == 6
        cache.verify()
    device.close()


def test_pins_are_taken_and_dropped_in_the_same_groups(open_: Open) -> None:
    engine = open_({"host_blocks": 4}, {"window": 8, "host_blocks": 4}, {"window": 12, "device_blocks": 5})
    engine.seed(A[:13])
    before = engine.free_blocks()
    key = engine.prompt(A[:12]).keys[2]
    with engine.cache.pin([key]) as lease:
        assert len(lease.blocks) == 3
        assert engine.free_blocks() == [count - 1 for count in before]
    assert engine.free_blocks() == before
    assert all(not (state.blocks["word"] >> 32).any() for state in engine.states())
    engine.cache.offload(engine.prompt(A[:12]))
    lease = engine.cache.find_and_pin_host(key, owner="reader")
    assert lease is not None and len(lease.blocks) == 2
    assert engine.cache.revoke("reader") == 1
    assert all(not (state.blocks["word"] >> 32).any() for state in engine.states())


def test_blocks_are_pinned_by_ids_that_no_two_groups_share(open_: Open) -> None:
    engine = open_({"device_blocks": 5}, {"device_blocks": 7})
    sequence = engine.add(A[:8])
    ids = [g.first_device_block + block for g in engine.cache.groups for block in engine.table(sequence, g.index)]
    assert len(set(ids)) == 4 and max(ids) >= 5
    with engine.cache.pin_blocks(ids):
        pins = [int((state.blocks["word"] >> 32).sum()) for state in engine.states()]
        assert pins == [2, 2]
    engine.release(sequence)


def test_a_rewind_ends_before_what_any_window_has_passed(open_: Open) -> None:
    engine = open_({}, {"window": 16}, {"window": 8})
    sequence = engine.commit(engine.add(A[:20]))
    before = everything(engine)
    with pytest.raises(ValueError, match="window"):
        engine.cache.rewind(sequence.id, [2])
    assert everything(engine) == before
    engine.append(sequence, A[20:27])
    engine.rewind(sequence, 7)
    assert columns(engine, sequence) == [[0, 1, 2, 3, 4], [1, 2, 3, 4], [3, 4]]


def test_beams_and_drafts_move_in_all_groups(open_: Open) -> None:
    engine = open_(
        {"device_blocks": 20}, {"window": 8, "device_blocks": 20}, {"window": 6, "sinks": 4, "device_blocks": 20}
    )
    first = engine.commit(engine.add(A[:14]))
    second, third = engine.fork(first, 2)
    for i, beam in enumerate((first, second, third)):
        engine.append(beam, [i, i + 1, i + 2])
    engine.reorder([first, second, third], [2, 0, 0])
    for beam in (first, second, third):
        engine.append(beam, [7, 8])
        engine.commit(beam)
    engine.draft(third, [1, 2, 3, 4, 5], [-1, 0, 0, 2, 3])
    engine.keep(third, 5, [0, 2, 3])
    for beam in (first, second, third):
        engine.commit(beam)
        engine.release(beam)
    assert engine.free_blocks() == [20, 20, 20]


def test_a_state_is_reused_where_one_was_kept(open_: Open) -> None:
    engine = open_({"device_blocks": 24}, RECURRENT | {"snapshot_tokens": 8})
    engine.seed(A[:30], committed=30)
    assert [engine.reusable(A[:n]) for n in (8, 9, 16, 17, 24, 25, 29, 30, 31)] == [0, 8, 8, 16, 16, 24, 28, 28, 28]
    sequence = engine.add(A[:23])
    assert sequence.cached == 16
    assert columns(engine, sequence) == [[0, 1, 2, 3, 4, 5], [3, 4, 5]]


def test_no_part_of_a_block_is_reused_where_a_group_is_recurrent(open_: Open) -> None:
    engine = open_({}, RECURRENT)
    engine.seed(A[:11])
    assert engine.reusable(A[:11]) == 8
    assert engine.add(A[:11]).cached == 8


def test_columns_without_a_state_take_no_memory(open_: Open) -> None:
    engine = open_(RECURRENT | {"device_blocks": 4})
    sequence = engine.add(A[:40])
    assert columns(engine, sequence) == [[8, 9]], "the last that can be reused, and the running one"
    engine.append(sequence, A[40:48])
    assert columns(engine, sequence) == [[8, 11]]
    assert engine.free_blocks() == [2]
    engine.commit(sequence)
    assert columns(engine, sequence) == [[11]]
    assert engine.reusable(A[:48]) == 36
    engine.append(sequence, [1])
    assert columns(engine, sequence) == [[12]], "a state that is not kept moves on"
    engine.commit(sequence)
    assert columns(engine, sequence) == [[12]] and engine.reusable(A[:48]) == 36


@pytest.mark.parametrize("full", [4, 8])
def test_a_running_state_that_others_can_find_is_not_written_again(open_: Open, full: int) -> None:
    engine = open_(RECURRENT)
    sequence = engine.add(A[: full + 1])
    engine.rewind(sequence, 1)
    engine.commit(sequence)
    (last,) = columns(engine, sequence)[0]
    assert engine.reusable(A[: full + 1]) == full
    engine.append(sequence, [1])
    assert columns(engine, sequence) == [[last, last + 1]] and engine.reusable(A[: full + 1]) == full
    assert engine.add(A[: full + 1]).cached == full, "and it is the state that it was"


def test_a_rewind_leaves_a_state_to_the_forks_that_hold_it(open_: Open) -> None:
    engine = open_(RECURRENT)
    first = engine.commit(engine.add(A[:5]))
    engine.append(first, A[5:7])
    (second,) = engine.fork(first)
    (shared,) = {*engine.table(first)} - {-1}
    engine.rewind(second, 1)
    assert engine.table(first)[-1] == shared and shared not in engine.table(second)
    engine.check_all()


def test_a_state_that_a_fork_has_published_is_forgotten_before_it_is_written_again(open_: Open) -> None:
    engine = open_(RECURRENT)
    first = engine.add(A[:9])
    (second,) = engine.fork(first)
    engine.commit(second)
    engine.release(second)
    assert engine.reusable(A[:9]) == 8
    engine.rewind(first, 2)
    assert engine.reusable(A[:9]) == 0 and not engine.cached()


def test_a_running_state_that_beams_share_is_copied_before_it_changes(open_: Open) -> None:
    engine = open_(RECURRENT)
    first = engine.add(A[:6])
    (second,) = engine.fork(first)
    assert engine.table(first) == engine.table(second)
    engine.append(second, [1])
    engine.append(first, [2, 3, 4, 5])
    engine.commit(first)
    engine.commit(second)
    engine.release(first, second)
    assert engine.free_blocks() == [12]


def test_a_rewind_of_drafts_leaves_a_running_state_and_goes_no_further(open_: Open) -> None:
    engine = open_({}, RECURRENT)
    sequence = engine.commit(engine.add(A[:6]), 5)
    engine.append(sequence, A[6:14])
    engine.rewind(sequence, 8)
    assert columns(engine, sequence) == [[0, 1], [1]]
    before = everything(engine)
    with pytest.raises(ValueError, match="committed"):
        engine.cache.rewind(sequence.id, [2])
    assert everything(engine) == before


def test_what_the_encoder_gave_is_shared_by_beams_and_cached_for_nobody(open_: Open) -> None:
    engine = open_({"device_blocks": 20}, CROSS)
    first = engine.add(A[:6], encoder_tokens=10)
    (beam,) = engine.fork(first)
    assert engine.table(first, 1) == engine.table(beam, 1) and len(engine.table(first, 1)) == 3
    engine.append(first, A[6:14])
    engine.append(beam, [1])
    engine.commit(first)
    engine.rewind(first, 3)
    engine.reorder([first, beam], [1, 0])
    assert engine.free_blocks()[1] == 9
    engine.release(first)
    assert engine.free_blocks()[1] == 9
    engine.release(beam)
    assert engine.free_blocks()[1] == 12
    again = engine.add(A[:6], encoder_tokens=1)
    assert again.cached >= 4 and columns(engine, again)[1] == [0]


def test_the_encoder_is_named_exactly_where_there_is_cross_attention(open_: Open) -> None:
    plain, cross = open_({}, {}), open_({}, CROSS)
    for call in (
        lambda: plain.cache.add_sequence(A[:6], encoder_tokens=4),
        lambda: cross.cache.add_sequence(A[:6]),
        lambda: cross.cache.add_sequence_batch([A[:6], A[:7]], encoder_tokens=[4]),
    ):
        with pytest.raises(ValueError, match="encoder_tokens"):
            call()


def test_a_group_is_named_where_there_are_several(open_: Open) -> None:
    engine = open_({}, {"window": 8, "device_blocks": 3})
    sequence = engine.add(A[:6])
    with pytest.raises(ValueError, match="group"):
        engine.cache.block_table(sequence.id)
    with pytest.raises(ValueError, match="group"):
        engine.cache.block_table(sequence.id, group=2)
    assert engine.table(sequence, 1) != []
    one, two = engine.cache.groups
    assert (one.first_device_block, two.first_device_block, one.first_host_block) == (0, 12, 15)


# -- one answer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("short", [0, 1])
def test_tokens_on_the_host_are_those_of_the_group_that_has_most_there(open_: Open, short: int) -> None:
    sizes = [{"device_blocks": 12, "host_blocks": 8}, {"device_blocks": 12, "host_blocks": 8}]
    sizes[short]["device_blocks"] = 5
    engine = open_(*sizes)
    for tokens in (A[:16], A[20:36]):
        engine.finish(engine.add(tokens))
    admitted = engine.cache.add_sequence_batch([A[:18]])
    assert (admitted.device_tokens.tolist(), admitted.host_tokens.tolist(), admitted.missed_blocks.tolist()) == (
        [4],
        [8],
        [2],
    )
    engine.cache.release(admitted.ids)


@pytest.mark.parametrize("group", [0, 1])
def test_a_table_that_is_handed_over_on_a_stream_takes_the_sequence_there_in_all_groups(group: int) -> None:
    device = SimDevice(0)
    layers = [LayerGroup(small_layout(4)), LayerGroup(small_layout(4), window=8)]
    with KVCacheManager(groups=layers, device_blocks=[8, 8], device=device, max_sequences=2) as cache:
        sequence = cache.add_sequence(A[:9], stream=device.create_stream("engine"))
        table = np.zeros((1, 4), np.int32)
        cache.copy_batch_block_offsets(table, [sequence], stream=device.create_stream("other"), group=group)
        cache.verify()
        cache.release(sequence)
    device.close()


@pytest.mark.parametrize("other", [{"device_blocks": 40}, RECURRENT])
def test_the_group_that_can_never_hold_a_prompt_is_the_one_that_is_named(open_: Open, other: dict[str, Any]) -> None:
    engine = open_(other, {"device_blocks": 6}, max_sequence_tokens=24)
    with pytest.raises(ValueError, match="7 device blocks of group 1 are needed at once, of 6: it can never fit"):
        engine.cache.add_sequence(A[:28])


def test_a_tiny_host_tier_costs_no_chain_of_copies(open_: Open) -> None:
    """Of states that push each other out of the host within one call, only the last one is copied."""
    for group in ({}, RECURRENT | {"snapshot_tokens": 4}):
        engine = open_(group | {"device_blocks": 12, "host_blocks": 1})
        sequence = engine.add(A[:40])
        for committed in range(4, 44, 4):
            engine.commit(sequence, committed)
        engine.release(sequence)
        before = engine.cache.stats()
        engine.cache.release(engine.cache.add_sequence(A[40:48] + A[:36]))
        after = engine.cache.stats()
        assert after.offloaded_blocks > before.offloaded_blocks + 1
        assert after.offloaded_bytes == before.offloaded_bytes + engine.cache.groups[0].block_bytes
