"""Blocks that a prefix needs of each group of layers enter another worker's pool; the next request reuses all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from workers import SECRET, Raw, counted, unpinned

from group_engine import GroupsEngine
from kvpool.remote import BlockClient, BlockServer, Limits, RemoteError
from kvpool.remote.nixl import NixlClient, NixlServer, available
from kvpool.remote.session import Blocks, Find, Found, Get, Malformed
from kvpool.remote.transport import InlineClient, InlineServer
from tests.waiting import until

Open = Callable[..., GroupsEngine]
FULL: dict[str, Any] = {}
WINDOWED = {"window": 6, "sinks": 1}
STATES = {"kind": "recurrent", "snapshot_tokens": 8}
CROSS = {"kind": "cross"}
PARTS = {"parts": ({}, {"kv_heads": 1}, {"head_dim": 5, "dtype": "uint8"})}
LARGE = {"parts": ({"head_dim": 2048},)}
KINDS: dict[str, list[dict[str, Any]]] = {
    "parts": [PARTS],
    "a window": [WINDOWED],
    "states": [STATES],
    "two": [FULL, WINDOWED],
    "large": [LARGE, WINDOWED | LARGE],
    "all kinds": [CROSS, WINDOWED, FULL, STATES],
}
TRANSPORTS = [
    pytest.param(InlineServer, InlineClient, id="inline"),
    pytest.param(NixlServer, NixlClient, id="nixl", marks=pytest.mark.skipif(bool(available()), reason=available())),
]
TOKENS = list(range(33))
"""Eight full blocks, and a token that is computed anyway."""


def worker(open_: Open, kinds: Sequence[dict[str, Any]], **options: Any) -> GroupsEngine:
    return open_(*({"host_blocks": 12} | kind for kind in kinds), secret=SECRET, **options)


def encoder(engine: GroupsEngine) -> dict[str, int]:
    return {"encoder_tokens": 5} if any(side.kind == "cross" for side in engine.sides) else {}


def stored(engine: GroupsEngine, tokens: Sequence[int] = TOKENS) -> None:
    """Have a prompt's blocks on the host, in all groups."""
    engine.seed(tokens, **encoder(engine))
    engine.cache.content.offload(engine.prompt(tokens))


@contextmanager
def pair(
    open_: Open, kinds: Sequence[dict[str, Any]]
) -> Iterator[tuple[GroupsEngine, GroupsEngine, BlockServer, BlockClient]]:
    """A worker that serves a prompt in all groups, another one, and a server and a client of them."""
    there, here = worker(open_, kinds), worker(open_, kinds)
    stored(there)
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache) as client:
        yield there, here, server, client


def hosted(engine: GroupsEngine) -> int:
    host = engine.cache.stats().host
    return host.capacity - host.empty


@pytest.mark.parametrize(("serve", "read"), TRANSPORTS)
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_the_next_request_reuses_what_every_group_has_there(
    open_: Open, kinds: list[dict[str, Any]], serve: Any, read: Any
) -> None:
    there, here = worker(open_, kinds), worker(open_, kinds)
    stored(there)
    promised = there.reusable(TOKENS)
    assert promised == 32
    with BlockServer(there.cache, transport=serve()) as server:
        with BlockClient(server.endpoint, here.cache, transport=read(), blocks_per_message=3) as client:
            entered = client.fetch(TOKENS)
            assert entered == hosted(here) > 0
            assert client.fetch(TOKENS) == 0
        unpinned(there)
        until(lambda: server.stats().blocks == entered, "count of blocks")
        assert server.stats().missing_blocks == 0
    request = here.add(TOKENS, **encoder(here))  # compares every byte that is reused, in every group
    assert request.cached == promised


def test_a_group_gets_what_the_prefix_needs_of_it_and_no_more(open_: Open) -> None:
    with pair(open_, KINDS["all kinds"]) as (there, here, server, client):
        assert client.fetch(TOKENS) == 3 + 8 + 1
    cached = here.cache.content.cached_blocks(here.prompt(TOKENS), tier="host")
    assert [np.flatnonzero(of_group).tolist() for of_group in cached] == [[], [0, 6, 7], [*range(8)], [7]]


