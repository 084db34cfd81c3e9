"""``free_blocks``: what an admission could take now, from the lists themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine import Engine
from group_engine import GroupsEngine
from kvpool import PoolClosed

Make = Callable[..., Engine]
Open = Callable[..., GroupsEngine]


def test_each_group_has_its_own(open_: Open) -> None:
    engine = open_({}, {"window": 6}, {"kind": "recurrent"}, {"kind": "cross", "device_blocks": 5})
    assert engine.cache.free_blocks.tolist() == [12, 12, 12, 5]
    sequence = engine.add(range(21), encoder_tokens=7)
    engine.commit(sequence)
    found = engine.cache.free_blocks
    assert found.dtype == np.int64 and found.tolist() == engine.free_blocks()
    found[:] = 0
    assert engine.cache.free_blocks.tolist() == engine.free_blocks()


def test_a_pool_that_is_closed_says_so(make: Make) -> None:
    engine = make()
    engine.cache.close()
    with pytest.raises(PoolClosed):
        engine.cache.free_blocks  # noqa: B018
