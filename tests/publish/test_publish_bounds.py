"""Peers without a password cost the publisher a bounded number of bytes and descriptors, and hold up nobody, whatever
they leave undone."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import zmq
from router import Router, cached

from engine import Engine
from kvpool.integrations.kv_events import KVEventPublisher
from kvpool.integrations.kv_events.publisher import MESSAGE_BYTES
from kvpool.tools.replay.summary import peak_memory_bytes
from tests.waiting import until

Make = Callable[..., Engine]
Publish = Callable[..., KVEventPublisher]
Route = Callable[..., Router]
BLOCKS, WIDTH = 1024, 64
MESSAGE = 1 << 19
"""More than one message of ``publish_much`` has."""


def publish_much(engine: Engine, publisher: KVEventPublisher, count: int, start: int = 0) -> None:
    """Publish that many messages of some 200 KB each."""
    for i in range(start, start + count):
        sequence = engine.cache.add_sequence(np.arange(i, i + BLOCKS * WIDTH, dtype=np.int32) + (1 << 24))
        engine.cache.commit(sequence)
        engine.cache.release(sequence)
        publisher.flush()


@contextmanager
def peers(kind: int, endpoint: str | None, count: int) -> Iterator[list[zmq.Socket[bytes]]]:
    """Sockets that take next to nothing unless they are read."""
    context: zmq.Context[Any] = zmq.Context()
    sockets = []
    for _ in range(count):
        socket = context.socket(kind)
        socket.rcvhwm, socket.rcvbuf, socket.linger = 1, 4096, 0
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(str(endpoint))
        sockets.append(socket)
    try:
        yield sockets
    finally:
        context.destroy(linger=0)


def numbers_of(asker: zmq.Socket[bytes]) -> list[int]:
    """The numbers of the messages of a replay."""
    numbers: list[int] = []
    while True:
        assert asker.poll(600_000), "a replay that does not end"
        number = int.from_bytes(asker.recv_multipart()[-2], "big", signed=True)
        if number < 0:
            return numbers
        numbers.append(number)


def test_a_client_that_asks_and_never_reads_costs_a_message(make: Make, publish: Publish, route: Route) -> None:
    engine = make(T=WIDTH, P=BLOCKS + 1, event_capacity=4096)
    publisher = publish(engine)
    publish_much(engine, publisher, 40)
    before = peak_memory_bytes() or 0
    with peers(zmq.DEALER, publisher.replay_endpoint, 1) as (stuck,):
        for _ in range(100):
            stuck.send_multipart([b"", bytes(8)])
        until(lambda: publisher.stats().replays_cut == 99, "end of 99 replays")
        publisher.flush()
        assert 0 < publisher.stats().queued_bytes <= MESSAGE
        # 100 copies of 40 messages are more than a gigabyte.
        assert (peak_memory_bytes() or 0) - before < 100 << 20
        late = route(publisher)
        late.catch_up()
        assert late.known == cached(engine.cache), "another client has its own"
        # The last request is answered as far as the client reads.
        numbers = numbers_of(stuck)
        assert numbers[-1] == publisher.stats().messages - 1
    until(lambda: not publisher.stats().queued_bytes, "end of the queue")


def test_many_clients_that_never_read_cost_a_message_each(make: Make, publish: Publish, route: Route) -> None:
    engine = make(T=WIDTH, P=BLOCKS + 1, event_capacity=4096)
    publisher = publish(engine)
    publish_much(engine, publisher, 20)
    with peers(zmq.DEALER, publisher.replay_endpoint, 20) as stuck:
        for client in stuck:
            client.send_multipart([b"", bytes(8)])
        until(lambda: sum(peer.asks for peer in list(publisher._replays._peers)) == 20, "20 replays")
        publisher.flush()
        assert publisher.stats().queued_bytes <= 20 * MESSAGE
        late = route(publisher)
        late.catch_up()
        assert late.known == cached(engine.cache), "a reader gets everything, a message at a time"
        assert all(numbers_of(client) == list(range(publisher.stats().messages)) for client in stuck), (
            "and so does one that begins to read"
        )
    assert publisher.stats().replays_cut == 0


def test_requests_for_nothing_are_bounded_too(make: Make, publish: Publish) -> None:
    """Each is answered with one message without a payload."""
    publisher = publish(make(event_capacity=64))
    with peers(zmq.DEALER, publisher.replay_endpoint, 1) as (stuck,):
        stuck.sndhwm = 0
        for _ in range(20_000):
            stuck.send_multipart([b"", b"\xff" * 8])
        until(lambda: publisher.stats().replays + publisher.stats().replays_cut > 15_000, "answers")
        assert publisher.stats().queued_bytes <= MESSAGE_BYTES


def asked(router: Any, publisher: Any) -> bool:
    """Ask for a replay, anew each time, since a request may be lost with a connection; whether some of it waits."""
    router.ask.send_multipart([b"", bytes(8)])
    end = time.monotonic() + 5
    while not publisher.stats().queued_bytes and time.monotonic() < end:
        time.sleep(0.01)
    return bool(publisher.stats().queued_bytes)


def test_a_slow_reader_whose_messages_are_gone_goes_on_with_a_snapshot(
    make: Make, publish: Publish, route: Route
) -> None:
    engine = make(T=WIDTH, P=BLOCKS + 1, event_capacity=4096)
    publisher = publish(engine, replay_messages=30)
    router = route(publisher)
    publish_much(engine, publisher, 29)
    router.ask.close(linger=0)
    router.ask = router.context.socket(zmq.DEALER)
    router.ask.rcvhwm, router.ask.rcvbuf = 1, 4096
    router.ask.connect(str(publisher.replay_endpoint))
    until(lambda: asked(router, publisher), "replay")
    publisher.flush()
    publish_much(engine, publisher, 40, start=29)
    while True:
        assert router.ask.poll(600_000), "a replay that stops"
        *_, number, payload = router.ask.recv_multipart()
        if not payload:
            break
        received = int.from_bytes(number, "big")
        if received >= router.next:  # a request that was made anew begins at 0 again
            router.apply(received, payload)
    assert publisher.stats().snapshots >= 1
    # How much the system's buffers had taken by then decides where it ended.
    until(lambda: router.catch_up() or router.next == publisher.stats().messages, "the rest")
    assert router.numbers == sorted(set(router.numbers)) and router.next == publisher.stats().messages
    assert router.known == cached(engine.cache)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "ipc://{}/events"])
def test_a_subscriber_that_never_reads_is_disconnected_when_too_much_waits(
    make: Make, publish: Publish, route: Route, endpoint: str, tmp_path: Any
) -> None:
    engine = make(T=WIDTH, P=BLOCKS + 1, event_capacity=4096)
    publisher = publish(engine, endpoint.format(tmp_path), queue_bytes=4 << 20, replay_bytes=1 << 20)
    router = route(publisher)
    with peers(zmq.SUB, publisher.endpoint, 1) as (stuck,):
        until(lambda: len(publisher._subscribers) == 2, "connections")
        most = 0
        for i in range(200):
            publish_much(engine, publisher, 1, start=i)
            router.follow()
            most = max(most, publisher.stats().queued_bytes)
            if publisher.stats().disconnected:
                break
        assert publisher.stats().disconnected == 1
        assert most <= (4 << 20) + 2 * MESSAGE
        until(lambda: publisher.stats().queued_bytes < 2 * MESSAGE, "end of its queue")
        stuck.close(linger=0)
    # On a slow machine the reader has gaps too, which replays fill.
    assert router.known == cached(engine.cache), "who reads misses nothing but what came before it had joined"


@pytest.mark.parametrize("which", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_connections_that_say_nothing_take_few_descriptors_and_not_for_long(
    make: Make, publish: Publish, route: Route, which: str, scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr("kvpool.remote.connections.HANDSHAKE_MS", 1500)
    engine = make(event_capacity=64)
    where = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
    if scheme == "ipc":
        where[which] = f"ipc://{tmp_path}/socket"
    publisher = publish(engine, where["endpoint"], replay_endpoint=where["replay_endpoint"], connections=5)
    address = str(getattr(publisher, which))
    silent = []
    for _ in range(40):
        if scheme == "tcp":
            silent.append(socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=600))
        else:
            silent.append(socket.socket(socket.AF_UNIX))
            silent[-1].settimeout(600)
            silent[-1].connect(address.removeprefix("ipc://"))
    until(lambda: publisher.stats().connections_refused >= 35, "refusals")
    # To whoever connects ZeroMQ says what it speaks; then comes the end, which a socket that goes on never sees.
    assert all(ended(connection) for connection in silent), "all are disconnected in the end"
    router = route(publisher)
    engine.seed(range(9), committed=8)
    router.follow()
    assert router.known == cached(engine.cache)
    for connection in silent:
        connection.close()


def ended(connection: socket.socket) -> bool:
    """Whether the other end closes a connection within 600 s."""
    try:
        while connection.recv(64):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True
