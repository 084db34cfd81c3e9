"""Servers listen on this machine; elsewhere only with CURVE keys, and only to the clients whose keys they know."""

from __future__ import annotations

from typing import Any

import pytest
import zmq
from workers import LARGE, Make, stored, worker

from kvpool.remote import BlockClient, BlockServer, ClientKeys, RemoteTimeout, ServerKeys

SERVER, FRIEND, STRANGER = (zmq.curve_keypair() for _ in range(3))


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://192.0.2.1:5555", "tcp://example.com:5555", "tcp://[::]:5555", "tcp://eth0:*", "tcp://",
     "inproc://blocks", "udp://127.0.0.1:1", "127.0.0.1:5555", "", "ipc://"],
)  # fmt: skip
def test_endpoints_beyond_this_machine_need_keys(make: Make, endpoint: str) -> None:
    cache = worker(make).cache
    for build in (lambda: BlockServer(cache, endpoint), lambda: BlockClient(endpoint, cache)):
        with pytest.raises(ValueError, match="endpoint="):
            build()


@pytest.mark.parametrize("endpoint", [None, 5555, b"tcp://127.0.0.1:*"], ids=str)
def test_an_endpoint_is_a_string(make: Make, endpoint: Any) -> None:
    with pytest.raises(TypeError, match="endpoint="):
        BlockServer(worker(make).cache, endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://127.0.0.9:*", "tcp://localhost:*"])
def test_loopback_needs_none(make: Make, endpoint: str) -> None:
    there, here = worker(make), worker(make)
    tokens = stored(there, 2)
    with BlockServer(there.cache, endpoint) as server, BlockClient(server.endpoint, here.cache) as client:
        assert client.fetch(tokens) == 2


def test_an_endpoint_that_is_taken_is_an_error_that_leaves_nothing_behind(make: Make) -> None:
    cache = worker(make).cache
    with BlockServer(cache) as server, pytest.raises(zmq.ZMQError, match="Address already in use"):
        BlockServer(cache, server.endpoint)


def test_clients_with_a_known_key_are_served_everywhere(make: Make) -> None:
    there, here = worker(make, layout=LARGE), worker(make, layout=LARGE)
    tokens = stored(there, 4)
    with BlockServer(there.cache, "tcp://0.0.0.0:*", keys=ServerKeys(*SERVER, [FRIEND[0]])) as server:
        port = server.endpoint.rpartition(":")[2]
        with BlockClient(f"tcp://127.0.0.1:{port}", here.cache, keys=ClientKeys(*FRIEND, SERVER[0])) as client:
            assert client.fetch(tokens) == 4
    assert here.add(tokens).cached == 16


@pytest.mark.parametrize(
    "keys",
    [None, ClientKeys(*STRANGER, SERVER[0]), ClientKeys(*FRIEND, STRANGER[0]), ClientKeys(STRANGER[0], FRIEND[1], SERVER[0])],
    ids=["no keys", "unknown client", "wrong server", "wrong pair"],
)
def test_others_get_no_answer(make: Make, keys: ClientKeys | None) -> None:
    there, here = worker(make), worker(make)
    tokens = stored(there, 4)
    with BlockServer(there.cache, keys=ServerKeys(*SERVER, [FRIEND[0]])) as server:
        with BlockClient(server.endpoint, here.cache, keys=keys, timeout_ms=400) as client, pytest.raises(RemoteTimeout):
            client.fetch(tokens)
        assert server.stats().requests == server.stats().refused == 0


def test_secret_keys_are_not_shown() -> None:
    for keys in (ServerKeys(*SERVER, [FRIEND[0]]), ClientKeys(*FRIEND, SERVER[0])):
        assert keys.public.decode() in repr(keys) and keys.secret.decode() not in repr(keys)


@pytest.mark.parametrize("wrong", [b"short", "a" * 40, None])
def test_wrong_keys_are_named_but_not_shown(wrong: Any) -> None:
    for build in (
        lambda: ServerKeys(wrong, SERVER[1], []), lambda: ServerKeys(SERVER[0], wrong, []), lambda: ServerKeys(*SERVER, [wrong]),
        lambda: ClientKeys(wrong, FRIEND[1], SERVER[0]), lambda: ClientKeys(FRIEND[0], wrong, SERVER[0]),
        lambda: ClientKeys(*FRIEND, wrong),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="40 bytes of Z85") as caught:
            build()
        assert "short" not in str(caught.value) and "aaaa" not in str(caught.value)
    with pytest.raises(ValueError, match="clients"):
        ServerKeys(*SERVER, FRIEND[0])  # type: ignore[arg-type]
