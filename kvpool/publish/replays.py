"""The replays that are being sent: the place of each client, and the bytes that ZeroMQ holds for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from kvpool.publish.history import History, Place

CLIENT_BYTES, TOTAL_BYTES = 1 << 20, 64 << 20
"""The most bytes that ZeroMQ may hold for one client, and for all. A client for which it holds none gets a message in
any case."""
MESSAGE_BYTES = 512
"""Bytes of a message besides its payload."""
END = (-1).to_bytes(8, "big", signed=True)
"""The number of the message, without a payload, that ends a replay."""


class Sent:
    """The bytes of messages that ZeroMQ holds. ZeroMQ itself counts messages, which can be of any size."""

    def __init__(self) -> None:
        self._messages: deque[tuple[zmq.MessageTracker, int]] = deque()
        self.nbytes = 0

    def add(self, frame: zmq.Frame) -> None:
        nbytes = len(frame) + MESSAGE_BYTES
        self._messages.append((frame.tracker, nbytes))
        self.nbytes += nbytes

    def settle(self) -> int:
        """Forget what ZeroMQ has let go of. Returns how many bytes that were."""
        before = self.nbytes
        while self._messages and self._messages[0][0].done:
            self.nbytes -= self._messages.popleft()[1]
        return before - self.nbytes


def tracked(payload: bytes) -> zmq.Frame:
    """A frame that shares the memory of a payload, and knows when ZeroMQ has let go of it."""
    return zmq.Frame(payload, track=True, copy=False)


@dataclass
class _Replay:
    """``place`` is None once the client has been sent everything."""

    place: Place | None
    sent: Sent = field(default_factory=Sent)


class Replays:
    """The replays of one ROUTER socket, for the thread that owns it. A replay is a place in the history, not a copy of
    it.

    ``snapshot`` is a function that makes a history cover a message number. ``topic`` is the frame before the number of
    each message; None leaves that frame out. A client has one replay: a new request replaces its last one. The three
    counts are: replays that reached their end, replays that ended early, and bytes that ZeroMQ holds.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], history: History, snapshot: Callable[[int], None], topic: bytes | None
    ) -> None:
        self._socket, self._history, self._snapshot, self._topic = socket, history, snapshot, topic
        self._clients: dict[bytes, _Replay] = {}
        self.done = self.cut = self.nbytes = 0

    def __len__(self) -> int:
        """How many clients have not been sent everything, or have not read all of it."""
        return len(self._clients)

    def ask(self, client: bytes, start: int) -> None:
        """Begin to send a client all messages from a number on."""
        replay = self._clients.setdefault(client, _Replay(None))
        self.cut += replay.place is not None
        replay.place = Place(start)

    def go_on(self) -> bool:
        """Send what clients have room for. Returns whether anything was sent. Does not wait."""
        went_on = False
        for client, replay in list(self._clients.items()):
            self.nbytes -= replay.sent.settle()
            try:
                while replay.place is not None and self._has_room(replay.sent):
                    self._tell(client, replay, replay.place)
                    went_on = True
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                replay.place = None
                self.cut += 1
            if replay.place is None and not replay.sent.nbytes:
                del self._clients[client]
        return went_on

    def _has_room(self, sent: Sent) -> bool:
        return not sent.nbytes or sent.nbytes < CLIENT_BYTES and self.nbytes < TOTAL_BYTES

    def _tell(self, client: bytes, replay: _Replay, place: Place) -> None:
        if not self._history.covers(place):
            self._snapshot(place.next)
        told = self._history.at(place)
        number, payload = (END, b"") if told is None else (told[0].to_bytes(8, "big"), told[1])
        frame = tracked(payload)
        parts: list[Any] = [client, b"", number, frame]
        if self._topic is not None:
            parts.insert(2, b"" if told is None else self._topic)
        self._socket.send_multipart(parts, zmq.NOBLOCK)
        self.nbytes += len(frame) + MESSAGE_BYTES
        replay.sent.add(frame)
        if told is None:
            replay.place = None
            self.done += 1
        else:
            place.next += 1
