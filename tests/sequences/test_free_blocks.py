"""``free_blocks``: what an admission could take now, from the lists themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine import Engine
from group_engine import GroupsEngine
from kvpool import OutOfBlocks, PoolClosed

Make = Callable[..., Engine]
Open = Callable[..., GroupsEngine]


def test_exactly_as_many_can_be_taken(make: Make) -> None:
    for seed in range(10):
        print("seed", seed)
        random = np.random.default_rng(seed)
        engine = make(T=2, P=12, S=6)
        held = engine.add([200])
        for _ in range(12):
            if random.random() < 0.6 and len(engine.live) < 4:
                try:
                    engine.commit(engine.add(random.integers(0, 3, random.integers(1, 9)).tolist()))
                except OutOfBlocks:
                    pass
            elif len(engine.live) > 1:
                engine.release(next(one for one in engine.live.values() if one is not held))
        free = engine.cache.free_blocks
        with pytest.raises(OutOfBlocks, match=f"{free + 1} blocks needed, {free} free"):
            engine.cache.add_sequence(range(100, 100 + 2 * free + 1))
        if free:
            engine.cache.release(engine.cache.add_sequence(range(100, 100 + 2 * free)))


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
