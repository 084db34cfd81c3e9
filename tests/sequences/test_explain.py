"""An explanation counts where the tokens of a prompt come from, and names by code why the others do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine import Engine, Make
from kvpool import BlockLayout, EvictionOptions, KVCacheManager, LayerGroup
from kvpool.errors import UnknownSequence
from kvpool.pool import Missed

A, B = list(range(17)), list(range(100, 117))


def stored(engine: Engine, prompt: Any, **more: Any) -> None:
    cache = engine.cache
    sequence = cache.add_sequence(prompt, **more)
    cache.commit(sequence)
    cache.release(sequence)


def test_what_is_cached_and_what_was_never_seen(make: Make) -> None:
    engine = make(P=8, S=8, T=4)
    stored(engine, A)
    explained = engine.cache.content.explain([*A[:10], *B])
    assert explained[:4] == (27, 8, 0, 2)
    assert explained.missed == (Missed(10, 14, "never_seen"), Missed(24, 3, "always_computed"))


@pytest.mark.parametrize("policy", ["lru", "agent"])
def test_what_was_evicted_and_when(make: Make, policy: str) -> None:
    engine = make(P=5, T=4, policy=policy)
    stored(engine, A)
    engine.clock.now += 30
    stored(engine, B)
    engine.clock.now += 20
    gone = [missed for missed in engine.cache.content.explain(A).missed if missed.reason == "evicted"]
    assert gone and all(missed.ago_ms == 20 for missed in gone)


def test_what_a_call_forgot_and_what_expired(make: Make) -> None:
    engine = make(P=5, T=4)
    stored(engine, A, retention=[(0, None, 80, 10)])
    engine.clock.now += 11
    engine.cache.content.refresh()
    stored(engine, B)
    assert "expired" in [missed.reason for missed in engine.cache.content.explain(A).missed]
    engine.cache.content.forget(B)
    assert engine.cache.content.explain(B).missed[0] == Missed(0, 16, "forgotten", 0)


def test_another_namespace_a_hole_and_a_prompt_that_reuses_nothing(make: Make) -> None:
    engine = make(P=8, T=4, event_capacity=64)
    stored(engine, engine.cache.block_keys(A, salt="tenant"))
    assert engine.cache.content.explain(A).missed[0] == Missed(0, 16, "other_namespace")
    stored(engine, A)
    keys = engine.cache.block_keys(A)
    engine.cache.content.forget(keys.keys[:1])
    assert [missed.reason for missed in engine.cache.content.explain(A).missed] == [
        "forgotten",
        "after_miss",
        "always_computed",
    ]
    assert engine.cache.content.explain(engine.cache.block_keys(A, reuse=False)).missed == (Missed(0, 17, "bypassed"),)
    assert "tenant" not in str(engine.cache.content.explain(A))


@pytest.mark.parametrize("rows", [0, 2])
def test_what_a_bounded_memory_has_lost_is_not_called_unseen(make: Make, rows: int) -> None:
    engine = make(P=5, T=4, eviction=EvictionOptions(history_bytes=16 * rows))
    for start in range(0, 500, 100):
        stored(engine, list(range(start, start + 17)))
    assert engine.cache.core.states.ring.gone.nbytes == 16 * rows
    assert engine.cache.content.explain(A).missed[0] == Missed(0, 16, "unknown")


def test_after_a_reset_nothing_is_called_unseen(make: Make) -> None:
    engine = make(P=8, T=4)
    stored(engine, A)
    engine.cache.clear()
    assert engine.cache.content.explain(A).missed[0].reason == "unknown"


def test_a_window_needs_only_what_the_next_token_sees() -> None:
    layout = BlockLayout(layers=1, kv_heads=1, head_dim=8, tokens_per_block=4)
    groups = [LayerGroup(layout), LayerGroup(layout, window=4)]
    with KVCacheManager(groups=groups, device_blocks=[8, 8], device="cpu") as cache:
        sequence = cache.add_sequence(np.array(A))
        cache.commit(sequence)
        cache.release(sequence)
        assert cache.content.explain(A).missed == (Missed(16, 1, "always_computed"),)
        cache.content.forget(cache.block_keys(A).keys[2:3])
        assert [missed.reason for missed in cache.content.explain(A).missed][0] == "forgotten"


# ----------------------------------------
# What one request has reused, decoded, dropped and computed in vain, and the same in total.


FIRST = list(range(13))


def test_tokens_that_two_requests_compute_at_the_same_time_are_recomputed_by_the_second(make: Make) -> None:
    engine = make(T=4, P=16)
    first, two, three = engine.add(FIRST), engine.add(FIRST), engine.add(FIRST)
    for request in (first, two):
        engine.commit(request)
    engine.release(first)
    engine.commit(three, 9)
    assert engine.cache.request_stats([two.id, three.id]).recomputed.tolist() == [12, 8]
    engine.commit(three)
    assert engine.cache.request_stats(three.id).recomputed == 12
    assert engine.cache.stats().recomputed_tokens == 24
    engine.commit(two)
    engine.release(two)
    engine.release(three)
    assert engine.cache.stats().recomputed_tokens == 24, "what waits is counted once"


def test_one_id_gives_numbers_and_several_give_arrays(make: Make) -> None:
    engine = make(T=4, P=8)
    request = engine.add(FIRST)
    one, several = (engine.cache.request_stats(ids) for ids in (request.id, [request.id]))
    assert all(type(field) is int for field in one)
    assert all(field.dtype == np.int32 and field.shape == (1,) for field in several)
    several.prompt[:] = 0
    assert engine.cache.request_stats(request.id).prompt == 13
    with pytest.raises(UnknownSequence):
        engine.cache.request_stats([request.id, 77 << 32])
