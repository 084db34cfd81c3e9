"""Readers of a storage manager's events, its metrics and its matches see what the stores have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry, generate_latest

from kvpool.integrations.kv_events import KVEventPublisher
from kvpool.integrations.metrics import PoolMetrics
from kvpool.pool.core import Names
from kvpool.storage import StorageManager
from tests.engine import Engine
from tests.stores.pool_lab import fetch, make_engine, make_manager, seed, seeded, store, tokens
from tests.waiting import until

PROMPT = tokens(41)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine(P=24, S=24)
    with made.cache:
        yield made


# -- events --------------------------------------------------------------------------------------------


def test_what_was_loaded_is_still_in_its_store(engine: Engine) -> None:
    with seeded(engine, PROMPT, store()) as manager:
        engine.cache.clear()
        assert manager.drain(600) and manager.events()
        assert fetch(engine, manager, PROMPT) == 10 and manager.drain(600)
        assert not [event for event in manager.events() if event.tier == "memory"]
        assert manager.stats().saved_blocks == 10, "it is not saved again"
        engine.cache.clear()
        assert manager.drain(600) and manager.match_prefix(engine.prompt(PROMPT)).store_tokens == 40


def test_a_storage_manager_that_has_missed_events_learns_what_there_is() -> None:
    """Its thread is held while the pool overwrites what it did not read."""
    made = make_engine(P=64, S=64, event_capacity=8)
    with made.cache, make_manager(made, store(), interval_seconds=60.0) as manager:
        until(lambda: manager.stats().prefetching == 0)
        for first in range(0, 3000, 1000):
            made.seed(tokens(41, first), 41)
        seed(made, manager, [tokens(41, 5000)])
        assert manager.drain(600)
        assert manager.stats().events_dropped > 0 and manager.stats().saved_blocks == 40
        assert not manager.stats().dropped


def test_what_has_gone_from_the_pool_is_reported_with_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even when the pool no longer has its namespace."""
    monkeypatch.setattr(Names, "LEAST", 1)
    engine = make_engine(P=8, S=8, event_capacity=16)
    with engine.cache, make_manager(engine, store()) as manager:
        seed(engine, manager, [tokens(9, 5000)], salt="tenant")
        engine.cache.content.forget(namespace=("tenant", None))
        for number in range(8):
            seed(engine, manager, [tokens(17, 100 * number)], salt=f"other {number}")
        manager.events()
        assert manager.forget(namespace=("tenant", None)).wait(600)
        gone = [event for event in manager.events() if event.kind == "removed" and event.tier == "memory"]
        assert len(gone) == 2 and {event.salt for event in gone} == {"tenant"}


def test_a_publisher_names_the_store_as_medium(engine: Engine) -> None:
    with (
        make_manager(engine, store()) as manager,
        KVEventPublisher(engine.cache, storage=manager, interval_seconds=0.002) as publisher,
    ):
        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(publisher.endpoint)
        media: dict[str, int] = {}
        # A subscriber misses what is sent before it has connected.
        for first in range(1000, 100_000, 1000):
            seed(engine, manager, [tokens(41, first)])
            publisher.flush()
            while socket.poll(50):
                for event in msgspec.msgpack.decode(socket.recv_multipart()[2])[1]:
                    if event["type"] == "BlockStored":
                        media[event["medium"]] = media.get(event["medium"], 0) + len(event["block_hashes"])
            if "MEMORY" in media:
                break
        with pytest.raises(ValueError, match="storage: .*"):
            KVEventPublisher(engine.cache, storage="storage")  # type: ignore[arg-type]
        socket.close(0)
        context.term()
        assert media["MEMORY"] == 10 and {"GPU", "CPU"} >= set(media) - {"MEMORY"}
        assert publisher.stats().lost_blocks == 0


# -- matches -------------------------------------------------------------------------------------------


# -- metrics -------------------------------------------------------------------------------------------


def scraped(manager: StorageManager, engine: Engine) -> dict[str, float]:
    registry = CollectorRegistry()
    with PoolMetrics(registry) as metrics:
        metrics.add("a", engine.cache)
        metrics.add("a", manager)
        lines = generate_latest(registry).decode().splitlines()
        metrics.remove("a")
        assert not [line for line in generate_latest(registry).decode().splitlines() if 'pool="a"' in line]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if 'pool="a"' in line}


def test_metrics_of_a_storage_manager_count_what_happened(engine: Engine) -> None:
    memory = store()
    with seeded(engine, PROMPT, memory, quotas={("small", None): 0}) as manager:
        seed(engine, manager, [PROMPT], salt="small")
        engine.cache.content.forget(engine.prompt(PROMPT))
        assert fetch(engine, manager, PROMPT) == 10
        samples = scraped(manager, engine)
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
    assert {name: samples.get(name) for name in expected} == expected


def test_nothing_that_is_shown_has_a_secret(engine: Engine) -> None:
    memory = store()
    with seeded(engine, PROMPT, memory) as manager:
        shown = manager, manager.stats(), manager.prefetch(PROMPT), scraped(manager, engine), list(manager.events())
        text = repr(shown)
        assert memory.secret.hex() not in text and repr(memory.secret)[2:-1] not in text
