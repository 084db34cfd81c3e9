"""verify() over groups: what a row of a recurrent group may not be, that groups agree about their sequences, and that
the group that is wrong is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from group_engine import open_groups
from grouped import pool_of, seed
from kvpool.device.sim import SimDevice
from kvpool.errors import IntegrityError
from kvpool.state.records import EMPTY
from kvpool.state.verify import together, verify_states

A = list(range(100, 148))
Corrupt = Callable[[Any, int], object]


def _hold(state: Any, row: int, column: int, target: int) -> None:
    state.table[row, target], state.table[row, column] = state.table[row, column], -1


def put(name: str, value: int) -> Corrupt:
    """Overwrite a field of the row."""
    return lambda state, row: state.sequences[name].__setitem__(row, value)


CORRUPTIONS: dict[str, tuple[str, Corrupt]] = {
    "no running state": ("states", lambda s, r: _hold(s, r, 5, 4)),
    "a passed state": ("states", lambda s, r: _hold(s, r, 4, 1)),
    "a snapshot that is gone": ("states", lambda s, r: _hold(s, r, 3, 4)),
    "another key": ("chain", put("chain0", 5)),
    "no tokens but committed ones": ("chain", put("length", 0)),
    "more tokens than a row has": ("chain", put("length", 1 << 30)),
    "more blocks than a row has": ("states", put("blocks", 1 << 20)),
    "a block that is none": ("chain", lambda s, r: s.table[r].__setitem__(4, 1 << 28)),
    "other tokens": ("chain", lambda s, r: s.row_tokens[r].__setitem__(13, 5)),
    "a state after the end": ("table", lambda s, r: s.table[r].__setitem__(9, 3)),
}


@contextmanager
def corrupted(engine: Any, state: Any, sequence: Any, corrupt: Corrupt) -> Iterator[None]:
    """A state that is wrong, and right again at the end."""
    arrays = state.table, state.sequences, state.row_tokens, state.groups, state.rows
    saved = [array.copy() for array in arrays]
    corrupt(state, sequence.id & 0xFFFFFFFF)
    yield
    for array, content in zip(arrays, saved, strict=True):
        array[:] = content
    engine.cache.verify()
    engine.cache.close()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_verify_sees_what_a_row_may_not_be(name: str) -> None:
    check, corrupt = CORRUPTIONS[name]
    engine = open_groups([{"kind": "recurrent", "snapshot_tokens": 8, "device_blocks": 12}])
    sequence = engine.commit(engine.add(A[:22]), 9)
    state = engine.states()[0]
    assert [i for i, block in enumerate(engine.table(sequence)) if block >= 0] == [3, 4, 5]
    with corrupted(engine, state, sequence, corrupt), pytest.raises(IntegrityError) as raised:
        verify_states(engine.cache.core.states, np.empty(0, np.int64))
    assert raised.value.check == check


@pytest.mark.parametrize(
    "corrupt",
    [
        put("length", 5),
        put("generation", 5),
        put("live", 0),
        lambda s, r: s.header.__setitem__("free_rows", 3),
        lambda s, r: s.rows.__setitem__(0, 200),
    ],
)
def test_verify_sees_that_groups_disagree(corrupt: Corrupt) -> None:
    engine = open_groups([{"device_blocks": 4}, {"kind": "recurrent", "device_blocks": 4}])
    sequence = engine.add(A[:6])
    assert not together(engine.cache.core.states)
    with corrupted(engine, engine.states()[1], sequence, corrupt):
        assert [check for check, _ in together(engine.cache.core.states)] == ["groups"]
        with pytest.raises(IntegrityError):
            engine.cache.verify()


@pytest.mark.parametrize("group", [0, 1, 2])
def test_verify_checks_every_group_and_names_the_one_that_is_wrong(group: int) -> None:
    with pool_of("full window full") as cache:
        seed(cache, range(9))
        with cache.pin(cache.block_keys(range(9)).keys):
            state = cache.core.states[group]
            held = state.blocks["ref_word"].nonzero()[0][0]
            for check, array, place, wrong in (
                ("list links", state.lists, (EMPTY, 2), 1),
                ("pins", state.blocks["ref_word"], held, 1 << 32),
            ):
                array[place] += wrong
                with pytest.raises(IntegrityError, match=f"^{check}: group {group}: ") as caught:
                    cache.verify()
                assert caught.value.check == check
                array[place] -= wrong


def test_a_stream_that_a_call_names_is_that_of_all_groups() -> None:
    sim = SimDevice(0)
    kinds = ("attention", "recurrent", "cross")
    engine = open_groups([{"kind": kind, "device_blocks": 9} for kind in kinds], device=sim)
    cache, a, b = engine.cache, sim.create_stream("a"), sim.create_stream("b")
    ids = cache.add_sequence_batch([A[:6], A[6:12]], encoder_tokens=[3, 5], stream=a).ids
    for call in (
        lambda: cache.append_tokens(ids, [1, 2, 3, 4], [2, 2], stream=b),
        lambda: cache.accept_drafts(ids, [2, 2], [0, 1, 1], [2, 1], stream=a),
        lambda: cache.commit(ids, [7, 7], stream=b),
        lambda: cache.rewind(ids, [1, 0], stream=a),
        lambda: cache.reorder(ids, [1, 0], stream=b),
    ):
        call()
        cache.verify()
    cache.release(ids)
    sim.synchronize()
    cache.close()
