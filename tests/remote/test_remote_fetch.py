"""Blocks of one worker's host tier enter another worker's pool, whole, under keys of its own, and its next request
hits."""

from __future__ import annotations

from typing import Any

import pytest
from workers import LARGE, SMALL, Make, counted, expected, pair, stored, unpinned, worker

from kvpool.remote import BlockClient, BlockServer, Limits
from tests.waiting import at_once, until


@pytest.mark.parametrize("names", [{}, {"salt": "a"}, {"adapter_id": 3}], ids=str)
@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_the_next_request_with_the_prefix_hits(make: Make, layout: dict[str, Any], names: dict[str, Any]) -> None:
    with pair(make, 0, layout=layout, blocks_per_message=3) as (there, here, _, server, client):
        tokens = stored(there, 10, **names)
        prompt = here.prompt(tokens, **names)
        assert client.fetch(prompt) == 10
        assert client.fetch(prompt) == 0
        unpinned(there)
        counted(server, blocks=10)
    assert here.cache.match_prefix(prompt).host_tokens == 40
    assert here.add(tokens, **names).cached == 40  # compares every byte


def test_only_what_follows_the_cached_prefix_is_requested(make: Make) -> None:
    with pair(make, 8) as (there, here, tokens, server, client):
        here.seed(tokens[:21])
        assert client.fetch(tokens[:32]) == 2, "nobody reuses the block of the last token"
        assert client.fetch(tokens) == 1
        counted(server, blocks=3)
    assert here.add(tokens).cached == 32


def test_a_prefix_ends_at_its_first_missing_block(make: Make) -> None:
    with pair(make, blocks_per_message=3, messages_in_flight=2) as (there, here, tokens, server, client):
        longer = tokens[:16] + list(range(500, 580))
        assert [client.fetch(prompt) for prompt in (longer, list(range(900, 950)), [1])] == [4, 0, 0]
        until(lambda: server.stats().missing_blocks > 0, "count of missing blocks")
    assert here.reusable(longer) == 16


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_unknown_keys_among_known_ones_are_missing_in_place(make: Make, layout: dict[str, Any]) -> None:
    with pair(make, 6, layout=layout, blocks_per_message=2) as (there, here, tokens, server, client):
        keys, content = there.keys(tokens), expected(there, tokens)
        for places in ([None, 4, 0, None, 5], [0, 1, 3, 4], [3, 3, 4, 0, 1, 2]):
            fetched = client.fetch_blocks([bytes(16) if place is None else keys[place] for place in places])
            came = [block and bytes(block) for block in fetched]
            assert came == [None if place is None else content[place] for place in places]
        assert client.fetch_blocks([]) == []


def test_blocks_of_the_device_tier_are_not_served(make: Make) -> None:
    with pair(make, 0, "tcp://localhost:*") as (there, here, _, server, client):
        tokens = list(range(17))
        there.seed(tokens)
        assert client.fetch(tokens) == 0
        there.cache.content.offload(there.prompt(tokens))
        assert client.fetch(tokens) == 4


@pytest.mark.parametrize("limits", [Limits(2, 1, 192 * 2), Limits(64, 8, 192), Limits(1, 3)], ids=str)
def test_a_client_keeps_to_the_limits_that_the_server_names(make: Make, limits: Limits) -> None:
    with pair(make, 20, limits=limits) as (there, here, tokens, server, client):
        assert client.fetch(tokens) == 20
    assert here.add(tokens).cached == 80


def test_a_pool_without_room_takes_what_fits(make: Make) -> None:
    there, here = worker(make), worker(make, P=32, S=6)
    tokens, other = stored(there, 10), here.prompt(stored(here, 4, 5000))
    with here.cache.pin(other, owner="test", tier="host"), BlockServer(there.cache) as server:
        with BlockClient(server.endpoint, here.cache) as client:
            assert client.fetch(tokens) == 2
    assert here.reusable(tokens) == 8


def test_several_clients_are_served_at_once(make: Make) -> None:
    there, readers = worker(make, layout=LARGE), [worker(make, layout=LARGE) for _ in range(3)]
    prompts = [stored(there, 5, start) for start in (0, 1000, 2000)]
    with BlockServer(there.cache) as server:

        def fetch(number: int) -> int:
            cache, name = readers[number].cache, f"reader {number}"
            with BlockClient(server.endpoint, cache, name=name, blocks_per_message=2) as client:
                return sum(map(client.fetch, prompts))

        assert at_once(fetch, range(3)) == [15, 15, 15]
        unpinned(there)
    assert all(here.add(tokens).cached == 20 for here in readers for tokens in prompts)