def test_what_is_here_already_is_not_fetched_again(open_: Open) -> None:
    with pair(open_, KINDS["two"]) as (there, here, server, client):
        stored(here, TOKENS[:17])
        assert client.fetch(TOKENS) == 4 + 2
    assert here.add(TOKENS).cached == 32


def test_the_prefix_ends_where_one_group_lacks_something_on_both_sides(open_: Open) -> None:
    with pair(open_, [FULL, STATES]) as (there, here, server, client):
        there.cache.content.forget(there.prompt(TOKENS).keys[7:])
        assert there.reusable(TOKENS) == 24  # the last snapshot before
        assert client.fetch(TOKENS) == 6 + 1
        there.cache.content.forget(there.prompt(TOKENS))
        assert client.fetch(list(range(500, 530))) == 0
    assert here.add(TOKENS).cached == 24


def test_nothing_is_asked_for_that_would_gain_nothing(open_: Open) -> None:
    with pair(open_, [FULL, STATES]) as (there, here, server, client):
        there.cache.content.forget(there.prompt(TOKENS).keys[[1, 3, 5, 7]])  # all states, and blocks of the other group
        assert client.fetch(TOKENS) == 0 and client.fetch(here.cache.block_keys(TOKENS, reuse=False)) == 0
        counted(server, questions=1)
        assert server.stats().requests == 0


