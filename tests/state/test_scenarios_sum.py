"""Both tiers hold as much as one cache of their sum, also inside a call: evictions go where its onboards came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine import Engine

Make = Callable[..., Engine]


def cached_on_the_host(engine: Engine, tokens: range, committed: int) -> None:
    """Cache a prompt, and let blocks of other prompts push it out of the device."""
    engine.seed(tokens, committed=committed)
    for first in range(1000, 1000 + 100 * engine.cache.device_blocks, 100):
        engine.seed(range(first, first + engine.T), committed=engine.T)


def forgotten(engine: Engine) -> int:
    stats = engine.cache.stats()
    return stats.forgotten_device_blocks + stats.forgotten_host_blocks


def test_evictions_go_where_the_onboards_of_the_same_call_came_from(make: Make) -> None:
    """Six contents fill both tiers. A seventh block is needed, and one content goes."""
    engine = make(T=3, P=4, S=2, partial_reuse=False)
    cached_on_the_host(engine, range(8), 8)
    assert forgotten(engine) == 0
    assert engine.add(range(8)).cached == 6
    assert forgotten(engine) == 1
    assert engine.cache.stats().redundant_dropped == 2
    assert [engine.reusable(range(first, first + 4)) for first in (1000, 1100, 1200, 1300)] == [0, 3, 3, 3]


def test_what_requests_of_a_batch_share_frees_its_host_blocks_too(make: Make) -> None:
    """Each has both onboards, and the second still waits for its blocks while the first evicts."""
    engine = make(T=3, P=4, S=2, partial_reuse=False)
    cached_on_the_host(engine, range(8), 8)
    one, two = engine.add_batch([range(8), [*range(6), 90]])
    assert engine.cache.stats().onboarded_blocks == 2 and engine.table(one)[:2] == engine.table(two)[:2]
    assert forgotten(engine) == 2
    assert engine.cache.stats().redundant_dropped == 2


def test_a_part_of_what_another_request_onboards_is_copied_from_its_device_block(make: Make) -> None:
    engine = make(T=3, P=6, S=2)
    cached_on_the_host(engine, range(8), 6)
    parts = engine.add_batch([[0, 1, 2, 3, 70], range(7), [0, 1, 2, 3, 4, 80]])
    assert [one.cached for one in parts] == [4, 6, 5]
    assert engine.cache.stats().onboarded_blocks == 2 and engine.free("host") == 2


def test_a_part_of_what_another_request_onboards_frees_its_host_block(make: Make) -> None:
    """The part was copied before the other request needs a block."""
    engine = make(T=3, P=5, S=2)
    cached_on_the_host(engine, range(6), 6)
    before = forgotten(engine)
    first, second = engine.add_batch([[0, 1, 2, 3, 70], [0, 1, 2, 3, 4, 5, 80]])
    assert (first.cached, second.cached) == (4, 6)
    assert (engine.cache.stats().redundant_dropped, forgotten(engine) - before) == (2, 2)


def test_a_pinned_host_block_is_not_reused_by_the_call_that_onboards_it(make: Make) -> None:
    engine = make(T=3, P=4, S=2, partial_reuse=False)
    cached_on_the_host(engine, range(8), 8)
    with engine.cache.pin(engine.prompt(range(3)).keys, tier="host") as lease:
        before = engine.cache.host_pool[int(lease.blocks[0]) - 4].copy()
        assert engine.add(range(8)).cached == 6
        np.testing.assert_array_equal(engine.cache.host_pool[int(lease.blocks[0]) - 4], before)
        assert engine.cache.stats().redundant_dropped == 1 and forgotten(engine) == 2


def test_prefetch_evicts_into_the_host_blocks_that_it_has_read(make: Make) -> None:
    """One goes: the first onboard has no free block on either tier."""
    engine = make(T=3, P=4, S=2, partial_reuse=False)
    cached_on_the_host(engine, range(8), 8)
    assert engine.cache.prefetch(range(8)) == 2
    assert forgotten(engine) == 1 and engine.reusable(range(8)) == 6


def test_what_goes_in_any_case_goes_first(make: Make) -> None:
    """Evictions go where forgotten content was, and few wait for an onboard that comes before them: a short chain."""
    engine = make(T=3, P=8, S=8, partial_reuse=False)
    for first in range(0, 800, 100):
        engine.seed(range(first, first + 3), committed=3)
    cached_on_the_host(engine, range(2000, 2012), 12)
    cut, depths = engine.cache.core.transfer._levels.cut, []

    def counted(moves: Any) -> Any:
        found = list(cut(moves))
        depths.append(len(found))
        return iter(found)

    engine.cache.core.transfer._levels.cut = counted  # type: ignore[method-assign]
    assert engine.add([*range(2000, 2012), *range(90, 102)]).cached == 12
    assert depths == [3] and forgotten(engine) == 8
