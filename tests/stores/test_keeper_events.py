"""Readers of a keeper's events, its metrics and its matches see what the stores have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from prometheus_client import CollectorRegistry, generate_latest

from kvpool.integrations.kv_events import KVEventPublisher
from kvpool.integrations.metrics import PoolMetrics
from kvpool.pool.core import Names
from kvpool.storage import StorageManager
from tests.engine import Engine, EventReplay
from tests.stores.keeping import engine, fetch, keeper, seed, store, tokens
from tests.stores.lab import Wrong
from tests.waiting import until

PROMPT = tokens(41)


@pytest.fixture
def one() -> Iterator[Engine]:
    made = engine(P=24, S=24)
    with made.cache:
        yield made


class Reader(EventReplay):
    """What a router knows, of the tiers of the pool and of a store."""

    def __init__(self, name: str = "memory") -> None:
        super().__init__({"device": set(), "host": set(), name: set()})


def keys(of: Engine, prompt: list[int]) -> set[bytes]:
    return set(of.keys(prompt))


# -- events --------------------------------------------------------------------------------------------


def test_a_reader_knows_what_each_tier_and_each_store_has(one: Engine) -> None:
    with keeper(one, store()) as kept:
        reader, names = Reader(), set()
        for first in (0, 1000, 2000, 0, 3000):
            seed(one, kept, [tokens(41, first)])
            names |= keys(one, tokens(41, first))
            events = kept.events()
            assert events.tiers == ("device", "host", "memory")
            reader.feed(events)
            assert reader.cached["device"] == set(one.cached("device"))
            assert reader.cached["host"] == set(one.cached("host"))
            assert reader.cached["memory"] == names


def test_a_late_reader_gets_everything_by_a_snapshot(one: Engine) -> None:
    with keeper(one, store()) as kept:
        seed(one, kept, [PROMPT, tokens(41, 1000)], salt="tenant")
        extra = [5] * 41
        seed(one, kept, [tokens(41, 2000)], extra_ids=extra)
        late = Reader()
        events = kept.events(snapshot=True)
        late.feed(events[events.before_snapshot :])
        assert late.cached["device"] == set(one.cached("device"))
        assert len(late.cached["memory"]) == 30
        told = [event for event in events[events.before_snapshot :] if event.tier == "memory"]
        assert {event.salt for event in told} == {"tenant", None}
        assert sum(len(event.keys) for event in told if event.extra_ids is not None) == 10
        for event in told:
            place = 0 if event.parent is None else -1
            assert place or np.array_equal(event.tokens[0], event.tokens[0][0] + np.arange(4))
        seed(one, kept, [tokens(41, 3000)])
        late.feed(kept.events())
        assert len(late.cached["memory"]) == 40


def test_what_a_store_has_lost_is_told(one: Engine) -> None:
    memory = Wrong(store())
    with keeper(one, memory) as kept:
        seed(one, kept, [PROMPT])
        one.cache.reset()
        reader = Reader("wrong")
        events = kept.events(snapshot=True)
        reader.feed(events[events.before_snapshot :])
        assert len(reader.cached["wrong"]) == 10
        memory.inner.forget(np.array([np.frombuffer(key, np.uint8) for key in list(memory.inner._blocks)[:3]]))
        fetch(one, kept, PROMPT)
        assert kept.match_prefix(one.prompt(PROMPT)).store_tokens == 0
        seed(one, kept, [PROMPT])
        reader.feed(kept.events())
        assert reader.cached["wrong"] == keys(one, PROMPT)


def test_what_was_loaded_is_still_in_its_store(one: Engine) -> None:
    with keeper(one, store()) as kept:
        seed(one, kept, [PROMPT])
        one.cache.reset()
        assert kept.drain(600) and kept.events()
        assert fetch(one, kept, PROMPT) == 10 and kept.drain(600)
        assert not [event for event in kept.events() if event.tier == "memory"]
        assert kept.stats().saved_blocks == 10, "it is not saved again"
        one.cache.reset()
        assert kept.drain(600) and kept.match_prefix(one.prompt(PROMPT)).store_tokens == 40


def test_a_reader_sees_what_it_has_missed_as_a_gap() -> None:
    made = engine(event_capacity=16)
    with made.cache, keeper(made, store()) as kept:
        for first in range(0, 4000, 1000):
            made.seed(tokens(41, first), 41)
            assert kept.drain(600)
        events = kept.events()
        assert events.number > 0 and kept.stats().events_dropped > 0
        reader, snapshot = Reader(), kept.events(snapshot=True)
        reader.feed(snapshot[snapshot.before_snapshot :])
        assert reader.cached["device"] == set(made.cached("device"))
        assert reader.cached["host"] == set(made.cached("host"))


def test_a_keeper_that_has_missed_events_learns_what_there_is() -> None:
    """Its thread is held while the pool overwrites what it did not read."""
    made = engine(P=64, S=64, event_capacity=8)
    with made.cache, keeper(made, store(), interval_ms=60_000) as kept:
        until(lambda: kept.stats().prefetching == 0)
        for first in range(0, 3000, 1000):
            made.seed(tokens(41, first), 41)
        seed(made, kept, [tokens(41, 5000)])
        assert kept.drain(600)
        assert kept.stats().events_dropped > 0 and kept.stats().saved_blocks == 40
        assert not kept.stats().dropped


def test_what_has_gone_from_the_pool_is_told_with_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the pool has forgotten whose it was."""
    monkeypatch.setattr(Names, "LEAST", 1)
    one = engine(P=8, S=8, event_capacity=16)
    with one.cache, keeper(one, store()) as kept:
        seed(one, kept, [tokens(9, 5000)], salt="tenant")
        one.cache.forget(namespace=("tenant", None))
        for number in range(8):
            seed(one, kept, [tokens(17, 100 * number)], salt=f"other {number}")
        kept.events()
        assert kept.forget(namespace=("tenant", None)).wait(600)
        gone = [event for event in kept.events() if event.kind == "removed" and event.tier == "memory"]
        assert len(gone) == 2 and {event.salt for event in gone} == {"tenant"}


