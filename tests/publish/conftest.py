"""Publishers and routers that are closed after the test, publishers first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from router import Router

from engine import Engine
from kvpool.integrations.kv_events import KVEventPublisher


@pytest.fixture
def publish(make: Callable[..., Engine]) -> Iterator[Callable[..., KVEventPublisher]]:
    """Publishers of engines' pools, asked often. They come after ``make``, so that they are closed before its pools."""
    opened: list[KVEventPublisher] = []

    def build(engine: Engine, *args: Any, **options: Any) -> KVEventPublisher:
        opened.append(KVEventPublisher(engine.cache, *args, **{"interval_ms": 2} | options))
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
