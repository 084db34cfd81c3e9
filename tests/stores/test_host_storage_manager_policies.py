"""How much a HostStorageManager loads and saves: what the policy of a store takes, what has room, no more than a quota,
and what is evicted next."""

from __future__ import annotations

import pytest

from kvpool.storage import MemoryStore
from kvpool.storage.choice import Load
from tests.stores.host_lab import ABSENT, HERE, Engine, Make
from tests.stores.lab import BLOCK_BYTES, Gate, Wrong, content, fail, names


class Some:
    """A policy that takes that many blocks of each hit, for that many seconds. It records the outcomes of its loads."""

    def __init__(self, blocks: int, seconds: float = 1000.0) -> None:
        self.blocks, self.seconds, self.asked, self.outcomes = blocks, seconds, list[int](), list[tuple[int, float]]()
        self.busy: list[tuple[int, float, float]] = []

    def choose(self, there: int, ahead_bytes: int = 0, spare: float = 0.0, waited: float = 0.0) -> Load:
        self.asked.append(there)
        self.busy.append((ahead_bytes, spare, waited))
        return Load(min(self.blocks, there), until=self.seconds)

    def late(self, load: Load, came: int, elapsed: float) -> bool:
        return False

    def end(self, load: Load, came: int, seconds: float, queued: float = 0.0) -> None:
        self.outcomes.append((came, seconds))

    def drop(self, load: Load) -> None:
        self.outcomes.append((-1, 0.0))


@pytest.mark.parametrize(("takes", "here"), [(0, 0), (3, 3), (9, 5)])
def test_a_hit_loads_as_many_blocks_as_its_policy_takes(make: Make, store: Wrong, takes: int, here: int) -> None:
    policy = Some(takes)
    engine = make(policies=[policy])
    engine.saved(5)
    store.before["load"] = lambda: setattr(engine, "now", engine.now + 0.5)
    assert engine.ask(5) == [HERE] * here + [ABSENT] * (5 - here)
    engine.read(here)
    assert policy.asked == [5] and policy.outcomes == ([(here, 0.5)] if here else [])
    stats = engine.stats
    assert stats.loaded_blocks == here and stats.missed == ({"declined": 5 - here} if here < 5 else {})


def test_the_keys_of_each_hit_are_judged_together_and_apart_from_others(make: Make) -> None:
    """A long prompt is worth a load where a short one is not."""
    policy = Some(9)
    engine = make(policies=[policy])
    engine.saved(6)
    for key in names(4):
        engine.manager.find(key, "long")
    engine.manager.lookup(names(2, 4), "short")
    assert engine.ask(6) == [HERE] * 6
    # Two threads of the store's worker answer, in either order.
    assert sorted(policy.asked) == [2, 4]


def test_a_policy_learns_what_is_under_way_and_how_long_the_engine_is_busy(make: Make, store: Wrong) -> None:
    policy, gate = Some(2), Gate()
    engine = make(policies=[policy], load_seconds=60.0, spare=lambda: 7.0)
    engine.saved(4)
    store.before["load"] = gate
    engine.held(gate, 2)
    engine.now += 3.0
    engine.manager.lookup(names(2, 2))
    engine.until(lambda: len(policy.busy) == 2)
    gate.open()
    assert policy.busy == [(0, 7.0, 0.0), (2 * BLOCK_BYTES, 7.0, 3.0)]
    engine.until(lambda: engine.stats.loaded_blocks == 4)


