"""Blocks of one worker's host tier enter another worker's pool, whole, under keys of its own, and its next request
hits."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from workers import LARGE, SMALL, Make, expected, stored, worker

from kvpool.remote import BlockClient, BlockServer, Limits
from tests.waiting import until


@pytest.mark.parametrize("names", [{}, {"salt": "a"}, {"adapter_id": 3}], ids=str)
@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_the_next_request_with_the_prefix_hits(make: Make, layout: dict[str, Any], names: dict[str, Any]) -> None:
    there, here = worker(make, layout=layout), worker(make, layout=layout)
    tokens = stored(there, 10, **names)
    prompt = here.prompt(tokens, **names)
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache, blocks_per_message=3) as client:
        assert client.fetch(prompt) == 10
        assert client.fetch(prompt) == 0
        until(lambda: not there.cache.leases, "end of the leases")
        until(lambda: server.stats().blocks == 10, "count of blocks")
    assert here.cache.match_prefix(prompt).host_tokens == 40
    assert here.add(tokens, **names).cached == 40  # compares every byte


def test_tokens_do_for_a_prompt(make: Make) -> None:
    there, here = worker(make), worker(make)
    tokens = stored(there, 3)
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache) as client:
        assert client.fetch(tokens) == 3
    assert here.reusable(tokens) == 12


def test_the_block_of_the_last_token_is_not_asked_for_as_nobody_reuses_it(make: Make) -> None:
    there, here = worker(make), worker(make)
    tokens = stored(there, 3)[:12]
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache) as client:
        assert client.fetch(tokens) == 2


def test_only_what_follows_the_cached_prefix_is_requested(make: Make) -> None:
    there, here = worker(make), worker(make)
    tokens = stored(there, 8)
    here.seed(tokens[:21])
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache) as client:
        assert client.fetch(tokens) == 3
        until(lambda: server.stats().blocks == 3, "count of blocks")
    assert here.add(tokens).cached == 32


def test_a_prefix_ends_at_its_first_missing_block(make: Make) -> None:
    there, here = worker(make), worker(make)
    tokens = stored(there, 4)
    longer = tokens[:16] + list(range(500, 580))
    with (
        BlockServer(there.cache) as server,
        BlockClient(server.endpoint, here.cache, blocks_per_message=3, messages_in_flight=2) as client,
    ):
        assert client.fetch(longer) == 4
        assert client.fetch(list(range(900, 950))) == 0
        assert client.fetch([1]) == 0
        until(lambda: server.stats().missing_blocks > 0, "count of missing blocks")
    assert here.reusable(longer) == 16


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
def test_unknown_keys_among_known_ones_are_missing_in_place(make: Make, layout: dict[str, Any]) -> None:
    there, here = worker(make, layout=layout), worker(make, layout=layout)
    tokens = stored(there, 6)
    keys = there.keys(tokens)
    asked = [bytes(16), keys[4], keys[0], bytes([255]) * 16, keys[5]]
    content = expected(there, tokens)
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache, blocks_per_message=2) as client:
        fetched = client.fetch_blocks(asked)
        assert [None if block is None else bytes(block) for block in fetched] == [
            None,
            content[4],
            content[0],
            None,
            content[5],
        ]
        assert client.fetch_blocks([]) == []


@pytest.mark.parametrize("places", [[0, 1, 3, 4, 7], [7, 5, 4, 2], [3, 3, 4, 0, 1, 2]], ids=str)
def test_blocks_that_lie_apart_come_as_what_was_asked_for(make: Make, places: list[int]) -> None:
    there, here = worker(make, layout=LARGE), worker(make, layout=LARGE)
    tokens = stored(there, 8)
    keys, content = there.keys(tokens), expected(there, tokens)
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache) as client:
        assert [bytes(block or b"") for block in client.fetch_blocks([keys[place] for place in places])] == [
            content[place] for place in places
        ]


def test_blocks_of_the_device_tier_are_not_served(make: Make) -> None:
    there, here = worker(make), worker(make)
    tokens = list(range(17))
    there.seed(tokens)
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache) as client:
        assert client.fetch(tokens) == 0
        there.cache.offload(there.prompt(tokens))
        assert client.fetch(tokens) == 4


@pytest.mark.parametrize("limits", [Limits(2, 1, 192 * 2), Limits(64, 8, 192), Limits(1, 3)], ids=str)
def test_a_client_keeps_to_the_limits_that_the_server_names(make: Make, limits: Limits) -> None:
    there, here = worker(make), worker(make)
    tokens = stored(there, 20)
    with BlockServer(there.cache, limits=limits) as server, BlockClient(server.endpoint, here.cache) as client:
        assert client.fetch(tokens) == 20
    assert here.add(tokens).cached == 80


def test_a_pool_without_room_takes_what_fits(make: Make) -> None:
    there, here = worker(make), worker(make, P=32, S=6)
    tokens = stored(there, 10)
    keys = here.prompt(list(range(5000, 5017)))
    here.seed(list(range(5000, 5017)))
    assert here.cache.offload(keys) == 4
    with here.cache.pin(keys, owner="test", tier="host"), BlockServer(there.cache) as server:
        with BlockClient(server.endpoint, here.cache) as client:
            assert client.fetch(tokens) == 2
    assert here.reusable(tokens) == 8


def test_several_clients_are_served_at_once(make: Make) -> None:
    there = worker(make, layout=LARGE)
    prompts = [stored(there, 5, start) for start in (0, 1000, 2000)]
    results: dict[int, int] = {}

    def fetch(number: int, endpoint: str) -> None:
        here = readers[number]
        with BlockClient(endpoint, here.cache, name=f"reader {number}", blocks_per_message=2) as client:
            for tokens in prompts:
                results[number] = results.get(number, 0) + client.fetch(tokens)

    readers = [worker(make, layout=LARGE) for _ in range(3)]
    with BlockServer(there.cache) as server:
        threads = [threading.Thread(target=fetch, args=(number, server.endpoint)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert results == {0: 15, 1: 15, 2: 15}
        until(lambda: not there.cache.leases, "end of the leases")
    for here in readers:
        for tokens in prompts:
            assert here.add(tokens).cached == 20


def test_an_ipc_endpoint_works(make: Make, tmp_path: Path) -> None:
    there, here = worker(make, layout=LARGE), worker(make, layout=LARGE)
    tokens = stored(there, 4)
    with (
        BlockServer(there.cache, f"ipc://{tmp_path}/blocks") as server,
        BlockClient(server.endpoint, here.cache) as client,
    ):
        assert client.fetch(tokens) == 4
    assert here.add(tokens).cached == 16
