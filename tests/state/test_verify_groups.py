"""verify() over groups: what a row of a recurrent group may not be, and that groups agree about their sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from group_engine import open_groups
from kvpool.device.sim import SimDevice
from kvpool.errors import IntegrityError
from kvpool.state.verify import together, verify

A = list(range(100, 148))


def _hold(state: Any, row: int, column: int, target: int) -> None:
    state.table[row, target], state.table[row, column] = state.table[row, column], -1


CORRUPTIONS: dict[str, tuple[str, Callable[[Any, int], object]]] = {
    "no running state": ("states", lambda s, r: _hold(s, r, 5, 4)),
    "a passed state": ("states", lambda s, r: _hold(s, r, 4, 1)),
    "a snapshot that is gone": ("states", lambda s, r: _hold(s, r, 3, 4)),
    "another key": ("chain", lambda s, r: s.sequences["chain0"].__setitem__(r, 5)),
    "no tokens but committed ones": ("chain", lambda s, r: s.sequences["length"].__setitem__(r, 0)),
    "more tokens than a row has": ("chain", lambda s, r: s.sequences["length"].__setitem__(r, 1 << 30)),
    "more blocks than a row has": ("states", lambda s, r: s.sequences["blocks"].__setitem__(r, 1 << 20)),
    "a block that is none": ("chain", lambda s, r: s.table[r].__setitem__(4, 1 << 28)),
    "other tokens": ("chain", lambda s, r: s.row_tokens[r].__setitem__(13, 5)),
    "a state after the end": ("table", lambda s, r: s.table[r].__setitem__(9, 3)),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_verify_sees_what_a_row_may_not_be(name: str) -> None:
    check, corrupt = CORRUPTIONS[name]
    engine = open_groups([{"kind": "recurrent", "snapshot_tokens": 8, "device_blocks": 12}])
    sequence = engine.commit(engine.add(A[:22]), 9)
    state, row = engine.states()[0], sequence.id & 0xFFFFFFFF
    assert [i for i, block in enumerate(engine.table(sequence)) if block >= 0] == [3, 4, 5]
    saved = state.table.copy(), state.sequences.copy(), state.row_tokens.copy()
    corrupt(state, row)
    with pytest.raises(IntegrityError) as raised:
        verify(state, np.empty(0, np.int64))
    assert raised.value.check == check
    state.table[:], state.sequences[:], state.row_tokens[:] = saved
    engine.cache.verify()
    engine.cache.close()


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda s, r: s.sequences["length"].__setitem__(r, 5),
        lambda s, r: s.sequences["generation"].__setitem__(r, 5),
        lambda s, r: s.sequences["live"].__setitem__(r, 0),
        lambda s, r: s.header.__setitem__("free_rows", 3),
        lambda s, r: s.rows.__setitem__(0, 200),
    ],
)
def test_verify_sees_that_groups_disagree(corrupt: Callable[[Any, int], object]) -> None:
    engine = open_groups([{"device_blocks": 4}, {"kind": "recurrent", "device_blocks": 4}])
    sequence = engine.add(A[:6])
    state, row = engine.states()[1], sequence.id & 0xFFFFFFFF
    assert not together(engine.cache.core.states)
    saved = state.sequences.copy(), state.groups.copy(), state.rows.copy()
    corrupt(state, row)
    assert [check for check, _ in together(engine.cache.core.states)] == ["groups"]
    with pytest.raises(IntegrityError):
        engine.cache.verify()
    state.sequences[:], state.groups[:], state.rows[:] = saved
    engine.cache.verify()
    engine.cache.close()


def test_a_stream_that_a_call_names_is_that_of_all_groups() -> None:
    sim = SimDevice(0)
    engine = open_groups(
        [{"kind": kind, "device_blocks": 9} for kind in ("attention", "recurrent", "cross")], device=sim
    )
    a, b = sim.create_stream("a"), sim.create_stream("b")
    ids = engine.cache.add_sequence_batch([A[:6], A[6:12]], encoder_tokens=[3, 5], stream=a).ids
    engine.cache.append_tokens(ids, [1, 2, 3, 4], [2, 2], stream=b)
    engine.cache.verify()
    engine.cache.accept_drafts(ids, [2, 2], [0, 1, 1], [2, 1], stream=a)
    engine.cache.verify()
    engine.cache.commit(ids, [7, 7], stream=b)
    engine.cache.verify()
    engine.cache.rewind(ids, [1, 0], stream=a)
    engine.cache.verify()
    engine.cache.reorder(ids, [1, 0], stream=b)
    engine.cache.verify()
    engine.cache.release(ids)
    sim.synchronize()
    engine.cache.close()
