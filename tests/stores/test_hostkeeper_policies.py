"""How much a HostKeeper loads and saves: what the policy of a store takes, what has room, no more than a quota."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool import HostCache
from kvpool.keepers import LoadOrCompute
from kvpool.keepers.choice import Load
from kvpool.stores import MemoryStore
from tests.stores.hostkeeping import Engine
from tests.stores.lab import BLOCK_BYTES, Gate, Wrong, names

ABSENT, HERE = HostCache.ABSENT, HostCache.HERE


class Some:
    """A policy that takes so many blocks of each hit, for so many seconds. It notes what became of its loads."""

    def __init__(self, blocks: int, seconds: float = 1000.0) -> None:
        self.blocks, self.seconds, self.asked, self.told = blocks, seconds, list[int](), list[tuple[int, float]]()

    def choose(self, there: int, ahead_bytes: int = 0, spare: float = 0.0) -> Load:
        self.asked.append(there)
        return Load(min(self.blocks, there), until=self.seconds)

    def late(self, load: Load, came: int, elapsed: float) -> bool:
        return False

    def end(self, load: Load, came: int, seconds: float, queued: float = 0.0) -> None:
        self.told.append((came, seconds))

    def drop(self, load: Load) -> None:
        self.told.append((-1, 0.0))


@pytest.mark.parametrize(("takes", "here"), [(0, 0), (3, 3), (9, 5)])
def test_of_a_hit_as_many_blocks_come_as_its_policy_takes(
    make: Callable[..., Engine], store: Wrong, takes: int, here: int
) -> None:
    policy = Some(takes)
    engine = make(policies=[policy])
    engine.saved(5)
    store.before["load"] = lambda: setattr(engine, "now", engine.now + 0.5)
    assert engine.ask(5) == [HERE] * here + [ABSENT] * (5 - here)
    engine.read(here)
    assert policy.asked == [5] and policy.told == ([(here, 0.5)] if here else [])
    stats = engine.keeper.stats()
    assert stats.loaded == here and stats.missed == ({"declined": 5 - here} if here < 5 else {})


def test_the_keys_of_each_hit_are_judged_together_and_apart_from_others(make: Callable[..., Engine]) -> None:
    """A long prompt is worth a load where a short one is not."""
    policy = Some(9)
    engine = make(policies=[policy])
    engine.saved(6)
    for key in names(4):
        engine.keeper.find(key, "long")
    engine.keeper.lookup(names(2, 4), "short")
    assert engine.ask(6) == [HERE] * 6
    assert policy.asked == [4, 2]


def test_a_load_ends_when_its_policy_has_no_more_time(make: Callable[..., Engine], store: Wrong) -> None:
    policy, gate = Some(2, seconds=0.5), Gate()
    engine = make(policies=[policy], load_seconds=60.0)
    engine.saved(2)
    store.before["load"] = gate
    engine.keeper.lookup(names(2))
    engine.until(gate.reached.is_set)
    engine.later(1)
    engine.until(lambda: engine.keeper.lookup(names(2)).tolist() == [ABSENT] * 2)
    assert engine.keeper.stats().missed["late"] == 2 and policy.told == [(0, 1.0)]
    gate.open()


def test_what_has_no_room_tells_its_policy_nothing_of_the_store(make: Callable[..., Engine]) -> None:
    policy = Some(9)
    engine = make(blocks=4, policies=[policy])
    engine.saved(2)
    engine.write(4, first=10)
    with engine.keeper.pin(names(4, 10)):
        assert engine.ask(2) == [ABSENT] * 2
    assert policy.told == [(-1, 0.0)] and engine.keeper.stats().missed == {"crowded": 2}


def test_a_policy_is_asked_about_what_has_room_and_nothing_else_counts_against_the_store(
    make: Callable[..., Engine], store: Wrong
) -> None:
    """Else a store seems slow that has given all that was wanted of it."""
    policy = Some(9)
    engine = make(policies=[policy], load_share=0.25)
    engine.saved(6)
    assert engine.ask(6) == [HERE] * 4 + [ABSENT] * 2
    assert policy.asked == [4] and policy.told == [(4, 0.0)]
    assert engine.keeper.stats().missed == {"crowded": 2}


def test_a_store_that_loses_to_the_engine_is_left_alone(make: Callable[..., Engine], store: Wrong) -> None:
    """A load takes 100 s, and to compute a key 10 ms."""
    engine = make(blocks=64, policies=[LoadOrCompute(100.0, BLOCK_BYTES, 1)], load_seconds=1e6, retry_seconds=0.0)
    engine.saved(32)
    store.before["load"] = lambda: setattr(engine, "now", engine.now + 100.0)
    for first in range(0, 32, 4):
        engine.keeper.lookup(names(4, first))
        assert engine.keeper.drain(1e6)
        engine.cache.forget(names(4, first))
    assert engine.keeper.stats().missed["declined"] >= 24


@pytest.mark.parametrize("two_stores", [False, True])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_prompt_that_was_saved_loses_its_end_first(
    make: Callable[..., Engine], store: Wrong, pieces: int, two_stores: bool
) -> None:
    """A lease counts as a use. Saves have many of them, in any order."""
    stores = [store, Wrong(MemoryStore(64 * BLOCK_BYTES))] if two_stores else [store]
    engine, size = make(*stores, blocks=12), 12 // pieces
    for first in range(0, 12, size):
        engine.write(size, first)
    if pieces > 1:
        engine.keeper.touch(names(12))
    assert engine.keeper.drain(600) and engine.keeper.stats().saved == 12 * len(stores)
    assert engine.cache.reserve(names(4, 100)).evicted == names(4, 8)[::-1]
    engine.cache.abort(names(4, 100))


def test_a_cache_has_no_more_than_its_quota_in_a_store(make: Callable[..., Engine], store: Wrong) -> None:
    engine = make(quota=4 * BLOCK_BYTES)
    engine.write(10)
    assert engine.keeper.drain(600) and store.stats()["blocks"] == 4
    stats = engine.keeper.stats()
    assert stats.saved + stats.unsaved.get("quota", 0) == 10
    nothing = make(Wrong(MemoryStore(64 * BLOCK_BYTES)), quota=1)
    nothing.write(3)
    assert nothing.keeper.drain(600) and nothing.keeper.stats().unsaved == {"quota": 3}


def test_what_came_and_nobody_reads_makes_room_after_a_while(make: Callable[..., Engine]) -> None:
    """As the chunks of a request that was aborted."""
    engine = make(blocks=16, load_share=0.25, retry_seconds=0.0)
    for first in range(0, 16, 4):
        engine.saved(4, first)
    for first in range(0, 16, 4):
        assert engine.ask(4, first) == [HERE] * 4
        assert engine.ask(4, (first + 4) % 16) == [ABSENT] * 4
        engine.cache.forget(names(4, first))
        engine.now += 10.0
