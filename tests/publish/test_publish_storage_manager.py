"""A router that follows a publisher with a storage manager knows what pool and stores have, across resets."""

from __future__ import annotations

import pytest
from router import Publish, Route, cached

from tests.stores.test_storage_manager_mirror import STEPS, Lab, predicted


class Published(Lab):
    """Random calls whose listeners are routers."""

    def __init__(self, number: int, capacity: int, publish: Publish, route: Route, replay_messages: int) -> None:
        super().__init__(number, capacity)
        self.publisher = publish(self.engine, storage=self.manager, replay_messages=replay_messages)
        self.route, self.routers = route, [route(self.publisher, stores=["NEAR", "FAR"])]

    def read(self, snapshot: bool = False) -> None:
        """The publisher does it."""

    def check(self) -> None:
        """Compare routers with the pool by medium, and with what a match says that stores have beyond it."""
        assert self.manager.drain(600)
        for router in self.routers:
            router.follow()
            assert {medium: router.known[medium] for medium in ("GPU", "CPU")} == cached(self.engine.cache)
            assert router.known == self.routers[0].known
            tiers = dict(zip(("device", "host", "near", "far"), router.known.values(), strict=True))
            for prompt in self.prompts:
                keys = self.engine.prompt(prompt)
                device, host, _, stored = self.manager.match_prefix(keys)
                assert (device, host, stored) == predicted(tiers, keys.keys[:, 0].tolist(), prompt), prompt


@pytest.mark.parametrize(("capacity", "replay_messages"), [(4096, 2), (4096, 10_000), (24, 2)])
@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in (1, 2))])
def test_any_calls_with_resets_leave_routers_with_what_there_is(
    publish: Publish, route: Route, number: int, capacity: int, replay_messages: int
) -> None:
    lab = Published(number, capacity, publish, route, replay_messages)
    try:
        lab.seed()
        for step in range(STEPS):
            if step == 0:
                lab.reset()
            else:
                lab.step()
            if lab.random.random() < 0.3:
                lab.check()
            if step in (20, 40):
                lab.routers.append(route(lab.publisher, stores=["NEAR", "FAR"]))
        lab.check()
        stats = lab.publisher.stats()
        assert stats.resyncs >= 1 and (capacity == 24 or stats.lost_blocks == 0)
        lab.publisher.close()
    finally:
        lab.close()
