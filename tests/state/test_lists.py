"""The lists of blocks and the heap of expiries refuse a change that does not fit the block, before they write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.state import policy
from kvpool.state.arrays import GroupSizes, Settings, State, States
from kvpool.state.verify import findings
from tests.debug import dump


@pytest.fixture
def state() -> State:
    """Four device and two host blocks, all in the lists of empty ones but for block 1, which has been taken out."""
    states = States([GroupSizes(4, 2)], Settings(4, 2, 4, bytes(16)))
    policy.unlink(records(states[0]), states[0].lists, 1)
    return states[0]


def records(state: State) -> Any:
    """The blocks as jitted code and the interpreter take them."""
    return state.blocks.view(np.recarray)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: policy.unlink(records(s), s.lists, 1),
        lambda s: policy.relink(records(s), s.lists, 0),
        lambda s: policy.push(records(s), s.lists, 0, 35, policy.BACK),
        lambda s: policy.push(records(s), s.lists, 5, 35, policy.FRONT),
        lambda s: (policy.heap_push(records(s), s.heap, 2, 7), policy.heap_push(records(s), s.heap, 2, 8)),
    ],
    ids=["unlink", "relink", "push_back", "push_front", "heap_push"],
)
def test_what_does_not_fit_raises(state: State, change: Callable[[State], object]) -> None:
    before = state.lists.copy()
    with pytest.raises(RuntimeError, match="a block was"):
        change(state)
    assert np.array_equal(state.lists, before)


def test_unlinked_blocks_come_back_where_they_were(state: State) -> None:
    policy.relink(records(state), state.lists, 1)
    before = dump(state)
    for b in (0, 2, 1, 4):
        policy.unlink(records(state), state.lists, b)
    for b in (4, 1, 2, 0):
        policy.relink(records(state), state.lists, b)
    assert dump(state) == before and not findings(state, np.empty(0, np.int64))