def test_others_follow_the_pool_beside_a_keeper(one: Engine) -> None:
    with keeper(one, store()) as kept:
        plain, cursor = EventReplay(), EventReplay()
        seed(one, kept, [PROMPT, tokens(41, 1000)])
        plain.feed(one.cache.events())
        cursor.feed(one.cache.events(since=0))
        assert plain.cached == cursor.cached == {tier: set(one.cached(tier)) for tier in ("device", "host")}
        assert kept.stats().saved_blocks == 20


def test_a_publisher_names_the_store_as_medium(one: Engine) -> None:
    with keeper(one, store()) as kept, KVEventPublisher(one.cache, keeper=kept, interval_ms=2) as publisher:
        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(publisher.endpoint)
        media: dict[str, int] = {}
        # A subscriber misses what is sent before it has connected.
        for first in range(1000, 100_000, 1000):
            seed(one, kept, [tokens(41, first)])
            publisher.flush()
            while socket.poll(50):
                for event in msgspec.msgpack.decode(socket.recv_multipart()[2])[1]:
                    if event["type"] == "BlockStored":
                        media[event["medium"]] = media.get(event["medium"], 0) + len(event["block_hashes"])
            if "MEMORY" in media:
                break
        socket.close(0)
        context.term()
        assert media["MEMORY"] == 10 and {"GPU", "CPU"} >= set(media) - {"MEMORY"}
        assert publisher.stats().lost_blocks == 0


def test_a_publisher_takes_only_the_keeper_of_its_pool(one: Engine) -> None:
    other = engine()
    with other.cache, keeper(other, store()) as kept:
        for bad in (kept, "keeper"):
            with pytest.raises(ValueError, match="keeper: .*"):
                KVEventPublisher(one.cache, keeper=bad)  # type: ignore[arg-type]


# -- matches -------------------------------------------------------------------------------------------


