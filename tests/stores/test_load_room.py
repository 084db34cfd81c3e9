"""The room for loads is what live requests account for: whoever has ended, or has taken what it wants, gives it back at
that moment, and what has come stays cached."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvpool import KVCacheManager
from kvpool.storage import MemoryStore, Prefetch, StorageManager
from kvpool.storage.store import Store
from tests.seeds import some_of
from tests.stores.host_lab import ABSENT, HERE, PENDING, Engine, Make, engines
from tests.stores.lab import Wrong, names
from tests.stores.pool_lab import (
    IDENTITY,
    fetch,
    grouped,
    make_engine,
    make_manager,
    prefetched,
    stocked,
    store,
    tokens,
    write_all,
)

SEED = 20_261
LOAD_SECONDS = 2.0


@pytest.fixture
def make() -> Iterator[Make]:
    yield from engines(Wrong(MemoryStore(1 << 20)))


def wait(engine: Engine) -> None:
    """Until the store has answered all that it was asked for, and what is searched for still waits for room."""

    def is_answered() -> bool:
        stats = engine.stats
        answers = sum(count for (kind, _), count in stats.stores[0].blocks.items() if kind == "find")
        return answers >= stats.asked and not stats.loading

    engine.until(is_answered)
    engine.manager.poll()
    engine.until(is_answered)


def settle(engine: Engine) -> None:
    """Until nothing is under way. Who waits for room waits as long as it may."""
    wait(engine)
    if engine.stats.searching:
        engine.now += LOAD_SECONDS / 2
    engine.until(lambda: not (engine.stats.searching or engine.stats.loading))


def look_up(engine: Engine, request: str, keys: list[bytes]) -> list[int]:
    """What a request finds once nothing is under way."""
    engine.manager.lookup(keys, request)
    settle(engine)
    return np.where(engine.manager.lookup(keys, request) == HERE, HERE, ABSENT).tolist()


def with_store(make: Make, count: int, blocks: int = 16, room: int = 8, event_capacity: int = 0) -> Engine:
    """An empty cache before a store with keys 0 to ``count``, with room for that many loads."""
    engine = make(blocks=blocks, load_share=room / blocks, event_capacity=event_capacity)
    for first in range(0, count, 8):
        engine.saved(8, first)
    return engine


def test_keys_of_a_request_that_ended_before_the_load_are_not_loaded(make: Make) -> None:
    engine = with_store(make, 16)
    engine.manager.lookup(names(8), "r0")
    engine.manager.finish("r0")
    engine.drain()
    assert engine.stats.loaded_blocks == engine.stats.promoted_blocks == 0
    assert look_up(engine, "r1", names(8)) == [HERE] * 8, "they may be asked for at once"


@pytest.mark.parametrize("how", ["read", "finish"])
def test_a_request_waits_for_the_room_of_another_and_loads_all(make: Make, how: str) -> None:
    engine = with_store(make, 16)
    assert look_up(engine, "r0", names(8)) == [HERE] * 8
    engine.manager.lookup(names(6, 8), "r1")
    wait(engine)
    assert set(engine.manager.lookup(names(6, 8), "r1").tolist()) == {PENDING}
    assert engine.stats.searching == 6 and engine.stats.missed == {}
    if how == "read":
        engine.manager.pin(names(8), owner="r0").close()
    else:
        engine.manager.finish("r0")
    assert look_up(engine, "r1", names(6, 8)) == [HERE] * 6
    assert engine.stats.missed == {} and engine.stats.refused == 0


def test_a_request_waits_for_room_for_half_of_its_time_and_only_once(make: Make) -> None:
    engine = with_store(make, 24)
    assert look_up(engine, "r0", names(8)) == [HERE] * 8
    engine.manager.lookup(names(8, 8), "r1")
    wait(engine)
    engine.now += LOAD_SECONDS / 2 - 0.01
    engine.manager.poll()
    assert engine.stats.searching == 8
    engine.now += 0.02
    engine.manager.poll()
    assert engine.stats.searching == 0 and engine.stats.missed == {"crowded": 8}
    assert engine.manager.lookup(names(8, 8), "r1").tolist() == [ABSENT] * 8, "it has waited"
    assert engine.stats.refused == 8
    engine.manager.finish("r1")
    engine.manager.lookup(names(8, 16), "r1")
    wait(engine)
    assert engine.stats.searching == 8, "another request of this name waits"


def test_a_prompt_longer_than_the_room_does_not_wait_for_itself(make: Make) -> None:
    engine = with_store(make, 16)
    assert engine.manager.lookup(names(12), "r0").tolist() == [PENDING] * 12
    wait(engine)
    assert engine.manager.lookup(names(12), "r0").tolist() == [HERE] * 8 + [ABSENT] * 4
    assert engine.stats.searching == 0


def test_unread_blocks_that_are_evicted_leave_their_room_to_the_next_request_at_once(make: Make) -> None:
    engine = with_store(make, 16)
    assert look_up(engine, "r0", names(8)) == [HERE] * 8
    engine.write(16, 100)
    engine.drain()
    assert engine.look(8, 8) == [PENDING] * 8, "without a name it would not wait"
    assert look_up(engine, "r1", names(8, 8)) == [HERE] * 8
    stats = engine.stats
    assert (stats.refused, stats.missed, stats.promoted_blocks) == (0, {}, 8)


def test_a_block_that_was_evicted_unread_and_that_the_engine_writes_again_does_not_count(make: Make) -> None:
    engine = with_store(make, 8)
    assert look_up(engine, "r0", names(8)) == [HERE] * 8
    engine.write(16, 100)
    engine.drain()
    engine.write(8)
    assert [engine.manager.origin(key) for key in names(8)] == [None] * 8
    assert engine.stats.promoted_blocks == 0


class Accounts:
    """The requests that account for each unread block, from what look-ups answer and from the events of the cache."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.users: dict[bytes, set[str]] = {}
        self.evicted = 0
        self._pending: dict[bytes, set[str]] = {}

    def look_up(self, request: str, keys: list[bytes]) -> None:
        """Look keys up once, and wait until what was asked for is there."""
        self.follow()
        for key, answer in zip(keys, self.engine.manager.lookup(keys, request).tolist(), strict=True):
            users = self.users.get(key) if answer == HERE else self._pending.setdefault(key, set())
            if users is not None:
                users.add(request)
        settle(self.engine)
        self.follow()
        self._pending.clear()

    def follow(self) -> None:
        """Read what has come, and what has gone."""
        for event in self.engine.cache.events():
            for key in event.keys if event.kind in ("stored", "removed") else ():
                if event.kind == "removed":
                    self.evicted += self.users.pop(key, None) is not None
                elif waiting := self._pending.pop(key, None):
                    self.users[key] = waiting

    def end(self, request: str) -> None:
        self.follow()
        self.users = {key: left for key, users in self.users.items() if (left := users - {request})}