def test_what_a_policy_raises_ends_the_keys_that_it_was_asked_about(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Some(2)
    monkeypatch.setattr(policy, "choose", fail)
    engine = make(policies=[policy])
    engine.saved(3)
    with pytest.raises(OSError, match="I/O"):
        engine.ask(3)
    assert engine.stats.missed == {"failed": 3}


def test_a_load_without_room_does_not_inform_its_policy(make: Make) -> None:
    policy = Some(9)
    engine = make(blocks=4, policies=[policy])
    engine.saved(2)
    engine.write(4, first=10)
    with engine.manager.pin(names(4, 10)):
        assert engine.ask(2) == [ABSENT] * 2
    assert policy.outcomes == [(-1, 0.0)] and engine.stats.missed == {"crowded": 2}


def test_a_policy_is_asked_about_what_has_room_and_nothing_else_counts_against_the_store(
    make: Make, store: Wrong
) -> None:
    """Else a store seems slow that has given all that was wanted of it."""
    policy = Some(9)
    engine = make(policies=[policy], load_share=0.25)
    engine.saved(6)
    assert engine.ask(6) == [HERE] * 4 + [ABSENT] * 2
    assert policy.asked == [4] and policy.outcomes == [(4, 0.0)]
    assert engine.stats.missed == {"crowded": 2}


@pytest.mark.parametrize("two_stores", [False, True])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_prompt_that_was_saved_loses_its_end_first(make: Make, store: Wrong, pieces: int, two_stores: bool) -> None:
    """A lease counts as a use. Saves have many of them, in any order."""
    stores = [store, Wrong(MemoryStore(64 * BLOCK_BYTES))] if two_stores else [store]
    engine, size = make(*stores, blocks=12), 12 // pieces
    for first in range(0, 12, size):
        engine.write(size, first)
    if pieces > 1:
        engine.manager.touch(names(12))
    engine.drain()
    assert engine.stats.saved_blocks == 12 * len(stores)
    assert engine.cache.reserve(names(4, 100)).evicted == names(4, 8)[::-1]
    engine.cache.abort(names(4, 100))


def test_what_came_and_nobody_reads_makes_room_after_a_while(make: Make) -> None:
    """As the chunks of a request that was aborted."""
    engine = make(blocks=16, load_share=0.25, retry_seconds=0.0)
    for first in range(0, 16, 4):
        engine.saved(4, first)
    for first in range(0, 12, 4):
        assert engine.ask(4, first) == [HERE] * 4
        assert engine.ask(4, first + 4) == [ABSENT] * 4
        engine.now += 10.0


# -- a prompt that is longer than the host ---------------------------------------------------------------


@pytest.fixture
def small(make: Make, store: Wrong) -> Engine:
    """An engine with 12 blocks, over a store that has 100 blocks of a prompt. A window has 6."""
    big = make(blocks=128)
    big.saved(100)
    big.close()
    return make(store, blocks=12)


@pytest.mark.parametrize("blocks", [2, 12, 25])
def test_a_prompt_of_any_length_comes_through_a_small_host(
    make: Make, small: Engine, store: Wrong, blocks: int
) -> None:
    """What the engine has read makes room for what comes next. Other requests read and write meanwhile."""
    engine = small if blocks == 12 else make(store, blocks=blocks)
    assert engine.take(100) == 100
    if blocks > 2:
        engine.write(blocks // 4, first=500)
        assert engine.take(100) == 100
    stats = engine.stats
    assert stats.loaded_blocks >= 100 and stats.loaded_blocks + sum(stats.missed.values()) == stats.asked


def test_while_there_is_no_room_no_store_is_asked(small: Engine, store: Wrong) -> None:
    assert small.ask(100) == [HERE] * 6 + [ABSENT] * 94
    asked, refused = store.calls.count("find"), small.stats.refused
    for _ in range(20):
        assert small.look(100) == [HERE] * 6 + [ABSENT] * 94
        small.manager.poll()
    assert store.calls.count("find") == asked
    stats = small.stats
    assert stats.refused == refused + 20 * 94, "each answer that no store was asked for is counted"
    assert stats.loaded_blocks + sum(stats.missed.values()) == stats.asked
    small.read(2)
    assert small.ask(100) == [HERE] * 8 + [ABSENT] * 92


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_store_that_fails_in_a_window_ends_the_prompt_there(small: Engine, store: Wrong, how: str) -> None:
    """What came before is right, and nobody gets the blocks that a call may still write."""
    small.ask(100)
    small.read(6)
    gate = Gate()
    store.before["load"] = fail if how == "dies" else gate
    small.manager.lookup(names(94, 6))
    if how == "hangs":
        small.until(gate.reached.is_set)
        small.later(3)
    small.until(lambda: small.stats.searching == 0)
    assert small.look(6, 6) == [ABSENT] * 6
    hung = small.stats.hung
    assert hung == (6 if how == "hangs" else 0)
    small.write(12 - hung, first=500)
    small.read(12 - hung, first=500)
    gate.open()
    small.drain()
    assert small.stats.loading == 0
    small.read(12 - hung, first=500)
    del store.before["load"]
    assert small.look(6, 6) == [ABSENT] * 6, "the one that asked is notified once"
    small.now += 20.0
    assert small.take(100) == 100


# -- what is evicted next --------------------------------------------------------------------------------


def test_what_came_from_a_store_is_not_saved_before_it_goes(small: Engine, make: Make) -> None:
    engine = make(blocks=8, save="evict", load_share=1.0)
    assert engine.ask(8) == [HERE] * 8 and engine.manager.drain(600)
    assert engine.stats.saved_blocks == 0


def test_saving_what_goes_next_changes_no_order_of_eviction(make: Make) -> None:
    gone = []
    for save in ("evict", "reuse"):
        engine = make(Wrong(MemoryStore(64 * BLOCK_BYTES)), blocks=8, save=save, save_share=1.0)
        evicted: list[bytes] = []
        for first in range(0, 64, 4):
            taken = engine.cache.reserve(names(4, first))
            evicted += taken.evicted
            engine.manager.publish(taken.keys)
            engine.drain()
            engine.cache.touch(names(1, first))
        gone.append(evicted)
    assert gone[0] == gone[1] and len(gone[0]) == 56


@pytest.mark.parametrize("save", ["commit", "reuse", "evict"])
def test_what_is_published_as_unsaved_reaches_no_store(make: Make, save: str) -> None:
    engine = make(blocks=8, save=save, save_share=1.0)
    taken = engine.cache.reserve(names(4))
    for row, number in zip(taken.blocks.tolist(), range(4), strict=True):
        engine.tier.blocks[row] = content(number)
    engine.manager.publish(taken.keys, unsaved=names(2))
    if save == "reuse":
        engine.read(4)
    engine.write(4, first=50)
    engine.drain()
    engine.cache.forget(names(8))
    assert engine.ask(4) == [ABSENT, ABSENT, HERE, HERE]
    engine.read(2, first=2)


def test_a_store_that_answers_out_of_order_brings_each_block_to_its_place(small: Engine, store: Wrong) -> None:
    gate = Gate()
    held = iter([gate])
    store.before["load"] = lambda: next(held, lambda: None)()
    small.manager.lookup(names(3))
    small.until(gate.reached.is_set)
    small.manager.lookup(names(3, 3))
    small.until(lambda: small.look(3, 3) == [HERE] * 3)
    assert HERE not in small.look(3), "what was asked for first comes last"
    small.read(3, 3)
    gate.open()
    small.until(lambda: small.look(3) == [HERE] * 3)
    small.read(6)
