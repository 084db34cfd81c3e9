"""Publishers and routers that are closed after the test, publishers first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from router import Router, Site, publisher_options

from engine import Engine
from kvpool.integrations.kv_events import KVEventPublisher


@pytest.fixture
def publish(make: Callable[..., Engine]) -> Iterator[Callable[..., KVEventPublisher]]:
    """Publishers of engines' pools, asked often. They come after ``make``, so that they are closed before its pools."""
    opened: list[KVEventPublisher] = []

    def build(engine: Engine, *args: Any, **options: Any) -> KVEventPublisher:
        opened.append(KVEventPublisher(engine.cache, *args, **{"interval_seconds": 0.002} | publisher_options(options)))
        return opened[-1]

    yield build
    for publisher in opened:
        publisher.close(0)


@pytest.fixture
def route() -> Iterator[Callable[..., Router]]:
    opened: list[Router] = []

    def build(*args: Any, **options: Any) -> Router:
        opened.append(Router(*args, **options))
        return opened[-1]

    yield build
    for router in opened:
        router.close()


@pytest.fixture
def site(make: Callable[..., Engine], publish: Callable[..., KVEventPublisher], route: Callable[..., Router]) -> Site:
    """Makes an engine whose pool keeps that many events, a publisher of it, and what makes routers that follow it."""

    def build(P: int = 8, S: int = 0, T: int = 4, events: int = 64, **options: Any) -> Any:
        engine = make(T, P, S, event_capacity=events)
        publisher = publish(engine, **options)
        return engine, publisher, partial(route, publisher)

    return build
