"""A reservation of a host cache has a deadline: what is not published by then is a miss, and hits nobody later."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import Clock
from kvpool import OutOfBlocks
from kvpool.errors import PoolBusy, ReservationExpired
from tests.hostcache.conftest import ABSENT, HERE, PENDING, Make, keys, look, store


@pytest.mark.parametrize("check", ["find", "lookup", "reserve", "stats", "overdue", "expired_reservations"])
def test_a_reservation_expires_at_its_deadline_whoever_calls_next(make: Make, check: str) -> None:
    clock = Clock()
    cache = make(3, clock=clock)
    cache.reserve(keys("a"), deadline_seconds=0.1)
    calls: dict[str, Callable[[], object]] = {
        "find": lambda: cache.find(b"c"),
        "lookup": lambda: cache.lookup([b"c"]),
        "reserve": lambda: cache.reserve(keys("c")),
        "stats": cache.stats,
        "overdue": cache.overdue,
        "expired_reservations": lambda: cache.expired_reservations,
    }
    for now, state in ((99, PENDING), (100, ABSENT)):
        clock.now = now
        calls[check]()
        clock.now = 99  # so that no later call can expire it
        assert look(cache, "a") == [state]


def test_a_block_that_may_be_written_late_is_nobodys_until_its_writer_ends(make: Make) -> None:
    clock = Clock()
    cache = make(2, clock=clock)
    late = cache.reserve(keys("a"), deadline_seconds=0.01).blocks[0]
    clock.now = 10
    assert cache.expired_reservations == 1
    assert cache.reserve(keys("a")).keys == (), "two writers would have one key"
    assert cache.reserve(keys("b")).blocks[0] != late
    with pytest.raises(OutOfBlocks):
        cache.reserve(keys("c"))
    with pytest.raises(PoolBusy):
        cache.clear()
    with pytest.raises(ReservationExpired, match=b"a".hex()):
        cache.publish(keys("a"))
    assert look(cache, "a") == [ABSENT]
    assert cache.abort(keys("a")) == 1
    assert cache.overdue() == []
    assert cache.reserve(keys("c")).blocks[0] == late
    assert (cache.stats().expired_reservations, cache.stats().overdue) == (1, 0)


def test_a_late_publish_is_refused_even_where_nobody_looked_and_changes_no_other_key(make: Make) -> None:
    clock = Clock()
    cache = make(4, clock=clock, event_capacity=8)
    cache.events()
    cache.reserve(keys("a"), deadline_seconds=0.01)
    cache.reserve(keys("b"), deadline_seconds=0.011)
    clock.now = 10
    with pytest.raises(ReservationExpired):
        cache.publish(keys("b", "a"))
    assert look(cache, "a", "b") == [ABSENT, PENDING]
    assert cache.publish(keys("b")) == 1
    cache.abort(keys("a"))
    assert [(event.kind, event.keys) for event in cache.events()] == [("stored", (b"b",))]
    assert store(cache, "a"), "a new writer may come"
    assert look(cache, "a", "b") == [HERE, HERE]


@pytest.mark.parametrize("verb", ["publish", "abort"])
def test_the_deadline_of_a_reservation_ends_with_it(make: Make, verb: str) -> None:
    clock = Clock()
    cache = make(2, clock=clock)
    cache.reserve(keys("a"), deadline_seconds=0.01)
    getattr(cache, verb)(keys("a"))
    cache.forget(keys("a"))
    cache.reserve(keys("a"))  # without a deadline
    clock.now = 1000
    assert look(cache, "a") == [PENDING]
    assert (cache.publish(keys("a")), cache.stats().expired_reservations) == (1, 0)
