"""Subscribers rebuild exactly what is cached on each tier: through a trace, with messages lost on either side, and
joining late."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from router import Publish, Route, Site, cached

from engine import Engine, Make
from kvpool.integrations.kv_events.replay_server import History, Place


def busy(engine: Engine, count: int, seed: int = 0) -> None:
    """Prompts that share beginnings, through a pool that is too small for them."""
    print(f"seed {seed}")
    random = Random(seed)
    for _ in range(count):
        prompt = [random.randrange(2) for _ in range(random.randrange(1, 6)) for _ in range(4)]
        engine.seed(prompt + [9], committed=len(prompt))


def test_what_is_published_is_enough_to_compute_every_key(site: Site) -> None:
    engine, _, route = site(P=10, S=8, events=512)
    router = route()
    names: list[dict[str, Any]] = [{}, {"salt": "tenant"}, {"adapter_id": "lora"}]
    for i in range(12):
        engine.seed(range(8 * (i % 4), 8 * (i % 4) + 13), committed=12, **names[i % 3])
    router.follow()
    blocks: dict[Any, dict[str, Any]] = {block_hash: block for (_, block_hash), block in router.stored.items()}

    def chain(block: dict[str, Any]) -> list[dict[str, Any]]:
        """The blocks from the beginning of its prompt on, or from a parent on that has gone."""
        above = blocks.get(block["parent"])
        return [*([] if above is None else chain(above)), block]

    media = set()
    for (medium, block_hash), block in router.stored.items():
        whole = chain(block)
        if whole[0]["parent"] is None:
            tokens = [token for each in whole for token in each["tokens"]]
            keys = engine.cache.block_keys(tokens, salt=block.get("cache_salt"), adapter_id=block["lora_name"]).keys
            assert int(keys[-1, 0]) == block_hash
            media.add(medium)
    assert media == {"GPU", "CPU"}


@pytest.mark.parametrize(
    "kept", [{"replay_messages": 1}, {"replay_messages": 3}, {"replay_bytes": 0}, {"replay_bytes": 500}, {}], ids=str
)
def test_a_late_joiner_sees_numbers_without_a_gap_from_a_clear_on(
    make: Make, publish: Publish, route: Route, kept: dict[str, int]
) -> None:
    engine = make(P=10, S=8, event_capacity=512)
    publisher = publish(engine, **kept)
    for round in range(3):
        for i in range(4):
            busy(engine, 3, 10 * round + i)
            publisher.flush()
        late = route(publisher)
        messages = late.replay(0)
        assert late.decode(messages[0][1])[0] == {"type": "AllBlocksCleared"}
        for number, payload in messages:
            late.apply(number, payload)
        assert late.numbers == list(range(late.numbers[0], publisher.stats().messages))
        assert late.known == cached(engine.cache)
        busy(engine, 2, 100 + round)
        late.follow()
        assert late.known == cached(engine.cache)
        assert late.numbers == list(range(late.numbers[0], publisher.stats().messages)), "and goes on without a gap"
    assert bool(publisher.stats().snapshots) == bool(kept)


def test_a_snapshot_serves_until_messages_after_it_are_gone(site: Site) -> None:
    engine, publisher, route = site(P=10, S=8, events=512, replay_messages=4)
    for i in range(6):
        busy(engine, 2, i)
        publisher.flush()
    for router in [route() for _ in range(3)]:
        router.catch_up()
        assert router.known == cached(engine.cache)
    assert publisher.stats().snapshots == 1
    for i in range(6):
        busy(engine, 2, 50 + i)
        publisher.flush()
    route().catch_up()
    assert publisher.stats().snapshots == 2


@pytest.mark.parametrize("extra", [1, 2, 5])
def test_whoever_was_there_before_takes_the_whole_of_a_snapshot(
    site: Site, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.integrations.kv_events.publisher.BLOCKS_PER_MESSAGE", 1)
    engine, publisher, route = site(P=10, S=8, events=512, replay_messages=1)
    busy(engine, 20)
    router = route()
    router.follow()
    sent = publisher.stats().messages
    route().catch_up()
    for seed in range(100, 200):
        if publisher.stats().messages >= sent + extra + 1:
            break
        busy(engine, 1, seed)
        publisher.flush()
    else:
        pytest.fail("nothing more was sent")
    router.catch_up()
    assert router.known == cached(engine.cache)
    late = route()
    late.catch_up()
    assert late.known == cached(engine.cache)


def test_many_events_are_encoded_a_part_at_a_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.integrations.kv_events.messages.BLOCKS_PER_MESSAGE", 6)
    engine, publisher, route = site(P=10, S=8, events=4096)
    hashes, sizes = publisher._encoder._hashes, []

    def noted(keys: Any) -> Any:
        sizes.append(len(keys))
        return hashes(keys)

    publisher._encoder._hashes = noted
    router = route()
    busy(engine, 100)
    router.follow()
    assert router.known == cached(engine.cache)
    assert len(sizes) > 20 and max(sizes) <= 6


def test_events_lost_while_a_snapshot_is_made_are_not_passed_over(site: Site) -> None:
    engine, publisher, route = site(P=10, S=8, events=3, replay_messages=1)
    for seed in range(4):
        busy(engine, 1, seed)
        publisher.flush()
    early = route()
    early.catch_up()
    take = engine.cache.events

    def busy_meanwhile(**options: Any) -> Any:
        events = take(**options)
        if options:
            engine.cache.events = take  # type: ignore[method-assign]
            busy(engine, 3, seed=50)
        return events

    quiet = publisher._publish_new
    publisher._publish_new = lambda: None  # type: ignore[method-assign]
    publisher.flush()
    busy(engine, 3, seed=40)
    for _ in range(2):
        engine.cache.events = busy_meanwhile  # type: ignore[method-assign]
        route().replay(0)
    publisher._publish_new = quiet  # type: ignore[method-assign]
    early.follow()
    assert early.known == cached(engine.cache)


@pytest.mark.parametrize("capacity", [512, 3])
def test_a_snapshot_leaves_nothing_untold_to_the_others(site: Site, capacity: int) -> None:
    engine, publisher, route = site(P=10, S=8, events=capacity, replay_messages=1)
    early = route()
    for seed in range(3):
        busy(engine, 2, seed)
        early.follow()
    made = publisher.stats().snapshots
    for seed in (3, 4):
        busy(engine, 2, seed)
        publisher.flush()
    publish_new = publisher._publish_new
    publisher._publish_new = lambda: None  # type: ignore[method-assign]
    publisher.flush()
    busy(engine, 6, seed=7)
    late = route()
    late.catch_up()
    assert late.known == cached(engine.cache) and publisher.stats().snapshots == made + 1
    publisher._publish_new = publish_new  # type: ignore[method-assign]
    early.follow()
    assert early.known == cached(engine.cache)
    assert capacity == 3 or not publisher.stats().lost_blocks


def test_events_that_were_lost_or_taken_by_somebody_else_start_everybody_afresh(site: Site) -> None:
    engine, publisher, route = site(P=10, S=8, events=3)
    router = route()
    router.follow()
    engine.seed(range(21), committed=20)
    router.follow()
    assert router.known == cached(engine.cache)
    assert publisher.stats().lost_blocks == 2 and publisher.stats().resyncs == 2
    with engine.cache.core.lock:
        engine.seed(range(40, 45), committed=4)
        assert engine.cache.events()
    engine.seed(range(50, 55), committed=4)
    router.follow()
    assert router.known == cached(engine.cache)
    assert publisher.stats().resyncs == 3


def test_every_key_published_for_the_host_can_be_fetched(site: Site) -> None:
    engine, _, route = site(P=10, S=8, events=512, block_hashes="bytes")
    router = route()
    busy(engine, 30)
    router.follow()
    assert router.known["CPU"]
    for key in router.known["CPU"]:
        assert isinstance(key, bytes)
        lease = engine.cache.find_and_pin_host(np.frombuffer(key, np.uint64))
        assert lease is not None
        lease.close()


# ----------------------------------------
# The history returns every number to a reader once, after a snapshot where messages are gone, within its bounds.


def since(history: History, start: int) -> list[tuple[int, bytes]]:
    """Return all messages from a number on, which must be covered."""
    place, messages = Place(start), []
    while (message := history.at(place)) is not None:
        messages.append(message)
        place.next += 1
    return messages


def test_a_history_returns_every_number_once_from_any_start() -> None:
    for limit in (1, 3, 100):
        history = History(limit, 1 << 20)
        for n in range(12):
            history.add(str(n).encode())
            for start in range(15):
                if not history.covers(Place(start)):
                    assert start < history.first
                    history.keep_snapshot([b"a", b"b"][: history.next - start])
                messages = since(history, start)
                numbers = [number for number, _ in messages]
                assert numbers == list(range(numbers[0], n + 1)) if messages else start > n
                assert not messages or numbers[0] >= start, "whoever has seen a number skips it"
                assert not messages or numbers[0] == start or messages[0][1] == b"a"
                assert all(
                    payload == str(number).encode() for number, payload in messages if payload not in (b"a", b"b")
                )


def test_a_reader_in_the_middle_of_a_snapshot_that_has_gone_gets_another_from_its_beginning() -> None:
    for replaced in (False, True):
        history = History(2, 100)
        for n in range(6):
            history.add(str(n).encode())
        place = Place(0)
        history.keep_snapshot([b"a", b"b", b"c"])
        assert history.at(place) == (3, b"a")
        place.next += 1
        if replaced:
            history.keep_snapshot([b"A", b"B", b"C"])
        else:
            for n in range(6, 10):
                history.add(str(n).encode())
        assert not history.covers(place), "its half of the first says nothing together with half of the second"
        history.keep_snapshot([b"x", b"y"])
        messages = []
        while (message := history.at(place)) is not None:
            messages.append(message)
            place.next += 1
        assert messages == [(history.next - 2, b"x"), (history.next - 1, b"y")] and messages[0][0] >= 4
