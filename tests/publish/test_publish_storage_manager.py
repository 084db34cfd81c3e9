"""A router that follows a publisher with a storage manager knows what pool and stores have, across resets."""

from __future__ import annotations

from random import Random

import pytest
from router import Hash, Publish, Route, Router, cached

from engine import Engine, Make
from kvpool.storage import StorageManager
from tests.stores.pool_lab import make_manager, store

SECRET = b"the secret of this test"


def first_halves(engine: Engine, manager: StorageManager, prompts: list[list[int]]) -> set[Hash]:
    """The first half of each key that the store has, by the matches of prompts whose blocks the pool does not have."""
    hashes: set[Hash] = set()
    for prompt in prompts:
        keys = engine.cache.block_keys(prompt)
        match = manager.match_prefix(keys)
        places = range(match.full_tokens // 4, (match.full_tokens + match.store_tokens) // 4)
        hashes |= {int(keys.keys[place, 0]) for place in places}
    return hashes


def settle(engine: Engine, manager: StorageManager, routers: list[Router], prompts: list[list[int]]) -> None:
    """Compare routers with the pool by medium, and with what a match says that stores have beyond it."""
    assert manager.drain(600)
    for router in routers:
        router.follow()
        assert {medium: router.known[medium] for medium in ("GPU", "CPU")} == cached(engine.cache)
        assert router.known == routers[0].known
        assert router.known["MEMORY"] >= first_halves(engine, manager, prompts)
        here = router.known["GPU"] | router.known["CPU"]
        for prompt in prompts:
            keys = engine.cache.block_keys(prompt)
            chain, usable = [int(key) for key in keys.keys[:, 0]], (len(prompt) - 1) // 4
            known = here | router.known["MEMORY"]
            reach = next((place for place in range(usable) if chain[place] not in known), usable)
            match = manager.match_prefix(keys)
            assert 4 * reach == match.full_tokens + match.store_tokens, prompt


@pytest.mark.parametrize(("capacity", "replay_messages"), [(4096, 2), (4096, 10_000), (24, 2)])
@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in (1, 2))])
def test_any_calls_with_resets_leave_routers_with_what_there_is(
    make: Make, publish: Publish, route: Route, number: int, capacity: int, replay_messages: int
) -> None:
    print(f"seed {number}")
    random = Random(number)
    engine = make(P=14, S=12, event_capacity=capacity, secret=SECRET)
    documents = [[random.randrange(7) for _ in range(33)] for _ in range(3)]
    prompts = [document[:length] for document in documents for length in (9, 17, 33)]
    with make_manager(engine, store(24), interval_seconds=0.001, promotion_blocks=1000) as manager:
        publisher = publish(engine, storage=manager, replay_messages=replay_messages)
        routers = [route(publisher, stores=["MEMORY"])]
        engine.seed(prompts[2], 33)
        settle(engine, manager, routers, prompts)
        for step in range(50):
            prompt, draw = random.choice(prompts), random.random()
            if draw < 0.1 or step == 0:
                engine.cache.clear()
            elif draw < 0.15:
                manager.clear()
            elif draw < 0.25:
                manager.forget(engine.prompt(prompt))
            elif draw < 0.5:
                assert manager.prefetch(engine.prompt(prompt), timeout=600.0).wait(600)
            else:
                engine.seed(prompt, len(prompt))
            if random.random() < 0.3:
                settle(engine, manager, routers, prompts)
            if step in (20, 40):
                routers.append(route(publisher, stores=["MEMORY"]))
        settle(engine, manager, routers, prompts)
        assert publisher.stats().resyncs >= 1 and (capacity == 24 or publisher.stats().lost_blocks == 0)
        publisher.close()
