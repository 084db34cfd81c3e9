"""Whoever takes the port of a server that has ended learns nothing and can serve nothing. A message that never ends
ends its connection, whoever sends it."""

from __future__ import annotations

import socket
import struct
import threading

import numpy as np
import pytest
import zmq
from relay import Relay
from workers import SECRET, Fake, Make, Raw, counted, expected, packed, stored, wire_key, worker

from kvpool.remote import BlockClient, BlockServer, RemoteError, RemoteTimeout
from kvpool.remote.listener import ClientSecret, ServerSecret
from kvpool.remote.session import MAGIC, VERSION, Blocks, Find, Get, Hello, Received, Session, Welcome
from kvpool.storage import MemoryStore
from kvpool.storage.backends.peer import PeerStore, StoreServer
from kvpool.storage.backends.peer.peer_store import wire_key as store_key
from kvpool.storage.backends.shared_secret import SharedSecret
from kvpool.storage.store import Space
from tests.publish.raw import frame
from tests.waiting import until

KINDS = (Hello, Get, Find)
MOST = 192 << 20
"""More than a peer gets into a connection between two looks at it, and much less than it tries to."""


def serving(session: Session, received: Received) -> list[list[bytes]]:
    """What a server of blocks would say, with blocks that it has invented."""
    request = received.message
    if isinstance(request, Hello):
        return [packed(session, Welcome(request.id, (192,), 64, 8, 1 << 26))]
    count = received.frames[0].nbytes // 16
    return [packed(session, Blocks(request.id, "1" * count), blocks=[bytes(192 * count)])]


class Replaying(Fake):
    """Says again what a real server has said to another client, whatever it is asked."""

    def __init__(self, said: list[list[bytes]], endpoint: str) -> None:
        self.said = said
        super().__init__(b"", serving, KINDS, endpoint)

    def _take(self, client: bytes, frames: list[bytes]) -> None:
        self.send(client, self.said.pop(0) if self.said else [b""])


def recorded(make: Make, tokens: list[int]) -> tuple[str, list[list[bytes]]]:
    """The endpoint of a server that has ended, and what it has said to a client that has fetched these tokens."""
    there = worker(make)
    stored(there, 4)
    with BlockServer(there.cache) as server, Raw(server.endpoint, there, False) as raw:
        said, real = [], raw.receive

        def receive() -> list[bytes]:
            said.append(real())
            return said[-1]

        raw.receive = receive  # type: ignore[method-assign]
        raw.greet()
        raw.enter()
        assert isinstance(raw.ask(Get(2, 0), b"".join(there.keys(tokens))), Blocks)
        return server.endpoint, said


@pytest.mark.parametrize("kind", ["invents", "replays"])
def test_an_impostor_on_the_port_of_a_dead_server_learns_nothing_and_serves_nothing(make: Make, kind: str) -> None:
    tokens = list(range(17))
    endpoint, said = recorded(make, tokens)
    here = worker(make)
    impostor = Replaying(said, endpoint) if kind == "replays" else Fake(b"guessed", serving, KINDS, endpoint)
    with impostor, BlockClient(endpoint, here.cache, name="somebody") as client:
        for call in (lambda: client.fetch(tokens), lambda: client.fetch_blocks(here.keys(tokens))):
            with pytest.raises(RemoteError, match="does not prove that it knows the secret|no answer") as caught:
                call()
            assert caught.value.code in ("impostor", "malformed") and caught.value.blocks == 0
    assert here.reusable(tokens) == 0
    heard = b"".join(impostor.heard)
    keys = [key.tobytes() if hasattr(key, "tobytes") else key for key in here.keys(tokens)]
    for secret in (SECRET, wire_key(here), b"somebody", *keys, here.cache.block_keys([0]).origin[0].encode()):
        assert secret not in heard and secret.hex().encode() not in heard
    # What it has received admits nobody: the token is older than the server that comes next, and is of use once.
    users = [(name, proof) for name, proof in zip(impostor.heard, impostor.heard[1:], strict=False) if b" " in name]
    assert users and not any(ServerSecret(wire_key(here)).admits(pair) for pair in users)


def test_a_token_is_of_use_once_and_only_with_the_secret() -> None:
    listener, tokens = ServerSecret(b"secret"), []
    for key in (b"secret", b"another", b"secret"):
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            ClientSecret(key).apply(dealer)
            tokens.append([dealer.plain_username, dealer.plain_password])
    assert [listener.admits(credentials) for credentials in tokens] == [True, False, True]
    assert (
        not any(listener.admits(credentials) for credentials in tokens)
        and not listener.admits([])
        and not listener.admits([b"1 x", b""])
    )


def test_an_impostor_between_a_client_and_a_server_changes_nothing_unnoticed(make: Make) -> None:
    """A message counts once, in one direction, on one connection, with all its frames."""
    there = worker(make)
    key = there.keys(stored(there, 4))[0]
    with BlockServer(there.cache) as server, Raw(server.endpoint, there) as raw, Raw(server.endpoint, there) as other:
        raw.enter()
        other.enter()
        assert raw.session is not None
        message = packed(raw.session, Get(2, 0), key)
        wrong = [
            (other, message),
            (raw, [message[0], bytes(16)]),
            (raw, [message[0][:-1] + b" ", message[1]]),
            (raw, [message[0]]),
            (raw, [bytes(16) + message[0][16:], message[1]]),
        ]
        for sender, frames in wrong:
            sender.socket.send_multipart(frames)
            assert "without the tag" in sender.answer().message.reason
        for _ in range(2):
            raw.socket.send_multipart(message)
        assert raw.answer().blocks == [expected(there, list(range(5)))[0]]
        assert "without the tag" in raw.answer().message.reason


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (MAGIC + bytes([VERSION + 1]), f"version {VERSION + 1}: spoken here is {VERSION}"),
        (b"another protocol", f"no answer to a greeting of protocol version {VERSION}"),
    ],
)
def test_each_side_learns_that_the_other_is_of_another_version(make: Make, said: bytes, reason: str) -> None:
    here, there = worker(make), worker(make)
    with Replaying([[said]], "tcp://127.0.0.1:*") as server, BlockClient(server.endpoint, here.cache) as client:
        with pytest.raises(RemoteError, match=reason) as caught:
            client.fetch(list(range(9)))
        assert caught.value.code == "malformed"
    with BlockServer(there.cache) as server, Raw(server.endpoint, there, False) as raw:
        raw.socket.send(said + bytes(16))
        assert raw.receive() == [MAGIC + bytes([VERSION])]
        counted(server, malformed=1)


