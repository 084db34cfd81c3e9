"""The scheduler's side of the plug-in for vLLM, called as vLLM calls it.

Cases of vLLM's own tests are restated here, those of ``tests/v1/kv_offload/cpu/test_manager.py`` that are about any
backend. Which host block a chunk gets is nobody's business but the tier's, and is not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

vllm = pytest.importorskip(
    "kvpool.integrations.vllm.spec",
    reason="needs vLLM: python -m tests.engines build, then python -m tests.engines test",
    exc_type=ImportError,
)

from vllm.v1.kv_offload.base import make_offload_key  # noqa: E402

from tests.engines.vllm_lab import (  # noqa: E402
    HIT,
    MISS,
    PENDING,
    PROMPT,
    Clock,
    Manager,
    keys,
    positioned,
    request,
)

Make = Callable[..., Manager]


@pytest.fixture
def make() -> Iterator[Make]:
    opened: list[Manager] = []

    def build(chunks: int = 4, events: int = 64, **options: Any) -> Manager:
        opened.append(Manager(chunks, events, **options))
        return opened[-1]

    yield build
    for manager in opened:
        manager.cache.verify()
        manager.real.shutdown()


def test_a_chunk_is_pending_until_its_store_is_complete(make: Make) -> None:
    manager = make()
    assert manager.prepare_store(1, 2)[0] == [1, 2]
    assert manager.lookup(1, 2, 3) == [PENDING, PENDING, MISS]
    assert manager.events() == []
    manager.complete_store(1, 2)
    assert manager.lookup(1, 2, 3) == [HIT, HIT, MISS]
    assert manager.events() == [(False, {1, 2})]


def test_the_least_recently_used_are_evicted_and_named(make: Make) -> None:
    manager = make()
    manager.store(1, 2)
    stored, _, evicted = manager.prepare_store(2, 3, 4, 5)
    assert (stored, evicted) == ([3, 4, 5], [1])
    assert manager.prepare_store(1, 6) is None
    manager.complete_store(3, 4, 5)
    assert manager.lookup(1, 2, 3, 4, 5) == [MISS, HIT, HIT, HIT, HIT]
    assert manager.events() == [(False, {1, 2}), (True, {1}), (False, {3, 4, 5})]


def test_a_chunk_that_two_requests_load_is_held_by_both(make: Make) -> None:
    manager = make(2)
    blocks = manager.store(1, 2)
    assert manager.load("a", 1, 2) == manager.load("b", 1, 2) == blocks
    manager.complete_load("a", 1, 2)
    assert manager.prepare_store(3) is None
    manager.complete_load("b", 1, 2)
    assert manager.prepare_store(3) is not None


def test_touched_chunks_are_evicted_last(make: Make) -> None:
    manager = make(3)
    manager.store(1)
    manager.store(2, 3)
    manager.real.touch(keys(1, 2), request())
    assert manager.prepare_store(4)[2] == [3]


def test_a_failed_store_leaves_nothing_and_what_was_there(make: Make) -> None:
    manager = make()
    manager.store(7)
    assert manager.prepare_store(7, 9)[0] == [9]
    manager.complete_store(7, 9, success=False)
    assert manager.lookup(7, 9) == [HIT, MISS]


@pytest.mark.parametrize("success", [True, False])
def test_a_store_that_is_not_complete_in_time_is_a_miss_and_its_block_is_not_used(make: Make, success: bool) -> None:
    clock = Clock()
    manager = make(2, clock=clock)
    _, (late,), _ = manager.prepare_store(1)
    clock.now = 59_999
    assert manager.lookup(1) == [PENDING]
    clock.now = 60_000
    assert manager.lookup(1) == [MISS]
    assert manager.counted()["vllm:kvpool_expired_stores"] == 1
    assert manager.counted() == {}, "it is counted once"
    assert manager.prepare_store(1, 2)[:2] == ([2], (1 - late,)), "a worker may still write the block of 1"
    assert manager.prepare_store(3) is None
    manager.complete_store(1, 2, success=success)
    assert manager.lookup(1, 2) == [MISS, HIT if success else MISS]
    assert manager.events() == ([(False, {2})] if success else [])
    counted = manager.counted()
    assert counted.get("vllm:kvpool_stored_chunks", 0) == success
    assert counted.get("vllm:kvpool_failed_stores", 0) == (0 if success else 2)
    assert late in manager.store(1, 3)
    assert manager.lookup(1, 3) == [HIT, HIT]


def test_a_store_whose_deadline_passes_while_it_is_completed_is_dropped(make: Make) -> None:
    clock = Clock()
    manager = make(4, clock=clock)
    manager.prepare_store(1)
    clock.now = 1
    manager.prepare_store(2)
    clock.steps = [59_999, 60_000, 60_000]
    manager.complete_store(1, 2)
    assert not clock.steps
    assert manager.lookup(1, 2) == [MISS, HIT]
    counted = manager.counted()
    assert (counted["vllm:kvpool_stored_chunks"], counted["vllm:kvpool_expired_stores"]) == (1, 1)
    assert manager.prepare_store(1)[0] == [1]


def test_a_reset_gives_back_the_blocks_of_stores_that_took_too_long(make: Make) -> None:
    clock = Clock()
    manager = make(2, clock=clock)
    manager.prepare_store(1, 2)
    clock.now = 60_000
    assert manager.lookup(1, 2) == [MISS, MISS]
    manager.real.reset_cache()
    manager.complete_store(1, 2)
    manager.store(1, 2)
    assert manager.lookup(1, 2) == [HIT, HIT]


def test_a_chunk_whose_copy_failed_in_a_worker_is_not_found(make: Make) -> None:
    """vLLM completes its store as if it had succeeded."""
    manager = make()
    _, blocks, _ = manager.prepare_store(1, 2, 3)
    manager.real.report(vllm.WorkerReport(failed_blocks={blocks[1], 1000}))
    manager.complete_store(1, 2, 3)
    assert manager.lookup(1, 2, 3) == [HIT, MISS, HIT]
    assert manager.counted()["vllm:kvpool_failed_stores"] == 1
    manager.complete_store(2)
    manager.store(2)
    assert manager.lookup(2) == [HIT], "the block is not lost for ever"


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_host_blocks_are_in_the_order_of_the_keys(make: Make, order: tuple[int, ...]) -> None:
    manager = make()
    blocks = manager.store(0, 1, 2)
    assert manager.load("a", *order) == tuple(blocks[number] for number in order)
    manager.complete_load("a", *order)


def test_a_load_that_failed_is_not_found_again(make: Make) -> None:
    """Else vLLM would load, fail, and load again."""
    manager = make()
    manager.store(1, 2, 3)
    manager.counted()
    manager.load("a", 1, 2)
    manager.real.load_failed("a")
    manager.complete_load("a", 1, 2)
    assert manager.lookup(1, 2, 3) == [MISS, MISS, HIT]
    counted = manager.counted()
    assert counted["vllm:kvpool_failed_loads"] == 1
    assert "vllm:kvpool_loaded_chunks" not in counted
    assert manager.prepare_store(1, 2)[0] == [1, 2]


def test_a_reset_drops_everything_while_copies_are_under_way(make: Make) -> None:
    manager = make()
    manager.store(1, 2)
    manager.load("a", 1)
    manager.prepare_store(3)
    manager.real.reset_cache()
    assert manager.lookup(1, 2, 3) == [MISS, MISS, MISS]
    assert manager.cache.stats().used == 0
    assert len(manager.prepare_store(4, 5, 6, 7)[0]) == 4


def test_a_reset_retracts_events_of_host_blocks(make: Make) -> None:
    """Even what is reported only after it: vLLM sends its own "all blocks cleared" before the events of the plug-in."""
    manager, known = make(), set[int]()
    manager.store(1, 2)
    for numbers in ((3,), (4, 5)):
        known = manager.follow(known)
        manager.store(*numbers)
        manager.real.reset_cache()
    assert manager.follow(known) == set() and manager.lookup(1, 2, 3, 4, 5) == [MISS] * 5
    manager.store(6)
    assert manager.events() == [(False, {6})]


def test_lost_events_leave_no_chunk_reported_that_has_gone(make: Make) -> None:
    manager, known = make(events=3), set[int]()
    for first in range(0, 40, 2):
        manager.store(first, first + 1)
        if first % 6 == 0:
            known = manager.follow(known)
        if first == 18:
            manager.real.reset_cache()
    manager.store(100)
    known = manager.follow(known)
    assert manager.cache.stats().events_dropped > 0
    assert known and manager.lookup(*known) == [HIT] * len(known)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("finished", ["before", "after", "never"])
def test_the_end_of_a_prompt_is_evicted_before_its_beginning(
    make: Make, known: bool, pieces: int, finished: str
) -> None:
    """vLLM stores a long prompt in pieces, and completes each with a set of keys."""
    manager, context = make(len(PROMPT)), positioned("long", known)
    size = len(PROMPT) // pieces
    parts = [keys(*PROMPT[first : first + size]) for first in range(0, len(PROMPT), size)]
    for ahead, earlier in zip([*parts, None], [None, *parts], strict=True):
        if ahead is not None:
            assert manager.real.prepare_store(ahead, context).keys_to_store == ahead
        elif finished == "before":
            manager.real.on_request_finished(context)
        if earlier is not None:
            manager.real.complete_store(set(earlier), context)
    if finished == "after":
        manager.real.on_request_finished(context)
    manager.store(*range(100, 105))
    assert manager.lookup(*PROMPT) == [HIT] * 15 + [MISS] * 5
    assert ("long" in manager.real._requests) == (finished == "never")


def test_all_groups_of_a_prompt_lose_their_ends_first(make: Make) -> None:
    """vLLM names the chunks of a store group after group. What one group lacks is of no use to the others."""
    manager, context = make(8), request("groups")
    first, second = ([make_offload_key(str(place).encode() * 8, group) for place in range(4)] for group in range(2))
    for place, both in enumerate(zip(first, second, strict=True)):
        for key in both:
            context.set_offload_key_position(key, 16 * (place + 1))
    stored = manager.real.prepare_store(first + second, context)
    assert stored.keys_to_store == first + second
    rows = dict(zip(stored.keys_to_store, stored.store_spec.blocks, strict=True))
    manager.real.complete_store(set(first + second), context)
    manager.store(100, 101)
    assert [manager.real.lookup(key, context) for key in first + second] == 2 * [HIT, HIT, HIT, MISS]
    assert manager.real.prepare_load(second[:3], context).blocks == tuple(rows[key] for key in second[:3])
    manager.real.complete_load(set(second[:3]), context)


def test_chunks_that_were_loaded_and_chunks_that_are_new_are_one_prompt(make: Make) -> None:
    manager = make(6)
    manager.store(0, 1, 2)
    manager.real.on_request_finished(request())
    context = positioned("again", True)
    manager.real.prepare_load(keys(0, 1, 2), context)
    manager.real.complete_load(set(keys(0, 1, 2)), context)
    manager.real.prepare_store(keys(3, 4, 5), context)
    manager.real.complete_store(set(keys(3, 4, 5)), context)
    manager.store(100, 101)
    assert manager.lookup(*range(6)) == [HIT] * 4 + [MISS] * 2