def test_a_match_tells_of_stores_apart(one: Engine) -> None:
    with keeper(one, store()) as kept:
        seed(one, kept, [PROMPT])
        whole = one.cache.match_prefix(one.prompt(PROMPT))
        assert kept.match_prefix(one.prompt(PROMPT)) == whole and whole.store_tokens == 0
        one.cache.forget(np.array(one.prompt(PROMPT).keys[4:]))
        match = kept.match_prefix(one.prompt(PROMPT))
        assert (match.full_tokens, match.store_tokens) == (16, 24)
        assert one.cache.match_prefix(one.prompt(PROMPT)).store_tokens == 0
        assert fetch(one, kept, PROMPT) == 6
        assert kept.match_prefix(one.prompt(PROMPT))[1:] == (24, 0, 0)
        assert kept.match_prefix(tokens(41, 7)).store_tokens == 0


def test_a_prompt_that_a_store_was_asked_for_is_known_without_loading(one: Engine) -> None:
    memory = store()
    with keeper(one, memory) as kept:
        seed(one, kept, [PROMPT])
    two = engine()
    with two.cache, keeper(two, memory, promotion_blocks=2) as kept:
        assert kept.match_prefix(two.prompt(PROMPT)).store_tokens == 0
        assert fetch(two, kept, PROMPT) == 2
        match = kept.match_prefix(two.prompt(PROMPT))
        assert (match.full_tokens, match.store_tokens) == (8, 32)


# -- metrics -------------------------------------------------------------------------------------------


def scraped(kept: StorageManager, of: Engine) -> dict[str, float]:
    registry = CollectorRegistry()
    with PoolMetrics(registry) as metrics:
        metrics.add("a", of.cache)
        metrics.add("a", kept)
        lines = generate_latest(registry).decode().splitlines()
        metrics.remove("a")
        assert not [line for line in generate_latest(registry).decode().splitlines() if 'pool="a"' in line]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if 'pool="a"' in line}


def test_metrics_of_a_keeper_say_what_happened(one: Engine) -> None:
    memory = store()
    with keeper(one, memory, quotas={("small", None): 0}) as kept:
        seed(one, kept, [PROMPT])
        seed(one, kept, [PROMPT], salt="small")
        one.cache.forget(one.prompt(PROMPT))
        assert fetch(one, kept, PROMPT) == 10
        found = scraped(kept, one)
    expected: dict[str, Any] = {
        'kvpool_store_blocks_total{code="ok",kind="save",pool="a",store="memory"}': 10,
        'kvpool_store_blocks_total{code="ok",kind="load",pool="a",store="memory"}': 10,
        'kvpool_store_blocks_total{code="ok",kind="find",pool="a",store="memory"}': 10,
        'kvpool_store_bytes_total{kind="save",pool="a",store="memory"}': 10 * 4096,
        'kvpool_store_dropped_saves_total{pool="a",reason="quota",store="memory"}': 10,
        'kvpool_store_suspended{kind="read",pool="a",store="memory"}': 0,
        'kvpool_store_suspensions_total{pool="a",store="memory"}': 0,
        'kvpool_store_figure{figure="blocks",pool="a",store="memory"}': 10,
        'kvpool_storage_blocks_total{kind="loaded",pool="a"}': 10,
        'kvpool_storage_prefetches_total{pool="a",reason="loaded"}': 1,
        'kvpool_storage_waiting{kind="promoted",pool="a"}': 10,
        'kvpool_sequences{pool="a"}': 0,
    }
    assert {name: found.get(name) for name in expected} == expected


def test_nothing_that_is_shown_has_a_secret(one: Engine) -> None:
    memory = store()
    with keeper(one, memory) as kept:
        seed(one, kept, [PROMPT])
        text = f"{kept!r} {kept.stats()!r} {kept.prefetch(PROMPT)!r} {scraped(kept, one)!r} {list(kept.events())!r}"
        assert memory.secret.hex() not in text and repr(memory.secret)[2:-1] not in text
