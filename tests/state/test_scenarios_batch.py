"""Batched admission: every match is claimed before anything is taken; and the events that a pool tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine import Engine, EventReplay
from kvpool.errors import OutOfBlocks
from tests import debug

Make = Callable[..., Engine]


def test_a_batch_shares_full_blocks_and_copies_partial_ones(make: Make) -> None:
    engine = make(P=16)
    engine.seed(range(7))
    one, two = engine.add_batch([[0, 1, 2, 3, 4, 10], [0, 1, 2, 3, 4, 20]])
    assert (one.cached, two.cached) == (5, 5)
    (first, second), (first_too, second_too) = engine.table(one), engine.table(two)
    assert first == first_too and second != second_too


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_order_of_a_batch_does_not_change_what_each_reuses(make: Make, order: tuple[int, int]) -> None:
    engine = make(P=16)
    engine.seed(range(9))
    prompts, cached = [[*range(7), 10], [*range(9)]], [7, 8]
    assert [s.cached for s in engine.add_batch([prompts[i] for i in order])] == [cached[i] for i in order]


def test_each_request_is_told_its_own_numbers(make: Make) -> None:
    engine = make(P=16)
    engine.seed(range(9))
    admission = engine.cache.add_sequence_batch([list(range(9)), [100, 101, 102, 103]])
    assert admission.cached_tokens.tolist() == [8, 0]
    assert admission.device_tokens.tolist() == [8, 0] and admission.missed_blocks.tolist() == [1, 1]
    assert admission.host_tokens.tolist() == admission.partial_tokens.tolist() == [0, 0]
    admission = engine.cache.add_sequence_batch([list(range(200, 212)), list(range(9))])
    assert admission.missed_blocks.tolist() == [3, 1] and admission.device_tokens.tolist() == [0, 8]


def test_one_request_cannot_evict_what_another_counts_on(make: Make) -> None:
    missing, cached = list(range(100, 109)), list(range(9))

    def nearly_full() -> Engine:
        engine = make(P=6, S=4)
        engine.seed(cached, committed=8)
        engine.add(range(50, 54))
        return engine

    engine = nearly_full()
    promised = engine.cache.match_prefix(cached)
    assert promised.device_tokens == 8
    with pytest.raises(OutOfBlocks):
        engine.add_batch([missing, cached])
    assert engine.cache.match_prefix(cached) == promised
    first, second = engine.add_batch([missing[:5], cached])
    assert (first.cached, second.cached) == (0, 8)
    assert engine.cache.stats().offloaded_blocks == 0
    engine = nearly_full()
    engine.add(range(100, 116))
    assert engine.cache.match_prefix(cached).device_tokens < 8, "one by one, the first evicts it"


def test_a_batch_without_the_request_that_does_not_fit_succeeds(make: Make) -> None:
    engine = make(P=6)
    engine.seed(range(9), committed=8)
    before = debug.dump(engine.cache.core.tokens)
    batch = [list(range(9)), list(range(100, 116)), [200, 201]]
    with pytest.raises(OutOfBlocks) as raised:
        engine.cache.add_sequence_batch(batch)
    assert raised.value.tier == "device" and raised.value.needed > raised.value.free
    assert debug.dump(engine.cache.core.tokens) == before
    one, two = engine.add_batch([batch[0], batch[2]])
    assert (one.cached, two.cached) == (8, 0)


def test_the_head_of_a_batch_can_be_kept(make: Make) -> None:
    engine = make(P=6)
    batch = [list(range(9)), list(range(100, 104)), list(range(200, 212)), [5]]
    assert len(engine.add_batch(batch, allow_partial_batch=True)) == 2
    assert engine.free() == 2
    assert engine.add_batch([list(range(300, 312))], allow_partial_batch=True) == []


def test_an_empty_batch_does_nothing(make: Make) -> None:
    engine = make(P=6)
    engine.seed(range(9))
    before = debug.dump(engine.cache.core.tokens)
    assert engine.add_batch([]) == []
    assert debug.dump(engine.cache.core.tokens) == before


def test_what_a_seeded_prompt_needs_next(make: Make) -> None:
    engine = make(T=16, P=16)
    engine.seed(range(64))
    assert engine.cache.match_prefix(list(range(64))).full_tokens == 48
    assert engine.cache.blocks_needed(list(range(64))) == 4
    sequence = engine.add(range(64))
    for token in range(32):
        engine.append(sequence, [token])
    assert len(engine.table(sequence)) == 6


def test_partial_matches_are_given_up_before_a_batch_fails(make: Make) -> None:
    engine = make(P=4)
    engine.seed(range(4), committed=4)
    batch = engine.add_batch([[0, 1, 9, 9, 1], [0, 1, 2, 9, 1]])
    assert sorted(s.cached for s in batch) == [0, 2], "one takes the source itself, the other goes without"
    assert engine.cache.stats().copied_blocks == 0


def test_a_retention_range_applies_to_what_it_hits(make: Make) -> None:
    engine = make(P=8, event_capacity=32)
    engine.seed(range(9), committed=8)
    engine.cache.events()
    sequence = engine.add(range(9), retention=[(4, 8, 90, None)])
    assert engine.priorities(sequence) == [35, 90, 35]
    (updated,) = engine.cache.events()
    assert (updated.kind, updated.tier, updated.priority) == ("updated", "device", 90)


# -- events ------------------------------------------------------------------------------------


def kinds(events: Sequence[Any]) -> list[str]:
    return [event.kind for event in events]


def test_the_first_poll_tells_the_capacities(make: Make) -> None:
    engine = make(P=8, S=4, event_capacity=16)
    (created,) = engine.cache.events()
    assert (created.kind, created.device_blocks, created.host_blocks) == ("created", 8, 4)
    assert not engine.cache.events()


def test_a_stored_event_names_its_parent(make: Make) -> None:
    engine = make(P=16, event_capacity=16)
    engine.cache.events()
    engine.seed(range(9), committed=8)
    (first,) = engine.cache.events()
    assert (first.kind, first.tier, first.priority) == ("stored", "device", 35)
    assert [key.tobytes() for key in first.keys] == engine.keys(range(8))
    engine.seed(range(13), committed=12)
    (second,) = engine.cache.events()
    assert [key.tobytes() for key in second.keys] == engine.keys(range(12))[2:]
    assert second.parent.tobytes() == engine.keys(range(8))[1]
    assert second.tokens.ravel().tolist() == [8, 9, 10, 11]


def test_storing_the_same_content_again_tells_nothing(make: Make) -> None:
    engine = make(P=16, event_capacity=16)
    engine.seed(range(9))
    engine.cache.events()
    engine.seed(range(9))
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
