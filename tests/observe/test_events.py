"""Events name what they are about, and a snapshot of them is what is cached, parents first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from engine import Engine, EventReplay, Make
from kvpool.pool import Event
from kvpool.pool.core import Names


def rebuilt(events: Iterable[Event]) -> dict[str, set[bytes]]:
    replay = EventReplay()
    replay.feed(events)
    return replay.cached


def cached(engine: Engine) -> dict[str, set[bytes]]:
    return {tier: set(engine.cached(tier)) for tier in ("device", "host")}


def test_every_prompt_and_every_call_begins_an_event_of_its_own(make: Make) -> None:
    engine = make(event_capacity=100)
    first, second = engine.add(range(4)), engine.add(range(20, 24))
    engine.cache.commit([first.id, second.id])
    engine.append(second, range(24, 32))
    engine.cache.commit([first.id, second.id])
    stored = [event for event in engine.cache.events() if event.kind == "stored"]
    assert [[key.tobytes() for key in event.keys] for event in stored] == [
        engine.keys(range(4)),
        engine.keys(range(20, 24)),
        engine.keys(range(20, 32))[1:],
    ]
    assert [None if event.parent is None else event.parent.tobytes() for event in stored] == [
        None,
        None,
        engine.keys(range(20, 24))[0],
    ]


def test_no_event_is_of_two_tiers(make: Make) -> None:
    """A block is offloaded right after its parent has come to the device: the parent's event says "device", and the
    block's "host"."""
    engine = make(P=2, S=4, event_capacity=100)
    engine.seed(range(8), committed=8)
    with engine.cache.pin(engine.prompt(range(8)).keys[1:], tier="device"):
        engine.release(engine.add([100]), store=False)
    replay = EventReplay()
    replay.feed(engine.cache.events())
    assert set(engine.cached("host")) == {engine.keys(range(4))[0]}
    engine.add([*range(4), 50])
    events = engine.cache.events()
    assert [(event.kind, event.tier) for event in events] == [
        ("stored", "device"),
        ("stored", "host"),
        ("removed", "device"),
    ]
    replay.feed(events)
    assert replay.cached == cached(engine)


def test_a_copy_that_becomes_the_only_one_says_the_priority_that_it_takes(make: Make) -> None:
    engine = make(P=2, S=2, event_capacity=100)
    engine.seed(range(4), committed=4)
    engine.cache.content.offload(list(range(4)))
    engine.release(engine.add(range(5), retention=[(0, None, 80, None)]), store=False)
    engine.cache.events()
    engine.add(range(100, 108))
    updated = [(event.kind, event.tier, event.priority) for event in engine.cache.events() if event.kind == "updated"]
    assert updated == [("updated", "host", 80)]


def test_a_pool_without_events_has_no_snapshot(make: Make) -> None:
    engine = make()
    assert not engine.cache.events()
    with pytest.raises(ValueError, match="event_capacity"):
        engine.cache.events(snapshot=True)
    with pytest.raises(TypeError, match="snapshot: .*1"):
        engine.cache.events(snapshot=1)


@pytest.mark.parametrize("names", [{}, {"salt": "s", "adapter_id": 3}], ids=str)
@pytest.mark.parametrize("way", ["sequence", "reservation", "import"])
def test_events_name_where_a_prompt_begins_whoever_brings_it(make: Make, way: str, names: dict[str, Any]) -> None:
    cache = make(P=8, S=8, event_capacity=64).cache
    cache.events()
    prompt = cache.block_keys(list(range(9)), **names)
    if way == "sequence":
        sequence = cache.add_sequence(prompt)
        cache.commit(sequence)
        cache.release(sequence)
    elif way == "reservation":
        cache.imports.reserve(prompt).commit()
    else:
        cache.imports.import_blocks(prompt, [bytes(cache.layout.block_bytes)] * 2)
    events = cache.events(snapshot=True)
    stored = [event for event in events if event.kind == "stored"]
    assert len(stored) == 2, "once when it was stored, once in the snapshot"
    for event in stored:
        assert event.parent is None and (event.salt, event.adapter_id) == (names.get("salt"), names.get("adapter_id"))


def test_names_of_what_is_gone_are_forgotten_and_others_kept(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Names, "LEAST", 4)
    engine = make(P=8, event_capacity=4)
    engine.seed(range(5), committed=4, adapter_id="kept")
    for adapter in range(50):
        engine.seed(range(5), committed=4, adapter_id=adapter)
        engine.seed(range(5), committed=4, adapter_id="kept")
        assert {event.adapter_id for event in engine.cache.events() if event.kind == "stored"} <= {"kept", adapter}
    assert len(engine.cache.core.names.known) < 30
    snapshot = engine.cache.events(snapshot=True)
    assert "kept" in {event.adapter_id for event in snapshot} and None not in {
        e.adapter_id for e in snapshot if e.kind == "stored"
    }


# -- readers with cursors ------------------------------------------------------------------------------


def test_readers_with_cursors_each_get_everything_and_take_nothing_from_others(make: Make) -> None:
    engine = make(P=8, event_capacity=64)
    kept, slow = EventReplay(), EventReplay()
    cursor = 0
    for first in (0, 20, 40, 60):
        engine.seed(range(first, first + 9), committed=8)
        events = engine.cache.events(since=cursor)
        assert events.missed == 0 and events.number == cursor and events.next == events.cursor
        cursor = events.cursor
        kept.feed(events)
    slow.feed(engine.cache.events(since=0))
    assert kept.cached == slow.cached == rebuilt(engine.cache.events()) == cached(engine)
    assert not engine.cache.events() and not engine.cache.events(since=cursor)
    assert events[-1].next == events.next
    with pytest.raises(IndexError, match="event"):
        events[len(events)]
    assert engine.cache.stats().events_dropped == 0


def test_a_cursor_that_comes_late_learns_what_it_has_missed(make: Make) -> None:
    """The pool keeps no more rows for it. What another has read is not counted as dropped."""
    engine = make(P=8, event_capacity=4)
    early = 0
    for first in (0, 20, 40, 60):
        engine.seed(range(first, first + 5), committed=4)
        early = engine.cache.events(since=early).cursor
    late = engine.cache.events(since=1)
    assert late.missed == early - 1 - 4 and len(late.records) == 4 and late.cursor == early
    assert engine.cache.stats().events_dropped == 0
    for first in (80, 100, 120, 140, 160):
        engine.seed(range(first, first + 5), committed=4)
    assert engine.cache.stats().events_dropped == engine.cache.events(since=early).missed > 0


def test_a_snapshot_of_one_reader_is_not_a_gap_for_others(make: Make) -> None:
    """However large it is, compared with what is kept."""
    engine = make(P=16, event_capacity=8)
    engine.seed(range(33), committed=32)
    events = engine.cache.events(since=0, snapshot=True)
    assert rebuilt(events[events.before_snapshot :]) == cached(engine)
    plain, cursor = engine.cache.events(snapshot=True), events.cursor
    engine.seed(range(100, 105), committed=4)
    for _ in range(3):
        engine.cache.events(since=0, snapshot=True)
    new = engine.cache.events(since=cursor)
    assert new.missed == 0 and len(new.records) >= 1
    again = engine.cache.events()
    assert again.number == plain.next and again.records.tobytes() == new.records.tobytes()


@pytest.mark.parametrize(("bad", "error"), [(-1, ValueError), (1 << 40, ValueError), ("0", TypeError)])
def test_a_cursor_that_no_call_has_given_is_refused(make: Make, bad: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="since: .*"):
        make(event_capacity=4).cache.events(since=bad)
