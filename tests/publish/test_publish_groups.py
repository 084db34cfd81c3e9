"""Publishers of pools with several groups of layers name the group, as vLLM does, or publish one group only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest
from router import MEDIA, Hash, Router

import grouped
from grouped import MIXES, churn, pool_of, seed
from kvpool import KVCacheManager
from kvpool.integrations.kv_events import KVEventPublisher, PublisherLimits

Places = dict[tuple[int | None, str], set[Hash]]


class GroupRouter(Router):
    """Keeps what is where by group; ``known`` and what a block is are not kept, since hashes are the same in all
    groups."""

    def apply(self, number: int, payload: bytes) -> None:
        self.next = number + 1
        for event in self.decode(payload):
            self.events.append(event)
            if event["type"] == "AllBlocksCleared":
                self.places: Places = {}
                continue
            there, hashes = (
                self.places.setdefault((event.get("group_idx"), event["medium"]), set()),
                set(event["block_hashes"]),
            )
            if event["type"] == "BlockStored":
                assert not there & hashes, "stored twice"
            else:
                assert there >= hashes, "removed what was not there"
            there ^= hashes


@pytest.fixture
def routers() -> Iterator[Callable[..., GroupRouter]]:
    opened: list[GroupRouter] = []

    def build(publisher: KVEventPublisher) -> GroupRouter:
        opened.append(GroupRouter(publisher))
        return opened[-1]

    yield build
    for router in opened:
        router.close()


def cached(cache: KVCacheManager, group: int | None = None) -> Places:
    """The first half of each key that the pool has cached, by group (or of one, which is not named) and medium."""
    places_cached: Places = {}
    for (g, tier), keys in grouped.cached(cache).items():
        if keys and group in (None, g):
            places_cached[g if group is None else None, MEDIA[tier]] = {
                int(np.frombuffer(key, np.uint64)[0]) for key in keys
            }
    return places_cached


def there(router: GroupRouter) -> Places:
    router.follow()
    return {place: keys for place, keys in router.places.items() if keys}


@pytest.mark.parametrize("mix", MIXES)
def test_routers_rebuild_what_every_group_has_cached(mix: str, routers: Callable[..., GroupRouter]) -> None:
    with (
        pool_of(mix, event_capacity=512) as cache,
        KVEventPublisher(cache, interval_seconds=0.001, limits=PublisherLimits(replay_messages=4)) as publisher,
    ):
        router = routers(publisher)
        for i, _ in enumerate(churn(cache, Random(1), 40)):
            if i % 5 == 0:
                assert there(router) == cached(cache)
        assert there(router) == cached(cache)
        late = routers(publisher)
        late.catch_up()
        assert there(late) == cached(cache), "who joins late is given a snapshot of all groups"


def test_stored_blocks_say_what_kind_of_group_has_them(routers: Callable[..., GroupRouter]) -> None:
    with (
        pool_of("full window recurrent cross", event_capacity=64) as cache,
        KVEventPublisher(cache, interval_seconds=0.001) as publisher,
    ):
        router = routers(publisher)
        seed(cache, range(9))
        cache.content.offload(list(range(9)))
        router.follow()
        fields = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "block_size")
        specs = {tuple(event.get(name) for name in fields) for event in router.events if event["type"] == "BlockStored"}
        assert specs == {(0, "full_attention", None, 4), (1, "sliding_window", 6, 4), (2, "mamba", None, 4)}
        keys = [int(key[0]) for key in cache.block_keys(list(range(9))).keys]
        for event in router.events[1:]:
            assert event["token_ids"] == [
                t for key in event["block_hashes"] for t in range(4 * keys.index(key), 4 * keys.index(key) + 4)
            ]


@pytest.mark.parametrize("group", [0, 1, 2])
def test_one_group_is_published_as_if_it_were_a_pool(group: int, routers: Callable[..., GroupRouter]) -> None:
    with (
        pool_of("full window recurrent", event_capacity=512) as cache,
        KVEventPublisher(
            cache, group=group, interval_seconds=0.001, limits=PublisherLimits(replay_messages=2)
        ) as publisher,
    ):
        router = routers(publisher)
        for _ in churn(cache, Random(group), 30):
            pass
        assert there(router) == cached(cache, group)
        assert not any(name.startswith(("group", "kv_cache_spec")) for event in router.events for name in event)
        late = routers(publisher)
        late.catch_up()
        assert there(late) == cached(cache, group)


def test_groups_that_cannot_be_published_are_refused() -> None:
    with pool_of("full window cross", event_capacity=4) as cache:
        for group in (3, -1, "0", 2):
            with pytest.raises((TypeError, ValueError), match=f"group: .*{group!r}"):
                KVEventPublisher(cache, group=group)  # type: ignore[arg-type]