def test_an_impostor_in_the_place_of_a_store_serves_nothing(make: Make) -> None:
    secret, memory = bytes(range(32)), np.zeros((4, 192), np.uint8)
    with StoreServer(MemoryStore(1 << 20), block_bytes=192, secret=secret) as server:
        endpoint = server.endpoint
    with Fake(b"guessed", serving, KINDS, endpoint) as impostor:
        store = PeerStore(endpoint, secret=secret)
        with pytest.raises(PermissionError, match="does not prove that it knows the secret"):
            store.open(Space(bytes(16), memory))
        assert secret not in b"".join(impostor.heard)


# -- messages that never end ---------------------------------------------------------------------------


ENDLESS = {"empty": 32_768 * frame(b"", 1), "full": frame(bytes(10_000), 1)}


def pushed(connection: socket.socket, content: bytes, most: int = 4 * MOST) -> int:
    """How many bytes of a message that never ends are taken before the connection ends."""
    taken = 0
    connection.settimeout(5)
    try:
        while taken < most:
            taken += connection.send(content)
    except OSError:
        pass
    return taken


def plain(endpoint: str, key: bytes) -> socket.socket:
    """A client that speaks ZMTP byte by byte, and has the secret."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        ClientSecret(key).apply(dealer)
        name, proof = dealer.plain_username, dealer.plain_password
    # From here on a server waits for a handshake.
    connection = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), timeout=600)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32))
    greeting = b""
    while len(greeting) < 64:
        greeting += connection.recv(64 - len(greeting))
    connection.sendall(frame(b"\x05HELLO" + bytes([len(name)]) + name + bytes([len(proof)]) + proof, 4))
    kind = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    connection.sendall(frame(b"\x08INITIATE" + kind, 4))
    said = b""
    while b"READY" not in said:
        more = connection.recv(1000)
        assert more, "not let in"
        said += more
    return connection


@pytest.mark.parametrize("content", ENDLESS.values(), ids=ENDLESS)
def test_a_client_that_was_let_in_cannot_fill_the_memory_of_a_server(make: Make, content: bytes) -> None:
    there, here = worker(make), worker(make)
    tokens = stored(there, 4)
    with BlockServer(there.cache) as server:
        endless = plain(server.endpoint, wire_key(there))
        assert pushed(endless, content) < MOST
        until(lambda: server._server.connections.talkers == 1, "end of the connection")
        with BlockClient(server.endpoint, here.cache) as client:
            assert client.fetch(tokens) == 4, "others are served"
        endless.close()


def test_nor_can_it_fill_that_of_a_server_of_stores() -> None:
    secret = bytes(range(32))
    with StoreServer(MemoryStore(1 << 20), block_bytes=4096, secret=secret) as server:
        endless = plain(server.endpoint, store_key(SharedSecret(secret)))
        assert pushed(endless, ENDLESS["full"]) < MOST
        endless.close()


@pytest.mark.parametrize("content", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("state", ["before it has proved anything", "to a client that waits for nothing"])
def test_a_server_cannot_fill_the_memory_of_a_client(make: Make, content: bytes, state: str) -> None:
    """It is cut off, and the client learns that the connection has ended."""
    there, here = worker(make), worker(make)
    tokens = stored(there, 4)
    with BlockServer(there.cache) as server, Injecting(server.endpoint, content) as relay:
        with BlockClient(relay.endpoint, here.cache) as client:
            if "nothing" in state:
                assert client.fetch(tokens) == 4
                relay.most = 4 << 20  # less than a client takes that waits for something
                # What comes before a client has looked at its last answer counts as a part of that answer.
                until(lambda: client._link._flow._noted == client._link._flow.messages, "look at the connection")
                relay.inject.set()
            else:
                relay.inject.set()
                with pytest.raises(RemoteTimeout, match="connection has ended"):
                    client.fetch(tokens)
            relay.ended.wait(600)
            assert relay.taken < MOST
            if client._link is not None:
                flow = client._link._flow
                until(lambda: flow is not None and flow.cut, "end of the connection")


class Injecting(Relay):
    """Says on and on to the client, in the place of the server, once ``inject`` is set and the handshake is over."""

    def __init__(self, endpoint: str, content: bytes) -> None:
        self.inject, self.ended, self.taken, self._content = threading.Event(), threading.Event(), 0, content
        self.most = 4 * MOST
        super().__init__(endpoint)

    def _pump(self, source: socket.socket, target: socket.socket, gated: bool) -> None:
        if not gated:
            return super()._pump(source, target, gated)
        source.settimeout(0.05)
        ready = False
        while not (self.inject.is_set() and ready):
            try:
                data = source.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                return None
            ready |= b"READY" in data
            if not data:
                return None
            target.sendall(data)
        self.taken = pushed(target, self._content, self.most)
        self.ended.set()
        return None
