"""Whoever reaches the sockets of a publisher can say anything. It ends a connection at most. Nobody else notices."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from raw import GREETING, command, connected, frame, goes_on, is_ended, let_in, read, read_frame, ready
from router import Route, Site, cached

from engine import Engine, Make
from kvpool.integrations.kv_events import KVEventPublisher
from kvpool.integrations.kv_events.replay_server import History
from tests.waiting import until

REQUEST = frame(b"", 1) + frame(bytes(8))
FIRST = bytes(8)
"""The number of the first message."""


def replayed(peer: socket.socket) -> list[bytes]:
    """The numbers of the messages of a replay, as a peer reads them frame by frame."""
    numbers, frames = [], []
    while True:
        flags, content = read_frame(peer)
        frames.append(content)
        if not flags & 1:
            if not frames[-1]:
                return numbers
            numbers.append(frames[-2])
            frames = []


def serves(engine: Engine, route: Route) -> bool:
    """Whether a router learns what is cached, from events and from a replay."""
    engine.seed(range(9), committed=8)
    follower, late = route(), route()
    follower.follow()
    late.catch_up()
    return bool(follower.known == late.known == cached(engine.cache))


_NAMES = """
import sys
sys.path[:0] = ["tests", "tests/publish"]
import kvpool
from kvpool.integrations.kv_events import KVEventPublisher
from raw import let_in, read_frame

layout = kvpool.BlockLayout(layers=1, kv_heads=1, head_dim=1, tokens_per_block=1)
with kvpool.KVCacheManager(layout, device_blocks=2, host_blocks=0, event_capacity=4, device="cpu") as cache:
    with KVEventPublisher(cache) as publisher:
        # ZeroMQ gives the names 0x6b8b4567, 0x6b8b4568 and so on: its random numbers have no seed.
        names = [b"\\0" + (0x6B8B4567 + place).to_bytes(4, "big") for place in range(1, 40)]
        takers = [let_in(publisher.replay_endpoint, identity=name) for name in names]
        for _ in range(4):
            client = let_in(publisher.replay_endpoint)
            client.sendall(bytes([1, 0, 0, 8]) + bytes(8))
            read_frame(client)
