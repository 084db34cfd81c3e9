"""Spans cover admissions, moves and jobs of stores, with the request's id. Without them, nothing is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine import Engine
from kvpool import KVCacheManager, OutOfBlocks
from kvpool.integrations import tracing
from kvpool.pool import CachedContent
from kvpool.storage.backends.memory import MemoryStore
from kvpool.storage.mac import BlockNames
from kvpool.storage.store_worker import StoreWorker
from tests.stores.lab import done, names, open_queue


class Span:
    """A span of the fake tracer."""

    def __init__(self, name: str, attributes: dict[str, Any]) -> None:
        self.name, self.attributes, self.ended = name, dict(attributes), False

    def set_attribute(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def end(self) -> None:
        self.ended = True


class Tracer:
    """As much of OpenTelemetry's tracer as is used."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def start_span(self, name: str, attributes: dict[str, Any]) -> Span:
        self.spans.append(Span(name, attributes))
        return self.spans[-1]

    @contextmanager
    def start_as_current_span(self, name: str, attributes: dict[str, Any]) -> Iterator[Span]:
        span = self.start_span(name, attributes)
        try:
            yield span
        finally:
            span.end()


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    tracer = Tracer()
    tracing.trace(tracer)
    yield tracer
    tracing.untrace()


def test_calls_of_a_request_have_spans_with_its_id(tracer: Tracer, make: Any) -> None:
    engine: Engine = make(P=2, T=4)
    with tracing.request("r-7"):
        sequence = engine.cache.add_sequence(range(5))
        with pytest.raises(OutOfBlocks):
            engine.cache.add_sequence_batch([range(50, 55)])
    engine.cache.content.prefetch(range(5))
    engine.cache.release(sequence)
    spans = [(span.name, span.attributes, span.ended) for span in tracer.spans]
    ids = {"kvpool.request": "r-7"}
    assert spans == [
        ("kvpool.add_sequence", ids, True),
        ("kvpool.add_sequence_batch", ids, True),
        ("kvpool.prefetch", {}, True),
    ]


def test_a_job_of_a_store_has_a_span_until_its_result_is_read(tracer: Tracer) -> None:
    with open_queue(MemoryStore(1 << 20)) as queue:
        with tracing.request("r-8"):
            job = queue.find(BlockNames(names(3)))
        assert done(job) and not tracer.spans[0].ended
        assert queue.poll()
    (span,) = tracer.spans
    assert (span.name, span.ended) == ("kvpool.store.find", True)
    assert span.attributes == {"kvpool.request": "r-8", "kvpool.blocks": 3}


def test_without_tracing_nothing_stands_between_a_caller_and_a_call() -> None:
    def calls() -> tuple[Any, ...]:
        return (
            KVCacheManager.add_sequence,
            CachedContent.prefetch,
            StoreWorker.load,
            vars(KVCacheManager).copy(),
        )

    before = calls()
    tracing.trace(Tracer())
    assert (traced := KVCacheManager.add_sequence) is not before[0]
    tracing.trace(Tracer())
    assert KVCacheManager.add_sequence is traced, "a second call does nothing"
    tracing.untrace()
    tracing.untrace()
    assert calls() == before
