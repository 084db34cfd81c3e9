"""What is evicted next: eviction order, priorities, retention ranges and their time to live."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import Engine

Make = Callable[..., Engine]


def seed(engine: Engine, first: int = 0, priority: int | None = None, ttl_ms: int | None = None) -> None:
    """Cache one full block of tokens first..first+3, of a priority for some time."""
    retention = None if priority is None else [(0, None, priority, ttl_ms)]
    engine.seed(range(first, first + 4), committed=4, retention=retention)


def assert_expires(engine: Engine, ms: int, tier: str = "device") -> None:
    """The one block of a tier has its priority until then."""
    (block,) = engine.cached(tier).values()
    priority = engine.cache.core.tokens.blocks["priority"]
    assert engine.cache.content.refresh(ms - 1) == 0 and priority[block] == 80
    assert engine.cache.content.refresh(ms) == 1 and priority[block] == 35
    assert engine.cache.content.refresh(ms + 200) == 0


def test_rewound_blocks_go_to_the_front_and_released_ones_to_the_back(make: Make) -> None:
    engine = make()
    sequence = engine.add(range(8))
    first, second = engine.table(sequence)
    engine.rewind(sequence, 4)
    assert engine.order()[0] == second
    engine.release(sequence)
    assert engine.order()[-1] == first


def test_empty_blocks_are_taken_before_content_and_never_offloaded(make: Make) -> None:
    engine = make(P=4, S=4)
    engine.seed(range(5), retention=[(0, 4, 5, None)])
    for token in range(3):
        engine.add([100 + token])
    assert len(engine.cached()) == 1 and engine.cache.stats().offloaded_blocks == 0
    engine.add([200])
    assert not engine.cached() and not engine.cached("host"), "priority 5 is below the offload threshold"


def test_low_priority_content_goes_first(make: Make) -> None:
    """Before what was used earlier."""
    engine = make(P=2)
    seed(engine, 10)
    seed(engine, 0, 5)
    engine.add([99])
    assert engine.reusable(range(5)) == 0 and engine.reusable(range(10, 15)) == 4


def test_a_block_of_the_lowest_priority_is_found_again(make: Make) -> None:
    """Though the search for victims had come to a higher one."""
    engine = make(P=1)
    seed(engine, 0, 90)
    engine.release(engine.add([99]), store=False)
    seed(engine, 10, 5)
    engine.add([99])
    assert not engine.cached()


def test_an_unfull_end_ages_like_other_content(make: Make) -> None:
    engine = make(P=2)
    seed(engine, 10)
    engine.seed(range(3), committed=3)
    engine.add([99])
    assert engine.reusable(range(10, 15)) == 0 and engine.reusable(range(4)) == 3


def test_a_ttl_ends_in_the_default_list(make: Make) -> None:
    engine = make(P=2)
    seed(engine, 0, 80, 2)
    assert_expires(engine, 2)


def test_a_pinned_block_does_not_expire(make: Make) -> None:
    """Its time begins when nobody holds it."""
    engine = make(P=2)
    seed(engine, 0, 80, 3)
    with engine.cache.pin(engine.prompt(range(4)).keys):
        assert engine.cache.content.refresh(10) == 0
        engine.clock.now = 10
    assert_expires(engine, 13)


def evict(engine: Engine) -> None:
    """Have the only prompt on the host alone."""
    engine.release(engine.add(range(100, 100 + 4 * engine.free())), store=False)
    assert not engine.cached()


COPIED = pytest.mark.parametrize(
    "copied_before", [True, False], ids=["a host copy was there", "offloaded as it was evicted"]
)


def seed_both(engine: Engine, copied_before: bool) -> None:
    seed(engine, 0, 80, 10)
    if copied_before:
        engine.cache.content.offload(range(4))


@COPIED
def test_a_ttl_goes_on_on_the_host_where_it_was(make: Make, copied_before: bool) -> None:
    engine = make(P=2, S=2)
    seed_both(engine, copied_before)
    engine.clock.now = 6
    evict(engine)
    assert_expires(engine, 10, "host")


@COPIED
def test_a_ttl_comes_back_from_the_host(make: Make, copied_before: bool) -> None:
    engine = make(P=2, S=2)
    seed_both(engine, copied_before)
    evict(engine)
    engine.cache.content.prefetch(range(4))
    assert_expires(engine, 10)


def test_a_redundant_copy_does_not_expire(make: Make) -> None:
    engine = make(P=2, S=2)
    seed_both(engine, copied_before=True)
    assert_expires(engine, 10)


def test_a_copy_that_becomes_the_only_one_has_the_retention_of_today(make: Make) -> None:
    """A hit has given the device block another priority and ttl since the copy was made."""
    engine = make(P=2, S=2)
    seed(engine)
    engine.cache.content.offload(range(4))
    engine.release(engine.add(range(5), retention=[(0, None, 80, 10)]), store=False)
    evict(engine)
    assert_expires(engine, 10, "host")


def test_the_source_of_a_partial_copy_leaves_the_expiries_while_it_is_held(make: Make) -> None:
    """Else it would be dropped to the default list in the middle of the admission, and be in two lists after."""
    engine = make(P=4)
    engine.seed(range(6), committed=6, retention=[(0, None, 80, 3)])
    engine.clock.now = 5
    sequence = engine.add([*range(5), 50, 51])
    assert sequence.cached == 5
    engine.release(sequence)
    assert sorted(engine.order()) == [0, 1, 2, 3]


def test_a_ttl_on_the_default_priority_never_expires(make: Make) -> None:
    engine = make(P=2)
    seed(engine, 0, 35, 3)
    assert engine.cache.content.refresh(100) == 0


def test_a_plain_hit_keeps_priority_and_ttl(make: Make) -> None:
    engine = make(P=4)
    seed(engine, 0, 80, 3)
    engine.clock.now = 2
    sequence = engine.add(range(5))
    assert engine.priorities(sequence) == [80, 35]
    engine.release(sequence)
    assert_expires(engine, 5)


def test_an_expired_priority_loses_to_one_that_lasts(make: Make) -> None:
    engine = make()
    engine.seed(range(12), retention=[(0, None, 80, 10)])
    engine.seed(range(20, 32), retention=[(0, None, 50, None)])
    engine.clock.now = 50
    engine.cache.content.refresh()
    engine.seed(range(40, 52))
    assert engine.add(range(20, 32)).cached == 11


# ----------------------------------------
# Batched admission: every match is claimed before anything is taken; and the events of a pool.


# -- events ------------------------------------------------------------------------------------


def test_a_forced_reset_is_one_event_too(make: Make) -> None:
    engine = make(event_capacity=16)
    engine.commit(engine.add(range(9)))
    created, *_ = engine.cache.events()
    assert (created.kind, created.device_blocks, created.host_blocks) == ("created", 8, 0)
    engine.live.clear()
    before = engine.cache.stats().forgotten_device_blocks
    engine.cache.clear(force=True)
    assert [event.kind for event in engine.cache.events()] == ["cleared"]
    assert engine.cache.stats().forgotten_device_blocks == before, "nothing was evicted"
    assert engine.order() == list(range(8))
