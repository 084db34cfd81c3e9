"""Peers without a password cost the publisher a bounded number of bytes and descriptors, and hold up nobody, whatever
they leave undone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import zmq
from raw import connected, is_ended
from router import Publish, Route, Site, cached

from engine import Engine, Make
from kvpool.integrations.kv_events import KVEventPublisher
from kvpool.integrations.kv_events.publisher import MESSAGE_BYTES
from kvpool.tools.replay.summary import peak_memory_bytes
from tests.waiting import until

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
        sockets.append(context.socket(kind))
        sockets[-1].rcvhwm, sockets[-1].rcvbuf, sockets[-1].linger = 1, 4096, 0
        if kind == zmq.SUB:
            sockets[-1].subscribe(b"")
        sockets[-1].connect(str(endpoint))
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


@pytest.mark.parametrize(("clients", "asks"), [(1, 100), (20, 1)])
def test_clients_that_ask_and_never_read_cost_a_message_each(site: Site, clients: int, asks: int) -> None:
    engine, publisher, route = site(T=WIDTH, P=BLOCKS + 1, events=4096)
    publish_much(engine, publisher, 20)
    before = peak_memory_bytes() or 0
    with peers(zmq.DEALER, publisher.replay_endpoint, clients) as stuck:
        for client in stuck * asks:
            client.send_multipart([b"", bytes(8)])
        until(lambda: sum(peer.asks for peer in list(publisher._replays._peers)) == clients, "requests")
        until(lambda: publisher.stats().replays_cut == asks - 1, "end of all replays but the last of each client")
        publisher.flush()
        assert publisher.stats().queued_bytes <= clients * MESSAGE
        # 100 copies of 20 messages are 400 MB.
        assert (peak_memory_bytes() or 0) - before < 100 << 20
        late = route()
        late.catch_up()
        assert late.known == cached(engine.cache), "a reader gets everything, a message at a time"
        # The last request is answered as far as the client reads.
        assert all(numbers_of(client)[-1] == publisher.stats().messages - 1 for client in stuck)
    until(lambda: not publisher.stats().queued_bytes, "end of the queue")


def test_a_subscriber_that_does_not_read_is_counted_and_holds_up_nobody(site: Site) -> None:
    engine, publisher, route = site(P=64, T=64, events=256, hwm=2)
    router = route()

    def overflows() -> int:
        engine.cache.clear()
        sequence = engine.cache.add_sequence(list(range(4000)))
        engine.cache.commit(sequence)
        engine.cache.release(sequence)
        router.follow()
        return publisher.stats().overflows

    with peers(zmq.SUB, publisher.endpoint, 1):
        until(overflows, "overflow")
    assert router.known == cached(engine.cache)


def test_requests_for_nothing_are_bounded_too(site: Site) -> None:
    """Each is answered with one message without a payload."""
    publisher = site()[1]
    with peers(zmq.DEALER, publisher.replay_endpoint, 1) as (stuck,):
        stuck.sndhwm = 0
        for _ in range(4_000):
            stuck.send_multipart([b"", b"\xff" * 8])
        until(lambda: publisher.stats().replays + publisher.stats().replays_cut > 3_000, "answers")
        assert publisher.stats().queued_bytes <= MESSAGE_BYTES


def asked(router: Any, publisher: Any) -> bool:
    """Ask for a replay, anew each time, since a request may be lost with a connection; whether some of it waits."""
    router.ask.send_multipart([b"", bytes(8)])
    end = time.monotonic() + 5
    while not publisher.stats().queued_bytes and time.monotonic() < end:
        time.sleep(0.01)
    return bool(publisher.stats().queued_bytes)


def test_a_slow_reader_whose_messages_are_gone_goes_on_with_a_snapshot(site: Site) -> None:
    engine, publisher, route = site(T=WIDTH, P=BLOCKS + 1, events=4096, replay_messages=30)
    router = route()
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
            # The one that reads may be behind on a slow machine, and be disconnected first: its queue is short.
            if publisher.stats().disconnected and publisher.stats().queued_bytes < 2 * MESSAGE:
                break
        else:
            pytest.fail("what waits for the subscriber that never reads was kept")
        assert most <= (4 << 20) + 2 * MESSAGE
        stuck.close(linger=0)
    router.follow()
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
    silent = [connected(str(getattr(publisher, which))) for _ in range(40)]
    until(lambda: publisher.stats().connections_refused >= 35, "refusals")
    # To whoever connects ZeroMQ says what it speaks; then comes the end, which a socket that goes on never sees.
    assert all(is_ended(connection) for connection in silent), "all are disconnected in the end"
    router = route(publisher)
    engine.seed(range(9), committed=8)
    router.follow()
    assert router.known == cached(engine.cache)
    for connection in silent:
        connection.close()