print("served")
"""


def test_who_takes_the_name_of_the_next_peer_does_not_end_the_process() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _NAMES],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
    )
    assert (run.returncode, run.stdout) == (0, "served\n"), run.stderr


@pytest.mark.parametrize(("which", "kind"), [("endpoint", b"SUB"), ("replay_endpoint", b"DEALER")])
def test_a_message_that_never_ends_ends_its_connection(site: Site, which: str, kind: bytes) -> None:
    engine, publisher, route = site()
    peer = let_in(str(getattr(publisher, which)), kind)
    # Where nobody reads any more, a sender would look again after minutes; the end of the connection comes at once.
    taken = goes_on(peer, 32_768 * frame(b"", 1), 1000, seconds=3)
    assert not taken, "64 MB of empty frames, each of which ZeroMQ would keep"
    assert is_ended(peer)
    assert serves(engine, route)
    assert publisher.stats().talkers == (which == "endpoint")
    peer.close()


@pytest.mark.parametrize(("nbytes", "count"), [(8, 100_000), (200, 10_000), (4_000, 20), (1 << 20, 1)])
def test_a_subscriber_has_few_topics(site: Site, nbytes: int, count: int) -> None:
    engine, publisher, route = site()
    peer = let_in(publisher.endpoint, b"SUB")
    topics = [frame(b"\x01" + place.to_bytes(8, "little") + bytes(nbytes - 8)) for place in range(count)]
    peer.settimeout(600)
    try:
        for topic in topics:
            peer.sendall(topic)
    except OSError:
        pass
    assert is_ended(peer)
    assert serves(engine, route)
    peer.close()


def test_a_subscriber_may_name_the_whole_topic_and_some_others(site: Site) -> None:
    topic = 300 * "kv@"
    publisher = site(topic=topic)[1]
    context: zmq.Context[Any] = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    for name in (topic, *(f"another worker {place}" for place in range(100))):
        subscriber.subscribe(name.encode())
    subscriber.connect(publisher.endpoint)
    until(lambda: len(publisher._subscribers) == 1, "connection")
    time.sleep(0.3)  # as long as the publisher takes to count what was said
    publisher.close()
    assert subscriber.poll(600_000) and subscriber.recv_multipart()[0] == topic.encode()
    assert publisher.stats().talkers == 0
    context.destroy(linger=0)


WORDS = {
    "no ZMTP": b"GET / HTTP/1.1\r\n\r\n",
    "an older ZMTP": b"\xff" + bytes(8) + b"\x7f\x01",
    "another mechanism": GREETING.replace(b"NULL\0", b"PLAIN"),
    "a message before the handshake": GREETING + REQUEST,
    "a long command": GREETING + frame(bytes(1025), 4),
    "a command without end": GREETING + b"\x06" + (1 << 62).to_bytes(8, "big"),
    "an error": GREETING + command(b"ERROR", b"\x04what"),
    "unknown flags": GREETING + ready(b"DEALER") + frame(b"", 8),
    "a long frame": GREETING + ready(b"DEALER") + frame(bytes(65)),
    "a frame of a gigabyte": GREETING + ready(b"DEALER") + b"\x02" + (1 << 30).to_bytes(8, "big"),
    "many frames": GREETING + ready(b"DEALER") + 9 * frame(b"", 1),
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_what_no_client_of_a_replay_says_ends_its_connection(site: Site, words: bytes) -> None:
    engine, publisher, route = site()
    peer = connected(str(publisher.replay_endpoint))
    peer.sendall(words)
    assert is_ended(peer)
    peer.close()
    assert serves(engine, route)


def test_a_client_may_speak_a_byte_at_a_time(site: Site) -> None:
    publisher = site()[1]
    peer = connected(str(publisher.replay_endpoint))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in GREETING + ready(b"REQ", b"a name") + REQUEST:
        peer.sendall(bytes([byte]))
    read(peer, len(GREETING))
    assert b"READY" in read_frame(peer)[1]
    assert replayed(peer) == [FIRST]
    peer.close()


def test_a_client_that_asks_whether_anybody_is_there_gets_an_answer(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.integrations.kv_events.replay_server.SEND_BYTES", 4096)
    publisher = site()[1]
    peer = let_in(str(publisher.replay_endpoint))
    peer.sendall(command(b"PING", b"\x00\x64context"))
    assert read_frame(peer) == (4, b"\x04PONGcontext")
    # A client that asks and does not read gets no more. The next request shows that all have been read.
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    assert goes_on(peer, 1000 * command(b"PING", b"\x00\x64" + bytes(16)), 20)
    peer.sendall(REQUEST)
    until(lambda: any(peer.asks for peer in list(publisher._replays._peers)), "request")
    publisher.flush()
    assert publisher.stats().queued_bytes < 1000
    peer.close()


def test_clients_with_names_and_heartbeats_are_served(site: Site) -> None:
    publisher = site()[1]
    context: zmq.Context[Any] = zmq.Context()
    for kind in (zmq.DEALER, zmq.REQ, zmq.ROUTER):
        client = context.socket(kind)
        client.heartbeat_ivl, client.heartbeat_timeout, client.linger = 5, 600_000, 0
        client.setsockopt(zmq.CONNECT_RID if kind == zmq.ROUTER else zmq.ROUTING_ID, b"there")
        client.connect(str(publisher.replay_endpoint))
        head = {zmq.DEALER: [b""], zmq.REQ: [], zmq.ROUTER: [b"there", b""]}[kind]
        client.send_multipart([*head, bytes(8)])
        assert client.poll(600_000) and client.recv_multipart()[-2] == FIRST
    context.destroy(linger=0)


def test_a_replay_socket_in_a_folder_leaves_nothing_and_takes_the_place_of_what_was_left(
    site: Site, tmp_path: Path
) -> None:
    path = tmp_path / "replay"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    engine, publisher, route = site(replay_endpoint=f"ipc://{path}")
    assert publisher.replay_endpoint == f"ipc://{path}" and stat.S_ISSOCK(path.stat().st_mode)
    assert serves(engine, route)
    publisher.close()
    assert not path.exists()


def test_the_peer_that_was_idle_for_longest_gives_up_its_place(site: Site) -> None:
    publisher = site(connections=3)[1]
    idle = [let_in(str(publisher.replay_endpoint)) for _ in range(3)]
    idle[0].sendall(REQUEST)
    assert replayed(idle[0]) == [FIRST]
    until(lambda: publisher.stats().replays == 1, "end of a replay")
    for gone in (1, 2):
        late = let_in(str(publisher.replay_endpoint))
        late.sendall(REQUEST)
        assert replayed(late) == [FIRST] and is_ended(idle[gone])
        until(lambda gone=gone: publisher.stats().replays == 1 + gone, "end of a replay")  # type: ignore[misc]
        idle.append(late)
    idle[0].sendall(REQUEST)
    assert replayed(idle[0]) == [FIRST], "it is the oldest peer, and has asked since the others came"
    assert publisher.stats().replays_displaced == 2 and not publisher.stats().connections_refused
    for connection in idle:
        connection.close()


def test_who_is_sent_a_replay_keeps_its_place(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = site(connections=2)[1]
    monkeypatch.setattr(History, "covers", lambda *_: time.sleep(0.001) or True)
    monkeypatch.setattr(History, "at", lambda history, place: (place.next, bytes(1 << 20)))  # it never ends
    busy = [let_in(str(publisher.replay_endpoint)) for _ in range(2)]
    for connection in busy:
        connection.sendall(REQUEST)
        read_frame(connection)
    late = connected(str(publisher.replay_endpoint))
    until(lambda: publisher.stats().connections_refused == 1, "refusal")
    assert is_ended(late) and not publisher.stats().replays_displaced
    for connection in (*busy, late):
        connection.close()


def test_a_file_that_is_in_the_way_is_not_removed(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text("content")
    with pytest.raises(zmq.ZMQError):
        KVEventPublisher(make(event_capacity=64).cache, replay_endpoint=f"ipc://{path}")
    assert path.read_text() == "content"


def test_a_replay_that_fails_is_logged_and_its_reader_does_not_wait_for_ever(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    engine, publisher, route = site(events=256, replay_messages=1)
    for first in range(3):
        engine.seed(range(100 * first, 100 * first + 9), committed=8)
        publisher.flush()

    def fails(start: int) -> None:
        raise ValueError("no snapshot today")

    snapshot, publisher._replays._snapshot = publisher._replays._snapshot, fails
    with let_in(publisher.replay_endpoint) as peer:
        peer.sendall(REQUEST)
        assert is_ended(peer)
    assert "a replay has ended" in caplog.text and "no snapshot today" in caplog.text
    publisher._replays._snapshot = snapshot
    assert serves(engine, route)
