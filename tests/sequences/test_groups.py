"""Layer groups: one answer over all of them, every change in all or in none, and what each kind keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import small_layout
from group_engine import GroupsEngine
from kvpool import DeviceError, KVCacheManager, LayerGroup
from kvpool.device.cpu import CpuDevice
from kvpool.device.sim import SimDevice
from kvpool.state import records
from tests.device.faults import FaultyDevice

Open = Callable[..., GroupsEngine]
A = list(range(100, 148))
"""Twelve blocks of four tokens."""
RECURRENT = {"kind": "recurrent"}
CROSS = {"kind": "cross"}


def columns(engine: GroupsEngine, sequence: Any) -> list[list[int]]:
    """Columns of a sequence's row that have a block, in each group."""
    return [[i for i, block in enumerate(engine.table(sequence, side.index)) if block >= 0] for side in engine.sides]


def test_a_part_that_one_group_has_to_drop_is_reused_in_none(open_: Open) -> None:
    engine = open_({"device_blocks": 2}, {})
    engine.seed(A[:3], committed=3)
    # Both want the tail, and the first group has one block beside it.
    first, second = engine.add_batch([[*A[:3], 1], [*A[:3], 2]])
    assert (first.cached, second.cached) == (3, 0)
    assert [int(state.counters[records.COUNTERS.index("partial_tokens")]) for state in engine.states()] == [3, 3]
    assert [int(state.counters[records.COUNTERS.index("copied_blocks")]) for state in engine.states()] == [0, 1]


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