@pytest.mark.parametrize("number", some_of(3, range(8)))
@pytest.mark.parametrize("blocks", [16, 18, 128])
def test_the_room_is_what_live_requests_account_for(make: Make, blocks: int, number: int) -> None:
    """Keys 0 to 31 are of one group of layers, keys 32 to 63 of another; a request asks for both. What the engine
    writes evicts blocks that nobody has read, in the smaller caches."""
    print("seed", SEED + number)
    random = np.random.default_rng(SEED + number)
    engine = with_store(make, 64, blocks=blocks, room=64 if blocks == 128 else 12, event_capacity=1 << 12)
    accounts, written = Accounts(engine), 64
    asked: dict[str, list[bytes]] = {}
    for step in range(120):
        action, live = random.integers(0, 6), sorted(asked)
        if action == 5:
            count = int(random.integers(1, 7))
            engine.write(count, written)
            written += count
        elif action < 3 or not live:
            request = f"r{step}" if action == 0 or not live else str(random.choice(live))
            first, count = int(random.integers(0, 28)), int(random.integers(1, 5))
            keys = names(count, first) + names(count, 32 + first)
            accounts.look_up(request, keys)
            asked.setdefault(request, []).extend(keys)
        else:
            request = str(random.choice(live))
            keys = asked.pop(request)
            if action == 3:
                here = [key for key in dict.fromkeys(keys) if engine.cache.find(key) == HERE]
                engine.manager.pin(here[: int(random.integers(0, len(here) + 1))], owner=request).close()
            else:
                engine.manager.finish(request)
            accounts.end(request)
        accounts.follow()
        assert engine.stats.promoted_blocks == len(accounts.users), step
        if blocks == 128:
            # Others need the memory of some that count no more, so that stores are asked for these again.
            engine.cache.forget([key for key in names(64) if key not in accounts.users and random.integers(0, 4) == 0])
    assert engine.stats.loaded_blocks > 64, "some came more than once"
    assert bool(accounts.evicted) == (blocks < 128)
    for request in asked:
        engine.manager.finish(request)
    assert engine.stats.promoted_blocks == 0
    engine.cache.verify()


