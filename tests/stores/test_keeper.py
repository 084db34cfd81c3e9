"""A keeper saves what a pool has, and brings it back, byte for byte."""

from __future__ import annotations

import pytest

from tests.stores.keeping import engine, fetch, keeper, seed, store, tokens, wait


def test_what_one_pool_has_saved_another_finds_after_a_restart() -> None:
    """The second pool has another random secret."""
    memory, prompt = store(), tokens(41)
    one = engine()
    with one.cache, keeper(one, memory) as kept:
        seed(one, kept, [prompt])
        assert kept.stats().saved_blocks == 10
    two = engine()
    with two.cache, keeper(two, memory) as kept:
        assert two.reusable(prompt) == 0
        assert fetch(two, kept, prompt) == 10
        sequence = two.add(prompt)
        assert sequence.cached == 40
        two.finish(sequence)


def test_a_prompt_gets_no_more_than_the_room_for_promotions() -> None:
    memory, prompt = store(), tokens(41)
    one = engine()
    with one.cache, keeper(one, memory) as kept:
        seed(one, kept, [prompt])
    two = engine()
    with two.cache, keeper(two, memory, promotion_blocks=4) as kept:
        handle = kept.prefetch(two.prompt(prompt), deadline=60.0)
        assert handle.wait(60) and handle.ended == "full" and handle.blocks == 4
        assert two.reusable(prompt) == 16 and kept.stats().promoted_blocks == 4
        sequence = two.add(prompt)
        assert sequence.cached == 16
        two.finish(sequence)
        assert kept.drain(60) and kept.stats().promoted_blocks == 0
        assert fetch(two, kept, tokens(41)) == 0


@pytest.mark.parametrize("save", ["evict", "reuse"])
def test_what_was_not_evicted_or_used_again_is_not_saved(save: str) -> None:
    one = engine(P=64, S=64)
    with one.cache, keeper(one, store(), save=save) as kept:
        seed(one, kept, [tokens(41)])
        assert kept.stats().saved_blocks == 0


def test_what_the_host_evicts_was_saved_before() -> None:
    """Prompts pass through a small pool, each of other tokens. All that the host had is in the store."""
    one, memory = engine(P=12, S=24), store()
    prompts = [tokens(41, 1000 * i) for i in range(12)]
    with one.cache, keeper(one, memory, save="evict", staging_blocks=16) as kept:
        for prompt in prompts:
            seed(one, kept, [prompt])
        stats, told = kept.stats(), one.cache.stats()
        assert told.forgotten_host_blocks > 60 and not stats.dropped
        assert told.forgotten_host_blocks <= stats.saved_blocks < 120
        fetch(one, kept, prompts[0])
        assert one.reusable(prompts[0]) == 40
        one.release(one.add(prompts[0]))


def test_saving_changes_no_order_of_eviction() -> None:
    """The same requests, with and without a keeper that saves before evictions."""
    found = []
    for save in ("evict", "commit", None):
        one = engine(P=12, S=24)
        with one.cache:
            kept = None if save is None else keeper(one, store(), save=save, staging_blocks=4)
            hits = []
            for i in range(40):
                hits.append(one.seed(tokens(17, 1000 * (i * 7 % 11)), 17))
                assert kept is None or kept.drain(60)
            found.append(hits)
            assert kept is None or kept.close(60)
    assert found[0] == found[2]


def test_what_is_used_twice_is_saved() -> None:
    one = engine(P=64, S=64)
    with one.cache, keeper(one, store(), save="reuse") as kept:
        seed(one, kept, [tokens(17), tokens(17, 100)])
        assert kept.stats().saved_blocks == 0
        assert one.seed(tokens(18), 18) == 17
        wait(lambda: kept.stats().saved_blocks == 4)
        assert kept.match_prefix(tokens(18)).store_tokens == 0
        one.cache.reset()
        assert kept.drain(60) and fetch(one, kept, tokens(18)) == 4
        assert fetch(one, kept, tokens(18, 100)) == 0
