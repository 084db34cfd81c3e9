"""Servers listen on this machine; elsewhere only with CURVE keys, and only to the clients whose keys they know."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from workers import LARGE, SECRET, Make, counted, stored, worker

from kvpool.remote import BlockClient, BlockServer, ClientKeys, RemoteError, RemoteTimeout, ServerKeys, listener
from kvpool.remote.transport import InlineServer
from kvpool.state.hashing import remote_password
from tests.waiting import at_once

SERVER, FRIEND, STRANGER = (zmq.curve_keypair() for _ in range(3))
SERVER_KEYS, FRIEND_KEYS = ServerKeys(*SERVER, [FRIEND[0]]), ClientKeys(*FRIEND, SERVER[0])


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:*",
        "tcp://*:*",
        "tcp://example.com:5555",
        "tcp://[::]:5555",
        "tcp://",
        "inproc://blocks",
        "127.0.0.1:5555",
        "ipc://",
        "ipc:///tmp/a\0b",
        5555,
    ],
)
def test_endpoints_beyond_this_machine_need_keys(make: Make, endpoint: Any) -> None:
    cache = worker(make).cache
    for build in (lambda: BlockServer(cache, endpoint), lambda: BlockClient(endpoint, cache)):
        with pytest.raises(ValueError if isinstance(endpoint, str) else TypeError, match="endpoint: .*"):
            build()


def test_a_child_that_is_forked_while_a_server_starts_keeps_no_lock(tmp_path: Path) -> None:
    with listener.binding(f"ipc://{tmp_path}/s"):
        # What a child has open is the same description of the folder, as with a copy of its number.
        links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        kept = [os.dup(int(link.name)) for link in links if link.is_dir() and link.resolve() == tmp_path]
        assert kept
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for number in (folder, *kept):
        os.close(number)


def test_one_of_two_servers_starts_on_one_path_at_the_same_instant(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has looked whether the path is free before the other listens, unless it waits for it."""
    looked, endpoint, began = threading.Barrier(2), f"ipc://{tmp_path}/s", list[object]()
    check = listener.check_free

    def check_and_wait(endpoint: str) -> None:
        check(endpoint)
        with suppress(threading.BrokenBarrierError):
            looked.wait(0.5)

    monkeypatch.setattr(listener, "check_free", check_and_wait)

    def start(cache: Any) -> None:
        try:
            began.append(BlockServer(cache, endpoint))
        except zmq.ZMQError as error:
            assert error.errno == errno.EADDRINUSE
            began.append(None)

    caches = [worker(make).cache for _ in range(2)]
    at_once(start, caches)
    servers = [server for server in began if isinstance(server, BlockServer)]
    assert len(began) == 2 and len(servers) == 1
    servers[0].close()


def test_clients_with_a_known_key_are_served_everywhere(make: Make) -> None:
    there, here = worker(make, layout=LARGE), worker(make, layout=LARGE)
    tokens = stored(there, 4)
    with BlockServer(there.cache, "tcp://0.0.0.0:*", keys=SERVER_KEYS) as server:
        port = server.endpoint.rpartition(":")[2]
        with BlockClient(f"tcp://127.0.0.1:{port}", here.cache, keys=FRIEND_KEYS) as client:
            assert client.fetch(tokens) == 4
    assert here.add(tokens).cached == 16


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (None, RemoteTimeout),
        (ClientKeys(*STRANGER, SERVER[0]), RemoteError),
        (ClientKeys(*FRIEND, STRANGER[0]), RemoteTimeout),
        (ClientKeys(STRANGER[0], FRIEND[1], SERVER[0]), RemoteTimeout),
    ],
    ids=["no keys", "unknown client", "wrong server", "wrong pair"],
)
def test_others_get_no_answer(make: Make, keys: ClientKeys | None, error: type[Exception]) -> None:
    there, here = worker(make), worker(make)
    tokens = stored(there, 4)
    with BlockServer(there.cache, keys=SERVER_KEYS) as server:
        timeout = 0.4 if error is RemoteTimeout else 600.0  # who is refused learns it at once
        with BlockClient(server.endpoint, here.cache, keys=keys, timeout=timeout) as client:
            with pytest.raises(error):
                client.fetch(tokens)
        assert server.stats().requests == server.stats().refused == 0