def test_promoted_blocks_of_a_pool_that_are_evicted_unread_leave_their_room_to_the_next_prefetch() -> None:
    prompts, two = [tokens(33, 1000 * i) for i in range(2)], make_engine(P=64, S=16)
    with two.cache, make_manager(two, stocked(*prompts), promotion_blocks=12) as manager:
        assert fetch(two, manager, prompts[0]) == 8 == manager.stats().promoted_blocks
        others = two.prompt(tokens(64, 5000))
        blank = np.zeros(two.cache.layout.block_bytes, np.uint8)
        assert two.cache.imports.import_blocks(others, [blank] * 16) == 16
        assert two.reusable(prompts[0]) == 0, "all that has come is evicted, and its prefetch was not cancelled"
        # With room for four, it would end with these.
        handle = prefetched(two, manager, prompts[1])
        assert (handle.ended, handle.blocks) == ("loaded", 8)
        assert manager.drain(600) and manager.stats().promoted_blocks == 8


@pytest.mark.parametrize("number", range(4))
def test_the_room_of_a_pool_with_groups_is_what_live_prefetches_account_for(number: int) -> None:
    print("seed", SEED + number)
    random, memory = np.random.default_rng(SEED + number), store()
    prompts = [tokens(17, 1000 * i) for i in range(6)]
    _save_all(memory, prompts)
    two = grouped(64)
    with two, _manager(two, memory, promotion_blocks=24) as manager:
        live: list[tuple[int, Prefetch]] = []
        blocks = dict.fromkeys(range(len(prompts)), 0)
        for step in range(30):
            if random.integers(0, 2) and live:
                which, handle = live.pop(int(random.integers(0, len(live))))
                handle.cancel()
            else:
                which = int(random.integers(0, len(prompts)))
                handle = manager.prefetch(two.block_keys(np.array(prompts[which], np.int32)), timeout=600.0)
                at_once = bool(random.integers(0, 3) == 0)
                if at_once:
                    handle.cancel()
                assert handle.wait(600)
                blocks[which] += 0 if at_once else handle.blocks
                if not at_once and blocks[which]:
                    live.append((which, handle))
            blocks = {i: count if any(i == j for j, _ in live) else 0 for i, count in blocks.items()}
            assert manager.drain(600)
            assert manager.stats().promoted_blocks == sum(blocks.values()), step


def _manager(pool: KVCacheManager, memory: Store, **options: int) -> StorageManager:
    return StorageManager(pool, [memory], identity=IDENTITY, load_seconds=600.0, **options)


def _save_all(memory: Store, prompts: list[list[int]]) -> None:
    pool = grouped(64)
    with pool, _manager(pool, memory) as manager:
        for number, prompt in enumerate(prompts):
            sequence = pool.add_sequence(pool.block_keys(np.array(prompt, np.int32)))
            write_all(pool, sequence, number)
            pool.commit(sequence)
            assert manager.drain(600) and not manager.stats().dropped
            pool.release(sequence)
