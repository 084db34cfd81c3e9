"""Allocation, growth and prefix reuse on the device tier, every reused byte compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine import Engine
from kvpool.state.index import child_bucket

Make = Callable[..., Engine]


def test_whole_blocks_are_reused_and_the_last_token_never(make: Make) -> None:
    engine = make()
    sequence = engine.add(range(9))
    assert (sequence.cached, len(engine.table(sequence)), engine.free()) == (0, 3, 5)
    engine.append(sequence, [9])
    engine.append(sequence, [10])
    engine.finish(sequence)
    assert engine.free() == 8
    old = set(engine.cached().values())
    sequence = engine.add(range(9))
    assert (sequence.cached, engine.free()) == (8, 5)
    assert engine.table(sequence)[2] not in old
    engine.release(sequence)
    assert engine.add(range(5)).cached == 4
    single = engine.add([0])
    assert (single.cached, len(engine.table(single))) == (0, 1)


def test_extra_ids_are_part_of_the_content(make: Make) -> None:
    engine = make(P=16)
    first = [1, 1, 2, 2, 3, 3, 0, 0, 0]
    engine.seed(range(9), extra_ids=first)
    assert engine.add(range(9), extra_ids=first).cached == 8
    assert engine.add(range(9), extra_ids=[4, 4, 5, 5, 6, 6, 0, 0, 0]).cached == 0
    assert engine.add(range(9), extra_ids=[1, 1, 2, 2, 4, 4, 0, 0, 0]).cached == 4


def test_the_same_tokens_after_another_beginning_are_other_content(make: Make) -> None:
    engine = make()
    engine.seed([1, 2, 3, 4, 9, 9, 9, 9], committed=8)
    engine.seed([5, 6, 7, 8], committed=4)
    assert engine.reusable([5, 6, 7, 8, 9, 9, 9, 9, 0]) == engine.add([5, 6, 7, 8, 9, 9, 9, 9, 0]).cached == 4
    assert engine.reusable([9, 9, 9, 9, 0]) == 0


def test_extra_ids_are_part_of_the_key(make: Make) -> None:
    """So that two images after the same tokens are cached side by side."""
    engine = make()
    images = [None, [0, 0, 7, 0, 0], [0, 7, 0, 0, 0], [0, 0, 8, 0, 0], [7, 7, 7, 7, 7]]
    for extra in images:
        engine.seed(range(5), committed=4, extra_ids=extra)
    assert len({*(engine.keys(range(5), extra_ids=extra)[0] for extra in images)}) == len(engine.cached()) == 5
    assert [engine.reusable(range(5), extra_ids=extra) for extra in images] == [4] * 5


def test_release_without_storing_keeps_what_others_stored(make: Make) -> None:
    engine = make()
    engine.seed(range(5))
    sequence = engine.add(range(9))
    engine.commit(sequence)
    engine.release(sequence, store=False)
    assert engine.reusable(range(9)) == 4


def test_short_of_blocks_a_request_takes_the_source_itself(make: Make) -> None:
    engine = make(P=3)
    engine.seed(range(11), committed=10)
    sequence = engine.add([*range(9), 42])
    assert sequence.cached == 9 and engine.cache.stats().copied_blocks == 0
    engine.release(sequence, store=False)
    assert engine.reusable(range(11)) == 8, "the key of the taken block is forgotten"


def test_a_writer_gives_up_the_key_of_a_rewound_block(make: Make) -> None:
    engine = make()
    sequence = engine.add([12, 13, 14, 15])
    engine.commit(sequence)
    engine.rewind(sequence, 2)
    assert not engine.cached()
    engine.append(sequence, [70, 71])
    engine.commit(sequence)
    assert engine.reusable([12, 13, 14, 15, 0]) == 2, "its first tokens serve a partial match"
    assert engine.reusable([12, 13, 70, 71, 0]) == 4


def test_a_duplicate_takes_over_when_the_published_block_is_gone(make: Make) -> None:
    for verb in ("commit", "release"):
        engine = make(P=6)
        first, second = engine.add(range(5)), engine.add(range(9))
        engine.finish(first)
        engine.commit(second)
        assert engine.cached()[engine.keys(range(4))[0]] not in engine.table(second)
        filler = engine.add(range(100, 112))
        assert engine.reusable(range(9)) == 0, "the ancestor is missing"
        engine.release(filler)
        if verb == "commit":
            engine.commit(second)
        else:
            engine.release(second)
        assert engine.reusable(range(9)) == 8, "the chain below it is found again"


def test_a_duplicate_before_the_one_that_was_rewound_takes_over(make: Make) -> None:
    engine = make(P=16)
    second, first = engine.add(range(13)), engine.add(range(13))
    engine.commit(second, 8)
    engine.commit(first)
    engine.commit(second)  # its third block is a duplicate
    engine.append(engine.rewind(second, 9), range(50, 54))
    third = engine.commit(engine.add([*range(4), *range(50, 55)]))
    engine.commit(second)  # and now its second one
    engine.release(third, store=False)
    engine.commit(second)
    assert engine.reusable([*range(4), *range(50, 55)]) == 8


def test_what_replaced_reused_tokens_is_dropped_with_its_sequence(make: Make) -> None:
    engine = make(P=16)
    engine.seed(range(9))
    sequence = engine.add(range(9))
    assert sequence.cached == 8
    engine.append(engine.rewind(sequence, 5), range(50, 55))
    engine.release(engine.commit(sequence), store=False)
    assert engine.reusable(range(9)) == 8 and engine.reusable([*range(4), *range(50, 55)]) == 4


def test_a_lookup_compares_a_bounded_number_of_children(make: Make) -> None:
    engine = make(P=64)
    for child in range(40):
        engine.seed([7, child, child, child], committed=4)
    assert engine.reusable([7, 39, 39, 0, 0]) == 3, "a recent child is found"
    assert engine.reusable([7, 0, 0, 1, 0]) == 1, "an old one is not looked for"


def test_a_longer_tail_replaces_the_one_that_it_starts_with(make: Make) -> None:
    engine = make()
    engine.seed([1, 2, 9])
    engine.seed([1, 2, 3, 9])
    engine.seed([1, 9])
    assert engine.reusable([1, 2, 3, 4]) == 3
    assert engine.cache.stats().device.evictable == 1, "one tail serves all"


def test_the_same_tail_after_two_beginnings_is_two_tails(make: Make) -> None:
    """Even where both have one place in the index."""
    engine = make(P=8)
    count, places = engine.cache.core.tokens.header.child_buckets, {}
    for number in range(1000):
        prompt = [number, 0, 0, 0]
        place = int(child_bucket(engine.prompt(prompt).keys.view(np.int64)[0, 0], np.int32(9), count))
        other = places.setdefault(place, prompt)
        if other is not prompt:
            break
    for beginning in (prompt, other):
        engine.seed([*beginning, 9, 8, 7], committed=6)
    assert engine.reusable([*prompt, 9, 8, 1]) == engine.reusable([*other, 9, 8, 1]) == 6
