"""Recurrent groups: which states are kept, moved, shared, published and given back, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from group_engine import GroupsEngine
from kvpool import BlockLayout, KVCacheManager, LayerGroup, OutOfBlocks
from kvpool.device.sim import RaceError, SimDevice
from tests import debug

Open = Callable[..., GroupsEngine]
A = list(range(100, 148))
"""Twelve blocks of four tokens."""
RECURRENT = {"kind": "recurrent"}


def columns(engine: GroupsEngine, sequence: Any, group: int = 0) -> list[int]:
    """Columns of a sequence's row that have a state."""
    return [i for i, block in enumerate(engine.table(sequence, group)) if block >= 0]


def everything(engine: GroupsEngine) -> list[bytes]:
    """Every byte that a decision depends on, in each group."""
    return [debug.dump(state) for state in engine.states()]


# -- what is kept --------------------------------------------------------------------------------------


def test_a_state_that_a_reader_pins_is_not_moved(open_: Open) -> None:
    engine = open_(RECURRENT)
    sequence = engine.add(A[:4])
    with engine.cache.pin_blocks(engine.table(sequence)):
        engine.append(sequence, A[4:6])
        assert columns(engine, sequence) == [0, 1]


def test_a_state_that_a_reader_pins_is_not_overwritten(open_: Open) -> None:
    """A token is added behind those of a block, but a state is another one then."""
    engine = open_(RECURRENT)
    sequence = engine.commit(engine.add(A[:6]))
    (_, block) = engine.cache.state_blocks(sequence.id)[0]
    with engine.cache.pin_blocks([block]):
        promised = engine.block(block).copy()
        assert engine.cache.blocks_needed(sequences=sequence.id, new_tokens=1) == 1
        engine.append(sequence, A[6:7])
        assert (engine.block(block) == promised).all()
        engine.append(sequence, A[7:10])
        assert (engine.block(block) == promised).all()
    engine.finish(sequence)


def test_a_state_goes_back_once_what_is_behind_it_is_committed(open_: Open) -> None:
    engine = open_(RECURRENT | {"snapshot_tokens": 4})
    sequence = engine.add(A[:14])
    assert columns(engine, sequence) == [0, 1, 2, 3]
    for committed, expected in ((4, [0, 1, 2, 3]), (5, [1, 2, 3]), (8, [1, 2, 3]), (14, [3])):
        engine.commit(sequence, committed)
        assert columns(engine, sequence) == expected
    assert engine.cache.stats().passed_blocks == 3


# -- counting ------------------------------------------------------------------------------------------


def test_a_prompt_and_what_it_will_decode_are_counted_together(open_: Open) -> None:
    engine = open_(RECURRENT | {"snapshot_tokens": 8})
    assert [engine.cache.blocks_needed(A[:6], new_tokens=n) for n in (0, 2, 3, 11, 26)] == [2, 2, 3, 4, 5]


def test_a_sequence_may_not_pass_the_end_of_its_row(open_: Open) -> None:
    engine = open_(RECURRENT, max_sequence_tokens=16)
    sequence = engine.add(A[:15])
    before = everything(engine)
    with pytest.raises(ValueError, match="would pass max_sequence_tokens=16"):
        engine.cache.append_tokens(sequence.id, [1, 2])
    assert everything(engine) == before
    engine.append(sequence, [1])


# -- shortening ----------------------------------------------------------------------------------------


def test_a_rewind_never_passes_what_is_committed(open_: Open) -> None:
    engine = open_({}, RECURRENT)
    sequence = engine.commit(engine.add(A[:10]), 7)
    before = everything(engine)
    with pytest.raises(ValueError, match=r"what was committed has no state before; accepted are up to 3 tokens"):
        engine.cache.rewind(sequence.id, [4])
    with pytest.raises(ValueError, match="accepted are 0 to 10 tokens"):
        engine.cache.rewind(sequence.id, [11])
    assert everything(engine) == before
    engine.rewind(sequence, 3)
    assert len(sequence) == 7


