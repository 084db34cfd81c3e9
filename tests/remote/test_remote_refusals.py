"""A client that asks for what it may not have, or sends anything at all, gets a clear error, and the server goes on."""

from __future__ import annotations

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import zmq
from relay import Relay
from workers import HUGE, LARGE, SECRET, Make, Raw, counted, expected, pair, stored, unpinned, worker

from kvpool.remote import BlockClient, BlockServer, Limits, RemoteError
from kvpool.remote.block_server import Sending, UnderWay, Waiting
from kvpool.remote.connection import Connection
from kvpool.remote.listener import ClientSecret
from kvpool.remote.server import ClientSession, Refused
from kvpool.remote.session import Blocks, Failed, Found, Get, Hello, Session, Welcome, encode
from tests.publish.raw import connected
from tests.waiting import until

ENDPOINTS = {"tcp": "tcp://127.0.0.1:*", "ipc": "ipc://{}/blocks"}


@pytest.mark.parametrize(
    ("layout", "secret", "code", "reason"),
    [
        ({"head_dim": 4}, SECRET, "layout", "one BlockLayout"),
        ({"head_dim": 3, "dtype": "int16"}, SECRET, "layout", "one BlockLayout"),
        ({"head_dim": 3, "tokens": "HND"}, SECRET, "layout", "one BlockLayout"),
        ({"head_dim": 3}, bytes(32), "secret", "same secret="),
        ({"head_dim": 3}, None, "secret", "same secret="),
    ],
)
def test_pools_that_do_not_fit_together_are_refused_with_the_reason(
    make: Make, layout: dict[str, Any], secret: bytes | None, code: str, reason: str
) -> None:
    there, here = worker(make), worker(make, layout=layout, secret=secret)
    tokens = stored(there, 4)
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache) as client:
        for _ in range(2):
            with pytest.raises(RemoteError, match=reason) as caught:
                client.fetch(tokens)
            assert caught.value.code == code and caught.value.blocks == 0
        assert here.reusable(tokens) == 0 and server.stats().refused == (0 if code == "secret" else 2)


def test_a_refusal_that_comes_before_the_first_word_is_an_error_too(make: Make) -> None:
    """The connection has ended for good then: a send that waits for the next one would wait for ever."""
    there = worker(make)
    with BlockServer(there.cache) as server, zmq.Context() as context:
        link = Connection(
            context, server.endpoint, ClientSecret(b"another"), timeout_ms=600_000, frame_bytes=0, messages=1
        )
        until(lambda: not link._socket.poll(0, zmq.POLLOUT), "refusal")
        with ThreadPoolExecutor(1) as pool:
            raised = pool.submit(link.greet, Hello(0, "", "", "", ""), Welcome).exception(600)
        link.close()
    assert isinstance(raised, RemoteError) and raised.code == "credentials", raised


def test_pools_whose_host_blocks_are_alike_fit_together(make: Make) -> None:
    there, here = worker(make), worker(make, layout={"head_dim": 3, "order": "block_first"})
    tokens = stored(there, 4)
    with BlockServer(there.cache) as server, BlockClient(server.endpoint, here.cache) as client:
        assert client.fetch(tokens) == 4
    assert here.add(tokens).cached == 16


