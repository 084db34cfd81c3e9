"""Both tiers hold as much as one cache of their sum, also inside a call: evictions go where its onboards came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def test_a_part_of_what_another_request_onboards_frees_its_host_block(make: Make) -> None:
    """The part was copied before the other request needs a block."""
    engine = make(T=3, P=5, S=2)
    cached_on_the_host(engine, range(6), 6)
    before = forgotten(engine)
    first, second = engine.add_batch([[0, 1, 2, 3, 70], [0, 1, 2, 3, 4, 5, 80]])
    assert (first.cached, second.cached) == (4, 6)
    assert (engine.cache.stats().redundant_dropped, forgotten(engine) - before) == (2, 2)


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
