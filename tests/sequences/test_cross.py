"""Groups for cross attention: blocks for what an encoder gives, taken once, shared by beams, cached for nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from group_engine import GroupsEngine
from kvpool import IntegrityError, OutOfBlocks
from kvpool.state import records
from kvpool.state.verify import verify
from tests import debug

Open = Callable[..., GroupsEngine]
A = list(range(100, 148))
CROSS = {"kind": "cross"}
RECURRENT = {"kind": "recurrent"}


def everything(engine: GroupsEngine) -> list[bytes]:
    """Every byte that a decision depends on, in each group."""
    return [debug.dump(state) for state in engine.states()]


def test_who_asks_for_blocks_names_the_encoder_exactly_where_it_counts(open_: Open) -> None:
    engine = open_({}, CROSS)
    sequence = engine.add(A[:6], encoder_tokens=1)
    for options in ({"group": 1}, {"group": 0, "encoder_tokens": 3}, {"group": 1, "encoder_tokens": -1}):
        with pytest.raises(ValueError, match="encoder_tokens"):
            engine.cache.blocks_needed(A[:6], **options)
    with pytest.raises(ValueError, match="encoder_tokens=3: accepted is None for sequences"):
        engine.cache.blocks_needed(sequences=sequence.id, group=1, encoder_tokens=3)


def test_a_batch_that_its_encoders_have_no_room_for_changes_nothing(open_: Open) -> None:
    engine = open_({"device_blocks": 30}, CROSS | {"device_blocks": 4}, RECURRENT | {"device_blocks": 30})
    engine.add(A[:6], encoder_tokens=4)
    before = everything(engine)
    with pytest.raises(OutOfBlocks) as raised:
        engine.cache.add_sequence_batch([A[:6], A[6:12]], encoder_tokens=[8, 8])
    assert (raised.value.group, raised.value.needed, raised.value.free) == (1, 4, 3)
    with pytest.raises(ValueError, match="250 device blocks of group 1 are needed at once, of 4: it can never fit"):
        engine.cache.add_sequence(A[:6], encoder_tokens=999)
    assert everything(engine) == before
    assert (
        engine.cache.add_sequence_batch([A[:6], A[6:12]], encoder_tokens=[8, 8], allow_partial_batch=True).admitted == 1
    )


def test_by_default_a_row_has_room_for_all_that_the_device_has_of_an_encoder(open_: Open) -> None:
    engine = open_({"device_blocks": 4}, CROSS | {"device_blocks": 40}, max_sequence_tokens=None)
    assert engine.cache.blocks_needed(A[:6], encoder_tokens=160, group=1) == 40
    sequence = engine.add(A[:6], encoder_tokens=160)
    assert engine.table(sequence, 1) == list(range(40))


def test_an_encoder_that_fits_on_the_device_but_into_no_row_is_refused_by_its_bound(open_: Open) -> None:
    engine = open_({"device_blocks": 30}, CROSS | {"device_blocks": 30}, max_sequence_tokens=16)
    before = everything(engine)
    for call in (engine.cache.add_sequence, engine.cache.reserve):
        with pytest.raises(ValueError, match="encoder_tokens=17 passes max_sequence_tokens=16"):
            call(A[:6], encoder_tokens=17)
    with pytest.raises(ValueError, match="encoder_tokens=99 passes max_sequence_tokens=16"):
        engine.cache.add_sequence_batch([A[:6], A[:6]], encoder_tokens=[16, 99])
    assert everything(engine) == before
    admission = engine.cache.add_sequence_batch([A[:6], A[:6]], encoder_tokens=[99, 16], allow_partial_batch=True)
    assert list(admission.refused) == [0] and admission.ids[0] == -1 and admission.admitted == 1
    engine.add(A[:6], encoder_tokens=16)


@pytest.mark.parametrize(
    ("value", "error"),
    [([1], ValueError), ([1, -1], ValueError), ([1, 1 << 31], ValueError), ([1, 2.5], TypeError), ("ab", TypeError)],
)
def test_wrong_lengths_of_encoders_are_refused_by_name(open_: Open, value: Any, error: type[Exception]) -> None:
    engine = open_({}, CROSS)
    before = everything(engine)
    with pytest.raises(error, match="encoder_tokens"):
        engine.cache.add_sequence_batch([A[:6], A[:7]], encoder_tokens=value)
    with pytest.raises(error, match="encoder_tokens"):
        engine.cache.plan_batch([A[:6], A[:7]], encoder_tokens=value)
    assert everything(engine) == before


def test_tables_of_an_encoder_are_handed_over_with_its_own_lengths(open_: Open) -> None:
    engine = open_({}, CROSS)
    pair = [engine.add(A[:6], encoder_tokens=9), engine.add(A[:30], encoder_tokens=4)]
    ids = [one.id for one in pair]
    rows = [engine.table(one, 1) for one in pair]
    target = np.zeros((2, 5), np.int32)
    engine.cache.copy_batch_block_offsets(target, ids, group=1)
    assert target.tolist() == [[*row, *[-1] * (5 - len(row))] for row in rows]
    indptr, indices, last = np.zeros(3, np.int32), np.zeros(4, np.int32), np.zeros(2, np.int32)
    engine.cache.copy_batch_block_csr(indptr, indices, last, ids, group=1)
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 3, 4], rows[0] + rows[1], [1, 4])


@pytest.mark.parametrize(
    ("check", "corrupt"),
    [
        ("cross", lambda s, row, b: s.blocks["flags"].__setitem__(b, records.KEYED)),
        ("cross", lambda s, row, b: s.sequences["committed"].__setitem__(row, 1)),
        ("length", lambda s, row, b: s.sequences["length"].__setitem__(row, 4)),
    ],
)
def test_verify_sees_what_an_encoder_may_not_have(open_: Open, check: str, corrupt: Callable[..., object]) -> None:
    engine = open_({}, CROSS)
    sequence = engine.add(A[:6], encoder_tokens=9)
    state = engine.states()[1]
    saved = state.blocks.copy(), state.sequences.copy()
    corrupt(state, sequence.id & 0xFFFFFFFF, engine.table(sequence, 1)[0])
    with pytest.raises(IntegrityError) as raised:
        verify(state, np.empty(0, np.int64))
    assert raised.value.check == check
    state.blocks[:], state.sequences[:] = saved