def test_a_client_with_a_known_key_and_another_secret_is_refused(make: Make) -> None:
    """CURVE lets it in, and its keys are of a pool with another secret: without the refusal it would ask for what
    nobody can have, and take the answer "not there" for true."""
    there, here = worker(make), worker(make, secret=bytes(32))
    tokens = stored(there, 4)
    with BlockServer(there.cache, keys=SERVER_KEYS) as server:
        with BlockClient(server.endpoint, here.cache, keys=FRIEND_KEYS) as client:
            for call in (lambda: client.fetch(tokens), lambda: client.fetch_blocks(there.keys(tokens))):
                with pytest.raises(RemoteError, match="same secret=") as caught:
                    call()
                assert caught.value.code == "secret"
        assert server.stats().requests == 0 and server.stats().refused == 2


@pytest.mark.parametrize("wrong", [b"short", "a" * 40])
def test_keys_are_not_shown_and_wrong_ones_are_named(wrong: Any) -> None:
    for keys in (SERVER_KEYS, FRIEND_KEYS):
        assert keys.public.decode() in repr(keys) and keys.secret.decode() not in repr(keys)
    for build in (
        lambda: ServerKeys(wrong, SERVER[1], []),
        lambda: ServerKeys(*SERVER, [wrong]),
        lambda: ClientKeys(FRIEND[0], wrong, SERVER[0]),
        lambda: ClientKeys(*FRIEND, wrong),
    ):
        with pytest.raises(ValueError, match="40 bytes of Z85") as caught:
            build()
        assert "short" not in str(caught.value) and "aaaa" not in str(caught.value)
    with pytest.raises(ValueError, match="clients"):
        ServerKeys(*SERVER, FRIEND[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("guard", ["keys", "the secret"])
def test_nobody_is_let_in_when_nobody_is_there_to_ask(make: Make, guard: str, caplog: pytest.LogCaptureFixture) -> None:
    """ZeroMQ finds nobody who decides about peers, and then lets in none, not all."""
    caplog.set_level(logging.DEBUG)
    there, here = worker(make), worker(make)
    tokens = stored(there, 4)
    server_keys, client_keys = (SERVER_KEYS, FRIEND_KEYS) if guard == "keys" else (None, None)
    with BlockServer(there.cache, keys=server_keys) as server:
        with BlockClient(server.endpoint, here.cache, keys=client_keys) as client:
            assert client.fetch(tokens) == 4, "this client has the credentials"
        counted(server, requests=1)
        gone = threading.Event()

        def leave() -> None:
            server._server._zap.unbind("inproc://zeromq.zap.01")
            gone.set()

        server._server.post(leave)
        assert gone.wait(600)
        with BlockClient(server.endpoint, here.cache, keys=client_keys, timeout=0.4) as client:
            with pytest.raises((RemoteTimeout, RemoteError)):
                client.fetch_blocks(here.keys(tokens))
        assert server.stats().requests == 1 and server.stats().malformed == 0
    assert remote_password(SECRET) not in caplog.text


def test_a_peer_without_the_secret_gets_no_further_than_the_listener(make: Make) -> None:
    """It cannot name itself, which could take another's answers or end the process, nor send a message."""
    with BlockServer(worker(make).cache) as server:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.routing_id = b"somebody"
            stranger.connect(server.endpoint)
            stranger.send(b"hello")
            assert not stranger.poll(300)
        assert server.stats() == type(server.stats())(), "nothing came"


def test_a_transport_serves_one_server(make: Make) -> None:
    served, other, transport = worker(make), worker(make), InlineServer()
    with BlockServer(served.cache, transport=transport), pytest.raises(ValueError, match="transport"):
        BlockServer(other.cache, transport=transport)
    BlockServer(other.cache, transport=transport).close()
