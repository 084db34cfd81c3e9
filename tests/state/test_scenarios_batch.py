"""Batched admission: every match is claimed before anything is taken; and the events that a pool tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine import Engine, EventReplay

Make = Callable[..., Engine]


# -- events ------------------------------------------------------------------------------------


def kinds(events: Sequence[Any]) -> list[str]:
    return [event.kind for event in events]


def test_the_first_poll_tells_the_capacities(make: Make) -> None:
    engine = make(P=8, S=4, event_capacity=16)
    (created,) = engine.cache.events()
    assert (created.kind, created.device_blocks, created.host_blocks) == ("created", 8, 4)
    assert not engine.cache.events()


def test_a_full_buffer_keeps_the_newest_and_counts_the_loss(make: Make) -> None:
    engine = make(P=16, event_capacity=1)
    engine.seed(range(5), committed=4)
    engine.seed(range(10, 15), committed=4)
    (event,) = engine.cache.events()
    assert [key.tobytes() for key in event.keys] == engine.keys(range(10, 14))
    assert engine.cache.stats().events_dropped == event.number > 0


def test_reset_is_one_event(make: Make) -> None:
    engine = make(event_capacity=16)
    engine.seed(range(9))
    engine.cache.events()
    engine.cache.reset()
    assert kinds(engine.cache.events()) == ["cleared"]


def test_a_forced_reset_is_one_event_too(make: Make) -> None:
    engine = make(event_capacity=16)
    engine.commit(engine.add(range(9)))
    engine.cache.events()
    engine.live.clear()
    before = engine.cache.stats().forgotten_device_blocks
    engine.cache.reset(force=True)
    assert kinds(engine.cache.events()) == ["cleared"]
    assert engine.cache.stats().forgotten_device_blocks == before, "nothing was evicted"
    assert engine.order() == list(range(8))


def test_events_rebuild_the_cached_keys(make: Make) -> None:
    engine = make(P=6, S=3, event_capacity=256)
    replay = EventReplay()
    for start in (0, 20, 0, 40, 20, 60, 0):
        engine.seed(range(start, start + 13), committed=13)
        engine.cache.offload(list(range(start, start + 13)))
        replay.feed(engine.cache.events())
        for tier in ("device", "host"):
            assert replay.cached[tier] == set(engine.cached(tier))
