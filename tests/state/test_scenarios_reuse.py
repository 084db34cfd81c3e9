"""Allocation, growth and prefix reuse on the device tier, every reused byte compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Engine
from kvpool.errors import OutOfBlocks, UnknownSequence
from kvpool.state.index import child_bucket
from tests import debug

Make = Callable[..., Engine]


def test_blocks_are_taken_and_returned_at_block_borders(make: Make) -> None:
    engine = make(T=64, P=16, layout={"layers": 1, "kv_heads": 1, "head_dim": 1})
    sequence = engine.add(range(575))
    assert len(engine.table(sequence)) == 9
    engine.append(sequence, [1, 2])
    tenth = engine.table(sequence)[9]
    engine.append(sequence, [3, 4, 5])
    assert len(engine.table(sequence)) == 10
    engine.rewind(sequence, 4)
    assert len(engine.table(sequence)) == 9 and engine.order()[0] == tenth


def test_a_call_that_raises_changes_nothing(make: Make) -> None:
    engine = make()
    engine.seed(range(9))
    one, two = engine.add(range(9)), engine.add([7])
    before, free = debug.dump(engine.cache.core.tokens), engine.free()
    for call, error in (
        (lambda: engine.cache.append_tokens([one.id, two.id, one.id], [1, 2, 3], [1, 1, 1]), ValueError),
        (lambda: engine.cache.release([two.id, two.id]), ValueError),
        (lambda: engine.cache.commit([one.id, 99]), UnknownSequence),
        (lambda: engine.cache.commit([two.id, one.id], [1, 4]), ValueError),
        (lambda: engine.cache.append_tokens([one.id, two.id], [1] * 40, [20, 20]), OutOfBlocks),
        (lambda: engine.cache.rewind([one.id, two.id], [1, 2]), ValueError),
        (lambda: engine.cache.add_sequence_batch([[5], list(range(100, 132))]), OutOfBlocks),
        (lambda: engine.cache.add_sequence_batch([[5], list(range(100, 133))]), ValueError),
    ):
        with pytest.raises(error):
            call()
        engine.cache.verify()
        assert debug.dump(engine.cache.core.tokens) == before and engine.free() == free


def test_a_full_pool_comes_back_whole(make: Make) -> None:
    engine = make(P=10)
    running = []
    with pytest.raises(OutOfBlocks):
        while True:
            running.append(engine.add(range(100 * len(running), 100 * len(running) + 9)))
    assert len(running) == 3 and engine.free() == 1
    with pytest.raises(OutOfBlocks):
        for sequence in running:
            for token in range(5):
                engine.append(sequence, [token])
    for sequence in running:
        engine.finish(sequence)
    assert engine.free() == 10


def test_a_scheduler_knows_what_the_next_step_needs(make: Make) -> None:
    engine = make(T=16, P=64)
    assert engine.cache.blocks_needed(list(range(136))) == 9
    assert engine.cache.blocks_needed(list(range(512))) == 32
    sequence = engine.add(range(302))
    assert engine.cache.blocks_needed(sequences=[sequence.id], new_tokens=2) == 0
    assert engine.cache.blocks_needed(sequences=[sequence.id], new_tokens=2 + 3) == 1


def test_unused_cached_blocks_count_as_free_in_the_need(make: Make) -> None:
    engine = make(T=16, P=16)
    engine.seed(range(64))
    assert engine.cache.match_prefix(list(range(64))).full_tokens == 48
    assert engine.cache.blocks_needed(list(range(64))) == 4
    user = engine.add(range(64))
    assert engine.cache.blocks_needed(list(range(64))) == 1
    other = engine.add(range(64))
    assert engine.cache.evictable_if_released([user.id]) == 1
    assert engine.cache.evictable_if_released([user.id, other.id]) == 5


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


def test_a_stored_tail_is_copied_and_stays_cached(make: Make) -> None:
    engine = make(P=16)
    engine.seed([*range(10), 77])
    assert engine.add(range(10)).cached == 9
    assert engine.add([*range(10), 11]).cached == 10
    assert engine.add([*range(10), 12]).cached == 10


def test_full_and_partial_tokens_are_reported_apart(make: Make) -> None:
    engine = make()
    engine.seed([*range(10), 77])
    match = engine.cache.match_prefix([*range(10), 11])
    assert (match.device_tokens, match.host_tokens, match.partial_tokens) == (8, 0, 2)
    assert (match.full_tokens, match.tokens) == (8, 10)
    engine = make(partial_reuse=False)
    engine.seed([*range(10), 77])
    assert engine.cache.match_prefix([*range(10), 11]).tokens == 8


def test_statistics_of_two_equal_requests(make: Make) -> None:
    engine = make(P=16)
    engine.seed(range(9))
    stats = engine.cache.stats()
    assert (stats.reused_device_blocks, stats.missed_blocks, stats.prompt_tokens) == (0, 3, 9)
    engine.add(range(9))
    stats = engine.cache.stats()
    assert (stats.reused_device_blocks, stats.missed_blocks, stats.prompt_tokens) == (2, 4, 18)
    assert stats.hit_rate == pytest.approx(2 / 6)


def test_extra_ids_are_part_of_the_content(make: Make) -> None:
    engine = make(P=16)
    first = [1, 1, 2, 2, 3, 3, 0, 0, 0]
    engine.seed(range(9), extra_ids=first)
    assert engine.add(range(9), extra_ids=first).cached == 8
    assert engine.add(range(9), extra_ids=[4, 4, 5, 5, 6, 6, 0, 0, 0]).cached == 0
    assert engine.add(range(9), extra_ids=[1, 1, 2, 2, 4, 4, 0, 0, 0]).cached == 4


def test_the_same_tokens_behind_another_beginning_are_other_content(make: Make) -> None:
    engine = make()
    engine.seed([1, 2, 3, 4, 9, 9, 9, 9], committed=8)
    engine.seed([5, 6, 7, 8], committed=4)
    assert engine.reusable([5, 6, 7, 8, 9, 9, 9, 9, 0]) == engine.add([5, 6, 7, 8, 9, 9, 9, 9, 0]).cached == 4
    assert engine.reusable([9, 9, 9, 9, 0]) == 0


def test_extra_ids_are_part_of_the_key(make: Make) -> None:
    """So that two images behind the same tokens are cached side by side."""
    engine = make()
    images = [None, [0, 0, 7, 0, 0], [0, 7, 0, 0, 0], [0, 0, 8, 0, 0], [7, 7, 7, 7, 7]]
    for extra in images:
        engine.seed(range(5), committed=4, extra_ids=extra)
    assert len({*(engine.keys(range(5), extra_ids=extra)[0] for extra in images)}) == len(engine.cached()) == 5
    assert [engine.reusable(range(5), extra_ids=extra) for extra in images] == [4] * 5


def test_adapters_share_nothing(make: Make) -> None:
    engine = make(P=16)
    engine.seed(range(9), adapter_id=1)
    assert engine.add(range(9), adapter_id=1).cached == 8
    assert engine.add(range(9), adapter_id=2).cached == 0


def test_salts_share_nothing(make: Make) -> None:
    engine = make(P=32)
    for salt, cached in ((None, 0), ("A", 0), ("A", 8), ("B", 0), (None, 8)):
        names: dict[str, Any] = {} if salt is None else {"salt": salt}
        assert engine.seed(range(9), **names) == cached


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
@pytest.mark.parametrize("order", ["layer_first", "block_first"])
@pytest.mark.parametrize("tokens", ["NHD", "HND"])
@pytest.mark.parametrize("planes", [1, 2])
def test_a_partial_copy_holds_the_shared_tokens_and_no_more(
    make: Make, dtype: str, order: str, tokens: str, planes: int
) -> None:
    engine = make(T=8, layout={"dtype": dtype, "order": order, "tokens": tokens, "planes": planes, "layers": 3})
    engine.seed(range(17))
    target = engine.order()[0]
    engine.block(target)[:] = 0xA5
    prompt = [*range(11), 99]
    new = engine.cache.add_sequence(prompt)
    first, second = engine.cache.block_table(new).dense()[0].tolist()
    assert (engine.cache.cached_tokens(new), second) == (11, target)
    assert first in engine.cached().values() and second not in engine.cached().values()
    assert np.all(engine.block(target)[:, :, 3:] == 0xA5), "tokens behind the match are not touched"
    engine.admitted(new, prompt)


def test_released_without_storing_leaves_nothing(make: Make) -> None:
    engine = make()
    sequence = engine.add(range(9))
    engine.commit(sequence)
    engine.release(sequence, store=False)
    assert engine.free() == 8 and not engine.cached() and engine.reusable(range(9)) == 0


def test_release_without_storing_keeps_what_others_stored(make: Make) -> None:
    engine = make()
    engine.seed(range(5))
    sequence = engine.add(range(9))
    engine.commit(sequence)
    engine.release(sequence, store=False)
    assert engine.reusable(range(9)) == 4


def test_nothing_is_published_before_commit(make: Make) -> None:
    engine = make()
    sequence = engine.add(range(9))
    assert engine.reusable(range(9)) == 0
    engine.commit(sequence, 7)
    assert engine.reusable(range(9)) == 4
    engine.commit(sequence, 8)
    assert engine.reusable(range(9)) == 8


def test_a_partial_source_is_never_the_cause_of_failure(make: Make) -> None:
    engine = make(P=3)
    engine.seed(range(9), committed=9)
    assert engine.free() == 3
    assert engine.add(range(9)).cached >= 8


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


def test_a_reader_keeps_a_block_that_its_writer_rewinds(make: Make) -> None:
    engine = make()
    writer = engine.add([12, 13, 14, 15])
    engine.commit(writer)
    reader = engine.add([12, 13, 14, 15, 16])
    assert reader.cached == 4
    shared = engine.table(reader)[0]
    engine.rewind(writer, 2)
    assert engine.table(reader)[0] == shared != engine.table(writer)[0]
    engine.append(writer, [70, 71])
    engine.check_all()
    assert engine.cached()[engine.keys([12, 13, 14, 15])[0]] == shared


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


def test_the_same_tail_behind_two_beginnings_is_two_tails(make: Make) -> None:
    """Also where both have one place in the index."""
    engine = make(P=8)
    count, places = engine.cache.core.tokens.head.child_buckets, {}
    for number in range(1000):
        prompt = [number, 0, 0, 0]
        place = int(child_bucket(engine.prompt(prompt).keys.view(np.int64)[0, 0], np.int32(9), count))
        other = places.setdefault(place, prompt)
        if other is not prompt:
            break
    for beginning in (prompt, other):
        engine.seed([*beginning, 9, 8, 7], committed=6)
    assert engine.reusable([*prompt, 9, 8, 1]) == engine.reusable([*other, 9, 8, 1]) == 6


def test_matching_changes_nothing(make: Make) -> None:
    engine = make(S=2)
    engine.seed(range(9))
    before = debug.dump(engine.cache.core.tokens)
    engine.cache.match_prefix(list(range(9)))
    engine.cache.blocks_needed(list(range(9)), new_tokens=3)
    assert debug.dump(engine.cache.core.tokens) == before