def test_a_path_is_not_kept_without_room_for_the_states_that_others_hold(open_: Open) -> None:
    engine = open_({"device_blocks": 24}, RECURRENT | {"snapshot_tokens": 4, "device_blocks": 12})
    sequence = engine.commit(engine.add(A[:6]))
    engine.draft(sequence, [1, 2, 3, 4, 5, 6, 7, 8], [-1, -1, 1, 2, 2, 4, 5, 6])
    engine.fork(sequence)
    while engine.cache.free_blocks[1] > 1:
        engine.add([int(engine.cache.free_blocks[1])])
    before = everything(engine)
    with pytest.raises(OutOfBlocks):
        engine.cache.keep(sequence.id, 8, [1, 2, 4, 5, 6, 7])
    assert everything(engine) == before


# -- beams -----------------------------------------------------------------------------------------------


def test_a_fork_at_the_end_of_a_column_leaves_the_state_to_both(open_: Open) -> None:
    engine = open_(RECURRENT)
    first = engine.commit(engine.add(A[:7]))
    engine.append(first, A[7:8])
    (second,) = engine.fork(first)
    source = engine.table(first)[1]
    engine.append(first, [1])
    engine.append(second, [2])
    for one in (first, second):
        assert engine.cache.state_blocks(one.id).tolist() == [[source, engine.table(one)[2]]]
        engine.commit(one)
        assert columns(engine, one) == [2]


# -- bytes -------------------------------------------------------------------------------------------------


# -- loaders ---------------------------------------------------------------------------------------------


# -- what engines ask --------------------------------------------------------------------------------------


def test_an_engine_is_told_where_states_are(open_: Open) -> None:
    engine = open_({}, RECURRENT | {"snapshot_tokens": 8})
    first = engine.add(A[:14])
    row = engine.table(first, 1)
    assert row[0] == -1 and min(row[1:]) >= 0
    assert engine.cache.state_blocks([first.id], group=1).tolist() == [[-1, row[3]]]
    for committed, at in ((3, 1), (8, 1), (9, 2), (12, 2), (13, 3)):
        engine.commit(first, committed)
        assert engine.cache.state_blocks(first.id, group=1).tolist() == [[row[at], row[3]]]
    second = engine.commit(engine.add(A[:3]))
    (block,) = engine.table(second, 1)
    found = engine.cache.state_blocks([second.id, first.id], group=1)
    assert found.dtype == np.int32 and found.tolist() == [[block, block], [row[3], row[3]]]
    for group, text in ((0, "group=0: accepted are recurrent groups"), (None, "group=None"), (2, "group=2")):
        with pytest.raises(ValueError, match=text):
            engine.cache.state_blocks(first.id, group=group)


@pytest.mark.parametrize("named", [True, False])
def test_a_state_is_read_behind_what_wrote_it_on_the_stream_that_asked(named: bool) -> None:
    device = SimDevice(0, progress=0.0)
    writer, reader = device.create_stream("writer"), device.create_stream("reader")
    layout = BlockLayout(layers=1, kv_heads=1, head_dim=4, tokens_per_block=1)
    groups = [LayerGroup(layout, kind="recurrent")]
    cache = KVCacheManager(groups=groups, tokens_per_block=4, device_blocks=[4], device=device, max_sequences=2)
    sequence = cache.add_sequence(A[:3], stream=writer)
    block = int(cache.state_blocks(sequence)[0, 1])
    device.launch(writer, lambda: cache.device_pool.__setitem__((0, 0, block), 1), writes=[(block, 0, 1)])
    cache.commit(sequence, stream=writer)
    assert cache.state_blocks(sequence, stream=reader if named else None).tolist() == [[block, block]]
    with nullcontext() if named else pytest.raises(RaceError, match="nothing orders two accesses"):
        device.launch(reader, lambda: None, reads=[(block, 0, 1)])
        device.synchronize()
    if named:
        cache.release(sequence)
    cache.close()
    device.close()
