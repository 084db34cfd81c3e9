"""Blocks that an engine keeps in a store by calls that wait: right bytes or none, and no errors."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs cryptography: pip install '.[stores]'")

from kvpool.integrations.options import EngineOptions
from kvpool.integrations.staged import StagedBlocks
from kvpool.integrations.staged import _Hits as Hits
from kvpool.storage import MemoryStore
from kvpool.storage.choice import Load, LoadOrCompute
from tests.stores.lab import BLOCK_BYTES, IDENTITY, Gate, Wrong, content, fail, names

Open = Callable[..., StagedBlocks]


@pytest.fixture
def store() -> Wrong:
    return Wrong(MemoryStore(1 << 20))


@pytest.fixture
def make(store: Wrong) -> Iterator[Open]:
    opened = []

    def make(rows: int = 8, **more: Any) -> StagedBlocks:
        seconds = dict.fromkeys(("find_seconds", "load_seconds", "save_seconds"), 600.0)
        options = EngineOptions(staging_bytes=rows * BLOCK_BYTES, **seconds, **more)
        blocks = StagedBlocks(store, BLOCK_BYTES, IDENTITY, options)
        opened.append(blocks)
        return blocks

    yield make
    for blocks in opened:
        blocks.close()


def save(blocks: StagedBlocks, count: int, first: int = 0) -> list[bool]:
    def fill(place: int, row: Any) -> None:
        row[:] = content(first + place)

    return blocks.save(names(count, first), fill)


def load(blocks: StagedBlocks, count: int, first: int = 0) -> dict[int, np.ndarray]:
    """The blocks that came, by number."""
    rows: dict[int, np.ndarray] = {}
    came = blocks.load(names(count, first), lambda place, row: rows.update({first + place: row.copy()}))
    assert sorted(rows) == [first + place for place, ok in enumerate(came) if ok]
    return rows


def assert_right(rows: dict[int, np.ndarray]) -> None:
    for number, row in rows.items():
        assert np.array_equal(row, content(number)), number


def test_room_after_rows_counts_as_memory_for_staging(make: Open, store: Wrong) -> None:
    vars(store)["row_padding"] = 16
    blocks = make(rows=8)
    assert all(save(blocks, 5)) and len(load(blocks, 5)) == 5
    assert blocks.worker.memory.strides[0] * len(blocks.worker.memory) <= 8 * BLOCK_BYTES


def test_more_blocks_than_rows_are_saved_and_loaded_byte_for_byte(make: Open) -> None:
    blocks = make(rows=4)
    assert all(save(blocks, 15))
    assert blocks.find(names(17)) == [True] * 15 + [False] * 2
    rows = load(blocks, 17)
    assert sorted(rows) == list(range(15))
    assert_right(rows)
    assert not blocks.troubles


def test_wrong_bytes_are_not_handed_over(make: Open, store: Wrong, caplog: pytest.LogCaptureFixture) -> None:
    blocks = make()
    save(blocks, 3)

    def swap(answer: Any) -> Any:
        store.memory[5:7] = store.memory[[6, 5]]  # of the last rows, which are lent first
        return answer

    store.after["load"] = swap
    with caplog.at_level(logging.WARNING, "kvpool.integrations"):
        rows = load(blocks, 3)
        save(blocks, 3)
        load(blocks, 3)
    assert sorted(rows) == [2]
    assert_right(rows)
    assert blocks.troubles["load", "damaged"] == 4
    assert len([record for record in caplog.records if "damaged" in record.getMessage()]) == 1


def test_a_store_that_hangs_keeps_its_rows_and_cannot_reach_what_the_engine_uses(make: Open, store: Wrong) -> None:
    blocks = make(rows=4)
    save(blocks, 2)
    gate = Gate()
    store.before["load"], blocks.seconds["load"] = gate, 0.05
    while not gate.reached.is_set():
        assert load(blocks, 2) == {}
        blocks.worker.health.resume()
    while not blocks.troubles["load", "without rows"]:
        assert load(blocks, 2) == {}
        blocks.worker.health.resume()
    del store.before["load"]
    assert load(blocks, 2) == {}, "all rows belong to calls that hang"
    assert blocks.troubles["load", "late"] >= 2
    gate.open()
    blocks.seconds["load"] = 60.0
    assert blocks.worker.drain(600)
    rows = load(blocks, 2)
    assert len(rows) == 2
    assert_right(rows)


def test_a_store_from_which_nothing_comes_is_asked_no_more_for_a_while(make: Open, store: Wrong) -> None:
    blocks = make()
    save(blocks, 2)

    store.before["find"] = fail
    assert blocks.find(names(2)) == [False, False] and blocks.worker.suspended
    calls = len(store.calls)
    assert blocks.find(names(2)) == [False, False] and load(blocks, 2) == {}
    assert len(store.calls) == calls
    assert blocks.troubles["load", "suspended"] == 2
    assert all(save(blocks, 2, first=2))
    del store.before["find"]
    blocks.worker.health.resume()
    assert blocks.find(names(4)) == [True] * 4 and not blocks.worker.suspended


@pytest.mark.parametrize("when", ["fill", "put"])
def test_an_error_of_a_copy_raises_nothing_and_gives_the_rows_back(when: str, make: Open) -> None:
    blocks = make(rows=2)
    save(blocks, 1)

    def broken(place: int, row: Any) -> None:
        raise RuntimeError("no memory")

    for _ in range(3):
        names_ = names(1, 0 if when == "put" else 7)
        assert (blocks.load if when == "put" else blocks.save)(names_, broken) == [False]
    assert len(load(blocks, 1)) == 1
    assert [trouble for _, trouble in blocks.troubles] == ["RuntimeError"]


def test_what_was_cleared_has_left_the_store_and_a_closed_one_answers_without_errors(make: Open, store: Wrong) -> None:
    """A process that opens it later finds nothing."""
    blocks = make()
    save(blocks, 2)
    assert blocks.clear() and not store.inner.stats()["blocks"] and not blocks.troubles
    assert blocks.find(names(2)) == [False, False] and load(blocks, 2) == {}
    assert all(save(blocks, 2)) and len(load(blocks, 2)) == 2
    blocks.close()
    assert blocks.find(names(1)) == [False] and load(blocks, 1) == {} and save(blocks, 1) == [False]


def test_a_clear_says_if_the_store_has_not_dropped_the_blocks(make: Open, store: Wrong) -> None:
    blocks = make()
    save(blocks, 2)
    blocks.seconds["save"] = 0.05

    store.before["clear"] = fail
    assert not blocks.clear() and blocks.find(names(2)) == [False, False]
    blocks.seconds["save"] = 60.0
    del store.before["clear"]
    assert blocks.clear() and not store.inner.stats()["blocks"]


def test_a_store_that_cannot_drop_them_hides_them(make: Open, store: Wrong) -> None:
    store.clears_prefix = 0
    blocks = make()
    save(blocks, 2)
    assert not blocks.clear() and blocks.find(names(2)) == [False, False] and all(save(blocks, 2))
    assert blocks.troubles["clear", "not supported"] == 1


def test_what_was_copied_before_a_clear_is_not_saved_after_it(make: Open, store: Wrong) -> None:
    """Another thread of the engine clears, while this one copies pages of the old weights."""
    blocks = make()
    results = [blocks.save(names(2), lambda place, row: (row.fill(7), place or blocks.clear()))]  # type: ignore[func-returns-value]
    assert results == [[False, False]] and not store.inner.stats()["blocks"] and blocks.find(names(2)) == [False, False]
    assert blocks.worker.free("load") == blocks.worker.slots, "the rows are given back"


def test_what_is_saved_after_a_clear_is_found_after_a_restart(make: Open, store: Wrong) -> None:
    blocks = make()
    save(blocks, 2)
    assert blocks.clear() and all(save(blocks, 3, 10))
    blocks.close()
    rows = load(make(), 14)
    assert sorted(rows) == [10, 11, 12]
    assert_right(rows)


def test_blocks_for_which_no_time_is_left_are_not_copied(make: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, passed, copied = make(rows=2), 0.0, []
    clock = blocks.worker._clock
    for part in (blocks.worker, blocks.worker._queue):
        monkeypatch.setattr(part, "_clock", lambda: clock() + passed)

    def slow(place: int, row: Any) -> None:
        nonlocal passed
        copied.append(place)
        passed += 700.0

    assert blocks.save(names(3), slow) == [False] * 3
    assert copied == [0] and blocks.troubles["save", "late"] == 3


# -- hits against the engine -----------------------------------------------------------------------------


def test_a_hit_that_the_engine_computes_sooner_is_not_found(make: Open, store: Wrong) -> None:
    """A block takes a microsecond to compute. Some probes at most find a store that is slower."""
    blocks = make(load="faster", compute_seconds=1e-6)
    assert all(save(blocks, 6))
    hits = 0
    for _ in range(200):
        there = blocks.find_hit(names(6))
        assert there in ([True] * 6, [False] * 6)
        hits += there[0]
        if there[0]:
            assert not load(blocks, 6), "it is given up when the engine would have computed it"
    assert hits < 20 and blocks.declined == 6 * (200 - hits)
    assert not blocks.worker.suspended and blocks.find(names(6)) == [True] * 6


def test_a_hit_that_the_store_brings_sooner_is_loaded(make: Open) -> None:
    blocks = make(load="faster", compute_seconds=60.0)
    assert all(save(blocks, 6))
    for _ in range(20):
        assert blocks.find_hit(names(8)) == [True] * 6 + [False] * 2
        # As engines do: in several calls.
        rows = load(blocks, 4) | load(blocks, 2, first=4)
        assert sorted(rows) == list(range(6))
        assert_right(rows)
    assert blocks.declined == 0 and not blocks.troubles


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_store_that_fails_under_a_hit_costs_no_more_than_the_engine(make: Open, store: Wrong, how: str) -> None:
    """Its first load is given up at half of what the engine takes, and rows of the call that hangs are lent to nobody
    meanwhile."""
    blocks, gate = make(load="faster", compute_seconds=2.0), Gate()
    assert all(save(blocks, 8))
    store.before["load"] = gate if how == "hangs" else fail
    assert blocks.find_hit(names(8)) == [True] * 8
    assert load(blocks, 8) == {}
    free = len(blocks.worker.take("load", 8, 0.0))
    assert free == (0 if how == "hangs" else 8)
    gate.open()


class CountingPolicy(LoadOrCompute):
    """Counts the loads that it has learned from, and those that were dropped."""

    learned = dropped = 0

    def end(self, *arguments: Any) -> None:
        self.learned += 1
        super().end(*arguments)

    def drop(self, load: Load) -> None:
        self.dropped += 1
        super().drop(load)


@pytest.fixture
def hits() -> Hits:
    """Hits of a store that has brought 8 blocks in 1 ms, ten times. The engine computes a block in 1 ms."""
    policy = CountingPolicy(1000.0, BLOCK_BYTES, 1)
    hits = Hits(policy, BLOCK_BYTES, 5.0)
    for number in range(10):
        assert hits.worth(names(8), float(number)) == 8
        hits.until(names(8))
        hits.loaded(dict.fromkeys(names(8), True), float(number), number + 0.001)
    assert (policy.learned, policy.dropped) == (10, 0)
    return hits


def test_abandoned_hits_shut_out_others_for_no_longer_than_they_would_be_waited_for(hits: Hits) -> None:
    assert [hits.worth(names(8, 8 * number), 20.0) for number in range(1, 100)][-1] == 0
    later = 20.1
    for number in range(100, 110):
        assert hits.worth(names(8, 8 * number), later) == 8
        hits.until(names(8, 8 * number))
        hits.loaded(dict.fromkeys(names(8, 8 * number), True), later, later + 0.001)
        later += 1.0


def test_hits_that_are_left_shut_out_nobody_and_say_nothing_of_their_store(hits: Hits) -> None:
    policy = hits._policy
    assert isinstance(policy, CountingPolicy)
    for number in range(1, 100):
        assert hits.worth(names(8, 8 * number), 20.0) == 8
        hits.leave(names(8, 8 * number), 20.0)
    assert (policy.learned, policy.dropped) == (10, 99)
    hits.leave(names(800), 20.0)
    assert policy.dropped == 99, "each has ended once"


def test_a_hit_of_which_a_part_is_left_is_loaded_and_ends_with_the_rest(hits: Hits) -> None:
    policy = hits._policy
    assert isinstance(policy, CountingPolicy)
    assert hits.worth(names(8), 20.0) == 8
    hits.leave(names(3, 5), 20.0)
    assert hits.until(names(5)) < math.inf and hits.until(names(3, 5)) == math.inf
    hits.loaded(dict.fromkeys(names(5), True), 20.0, 20.001)
    hits.leave(names(5), 20.002)
    assert hits.until(names(8)) == math.inf
    assert (policy.learned, policy.dropped) == (10, 1)


def test_a_load_that_begins_when_its_hit_has_lapsed_brings_nothing(hits: Hits) -> None:
    assert hits.worth(names(8), 20.0) == 8
    assert hits.worth(names(8, 8), 21.0) == 8
    assert hits.until(names(8)) < 21.0
    hits.loaded(dict.fromkeys(names(8), False), 21.0, 21.0)
    assert hits.until(names(8)) == math.inf, "it has ended"


def test_a_load_under_way_does_not_lapse_and_its_store_is_judged_by_it(hits: Hits) -> None:
    policy = hits._policy
    assert isinstance(policy, CountingPolicy)
    assert hits.worth(names(8), 20.0) == 8
    hits.until(names(8))
    hits.worth(names(8, 8), 21.0)
    hits.loaded(dict.fromkeys(names(8), False), 20.0, 21.0)
    assert (policy.learned, policy.dropped) == (11, 0)


def test_a_hit_that_nobody_loads_is_dropped_and_asked_for_again(make: Open) -> None:
    """As that of a request that was aborted: it says nothing of the store, and its risk comes back."""
    blocks = make(load="faster", compute_seconds=60.0)
    assert all(save(blocks, 6))
    for _ in range(2):
        assert blocks.find_hit(names(6)) == [True] * 6 and len(load(blocks, 6)) == 6
    for _ in range(200):
        assert blocks.find_hit(names(6)) == [True] * 6
    assert len(load(blocks, 6)) == 6


def test_what_was_left_is_found_again(make: Open) -> None:
    for load in ("always", "faster"):
        blocks = make(load=load, compute_seconds=60.0)
        assert all(save(blocks, 6))
        assert blocks.find_hit(names(6)) == [True] * 6
        blocks.leave(names(6))
        assert blocks.find_hit(names(6)) == [True] * 6
