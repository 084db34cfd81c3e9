"""A prefetch loads nothing that the engine computes sooner."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stores.keeping import engine, fetch, keeper, seed, store, tokens
from tests.stores.lab import Clock, Gate, Wrong
from tests.waiting import until


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory() -> Any:
    """A store with many prompts."""
    made, kept_in = engine(P=64, S=64), Wrong(store(1024))
    with made.cache, keeper(made, kept_in) as kept:
        seed(made, kept, [tokens(41, 1000 * i) for i in range(40)])
    return kept_in


def test_a_store_that_is_faster_is_used_for_all(memory: Wrong, clock: Clock) -> None:
    one = engine(P=64, S=1024)
    memory.before["load"] = lambda: clock.pass_(0.001)
    with one.cache, keeper(one, memory, prefill_tokens_per_s=100.0, clock=clock, deadline_ms=10**6) as kept:
        assert [fetch(one, kept, tokens(41, 1000 * i)) for i in range(30)] == [10] * 30
        assert kept.stats().prefetches == {"loaded": 30}


def test_a_load_that_hangs_is_given_up_long_before_its_deadline(memory: Wrong, clock: Clock) -> None:
    one, gate = engine(P=64, S=1024), Gate()
    memory.before["load"] = lambda: clock.pass_(0.001)
    with one.cache, keeper(one, memory, prefill_tokens_per_s=100.0, clock=clock, deadline_ms=10**6) as kept:
        for i in range(10):
            fetch(one, kept, tokens(41, 1000 * i))
        memory.before["load"] = gate
        handle = kept.prefetch(one.prompt(tokens(41, 20_000)), 1e5)
        assert gate.reached.wait(600) and not handle.done
        clock.pass_(20.0)
        assert handle.wait(600) and handle.ended == "late"
        gate.open()
        assert kept.drain(600)
        sequence = one.add(tokens(41, 20_000))
        assert sequence.cached == 0
        one.release(sequence)


def test_a_prefetch_may_take_as_long_as_its_request_waits_for_the_engine(memory: Wrong, clock: Clock) -> None:
    """The engine computes a prompt in 0.4 s, and a load takes 5 s."""
    one = engine(P=64, S=1024)
    memory.before["load"] = lambda: clock.pass_(5.0)
    with one.cache, keeper(one, memory, prefill_tokens_per_s=100.0, clock=clock, deadline_ms=10**6) as kept:
        for i in range(30):
            handle = kept.prefetch(one.prompt(tokens(41, 1000 * i)), 1e5, spare=60.0)
            assert handle.wait(600) and handle.ended == "loaded"
        with pytest.raises(ValueError, match="spare=-1"):
            kept.prefetch(one.prompt(tokens(41, 30_000)), spare=-1.0)
        assert sum(kept.stats().prefetches.values()) == 30


def test_without_a_stated_speed_everything_is_loaded(memory: Wrong, clock: Clock) -> None:
    one = engine(P=64, S=256)
    memory.before["load"] = lambda: clock.pass_(100.0)
    with one.cache, keeper(one, memory, clock=clock, deadline_ms=10**6) as kept:
        for i in range(3):
            handle = kept.prefetch(one.prompt(tokens(41, 1000 * i)), 1e5)
            until(lambda handle=handle: handle.done)  # type: ignore[misc]
            assert handle.blocks == 10
