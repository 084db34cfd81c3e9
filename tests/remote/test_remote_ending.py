"""ZeroMQ may not end: nobody waits for it without end."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvpool.remote import connections


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
    monkeypatch.setattr(connections, "GRACE_S", 0.05)
    kept: list[Any] = []
    monkeypatch.setattr(connections, "_unended", kept)
    stuck: Any = Stuck()
    with caplog.at_level(logging.WARNING):
        connections.end(stuck)
    assert stuck.asked.is_set() and kept == [stuck], "kept, since its destructor would wait"
    assert "did not end" in caplog.text
    stuck.ended.set()


def test_a_context_that_ends_is_not_kept(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(connections, "_unended", kept)
    free: Any = Stuck()
    free.ended.set()
    connections.end(free)
    assert free.asked.is_set() and not kept and not caplog.text


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
