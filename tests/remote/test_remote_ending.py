"""ZeroMQ may not end: nobody waits for it without end."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq
from workers import Make, stored, worker

from kvpool.errors import ForkedProcess
from kvpool.integrations.kv_events import KVEventPublisher
from kvpool.remote import BlockClient, BlockServer, block_client, connections
from tests.children import in_child, refuses
from tests.exact import At


class Stuck:
    """A context that does not end before a test says so."""

    def __init__(self) -> None:
        self.asked, self.ended = threading.Event(), threading.Event()

    def destroy(self, linger: int) -> None:
        self.asked.set()
        self.ended.wait()


def test_a_context_that_does_not_end_is_left_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Any] = []
    stuck, free = Stuck(), Stuck()
    free.ended.set()
    monkeypatch.setattr(connections, "_unended", kept)
    connections.end(free)  # type: ignore[arg-type]
    assert free.asked.is_set() and not kept and not caplog.text
    monkeypatch.setattr(connections, "GRACE_S", 0.05)
    connections.end(stuck)  # type: ignore[arg-type]
    assert stuck.asked.is_set() and kept == [stuck], "kept, since its destructor would wait"
    assert "did not end" in caplog.text
    stuck.ended.set()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other instructions look for signals there")
def test_a_signal_handler_that_raises_at_any_instruction_leaves_a_client_that_can_be_called(make: Make) -> None:
    here, errors = worker(make), list[BaseException | None]()
    for step in itertools.count(1):
        with BlockClient("tcp://127.0.0.1:1", here.cache) as client:
            signal = At(step, within=block_client.__file__)
            errors.append(signal.run(client.close))  # Kept with its frames, as by an interactive session.
            client.close()  # Not refused, as from another thread.
        if not signal.reached:
            break
    assert step > 5


def test_a_client_that_nobody_closed_keeps_nobody_waiting() -> None:
    """Its context is collected with a message that no server has taken."""
    context = connections.new_context()
    socket = context.socket(zmq.DEALER)
    assert socket.linger == 0
    socket.connect("tcp://127.0.0.1:1")
    socket.send(b"to nobody")
    socket.close()
    ended = threading.Thread(target=context.term, daemon=True)
    ended.start()
    ended.join(600)
    assert not ended.is_alive()


def test_a_descriptor_that_is_something_else_by_now_is_asked_nothing_and_kept_open_by_nobody(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        flow = connections.Flow(file.fileno(), "ipc:///socket", 1)
        before = len(os.listdir("/proc/self/fd"))
        assert [flow.ask(lambda connection: 1) for _ in range(100)] == [0] * 100
        assert len(os.listdir("/proc/self/fd")) == before
        flow.end()


# ----------------------------------------
# In a child of os.fork() there are no threads and no sockets: what would wait for them raises at once, and the
# parent goes on.


def test_a_server_a_publisher_and_a_client_refuse_a_child_and_serve_their_parent(make: Make) -> None:
    there, here = worker(make, event_capacity=64), worker(make)
    tokens = stored(there, 4)
    publisher, server = KVEventPublisher(there.cache, interval_seconds=0.002), BlockServer(there.cache)
    client = BlockClient(server.endpoint, here.cache)
    assert client.fetch(tokens[:5]) == 1
    publisher.flush()

    def child() -> None:
        refuses(server.close, server.stats, publisher.flush, publisher.stats, publisher.close, client.close)
        refuses(lambda: client.fetch(tokens), lambda: client.fetch_blocks([bytes(16)]))
        for part in (server, publisher, client):
            with pytest.raises(ForkedProcess), part:
                pass

    in_child(child)
    publisher.flush()
    assert client.fetch(tokens) == 3
    client.close()
    server.close()
    publisher.close()


def test_a_child_can_end_as_programs_do(make: Make) -> None:
    """Objects that nobody uses any more are collected there, which must not wait for their threads."""
    there = worker(make, event_capacity=64)
    publisher, server = KVEventPublisher(there.cache, interval_seconds=0.002), BlockServer(there.cache)

    def child() -> None:
        nonlocal publisher, server
        del publisher, server
        import gc

        gc.collect()

    in_child(child)
    publisher.flush()
    server.close()
    publisher.close()
