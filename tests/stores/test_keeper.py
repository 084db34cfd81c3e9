"""A keeper saves what a pool has, and brings it back, byte for byte."""

from __future__ import annotations

from tests.stores.keeping import engine, fetch, keeper, seed, store, tokens


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
