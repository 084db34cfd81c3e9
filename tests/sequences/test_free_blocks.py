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


def test_free_blocks_are_those_that_nobody_holds(make: Make) -> None:
    engine = make(T=4, P=8, S=4)
    cache = engine.cache
    assert cache.free_blocks == 8 and type(cache.free_blocks) is int
    one = engine.add(range(10))
    assert cache.free_blocks == 5
    engine.append(one, [1, 2, 3])
    assert cache.free_blocks == 4
    engine.commit(one)
    fork = cache.fork(one.id)
    assert cache.free_blocks == 4
    cache.release(fork)
    with cache.pin_blocks(engine.table(one)[:1]):
        engine.release(one)
        assert cache.free_blocks == 7 == engine.free()
    assert cache.free_blocks == 8
    with cache.reserve(range(50, 59)):
        assert cache.free_blocks == 5
    assert cache.free_blocks == 8


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
