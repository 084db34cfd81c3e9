"""A growth that no wait can make fit is a ValueError; one that fits once others have left is OutOfBlocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvpool import KVCacheManager, LayerGroup, OutOfBlocks
from tests import debug
from tests.engine import Make, small_layout
from tests.grouped import group_of

T = 4
NEVER = "it can never fit"


def refused(cache: KVCacheManager, call: Callable[[], object]) -> Exception:
    """What a call raises. It has changed nothing."""
    before = debug.dump_all(cache.core.states)
    with pytest.raises((ValueError, OutOfBlocks)) as raised:
        call()
    assert debug.dump_all(cache.core.states) == before
    cache.verify()
    return raised.value


# -- what it says --------------------------------------------------------------------------------------


def test_an_engine_that_swaps_out_and_resumes_ends(make: Make) -> None:
    cache = make(P=8, S=8).cache
    sequence, rounds = cache.add_sequence(list(range(32))), 0
    with pytest.raises(ValueError, match=NEVER):
        while rounds < 100:
            try:
                cache.append_tokens(sequence, [1])
            except OutOfBlocks:
                cache.swap_out(sequence)
                cache.resume(sequence)
            rounds += 1
    assert rounds == 0


def test_the_prompt_of_a_batch_that_never_fits_is_named(make: Make) -> None:
    cache = make(P=8, S=0).cache
    small, large = cache.add_sequence([1]), cache.add_sequence(list(range(20)))
    for ids, counts in (([small, large], [1, 13]), ([large, small], [13, 0])):
        error = refused(cache, lambda ids=ids, counts=counts: cache.append_tokens(ids, [7] * sum(counts), counts))  # type: ignore[misc]
        assert type(error) is ValueError and f"sequence {large}, got 9: {NEVER}" in str(error)


def test_a_batch_of_which_each_fits_alone_may_fit_later(make: Make) -> None:
    cache = make(P=8, S=0).cache
    first, two = cache.add_sequence(list(range(12))), cache.add_sequence(list(range(100, 112)))
    error = refused(cache, lambda: cache.append_tokens([first, two], [7] * 40, [20, 20]))
    assert type(error) is OutOfBlocks and (error.needed, error.free) == (10, 2)
    cache.release(two)
    cache.append_tokens(first, [7] * 20)


def test_copies_for_forks_do_not_count(make: Make) -> None:
    """The last holder of a shared block writes in place."""
    cache = make(P=8, S=0, max_sequences=8).cache
    parent = cache.add_sequence(list(range(30)))
    (child,) = cache.fork(parent, 1).tolist()
    assert type(refused(cache, lambda: cache.append_tokens([parent, child], [1, 2], [1, 1]))) is not ValueError
    error = refused(cache, lambda: cache.append_tokens([parent, child], [1, 2, 3, 4], [1, 3]))
    assert f"sequence {child}, got 9" in str(error)
    cache.release(child)
    cache.append_tokens(parent, [1, 2])


def test_pinned_and_reserved_blocks_do_not_count(make: Make) -> None:
    engine = make(P=8, S=0, max_sequences=8)
    cache = engine.cache
    engine.seed(range(50, 58), committed=8)
    sequence = cache.add_sequence(list(range(16)))
    with cache.pin(engine.keys(range(50, 58)), tier="device"), cache.imports.reserve(list(range(70, 74))):
        assert type(refused(cache, lambda: cache.append_tokens(sequence, [1] * 8))) is OutOfBlocks
        assert type(refused(cache, lambda: cache.append_tokens(sequence, [1] * 17))) is ValueError
    cache.append_tokens(sequence, [1] * 16)


def test_a_window_may_take_in_parts_what_it_cannot_at_once() -> None:
    with KVCacheManager(small_layout(T), window=8, device_blocks=5, device="cpu", max_sequence_tokens=400) as cache:
        sequence = cache.add_sequence(list(range(8)))
        error = refused(cache, lambda: cache.append_tokens(sequence, [1] * 30))
        assert str(error) == (
            f"tokens: expected at most 5 device blocks for sequence {sequence}, got 10: {NEVER} as a whole; commit "
            "what it has, and append fewer tokens at once"
        )
        for _ in range(10):
            cache.commit(sequence)
            cache.append_tokens(sequence, [1] * 3)
        cache.release(sequence)


def test_the_group_that_needs_all_is_named() -> None:
    """Commits help a window, and not the group after it."""
    groups = [LayerGroup(small_layout(T), window=8), LayerGroup(small_layout(T))]
    with KVCacheManager(groups=groups, device_blocks=[4, 6], device="cpu", max_sequence_tokens=400) as cache:
        sequence = cache.add_sequence(list(range(12)))
        error = refused(cache, lambda: cache.append_tokens(sequence, [1] * 20))
        assert (
            str(error) == f"tokens: expected at most 6 device blocks of group 1 for sequence {sequence}, got 8: {NEVER}"
        )
        error = refused(cache, lambda: cache.append_tokens(sequence, [1] * 8))
        assert "at most 4 device blocks of group 0" in str(error) and "as a whole" in str(error)
        cache.release(sequence)


def test_a_state_that_others_find_needs_a_block_beside_the_next_one() -> None:
    """The running state is in the cache, so it cannot move on: it stays, beside a snapshot and the next running one."""
    for states, fits in ((2, False), (3, True)):
        groups = [group_of("full"), LayerGroup(small_layout(1), kind="recurrent", snapshot_tokens=2 * T)]
        with KVCacheManager(groups=groups, device_blocks=[8, states], device="cpu") as cache:
            sequence = cache.add_sequence(list(range(T + 1)))
            cache.rewind(sequence, 1)
            cache.commit(sequence)
            grow = partial(cache.append_tokens, sequence, [1] * 3 * T)
            if fits:
                grow()
            else:
                error = refused(cache, grow)
                assert "at most 2 device blocks of group 1" in str(error) and "got 3" in str(error)
            cache.release(sequence)