def test_garbage_is_answered_and_the_server_goes_on(make: Make) -> None:
    there = worker(make)
    key = there.keys(stored(there, 4))[0]
    with (
        BlockServer(there.cache, limits=Limits(blocks_per_request=3)) as server,
        Raw(server.endpoint, there) as raw,
    ):
        before = raw.ask(Get(1, 0), key)
        assert isinstance(before, Failed) and "before hello" in before.reason
        raw.enter()
        cases: list[list[Any]] = [
            [b"garbage"],
            [raw.hello(), key],
            [Get(1, 0)],
            [Get(1, 0), b""],
            [Get(1, 0), key, key],
            [Get(1, 0), key + b"x"],
            [Found(1)],
            [raw.hello(id=0)],
            [raw.hello(client="a\nb")],
            [encode(raw.hello()).replace(b'"id": 1', b'"id": "1"')],
        ]
        for frames in cases:
            error = raw.ask(*frames)
            assert isinstance(error, Failed) and error.code == "malformed", (frames, error)
            assert error.id in (0, 1)
        assert server.stats().malformed == len(cases) + 1
        error = raw.ask(raw.hello(transport="carrier pigeon"))
        assert isinstance(error, Failed) and error.code == "transport" and "'inline'" in error.reason
        error = raw.ask(Get(1, 0), 4 * key)
        assert error.code == "limit" and "expected up to 3, got 4" in error.reason
        with socket.create_connection(("127.0.0.1", int(server.endpoint.rpartition(":")[2]))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert isinstance(raw.ask(Get(1, 0), 3 * key), Blocks)


def test_random_frames_never_stop_the_server(make: Make) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    there = worker(make)
    tokens = stored(there, 4)
    with BlockServer(there.cache) as server, Raw(server.endpoint, there) as raw:
        raw.enter()
        good = [encode(Get(1, 0)), b"".join(there.keys(tokens))]
        for _ in range(300):
            frames = [bytearray(frame) for frame in good]
            for _ in range(dice.randrange(1, 4)):
                frame = dice.choice(frames)
                frame[dice.randrange(len(frame))] = dice.randrange(256)
            if dice.random() < 0.3:
                frames.insert(dice.randrange(3), bytearray(dice.randbytes(dice.randrange(40))))
            if dice.random() < 0.5:
                assert raw.ask(*(bytes(frame) for frame in frames))
            else:  # without a tag
                raw.socket.send_multipart(frames)
                assert isinstance(raw.answer().message, Failed)
        assert isinstance(raw.ask(*good), Blocks)
        until(lambda: server.stats().transfers == 0 and not there.cache.leases, "end of all transfers")


def test_more_requests_than_the_limit_wait_or_are_refused_and_all_are_answered(make: Make) -> None:
    there = worker(make, 40, 36, layout=HUGE)
    tokens = stored(there, 16)
    with BlockServer(there.cache, limits=Limits(16, 1, 16 << 20)) as server, Relay(server.endpoint) as relay:
        with Raw(relay.endpoint, there) as raw:
            raw.enter()
            relay.hold()
            for number in range(1, 4):
                raw.send(Get(number, 0), b"".join(there.keys(tokens)[:16]))
            counted(server, refused=1)
            assert server.stats().transfers == 1 and len(there.cache.leases) == 1
            relay.pass_on()
            answers = [raw.answer().message for _ in range(3)]
            failed = [reply for reply in answers if isinstance(reply, Failed)]
            assert [reply.id for reply in failed] == [3] and "requests that wait" in failed[0].reason
            assert sorted(reply.id for reply in answers if isinstance(reply, Blocks)) == [1, 2]


@pytest.mark.parametrize("scheme", ENDPOINTS)
def test_clients_that_never_read_do_not_keep_a_new_client_waiting(make: Make, scheme: str, tmp_path: Any) -> None:
    """They have the password, ask for all they may have, and are not disconnected while this lasts."""
    there = worker(make, 65, 64, layout=HUGE)
    tokens = stored(there, 4)
    endpoint = ENDPOINTS[scheme].format(tmp_path)
    limits = Limits(blocks_per_request=4)
    with ExitStack() as stack:
        server = stack.enter_context(BlockServer(there.cache, endpoint, limits=limits, stall_seconds=0))
        stuck = [stack.enter_context(Raw(server.endpoint, there, rcvhwm=1, rcvbuf=4096)) for _ in range(3)]
        for raw in stuck:
            raw.enter()
            for number in range(2, 8):
                raw.send(Get(number, 0), b"".join(there.keys(tokens)[:4]))
        until(lambda: server.stats().transfers >= 6 or server.stats().transfer_bytes == 32 << 20, "transfers")
        with BlockClient(server.endpoint, there.cache) as client:
            for _ in range(3):
                fetched = client.fetch_blocks(there.keys(tokens)[:4])
                assert [bytes(block or b"") for block in fetched] == expected(there, tokens)[:4]
            # Whoever's blocks the system has taken meanwhile gets its next ones.
            until(lambda: server.stats().transfers >= 6, "transfers of all who do not read")
        assert server.stats().transfer_bytes <= 32 << 20


def test_who_has_blocks_under_way_leaves_room_for_who_has_none() -> None:
    """In units of a block: 8 in total, up to 3 for each; what is under way is never released here."""
    in_flight = UnderWay(Limits(blocks_per_request=3, bytes_per_client=3, bytes_in_total=8, requests_waiting=3))

    clients = {name: ClientSession(name.encode(), Session(b"", b"", True), 0) for name in "abcde"}

    def ask(client: str, nbytes: int) -> None:
        in_flight.accept(Waiting(clients[client], 1, 0, np.empty((nbytes, 2), np.uint64), nbytes))

    def taken() -> list[tuple[str, int]]:
        taken = []
        while (request := in_flight.take()) is not None:
            in_flight.transfers.append(Sending(request.client, request.nbytes, [], lambda: False))
            taken.append((request.client.id.decode(), request.nbytes))
        return taken

    for client in "aab":
        ask(client, 1)
    assert taken() == [("a", 1), ("a", 1), ("b", 1)]
    ask("a", 1), ask("b", 2), ask("c", 3)
    assert taken() == [("a", 1), ("c", 3)], "b has something, and the last 3 are for who has nothing"
    ask("d", 2), ask("e", 1)
    assert taken() == [], "d has nothing, and is not overtaken by e, for which there would be room"
    with pytest.raises(Refused, match="requests that wait, of all clients: expected up to 3, got 4"):
        ask("a", 1)
    in_flight.transfers.clear()
    assert taken() == [("b", 2), ("d", 2), ("e", 1)]


@pytest.mark.parametrize("scheme", ENDPOINTS)
def test_peers_that_say_nothing_keep_no_place_from_who_has_the_secret(
    make: Make, scheme: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.remote.connections.HANDSHAKE_MS", 600_000)
    place, limits = ENDPOINTS[scheme].format(tmp_path), Limits(connections=3)
    with pair(make, 4, place, limits=limits) as (there, here, tokens, server, client), ExitStack() as silent:
        for _ in range(30):
            silent.enter_context(connected(server.endpoint))
        counted(server, connections_refused=27)
        assert client.fetch(tokens) == 4
        for _ in range(30):
            silent.enter_context(connected(server.endpoint))
        counted(server, connections_refused=58)
        assert client.fetch_blocks(here.keys(tokens)) == expected(there, tokens)
        assert server.stats().connections_refused == 58, "it has its place still"


def test_a_pool_that_was_closed_is_an_error_to_clients(make: Make) -> None:
    with pair(make, layout=LARGE) as (there, here, tokens, server, client):
        assert client.fetch(tokens[:9]) == 2
        unpinned(there)
        there.cache.close()
        with pytest.raises(RemoteError, match="closed"):
            client.fetch(tokens)


def test_limits_that_hold_no_block_and_pools_without_a_host_tier_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="blocks_per_request: expected 1 to .*, got 0"):
        Limits(blocks_per_request=0)
    with pytest.raises(TypeError, match="bytes_per_client: expected an integer, got True"):
        Limits(bytes_per_client=True)
    with pytest.raises(ValueError, match="do not hold one block of 192 bytes"):
        BlockServer(worker(make).cache, limits=Limits(bytes_per_client=191))
    with pytest.raises(ValueError, match="cache: expected a host tier.*, got host_blocks=0"):
        BlockServer(worker(make, S=0).cache)