def test_blocks_that_go_between_question_and_request_end_the_fetch(
    open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(open_, [FULL, WINDOWED]) as (there, here, server, client):
        lacking = here.cache.content.missing_blocks

        def late(*args: Any) -> Any:
            missing = lacking(*args)
            there.cache.content.forget(there.prompt(TOKENS).keys[2:])
            return missing

        monkeypatch.setattr(here.cache.content, "missing_blocks", late)
        assert client.fetch(TOKENS) == 2
    assert here.cache.match_prefix(TOKENS).tokens == 0  # the window of the first two blocks is not there
    assert here.add(TOKENS).cached == 0


def test_a_fetch_that_fails_half_way_says_what_has_entered_and_the_next_one_goes_on(open_: Open) -> None:
    class Failing(InlineClient):
        def receive(self, frames: Any, group: int, count: int) -> Any:
            if group == 1:
                raise Malformed("made up")
            return super().receive(frames, group, count)

    there, here = worker(open_, [FULL, WINDOWED]), worker(open_, [FULL, WINDOWED])
    stored(there)
    with BlockServer(there.cache) as server:
        with BlockClient(server.endpoint, here.cache, transport=Failing()) as client:
            with pytest.raises(RemoteError, match="made up") as caught:
                client.fetch(TOKENS)
        assert caught.value.blocks == 8 and here.cache.match_prefix(TOKENS).tokens == 0
        unpinned(there)
        with BlockClient(server.endpoint, here.cache) as client:
            assert client.fetch(TOKENS) == 3
    assert here.add(TOKENS).cached == 32


@pytest.mark.parametrize("group", [0, 1])
def test_single_blocks_of_a_group_come_whole_in_the_order_of_their_keys(open_: Open, group: int) -> None:
    with pair(open_, [PARTS, STATES]) as (there, here, server, client):
        keys = there.prompt(TOKENS).keys[[7, 1, 5]]
        with there.cache.pin(keys, tier="host", group=group) as lease:
            rows = lease.blocks - there.cache.groups[group].first_host_block
            host = there.cache.memory.host_pools[group]
            expected = [b"".join(part[row].tobytes() for part in host) for row in rows]
            assert (lease.groups == group).all()
        fetched = client.fetch_blocks([*(key.tobytes() for key in keys), bytes(16)], group=group)
        assert [None if block is None else bytes(block) for block in fetched] == [*expected, None]
        with pytest.raises((TypeError, ValueError), match="group"):
            client.fetch_blocks(keys)
        with pytest.raises(ValueError, match="group"):
            client.fetch_blocks(keys, group=2)


def test_blocks_of_cross_attention_are_not_served(open_: Open) -> None:
    with pair(open_, [CROSS, FULL]) as (there, here, server, client):
        keys = there.prompt(TOKENS).keys.tobytes()
        with pytest.raises(ValueError, match="group: expected a group without cross attention, got 0"):
            client.fetch_blocks([], group=0)
        with Raw(server.endpoint, there) as raw:
            assert raw.ask(raw.hello()).block_bytes == (0, there.cache.groups[1].block_bytes)
            for group in (0, 2, 1 << 40):
                failed = raw.ask(Get(1, group), keys)
                assert failed.code == "malformed" and "expected one of [1]" in failed.reason
            assert raw.ask(Get(1, 1), keys[:32]).found == "11"


def test_a_question_is_answered_for_each_group(open_: Open) -> None:
    there = worker(open_, KINDS["all kinds"])
    stored(there)
    keys = np.concatenate([there.prompt(TOKENS).keys, np.ones((3, 2), np.uint64)])
    with BlockServer(there.cache) as server, Raw(server.endpoint, there) as raw:
        raw.enter().send(Find(1), keys.tobytes())
        answer = raw.answer()
        assert answer.message == Found(1)
        [bits] = answer.frames
        cached = np.unpackbits(np.frombuffer(bits, np.uint8), count=44).reshape(4, 11)
        assert (cached == there.cache.content.cached_blocks(keys, tier="host")).all() and cached[1:].any(axis=1).all()
        for frames in ([], [b""], [keys.tobytes()[:-1]], [keys.tobytes(), b"x"]):
            assert raw.ask(Find(3), *frames).code == "malformed"
        counted(server, questions=1)


def test_prompts_of_more_keys_than_a_question_has_room_for_are_asked_for_in_several(
    open_: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(open_, [FULL, WINDOWED]) as (there, here, server, client):
        monkeypatch.setattr("kvpool.remote.block_client.BLOCKS_MAX", 3)
        assert client.fetch(TOKENS) == 8 + 3
        counted(server, questions=3)
    assert here.add(TOKENS).cached == 32


@pytest.mark.parametrize(
    "other",
    [[FULL], [WINDOWED, FULL], [FULL, WINDOWED | {"window": 7}], [FULL, FULL], [FULL, WINDOWED, CROSS], [FULL, PARTS]],
    ids=str,
)
def test_pools_whose_groups_differ_are_refused(open_: Open, other: list[dict[str, Any]]) -> None:
    there, here = worker(open_, [FULL, WINDOWED]), worker(open_, other)
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache) as client:
        with pytest.raises(RemoteError, match="the same groups of layers") as caught:
            client.fetch(TOKENS)
        assert caught.value.code == "layout"


def test_limits_hold_for_the_bytes_of_each_group(open_: Open) -> None:
    there, here = worker(open_, [LARGE, WINDOWED]), worker(open_, [LARGE, WINDOWED])
    stored(there)
    large, small = (group.block_bytes for group in there.cache.groups)
    keys = there.prompt(TOKENS).keys.tobytes()
    with pytest.raises(ValueError, match=f"do not hold one block of {large} bytes"):
        BlockServer(there.cache, limits=Limits(bytes_per_client=large - 1))
    with BlockServer(there.cache, limits=Limits(bytes_per_client=2 * large)) as server:
        with Raw(server.endpoint, there) as raw:
            failed = raw.enter().ask(Get(2, 0), keys[: 3 * 16])
            assert (
                failed.code == "limit"
                and f"got {3 * large}" in failed.reason
                and failed.reason.startswith("bytes in one request")
            )
            assert isinstance(raw.ask(Get(3, 1), keys), Blocks) and 8 * small < 2 * large
        with BlockClient(server.endpoint, here.cache) as client:
            assert client.fetch(TOKENS) == 8 + 3
    assert here.add(TOKENS).cached == 32
